//! The objects of the controller, and those that Jobs need in a namespace.
//!
//! Pure functions from options to objects. Called by `cli::manifests`.

use super::rights::{
    RBAC, binding, role, rules, rules_of_all_namespaces, rules_of_jobs, rules_of_leader,
    rules_of_users, service_account,
};
use super::{
    CONTROLLER, Document, GROUP, InstallOptions, JOBS, container_security, definitions, document,
    pod_security,
};
use crate::controller::jobs::flags::flags;
use crate::controller::jobs::{LABEL_MANAGED_BY, LABEL_NAME, LABEL_WORK, NAME, Validation};
use crate::error::Result;
use serde_json::{Value, json};

const METRICS_PORT: u16 = 8080;

/// Returns the objects of the controller, the resource definitions included.
///
/// # Errors
/// `Internal` if a definition cannot be converted to JSON.
pub fn install(options: &InstallOptions) -> Result<Vec<Document>> {
    let namespace = options.namespace.as_str();
    let labels = json!({
        LABEL_NAME: NAME,
        "app.kubernetes.io/component": "controller",
    });
    let metadata = json!({"name": CONTROLLER, "namespace": namespace, "labels": labels});
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
    all.push(document("", service_account(metadata.clone())));
    all.extend(controller_rights(options, &labels));
    for watched in &options.watch_namespace {
        all.extend(self::namespace(watched));
    }
    all.extend(user_roles(options.aggregate_roles));
    all.extend(admission(options));
    all.push(document(
        "In: metrics and probes. Out: DNS and the API server. Some network plugins ignore NetworkPolicies.",
        network_policy(
            metadata.clone(),
            json!({"matchLabels": labels}),
            Some(&options.api_server_port),
        ),
    ));
    all.push(document(
        "One replica is the leader, by the Lease deltafold-controller; the other stands by.",
        json!({
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
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
            "metadata": metadata,
            "spec": {"minAvailable": 1, "selector": {"matchLabels": labels}},
        }),
    ));
    all.push(document(
        "For Prometheus: /metrics on port 8080. jobs/alerts-controller.yaml has alert rules.",
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {
                "clusterIP": "None",
                "selector": labels,
                "ports": [{"name": "metrics", "port": METRICS_PORT, "targetPort": "metrics"}],
            },
        }),
    ));
    Ok(all)
}

/// Returns the roles and bindings of the controller, and the ClusterRole of Jobs.
fn controller_rights(options: &InstallOptions, labels: &Value) -> Vec<Document> {
    let namespace = options.namespace.as_str();
    let account = (CONTROLLER, namespace);
    let metadata = |name: &str, namespace: &str| json!({"name": name, "namespace": namespace, "labels": labels});
    let mut all = Vec::new();
    if options.watch_namespace.is_empty() {
        let metadata = json!({"name": CONTROLLER, "labels": labels});
        let rules = [rules(), rules_of_all_namespaces()].concat();
        all.push(document(
            "For all namespaces, without any right on Secrets. The last three rules are for the ServiceAccount of Jobs,\n\
             which the controller creates in each namespace with policies.",
            role("ClusterRole", metadata.clone(), rules),
        ));
        let role = ("ClusterRole", CONTROLLER);
        let binding = binding("ClusterRoleBinding", metadata, role, account);
        all.push(document("", binding));
    }
    for watched in &options.watch_namespace {
        let metadata = metadata(CONTROLLER, watched);
        all.push(document(
            "For a namespace with policies, without any right on Secrets.",
            role("Role", metadata.clone(), rules()),
        ));
        let binding = binding("RoleBinding", metadata, ("Role", CONTROLLER), account);
        all.push(document("", binding));
    }
    let leader = format!("{CONTROLLER}-leader");
    let metadata = metadata(&leader, namespace);
    all.push(document(
        "The Lease of the leader.",
        role("Role", metadata.clone(), rules_of_leader()),
    ));
    let binding = binding("RoleBinding", metadata, ("Role", &leader), account);
    all.push(document("", binding));
    let metadata = json!({"name": JOBS, "labels": {LABEL_NAME: NAME}});
    all.push(document(
        "For the ServiceAccount deltafold-jobs of each namespace, by a RoleBinding there. It covers all Leases of that\n\
         namespace, not only those of policies.",
        role("ClusterRole", metadata, rules_of_jobs()),
    ));
    all
}

