//! Tests of timelines: backups whose contents are spelled as letters.

use super::builder::Builder;
use super::*;
use crate::backup::catalog::{ListedObject, TIMELINES};
use std::cell::Cell;
use std::collections::HashMap;

/// A backup whose contents are letters: each snapshot has a letter for each of its revisions.
struct LetterBackup {
    catalog: Catalog,
    content: Vec<HashMap<i64, char>>,
    /// For each snapshot, whether it was not read although it is doubtful.
    unread: Vec<bool>,
    /// For each snapshot, whether reading it fails.
    unreadable: Vec<bool>,
    /// The continuity of two snapshots, by the sum of their indexes.
    continuity: Vec<Continuity>,
    continuity_calls: Cell<usize>,
}

impl LetterBackup {
    /// Each snapshot is given as (name, first revision of the letters, letters).
    fn new(snapshots: &[(&str, i64, &str)]) -> Self {
        let names: Vec<&str> = snapshots.iter().map(|(name, ..)| *name).collect();
        let catalog = Catalog::of_names(&names);
        let content: Vec<HashMap<i64, char>> = catalog
            .snapshots
            .iter()
            .map(|s| {
                let t = snapshots
                    .iter()
                    .find(|t| format!("v2/{}", t.0) == s.path)
                    .unwrap();
                t.2.chars()
                    .enumerate()
                    .map(|(i, c)| (t.1 + i as i64, c))
                    .collect()
            })
            .collect();
        LetterBackup {
            unread: vec![false; content.len()],
            unreadable: vec![false; content.len()],
            continuity: vec![Continuity::Unknown],
            continuity_calls: Cell::new(0),
            catalog,
            content,
        }
    }

    /// Histories that fork off one another, and snapshots of parts of them, some of them unreadable.
    fn random(rng: &mut fastrand::Rng) -> Self {
        let mut histories: Vec<String> = Vec::new();
        for letter in 'a'..=rng.char('a'..='d') {
            let parent = histories.get(rng.usize(..histories.len().max(1)));
            let mut letters = parent.cloned().unwrap_or_default();
            letters.truncate(rng.usize(..40));
            letters.extend(std::iter::repeat_n(letter, 40 - letters.len()));
            histories.push(letters);
        }
        let mut snapshots: Vec<(String, i64, &str)> = Vec::new();
        let mut notes = Vec::new();
        let mut created = 100;
        for _ in 0..rng.usize(..24) {
            created += rng.i64(0..3);
            let history = rng.choice(&histories).expect("there is a history");
            let last = rng.usize(1..=30);
            let first = last - rng.usize(..last.min(12));
            match rng.u8(..4) {
                0 => {
                    // A full of a running cluster may hold more than its name says.
                    let holds = last + rng.usize(..3);
                    let name = format!("Full-00000000-{last:08}-{created}");
                    if rng.u8(..6) == 0 {
                        let path = format!("{TIMELINES}/{name}");
                        notes.push(ListedObject { path, bytes: 1 });
                    }
                    snapshots.push((name, first as i64, &history[first..=holds]));
                }
                _ => snapshots.push((
                    format!("Incr-{first:08}-{last:08}-{created}"),
                    first as i64,
                    &history[first..=last],
                )),
            }
        }
        snapshots.sort();
        snapshots.dedup_by(|a, b| a.0 == b.0);
        let snapshots: Vec<_> = snapshots.iter().map(|t| (t.0.as_str(), t.1, t.2)).collect();
        let mut backup = LetterBackup::new(&snapshots);
        backup.catalog.add_notes(&notes);
        for s in &mut backup.catalog.snapshots {
            s.excluded = rng.u8(..12) == 0;
        }
        backup.unread.fill_with(|| rng.u8(..6) == 0);
        backup.unreadable.fill_with(|| rng.u8(..12) == 0);
        let all = [
            Continuity::Contradicted,
            Continuity::Unknown,
            Continuity::Confirmed,
        ];
        backup.continuity = (0..7).map(|_| all[rng.usize(..3)]).collect();
        backup
    }

    fn newest(&self) -> Result<String> {
        let t = Timelines::build(&self.catalog, self)?;
        Ok(t.newest(&self.catalog)?.id.clone())
    }
}

