//! `verify`: whether a backup is good by itself ([`store`]), whether it equals a live cluster ([`cluster`]),
//! and whether a plain snapshot file is good ([`file`]).
//!
//! [`drill`] starts a real etcd on a restored state. Nothing here writes to the store but [`mod@record`], which keeps
//! the last verification of each level.

pub mod cluster;
pub mod drill;
pub mod file;
pub mod record;
pub mod store;
