//! Renews the two Leases that publish the progress of a backup: `NAME-full-snap` and `NAME-delta-snap`.
//!
//! As in etcd-backup-restore, and as etcd-druid expects it, `holderIdentity` is a revision, and `renewTime` is when the
//! backup was last known to be at that revision. The update is a pure function of the Lease, the backup's state and the
//! time ([`decide`]).

use super::lease::{micro_time, time};
use super::{Client, RequestError};
use crate::base::Cancel;
use crate::base::opt::SNAPSHOT_LEASE_PREFIX;
use crate::error::{Reason, Result};
use chrono::{DateTime, SecondsFormat, SubsecRound, Utc};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::runtime::Handle;

/// The suffixes of the names.
const FULL_SUFFIX: &str = "-full-snap";
const DELTA_SUFFIX: &str = "-delta-snap";

/// The annotation with the name of the newest snapshot that the Lease covers.
pub const LAST_NAME: &str = "deltafold.io/last-snapshot-name";
/// When the history began that is saved now, in the full Lease: the cluster was set back before. RFC 3339.
pub const TIMELINE_BEGAN: &str = "deltafold.io/timeline-began";
/// The annotation with the size of that snapshot in the store, in bytes.
pub const LAST_BYTES: &str = "deltafold.io/last-snapshot-bytes";
/// The annotation with the time in the name of that snapshot.
pub const LAST_TIME: &str = "deltafold.io/last-snapshot-time";
/// The annotation with the first revision of the restorable range that ends with the newest snapshot, or is nearest
/// to it, according to the names of snapshots.
pub const RESTORABLE_FIRST: &str = "deltafold.io/restorable-first-revision";
/// The annotation with the last revision of that range.
pub const RESTORABLE_LAST: &str = "deltafold.io/restorable-last-revision";
/// The annotation with the first time of that range.
pub const RESTORABLE_FIRST_TIME: &str = "deltafold.io/restorable-first-time";
/// The annotation with the last time of that range.
pub const RESTORABLE_LAST_TIME: &str = "deltafold.io/restorable-last-time";
/// The annotation with the size of all deltas after the newest full, in the store, in bytes.
pub const ACCUMULATED_BYTES: &str = "deltafold.io/accumulated-delta-bytes";
/// The annotation with the number of revisions in the deltas after the newest full.
pub const ACCUMULATED_EVENTS: &str = "deltafold.io/accumulated-delta-events";

/// The annotation of the delta Lease with the reason why the follower saves nothing: a reason of docs/exit-codes.md, a
/// colon and a sentence.
pub const FOLLOWER_PROBLEM: &str = "deltafold.io/follower-problem";

/// A snapshot, as the Leases describe it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapState {
    /// The name.
    pub name: String,
    /// The last revision.
    pub revision: i64,
    /// The size in the store, in bytes.
    pub bytes: u64,
    /// The time in the name.
    pub at: DateTime<Utc>,
}

/// What can be restored, by revision and by time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RestorableRange {
    /// The first revision.
    pub first_revision: i64,
    /// The last revision.
    pub last_revision: i64,
    /// The first time.
    pub first_time: DateTime<Utc>,
    /// The last time.
    pub last_time: DateTime<Utc>,
}

/// The state of a backup that the Leases publish.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeaseState {
    /// The newest full.
    pub full: Option<SnapState>,
    /// The newest delta after that full.
    pub delta: Option<SnapState>,
    /// The size of all deltas after the newest full, in the store, in bytes.
    pub accumulated_bytes: u64,
    /// The number of revisions in these deltas. etcd-druid calls them events.
    pub accumulated_events: u64,
    /// The newest range that can be restored without a gap, according to the names of snapshots.
    pub restorable: Option<RestorableRange>,
    /// Whether the full was just saved. Its Lease is then renewed even if its revision is the same.
    pub full_is_new: bool,
    /// Whether the deltas were just brought up to date. Their Lease is then renewed even if no delta was
    /// necessary.
    pub deltas_are_current: bool,
    /// Whether a new timeline began, so that revisions may be lower than before.
    pub timeline_began: bool,
    /// Whether the state may be old, because the store was not listed just now and others may have saved
    /// since.
    pub may_be_old: bool,
}

