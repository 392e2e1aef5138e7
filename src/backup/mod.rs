//! The snapshots below one store prefix: their names, their bytes, and how they form chains and timelines.
//!
//! `name`, `file_name`, `catalog`, `chain`, `intervals`, `retention`, `timeline` and `trust` decide from data alone.
//! `codec`, `delta`, `events`, `frame`, `full` and `survey` read and write contents through any `Read` and
//! `Write`. None of them makes a request to a store: `ops` does, and calls them.

pub mod catalog;
pub mod chain;
pub mod codec;
pub mod delta;
pub mod events;
pub mod file_name;
pub mod frame;
pub mod full;
mod intervals;
pub mod name;
pub mod retention;
pub mod survey;
pub mod timeline;
pub mod trust;

pub use catalog::{Catalog, ListedObject, Snapshot};
pub use codec::Compression;
pub use name::{Kind, SnapshotName};
