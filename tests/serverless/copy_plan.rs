//! The plan of `copy` over random backups: no delta is copied before its base, nothing twice, and nothing that
//! is wanted is left out.

use crate::support::orphan_deltas::baseless;
use crate::support::{copy_fixture, deltafold, rounds, run_json, scratch, seed};
use deltafold::backup::catalog::mark_of;
use deltafold::backup::{Catalog, Compression, Kind, ListedObject, SnapshotName};
use deltafold::ops::copy::plan::{
    CopyReason, Decision, Encryption, Plan, Selection, plan as make_plan,
};
use fastrand::Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

const NOW: i64 = 1_800_000_000;
const DAY: i64 = 86_400;

/// Sizes by path.
type Listing = BTreeMap<String, u64>;

fn catalog(listing: &Listing) -> Catalog {
    let listing = listing.iter().map(|(path, bytes)| ListedObject {
        path: path.clone(),
        bytes: *bytes,
    });
    Catalog::from_listing(listing.collect())
}

/// The backup that one or two snapshotters, compactors, restores, collectors and a jumping clock leave behind.
struct Bucket<'r> {
    rng: &'r mut Rng,
    listing: Listing,
    revision: i64,
    time: i64,
    compression: Compression,
    /// In the old layout, the time in the name of the current folder.
    v1: Option<i64>,
}

impl Bucket<'_> {
    fn random(rng: &mut Rng) -> Listing {
        let all = Compression::ALL;
        let mut bucket = Bucket {
            compression: all[rng.usize(..all.len())],
            time: NOW - rng.i64(1..40 * DAY),
            revision: rng.i64(1..100),
            v1: None,
            listing: Listing::new(),
            rng,
        };
        if bucket.rng.u8(..4) > 0 {
            bucket.full(false);
        }
        for _ in 0..bucket.rng.usize(..40) {
            bucket.step();
        }
        bucket.listing
    }

    fn step(&mut self) {
        self.time += self.rng.i64(0..DAY / 2);
        match self.rng.u8(..40) {
            0..20 => {
                let start = self.revision + 1;
                self.revision += self.rng.i64(1..20);
                self.put(Kind::Incr, start, self.revision);
            }
            20..26 => {
                self.revision += self.rng.i64(0..3) * self.rng.i64(0..2);
                self.full(false);
            }
            26..29 => self.compact(),
            // A restore: from here on, the same revisions have another history.
            29 | 30 => {
                self.revision = self.rng.i64(1..=self.revision);
                let noted = self.rng.bool();
                self.full(noted);
            }
            31 => self.time -= 3600,
            // A second snapshotter.
            32 | 33 => {
                let back = self.rng.i64(1..30).min(self.revision - 1);
                if back > 0 {
                    let start = self.revision - back + 1;
                    let last = self.revision + self.rng.i64(0..5);
                    self.put(Kind::Incr, start, last);
                }
            }
            34 | 35 => self.exclude(),
            36 | 37 => self.lose(),
            38 => self
                .listing
                .insert(format!("v2/notes-{}", self.time), 1)
                .map_or((), drop),
            _ => self.v1 = self.rng.bool().then_some(self.time),
        }
    }

    fn full(&mut self, begins: bool) {
        if self.v1.is_some() {
            self.v1 = Some(self.time);
        }
        let name = self.put(Kind::Full, 0, self.revision);
        if begins {
            self.listing
                .insert(format!("deltafold-timelines/{name}"), 1);
        }
    }

    fn put(&mut self, kind: Kind, start: i64, last: i64) -> SnapshotName {
        let name = SnapshotName {
            kind,
            start: deltafold::mvcc::Revision(start),
            last: deltafold::mvcc::Revision(last),
            created: self.time,
            compression: self.compression,
            is_final: kind == Kind::Full && self.rng.u8(..8) == 0,
            is_encrypted: self.rng.u8(..10) == 0,
        };
        let path = match self.v1 {
            Some(folder) => format!("v1/Backup-{folder}/{name}"),
            None => format!("v2/{name}"),
        };
        self.listing.insert(path, self.rng.u64(1..1000));
        name
    }

    /// Adds a full at the end or in the middle of a delta, a second later than the newest name.
    fn compact(&mut self) {
        let (now, at) = (self.time, self.revision);
        self.time = now.max(self.newest()) + 1;
        if self.rng.u8(..3) == 0 {
            self.revision = (at - self.rng.i64(0..10)).max(1);
        }
        let v1 = self.v1.take();
        self.full(false);
        (self.v1, self.time, self.revision) = (v1, now.max(self.time), at);
    }

    fn newest(&self) -> i64 {
        let catalog = catalog(&self.listing);
        catalog
            .snapshots
            .iter()
            .map(|s| s.name.created)
            .max()
            .unwrap_or(self.time)
    }

    fn any(&mut self) -> Option<String> {
        let paths: Vec<&String> = self.listing.keys().collect();
        (!paths.is_empty()).then(|| paths[self.rng.usize(..paths.len())].clone())
    }

    fn exclude(&mut self) {
        if let Some(path) = self.any() {
            self.listing.insert(mark_of(&path), 0);
        }
    }

    fn lose(&mut self) {
        if let Some(path) = self.any() {
            self.listing.remove(&path);
        }
    }
}

