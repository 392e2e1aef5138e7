//! The tools of the controller's tests work: the kubelet really runs Pods, and the proxy really injects faults.

use crate::support::copy_fixture;
use crate::support::kube::{Api, TOKEN};
use crate::support::kubelet::{self, Kubelet, Plan, expanded, moved};
use crate::support::namespace::{POLICIES, TestNamespace, ended, until};
use crate::support::proxy::{Effect, Proxy, Timing};
use reqwest::Method;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Returns a Job in the controller's form that runs `deltafold list`.
fn job(name: &str, store: &str, deadline: Option<u32>) -> Value {
    json!({
        "metadata": {"name": name},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": deadline,
            "podFailurePolicy": {"rules": [{
                "action": "FailJob",
                "onExitCodes": {"containerName": "deltafold", "operator": "In", "values": [66]},
            }]},
            "template": {
                "metadata": {"labels": {
                    "app.kubernetes.io/name": "deltafold", "deltafold.io/work": name,
                }},
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [{
                        "name": "deltafold",
                        "image": "deltafold:test",
                        "args": ["list", "--output", "json", "--store", "file:///store", "--temp-dir", "/scratch"],
                        "env": [
                            {"name": "DELTAFOLD_STORE_SECRET", "value": "/secrets/store"},
                            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                        ],
                        "terminationMessagePolicy": "FallbackToLogsOnError",
                        "volumeMounts": [
                            {"name": "store", "mountPath": "/store"},
                            {"name": "scratch", "mountPath": "/scratch"},
                            {"name": "secret", "mountPath": "/secrets/store", "readOnly": true},
                        ],
                    }],
                    "volumes": [
                        {"name": "store", "hostPath": {"path": store}},
                        {"name": "scratch", "emptyDir": {}},
                        {"name": "secret", "secret": {"secretName": "store"}},
                    ],
                },
            },
        },
    })
}