/// The result for a state that may be old if a Lease is at a higher revision: the store must be listed first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Behind;

/// The desired content of one of the two Leases.
#[derive(Debug, Clone, PartialEq, Eq)]
struct LeaseTarget {
    revision: i64,
    /// Whether to renew the Lease even if it is at this revision.
    renew: bool,
    /// Whether the Lease may go back to a lower revision.
    may_go_back: bool,
    annotations: BTreeMap<&'static str, String>,
}

/// The fields of a Lease to write; others stay as they are.
#[derive(Debug, Clone, PartialEq, Eq)]
struct LeaseUpdate {
    holder: Option<String>,
    renew_time: Option<DateTime<Utc>>,
    annotations: BTreeMap<&'static str, String>,
}

/// The decision about a Lease.
#[derive(Debug, Clone, PartialEq, Eq)]
enum LeaseDecision {
    /// The Lease is up to date.
    Leave,
    /// The Lease is at a higher revision, and is left as it is.
    Ahead(i64),
    /// The holder is not a revision, so the Lease belongs to another program and is left as it is.
    Foreign(String),
    Write(LeaseUpdate),
}

/// Returns the targets of the two Leases, by suffix. A Lease without a snapshot has none.
fn lease_targets(state: &LeaseState) -> Vec<(&'static str, LeaseTarget)> {
    let mut targets = Vec::new();
    if let Some(full) = &state.full {
        let mut target = LeaseTarget::new(full, state.full_is_new, state.timeline_began);
        if state.timeline_began {
            let began = target.annotations[LAST_TIME].clone();
            target.annotations.insert(TIMELINE_BEGAN, began);
        }
        targets.push((FULL_SUFFIX, target));
    }
    // The delta Lease names the newest snapshot: a full covers all deltas up to its revision.
    let snapshots = [&state.full, &state.delta].into_iter().flatten();
    if let Some(newest) = snapshots.max_by_key(|s| s.revision) {
        let mut target = LeaseTarget::new(newest, state.deltas_are_current, state.timeline_began);
        let mut annotate = |key, number: String| drop(target.annotations.insert(key, number));
        annotate(ACCUMULATED_BYTES, state.accumulated_bytes.to_string());
        annotate(ACCUMULATED_EVENTS, state.accumulated_events.to_string());
        if let Some(range) = &state.restorable {
            let time = |t: DateTime<Utc>| t.to_rfc3339_opts(SecondsFormat::Secs, true);
            annotate(RESTORABLE_FIRST, range.first_revision.to_string());
            annotate(RESTORABLE_LAST, range.last_revision.to_string());
            annotate(RESTORABLE_FIRST_TIME, time(range.first_time));
            annotate(RESTORABLE_LAST_TIME, time(range.last_time));
        }
        targets.push((DELTA_SUFFIX, target));
    }
    targets
}

impl LeaseTarget {
    fn new(newest: &SnapState, renew: bool, may_go_back: bool) -> Self {
        let time = newest.at.to_rfc3339_opts(SecondsFormat::Secs, true);
        LeaseTarget {
            revision: newest.revision,
            renew,
            may_go_back,
            annotations: BTreeMap::from([
                (LAST_NAME, newest.name.clone()),
                (LAST_BYTES, newest.bytes.to_string()),
                (LAST_TIME, time),
            ]),
        }
    }
}

