//! Makes an object of a backup one that `kubectl apply` takes: without what only an API server or a controller sets.

use super::{LAST_APPLIED, Object};
use serde_json::{Map, Value};

/// The fields of the metadata that a server sets. Owners are named by UIDs: an object whose owner no longer exists
/// would be deleted at once.
const METADATA: [&str; 9] = [
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "generation",
    "managedFields",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
    "uid",
];
/// The labels by which a Job selects its Pods.
const JOB_LABELS: [&str; 4] = [
    "batch.kubernetes.io/controller-uid",
    "batch.kubernetes.io/job-name",
    "controller-uid",
    "job-name",
];

impl Object {
    /// Removes what only an API server or a controller sets, the status and the annotation of `kubectl apply`.
    pub fn clean(&mut self) {
        self.json.remove("status");
        if let Some(metadata) = self.metadata() {
            for field in METADATA {
                metadata.remove(field);
            }
            remove_from(metadata, "annotations", &[LAST_APPLIED]);
        }
        if self.kind() == "Job" {
            self.clean_job();
        }
    }

    /// Removes the selector of a Job, which the server makes from the UID unless the user asks for another one.
    fn clean_job(&mut self) {
        if let Some(metadata) = self.metadata() {
            remove_from(metadata, "labels", &JOB_LABELS);
        }
        let Some(Value::Object(spec)) = self.json.get_mut("spec") else {
            return;
        };
        if spec.get("manualSelector") == Some(&Value::Bool(true)) {
            return;
        }
        spec.remove("selector");
        if let Some(Value::Object(metadata)) = spec
            .get_mut("template")
            .and_then(|template| template.get_mut("metadata"))
        {
            remove_from(metadata, "labels", &JOB_LABELS);
        }
    }
}

/// Removes keys from a map in a field, and the field if nothing is left.
fn remove_from(parent: &mut Map<String, Value>, field: &str, keys: &[&str]) {
    let Some(Value::Object(map)) = parent.get_mut(field) else {
        return;
    };
    for key in keys {
        map.remove(*key);
    }
    if map.is_empty() {
        parent.remove(field);
    }
}
