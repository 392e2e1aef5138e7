//! Opens values that an API server has encrypted at rest, with the keys of its configuration.
//!
//! A value is `k8s:enc:`, the provider with its version and the name of the key, and what that provider sealed. Called
//! by `objects`.
//!
//! Source: apiserver's `pkg/storage/value/encrypt` (`aes`, `secretbox`) and `pkg/apis/apiserver/v1`.

use crate::base::opt::ENCRYPTION_CONFIG;
use crate::error::{Reason, Result};
use aes::cipher::block_padding::Pkcs7;
use aes::cipher::{BlockDecryptMut, KeyIvInit};
use aes::{Aes128, Aes192, Aes256};
use aes_gcm::aead::consts::U12;
use aes_gcm::aead::{Aead, KeyInit, Payload};
use aes_gcm::{Aes128Gcm, Aes256Gcm, AesGcm};
use base64_simd::STANDARD;
use crypto_secretbox::XSalsa20Poly1305;
use serde::Deserialize;
use std::fmt;
use std::fs;
use std::path::Path;

/// The length of the initialization vector of AES-CBC, of the nonce of AES-GCM, and of that of XSalsa20.
const CBC_IV: usize = 16;
const GCM_NONCE: usize = 12;
const SALSA_NONCE: usize = 24;

/// The deepest nesting of a file in flow style: the parser takes a minute for 100,000 levels.
const MAX_NESTING: usize = 32;

