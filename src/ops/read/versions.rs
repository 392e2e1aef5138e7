//! Reads every version of keys that the snapshots of a timeline still hold.
//!
//! All deltas and the oldest full are read, and if deltas are missing, the fulls after the gap. Versions are not checked
//! against each other, and several snapshots may hold the same one.

use super::for_each_change;
use crate::backup::Catalog;
use crate::backup::chain::{self, KnownBases, RevisionRange};
use crate::backup::timeline::Timeline;
use crate::base::ReadAt;
use crate::base::parallel::find_first;
use crate::base::time::rfc3339;
use crate::bolt::Database;
use crate::error::{Error, Reason, Result};
use crate::mvcc::history::key_bucket;
use crate::mvcc::{Base, KeyValue, RecordKey, Revision};
use crate::prefix::Context;
use crate::prefix::open::State;
use crate::prefix::open::{BackupLocation, SnapshotReader};
use crate::prefix::scan::{Depth, Scan, scan};
use crate::prefix::select::DeltaSlice;
use crate::prefix::select::{self, StateRequest};
use crate::prefix::snapshot_files::OpenFile;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

/// All revisions.
const ALL: RevisionRange = (Revision(1), Revision(i64::MAX));

/// A version in a snapshot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FoundVersion<'a> {
    /// The key.
    pub(crate) key: &'a [u8],
    /// The revision, and the number within its transaction.
    pub(crate) revision: (Revision, u32),
    /// When the snapshotter received the change (RFC 3339); `None` in a full.
    pub(crate) time: Option<&'a str>,
    /// The position of the delta; 0 for a full.
    pub(crate) nth: u32,
    /// The record; `None` for a deletion.
    pub(crate) kv: Option<&'a KeyValue<'a>>,
}

/// Takes versions, from several threads at once and in no particular order.
pub(crate) trait Collect: Sync {
    /// Returns whether versions of a key are wanted.
    fn wants(&self, key: &[u8]) -> bool;

    /// Says that the versions of another full follow, which has the states of these revisions: at and below the first one, it
    /// has only the newest version of each key.
    fn begin_full(&self, _states: RevisionRange) {}

    /// Takes a version.
    ///
    /// # Errors
    /// They end the reading.
    fn add(&self, version: FoundVersion<'_>) -> Result<()>;
}

/// What was read.
#[derive(Debug, Default)]
pub(crate) struct Coverage {
    /// The ID of the timeline; `None` for a plain snapshot file.
    pub(crate) timeline: Option<String>,
    /// The newest revision that was read.
    pub(crate) newest: Revision,
    /// Warnings for the report.
    pub(crate) warnings: Vec<String>,
    /// The last revisions of the timeline's snapshots, and when these were taken, by their names.
    pub(crate) moments: Vec<(Revision, DateTime<Utc>)>,
    /// The snapshots of the timeline that are left out because they are damaged.
    pub(crate) damaged: Vec<DamagedSnapshot>,
    /// Where the timeline left others.
    pub(crate) walls: Vec<Wall>,
    /// The revisions whose changes are all known.
    covered: Vec<RevisionRange>,
    /// The revisions whose states the fulls hold, in the order of reading: from the compacted one to the last.
    in_fulls: Vec<RevisionRange>,
}

/// The history leaves another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Wall {
    /// The last revision that both have.
    pub after_revision: Revision,
    /// The ID of the timeline that begins here.
    pub timeline: String,
    /// The ID of the timeline that it leaves.
    pub left: String,
    /// When the snapshotter wrote that another history begins (RFC 3339); null if the snapshots alone tell it.
    pub time: Option<String>,
}

/// A snapshot that is left out because it is damaged.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct DamagedSnapshot {
    /// Its path below the prefix.
    path: String,
    /// The last revision of its name.
    last_revision: Revision,
    /// When it was taken, by its name.
    created: String,
    /// What is wrong with it.
    message: String,
}

impl Coverage {
    /// Returns the revisions up to the newest one whose changes no snapshot holds completely.
    pub(crate) fn missing(&self) -> Vec<RevisionRange> {
        uncovered(&self.covered, self.newest)
    }

    /// Returns the revisions whose states are unknown: those from a missing change on, until a full closes the gap.
    pub(crate) fn unknown(&self) -> Vec<RevisionRange> {
        self.unknown_in(ALL)
    }

