//! Times of Kubernetes' objects, and how times are shown to people.
//!
//! It looks at no clock. Every decision of `controller` that reads an object's times calls it.

use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use std::time::Duration;

/// A time with seconds, as most objects have it.
pub fn utc(time: &Time) -> DateTime<Utc> {
    DateTime::from_timestamp_micros(time.0.as_microsecond()).unwrap_or_default()
}

/// A time with microseconds, as Leases have it.
pub fn utc_of_micro(time: &MicroTime) -> DateTime<Utc> {
    DateTime::from_timestamp_micros(time.0.as_microsecond()).unwrap_or_default()
}

/// For people: a message that counted seconds would be another one at every look.
pub fn shown(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// A duration that can be added to times. What no calendar holds is a hundred years.
pub fn delta(duration: Duration) -> TimeDelta {
    let longest = TimeDelta::days(36_500);
    TimeDelta::from_std(duration).map_or(longest, |d| d.min(longest))
}

/// The first of two times, where `None` is never.
pub fn sooner(a: Option<DateTime<Utc>>, b: Option<DateTime<Utc>>) -> Option<DateTime<Utc>> {
    a.into_iter().chain(b).min()
}

/// A later time; the last one that there is where there is none.
pub fn later(time: DateTime<Utc>, by: TimeDelta) -> DateTime<Utc> {
    time.checked_add_signed(by)
        .unwrap_or(DateTime::<Utc>::MAX_UTC)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overflows() {
        let all = delta(Duration::MAX);
        assert_eq!(
            later(DateTime::<Utc>::MAX_UTC, all),
            DateTime::<Utc>::MAX_UTC
        );
        assert!(later(DateTime::UNIX_EPOCH, all) > DateTime::UNIX_EPOCH);
        assert_eq!(shown(DateTime::UNIX_EPOCH), "1970-01-01T00:00:00Z");
    }
}
