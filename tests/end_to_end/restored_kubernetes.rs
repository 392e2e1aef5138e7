//! Kubernetes on a restored etcd: a controller that has seen newer objects than the restored ones must forget
//! them, not act on them.

use crate::support::etcd::Etcd;
use crate::support::history::{Compression, Recorder};
use crate::support::kube::{self, Apiserver, ConfigMaps, Informer};
use crate::support::namespace::TestNamespace;
use crate::support::scratch;
use crate::support::tools::EtcdVersion;
use crate::support::{copy_fixture, expected, restore};
use etcd_client::GetOptions;
use fastrand::Rng;
use serde_json::Value;
use tempfile::TempDir;

const SPACE: &str = "shop";
const T0: i64 = 1_790_000_000;
const BUMP: i64 = 1_000_000_000;

/// An API server on a restored etcd, and an informer that was connected to the source.
struct Swapped {
    space: TestNamespace,
    informer: Informer,
    /// The number of lines that the informer had printed before.
    said: usize,
    /// The ConfigMaps at the restored revision.
    then: ConfigMaps,
    /// The newest revision that the informer had seen.
    seen: i64,
    // Declared before etcd, which it needs: fields are dropped in order.
    _server: Apiserver,
    etcd: Etcd,
    _folder: TempDir,
}

/// ConfigMaps come and go while an informer follows; then etcd and the API server are replaced by others, on a
/// restore to an earlier revision.
async fn swapped(version: EtcdVersion, args: &[&str]) -> Swapped {
    let folder = scratch::folder().unwrap();
    let etcd = Etcd::start(version, &folder.path().join("source"));
    let server = Apiserver::start(&etcd).await;
    let space = TestNamespace::named(&server.api(), SPACE).await;
    for n in 0..10 {
        let name = format!("map-{n}");
        kube::set_config_map(&space, &name, "in the full").await;
    }
    let mut recorder = Recorder::start(&etcd).await;
    recorder.take_full(&etcd).await;
    for n in 0..4 {
        let name = format!("map-{n}");
        kube::set_config_map(&space, &name, "in a delta").await;
    }
    space.delete("configmaps", "map-4").await;
    kube::set_config_map(&space, "map-10", "new").await;
    let (revision, then) = kube::config_maps(&space).await;

    let mut informer = Informer::start(&server, SPACE);
    kube::set_config_map(&space, "lost", "created later").await;
    for n in 0..20 {
        let value = format!("{n} times changed later");
        kube::set_config_map(&space, "map-0", &value).await;
    }
    space.delete("configmaps", "map-5").await;
    kube::set_config_map(&space, "map-6", "later").await;
    let (_, later) = kube::config_maps(&space).await;
    let said = informer
        .wait_until(0, "it has seen the last change", |said| {
            kube::store(said).as_ref() == Some(&later)
        })
        .await;
    let seen = said
        .iter()
        .filter_map(|line| line["resource_version"].as_str()?.parse::<i64>().ok())
        .max()
        .unwrap();
    assert!(seen > revision + 20, "{seen} {revision}");
    let last = etcd.revision().await;
    let recording = recorder.finish(last, &mut Rng::with_seed(7), 2).await;
    let store = folder.path().join("store");
    recording.write_bucket(&store, Compression::Gzip, T0);
    let port = server.port();
    drop(server);
    drop(etcd);

    let data_dir = folder.path().join("restored");
    let at = revision.to_string();
    let args = [&["--revision", &at][..], args].concat();
    let (code, json, stderr) = restore(&store, &data_dir, &args);
    assert_eq!(code, 0, "{args:?}: {stderr}");
    assert_eq!(json["status"], "Succeeded", "{json}");
    let etcd = Etcd::start(version, &data_dir);
    assert_eq!(etcd.revision().await, json["revision"], "{json}");
    let said = informer.said().len();
    let server = Apiserver::start_at(port, &etcd).await;
    Swapped {
        space,
        informer,
        said,
        then,
        seen,
        _server: server,
        etcd,
        _folder: folder,
    }
}

fn says_expired(line: &Value) -> bool {
    line["code"] == 410 && line["reason"] == "Expired"
}

/// Returns whether a line is a list, or a watch that begins with one.
fn is_list(line: &Value) -> bool {
    line["what"] == "list" || line["what"] == "watch" && line["send_initial_events"] == true
}

