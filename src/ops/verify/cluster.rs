//! Compares a backup with a live cluster: the HashKV of the folded backup with that of every member.
//!
//! The steps: observe the cluster; choose a revision that both hold; ask every member for its HashKV; fold the backup,
//! compacted like the member; compare. No database is written, nothing in etcd is changed, and only the verification's
//! record is written to the store.

use super::Verdict;
use super::record::{self, RecordLevel, VerificationRecord};
use crate::backup::chain;
use crate::base::opt::{ENDPOINTS, REVISION, STORE, TIMELINE};
use crate::error::{Error, Reason, Result};
use crate::etcd::cluster::{Cluster, MemberHash};
use crate::etcd::connect::Connector;
use crate::mvcc::{HashKv, Revision};
use crate::ops::report::{Report, ReportBuilder};
use crate::prefix::open::State;
use crate::prefix::scan::{Depth, Scan, scan};
use crate::prefix::select::{At, StateRequest, choose_timeline};
use crate::prefix::set_aside::{Purpose, decide_again};
use crate::prefix::{Context, identity};
use crate::telemetry::progress::Step;
use serde::Serialize;
use std::collections::BTreeMap;

/// The options of a comparison.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The timeline's ID; `None` for the newest.
    pub timeline: Option<String>,
    /// The revision of the comparison; `None` for the newest one in the backup.
    pub revision: Option<Revision>,
    /// Record the result in the store.
    pub record: bool,
}

/// The result of a comparison. The fields are a contract.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ComparedCluster {
    /// Always `Equal`: a difference is an error of the operation.
    pub verdict: Verdict,
    /// The revision of the comparison.
    pub revision: Revision,
    /// The compacted revision that `hash_kv` depends on: that of the first member that was compared; -1 if it
    /// never compacted.
    pub compact_revision: Revision,
    /// The backup's HashKV at `revision`, as if compacted at `compact_revision`.
    pub hash_kv: u32,
    /// The ID of the timeline that was folded.
    pub timeline: String,
    /// The name, without its folder, of the full snapshot that the deltas were folded into.
    pub base: String,
    /// The names, without their folders, of the delta snapshots that were folded, in order.
    pub deltas: Vec<String>,
    /// Number of events of the deltas.
    pub events: u64,
    /// Number of live keys at `revision`.
    pub live_keys: u64,
    /// The members with a vote, by name.
    pub members: Vec<ComparedMember>,
    /// The path of the object that records this verification for `deltafold status`, below the store's
    /// prefix; null if it was not written.
    pub recorded: Option<String>,
}

/// A member in the report.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ComparedMember {
    /// The member's name; empty if the member was never started.
    pub name: String,
    /// The member's ID, hexadecimal, as etcdctl shows it.
    pub id: String,
    /// The endpoint that was asked; null if the member answers at none.
    pub endpoint: Option<String>,
    /// The member's HashKV at `revision`; null if the member returned none.
    pub hash_kv: Option<u32>,
    /// The compacted revision that the member's HashKV depends on; -1 if nothing was compacted, null if the
    /// member returned no HashKV.
    pub compact_revision: Option<i64>,
    /// Whether the member equals the backup; null if it could not be compared.
    pub equal: Option<bool>,
    /// Why the member could not be compared; null if it was compared. Human-readable: the text may change.
    pub error: Option<String>,
}

/// The comparison of all members, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComparisonResult {
    /// At least one member equals the backup, and none differs.
    Equal,
    /// The backup holds other data than the cluster.
    BackupDiffers,
    /// Some members equal the backup and some differ, without a majority against the backup.
    MembersDiffer,
    /// No member could be compared.
    Unknown,
}

/// Decides from the comparisons of all members; `None` is a member that could not be compared. If a majority
/// of all members differs, the backup is wrong.
pub fn judge(equal: &[Option<bool>]) -> ComparisonResult {
    let count = |result| equal.iter().filter(|e| **e == Some(result)).count();
    match (count(true), count(false)) {
        (0, 0) => ComparisonResult::Unknown,
        (_, 0) => ComparisonResult::Equal,
        (0, _) => ComparisonResult::BackupDiffers,
        (_, differ) if differ * 2 > equal.len() => ComparisonResult::BackupDiffers,
        _ => ComparisonResult::MembersDiffer,
    }
}

