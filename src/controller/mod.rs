//! The controller: creates CronJobs for policies, and Jobs for reached thresholds and for tasks.
//!
//! It never reads a snapshot and never talks to an etcd or a store: its Jobs do, and report through exit
//! codes, termination messages and Leases. Called by `cli::controller`.
//!
//! One loop, **observe → plan → apply**, reconciles a policy together with its tasks, on the leader alone:
//!
//! 1. [`observe`] keeps the objects that the watches report, and collects all facts about one policy.
//! 2. [`plan`] decides from these facts, without I/O, what to write: objects, statuses and Events.
//! 3. [`apply`] is the only module that writes to the API server.
//!
//! The loop may be interrupted at any line: the next reconciliation observes what was written and goes on.

pub mod api;
mod apply;
pub mod jobs;
mod metrics;
mod names;
pub mod observe;
pub mod plan;
pub mod times;
mod work_queue;

pub use metrics::ControllerMetrics;

use crate::base::{Cancel, lock};
use crate::error::{Error, Reason, Result};
use crate::kubernetes::{self, lease};
use crate::store::lock::{Attempt, LockGuard};
use crate::telemetry::endpoint::MetricsServer;
use apply::{Events, Failure, Writer};
use chrono::{DateTime, Utc};
use names::Key;
use observe::{AttemptedAction, ClusterState, Observed};
use plan::job_limits::{JobLimiter, SlotDecision, SlotRequest};
use plan::{Action, Plan, PlannedEvent};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

/// A standby takes over when the leader has not renewed its Lease for this long.
const LEASE_DURATION: Duration = Duration::from_secs(15);
/// How often a standby tries to become the leader.
const ACQUIRE_PERIOD: Duration = Duration::from_secs(2);
/// How often the leader checks that it still holds its Lease.
const LEADERSHIP_CHECK_PERIOD: Duration = Duration::from_millis(500);

/// The back-off after the first failure of a reconciliation. It doubles with each further failure.
const FIRST_BACK_OFF: Duration = Duration::from_secs(1);
const LONGEST_BACK_OFF: Duration = Duration::from_secs(60);
/// The back-off after a conflict with another writer.
const CONFLICT_BACK_OFF: Duration = Duration::from_millis(100);
/// The shortest wait until a policy is due again although nothing has changed.
const SHORTEST_REQUEUE: Duration = Duration::from_millis(500);
/// The most actions, and the most task statuses, of one reconciliation. If there are more, the policy is
/// requeued behind the others.
const MAX_WRITES: usize = 30;

/// The settings of a controller process.
#[derive(Debug, Clone)]
pub struct Options {
    /// Settings that the plans depend on.
    pub plan: plan::Options,
    /// The namespace and name of the leader's Lease; `None` if there is only one replica.
    pub leader_lease: Option<(String, String)>,
    /// The identity of this replica, as lease holder and in Events.
    pub identity: String,
    /// How many policies are reconciled at the same time; 0 counts as 1.
    pub workers: usize,
    /// How many Jobs of thresholds and tasks may be unfinished at the same time, over all policies; 0 for no
    /// limit.
    pub max_jobs: u32,
    /// The same limit for each namespace. 0 means half of `max_jobs` if several namespaces have policies, and
    /// all of them otherwise.
    pub max_jobs_per_namespace: u32,
}

/// Runs the controller until it is cancelled or loses its leadership. Blocks the calling thread.
///
/// # Errors
/// `LockHeld` if another replica has become the leader: start this one again as a standby.
/// `KubernetesUnreachable`, `PermissionDenied` and the like if the API cannot be used from the start.
pub fn run(
    client: &kubernetes::Client,
    options: Options,
    metrics: &ControllerMetrics,
    server: Option<&MetricsServer>,
    cancel: &Cancel,
) -> Result<()> {
    let leadership = match &options.leader_lease {
        None => None,
        Some((namespace, name)) => {
            let lease_client = client.in_namespace(namespace);
            // A standby counts as ready: it is there to take over.
            if let Some(server) = server {
                server.set_ready(true);
            }
            let identity = &options.identity;
            Some(become_leader(&lease_client, name, identity, cancel)?)
        }
    };
    metrics.set_leader(true);
    let result = client.handle().block_on(async {
        let reconciling = reconcile_all(client, options, metrics, server, leadership.as_ref());
        cancel.or(reconciling).await
    });
    metrics.set_leader(false);
    if let Some(leadership) = leadership
        && let Err(e) = leadership.release()
    {
        tracing::warn!(
            "cannot release the leader's Lease: a standby takes over when it expires, after {} s: {e}",
            LEASE_DURATION.as_secs()
        );
    }
    match result {
        // A signal is the normal end.
        Err(e) if e.reason() == Reason::Terminated => Ok(()),
        Err(e) => Err(e),
        Ok(result) => result,
    }
}

