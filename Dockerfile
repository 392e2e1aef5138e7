# The image of deltafold: a static program on an empty base, with CA certificates.
#
#   docker buildx build --platform linux/amd64,linux/arm64 --tag deltafold:0.1.0 .
#
# UNTESTED: the tests have no docker and no registry. They pack an image of the profile release
# with tests/cluster/image, for amd64, and run it on a real Kubernetes (tests/end-to-end).
# Pinned by digest: a moved tag would change the image. Update it by hand.
FROM rust:1.95-bookworm@sha256:6258907abe69656e41cd992e0b705cdcfabcbbe3db374f92ed2d47121282d4a1 AS build
ARG TARGETARCH
WORKDIR /build
COPY . .
# Built on the platform that it is for; the target is named so that the flags are not those of build scripts.
RUN set -eu; \
    case "$TARGETARCH" in \
        amd64) target=x86_64-unknown-linux-gnu ;; \
        arm64) target=aarch64-unknown-linux-gnu ;; \
        *) echo "no target is known for $TARGETARCH" >&2; exit 1 ;; \
    esac; \
    RUSTFLAGS="-C target-feature=+crt-static" \
        cargo rustc --profile dist --locked --target "$target" --bin deltafold -- -C strip=symbols -C link-arg=-Wl,-z,pack-relative-relocs; \
    mkdir -p /image/bin /image/etc/ssl/certs; \
    mkdir -m 1777 /image/tmp; \
    cp "target/$target/dist/deltafold" /image/deltafold; \
    ln -s /deltafold /image/bin/deltafold; \
    cp /etc/ssl/certs/ca-certificates.crt /image/etc/ssl/certs/

FROM scratch
COPY --from=build /image/ /
ENV PATH=/bin
USER 65532:65532
ENTRYPOINT ["/deltafold"]
