//! The one provider of TLS cryptography: ring.
//!
//! It sets up no connection. Whatever makes a client calls it first: store, etcd and kubernetes.

/// Makes ring the provider of this process, unless the process has one already.
pub fn ensure_provider() {
    // The error says that there is a provider: that of the program that calls this library.
    let _ = rustls::crypto::ring::default_provider().install_default();
}
