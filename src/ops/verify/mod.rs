//! `verify`: whether a backup is good by itself ([`store`]), and whether it equals a live cluster
//! ([`cluster`]).
//!
//! [`drill`] starts a real etcd on a restored state. Nothing here writes to the store. Called by
//! `cli::verify`.

pub mod cluster;
pub mod drill;
pub mod store;
