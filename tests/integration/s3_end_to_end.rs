//! A backup on a real S3 server (versitygw) from beginning to end: saved, compacted, verified, listed, copied,
//! collected, restored, and served by another etcd with the hash of the first.

use crate::support::etcd::{Etcd, EtcdVersion};
use crate::support::gc_history::{NEWEST_FULL, decided, snapshots};
use crate::support::made_backups::{Objects, objects_in, objects_of};
use crate::support::recorded_etcd::with_etcd;
use crate::support::restorable::Prefix;
use crate::support::s3::Kind;
use crate::support::versitygw::Versitygw;
use crate::support::{deltafold, run_json};
use chrono::Utc;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

/// Runs a command that must succeed.
#[track_caller]
fn run(env: &[(String, String)], args: &[&str]) -> Value {
    let mut command = deltafold();
    command.args(args).args(["--output", "json"]);
    let (code, json, log) = run_json(command.envs(env.iter().cloned()));
    assert_eq!(code, 0, "{args:?}: {json:#}\n{log}");
    json
}

#[test]
fn from_an_etcd_through_a_bucket_into_another_etcd() {
    with_etcd(EtcdVersion::V3_6, |world| {
        let server = Versitygw::start();
        world.wait(server.s3().create_bucket("backups", Kind::Plain));
        world.prefix = Prefix::s3(server.s3(), "backups", "etcd-main");
        let env = server.s3().env();
        let url = world.prefix.url.clone();
        let of_store =
            |command: &str, args: &[&str]| run(&env, &[&[command, "--store", &url], args].concat());
        let in_bucket = || -> Objects {
            let all = world.wait(objects_of(&*server.s3().store("backups")));
            all.into_iter()
                .map(|(path, bytes)| (path.replacen("etcd-main/", "", 1), bytes))
                .collect()
        };

        let first = world.put_many("/a/", 50, 500);
        world.snapshot("full", &[]).succeeded();
        let second = world.put_many("/a/", 30, 400);
        world.delta(&[]);
        world.delete("/a/0001");
        let last = world.put_many("/b/", 10, 300);
        world.delta(&[]);
        let saved = world.prefix.names();
        let ends: Vec<i64> = saved.iter().map(|n| n.last.0).collect();
        assert_eq!(ends, [first, second, last]);
        let source = world.wait(world.etcd.hash_kv(last));

        // With the whole history the result has the hash of the source, which was never compacted.
        let made = of_store("compact", &["--keep-history", "all"]);
        assert_eq!(made["deltas"].as_array().unwrap().len(), 2, "{made:#}");
        assert_eq!(
            (&made["revision"], &made["hash_kv"]),
            (&last.into(), &source.hash.into())
        );
        let compacted = format!("v2/{}", made["snapshot"].as_str().unwrap());

        // With all chains, the deltas are folded again and compared with that result.
        let verified = of_store("verify", &["--level", "fold", "--all-chains"]);
        assert_eq!(verified["verdict"], "Verified", "{verified:#}");
        assert_eq!(verified["chains"][0]["equals_next"], true, "{verified:#}");
        assert_eq!(verified["newest"]["last_revision"], last, "{verified:#}");

        let listed = of_store("list", &["--deep"]);
        assert_eq!(listed["problems"], json!([]));
        assert_eq!(listed["snapshots"].as_array().unwrap().len(), 4);
        let ranges = listed["restorable"].as_array().unwrap().iter();
        let ranges: Vec<_> = ranges
            .map(|r| (&r["first_revision"], &r["last_revision"]))
            .collect();
        // The first full has the whole history, too.
        assert_eq!(ranges, [(&1.into(), &last.into())]);

        let folder = world.folder().join("copy");
        let copy = folder.to_str().unwrap();
        let copied = run(&env, &["copy", "--from", &url, "--to", copy]);
        assert_eq!(copied["copied"], 4, "{copied:#}");
        let (before, copies) = (in_bucket(), objects_in(&folder));
        assert_eq!(snapshots(&copies), snapshots(&before));
        for path in snapshots(&copies) {
            assert!(copies[&path] == before[&path], "{path}");
        }

        // The result's name is a second later than the newest delta; until then it supersedes nothing.
        let named = world.prefix.names().iter().map(|n| n.created).max();
        while Utc::now().timestamp() < named.unwrap() {
            std::thread::sleep(Duration::from_millis(50));
        }
        let superseded: BTreeSet<String> = saved.iter().map(|n| format!("v2/{n}")).collect();
        let told = of_store("gc", &NEWEST_FULL);
        assert_eq!(decided(&told, "Delete"), superseded, "{told:#}");
        assert_eq!(snapshots(&in_bucket()), snapshots(&before), "a dry run");
        let done = of_store("gc", &[&NEWEST_FULL[..], &["--apply"]].concat());
        assert_eq!(decided(&done, "Delete"), superseded, "{done:#}");
        assert_eq!(snapshots(&in_bucket()), BTreeSet::from([compacted]));

        for (store, name) in [(url.as_str(), "of-bucket"), (copy, "of-copy")] {
            let data_dir = world.folder().join(name);
            let to = data_dir.to_str().unwrap();
            let restored = run(&env, &["restore", "--store", store, "--data-dir", to]);
            assert_eq!(restored["hash_kv"], source.hash, "{store}: {restored:#}");
            let etcd = Etcd::start(EtcdVersion::V3_6, &data_dir);
            assert_eq!(world.wait(etcd.revision()), last, "{store}");
            assert_eq!(world.wait(etcd.hash_kv(last)), source, "{store}");
        }
    });
}
