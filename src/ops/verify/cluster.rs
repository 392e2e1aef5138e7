//! Whether a backup is what a live cluster holds: its HashKV, folded, against that of every member.
//!
//! look at the cluster → a revision that both hold → ask every member → fold the backup as compacted as
//! the member is → compare. No database is written.

use crate::backup::chain;
use crate::error::{Error, Reason, Result};
use crate::etcd::cluster::{Cluster, MemberHash};
use crate::etcd::connect::Connector;
use crate::mvcc::{HashKv, Revision};
use crate::ops::fold::{Request, Source, Target, select::choose_timeline};
use crate::ops::report::{Clock, Report};
use crate::ops::scan::{Depth, Scan, scan};
use crate::ops::tags::without_excluded;
use crate::ops::{Context, identity};
use crate::telemetry::progress::Step;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// What to compare.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The timeline's ID; the newest where `None`.
    pub timeline: Option<String>,
    /// At this revision; at the newest one that the backup holds where `None`.
    pub revision: Option<Revision>,
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Status {
    /// Every member that could be compared holds what the backup holds.
    Equal,
}

/// What was found. The fields are a contract: `docs/verify-result.schema.json`.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// The revision that was compared.
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
    /// How many events of the deltas were folded.
    pub events: u64,
    /// How many keys are alive at `revision`.
    pub live_keys: u64,
    /// The members with a vote, by name.
    pub members: Vec<MemberOutcome>,
}

/// One member.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct MemberOutcome {
    /// Its name; empty if it was never started.
    pub name: String,
    /// Its ID, hexadecimal, as etcdctl shows it.
    pub id: String,
    /// Where it was asked; null if it answers nowhere.
    pub endpoint: Option<String>,
    /// Its HashKV at `revision`; null if it gave none.
    pub hash_kv: Option<u32>,
    /// The compacted revision that its HashKV depends on; -1 if nothing was compacted, null if it gave no
    /// HashKV.
    pub compact_revision: Option<i64>,
    /// Whether it holds what the backup holds; null if it could not be compared.
    pub equal: Option<bool>,
    /// Why it could not be compared. For people: it may change. null if it was.
    pub error: Option<String>,
}

/// What the comparison of all members came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// None differs, and one at least is equal.
    Equal,
    /// The backup holds something else than the cluster.
    BackupDiffers,
    /// Some members are equal and some are not, and it is not the backup that stands alone.
    MembersDiffer,
    /// No member could be compared.
    Unknown,
}

/// Judges by which of all members are equal (`None`: could not be compared). A majority that differs is
/// the cluster's word against the backup.
pub fn judge(equal: &[Option<bool>]) -> Verdict {
    let count = |what| equal.iter().filter(|e| **e == Some(what)).count();
    match (count(true), count(false)) {
        (0, 0) => Verdict::Unknown,
        (_, 0) => Verdict::Equal,
        (0, _) => Verdict::BackupDiffers,
        (_, differ) if differ * 2 > equal.len() => Verdict::BackupDiffers,
        _ => Verdict::MembersDiffer,
    }
}

/// The revision to compare at: the backup's newest one, no newer than the cluster's. Gives what an
/// operator should know, too.
///
/// # Errors
/// `NoCommonRevision` for a revision asked for that the cluster does not have yet.
pub fn choose_revision(
    wanted: Option<Revision>,
    saved: Revision,
    live: Revision,
) -> Result<(Revision, Option<String>)> {
    match wanted {
        Some(r) if r > live => Err(Reason::NoCommonRevision.error(format!(
            "--revision {r} is not there yet: the cluster is at revision {live}"
        ))),
        Some(r) => Ok((r, None)),
        None if saved > live => Ok((
            live,
            Some(format!(
                "the cluster is at revision {live}, behind the backup's {saved}: it was compared there; the cluster may be a restored one"
            )),
        )),
        None => Ok((saved, None)),
    }
}

/// Compares the backup in the context's store with a live cluster.
///
/// # Errors
/// `BackupDiffers` and `MembersDiffer` with the hashes; `NoCommonRevision` where one side no longer
/// holds, or does not yet hold, what the other does; those of a live cluster that does not answer, of
/// choosing and folding a backup, and of the store; `Terminated`.
pub fn run(ctx: &Context, way: &Connector, options: &Options) -> Result<Report<Outcome>> {
    let clock = Clock::start();
    without_excluded(|| {
        let run = Run {
            ctx,
            way,
            options,
            clock: clock.clone(),
        };
        run.run()
    })
}

struct Run<'a> {
    ctx: &'a Context,
    way: &'a Connector,
    options: &'a Options,
    clock: Clock,
}

