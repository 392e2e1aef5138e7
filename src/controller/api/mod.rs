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
use std::time::Duration;

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
    /// Ready, BackupReady, BackupVerified or CompactionHealthy
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
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
        match self {
            ConditionStatus::True => "True",
            ConditionStatus::False => "False",
            ConditionStatus::Unknown => "Unknown",
        }
    }
}

/// What durations look like in the API: Go's, with days and weeks.
pub const DURATION: &str = "^([0-9]+(ms|s|m|h|d|w))+$";

/// What sizes look like in the API: Kubernetes' quantities of bytes.
pub const SIZE: &str = "^[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T)?$";

/// Reads a duration of the API, such as `90s` or `1h30m`.
///
/// # Errors
/// What is wrong with it.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let bad =
        || format!("\"{text}\" is no duration: give numbers with units, such as 90s, 1h30m or 7d");
    let mut total = Duration::ZERO;
    let mut rest = text;
    if rest.is_empty() {
        return Err(bad());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
        let (number, behind) = rest.split_at(digits);
        let number: u64 = number.parse().map_err(|_| bad())?;
        let letters = behind
            .find(|c: char| c.is_ascii_digit())
            .unwrap_or(behind.len());
        let (unit, behind) = behind.split_at(letters);
        let millis: u64 = match unit {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            "w" => 604_800_000,
            _ => return Err(bad()),
        };
        let part = number.checked_mul(millis).ok_or_else(bad)?;
        total = total
            .checked_add(Duration::from_millis(part))
            .ok_or_else(bad)?;
        rest = behind;
    }
    Ok(total)
}

/// Reads a size of the API in bytes, such as `500`, `64Mi` or `1G`.
///
/// # Errors
/// What is wrong with it.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let bad = || {
        format!("\"{text}\" is no size: give bytes, or a number with Ki, Mi, Gi, Ti, k, M, G or T")
    };
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let number: u64 = number.parse().map_err(|_| bad())?;
    let factor: u64 = match unit {
        "" => 1,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1 << 40,
        "k" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "T" => 1_000_000_000_000,
        _ => return Err(bad()),
    };
    number.checked_mul(factor).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_sizes_are_read_as_kubernetes_does() {
        assert_eq!(parse_duration("1h30m"), Ok(Duration::from_secs(5400)));
        assert_eq!(parse_duration("7d"), Ok(Duration::from_secs(604_800)));
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
        for bad in ["", "5", "h", "5x", "-1s", "99999999999999999999s", "1h 2m"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
        assert_eq!(parse_size("500"), Ok(500));
        assert_eq!(parse_size("64Mi"), Ok(64 << 20));
        assert_eq!(parse_size("1G"), Ok(1_000_000_000));
        for bad in ["", "Mi", "1.5Gi", "1X", "99999999999Ti"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
