//! A local store on a machine with other users: they cannot read what is created, and no symbolic link of
//! theirs leads out of the store's folder.

use crate::support::made_backups::{BASE, Bucket, FIXTURE, LAST, T0, objects_in};
use crate::support::{copy_fixture, deltafold, run_json, scratch, tools};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Runs the program with a umask. Returns the exit code, standard output and standard error.
fn run(umask: &str, args: &[&str]) -> (i32, Value, String) {
    let program = deltafold();
    let mut c = Command::new("sh");
    c.arg("-c").arg(r#"umask "$0"; exec "$@""#).arg(umask);
    c.arg(program.get_program())
        .args(args)
        .args(["--output", "json"]);
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => c.env(name, value),
            None => c.env_remove(name),
        };
    }
    let out = c.output().unwrap();
    let result = serde_json::from_slice(&out.stdout).unwrap_or_default();
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    (out.status.code().unwrap(), result, stderr)
}

#[track_caller]
fn works(umask: &str, args: &[&str]) -> Value {
    let (code, result, stderr) = run(umask, args);
    assert_eq!(code, 0, "{args:?}: {stderr}");
    result
}

/// Asserts that a command is refused because of a link.
#[track_caller]
fn refuses_link(args: &[&str]) {
    let (code, result, stderr) = run("022", args);
    assert_eq!(code, 77, "{args:?}: {stderr}");
    assert_eq!(result["reason"], "PermissionDenied", "{args:?}: {result}");
    let message = result["message"].as_str().unwrap();
    assert!(message.contains("symbolic link"), "{message}");
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Returns the modes of everything below a folder.
fn modes(folder: &Path) -> BTreeMap<PathBuf, u32> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let meta = fs::symlink_metadata(&path).unwrap();
        if meta.is_dir() {
            all.append(&mut modes(&path));
        }
        all.insert(path, meta.permissions().mode() & 0o7777);
    }
    all
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// Returns a store from which gc removes something, with modes that a user chose.
fn with_old_chain() -> Bucket {
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    b.delta(1500, LAST, 9);
    b
}

/// Runs every command that writes into a local store. Returns the stores that were written.
fn write_all(umask: &str, more: &[&str]) -> (Bucket, tempfile::TempDir, BTreeMap<PathBuf, u32>) {
    let b = with_old_chain();
    let folder = scratch::folder().unwrap();
    for (path, _) in modes(b.path()) {
        set_mode(&path, if path.is_dir() { 0o755 } else { 0o644 });
    }
    let before = modes(b.path());
    let store = text(b.path());
    let with = |args: &[&str]| works(umask, &[args, more].concat());
    let full = with(&["compact", "--store", store]);
    let full = full["snapshot"].as_str().unwrap();
    with(&["pin", full, "--store", store]);
    with(&["pin", full, "--store", store, "--unpin"]);
    let base = format!("Full-00000000-{BASE:08}-{T0}.gz");
    with(&["pin", &base, "--store", store]);
    with(&["pin", &base, "--store", store, "--unpin"]);
    with(&["pin", full, "--store", store]);
    let gc = ["gc", "--store", store, "--policy", "limit", "--limit", "1"];
    // The snapshots have fixed times, and the default window would keep them only until some day.
    let kept = ["--restorable-window", "36500d", "--apply"];
    with(&[&gc[..], &kept].concat());
    let target = folder.path().join("copied");
    with(&["copy", "--from", store, "--to", text(&target)]);
    with(&["store", "check", "--store", text(&target)]);
    let of_files = folder.path().join("restored");
    fs::create_dir(&of_files).unwrap();
    let file = of_files.join("snapshot.db");
    with(&["restore", "--store", store, "--to-snapshot", text(&file)]);
    let data = of_files.join("data");
    with(&["restore", "--store", store, "--data-dir", text(&data)]);
    let mut made = modes(b.path());
    for (path, mode) in &before {
        // Existing files keep their mode.
        assert_eq!(made.remove(path), Some(*mode), "{}", path.display());
    }
    made.append(&mut modes(folder.path()));
    made.remove(&of_files);
    (b, folder, made)
}

#[test]
fn somebody_else_on_the_machine_reads_nothing_whatever_the_umask() {
    for umask in ["0", "022", "077"] {
        let (_bucket, _folder, made) = write_all(umask, &[]);
        assert!(made.len() > 15, "{made:?}");
        for (path, mode) in made {
            let wanted = if path.is_dir() { 0o700 } else { 0o600 };
            assert_eq!(mode, wanted, "{:o}: {} under {umask}", mode, path.display());
        }
    }
}

