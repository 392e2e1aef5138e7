//! Random backups with known histories, and a plain search for what they can restore.

use crate::backup::catalog::{Catalog, ListedObject};
use crate::backup::survey::{Comparison, Continuity, Held};
use crate::backup::timeline::Evidence;
use crate::error::Result;
use crate::mvcc::Revision;
use std::collections::{HashMap, HashSet};

/// A history. Below `fork` it shares the revisions of its parent.
pub(super) struct Branch {
    pub(super) parent: Option<usize>,
    pub(super) fork: i64,
    /// The time of each revision from `fork` on.
    pub(super) times: Vec<i64>,
}

impl Branch {
    pub(super) fn copy(&self) -> Branch {
        Branch {
            parent: self.parent,
            fork: self.fork,
            times: self.times.clone(),
        }
    }
}

/// A random backup whose true histories are known.
pub(super) struct RandomBackup {
    pub(super) branches: Vec<Branch>,
    /// The name of each snapshot, and the branch that it was taken on.
    pub(super) written: Vec<(String, usize)>,
    pub(super) catalog: Catalog,
    /// The branch of each snapshot, by its index in the catalog.
    pub(super) branch: Vec<usize>,
    pub(super) now: i64,
}

impl RandomBackup {
    pub(super) fn random(rng: &mut fastrand::Rng) -> RandomBackup {
        let mut w = RandomBackup {
            branches: Vec::new(),
            written: Vec::new(),
            catalog: Catalog::default(),
            branch: Vec::new(),
            now: 1_790_000_000 + rng.i64(0..1_000_000),
        };
        let pace = [60, 600, 3600, 20_000][rng.usize(..4)];
        for b in 0..rng.usize(1..4) {
            w.write_branch(rng, b, pace);
        }
        w.now += rng.i64(0..pace * 20);
        w.build_catalog(rng);
        w
    }

    fn write_branch(&mut self, rng: &mut fastrand::Rng, b: usize, pace: i64) {
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
                    // Up to the full there is a delta or a gap.
                    if rng.u8(..4) > 0 && saved < last {
                        names.push(format!("Incr-{:08}-{last:08}-{now}", saved + 1));
                    }
                    saved = last;
                }
                2 if !next_full => {
                    // A compacted full of any revision so far.
                    let r = rng.i64(fork..=last);
                    names.push(format!("Full-00000000-{r:08}-{now}"));
                }
                3 if !next_full && saved > fork => {
                    // A delta of another snapshotter, which overlaps.
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

    fn build_catalog(&mut self, rng: &mut fastrand::Rng) {
        let mut listing = Vec::new();
        let mut branch_of: HashMap<String, usize> = HashMap::new();
        for (name, b) in &self.written {
            // A name that two histories use is listed once.
            if branch_of.insert(name.clone(), *b).is_none() {
                let v1 = rng.u8(..6) == 0 && *b == 0;
                let path = if v1 {
                    format!("v1/Backup-17/{name}")
                } else {
                    format!("v2/{name}")
                };
                listing.push(ListedObject { path, bytes: 1 });
                if rng.u8(..12) == 0 && name.starts_with("Full") {
                    let path = format!("deltafold-pins/{name}");
                    listing.push(ListedObject { path, bytes: 1 });
                }
            }
        }
        self.catalog = Catalog::from_listing(listing);
        let names = self.catalog.snapshots.iter().map(|s| s.name.to_string());
        self.branch = names.map(|n| branch_of[&n]).collect();
    }

    pub(super) fn last(&self, b: usize) -> i64 {
        self.branches[b].fork - 1 + self.branches[b].times.len() as i64
    }

    /// The branch on which a revision of branch `b` was written: `b` itself or an ancestor.
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

    /// The last revision up to which a snapshot of branch `of` belongs to the history of branch `b`.
    pub(super) fn shared(&self, of: usize, b: usize) -> i64 {
        let mut r = self.last(of).min(self.last(b));
        while r > 0 && self.owner(of, r) != self.owner(b, r) {
            r -= 1;
        }
        if of == b { i64::MAX } else { r }
    }

    /// Whether a revision of a branch was written since `start`, or was the branch's state at `start`.
    pub(super) fn is_of_window(&self, b: usize, r: i64, start: i64) -> bool {
        let followed = |at: i64| {
            if r == self.last(b) {
                // The last revision of a branch is its state until the next branch begins.
                let snapshots = self.catalog.snapshots.iter().zip(&self.branch);
                let mut next = snapshots.filter(|s| *s.1 > b).map(|s| s.0.name.created);
                next.all(|created| created > at)
            } else {
                self.time(b, r + 1) > at
            }
        };
        self.time(b, r) >= start || followed(start)
    }

    /// Whether a revision of a branch can be restored with the snapshots for which `has` is true, by plain
    /// search.
    pub(super) fn restorable(&self, b: usize, r: i64, has: &dyn Fn(usize) -> bool) -> bool {
        let mut reached: HashSet<i64> = HashSet::new();
        let all = &self.catalog.snapshots;
        let last = |i: usize| all[i].name.last.0.min(self.shared(self.branch[i], b));
        for i in (0..all.len()).filter(|&i| has(i)) {
            if all[i].name.is_full() && last(i) == all[i].name.last.0 && last(i) <= r {
                reached.insert(last(i));
            }
        }
        loop {
            let before = reached.len();
            for i in (0..all.len()).filter(|&i| has(i) && !all[i].name.is_full()) {
                let start = all[i].name.start.0;
                if (start - 1..last(i)).any(|at| reached.contains(&at)) {
                    let from = (start - 1..last(i))
                        .find(|at| reached.contains(at))
                        .unwrap();
                    reached.extend(from..=last(i));
                }
            }
            if reached.len() == before {
                return reached.contains(&r);
            }
        }
    }
}

impl RandomBackup {
    pub(super) fn compare(&self, a: usize, b: usize) -> Comparison {
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

/// The evidence of contents that were all read: a full holds every revision up to its last, a delta those of
/// its name.
impl Evidence for RandomBackup {
    fn held(&self, x: usize) -> Option<Held> {
        let name = &self.catalog.snapshots[x].name;
        let first = name.start.max(Revision(1));
        Some(Held {
            first,
            complete_from: first,
            last: name.last,
        })
    }
    fn compare(&self, a: usize, b: usize) -> Result<Comparison> {
        Ok(RandomBackup::compare(self, a, b))
    }
    fn continuity(&self, before: usize, until: Revision, after: usize) -> Result<Continuity> {
        let (x, y) = (self.branch[before], self.branch[after]);
        Ok(
            if self.owner(x, until.0.max(1)) == self.owner(y, until.0.max(1)) {
                Continuity::Confirmed
            } else {
                Continuity::Contradicted
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
