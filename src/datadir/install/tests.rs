//! Installs that are killed after each step, on many layouts of the target.

use super::*;
use std::collections::{BTreeMap, BTreeSet};

const ASIDE: &str = "bad-x";
const SEGMENT_0: &str = "0000000000000000-0000000000000000.wal";

/// The files and folders below a folder; the content of a folder is `None`.
type Tree = BTreeMap<PathBuf, Option<Vec<u8>>>;

fn tree(root: &Path) -> Tree {
    let mut all = Tree::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let content = (!path.is_dir()).then(|| fs::read(&path).unwrap());
            let below = path.strip_prefix(root).unwrap().to_owned();
            if content.is_none() {
                folders.push(path);
            }
            all.insert(below, content);
        }
    }
    all
}

fn lay_out(root: &Path, tree: &Tree) {
    for entry in fs::read_dir(root).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => fs::remove_dir_all(path).unwrap(),
            false => fs::remove_file(path).unwrap(),
        }
    }
    for (path, content) in tree {
        match content {
            None => fs::create_dir_all(root.join(path)).unwrap(),
            Some(content) => {
                fs::create_dir_all(root.join(path).parent().unwrap()).unwrap();
                fs::write(root.join(path), content).unwrap();
            }
        }
    }
}

fn files(tree: &Tree) -> Tree {
    let files = tree.iter().filter(|(_, content)| content.is_some());
    files.map(|(p, c)| (p.clone(), c.clone())).collect()
}

fn folders(tree: &Tree) -> BTreeSet<PathBuf> {
    let folders = tree.iter().filter(|(_, content)| content.is_none());
    folders.map(|(p, _)| p.clone()).collect()
}

/// A layout before a restore. Names that end in `/` are folders.
struct Case {
    name: &'static str,
    wal_dir: bool,
    existing: &'static [&'static str],
}

const CASES: [Case; 9] = [
    Case {
        name: "nothing",
        wal_dir: false,
        existing: &[],
    },
    Case {
        name: "an empty mount point",
        wal_dir: false,
        existing: &["data/lost+found/", "data/.snapshot"],
    },
    Case {
        name: "empty folders of a member",
        wal_dir: false,
        existing: &["data/member/snap/", "data/member/wal/"],
    },
    Case {
        name: "a member, and what an earlier restore kept",
        wal_dir: false,
        existing: &[
            "data/lost+found/",
            "data/notes.txt",
            "data/member.bad-x/snap/db",
            "data/member/snap/db",
            "data/member/snap/0000000000000001-0000000000000001.snap",
            "data/member/wal/0000000000000000-0000000000000000.wal",
            "data/member/wal/0.tmp",
        ],
    },
    Case {
        name: "nothing, with a WAL directory",
        wal_dir: true,
        existing: &[],
    },
    Case {
        name: "a member without a WAL, with a WAL directory",
        wal_dir: true,
        existing: &["data/member/snap/db", "wal/lost+found/", "wal/notes.txt"],
    },
    Case {
        name: "a member and several segments, one of them with the new one's name",
        wal_dir: true,
        existing: &[
            "data/member/snap/db",
            "data/notes.txt",
            "wal/0000000000000000-0000000000000000.wal",
            "wal/0000000000000001-0000000000000009.wal",
            "wal/0000000000000002-0000000000000023.wal",
            "wal/0.tmp",
            "wal/lost+found/",
        ],
    },
    Case {
        name: "segments, and none of the new one's name",
        wal_dir: true,
        existing: &[
            "data/",
            "wal/0000000000000005-0000000000000009.wal",
            "wal/0000000000000006-0000000000000023.wal",
        ],
    },
    Case {
        name: "a member and segments, and what an earlier restore kept in both places",
        wal_dir: true,
        existing: &[
            "data/member/snap/db",
            "data/member.bad-x-2/snap/db",
            "wal/bad-x/0000000000000000-0000000000000000.wal",
            "wal/0000000000000000-0000000000000000.wal",
        ],
    },
];

struct Bench {
    root: tempfile::TempDir,
    target: InstallTarget,
    old: Tree,
    /// The files once the restore is done.
    new: Tree,
}