/// Waits until this replica holds the leader's Lease.
fn become_leader(
    client: &kubernetes::Client,
    lease_name: &str,
    identity: &str,
    cancel: &Cancel,
) -> Result<LockGuard> {
    let mut lock = lease::lock(client, lease_name, identity, LEASE_DURATION);
    let mut is_standby_logged = false;
    loop {
        match lock.try_acquire() {
            Ok(Attempt::Acquired(leadership)) => return Ok(leadership),
            Ok(Attempt::HeldBy(holder)) => {
                if !is_standby_logged {
                    tracing::info!(
                        leader = holder.identity,
                        "another replica is the leader; this one stands by"
                    );
                    is_standby_logged = true;
                }
            }
            Err(e) if e.reason().is_retryable() => {
                tracing::warn!(
                    "cannot read or write the Lease {lease_name} of the leader, retrying: {e}"
                );
            }
            Err(e) => return Err(e),
        }
        let pause = async { tokio::time::sleep(ACQUIRE_PERIOD).await };
        client.handle().block_on(cancel.or(pause))?;
    }
}

/// What all workers of the leader share.
struct Controller {
    cluster: Arc<ClusterState>,
    job_limiter: Mutex<JobLimiter>,
    writer: Arc<Writer>,
    events: Events,
    metrics: ControllerMetrics,
    options: plan::Options,
}

/// Watches and reconciles all policies until leadership is lost.
async fn reconcile_all(
    client: &kubernetes::Client,
    options: Options,
    metrics: &ControllerMetrics,
    server: Option<&MetricsServer>,
    leadership: Option<&LockGuard>,
) -> Result<()> {
    let limit = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
    let job_limiter = JobLimiter::new(
        limit(options.max_jobs),
        limit(options.max_jobs_per_namespace),
    );
    let workers = options.workers.max(1);
    let cluster = Arc::new(ClusterState::new(workers));
    metrics.show(&cluster);
    let writer = Arc::new(Writer::new(
        client.inner(),
        leadership.map(LockGuard::watch),
    ));
    let (events, publish_events) = Events::new(client.inner(), &options.identity, writer.clone());
    let controller = Arc::new(Controller {
        cluster: cluster.clone(),
        job_limiter: Mutex::new(job_limiter),
        writer,
        events,
        metrics: metrics.clone(),
        options: options.plan,
    });
    let mut background = JoinSet::new();
    background.spawn(publish_events);

    let (send_listed, listed) = oneshot::channel();
    let api = client.inner();
    let namespaces = &controller.options.namespaces;
    let watches = observe::watch_all(&cluster, &api, namespaces, || {
        let _ = send_listed.send(());
    });
    tokio::select! {
        ended = watches => ended,
        failed = run_workers(&controller, workers, listed, background, server) => Err(failed),
        lost = leadership_loss(leadership) => lost,
    }
}

/// Starts the workers once all objects have been listed. Returns only if a background task ends, which is a
/// bug.
async fn run_workers(
    controller: &Arc<Controller>,
    workers: usize,
    listed: oneshot::Receiver<()>,
    mut background: JoinSet<()>,
    server: Option<&MetricsServer>,
) -> Error {
    // Never fails: the future of the watches owns the sender, and the caller's `select!` drops that future
    // together with this one.
    let _ = listed.await;
    controller.count_existing_jobs();
    tracing::info!(
        policies = controller.cluster.policies().len(),
        "all objects have been listed"
    );
    if let Some(server) = server {
        server.set_ready(true);
    }
    for _ in 0..workers {
        background.spawn(run_worker(controller.clone()));
    }
    match background.join_next().await {
        Some(Err(e)) => Error::internal(format!("a worker of the controller has ended: {e}")),
        _ => Error::internal("a worker of the controller has ended"),
    }
}

/// Waits until this replica has lost its leadership; forever if it needs none.
async fn leadership_loss(leadership: Option<&LockGuard>) -> Result<()> {
    loop {
        tokio::time::sleep(LEADERSHIP_CHECK_PERIOD).await;
        if let Some(leadership) = leadership
            && !leadership.is_held()
        {
            return leadership.check();
        }
    }
}

