//! Revisions by time: the last one that is not after a time, and the newest one that is older than an age.
//!
//! `moment` decides; here deltas are opened and read for it. `select` needs it for `--time`, `replay` for
//! `--keep-history` with a duration.

use super::moment::{self, Each, Moment};
use super::open::read_snapshot::Reading;
use super::select::{Step, all_steps};
use crate::backup::chain;
use crate::backup::timeline::Timeline;
use crate::error::{Reason, Result};
use crate::mvcc::Revision;
use crate::ops::scan::Scan;
use crate::ops::{Context, tags, warn};
use chrono::{DateTime, TimeDelta, Utc};
use std::time::Duration;

/// Deltas whose tags are asked for at once, before they are read one by one.
const TAGS_AHEAD: usize = 16;

/// Reads steps, in about their order.
struct StepReader<'a> {
    ctx: &'a Context,
    steps: &'a [Step],
    /// And the step after the one that was read last.
    reading: Option<(Reading<'a>, usize)>,
}

impl<'a> StepReader<'a> {
    fn new(ctx: &'a Context, steps: &'a [Step]) -> Self {
        StepReader {
            ctx,
            steps,
            reading: None,
        }
    }

    /// Hands the events of a step to `each`, until it says false.
    fn events(&mut self, nth: usize, each: &mut Each<'_>) -> Result<()> {
        let step = &self.steps[nth];
        let at = self.ctx.at(&step.snapshot);
        // What was begun ahead is of no use for who goes back.
        let reading = match self.reading.take() {
            Some((reading, next)) if nth >= next => reading,
            _ => Reading::new(self.ctx, self.steps.iter().map(|s| &s.snapshot)),
        };
        let delta = reading.delta(nth);
        self.reading = Some((reading, nth + 1));
        let mut delta = delta?;
        while let Some(e) = delta.next().map_err(&at)? {
            if e.main <= step.after || e.main > step.until {
                continue;
            }
            match each(&e) {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) => return Err(at(delta.explain(e))),
            }
        }
        Ok(())
    }
}

/// The revision of the last event of a timeline whose time is not after `time`. Gives what an operator
/// should know, too.
///
/// Events tell, across gaps. If no event is left, a full tells by when it was made.
///
/// # Errors
/// `OutOfRange` where the timeline begins after it; `RevisionGap`, `NoSnapshots`; those of a damaged
/// delta; the store's; `Terminated`.
pub(crate) fn revision_at(
    ctx: &Context,
    scan: &Scan,
    timeline: &Timeline,
    time: DateTime<Utc>,
) -> Result<(Revision, Vec<String>)> {
    let catalog = &scan.catalog;
    let found = look_for(ctx, scan, timeline, time)
        .and_then(|moment| settle(scan, timeline, time, &moment));
    // What was read and has tags may be excluded, whatever came of reading it.
    let paths = timeline.members.iter().map(|m| m.snapshot);
    let paths = paths.map(|i| catalog.snapshots[i].path.as_str());
    let found = tags::unless_noted(ctx, paths, found);
    let (revision, warning) = found.map_err(|e| scan.explain_untrusted(ctx, e))?;
    let mut warnings = Vec::new();
    if let Some(warning) = warning {
        warn(&mut warnings, warning);
    }
    Ok((revision, warnings))
}

/// Reads deltas up to the first event after `time`.
fn look_for(
    ctx: &Context,
    scan: &Scan,
    timeline: &Timeline,
    time: DateTime<Utc>,
) -> Result<Moment> {
    let links = chain::all_links(&scan.catalog, timeline);
    let steps = all_steps(&scan.catalog, timeline);
    let mut reader = StepReader::new(ctx, &steps);
    let mut asked = None;
    Moment::look_for(&steps, time, |nth, each| {
        // If a read does not tell of tags, they are asked for before it, many at once.
        let batch = nth / TAGS_AHEAD;
        if asked != Some(batch) && !ctx.store.tells_tags() {
            asked = Some(batch);
            let ahead = links[nth..].iter().take(TAGS_AHEAD - nth % TAGS_AHEAD);
            scan.refuse_excluded(ctx, ahead.map(|l| l.snapshot))?;
        }
        reader.events(nth, each)
    })
}

/// The revision that was found, unless what no snapshot holds may hide a later one. Gives what an operator should
/// know, too.
fn settle(
    scan: &Scan,
    timeline: &Timeline,
    time: DateTime<Utc>,
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
            Some(oldest) => Reason::OutOfRange.error(format!(
                "{} is before the oldest state on timeline {}: that is {oldest}, of {}",
                time.to_rfc3339(),
                timeline.id,
                oldest.created_at().to_rfc3339()
            )),
        });
    };
    let known_to = moment.first_after.map(Revision::previous);
    let known_to = known_to.or(timeline.last(catalog, &scan.contents));
    let holes = chain::missing(catalog, timeline, revision, known_to.unwrap_or(revision));
    if !holes.is_empty() {
        return Err(Reason::RevisionGap.error(format!(
            "whether the last event up to {} is at revision {revision} cannot be told: missing are {}",
            time.to_rfc3339(),
            chain::show_ranges(&holes)
        )));
    }
    let is_last = moment.first_after.is_none() && moment.found == Some(revision);
    let warning = is_last.then(|| {
        format!(
            "the last event is of {}: what happened from then to {} is in no snapshot",
            moment.now.to_rfc3339(),
            time.to_rfc3339()
        )
    });
    Ok((revision, warning))
}

/// The newest revision whose events are at least `age` older than the last event of `steps`. `base`: when the full
/// below them was made, and its revision.
///
/// # Errors
/// Those of a damaged delta; the store's; `Terminated`.
pub(super) fn too_old(
    ctx: &Context,
    steps: &[Step],
    base: Option<(DateTime<Utc>, Revision)>,
    age: Duration,
) -> Result<Option<Revision>> {
    let mut reader = StepReader::new(ctx, steps);
    let mut read = |nth: usize, each: &mut Each<'_>| reader.events(nth, each);
    let age = TimeDelta::from_std(age).unwrap_or(TimeDelta::MAX);
    let now = moment::latest(steps, &mut read)?;
    let Some(time) = now.and_then(|now| now.checked_sub_signed(age)) else {
        return Ok(None);
    };
    let found = Moment::look_for(steps, time, read)?.found;
    let by_base = base.filter(|&(made, _)| made <= time);
    Ok(found.or(by_base.map(|(_, revision)| revision)))
}
