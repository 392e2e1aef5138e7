//! Logs, progress, metrics, the termination message, and the memory use of the process.

pub(crate) mod connection_limit;
pub mod endpoint;
pub mod live;
pub mod logs;
pub mod memory;
pub mod metrics;
pub mod progress;
pub mod termination;
pub mod textfile;
