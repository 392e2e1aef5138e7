//! How long a job may run before it is killed. Its first run tells little: other tests run beside it.

use std::process::ExitStatus;
use std::time::Duration;

/// The time that a job takes, as the last ones have shown it, and how many were killed in time.
pub struct Moments {
    whole: Duration,
    killed: usize,
}

impl Moments {
    /// Begins with the time of one whole run.
    pub fn of(whole: Duration) -> Self {
        Moments { whole, killed: 0 }
    }

    pub fn whole(&self) -> Duration {
        self.whole
    }

    /// Jobs that did not come to their own end.
    pub fn killed(&self) -> usize {
        self.killed
    }

    /// Notes how a job ended that was to be killed. Over many jobs about four in five are killed.
    pub fn note(&mut self, ended: ExitStatus) {
        let was_killed = !ended.success();
        self.killed += usize::from(was_killed);
        self.whole = self.whole.mul_f64(if was_killed { 1.1 } else { 0.7 });
    }
}