/// Returns the revision of the comparison and a warning, if there is one. Without a requested revision, that
/// is the backup's newest, or the cluster's if the cluster is behind.
///
/// # Errors
/// Fails with `NoCommonRevision` if the cluster has not reached the requested revision.
pub fn choose_revision(
    requested: Option<Revision>,
    saved: Revision,
    live: Revision,
) -> Result<(Revision, Option<String>)> {
    match requested {
        Some(r) if r > live => Err(Reason::NoCommonRevision.error(format!(
            "the cluster has not reached {REVISION} {r}: it is at revision {live}"
        ))),
        Some(r) => Ok((r, None)),
        None if saved > live => Ok((
            live,
            Some(format!(
                "the cluster is at revision {live}, behind the backup's {saved}, and was compared there; it may have been restored"
            )),
        )),
        None => Ok((saved, None)),
    }
}

/// Compares the backup in the context's store with a live cluster.
///
/// # Errors
/// Fails with `BackupDiffers` or `MembersDiffer` and the hashes; with `NoCommonRevision` if no revision and
/// history exists on both sides; with the errors of etcd connections, of choosing and folding a chain, and of
/// the store; with `Terminated`.
pub fn run(
    ctx: &Context,
    connector: &Connector,
    options: &Options,
) -> Result<Report<ComparedCluster>> {
    let clock = ReportBuilder::start();
    decide_again([ctx], Purpose::Verify, || {
        let comparison = Comparison {
            ctx,
            connector,
            options,
            clock: clock.clone(),
            records: options.record,
        };
        comparison.run()
    })
}

/// A comparison in progress.
struct Comparison<'a> {
    ctx: &'a Context,
    connector: &'a Connector,
    options: &'a Options,
    clock: ReportBuilder,
    /// Whether the result is recorded: it must be about this backup's cluster and the newest chain.
    records: bool,
}

/// The backup's side of a comparison.
struct FoldedBackup {
    hash: HashKv,
    base: String,
    deltas: Vec<String>,
    events: u64,
}