fn decide(current: Option<&Lease>, target: &LeaseTarget, now: DateTime<Utc>) -> LeaseDecision {
    let spec = current.and_then(|l| l.spec.as_ref());
    let holder = spec.and_then(|s| s.holder_identity.as_deref());
    let current_revision = match holder.filter(|h| !h.is_empty()) {
        None => None,
        Some(text) => match text.parse::<i64>() {
            Ok(revision) if revision >= 0 => Some(revision),
            _ => return LeaseDecision::Foreign(text.to_owned()),
        },
    };
    if let Some(ahead) = current_revision
        && ahead > target.revision
        && !target.may_go_back
    {
        return LeaseDecision::Ahead(ahead);
    }
    let moves = current_revision != Some(target.revision);
    // The clock of another machine may be ahead of ours. The renew time must not go back.
    let renewed = spec.and_then(|s| s.renew_time.as_ref()).map(time);
    let is_later = renewed.is_none_or(|before| before < now);
    let existing = current.and_then(|l| l.metadata.annotations.as_ref());
    let existing_value = |key: &str| existing.and_then(|a| a.get(key));
    let annotations = target.annotations.iter();
    let change = LeaseUpdate {
        holder: moves.then(|| target.revision.to_string()),
        renew_time: (moves || target.renew && is_later).then_some(now),
        annotations: annotations
            .filter(|(key, value)| existing_value(key) != Some(*value))
            .map(|(key, value)| (*key, value.clone()))
            .collect(),
    };
    if change.holder.is_none() && change.renew_time.is_none() && change.annotations.is_empty() {
        return LeaseDecision::Leave;
    }
    LeaseDecision::Write(change)
}

impl LeaseUpdate {
    /// Returns a patch of this version of the Lease.
    fn patch(&self, resource_version: Option<&str>) -> Value {
        let metadata = ObjectMeta {
            resource_version: resource_version.map(str::to_owned),
            annotations: self.annotations(),
            ..ObjectMeta::default()
        };
        json!({"metadata": metadata, "spec": self.spec()})
    }

    /// Returns a new Lease.
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

/// The names of the Leases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotLeases {
    /// The beginning of the names, before `-full-snap` and `-delta-snap`.
    pub prefix: String,
    /// The namespace; if `None`, that of the kubeconfig or of the service account.
    pub namespace: Option<String>,
}

impl SnapshotLeases {
    /// Updates both Leases to the state. Failures are returned as warnings, because the snapshots are safe in
    /// the store. It blocks, so it must not run on the threads of the runtime.
    ///
    /// # Errors
    /// [`Behind`] if the state may be old, and a Lease is at a higher revision.
    pub fn renew(
        &self,
        state: &LeaseState,
        now: DateTime<Utc>,
        handle: &Handle,
        cancel: &Cancel,
    ) -> Result<Vec<String>, Behind> {
        let targets = lease_targets(state);
        if targets.is_empty() {
            return Ok(Vec::new());
        }
        let client =
            match Client::connect(self.namespace.as_deref(), handle.clone(), cancel.clone()) {
                Ok(client) => client,
                Err(e) => {
                    return Ok(vec![format!("the snapshot Leases were not renewed: {e}")]);
                }
            };
        let mut warnings = Vec::new();
        for (suffix, target) in targets {
            let name = format!("{}{suffix}", self.prefix);
            match renew(&client, &name, &target, now) {
                Ok(RenewalResult::UpToDate) => {}
                Ok(RenewalResult::Ahead(_)) if state.may_be_old => return Err(Behind),
                Ok(RenewalResult::Ahead(warning) | RenewalResult::Foreign(warning)) => {
                    warnings.push(warning)
                }
                Err(e) => warnings.push(format!("a snapshot Lease was not renewed: {e}")),
            }
        }
        Ok(warnings)
    }
}

impl SnapshotLeases {
    /// Writes into the delta Lease why the follower saves nothing, or with `None` that it works. It blocks, so it must not
    /// run on the threads of the runtime.
    ///
    /// # Errors
    /// Fails if the Kubernetes API cannot be used.
    pub fn set_follower_problem(
        &self,
        problem: Option<&str>,
        handle: &Handle,
        cancel: &Cancel,
    ) -> Result<()> {
        let client = Client::connect(self.namespace.as_deref(), handle.clone(), cancel.clone())?;
        let (leases, name) = (client.leases(), format!("{}{DELTA_SUFFIX}", self.prefix));
        let failed = |e| match e {
            RequestError::Final(e) => e,
            RequestError::Conflict => Reason::Conflict.error(format!("{name} was changed at once")),
        };
        let current = client.ask("read", &name, leases.get_opt(&name));
        let annotations = current
            .map_err(failed)?
            .and_then(|lease| lease.metadata.annotations);
        let known = annotations.as_ref().and_then(|a| a.get(FOLLOWER_PROBLEM));
        if known.map(String::as_str) == problem {
            return Ok(());
        }
        let annotations = json!({"metadata": {"annotations": {FOLLOWER_PROBLEM: problem}}});
        let (params, patch) = (PatchParams::default(), Patch::Merge(&annotations));
        let annotated = client.ask("annotate", &name, leases.patch(&name, &params, &patch));
        annotated.map(drop).map_err(failed)
    }
}