impl Bench {
    fn new(case: &Case) -> Self {
        let root = tempfile::tempdir().unwrap();
        let existing = case
            .existing
            .iter()
            .map(|name| match name.strip_suffix('/') {
                Some(folder) => (PathBuf::from(folder), None),
                None => (
                    PathBuf::from(name),
                    Some(format!("old {name}").into_bytes()),
                ),
            });
        lay_out(root.path(), &existing.collect());
        let old = tree(root.path());
        let wal_dir = case.wal_dir.then(|| root.path().join("wal"));
        let target = InstallTarget::new(&root.path().join("data"), wal_dir.as_deref()).unwrap();
        let aside = target.free_name(ASIDE);
        // The expectation is computed from names only, independently of the tested code.
        let moved = |path: &PathBuf| {
            let text = path.to_str().unwrap();
            let segment = text.strip_prefix("wal/").filter(|s| s.ends_with(".wal"));
            if let Some(rest) = text.strip_prefix("data/member/") {
                PathBuf::from(format!("data/member.{aside}/{rest}"))
            } else if let Some(segment) = segment.filter(|s| !s.contains('/')) {
                PathBuf::from(format!("wal/{aside}/{segment}"))
            } else {
                path.clone()
            }
        };
        let kept = files(&old);
        let mut new: Tree = kept.iter().map(|(p, c)| (moved(p), c.clone())).collect();
        assert_eq!(new.len(), kept.len());
        for (path, content) in new_files(case.wal_dir) {
            assert!(new.insert(path.into(), Some(content.into())).is_none());
        }
        Bench {
            root,
            target,
            old,
            new,
        }
    }

    fn stage(&self) -> LockedTarget {
        let locked = self.target.lock().unwrap();
        let (snap, wal) = locked.stage().unwrap();
        fs::write(snap.join("db"), "new db").unwrap();
        fs::write(snap.join("1.snap"), "new snap").unwrap();
        fs::write(wal.join(SEGMENT_0), "new segment").unwrap();
        locked
    }

    fn now(&self) -> Tree {
        tree(self.root.path())
    }

    /// Installs the new member. Returns the files after each step, as a kill would leave them.
    fn kills(&self) -> Vec<(&'static str, Tree)> {
        let locked = self.stage();
        let mut kills = vec![("staged", self.now())];
        let mut done = |step| kills.push((step, self.now()));
        locked.put_in_place(ASIDE, &mut done).unwrap();
        assert_eq!(files(&self.now()), self.new);
        kills
    }

    /// Recovers from the files that a killed restore has left. Returns whether the new member is installed
    /// then.
    fn recovers(&self, place: &InstallTarget, left: &Tree, what: &str) -> bool {
        lay_out(self.root.path(), left);
        let locked = place.lock().unwrap_or_else(|e| panic!("{what}: {e}"));
        let leftover = locked.leftover();
        drop(locked);
        let found = self.now();
        let is_new = files(&found) == self.new;
        let is_old = files(&found) == files(&self.old);
        assert!(is_new || is_old, "{what}: a mix: {:?}", found.keys());
        assert!(
            is_new == (leftover == Leftover::Completed) || leftover == Leftover::None,
            "{what}: {leftover:?}"
        );
        let debris = |p: &&PathBuf| p.to_string_lossy().contains(".deltafold");
        assert_eq!(found.keys().find(debris), None, "{what}");
        if is_old {
            let (before, now) = (folders(&self.old), folders(&found));
            assert!(now.is_superset(&before), "{what}: {now:?}");
            let more: Vec<_> = now.difference(&before).collect();
            let roots = [Path::new("data"), Path::new("wal")];
            // The killed restore may have created these folders; the next one cannot know.
            assert!(
                more.iter().all(|p| roots.contains(&p.as_path())),
                "{more:?}"
            );
        }
        let again = place.lock().unwrap();
        assert_eq!(again.leftover(), Leftover::None, "{what}");
        drop(again);
        assert_eq!(self.now(), found, "{what}: a second time changed it");
        is_new
    }
}

