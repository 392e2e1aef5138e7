//! Lists a prefix: its snapshots, the newest chain, the revisions that can be restored, and problems.
//!
//! Problems of snapshots are part of the result and no errors. Nothing is written.

pub mod files;

use crate::backup::chain::{self, Choice, KnownBases};
use crate::backup::timeline::{NamesOnly, Timeline, Timelines};
use crate::backup::{Catalog, Compression, Kind, Snapshot};
use crate::base::flag_values::yes_or_no;
use crate::base::parallel::each;
use crate::base::shorten;
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;
use crate::ops::findings::{self, Finding, gap_after};
use crate::ops::report::{Report, ReportBuilder};
use crate::prefix::Context;
use crate::prefix::identity::{self, Identity};
use crate::prefix::restorable::{Bases, Restorable};
use crate::prefix::scan::{Depth, Scan, scan};
use crate::prefix::set_aside::{Purpose, decide_again};
use chrono::{DateTime, Utc};
use serde::Serialize;
use std::collections::{HashMap, HashSet};

/// The command that reads contents.
pub(super) const DEEP: &str = "`deltafold list --deep`";

/// Without --deep, the locks of this many of the newest snapshots are read.
const FEW: usize = 64;
/// Locks that are read at once.
const AT_ONCE: usize = 16;

/// The options of `list`.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Options {
    /// Read every snapshot completely, with its tags and locks, instead of only the names
    #[arg(long, value_parser = yes_or_no)]
    pub deep: bool,
}

/// The result of `list`. The fields are a contract.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ListedBackup {
    /// The cluster whose backup it is, from the object `deltafold-identity.json`. null if there is no such
    /// object, or if it cannot be read.
    pub identity: Option<RecordedIdentity>,
    /// All snapshots, in order of creation.
    pub snapshots: Vec<ListedSnapshot>,
    /// The histories that the snapshots are of, in order of their beginning.
    pub timelines: Vec<ListedTimeline>,
    /// The newest revision of the newest timeline; if no timeline is the newest, that of all snapshots. null
    /// if there is no usable snapshot.
    pub latest_revision: Option<Revision>,
    /// The revisions that can be restored, by timeline.
    pub restorable: Vec<Restorable>,
    /// The problems and remarks.
    pub problems: Vec<Finding>,
}

/// A history of the cluster.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ListedTimeline {
    /// The timeline's ID.
    pub timeline: String,
    /// When its first snapshot was taken, by its name. null of the first timeline.
    pub began: Option<DateTime<Utc>>,
    /// The ID of the timeline that it left. null if it left none, or if only contents tell (see --deep).
    pub left_timeline: Option<String>,
    /// The last revision that it has in common with the timeline that it left; null if that is not known.
    pub left_at_revision: Option<Revision>,
}

/// The cluster whose backup a prefix holds.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RecordedIdentity {
    /// The cluster ID in hexadecimal, as etcdctl shows it; null if only snapshot files were imported.
    pub cluster_id: Option<String>,
    /// The UID of the namespace `kube-system`; null if it is not known.
    pub kube_system_uid: Option<String>,
    /// The names of the members at the time of the record.
    pub member_names: Vec<String>,
    /// When the identity was recorded; null if the time in the object is invalid.
    pub recorded_at: Option<DateTime<Utc>>,
    /// The IDs of the clusters from which the prefix was taken over, the oldest first.
    pub former_cluster_ids: Vec<String>,
}

impl RecordedIdentity {
    /// Returns the cluster as text.
    pub fn text(&self) -> String {
        let members = shorten::line(&self.member_names, ", ", "");
        let members = if members.is_empty() {
            String::new()
        } else {
            format!(", members {members}")
        };
        match (&self.cluster_id, &self.kube_system_uid) {
            (Some(id), _) => format!("{id}{members}"),
            (None, Some(uid)) => format!("with kube-system {uid}"),
            (None, None) => "that is not known".to_owned(),
        }
    }
}

