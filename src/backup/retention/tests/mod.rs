//! Tests of the retention policy: random backups against a plain search, and examples of each rule.

mod random_backup;

use super::periods::{month, oldest_period_start, week};
use super::*;
use crate::backup::catalog::{ListedObject, Snapshot};
use crate::backup::survey::{Comparison, Continuity, Held};
use crate::backup::timeline::Evidence;
use crate::error::Result;
use crate::mvcc::Revision;
use random_backup::{Branch, RandomBackup};
use std::collections::{HashMap, HashSet};

fn random_options(rng: &mut fastrand::Rng, pace: i64) -> Options {
    let policy = if rng.bool() {
        Policy::Limit(rng.u32(1..4))
    } else {
        Policy::Exponential(Periods {
            hourly: rng.u32(..4),
            daily: rng.u32(..3),
            weekly: rng.u32(..2),
            monthly: rng.u32(..2),
        })
    };
    let mut time = |up_to: i64| TimeDelta::seconds(rng.i64(0..up_to));
    let (retention, window) = (time(pace), time(pace * 2));
    Options {
        policy,
        delta_retention: rng.bool().then_some(retention),
        restorable_window: (rng.u8(..3) > 0).then_some(window),
    }
}

fn reasons_for(
    backup: &RandomBackup,
    timelines: &Timelines,
    options: &Options,
) -> Vec<RetentionReason> {
    let doubtful: Vec<usize> = backup.catalog.usable().collect();
    let facts = Facts {
        catalog: &backup.catalog,
        timelines,
        doubtful: &doubtful,
        is_unreadable: &|_| false,
        uncounted: &BTreeMap::new(),
        now: time_at(backup.now),
    };
    decide(&facts, options).reasons
}

/// Decides on random backups. Every revision that must stay restorable stays so, and an interrupted removal
/// leaves no gap in a chain.
#[test]
fn required_revisions_stay_restorable() {
    let rounds = crate::rounds(300, 1500);
    let mut rng = fastrand::Rng::with_seed(crate::seed());
    let (mut removed, mut guarded, mut forked) = (0, 0, 0);
    for round in 0..rounds {
        let backup = RandomBackup::random(&mut rng);
        let timelines = Timelines::build(&backup.catalog, &backup).unwrap();
        let span = backup.now - backup.branches[0].times[0];
        let options = random_options(&mut rng, span.max(2));
        let reasons = reasons_for(&backup, &timelines, &options);
        let n = backup.catalog.snapshots.len();
        let goes: HashSet<usize> = (0..n).filter(|&i| !reasons[i].keeps()).collect();
        let order = removal_chains(&backup.catalog, &goes);
        assert_eq!(order.iter().flatten().count(), goes.len());
        removed += goes.len();
        forked += usize::from(backup.branches.len() > 1);

        // The revisions that must stay restorable, found without the code under test.
        let newest = backup.branches.len() - 1;
        let mut must: Vec<(usize, i64)> = Vec::new();
        for b in 0..backup.branches.len() {
            let start = options
                .restorable_window
                .map(|d| backup.now - d.num_seconds());
            for r in 1..=backup.last(b) {
                let in_window = start.is_some_and(|start| backup.is_of_window(b, r, start));
                let fulls = (0..n).filter(|&i| {
                    let s = &backup.catalog.snapshots[i];
                    s.name.is_full() && s.name.last.0 <= backup.shared(backup.branch[i], b)
                });
                let base = fulls.map(|i| backup.catalog.snapshots[i].name.last.0).max();
                let in_newest = b == newest && base.is_some_and(|base| r >= base);
                if (in_window || in_newest) && backup.restorable(b, r, &|_| true) {
                    must.push((b, r));
                }
            }
        }
        guarded += must.len();
        let describe = |i: usize| format!("{} {:?}", backup.catalog.snapshots[i].path, reasons[i]);
        let shown: Vec<String> = (0..n).map(describe).collect();
        for &(b, r) in &must {
            assert!(
                backup.restorable(b, r, &|i| !goes.contains(&i)),
                "round {round}: revision {r} of branch {b}, now {}: {options:?}\n{shown:#?}",
                backup.now
            );
        }
        for i in (0..n).filter(|&i| backup.catalog.snapshots[i].pinned) {
            assert!(reasons[i].keeps(), "round {round}: {shown:#?}");
        }
        // If a removal stops anywhere, the rest of its chain can still be restored up to its last revision.
        let mut there: HashSet<usize> = (0..n).collect();
        for chain in &order {
            // If streams overlap, one may lead over the gap of another. Such chains are skipped.
            let name = |i: usize| &backup.catalog.snapshots[i].name;
            let crosses = chain
                .windows(2)
                .any(|pair| !name(pair[0]).is_full() && name(pair[0]).start <= name(pair[1]).last);
            if crosses {
                continue;
            }
            let stop = rng.usize(..=chain.len());
            for &i in &chain[..stop] {
                there.remove(&i);
            }
            for &i in &chain[stop..] {
                let (b, r) = (backup.branch[i], backup.catalog.snapshots[i].name.last.0);
                let with_rest = |x: usize| there.contains(&x) || chain[stop..].contains(&x);
                let whole_chain = |x: usize| {
                    // The chain as it was, and everything that stays.
                    !goes.contains(&x) || chain.contains(&x)
                };
                if backup.restorable(b, r, &whole_chain) {
                    assert!(
                        backup.restorable(b, r, &with_rest),
                        "round {round}: {shown:#?}"
                    );
                }
            }
        }
    }
    println!("{removed} removed, {guarded} points guarded, {forked} of {rounds} forked");
    assert!(removed > rounds && guarded > rounds && forked > rounds / 4);
}