fn new_files(wal_dir: bool) -> [(String, &'static str); 3] {
    let wal = if wal_dir { "wal" } else { "data/member/wal" };
    [
        ("data/member/snap/db".to_owned(), "new db"),
        ("data/member/snap/1.snap".to_owned(), "new snap"),
        (format!("{wal}/{SEGMENT_0}"), "new segment"),
    ]
}

#[test]
fn after_a_kill_at_any_step_the_next_restore_completes_or_undoes() {
    for case in &CASES {
        let bench = Bench::new(case);
        let mut became_new = Vec::new();
        for (step, left) in bench.kills() {
            let what = format!("{}, killed after: {step}", case.name);
            became_new.push(bench.recovers(&bench.target, &left, &what));
        }
        // Kills before some step lead to the old state, and later ones to the new state.
        assert!(became_new.is_sorted(), "{}: {became_new:?}", case.name);
        assert!(became_new.contains(&false), "{}", case.name);
        assert!(became_new.contains(&true), "{}", case.name);
    }
}

#[test]
fn a_recovery_that_is_killed_is_repeated_with_the_same_result() {
    for case in &CASES {
        let bench = Bench::new(case);
        for (step, left) in bench.kills() {
            let what = format!("{}, killed after: {step}", case.name);
            let is_new = bench.recovers(&bench.target, &left, &what);
            lay_out(bench.root.path(), &left);
            let mut kills = Vec::new();
            let mut done = |step| kills.push((step, bench.now()));
            drop(bench.target.lock_with(&mut done).unwrap());
            assert!(!kills.is_empty(), "{what}");
            for (step, left) in kills {
                let what = format!("{what}, again after: {step}");
                assert_eq!(
                    bench.recovers(&bench.target, &left, &what),
                    is_new,
                    "{what}"
                );
            }
        }
    }
}

/// File systems that cannot exchange directories are rare, so the test renames the folders itself.
#[test]
fn a_kill_between_the_two_renames_is_undone() {
    for case in CASES
        .iter()
        .filter(|c| c.existing.contains(&"data/member/snap/db"))
    {
        let bench = Bench::new(case);
        let kills = bench.kills();
        // The last step before the exchange.
        let at = kills
            .iter()
            .position(|k| k.0 == "put the new member in place");
        let (_, before) = &kills[at.unwrap() - 1];
        lay_out(bench.root.path(), before);
        let kept = bench.target.kept_member(&{
            let journal = fs::read(bench.target.staging().join(JOURNAL)).unwrap();
            serde_json::from_slice::<Journal>(&journal).unwrap().aside
        });
        rename(&bench.target.member(), &kept).unwrap();
        let left = bench.now();
        let what = format!("{}, no member", case.name);
        assert!(!bench.recovers(&bench.target, &left, &what));
        lay_out(bench.root.path(), &left);
        let mut undoing = Vec::new();
        let mut done = |step| undoing.push((step, bench.now()));
        drop(bench.target.lock_with(&mut done).unwrap());
        assert_eq!(undoing[0].0, "put the old member back");
        for (step, left) in undoing {
            let what = format!("{what}, again after: {step}");
            assert!(!bench.recovers(&bench.target, &left, &what));
        }
        lay_out(bench.root.path(), &left);
        rename(&bench.target.staged_member(), &bench.target.member()).unwrap();
        let left = bench.now();
        assert!(bench.recovers(&bench.target, &left, case.name));
    }
}

#[test]
fn a_restore_with_another_wal_directory_is_recovered_there() {
    for case in CASES.iter().filter(|c| c.wal_dir) {
        let bench = Bench::new(case);
        let dir = bench.target.dir().to_owned();
        let elsewhere = bench.root.path().join("data/other-wal");
        for (step, left) in bench.kills() {
            for other in [None, Some(elsewhere.as_path())] {
                let place = InstallTarget::new(&dir, other).unwrap();
                let what = format!("{}, killed after: {step}, then {other:?}", case.name);
                bench.recovers(&place, &left, &what);
            }
        }
    }
}

#[test]
fn a_recovery_without_the_wal_directory_of_the_restore_fails() {
    let bench = Bench::new(&CASES[6]);
    let kills = bench.kills();
    let half = kills.iter().find(|k| k.0 == "put the new segment in place");
    lay_out(bench.root.path(), &half.unwrap().1);
    let wal = bench.root.path().join("wal");
    let unmounted = bench.root.path().join("unmounted");
    fs::rename(&wal, &unmounted).unwrap();
    fs::create_dir(&wal).unwrap();
    for place in [
        bench.target.clone(),
        InstallTarget::new(bench.target.dir(), None).unwrap(),
    ] {
        let e = place.lock().unwrap_err();
        assert_eq!(e.reason(), Reason::Configuration, "{e}");
        assert!(e.to_string().contains("mount"), "{e}");
    }
    fs::remove_dir(&wal).unwrap();
    fs::rename(&unmounted, &wal).unwrap();
    let left = bench.now();
    assert!(!bench.recovers(&bench.target, &left, "mounted again"));
}

#[test]
fn a_restore_that_fails_or_gives_up_restores_the_old_files() {
    for case in &CASES {
        let bench = Bench::new(case);
        drop(bench.stage());
        assert_eq!(bench.now(), bench.old, "{}", case.name);
        // Without the staged database folder, syncing fails.
        let locked = bench.stage();
        fs::remove_dir_all(bench.target.staged_member().join("snap")).unwrap();
        locked.put_in_place(ASIDE, &mut |_| ()).unwrap_err();
        assert_eq!(bench.now(), bench.old, "{}", case.name);
    }
    // A step in the middle fails, after the old segments were moved.
    let bench = Bench::new(&CASES[6]);
    let locked = bench.stage();
    let staged = bench.target.staged_member();
    let hidden = bench.root.path().join("hidden");
    let mut done = |step: &'static str| {
        if step == "put the new segment in place" {
            fs::rename(&staged, &hidden).unwrap();
        }
    };
    let e = locked.put_in_place(ASIDE, &mut done).unwrap_err();
    assert_eq!(e.reason(), Reason::Io, "{e}");
    fs::remove_dir_all(&hidden).unwrap();
    assert_eq!(bench.now(), bench.old);
}

