//! Each snapshot of a prefix with two histories in turn does not count, in five ways: every command does what the table in
//! docs/concepts.md says.

use crate::support::etcd::EtcdVersion;
use crate::support::fake_s3::{Dialect, FakeS3};
use crate::support::keys::{Key, args, sealed_for};
use crate::support::made_backups::{Objects, objects_in};
use crate::support::recorded_etcd::{RecordedEtcd, with_etcd};
use crate::support::{deltafold, run_json, scratch};
use deltafold::backup::catalog::mark_of;
use deltafold::store::exclude::EXCLUDE_TAG;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// Why a snapshot does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    ExcludedByObject,
    ExcludedByTag,
    Unencrypted,
    Damaged,
    Sealed,
    /// It is not there: what a command does without it.
    Gone,
}

const WAYS: [Way; 5] = [
    Way::ExcludedByObject,
    Way::ExcludedByTag,
    Way::Unencrypted,
    Way::Damaged,
    Way::Sealed,
];

impl Way {
    fn excludes(self) -> bool {
        matches!(self, Way::ExcludedByObject | Way::ExcludedByTag)
    }

    /// The code and the reason of a command that cannot do without the snapshot.
    fn refusal(self) -> (i32, &'static str) {
        match self {
            Way::Unencrypted => (65, "Untrusted"),
            Way::Sealed => (77, "CannotDecrypt"),
            _ => (65, "CorruptSnapshot"),
        }
    }
}

/// The result of a command.
struct Ran {
    code: i32,
    json: Value,
    stderr: String,
}

impl Ran {
    fn is(&self) -> (i32, &Value, &Value) {
        (self.code, &self.json["reason"], &self.json["revision"])
    }

    /// The paths that gc would remove.
    fn goes(&self) -> BTreeSet<&str> {
        let objects = self.json["objects"].as_array().unwrap().iter();
        let goes = objects.filter(|o| o["decision"] == "Delete");
        goes.map(|o| o["path"].as_str().unwrap()).collect()
    }
}

/// A prefix in the store, in which at most one snapshot is altered.
struct Altered<'a> {
    world: &'a RecordedEtcd,
    server: &'a FakeS3,
    flags: &'a [&'a str],
    url: String,
    /// The path of the altered snapshot.
    path: String,
}

impl Altered<'_> {
    fn run(&self, command: &[&str]) -> Ran {
        let mut c = deltafold();
        c.args(command)
            .args(["--output", "json", "--store", &self.url]);
        c.args(self.flags).envs(self.server.s3().env());
        let (code, json, stderr) = run_json(&mut c);
        Ran { code, json, stderr }
    }

    fn restore(&self) -> Ran {
        let folder = scratch::folder().unwrap();
        let data = folder.path().join("data");
        self.run(&["restore", "--data-dir", data.to_str().unwrap()])
    }

    fn delta(&self) -> Ran {
        let endpoints = self.world.endpoints().join(",");
        self.run(&["snapshot", "delta", "--endpoints", &endpoints])
    }

    fn gc(&self) -> Ran {
        let policy = ["gc", "--policy", "limit", "--limit", "1"];
        self.run(&[&policy[..], &["--restorable-window", "0s"]].concat())
    }

    /// Asserts that a command says at most once what it has done about the snapshot.
    fn told_once(&self, ran: &Ran, what: &str) {
        let name = self.path.rsplit('/').next().unwrap();
        let told = ran.stderr.lines().filter(|line| {
            let is_said = line.contains("\"WARN\"") || line.contains("\"ERROR\"");
            is_said && line.contains(name)
        });
        assert!(told.count() <= 1, "{what}: {}", ran.stderr);
    }
}

/// The original prefix, and its copies.
struct Prefixes<'a> {
    world: &'a RecordedEtcd,
    server: FakeS3,
    key: &'a Key,
    other: Key,
    flags: Vec<&'a str>,
    objects: Objects,
}

