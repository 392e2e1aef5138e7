//! Thresholds: where one is crossed, a Job folds the deltas, or takes a full snapshot instead; and how it ended.
//!
//! When, `threshold` decides; what the Job looks like, `jobs` knows. Run for each policy of which a Lease, a Job or
//! the policy itself has changed; again by itself only when a time comes at which something is due.

use super::admission::{Asker, GRANT_LASTS, Key};
use super::api::{
    Condition, EtcdBackupPolicy, EtcdBackupPolicyStatus, LastCompaction, LastRun, RunState,
    TaskType,
};
use super::conditions::{self, Judgement};
use super::context::{Context, Failure, label};
use super::jobs::{self, Work};
use super::leases::LeaseFacts;
use super::outcome::{self, JOB_DELETED, PODS_COME};
use super::policy;
use super::threshold::{self, Backoff, Decision};
use super::times::{later, requeue, sooner, utc};
use super::turns::{self, TRIGGER, key};
use crate::base::lock;
use chrono::{DateTime, SubsecRound, Utc};
use k8s_openapi::api::batch::v1::Job;
use kube::ResourceExt;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use serde_json::json;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

/// The owner of what it writes.
const MANAGER: &str = "deltafold-compaction";
const HEALTHY: &str = "CompactionHealthy";
/// On the Job: the status of the Leases that it was made for, so that a lost write loses nothing.
const FULL_REVISION: &str = "deltafold.io/full-revision";
const DELTA_REVISION: &str = "deltafold.io/delta-revision";
/// On the Job: how many have failed before it.
const ATTEMPT: &str = "deltafold.io/attempt";
/// On the Job: why it was made.
const REASON: &str = "deltafold.io/reason";

/// A threshold's Job, by what stands on it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Started {
    name: String,
    trigger: String,
    full_revision: i64,
    delta_revision: i64,
    full_snapshot: bool,
    attempt: i32,
    created: Option<DateTime<Utc>>,
    finished: bool,
}

impl Started {
    fn read(job: &Job) -> Option<Started> {
        let annotations = job.metadata.annotations.as_ref()?;
        let number = |key: &str| annotations.get(key)?.parse::<i64>().ok();
        Some(Started {
            name: job.name_any(),
            trigger: annotations.get(TRIGGER)?.clone(),
            full_revision: number(FULL_REVISION)?,
            delta_revision: number(DELTA_REVISION)?,
            full_snapshot: label(job, jobs::LABEL_WORK) == Some(Work::FullSnapshot.as_str()),
            attempt: number(ATTEMPT)
                .and_then(|n| i32::try_from(n).ok())
                .unwrap_or(0),
            created: job.metadata.creation_timestamp.as_ref().map(utc),
            finished: outcome::is_finished(job),
        })
    }

    /// Of two that were made in one second, the one that runs is the later one.
    fn age(&self) -> (Option<DateTime<Utc>>, bool, i32, i64, &str) {
        (
            self.created,
            !self.finished,
            self.attempt,
            self.delta_revision,
            &self.name,
        )
    }

    fn annotations(&self, reason: &str) -> BTreeMap<String, String> {
        let annotations = [
            (TRIGGER, self.trigger.clone()),
            (FULL_REVISION, self.full_revision.to_string()),
            (DELTA_REVISION, self.delta_revision.to_string()),
            (ATTEMPT, self.attempt.to_string()),
            (REASON, reason.to_owned()),
        ];
        annotations.map(|(k, v)| (k.to_owned(), v)).into()
    }

    /// As the status has it.
    fn ran(&self, run: LastRun) -> LastCompaction {
        LastCompaction {
            job_name: self.name.clone(),
            trigger: self.trigger.clone(),
            full_revision: self.full_revision,
            delta_revision: self.delta_revision,
            full_snapshot: self.full_snapshot,
            failures: match run.state {
                RunState::Running => self.attempt,
                RunState::Succeeded => 0,
                RunState::Failed => self.attempt.saturating_add(1),
            },
            run,
        }
    }
}

/// The last compaction, from what the status tells and what the newest Job does: either may be the later one. `pending`
/// are Jobs that may be there though the cache has not got them yet.
fn observe(
    old: Option<&LastCompaction>,
    newest: Option<(&Started, LastRun)>,
    pending: &[String],
    now: DateTime<Utc>,
) -> Option<LastCompaction> {
    let is_later = |job: &Started, old: &LastCompaction| {
        let began = old.run.start_time.map(|t| t.trunc_subsecs(0));
        job.name == old.job_name || job.created >= began
    };
    match (old, newest) {
        (old, Some((job, run))) if old.is_none_or(|old| is_later(job, old)) => {
            let known = old.filter(|o| o.job_name == job.name);
            let known = known.filter(|o| outcome::knows_more(&o.run, &run));
            Some(known.cloned().unwrap_or_else(|| job.ran(run)))
        }
        (Some(old), _)
            if old.run.state == RunState::Running && !pending.contains(&old.job_name) =>
        {
            let mut gone = old.clone();
            gone.failures = old.failures.saturating_add(1);
            gone.run.state = RunState::Failed;
            gone.run.reason = Some(JOB_DELETED.to_owned());
            gone.run.message = Some("the Job was deleted before its end was seen".to_owned());
            gone.run.completion_time = Some(now.trunc_subsecs(0));
            Some(gone)
        }
        (old, _) => old.cloned(),
    }
}

