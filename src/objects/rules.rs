//! How an object of a backup becomes one that an API server takes again: which fields it is without, which objects are left
//! out, and in which order they go in. `get --clean` and `recover` share the rules.

use super::{LAST_APPLIED, NotDecoded, Object};
use serde_json::{Map, Value, json};

/// A field that an object is brought back without.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    /// The kind, with its group after a dot; empty for all.
    pub kind: &'static str,
    /// The names of the field and of those around it.
    pub path: &'static [&'static str],
    /// Why, for people; empty for what the server sets in every object.
    pub why: &'static str,
}

const fn all(path: &'static [&'static str]) -> Rule {
    of("", path, "")
}

const fn of(kind: &'static str, path: &'static [&'static str], why: &'static str) -> Rule {
    Rule { kind, path, why }
}

/// What only a server or a controller sets. Owners and bound claims are named by UIDs: an object whose owner no longer exists
/// is deleted at once, a volume whose claim has another UID is released, and its storage deleted.
pub const RULES: &[Rule] = &[
    all(&["status"]),
    all(&["metadata", "annotations", LAST_APPLIED]),
    all(&["metadata", "creationTimestamp"]),
    all(&["metadata", "deletionGracePeriodSeconds"]),
    all(&["metadata", "deletionTimestamp"]),
    all(&["metadata", "generation"]),
    all(&["metadata", "managedFields"]),
    all(&["metadata", "ownerReferences"]),
    all(&["metadata", "resourceVersion"]),
    all(&["metadata", "selfLink"]),
    all(&["metadata", "uid"]),
    of(
        "",
        FINALIZERS,
        "who would remove it may be gone: `recover --keep-finalizers` keeps it",
    ),
    of("Namespace", &["spec", "finalizers"], "the server sets it"),
    of(
        "PersistentVolume",
        &["spec", "claimRef", "resourceVersion"],
        BOUND_BY_NAME,
    ),
    of(
        "PersistentVolume",
        &["spec", "claimRef", "uid"],
        BOUND_BY_NAME,
    ),
    of(
        "PersistentVolume",
        &["metadata", "annotations", BOUND_BY_CONTROLLER],
        BOUND_BY_NAME,
    ),
    of(
        "PersistentVolumeClaim",
        &["metadata", "annotations", BOUND_BY_CONTROLLER],
        BOUND_BY_NAME,
    ),
    of(
        "PersistentVolumeClaim",
        &["metadata", "annotations", "pv.kubernetes.io/bind-completed"],
        BOUND_BY_NAME,
    ),
    of(
        "PersistentVolumeClaim",
        &[
            "metadata",
            "annotations",
            "volume.kubernetes.io/selected-node",
        ],
        "the scheduler chooses a node",
    ),
    of(
        "Secret",
        &[
            "metadata",
            "annotations",
            "kubernetes.io/service-account.uid",
        ],
        "the account has another UID",
    ),
    of("Pod", &["spec", "nodeName"], "the scheduler chooses a node"),
    of(
        "Pod",
        &["spec", "ephemeralContainers"],
        "no Pod begins with them",
    ),
    of(
        "Deployment.apps",
        &[
            "metadata",
            "annotations",
            "deployment.kubernetes.io/revision",
        ],
        "the controller counts anew",
    ),
];
const FINALIZERS: &[&str] = &["metadata", "finalizers"];
const BOUND_BY_NAME: &str = "claim and volume are bound again by their names";

/// Kinds that are never recovered, and why.
pub const NEVER: &[(&str, &str)] = &[
    (
        "CertificateSigningRequest.certificates.k8s.io",
        "its client asks anew",
    ),
    ("CSINode.storage.k8s.io", "its node registers it"),
    ("CSIStorageCapacity.storage.k8s.io", "its driver makes it"),
    ("Endpoints", "a controller derives it from Service and Pods"),
    ("Event", "it tells what happened, and expires"),
    ("Event.events.k8s.io", "it tells what happened, and expires"),
    ("IPAddress.networking.k8s.io", "it comes with its Service"),
    ("Lease.coordination.k8s.io", "its holder makes it anew"),
    (
        "LeaseCandidate.coordination.k8s.io",
        "its holder makes it anew",
    ),
    ("Node", "its kubelet registers it"),
    (
        "PodCertificateRequest.certificates.k8s.io",
        "its client asks anew",
    ),
    ("ResourceSlice.resource.k8s.io", "its driver makes it"),
    (
        "StorageVersion.internal.apiserver.k8s.io",
        "API servers make it",
    ),
    (
        "VolumeAttachment.storage.k8s.io",
        "a controller makes it anew",
    ),
];
const TOKEN: &str = "kubernetes.io/service-account-token";
const OLD_TOKEN: &str = "its token is that of an account with another UID";

/// Kinds that a controller makes anew if one of their objects has an owner.
pub const MADE_BY_OWNER: &[&str] = &[
    "ControllerRevision.apps",
    "EndpointSlice.discovery.k8s.io",
    "Job.batch",
    "Pod",
    "ReplicaSet.apps",
    "ReplicationController",
    "ResourceClaim.resource.k8s.io",
];

/// The kinds in the order in which they are brought back; `""` is all others.
pub const ORDER: &[&str] = &[
    "Namespace",
    "CustomResourceDefinition.apiextensions.k8s.io",
    "PriorityClass.scheduling.k8s.io",
    "RuntimeClass.node.k8s.io",
    "StorageClass.storage.k8s.io",
    "IngressClass.networking.k8s.io",
    "ClusterRole.rbac.authorization.k8s.io",
    "Role.rbac.authorization.k8s.io",
    "ServiceAccount",
    "ClusterRoleBinding.rbac.authorization.k8s.io",
    "RoleBinding.rbac.authorization.k8s.io",
    "Secret",
    "ConfigMap",
    "LimitRange",
    "NetworkPolicy.networking.k8s.io",
    "PersistentVolume",
    "PersistentVolumeClaim",
    "Service",
    "",
    "Pod",
    "ReplicationController",
    "ReplicaSet.apps",
    "Deployment.apps",
    "StatefulSet.apps",
    "DaemonSet.apps",
    "Job.batch",
    "CronJob.batch",
    "HorizontalPodAutoscaler.autoscaling",
    "PodDisruptionBudget.policy",
    "Ingress.networking.k8s.io",
    // What exists already is no longer measured by it.
    "ResourceQuota",
    "APIService.apiregistration.k8s.io",
    "ValidatingAdmissionPolicyBinding.admissionregistration.k8s.io",
    "MutatingAdmissionPolicyBinding.admissionregistration.k8s.io",
    // Until the servers behind them run, they would refuse everything.
    "MutatingWebhookConfiguration.admissionregistration.k8s.io",
    "ValidatingWebhookConfiguration.admissionregistration.k8s.io",
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
    /// Removes what only an API server or a controller sets, the status, finalizers and the annotation of `kubectl apply`.
    /// Definitions become those of v1.
    ///
    /// # Errors
    /// `Items` if kubectl would take the object for a list.
    pub fn cleaned(self) -> Result<Self, NotDecoded> {
        if self.json.contains_key("items") && !self.kind().ends_with("List") {
            return Err(NotDecoded::Items);
        }
        Ok(self.recoverable(false).0)
    }

    /// Does what [`cleaned`](Self::cleaned) does, to an object that goes to an API server. Also returns the fields that it is
    /// without beside those that the server sets in every object.
    pub fn recoverable(mut self, keep_finalizers: bool) -> (Self, Vec<String>) {
        let kind = self.kind_and_group();
        let mut without = Vec::new();
        for rule in RULES {
            let is_kept = keep_finalizers && rule.path == FINALIZERS;
            if !(rule.kind.is_empty() || rule.kind == kind) || is_kept {
                continue;
            }
            let is_removed = remove(&mut self.json, rule.path);
            if is_removed && !rule.why.is_empty() {
                without.push(rule.path.join("."));
            }
        }
        if kind == "Job.batch" {
            self.clean_job();
        }
        if self.api_version() == "apiextensions.k8s.io/v1beta1" {
            upgrade_definition(&mut self.json);
        }
        (self, without)
    }

    /// Removes the cluster IPs and node ports of a Service, so that the server chooses them. Returns whether it had some.
    pub fn forget_addresses(&mut self) -> bool {
        if self.kind_and_group() != "Service" {
            return false;
        }
        let Some(Value::Object(spec)) = self.json.get_mut("spec") else {
            return false;
        };
        let mut had = spec.remove("healthCheckNodePort").is_some();
        if spec.get("clusterIP").is_some_and(|ip| ip != "None") {
            had |= spec.remove("clusterIP").is_some();
            spec.remove("clusterIPs");
        }
        let ports = spec.get_mut("ports").and_then(Value::as_array_mut);
        for port in ports.into_iter().flatten().filter_map(Value::as_object_mut) {
            had |= port.remove("nodePort").is_some();
        }
        had
    }

    /// Returns why an object is never recovered; `None` if it is.
    pub fn never_recovered(&self) -> Option<&'static str> {
        let kind = self.kind_and_group();
        if kind == "Secret" && self.text("type") == TOKEN {
            return Some(OLD_TOKEN);
        }
        let never = NEVER.iter().find(|(never, _)| *never == kind);
        never.map(|(_, why)| *why)
    }

    /// Returns why an object need not be recovered unless it is named; `None` if it need be.
    pub fn recovered_if_named(&self) -> Option<String> {
        let kind = self.kind_and_group();
        if MADE_BY_OWNER.contains(&kind.as_str())
            && let Some(owner) = self.owners().first()
        {
            return Some(format!("its {} makes it anew", owner.kind));
        }
        let status = |field| self.json.get("status").and_then(|s| s.get(field));
        let phase = status("phase").and_then(Value::as_str);
        let is_finished = match kind.as_str() {
            "Job.batch" => status("completionTime").is_some(),
            "Pod" => matches!(phase, Some("Succeeded" | "Failed")),
            _ => false,
        };
        is_finished.then(|| "it had finished, and would run again".to_owned())
    }

    /// Returns the place of the kind in the order in which objects are recovered.
    pub fn order(&self) -> usize {
        let kind = self.kind_and_group();
        let nth = |kind: &str| ORDER.iter().position(|k| *k == kind);
        nth(&kind).or_else(|| nth("")).unwrap_or_default()
    }

    /// Whether objects of other kinds need it before: a namespace, or a definition.
    pub fn is_ground_for_others(&self) -> bool {
        self.order() < 2
    }

    /// Returns the kind, and after a dot its group, if it has one.
    pub fn kind_and_group(&self) -> String {
        match self.group() {
            "" => self.kind().to_owned(),
            group => format!("{}.{group}", self.kind()),
        }
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

/// Removes a field. If the map around it is empty then, removes that, too. Returns whether the field was there.
fn remove(json: &mut Map<String, Value>, path: &[&str]) -> bool {
    match path {
        [] => false,
        [field] => json.remove(*field).is_some(),
        [parent, rest @ ..] => {
            let Some(Value::Object(map)) = json.get_mut(*parent) else {
                return false;
            };
            let is_removed = remove(map, rest);
            if map.is_empty() && rest.len() == 1 {
                json.remove(*parent);
            }
            is_removed
        }
    }
}
