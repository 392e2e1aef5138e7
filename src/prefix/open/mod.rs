//! Open: opens the selected full as a database file, and its deltas as streams.
//!
//! Snapshots are fetched ahead, decrypted and decompressed. A full snapshot from a store is copied to the
//! temporary directory. A plain snapshot file is read in place if it is neither compressed nor encrypted. No
//! events are applied here; `replay` does that.

mod ahead;
mod database_file;
mod in_place;
mod location;
pub(crate) mod plain_snapshot;
pub(crate) mod read_snapshot;
pub(crate) mod state;

pub use database_file::DatabaseFile;
pub use location::BackupLocation;
pub use plain_snapshot::{FilePlace, PlainSnapshot};
pub use read_snapshot::Payload;
pub(crate) use read_snapshot::SnapshotReader;
pub use state::State;
