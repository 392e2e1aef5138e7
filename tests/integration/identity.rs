//! Whose backup a prefix is: the first cluster that writes there is recorded; another one is refused until
//! --take-over.

use crate::support::etcd::{Etcd, EtcdOptions, EtcdVersion};
use crate::support::follower::{Ended, Follower, snapshot, snapshot_command};
use crate::support::process::free_port;
use crate::support::recorded_etcd::{RecordedEtcd, with_etcd};
use crate::support::restorable::Prefix;
use crate::support::{deltafold, restore, run_json, succeed};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;

const IDENTITY: &str = "deltafold-identity.json";
const QUICK: [&str; 2] = ["--delta-period", "200ms"];

fn identity_of(world: &RecordedEtcd) -> Value {
    let content = fs::read(Path::new(&world.prefix.url).join(IDENTITY)).expect("an identity");
    serde_json::from_slice(&content).expect("JSON")
}

/// Returns every file below the prefix with its content.
fn all_files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files.extend(all_files(&path)),
            false => files.push((path.display().to_string(), fs::read(&path).unwrap())),
        }
    }
    files.sort();
    files
}

fn list(prefix: &Prefix, output: &str) -> String {
    let mut command = deltafold();
    command.args(["list", "--output", output, "--store", &prefix.url]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_first_write_records_whose_backup_it_is() {
    for (version, kind) in EtcdVersion::ALL.into_iter().zip(["full", "delta", "delta"]) {
        with_etcd(version, |world| {
            world.put("/a", "1");
            world.snapshot(kind, &[]).succeeded();
            let identity = identity_of(world);
            let id = world.cluster_id(&world.etcd);
            assert_eq!(identity["clusterId"], id);
            assert_eq!(identity["memberNames"], json!(["default"]));
            assert_eq!(identity["formerClusterIds"], json!([]));
            let listed: Value = serde_json::from_str(&list(&world.prefix, "json")).unwrap();
            assert_eq!(listed["identity"]["cluster_id"], id);
            assert_eq!(listed["identity"]["recorded_at"], identity["recordedAt"]);
            assert_eq!(
                listed["problems"],
                json!([]),
                "it is nobody's foreign object"
            );
            let text = list(&world.prefix, "text");
            assert!(text.contains(&format!("{id}, members default")), "{text}");
            // Neither a snapshot of the same cluster nor its --take-over changes the record.
            for args in [[].as_slice(), &["--take-over"]] {
                world.put("/a", "2");
                world.delta(args);
                assert_eq!(identity_of(world), identity);
            }
        });
    }
}

fn assert_refused(world: &RecordedEtcd, ended: &Ended, theirs: &str, ours: &str) {
    assert_eq!(
        (ended.code, ended.reason()),
        (65, "OtherCluster"),
        "{}",
        ended.json
    );
    let message = ended.json["message"].as_str().unwrap();
    let object = Path::new(&world.prefix.url).join(IDENTITY);
    for part in [
        theirs,
        ours,
        "default",
        "intruder",
        object.to_str().unwrap(),
        "--take-over",
    ] {
        assert!(message.contains(part), "no {part} in: {message}");
    }
}

#[test]
fn another_cluster_writes_nothing_until_it_has_taken_over() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 5, 100);
        world.delta(&[]);
        let intruder = world.another("intruder");
        let (first, second) = (world.cluster_id(&world.etcd), world.cluster_id(&intruder));
        assert_ne!(first, second);
        let at = [intruder.endpoint().to_owned()];
        let before = all_files(Path::new(&world.prefix.url));
        for kind in ["full", "delta"] {
            let refused = snapshot(kind, &world.prefix, &at, &[]);
            assert_refused(world, &refused, &first, &second);
            assert_eq!(all_files(Path::new(&world.prefix.url)), before);
        }
        // No lock is left, either.
        let refused = Follower::start(&world.prefix, &at, &QUICK).wait();
        assert_refused(world, &refused, &first, &second);
        assert_eq!(all_files(Path::new(&world.prefix.url)), before);
        // A variable that says false counts as false.
        let mut command = snapshot_command("full", &world.prefix, &at);
        let (code, _, _) = run_json(command.env("DELTAFOLD_TAKE_OVER", "false"));
        assert_eq!(code, 65);

        snapshot("full", &world.prefix, &at, &["--take-over"]).succeeded();
        let identity = identity_of(world);
        assert_eq!(identity["clusterId"], second);
        assert_eq!(identity["memberNames"], json!(["intruder"]));
        assert_eq!(identity["formerClusterIds"], json!([first]));
        // Once is enough; now the first cluster is the foreign one.
        snapshot("delta", &world.prefix, &at, &[]).succeeded();
        let refused = world.snapshot("delta", &[]);
        assert_refused(world, &refused, &second, &first);
        world.delta(&["--take-over"]);
        assert_eq!(identity_of(world)["formerClusterIds"], json!([second]));
    });
}

