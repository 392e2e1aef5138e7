//! Pods by operation: which flags and volumes each command of deltafold gets from a policy or a task.
//!
//! They decide neither when a Pod runs nor for how long. Called by `scheduled` and `on_demand`.

use super::super::api::{
    CopyBackupsConfig, DrillSpec, EtcdBackupPolicy, GarbageCollectionConfig,
    OnDemandCompactionConfig, RestoreConfig,
};
use super::pod::{CopySide, PodBuilder};
use super::{DEFAULT_USER, Settings, duration, time_zone};
use crate::base::Span;
use crate::ops::maintain::Upkeep;
use crate::ops::verify::store::{Level, Thoroughness};
use std::time::Duration;

/// The follower's grace period after SIGTERM. It is longer than `--shutdown-timeout`, within which the last
/// delta is saved.
const FOLLOWER_GRACE_SECONDS: i64 = 30;
/// The mount path of a restore's volume.
const DATA_VOLUME: &str = "/restore";

pub(super) fn full_snapshot<'a>(
    policy: &'a EtcdBackupPolicy,
    settings: &'a Settings,
) -> PodBuilder<'a> {
    snapshot(policy, settings, "full")
}

pub(super) fn delta_snapshot<'a>(
    policy: &'a EtcdBackupPolicy,
    settings: &'a Settings,
    fulls_are_scheduled: bool,
) -> PodBuilder<'a> {
    let pod = snapshot(policy, settings, "delta");
    match fulls_are_scheduled {
        // Otherwise the command would take a daily full even if the schedule asks for a weekly one.
        true => pod.flag("--max-full-age", "0s"),
        false => pod,
    }
}

fn snapshot<'a>(
    policy: &'a EtcdBackupPolicy,
    settings: &'a Settings,
    kind: &str,
) -> PodBuilder<'a> {
    PodBuilder::new(policy, settings, &["snapshot", kind])
        .store(false)
        .live_etcd()
        .recipients()
        .compression()
        .snapshot_leases()
        .metrics()
}

/// Returns the Pod of the follower, or `None` if the policy has no `snapshot.follow`.
pub(super) fn follow<'a>(
    policy: &'a EtcdBackupPolicy,
    settings: &'a Settings,
) -> Option<PodBuilder<'a>> {
    let snapshot = policy.spec.snapshot.as_ref()?;
    let mut pod = PodBuilder::new(policy, settings, &["snapshot", "follow"])
        .store(false)
        .live_etcd()
        .recipients()
        .compression()
        .snapshot_leases()
        .lock("follow")
        .spool()
        .long_running(FOLLOWER_GRACE_SECONDS)
        .options(snapshot.follow.as_ref()?);
    if let Some(schedule) = &snapshot.full_schedule {
        pod = pod.flag("--full-schedule", schedule);
    }
    Some(pod.flag("--time-zone", time_zone(policy)))
}

pub(super) fn compaction<'a>(
    policy: &'a EtcdBackupPolicy,
    settings: &'a Settings,
    config: Option<&OnDemandCompactionConfig>,
) -> PodBuilder<'a> {
    let compaction = &policy.spec.compaction;
    let mut config = config.cloned().unwrap_or_default();
    if config.history.keep_history.is_none() {
        config.history.clone_from(&compaction.history);
    }
    PodBuilder::new(policy, settings, &["compact"])
        .store(false)
        .recipients()
        .compression()
        .snapshot_leases()
        .metrics()
        .resources(compaction.resources.as_ref())
        .options(&config)
}

pub(super) fn verification<'a>(
    policy: &'a EtcdBackupPolicy,
    settings: &'a Settings,
    level: Level,
    against_cluster: bool,
    drill: Option<&'a DrillSpec>,
) -> PodBuilder<'a> {
    let verify = || PodBuilder::new(policy, settings, &["verify"]).store(true);
    let verify_backup = || match drill {
        Some(drill) => verify()
            .options(&Thoroughness {
                level: Some(Level::Fold),
            })
            .drill(&drill.etcd_image),
        None => verify().options(&Thoroughness { level: Some(level) }),
    };
    match against_cluster {
        false => verify_backup().metrics(),
        // A comparison with etcd covers one revision only and takes no level, so the backup is verified
        // first.
        true => verify().live_etcd().metrics().run_first(verify_backup()),
    }
}

