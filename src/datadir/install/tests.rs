//! Installs that are killed after each step, on many layouts of the target.

use super::*;
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::PermissionsExt as _;

const ASIDE: &str = "bad-1";
const STAGED_MEMBER: &str = ".deltafold-restore/member";
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
            "data/member.bad-1/snap/db",
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
            "data/member.bad-1-2/snap/db",
            "wal/bad-1/0000000000000000-0000000000000000.wal",
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
        let aside = target.lock().unwrap().free_name(ASIDE).unwrap();
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
        let Staged { snap, wal } = locked.stage().unwrap();
        fs::write(snap.at("db"), "new db").unwrap();
        fs::write(snap.at("1.snap"), "new snap").unwrap();
        fs::write(wal.at(SEGMENT_0), "new segment").unwrap();
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
            let is_left = left.contains_key(&Path::new("data").join(STAGING));
            assert_eq!(is_left, !kills.is_empty(), "{what}");
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

/// What is left of a restore with a WAL directory is recovered only with that directory.
#[test]
fn a_recovery_without_the_wal_directory_of_the_restore_fails() {
    let bench = Bench::new(&CASES[6]);
    let dir = bench.target.dir().to_owned();
    let (wal, elsewhere) = (bench.root.path().join("wal"), dir.join("other-wal"));
    let places = [None, Some(elsewhere.as_path())].map(|w| InstallTarget::new(&dir, w).unwrap());
    for (step, left) in bench.kills() {
        let journal = dir.join(STAGING).join(JOURNAL);
        lay_out(bench.root.path(), &left);
        if !journal.exists() {
            continue;
        }
        for place in &places {
            let e = place.lock().unwrap_err();
            assert_eq!(e.reason(), Reason::Configuration, "{step}: {e}");
            assert!(e.to_string().contains(wal.to_str().unwrap()), "{e}");
        }
        assert_eq!(files(&bench.now()), files(&left), "{step}");
        // The directory is there, but what was mounted there is not.
        let unmounted = bench.root.path().join("unmounted");
        fs::rename(&wal, &unmounted).unwrap();
        let e = bench.target.lock().unwrap_err();
        assert_eq!(e.reason(), Reason::Configuration, "{step}: {e}");
        assert!(e.to_string().contains("mount"), "{e}");
        fs::rename(&unmounted, &wal).unwrap();
        assert!(bench.recovers(&bench.target, &left, step));
    }
}

#[test]
fn a_restore_that_fails_or_gives_up_restores_the_old_files() {
    for case in &CASES {
        let bench = Bench::new(case);
        drop(bench.stage());
        assert_eq!(bench.now(), bench.old, "{}", case.name);
        // Without the staged database folder, syncing fails.
        let locked = bench.stage();
        fs::remove_dir_all(bench.target.dir().join(STAGED_MEMBER).join("snap")).unwrap();
        locked.put_in_place(ASIDE, &mut |_| ()).unwrap_err();
        assert_eq!(bench.now(), bench.old, "{}", case.name);
    }
    // The new member cannot be put in place, after the old one was moved.
    let bench = Bench::new(&CASES[6]);
    let locked = bench.stage();
    let mut done = |step: &'static str| {
        if step == "put the old member aside" {
            fs::create_dir_all(bench.target.member().join("snap")).unwrap();
        }
    };
    locked.put_in_place(ASIDE, &mut done).unwrap_err();
    fs::remove_dir_all(bench.target.member()).unwrap();
    let kept = bench.target.dir().join(kept_member(ASIDE));
    fs::rename(kept, bench.target.member()).unwrap();
    assert_eq!(bench.now(), bench.old);
}

