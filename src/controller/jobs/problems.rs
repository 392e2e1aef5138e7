//! Checks of policies and tasks that the schema and its rules (CEL, in `api`) cannot express: schedules, durations, sizes, URLs, and fields
//! that depend on each other.
//!
//! Pure functions that return a sentence for each problem. They do not check permissions: `allowed` does.

use super::super::api::{
    CopyBackupsConfig, EncryptionSpec, EtcdBackupPolicy, EtcdBackupTask, JobTemplate, SnapshotSpec,
    StoreSpec, TaskType,
};
use super::store_url::local_path;
use crate::base::text_value::Notation;
use crate::base::{Size, Span, TextValue};
use crate::ops::maintain::Upkeep;
use crate::ops::schedule::Schedule;
use crate::store::open::{Family, options::is_plain, refuse_layout};
use age::x25519::Recipient;

/// Directories of a Pod below which no store may be mounted.
const RESERVED_DIRS: [&str; 6] = ["/scratch", "/secrets", "/restore", "/dev", "/proc", "/sys"];
/// Directories of a Pod that a store must not hide. A store may be mounted below them.
const SYSTEM_DIRS: [&str; 5] = ["/", "/bin", "/etc", "/usr", "/var"];

/// Returns the problems of a policy, each with its field.
pub fn problems(policy: &EtcdBackupPolicy) -> Vec<String> {
    let spec = &policy.spec;
    let mut problems = Problems(Vec::new());
    problems.check_store("spec.store", &spec.store);
    if let Some(encryption) = &spec.encryption {
        problems.check_recipients(encryption);
    }
    let zone = problems.check_time_zone(super::time_zone(policy));
    if let Some(snapshot) = &spec.snapshot {
        problems.check_snapshot(snapshot, zone);
    }
    let compaction = &spec.compaction;
    let deadline = Some(&compaction.active_deadline);
    problems.check_duration_above_zero("spec.compaction.activeDeadline", deadline);
    let age = compaction.age_threshold.as_ref();
    problems.check_duration_above_zero("spec.compaction.ageThreshold", age);
    let size = compaction.size_threshold.as_ref();
    problems.check_size_above_zero("spec.compaction.sizeThreshold", size);
    if let Some(retention) = &spec.retention {
        problems.check_cron("spec.retention.schedule", Some(&retention.schedule), zone);
        let rules = &retention.rules;
        problems.check_count("spec.retention.limit", rules.limit);
        for (field, duration) in [
            ("spec.retention.deltaRetention", &rules.delta_retention),
            ("spec.retention.restorableWindow", &rules.restorable_window),
        ] {
            problems.check_notation(field, duration.as_ref());
        }
    }
    if let Some(verify) = &spec.verify {
        problems.check_cron("spec.verify.schedule", Some(&verify.schedule), zone);
    }
    if let Some(maintenance) = &spec.maintenance {
        let schedule = Some(&maintenance.schedule);
        problems.check_cron("spec.maintenance.schedule", schedule, zone);
        problems.check_upkeep("spec.maintenance", &maintenance.upkeep);
    }
    problems.check_job_template(&spec.job_template);
    problems.0
}

/// Returns the problems of a task of this policy, each with its field. It does not check that the policy has an etcd
/// if the task [needs one](needs_etcd). Other tasks of the policy are not considered.
pub fn task_problems(policy: &EtcdBackupPolicy, task: &EtcdBackupTask) -> Vec<String> {
    let mut problems = Problems(Vec::new());
    let config = task.spec.config.clone().unwrap_or_default();
    if task.spec.type_ == TaskType::GarbageCollection && policy.spec.retention.is_none() {
        let name = super::policy_name(policy);
        let problem = format!("{name} has no spec.retention, so there are no rules to remove by");
        problems.add("spec.policy", problem);
    }
    problems.check_duration_above_zero("spec.startDeadline", task.spec.start_deadline.as_ref());
    if let Some(copy) = &config.copy_backups {
        problems.check_copy(policy, copy);
    }
    if let Some(maintenance) = &config.maintenance {
        problems.check_upkeep("spec.config.maintenance", &maintenance.upkeep);
    }
    problems.0
}

/// Returns whether a task can only run for a policy with an etcd.
pub fn needs_etcd(task: &EtcdBackupTask) -> bool {
    match task.spec.type_ {
        TaskType::OnDemandSnapshot | TaskType::Maintenance => true,
        TaskType::Verify => {
            let config = task.spec.config.as_ref();
            let verify = config.and_then(|c| c.verify.as_ref());
            verify.is_some_and(|v| v.against_cluster)
        }
        TaskType::OnDemandCompaction
        | TaskType::CopyBackups
        | TaskType::Restore
        | TaskType::GarbageCollection => false,
    }
}

