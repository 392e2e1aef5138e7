//! Restores that fail: stores that fail at every call, targets without space or permission, targets that are
//! occupied or something else. What was there is untouched, and nothing is left behind.

use crate::support::disk::{on_a_small_disk, with_small_files, wrapped};
use crate::support::etcd::{Etcd, EtcdVersion};
use crate::support::faults::{Call, Fault, FaultStore, PlannedFault, at, every_call_fails};
use crate::support::history::Compression;
use crate::support::made_backups::{BASE, Bucket, FIXTURE, LAST, Objects, in_memory};
use crate::support::member::{
    Stamp, assert_whole, cut, debris, files, flip, hash_of, segment, stamps, write_files,
};
use crate::support::tiny_backup::small_bucket;
use crate::support::{
    self, bucket_store, copy_fixture, deltafold, expected, restore, run_json, scratch, succeed,
};
use deltafold::ops::report::Report;
use deltafold::ops::restore::{BackupLocation, NamedBackup, Options, PlainTarget, Restored, run};
use deltafold::prefix::identity::IDENTITY;
use deltafold::store::exclude::ExcludeTags;
use deltafold::{Error, Reason};
use object_store::ObjectStore;
use object_store::memory::InMemory;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;
use tokio::runtime::Runtime;

// Through the library, with a store that fails.

struct InMemoryBucket {
    rt: Runtime,
    inner: Arc<InMemory>,
}

impl InMemoryBucket {
    fn new(objects: &Objects) -> Self {
        let rt = Runtime::new().unwrap();
        let inner = in_memory(objects);
        InMemoryBucket { rt, inner }
    }

    fn faults(&self, strikes: Vec<PlannedFault>) -> FaultStore {
        let inner: Arc<dyn ObjectStore> = self.inner.clone();
        FaultStore::new(inner, strikes)
    }

    fn restore(&self, faults: &FaultStore, options: &Options) -> Result<Report<Restored>, Error> {
        let store = bucket_store(&self.rt, faults.clone(), ExcludeTags::metadata());
        faults.cancels(store.cancel());
        let cancel = store.cancel().clone();
        let ctx = support::context(store, 2);
        let file = options.to_snapshot.clone().map(PlainTarget::File);
        let backup = NamedBackup::from(BackupLocation::Prefix(ctx));
        run(&[backup], options, file.as_ref(), &cancel)
    }
}

fn into(data_dir: &Path, wal_dir: Option<&Path>) -> Options {
    Options {
        data_dir: Some(data_dir.to_owned()),
        wal_dir: wal_dir.map(Path::to_owned),
        ..Options::default()
    }
}

/// The lock of a follower.
const FOLLOWER: &str = "deltafold-locks/follow.json";

/// Returns the allowed reasons for a fault; `None`: the restore must succeed.
fn reasons(call: Call, fault: Fault, again: bool) -> Option<Vec<Reason>> {
    let reason = match (call, fault) {
        (_, Fault::Hang) => Reason::Terminated,
        (_, Fault::Denied) => Reason::PermissionDenied,
        (Call::List, Fault::NotFound) => Reason::NoSnapshots,
        // No tags.
        (Call::Head, Fault::NotFound) if !again => return None,
        (_, Fault::NotFound | Fault::Gone) => Reason::SnapshotVanished,
        (Call::Body, Fault::Flipped) => {
            let bad = Reason::ALL.iter().copied().filter(|r| r.is_bad_data());
            return Some(bad.collect());
        }
        _ => Reason::StoreUnreachable,
    };
    Some(vec![reason])
}

