//! Kinds of Kubernetes objects: their names, and the prefixes of their keys in etcd.
//!
//! Kubernetes' own kinds are listed here; those of custom resources come from the CustomResourceDefinitions in a
//! backup.
//!
//! Sources: the discovery of API servers (names), apiserver's `DefaultStorageFactory` and apiextensions-apiserver
//! (places in etcd).

use super::Object;
use super::key::EtcdPrefixes;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::fmt;

/// The place of the CustomResourceDefinitions, below the prefix of the API server.
pub const DEFINITIONS: &str = "apiextensions.k8s.io/customresourcedefinitions";

/// The largest number of columns of a kind. A definition of 1.5 MB could have 20,000, each with a whole object.
const MAX_COLUMNS: usize = 32;

/// A kind of objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resource {
    /// The kind, such as `Deployment`.
    pub kind: Cow<'static, str>,
    /// The API group; empty for the core group.
    pub group: Cow<'static, str>,
    /// The plural, such as `deployments`.
    pub plural: String,
    /// Other names in lower case: the singular and short ones.
    names: Vec<Cow<'static, str>>,
    /// Whether a CustomResourceDefinition defines it.
    pub is_custom: bool,
    /// Whether its objects have a namespace.
    pub is_namespaced: bool,
    /// The place of its objects, below the prefix of the API server.
    path: String,
    /// What `kubectl get` shows of a custom resource.
    pub columns: Vec<PrinterColumn>,
}

/// A column of a table of custom resources.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrinterColumn {
    /// The header.
    pub name: String,
    /// Where the value is in an object: Kubernetes' JSONPath.
    pub json_path: String,
    /// Whether the value is a time, which is shown as an age.
    pub is_date: bool,
    /// Whether only a wide table has it.
    pub is_wide: bool,
}