/// By policy, the Job that may have been created: the create call got no answer.
#[derive(Default)]
pub(super) struct Unanswered(Mutex<HashMap<(String, String), Start>>);

impl Unanswered {
    fn of(&self, policy: &(String, String)) -> Option<Start> {
        lock(&self.0).get(policy).cloned()
    }

    fn remember(&self, policy: &(String, String), start: &Start) {
        lock(&self.0).insert(policy.clone(), start.clone());
    }

    fn forget(&self, policy: &(String, String)) {
        lock(&self.0).remove(policy);
    }
}

pub(super) async fn reconcile(
    policy: Arc<EtcdBackupPolicy>,
    ctx: Arc<Context>,
    unanswered: Arc<Unanswered>,
) -> Result<Action, Failure> {
    let this = key(&*policy);
    let asker = Asker::Policy(this.clone());
    if policy.metadata.deletion_timestamp.is_some() {
        turns::withdraw(&ctx, &asker);
        unanswered.forget(&this);
        return Ok(Action::await_change());
    }
    let now = ctx.now();
    let old = policy.status.clone().unwrap_or_default();
    let look = Look::at(&policy, &old, &ctx, now);
    let mut last = look.last.clone();
    let mut look_again = look.look_again;

    let reference = ObjectRef::from_obj(&*policy);
    let failed = last
        .as_ref()
        .is_some_and(|l| l.run.state == RunState::Failed);
    ctx.saw_dependencies(&reference, failed.then(|| dependencies(&policy)));
    let facts = policy::facts(&policy, &ctx);
    let spec = &policy.spec;
    let still_wanted = |start: &Start| {
        let possible = spec.etcd.is_some() || !start.job.full_snapshot;
        let is_its = start.policy_uid == policy.metadata.uid;
        is_its && spec.compaction.enabled && !spec.suspend && possible
    };
    let start = match unanswered.of(&this).filter(still_wanted) {
        // Retry with the same name: a new name could create a second Job.
        Some(start) => Some(start),
        None => {
            let waiting = Backoff {
                running: look.running.clone(),
                recovered_at: ctx.recovered_at(&this.0, &this.1),
            };
            let decision = threshold::decide(
                &policy.spec.compaction,
                policy.spec.suspend,
                policy.spec.etcd.is_some(),
                &facts,
                last.as_ref(),
                &waiting,
                now,
            );
            unanswered.forget(&this);
            match start(&policy, decision, &facts, &look) {
                Ok(start) => Some(start),
                Err((reason, again)) => {
                    let (namespace, policy) = &this;
                    tracing::debug!(namespace, policy, "no compaction: {reason}");
                    look_again = sooner(look_again, again);
                    None
                }
            }
        }
    };
    let mut wants_a_turn = false;
    let mut refused = None;
    if let Some(start) = start {
        let created = match create(&policy, &asker, &start, &ctx, &unanswered).await {
            // The status has to tell, which stands below.
            Err(e) if e.is_refusal() => {
                let why = e.to_string();
                refused = Some(e);
                Created::NotReady(why)
            }
            created => created?,
        };
        match created {
            Created::Yes(start_time) => {
                let run = LastRun {
                    start_time,
                    ..LastRun::default()
                };
                last = Some(start.job.ran(run));
                // It was for this attempt: clocks may differ, and none may come without end.
                ctx.forget_recovery(&this);
            }
            Created::NotNow(why) => {
                wants_a_turn = true;
                let (namespace, policy) = &this;
                tracing::info!(namespace, policy, "{}; but {why}", start.reason);
            }
            Created::NotReady(why) => {
                let (namespace, policy) = &this;
                tracing::debug!(namespace, policy, "{}; but {why}", start.reason);
            }
        }
    }
    if !wants_a_turn {
        turns::withdraw(&ctx, &asker);
    }

    let (full, delta) = jobs::lease_names(&policy);
    let seen = conditions::Seen {
        full: ctx.lease_changed_at(&this.0, &full),
        delta: ctx.lease_changed_at(&this.0, &delta),
    };
    let healthy = match &refused {
        None => conditions::compaction_healthy(&policy, &facts, last.as_ref(), &seen, now),
        Some(e) => conditions::job_refused(&e.to_string()),
    };
    write_status(&policy, &old, last.as_ref(), &healthy, &ctx, now).await?;
    if let Some(last) = &last {
        tell_end(&policy, old.last_compaction.as_ref(), last, &ctx).await;
    }
    match refused {
        Some(e) => Err(e),
        None => Ok(requeue(sooner(look_again, healthy.stale_at), now)),
    }
}