/// The backup's side of a comparison.
struct Folded {
    hash: HashKv,
    base: String,
    deltas: Vec<String>,
    events: u64,
}

impl Run<'_> {
    fn run(mut self) -> Result<Report<Outcome>> {
        // First what fails fast.
        let cluster = Cluster::observe(self.way)?;
        if let Some(recorded) = identity::read(&self.ctx.store)?
            && !recorded.is_of(cluster.cluster_id)
        {
            self.clock.warn(format!(
                "{} is the backup of cluster {}, and --endpoints is cluster {}: check --endpoints and --store",
                self.ctx.store.url(),
                recorded.cluster(),
                cluster.hex_id()
            ));
        }
        let scan = scan(self.ctx, Depth::Doubtful)?;
        let (timeline, _) = choose_timeline(self.ctx, &scan, self.options.timeline.as_deref())?;
        let saved = timeline
            .last(&scan.catalog, &scan.contents)
            .ok_or_else(|| Reason::NoSnapshots.error("there is no snapshot to compare"))?;
        let live = Revision(cluster.revision);
        let (revision, warning) = choose_revision(self.options.revision, saved, live)?;
        if let Some(warning) = warning {
            self.clock.warn(warning);
        }
        tracing::info!(
            revision = revision.0,
            saved = saved.0,
            live = live.0,
            timeline = timeline.id,
            "comparing the backup with the cluster"
        );
        let step = Step::new(format!("ask for HashKV at {revision}"), None);
        let answers = cluster.hash_kv_all(self.way, revision.0)?;
        drop(step);
        if answers.iter().all(|a| a.hash.is_none()) {
            return Err(nobody_answers(&answers, revision, saved));
        }
        let folded = self.fold_for(&scan, &timeline.id, revision, &answers)?;
        let members: Vec<MemberOutcome> = answers.iter().map(|a| compared(a, &folded)).collect();
        for m in members.iter().filter(|m| m.equal.is_none()) {
            let why = m.error.as_deref().unwrap_or("it did not answer");
            self.clock
                .warn(format!("member {} could not be compared: {why}", m.name));
        }
        let equal: Vec<Option<bool>> = members.iter().map(|m| m.equal).collect();
        match judge(&equal) {
            Verdict::Equal => {}
            Verdict::Unknown => {
                let first = folded.into_values().find_map(Result::err);
                return Err(first.unwrap_or_else(|| nobody_answers(&answers, revision, saved)));
            }
            verdict => {
                let all = members.iter().map(|m| show(m, &answers, &folded));
                let all: Vec<String> = all.collect();
                return Err(differs(verdict, revision, &timeline.id, &all.join("; ")));
            }
        }
        // The first that was compared: one there is, or the verdict would be another.
        let first = answers
            .iter()
            .zip(&members)
            .find(|(_, m)| m.equal.is_some());
        let compact = first.and_then(|(a, _)| Some(a.hash?.compact_revision));
        let compact = compact.ok_or_else(|| Error::internal("equal to nobody"))?;
        let Some(Ok(first)) = folded.into_iter().find(|(c, _)| *c == compact).map(|f| f.1) else {
            return Err(Error::internal("equal to what was not folded"));
        };
        Ok(self.clock.report(Outcome {
            status: Status::Equal,
            revision,
            compact_revision: Revision(compact),
            hash_kv: first.hash.hash,
            timeline: timeline.id.clone(),
            base: first.base,
            deltas: first.deltas,
            events: first.events,
            live_keys: first.hash.live_keys,
            members,
        }))
    }

    /// Folds the backup for every compacted revision that members have: mostly that is one.
    fn fold_for(
        &mut self,
        scan: &Scan,
        timeline: &str,
        revision: Revision,
        answers: &[MemberHash],
    ) -> Result<BTreeMap<i64, Result<Folded>>> {
        let mut folded = BTreeMap::new();
        for hash in answers.iter().filter_map(|a| a.hash) {
            let compact = Revision(hash.compact_revision);
            if folded.contains_key(&compact.0) {
                continue;
            }
            let made = match self.fold(scan, timeline, revision, compact) {
                Err(e) if e.reason() == Reason::NoCommonRevision => Err(e),
                other => Ok(other?),
            };
            folded.insert(compact.0, made);
        }
        Ok(folded)
    }

    /// HashKV of the backup at a revision, as if compacted at `compact`.
    fn fold(
        &mut self,
        scan: &Scan,
        timeline: &str,
        revision: Revision,
        compact: Revision,
    ) -> Result<Folded> {
        let request = Request {
            target: Target::Revision(revision),
            timeline: Some(timeline.to_owned()),
        };
        let source = match Source::open_with_history(self.ctx, scan, &request, compact) {
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
        Ok(Folded {
            hash,
            base: source.base_name(),
            deltas: source.deltas().map(|d| d.name.to_string()).collect(),
            events,
        })
    }
}

