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

use crate::error::Error;
use serde::Serialize;

/// The result of a verification in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Verdict {
    /// No error was found in the backup
    Verified,
    /// Every member that could be compared equals the backup
    Equal,
    /// At least one error was found
    Failed,
}

impl Verdict {
    /// The verdict on a backup in which this failure was found, if any.
    fn of(failure: Option<&Error>) -> Self {
        match failure {
            None => Verdict::Verified,
            Some(_) => Verdict::Failed,
        }
    }
}
