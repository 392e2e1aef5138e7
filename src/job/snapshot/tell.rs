//! What is told of snapshots as they are saved: metrics, and Leases in Kubernetes.

use super::Written;
use super::queue::Pulse;
use super::saved::FullReason;
use crate::error::Error;
use std::time::{Duration, Instant};

/// Who is told.
#[derive(Default)]
pub struct Tell {}

impl Tell {
    pub(super) fn lock_held(&self, _held: bool) {}

    pub(super) fn failed(&self, _operation: &str, _e: &Error) {}

    pub(super) fn took(&self, _time: Duration) {}

    pub(super) fn pulse(&self, _pulse: &Pulse, _saved: i64, _since: Option<Instant>, _bytes: u64) {}

    pub(super) fn saved(&self, _written: &[Written], _full: Option<FullReason>) {}
}
