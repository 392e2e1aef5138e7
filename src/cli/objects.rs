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
