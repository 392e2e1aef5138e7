//! What a person at a terminal reads of a follower: its plan, the snapshots, what is not saved yet.
//!
//! Pure functions.

use super::FollowOptions;
use crate::base::duration;
use crate::base::plural::count;
use crate::base::time::{Zone, show};
use crate::ops::snapshot::NewSnapshot;
use chrono::{DateTime, Utc};
use indicatif::HumanBytes;
use std::time::Duration;

/// The plan of a follower: where it saves, and when.
pub(super) fn plan(store: &str, options: &FollowOptions, now: DateTime<Utc>) -> Vec<String> {
    let next = options.full_schedule.as_ref();
    let next = next.and_then(|schedule| schedule.next_after(now));
    let mut fulls = match next {
        Some(next) => format!("  fulls     next at {}", show(next, Zone::local())),
        None => "  fulls     none is scheduled".to_owned(),
    };
    if !options.max_full_age.is_zero() {
        fulls += &format!(", or after {}", duration::whole(options.max_full_age));
    }
    let (period, bytes) = (options.pace.period(), HumanBytes(options.pace.bytes()));
    let events = count(options.delta_events, "event");
    let period = duration::whole(period);
    vec![
        format!("saving to {store}"),
        fulls,
        format!("  deltas    after {period}, {bytes} or {events}"),
        "  stop      Ctrl-C saves the last delta and ends".to_owned(),
    ]
}

/// A snapshot that was saved.
pub(super) fn saved(snapshot: &NewSnapshot) -> String {
    let (name, bytes) = (&snapshot.name, HumanBytes(snapshot.bytes));
    let revisions = if name.is_full() {
        format!("revision {}", name.last)
    } else {
        format!("revisions {} to {}", name.start, name.last)
    };
    format!("saved {name}: {revisions}, {bytes}")
}

/// What is not saved yet. `oldest` is the age of the oldest event that is not saved.
pub(super) fn unsaved(last_saved: i64, events: u64, oldest: Option<Duration>) -> String {
    match (oldest, events) {
        (None, _) if last_saved == 0 => "taking the first full snapshot".to_owned(),
        (None, _) => format!("all saved up to revision {last_saved}"),
        // The events of the delta that is being saved are not counted any more.
        (Some(age), 0) => format!("saving a delta, oldest event {}", duration::whole(age)),
        (Some(age), events) => {
            let (events, age) = (count(events, "event"), duration::whole(age));
            format!("{events}, oldest {age}, not saved yet")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::schedule::Schedule;
    use crate::ops::snapshot::follow::Pace;

    #[test]
    fn the_plan_names_the_next_full_and_when_deltas_are_saved() {
        let mut options = FollowOptions {
            pace: Pace::default(),
            delta_events: 1_000_000,
            full_schedule: Some(Schedule::parse("0 3 * * *", "Europe/Berlin").unwrap()),
            max_full_age: Duration::ZERO,
            is_final: false,
        };
        let now = DateTime::from_timestamp(1_795_228_239, 0).unwrap();
        let shown = plan("s3://b/p", &options, now).join("\n");
        let next = show(
            DateTime::from_timestamp(1_795_312_800, 0).unwrap(),
            Zone::local(),
        );
        let expected = format!(
            "saving to s3://b/p\n  fulls     next at {next}\n  deltas    after 5m, 10.00 MiB or 1000000 events\n  stop      Ctrl-C saves the last delta and ends"
        );
        assert_eq!(shown, expected);
        options.full_schedule = None;
        options.max_full_age = Duration::from_secs(86_400);
        let shown = plan("s3://b/p", &options, now).join("\n");
        assert!(
            shown.contains("none is scheduled, or after 1d\n"),
            "{shown}"
        );
    }

    #[test]
    fn snapshots_and_waiting_events_have_one_short_line() {
        let snapshot = |name: &str| NewSnapshot {
            name: name.parse().unwrap(),
            bytes: 2048,
            uncompressed_bytes: 9000,
            events: 3,
            hash_kv: None,
            compact_revision: None,
            live_keys: None,
        };
        let delta = "Incr-00000276-00000445-1795228259.gz";
        let shown = saved(&snapshot(delta));
        assert_eq!(
            shown,
            format!("saved {delta}: revisions 276 to 445, 2.00 KiB")
        );
        let full = "Full-00000000-00000275-1795228239.gz";
        let shown = saved(&snapshot(full));
        assert_eq!(shown, format!("saved {full}: revision 275, 2.00 KiB"));
        let age = Some(Duration::from_secs(12));
        assert_eq!(unsaved(5, 0, None), "all saved up to revision 5");
        assert_eq!(unsaved(0, 0, None), "taking the first full snapshot");
        assert_eq!(unsaved(5, 1, age), "1 event, oldest 12s, not saved yet");
        assert_eq!(unsaved(5, 0, age), "saving a delta, oldest event 12s");
    }
}