/// The evidence of an `ops::gc` that has read the doubtful snapshots. `forged` snapshots turn out to be
/// unreadable.
struct ReadDoubtful<'a> {
    backup: &'a RandomBackup,
    doubtful: Vec<usize>,
    forged: &'a HashSet<usize>,
}

impl ReadDoubtful<'_> {
    fn has_read(&self, i: usize) -> bool {
        self.doubtful.contains(&i) && !self.forged.contains(&i)
    }
}

impl Evidence for ReadDoubtful<'_> {
    fn held(&self, x: usize) -> Option<Held> {
        self.backup.held(x).filter(|_| self.has_read(x))
    }
    fn compare(&self, a: usize, b: usize) -> Result<Comparison> {
        Evidence::compare(self.backup, a, b)
    }
    fn continuity(&self, before: usize, until: Revision, after: usize) -> Result<Continuity> {
        if self.has_read(before) && self.has_read(after) {
            self.backup.continuity(before, until, after)
        } else {
            Ok(Continuity::Unknown)
        }
    }
    fn fingerprint(&self, s: usize, r: Revision) -> Result<String> {
        self.backup.fingerprint(s, r)
    }
    fn last(&self, s: usize) -> Option<Revision> {
        self.has_read(s)
            .then(|| self.backup.catalog.snapshots[s].name.last)
    }
    fn is_unreadable(&self, s: usize) -> bool {
        self.doubtful.contains(&s) && self.forged.contains(&s)
    }
    fn was_read(&self, s: usize) -> bool {
        self.has_read(s)
    }
}

