//! What the two snapshot Leases tell: how far the backup is, and what has accumulated since the last full.
//!
//! Ours have annotations; of etcd-druid's there is a revision and a time, no more. Anything may stand in them:
//! what is no revision tells nothing. `threshold`, `conditions` and the reconcilers read it.

use crate::backup::Kind;
use crate::backup::name::SnapshotName;
use crate::controller::times::utc_of_micro;
use chrono::{DateTime, Utc};
use k8s_openapi::api::coordination::v1::Lease;

const LAST_NAME: &str = "deltafold.io/last-snapshot-name";
const LAST_BYTES: &str = "deltafold.io/last-snapshot-bytes";
const LAST_TIME: &str = "deltafold.io/last-snapshot-time";
const ACCUMULATED_BYTES: &str = "deltafold.io/accumulated-delta-bytes";
const ACCUMULATED_EVENTS: &str = "deltafold.io/accumulated-delta-events";
const RESTORABLE_FIRST: &str = "deltafold.io/restorable-first-revision";
const RESTORABLE_LAST: &str = "deltafold.io/restorable-last-revision";

/// The newest snapshot that one Lease tells of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapshotFact {
    /// Its last revision.
    pub revision: i64,
    /// Its first revision, by its name; 0 of a full.
    pub start_revision: Option<i64>,
    /// Its name; not known of etcd-druid's Leases.
    pub name: Option<String>,
    /// Bytes in the store.
    pub bytes: Option<i64>,
    /// When it was made; not known of etcd-druid's Leases.
    pub time: Option<DateTime<Utc>>,
    /// When the Lease was renewed, by the clock of whoever did.
    pub renewed: Option<DateTime<Utc>>,
    /// What it is, by its name: the delta Lease names a full where none came after that.
    pub kind: Option<Kind>,
}

/// What both Leases tell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeaseFacts {
    /// The newest full.
    pub full: Option<SnapshotFact>,
    /// The newest snapshot of all, as the delta Lease has it.
    pub delta: Option<SnapshotFact>,
    /// Revisions since the newest full.
    pub accumulated_events: Option<i64>,
    /// Bytes, in the store, of the deltas after the newest full.
    pub accumulated_bytes: Option<i64>,
    /// The revision of the full that the delta Lease's annotations count from: higher than the full Lease's where
    /// that could not be renewed.
    pub told_base: Option<i64>,
    /// The first and the last revision that can be restored.
    pub restorable: Option<(i64, i64)>,
    /// Who holds the full Lease, where that is no revision.
    pub foreign_full: Option<String>,
    /// Who holds the delta Lease, where that is no revision.
    pub foreign_delta: Option<String>,
}

impl LeaseFacts {
    /// Reads both Leases.
    pub fn read(full: Option<&Lease>, delta: Option<&Lease>) -> LeaseFacts {
        let (of_full, foreign_full) = fact(full);
        let (of_delta, foreign_delta) = fact(delta);
        let mut facts = LeaseFacts {
            full: of_full,
            delta: of_delta,
            foreign_full,
            foreign_delta,
            ..LeaseFacts::default()
        };
        let (Some(of_delta), Some(lease)) = (&facts.delta, delta) else {
            return facts;
        };
        let at = of_delta.revision;
        let full = facts.full.as_ref().map(|f| f.revision);
        // Annotations that are older than the revision tell nothing.
        let is_ours = of_delta.name.is_some();
        let told = |key| number(lease, key).filter(|_| is_ours);
        let told_events = told(ACCUMULATED_EVENTS).filter(|&events| events <= at);
        let told_base = told_events.map(|events| at - events);
        // Whichever full is the later one counts: either Lease may not have been renewed.
        facts.accumulated_events = full.max(told_base).map(|base| (at - base).max(0));
        facts.accumulated_bytes = match full {
            Some(full) if full >= at => Some(0),
            Some(full) if told_base.is_some_and(|base| base < full) => None,
            _ => told(ACCUMULATED_BYTES),
        };
        facts.told_base = told_base.filter(|&base| base > 0);
        facts.restorable = told(RESTORABLE_FIRST)
            .zip(told(RESTORABLE_LAST))
            .filter(|(first, last)| first <= last);
        facts
    }

    /// The revisions of both Leases: what has to move before a threshold acts again. `None` as long as there is
    /// no full, or no delta Lease that tells of a snapshot.
    pub fn status(&self) -> Option<(i64, i64)> {
        let full = self.full.as_ref().map(|f| f.revision).or(self.told_base)?;
        Some((full, self.delta.as_ref()?.revision))
    }

    /// The newest delta, where one came after the newest full.
    pub fn last_delta(&self) -> Option<&SnapshotFact> {
        let delta = self.delta.as_ref()?;
        let full = self.full.as_ref().map_or(0, |f| f.revision);
        let is_delta = delta.kind != Some(Kind::Full) && delta.revision > full;
        is_delta.then_some(delta)
    }
}

