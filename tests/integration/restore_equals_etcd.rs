//! Restored data directories against etcd itself: real etcds of three versions serve from them and have the
//! hashes of the etcds that were backed up.

use crate::support::etcd::{Etcd, EtcdOptions, HashKv};
use crate::support::history::{Compression, History, HistoryOptions, Recorder};
use crate::support::scratch;
use crate::support::tools::EtcdVersion;
use crate::support::{copy_fixture, expected, fixture_names, restore, rounds, that_start_on};
use etcd_client::{Client, ConnectOptions, Permission};
use fastrand::Rng;
use serde_json::Value;
use std::path::{Path, PathBuf};

const FIXTURE: &str = "etcd35-gzip";
const T0: i64 = 1_790_000_000;

/// A revision with its HashKV, compacted revision and number of live keys.
type Row = (i64, (u32, i64, u64));

fn restored(store: &Path, data_dir: &Path, args: &[&str]) -> Value {
    let (code, json, stderr) = restore(store, data_dir, args);
    assert_eq!(code, 0, "{} {args:?}: {stderr}", store.display());
    assert_eq!(json["status"], "Succeeded", "{json}");
    json
}

fn proof(result: &Value) -> (u32, i64, u64) {
    let hash = result["hash_kv"].as_u64().unwrap();
    (
        hash.try_into().unwrap(),
        result["compact_revision"].as_i64().unwrap(),
        result["live_keys"].as_u64().unwrap(),
    )
}

/// Returns the listed revisions of a fixture.
fn rows(name: &str) -> Vec<Row> {
    let listed = expected(name).hash_kv;
    let rows = listed.iter().map(|row| {
        let what = (row.hash, row.compact_revision, row.live_keys);
        (row.revision, what)
    });
    rows.collect()
}

/// Asserts the rows up to etcd's newest revision, which must be `revision`; then writes, compacts and
/// defragments.
async fn serves(etcd: &Etcd, revision: i64, rows: &[Row], what: &str) {
    assert_eq!(etcd.revision().await, revision, "{what}");
    for &(at, want) in rows.iter().filter(|(at, _)| *at <= revision) {
        let HashKv {
            hash,
            compact_revision,
            ..
        } = etcd.hash_kv(at).await;
        let live = etcd.live_keys_at(at).await;
        assert_eq!((hash, compact_revision, live), want, "{what}, at {at}");
    }
    let before = etcd.live_keys_at(revision).await;
    let mut client = etcd.client().await;
    client.put("after", "the restore", None).await.unwrap();
    etcd.compact(revision + 1).await;
    client.defragment().await.unwrap();
    assert_eq!(etcd.live_keys_at(revision + 1).await, before + 1, "{what}");
}

/// Every listed revision with the history before it, in every version that starts on it.
#[tokio::test(flavor = "multi_thread")]
async fn every_fixture_at_every_listed_revision() {
    for name in fixture_names() {
        let e = expected(&name);
        let rows = rows(&name);
        // Concurrently: an etcd mostly waits while it starts.
        let each = that_start_on(&e.etcd_version).iter().map(|&version| {
            let (name, rows) = (name.clone(), rows.clone());
            tokio::spawn(async move {
                for &(revision, want) in &rows {
                    let what = format!("{name} at {revision} in etcd {version}");
                    let store = copy_fixture(&name);
                    let folder = scratch::folder().unwrap();
                    let data_dir = folder.path().join("data");
                    let at = revision.to_string();
                    let result = restored(store.path(), &data_dir, &["--revision", &at]);
                    assert_eq!(result["revision"], revision, "{what}");
                    assert_eq!(proof(&result), want, "{what}");
                    let etcd = Etcd::start(version, &data_dir);
                    serves(&etcd, revision, &rows, &what).await;
                }
            })
        });
        for done in futures::future::join_all(each).await {
            done.unwrap();
        }
    }
}

/// Without history, a restore equals its source after a compaction at that revision.
#[tokio::test(flavor = "multi_thread")]
async fn every_fixture_without_its_history() {
    for name in fixture_names() {
        let e = expected(&name);
        let last = e.compacted_at_last_revision;
        let want = (last.hash, last.compact_revision, last.live_keys);
        let store = copy_fixture(&name);
        let folder = scratch::folder().unwrap();
        let data_dir = folder.path().join("data");
        let result = restored(store.path(), &data_dir, &["--keep-history", "latest"]);
        assert_eq!(result["revision"], e.last_revision, "{name}");
        assert_eq!(proof(&result), want, "{name}");
        let etcd = Etcd::start(that_start_on(&e.etcd_version)[0], &data_dir);
        let rows = [(e.last_revision, want)];
        serves(&etcd, e.last_revision, &rows, &name).await;
    }
}

