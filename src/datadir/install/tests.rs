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
        if path.is_dir() {
            fs::remove_dir_all(path).unwrap()
        } else {
            fs::remove_file(path).unwrap()
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

const CASES: [Case; 7] = [
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
        existing: &["data/member/snap/db", "data/notes.txt", "wal/lost+found/"],
    },
    Case {
        name: "a member and what an earlier restore kept, with a WAL directory",
        wal_dir: true,
        existing: &[
            "data/member/snap/db",
            "data/member.bad-1/snap/db",
            "data/member.bad-1-2/snap/db",
            "wal/",
        ],
    },
];

/// What a data directory holds when the next restore has dealt with a killed one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    /// The old member.
    Old,
    /// No member: the old one is kept aside.
    Aside,
    /// The same, and the WAL directory holds the new segment.
    AsideWithSegment,
    /// The new member.
    New,
}

struct Bench {
    root: tempfile::TempDir,
    target: InstallTarget,
    old: Tree,
    /// The files of each state.
    states: Vec<(State, Tree)>,
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
        // The expectation is computed from names only, independently of the tested code.
        let is_used = |name: &str| old.contains_key(&Path::new("data").join(name));
        let names = ["member.bad-1", "member.bad-1-2", "member.bad-1-3"];
        let kept = names.iter().find(|name| !is_used(name)).unwrap();
        let moved = |path: &PathBuf| match path.strip_prefix("data/member") {
            Ok(rest) => Path::new("data").join(kept).join(rest),
            Err(_) => path.clone(),
        };
        let aside: Tree = files(&old)
            .into_iter()
            .map(|(path, content)| (moved(&path), content))
            .collect();
        let mut states = vec![(State::Old, files(&old))];
        let mut new = aside.clone();
        let [member @ .., segment] = new_files(case.wal_dir);
        if case.wal_dir {
            states.push((State::Aside, aside));
        }
        new.insert(segment.0.into(), Some(segment.1.into()));
        if case.wal_dir {
            states.push((State::AsideWithSegment, new.clone()));
        }
        for (path, content) in member {
            assert!(new.insert(path.into(), Some(content.into())).is_none());
        }
        states.push((State::New, new));
        Bench {
            root,
            target,
            old,
            states,
        }
    }

    fn stage(&self) -> LockedTarget {
        let locked = self.target.lock(ASIDE).unwrap();
        let Staged { snap, wal } = locked.stage().unwrap();
        snap.write("db", b"new db", 0).unwrap();
        snap.write("1.snap", b"new snap", 0).unwrap();
        wal.write(SEGMENT_0, b"new segment", 0).unwrap();
        locked
    }

    fn now(&self) -> Tree {
        tree(self.root.path())
    }

    fn wal(&self) -> PathBuf {
        self.root.path().join("wal")
    }

    /// Returns the state in which the files are.
    fn state(&self) -> Option<State> {
        let now = files(&self.now());
        let state = self.states.iter().find(|(_, tree)| *tree == now);
        state.map(|(state, _)| *state)
    }

    /// Installs the new member. Returns the files after each step, as a kill would leave them.
    fn kills(&self) -> Vec<(&'static str, Tree)> {
        let locked = self.stage();
        let mut kills = vec![("staged", self.now())];
        let mut done = |step| kills.push((step, self.now()));
        locked.put_in_place(&mut done).unwrap();
        assert_eq!(self.state(), Some(State::New));
        kills
    }

    /// Recovers from the files that a killed restore has left. Returns the state then.
    fn recovers(&self, left: &Tree, what: &str) -> State {
        lay_out(self.root.path(), left);
        let locked = self.target.lock(ASIDE);
        let locked = locked.unwrap_or_else(|e| panic!("{what}: {e}"));
        let leftover = locked.leftover();
        drop(locked);
        let found = self.now();
        let state = self.state();
        let state = state.unwrap_or_else(|| panic!("{what}: a mix: {:?}", found.keys()));
        assert!(
            (state == State::New) == (leftover == Leftover::Completed)
                || leftover == Leftover::None,
            "{what}: {leftover:?}"
        );
        let debris = |p: &&PathBuf| p.to_string_lossy().contains(".deltafold");
        assert_eq!(found.keys().find(debris), None, "{what}");
        if state == State::Old {
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
        let again = self.target.lock(ASIDE).unwrap();
        assert_eq!(again.leftover(), Leftover::None, "{what}");
        drop(again);
        assert_eq!(self.now(), found, "{what}: a second time changed it");
        state
    }

    /// Restores once more from any state, as the messages say.
    fn restores_again(&self, state: State, what: &str) {
        let empty = self.target.require_empty_wal_dir();
        assert_eq!(empty.is_err(), state == State::AsideWithSegment, "{what}");
        if let Err(e) = empty {
            assert_eq!(e.reason(), Reason::TargetExists, "{what}: {e}");
            let wal = self.wal().display().to_string();
            assert!(
                e.to_string().contains(&format!("mv {wal} {wal}.old")),
                "{e}"
            );
            fs::rename(&wal, format!("{wal}.old")).unwrap();
        }
        self.stage().put_in_place(&mut |_| ()).unwrap();
        let mut now = files(&self.now());
        now.retain(|path, _| !path.starts_with("wal.old"));
        assert_eq!(now, self.states.last().unwrap().1, "{what}");
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

/// A member is never there with another member's WAL, and nothing is lost.
#[test]
fn after_a_kill_at_any_step_the_next_restore_finds_the_old_member_or_the_new_one() {
    for case in &CASES {
        let bench = Bench::new(case);
        let mut states = Vec::new();
        for (step, left) in bench.kills() {
            let what = format!("{}, killed after: {step}", case.name);
            let state = bench.recovers(&left, &what);
            if state != State::New {
                bench.restores_again(state, &what);
            }
            states.push(state);
        }
        // Kills before some step lead to the old state, and later ones to the new state.
        assert!(states.is_sorted(), "{}: {states:?}", case.name);
        assert!(states.contains(&State::Old), "{}", case.name);
        assert!(states.contains(&State::New), "{}", case.name);
    }
}

/// Without a WAL directory of its own, a member is there after every step.
#[test]
fn a_member_is_exchanged_in_one_step() {
    let bench = Bench::new(&CASES[3]);
    for (step, left) in bench.kills() {
        let db = left.get(Path::new("data/member/snap/db"));
        assert!(db.is_some(), "{step}");
        let segment = left.get(&Path::new("data/member/wal").join(SEGMENT_0));
        let is_new = |content: Option<&Option<Vec<u8>>>| {
            content.is_some_and(|c| c.as_ref().is_some_and(|c| c.starts_with(b"new")))
        };
        assert_eq!(is_new(db), is_new(segment), "{step}");
    }
}

#[test]
fn a_recovery_that_is_killed_is_repeated_with_the_same_result() {
    for case in &CASES {
        let bench = Bench::new(case);
        for (step, left) in bench.kills() {
            let what = format!("{}, killed after: {step}", case.name);
            let state = bench.recovers(&left, &what);
            lay_out(bench.root.path(), &left);
            let mut kills = Vec::new();
            let mut done = |step| kills.push((step, bench.now()));
            drop(bench.target.lock_with(ASIDE, &mut done).unwrap());
            let is_left = left.contains_key(&Path::new("data").join(STAGING));
            assert_eq!(is_left, !kills.is_empty(), "{what}");
            for (step, left) in kills {
                let what = format!("{what}, again after: {step}");
                assert_eq!(bench.recovers(&left, &what), state, "{what}");
            }
        }
    }
}

/// However far staging, or the removal of staged files, has come, it is no previous member.
#[test]
fn incomplete_staged_files_are_never_kept() {
    let bench = Bench::new(&CASES[3]);
    let staged = bench.stage();
    let left = bench.now();
    drop(staged);
    let member = Path::new("data").join(STAGED_MEMBER);
    for removed in [
        &["snap"][..],
        &["snap", "wal"],
        &["snap", "wal", UNFINISHED],
    ] {
        let mut left = left.clone();
        left.retain(|path, _| !removed.iter().any(|r| path.starts_with(member.join(r))));
        let state = bench.recovers(&left, &format!("without {removed:?}"));
        assert_eq!(state, State::Old, "{removed:?}");
    }
}

/// A mark in a previous member does not make it a staged one.
#[test]
fn a_previous_member_with_a_mark_is_kept() {
    let bench = Bench::new(&CASES[3]);
    fs::write(bench.target.member().join(UNFINISHED), "").unwrap();
    for (step, left) in bench.kills().into_iter().skip(1) {
        assert_eq!(bench.recovers(&left, step), State::New, "{step}");
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
        locked.put_in_place(&mut |_| ()).unwrap_err();
        assert_eq!(bench.now(), bench.old, "{}", case.name);
    }
    // The segment, or the member, cannot be put in place after the old member was moved.
    for last in ["put the old member aside", "put the new segment in place"] {
        let bench = Bench::new(&CASES[5]);
        let locked = bench.stage();
        let staged = match last {
            "put the old member aside" => bench.wal().join(SEGMENT_0),
            _ => bench.target.member(),
        };
        let mut done = |step: &'static str| {
            if step == last {
                fs::create_dir(&staged).unwrap();
                fs::write(staged.join("appeared"), "").unwrap();
            }
        };
        locked.put_in_place(&mut done).unwrap_err();
        fs::remove_dir_all(&staged).unwrap();
        if staged == bench.target.member() {
            let kept = bench.target.dir().join("member.bad-1");
            fs::rename(kept, bench.target.member()).unwrap();
        }
        assert_eq!(bench.now(), bench.old, "{last}");
    }
}

/// After the exchange, a failure is like a kill: the next restore gives the previous member its name.
#[test]
fn a_failure_after_the_exchange_is_completed_by_the_next_restore() {
    let bench = Bench::new(&CASES[3]);
    let locked = bench.stage();
    let data = bench.target.dir();
    let (member, hidden) = (data.join(STAGED_MEMBER), data.join("hidden"));
    let mut done = |step: &'static str| {
        if step == "exchanged the members" {
            fs::rename(&member, &hidden).unwrap();
        }
    };
    let e = locked.put_in_place(&mut done).unwrap_err();
    assert_eq!(e.reason(), Reason::Io, "{e}");
    assert!(e.to_string().contains("the next restore"), "{e}");
    fs::create_dir_all(data.join(STAGING)).unwrap();
    fs::set_permissions(data.join(STAGING), fs::Permissions::from_mode(0o700)).unwrap();
    fs::rename(&hidden, &member).unwrap();
    let left = bench.now();
    assert_eq!(bench.recovers(&left, "after a failure"), State::New);
}

