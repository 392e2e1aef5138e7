//! How much may be read and written in a second: the flag, and the limits made of it.

use crate::base::byte_size;
use crate::store::{Bandwidth, Store};
use clap::Args;
use std::num::NonZeroU64;
use tokio::runtime::Handle;

/// How fast it may go.
#[derive(Debug, Args)]
#[command(next_help_heading = "Means")]
pub(super) struct BandwidthArgs {
    /// The most bytes a second that are read from etcd, read from the store, and written to it, each
    /// (500KiB, 20MiB) [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = parse_bandwidth)]
    bandwidth: Option<NonZeroU64>,
}

fn parse_bandwidth(s: &str) -> Result<NonZeroU64, String> {
    NonZeroU64::new(byte_size::parse(s)?)
        .ok_or_else(|| "nothing would ever be done; leave the flag out for no limit".to_owned())
}

impl BandwidthArgs {
    /// A limit for one direction, to be shared by all that goes that way.
    pub(super) fn limit(&self) -> Option<Bandwidth> {
        let limit = self.bandwidth?;
        Some(Bandwidth::new(limit, Handle::current()))
    }

    /// The same store, behind a limit for each direction.
    pub(super) fn limited(&self, store: Store) -> Store {
        match (self.limit(), self.limit()) {
            (Some(read), Some(write)) => store.with_bandwidth(read, write),
            _ => store,
        }
    }
}
