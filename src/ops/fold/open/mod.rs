//! Open: the full that was selected, as a database file, and its deltas, as streams.
//!
//! Snapshots are decrypted, decompressed and read ahead. A full of a store is copied into a file of the temporary
//! directory; a plain snapshot file is read as it lies if it is neither packed nor encrypted.

mod ahead;
mod database_file;
mod in_place;
mod location;
mod plain_snapshot;
pub(super) mod read_snapshot;
pub(super) mod source;

pub use database_file::Spool;
pub use location::Backup;
pub use plain_snapshot::Plain;
pub use read_snapshot::Payload;
pub(crate) use read_snapshot::Reading;
pub use source::Source;
