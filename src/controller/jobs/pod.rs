//! A Pod that does one thing for a policy: its arguments, and what is mounted for them.
//!
//! Each part of it adds its flags and its volumes together, so that none is without the other. `jobs` puts the parts
//! together.

use super::super::api::{EtcdBackupPolicy, JobTemplate, SecretRef, StoreSpec};
use super::flags::flags;
use super::store_url::local_path;
use super::{
    CONTAINER, CONTAINER_BEFORE, Settings, TERMINATION_LOG, USER, duration, lease_prefix,
    lock_lease_name, locks_are_leases, service_account_name,
};
use crate::base::limits;
use crate::base::{Size, Span, TextValue};
use crate::store::open::OPTION_SECRET_DIR;
use clap::Args;
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

/// Where metrics are served.
const PORT: i32 = 8080;
const PORT_NAME: &str = "metrics";
/// For what does not fit into memory.
const SCRATCH: &str = "/scratch";
/// Secrets are mounted below.
const SECRETS: &str = "/secrets";
/// Its owner and its group may read a Secret, and nobody else.
const SECRET_MODE: i32 = 0o440;

/// A Pod in the making.
pub(super) struct Pod<'a> {
    policy: &'a EtcdBackupPolicy,
    settings: &'a Settings,
    args: Vec<String>,
    volumes: Vec<Volume>,
    mounts: Vec<VolumeMount>,
    resources: Option<&'a ResourceRequirements>,
    user: i64,
    /// Whether it talks to the API.
    token: bool,
    serves_metrics: bool,
    /// Of one that goes on until it is stopped: how long it may take then.
    grace: Option<i64>,
    /// The arguments of the container before it.
    before: Option<Vec<String>>,
}

/// Of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Source,
    Target,
}

/// A text that Kubernetes leaves as it is: `$(NAME)` would become a variable's value.
fn escaped(text: &str) -> String {
    text.replace('$', "$$")
}