fn random_encryption(rng: &mut Rng) -> Encryption {
    match rng.u8(..4) {
        0 => Encryption::Encrypt,
        1 => Encryption::Decrypt,
        _ => Encryption::Keep,
    }
}

fn random_wanted(rng: &mut Rng) -> Selection {
    Selection {
        max_backups: (rng.u8(..3) == 0).then(|| rng.u32(1..6)),
        max_backup_age_days: (rng.u8(..3) == 0).then(|| rng.u32(0..45)),
        excluded: rng.u8(..4) == 0,
        encryption: random_encryption(rng),
    }
}

/// Adds the object that this plan entry copies to the target.
fn apply(target: &mut Listing, source: &Catalog, wanted: &Selection, plan: &Plan, i: usize) {
    let p = &plan.objects[i];
    let s = &source.snapshots[p.source];
    let bytes = match wanted.encryption.is_verbatim(&s.name) {
        true => s.bytes,
        false => s.bytes + 1,
    };
    target.insert(p.path.clone(), bytes);
    if s.excluded {
        target.insert(mark_of(&p.path), 0);
    }
    if s.begins_timeline {
        target.insert(format!("deltafold-timelines/{}", p.name), 1);
    }
}

fn show(listing: &Listing) -> String {
    listing.keys().map(|p| format!("{p}\n")).collect()
}

/// Returns a target that is empty, holds another history, or has what an earlier copy and a collector left.
fn random_target(rng: &mut Rng, source: &Listing, wanted: &Selection) -> Listing {
    let mut target = Listing::new();
    match rng.u8(..4) {
        0 => {}
        1 => target = Bucket::random(rng),
        _ => {
            let earlier = match rng.bool() {
                true => wanted.clone(),
                false => random_wanted(rng),
            };
            let source = catalog(source);
            let plan = make_plan(&source, &Catalog::default(), &earlier, NOW);
            let copied = rng.usize(..=plan.objects.len());
            for i in 0..copied {
                if plan.objects[i].decision == Decision::Copy {
                    apply(&mut target, &source, &earlier, &plan, i);
                }
            }
            for path in target.keys().cloned().collect::<Vec<_>>() {
                match rng.u8(..30) {
                    0 => drop(target.remove(&path)),
                    1 => drop(target.insert(path, 7777)),
                    2 => drop(target.insert(mark_of(&path), 0)),
                    _ => {}
                }
            }
        }
    }
    target
}

