//! Retention: which snapshots a policy keeps, and why; all others may go.
//!
//! A pure function of the catalog, its timelines, the options and now. It reads and deletes nothing;
//! `job::gc` calls it, before it says what it would do and again before each batch that it removes.

use crate::bucket::catalog::{Catalog, V1};
use crate::bucket::chain::Range;
use crate::bucket::name::Kind;
use crate::bucket::timeline::{Timeline, Timelines};
use crate::mvcc::Revision;
use chrono::{DateTime, Datelike, TimeDelta, Utc};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};

/// How many calendar periods (UTC), the current one included, keep their newest full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Periods {
    /// Hours.
    pub hourly: u32,
    /// Days.
    pub daily: u32,
    /// Weeks, from Monday on.
    pub weekly: u32,
    /// Months.
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
    /// The earlier of the clocks that count.
    pub now: DateTime<Utc>,
}

/// Why a snapshot is kept or goes; the most telling reason, where there are several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    pub const NAMES: [&'static str; 23] = [
        "NewestChain",
        "RestorableWindow",
        "Pinned",
        "InterleavedTimelines",
        "Unreadable",
        "RevisionGap",
        "InTheFuture",
        "Hourly",
        "Daily",
        "Weekly",
        "Monthly",
        "WithinLimit",
        "WithItsFull",
        "DeltaRetention",
        "EndOfTimeline",
        "V1Backup",
        "Removed",
        "Excluded",
        "BeyondPolicy",
        "Superseded",
        "NoBase",
        "ExcludedBeyondPolicy",
        "RemovedLongAgo",
    ];

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
        match self {
            Why::NewestChain => "NewestChain",
            Why::RestorableWindow => "RestorableWindow",
            Why::Pinned => "Pinned",
            Why::InterleavedTimelines => "InterleavedTimelines",
            Why::Unreadable => "Unreadable",
            Why::RevisionGap => "RevisionGap",
            Why::InTheFuture => "InTheFuture",
            Why::Hourly(_) => "Hourly",
            Why::Daily(_) => "Daily",
            Why::Weekly(_) => "Weekly",
            Why::Monthly(_) => "Monthly",
            Why::WithinLimit(_) => "WithinLimit",
            Why::WithItsFull => "WithItsFull",
            Why::DeltaRetention => "DeltaRetention",
            Why::EndOfTimeline => "EndOfTimeline",
            Why::V1Backup => "V1Backup",
            Why::Removed(_) => "Removed",
            Why::Excluded => "Excluded",
            Why::BeyondPolicy => "BeyondPolicy",
            Why::Superseded => "Superseded",
            Why::NoBase => "NoBase",
            Why::ExcludedBeyondPolicy => "ExcludedBeyondPolicy",
            Why::RemovedLongAgo => "RemovedLongAgo",
        }
    }

    /// In words.
    pub fn text(self) -> String {
        let of = |what: &str, t: DateTime<Utc>, form: &str| {
            format!("the newest full of {what} {}", t.format(form))
        };
        let plain = match self {
            Why::Hourly(t) => return of("the hour", t, "%Y-%m-%dT%HZ"),
            Why::Daily(t) => return of("the day", t, "%Y-%m-%d"),
            Why::Weekly(t) => return of("the week from", t, "%Y-%m-%d"),
            Why::Monthly(t) => return of("the month", t, "%Y-%m"),
            Why::WithinLimit(n) => return format!("one of the newest {n} fulls"),
            Why::Removed(t) => {
                return format!(
                    "removed, and can be brought back (deltafold undelete) until {}",
                    t.format("%Y-%m-%dT%H:%M:%SZ")
                );
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
            Why::BeyondPolicy => "a full that the policy does not keep",
            Why::Superseded => "a newer full has superseded this delta",
            Why::NoBase => "no full that is kept leads to this delta",
            Why::ExcludedBeyondPolicy => {
                "excluded by somebody, and older than all that the policy keeps"
            }
            Why::RemovedLongAgo => "removed, and the time to bring it back is over",
        };
        plain.to_owned()
    }
}

/// A timeline's snapshots, cut to what they tell of it.
struct Line {
    /// (last, created, snapshot), in this order.
    bases: Vec<(Revision, i64, usize)>,
    deltas: Vec<Delta>,
}

