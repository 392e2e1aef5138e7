//! `deltafold snapshot full`: what it holds, which member it is taken from, and what happens if members fail or
//! differ.

use crate::support::etcd::{EtcdOptions, EtcdVersion, Signal, etcdutl_status};
use crate::support::etcd_cluster::{Cluster, Member};
use crate::support::follower::{Follower, QUICK, snapshot, snapshot_command};
use crate::support::random_load::{Load, LoadOptions};
use crate::support::recorded_etcd::with_etcd;
use crate::support::restorable::Prefix;
use crate::support::rounds;
use crate::support::scratch;
use crate::support::tools;
use crate::support::truth::Truth;
use etcd_client::{Client, ConnectOptions, Permission};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;
use tempfile::TempDir;

/// Returns the uncompressed bytes of a snapshot, with the checksum at their end. Go's own readers unpack gzip,
/// zlib and LZW.
fn unpacked(store: &Path, name: &str) -> Vec<u8> {
    let packed = fs::read(store.join("v2").join(name)).unwrap();
    let unpack = |method| tools::unpacked(method, &packed).unwrap();
    match name
        .trim_end_matches(".final")
        .rsplit_once('.')
        .map(|n| n.1)
    {
        None => packed,
        Some("gz") => unpack("gzip"),
        Some("zlib") => unpack("zlib"),
        Some("Z") => unpack("lzw"),
        Some("zst") => zstd::decode_all(packed.as_slice()).unwrap(),
        Some(other) => panic!("{other}"),
    }
}

/// The name of a full tells its revision, even if the revision grows during the transfer.
#[test]
fn its_name_is_what_it_holds() {
    for version in EtcdVersion::ALL {
        with_etcd(version, |world| {
            world.put_many("/a/", 500, 5000);
            let load = Load::start(&world.endpoints(), world.seed, &LoadOptions::default());
            for _ in 0..4 {
                load.wait_for(30);
                let least = world.revision();
                let done = world.snapshot("full", &[]).succeeded();
                let most = world.revision();
                let full = done.last_snapshot();
                let revision = full["last_revision"].as_i64().unwrap();
                assert!(
                    (least..=most).contains(&revision),
                    "{version}: {}",
                    done.json
                );
                assert_eq!(done.json["revision"], revision);
                let hash = world.wait(world.etcd.hash_kv(revision));
                assert_eq!(
                    (&full["hash_kv"], &full["compact_revision"]),
                    (&hash.hash.into(), &hash.compact_revision.into()),
                    "{version} at {revision}"
                );
                let name = full["name"].as_str().unwrap();
                let file = world.folder().join("plain.db");
                fs::write(&file, unpacked(Path::new(&world.prefix.url), name)).unwrap();
                assert_eq!(etcdutl_status(version, &file)["revision"], revision);
            }
            load.stop();
            let last = world.snapshot("full", &[]).succeeded();
            assert_eq!(last.json["revision"], world.revision());
            let checked = world.check_all_is_saved();
            assert_eq!(checked.timelines.len(), 1, "{checked:?}");
        });
    }
}

/// In a prefix with deltas, a full saves what came since the last delta first. A prefix of fulls alone gets no delta.
#[test]
fn it_leaves_no_hole_behind_deltas() {
    with_etcd(EtcdVersion::V3_6, |world| {
        let full = || {
            let done = world.snapshot("full", &[]).succeeded().json;
            let saved = done["snapshots"].as_array().unwrap().iter();
            let kinds = saved.map(|s| s["name"].as_str().unwrap()[..4].to_owned());
            (kinds.collect::<Vec<_>>(), done)
        };
        world.put("/a", "1");
        assert_eq!(full().0, ["Full"]);
        world.put("/a", "2");
        assert_eq!(full().0, ["Full"]);
        world.put("/a", "3");
        world.snapshot("delta", &[]).succeeded();
        // Nothing came since the last delta.
        assert_eq!(full().0, ["Full"]);
        world.put("/a", "4");
        world.put("/a", "5");
        let (kinds, done) = full();
        assert_eq!(kinds, ["Incr", "Full"], "{done:#}");
        assert_eq!(done["revision"], world.revision());
        let checked = world.check_all_is_saved();
        assert_eq!(checked.timelines.len(), 1, "{checked:?}");
    });
}

