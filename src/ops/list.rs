//! The list: what a prefix holds, which of it makes a chain, what can be restored, what is wrong.

use crate::backup::chain::{self, Choice, KnownBases, Range};
use crate::backup::timeline::{NamesOnly, Timeline, Timelines};
use crate::backup::{Compression, Kind, Snapshot};
use crate::base::flag_values::yes_or_no;
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;
use crate::ops::Context;
use crate::ops::identity::{self, Identity};
use crate::ops::report::{Clock, Report, reasons_and};
use crate::ops::scan::{Depth, Scan, TAGS_UNREADABLE, scan_asking};
use crate::ops::tags::{self, Ask};
use chrono::{DateTime, Utc};
use schemars::JsonSchema;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

/// What tells more than names.
const DEEP: &str = "`deltafold list --deep`";

/// What to list.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct Options {
    /// Read every snapshot completely, instead of only the names
    #[arg(long, value_parser = yes_or_no)]
    pub deep: bool,
    /// Read the tags of all snapshots to show every excluded one, with a request per snapshot
    #[arg(long, value_parser = yes_or_no)]
    pub all_tags: bool,
}

/// What a prefix holds. The fields are a contract: `docs/list-result.schema.json`.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Outcome {
    /// Whose backup it is, as the object `deltafold-identity.json` tells. null if nobody has recorded it, or
    /// the object is unreadable.
    pub identity: Option<Recorded>,
    /// All snapshots, in order of creation.
    pub snapshots: Vec<Listed>,
    /// The newest revision of the newest timeline; if none is the newest, of all snapshots. null if no
    /// snapshot can be used.
    pub latest_revision: Option<Revision>,
    /// What can be restored, by timeline.
    pub restorable: Vec<Restorable>,
    /// What is wrong, or worth knowing.
    pub problems: Vec<Problem>,
}

/// Whose backup a prefix is.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Recorded {
    /// The cluster's ID, hexadecimal, as etcdctl shows it.
    pub cluster_id: String,
    /// Its members' names when it was recorded.
    pub member_names: Vec<String>,
    /// When it was recorded; null if that is unreadable.
    pub recorded_at: Option<DateTime<Utc>>,
    /// The IDs of the clusters that it was taken over from, the oldest first.
    pub former_cluster_ids: Vec<String>,
}

impl From<Identity> for Recorded {
    fn from(i: Identity) -> Self {
        let at = DateTime::parse_from_rfc3339(&i.recorded_at).ok();
        Recorded {
            cluster_id: i.cluster_id,
            member_names: i.member_names,
            recorded_at: at.map(|t| t.with_timezone(&Utc)),
            former_cluster_ids: i.former_cluster_ids,
        }
    }
}

/// One snapshot.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Listed {
    /// The object's name without its folder.
    pub name: String,
    /// The object's path below the store's prefix.
    pub path: String,
    /// `Full`: a whole database. `Incr`: the events of a range of revisions.
    pub kind: Kind,
    /// The first revision of a delta by its name; 0 for a full.
    pub start_revision: Revision,
    /// The last revision by its name. A full may hold more.
    pub last_revision: Revision,
    /// When it was taken, by its name.
    pub created: DateTime<Utc>,
    /// Size in the store, in bytes.
    pub bytes: u64,
    /// How it is compressed, by its name.
    pub compression: Compression,
    /// Whether its name ends with `.final`: the last snapshot of a cluster that was given up.
    #[serde(rename = "final")]
    pub is_final: bool,
    /// Whether it is encrypted, by its name: it ends with `.age`.
    pub encrypted: bool,
    /// Whether it is marked not to be used, by a tag or by an object `<name>.exclude`.
    pub excluded: bool,
    /// It is not encrypted, though keys are given: anybody who can write into the store may have made it, and
    /// it is not used.
    pub untrusted: bool,
    /// The ID of the first timeline that it is on. null if only its content would tell (see --deep), or if it
    /// is excluded or unreadable.
    pub timeline: Option<String>,
    /// Whether `deltafold compact` would take it now.
    pub in_chain: bool,
}

/// A range of revisions that can be restored.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Restorable {
    /// The timeline's ID.
    pub timeline: String,
    /// The oldest revision. By names, that of the oldest full; with --deep, the oldest one whose state that
    /// full still holds.
    pub first_revision: Revision,
    /// The newest revision.
    pub last_revision: Revision,
    /// When the oldest full of the range was made, by its name.
    pub first_time: DateTime<Utc>,
    /// When the snapshot that ends the range was made, by its name; with --deep, the time of the newest
    /// event, if a delta ends the range.
    pub last_time: DateTime<Utc>,
}

