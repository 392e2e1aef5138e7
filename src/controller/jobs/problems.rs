//! What is wrong with a policy or a task that the API server could not see: schedules, times, sizes, URLs, and what
//! two fields mean together.
//!
//! Whatever has a problem is not Ready, or Rejected; nothing is made of it until it is mended.

use super::super::api::{
    CopyBackupsConfig, EtcdBackupPolicy, EtcdBackupTask, RestoreConfig, SecretRef, StoreSpec,
    TaskType,
};
use super::store_url::local_path;
use crate::base::text_value::Notation;
use crate::base::{Size, Span, TextValue};
use crate::ops::maintain::Upkeep;
use crate::ops::schedule::Schedule;
use crate::store::open::{Family, options::is_plain, refuse_layout};
use age::x25519::Recipient;

/// Folders of a Pod that nothing may be mounted in.
const OURS: [&str; 6] = ["/scratch", "/secrets", "/restore", "/dev", "/proc", "/sys"];
/// Folders that nothing may be mounted over.
const SYSTEM: [&str; 5] = ["/", "/bin", "/etc", "/usr", "/var"];
/// Of 253, the longer suffix of a Lease left out.
const LONGEST_PREFIX: usize = 242;

/// What was found, each with the field.
struct Found(Vec<String>);

impl Found {
    fn add(&mut self, field: &str, what: impl std::fmt::Display) {
        self.0.push(format!("{field}: {what}"));
    }

    fn check<T>(&mut self, field: &str, parsed: Result<T, impl std::fmt::Display>) -> Option<T> {
        parsed.map_err(|e| self.add(field, e)).ok()
    }

    fn written<T: Notation>(&mut self, field: &str, given: Option<&TextValue<T>>) -> Option<T> {
        self.check(field, given?.check())
    }

    /// A duration that would end what it is about before it began, if it were zero.
    fn duration_above_zero(&mut self, field: &str, given: Option<&TextValue<Span>>) {
        if let Some(span) = self.written(field, given)
            && span.0.as_secs() == 0
        {
            self.add(field, format!("{span} is too short: give 1s or more"));
        }
    }

    fn size_above_zero(&mut self, field: &str, given: Option<&TextValue<Size>>) {
        if let Some(Size(0)) = self.written(field, given) {
            self.add(field, "0 is too small");
        }
    }

    fn count(&mut self, field: &str, n: Option<i64>) {
        if let Some(n) = n.filter(|&n| u32::try_from(n).is_err()) {
            self.add(field, format!("{n} is too large"));
        }
    }

    /// The schedule of a CronJob, of which Kubernetes takes less than we do.
    fn cron(&mut self, field: &str, schedule: Option<&String>, zone: &str) {
        let Some(schedule) = schedule else { return };
        if self.check(field, Schedule::parse(schedule, zone)).is_none() {
            return;
        }
        let fields: Vec<&str> = schedule.split_whitespace().collect();
        if !schedule.starts_with('@') && fields.len() != 5 {
            let n = fields.len();
            self.add(
                field,
                format!("a CronJob's schedule has five fields, and here are {n}"),
            );
        }
        if fields.get(4).is_some_and(|f| f.contains('7')) {
            self.add(
                field,
                "Sunday is 0 in a CronJob's schedule: 7 is not taken there",
            );
        }
    }

    fn upkeep(&mut self, field: &str, upkeep: &Upkeep) {
        self.written(
            &format!("{field}.compactKeep"),
            upkeep.compact_keep.as_ref(),
        );
        self.written(&format!("{field}.defrag"), upkeep.defrag.as_ref());
    }

    /// A Secret's name, which ends a path in the Pod.
    fn secret(&mut self, field: &str, secret: Option<&SecretRef>) {
        let Some(SecretRef { name }) = secret else {
            return;
        };
        let is_name = is_domain(name) && name.starts_with(alphanumeric) && !name.ends_with('.');
        if !is_name {
            self.add(field, format!("\"{name}\" is no Secret's name"));
        }
    }

