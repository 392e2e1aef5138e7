//! deltafold: backup and snapshot compaction for etcd.
//!
//! The map, from the command line down; each room calls only those below it.
//!
//! - [`cli`]: one file a command, its arguments and how its result is printed.
//! - [`controller`]: policies, thresholds and tasks become Jobs; it reads no snapshot.
//! - [`ops`]: one file or folder an operation: options → run → report.
//! - [`backup`]: the snapshots of a prefix: names, catalog, timelines, chains; frame, codec, delta.
//! - [`datadir`]: a member's data directory: membership, WAL, `.snap`.
//! - [`mvcc`]: etcd's store inside bbolt: revisions, records, the fold, HashKV.
//! - [`bolt`]: bbolt's pages: a reader and a writer.
//! - [`store`]: object stores: opening, listing, fetching, publishing, locks.
//! - [`etcd`]: a live etcd: a client, what differs from a backup, peers and their quorum.
//! - [`kubernetes`]: the Kubernetes API: snapshot Leases, a lock by Lease.
//! - [`telemetry`]: logs, progress, metrics, the termination message.
//! - [`base`]: the ground floor, used by every room: cancellation, durations, sizes, limits, temporary files.
//! - [`error`]: the one error type: reasons and exit codes.

#![warn(missing_docs)]
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used))]

pub mod backup;
pub mod base;
pub mod bolt;
pub mod cli;
pub mod controller;
pub mod datadir;
pub mod error;
pub mod etcd;
pub mod kubernetes;
pub mod mvcc;
pub mod ops;
pub mod store;
pub mod telemetry;

pub use error::{Error, Reason, Result};

#[cfg(test)]
#[path = "../tests/support/random.rs"]
mod random;
#[cfg(test)]
use random::{rounds, seed};