/// The problems found so far, each beginning with its field.
struct Problems(Vec<String>);

impl Problems {
    fn add(&mut self, field: &str, problem: impl std::fmt::Display) {
        self.0.push(format!("{field}: {problem}"));
    }

    fn check<T>(&mut self, field: &str, parsed: Result<T, impl std::fmt::Display>) -> Option<T> {
        parsed.map_err(|e| self.add(field, e)).ok()
    }

    fn check_notation<T: Notation>(
        &mut self,
        field: &str,
        value: Option<&TextValue<T>>,
    ) -> Option<T> {
        self.check(field, value?.check())
    }

    fn check_duration_above_zero(&mut self, field: &str, value: Option<&TextValue<Span>>) {
        if let Some(span) = self.check_notation(field, value)
            && span.0.as_secs() == 0
        {
            self.add(field, format!("{span} is too short: give 1s or more"));
        }
    }

    fn check_size_above_zero(&mut self, field: &str, value: Option<&TextValue<Size>>) {
        if let Some(Size(0)) = self.check_notation(field, value) {
            self.add(field, "0 is too small: give 1 byte or more");
        }
    }

    fn check_count(&mut self, field: &str, count: Option<i64>) {
        if let Some(n) = count.filter(|&n| u32::try_from(n).is_err()) {
            let problem = format!("{n} is out of range: give 0 to {}", u32::MAX);
            self.add(field, problem);
        }
    }