/// Kubernetes' own kinds: kind, group, short names, and whether they have a namespace. Kinds that no version stores any
/// more come last.
const BUILT_IN: &[(&str, &str, &[&str], bool)] = &[
    ("ConfigMap", "", &["cm"], true),
    ("Endpoints", "", &["ep"], true),
    ("Event", "", &["ev"], true),
    ("LimitRange", "", &["limits"], true),
    ("Namespace", "", &["ns"], false),
    ("Node", "", &["no", "minion", "minions"], false),
    ("PersistentVolume", "", &["pv"], false),
    ("PersistentVolumeClaim", "", &["pvc"], true),
    ("Pod", "", &["po"], true),
    ("PodTemplate", "", &[], true),
    ("ReplicationController", "", &["rc"], true),
    ("ResourceQuota", "", &["quota"], true),
    ("Secret", "", &[], true),
    ("Service", "", &["svc"], true),
    ("ServiceAccount", "", &["sa"], true),
    (
        "MutatingAdmissionPolicy",
        "admissionregistration.k8s.io",
        &[],
        false,
    ),
    (
        "MutatingAdmissionPolicyBinding",
        "admissionregistration.k8s.io",
        &[],
        false,
    ),
    (
        "MutatingWebhookConfiguration",
        "admissionregistration.k8s.io",
        &[],
        false,
    ),
    (
        "ValidatingAdmissionPolicy",
        "admissionregistration.k8s.io",
        &[],
        false,
    ),
    (
        "ValidatingAdmissionPolicyBinding",
        "admissionregistration.k8s.io",
        &[],
        false,
    ),
    (
        "ValidatingWebhookConfiguration",
        "admissionregistration.k8s.io",
        &[],
        false,
    ),
    (
        "CustomResourceDefinition",
        "apiextensions.k8s.io",
        &["crd", "crds"],
        false,
    ),
    ("APIService", "apiregistration.k8s.io", &[], false),
    ("ControllerRevision", "apps", &[], true),
    ("DaemonSet", "apps", &["ds"], true),
    ("Deployment", "apps", &["deploy"], true),
    ("ReplicaSet", "apps", &["rs"], true),
    ("StatefulSet", "apps", &["sts"], true),
    ("HorizontalPodAutoscaler", "autoscaling", &["hpa"], true),
    ("CronJob", "batch", &["cj"], true),
    ("Job", "batch", &[], true),
    (
        "CertificateSigningRequest",
        "certificates.k8s.io",
        &["csr"],
        false,
    ),
    ("ClusterTrustBundle", "certificates.k8s.io", &[], false),
    ("PodCertificateRequest", "certificates.k8s.io", &[], true),
    ("Lease", "coordination.k8s.io", &[], true),
    ("LeaseCandidate", "coordination.k8s.io", &[], true),
    ("EndpointSlice", "discovery.k8s.io", &[], true),
    ("FlowSchema", "flowcontrol.apiserver.k8s.io", &[], false),
    (
        "PriorityLevelConfiguration",
        "flowcontrol.apiserver.k8s.io",
        &[],
        false,
    ),
    ("StorageVersion", "internal.apiserver.k8s.io", &[], false),
    ("Ingress", "networking.k8s.io", &["ing"], true),
    ("IngressClass", "networking.k8s.io", &[], false),
    ("IPAddress", "networking.k8s.io", &["ip"], false),
    ("NetworkPolicy", "networking.k8s.io", &["netpol"], true),
    ("ServiceCIDR", "networking.k8s.io", &[], false),
    ("RuntimeClass", "node.k8s.io", &[], false),
    ("PodDisruptionBudget", "policy", &["pdb"], true),
    ("ClusterRole", "rbac.authorization.k8s.io", &[], false),
    (
        "ClusterRoleBinding",
        "rbac.authorization.k8s.io",
        &[],
        false,
    ),
    ("Role", "rbac.authorization.k8s.io", &[], true),
    ("RoleBinding", "rbac.authorization.k8s.io", &[], true),
    ("DeviceClass", "resource.k8s.io", &[], false),
    ("DeviceTaintRule", "resource.k8s.io", &[], false),
    ("ResourceClaim", "resource.k8s.io", &[], true),
    ("ResourceClaimTemplate", "resource.k8s.io", &[], true),
    ("ResourceSlice", "resource.k8s.io", &[], false),
    ("PodGroup", "scheduling.k8s.io", &[], true),
    ("PriorityClass", "scheduling.k8s.io", &["pc"], false),
    ("Workload", "scheduling.k8s.io", &[], true),
    ("CSIDriver", "storage.k8s.io", &[], false),
    ("CSINode", "storage.k8s.io", &[], false),
    ("CSIStorageCapacity", "storage.k8s.io", &[], true),
    ("StorageClass", "storage.k8s.io", &["sc"], false),
    ("VolumeAttachment", "storage.k8s.io", &[], false),
    ("VolumeAttributesClass", "storage.k8s.io", &["vac"], false),
    (
        "StorageVersionMigration",
        "storagemigration.k8s.io",
        &[],
        false,
    ),
    ("ClusterCIDR", "networking.k8s.io", &["cc"], false),
    ("PodSecurityPolicy", "policy", &["psp"], false),
    ("PodSchedulingContext", "resource.k8s.io", &[], true),
    ("ResourceClass", "resource.k8s.io", &[], false),
];

impl Resource {
    /// Kubernetes' own kinds.
    pub fn built_in() -> impl Iterator<Item = Resource> {
        BUILT_IN.iter().map(|&(kind, group, short, is_namespaced)| {
            let singular = kind.to_lowercase();
            let plural = plural(&singular);
            let path = match plural.as_str() {
                "customresourcedefinitions" => DEFINITIONS,
                "apiservices" => "apiregistration.k8s.io/apiservices",
                "endpoints" => "services/endpoints",
                "ingresses" => "ingress",
                "nodes" => "minions",
                "podsecuritypolicies" => "podsecuritypolicy",
                "replicationcontrollers" => "controllers",
                "services" => "services/specs",
                other => other,
            };
            let short = short.iter().map(|&name| Cow::Borrowed(name));
            Resource {
                kind: kind.into(),
                group: group.into(),
                path: path.to_owned(),
                names: std::iter::once(singular.into()).chain(short).collect(),
                plural,
                is_custom: false,
                is_namespaced,
                columns: Vec::new(),
            }
        })
    }

