//! The controller: policies become CronJobs, crossed thresholds and tasks become Jobs.
//!
//! It never reads a snapshot and never talks to an etcd or a store: Jobs do, and tell by exit code, termination
//! message and Leases. `cli::controller` runs it.
//!
//! One loop: **observe → plan → apply**. [`observe`] keeps what the watches tell, and gives of each policy that has
//! changed one snapshot of all that is known of it and its tasks; [`plan`] makes of that, without asking anybody, what is
//! to be done; [`apply`] is the only room that writes. It may end at any line, and the next look goes on. Only the leader
//! looks.

pub mod api;
mod apply;
pub mod cleanup;
pub mod jobs;
pub mod manifests;
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
use chrono::Utc;
use names::Key;
use observe::{Observed, World};
use plan::job_limits::Limits;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::task::JoinSet;

/// A leader that is dead for so long is replaced.
const LEASE_DURATION: Duration = Duration::from_secs(15);
/// Between looks at the Lease of another leader.
const RETRY_PERIOD: Duration = Duration::from_secs(2);
/// Between looks at one's own.
const CHECK_PERIOD: Duration = Duration::from_millis(500);

/// The first pause after a failure, and the longest.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LONGEST_RETRY: Duration = Duration::from_secs(60);
/// After somebody else wrote at the same time.
const CONFLICT_RETRY: Duration = Duration::from_millis(100);
/// Between two looks at one policy for which only time has gone on.
const SHORTEST_WAIT: Duration = Duration::from_millis(500);
/// In one look, of actions as of statuses of tasks: others have their turn before the rest.
const MOST_WRITES: usize = 30;

/// How the controller was started.
#[derive(Debug, Clone)]
pub struct Options {
    /// What plans depend on.
    pub plan: plan::Options,
    /// The Lease of the leader, by namespace and name; `None` where there is no other replica.
    pub leader_lease: Option<(String, String)>,
    /// Of this replica.
    pub identity: String,
    /// Policies that are looked at at once.
    pub workers: usize,
    /// Jobs of thresholds and tasks that there may be at once, over all policies; 0 for no limit.
    pub max_jobs: u32,
    /// As many of one namespace; 0 for half of them, as long as there are other namespaces.
    pub max_jobs_per_namespace: u32,
}

/// Runs until it is cancelled, or leads no more. Blocks: not for async threads.
///
/// # Errors
/// `LockHeld` where another replica has taken over: start again, as its standby. `KubernetesUnreachable`,
/// `PermissionDenied` and the like where the API cannot be used from the beginning.
pub fn run(
    client: &kubernetes::Client,
    options: Options,
    metrics: &ControllerMetrics,
    server: Option<&MetricsServer>,
    cancel: &Cancel,
) -> Result<()> {
    let held = match &options.leader_lease {
        None => None,
        Some((namespace, name)) => {
            let there = client.in_namespace(namespace);
            // A standby is ready, too: it is there to take over.
            if let Some(server) = server {
                server.set_ready(true);
            }
            Some(lead(&there, name, &options.identity, cancel)?)
        }
    };
    metrics.set_leader(true);
    let result = client.handle().block_on(async {
        let reconciling = reconcile_all(client, options, metrics, server, held.as_ref());
        cancel.or(reconciling).await
    });
    metrics.set_leader(false);
    if let Some(held) = held
        && let Err(e) = held.release()
    {
        tracing::warn!("the leader's Lease was not given back, the next one has to wait: {e}");
    }
    match result {
        // A signal is how it ends.
        Err(e) if e.reason() == Reason::Terminated => Ok(()),
        Err(e) => Err(e),
        Ok(result) => result,
    }
}

/// Waits until this replica is the leader.
fn lead(
    client: &kubernetes::Client,
    name: &str,
    identity: &str,
    cancel: &Cancel,
) -> Result<LockGuard> {
    let mut lock = lease::lock(client, name, identity, LEASE_DURATION);
    let mut told = false;
    loop {
        match lock.try_acquire() {
            Ok(Attempt::Acquired(held)) => return Ok(held),
            Ok(Attempt::HeldBy(holder)) => {
                if !std::mem::replace(&mut told, true) {
                    tracing::info!(
                        leader = holder.identity,
                        "another replica leads; standing by"
                    );
                }
            }
            Err(e) if e.reason().is_retryable() => {
                tracing::warn!("cannot look who leads: {e}");
            }
            Err(e) => return Err(e),
        }
        let pause = async { tokio::time::sleep(RETRY_PERIOD).await };
        client.handle().block_on(cancel.or(pause))?;
    }
}

