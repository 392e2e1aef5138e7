//! The RBAC rules of the controller and its Jobs; roles and bindings as objects.
//!
//! They grant nothing by themselves: `install` puts them into roles. The tests compare the rules
//! of the chart with them.

use super::{CONTROLLER, GROUP, JOBS};
use serde_json::{Value, json};

pub(super) const RBAC: &str = "rbac.authorization.k8s.io";
const COORDINATION: &str = "coordination.k8s.io";

fn rule(group: &str, resources: &[&str], verbs: &[&str]) -> Value {
    json!({"apiGroups": [group], "resources": resources, "verbs": verbs})
}

/// Returns a rule for the objects with these names only.
fn named_rule(group: &str, resource: &str, names: &[&str], verbs: &[&str]) -> Value {
    let mut rule = rule(group, &[resource], verbs);
    rule["resourceNames"] = json!(names);
    rule
}

/// Returns the controller's rules for namespaces with policies. None is about Secrets.
pub fn rules() -> Vec<Value> {
    let watch = &["get", "list", "watch"];
    let write = &["create", "delete", "get", "list", "patch", "watch"];
    let own_status = &["etcdbackuppolicies/status", "etcdbackuptasks/status"];
    let own_finalizers = &[
        "etcdbackuppolicies/finalizers",
        "etcdbackuptasks/finalizers",
    ];
    vec![
        rule(GROUP, &["etcdbackuppolicies"], watch),
        rule(
            GROUP,
            &["etcdbackuptasks"],
            &["delete", "get", "list", "watch"],
        ),
        rule(GROUP, own_status, &["patch"]),
        // Some API servers require it for owner references that block the deletion of the owner.
        rule(GROUP, own_finalizers, &["update"]),
        rule("batch", &["cronjobs"], write),
        rule(
            "batch",
            &["jobs"],
            &["create", "delete", "get", "list", "watch"],
        ),
        rule("apps", &["deployments"], write),
        rule("", &["pods"], watch),
        rule(
            COORDINATION,
            &["leases"],
            &["create", "get", "list", "watch"],
        ),
        rule("discovery.k8s.io", &["endpointslices"], watch),
        rule("events.k8s.io", &["events"], &["create", "patch"]),
    ]
}

/// Returns the additional rules of a controller that watches all namespaces: it creates the Jobs'
/// ServiceAccount in each namespace, and binds the Jobs' ClusterRole to it.
pub fn rules_of_all_namespaces() -> Vec<Value> {
    vec![
        rule("", &["serviceaccounts"], &["create", "get"]),
        rule(RBAC, &["rolebindings"], &["create", "get"]),
        named_rule(RBAC, "clusterroles", &[JOBS], &["bind"]),
    ]
}

/// Returns the controller's rules for the leader's Lease in its own namespace.
pub fn rules_of_leader() -> Vec<Value> {
    vec![
        // RBAC cannot restrict `create` to a name.
        rule(COORDINATION, &["leases"], &["create"]),
        named_rule(COORDINATION, "leases", &[CONTROLLER], &["get", "patch"]),
    ]
}

/// Returns the rules of Jobs.
pub fn rules_of_jobs() -> Vec<Value> {
    let verbs = &["create", "get", "patch"];
    vec![rule(COORDINATION, &["leases"], verbs)]
}

/// Returns the rules of users who may read or write policies and tasks.
pub(super) fn rules_of_users(verbs: &[&str]) -> Vec<Value> {
    vec![rule(
        GROUP,
        &["etcdbackuppolicies", "etcdbackuptasks"],
        verbs,
    )]
}

pub(super) fn role(kind: &str, metadata: Value, rules: Vec<Value>) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": metadata,
        "rules": rules,
    })
}

/// Returns a binding of a role, by kind and name, to a ServiceAccount, by name and namespace.
pub(super) fn binding(
    kind: &str,
    metadata: Value,
    role: (&str, &str),
    account: (&str, &str),
) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": metadata,
        "roleRef": {"apiGroup": RBAC, "kind": role.0, "name": role.1},
        "subjects": [{"kind": "ServiceAccount", "name": account.0, "namespace": account.1}],
    })
}

pub(super) fn service_account(metadata: Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata,
        "automountServiceAccountToken": false,
    })
}
