//! Tests of surveys against a scan of every revision.

use super::*;
use crate::base::temp::TempFile;

/// A random history. All histories are the same below some revision; a few keys change or are deleted in each
/// revision.
struct History(Vec<Fingerprint>);

impl History {
    fn new(rng: &mut fastrand::Rng) -> Self {
        let (fork, own) = (rng.i64(1..80), rng.u64(..));
        let mut rng = fastrand::Rng::with_seed(0x5eed_5eed_5eed_5eed);
        let mut states: HashMap<u64, Fingerprint> = HashMap::new();
        let mut entries = Vec::new();
        for r in 1..80 {
            if r == fork {
                rng = fastrand::Rng::with_seed(own);
            }
            for sub in 0..rng.u32(1..3) {
                let key = rng.u64(..6);
                let before = states.get(&key).filter(|s| !s.tombstone);
                let e = Fingerprint {
                    main: Revision(r),
                    sub,
                    tombstone: before.is_some() && rng.u8(..4) == 0,
                    key,
                    create: before.map_or(r, |b| b.create),
                    version: before.map_or(1, |b| b.version + 1),
                    digest: rng.u64(..3),
                };
                states.insert(key, e);
                entries.push(e);
            }
        }
        History(entries)
    }

    /// The content of a full of revision `last` that was compacted at `compact`.
    fn full(&self, compact: i64, last: i64) -> Vec<Fingerprint> {
        let below = |e: &&Fingerprint| e.main.0 <= compact;
        let newest: HashMap<u64, &Fingerprint> =
            self.0.iter().filter(below).map(|e| (e.key, e)).collect();
        let is_held = |e: &&Fingerprint| {
            let is_newest = newest.get(&e.key).is_none_or(|n| n == e);
            e.main.0 <= last && (e.main.0 > compact || is_newest && !e.tombstone)
        };
        self.0.iter().filter(is_held).copied().collect()
    }

    fn delta(&self, first: i64, last: i64) -> Vec<Fingerprint> {
        let held = self.0.iter().filter(|e| (first..=last).contains(&e.main.0));
        held.copied().collect()
    }
}

fn random(rng: &mut fastrand::Rng, surveys: &mut FingerprintFiles) -> (Survey, Vec<Fingerprint>) {
    let history = History::new(rng);
    let last = rng.i64(1..80);
    let first = last - rng.i64(0..last.min(30));
    let base = (rng.u8(..3) == 0).then_some(Base {
        revision: Revision(last),
        compact_revision: Revision(first),
        compaction_finished: true,
        metadata_revision: Revision(last),
    });
    let entries = match base {
        Some(_) => history.full(first, last),
        None => history.delta(first, last),
    };
    let nth = rng.usize(..2);
    let mut surveyor = surveys.surveyors().nth(nth).unwrap();
    let stored = surveyor.write(|put| entries.iter().try_for_each(|&e| put(e)));
    let survey = Survey {
        complete_from: Revision(first + i64::from(base.is_some())),
        last: Revision(last),
        base,
        last_time: None,
        kube_system: None,
        stored: stored.unwrap(),
    };
    (survey, entries)
}

/// Compares two snapshots by a scan of every revision.
fn compare_by_scan(a: &(Survey, Vec<Fingerprint>), b: &(Survey, Vec<Fingerprint>)) -> Comparison {
    let mut found = Comparison::default();
    let change_at = |s: &(Survey, Vec<Fingerprint>), r: i64, sub: u32| {
        let e = s.1.iter().find(|e| (e.main.0, e.sub) == (r, sub));
        e.map(|e| (e.digest, e.tombstone))
    };
    let is_complete_at = |s: &Survey, r: i64| (s.complete_from.0..=s.last.0).contains(&r);
    for (r, sub) in (0..90).flat_map(|r| [(r, 0), (r, 1)]) {
        let differ = match (change_at(a, r, sub), change_at(b, r, sub)) {
            (Some(x), Some(y)) => x != y,
            (Some(_), None) => is_complete_at(&b.0, r),
            (None, Some(_)) => is_complete_at(&a.0, r),
            (None, None) => continue,
        };
        if differ {
            found.conflict = Some(Revision(r));
            let is_here = |agreed: Revision| agreed.0 == r;
            if found.agreed.is_some_and(is_here) {
                found.agreed = Some(Revision(r - 1));
            }
            return found;
        }
        if change_at(a, r, sub).is_some() && change_at(b, r, sub).is_some() {
            found.agreed = Some(Revision(r));
        }
    }
    found
}

/// Finds the continuity by the state of every key.
fn continuity_by_scan(
    a: &(Survey, Vec<Fingerprint>),
    until: i64,
    b: &(Survey, Vec<Fingerprint>),
) -> Continuity {
    let holds_all_keys = a.0.base.is_some_and(|b| b.compact_revision.0 <= until);
    let mut verdict = Continuity::Unknown;
    for key in 0..6 {
        let first = b.1.iter().find(|e| e.key == key && e.main.0 > until);
        let mut states = a.1.iter().filter(|e| e.key == key && e.main.0 <= until);
        let follows = match (first, states.next_back()) {
            (None, _) => continue,
            (Some(_), None) if !holds_all_keys => continue,
            (Some(f), s) if s.is_none_or(|s| s.tombstone) => !f.tombstone && f.version == 1,
            (Some(f), s) => {
                let is_next = |s: &Fingerprint| f.create == s.create && f.version == s.version + 1;
                f.tombstone || s.is_some_and(is_next)
            }
        };
        if follows {
            verdict = Continuity::Confirmed
        } else {
            return Continuity::Contradicted;
        }
    }
    verdict
}

#[test]
fn comparisons_are_those_of_a_scan_of_every_revision() {
    let mut rng = fastrand::Rng::with_seed(crate::seed());
    let (mut conflicts, mut verdicts) = (0, [0; 3]);
    for round in 0..crate::rounds(100, 1000) {
        let file = || TempFile::plain(tempfile::tempfile().unwrap()).unwrap();
        let mut file = FingerprintFiles::new(vec![file(), file()]);
        let all: Vec<_> = (0..8).map(|_| random(&mut rng, &mut file)).collect();
        let surveys: Vec<&Survey> = all.iter().map(|s| &s.0).collect();
        for b in 0..all.len() {
            for a in 0..b {
                let expected = compare_by_scan(&all[a], &all[b]);
                let pair = format!("round {round}: {:?} and {:?}", all[a], all[b]);
                let found = file.compare(surveys[a], surveys[b]).unwrap();
                assert_eq!(found, expected, "{pair}");
                assert_eq!(file.compare(surveys[b], surveys[a]).unwrap(), expected);
                conflicts += usize::from(expected.conflict.is_some());
                for until in [surveys[a].last.0, surveys[b].complete_from.0 - 1] {
                    let continuity = file.continuity(surveys[a], Revision(until), surveys[b]);
                    let expected = continuity_by_scan(&all[a], until, &all[b]);
                    assert_eq!(continuity.unwrap(), expected, "{until}, {pair}");
                    verdicts[expected as usize] += 1;
                }
            }
        }
    }
    println!("{conflicts} conflicts, verdicts {verdicts:?}");
    assert!(conflicts > 100 && verdicts.iter().all(|&n| n > 100));
}
