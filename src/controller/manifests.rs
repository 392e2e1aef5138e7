//! What is applied to a cluster by hand: the resource definitions, the controller with its rights, and samples.
//!
//! Pure: from a namespace and an image to objects and YAML. `cli::manifests` prints them, and `jobs/` holds what it
//! prints; the Helm chart there makes the same objects.

use super::api::{GROUP, crds};
use super::jobs::{LABEL_NAME, NAME};
use crate::error::{Error, Result};
use serde_json::{Value, json};

/// The namespace of the controller, if nothing else is said.
pub const NAMESPACE: &str = "deltafold-system";
/// The controller's image and that of its Jobs, if nothing else is said.
pub const IMAGE: &str = concat!("deltafold:", env!("CARGO_PKG_VERSION"));
/// The name of the controller's objects.
pub const CONTROLLER: &str = "deltafold-controller";

/// Sample policies and tasks, each a file of `jobs/samples`.
pub const SAMPLES: [(&str, &str); 5] = [
    ("local.yaml", include_str!("../../jobs/samples/local.yaml")),
    ("s3.yaml", include_str!("../../jobs/samples/s3.yaml")),
    ("azure.yaml", include_str!("../../jobs/samples/azure.yaml")),
    ("gcs.yaml", include_str!("../../jobs/samples/gcs.yaml")),
    ("tasks.yaml", include_str!("../../jobs/samples/tasks.yaml")),
];

const HOW_TO: &str = "\
# deltafold's controller: its resource definitions, its rights, and two replicas of which one leads.
#
#   deltafold manifests install | kubectl apply --server-side -f -
#
# Jobs run in the namespaces of their policies, as a user of their own. To remove it, in this order:
#   1. kubectl delete etcdbackuptasks,etcdbackuppolicies --all --all-namespaces
#      While the controller runs: it gives back the Secrets that it holds by a finalizer. Backups stay as
#      they are; CronJobs, followers and Jobs go with their policies.
#   2. deltafold manifests install | kubectl delete -f -
#      The definitions go, too, and with them what is left of policies and tasks.
# Secrets that were left with the finalizer deltafold.io/in-use are freed by hand:
#   kubectl patch secret NAME --type json -p '[{\"op\": \"remove\", \"path\": \"/metadata/finalizers\"}]'
";

const ABOUT_CRDS: &str = "\
# The definitions of EtcdBackupPolicy and EtcdBackupTask.
#
#   deltafold manifests crds | kubectl apply --server-side -f -
";

/// An object, and what to say before it.
#[derive(Debug, Clone, PartialEq)]
pub struct Document {
    /// Lines without `#`; empty for none
    pub comment: &'static str,
    /// The object
    pub object: Value,
}

fn document(comment: &'static str, object: Value) -> Document {
    Document { comment, object }
}

/// The resource definitions.
///
/// # Errors
/// `Internal`.
pub fn definitions() -> Result<Vec<Document>> {
    let crds = crds().into_iter().map(|crd| {
        let object = serde_json::to_value(crd);
        let object = object.map_err(|e| Error::internal(format!("a CRD that is no JSON: {e}")))?;
        Ok(document("", without_nulls(object)))
    });
    crds.collect()
}

/// What is not there is not written.
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

/// What the controller may do. It writes to Secrets nothing but its finalizer; it may grant what it has itself, to
/// service accounts of policies: reading and renewing Leases.
pub fn rules() -> Value {
    let rule = |group: &str, resources: &[&str], verbs: &[&str]| json!({"apiGroups": [group], "resources": resources, "verbs": verbs});
    json!([
        rule(GROUP, &["etcdbackuppolicies"], &["get", "list", "watch"]),
        rule(
            GROUP,
            &["etcdbackuptasks"],
            &["delete", "get", "list", "watch"]
        ),
        rule(
            GROUP,
            &["etcdbackuppolicies/status", "etcdbackuptasks/status"],
            &["get", "patch"]
        ),
        rule(
            GROUP,
            &[
                "etcdbackuppolicies/finalizers",
                "etcdbackuptasks/finalizers"
            ],
            &["update"]
        ),
        rule(
            "batch",
            &["cronjobs", "jobs"],
            &["create", "delete", "get", "list", "patch", "watch"]
        ),
        rule(
            "apps",
            &["deployments"],
            &["create", "delete", "get", "list", "patch", "watch"]
        ),
        rule("", &["pods"], &["get", "list", "watch"]),
        rule("", &["secrets"], &["get", "list", "patch", "watch"]),
        rule(
            "",
            &["serviceaccounts"],
            &["create", "delete", "get", "patch"]
        ),
        rule(
            "rbac.authorization.k8s.io",
            &["rolebindings", "roles"],
            &["create", "delete", "get", "patch"]
        ),
        rule(
            "coordination.k8s.io",
            &["leases"],
            &["create", "get", "list", "patch", "watch"]
        ),
        rule(
            "discovery.k8s.io",
            &["endpointslices"],
            &["get", "list", "watch"]
        ),
        rule("events.k8s.io", &["events"], &["create", "patch"]),
    ])
}

