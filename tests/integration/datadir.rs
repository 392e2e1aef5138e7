//! WAL and `.snap`: what deltafold writes against etcdutl 3.5, 3.6 and 3.7, real etcds started on it, and our
//! readers on what real etcds leave, killed or running.

use crate::support::etcd::{Etcd, EtcdOptions};
use crate::support::process::free_port;
use crate::support::scratch;
use crate::support::tools::{self, EtcdVersion};
use crate::support::{fixtures_dir, seed};
use deltafold::bolt::Database;
use deltafold::datadir::install::Dir;
use deltafold::datadir::{self, Cluster, snap, wal};
use deltafold::mvcc::history::Base;
use etcd_client::{PutOptions, Txn, TxnOp};
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Writes the first full of a fixture, decompressed, for etcdutl.
fn full(fixture: &str, into: &Path) -> PathBuf {
    let v2 = fixtures_dir().join(fixture).join("v2");
    let mut names: Vec<_> = fs::read_dir(&v2)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("Full-"))
        .collect();
    names.sort();
    let bytes = fs::read(v2.join(&names[0])).unwrap();
    let bytes = match names[0].ends_with(".gz") {
        true => tools::unpacked("gzip", &bytes).unwrap(),
        false => bytes,
    };
    let path = into.join(fixture);
    fs::write(&path, bytes).unwrap();
    path
}

/// The flags of a restore.
#[derive(Clone)]
struct Flags {
    name: String,
    all: String,
    token: String,
    mine: String,
}

impl Flags {
    fn new(name: &str, all: &str, token: &str, mine: &str) -> Self {
        let [name, all, token, mine] = [name, all, token, mine].map(str::to_owned);
        Flags {
            name,
            all,
            token,
            mine,
        }
    }

    fn default() -> Self {
        let url = "http://localhost:2380";
        Flags::new("default", &format!("default={url}"), "etcd-cluster", url)
    }

    fn cluster(&self) -> Cluster {
        Cluster::new(&self.name, &self.all, &self.token, &self.mine).unwrap()
    }

    fn etcdutl(&self, version: EtcdVersion, full: &Path, data_dir: &Path) {
        let args: Vec<OsString> = [
            ("--name", &self.name),
            ("--initial-cluster", &self.all),
            ("--initial-cluster-token", &self.token),
            ("--initial-advertise-peer-urls", &self.mine),
        ]
        .into_iter()
        .flat_map(|(flag, value)| [flag.into(), value.into()])
        .chain(["snapshot".into(), "restore".into(), full.into()])
        .chain(["--data-dir".into(), data_dir.into()])
        .collect();
        // The subcommand comes first.
        let (flags, command) = args.split_at(8);
        tools::run(&tools::etcdutl(version), command.iter().chain(flags)).unwrap();
    }
}

/// Returns flags for a cluster of one member, and for each of three members, one of which has several URLs.
fn flags() -> Vec<Flags> {
    let all = "a=http://10.0.0.1:2380,b=https://b.example:2380,c=http://10.0.0.3:2380,\
               b=HTTP://10.0.0.2:2380,b=unix:///run/b.sock:1";
    let b = "unix:///run/b.sock:1,http://10.0.0.2:2380,https://b.example:2380";
    vec![
        Flags::default(),
        Flags::new("a", all, "tok", "http://10.0.0.1:2380"),
        Flags::new("b", all, "tok", b),
        Flags::new("c<&>ü", "c<&>ü=http://[::1]:1", "", "http://[::1]:1"),
    ]
}

type Entries = Vec<(Vec<u8>, Vec<u8>)>;

fn bucket(db: &Path, name: &[u8]) -> Entries {
    let db = Database::open(File::open(db).unwrap()).unwrap();
    let bucket = db.bucket(name).unwrap().unwrap();
    let mut cursor = db.cursor(&bucket);
    let mut entries = Vec::new();
    while let Some(e) = cursor.next().unwrap() {
        entries.push((e.key.to_vec(), e.value.to_vec()));
    }
    entries
}

