//! The decision: each rule in turn keeps snapshots, and the rest may go.

use super::kept::KeepReasons;
use super::periods::{PeriodFulls, keep_newest_of_each_period, oldest_period_start};
use super::timeline_snapshots::{BaseFull, TimelineSnapshots};
use super::{Facts, Options, Policy, RetentionReason, Uncounted};
use crate::backup::catalog::{Catalog, V1};
use crate::backup::timeline::Timeline;
use crate::mvcc::Revision;
use chrono::{DateTime, Utc};
use std::collections::{BTreeSet, HashMap, HashSet};

/// The decision on all snapshots of a backup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetentionDecision {
    /// The reason for each snapshot, in the catalog's order.
    pub reasons: Vec<RetentionReason>,
    /// The fulls that make other snapshots superfluous, in ascending order; empty if nothing goes because of a
    /// full. If the content of one of them does not match its name, decide again with it among the uncounted
    /// fulls.
    pub rests_on: Vec<usize>,
}

/// Decides on every snapshot. Snapshots that no rule keeps may go.
pub fn decide(facts: &Facts, options: &Options) -> RetentionDecision {
    let mut decider = Decider::new(facts, options);
    // The order matters: the first rule that keeps a snapshot gives the reason.
    decider.keep_newest_chains();
    decider.keep_restorable_window();
    decider.keep_pinned();
    decider.keep_doubtful_and_future();
    let oldest_kept = decider.keep_by_policy();
    decider.keep_newest_full();
    decider.keep_uncounted();
    decider.keep_deltas();
    keep_v1_backups(facts.catalog, &mut decider.kept);
    let mut reasons = decider.reasons(oldest_kept);
    if decider.has_no_recent_full() {
        let going = reasons.iter_mut().filter(|reason| !reason.keeps());
        going.for_each(|reason| *reason = RetentionReason::NoRecentFull);
    }
    let rests_on = decider.rests_on(&reasons);
    RetentionDecision { reasons, rests_on }
}

/// A decision in progress.
struct Decider<'a> {
    facts: &'a Facts<'a>,
    options: &'a Options,
    /// The snapshots of each timeline, in the order of `facts.timelines`.
    by_timeline: Vec<TimelineSnapshots>,
    /// The first and the last own snapshot of each timeline, if there are several timelines. They tell which
    /// timeline is the newest, and when another one was given up.
    timeline_ends: Vec<usize>,
    newest: Option<&'a Timeline>,
    /// The fulls that the policy counts, in order of creation.
    fulls: Vec<usize>,
    /// The fulls that `Policy::Limit` keeps.
    within_limit: HashSet<usize>,
    /// For each timeline its fulls, and the periods in which one of them is kept.
    periods_by_timeline: Vec<(Vec<usize>, Vec<PeriodFulls>)>,
    kept: KeepReasons,
}

impl<'a> Decider<'a> {
    fn new(facts: &'a Facts<'a>, options: &'a Options) -> Self {
        let timeline_ends: Vec<usize> = match facts.timelines.all.as_slice() {
            [_] => Vec::new(),
            all => all.iter().flat_map(Timeline::own_ends).collect(),
        };
        let newest = if timeline_ends
            .iter()
            .any(|i| facts.uncounted.contains_key(i))
        {
            None
        } else {
            facts.timelines.newest(facts.catalog).ok()
        };
        let is_counted = |&i: &usize| facts.is_counted_full(i) && !facts.is_future(i);
        Decider {
            facts,
            options,
            by_timeline: facts.by_timeline(),
            timeline_ends,
            newest,
            fulls: facts.catalog.usable().filter(is_counted).collect(),
            within_limit: HashSet::new(),
            periods_by_timeline: Vec::new(),
            kept: KeepReasons {
                reasons: vec![None; facts.catalog.snapshots.len()],
                rests_on: BTreeSet::new(),
            },
        }
    }