    /// Returns the kind that a CustomResourceDefinition defines; `None` if it lacks a name.
    pub fn of_definition(definition: &Object) -> Option<Resource> {
        let spec = definition.json.get("spec")?;
        let names = spec.get("names")?;
        let text = |value: &Value, field: &str| Some(value.get(field)?.as_str()?.to_owned());
        let (kind, plural, group) = (
            text(names, "kind")?,
            text(names, "plural")?,
            text(spec, "group")?,
        );
        let singular = text(names, "singular").unwrap_or_default();
        let short = names.get("shortNames").and_then(Value::as_array);
        let short = short.into_iter().flatten().filter_map(Value::as_str);
        let names = [kind.to_lowercase(), singular.to_lowercase()];
        let all = names.into_iter().chain(short.map(str::to_lowercase));
        Some(Resource {
            names: all
                .filter(|name| !name.is_empty())
                .map(Cow::Owned)
                .collect(),
            kind: kind.into(),
            is_custom: true,
            is_namespaced: spec.get("scope").and_then(Value::as_str) == Some("Namespaced"),
            path: format!("{group}/{plural}"),
            columns: printer_columns(spec),
            group: group.into(),
            plural,
        })
    }

    /// A kind that no definition names, by the place of its objects: `GROUP/PLURAL`, or `PLURAL`.
    pub fn without_definition(path: &str, is_namespaced: bool) -> Resource {
        let (group, plural) = path.split_once('/').unwrap_or(("", path));
        Resource {
            kind: plural.to_owned().into(),
            group: group.to_owned().into(),
            plural: plural.to_owned(),
            names: Vec::new(),
            is_custom: true,
            is_namespaced,
            path: path.to_owned(),
            columns: Vec::new(),
        }
    }

    /// Whether its objects have this place, below the prefix of the API server.
    pub fn is_at(&self, path: &str) -> bool {
        self.path == path
    }

    /// Whether a name in lower case, with or without a group after a dot, means this kind.
    pub(super) fn is_called(&self, name: &str) -> bool {
        let is_name = |name: &str| self.plural == name || self.names.iter().any(|n| n == name);
        // kubectl also writes the version between them: deployments.v1.apps.
        let is_group = |group: &str| {
            let versioned = group.split_once('.');
            self.group == group
                || versioned
                    .is_some_and(|(version, group)| version.starts_with('v') && self.group == group)
        };
        is_name(name)
            || name
                .split_once('.')
                .is_some_and(|(name, group)| is_name(name) && is_group(group))
    }

    /// What `get` calls the kind of an object: the kind in lower case, with the group of a custom resource, because only
    /// those share a kind with others.
    pub fn reference(&self) -> String {
        let kind = self.kind.to_lowercase();
        if self.is_custom && !self.group.is_empty() {
            format!("{kind}.{}", self.group)
        } else {
            kind
        }
    }

    /// Returns the name before that of an object in tables and lists, as in kubectl: `pod`, `deployment.apps`.
    pub fn name_in_output(&self) -> String {
        let kind = self.kind.to_lowercase();
        if self.group.is_empty() {
            return kind;
        }
        format!("{kind}.{}", self.group)
    }

    /// Whether its objects are written all the time: Events, and the Leases of nodes and controllers.
    pub fn changes_all_the_time(&self) -> bool {
        changes_all_the_time(&self.plural)
    }

    /// The name that means this kind alone.
    pub fn full_name(&self) -> String {
        if self.group.is_empty() {
            self.plural.clone()
        } else {
            format!("{}.{}", self.plural, self.group)
        }
    }

    /// Returns what the keys of all objects begin with, or of those in a namespace.
    pub fn prefixes(&self, of: &EtcdPrefixes, namespace: Option<&str>) -> Vec<Vec<u8>> {
        let below = |prefix| self.prefix(prefix, namespace).into_bytes();
        of.iter().map(below).collect()
    }

    /// Returns what the keys of all objects begin with, or of those in a namespace. `prefix` is that of the API server,
    /// such as `/registry`.
    pub fn prefix(&self, prefix: &str, namespace: Option<&str>) -> String {
        let prefix = prefix.trim_end_matches('/');
        let mut keys = format!("{prefix}/{}/", self.path);
        if let Some(namespace) = namespace {
            keys.extend([namespace, "/"]);
        }
        keys
    }
}

/// The names of the objects of keys.
pub struct KeyNames(Vec<(String, Resource)>);

