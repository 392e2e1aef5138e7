//! Snapshot Leases on a real API server: renewed as etcd-druid expects, and never the reason for a failure.

use crate::support::etcd::Etcd;
use crate::support::follower::{Follower, QUICK, snapshot_command};
use crate::support::kube::{NOBODY, TOKEN, write_kubeconfig};
use crate::support::made_backups::{BASE, Bucket, LAST};
use crate::support::manifests::{documents, read};
use crate::support::namespace::{self, Alone, TestNamespace, until};
use crate::support::restorable::Prefix;
use crate::support::tools::{self, EtcdVersion};
use crate::support::{copy_fixture, deltafold, run_json};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SPACE: &str = "backup";
const NAME: &str = "etcd-main";
const FULL: &str = "etcd-main-full-snap";
const DELTA: &str = "etcd-main-delta-snap";

fn kubeconfig(cluster: &Alone, namespace: &str, token: &str) -> PathBuf {
    let file = cluster.folder.path().join("kubeconfig");
    cluster.server.kubeconfig(&file, namespace, token);
    file
}

/// Creates a Lease as etcd-druid does, with a holder.
async fn create(cluster: &Alone, name: &str, holder: Option<&str>) -> Value {
    let lease = json!({
        "metadata": {
            "name": name,
            "labels": {
                "app.kubernetes.io/component": "snapshot-lease",
                "app.kubernetes.io/managed-by": "etcd-druid",
                "app.kubernetes.io/part-of": NAME,
            },
            "annotations": {"others": "stay"},
            "finalizers": ["example.com/stays"],
            "ownerReferences": [{
                "apiVersion": "druid.gardener.cloud/v1alpha1",
                "kind": "Etcd",
                "name": NAME,
                "uid": "8e9e05c5-2164-694d-cdf8-18194e3a8c32",
                "controller": true,
                "blockOwnerDeletion": true,
            }],
        },
        "spec": {"holderIdentity": holder, "leaseTransitions": 3},
    });
    cluster.space.create("leases", lease).await
}

async fn both(cluster: &Alone) -> (Value, Value) {
    let full = cluster.space.must_get("leases", FULL).await;
    (full, cluster.space.must_get("leases", DELTA).await)
}

fn compact(store: &Path, kubeconfig: &Path, args: &[&str]) -> (i32, Value, String) {
    let mut c = deltafold();
    tools::forget_env(&mut c, &["KUBE"]);
    c.env("KUBECONFIG", kubeconfig);
    c.args(["compact", "--output", "json", "--store"])
        .arg(store);
    c.args(["--snapshot-lease-prefix", NAME]).args(args);
    run_json(&mut c)
}

fn warnings(outcome: &Value) -> Vec<&str> {
    let warnings = outcome["warnings"].as_array().unwrap().iter();
    warnings.map(|w| w.as_str().unwrap()).collect()
}

fn holder(lease: &Value) -> &str {
    lease["spec"]["holderIdentity"].as_str().unwrap()
}

fn annotation<'l>(lease: &'l Value, name: &str) -> &'l str {
    namespace::annotation(lease, name).unwrap()
}

/// Asserts that the Lease reports this snapshot: its size in the store, and the time in its name.
fn assert_last_snapshot(lease: &Value, store: &Path, name: &str) {
    assert_eq!(annotation(lease, "last-snapshot-name"), name);
    let bytes = fs::metadata(store.join("v2").join(name)).unwrap().len();
    assert_eq!(annotation(lease, "last-snapshot-bytes"), bytes.to_string());
    let created = name.split(['-', '.']).nth(3).unwrap();
    let at = chrono::DateTime::parse_from_rfc3339(annotation(lease, "last-snapshot-time"));
    assert_eq!(at.unwrap().timestamp().to_string(), created);
}

