//! The two snapshot Leases of a policy: the newest snapshots, and the size of the deltas since the last full.
//!
//! Leases of deltafold have annotations; those of etcd-druid only a revision and a time. Anyone may have
//! written them, so an invalid value counts as missing. No decision is made here. Read by `decide` and by the
//! metrics.

use crate::backup::Kind;
use crate::backup::name::SnapshotName;
use crate::controller::api::EtcdBackupPolicy;
use crate::controller::cluster::{KeptLease, Tables};
use crate::controller::jobs;
use crate::controller::names::NamespacedName;
use crate::controller::times::utc_of_micro;
use crate::kubernetes::snapshot_leases::{
    ACCUMULATED_BYTES, ACCUMULATED_EVENTS, FOLLOWER_PROBLEM, LAST_BYTES, LAST_NAME, LAST_TIME,
    RESTORABLE_FIRST, RESTORABLE_FIRST_TIME, RESTORABLE_LAST, RESTORABLE_LAST_TIME, TIMELINE_BEGAN,
};
use chrono::{DateTime, Utc};
use k8s_openapi::api::coordination::v1::Lease;
use kube::ResourceExt;

/// The newest snapshot that one Lease reports.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapshotFact {
    /// Its last revision.
    pub revision: i64,
    /// Its first revision, from its name; 0 for a full. `None` for etcd-druid's Leases.
    pub start_revision: Option<i64>,
    /// Its name. `None` for etcd-druid's Leases.
    pub name: Option<String>,
    /// Its size in the store, in bytes.
    pub bytes: Option<i64>,
    /// When the snapshot was taken. `None` for etcd-druid's Leases.
    pub time: Option<DateTime<Utc>>,
    /// When the Lease was last renewed, by the clock of the Pod that renewed it.
    pub renewed: Option<DateTime<Utc>>,
    /// When this controller saw the Lease renewed, by its own clock; `None` if not since it started.
    pub renewal_seen: Option<DateTime<Utc>>,
    /// Whether it is a full or a delta, from its name. The delta Lease names the newest full if no delta
    /// follows it.
    pub kind: Option<Kind>,
}

/// The contents of both Leases.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeaseFacts {
    /// The newest full.
    pub full: Option<SnapshotFact>,
    /// The newest snapshot of either kind, from the delta Lease.
    pub delta: Option<SnapshotFact>,
    /// Revisions since the newest full.
    pub accumulated_events: Option<i64>,
    /// The size in the store of the deltas after the newest full, in bytes.
    pub accumulated_bytes: Option<i64>,
    /// The revision of the full from which the annotations of the delta Lease count. It is above the revision
    /// of the full Lease if the renewal of that one failed.
    pub annotated_base: Option<i64>,
    /// The first and the last revision that can be restored.
    pub restorable: Option<(i64, i64)>,
    /// The first and the last time that can be restored.
    pub restorable_times: (Option<DateTime<Utc>>, Option<DateTime<Utc>>),
    /// When the history began that is saved now, because the cluster was set back.
    pub timeline_began: Option<DateTime<Utc>>,
    /// Why the follower saves nothing: a reason, a colon and a sentence.
    pub follower_problem: Option<String>,
    /// The holder of the full Lease if it is not a revision.
    pub foreign_full_holder: Option<String>,
    /// The holder of the delta Lease if it is not a revision.
    pub foreign_delta_holder: Option<String>,
}

impl LeaseFacts {
    /// Reads a policy's snapshot Leases.
    pub fn of(tables: &Tables, policy: &EtcdBackupPolicy) -> LeaseFacts {
        let namespace = policy.namespace().unwrap_or_default();
        let (full, delta) = jobs::lease_names(policy);
        let lease = |name| tables.leases.get(&NamespacedName::new(&namespace, name));
        LeaseFacts::read(lease(full).map(|l| &**l), lease(delta).map(|l| &**l))
    }

