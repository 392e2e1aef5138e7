//! etcd's multi-version store inside bbolt: revisions, records, what compaction keeps, HashKV, and
//! the fold that turns a full snapshot and the events after it into a new one.
//!
//! It knows nothing of buckets, names or compression. `ops` calls it; `bolt` carries it.

mod change_log;
pub mod fold;
pub mod hash_kv;
pub mod history;
pub mod key_range;
mod keys;
pub mod lease;
pub mod record;
pub mod revision;

pub use fold::{Change, Fold, FoldOptions, Kept, Part};
pub use hash_kv::{HashKv, hash_kv};
pub use history::{Base, KeepHistory};
pub use key_range::KeyRange;
pub use record::KeyValue;
pub use revision::{RecordKey, Revision};
