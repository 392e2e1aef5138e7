//! Exponential back-off: each pause is twice as long as the one before.

use backon::ExponentialBuilder;
pub use backon::{BackoffBuilder, Retryable};
use std::time::Duration;

/// The iterator over the pauses of a back-off.
pub type Pauses = <ExponentialBuilder as BackoffBuilder>::Backoff;

/// Returns a back-off of `retries` pauses that double from `first` up to `longest`.
pub fn backoff(first: Duration, longest: Duration, retries: usize) -> ExponentialBuilder {
    ExponentialBuilder::new()
        .with_factor(2.0)
        .with_min_delay(first)
        .with_max_delay(longest)
        .with_max_times(retries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let ms = Duration::from_millis;
        let pauses = backoff(ms(100), ms(500), 5).build();
        let pauses: Vec<_> = pauses.map(|p| p.as_millis()).collect();
        assert_eq!(pauses, [100, 200, 400, 500, 500]);
    }
}
