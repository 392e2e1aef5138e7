//! The folded snapshot against etcd itself: the hashes of the fixtures' sources, real etcds of three versions
//! started on the result, and random histories made on real etcds.

use crate::support::etcd::{self, Etcd};
use crate::support::history::{Compression, History, HistoryOptions};
use crate::support::scratch;
use crate::support::tools::{self, EtcdVersion};
use crate::support::{
    copy_fixture, deltafold, expected, fixture_names, rounds, run_json, that_start_on,
};
use deltafold::bolt::Database;
use deltafold::mvcc::hash_kv;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// Compacts. There may be nothing to do.
fn compact_or_not(store: &Path, args: &[&str]) -> Value {
    let mut command = deltafold();
    command
        .args(["compact", "--output", "json", "--store"])
        .arg(store)
        .args(args);
    let (code, json, stderr) = run_json(&mut command);
    assert_eq!(code, 0, "{} {args:?}: {stderr}", store.display());
    json
}

fn compact(store: &Path, args: &[&str]) -> Value {
    let json = compact_or_not(store, args);
    assert_eq!(json["status"], "Succeeded", "{json}");
    json
}

/// Compacts at a revision and keeps the whole history.
fn history_at(store: &Path, revision: i64) -> Value {
    let revision = revision.to_string();
    compact_or_not(store, &["--keep-history", "all", "--revision", &revision])
}

/// Returns the hash, the compacted revision and the number of live keys in a result.
fn proof(result: &Value) -> (u64, i64, u64) {
    (
        result["hash_kv"].as_u64().unwrap(),
        result["compact_revision"].as_i64().unwrap(),
        result["live_keys"].as_u64().unwrap(),
    )
}

/// Writes the payload of a result, unpacked by Go's own readers, for etcdutl.
fn unpacked(store: &Path, result: &Value, into: &Path) -> PathBuf {
    let name = result["snapshot"].as_str().unwrap();
    let packed = fs::read(store.join("v2").join(name)).unwrap();
    assert_eq!(
        packed.len() as u64,
        result["bytes_written"].as_u64().unwrap()
    );
    let plain = match result["compression"].as_str().unwrap() {
        "none" => packed,
        "zstd" => zstd::decode_all(packed.as_slice()).unwrap(),
        method => tools::unpacked(method, &packed).unwrap(),
    };
    let file = into.join(format!("{name}.db"));
    fs::write(&file, plain).unwrap();
    file
}

#[test]
fn every_fixture_at_every_listed_revision() {
    for name in fixture_names() {
        let e = expected(&name);
        let last = e.compacted_at_last_revision;
        let store = copy_fixture(&name);
        let result = compact(store.path(), &[]);
        assert_eq!(
            proof(&result),
            (last.hash.into(), last.compact_revision, last.live_keys),
            "{name}"
        );
        assert_eq!(result["revision"], e.last_revision, "{name}");
        let written = match e.compression.as_str() {
            "lzw" | "zlib" => "gzip",
            same => same,
        };
        assert_eq!(result["compression"], written, "{name}");

        for row in &e.hash_kv {
            let store = copy_fixture(&name);
            let revision = row.revision;
            let result = history_at(store.path(), row.revision);
            let want = (row.hash.into(), row.compact_revision, row.live_keys);
            assert_eq!(proof(&result), want, "{name} at {revision}");
            assert_eq!(result["revision"], row.revision);
            // Only the base holds its own revision.
            let is_base = row.revision == e.hash_kv[0].revision;
            let status = if is_base { "NothingToDo" } else { "Succeeded" };
            assert_eq!(result["status"], status, "{name} at {revision}");
        }
    }
}

#[test]
fn etcds_own_tools_accept_every_result() {
    for name in fixture_names() {
        let e = expected(&name);
        for keep in ["latest", "all", "100"] {
            let store = copy_fixture(&name);
            let result = compact(store.path(), &["--keep-history", keep]);
            let files = scratch::folder().unwrap();
            let file = unpacked(store.path(), &result, files.path());
            etcd::bbolt_check(&file).unwrap_or_else(|err| panic!("{name} {keep}: {err}"));
            for &version in that_start_on(&e.etcd_version) {
                let status = etcd::etcdutl_status(version, &file);
                assert_eq!(
                    status["revision"], e.last_revision,
                    "{name} {keep} {version}"
                );
            }
        }
    }
}