impl LetterBackup {
    fn compare(&self, a: usize, b: usize) -> Comparison {
        let both = self.content[a]
            .iter()
            .filter_map(|(r, c)| Some((Revision(*r), self.content[b].get(r)? == c)));
        let conflict = both.clone().filter(|x| !x.1).map(|x| x.0).min();
        let agreed = both
            .filter(|x| x.1 && conflict.is_none_or(|c| x.0 < c))
            .map(|x| x.0)
            .max();
        Comparison { conflict, agreed }
    }
}

impl Evidence for LetterBackup {
    fn held(&self, x: usize) -> Option<Held> {
        let revisions = self.content[x].keys().map(|&r| Revision(r));
        let (first, last) = (revisions.clone().min()?, revisions.max()?);
        self.was_read(x).then_some(Held {
            first,
            complete_from: first,
            last,
        })
    }
    fn compare(&self, a: usize, b: usize) -> Result<Comparison> {
        Ok(LetterBackup::compare(self, a, b))
    }
    fn continuity(&self, before: usize, _: Revision, after: usize) -> Result<Continuity> {
        self.continuity_calls.update(|n| n + 1);
        Ok(if self.was_read(before) && self.was_read(after) {
            self.continuity[(before + after) % self.continuity.len()]
        } else {
            Continuity::Unknown
        })
    }
    fn fingerprint(&self, s: usize, r: Revision) -> Result<String> {
        Ok(self.content[s]
            .get(&r.0)
            .map(char::to_string)
            .unwrap_or_default())
    }
    fn last(&self, s: usize) -> Option<Revision> {
        let last = self.content[s].keys().max();
        last.copied().map(Revision).filter(|_| self.was_read(s))
    }
    fn is_unreadable(&self, s: usize) -> bool {
        self.unreadable[s]
    }
    fn was_read(&self, s: usize) -> bool {
        !self.unread[s] && !self.unreadable[s]
    }
}

fn names(backup: &LetterBackup, which: &[usize]) -> Vec<String> {
    which
        .iter()
        .map(|&i| backup.catalog.snapshots[i].name.to_string())
        .collect()
}

#[test]
fn growing_revisions_need_no_contents() {
    let t = LetterBackup::new(&[
        ("Full-00000000-00000010-100", 10, "a"),
        ("Incr-00000011-00000020-110", 11, ""),
        ("Full-00000000-00000020-111", 20, "a"),
        ("Full-00000000-00000020-112", 20, "a"),
        ("Incr-00000021-00000022-120", 21, ""),
    ]);
    assert!(doubtful(&t.catalog).is_empty());
    assert_eq!(t.newest().unwrap(), "main");
}

#[test]
fn only_the_part_that_does_not_grow_is_doubtful() {
    let t = LetterBackup::new(&[
        ("Full-00000000-00000010-100", 10, "a"),
        ("Incr-00000011-00000020-110", 11, ""),
        ("Full-00000000-00000020-111", 20, "a"),
        ("Incr-00000021-00000030-120", 21, ""),
        ("Incr-00000025-00000040-130", 25, ""),
        ("Full-00000000-00000040-140", 40, "a"),
        ("Incr-00000041-00000042-150", 41, ""),
    ]);
    assert_eq!(
        names(&t, &doubtful(&t.catalog)),
        [
            "Full-00000000-00000020-111",
            "Incr-00000021-00000030-120",
            "Incr-00000025-00000040-130",
            "Full-00000000-00000040-140"
        ]
    );
}

/// Records that these fulls begin timelines.
fn with_walls(mut backup: LetterBackup, fulls: &[&str]) -> LetterBackup {
    let records = fulls.iter().map(|full| ListedObject {
        path: format!("{TIMELINES}/{full}"),
        bytes: 1,
    });
    backup.catalog.add_notes(&records.collect::<Vec<_>>());
    backup
}

/// The IDs of the timelines, each with the own and the shared members as far as they belong to it.
fn shown(backup: &LetterBackup, evidence: &dyn Evidence) -> Vec<String> {
    let all = Timelines::build(&backup.catalog, evidence).unwrap().all;
    let member = |m: &TimelineMember| {
        let name = &backup.catalog.snapshots[m.snapshot].name;
        let own = if m.own { "" } else { "shared " };
        format!("{own}{}-{}", name.start, name.last.min(m.until))
    };
    all.iter()
        .map(|t| {
            let members: Vec<String> = t.members.iter().map(member).collect();
            format!("{}: {}", t.id, members.join(", "))
        })
        .collect()
}

