//! The one provider of TLS cryptography: ring.
//!
//! `store`, `etcd` and `kubernetes` call [`ensure_provider`] before they make a client.

/// Makes ring the provider of this process, unless the process has one already.
pub fn ensure_provider() {
    // The error says that there is a provider: that of the program that calls this library.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

/// Whether an error's text says that a certificate has expired, or is not valid yet: in rustls' own words, or by the
/// alert of a server that refuses ours.
pub(crate) fn says_expired(said: &str) -> bool {
    const SIGNS: [&str; 3] = ["certificate expired", "CertificateExpired", "not valid yet"];
    SIGNS.iter().any(|sign| said.contains(sign))
}
