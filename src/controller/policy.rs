//! A policy: its CronJobs, follower, Leases and rights are as it says, and its status as things are.
//!
//! Thresholds and tasks are others' business (`compaction`, `task`). Run for each policy that changes, and
//! where one of its objects, Leases or Secrets does; again by itself only when a condition is to go stale.

use super::api::{
    Condition, ConditionStatus, EtcdBackupPolicy, EtcdBackupPolicyStatus, LastRun,
    RestorableWindow, SnapshotStatus, SnapshotsStatus,
};
use super::conditions::{self, Judgement, Problem};
use super::context::{Context, Failure, label};
use super::jobs::{self, SecretKeys, Work};
use super::leases::{LeaseFacts, SnapshotFact};
use super::outcome;
use chrono::{DateTime, Utc};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use serde_json::{Map, Value};
use std::sync::Arc;
use std::time::Duration;

/// The owner of what it writes.
const MANAGER: &str = "deltafold-policy";
/// Never sooner than this by itself.
const SHORTEST_WAIT: Duration = Duration::from_secs(1);
const BACKUP_READY: &str = "BackupReady";
const COMPACTION_HEALTHY: &str = "CompactionHealthy";

pub(super) async fn reconcile(
    policy: Arc<EtcdBackupPolicy>,
    ctx: Arc<Context>,
) -> Result<Action, Failure> {
    if policy.metadata.deletion_timestamp.is_some() {
        // What it owns goes with it; the backup stays.
        return Ok(Action::await_change());
    }
    let namespace = policy.namespace().unwrap_or_default();
    let name = policy.name_any();
    let now = ctx.now();
    let others = ctx.caches.policies.state();
    let (keys, not_ready) = match impediment(&policy, &others) {
        Some(not_ready) => (SecretKeys::new(), Some(not_ready)),
        None => secrets(&policy, &ctx).await?,
    };

    let facts = facts(&policy, &ctx);
    let runs = Runs::of(&ctx, &namespace, &name);
    let old = policy.status.clone().unwrap_or_default();
    let (full, delta) = jobs::lease_names(&policy);
    let seen = conditions::Seen {
        full: ctx.lease_changed_at(&namespace, &full),
        delta: ctx.lease_changed_at(&namespace, &delta),
    };
    let last_verification = runs
        .last(&ctx, Work::Verification)
        .or(old.last_verification.clone());
    let last_defragmentation = runs
        .last(&ctx, Work::Maintenance)
        .or(old.last_defragmentation.clone());
    let (last_full, last_delta) = (
        runs.last(&ctx, Work::FullSnapshot),
        runs.last(&ctx, Work::DeltaSnapshot),
    );
    let snapshot_runs = conditions::SnapshotRuns {
        full: last_full.as_ref(),
        delta: last_delta.as_ref(),
    };
    let ready = conditions::ready(&policy, not_ready.as_slice());
    let backup_ready = conditions::backup_ready(&policy, &facts, &snapshot_runs, &seen, now);
    let verified = conditions::backup_verified(&policy, last_verification.as_ref(), now);
    let is_backed_up = backup_ready.status == ConditionStatus::True;
    let judged = [
        ("Ready", &ready),
        (BACKUP_READY, &backup_ready),
        ("BackupVerified", &verified),
    ];

    // Of a policy that cannot be acted on nothing goes on running by its schedules, and nothing is deleted.
    let mut acted_on = (*policy).clone();
    acted_on.spec.suspend |= not_ready.is_some();
    if not_ready.as_ref().is_none_or(|n| n.reason != INVALID) {
        apply_all(&acted_on, &keys, !is_backed_up, not_ready.is_none(), &ctx).await?;
    }

    let stale_at = judged.iter().filter_map(|(_, j)| j.stale_at).min();
    let status = EtcdBackupPolicyStatus {
        observed_generation: policy.metadata.generation,
        conditions: conditions::merge(&old.conditions, &judged, policy.metadata.generation, now),
        snapshots: snapshots(&facts),
        restorable_window: facts.restorable.map(|(first_revision, last_revision)| {
            RestorableWindow {
                first_revision,
                last_revision,
            }
        }),
        last_verification,
        last_defragmentation,
        active_jobs: runs.active(),
        last_compaction: None,
        last_restoration: None,
    };
    let was_backed_up = is_true(&old.conditions, BACKUP_READY);
    write_status(&policy, &old, &status, &ctx).await?;
    for (type_, judgement) in judged {
        tell_change(&policy, &old.conditions, type_, judgement, &ctx).await;
    }
    if is_backed_up != was_backed_up {
        // What was postponed may go.
        for task in ctx.caches.tasks_of(&namespace, &name) {
            ctx.look_at_task(ObjectRef::from_obj(&*task));
        }
    }
    Ok(match stale_at {
        None => Action::await_change(),
        Some(at) => {
            let wait = (at - now).to_std().unwrap_or_default();
            Action::requeue(wait.max(SHORTEST_WAIT))
        }
    })
}

