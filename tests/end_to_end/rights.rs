//! The rights in the manifests suffice for what the controller does and allow nothing else, and admission policies refuse what the controller refuses.

use super::manifests::{Cluster, PATIENCE, SPACE, api, client};
use crate::support::chart::{self, CONTROLLER, NAMESPACE};
use crate::support::manifests::{kind, name};
use crate::support::scratch;
use deltafold::controller::jobs::{Allowed, Settings};
use kube::Client;
use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The rights of a user, according to the API server, as `kubectl auth can-i` reports them.
struct Rights {
    own: Client,
    // Contains the kubeconfig.
    _folder: TempDir,
}

impl Rights {
    async fn of(cluster: &Cluster, namespace: &str, account: &str) -> Self {
        let token = cluster
            .server
            .service_account_token(namespace, account)
            .await;
        let folder = scratch::folder().unwrap();
        let own = client(&cluster.server, folder.path(), &token).await;
        Rights {
            own,
            _folder: folder,
        }
    }

    /// In a namespace, or in all if it is empty.
    async fn may(&self, namespace: &str, verb: &str, group: &str, resource: &str) -> bool {
        let (resource, name) = resource.split_once(':').unwrap_or((resource, ""));
        let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "metadata": {},
            "spec": {"resourceAttributes": {"namespace": namespace, "verb": verb, "group": group,
                "resource": resource, "subresource": subresource, "name": name}},
        });
        let review = serde_json::from_value(review).unwrap();
        let kind = GroupVersionKind::gvk("authorization.k8s.io", "v1", "SelfSubjectAccessReview");
        let api: Api<DynamicObject> =
            Api::all_with(self.own.clone(), &ApiResource::from_gvk(&kind));
        let answer = api.create(&PostParams::default(), &review).await.unwrap();
        answer.data["status"]["allowed"] == true
    }

    /// Asserts that each verb on each resource (`resource:name`) is allowed in the namespace, or that none is.
    async fn check(&self, namespace: &str, all: &[(&str, &str, &str)], allowed: bool) {
        for (verbs, group, resource) in all {
            for verb in verbs.split(' ') {
                let may = self.may(namespace, verb, group, resource).await;
                assert_eq!(may, allowed, "{verb} {resource} in \"{namespace}\"");
            }
        }
    }
}

const RBAC: &str = "rbac.authorization.k8s.io";

/// What the controller does in a namespace with policies.
const NEEDED: [(&str, &str, &str); 11] = [
    ("get list watch", "deltafold.io", "etcdbackuppolicies"),
    ("get list watch delete", "deltafold.io", "etcdbackuptasks"),
    ("patch", "deltafold.io", "etcdbackuppolicies/status"),
    ("patch", "deltafold.io", "etcdbackuptasks/status"),
    ("update", "deltafold.io", "etcdbackuptasks/finalizers"),
    ("get list watch create delete", "batch", "jobs"),
    ("get list watch create patch delete", "batch", "cronjobs"),
    ("get list watch create patch delete", "apps", "deployments"),
    ("get list watch", "", "pods"),
    ("get list watch create", "coordination.k8s.io", "leases"),
    ("list watch", "discovery.k8s.io", "endpointslices"),
];

/// What it does not do.
const NOT_NEEDED: [(&str, &str, &str); 17] = [
    (
        "create update patch delete",
        "deltafold.io",
        "etcdbackuppolicies",
    ),
    ("create update patch", "deltafold.io", "etcdbackuptasks"),
    ("patch update", "batch", "jobs"),
    ("create delete", "", "pods"),
    ("create", "", "pods/exec"),
    ("get list watch create update patch delete", "", "secrets"),
    ("update patch delete list", "", "serviceaccounts"),
    ("create", "", "serviceaccounts/token"),
    ("impersonate", "", "serviceaccounts"),
    ("update patch delete", "coordination.k8s.io", "leases"),
    (
        "get create update patch delete escalate bind",
        RBAC,
        "roles",
    ),
    (
        "create update patch delete escalate bind",
        RBAC,
        "clusterroles",
    ),
    ("bind", RBAC, "clusterroles:cluster-admin"),
    ("escalate", RBAC, "clusterroles:deltafold-jobs"),
    ("update patch delete", RBAC, "rolebindings"),
    ("create", RBAC, "clusterrolebindings"),
    ("get", "", "configmaps"),
];