impl From<Identity> for RecordedIdentity {
    fn from(i: Identity) -> Self {
        let recorded_at = DateTime::parse_from_rfc3339(&i.recorded_at).ok();
        RecordedIdentity {
            cluster_id: Some(i.cluster_id).filter(|id| !id.is_empty()),
            kube_system_uid: i.kube_system_uid,
            member_names: i.member_names,
            recorded_at: recorded_at.map(|t| t.with_timezone(&Utc)),
            former_cluster_ids: i.former_cluster_ids,
        }
    }
}

/// A snapshot.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct ListedSnapshot {
    /// The name of the object without its folder.
    pub name: String,
    /// The path of the object below the store's prefix.
    pub path: String,
    /// `Full`: a whole database. `Incr`: the events of a range of revisions (a delta).
    pub kind: Kind,
    /// The first revision in the name of a delta; 0 for a full.
    pub start_revision: Revision,
    /// The last revision in the name. A full may hold later ones.
    pub last_revision: Revision,
    /// When the snapshot was taken, by its name.
    pub created: DateTime<Utc>,
    /// Size in the store, in bytes.
    pub bytes: u64,
    /// The compression, by the name.
    pub compression: Compression,
    /// Whether the name has the suffix `.final`: it is the last snapshot of a cluster that was given up.
    #[serde(rename = "final")]
    pub is_final: bool,
    /// Whether the snapshot is encrypted: its name ends with `.age`.
    pub encrypted: bool,
    /// Whether the snapshot is excluded, by a tag or by an object `deltafold-excluded/<name>`.
    pub excluded: bool,
    /// Whether the snapshot is ignored because it is not encrypted although keys are given: anybody who can
    /// write to the store may have made it.
    pub untrusted: bool,
    /// The ID of the first timeline of the snapshot. null if only its content would tell (see --deep), or if
    /// the snapshot is excluded or cannot be read.
    pub timeline: Option<String>,
    /// Whether `deltafold compact` would use the snapshot now.
    pub in_chain: bool,
    /// The time until which the object lock of the bucket keeps the snapshot from deletion. null if it has no
    /// retention, or if it was not read: of more than 64 snapshots, only the newest are read (see --deep).
    pub locked_until: Option<DateTime<Utc>>,
}

/// Lists a prefix.
///
/// # Errors
/// `NoSnapshots` if the prefix has no snapshot; errors of the store. Problems of snapshots are part of the
/// result.
pub fn run(ctx: &Context, options: Options) -> Result<Report<ListedBackup>> {
    let report = ReportBuilder::start();
    let outcome = decide_again([ctx], Purpose::Verify, || list(ctx, &options))?;
    Ok(report.report(outcome))
}