#[test]
fn compressed_as_wanted() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 300, 3000);
        let all = [
            ("none", ""),
            ("same", ""),
            ("gzip", ".gz"),
            ("zlib", ".gz"),
            ("lzw", ".gz"),
            ("zstd:3", ".zst"),
            ("same", ".zst"),
        ];
        for (method, suffix) in all {
            world.put("/a/00001", method);
            let done = world
                .snapshot("full", &["--compression", method])
                .succeeded();
            let name = done.last_snapshot()["name"].as_str().unwrap();
            let dot = name.find('.').unwrap_or(name.len());
            assert_eq!(&name[dot..], suffix, "{method}");
            let plain = unpacked(Path::new(&world.prefix.url), name);
            let file = world.folder().join("plain.db");
            fs::write(&file, plain).unwrap();
            let status = etcdutl_status(EtcdVersion::V3_6, &file);
            assert_eq!(status["revision"], world.revision(), "{method}");
        }
        assert_eq!(world.prefix.fulls().len(), all.len());
        world.check_all_is_saved();
    });
}

#[test]
fn the_last_of_a_cluster_is_marked() {
    with_etcd(EtcdVersion::V3_7, |world| {
        world.put_many("/a/", 10, 100);
        world.snapshot("delta", &[]).succeeded();
        world.put("/b", "1");
        let done = world.snapshot("full", &["--final"]).succeeded();
        let name = done.last_snapshot()["name"].as_str().unwrap();
        assert!(name.ends_with(".gz.final"), "{name}");
        assert!(world.prefix.names().last().unwrap().is_final);
        world.check_all_is_saved();
    });
}

#[test]
fn a_bandwidth_changes_nothing_but_time() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 100, 10_000);
        let done = world.snapshot("full", &["--bandwidth", "8MiB", "--compression", "none"]);
        let done = done.succeeded();
        let bytes = done.last_snapshot()["bytes"].as_u64().unwrap();
        assert!(bytes > 1 << 20, "{}", done.json);
        world.put("/b", "1");
        world.snapshot("delta", &["--bandwidth", "1M"]).succeeded();
        world.check_all_is_saved();
        for wrong in ["0", "-1", "many", "1.5.5M"] {
            let done = world.snapshot("full", &["--bandwidth", wrong]);
            assert_eq!(
                (done.code, done.reason()),
                (64, "Usage"),
                "{wrong}: {}",
                done.log
            );
        }
    });
}

/// Memory does not grow with the database.
#[test]
fn memory_is_bounded() {
    with_etcd(EtcdVersion::V3_6, |world| {
        let noise = |seed| {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut value = vec![0; 1 << 20];
            rng.fill(&mut value);
            value
        };
        for n in 0..300 {
            world.put(format!("/noise/{n}"), noise(n));
        }
        let mut peaks = Vec::new();
        let ways = [("1", "gzip"), ("2", "zstd:1"), ("2", "none")];
        for (threads, method) in ways.into_iter().take(rounds(1, 3)) {
            let args = ["--threads", threads, "--compression", method];
            let done = world.snapshot("full", &args).succeeded();
            let full = done.last_snapshot();
            assert!(full["bytes"].as_u64().unwrap() > 300 << 20, "{}", done.json);
            peaks.push(done.json["peak_memory_bytes"].as_u64().unwrap());
        }
        println!("peaks of {peaks:?} bytes");
        assert!(peaks.iter().all(|&p| p < 128 << 20), "{peaks:?}");
        let v2 = Path::new(&world.prefix.url).join("v2");
        let fulls = world.prefix.fulls();
        for earlier in &fulls[..fulls.len() - 1] {
            fs::remove_file(v2.join(earlier.to_string())).unwrap();
        }
        world.truth.wait_for(world.revision());
        let truths = [&world.truth];
        world.prefix.check_every_restorable(&truths, world.seed, 0);
    });
}