#[derive(Debug, Clone, Copy)]
struct Delta {
    start: Revision,
    last: Revision,
    created: i64,
    snapshot: usize,
}

impl Line {
    fn new(catalog: &Catalog, timeline: &Timeline) -> Self {
        let mut line = Line {
            bases: Vec::new(),
            deltas: Vec::new(),
        };
        for m in &timeline.members {
            let n = &catalog.snapshots[m.snapshot].name;
            match n.kind {
                Kind::Full if n.last <= m.until => {
                    line.bases.push((n.last, n.created, m.snapshot));
                }
                Kind::Full => {}
                Kind::Incr => line.deltas.push(Delta {
                    start: n.start,
                    last: n.last.min(m.until),
                    created: n.created,
                    snapshot: m.snapshot,
                }),
            }
        }
        line.bases.sort_unstable();
        line.deltas
            .sort_unstable_by_key(|d| (d.start, d.last, d.snapshot));
        line
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
            bases.next().map(|b| b.0)
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
        let mut ranges: Vec<Range> = Vec::new();
        let mut ahead = self.deltas.iter().filter(|d| has(d.snapshot)).peekable();
        let mut farthest = Revision(-1);
        for &(base, ..) in self.bases.iter().filter(|b| has(b.2)) {
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

/// What a pin of this full keeps on a timeline: it, and the deltas up to the next full.
fn pinned_on(line: &Line, full: (Revision, i64, usize), keep: &mut dyn FnMut(usize)) {
    keep(full.2);
    let next = line.bases.iter().find(|b| b.0 > full.0);
    let end = next.map_or(Revision(i64::MAX), |b| b.0);
    let deltas = line
        .deltas
        .iter()
        .filter(|d| d.last > full.0 && d.start <= end);
    deltas.for_each(|d| keep(d.snapshot));
}

/// The chain of a full: it, and the deltas behind it up to the next full, on each of its timelines.
pub fn chain_of(catalog: &Catalog, timelines: &Timelines, full: usize) -> Vec<usize> {
    let mut chain = HashSet::from([full]);
    for t in &timelines.all {
        let line = Line::new(catalog, t);
        if let Some(&base) = line.bases.iter().find(|b| b.2 == full) {
            pinned_on(&line, base, &mut |i| {
                chain.insert(i);
            });
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
type Rule = (
    u32,
    fn(DateTime<Utc>) -> Period,
    fn(DateTime<Utc>) -> Why,
);

fn rules(p: Periods) -> [Rule; 4] {
    [
        (p.hourly, hour, Why::Hourly),
        (p.daily, day, Why::Daily),
        (p.weekly, week, Why::Weekly),
        (p.monthly, month, Why::Monthly),
    ]
}

/// The newest full of each period, of those given in order of creation.
fn of_periods(
    catalog: &Catalog,
    fulls: &[usize],
    periods: Periods,
    now: DateTime<Utc>,
    keep: &mut dyn FnMut(usize, Why),
) {
    for (count, period, why) in rules(periods) {
        let current = period(now).0;
        let mut newest: BTreeMap<i64, usize> = BTreeMap::new();
        for &i in fulls {
            let n = period(catalog.snapshots[i].name.created_at()).0;
            if n <= current && current - n < i64::from(count) {
                newest.insert(n, i);
            }
        }
        for i in newest.into_values() {
            keep(i, why(period(catalog.snapshots[i].name.created_at()).1));
        }
    }
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

/// Decides on every snapshot; what is not kept may go. In the catalog's order.
pub fn decide(facts: &Facts, options: &Options) -> Vec<Why> {
    let (catalog, now) = (facts.catalog, facts.now);
    let snapshots = &catalog.snapshots;
    let mut kept = Kept(vec![None; snapshots.len()]);
    let is_future = |i: usize| snapshots[i].name.created > now.timestamp();
    let lines: Vec<Line> = facts
        .timelines
        .all
        .iter()
        .map(|t| Line::new(catalog, t))
        .collect();

    // Chains that must not break, the most important first.
    let newest = facts.timelines.newest(catalog).ok();
    for (line, t) in lines.iter().zip(&facts.timelines.all) {
        // Where none is the newest, each may be.
        if newest.is_none_or(|n| n.id == t.id) {
            keep_newest_chain(line, &is_future, &mut kept);
        }
    }
    if let Some(window) = options.restorable_window {
        let start = now.checked_sub_signed(window).unwrap_or_default();
        for line in &lines {
            keep_window(line, start.timestamp(), &mut kept);
        }
    }
    for line in &lines {
        for &base in line.bases.iter().filter(|b| snapshots[b.2].pinned) {
            pinned_on(line, base, &mut |i| kept.keep(i, Why::Pinned));
        }
    }
    for (i, s) in snapshots.iter().enumerate() {
        if s.pinned {
            kept.keep(i, Why::Pinned);
        }
    }
    let blind = facts.doubtful.iter().any(|&i| (facts.is_unreadable)(i));
    for &i in facts.doubtful {
        match (newest.is_none(), blind) {
            (true, _) => kept.keep(i, Why::InterleavedTimelines),
            (false, true) => kept.keep(i, Why::Unreadable),
            (false, false) => {}
        }
    }
    for i in catalog.usable().filter(|&i| is_future(i)) {
        kept.keep(i, Why::InTheFuture);
    }

    // Fulls by policy.
    let fulls: Vec<usize> = catalog
        .usable()
        .filter(|&i| snapshots[i].name.kind == Kind::Full && !is_future(i))
        .collect();
    let oldest_kept = match options.policy {
        Policy::Exponential(periods) => {
            for line in &lines {
                let mut on: Vec<usize> = line.bases.iter().map(|b| b.2).collect();
                on.retain(|&i| !is_future(i));
                // The catalog is in order of creation.
                on.sort_unstable();
                of_periods(catalog, &on, periods, now, &mut |i, why| kept.keep(i, why));
            }
            horizon(periods, now)
        }
        Policy::Limit(n) => {
            let newest = fulls.iter().rev().take(n as usize);
            let oldest = newest.clone().last();
            newest.for_each(|&i| kept.keep(i, Why::WithinLimit(n)));
            match fulls.len() > n as usize {
                true => oldest.map_or(now, |&i| snapshots[i].name.created_at()),
                false => DateTime::UNIX_EPOCH,
            }
        }
    };
    keep_deltas(&lines, options, now, &mut kept);
    keep_v1_backups(catalog, &mut kept);

    let reach = |line: &Line| line.bases.iter().rev().find(|b| !is_future(b.2)).map(|b| b.0);
    let superseded: Vec<Option<Revision>> = lines.iter().map(reach).collect();
    let mut behind_full = vec![false; snapshots.len()];
    for (line, last) in lines.iter().zip(superseded) {
        for d in line.deltas.iter().filter(|d| Some(d.last) <= last) {
            behind_full[d.snapshot] = true;
        }
    }
    let decided = kept.0.into_iter().enumerate().map(|(i, why)| {
        let s = &snapshots[i];
        match why {
            Some(why) => why,
            None if s.excluded && s.removal_noted => match options.purge_after {
                None => Why::RemovedLongAgo,
                // A note of which nobody knows when it was written is new.
                Some(age) => {
                    let since = facts.noted_since.get(&i).copied().unwrap_or(now);
                    match since.checked_add_signed(age) {
                        Some(until) if until > now => Why::Removed(until),
                        Some(_) => Why::RemovedLongAgo,
                        None => Why::Removed(DateTime::<Utc>::MAX_UTC),
                    }
                }
            },
            None if s.excluded => {
                let start = options
                    .restorable_window
                    .and_then(|w| now.checked_sub_signed(w));
                let oldest = start.map_or(oldest_kept, |s| s.min(oldest_kept));
                match s.name.created_at() < oldest {
                    true => Why::ExcludedBeyondPolicy,
                    false => Why::Excluded,
                }
            }
            // It is on no timeline: unreadable, and nobody knows what else.
            None if (facts.is_unreadable)(i) => Why::Unreadable,
            None if s.name.kind == Kind::Full => Why::BeyondPolicy,
            None if behind_full[i] => Why::Superseded,
            None => Why::NoBase,
        }
    });
    decided.collect()
}

/// Why each snapshot is kept: the first reason that was found.
struct Kept(Vec<Option<Why>>);

impl Kept {
    fn keep(&mut self, i: usize, why: Why) {
        self.0[i].get_or_insert(why);
    }

    fn has(&self, i: usize) -> bool {
        self.0[i].is_some()
    }

    /// All that can be restored at `goal` and above it stays so.
    fn keep_from(&mut self, line: &Line, goal: Revision, why: Why) {
        let floor = line.floor(goal);
        for &(last, _, i) in &line.bases {
            // Those at the floor are told apart only by what they hold: all of them stay.
            if last >= goal || last == floor {
                self.keep(i, why);
            }
        }
        let nearest = line.bases.iter().rev().find(|b| b.0 <= goal).map(|b| b.0);
        for &(_, _, i) in line.bases.iter().filter(|b| Some(b.0) == nearest) {
            self.keep(i, why);
        }
        for d in line.deltas.iter().filter(|d| d.last > floor) {
            self.keep(d.snapshot, why);
        }
    }
}

/// The newest full and all behind it; where deltas after it are missing, an older full that leads around.
fn keep_newest_chain(line: &Line, is_future: &dyn Fn(usize) -> bool, kept: &mut Kept) {
    let why = Why::NewestChain;
    let Some(newest) = line.bases.iter().rev().find(|b| !is_future(b.2)) else {
        // There is no full, or none that is of now.
        return kept.keep_from(line, Revision(-1), why);
    };
    let ends = line.deltas.iter().filter(|d| !is_future(d.snapshot));
    let end = ends.map(|d| d.last).max().unwrap_or_default().max(newest.0);
    kept.keep_from(line, newest.0, why);
    let from = line.leads_from(end);
    let around = line.bases.iter().rev().find(|b| b.0 >= from && b.0 <= end);
    match around {
        Some(base) => kept.keep_from(line, base.0, why),
        // What a full holds past its name may close the gap, and names do not tell which.
        None => kept.keep_from(line, Revision(-1), Why::RevisionGap),
    }
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

/// Deltas that no chain needs, but the options keep; only those to which a full that is kept leads.
fn keep_deltas(lines: &[Line], options: &Options, now: DateTime<Utc>, kept: &mut Kept) {
    let young = |d: &Delta| {
        let age = options.delta_retention.unwrap_or_default();
        let oldest = now.checked_sub_signed(age).unwrap_or_default();
        !age.is_zero() && d.created > oldest.timestamp()
    };
    let with_fulls =
        matches!(options.policy, Policy::Limit(_)) && options.delta_retention.is_none();
    let mut more: Vec<(usize, Why)> = Vec::new();
    for line in lines {
        let newest = line.bases.last().map_or(Revision(-1), |b| b.0);
        let oldest = line.bases.iter().find(|b| kept.has(b.2)).map(|b| b.0);
        let wanted: HashMap<usize, Why> = line
            .deltas
            .iter()
            .filter(|d| !kept.has(d.snapshot))
            .filter_map(|d| {
                let why = match () {
                    () if d.last > newest => Why::EndOfTimeline,
                    () if young(d) => Why::DeltaRetention,
                    () if with_fulls && oldest.is_some_and(|o| d.last > o) => Why::WithItsFull,
                    () => return None,
                };
                Some((d.snapshot, why))
            })
            .collect();
        if wanted.is_empty() {
            continue;
        }
        let ranges = line.ranges(&|i| kept.has(i) || wanted.contains_key(&i));
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
        kept.keep(i, why);
    }
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
pub fn removal_chains(catalog: &Catalog, goes: &[usize]) -> Vec<Vec<usize>> {
    let name = |i: usize| &catalog.snapshots[i].name;
    let folder = |i: usize| catalog.snapshots[i].path.rsplit_once('/').map_or("", |p| p.0);
    let mut order = goes.to_vec();
    order.sort_unstable_by_key(|&i| {
        let n = name(i);
        (folder(i), n.last, n.kind == Kind::Incr, n.created, i)
    });
    let mut chains: Vec<Vec<usize>> = Vec::new();
    let mut last_folder = None;
    for i in order {
        let begins = name(i).kind == Kind::Full || last_folder != Some(folder(i));
        last_folder = Some(folder(i));
        match chains.last_mut() {
            Some(chain) if !begins => chain.push(i),
            _ => chains.push(vec![i]),
        }
    }
    for chain in &mut chains {
        chain.reverse();
    }
    chains
}