/// Returns a Lease without the fields that we may change.
fn others(lease: &Value) -> Value {
    let mut lease = lease.clone();
    let metadata = lease["metadata"].as_object_mut().unwrap();
    metadata.remove("resourceVersion");
    metadata.remove("managedFields");
    let annotations = metadata["annotations"].as_object_mut().unwrap();
    annotations.retain(|name, _| !name.starts_with("deltafold.io/"));
    let spec = lease["spec"].as_object_mut().unwrap();
    spec.remove("holderIdentity");
    spec.remove("renewTime");
    lease
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_of_etcd_druid_are_renewed_and_otherwise_untouched() {
    let cluster = Alone::start().await;
    let full = create(&cluster, FULL, Some("275")).await;
    let delta = create(&cluster, DELTA, Some("628")).await;
    let config = kubeconfig(&cluster, SPACE, TOKEN);
    let store = copy_fixture("kubernetes");
    let (code, outcome, stderr) = compact(store.path(), &config, &["--dry-run"]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(warnings(&outcome), Vec::<&str>::new());
    assert_eq!(cluster.space.must_get("leases", FULL).await, full);
    // Half of the deltas, then all of them.
    for (args, revision, events) in [
        (&["--revision", "505"][..], "505", "123"),
        (&[], "628", "0"),
    ] {
        let (code, outcome, stderr) = compact(store.path(), &config, args);
        assert_eq!((code, warnings(&outcome)), (0, vec![]), "{stderr}");
        let (full_now, delta_now) = both(&cluster).await;
        assert_eq!((holder(&full_now), holder(&delta_now)), (revision, "628"));
        assert_eq!(others(&full_now), others(&full));
        assert_eq!(others(&delta_now), others(&delta));
        assert!(full_now["spec"]["renewTime"].is_string());
        // A compaction saves nothing new.
        assert_eq!(delta_now["spec"]["renewTime"], Value::Null);
        let name = outcome["snapshot"].as_str().unwrap();
        assert_eq!(annotation(&full_now, "last-snapshot-name"), name);
        assert_eq!(annotation(&delta_now, "accumulated-delta-events"), events);
        assert_last_snapshot(&full_now, store.path(), name);
        let newest = annotation(&delta_now, "last-snapshot-name");
        assert_eq!(newest == name, events == "0", "{newest}");
        assert_last_snapshot(&delta_now, store.path(), newest);
        let last = annotation(&delta_now, "restorable-last-revision");
        assert_eq!(last, "628");
        let bytes: u64 = annotation(&delta_now, "accumulated-delta-bytes")
            .parse()
            .unwrap();
        let mut after = 0;
        for file in fs::read_dir(store.path().join("v2")).unwrap() {
            let file = file.unwrap();
            let name = file.file_name().into_string().unwrap();
            let last = name.split('-').nth(2).unwrap().parse::<i64>().unwrap();
            if name.starts_with("Incr") && last > revision.parse().unwrap() {
                after += file.metadata().unwrap().len();
            }
        }
        assert_eq!(bytes, after, "{revision}");
    }
    // There is nothing to do, so nothing is written.
    let before = cluster.space.must_get("leases", FULL).await;
    let (code, outcome, stderr) = compact(store.path(), &config, &[]);
    assert_eq!((code, warnings(&outcome)), (0, vec![]), "{stderr}");
    assert_eq!(outcome["status"], "NothingToDo");
    assert_eq!(cluster.space.must_get("leases", FULL).await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_of_a_live_etcd_bring_the_leases_forward() {
    let cluster = Alone::start().await;
    create(&cluster, FULL, None).await;
    let druids = create(&cluster, DELTA, None).await;
    let config = kubeconfig(&cluster, SPACE, TOKEN);
    let etcd = Etcd::start(EtcdVersion::V3_6, &cluster.folder.path().join("saved"));
    let store = cluster.folder.path().join("store");
    let put = async |n: usize| {
        let mut kv = etcd.kv().await;
        for i in 0..n {
            kv.put(format!("/k/{i}"), vec![7; 300], None).await.unwrap();
        }
        etcd.revision().await
    };
    let save = |kind: &str| {
        let mut c = deltafold();
        tools::forget_env(&mut c, &["KUBE"]);
        c.env("KUBECONFIG", &config);
        c.args(["snapshot", kind, "--output", "json", "--store"]);
        c.arg(&store).args(["--endpoints", etcd.endpoint()]);
        c.args(["--snapshot-lease-prefix", NAME]);
        let (code, outcome, stderr) = run_json(&mut c);
        assert_eq!((code, warnings(&outcome)), (0, vec![]), "{stderr}");
        outcome
    };
    let first = put(20).await;
    save("delta");
    assert_eq!(
        holder(&cluster.space.must_get("leases", FULL).await),
        first.to_string()
    );
    let second = put(30).await;
    let bytes = save("delta")["bytes_written"].as_u64().unwrap();
    let third = put(5).await;
    let bytes = bytes + save("delta")["bytes_written"].as_u64().unwrap();
    assert!(second > first && third > second);
    let (full, delta) = both(&cluster).await;
    assert_eq!(holder(&full), first.to_string());
    assert_eq!(holder(&delta), third.to_string());
    assert_eq!(
        annotation(&delta, "accumulated-delta-bytes"),
        bytes.to_string()
    );
    let events = (third - first).to_string();
    assert_eq!(annotation(&delta, "accumulated-delta-events"), events);
    assert_eq!(others(&delta), others(&druids));
    for lease in [&full, &delta] {
        assert_last_snapshot(lease, &store, annotation(lease, "last-snapshot-name"));
    }
    let restorable = |lease: &Value| {
        ["first", "last"]
            .map(|end| annotation(lease, &format!("restorable-{end}-revision")).to_owned())
    };
    assert_eq!(restorable(&delta), [first, third].map(|r| r.to_string()));
    // A full resets the counts.
    let fourth = put(3).await;
    save("full");
    let (full, delta) = both(&cluster).await;
    assert_eq!(holder(&full), fourth.to_string());
    assert_eq!(annotation(&delta, "accumulated-delta-bytes"), "0");
    assert_eq!(annotation(&delta, "accumulated-delta-events"), "0");
    let name = annotation(&full, "last-snapshot-name");
    assert_last_snapshot(&full, &store, name);
    assert_last_snapshot(&delta, &store, name);
}

/// A follower does not list its store for each delta; it learns of a compaction from the Lease.
#[tokio::test(flavor = "multi_thread")]
async fn a_follower_sees_by_the_lease_that_somebody_has_compacted() {
    let cluster = Alone::start().await;
    let config = kubeconfig(&cluster, SPACE, TOKEN);
    let etcd = Etcd::start(EtcdVersion::V3_6, &cluster.folder.path().join("saved"));
    let prefix = Prefix::local(&cluster.folder.path().join("store"));
    let mut c = snapshot_command("follow", &prefix, &[etcd.endpoint().to_owned()]);
    tools::forget_env(&mut c, &["KUBE"]);
    c.env("KUBECONFIG", &config).args(QUICK);
    c.args(["--snapshot-lease-prefix", NAME]);
    let mut follower = Follower::spawn(&mut c);
    let mut put = async || {
        let mut kv = etcd.kv().await;
        for i in 0..5 {
            kv.put(format!("/k/{i}"), vec![7; 300], None).await.unwrap();
        }
        let revision = etcd.revision().await;
        let told = until(Duration::from_secs(90), async || {
            follower.assert_runs();
            let lease = cluster.space.get("leases", DELTA).await?;
            (holder(&lease) == revision.to_string()).then_some(revision)
        });
        let told = told.await;
        told.unwrap_or_else(|| panic!("{revision}: {}", follower.log()))
    };
    put().await;
    let compacted = put().await;
    let store = Path::new(&prefix.url);
    let (code, outcome, stderr) = compact(store, &config, &[]);
    assert_eq!((code, warnings(&outcome)), (0, vec![]), "{stderr}");
    assert_eq!(
        holder(&cluster.space.must_get("leases", FULL).await),
        compacted.to_string()
    );
    let last = put().await;
    let (full, delta) = both(&cluster).await;
    assert_eq!(holder(&full), compacted.to_string());
    let events = (last - compacted).to_string();
    assert_eq!(annotation(&delta, "accumulated-delta-events"), events);
    let ended = follower.terminate().succeeded();
    assert_eq!(warnings(&ended.json), [""; 0], "{}", ended.log);
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_leases_are_created_where_they_are_wanted() {
    let cluster = Alone::start().await;
    let elsewhere = TestNamespace::named(&cluster.space.api, "elsewhere").await;
    let config = kubeconfig(&cluster, SPACE, TOKEN);
    let store = copy_fixture("kubernetes");
    let (code, outcome, stderr) =
        compact(store.path(), &config, &["--lease-namespace", "elsewhere"]);
    assert_eq!((code, warnings(&outcome)), (0, vec![]), "{stderr}");
    assert_eq!(cluster.space.get("leases", FULL).await, None);
    for name in [FULL, DELTA] {
        let lease = elsewhere.must_get("leases", name).await;
        assert_eq!(holder(&lease), "628");
        assert!(lease["spec"]["renewTime"].is_string(), "{lease}");
    }
    // The next run updates what one could not.
    let (code, outcome, stderr) = compact(store.path(), &config, &[]);
    assert_eq!((code, warnings(&outcome)), (0, vec![]), "{stderr}");
    assert_eq!(outcome["status"], "NothingToDo");
    assert_eq!(holder(&cluster.space.must_get("leases", FULL).await), "628");
    // A namespace that does not exist.
    let (code, outcome, stderr) = compact(store.path(), &config, &["--lease-namespace", "nowhere"]);
    assert_eq!(code, 0, "{stderr}");
    let said = warnings(&outcome);
    assert!(said.len() == 2 && said[0].contains("nowhere"), "{said:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_higher_revision_and_somebody_elses_lease_are_left_alone() {
    let cluster = Alone::start().await;
    let full = create(&cluster, FULL, Some("629")).await;
    let delta = create(&cluster, DELTA, Some("etcd-main-0")).await;
    let config = kubeconfig(&cluster, SPACE, TOKEN);
    let store = copy_fixture("kubernetes");
    let (code, outcome, stderr) = compact(store.path(), &config, &[]);
    assert_eq!(code, 0, "{stderr}");
    let said = warnings(&outcome);
    assert!(
        said.len() == 2 && said[0].contains("at revision 629"),
        "{said:?}"
    );
    assert!(said[1].contains("\"etcd-main-0\""), "{said:?}");
    assert_eq!(cluster.space.must_get("leases", FULL).await, full);
    assert_eq!(cluster.space.must_get("leases", DELTA).await, delta);
}

/// Somebody writes the Leases all the time, and several runs do at once.
#[tokio::test(flavor = "multi_thread")]
async fn conflicting_writers_lose_nothing() {
    let cluster = Alone::start().await;
    create(&cluster, FULL, Some("0")).await;
    create(&cluster, DELTA, None).await;
    let config = kubeconfig(&cluster, SPACE, TOKEN);
    let bucket = Bucket::with_base();
    let steps = [900, 1100, 1300, 1499, 1700, 1900, 2100, LAST];
    let mut from = BASE + 1;
    for (n, last) in steps.into_iter().enumerate() {
        bucket.delta(from, last, 6 + n as i64);
        from = last + 1;
    }
    let done = Arc::new(AtomicBool::new(false));
    let runs: Vec<_> = steps
        .map(|revision| {
            let (store, config) = (bucket.path().to_owned(), config.clone());
            std::thread::spawn(move || {
                let revision = revision.to_string();
                compact(&store, &config, &["--revision", &revision])
            })
        })
        .into();
    let waits = {
        let done = done.clone();
        std::thread::spawn(move || {
            let outcomes: Vec<_> = runs.into_iter().map(|r| r.join().unwrap()).collect();
            done.store(true, Ordering::Relaxed);
            outcomes
        })
    };
    let mut written = 0;
    while !done.load(Ordering::Relaxed) {
        for name in [FULL, DELTA] {
            let mut lease = cluster.space.must_get("leases", name).await;
            lease["metadata"]["labels"]["written"] = written.to_string().into();
            written += usize::from(cluster.space.replace("leases", &lease).await.is_ok());
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
    }
    for (code, _, stderr) in waits.join().unwrap() {
        assert_eq!(code, 0, "{stderr}");
    }
    // How often depends on the machine's load.
    assert!(written > 0, "nobody else wrote during the runs");
    // None of the runs saw the final state; this one does.
    let (code, outcome, stderr) = compact(bucket.path(), &config, &[]);
    assert_eq!((code, warnings(&outcome)), (0, vec![]), "{stderr}");
    let (full, delta) = both(&cluster).await;
    let last = LAST.to_string();
    assert_eq!((holder(&full), holder(&delta)), (&*last, &*last));
    assert_eq!(annotation(&delta, "accumulated-delta-events"), "0");
    assert!(full["metadata"]["labels"]["written"].is_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_role_that_comes_along_is_enough_and_less_is_a_warning() {
    let cluster = Alone::start().await;
    let namespace = format!("namespace: {SPACE}");
    let rbac = read("jobs/rbac.yaml").replace("namespace: default", &namespace);
    cluster.space.apply_all(&documents(&rbac)).await;
    let token = cluster.space.token_of("deltafold").await;
    let store = copy_fixture("kubernetes");
    for (token, sign) in [(NOBODY, "jobs/rbac.yaml"), ("unknown", "Unauthorized")] {
        let config = kubeconfig(&cluster, SPACE, token);
        let (code, outcome, stderr) = compact(store.path(), &config, &[]);
        assert_eq!(code, 0, "{stderr}");
        let said = warnings(&outcome);
        assert!(said.len() == 2 && said[0].contains(sign), "{said:?}");
        assert!(stderr.contains(sign), "{stderr}");
        assert_eq!(cluster.space.get("leases", FULL).await, None);
    }
    let config = kubeconfig(&cluster, SPACE, &token);
    for _ in ["create", "patch"] {
        let bucket = copy_fixture("kubernetes");
        let (code, outcome, stderr) = compact(bucket.path(), &config, &[]);
        assert_eq!((code, warnings(&outcome)), (0, vec![]), "{stderr}");
    }
    assert_eq!(holder(&cluster.space.must_get("leases", FULL).await), "628");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_kubernetes_the_snapshot_is_taken_all_the_same() {
    let cluster = Alone::start().await;
    let config = kubeconfig(&cluster, SPACE, TOKEN);
    // The kubeconfig names a file that vanishes with the server.
    let lasting = cluster.folder.path().join("lasting");
    write_kubeconfig(&lasting, &cluster.server.url(), SPACE, TOKEN);
    let Alone { server, folder, .. } = cluster;
    drop(server);
    let nowhere = folder.path().join("no-such-file");
    for (config, sign) in [
        (&lasting, "refused"),
        (&config, "apiserver.crt"),
        (&nowhere, "KUBECONFIG"),
    ] {
        let store = copy_fixture("kubernetes");
        let (code, outcome, stderr) = compact(store.path(), config, &[]);
        assert_eq!(code, 0, "{stderr}");
        assert_eq!(outcome["status"], "Succeeded");
        let said = warnings(&outcome);
        assert!(
            !said.is_empty() && said.iter().all(|w| w.contains(sign)),
            "{said:?}"
        );
    }
    let store = copy_fixture("kubernetes");
    for prefix in ["", "Etcd", "a_b", "-a", "etcd/../x"] {
        let mut c = deltafold();
        c.args(["compact", "--store"]).arg(store.path());
        c.arg(format!("--snapshot-lease-prefix={prefix}"));
        assert_eq!(c.output().unwrap().status.code(), Some(64), "{prefix}");
    }
}
