//! Manifests for a cluster: resource definitions, the controller with its rights, and samples.
//!
//! Pure functions from options to objects and YAML; nothing is sent to a cluster. `cli::manifests` prints
//! them. The files in `jobs/` are that output, and the Helm chart there contains the same objects; tests
//! compare them.

mod install;
mod options;
mod rights;

pub use install::{install, namespace};
pub use options::InstallOptions;
pub use rights::{rules, rules_of_all_namespaces, rules_of_jobs, rules_of_leader};

use super::api::{GROUP, crds};
use super::jobs::JOBS_ACCOUNT;
use crate::error::{Error, Result};
use serde_json::{Value, json};

/// The default namespace of the controller.
pub const NAMESPACE: &str = "deltafold-system";
/// The default image of the controller and of its Jobs.
pub const IMAGE: &str = concat!("deltafold:", env!("CARGO_PKG_VERSION"));
/// The name of the controller's objects.
pub const CONTROLLER: &str = "deltafold-controller";
/// The name of the Jobs' ClusterRole, and in each namespace of their ServiceAccount and RoleBinding.
pub const JOBS: &str = JOBS_ACCOUNT;

/// The sample policies and tasks, by the names of their files in `jobs/samples`.
pub const SAMPLES: [(&str, &str); 5] = [
    (
        "local.yaml",
        include_str!("../../../jobs/samples/local.yaml"),
    ),
    ("s3.yaml", include_str!("../../../jobs/samples/s3.yaml")),
    (
        "azure.yaml",
        include_str!("../../../jobs/samples/azure.yaml"),
    ),
    ("gcs.yaml", include_str!("../../../jobs/samples/gcs.yaml")),
    (
        "tasks.yaml",
        include_str!("../../../jobs/samples/tasks.yaml"),
    ),
];

const ABOUT_INSTALL: &str = "\
# The controller of deltafold: its resource definitions, its rights, and two replicas: a leader and a standby.
#
#   deltafold manifests install | kubectl apply --server-side -f -
#
# With --watch-namespace the controller has rights in the named namespaces only. Jobs run in the namespaces of their
# policies, under a ServiceAccount of their own.
#
# To change from all namespaces to named ones, apply this, and then:
#   kubectl delete clusterrolebinding,clusterrole deltafold-controller
#
# To uninstall, in this order:
#   1. kubectl delete etcdbackuptasks,etcdbackuppolicies --all --all-namespaces
#      Kubernetes deletes the CronJobs, followers and Jobs with their policies. Backups are not deleted.
#   2. deltafold manifests install | kubectl delete -f -
#      This also deletes the resource definitions, and with them any remaining policies and tasks.
";

const ABOUT_NAMESPACE: &str = "\
# The objects that Jobs need in a namespace with policies. A controller that watches all namespaces creates the first
# two itself.
#
#   deltafold manifests namespace NAMESPACE | kubectl apply --server-side -f -
";

const ABOUT_CRDS: &str = "\
# The definitions of EtcdBackupPolicy and EtcdBackupTask.
#
#   deltafold manifests crds | kubectl apply --server-side -f -
";

/// An object with a comment.
#[derive(Debug, Clone, PartialEq)]
pub struct Document {
    /// The lines of the comment, without `#`; empty for none
    pub comment: &'static str,
    /// The object
    pub object: Value,
}

fn document(comment: &'static str, object: Value) -> Document {
    Document { comment, object }
}

/// Returns the resource definitions.
///
/// # Errors
/// `Internal` if a definition cannot be converted to JSON.
pub fn definitions() -> Result<Vec<Document>> {
    let mut documents = Vec::new();
    for crd in crds() {
        let object = serde_json::to_value(crd);
        let object =
            object.map_err(|e| Error::internal(format!("cannot convert a CRD to JSON: {e}")))?;
        documents.push(document("", without_nulls(object)));
    }
    Ok(documents)
}

fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let fields = fields.into_iter().filter(|(_, v)| !v.is_null());
            fields.map(|(k, v)| (k, without_nulls(v))).collect()
        }
        Value::Array(items) => items.into_iter().map(without_nulls).collect(),
        other => other,
    }
}

fn pod_security() -> Value {
    json!({
        "runAsNonRoot": true,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    })
}

fn container_security() -> Value {
    json!({
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "capabilities": {"drop": ["ALL"]},
    })
}

/// Returns the YAML of [`install`].
///
/// # Errors
/// `Internal` if an object cannot be converted to JSON or YAML.
pub fn install_yaml(options: &InstallOptions) -> Result<String> {
    yaml(ABOUT_INSTALL, &install(options)?)
}

/// Returns the YAML of [`namespace`].
///
/// # Errors
/// `Internal` if an object cannot be converted to YAML.
pub fn namespace_yaml(name: &str) -> Result<String> {
    yaml(ABOUT_NAMESPACE, &namespace(name))
}

/// Returns the YAML of [`definitions`].
///
/// # Errors
/// `Internal` if a definition cannot be converted to JSON or YAML.
pub fn crds_yaml() -> Result<String> {
    yaml(ABOUT_CRDS, &definitions()?)
}

/// Returns the YAML of all [`SAMPLES`].
pub fn samples_yaml() -> String {
    let texts: Vec<&str> = SAMPLES.iter().map(|(_, text)| *text).collect();
    texts.join("---\n")
}

/// Returns the objects of all [`SAMPLES`].
///
/// # Errors
/// `Internal` if a sample is not valid YAML.
pub fn samples() -> Result<Vec<Value>> {
    let mut objects = Vec::new();
    for document in samples_yaml().split("\n---\n") {
        let object = yaml_serde::from_str(document);
        let object =
            object.map_err(|e| Error::internal(format!("a sample is not valid YAML: {e}")))?;
        objects.push(object);
    }
    Ok(objects)
}

fn yaml(head: &str, documents: &[Document]) -> Result<String> {
    let mut text = head.to_owned();
    for (n, document) in documents.iter().enumerate() {
        if n > 0 {
            text.push_str("---\n");
        }
        for line in document.comment.lines() {
            text.push_str(&format!("# {line}\n"));
        }
        let object = yaml_serde::to_string(&document.object);
        let object = object
            .map_err(|e| Error::internal(format!("cannot convert an object to YAML: {e}")))?;
        text.push_str(&object);
    }
    Ok(text)
}
