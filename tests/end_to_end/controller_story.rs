//! A policy from beginning to end on a real Kubernetes: its Pods really run, with a real etcd.

use crate::support::controller::Controller;
use crate::support::etcd::{Etcd, EtcdOptions, EtcdVersion, Signal, Tls};
use crate::support::keys::Key;
use crate::support::kubelet::{Kubelet, Plan};
use crate::support::made_backups::objects_in;
use crate::support::namespace::{
    NEVER, POLICIES, TASKS, TestNamespace, condition_of, ended, has_ended, label, name, until,
};
use crate::support::{namespace::PATIENCE, tools};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Puts `count` keys and returns the revision.
async fn put(etcd: &Etcd, count: usize) -> i64 {
    let mut kv = etcd.kv().await;
    for i in 0..count {
        let key = format!("/registry/things/{}", i % 40);
        kv.put(key, vec![b'v'; 100 + i], None).await.unwrap();
    }
    etcd.revision().await
}

/// Returns the names of snapshots of a kind, by revision.
fn snapshots(store: &Path, kind: &str) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(store.join("v2"))
        .into_iter()
        .flatten()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| n.starts_with(kind))
        .collect();
    names.sort();
    names
}

/// Unpacks the database of a full.
fn database(store: &Path, full: &str, into: &Path) -> PathBuf {
    let packed = fs::read(store.join("v2").join(full)).unwrap();
    let plain = match full.ends_with(".gz") {
        true => tools::unpacked("gzip", &packed).unwrap(),
        false => packed,
    };
    let file = into.join(format!("{full}.db"));
    fs::write(&file, plain).unwrap();
    file
}

fn names(objects: &[Value]) -> Vec<String> {
    let mut names: Vec<String> = objects.iter().map(|o| name(o).to_owned()).collect();
    names.sort();
    names
}

fn policy(etcd: &Etcd, store: &Path) -> Value {
    json!({
        "metadata": {"name": "main"},
        "spec": {
            "etcd": {"endpoints": [etcd.endpoint()]},
            "store": {"url": "file:///backup", "volume": {"hostPath": store}},
            "snapshot": {
                "fullSchedule": NEVER, "deltaSchedule": NEVER, "compression": "gzip",
            },
            "compaction": {"eventsThreshold": 100},
            "retention": {"policy": "Limit", "limit": 7, "schedule": NEVER},
            "verify": {"schedule": NEVER, "level": "fold", "againstCluster": true},
            "maintenance": {"schedule": NEVER, "defrag": "always"},
        },
    })
}

async fn run_all(space: &TestNamespace, cron_job: &str, kubelet: &Kubelet) {
    let job = space.fire(cron_job).await;
    let done = space.wait_for_job(&job).await;
    assert_eq!(ended(&done), Some("Complete"), "{job}:\n{}", kubelet.logs());
}