    /// As [`unknown`](Self::unknown), if the changes of these revisions alone were read.
    pub(crate) fn unknown_in(&self, span: RevisionRange) -> Vec<RevisionRange> {
        let mut unknown: Vec<RevisionRange> = Vec::new();
        for (mut first, end) in self.missing_in(span) {
            // A full inside the gap holds its own states alone.
            while first <= end {
                let closing = self
                    .in_fulls
                    .iter()
                    .filter(|full| full.1 >= first.max(full.0));
                let closing = closing.map(|full| (full.0.max(first), full.1));
                let closed = closing.min_by_key(|full| (full.0, std::cmp::Reverse(full.1)));
                let (known, until) = closed.unwrap_or((self.newest.next(), self.newest));
                if first < known {
                    unknown.push((first, known.previous()));
                }
                first = until.next();
            }
        }
        unknown.sort_unstable();
        unknown.dedup_by(|next, before| {
            let is_one = next.0 <= before.1.next();
            if is_one {
                before.1 = before.1.max(next.1);
            }
            is_one
        });
        unknown
    }

    /// Returns the oldest revision whose state is known; `None` if no full was read.
    pub(crate) fn first_state(&self) -> Option<Revision> {
        self.in_fulls.iter().map(|full| full.0).min()
    }

    /// Returns the missing revisions among these.
    pub(crate) fn missing_in(&self, (first, last): RevisionRange) -> Vec<RevisionRange> {
        let gaps = self.missing().into_iter();
        let gaps = gaps.map(|gap| (gap.0.max(first), gap.1.min(last)));
        gaps.filter(|gap| gap.0 <= gap.1).collect()
    }
}

/// Returns the range of unknown states that a revision is in.
pub(crate) fn unknown_at(unknown: &[RevisionRange], revision: Revision) -> Option<RevisionRange> {
    let within = |range: &&RevisionRange| range.0 <= revision && revision <= range.1;
    unknown.iter().find(within).copied()
}

/// Returns the newest revision up to `before` whose state is known, if a key was put by then; otherwise `before`.
pub(crate) fn known_before(unknown: &[RevisionRange], before: Revision, put: Revision) -> Revision {
    let known = unknown_at(unknown, before).map(|(first, _)| first.previous());
    known.filter(|known| put <= *known).unwrap_or(before)
}

/// Reads the versions on the timeline with this ID, or on the newest one.
///
/// # Errors
/// `NoSnapshots`, `NoSuchTimeline`, `InterleavedTimelines`; errors of damaged snapshots; errors of the store and of
/// `collect`; `Io`, `NoSpace`, `Terminated`.
pub(crate) fn read(
    backup: &BackupLocation,
    timeline: Option<&str>,
    collect: &impl Collect,
) -> Result<Coverage> {
    match backup {
        BackupLocation::File(ctx, file) => read_file(ctx, file, timeline, collect),
        BackupLocation::Prefix(ctx) => {
            read_store(ctx, scan(ctx, Depth::Doubtful)?, timeline, collect)
        }
    }
}

/// Reads a plain snapshot file.
fn read_file(
    ctx: &Context,
    file: &OpenFile,
    timeline: Option<&str>,
    collect: &impl Collect,
) -> Result<Coverage> {
    let request = StateRequest {
        timeline: timeline.map(str::to_owned),
        ..StateRequest::default()
    };
    let state = State::of_file(file, &request)?;
    let mut coverage = Coverage::new(None, state.warnings.clone());
    coverage.read_state_of_file(ctx, file, &state, ALL.1, collect)?;
    Ok(coverage)
}