/// Problems beside those that `compact` would fail with.
const PROBLEMS: [&str; 6] = [
    "ForeignObject",
    "IdentityUnreadable",
    "RevisionPastName",
    "TagsNotRead",
    "TagsUnreadable",
    "TimelinesUnverified",
];

/// Something that is wrong.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Problem {
    /// A stable name: `ForeignObject` (names that are not those of snapshots), `IdentityUnreadable`
    /// (`deltafold-identity.json` does not tell whose backup it is), `TimelinesUnverified` (only contents
    /// tell whether the history forked: use --deep), `RevisionPastName` (a full holds more than its name
    /// says; harmless), `TagsNotRead` (the tags of more than 64 snapshots: use --all-tags), `TagsUnreadable`
    /// (the store does not tell which snapshots are excluded by a tag), or the reason that `compact` would
    /// fail with, see exit-codes.md.
    #[schemars(extend("enum" = reasons_and(&PROBLEMS)))]
    pub reason: &'static str,
    /// In words, for people: it may change.
    pub message: String,
    /// The paths, below the store's prefix, of the objects it is about; may be empty.
    pub snapshots: Vec<String>,
}

impl Problem {
    pub(super) fn new(
        reason: &'static str,
        message: impl Into<String>,
        snapshots: Vec<String>,
    ) -> Self {
        Problem {
            reason,
            message: message.into(),
            snapshots,
        }
    }

    fn of(e: &Error) -> Self {
        Self::new(e.reason().as_str(), e.to_string(), Vec::new())
    }
}

/// Lists a prefix.
///
/// # Errors
/// `NoSnapshots` where there is none; the store's. What is wrong with snapshots is no error here.
pub fn run(ctx: &Context, options: Options) -> Result<Report<Outcome>> {
    let clock = Clock::start();
    let depth = if options.deep {
        Depth::All
    } else {
        Depth::Names
    };
    let scan = scan_asking(ctx, depth, Ask::newest_or(options.all_tags))?;
    let known = scan.contents.known_bases();
    let mut problems = problems(ctx, &scan, options.deep)?;
    let (identity, problem) = recorded(ctx)?;
    problems.extend(problem);
    // Where no timeline is the newest, none is taken.
    let newest = scan.timelines.newest(&scan.catalog);
    problems.extend(newest.as_ref().err().map(Problem::of));
    let newest = newest.ok();
    // Damage that `compact` would meet is a problem already; without it there is no chain.
    let in_chain = match newest.filter(|_| !is_blocked(&scan)) {
        Some(t) => newest_chain(&scan, t, &known).unwrap_or_else(|problem| {
            problems.push(problem);
            HashSet::new()
        }),
        None => HashSet::new(),
    };
    // The first timeline counts.
    let mut timeline_of: HashMap<usize, &str> = HashMap::new();
    for t in scan.timelines.all.iter().rev() {
        timeline_of.extend(t.members.iter().map(|m| (m.snapshot, t.id.as_str())));
    }
    let snapshots = scan
        .catalog
        .snapshots
        .iter()
        .enumerate()
        .map(|(i, s)| {
            let timeline = timeline_of
                .get(&i)
                .filter(|_| options.deep || !scan.is_doubtful(i));
            listed(s, timeline.map(|&id| id.to_owned()), in_chain.contains(&i))
        })
        .collect();
    let mut restorable = Vec::new();
    for t in &scan.timelines.all {
        let ranges = chain::restorable(&scan.catalog, t, &known);
        restorable.extend(with_times(&scan, t, ranges));
    }
    Ok(clock.report(Outcome {
        identity,
        snapshots,
        latest_revision: match newest {
            Some(t) => t.last(&scan.catalog, &scan.contents),
            None => scan.catalog.latest_revision(),
        },
        restorable,
        problems,
    }))
}

/// The chain that `compact` would take now.
fn newest_chain(
    scan: &Scan,
    timeline: &Timeline,
    known: &KnownBases,
) -> Result<HashSet<usize>, Problem> {
    let catalog = &scan.catalog;
    match chain::choose(catalog, timeline, None, known) {
        Ok(Choice::Found(c)) => Ok(c.snapshots().collect()),
        Ok(Choice::Look(i)) => Err(Problem {
            snapshots: vec![path(scan, i)],
            ..Problem::of(&gap_after(scan, timeline, i, DEEP))
        }),
        Err(e) => Err(Problem::of(&e)),
    }
}