    fn store(&mut self, field: &str, store: &StoreSpec) {
        self.secret(&format!("{field}.secretRef"), store.secret_ref.as_ref());
        let url = format!("{field}.url");
        let Some(family) = Family::of(&store.url) else {
            let text = &store.url;
            let known = "s3://, gs://, az://, swift://, oss://, file:/// or an absolute path";
            self.add(
                &url,
                format!("\"{text}\" is no store deltafold knows: use {known}"),
            );
            return;
        };
        self.check(&url, refuse_layout(&store.url, "the URL"));
        for (key, value) in &store.options {
            let options = format!("{field}.options");
            let fits = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
            if key.is_empty() || !key.bytes().all(fits) {
                self.add(&options, format!("\"{key}\" is no setting's name"));
            } else if value.contains('\n') {
                self.add(&options, format!("{key} has more than one line"));
            } else if !is_plain(key, value) {
                let what = "whoever reads this object would read the secret: put it into the Secret of secretRef, or mend the name";
                self.add(
                    &options,
                    format!("{key} may hold a secret, or is no known setting; {what}"),
                );
            }
        }
        if family.is_local() {
            self.local(field, &url, store);
        } else if store.url.split_once("://").is_none_or(|(_, rest)| {
            let bucket = rest.split('/').next().unwrap_or_default();
            bucket.is_empty() || bucket.contains(':') || rest.contains('?')
        }) {
            self.add(&url, "use scheme://bucket/prefix, without a port or query");
        }
    }

    fn local(&mut self, field: &str, url: &str, store: &StoreSpec) {
        if !store.options.is_empty() {
            let options = format!("{field}.options");
            self.add(&options, "a store of local files has no settings");
        }
        let Some(path) = local_path(&store.url) else {
            self.add(url, "it names no folder: use file:///folder");
            return;
        };
        let path = path.trim_end_matches('/');
        let is_in = |dir: &str| {
            let rest = path.strip_prefix(dir);
            rest.is_some_and(|r| r.is_empty() || r.starts_with('/'))
        };
        let odd = path.contains(':') || path.split('/').any(|part| part == "..");
        if path.is_empty() || SYSTEM.contains(&path) || OURS.iter().any(|d| is_in(d)) || odd {
            self.add(
                url,
                format!("nothing can be mounted at \"{path}\": use another path, such as /backups"),
            );
        }
    }

    fn labels(&mut self, policy: &EtcdBackupPolicy) {
        let ends_well =
            |s: &str| s.starts_with(alphanumeric) && s.ends_with(alphanumeric) && s.len() <= 63;
        let is_name = |s: &str| {
            let fits = |c: char| alphanumeric(c) || "-_.".contains(c);
            ends_well(s) && s.chars().all(fits)
        };
        for (key, value) in &policy.spec.job_template.labels {
            let field = "spec.jobTemplate.labels";
            let (domain, name) = match key.split_once('/') {
                Some((domain, name)) => (Some(domain), name),
                None => (None, key.as_str()),
            };
            if !is_name(name) || !domain.is_none_or(is_domain) {
                self.add(field, format!("\"{key}\" is no label's key"));
            } else if !value.is_empty() && !is_name(value) {
                self.add(
                    field,
                    format!("\"{value}\" of {key} is no value of a label"),
                );
            }
        }
    }
}

fn is_domain(s: &str) -> bool {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
    !s.is_empty() && s.len() <= 253 && s.chars().all(fits)
}

fn alphanumeric(c: char) -> bool {
    c.is_ascii_alphanumeric()
}

