//! The cleanup after version 0.1: it removes what later versions do not use any more, a finalizer of Secrets,
//! and a Role, a RoleBinding and a ServiceAccount for each policy.
//!
//! Pure functions decide what happens to an object; [`run`] lists, decides and writes. It never reads the
//! contents of a Secret, and may be run any number of times. Called by `cli::cleanup`.

use super::api::GROUP;
use super::jobs::{LABEL_MANAGED_BY, NAME};
use super::manifests::JOBS;
use crate::error::{Reason, Result};
use crate::kubernetes::UserClient;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec, Secret, ServiceAccount};
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{DeleteParams, ListParams, ObjectList, Patch, PatchParams, Preconditions};
use kube::core::PartialObjectMeta;
use kube::{Api, Resource, ResourceExt};
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fmt::Debug;

/// The finalizer that version 0.1 set on Secrets.
const FINALIZER: &str = "deltafold.io/in-use";
/// The number of objects in a page of a list.
const PAGE_SIZE: u32 = 500;
/// How often a conflicting write to a Secret is attempted.
const ATTEMPTS: u32 = 5;

/// The options of a cleanup.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The namespaces; empty for all
    pub namespaces: Vec<String>,
    /// Whether nothing is written
    pub dry_run: bool,
}

/// The result of a cleanup. The fields are a contract: `docs/cleanup-result.schema.json`.
#[derive(Debug, Default, JsonSchema, Serialize)]
pub struct Outcome {
    /// Whether nothing was written: the lists say what would be done.
    pub dry_run: bool,
    /// The Secrets from which the finalizer `deltafold.io/in-use` was removed.
    pub released: Vec<ObjectName>,
    /// The objects that were deleted.
    pub deleted: Vec<ObjectName>,
    /// The ServiceAccounts that a policy named `jobs` no longer owns: Jobs of all policies now use that name.
    pub disowned: Vec<ObjectName>,
    /// The objects that remain. Clean up again later.
    pub left: Vec<RemainingObject>,
}

/// The kind, namespace and name of an object.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
#[schemars(rename = "Item")]
pub struct ObjectName {
    /// The kind.
    pub kind: String,
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
}

impl ObjectName {
    fn of<K: Resource<DynamicType = ()>>(metadata: &ObjectMeta) -> Self {
        ObjectName {
            kind: K::kind(&()).into_owned(),
            namespace: metadata.namespace.clone().unwrap_or_default(),
            name: metadata.name.clone().unwrap_or_default(),
        }
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.kind, self.namespace, self.name)
    }
}

/// An object that remains, and why.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
#[schemars(rename = "Left")]
pub struct RemainingObject {
    /// The object.
    #[serde(flatten)]
    pub object: ObjectName,
    /// The reason, in words that may change.
    pub reason: String,
}

impl Outcome {
    fn leave(&mut self, object: ObjectName, reason: &str) {
        let reason = reason.to_owned();
        self.left.push(RemainingObject { object, reason });
    }
}

/// The ServiceAccounts in use, by namespace and name, each with an object that uses it.
type AccountUsers = BTreeMap<(String, String), String>;

/// What happens to an object of version 0.1.
#[derive(Debug, PartialEq, Eq)]
enum Decision {
    Delete,
    /// It stays, and no policy owns it any more.
    Disown,
    /// It stays as it is, for this reason.
    Leave(String),
}

/// Returns whether version 0.1 created a Role, RoleBinding or ServiceAccount for a policy: by label, owner
/// and name.
fn is_of_old_version(object: &ObjectMeta) -> bool {
    let labels = object.labels.as_ref();
    let manager = labels.and_then(|l| l.get(LABEL_MANAGED_BY));
    let name_for = |policy: &str| Some(format!("{NAME}-{policy}"));
    let mut owners = object.owner_references.iter().flatten();
    manager.is_some_and(|m| m == NAME)
        && owners.any(|owner| is_policy(owner) && object.name == name_for(&owner.name))
}

fn is_policy(owner: &OwnerReference) -> bool {
    let group = owner.api_version.split_once('/').map(|(group, _)| group);
    owner.kind == "EtcdBackupPolicy" && group == Some(GROUP)
}

