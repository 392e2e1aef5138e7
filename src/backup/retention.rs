//! Retention: which snapshots a policy keeps, and why; all others may go.
//!
//! A pure function of the catalog, its timelines, the options and now. It reads and deletes nothing;
//! `ops::gc` calls it, before it says what it would do and again before each batch that it removes.
//!
//! Names can be forged by everybody who can write. So the decision names the fulls that it rests on. The
//! caller reads these, and decides again without those that are not what their names say.

use crate::backup::catalog::{Catalog, V1};
use crate::backup::chain::Range;
use crate::backup::name::{Kind, SnapshotName};
use crate::backup::timeline::{Timeline, Timelines};
use crate::mvcc::Revision;
use chrono::{DateTime, Datelike, TimeDelta, Utc};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use strum::{IntoStaticStr, VariantNames};

/// How many calendar periods (UTC), the current one included, keep their newest full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::Args)]
pub struct Periods {
    /// With "exponential": keep the newest full of each of the last N hours (UTC), including the current one
    #[arg(long = "keep-hourly", value_name = "N", default_value_t = 24)]
    pub hourly: u32,
    /// With "exponential": keep the newest full of each of the last N days
    #[arg(long = "keep-daily", value_name = "N", default_value_t = 7)]
    pub daily: u32,
    /// With "exponential": keep the newest full of each of the last N weeks, which begin on Monday
    #[arg(long = "keep-weekly", value_name = "N", default_value_t = 4)]
    pub weekly: u32,
    /// With "exponential": keep the newest full of each of the last N months
    #[arg(long = "keep-monthly", value_name = "N", default_value_t = 0)]
    pub monthly: u32,
}

impl Default for Periods {
    fn default() -> Self {
        Periods {
            hourly: 24,
            daily: 7,
            weekly: 4,
            monthly: 0,
        }
    }
}

/// Which fulls are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// The newest of each period, on each timeline.
    Exponential(Periods),
    /// So many of the newest.
    Limit(u32),
}

/// What to keep.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Which fulls.
    pub policy: Policy,
    /// Deltas that a newer full has superseded stay for so long. `None`: under `Exponential` they go at
    /// once, under `Limit` they stay with the fulls that stay.
    pub delta_retention: Option<TimeDelta>,
    /// Everything that can be restored of so long a time before now stays restorable.
    pub restorable_window: Option<TimeDelta>,
    /// What was noted as removed goes when the note is so old; `None`: at once.
    pub purge_after: Option<TimeDelta>,
}

/// What is known of a prefix.
#[derive(Clone, Copy)]
pub struct Facts<'a> {
    /// The snapshots.
    pub catalog: &'a Catalog,
    /// Their timelines, told by contents where names leave doubt.
    pub timelines: &'a Timelines,
    /// Those whose names leave doubt.
    pub doubtful: &'a [usize],
    /// Whether one of these could not be read.
    pub is_unreadable: &'a dyn Fn(usize) -> bool,
    /// Since when a snapshot is noted as removed, where that is known.
    pub noted_since: &'a HashMap<usize, DateTime<Utc>>,
    /// Fulls that stay and count for nothing.
    pub aside: &'a BTreeMap<usize, Aside>,
    /// The earlier of the clocks that count.
    pub now: DateTime<Utc>,
}

impl<'a> Facts<'a> {
    fn name(&self, i: usize) -> &'a SnapshotName {
        &self.catalog.snapshots[i].name
    }

    fn is_future(&self, i: usize) -> bool {
        self.name(i).created > self.now.timestamp()
    }

    /// Whether it is a full that counts.
    fn is_counted(&self, i: usize) -> bool {
        self.name(i).is_full() && !self.aside.contains_key(&i)
    }

    /// The line of each timeline.
    fn lines(&self) -> Vec<Line> {
        let line = |t| Line::new(self.catalog, t).without(self.catalog, self.aside);
        self.timelines.all.iter().map(line).collect()
    }
}

/// Why a full counts for nothing: it is no base, supersedes nothing and is none of a policy's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aside {
    /// Its content is damaged, or not what its name says.
    Damaged,
    /// Its content was not read.
    NotRead,
}

/// What is decided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decided {
    /// In the catalog's order.
    pub why: Vec<Why>,
    /// The fulls because of which other snapshots go, ascending. If one of them is not what its name says,
    /// decide again with it aside. Empty if nothing goes because of a full.
    pub rests_on: Vec<usize>,
}

/// Why a snapshot is kept or goes; the most telling reason, where there are several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoStaticStr, VariantNames)]
pub enum Why {
    /// Kept: the newest chain of the newest timeline needs it.
    NewestChain,
    /// Kept: a point within the window needs it.
    RestorableWindow,
    /// Kept: a pinned chain needs it.
    Pinned,
    /// Kept: nobody knows what it belongs to, histories interleave.
    InterleavedTimelines,
    /// Kept: nobody knows what it belongs to, a snapshot of these cannot be read.
    Unreadable,
    /// Kept: no full leads to the end of its timeline by names, so nobody knows what is needed.
    RevisionGap,
    /// Kept: it is of a time that is not yet.
    InTheFuture,
    /// Kept: the newest full of its hour, which begins then.
    Hourly(DateTime<Utc>),
    /// Kept: of its day.
    Daily(DateTime<Utc>),
    /// Kept: of its week.
    Weekly(DateTime<Utc>),
    /// Kept: of its month.
    Monthly(DateTime<Utc>),
    /// Kept: one of the newest fulls, of so many.
    WithinLimit(u32),
    /// Kept: a delta behind a full that is kept.
    WithItsFull,
    /// Kept: a delta that is not old enough.
    DeltaRetention,
    /// Kept: a delta behind the last full of its timeline, which is kept.
    EndOfTimeline,
    /// Kept: a `v1` backup is kept as a whole.
    V1Backup,
    /// Kept until then: it is removed, and can be brought back.
    Removed(DateTime<Utc>),
    /// Kept: somebody excluded it, and the policy has not passed it by.
    Excluded,
    /// Kept: a full that the policy would keep, if its content were what its name says.
    Damaged,
    /// Kept: a full whose content was not read yet.
    NotRead,
    /// Goes: a full that the policy does not keep.
    BeyondPolicy,
    /// Goes: a delta that a newer full has superseded.
    Superseded,
    /// Goes: a delta to which no kept full leads.
    NoBase,
    /// Goes: somebody excluded it, and the policy keeps nothing so old.
    ExcludedBeyondPolicy,
    /// Goes for good: it was removed long enough ago.
    RemovedLongAgo,
}

impl Why {
    /// Every reason's name.
    pub const NAMES: &'static [&'static str] = Self::VARIANTS;

    /// Whether the snapshot stays.
    pub fn keeps(self) -> bool {
        !matches!(
            self,
            Why::BeyondPolicy
                | Why::Superseded
                | Why::NoBase
                | Why::ExcludedBeyondPolicy
                | Why::RemovedLongAgo
        )
    }

    /// CamelCase, stable.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// In words.
    pub fn text(self) -> Cow<'static, str> {
        let of = |what: &str, t: DateTime<Utc>, form: &str| {
            Cow::from(format!("the newest full of {what} {}", t.format(form)))
        };
        let plain = match self {
            Why::Hourly(t) => return of("the hour", t, "%Y-%m-%dT%HZ"),
            Why::Daily(t) => return of("the day", t, "%Y-%m-%d"),
            Why::Weekly(t) => return of("the week from", t, "%Y-%m-%d"),
            Why::Monthly(t) => return of("the month", t, "%Y-%m"),
            Why::WithinLimit(n) => return format!("one of the newest {n} fulls").into(),
            Why::Removed(t) => {
                return format!(
                    "removed, and can be brought back (deltafold undelete) until {}",
                    t.format("%Y-%m-%dT%H:%M:%SZ")
                )
                .into();
            }
            Why::NewestChain => "the newest chain needs it",
            Why::RestorableWindow => "a point within --restorable-window needs it",
            Why::Pinned => "a pinned chain needs it",
            Why::InterleavedTimelines => {
                "histories interleave here, so nobody knows what is needed: see `deltafold list --deep`"
            }
            Why::Unreadable => {
                "histories are in doubt here and a snapshot among them cannot be read: see `deltafold list --deep`"
            }
            Why::RevisionGap => {
                "by names no full leads to the end of its timeline, so nobody knows what is needed: see `deltafold list`"
            }
            Why::InTheFuture => "by its name it is of a time that is not yet",
            Why::WithItsFull => "a delta behind a full that is kept",
            Why::DeltaRetention => "a delta younger than --delta-retention",
            Why::EndOfTimeline => "no full of its timeline has superseded it",
            Why::V1Backup => "a v1 backup is kept as a whole",
            Why::Excluded => {
                "excluded by somebody, and younger than the oldest that the policy keeps"
            }
            Why::Damaged => {
                "its content is damaged or not what its name says: it counts for nothing"
            }
            Why::NotRead => "its content was not read yet: it counts for nothing until a later run",
            Why::BeyondPolicy => "a full that the policy does not keep",
            Why::Superseded => "a newer full has superseded this delta",
            Why::NoBase => "no full that is kept leads to this delta",
            Why::ExcludedBeyondPolicy => {
                "excluded by somebody, and older than all that the policy keeps"
            }
            Why::RemovedLongAgo => "removed, and the time to bring it back is over",
        };
        plain.into()
    }
}