/// Whether a damaged snapshot would stop `compact`: it needs all that are in doubt, and its chain.
fn is_blocked(scan: &Scan) -> bool {
    let unreadable = &scan.contents.unreadable;
    if unreadable.is_empty() {
        return false;
    }
    if unreadable.keys().any(|&i| scan.is_doubtful(i)) {
        return true;
    }
    // The chain that it would choose before it reads.
    let chosen = Timelines::build(&scan.catalog, &NamesOnly).map(|by_names| {
        let timeline = by_names.newest(&scan.catalog)?;
        chain::choose(&scan.catalog, timeline, None, &scan.contents.known_bases())
    });
    match chosen {
        Ok(Ok(Choice::Found(c))) => c.snapshots().any(|i| unreadable.contains_key(&i)),
        Ok(Ok(Choice::Look(i))) => unreadable.contains_key(&i),
        _ => false,
    }
}

fn path(scan: &Scan, i: usize) -> String {
    scan.catalog.snapshots[i].path.clone()
}

/// Whose backup a prefix is, or why that cannot be read.
pub(super) fn recorded(ctx: &Context) -> Result<(Option<Recorded>, Option<Problem>)> {
    match identity::read(&ctx.store) {
        Ok(identity) => Ok((identity.map(Recorded::from), None)),
        Err(e) if e.reason() == Reason::Configuration => {
            let problem = Problem::new("IdentityUnreadable", e.to_string(), Vec::new());
            Ok((None, Some(problem)))
        }
        Err(e) => Err(e),
    }
}

/// What a listing tells; `reading` is what would tell more, if contents were not read.
pub(super) fn of_names(ctx: &Context, scan: &Scan, reading: Option<&str>) -> Vec<Problem> {
    let mut problems = Vec::new();
    let foreign = &scan.catalog.foreign;
    if !foreign.is_empty() {
        let message = "names that are not those of snapshots: left alone";
        problems.push(Problem::new("ForeignObject", message, foreign.clone()));
    }
    if ctx.store.hides_tags() {
        let problem = Problem::new("TagsUnreadable", TAGS_UNREADABLE, Vec::new());
        problems.push(problem);
    }
    // Whoever read the contents was told of tags.
    let Some(reading) = reading else {
        return problems;
    };
    if scan.tags_unread > 0 {
        let message = tags::not_read(scan.tags_unread);
        problems.push(Problem::new("TagsNotRead", message, Vec::new()));
    }
    if !scan.doubtful.is_empty() {
        let message = format!(
            "revisions do not only grow in order of creation: two streams, a late compaction, or a forked history; {reading} tells"
        );
        let paths = scan.doubtful.iter().map(|&i| path(scan, i)).collect();
        problems.push(Problem::new("TimelinesUnverified", message, paths));
    }
    problems
}

/// Names leave a gap after a full, which only its content can close; `reading` tells.
pub(super) fn gap_after(scan: &Scan, timeline: &Timeline, full: usize, reading: &str) -> Error {
    let s = &scan.catalog.snapshots[full];
    let last = timeline.last(&scan.catalog, &scan.contents);
    let last = last.unwrap_or(s.name.last);
    let missing = chain::missing(&scan.catalog, timeline, s.name.last, last);
    Reason::RevisionGap.error(format!(
        "by names, revisions {} are missing; whether {} holds them, past its name, {reading} tells",
        chain::show_ranges(&missing),
        s.path
    ))
}

/// If a full holds more than its name says.
pub(super) fn past_name(full: &Snapshot, holds: Option<Revision>) -> Option<Problem> {
    let named = full.name.last;
    let holds = holds.filter(|&r| r > named)?;
    let message = format!(
        "it holds revisions up to {holds}, its name says {named}: no harm, fulls of a running etcd may"
    );
    let paths = vec![full.path.clone()];
    Some(Problem::new("RevisionPastName", message, paths))
}

fn problems(ctx: &Context, scan: &Scan, deep: bool) -> Result<Vec<Problem>> {
    let catalog = &scan.catalog;
    let reading = (!deep).then_some(DEEP);
    let mut problems = of_names(ctx, scan, reading);
    for (&i, e) in &scan.contents.unreadable {
        problems.push(Problem {
            snapshots: vec![path(scan, i)],
            ..Problem::of(e)
        });
    }
    for (&i, survey) in &scan.contents.surveys {
        problems.extend(past_name(&catalog.snapshots[i], Some(survey.last)));
    }
    // Where revisions grow no timeline was looked for; a full can still tell of another history.
    let mut since_full: Vec<usize> = Vec::new();
    for i in catalog.usable() {
        let is_full = catalog.snapshots[i].name.is_full();
        if is_full {
            for &before in since_full.iter().filter(|&&b| !scan.is_doubtful(b)) {
                if let Some(r) = scan.contents.disagreement(before, i)? {
                    let reason = Reason::HistoryMismatch.as_str();
                    let message = format!(
                        "they disagree from revision {r} on: the history forked there, and the later one is taken"
                    );
                    let paths = vec![path(scan, before), path(scan, i)];
                    problems.push(Problem::new(reason, message, paths));
                }
            }
            since_full.clear();
        }
        since_full.push(i);
    }
    Ok(problems)
}