/// Decides what happens to a Role, RoleBinding or ServiceAccount that version 0.1 created.
fn decide(kind: &str, object: &ObjectMeta, users: &AccountUsers) -> Decision {
    let name = object.name.clone().unwrap_or_default();
    // A policy named `jobs`: its ServiceAccount has the name of the one of all Jobs, and its RoleBinding
    // blocks theirs.
    if name == JOBS {
        return match kind {
            "ServiceAccount" => Decision::Disown,
            _ => Decision::Delete,
        };
    }
    let account = (object.namespace.clone().unwrap_or_default(), name);
    match users.get(&account) {
        Some(user) => Decision::Leave(format!("the {user} uses the ServiceAccount {}", account.1)),
        None => Decision::Delete,
    }
}

/// Returns the finalizers of a Secret without that of version 0.1; `None` if it does not have that one.
fn other_finalizers(secret: &PartialObjectMeta<Secret>) -> Option<Vec<String>> {
    let all = secret.finalizers();
    let others = all.iter().filter(|f| *f != FINALIZER).cloned();
    all.iter().any(|f| f == FINALIZER).then(|| others.collect())
}

fn account_of(template: Option<&PodTemplateSpec>) -> Option<&str> {
    template?.spec.as_ref()?.service_account_name.as_deref()
}

/// Returns the ServiceAccount of a Pod; `None` if the Pod has ended.
fn account_of_pod(pod: &Pod) -> Option<&str> {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    match phase {
        Some("Succeeded" | "Failed") => None,
        _ => pod.spec.as_ref()?.service_account_name.as_deref(),
    }
}

/// Returns the ServiceAccount of a Job; `None` if the Job has ended and creates no more Pods.
fn account_of_job(job: &Job) -> Option<&str> {
    let conditions = job.status.as_ref().and_then(|s| s.conditions.as_ref());
    let is_end = |type_: &str| matches!(type_, "Complete" | "Failed");
    let mut conditions = conditions.into_iter().flatten();
    if conditions.any(|c| is_end(&c.type_) && c.status == "True") {
        return None;
    }
    account_of(Some(&job.spec.as_ref()?.template))
}

fn account_of_cron_job(cron_job: &CronJob) -> Option<&str> {
    let job = cron_job.spec.job_template.spec.as_ref()?;
    account_of(Some(&job.template))
}

fn account_of_deployment(deployment: &Deployment) -> Option<&str> {
    account_of(Some(&deployment.spec.template))
}

/// Removes what version 0.1 created and nothing uses any more.
///
/// # Errors
/// `PermissionDenied`, `KubernetesUnreachable` and other errors of the API. What was removed before stays
/// removed.
pub async fn run(client: &UserClient, options: &Options) -> Result<Outcome> {
    let cleanup = Cleanup { client, options };
    let mut outcome = Outcome {
        dry_run: options.dry_run,
        ..Outcome::default()
    };
    cleanup.release_secrets(&mut outcome).await?;
    let bindings = cleanup.old_objects::<RoleBinding>().await?;
    let roles = cleanup.old_objects::<Role>().await?;
    let accounts = cleanup.old_objects::<ServiceAccount>().await?;
    let mut namespaces: BTreeSet<String> = BTreeSet::new();
    namespaces.extend(bindings.iter().filter_map(ResourceExt::namespace));
    namespaces.extend(roles.iter().filter_map(ResourceExt::namespace));
    namespaces.extend(accounts.iter().filter_map(ResourceExt::namespace));
    let users = cleanup.account_users(&namespaces).await?;
    cleanup.remove(bindings, &users, &mut outcome).await?;
    cleanup.remove(roles, &users, &mut outcome).await?;
    cleanup.remove(accounts, &users, &mut outcome).await?;
    Ok(outcome)
}

/// A kind of objects in namespaces that can be listed, read and written.
trait NamespacedKind:
    Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned
{
}

impl<K> NamespacedKind for K where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + Debug
        + DeserializeOwned
{
}

struct Cleanup<'a> {
    client: &'a UserClient,
    options: &'a Options,
}