#[test]
fn every_call_of_a_restore_fails_in_every_way() {
    let objects = small_bucket(4096, Compression::Gzip);
    let clean = InMemoryBucket::new(&objects);
    let root = scratch::folder().unwrap();
    let (data, wal, file) = (
        root.path().join("a/data"),
        root.path().join("b/wal"),
        root.path().join("plain.db"),
    );
    let faults = clean.faults(Vec::new());
    let outcome = clean.restore(&faults, &into(&data, None)).unwrap();
    let hash = outcome.hash_kv.unwrap();
    assert_whole(&data, None, hash, "a clean restore");
    fs::remove_dir_all(root.path().join("a")).unwrap();

    let targets = [
        into(&data, None),
        into(&data, Some(&wal)),
        Options {
            to_snapshot: Some(file),
            ..Options::default()
        },
    ];
    let mut failed = 0;
    every_call_fails(&faults, |strike| {
        let mut has_failed = false;
        for (target, to) in targets.iter().enumerate() {
            let what = format!("{strike:?}, target {target}");
            let bucket = InMemoryBucket::new(&objects);
            let result = bucket.restore(&bucket.faults(vec![strike.planned]), to);
            let reasons = match strike.path.as_str() {
                // The listing of the whole prefix is refused: the folders in it are listed.
                "" if strike.call == Call::List && strike.fault == Fault::Denied => None,
                // An unreadable identity is only worth a warning.
                IDENTITY => None,
                // So is a lock: it only names a follower.
                FOLLOWER if strike.fault != Fault::Hang => None,
                _ => reasons(strike.call, strike.fault, strike.is_again),
            };
            match (result, reasons) {
                (Ok(outcome), None) => assert_eq!(outcome.hash_kv, Some(hash), "{what}"),
                (Err(e), Some(reasons)) => {
                    (failed, has_failed) = (failed + 1, true);
                    let reason = e.reason();
                    assert!(reasons.contains(&reason), "{what}: {e} [{reason}]");
                    // Not even a folder that it created.
                    let left: Vec<_> = stamps(root.path()).into_keys().collect();
                    assert_eq!(left, [""], "{what}");
                }
                (Ok(_), Some(_)) => panic!("{what} was not noticed"),
                (Err(e), None) => panic!("{what}: {e} [{}]", e.reason()),
            }
            for entry in fs::read_dir(root.path()).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true => fs::remove_dir_all(path).unwrap(),
                    false => fs::remove_file(path).unwrap(),
                }
            }
        }
        Some(has_failed)
    });
    assert!(failed > 60, "{failed}: hardly a fault struck");
}