fn list(ctx: &Context, options: &Options) -> Result<ListedBackup> {
    let depth = if options.deep {
        Depth::All
    } else {
        Depth::Names
    };
    let scan = scan(ctx, depth)?;
    let newest = scan.timelines.newest(&scan.catalog);
    let newest_first = newest.iter().copied().chain(&scan.timelines.all);
    let bases = Bases::new(scan.contents.known_bases());
    let bases = bases.read(ctx, &scan.catalog, newest_first)?;
    let mut problems = problems(ctx, &scan, options.deep)?;
    for (&i, e) in &bases.damaged {
        problems.push(of_snapshot(&scan, i, e));
    }
    let (identity, problem) = recorded_identity(ctx)?;
    problems.extend(problem);
    problems.extend(newest.as_ref().err().map(Finding::from));
    let newest = newest.ok();
    // If `compact` would fail, nothing is in its chain. The cause, no newest timeline or damage, is among the
    // problems already.
    let in_chain = match newest.filter(|_| !is_blocked(&scan)) {
        Some(t) => newest_chain(&scan, t, &bases.known).unwrap_or_else(|problem| {
            problems.push(problem);
            HashSet::new()
        }),
        None => HashSet::new(),
    };
    // A later insert replaces an earlier one, so go through the timelines in reverse: the first one that has
    // the snapshot is kept.
    let mut timeline_of: HashMap<usize, &str> = HashMap::new();
    for t in scan.timelines.all.iter().rev() {
        timeline_of.extend(t.members.iter().map(|m| (m.snapshot, t.id.as_str())));
    }
    let locked_until = locked_until(ctx, &scan.catalog, options.deep)?;
    let mut snapshots = Vec::with_capacity(locked_until.len());
    for (i, (s, locked_until)) in scan.catalog.snapshots.iter().zip(locked_until).enumerate() {
        let timeline = timeline_of
            .get(&i)
            .filter(|_| options.deep || !scan.is_doubtful(i));
        snapshots.push(ListedSnapshot {
            timeline: timeline.map(|&id| id.to_owned()),
            in_chain: in_chain.contains(&i),
            locked_until,
            ..ListedSnapshot::from(s)
        });
    }
    let mut restorable = Vec::new();
    for t in &scan.timelines.all {
        restorable.extend(bases.restorable(&scan.catalog, &scan.contents, t));
    }
    Ok(ListedBackup {
        identity,
        snapshots,
        timelines: timelines(&scan),
        latest_revision: match newest {
            Some(t) => t.last(&scan.catalog, &scan.contents),
            None => scan.catalog.latest_revision(),
        },
        restorable,
        problems: problems
            .into_iter()
            .map(|p| p.with_remedy_in_store(ctx.store.url()))
            .collect(),
    })
}

fn timelines(scan: &Scan) -> Vec<ListedTimeline> {
    let listed = scan.timelines.all.iter().map(|t| {
        let (left, at) = t.left.clone().unzip();
        ListedTimeline {
            timeline: t.id.clone(),
            began: t
                .began(&scan.catalog)
                .and_then(|seconds| DateTime::from_timestamp(seconds, 0)),
            left_timeline: left,
            left_at_revision: at,
        }
    });
    listed.collect()
}

/// Returns for each snapshot the end of its retention, if the bucket has an object lock and permits to read it.
/// Of many snapshots, only the newest are read, unless `all` is true.
fn locked_until(ctx: &Context, catalog: &Catalog, all: bool) -> Result<Vec<Option<DateTime<Utc>>>> {
    let mut locked_until = vec![None; catalog.snapshots.len()];
    let unless_denied = |result: Result<Option<DateTime<Utc>>>| match result {
        Err(e) if e.reason() == Reason::PermissionDenied => {
            tracing::debug!("locks are not shown: {e}");
            Ok(None)
        }
        // The snapshot was deleted meanwhile.
        Err(e) if e.reason() == Reason::SnapshotVanished => Ok(None),
        result => result,
    };
    match ctx.store.has_object_lock() {
        Ok(true) => {}
        Ok(false) => return Ok(locked_until),
        Err(e) => return unless_denied(Err(e)).map(|_| locked_until),
    }
    let most = if all { usize::MAX } else { FEW };
    let skipped = catalog.snapshots.len().saturating_sub(most);
    let newest = &catalog.snapshots[skipped..];
    let read = each(AT_ONCE, newest, |s| ctx.store.retained_until(&s.path));
    let now = Utc::now();
    for (slot, until) in locked_until[skipped..].iter_mut().zip(read) {
        *slot = unless_denied(until)?.filter(|until| *until > now);
    }
    Ok(locked_until)
}

/// The snapshots of the chain that `compact` would use now.
fn newest_chain(
    scan: &Scan,
    timeline: &Timeline,
    known: &KnownBases,
) -> Result<HashSet<usize>, Finding> {
    let catalog = &scan.catalog;
    match chain::choose(catalog, timeline, None, known) {
        Ok(Choice::Chosen(c)) => Ok(c.snapshots().collect()),
        Ok(Choice::ReadFirst(i)) => Err(of_snapshot(scan, i, &gap_after(scan, timeline, i, DEEP))),
        Err(e) => Err(Finding::from(&e)),
    }
}

