//! etcd's multi-version store inside a bbolt file: revisions, records, compaction, HashKV (etcd's hash over all
//! records up to a revision), and the fold that turns a full snapshot and the events after it into a new full.
//!
//! It knows nothing of stores, snapshot names or compression. It reads databases through `bolt`.

pub mod change;
mod change_log;
pub mod fold;
pub mod hash_kv;
pub mod history;

pub mod key_range;
mod keys;
pub mod lease;
pub mod record;
pub mod revision;

pub use change::Change;
pub use fold::{Fold, FoldOptions, FoldedRecord, PartialFold};
pub use hash_kv::{HashKv, hash_kv};
pub use history::{Base, KeepHistory};
pub use key_range::KeyRange;
pub use record::KeyValue;
pub use revision::{RecordKey, Revision};