/// Random histories made on real etcds, restored at the ends of deltas and inside them.
#[tokio::test(flavor = "multi_thread")]
async fn random_histories_of_real_etcds() {
    let first = crate::support::seed();
    let versions = EtcdVersion::ALL.into_iter();
    for (n, version) in versions.cycle().take(rounds(3, 6)).enumerate() {
        let seed = first + n as u64;
        let mut rng = Rng::with_seed(seed);
        let folder = scratch::folder().unwrap();
        let source = Etcd::start(version, &folder.path().join("source"));
        let history = History::record_with(&source, seed, &HistoryOptions::nth(n)).await;
        drop(source);
        let compression = Compression::ALL[n % Compression::ALL.len()];
        let store = folder.path().join("store");
        history.write_bucket(&store, compression, T0);
        let row = |&(at, hash, live): &(i64, HashKv, u64)| -> Row {
            (at, (hash.hash, hash.compact_revision, live))
        };
        let rows: Vec<Row> = history.hash_kv.iter().map(row).collect();

        let mut chosen = rows.clone();
        rng.shuffle(&mut chosen);
        for &(revision, want) in chosen.iter().take(3) {
            let what = format!("seed {seed}, etcd {version}, {compression:?}, at {revision}");
            let data_dir = folder.path().join(format!("at-{revision}"));
            let at = revision.to_string();
            let result = restored(&store, &data_dir, &["--revision", &at]);
            assert_eq!(result["revision"], revision, "{what}");
            assert_eq!(proof(&result), want, "{what}");
            let etcd = Etcd::start(version, &data_dir);
            serves(&etcd, revision, &rows, &what).await;
        }

        let what = format!("seed {seed}, etcd {version}, {compression:?}, the newest alone");
        let data_dir = folder.path().join("latest");
        let result = restored(&store, &data_dir, &["--keep-history", "latest"]);
        let (hash, live) = history.compacted;
        let want = (hash.hash, hash.compact_revision, live);
        assert_eq!(proof(&result), want, "{what}");
        let etcd = Etcd::start(version, &data_dir);
        let rows = [(history.last_revision, want)];
        serves(&etcd, history.last_revision, &rows, &what).await;
    }
}

/// Returns users with their roles, and roles with their permissions.
async fn users_and_roles(etcd: &Etcd) -> Vec<String> {
    let mut client = etcd.client().await;
    let mut all = Vec::new();
    for user in client.user_list().await.unwrap().users() {
        let got = client.user_get(user).await.unwrap();
        all.push(format!("user {user}: {:?}", got.roles()));
    }
    for role in client.role_list().await.unwrap().roles() {
        let got = client.role_get(role).await.unwrap();
        all.push(format!("role {role}: {:?}", got.permissions()));
    }
    all
}

/// They are only in the full: no delta contains them.
#[tokio::test(flavor = "multi_thread")]
async fn users_and_roles_are_those_of_the_base() {
    for version in EtcdVersion::ALL {
        let folder = scratch::folder().unwrap();
        let mut source = Etcd::start(version, &folder.path().join("source"));
        let mut client = source.client().await;
        client.role_add("reader").await.unwrap();
        let to_read = Permission::read("/app/").with_prefix();
        client
            .role_grant_permission("reader", to_read)
            .await
            .unwrap();
        client.user_add("ann", "ann's", None).await.unwrap();
        client.user_grant_role("ann", "reader").await.unwrap();
        client.user_add("root", "root's", None).await.unwrap();
        client.user_grant_role("root", "root").await.unwrap();
        client.auth_enable().await.unwrap();
        source.log_in("root", "root's");
        let mut client = source.client().await;
        client.put("/app/before", "full", None).await.unwrap();
        let wanted = users_and_roles(&source).await;
        assert_eq!(wanted.len(), 3, "{wanted:?}");

        let mut recorder = Recorder::start(&source).await;
        recorder.take_full(&source).await;
        client.put("/app/after", "1", None).await.unwrap();
        client.user_add("late", "late's", None).await.unwrap();
        client.user_delete("ann").await.unwrap();
        client.put("/app/after", "2", None).await.unwrap();
        client.put("/app/later", "3", None).await.unwrap();
        let last = source.revision().await;
        let inside = last - 1;
        let hash = source.hash_kv(inside).await;
        let recording = recorder.finish(last, &mut Rng::with_seed(1), 1).await;
        drop(source);
        let store = folder.path().join("store");
        recording.write_bucket(&store, Compression::Gzip, T0);

        let data_dir = folder.path().join("data");
        let result = restored(&store, &data_dir, &["--revision", &inside.to_string()]);
        assert_eq!(result["hash_kv"], hash.hash, "etcd {version}");
        let mut etcd = Etcd::start(version, &data_dir);
        let mut anybody = etcd.client().await;
        anybody.get("/app/after", None).await.unwrap_err();
        etcd.log_in("root", "root's");
        assert_eq!(users_and_roles(&etcd).await, wanted, "etcd {version}");
        let options = ConnectOptions::new().with_user("ann", "ann's");
        let mut ann = Client::connect([etcd.endpoint()], Some(options))
            .await
            .unwrap();
        let got = ann.get("/app/after", None).await.unwrap();
        assert_eq!(got.kvs()[0].value(), b"2", "etcd {version}");
        ann.get("/other", None).await.unwrap_err();
        ann.put("/app/after", "3", None).await.unwrap_err();
        let rows = [(inside, (hash.hash, hash.compact_revision, 2))];
        serves(&etcd, inside, &rows, &format!("etcd {version} with users")).await;
    }
}