/// Decides as `ops::gc` does: it reads the fulls that a decision rests on and decides again, and stops
/// reading after `rounds` rounds. Snapshots whose path is in `in_doubt` are read in any case; the paths of
/// other doubtful snapshots are added to it. Returns the reasons, and the number of fulls that were read.
fn collect_garbage(
    backup: &RandomBackup,
    forged: &HashSet<usize>,
    options: &Options,
    rounds: usize,
    in_doubt: &mut HashSet<String>,
) -> (Vec<RetentionReason>, usize) {
    let all = &backup.catalog.snapshots;
    let is_full = |i: &usize| all[*i].name.is_full();
    let mut uncounted: BTreeMap<usize, Uncounted> = BTreeMap::new();
    let mut read: HashSet<usize> = HashSet::new();
    for round in 0.. {
        let mut counted = backup.catalog.clone();
        for (&i, reasons) in &uncounted {
            counted.snapshots[i].untrusted |= *reasons == Uncounted::Damaged;
        }
        let mut doubtful = crate::backup::timeline::doubtful(&backup.catalog);
        doubtful.extend(crate::backup::timeline::doubtful(&counted));
        doubtful.extend(
            backup
                .catalog
                .usable()
                .filter(|&i| in_doubt.contains(&all[i].path)),
        );
        doubtful.sort_unstable();
        doubtful.dedup();
        let reader = ReadDoubtful {
            backup,
            doubtful,
            forged,
        };
        let unreadable = reader.doubtful.iter().filter(|&&i| reader.is_unreadable(i));
        let before = uncounted.len();
        uncounted.extend(unreadable.map(|&i| (i, Uncounted::Damaged)));
        if uncounted.len() > before {
            continue;
        }
        let timelines = Timelines::build(&counted, &reader).unwrap();
        let facts = Facts {
            catalog: &counted,
            timelines: &timelines,
            doubtful: &reader.doubtful,
            is_unreadable: &|i| reader.is_unreadable(i),
            uncounted: &uncounted,
            now: time_at(backup.now),
        };
        let decision = decide(&facts, options);
        let knows = |i: &usize| read.contains(i) || reader.has_read(*i);
        let unknown: Vec<usize> = decision
            .rests_on
            .iter()
            .copied()
            .filter(|i| !knows(i))
            .collect();
        assert!(
            unknown
                .iter()
                .all(|i| is_full(i) && !uncounted.contains_key(i))
        );
        if unknown.is_empty() {
            let stays = |i: usize| decision.reasons[i].keeps();
            let lost = newest_lost(&counted, &timelines, &stays);
            assert_eq!(lost, None, "{:?}", decision.reasons);
            in_doubt.extend(reader.doubtful.iter().map(|&i| all[i].path.clone()));
            return (decision.reasons, read.len());
        }
        if round >= rounds {
            let fulls = backup.catalog.usable().filter(is_full);
            for i in fulls.filter(|i| !knows(i)) {
                uncounted.entry(i).or_insert(Uncounted::NotRead);
            }
            continue;
        }
        for i in unknown {
            if forged.contains(&i) {
                uncounted.insert(i, Uncounted::Damaged);
            } else {
                read.insert(i);
            }
        }
    }
    unreachable!("the loop ends with a decision")
}

/// Forged fulls make no snapshot go that would stay without them, even if reading stops early.
#[test]
fn forged_fulls_make_nothing_go() {
    let mut rng = fastrand::Rng::with_seed(crate::seed());
    let rounds = 3000;
    let (mut gone, mut harmed, mut early, mut read) = (0, 0, 0, 0);
    for round in 0..rounds {
        let mut backup = RandomBackup::random(&mut rng);
        for s in &mut backup.catalog.snapshots {
            s.excluded = rng.u8(..15) == 0;
        }
        let mut attacked = RandomBackup {
            branches: backup.branches.iter().map(Branch::copy).collect(),
            written: Vec::new(),
            catalog: backup.catalog.clone(),
            branch: Vec::new(),
            now: backup.now,
        };
        let real: HashMap<String, usize> = (backup.catalog.snapshots.iter().zip(&backup.branch))
            .map(|(s, b)| (s.path.clone(), *b))
            .collect();
        let (first, last) = (backup.branches[0].times[0], backup.now);
        let highest = (0..backup.branches.len())
            .map(|b| backup.last(b))
            .max()
            .unwrap();
        for _ in 0..rng.usize(1..8) {
            let t = if rng.bool() {
                rng.i64(first - 10..last + 10)
            } else {
                last + rng.i64(0..10)
            };
            // Mostly a revision that puts no name in doubt: such a full is read only if a decision rests on
            // it.
            let before = backup.catalog.snapshots.iter().map(|s| &s.name);
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
                    Catalog::from_listing(vec![ListedObject { path, bytes: 1 }]).snapshots;
                forged[0].pinned = rng.u8(..12) == 0;
                attacked.catalog.snapshots.append(&mut forged);
            }
        }
        attacked.catalog.snapshots.sort_by(|a, b| {
            let order = |s: &Snapshot| (s.name.created, s.name.is_full(), s.name.last);
            (order(a), a.name.start, &a.path).cmp(&(order(b), b.name.start, &b.path))
        });
        let all = &attacked.catalog.snapshots;
        attacked.branch = all
            .iter()
            .map(|s| real.get(&s.path).copied().unwrap_or(0))
            .collect();
        let forged: HashSet<usize> = (0..all.len())
            .filter(|&i| !real.contains_key(&all[i].path))
            .collect();
        let span = (backup.now - first).max(2);
        let options = random_options(&mut rng, span);
        let patience = match rng.u8(..4) {
            0 => rng.usize(..4),
            _ => usize::MAX,
        };
        let mut read_too = HashSet::new();
        let (with, n) = collect_garbage(&attacked, &forged, &options, patience, &mut read_too);
        let none = HashSet::new();
        let all_of =
            |mut in_doubt| collect_garbage(&backup, &none, &options, usize::MAX, &mut in_doubt).0;
        // Reading the snapshots may show a fork that names do not show.
        let (without, knowing) = (all_of(HashSet::new()), all_of(read_too));
        read += n;
        early += usize::from(with.contains(&RetentionReason::NotRead));
        let names = backup.catalog.snapshots.iter().map(|s| &s.path);
        let stays: HashSet<&String> = names
            .zip(without.iter().zip(&knowing))
            .filter(|(_, (a, b))| a.keeps() && b.keeps())
            .map(|(path, _)| path)
            .collect();
        for (s, reasons) in all.iter().zip(&with) {
            if !real.contains_key(&s.path) {
                harmed += usize::from(*reasons == RetentionReason::Damaged);
                continue;
            }
            gone += usize::from(!reasons.keeps());
            assert!(
                reasons.keeps() || !stays.contains(&s.path),
                "round {round}: {} goes ({reasons:?}), now {}: {options:?}\n{:#?}\nwithout {:#?}",
                s.path,
                backup.now,
                all.iter()
                    .zip(&with)
                    .map(|(s, backup)| format!(
                        "{} {backup:?}{}",
                        s.path,
                        if s.excluded { " x" } else { "" }
                    ))
                    .collect::<Vec<_>>(),
                backup
                    .catalog
                    .snapshots
                    .iter()
                    .zip(without.iter().zip(&knowing))
                    .map(|(s, backup)| format!("{} {backup:?}", s.path))
                    .collect::<Vec<_>>(),
            );
        }
    }
    println!("{gone} went, {harmed} damaged, {read} read, {early} times stopped early");
    assert!(gone > rounds / 2 && harmed > rounds / 3 && early > rounds / 200);
}