    /// Returns the zone if it is known, and UTC otherwise, so that schedules can be checked in any case.
    fn check_time_zone<'a>(&mut self, zone: &'a str) -> &'a str {
        match self.check("spec.snapshot.timeZone", Schedule::parse("@daily", zone)) {
            Some(_) => zone,
            None => "Etc/UTC",
        }
    }

    /// Checks the schedule of a CronJob. Kubernetes accepts less than deltafold's own schedules do.
    fn check_cron(&mut self, field: &str, schedule: Option<&String>, zone: &str) {
        let Some(schedule) = schedule else { return };
        if self.check(field, Schedule::parse(schedule, zone)).is_none() {
            return;
        }
        let fields: Vec<&str> = schedule.split_whitespace().collect();
        if !schedule.starts_with('@') && fields.len() != 5 {
            let count = fields.len();
            let problem = format!(
                "the schedule of a CronJob must have five fields, and this one has {count}"
            );
            self.add(field, problem);
        }
        if fields.get(4).is_some_and(|f| f.contains('7')) {
            self.add(
                field,
                "the schedule of a CronJob cannot have 7 for Sunday: use 0",
            );
        }
    }

    fn check_upkeep(&mut self, field: &str, upkeep: &Upkeep) {
        self.check_notation(&format!("{field}.defrag"), Some(&upkeep.defrag));
    }

    fn check_store(&mut self, field: &str, store: &StoreSpec) {
        let url_field = format!("{field}.url");
        let url = &store.url;
        let Some(family) = Family::of(url) else {
            let known = "s3://, gs://, az://, swift://, file:/// or an absolute path";
            let advice = Family::advice(url.split_once("://").map_or("", |u| u.0));
            self.add(
                &url_field,
                format!("unknown store \"{url}\": use {known}{advice}"),
            );
            return;
        };
        self.check(&url_field, refuse_layout(url, "the URL"));
        self.check_store_options(&format!("{field}.options"), store);
        if family.is_local() {
            self.check_local_store(field, store);
        } else if !is_bucket_url(url) {
            let problem = "use the form scheme://bucket/prefix, without a port or a query";
            self.add(&url_field, problem);
        }
    }

    fn check_store_options(&mut self, field: &str, store: &StoreSpec) {
        let is_name = |key: &str| {
            let fits = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
            !key.is_empty() && key.bytes().all(fits)
        };
        for (key, value) in &store.options {
            if !is_name(key) {
                let problem = format!("\"{key}\" is not a valid name of a setting");
                self.add(field, problem);
            } else if value.contains('\n') {
                self.add(field, format!("{key} has more than one line"));
            } else if !is_plain(key, value) {
                let problem = format!(
                    "{key} is not a known setting, or may hold a secret, which everyone who can read this object \
                     would see: correct the name, or put the setting into the Secret of secretRef"
                );
                self.add(field, problem);
            }
        }
    }

    fn check_local_store(&mut self, field: &str, store: &StoreSpec) {
        if !store.options.is_empty() {
            let options = format!("{field}.options");
            self.add(&options, "a local folder has no settings: remove them");
        }
        let url_field = format!("{field}.url");
        let Some(path) = local_path(&store.url) else {
            self.add(&url_field, "not a path of a folder: use file:///folder");
            return;
        };
        let is_odd = path.contains(':') || path.split('/').any(|part| part == "..");
        let is_system = SYSTEM_DIRS.contains(&path.as_str());
        let is_reserved = RESERVED_DIRS.iter().any(|d| is_at_or_below(&path, d));
        if is_system || is_reserved || is_odd {
            let problem = format!(
                "a volume cannot be mounted at \"{path}\": use another path, such as /backups"
            );
            self.add(&url_field, problem);
        }
    }

    fn check_recipients(&mut self, encryption: &EncryptionSpec) {
        for recipient in &encryption.recipients {
            let parsed: Result<Recipient, _> = recipient.parse();
            if let Err(e) = parsed {
                // The text is not shown: it may be an identity, which is secret.
                let problem = format!("an entry is not an X25519 recipient (age1…): {e}");
                self.add("spec.encryption.recipients", problem);
            }
        }
    }

    fn check_snapshot(&mut self, snapshot: &SnapshotSpec, zone: &str) {
        let full_field = "spec.snapshot.fullSchedule";
        match (&snapshot.follow, &snapshot.full_schedule) {
            // The follower reads the schedule itself; there is no CronJob.
            (Some(_), Some(schedule)) => {
                self.check(full_field, Schedule::parse(schedule, zone));
            }
            (_, schedule) => self.check_cron(full_field, schedule.as_ref(), zone),
        }
        let delta_schedule = snapshot.delta_schedule.as_ref();
        self.check_cron("spec.snapshot.deltaSchedule", delta_schedule, zone);
        if let Some(follow) = &snapshot.follow {
            let period = follow.delta_period.as_ref();
            self.check_duration_above_zero("spec.snapshot.follow.deltaPeriod", period);
            let bytes = follow.delta_bytes.as_ref();
            self.check_size_above_zero("spec.snapshot.follow.deltaBytes", bytes);
        }
    }

    fn check_job_template(&mut self, template: &JobTemplate) {
        let wait = template.metrics_scrape_wait.as_ref();
        self.check_notation("spec.jobTemplate.metricsScrapeWait", wait);
        for (field, size) in [
            ("spec.jobTemplate.scratchSize", &template.scratch_size),
            (
                "spec.jobTemplate.maxDatabaseSize",
                &template.max_database_size,
            ),
            ("spec.jobTemplate.maxValueSize", &template.max_value_size),
        ] {
            self.check_size_above_zero(field, size.as_ref());
        }
    }

    fn check_copy(&mut self, policy: &EtcdBackupPolicy, copy: &CopyBackupsConfig) {
        let field = "spec.config.copyBackups";
        if let Some(store) = &copy.source_store {
            self.check_store(&format!("{field}.sourceStore"), store);
        }
        if let Some(store) = &copy.target_store {
            self.check_store(&format!("{field}.targetStore"), store);
        }
        let source = copy.source_store.as_ref().unwrap_or(&policy.spec.store);
        let target = copy.target_store.as_ref().unwrap_or(&policy.spec.store);
        if let (Some(a), Some(b)) = (local_path(&source.url), local_path(&target.url)) {
            if is_at_or_below(&a, &b) || is_at_or_below(&b, &a) {
                let problem =
                    "both stores would be mounted at the same path: change the path of one of them";
                self.add(field, problem);
            }
        } else if source.url.trim_end_matches('/') == target.url.trim_end_matches('/')
            && source.options == target.options
        {
            self.add(field, "the source and the target are the same store");
        }
        self.check_count(&format!("{field}.maxBackups"), copy.most.max_backups);
        self.check_count(&format!("{field}.maxBackupAge"), copy.most.max_backup_age);
        let wait = copy.wait_for_final_snapshot.as_ref();
        let timeout = wait.and_then(|w| w.timeout.as_ref());
        let timeout_field = format!("{field}.waitForFinalSnapshot.timeout");
        self.check_duration_above_zero(&timeout_field, timeout);
    }
}

/// Returns whether a URL has a bucket, and neither a port nor a query. A URL without `://` has no bucket.
fn is_bucket_url(url: &str) -> bool {
    let Some((_, rest)) = url.split_once("://") else {
        return false;
    };
    let bucket = rest.split('/').next().unwrap_or_default();
    !bucket.is_empty() && !bucket.contains(':') && !rest.contains('?')
}

fn is_at_or_below(path: &str, dir: &str) -> bool {
    path == dir || path.starts_with(&format!("{dir}/"))
}
