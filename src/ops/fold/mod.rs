//! From snapshots to a new one: select → open → replay → rebuild → publish, a file or folder for each step.
//!
//! `compact` takes all of them, `restore` all but the last, and what reads or verifies a backup the first three.

pub(crate) mod by_time;
mod moment;
pub mod open;
pub(crate) mod publish;
pub(crate) mod rebuild;
mod replay;
pub mod select;

pub use open::Source;
pub use select::{Request, Target};
