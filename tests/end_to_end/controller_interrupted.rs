//! The controller is killed at any write, before and after the API server has carried it out: another
//! controller finishes the work, and nothing is done twice. The same if writes fail and the controller lives.

use crate::support::controller::Controller;
use crate::support::etcd::Signal;
use crate::support::kubelet::{Kubelet, Plan, message};
use crate::support::namespace::{
    NEVER, NO_ELECTION, POLICIES, TASKS, TestNamespace, ended, label, moment, name, until,
};
use crate::support::proxy::{Effect, Proxy, Timing};
use futures::StreamExt as _;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The number of stories that run at once: they mostly wait.
const AT_ONCE: usize = 6;
const PATIENCE: Duration = Duration::from_secs(90);

/// A policy whose threshold is crossed as soon as its Leases exist, and a task.
struct Story {
    space: TestNamespace,
    _kubelet: Kubelet,
    proxy: Proxy,
}

impl Story {
    async fn begin() -> Self {
        let space = TestNamespace::new("interrupted").await;
        let kubelet = Kubelet::start(&space).await;
        kubelet.plan(&[], Plan::Exit(0, message("compact", 0, "", "")));
        let policy = json!({
            "metadata": {"name": "main"},
            "spec": {
                "etcd": {"endpoints": ["http://etcd:2379"]},
                "store": {"url": "s3://bucket/main", "secretRef": {"name": "store"}},
                "snapshot": {"fullSchedule": NEVER, "deltaSchedule": NEVER},
                "compaction": {"eventsThreshold": 100},
            },
        });
        space.create(POLICIES, policy).await;
        let task = json!({
            "metadata": {"name": "check"},
            "spec": {"policy": "main", "type": "Verify"},
        });
        space.create(TASKS, task).await;
        let proxy = Proxy::start(space.api.url());
        Self {
            space,
            _kubelet: kubelet,
            proxy,
        }
    }

    /// Renews the Leases once they exist, as Jobs and sidecars do.
    async fn renew(&self) {
        for (kind, revision) in [("full", 100), ("delta", 1000)] {
            let name = format!("main-{kind}-snap");
            if let Some(lease) = self.space.get("leases", &name).await
                && lease["spec"]["holderIdentity"].is_null()
            {
                self.space
                    .renew(&name, revision, &moment(0), Value::Null)
                    .await;
            }
        }
    }

    /// Returns what is still missing at the end of the story.
    async fn lacks(&self) -> Vec<&'static str> {
        self.renew().await;
        let policy = self.space.must_get(POLICIES, "main").await;
        let task = self.space.must_get(TASKS, "check").await;
        let crons = self
            .space
            .names("cronjobs", "deltafold.io/policy=main")
            .await;
        let has = |condition: &str| {
            let conditions = policy["status"]["conditions"].as_array();
            conditions
                .into_iter()
                .flatten()
                .any(|c| c["type"] == condition && c["status"] == "True")
        };
        let all = [
            (crons.len() == 2, "CronJobs"),
            (has("Ready"), "Ready"),
            (has("BackupReady"), "BackupReady"),
            (has("CompactionHealthy"), "CompactionHealthy"),
            (
                policy["status"]["lastCompaction"]["state"] == "Succeeded",
                "the compaction",
            ),
            (policy["status"]["activeJobs"].is_null(), "no active Jobs"),
            (task["status"]["state"] == "Succeeded", "the task"),
        ];
        let lacking = all.into_iter().filter(|(is, _)| !is);
        lacking.map(|(_, what)| what).collect()
    }

    /// Asserts that nothing was done twice.
    fn check(&self, what: &str) {
        let jobs = self.space.jobs.ever();
        let of = |work: &str| {
            let jobs = jobs.iter().filter(|j| label(j, "work") == Some(work));
            jobs.map(name).collect::<Vec<_>>()
        };
        assert_eq!(of("compaction").len(), 1, "{what}: {:?}", of("compaction"));
        assert_eq!(of("task").len(), 1, "{what}: {:?}", of("task"));
        assert_eq!(jobs.len(), 2, "{what}");
        for job in &jobs {
            assert_eq!(ended(job), Some("Complete"), "{what}: {}", name(job));
        }
    }
}