/// All that the controller needs, with the resource definitions.
///
/// # Errors
/// `Internal`.
pub fn install(namespace: &str, image: &str) -> Result<Vec<Document>> {
    let mut all = vec![document(
        "",
        json!({
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {
                "name": namespace,
                "labels": {
                    LABEL_NAME: NAME,
                    "pod-security.kubernetes.io/enforce": "restricted",
                },
            },
        }),
    )];
    all.extend(definitions()?);
    let labels = json!({
        LABEL_NAME: NAME,
        "app.kubernetes.io/component": "controller",
    });
    let metadata =
        |name: &str| json!({"name": name, "namespace": namespace, "labels": labels.clone()});
    let of_cluster = |name: &str| json!({"name": name, "labels": labels.clone()});
    all.push(document(
        "",
        json!({
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": metadata(CONTROLLER),
            "automountServiceAccountToken": false,
        }),
    ));
    all.push(document(
        "In all namespaces: a policy is acted on where it is. Of Secrets it writes the finalizer deltafold.io/in-use,\n\
         and reads which keys they have.",
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": of_cluster(CONTROLLER),
            "rules": rules(),
        }),
    ));
    all.push(document(
        "",
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": of_cluster(CONTROLLER),
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "ClusterRole",
                "name": CONTROLLER,
            },
            "subjects": [{
                "kind": "ServiceAccount",
                "name": CONTROLLER,
                "namespace": namespace,
            }],
        }),
    ));
    all.extend(for_users());
    all.push(document(
        "One replica leads, by the Lease deltafold-controller; the other stands by.",
        json!({
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata(CONTROLLER),
            "spec": {
                "replicas": 2,
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": pod(image, &labels),
                },
            },
        }),
    ));
    all.push(document(
        "",
        json!({
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(CONTROLLER),
            "spec": {"minAvailable": 1, "selector": {"matchLabels": labels}},
        }),
    ));
    all.push(document(
        "For Prometheus: /metrics at port 8080. jobs/alerts.yaml has rules.",
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(CONTROLLER),
            "spec": {
                "clusterIP": "None",
                "selector": labels,
                "ports": [{"name": "metrics", "port": 8080, "targetPort": "metrics"}],
            },
        }),
    ));
    Ok(all)
}

/// What users of a namespace may do, who have Kubernetes' own roles there.
fn for_users() -> [Document; 2] {
    let role = |name: &str, to: &[&str], verbs: &[&str]| {
        let mut labels = json!({LABEL_NAME: NAME});
        for role in to {
            labels[format!("rbac.authorization.k8s.io/aggregate-to-{role}")] = "true".into();
        }
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": name, "labels": labels},
            "rules": [{
                "apiGroups": [GROUP],
                "resources": ["etcdbackuppolicies", "etcdbackuptasks"],
                "verbs": verbs,
            }],
        })
    };
    let write = ["create", "delete", "deletecollection", "patch", "update"];
    [
        document(
            "Whoever may edit or view a namespace may do so with its policies and tasks.",
            role("deltafold-edit", &["admin", "edit"], &write),
        ),
        document(
            "",
            role(
                "deltafold-view",
                &["admin", "edit", "view"],
                &["get", "list", "watch"],
            ),
        ),
    ]
}

fn pod(image: &str, labels: &Value) -> Value {
    json!({
        "serviceAccountName": CONTROLLER,
        "automountServiceAccountToken": true,
        "enableServiceLinks": false,
        "securityContext": {
            "runAsNonRoot": true,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{
            "weight": 100,
            "podAffinityTerm": {
                "topologyKey": "kubernetes.io/hostname",
                "labelSelector": {"matchLabels": labels},
            },
        }]}},
        "containers": [{
            "name": NAME,
            "image": image,
            "command": ["deltafold"],
            "args": [
                "controller",
                "--job-image",
                image,
                "--metrics-bind-address",
                ":8080",
            ],
            "ports": [{"name": "metrics", "containerPort": 8080}],
            "livenessProbe": {"httpGet": {"path": "/healthz", "port": "metrics"}},
            "readinessProbe": {"httpGet": {"path": "/readyz", "port": "metrics"}},
            "resources": {
                "requests": {"cpu": "50m", "memory": "64Mi"},
                "limits": {"memory": "512Mi"},
            },
            "securityContext": {
                "allowPrivilegeEscalation": false,
                "readOnlyRootFilesystem": true,
                "capabilities": {"drop": ["ALL"]},
            },
        }],
    })
}

/// The YAML of `install`.
///
/// # Errors
/// `Internal`.
pub fn install_yaml(namespace: &str, image: &str) -> Result<String> {
    yaml(HOW_TO, &install(namespace, image)?)
}

/// The YAML of `crds`.
///
/// # Errors
/// `Internal`.
pub fn crds_yaml() -> Result<String> {
    yaml(ABOUT_CRDS, &definitions()?)
}

/// The YAML of `samples`.
pub fn samples_yaml() -> String {
    let texts: Vec<&str> = SAMPLES.iter().map(|(_, text)| *text).collect();
    texts.join("---\n")
}

/// The objects of `samples`.
///
/// # Errors
/// `Internal`.
pub fn samples() -> Result<Vec<Value>> {
    let text = samples_yaml();
    let documents = text.split("\n---\n").map(|document| {
        let object = yaml_serde::from_str(document);
        object.map_err(|e| Error::internal(format!("a sample that is no YAML: {e}")))
    });
    documents.collect()
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
        text.push_str(&object.map_err(|e| Error::internal(format!("no YAML: {e}")))?);
    }
    Ok(text)
}