/// What the loop has.
struct Controller {
    world: Arc<World>,
    limits: Mutex<Limits>,
    writer: Arc<Writer>,
    events: Events,
    metrics: ControllerMetrics,
    options: plan::Options,
}

/// Watches and looks at policies until leadership is lost.
async fn reconcile_all(
    client: &kubernetes::Client,
    options: Options,
    metrics: &ControllerMetrics,
    server: Option<&MetricsServer>,
    held: Option<&LockGuard>,
) -> Result<()> {
    let size = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
    let workers_at_once = options.workers.max(1);
    let world = Arc::new(World::new(workers_at_once));
    metrics.show(&world);
    let writer = Arc::new(Writer::new(client.inner(), held.map(LockGuard::watch)));
    let (events, publish) = Events::new(client.inner(), &options.identity, writer.clone());
    let controller = Arc::new(Controller {
        world: world.clone(),
        limits: Mutex::new(Limits::new(
            size(options.max_jobs),
            size(options.max_jobs_per_namespace),
        )),
        writer,
        events,
        metrics: metrics.clone(),
        options: options.plan,
    });
    let mut workers = JoinSet::new();
    workers.spawn(publish);
    let (listed, everything) = tokio::sync::oneshot::channel();
    let api = client.inner();
    let namespaces = &controller.options.namespaces;
    let watches = observe::watch_all(&world, &api, namespaces, || {
        let _ = listed.send(());
    });
    let work = async {
        // The watches, which send it, live as long.
        let _ = everything.await;
        controller.count_all();
        tracing::info!(
            policies = world.policies().len(),
            "everything has been listed"
        );
        if let Some(server) = server {
            server.set_ready(true);
        }
        for _ in 0..workers_at_once {
            workers.spawn(look_at_policies(controller.clone()));
        }
        match workers.join_next().await {
            Some(Err(e)) => Error::internal(format!("a worker has ended: {e}")),
            _ => Error::internal("the workers have ended"),
        }
    };
    let leads = async {
        loop {
            tokio::time::sleep(CHECK_PERIOD).await;
            if let Some(held) = held
                && !held.is_held()
            {
                return held.check();
            }
        }
    };
    tokio::select! {
        ended = watches => ended,
        failed = work => Err(failed),
        lost = leads => lost,
    }
}

/// Looks at one policy after the other.
async fn look_at_policies(controller: Arc<Controller>) {
    loop {
        let this = controller.world.work.next().await;
        if !controller.world.is_listed(&this.0) {
            controller.world.work.done(this, None);
            continue;
        }
        let again = match controller.look_at(&this).await {
            Ok(again) => {
                controller.world.succeeded(&this);
                again
            }
            Err(failure) => {
                let pause = |count| retry_after(count, &failure);
                let again = controller.world.failed(&this, Utc::now(), pause);
                let (namespace, policy) = &this;
                let again_in = again.as_secs_f64();
                tracing::warn!(namespace, policy, again_in, "{failure}");
                controller.metrics.reconcile_failed("policy");
                Some(again)
            }
        };
        controller.world.work.done(this, again);
    }
}

/// How long to wait after so many failures in a row.
fn retry_after(count: u32, failure: &Failure) -> Duration {
    if failure.is_conflict() && count <= 3 {
        return CONFLICT_RETRY;
    }
    let doublings = count.saturating_sub(1).min(6);
    (FIRST_RETRY * 2_u32.pow(doublings)).min(LONGEST_RETRY)
}

impl Controller {
    /// What runs already counts before anything is granted.
    fn count_all(&self) {
        let now = Utc::now();
        for this in self.world.all() {
            let observed = self.world.observe(&this, &[], now);
            lock(&self.limits).see(&this, &plan::counted(&observed), now);
        }
    }