impl Cleanup<'_> {
    /// Returns the APIs of a kind for the namespaces of the options.
    fn apis<K: NamespacedKind>(&self) -> Vec<Api<K>> {
        if self.options.namespaces.is_empty() {
            return vec![self.client.all()];
        }
        let namespaces: BTreeSet<&String> = self.options.namespaces.iter().collect();
        let apis = namespaces.into_iter().map(|n| self.api_in(n));
        apis.collect()
    }

    fn api_in<K: NamespacedKind>(&self, namespace: &str) -> Api<K> {
        self.client.in_namespace(namespace).api()
    }

    /// Returns the objects of all pages of a list.
    async fn all_pages<T: Clone, F>(
        &self,
        kind: &str,
        list: impl Fn(ListParams) -> F,
    ) -> Result<Vec<T>>
    where
        F: Future<Output = Result<ObjectList<T>, kube::Error>>,
    {
        let request = format!("list the {kind}s");
        let (mut all, mut next) = (Vec::new(), None);
        loop {
            let mut params = ListParams::default().limit(PAGE_SIZE);
            params.continue_token = next;
            let page = self.client.ask(&request, list(params)).await?;
            all.extend(page.items);
            next = page.metadata.continue_.filter(|token| !token.is_empty());
            if next.is_none() {
                return Ok(all);
            }
        }
    }

    /// Returns the metadata of a kind's objects in the namespaces of the options.
    async fn metadata<K: NamespacedKind>(
        &self,
        labels: Option<&str>,
    ) -> Result<Vec<PartialObjectMeta<K>>> {
        let mut all = Vec::new();
        for api in self.apis::<K>() {
            let list = |mut params: ListParams| {
                let api = api.clone();
                params.label_selector = labels.map(str::to_owned);
                async move { api.list_metadata(&params).await }
            };
            all.extend(self.all_pages(&K::kind(&()), list).await?);
        }
        Ok(all)
    }

    /// Returns the Secrets with the finalizer of version 0.1.
    async fn held_secrets(&self) -> Result<Vec<PartialObjectMeta<Secret>>> {
        let mut secrets = self.metadata::<Secret>(None).await?;
        secrets.retain(|secret| other_finalizers(secret).is_some());
        Ok(secrets)
    }

    async fn release_secrets(&self, outcome: &mut Outcome) -> Result<()> {
        for secret in self.held_secrets().await? {
            let object = ObjectName::of::<Secret>(&secret.metadata);
            match self.options.dry_run || self.release(secret).await? {
                true => outcome.released.push(object),
                false => outcome.leave(object, "another client keeps changing it"),
            }
        }
        if self.options.dry_run || outcome.released.is_empty() {
            return Ok(());
        }
        // A running controller of version 0.1 sets the finalizer again.
        for secret in self.held_secrets().await? {
            let object = ObjectName::of::<Secret>(&secret.metadata);
            if outcome.released.contains(&object) {
                outcome.released.retain(|released| *released != object);
                let reason =
                    "the finalizer was added again: a controller of version 0.1 is still running";
                outcome.leave(object, reason);
            }
        }
        Ok(())
    }

    /// Removes the finalizer of a Secret; returns whether it is gone. The write names the version of the
    /// Secret, so that no finalizer is lost that another client adds at the same time.
    async fn release(&self, mut secret: PartialObjectMeta<Secret>) -> Result<bool> {
        let object = ObjectName::of::<Secret>(&secret.metadata);
        let api: Api<Secret> = self.api_in(&object.namespace);
        let remove_request = format!("remove the finalizer of the {object}");
        let read_request = format!("read the {object}");
        for _ in 0..ATTEMPTS {
            let Some(finalizers) = other_finalizers(&secret) else {
                return Ok(true);
            };
            let patch = Patch::Merge(json!({"metadata": {
                "finalizers": finalizers,
                "resourceVersion": secret.resource_version(),
            }}));
            let params = PatchParams::default();
            let written = unless_gone(api.patch_metadata(&object.name, &params, &patch));
            match self.client.ask(&remove_request, written).await {
                Ok(_) => return Ok(true),
                Err(e) if e.reason() == Reason::Conflict => {}
                Err(e) => return Err(e),
            }
            let current = unless_gone(api.get_metadata(&object.name));
            match self.client.ask(&read_request, current).await? {
                Some(current) => secret = current,
                None => return Ok(true),
            }
        }
        Ok(false)
    }

    /// Returns the objects of a kind that version 0.1 created for policies.
    async fn old_objects<K: NamespacedKind>(&self) -> Result<Vec<PartialObjectMeta<K>>> {
        let labels = format!("{LABEL_MANAGED_BY}={NAME}");
        let mut objects = self.metadata::<K>(Some(&labels)).await?;
        objects.retain(|object| is_of_old_version(&object.metadata));
        Ok(objects)
    }

    /// Returns the users of ServiceAccounts in these namespaces.
    async fn account_users(&self, namespaces: &BTreeSet<String>) -> Result<AccountUsers> {
        let mut users = AccountUsers::new();
        for namespace in namespaces {
            self.add_users(namespace, account_of_deployment, &mut users)
                .await?;
            self.add_users(namespace, account_of_cron_job, &mut users)
                .await?;
            self.add_users(namespace, account_of_job, &mut users)
                .await?;
            self.add_users(namespace, account_of_pod, &mut users)
                .await?;
        }
        Ok(users)
    }

    async fn add_users<K: NamespacedKind>(
        &self,
        namespace: &str,
        account_of: fn(&K) -> Option<&str>,
        users: &mut AccountUsers,
    ) -> Result<()> {
        let kind = K::kind(&());
        let api: Api<K> = self.api_in(namespace);
        let list = |params| {
            let api = api.clone();
            async move { api.list(&params).await }
        };
        for object in self.all_pages(&kind, list).await? {
            if let Some(account) = account_of(&object) {
                let key = (namespace.to_owned(), account.to_owned());
                users.insert(key, format!("{kind} {}", object.name_any()));
            }
        }
        Ok(())
    }

    /// Decides on each object, and carries out the decision.
    async fn remove<K: NamespacedKind>(
        &self,
        objects: Vec<PartialObjectMeta<K>>,
        users: &AccountUsers,
        outcome: &mut Outcome,
    ) -> Result<()> {
        for PartialObjectMeta { metadata, .. } in objects {
            let object = ObjectName::of::<K>(&metadata);
            let done = match decide(&object.kind, &metadata, users) {
                Decision::Leave(reason) => {
                    outcome.leave(object, &reason);
                    continue;
                }
                Decision::Delete => {
                    outcome.deleted.push(object.clone());
                    self.delete::<K>(&object, &metadata).await
                }
                Decision::Disown => {
                    outcome.disowned.push(object.clone());
                    self.disown::<K>(&object, &metadata).await
                }
            };
            match done {
                Err(e) if e.reason() == Reason::Conflict => {
                    outcome.deleted.retain(|o| *o != object);
                    outcome.disowned.retain(|o| *o != object);
                    outcome.leave(object, "another client changed it meanwhile");
                }
                done => done?,
            }
        }
        Ok(())
    }

    async fn delete<K: NamespacedKind>(
        &self,
        object: &ObjectName,
        metadata: &ObjectMeta,
    ) -> Result<()> {
        if self.options.dry_run {
            return Ok(());
        }
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: metadata.uid.clone(),
                resource_version: metadata.resource_version.clone(),
            }),
            ..DeleteParams::default()
        };
        let api: Api<K> = self.api_in(&object.namespace);
        let deleted = unless_gone(api.delete(&object.name, &params));
        let request = format!("delete the {object}");
        self.client.ask(&request, deleted).await.map(drop)
    }

    /// Removes the policy from the owners of an object, so that the object is not deleted with the policy.
    async fn disown<K: NamespacedKind>(
        &self,
        object: &ObjectName,
        metadata: &ObjectMeta,
    ) -> Result<()> {
        if self.options.dry_run {
            return Ok(());
        }
        let owners = metadata.owner_references.iter().flatten();
        let others: Vec<_> = owners.filter(|owner| !is_policy(owner)).collect();
        let patch = Patch::Merge(json!({"metadata": {
            "ownerReferences": others,
            // Without the label, the next cleanup does not take it for an object of version 0.1.
            "labels": {LABEL_MANAGED_BY: null},
            "resourceVersion": metadata.resource_version,
        }}));
        let api: Api<K> = self.api_in(&object.namespace);
        let params = PatchParams::default();
        let written = unless_gone(api.patch_metadata(&object.name, &params, &patch));
        let request = format!("change the {object}");
        self.client.ask(&request, written).await.map(drop)
    }
}