impl Prefixes<'_> {
    /// Copies the prefix, and alters a snapshot.
    fn altered(&self, nth: &mut usize, path: &str, way: Way) -> Altered<'_> {
        *nth += 1;
        let prefix = format!("b/p{nth}");
        let mut objects = self.objects.clone();
        let bytes = objects[path].clone();
        let mut altered = path.to_owned();
        match way {
            Way::ExcludedByObject => drop(objects.insert(mark_of(path), Vec::new())),
            Way::ExcludedByTag => {}
            Way::Unencrypted => {
                objects.remove(path);
                altered = path.strip_suffix(".age").unwrap().to_owned();
                objects.insert(altered.clone(), self.key.opens(&bytes).unwrap());
            }
            Way::Damaged => {
                let mut bytes = bytes;
                let at = bytes.len() - 20;
                bytes[at] ^= 1;
                objects.insert(altered.clone(), bytes);
            }
            Way::Sealed => {
                let plain = self.key.opens(&bytes).unwrap();
                objects.insert(altered.clone(), sealed_for(&[&self.other], &plain));
            }
            Way::Gone => drop(objects.remove(path)),
        }
        let all = objects.into_iter();
        self.server
            .seed(all.map(|(path, bytes)| (format!("{prefix}/{path}"), bytes)));
        if way == Way::ExcludedByTag {
            self.server
                .set_tags(&format!("{prefix}/{path}"), &[(EXCLUDE_TAG, "true")]);
        }
        Altered {
            world: self.world,
            server: &self.server,
            flags: &self.flags,
            url: format!("s3://{prefix}"),
            path: altered,
        }
    }
}

/// What a command does without the snapshot, and with it as it should be.
struct Expected {
    clean: Ran,
    without: Ran,
}

impl Expected {
    /// A command that needs a state: it does without the snapshot what it would do if it were not there, or what it does with
    /// it, or it is refused.
    fn check_state(&self, way: Way, is_newest: bool, ran: &Ran, what: &str) {
        // Without what is not trusted there may be nothing: then it is named.
        let is_cause = is_newest || self.without.code != 0;
        let refused = way == Way::Unencrypted && is_cause;
        let is_needed = self.clean.is() != self.without.is();
        let left_out = way.excludes() || way == Way::Unencrypted;
        if refused || !left_out && is_needed {
            let (code, reason) = way.refusal();
            assert_eq!(
                (ran.code, &ran.json["reason"]),
                (code, &reason.into()),
                "{what}: {}",
                ran.stderr
            );
        } else if left_out {
            assert_eq!(ran.is(), self.without.is(), "{what}: {}", ran.stderr);
        } else {
            assert_eq!(ran.is(), self.clean.is(), "{what}: {}", ran.stderr);
        }
    }
}