/// From the first segment on, a failure is like a kill: the next restore completes the moves.
#[test]
fn a_failure_after_the_member_is_in_place_is_completed_by_the_next_restore() {
    let bench = Bench::new(&CASES[6]);
    let locked = bench.stage();
    let staged = bench.root.path().join("wal").join(STAGING).join(SEGMENT_0);
    let hidden = bench.root.path().join("hidden");
    let mut done = |step: &'static str| {
        if step == "put the old segments aside" {
            fs::rename(&staged, &hidden).unwrap();
        }
    };
    let e = locked.put_in_place(ASIDE, &mut done).unwrap_err();
    assert_eq!(e.reason(), Reason::Io, "{e}");
    assert!(e.to_string().contains("the next restore"), "{e}");
    fs::rename(&hidden, &staged).unwrap();
    let left = bench.now();
    assert!(bench.recovers(&bench.target, &left, "after a failure"));
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
fn a_damaged_or_forged_journal_is_an_error_and_nothing_is_changed() {
    let bench = Bench::new(&CASES[6]);
    let kills = bench.kills();
    let (_, left) = kills.iter().find(|k| k.0 == "wrote the journal").unwrap();
    let wal = bench.root.path().join("wal");
    let aside = |aside: &str| serde_json::json!({"aside": aside, "wal": null}).to_string();
    let segment =
        |name: &str| serde_json::json!({"aside": "bad-1", "wal": [wal, name]}).to_string();
    for text in [
        "{".to_owned(),
        aside("../../../rootonly/x"),
        aside("bad-/../x"),
        aside("20261126T000000Z"),
        segment("../../rootonly/shadow"),
        segment("../0000000000000000-0000000000000000.wal"),
        segment("0000000000000000-0000000000000000"),
    ] {
        lay_out(bench.root.path(), left);
        fs::write(bench.target.staging().join(JOURNAL), &text).unwrap();
        let before = bench.now();
        let e = bench.target.lock().unwrap_err();
        assert_eq!(e.reason(), Reason::CorruptDataDir, "{text}: {e}");
        assert_eq!(bench.now(), before, "{text}");
    }
}

/// A staging folder is believed only if nobody else can have made it or written into it.
#[test]
fn a_staging_folder_that_is_a_link_or_open_to_others_is_refused() {
    let bench = Bench::new(&CASES[6]);
    let elsewhere = bench.root.path().join("elsewhere");
    let (staging, of_wal) = (
        bench.target.staging(),
        bench.root.path().join("wal").join(STAGING),
    );
    fs::create_dir_all(elsewhere.join(MEMBER)).unwrap();
    for place in [&staging, &of_wal] {
        let is_refused = || {
            let before = bench.now();
            let e = bench.target.lock().unwrap_err();
            assert_eq!(e.reason(), Reason::PermissionDenied, "{e}");
            assert!(e.to_string().contains(place.to_str().unwrap()), "{e}");
            assert_eq!(bench.now(), before);
        };
        std::os::unix::fs::symlink(&elsewhere, place).unwrap();
        is_refused();
        fs::remove_file(place).unwrap();
        fs::create_dir(place).unwrap();
        fs::set_permissions(place, fs::Permissions::from_mode(0o777)).unwrap();
        is_refused();
        fs::remove_dir(place).unwrap();
    }
    bench.target.lock().unwrap();
}

/// A directory that is replaced by a link while it is used stays the one that was opened.
#[test]
fn a_data_directory_that_is_replaced_meanwhile_is_not_followed() {
    let bench = Bench::new(&CASES[3]);
    let elsewhere = bench.root.path().join("elsewhere");
    fs::create_dir_all(elsewhere.join("member/snap")).unwrap();
    let locked = bench.target.lock().unwrap();
    let staged = locked.stage().unwrap();
    let (staging, hidden) = (bench.target.staging(), bench.target.dir().join("hidden"));
    fs::rename(&staging, &hidden).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &staging).unwrap();
    fs::write(staged.snap.at("db"), "new db").unwrap();
    assert!(hidden.join("member/snap/db").exists());
    let e = locked.put_in_place(ASIDE, &mut |_| ()).unwrap_err();
    assert_eq!(e.reason(), Reason::PermissionDenied, "{e}");
    let left = tree(&elsewhere);
    assert_eq!(left.len(), 2, "{left:?}");
}
