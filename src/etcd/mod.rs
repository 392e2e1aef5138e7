//! A live etcd: connections, its members and their quorum, its keys, its events, and the differences from a
//! backup.
//!
//! It knows nothing of the snapshots of a backup. `ops` calls it.

pub mod client;
pub mod cluster;
pub mod connect;
pub mod diff;
pub mod feed;
pub mod peers;
pub mod snapshot;

pub use client::Client;