#[test]
fn a_shared_folder_gets_the_mode_that_was_asked_for() {
    for (mode, of_files, of_folders) in [("0640", 0o640, 0o750), ("660", 0o660, 0o770)] {
        let (bucket, folder, made) = write_all("077", &["--file-mode", mode]);
        let copied = folder.path().join("copied");
        for (path, mode) in made {
            let is_restored = !path.starts_with(&copied) && !path.starts_with(bucket.path());
            let wanted = match (path.is_dir(), is_restored) {
                // A restored database is private to etcd's user.
                (true, true) => 0o700,
                (false, true) => 0o600,
                (true, false) => of_folders,
                (false, false) => of_files,
            };
            assert_eq!(mode, wanted, "{:o}: {}", mode, path.display());
        }
    }
    let b = Bucket::with_base();
    for mode in ["0400", "0755", "4600", "0666", "rw", ""] {
        let (code, _, stderr) = run(
            "022",
            &["list", "--store", text(b.path()), "--file-mode", mode],
        );
        assert_eq!(code, 64, "{mode}: {stderr}");
    }
    let of_option = [
        "list",
        "--store",
        text(b.path()),
        "--store-option",
        "file_mode=0666",
    ];
    assert_eq!(run("022", &of_option).0, 78);
}

/// A store next to the store of another user, whose files this user may read.
struct Neighbours {
    own: Bucket,
    other: tempfile::TempDir,
    before: BTreeMap<String, Vec<u8>>,
}

impl Neighbours {
    fn new() -> Self {
        let other = copy_fixture(FIXTURE);
        fs::write(other.path().join("secret.json"), "{}").unwrap();
        Neighbours {
            own: with_old_chain(),
            before: objects_in(other.path()),
            other,
        }
    }

    fn link(&self, to: &str, at: &str) {
        let at = self.own.path().join(at);
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        symlink(self.other.path().join(to), at).unwrap();
    }

    #[track_caller]
    fn other_is_untouched(&self) {
        assert!(objects_in(self.other.path()) == self.before);
    }
}

/// The newest full of the other store, under a name of its own.
const STOLEN: &str = "Full-00000000-00009999-1999999999.gz";

#[test]
fn copy_carries_nobodys_file_away_through_a_link() {
    let n = Neighbours::new();
    let base = format!("v2/Full-00000000-{BASE:08}-{T0}.gz");
    n.link(&base, &format!("v2/{STOLEN}"));
    n.link("v2", "v1/Backup-1999999999");
    let store = text(n.own.path());
    let folder = scratch::folder().unwrap();
    let target = folder.path().join("target");
    works("022", &["copy", "--from", store, "--to", text(&target)]);
    let copied = objects_in(&target);
    assert_eq!(copied.len(), 3, "{:?}", copied.keys());
    // It is reported, and is no snapshot.
    let list = works("022", &["list", "--store", store]);
    assert_eq!(list["latest_revision"], LAST, "{list}");
    let problems = list["problems"].to_string();
    for link in [STOLEN, "Backup-1999999999"] {
        assert!(
            problems.contains(&format!("{link} (a symbolic link)")),
            "{problems}"
        );
    }
    let compacted = works("022", &["compact", "--store", store]);
    assert_eq!(compacted["revision"], LAST);
    n.other_is_untouched();
}

#[test]
fn a_folder_of_snapshots_that_is_a_link_is_refused() {
    let n = Neighbours::new();
    fs::remove_dir_all(n.own.path().join("v2")).unwrap();
    n.link("v2", "v2");
    let store = text(n.own.path());
    let folder = scratch::folder().unwrap();
    let to = folder.path().join("to");
    for args in [
        &["list", "--store", store][..],
        &["compact", "--store", store],
        &["restore", "--store", store, "--to-snapshot", text(&to)],
        &["copy", "--from", store, "--to", text(&to)],
        &["copy", "--from", text(n.other.path()), "--to", store],
        &[
            "gc", "--store", store, "--policy", "limit", "--limit", "1", "--apply",
        ],
        &["verify", "--store", store],
    ] {
        refuses_link(args);
    }
    n.other_is_untouched();
    // The store itself may be a link, and so may the folders above it.
    let linked = folder.path().join("linked");
    symlink(n.other.path(), &linked).unwrap();
    works("022", &["list", "--store", text(&linked)]);
}

