//! Open: the full that was selected, as a database file, and its deltas, as streams.
//!
//! Snapshots are decrypted, decompressed and read ahead. A full of a store is copied into a file of the temporary
//! directory; a plain snapshot file is read as it lies if it is neither packed nor encrypted.

mod ahead;
mod backup;
mod in_place;
mod plain;
pub(super) mod reading;
pub(super) mod source;
mod spool;

pub use backup::Backup;
pub use plain::Plain;
pub use reading::Payload;
pub(crate) use reading::Reading;
pub use source::Source;
pub use spool::Spool;