#[test]
fn every_command_does_what_the_table_says() {
    let key = Key::new();
    let both = key.both();
    let flags = args(&both);
    with_etcd(EtcdVersion::V3_6, |world| {
        let put = |world: &RecordedEtcd, n: i64| world.put("/k", format!("{n}"));
        put(world, 1);
        world.snapshot("full", &flags).succeeded();
        put(world, 2);
        world.delta(&flags);
        let older = world.checkpoint();
        let old = put(world, 3);
        world.delta(&flags);
        put(world, 4);
        // The history that is left ends at a revision of its own.
        put(world, 4);
        world.delta(&flags);
        world.set_back_to(&older, None);
        put(world, 5);
        world.delta(&flags);
        put(world, 6);
        world.delta(&flags);
        put(world, 7);
        let prefixes = Prefixes {
            server: FakeS3::start(Dialect::default()),
            key: &key,
            other: Key::new(),
            objects: objects_in(Path::new(&world.prefix.url)),
            flags: flags.clone(),
            world,
        };
        let snapshots: Vec<&String> = prefixes
            .objects
            .keys()
            .filter(|p| p.starts_with("v2/"))
            .collect();
        let created = |path: &str| path.rsplit('-').next().unwrap().to_owned();
        let newest = snapshots
            .iter()
            .max_by_key(|path| created(path))
            .unwrap()
            .as_str();
        let fulls = snapshots.iter().filter(|p| p.contains("Full-")).count();
        assert_eq!((snapshots.len(), fulls), (6, 2), "{snapshots:?}");
        let old = old.to_string();
        // A single key is answered by the newest delta that has it, and no other is opened.
        let get = [
            "get",
            "--prefix",
            "/",
            "--revision",
            &old,
            "--timeline",
            "main",
        ];
        let mut nth = 0;
        for &path in &snapshots {
            let mut clean = prefixes.altered(&mut nth, path, Way::ExcludedByObject);
            prefixes
                .server
                .remove(&format!("{}/{}", &clean.url[5..], mark_of(path)));
            let gone = prefixes.altered(&mut nth, path, Way::Gone);
            let expected = |run: &dyn Fn(&Altered<'_>) -> Ran| Expected {
                clean: run(&clean),
                without: run(&gone),
            };
            let restored = expected(&|p| p.restore());
            let got = expected(&|p| p.run(&get));
            let compacted = expected(&|p| p.run(&["compact", "--dry-run"]));
            let collected = expected(&|p| p.gc());
            let saved = expected(&|p| p.delta());
            clean.path.clear();
            for way in WAYS {
                let what = |command: &str| format!("{command} with {path}: {way:?}");
                let altered = prefixes.altered(&mut nth, path, way);
                let is_newest = path == newest;
                for (expected, ran, command) in [
                    (&restored, altered.restore(), "restore"),
                    (&got, altered.run(&get), "get"),
                ] {
                    expected.check_state(way, is_newest, &ran, &what(command));
                    altered.told_once(&ran, &what(command));
                }
                // A dry run opens no delta, and a real one needs a prefix of its own.
                let to_compact = prefixes.altered(&mut nth, path, way);
                let ran = to_compact.run(&["compact"]);
                compacted.check_state(way, is_newest, &ran, &what("compact"));
                altered.told_once(&ran, &what("compact"));

                let ran = altered.gc();
                let (goes, without) = (ran.goes(), collected.without.goes());
                assert_eq!(ran.code, 0, "{}: {}", what("gc"), ran.stderr);
                let more: Vec<_> = goes.iter().filter(|p| !without.contains(*p)).collect();
                // What was not opened is judged by its name: a delta, or a full that goes itself.
                let is_itself = |p: &str| {
                    [altered.path.clone(), mark_of(&altered.path)].contains(&p.to_owned())
                };
                let by_name = |p: &str| is_itself(p) || collected.clean.goes().contains(p);
                assert!(more.iter().all(|p| by_name(p)), "{}: {more:?}", what("gc"));
                if path.contains("Full-") && way == Way::Unencrypted {
                    assert!(!goes.contains(altered.path.as_str()), "{}", what("gc"));
                }

                let ran = altered.run(&["verify", "--all-chains"]);
                let findings = ran.json["findings"].as_array().unwrap();
                let about = |f: &&Value| f["snapshots"].to_string().contains(&altered.path);
                let about: Vec<&str> = findings
                    .iter()
                    .filter(about)
                    .map(|f| f["reason"].as_str().unwrap())
                    .collect();
                let (code, reason) = match way.excludes() {
                    true => (0, "Excluded"),
                    false => way.refusal(),
                };
                assert!(
                    about.contains(&reason),
                    "{}: {:#}",
                    what("verify"),
                    ran.json
                );
                let is_error = !way.excludes() && (way != Way::Unencrypted || is_newest);
                assert!(
                    !is_error || ran.code == code || ran.code == 65,
                    "{}",
                    what("verify")
                );

                let ran = altered.run(&["list", "--deep"]);
                let listed = ran.json["snapshots"].as_array().unwrap().iter();
                let mut listed = listed.filter(|s| s["path"] == altered.path);
                let listed = listed.next().unwrap();
                let told = ran.json["problems"].to_string();
                let is_told = match way {
                    Way::Unencrypted => listed["untrusted"] == true,
                    way if way.excludes() => listed["excluded"] == true,
                    way => told.contains(way.refusal().1) && told.contains(&altered.path),
                };
                assert!(is_told, "{}: {:#}", what("list"), ran.json);

                let ran = altered.delta();
                let is = |ran: &Ran| (ran.code, ran.json["full_reason"].clone());
                let right = [is(&saved.clean), is(&saved.without)];
                assert!(
                    right.contains(&is(&ran)),
                    "{}: {:#}",
                    what("delta"),
                    ran.json
                );
                if way.excludes() || way == Way::Unencrypted {
                    assert_eq!(is(&ran), right[1], "{}: {:#}", what("delta"), ran.json);
                }
                altered.told_once(&ran, &what("delta"));
            }
        }
    });
}