fn is_true(conditions: &[Condition], type_: &str) -> bool {
    let mut of_it = conditions.iter().filter(|c| c.type_ == type_);
    of_it.any(|c| c.status == ConditionStatus::True)
}

/// What no Job could be made of.
const INVALID: &str = "SpecInvalid";

/// What keeps a policy from being acted on at all.
pub(super) fn impediment(
    policy: &EtcdBackupPolicy,
    others: &[Arc<EtcdBackupPolicy>],
) -> Option<Problem> {
    let problems = jobs::problems(policy);
    if !problems.is_empty() {
        return Some(Problem {
            reason: INVALID.to_owned(),
            message: problems.join("; "),
        });
    }
    let first = others
        .iter()
        .filter(|other| {
            other.metadata.deletion_timestamp.is_none()
                && other.metadata.uid != policy.metadata.uid
                && same_prefix(policy, other)
                && seniority(other) < seniority(policy)
        })
        .min_by_key(|other| seniority(other))?;
    Some(Problem {
        reason: "StorePrefixTaken".to_owned(),
        message: format!(
            "policy {}/{} has the same store, {}, and is older: give each etcd a prefix of its own, or delete one of the two",
            first.namespace().unwrap_or_default(),
            first.name_any(),
            policy.spec.store.url
        ),
    })
}

/// The older one has the prefix; of two of the same second the one that is first by name.
fn seniority(policy: &EtcdBackupPolicy) -> (Option<i64>, String, String) {
    let created = policy.metadata.creation_timestamp.as_ref();
    (
        created.map(|t| t.0.as_second()),
        policy.namespace().unwrap_or_default(),
        policy.name_any(),
    )
}

/// Whether two policies write to one place: by URL and the server that it means. Local volumes are the same
/// where the volume is.
pub(super) fn same_prefix(a: &EtcdBackupPolicy, b: &EtcdBackupPolicy) -> bool {
    let place = |policy: &EtcdBackupPolicy| {
        let store = &policy.spec.store;
        let url = store.url.trim_end_matches('/').to_owned();
        let claims = store.volume.as_ref();
        let claim = claims.and_then(|v| v.persistent_volume_claim.clone());
        // A claim is one of its namespace; everything else has no namespace.
        let claim = claim.map(|c| (policy.namespace().unwrap_or_default(), c));
        let path = claims.and_then(|v| v.host_path.clone());
        // A URL below a mount is elsewhere than that below another one, but for those the volume tells.
        let server = store
            .options
            .iter()
            .find(|(key, _)| key.ends_with("endpoint"));
        let server = server.map(|(_, value)| value.trim_end_matches('/').to_owned());
        (url, claim, path, server)
    };
    place(a) == place(b)
}

/// The keys of all Secrets that a policy refers to; and what is wrong with them.
pub(super) async fn secrets(
    policy: &EtcdBackupPolicy,
    ctx: &Context,
) -> Result<(SecretKeys, Option<Problem>), Failure> {
    let namespace = policy.namespace().unwrap_or_default();
    let mut keys = SecretKeys::new();
    let mut missing = Vec::new();
    for referenced in jobs::secrets_of(policy) {
        let name = &referenced.name;
        let there = ctx.secret_keys(&namespace, name).await?;
        missing.extend(referenced.problem(there.as_ref()));
        if let Some(there) = there {
            keys.insert(name.clone(), there);
        }
    }
    let not_ready = (!missing.is_empty()).then(|| Problem {
        reason: "SecretMissing".to_owned(),
        message: format!("{}; namespace {namespace}", missing.join("; ")),
    });
    Ok((keys, not_ready))
}