fn terminated(pod: &Value) -> &Value {
    &pod["status"]["containerStatuses"][0]["state"]["terminated"]
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_jobs_really_run() {
    let space = TestNamespace::new("pods").await;
    let kubelet = Kubelet::start(&space).await;
    let store = copy_fixture("kubernetes");
    let store = store.path().to_str().unwrap();
    space.create("jobs", job("lists", store, None)).await;
    // A Pod waits for its Secret.
    let waits = space
        .wait_for_some("pods", "deltafold.io/work=lists", 1)
        .await;
    assert_eq!(waits[0]["status"]["phase"], "Pending");
    let secret = json!({"metadata": {"name": "store"}, "stringData": {"region": "nowhere"}});
    space.create("secrets", secret).await;
    let done = space.wait_for_job("lists").await;
    assert_eq!(ended(&done), Some("Complete"), "{}", kubelet.logs());
    let ran = kubelet.ran(&[("work", "lists")]);
    assert_eq!(ran.len(), 1);
    assert!(kubelet.logs().contains("Full-"), "{}", kubelet.logs());

    // Another exit code fails the Job at once; the message is the end of the log.
    let nowhere = space.folder("nowhere");
    let failing = job("fails", nowhere.to_str().unwrap(), None);
    space.create("jobs", failing).await;
    let failed = space.wait_for_job("fails").await;
    assert_eq!(ended(&failed), Some("Failed"));
    let conditions = failed["status"]["conditions"].to_string();
    assert!(conditions.contains("PodFailurePolicy"), "{conditions}");
    let pods = space.list("pods", "deltafold.io/work=fails").await;
    assert_eq!(terminated(&pods[0])["exitCode"], 66);
    let message = terminated(&pods[0])["message"].as_str().unwrap();
    assert!(message.contains("NoSnapshots"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_test_says_what_becomes_of_pods() {
    let space = TestNamespace::new("plans").await;
    let kubelet = Kubelet::start(&space).await;
    let said = kubelet::message("compact", 65, "RevisionGap", "a gap");
    kubelet.plan(&[("work", "scripted")], Plan::Exit(65, said.clone()));
    kubelet.plan(&[("work", "held")], Plan::Hold);
    kubelet.plan(&[("work", "hangs")], Plan::Hang);
    kubelet.plan(&[("work", "killed")], Plan::Hang);
    for name in ["scripted", "held", "killed"] {
        space.create("jobs", job(name, "/nowhere", None)).await;
    }
    space
        .create("jobs", job("hangs", "/nowhere", Some(1)))
        .await;
    let secret = json!({"metadata": {"name": "store"}});
    space.create("secrets", secret).await;
    assert_eq!(ended(&space.wait_for_job("scripted").await), Some("Failed"));
    let pods = space.list("pods", "deltafold.io/work=scripted").await;
    assert_eq!(terminated(&pods[0])["message"], said.as_str());

    until(Duration::from_secs(30), async || {
        (kubelet.ran(&[("work", "killed")]).len() == 1).then_some(())
    })
    .await
    .unwrap();
    kubelet.kill(&[("work", "killed")]);
    assert_eq!(ended(&space.wait_for_job("killed").await), Some("Failed"));
    let pods = space.list("pods", "deltafold.io/work=killed").await;
    assert_eq!(terminated(&pods[0])["exitCode"], 137);

    // Deleted at its deadline, like every Pod of such a Job.
    let late = space.wait_for_job("hangs").await;
    let conditions = late["status"]["conditions"].to_string();
    assert!(conditions.contains("DeadlineExceeded"), "{conditions}");
    space
        .wait_for_some("pods", "deltafold.io/work=hangs", 0)
        .await;

    assert_eq!(kubelet.ran(&[("work", "held")]).len(), 0);
    let held = space.must_get("jobs", "held").await;
    assert_eq!(ended(&held), None);
    kubelet.plan(&[("work", "held")], Plan::Exit(0, String::new()));
    assert_eq!(ended(&space.wait_for_job("held").await), Some("Complete"));
    assert_eq!(space.jobs.ever().len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_owner_leaves_is_collected() {
    let space = TestNamespace::new("owners").await;
    let policy = json!({
        "metadata": {"name": "main"},
        "spec": {"store": {"url": "s3://bucket/main"}},
    });
    let policy = space.create(POLICIES, policy).await;
    let owner = json!([{
        "apiVersion": "deltafold.io/v1alpha1", "kind": "EtcdBackupPolicy", "name": "main",
        "uid": policy["metadata"]["uid"], "controller": true, "blockOwnerDeletion": true,
    }]);
    let lease = json!({"metadata": {"name": "owned", "ownerReferences": owner}, "spec": {}});
    space.create("leases", lease).await;
    space.delete(POLICIES, "main").await;
    space.wait_until_gone("leases", "owned").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_way_counts_and_fails_as_it_is_told() {
    let space = TestNamespace::new("way").await;
    let proxy = Proxy::start(space.api.url());
    let through = Api::new(&proxy.url(), TOKEN);
    let maps = space.path("configmaps");
    let map = |name: &str| json!({"metadata": {"name": name}, "data": {"a": "b"}});
    let create = async |name: &str| {
        let map = map(name);
        let body = Some((crate::support::kube::Body::Json, &map));
        through.ask(Method::POST, &maps, body).await
    };
    create("one").await.unwrap();
    assert_eq!(proxy.counts()[&("create", "configmaps".to_owned())], 1);
    let seen = proxy.calls();
    assert_eq!((&seen[0].namespace, seen[0].status), (&space.name, 201));
    assert_eq!(seen[0].json()["metadata"]["name"], "one");

    // The proxy responds to the second request itself; the response to the third is lost.
    proxy.inject(
        |c| c.writes(),
        1,
        1,
        Timing::Before,
        Effect::Answer(409, "Conflict"),
    );
    create("two").await.unwrap();
    assert_eq!(create("three").await.unwrap_err().code, 409);
    assert!(proxy.all_faults_struck());
    assert_eq!(space.get("configmaps", "three").await, None);
    let done = Arc::new(AtomicUsize::new(0));
    let counts = done.clone();
    let act = Effect::Do(Arc::new(move || {
        counts.fetch_add(1, Ordering::Relaxed);
    }));
    proxy.inject(|c| c.writes(), 0, 1, Timing::After, act);
    assert_eq!(create("four").await.unwrap_err().code, 0);
    assert_eq!(done.load(Ordering::Relaxed), 1);
    space.must_get("configmaps", "four").await;
    proxy.inject(|c| c.verb == "get", 0, 1, Timing::Before, Effect::Break);
    let path = format!("{maps}/one");
    assert_eq!(
        through
            .ask(Method::GET, &path, None)
            .await
            .unwrap_err()
            .code,
        0
    );
    through.ask(Method::GET, &path, None).await.unwrap();

    // A watch is forwarded as it comes.
    let path = format!("{maps}?watch=true&timeoutSeconds=2");
    let watch = through.ask(Method::GET, &path, None);
    let (watched, _) = tokio::join!(watch, async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        create("five").await.unwrap();
    });
    assert!(watched.unwrap().to_string().contains("five"));
    assert_eq!(proxy.counts()[&("watch", "configmaps".to_owned())], 1);

    proxy.cut();
    assert_eq!(create("six").await.unwrap_err().code, 0);
    proxy.mend();
    create("six").await.unwrap();
}

#[test]
fn paths_of_mounts_are_moved_and_no_others() {
    let mounts = [
        ("/data/deep".to_owned(), PathBuf::from("/tmp/b")),
        ("/data".to_owned(), PathBuf::from("/tmp/a/")),
    ];
    for (text, wanted) in [
        ("/data", "/tmp/a"),
        ("/data/x", "/tmp/a/x"),
        ("/data/deep/x", "/tmp/b/x"),
        ("file:///data/x", "file:///tmp/a/x"),
        ("--store=/data", "--store=/tmp/a"),
        ("secret_dir=/data/deep", "secret_dir=/tmp/b"),
        ("/database", "/database"),
        ("s3://bucket/data", "s3://bucket/data"),
        ("/other/data", "/other/data"),
    ] {
        assert_eq!(moved(text, &mounts), wanted);
    }
}

#[test]
fn variables_in_arguments_are_expanded() {
    let variables = [("A".to_owned(), "one".to_owned())];
    for (text, wanted) in [
        ("x=$(A)", "x=one"),
        ("$$(A)", "$(A)"),
        ("$(B) $", "$(B) $"),
        ("$$$(A)$(A", "$one$(A"),
    ] {
        assert_eq!(expanded(text, &variables), wanted);
    }
}
