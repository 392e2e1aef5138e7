//! How other members of the cluster are asked: the flags, named as etcd's own.

use crate::etcd::peers::PeerOptions;
use clap::Args;
use std::path::PathBuf;

/// How the other members are asked whether they have a quorum.
#[derive(Debug, Args)]
#[command(next_help_heading = "Peers")]
pub(super) struct PeerArgs {
    /// PEM of the authorities of the other members' certificates [default: the system's]
    #[arg(long, value_name = "FILE")]
    peer_trusted_ca_file: Option<PathBuf>,
    /// PEM of a certificate that the other members take
    #[arg(long, value_name = "FILE", requires = "peer_key_file")]
    peer_cert_file: Option<PathBuf>,
    /// PEM of its key
    #[arg(long, value_name = "FILE", requires = "peer_cert_file")]
    peer_key_file: Option<PathBuf>,
}

impl PeerArgs {
    pub(super) fn options(&self) -> PeerOptions {
        PeerOptions {
            trusted_ca_file: self.peer_trusted_ca_file.clone(),
            cert_file: self.peer_cert_file.clone(),
            key_file: self.peer_key_file.clone(),
        }
    }
}