/// What the Leases of a policy tell.
pub(super) fn facts(policy: &EtcdBackupPolicy, ctx: &Context) -> LeaseFacts {
    let namespace = policy.namespace().unwrap_or_default();
    let (full, delta) = jobs::lease_names(policy);
    let lease = |name: &str| ctx.caches.lease(&namespace, name);
    LeaseFacts::read(lease(&full).as_deref(), lease(&delta).as_deref())
}

/// How long ago the newest snapshots were saved, in seconds, by kind.
pub(super) fn snapshot_ages(ctx: &Context, policy: &EtcdBackupPolicy) -> Vec<(&'static str, f64)> {
    let facts = facts(policy, ctx);
    let now = ctx.now();
    let age = |renewed: Option<DateTime<Utc>>| {
        renewed.map(|t| ((now - t).num_milliseconds() as f64 / 1000.0).max(0.0))
    };
    let full = facts.full.as_ref().and_then(|s| age(s.renewed));
    let delta = facts.delta.as_ref().and_then(|s| age(s.renewed));
    [("full", full), ("delta", delta)]
        .into_iter()
        .filter_map(|(kind, age)| Some((kind, age?)))
        .collect()
}

fn snapshots(facts: &LeaseFacts) -> Option<SnapshotsStatus> {
    let full = facts.full.as_ref()?;
    let shown = |s: &SnapshotFact| SnapshotStatus {
        name: s.name.clone(),
        start_revision: s.start_revision,
        end_revision: s.revision,
        time: s.time,
        size: s.bytes,
    };
    Some(SnapshotsStatus {
        last_full: Some(shown(full)),
        // Where nothing came after the full, the other Lease tells of the same.
        last_delta: facts
            .delta
            .as_ref()
            .filter(|d| d.revision > full.revision)
            .map(shown),
        accumulated_delta_size: facts.accumulated_bytes,
        accumulated_delta_events: facts.accumulated_events,
    })
}

/// The Jobs of a policy, those of tasks and thresholds too.
struct Runs(Vec<Arc<Job>>);

impl Runs {
    fn of(ctx: &Context, namespace: &str, policy: &str) -> Self {
        Runs(ctx.caches.jobs_of(namespace, policy))
    }

    /// The newest Job of some work that has ended.
    fn last(&self, ctx: &Context, work: Work) -> Option<LastRun> {
        let job = self
            .0
            .iter()
            .filter(|job| label(&***job, jobs::LABEL_WORK) == Some(work.as_str()))
            .filter(|job| outcome::is_finished(job))
            .max_by_key(|job| (job.creation_timestamp().map(|t| t.0), job.name_any()))?;
        Some(outcome::last_run(job, &pods(ctx, job)))
    }

    fn active(&self) -> Vec<String> {
        let active = self.0.iter().filter(|job| !outcome::is_finished(job));
        let mut names: Vec<String> = active.map(|job| job.name_any()).collect();
        names.sort();
        names
    }
}

