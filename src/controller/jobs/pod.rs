//! A builder of Pods that run one command of deltafold for a policy.
//!
//! Each method adds flags together with the volumes that they refer to, so that neither is forgotten. It does
//! not know which command needs what: `table`, which calls it, does.

use super::super::api::{EtcdBackupPolicy, JobTemplate, SecretRef, StoreSpec};
use super::flags::flags;
use super::leases::{lock_lease_name, needs_lock_leases};
use super::store_url::local_path;
use super::{
    CONTAINER, CONTAINER_BEFORE, COPY_CONTAINERS, DEFAULT_USER, Settings, TERMINATION_LOG,
    duration, final_exit_codes, lease_prefix, service_account_name,
};
use crate::base::limits;
use crate::base::{Size, Span, TextValue};
use crate::store::open::OPTION_SECRET_DIR;
use clap::Args;
use k8s_openapi::api::batch::v1::PodFailurePolicy;
use k8s_openapi::api::core::v1::{PodTemplateSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

/// The port of the metrics.
const PORT: i32 = 8080;
const PORT_NAME: &str = "metrics";
/// The mount path of the volume for temporary files.
const SCRATCH: &str = "/scratch";
/// Where the Pod of a restore drill has the etcd to start.
const DRILL_ETCD: &str = "/scratch/etcd";
/// The path of etcd in the images of the etcd project and of Kubernetes.
const ETCD_IN_IMAGE: &str = "/usr/local/bin/etcd";
/// The directory in which Secrets are mounted.
const SECRETS: &str = "/secrets";
/// Files of a Secret are readable by owner and group only.
const SECRET_MODE: i32 = 0o440;

/// Kubernetes counts deadlines in nanoseconds in 64 bits, which overflow after 292 years.
const MAX_DEADLINE: Duration = Duration::from_secs(100 * 365 * 86_400);

/// A Pod under construction.
pub(super) struct PodBuilder<'a> {
    policy: &'a EtcdBackupPolicy,
    settings: &'a Settings,
    args: Vec<String>,
    volumes: Vec<Value>,
    mounts: Vec<Value>,
    resources: Option<&'a ResourceRequirements>,
    user: i64,
    /// How long a Job of the Pod may run.
    deadline: Duration,
    /// Whether the Pod uses the Kubernetes API.
    needs_token: bool,
    serves_metrics: bool,
    /// For a Pod that runs until it is stopped: the seconds between SIGTERM and SIGKILL.
    stop_grace: Option<i64>,
    /// The image whose etcd is copied to [`DRILL_ETCD`] before the Pod's work.
    etcd_image: Option<&'a str>,
    /// The arguments of the init container.
    init_args: Option<Vec<String>>,
}

/// One of the two stores of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopySide {
    Source,
    Target,
}

/// Returns a text escaped for a container's arguments, in which Kubernetes replaces `$(NAME)` by a variable's
/// value.
fn escaped(text: &str) -> String {
    text.replace('$', "$$")
}

impl<'a> PodBuilder<'a> {
    /// Starts a Pod that runs a command of deltafold, with the flags that all commands have.
    pub(super) fn new(
        policy: &'a EtcdBackupPolicy,
        settings: &'a Settings,
        command: &[&str],
    ) -> Self {
        let common = [
            "--output",
            "json",
            "--termination-log",
            TERMINATION_LOG,
            "--temp-dir",
            SCRATCH,
        ];
        let mut pod = PodBuilder {
            policy,
            settings,
            args: Vec::new(),
            volumes: Vec::new(),
            mounts: Vec::new(),
            resources: policy.spec.job_template.resources.as_ref(),
            user: DEFAULT_USER,
            deadline: MAX_DEADLINE,
            needs_token: false,
            serves_metrics: false,
            stop_grace: None,
            etcd_image: None,
            init_args: None,
        };
        pod.args
            .extend(command.iter().chain(&common).map(|a| (*a).to_owned()));
        let template = &policy.spec.job_template;
        for (flag, size) in [
            ("--max-database-bytes", &template.max_database_size),
            ("--max-value-bytes", &template.max_value_size),
        ] {
            if let Some(size) = size {
                pod = pod.flag(flag, size.as_str());
            }
        }
        let scratch = json!({"emptyDir": {"sizeLimit": mebibytes(scratch_bytes(template))}});
        pod.mount("scratch", scratch, SCRATCH, false)
    }