#[test]
fn snapshots_of_another_tool_become_those_of_the_first_who_writes() {
    with_etcd(EtcdVersion::V3_5, |world| {
        world.saved_by_another_tool();
        let listed: Value = serde_json::from_str(&list(&world.prefix, "json")).unwrap();
        assert_eq!(listed["identity"], Value::Null);
        world.put("/b", "1");
        world.delta(&["--max-full-age", "0s"]);
        assert_eq!(
            identity_of(world)["clusterId"],
            world.cluster_id(&world.etcd)
        );
    });
}

#[test]
fn an_object_that_is_no_identity_is_replaced_by_the_cluster_of_the_snapshots() {
    with_etcd(EtcdVersion::V3_6, |world| {
        let object = Path::new(&world.prefix.url).join(IDENTITY);
        let id = world.cluster_id(&world.etcd);
        let write = |content: &str| fs::write(&object, content).unwrap();
        for content in ["", "{}", r#"{"clusterId":"../"}"#, "not JSON"] {
            for (kind, args) in [
                ("full", [].as_slice()),
                ("delta", &[]),
                ("full", &["--take-over"]),
            ] {
                write(content);
                world.put_many("/a/", 4, 10);
                let ended = world.snapshot(kind, args).succeeded();
                assert_eq!(ended.json["proven"], true, "{}", ended.json);
                assert_eq!(identity_of(world)["clusterId"], id);
            }
        }
        // 300 MB, without writing them.
        let large = fs::File::create(&object).unwrap();
        large.set_len(300_000_000).unwrap();
        world.put("/b", "1");
        world.delta(&[]);
        assert_eq!(identity_of(world)["clusterId"], id);
        // Another cluster is refused, and the object stays.
        write("{}");
        let intruder = world.another("intruder");
        every_write_is_refused(world, &intruder, "at revision 1, the store at");
        // A follower that runs says it once, and goes on.
        write("{}");
        let mut follower = Follower::start(&world.prefix, &world.endpoints(), &QUICK);
        for n in 0..4 {
            let revision = world.put("/b", n.to_string());
            follower.wait_saved(&world.prefix, revision);
            write("rubbish");
        }
        let ended = follower.terminate().succeeded();
        let warnings = warnings_of(&ended.json);
        assert_eq!(
            warnings.matches("is not a valid identity").count(),
            1,
            "{warnings}"
        );
        fs::remove_file(&object).unwrap();
        world.put("/b", "2");
        world.delta(&[]);
        fs::write(&object, "{}").unwrap();
        let listed: Value = serde_json::from_str(&list(&world.prefix, "json")).unwrap();
        assert_eq!(listed["problems"][0]["reason"], "IdentityUnreadable");
    });
}

/// A cluster that was restored elsewhere has the same history and another ID.
fn restored_elsewhere(world: &mut RecordedEtcd, port: Option<u16>) -> (Value, Etcd) {
    let data_dir = world.folder().join("restored");
    let peer = free_port();
    let url = format!("http://127.0.0.1:{peer}");
    let (code, json, log) = restore(
        Path::new(&world.prefix.url),
        &data_dir,
        &[
            "--initial-advertise-peer-urls",
            &url,
            "--initial-cluster",
            &format!("default={url}"),
        ],
    );
    assert_eq!(code, 0, "{log}");
    if port.is_some() {
        world.etcd.end();
    }
    let options = EtcdOptions {
        ports: Some((port.unwrap_or_else(free_port), peer)),
        ..EtcdOptions::default()
    };
    (
        json,
        Etcd::start_with(world.etcd.version(), &data_dir, &options),
    )
}

fn warnings_of(json: &Value) -> String {
    json["warnings"].to_string()
}

