//! deltafold: backup and snapshot compaction for etcd.
//!
//! The map, from the command line down; each room calls only those below it.
//!
//! - [`cli`] — one file a command: its arguments and how its outcome is printed.
//! - [`controller`] — policies, thresholds and tasks become Jobs; it reads no snapshot.
//! - [`job`] — one file for each thing a Job does: options → run → outcome.
//! - [`bucket`] — the snapshots of a prefix: names, catalog, timelines, chains; frame, codec, delta.
//! - [`datadir`] — a member's data directory: membership, WAL, .snap; written and read.
//! - [`mvcc`] — etcd's store inside bbolt: revisions, records, the fold, HashKV.
//! - [`bolt`] — bbolt's pages: a reader and a writer.
//! - [`store`] — object stores: opening, listing, fetching, publishing.
//! - [`etcd`] — a live etcd: a client, what differs from a backup, peers and their quorum.
//! - [`kubernetes`] — Kubernetes' API: Leases that tell of snapshots, a lock by Lease.
//! - [`base`] — the ground floor: the switch that ends waits, reading at an offset, causes of errors, short hashes.
//! - [`protobuf`] — the fields of etcd's records.
//! - [`temp`] — files of the temporary directory, sealed where snapshots are encrypted.
//! - [`telemetry`] — logs, progress, metrics, and what the process has used.
//! - [`tls`] — the provider of TLS cryptography.
//! - [`limits`] — how much a snapshot may hold.
//! - `shorten` — long lists, shortened for people.
//! - `shown` — text from elsewhere, as people are shown it.
//! - [`error`] — the one error: reasons and exit codes.

#![warn(missing_docs)]
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used))]

pub mod base;
pub mod bolt;
pub mod bucket;
pub mod cli;
pub mod controller;
pub mod datadir;
pub mod error;
pub mod etcd;
pub mod job;
pub mod kubernetes;
pub mod limits;
pub mod mvcc;
pub mod protobuf;
mod shorten;
mod shown;
pub mod store;
pub mod telemetry;
pub mod temp;
pub mod tls;

pub use error::{Error, Reason, Result};

#[cfg(test)]
#[path = "../tests/support/random.rs"]
mod random;
#[cfg(test)]
use random::{rounds, seed};
