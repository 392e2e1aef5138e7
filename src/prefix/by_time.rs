//! Finds revisions by time: the last one at or before a time, and the newest one that is older than an age.
//!
//! `moment` decides which deltas are needed; they are opened and read here.

use super::moment::{self, EventVisitor, Moment};
use super::open::read_snapshot::SnapshotReader;
use super::select::{DeltaSlice, all_delta_slices};
use crate::backup::SnapshotName;
use crate::backup::catalog::Wall;
use crate::backup::chain::{self, RevisionRange};
use crate::backup::timeline::Timeline;
use crate::base::opt::{self, OR_NEWEST, REVISION, TIME, TIMELINE};
use crate::base::time::rfc3339;
use crate::error::{Reason, Result};
use crate::mvcc::Revision;
use crate::prefix::Context;
use crate::prefix::scan::Scan;
use chrono::{DateTime, TimeDelta, Utc};
use std::time::Duration;

/// The longest time between the first change that a run of `snapshot delta` receives and the name of its delta.
const RUN: TimeDelta = TimeDelta::seconds(5);

/// Why a time may not be there although snapshots were taken then.
const REMOVED_BY_GC: &str = "`gc` removes the deltas that are older than {restorable-window}, and fulls that its policy does not keep";

/// Reads the events of delta slices. Slices that are read in order are fetched ahead.
struct SliceReader<'a> {
    ctx: &'a Context,
    slices: &'a [DeltaSlice],
    /// The reader that fetches ahead, and the slice after the one that was read last.
    reader: Option<(SnapshotReader<'a>, usize)>,
}

impl<'a> SliceReader<'a> {
    fn new(ctx: &'a Context, slices: &'a [DeltaSlice]) -> Self {
        SliceReader {
            ctx,
            slices,
            reader: None,
        }
    }

    /// Calls `visit` for the events of a slice, until it returns false.
    fn visit_events(&mut self, nth: usize, visit: &mut EventVisitor<'_>) -> Result<()> {
        let slice = &self.slices[nth];
        let at = self.ctx.at(&slice.snapshot);
        // A reader only goes forward. To go back, start a new one.
        let reader = match self.reader.take() {
            Some((reader, next)) if nth >= next => reader,
            _ => SnapshotReader::new(self.ctx, self.slices.iter().map(|s| &s.snapshot)),
        };
        let delta = reader.delta(nth);
        self.reader = Some((reader, nth + 1));
        let mut delta = delta?;
        while let Some(e) = delta.next().map_err(&at)? {
            if !slice.contains(e.main) {
                continue;
            }
            match visit(&e) {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) => return Err(at(delta.explain(e))),
            }
        }
        Ok(())
    }
}

/// Returns the revision of the last event of a timeline at or before `time`, and warnings.
///
/// Events are searched across gaps. If there is no such event, the newest full from before `time` gives the
/// revision.
///
/// # Errors
/// `OutOfRange` if the timeline begins after `time`; `RevisionGap` if missing revisions may hide a later
/// event, unless `or_before`; `NoSnapshots`; errors of a damaged delta; errors of the store; `Terminated`.
pub(crate) fn revision_at(
    ctx: &Context,
    scan: &Scan,
    timeline: &Timeline,
    time: DateTime<Utc>,
    or_before: bool,
) -> Result<(Revision, Vec<String>)> {
    let found = find_moment(ctx, scan, timeline, time)
        .and_then(|moment| revision_of(ctx, scan, timeline, time, or_before, &moment));
    let (revision, warning) = found.map_err(|e| scan.explain_untrusted(ctx, e))?;
    let mut warnings = Vec::new();
    if let Some(warning) = warning {
        ctx.marks.warn(&mut warnings, warning);
    }
    Ok((revision, warnings))
}

/// Reads deltas up to the first event after `time`.
fn find_moment(
    ctx: &Context,
    scan: &Scan,
    timeline: &Timeline,
    time: DateTime<Utc>,
) -> Result<Moment> {
    let slices = all_delta_slices(&scan.catalog, timeline);
    let mut reader = SliceReader::new(ctx, &slices);
    Moment::find(&slices, time, |nth, visit| reader.visit_events(nth, visit))
}