/// Returns how deep the brackets and braces of a text are nested.
fn nesting(text: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    for byte in text.bytes() {
        match byte {
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    deepest
}

/// An `EncryptionConfiguration`. Providers without keys here, such as `kms` and `identity`, are ignored.
#[derive(Deserialize)]
struct Configuration {
    kind: String,
    resources: Vec<ResourceConfiguration>,
}

#[derive(Deserialize)]
struct ResourceConfiguration {
    providers: Vec<Providers>,
}

#[derive(Deserialize)]
struct Providers {
    aescbc: Option<NamedKeys>,
    aesgcm: Option<NamedKeys>,
    secretbox: Option<NamedKeys>,
}

#[derive(Deserialize)]
struct NamedKeys {
    keys: Vec<NamedKey>,
}

#[derive(Deserialize)]
struct NamedKey {
    name: String,
    secret: String,
}

#[derive(Debug, Clone, Copy)]
enum Provider {
    AesCbc,
    AesGcm,
    SecretBox,
}

struct Key {
    provider: Provider,
    /// What a value that it opens begins with, after `k8s:enc:`.
    prefix: String,
    secret: Vec<u8>,
}

/// The keys of an API server's encryption at rest.
#[derive(Default)]
pub struct EncryptionKeys(Vec<Key>);

impl fmt::Debug for EncryptionKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

impl EncryptionKeys {
    /// Reads the file of an API server's `--encryption-provider-config`.
    ///
    /// # Errors
    /// Fails with `Configuration` if the file cannot be read, is not such a file, or has a key of a wrong length.
    pub fn read(file: &Path) -> Result<Self> {
        let failed = |e: &dyn fmt::Display| {
            Reason::Configuration.error(format!("{ENCRYPTION_CONFIG} {}: {e}", file.display()))
        };
        let text = fs::read_to_string(file).map_err(|e| failed(&e))?;
        Self::parse(&text).map_err(|e| failed(&e))
    }

    fn parse(text: &str) -> std::result::Result<Self, String> {
        // An error of the parser could quote a key.
        let invalid = "this is not an EncryptionConfiguration of Kubernetes";
        if nesting(text) > MAX_NESTING {
            return Err(invalid.to_owned());
        }
        let configuration: Configuration = yaml_serde::from_str(text).map_err(|_| invalid)?;
        // `EncryptionConfig` is what it was before Kubernetes 1.13, and is still read.
        if !["EncryptionConfiguration", "EncryptionConfig"].contains(&configuration.kind.as_str()) {
            return Err(invalid.to_owned());
        }
        let mut keys = Vec::new();
        for providers in configuration
            .resources
            .into_iter()
            .flat_map(|r| r.providers)
        {
            for (provider, named) in [
                (Provider::AesCbc, providers.aescbc),
                (Provider::AesGcm, providers.aesgcm),
                (Provider::SecretBox, providers.secretbox),
            ] {
                for key in named.into_iter().flat_map(|named| named.keys) {
                    keys.push(Key::new(provider, &key)?);
                }
            }
        }
        Ok(EncryptionKeys(keys))
    }

    /// Opens what follows `k8s:enc:` in the value of a key of etcd. Returns `None` if no key opens it.
    pub(super) fn open(&self, etcd_key: &[u8], encrypted: &[u8]) -> Option<Vec<u8>> {
        self.0.iter().find_map(|key| {
            let sealed = encrypted.strip_prefix(key.prefix.as_bytes())?;
            key.open(etcd_key, sealed)
        })
    }

    /// Whether a key has the name in this value.
    pub(super) fn names(&self, encrypted: &[u8]) -> bool {
        self.0
            .iter()
            .any(|key| encrypted.starts_with(key.prefix.as_bytes()))
    }
}

impl Key {
    fn new(provider: Provider, key: &NamedKey) -> std::result::Result<Self, String> {
        let (name, lengths): (_, &[usize]) = match provider {
            Provider::AesCbc => ("aescbc", &[16, 24, 32]),
            Provider::AesGcm => ("aesgcm", &[16, 24, 32]),
            Provider::SecretBox => ("secretbox", &[32]),
        };
        let secret = STANDARD.decode_to_vec(key.secret.trim());
        let secret = secret.ok().filter(|s| lengths.contains(&s.len()));
        let secret = secret.ok_or_else(|| {
            format!(
                "the secret of the key {} of {name} must be base64 of {lengths:?} bytes",
                key.name
            )
        })?;
        Ok(Key {
            provider,
            prefix: format!("{name}:v1:{}:", key.name),
            secret,
        })
    }

    fn open(&self, etcd_key: &[u8], sealed: &[u8]) -> Option<Vec<u8>> {
        let nonce_len = match self.provider {
            Provider::AesCbc => CBC_IV,
            Provider::AesGcm => GCM_NONCE,
            Provider::SecretBox => SALSA_NONCE,
        };
        let (nonce, msg) = sealed.split_at_checked(nonce_len)?;
        // AES-GCM authenticates the key of etcd, too.
        let aad = etcd_key;
        match (self.provider, self.secret.len()) {
            (Provider::AesCbc, 16) => open_cbc::<cbc::Decryptor<Aes128>>(&self.secret, nonce, msg),
            (Provider::AesCbc, 24) => open_cbc::<cbc::Decryptor<Aes192>>(&self.secret, nonce, msg),
            (Provider::AesCbc, _) => open_cbc::<cbc::Decryptor<Aes256>>(&self.secret, nonce, msg),
            (Provider::AesGcm, 16) => open_aead::<Aes128Gcm>(&self.secret, nonce, msg, aad),
            (Provider::AesGcm, 24) => {
                open_aead::<AesGcm<Aes192, U12>>(&self.secret, nonce, msg, aad)
            }
            (Provider::AesGcm, _) => open_aead::<Aes256Gcm>(&self.secret, nonce, msg, aad),
            (Provider::SecretBox, _) => {
                open_aead::<XSalsa20Poly1305>(&self.secret, nonce, msg, b"")
            }
        }
    }
}

/// Opens AES-CBC with the padding of PKCS #7. Nothing authenticates the value.
fn open_cbc<C: KeyIvInit + BlockDecryptMut>(
    key: &[u8],
    iv: &[u8],
    sealed: &[u8],
) -> Option<Vec<u8>> {
    let cipher = C::new_from_slices(key, iv).ok()?;
    cipher.decrypt_padded_vec_mut::<Pkcs7>(sealed).ok()
}

fn open_aead<C: KeyInit + Aead>(
    key: &[u8],
    nonce: &[u8],
    msg: &[u8],
    aad: &[u8],
) -> Option<Vec<u8>> {
    let cipher = C::new_from_slice(key).ok()?;
    cipher.decrypt(nonce.into(), Payload { msg, aad }).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(secret: &str) -> String {
        let text = format!(
            "kind: EncryptionConfiguration\nresources: [{{providers: [{{secretbox: {{keys: [{{name: k, secret: {secret}}}]}}}}]}}]"
        );
        EncryptionKeys::parse(&text).unwrap_err()
    }

    #[test]
    fn a_nested_configuration_is_refused_at_once() {
        for open in ["{a: ", "[", "- "] {
            let text = format!(
                "kind: EncryptionConfiguration\nresources: {}",
                open.repeat(100_000)
            );
            assert!(EncryptionKeys::parse(&text).is_err());
        }
    }

    #[test]
    fn an_error_names_the_key_and_never_its_secret() {
        let expected = "the secret of the key k of secretbox must be base64 of [32] bytes";
        for secret in ["c2VjcmV0", "s-e-c-r-e-t"] {
            assert_eq!(error(secret), expected);
        }
        let invalid = "this is not an EncryptionConfiguration of Kubernetes";
        for secret in ["{s3cr3t: 1}", "[s3cr3t", "s3cr3t: 2"] {
            assert_eq!(error(secret), invalid);
        }
        let other = "kind: Config\nresources: []";
        assert_eq!(EncryptionKeys::parse(other).unwrap_err(), invalid);
    }
}