/// Reads the snapshots of a store.
fn read_store(
    ctx: &Context,
    mut scan: Scan,
    timeline: Option<&str>,
    collect: &impl Collect,
) -> Result<Coverage> {
    let request = StateRequest {
        timeline: timeline.map(str::to_owned),
        ..StateRequest::default()
    };
    // A timeline behind a wall goes on before it, in the timeline that it left.
    if !scan.knows_paths() && select::timeline_of(ctx, &scan, &request)?.wall.is_some() {
        scan = scan.with_paths(ctx)?;
    }
    let (timeline, warnings) = select::choose_timeline(ctx, &scan, &request)?;
    let mut coverage = Coverage::new(Some(timeline.id.clone()), warnings);
    coverage.moments = moments(&scan.catalog, timeline);
    coverage.walls = walls(&scan, &timeline.id);
    let snapshots = &scan.catalog.snapshots;
    let damaged = scan.all_damage_in(timeline).map(|(i, e)| DamagedSnapshot {
        path: snapshots[i].path.clone(),
        last_revision: snapshots[i].name.last,
        created: rfc3339(snapshots[i].name.created_at()),
        message: e.to_string(),
    });
    coverage.damaged.extend(damaged);
    coverage.read_timeline(ctx, &scan, timeline, ALL, collect)?;
    if coverage.covered.is_empty() && chain::bases(&scan.catalog, timeline).is_empty() {
        if let Some(damage) = scan.damage_in(timeline) {
            return Err(damage.again());
        }
        let nothing = Reason::NoSnapshots.error("there is no usable snapshot: take one first");
        return Err(scan.explain_untrusted(ctx, nothing));
    }
    Ok(coverage)
}

/// The last revisions of the snapshots of a timeline, and when these were taken, by their names.
pub(crate) fn moments(catalog: &Catalog, timeline: &Timeline) -> Vec<(Revision, DateTime<Utc>)> {
    let names = timeline.members.iter().map(|member| {
        let name = &catalog.snapshots[member.snapshot].name;
        (name.last.min(member.until), name.created_at())
    });
    names.collect()
}

/// Returns the points at which a timeline left others.
fn walls(scan: &Scan, timeline: &str) -> Vec<Wall> {
    let mut walls: Vec<Wall> = Vec::new();
    let mut id = timeline.to_owned();
    while let Ok(t) = scan.timelines.by_id(&id)
        && let Some((left, after)) = &t.left
        // No timeline leaves one that left it.
        && walls.len() < scan.timelines.all.len()
    {
        walls.push(Wall {
            after_revision: *after,
            timeline: std::mem::replace(&mut id, left.clone()),
            left: left.clone(),
            time: t.wall.as_ref().map(|wall| rfc3339(wall.at())),
        });
    }
    walls
}

/// Reads the versions of these revisions on the timeline of a state, and what fulls have of older ones.
///
/// # Errors
/// As [`read`].
pub(crate) fn read_between(
    backup: &BackupLocation,
    scan: Option<&Scan>,
    state: &State,
    between: RevisionRange,
    collect: &impl Collect,
) -> Result<Coverage> {
    let ctx = backup.context();
    let mut coverage = Coverage::new(state.timeline_id().map(str::to_owned), Vec::new());
    if between.0 > between.1 {
        return Ok(coverage);
    }
    match (scan, backup) {
        (Some(scan), _) => {
            let timeline = scan.timelines.by_id(&state.timeline)?;
            coverage.moments = moments(&scan.catalog, timeline);
            coverage.walls = walls(scan, &timeline.id);
            coverage.read_timeline(ctx, scan, scan.intact(timeline), between, collect)?;
        }
        (None, BackupLocation::File(_, file)) => {
            coverage.read_state_of_file(ctx, file, state, between.1, collect)?;
        }
        (None, BackupLocation::Prefix(_)) => return Err(Error::internal("a store without a scan")),
    }
    Ok(coverage)
}

impl Coverage {
    fn new(timeline: Option<String>, warnings: Vec<String>) -> Self {
        Coverage {
            timeline,
            newest: Revision(1),
            warnings,
            moments: Vec::new(),
            damaged: Vec::new(),
            walls: Vec::new(),
            covered: Vec::new(),
            in_fulls: Vec::new(),
        }
    }

    fn read_state_of_file(
        &mut self,
        ctx: &Context,
        file: &OpenFile,
        state: &State,
        until: Revision,
        collect: &impl Collect,
    ) -> Result<()> {
        let created = file.created.iter();
        let moments = created.map(|at| (state.base.revision, *at));
        self.moments.extend(moments);
        self.read_full(ctx, &state.db, &state.base, until, collect)
            .map_err(state.at_base(ctx))
    }