/// Folding takes minutes: a member that appears there meanwhile is not replaced.
#[test]
fn a_member_that_appears_while_a_restore_runs() {
    let bucket = InMemoryBucket::new(&small_bucket(4096, Compression::Gzip));
    for (name, own_wal) in [("data/member/snap/db", false), ("wal/0-0.wal", true)] {
        let root = scratch::folder().unwrap();
        let (data, wal) = (root.path().join("data"), root.path().join("wal"));
        let path = root.path().join(name);
        let faults = bucket.faults(vec![at(Call::Get, 1, Fault::Meanwhile)]);
        let appears = path.clone();
        faults.meanwhile(move || {
            fs::create_dir_all(appears.parent().unwrap()).unwrap();
            fs::write(&appears, "a new member's").unwrap();
        });
        let to = into(&data, own_wal.then_some(wal.as_path()));
        let e = bucket.restore(&faults, &to).unwrap_err();
        assert_eq!(e.reason(), Reason::TargetExists, "{e}");
        let left = files(root.path());
        assert_eq!(left.keys().collect::<Vec<_>>(), [name]);
        assert_eq!(debris(root.path()), [""; 0]);
        assert_eq!(fs::read(path).unwrap(), b"a new member's");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_etcd_that_is_started_while_a_restore_runs() {
    let root = scratch::folder().unwrap();
    let data = root.path().join("data");
    let etcd: Arc<std::sync::Mutex<Option<Etcd>>> = Arc::default();
    let (started, dir) = (etcd.clone(), data.clone());
    tokio::task::spawn_blocking(move || {
        let bucket = InMemoryBucket::new(&small_bucket(4096, Compression::Gzip));
        let faults = bucket.faults(vec![at(Call::Get, 1, Fault::Meanwhile)]);
        let there = dir.clone();
        faults.meanwhile(move || {
            *started.lock().unwrap() = Some(Etcd::start(EtcdVersion::V3_6, &there));
        });
        let e = bucket.restore(&faults, &into(&dir, None)).unwrap_err();
        assert_eq!(e.reason(), Reason::TargetInUse, "{e}");
    })
    .await
    .unwrap();
    let etcd = etcd.lock().unwrap().take().unwrap();
    etcd.client()
        .await
        .put("still", "serving", None)
        .await
        .unwrap();
    assert_eq!(debris(&data), [""; 0]);
}

// Through the program.

/// The fixture's backup, and a damaged member with an older state.
struct Bench {
    store: TempDir,
    root: TempDir,
    data: PathBuf,
}

impl Bench {
    fn empty() -> Self {
        let root = scratch::folder_named("restore-").unwrap();
        Bench {
            store: copy_fixture(FIXTURE),
            data: root.path().join("data"),
            root,
        }
    }

    fn with_damaged_member() -> Self {
        let bench = Self::empty();
        let (code, _, stderr) = restore(bench.store.path(), &bench.data, &["--revision", "1499"]);
        assert_eq!(code, 0, "{stderr}");
        cut(&bench.data.join("member/snap/db"), 100_000);
        // As short as possible: a segment is mostly zeros.
        cut(&segment(&bench.data.join("member/wal")), 16 << 10);
        fs::write(bench.data.join("notes.txt"), "somebody's").unwrap();
        bench
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut c = deltafold();
        c.args(["restore", "--output", "json", "--store"]);
        c.arg(self.store.path()).arg("--data-dir").arg(&self.data);
        c.args(args);
        c
    }

    fn hash(&self) -> u32 {
        let rows = expected(FIXTURE).hash_kv;
        rows.iter().find(|row| row.revision == LAST).unwrap().hash
    }

    /// Returns every file with all its metadata, and the names of folders: staging in a folder changes the
    /// folder's own times.
    fn stamps(&self) -> Vec<(String, Option<Stamp>)> {
        let all = stamps(self.root.path()).into_iter();
        let of = |(name, stamp)| {
            let is_folder = self.root.path().join(&name).is_dir();
            (name, (!is_folder).then_some(stamp))
        };
        all.map(of).collect()
    }

    /// Asserts that a restore fails and touches nothing. Returns the message.
    #[track_caller]
    fn refuses(&self, args: &[&str], code: i32, reason: &str) -> String {
        let before = self.stamps();
        let (got, json, stderr) = run_json(&mut self.command(args));
        let wanted = (code, Some(reason));
        assert_eq!((got, json["reason"].as_str()), wanted, "{args:?}: {stderr}");
        assert_eq!(json["status"], "Failed");
        assert_eq!(self.stamps(), before, "{args:?}");
        json["message"].as_str().unwrap().to_owned()
    }

    #[track_caller]
    fn succeeds(&self, args: &[&str]) -> Value {
        let json = succeed(&mut self.command(args));
        assert_whole(&self.data, None, self.hash(), &format!("{args:?}"));
        assert_eq!(debris(self.root.path()), [""; 0]);
        json
    }
}

const IF_NEEDED: [&str; 2] = ["--if-needed", "sanity"];

#[test]
fn no_room_in_the_target() {
    let bench = Bench::with_damaged_member();
    let before = files(bench.root.path());
    let elsewhere = scratch::folder().unwrap();
    let probe = Bench::empty();
    let size = probe.succeeds(&[])["database_bytes"].as_u64().unwrap();
    let temp = elsewhere.path().to_str().unwrap();
    let args = [&IF_NEEDED[..], &["--temp-dir", temp]].concat();
    let job = bench.command(&args);
    let there: u64 = before
        .keys()
        .map(|name| fs::metadata(bench.root.path().join(name)).unwrap().len())
        .sum();
    // Almost nothing; a half; not quite enough.
    for room in [32 << 10, size / 2, size - (64 << 10)] {
        let kib = (there + room) / 1024 + 16;
        let (code, json, stderr, left) = on_a_small_disk(bench.root.path(), kib, &job);
        assert_eq!(
            (code, &json["reason"]),
            (74, &"NoSpace".into()),
            "{room}: {stderr}"
        );
        let names: Vec<_> = left.keys().collect();
        assert_eq!(names, before.keys().collect::<Vec<_>>(), "{room}");
        for (name, bytes) in &left {
            let same = fs::read(bench.root.path().join(name)).unwrap() == *bytes;
            assert!(same, "{room}: {name}");
        }
    }
    // Inside the database, in its last page, and in the WAL, which is as long as etcd's but takes no space.
    for limit in [size / 2, size - 512, size + 4096, 60_000_000] {
        let (code, json, stderr) = with_small_files(limit, &job);
        assert_eq!(
            (code, &json["reason"]),
            (74, &"Io".into()),
            "{limit}: {stderr}"
        );
        assert!(files(bench.root.path()) == before, "{limit}");
        assert_eq!(debris(bench.root.path()), [""; 0], "{limit}");
    }
    let done = bench.succeeds(&args);
    assert_eq!(done["kept_aside"].as_array().unwrap().len(), 1);
}

#[test]
fn no_room_for_a_plain_snapshot() {
    let bench = Bench::empty();
    let file = bench.root.path().join("plain.db");
    let mut job = deltafold();
    job.args(["restore", "--output", "json", "--store"])
        .arg(bench.store.path());
    job.arg("--to-snapshot").arg(&file);
    for limit in [4096, 100_000] {
        let (code, json, stderr) = with_small_files(limit, &job);
        assert_eq!(
            (code, &json["reason"]),
            (74, &"Io".into()),
            "{limit}: {stderr}"
        );
        assert_eq!(stamps(bench.root.path()).len(), 1);
    }
    let (code, json, stderr, left) = on_a_small_disk(bench.root.path(), 64, &job);
    assert_eq!((code, &json["reason"]), (74, &"NoSpace".into()), "{stderr}");
    assert!(left.is_empty());
    succeed(&mut job);
}

/// Returns a command of a user without privileges, even if the tests run as root.
fn without_privileges(command: &Command) -> Command {
    match rustix::process::geteuid().is_root() {
        true => wrapped(
            &["setpriv", "--bounding-set=-all", "--inh-caps=-all"],
            &[],
            command,
        ),
        false => wrapped(&["env"], &[], command),
    }
}

/// Changes the mode of a path and restores it when dropped, so that the folder can be removed.
struct Mode(PathBuf, u32);

impl Mode {
    fn set(path: &Path, mode: u32) -> Self {
        let old = fs::metadata(path).unwrap().permissions().mode();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        Mode(path.to_owned(), old)
    }
}

impl Drop for Mode {
    fn drop(&mut self) {
        fs::set_permissions(&self.0, fs::Permissions::from_mode(self.1)).unwrap();
    }
}

#[test]
fn no_right_to_write_or_to_look() {
    let refused = |bench: &Bench, args: &[&str], protected: &Path, mode: u32| {
        let before = files(bench.root.path());
        let names: Vec<_> = stamps(bench.root.path()).into_keys().collect();
        let guard = Mode::set(protected, mode);
        let (code, json, stderr) = run_json(&mut without_privileges(&bench.command(args)));
        drop(guard);
        let got = (code, json["reason"].as_str());
        let what = format!("{args:?}, {} is {mode:o}: {stderr}", protected.display());
        assert_eq!(got, (77, Some("PermissionDenied")), "{what}");
        assert!(files(bench.root.path()) == before, "{what}");
        let now: Vec<_> = stamps(bench.root.path()).into_keys().collect();
        assert_eq!(now, names, "{what}");
    };
    let bench = Bench::empty();
    refused(&bench, &[], bench.root.path(), 0o555);
    let wal = bench.root.path().join("disk/deep/wal");
    let wal_text = wal.to_str().unwrap();
    fs::create_dir(bench.root.path().join("disk")).unwrap();
    refused(
        &bench,
        &["--wal-dir", wal_text],
        &bench.root.path().join("disk"),
        0o555,
    );
    fs::create_dir(&bench.data).unwrap();
    refused(&bench, &[], &bench.data, 0o555);

    let bench = Bench::with_damaged_member();
    let data = &bench.data;
    refused(&bench, &IF_NEEDED, data, 0o555);
    // What cannot be read is not known to be damaged.
    for path in ["member", "member/snap", "member/wal"] {
        refused(&bench, &IF_NEEDED, &data.join(path), 0o000);
    }
    refused(&bench, &IF_NEEDED, &data.join("member/snap/db"), 0o000);
    refused(
        &bench,
        &IF_NEEDED,
        &segment(&data.join("member/wal")),
        0o000,
    );
    bench.succeeds(&IF_NEEDED);
}

#[test]
fn a_target_that_is_something_else() {
    let bench = Bench::empty();
    fs::write(&bench.data, "a file").unwrap();
    for args in [&[][..], &IF_NEEDED] {
        bench.refuses(args, 74, "Io");
    }
    fs::remove_file(&bench.data).unwrap();
    let file = bench.root.path().join("file");
    fs::write(&file, "a file").unwrap();
    let below = Bench {
        data: file.join("data"),
        ..bench
    };
    for args in [&[][..], &IF_NEEDED] {
        below.refuses(args, 74, "Io");
    }
    // A WAL directory that is a file.
    let bench = Bench::empty();
    let file = bench.root.path().join("file");
    fs::write(&file, "a file").unwrap();
    bench.refuses(&["--wal-dir", file.to_str().unwrap()], 74, "Io");
    // A member that is a file.
    fs::create_dir(&bench.data).unwrap();
    fs::write(bench.data.join("member"), "a file").unwrap();
    bench.refuses(&[], 73, "TargetExists");
    let done = bench.succeeds(&IF_NEEDED);
    let kept = done["kept_aside"][0].as_str().unwrap();
    assert_eq!(fs::read(kept).unwrap(), b"a file");
}

#[test]
fn a_member_that_is_half_there() {
    for there in [
        &["member/snap/db"][..],
        &["member/wal/0000000000000000-0000000000000000.wal"],
        &["member/snap/0000000000000001-0000000000000001.snap"],
        &["member/snap/db.tmp.1"],
        &["member/wal/0.tmp", "member/snap/db"],
    ] {
        let bench = Bench::empty();
        for name in there {
            let path = bench.data.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "half").unwrap();
        }
        let message = bench.refuses(&[], 73, "TargetExists");
        assert!(message.contains("if-needed"), "{message}");
        let done = bench.succeeds(&IF_NEEDED);
        assert_eq!(done["decision"]["action"], "Restore");
        let kept = PathBuf::from(done["kept_aside"][0].as_str().unwrap());
        for name in there {
            let name = name.strip_prefix("member/").unwrap();
            assert_eq!(fs::read(kept.join(name)).unwrap(), b"half");
        }
    }
    // Empty folders are not a member.
    let bench = Bench::empty();
    for folder in ["member/snap", "member/wal", "lost+found"] {
        fs::create_dir_all(bench.data.join(folder)).unwrap();
    }
    let done = bench.succeeds(&[]);
    assert_eq!(done["kept_aside"], serde_json::json!([]));
    assert!(bench.data.join("lost+found").is_dir());
    // A WAL directory that is not empty is refused, even if a restore is needed.
    let bench = Bench::empty();
    let wal = bench.root.path().join("wal");
    fs::create_dir(&wal).unwrap();
    let segment = wal.join("0000000000000000-0000000000000000.wal");
    fs::write(&segment, "half").unwrap();
    let args = ["--wal-dir", wal.to_str().unwrap()];
    let if_needed = [&args[..], &IF_NEEDED].concat();
    let moved = bench.root.path().join("wal.old");
    for args in [&args[..], &if_needed, &[&args[..], &["--dry-run"]].concat()] {
        let message = bench.refuses(args, 73, "TargetExists");
        let mv = format!("mv {} {}", wal.display(), moved.display());
        assert!(message.contains(&mv), "{message}");
    }
    fs::rename(&wal, &moved).unwrap();
    let done = succeed(&mut bench.command(&if_needed));
    assert_whole(&bench.data, Some(&wal), bench.hash(), "segments alone");
    assert_eq!(done["kept_aside"], serde_json::json!([]));
}

/// Runs every restore that must be refused beside an existing member: it stays as it is, to the nanosecond.
#[test]
fn an_existing_member_is_not_touched() {
    let bench = Bench::empty();
    bench.succeeds(&["--revision", &LAST.to_string()]);
    let before = stamps(bench.root.path());
    bench.refuses(&[], 73, "TargetExists");
    bench.refuses(&["--dry-run"], 73, "TargetExists");
    assert_eq!(stamps(bench.root.path()), before);
    for look in ["sanity", "full"] {
        for args in [
            &["--if-needed", look][..],
            &["--if-needed", look, "--dry-run"],
        ] {
            let json = succeed(&mut bench.command(args));
            assert_eq!(json["status"], "NothingToDo");
            assert_eq!(stamps(bench.root.path()), before, "{args:?}");
        }
    }
    let damaged = Bench::with_damaged_member();
    let before = stamps(damaged.root.path());
    for look in ["sanity", "full"] {
        let args = ["--if-needed", look, "--dry-run"];
        let json = succeed(&mut damaged.command(&args));
        assert_eq!(json["decision"]["action"], "Restore", "{json}");
        assert_eq!(stamps(damaged.root.path()), before, "{args:?}");
    }
    // Without a member, a dry run creates nothing.
    let nothing = Bench::empty();
    let (code, json, _) = run_json(&mut nothing.command(&["--dry-run"]));
    assert_eq!((code, &json["status"]), (0, &"Succeeded".into()));
    assert_eq!(stamps(nothing.root.path()).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_a_running_etcd_uses() {
    for version in EtcdVersion::ALL {
        let bench = Bench::empty();
        bench.succeeds(&[]);
        let etcd = Etcd::start(version, &bench.data);
        for args in [
            &[][..],
            &["--if-needed", "sanity"],
            &["--if-needed", "full"],
            &["--dry-run"],
        ] {
            let (code, json, stderr) = run_json(&mut bench.command(args));
            let got = (code, json["reason"].as_str());
            assert_eq!(
                got,
                (73, Some("TargetInUse")),
                "{version} {args:?}: {stderr}"
            );
        }
        let mut client = etcd.client().await;
        client.put("still", "serving", None).await.unwrap();
        assert_eq!(etcd.revision().await, LAST + 1, "{version}");
        drop(etcd);
        // It is not a member any more.
        bench.refuses(&[], 73, "TargetExists");
    }
}

#[test]
fn damaged_snapshots_leave_nothing() {
    let names = ["Full-", "Incr-"];
    for name in names {
        let bench = Bench::empty();
        let v2 = bench.store.path().join("v2");
        let entries = fs::read_dir(v2).unwrap().map(|e| e.unwrap().path());
        let mut paths: Vec<_> = entries
            .filter(|p| p.file_name().unwrap().to_str().unwrap().starts_with(name))
            .collect();
        paths.sort();
        for path in paths {
            let good = fs::read(&path).unwrap();
            flip(&path, good.len() as u64 / 2);
            let message = bench.refuses(&[], 65, "CorruptSnapshot");
            let file = path.file_name().unwrap().to_str().unwrap();
            assert!(message.contains(file), "{message}");
            // Something was there before, and is there afterwards.
            fs::create_dir(&bench.data).unwrap();
            bench.refuses(&[], 65, "CorruptSnapshot");
            fs::remove_dir(&bench.data).unwrap();
            fs::write(&path, good).unwrap();
        }
        bench.succeeds(&[]);
    }
    let bench = Bench::with_damaged_member();
    let before = files(bench.root.path());
    fs::remove_dir_all(bench.store.path().join("v2")).unwrap();
    bench.refuses(&IF_NEEDED, 66, "NoSnapshots");
    assert!(files(bench.root.path()) == before);
}

#[test]
fn a_gap_is_told_and_a_state_before_it_restored() {
    let bucket = Bucket::with_base();
    bucket.delta(BASE + 1, 1000, 6);
    bucket.delta(1201, LAST, 9);
    let bench = Bench::empty();
    let run = |args: &[&str]| restore(bucket.path(), &bench.data, args);
    let (code, json, stderr) = run(&[]);
    assert_eq!(
        (code, &json["reason"]),
        (65, &"RevisionGap".into()),
        "{stderr}"
    );
    assert!(json["message"].as_str().unwrap().contains("1001"), "{json}");
    assert_eq!(stamps(bench.root.path()).len(), 1);
    let (code, json, stderr) = run(&["--revision", "1000"]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(json["restored_revision"], 1000);
}

#[test]
fn what_the_bucket_does_not_cover() {
    let bench = Bench::empty();
    for revision in ["1", "9999"] {
        let message = bench.refuses(&["--revision", revision], 66, "OutOfRange");
        // From the revision at which the base was compacted.
        let ranges = format!("among those covered (346 to {LAST})");
        assert!(message.contains(&ranges), "{revision}: {message}");
    }
    let message = bench.refuses(&["--time", "1999-01-01T00:00:00Z"], 66, "OutOfRange");
    assert!(message.contains("2026-11-"), "{message}");
    let message = bench.refuses(&["--timeline", "nowhere"], 66, "NoSuchTimeline");
    assert!(message.contains("nowhere"), "{message}");
}

#[test]
fn arguments_that_make_no_sense() {
    let bench = Bench::empty();
    let store = bench.store.path().to_str().unwrap();
    let inside = bench.data.join("member/elsewhere");
    let inside = inside.to_str().unwrap();
    let file = bench.root.path().join("no-folder/plain.db");
    let file = file.to_str().unwrap();
    let cases: &[&[&str]] = &[
        &["--bump-revision", "5"],
        &["--mark-compacted"],
        &["--bump-revision", "0", "--mark-compacted"],
        &["--bump-revision", "9223372036854775807", "--mark-compacted"],
        &["--initial-cluster", "default"],
        &["--initial-cluster", ""],
        &["--initial-cluster", "other=http://localhost:2380"],
        &["--initial-cluster", "default=localhost:2380"],
        &["--initial-cluster", "default=http://localhost:1"],
        &["--initial-advertise-peer-urls", "nonsense"],
        &["--name", ""],
        &["--wal-dir", inside],
        &["--revision", "5", "--time", "2026-11-21T00:00:00Z"],
        &["--revision", "0"],
        &["--time", "tomorrow"],
        &["--snapshot", store],
        &["--to-snapshot", file],
        &["--if-needed", "somewhat"],
        &["--leases", "sell"],
        &["--lease-ttl", "0s"],
        &["--keep-history", "some"],
    ];
    for args in cases {
        bench.refuses(args, 64, "Usage");
    }
    // No target, and a plain file in a folder that does not exist.
    for args in [&[][..], &["--to-snapshot", file]] {
        let mut c = deltafold();
        c.args(["restore", "--output", "json", "--store", store])
            .args(args);
        let (code, json, stderr) = run_json(&mut c);
        assert_eq!(
            (code, &json["reason"]),
            (64, &"Usage".into()),
            "{args:?}: {stderr}"
        );
    }
    assert_eq!(stamps(bench.root.path()).len(), 1);
}

/// Even within the same second, each replaced member is kept under its own name.
#[test]
fn what_was_kept_is_never_replaced() {
    let bench = Bench::with_damaged_member();
    let bad = files(&bench.data.join("member"));
    for round in 1..=3 {
        bench.succeeds(&IF_NEEDED);
        let entries = fs::read_dir(&bench.data).unwrap();
        let names = entries.map(|e| e.unwrap().file_name().into_string().unwrap());
        let kept: Vec<_> = names.filter(|n| n.starts_with("member.bad-")).collect();
        assert_eq!(kept.len(), round, "{kept:?}");
        for name in kept {
            assert!(files(&bench.data.join(&name)) == bad, "{name}");
        }
        fs::remove_dir_all(bench.data.join("member")).unwrap();
        write_files(&bench.data.join("member"), &bad);
    }
    assert!(hash_of(&bench.data).is_err());
}
