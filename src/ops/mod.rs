//! The operations, one file or folder each: options → run → report.
//!
//! An operation does the input and output around the decisions of `backup` and `mvcc`. It does not parse
//! arguments or print. `prefix` opens the state, `fold` makes a database of it. All functions block: call them
//! outside of async code.

pub mod apply;
pub mod compact;
pub mod copy;
pub mod findings;
pub mod gc;
pub mod list;
pub mod live_follower;
pub mod maintain;
pub mod options;
pub mod plain_target;
pub mod read;
pub mod recover;
pub mod report;
pub mod restore;
pub mod schedule;
pub mod snapshot;
pub mod snapshot_leases;
pub mod status;
pub mod store_check;
pub mod verify;