    /// Reads the deltas of a timeline that may hold these revisions, and fulls as far as deltas are missing.
    fn read_timeline(
        &mut self,
        ctx: &Context,
        scan: &Scan,
        timeline: &Timeline,
        between: RevisionRange,
        collect: &impl Collect,
    ) -> Result<()> {
        let snapshots = &scan.catalog.snapshots;
        let mut slices = select::all_delta_slices(&scan.catalog, timeline);
        slices.retain(|slice| {
            let name = &slice.snapshot.name;
            name.last >= between.0 && name.start <= between.1
        });
        self.read_deltas(ctx, &slices, collect)?;
        let mut fulls = chain::bases(&scan.catalog, timeline);
        fulls.reverse();
        let fulls = fulls.into_iter().map(|i| (i, snapshots[i].name.last));
        let fulls: Vec<(usize, Revision)> = fulls.filter(|f| f.1 >= between.0).collect();
        for &(_, last) in &fulls {
            self.newest = self.newest.max(last);
        }
        let mut read = KnownBases::new();
        while let Some(i) = full_to_read(&fulls, &read, &self.missing_in(between)) {
            let (db, base) = ctx.full(&snapshots[i])?;
            let until = timeline.members.iter().find(|m| m.snapshot == i);
            let until = until.map_or(Revision(i64::MAX), |m| m.until);
            self.read_full(ctx, &db, &base, between.1.min(until), collect)
                .map_err(ctx.at(&snapshots[i]))?;
            read.insert(i, base);
        }
        Ok(())
    }

    /// Reads the versions of a full up to a revision.
    fn read_full<R: ReadAt>(
        &mut self,
        ctx: &Context,
        db: &Database<R>,
        base: &Base,
        until: Revision,
        collect: &impl Collect,
    ) -> Result<()> {
        let last = base.revision.min(until);
        let compacted = Revision(base.compact_revision.0.max(0));
        self.in_fulls.push((compacted, last));
        collect.begin_full((compacted, last));
        let mut c = db.cursor(&key_bucket(db)?);
        while let Some(e) = c.next()? {
            let rk = RecordKey::decode(e.key)?;
            if rk.main > last {
                break;
            }
            ctx.store.cancel().check()?;
            let kv = KeyValue::decode(e.value)?;
            if collect.wants(kv.key) {
                collect.add(FoundVersion {
                    key: kv.key,
                    revision: (rk.main, rk.sub),
                    time: None,
                    nth: 0,
                    kv: (!rk.tombstone).then_some(&kv),
                })?;
            }
        }
        // At and below the compacted revision only the newest version of each key is left.
        let first = compacted.next();
        if first <= last {
            self.covered.push((first, last));
        }
        self.newest = self.newest.max(last);
        Ok(())
    }

    /// Reads deltas, on several threads.
    fn read_deltas(
        &mut self,
        ctx: &Context,
        slices: &[DeltaSlice],
        collect: &impl Collect,
    ) -> Result<()> {
        let reader = SnapshotReader::new(ctx, slices.iter().map(|s| &s.snapshot));
        let wanted = |key: &[u8]| collect.wants(key).then_some(0);
        find_first(ctx.threads, slices.len(), |nth| {
            let delta = reader.delta_in_turn(nth)?;
            for_each_change(ctx, delta, &slices[nth], wanted, |_, e, kv| {
                e.instant()?;
                collect.add(FoundVersion {
                    key: e.change.key(),
                    revision: (e.main, e.sub),
                    time: Some(e.time),
                    nth: nth as u32,
                    kv,
                })
            })?;
            Ok(None::<()>)
        })?;
        for slice in slices {
            let name = &slice.snapshot.name;
            let last = name.last.min(slice.until);
            self.covered.push((name.start, last));
            self.newest = self.newest.max(last);
        }
        Ok(())
    }
}

/// Returns the full to read next: if there is a gap, the oldest one, and then for each gap after its end, the fulls
/// that end in the gap or after it, until the gap is closed. Versions that the oldest full lost by compaction are
/// not searched.
///
/// `fulls` are indexes with the last revision of the name, oldest first. `read` are the fulls that were read.
fn full_to_read(
    fulls: &[(usize, Revision)],
    read: &KnownBases,
    gaps: &[RevisionRange],
) -> Option<usize> {
    let (oldest, _) = fulls.first().filter(|_| !gaps.is_empty())?;
    let Some(base) = read.get(oldest) else {
        return Some(*oldest);
    };
    let mut gaps = gaps.iter().filter(|gap| gap.1 > base.revision);
    gaps.find_map(|gap| {
        let mut reaching = fulls.iter().filter(|f| f.1 >= gap.0);
        let unread = reaching.find(|f| !read.contains_key(&f.0));
        unread.map(|f| f.0)
    })
}