/// Two runs of gc with different clocks and listings: what both remove together breaks nothing.
#[test]
fn two_plans_together_break_nothing() {
    let mut rng = fastrand::Rng::with_seed(crate::seed());
    for round in 0..600 {
        let backup = RandomBackup::random(&mut rng);
        let timelines = Timelines::build(&backup.catalog, &backup).unwrap();
        let span = (backup.now - backup.branches[0].times[0]).max(2);
        let window = TimeDelta::seconds(rng.i64(0..span));
        let n = backup.catalog.snapshots.len();
        let mut goes = HashSet::new();
        for _ in 0..2 {
            // The first run has the right clock, the second one is behind.
            let late = RandomBackup {
                branches: Vec::new(),
                written: Vec::new(),
                catalog: backup.catalog.clone(),
                branch: Vec::new(),
                now: backup.now - if goes.is_empty() { 0 } else { rng.i64(0..span) },
            };
            let options = Options {
                restorable_window: Some(window),
                ..random_options(&mut rng, span)
            };
            let reasons = reasons_for(&late, &timelines, &options);
            goes.extend((0..n).filter(|&i| !reasons[i].keeps()));
        }
        for b in 0..backup.branches.len() {
            let start = backup.now - window.num_seconds();
            for r in 1..=backup.last(b) {
                let inside = backup.is_of_window(b, r, start);
                if inside && backup.restorable(b, r, &|_| true) {
                    let left = backup.restorable(b, r, &|i| !goes.contains(&i));
                    assert!(left, "round {round}: revision {r} of branch {b}");
                }
            }
        }
    }
}

fn backup_of(names: &[String]) -> RandomBackup {
    let listing = names.iter().map(|n| ListedObject {
        path: if n.contains('/') {
            n.clone()
        } else {
            format!("v2/{n}")
        },
        bytes: 1,
    });
    let catalog = Catalog::from_listing(listing.collect());
    RandomBackup {
        branches: Vec::new(),
        written: Vec::new(),
        branch: vec![0; catalog.snapshots.len()],
        catalog,
        now: NOW,
    }
}

/// 2026-11-21T19:20:00Z, a Saturday, in seconds since 1970.
const NOW: i64 = 1_795_288_800;

