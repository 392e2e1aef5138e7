//! The Job that runs `deltafold cleanup` in the cluster, with its own rights.
//!
//! Pure functions from options to objects. Called by `cli::manifests`; `controller::cleanup` is what the Job
//! runs.

use super::rights::{binding, role, rules_of_cleanup, service_account};
use super::{CLEANUP, CleanupOptions, Document, container_security, document, pod_security};
use crate::controller::jobs::{LABEL_NAME, NAME};
use serde_json::{Value, json};

/// How long Kubernetes keeps the finished Job, so that an operator can read its log: a day.
const TTL_SECONDS: u32 = 86_400;

/// Returns the Job that cleans up after version 0.1, its ServiceAccount and its rights.
pub fn cleanup(options: &CleanupOptions) -> Vec<Document> {
    let labels = json!({LABEL_NAME: NAME, "app.kubernetes.io/component": "cleanup"});
    let metadata =
        |namespace: &str| json!({"name": CLEANUP, "namespace": namespace, "labels": labels});
    let account = (CLEANUP, options.namespace.as_str());
    let about_rights =
        "It reads only the metadata of Secrets, but RBAC cannot restrict its rights to that.";
    let mut all = vec![document("", service_account(metadata(&options.namespace)))];
    if options.watch_namespace.is_empty() {
        let metadata = json!({"name": CLEANUP, "labels": labels});
        let cluster_role = role("ClusterRole", metadata.clone(), rules_of_cleanup());
        all.push(document(about_rights, cluster_role));
        let role = ("ClusterRole", CLEANUP);
        let binding = binding("ClusterRoleBinding", metadata, role, account);
        all.push(document("", binding));
    }
    for watched in &options.watch_namespace {
        let role = role("Role", metadata(watched), rules_of_cleanup());
        all.push(document(about_rights, role));
        let binding = binding("RoleBinding", metadata(watched), ("Role", CLEANUP), account);
        all.push(document("", binding));
    }
    all.push(document(
        "",
        json!({
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": metadata(&options.namespace),
            "spec": {
                "backoffLimit": 4,
                "activeDeadlineSeconds": 3600,
                "ttlSecondsAfterFinished": TTL_SECONDS,
                "template": {
                    "metadata": {"labels": labels},
                    "spec": pod(options),
                },
            },
        }),
    ));
    all
}

fn pod(options: &CleanupOptions) -> Value {
    let mut args = vec!["cleanup".to_owned()];
    for watched in &options.watch_namespace {
        args.extend(["--namespace".to_owned(), watched.clone()]);
    }
    json!({
        "restartPolicy": "Never",
        "serviceAccountName": CLEANUP,
        "automountServiceAccountToken": true,
        "enableServiceLinks": false,
        "securityContext": pod_security(),
        "containers": [{
            "name": NAME,
            "image": options.image,
            "command": ["deltafold"],
            "args": args,
            "resources": {
                "requests": {"cpu": "50m", "memory": "64Mi", "ephemeral-storage": "16Mi"},
                "limits": {"memory": "512Mi", "ephemeral-storage": "256Mi"},
            },
            "securityContext": container_security(),
        }],
    })
}
