//! Thresholds: where one is crossed, a Job folds the deltas, or takes a full snapshot instead; and how it ended.
//!
//! When, `threshold` decides; what the Job looks like, `jobs` knows. Run for each policy of which a Lease, a Job or
//! the policy itself has changed; again by itself only when a time comes at which something is due.

use super::admission::{Asker, Key};
use super::api::{
    Condition, EtcdBackupPolicy, EtcdBackupPolicyStatus, LastCompaction, LastRun, RunState,
    TaskType,
};
use super::conditions::{self, Judgement};
use super::context::{Context, Failure, label};
use super::jobs::{self, Work};
use super::leases::LeaseFacts;
use super::outcome::{self, JOB_DELETED};
use super::policy;
use super::threshold::{self, Backoff, Decision};
use super::times::{later, utc};
use super::turns::{self, TRIGGER, key};
use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use k8s_openapi::api::batch::v1::Job;
use kube::ResourceExt;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

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
/// When to look again for what a Pod that has ended has to say.
const PODS_COME: TimeDelta = TimeDelta::seconds(2);
/// Never sooner than this by itself.
const SHORTEST_WAIT: Duration = Duration::from_millis(500);

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

pub(super) async fn reconcile(
    policy: Arc<EtcdBackupPolicy>,
    ctx: Arc<Context>,
) -> Result<Action, Failure> {
    let this = key(&*policy);
    let asker = Asker::Policy(this.clone());
    if policy.metadata.deletion_timestamp.is_some() {
        turns::withdraw(&ctx, &asker);
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
    ctx.saw_dependencies(&reference, failed.then(|| dependencies(&policy, &ctx)));
    let facts = policy::facts(&policy, &ctx);
    let unanswered = ctx.unanswered(&this).filter(|_| !policy.spec.suspend);
    let start = match unanswered {
        // Whether that Job is there is not known: the same name again tells, and another one would be a second Job.
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
    if let Some(start) = start {
        match create(&policy, &asker, &start, &ctx).await? {
            Created::Yes => {
                let run = LastRun {
                    start_time: Some(now.trunc_subsecs(0)),
                    ..LastRun::default()
                };
                last = Some(start.job.ran(run));
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
    let healthy = conditions::compaction_healthy(&policy, &facts, last.as_ref(), &seen, now);
    write_status(&policy, &old, last.as_ref(), &healthy, &ctx, now).await?;
    if let Some(last) = &last {
        tell_end(&policy, old.last_compaction.as_ref(), last, &ctx).await;
    }
    let runs =
        |last: Option<&LastCompaction>| last.is_some_and(|l| l.run.state == RunState::Running);
    if runs(old.last_compaction.as_ref()) || runs(last.as_ref()) {
        count_running(&this.0, &ctx);
    }
    Ok(match sooner(look_again, healthy.stale_at) {
        None => Action::await_change(),
        Some(at) => {
            let wait = (at - now).to_std().unwrap_or_default();
            Action::requeue(wait.max(SHORTEST_WAIT))
        }
    })
}

/// The first of two times, where `None` is never.
fn sooner(a: Option<DateTime<Utc>>, b: Option<DateTime<Utc>>) -> Option<DateTime<Utc>> {
    a.into_iter().chain(b).min()
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
        let pending: Vec<String> = {
            let admission = ctx.admission();
            let pending = admission.pending(&policy_key);
            let own = pending.filter(|(_, asker)| matches!(asker, Asker::Policy(_)));
            own.map(|((_, job), _)| job.clone()).collect()
        };
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

/// What was changed where a Job failed for want of it: the policy itself, its Secrets.
fn dependencies(policy: &EtcdBackupPolicy, ctx: &Context) -> String {
    let namespace = policy.namespace().unwrap_or_default();
    let mut versions = format!("{}", policy.metadata.generation.unwrap_or_default());
    for secret in jobs::secrets_of(policy) {
        let reference = ObjectRef::new(&secret.name).within(&namespace);
        let there = ctx.caches.secrets.get(&reference);
        let version = there.and_then(|s| s.resource_version());
        versions += &format!(" {}", version.as_deref().unwrap_or("-"));
    }
    versions
}

/// What was decided to start.
#[derive(Debug, Clone)]
pub(super) struct Start {
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
                job,
                reason,
                events,
            })
        }
    }
}

/// What became of it.
enum Created {
    /// The Job is there.
    Yes,
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
) -> Result<Created, Failure> {
    let others = ctx.caches.policies.state();
    if let Some(problem) = policy::impediment(policy, &others) {
        return Ok(Created::NotReady(problem.message));
    }
    let (keys, problem) = policy::secrets(policy, ctx).await?;
    if let Some(problem) = problem {
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
        &keys,
        &start.job.name,
        start.job.full_snapshot,
        start.job.annotations(&start.reason),
    );
    // Until there is an answer it may be there or not.
    ctx.set_unanswered(&this, Some(start.clone()));
    let created = ctx.create(&job).await;
    let refused = matches!(
        created,
        Err(Failure::Api { code: Some(_), .. } | Failure::NotLeading)
    );
    if created.is_ok() || refused {
        ctx.set_unanswered(&this, None);
    }
    match created {
        Err(e) => {
            if refused {
                turns::give_back(ctx, &job_key);
            }
            Err(e)
        }
        // It is there already: the write that told of it was lost.
        Ok(false) => Ok(Created::Yes),
        Ok(true) => {
            let events = u64::try_from(start.events).unwrap_or_default();
            ctx.metrics.compaction_started(&namespace, &name, events);
            let note = format!("{}: {}", start.job.name, start.reason);
            let reason = match start.job.full_snapshot {
                true => "FullSnapshotStarted",
                false => "CompactionStarted",
            };
            ctx.tell(policy, false, reason, "Compact", &note).await;
            Ok(Created::Yes)
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

fn count_running(namespace: &str, ctx: &Context) {
    let running = ctx.caches.jobs.state_filter(|job| {
        job.metadata.namespace.as_deref() == Some(namespace)
            && turns::is_of_threshold(job)
            && !outcome::is_finished(job)
    });
    ctx.metrics.compactions_run(namespace, running.len());
}