/// Three members, the record of their history, and a prefix.
struct Three {
    seed: u64,
    truth: Truth,
    cluster: Cluster,
    prefix: Prefix,
    folder: TempDir,
}

impl Three {
    fn revision(&self, runtime: &tokio::runtime::Runtime) -> i64 {
        let running = self.cluster.running().next().unwrap();
        runtime.block_on(running.revision())
    }

    fn put(&self, runtime: &tokio::runtime::Runtime, key: &str, value: Vec<u8>) {
        let running = self.cluster.running().next().unwrap();
        let put = async { running.kv().await.put(key, value, None).await };
        runtime.block_on(put).unwrap();
    }

    /// Asserts that everything in the prefix is right.
    fn check(&self, runtime: &tokio::runtime::Runtime) {
        let revision = self.revision(runtime);
        self.truth.wait_for(revision);
        let checked = self
            .prefix
            .check_every_restorable(&[&self.truth], self.seed, 5);
        assert_eq!(checked.newest_of(0), revision);
    }

    fn take(&self, args: &[&str]) -> crate::support::follower::Ended {
        snapshot("full", &self.prefix, &self.cluster.endpoints(), args)
    }
}

fn with_three(version: EtcdVersion, test: impl FnOnce(&mut Three, &tokio::runtime::Runtime)) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _within = runtime.enter();
    let folder = scratch::folder().unwrap();
    let members = ["one", "two", "three"].map(|name| Member::new(name, folder.path().join(name)));
    let cluster = Cluster::start(version, &members, "three");
    let mut three = Three {
        seed: crate::support::seed(),
        truth: Truth::start(&cluster.endpoints()),
        cluster,
        prefix: Prefix::local(&folder.path().join("store")),
        folder,
    };
    test(&mut three, &runtime);
}

fn member<'a>(json: &'a Value, name: &str) -> &'a Value {
    let all = json["members"].as_array().unwrap();
    all.iter()
        .find(|m| m["name"] == name)
        .unwrap_or_else(|| panic!("{json}"))
}

const NAMES: [&str; 3] = ["one", "two", "three"];

#[test]
fn a_follower_is_preferred() {
    for version in EtcdVersion::ALL {
        with_three(version, |three, runtime| {
            three.put(runtime, "/a", vec![1; 1000]);
            for leader in [0, 1, 2] {
                runtime.block_on(three.cluster.move_leader_to(leader));
                three.put(runtime, "/a", vec![leader as u8; 1000]);
                // Given only the leader, it finds the other members.
                let only = [three.cluster.endpoints()[leader].clone()];
                let done = snapshot("full", &three.prefix, &only, &[]).succeeded();
                let of_leader = three.cluster.endpoints()[leader].clone();
                assert_ne!(done.json["endpoint"], of_leader, "{version}: {}", done.json);
                let members = done.json["members"].as_array().unwrap();
                assert_eq!(members.len(), 3, "{}", done.json);
                let agree = members
                    .iter()
                    .all(|m| m["agrees"] == true && m["error"].is_null());
                assert!(agree, "{version}: {}", done.json);
                let hashes: BTreeSet<u64> = members
                    .iter()
                    .map(|m| m["hash_kv"].as_u64().unwrap())
                    .collect();
                assert_eq!(hashes.len(), 1, "{}", done.json);
            }
            three.check(runtime);
        });
    }
}

/// Stops a member, overwrites the first byte of every `needle` in its database with `by`, and starts it again.
/// bbolt has no checksum over values, so it does not notice.
fn corrupt(three: &mut Three, at: usize, needle: &[u8], by: u8) {
    three.cluster.stop_one(at);
    let db = three.folder.path().join(NAMES[at]).join("member/snap/db");
    let mut bytes = fs::read(&db).unwrap();
    let places: Vec<usize> = bytes
        .windows(needle.len())
        .enumerate()
        .filter(|w| w.1 == needle)
        .map(|w| w.0)
        .collect();
    assert!(!places.is_empty(), "the value is not in the database");
    for place in places {
        bytes[place] = by;
    }
    fs::write(&db, bytes).unwrap();
    three.cluster.start_again(at);
}

