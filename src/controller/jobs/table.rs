//! The table of Jobs: which command, flags, volumes and deadline each kind of work has.
//!
//! A table of one policy, from which `build` makes objects. Decides neither when a Pod runs nor whether.

use super::super::api::{
    CopyBackupsConfig, DrillSpec, EtcdBackupPolicy, EtcdBackupTask, OnDemandCompactionConfig,
    RestoreConfig, SnapshotType, TaskConfig, TaskType,
};
use super::pod::{CopySide, PodBuilder};
use super::{DEFAULT_USER, Deadlines, Settings, WorkKind, duration, time_zone};
use crate::base::Span;
use crate::ops::maintain::Upkeep;
use crate::ops::verify::store::{Level, Thoroughness};
use std::sync::LazyLock;

/// The follower's grace period after SIGTERM. It is longer than `--shutdown-timeout`, within which the last
/// delta is saved.
const FOLLOWER_GRACE_SECONDS: i64 = 30;
/// The mount path of a restore's volume.
const DATA_VOLUME: &str = "/restore";

/// The work of a policy, as Pods.
#[derive(Debug, Clone, Copy)]
pub(super) struct Table<'a> {
    pub(super) policy: &'a EtcdBackupPolicy,
    pub(super) settings: &'a Settings,
    /// The arguments of a task, which replace those of the policy
    pub(super) task_args: &'a [String],
}

/// A row of the table for a CronJob.
pub(super) struct Scheduled<'a> {
    pub(super) work: WorkKind,
    pub(super) schedule: &'a str,
    pub(super) pod: PodBuilder<'a>,
}

impl<'a> Table<'a> {
    pub(super) fn new(policy: &'a EtcdBackupPolicy, settings: &'a Settings) -> Self {
        Table {
            policy,
            settings,
            task_args: &[],
        }
    }