    /// Reads both Leases.
    pub fn read(full: Option<&KeptLease>, delta: Option<&KeptLease>) -> LeaseFacts {
        let (full_fact, foreign_full_holder) = fact(full);
        let (delta_fact, foreign_delta_holder) = fact(delta);
        let delta = delta.map(|kept| &kept.lease);
        let mut facts = LeaseFacts {
            timeline_began: full.and_then(|kept| annotated_time(&kept.lease, TIMELINE_BEGAN)),
            full: full_fact,
            delta: delta_fact,
            follower_problem: delta
                .and_then(|lease| annotation(lease, FOLLOWER_PROBLEM))
                .map(str::to_owned),
            foreign_full_holder,
            foreign_delta_holder,
            ..LeaseFacts::default()
        };
        let (Some(newest), Some(lease)) = (&facts.delta, delta) else {
            return facts;
        };
        let newest_revision = newest.revision;
        let full = facts.full.as_ref().map(|f| f.revision);
        // Without a name, the annotations belong to an older snapshot, or there are none.
        let is_annotated = newest.name.is_some();
        let annotated = |key| number(lease, key).filter(|_| is_annotated);
        let events = annotated(ACCUMULATED_EVENTS).filter(|&events| events <= newest_revision);
        let annotated_base = events.map(|events| newest_revision - events);
        // The later of both fulls counts: the renewal of either Lease may have failed.
        let base = full.max(annotated_base);
        facts.accumulated_events = base.map(|base| (newest_revision - base).max(0));
        facts.accumulated_bytes = match full {
            Some(full) if full >= newest_revision => Some(0),
            Some(full) if annotated_base.is_some_and(|base| base < full) => None,
            _ => annotated(ACCUMULATED_BYTES),
        };
        facts.annotated_base = annotated_base.filter(|&base| base > 0);
        facts.restorable = annotated(RESTORABLE_FIRST)
            .zip(annotated(RESTORABLE_LAST))
            .filter(|(first, last)| first <= last);
        let time = |key| annotated_time(lease, key).filter(|_| facts.restorable.is_some());
        facts.restorable_times = (time(RESTORABLE_FIRST_TIME), time(RESTORABLE_LAST_TIME));
        facts
    }

    /// Returns the revisions of both Leases. They must change before a threshold acts again. `None` if there
    /// is no full, or if the delta Lease reports no snapshot.
    pub fn revisions(&self) -> Option<(i64, i64)> {
        let full = self.full.as_ref().map(|f| f.revision);
        let full = full.or(self.annotated_base)?;
        Some((full, self.delta.as_ref()?.revision))
    }

    /// Returns the newest delta, if there is one after the newest full.
    pub fn last_delta(&self) -> Option<&SnapshotFact> {
        let delta = self.delta.as_ref()?;
        let full = self.full.as_ref().map_or(0, |f| f.revision);
        let is_delta = delta.kind != Some(Kind::Full) && delta.revision > full;
        is_delta.then_some(delta)
    }
}