#[test]
fn a_member_that_differs_is_named_and_not_taken_from() {
    for version in EtcdVersion::ALL {
        with_three(version, |three, runtime| {
            let needle = b"a value that can be found again".to_vec();
            three.put(runtime, "/a", needle.clone());
            three.put(runtime, "/b", vec![1; 10]);
            // Member 0 becomes the leader: members 1 and 2 are followers, which are preferred, and 1 is the
            // damaged one.
            runtime.block_on(three.cluster.move_leader_to(0));
            corrupt(three, 1, &needle, b'X');
            three.put(runtime, "/c", vec![1; 10]);
            for only in [None, Some(1)] {
                let endpoints = match only {
                    None => three.cluster.endpoints(),
                    // Even if it is the only endpoint.
                    Some(at) => vec![three.cluster.endpoints()[at].clone()],
                };
                let done = snapshot("full", &three.prefix, &endpoints, &[]).succeeded();
                let bad = &three.cluster.endpoints()[1];
                assert_ne!(done.json["endpoint"], **bad, "{version}: {}", done.json);
                assert_eq!(member(&done.json, "two")["agrees"], false, "{}", done.json);
                for name in ["one", "three"] {
                    assert_eq!(member(&done.json, name)["agrees"], true, "{}", done.json);
                }
                let warnings = done.json["warnings"].to_string();
                assert!(warnings.contains("two"), "{warnings}");
                three.put(runtime, "/c", vec![2; 10]);
            }
            three.take(&[]).succeeded();
            three.check(runtime);
        });
    }
}

/// The damage is in changes that no snapshot holds yet, and the damaged member is the one that is asked first.
#[test]
fn no_delta_comes_from_a_member_that_differs() {
    with_three(EtcdVersion::V3_6, |three, runtime| {
        let save = |three: &Three, kind: &str, args: &[&str]| {
            snapshot(kind, &three.prefix, &three.cluster.endpoints(), args)
        };
        three.put(runtime, "/a", vec![1; 10]);
        save(three, "delta", &[]).succeeded();
        three.put(runtime, "/a", vec![2; 10]);
        let done = save(three, "delta", &[]).succeeded();
        assert_eq!(done.json["members"].as_array().unwrap().len(), 3);
        assert_eq!(done.json["warnings"], serde_json::json!([]));
        for kind in ["delta", "full"] {
            let needle = format!("to be found before a {kind}").into_bytes();
            three.put(runtime, "/a", needle.clone());
            three.put(runtime, "/b", vec![1; 10]);
            three.truth.wait_for(three.revision(runtime));
            runtime.block_on(three.cluster.move_leader_to(0));
            corrupt(three, 2, &needle, b'X');
            let done = save(three, kind, &[]).succeeded();
            assert_eq!(member(&done.json, "three")["agrees"], false, "{kind}");
            let warnings = done.json["warnings"].to_string();
            assert!(warnings.contains("three"), "{kind}: {warnings}");
            let saved = &done.json["snapshots"][0]["kind"];
            assert_eq!(saved, "Incr", "{kind}: {}", done.json);
            assert_eq!(done.json["timeline_began"], false, "{kind}");
        }
        three.check(runtime);
        // A user who may read keys, but not request HashKV.
        three.put(runtime, "/c", vec![1; 10]);
        runtime.block_on(async {
            let mut client = three.cluster.member(0).client().await;
            client.role_add("root").await.unwrap();
            client.role_add("reader").await.unwrap();
            let all = Permission::read(vec![0]).with_all_keys();
            client.role_grant_permission("reader", all).await.unwrap();
            for name in ["root", "reader"] {
                client.user_add(name, "secret", None).await.unwrap();
                client.user_grant_role(name, name).await.unwrap();
            }
            client.auth_enable().await.unwrap();
        });
        let done = save(three, "delta", &["--user", "reader:secret"]).succeeded();
        let warnings = done.json["warnings"].as_array().unwrap();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        let warning = warnings[0].as_str().unwrap();
        assert!(warning.contains("could not be compared"), "{warning}");
        let needle = b"to be found when none agrees".to_vec();
        let root = ["--user", "root:secret"];
        runtime.block_on(async {
            let options = ConnectOptions::new().with_user("root", "secret");
            // One member: another may not have applied yet what made the token.
            let endpoint = &three.cluster.endpoints()[..1];
            let mut client = Client::connect(endpoint, Some(options)).await.unwrap();
            client.put("/a", needle.clone(), None).await.unwrap();
        });
        save(three, "delta", &root).succeeded();
        corrupt(three, 1, &needle, b'Y');
        let done = save(three, "delta", &root);
        let refused = (done.code, done.reason());
        assert_eq!(refused, (65, "MembersDiffer"), "{}", done.log);
    });
}

