//! Makes an object of a backup one that an API server takes again: without what only servers and controllers set.

use super::{LAST_APPLIED, NotDecoded, Object};
use serde_json::{Map, Value, json};

/// A field that an object is brought back without.
struct Rule {
    /// The kind; empty for all.
    kind: &'static str,
    path: &'static [&'static str],
}

const fn of(kind: &'static str, path: &'static [&'static str]) -> Rule {
    Rule { kind, path }
}

/// What only a server or a controller sets. Owners and bound claims are named by UIDs: an object whose owner no longer exists
/// is deleted at once, a volume whose claim has another UID is released, and its storage deleted.
const RULES: &[Rule] = &[
    of("", &["status"]),
    of("", &["metadata", "annotations", LAST_APPLIED]),
    of("", &["metadata", "creationTimestamp"]),
    of("", &["metadata", "deletionGracePeriodSeconds"]),
    of("", &["metadata", "deletionTimestamp"]),
    of("", &["metadata", "generation"]),
    of("", &["metadata", "managedFields"]),
    of("", &["metadata", "ownerReferences"]),
    of("", &["metadata", "resourceVersion"]),
    of("", &["metadata", "selfLink"]),
    of("", &["metadata", "uid"]),
    // A claim and its volume are bound again by their names.
    of("PersistentVolume", &["spec", "claimRef", "resourceVersion"]),
    of("PersistentVolume", &["spec", "claimRef", "uid"]),
    of(
        "PersistentVolume",
        &["metadata", "annotations", BOUND_BY_CONTROLLER],
    ),
    of(
        "PersistentVolumeClaim",
        &["metadata", "annotations", BOUND_BY_CONTROLLER],
    ),
    of(
        "PersistentVolumeClaim",
        &["metadata", "annotations", "pv.kubernetes.io/bind-completed"],
    ),
    // The token of an account with another UID is deleted at once.
    of(
        "Secret",
        &[
            "metadata",
            "annotations",
            "kubernetes.io/service-account.uid",
        ],
    ),
];
const BOUND_BY_CONTROLLER: &str = "pv.kubernetes.io/bound-by-controller";
/// What each version of a definition has in v1, and the field of v1beta1 that is for all of them.
const PARTS_OF_VERSIONS: [(&str, &str); 4] = [
    ("schema", "validation"),
    ("subresources", "subresources"),
    ("additionalPrinterColumns", "additionalPrinterColumns"),
    ("selectableFields", "selectableFields"),
];
/// The labels by which a Job selects its Pods.
const JOB_LABELS: [&str; 4] = [
    "batch.kubernetes.io/controller-uid",
    "batch.kubernetes.io/job-name",
    "controller-uid",
    "job-name",
];

impl Object {
    /// Removes what only an API server or a controller sets, the status and the annotation of `kubectl apply`. Definitions
    /// become those of v1.
    ///
    /// # Errors
    /// `Items` if kubectl would take the object for a list.
    pub fn cleaned(mut self) -> Result<Self, NotDecoded> {
        if self.json.contains_key("items") && !self.kind().ends_with("List") {
            return Err(NotDecoded::Items);
        }
        let kind = self.kind().to_owned();
        for rule in RULES {
            if rule.kind.is_empty() || rule.kind == kind {
                remove(&mut self.json, rule.path);
            }
        }
        if kind == "Job" {
            self.clean_job();
        }
        if self.api_version() == "apiextensions.k8s.io/v1beta1" {
            upgrade_definition(&mut self.json);
        }
        Ok(self)
    }

    /// Removes the selector of a Job, which the server makes from the UID unless the user asks for another one.
    fn clean_job(&mut self) {
        for label in JOB_LABELS {
            remove(&mut self.json, &["metadata", "labels", label]);
        }
        let spec = self.json.get("spec");
        if spec.and_then(|spec| spec.get("manualSelector")) == Some(&Value::Bool(true)) {
            return;
        }
        remove(&mut self.json, &["spec", "selector"]);
        for label in JOB_LABELS {
            remove(
                &mut self.json,
                &["spec", "template", "metadata", "labels", label],
            );
        }
    }
}

/// Makes a CustomResourceDefinition of v1beta1 one of v1. API servers store all in v1beta1 (as of 1.36), and take v1 alone.
/// Source: `apiextensions-apiserver`, `apis/apiextensions/v1beta1/conversion.go`.
fn upgrade_definition(definition: &mut Map<String, Value>) {
    definition.insert("apiVersion".to_owned(), "apiextensions.k8s.io/v1".into());
    let Some(Value::Object(spec)) = definition.get_mut("spec") else {
        return;
    };
    let name = spec.remove("version");
    let keeps_unknown = spec.remove("preserveUnknownFields") == Some(Value::Bool(true));
    let of_all = PARTS_OF_VERSIONS.map(|(part, field)| (part, spec.remove(field)));
    let versions = spec.entry("versions").or_insert_with(|| {
        let only = json!({"name": name, "served": true, "storage": true});
        Value::Array(vec![only])
    });
    for version in versions.as_array_mut().into_iter().flatten() {
        let Value::Object(version) = version else {
            continue;
        };
        for (part, value) in &of_all {
            if let Some(value) = value {
                version.entry(*part).or_insert_with(|| value.clone());
            }
        }
        let columns = version.get_mut("additionalPrinterColumns");
        for column in columns.and_then(Value::as_array_mut).into_iter().flatten() {
            if let Value::Object(column) = column
                && let Some(path) = column.remove("JSONPath")
            {
                column.insert("jsonPath".to_owned(), path);
            }
        }
        let has_schema = version.contains_key("schema");
        let schema = version
            .entry("schema")
            .or_insert_with(|| json!({"openAPIV3Schema": {"type": "object"}}));
        if let Some(Value::Object(schema)) = schema.get_mut("openAPIV3Schema")
            && (keeps_unknown || !has_schema)
        {
            let keeps = "x-kubernetes-preserve-unknown-fields".to_owned();
            schema.insert(keeps, Value::Bool(true));
        }
    }
    if let Some(Value::Object(conversion)) = spec.get_mut("conversion") {
        let reviews = conversion.remove("conversionReviewVersions");
        if let Some(client) = conversion.remove("webhookClientConfig") {
            let webhook = json!({"clientConfig": client, "conversionReviewVersions": reviews});
            conversion.insert("webhook".to_owned(), webhook);
        }
    }
}

/// Removes a field, and the map in which it was if nothing is left of it.
fn remove(json: &mut Map<String, Value>, path: &[&str]) {
    match path {
        [] => {}
        [field] => _ = json.remove(*field),
        [parent, rest @ ..] => {
            if let Some(Value::Object(map)) = json.get_mut(*parent) {
                remove(map, rest);
                if map.is_empty() && rest.len() == 1 {
                    json.remove(*parent);
                }
            }
        }
    }
}