    /// Returns the rows of the policy's schedules. A follower takes the snapshots of both kinds itself.
    pub(super) fn scheduled(self) -> Vec<Scheduled<'a>> {
        let spec = &self.policy.spec;
        let mut rows = Vec::new();
        let mut add = |work, schedule: &'a String, pod| {
            rows.push(Scheduled {
                work,
                schedule,
                pod,
            });
        };
        let has_etcd = spec.etcd.is_some();
        let snapshot = spec.snapshot.as_ref();
        if let Some(snapshot) = snapshot.filter(|s| has_etcd && s.follow.is_none()) {
            let full_schedule = snapshot.full_schedule.as_ref();
            if let Some(schedule) = full_schedule {
                add(WorkKind::FullSnapshot, schedule, self.full_snapshot());
            }
            if let Some(schedule) = &snapshot.delta_schedule {
                let pod = self.delta_snapshot(full_schedule.is_some());
                add(WorkKind::DeltaSnapshot, schedule, pod);
            }
        }
        if let Some(retention) = &spec.retention {
            let pod = self.garbage_collection();
            add(WorkKind::Retention, &retention.schedule, pod);
        }
        if let Some(verify) = &spec.verify {
            let with_etcd = verify.against_cluster && has_etcd;
            let pod = self.verification(verify.level, with_etcd, verify.drill.as_ref());
            add(WorkKind::Verification, &verify.schedule, pod);
        }
        if let Some(maintenance) = spec.maintenance.as_ref().filter(|_| has_etcd) {
            let pod = self.maintenance(Some(&maintenance.upkeep));
            add(WorkKind::Maintenance, &maintenance.schedule, pod);
        }
        rows
    }

    /// Returns the Pod of a task.
    pub(super) fn task(mut self, task: &'a EtcdBackupTask) -> PodBuilder<'a> {
        static NONE: LazyLock<TaskConfig> = LazyLock::new(TaskConfig::default);
        self.task_args = &task.spec.args;
        let config = task.spec.config.as_ref().unwrap_or(&*NONE);
        let (spec, type_) = (&self.policy.spec, task.spec.type_);
        match type_ {
            TaskType::OnDemandSnapshot => {
                let config = config.on_demand_snapshot.as_ref();
                if config.is_some_and(|c| c.type_ == SnapshotType::Delta) {
                    self.delta_snapshot(true)
                } else if config.is_some_and(|c| c.is_final) {
                    self.full_snapshot().switch("--final")
                } else {
                    self.full_snapshot()
                }
            }
            TaskType::OnDemandCompaction => self.compaction(config.on_demand_compaction.as_ref()),
            TaskType::CopyBackups => self.copy(config.copy_backups.as_ref()),
            TaskType::Restore => self.restoration(config.restore.as_ref()),
            TaskType::Verify => {
                let config = config.verify.as_ref();
                let policy_level = spec.verify.as_ref().map(|v| v.level);
                let level = config.and_then(|c| c.depth.level).or(policy_level);
                let against_cluster = config.is_some_and(|c| c.against_cluster);
                let with_etcd = against_cluster && spec.etcd.is_some();
                self.verification(level.unwrap_or_default(), with_etcd, None)
            }
            TaskType::Maintenance => {
                self.maintenance(config.maintenance.as_ref().map(|c| &c.upkeep))
            }
            TaskType::GarbageCollection => {
                let config = config.garbage_collection.clone().unwrap_or_default();
                self.garbage_collection().options(&config)
            }
        }
    }

    fn pod(self, command: &[&str]) -> PodBuilder<'a> {
        PodBuilder::new(self.policy, self.settings, command)
    }

    /// Returns the `args` of a task, or else those of the policy, with their field.
    fn args(
        self,
        field: &'static str,
        of_policy: Option<&'a Vec<String>>,
    ) -> (&'static str, &'a [String]) {
        if self.task_args.is_empty() {
            (field, of_policy.map_or(&[], Vec::as_slice))
        } else {
            ("spec.args", self.task_args)
        }
    }

    fn deadlines(self) -> &'a Deadlines {
        &self.settings.deadlines
    }

    pub(super) fn full_snapshot(self) -> PodBuilder<'a> {
        self.snapshot("full").within(self.deadlines().full_snapshot)
    }

    fn delta_snapshot(self, fulls_are_scheduled: bool) -> PodBuilder<'a> {
        let pod = self.snapshot("delta");
        let pod = pod.within(self.deadlines().delta_snapshot);
        if fulls_are_scheduled {
            // Otherwise the command would take a daily full even if the schedule asks for a weekly one.
            pod.flag("--max-full-age", "0s")
        } else {
            pod
        }
    }

    fn snapshot(self, kind: &str) -> PodBuilder<'a> {
        // Otherwise they are the follower's.
        let snapshot = self
            .policy
            .spec
            .snapshot
            .as_ref()
            .filter(|s| s.follow.is_none());
        self.pod(&["snapshot", kind])
            .own_args(self.args("spec.snapshot.args", snapshot.map(|s| &s.args)))
            .store(false)
            .live_etcd()
            .recipients()
            .compression()
            .snapshot_leases()
            .metrics()
    }

    /// Returns the Pod of the follower, or `None` if the policy has no `snapshot.follow` or no etcd.
    pub(super) fn follower(self) -> Option<PodBuilder<'a>> {
        self.policy.spec.etcd.as_ref()?;
        let snapshot = self.policy.spec.snapshot.as_ref()?;
        let mut pod = self
            .pod(&["snapshot", "follow"])
            .store(false)
            .live_etcd()
            .recipients()
            .compression()
            .snapshot_leases()
            .lock("follow")
            .long_running(FOLLOWER_GRACE_SECONDS)
            .own_args(self.args("spec.snapshot.args", Some(&snapshot.args)))
            .options(snapshot.follow.as_ref()?);
        if let Some(schedule) = &snapshot.full_schedule {
            pod = pod.flag("--full-schedule", schedule);
        }
        Some(pod.flag("--time-zone", time_zone(self.policy)))
    }

    pub(super) fn compaction(self, config: Option<&OnDemandCompactionConfig>) -> PodBuilder<'a> {
        let compaction = &self.policy.spec.compaction;
        let mut config = config.cloned().unwrap_or_default();
        if config.history.keep_history.is_none() {
            config.history.clone_from(&compaction.history);
        }
        self.pod(&["compact"])
            .own_args(self.args("spec.compaction.args", Some(&compaction.args)))
            .within(duration(&compaction.active_deadline))
            .store(false)
            .recipients()
            .compression()
            .snapshot_leases()
            .metrics()
            .resources(compaction.resources.as_ref())
            .options(&config)
    }

    fn verification(
        self,
        level: Level,
        against_cluster: bool,
        drill: Option<&'a DrillSpec>,
    ) -> PodBuilder<'a> {
        let verify = || {
            let pod = self.pod(&["verify"]).within(self.deadlines().verification);
            pod.store(true)
        };
        let level = if drill.is_some() { Level::Fold } else { level };
        let of_policy = self.policy.spec.verify.as_ref().map(|v| &v.args);
        let args = self.args("spec.verify.args", of_policy);
        let mut backup = verify()
            .own_args(args)
            .options(&Thoroughness { level: Some(level) });
        if let Some(drill) = drill {
            backup = backup.drill(&drill.etcd_image);
        }
        if against_cluster {
            // A comparison with etcd covers one revision only and takes no level, so the backup is verified
            // first.
            verify().live_etcd().metrics().run_first(backup)
        } else {
            backup.metrics()
        }
    }

    /// The Pod uses the store for the lock only. Without an upkeep the command refuses to start; the API server
    /// refuses such a task.
    fn maintenance(self, upkeep: Option<&Upkeep>) -> PodBuilder<'a> {
        let of_policy = self.policy.spec.maintenance.as_ref().map(|m| &m.args);
        let pod = self
            .pod(&["maintain"])
            .within(self.deadlines().maintenance)
            .store_without_identities(false)
            .live_etcd()
            .lock("maintain")
            .own_args(self.args("spec.maintenance.args", of_policy))
            .metrics();
        match upkeep {
            Some(upkeep) => pod.options(upkeep),
            None => pod,
        }
    }

    /// Without retention rules the Pod removes nothing; `problems` refuses such a task.
    fn garbage_collection(self) -> PodBuilder<'a> {
        let deadline = self.deadlines().retention;
        let of_policy = self.policy.spec.retention.as_ref().map(|r| &r.args);
        let mut pod = self
            .pod(&["gc"])
            .within(deadline)
            .store(false)
            .recipients()
            .lock("gc")
            .own_args(self.args("spec.retention.args", of_policy))
            .metrics();
        if let Some(retention) = &self.policy.spec.retention {
            pod = pod.options(&retention.rules.effective());
        }
        // The other half of the deadline is for the removal.
        pod.flag("--timeout", &Span(deadline / 2).to_string())
            .switch("--apply")
    }

    /// A store that the task does not name is the policy's.
    fn copy(self, config: Option<&'a CopyBackupsConfig>) -> PodBuilder<'a> {
        let own_store = &self.policy.spec.store;
        let source = config.and_then(|c| c.source_store.as_ref());
        let target = config.and_then(|c| c.target_store.as_ref());
        let mut pod = self
            .pod(&["copy"])
            .copy_store(CopySide::Source, source.unwrap_or(own_store))
            .copy_store(CopySide::Target, target.unwrap_or(own_store))
            .identities()
            .own_args(self.args("spec.args", None))
            .metrics();
        // A copy into the policy's store is encrypted like the rest of that store. A copy to another store is not
        // changed.
        if target.is_none() {
            pod = pod.recipients();
        }
        if let Some(config) = config {
            pod = pod.options(&config.most);
        }
        let deadlines = self.deadlines();
        let wait = config.and_then(|c| c.wait_for_final_snapshot.as_ref());
        let Some(wait) = wait.filter(|w| w.enabled) else {
            return pod.within(deadlines.copy);
        };
        pod = pod.switch("--wait-for-final");
        let mut longest_wait = deadlines.final_snapshot;
        if let Some(timeout) = &wait.timeout {
            pod = pod.duration("--wait-timeout", timeout);
            longest_wait = duration(timeout);
        }
        pod.within(deadlines.copy.saturating_add(longest_wait))
    }

    fn restoration(self, config: Option<&'a RestoreConfig>) -> PodBuilder<'a> {
        let pod = self.pod(&["restore"]).within(self.deadlines().restoration);
        let mut pod = pod.store(true).own_args(self.args("spec.args", None));
        let Some(config) = config else { return pod };
        // A task has no way to allow it, and a time after the newest snapshot has always meant the newest state.
        if config.point.time.is_some() {
            pod = pod.switch("--or-newest");
        }
        let path = config.sub_path.as_deref().unwrap_or("default.etcd");
        pod.claim(&config.claim_name, DATA_VOLUME)
            .user(config.run_as_user.unwrap_or(DEFAULT_USER))
            .flag("--data-dir", &format!("{DATA_VOLUME}/{path}"))
            .options(&config.point)
            .options(&config.membership.clone().complete())
    }
}