fn reason_names(names: &[String], options: &Options) -> Vec<(String, &'static str)> {
    let backup = backup_of(names);
    let timelines = Timelines::build(&backup.catalog, &crate::backup::timeline::NamesOnly).unwrap();
    let facts = Facts {
        catalog: &backup.catalog,
        timelines: &timelines,
        doubtful: &[],
        is_unreadable: &|_| false,
        uncounted: &BTreeMap::new(),
        now: time_at(NOW),
    };
    let reasons = decide(&facts, options).reasons;
    let names = backup.catalog.snapshots.iter().map(|s| s.name.to_string());
    names.zip(reasons.iter().map(|r| r.as_str())).collect()
}

fn exponential() -> Options {
    Options {
        policy: Policy::Exponential(Periods::default()),
        delta_retention: None,
        restorable_window: None,
    }
}

/// Snapshots of ten weeks: alternately a full and a delta, every 10 minutes.
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
fn the_newest_full_of_each_period_is_kept() {
    let reasons = reason_names(&ten_weeks(), &exponential());
    let count = |reason: &str| reasons.iter().filter(|t| t.1 == reason).count();
    // The newest full of the current hour is the newest of all, and is kept for its chain.
    assert_eq!(count("NewestChain"), 1);
    assert_eq!(count("Hourly"), 23);
    // The newest fulls of today and of yesterday are kept as those of an hour.
    assert_eq!(count("Daily"), 5);
    // Weeks begin on Monday: the newest full of this week is that of an hour, the one of last week that of a
    // day.
    assert_eq!(count("Weekly"), 2);
    let kept: Vec<i64> = reasons
        .iter()
        .filter(|t| ["Weekly", "Daily"].contains(&t.1))
        .map(|t| t.0.rsplit('-').next().unwrap().parse().unwrap())
        .collect();
    let days: Vec<String> = kept
        .iter()
        .map(|t| time_at(*t).format("%m-%d %H:%M").to_string())
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
        reasons.len()
    );
}

#[test]
fn the_full_that_was_created_last_stays_though_it_ends_below_another() {
    let none = Options {
        policy: Policy::Exponential(Periods {
            hourly: 0,
            daily: 0,
            weekly: 0,
            monthly: 0,
        }),
        ..exponential()
    };
    let names = [
        "Full-00000000-00000040-1790000000",
        "Full-00000000-00000030-1790000100",
    ];
    let names = names.map(str::to_owned).to_vec();
    let reasons = reason_names(&names, &none);
    let reasons: Vec<&str> = reasons.iter().map(|t| t.1).collect();
    assert_eq!(reasons, ["NewestChain", "NewestFull"]);
}