impl<'a> Pod<'a> {
    /// One that runs this command of deltafold's.
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
        let mut pod = Pod {
            policy,
            settings,
            args: Vec::new(),
            volumes: Vec::new(),
            mounts: Vec::new(),
            resources: policy.spec.job_template.resources.as_ref(),
            user: USER,
            token: false,
            serves_metrics: false,
            grace: None,
            before: None,
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

    /// A flag that has a value.
    pub(super) fn flag(mut self, flag: &str, value: &str) -> Self {
        self.args.push(flag.to_owned());
        self.args.push(escaped(value));
        self
    }

    /// A flag that has none.
    pub(super) fn switch(mut self, flag: &str) -> Self {
        self.args.push(flag.to_owned());
        self
    }

    /// The flags of an operation's options.
    pub(super) fn options<T: Args + Serialize>(mut self, options: &T) -> Self {
        self.args.extend(flags(options).iter().map(|a| escaped(a)));
        self
    }

    /// A flag with a duration.
    pub(super) fn duration(self, flag: &str, given: &TextValue<Span>) -> Self {
        self.flag(flag, &Span(duration(given)).to_string())
    }

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

    /// Mounts a Secret, whole; gives the path, too, which ends in the Secret's name. One that is not there leaves an
    /// empty folder: the program says what it lacks.
    fn secret(self, what: &str, secret: &SecretRef) -> (Self, String) {
        let name = &secret.name;
        let path = format!("{SECRETS}/{what}/{name}");
        let volume = Volume {
            secret: Some(SecretVolumeSource {
                secret_name: Some(name.clone()),
                default_mode: Some(SECRET_MODE),
                optional: Some(true),
                ..SecretVolumeSource::default()
            }),
            ..Volume::default()
        };
        let pod = self.mount(&format!("secret-{what}"), volume, &path, true);
        (pod, path)
    }

    /// A claim of the namespace.
    pub(super) fn claim(self, claim: &str, path: &str) -> Self {
        let volume = Volume {
            persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                claim_name: claim.to_owned(),
                read_only: None,
            }),
            ..Volume::default()
        };
        self.mount("data", volume, path, false)
    }

    /// The volume of a store of local files.
    fn store_volume(self, name: &str, store: &StoreSpec, read_only: bool) -> Self {
        let (Some(path), Some(volume)) = (local_path(&store.url), &store.volume) else {
            return self;
        };
        let claim = volume.persistent_volume_claim.clone();
        let folder = volume.host_path.clone();
        let volume = Volume {
            persistent_volume_claim: claim.map(|claim_name| PersistentVolumeClaimVolumeSource {
                claim_name,
                read_only: None,
            }),
            // It has to be there, and the Pod's user must be able to write to it: kubelet would make it root's.
            host_path: folder.map(|path| HostPathVolumeSource {
                path,
                type_: Some("Directory".to_owned()),
            }),
            ..Volume::default()
        };
        self.mount(name, volume, &path, read_only)
    }

    /// The policy's store, to read alone or to write, too, and the identity that opens what is encrypted there.
    pub(super) fn store(self, read_only: bool) -> Self {
        let store = &self.policy.spec.store;
        let mut pod = self
            .flag("--store", &store.url)
            .store_volume("store", store, read_only);
        for (key, value) in &store.options {
            pod = pod.flag("--store-option", &format!("{key}={value}"));
        }
        if let Some(secret) = &store.secret_ref {
            let (with, path) = pod.secret("store", secret);
            pod = with.flag("--store-secret", &path);
        }
        pod.identities()
    }

    /// One of the two stores of a copy.
    pub(super) fn side(self, side: Side, store: &StoreSpec) -> Self {
        let (name, url, option) = match side {
            Side::Source => ("source", "--from", "--from-option"),
            Side::Target => ("target", "--to", "--to-option"),
        };
        let read_only = side == Side::Source;
        let mut pod = self
            .flag(url, &store.url)
            .store_volume(name, store, read_only);
        if let Some(secret) = &store.secret_ref {
            let (with, path) = pod.secret(name, secret);
            pod = with.flag(option, &format!("{OPTION_SECRET_DIR}={path}"));
        }
        for (key, value) in &store.options {
            pod = pod.flag(option, &format!("{key}={value}"));
        }
        pod
    }

    /// The live etcd.
    pub(super) fn live(self) -> Self {
        let Some(etcd) = &self.policy.spec.etcd else {
            return self;
        };
        let mut pod = self.flag("--endpoints", &etcd.endpoints.join(","));
        for (what, flag, secret) in [
            ("etcd-tls", "--tls-secret", &etcd.tls_secret_ref),
            ("etcd-auth", "--auth-secret", &etcd.auth_secret_ref),
        ] {
            if let Some(secret) = secret {
                let (with, path) = pod.secret(what, secret);
                pod = with.flag(flag, &path);
            }
        }
        pod
    }

    /// The identity that opens snapshots, and what is made of those that need none.
    pub(super) fn identities(self) -> Self {
        let Some(encryption) = &self.policy.spec.encryption else {
            return self;
        };
        let mut pod = self;
        if let Some(secret) = &encryption.identity_secret_ref {
            let (with, path) = pod.secret("age", secret);
            pod = with.flag("--age-identity", &format!("{path}/identity.txt"));
        }
        pod.options(&encryption.plaintext)
    }

    /// Who can read what is written. With recipients alone, too, plain snapshots are not trusted.
    pub(super) fn recipients(self) -> Self {
        let encryption = self.policy.spec.encryption.iter();
        let recipients = encryption.flat_map(|e| &e.recipients);
        recipients.fold(self, |pod, r| pod.flag("--age-recipient", r))
    }

    /// How new snapshots are compressed.
    pub(super) fn compression(self) -> Self {
        let snapshot = self.policy.spec.snapshot.as_ref();
        match snapshot.and_then(|s| s.compression) {
            None => self,
            Some(compression) => self.flag("--compression", compression.as_str()),
        }
    }

    /// The Leases that tell how far the backup is.
    pub(super) fn snapshot_leases(mut self) -> Self {
        self.token = true;
        let prefix = lease_prefix(self.policy);
        self.flag("--snapshot-lease-prefix", prefix)
    }

    /// A Lease as the lock, where the store cannot keep one.
    pub(super) fn lock(mut self, what: &str) -> Self {
        if !locks_are_leases(self.policy) {
            return self;
        }
        self.token = true;
        let name = lock_lease_name(self.policy, what);
        self.flag("--lock-lease", &name)
    }

    /// What it has measured is there for a while after its end, where the policy wants it. On the node's own network
    /// no port is opened: Pods would get into each other's way.
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

    /// It goes on until it is stopped, and serves metrics all the time.
    pub(super) fn following(mut self, grace: i64) -> Self {
        self.grace = Some(grace);
        match self.policy.spec.job_template.host_network {
            true => self,
            false => {
                self.serves_metrics = true;
                self.flag("--metrics-bind-address", &format!(":{PORT}"))
            }
        }
    }

    /// What waits for the store must leave room for a full, and for two deltas.
    pub(super) fn spool(self) -> Self {
        const MOST: u64 = 1 << 30;
        let bytes = MOST.min(scratch_bytes(&self.policy.spec.job_template) / 4);
        self.flag("--spool-bytes", &bytes.to_string())
    }

    /// Other resources than those of the policy's template.
    pub(super) fn resources(mut self, resources: Option<&'a ResourceRequirements>) -> Self {
        self.resources = resources.or(self.resources);
        self
    }

    /// Who runs it.
    pub(super) fn user(mut self, user: i64) -> Self {
        self.user = user;
        self
    }

    /// Runs what another Pod would in a container before this one's. All that is mounted there must be here, too.
    pub(super) fn after(mut self, first: Pod<'a>) -> Self {
        self.before = Some(first.args);
        self
    }

    /// Whether there is a container before the one that does the work.
    pub(super) fn has_container_before(&self) -> bool {
        self.before.is_some()
    }

    fn container(&self, name: &str, args: Vec<String>) -> Container {
        let template = &self.policy.spec.job_template;
        let image = template.image.clone();
        let pull = template.image_pull_policy.map(|p| p.to_string());
        Container {
            name: name.to_owned(),
            image: Some(image.unwrap_or_else(|| self.settings.image.clone())),
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
            // What a process left that was killed is no message of ours: its log is not to pass for one.
            termination_message_path: Some(TERMINATION_LOG.to_owned()),
            termination_message_policy: Some("File".to_owned()),
            volume_mounts: Some(self.mounts.clone()),
            ..Container::default()
        }
    }

    /// The finished Pod, with these labels.
    pub(super) fn template(mut self, labels: BTreeMap<String, String>) -> PodTemplateSpec {
        let args = std::mem::take(&mut self.args);
        let mut main = self.container(CONTAINER, args);
        let before = self.before.take();
        let before = before.map(|args| vec![self.container(CONTAINER_BEFORE, args)]);
        let follows = self.grace.is_some();
        if self.serves_metrics {
            main.ports = Some(vec![ContainerPort {
                name: Some(PORT_NAME.to_owned()),
                container_port: PORT,
                ..ContainerPort::default()
            }]);
            if follows {
                main.liveness_probe = Some(probe("/healthz"));
                main.readiness_probe = Some(probe("/readyz"));
            }
        }
        let template = &self.policy.spec.job_template;
        let nodes = &template.node_selector;
        let host = template.host_network;
        PodTemplateSpec {
            metadata: Some(ObjectMeta {
                labels: Some(labels),
                ..ObjectMeta::default()
            }),
            spec: Some(PodSpec {
                containers: vec![main],
                init_containers: before,
                restart_policy: Some(match follows {
                    true => "Always".to_owned(),
                    false => "Never".to_owned(),
                }),
                termination_grace_period_seconds: self.grace,
                service_account_name: Some(service_account_name(self.policy)),
                automount_service_account_token: Some(self.token),
                enable_service_links: Some(false),
                host_network: host.then_some(true),
                dns_policy: host.then(|| "ClusterFirstWithHostNet".to_owned()),
                node_selector: (!nodes.is_empty()).then(|| nodes.clone()),
                tolerations: (!template.tolerations.is_empty())
                    .then(|| template.tolerations.clone()),
                priority_class_name: template.priority_class_name.clone(),
                security_context: Some(PodSecurityContext {
                    run_as_non_root: Some(self.user != 0),
                    run_as_user: Some(self.user),
                    run_as_group: Some(self.user),
                    // So that volumes can be written to and Secrets read.
                    fs_group: Some(self.user),
                    // A store of many files would be walked through before each run.
                    fs_group_change_policy: Some("OnRootMismatch".to_owned()),
                    seccomp_profile: Some(SeccompProfile {
                        type_: "RuntimeDefault".to_owned(),
                        localhost_profile: None,
                    }),
                    ..PodSecurityContext::default()
                }),
                volumes: Some(self.volumes),
                ..PodSpec::default()
            }),
        }
    }
}