pub(super) fn maintenance<'a>(
    policy: &'a EtcdBackupPolicy,
    settings: &'a Settings,
    upkeep: &Upkeep,
) -> PodBuilder<'a> {
    // It needs the store for its lock, and to compact only revisions that are saved there.
    PodBuilder::new(policy, settings, &["maintain"])
        .store(false)
        .recipients()
        .live_etcd()
        .lock("maintain")
        .metrics()
        .options(upkeep)
}

/// Returns the Pod of a garbage collection, or `None` if the policy has no retention rules.
pub(super) fn garbage_collection<'a>(
    policy: &'a EtcdBackupPolicy,
    settings: &'a Settings,
    config: &GarbageCollectionConfig,
) -> Option<PodBuilder<'a>> {
    let retention = policy.spec.retention.as_ref()?;
    let pod = PodBuilder::new(policy, settings, &["gc"])
        .store(false)
        .recipients()
        .metrics()
        .options(&retention.rules.effective())
        .options(config)
        // The other half of the deadline is for the removal.
        .flag(
            "--timeout",
            &Span(settings.deadlines.retention / 2).to_string(),
        )
        .switch("--apply");
    Some(pod)
}

/// Returns the Pod of a copy and its deadline. A store that the task does not name is the policy's.
pub(super) fn copy<'a>(
    policy: &'a EtcdBackupPolicy,
    config: Option<&'a CopyBackupsConfig>,
    settings: &'a Settings,
) -> (PodBuilder<'a>, Duration) {
    let source = config.and_then(|c| c.source_store.as_ref());
    let target = config.and_then(|c| c.target_store.as_ref());
    let mut pod = PodBuilder::new(policy, settings, &["copy"])
        .copy_store(CopySide::Source, source.unwrap_or(&policy.spec.store))
        .copy_store(CopySide::Target, target.unwrap_or(&policy.spec.store))
        .identities()
        .metrics();
    // A copy into the policy's store is encrypted like the rest of that store. A copy to another store is not
    // changed.
    if target.is_none() {
        pod = pod.recipients();
    }
    if let Some(config) = config {
        pod = pod.options(&config.most);
    }
    let deadlines = &settings.deadlines;
    let wait = config.and_then(|c| c.wait_for_final_snapshot.as_ref());
    let Some(wait) = wait.filter(|w| w.enabled) else {
        return (pod, deadlines.copy);
    };
    pod = pod.switch("--wait-for-final");
    let timeout = match &wait.timeout {
        None => deadlines.final_snapshot,
        Some(timeout) => {
            pod = pod.duration("--wait-timeout", timeout);
            duration(timeout)
        }
    };
    (pod, deadlines.copy.saturating_add(timeout))
}

pub(super) fn restoration<'a>(
    policy: &'a EtcdBackupPolicy,
    config: Option<&'a RestoreConfig>,
    settings: &'a Settings,
) -> PodBuilder<'a> {
    let mut pod = PodBuilder::new(policy, settings, &["restore"]).store(true);
    let Some(config) = config else { return pod };
    // A task has no way to allow it, and a time after the newest snapshot has always meant the newest state.
    if config.wanted.point.time.is_some() {
        pod = pod.switch("--or-newest");
    }
    let path = config.sub_path.as_deref().unwrap_or("default.etcd");
    let mut options = config.wanted.clone();
    options.membership = options.membership.complete();
    pod.claim(&config.claim_name, DATA_VOLUME)
        .user(config.run_as_user.unwrap_or(DEFAULT_USER))
        .flag("--data-dir", &format!("{DATA_VOLUME}/{path}"))
        .options(&options)
}
