//! Members of real etcds, sound or damaged in many ways: `--if-needed` restores those that need it, keeps the
//! old member, and leaves sound ones alone. etcd starts on what was judged sound and on what was restored.

use crate::support::etcd::{Etcd, EtcdOptions, EtcdVersion};
use crate::support::made_backups::{Bucket, FIXTURE, LAST, fixture_events, revision};
use crate::support::member::{
    Files, assert_whole, cut, debris, files, flip, segment, stamps, write_files,
};
use crate::support::scratch;
use crate::support::{copy_fixture, deltafold, expected, restore, run_json, without_servers};
use deltafold::datadir::wal;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

const VERSION: EtcdVersion = EtcdVersion::V3_6;

/// Options of an etcd whose database lags behind its WAL because it hardly ever commits.
fn lagging() -> EtcdOptions {
    EtcdOptions {
        args: vec![
            "--backend-batch-interval=1h".into(),
            "--backend-batch-limit=1000000".into(),
        ],
        ..EtcdOptions::default()
    }
}

/// Runs an etcd on a data directory for some puts, then kills it.
async fn live(data_dir: &Path, options: &EtcdOptions, puts: usize, value: &[u8]) {
    let etcd = Etcd::start_with(VERSION, data_dir, options);
    let mut client = etcd.client().await;
    for n in 0..puts {
        let key = format!("lived/{n:04}");
        client.put(key, value, None).await.unwrap();
    }
}

/// Returns a member that was restored from a backup and then served.
async fn lived(store: &Path, args: &[&str], puts: usize) -> Files {
    let folder = scratch::folder().unwrap();
    let data = folder.path().join("data");
    let (code, _, stderr) = restore(store, &data, args);
    assert_eq!(code, 0, "{stderr}");
    live(&data, &lagging(), puts, b"a value").await;
    files(&data)
}

fn hash_of_fixture() -> u32 {
    let rows = expected(FIXTURE).hash_kv;
    rows.iter().find(|row| row.revision == LAST).unwrap().hash
}

/// Returns action and reason of a decision.
fn decided(json: &Value) -> (&str, &str) {
    let field = |name: &str| json["decision"][name].as_str().unwrap_or_default();
    (field("action"), field("reason"))
}

const KEEP: (&str, &str) = ("Keep", "MemberSound");

struct Bench {
    store: PathBuf,
    folder: TempDir,
    data: PathBuf,
}

impl Bench {
    fn new(store: &Path, member: &Files) -> Self {
        let folder = scratch::folder_named("member-").unwrap();
        let data = folder.path().join("data");
        write_files(&data, member);
        Bench {
            store: store.to_owned(),
            folder,
            data,
        }
    }

    fn run(&self, look: &str, args: &[&str]) -> Value {
        let args = [&["--if-needed", look], args].concat();
        let (code, json, stderr) = restore(&self.store, &self.data, &args);
        assert_eq!(code, 0, "{args:?}: {stderr}");
        json
    }

    /// Asserts that a dry run decides this and touches nothing, and that the real run decides the same and does
    /// it.
    fn decides(&self, look: &str, wanted: (&str, &str), what: &str) -> Value {
        let what = format!("{what}, {look}");
        let before = stamps(self.folder.path());
        let dry = self.run(look, &["--dry-run"]);
        assert_eq!(decided(&dry), wanted, "{what}: {dry}");
        assert_eq!(stamps(self.folder.path()), before, "{what}: a dry run");
        let member = files(&self.data.join("member"));
        let json = self.run(look, &[]);
        assert_eq!(decided(&json), wanted, "{what}: {json}");
        let message = json["decision"]["message"].as_str().unwrap();
        assert!(message.len() > 10, "{what}: {message}");
        assert_eq!(debris(self.folder.path()), [""; 0], "{what}");
        match wanted.0 {
            "Keep" => {
                assert_eq!(json["status"], "NothingToDo", "{what}");
                assert_eq!(json["kept_aside"], serde_json::json!([]), "{what}");
                assert!(files(&self.data.join("member")) == member, "{what}");
            }
            _ => {
                assert_eq!(json["status"], "Succeeded", "{what}");
                let kept = json["kept_aside"].as_array().unwrap();
                let kept: Vec<_> = kept
                    .iter()
                    .map(|k| PathBuf::from(k.as_str().unwrap()))
                    .collect();
                assert_eq!(kept.len(), usize::from(!member.is_empty()), "{what}");
                for kept in kept {
                    assert!(files(&kept) == member, "{what}: {}", kept.display());
                }
                assert_whole(&self.data, None, hash_of_fixture(), &what);
            }
        }
        json
    }

