//! The controller: policies become CronJobs, crossed thresholds and tasks become Jobs.
//!
//! It never reads a snapshot and never talks to an etcd or a store: Jobs do, and tell by exit code, termination
//! message and Leases. `cli::controller` runs it.
//!
//! What it knows comes from watches alone ([`Caches`]); a change of something is queued for whom it concerns
//! ([`watch`]); each sub-reconciler (`policy`, `secrets`, `compaction`, `task`) looks at the caches, decides, and
//! writes what is not so yet: it may end at any line, and the next run goes on. Only the leader runs them.

pub mod admission;
pub mod api;
pub mod cleanup;
mod compaction;
pub mod conditions;
mod context;
pub mod jobs;
pub mod leases;
pub mod manifests;
mod metrics;
pub mod outcome;
mod policy;
pub mod queue;
mod secrets;
mod task;
pub mod threshold;
pub mod times;
mod turns;
mod watch;

pub use context::{Caches, Context, Failure, Options};
pub use metrics::ControllerMetrics;

use crate::base::Cancel;
use crate::error::{Error, Reason, Result};
use crate::kubernetes::{self, lease};
use crate::store::lock::{Attempt, Held};
use crate::telemetry::serve::Server;
use futures::channel::mpsc::{UnboundedReceiver, unbounded};
use futures::stream::{BoxStream, StreamExt};
use kube::runtime::controller::{Action, Config as Workers, applier};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Resource, ResourceExt};
use std::convert::Infallible;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Duration;

/// A leader that is dead for so long is replaced.
const LEASE_DURATION: Duration = Duration::from_secs(15);
/// Between looks at the Lease of another leader.
const RETRY_PERIOD: Duration = Duration::from_secs(2);
/// Between looks at one's own.
const CHECK_PERIOD: Duration = Duration::from_millis(500);

/// Runs until it is cancelled, or leads no more. Blocks: not for async threads.
///
/// # Errors
/// `LockHeld` where another replica has taken over: start again, as its standby. `KubernetesUnreachable`,
/// `PermissionDenied` and the like where the API cannot be used from the beginning.
pub fn run(
    client: &kubernetes::Client,
    options: Options,
    metrics: &ControllerMetrics,
    server: Option<&Server>,
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
fn lead(client: &kubernetes::Client, name: &str, identity: &str, cancel: &Cancel) -> Result<Held> {
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

/// Watches and reconciles until leadership is lost.
async fn reconcile_all(
    client: &kubernetes::Client,
    options: Options,
    metrics: &ControllerMetrics,
    server: Option<&Server>,
    held: Option<&Held>,
) -> Result<()> {
    let (policies, policy_requests) = unbounded();
    let (compactions, compaction_requests) = unbounded();
    let (tasks, task_requests) = unbounded();
    let (secrets, secret_requests) = unbounded();
    let queues = context::Queues {
        policies,
        compactions,
        tasks,
        secrets,
    };
    let (caches, writers) = Caches::new();
    let ctx = Arc::new(Context::new(
        client.inner(),
        options,
        caches,
        queues,
        metrics.clone(),
        held.map(Held::watch),
    ));
    metrics.show(&ctx);
    let watches = watch::all(&ctx, writers);
    let ready = async {
        ctx.caches.wait_until_ready().await;
        tracing::info!(
            policies = ctx.caches.policies.len(),
            tasks = ctx.caches.tasks.len(),
            "everything has been listed"
        );
        if let Some(server) = server {
            server.set_ready(true);
        }
        let mut reconcilers = vec![
            queue(
                "policy",
                |o, c| Box::pin(policy::reconcile(o, c)),
                ctx.caches.policies.clone(),
                policy_requests,
                ctx.options.policy_workers,
                &ctx,
            ),
            queue(
                "secrets",
                |o, c| Box::pin(secrets::reconcile(o, c)),
                ctx.caches.secrets.clone(),
                secret_requests,
                1,
                &ctx,
            ),
        ];
        if ctx.options.compaction_workers > 0 {
            let unanswered = Arc::<compaction::Unanswered>::default();
            reconcilers.push(queue(
                "compaction",
                move |o, c| Box::pin(compaction::reconcile(o, c, unanswered.clone())),
                ctx.caches.policies.clone(),
                compaction_requests,
                ctx.options.compaction_workers,
                &ctx,
            ));
        }
        if ctx.options.task_workers > 0 {
            reconcilers.push(queue(
                "task",
                |o, c| Box::pin(task::reconcile(o, c)),
                ctx.caches.tasks.clone(),
                task_requests,
                ctx.options.task_workers,
                &ctx,
            ));
        }
        let run = reconcilers
            .into_iter()
            .map(|stream| stream.for_each(|()| async {}));
        futures::future::join_all(run).await;
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
        () = ready => Err(Error::internal("the reconcilers have ended")),
        lost = leads => lost,
    }
}

/// A sub-reconciler over its queue: no object twice at once, `workers` objects at once.
fn queue<K, F>(
    name: &'static str,
    reconcile: impl Fn(Arc<K>, Arc<Context>) -> F + Send + 'static,
    store: Store<K>,
    requests: UnboundedReceiver<ObjectRef<K>>,
    workers: u16,
    ctx: &Arc<Context>,
) -> BoxStream<'static, ()>
where
    K: Resource + Clone + Debug + Send + Sync + 'static,
    K::DynamicType: Default + Debug + Eq + Hash + Clone + Unpin + Send + Sync,
    F: Future<Output = Result<Action, Failure>> + Unpin + Send + 'static,
{
    let failed = move |object: Arc<K>, e: &Failure, ctx: Arc<Context>| {
        let key = (
            name,
            object.namespace().unwrap_or_default(),
            object.name_any(),
        );
        let wait = ctx.retry_after(&key, e);
        tracing::warn!(
            reconciler = name,
            namespace = key.1,
            name = key.2,
            again_in = wait.as_secs_f64(),
            "{e}"
        );
        ctx.metrics.reconcile_failed(name);
        Action::requeue(wait)
    };
    let requests = requests.map(Ok::<_, Infallible>);
    applier(
        reconcile,
        failed,
        ctx.clone(),
        store,
        requests,
        Workers::default().concurrency(workers.max(1)),
    )
    .map({
        let ctx = ctx.clone();
        move |done| {
            if let Ok((object, _)) = done {
                let namespace = object.namespace.clone().unwrap_or_default();
                ctx.succeeded(&(name, namespace, object.name.clone()));
            }
        }
    })
    .boxed()
}
