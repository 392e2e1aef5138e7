//! How long a job may run before it is killed. Its first run tells little: other tests run beside it.

use std::time::Duration;

/// The time that a job takes, as the last ones have shown it.
pub struct Moments {
    whole: Duration,
}

impl Moments {
    /// Begins with the time of one whole run.
    pub fn of(whole: Duration) -> Self {
        Moments { whole }
    }

    pub fn whole(&self) -> Duration {
        self.whole
    }

    /// Notes how a job ended that was to be killed. Over many jobs about four in five are killed.
    pub fn note(&mut self, was_killed: bool) {
        self.whole = self.whole.mul_f64(if was_killed { 1.1 } else { 0.7 });
    }
}