/// What is wrong with a policy: nothing is made of one that has a problem.
pub fn problems(policy: &EtcdBackupPolicy) -> Vec<String> {
    let spec = &policy.spec;
    let mut found = Found(Vec::new());
    found.store("spec.store", &spec.store);
    let identity = spec.encryption.as_ref();
    let identity = identity.and_then(|e| e.identity_secret_ref.as_ref());
    found.secret("spec.encryption.identitySecretRef", identity);
    if let Some(etcd) = &spec.etcd {
        found.secret("spec.etcd.tlsSecretRef", etcd.tls_secret_ref.as_ref());
        found.secret("spec.etcd.authSecretRef", etcd.auth_secret_ref.as_ref());
        for endpoint in &etcd.endpoints {
            let field = "spec.etcd.endpoints";
            let odd = |c: char| c == ',' || c.is_whitespace();
            let scheme = endpoint.split_once("://").map(|(scheme, _)| scheme);
            if endpoint.is_empty() || endpoint.contains(odd) {
                found.add(field, format!("\"{endpoint}\" is no URL of one member"));
            } else if scheme.is_some_and(|s| s != "http" && s != "https") {
                found.add(field, format!("\"{endpoint}\" is neither http nor https"));
            } else if scheme == Some("http") && etcd.tls_secret_ref.is_some() {
                let what = "is without TLS, and tlsSecretRef is of no use there";
                found.add(field, format!("\"{endpoint}\" {what}"));
            }
        }
    }
    let recipients = spec.encryption.iter().flat_map(|e| &e.recipients);
    for recipient in recipients {
        let field = "spec.encryption.recipients";
        let parsed: Result<Recipient, _> = recipient.parse();
        if let Err(e) = parsed {
            // Somebody may have given the identity instead: it is not shown.
            found.add(field, format!("one is no X25519 recipient (age1…): {e}"));
        }
    }
    let snapshot = spec.snapshot.as_ref();
    let zone = super::time_zone(policy);
    let zone = match Schedule::parse("@daily", zone) {
        Ok(_) => zone,
        Err(e) => {
            found.add("spec.snapshot.timeZone", e);
            "Etc/UTC"
        }
    };
    if let Some(snapshot) = snapshot {
        let full = "spec.snapshot.fullSchedule";
        match (&snapshot.follow, &snapshot.full_schedule) {
            (Some(_), Some(schedule)) => {
                found.check(full, Schedule::parse(schedule, zone));
            }
            (_, schedule) => found.cron(full, schedule.as_ref(), zone),
        }
        let delta = snapshot.delta_schedule.as_ref();
        found.cron("spec.snapshot.deltaSchedule", delta, zone);
        if let Some(follow) = &snapshot.follow {
            let at = "spec.snapshot.follow";
            let period = follow.delta_period.as_ref();
            found.duration_above_zero(&format!("{at}.deltaPeriod"), period);
            found.size_above_zero(&format!("{at}.deltaBytes"), follow.delta_bytes.as_ref());
        }
        let begins_well = |s: &str| s.starts_with(|c: char| alphanumeric(c));
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
        if let Some(prefix) = &snapshot.lease_prefix
            && (!begins_well(prefix)
                || prefix.len() > LONGEST_PREFIX
                || !prefix.chars().all(fits)
                || prefix.ends_with('.'))
        {
            let what = "is not the begin of a Lease's name: lower-case letters, digits, - and .";
            found.add("spec.snapshot.leasePrefix", format!("\"{prefix}\" {what}"));
        }
    }
    let compaction = &spec.compaction;
    let deadline = Some(&compaction.active_deadline);
    found.duration_above_zero("spec.compaction.activeDeadline", deadline);
    let age = compaction.age_threshold.as_ref();
    found.duration_above_zero("spec.compaction.ageThreshold", age);
    let size = compaction.size_threshold.as_ref();
    found.size_above_zero("spec.compaction.sizeThreshold", size);
    if let Some(retention) = &spec.retention {
        found.cron("spec.retention.schedule", Some(&retention.schedule), zone);
        let rules = &retention.rules;
        found.count("spec.retention.limit", rules.limit);
        for (field, time) in [
            ("spec.retention.deltaRetention", &rules.delta_retention),
            ("spec.retention.restorableWindow", &rules.restorable_window),
            ("spec.retention.purgeAfter", &rules.purge_after),
        ] {
            found.written(field, time.as_ref());
        }
    }
    if let Some(verify) = &spec.verify {
        found.cron("spec.verify.schedule", Some(&verify.schedule), zone);
    }
    if let Some(maintenance) = &spec.maintenance {
        let schedule = Some(&maintenance.schedule);
        found.cron("spec.maintenance.schedule", schedule, zone);
        found.upkeep("spec.maintenance", &maintenance.upkeep);
    }
    let template = &spec.job_template;
    let wait = template.metrics_scrape_wait.as_ref();
    found.written("spec.jobTemplate.metricsScrapeWait", wait);
    for (field, size) in [
        ("spec.jobTemplate.scratchSize", &template.scratch_size),
        (
            "spec.jobTemplate.maxDatabaseSize",
            &template.max_database_size,
        ),
        ("spec.jobTemplate.maxValueSize", &template.max_value_size),
    ] {
        found.size_above_zero(field, size.as_ref());
    }
    found.labels(policy);
    found.0
}

