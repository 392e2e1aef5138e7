//! Three members, restored one by one from the same backup, form one cluster.

use crate::support::etcd::HashKv;
use crate::support::etcd_cluster::{Cluster, Member, initial_cluster};
use crate::support::scratch;
use crate::support::tools::EtcdVersion;
use crate::support::{copy_fixture, expected, restore};
use serde_json::Value;
use std::path::Path;

/// A fixture that all versions start on.
const FIXTURE: &str = "etcd35-gzip";
const TOKEN: &str = "restored";

fn restored(store: &Path, data_dir: &Path, args: &[&str]) -> Value {
    let (code, json, stderr) = restore(store, data_dir, args);
    assert_eq!(code, 0, "{} {args:?}: {stderr}", store.display());
    assert_eq!(json["status"], "Succeeded", "{json}");
    json
}

/// Returns HashKV at a revision, which must be the same for every running member.
async fn agreed(cluster: &Cluster, revision: i64) -> HashKv {
    let mut all = Vec::new();
    for member in cluster.running() {
        // It asks the leader, so the member has applied everything when it responds.
        assert!(member.revision().await >= revision);
        all.push(member.hash_kv(revision).await);
    }
    all.dedup();
    assert_eq!(all.len(), 1, "the members differ: {all:?}");
    all[0]
}

async fn one_cluster(version: EtcdVersion, bump: Option<i64>, if_needed: bool) {
    let e = expected(FIXTURE);
    // Inside a delta.
    let row = e.hash_kv[3];
    let store = copy_fixture(FIXTURE);
    let folder = scratch::folder().unwrap();
    let members = ["one", "two", "three"].map(|name| Member::new(name, folder.path().join(name)));
    let (revision, peers) = (row.revision.to_string(), initial_cluster(&members));
    for member in &members {
        let url = member.peer_url();
        let mut args = vec![
            "--revision",
            &revision,
            "--name",
            &member.name,
            "--initial-cluster",
            &peers,
            "--initial-cluster-token",
            TOKEN,
            "--initial-advertise-peer-urls",
            &url,
        ];
        if if_needed {
            // Nobody responds yet.
            args.extend(["--if-needed", "sanity"]);
        }
        let by = bump.unwrap_or_default().to_string();
        if bump.is_some() {
            args.extend(["--bump-revision", &by, "--mark-compacted"]);
        }
        let result = restored(store.path(), &member.data_dir, &args);
        assert_eq!(result["live_keys"], row.live_keys);
    }

    let mut cluster = Cluster::start(version, &members, TOKEN);
    let last = row.revision + bump.unwrap_or_default();
    let hash = agreed(&cluster, last).await;
    if bump.is_none() {
        let of_source = (row.hash, row.compact_revision);
        assert_eq!((hash.hash, hash.compact_revision), of_source, "{version}");
    }
    let mut client = cluster.member(0).client().await;
    let list = client.member_list().await.unwrap();
    let mut shown: Vec<_> = list
        .members()
        .iter()
        .map(|m| format!("{}={}", m.name(), m.peer_urls().join("+")))
        .collect();
    let mut wanted: Vec<_> = peers.split(',').collect();
    shown.sort();
    wanted.sort_unstable();
    assert_eq!(shown, wanted, "{version}");

    for (member, key) in cluster.running().zip(["first", "second", "third"]) {
        let mut client = member.client().await;
        client.put(key, "through each member", None).await.unwrap();
    }
    assert_eq!(cluster.member(0).revision().await, last + 3, "{version}");
    agreed(&cluster, last + 3).await;

    // Each member is lost once, including the leader. With --bump-revision or --if-needed they were seen to be
    // one cluster already.
    let losses = match bump.is_some() || if_needed {
        true => 1,
        false => members.len(),
    };
    for lost in 0..losses {
        cluster.kill(lost);
        let survivor = cluster.running().next().unwrap();
        survivor.put_when_led("while one is away", "value").await;
        let revision = survivor.revision().await;
        agreed(&cluster, revision).await;
        cluster.start_again(lost);
        let back = cluster.member(lost);
        assert!(back.revision().await >= revision, "{version}");
        back.put_when_led("when it is back", "value").await;
        let revision = back.revision().await;
        agreed(&cluster, revision).await;
        assert_eq!(
            back.live_keys_at(revision).await,
            row.live_keys + 5,
            "{version}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn three_restored_members_are_one_cluster_3_5() {
    one_cluster(EtcdVersion::V3_5, None, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn three_restored_members_are_one_cluster_3_6() {
    one_cluster(EtcdVersion::V3_6, None, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn three_restored_members_are_one_cluster_3_7() {
    one_cluster(EtcdVersion::V3_7, None, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_bumped_revision_they_are_one_cluster_too() {
    for version in EtcdVersion::ALL {
        one_cluster(version, Some(1_000_000_000), false).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn restored_where_needed_they_are_one_cluster_too() {
    one_cluster(EtcdVersion::V3_6, None, true).await;
}

/// A restored member starts with the first log of a cluster with its IDs. Beside members that were not
/// restored, or at another revision, it would take their entries for its own.
#[test]
fn restored_where_needed_at_another_revision_it_is_of_another_cluster() {
    let store = copy_fixture(FIXTURE);
    let folder = scratch::folder().unwrap();
    let peers = "a=http://127.0.0.1:1,b=http://127.0.0.1:2";
    let rows = expected(FIXTURE).hash_kv;
    let (early, late) = (rows[1].revision.to_string(), rows[3].revision.to_string());
    let ids = |n: usize, name: &str, url: &str, more: &[&str]| {
        let mut args = vec!["--name", name, "--initial-cluster", peers];
        args.extend(["--initial-advertise-peer-urls", url]);
        args.extend(more);
        let json = restored(store.path(), &folder.path().join(n.to_string()), &args);
        let member = &json["member"];
        (member["cluster_id"].clone(), member["id"].clone())
    };
    let (a, b) = ("http://127.0.0.1:1", "http://127.0.0.1:2");
    let needed = |r| ["--if-needed", "sanity", "--revision", r];
    let at_once = ids(0, "a", a, &needed(&late));
    assert_eq!(ids(1, "b", b, &needed(&late)).0, at_once.0);
    let others = [
        ids(2, "a", a, &["--revision", &late]),
        ids(3, "a", a, &needed(&early)),
        ids(
            4,
            "a",
            a,
            &[
                &needed(&late)[..],
                &["--bump-revision", "7", "--mark-compacted"],
            ]
            .concat(),
        ),
    ];
    for (n, other) in others.iter().enumerate() {
        assert_ne!(other.0, at_once.0, "{n}");
        assert_ne!(other.1, at_once.1, "{n}");
    }
}
