//! The controller: creates CronJobs for policies, and Jobs for reached thresholds and for tasks.
//!
//! It never reads a snapshot and never talks to an etcd or a store: its Jobs do, and report through exit codes,
//! termination messages and Leases.
//!
//! On the leader alone, kube's watchers fill the [`cluster`] caches, and each change requests a reconciliation of the
//! policies that it affects; kube's scheduler merges the requests, and one worker at a time reconciles a policy together
//! with its tasks:
//!
//! 1. [`facts`] is all that the caches say about the policy.
//! 2. [`decide`] decides from the facts, without I/O, what to write: objects, statuses and Events.
//! 3. [`write`] is the only module that writes to the API server.
//!
//! A reconciliation may be interrupted at any line: the next one reads what was written and goes on. An object's name is
//! a function of its purpose, so nothing is done twice.

pub mod api;
pub mod cluster;
pub mod decide;
pub mod facts;
pub mod jobs;
mod limits;
mod metrics;
mod names;
pub mod times;
mod write;

pub use metrics::ControllerMetrics;

use crate::base::{Cancel, lock};
use crate::error::{Error, Reason, Result};
use crate::kubernetes::{self, lease};
use crate::store::lock::{Attempt as LockAttempt, LockGuard};
use crate::telemetry::endpoint::MetricsServer;
use chrono::{DateTime, Utc};
use cluster::{Cluster, Requests};
use decide::{Action, Decision, PlannedEvent, decide};
use facts::{Attempt, Facts, start};
use futures::StreamExt;
use k8s_openapi::api::batch::v1::Job;
use kube::runtime::scheduler::scheduler;
use limits::Limits;
use names::NamespacedName;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;
use write::{Events, Failure, Writer};

/// A standby takes over when the leader has not renewed its Lease for this long.
const LEASE_DURATION: Duration = Duration::from_secs(15);
/// How often a standby tries to become the leader.
const ACQUIRE_PERIOD: Duration = Duration::from_secs(2);
/// How often the leader checks that it still holds its Lease.
const LEADERSHIP_CHECK_PERIOD: Duration = Duration::from_millis(500);

/// The back-off after the first failure of a reconciliation. It doubles with each further failure.
const FIRST_BACK_OFF: Duration = Duration::from_secs(1);
const MAX_BACK_OFF: Duration = Duration::from_secs(60);
/// The back-off after a conflict with another writer: the cache is behind, and shows the newer object soon.
const CONFLICT_BACK_OFF: Duration = Duration::from_millis(100);
/// The shortest wait until a policy is due again although nothing has changed.
const MIN_REQUEUE: Duration = Duration::from_millis(500);
/// The most actions, and the most task statuses, of one reconciliation. If there are more, the policy is
/// requeued behind the others.
const MAX_WRITES: usize = 30;

