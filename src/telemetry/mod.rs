//! What the process tells of itself: logs, progress, metrics, and the memory it has used.

mod guard;
pub mod logs;
pub mod memory;
pub mod metrics;
pub mod progress;
pub mod serve;
pub mod termination;
pub mod textfile;