async fn informer_relists(version: EtcdVersion) {
    let bump = BUMP.to_string();
    let args = ["--bump-revision", &bump, "--mark-compacted"];
    let mut s = swapped(version, &args).await;
    // The same objects with the versions that they had.
    let (revision, now) = kube::config_maps(&s.space).await;
    assert_eq!(now, s.then);
    assert!(revision >= BUMP, "{revision}");
    let said = s
        .informer
        .wait_until(s.said, "it has what was restored", |said| {
            kube::store(said).as_ref() == Some(&now)
        })
        .await;
    let expired = said.iter().position(says_expired);
    // An informer whose watch failed to connect lists again by itself, and is never told that its revision
    // expired.
    let since = expired.unwrap_or(0);
    assert!(said[since..].iter().any(is_list), "no list: {said:#?}");
    // A controller gets all of it as changes.
    for (what, name) in [
        ("deleted", "lost"),
        ("added", "map-5"),
        ("updated", "map-0"),
        ("updated", "map-6"),
    ] {
        let told = |line: &Value| line["what"] == what && line["name"] == name;
        assert!(said.iter().any(told), "{name} not {what}: {said:#?}");
    }

    // And it continues from there.
    let before = s.said + said.len();
    kube::set_config_map(&s.space, "after", "the restore").await;
    kube::set_config_map(&s.space, "map-0", "after").await;
    s.space.delete("configmaps", "map-1").await;
    let (revision, now) = kube::config_maps(&s.space).await;
    assert!(revision > BUMP && revision > s.seen, "{revision}");
    assert!(s.etcd.revision().await >= revision);
    s.informer
        .wait_until(before, "it follows the restored etcd", |said| {
            kube::store(said).as_ref() == Some(&now)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_informer_that_knew_newer_revisions_relists_3_5() {
    informer_relists(EtcdVersion::V3_5).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_informer_that_knew_newer_revisions_relists_3_6() {
    informer_relists(EtcdVersion::V3_6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_informer_that_knew_newer_revisions_relists_3_7() {
    informer_relists(EtcdVersion::V3_7).await;
}

/// The fixture of a whole cluster: the API server reads every object as etcd has it.
#[tokio::test(flavor = "multi_thread")]
async fn a_whole_cluster_is_served_again() {
    const NAME: &str = "kubernetes";
    let prefix = "/registry/configmaps/kube-system/";
    let (store, bump) = (copy_fixture(NAME), BUMP.to_string());
    for row in expected(NAME).hash_kv {
        let folder = scratch::folder().unwrap();
        let data_dir = folder.path().join("data");
        let at = row.revision.to_string();
        let args = [
            "--revision",
            &at,
            "--bump-revision",
            &bump,
            "--mark-compacted",
        ];
        let (code, json, stderr) = restore(store.path(), &data_dir, &args);
        assert_eq!(code, 0, "{stderr}");
        assert_eq!(json["live_keys"], row.live_keys, "{json}");
        let etcd = Etcd::start(EtcdVersion::V3_6, &data_dir);
        let options = GetOptions::new().with_prefix().with_keys_only();
        let got = etcd.kv().await.get(prefix, Some(options)).await.unwrap();
        let of_etcd = got.kvs().iter().map(|kv| {
            let name = kv.key_str().unwrap().strip_prefix(prefix).unwrap();
            (name.to_owned(), kv.mod_revision().to_string())
        });
        let of_etcd: Vec<_> = of_etcd.collect();
        assert!(!of_etcd.is_empty());
        let server = Apiserver::start(&etcd).await;
        let space = TestNamespace::existing(&server.api(), "kube-system").await;
        let (revision, maps) = kube::config_maps(&space).await;
        assert!(revision >= row.revision + BUMP, "{revision}");
        for (name, version) in of_etcd {
            assert!(maps.contains_key(&name), "{name}: {maps:?}");
            assert_eq!(maps[&name]["resource_version"], version, "{name}");
        }
        let name = "after-the-restore";
        kube::set_config_map(&space, name, "new").await;
    }
}

/// Why revisions are bumped: a plain restore misleads the informer silently. Its watch continues at a revision
/// that the restored etcd has not reached yet, and misses everything before that.
#[tokio::test(flavor = "multi_thread")]
async fn without_a_bump_it_would_believe_what_it_knew() {
    let mut s = swapped(EtcdVersion::V3_6, &[]).await;
    let (revision, now) = kube::config_maps(&s.space).await;
    assert_eq!(now, s.then);
    assert!(revision < s.seen, "{revision}");
    kube::set_config_map(&s.space, "missed", "new").await;
    while s.etcd.revision().await <= s.seen {
        kube::set_config_map(&s.space, "map-1", "new").await;
        kube::set_config_map(&s.space, "map-1", "newer").await;
    }
    kube::set_config_map(&s.space, "noticed", "new").await;
    let has = |said: &[Value], name: &str| {
        kube::store(said).is_some_and(|store| store.contains_key(name))
    };
    let said = s
        .informer
        .wait_until(s.said, "it sees anything at all", |said| {
            has(said, "noticed")
        })
        .await;
    assert!(!said.iter().any(is_list), "{said:#?}");
    assert!(!said.iter().any(says_expired), "{said:#?}");
    assert!(has(&said, "lost"), "{said:#?}");
    assert!(!has(&said, "missed"), "{said:#?}");
}
