//! The two Leases that tell how far a backup is: `NAME-full-snap` and `NAME-delta-snap`.
//!
//! holderIdentity is a revision and renewTime when that was known last, as etcd-backup-restore has it and
//! etcd-druid reads it. What is written is a pure function of the Lease, the state and now.

use super::lease::{micro_time, time};
use super::{Client, Failed};
use crate::base::Cancel;
use crate::error::{Reason, Result};
use chrono::{DateTime, SecondsFormat, SubsecRound, Utc};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::runtime::Handle;

/// Behind the prefix.
const FULL_SUFFIX: &str = "-full-snap";
const DELTA_SUFFIX: &str = "-delta-snap";

/// The newest snapshot that the Lease tells of.
const LAST_NAME: &str = "deltafold.io/last-snapshot-name";
/// Its bytes in the store.
const LAST_BYTES: &str = "deltafold.io/last-snapshot-bytes";
/// When it was taken, by its name.
const LAST_TIME: &str = "deltafold.io/last-snapshot-time";
/// The range of revisions at the end of which the newest snapshot is, or that is nearest to it: by names.
const RESTORABLE_FIRST: &str = "deltafold.io/restorable-first-revision";
const RESTORABLE_LAST: &str = "deltafold.io/restorable-last-revision";
/// Bytes, in the store, of the deltas after the newest full.
const ACCUMULATED_BYTES: &str = "deltafold.io/accumulated-delta-bytes";
/// What the deltas after the newest full hold.
const ACCUMULATED_EVENTS: &str = "deltafold.io/accumulated-delta-events";

/// A snapshot, as far as Leases tell of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapState {
    /// Its name.
    pub name: String,
    /// Its last revision.
    pub revision: i64,
    /// Its size in the store, in bytes.
    pub bytes: u64,
    /// When it was taken, by its name.
    pub at: DateTime<Utc>,
}

/// How far a backup is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeaseState {
    /// The newest full.
    pub full: Option<SnapState>,
    /// The newest delta after it.
    pub delta: Option<SnapState>,
    /// Bytes, in the store, of the deltas after the newest full.
    pub accumulated_bytes: u64,
    /// What they hold, counted as etcd-druid does: revisions.
    pub accumulated_events: u64,
    /// The newest revisions that can be restored without a gap, from the first to the last, by names.
    pub restorable: Option<(i64, i64)>,
    /// The full was made just now: its Lease is renewed, whether or not its revision is another one.
    pub full_is_new: bool,
    /// The deltas were just brought up to date: their Lease is renewed, whether or not there was one to take.
    pub deltas_are_current: bool,
    /// The history that was saved before was given up: revisions may be lower than before.
    pub timeline_began: bool,
    /// The store was not looked at just now: others may have saved since.
    pub may_be_old: bool,
}

/// A Lease is at a higher revision than a state that may be old: the store is to be looked at first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Behind;

/// What one of the two Leases shall say.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Wanted {
    revision: i64,
    /// Renewed also where the revision is the same.
    renew: bool,
    may_go_back: bool,
    annotations: BTreeMap<&'static str, String>,
}

/// What is to be written; what is not in it stays as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Change {
    holder: Option<String>,
    renew_time: Option<DateTime<Utc>>,
    annotations: BTreeMap<&'static str, String>,
}

/// What becomes of a Lease.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Decision {
    /// It says so already.
    Leave,
    /// It is at a higher revision: left alone.
    Ahead(i64),
    /// Its holder is no revision: it is somebody else's, and left alone.
    Foreign(String),
    Write(Change),
}

