#!/usr/bin/python3
"""mkimage.py NAME:TAG OUT.tar [--entrypoint PATH] [--user UID:GID] PATH=FILE ... PATH=->TARGET ...

Packs files into an image of one layer, as a tar of the OCI image layout, which `ctr images import` and
`podman load` read. Needs no registry and no docker. /tmp is there, for everybody. The same files make
the same bytes.
"""

import hashlib
import io
import json
import os
import sys
import tarfile

LAYER = "application/vnd.oci.image.layer.v1.tar"
CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
PLATFORM = {"architecture": "amd64", "os": "linux"}


def layer(files):
    folders = {"tmp"}
    for path in files:
        while path := os.path.dirname(path):
            folders.add(path)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for folder in sorted(folders):
            info = tarfile.TarInfo(folder + "/")
            info.type = tarfile.DIRTYPE
            info.mode = 0o1777 if folder == "tmp" else 0o755
            tar.addfile(info)
        for path, source in sorted(files.items()):
            info = tarfile.TarInfo(path)
            if source.startswith("->"):
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, source[2:], 0o777
                tar.addfile(info)
                continue
            with open(source, "rb") as file:
                content = file.read()
            info.size = len(content)
            info.mode = 0o755 if os.access(source, os.X_OK) else 0o644
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def main(name, out, *arguments):
    settings, files = {"Env": ["PATH=/bin"]}, {}
    arguments = iter(arguments)
    for argument in arguments:
        if argument == "--entrypoint":
            settings["Entrypoint"] = [next(arguments)]
        elif argument == "--user":
            settings["User"] = next(arguments)
        else:
            path, source = argument.split("=", 1)
            files[path.lstrip("/")] = source

    blobs = {}

    def blob(content, kind):
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        return {"mediaType": kind, "digest": "sha256:" + digest, "size": len(content)}

    only = blob(layer(files), LAYER)
    config = {**PLATFORM, "config": settings, "rootfs": {"type": "layers", "diff_ids": [only["digest"]]}}
    config = blob(json.dumps(config).encode(), CONFIG)
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [only]}
    manifest = blob(json.dumps(manifest).encode(), MANIFEST)
    manifest["platform"] = PLATFORM
    manifest["annotations"] = {
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": name.rsplit(":", 1)[1],
    }
    index = {"schemaVersion": 2, "manifests": [manifest]}

    with tarfile.open(out, "w", format=tarfile.USTAR_FORMAT) as tar:

        def put(path, content):
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(content), 0o644
            tar.addfile(info, io.BytesIO(content))

        put("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        put("index.json", json.dumps(index).encode())
        for digest, content in blobs.items():
            put("blobs/sha256/" + digest, content)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