    fn keep_newest_chains(&mut self) {
        for (snapshots, t) in self.by_timeline.iter().zip(&self.facts.timelines.all) {
            // If no timeline is the newest, each may be.
            if self.newest.is_none_or(|newest| newest.id == t.id) {
                keep_newest_chain(snapshots, self.facts, &mut self.kept);
            }
        }
    }

    fn keep_restorable_window(&mut self) {
        if self.options.restorable_window.is_none() {
            return;
        }
        let start = self.window_start().unwrap_or_default().timestamp();
        for (snapshots, t) in self.by_timeline.iter().zip(&self.facts.timelines.all) {
            if !was_given_up_before(self.facts.catalog, t, self.newest, start) {
                keep_window(snapshots, start, &mut self.kept);
            }
        }
    }

    fn window_start(&self) -> Option<DateTime<Utc>> {
        let window = self.options.restorable_window?;
        self.facts.now.checked_sub_signed(window)
    }

    /// Whether the newest full is older than the window: the backup has stopped, and its age removes nothing.
    fn has_no_recent_full(&self) -> bool {
        let mut newest = self.fulls.iter().rev();
        let newest = newest.find(|&&i| !self.facts.is_future(i));
        let start = self.window_start();
        start.is_some_and(|start| newest.is_none_or(|&i| self.facts.name(i).created_at() < start))
    }

    fn keep_pinned(&mut self) {
        let Facts {
            catalog, uncounted, ..
        } = *self.facts;
        let pinned: Vec<usize> = (0..catalog.snapshots.len())
            .filter(|&i| catalog.snapshots[i].pinned)
            .collect();
        if pinned.is_empty() {
            return;
        }
        for snapshots in &self.by_timeline {
            let fulls: HashSet<usize> = snapshots.bases.iter().map(|b| b.snapshot).collect();
            for &i in &pinned {
                // An uncounted full may belong to any timeline.
                if fulls.contains(&i) || uncounted.contains_key(&i) {
                    self.kept
                        .keep_pinned_chain(snapshots, self.facts.name(i).last);
                }
            }
        }
        let excluded = TimelineSnapshots::of_excluded_deltas(catalog).without(catalog, uncounted);
        for i in pinned {
            self.kept.keep(i, RetentionReason::Pinned);
            self.kept
                .keep_pinned_chain(&excluded, self.facts.name(i).last);
        }
    }

    /// Keeps snapshots whose timeline is in doubt, and snapshots with a time in the future.
    fn keep_doubtful_and_future(&mut self) {
        let Facts {
            catalog, doubtful, ..
        } = *self.facts;
        // What is on no timeline may share a base with what is in doubt.
        let left_out = &self.facts.timelines.left_out;
        for &i in left_out {
            self.kept.keep(i, RetentionReason::InterleavedTimelines);
        }
        let reason = if self.newest.is_none() || !left_out.is_empty() {
            Some(RetentionReason::InterleavedTimelines)
        } else if doubtful.iter().any(|&i| (self.facts.is_unreadable)(i)) {
            Some(RetentionReason::Unreadable)
        } else {
            None
        };
        if let Some(reason) = reason {
            doubtful.iter().for_each(|&i| self.kept.keep(i, reason));
        }
        // Behind these walls there is no full: what was saved there is no history of its own yet.
        if let Some(wall) = self.facts.timelines.without_full(catalog).first() {
            let behind = catalog.usable();
            let behind = behind.filter(|&i| catalog.snapshots[i].name.created >= wall.second);
            behind.for_each(|i| self.kept.keep(i, RetentionReason::RevisionGap));
        }
        for i in catalog.usable().filter(|&i| self.facts.is_future(i)) {
            self.kept.keep(i, RetentionReason::InTheFuture);
        }
    }