/// The settings of a controller process.
#[derive(Debug, Clone)]
pub struct Options {
    /// Settings that the decisions depend on.
    pub decide: decide::Options,
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
        Ok(ended) => Err(ended),
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
            Ok(LockAttempt::Acquired(leadership)) => return Ok(leadership),
            Ok(LockAttempt::HeldBy(holder)) => {
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

/// Watches and reconciles all policies. Returns why it has ended.
async fn reconcile_all(
    client: &kubernetes::Client,
    options: Options,
    metrics: &ControllerMetrics,
    server: Option<&MetricsServer>,
    leadership: Option<&LockGuard>,
) -> Error {
    let (cluster, requests) = Cluster::new(&options.decide.namespaces);
    let cluster = Arc::new(cluster);
    metrics.show(&cluster);
    let api = client.inner();
    let writer = Arc::new(Writer::new(api.clone(), leadership.map(LockGuard::watch)));
    let (events, publish_events) = Events::new(api.clone(), &options.identity, writer.clone());
    let controller = Arc::new(Controller {
        cluster: cluster.clone(),
        limits: Mutex::new(Limits::new(
            options.max_jobs,
            options.max_jobs_per_namespace,
        )),
        accounts: Mutex::default(),
        failures: Mutex::default(),
        warnings: Mutex::default(),
        warning_reads: tokio::sync::Mutex::default(),
        writer,
        events,
        metrics: metrics.clone(),
        options: options.decide,
    });
    let run = run_workers(&controller, options.workers.max(1), requests);
    tokio::select! {
        ended = cluster.watch(&api) => ended,
        ended = run => ended,
        () = publish_events => Error::internal("the writer of Events has ended"),
        lost = leadership_loss(leadership) => lost,
        never = announce(&cluster, server) => never,
    }
}

/// Reports readiness when all objects have been listed. Never returns.
async fn announce(cluster: &Cluster, server: Option<&MetricsServer>) -> Error {
    cluster.listed().await;
    tracing::info!("all objects have been listed");
    if let Some(server) = server {
        server.set_ready(true);
    }
    std::future::pending().await
}

/// Reconciles the requested policies, each by one worker at a time. Policies of one namespace get at most two thirds of
/// the workers, so that others need not wait for them. Returns only if a worker panics, which is a bug.
async fn run_workers(
    controller: &Arc<Controller>,
    max_workers: usize,
    requests: Requests,
) -> Error {
    let mut scheduler = std::pin::pin!(scheduler(requests));
    let mut workers = JoinSet::new();
    let mut in_progress: HashSet<NamespacedName> = HashSet::new();
    let mut by_namespace: HashMap<String, usize> = HashMap::new();
    let max_of_namespace = (max_workers * 2).div_ceil(3);
    loop {
        let next = scheduler.as_mut().hold_unless(|policy| {
            let of_namespace = by_namespace.get(&policy.namespace).copied();
            of_namespace.unwrap_or_default() < max_of_namespace && !in_progress.contains(policy)
        });
        let mut next = std::pin::pin!(next);
        tokio::select! {
            Some(policy) = next.next(), if workers.len() < max_workers => {
                *by_namespace.entry(policy.namespace.clone()).or_default() += 1;
                in_progress.insert(policy.clone());
                let controller = controller.clone();
                workers.spawn(async move {
                    let again_after = controller.work(&policy).await;
                    (policy, again_after)
                });
            }
            Some(done) = workers.join_next() => match done {
                Ok((policy, again_after)) => {
                    in_progress.remove(&policy);
                    if let Some(count) = by_namespace.get_mut(&policy.namespace) {
                        *count -= 1;
                    }
                    if let Some(pause) = again_after {
                        controller.cluster.request(policy, Instant::now() + pause);
                    }
                }
                Err(e) => return Error::internal(format!("a worker of the controller has ended: {e}")),
            },
        }
    }
}

/// Waits until this replica has lost its leadership; forever if it needs none.
async fn leadership_loss(leadership: Option<&LockGuard>) -> Error {
    loop {
        tokio::time::sleep(LEADERSHIP_CHECK_PERIOD).await;
        if let Some(leadership) = leadership
            && let Err(lost) = leadership.check()
        {
            return lost;
        }
    }
}

/// The failures of a policy's reconciliation since the last success.
#[derive(Debug, Default)]
struct Failures {
    count: u32,
    /// The end of the current back-off.
    until: Option<Instant>,
    /// The last one, which is not logged twice in a row.
    last: String,
}

/// What all workers of the leader share.
struct Controller {
    cluster: Arc<Cluster>,
    /// Lock order: the caches before the limits.
    limits: Mutex<Limits>,
    /// The namespaces in which the Jobs' ServiceAccount is known to exist.
    accounts: Mutex<BTreeSet<String>>,
    failures: Mutex<HashMap<NamespacedName, Failures>>,
    /// The Warnings of each policy by the name of their object, as they were last read.
    warnings: Mutex<HashMap<NamespacedName, BTreeMap<String, String>>>,
    /// Held while Warnings are read: the API server walks over all Events of the namespace, which may take seconds.
    warning_reads: tokio::sync::Mutex<()>,
    writer: Arc<Writer>,
    events: Events,
    metrics: ControllerMetrics,
    options: decide::Options,
}

impl Controller {
    /// Reconciles a policy, and returns the time until it is due again; `None` if only a change makes it due.
    async fn work(&self, policy: &NamespacedName) -> Option<Duration> {
        if !self.cluster.is_listed() || !self.cluster.is_namespace_listed(&policy.namespace) {
            // The end of the lists requests all policies.
            return None;
        }
        let result = self.reconcile(policy).await;
        // A Job may have ended, whatever else has failed.
        self.wake_waiters();
        match result {
            Ok(again_after) => {
                lock(&self.failures).remove(policy);
                again_after
            }
            Err(failure) => Some(self.back_off(policy, &failure)),
        }
    }

    /// Reconciles a policy and its tasks: decides and acts until a decision has no actions left, and then writes the
    /// statuses.
    async fn reconcile(&self, policy: &NamespacedName) -> Result<Option<Duration>, Failure> {
        self.confirm_jobs(policy).await?;
        let mut facts = self.facts(policy);
        let warnings_again_at;
        (facts.warnings, warnings_again_at) = self.read_warnings(&facts).await;
        let mut refused = None;
        let (decision, now) = loop {
            let now = Utc::now();
            let decision = decide(&facts, &self.options, now)?;
            if decision.actions.is_empty() {
                break (decision, now);
            }
            let mut attempts = std::mem::take(&mut facts.attempts);
            for action in decision.actions.iter().take(MAX_WRITES) {
                let (attempt, failure) = self.act(action, &facts).await?;
                attempts.push(attempt);
                refused = refused.or(failure);
            }
            if attempts.len() >= MAX_WRITES {
                // Other policies go first before this one writes the rest.
                return refused.map_or(Ok(Some(Duration::ZERO)), Err);
            }
            facts = Facts {
                attempts,
                warnings: facts.warnings,
                ..self.facts(policy)
            };
        };
        self.forget_unneeded(&facts, &decision);
        let again_at = times::sooner(decision.again_at, warnings_again_at);
        let is_complete = self.write_statuses(decision).await?;
        if let Some(failure) = refused {
            // Retry later: the cause of the refusal, such as a quota, may be gone by then.
            return Err(failure);
        }
        if !is_complete {
            return Ok(Some(Duration::ZERO));
        }
        let pause = again_at.map(|at| (at - now).to_std().unwrap_or_default());
        Ok(pause.map(|pause| pause.max(MIN_REQUEUE)))
    }

    /// Looks for the Jobs whose creation got no response: whether they exist must be known before the next decision.
    async fn confirm_jobs(&self, policy: &NamespacedName) -> Result<(), Failure> {
        let unconfirmed = {
            let tables = self.cluster.tables();
            let mut limits = lock(&self.limits);
            limits.forget_seen(&tables, Utc::now());
            limits.unseen(policy).1
        };
        for name in unconfirmed {
            let job = self.writer.get(&name).await?;
            lock(&self.limits).answered(&name, job);
        }
        Ok(())
    }

    /// Returns what is known of a policy.
    fn facts(&self, policy: &NamespacedName) -> Facts {
        let tables = self.cluster.tables();
        let (unseen, unconfirmed) = lock(&self.limits).unseen(policy);
        let mut facts = Facts::read(&tables, policy, unseen);
        drop(tables);
        facts.unconfirmed_jobs = unconfirmed.into_iter().map(|job| job.name).collect();
        facts.has_account = lock(&self.accounts).contains(&policy.namespace);
        facts
    }

    /// Returns the Warnings about Jobs and Pods that have not started and whose status does not say why, and when to
    /// look again. Only one worker at a time reads Warnings; meanwhile, others use those that were read before.
    async fn read_warnings(
        &self,
        facts: &Facts,
    ) -> (BTreeMap<String, String>, Option<DateTime<Utc>>) {
        let now = Utc::now();
        let of_jobs = facts
            .jobs
            .iter()
            .map(|job| start::silent(job, &facts.pods_of(job), now));
        let of_followers = facts.follower_pods().map(|pod| start::silent_pod(pod, now));
        let (mut silent, mut again_at) = (Vec::new(), None);
        for (object, look_at) in of_jobs.chain(of_followers) {
            again_at = times::sooner(again_at, look_at);
            silent.extend(object);
        }
        let policy = &facts.key;
        let mut warnings = lock(&self.warnings).remove(policy).unwrap_or_default();
        warnings.retain(|name, _| silent.iter().any(|object| object.name == *name));
        if let Ok(_reading) = self.warning_reads.try_lock() {
            for object in &silent {
                let namespace = &policy.namespace;
                match self.writer.newest_warning(namespace, object).await {
                    Ok(Some(warning)) => _ = warnings.insert(object.name.clone(), warning),
                    Ok(None) => _ = warnings.remove(&object.name),
                    // Everything else about the policy goes on.
                    Err(e) => tracing::debug!(namespace, policy = policy.name, "{e}"),
                }
            }
        }
        if !warnings.is_empty() {
            lock(&self.warnings).insert(policy.clone(), warnings.clone());
        }
        (warnings, again_at)
    }

    /// Carries out an action, and publishes its Event. Returns the attempt, with the refusal if there is one; and the
    /// failure to retry later.
    ///
    /// Fails if the action was not refused: it may be unknown whether the write took effect, which the next
    /// reconciliation finds out.
    async fn act(
        &self,
        action: &Action,
        facts: &Facts,
    ) -> Result<(Attempt, Option<Failure>), Failure> {
        let policy = &facts.key;
        let mut attempt = Attempt {
            action: action.description(),
            refusal: None,
        };
        let done = if let Action::CreateJob { job, .. } = action {
            if let Err(message) = self.take_slot(policy, job) {
                attempt.refusal = Some(facts::Refusal {
                    reason: decide::TOO_MANY_JOBS,
                    message,
                    is_final: false,
                });
                return Ok((attempt, None));
            }
            self.create_job(job).await
        } else {
            self.writer.act(action, policy).await
        };
        let is_new = match done {
            Ok(is_new) => is_new,
            Err(failure) => {
                attempt.refusal = failure.refusal(action);
                if attempt.refusal.is_none() {
                    return Err(failure);
                }
                // The status of a task reports its refused Job, and says when to retry.
                let is_task_job = matches!(
                    action,
                    Action::CreateJob {
                        revisions: None,
                        ..
                    }
                );
                return Ok((attempt, Some(failure).filter(|_| !is_task_job)));
            }
        };
        if matches!(action, Action::MakeAccount) {
            lock(&self.accounts).insert(policy.namespace.clone());
        }
        // A watch may never show a Job that was deleted soon after its creation: it must not hold up others.
        if let Action::Delete(resource, name, _) = action
            && resource.kind == "Job"
        {
            let name = NamespacedName::new(&policy.namespace, name);
            lock(&self.limits).answered(&name, None);
        }
        if is_new {
            self.publish_action(action, facts);
        }
        Ok((attempt, None))
    }

    /// Takes a slot for a Job, or returns why the policy has to wait.
    fn take_slot(&self, policy: &NamespacedName, job: &Job) -> Result<(), String> {
        let tables = self.cluster.tables();
        lock(&self.limits).take_slot(&tables, policy, job, Utc::now())
    }

    /// Creates a Job that has a slot. Returns whether it is new.
    async fn create_job(&self, job: &Job) -> Result<bool, Failure> {
        let name = NamespacedName::of(job);
        let created = self.writer.create_job(job).await;
        match &created {
            Ok((job, _)) => lock(&self.limits).answered(&name, Some(job.clone())),
            Err(failure) if failure.had_no_effect() => lock(&self.limits).answered(&name, None),
            Err(_) => {}
        }
        created.map(|(_, is_new)| is_new)
    }

    /// Publishes the Event of an action that has changed something.
    fn publish_action(&self, action: &Action, facts: &Facts) {
        let event = match action {
            Action::CreateJob { event, .. } | Action::Apply(_, event) => event,
            _ => return,
        };
        if let Action::CreateJob { job, revisions, .. } = action {
            if let Some(revisions) = revisions {
                self.metrics.compaction_started(&facts.key, *revisions);
            }
            let mut tasks = facts.tasks.iter();
            if let Some(task) = tasks.find(|task| names::is_owned(&**job, &***task)) {
                return self.events.publish(&**task, event);
            }
        }
        if let Some(policy) = &facts.policy {
            self.events.publish(&**policy, event);
        }
    }

    /// Wakes the policies that may have a slot now.
    fn wake_waiters(&self) {
        let woken = {
            let tables = self.cluster.tables();
            lock(&self.limits).wake(&tables, Utc::now())
        };
        for policy in woken {
            self.cluster.request(policy, Instant::now());
        }
    }

    /// Forgets what a policy does not need any more.
    fn forget_unneeded(&self, facts: &Facts, decision: &Decision) {
        if !decision.waits_for_slot {
            lock(&self.limits).stop_waiting(&facts.key);
        }
        if facts.policy.is_none() && facts.tasks.is_empty() {
            self.metrics.forget(&facts.key);
            // The namespace may be deleted and created again without the ServiceAccount.
            lock(&self.accounts).remove(&facts.key.namespace);
        }
    }

    /// Writes the changed statuses and publishes their Events. Returns false if some are left to write.
    async fn write_statuses(&self, decision: Decision) -> Result<bool, Failure> {
        if let Some(planned) = decision.policy {
            let policy = &*planned.policy;
            self.writer
                .write_status(policy, &planned.policy.status, &planned.status)
                .await?;
            if let Some((succeeded, duration)) = planned.compaction_ended {
                self.metrics.compaction_ended(succeeded, duration);
            }
            for failure in &planned.failures {
                self.metrics
                    .job_failed(&NamespacedName::of(policy), failure);
            }
            self.publish_all(policy, &planned.events);
        }
        let is_complete = decision.tasks.len() <= MAX_WRITES;
        for planned in decision.tasks.into_iter().take(MAX_WRITES) {
            let task = &*planned.task;
            self.writer
                .write_status(task, &task.status, &planned.status)
                .await?;
            if planned.status.state.is_final() {
                self.metrics
                    .task_ended(task, planned.status.state, planned.duration);
            }
            self.publish_all(task, planned.event.as_slice());
        }
        Ok(is_complete)
    }

    fn publish_all<K: kube::Resource<DynamicType = ()>>(
        &self,
        object: &K,
        events: &[PlannedEvent],
    ) {
        for event in events {
            self.events.publish(object, event);
        }
    }

    /// Logs and counts a failed reconciliation. Returns the time until the next attempt.
    fn back_off(&self, policy: &NamespacedName, failure: &Failure) -> Duration {
        let mut failures = lock(&self.failures);
        let failures = failures.entry(policy.clone()).or_default();
        // A reconciliation during the back-off ran early because something had changed, and does not count.
        if failures.until.is_none_or(|until| until <= Instant::now()) {
            failures.count = failures.count.saturating_add(1);
        }
        let pause = if failure.is_conflict() && failures.count <= 3 {
            CONFLICT_BACK_OFF
        } else {
            let doublings = (failures.count - 1).min(6);
            (FIRST_BACK_OFF * 2_u32.pow(doublings)).min(MAX_BACK_OFF)
        };
        failures.until = Some(Instant::now() + pause);
        let text = failure.to_string();
        let (namespace, name) = (&policy.namespace, &policy.name);
        let again_in = pause.as_secs_f64();
        if failure.is_expected() || failures.last == text {
            tracing::debug!(namespace, policy = name, again_in, "{text}");
        } else {
            tracing::warn!(namespace, policy = name, again_in, "{text}");
        }
        failures.last = text;
        if !failure.is_expected() {
            self.metrics.reconcile_failed("policy");
        }
        pause
    }
}