#[test]
fn a_restored_cluster_is_told_to_take_over_and_verify_warns() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 10, 100);
        world.delta(&[]);
        let first = world.cluster_id(&world.etcd);
        let (json, etcd) = restored_elsewhere(world, None);
        let second = world.cluster_id(&etcd);
        let warnings = warnings_of(&json);
        for part in ["--take-over", &first, &second] {
            assert!(warnings.contains(part), "{warnings}");
        }
        let verify = |etcd: &Etcd| {
            let mut command = deltafold();
            command.args(["verify", "--output", "json", "--store", &world.prefix.url]);
            let json = succeed(command.args(["--endpoints", etcd.endpoint()]));
            warnings_of(&json)
        };
        let warned = verify(&etcd);
        assert!(
            warned.contains(&first) && warned.contains(&second),
            "{warned}"
        );
        assert_eq!(verify(&world.etcd), "[]");
        let at = [etcd.endpoint().to_owned()];
        let refused = snapshot("delta", &world.prefix, &at, &[]);
        assert_eq!(refused.reason(), "OtherCluster");
        snapshot("delta", &world.prefix, &at, &["--take-over"]).succeeded();
    });
}

/// With the same peer URL and token it is the same cluster.
#[test]
fn a_cluster_restored_in_its_own_place_needs_no_word() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 10, 100);
        world.delta(&[]);
        let id = world.cluster_id(&world.etcd);
        let members = world.wait(async { world.etcd.client().await.member_list().await });
        let url = members.unwrap().members()[0].peer_urls()[0].clone();
        let prefix = world.prefix.url.clone();
        let mut said = Value::Null;
        world.restart(|data_dir| {
            fs::remove_dir_all(data_dir).unwrap();
            let cluster = format!("default={url}");
            let args = [
                "--initial-advertise-peer-urls",
                &url,
                "--initial-cluster",
                &cluster,
            ];
            let (code, json, log) = restore(Path::new(&prefix), data_dir, &args);
            assert_eq!(code, 0, "{log}");
            said = json;
        });
        assert_eq!(warnings_of(&said), "[]");
        assert_eq!(world.cluster_id(&world.etcd), id);
        world.put("/b", "1");
        world.delta(&[]);
        assert_eq!(identity_of(world)["formerClusterIds"], json!([]));
    });
}

/// Behind the same endpoint there is suddenly another cluster with the same history so far: only its ID
/// differs.
fn endpoints_become_another_cluster(args: &[&str]) -> (Ended, Value, String, String, i64, i64) {
    let mut told = None;
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 10, 100);
        world.delta(&[]);
        let first = world.cluster_id(&world.etcd);
        let at = world.endpoints();
        let mut args = args.to_vec();
        args.extend([
            "--delta-period",
            "200ms",
            "--dial-timeout",
            "1s",
            "--command-timeout",
            "2s",
        ]);
        let mut follower = Follower::start(&world.prefix, &at, &args);
        let saved = world.put_many("/b/", 10, 100);
        follower.wait_saved(&world.prefix, saved);
        let port: u16 = at[0].rsplit(':').next().unwrap().parse().unwrap();
        let (_, etcd) = restored_elsewhere(world, Some(port));
        let second = world.cluster_id(&etcd);
        assert_ne!(first, second);
        world.etcd = etcd;
        let last = world.put_many("/c/", 10, 100);
        let ended = match args.contains(&"--take-over") {
            false => follower.wait(),
            true => {
                follower.wait_saved(&world.prefix, last);
                follower.terminate()
            }
        };
        let reached = world.prefix.last_saved();
        told = Some((ended, identity_of(world), first, second, reached, saved));
    });
    told.unwrap()
}

#[test]
fn a_follower_does_not_go_on_with_another_cluster() {
    let (ended, identity, first, second, reached, saved) = endpoints_become_another_cluster(&[]);
    assert_eq!(
        (ended.code, ended.reason()),
        (65, "OtherCluster"),
        "{}",
        ended.log
    );
    let message = ended.json["message"].as_str().unwrap();
    assert!(
        message.contains(&first) && message.contains(&second),
        "{message}"
    );
    assert_eq!(reached, saved, "nothing of the other is saved");
    assert_eq!(identity["clusterId"], first);
}

#[test]
fn a_follower_that_may_take_over_goes_on() {
    let (ended, identity, first, second, reached, saved) =
        endpoints_become_another_cluster(&["--take-over"]);
    ended.succeeded();
    assert!(reached > saved);
    assert_eq!(identity["clusterId"], second);
    assert_eq!(identity["formerClusterIds"], json!([first]));
}