/// Reconciles one policy after the other.
async fn run_worker(controller: Arc<Controller>) {
    let cluster = &controller.cluster;
    loop {
        let key = cluster.work.next().await;
        if !cluster.is_listed(&key.0) {
            cluster.work.done(key, None);
            continue;
        }
        let requeue_after = match controller.reconcile(&key).await {
            Ok(requeue_after) => {
                cluster.reconcile_succeeded(&key);
                requeue_after
            }
            Err(failure) => Some(controller.back_off_after(&key, &failure)),
        };
        cluster.work.done(key, requeue_after);
    }
}

impl Controller {
    /// Counts all Jobs that exist, so that a new leader does not exceed the limits with its first Jobs.
    fn count_existing_jobs(&self) {
        let now = Utc::now();
        for key in self.cluster.policy_keys() {
            let observed = self.cluster.observe(&key, &[], now);
            let jobs = plan::limited_jobs(&observed);
            lock(&self.job_limiter).set_jobs(&key, &jobs, now);
        }
    }

    /// Reconciles a policy and its tasks: observes, plans and applies until a plan has no actions left, and
    /// then writes the statuses. Returns the time until the policy is due again; `None` if only a change
    /// makes it due.
    async fn reconcile(&self, key: &Key) -> Result<Option<Duration>, Failure> {
        let mut attempted = Vec::new();
        let mut refused = None;
        let (plan, now) = loop {
            let now = Utc::now();
            let observed = self.cluster.observe(key, &attempted, now);
            let plan = self.plan(&observed);
            self.publish_for_policy(&observed, &plan.events);
            if plan.actions.is_empty() {
                break (plan, now);
            }
            let failure = self
                .apply_actions(&plan.actions, &observed, &mut attempted)
                .await?;
            refused = refused.or(failure);
            if attempted.len() >= MAX_WRITES {
                // Other policies go first before this one writes the rest.
                return refused.map_or(Ok(Some(Duration::ZERO)), Err);
            }
        };
        let is_complete = self.write_statuses(plan.policy, plan.tasks).await?;
        if let Some(failure) = refused {
            // Retry later: the cause of the refusal, such as a quota, may be gone by then.
            return Err(failure);
        }
        if !is_complete {
            return Ok(Some(Duration::ZERO));
        }
        let requeue_after = plan
            .requeue_at
            .map(|at| (at - now).to_std().unwrap_or_default());
        Ok(requeue_after.map(|wait| wait.max(SHORTEST_REQUEUE)))
    }

    /// Plans for a policy, with the job slots that the limiter grants it. Queues other policies that may have
    /// a slot.
    fn plan(&self, observed: &Observed) -> Plan {
        let now = Utc::now();
        let decisions = plan::decide(observed, &self.options, now);
        let requests = decisions.slot_requests();
        let (slots, next_policies) = self.request_slots(observed, &requests, now);
        for policy in next_policies {
            self.cluster.work.add(policy);
        }
        decisions.plan(&slots)
    }

    /// Counts the Jobs of a policy and asks for slots for its new ones. Returns the decision for each Job,
    /// and the policies that may have a slot now.
    fn request_slots(
        &self,
        observed: &Observed,
        requests: &[SlotRequest],
        now: DateTime<Utc>,
    ) -> (BTreeMap<Key, SlotDecision>, Vec<Key>) {
        let key = &observed.key;
        let mut limiter = lock(&self.job_limiter);
        if observed.policy.is_none() && observed.tasks.is_empty() {
            limiter.forget_policy(key, now);
            self.metrics.forget(&key.0, &key.1);
        } else {
            limiter.set_jobs(key, &plan::limited_jobs(observed), now);
        }
        let slots = limiter.request(key, requests, now);
        (slots, limiter.call_next(now))
    }

    /// Applies actions one after the other, and records each in `attempted`. Returns the first refusal.
    ///
    /// Stops with an error at the first failure that is not a refusal. It may be unknown whether that write
    /// took effect: the next reconciliation observes it.
    async fn apply_actions(
        &self,
        actions: &[Action],
        observed: &Observed,
        attempted: &mut Vec<AttemptedAction>,
    ) -> Result<Option<Failure>, Failure> {
        let mut refused = None;
        for action in actions.iter().take(MAX_WRITES) {
            let done = self.apply_action(action, observed).await;
            match done.failure {
                Some(failure) if done.attempt.refusal.is_none() => return Err(failure),
                failure => refused = refused.or(failure),
            }
            attempted.push(done.attempt);
        }
        Ok(refused)
    }

