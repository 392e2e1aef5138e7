//! Folds a state of a prefix into a new database: replay → rebuild → publish, a file for each step.
//!
//! `prefix` selects the state and opens it. `compact` goes through all steps, `restore` through all but the last, and
//! operations that read or verify a backup through the first.

pub(crate) mod publish;
pub(crate) mod rebuild;
mod replay;