fn only(dir: &Path, suffix: &str) -> PathBuf {
    let mut found = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    let mut found = found
        .by_ref()
        .filter(|p| p.to_str().unwrap().ends_with(suffix));
    let path = found.next().unwrap();
    assert_eq!(found.next(), None);
    path
}

/// Replaces etcdutl's WAL and `.snap` by ours.
fn replace(data_dir: &Path, cluster: &Cluster) {
    let (wal, snap) = (data_dir.join("member/wal"), data_dir.join("member/snap"));
    fs::remove_file(only(&wal, ".wal")).unwrap();
    fs::remove_file(only(&snap, ".snap")).unwrap();
    wal::create(&Dir::open(&wal).unwrap(), cluster).unwrap();
    snap::write(&Dir::open(&snap).unwrap(), cluster).unwrap();
}

/// Returns the v2 store inside a `.snap`.
fn v2_store(snap: &[u8]) -> String {
    let text = String::from_utf8_lossy(snap);
    let start = text.find("{\"Root\"").unwrap();
    let end = text.find("\"CurrentVersion\":2}").unwrap();
    text[start..end].to_owned()
}

#[test]
fn files_are_those_of_etcdutl() {
    let folder = scratch::folder().unwrap();
    for version in EtcdVersion::ALL {
        for (n, flags) in flags().iter().enumerate() {
            // etcd 3.4 wrote neither term nor confState.
            let fixture = ["etcd35-gzip", "etcd36-gzip", "etcd34-none", "etcd35-gzip"][n];
            let full = full(fixture, folder.path());
            let dir = folder.path().join(format!("{version}-{n}"));
            flags.etcdutl(version, &full, &dir);
            let cluster = flags.cluster();
            let what = format!("{version}, {}", flags.name);

            let (wal_dir, snap_dir) = (dir.join("member/wal"), dir.join("member/snap"));
            let theirs = wal::read(&wal_dir).unwrap();
            let ours_dir = folder.path().join(format!("ours-{version}-{n}"));
            fs::create_dir(&ours_dir).unwrap();
            let our_wal = wal::create(&Dir::open(&ours_dir).unwrap(), &cluster).unwrap();
            assert_eq!(theirs, wal::read(&ours_dir).unwrap(), "{what}");
            let their_wal = only(&wal_dir, ".wal");
            assert_eq!(our_wal.file_name(), their_wal.file_name());
            let (a, b) = (fs::read(&our_wal).unwrap(), fs::read(&their_wal).unwrap());
            assert_eq!(a.len(), b.len(), "{what}");
            // 3.7 leaves out fields that are zero.
            assert_eq!(a == b, version != EtcdVersion::V3_7, "{what}");
            let entries = |dir: &Path| {
                let mut seen = Vec::new();
                wal::for_each_entry(dir, 0, |e| {
                    let data = String::from_utf8_lossy(e.data).into_owned();
                    let json = data[data.find('{').unwrap()..].to_owned();
                    seen.push((e.index, e.term, e.kind, json));
                    Ok(())
                })
                .unwrap();
                seen
            };
            assert_eq!(entries(&ours_dir), entries(&wal_dir), "{what}");

            let our_snap = snap::write(&Dir::open(&ours_dir).unwrap(), &cluster).unwrap();
            let their_snap = only(&snap_dir, ".snap");
            assert_eq!(our_snap.file_name(), their_snap.file_name());
            let meta = snap::read(&their_snap).unwrap();
            assert_eq!(snap::read(&our_snap).unwrap(), meta, "{what}");
            assert_eq!(snap::newest(&snap_dir, &theirs).unwrap(), Some(meta));
            let (a, b) = (fs::read(our_snap).unwrap(), fs::read(their_snap).unwrap());
            match version {
                EtcdVersion::V3_5 => assert_eq!(a, b, "{what}"),
                EtcdVersion::V3_6 if cluster.members().len() == 1 => {
                    let theirs = v2_store(&b).replace("\"getsFail\":1", "\"getsFail\":0");
                    assert_eq!(v2_store(&a), theirs, "{what}");
                }
                // etcdutl adds the members in random order, which changes their indices.
                _ => assert_eq!(v2_store(&a).len(), v2_store(&b).len(), "{what}"),
            }

            let (db, source) = (snap_dir.join("db"), &full);
            let source = {
                let bytes = fs::read(source).unwrap();
                let path = folder.path().join("source");
                fs::write(&path, &bytes[..bytes.len() - 32]).unwrap();
                path
            };
            for name in ["members", "members_removed"] {
                let ours = cluster.bucket(name.as_bytes()).unwrap();
                assert_eq!(bucket(&db, name.as_bytes()), ours, "{what}");
            }
            for name in ["cluster", "alarm", "lease"] {
                assert_eq!(cluster.bucket(name.as_bytes()), None);
                let kept = bucket(&source, name.as_bytes());
                assert_eq!(bucket(&db, name.as_bytes()), kept, "{what}");
            }
            // Only ours has a new confState: etcdutl keeps the source's.
            let is_conf_state = |e: &(Vec<u8>, Vec<u8>)| e.0 == b"confState";
            let mut expected = bucket(&source, b"meta");
            for (key, value) in cluster.meta_entries() {
                expected.retain(|e| e.0 != key);
                expected.push((key.to_vec(), value));
            }
            expected.sort();
            let conf_state = expected.iter().find(|e| is_conf_state(e)).unwrap();
            let json: serde_json::Value = serde_json::from_slice(&conf_state.1).unwrap();
            let voters: Vec<u64> = cluster.members().iter().map(|m| m.id.0).collect();
            assert_eq!(json["voters"], serde_json::json!(voters));
            expected.retain(|e| !is_conf_state(e));
            let mut meta = bucket(&db, b"meta");
            meta.retain(|e| !is_conf_state(e));
            assert_eq!(meta, expected, "{what}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn real_etcds_serve_from_our_files_twice() {
    let folder = scratch::folder().unwrap();
    for version in EtcdVersion::ALL {
        for fixture in ["etcd34-none", "etcd35-gzip", "etcd36-gzip", "etcd37-gzip"] {
            if fixture == "etcd37-gzip" && version == EtcdVersion::V3_6 {
                continue; // It refuses a database of 3.7 whatever is beside it.
            }
            let full = full(fixture, folder.path());
            let dir = folder.path().join(format!("{version}-{fixture}"));
            let flags = Flags::default();
            flags.etcdutl(version, &full, &dir);
            replace(&dir, &flags.cluster());
            let db = Database::open(File::open(dir.join("member/snap/db")).unwrap()).unwrap();
            let revision = Base::read(&db).unwrap().revision.0;
            let etcd = Etcd::start(version, &dir);
            assert_eq!(etcd.revision().await, revision, "{version} {fixture}");
            let members = etcd.client().await.member_list().await.unwrap();
            assert_eq!(members.members()[0].id(), flags.cluster().me().id.0);
            etcd.client().await.put("x", "y", None).await.unwrap();
            drop(etcd);
            let etcd = Etcd::start(version, &dir);
            assert_eq!(etcd.revision().await, revision + 1, "{version} {fixture}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn three_members_form_one_cluster_and_lose_one() {
    let folder = scratch::folder().unwrap();
    let full = full("etcd35-gzip", folder.path());
    for version in EtcdVersion::ALL {
        let urls: Vec<String> = (0..3)
            .map(|_| format!("http://127.0.0.1:{}", free_port()))
            .collect();
        let all = format!("m0={},m1={},m2={}", urls[0], urls[1], urls[2]);
        let mut starting = Vec::new();
        for (i, url) in urls.iter().enumerate() {
            let flags = Flags::new(&format!("m{i}"), &all, "three", url);
            let dir = folder.path().join(format!("{version}-{i}"));
            flags.etcdutl(version, &full, &dir);
            replace(&dir, &flags.cluster());
            let options = EtcdOptions {
                name: flags.name.clone(),
                // The last occurrence of a flag counts.
                args: [
                    ("--listen-peer-urls", url),
                    ("--initial-advertise-peer-urls", url),
                    ("--initial-cluster", &all),
                ]
                .into_iter()
                .flat_map(|(flag, value)| [flag.into(), value.into()])
                .collect(),
                ..EtcdOptions::default()
            };
            starting.push(tokio::task::spawn_blocking(move || {
                Etcd::start_with(version, &dir, &options)
            }));
        }
        let mut etcds = Vec::new();
        for etcd in starting {
            etcds.push(etcd.await.unwrap());
        }
        let before = etcds[0].revision().await;
        etcds[1].client().await.put("x", "1", None).await.unwrap();
        drop(etcds.pop());
        let mut written = false;
        for _ in 0..50 {
            // If the leader was lost, another one must be elected first.
            written = etcds[0].client().await.put("x", "2", None).await.is_ok();
            if written {
                break;
            }
        }
        assert!(written, "{version}");
        assert!(etcds[1].revision().await >= before + 2, "{version}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_log_of_a_killed_etcd_bounds_what_its_database_lacks() {
    let mut rng = fastrand::Rng::with_seed(seed());
    for version in EtcdVersion::ALL {
        let folder = scratch::folder().unwrap();
        let dir = folder.path().join("data");
        let (member, wal_dir) = (dir.join("member"), dir.join("member/wal"));
        assert!(!datadir::in_use(&member, &wal_dir).unwrap());
        // Without a snapshot, etcd writes its database every hour, so it lags behind the WAL.
        let options = EtcdOptions {
            args: [
                "--backend-batch-interval=1h",
                "--backend-batch-limit=1000000",
            ]
            .map(OsString::from)
            .to_vec(),
            ..EtcdOptions::default()
        };
        let etcd = Etcd::start_with(version, &dir, &options);
        assert!(datadir::in_use(&member, &wal_dir).unwrap(), "{version}");
        let mut client = etcd.client().await;
        for i in 0..rng.usize(20..60) {
            let key = format!("k{}", rng.usize(..10));
            match rng.u8(..6) {
                0 => drop(client.delete(key, None).await.unwrap()),
                1 => {
                    let ops = [
                        TxnOp::put(key, "1", None),
                        TxnOp::put(format!("other{i}"), "2", None),
                    ];
                    drop(client.txn(Txn::new().and_then(ops)).await.unwrap());
                }
                2 => {
                    let lease = client.lease_grant(600, None).await.unwrap().id();
                    let with = PutOptions::new().with_lease(lease);
                    client
                        .put(format!("leased{i}"), "", Some(with))
                        .await
                        .unwrap();
                    client.lease_revoke(lease).await.unwrap();
                }
                _ => drop(
                    client
                        .put(key, vec![7; rng.usize(..3000)], None)
                        .await
                        .unwrap(),
                ),
            }
        }
        // A lease makes etcd write its database; these puts come after that.
        for i in 0..3 {
            client.put("last", vec![i], None).await.unwrap();
        }
        let answered = etcd.revision().await;
        drop(etcd);
        assert!(!datadir::in_use(&member, &wal_dir).unwrap(), "{version}");

        let path = member.join("snap/db");
        let held = Base::read(&Database::open(File::open(&path).unwrap()).unwrap());
        let held = held.unwrap().revision.0;
        let meta = bucket(&path, b"meta");
        let applied = meta.iter().find(|e| e.0 == b"consistent_index");
        let applied = applied.map_or(0, |e| u64::from_be_bytes(e.1[..].try_into().unwrap()));
        let summary = wal::read(&wal_dir).unwrap();
        assert_eq!(summary.torn, None);
        let pending = wal::pending_revisions(&wal_dir, applied).unwrap();
        let lag = u64::try_from(answered - held).unwrap();
        println!("{version}: lag {lag}, {pending:?}, {summary:?}");
        assert!(lag > 0, "{version}");
        assert!(pending.logged >= lag, "{version}: {pending:?} < {lag}");
        assert!(pending.committed <= pending.logged);
        assert_eq!(
            wal::revisions_at_most(&wal_dir, summary.last_index).unwrap(),
            0
        );
        let etcd = Etcd::start(version, &dir);
        assert_eq!(etcd.revision().await, answered);
        drop(etcd);

        let segment = only(&wal_dir, ".wal");
        let bytes = fs::read(&segment).unwrap();
        let end = bytes.iter().rposition(|&b| b != 0).unwrap();
        for n in 0..300 {
            let mut bytes = bytes[..end + 1].to_vec();
            // etcd never serves if not even its first entry, the member, is committed.
            let from = if n < 6 { bytes.len() / 2 } else { 0 };
            let i = rng.usize(from..bytes.len());
            let cut_off = rng.bool();
            match cut_off {
                true => bytes.truncate(i),
                false => bytes[i] = bytes[i].wrapping_add(rng.u8(1..)),
            }
            let cut = scratch::folder().unwrap();
            let wal_dir = cut.path().join("member/wal");
            fs::create_dir_all(&wal_dir).unwrap();
            fs::write(wal_dir.join(segment.file_name().unwrap()), bytes).unwrap();
            let ours = wal::read(&wal_dir);
            if let Err(e) = &ours {
                assert_eq!(e.reason(), deltafold::Reason::CorruptDataDir, "{e}");
            }
            if n < 6 {
                // Without a database: the log may have lost what the database has.
                let etcd = Etcd::try_start_with(version, cut.path(), &EtcdOptions::default());
                let (ours, theirs) = (ours.map(drop), etcd.map(drop));
                // If the fields of a record go beyond its end, 3.5 and 3.6 treat it as a torn write, wherever
                // it is, and cut off all that follows: their decoder reports "unexpected EOF" for both. 3.7
                // refuses, and so do we.
                let cut_off_by_some = matches!(&ours, Err(e) if e.to_string().ends_with(": invalid record"))
                    && version != EtcdVersion::V3_7;
                assert!(
                    ours.is_ok() == theirs.is_ok() || cut_off_by_some,
                    "byte {i}: {ours:?} {theirs:?}"
                );
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_of_several_segments_is_one() {
    let folder = scratch::folder().unwrap();
    let dir = folder.path().join("data");
    let etcd = Etcd::start(EtcdVersion::V3_6, &dir);
    let mut client = etcd.client().await;
    for i in 0..10 {
        let key = format!("k{}", i % 2);
        client.put(key, vec![i; 15 << 20], None).await.unwrap();
    }
    drop(etcd);
    let wal_dir = dir.join("member/wal");
    let segments = wal::segment_paths(&wal_dir).unwrap();
    assert!(segments.len() > 2, "{segments:?}");
    let summary = wal::read(&wal_dir).unwrap();
    assert_eq!(summary.first_index, 1);
    assert!(wal::revisions_at_most(&wal_dir, 0).unwrap() >= 10);
    // A torn record anywhere but in the last segment is damage.
    let first = fs::read(&segments[0]).unwrap();
    fs::write(&segments[0], &first[..first.len() / 2]).unwrap();
    let e = wal::read(&wal_dir).unwrap_err();
    assert_eq!(e.reason(), deltafold::Reason::CorruptDataDir, "{e}");
    fs::write(&segments[0], &first).unwrap();
    fs::remove_file(&segments[1]).unwrap();
    let e = wal::read(&wal_dir).unwrap_err();
    assert!(e.to_string().contains("segments are missing"), "{e}");
}