/// A follower notices a take-over before its next snapshot, not only in its next session.
#[test]
fn a_follower_that_was_taken_over_from_ends() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 10, 100);
        world.delta(&[]);
        let at = world.endpoints();
        let mut follower = Follower::start(&world.prefix, &at, &QUICK);
        let saved = world.put_many("/b/", 10, 100);
        follower.wait_saved(&world.prefix, saved);
        let (_, etcd) = restored_elsewhere(world, None);
        let theirs = [etcd.endpoint().to_owned()];
        snapshot("full", &world.prefix, &theirs, &["--take-over"]).succeeded();
        let before = world.prefix.names();
        world.put("/c", "1");
        let ended = follower.wait();
        assert_eq!(
            (ended.code, ended.reason()),
            (65, "OtherCluster"),
            "{}",
            ended.log
        );
        assert_eq!(world.prefix.names(), before);
    });
}

/// A prefix with snapshots that records no cluster: those of another tool, or of a deleted record.
fn forget_identity(world: &RecordedEtcd) {
    fs::remove_file(Path::new(&world.prefix.url).join(IDENTITY)).unwrap();
}

/// Asserts that every kind of snapshot is refused with `part` in the message, and writes nothing but a follower's lock.
#[track_caller]
fn every_write_is_refused(world: &RecordedEtcd, etcd: &Etcd, part: &str) {
    let at = [etcd.endpoint().to_owned()];
    let before = all_files(Path::new(&world.prefix.url));
    let mut ended = vec![Follower::start(&world.prefix, &at, &QUICK).wait()];
    for kind in ["full", "delta"] {
        ended.push(snapshot(kind, &world.prefix, &at, &[]));
    }
    for ended in ended {
        assert_eq!(
            (ended.code, ended.reason()),
            (65, "OtherCluster"),
            "{} {}",
            ended.json,
            ended.log
        );
        let message = ended.json["message"].as_str().unwrap();
        for part in [part, "--take-over", &world.cluster_id(etcd)] {
            assert!(message.contains(part), "no {part} in: {message}");
        }
        let mut after = all_files(Path::new(&world.prefix.url));
        after.retain(|(path, _)| !path.contains("deltafold-locks"));
        assert!(after == before, "something was written");
    }
}

#[test]
fn the_first_write_compares_histories() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.saved_by_another_tool();
        // An empty cluster, and one that is ahead with other changes.
        let intruder = world.another("intruder");
        every_write_is_refused(world, &intruder, "at revision 1, the store at");
        let last = world.revision();
        world.wait(async {
            let mut kv = intruder.kv().await;
            for i in 0..last + 5 {
                kv.put("/other", i.to_string(), None).await.unwrap();
            }
        });
        every_write_is_refused(world, &intruder, "holds other changes than the store");
        // The cluster itself is not refused, and records itself.
        world.put("/b", "1");
        world.delta(&["--max-full-age", "0s"]);
        assert_eq!(
            identity_of(world)["clusterId"],
            world.cluster_id(&world.etcd)
        );
        // Nor is the other one, if it takes over.
        forget_identity(world);
        let at = [intruder.endpoint().to_owned()];
        let ended = snapshot("delta", &world.prefix, &at, &["--take-over"]).succeeded();
        assert_eq!(ended.json["timeline_began"], true);
        assert_eq!(identity_of(world)["clusterId"], world.cluster_id(&intruder));
    });
}

/// The changes of the last saved revision are compacted away: nothing proves whose backup it is.
#[test]
fn a_cluster_that_nothing_contradicts_is_recorded_after_its_full() {
    for kind in ["full", "delta", "follow"] {
        with_etcd(EtcdVersion::V3_5, |world| {
            world.saved_by_another_tool();
            let last = world.revision();
            // Another cluster with the same keys, all created at other revisions.
            let intruder = world.another("intruder");
            let revision = world.wait(async {
                let mut kv = intruder.kv().await;
                for i in 0..last + 10 {
                    kv.put("/first", i.to_string(), None).await.unwrap();
                }
                for i in (0..40).rev() {
                    kv.put(format!("/a/{i:05}"), "theirs", None).await.unwrap();
                }
                let revision = intruder.revision().await;
                intruder.compact(revision).await;
                revision
            });
            assert!(revision > last);
            // All its keys are newer than the backup: nothing shows a difference, and this is said.
            let at = [intruder.endpoint().to_owned()];
            if kind == "full" {
                let ended = snapshot("full", &world.prefix, &at, &[]).succeeded();
                assert!(
                    warnings_of(&ended.json)
                        .contains("nothing proves that they are of this cluster"),
                    "{}",
                    ended.json
                );
                forget_identity(world);
                return;
            }
            // The own cluster has compacted past the backup, changed some keys and deleted others.
            world.put_many("/a/", 30, 10);
            world.delete("/a/00035");
            let now = world.put("/b", "1");
            world.compact(now);
            match kind {
                "delta" => {
                    let ended = world.delta(&[]);
                    assert_eq!(ended.json["full_reason"], "Compacted", "{}", ended.json);
                    assert_eq!(ended.json["proven"], false, "{}", ended.json);
                }
                _ => {
                    let mut follower = Follower::start(&world.prefix, &world.endpoints(), &QUICK);
                    follower.wait_saved(&world.prefix, now);
                    follower.terminate().succeeded();
                }
            }
            assert_eq!(
                identity_of(world)["clusterId"],
                world.cluster_id(&world.etcd)
            );
        });
    }
}

