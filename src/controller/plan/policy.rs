//! A policy: its CronJobs, follower, Leases and rights are as it says, and its status as things are.
//!
//! Thresholds and tasks are others' business (`compaction`, `task`). Run for each policy that changes, and
//! where one of its objects, Leases or Secrets does; again by itself only when a condition is to go stale.

use super::api::{
    Condition, ConditionStatus, EtcdBackupPolicy, EtcdBackupPolicyStatus, LastRun,
    RestorableWindow, SnapshotStatus, SnapshotsStatus, StoreSpec, StoreVolume, TaskType,
};
use super::conditions::{self, Judgement, Problem};
use super::context::{Context, Failure, label};
use super::jobs::{self, Work};
use super::leases::{LeaseFacts, SnapshotFact};
use super::outcome;
use super::times::{requeue, utc};
use chrono::{DateTime, Utc};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The owner of what it writes.
const MANAGER: &str = "deltafold-policy";
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
    let not_ready = impediment(&policy, &others);

    let facts = facts(&policy, &ctx);
    let runs = Runs::of(&ctx, &namespace, &name);
    let old = policy.status.clone().unwrap_or_default();
    let (full, delta) = jobs::lease_names(&policy);
    let seen = conditions::Seen {
        full: ctx.lease_changed_at(&namespace, &full),
        delta: ctx.lease_changed_at(&namespace, &delta),
    };
    let verification = runs.last(&ctx, Work::Verification, Some(TaskType::Verify));
    let last_verification = later_run(old.last_verification.clone(), verification);
    let defragmentation = runs.last(&ctx, Work::Maintenance, Some(TaskType::Maintenance));
    let last_defragmentation = later_run(old.last_defragmentation.clone(), defragmentation);
    let (last_full, last_delta) = (
        runs.last(&ctx, Work::FullSnapshot, None),
        runs.last(&ctx, Work::DeltaSnapshot, None),
    );
    let snapshot_runs = conditions::SnapshotRuns {
        full: last_full.as_ref(),
        delta: last_delta.as_ref(),
    };
    let backup_ready = conditions::backup_ready(&policy, &facts, &snapshot_runs, &seen, now);
    let verified = conditions::backup_verified(&policy, last_verification.as_ref(), now);
    let is_backed_up = backup_ready.status == ConditionStatus::True;
    let (not_ready, refused) = match not_ready {
        // What was right once goes on as it was: a slip of the pen must not end the backups.
        Some(invalid) if invalid.reason == INVALID => {
            if policy.spec.suspend {
                stop_all(&policy, &ctx).await?;
            }
            (Some(invalid), None)
        }
        // Of a policy that cannot be acted on nothing goes on running by its schedules, and nothing is deleted.
        not_ready => {
            let mut acted_on = (*policy).clone();
            acted_on.spec.suspend |= not_ready.is_some();
            match apply_all(&acted_on, !is_backed_up, not_ready.is_none(), &ctx).await {
                Ok(()) => (not_ready, None),
                Err(e) if e.is_refusal() => {
                    let refused = Problem {
                        reason: "ApplyRefused".to_owned(),
                        message: e.to_string(),
                    };
                    (not_ready.or(Some(refused)), Some(e))
                }
                Err(e) => return Err(e),
            }
        }
    };
    let ready = conditions::ready(&policy, not_ready.as_ref());
    let judged = [
        ("Ready", &ready),
        (BACKUP_READY, &backup_ready),
        ("BackupVerified", &verified),
    ];

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
    match refused {
        // The quota, or whatever else refused it, may be another one by then.
        Some(e) => Err(e),
        None => Ok(requeue(stale_at, now)),
    }
}

/// The later one of two looks at the last run of some work; of two at the same run the one that tells more.
fn later_run(before: Option<LastRun>, now: Option<LastRun>) -> Option<LastRun> {
    match (before, now) {
        (Some(before), Some(now)) => {
            let is_same = before.start_time == now.start_time;
            let stays = match is_same {
                true => outcome::knows_more(&before, &now),
                // Its Job may have been deleted, and only older ones be left.
                false => before.start_time > now.start_time,
            };
            Some(if stays { before } else { now })
        }
        (before, now) => now.or(before),
    }
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
    let eldest = |takes: &dyn Fn(&EtcdBackupPolicy) -> bool| {
        let before = others.iter().filter(|other| {
            other.metadata.deletion_timestamp.is_none()
                && other.metadata.uid != policy.metadata.uid
                && takes(other)
                && seniority(other) < seniority(policy)
        });
        before.min_by_key(|other| seniority(other))
    };
    if let Some(first) = eldest(&|other| same_prefix(policy, other)) {
        return Some(Problem {
            reason: PREFIX_TAKEN.to_owned(),
            message: format!(
                "policy {}/{} has the same store, {}, and is older: give each etcd a prefix of its own, or delete one of the two; where they are different servers or accounts, let store.options tell the endpoint or the account_name of each",
                first.namespace().unwrap_or_default(),
                first.name_any(),
                policy.spec.store.url
            ),
        });
    }
    let first = eldest(&|other| same_leases(policy, other))?;
    Some(Problem {
        reason: LEASES_TAKEN.to_owned(),
        message: format!(
            "policy {} has the same snapshot Leases, {}-…, and is older: give each a snapshot.leasePrefix of its own",
            first.name_any(),
            jobs::lease_prefix(policy)
        ),
    })
}

