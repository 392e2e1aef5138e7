//! The controller: policies become CronJobs, crossed thresholds and tasks become Jobs.
//!
//! It never reads a snapshot and never talks to an etcd or a store: Jobs do, and tell by exit code, termination
//! message and Leases. `cli::controller` runs it.

pub mod api;
pub mod jobs;
pub mod manifests;