#[test]
fn two_restores_into_the_same_directories_exclude_each_other() {
    let bench = Bench::new(&CASES[5]);
    let locked = bench.stage();
    let staged = bench.now();
    // The same directory, and another one that shares the WAL directory.
    let wal = bench.wal();
    for (dir, wal_dir) in [
        ("data", None),
        ("data", Some(wal.as_path())),
        ("other/one", Some(&wal)),
    ] {
        let place = InstallTarget::new(&bench.root.path().join(dir), wal_dir).unwrap();
        let e = place.lock(ASIDE).unwrap_err();
        assert_eq!(e.reason(), Reason::TargetInUse, "{dir}: {e}");
        assert_eq!(bench.now(), staged, "{dir}");
    }
    locked.put_in_place(&mut |_| ()).unwrap();
    assert_eq!(bench.state(), Some(State::New));
}

#[test]
fn a_wal_directory_that_holds_anything_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let wal = root.path().join("its wal");
    let data = root.path().join("data");
    let place = InstallTarget::new(&data, Some(&wal.join(""))).unwrap();
    place.require_empty_wal_dir().unwrap();
    fs::create_dir_all(wal.join(LOST_AND_FOUND)).unwrap();
    place.require_empty_wal_dir().unwrap();
    for name in [SEGMENT_0, "0.tmp", "bad-1/x.wal", "notes.txt"] {
        let path = wal.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "").unwrap();
        let e = place.require_empty_wal_dir().unwrap_err();
        assert_eq!(e.reason(), Reason::TargetExists, "{name}: {e}");
        let wal = wal.display();
        let command = format!("(mv '{wal}' '{wal}.old')");
        assert!(e.to_string().contains(&command), "{e}");
        fs::remove_file(&path).unwrap();
        let _ = fs::remove_dir(wal.to_string() + "/bad-1");
    }
    // The member's own WAL is replaced with the member.
    fs::create_dir_all(data.join("member/wal")).unwrap();
    fs::write(data.join("member/wal/0.wal"), "").unwrap();
    let own = InstallTarget::new(&data, Some(&data.join("member/wal"))).unwrap();
    own.require_empty_wal_dir().unwrap();
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

