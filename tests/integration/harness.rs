//! The servers and tools of the tests work.

use crate::support::scratch;
use std::io::Write as _;
use std::time::{Duration, Instant};

use futures::TryStreamExt as _;
use object_store::path::Path;
use object_store::{ObjectStore as _, ObjectStoreExt as _, WriteMultipart};

use crate::support::etcd::{Etcd, Signal, bbolt_check, etcdutl_status};
use crate::support::etcd_cluster::{Cluster, Member};
use crate::support::fake_s3::{Dialect, FakeS3};
use crate::support::history::{Compression, History, HistoryOptions, Recorder};
use crate::support::proxy::{Effect, Proxy, Timing};
use crate::support::random_load::{Load, LoadOptions};
use crate::support::restorable::Prefix;
use crate::support::s3::S3;
use crate::support::tools::{self, EtcdVersion};
use crate::support::truth::Truth;

async fn etcd_serves(version: EtcdVersion) {
    let folder = scratch::folder().unwrap();
    let etcd = Etcd::start(version, &folder.path().join("data"));
    assert_eq!(etcd.version_string().await, version.as_str());
    let mut client = etcd.client().await;
    for value in ["one", "two", "three"] {
        client.put("key", value, None).await.unwrap();
    }
    let got = client.get("key", None).await.unwrap();
    assert_eq!(got.kvs()[0].value(), b"three");
    assert_eq!(etcd.revision().await, 4);
    let before = etcd.hash_kv(4).await;
    assert_eq!((before.compact_revision, before.revision), (-1, 4));
    assert_ne!(before.hash, etcd.hash_kv(3).await.hash);
    assert_eq!(etcd.live_keys_at(1).await, 0);
    assert_eq!(etcd.live_keys_at(3).await, 1);

    etcd.compact(4).await;
    let after = etcd.hash_kv(4).await;
    assert_eq!(after.compact_revision, 4);
    assert_ne!(after.hash, before.hash);

    // Through a snapshot file, etcd's own tools, another etcd, a stop and a start.
    let file = folder.path().join("snapshot.db");
    std::fs::write(&file, etcd.snapshot().await).unwrap();
    etcd.stop();
    let status = etcdutl_status(version, &file);
    assert_eq!(status["revision"], 4, "{status}");
    bbolt_check(&file).unwrap();
    let restored = Etcd::restore_and_start(version, &file);
    assert_eq!(restored.hash_kv(4).await.hash, after.hash);
    let again = Etcd::start(version, &folder.path().join("data"));
    assert_eq!(again.hash_kv(4).await, after);

    // Every page except the two meta pages.
    let mut broken = std::fs::read(&file).unwrap();
    broken[8192..].fill(0xff);
    std::fs::write(&file, broken).unwrap();
    bbolt_check(&file).unwrap_err();
    Etcd::try_restore_and_start(version, &file).unwrap_err();
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_3_5_serves() {
    etcd_serves(EtcdVersion::V3_5).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_3_6_serves() {
    etcd_serves(EtcdVersion::V3_6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_3_7_serves() {
    etcd_serves(EtcdVersion::V3_7).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn etcds_form_a_cluster() {
    let folder = scratch::folder().unwrap();
    let members = ["a", "b", "c"].map(|name| Member::new(name, folder.path().join(name)));
    let mut cluster = Cluster::start(EtcdVersion::V3_6, &members, "a-token");
    let mut client = cluster.member(0).client().await;
    client.put("key", "one", None).await.unwrap();
    cluster.kill(2);
    assert_eq!(cluster.running().count(), 2);
    cluster.member(0).put_when_led("key", "two").await;
    let revision = cluster.member(0).revision().await;
    cluster.start_again(2);
    assert_eq!(cluster.member(2).revision().await, revision);
    let hash = cluster.member(0).hash_kv(revision).await;
    assert_eq!(cluster.member(2).hash_kv(revision).await, hash);
}

#[tokio::test(flavor = "multi_thread")]
async fn etcd_asks_for_a_password() {
    let folder = scratch::folder().unwrap();
    let mut etcd = Etcd::start(EtcdVersion::V3_6, &folder.path().join("data"));
    let mut client = etcd.client().await;
    client.user_add("root", "secret", None).await.unwrap();
    client.user_grant_role("root", "root").await.unwrap();
    client.auth_enable().await.unwrap();
    client.put("key", "value", None).await.unwrap_err();
    etcd.log_in("root", "secret");
    let mut client = etcd.client().await;
    client.put("key", "value", None).await.unwrap();
    assert_eq!(etcd.live_keys_at(2).await, 1);
}

#[test]
fn tools_answer() {
    for version in EtcdVersion::ALL {
        let said = tools::run(&tools::etcd(version), ["--version"]).unwrap();
        let said = String::from_utf8(said).unwrap();
        assert!(said.contains(version.as_str()), "{said}");
        let said = tools::run(&tools::etcdutl(version), ["version"]).unwrap();
        let said = String::from_utf8(said).unwrap();
        assert!(said.contains(version.as_str()), "{said}");
    }
    // Built from a module, it does not know its version.
    let said = tools::run(&tools::bbolt(), ["version"]).unwrap();
    assert!(String::from_utf8(said).unwrap().contains("bbolt"));
}

#[test]
fn unpack_accepts_what_is_whole() {
    let plain = b"plain text, plain text, plain text";
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    packed.write_all(plain).unwrap();
    let packed = packed.finish().unwrap();
    assert_eq!(tools::unpacked("gzip", &packed).unwrap(), plain);
    assert!(tools::unpacked("zlib", &packed).is_err());
    assert!(tools::unpacked("gzip", &packed[..packed.len() - 1]).is_err());
    assert!(tools::unpacked("gzip", &[&packed[..], b"x"].concat()).is_err());

    let lzw = weezl::encode::Encoder::new(weezl::BitOrder::Lsb, 8)
        .encode(plain)
        .unwrap();
    assert_eq!(tools::unpacked("lzw", &lzw).unwrap(), plain);
}

#[test]
fn fixtures_are_whole() {
    for name in crate::support::fixture_names() {
        let expected = crate::support::expected(&name);
        let last = expected.hash_kv.last().unwrap();
        assert_eq!(last.revision, expected.last_revision, "{name}");
        let copy = crate::support::copy_fixture(&name);
        let count = std::fs::read_dir(copy.path().join("v2")).unwrap().count();
        assert!(count >= 2, "{name}");
    }
}

async fn history_is_recorded(version: EtcdVersion, seed: u64) {
    println!("seed {seed}");
    let folder = scratch::folder().unwrap();
    let etcd = Etcd::start(version, &folder.path().join("data"));
    let options = HistoryOptions {
        steps: 300,
        deltas: 4,
        overrun: 5,
        ..HistoryOptions::default()
    };
    let history = History::record_with(&etcd, seed, &options).await;
    assert_eq!(history.deltas.len(), 4);
    let mut next = history.full_revision + 1;
    for delta in &history.deltas {
        assert_eq!(delta.start, next);
        let events: serde_json::Value = serde_json::from_slice(&delta.json).unwrap();
        for event in events.as_array().unwrap() {
            let revision = event["etcdEvent"]["kv"]["mod_revision"].as_i64().unwrap();
            assert!(
                revision == next || revision == next - 1,
                "{revision} {next}"
            );
            next = next.max(revision + 1);
        }
        assert_eq!(delta.last, next - 1);
    }
    assert_eq!(history.last_revision, next - 1);
    let (revision, before, live) = *history.hash_kv.last().unwrap();
    assert_eq!(revision, history.last_revision);
    assert_ne!(before.compact_revision, history.last_revision);
    assert_eq!(live, history.compacted.1);

    // etcd itself accepts the snapshot, which holds at least what its name says.
    for compression in Compression::ALL {
        let dir = folder.path().join(format!("{compression:?}"));
        let names = history.write_bucket(&dir, compression, 1_700_000_000);
        assert_eq!(names.len(), 5);
        let packed = std::fs::read(dir.join("v2").join(&names[0])).unwrap();
        match compression {
            Compression::Gzip => assert!(tools::unpacked("gzip", &packed).unwrap() == history.full),
            Compression::Zlib => assert!(tools::unpacked("zlib", &packed).unwrap() == history.full),
            Compression::Lzw => assert!(tools::unpacked("lzw", &packed).unwrap() == history.full),
            Compression::Zstd => assert!(zstd::decode_all(&packed[..]).unwrap() == history.full),
            Compression::None => assert!(packed == history.full),
        }
    }
    let file = folder.path().join("full.db");
    std::fs::write(&file, &history.full).unwrap();
    let restored = Etcd::restore_and_start(version, &file);
    assert!(restored.revision().await > history.full_revision);
    for (revision, hash, live) in &history.hash_kv {
        if *revision == history.full_revision {
            assert_eq!(restored.hash_kv(*revision).await, *hash);
            assert_eq!(restored.live_keys_at(*revision).await, *live);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn history_is_recorded_3_5() {
    history_is_recorded(EtcdVersion::V3_5, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn history_is_recorded_3_6() {
    history_is_recorded(EtcdVersion::V3_6, 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn history_is_recorded_3_7() {
    history_is_recorded(EtcdVersion::V3_7, 3).await;
}

/// Random load on a cluster whose members fail. The recorded truth matches the cluster; a recording of it is
/// judged right, and anything else is not.
fn truth_of_a_cluster(version: EtcdVersion) {
    let seed = crate::support::seed();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _within = runtime.enter();
    let folder = scratch::folder().unwrap();
    let members = ["one", "two", "three"].map(|name| Member::new(name, folder.path().join(name)));
    let mut cluster = Cluster::start(version, &members, "load");
    let endpoints = cluster.endpoints();
    let truth = Truth::start(&endpoints);
    let mut recorder = runtime.block_on(Recorder::start(cluster.member(1)));
    let options = LoadOptions {
        rate: None,
        max_value: 2 << 20,
        ..LoadOptions::default()
    };
    let load = Load::start(&endpoints, seed, &options);
    load.wait_for(100);
    runtime.block_on(recorder.take_full(cluster.member(1)));
    load.wait_for(100);
    cluster.kill(0);
    load.wait_for(50);
    cluster.start_again(0);
    let leader = runtime.block_on(cluster.leader());
    runtime.block_on(cluster.move_leader((leader + 1) % 3));
    load.wait_for(50);
    cluster.member(2).signal(Signal::STOP);
    load.wait_for(50);
    cluster.member(2).signal(Signal::CONT);
    let compacted = truth.revision();
    runtime.block_on(cluster.member(1).compact(compacted));
    load.wait_for(50);
    let done = load.stop();
    let revision = runtime.block_on(cluster.member(1).revision());
    truth.wait_for(revision);
    println!("{done} operations, {} events to {revision}", truth.events());
    let mut rng = fastrand::Rng::with_seed(seed);
    let recording = runtime.block_on(recorder.finish(revision, &mut rng, 3));
    let store = folder.path().join("store");
    recording.write_bucket(&store, Compression::Gzip, 1_790_000_000);
    let prefix = Prefix::local(&store);
    let checked = prefix.check_every_restorable(&[&truth], seed, 4);
    assert_eq!(checked.newest_of(0), revision);
    runtime.block_on(truth.is_that_of(cluster.member(0)));

    // Another history from a revision on.
    let other = truth.forked_at(revision - 5, &[]);
    assert_eq!(other.revision(), revision - 5);
    let wrong = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        prefix.check_every_restorable(&[&other], seed, 0)
    }));
    assert!(wrong.is_err(), "more than the truth is not the truth");
}

#[test]
fn the_truth_of_a_cluster_under_load_3_5() {
    truth_of_a_cluster(EtcdVersion::V3_5);
}

#[test]
fn the_truth_of_a_cluster_under_load_3_7() {
    truth_of_a_cluster(EtcdVersion::V3_7);
}

/// The proxy forwards, counts and loses requests, and requests do not wait for each other.
#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_passes_all_on_and_counts_it() {
    const DELAY: Duration = Duration::from_millis(300);
    let server = FakeS3::start(Dialect::default());
    let proxy = Proxy::start(server.s3().endpoint());
    let store = S3::new(&proxy.url()).store("bucket");
    let body: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
    let (one, two) = (Path::from("v2/one"), Path::from("v2/two"));
    store.put(&one, body.clone().into()).await.unwrap();
    let got = store.get(&one).await.unwrap().bytes().await.unwrap();
    assert!(got == body, "the body changed on its way");
    let mut upload = WriteMultipart::new(store.put_multipart(&two).await.unwrap());
    upload.write(&[7; 100]);
    upload.finish().await.unwrap();
    store.head(&two).await.unwrap();
    let listed: Vec<_> = store.list(None).try_collect().await.unwrap();
    assert_eq!(listed.len(), 2);
    let traffic = proxy.take();
    let counts: Vec<_> = traffic.counts().into_iter().collect();
    let kinds = [
        "GET",
        "HEAD",
        "LIST",
        "POST upload",
        "POST uploads",
        "PUT",
        "PUT part",
    ];
    assert_eq!(counts, kinds.map(|kind| (kind.to_owned(), 1)));
    assert_eq!(traffic.requests[0].bytes_up, 3_000_000);
    assert_eq!(traffic.requests[1].bytes_down, 3_000_000);
    assert_eq!(traffic.most_at_once, 1);

    // Twenty at once, each of them delayed.
    proxy.delay(DELAY);
    let began = Instant::now();
    let heads = (0..20).map(|_| store.head(&one));
    futures::future::try_join_all(heads).await.unwrap();
    assert!(began.elapsed() >= DELAY, "{:?}", began.elapsed());
    let traffic = proxy.take();
    assert_eq!(traffic.requests.len(), 20);
    assert!(traffic.most_at_once > 1, "they waited for each other");
    proxy.delay(Duration::ZERO);

    // A lost response and an outage look like failures to the client.
    proxy.inject(|_| true, 0, 1, Timing::After, Effect::Break);
    store.head(&one).await.unwrap();
    assert_eq!(proxy.take().requests.len(), 2, "the client asks again");
    proxy.cut();
    let address = proxy.url();
    let once = || crate::support::http_client().build().unwrap();
    assert!(once().get(&address).send().await.is_err());
    proxy.mend();
    assert!(once().get(&address).send().await.is_ok());
}