/// A member's answer beside what the backup folds to, as compacted as the member is.
fn compared(a: &MemberHash, folded: &BTreeMap<i64, Result<Folded>>) -> MemberOutcome {
    let backup = a.hash.and_then(|h| folded.get(&h.compact_revision));
    let ours = backup.and_then(|b| b.as_ref().ok());
    MemberOutcome {
        name: a.name.clone(),
        id: format!("{:x}", a.member),
        endpoint: a.endpoint.clone(),
        hash_kv: a.hash.map(|h| h.hash),
        compact_revision: a.hash.map(|h| h.compact_revision),
        equal: a.hash.and_then(|h| Some(ours?.hash.is(h.hash))),
        error: match (&a.error, backup) {
            (Some((_, said)), _) => Some(said.clone()),
            (None, Some(Err(e))) => Some(e.to_string()),
            _ => None,
        },
    }
}

/// What it comes to that members do not hold what the backup does.
fn differs(verdict: Verdict, revision: Revision, timeline: &str, members: &str) -> Error {
    let (reason, what, advice) = match verdict {
        Verdict::BackupDiffers => (
            Reason::BackupDiffers,
            format!("the backup (timeline {timeline}) is not what the cluster holds"),
            "take a full snapshot; if the cluster was restored meanwhile, that begins a new timeline",
        ),
        _ => (
            Reason::MembersDiffer,
            "members hold different data, and some of them what the backup holds".to_owned(),
            "look after the members that differ: etcd can be damaged",
        ),
    };
    reason.error(format!(
        "at revision {revision} {what}: {members}: {advice}"
    ))
}

/// No full leads to the revision and holds the history that the members still count.
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
        (false, _) => format!("the cluster is at revision {revision}, and the backup: {e}"),
        (true, Revision::NONE) => format!(
            "etcd was never compacted, and no full snapshot that leads to revision {revision} holds all history, so their HashKVs cannot be compared: keep history with `deltafold compact --keep-history all`, or take a full snapshot; if that does not help, look whether --endpoints are this backup's cluster"
        ),
        (true, _) => format!(
            "etcd holds history from revision {compact} on, and every full snapshot that leads to revision {revision} was compacted later: run again when etcd was compacted next, or take a full snapshot"
        ),
    };
    Reason::NoCommonRevision.error(message)
}

/// No member gave its hash at that revision.
fn nobody_answers(answers: &[MemberHash], revision: Revision, saved: Revision) -> Error {
    let errors: Vec<&(Reason, String)> = answers.iter().filter_map(|a| a.error.as_ref()).collect();
    if errors.iter().any(|(reason, _)| *reason == Reason::Conflict) {
        let advice = match revision == saved {
            true => {
                "the newest snapshot is older than etcd's history: take one, or keep more history"
            }
            false => "choose a newer --revision",
        };
        return Reason::NoCommonRevision.error(format!(
            "etcd has compacted revision {revision} away: {advice}"
        ));
    }
    let said: Vec<String> = answers
        .iter()
        .filter_map(|a| Some(format!("{}: {}", a.name, a.error.as_ref()?.1)))
        .collect();
    let reason = errors.first().map_or(Reason::EtcdUnreachable, |e| e.0);
    reason.error(format!(
        "no member gives its HashKV at revision {revision}: {}",
        said.join("; ")
    ))
}

/// A member's side and the backup's, for people.
fn show(
    member: &MemberOutcome,
    answers: &[MemberHash],
    folded: &BTreeMap<i64, Result<Folded>>,
) -> String {
    let mut answers = answers.iter();
    let answer = answers.find(|a| format!("{:x}", a.member) == member.id);
    let hash = answer.and_then(|a| a.hash);
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
    fn a_majority_that_differs_is_against_the_backup() {
        let (yes, no, unknown) = (Some(true), Some(false), None);
        assert_eq!(judge(&[yes, yes, unknown]), Verdict::Equal);
        assert_eq!(judge(&[no]), Verdict::BackupDiffers);
        assert_eq!(judge(&[no, unknown, unknown]), Verdict::BackupDiffers);
        assert_eq!(judge(&[no, yes, no]), Verdict::BackupDiffers);
        assert_eq!(judge(&[yes, yes, no]), Verdict::MembersDiffer);
        assert_eq!(judge(&[yes, no]), Verdict::MembersDiffer);
        assert_eq!(judge(&[unknown, unknown]), Verdict::Unknown);
        assert_eq!(judge(&[]), Verdict::Unknown);
    }

    #[test]
    fn what_the_cluster_does_not_have_yet_is_not_compared() {
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