/// A cluster that was set back from 16 to 10, and again from 14 to 12 of the first history. Everywhere the same key was
/// changed at 13.
fn set_back_twice() -> LetterBackup {
    let backup = LetterBackup::new(&[
        ("Full-00000000-00000010-100", 1, "aaaaaaaaaa"),
        ("Incr-00000011-00000012-110", 11, "aa"),
        ("Incr-00000013-00000016-120", 13, "=aaa"),
        ("Full-00000000-00000012-200", 1, "aaaaaaaaaabb"),
        ("Incr-00000013-00000014-210", 13, "=b"),
        ("Full-00000000-00000013-300", 1, "aaaaaaaaaaaa="),
        ("Incr-00000014-00000015-310", 14, "cc"),
    ]);
    let walls = ["Full-00000000-00000012-200", "Full-00000000-00000013-300"];
    with_walls(backup, &walls)
}

#[test]
fn nothing_crosses_a_wall_by_names() {
    let t = set_back_twice();
    assert!(doubtful(&t.catalog).is_empty());
    let expected = [
        "main: 0-10, 11-12, 13-16",
        "r12-000000c8: 0-12, 13-14",
        "r13-0000012c: 0-13, 14-15",
    ];
    assert_eq!(shown(&t, &NamesOnly), expected);
    let all = Timelines::build(&t.catalog, &NamesOnly).unwrap();
    let newest = all.newest(&t.catalog).unwrap();
    assert_eq!(
        (newest.id.as_str(), newest.forked_at()),
        ("r13-0000012c", None)
    );
    // A time is a time of the world.
    let at = |second| all.newest_at(&t.catalog, second).unwrap().id.as_str();
    let times = [
        (50, "main"),
        (199, "main"),
        (200, expected[1]),
        (299, expected[1]),
        (300, expected[2]),
    ];
    for (second, id) in times {
        assert!(id.starts_with(at(second)), "{second}");
    }
}

#[test]
fn contents_tell_where_a_history_left_another() {
    let t = set_back_twice();
    let contents = AllRead(&t);
    let expected = [
        "main: 0-10, 11-12, 13-16",
        "r12-000000c8: shared 0-10, 0-12, 13-14",
        "r13-0000012c: shared 0-10, shared 11-12, shared 13-13, 0-13, 14-15",
    ];
    assert_eq!(shown(&t, &contents), expected);
    let all = Timelines::build(&t.catalog, &contents).unwrap();
    let forks: Vec<_> = all.all.iter().map(Timeline::forked_at).collect();
    assert_eq!(forks, [None, Some(Revision(11)), Some(Revision(14))]);
}

#[test]
fn a_wall_without_a_full_hides_nothing() {
    let t = LetterBackup::new(&[
        ("Full-00000000-00000010-100", 10, "a"),
        ("Incr-00000011-00000012-110", 11, "aa"),
        ("Incr-00000013-00000014-120", 13, "aa"),
    ]);
    let t = with_walls(t, &["Full-00000000-00000012-115"]);
    let all = Timelines::build(&t.catalog, &NamesOnly).unwrap();
    let newest = all.newest(&t.catalog).unwrap();
    assert_eq!(newest.last(&t.catalog, &NamesOnly), Some(Revision(12)));
    let without_full: Vec<i64> = all
        .without_full(&t.catalog)
        .iter()
        .map(|w| w.second)
        .collect();
    assert_eq!(without_full, [115]);
    // A record before all snapshots separates nothing.
    let t = with_walls(
        LetterBackup::new(&[("Full-00000000-00000010-100", 10, "a")]),
        &["Full-00000000-00000009-90"],
    );
    assert_eq!(t.newest().unwrap(), "main");
}