async fn install(cluster: &Cluster, namespace: &str, values: &[&str]) {
    let own = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
    cluster.apply(&own).await.unwrap();
    for object in chart::objects_in(namespace, values) {
        let applied = cluster.apply(&object).await;
        applied.unwrap_or_else(|e| panic!("{} {}: {e}", kind(&object), name(&object)));
        if kind(&object) == "CustomResourceDefinition" {
            cluster.wait_established(&object).await;
        }
    }
}

/// The rights suffice for what the controller does, and allow nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn the_controllers_rights_are_what_it_needs() {
    let cluster = Cluster::start().await;
    install(&cluster, NAMESPACE, &[]).await;
    let own = Rights::of(&cluster, NAMESPACE, CONTROLLER).await;
    own.check(SPACE, &NEEDED, true).await;
    own.check("", &NEEDED, true).await;
    own.check(SPACE, &NOT_NEEDED, false).await;
    let lease = "leases:deltafold-controller";
    let leader = [("get create patch", "coordination.k8s.io", lease)];
    own.check(NAMESPACE, &leader, true).await;
    let others = [("patch", "coordination.k8s.io", lease)];
    own.check(SPACE, &others, false).await;
    let events = [("create patch", "events.k8s.io", "events")];
    own.check(SPACE, &events, true).await;
    // It creates what Jobs need in a namespace, and can bind no other role.
    let account = json!({"apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": {"name": "deltafold-jobs", "namespace": SPACE}});
    let binding = |role: &str, kind: &str, name: &str| {
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
            "metadata": {"name": name, "namespace": SPACE},
            "roleRef": {"apiGroup": RBAC, "kind": kind, "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": "deltafold-jobs", "namespace": SPACE}],
        })
    };
    let create = async |object: &Value| {
        let typed = serde_json::from_value(object.clone()).unwrap();
        let api = api(&own.own, object);
        api.create(&PostParams::default(), &typed).await
    };
    create(&account).await.unwrap();
    let wanted = binding("deltafold-jobs", "ClusterRole", "deltafold-jobs");
    create(&wanted).await.unwrap();
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
        "metadata": {"name": "deltafold-jobs", "namespace": SPACE},
        "rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]});
    cluster.apply(&role).await.unwrap();
    for (role, kind) in [
        ("cluster-admin", "ClusterRole"),
        ("system:aggregate-to-edit", "ClusterRole"),
        ("deltafold-edit", "ClusterRole"),
        ("deltafold-jobs", "Role"),
    ] {
        let refused = create(&binding(role, kind, "more")).await.unwrap_err();
        let refused = refused.to_string();
        let escalates = "attempting to grant RBAC permissions";
        assert!(refused.contains(escalates), "{kind} {role}: {refused}");
    }
    // The rights of a Job.
    let of_job = Rights::of(&cluster, SPACE, "deltafold-jobs").await;
    let leases = |verbs| [(verbs, "coordination.k8s.io", "leases")];
    of_job.check(SPACE, &leases("get create patch"), true).await;
    let not_needed = leases("list watch update delete");
    of_job.check(SPACE, &not_needed, false).await;
    let elsewhere = leases("get create patch");
    of_job.check("default", &elsewhere, false).await;
    let more = [("get list", "", "secrets"), ("get", "", "pods")];
    of_job.check(SPACE, &more, false).await;
}

