//! The cap on Jobs over all policies, applied to what the cache of Jobs shows.
//!
//! It decides nothing: `admission` does. `compaction` and `task` ask here before they create a Job; `watch` tells of
//! each change of a Job, so that whoever waits for its turn is called.

use super::admission::{Answer, Asker, Key, Seen};
use super::context::{Context, label};
use super::jobs::{self, Work};
use super::outcome;
use super::times::utc;
use chrono::{DateTime, TimeDelta, Utc};
use k8s_openapi::api::batch::v1::Job;
use kube::runtime::reflector::ObjectRef;
use kube::{Resource, ResourceExt};

/// On a threshold's Job: what crossed.
pub(super) const TRIGGER: &str = "deltafold.io/trigger";

/// Whether a Job was made by a threshold: the full snapshots among them are labelled as those of schedules are.
pub(super) fn is_of_threshold(job: &Job) -> bool {
    let annotations = job.metadata.annotations.as_ref();
    annotations.is_some_and(|a| a.contains_key(TRIGGER))
        || label(job, jobs::LABEL_WORK) == Some(Work::Compaction.as_str())
}

/// Whether a Job was made for a task.
pub(super) fn is_of_task(job: &Job) -> bool {
    label(job, jobs::LABEL_WORK) == Some(Work::Task.as_str())
}

/// A status may have been listed a moment later than the Jobs were.
const LISTS_DIFFER: TimeDelta = TimeDelta::seconds(10);

/// Whether a Job that was made at that time may be there although it is not in the cache.
pub(super) fn is_young(made: Option<DateTime<Utc>>, now: DateTime<Utc>) -> bool {
    made.is_some_and(|made| (now - made).abs() < LISTS_DIFFER)
}

/// When to look again for a Job that may be there.
pub(super) fn look_again(now: DateTime<Utc>) -> DateTime<Utc> {
    now + LISTS_DIFFER
}

/// An object's namespace and name.
pub(super) fn key<K: Resource>(object: &K) -> Key {
    (object.namespace().unwrap_or_default(), object.name_any())
}

/// The Jobs that count.
fn counted(ctx: &Context) -> Vec<Seen> {
    let jobs = ctx.caches.jobs.state();
    let counted = jobs.iter().filter_map(|job| {
        let policy = label(&**job, jobs::LABEL_POLICY)?;
        let counts = is_of_threshold(job) || is_of_task(job);
        counts.then(|| Seen {
            job: key(&**job),
            policy: (job.namespace().unwrap_or_default(), policy.to_owned()),
            finished: outcome::is_finished(job),
            created: job.metadata.creation_timestamp.as_ref().map(utc),
        })
    });
    counted.collect()
}

/// A Job has changed: those whose turn it is now look again.
pub(super) fn call_next(ctx: &Context) {
    if ctx.admission().is_idle() {
        return;
    }
    let jobs = counted(ctx);
    let called = {
        let mut admission = ctx.admission();
        admission.observe(jobs, ctx.now());
        admission.keep(|asker| match asker {
            Asker::Policy((namespace, name)) => ctx.caches.policy(namespace, name).is_some(),
            Asker::Task { task, .. } => {
                let task = ObjectRef::new(&task.1).within(&task.0);
                ctx.caches.tasks.get(&task).is_some()
            }
        });
        admission.next(ctx.now())
    };
    for asker in called {
        match asker {
            Asker::Policy((namespace, name)) => {
                ctx.look_at_thresholds(ObjectRef::new(&name).within(&namespace));
            }
            Asker::Task {
                task: (namespace, name),
                ..
            } => ctx.look_at_task(ObjectRef::new(&name).within(&namespace)),
        }
    }
}

/// The asker needs no Job now.
pub(super) fn withdraw(ctx: &Context, asker: &Asker) {
    let had_waited = ctx.admission().withdraw(asker);
    if had_waited {
        call_next(ctx);
    }
}

/// A Job that was granted was not made.
pub(super) fn give_back(ctx: &Context, job: &Key) {
    ctx.admission().give_back(job);
    call_next(ctx);
}

/// Whether this Job may be made now; where not, why. The asker is called when its turn has come. `told` is the object
/// at which people see that there are more Jobs than may be.
pub(super) async fn ask<K>(ctx: &Context, asker: &Asker, job: &Key, told: &K) -> Result<(), String>
where
    K: Resource<Scope = kube::core::NamespaceResourceScope>,
    K::DynamicType: Default,
{
    let jobs = counted(ctx);
    let answer = {
        let mut admission = ctx.admission();
        admission.observe(jobs, ctx.now());
        if let Asker::Task { policy, .. } = asker {
            // Two tasks of one policy may come to it in the same moment.
            let mut others = admission
                .pending(policy, ctx.now())
                .filter(|(j, _)| *j != job);
            if let Some(((_, name), _)) = others.find(|(_, a)| matches!(a, Asker::Task { .. })) {
                return Err(format!("the Job {name} of another task is being created"));
            }
        }
        admission.ask(asker, job, ctx.now())
    };
    match answer {
        Answer::Granted => Ok(()),
        Answer::Wait { reason, freeze } => {
            if let Some(freeze) = freeze {
                let note = format!(
                    "{} Jobs of thresholds and tasks run, and no more than {} may: none is started until there are {} or fewer",
                    freeze.active, freeze.cap, freeze.until
                );
                ctx.tell(told, true, "TooManyJobs", "Freeze", &note).await;
            }
            Err(reason)
        }
    }
}