/// Real etcds, started on the results, have the hashes of their sources.
#[tokio::test(flavor = "multi_thread")]
async fn real_etcds_serve_every_result() {
    for name in fixture_names() {
        let e = expected(&name);
        for keep in ["latest", "all"] {
            let store = copy_fixture(&name);
            let result = compact(store.path(), &["--keep-history", keep]);
            let files = scratch::folder().unwrap();
            let file = unpacked(store.path(), &result, files.path());
            for &version in that_start_on(&e.etcd_version) {
                let what = format!("{name}, history {keep}, in etcd {version}");
                let etcd = Etcd::restore_and_start(version, &file);
                assert_eq!(etcd.revision().await, e.last_revision, "{what}");
                let last = e.compacted_at_last_revision;
                if keep == "latest" {
                    let hash = etcd.hash_kv(e.last_revision).await;
                    assert_eq!(
                        (hash.hash, hash.compact_revision),
                        (last.hash, last.compact_revision),
                        "{what}"
                    );
                } else {
                    for row in &e.hash_kv {
                        let hash = etcd.hash_kv(row.revision).await;
                        let want = (row.hash, row.compact_revision);
                        assert_eq!(
                            (hash.hash, hash.compact_revision),
                            want,
                            "{what} at {}",
                            row.revision
                        );
                        assert_eq!(
                            etcd.live_keys_at(row.revision).await,
                            row.live_keys,
                            "{what}"
                        );
                    }
                }
                assert_eq!(
                    etcd.live_keys_at(e.last_revision).await,
                    last.live_keys,
                    "{what}"
                );
                // It can be written to, compacted and defragmented like any other etcd.
                let mut client = etcd.client().await;
                client.put("after", "the fold", None).await.unwrap();
                etcd.compact(e.last_revision + 1).await;
                client.defragment().await.unwrap();
                assert_eq!(
                    etcd.live_keys_at(e.last_revision + 1).await,
                    last.live_keys + 1,
                    "{what}"
                );
            }
        }
    }
}

/// Random histories, recorded on real etcds and folded, have the hashes of those etcds.
#[tokio::test(flavor = "multi_thread")]
async fn random_histories_of_real_etcds() {
    let first = crate::support::seed();
    let versions = EtcdVersion::ALL.into_iter();
    for (n, version) in versions.cycle().take(rounds(3, 6)).enumerate() {
        let seed = first + n as u64;
        let folder = scratch::folder().unwrap();
        let etcd = Etcd::start(version, &folder.path().join("data"));
        let history = History::record_with(&etcd, seed, &HistoryOptions::nth(n)).await;
        let compression = Compression::ALL[n % Compression::ALL.len()];
        let bucket = |part: &str| {
            let store = folder.path().join(part);
            history.write_bucket(&store, compression, 1_790_000_000);
            store
        };
        let what = format!("seed {seed}, etcd {version}, {compression:?}");

        let (hash, live) = history.compacted;
        let result = compact(&bucket("latest"), &[]);
        assert_eq!(
            proof(&result),
            (hash.hash.into(), history.last_revision, live),
            "{what}"
        );

        for (i, &(revision, hash, live)) in history.hash_kv.iter().enumerate() {
            let store = bucket(&format!("at-{i}"));
            let result = history_at(&store, revision);
            let want = (hash.hash.into(), hash.compact_revision, live);
            assert_eq!(proof(&result), want, "{what} at {revision}");
        }
    }
}

/// If no key is alive, etcd computes HashKV by a special rule; every version is asked.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_alive_hashes_as_in_etcd() {
    for version in EtcdVersion::ALL {
        for keys in [1, 2, 300] {
            let folder = scratch::folder().unwrap();
            let etcd = Etcd::start(version, &folder.path().join("data"));
            let mut client = etcd.client().await;
            for i in 0..keys {
                client.put(format!("k{i}"), "v", None).await.unwrap();
                client.put(format!("k{i}"), "w", None).await.unwrap();
                client.delete(format!("k{i}"), None).await.unwrap();
            }
            let last = etcd.revision().await;
            for compacted in [last - 2, last] {
                etcd.compact(compacted).await;
                let theirs = etcd.hash_kv(last).await;
                let mut db = etcd.snapshot().await;
                db.truncate(db.len() - 32);
                let ours = hash_kv(&Database::open(db).unwrap(), None).unwrap();
                let what = format!("etcd {version}, {keys} keys, compacted at {compacted}");
                assert_eq!(ours.live_keys, 0, "{what}");
                assert_eq!(ours.hash, theirs.hash, "{what}");
                assert_eq!(ours.compact_revision.0, theirs.compact_revision, "{what}");
            }
        }
    }
}