/// Checks the plan step by step. Returns the number of objects to copy.
fn check(source: &Listing, target: &Listing, wanted: &Selection) -> usize {
    let (s, t) = (catalog(source), catalog(target));
    let plan = make_plan(&s, &t, wanted, NOW);
    let what = || {
        let plan: String = plan
            .objects
            .iter()
            .map(|p| format!("{:?} {:?} {} {:?}\n", p.decision, p.reason, p.path, p.full))
            .collect();
        format!(
            "{wanted:?}\nsource\n{}target\n{}plan\n{plan}",
            show(source),
            show(target)
        )
    };

    // Each snapshot of the source appears once, and nothing is overwritten.
    let told: BTreeSet<usize> = plan.objects.iter().map(|p| p.source).collect();
    assert_eq!(told.len(), s.snapshots.len(), "{}", what());
    assert_eq!(plan.objects.len(), s.snapshots.len(), "{}", what());
    let mut written = BTreeSet::new();
    for p in &plan.objects {
        if p.decision == Decision::Copy {
            assert!(!target.contains_key(&p.path), "{}", what());
            assert!(written.insert(&p.path), "{} twice\n{}", p.path, what());
            let snapshot = &s.snapshots[p.source];
            assert!(wanted.excluded || !snapshot.excluded, "{}", what());
        }
    }

    // No step adds a delta without its base.
    let before: BTreeSet<String> = baseless(&t).into_iter().collect();
    let mut now = target.clone();
    for (i, p) in plan.objects.iter().enumerate() {
        if let Some(full) = p.full {
            assert!(full < i, "{}", what());
            assert_eq!(plan.objects[full].decision, Decision::Copy);
        }
        if p.decision == Decision::Copy {
            apply(&mut now, &s, wanted, &plan, i);
            let new: Vec<String> = baseless(&catalog(&now))
                .into_iter()
                .filter(|path| !before.contains(path))
                .collect();
            assert!(new.is_empty(), "{new:?} after {}\n{}", p.path, what());
        }
    }

    // A second run has nothing to do.
    let again = make_plan(&s, &catalog(&now), wanted, NOW);
    for p in &again.objects {
        assert_ne!(p.decision, Decision::Copy, "{} again\n{}", p.path, what());
    }

    // Everything that is wanted and usable is there.
    let useless: BTreeSet<String> = baseless(&s).into_iter().collect();
    let limited = wanted.max_backups.is_some() || wanted.max_backup_age_days.is_some();
    let conflict = plan
        .objects
        .iter()
        .any(|p| p.decision == Decision::Conflict);
    let mut fulls: Vec<&deltafold::backup::Snapshot> = s
        .snapshots
        .iter()
        .filter(|x| !x.excluded && x.name.kind == Kind::Full)
        .collect();
    fulls.reverse();
    for p in &plan.objects {
        let snapshot = &s.snapshots[p.source];
        let may_be_skipped =
            p.reason == CopyReason::SameAsAnother || t.marks.contains(&p.name.to_string());
        let left_out = p.decision == Decision::Skip && !may_be_skipped;
        if snapshot.excluded {
            continue;
        }
        // An exclusion marker in the target may remove a base.
        let useful = !useless.contains(&snapshot.path) && t.marks.is_empty();
        if !limited && useful && !conflict {
            assert!(!left_out, "{} was left out\n{}", snapshot.path, what());
        }
        if snapshot.name.kind != Kind::Full {
            continue;
        }
        let age = fulls.iter().position(|f| f.path == snapshot.path).unwrap();
        let beyond = wanted.max_backups.is_some_and(|n| age >= n as usize);
        let old = wanted
            .max_backup_age_days
            .is_some_and(|d| snapshot.name.created < NOW - i64::from(d) * DAY);
        match beyond || old {
            true => assert_ne!(p.decision, Decision::Copy, "{}", what()),
            false => assert!(!left_out, "{} was left out\n{}", snapshot.path, what()),
        }
    }
    written.len()
}

