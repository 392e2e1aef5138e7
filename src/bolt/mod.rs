//! bbolt's file format: a reader that checks every byte it uses, and a writer of new files.
//!
//! It handles pages, B+trees and buckets, and knows nothing of etcd.
//! docs/design/format.md describes the format byte by byte; its source is etcd's `go.etcd.io/bbolt`.

pub mod page;
mod read_ahead;
pub mod reader;
mod tree_page;
pub mod writer;

pub use page::PageId;
pub use reader::{Bucket, Cursor, Database, METAS_END, PageBudget, newest_meta};
pub use tree_page::BucketEntry;
pub use writer::{BucketValue, Layout, TreeBuilder, Writer, write_file};