/// A delta that begins with a change that the older history has, too, follows its full.
#[test]
fn a_delta_follows_its_full_whatever_agrees_elsewhere() {
    let t = LetterBackup::new(&[
        ("Full-00000000-00000010-100", 1, "aaaaaaaaaa"),
        ("Incr-00000011-00000016-110", 11, "aaa=aa"),
        ("Full-00000000-00000013-120", 1, "aaaaaaaaaabbb"),
        ("Incr-00000014-00000015-130", 14, "=b"),
    ]);
    assert_eq!(doubtful(&t.catalog).len(), 4);
    let expected = ["main: 0-10, 11-16", "r11-b: shared 0-10, 0-13, 14-15"];
    assert_eq!(shown(&t, &t), expected);
    // Without its full, its first change proves nothing.
    let t = LetterBackup::new(&[
        ("Full-00000000-00000010-100", 1, "aaaaaaaaaa"),
        ("Incr-00000011-00000016-110", 11, "aaa=aa"),
        ("Incr-00000014-00000015-130", 14, "=b"),
    ]);
    assert_eq!(shown(&t, &t), ["main: 0-10, 11-16", "r15-b: 14-15"]);
}

#[test]
fn many_walls_leave_nothing_out() {
    let names: Vec<String> = (0..150)
        .map(|n| format!("Full-00000000-00000010-{}", 1000 + n))
        .collect();
    let snapshots: Vec<_> = names.iter().map(|name| (name.as_str(), 10, "a")).collect();
    let walls: Vec<&str> = names.iter().map(String::as_str).collect();
    let t = with_walls(LetterBackup::new(&snapshots), &walls);
    let all = Timelines::build(&t.catalog, &NamesOnly).unwrap();
    assert_eq!((all.all.len(), all.left_out.len()), (150, 0));
    assert_eq!(
        all.newest(&t.catalog)
            .unwrap()
            .wall
            .as_ref()
            .unwrap()
            .second,
        1149
    );
}

/// The evidence if all snapshots were read, also those whose names leave no doubt.
struct AllRead<'b>(&'b LetterBackup);

impl Evidence for AllRead<'_> {
    fn has_content(&self, _: usize) -> bool {
        true
    }
    fn compare(&self, a: usize, b: usize) -> Result<Comparison> {
        Ok(self.0.compare(a, b))
    }
}

#[test]
fn a_restore_to_an_older_revision_makes_the_later_branch_the_newest() {
    let t = LetterBackup::new(&[
        ("Full-00000000-00000010-100", 10, "a"),
        ("Incr-00000011-00000014-110", 11, "aaaa"),
        ("Incr-00000015-00000018-120", 15, "aaaa"),
        ("Incr-00000013-00000015-130", 13, "bbb"),
        ("Incr-00000016-00000017-140", 16, "bb"),
    ]);
    assert_eq!(doubtful(&t.catalog).len(), 5);
    assert_eq!(t.newest().unwrap(), "r13-b");
    let all = Timelines::build(&t.catalog, &t).unwrap();
    let b = all.by_id("r13-b").unwrap();
    assert_eq!(b.last(&t.catalog, &t), Some(Revision(17)));
    assert_eq!(b.forked_at(), Some(Revision(13)));
    // The delta of the old branch belongs to the new one up to the fork.
    assert_eq!(
        b.members
            .iter()
            .map(|m| m.until.0.min(99))
            .collect::<Vec<_>>(),
        [12, 12, 99, 99]
    );
    assert!(all.by_id("main").is_ok());
    assert_eq!(all.by_id("x").unwrap_err().reason(), Reason::NoSuchTimeline);
}

#[test]
fn two_writers_at_once_are_refused() {
    let t = LetterBackup::new(&[
        ("Full-00000000-00000010-100", 10, "a"),
        ("Incr-00000011-00000014-110", 11, "aaaa"),
        ("Incr-00000011-00000014-115", 11, "bbbb"),
        ("Incr-00000015-00000018-120", 15, "aaaa"),
        ("Incr-00000015-00000018-125", 15, "bbbb"),
    ]);
    let e = t.newest().unwrap_err();
    assert_eq!(e.reason(), Reason::InterleavedTimelines);
    assert!(e.to_string().contains("from revision 11 on"), "{e}");
}