#[test]
fn random_buckets() {
    let mut rng = Rng::with_seed(seed());
    let (mut copied, mut runs) = (0, 0);
    let rounds = rounds(300, 3000);
    for _ in 0..rounds {
        let source = Bucket::random(&mut rng);
        let wanted = random_wanted(&mut rng);
        let target = random_target(&mut rng, &source, &wanted);
        let n = check(&source, &target, &wanted);
        copied += n;
        runs += usize::from(n > 0);
    }
    assert!(
        runs * 3 > rounds && copied * 3 > rounds * 10,
        "{copied} in {runs} runs: hardly anything was copied"
    );
}

fn listing(paths: &[&str]) -> Listing {
    paths.iter().map(|p| ((*p).to_owned(), 10)).collect()
}

/// Returns the decisions by name, in the order of copying.
fn decided(
    source: &[&str],
    target: &[&str],
    wanted: &Selection,
) -> Vec<(String, Decision, CopyReason)> {
    let source = catalog(&listing(source));
    let plan = make_plan(&source, &catalog(&listing(target)), wanted, NOW);
    plan.objects
        .iter()
        .map(|p| {
            (
                source.snapshots[p.source].path.clone(),
                p.decision,
                p.reason,
            )
        })
        .collect()
}

fn copied(decided: &[(String, Decision, CopyReason)]) -> Vec<&str> {
    let copied = decided.iter().filter(|d| d.1 == Decision::Copy);
    copied.map(|d| d.0.as_str()).collect()
}

#[test]
fn the_newest_backups_are_fulls_with_the_deltas_after_them() {
    const SOURCE: [&str; 6] = [
        "v2/Full-00000000-00000100-1000",
        "v2/Incr-00000101-00000110-1001",
        "v2/Full-00000000-00000110-1002",
        "v2/Incr-00000111-00000120-1003",
        "v2/Incr-00000121-00000130-1004",
        "v2/Full-00000000-00000130-1005",
    ];
    let wanted = |max_backups| Selection {
        max_backups: Some(max_backups),
        ..Selection::default()
    };
    assert_eq!(copied(&decided(&SOURCE, &[], &wanted(1))), SOURCE[5..]);
    assert_eq!(copied(&decided(&SOURCE, &[], &wanted(2))), SOURCE[2..]);
    assert_eq!(copied(&decided(&SOURCE, &[], &wanted(9))), SOURCE);
    let d = decided(&SOURCE, &SOURCE[2..4], &wanted(2));
    assert_eq!(copied(&d), SOURCE[4..]);
    assert_eq!(d[0].2, CopyReason::BeyondMaxBackups);
    assert_eq!((d[2].1, d[2].2), (Decision::Keep, CopyReason::AlreadyThere));
}

/// The full ends in the middle of a delta that was created before it, so the deltas after it need that delta.
#[test]
fn a_chain_over_the_border_keeps_its_base() {
    const SOURCE: [&str; 5] = [
        "v2/Full-00000000-00000100-1000",
        "v2/Incr-00000101-00000110-1001",
        "v2/Incr-00000111-00000120-1002",
        "v2/Full-00000000-00000115-1003",
        "v2/Incr-00000121-00000130-1004",
    ];
    let wanted = Selection {
        max_backups: Some(1),
        ..Selection::default()
    };
    let d = decided(&SOURCE, &[], &wanted);
    assert_eq!(copied(&d), [SOURCE[3], SOURCE[2], SOURCE[4]]);
}

#[test]
fn age_is_that_of_the_full() {
    let days = |d: i64, name: &str| format!("v2/{name}-{}", NOW - d * DAY);
    let source = [
        days(8, "Full-00000000-00000100"),
        days(6, "Incr-00000101-00000110"),
        days(5, "Full-00000000-00000110"),
        days(4, "Incr-00000111-00000120"),
    ];
    let source: Vec<&str> = source.iter().map(String::as_str).collect();
    let wanted = |max_backup_age_days| Selection {
        max_backup_age_days: Some(max_backup_age_days),
        ..Selection::default()
    };
    assert_eq!(copied(&decided(&source, &[], &wanted(7))), source[2..]);
    assert_eq!(copied(&decided(&source, &[], &wanted(5))), source[2..]);
    assert_eq!(copied(&decided(&source, &[], &wanted(4))), [""; 0]);
    assert_eq!(copied(&decided(&source, &[], &wanted(8))), source);
}