/// Plays the story with a controller that is killed at its `n`th write, and another one. Returns whether there
/// were that many writes.
async fn killed_at(n: usize, when: Timing) -> bool {
    let what = format!("killed at write {n}, {when:?}");
    let story = Story::begin().await;
    // Without leader election it starts at once.
    let mut first = Controller::through(&story.proxy, &story.space, &NO_ELECTION).await;
    let pid = rustix::process::Pid::from_raw(first.id().try_into().unwrap()).unwrap();
    let kill = move || {
        // Not waited for, so the pid is still its own.
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    };
    let then = Effect::Do(Arc::new(kill));
    story
        .proxy
        .inject(|call| call.works(), n - 1, 1, when, then);
    let ended_alone = until(PATIENCE, async || {
        if first.has_ended() {
            return Some(false);
        }
        story.lacks().await.is_empty().then_some(true)
    });
    let alone = ended_alone.await;
    if alone != Some(false) {
        assert_eq!(
            alone,
            Some(true),
            "{what}: it lacks {:?}",
            story.lacks().await
        );
        story.check(&what);
        return false;
    }
    assert!(
        story.proxy.all_faults_struck(),
        "{what}: it ended by itself:\n{}",
        first.tail()
    );
    drop(first);
    let second = Controller::start(&story.space, &NO_ELECTION).await;
    let done = until(PATIENCE, async || {
        story.lacks().await.is_empty().then_some(())
    });
    if done.await.is_none() {
        panic!(
            "{what}: it lacks {:?}:\n{}",
            story.lacks().await,
            second.tail()
        );
    }
    story.check(&what);
    true
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_between_any_two_writes() {
    let mut n = 1;
    let mut writes = 0;
    let mut more = true;
    while more {
        let batch = (n..n + AT_ONCE / 2).flat_map(|n| [(n, Timing::Before), (n, Timing::After)]);
        let stories = batch.map(|(n, when)| killed_at(n, when));
        let results = futures::future::join_all(stories).await;
        writes += results.iter().filter(|struck| **struck).count();
        more = results.iter().any(|struck| *struck);
        n += AT_ONCE / 2;
    }
    println!("{writes} controllers were killed");
    // Leases, CronJobs, Jobs, statuses.
    assert!(writes >= 2 * 8, "{writes}");
}

/// The ways in which a write fails.
const WAYS: [(Timing, fn() -> Effect); 5] = [
    (Timing::Before, || Effect::Answer(500, "InternalError")),
    (Timing::Before, || Effect::Answer(409, "Conflict")),
    (Timing::Before, || Effect::Break),
    (Timing::After, || Effect::Break),
    (Timing::After, || Effect::Answer(504, "Timeout")),
];
/// Each story lets a part of all kinds of writes fail: pauses double with each failure, up to a minute.
const PARTS: u64 = 3;

/// Plays the story in which each kind of write to each object of one part fails once.
async fn failing(part: u64, (when, then): (Timing, fn() -> Effect)) -> usize {
    let story = Story::begin().await;
    let failed: Arc<Mutex<BTreeSet<String>>> = Arc::default();
    let seen = failed.clone();
    let which = move |call: &crate::support::proxy::Call| {
        let what = format!("{} {} {}", call.verb, call.resource, call.name);
        let mut hasher = DefaultHasher::new();
        what.hash(&mut hasher);
        let is_of_part = hasher.finish() % PARTS == part;
        call.works() && is_of_part && seen.lock().unwrap().insert(what)
    };
    story.proxy.inject(which, 0, usize::MAX, when, then());
    let controller = Controller::through(&story.proxy, &story.space, &NO_ELECTION).await;
    let done = until(2 * PATIENCE, async || {
        story.lacks().await.is_empty().then_some(())
    });
    let done = done.await;
    let failed = failed.lock().unwrap().clone();
    if done.is_none() {
        let lacks = story.lacks().await;
        panic!(
            "{failed:?} failed: it lacks {lacks:?}:\n{}",
            controller.tail()
        );
    }
    story.check(&format!("{failed:?} failed"));
    failed.len()
}

/// Every kind of write fails once in every way, and the controller still completes the work.
#[tokio::test(flavor = "multi_thread")]
async fn every_write_fails_in_every_way_and_succeeds_at_last() {
    let stories = WAYS
        .into_iter()
        .flat_map(|way| (0..PARTS).map(move |part| failing(part, way)));
    let failed: Vec<usize> = futures::stream::iter(stories)
        .buffer_unordered(AT_ONCE)
        .collect()
        .await;
    // Leases, CronJobs, Jobs, statuses.
    let failed: usize = failed.iter().sum();
    assert!(failed >= WAYS.len() * 6, "{failed}");
}

/// The API server goes down repeatedly; nothing is lost, and nothing is done twice.
#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_goes_and_comes() {
    let story = Arc::new(Story::begin().await);
    let controller = Controller::through(&story.proxy, &story.space, &NO_ELECTION).await;
    let stop = Arc::new(AtomicBool::new(false));
    let seed = crate::support::seed();
    let (of_cuts, stops) = (story.clone(), stop.clone());
    let cuts = tokio::spawn(async move {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut pause = async |longest| {
            tokio::time::sleep(Duration::from_millis(rng.u64(10..longest))).await;
        };
        for _ in 0..12 {
            pause(700).await;
            if stops.load(Ordering::Relaxed) {
                break;
            }
            of_cuts.proxy.cut();
            pause(300).await;
            of_cuts.proxy.mend();
        }
    });
    let done = until(2 * PATIENCE, async || {
        story.lacks().await.is_empty().then_some(())
    });
    let done = done.await;
    stop.store(true, Ordering::Relaxed);
    cuts.await.unwrap();
    if done.is_none() {
        panic!("it lacks {:?}:\n{}", story.lacks().await, controller.tail());
    }
    story.check("cut off again and again");
}