#[test]
fn streams_that_agree_are_one_timeline() {
    let t = LetterBackup::new(&[
        ("Full-00000000-00000010-100", 10, "a"),
        ("Incr-00000011-00000014-110", 11, "aaaa"),
        ("Incr-00000011-00000012-111", 11, "aa"),
        ("Incr-00000013-00000018-120", 13, "aaaaaa"),
        ("Incr-00000015-00000018-125", 15, "aaaa"),
    ]);
    assert_eq!(Timelines::build(&t.catalog, &t).unwrap().all.len(), 1);
}

#[test]
fn a_late_compacted_full_of_the_old_branch_does_not_count_as_a_writer() {
    let t = LetterBackup::new(&[
        ("Full-00000000-00000010-100", 10, "a"),
        ("Incr-00000011-00000014-110", 11, "aaaa"),
        ("Incr-00000013-00000015-130", 13, "bbb"),
        ("Full-00000000-00000014-140", 14, "a"),
        ("Incr-00000016-00000016-150", 16, "b"),
    ]);
    assert_eq!(t.newest().unwrap(), "r13-b");
}

#[test]
fn three_restores_in_a_row_have_a_newest() {
    let t = LetterBackup::new(&[
        ("Full-00000000-00000010-100", 10, "a"),
        ("Incr-00000011-00000020-110", 11, "aaaaaaaaaa"),
        ("Incr-00000015-00000018-120", 15, "bbbb"),
        ("Incr-00000012-00000013-130", 12, "cc"),
        ("Incr-00000013-00000019-140", 13, "ddddddd"),
    ]);
    assert_eq!(t.newest().unwrap(), "r13-d");
    let ids: Vec<_> = Timelines::build(&t.catalog, &t)
        .unwrap()
        .all
        .iter()
        .map(|t| t.id.clone())
        .collect();
    assert_eq!(ids, ["main", "r15-b", "r12-c", "r13-d"]);
}

#[test]
fn a_restore_past_the_end_of_the_first_branch_forks_off_the_second() {
    let t = LetterBackup::new(&[
        ("Full-00000000-00000010-100", 10, "a"),
        ("Incr-00000011-00000014-110", 11, "aaaa"),
        ("Incr-00000013-00000020-120", 13, "bbbbbbbb"),
        ("Incr-00000018-00000022-130", 18, "ccccc"),
    ]);
    assert_eq!(t.newest().unwrap(), "r18-c");
    let all = Timelines::build(&t.catalog, &t).unwrap();
    let c = all.by_id("r18-c").unwrap();
    let until: Vec<_> = c.members.iter().map(|m| m.until.0.min(99)).collect();
    assert_eq!(until, [12, 12, 17, 99]);
}

#[test]
fn a_late_full_goes_where_its_newest_change_is_known() {
    // The late full was compacted, so nothing in it contradicts the newer, shorter branch.
    let t = LetterBackup::new(&[
        ("Full-00000000-00000010-100", 10, "a"),
        ("Incr-00000011-00000020-110", 11, "aaaaaaaaaa"),
        ("Incr-00000013-00000014-120", 13, "bb"),
        ("Full-00000000-00000020-130", 20, "a"),
        ("Incr-00000015-00000016-140", 15, "bb"),
    ]);
    let all = Timelines::build(&t.catalog, &t).unwrap();
    let newest = all.newest(&t.catalog).unwrap();
    assert_eq!(newest.id, "r13-b");
    assert_eq!(newest.last(&t.catalog, &t), Some(Revision(16)));
}

#[test]
fn snapshots_below_a_fork_are_on_both_timelines() {
    // The branch that was listed first has a gap, which the delta of the other one fills.
    let t = LetterBackup::new(&[
        ("Full-00000000-00000010-100", 10, "a"),
        ("Incr-00000013-00000014-105", 13, "bb"),
        ("Incr-00000011-00000016-106", 11, "aaaaaa"),
    ]);
    let all = Timelines::build(&t.catalog, &t).unwrap();
    let main = all.by_id(MAIN).unwrap();
    let until: Vec<_> = main.members.iter().map(|m| m.until.0.min(99)).collect();
    assert_eq!(until, [99, 99, 12]);
}

