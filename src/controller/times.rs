//! Conversions and arithmetic of times in Kubernetes objects.
//!
//! Reads no clock.

use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, Time};
use std::time::Duration;

/// Converts the time type of most Kubernetes objects, which has whole seconds.
pub fn utc(time: &Time) -> DateTime<Utc> {
    DateTime::from_timestamp_micros(time.0.as_microsecond()).unwrap_or_default()
}

/// Converts the time type of Leases, which has microseconds.
pub fn utc_of_micro(time: &MicroTime) -> DateTime<Utc> {
    DateTime::from_timestamp_micros(time.0.as_microsecond()).unwrap_or_default()
}

/// Returns when an object was created.
pub fn created(metadata: &ObjectMeta) -> Option<DateTime<Utc>> {
    metadata.creation_timestamp.as_ref().map(utc)
}

/// Formats a time for messages. Messages contain times and not ages: an age would change the message each
/// second, and each change would be a write.
pub fn rfc3339(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// Converts a duration, cut to 100 years, so that it can be added to times.
pub fn time_delta(duration: Duration) -> TimeDelta {
    let longest = TimeDelta::days(36_500);
    TimeDelta::from_std(duration).map_or(longest, |d| d.min(longest))
}

/// Returns the earlier of two times; `None` means never.
pub fn sooner(a: Option<DateTime<Utc>>, b: Option<DateTime<Utc>>) -> Option<DateTime<Utc>> {
    a.into_iter().chain(b).min()
}

/// Adds to a time; returns the last representable time if the sum is beyond it.
pub fn later(time: DateTime<Utc>, by: TimeDelta) -> DateTime<Utc> {
    time.checked_add_signed(by)
        .unwrap_or(DateTime::<Utc>::MAX_UTC)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overflows() {
        let all = time_delta(Duration::MAX);
        assert_eq!(
            later(DateTime::<Utc>::MAX_UTC, all),
            DateTime::<Utc>::MAX_UTC
        );
        assert!(later(DateTime::UNIX_EPOCH, all) > DateTime::UNIX_EPOCH);
        assert_eq!(rfc3339(DateTime::UNIX_EPOCH), "1970-01-01T00:00:00Z");
    }
}
