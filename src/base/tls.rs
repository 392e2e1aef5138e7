//! Installs ring as the provider of TLS cryptography, and recognizes expired certificates.
//!
//! `store`, `etcd` and `kubernetes` call [`ensure_provider`] before they create a client.

/// Makes ring the provider of this process, unless the process already has one.
pub fn ensure_provider() {
    // It fails if the program that uses this library has installed a provider; that one stays.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// Whether the text of an error says that a certificate has expired or is not valid yet. For the server's
/// certificate, rustls says so; for ours, the server says so in a TLS alert.
pub(crate) fn says_expired(error: &str) -> bool {
    const SIGNS: [&str; 3] = ["certificate expired", "CertificateExpired", "not valid yet"];
    SIGNS.iter().any(|sign| error.contains(sign))
}