#[test]
fn a_limit_keeps_the_deltas_of_its_fulls() {
    let limit = Options {
        policy: Policy::Limit(3),
        ..exponential()
    };
    let names = ten_weeks();
    let kept = |options: &Options| {
        let reasons = reason_names(&names, options);
        let kept = reasons
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
    let reasons: Vec<&str> = reason_names(&names, &exponential())
        .iter()
        .map(|t| t.1)
        .collect();
    assert_eq!(
        reasons,
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
fn a_plan_that_loses_the_newest_revision_is_detected() {
    let names = [
        format!("Full-00000000-00000010-{}", NOW - 90),
        format!("Incr-00000011-00000020-{}", NOW - 80),
        format!("Full-00000000-00000020-{}", NOW - 70),
        format!("Incr-00000021-00000030-{}", NOW - 60),
    ];
    let backup = backup_of(&names);
    let timelines = Timelines::build(&backup.catalog, &crate::backup::timeline::NamesOnly).unwrap();
    let lost = |goes: &[usize]| {
        let lost = newest_lost(&backup.catalog, &timelines, &|i| !goes.contains(&i))?;
        let reasons = |(r, made): (Revision, DateTime<Utc>)| (r.0, NOW - made.timestamp());
        Some((reasons(lost.before), lost.after.map(reasons)))
    };
    assert_eq!(lost(&[]), None);
    assert_eq!(lost(&[0, 1]), None);
    assert_eq!(lost(&[3]), Some(((30, 60), Some((20, 80)))));
    assert_eq!(lost(&[2]), None, "the delta leads there, too");
    assert_eq!(lost(&[0, 2]), Some(((30, 60), None)));
}

#[test]
fn a_full_of_the_future_supersedes_nothing() {
    let names = [
        format!("Full-00000000-00000010-{}", NOW - 90 * 86_400),
        format!("Incr-00000011-00000020-{}", NOW - 80 * 86_400),
        format!("Full-00000000-00000020-{}", NOW + 3600),
        format!("Incr-00000021-00000030-{}", NOW + 7200),
    ];
    let reasons: Vec<&str> = reason_names(&names, &exponential())
        .iter()
        .map(|t| t.1)
        .collect();
    assert_eq!(reasons, ["NewestChain"; 4]);
}

#[test]
fn a_gap_before_the_end_keeps_all() {
    let names = [
        format!("Full-00000000-00000010-{}", NOW - 90 * 86_400),
        format!("Full-00000000-00000020-{}", NOW - 80 * 86_400),
        format!("Incr-00000025-00000030-{}", NOW - 70 * 86_400),
    ];
    let reasons: Vec<&str> = reason_names(&names, &exponential())
        .iter()
        .map(|t| t.1)
        .collect();
    assert_eq!(reasons, ["RevisionGap", "NewestChain", "NewestChain"]);
}

#[test]
fn months_and_weeks_follow_the_calendar() {
    let month_of = |t: &str| month(DateTime::parse_from_rfc3339(t).unwrap().to_utc());
    let (a, b) = (
        month_of("2026-12-31T23:59:59Z"),
        month_of("2027-01-01T00:00:00Z"),
    );
    assert_eq!(b.number - a.number, 1);
    assert_eq!(a.begins.to_string(), "2026-12-01 00:00:00 UTC");
    let monday = week(
        DateTime::parse_from_rfc3339("2026-11-21T19:20:00Z")
            .unwrap()
            .to_utc(),
    );
    assert_eq!(monday.begins.to_string(), "2026-11-16 00:00:00 UTC");
    let begins = oldest_period_start(
        Periods {
            monthly: 12,
            ..Periods::default()
        },
        time_at(NOW),
    );
    assert_eq!(begins.to_string(), "2025-12-01 00:00:00 UTC");
}

/// A backup that has stopped is not emptied by its age: not after a pause, and not by a full of the future. A new full
/// lifts that.
#[test]
fn nothing_goes_while_the_newest_full_is_older_than_the_window() {
    let day = 86_400;
    let full = |revision: i64, ago: i64| format!("Full-00000000-{revision:08}-{}", NOW - ago);
    let mut names: Vec<String> = (8..20).map(|n| full(100 - n, n * day)).collect();
    names.push(full(900, -day));
    let options = |days: i64| Options {
        policy: Policy::Limit(1),
        delta_retention: None,
        restorable_window: (days > 0).then_some(TimeDelta::days(days)),
    };
    let going = |names: &[String], days: i64| {
        let reasons = reason_names(names, &options(days));
        assert_eq!(reasons.len(), names.len());
        let gone = reasons
            .iter()
            .filter(|(_, reason)| *reason == "BeyondPolicy");
        gone.count()
    };
    assert_eq!(going(&names, 7), 0);
    assert!(going(&names, 30) == 0 && going(&names, 9) > 0 && going(&names, 0) > 0);
    names.push(full(200, day));
    assert_eq!(going(&names, 7), 11);
}

#[test]
fn names_are_those_of_all_reasons() {
    let t = time_at(NOW);
    let all = [
        RetentionReason::NewestChain,
        RetentionReason::RestorableWindow,
        RetentionReason::Pinned,
        RetentionReason::InterleavedTimelines,
        RetentionReason::Unreadable,
        RetentionReason::RevisionGap,
        RetentionReason::InTheFuture,
        RetentionReason::Hourly(t),
        RetentionReason::Daily(t),
        RetentionReason::Weekly(t),
        RetentionReason::Monthly(t),
        RetentionReason::WithinLimit(1),
        RetentionReason::NewestFull,
        RetentionReason::WithItsFull,
        RetentionReason::DeltaRetention,
        RetentionReason::EndOfTimeline,
        RetentionReason::V1Backup,
        RetentionReason::Excluded,
        RetentionReason::Damaged,
        RetentionReason::NotRead,
        RetentionReason::NoRecentFull,
        RetentionReason::BeyondPolicy,
        RetentionReason::Superseded,
        RetentionReason::NoBase,
        RetentionReason::ExcludedBeyondPolicy,
    ];
    assert_eq!(all.map(RetentionReason::as_str), RetentionReason::NAMES);
    assert!(all.iter().all(|r| r.text().len() > 10));
}