impl Comparison<'_> {
    fn run(mut self) -> Result<Report<ComparedCluster>> {
        // The cluster comes first, because it fails faster than the store.
        let cluster = Cluster::observe(self.connector)?;
        if let Some(recorded) = identity::read(&self.ctx.store)?
            && !recorded.is_of(cluster.cluster_id)
        {
            // A clone that was restored from the backup equals it, whatever the live cluster holds.
            self.records = false;
            self.clock.warn(format!(
                "{} is the backup of cluster {}, but {ENDPOINTS} is cluster {}, so this comparison is not recorded: check {ENDPOINTS} and {STORE}",
                self.ctx.store.url(),
                recorded.describe_cluster(),
                cluster.hex_id()
            ));
        }
        let scan = scan(self.ctx, Depth::Doubtful)?;
        let wanted = StateRequest {
            timeline: self.options.timeline.clone(),
            ..StateRequest::default()
        };
        let (timeline, _) = choose_timeline(self.ctx, &scan, &wanted)?;
        let saved = timeline
            .last(&scan.catalog, &scan.contents)
            .ok_or_else(|| Reason::NoSnapshots.error("there is no snapshot to compare"))?;
        let live = Revision(cluster.revision);
        let (revision, warning) = choose_revision(self.options.revision, saved, live)?;
        if let Some(warning) = warning {
            self.clock.warn(warning);
        }
        let bound = match (&self.options.timeline, self.options.revision) {
            (Some(_), _) => Some(TIMELINE),
            (None, Some(_)) => Some(REVISION),
            (None, None) => None,
        };
        if let Some(flag) = bound.filter(|_| self.records) {
            self.clock.warn(record::not_recorded(flag));
        }
        self.records &= bound.is_none();
        tracing::info!(
            revision = revision.0,
            saved = saved.0,
            live = live.0,
            timeline = timeline.id,
            "comparing the backup with the cluster"
        );
        let step = Step::new(format!("ask for HashKV at {revision}"), None);
        let mut hashes = cluster.hash_kv_all(self.connector, revision.0)?;
        drop(step);
        if hashes.iter().all(|h| h.hash.is_none()) {
            return Err(no_hashes(&hashes, revision, saved));
        }
        let mut folded = self.fold_for_all(&scan, &timeline.id, revision, &hashes)?;
        if folded.values().any(Result::is_err) {
            // etcd may remember the hash from before a compaction at exactly this revision, and a full that was taken
            // after it does not hold what was compacted.
            cluster.hash_kv_now(self.connector, &mut hashes, revision.0)?;
            folded = self.fold_for_all(&scan, &timeline.id, revision, &hashes)?;
        }
        let members: Vec<ComparedMember> =
            hashes.iter().map(|h| compare_member(h, &folded)).collect();
        for m in members.iter().filter(|m| m.equal.is_none()) {
            let why = m.error.as_deref().unwrap_or("it did not answer");
            self.clock
                .warn(format!("member {} could not be compared: {why}", m.name));
        }
        let equal: Vec<Option<bool>> = members.iter().map(|m| m.equal).collect();
        match judge(&equal) {
            ComparisonResult::Equal => {}
            ComparisonResult::Unknown => {
                let fold_error = folded.into_values().find_map(Result::err);
                return Err(fold_error.unwrap_or_else(|| no_hashes(&hashes, revision, saved)));
            }
            result => {
                let failure = match result {
                    ComparisonResult::BackupDiffers => Reason::BackupDiffers,
                    _ => Reason::MembersDiffer,
                };
                self.record(&timeline.id, revision, None, Some(failure));
                let described = members.iter().map(|m| describe(m, &hashes, &folded));
                let described = described.collect::<Vec<String>>().join("; ");
                return Err(difference(failure, revision, &timeline.id, &described));
            }
        }
        // At least one member was compared, or the result would be `Unknown`.
        let compared = members.iter().find(|m| m.equal.is_some());
        let compact = compared
            .and_then(|m| m.compact_revision)
            .ok_or_else(|| Error::internal("no member was compared"))?;
        let Some(Ok(first)) = folded.remove(&compact) else {
            return Err(Error::internal("a member was compared without a fold"));
        };
        // A cluster that is behind the backup has not confirmed the whole newest chain.
        self.records &= revision == saved;
        let recorded = self.record(&timeline.id, revision, Some(first.hash), None);
        Ok(self.clock.report(ComparedCluster {
            verdict: Verdict::Equal,
            revision,
            compact_revision: Revision(compact),
            hash_kv: first.hash.hash,
            timeline: timeline.id.clone(),
            base: first.base,
            deltas: first.deltas,
            events: first.events,
            live_keys: first.hash.live_keys,
            members,
            recorded,
        }))
    }

    /// Records the result of the comparison, if the options ask for it. Returns the path of the record.
    fn record(
        &mut self,
        timeline: &str,
        revision: Revision,
        hash: Option<HashKv>,
        failure: Option<Reason>,
    ) -> Option<String> {
        if !self.records {
            return None;
        }
        let record = VerificationRecord {
            timeline: Some(timeline.to_owned()),
            revision: Some(revision),
            hash_kv: hash.map(|h| h.hash),
            compact_revision: hash.map(|h| h.compact_revision),
            ..VerificationRecord::new(RecordLevel::Cluster)
        };
        let record = match failure {
            None => record,
            Some(reason) => record.failed(reason),
        };
        record::save(&self.ctx.store, &record, &mut self.clock)
    }

    /// Folds the backup once for each compacted revision of the members; usually they have the same.
    fn fold_for_all(
        &mut self,
        scan: &Scan,
        timeline: &str,
        revision: Revision,
        hashes: &[MemberHash],
    ) -> Result<BTreeMap<i64, Result<FoldedBackup>>> {
        let mut folded = BTreeMap::new();
        for hash in hashes.iter().filter_map(|h| h.hash) {
            let compact = Revision(hash.compact_revision);
            if folded.contains_key(&compact.0) {
                continue;
            }
            let result = match self.fold(scan, timeline, revision, compact) {
                Err(e) if e.reason() == Reason::NoCommonRevision => Err(e),
                other => Ok(other?),
            };
            folded.insert(compact.0, result);
        }
        Ok(folded)
    }

    /// Folds the backup up to a revision, and hashes the result as if compacted at `compact`.
    fn fold(
        &mut self,
        scan: &Scan,
        timeline: &str,
        revision: Revision,
        compact: Revision,
    ) -> Result<FoldedBackup> {
        let request = StateRequest {
            at: At::Revision(revision),
            timeline: Some(timeline.to_owned()),
            ..StateRequest::default()
        };
        let source = match State::open_with_history(self.ctx, scan, &request, compact) {
            Err(e) if e.reason() == Reason::OutOfRange => {
                return Err(no_history(scan, timeline, revision, compact, &e));
            }
            other => other?,
        };
        for warning in &source.warnings {
            if !self.clock.warnings.contains(warning) {
                self.clock.warnings.push(warning.clone());
            }
        }
        let (hash, events) = source.hash(self.ctx, compact, false)?;
        Ok(FoldedBackup {
            hash,
            base: source.base_name(),
            deltas: source.deltas().map(|d| d.name.to_string()).collect(),
            events,
        })
    }
}