async fn wait_last_full(space: &TestNamespace, revision: i64) -> Value {
    space
        .wait_policy("main", "it knows the full", |p| {
            p["status"]["snapshots"]["lastFull"]["endRevision"] == revision
        })
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_backs_up_compacts_and_restores() {
    let space = TestNamespace::new("story").await;
    let kubelet = Kubelet::start(&space).await;
    let etcd = Etcd::start(EtcdVersion::V3_6, &space.folder("etcd").join("data"));
    let store = space.folder("store");
    put(&etcd, 10).await;

    // The policy is applied, and all its objects appear.
    let mut controller = Controller::start(&space, &["--allow-host-path"]).await;
    let applied = space.apply(POLICIES, policy(&etcd, &store)).await;
    let ready = space.wait_condition("main", "Ready", "True").await;
    assert_eq!(ready["observedGeneration"], 1);
    let crons = space.list("cronjobs", "deltafold.io/policy=main").await;
    let all = [
        "main-delta",
        "main-full",
        "main-gc",
        "main-maintain",
        "main-verify",
    ];
    assert_eq!(names(&crons), all);
    for kind in ["full", "delta"] {
        let lease = space.must_get("leases", &format!("main-{kind}-snap")).await;
        assert_eq!(lease["spec"]["holderIdentity"], Value::Null);
    }
    for object in &crons {
        let owner = &object["metadata"]["ownerReferences"][0];
        assert_eq!(owner["uid"], applied["metadata"]["uid"]);
        assert_eq!(owner["controller"], true);
        assert_eq!(object["spec"]["concurrencyPolicy"], "Forbid");
    }
    // No maintenance before there is a backup.
    let is_suspended = |cron: &Value| cron["spec"]["suspend"] == true;
    for cron in &crons {
        assert_eq!(
            is_suspended(cron),
            name(cron) == "main-maintain",
            "{}",
            name(cron)
        );
    }
    space.wait_condition("main", "BackupReady", "Unknown").await;

    // The first full.
    let first = etcd.revision().await;
    run_all(&space, "main-full", &kubelet).await;
    let saved = wait_last_full(&space, first).await;
    let full = &saved["status"]["snapshots"]["lastFull"];
    let fulls = snapshots(&store, "Full-");
    assert_eq!(full["name"], fulls[0].as_str());
    let size = fs::metadata(store.join("v2").join(&fulls[0]))
        .unwrap()
        .len();
    assert_eq!(full["size"], size);
    assert!(full["time"].is_string());
    space.wait_condition("main", "BackupReady", "True").await;
    space
        .wait_until("cronjobs", "main-maintain", "it goes", |c| !is_suspended(c))
        .await;

    // A delta below the threshold, then one that crosses it.
    put(&etcd, 40).await;
    run_all(&space, "main-delta", &kubelet).await;
    let some = space
        .wait_policy("main", "it counts events", |p| {
            p["status"]["snapshots"]["accumulatedDeltaEvents"] == 40
        })
        .await;
    assert!(some["status"]["snapshots"]["lastDelta"]["name"].is_string());
    assert_eq!(space.jobs_for("main", "compaction"), Vec::<Value>::new());
    let second = put(&etcd, 60).await;
    run_all(&space, "main-delta", &kubelet).await;
    let jobs = space.wait_until_ended("main", "compaction", 1).await;
    assert_eq!(ended(&jobs[0]), Some("Complete"), "{}", kubelet.logs());
    let done = space
        .wait_policy("main", "it tells of the compaction", |p| {
            p["status"]["lastCompaction"]["state"] == "Succeeded"
                && p["status"]["snapshots"]["lastFull"]["endRevision"] == second
        })
        .await;
    let last = &done["status"]["lastCompaction"];
    assert_eq!(last["jobName"], name(&jobs[0]));
    assert_eq!(last["trigger"], "EventsThreshold");
    assert_eq!(
        (&last["fullRevision"], &last["deltaRevision"]),
        (&first.into(), &second.into())
    );
    assert_eq!(
        (&last["revision"], &last["exitCode"]),
        (&second.into(), &0.into())
    );
    assert!(last["startTime"].is_string() && last["completionTime"].is_string());
    space
        .wait_condition("main", "CompactionHealthy", "True")
        .await;
    assert_eq!(done["status"]["snapshots"]["accumulatedDeltaEvents"], 0);
    let window = space
        .wait_policy("main", "it tells what can be restored", |p| {
            p["status"]["restorableWindow"]["lastRevision"] == second
        })
        .await;
    assert_eq!(window["status"]["restorableWindow"]["firstRevision"], first);

    // That full is what etcd has.
    let fulls = snapshots(&store, "Full-");
    assert_eq!(fulls.len(), 2, "{fulls:?}");
    let file = database(&store, &fulls[1], &space.folder("databases"));
    let compacted = Etcd::restore_and_start(EtcdVersion::V3_6, &file);
    // A fold without history equals an etcd that is compacted at its last revision.
    etcd.compact(second).await;
    assert_eq!(compacted.hash_kv(second).await, etcd.hash_kv(second).await);
    drop(compacted);
    // Nothing of what is saved can prove the history of an etcd that is compacted so far: a full.
    let proof = put(&etcd, 3).await;
    run_all(&space, "main-delta", &kubelet).await;
    wait_last_full(&space, proof).await;

    // Every kind of task at once: they run one after the other.
    let third = put(&etcd, 20).await;
    let copies = space.folder("copies");
    let tasks = [
        (
            "delta",
            json!({"type": "OnDemandSnapshot", "config": {"onDemandSnapshot": {"type": "delta"}}}),
        ),
        ("fold", json!({"type": "OnDemandCompaction"})),
        (
            "check",
            json!({"type": "Verify", "config": {"verify": {"level": "fold", "againstCluster": true}}}),
        ),
        (
            "tidy",
            json!({"type": "Maintenance", "config": {"maintenance": {"defrag": "always"}}}),
        ),
        (
            "copy",
            json!({"type": "CopyBackups", "config": {"copyBackups": {"targetStore": {
                "url": "file:///copies", "volume": {"hostPath": copies},
            }}}}),
        ),
        (
            "back",
            json!({"type": "Restore", "config": {"restore": {"claimName": "data"}}}),
        ),
        (
            "last",
            json!({"type": "OnDemandSnapshot", "config": {"onDemandSnapshot": {"type": "full", "final": true}}}),
        ),
    ];
    for (name, mut spec) in tasks.clone() {
        spec["policy"] = "main".into();
        let task = json!({"metadata": {"name": name}, "spec": spec});
        space.create(TASKS, task).await;
        // They run in order of their creation times, which have whole seconds.
        tokio::time::sleep(Duration::from_millis(1100)).await;
    }
    for (name, spec) in &tasks {
        let task = space.wait_until(TASKS, name, "it has ended", has_ended);
        let task = task.await;
        let status = &task["status"];
        assert_eq!(
            status["state"],
            "Succeeded",
            "{name}: {status}\n{}",
            kubelet.logs()
        );
        assert!(status["initiatedAt"].is_string() && status["finishedAt"].is_string());
        assert_eq!(status["lastOperation"]["state"], "Completed");
        let job = status["jobName"].as_str().unwrap();
        let job = space.must_get("jobs", job).await;
        assert_eq!(label(&job, "task"), Some(*name));
        assert_eq!(label(&job, "task-type"), spec["type"].as_str());
        assert_eq!(
            job["metadata"]["ownerReferences"][0]["kind"],
            "EtcdBackupTask"
        );
    }
    assert_eq!(kubelet.most_at_once(&[("work", "task")]), 1);
    let restored = Etcd::start(
        EtcdVersion::V3_6,
        &kubelet.claim("data").join("default.etcd"),
    );
    assert_eq!(restored.revision().await, third);
    assert_eq!(
        restored.live_keys_at(third).await,
        etcd.live_keys_at(third).await
    );
    // Restored from a full that a compaction made at exactly this revision.
    etcd.compact(third).await;
    assert_eq!(restored.hash_kv(third).await, etcd.hash_kv(third).await);
    drop(restored);
    assert_eq!(
        snapshots(&copies, "Full-").last(),
        snapshots(&store, "Full-")
            .iter()
            .rfind(|n| !n.contains("final")),
        "{:?}",
        snapshots(&store, "Full-")
    );
    let told = space
        .wait_policy("main", "it tells of the restoration", |p| {
            p["status"]["lastRestoration"]["state"] == "Succeeded"
        })
        .await;
    assert_eq!(told["status"]["lastRestoration"]["revision"], third);
    let proof = put(&etcd, 3).await;
    run_all(&space, "main-delta", &kubelet).await;
    wait_last_full(&space, proof).await;

    // By schedule, too.
    for (cron_job, field) in [
        ("main-verify", "lastVerification"),
        ("main-maintain", "lastDefragmentation"),
    ] {
        run_all(&space, cron_job, &kubelet).await;
        space
            .wait_policy("main", field, |p| {
                p["status"][field]["state"] == "Succeeded"
            })
            .await;
    }
    run_all(&space, "main-gc", &kubelet).await;
    space.wait_condition("main", "BackupVerified", "True").await;

    // A changed policy changes its CronJobs and nothing else.
    let before = space.must_get("cronjobs", "main-delta").await;
    let change = json!({"spec": {"snapshot": {"fullSchedule": "30 1 1 1 *"}, "verify": null}});
    space.patch(POLICIES, "main", change).await;
    space
        .wait_until(
            "cronjobs",
            "main-full",
            "its schedule is the new one",
            |c| c["spec"]["schedule"] == "30 1 1 1 *",
        )
        .await;
    space.wait_until_gone("cronjobs", "main-verify").await;
    space
        .wait_policy("main", "it was acted on", |p| {
            p["status"]["observedGeneration"] == p["metadata"]["generation"]
        })
        .await;
    let after = space.must_get("cronjobs", "main-delta").await;
    assert_eq!(
        after["metadata"]["resourceVersion"],
        before["metadata"]["resourceVersion"]
    );

    // A suspended policy starts nothing; a threshold that was crossed meanwhile acts afterwards.
    space
        .patch(POLICIES, "main", json!({"spec": {"suspend": true}}))
        .await;
    for cron in ["main-full", "main-delta", "main-gc", "main-maintain"] {
        space
            .wait_until("cronjobs", cron, "it is suspended", is_suspended)
            .await;
    }
    put(&etcd, 120).await;
    run_all(&space, "main-delta", &kubelet).await;
    space
        .wait_policy("main", "it counts events", |p| {
            p["status"]["snapshots"]["accumulatedDeltaEvents"].as_i64() >= Some(100)
        })
        .await;
    tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    assert_eq!(space.jobs_for("main", "compaction").len(), 1);
    space
        .patch(POLICIES, "main", json!({"spec": {"suspend": false}}))
        .await;
    let jobs = space.wait_until_ended("main", "compaction", 2).await;
    assert_eq!(ended(&jobs[1]), Some("Complete"), "{}", kubelet.logs());
    for cron in ["main-full", "main-delta", "main-gc", "main-maintain"] {
        space
            .wait_until("cronjobs", cron, "it goes on", |c| !is_suspended(c))
            .await;
    }

    // Events tell users what was decided, metrics tell machines.
    let events = space.events("main").await;
    assert!(
        events.iter().any(|(_, m)| m.contains("eventsThreshold")),
        "{events:?}"
    );
    let metric = r#"deltafold_compaction_jobs_total{succeeded="true"}"#;
    until(PATIENCE, async || {
        (controller.metric(metric) == 2.0).then_some(())
    })
    .await
    .unwrap_or_else(|| panic!("{:?}", controller.asked("/metrics")));
    assert_eq!(controller.metric("deltafold_leader"), 1.0);
    assert_eq!(
        controller.asked("/healthz").map(|(status, _)| status),
        Some(200)
    );

    // Deleting a policy keeps the backup and stops what runs.
    kubelet.plan(&[("work", "full-snapshot")], Plan::Hang);
    let job = space.fire("main-full").await;
    let is_active = |policy: &Value| policy["status"]["activeJobs"] == json!([job]);
    space
        .wait_policy("main", "its Job is active", is_active)
        .await;
    let bucket = objects_in(&store);
    space.delete(POLICIES, "main").await;
    space.wait_until_gone(POLICIES, "main").await;
    for kind in [
        "cronjobs",
        "jobs",
        "pods",
        "leases",
        "roles",
        "rolebindings",
    ] {
        // The objects of a task are deleted with the task.
        space
            .wait_for_some(kind, "deltafold.io/policy=main,deltafold.io/work!=task", 0)
            .await;
    }
    space.wait_until_gone("leases", "main-full-snap").await;
    assert_eq!(objects_in(&store), bucket);
    assert_eq!(controller.stop(), Some(0), "{}", controller.tail());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_follower_saves_and_thresholds_act_beside_it() {
    let space = TestNamespace::new("follows").await;
    let kubelet = Kubelet::start(&space).await;
    let etcd = Etcd::start(EtcdVersion::V3_6, &space.folder("etcd").join("data"));
    let store = space.folder("store");
    put(&etcd, 10).await;
    let _controller = Controller::start(&space, &["--allow-host-path"]).await;
    let policy = json!({
        "metadata": {"name": "main"},
        "spec": {
            "etcd": {"endpoints": [etcd.endpoint()]},
            "store": {"url": "file:///backup", "volume": {"hostPath": store}},
            "snapshot": {"follow": {"deltaPeriod": "1s"}, "leasePrefix": "etcd-main"},
            "compaction": {"eventsThreshold": 200},
        },
    });
    space.apply(POLICIES, policy).await;
    space
        .wait_until("deployments", "main-follow", "its Pod is ready", |d| {
            d["status"]["readyReplicas"] == 1
        })
        .await;
    space
        .wait_policy("main", "it knows a full", |p| {
            p["status"]["snapshots"]["lastFull"]["endRevision"].as_i64() > Some(0)
        })
        .await;
    space.wait_condition("main", "BackupReady", "True").await;
    put(&etcd, 300).await;
    let jobs = space.wait_until_ended("main", "compaction", 1).await;
    assert_eq!(ended(&jobs[0]), Some("Complete"), "{}", kubelet.logs());

    // If etcd does not respond, the follower says so in the delta Lease, and the policy long before a delta is overdue.
    etcd.signal(Signal::STOP);
    let down = space.wait_condition("main", "BackupReady", "False").await;
    assert_eq!(down["reason"], "EtcdUnreachable", "{down}");
    let text = down["message"].as_str().unwrap();
    assert!(text.contains("main-follow"), "{text}");
    etcd.signal(Signal::CONT);
    space.wait_condition("main", "BackupReady", "True").await;

    // Another period rolls out a new follower, suspending stops it cleanly.
    let change = json!({"spec": {"snapshot": {"follow": {"deltaPeriod": "2s"}}}});
    space.patch(POLICIES, "main", change).await;
    let ran = async || {
        let ran = kubelet.ran(&[("work", "follow")]);
        (ran.len() == 2).then_some(ran)
    };
    let ran = space.wait("another Pod", ran).await;
    assert_eq!(kubelet.most_at_once(&[("work", "follow")]), 1);
    assert_eq!(
        ran[0].ended.map(|(_, code)| code),
        Some(0),
        "{}",
        kubelet.logs()
    );
    let change = json!({"spec": {"suspend": true}});
    space.patch(POLICIES, "main", change).await;
    space
        .wait_for_some("pods", "deltafold.io/work=follow", 0)
        .await;
    let last = etcd.revision().await;
    let saved = space.must_get("leases", "etcd-main-delta-snap").await;
    assert_eq!(saved["spec"]["holderIdentity"], last.to_string());
    let policy = space.must_get(POLICIES, "main").await;
    let ready = condition_of(&policy, "Ready").unwrap();
    assert_eq!(
        (&ready["status"], &ready["reason"]),
        (&"True".into(), &"Suspended".into())
    );
}

/// TLS, passwords, encryption: the content of Secrets reaches the program and nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn secrets_of_all_kinds_reach_the_program() {
    let space = TestNamespace::new("secrets").await;
    let kubelet = Kubelet::start(&space).await;
    let certs = space.folder("certs");
    tools::write_certs(&certs);
    let options = EtcdOptions {
        tls: Some(Tls::new(&certs)),
        ..EtcdOptions::default()
    };
    let data = space.folder("etcd").join("data");
    let mut etcd = Etcd::start_with(EtcdVersion::V3_6, &data, &options);
    let mut client = etcd.client().await;
    client.user_add("root", "quite secret", None).await.unwrap();
    client.user_grant_role("root", "root").await.unwrap();
    client.auth_enable().await.unwrap();
    etcd.log_in("root", "quite secret");
    put(&etcd, 10).await;
    let key = Key::new();
    let read = |name: &str| fs::read_to_string(certs.join(name)).unwrap();
    for (name, data) in [
        (
            "tls",
            json!({"ca.crt": read("ca.crt"), "tls.crt": read("node.crt"), "tls.key": read("node.key")}),
        ),
        (
            "auth",
            json!({"username": "root", "password": "quite secret"}),
        ),
        ("age", json!({"identity.txt": key.secret()})),
    ] {
        let secret = json!({"metadata": {"name": name}, "stringData": data});
        space.create("secrets", secret).await;
    }
    let policy = json!({
        "metadata": {"name": "main"},
        "spec": {
            "etcd": {
                "endpoints": [etcd.endpoint()],
                "tlsSecretRef": {"name": "tls"}, "authSecretRef": {"name": "auth"},
            },
            "store": {"url": "/backup/etcd", "volume": {"persistentVolumeClaim": "backup"}},
            "encryption": {"recipients": [key.recipient()], "identitySecretRef": {"name": "age"}},
            "snapshot": {"fullSchedule": NEVER, "deltaSchedule": NEVER},
            "compaction": {"eventsThreshold": 20},
            "verify": {"schedule": NEVER},
        },
    });
    let controller = Controller::start(&space, &["--allow-host-path"]).await;
    space.apply(POLICIES, policy).await;
    space.wait_condition("main", "Ready", "True").await;
    run_all(&space, "main-full", &kubelet).await;
    put(&etcd, 30).await;
    run_all(&space, "main-delta", &kubelet).await;
    let jobs = space.wait_until_ended("main", "compaction", 1).await;
    assert_eq!(ended(&jobs[0]), Some("Complete"), "{}", kubelet.logs());
    run_all(&space, "main-verify", &kubelet).await;
    let fulls = snapshots(&kubelet.claim("backup"), "Full-");
    assert_eq!(fulls.len(), 2, "{fulls:?}");
    assert!(fulls.iter().all(|f| f.ends_with(".age")), "{fulls:?}");
    for text in [kubelet.logs(), controller.log()] {
        assert!(!text.contains("quite secret") && !text.contains("AGE-SECRET-KEY"));
    }
    for secret in ["tls", "auth", "age"] {
        let secret = space.must_get("secrets", secret).await;
        assert_eq!(secret["metadata"]["finalizers"], Value::Null);
    }
}