/// With named namespaces, the controller has no rights in others.
#[tokio::test(flavor = "multi_thread")]
async fn in_named_namespaces_it_has_rights_there_alone() {
    let cluster = Cluster::start().await;
    cluster.server.create_namespace("second").await;
    let named = &format!("watchNamespaces={{{SPACE},second}}");
    install(&cluster, NAMESPACE, &[named]).await;
    // Applying it again succeeds.
    install(&cluster, NAMESPACE, &[named]).await;
    let own = Rights::of(&cluster, NAMESPACE, CONTROLLER).await;
    for namespace in [SPACE, "second"] {
        own.check(namespace, &NEEDED, true).await;
        own.check(namespace, &NOT_NEEDED, false).await;
        let made = [
            ("get create", "", "serviceaccounts"),
            ("get create", RBAC, "rolebindings"),
        ];
        own.check(namespace, &made, false).await;
        let of_jobs = Rights::of(&cluster, namespace, "deltafold-jobs").await;
        let leases = [("get create patch", "coordination.k8s.io", "leases")];
        of_jobs.check(namespace, &leases, true).await;
    }
    for namespace in ["", "default", "kube-system"] {
        own.check(namespace, &NEEDED, false).await;
    }
    let bind = [("bind", RBAC, "clusterroles:deltafold-jobs")];
    own.check("", &bind, false).await;
    let lease = "leases:deltafold-controller";
    let leader = [("get create patch", "coordination.k8s.io", lease)];
    own.check(NAMESPACE, &leader, true).await;
    let elsewhere = [("list watch", "coordination.k8s.io", "leases")];
    own.check(NAMESPACE, &elsewhere, false).await;
}

fn policy_in(namespace: &str, name: &str, spec: Value) -> Value {
    json!({"apiVersion": "deltafold.io/v1alpha1", "kind": "EtcdBackupPolicy",
        "metadata": {"name": name, "namespace": namespace}, "spec": spec})
}

fn task_in(namespace: &str, type_: &str, config: Value) -> Value {
    json!({"apiVersion": "deltafold.io/v1alpha1", "kind": "EtcdBackupTask",
        "metadata": {"name": "task", "namespace": namespace},
        "spec": {"policy": "main", "type": type_, "config": config}})
}

