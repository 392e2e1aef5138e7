//! A builder of Pods that run one command of deltafold for a policy.
//!
//! Each method adds flags together with the volumes that they refer to, so that neither is forgotten. It does
//! not know which command needs what: `table`, which calls it, does.

use super::super::api::{EtcdBackupPolicy, JobTemplate, SecretRef, StoreSpec};
use super::args::not_permitted;
use super::flags::flags;
use super::leases::{lock_lease_name, needs_lock_leases};
use super::store_url::local_path;
use super::{
    CONTAINER, CONTAINER_BEFORE, COPY_CONTAINERS, DEFAULT_USER, Settings, TERMINATION_LOG,
    duration, final_exit_codes, lease_prefix, service_account_name,
};
use crate::base::limits;
use crate::base::{Size, Span, TextValue};
use crate::error::{Error, Result};
use crate::store::open::OPTION_SECRET_DIR;
use clap::Args;
use k8s_openapi::api::batch::v1::{
    PodFailurePolicy, PodFailurePolicyOnExitCodesRequirement,
    PodFailurePolicyOnPodConditionsPattern, PodFailurePolicyRule,
};
use k8s_openapi::api::core::v1::{
    Capabilities, Container, ContainerPort, EmptyDirVolumeSource, HTTPGetAction,
    HostPathVolumeSource, PersistentVolumeClaimVolumeSource, PodSecurityContext, PodSpec,
    PodTemplateSpec, Probe, ResourceRequirements, SeccompProfile, SecretVolumeSource,
    SecurityContext, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::Serialize;
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
    /// Why the Pod lacks arguments.
    failure: Option<Error>,
    /// The `args` of the policy or the task, and their field.
    own_args: Option<(&'static str, &'a [String])>,
    /// Why the container before takes no such `args`.
    refused_before: Option<String>,
    volumes: Vec<Volume>,
    mounts: Vec<VolumeMount>,
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
            "--policy-words",
        ];
        let mut pod = PodBuilder {
            policy,
            settings,
            args: Vec::new(),
            failure: None,
            own_args: None,
            refused_before: None,
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
        let scratch = Volume {
            empty_dir: Some(EmptyDirVolumeSource {
                size_limit: Some(mebibytes(scratch_bytes(template))),
                ..EmptyDirVolumeSource::default()
            }),
            ..Volume::default()
        };
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

    /// Adds the flags for the options of an operation. [`template`](Self::template) returns the error, if there is one.
    pub(super) fn options<T: Args + Serialize>(mut self, options: &T) -> Self {
        match flags(options) {
            Ok(args) => self.args.extend(args.iter().map(|a| escaped(a))),
            Err(e) => self.failure = Some(e),
        }
        self
    }

    /// Adds the `args` of the policy or the task, which this field has.
    pub(super) fn own_args(mut self, (field, args): (&'static str, &'a [String])) -> Self {
        if !args.is_empty() {
            self.own_args = Some((field, args));
            self.args.extend(args.iter().map(|arg| escaped(arg)));
        }
        self
    }

    /// Returns why the command does not take the `args` of the policy or the task.
    pub(super) fn refused_args(&self) -> Option<String> {
        let Some((field, own)) = self.own_args else {
            return self.refused_before.clone();
        };
        if let Some(arg) = not_permitted(own) {
            return Some(format!(
                "{field}: \"{arg}\" cannot be set here: docs/controller.md lists the flags that can"
            ));
        }
        let args = self.args.iter().map(|arg| arg.replace("$$", "$"));
        let args: Vec<String> = args.collect();
        let refusal = (self.settings.check_command)(&args).err()?;
        Some(format!("{field}: {refusal}"))
    }

    /// Adds a flag and its value, a duration.
    pub(super) fn duration(self, flag: &str, value: &TextValue<Span>) -> Self {
        self.flag(flag, &Span(duration(value)).to_string())
    }

    /// Adds a volume under this name, and mounts it.
    fn mount(mut self, name: &str, volume: Volume, path: &str, read_only: bool) -> Self {
        self.volumes.push(Volume {
            name: name.to_owned(),
            ..volume
        });
        self.mounts.push(VolumeMount {
            name: name.to_owned(),
            mount_path: path.to_owned(),
            read_only: read_only.then_some(true),
            ..VolumeMount::default()
        });
        self
    }

    /// Mounts a whole Secret. Also returns the mount path, which ends in the Secret's name so that error
    /// messages name the Secret. If the Secret does not exist, the directory is empty, and the program
    /// reports what is missing.
    fn secret(self, use_: &str, secret: &SecretRef) -> (Self, String) {
        let name = &secret.name;
        let path = format!("{SECRETS}/{use_}/{name}");
        let volume = Volume {
            secret: Some(SecretVolumeSource {
                secret_name: Some(name.clone()),
                default_mode: Some(SECRET_MODE),
                optional: Some(true),
                ..SecretVolumeSource::default()
            }),
            ..Volume::default()
        };
        let pod = self.mount(&format!("secret-{use_}"), volume, &path, true);
        (pod, path)
    }

    /// Mounts a PersistentVolumeClaim of the namespace.
    pub(super) fn claim(self, claim: &str, path: &str) -> Self {
        self.mount("data", claim_volume(claim), path, false)
    }

    /// Mounts the volume of a store that is a folder.
    fn store_volume(self, name: &str, store: &StoreSpec, read_only: bool) -> Self {
        let (Some(path), Some(volume)) = (local_path(&store.url), &store.volume) else {
            return self;
        };
        let claim = volume.persistent_volume_claim.as_deref();
        let host_path = volume.host_path.clone().map(|path| HostPathVolumeSource {
            path,
            // The directory must exist and be writable for the Pod's user: the kubelet would create it for root.
            type_: Some("Directory".to_owned()),
        });
        let volume = Volume {
            host_path,
            ..claim.map(claim_volume).unwrap_or_default()
        };
        self.mount(name, volume, &path, read_only)
    }

    /// Adds the policy's store, and the identity that decrypts its snapshots.
    pub(super) fn store(self, read_only: bool) -> Self {
        self.store_without_identities(read_only).identities()
    }

    /// Adds the policy's store for a command that reads no snapshots.
    pub(super) fn store_without_identities(self, read_only: bool) -> Self {
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
        pod
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

    /// Adds the identity that decrypts snapshots.
    pub(super) fn identities(self) -> Self {
        let Some(encryption) = &self.policy.spec.encryption else {
            return self;
        };
        let mut pod = self;
        if let Some(secret) = &encryption.identity_secret_ref {
            let (mounted, path) = pod.secret("age", secret);
            pod = mounted.flag("--age-identity", &format!("{path}/identity.txt"));
        }
        pod
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
        if self.policy.spec.job_template.host_network {
            self
        } else {
            self.serves_metrics = true;
            self.flag("--metrics-bind-address", &format!(":{PORT}"))
        }
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
        self.refused_before = first.refused_args();
        self.init_args = Some(first.args);
        self.failure = self.failure.or(first.failure);
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
        let final_failure = |name: &str| PodFailurePolicyRule {
            action: "FailJob".to_owned(),
            on_exit_codes: Some(PodFailurePolicyOnExitCodesRequirement {
                container_name: Some(name.to_owned()),
                operator: "In".to_owned(),
                values: final_exit_codes(),
            }),
            on_pod_conditions: None,
        };
        let disruption = PodFailurePolicyRule {
            action: "Ignore".to_owned(),
            on_exit_codes: None,
            on_pod_conditions: Some(vec![PodFailurePolicyOnPodConditionsPattern {
                type_: "DisruptionTarget".to_owned(),
                status: Some("True".to_owned()),
            }]),
        };
        let mut rules: Vec<_> = containers.into_iter().map(final_failure).collect();
        rules.push(disruption);
        PodFailurePolicy { rules }
    }

    /// Returns the init containers that copy the etcd of another image. An image of etcd has no shell: deltafold
    /// copies itself into the scratch volume, and then runs in that image.
    fn copy_etcd(&self, image: &str) -> [Container; 2] {
        const PROGRAM: &str = "/scratch/deltafold";
        let container = |name: &str, args: &[&str]| {
            let args = ["copy-program", "--termination-log", TERMINATION_LOG]
                .iter()
                .chain(args);
            let mounts = self.mounts.iter();
            let scratch = mounts.filter(|mount| mount.mount_path == SCRATCH);
            Container {
                volume_mounts: Some(scratch.cloned().collect()),
                ..self.container(name, args.map(|a| (*a).to_owned()).collect())
            }
        };
        let [program, etcd] = COPY_CONTAINERS;
        let etcd = Container {
            image: Some(image.to_owned()),
            image_pull_policy: None,
            command: Some(vec![PROGRAM.to_owned()]),
            ..container(etcd, &["--program", ETCD_IN_IMAGE, DRILL_ETCD])
        };
        [container(program, &[PROGRAM]), etcd]
    }

    fn container(&self, name: &str, args: Vec<String>) -> Container {
        let template = &self.policy.spec.job_template;
        let image = template.image.as_ref().unwrap_or(&self.settings.image);
        let pull = template.image_pull_policy.map(|p| p.to_string());
        Container {
            name: name.to_owned(),
            image: Some(image.clone()),
            image_pull_policy: pull.or_else(|| self.settings.image_pull_policy.clone()),
            command: Some(vec!["deltafold".to_owned()]),
            args: Some(args),
            resources: Some(resources(self.resources, template)),
            security_context: Some(SecurityContext {
                allow_privilege_escalation: Some(false),
                read_only_root_filesystem: Some(true),
                capabilities: Some(Capabilities {
                    drop: Some(vec!["ALL".to_owned()]),
                    add: None,
                }),
                ..SecurityContext::default()
            }),
            // Not FallbackToLogsOnError: the log of a killed process could be taken for a termination message.
            termination_message_path: Some(TERMINATION_LOG.to_owned()),
            termination_message_policy: Some("File".to_owned()),
            volume_mounts: Some(self.mounts.clone()),
            ..Container::default()
        }
    }

    /// Returns the finished Pod, with these labels.
    ///
    /// # Errors
    /// `Internal` if options of an operation could not be written as flags.
    pub(super) fn template(mut self, labels: BTreeMap<String, String>) -> Result<PodTemplateSpec> {
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        let args = std::mem::take(&mut self.args);
        let mut main = self.container(CONTAINER, args);
        let init_args = self.init_args.take();
        let copies = self.etcd_image.map(|image| self.copy_etcd(image));
        let before = init_args.map(|args| self.container(CONTAINER_BEFORE, args));
        let init_containers: Vec<Container> = copies.into_iter().flatten().chain(before).collect();
        let is_long_running = self.stop_grace.is_some();
        if self.serves_metrics {
            main.ports = Some(vec![ContainerPort {
                name: Some(PORT_NAME.to_owned()),
                container_port: PORT,
                ..ContainerPort::default()
            }]);
            if is_long_running {
                main.liveness_probe = Some(probe("/healthz"));
                main.readiness_probe = Some(probe("/readyz"));
            }
        }
        let template = &self.policy.spec.job_template;
        let host_network = template.host_network;
        let restart_policy = if is_long_running { "Always" } else { "Never" };
        let node_selector = Some(&template.node_selector).filter(|s| !s.is_empty());
        let tolerations = Some(&template.tolerations).filter(|t| !t.is_empty());
        let pod = PodSpec {
            containers: vec![main],
            init_containers: (!init_containers.is_empty()).then_some(init_containers),
            restart_policy: Some(restart_policy.to_owned()),
            termination_grace_period_seconds: self.stop_grace,
            service_account_name: Some(service_account_name(self.policy)),
            automount_service_account_token: Some(self.needs_token),
            enable_service_links: Some(false),
            host_network: host_network.then_some(true),
            dns_policy: host_network.then(|| "ClusterFirstWithHostNet".to_owned()),
            node_selector: node_selector.cloned(),
            tolerations: tolerations.cloned(),
            priority_class_name: template.priority_class_name.clone(),
            security_context: Some(PodSecurityContext {
                run_as_non_root: Some(self.user != 0),
                run_as_user: Some(self.user),
                run_as_group: Some(self.user),
                // With it the user can write to volumes and read Secrets.
                fs_group: Some(self.user),
                // The default would change every file of a local store before each run.
                fs_group_change_policy: Some("OnRootMismatch".to_owned()),
                seccomp_profile: Some(SeccompProfile {
                    type_: "RuntimeDefault".to_owned(),
                    localhost_profile: None,
                }),
                ..PodSecurityContext::default()
            }),
            volumes: Some(self.volumes),
            ..PodSpec::default()
        };
        Ok(PodTemplateSpec {
            metadata: Some(ObjectMeta {
                labels: Some(labels),
                ..ObjectMeta::default()
            }),
            spec: Some(pod),
        })
    }
}

/// Returns a volume of a PersistentVolumeClaim, without a name.
fn claim_volume(claim: &str) -> Volume {
    Volume {
        persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
            claim_name: claim.to_owned(),
            read_only: None,
        }),
        ..Volume::default()
    }
}

fn probe(path: &str) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::String(PORT_NAME.to_owned()),
            ..HTTPGetAction::default()
        }),
        ..Probe::default()
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
