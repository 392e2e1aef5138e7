//! The flags of commands that decode Kubernetes objects.

use crate::error::Result;
use crate::objects::EncryptionKeys;
use crate::objects::key::EtcdPrefixes;
use clap::Args;
use std::path::PathBuf;

/// How Kubernetes objects are decoded.
#[derive(Debug, Args)]
#[command(next_help_heading = "Kubernetes objects")]
pub(super) struct ObjectArgs {
    /// Open objects that the API server has encrypted at rest (aescbc, aesgcm, secretbox) with the keys in this file:
    /// that of its --encryption-provider-config
    #[arg(long, hide_env_values = true, value_name = "FILE")]
    encryption_config: Option<PathBuf>,
}

impl ObjectArgs {
    /// Reads the keys.
    ///
    /// # Errors
    /// As [`EncryptionKeys::read`].
    pub(super) fn keys(&self) -> Result<EncryptionKeys> {
        let file = self.encryption_config.as_deref();
        Ok(file
            .map(EncryptionKeys::read)
            .transpose()?
            .unwrap_or_default())
    }
}

/// How Kubernetes objects are named.
#[derive(Debug, Args)]
#[command(next_help_heading = "Kubernetes objects")]
pub(super) struct NameArgs {
    /// Namespace of the objects
    #[arg(short, long, value_name = "NAMESPACE")]
    pub(super) namespace: Option<String>,
    #[command(flatten)]
    prefix: PrefixArgs,
}

impl NameArgs {
    /// What the API servers' keys begin with.
    pub(super) fn etcd_prefixes(&self) -> EtcdPrefixes {
        self.prefix.etcd_prefixes()
    }
}

/// Where an API server has its objects.
#[derive(Debug, Args)]
#[command(next_help_heading = "Kubernetes objects")]
pub(super) struct PrefixArgs {
    /// What the API server's keys begin with: its --etcd-prefix [default: /registry, or what OpenShift has]
    #[arg(long, value_name = "PREFIX")]
    etcd_prefix: Option<String>,
}

impl PrefixArgs {
    /// What the API servers' keys begin with.
    pub(super) fn etcd_prefixes(&self) -> EtcdPrefixes {
        EtcdPrefixes::new(self.etcd_prefix.as_deref())
    }
}