/// A timeline's snapshots, cut to what they tell of it.
struct Line {
    /// In their order.
    bases: Vec<LineBase>,
    /// What counts for nothing and may be a base after all, in the same order. Nobody knows on which lines.
    aside: Vec<LineBase>,
    /// In the order of their first revisions.
    deltas: Vec<Delta>,
    /// How far each of these and all before it reach.
    reach: Vec<Revision>,
}

#[derive(Debug, Clone, Copy)]
struct Delta {
    start: Revision,
    last: Revision,
    created: i64,
    snapshot: usize,
}

/// A base of a line: its last revision, when it was created, and the snapshot.
type LineBase = (Revision, i64, usize);

impl Line {
    fn new(catalog: &Catalog, timeline: &Timeline) -> Self {
        let members = timeline.members.iter();
        Self::of(catalog, members.map(|m| (m.snapshot, m.until)))
    }

    /// Without fulls that count for nothing.
    fn without(mut self, catalog: &Catalog, aside: &BTreeMap<usize, Aside>) -> Self {
        if !aside.is_empty() {
            self.bases.retain(|b| !aside.contains_key(&b.2));
            let bases = aside.keys().map(|&i| {
                let name = &catalog.snapshots[i].name;
                (name.last, name.created, i)
            });
            self.aside = bases.collect();
            self.aside.sort_unstable();
        }
        self
    }

    /// The fulls that may be used and the deltas that are excluded: these are on no timeline.
    fn excluded(catalog: &Catalog) -> Self {
        let is_in = |&i: &usize| {
            let s = &catalog.snapshots[i];
            s.excluded != s.name.is_full()
        };
        let all = (0..catalog.snapshots.len()).filter(is_in);
        Self::of(catalog, all.map(|i| (i, Revision(i64::MAX))))
    }

    /// Of snapshots, each cut to a revision.
    fn of(catalog: &Catalog, members: impl Iterator<Item = (usize, Revision)>) -> Self {
        let (mut bases, mut deltas) = (Vec::new(), Vec::new());
        for (snapshot, until) in members {
            let n = &catalog.snapshots[snapshot].name;
            match n.kind {
                Kind::Full if n.last <= until => bases.push((n.last, n.created, snapshot)),
                Kind::Full => {}
                Kind::Incr => deltas.push(Delta {
                    start: n.start,
                    last: n.last.min(until),
                    created: n.created,
                    snapshot,
                }),
            }
        }
        bases.sort_unstable();
        deltas.sort_unstable_by_key(|d| (d.start, d.last, d.snapshot));
        let mut farthest = Revision(i64::MIN);
        let reach = deltas.iter().map(|d| {
            farthest = farthest.max(d.last);
            farthest
        });
        Line {
            reach: reach.collect(),
            bases,
            aside: Vec::new(),
            deltas,
        }
    }

    /// The newest full that is not of the future.
    fn newest(&self, facts: &Facts) -> Option<&LineBase> {
        self.bases.iter().rev().find(|b| !facts.is_future(b.2))
    }

    /// The full after one of this revision.
    fn next(&self, full: Revision) -> Option<&LineBase> {
        let next = self.bases.partition_point(|b| b.0 <= full);
        self.bases.get(next)
    }

    /// The deltas behind a full of this revision, up to the next one.
    fn behind(&self, full: Revision) -> impl Iterator<Item = usize> {
        let end = self.next(full).map_or(Revision(i64::MAX), |b| b.0);
        let from = self.reach.partition_point(|&r| r <= full);
        let deltas = self.deltas[from..].iter();
        let deltas = deltas.take_while(move |d| d.start <= end);
        deltas.filter(move |d| d.last > full).map(|d| d.snapshot)
    }

    /// The oldest revision from which deltas lead to `goal`, or `goal` itself.
    fn leads_from(&self, goal: Revision) -> Revision {
        let mut by_end: Vec<&Delta> = self.deltas.iter().collect();
        by_end.sort_unstable_by_key(|d| Reverse(d.last));
        let mut from = goal;
        for d in by_end {
            if d.last < from {
                break;
            }
            from = from.min(d.start.previous());
        }
        from
    }

    /// The revision below which nothing is needed for `goal` and all that can be restored above it.
    fn floor(&self, goal: Revision) -> Revision {
        let below = |from: Revision| {
            let bases = self.bases.iter().rev();
            let mut bases = bases.filter(|b| b.0 <= goal && b.0 >= from);
            // Of what is aside any may be the one.
            let mut aside = self.aside.iter().filter(|b| b.0 <= goal && b.0 >= from);
            bases.next().or_else(|| aside.next()).map(|b| b.0)
        };
        let leading = below(self.leads_from(goal));
        // What the newest full before it holds past its name may reach over a gap.
        let nearest = below(Revision(i64::MIN));
        match (leading, nearest) {
            (Some(a), Some(b)) => a.min(b),
            (a, b) => a.or(b).unwrap_or(goal),
        }
    }

    /// What can be restored with some of the snapshots.
    fn ranges(&self, has: &dyn Fn(usize) -> bool) -> Vec<Range> {
        self.ranges_from(&self.bases, has)
    }

    /// What can be restored from these bases, which are in order, with some of the snapshots.
    fn ranges_from(&self, bases: &[LineBase], has: &dyn Fn(usize) -> bool) -> Vec<Range> {
        let mut ranges: Vec<Range> = Vec::new();
        let mut ahead = self.deltas.iter().filter(|d| has(d.snapshot)).peekable();
        let mut farthest = Revision(-1);
        for &(base, ..) in bases.iter().filter(|b| has(b.2)) {
            let mut reached = ranges.last().map_or(base, |r| r.1.max(base));
            loop {
                while let Some(d) = ahead.next_if(|d| d.start <= reached.next()) {
                    farthest = farthest.max(d.last);
                }
                if farthest <= reached {
                    break;
                }
                reached = farthest;
            }
            match ranges.last_mut() {
                Some(r) if base <= r.1.next() => r.1 = reached,
                _ => ranges.push((base, reached)),
            }
        }
        ranges
    }
}

/// What can be restored of a timeline by names, with some of its snapshots.
pub fn restorable(
    catalog: &Catalog,
    timeline: &Timeline,
    has: &dyn Fn(usize) -> bool,
) -> Vec<Range> {
    Line::new(catalog, timeline).ranges(has)
}

/// The chain of a full: it, and the deltas behind it up to the next full, on each of its timelines; and those
/// of them that are excluded, which are wanted where the chain is to be brought back.
pub fn chain_of(catalog: &Catalog, timelines: &Timelines, full: usize) -> Vec<usize> {
    let last = catalog.snapshots[full].name.last;
    let mut chain: HashSet<usize> = Line::excluded(catalog).behind(last).collect();
    chain.insert(full);
    for t in &timelines.all {
        let line = Line::new(catalog, t);
        if line.bases.iter().any(|b| b.2 == full) {
            chain.extend(line.behind(last));
        }
    }
    let mut chain: Vec<usize> = chain.into_iter().collect();
    chain.sort_unstable();
    chain
}

/// A period of the calendar: which one, counted without holes, and when it begins.
type Period = (i64, DateTime<Utc>);

fn hour(t: DateTime<Utc>) -> Period {
    let n = t.timestamp().div_euclid(3600);
    (n, at(n * 3600))
}

fn day(t: DateTime<Utc>) -> Period {
    let n = t.timestamp().div_euclid(86_400);
    (n, at(n * 86_400))
}

fn week(t: DateTime<Utc>) -> Period {
    // 1970 began on a Thursday.
    let n = (day(t).0 + 3).div_euclid(7);
    (n, at((n * 7 - 3) * 86_400))
}

fn month(t: DateTime<Utc>) -> Period {
    let n = i64::from(t.year()) * 12 + i64::from(t.month0());
    (n, at((day(t).0 - i64::from(t.day0())) * 86_400))
}

fn at(seconds: i64) -> DateTime<Utc> {
    DateTime::from_timestamp(seconds, 0).unwrap_or_default()
}

/// Goes through a kind of period: its number, and its reason.
type Rule = (u32, fn(DateTime<Utc>) -> Period, fn(DateTime<Utc>) -> Why);

fn rules(p: Periods) -> [Rule; 4] {
    [
        (p.hourly, hour, Why::Hourly),
        (p.daily, day, Why::Daily),
        (p.weekly, week, Why::Weekly),
        (p.monthly, month, Why::Monthly),
    ]
}

/// The newest full of each period, of those given in order of creation. Gives of each rule the periods in
/// which it keeps a full, with the full and the first of the period: they supersede what is between.
fn of_periods(facts: &Facts, fulls: &[usize], periods: Periods, kept: &mut Kept) -> Vec<OfPeriod> {
    let created = |at: usize| facts.name(fulls[at]).created_at();
    let mut all = Vec::new();
    for (count, period, why) in rules(periods) {
        let current = period(facts.now).0;
        let mut newest: BTreeMap<i64, OfPeriod> = BTreeMap::new();
        for last in 0..fulls.len() {
            let n = period(created(last)).0;
            if n <= current && current - n < i64::from(count) {
                let first = newest.get(&n).map_or(last, |of| of.first);
                newest.insert(n, OfPeriod { first, last });
            }
        }
        for of in newest.into_values() {
            kept.keep(fulls[of.last], why(period(created(of.last)).1));
            all.push(of);
        }
    }
    all
}