fn annotation<'a>(lease: &'a Lease, key: &str) -> Option<&'a str> {
    let annotations = lease.metadata.annotations.as_ref()?;
    annotations.get(key).map(String::as_str)
}

fn number(lease: &Lease, key: &str) -> Option<i64> {
    annotation(lease, key)?
        .parse()
        .ok()
        .filter(|&n: &i64| n >= 0)
}

/// What a Lease tells, or who holds it instead.
fn fact(lease: Option<&Lease>) -> (Option<SnapshotFact>, Option<String>) {
    let Some((lease, spec)) = lease.and_then(|l| Some((l, l.spec.as_ref()?))) else {
        return (None, None);
    };
    let Some(holder) = spec.holder_identity.as_deref().filter(|h| !h.is_empty()) else {
        return (None, None);
    };
    let revision = match holder.parse::<i64>() {
        // Before the first snapshot; every etcd begins with revision 1.
        Ok(0) => return (None, None),
        Ok(revision) if revision > 0 && revision < i64::MAX => revision,
        _ => return (None, Some(holder.chars().take(100).collect())),
    };
    let name = annotation(lease, LAST_NAME).and_then(|n| n.parse::<SnapshotName>().ok());
    // Where somebody else has moved the Lease since, the annotations are of an older snapshot. A delta may reach
    // beyond where its timeline was left.
    let name = name.filter(|name| match name.kind {
        Kind::Full => name.last.0 == revision,
        Kind::Incr => name.last.0 >= revision && name.start.0 <= revision,
    });
    let told_time = annotation(lease, LAST_TIME).and_then(|t| t.parse::<DateTime<Utc>>().ok());
    let fact = SnapshotFact {
        revision,
        start_revision: name.as_ref().map(|n| n.start.0),
        bytes: name.as_ref().and_then(|_| number(lease, LAST_BYTES)),
        time: name.as_ref().map(|n| told_time.unwrap_or(n.created_at())),
        renewed: spec.renew_time.as_ref().map(utc_of_micro),
        kind: name.as_ref().map(|n| n.kind),
        name: name.map(|n| n.to_string()),
    };
    (Some(fact), None)
}

#[cfg(test)]
pub(in crate::controller) mod tests {
    use super::*;
    use k8s_openapi::api::coordination::v1::LeaseSpec;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
    use k8s_openapi::jiff::Timestamp;

