//! The rights in the manifests suffice for what the controller does and allow nothing else, and admission policies refuse what the controller refuses.

use crate::support::chart::{self, CONTROLLER, NAMESPACE};
use crate::support::kube::{Api, Body, Refused, collection};
use crate::support::namespace::{Alone, TestNamespace};
use deltafold::controller::jobs::{Allowed, Settings};
use reqwest::Method;
use serde_json::{Value, json};

/// The namespace of `Alone`.
const SPACE: &str = "backup";

/// The rights of a user, according to the API server, as `kubectl auth can-i` reports them.
struct Rights(Api);

impl Rights {
    async fn of(cluster: &TestNamespace, namespace: &str, account: &str) -> Self {
        let token = cluster.api.token(namespace, account).await.unwrap();
        Rights(Api::new(cluster.api.url(), &token))
    }

    /// Creates an object as this user.
    async fn create(&self, object: &Value) -> Result<Value, Refused> {
        let path = collection(object, SPACE);
        self.0
            .ask(Method::POST, &path, Some((Body::Json, object)))
            .await
    }

    /// In a namespace, or in all if it is empty.
    async fn may(&self, namespace: &str, verb: &str, group: &str, resource: &str) -> bool {
        let (resource, name) = resource.split_once(':').unwrap_or((resource, ""));
        let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {"namespace": namespace, "verb": verb, "group": group,
                "resource": resource, "subresource": subresource, "name": name}},
        });
        let answer = self.create(&review).await.unwrap();
        answer["status"]["allowed"] == true
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

async fn install(cluster: &TestNamespace, namespace: &str, values: &[&str]) {
    let own = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
    cluster.apply_all(&[own]).await;
    let objects = chart::objects_in(namespace, values);
    cluster.apply_all(&objects).await;
}

/// The rights suffice for what the controller does, and allow nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn the_controllers_rights_are_what_it_needs() {
    let alone = Alone::start().await;
    let cluster = &alone.space;
    install(cluster, NAMESPACE, &[]).await;
    let own = Rights::of(cluster, NAMESPACE, CONTROLLER).await;
    own.check(SPACE, &NEEDED, true).await;
    own.check("", &NEEDED, true).await;
    own.check(SPACE, &NOT_NEEDED, false).await;
    let lease = "leases:deltafold-controller";
    let leader = [("get create patch", "coordination.k8s.io", lease)];
    own.check(NAMESPACE, &leader, true).await;
    let others = [("patch", "coordination.k8s.io", lease)];
    own.check(SPACE, &others, false).await;
    let events = [("create get list patch", "", "events")];
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
    own.create(&account).await.unwrap();
    let wanted = binding("deltafold-jobs", "ClusterRole", "deltafold-jobs");
    own.create(&wanted).await.unwrap();
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
        "metadata": {"name": "deltafold-jobs", "namespace": SPACE},
        "rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]});
    cluster.apply_object(&role).await.unwrap();
    for (role, kind) in [
        ("cluster-admin", "ClusterRole"),
        ("system:aggregate-to-edit", "ClusterRole"),
        ("deltafold-edit", "ClusterRole"),
        ("deltafold-jobs", "Role"),
    ] {
        let refused = own.create(&binding(role, kind, "more")).await;
        let refused = refused.unwrap_err().message();
        let escalates = "attempting to grant RBAC permissions";
        assert!(refused.contains(escalates), "{kind} {role}: {refused}");
    }
    // The rights of a Job.
    let of_job = Rights::of(cluster, SPACE, "deltafold-jobs").await;
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
    let alone = Alone::start().await;
    let cluster = &alone.space;
    let _second = TestNamespace::named(&cluster.api, "second").await;
    let named = &format!("watchNamespaces={{{SPACE},second}}");
    install(cluster, NAMESPACE, &[named]).await;
    // Applying it again succeeds.
    install(cluster, NAMESPACE, &[named]).await;
    let own = Rights::of(cluster, NAMESPACE, CONTROLLER).await;
    for namespace in [SPACE, "second"] {
        own.check(namespace, &NEEDED, true).await;
        own.check(namespace, &NOT_NEEDED, false).await;
        let made = [
            ("get create", "", "serviceaccounts"),
            ("get create", RBAC, "rolebindings"),
        ];
        own.check(namespace, &made, false).await;
        let of_jobs = Rights::of(cluster, namespace, "deltafold-jobs").await;
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
    let alone = Alone::start().await;
    let cluster = &alone.space;
    cluster.apply_all(&chart::crds()).await;
    for namespace in ["strict", "lax", "unwatched"] {
        TestNamespace::named(&cluster.api, namespace).await;
    }
    let on_node = json!({"url": "/b", "volume": {"hostPath": "/b"}});
    // It existed before.
    let mut old = policy_in("strict", "old", json!({"store": on_node}));
    cluster.apply_object(&old).await.unwrap();
    let own = ["image.repository=own", "image.tag=1"];
    install(
        cluster,
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
    install(cluster, "two", &[&own[..], &lax].concat()).await;
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
        let path = cluster.path_to(object);
        let path = format!("{path}?fieldManager=kubectl&force=true&dryRun=All");
        let body = Some((Body::Apply, object));
        cluster.api.ask(Method::PATCH, &path, body).await
    };
    // The policies take effect a moment after they are written.
    for namespace in ["strict", "lax"] {
        let template = json!({"priorityClassName": "x", "image": "x"});
        let spec = json!({"store": {"url": "s3://b"}, "jobTemplate": template});
        let policy = policy_in(namespace, "probe", spec);
        let copy = json!({"copyBackups": {"targetStore": on_node}});
        let task = task_in(namespace, "CopyBackups", copy);
        let refuses = async || {
            let allowed = would_apply(&policy).await.is_ok()
                || namespace == "strict" && would_apply(&task).await.is_ok();
            (!allowed).then_some(())
        };
        cluster.wait(namespace, refuses).await;
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
            let answer = would_apply(&object).await;
            let Some(problem) = problems.first() else {
                answer.unwrap_or_else(|e| panic!("{namespace} {}: {e}", object["spec"]));
                continue;
            };
            let refused = answer.unwrap_err();
            // The library names the option, and the API server the controller's flag.
            let told = refused.message().replace("--", "");
            assert!(told.ends_with(problem), "{refused}: {problem}");
            assert_eq!(refused.code, 403);
            refusals += 1;
        }
    }
    assert!(refusals > 25, "{refusals}");
    // An existing object stays accepted, whatever else is changed.
    old["metadata"]["labels"] = json!({"a": "b"});
    cluster.apply_object(&old).await.unwrap();
    let status = json!({"apiVersion": old["apiVersion"], "kind": old["kind"], "status": {"activeJobs": ["x"]}});
    let path = format!("{}/status", cluster.path_to(&old));
    cluster.api.apply(&path, &status).await.unwrap();
    for more in [json!(true), json!(false)] {
        let mut changed = old.clone();
        changed["spec"]["suspend"] = more.clone();
        let changed = cluster.apply_object(&changed).await;
        // Setting the default is no change.
        assert_eq!(changed.is_ok(), more == false, "{more}");
    }
    old["spec"]["store"] = json!({"url": "s3://b/p"});
    cluster.apply_object(&old).await.unwrap();
}