fn wanted(state: &LeaseState) -> Vec<(&'static str, Wanted)> {
    let last = |s: &SnapState| {
        BTreeMap::from([
            (LAST_NAME, s.name.clone()),
            (LAST_BYTES, s.bytes.to_string()),
            (LAST_TIME, s.at.to_rfc3339_opts(SecondsFormat::Secs, true)),
        ])
    };
    let wanted = |newest: &SnapState, renew, more: Vec<(&'static str, String)>| {
        let mut annotations = last(newest);
        annotations.extend(more);
        Wanted {
            revision: newest.revision,
            renew,
            may_go_back: state.timeline_began,
            annotations,
        }
    };
    let full = state.full.iter();
    let full = full.map(|full| (FULL_SUFFIX, wanted(full, state.full_is_new, Vec::new())));
    // A full holds all that deltas up to its revision do.
    let newest = [&state.full, &state.delta];
    let newest = newest.into_iter().flatten().max_by_key(|s| s.revision);
    let delta = newest.map(|newest| {
        let mut more = vec![
            (ACCUMULATED_BYTES, state.accumulated_bytes.to_string()),
            (ACCUMULATED_EVENTS, state.accumulated_events.to_string()),
        ];
        if let Some((first, last)) = state.restorable {
            more.push((RESTORABLE_FIRST, first.to_string()));
            more.push((RESTORABLE_LAST, last.to_string()));
        }
        (DELTA_SUFFIX, wanted(newest, state.deltas_are_current, more))
    });
    full.chain(delta).collect()
}

fn decide(current: Option<&Lease>, wanted: &Wanted, now: DateTime<Utc>) -> Decision {
    let spec = current.and_then(|l| l.spec.as_ref());
    let holder = spec.and_then(|s| s.holder_identity.as_deref());
    let held = match holder.filter(|h| !h.is_empty()) {
        None => None,
        Some(text) => match text.parse::<i64>() {
            Ok(revision) if revision >= 0 => Some(revision),
            _ => return Decision::Foreign(text.to_owned()),
        },
    };
    if let Some(held) = held.filter(|&h| h > wanted.revision && !wanted.may_go_back) {
        return Decision::Ahead(held);
    }
    let moves = held != Some(wanted.revision);
    // Another machine's clock may be ahead of ours.
    let renewed = spec.and_then(|s| s.renew_time.as_ref()).map(time);
    let is_later = renewed.is_none_or(|before| before < now);
    let there = current.and_then(|l| l.metadata.annotations.as_ref());
    let says = |key: &str| there.and_then(|a| a.get(key));
    let annotations = wanted.annotations.iter();
    let change = Change {
        holder: moves.then(|| wanted.revision.to_string()),
        renew_time: (moves || wanted.renew && is_later).then_some(now),
        annotations: annotations
            .filter(|(key, value)| says(key) != Some(*value))
            .map(|(key, value)| (*key, value.clone()))
            .collect(),
    };
    if change.holder.is_none() && change.renew_time.is_none() && change.annotations.is_empty() {
        return Decision::Leave;
    }
    Decision::Write(change)
}

impl Change {
    /// As a patch of this version of the Lease.
    fn patch(&self, resource_version: Option<&str>) -> Value {
        let metadata = ObjectMeta {
            resource_version: resource_version.map(str::to_owned),
            annotations: self.annotations(),
            ..ObjectMeta::default()
        };
        json!({"metadata": metadata, "spec": self.spec()})
    }

    /// As a new Lease.
    fn lease(&self, name: &str) -> Lease {
        Lease {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                annotations: self.annotations(),
                ..ObjectMeta::default()
            },
            spec: Some(self.spec()),
        }
    }

    fn annotations(&self) -> Option<BTreeMap<String, String>> {
        let annotations = self.annotations.iter();
        let annotations = annotations.map(|(key, value)| ((*key).to_owned(), value.clone()));
        (!self.annotations.is_empty()).then(|| annotations.collect())
    }

    fn spec(&self) -> LeaseSpec {
        LeaseSpec {
            holder_identity: self.holder.clone(),
            renew_time: self.renew_time.map(micro_time),
            ..LeaseSpec::default()
        }
    }
}