/// What the caches tell of a policy's Jobs.
struct Look {
    last: Option<LastCompaction>,
    running: Option<String>,
    full_snapshot_runs: Option<String>,
    look_again: Option<DateTime<Utc>>,
}

impl Look {
    fn at(
        policy: &EtcdBackupPolicy,
        old: &EtcdBackupPolicyStatus,
        ctx: &Context,
        now: DateTime<Utc>,
    ) -> Look {
        let (namespace, name) = key(policy);
        let jobs = ctx.caches.jobs_of(&namespace, &name);
        let is_its = |job: &Job| {
            // Those of a policy of the same name that is gone go, too.
            let owners = job.metadata.owner_references.iter().flatten();
            turns::is_of_threshold(job)
                && owners
                    .map(|o| Some(&o.uid))
                    .any(|o| o == policy.metadata.uid.as_ref())
        };
        let started = jobs.iter().filter(|j| is_its(j));
        let started = started.filter_map(|j| Some((Started::read(j)?, j)));
        let newest = started.max_by(|(a, _), (b, _)| a.age().cmp(&b.age()));
        let mut look_again = None;
        let newest = newest.map(|(started, job)| {
            let mut run = outcome::last_run(job, &ctx.caches.pods_of(job));
            if !outcome::is_settled(&run, now) {
                look_again = Some(later(now, PODS_COME));
                run = LastRun {
                    start_time: run.start_time,
                    ..LastRun::default()
                };
            }
            (started, run)
        });
        let policy_key = (namespace.clone(), name.clone());
        let mut pending: Vec<String> = {
            let admission = ctx.admission();
            let pending = admission.pending(&policy_key, now);
            let compacts = |asker: &Asker| match asker {
                Asker::Policy(_) => true,
                Asker::Task { task, .. } => is_compaction(task, ctx),
            };
            let own = pending.filter(|(_, asker)| compacts(asker));
            let is_seen = |name: &str| jobs.iter().any(|job| job.name_any() == name);
            let own = own.filter(|((_, job), _)| !is_seen(job));
            own.map(|((_, job), _)| job.clone()).collect()
        };
        let made = old.last_compaction.as_ref();
        let made = made.filter(|l| l.run.state == RunState::Running);
        if let Some(young) = made.filter(|l| turns::is_young(l.run.start_time, now))
            && jobs.iter().all(|job| job.name_any() != young.job_name)
        {
            pending.push(young.job_name.clone());
        }
        if !pending.is_empty() {
            // Should it never come, nothing else would have this looked at.
            let lasts = later(now, GRANT_LASTS);
            let again = match made {
                Some(_) => turns::look_again(now),
                None => lasts,
            };
            look_again = sooner(look_again, Some(again));
        }
        let last = observe(
            old.last_compaction.as_ref(),
            newest.as_ref().map(|(started, run)| (started, run.clone())),
            &pending,
            now,
        );
        let active = || jobs.iter().filter(|j| !outcome::is_finished(j));
        let compacts = |job: &Job| {
            is_its(job)
                || label(job, jobs::LABEL_TASK_TYPE) == Some(TaskType::OnDemandCompaction.as_str())
        };
        let takes_full =
            |job: &Job| label(job, jobs::LABEL_WORK) == Some(Work::FullSnapshot.as_str());
        let named = |job: &Arc<Job>| job.name_any();
        // One that is not in the cache yet runs all the same.
        let running = active().find(|j| compacts(j)).map(named);
        Look {
            last,
            running: running.or_else(|| pending.first().cloned()),
            full_snapshot_runs: active().find(|j| takes_full(j)).map(named),
            look_again,
        }
    }
}

/// Whether a task is for a compaction.
fn is_compaction((namespace, name): &Key, ctx: &Context) -> bool {
    let task = ctx
        .caches
        .tasks
        .get(&ObjectRef::new(name).within(namespace));
    task.is_some_and(|t| t.spec.type_ == TaskType::OnDemandCompaction)
}

/// What was changed where a Job failed for want of it: the policy itself.
fn dependencies(policy: &EtcdBackupPolicy) -> String {
    policy.metadata.generation.unwrap_or_default().to_string()
}

/// What was decided to start.
#[derive(Debug, Clone)]
struct Start {
    /// Whose: another policy may have the same name later.
    policy_uid: Option<String>,
    job: Started,
    reason: String,
    events: i64,
}