/// Returns the objects that Jobs need in a namespace with policies, and a NetworkPolicy for their Pods.
pub fn namespace(name: &str) -> Vec<Document> {
    let metadata = json!({"name": JOBS, "namespace": name, "labels": {LABEL_NAME: NAME}});
    let selector = json!({
        "matchLabels": {LABEL_MANAGED_BY: NAME},
        "matchExpressions": [{"key": LABEL_WORK, "operator": "Exists"}],
    });
    let role = ("ClusterRole", JOBS);
    let binding = binding("RoleBinding", metadata.clone(), role, (JOBS, name));
    vec![
        document("", service_account(metadata.clone())),
        document("", binding),
        document(
            "In: metrics and probes. Out: everything, because stores and etcds may be anywhere.",
            network_policy(metadata, selector, None),
        ),
    ]
}

/// Returns a NetworkPolicy that admits connections to the metrics port only. With `api_server_ports`, it
/// allows connections to DNS and to these ports only; otherwise to everything.
fn network_policy(metadata: Value, selector: Value, api_server_ports: Option<&[u16]>) -> Value {
    let port = |protocol: &str, port: u16| json!({"port": port, "protocol": protocol});
    let mut spec = json!({
        "podSelector": selector,
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [port("TCP", METRICS_PORT)]}],
    });
    if let Some(ports) = api_server_ports {
        let ports: Vec<Value> = ports.iter().map(|p| port("TCP", *p)).collect();
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

/// Returns the ClusterRoles for users. If they are not aggregated to Kubernetes' roles, an administrator binds
/// them.
fn user_roles(is_aggregated: bool) -> [Document; 2] {
    let aggregate_to = |roles: &'static [&'static str]| match is_aggregated {
        true => roles,
        false => &[],
    };
    let write = ["create", "delete", "deletecollection", "patch", "update"];
    let read = ["get", "list", "watch"];
    let writers = aggregate_to(&["admin", "edit"]);
    let readers = aggregate_to(&["admin", "edit", "view"]);
    [
        document(
            "For users of a namespace: bind the roles there. A user who may write a policy can have any Secret of the\n\
             namespace mounted into a Job.",
            user_role("deltafold-edit", writers, &write),
        ),
        document("", user_role("deltafold-view", readers, &read)),
    ]
}

/// Returns a ClusterRole with these verbs on policies and tasks, aggregated to these roles of Kubernetes.
fn user_role(name: &str, aggregate_to: &[&str], verbs: &[&str]) -> Value {
    let mut labels = json!({LABEL_NAME: NAME});
    for role in aggregate_to {
        labels[format!("{RBAC}/aggregate-to-{role}")] = "true".into();
    }
    let metadata = json!({"name": name, "labels": labels});
    role("ClusterRole", metadata, rules_of_users(verbs))
}

/// Returns the admission policies, by which the API server refuses the same specs as the controller.
fn admission(options: &InstallOptions) -> Vec<Document> {
    let policy_rules = options.allowed.policy_validations(&options.image);
    let task_rules = options.allowed.task_validations();
    let mut all = admission_policy("policies", "etcdbackuppolicies", &policy_rules, options);
    // An admission policy must have a validation.
    if !task_rules.is_empty() {
        let tasks = admission_policy("tasks", "etcdbackuptasks", &task_rules, options);
        all.extend(tasks);
    }
    all
}

fn admission_policy(
    objects: &str,
    resource: &str,
    validations: &[Validation],
    options: &InstallOptions,
) -> Vec<Document> {
    // The policies have no namespace, and a cluster may have several installations.
    let name = format!("{NAME}-{objects}-{}", options.namespace);
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
    let comment = "Refuses new and changed specs that the controller's flags do not allow. Existing objects stay as they are.";
    vec![document(comment, policy), document("", binding)]
}

/// Returns the arguments of the controller.
fn controller_args(options: &InstallOptions) -> Vec<String> {
    let args = [
        "controller",
        "--job-image",
        &options.image,
        "--metrics-bind-address",
        ":8080",
    ];
    let mut args: Vec<String> = args.map(str::to_owned).into();
    for watched in &options.watch_namespace {
        args.extend(["--namespace".to_owned(), watched.clone()]);
    }
    args.extend(flags(&options.allowed));
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
            "args": controller_args(options),
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
