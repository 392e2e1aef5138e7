//! What is applied to a cluster by hand: the resource definitions, the controller with its rights, and samples.
//!
//! Pure: from options to objects and YAML. `cli::manifests` prints them, and `jobs/` holds what it prints; the Helm
//! chart there makes the same objects.

use super::api::{GROUP, crds};
use super::jobs::flags::flags;
use super::jobs::{Allowed, LABEL_MANAGED_BY, LABEL_NAME, LABEL_WORK, NAME, Validation};
use crate::base::flag_values::yes_or_no;
use crate::error::{Error, Result};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use serde_json::{Value, json};

/// The namespace of the controller, if nothing else is said.
pub const NAMESPACE: &str = "deltafold-system";
/// The controller's image and that of its Jobs, if nothing else is said.
pub const IMAGE: &str = concat!("deltafold:", env!("CARGO_PKG_VERSION"));
/// The name of the controller's objects.
pub const CONTROLLER: &str = "deltafold-controller";
/// The name of the ClusterRole of Jobs, and in each namespace of their ServiceAccount and its RoleBinding.
pub const JOBS: &str = "deltafold-jobs";
/// The name of the objects that clean up after version 0.1.
pub const CLEANUP: &str = "deltafold-cleanup";

const RBAC: &str = "rbac.authorization.k8s.io";
const METRICS_PORT: u16 = 8080;
/// A finished cleanup is there so long, for people to look at: a day.
const CLEANUP_TTL_SECONDS: u32 = 86_400;

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
# With --watch-namespace it has rights in the named namespaces alone. Jobs run in the namespaces of their policies, as a
# user of their own. To upgrade from version 0.1, apply this, and then clean up once what 0.1 made at run time:
#   deltafold manifests cleanup | kubectl apply --server-side -f -
# To go from all namespaces to named ones, apply this, and then:
#   kubectl delete clusterrolebinding,clusterrole deltafold-controller
# To remove it, in this order:
#   1. kubectl delete etcdbackuptasks,etcdbackuppolicies --all --all-namespaces
#      CronJobs, followers and Jobs go with their policies. Backups stay as they are.
#   2. deltafold manifests install | kubectl delete -f -
#      The definitions go, too, and with them what is left of policies and tasks.
";

const ABOUT_NAMESPACE: &str = "\
# What Jobs need in a namespace of policies. A controller of all namespaces makes the first two objects itself.
#
#   deltafold manifests namespace NAMESPACE | kubectl apply --server-side -f -
";

const ABOUT_CLEANUP: &str = "\
# A Job that removes once what the controller of version 0.1 made at run time: the finalizer deltafold.io/in-use of
# Secrets, and the Roles, RoleBindings and ServiceAccounts deltafold-POLICY. Apply it after the upgrade of the controller.
#
#   deltafold manifests cleanup | kubectl apply --server-side -f -
#   kubectl logs --namespace deltafold-system job/deltafold-cleanup
#
# Its log tells what is left and why. If something is left, delete the Job, and apply it again later. Then:
#   deltafold manifests cleanup | kubectl delete -f -
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

/// How the controller is installed.
#[derive(Debug, Clone, Args)]
pub struct InstallOptions {
    /// Namespace of the controller
    ///
    /// DELTAFOLD_NAMESPACE also sets --namespace of other commands.
    #[arg(
        short,
        long,
        value_name = "NAMESPACE",
        default_value = NAMESPACE,
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub namespace: String,
    /// Image of the controller, and of Jobs whose policy does not set one
    #[arg(
        long,
        value_name = "IMAGE",
        default_value = IMAGE,
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub image: String,
    /// Watch policies in this namespace only; repeatable [default: all]
    ///
    /// The controller gets permissions in these namespaces only. They must exist.
    #[arg(
        long,
        value_name = "NAMESPACE",
        value_delimiter = ',',
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub watch_namespace: Vec<String>,
    /// Add permissions for policies and tasks to the Kubernetes roles admin, edit and view
    #[arg(long, value_parser = yes_or_no)]
    pub aggregate_roles: bool,
    /// Port of the API server, which the NetworkPolicy of the controller opens; repeatable
    #[arg(
        long,
        value_name = "PORT",
        value_delimiter = ',',
        default_values_t = [443_u16, 6443]
    )]
    pub api_server_port: Vec<u16>,
    /// Stop existing policies that use a feature which is not allowed
    #[arg(long, value_parser = yes_or_no)]
    pub enforce_existing: bool,
    /// What policies and tasks may ask for
    #[command(flatten)]
    pub allowed: Allowed,
}