    /// Keeps fulls by the policy. Returns the age limit of excluded snapshots: those created before this time
    /// may go.
    fn keep_by_policy(&mut self) -> DateTime<Utc> {
        let oldest_kept = match self.options.policy {
            Policy::Exponential(periods) => {
                for snapshots in &self.by_timeline {
                    let mut fulls: Vec<usize> =
                        snapshots.bases.iter().map(|b| b.snapshot).collect();
                    fulls.retain(|&i| !self.facts.is_future(i));
                    // The catalog is in order of creation.
                    fulls.sort_unstable();
                    let kept =
                        keep_newest_of_each_period(self.facts, &fulls, periods, &mut self.kept);
                    self.periods_by_timeline.push((fulls, kept));
                }
                oldest_period_start(periods, self.facts.now)
            }
            Policy::Limit(limit) => self.keep_within_limit(limit),
        };
        let start = self.window_start();
        start.map_or(oldest_kept, |start| start.min(oldest_kept))
    }

    /// Keeps the full that was created last, for those who go by the times in names. It may end below others if
    /// a compaction was late.
    fn keep_newest_full(&mut self) {
        if let Some(&i) = self.fulls.last() {
            self.kept.keep(i, RetentionReason::NewestFull);
            self.kept.rests_on.insert(i);
        }
    }

    /// Keeps the newest `limit` fulls. Returns when the oldest of them was created.
    fn keep_within_limit(&mut self, limit: u32) -> DateTime<Utc> {
        let beyond = self.fulls.len().saturating_sub(limit as usize);
        let newest = &self.fulls[beyond..];
        for &i in newest {
            self.within_limit.insert(i);
            self.kept.keep(i, RetentionReason::WithinLimit(limit));
        }
        match newest.first() {
            _ if beyond == 0 => DateTime::UNIX_EPOCH,
            Some(&oldest) => self.facts.name(oldest).created_at(),
            None => self.facts.now,
        }
    }

    fn keep_uncounted(&mut self) {
        for (&i, uncounted) in self.facts.uncounted {
            let reason = match uncounted {
                Uncounted::Damaged => RetentionReason::Damaged,
                Uncounted::NotRead => RetentionReason::NotRead,
            };
            self.kept.keep(i, reason);
        }
    }

    /// Keeps deltas for which the options ask although no kept chain needs them, if a kept full leads to
    /// them. An uncounted full may be the one that leads there.
    fn keep_deltas(&mut self) {
        let mut to_keep: Vec<(usize, RetentionReason)> = Vec::new();
        for snapshots in &self.by_timeline {
            let wanted = self.wanted_deltas(snapshots);
            if wanted.is_empty() {
                continue;
            }
            let mut bases = [snapshots.bases.as_slice(), &snapshots.uncounted].concat();
            bases.sort_unstable();
            let has = |i: usize| self.kept.has(i) || wanted.contains_key(&i);
            let ranges = snapshots.ranges_from(&bases, &has);
            for d in &snapshots.deltas {
                let Some(&reason) = wanted.get(&d.snapshot) else {
                    continue;
                };
                let begun = ranges.partition_point(|r| r.0 < d.last);
                let range = begun.checked_sub(1).map(|last| ranges[last]);
                if range.is_some_and(|range| range.1 >= d.last) {
                    to_keep.push((d.snapshot, reason));
                }
            }
        }
        for (i, reason) in to_keep {
            self.kept.keep(i, reason);
        }
    }

    /// The deltas of a timeline for which the options ask, and which no rule has kept so far.
    fn wanted_deltas(&self, snapshots: &TimelineSnapshots) -> HashMap<usize, RetentionReason> {
        let newest_full = snapshots
            .newest_full(self.facts)
            .map_or(Revision(-1), |b| b.last);
        let young_after = self.delta_retention_start();
        let oldest_full_within_limit = self.oldest_full_within_limit(snapshots);
        let mut wanted = HashMap::new();
        for d in &snapshots.deltas {
            if self.kept.has(d.snapshot) {
                continue;
            }
            let reason = if d.last > newest_full {
                RetentionReason::EndOfTimeline
            } else if young_after.is_some_and(|t| d.created > t) {
                RetentionReason::DeltaRetention
            } else if oldest_full_within_limit.is_some_and(|oldest| d.last > oldest) {
                RetentionReason::WithItsFull
            } else {
                continue;
            };
            wanted.insert(d.snapshot, reason);
        }
        wanted
    }