impl KeyNames {
    /// Names the objects of these kinds.
    pub fn new(resources: impl IntoIterator<Item = Resource>, prefixes: &EtcdPrefixes) -> Self {
        let mut named = Vec::new();
        for resource in resources {
            let below = |prefix| (resource.prefix(prefix, None), resource.clone());
            named.extend(prefixes.iter().map(below));
        }
        KeyNames(named)
    }

    /// Whether a key is one of an API server, and of none of these kinds.
    pub fn lacks(&self, key: &[u8], prefixes: &EtcdPrefixes) -> bool {
        prefixes.of_key(key).is_some() && self.object(key).is_none()
    }

    /// Returns the object of a key; `None` if the key is not one of these kinds.
    pub fn object<'a>(&'a self, key: &'a [u8]) -> Option<ObjectName<'a>> {
        let key = std::str::from_utf8(key).ok()?;
        self.0.iter().find_map(|(prefix, resource)| {
            let rest = key.strip_prefix(prefix.as_str())?;
            let (namespace, name) = match rest.split_once('/') {
                Some((namespace, name)) => (Some(namespace), name),
                None => (None, rest),
            };
            Some(ObjectName {
                resource,
                namespace,
                name,
            })
        })
    }
}

/// The name of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectName<'a> {
    /// The kind.
    pub resource: &'a Resource,
    /// The namespace; `None` if the kind has none.
    pub namespace: Option<&'a str>,
    /// The name.
    pub name: &'a str,
}

/// The text by which `get` finds the object.
impl fmt::Display for ObjectName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.resource.reference())?;
        if let Some(namespace) = self.namespace {
            write!(f, "/{namespace}")?;
        }
        write!(f, "/{}", self.name)
    }
}

/// Whether objects of a resource are written all the time: Events, Leases, and those that API servers have of themselves.
pub fn changes_all_the_time(resource: &str) -> bool {
    matches!(
        resource,
        "events" | "leases" | "masterleases" | "peerserverleases"
    )
}

/// Returns the kinds that have a name.
pub fn called<'r>(resources: &'r [Resource], name: &str) -> impl Iterator<Item = &'r Resource> {
    let name = name.to_lowercase();
    resources.iter().filter(move |r| r.is_called(&name))
}

/// The English plural, by the rule of Kubernetes' own kinds.
fn plural(singular: &str) -> String {
    if singular == "endpoints" {
        singular.to_owned()
    } else if let Some(stem) = singular.strip_suffix('y') {
        format!("{stem}ies")
    } else if singular.ends_with('s') {
        format!("{singular}es")
    } else {
        format!("{singular}s")
    }
}

/// The printer columns of the stored version, or, before CustomResourceDefinitions had versions, of all: the first
/// [`MAX_COLUMNS`].
fn printer_columns(spec: &Value) -> Vec<PrinterColumn> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let is_stored = |version: &&Value| version.get("storage") == Some(&Value::Bool(true));
    let versions = spec.get("versions").map(list).unwrap_or_default();
    let columns = |value: &Value| value.get("additionalPrinterColumns").map(list);
    let stored = versions.iter().find(is_stored).and_then(columns);
    let columns = stored.or_else(|| columns(spec)).unwrap_or_default();
    let columns = columns.iter().filter_map(printer_column);
    columns.take(MAX_COLUMNS).collect()
}

/// A column; `None` if it is damaged.
fn printer_column(column: &Value) -> Option<PrinterColumn> {
    let text = |field: &str| Some(column.get(field)?.as_str()?.to_owned());
    let priority = column.get("priority").and_then(Value::as_i64);
    Some(PrinterColumn {
        name: text("name")?,
        // Before CustomResourceDefinitions were v1, the field was JSONPath.
        json_path: text("jsonPath").or_else(|| text("JSONPath"))?,
        is_date: text("type")? == "date",
        is_wide: priority.unwrap_or(0) > 0,
    })
}

/// The labels of an object.
pub fn labels(object: &Map<String, Value>) -> impl Iterator<Item = (&str, &str)> {
    let labels = object.get("metadata").and_then(|m| m.get("labels"));
    let labels = labels.and_then(Value::as_object).into_iter().flatten();
    labels.filter_map(|(key, value)| Some((key.as_str(), value.as_str()?)))
}