#[test]
fn gc_deletes_nothing_through_a_link() {
    let n = Neighbours::new();
    let store = text(n.own.path());
    works("022", &["compact", "--store", store]);
    n.link("v2", "v1/Backup-1");
    fs::remove_dir(n.own.path().join("deltafold-staging")).unwrap();
    n.link("v2", "deltafold-staging");
    // Old enough to count as debris if the link were followed.
    let old = std::time::SystemTime::UNIX_EPOCH;
    for entry in fs::read_dir(n.other.path().join("v2")).unwrap() {
        let file = fs::File::open(entry.unwrap().path()).unwrap();
        file.set_modified(old).unwrap();
    }
    for limit in ["1", "1"] {
        let gc = [
            "gc", "--store", store, "--policy", "limit", "--limit", limit,
        ];
        run("022", &[&gc[..], &["--apply"]].concat());
        n.other_is_untouched();
    }
}

#[test]
fn staging_and_locks_that_are_links_lead_nowhere() {
    let n = Neighbours::new();
    let store = text(n.own.path());
    n.link("v2", "deltafold-staging");
    refuses_link(&["compact", "--store", store]);
    let target = scratch::folder().unwrap();
    symlink(
        n.other.path().join("v2"),
        target.path().join("deltafold-staging"),
    )
    .unwrap();
    refuses_link(&["copy", "--from", store, "--to", text(target.path())]);
    n.other_is_untouched();
    fs::remove_file(n.own.path().join("deltafold-staging")).unwrap();

    let gc = [
        "gc", "--store", store, "--policy", "limit", "--limit", "1", "--apply",
    ];
    for (to, at) in [
        ("", "deltafold-locks"),
        ("secret.json", "deltafold-locks/NAME.flock"),
        ("secret.json", "deltafold-locks/NAME.json"),
    ] {
        let name = lock_name(store, &gc);
        n.link(to, &at.replace("NAME", &name));
        refuses_link(&gc);
        n.other_is_untouched();
        fs::remove_dir_all(n.own.path().join("deltafold-locks"))
            .or_else(|_| fs::remove_file(n.own.path().join("deltafold-locks")))
            .unwrap();
    }
    // The temporary file beside the lock replaces a link.
    let name = lock_name(store, &gc);
    n.link("secret.json", &format!("deltafold-locks/{name}.json.new"));
    works("022", &gc);
    n.other_is_untouched();
}

/// Returns the name of a command's lock. No lock is left.
fn lock_name(store: &str, command: &[&str]) -> String {
    works("022", command);
    let locks = Path::new(store).join("deltafold-locks");
    let names = fs::read_dir(&locks).unwrap();
    let names = names.map(|e| e.unwrap().file_name().into_string().unwrap());
    let name = names.filter_map(|n| Some(n.strip_suffix(".flock")?.to_owned()));
    let name = name.last().expect("a lock");
    fs::remove_dir_all(locks).unwrap();
    name
}

#[test]
fn folders_that_become_links_while_a_copy_runs_are_not_followed() {
    let n = Neighbours::new();
    let folder = scratch::folder().unwrap();
    let (target, victim) = (folder.path().join("target"), folder.path().join("victim"));
    let secret = folder.path().join("secret");
    for made in [&target, &victim, &secret, &target.join("v2")] {
        fs::create_dir(made).unwrap();
    }
    // The same names with a valid full that this user must not see: no checksum reveals it.
    let theirs = n
        .other
        .path()
        .join(format!("v2/Full-00000000-{BASE:08}-{T0}.gz"));
    let own = n.own.path().join("v2");
    for entry in fs::read_dir(&own).unwrap() {
        fs::copy(&theirs, secret.join(entry.unwrap().file_name())).unwrap();
    }
    let base = own.join(theirs.file_name().unwrap());
    fs::remove_file(&base).unwrap();
    fs::write(secret.join(base.file_name().unwrap()), "somebody else's").unwrap();
    let theirs = fs::read(theirs).unwrap();
    symlink(&secret, n.own.path().join("decoy")).unwrap();
    symlink(&victim, target.join("decoy")).unwrap();
    let (ended, swapping) = (AtomicBool::new(false), Mutex::new(()));
    let swap = |root: &Path| {
        let _swapping = swapping.lock().unwrap();
        let (a, b) = (root.join("v2"), root.join("decoy"));
        renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE).unwrap();
    };
    std::thread::scope(|s| {
        s.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                swap(n.own.path());
                swap(&target);
                std::thread::yield_now();
            }
        });
        let mut codes = BTreeMap::new();
        for _ in 0..crate::support::rounds(20, 200) {
            let args = ["copy", "--from", text(n.own.path()), "--to", text(&target)];
            let (code, _, _) = run("022", &args);
            *codes.entry(code).or_insert(0) += 1;
            let _swapping = swapping.lock().unwrap();
            let escaped = fs::read_dir(&victim).unwrap().count() > 0;
            let stolen = objects_in(&target)
                .into_values()
                .any(|bytes| bytes == theirs);
            if escaped || stolen {
                ended.store(true, Ordering::Relaxed);
            }
            assert!(!escaped, "something was written through a link");
            assert!(!stolen, "something was read through a link");
        }
        println!("copies ended with {codes:?}");
        ended.store(true, Ordering::Relaxed);
    });
}