/// The result of the update of one Lease. A text is a warning.
enum RenewalResult {
    UpToDate,
    Ahead(String),
    Foreign(String),
}

fn renew(
    client: &Client,
    name: &str,
    target: &LeaseTarget,
    now: DateTime<Utc>,
) -> Result<RenewalResult> {
    /// Other writers change these Leases rarely, so that conflicts end soon.
    const ATTEMPTS: u32 = 10;
    const PAUSE: Duration = Duration::from_millis(20);
    let (leases, full) = (client.leases(), client.name(name));
    let now = now.trunc_subsecs(6);
    for attempt in 0..ATTEMPTS {
        if attempt > 0 {
            let pause = async { tokio::time::sleep(PAUSE * attempt).await };
            client.handle().block_on(client.cancel().or(pause))?;
        }
        let current = match client.ask("read", name, leases.get_opt(name)) {
            Ok(current) => current,
            Err(RequestError::Final(e)) => return Err(e),
            Err(RequestError::Conflict) => continue,
        };
        let change = match decide(current.as_ref(), target, now) {
            LeaseDecision::Leave => return Ok(RenewalResult::UpToDate),
            LeaseDecision::Ahead(held) => {
                return Ok(RenewalResult::Ahead(format!(
                    "{full} is at revision {held}, but the newest snapshot is at {}: the Lease was not changed; if etcd was rolled back, delete it",
                    target.revision
                )));
            }
            LeaseDecision::Foreign(holder) => {
                return Ok(RenewalResult::Foreign(format!(
                    "{full} is held by \"{holder}\", which is not a revision: the Lease was not changed; check {SNAPSHOT_LEASE_PREFIX}"
                )));
            }
            LeaseDecision::Write(change) => change,
        };
        let result = match &current {
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
        match result {
            Ok(_) => {
                let revision = target.revision;
                tracing::info!(lease = name, revision, "renewed a snapshot Lease");
                return Ok(RenewalResult::UpToDate);
            }
            Err(RequestError::Final(e)) => return Err(e),
            Err(RequestError::Conflict) => {}
        }
    }
    Err(Reason::Conflict.error(format!("{full} changed during each of {ATTEMPTS} attempts")))
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
            restorable: Some(RestorableRange {
                first_revision: full,
                last_revision: delta.unwrap_or(full),
                first_time: at(full),
                last_time: at(delta.unwrap_or(full)),
            }),
            ..LeaseState::default()
        }
    }

    /// Applies an update to a Lease.
    fn after(lease: Option<&Lease>, change: &LeaseUpdate) -> Lease {
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

    /// The two Leases, by suffix.
    #[derive(Default)]
    struct BothLeases(BTreeMap<&'static str, Lease>);

    impl BothLeases {
        /// Updates both Leases to a state.
        fn update(&mut self, state: &LeaseState, now: DateTime<Utc>) -> Vec<LeaseDecision> {
            lease_targets(state)
                .into_iter()
                .map(|(suffix, target)| {
                    let decision = decide(self.0.get(suffix), &target, now);
                    if let LeaseDecision::Write(change) = &decision {
                        let lease = after(self.0.get(suffix), change);
                        // After the update, the decision is to leave the Lease.
                        let renew = false;
                        let again = decide(Some(&lease), &LeaseTarget { renew, ..target }, now);
                        assert_eq!(again, LeaseDecision::Leave);
                        self.0.insert(suffix, lease);
                    }
                    decision
                })
                .collect()
        }

        /// Returns the revision and the renew time of both Leases, in seconds.
        fn revisions_and_times(&self) -> [(i64, i64); 2] {
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
        let mut leases = BothLeases::default();
        assert_eq!(leases.update(&LeaseState::default(), at(0)), []);
        // After the first full, both Leases are at its revision, and no deltas have accumulated.
        leases.update(&state(100, None), at(1));
        assert_eq!(leases.revisions_and_times(), [(100, 1), (100, 1)]);
        assert_eq!(leases.annotation(DELTA_SUFFIX, LAST_NAME), "Full-100");
        assert_eq!(leases.annotation(DELTA_SUFFIX, ACCUMULATED_EVENTS), "0");
        for suffix in [FULL_SUFFIX, DELTA_SUFFIX] {
            assert_eq!(leases.annotation(suffix, LAST_BYTES), "300");
            assert_eq!(leases.annotation(suffix, LAST_TIME), "2026-09-21T14:15:00Z");
        }
        // After a delta, and after a run that needed no delta, the delta Lease is renewed.
        leases.update(&state(100, Some(150)), at(2));
        assert_eq!(leases.revisions_and_times(), [(100, 1), (150, 2)]);
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
        leases.update(&current, at(3));
        assert_eq!(leases.revisions_and_times(), [(100, 1), (150, 3)]);
        // Nothing is new.
        let left = leases.update(&state(100, Some(150)), at(4));
        assert_eq!(left, [LeaseDecision::Leave, LeaseDecision::Leave]);
        // A compaction resets the accumulated deltas, but does not renew the delta Lease.
        let compacted = LeaseState {
            full_is_new: true,
            ..state(150, None)
        };
        leases.update(&compacted, at(5));
        assert_eq!(leases.revisions_and_times(), [(150, 5), (150, 3)]);
        assert_eq!(leases.annotation(DELTA_SUFFIX, ACCUMULATED_EVENTS), "0");
        // An old state is ignored.
        let late = LeaseState {
            deltas_are_current: true,
            full_is_new: true,
            ..state(100, Some(120))
        };
        let left = leases.update(&late, at(6));
        assert_eq!(left, [LeaseDecision::Ahead(150), LeaseDecision::Ahead(150)]);
        assert_eq!(leases.annotation(FULL_SUFFIX, LAST_NAME), "Full-150");
        assert_eq!(leases.annotation(FULL_SUFFIX, LAST_BYTES), "450");
        // A new timeline may go back.
        let began = LeaseState {
            timeline_began: true,
            ..state(90, None)
        };
        leases.update(&began, at(7));
        assert_eq!(leases.revisions_and_times(), [(90, 7), (90, 7)]);
        // A clock that is behind does not set the renew time back.
        let current = LeaseState {
            deltas_are_current: true,
            ..state(90, None)
        };
        let left = leases.update(&current, at(5));
        assert_eq!(left, [LeaseDecision::Leave, LeaseDecision::Leave]);
    }

    #[test]
    fn a_lease_whose_holder_is_not_a_revision_is_foreign() {
        let lease = |holder: Option<&str>| Lease {
            spec: Some(LeaseSpec {
                holder_identity: holder.map(str::to_owned),
                ..LeaseSpec::default()
            }),
            ..Lease::default()
        };
        let target = &lease_targets(&state(5, None))[0].1;
        for other in ["etcd-main-0", "a1b2:c3d4:Leader", "-1", "1.5"] {
            let decision = decide(Some(&lease(Some(other))), target, at(0));
            assert_eq!(decision, LeaseDecision::Foreign(other.to_owned()));
        }
        for new in [None, Some("")] {
            let decision = decide(Some(&lease(new)), target, at(0));
            assert!(matches!(decision, LeaseDecision::Write(_)), "{decision:?}");
        }
        let decision = decide(Some(&Lease::default()), target, at(0));
        assert!(matches!(decision, LeaseDecision::Write(_)), "{decision:?}");
    }

    #[test]
    fn a_patch_contains_only_changed_fields() {
        let change = LeaseUpdate {
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