/// In the old layout a folder is one backup, whatever the times in its names.
#[test]
fn the_old_layout_is_counted_by_folder() {
    const SOURCE: [&str; 4] = [
        "v1/Backup-1000/Full-00000000-00000100-1000",
        "v1/Backup-2000/Full-00000000-00000110-2000",
        "v1/Backup-1000/Incr-00000101-00000110-2001",
        "v1/Backup-2000/Incr-00000111-00000120-2002",
    ];
    let wanted = Selection {
        max_backups: Some(1),
        ..Selection::default()
    };
    assert_eq!(
        copied(&decided(&SOURCE, &[], &wanted)),
        [SOURCE[1], SOURCE[3]]
    );
}

#[test]
fn an_orphan_is_left_out_and_a_base_in_the_target_counts() {
    const SOURCE: [&str; 3] = [
        "v2/Incr-00000111-00000120-1002",
        "v2/Full-00000000-00000200-2000",
        "v2/Incr-00000201-00000210-2001",
    ];
    let d = decided(&SOURCE, &[], &Selection::default());
    assert_eq!(copied(&d), SOURCE[1..]);
    assert_eq!((d[0].1, d[0].2), (Decision::Skip, CopyReason::NoBase));
    let there = ["v2/Full-00000000-00000110-1001"];
    assert_eq!(
        copied(&decided(&SOURCE, &there, &Selection::default())),
        SOURCE
    );
    // An excluded full is no base.
    let excluded = [there[0], "deltafold-excluded/Full-00000000-00000110-1001"];
    let d = decided(&SOURCE, &excluded, &Selection::default());
    assert_eq!(copied(&d), SOURCE[1..]);
}

/// A full of another history that happens to end right before a delta is not its base.
#[test]
fn forks_follow_their_own_full() {
    const SOURCE: [&str; 6] = [
        "v2/Full-00000000-00000100-1000",
        "v2/Incr-00000101-00000110-1001",
        "v2/Incr-00000111-00000120-1002",
        "v2/Full-00000000-00000105-1003",
        "v2/Incr-00000106-00000111-1004",
        "v2/Incr-00000112-00000119-1005",
    ];
    let source = catalog(&listing(&SOURCE));
    let plan = make_plan(&source, &Catalog::default(), &Selection::default(), NOW);
    let path = |i: usize| plan.objects[i].path.as_str();
    let fulls: Vec<_> = plan
        .objects
        .iter()
        .map(|p| (p.path.as_str(), p.full.map(path)))
        .collect();
    assert!(fulls.contains(&(SOURCE[2], Some(SOURCE[0]))), "{fulls:?}");
    for delta in &SOURCE[4..] {
        assert!(fulls.contains(&(*delta, Some(SOURCE[3]))), "{fulls:?}");
    }
}

#[test]
fn another_size_is_a_conflict_and_carries_nothing() {
    const SOURCE: [&str; 2] = [
        "v2/Full-00000000-00000100-1000",
        "v2/Incr-00000101-00000110-1001",
    ];
    let target = Listing::from([(SOURCE[0].to_owned(), 11)]);
    let source = catalog(&listing(&SOURCE));
    let plan = make_plan(&source, &catalog(&target), &Selection::default(), NOW);
    let decided: Vec<_> = plan
        .objects
        .iter()
        .map(|p| (p.decision, p.reason))
        .collect();
    assert_eq!(
        decided,
        [
            (Decision::Conflict, CopyReason::OtherSize),
            (Decision::Skip, CopyReason::NoBase)
        ]
    );
    // The size of an encrypted copy tells nothing.
    let wanted = Selection {
        encryption: Encryption::Encrypt,
        ..Selection::default()
    };
    let there = Listing::from([(format!("{}.age", SOURCE[0]), 11)]);
    let plan = make_plan(&source, &catalog(&there), &wanted, NOW);
    assert_eq!(plan.objects[0].decision, Decision::Keep);
    assert_eq!(plan.objects[1].decision, Decision::Copy);
}