/// Returns the files in a folder whose names end with `end`.
fn files_ending(folder: &Path, end: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    paths
        .filter(|path| path.to_string_lossy().ends_with(end))
        .collect()
}

/// As with etcd's own flag: a WAL on a separate disk.
#[tokio::test(flavor = "multi_thread")]
async fn a_wal_elsewhere() {
    let rows = rows(FIXTURE);
    let &(revision, want) = rows.last().unwrap();
    for version in EtcdVersion::ALL {
        let store = copy_fixture(FIXTURE);
        let folder = scratch::folder().unwrap();
        let data_dir = folder.path().join("data");
        let wal_dir = folder.path().join("wal");
        let text = wal_dir.to_str().unwrap();
        let result = restored(store.path(), &data_dir, &["--wal-dir", text]);
        assert_eq!(proof(&result), want);
        assert!(!files_ending(&wal_dir, ".wal").is_empty());
        assert!(!data_dir.join("member/wal").exists());
        let options = EtcdOptions {
            args: vec!["--wal-dir".into(), text.into()],
            ..EtcdOptions::default()
        };
        let etcd = Etcd::start_with(version, &data_dir, &options);
        serves(&etcd, revision, &rows, &format!("etcd {version}")).await;
    }
}

/// A member has the name of the flags, or etcd's own defaults.
#[tokio::test(flavor = "multi_thread")]
async fn the_member_has_the_name_and_address_that_were_given() {
    let url = "http://127.0.0.1:12345";
    let cluster = format!("solo={url}");
    let given: &[&str] = &[
        "--name",
        "solo",
        "--initial-cluster",
        &cluster,
        "--initial-cluster-token",
        "a-token",
        "--initial-advertise-peer-urls",
        url,
    ];
    let cases = [
        (&[][..], "default", "http://localhost:2380"),
        (given, "solo", url),
    ];
    for version in EtcdVersion::ALL {
        for (args, name, url) in cases {
            let store = copy_fixture(FIXTURE);
            let folder = scratch::folder().unwrap();
            let data_dir = folder.path().join("data");
            restored(store.path(), &data_dir, args);
            let options = EtcdOptions {
                name: name.to_owned(),
                ..EtcdOptions::default()
            };
            let etcd = Etcd::start_with(version, &data_dir, &options);
            let mut client = etcd.client().await;
            let list = client.member_list().await.unwrap();
            let shown: Vec<_> = list
                .members()
                .iter()
                .map(|member| (member.name(), member.peer_urls()))
                .collect();
            assert_eq!(shown, [(name, &[url.to_owned()][..])], "etcd {version}");
        }
    }
}

/// Clients may have seen newer revisions than the restored one: later revisions are new to them, and what they
/// knew is compacted.
#[tokio::test(flavor = "multi_thread")]
async fn a_bumped_revision_outdates_every_watch() {
    const BUMP: i64 = 1_000_000_000;
    let rows = rows(FIXTURE);
    let &(last, _) = rows.last().unwrap();
    let (revision, (_, _, live)) = rows[1];
    for version in EtcdVersion::ALL {
        let what = format!("etcd {version}");
        let store = copy_fixture(FIXTURE);
        let folder = scratch::folder().unwrap();
        let data_dir = folder.path().join("data");
        let (at, bump) = (revision.to_string(), BUMP.to_string());
        let args = [
            "--revision",
            &at,
            "--bump-revision",
            &bump,
            "--mark-compacted",
        ];
        let result = restored(store.path(), &data_dir, &args);
        assert_eq!(result["revision"], revision + BUMP, "{what}");
        assert_eq!(result["live_keys"], live, "{what}");
        let etcd = Etcd::start(version, &data_dir);
        assert_eq!(etcd.revision().await, revision + BUMP, "{what}");
        assert_eq!(etcd.live_keys_at(revision + BUMP).await, live, "{what}");
        // Like a client that had seen the end of the source's history.
        let options = etcd_client::WatchOptions::new().with_start_revision(last + 1);
        let mut watcher = etcd.watcher().await;
        let mut watch = watcher.watch("key", Some(options)).await.unwrap();
        let answer = loop {
            let answer = watch.message().await.unwrap().unwrap();
            if answer.canceled() {
                break answer;
            }
        };
        assert_eq!(answer.compact_revision(), revision + BUMP, "{what}");
        let mut client = etcd.client().await;
        client.put("after", "the restore", None).await.unwrap();
        assert_eq!(etcd.revision().await, revision + BUMP + 1, "{what}");
        // The source's own keys continue with their versions.
        etcd.compact(revision + BUMP + 1).await;
        assert_eq!(
            etcd.live_keys_at(revision + BUMP + 1).await,
            live + 1,
            "{what}"
        );
    }
}
