//! TLS: ring as the provider of cryptography, which server certificates are accepted, and what errors say about them.
//!
//! `store`, `etcd` and `kubernetes` call [`ensure_provider`] before they create a client.

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use std::sync::Arc;

/// Makes ring the provider of this process, unless the process already has one.
pub fn ensure_provider() {
    // It fails if the program that uses this library has installed a provider; that one stays.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// Reads all certificates of a PEM file.
///
/// # Errors
/// Fails if one cannot be read.
pub(crate) fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, pem::Error> {
    CertificateDer::pem_slice_iter(pem).collect()
}

/// The certificate of a client with its chain, and its key.
pub(crate) type ClientIdentity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// Returns a configuration that trusts the given authorities, and the system's if `with_system`. A server's certificate
/// that is itself one of the given ones is accepted, also if it is that of an authority, as `openssl req -x509` makes it.
///
/// # Errors
/// Says which certificates or keys cannot be used.
pub(crate) fn client_config(
    given: Vec<CertificateDer<'static>>,
    with_system: bool,
    identity: Option<ClientIdentity>,
) -> Result<ClientConfig, Error> {
    ensure_provider();
    let mut roots = RootCertStore::empty();
    for certificate in &given {
        roots.add(certificate.clone())?;
    }
    if with_system {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    }
    if roots.is_empty() {
        return Err(Error::General(
            "no certificate authority is trusted: the system has none, and none is given"
                .to_owned(),
        ));
    }
    let inner = WebPkiServerVerifier::builder(Arc::new(roots)).build();
    let verifier = Arc::new(GivenOrVerified {
        given,
        inner: inner.map_err(|e| Error::General(e.to_string()))?,
    });
    let config = ClientConfig::builder()
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    match identity {
        Some((chain, key)) => config.with_client_auth_cert(chain, key),
        None => Ok(config.with_no_client_auth()),
    }
}

/// Accepts what webpki accepts, and a given certificate that it refuses only because it is that of an authority.
#[derive(Debug)]
struct GivenOrVerified {
    given: Vec<CertificateDer<'static>>,
    inner: Arc<WebPkiServerVerifier>,
}

impl ServerCertVerifier for GivenOrVerified {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified = self.inner.verify_server_cert(
            end_entity,
            intermediates,
            server_name,
            ocsp_response,
            now,
        );
        match verified {
            // webpki has checked the dates before.
            Err(e) if e.to_string().contains(CA_AS_SERVER) && self.given.contains(end_entity) => {
                let parsed = ParsedCertificate::try_from(end_entity)?;
                rustls::client::verify_server_name(&parsed, server_name)?;
                Ok(ServerCertVerified::assertion())
            }
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner
            .verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner
            .verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

/// What webpki says of an authority's certificate that a server uses.
const CA_AS_SERVER: &str = "CaUsedAsEndEntity";

/// Whether the text of an error says that a certificate has expired or is not valid yet. For the server's
/// certificate, rustls says so; for ours, the server says so in a TLS alert.
pub(crate) fn says_expired(error: &str) -> bool {
    const SIGNS: [&str; 3] = ["certificate expired", "CertificateExpired", "not valid yet"];
    SIGNS.iter().any(|sign| error.contains(sign))
}

/// Whether the text of an error is about the certificate of a server, or about TLS without a way in common. No retry
/// helps.
pub(crate) fn is_final(error: &str) -> bool {
    ["invalid peer certificate", HANDSHAKE]
        .iter()
        .any(|sign| error.contains(sign))
}

/// What a server says that has no signature algorithm or cipher in common with us.
const HANDSHAKE: &str = "HandshakeFailure";

/// Returns what to do about a certificate, unless it depends on how certificates are given.
pub(crate) fn advice(error: &str) -> Option<&'static str> {
    if error.contains(CA_AS_SERVER) {
        Some(
            "the server's certificate is that of an authority: trust this very certificate, or give the server another one",
        )
    } else if error.contains(HANDSHAKE) {
        Some(
            "the server accepts none of deltafold's signature algorithms and ciphers: certificates with a P-521 key, as etcd's --auto-tls makes them, are not supported: give the server one with a P-256, P-384 or RSA key",
        )
    } else {
        None
    }
}
