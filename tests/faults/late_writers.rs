//! Two writers at the same time, of which one begins another history: a name is given between two looks, so one of the
//! two sees the other, and no state of both is ever restored.
//!
//! What the other one writes is made beforehand. It appears in the store just before a request of the first one.

use crate::support::etcd::EtcdVersion;
use crate::support::fake_s3::{Dialect, FakeS3};
use crate::support::follower::{self, Ended};
use crate::support::proxy::{Effect, Proxy, Timing};
use crate::support::recorded_etcd::{RecordedEtcd, with_etcd};
use crate::support::restorable::Prefix;
use crate::support::s3::S3;
use crate::support::set_back::Checkpoint;
use crate::support::truth::Truth;
use crate::support::{deltafold, run_json};
use deltafold::backup::{Kind, SnapshotName};
use deltafold::mvcc::Revision;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

type Objects = BTreeMap<String, Vec<u8>>;

const TIMELINES: &str = "deltafold-timelines";

/// A store in which history A ends at the revision at which B has its first full, and what a snapshotter of B writes.
struct Rivals {
    server: Arc<FakeS3>,
    proxy: Proxy,
    /// The path below the prefix and the content of B's record and full.
    of_b: Objects,
    /// A full of A at the same revision.
    of_a: Objects,
    b: Truth,
    /// B at its end.
    at_b: Checkpoint,
    last: i64,
}

/// Makes both histories. etcd has A afterwards.
fn rivals(world: &mut RecordedEtcd) -> Rivals {
    let server = Arc::new(FakeS3::start(Dialect::default()));
    world.prefix = Prefix::s3(server.s3(), "store", "p");
    world.put_many("/a/", 5, 10);
    world.delta(&[]);
    let early = world.checkpoint();
    let last = world.put_many("/a/", 20, 20);
    world.delta(&[]);
    let saved = below(&server, "p");
    let at_a = world.checkpoint();
    // Runs a command on a copy of the store, and returns what it adds.
    let adds = |world: &mut RecordedEtcd, kind: &str| {
        let copy = saved
            .iter()
            .map(|(k, v)| (format!("store/q/{k}"), v.clone()));
        let before = below(&server, "q");
        server.seed(copy);
        world.prefix = Prefix::s3(server.s3(), "store", "q");
        world.snapshot(kind, &[]).succeeded();
        let mut added = below(&server, "q");
        added.retain(|path, _| {
            let is_written = path.contains("Full-") || path.contains("Incr-");
            is_written && !saved.contains_key(path) && !before.contains_key(path)
        });
        added
    };
    let of_a = adds(world, "full");
    let a = world.set_back_to(&early, None);
    assert_eq!(world.put_many("/b/", 20, 30), last);
    let of_b = adds(world, "delta");
    assert_eq!(
        (of_a.len(), of_b.len()),
        (1, 2),
        "{:?} {:?}",
        of_a.keys(),
        of_b.keys()
    );
    let at_b = world.checkpoint();
    let b = world.set_back_to(&at_a, Some(&a));
    world.prefix = Prefix::s3(server.s3(), "store", "p");
    let proxy = Proxy::start(server.s3().endpoint());
    Rivals {
        server,
        proxy,
        of_b,
        of_a,
        b,
        at_b,
        last,
    }
}

/// Returns the objects below a prefix of the bucket.
fn below(server: &FakeS3, prefix: &str) -> Objects {
    let objects = server.objects().into_iter();
    let prefix = format!("store/{prefix}/");
    let below = |(k, v): (String, Vec<u8>)| Some((k.strip_prefix(&prefix)?.to_owned(), v));
    objects.filter_map(below).collect()
}

/// Returns an object's path with another time in its name.
fn at_second(path: &str, second: i64) -> String {
    let (folder, name) = path.split_once('/').unwrap();
    let name: SnapshotName = name.parse().unwrap();
    format!(
        "{folder}/{}",
        SnapshotName {
            created: second,
            ..name
        }
    )
}

impl Rivals {
    fn through_proxy(&self) -> Prefix {
        Prefix::s3(&S3::new(&self.proxy.url()), "store", "p")
    }

