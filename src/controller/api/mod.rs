//! The resources of `deltafold.io/v1alpha1`: the specs that users write, and the status that the controller
//! writes.
//!
//! It has only types, with the rules that the API server checks (CEL); it decides nothing. The CRDs are
//! generated from the types, and the doc comments are the descriptions that `kubectl explain` shows.
//! `controller` and `cli::task` use it.

mod policy;
mod task;

pub use policy::*;
pub use task::*;

use crate::ops::gc::Rules;
use crate::ops::maintain::Upkeep;
use crate::ops::snapshot::follow::Pace;
use chrono::{DateTime, Utc};
use clap::{Args, Command};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSON, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::{CustomResourceExt, KubeSchema};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The longest text of a spec, in characters, unless the field says otherwise.
const LONGEST_TEXT: i64 = 1024;
/// The most elements of a list or map of a spec, unless the field says otherwise.
const MOST_ITEMS: i64 = 64;

/// Returns the CRDs of both resources.
pub fn crds() -> Vec<CustomResourceDefinition> {
    let mut crds = vec![EtcdBackupPolicy::crd(), EtcdBackupTask::crd()];
    let defaults = flag_defaults();
    for version in crds.iter_mut().flat_map(|crd| &mut crd.spec.versions) {
        let schema = version.schema.as_mut();
        let fields = schema.and_then(|s| s.open_api_v3_schema.as_mut()?.properties.as_mut());
        let Some(fields) = fields else {
            continue;
        };
        if let Some(spec) = fields.get_mut("spec") {
            explain(spec, &defaults);
            limit(spec);
        }
        if let Some(status) = fields.get_mut("status") {
            status.default = Some(JSON(not_processed(status)));
        }
    }
    crds
}

/// Returns the status of an object that no controller has processed, as in the Gateway API: otherwise nobody would tell
/// that there is no controller.
fn not_processed(schema: &JSONSchemaProps) -> Value {
    let message = "no controller has processed this object yet: if this stays, check that a deltafold controller runs and watches this namespace";
    let never = "1970-01-01T00:00:00Z";
    let is_task = schema
        .properties
        .iter()
        .flatten()
        .any(|(name, _)| name == "state");
    if is_task {
        return json!({"state": TaskState::Pending, "lastOperation": {
            "name": "Admission", "state": "Pending", "lastTransitionTime": never,
            "reason": format!("NotProcessed: {message}"),
        }});
    }
    json!({"conditions": [{
        "type": "Ready", "status": ConditionStatus::Unknown, "reason": "NotProcessed",
        "message": message, "lastTransitionTime": never,
    }]})
}

/// Limits each text, list and map of a spec that has no limit of its own, so that nobody's object is huge.
fn limit(schema: &mut JSONSchemaProps) {
    match schema.type_.as_deref() {
        Some("string") => _ = schema.max_length.get_or_insert(LONGEST_TEXT),
        Some("array") => _ = schema.max_items.get_or_insert(MOST_ITEMS),
        Some("object") if schema.properties.is_none() => {
            schema.max_properties.get_or_insert(MOST_ITEMS);
        }
        _ => {}
    }
    for (_, field) in schema.properties.iter_mut().flatten() {
        limit(field);
    }
    if let Some(JSONSchemaPropsOrArray::Schema(item)) = &mut schema.items {
        limit(item);
    }
    if let Some(JSONSchemaPropsOrBool::Schema(value)) = &mut schema.additional_properties {
        limit(value);
    }
}

/// Completes the descriptions of a spec for `kubectl explain`, which shows no defaults: adds them, and writes enums as a resource
/// has them. Types that the command line shares have their defaults in its flags.
fn explain(schema: &mut JSONSchemaProps, defaults: &BTreeMap<String, String>) {
    for (name, field) in schema.properties.iter_mut().flatten() {
        let default = match field.default.as_ref().map(|default| &default.0) {
            Some(Value::String(text)) => Some(text.clone()),
            Some(Value::Number(number)) => Some(number.to_string()),
            Some(Value::Bool(true)) => Some("true".to_owned()),
            _ => defaults.get(name).cloned(),
        };
        if let Some(text) = &mut field.description {
            *text = text.replace("\"limit\"", "Limit");
            *text = text.replace("\"exponential\"", "Exponential");
            if let Some(default) = default.filter(|_| !text.contains("[default")) {
                *text += &format!(" [default: {default}]");
            }
        }
        explain(field, defaults);
    }
}

/// The defaults of flags that are fields of a policy, too, by the names of the fields.
fn flag_defaults() -> BTreeMap<String, String> {
    let flags = Upkeep::augment_args(Rules::augment_args(Pace::augment_args(Command::new(""))));
    let mut defaults = BTreeMap::from([("keepHistory".to_owned(), "latest".to_owned())]);
    for flag in flags.get_arguments() {
        let words = flag.get_id().as_str().split('_').enumerate();
        let name = words.map(|(n, word)| match n {
            0 => word.to_owned(),
            _ => word[..1].to_uppercase() + &word[1..],
        });
        if let [default] = flag.get_default_values() {
            defaults.insert(name.collect(), default.to_string_lossy().into_owned());
        }
    }
    defaults
}

/// A store, and how it is accessed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.url.contains('://') || self.url.startsWith('/')").message("give a URL such as s3://bucket/prefix, or an absolute path"),
    validation = Rule::new("(self.url.startsWith('/') || self.url.startsWith('file://')) == has(self.volume)").message("a store with a file:// URL or a path needs a volume; other stores must not have one")
)]
pub struct StoreSpec {
    /// URL of the folder that holds v2/: s3://bucket/prefix, gs://…, az://…, or swift://…; or
    /// file:///path with `volume`, which is mounted there
    #[schemars(length(min = 1, max = 2048))]
    pub url: String,
    /// Secret with the options and credentials of the store. Its keys are those of etcd-druid's Secrets, or
    /// the providers' environment variables
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<SecretRef>,
    /// Options of the store, such as endpoint or region. Secrets are not allowed here: use secretRef
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, String>,
    /// Volume of a store with a file:// URL, mounted at the path of the URL
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<StoreVolume>,
}

/// A volume that holds a store.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.persistentVolumeClaim) != has(self.hostPath)").message("give either persistentVolumeClaim or hostPath"))]
pub struct StoreVolume {
    /// Name of a PersistentVolumeClaim
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<String>,
    /// Path of a folder on the node
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
}

/// A Secret in the same namespace. Its name becomes the end of a path in the Pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.name.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')").message("not a valid name of a Secret"))]
pub struct SecretRef {
    /// Name of the Secret
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// A condition of a policy, as in metav1.Condition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// Type: Ready, BackupReady, BackupVerified, CompactionHealthy, StoreShared or SetBack
    #[serde(rename = "type")]
    pub type_: String,
    /// Status: True, False or Unknown
    pub status: ConditionStatus,
    /// Machine-readable reason for the status
    pub reason: String,
    /// Human-readable description of the status
    pub message: String,
    /// When the status last changed
    pub last_transition_time: DateTime<Utc>,
    /// Generation of the spec for which the condition was set
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}

/// The status of a condition.
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
    /// The condition holds.
    True,
    /// The condition does not hold.
    False,
    /// There is no recent observation.
    Unknown,
}

impl ConditionStatus {
    /// The status as the API writes it.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}