/// Runs `list` as a user without privileges, even if the tests run as root.
fn list_without_privileges(store: &str) -> (i32, Value, String) {
    let program = deltafold();
    let wrapper: &[&str] = match rustix::process::geteuid().is_root() {
        true => &["setpriv", "--bounding-set=-all", "--inh-caps=-all"],
        false => &["env"],
    };
    let mut command = Command::new(wrapper[0]);
    command.args(&wrapper[1..]).arg(program.get_program());
    run_json(command.args(["list", "--output", "json", "--store", store]))
}

#[test]
fn a_folder_that_may_not_be_read_fails_nothing_unless_it_is_one_of_ours() {
    let bucket = with_old_chain();
    let store = text(bucket.path());
    let within = bucket.path().join("v2/theirs");
    fs::create_dir(&within).unwrap();
    fs::write(within.join("file"), "x").unwrap();
    // A folder that cannot be opened, and one that cannot be searched.
    for mode in [0o000, 0o400] {
        set_mode(&within, mode);
        let (code, result, stderr) = list_without_privileges(store);
        assert_eq!(code, 0, "{stderr}");
        let problems = result["problems"].to_string();
        let named = "v2/theirs (a folder that cannot be read)";
        assert!(problems.contains(named), "{problems}");
        assert_eq!(result["latest_revision"], LAST);
    }
    set_mode(&within, 0o700);
    let ours = bucket.path().join("v2");
    for mode in [0o000, 0o400] {
        set_mode(&ours, mode);
        let (code, result, stderr) = list_without_privileges(store);
        set_mode(&ours, 0o700);
        assert_eq!(code, 77, "{stderr}");
        let message = result["message"].as_str().unwrap();
        assert!(message.contains(text(&ours)), "{message}");
        assert!(message.contains("--file-mode"), "{message}");
    }
}

/// A bucket that is mounted has neither hard links nor renames that keep an existing file. Snapshots get their names there,
/// and nothing is a lock.
#[test]
fn a_folder_without_hard_links_takes_snapshots_and_no_locks() {
    let program = deltafold();
    let run = |args: &[&str]| {
        let mut command = Command::new(tools::nolinks());
        command.arg(program.get_program()).args(args);
        run_json(command.args(["--output", "json"]))
    };
    let own = copy_fixture("kubernetes");
    let (own, folder) = (text(own.path()), scratch::folder().unwrap());
    let target = folder.path().join("target");
    let target = text(&target);
    for (args, expected) in [
        (&["compact", "--store", own][..], "Succeeded"),
        (&["copy", "--from", own, "--to", target], "Succeeded"),
        (&["copy", "--from", own, "--to", target], "NothingToDo"),
        (
            &["verify", "--store", target, "--level", "checksums"],
            "Succeeded",
        ),
    ] {
        let (code, json, log) = run(args);
        assert_eq!(
            (code, json["status"].as_str()),
            (0, Some(expected)),
            "{args:?}: {json:#}\n{log}"
        );
    }
    let (code, json, log) = run(&["store", "check", "--store", target]);
    assert_eq!(code, 0, "{json:#}\n{log}");
    let steps = json["checks"].as_array().unwrap().iter();
    let lacking: Vec<&Value> = steps.filter(|check| check["state"] == "Lacking").collect();
    assert_eq!(lacking[0]["ability"], "Lock", "{json:#}");
    let collect = [
        "gc",
        "--store",
        target,
        "--policy",
        "limit",
        "--limit",
        "1",
        "--apply",
        "--restorable-window",
        "0s",
    ];
    let (code, json, _) = run(&collect);
    let message = json["message"].as_str().unwrap();
    assert!(
        code == 78 && message.contains("--single-writer"),
        "{json:#}"
    );
    let (code, json, log) = run(&[&collect[..], &["--single-writer"]].concat());
    assert_eq!(code, 0, "{json:#}\n{log}");
    let staging = fs::read_dir(Path::new(target).join("deltafold-staging")).unwrap();
    assert_eq!(staging.count(), 0);
}