    /// Puts objects into the store just before the first request that names an object whose path begins so, at its
    /// second.
    fn appear(&self, objects: &Objects, before: &'static str) {
        let second = Arc::new(Mutex::new(0));
        let (of_match, server, objects) = (second.clone(), self.server.clone(), objects.clone());
        let names = move |call: &crate::support::proxy::Call| {
            let path = call.target.split('?').next().unwrap_or_default();
            let Some(name) = path.split_once(before).map(|(_, name)| name) else {
                return false;
            };
            let is_naming = ["PUT", "POST upload"].contains(&call.kind().as_str());
            let beginning = before.rsplit('/').next().unwrap();
            if let (true, Ok(name)) = (
                is_naming,
                format!("{beginning}{name}").parse::<SnapshotName>(),
            ) {
                *of_match.lock().unwrap() = name.created;
            }
            is_naming
        };
        let effect = Effect::Do(Arc::new(move || {
            let second = *second.lock().unwrap();
            let placed = objects.iter().map(|(path, content)| {
                (
                    format!("store/p/{}", at_second(path, second)),
                    content.clone(),
                )
            });
            server.seed(placed);
        }));
        self.proxy.inject(names, 0, 1, Timing::Before, effect);
    }

    fn snapshot(&self, world: &RecordedEtcd, kind: &str) -> Ended {
        let ended = follower::snapshot(kind, &self.through_proxy(), &world.endpoints(), &[]);
        assert!(
            self.proxy.all_faults_struck(),
            "{}\n{}",
            ended.json,
            ended.log
        );
        ended
    }

    /// Asserts that the newest state is B's, and that all states were there once.
    fn newest_is_b(&self, world: &RecordedEtcd) {
        let data: PathBuf = world.folder().join("newest");
        let (code, json, log) = run(
            world,
            &["restore", "--dry-run", "--data-dir", data.to_str().unwrap()],
        );
        assert_eq!(
            (code, json["revision"].as_i64()),
            (0, Some(self.last)),
            "{json:#}\n{log}"
        );
        let truths = [&self.b, &world.truth];
        let checked = world.prefix.check_every_restorable(&truths, world.seed, 40);
        let newest = &checked.timelines[json["timeline"].as_str().unwrap()];
        assert_eq!(newest.newest.get(&0), Some(&self.last), "{checked:?}");
        let (code, json, log) = run(
            world,
            &["verify", "--all-chains", "--level", "fold", "--no-record"],
        );
        assert_eq!(code, 0, "{json:#}\n{log}");
    }
}

fn run(world: &RecordedEtcd, args: &[&str]) -> (i32, Value, String) {
    let mut command = deltafold();
    command
        .args(args)
        .args(["--store", &world.prefix.url, "--output", "json"]);
    let env = world.prefix.env.iter();
    run_json(command.envs(env.map(|(name, value)| (name, value))))
}

/// A record of B appears in the second of A's new delta or full: that is excluded, and the next run compares anew.
#[test]
fn a_snapshot_in_the_second_of_a_record_is_excluded() {
    for (kind, naming) in [("delta", "/v2/Incr-"), ("full", "/v2/Full-")] {
        with_etcd(EtcdVersion::V3_6, |world| {
            let rivals = rivals(world);
            world.put_many("/late/", 5, 10);
            rivals.appear(&rivals.of_b, naming);
            let ended = rivals.snapshot(world, kind);
            assert_eq!(
                (ended.code, ended.reason()),
                (75, "Conflict"),
                "{kind}: {}",
                ended.log
            );
            world.truth.wait_for(world.revision());
            rivals.newest_is_b(world);
            // etcd is B: it goes on without a finding.
            world.set_back_to(&rivals.at_b, Some(&rivals.b));
            let revision = world.put_many("/b/", 5, 10);
            let ended = world.delta(&[]);
            assert_eq!(ended.json["revision"], revision, "{}", ended.json);
            assert_eq!(ended.json["timeline_began"], false, "{}", ended.json);
        });
    }
}