const PREFIX_TAKEN: &str = "StorePrefixTaken";
const LEASES_TAKEN: &str = "LeasePrefixTaken";

/// Whether a policy was found to stand in another one's place, so that any change of another one may set it free.
pub(super) fn gives_way(policy: &EtcdBackupPolicy) -> bool {
    let conditions = policy.status.iter().flat_map(|s| &s.conditions);
    let mut reasons = conditions
        .filter(|c| c.type_ == "Ready")
        .map(|c| c.reason.as_str());
    reasons.any(|r| r == PREFIX_TAKEN || r == LEASES_TAKEN)
}

/// Whether one of two policies has to give way to the other.
pub(super) fn in_one_place(a: &EtcdBackupPolicy, b: &EtcdBackupPolicy) -> bool {
    same_prefix(a, b) || same_leases(a, b)
}

fn same_leases(a: &EtcdBackupPolicy, b: &EtcdBackupPolicy) -> bool {
    a.metadata.namespace == b.metadata.namespace && jobs::lease_prefix(a) == jobs::lease_prefix(b)
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

/// Whether two policies write to one place: by URL, and the server and account that the options name. What only a
/// Secret tells is not known here. A local volume is mounted whole, whatever the URL says.
fn same_prefix(a: &EtcdBackupPolicy, b: &EtcdBackupPolicy) -> bool {
    let (one, other) = (&a.spec.store, &b.spec.store);
    match (&one.volume, &other.volume) {
        (Some(v), Some(w)) => {
            // A claim is one of its namespace.
            let claim = v.persistent_volume_claim.as_deref();
            let same_claim = a.metadata.namespace == b.metadata.namespace
                && claim.is_some()
                && claim == w.persistent_volume_claim.as_deref();
            let folder = |v: &StoreVolume| {
                let path = v.host_path.as_deref()?;
                Some(path.trim_end_matches('/').to_owned())
            };
            same_claim || folder(v).is_some_and(|path| folder(w) == Some(path))
        }
        (None, None) => jobs::same_url(&one.url, &other.url) && server(one).eq(server(other)),
        _ => false,
    }
}

/// What the options tell of where a store is.
fn server(store: &StoreSpec) -> impl Iterator<Item = (&str, &str)> {
    store.options.iter().filter_map(|(key, value)| {
        let whats = ["endpoint", "endpoint_url", "account_name"];
        let what = whats.into_iter().find(|what| key.ends_with(what))?;
        Some((what.trim_end_matches("_url"), value.trim_end_matches('/')))
    })
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
    // Where there never was one, since there is somebody to take it.
    let created = policy.metadata.creation_timestamp.as_ref().map(utc);
    let [wants_full, wants_delta] = conditions::expects(policy);
    let since = |renewed: Option<DateTime<Utc>>, wanted: bool| {
        renewed.or(created.filter(|_| wanted && !policy.spec.suspend))
    };
    let full = since(facts.full.as_ref().and_then(|s| s.renewed), wants_full);
    // A full covers what the first deltas would.
    let first = facts.full.as_ref().filter(|_| wants_delta);
    let newest = facts.delta.as_ref().or(first);
    let delta = since(newest.and_then(|s| s.renewed), wants_delta);
    [("full", age(full)), ("delta", age(delta))]
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

    /// The newest Job of some work that has ended, by schedule or for a task.
    fn last(&self, ctx: &Context, work: Work, task: Option<TaskType>) -> Option<LastRun> {
        let is_it = |job: &Job| {
            label(job, jobs::LABEL_WORK) == Some(work.as_str())
                || task.is_some_and(|t| label(job, jobs::LABEL_TASK_TYPE) == Some(t.as_str()))
        };
        let job = self
            .0
            .iter()
            .filter(|job| is_it(job))
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
    let (account, binding) = jobs::account(&namespace);
    ctx.apply(MANAGER, &account, None, false).await?;
    ctx.apply(MANAGER, &binding, None, false).await?;
    let cron_jobs = jobs::cron_jobs(policy, settings, postpone_maintenance);
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
    let follower = jobs::follower(policy, settings);
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

/// Has nothing go on by schedules or as follower; all else of the objects stays as it was when the policy was right.
async fn stop_all(policy: &EtcdBackupPolicy, ctx: &Context) -> Result<(), Failure> {
    let namespace = policy.namespace().unwrap_or_default();
    let name = policy.name_any();
    let is_its = |labels: Option<&str>, there: Option<&str>| {
        labels == Some(name.as_str()) && there == Some(namespace.as_str())
    };
    let cron_jobs = ctx.caches.cron_jobs.state_filter(|c| {
        let runs = c.spec.suspend != Some(true);
        is_its(
            label(c, jobs::LABEL_POLICY),
            c.metadata.namespace.as_deref(),
        ) && runs
    });
    for cron_job in cron_jobs {
        ctx.merge(MANAGER, &*cron_job, &json!({"spec": {"suspend": true}}))
            .await?;
    }
    let followers = ctx.caches.deployments.state_filter(|d| {
        let runs = d.spec.replicas != Some(0);
        is_its(
            label(d, jobs::LABEL_POLICY),
            d.metadata.namespace.as_deref(),
        ) && runs
    });
    for follower in followers {
        ctx.merge(MANAGER, &*follower, &json!({"spec": {"replicas": 0}}))
            .await?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::api::{EtcdBackupPolicySpec, RunState};
    use chrono::TimeDelta;

    fn policy(namespace: &str, store: StoreSpec) -> EtcdBackupPolicy {
        let spec = EtcdBackupPolicySpec {
            store,
            ..EtcdBackupPolicySpec::default()
        };
        let mut policy = EtcdBackupPolicy::new("p", spec);
        policy.metadata.namespace = Some(namespace.to_owned());
        policy
    }

    fn at(url: &str, options: &[(&str, &str)], volume: Option<StoreVolume>) -> StoreSpec {
        let options = options
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        StoreSpec {
            url: url.to_owned(),
            options: options.collect(),
            volume,
            ..StoreSpec::default()
        }
    }

    #[test]
    fn one_place_by_several_names() {
        let claim = |name: &str| {
            Some(StoreVolume {
                persistent_volume_claim: Some(name.to_owned()),
                host_path: None,
            })
        };
        let folder = |path: &str| {
            Some(StoreVolume {
                persistent_volume_claim: None,
                host_path: Some(path.to_owned()),
            })
        };
        let here = |url: &str| at(url, &[], None);
        let server = |name: &str| at("s3://b/p", &[("aws_endpoint", name)], None);
        let account = |name: &str| at("az://b/p", &[("azure_storage_account_name", name)], None);
        let same = [
            (here("s3://b/p"), here("s3://b/p/")),
            (here("s3://b/p"), here("s3a://b/p")),
            (here("az://b/p"), here("abfss://b/p")),
            (server("http://a:1"), server("http://a:1/")),
            // The whole volume is the store.
            (
                at("file:///one", &[], folder("/data/")),
                at("file:///two", &[], folder("/data")),
            ),
        ];
        for (a, b) in same {
            let (a, b) = (policy("x", a), policy("y", b));
            assert!(same_prefix(&a, &b), "{:?} {:?}", a.spec.store, b.spec.store);
        }
        let others = [
            (here("s3://b/p"), here("s3://b/q")),
            (here("s3://b/p"), here("gs://b/p")),
            (server("http://a:1"), server("http://b:1")),
            (account("a"), account("b")),
            (
                at("file:///one", &[], folder("/data/a")),
                at("file:///one", &[], folder("/data/b")),
            ),
            // A claim is one of its namespace.
            (
                at("file:///one", &[], claim("c")),
                at("file:///one", &[], claim("c")),
            ),
        ];
        for (a, b) in others {
            let (a, b) = (policy("x", a), policy("y", b));
            assert!(
                !same_prefix(&a, &b),
                "{:?} {:?}",
                a.spec.store,
                b.spec.store
            );
        }
        let one = policy("x", at("file:///one", &[], claim("c")));
        let two = policy("x", at("file:///two", &[], claim("c")));
        assert!(same_prefix(&one, &two));
    }

    #[test]
    fn what_was_known_of_a_run_stays_known() {
        let start = DateTime::UNIX_EPOCH;
        let run = |hours: i64, exit_code: Option<i32>| LastRun {
            state: RunState::Failed,
            start_time: Some(start + TimeDelta::hours(hours)),
            exit_code,
            ..LastRun::default()
        };
        let known = Some(run(2, Some(65)));
        // Its Pod is gone; its Job is gone and an older one is left; there is none.
        for now in [Some(run(2, None)), Some(run(1, Some(69))), None] {
            assert_eq!(later_run(known.clone(), now), known);
        }
        let newer = Some(run(3, None));
        assert_eq!(later_run(known, newer.clone()), newer);
        assert_eq!(later_run(None, newer.clone()), newer);
    }
}