/// Compares a member's hash with that of the backup, compacted at the same revision.
fn compare_member(
    member: &MemberHash,
    folded: &BTreeMap<i64, Result<FoldedBackup>>,
) -> ComparedMember {
    let backup = member.hash.and_then(|h| folded.get(&h.compact_revision));
    let backup_hash = backup.and_then(|b| b.as_ref().ok()).map(|b| b.hash);
    ComparedMember {
        name: member.name.clone(),
        id: format!("{:x}", member.member),
        endpoint: member.endpoint.clone(),
        hash_kv: member.hash.map(|h| h.hash),
        compact_revision: member.hash.map(|h| h.compact_revision),
        equal: member.hash.and_then(|h| Some(backup_hash?.is(h.hash))),
        error: match (&member.error, backup) {
            (Some((_, why)), _) => Some(why.clone()),
            (None, Some(Err(e))) => Some(e.to_string()),
            _ => None,
        },
    }
}

/// Returns the error for members that differ from the backup. `members` describes them.
fn difference(reason: Reason, revision: Revision, timeline: &str, members: &str) -> Error {
    let (problem, advice) = match reason {
        Reason::BackupDiffers => (
            format!("the backup (timeline {timeline}) differs from the cluster"),
            "take a full snapshot; if the cluster was restored in the meantime, that begins a new timeline",
        ),
        _ => (
            "members hold different data, and some of them equal the backup".to_owned(),
            "check the members that differ: their databases may be damaged",
        ),
    };
    reason.error(format!(
        "at revision {revision} {problem}: {members}: {advice}"
    ))
}

/// Returns the error for a fold without a usable full: none leads to the revision and also holds the history
/// that the members' hashes include.
fn no_history(
    scan: &Scan,
    timeline: &str,
    revision: Revision,
    compact: Revision,
    e: &Error,
) -> Error {
    let known = scan.contents.known_bases();
    let covered = scan.timelines.by_id(timeline).is_ok_and(|t| {
        chain::restorable(&scan.catalog, t, &known)
            .iter()
            .any(|&(first, last)| first <= revision && revision <= last)
    });
    let message = match (covered, compact) {
        (false, _) => format!("the cluster is at revision {revision}; the backup: {e}"),
        (true, Revision::NONE) => format!(
            "etcd was never compacted, but no full snapshot at or before revision {revision} holds all history, so the HashKVs cannot be compared: keep history with `deltafold compact --keep-history all`, or take a full snapshot; if that does not help, check that {ENDPOINTS} are this backup's cluster"
        ),
        (true, _) => format!(
            "etcd holds history from revision {compact} on, but every full snapshot at or before revision {revision} was compacted later: run again after etcd's next compaction, or take a full snapshot"
        ),
    };
    Reason::NoCommonRevision.error(message)
}