/// Returns the revision of a moment, and a warning. Fails if missing revisions may hide a later event at or
/// before `time`. Revisions that only the history of a later full holds have no times: they count as received
/// when that full was taken.
fn revision_of(
    ctx: &Context,
    scan: &Scan,
    timeline: &Timeline,
    time: DateTime<Utc>,
    or_before: bool,
    moment: &Moment,
) -> Result<(Revision, Option<String>)> {
    let catalog = &scan.catalog;
    let fulls = chain::bases(catalog, timeline);
    let mut fulls = fulls.iter().map(|&i| &catalog.snapshots[i].name);
    let by_full = fulls
        .clone()
        .filter(|n| n.created_at() <= time && moment.first_after.is_none_or(|r| n.last < r))
        .map(|n| n.last)
        .max();
    let Some(revision) = moment.found.max(by_full) else {
        return Err(match fulls.next_back() {
            None => {
                Reason::NoSnapshots.error("there is no full snapshot to start from: take one first")
            }
            Some(oldest) => {
                let remedy = match &timeline.wall {
                    Some(_) => {
                        format!("another history was live before: leave out {TIMELINE}").into()
                    }
                    None => opt::fill(REMOVED_BY_GC),
                };
                Reason::OutOfRange.error(format!(
                    "{} is before the oldest state of timeline {}, which is {oldest} of {} ({remedy}), or choose a later {TIME}",
                    rfc3339(time),
                    timeline.id,
                    rfc3339(oldest.created_at())
                ))
            }
        });
    };
    let known_to = moment.first_after.map(Revision::previous);
    let known_to = known_to.or(timeline.last(catalog, &scan.contents));
    let gaps = chain::missing(catalog, timeline, revision, known_to.unwrap_or(revision));
    if !gaps.is_empty() {
        if let Some(full) = full_that_holds(ctx, scan, timeline, &gaps)? {
            let warning = format!(
                "revisions {} have no times: they are from the history of {full}, and count as later than {}",
                chain::show_ranges(&gaps),
                rfc3339(time),
            );
            return Ok((revision, Some(warning)));
        }
        let cause = match &timeline.wall {
            Some(_) => "they may be of another history, or were removed by `gc`".into(),
            None => opt::fill(REMOVED_BY_GC),
        };
        let uncertain = format!(
            "the revision at {} is not certain: it is {revision}, or one of the revisions {}, which no snapshot holds ({cause})",
            rfc3339(time),
            chain::show_ranges(&gaps)
        );
        if or_before {
            return Ok((revision, Some(format!("{uncertain}; {revision} is used"))));
        }
        return Err(Reason::RevisionGap.error(format!(
            "{uncertain}; choose a {REVISION}, or another {TIME}"
        )));
    }
    let newest = newest_if_uncovered(scan, timeline, time);
    let warning = newest.map(|newest| {
        format!(
            "{} is after the newest snapshot, {newest} of {}: changes between the two are not in this backup, and revision {revision} is used",
            rfc3339(time),
            rfc3339(newest.created_at()),
        )
    });
    let warning = warning.or_else(|| received_together(scan, timeline, time, revision, moment));
    Ok((revision, warning))
}

/// Returns a warning if `time` lies in a span whose changes one run of `snapshot delta` has received: they all have the time
/// of the run.
fn received_together(
    scan: &Scan,
    timeline: &Timeline,
    time: DateTime<Utc>,
    revision: Revision,
    moment: &Moment,
) -> Option<String> {
    let first = moment.first_after?;
    let names = || whole_members(scan, timeline);
    let run = names().find(|name| name.start == first && name.last > first)?;
    // A follower names a delta a whole delta period after its first change.
    let received = moment.now;
    if run.created_at() - received > RUN {
        return None;
    }
    let before = names().filter(|name| name.last == revision && name.created_at() <= time);
    let before = before.map(SnapshotName::created_at).max()?;
    (received - before > RUN).then(|| {
        let (before, received) = (rfc3339(before), rfc3339(received));
        format!(
            "the changes from {before} to {received} were received together at {received}; this is the state at {before}"
        )
    })
}

/// Returns the name of the full whose history holds these missing revisions.
fn full_that_holds(
    ctx: &Context,
    scan: &Scan,
    timeline: &Timeline,
    missing: &[RevisionRange],
) -> Result<Option<SnapshotName>> {
    let (Some(first), Some(last)) = (missing.first(), missing.last()) else {
        return Ok(None);
    };
    let mut fulls = chain::bases(&scan.catalog, timeline).into_iter().rev();
    let Some(i) = fulls.find(|&i| scan.catalog.snapshots[i].name.last >= last.1) else {
        return Ok(None);
    };
    let full = &scan.catalog.snapshots[i];
    let (_, base) = ctx.full(full)?;
    Ok((base.first_revision() <= first.0).then(|| full.name.clone()))
}

