//! stand-in
use crate::etcd::peers::PeerOptions;
#[derive(Debug, clap::Args)]
pub(super) struct PeerArgs {}
impl PeerArgs {
    pub(super) fn options(&self) -> PeerOptions {
        PeerOptions
    }
}