/// The watched member was damaged before the watch began, and the next full finds it out.
#[test]
fn a_follower_leaves_a_member_that_differs() {
    with_three(EtcdVersion::V3_6, |three, runtime| {
        let needle = b"a value that can be found again".to_vec();
        three.put(runtime, "/a", needle.clone());
        three.put(runtime, "/b", vec![1; 10]);
        three.take(&[]).succeeded();
        three.truth.wait_for(three.revision(runtime));
        runtime.block_on(three.cluster.move_leader_to(0));
        corrupt(three, 2, &needle, b'X');
        let endpoints = three.cluster.endpoints();
        let args = [&QUICK[..], &["--max-full-age", "3s"]].concat();
        let mut follower = Follower::start(&three.prefix, &endpoints, &args);
        follower.wait_log(&["\"watching\"", &endpoints[2]]);
        three.put(runtime, "/b", vec![2; 10]);
        follower.wait_log(&["\"watching\"", &endpoints[1]]);
        three.put(runtime, "/b", vec![3; 10]);
        let done = follower.terminate().succeeded();
        assert_eq!(done.json["timeline_began"], false, "{}", done.json);
        three.check(runtime);
    });
}

#[test]
fn where_no_majority_agrees_nothing_is_taken() {
    with_three(EtcdVersion::V3_6, |three, runtime| {
        let needle = b"a value that can be found again".to_vec();
        three.put(runtime, "/a", needle.clone());
        runtime.block_on(three.cluster.move_leader_to(0));
        corrupt(three, 1, &needle, b'X');
        corrupt(three, 2, &needle, b'Y');
        three.put(runtime, "/c", vec![1; 10]);
        let done = three.take(&[]);
        assert_eq!(
            (done.code, done.reason()),
            (65, "MembersDiffer"),
            "{}",
            done.log
        );
        let message = done.json["message"].as_str().unwrap();
        for name in NAMES {
            assert!(message.contains(name), "{message}");
        }
        assert!(three.prefix.names().is_empty());
    });
}

/// Every member responds, but one is paused or killed while it sends.
fn fails_midway(signal: Signal) {
    with_three(EtcdVersion::V3_6, |three, runtime| {
        for n in 0..24u8 {
            let mut value = vec![0; 1 << 20];
            fastrand::Rng::with_seed(n.into()).fill(&mut value);
            three.put(runtime, &format!("/large/{n}"), value);
        }
        let first = three.take(&[]).succeeded();
        let endpoint = first.json["endpoint"].as_str().unwrap().to_owned();
        let at = three
            .cluster
            .endpoints()
            .iter()
            .position(|e| *e == endpoint);
        let at = at.unwrap();
        three.put(runtime, "/b", vec![1]);
        // 24 MiB at 4 MiB/s: it is still running after 1.5 s.
        let mut command = snapshot_command("full", &three.prefix, &three.cluster.endpoints());
        command.args(["--bandwidth", "4MiB", "--log-level", "debug"]);
        command.args(["--keepalive-time", "5s", "--keepalive-timeout", "2s"]);
        let mut taking = Follower::spawn(&mut command);
        std::thread::sleep(Duration::from_millis(1500));
        taking.assert_runs();
        match signal {
            Signal::KILL => three.cluster.kill(at),
            other => three.cluster.member(at).signal(other),
        }
        let done = taking.wait().succeeded();
        if signal == Signal::STOP {
            three.cluster.member(at).signal(Signal::CONT);
        }
        assert_ne!(
            done.json["endpoint"], *endpoint,
            "{}\n{}",
            done.json, done.log
        );
        assert!(done.log.contains(&endpoint), "{}", done.log);
        three.check(runtime);
    });
}