#[test]
fn two_restores_into_the_same_directories_exclude_each_other() {
    let bench = Bench::new(&CASES[6]);
    let locked = bench.stage();
    let staged = bench.now();
    // The same directory, and another one that shares the WAL directory.
    let wal = bench.root.path().join("wal");
    for (dir, wal_dir) in [
        ("data", None),
        ("data", Some(wal.as_path())),
        ("other/one", Some(&wal)),
    ] {
        let place = InstallTarget::new(&bench.root.path().join(dir), wal_dir).unwrap();
        let e = place.lock().unwrap_err();
        assert_eq!(e.reason(), Reason::TargetInUse, "{dir}: {e}");
        assert_eq!(bench.now(), staged, "{dir}");
    }
    locked.put_in_place(ASIDE, &mut |_| ()).unwrap();
    assert_eq!(files(&bench.now()), bench.new);
}

#[test]
fn a_wal_directory_in_a_moved_directory_is_refused_even_through_links() {
    let root = tempfile::tempdir().unwrap();
    let at = |path: &str| root.path().join(path);
    fs::create_dir_all(at("data/member/wal")).unwrap();
    fs::create_dir_all(at("disk")).unwrap();
    std::os::unix::fs::symlink(at("data/member"), at("link")).unwrap();
    std::os::unix::fs::symlink(at("data"), at("data-link")).unwrap();
    let place = |wal: &str| InstallTarget::new(&at("data"), Some(&at(wal)));
    for own in ["data/member/wal", "data/../data/member/wal", "link/wal"] {
        assert_eq!(place(own).unwrap().own_wal_dir(), None, "{own}");
    }
    for refused in [
        "data",
        "data/member",
        "data/member/other",
        "data/.deltafold-restore/x",
        "data-link",
        "link/other",
        "data/../data/member/snap/wal",
    ] {
        let e = place(refused).unwrap_err();
        assert_eq!(e.reason(), Reason::Usage, "{refused}");
    }
    for other in ["disk", "disk/new/wal", "data/wal"] {
        let place = place(other).unwrap();
        assert_eq!(place.own_wal_dir(), Some(at(other).as_path()), "{other}");
    }
    // If `member/wal` is a link, the directory that it leads to is allowed.
    fs::remove_dir(at("data/member/wal")).unwrap();
    std::os::unix::fs::symlink(at("disk"), at("data/member/wal")).unwrap();
    assert_eq!(
        place("disk").unwrap().own_wal_dir(),
        Some(at("disk").as_path())
    );
    assert_eq!(place("data/member/wal").unwrap().own_wal_dir(), None);
}

#[test]
fn a_damaged_journal_is_an_error_and_nothing_is_changed() {
    let bench = Bench::new(&CASES[3]);
    let kills = bench.kills();
    let (_, left) = kills.iter().find(|k| k.0 == "wrote the journal").unwrap();
    lay_out(bench.root.path(), left);
    fs::write(bench.target.staging().join(JOURNAL), "{").unwrap();
    let before = bench.now();
    let e = bench.target.lock().unwrap_err();
    assert_eq!(e.reason(), Reason::CorruptDataDir, "{e}");
    assert_eq!(bench.now(), before);
}