/// The fulls of a period, by their places in a list: the last is kept, those before it need not be.
struct OfPeriod {
    first: usize,
    last: usize,
}

/// When the oldest period begins of which anything is kept.
fn horizon(periods: Periods, now: DateTime<Utc>) -> DateTime<Utc> {
    let rules = rules(periods);
    let begins = rules.iter().filter(|r| r.0 > 0).map(|&(count, period, _)| {
        let (wanted, mut t) = (period(now).0 - i64::from(count) + 1, now);
        // A period at a time: months differ in length.
        while period(t).0 > wanted && t.timestamp() > 0 {
            t = period(t).1 - TimeDelta::seconds(1);
        }
        period(t).1
    });
    begins.min().unwrap_or(now)
}

/// Decides on every snapshot; what is not kept may go.
pub fn decide(facts: &Facts, options: &Options) -> Decided {
    let mut deciding = Deciding::new(facts, options);
    // Chains that must not break, the most important first.
    deciding.keep_newest_chains();
    deciding.keep_windows();
    deciding.keep_pinned();
    deciding.keep_unclear();
    let oldest_kept = deciding.keep_by_policy();
    deciding.keep_aside();
    deciding.keep_deltas();
    keep_v1_backups(facts.catalog, &mut deciding.kept);
    let why = deciding.judge(oldest_kept);
    let rests_on = deciding.rests_on(&why);
    Decided { why, rests_on }
}

/// A decision that is being made.
struct Deciding<'a> {
    facts: &'a Facts<'a>,
    options: &'a Options,
    /// Of each timeline.
    lines: Vec<Line>,
    /// The ends of several timelines tell which is the newest, and when another was given up.
    ends: Vec<usize>,
    newest: Option<&'a Timeline>,
    /// Those that the policy counts, in order of creation.
    fulls: Vec<usize>,
    /// Those that a limit keeps.
    within: HashSet<usize>,
    /// Of each line its fulls, and the periods in which one of them is kept.
    of_lines: Vec<(Vec<usize>, Vec<OfPeriod>)>,
    kept: Kept,
}

impl<'a> Deciding<'a> {
    fn new(facts: &'a Facts<'a>, options: &'a Options) -> Self {
        let ends: Vec<usize> = match facts.timelines.all.as_slice() {
            [_] => Vec::new(),
            all => all.iter().flat_map(Timeline::own_ends).collect(),
        };
        let newest = match ends.iter().any(|i| facts.aside.contains_key(i)) {
            true => None,
            false => facts.timelines.newest(facts.catalog).ok(),
        };
        let is_counted = |&i: &usize| facts.is_counted(i) && !facts.is_future(i);
        Deciding {
            facts,
            options,
            lines: facts.lines(),
            ends,
            newest,
            fulls: facts.catalog.usable().filter(is_counted).collect(),
            within: HashSet::new(),
            of_lines: Vec::new(),
            kept: Kept {
                why: vec![None; facts.catalog.snapshots.len()],
                rests_on: BTreeSet::new(),
            },
        }
    }

    fn keep_newest_chains(&mut self) {
        for (line, t) in self.lines.iter().zip(&self.facts.timelines.all) {
            // Where none is the newest, each may be.
            if self.newest.is_none_or(|n| n.id == t.id) {
                keep_newest_chain(line, self.facts, &mut self.kept);
            }
        }
    }

    fn keep_windows(&mut self) {
        if self.options.restorable_window.is_none() {
            return;
        }
        let start = self.window_start().unwrap_or_default().timestamp();
        for (line, t) in self.lines.iter().zip(&self.facts.timelines.all) {
            if !was_over(self.facts.catalog, t, self.newest, start) {
                keep_window(line, start, &mut self.kept);
            }
        }
    }

    fn window_start(&self) -> Option<DateTime<Utc>> {
        self.facts
            .now
            .checked_sub_signed(self.options.restorable_window?)
    }

    fn keep_pinned(&mut self) {
        let Facts { catalog, aside, .. } = *self.facts;
        let excluded = Line::excluded(catalog).without(catalog, aside);
        let pinned: Vec<usize> = (0..catalog.snapshots.len())
            .filter(|&i| catalog.snapshots[i].pinned)
            .collect();
        if pinned.is_empty() {
            return;
        }
        for line in &self.lines {
            let of_line: HashSet<usize> = line.bases.iter().map(|b| b.2).collect();
            // Of what is aside nobody knows the timeline.
            let is_on = |i: &&usize| of_line.contains(i) || aside.contains_key(i);
            for &i in pinned.iter().filter(is_on) {
                self.kept.keep_behind(line, self.facts.name(i).last);
            }
        }
        for i in pinned {
            self.kept.keep(i, Why::Pinned);
            self.kept.keep_behind(&excluded, self.facts.name(i).last);
        }
    }

    /// Keeps what may be needed by nobody knows what, and what is of the future.
    fn keep_unclear(&mut self) {
        let Facts {
            catalog, doubtful, ..
        } = *self.facts;
        let why = match doubtful.iter().any(|&i| (self.facts.is_unreadable)(i)) {
            _ if self.newest.is_none() => Some(Why::InterleavedTimelines),
            true => Some(Why::Unreadable),
            false => None,
        };
        if let Some(why) = why {
            doubtful.iter().for_each(|&i| self.kept.keep(i, why));
        }
        for i in catalog.usable().filter(|&i| self.facts.is_future(i)) {
            self.kept.keep(i, Why::InTheFuture);
        }
    }

    /// Keeps fulls by policy. Gives how old may be what others excluded.
    fn keep_by_policy(&mut self) -> DateTime<Utc> {
        let now = self.facts.now;
        let oldest_kept = match self.options.policy {
            Policy::Exponential(periods) => {
                for line in &self.lines {
                    let mut on: Vec<usize> = line.bases.iter().map(|b| b.2).collect();
                    on.retain(|&i| !self.facts.is_future(i));
                    // The catalog is in order of creation.
                    on.sort_unstable();
                    let periods = of_periods(self.facts, &on, periods, &mut self.kept);
                    self.of_lines.push((on, periods));
                }
                horizon(periods, now)
            }
            Policy::Limit(n) => {
                let older = self.fulls.len().saturating_sub(n as usize);
                let newest = &self.fulls[older..];
                for &i in newest {
                    self.within.insert(i);
                    self.kept.keep(i, Why::WithinLimit(n));
                }
                match (older, newest.first()) {
                    (0, _) => DateTime::UNIX_EPOCH,
                    (_, Some(&oldest)) => self.facts.name(oldest).created_at(),
                    (_, None) => now,
                }
            }
        };
        let start = self.window_start();
        start.map_or(oldest_kept, |s| s.min(oldest_kept))
    }

    fn keep_aside(&mut self) {
        for (&i, aside) in self.facts.aside {
            let why = match aside {
                Aside::Damaged => Why::Damaged,
                Aside::NotRead => Why::NotRead,
            };
            self.kept.keep(i, why);
        }
    }

    /// Keeps deltas that no chain needs, but the options keep; only those to which a full that is kept leads.
    /// What is aside may be a base after all.
    fn keep_deltas(&mut self) {
        let mut more: Vec<(usize, Why)> = Vec::new();
        for line in &self.lines {
            let wanted = self.wanted_deltas(line);
            if wanted.is_empty() {
                continue;
            }
            let mut bases = [line.bases.as_slice(), &line.aside].concat();
            bases.sort_unstable();
            let has = |i: usize| self.kept.has(i) || wanted.contains_key(&i);
            let ranges = line.ranges_from(&bases, &has);
            for d in &line.deltas {
                // The last range that begins below its end.
                let at = ranges.partition_point(|r| r.0 < d.last);
                let leads = at > 0 && ranges[at - 1].1 >= d.last;
                if let (true, Some(&why)) = (leads, wanted.get(&d.snapshot)) {
                    more.push((d.snapshot, why));
                }
            }
        }
        for (i, why) in more {
            self.kept.keep(i, why);
        }
    }

    /// The deltas of a line that the options keep.
    fn wanted_deltas(&self, line: &Line) -> HashMap<usize, Why> {
        let age = self.options.delta_retention;
        let young_from = age.filter(|age| !age.is_zero()).map(|age| {
            let oldest = self.facts.now.checked_sub_signed(age);
            oldest.unwrap_or_default().timestamp()
        });
        let newest = line.newest(self.facts).map_or(Revision(-1), |b| b.0);
        let with_fulls_from = match self.options.policy {
            Policy::Limit(n) if age.is_none() => {
                // What is not read may be among so many.
                let has_room = self.fulls.len() < n as usize;
                let counts = |b: &&LineBase| {
                    self.within.contains(&b.2) || has_room && self.facts.aside.contains_key(&b.2)
                };
                let bases = line.bases.iter().chain(&line.aside);
                bases.filter(counts).map(|b| b.0).min()
            }
            _ => None,
        };
        let deltas = line.deltas.iter().filter(|d| !self.kept.has(d.snapshot));
        let wanted = deltas.filter_map(|d| {
            let why = match () {
                () if d.last > newest => Why::EndOfTimeline,
                () if young_from.is_some_and(|t| d.created > t) => Why::DeltaRetention,
                () if with_fulls_from.is_some_and(|o| d.last > o) => Why::WithItsFull,
                () => return None,
            };
            Some((d.snapshot, why))
        });
        wanted.collect()
    }