/// The Job of a decision; or why there is none, and when to look again.
fn start(
    policy: &EtcdBackupPolicy,
    decision: Decision,
    facts: &LeaseFacts,
    look: &Look,
) -> Result<Start, (String, Option<DateTime<Utc>>)> {
    match decision {
        Decision::Nothing { reason, look_again } => Err((reason, look_again)),
        Decision::Start {
            trigger,
            full_snapshot,
            reason,
            attempt,
            events,
        } => {
            if let Some(job) = look.full_snapshot_runs.as_ref().filter(|_| full_snapshot) {
                return Err((format!("{reason}; the Job {job} takes one already"), None));
            }
            let (full, delta) = facts.status().unwrap_or_default();
            let count = u32::try_from(attempt).unwrap_or_default();
            let name = jobs::compaction_job_name(policy, full, delta, count, full_snapshot);
            let job = Started {
                name,
                trigger: trigger.as_str().to_owned(),
                full_revision: full,
                delta_revision: delta,
                full_snapshot,
                attempt,
                created: None,
                finished: false,
            };
            Ok(Start {
                policy_uid: policy.metadata.uid.clone(),
                job,
                reason,
                events,
            })
        }
    }
}

/// What became of it.
enum Created {
    /// The Job is there, since then by the API server's clock: times of Jobs are compared with it, and ours may be wrong.
    Yes(Option<DateTime<Utc>>),
    /// There are too many; the policy is called.
    NotNow(String),
    /// Something is wrong with the policy; its condition tells, and whatever mends it has it looked at again.
    NotReady(String),
}

async fn create(
    policy: &EtcdBackupPolicy,
    asker: &Asker,
    start: &Start,
    ctx: &Context,
    unanswered: &Unanswered,
) -> Result<Created, Failure> {
    let others = ctx.caches.policies.state();
    if let Some(problem) = policy::impediment(policy, &others) {
        return Ok(Created::NotReady(problem.message));
    }
    let (namespace, name) = key(policy);
    let this = (namespace.clone(), name.clone());
    let job_key: Key = (namespace.clone(), start.job.name.clone());
    if let Err(why) = turns::ask(ctx, asker, &job_key, policy).await {
        return Ok(Created::NotNow(why));
    }
    let job = jobs::compaction_job(
        policy,
        &ctx.options.settings,
        &start.job.name,
        start.job.full_snapshot,
        start.job.annotations(&start.reason),
    );
    // Until there is an answer it may be there or not.
    unanswered.remember(&this, start);
    let created = ctx.create_new(&job).await;
    let refused = matches!(
        created,
        Err(Failure::Api { code: Some(_), .. } | Failure::NotLeading)
    );
    if created.is_ok() || refused {
        unanswered.forget(&this);
    }
    match created {
        Err(e) => {
            if refused {
                turns::give_back(ctx, &job_key);
            }
            Err(e)
        }
        // It is there already: the write that told of it was lost.
        Ok(None) => {
            let reference = ObjectRef::new(&start.job.name).within(&namespace);
            let there = ctx.caches.jobs.get(&reference);
            let made = there.and_then(|j| Some(utc(j.metadata.creation_timestamp.as_ref()?)));
            Ok(Created::Yes(made))
        }
        Ok(Some(made)) => {
            let events = u64::try_from(start.events).unwrap_or_default();
            ctx.metrics.compaction_started(&namespace, &name, events);
            let note = format!("{}: {}", start.job.name, start.reason);
            let reason = match start.job.full_snapshot {
                true => "FullSnapshotStarted",
                false => "CompactionStarted",
            };
            ctx.tell(policy, false, reason, "Compact", &note).await;
            Ok(Created::Yes(
                made.metadata.creation_timestamp.as_ref().map(utc),
            ))
        }
    }
}

/// Writes what is ours of the status, where it is not so yet.
async fn write_status(
    policy: &EtcdBackupPolicy,
    old: &EtcdBackupPolicyStatus,
    last: Option<&LastCompaction>,
    healthy: &Judgement,
    ctx: &Context,
    now: DateTime<Utc>,
) -> Result<(), Failure> {
    let generation = policy.metadata.generation;
    let conditions = conditions::merge(&old.conditions, &[(HEALTHY, healthy)], generation, now);
    let mut before = old.conditions.iter().filter(|c| c.type_ == HEALTHY);
    let is_so = before.next() == conditions.first();
    if is_so && old.last_compaction.as_ref() == last {
        return Ok(());
    }
    let mut status = json!({ "conditions": conditions });
    if let Some(last) = last {
        status["lastCompaction"] = json!(last);
    }
    ctx.apply_status(MANAGER, policy, &status).await?;
    tell_change(policy, &old.conditions, healthy, ctx).await;
    Ok(())
}