/// How the Job runs that cleans up after version 0.1.
#[derive(Debug, Clone, Args)]
pub struct CleanupOptions {
    /// Namespace of the Job
    ///
    /// DELTAFOLD_NAMESPACE also sets --namespace of other commands.
    #[arg(
        short,
        long,
        value_name = "NAMESPACE",
        default_value = NAMESPACE,
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub namespace: String,
    /// Image of the Job
    #[arg(
        long,
        value_name = "IMAGE",
        default_value = IMAGE,
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub image: String,
    /// Clean up this namespace; repeatable [default: all]
    #[arg(
        long,
        value_name = "NAMESPACE",
        value_delimiter = ',',
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub watch_namespace: Vec<String>,
}

fn rule(group: &str, resources: &[&str], verbs: &[&str]) -> Value {
    json!({"apiGroups": [group], "resources": resources, "verbs": verbs})
}

fn rule_of_named(group: &str, resource: &str, names: &[&str], verbs: &[&str]) -> Value {
    let mut rule = rule(group, &[resource], verbs);
    rule["resourceNames"] = json!(names);
    rule
}

/// What the controller may do in the namespaces of policies. It has no rights on Secrets.
pub fn rules() -> Vec<Value> {
    let watch = &["get", "list", "watch"];
    let write = &["create", "delete", "get", "list", "patch", "watch"];
    vec![
        rule(GROUP, &["etcdbackuppolicies"], watch),
        rule(
            GROUP,
            &["etcdbackuptasks"],
            &["delete", "get", "list", "watch"],
        ),
        rule(
            GROUP,
            &["etcdbackuppolicies/status", "etcdbackuptasks/status"],
            &["patch"],
        ),
        // An owner reference that blocks deletion needs it, if the API server checks that.
        rule(
            GROUP,
            &[
                "etcdbackuppolicies/finalizers",
                "etcdbackuptasks/finalizers",
            ],
            &["update"],
        ),
        rule("batch", &["cronjobs"], write),
        rule(
            "batch",
            &["jobs"],
            &["create", "delete", "get", "list", "watch"],
        ),
        rule("apps", &["deployments"], write),
        rule("", &["pods"], watch),
        rule(
            "coordination.k8s.io",
            &["leases"],
            &["create", "get", "list", "watch"],
        ),
        rule("discovery.k8s.io", &["endpointslices"], watch),
        rule("events.k8s.io", &["events"], &["create", "patch"]),
    ]
}

/// What the controller of all namespaces may do beyond [`rules`]: make what Jobs need in a namespace, and bind one
/// ClusterRole.
pub fn rules_of_all_namespaces() -> Vec<Value> {
    vec![
        rule("", &["serviceaccounts"], &["create", "get"]),
        rule(RBAC, &["rolebindings"], &["create", "get"]),
        rule_of_named(RBAC, "clusterroles", &[JOBS], &["bind"]),
    ]
}

/// What the controller may do in its own namespace: to hold the Lease of the leader.
pub fn rules_of_leader() -> Vec<Value> {
    vec![
        // A name cannot restrict `create`.
        rule("coordination.k8s.io", &["leases"], &["create"]),
        rule_of_named(
            "coordination.k8s.io",
            "leases",
            &[CONTROLLER],
            &["get", "patch"],
        ),
    ]
}

/// What Jobs may do.
pub fn rules_of_jobs() -> Vec<Value> {
    vec![rule(
        "coordination.k8s.io",
        &["leases"],
        &["create", "get", "patch"],
    )]
}

/// What the cleanup may do.
pub fn rules_of_cleanup() -> Vec<Value> {
    vec![
        rule("", &["secrets"], &["get", "list", "patch"]),
        rule(
            "",
            &["serviceaccounts"],
            &["delete", "get", "list", "patch"],
        ),
        rule(RBAC, &["rolebindings", "roles"], &["delete", "list"]),
        rule("", &["pods"], &["list"]),
        rule("batch", &["cronjobs", "jobs"], &["list"]),
        rule("apps", &["deployments"], &["list"]),
    ]
}

