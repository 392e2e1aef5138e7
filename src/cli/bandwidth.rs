//! `--bandwidth`: the flag, and the limits of reads and writes that it sets.
//!
//! `snapshot` and `copy` use it.

use crate::base::byte_size;
use crate::store::{Bandwidth, Store};
use clap::Args;
use std::num::NonZeroU64;
use tokio::runtime::Handle;

/// The bandwidth limit of an operation.
#[derive(Debug, Args)]
#[command(next_help_heading = "Resources")]
pub(super) struct BandwidthArgs {
    /// Limit reads from etcd, reads from the store and writes to it to this many bytes per second each, such
    /// as 500KiB or 20MiB [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = parse_bandwidth)]
    bandwidth: Option<NonZeroU64>,
}

fn parse_bandwidth(s: &str) -> Result<NonZeroU64, String> {
    NonZeroU64::new(byte_size::parse(s)?)
        .ok_or_else(|| "it must be greater than 0; omit the flag for no limit".to_owned())
}

impl BandwidthArgs {
    /// A new limit for one direction, to be shared by all its transfers.
    pub(super) fn limit(&self) -> Option<Bandwidth> {
        let limit = self.bandwidth?;
        Some(Bandwidth::new(limit, Handle::current()))
    }

    /// The store with a limit for each direction.
    pub(super) fn limited(&self, store: Store) -> Store {
        match (self.limit(), self.limit()) {
            (Some(read), Some(write)) => store.with_bandwidth(read, write),
            _ => store,
        }
    }
}