/// Has all objects of a policy be as they should be; what is wanted no more is deleted where `delete` says so.
async fn apply_all(
    policy: &EtcdBackupPolicy,
    keys: &SecretKeys,
    postpone_maintenance: bool,
    delete: bool,
    ctx: &Context,
) -> Result<(), Failure> {
    let namespace = policy.namespace().unwrap_or_default();
    let settings = &ctx.options.settings;
    for lease in jobs::leases(policy) {
        // Whoever saves snapshots writes it; it only has to be there.
        if ctx.caches.lease(&namespace, &lease.name_any()).is_none() {
            ctx.create(&lease).await?;
        }
    }
    for lease in jobs::lock_leases(policy) {
        ctx.create_once(&lease).await?;
    }
    if let Some((account, role, binding)) = jobs::access(policy) {
        ctx.apply(MANAGER, &account, None, false).await?;
        ctx.apply(MANAGER, &role, None, false).await?;
        ctx.apply(MANAGER, &binding, None, false).await?;
    }
    let cron_jobs = jobs::cron_jobs(policy, settings, keys, postpone_maintenance);
    for wanted in &cron_jobs {
        let key = ObjectRef::from_obj(wanted);
        let there = ctx.caches.cron_jobs.get(&key);
        let written = ctx.apply(MANAGER, wanted, there.as_deref(), true).await?;
        if written {
            let note = format!(
                "CronJob {} runs at \"{}\"{}",
                wanted.name_any(),
                wanted.spec.schedule,
                match wanted.spec.suspend {
                    Some(true) => ", suspended",
                    _ => "",
                }
            );
            ctx.tell(policy, false, "CronJobApplied", "Apply", &note)
                .await;
        }
    }
    let follower = jobs::follower(policy, settings, keys);
    if let Some(wanted) = &follower {
        let there = ctx.caches.deployments.get(&ObjectRef::from_obj(wanted));
        let written = ctx.apply(MANAGER, wanted, there.as_deref(), true).await?;
        if written {
            let note = format!("Deployment {} follows the etcd", wanted.name_any());
            ctx.tell(policy, false, "FollowerApplied", "Apply", &note)
                .await;
        }
    }
    if !delete {
        return Ok(());
    }
    let name = policy.name_any();
    let is_its = |labels: Option<&str>, there: Option<&str>| {
        labels == Some(name.as_str()) && there == Some(namespace.as_str())
    };
    let wanted: Vec<String> = cron_jobs.iter().map(ResourceExt::name_any).collect();
    let surplus = ctx.caches.cron_jobs.state_filter(|c| {
        is_its(
            label(c, jobs::LABEL_POLICY),
            c.metadata.namespace.as_deref(),
        ) && !wanted.contains(&c.name_any())
    });
    for cron_job in surplus {
        ctx.delete(&*cron_job).await?;
    }
    if follower.is_none() {
        let surplus = ctx.caches.deployments.state_filter(|d| {
            is_its(
                label(d, jobs::LABEL_POLICY),
                d.metadata.namespace.as_deref(),
            )
        });
        for deployment in surplus {
            ctx.delete(&*deployment).await?;
        }
    }
    Ok(())
}

/// Writes the part of a status that is ours, where it is not so yet.
async fn write_status(
    policy: &EtcdBackupPolicy,
    old: &EtcdBackupPolicyStatus,
    new: &EtcdBackupPolicyStatus,
    ctx: &Context,
) -> Result<(), Failure> {
    let theirs = ["lastCompaction", "lastRestoration"];
    let part = |status: &EtcdBackupPolicyStatus| -> Result<Map<String, Value>, Failure> {
        let value = serde_json::to_value(status).map_err(|e| Failure::Object(e.to_string()))?;
        let Value::Object(mut map) = value else {
            return Err(Failure::Object("a status that is no object".to_owned()));
        };
        for field in theirs {
            map.remove(field);
        }
        Ok(map)
    };
    let mut old = old.clone();
    old.conditions.retain(|c| c.type_ != COMPACTION_HEALTHY);
    let (old, new) = (part(&old)?, part(new)?);
    if old == new {
        return Ok(());
    }
    ctx.apply_status(MANAGER, policy, &Value::Object(new)).await
}

/// An Event where a condition has become another one.
async fn tell_change(
    policy: &EtcdBackupPolicy,
    old: &[Condition],
    type_: &str,
    judgement: &Judgement,
    ctx: &Context,
) {
    let before = old.iter().find(|c| c.type_ == type_);
    let is_new =
        before.is_none_or(|c| c.status != judgement.status || c.reason != judgement.reason);
    let is_first = before.is_none() && judgement.status == ConditionStatus::Unknown;
    if is_new && !is_first {
        let bad = judgement.status == ConditionStatus::False;
        let note = format!(
            "{type_} is {}: {}",
            judgement.status.as_str(),
            judgement.message
        );
        ctx.tell(policy, bad, &judgement.reason, "Observe", &note)
            .await;
    }
}

/// The Pods of a Job, for `outcome`.
fn pods(ctx: &Context, job: &Job) -> Vec<Pod> {
    let pods = ctx.caches.pods_of(job);
    pods.iter().map(|pod| (**pod).clone()).collect()
}