fn listed(s: &Snapshot, timeline: Option<String>, in_chain: bool) -> Listed {
    Listed {
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
        timeline,
        in_chain,
    }
}

/// The ranges of a timeline, which ascend, with their times.
fn with_times(scan: &Scan, timeline: &Timeline, ranges: Vec<Range>) -> Vec<Restorable> {
    let mut fulls: Vec<(Revision, DateTime<Utc>)> = Vec::new();
    // The first and the last revision of each member, and the time of the last one.
    let mut members: Vec<(Revision, Revision, DateTime<Utc>)> = Vec::new();
    for m in &timeline.members {
        let name = &scan.catalog.snapshots[m.snapshot].name;
        let survey = scan.contents.surveys.get(&m.snapshot);
        if name.is_full() {
            fulls.push((name.last, name.created_at()));
        }
        let reaches = survey.map_or(name.last, |s| s.last.max(name.last));
        let time = survey.and_then(|s| s.last_time);
        members.push((name.start, reaches, time.unwrap_or(name.created_at())));
    }
    fulls.sort_unstable();
    members.sort_unstable();
    let mut members = members.into_iter().peekable();
    // Those that begin in this range or before it, by their times.
    let mut begun: BinaryHeap<Reverse<(DateTime<Utc>, Revision)>> = BinaryHeap::new();
    let mut restorable = Vec::with_capacity(ranges.len());
    for (first, last) in ranges {
        let within = &fulls[fulls.partition_point(|f| f.0 < first)..];
        let within = &within[..within.partition_point(|f| f.0 <= last)];
        // When the oldest full of the range was made, and the oldest that ends or passes its end.
        let first_time = within.iter().map(|f| f.1).min().unwrap_or_default();
        while let Some((_, reaches, time)) = members.next_if(|m| m.0 <= last) {
            begun.push(Reverse((time, reaches)));
        }
        while begun.peek().is_some_and(|b| b.0.1 < last) {
            begun.pop();
        }
        let last_time = begun.peek().map_or(first_time, |b| b.0.0);
        restorable.push(Restorable {
            timeline: timeline.id.clone(),
            first_revision: first,
            last_revision: last,
            first_time,
            last_time: last_time.max(first_time),
        });
    }
    restorable
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::{self, Catalog};

    /// A random bucket with gaps, without contents.
    fn random(rng: &mut fastrand::Rng) -> Scan {
        let mut listing = Vec::new();
        for at in 0..rng.usize(1..30) {
            let last = rng.i64(1..60);
            let name = match rng.u8(..3) {
                0 => format!("Full-00000000-{last:08}"),
                _ => format!("Incr-{:08}-{last:08}", (last - rng.i64(0..6)).max(1)),
            };
            let path = format!("v2/{name}-{}", 100 + at as i64 * rng.i64(1..5));
            listing.push(backup::Listed { path, bytes: 1 });
        }
        Scan::of_names(Catalog::from_listing(listing)).unwrap()
    }

    #[test]
    fn the_times_of_a_range_are_those_of_the_snapshots_at_its_ends() {
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        let mut several = 0;
        for round in 0..crate::rounds(300, 3000) {
            let scan = random(&mut rng);
            let timeline = &scan.timelines.all[0];
            let ranges = chain::restorable(&scan.catalog, timeline, &chain::KnownBases::new());
            several += usize::from(ranges.len() > 1);
            for r in with_times(&scan, timeline, ranges) {
                let (first, last) = (r.first_revision, r.last_revision);
                let names = || scan.catalog.snapshots.iter().map(|s| &s.name);
                let fulls = names().filter(|n| n.is_full() && (first..=last).contains(&n.last));
                let first_time = fulls.map(|n| n.created_at()).min().unwrap();
                let at_end = names().filter(|n| n.start <= last && last <= n.last);
                let last_time = at_end.map(|n| n.created_at()).min().unwrap();
                let times = (first_time, last_time.max(first_time));
                assert_eq!((r.first_time, r.last_time), times, "round {round}");
            }
        }
        assert!(several > 0);
    }
}