    /// Asserts that etcd serves from it and has at least this revision.
    async fn serves(&self, revision: i64, what: &str) {
        let etcd = Etcd::try_start_with(VERSION, &self.data, &EtcdOptions::default());
        let etcd = etcd.unwrap_or_else(|e| panic!("{what}: {e}"));
        let at = etcd.revision().await;
        assert!(at >= revision, "{what}: {at}");
        etcd.client().await.put("after", "it", None).await.unwrap();
    }
}

/// Returns the offset of a value in a database file.
fn find(file: &Path, needle: &[u8]) -> u64 {
    let bytes = fs::read(file).unwrap();
    let at = bytes.windows(needle.len()).rposition(|w| w == needle);
    at.unwrap_or_else(|| panic!("{} does not hold it", file.display())) as u64
}

fn value_at(wanted: i64) -> Vec<u8> {
    use base64::Engine as _;
    let events = fixture_events();
    let values = events.iter().filter(|e| revision(e) <= wanted).rev();
    let mut values = values.filter_map(|e| e["etcdEvent"]["kv"]["value"].as_str());
    let long = values.find(|v| v.len() > 100).unwrap();
    base64::engine::general_purpose::STANDARD
        .decode(long)
        .unwrap()
}

/// Returns the used bytes of a segment.
fn used(segment: &Path) -> u64 {
    let bytes = fs::read(segment).unwrap();
    bytes.iter().rposition(|&b| b != 0).unwrap() as u64 + 1
}

struct Damage {
    name: &'static str,
    sanity: (&'static str, &'static str),
    full: (&'static str, &'static str),
    /// Applied to the data directory.
    done: fn(&Path),
}

fn db(data: &Path) -> PathBuf {
    data.join("member/snap/db")
}

fn log(data: &Path) -> PathBuf {
    segment(&data.join("member/wal"))
}

const DATABASE: (&str, &str) = ("Restore", "DatabaseDamaged");
const WAL: (&str, &str) = ("Restore", "WalDamaged");