    /// Why each snapshot is kept or goes.
    fn judge(&self, oldest_kept: DateTime<Utc>) -> Vec<Why> {
        let mut is_superseded = vec![false; self.kept.why.len()];
        for line in &self.lines {
            let last = line.newest(self.facts).map(|b| b.0);
            for d in line.deltas.iter().filter(|d| Some(d.last) <= last) {
                is_superseded[d.snapshot] = true;
            }
        }
        let judge = |(i, why): (usize, &Option<Why>)| {
            let s = &self.facts.catalog.snapshots[i];
            match *why {
                Some(why) => why,
                None if s.excluded && s.removal_noted => self.removed(i),
                None if s.excluded && s.name.created_at() < oldest_kept => {
                    Why::ExcludedBeyondPolicy
                }
                None if s.excluded => Why::Excluded,
                // It is on no timeline: unreadable, and nobody knows what else.
                None if (self.facts.is_unreadable)(i) => Why::Unreadable,
                None if s.name.is_full() => Why::BeyondPolicy,
                None if is_superseded[i] => Why::Superseded,
                None => Why::NoBase,
            }
        };
        self.kept.why.iter().enumerate().map(judge).collect()
    }

    /// Of what is noted as removed: whether it can still be brought back.
    fn removed(&self, i: usize) -> Why {
        let Some(age) = self.options.purge_after else {
            return Why::RemovedLongAgo;
        };
        // If a note does not tell when it was written, it counts as new.
        let now = self.facts.now;
        let since = self.facts.noted_since.get(&i).copied().unwrap_or(now);
        let until = since.checked_add_signed(age);
        match until.unwrap_or(DateTime::<Utc>::MAX_UTC) {
            until if until > now => Why::Removed(until),
            _ => Why::RemovedLongAgo,
        }
    }

    /// The fulls that make others go, ascending.
    fn rests_on(self, why: &[Why]) -> Vec<usize> {
        // What was removed long ago goes whatever the fulls are.
        let is_because_of_a_full = |w: &Why| !w.keeps() && *w != Why::RemovedLongAgo;
        if !why.iter().any(is_because_of_a_full) {
            return Vec::new();
        }
        let mut rests_on = self.kept.rests_on;
        for (on, periods) in &self.of_lines {
            // How many of these go, up to each.
            let mut gone = vec![0_usize];
            for &i in on {
                gone.push(gone[gone.len() - 1] + usize::from(!why[i].keeps()));
            }
            let supersedes = |of: &&OfPeriod| gone[of.last] > gone[of.first];
            rests_on.extend(periods.iter().filter(supersedes).map(|of| on[of.last]));
        }
        rests_on.extend(&self.within);
        // The end of a timeline: no full of the timeline has superseded it.
        let newest = self.lines.iter().filter_map(|l| l.newest(self.facts));
        rests_on.extend(newest.map(|b| b.2));
        rests_on.extend(self.ends.iter().filter(|&&i| self.facts.is_counted(i)));
        if let Policy::Limit(n) = self.options.policy
            && why.contains(&Why::ExcludedBeyondPolicy)
        {
            // That there is one more than the limit makes old ones go.
            rests_on.extend(self.fulls.iter().rev().nth(n as usize));
        }
        rests_on.into_iter().collect()
    }
}

/// What would be lost of a timeline by a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shrink {
    /// The timeline's ID.
    pub timeline: String,
    /// The newest revision that can be restored, and when the snapshot that holds it was made.
    pub before: (Revision, DateTime<Utc>),
    /// The same after the plan; `None` if nothing can be restored any more.
    pub after: Option<(Revision, DateTime<Utc>)>,
}

/// Whether the newest restorable revision of the newest timeline falls; of each timeline, if none is the
/// newest. `counts` says what can be used before the plan, `stays` what is left by it.
pub fn shrinks(
    catalog: &Catalog,
    timelines: &Timelines,
    counts: &dyn Fn(usize) -> bool,
    stays: &dyn Fn(usize) -> bool,
) -> Option<Shrink> {
    let newest = timelines.newest(catalog).ok();
    let all = timelines.all.iter();
    let mut own = all.filter(|t| newest.is_none_or(|n| n.id == t.id));
    own.find_map(|t| {
        let line = Line::new(catalog, t);
        let before = newest_restorable(&line, counts)?;
        let after = newest_restorable(&line, &|i| counts(i) && stays(i));
        (after.is_none_or(|after| after.0 < before.0)).then(|| Shrink {
            timeline: t.id.clone(),
            before,
            after,
        })
    })
}

/// The newest revision that can be restored with some of the snapshots, and when the one that holds it was
/// made.
fn newest_restorable(
    line: &Line,
    has: &dyn Fn(usize) -> bool,
) -> Option<(Revision, DateTime<Utc>)> {
    let newest = line.ranges(has).last()?.1;
    let bases = line.bases.iter().filter(|b| has(b.2) && b.0 == newest);
    let deltas = line
        .deltas
        .iter()
        .filter(|d| has(d.snapshot) && d.last == newest);
    let made = bases.map(|b| b.1).chain(deltas.map(|d| d.created)).min();
    Some((newest, at(made?)))
}

/// Why each snapshot is kept: the first reason that was found.
struct Kept {
    why: Vec<Option<Why>>,
    /// Fulls because of which others are not.
    rests_on: BTreeSet<usize>,
}

impl Kept {
    fn keep(&mut self, i: usize, why: Why) {
        self.why[i].get_or_insert(why);
    }

    fn has(&self, i: usize) -> bool {
        self.why[i].is_some()
    }

    /// The chain behind a pinned full of this revision ends at the next full.
    fn keep_behind(&mut self, line: &Line, full: Revision) {
        line.behind(full).for_each(|i| self.keep(i, Why::Pinned));
        self.rests_on.extend(line.next(full).map(|b| b.2));
    }

    /// All that can be restored at `goal` and above it stays so.
    fn keep_from(&mut self, line: &Line, goal: Revision, why: Why) {
        let floor = line.floor(goal);
        for &(last, _, i) in &line.bases {
            // Those at the floor are told apart only by what they hold: all of them stay.
            if last >= goal || last == floor {
                self.keep(i, why);
            }
            if last == floor {
                self.rests_on.insert(i);
            }
        }
        let nearest = line.bases.iter().rev().find(|b| b.0 <= goal).map(|b| b.0);
        for &(_, _, i) in line.bases.iter().filter(|b| Some(b.0) == nearest) {
            self.keep(i, why);
            self.rests_on.insert(i);
        }
        for d in line.deltas.iter().filter(|d| d.last > floor) {
            self.keep(d.snapshot, why);
        }
    }
}

/// The newest full and all behind it; where deltas after it are missing, an older full that leads around.
fn keep_newest_chain(line: &Line, facts: &Facts, kept: &mut Kept) {
    let why = Why::NewestChain;
    let Some(newest) = line.newest(facts) else {
        // There is no full, or none that is of now.
        return kept.keep_from(line, Revision(-1), why);
    };
    let ends = line.deltas.iter().filter(|d| !facts.is_future(d.snapshot));
    let end = ends.map(|d| d.last).max().unwrap_or_default().max(newest.0);
    kept.keep_from(line, newest.0, why);
    let leads = line.leads_from(end)..=end;
    let mut around = line.bases.iter().rev().filter(|b| !facts.is_future(b.2));
    match around.find(|b| leads.contains(&b.0)) {
        Some(base) => kept.keep_from(line, base.0, why),
        // What a full holds past its name may close the gap, and names do not tell which.
        None => kept.keep_from(line, Revision(-1), Why::RevisionGap),
    }
}

/// Whether a timeline was given up for the newest one before `start`: it was nobody's state since.
fn was_over(catalog: &Catalog, t: &Timeline, newest: Option<&Timeline>, start: i64) -> bool {
    let Some(newest) = newest.filter(|n| n.id != t.id) else {
        return false;
    };
    let shared: HashSet<usize> = newest.members.iter().map(|m| m.snapshot).collect();
    let own = t.members.iter().filter(|m| !shared.contains(&m.snapshot));
    let mut created = own.map(|m| catalog.snapshots[m.snapshot].name.created);
    created.all(|c| c < start) && newest.began(catalog).is_some_and(|began| began <= start)
}

/// All that can be restored of the time from `start` on, and the state at that time.
fn keep_window(line: &Line, start: i64, kept: &mut Kept) {
    // What was made before the window holds nothing of it: its last revision was there at the start.
    let before = line.bases.iter().map(|b| (b.1, b.0));
    let before = before.chain(line.deltas.iter().map(|d| (d.created, d.last)));
    let there = before.filter(|b| b.0 <= start).map(|b| b.1).max();
    let goal = there.unwrap_or(Revision(-1));
    kept.keep_from(line, goal, Why::RestorableWindow);
}

/// A folder of the old layout stays as a whole, where anything of it does.
fn keep_v1_backups(catalog: &Catalog, kept: &mut Kept) {
    let mut folders: HashMap<&str, Vec<usize>> = HashMap::new();
    for (i, s) in catalog.snapshots.iter().enumerate() {
        if let Some((folder, _)) = s.path.rsplit_once('/')
            && folder.starts_with(V1)
        {
            folders.entry(folder).or_default().push(i);
        }
    }
    for backup in folders.into_values() {
        if backup.iter().any(|&i| kept.has(i)) {
            for i in backup {
                let s = &catalog.snapshots[i];
                if !(s.excluded && s.removal_noted) {
                    kept.keep(i, Why::V1Backup);
                }
            }
        }
    }
}

