//! Chooses how long a job may run before it is killed. The first run alone is a bad estimate: other tests run
//! at the same time.

use std::process::ExitStatus;
use std::time::Duration;

/// The estimated duration of a job, and how many jobs were killed before their end.
pub struct KillTimes {
    whole: Duration,
    killed: usize,
}

impl KillTimes {
    /// Starts with the duration of one whole run.
    pub fn of(whole: Duration) -> Self {
        KillTimes { whole, killed: 0 }
    }

    pub fn whole(&self) -> Duration {
        self.whole
    }

    /// Returns how many jobs were killed before their own end.
    pub fn killed(&self) -> usize {
        self.killed
    }

    /// Adjusts the estimate after a run. In the long run about four in five jobs are killed.
    pub fn note(&mut self, ended: ExitStatus) {
        let was_killed = !ended.success();
        self.killed += usize::from(was_killed);
        self.whole = self.whole.mul_f64(if was_killed { 1.1 } else { 0.7 });
    }
}
