//! Removes once what the controller of version 0.1 made at run time and later versions do not use: a finalizer of
//! Secrets, and a Role, a RoleBinding and a ServiceAccount for each policy.
//!
//! What is done with an object is decided by pure functions; [`run`] lists, decides and writes. It asks for no contents
//! of Secrets, and may run again at any time. `cli::cleanup` calls it.

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
use std::fmt::Debug;

/// The finalizer of Secrets that were in use.
const FINALIZER: &str = "deltafold.io/in-use";
/// Objects of one answer to a list.
const PAGE: u32 = 500;
/// Attempts at an object that somebody else writes at the same time.
const ATTEMPTS: u32 = 5;

/// Where to clean up, and whether.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The namespaces; empty for all
    pub namespaces: Vec<String>,
    /// Nothing is written
    pub dry_run: bool,
}

/// What was done, or would be. The fields are a contract: `docs/cleanup-result.schema.json`.
#[derive(Debug, Default, JsonSchema, Serialize)]
pub struct Outcome {
    /// Whether nothing was written: the lists tell what would be done.
    pub dry_run: bool,
    /// The Secrets that the finalizer `deltafold.io/in-use` was removed from.
    pub released: Vec<Item>,
    /// The objects that were deleted.
    pub deleted: Vec<Item>,
    /// The ServiceAccounts of a policy named `jobs` that no longer belong to it: Jobs of all policies use that name now.
    pub disowned: Vec<Item>,
    /// What is left. Clean up again later.
    pub left: Vec<Left>,
}