    /// Sets how long a Job of the Pod may run.
    pub(super) fn within(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Adds a flag and its value.
    pub(super) fn flag(mut self, flag: &str, value: &str) -> Self {
        self.args.push(flag.to_owned());
        self.args.push(escaped(value));
        self
    }

    /// Adds a flag without a value.
    pub(super) fn switch(mut self, flag: &str) -> Self {
        self.args.push(flag.to_owned());
        self
    }

    /// Adds the flags for the options of an operation.
    pub(super) fn options<T: Args + Serialize>(mut self, options: &T) -> Self {
        self.args.extend(flags(options).iter().map(|a| escaped(a)));
        self
    }

    /// Adds a flag and its value, a duration.
    pub(super) fn duration(self, flag: &str, value: &TextValue<Span>) -> Self {
        self.flag(flag, &Span(duration(value)).to_string())
    }

    fn mount(mut self, name: &str, mut volume: Value, path: &str, read_only: bool) -> Self {
        volume["name"] = name.into();
        self.volumes.push(volume);
        let read_only = read_only.then_some(true);
        self.mounts
            .push(json!({"name": name, "mountPath": path, "readOnly": read_only}));
        self
    }

    /// Mounts a whole Secret. Also returns the mount path, which ends in the Secret's name so that error
    /// messages name the Secret. If the Secret does not exist, the directory is empty, and the program
    /// reports what is missing.
    fn secret(self, use_: &str, secret: &SecretRef) -> (Self, String) {
        let name = &secret.name;
        let path = format!("{SECRETS}/{use_}/{name}");
        let volume = json!({"secret": {
            "secretName": name, "defaultMode": SECRET_MODE, "optional": true,
        }});
        let pod = self.mount(&format!("secret-{use_}"), volume, &path, true);
        (pod, path)
    }

    /// Mounts a PersistentVolumeClaim of the namespace.
    pub(super) fn claim(self, claim: &str, path: &str) -> Self {
        let volume = json!({"persistentVolumeClaim": {"claimName": claim}});
        self.mount("data", volume, path, false)
    }

    /// Mounts the volume of a store that is a folder.
    fn store_volume(self, name: &str, store: &StoreSpec, read_only: bool) -> Self {
        let (Some(path), Some(volume)) = (local_path(&store.url), &store.volume) else {
            return self;
        };
        let claim = volume.persistent_volume_claim.as_ref();
        let folder = volume.host_path.as_ref();
        let volume = json!({
            "persistentVolumeClaim": claim.map(|claim| json!({"claimName": claim})),
            // The directory must exist and be writable for the Pod's user: the kubelet would create it for root.
            "hostPath": folder.map(|path| json!({"path": path, "type": "Directory"})),
        });
        self.mount(name, volume, &path, read_only)
    }

    /// Adds the policy's store, and the identity that decrypts its snapshots.
    pub(super) fn store(self, read_only: bool) -> Self {
        let store = &self.policy.spec.store;
        let mut pod = self
            .flag("--store", &store.url)
            .store_volume("store", store, read_only);
        for (key, value) in &store.options {
            pod = pod.flag("--store-option", &format!("{key}={value}"));
        }
        if let Some(secret) = &store.secret_ref {
            let (mounted, path) = pod.secret("store", secret);
            pod = mounted.flag("--store-secret", &path);
        }
        pod.identities()
    }

    /// Adds one of the two stores of a copy.
    pub(super) fn copy_store(self, side: CopySide, store: &StoreSpec) -> Self {
        let (name, url, option) = match side {
            CopySide::Source => ("source", "--from", "--from-option"),
            CopySide::Target => ("target", "--to", "--to-option"),
        };
        let read_only = side == CopySide::Source;
        let mut pod = self
            .flag(url, &store.url)
            .store_volume(name, store, read_only);
        if let Some(secret) = &store.secret_ref {
            let (mounted, path) = pod.secret(name, secret);
            pod = mounted.flag(option, &format!("{OPTION_SECRET_DIR}={path}"));
        }
        for (key, value) in &store.options {
            pod = pod.flag(option, &format!("{key}={value}"));
        }
        pod
    }

    /// Adds the endpoints of the live etcd and its credentials.
    pub(super) fn live_etcd(self) -> Self {
        let Some(etcd) = &self.policy.spec.etcd else {
            return self;
        };
        let mut pod = self.flag("--endpoints", &etcd.endpoints.join(","));
        if let Some(secret) = &etcd.tls_secret_ref {
            let (mounted, path) = pod.secret("etcd-tls", secret);
            pod = mounted.flag("--tls-secret", &path);
        }
        pod.etcd_user()
    }

    fn etcd_user(self) -> Self {
        let etcd = self.policy.spec.etcd.as_ref();
        let Some(secret) = etcd.and_then(|e| e.auth_secret_ref.as_ref()) else {
            return self;
        };
        let (pod, path) = self.secret("etcd-auth", secret);
        pod.flag("--auth-secret", &path)
    }

    /// Adds a restore drill with the etcd of another image. A restored etcd with authentication has the users
    /// of the live one.
    pub(super) fn drill(self, etcd_image: &'a str) -> Self {
        let pod = self.flag("--etcd-binary", DRILL_ETCD).etcd_user();
        pod.with_etcd_of(etcd_image)
    }

    fn with_etcd_of(mut self, image: &'a str) -> Self {
        self.etcd_image = Some(image);
        self
    }

    /// Adds the identity that decrypts snapshots, and the rules for snapshots that are not encrypted.
    pub(super) fn identities(self) -> Self {
        let Some(encryption) = &self.policy.spec.encryption else {
            return self;
        };
        let mut pod = self;
        if let Some(secret) = &encryption.identity_secret_ref {
            let (mounted, path) = pod.secret("age", secret);
            pod = mounted.flag("--age-identity", &format!("{path}/identity.txt"));
        }
        pod.options(&encryption.plaintext)
    }

    /// Adds the recipients of new snapshots. Commands that only read get them, too: with recipients, a
    /// snapshot that is not encrypted is untrusted.
    pub(super) fn recipients(self) -> Self {
        let encryption = self.policy.spec.encryption.iter();
        let recipients = encryption.flat_map(|e| &e.recipients);
        recipients.fold(self, |pod, r| pod.flag("--age-recipient", r))
    }

    /// Adds the compression of new snapshots.
    pub(super) fn compression(self) -> Self {
        let snapshot = self.policy.spec.snapshot.as_ref();
        match snapshot.and_then(|s| s.compression) {
            None => self,
            Some(compression) => self.flag("--compression", compression.as_str()),
        }
    }

    /// Has the command renew the snapshot Leases.
    pub(super) fn snapshot_leases(mut self) -> Self {
        self.needs_token = true;
        let prefix = lease_prefix(self.policy);
        self.flag("--snapshot-lease-prefix", prefix)
    }

    /// Has the operation use a Lease as its lock if the store cannot keep one.
    pub(super) fn lock(mut self, operation: &str) -> Self {
        if !needs_lock_leases(self.policy) {
            return self;
        }
        self.needs_token = true;
        let name = lock_lease_name(self.policy, operation);
        self.flag("--lock-lease", &name)
    }

    /// Serves the metrics of a command for a while after its end, if the policy sets `metricsScrapeWait`. On
    /// the host network no port is opened, because Pods of one node would compete for it.
    pub(super) fn metrics(mut self) -> Self {
        let template = &self.policy.spec.job_template;
        match &template.metrics_scrape_wait {
            Some(wait) if !template.host_network => {
                self.serves_metrics = true;
                self.flag("--metrics-bind-address", &format!(":{PORT}"))
                    .duration("--metrics-scrape-wait", wait)
            }
            _ => self,
        }
    }

    /// Makes a Pod that runs until it is stopped, and that serves metrics all the time.
    pub(super) fn long_running(mut self, grace: i64) -> Self {
        self.stop_grace = Some(grace);
        match self.policy.spec.job_template.host_network {
            true => self,
            false => {
                self.serves_metrics = true;
                self.flag("--metrics-bind-address", &format!(":{PORT}"))
            }
        }
    }

    /// Limits the events that wait for the store to a quarter of the scratch volume, and to 1 GiB: the volume
    /// must also hold a full and two deltas.
    pub(super) fn spool(self) -> Self {
        const MAX_SPOOL: u64 = 1 << 30;
        let bytes = MAX_SPOOL.min(scratch_bytes(&self.policy.spec.job_template) / 4);
        self.flag("--spool-bytes", &bytes.to_string())
    }

    /// Replaces the resources of the policy's Job template.
    pub(super) fn resources(mut self, resources: Option<&'a ResourceRequirements>) -> Self {
        self.resources = resources.or(self.resources);
        self
    }

    /// Sets the user and group of the Pod.
    pub(super) fn user(mut self, user: i64) -> Self {
        self.user = user;
        self
    }

    /// Runs the command of another Pod first, in an init container of this one. This Pod must mount all that
    /// the other one mounts.
    pub(super) fn run_first(mut self, first: PodBuilder<'a>) -> Self {
        self.init_args = Some(first.args);
        self.etcd_image = first.etcd_image;
        self
    }

    /// Returns how long a Job of the Pod may run, in seconds.
    pub(super) fn deadline_seconds(&self) -> i64 {
        let deadline = self.deadline.clamp(Duration::from_secs(1), MAX_DEADLINE);
        i64::try_from(deadline.as_secs()).unwrap_or(i64::MAX)
    }

    /// Returns the Pod failure policy of docs/exit-codes.md.
    pub(super) fn failure_policy(&self) -> PodFailurePolicy {
        let mut containers = vec![CONTAINER];
        containers.extend(self.init_args.as_ref().map(|_| CONTAINER_BEFORE));
        containers.extend(self.etcd_image.map(|_| COPY_CONTAINERS).iter().flatten());
        let mut rules = Vec::new();
        for name in containers {
            let codes =
                json!({"containerName": name, "operator": "In", "values": final_exit_codes()});
            rules.push(json!({"action": "FailJob", "onExitCodes": codes}));
        }
        let disrupted = json!([{"type": "DisruptionTarget", "status": "True"}]);
        rules.push(json!({"action": "Ignore", "onPodConditions": disrupted}));
        // These fields are all that a rule needs; tests compare them.
        serde_json::from_value(json!({"rules": rules})).unwrap_or_default()
    }

    /// Returns the init containers that copy the etcd of another image. An image of etcd has no shell: deltafold
    /// copies itself into the scratch volume, and then runs in that image.
    fn copy_etcd(&self, image: &str) -> [Value; 2] {
        const PROGRAM: &str = "/scratch/deltafold";
        let container = |name: &str, args: &[&str]| {
            let args = ["copy-program", "--termination-log", TERMINATION_LOG]
                .iter()
                .chain(args);
            let mut container = self.container(name, args.map(|a| (*a).to_owned()).collect());
            let mounts = self.mounts.iter();
            let scratch = mounts.filter(|mount| mount["mountPath"] == SCRATCH);
            container["volumeMounts"] = scratch.cloned().collect();
            container
        };
        let [program, etcd] = COPY_CONTAINERS;
        let itself = container(program, &[PROGRAM]);
        let mut etcd = container(etcd, &["--program", ETCD_IN_IMAGE, DRILL_ETCD]);
        etcd["image"] = image.into();
        etcd["imagePullPolicy"] = Value::Null;
        etcd["command"] = json!([PROGRAM]);
        [itself, etcd]
    }

    fn container(&self, name: &str, args: Vec<String>) -> Value {
        let template = &self.policy.spec.job_template;
        let pull = template.image_pull_policy.map(|p| p.to_string());
        json!({
            "name": name,
            "image": template.image.as_ref().unwrap_or(&self.settings.image),
            "imagePullPolicy": pull.or_else(|| self.settings.image_pull_policy.clone()),
            "command": ["deltafold"],
            "args": args,
            "resources": resources(self.resources, template),
            "securityContext": {
                "allowPrivilegeEscalation": false,
                "readOnlyRootFilesystem": true,
                "capabilities": {"drop": ["ALL"]},
            },
            // Not FallbackToLogsOnError: the log of a killed process could be taken for a termination message.
            "terminationMessagePath": TERMINATION_LOG,
            "terminationMessagePolicy": "File",
            "volumeMounts": self.mounts,
        })
    }

    /// Returns the finished Pod, with these labels.
    pub(super) fn template(mut self, labels: BTreeMap<String, String>) -> PodTemplateSpec {
        let args = std::mem::take(&mut self.args);
        let mut main = self.container(CONTAINER, args);
        let init_args = self.init_args.take();
        let copies = self.etcd_image.map(|image| self.copy_etcd(image));
        let before = init_args.map(|args| self.container(CONTAINER_BEFORE, args));
        let init_containers: Vec<Value> = copies.into_iter().flatten().chain(before).collect();
        let is_long_running = self.stop_grace.is_some();
        if self.serves_metrics {
            main["ports"] = json!([{"name": PORT_NAME, "containerPort": PORT}]);
            if is_long_running {
                let probe = |path| json!({"httpGet": {"path": path, "port": PORT_NAME}});
                main["livenessProbe"] = probe("/healthz");
                main["readinessProbe"] = probe("/readyz");
            }
        }
        let template = &self.policy.spec.job_template;
        let host_network = template.host_network;
        let pod = json!({
            "metadata": {"labels": labels},
            "spec": {
                "containers": [main],
                "initContainers": (!init_containers.is_empty()).then_some(init_containers),
                "restartPolicy": if is_long_running { "Always" } else { "Never" },
                "terminationGracePeriodSeconds": self.stop_grace,
                "serviceAccountName": service_account_name(self.policy),
                "automountServiceAccountToken": self.needs_token,
                "enableServiceLinks": false,
                "hostNetwork": host_network.then_some(true),
                "dnsPolicy": host_network.then_some("ClusterFirstWithHostNet"),
                "nodeSelector": Some(&template.node_selector).filter(|s| !s.is_empty()),
                "tolerations": Some(&template.tolerations).filter(|t| !t.is_empty()),
                "priorityClassName": template.priority_class_name,
                "securityContext": {
                    "runAsNonRoot": self.user != 0,
                    "runAsUser": self.user,
                    "runAsGroup": self.user,
                    // With it the user can write to volumes and read Secrets.
                    "fsGroup": self.user,
                    // The default would change every file of a local store before each run.
                    "fsGroupChangePolicy": "OnRootMismatch",
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "volumes": self.volumes,
            },
        });
        // A template of these fields cannot fail; tests build Pods of all kinds.
        serde_json::from_value(pod).unwrap_or_default()
    }
}

/// Returns the size of the scratch volume in bytes: by default three times the largest database, for the
/// database of the base, the new one, and the changes.
fn scratch_bytes(template: &JobTemplate) -> u64 {
    let size = |field: &Option<TextValue<Size>>| Some(field.as_ref()?.value()?.0);
    let database = size(&template.max_database_size).unwrap_or(limits::DATABASE_BYTES);
    size(&template.scratch_size).unwrap_or(database.saturating_mul(3))
}

fn mebibytes(bytes: u64) -> Quantity {
    Quantity(format!("{}Mi", bytes.div_ceil(1 << 20)))
}

/// Returns the configured resources, completed with default limits of memory and ephemeral storage. The
/// limits keep a hostile snapshot from using up a node. docs/sizing.md says which databases fit into them.
fn resources(
    configured: Option<&ResourceRequirements>,
    template: &JobTemplate,
) -> ResourceRequirements {
    const MEMORY: &str = "2Gi";
    /// Ephemeral storage for logs, in bytes, in addition to the scratch volume.
    const LOGS: u64 = 1 << 30;
    let mut resources = configured.cloned().unwrap_or_default();
    let limits = resources.limits.get_or_insert_default();
    let requests = resources.requests.get_or_insert_default();
    if configured.is_none() {
        // A small request, so that the scheduler does not put all Jobs on one node.
        requests.insert("cpu".to_owned(), Quantity("100m".to_owned()));
    }
    let storage = mebibytes(scratch_bytes(template).saturating_add(LOGS)).0;
    for (name, request, limit) in [
        ("memory", "128Mi", MEMORY),
        ("ephemeral-storage", "1Gi", &storage),
    ] {
        if limits.contains_key(name) {
            continue;
        }
        // Without a request, Kubernetes would request as much as the limit.
        let requested = requests
            .entry(name.to_owned())
            .or_insert_with(|| Quantity(smaller(request, limit).to_owned()));
        // A request must not exceed its limit.
        let limit = larger(limit, &requested.0).to_owned();
        limits.insert(name.to_owned(), Quantity(limit));
    }
    resources
}

fn bytes(quantity: &str) -> Option<u64> {
    crate::base::byte_size::parse(quantity).ok()
}

/// Returns the larger of a default and a configured quantity; the configured one if only Kubernetes can parse
/// it.
fn larger<'q>(default: &'q str, configured: &'q str) -> &'q str {
    match bytes(configured) {
        Some(size) if Some(size) <= bytes(default) => default,
        _ => configured,
    }
}

fn smaller<'q>(a: &'q str, b: &'q str) -> &'q str {
    if bytes(b) < bytes(a) { b } else { a }
}
