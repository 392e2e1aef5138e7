//! Verification: whether a backup by itself is good (`store`), and whether it holds what a live cluster holds
//! (`cluster`). Both may start a real etcd on what they fold (`drill`). They change nothing in the store. `cli::verify` calls them.

pub mod cluster;
pub mod drill;
pub mod store;