/// A full without a record, as other tools save it: one of another history excludes the delta, one of the same does not.
#[test]
fn a_full_of_another_tool_is_compared() {
    for is_same in [false, true] {
        with_etcd(EtcdVersion::V3_6, |world| {
            let rivals = rivals(world);
            let mut full = if is_same {
                rivals.of_a.clone()
            } else {
                rivals.of_b.clone()
            };
            full.retain(|path, _| !path.starts_with(TIMELINES));
            // They are listed before the fulls.
            let foreign = ["A/z", "A//z"].map(|name| (format!("store/p/v2/{name}"), Vec::new()));
            rivals.server.seed(foreign);
            let revision = world.put_many("/late/", 5, 10);
            rivals.appear(&full, "/v2/Incr-");
            let ended = rivals.snapshot(world, "delta");
            if is_same {
                assert_eq!(ended.code, 0, "{}", ended.log);
                world.check_all_is_saved();
                assert_eq!(ended.json["revision"], revision);
            } else {
                assert_eq!(
                    (ended.code, ended.reason()),
                    (75, "Conflict"),
                    "{}",
                    ended.log
                );
                let ended = world.delta(&[]);
                assert_eq!(ended.json["timeline_began"], true, "{}", ended.json);
                world.check_both_are_saved((&rivals.b, rivals.last), revision, 40);
            }
        });
    }
}

/// A late delta of A is named after B has listed the names, and stands behind B's record: B writes another record.
#[test]
fn a_delta_that_is_named_during_a_record_is_seen() {
    with_etcd(EtcdVersion::V3_6, |world| {
        let rivals = rivals(world);
        world.put_many("/late/", 5, 10);
        let before = below(&rivals.server, "p");
        world.delta(&[]);
        let mut late = below(&rivals.server, "p");
        late.retain(|path, _| path.contains("Incr-") && !before.contains_key(path));
        assert_eq!(late.len(), 1);
        rivals
            .server
            .remove(&format!("store/p/{}", late.keys().next().unwrap()));
        let a = world.set_back_to(&rivals.at_b, Some(&rivals.b));
        rivals.appear(&late, "/deltafold-timelines/Full-");
        let ended = rivals.snapshot(world, "delta");
        assert_eq!(ended.code, 0, "{}", ended.log);
        let records = below(&rivals.server, "p");
        let records = records.keys().filter(|path| path.starts_with(TIMELINES));
        assert_eq!(records.count(), 2);
        world.put_many("/b/", 5, 10);
        world.delta(&[]);
        world.check_both_are_saved((&a, rivals.last), world.revision(), 40);
    });
}

/// The name of a compaction's result is before the record that follows its inputs, or there is none.
#[test]
fn a_compaction_is_named_before_the_next_history_or_not_at_all() {
    with_etcd(EtcdVersion::V3_6, |world| {
        let rivals = rivals(world);
        rivals.appear(&rivals.of_b, "/v2/Full-");
        let (code, json, log) = compact(&rivals);
        assert!(rivals.proxy.all_faults_struck());
        assert_eq!(
            (code, json["reason"].as_str()),
            (75, Some("Conflict")),
            "{log}"
        );
        rivals.newest_is_b(world);
    });
    // The only name before the record is taken by a damaged object.
    with_etcd(EtcdVersion::V3_6, |world| {
        let rivals = rivals(world);
        let input = world.prefix.deltas().pop().unwrap();
        let of_b = rivals.of_b.iter();
        let of_b =
            of_b.map(|(path, content)| (at_second(path, input.created + 2), content.clone()));
        let taken = SnapshotName {
            kind: Kind::Full,
            start: Revision(0),
            created: input.created + 1,
            ..input
        };
        let taken = (format!("v2/{taken}"), b"rubbish".to_vec());
        let objects = of_b.chain([taken]);
        let server = &rivals.server;
        server.seed(objects.map(|(path, content)| (format!("store/p/{path}"), content)));
        let (code, json, log) = compact(&rivals);
        assert_eq!(
            (code, json["reason"].as_str()),
            (75, Some("Conflict")),
            "{json}\n{log}"
        );
        assert!(
            json["message"]
                .as_str()
                .unwrap()
                .contains("another history begins"),
            "{json}"
        );
    });
}

/// Compacts history A.
fn compact(rivals: &Rivals) -> (i32, Value, String) {
    let mut command = deltafold();
    let prefix = rivals.through_proxy();
    command.args([
        "compact",
        "--timeline",
        "main",
        "--store",
        &prefix.url,
        "--output",
        "json",
    ]);
    run_json(command.envs(prefix.env.iter().map(|(name, value)| (name, value))))
}
