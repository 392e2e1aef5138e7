//! Restores that are ended at random moments, then a rerun: the old member is there, or the new one, or the
//! rerun completes it. The replaced member is kept byte for byte, and nothing else is left.

use crate::support::disk::{assert_was_mounted, in_a_mount_namespace};
use crate::support::killed::{self, Ended};
use crate::support::made_backups::{BASE, Bucket, LAST};
use crate::support::member::{
    Files, assert_whole, debris, files, flip, hash_of, segment, write_files,
};
use crate::support::scratch;
use crate::support::{deltafold, run_json, seed, succeed};
use deltafold::datadir::wal;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The target of a restore, in a folder of its own: `data`, and `wal` if the WAL is separate.
struct Site {
    root: TempDir,
    bucket: Bucket,
    args: Vec<&'static str>,
    wal_dir: bool,
    old: Files,
    /// HashKV of the restored state.
    hash: u32,
}

/// A file of the old state that no restore may touch.
const FOREIGN: &str = "data/notes.txt";

impl Site {
    fn new(args: &[&'static str], wal_dir: bool, is_there: bool) -> Self {
        let bucket = Bucket::with_base();
        bucket.delta(BASE + 1, LAST, 6);
        // So that writing takes some time.
        bucket.noise_delta(6);
        let mut site = Site {
            root: scratch::folder_named("restored-").unwrap(),
            bucket,
            args: Vec::new(),
            wal_dir,
            old: Files::new(),
            hash: 0,
        };
        let clean = succeed(&mut site.command());
        site.hash = clean["hash_kv"].as_u64().unwrap() as u32;
        site.clear();
        if is_there {
            // An older state with a damaged record.
            succeed(site.command().args(["--revision", "1499"]));
            damage_a_record(&site.data().join("member/snap/db"));
            match site.own_wal() {
                // It must be empty, so only the database and the .snap are left.
                Some(wal) => std::fs::remove_dir_all(wal).unwrap(),
                None => crate::support::member::cut(&segment(&site.wal()), 64 << 10),
            }
            std::fs::write(site.root.path().join(FOREIGN), "somebody's").unwrap();
        }
        site.args = args.to_vec();
        site.old = files(site.root.path());
        site
    }

    fn data(&self) -> PathBuf {
        self.root.path().join("data")
    }

    /// Returns the WAL directory.
    fn wal(&self) -> PathBuf {
        match self.own_wal() {
            Some(wal) => wal,
            None => self.data().join("member/wal"),
        }
    }

    fn own_wal(&self) -> Option<PathBuf> {
        self.wal_dir.then(|| self.root.path().join("wal"))
    }

    fn command(&self) -> Command {
        let mut c = deltafold();
        c.args(["restore", "--output", "json", "--store"]);
        c.arg(self.bucket.path()).arg("--data-dir").arg(self.data());
        if let Some(wal) = self.own_wal() {
            c.arg("--wal-dir").arg(wal);
        }
        c.args(&self.args);
        c
    }

    fn clear(&self) {
        for dir in [Some(self.data()), self.own_wal()].into_iter().flatten() {
            if dir.exists() {
                std::fs::remove_dir_all(dir).unwrap();
            }
        }
    }

    /// Creates the old state again.
    fn reset(&self) {
        self.clear();
        write_files(self.root.path(), &self.old);
    }

    /// Waits for the moment to kill a restore: any moment, after it has begun to write, or while it puts the
    /// new member in place, which SIGTERM does not interrupt.
    fn moment(&self, job: &mut Child, rng: &mut fastrand::Rng, whole: Duration, signal: Signal) {
        let staging = self.data().join(".deltafold-restore");
        let (awaited, longest) = match rng.usize(..if signal == Signal::TERM { 3 } else { 4 }) {
            0 => (None, whole),
            1 => (Some(staging), whole / 2),
            // The segment is written last. Single syncs may take longer than that, all of them together never do.
            _ => {
                let wal = self.own_wal().map(|wal| wal.join(".deltafold-restore"));
                let wal = wal.unwrap_or(staging.join("member/wal"));
                let segment = wal.join("0000000000000000-0000000000000000.wal");
                (Some(segment), Duration::from_millis(10))
            }
        };
        if let Some(path) = awaited {
            killed::wait_until(job, || path.exists());
        }
        std::thread::sleep(longest.mul_f64(rng.f64()));
    }

    /// Returns how far a killed restore came, judged by what it left.
    fn phase(&self) -> &'static str {
        let had_member = self.old.keys().any(|name| name.starts_with("data/member/"));
        let is_gone = had_member && !self.data().join("member").exists();
        let is_in_place = hash_of(&self.data()).ok() == Some(self.hash);
        match self.data().join(".deltafold-restore").exists() {
            true if is_in_place => "in place, not tidied up",
            true if is_gone || self.has_segment() => "between the WAL and the member",
            true => "writing",
            false if self.is_new() => "done",
            false => "before it wrote",
        }
    }

