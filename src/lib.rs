//! deltafold: backup and snapshot compaction for etcd.
//!
//! The modules, from the command line down. Each module calls only those below it.
//!
//! - [`cli`]: one file for each command: its arguments and its output.
//! - [`controller`]: the Kubernetes operator: it turns policies, thresholds and tasks into Jobs, and reads no
//!   snapshots.
//! - [`explore`]: a page for a browser that shows a backup at any moment.
//! - [`ops`]: one file or folder for each operation: options → run → report.
//! - [`fold`]: a state of a prefix becomes a new database.
//! - [`prefix`]: what lies below one prefix: its snapshots, and the state that is asked for, opened.
//! - [`backup`]: the snapshots below a prefix: names, catalog, timelines, chains, file formats.
//! - [`objects`]: what Kubernetes stores in etcd: names in keys, protobuf, JSON, CBOR.
//! - [`etcd`]: a live etcd: the client, its members and their quorum, its events, comparison with a backup.
//! - [`kubernetes`]: the Kubernetes API: the client, snapshot Leases, a lock by Lease.
//! - [`mvcc`]: etcd's multi-version store: revisions, records, the fold, HashKV.
//! - [`bolt`]: bbolt files: a reader and a writer.
//! - [`datadir`]: the data directory of an etcd member: membership, WAL, `.snap` file.
//! - [`store`]: object stores: opening, listing, fetching, publishing, locks.
//! - [`telemetry`]: logs, progress, metrics, the termination message.
//! - [`base`]: small general-purpose modules: cancellation, durations, sizes, limits, temporary files.
//! - [`error`]: the error type with its reasons and exit codes.

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
pub mod explore;
pub mod fold;
pub mod kubernetes;
pub mod mvcc;
pub mod objects;
pub mod ops;
pub mod prefix;
pub mod store;
pub mod telemetry;

pub use error::{Error, Reason, Result};

#[cfg(test)]
#[path = "../tests/support/random.rs"]
mod random;
#[cfg(test)]
use random::{rounds, seed};