/// Whether `compact` would fail because of a damaged snapshot. It reads its chain and all doubtful snapshots.
fn is_blocked(scan: &Scan) -> bool {
    let unreadable = &scan.contents.unreadable;
    if unreadable.is_empty() {
        return false;
    }
    if unreadable.keys().any(|&i| scan.is_doubtful(i)) {
        return true;
    }
    // `compact` chooses its chain by names, before it reads it.
    let chosen = Timelines::build(&scan.catalog, &NamesOnly).map(|by_names| {
        let timeline = by_names.newest(&scan.catalog)?;
        chain::choose(&scan.catalog, timeline, None, &scan.contents.known_bases())
    });
    match chosen {
        Ok(Ok(Choice::Chosen(c))) => c.snapshots().any(|i| unreadable.contains_key(&i)),
        Ok(Ok(Choice::ReadFirst(i))) => unreadable.contains_key(&i),
        _ => false,
    }
}

fn path(scan: &Scan, i: usize) -> String {
    scan.catalog.snapshots[i].path.clone()
}

/// Returns the recorded identity of the prefix, or a problem if it cannot be read.
pub(super) fn recorded_identity(
    ctx: &Context,
) -> Result<(Option<RecordedIdentity>, Option<Finding>)> {
    match identity::read(&ctx.store) {
        Ok(identity) => Ok((identity.map(RecordedIdentity::from), None)),
        Err(e) if e.reason() == Reason::Configuration => {
            let problem = Finding::note("IdentityUnreadable", e.to_string(), Vec::new());
            Ok((None, Some(problem)))
        }
        Err(e) => Err(e),
    }
}

/// Returns an error as the finding about a snapshot.
fn of_snapshot(scan: &Scan, i: usize, e: &Error) -> Finding {
    Finding::from(e).about(vec![path(scan, i)])
}

fn problems(ctx: &Context, scan: &Scan, deep: bool) -> Result<Vec<Finding>> {
    let catalog = &scan.catalog;
    let deep_command = (!deep).then_some(DEEP);
    let mut problems = findings::of_scan(ctx, scan, deep_command);
    // Only doubtful snapshots were compared so far. Compare each other snapshot with the next full, too: their
    // contents may belong to different histories.
    let mut since_full: Vec<usize> = Vec::new();
    for i in catalog.usable() {
        let snapshot = &catalog.snapshots[i];
        if snapshot.begins_timeline {
            since_full.clear();
        }
        let is_full = snapshot.name.is_full();
        if is_full {
            for &before in since_full.iter().filter(|&&b| !scan.is_doubtful(b)) {
                if let Some(r) = scan.contents.disagreement(before, i)? {
                    let message = format!(
                        "they disagree from revision {r} on: the history forked there, and the later one is used"
                    );
                    let paths = vec![path(scan, before), path(scan, i)];
                    problems.push(Finding::error(Reason::HistoryMismatch, message).about(paths));
                }
            }
            since_full.clear();
        }
        since_full.push(i);
    }
    Ok(problems)
}

impl From<&Snapshot> for ListedSnapshot {
    fn from(s: &Snapshot) -> Self {
        ListedSnapshot {
            name: s.name.to_string(),
            path: s.path.clone(),
            kind: s.name.kind,
            start_revision: s.name.start,
            last_revision: s.name.last,
            created: s.name.created_at(),
            bytes: s.bytes,
            compression: s.name.compression,
            is_final: s.name.is_final,
            encrypted: s.name.is_encrypted,
            excluded: s.excluded,
            untrusted: s.untrusted,
            timeline: None,
            in_chain: false,
            locked_until: None,
        }
    }
}
