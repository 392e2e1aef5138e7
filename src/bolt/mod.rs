//! bbolt's file format: a reader that trusts nothing and a writer that lays a file out afresh.
//!
//! It knows pages, B+trees and buckets, and nothing of etcd. `mvcc` and `ops` call it. The format
//! is drawn byte by byte in ARCHITECTURE.md; etcd's `go.etcd.io/bbolt` is its source.

pub mod page;
pub mod reader;
pub mod writer;

pub use page::PageId;
pub use reader::{Bucket, Cursor, Database, METAS_END, PageBudget, newest_meta};
pub use writer::{BucketValue, Layout, TreeBuilder, Writer, write_file};