    /// The time after which deltas are kept for their age, in seconds since 1970.
    fn delta_retention_start(&self) -> Option<i64> {
        let retention = self.options.delta_retention.filter(|r| !r.is_zero())?;
        let start = self.facts.now.checked_sub_signed(retention);
        Some(start.unwrap_or_default().timestamp())
    }

    /// With `Policy::Limit` and without a delta retention, the revision of the oldest kept full of a
    /// timeline: deltas above it are kept.
    fn oldest_full_within_limit(&self, snapshots: &TimelineSnapshots) -> Option<Revision> {
        let Policy::Limit(limit) = self.options.policy else {
            return None;
        };
        if self.options.delta_retention.is_some() {
            return None;
        }
        // If the limit is not reached, uncounted fulls may be within it.
        let has_room = self.fulls.len() < limit as usize;
        let is_within = |b: &&BaseFull| {
            self.within_limit.contains(&b.snapshot)
                || has_room && self.facts.uncounted.contains_key(&b.snapshot)
        };
        let bases = snapshots.bases.iter().chain(&snapshots.uncounted);
        bases.filter(is_within).map(|b| b.last).min()
    }

    /// The reason for each snapshot, in the catalog's order.
    fn reasons(&self, oldest_kept: DateTime<Utc>) -> Vec<RetentionReason> {
        let mut is_superseded = vec![false; self.kept.reasons.len()];
        for snapshots in &self.by_timeline {
            let newest_full = snapshots.newest_full(self.facts).map(|b| b.last);
            for d in &snapshots.deltas {
                is_superseded[d.snapshot] |= Some(d.last) <= newest_full;
            }
        }
        let mut reasons = Vec::with_capacity(self.kept.reasons.len());
        for (i, kept) in self.kept.reasons.iter().enumerate() {
            let s = &self.facts.catalog.snapshots[i];
            reasons.push(match *kept {
                Some(reason) => reason,
                None if s.excluded && s.name.created_at() < oldest_kept => {
                    RetentionReason::ExcludedBeyondPolicy
                }
                None if s.excluded => RetentionReason::Excluded,
                // An unreadable snapshot is on no timeline, so no rule could keep it.
                None if (self.facts.is_unreadable)(i) => RetentionReason::Unreadable,
                None if s.name.is_full() => RetentionReason::BeyondPolicy,
                None if is_superseded[i] => RetentionReason::Superseded,
                None => RetentionReason::NoBase,
            });
        }
        reasons
    }

    /// The fulls that make other snapshots superfluous, in ascending order.
    fn rests_on(self, reasons: &[RetentionReason]) -> Vec<usize> {
        if reasons.iter().all(|r| r.keeps()) {
            return Vec::new();
        }
        let mut rests_on = self.kept.rests_on;
        for (fulls, periods) in &self.periods_by_timeline {
            // The number of fulls that go before each position. Fulls that stay only with their `v1` backup
            // count, too: no deltas are kept for them.
            let goes = |i: usize| !reasons[i].keeps() || reasons[i] == RetentionReason::V1Backup;
            let mut gone_before = vec![0_usize];
            for &i in fulls {
                let gone = gone_before[gone_before.len() - 1];
                gone_before.push(gone + usize::from(goes(i)));
            }
            for period in periods {
                if gone_before[period.last] > gone_before[period.first] {
                    rests_on.insert(fulls[period.last]);
                }
            }
        }
        rests_on.extend(&self.within_limit);
        // The newest full of a timeline tells which deltas are superseded.
        for snapshots in &self.by_timeline {
            rests_on.extend(snapshots.newest_full(self.facts).map(|b| b.snapshot));
        }
        let counted_ends = self.timeline_ends.iter();
        rests_on.extend(counted_ends.filter(|&&i| self.facts.is_counted_full(i)));
        if let Policy::Limit(limit) = self.options.policy
            && reasons.contains(&RetentionReason::ExcludedBeyondPolicy)
        {
            // Excluded snapshots only go if there are more fulls than the limit, so one more full is needed.
            rests_on.extend(self.fulls.iter().rev().nth(limit as usize));
        }
        rests_on.into_iter().collect()
    }
}