const DAMAGES: [Damage; 14] = [
    Damage {
        name: "none",
        sanity: KEEP,
        full: KEEP,
        done: |_| (),
    },
    Damage {
        name: "no data directory",
        sanity: ("Restore", "MemberMissing"),
        full: ("Restore", "MemberMissing"),
        done: |data| fs::remove_dir_all(data).unwrap(),
    },
    Damage {
        name: "no member",
        sanity: ("Restore", "MemberMissing"),
        full: ("Restore", "MemberMissing"),
        done: |data| fs::remove_dir_all(data.join("member")).unwrap(),
    },
    Damage {
        name: "no database",
        sanity: ("Restore", "DatabaseMissing"),
        full: ("Restore", "DatabaseMissing"),
        done: |data| fs::remove_file(db(data)).unwrap(),
    },
    Damage {
        name: "an empty database",
        sanity: DATABASE,
        full: DATABASE,
        done: |data| cut(&db(data), 0),
    },
    Damage {
        name: "a database that is cut",
        sanity: DATABASE,
        full: DATABASE,
        done: |data| cut(&db(data), 200_000),
    },
    Damage {
        name: "a database without its first pages",
        sanity: DATABASE,
        full: DATABASE,
        done: |data| {
            let path = db(data);
            let mut bytes = fs::read(&path).unwrap();
            bytes[..8192].fill(0);
            fs::write(path, bytes).unwrap();
        },
    },
    Damage {
        // etcd does not notice it either.
        name: "a bit of a value flipped",
        sanity: KEEP,
        full: ("Restore", "HashMismatch"),
        done: |data| flip(&db(data), find(&db(data), &value_at(2000))),
    },
    Damage {
        name: "no WAL",
        sanity: ("Restore", "WalMissing"),
        full: ("Restore", "WalMissing"),
        done: |data| fs::remove_dir_all(data.join("member/wal")).unwrap(),
    },
    Damage {
        name: "a bit flipped in the middle of the WAL",
        sanity: WAL,
        full: WAL,
        done: |data| flip(&log(data), find(&log(data), b"lived/0010")),
    },
    Damage {
        name: "an empty segment",
        sanity: WAL,
        full: WAL,
        done: |data| cut(&log(data), 0),
    },
    Damage {
        // The last write was cut short: etcd drops it.
        name: "a torn end of the WAL",
        sanity: KEEP,
        full: KEEP,
        done: |data| cut(&log(data), used(&log(data)) - 5),
    },
    Damage {
        // Without consequences as long as the WAL reaches back to its beginning.
        name: "no .snap",
        sanity: KEEP,
        full: KEEP,
        done: |data| {
            let snap = data.join("member/snap");
            for path in deltafold::datadir::snap::list(&snap).unwrap() {
                fs::remove_file(path).unwrap();
            }
        },
    },
    Damage {
        name: "a WAL in which nothing is committed",
        sanity: WAL,
        full: WAL,
        done: |data| {
            // Its last records are the hard states and the snapshot: cut before the first of them.
            let path = log(data);
            let bytes = fs::read(&path).unwrap();
            let mut at = 0;
            for _ in 0..4 {
                let length = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
                let padding = if length >> 63 == 1 {
                    length >> 56 & 7
                } else {
                    0
                };
                at += 8 + (length & ((1 << 56) - 1)) as usize + padding as usize;
            }
            cut(&path, at as u64);
            // The database of a member that was never started.
            let store = copy_fixture(FIXTURE);
            let fresh = scratch::folder().unwrap();
            let (code, _, stderr) = restore(store.path(), &fresh.path().join("data"), &[]);
            assert_eq!(code, 0, "{stderr}");
            fs::copy(db(&fresh.path().join("data")), db(data)).unwrap();
        },
    },
];