    pub fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(1_790_000_000 + seconds, 0).unwrap()
    }

    /// A Lease as etcd-druid's sidecar has it.
    pub fn druid(holder: &str, renewed: Option<DateTime<Utc>>) -> Lease {
        let micro = |t: DateTime<Utc>| Timestamp::from_microsecond(t.timestamp_micros()).unwrap();
        Lease {
            metadata: ObjectMeta::default(),
            spec: Some(LeaseSpec {
                holder_identity: Some(holder.to_owned()),
                renew_time: renewed.map(|t| MicroTime(micro(t))),
                ..LeaseSpec::default()
            }),
        }
    }

    /// A Lease as deltafold has it.
    pub fn ours(holder: &str, renewed: DateTime<Utc>, annotations: &[(&str, &str)]) -> Lease {
        let mut lease = druid(holder, Some(renewed));
        let annotations = annotations
            .iter()
            .map(|(k, v)| (format!("deltafold.io/{k}"), (*v).to_owned()));
        lease.metadata.annotations = Some(annotations.collect());
        lease
    }

    fn full(revision: i64) -> Lease {
        let name = format!("Full-00000000-{revision:08}-1790000000.gz");
        ours(
            &revision.to_string(),
            at(1),
            &[("last-snapshot-name", &name)],
        )
    }

    fn delta(from: i64, to: i64, events: i64, bytes: i64) -> Lease {
        ours(
            &to.to_string(),
            at(2),
            &[
                (
                    "last-snapshot-name",
                    &format!("Incr-{from:08}-{to:08}-1790000002.gz"),
                ),
                ("last-snapshot-bytes", "77"),
                ("last-snapshot-time", "2026-09-21T14:13:20Z"),
                ("accumulated-delta-events", &events.to_string()),
                ("accumulated-delta-bytes", &bytes.to_string()),
                ("restorable-first-revision", "10"),
                ("restorable-last-revision", &to.to_string()),
            ],
        )
    }

    #[test]
    fn ours_tell_all() {
        let facts = LeaseFacts::read(Some(&full(100)), Some(&delta(151, 200, 100, 5000)));
        assert_eq!(facts.status(), Some((100, 200)));
        assert_eq!(facts.accumulated_events, Some(100));
        assert_eq!(facts.accumulated_bytes, Some(5000));
        assert_eq!(facts.restorable, Some((10, 200)));
        let full = facts.full.as_ref().unwrap();
        assert_eq!((full.start_revision, full.time), (Some(0), Some(at(0))));
        let last = facts.last_delta().unwrap();
        assert_eq!((last.start_revision, last.bytes), (Some(151), Some(77)));
        assert_eq!(last.time, Some(at(0)));
        assert_eq!(last.renewed, Some(at(2)));
    }

    #[test]
    fn etcd_druids_tell_revisions() {
        let (f, d) = (druid("100", Some(at(5))), druid("260", Some(at(9))));
        let facts = LeaseFacts::read(Some(&f), Some(&d));
        assert_eq!(facts.accumulated_events, Some(160));
        assert_eq!(facts.accumulated_bytes, None);
        assert_eq!(facts.last_delta().unwrap().name, None);
        assert_eq!(facts.full.unwrap().renewed, Some(at(5)));
        // A full that is newer than the deltas.
        let facts = LeaseFacts::read(Some(&druid("300", None)), Some(&d));
        assert_eq!(facts.accumulated_events, Some(0));
        assert_eq!(facts.accumulated_bytes, Some(0));
        assert_eq!(facts.last_delta(), None);
    }

    #[test]
    fn a_lease_that_was_not_renewed_is_made_up_for_by_the_other() {
        // The full has moved, the deltas' annotations are older.
        let facts = LeaseFacts::read(Some(&full(180)), Some(&delta(151, 200, 100, 5000)));
        assert_eq!(facts.accumulated_events, Some(20));
        assert_eq!(facts.accumulated_bytes, None);
        // The full was made, and its Lease could not be renewed.
        let facts = LeaseFacts::read(Some(&full(100)), Some(&delta(181, 200, 20, 9)));
        assert_eq!(facts.accumulated_events, Some(20));
        assert_eq!(facts.accumulated_bytes, Some(9));
        assert_eq!(facts.told_base, Some(180));
        // There is no full Lease at all.
        let facts = LeaseFacts::read(None, Some(&delta(181, 200, 20, 9)));
        assert_eq!(facts.status(), Some((180, 200)));
        assert_eq!(facts.accumulated_events, Some(20));
        // Deltas alone count from nothing.
        let facts = LeaseFacts::read(None, Some(&delta(181, 200, 200, 9)));
        assert_eq!(facts.status(), None);
    }

    #[test]
    fn annotations_of_a_lease_that_a_sidecar_has_moved_since_tell_nothing() {
        let mut moved = delta(151, 200, 100, 5000);
        moved.spec.as_mut().unwrap().holder_identity = Some("900".to_owned());
        let facts = LeaseFacts::read(Some(&full(100)), Some(&moved));
        assert_eq!(facts.accumulated_events, Some(800));
        assert_eq!(facts.accumulated_bytes, None);
        assert_eq!(facts.told_base, None);
        assert_eq!(facts.restorable, None);
        let last = facts.last_delta().unwrap();
        assert_eq!((&last.name, last.bytes, last.time), (&None, None, None));
    }

    #[test]
    fn what_is_no_revision_tells_nothing() {
        for holder in ["", "0"] {
            let facts = LeaseFacts::read(Some(&druid(holder, None)), Some(&druid(holder, None)));
            assert_eq!(facts, LeaseFacts::default(), "{holder}");
        }
        let long = "x".repeat(4000);
        for holder in [
            "etcd-main-0",
            "-5",
            "1.5",
            " 7",
            "9223372036854775807",
            "99999999999999999999",
            "a1b2:c3:Leader",
            &long,
        ] {
            let facts = LeaseFacts::read(Some(&druid(holder, None)), Some(&druid("7", None)));
            assert_eq!(facts.full, None, "{holder}");
            assert_eq!(facts.status(), None);
            assert!(facts.foreign_full.unwrap().len() <= 100);
        }
        let none = Lease::default();
        assert_eq!(LeaseFacts::read(Some(&none), None), LeaseFacts::default());
        // Garbage in annotations.
        let odd = ours(
            "50",
            at(0),
            &[
                ("last-snapshot-name", "Incr-00000001-00000050-1.gz"),
                ("last-snapshot-bytes", "-1"),
                ("last-snapshot-time", "yesterday"),
                ("accumulated-delta-events", "51"),
                ("accumulated-delta-bytes", "99999999999999999999"),
                ("restorable-first-revision", "60"),
                ("restorable-last-revision", "50"),
            ],
        );
        let facts = LeaseFacts::read(Some(&druid("10", None)), Some(&odd));
        assert_eq!(facts.accumulated_events, Some(40));
        assert_eq!((facts.accumulated_bytes, facts.restorable), (None, None));
        let delta = facts.delta.unwrap();
        assert_eq!(
            (delta.bytes, delta.time),
            (None, Some(DateTime::from_timestamp(1, 0).unwrap()))
        );
    }
}
