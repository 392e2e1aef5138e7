//! A live etcd: connections, its members and their quorum, its keys, its events, and the differences from a
//! backup.
//!
//! It does not know how a backup is stored: `snapshot` only takes a snapshot from a live etcd.

pub mod client;
pub mod cluster;
pub mod connect;
pub mod diff;
pub mod feed;
pub mod peers;
pub mod snapshot;

pub use client::Client;