/// Bytes of the scratch volume: for the base's database, the new one, and changes of as much again.
fn scratch_bytes(template: &JobTemplate) -> u64 {
    let size = |given: &Option<TextValue<Size>>| Some(given.as_ref()?.value()?.0);
    let database = size(&template.max_database_size).unwrap_or(limits::DATABASE_BYTES);
    size(&template.scratch_size).unwrap_or(database.saturating_mul(3))
}

fn mebibytes(bytes: u64) -> Quantity {
    Quantity(format!("{}Mi", bytes.div_ceil(1 << 20)))
}

/// The resources that are given, with what they lack: every Pod has limits of memory and ephemeral storage, which keep a
/// hostile snapshot from taking a whole node. docs/sizing.md says what fits into them.
fn resources(given: Option<&ResourceRequirements>, template: &JobTemplate) -> ResourceRequirements {
    const MEMORY: &str = "2Gi";
    /// Beside the scratch volume: logs.
    const LOGS: u64 = 1 << 30;
    let mut resources = given.cloned().unwrap_or_default();
    let limits = resources.limits.get_or_insert_default();
    let requests = resources.requests.get_or_insert_default();
    if given.is_none() {
        // Enough to be placed sensibly.
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
        // Without a request, the limit would be requested.
        let requested = requests
            .entry(name.to_owned())
            .or_insert_with(|| Quantity(smaller(request, limit).to_owned()));
        // No request may be above its limit.
        let limit = larger(limit, &requested.0).to_owned();
        limits.insert(name.to_owned(), Quantity(limit));
    }
    resources
}

fn bytes(quantity: &str) -> Option<u64> {
    crate::base::byte_size::parse(quantity).ok()
}

/// `ours`, unless a quantity is larger, or written in a way that only Kubernetes reads.
fn larger<'q>(ours: &'q str, given: &'q str) -> &'q str {
    match bytes(given) {
        Some(given) if Some(given) <= bytes(ours) => ours,
        _ => given,
    }
}

fn smaller<'q>(a: &'q str, b: &'q str) -> &'q str {
    match bytes(b) < bytes(a) {
        true => b,
        false => a,
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