/// Returns the error if no member has returned its hash at the revision.
fn no_hashes(hashes: &[MemberHash], revision: Revision, saved: Revision) -> Error {
    let errors: Vec<&(Reason, String)> = hashes.iter().filter_map(|h| h.error.as_ref()).collect();
    if errors.iter().any(|(reason, _)| *reason == Reason::Conflict) {
        let advice = if revision == saved {
            "the newest snapshot is older than etcd's history: take one, or keep more history"
                .to_owned()
        } else {
            format!("choose a newer {REVISION}")
        };
        return Reason::NoCommonRevision.error(format!(
            "etcd has already compacted revision {revision}: {advice}"
        ));
    }
    let mut failures = Vec::new();
    for h in hashes {
        if let Some((_, why)) = &h.error {
            failures.push(format!("{}: {why}", h.name));
        }
    }
    let reason = errors.first().map_or(Reason::EtcdUnreachable, |e| e.0);
    reason.error(format!(
        "no member returns its HashKV at revision {revision}: {}",
        failures.join("; ")
    ))
}

/// Describes the comparison of a member in words.
fn describe(
    member: &ComparedMember,
    hashes: &[MemberHash],
    folded: &BTreeMap<i64, Result<FoldedBackup>>,
) -> String {
    let mut hashes = hashes.iter();
    let member_hash = hashes.find(|h| format!("{:x}", h.member) == member.id);
    let hash = member_hash.and_then(|h| h.hash);
    let backup = hash.and_then(|h| folded.get(&h.compact_revision)?.as_ref().ok());
    match (member.equal, hash, backup) {
        (Some(true), Some(h), _) => format!("{} is equal (HashKV {})", member.name, h.hash),
        (Some(false), Some(h), Some(b)) => format!(
            "{} differs (HashKV {}, the backup's {}, compacted at {})",
            member.name, h.hash, b.hash.hash, h.compact_revision
        ),
        _ => format!("{} could not be compared", member.name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_backup_is_wrong_if_a_majority_differs() {
        let (yes, no, unknown) = (Some(true), Some(false), None);
        assert_eq!(judge(&[yes, yes, unknown]), ComparisonResult::Equal);
        assert_eq!(judge(&[no]), ComparisonResult::BackupDiffers);
        assert_eq!(
            judge(&[no, unknown, unknown]),
            ComparisonResult::BackupDiffers
        );
        assert_eq!(judge(&[no, yes, no]), ComparisonResult::BackupDiffers);
        assert_eq!(judge(&[yes, yes, no]), ComparisonResult::MembersDiffer);
        assert_eq!(judge(&[yes, no]), ComparisonResult::MembersDiffer);
        assert_eq!(judge(&[unknown, unknown]), ComparisonResult::Unknown);
        assert_eq!(judge(&[]), ComparisonResult::Unknown);
    }

    #[test]
    fn a_revision_that_the_cluster_has_not_reached_is_refused() {
        let at = |wanted: Option<i64>, saved, live| {
            let wanted = wanted.map(Revision);
            choose_revision(wanted, Revision(saved), Revision(live))
                .map(|(r, w)| (r.0, w.is_some()))
        };
        assert_eq!(at(None, 10, 20).unwrap(), (10, false));
        assert_eq!(at(None, 20, 20).unwrap(), (20, false));
        assert_eq!(at(None, 30, 20).unwrap(), (20, true));
        assert_eq!(at(Some(7), 30, 20).unwrap(), (7, false));
        let e = at(Some(21), 30, 20).unwrap_err();
        assert_eq!(e.reason(), Reason::NoCommonRevision);
    }
}