/// What goes, as chains: each is to be removed in its order, the newest delta first and the full last, so
/// that whatever is left at any moment has no hole.
pub fn removal_chains(catalog: &Catalog, goes: &HashSet<usize>) -> Vec<Vec<usize>> {
    let name = |i: usize| &catalog.snapshots[i].name;
    let folder = |i: usize| {
        let path = &catalog.snapshots[i].path;
        path.rsplit_once('/').map_or("", |p| p.0)
    };
    // A full that stays is where a chain ends, too.
    let mut order: Vec<usize> = (0..catalog.snapshots.len())
        .filter(|i| goes.contains(i) || name(*i).is_full())
        .collect();
    order.sort_unstable_by_key(|&i| {
        let n = name(i);
        (folder(i), n.last, n.is_full(), n.created, i)
    });
    let mut chains: Vec<Vec<usize>> = Vec::new();
    let mut last_folder = None;
    for i in order {
        if name(i).is_full() || last_folder != Some(folder(i)) {
            chains.push(Vec::new());
        }
        last_folder = Some(folder(i));
        if let Some(chain) = chains.last_mut().filter(|_| goes.contains(&i)) {
            chain.push(i);
        }
    }
    chains.retain(|c| !c.is_empty());
    for chain in &mut chains {
        chain.reverse();
    }
    chains
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::catalog::{Listed, Snapshot};
    use crate::backup::survey::{Comparison, Continuity};
    use crate::backup::timeline::Evidence;
    use crate::error::Result;

    /// A history: it shares its parent's revisions below `fork`.
    struct Branch {
        parent: Option<usize>,
        fork: i64,
        /// The time of each revision from `fork` on.
        times: Vec<i64>,
    }

    impl Branch {
        fn again(&self) -> Branch {
            Branch {
                parent: self.parent,
                fork: self.fork,
                times: self.times.clone(),
            }
        }
    }

    /// A random bucket of which all is known.
    struct World {
        branches: Vec<Branch>,
        /// Name, and whose history it tells.
        written: Vec<(String, usize)>,
        catalog: Catalog,
        /// By index in the catalog.
        branch: Vec<usize>,
        now: i64,
    }

    impl World {
        fn random(rng: &mut fastrand::Rng) -> World {
            let mut w = World {
                branches: Vec::new(),
                written: Vec::new(),
                catalog: Catalog::default(),
                branch: Vec::new(),
                now: 1_790_000_000 + rng.i64(0..1_000_000),
            };
            let pace = [60, 600, 3600, 20_000][rng.usize(..4)];
            for b in 0..rng.usize(1..4) {
                w.live(rng, b, pace);
            }
            w.now += rng.i64(0..pace * 20);
            w.list(rng);
            w
        }

        fn live(&mut self, rng: &mut fastrand::Rng, b: usize, pace: i64) {
            let parent = b.checked_sub(1);
            let fork = match parent {
                None => 1,
                Some(p) => {
                    let from = self.branches[p].fork;
                    rng.i64(from.max(2)..=self.last(p) + 1)
                }
            };
            let (mut last, mut saved) = (fork - 1, fork - 1);
            self.branches.push(Branch {
                parent,
                fork,
                times: Vec::new(),
            });
            let mut names = Vec::new();
            let mut next_full = true;
            for _ in 0..rng.usize(1..14) {
                for _ in 0..rng.usize(1..5) {
                    last += 1;
                    self.now += rng.i64(0..pace);
                    self.branches[b].times.push(self.now);
                }
                self.now += rng.i64(1..pace + 1);
                let now = self.now;
                match rng.u8(..10) {
                    0..2 if !next_full => {
                        names.push(format!("Full-00000000-{last:08}-{now}"));
                        // Up to the full there may be a delta, too, or a hole.
                        if rng.u8(..4) > 0 && saved < last {
                            names.push(format!("Incr-{:08}-{last:08}-{now}", saved + 1));
                        }
                        saved = last;
                    }
                    2 if !next_full => {
                        // A compaction, of anything that there is.
                        let r = rng.i64(fork..=last);
                        names.push(format!("Full-00000000-{r:08}-{now}"));
                    }
                    3 if !next_full && saved > fork => {
                        // Another snapshotter's delta, that overlaps.
                        let from = rng.i64(fork..=saved);
                        names.push(format!("Incr-{from:08}-{last:08}-{now}"));
                        saved = last;
                    }
                    _ if next_full => {
                        names.push(format!("Full-00000000-{last:08}-{now}"));
                        saved = last;
                        next_full = false;
                    }
                    _ => {
                        names.push(format!("Incr-{:08}-{last:08}-{now}", saved + 1));
                        saved = last;
                    }
                }
            }
            for name in names {
                self.written.push((name, b));
            }
            self.now += 1;
        }

        fn list(&mut self, rng: &mut fastrand::Rng) {
            let mut listing = Vec::new();
            let mut of: HashMap<String, usize> = HashMap::new();
            for (name, b) in &self.written {
                // Two of one name would be of two histories.
                if of.insert(name.clone(), *b).is_none() {
                    let v1 = rng.u8(..6) == 0 && *b == 0;
                    let path = match v1 {
                        true => format!("v1/Backup-17/{name}"),
                        false => format!("v2/{name}"),
                    };
                    listing.push(Listed { path, bytes: 1 });
                    if rng.u8(..12) == 0 && name.starts_with("Full") {
                        let path = format!("deltafold-pins/{name}");
                        listing.push(Listed { path, bytes: 1 });
                    }
                }
            }
            self.catalog = Catalog::from_listing(listing);
            let names = self.catalog.snapshots.iter().map(|s| s.name.to_string());
            self.branch = names.map(|n| of[&n]).collect();
        }

        fn last(&self, b: usize) -> i64 {
            self.branches[b].fork - 1 + self.branches[b].times.len() as i64
        }

        /// Whose revision it is, on this branch.
        fn owner(&self, mut b: usize, r: i64) -> usize {
            while r < self.branches[b].fork {
                b = self.branches[b].parent.unwrap();
            }
            b
        }

        fn time(&self, b: usize, r: i64) -> i64 {
            let b = self.owner(b, r);
            self.branches[b].times[(r - self.branches[b].fork) as usize]
        }

        /// Up to where a snapshot of branch `of` tells branch `b`'s history.
        fn shared(&self, of: usize, b: usize) -> i64 {
            let mut r = self.last(of).min(self.last(b));
            while r > 0 && self.owner(of, r) != self.owner(b, r) {
                r -= 1;
            }
            if of == b { i64::MAX } else { r }
        }

        /// Whether a branch's revision was written since `start`, or was its state then.
        fn is_of_window(&self, b: usize, r: i64, start: i64) -> bool {
            let followed = |at: i64| match r == self.last(b) {
                false => self.time(b, r + 1) > at,
                // It was, until another took its place.
                true => {
                    let snapshots = self.catalog.snapshots.iter().zip(&self.branch);
                    let mut next = snapshots.filter(|s| *s.1 > b).map(|s| s.0.name.created);
                    next.all(|created| created > at)
                }
            };
            self.time(b, r) >= start || followed(start)
        }

        /// Whether a revision of a branch can be restored of some of the snapshots, by plain search.
        fn restorable(&self, b: usize, r: i64, has: &dyn Fn(usize) -> bool) -> bool {
            let mut reached: HashSet<i64> = HashSet::new();
            let all = &self.catalog.snapshots;
            let told = |i: usize| all[i].name.last.0.min(self.shared(self.branch[i], b));
            for i in (0..all.len()).filter(|&i| has(i)) {
                if all[i].name.is_full() && told(i) == all[i].name.last.0 && told(i) <= r {
                    reached.insert(told(i));
                }
            }
            loop {
                let before = reached.len();
                for i in (0..all.len()).filter(|&i| has(i) && !all[i].name.is_full()) {
                    let start = all[i].name.start.0;
                    if (start - 1..told(i)).any(|at| reached.contains(&at)) {
                        let from = (start - 1..told(i))
                            .find(|at| reached.contains(at))
                            .unwrap();
                        reached.extend(from..=told(i));
                    }
                }
                if reached.len() == before {
                    return reached.contains(&r);
                }
            }
        }
    }

    impl World {
        fn compare(&self, a: usize, b: usize) -> Comparison {
            let from = |i: usize| self.catalog.snapshots[i].name.start.0.max(1);
            let last = |i: usize| self.catalog.snapshots[i].name.last.0;
            let both = from(a).max(from(b))..=last(a).min(last(b));
            let same = |r: &i64| self.owner(self.branch[a], *r) == self.owner(self.branch[b], *r);
            let conflict = both.clone().find(|r| !same(r));
            let agreed = both.filter(|r| conflict.is_none_or(|c| *r < c)).max();
            Comparison {
                conflict: conflict.map(Revision),
                agreed: agreed.map(Revision),
            }
        }
    }

    /// Contents: each snapshot holds every revision up to its last, or all of its own.
    impl Evidence for World {
        fn compared(&self, x: usize) -> Vec<(usize, Comparison)> {
            (0..x)
                .map(|other| (other, self.compare(other, x)))
                .collect()
        }
        fn continuity(&self, before: usize, until: Revision, after: usize) -> Result<Continuity> {
            let (x, y) = (self.branch[before], self.branch[after]);
            Ok(
                match self.owner(x, until.0.max(1)) == self.owner(y, until.0.max(1)) {
                    true => Continuity::Confirmed,
                    false => Continuity::Contradicted,
                },
            )
        }
        fn fingerprint(&self, s: usize, r: Revision) -> Result<String> {
            Ok(format!("b{}", self.owner(self.branch[s], r.0)))
        }
        fn last(&self, s: usize) -> Option<Revision> {
            Some(self.catalog.snapshots[s].name.last)
        }
        fn is_unreadable(&self, _: usize) -> bool {
            false
        }
    }

    fn random_options(rng: &mut fastrand::Rng, pace: i64) -> Options {
        let policy = match rng.bool() {
            true => Policy::Limit(rng.u32(1..4)),
            false => Policy::Exponential(Periods {
                hourly: rng.u32(..4),
                daily: rng.u32(..3),
                weekly: rng.u32(..2),
                monthly: rng.u32(..2),
            }),
        };
        let mut time = |up_to: i64| TimeDelta::seconds(rng.i64(0..up_to));
        let (retention, window) = (time(pace), time(pace * 2));
        Options {
            policy,
            delta_retention: rng.bool().then_some(retention),
            restorable_window: (rng.u8(..3) > 0).then_some(window),
            purge_after: None,
        }
    }

    fn decided(w: &World, timelines: &Timelines, options: &Options) -> Vec<Why> {
        let doubtful: Vec<usize> = w.catalog.usable().collect();
        let facts = Facts {
            catalog: &w.catalog,
            timelines,
            doubtful: &doubtful,
            is_unreadable: &|_| false,
            noted_since: &HashMap::new(),
            aside: &BTreeMap::new(),
            now: at(w.now),
        };
        decide(&facts, options).why
    }

    /// Random buckets, histories and clocks: what must stay restorable stays so, after every single
    /// removal in its order, and no hole is left by one that did not come to its end.
    #[test]
    fn nothing_breaks_that_must_stay_whole() {
        let rounds = crate::rounds(300, 1500);
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        let (mut removed, mut guarded, mut forked) = (0, 0, 0);
        for round in 0..rounds {
            let w = World::random(&mut rng);
            let timelines = Timelines::build(&w.catalog, &w).unwrap();
            let span = w.now - w.branches[0].times[0];
            let options = random_options(&mut rng, span.max(2));
            let why = decided(&w, &timelines, &options);
            let n = w.catalog.snapshots.len();
            let goes: HashSet<usize> = (0..n).filter(|&i| !why[i].keeps()).collect();
            let order = removal_chains(&w.catalog, &goes);
            assert_eq!(order.iter().flatten().count(), goes.len());
            removed += goes.len();
            forked += usize::from(w.branches.len() > 1);

            // What must stay, by the truth alone.
            let newest = w.branches.len() - 1;
            let mut must: Vec<(usize, i64)> = Vec::new();
            for b in 0..w.branches.len() {
                let start = options.restorable_window.map(|d| w.now - d.num_seconds());
                for r in 1..=w.last(b) {
                    let in_window = start.is_some_and(|start| w.is_of_window(b, r, start));
                    let fulls = (0..n).filter(|&i| {
                        let s = &w.catalog.snapshots[i];
                        s.name.is_full() && s.name.last.0 <= w.shared(w.branch[i], b)
                    });
                    let base = fulls.map(|i| w.catalog.snapshots[i].name.last.0).max();
                    let in_newest = b == newest && base.is_some_and(|base| r >= base);
                    if (in_window || in_newest) && w.restorable(b, r, &|_| true) {
                        must.push((b, r));
                    }
                }
            }
            guarded += must.len();
            let tell = |i: usize| format!("{} {:?}", w.catalog.snapshots[i].path, why[i]);
            let show: Vec<String> = (0..n).map(tell).collect();
            for &(b, r) in &must {
                assert!(
                    w.restorable(b, r, &|i| !goes.contains(&i)),
                    "round {round}: revision {r} of branch {b}, now {}: {options:?}\n{show:#?}",
                    w.now
                );
            }
            for i in (0..n).filter(|&i| w.catalog.snapshots[i].pinned) {
                assert!(why[i].keeps(), "round {round}: {show:#?}");
            }
            // Stopped anywhere, what is left of a chain leads as far as it did, up to its last.
            let mut there: HashSet<usize> = (0..n).collect();
            for chain in &order {
                // Of streams that overlap, one may lead where another has a hole: names show that.
                let name = |i: usize| &w.catalog.snapshots[i].name;
                let crosses = chain.windows(2).any(|pair| {
                    !name(pair[0]).is_full() && name(pair[0]).start <= name(pair[1]).last
                });
                if crosses {
                    continue;
                }
                let stop = rng.usize(..=chain.len());
                for &i in &chain[..stop] {
                    there.remove(&i);
                }
                for &i in &chain[stop..] {
                    let (b, r) = (w.branch[i], w.catalog.snapshots[i].name.last.0);
                    let with_rest = |x: usize| there.contains(&x) || chain[stop..].contains(&x);
                    let alone = |x: usize| {
                        // Of its own chain, as it was, and whatever stays.
                        !goes.contains(&x) || chain.contains(&x)
                    };
                    if w.restorable(b, r, &alone) {
                        assert!(w.restorable(b, r, &with_rest), "round {round}: {show:#?}");
                    }
                }
            }
        }
        println!("{removed} removed, {guarded} points guarded, {forked} of {rounds} forked");
        assert!(removed > rounds && guarded > rounds && forked > rounds / 4);
    }

    /// What a collector knows who reads what is in doubt, and the fulls that decisions rest on.
    struct Reader<'a> {
        world: &'a World,
        doubtful: Vec<usize>,
        rubbish: &'a HashSet<usize>,
    }

    impl Reader<'_> {
        fn has_read(&self, i: usize) -> bool {
            self.doubtful.contains(&i) && !self.rubbish.contains(&i)
        }
    }

    impl Evidence for Reader<'_> {
        fn compared(&self, x: usize) -> Vec<(usize, Comparison)> {
            if !self.has_read(x) {
                return Vec::new();
            }
            let before = (0..x).filter(|&other| self.has_read(other));
            before
                .map(|other| (other, self.world.compare(other, x)))
                .collect()
        }
        fn continuity(&self, before: usize, until: Revision, after: usize) -> Result<Continuity> {
            match self.has_read(before) && self.has_read(after) {
                true => self.world.continuity(before, until, after),
                false => Ok(Continuity::Unknown),
            }
        }
        fn fingerprint(&self, s: usize, r: Revision) -> Result<String> {
            self.world.fingerprint(s, r)
        }
        fn last(&self, s: usize) -> Option<Revision> {
            self.has_read(s)
                .then(|| self.world.catalog.snapshots[s].name.last)
        }
        fn is_unreadable(&self, s: usize) -> bool {
            self.doubtful.contains(&s) && self.rubbish.contains(&s)
        }
        fn speaks_of(&self, s: usize) -> bool {
            self.has_read(s)
        }
    }

    /// Decides as `ops::gc` does; after so many rounds it reads no more. `in_doubt` are the paths of those
    /// that are read anyway, and gets what else was in doubt. Gives how many fulls it has read, too.
    fn collected(
        world: &World,
        rubbish: &HashSet<usize>,
        options: &Options,
        rounds: usize,
        in_doubt: &mut HashSet<String>,
    ) -> (Vec<Why>, usize) {
        let all = &world.catalog.snapshots;
        let is_full = |i: &usize| all[*i].name.is_full();
        let mut aside: BTreeMap<usize, Aside> = BTreeMap::new();
        let mut read: HashSet<usize> = HashSet::new();
        for round in 0.. {
            let mut counted = world.catalog.clone();
            for (&i, why) in &aside {
                counted.snapshots[i].excluded |= *why == Aside::Damaged;
            }
            let mut doubtful = crate::backup::timeline::doubtful(&world.catalog);
            doubtful.extend(crate::backup::timeline::doubtful(&counted));
            doubtful.extend(
                world
                    .catalog
                    .usable()
                    .filter(|&i| in_doubt.contains(&all[i].path)),
            );
            doubtful.sort_unstable();
            doubtful.dedup();
            let reader = Reader {
                world,
                doubtful,
                rubbish,
            };
            let unreadable = reader.doubtful.iter().filter(|&&i| reader.is_unreadable(i));
            let before = aside.len();
            aside.extend(unreadable.map(|&i| (i, Aside::Damaged)));
            if aside.len() > before {
                continue;
            }
            let timelines = Timelines::build(&counted, &reader).unwrap();
            let facts = Facts {
                catalog: &counted,
                timelines: &timelines,
                doubtful: &reader.doubtful,
                is_unreadable: &|i| reader.is_unreadable(i),
                noted_since: &HashMap::new(),
                aside: &aside,
                now: at(world.now),
            };
            let decided = decide(&facts, options);
            let knows = |i: &usize| read.contains(i) || reader.has_read(*i);
            let unknown: Vec<usize> = decided
                .rests_on
                .iter()
                .copied()
                .filter(|i| !knows(i))
                .collect();
            assert!(unknown.iter().all(|i| is_full(i) && !aside.contains_key(i)));
            if unknown.is_empty() {
                let counts = |i: usize| aside.get(&i) != Some(&Aside::Damaged);
                let stays = |i: usize| decided.why[i].keeps();
                let lost = shrinks(&counted, &timelines, &counts, &stays);
                assert_eq!(lost, None, "{:?}", decided.why);
                in_doubt.extend(reader.doubtful.iter().map(|&i| all[i].path.clone()));
                return (decided.why, read.len());
            }
            if round >= rounds {
                let fulls = world.catalog.usable().filter(is_full);
                for i in fulls.filter(|i| !knows(i)) {
                    aside.entry(i).or_insert(Aside::NotRead);
                }
                continue;
            }
            for i in unknown {
                match rubbish.contains(&i) {
                    true => drop(aside.insert(i, Aside::Damaged)),
                    false => drop(read.insert(i)),
                }
            }
        }
        unreachable!("it decides at some time")
    }

    /// Rubbish with names of fulls, anywhere, makes no snapshot go that would stay without it, and no reader
    /// who stops early does.
    #[test]
    fn rubbish_makes_nothing_go() {
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        let rounds = 3000;
        let (mut gone, mut harmed, mut early, mut read) = (0, 0, 0, 0);
        for round in 0..rounds {
            let mut w = World::random(&mut rng);
            for s in &mut w.catalog.snapshots {
                s.excluded = rng.u8(..15) == 0;
            }
            let mut spoilt = World {
                branches: w.branches.iter().map(Branch::again).collect(),
                written: Vec::new(),
                catalog: w.catalog.clone(),
                branch: Vec::new(),
                now: w.now,
            };
            let real: HashMap<String, usize> = (w.catalog.snapshots.iter().zip(&w.branch))
                .map(|(s, b)| (s.path.clone(), *b))
                .collect();
            let (first, last) = (w.branches[0].times[0], w.now);
            let highest = (0..w.branches.len()).map(|b| w.last(b)).max().unwrap();
            for _ in 0..rng.usize(1..8) {
                let t = match rng.bool() {
                    true => rng.i64(first - 10..last + 10),
                    false => last + rng.i64(0..10),
                };
                // Mostly of a revision that leaves no doubt: those are read only if a decision rests on them.
                let before = w.catalog.snapshots.iter().map(|s| &s.name);
                let before = before.filter(|n| n.created <= t).map(|n| n.last.0);
                let r = match rng.u8(..6) {
                    0 => rng.i64(1..highest + 5),
                    _ => before.max().unwrap_or(1),
                };
                let name = format!("Full-00000000-{r:08}-{t}");
                if !real.keys().any(|path| path.ends_with(&name)) {
                    let path = match rng.u8(..8) {
                        0 => format!("v1/Backup-17/{name}"),
                        _ => format!("v2/{name}"),
                    };
                    let mut forged =
                        Catalog::from_listing(vec![Listed { path, bytes: 1 }]).snapshots;
                    forged[0].pinned = rng.u8(..12) == 0;
                    spoilt.catalog.snapshots.append(&mut forged);
                }
            }
            spoilt.catalog.snapshots.sort_by(|a, b| {
                let order = |s: &Snapshot| (s.name.created, s.name.is_full(), s.name.last);
                (order(a), a.name.start, &a.path).cmp(&(order(b), b.name.start, &b.path))
            });
            let all = &spoilt.catalog.snapshots;
            spoilt.branch = all
                .iter()
                .map(|s| real.get(&s.path).copied().unwrap_or(0))
                .collect();
            let rubbish: HashSet<usize> = (0..all.len())
                .filter(|&i| !real.contains_key(&all[i].path))
                .collect();
            let span = (w.now - first).max(2);
            let options = random_options(&mut rng, span);
            let patience = match rng.u8(..4) {
                0 => rng.usize(..4),
                _ => usize::MAX,
            };
            let mut read_too = HashSet::new();
            let (with, n) = collected(&spoilt, &rubbish, &options, patience, &mut read_too);
            let none = HashSet::new();
            let all_of = |mut in_doubt| collected(&w, &none, &options, usize::MAX, &mut in_doubt).0;
            // A fork that names do not show is seen by those who read.
            let (without, knowing) = (all_of(HashSet::new()), all_of(read_too));
            read += n;
            early += usize::from(with.contains(&Why::NotRead));
            let names = w.catalog.snapshots.iter().map(|s| &s.path);
            let stays: HashSet<&String> = names
                .zip(without.iter().zip(&knowing))
                .filter(|(_, (a, b))| a.keeps() && b.keeps())
                .map(|(path, _)| path)
                .collect();
            for (s, why) in all.iter().zip(&with) {
                if !real.contains_key(&s.path) {
                    harmed += usize::from(*why == Why::Damaged);
                    continue;
                }
                gone += usize::from(!why.keeps());
                assert!(
                    why.keeps() || !stays.contains(&s.path),
                    "round {round}: {} goes ({why:?}), now {}: {options:?}\n{:#?}\nwithout {:#?}",
                    s.path,
                    w.now,
                    all.iter()
                        .zip(&with)
                        .map(|(s, w)| format!(
                            "{} {w:?}{}",
                            s.path,
                            if s.excluded { " x" } else { "" }
                        ))
                        .collect::<Vec<_>>(),
                    w.catalog
                        .snapshots
                        .iter()
                        .zip(without.iter().zip(&knowing))
                        .map(|(s, w)| format!("{} {w:?}", s.path))
                        .collect::<Vec<_>>(),
                );
            }
        }
        println!("{gone} went, {harmed} damaged, {read} read, {early} times stopped early");
        assert!(gone > rounds / 2 && harmed > rounds / 3 && early > rounds / 200);
    }

    /// Two collectors with clocks and listings of their own: what both together remove breaks nothing.
    #[test]
    fn two_plans_together_break_nothing() {
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        for round in 0..600 {
            let w = World::random(&mut rng);
            let timelines = Timelines::build(&w.catalog, &w).unwrap();
            let span = (w.now - w.branches[0].times[0]).max(2);
            let window = TimeDelta::seconds(rng.i64(0..span));
            let n = w.catalog.snapshots.len();
            let mut goes = HashSet::new();
            for _ in 0..2 {
                // A clock that is behind; the other is right.
                let late = World {
                    branches: Vec::new(),
                    written: Vec::new(),
                    catalog: w.catalog.clone(),
                    branch: Vec::new(),
                    now: w.now - if goes.is_empty() { 0 } else { rng.i64(0..span) },
                };
                let options = Options {
                    restorable_window: Some(window),
                    ..random_options(&mut rng, span)
                };
                let why = decided(&late, &timelines, &options);
                goes.extend((0..n).filter(|&i| !why[i].keeps()));
            }
            for b in 0..w.branches.len() {
                let start = w.now - window.num_seconds();
                for r in 1..=w.last(b) {
                    let inside = w.is_of_window(b, r, start);
                    if inside && w.restorable(b, r, &|_| true) {
                        let left = w.restorable(b, r, &|i| !goes.contains(&i));
                        assert!(left, "round {round}: revision {r} of branch {b}");
                    }
                }
            }
        }
    }

    fn bucket(names: &[String]) -> World {
        let listing = names.iter().map(|n| Listed {
            path: match n.contains('/') {
                true => n.clone(),
                false => format!("v2/{n}"),
            },
            bytes: 1,
        });
        let catalog = Catalog::from_listing(listing.collect());
        World {
            branches: Vec::new(),
            written: Vec::new(),
            branch: vec![0; catalog.snapshots.len()],
            catalog,
            now: NOW,
        }
    }

    /// 2026-11-21T19:20:00Z, a Saturday.
    const NOW: i64 = 1_795_288_800;

    fn told(names: &[String], options: &Options) -> Vec<(String, &'static str)> {
        let w = bucket(names);
        let one = Timelines::build(&w.catalog, &crate::backup::timeline::NamesOnly).unwrap();
        let facts = Facts {
            catalog: &w.catalog,
            timelines: &one,
            doubtful: &[],
            is_unreadable: &|_| false,
            noted_since: &HashMap::new(),
            aside: &BTreeMap::new(),
            now: at(NOW),
        };
        let why = decide(&facts, options).why;
        let names = w.catalog.snapshots.iter().map(|s| s.name.to_string());
        names.zip(why.iter().map(|w| w.as_str())).collect()
    }

    fn exponential() -> Options {
        Options {
            policy: Policy::Exponential(Periods::default()),
            delta_retention: None,
            restorable_window: None,
            purge_after: None,
        }
    }

    /// A full every 20 minutes and a delta every 10, for ten weeks.
    fn ten_weeks() -> Vec<String> {
        let mut names = Vec::new();
        let from = NOW - 10 * 7 * 86_400;
        for (n, t) in (from..=NOW).step_by(600).enumerate() {
            let r = n as i64 * 10 + 10;
            if n % 2 == 0 {
                names.push(format!("Full-00000000-{r:08}-{t}"));
            } else {
                names.push(format!("Incr-{:08}-{r:08}-{t}", r - 9));
            }
        }
        names
    }

    #[test]
    fn of_each_period_the_newest_full_is_kept() {
        let told = told(&ten_weeks(), &exponential());
        let count = |why: &str| told.iter().filter(|t| t.1 == why).count();
        // The newest of the first periods is the newest of all, and stays for its chain.
        assert_eq!(count("NewestChain"), 1);
        assert_eq!(count("Hourly"), 23);
        // The hours' fulls are the newest of today and of yesterday.
        assert_eq!(count("Daily"), 5);
        // Weeks are from Monday on: this one's newest is an hour's, the last one's is a day's.
        assert_eq!(count("Weekly"), 2);
        let kept: Vec<i64> = told
            .iter()
            .filter(|t| ["Weekly", "Daily"].contains(&t.1))
            .map(|t| t.0.rsplit('-').next().unwrap().parse().unwrap())
            .collect();
        let days: Vec<String> = kept
            .iter()
            .map(|t| at(*t).format("%m-%d %H:%M").to_string())
            .collect();
        assert_eq!(
            days,
            [
                "11-01 23:40",
                "11-08 23:40",
                "11-15 23:40",
                "11-16 23:40",
                "11-17 23:40",
                "11-18 23:40",
                "11-19 23:40"
            ][..]
        );
        assert_eq!(
            count("Superseded") + count("BeyondPolicy") + 1 + 23 + 7,
            told.len()
        );
    }

    #[test]
    fn a_limit_keeps_the_deltas_of_its_fulls() {
        let limit = Options {
            policy: Policy::Limit(3),
            ..exponential()
        };
        let names = ten_weeks();
        let kept = |options: &Options| {
            let told = told(&names, options);
            let kept = told
                .iter()
                .filter(|t| !["Superseded", "BeyondPolicy"].contains(&t.1));
            kept.map(|t| (t.0[..4].to_owned(), t.1)).collect::<Vec<_>>()
        };
        let own = |all: &[(&str, &'static str)]| {
            all.iter()
                .map(|a| (a.0.to_owned(), a.1))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            kept(&limit),
            own(&[
                ("Full", "WithinLimit"),
                ("Incr", "WithItsFull"),
                ("Full", "WithinLimit"),
                ("Incr", "WithItsFull"),
                ("Full", "NewestChain"),
            ])
        );
        let at_once = Options {
            delta_retention: Some(TimeDelta::zero()),
            ..limit
        };
        assert_eq!(kept(&at_once).len(), 3);
        let young = Options {
            delta_retention: Some(TimeDelta::minutes(25)),
            ..limit
        };
        assert_eq!(kept(&young).len(), 4);
    }

    #[test]
    fn what_is_removed_waits_for_its_time() {
        let mut names = ten_weeks();
        let gone = names[3].clone();
        names.push(format!("{gone}.exclude"));
        names.push(format!("deltafold-removed/{gone}"));
        let w = bucket(&names);
        let one = Timelines::build(&w.catalog, &crate::backup::timeline::NamesOnly).unwrap();
        let i = w.catalog.snapshots.iter().position(|s| s.excluded).unwrap();
        let of = |noted: Option<i64>, purge_after: Option<i64>| {
            let since = noted.map(|ago| (i, at(NOW - ago)));
            let facts = Facts {
                catalog: &w.catalog,
                timelines: &one,
                doubtful: &[],
                is_unreadable: &|_| false,
                noted_since: &since.into_iter().collect(),
                aside: &BTreeMap::new(),
                now: at(NOW),
            };
            let purge_after = purge_after.map(TimeDelta::seconds);
            let options = Options {
                purge_after,
                ..exponential()
            };
            decide(&facts, &options).why[i]
        };
        assert_eq!(of(Some(99), Some(100)), Why::Removed(at(NOW + 1)));
        assert_eq!(of(Some(100), Some(100)), Why::RemovedLongAgo);
        // A note of the future, or of nobody knows when.
        assert!(of(Some(-5), Some(100)).keeps());
        assert_eq!(of(None, Some(100)), Why::Removed(at(NOW + 100)));
        assert_eq!(of(Some(0), None), Why::RemovedLongAgo);
    }

    #[test]
    fn a_v1_backup_is_kept_or_goes_as_a_whole() {
        let day = 86_400;
        let mut names = Vec::new();
        for ago in [100, 40, 3] {
            let t = NOW - ago * day;
            let r = (200 - ago) * 100;
            names.push(format!("v1/Backup-{t}/Full-00000000-{r:08}-{t}"));
            let (from, to, t) = (r + 1, r + 50, t + 60);
            names.push(format!("v1/Backup-{}/Incr-{from:08}-{to:08}-{t}", t - 60));
        }
        names.push(format!("Full-00000000-00020000-{}", NOW - 60));
        let told: Vec<&str> = told(&names, &exponential()).iter().map(|t| t.1).collect();
        assert_eq!(
            told,
            [
                "BeyondPolicy",
                "Superseded",
                "BeyondPolicy",
                "Superseded",
                "Daily",
                "V1Backup",
                "NewestChain"
            ]
        );
    }

    #[test]
    fn a_plan_that_loses_the_newest_revision_is_seen() {
        let names = [
            format!("Full-00000000-00000010-{}", NOW - 90),
            format!("Incr-00000011-00000020-{}", NOW - 80),
            format!("Full-00000000-00000020-{}", NOW - 70),
            format!("Incr-00000021-00000030-{}", NOW - 60),
        ];
        let w = bucket(&names);
        let one = Timelines::build(&w.catalog, &crate::backup::timeline::NamesOnly).unwrap();
        let all = |_: usize| true;
        let lost = |counts: &dyn Fn(usize) -> bool, goes: &[usize]| {
            let lost = shrinks(&w.catalog, &one, counts, &|i| !goes.contains(&i))?;
            let told = |(r, made): (Revision, DateTime<Utc>)| (r.0, NOW - made.timestamp());
            Some((told(lost.before), lost.after.map(told)))
        };
        assert_eq!(lost(&all, &[]), None);
        assert_eq!(lost(&all, &[0, 1]), None);
        assert_eq!(lost(&all, &[3]), Some(((30, 60), Some((20, 80)))));
        assert_eq!(lost(&all, &[2]), None, "another way leads there");
        assert_eq!(lost(&all, &[0, 2]), Some(((30, 60), None)));
        // A full that is damaged has restored nothing.
        let sound = |i: usize| i != 2;
        assert_eq!(lost(&sound, &[2]), None);
        assert_eq!(lost(&sound, &[1]), Some(((30, 60), Some((10, 90)))));
    }

    #[test]
    fn a_full_of_the_future_supersedes_nothing() {
        let names = [
            format!("Full-00000000-00000010-{}", NOW - 90 * 86_400),
            format!("Incr-00000011-00000020-{}", NOW - 80 * 86_400),
            format!("Full-00000000-00000020-{}", NOW + 3600),
            format!("Incr-00000021-00000030-{}", NOW + 7200),
        ];
        let told: Vec<&str> = told(&names, &exponential()).iter().map(|t| t.1).collect();
        assert_eq!(told, ["NewestChain"; 4]);
    }

    #[test]
    fn a_hole_before_the_end_keeps_all() {
        let names = [
            format!("Full-00000000-00000010-{}", NOW - 90 * 86_400),
            format!("Full-00000000-00000020-{}", NOW - 80 * 86_400),
            format!("Incr-00000025-00000030-{}", NOW - 70 * 86_400),
        ];
        let told: Vec<&str> = told(&names, &exponential()).iter().map(|t| t.1).collect();
        assert_eq!(told, ["RevisionGap", "NewestChain", "NewestChain"]);
    }

    #[test]
    fn months_are_of_the_calendar() {
        let of = |t: &str| month(DateTime::parse_from_rfc3339(t).unwrap().to_utc());
        let (a, b) = (of("2026-12-31T23:59:59Z"), of("2027-01-01T00:00:00Z"));
        assert_eq!(b.0 - a.0, 1);
        assert_eq!(a.1.to_string(), "2026-12-01 00:00:00 UTC");
        let monday = week(
            DateTime::parse_from_rfc3339("2026-11-21T19:20:00Z")
                .unwrap()
                .to_utc(),
        );
        assert_eq!(monday.1.to_string(), "2026-11-16 00:00:00 UTC");
        let begins = horizon(
            Periods {
                monthly: 12,
                ..Periods::default()
            },
            at(NOW),
        );
        assert_eq!(begins.to_string(), "2025-12-01 00:00:00 UTC");
    }

    #[test]
    fn every_reason_has_its_name() {
        let t = at(NOW);
        let all = [
            Why::NewestChain,
            Why::RestorableWindow,
            Why::Pinned,
            Why::InterleavedTimelines,
            Why::Unreadable,
            Why::RevisionGap,
            Why::InTheFuture,
            Why::Hourly(t),
            Why::Daily(t),
            Why::Weekly(t),
            Why::Monthly(t),
            Why::WithinLimit(1),
            Why::WithItsFull,
            Why::DeltaRetention,
            Why::EndOfTimeline,
            Why::V1Backup,
            Why::Removed(t),
            Why::Excluded,
            Why::Damaged,
            Why::NotRead,
            Why::BeyondPolicy,
            Why::Superseded,
            Why::NoBase,
            Why::ExcludedBeyondPolicy,
            Why::RemovedLongAgo,
        ];
        assert_eq!(all.map(Why::as_str), Why::NAMES);
        assert!(all.iter().all(|w| w.text().len() > 10));
    }
}
