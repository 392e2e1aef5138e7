//! What the process tells of itself: logs, progress, metrics, and the memory it has used.

mod connection_limit;
pub mod endpoint;
pub mod logs;
pub mod memory;
pub mod metrics;
pub mod progress;
pub mod termination;
pub mod textfile;