fn role(kind: &str, metadata: Value, rules: Vec<Value>) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": metadata,
        "rules": rules,
    })
}

/// Binds a role of this kind and name to a ServiceAccount, by name and namespace.
fn binding(kind: &str, metadata: Value, role: (&str, &str), account: (&str, &str)) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": metadata,
        "roleRef": {"apiGroup": RBAC, "kind": role.0, "name": role.1},
        "subjects": [{"kind": "ServiceAccount", "name": account.0, "namespace": account.1}],
    })
}

fn service_account(metadata: Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata,
        "automountServiceAccountToken": false,
    })
}

/// All that the controller needs, with the resource definitions.
///
/// # Errors
/// `Internal`.
pub fn install(options: &InstallOptions) -> Result<Vec<Document>> {
    let namespace = options.namespace.as_str();
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
    let metadata = |name: &str, namespace: &str| json!({"name": name, "namespace": namespace, "labels": labels});
    let of_cluster = |name: &str| json!({"name": name, "labels": labels});
    let account = (CONTROLLER, namespace);
    all.push(document(
        "",
        service_account(metadata(CONTROLLER, namespace)),
    ));
    if options.watch_namespace.is_empty() {
        all.push(document(
            "In all namespaces: a policy is acted on in its own. No rights on Secrets. The last three rules are for the\n\
             ServiceAccount of Jobs in each namespace with policies.",
            role(
                "ClusterRole",
                of_cluster(CONTROLLER),
                [rules(), rules_of_all_namespaces()].concat(),
            ),
        ));
        all.push(document(
            "",
            binding(
                "ClusterRoleBinding",
                of_cluster(CONTROLLER),
                ("ClusterRole", CONTROLLER),
                account,
            ),
        ));
    }
    for watched in &options.watch_namespace {
        all.push(document(
            "In a namespace of policies. No rights on Secrets.",
            role("Role", metadata(CONTROLLER, watched), rules()),
        ));
        all.push(document(
            "",
            binding(
                "RoleBinding",
                metadata(CONTROLLER, watched),
                ("Role", CONTROLLER),
                account,
            ),
        ));
    }
    let leader = format!("{CONTROLLER}-leader");
    all.push(document(
        "The Lease of the leader.",
        role("Role", metadata(&leader, namespace), rules_of_leader()),
    ));
    all.push(document(
        "",
        binding(
            "RoleBinding",
            metadata(&leader, namespace),
            ("Role", &leader),
            account,
        ),
    ));
    all.push(document(
        "For the ServiceAccount deltafold-jobs of a namespace, by a RoleBinding there. It covers all Leases of the\n\
         namespace in which it is bound, not only those of policies.",
        role(
            "ClusterRole",
            json!({"name": JOBS, "labels": {LABEL_NAME: NAME}}),
            rules_of_jobs(),
        ),
    ));
    for watched in &options.watch_namespace {
        all.extend(self::namespace(watched));
    }
    all.extend(for_users(options.aggregate_roles));
    all.extend(admission(options));
    all.push(document(
        "In: metrics and probes. Out: DNS and the API server. A cluster's network plugin may ignore NetworkPolicies.",
        network_policy(
            metadata(CONTROLLER, namespace),
            json!({"matchLabels": labels}),
            Some(&options.api_server_port),
        ),
    ));
    all.push(document(
        "One replica leads, by the Lease deltafold-controller; the other stands by.",
        json!({
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata(CONTROLLER, namespace),
            "spec": {
                "replicas": 2,
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": pod(options, &labels),
                },
            },
        }),
    ));
    all.push(document(
        "",
        json!({
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(CONTROLLER, namespace),
            "spec": {"minAvailable": 1, "selector": {"matchLabels": labels}},
        }),
    ));
    all.push(document(
        "For Prometheus: /metrics at port 8080. jobs/alerts.yaml has rules.",
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(CONTROLLER, namespace),
            "spec": {
                "clusterIP": "None",
                "selector": labels,
                "ports": [{"name": "metrics", "port": METRICS_PORT, "targetPort": "metrics"}],
            },
        }),
    ));
    Ok(all)
}