/// A full exists twice, and the excluded one comes first: the other one is copied and carries its deltas.
#[test]
fn of_two_that_become_one_the_usable_one_is_copied() {
    const SOURCE: [&str; 3] = [
        "v2/Full-00000000-00000100-1000.gz",
        "v2/Full-00000000-00000100-1000.gz.age",
        "v2/Incr-00000101-00000110-1001.gz",
    ];
    let wanted = |encryption: Encryption| Selection {
        encryption,
        ..Selection::default()
    };
    for excluded in &SOURCE[..2] {
        let mut there = listing(&SOURCE);
        there.insert(mark_of(excluded), 0);
        for encryption in [Encryption::Keep, Encryption::Encrypt, Encryption::Decrypt] {
            let plan = make_plan(
                &catalog(&there),
                &Catalog::default(),
                &wanted(encryption),
                NOW,
            );
            for p in &plan.objects {
                let is_excluded = SOURCE[p.source] == *excluded;
                let why = if is_excluded {
                    CopyReason::Excluded
                } else {
                    CopyReason::Wanted
                };
                assert_eq!(p.reason, why, "{excluded} {encryption:?}: {plan:?}");
            }
        }
    }
    // A snapshot that has the wanted form already keeps its bytes. Decrypting the other would conflict with it forever.
    let plan = make_plan(
        &catalog(&listing(&SOURCE)),
        &Catalog::default(),
        &wanted(Encryption::Decrypt),
        NOW,
    );
    let decided: Vec<_> = plan.objects.iter().map(|p| (p.source, p.reason)).collect();
    let same = CopyReason::SameAsAnother;
    assert_eq!(
        decided,
        [(0, CopyReason::Wanted), (1, same), (2, CopyReason::Wanted)]
    );
}

/// etcd-backup-restore drops `.final` when it copies.
#[test]
fn what_was_copied_without_its_final_mark_is_there() {
    let from = copy_fixture("kubernetes");
    let full = from.path().join("v2/Full-00000000-00000275-1795228239.gz");
    for entry in fs::read_dir(from.path().join("v2")).unwrap() {
        let path = entry.unwrap().path();
        if path != full {
            fs::remove_file(path).unwrap();
        }
    }
    let to = scratch::folder().unwrap();
    fs::create_dir(to.path().join("v2")).unwrap();
    fs::copy(&full, to.path().join("v2").join(full.file_name().unwrap())).unwrap();
    fs::rename(&full, full.with_extension("gz.final")).unwrap();
    let mut copy = deltafold();
    copy.args(["copy", "--output", "json", "--from"])
        .arg(from.path());
    let (code, json, log) = run_json(copy.arg("--to").arg(to.path()));
    assert_eq!(
        (code, &json["status"]),
        (0, &"NothingToDo".into()),
        "{json:#}\n{log}"
    );
}

/// A mark may be there before, or after, its snapshot.
#[test]
fn what_would_be_excluded_where_it_arrives_is_not_copied() {
    const SOURCE: [&str; 3] = [
        "v2/Full-00000000-00000100-1000",
        "v2/Incr-00000101-00000110-1001",
        "v2/Full-00000000-00000110-1002",
    ];
    let target = ["deltafold-excluded/Full-00000000-00000100-1000"];
    let d = decided(&SOURCE, &target, &Selection::default());
    assert_eq!(copied(&d), [SOURCE[2]]);
    assert_eq!(d[0].2, CopyReason::Excluded);
    assert_eq!(d[1].2, CopyReason::NoBase);
}
