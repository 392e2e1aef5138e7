//! A live etcd: a client for its keys, what differs from a backup, and whether peers have a quorum.
//!
//! It knows keys, transactions and members, nothing of snapshots. `ops` calls it.

pub mod client;
pub mod cluster;
pub mod connect;
pub mod diff;
pub mod feed;
pub mod peers;
pub mod snapshot;

pub use client::Client;