#[test]
fn a_member_that_is_killed_midway() {
    fails_midway(Signal::KILL);
}

#[test]
fn a_member_that_hangs_midway() {
    fails_midway(Signal::STOP);
}

/// Starts a proxy that flips one bit when `at` more bytes of responses have passed; none if `at` is negative.
fn flipping_proxy(server: String, at: Arc<AtomicI64>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(upstream) = TcpStream::connect(&server) else {
                continue;
            };
            let (mut from, mut to) = (client.try_clone().unwrap(), upstream.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Write);
            });
            let (mut from, mut to, at) = (upstream, client, Arc::clone(&at));
            std::thread::spawn(move || {
                let mut buf = vec![0; 64 << 10];
                while let Ok(n @ 1..) = from.read(&mut buf) {
                    let left = at.fetch_sub(n as i64, Ordering::SeqCst);
                    if (0..n as i64).contains(&left) {
                        buf[left as usize] ^= 1;
                    }
                    if to.write_all(&buf[..n]).is_err() {
                        return;
                    }
                }
                let _ = to.shutdown(Shutdown::Write);
            });
        }
    });
    port
}

#[test]
fn a_bit_that_flips_on_the_way_is_found() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _within = runtime.enter();
    let seed = crate::support::seed();
    let mut rng = fastrand::Rng::with_seed(seed);
    let folder = scratch::folder().unwrap();
    let ports = (
        crate::support::process::free_port(),
        crate::support::process::free_port(),
    );
    let at = Arc::new(AtomicI64::new(-1));
    let proxy = flipping_proxy(format!("127.0.0.1:{}", ports.0), Arc::clone(&at));
    let through = format!("http://127.0.0.1:{proxy}");
    let options = EtcdOptions {
        ports: Some(ports),
        args: ["--advertise-client-urls", &through]
            .map(Into::into)
            .to_vec(),
        ..EtcdOptions::default()
    };
    let data = folder.path().join("data");
    let etcd = crate::support::etcd::Etcd::start_with(EtcdVersion::V3_6, &data, &options);
    runtime.block_on(async {
        let mut kv = etcd.kv().await;
        for n in 0..8u64 {
            let mut value = vec![0; 1 << 20];
            fastrand::Rng::with_seed(n).fill(&mut value);
            kv.put(format!("/a/{n}"), value, None).await.unwrap();
        }
    });
    let truth = Truth::start(&[etcd.endpoint().to_owned()]);
    let prefix = Prefix::local(&folder.path().join("store"));
    let through = [through];
    for _ in 0..4 {
        at.store(rng.i64(1 << 20..7 << 20), Ordering::SeqCst);
        let done = snapshot("full", &prefix, &through, &[]);
        // If it hits the framing of HTTP/2, the connection breaks instead.
        assert!(
            [65, 69].contains(&done.code),
            "seed {seed}: {}\n{}",
            done.json,
            done.log
        );
        assert!(prefix.names().is_empty(), "seed {seed}");
    }
    at.store(-1, Ordering::SeqCst);
    snapshot("full", &prefix, &through, &[]).succeeded();
    truth.wait_for(runtime.block_on(etcd.revision()));
    prefix.check_every_restorable(&[&truth], seed, 5);
}
