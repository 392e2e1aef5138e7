//! Folds a state of a prefix into a new database: replay → rebuild → publish, a file for each step.
//!
//! `prefix` selects the state and opens it. `compact` takes all steps. `restore` takes all but the last, and writes
//! the database itself. Operations that read or verify a backup take the first.

pub(crate) mod publish;
pub(crate) mod rebuild;
mod replay;
