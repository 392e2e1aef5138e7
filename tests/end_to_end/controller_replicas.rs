//! Competing replicas of the controller, policies with the same prefix, and API servers that replace each
//! other.

use crate::support::controller::Controller;
use crate::support::kubelet::{Kubelet, Plan, done};
use crate::support::namespace::{
    Kubernetes, NEVER, NO_ELECTION, PATIENCE, POLICIES, TestNamespace, condition_of, until,
};
use crate::support::proxy::{Effect, Proxy, Timing};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

async fn policy(space: &TestNamespace, name: &str) {
    let policy = json!({
        "metadata": {"name": name},
        "spec": {
            "store": {"url": format!("s3://bucket/{name}")},
            "compaction": {"eventsThreshold": 100},
        },
    });
    space.apply(POLICIES, policy).await;
}

async fn compacted(space: &TestNamespace, policy: &str) {
    space
        .wait_policy(policy, "it is compacted", |p| {
            p["status"]["lastCompaction"]["state"] == "Succeeded"
        })
        .await;
    assert_eq!(space.jobs_for(policy, "compaction").len(), 1, "{policy}");
}

fn leads(controller: &Controller) -> bool {
    controller.metric("deltafold_leader") == 1.0
}

async fn wait_until_leads(controller: &mut Controller) {
    let leads = until(PATIENCE, async || leads(controller).then_some(()));
    assert!(
        leads.await.is_some(),
        "it does not lead:\n{}",
        controller.tail()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn two_replicas_and_one_leader() {
    let space = TestNamespace::new("replicas").await;
    let kubelet = Kubelet::start(&space).await;
    kubelet.plan(&[], done());
    let ways = [Proxy::start(space.api.url()), Proxy::start(space.api.url())];
    let works = |way: usize| ways[way].calls().iter().filter(|c| c.works()).count();
    let mut first = Controller::through(&ways[0], &space, &[]).await;
    wait_until_leads(&mut first).await;
    let mut second = Controller::through(&ways[1], &space, &[]).await;
    second.wait_until_ready().await;
    policy(&space, "one").await;
    space.leases("one", 100, 300).await;
    compacted(&space, "one").await;
    assert!(!leads(&second));
    assert_eq!(works(1), 0, "one that stands by wrote something");

    // Asked to end, it releases leadership.
    let began = Instant::now();
    assert_eq!(first.stop(), Some(0), "{}", first.tail());
    wait_until_leads(&mut second).await;
    assert!(
        began.elapsed() < Duration::from_secs(12),
        "{:?}",
        began.elapsed()
    );
    policy(&space, "two").await;
    space.leases("two", 100, 300).await;
    compacted(&space, "two").await;

    // Cut off, it is no longer the leader, and another one takes over when the Lease has expired. Back again,
    // it notices.
    let mut third = Controller::through(&ways[0], &space, &[]).await;
    third.wait_until_ready().await;
    ways[1].cut();
    policy(&space, "three").await;
    space.leases("three", 100, 300).await;
    wait_until_leads(&mut third).await;
    let until_cut = works(1);
    ways[1].mend();
    compacted(&space, "three").await;
    // Either its Pod ends, or it stands by: in no case it leads.
    let gives_up = until(PATIENCE, async || {
        (second.has_ended() || !leads(&second)).then_some(())
    });
    assert!(gives_up.await.is_some(), "two lead:\n{}", second.tail());
    policy(&space, "four").await;
    space.leases("four", 100, 300).await;
    compacted(&space, "four").await;
    assert_eq!(works(1), until_cut, "one that was deposed wrote something");

    // Killed, it is replaced.
    drop(second);
    let mut fourth = Controller::through(&ways[1], &space, &[]).await;
    fourth.wait_until_ready().await;
    third.kill();
    policy(&space, "five").await;
    space.leases("five", 100, 300).await;
    wait_until_leads(&mut fourth).await;
    compacted(&space, "five").await;
    for policy in ["one", "two", "three", "four", "five"] {
        assert_eq!(space.jobs_for(policy, "compaction").len(), 1, "{policy}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_policies_on_one_prefix() {
    let space = TestNamespace::new("prefix").await;
    let kubelet = Kubelet::start(&space).await;
    kubelet.plan(&[], done());
    let _controller = Controller::start(&space, &NO_ELECTION).await;
    let on = |name: &str, url: &str| {
        json!({
            "metadata": {"name": name},
            "spec": {
                "etcd": {"endpoints": [format!("http://{name}:2379")]},
                "store": {"url": url},
                "snapshot": {"fullSchedule": NEVER},
                "retention": {"schedule": NEVER},
                "compaction": {"eventsThreshold": 100},
            },
        })
    };
    space
        .apply(POLICIES, on("first", "s3://bucket/prefix"))
        .await;
    space.wait_condition("first", "Ready", "True").await;
    // Older by a second: creation times have whole seconds.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    space
        .apply(POLICIES, on("second", "s3://bucket/prefix/"))
        .await;
    space
        .apply(POLICIES, on("beside", "s3://bucket/prefix2"))
        .await;
    space.wait_condition("beside", "Ready", "True").await;
    // Both are warned, and both work. Only the younger one removes nothing.
    for (policy, other) in [("first", "second"), ("second", "first")] {
        let shared = space.wait_condition(policy, "StoreShared", "True").await;
        assert_eq!(shared["reason"], "SameStore");
        let text = shared["message"].as_str().unwrap();
        assert!(text.contains(other), "{text}");
        space.wait_condition(policy, "Ready", "True").await;
    }
    let is_suspended = async |cron: &str, wanted: bool| {
        let what = format!("suspended: {wanted}");
        let is_so = |c: &Value| c["spec"]["suspend"] == wanted;
        space.wait_until("cronjobs", cron, &what, is_so).await;
    };
    is_suspended("first-gc", false).await;
    is_suspended("second-gc", true).await;
    is_suspended("second-full", false).await;
    space.leases("second", 100, 300).await;
    compacted(&space, "second").await;

    // When the first policy is gone, nothing is shared any more.
    space.delete(POLICIES, "first").await;
    is_suspended("second-gc", false).await;
    space
        .wait_policy("second", "it shares nothing", |p| {
            condition_of(p, "StoreShared").is_none()
        })
        .await;

    // The same Leases would mix two backups, too.
    let mut same_leases = on("fourth", "s3://bucket/fourth");
    same_leases["spec"]["snapshot"]["leasePrefix"] = json!("beside");
    space.apply(POLICIES, same_leases).await;
    let shared = space.wait_condition("fourth", "StoreShared", "True").await;
    assert_eq!(shared["reason"], "SameLeases");
}

/// What others delete or change is repaired; what they refuse is reported.
#[tokio::test(flavor = "multi_thread")]
async fn what_others_do_is_mended_or_told() {
    let space = TestNamespace::new("others").await;
    let mut controller = Controller::start(&space, &NO_ELECTION).await;
    let policy = json!({
        "metadata": {"name": "main"},
        "spec": {
            "etcd": {"endpoints": ["http://etcd:2379"]},
            "store": {"url": "s3://bucket/main"},
            "snapshot": {"fullSchedule": NEVER, "deltaSchedule": NEVER},
        },
    });
    space.apply(POLICIES, policy).await;
    space.wait_condition("main", "Ready", "True").await;
    let lease = space.must_get("leases", "main-full-snap").await;
    space.delete("leases", "main-full-snap").await;
    let again = async || {
        let there = space.get("leases", "main-full-snap").await?;
        (there["metadata"]["uid"] != lease["metadata"]["uid"]).then_some(())
    };
    space.wait("another Lease", again).await;

    // While no controller runs.
    controller.kill();
    let suspended = json!({"spec": {"suspend": true}});
    space
        .patch("cronjobs", "main-full", suspended.clone())
        .await;
    let _controller = Controller::start(&space, &NO_ELECTION).await;
    space
        .wait_until("cronjobs", "main-full", "it goes", |c| {
            c["spec"]["suspend"] == false
        })
        .await;

    // What the API server refuses is reported, and the rest of the status as well.
    let with = |resources: Value| json!({"spec": {"jobTemplate": {"resources": resources}}});
    let too_much = json!({"requests": {"cpu": "2"}, "limits": {"cpu": "1"}});
    space.patch(POLICIES, "main", with(too_much)).await;
    let refused = space.wait_condition("main", "Ready", "False").await;
    assert_eq!(refused["reason"], "ApplyRefused");
    let text = refused["message"].as_str().unwrap();
    assert!(text.contains("main-full") && text.contains("cpu"), "{text}");
    space.patch(POLICIES, "main", with(Value::Null)).await;
    space.wait_condition("main", "Ready", "True").await;

    // An invalid field stops nothing; suspending with an invalid field stops everything.
    let wrong = json!({"spec": {"snapshot": {"fullSchedule": "61 0 * * *"}}});
    space.patch(POLICIES, "main", wrong).await;
    let invalid = space.wait_condition("main", "Ready", "False").await;
    assert_eq!(invalid["reason"], "SpecInvalid");
    let goes_on = space.must_get("cronjobs", "main-full").await;
    assert_eq!(goes_on["spec"]["suspend"], false);
    space.patch(POLICIES, "main", suspended).await;
    for name in ["main-full", "main-delta"] {
        space
            .wait_until("cronjobs", name, "it is suspended", |c| {
                c["spec"]["suspend"] == true
            })
            .await;
    }
}

/// The API server is replaced while everything runs.
#[tokio::test(flavor = "multi_thread")]
async fn another_api_server() {
    let mut kubernetes = Kubernetes::start().await;
    let api = kubernetes.server.api();
    let space = TestNamespace::on(&api, "restarted").await;
    let kubelet = Kubelet::start(&space).await;
    kubelet.plan(&[], Plan::Hang);
    let controller = Controller::start(&space, &[]).await;
    policy(&space, "before").await;
    policy(&space, "after").await;
    space.leases("before", 100, 300).await;
    space.leases("after", 100, 100).await;
    space.wait_for_jobs("before", "compaction", 1).await;
    kubernetes.server.restart(&kubernetes.etcd).await;
    kubelet.plan(&[], done());
    compacted(&space, "before").await;
    space.leases("after", 100, 300).await;
    compacted(&space, "after").await;
    for policy in ["before", "after"] {
        assert_eq!(
            space.jobs_for(policy, "compaction").len(),
            1,
            "{}",
            controller.tail()
        );
    }
}

/// What the API server refuses is retried with fresh state, and nobody else has to wait for it.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_refused_is_tried_again() {
    let space = TestNamespace::new("refused").await;
    let kubelet = Kubelet::start(&space).await;
    kubelet.plan(&[], done());
    let proxy = Proxy::start(space.api.url());
    let of = |policy: &'static str| {
        move |call: &crate::support::proxy::Call| call.works() && call.name.starts_with(policy)
    };
    proxy.inject(
        of("denied"),
        0,
        6,
        Timing::Before,
        Effect::Answer(403, "Forbidden"),
    );
    proxy.inject(
        of("invalid"),
        0,
        4,
        Timing::Before,
        Effect::Answer(422, "Invalid"),
    );
    proxy.inject(
        of("many"),
        0,
        4,
        Timing::Before,
        Effect::Answer(429, "TooManyRequests"),
    );
    proxy.inject(
        of("conflict"),
        0,
        8,
        Timing::Before,
        Effect::Answer(409, "Conflict"),
    );
    let creates =
        |call: &crate::support::proxy::Call| call.verb == "create" && call.resource == "jobs";
    proxy.inject(
        creates,
        0,
        2,
        Timing::Before,
        Effect::Answer(500, "InternalError"),
    );
    let controller = Controller::through(&proxy, &space, &NO_ELECTION).await;
    let all = ["fine", "denied", "invalid", "many", "conflict"];
    for name in all {
        policy(&space, name).await;
        space.leases(name, 100, 300).await;
    }
    compacted(&space, "fine").await;
    for name in all {
        compacted(&space, name).await;
        space.wait_condition(name, "Ready", "True").await;
    }
    assert!(proxy.all_faults_struck(), "{:?}", proxy.counts());
    // A busy controller may drop a request.
    until(PATIENCE, async || {
        let errors = r#"deltafold_reconcile_errors_total{controller="policy"}"#;
        (controller.metric(errors) > 0.0).then_some(())
    })
    .await
    .unwrap_or_else(|| panic!("{:?}", controller.asked("/metrics")));
}