    /// Returns whether the separate WAL directory holds a segment.
    fn has_segment(&self) -> bool {
        let paths = self.own_wal().map(|wal| wal::segment_paths(&wal).unwrap());
        paths.is_some_and(|paths| !paths.is_empty())
    }

    fn is_old(&self) -> bool {
        files(self.root.path()) == self.old
    }

    /// Returns whether the new member is in place, everything else is there byte for byte, and the replaced
    /// member is kept.
    fn is_new(&self) -> bool {
        if hash_of(&self.data()).ok() != Some(self.hash) {
            return false;
        }
        let mut kept = Files::new();
        let mut places = BTreeMap::new();
        for (path, content) in files(self.root.path()) {
            let (dir, rest) = path.split_once('/').unwrap();
            let aside = rest.split_once('/').and_then(|(folder, name)| {
                let is_kept = dir == "data" && folder.starts_with("member.bad-");
                is_kept.then(|| format!("data/member/{name}"))
            });
            if let Some(before) = aside {
                places.insert(rest.split_once('/').unwrap().0.to_owned(), ());
                kept.insert(before, content);
            } else if path == FOREIGN {
                kept.insert(path, content);
            }
        }
        let folders = usize::from(!self.old.is_empty());
        kept == self.old && places.len() == folders
    }

    #[track_caller]
    fn assert_new(&self, what: &str) {
        let found = files(self.root.path());
        assert!(self.is_new(), "{what}: {:?}", found.keys());
        assert_whole(&self.data(), self.own_wal().as_deref(), self.hash, what);
        assert_eq!(debris(self.root.path()), [""; 0], "{what}");
    }
}

/// Flips a bit of a record's value, which only a reader of its page notices.
fn damage_a_record(db: &Path) {
    let bytes = std::fs::read(db).unwrap();
    let at = bytes
        .windows(4)
        .rposition(|w| w == b"/reg" || w == b"key/" || w == b"app/");
    let at = at.unwrap_or(bytes.len() / 2);
    flip(db, at as u64);
}

/// Ends restores by a signal; checks after each what is there, and runs again.
fn killed_and_run_again(site: &Site, rounds: usize, signal: Signal) {
    let if_needed = site.args.contains(&"--if-needed");
    site.reset();
    let started = Instant::now();
    let (code, clean, stderr) = run_json(&mut site.command());
    let whole = started.elapsed();
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(clean["hash_kv"], site.hash);
    site.assert_new("a clean run");

    let mut phases = BTreeMap::new();
    let check = |ended: &Ended| {
        let what = &ended.what;
        let phase = site.phase();
        *phases.entry(phase).or_insert(0) += 1;
        match ended.status.code() {
            Some(0) => site.assert_new(what),
            // It has cleaned up.
            Some(143) if signal == Signal::TERM => {
                assert!(site.is_old(), "{what}: {phase}");
                assert_eq!(debris(site.root.path()), [""; 0], "{what}");
            }
            _ => {
                match phase {
                    "before it wrote" => assert!(site.is_old(), "{what}"),
                    "done" => site.assert_new(what),
                    // The staging directory is beside the old member.
                    "writing" => {
                        let mut left = files(site.root.path());
                        left.retain(|path, _| !path.contains("/.deltafold-restore/"));
                        assert!(left == site.old, "{what}: {:?}", left.keys());
                    }
                    _ => {}
                }
            }
        }
        let before = site.is_new() && debris(site.root.path()).is_empty();
        let (mut code, mut again, mut stderr) = run_json(&mut site.command());
        let wal = site.root.path().join("wal");
        let moved = site.root.path().join("wal.old");
        let was_refused = code == 73 && phase.contains("between") && wal.exists();
        if was_refused {
            // As the message says.
            let mv = format!("mv {} {}", wal.display(), moved.display());
            assert!(stderr.contains(&mv), "{what}: {stderr}");
            std::fs::rename(&wal, &moved).unwrap();
            (code, again, stderr) = run_json(&mut site.command());
            std::fs::remove_dir_all(&moved).unwrap();
        }
        let what = format!("{what}, {phase}, then {stderr}");
        match code {
            0 if if_needed && again["status"] == "NothingToDo" => {}
            0 => assert_eq!(again["hash_kv"], site.hash, "{what}"),
            // The killed run had finished, or the rerun completed it.
            73 => {
                let reason = &again["reason"];
                assert!(!if_needed && reason == "TargetExists", "{what}");
                assert!(before || phase.contains("in place"), "{what}");
            }
            _ => panic!("{what}"),
        }
        let status = &again["status"];
        assert!(!before || code == 73 || status == "NothingToDo", "{what}");
        site.assert_new(&what);
        site.reset();
    };
    site.reset();
    let moment = |job: &mut Child, rng: &mut fastrand::Rng, whole| {
        site.moment(job, rng, whole, signal);
    };
    killed::at_random_moments(rounds, signal, whole, || site.command(), moment, check);
    println!("how far they came: {phases:?}");
    if signal == Signal::KILL {
        assert!(
            phases.contains_key("writing"),
            "none was killed while it wrote"
        );
    }
}

