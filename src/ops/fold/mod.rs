//! Folds snapshots: select → open → replay → rebuild → publish, a file or folder for each step.
//!
//! `compact` goes through all steps, `restore` through all but the last, and operations that read or verify a
//! backup through the first three. `by_time` and `moment` find the revision of a point in time for `select`.

pub(crate) mod by_time;
mod moment;
pub mod open;
pub(crate) mod publish;
pub(crate) mod rebuild;
mod replay;
pub mod select;

pub use open::Source;
pub use select::{Request, Target};