/// What is wrong with a task of this policy: one that has a problem is Rejected. Whether another task stands in its
/// way is not looked at here.
pub fn task_problems(policy: &EtcdBackupPolicy, task: &EtcdBackupTask) -> Vec<String> {
    let mut found = Found(Vec::new());
    let config = task.spec.config.clone().unwrap_or_default();
    let verify = config.verify.as_ref();
    let needs_etcd = match task.spec.type_ {
        TaskType::OnDemandSnapshot | TaskType::Maintenance => true,
        TaskType::Verify => verify.is_some_and(|v| v.against_cluster),
        TaskType::OnDemandCompaction | TaskType::CopyBackups | TaskType::Restore => false,
    };
    if needs_etcd && policy.spec.etcd.is_none() {
        let name = super::name_of(policy);
        found.add(
            "spec.policy",
            format!("{name} has no etcd.endpoints, and the task needs a live etcd"),
        );
    }
    if let Some(copy) = &config.copy_backups {
        copy_problems(&mut found, policy, copy);
    }
    if let Some(restore) = &config.restore {
        restore_problems(&mut found, restore);
    }
    if let Some(maintenance) = &config.maintenance {
        found.upkeep("spec.config.maintenance", &maintenance.upkeep);
    }
    found.0
}

fn copy_problems(found: &mut Found, policy: &EtcdBackupPolicy, copy: &CopyBackupsConfig) {
    let at = "spec.config.copyBackups";
    let of_policy = &policy.spec.store;
    if let Some(store) = &copy.source_store {
        found.store(&format!("{at}.sourceStore"), store);
    }
    if let Some(store) = &copy.target_store {
        found.store(&format!("{at}.targetStore"), store);
    }
    let source = copy.source_store.as_ref().unwrap_or(of_policy);
    let target = copy.target_store.as_ref().unwrap_or(of_policy);
    let place = |store: &StoreSpec| store.url.trim_end_matches('/').to_owned();
    let is_same = place(source) == place(target) && source.options == target.options;
    if copy.source_store.is_none() && copy.target_store.is_none() {
        found.add(at, "give sourceStore, targetStore, or both");
    } else if let (Some(a), Some(b)) = (local_path(&source.url), local_path(&target.url)) {
        let (a, b) = (a.trim_end_matches('/'), b.trim_end_matches('/'));
        let lies_in = |a: &str, b: &str| a == b || a.starts_with(&format!("{b}/"));
        if lies_in(a, b) || lies_in(b, a) {
            let what = "both stores would be mounted at one path: give one of them another";
            found.add(at, what);
        }
    } else if is_same {
        found.add(at, "source and target are the same");
    }
    found.count(&format!("{at}.maxBackups"), copy.most.max_backups);
    found.count(&format!("{at}.maxBackupAge"), copy.most.max_backup_age);
    let waits = copy.wait_for_final_snapshot.as_ref();
    let timeout = waits.and_then(|w| w.timeout.as_ref());
    let field = format!("{at}.waitForFinalSnapshot.timeout");
    found.duration_above_zero(&field, timeout);
}

fn restore_problems(found: &mut Found, restore: &RestoreConfig) {
    let at = "spec.config.restore";
    if restore.wanted.bump_revision.is_some() != restore.wanted.mark_compacted {
        found.add(
            at,
            "bumpRevision and markCompacted belong together: give both, or neither",
        );
    }
    let mut parts = restore.sub_path.iter().flat_map(|p| p.split('/'));
    if parts.any(|part| part == "." || part == "..") {
        found.add(
            &format!("{at}.subPath"),
            "it is a path below the volume, without . and ..",
        );
    }
}
