//! What the process tells of itself: logs, progress, and the memory it has used.

pub mod logs;
pub mod memory;
pub mod progress;