/// An Event where compactions have become unhealthy for another reason than a Job's end, or healthy again.
async fn tell_change(
    policy: &EtcdBackupPolicy,
    old: &[Condition],
    healthy: &Judgement,
    ctx: &Context,
) {
    let before = old.iter().find(|c| c.type_ == HEALTHY);
    if before.is_some_and(|c| c.status != healthy.status) {
        let note = format!(
            "{HEALTHY} is {}: {}",
            healthy.status.as_str(),
            healthy.message
        );
        ctx.tell(policy, false, &healthy.reason, "Observe", &note)
            .await;
    }
}

/// An Event and the metrics of a Job that has ended, once its end is in the status.
async fn tell_end(
    policy: &EtcdBackupPolicy,
    old: Option<&LastCompaction>,
    last: &LastCompaction,
    ctx: &Context,
) {
    let has_ended = |l: &LastCompaction| l.run.state != RunState::Running;
    let was_told = old.is_some_and(|o| o.job_name == last.job_name && has_ended(o));
    if !has_ended(last) || was_told || !ctx.tells_once(key(policy), &last.job_name) {
        return;
    }
    let succeeded = last.run.state == RunState::Succeeded;
    let took = last.run.completion_time.zip(last.run.start_time);
    let took = took.and_then(|(end, start)| (end - start).to_std().ok());
    ctx.metrics
        .compaction_ended(succeeded, took.unwrap_or_default());
    let job = &last.job_name;
    let (reason, note) = match succeeded {
        true => {
            let to = last.run.revision.map(|r| format!(" up to revision {r}"));
            (
                "CompactionSucceeded",
                format!("{job} is done{}", to.unwrap_or_default()),
            )
        }
        false => (
            "CompactionFailed",
            format!("{job} failed: {}", outcome::why(&last.run)),
        ),
    };
    ctx.tell(policy, !succeeded, reason, "Compact", &note).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::api::{EtcdBackupPolicySpec, EtcdSpec};
    use crate::controller::leases::tests::{at, druid, ours};
    use crate::controller::outcome::DEADLINE_EXCEEDED;
    use chrono::TimeDelta;
    use k8s_openapi::api::coordination::v1::Lease;

    const THRESHOLD: i64 = 100;

    fn policy() -> EtcdBackupPolicy {
        let mut spec = EtcdBackupPolicySpec {
            etcd: Some(EtcdSpec::default()),
            ..EtcdBackupPolicySpec::default()
        };
        spec.compaction.events_threshold = THRESHOLD;
        EtcdBackupPolicy::new("p", spec)
    }

    fn job(name: &str, created: i64, attempt: i32, finished: bool) -> Started {
        Started {
            name: name.to_owned(),
            trigger: "EventsThreshold".to_owned(),
            full_revision: 100,
            delta_revision: 200,
            full_snapshot: false,
            attempt,
            created: Some(at(created)),
            finished,
        }
    }

    fn run(state: RunState, started: i64) -> LastRun {
        LastRun {
            state,
            start_time: Some(at(started)),
            ..LastRun::default()
        }
    }

    #[test]
    fn what_a_job_was_made_for_stands_on_it() {
        let settings = jobs::Settings::new("image");
        let started = Started {
            created: None,
            ..job("p-fullsnap-1", 0, 3, false)
        };
        let started = Started {
            full_snapshot: true,
            ..started
        };
        let annotations = started.annotations("since it is so");
        let made = jobs::compaction_job(&policy(), &settings, &started.name, true, annotations);
        assert_eq!(Started::read(&made), Some(started));
        assert!(turns::is_of_threshold(&made) && !turns::is_of_task(&made));
        // A full snapshot's of a schedule is none.
        let mut scheduled = made;
        scheduled.metadata.annotations = None;
        assert_eq!(Started::read(&scheduled), None);
        assert!(!turns::is_of_threshold(&scheduled));
    }

    #[test]
    fn a_lost_status_is_made_up_for_by_the_job() {
        use RunState::{Failed, Running, Succeeded};
        let first = job("a", 10, 0, true);
        let second = job("b", 20, 1, false);
        let seen = |old, newest, pending: &[String]| observe(old, newest, pending, at(99));
        // There is nothing yet; then a Job of which no status tells.
        assert_eq!(seen(None, None, &[]), None);
        let of_first = seen(None, Some((&first, run(Failed, 10))), &[]).unwrap();
        assert_eq!((of_first.job_name.as_str(), of_first.failures), ("a", 1));
        assert_eq!(
            (of_first.full_revision, of_first.delta_revision),
            (100, 200)
        );
        let of_second = seen(Some(&of_first), Some((&second, run(Running, 20))), &[]).unwrap();
        assert_eq!((of_second.job_name.as_str(), of_second.failures), ("b", 1));
        let done = seen(Some(&of_second), Some((&second, run(Succeeded, 20))), &[]).unwrap();
        assert_eq!((done.run.state, done.failures), (Succeeded, 0));
        // The Job is gone after its time: what is known stays.
        assert_eq!(seen(Some(&done), None, &[]), Some(done.clone()));
        assert_eq!(
            seen(Some(&done), Some((&first, run(Failed, 10))), &[]),
            Some(done.clone())
        );
        // It is gone before its end was seen, or is not in the cache yet.
        assert_eq!(
            seen(Some(&of_second), None, &["b".to_owned()]),
            Some(of_second.clone())
        );
        let gone = seen(Some(&of_second), Some((&first, run(Failed, 10))), &[]).unwrap();
        assert_eq!(gone.run.reason.as_deref(), Some(JOB_DELETED));
        assert_eq!((gone.job_name.as_str(), gone.failures), ("b", 2));
        // What its Pod told is not forgotten when that is gone.
        let told = LastRun {
            exit_code: Some(69),
            reason: Some("StoreUnreachable".to_owned()),
            ..run(Failed, 20)
        };
        let whole = seen(Some(&of_second), Some((&second, told)), &[]).unwrap();
        let again = seen(Some(&whole), Some((&second, run(Failed, 20))), &[]).unwrap();
        assert_eq!(again, whole);
    }

    #[derive(Debug, Clone)]
    struct SimJob {
        started: Started,
        run: LastRun,
    }

    /// A cluster with its store, its Leases, its Jobs; and a controller that forgets, is late, or dies.
    struct Sim {
        rng: fastrand::Rng,
        policy: EtcdBackupPolicy,
        now: i64,
        skew: i64,
        revision: i64,
        full: i64,
        newest: i64,
        leases: [Lease; 2],
        ours: bool,
        up: bool,
        calm: bool,
        status: Option<LastCompaction>,
        jobs: Vec<SimJob>,
        // The controller's.
        seen_status: Option<LastCompaction>,
        seen_jobs: Vec<SimJob>,
        pending: Vec<String>,
        unanswered: Option<Start>,
        recovered_at: Option<DateTime<Utc>>,
        successes: usize,
        made: Vec<String>,
    }

    impl Sim {
        fn new(seed: u64) -> Self {
            let mut rng = fastrand::Rng::with_seed(seed);
            let ours = rng.bool();
            let mut policy = policy();
            if rng.u8(..4) == 0 {
                policy.spec.etcd = None;
            }
            policy.spec.compaction.full_snapshot_threshold =
                Some(5 * THRESHOLD).filter(|_| rng.u8(..3) == 0);
            let mut sim = Sim {
                rng,
                policy,
                now: 0,
                skew: 0,
                revision: 10,
                full: 10,
                newest: 10,
                leases: [Lease::default(), Lease::default()],
                ours,
                up: true,
                calm: false,
                status: None,
                jobs: Vec::new(),
                seen_status: None,
                seen_jobs: Vec::new(),
                pending: Vec::new(),
                unanswered: None,
                recovered_at: None,
                successes: 0,
                made: Vec::new(),
            };
            sim.renew();
            sim
        }

        fn chance(&mut self, percent: u8) -> bool {
            self.rng.u8(..100) < percent
        }

        fn fails(&mut self, percent: u8) -> bool {
            !self.calm && self.chance(percent)
        }

        /// Whoever has saved something renews the Leases, as far as that works.
        fn renew(&mut self) {
            let (full, newest) = (self.full, self.newest);
            let time = at(self.now + self.rng.i64(-3..3));
            let unix = time.timestamp();
            let of_full = format!("Full-00000000-{full:08}-{unix}");
            let last = match newest > full {
                true => format!("Incr-{:08}-{newest:08}-{unix}", full + 1),
                false => of_full.clone(),
            };
            let events = (newest - full).to_string();
            let told = [
                ours(&full.to_string(), time, &[("last-snapshot-name", &of_full)]),
                ours(
                    &newest.to_string(),
                    time,
                    &[
                        ("last-snapshot-name", &last),
                        ("accumulated-delta-events", &events),
                        ("accumulated-delta-bytes", "7"),
                    ],
                ),
            ];
            for (i, told) in told.into_iter().enumerate() {
                let revision = [full, newest][i].to_string();
                if !self.fails(10) {
                    self.leases[i] = match self.ours {
                        true => told,
                        false => druid(&revision, Some(time)),
                    };
                }
            }
        }

        fn facts(&self) -> LeaseFacts {
            LeaseFacts::read(Some(&self.leases[0]), Some(&self.leases[1]))
        }

        /// What happens without the controller.
        fn world(&mut self) {
            self.now += self.rng.i64(1..400);
            self.revision += self.rng.i64(0..40);
            if self.chance(50) {
                self.newest = self.revision;
                self.renew();
            }
            if self.fails(2) {
                (self.full, self.newest) = (self.revision, self.revision);
                self.renew();
            }
            if self.fails(1) {
                // Set back to an older snapshot.
                self.revision = (self.revision - self.rng.i64(0..300)).max(5);
                (self.full, self.newest) = (self.revision, self.revision);
                self.renew();
            }
            if self.fails(10) {
                self.up = !self.up;
                if self.up && self.rng.bool() {
                    self.recovered_at = Some(self.clock());
                }
            }
            if self.fails(2) {
                self.skew = [-40_000_000, -4000, -10, 0, 10, 4000, 40_000_000][self.rng.usize(..7)];
            }
            self.jobs_go_on();
        }

        fn jobs_go_on(&mut self) {
            for i in 0..self.jobs.len() {
                if self.jobs[i].run.state != RunState::Running || !self.chance(30) {
                    continue;
                }
                let name = self.jobs[i].started.name.clone();
                let is_pending = self.pending.contains(&name) || self.unanswered.is_some();
                if self.fails(3) && !is_pending {
                    self.jobs.remove(i);
                    return;
                }
                let (code, reason) = match self.rng.u8(..100) {
                    _ if !self.up => (Some(69), Some("StoreUnreachable")),
                    0..70 => (Some(0), None),
                    _ if self.calm => (Some(0), None),
                    70..78 => (Some(65), Some("CorruptSnapshot")),
                    78..86 => (Some(74), Some("NoSpace")),
                    86..92 => (None, Some("Evicted")),
                    _ => (None, Some(DEADLINE_EXCEEDED)),
                };
                let mut revision = None;
                if code == Some(0) {
                    self.successes += 1;
                    if self.jobs[i].started.full_snapshot {
                        self.newest = self.revision;
                    }
                    self.full = self.newest;
                    revision = Some(self.full);
                    self.renew();
                }
                let job = &mut self.jobs[i];
                job.started.finished = true;
                job.run.state = match code {
                    Some(0) => RunState::Succeeded,
                    _ => RunState::Failed,
                };
                job.run.exit_code = code;
                job.run.reason = reason.map(str::to_owned);
                job.run.revision = revision;
                job.run.completion_time = Some(at(self.now));
            }
            // Kubernetes deletes what has ended, a day later.
            let (now, seen) = (self.now, self.status.as_ref().map(|s| s.job_name.clone()));
            self.jobs.retain(|j| {
                let ended = j.run.completion_time;
                ended.is_none_or(|t| at(now) - t < TimeDelta::days(1))
                    || seen.as_ref() != Some(&j.started.name)
            });
        }

        fn clock(&self) -> DateTime<Utc> {
            at(self.now + self.skew)
        }

        fn refresh(&mut self) {
            self.seen_status = self.status.clone();
            self.seen_jobs = self.jobs.clone();
            let unanswered = self.unanswered.is_some();
            let jobs = &self.jobs;
            self.pending
                .retain(|p| unanswered && !jobs.iter().any(|j| j.started.name == *p));
        }

        fn restart(&mut self) {
            self.pending.clear();
            self.unanswered = None;
            self.recovered_at = None;
            self.refresh();
        }

        /// One run of the reconciler; gives when it wants to look again.
        fn reconcile(&mut self) -> Option<DateTime<Utc>> {
            let now = self.clock();
            let newest = self.seen_jobs.iter();
            let newest = newest
                .max_by(|a, b| a.started.age().cmp(&b.started.age()))
                .cloned();
            let mut last = observe(
                self.seen_status.as_ref(),
                newest.as_ref().map(|j| (&j.started, j.run.clone())),
                &self.pending,
                now,
            );
            let active = self.seen_jobs.iter().find(|j| !j.started.finished);
            let running = active.map(|j| j.started.name.clone());
            let facts = self.facts();
            let waiting = Backoff {
                running: running.or(self.pending.first().cloned()),
                recovered_at: self.recovered_at,
            };
            let look = Look {
                last: None,
                running: None,
                full_snapshot_runs: None,
                look_again: None,
            };
            let decided = match self.unanswered.clone() {
                Some(start) => Ok(start),
                None => {
                    let decision = threshold::decide(
                        &self.policy.spec.compaction,
                        false,
                        self.policy.spec.etcd.is_some(),
                        &facts,
                        last.as_ref(),
                        &waiting,
                        now,
                    );
                    start(&self.policy, decision, &facts, &look)
                }
            };
            let mut again = None;
            match decided {
                Err((_, look_again)) => again = look_again,
                Ok(start) => {
                    if !self.pending.contains(&start.job.name) {
                        self.pending.push(start.job.name.clone());
                    }
                    let lost = self.fails(10);
                    if !(lost && self.rng.bool()) {
                        self.create(&start, &facts);
                    }
                    if lost {
                        // No answer: it is tried again, by this controller or the next one.
                        self.unanswered = Some(start);
                        if self.fails(30) {
                            self.restart();
                        }
                        return None;
                    }
                    self.unanswered = None;
                    if self.fails(10) {
                        self.restart();
                        return None;
                    }
                    let made = self.jobs.iter().find(|j| j.started.name == start.job.name);
                    last = Some(start.job.ran(LastRun {
                        start_time: made.and_then(|j| j.started.created),
                        ..LastRun::default()
                    }));
                }
            }
            if self.fails(10) {
                self.restart();
            } else if last != self.seen_status {
                self.status = last;
            }
            again
        }

        fn create(&mut self, start: &Start, facts: &LeaseFacts) {
            if self.jobs.iter().any(|j| j.started.name == start.job.name) {
                return;
            }
            let running = self.jobs.iter().find(|j| !j.started.finished);
            assert!(running.is_none(), "{start:?} beside {running:?}");
            let of_status = (start.job.full_revision, start.job.delta_revision);
            // A status may come again after others, where a cluster is set back: the last Job's is meant.
            let last = self
                .jobs
                .iter()
                .find(|j| Some(&j.started.name) == self.made.last());
            if let Some(last) = last {
                let status = (last.started.full_revision, last.started.delta_revision);
                let may_again = outcome::is_unreachable(&last.run);
                assert!(status != of_status || may_again, "{start:?} after {last:?}");
            }
            self.made.push(start.job.name.clone());
            if self.unanswered.is_none() {
                assert_eq!(facts.status(), Some(of_status));
            }
            let mut started = start.job.clone();
            started.created = Some(at(self.now));
            let run = LastRun {
                start_time: started.created,
                ..LastRun::default()
            };
            self.jobs.push(SimJob { started, run });
        }
    }

    #[test]
    fn whatever_happens_jobs_come_one_at_a_time_and_every_crossing_is_acted_on() {
        let seed = crate::seed();
        let mut seeds = fastrand::Rng::with_seed(seed);
        let (mut jobs, mut failures) = (0, 0);
        let rounds = crate::rounds(60, 300);
        for _ in 0..rounds {
            let seed = seeds.u64(..);
            println!("world {seed}");
            let mut sim = Sim::new(seed);
            for _ in 0..400 {
                sim.world();
                if sim.chance(70) {
                    sim.refresh();
                }
                if sim.fails(2) {
                    sim.restart();
                }
                sim.reconcile();
            }
            jobs += sim.jobs.len();
            failures += sim
                .jobs
                .iter()
                .filter(|j| j.run.state == RunState::Failed)
                .count();
            // All is well again, and goes on: what has accumulated is folded before long.
            (sim.calm, sim.up, sim.skew) = (true, true, 0);
            let before = sim.successes;
            sim.revision += THRESHOLD;
            let began = sim.now;
            while sim.successes == before {
                sim.world();
                sim.refresh();
                sim.reconcile();
                assert!(
                    sim.now - began < 4 * 3600,
                    "{:?} {:?}",
                    sim.status,
                    sim.facts()
                );
            }
        }
        println!("{jobs} Jobs at their ends, {failures} had failed");
        assert!(jobs * 3 > rounds * 10 && failures * 3 > rounds);
    }

    #[test]
    fn what_did_not_answer_is_folded_when_it_does_though_nothing_moves() {
        let seed = crate::seed();
        for i in 0..100 {
            let mut sim = Sim::new(seed.wrapping_add(i));
            sim.calm = true;
            sim.up = false;
            sim.newest = sim.full + THRESHOLD;
            sim.renew();
            let mut attempts = Vec::new();
            // Only time goes on, and the controller looks when it wanted to.
            for round in 0..12 {
                sim.up = round == 11;
                sim.refresh();
                if let Some(again) = sim.reconcile() {
                    sim.now += (again - at(sim.now)).num_seconds();
                    sim.reconcile();
                }
                attempts.push(sim.now);
                sim.refresh();
                while sim.jobs.iter().any(|j| !j.started.finished) {
                    sim.now += 1;
                    sim.jobs_go_on();
                }
                sim.refresh();
                sim.reconcile();
            }
            assert_eq!((sim.successes, sim.jobs.len()), (1, 12));
            let pauses: Vec<i64> = attempts.windows(2).map(|w| (w[1] - w[0]) / 60).collect();
            assert!(pauses[..7].is_sorted() && pauses[10] <= 61, "{pauses:?}");
        }
    }
}