/// A cluster whose keys were created at other revisions below the end of the backup.
#[test]
fn a_compacted_cluster_with_other_keys_is_refused() {
    with_etcd(EtcdVersion::V3_7, |world| {
        world.saved_by_another_tool();
        let last = world.revision();
        let intruder = world.another("intruder");
        world.wait(async {
            let mut kv = intruder.kv().await;
            // The same keys, each one revision later than in the backup.
            kv.put("/first", "", None).await.unwrap();
            for i in 0..40 {
                kv.put(format!("/a/{i:05}"), "theirs", None).await.unwrap();
            }
            for i in 0..last {
                kv.put("/more", i.to_string(), None).await.unwrap();
            }
            let revision = intruder.revision().await;
            intruder.compact(revision).await;
        });
        every_write_is_refused(world, &intruder, "the store has other changes of it");
    });
}

/// The cluster was set back by a restore: without a record, only --take-over tells it from a foreign one.
#[test]
fn a_cluster_that_was_set_back_is_refused_without_a_record() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 10, 100);
        world.delta(&[]);
        let (_, restored) = restored_elsewhere(world, None);
        world.put_many("/a/", 10, 100);
        world.delta(&[]);
        forget_identity(world);
        every_write_is_refused(world, &restored, "another history");
        let at = [restored.endpoint().to_owned()];
        let ended = snapshot("delta", &world.prefix, &at, &["--take-over"]).succeeded();
        assert_eq!(ended.json["timeline_began"], true);
        assert_eq!(ended.json["full_reason"], "ClusterBehind");
    });
}

/// A deleted record does not end a follower, not even if its cluster is set back meanwhile.
#[test]
fn a_follower_that_runs_already_goes_on_without_a_record() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 10, 100);
        world.delta(&[]);
        let members = world.wait(async { world.etcd.client().await.member_list().await });
        let url = members.unwrap().members()[0].peer_urls()[0].clone();
        let at = world.endpoints();
        let args = [
            &QUICK[..],
            &["--dial-timeout", "1s", "--command-timeout", "2s"],
        ]
        .concat();
        let mut follower = Follower::start(&world.prefix, &at, &args);
        let early = world.put("/b", "1");
        follower.wait_saved(&world.prefix, early);
        let saved = world.put_many("/b/", 10, 100);
        follower.wait_saved(&world.prefix, saved);
        forget_identity(world);
        let prefix = world.prefix.url.clone();
        world.restart(|data_dir| {
            fs::remove_dir_all(data_dir).unwrap();
            let (early, cluster) = (early.to_string(), format!("default={url}"));
            let args = [
                "--revision",
                &early,
                "--initial-advertise-peer-urls",
                &url,
                "--initial-cluster",
                &cluster,
            ];
            let (code, _, log) = restore(Path::new(&prefix), data_dir, &args);
            assert_eq!(code, 0, "{log}");
        });
        follower.wait_until("the record", || Path::new(&prefix).join(IDENTITY).exists());
        let id = world.cluster_id(&world.etcd);
        let ended = follower.terminate().succeeded();
        assert_eq!(ended.json["timeline_began"], true, "{}", ended.json);
        assert!(ended.log.contains("--take-over"), "{}", ended.log);
        assert_eq!(identity_of(world)["clusterId"], id);
    });
}

/// Every command that writes as a cluster has the flag.
#[test]
fn help_tells_of_taking_over() {
    for kind in ["full", "delta", "follow"] {
        let mut command: Command = deltafold();
        let output = command.args(["snapshot", kind, "--help"]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("--take-over"), "{kind}");
    }
}