#[tokio::test(flavor = "multi_thread")]
async fn what_needs_it_is_restored_and_what_is_sound_stays() {
    let store = copy_fixture(FIXTURE);
    let member = lived(store.path(), &[], 40).await;
    for damage in &DAMAGES {
        for (look, wanted) in [("sanity", damage.sanity), ("full", damage.full)] {
            let bench = Bench::new(store.path(), &member);
            (damage.done)(&bench.data);
            bench.decides(look, wanted, damage.name);
            // Only etcd can tell whether the decision was right.
            let revision = match wanted.0 {
                // The torn end may hold the last put.
                "Keep" => LAST + 39,
                _ => LAST,
            };
            bench.serves(revision, damage.name).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_behind_the_backup_unless_its_wal_makes_up_for_it() {
    let store = copy_fixture(FIXTURE);
    let to_go = (LAST - 1499) as usize;
    for (puts, full) in [
        (to_go - 1, ("Restore", "BehindBackup")),
        (to_go, KEEP),
        (to_go + 9, KEEP),
    ] {
        // Its database stays at 1499; all puts are only in the WAL.
        let member = lived(store.path(), &["--revision", "1499"], puts).await;
        let bench = Bench::new(store.path(), &member);
        let what = format!("{puts} puts");
        let json = bench.decides("sanity", KEEP, &what);
        let message = json["decision"]["message"].as_str().unwrap();
        assert!(message.contains(&puts.to_string()), "{message}");
        bench.decides("full", full, &what);
        let at = if full == KEEP {
            1499 + puts as i64
        } else {
            LAST
        };
        bench.serves(at, &what).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_of_another_history() {
    let store = copy_fixture(FIXTURE);
    let other = Bucket::with_base();
    other.altered_delta(crate::support::made_backups::BASE + 1, LAST, 6);
    let member = lived(other.path(), &[], 3).await;
    let bench = Bench::new(store.path(), &member);
    bench.decides("sanity", KEEP, "another history");
    let bench = Bench::new(store.path(), &member);
    let json = bench.decides("full", ("Restore", "HashMismatch"), "another history");
    let message = json["decision"]["message"].as_str().unwrap();
    assert!(
        message.contains(&hash_of_fixture().to_string()),
        "{message}"
    );
    bench.serves(LAST, "another history").await;
}

/// A damaged backup is no reason to replace a sound member, or to keep etcd from starting.
#[tokio::test(flavor = "multi_thread")]
async fn a_sound_member_does_not_need_the_backup() {
    let store = copy_fixture(FIXTURE);
    let member = lived(store.path(), &[], 3).await;
    let nothing = scratch::folder().unwrap();
    let damaged = copy_fixture(FIXTURE);
    for entry in fs::read_dir(damaged.path().join("v2")).unwrap() {
        let path = entry.unwrap().path();
        flip(&path, fs::metadata(&path).unwrap().len() / 2);
    }
    let (nothing, damaged) = (
        nothing.path().to_str().unwrap(),
        damaged.path().to_str().unwrap(),
    );
    let closed = "s3://backups/closed";
    let cases: [(&[&str], i32); 4] = [
        (&[nothing], 66),
        (&[damaged], 65),
        (&[closed], 69),
        // Damage explains more than a store that is missing.
        (&[nothing, damaged, closed], 65),
    ];
    for (stores, code_without) in cases {
        let command = |bench: &Bench, look: &str| -> Command {
            let mut c = deltafold();
            c.args(["restore", "--output", "json", "--if-needed", look]);
            stores.iter().for_each(|s| {
                c.args(["--store", s]);
            });
            without_servers(&mut c);
            c.arg("--data-dir").arg(&bench.data);
            c
        };
        let bench = Bench::new(store.path(), &member);
        let before = stamps(&bench.data.join("member"));
        for look in ["sanity", "full"] {
            let (code, json, stderr) = run_json(&mut command(&bench, look));
            assert_eq!(code, 0, "{stores:?}, {look}: {stderr}");
            assert_eq!(
                (json["status"].as_str(), decided(&json)),
                (Some("NothingToDo"), KEEP)
            );
            let warnings = json["warnings"].as_array().unwrap();
            assert_eq!(
                warnings.is_empty(),
                look == "sanity",
                "{stores:?}: {warnings:?}"
            );
            assert_eq!(
                stamps(&bench.data.join("member")),
                before,
                "{stores:?}, {look}"
            );
        }
        // A damaged member stays, too, if there is nothing to restore from.
        cut(&db(&bench.data), 100_000);
        let before = files(&bench.data);
        let (code, json, stderr) = run_json(&mut command(&bench, "sanity"));
        assert_eq!(
            (code, &json["status"]),
            (code_without, &"Failed".into()),
            "{stores:?}: {stderr}"
        );
        assert!(files(&bench.data) == before, "{stores:?}");
        assert_eq!(debris(&bench.data), [""; 0], "{stores:?}");
    }
}

/// A WAL with several segments, of an etcd that often takes snapshots.
#[tokio::test(flavor = "multi_thread")]
async fn segments_that_are_missing() {
    let store = copy_fixture(FIXTURE);
    let folder = scratch::folder().unwrap();
    let data = folder.path().join("data");
    let (code, _, stderr) = restore(store.path(), &data, &[]);
    assert_eq!(code, 0, "{stderr}");
    let mut options = lagging();
    options.args.push("--snapshot-count=30".into());
    let mut value = vec![0; 1_400_000];
    fastrand::Rng::with_seed(1).fill(&mut value);
    live(&data, &options, 100, &value).await;
    let segments = wal::segment_paths(&data.join("member/wal")).unwrap();
    assert!(segments.len() >= 3, "{segments:?}");
    let look = |wanted: (&str, &str), what: &str| {
        let before = stamps(&data);
        for look in ["sanity", "full"] {
            let (code, json, stderr) =
                restore(store.path(), &data, &["--if-needed", look, "--dry-run"]);
            assert_eq!(code, 0, "{what}: {stderr}");
            assert_eq!(decided(&json), wanted, "{what}, {look}: {json}");
        }
        assert_eq!(stamps(&data), before, "{what}");
    };
    let hide = |path: &Path| {
        let hidden = folder.path().join("hidden");
        fs::rename(path, &hidden).unwrap();
        let path = path.to_owned();
        move || fs::rename(&hidden, &path).unwrap()
    };
    look(KEEP, "whole");
    let back = hide(&segments[1]);
    look(WAL, "without one in the middle");
    back();
    let back = hide(&segments[0]);
    // etcd itself removes old segments after a newer snapshot.
    look(KEEP, "without the first");
    let snap = data.join("member/snap");
    let aside = folder.path().join("snaps");
    fs::create_dir(&aside).unwrap();
    let snaps = deltafold::datadir::snap::list(&snap).unwrap();
    for path in &snaps {
        fs::rename(path, aside.join(path.file_name().unwrap())).unwrap();
    }
    look(
        ("Restore", "SnapshotFileMissing"),
        "without the first, and without .snap files",
    );
    for path in &snaps {
        fs::rename(aside.join(path.file_name().unwrap()), path).unwrap();
    }
    back();
    look(KEEP, "whole again");
    let etcd = Etcd::start(VERSION, &data);
    assert_eq!(etcd.revision().await, LAST + 100);
}

/// The WAL in the separate directory counts.
#[tokio::test(flavor = "multi_thread")]
async fn with_a_wal_directory() {
    let store = copy_fixture(FIXTURE);
    let folder = scratch::folder().unwrap();
    let (data, wal) = (folder.path().join("data"), folder.path().join("wal"));
    let wal_text = wal.to_str().unwrap();
    let args = ["--wal-dir", wal_text];
    let (code, _, stderr) = restore(store.path(), &data, &args);
    assert_eq!(code, 0, "{stderr}");
    let mut options = lagging();
    options.args.extend(args.map(Into::into));
    live(&data, &options, 5, b"a value").await;
    let run = |more: &[&str]| {
        let args = [&["--if-needed", "full"], more].concat();
        let (code, json, stderr) = restore(store.path(), &data, &args);
        assert_eq!(code, 0, "{stderr}");
        json
    };
    assert_eq!(decided(&run(&args)), KEEP);
    // Without the flag it is not found.
    assert_eq!(decided(&run(&["--dry-run"])), ("Restore", "WalMissing"));
    let path = segment(&wal);
    flip(&path, find(&path, b"lived/0002"));
    let (old_wal, old_member) = (fs::read(&path).unwrap(), files(&data.join("member")));
    // The operator moves the bad WAL away, as the message says.
    let moved = folder.path().join("wal.old");
    let refused = [&["--if-needed", "full"], &args[..]].concat();
    let (code, json, stderr) = restore(store.path(), &data, &refused);
    assert_eq!((code, &json["reason"]), (73, &"TargetExists".into()));
    let mv = format!("mv {wal_text} {}", moved.display());
    assert!(stderr.contains(&mv), "{stderr}");
    assert!(fs::read(&path).unwrap() == old_wal);
    assert!(files(&data.join("member")) == old_member);
    fs::rename(&wal, &moved).unwrap();
    let json = run(&args);
    assert_eq!(decided(&json), ("Restore", "WalMissing"));
    let kept = json["kept_aside"].as_array().unwrap();
    assert_eq!(kept.len(), 1, "{kept:?}");
    assert!(files(Path::new(kept[0].as_str().unwrap())) == old_member);
    assert!(fs::read(moved.join(path.file_name().unwrap())).unwrap() == old_wal);
    assert_whole(&data, Some(&wal), hash_of_fixture(), "with a WAL directory");
    let etcd = Etcd::start_with(VERSION, &data, &options);
    assert_eq!(etcd.revision().await, LAST);
}
