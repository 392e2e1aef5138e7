//! What lies below one prefix of a store: which snapshots there are and what they hold, which state is requested, and
//! how that state is opened.
//!
//! It does not fold a state into a database: `fold` does. All functions block: call them outside of async code.
//!
//! - `context`: what every operation needs
//! - `set_aside`: which snapshots do not count, and what is done then
//! - `scan`, `contents`: the names below the prefix, what the snapshots hold
//! - `identity`: which cluster's backup it is
//! - `snapshot_files`: a plain snapshot file instead of a prefix
//! - `side_objects`: the names of what lies beside the snapshots
//! - `timeline_records`: the records that another history begins
//! - `newcomers`: what others have written since a writer looked
//! - `restorable`: the ranges of revisions that can be restored
//! - `select`, `by_time`, `moment`: from a revision or a time to a base and deltas
//! - `open`: the selected full as a database file, the deltas as streams

pub(crate) mod by_time;
pub(crate) mod contents;
mod context;
pub(crate) mod free_space;
pub mod identity;
pub(crate) mod last_saved;
mod moment;
pub(crate) mod newcomers;
pub mod open;
pub mod restorable;
pub mod scan;
pub mod select;
pub mod set_aside;
pub mod side_objects;
pub mod snapshot_files;
pub mod timeline_records;

pub use context::Context;

use crate::base::printable;
use crate::telemetry::logs;

/// Logs a warning, and adds it to the warnings of a report.
pub(crate) fn warn(warnings: &mut Vec<String>, message: impl Into<String>) {
    let message = printable::message(message.into());
    logs::warn(&message);
    warnings.push(message);
}