/// An object.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
pub struct Item {
    /// Its kind.
    pub kind: String,
    /// Where it is.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// An object that is left.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
pub struct Left {
    /// The object.
    #[serde(flatten)]
    pub object: Item,
    /// Why. For people: it may change.
    pub reason: String,
}

/// The ServiceAccounts that are used, by namespace and name, and by what.
type Users = BTreeMap<(String, String), String>;

/// What is done with an object of version 0.1.
#[derive(Debug, PartialEq, Eq)]
enum Decision {
    /// It is deleted.
    Delete,
    /// It stays, and belongs to no policy any more.
    Disown,
    /// It is left, for this reason.
    Leave(String),
}

/// Whether version 0.1 made a Role, RoleBinding or ServiceAccount for a policy: by label, owner and name.
fn is_ours(object: &ObjectMeta) -> bool {
    let labels = object.labels.as_ref();
    let manager = labels.and_then(|l| l.get(LABEL_MANAGED_BY));
    let owners = object.owner_references.iter().flatten();
    manager.is_some_and(|m| m == NAME)
        && owners
            .into_iter()
            .any(|owner| is_policy(owner) && object.name == Some(format!("{NAME}-{}", owner.name)))
}

fn is_policy(owner: &OwnerReference) -> bool {
    let group = owner.api_version.split_once('/').map(|(group, _)| group);
    owner.kind == "EtcdBackupPolicy" && group == Some(GROUP)
}

/// What to do with an object that version 0.1 made.
fn decide(kind: &str, object: &ObjectMeta, users: &Users) -> Decision {
    let name = object.name.clone().unwrap_or_default();
    // A policy named `jobs`: its ServiceAccount has the name of that of all Jobs now, and its RoleBinding is in the way.
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

/// The finalizers of a Secret without version 0.1's; `None` if it has not got that.
fn other_finalizers(secret: &PartialObjectMeta<Secret>) -> Option<Vec<String>> {
    let all = secret.finalizers();
    let others = all.iter().filter(|f| *f != FINALIZER).cloned();
    all.iter().any(|f| f == FINALIZER).then(|| others.collect())
}

fn account_of(template: Option<&PodTemplateSpec>) -> Option<&str> {
    template?.spec.as_ref()?.service_account_name.as_deref()
}

/// The ServiceAccount of a Pod that has not ended.
fn account_of_pod(pod: &Pod) -> Option<&str> {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    match phase {
        Some("Succeeded" | "Failed") => None,
        _ => pod.spec.as_ref()?.service_account_name.as_deref(),
    }
}

/// The ServiceAccount of a Job that may still make a Pod.
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

fn item<K: Resource<DynamicType = ()>>(object: &ObjectMeta) -> Item {
    Item {
        kind: K::kind(&()).into_owned(),
        namespace: object.namespace.clone().unwrap_or_default(),
        name: object.name.clone().unwrap_or_default(),
    }
}

/// Cleans up.
///
/// # Errors
/// Those of the API: `PermissionDenied`, `KubernetesUnreachable` and the like. What was done before is done.
pub async fn run(person: &UserClient, options: &Options) -> Result<Outcome> {
    let cleanup = Cleanup { person, options };
    let mut outcome = Outcome {
        dry_run: options.dry_run,
        ..Outcome::default()
    };
    cleanup.secrets(&mut outcome).await?;
    let bindings = cleanup.made_by_old::<RoleBinding>().await?;
    let roles = cleanup.made_by_old::<Role>().await?;
    let accounts = cleanup.made_by_old::<ServiceAccount>().await?;
    let mut namespaces: BTreeSet<String> = BTreeSet::new();
    namespaces.extend(bindings.iter().filter_map(ResourceExt::namespace));
    namespaces.extend(roles.iter().filter_map(ResourceExt::namespace));
    namespaces.extend(accounts.iter().filter_map(ResourceExt::namespace));
    let users = cleanup.users(&namespaces).await?;
    cleanup.remove(bindings, &users, &mut outcome).await?;
    cleanup.remove(roles, &users, &mut outcome).await?;
    cleanup.remove(accounts, &users, &mut outcome).await?;
    Ok(outcome)
}

struct Cleanup<'a> {
    person: &'a UserClient,
    options: &'a Options,
}

impl Cleanup<'_> {
    /// The objects of a kind in the namespaces of the options.
    fn scope<K>(&self) -> Vec<Api<K>>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        match self.options.namespaces.is_empty() {
            true => vec![self.person.all()],
            false => {
                let namespaces: BTreeSet<&String> = self.options.namespaces.iter().collect();
                let there = namespaces.into_iter().map(|n| self.there(n));
                there.collect()
            }
        }
    }

    fn there<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        self.person.in_namespace(namespace).api()
    }

    /// All pages of a list.
    async fn list<T: Clone, F>(&self, kind: &str, ask: impl Fn(ListParams) -> F) -> Result<Vec<T>>
    where
        F: Future<Output = Result<ObjectList<T>, kube::Error>>,
    {
        let (mut all, mut next) = (Vec::new(), None);
        loop {
            let mut params = ListParams::default().limit(PAGE);
            params.continue_token = next;
            let what = format!("list the {kind}s");
            let page = self.person.ask(&what, ask(params)).await?;
            all.extend(page.items);
            next = page.metadata.continue_.filter(|token| !token.is_empty());
            if next.is_none() {
                return Ok(all);
            }
        }
    }

    async fn held_secrets(&self) -> Result<Vec<PartialObjectMeta<Secret>>> {
        let mut held = Vec::new();
        for api in self.scope::<Secret>() {
            let list = |params| {
                let api = api.clone();
                async move { api.list_metadata(&params).await }
            };
            let all = self.list("Secret", list).await?;
            held.extend(all.into_iter().filter(|s| other_finalizers(s).is_some()));
        }
        Ok(held)
    }

    async fn secrets(&self, outcome: &mut Outcome) -> Result<()> {
        for secret in self.held_secrets().await? {
            let object = item::<Secret>(&secret.metadata);
            match self.options.dry_run || self.release(secret).await? {
                true => outcome.released.push(object),
                false => outcome.left.push(Left {
                    object,
                    reason: "somebody else writes it all the time".to_owned(),
                }),
            }
        }
        if self.options.dry_run || outcome.released.is_empty() {
            return Ok(());
        }
        for secret in self.held_secrets().await? {
            let object = item::<Secret>(&secret.metadata);
            if outcome.released.contains(&object) {
                outcome.released.retain(|released| *released != object);
                let reason = "it has the finalizer again: a controller of version 0.1 still runs";
                outcome.left.push(Left {
                    object,
                    reason: reason.to_owned(),
                });
            }
        }
        Ok(())
    }

    /// Removes the finalizer of a Secret; says whether it is without it. The version of the Secret makes a write of
    /// somebody else a conflict: no other finalizer is lost.
    async fn release(&self, mut secret: PartialObjectMeta<Secret>) -> Result<bool> {
        let object = item::<Secret>(&secret.metadata);
        let api: Api<Secret> = self.there(&object.namespace);
        let full = format!("the Secret {}/{}", object.namespace, object.name);
        let removing = format!("remove the finalizer of {full}");
        let reading = format!("read {full}");
        for _ in 0..ATTEMPTS {
            let Some(finalizers) = other_finalizers(&secret) else {
                return Ok(true);
            };
            let patch = json!({"metadata": {
                "finalizers": finalizers,
                "resourceVersion": secret.resource_version(),
            }});
            let patch = Patch::Merge(patch);
            let params = PatchParams::default();
            let written = api.patch_metadata(&object.name, &params, &patch);
            match self.person.ask(&removing, unless_gone(written)).await {
                Ok(_) => return Ok(true),
                Err(e) if e.reason() == Reason::Conflict => {}
                Err(e) => return Err(e),
            }
            let again = api.get_metadata(&object.name);
            match self.person.ask(&reading, unless_gone(again)).await? {
                Some(now) => secret = now,
                None => return Ok(true),
            }
        }
        Ok(false)
    }

    /// The objects of a kind that version 0.1 made for policies.
    async fn made_by_old<K>(&self) -> Result<Vec<PartialObjectMeta<K>>>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned,
    {
        let mut made = Vec::new();
        for api in self.scope::<K>() {
            let list = |params: ListParams| {
                let api = api.clone();
                let params = params.labels(&format!("{LABEL_MANAGED_BY}={NAME}"));
                async move { api.list_metadata(&params).await }
            };
            let all = self.list(&K::kind(&()), list).await?;
            made.extend(all.into_iter().filter(|o| is_ours(&o.metadata)));
        }
        Ok(made)
    }

    /// What uses ServiceAccounts in these namespaces.
    async fn users(&self, namespaces: &BTreeSet<String>) -> Result<Users> {
        let mut users = Users::new();
        for namespace in namespaces {
            self.users_of(namespace, account_of_deployment, &mut users)
                .await?;
            self.users_of(namespace, account_of_cron_job, &mut users)
                .await?;
            self.users_of(namespace, account_of_job, &mut users).await?;
            self.users_of(namespace, account_of_pod, &mut users).await?;
        }
        Ok(users)
    }

    async fn users_of<K>(
        &self,
        namespace: &str,
        account: fn(&K) -> Option<&str>,
        users: &mut Users,
    ) -> Result<()>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned,
    {
        let kind = K::kind(&());
        let api: Api<K> = self.there(namespace);
        let list = |params| {
            let api = api.clone();
            async move { api.list(&params).await }
        };
        for object in self.list(&kind, list).await? {
            if let Some(account) = account(&object) {
                let key = (namespace.to_owned(), account.to_owned());
                users.insert(key, format!("{kind} {}", object.name_any()));
            }
        }
        Ok(())
    }

    /// Does with these objects what is decided.
    async fn remove<K>(
        &self,
        objects: Vec<PartialObjectMeta<K>>,
        users: &Users,
        outcome: &mut Outcome,
    ) -> Result<()>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned,
    {
        for there in objects {
            let object = item::<K>(&there.metadata);
            let done = match decide(&object.kind, &there.metadata, users) {
                Decision::Leave(reason) => {
                    outcome.left.push(Left { object, reason });
                    continue;
                }
                Decision::Delete => {
                    outcome.deleted.push(object.clone());
                    self.delete::<K>(&object, &there.metadata).await
                }
                Decision::Disown => {
                    outcome.disowned.push(object.clone());
                    self.disown::<K>(&object, &there.metadata).await
                }
            };
            match done {
                Ok(()) => {}
                Err(e) if e.reason() == Reason::Conflict => {
                    outcome.deleted.retain(|o| *o != object);
                    outcome.disowned.retain(|o| *o != object);
                    let reason = "somebody else changed it meanwhile".to_owned();
                    outcome.left.push(Left { object, reason });
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    async fn delete<K>(&self, object: &Item, there: &ObjectMeta) -> Result<()>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned,
    {
        if self.options.dry_run {
            return Ok(());
        }
        let params = DeleteParams {
            preconditions: Some(Preconditions {
                uid: there.uid.clone(),
                resource_version: there.resource_version.clone(),
            }),
            ..DeleteParams::default()
        };
        let api: Api<K> = self.there(&object.namespace);
        let what = format!(
            "delete the {} {}/{}",
            object.kind, object.namespace, object.name
        );
        let deleted = unless_gone(api.delete(&object.name, &params));
        self.person.ask(&what, deleted).await.map(drop)
    }

    /// Has no policy own an object any more: it would go with the policy.
    async fn disown<K>(&self, object: &Item, there: &ObjectMeta) -> Result<()>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + Debug
            + DeserializeOwned,
    {
        if self.options.dry_run {
            return Ok(());
        }
        let owners = there.owner_references.iter().flatten();
        let others: Vec<_> = owners.filter(|owner| !is_policy(owner)).collect();
        let patch = json!({"metadata": {
            "ownerReferences": others,
            // The next look takes it for an object of version 0.1 no more.
            "labels": {LABEL_MANAGED_BY: null},
            "resourceVersion": there.resource_version,
        }});
        let api: Api<K> = self.there(&object.namespace);
        let what = format!(
            "change the {} {}/{}",
            object.kind, object.namespace, object.name
        );
        let (params, patch) = (PatchParams::default(), Patch::Merge(patch));
        let written = unless_gone(api.patch_metadata(&object.name, &params, &patch));
        self.person.ask(&what, written).await.map(drop)
    }
}

/// The answer, or `None` if there is no such object any more.
async fn unless_gone<T>(
    answer: impl Future<Output = Result<T, kube::Error>>,
) -> Result<Option<T>, kube::Error> {
    match answer.await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
        other => other.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn read<T: DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).unwrap()
    }

    fn made(name: &str, owner: &str) -> Value {
        json!({"name": name, "namespace": "n",
            "labels": {"app.kubernetes.io/managed-by": "deltafold"},
            "ownerReferences": [{"apiVersion": "deltafold.io/v1alpha1", "kind": "EtcdBackupPolicy", "name": owner, "uid": "u"}]})
    }

    #[test]
    fn only_what_the_old_controller_made_for_a_policy_is_taken() {
        assert!(is_ours(&read(made("deltafold-main", "main"))));
        let changed = |path: &str, value: Value| {
            let mut object = made("deltafold-main", "main");
            *object.pointer_mut(path).unwrap() = value;
            is_ours(&read(object))
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
    fn what_is_used_is_left_with_the_reason() {
        let object = read(made("deltafold-main", "main"));
        let user = |namespace: &str, account: &str| {
            let key = (namespace.to_owned(), account.to_owned());
            Users::from([(key, "Pod p".to_owned())])
        };
        let decide = |users| decide("Role", &object, &users);
        assert_eq!(decide(Users::new()), Decision::Delete);
        assert_eq!(decide(user("m", "deltafold-main")), Decision::Delete);
        assert_eq!(decide(user("n", "deltafold-mai")), Decision::Delete);
        let reason = "the Pod p uses the ServiceAccount deltafold-main".to_owned();
        assert_eq!(decide(user("n", "deltafold-main")), Decision::Leave(reason));
    }

    /// The ServiceAccount of all Jobs has the name that a policy `jobs` gave its own.
    #[test]
    fn a_policy_named_jobs_gives_its_account_away() {
        let object: ObjectMeta = read(made("deltafold-jobs", "jobs"));
        let key = ("n".to_owned(), "deltafold-jobs".to_owned());
        let users = Users::from([(key, "Pod p".to_owned())]);
        assert!(is_ours(&object));
        assert_eq!(decide("ServiceAccount", &object, &users), Decision::Disown);
        assert_eq!(decide("RoleBinding", &object, &users), Decision::Delete);
        assert_eq!(decide("Role", &object, &users), Decision::Delete);
    }

    #[test]
    fn a_run_that_has_ended_uses_nothing() {
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
    fn other_finalizers_stay() {
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