/// Returns the revisions from 1 to `newest` that no range covers.
fn uncovered(covered: &[RevisionRange], newest: Revision) -> Vec<RevisionRange> {
    let mut covered = covered.to_vec();
    covered.sort_unstable();
    let mut gaps = Vec::new();
    let mut next = Revision(1);
    for (first, last) in covered {
        if first > next {
            gaps.push((next, first.previous()));
        }
        next = next.max(last.next());
    }
    if next <= newest {
        gaps.push((next, newest));
    }
    gaps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(r: &[(i64, i64)]) -> Vec<RevisionRange> {
        r.iter().map(|&(a, b)| (Revision(a), Revision(b))).collect()
    }

    #[test]
    fn after_a_gap_the_state_is_unknown_until_a_full() {
        for (covered, fulls, newest, unknown) in [
            (&[(1, 9)][..], &[(0, 3)][..], 9, &[][..]),
            // A delta is missing, and deltas follow it: a compacted full, one with history, none.
            (&[(1, 4), (7, 20)], &[(0, 3), (12, 12)], 20, &[(5, 11)]),
            (&[(1, 4), (7, 20)], &[(0, 3), (6, 12)], 20, &[(5, 5)]),
            (&[(1, 4), (7, 20)], &[(0, 3)], 20, &[(5, 20)]),
            // Compacted fulls alone: each is one known state.
            (&[], &[(3, 3), (7, 7), (9, 9)], 9, &[(1, 2), (4, 6), (8, 8)]),
            // Two gaps before one full.
            (&[(1, 2), (4, 5), (8, 9)], &[(0, 1), (9, 9)], 9, &[(3, 8)]),
        ] {
            let mut coverage = Coverage::new(None, Vec::new());
            coverage.newest = Revision(newest);
            (coverage.covered, coverage.in_fulls) = (ranges(covered), ranges(fulls));
            assert_eq!(coverage.unknown(), ranges(unknown), "{covered:?} {fulls:?}");
        }
    }

    #[test]
    fn gaps_are_what_no_range_covers() {
        for (covered, newest, gaps) in [
            (&[][..], 5, &[(1, 5)][..]),
            (&[(1, 5)], 5, &[]),
            (&[(3, 4), (8, 9), (2, 6)], 12, &[(1, 1), (7, 7), (10, 12)]),
            (&[(5, 9), (1, 4)], 9, &[]),
        ] {
            let actual = uncovered(&ranges(covered), Revision(newest));
            assert_eq!(actual, ranges(gaps), "{covered:?}");
        }
    }

    #[test]
    fn fulls_are_read_if_deltas_are_missing() {
        let base = |revision: i64, compact_revision: i64| Base {
            revision: Revision(revision),
            compact_revision: Revision(compact_revision),
            compaction_finished: true,
            metadata_revision: Revision(revision),
        };
        let fulls = [(7, Revision(10)), (3, Revision(20)), (5, Revision(40))];
        let mut read = KnownBases::new();
        let next = |read: &KnownBases, gaps| full_to_read(&fulls, read, &ranges(gaps));
        assert_eq!(next(&read, &[(1, 10)]), Some(7));
        read.insert(7, base(10, 4));
        // Changes below the compacted revision of the oldest full stay unknown.
        assert_eq!(next(&read, &[(1, 4)]), None);
        // Only a full that ends after the beginning of the gap can close it.
        assert_eq!(next(&read, &[(1, 4), (25, 30)]), Some(5));
        assert_eq!(next(&read, &[(15, 30)]), Some(3));
        read.insert(3, base(20, 18));
        assert_eq!(next(&read, &[(15, 18), (21, 30)]), Some(5));
        read.insert(5, base(40, 40));
        assert_eq!(next(&read, &[(15, 18), (21, 30)]), None);
        assert_eq!(full_to_read(&[], &KnownBases::new(), &[]), None);
    }
}
