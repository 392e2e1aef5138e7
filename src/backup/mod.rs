//! The snapshots of one store prefix: their names, their bytes, and how they hang together.
//!
//! `name`, `catalog`, `chain`, `intervals`, `timeline` and `trust` decide from data alone; `codec`, `frame`, `full`, `delta` and
//! `survey` read contents from any `Read`. None of them speaks to a store; `ops` does.

pub mod catalog;
pub mod chain;
pub mod codec;
pub mod delta;
pub mod events;
pub mod frame;
pub mod full;
mod intervals;
pub mod name;
pub mod retention;
pub mod survey;
pub mod timeline;
pub mod trust;

pub use catalog::{Catalog, Listed, Snapshot};
pub use codec::Compression;
pub use name::{Kind, SnapshotName};