fn annotated_time(lease: &Lease, key: &str) -> Option<DateTime<Utc>> {
    annotation(lease, key)?.parse().ok()
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

/// Returns the snapshot that a Lease reports, or the holder of the Lease if it is not a revision.
fn fact(kept: Option<&KeptLease>) -> (Option<SnapshotFact>, Option<String>) {
    let renewal_seen = kept.and_then(|kept| kept.renewal_seen);
    let lease = kept.map(|kept| &kept.lease);
    let Some((lease, spec)) = lease.and_then(|l| Some((l, l.spec.as_ref()?))) else {
        return (None, None);
    };
    let Some(holder) = spec.holder_identity.as_deref().filter(|h| !h.is_empty()) else {
        return (None, None);
    };
    let revision = match holder.parse::<i64>() {
        // No snapshot yet: an etcd begins with revision 1.
        Ok(0) => return (None, None),
        Ok(revision) if revision > 0 && revision < i64::MAX => revision,
        _ => return (None, Some(holder.chars().take(100).collect())),
    };
    let name = annotation(lease, LAST_NAME).and_then(|n| n.parse::<SnapshotName>().ok());
    // If another program has renewed the Lease since, the annotations belong to an older snapshot. The name
    // of a delta may end above the revision of the Lease: a restore may have left its timeline before the
    // end.
    let name = name.filter(|name| match name.kind {
        Kind::Full => name.last.0 == revision,
        Kind::Incr => name.last.0 >= revision && name.start.0 <= revision,
    });
    let annotated_time = annotated_time(lease, LAST_TIME);
    let fact = SnapshotFact {
        revision,
        start_revision: name.as_ref().map(|n| n.start.0),
        bytes: name.as_ref().and_then(|_| number(lease, LAST_BYTES)),
        time: name
            .as_ref()
            .map(|n| annotated_time.unwrap_or(n.created_at())),
        renewed: spec.renew_time.as_ref().map(utc_of_micro),
        renewal_seen,
        kind: name.as_ref().map(|n| n.kind),
        name: name.map(|n| n.to_string()),
    };
    (Some(fact), None)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use k8s_openapi::api::coordination::v1::LeaseSpec;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
    use k8s_openapi::jiff::Timestamp;

    pub fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(1_790_000_000 + seconds, 0).unwrap()
    }

    /// Returns a Lease in the form of etcd-druid's sidecar.
    pub fn druid(holder: &str, renewed: Option<DateTime<Utc>>) -> KeptLease {
        let micro = |t: DateTime<Utc>| Timestamp::from_microsecond(t.timestamp_micros()).unwrap();
        let lease = Lease {
            metadata: ObjectMeta::default(),
            spec: Some(LeaseSpec {
                holder_identity: Some(holder.to_owned()),
                renew_time: renewed.map(|t| MicroTime(micro(t))),
                ..LeaseSpec::default()
            }),
        };
        KeptLease {
            lease,
            renewal_seen: None,
        }
    }

    /// Returns a Lease in the form of deltafold.
    pub fn ours(holder: &str, renewed: DateTime<Utc>, annotations: &[(&str, &str)]) -> KeptLease {
        let mut kept = druid(holder, Some(renewed));
        let annotations = annotations
            .iter()
            .map(|(k, v)| (format!("deltafold.io/{k}"), (*v).to_owned()));
        kept.lease.metadata.annotations = Some(annotations.collect());
        kept
    }

    fn full(revision: i64) -> KeptLease {
        let name = format!("Full-00000000-{revision:08}-1790000000.gz");
        ours(
            &revision.to_string(),
            at(1),
            &[("last-snapshot-name", &name)],
        )
    }

    fn delta(from: i64, to: i64, events: i64, bytes: i64) -> KeptLease {
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
    fn leases_of_deltafold_have_all_facts() {
        let facts = LeaseFacts::read(Some(&full(100)), Some(&delta(151, 200, 100, 5000)));
        assert_eq!(facts.revisions(), Some((100, 200)));
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
    fn leases_of_etcd_druid_have_revisions() {
        let (f, d) = (druid("100", Some(at(5))), druid("260", Some(at(9))));
        let facts = LeaseFacts::read(Some(&f), Some(&d));
        assert_eq!(facts.accumulated_events, Some(160));
        assert_eq!(facts.accumulated_bytes, None);
        assert_eq!(facts.last_delta().unwrap().name, None);
        assert_eq!(facts.full.unwrap().renewed, Some(at(5)));
        // The full is newer than the deltas.
        let facts = LeaseFacts::read(Some(&druid("300", None)), Some(&d));
        assert_eq!(facts.accumulated_events, Some(0));
        assert_eq!(facts.accumulated_bytes, Some(0));
        assert_eq!(facts.last_delta(), None);
    }

    #[test]
    fn the_later_full_of_both_leases_counts() {
        // The full Lease was renewed after the annotations of the delta Lease were written.
        let facts = LeaseFacts::read(Some(&full(180)), Some(&delta(151, 200, 100, 5000)));
        assert_eq!(facts.accumulated_events, Some(20));
        assert_eq!(facts.accumulated_bytes, None);
        // The renewal of the full Lease failed.
        let facts = LeaseFacts::read(Some(&full(100)), Some(&delta(181, 200, 20, 9)));
        assert_eq!(facts.accumulated_events, Some(20));
        assert_eq!(facts.accumulated_bytes, Some(9));
        assert_eq!(facts.annotated_base, Some(180));
        // There is no full Lease.
        let facts = LeaseFacts::read(None, Some(&delta(181, 200, 20, 9)));
        assert_eq!(facts.revisions(), Some((180, 200)));
        assert_eq!(facts.accumulated_events, Some(20));
        // Deltas without a full.
        let facts = LeaseFacts::read(None, Some(&delta(181, 200, 200, 9)));
        assert_eq!(facts.revisions(), None);
    }

    #[test]
    fn annotations_are_ignored_after_a_sidecar_has_renewed_the_lease() {
        let mut moved = delta(151, 200, 100, 5000);
        moved.lease.spec.as_mut().unwrap().holder_identity = Some("900".to_owned());
        let facts = LeaseFacts::read(Some(&full(100)), Some(&moved));
        assert_eq!(facts.accumulated_events, Some(800));
        assert_eq!(facts.accumulated_bytes, None);
        assert_eq!(facts.annotated_base, None);
        assert_eq!(facts.restorable, None);
        let last = facts.last_delta().unwrap();
        assert_eq!((&last.name, last.bytes, last.time), (&None, None, None));
    }

    #[test]
    fn invalid_values_count_as_missing() {
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
            assert_eq!(facts.revisions(), None);
            assert!(facts.foreign_full_holder.unwrap().len() <= 100);
        }
        let none = KeptLease {
            lease: Lease::default(),
            renewal_seen: None,
        };
        assert_eq!(LeaseFacts::read(Some(&none), None), LeaseFacts::default());
        // Invalid annotations.
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
