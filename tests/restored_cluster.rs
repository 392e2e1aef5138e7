//! Three members, each restored for itself from the same bucket, are one cluster.

mod support;

use serde_json::Value;
use std::path::Path;
use support::etcd::{Cluster, HashKv, Member, initial_cluster};
use support::tools::EtcdVersion;
use support::{copy_fixture, expected, restore};
use tempfile::TempDir;

/// One that all versions start on.
const FIXTURE: &str = "etcd35-gzip";
const TOKEN: &str = "restored";

fn restored(store: &Path, data_dir: &Path, args: &[&str]) -> Value {
    let (code, json, stderr) = restore(store, data_dir, args);
    assert_eq!(code, 0, "{} {args:?}: {stderr}", store.display());
    assert_eq!(json["status"], "Succeeded", "{json}");
    json
}

/// What every running member has at a revision; all have the same.
async fn agreed(cluster: &Cluster, revision: i64) -> HashKv {
    let mut all = Vec::new();
    for member in cluster.running() {
        // It asks the leader, so the member has applied everything when it answers.
        assert!(member.revision().await >= revision);
        all.push(member.hash_kv(revision).await);
    }
    all.dedup();
    assert_eq!(all.len(), 1, "the members differ: {all:?}");
    all[0]
}

async fn one_cluster(version: EtcdVersion, bump: Option<i64>) {
    let e = expected(FIXTURE);
    // Inside a delta.
    let row = e.hash_kv[3];
    let store = copy_fixture(FIXTURE);
    let folder = TempDir::new().unwrap();
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

    // Each is lost once, so the leader is, too. With a bump it was seen that they are one cluster.
    let losses = if bump.is_some() { 1 } else { members.len() };
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
    one_cluster(EtcdVersion::V3_5, None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn three_restored_members_are_one_cluster_3_6() {
    one_cluster(EtcdVersion::V3_6, None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn three_restored_members_are_one_cluster_3_7() {
    one_cluster(EtcdVersion::V3_7, None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_bumped_revision_they_are_one_cluster_too() {
    for version in EtcdVersion::ALL {
        one_cluster(version, Some(1_000_000_000)).await;
    }
}