/// A staging folder is believed only if nobody else can have made it or written into it.
#[test]
fn a_staging_folder_that_is_a_link_or_open_to_others_is_refused() {
    let bench = Bench::new(&CASES[5]);
    let elsewhere = bench.root.path().join("elsewhere");
    let (staging, of_wal) = (bench.target.staging(), bench.wal().join(STAGING));
    fs::create_dir_all(elsewhere.join(MEMBER)).unwrap();
    for place in [&staging, &of_wal] {
        let is_refused = || {
            let before = bench.now();
            let e = bench.target.lock(ASIDE).unwrap_err();
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
    bench.target.lock(ASIDE).unwrap();
}

/// A directory that is replaced by a link while it is used stays the one that was opened.
#[test]
fn a_data_directory_that_is_replaced_meanwhile_is_not_followed() {
    let bench = Bench::new(&CASES[3]);
    let elsewhere = bench.root.path().join("elsewhere");
    fs::create_dir_all(elsewhere.join("member/snap")).unwrap();
    let locked = bench.target.lock(ASIDE).unwrap();
    let staged = locked.stage().unwrap();
    let (staging, hidden) = (bench.target.staging(), bench.target.dir().join("hidden"));
    fs::rename(&staging, &hidden).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &staging).unwrap();
    staged.snap.write("db", b"new db", 0).unwrap();
    assert!(hidden.join("member/snap/db").exists());
    let e = locked.put_in_place(&mut |_| ()).unwrap_err();
    assert_eq!(e.reason(), Reason::PermissionDenied, "{e}");
    let left = tree(&elsewhere);
    assert_eq!(left.len(), 2, "{left:?}");
}
