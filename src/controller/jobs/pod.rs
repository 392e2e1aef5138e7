//! A Pod that does one thing for a policy: its arguments, and what is mounted for them.
//!
//! Each part of it adds its flags and its volumes together, so that none is without the other. `jobs` puts the parts
//! together.

use super::super::api::{EtcdBackupPolicy, JobTemplate, SecretRef, StoreSpec};
use super::flags::flags;
use super::secrets::{Family, SecretKeys, local_path, setting, variables};
use super::{
    CONTAINER, CONTAINER_BEFORE, Settings, TERMINATION_LOG, USER, duration, lease_prefix,
    lock_lease_name, locks_are_leases, service_account_name,
};
use crate::base::{Size, Span, Written};
use crate::limits;
use clap::Args;
use k8s_openapi::api::core::v1::{
    Capabilities, Container, ContainerPort, EmptyDirVolumeSource, EnvVar, EnvVarSource,
    HTTPGetAction, HostPathVolumeSource, PersistentVolumeClaimVolumeSource, PodSecurityContext,
    PodSpec, PodTemplateSpec, Probe, ResourceRequirements, SeccompProfile, SecretKeySelector,
    SecretVolumeSource, SecurityContext, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

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
    secrets: &'a SecretKeys,
    args: Vec<String>,
    env: Vec<EnvVar>,
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
        secrets: &'a SecretKeys,
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
            secrets,
            args: Vec::new(),
            env: Vec::new(),
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
    pub(super) fn duration(self, flag: &str, given: &Written<Span>) -> Self {
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

    /// Mounts a Secret; gives the path, too.
    fn secret(self, name: &str, secret: &SecretRef) -> (Self, String) {
        let path = format!("{SECRETS}/{name}");
        let volume = Volume {
            secret: Some(SecretVolumeSource {
                secret_name: Some(secret.name.clone()),
                default_mode: Some(SECRET_MODE),
                ..SecretVolumeSource::default()
            }),
            ..Volume::default()
        };
        (
            self.mount(&format!("secret-{name}"), volume, &path, true),
            path,
        )
    }

    fn variable(mut self, name: &str, secret: &SecretRef, key: &str) -> Self {
        self.env.push(EnvVar {
            name: name.to_owned(),
            value: None,
            value_from: Some(EnvVarSource {
                secret_key_ref: Some(SecretKeySelector {
                    name: secret.name.clone(),
                    key: key.to_owned(),
                    optional: None,
                }),
                ..EnvVarSource::default()
            }),
        });
        self
    }

    /// The keys that a Secret has, if that is known.
    fn keys(&self, secret: &SecretRef) -> Option<&'a BTreeSet<String>> {
        self.secrets.get(&secret.name)
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
            let variables = variables(store, pod.secrets);
            for name in &variables {
                pod = pod.variable(name, secret, name);
            }
            // A folder without credentials would be refused where the variables have them.
            if has_files(pod.keys(secret), &variables) {
                let (with, path) = pod.secret("store", secret);
                pod = with.flag("--store-secret", &path);
            }
        }
        pod.identities()
    }

    /// One of the two stores of a copy.
    pub(super) fn side(self, side: Side, store: &StoreSpec) -> Self {
        let (name, url, option, variable) = match side {
            Side::Source => ("source", "--from", "--from-option", "DELTAFOLD_FROM_OPTION"),
            Side::Target => ("target", "--to", "--to-option", "DELTAFOLD_TO_OPTION"),
        };
        let read_only = side == Side::Source;
        let mut pod = self
            .flag(url, &store.url)
            .store_volume(name, store, read_only);
        let mut settings: Vec<String> = Vec::new();
        let mut is_in_env = false;
        if let Some(secret) = &store.secret_ref {
            let variables = variables(store, pod.secrets);
            if has_files(pod.keys(secret), &variables) {
                let (with, path) = pod.secret(name, secret);
                pod = with;
                settings.push(format!("secret_dir={path}"));
            }
            // Both stores may be of one provider: which variable is whose, the names must tell.
            for key in &variables {
                let Some(setting) = setting(key) else {
                    continue;
                };
                let own = format!("{}_{key}", name.to_ascii_uppercase());
                pod = pod.variable(&own, secret, key);
                settings.push(format!("{setting}=$({own})"));
                is_in_env = true;
            }
        }
        for (key, value) in &store.options {
            settings.push(escaped(&format!("{key}={value}")));
        }
        if is_in_env {
            // No secret among the arguments; the variable is not read where there is a flag.
            pod.env.push(EnvVar {
                name: variable.to_owned(),
                value: Some(settings.join("\n")),
                value_from: None,
            });
            return pod;
        }
        for setting in settings {
            pod.args.extend([option.to_owned(), setting]);
        }
        pod
    }

    /// The live etcd.
    pub(super) fn live(self) -> Self {
        let Some(etcd) = &self.policy.spec.etcd else {
            return self;
        };
        let mut pod = self.flag("--endpoints", &etcd.endpoints.join(","));
        if let Some(secret) = &etcd.tls_secret_ref {
            let keys = pod.keys(secret);
            let has = |key: &str| keys.is_none_or(|k| k.contains(key));
            let (with, path) = pod.secret("etcd-tls", secret);
            pod = with.flag("--cacert", &format!("{path}/ca.crt"));
            if has("tls.crt") && has("tls.key") {
                pod = pod
                    .flag("--cert", &format!("{path}/tls.crt"))
                    .flag("--key", &format!("{path}/tls.key"));
            }
        }
        if let Some(secret) = &etcd.auth_secret_ref {
            let (with, path) = pod.secret("etcd-auth", secret);
            pod = with
                .variable("DELTAFOLD_USER", secret, "username")
                .flag("--password-file", &format!("{path}/password"));
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
            env: (!self.env.is_empty()).then(|| self.env.clone()),
            resources: Some(match self.resources {
                Some(own) => own.clone(),
                None => usual_resources(template),
            }),
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

/// Whether a Secret is to be mounted as files: not one that has nothing but variables.
fn has_files(keys: Option<&BTreeSet<String>>, variables: &[String]) -> bool {
    variables.is_empty() || keys.is_none_or(|keys| keys.iter().any(|k| is_druids(k)))
}

/// Whether a key has the form of etcd-druid's: `accessKeyID`, `credentials.json`.
fn is_druids(key: &str) -> bool {
    key.starts_with(|c: char| c.is_ascii_lowercase())
}

/// Bytes of the scratch volume: for the base's database, the new one, and changes of as much again.
fn scratch_bytes(template: &JobTemplate) -> u64 {
    let size = |given: &Option<Written<Size>>| Some(given.as_ref()?.value()?.0);
    let database = size(&template.max_database_size).unwrap_or(limits::DATABASE_BYTES);
    size(&template.scratch_size).unwrap_or(database.saturating_mul(3))
}

fn mebibytes(bytes: u64) -> Quantity {
    Quantity(format!("{}Mi", bytes.div_ceil(1 << 20)))
}

/// Enough to be placed sensibly, and limits that keep a hostile snapshot from taking a whole node. docs/sizing.md says
/// what fits into them.
fn usual_resources(template: &JobTemplate) -> ResourceRequirements {
    const MEMORY: &str = "2Gi";
    /// Beside the scratch volume: logs.
    const LOGS: u64 = 1 << 30;
    let quantity = |(name, value): (&str, &str)| (name.to_owned(), Quantity(value.to_owned()));
    let storage = mebibytes(scratch_bytes(template).saturating_add(LOGS));
    ResourceRequirements {
        requests: Some(
            [
                ("cpu", "100m"),
                ("memory", "128Mi"),
                // Without it, the limit would be requested.
                ("ephemeral-storage", "1Gi"),
            ]
            .map(quantity)
            .into(),
        ),
        limits: Some(
            [("memory", MEMORY), ("ephemeral-storage", &storage.0)]
                .map(quantity)
                .into(),
        ),
        ..ResourceRequirements::default()
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

impl Family {
    /// Whether stores of it are files of a mounted volume.
    pub(super) fn is_local(self) -> bool {
        self == Family::Local
    }
}