/// Returns the response, or `None` if the object does not exist any more.
async fn unless_gone<T>(
    response: impl Future<Output = Result<T, kube::Error>>,
) -> Result<Option<T>, kube::Error> {
    match response.await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        response => response.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn read<T: DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).unwrap()
    }

    fn old_object(name: &str, owner: &str) -> Value {
        json!({"name": name, "namespace": "n",
            "labels": {"app.kubernetes.io/managed-by": "deltafold"},
            "ownerReferences": [{"apiVersion": "deltafold.io/v1alpha1", "kind": "EtcdBackupPolicy", "name": owner, "uid": "u"}]})
    }

    #[test]
    fn only_objects_of_the_old_controller_for_a_policy_are_removed() {
        assert!(is_of_old_version(&read(old_object(
            "deltafold-main",
            "main"
        ))));
        let changed = |path: &str, value: Value| {
            let mut object = old_object("deltafold-main", "main");
            *object.pointer_mut(path).unwrap() = value;
            is_of_old_version(&read(object))
        };
        for (path, value) in [
            ("/name", json!("main")),
            ("/name", json!("deltafold-other")),
            ("/name", json!("deltafold-leases")),
            ("/labels", json!({})),
            ("/labels/app.kubernetes.io~1managed-by", json!("Helm")),
            ("/ownerReferences", json!([])),
            ("/ownerReferences/0/kind", json!("EtcdBackupTask")),
            ("/ownerReferences/0/apiVersion", json!("evil.io/v1alpha1")),
            ("/ownerReferences/0/name", json!("other")),
        ] {
            assert!(!changed(path, value.clone()), "{path} {value}");
        }
    }

    #[test]
    fn a_used_object_is_left_with_the_reason() {
        let object = read(old_object("deltafold-main", "main"));
        let user = |namespace: &str, account: &str| {
            let key = (namespace.to_owned(), account.to_owned());
            AccountUsers::from([(key, "Pod p".to_owned())])
        };
        let decide = |users| decide("Role", &object, &users);
        assert_eq!(decide(AccountUsers::new()), Decision::Delete);
        assert_eq!(decide(user("m", "deltafold-main")), Decision::Delete);
        assert_eq!(decide(user("n", "deltafold-mai")), Decision::Delete);
        let reason = "the Pod p uses the ServiceAccount deltafold-main".to_owned();
        assert_eq!(decide(user("n", "deltafold-main")), Decision::Leave(reason));
    }

    /// The ServiceAccount of a policy named `jobs` has the name of that of all Jobs.
    #[test]
    fn the_account_of_a_policy_named_jobs_is_disowned() {
        let object: ObjectMeta = read(old_object("deltafold-jobs", "jobs"));
        let key = ("n".to_owned(), "deltafold-jobs".to_owned());
        let users = AccountUsers::from([(key, "Pod p".to_owned())]);
        assert!(is_of_old_version(&object));
        assert_eq!(decide("ServiceAccount", &object, &users), Decision::Disown);
        assert_eq!(decide("RoleBinding", &object, &users), Decision::Delete);
        assert_eq!(decide("Role", &object, &users), Decision::Delete);
    }

    #[test]
    fn finished_jobs_and_pods_use_no_account() {
        let template = json!({"spec": {"serviceAccountName": "a", "containers": []}});
        let job = |conditions: Value| -> Job {
            read(json!({"spec": {"template": template}, "status": {"conditions": conditions}}))
        };
        let condition = |type_: &str, status: &str| json!([{"type": type_, "status": status}]);
        assert_eq!(account_of_job(&job(json!([]))), Some("a"));
        for (type_, status, account) in [
            ("Complete", "True", None),
            ("Failed", "True", None),
            ("Failed", "False", Some("a")),
            ("FailureTarget", "True", Some("a")),
            ("Suspended", "True", Some("a")),
        ] {
            let job = job(condition(type_, status));
            assert_eq!(account_of_job(&job), account, "{type_} {status}");
        }
        for (phase, account) in [
            ("Running", Some("a")),
            ("Pending", Some("a")),
            ("Failed", None),
            ("Succeeded", None),
        ] {
            let pod: Pod = read(json!({"spec": template["spec"], "status": {"phase": phase}}));
            assert_eq!(account_of_pod(&pod), account, "{phase}");
        }
        let cron_job: CronJob = read(
            json!({"spec": {"schedule": "@daily", "jobTemplate": {"spec": {"template": template}}}}),
        );
        assert_eq!(account_of_cron_job(&cron_job), Some("a"));
        let deployment: Deployment = read(json!({"spec": {"selector": {}, "template": template}}));
        assert_eq!(account_of_deployment(&deployment), Some("a"));
    }

    #[test]
    fn other_finalizers_are_kept() {
        let of = |finalizers: &[&str]| {
            let secret: PartialObjectMeta<Secret> =
                read(json!({"apiVersion": "v1", "kind": "Secret",
                "metadata": {"name": "s", "finalizers": finalizers}}));
            other_finalizers(&secret)
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&["a.io/b"]), None);
        assert_eq!(of(&[FINALIZER]), Some(vec![]));
        assert_eq!(of(&["a.io/b", FINALIZER]), Some(vec!["a.io/b".to_owned()]));
    }
}
