//! The flags of commands that decode Kubernetes objects.

use crate::error::Result;
use crate::objects::EncryptionKeys;
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
    /// What the API server's keys begin with, without a slash at the end.
    pub(super) fn etcd_prefix(&self) -> &str {
        self.prefix.etcd_prefix()
    }
}

/// Where an API server has its objects.
#[derive(Debug, Args)]
#[command(next_help_heading = "Kubernetes objects")]
pub(super) struct PrefixArgs {
    /// What the API server's keys begin with: its --etcd-prefix
    #[arg(long, value_name = "PREFIX", default_value = "/registry")]
    etcd_prefix: String,
}

impl PrefixArgs {
    /// What the API server's keys begin with, without a slash at the end.
    pub(super) fn etcd_prefix(&self) -> &str {
        self.etcd_prefix.trim_end_matches('/')
    }
}