    /// Applies one action, publishes its Event, and updates limits and metrics.
    async fn apply_action(&self, action: &Action, observed: &Observed) -> apply::ActionResult {
        let mut done = self.writer.act(action, observed, &self.cluster).await;
        if let Some(job) = &done.uncreated_job {
            lock(&self.job_limiter).release(job, Utc::now());
        }
        let Some(event) = &done.event else {
            if is_refused_task_job(action, &done) {
                // The task's status reports the refusal and requeues the task.
                done.failure = None;
            }
            return done;
        };
        let mut owning_task = None;
        if let Action::CreateJob { job, start, .. } = action {
            if let Some(start) = start {
                let (namespace, name) = &observed.key;
                let events = u64::try_from(start.events).unwrap_or_default();
                self.metrics.compaction_started(namespace, name, events);
            }
            let mut tasks = observed.tasks.iter();
            owning_task = tasks.find(|task| names::is_owned(&**job, &***task));
        }
        match (owning_task, &observed.policy) {
            (Some(task), _) => self.events.publish(&**task, event),
            (None, Some(policy)) => self.events.publish(&**policy, event),
            (None, None) => {}
        }
        done
    }

    /// Writes the changed statuses and publishes their Events. Returns false if some are left to write.
    async fn write_statuses(
        &self,
        policy: Option<plan::PolicyStatus>,
        tasks: Vec<plan::TaskStatus>,
    ) -> Result<bool, Failure> {
        let is_complete = tasks.len() <= MAX_WRITES;
        if let Some(planned) = policy {
            self.write_policy_status(planned).await?;
        }
        for planned in tasks.into_iter().take(MAX_WRITES) {
            self.write_task_status(planned).await?;
        }
        Ok(is_complete)
    }

    async fn write_policy_status(&self, planned: plan::PolicyStatus) -> Result<(), Failure> {
        let plan::PolicyStatus {
            policy,
            status,
            events,
            compaction_ended,
        } = planned;
        self.writer
            .write_policy_status(&policy, &status, &self.cluster)
            .await?;
        if let Some((succeeded, duration)) = compaction_ended {
            self.metrics.compaction_ended(succeeded, duration);
        }
        for event in &events {
            self.events.publish(&*policy, event);
        }
        Ok(())
    }

    async fn write_task_status(&self, planned: plan::TaskStatus) -> Result<(), Failure> {
        let plan::TaskStatus {
            task,
            status,
            event,
            duration,
        } = planned;
        self.writer
            .write_task_status(&task, &status, &self.cluster)
            .await?;
        if status.state.is_final() {
            let (namespace, _) = names::key(&*task);
            let spec = &task.spec;
            self.metrics
                .task_ended(&namespace, &spec.policy, spec.type_, status.state, duration);
        }
        if let Some(event) = &event {
            self.events.publish(&*task, event);
        }
        Ok(())
    }

    fn publish_for_policy(&self, observed: &Observed, events: &[PlannedEvent]) {
        let Some(policy) = &observed.policy else {
            return;
        };
        for event in events {
            self.events.publish(&**policy, event);
        }
    }

    /// Logs and counts a failed reconciliation. Returns the time until the next attempt.
    fn back_off_after(&self, key: &Key, failure: &Failure) -> Duration {
        let pause = |failures| back_off(failures, failure);
        let requeue_after = self.cluster.reconcile_failed(key, Utc::now(), pause);
        let (namespace, policy) = key;
        let again_in = requeue_after.as_secs_f64();
        tracing::warn!(namespace, policy, again_in, "{failure}");
        self.metrics.reconcile_failed("policy");
        requeue_after
    }
}

/// Returns the back-off after this many failures in a row.
fn back_off(failures: u32, failure: &Failure) -> Duration {
    if failure.is_conflict() && failures <= 3 {
        return CONFLICT_BACK_OFF;
    }
    let doublings = failures.saturating_sub(1).min(6);
    (FIRST_BACK_OFF * 2_u32.pow(doublings)).min(LONGEST_BACK_OFF)
}

/// Whether the API server refused the Job of a task.
fn is_refused_task_job(action: &Action, done: &apply::ActionResult) -> bool {
    let is_task_job = matches!(action, Action::CreateJob { start: None, .. });
    is_task_job && done.attempt.refusal.is_some()
}