/// Which Leases to renew.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotLeases {
    /// Before `-full-snap` and `-delta-snap`.
    pub prefix: String,
    /// Where they are; where the kubeconfig or the service account says if `None`.
    pub namespace: Option<String>,
}

impl SnapshotLeases {
    /// Brings both Leases to the state. What could not be done is told as warnings: the snapshots are in
    /// the store, whatever became of the Leases. It blocks: not for async threads.
    ///
    /// # Errors
    /// [`Behind`] if the state may be old, and a Lease tells of something newer.
    pub fn renew(
        &self,
        state: &LeaseState,
        now: DateTime<Utc>,
        handle: &Handle,
        cancel: &Cancel,
    ) -> Result<Vec<String>, Behind> {
        let wanted = wanted(state);
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let client =
            match Client::connect(self.namespace.as_deref(), handle.clone(), cancel.clone()) {
                Ok(client) => client,
                Err(e) => return Ok(vec![format!("the snapshot Leases were not renewed: {e}")]),
            };
        let mut warnings = Vec::new();
        for (suffix, wanted) in wanted {
            let name = format!("{}{suffix}", self.prefix);
            match renew(&client, &name, &wanted, now) {
                Ok(Renewed::Says) => {}
                Ok(Renewed::Ahead(_)) if state.may_be_old => return Err(Behind),
                Ok(Renewed::Ahead(warning) | Renewed::Foreign(warning)) => warnings.push(warning),
                Err(e) => warnings.push(format!("a snapshot Lease was not renewed: {e}")),
            }
        }
        Ok(warnings)
    }
}

/// What became of a Lease; the text is a warning.
enum Renewed {
    Says,
    Ahead(String),
    Foreign(String),
}