/// What Jobs need in a namespace of policies, and a NetworkPolicy for them.
pub fn namespace(name: &str) -> Vec<Document> {
    let metadata = json!({"name": JOBS, "namespace": name, "labels": {LABEL_NAME: NAME}});
    let selector = json!({
        "matchLabels": {LABEL_MANAGED_BY: NAME},
        "matchExpressions": [{"key": LABEL_WORK, "operator": "Exists"}],
    });
    vec![
        document("", service_account(metadata.clone())),
        document(
            "",
            binding(
                "RoleBinding",
                metadata.clone(),
                ("ClusterRole", JOBS),
                (JOBS, name),
            ),
        ),
        document(
            "In: metrics and probes. Out: everything, because stores and etcds may be anywhere.",
            network_policy(metadata, selector, None),
        ),
    ]
}

/// Lets in what asks for metrics; with `api_server_ports` lets out to these and to DNS alone.
fn network_policy(metadata: Value, selector: Value, api_server_ports: Option<&[u16]>) -> Value {
    let port = |protocol: &str, port: u16| json!({"port": port, "protocol": protocol});
    let mut spec = json!({
        "podSelector": selector,
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [port("TCP", METRICS_PORT)]}],
    });
    if let Some(ports) = api_server_ports {
        let ports = ports.iter().map(|p| port("TCP", *p));
        let ports: Vec<Value> = ports.collect();
        spec["policyTypes"] = json!(["Ingress", "Egress"]);
        spec["egress"] = json!([{"ports": [port("UDP", 53), port("TCP", 53)]}, {"ports": ports}]);
    }
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata,
        "spec": spec,
    })
}

/// What users of a namespace may do. Without `aggregated` an administrator binds the roles.
fn for_users(aggregated: bool) -> [Document; 2] {
    let role = |name: &str, to: &[&str], verbs: &[&str]| {
        let mut labels = json!({LABEL_NAME: NAME});
        for role in to.iter().filter(|_| aggregated) {
            labels[format!("{RBAC}/aggregate-to-{role}")] = "true".into();
        }
        let rules = vec![rule(
            GROUP,
            &["etcdbackuppolicies", "etcdbackuptasks"],
            verbs,
        )];
        role(
            "ClusterRole",
            json!({"name": name, "labels": labels}),
            rules,
        )
    };
    let write = ["create", "delete", "deletecollection", "patch", "update"];
    [
        document(
            "For users of a namespace: bind them there. Whoever may write a policy can have any Secret of the namespace\n\
             mounted into a Job.",
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

/// The API server refuses new and changed specs that ask for what is not allowed, as the controller would.
fn admission(options: &InstallOptions) -> Vec<Document> {
    let of_policies = options.allowed.policy_validations(&options.image);
    let of_tasks = options.allowed.task_validations();
    let mut all = admission_of("policies", "etcdbackuppolicies", &of_policies, options);
    // There is none without validations.
    if !of_tasks.is_empty() {
        all.extend(admission_of("tasks", "etcdbackuptasks", &of_tasks, options));
    }
    all
}

fn admission_of(
    what: &str,
    resource: &str,
    validations: &[Validation],
    options: &InstallOptions,
) -> Vec<Document> {
    // Of the whole cluster, and there may be several installations.
    let name = format!("{NAME}-{what}-{}", options.namespace);
    let metadata = json!({"name": name, "labels": {LABEL_NAME: NAME}});
    let validations = validations
        .iter()
        .map(|v| json!({"expression": v.expression, "message": v.message, "reason": "Forbidden"}));
    let validations: Vec<Value> = validations.collect();
    let policy = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": metadata,
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [{
                "apiGroups": [GROUP],
                "apiVersions": ["v1alpha1"],
                "operations": ["CREATE", "UPDATE"],
                "resources": [resource],
            }]},
            "matchConditions": [{
                "name": "spec-is-new-or-changed",
                "expression": "request.operation == 'CREATE' || object.spec != oldObject.spec",
            }],
            "validations": validations,
        },
    });
    let mut spec = json!({"policyName": name, "validationActions": ["Deny"]});
    if !options.watch_namespace.is_empty() {
        spec["matchResources"] = json!({"namespaceSelector": {"matchExpressions": [{
            "key": "kubernetes.io/metadata.name",
            "operator": "In",
            "values": options.watch_namespace,
        }]}});
    }
    let binding = json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": metadata,
        "spec": spec,
    });
    let comment = "What the flags of the controller do not allow is refused when it is written. What is there may stay as it is.";
    vec![document(comment, policy), document("", binding)]
}

