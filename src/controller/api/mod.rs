//! The resources of `deltafold.io/v1alpha1`: what users write, and what the controller tells them.
//!
//! Types alone, with the rules that the API server checks itself (CEL); nothing is decided here. The CRDs are
//! generated from them. `controller`, `cli::manifests`, `cli::task` and `cli::policy` use them.

mod policy;
mod task;

pub use policy::*;
pub use task::*;

use chrono::{DateTime, Utc};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{CustomResourceExt, KubeSchema};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The API group.
pub const GROUP: &str = "deltafold.io";

/// Both CRDs.
pub fn crds() -> Vec<CustomResourceDefinition> {
    vec![EtcdBackupPolicy::crd(), EtcdBackupTask::crd()]
}

/// A bucket and prefix, and how it is reached.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.url.contains('://') || self.url.startsWith('/')").message("give a URL such as s3://bucket/prefix, or an absolute path"),
    validation = Rule::new("(self.url.startsWith('/') || self.url.startsWith('file://')) == has(self.volume)").message("a store of local files needs a volume, and only such a one has it")
)]
pub struct StoreSpec {
    /// The folder that holds v2/: s3://bucket/prefix, gs://…, az://…, swift://…, oss://…; with `volume`
    /// file:///path, where that is mounted
    #[schemars(length(min = 1, max = 2048))]
    pub url: String,
    /// The Secret with settings and credentials, with the keys of etcd-druid's Secrets or the providers'
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<SecretRef>,
    /// Settings of the store, such as endpoint or region: no secrets
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, String>,
    /// The volume of a store of local files; it is mounted at the path of the URL
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<StoreVolume>,
}

/// A volume to keep snapshots on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.persistentVolumeClaim) != has(self.hostPath)").message("give either persistentVolumeClaim or hostPath"))]
pub struct StoreVolume {
    /// The name of a PersistentVolumeClaim
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<String>,
    /// A folder of the node
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
}

/// A Secret of the same namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct SecretRef {
    /// Its name
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// A condition, as Kubernetes has them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Ready, BackupReady, BackupVerified, CompactionHealthy, StoreShared or NotAllowed
    #[serde(rename = "type")]
    pub type_: String,
    /// True, False or Unknown
    pub status: ConditionStatus,
    /// A word for machines
    pub reason: String,
    /// A sentence for people
    pub message: String,
    /// When the status was another one
    pub last_transition_time: DateTime<Utc>,
    /// The generation of the spec that this is about
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}

/// Whether a condition holds.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    schemars::JsonSchema,
    strum::IntoStaticStr,
)]
pub enum ConditionStatus {
    /// It does.
    True,
    /// It does not.
    False,
    /// There is no news, or none that is recent enough.
    Unknown,
}

impl ConditionStatus {
    /// As Kubernetes writes it.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}