fn renew(client: &Client, name: &str, wanted: &Wanted, now: DateTime<Utc>) -> Result<Renewed> {
    /// Others write these Leases now and then, not all the time.
    const TRIES: u32 = 10;
    const PAUSE: Duration = Duration::from_millis(20);
    let (leases, full) = (client.leases(), client.name(name));
    let now = now.trunc_subsecs(6);
    for tried in 0..TRIES {
        if tried > 0 {
            let pause = async { tokio::time::sleep(PAUSE * tried).await };
            client.handle().block_on(client.cancel().or(pause))?;
        }
        let current = match client.ask("read", name, leases.get_opt(name)) {
            Ok(current) => current,
            Err(Failed::Final(e)) => return Err(e),
            Err(Failed::Conflict) => continue,
        };
        let change = match decide(current.as_ref(), wanted, now) {
            Decision::Leave => return Ok(Renewed::Says),
            Decision::Ahead(held) => {
                return Ok(Renewed::Ahead(format!(
                    "{full} is at revision {held} and the newest snapshot at {}: it was left as it is; if etcd was rolled back, delete that Lease",
                    wanted.revision
                )));
            }
            Decision::Foreign(holder) => {
                return Ok(Renewed::Foreign(format!(
                    "{full} is held by \"{holder}\", which is no revision: it was left as it is; check --snapshot-lease-prefix"
                )));
            }
            Decision::Write(change) => change,
        };
        let written = match &current {
            None => {
                let (params, lease) = (PostParams::default(), change.lease(name));
                client.ask("create", name, leases.create(&params, &lease))
            }
            Some(current) => {
                let patch = change.patch(current.metadata.resource_version.as_deref());
                let (params, patch) = (PatchParams::default(), Patch::Merge(&patch));
                client.ask("renew", name, leases.patch(name, &params, &patch))
            }
        };
        match written {
            Ok(_) => {
                let revision = wanted.revision;
                tracing::info!(lease = name, revision, "renewed a snapshot Lease");
                return Ok(Renewed::Says);
            }
            Err(Failed::Final(e)) => return Err(e),
            Err(Failed::Conflict) => {}
        }
    }
    Err(Reason::Conflict.error(format!("{full} changes all the time")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(1_790_000_000 + seconds, 0).unwrap()
    }

    fn snap(kind: &str, revision: i64) -> Option<SnapState> {
        Some(SnapState {
            name: format!("{kind}-{revision}"),
            revision,
            bytes: 3 * revision.unsigned_abs(),
            at: at(revision),
        })
    }

    fn state(full: i64, delta: Option<i64>) -> LeaseState {
        LeaseState {
            full: snap("Full", full),
            delta: delta.and_then(|d| snap("Incr", d)),
            accumulated_bytes: 10,
            accumulated_events: delta.map_or(0, |d| (d - full) as u64),
            restorable: Some((full, delta.unwrap_or(full))),
            ..LeaseState::default()
        }
    }

    /// A Lease as it is after a change.
    fn after(lease: Option<&Lease>, change: &Change) -> Lease {
        let Some(lease) = lease else {
            return change.lease("x");
        };
        let mut lease = lease.clone();
        let spec = lease.spec.get_or_insert_default();
        if let Some(holder) = &change.holder {
            spec.holder_identity = Some(holder.clone());
        }
        if let Some(at) = change.renew_time {
            spec.renew_time = Some(micro_time(at));
        }
        let annotations = lease.metadata.annotations.get_or_insert_default();
        annotations.extend(
            change
                .annotations
                .iter()
                .map(|(k, v)| ((*k).to_owned(), v.clone())),
        );
        lease
    }

    /// The two Leases, and what became of each.
    #[derive(Default)]
    struct Both(BTreeMap<&'static str, Lease>);

    impl Both {
        fn bring(&mut self, state: &LeaseState, now: DateTime<Utc>) -> Vec<Decision> {
            let wanted = wanted(state).into_iter();
            wanted
                .map(|(suffix, wanted)| {
                    let decision = decide(self.0.get(suffix), &wanted, now);
                    if let Decision::Write(change) = &decision {
                        let lease = after(self.0.get(suffix), change);
                        // Then there is nothing left to do.
                        let renew = false;
                        let again = decide(Some(&lease), &Wanted { renew, ..wanted }, now);
                        assert_eq!(again, Decision::Leave);
                        self.0.insert(suffix, lease);
                    }
                    decision
                })
                .collect()
        }

        /// Both revisions, and seconds of the renewals.
        fn says(&self) -> [(i64, i64); 2] {
            [FULL_SUFFIX, DELTA_SUFFIX].map(|suffix| {
                let spec = self.0[suffix].spec.as_ref().unwrap();
                let renewed = time(spec.renew_time.as_ref().unwrap());
                let held = spec.holder_identity.as_ref().unwrap();
                (held.parse().unwrap(), (renewed - at(0)).num_seconds())
            })
        }

        fn annotation(&self, suffix: &str, key: &str) -> &str {
            &self.0[suffix].metadata.annotations.as_ref().unwrap()[key]
        }
    }

    #[test]
    fn leases_go_forward_and_back_only_with_a_new_timeline() {
        let mut leases = Both::default();
        assert_eq!(leases.bring(&LeaseState::default(), at(0)), []);
        // The first full: both are at its revision, nothing has accumulated.
        leases.bring(&state(100, None), at(1));
        assert_eq!(leases.says(), [(100, 1), (100, 1)]);
        assert_eq!(leases.annotation(DELTA_SUFFIX, LAST_NAME), "Full-100");
        assert_eq!(leases.annotation(DELTA_SUFFIX, ACCUMULATED_EVENTS), "0");
        for suffix in [FULL_SUFFIX, DELTA_SUFFIX] {
            assert_eq!(leases.annotation(suffix, LAST_BYTES), "300");
            assert_eq!(leases.annotation(suffix, LAST_TIME), "2026-09-21T14:15:00Z");
        }
        // A delta; then none was needed, and that is news as well.
        leases.bring(&state(100, Some(150)), at(2));
        assert_eq!(leases.says(), [(100, 1), (150, 2)]);
        assert_eq!(leases.annotation(DELTA_SUFFIX, ACCUMULATED_EVENTS), "50");
        assert_eq!(leases.annotation(DELTA_SUFFIX, ACCUMULATED_BYTES), "10");
        assert_eq!(leases.annotation(FULL_SUFFIX, LAST_BYTES), "300");
        assert_eq!(leases.annotation(DELTA_SUFFIX, LAST_BYTES), "450");
        assert_eq!(leases.annotation(DELTA_SUFFIX, RESTORABLE_FIRST), "100");
        assert_eq!(leases.annotation(DELTA_SUFFIX, RESTORABLE_LAST), "150");
        let current = LeaseState {
            deltas_are_current: true,
            ..state(100, Some(150))
        };
        leases.bring(&current, at(3));
        assert_eq!(leases.says(), [(100, 1), (150, 3)]);
        // Nothing is new.
        let left = leases.bring(&state(100, Some(150)), at(4));
        assert_eq!(left, [Decision::Leave, Decision::Leave]);
        // Compacted: what had accumulated is gone, which tells nothing of the deltas' age.
        let compacted = LeaseState {
            full_is_new: true,
            ..state(150, None)
        };
        leases.bring(&compacted, at(5));
        assert_eq!(leases.says(), [(150, 5), (150, 3)]);
        assert_eq!(leases.annotation(DELTA_SUFFIX, ACCUMULATED_EVENTS), "0");
        // An older state, told late.
        let late = LeaseState {
            deltas_are_current: true,
            full_is_new: true,
            ..state(100, Some(120))
        };
        let left = leases.bring(&late, at(6));
        assert_eq!(left, [Decision::Ahead(150), Decision::Ahead(150)]);
        assert_eq!(leases.annotation(FULL_SUFFIX, LAST_NAME), "Full-150");
        assert_eq!(leases.annotation(FULL_SUFFIX, LAST_BYTES), "450");
        // A roll-back.
        let began = LeaseState {
            timeline_began: true,
            ..state(90, None)
        };
        leases.bring(&began, at(7));
        assert_eq!(leases.says(), [(90, 7), (90, 7)]);
        // A clock that is behind.
        let current = LeaseState {
            deltas_are_current: true,
            ..state(90, None)
        };
        let left = leases.bring(&current, at(5));
        assert_eq!(left, [Decision::Leave, Decision::Leave]);
    }

    #[test]
    fn a_lease_without_a_revision_is_anothers_and_one_without_a_holder_is_new() {
        let lease = |holder: Option<&str>| Lease {
            spec: Some(LeaseSpec {
                holder_identity: holder.map(str::to_owned),
                ..LeaseSpec::default()
            }),
            ..Lease::default()
        };
        let wanted = &wanted(&state(5, None))[0].1;
        for other in ["etcd-main-0", "a1b2:c3d4:Leader", "-1", "1.5"] {
            let decision = decide(Some(&lease(Some(other))), wanted, at(0));
            assert_eq!(decision, Decision::Foreign(other.to_owned()));
        }
        for new in [None, Some("")] {
            let decision = decide(Some(&lease(new)), wanted, at(0));
            assert!(matches!(decision, Decision::Write(_)), "{decision:?}");
        }
        let decision = decide(Some(&Lease::default()), wanted, at(0));
        assert!(matches!(decision, Decision::Write(_)), "{decision:?}");
    }

    #[test]
    fn a_patch_holds_nothing_but_what_changes() {
        let change = Change {
            holder: None,
            renew_time: Some(at(0)),
            annotations: BTreeMap::new(),
        };
        let expected = json!({
            "metadata": {"resourceVersion": "7"},
            "spec": {"renewTime": "2026-09-21T14:13:20.000000Z"},
        });
        assert_eq!(change.patch(Some("7")), expected);
    }
}
