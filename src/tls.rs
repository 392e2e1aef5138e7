//! The one provider of TLS cryptography: ring.
//!
//! `store`, `etcd` and `kubernetes` call [`ensure_provider`] before they make a client.

/// Makes ring the provider of this process, unless the process has one already.
pub fn ensure_provider() {
    // The error says that there is a provider: that of the program that calls this library.
    let _ = rustls::crypto::ring::default_provider().install_default();
}