const FULL: [&str; 2] = ["--if-needed", "full"];

#[test]
fn sigkill_into_nothing() {
    killed_and_run_again(&Site::new(&[], false, false), 20, Signal::KILL);
}

#[test]
fn sigterm_into_nothing() {
    killed_and_run_again(&Site::new(&[], false, false), 12, Signal::TERM);
}

#[test]
fn sigkill_over_a_damaged_member() {
    killed_and_run_again(&Site::new(&FULL, false, true), 20, Signal::KILL);
}

#[test]
fn sigkill_with_a_wal_directory() {
    killed_and_run_again(&Site::new(&[], true, false), 20, Signal::KILL);
}

#[test]
fn sigkill_over_a_damaged_member_with_a_wal_directory() {
    killed_and_run_again(&Site::new(&FULL, true, true), 20, Signal::KILL);
}

#[test]
fn sigterm_over_a_damaged_member_with_a_wal_directory() {
    killed_and_run_again(&Site::new(&FULL, true, true), 12, Signal::TERM);
}

/// Mounts a file system over `data`, kills a restore there, runs it again, and copies out what is there at the
/// end.
const ON_A_MOUNT_POINT: &str = r#"
data=$1 delay=$2 kept=$3; shift 3
mkdir "$kept/data" && cp -r "$data" "$kept/before" || exit 99
mount -t tmpfs tmpfs "$data" && mkdir "$data/lost+found" && cp -r "$kept/before/." "$data" || exit 99
"$@" > /dev/null & job=$!
sleep "$delay"; kill -KILL $job; wait $job
ls -A "$data/.deltafold-restore" >&2
"$@"; code=$?
cp -r --sparse=always "$data/." "$kept/data" || exit 99
exit $code
"#;

#[test]
fn a_data_directory_that_is_a_mount_point() {
    let mut rng = fastrand::Rng::with_seed(seed());
    for is_there in [false, true] {
        let args: &[&str] = if is_there { &FULL } else { &[] };
        let mut site = Site::new(args, false, is_there);
        site.reset();
        std::fs::create_dir_all(site.data()).unwrap();
        let command = site.command();
        for round in 0..5 {
            let kept = scratch::folder_named("mounted-").unwrap();
            let delay = format!("{:.3}", 0.02 + rng.f64() * 0.6);
            let data = site.data();
            let args = [data.as_os_str(), delay.as_ref(), kept.path().as_os_str()];
            let mut c = in_a_mount_namespace(ON_A_MOUNT_POINT, &args, &command);
            let (code, again, stderr) = run_json(&mut c);
            assert_was_mounted(&again, &stderr);
            let what = format!("round {round}, after {delay} s: {stderr}");
            assert!(
                code == 0 || (code == 73 && !is_there && again["reason"] == "TargetExists"),
                "{what}"
            );
            assert!(kept.path().join("data/lost+found").is_dir(), "{what}");
            let unmounted = std::mem::replace(&mut site.root, kept);
            std::fs::remove_dir_all(site.root.path().join("before")).unwrap();
            site.assert_new(&what);
            site.root = unmounted;
            // Nothing was written beside the mount point.
            assert!(site.is_old(), "{what}");
        }
    }
}