/// Fails if `time` is after what a timeline is known to cover: the creation time of its newest snapshot, by
/// the name. If another history follows, a delta of a late writer covers no more than its last event.
///
/// Otherwise the time of the newest event is no bound: after it, the cluster may have been idle. Names have whole
/// seconds, so the whole second of the name counts as covered.
///
/// # Errors
/// `OutOfRange`, with the newest covered moment; errors of a damaged delta; errors of the store.
pub(crate) fn refuse_uncovered(
    ctx: &Context,
    scan: &Scan,
    timeline: &Timeline,
    time: DateTime<Utc>,
) -> Result<()> {
    let catalog = &scan.catalog;
    let begun = timeline.wall.as_ref().map_or(i64::MIN, |wall| wall.second);
    let next = Wall::first_after(&catalog.walls, begun).and_then(|wall| {
        let mut names = catalog.usable().map(|i| &catalog.snapshots[i].name);
        names.find(|n| n.is_full() && n.created >= wall.second)
    });
    let (known_to, what) = match newest_if_uncovered(scan, timeline, time) {
        Some(newest) => (newest.created_at(), format!("when {newest} was saved")),
        None if next.is_some() => match last_change_before(ctx, scan, timeline, time)? {
            Some(last) => (last, "its last change".to_owned()),
            None => return Ok(()),
        },
        None => return Ok(()),
    };
    let message = match next {
        // Between the two, etcd was set back, and nothing says when.
        Some(next) => format!(
            "no history covers {}: timeline {} is known up to {}, {what}, and the next history from {} on, when {next} was saved; choose a time that one of them covers, or give {OR_NEWEST} for the earlier state",
            rfc3339(time),
            timeline.id,
            rfc3339(known_to),
            rfc3339(next.created_at()),
        ),
        None => format!(
            "{} is after the newest moment that the backup is known to cover: {}, {what}; choose that time or an earlier one, or give {OR_NEWEST} for the newest state",
            rfc3339(time),
            rfc3339(known_to),
        ),
    };
    Err(Reason::OutOfRange.error(message))
}

/// Returns the time of the last change of a timeline if it is before `time`, and if of all snapshots only the newest one,
/// a delta, has a name that is later: the writer may have been late, so its name tells nothing.
fn last_change_before(
    ctx: &Context,
    scan: &Scan,
    timeline: &Timeline,
    time: DateTime<Utc>,
) -> Result<Option<DateTime<Utc>>> {
    let mut later = whole_members(scan, timeline).filter(|name| name.created >= time.timestamp());
    let (Some(newest), None) = (later.next(), later.next()) else {
        return Ok(None);
    };
    if newest.is_full() {
        return Ok(None);
    }
    let slices = all_delta_slices(&scan.catalog, timeline);
    let mut reader = SliceReader::new(ctx, &slices);
    let last = moment::latest_event(&slices, |nth, visit| reader.visit_events(nth, visit))?;
    Ok(last.filter(|last| *last < time))
}

/// Returns the names of the snapshots that belong to a timeline as a whole. Others were saved after another history had
/// begun.
fn whole_members<'a>(
    scan: &'a Scan,
    timeline: &'a Timeline,
) -> impl Iterator<Item = &'a SnapshotName> {
    timeline.members.iter().filter_map(|m| {
        let name = &scan.catalog.snapshots[m.snapshot].name;
        (m.until >= name.last).then_some(name)
    })
}

/// Returns the name of the newest snapshot of a timeline if `time` is after it.
fn newest_if_uncovered<'a>(
    scan: &'a Scan,
    timeline: &'a Timeline,
    time: DateTime<Utc>,
) -> Option<&'a SnapshotName> {
    let newest = whole_members(scan, timeline).max_by_key(|name| name.created)?;
    (time.timestamp() > newest.created).then_some(newest)
}

/// Returns the newest revision whose events are at least `age` older than the last event of `slices`. `base`
/// is the time and the revision of the full before them.
///
/// # Errors
/// Errors of a damaged delta; errors of the store; `Terminated`.
pub(crate) fn newest_older_than(
    ctx: &Context,
    slices: &[DeltaSlice],
    base: Option<(DateTime<Utc>, Revision)>,
    age: Duration,
) -> Result<Option<Revision>> {
    let mut reader = SliceReader::new(ctx, slices);
    let mut read = |nth: usize, visit: &mut EventVisitor<'_>| reader.visit_events(nth, visit);
    let age = TimeDelta::from_std(age).unwrap_or(TimeDelta::MAX);
    let now = moment::latest_event(slices, &mut read)?;
    let Some(time) = now.and_then(|now| now.checked_sub_signed(age)) else {
        return Ok(None);
    };
    let found = Moment::find(slices, time, read)?.found;
    let by_base = base.filter(|&(created, _)| created <= time);
    Ok(found.or(by_base.map(|(_, revision)| revision)))
}