/// The Job that cleans up after version 0.1, with rights of its own.
pub fn cleanup(options: &CleanupOptions) -> Vec<Document> {
    let labels = json!({LABEL_NAME: NAME, "app.kubernetes.io/component": "cleanup"});
    let metadata =
        |namespace: &str| json!({"name": CLEANUP, "namespace": namespace, "labels": labels});
    let of_cluster = json!({"name": CLEANUP, "labels": labels});
    let account = (CLEANUP, options.namespace.as_str());
    let mut all = vec![document("", service_account(metadata(&options.namespace)))];
    let about_rights =
        "It asks for the metadata of Secrets alone; its rights cannot be restricted to that.";
    if options.watch_namespace.is_empty() {
        all.push(document(
            about_rights,
            role("ClusterRole", of_cluster.clone(), rules_of_cleanup()),
        ));
        all.push(document(
            "",
            binding(
                "ClusterRoleBinding",
                of_cluster,
                ("ClusterRole", CLEANUP),
                account,
            ),
        ));
    }
    for watched in &options.watch_namespace {
        all.push(document(
            about_rights,
            role("Role", metadata(watched), rules_of_cleanup()),
        ));
        all.push(document(
            "",
            binding("RoleBinding", metadata(watched), ("Role", CLEANUP), account),
        ));
    }
    let mut args = vec!["cleanup".to_owned()];
    for watched in &options.watch_namespace {
        args.extend(["--namespace".to_owned(), watched.clone()]);
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
                "ttlSecondsAfterFinished": CLEANUP_TTL_SECONDS,
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {
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
                    },
                },
            },
        }),
    ));
    all
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

/// The command line of the controller.
fn args(options: &InstallOptions) -> Vec<String> {
    let given = [
        "controller",
        "--job-image",
        &options.image,
        "--metrics-bind-address",
        ":8080",
    ];
    let mut args: Vec<String> = given.map(str::to_owned).into();
    for watched in &options.watch_namespace {
        args.extend(["--namespace".to_owned(), watched.clone()]);
    }
    args.extend(flags(&options.allowed));
    if options.enforce_existing {
        args.push("--enforce-existing".to_owned());
    }
    args
}

fn pod(options: &InstallOptions, labels: &Value) -> Value {
    json!({
        "serviceAccountName": CONTROLLER,
        "automountServiceAccountToken": true,
        "enableServiceLinks": false,
        "securityContext": pod_security(),
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{
            "weight": 100,
            "podAffinityTerm": {
                "topologyKey": "kubernetes.io/hostname",
                "labelSelector": {"matchLabels": labels},
            },
        }]}},
        "containers": [{
            "name": NAME,
            "image": options.image,
            "command": ["deltafold"],
            "args": args(options),
            "ports": [{"name": "metrics", "containerPort": METRICS_PORT}],
            "livenessProbe": {"httpGet": {"path": "/healthz", "port": "metrics"}},
            "readinessProbe": {"httpGet": {"path": "/readyz", "port": "metrics"}},
            "resources": {
                "requests": {"cpu": "50m", "memory": "64Mi"},
                "limits": {"memory": "512Mi"},
            },
            "securityContext": container_security(),
        }],
    })
}

/// The YAML of `install`.
///
/// # Errors
/// `Internal`.
pub fn install_yaml(options: &InstallOptions) -> Result<String> {
    yaml(HOW_TO, &install(options)?)
}

/// The YAML of `namespace`.
///
/// # Errors
/// `Internal`.
pub fn namespace_yaml(name: &str) -> Result<String> {
    yaml(ABOUT_NAMESPACE, &namespace(name))
}

/// The YAML of `cleanup`.
///
/// # Errors
/// `Internal`.
pub fn cleanup_yaml(options: &CleanupOptions) -> Result<String> {
    yaml(ABOUT_CLEANUP, &cleanup(options))
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