    /// Observes a policy, plans, and does what was planned, until nothing is left to do; then its statuses are
    /// written. Gives when to look again.
    async fn look_at(&self, this: &Key) -> Result<Option<Duration>, Failure> {
        let mut tried = Vec::new();
        let mut refused = None;
        while tried.len() < MOST_WRITES {
            let now = Utc::now();
            let observed = self.world.observe(this, &tried, now);
            let plan = self.plan(&observed);
            if let Some(policy) = &observed.policy {
                let notes = plan.notes.iter();
                notes.for_each(|note| self.events.tell(&**policy, note));
            }
            if plan.actions.is_empty() {
                let is_all = self.write_statuses(plan.policy, plan.tasks).await?;
                let again = plan.look_again;
                let again = again.map(|at| (at - now).to_std().unwrap_or_default());
                return match refused {
                    // The quota, or whatever else stood in the way, may be another one by then.
                    Some(failure) => Err(failure),
                    None if !is_all => Ok(Some(Duration::ZERO)),
                    None => Ok(again.map(|pause| pause.max(SHORTEST_WAIT))),
                };
            }
            for action in plan.actions.iter().take(MOST_WRITES) {
                let done = self.act(action, &observed).await;
                match done.failure {
                    // Without an answer nothing can be told.
                    Some(failure) if done.tried.refusal.is_none() => return Err(failure),
                    failure => refused = refused.or(failure),
                }
                tried.push(done.tried);
            }
        }
        // Others have their turn before the rest.
        refused.map_or(Ok(Some(Duration::ZERO)), Err)
    }

    /// The plan, once the limits have said whose turn it is.
    fn plan(&self, observed: &Observed) -> plan::Plan {
        let now = Utc::now();
        let this = &observed.key;
        let decided = plan::decide(observed, &self.options, now);
        let wanted = decided.wanted();
        let (turns, called) = {
            let mut limits = lock(&self.limits);
            match observed.policy.is_none() && observed.tasks.is_empty() {
                true => {
                    limits.forget(this, now);
                    self.metrics.forget(&this.0, &this.1);
                }
                false => limits.see(this, &plan::counted(observed), now),
            }
            (limits.ask(this, &wanted, now), limits.next(now))
        };
        for policy in called {
            self.world.work.add(policy);
        }
        decided.plan(&turns)
    }

    /// Does one thing that was planned, and tells of it.
    async fn act(&self, action: &plan::Action, observed: &Observed) -> apply::Done {
        let mut done = self.writer.act(action, observed, &self.world).await;
        if let Some(job) = &done.not_made {
            lock(&self.limits).give_back(job, Utc::now());
        }
        let (namespace, name) = &observed.key;
        if let plan::Action::CreateJob { job, start, .. } = action {
            match start {
                Some(start) if done.note.is_some() => {
                    let events = u64::try_from(start.events).unwrap_or_default();
                    self.metrics.compaction_started(namespace, name, events);
                }
                // What a task's Job meets is told by the task, which is looked at again in time.
                None if done.tried.refusal.is_some() => done.failure = None,
                _ => {}
            }
            let task = observed
                .tasks
                .iter()
                .find(|task| names::is_owned(&**job, &***task));
            if let (Some(task), Some(note)) = (task, &done.note) {
                self.events.tell(&**task, note);
                return done;
            }
        }
        if let (Some(policy), Some(note)) = (&observed.policy, &done.note) {
            self.events.tell(&**policy, note);
        }
        done
    }

    /// Writes what has become another one, and tells of it once it is there. Whether that was all.
    async fn write_statuses(
        &self,
        policy: Option<plan::PolicyStatus>,
        tasks: Vec<plan::TaskStatus>,
    ) -> Result<bool, Failure> {
        let is_all = tasks.len() <= MOST_WRITES;
        if let Some(of) = policy {
            let written = self
                .writer
                .write_policy_status(&of.policy, &of.status, &self.world);
            written.await?;
            if let Some((succeeded, took)) = of.compaction_ended {
                self.metrics.compaction_ended(succeeded, took);
            }
            of.notes
                .iter()
                .for_each(|note| self.events.tell(&*of.policy, note));
        }
        for of in tasks.into_iter().take(MOST_WRITES) {
            let written = self
                .writer
                .write_task_status(&of.task, &of.status, &self.world);
            written.await?;
            if of.status.state.is_final() {
                let (namespace, _) = names::key(&*of.task);
                let spec = &of.task.spec;
                let state = of.status.state;
                self.metrics
                    .task_ended(&namespace, &spec.policy, spec.type_, state, of.took);
            }
            of.note
                .iter()
                .for_each(|note| self.events.tell(&*of.task, note));
        }
        Ok(is_all)
    }
}