/// Keeps the newest full and everything after it. If deltas after it are missing, an older full that leads
/// around the gap is kept, too.
fn keep_newest_chain(snapshots: &TimelineSnapshots, facts: &Facts, kept: &mut KeepReasons) {
    let reason = RetentionReason::NewestChain;
    let Some(newest) = snapshots.newest_full(facts) else {
        // There is no full, or only fulls with a time in the future.
        return kept.keep_from(snapshots, Revision(-1), reason);
    };
    kept.keep_from(snapshots, newest.last, reason);
    let mut end = newest.last;
    for d in &snapshots.deltas {
        if !facts.is_future(d.snapshot) {
            end = end.max(d.last);
        }
    }
    let leading = snapshots.oldest_start_to(end)..=end;
    let mut newest_first = snapshots.bases.iter().rev();
    let base = newest_first.find(|b| !facts.is_future(b.snapshot) && leading.contains(&b.last));
    match base {
        Some(base) => kept.keep_from(snapshots, base.last, reason),
        // The content of a full may go beyond its name and close the gap, and names do not tell which full
        // does.
        None => kept.keep_from(snapshots, Revision(-1), RetentionReason::RevisionGap),
    }
}

/// Returns whether a timeline was given up for the newest one before `start`, so that it was nobody's state
/// since.
fn was_given_up_before(
    catalog: &Catalog,
    t: &Timeline,
    newest: Option<&Timeline>,
    start: i64,
) -> bool {
    let Some(newest) = newest.filter(|newest| newest.id != t.id) else {
        return false;
    };
    let shared: HashSet<usize> = newest.members.iter().map(|m| m.snapshot).collect();
    let own = t.members.iter().filter(|m| !shared.contains(&m.snapshot));
    let mut created = own.map(|m| catalog.snapshots[m.snapshot].name.created);
    created.all(|c| c < start) && newest.began(catalog).is_some_and(|began| began <= start)
}

/// Keeps everything that is needed to restore the state at `start` and all later ones.
fn keep_window(snapshots: &TimelineSnapshots, start: i64, kept: &mut KeepReasons) {
    // A snapshot from before the window ends with a revision that was current before the window or at its
    // start.
    let mut goal = Revision(-1);
    for base in snapshots.bases.iter().filter(|b| b.created <= start) {
        goal = goal.max(base.last);
    }
    for delta in snapshots.deltas.iter().filter(|d| d.created <= start) {
        goal = goal.max(delta.last);
    }
    kept.keep_from(snapshots, goal, RetentionReason::RestorableWindow);
}

/// Keeps a folder of the old layout as a whole if one of its snapshots is kept.
fn keep_v1_backups(catalog: &Catalog, kept: &mut KeepReasons) {
    let mut folders: HashMap<&str, Vec<usize>> = HashMap::new();
    for (i, s) in catalog.snapshots.iter().enumerate() {
        if let Some((folder, _)) = s.path.rsplit_once('/')
            && folder.starts_with(V1)
        {
            folders.entry(folder).or_default().push(i);
        }
    }
    for backup in folders.into_values() {
        if !backup.iter().any(|&i| kept.has(i)) {
            continue;
        }
        for i in backup {
            kept.keep(i, RetentionReason::V1Backup);
        }
    }
}