#[test]
fn a_fork_that_was_noticed_late_is_moved_to_its_revision() {
    // The first snapshot of the new branch is compacted, so it shows the fork only at its end.
    let t = LetterBackup::new(&[
        ("Full-00000000-00000010-100", 10, "a"),
        ("Incr-00000011-00000020-110", 11, "aaaaaaaaaa"),
        ("Full-00000000-00000018-120", 18, "b"),
        ("Incr-00000014-00000019-130", 14, "bbbbbb"),
    ]);
    let all = Timelines::build(&t.catalog, &t).unwrap();
    assert_eq!(all.all.len(), 2);
    let b = all.newest(&t.catalog).unwrap();
    assert_eq!(
        (b.id.as_str(), b.forked_at()),
        ("r18-b", Some(Revision(14)))
    );
    let until: Vec<_> = b.members.iter().map(|m| m.until.0.min(99)).collect();
    assert_eq!(until, [13, 13, 99, 99]);
}

#[test]
fn the_facts_about_a_timeline_are_those_of_all_its_members() {
    let mut rng = fastrand::Rng::with_seed(crate::seed());
    let mut forked = 0;
    for round in 0..crate::rounds(300, 3000) {
        let backup = LetterBackup::random(&mut rng);
        let (catalog, names) = (&backup.catalog, &backup.catalog.snapshots);
        let all: Vec<usize> = (0..names.len()).collect();
        let mut builder = Builder::new(catalog, &backup, Timeline::root(0, None), &all);
        for x in catalog.usable().filter(|&x| !backup.is_unreadable(x)) {
            builder.place(x).unwrap();
            for growing in &builder.timelines {
                let (t, members) = (&growing.timeline, &growing.timeline.members);
                assert_eq!(
                    growing.last,
                    t.last(catalog, &backup),
                    "round {round}: {t:?}"
                );
                let whole = members.iter().filter(|m| m.until.0 == i64::MAX);
                let written = whole.map(|m| (names[m.snapshot].name.created, m.snapshot));
                assert_eq!(growing.activity, written.max(), "round {round}: {t:?}");
                for x in 0..names.len() {
                    let found = members.iter().find(|m| m.snapshot == x);
                    assert_eq!(t.member(x), found, "round {round}: {t:?}");
                }
                for r in (-1..40).map(Revision) {
                    let holds = |m: &&TimelineMember| {
                        let n = &names[m.snapshot].name;
                        let ends = m.until.min(last_of(catalog, &backup, m.snapshot));
                        let begins = match n.kind {
                            Kind::Full => n.last <= m.until && n.last <= r,
                            Kind::Incr => n.start <= r,
                        };
                        begins && r <= ends
                    };
                    let holders = members.iter().filter(holds).map(|m| m.snapshot);
                    let mut found: Vec<usize> = growing.followed.holding(r).collect();
                    found.sort_unstable();
                    assert!(found.into_iter().eq(holders), "round {round}, {r}: {t:?}");
                }
            }
        }
        forked += usize::from(builder.timelines.len() > 1);
    }
    assert!(forked > 0);
}

/// With two streams of the same events since a fork, a delta is only checked against the snapshots that it
/// follows.
#[test]
fn continuity_checks_grow_linearly_with_the_snapshots() {
    let letters = "a".repeat(10);
    let mut snapshots = vec![
        ("Full-00000000-00000010-100".to_owned(), 10, "a"),
        ("Full-00000000-00000010-101".to_owned(), 10, "b"),
    ];
    for n in 1..=500 {
        let (one, two) = (n * 10 + 1, n * 10 + 6);
        let name = |first: i64, at: i64| format!("Incr-{first:08}-{:08}-{at}", first + 9);
        snapshots.push((name(one, 100 + n * 10), one, letters.as_str()));
        snapshots.push((name(two, 105 + n * 10), two, letters.as_str()));
    }
    let snapshots: Vec<_> = snapshots.iter().map(|t| (t.0.as_str(), t.1, t.2)).collect();
    let backup = LetterBackup::new(&snapshots);
    assert_eq!(
        Timelines::build(&backup.catalog, &backup)
            .unwrap()
            .all
            .len(),
        2
    );
    let (calls, all) = (backup.continuity_calls.get(), backup.content.len());
    assert!((all..4 * all).contains(&calls), "{calls} for {all}");
}
