//! The revisions of single keys of a live etcd.
//!
//! Called by `ops::snapshot`, which compares them with those of a backup.

use super::Cluster;
use crate::error::Result;
use crate::etcd::connect::{AttemptError, Connector, Streams};
use etcd_client::GetOptions;

/// When a key was created and last changed, and how often it was put since.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyRevisions {
    /// The revision of the put that created the key.
    pub create: i64,
    /// The revision of the last put.
    pub modified: i64,
    /// The number of puts since the creation.
    pub version: i64,
}

impl Cluster {
    /// Reads the revisions of keys one by one, without their values; `None` for a key that does not exist.
    ///
    /// # Errors
    /// `PermissionDenied`, `Unauthenticated`, `EtcdUnreachable`, `NoQuorum`, `Terminated`.
    pub fn key_revisions(
        &self,
        connector: &Connector,
        keys: &[Vec<u8>],
    ) -> Result<Vec<Option<KeyRevisions>>> {
        let chosen = self.choose(&[]);
        let endpoint = chosen.iter().find_map(|m| m.endpoint.as_deref());
        let endpoint = endpoint.ok_or_else(|| self.no_healthy_member())?;
        let client = connector
            .dial(endpoint, Streams::Plain)
            .map_err(AttemptError::into_error)?;
        let mut revisions = Vec::with_capacity(keys.len());
        for key in keys {
            let mut kv = client.kv_client();
            let options = GetOptions::new().with_keys_only();
            let response = connector
                .ask(
                    "read a key",
                    endpoint,
                    kv.get(key.as_slice(), Some(options)),
                )
                .map_err(AttemptError::into_error)?;
            revisions.push(response.kvs().first().map(|kv| KeyRevisions {
                create: kv.create_revision(),
                modified: kv.mod_revision(),
                version: kv.version(),
            }));
        }
        Ok(revisions)
    }
}