/// The API server refuses what the controller would refuse, with the same sentence, in each of two
/// installations.
#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_refuses_what_the_flags_do_not_allow() {
    let cluster = Cluster::start().await;
    cluster.define().await;
    for namespace in ["strict", "lax", "unwatched"] {
        cluster.server.create_namespace(namespace).await;
    }
    let on_node = json!({"url": "/b", "volume": {"hostPath": "/b"}});
    // It existed before.
    let mut old = policy_in("strict", "old", json!({"store": on_node}));
    cluster.apply(&old).await.unwrap();
    let own = ["image.repository=own", "image.tag=1"];
    install(
        &cluster,
        "one",
        &[&own[..], &["watchNamespaces={strict}"]].concat(),
    )
    .await;
    let lax = [
        "watchNamespaces={lax}",
        "allow.hostPath=true",
        "allow.hostNetwork=true",
        "allow.serviceAccount=true",
        "allow.root=true",
        "allow.tolerations=true",
        "allow.imagePrefixes={registry.example/team,a.example/}",
    ];
    install(&cluster, "two", &[&own[..], &lax].concat()).await;
    let lax = Allowed {
        allow_host_path: true,
        allow_host_network: true,
        allow_service_account: true,
        allow_root: true,
        allow_tolerations: true,
        allow_priority_class: false,
        allowed_image_prefix: vec!["registry.example/team".to_owned(), "a.example/".to_owned()],
    };
    let settings = Settings::new("own:1");
    let would_apply = async |object: &Value| {
        let mut params = PatchParams::apply("kubectl").force();
        params.dry_run = true;
        let (api, patch) = (cluster.api(object), Patch::Apply(object));
        api.patch(name(object), &params, &patch).await
    };
    // The policies take effect a moment after they are written.
    for namespace in ["strict", "lax"] {
        let template = json!({"priorityClassName": "x", "image": "x"});
        let spec = json!({"store": {"url": "s3://b"}, "jobTemplate": template});
        let policy = policy_in(namespace, "probe", spec);
        let copy = json!({"copyBackups": {"targetStore": on_node}});
        let task = task_in(namespace, "CopyBackups", copy);
        let started = Instant::now();
        while would_apply(&policy).await.is_ok()
            || namespace == "strict" && would_apply(&task).await.is_ok()
        {
            assert!(started.elapsed() < PATIENCE, "{namespace}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    let s3 = json!({"url": "s3://b/p"});
    let with = |field: &str, value: Value| json!({"store": s3, "jobTemplate": {field: value}});
    let mut specs = vec![
        json!({"store": s3}),
        json!({"store": s3, "jobTemplate": {"labels": {"a": "b"}, "hostNetwork": false, "tolerations": []}}),
        json!({"store": {"url": "/b", "volume": {"persistentVolumeClaim": "c"}}}),
        json!({"store": on_node}),
        with("hostNetwork", true.into()),
        with("serviceAccountName", "".into()),
        with("serviceAccountName", "other".into()),
        with("tolerations", json!([{"operator": "Exists"}])),
        with("priorityClassName", "high".into()),
    ];
    let images = [
        "own:1",
        "own:2",
        "own",
        "",
        "registry.example/team",
        "registry.example/team/x:1",
        "registry.example/team:1",
        "registry.example/team@sha256:00",
        "registry.example/team-evil/x",
        "registry.example/team.evil",
        "registry.example/team:5000/x",
        "registry.example/teams",
        "a.example/x",
        "a.example",
        "a.example:5000/x",
        "evil/a.example/x",
    ];
    specs.extend(images.map(|image| with("image", image.into())));
    let claim = |user: i64| json!({"restore": {"claimName": "c", "runAsUser": user}});
    let configs = [
        ("Verify", json!({})),
        ("Restore", json!({"restore": {"claimName": "c"}})),
        ("Restore", claim(0)),
        ("Restore", claim(1)),
        ("CopyBackups", json!({"copyBackups": {"targetStore": s3}})),
        (
            "CopyBackups",
            json!({"copyBackups": {"targetStore": on_node}}),
        ),
        (
            "CopyBackups",
            json!({"copyBackups": {"sourceStore": on_node}}),
        ),
    ];
    let mut refusals = 0;
    for (namespace, allowed) in [
        ("strict", Some(Allowed::default())),
        ("lax", Some(lax)),
        ("unwatched", None),
    ] {
        let policies = specs.iter().map(|spec| {
            let policy = policy_in(namespace, "new", spec.clone());
            let typed = serde_json::from_value(policy.clone()).unwrap();
            let problems = allowed.as_ref().map(|a| a.problems(&typed, &settings));
            (policy, problems.unwrap_or_default())
        });
        let tasks = configs.iter().map(|(type_, config)| {
            let task = task_in(namespace, type_, config.clone());
            let typed = serde_json::from_value(task.clone()).unwrap();
            let problems = allowed.as_ref().map(|a| a.task_problems(&typed));
            (task, problems.unwrap_or_default())
        });
        for (object, problems) in policies.chain(tasks) {
            let told = would_apply(&object).await;
            let Some(problem) = problems.first() else {
                told.unwrap_or_else(|e| panic!("{namespace} {}: {e}", object["spec"]));
                continue;
            };
            let kube::Error::Api(refused) = told.unwrap_err() else {
                panic!("{object}: no refusal");
            };
            assert!(
                refused.message.ends_with(problem),
                "{}: {problem}",
                refused.message
            );
            assert_eq!(refused.code, 403);
            refusals += 1;
        }
    }
    assert!(refusals > 25, "{refusals}");
    // An existing object stays accepted, whatever else is changed.
    old["metadata"]["labels"] = json!({"a": "b"});
    cluster.apply(&old).await.unwrap();
    let status = json!({"apiVersion": old["apiVersion"], "kind": old["kind"], "status": {"activeJobs": ["x"]}});
    let params = PatchParams::apply("deltafold").force();
    let (api, patch) = (cluster.api(&old), Patch::Apply(&status));
    api.patch_status("old", &params, &patch).await.unwrap();
    for more in [json!(true), json!(false)] {
        let mut changed = old.clone();
        changed["spec"]["suspend"] = more.clone();
        let changed = cluster.apply(&changed).await;
        // Setting the default is no change.
        assert_eq!(changed.is_ok(), more == false, "{more}");
    }
    old["spec"]["store"] = json!({"url": "s3://b/p"});
    cluster.apply(&old).await.unwrap();
}
