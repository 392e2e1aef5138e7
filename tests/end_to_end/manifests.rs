//! A real API server takes what `deltafold manifests` prints, and the chart makes the same.

use crate::support::etcd::Etcd;
use crate::support::kube::{Apiserver, TOKEN};
use crate::support::manifests::{documents, kind, name, path, printed, read};
use crate::support::schema::Schema;
use crate::support::scratch;
use crate::support::tools::{self, EtcdVersion};
use deltafold::controller::api::crds;
use deltafold::controller::jobs::{Allowed, Settings};
use deltafold::controller::manifests;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Client, Config};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const SPACE: &str = "backup";
const PATIENCE: Duration = Duration::from_secs(60);

fn helm(args: &[&str]) -> Vec<Value> {
    let chart = path("jobs/helm/deltafold");
    let home = scratch::folder().unwrap();
    let mut command = std::process::Command::new(tools::helm());
    tools::forget_env(&mut command, &["HELM_", "KUBE"]);
    let out = command
        .env("HOME", home.path())
        .args(["template", "deltafold"])
        .arg(chart)
        .args(["--namespace", manifests::NAMESPACE, "--include-crds"])
        .args(["--kube-version", "1.36.3"])
        .args(args)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    // Before each document Helm puts where it is from.
    let text = String::from_utf8(out.stdout).unwrap();
    documents(text.trim_start_matches("---\n"))
}

/// By kind, namespace and name.
fn sorted(objects: Vec<Value>) -> BTreeMap<[String; 3], Value> {
    let key = |o: &Value| {
        let namespace = o["metadata"]["namespace"].as_str().unwrap_or_default();
        [kind(o), namespace, name(o)].map(str::to_owned)
    };
    let count = objects.len();
    let sorted: BTreeMap<_, _> = objects.into_iter().map(|o| (key(&o), o)).collect();
    assert_eq!(sorted.len(), count, "one of them is there twice");
    sorted
}

/// Flags of `manifests install`, and values of the chart that say the same.
const CHOICES: [(&[&str], &[&str]); 5] = [
    (&[], &[]),
    (
        &["--watch-namespace", "one", "--watch-namespace", "two"],
        &["watchNamespaces={one,two}"],
    ),
    (
        &[
            "--image",
            "registry/x:7",
            "--aggregate-roles",
            "--api-server-port",
            "16443",
        ],
        &[
            "image.repository=registry/x",
            "image.tag=7",
            "aggregateRoles=true",
            "apiServerPorts={16443}",
        ],
    ),
    (
        &[
            "--allowed-image-prefix",
            "registry.example/team",
            "--allowed-image-prefix",
            "x/",
            "--allow-root",
            "--allow-tolerations",
            "--enforce-existing",
        ],
        &[
            "allow.imagePrefixes={registry.example/team,x/}",
            "allow.root=true",
            "allow.tolerations=true",
            "enforceExisting=true",
        ],
    ),
    (
        &[
            "--allow-host-path",
            "--allow-host-network",
            "--allow-service-account",
            "--allow-root",
            "--allow-priority-class",
            "--watch-namespace",
            "one",
        ],
        &[
            "allow.hostPath=true",
            "allow.hostNetwork=true",
            "allow.serviceAccount=true",
            "allow.root=true",
            "allow.priorityClass=true",
            "watchNamespaces={one}",
        ],
    ),
];

#[test]
fn the_chart_makes_the_same_objects() {
    for (flags, values) in CHOICES {
        let mut wanted = sorted(documents(&printed(&[&["install"], flags].concat())));
        // Helm makes it with --create-namespace.
        let namespace = ["Namespace", "", manifests::NAMESPACE].map(str::to_owned);
        assert!(wanted.remove(&namespace).is_some());
        let values = values.iter().flat_map(|value| ["--set", value]);
        let made = sorted(helm(&values.collect::<Vec<_>>()));
        let names = |m: &BTreeMap<_, _>| m.keys().cloned().collect::<Vec<[String; 3]>>();
        assert_eq!(names(&made), names(&wanted), "{flags:?}");
        for (key, object) in &wanted {
            assert_eq!(&made[key], object, "{flags:?} {key:?}");
        }
    }
}

#[test]
fn every_value_of_the_chart_has_an_effect() {
    let plain = helm(&[]);
    let changes = [
        "image.repository=registry/x",
        "image.tag=7",
        "image.pullPolicy=Always",
        "imagePullSecrets[0]=pull",
        "jobImage=registry/jobs:7",
        "replicas=3",
        "watchNamespaces={one}",
        "allow.hostPath=true",
        "allow.hostNetwork=true",
        "allow.serviceAccount=true",
        "allow.root=true",
        "allow.tolerations=true",
        "allow.priorityClass=true",
        "allow.imagePrefixes={registry.example/team}",
        "enforceExisting=true",
        "networkPolicies=false",
        "apiServerPorts={8443}",
        "controller.extraArgs[0]=--max-jobs=7",
        "resources.requests.cpu=2",
        "nodeSelector.disk=fast",
        "tolerations[0].operator=Exists",
        "priorityClassName=high",
        "affinity.nodeAffinity.a=b",
        "aggregateRoles=true",
        "podDisruptionBudget=false",
        "metricsService=false",
    ];
    let mut seen = BTreeSet::new();
    for change in changes {
        let made = helm(&["--set", change]);
        assert_ne!(made, plain, "{change}");
        let key = change.split(['=', '.', '[']).next().unwrap();
        seen.insert(key.to_owned());
        // What is asked of the program, it takes.
        let deployment = made.iter().find(|o| kind(o) == "Deployment").unwrap();
        let args = &deployment["spec"]["template"]["spec"]["containers"][0]["args"];
        let args: Vec<String> = serde_json::from_value(args.clone()).unwrap();
        deltafold::cli::check(&args).unwrap_or_else(|e| panic!("{change}: {e}"));
    }
    let values: Value = yaml_serde::from_str(&read("jobs/helm/deltafold/values.yaml")).unwrap();
    let all: BTreeSet<String> = values.as_object().unwrap().keys().cloned().collect();
    assert_eq!(seen, all);
}

/// A real API server, and the library's client of it.
struct Cluster {
    server: Apiserver,
    client: Client,
    _etcd: Etcd,
    _folder: TempDir,
}

impl Cluster {
    async fn start() -> Self {
        let folder = scratch::folder().unwrap();
        let etcd = Etcd::start(EtcdVersion::V3_6, &folder.path().join("etcd"));
        let server = Apiserver::start(&etcd).await;
        server.create_namespace(SPACE).await;
        let client = client(&server, folder.path(), TOKEN).await;
        Cluster {
            server,
            client,
            _etcd: etcd,
            _folder: folder,
        }
    }

    fn api(&self, object: &Value) -> Api<DynamicObject> {
        api(&self.client, object)
    }

    /// As `kubectl apply --server-side` does it, every field checked.
    async fn apply(&self, object: &Value) -> Result<DynamicObject, kube::Error> {
        let mut params = PatchParams::apply("kubectl").force();
        params.field_validation = Some(kube::api::ValidationDirective::Strict);
        let patch = Patch::Apply(object);
        self.api(object).patch(name(object), &params, &patch).await
    }

    /// Applies all definitions, and waits until they are served.
    async fn define(&self) {
        for crd in documents(&printed(&["crds"])) {
            self.apply(&crd).await.unwrap();
            self.wait_established(&crd).await;
        }
    }

    async fn wait_established(&self, crd: &Value) {
        let started = Instant::now();
        loop {
            let there = self.api(crd).get(name(crd)).await.unwrap();
            let conditions = there.data["status"]["conditions"].as_array().cloned();
            let holds = |type_: &str, status: &str| {
                let mut all = conditions.iter().flatten();
                all.any(|c| c["type"] == type_ && c["status"] == status)
            };
            assert!(!holds("NonStructuralSchema", "True"), "{conditions:?}");
            if holds("Established", "True") && holds("NamesAccepted", "True") {
                return;
            }
            assert!(started.elapsed() < PATIENCE, "{conditions:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

async fn client(server: &Apiserver, folder: &Path, token: &str) -> Client {
    let file = folder.join(format!("config-{}", token.len()));
    server.kubeconfig(&file, SPACE, token);
    let config = Kubeconfig::read_from(&file).unwrap();
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(config, &options).await;
    Client::try_from(config.unwrap()).unwrap()
}

fn api(client: &Client, object: &Value) -> Api<DynamicObject> {
    let version = object["apiVersion"].as_str().unwrap();
    let (group, version) = version.split_once('/').unwrap_or(("", version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind(object)));
    let of_cluster = [
        "Namespace",
        "CustomResourceDefinition",
        "ClusterRole",
        "ClusterRoleBinding",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    ];
    let is_ours = kind(object).starts_with("EtcdBackup");
    match object["metadata"]["namespace"].as_str() {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None if of_cluster.contains(&kind(object)) => Api::all_with(client.clone(), &resource),
        None if is_ours => Api::namespaced_with(client.clone(), SPACE, &resource),
        None => panic!("{object}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_takes_all_of_it() {
    let cluster = Cluster::start().await;
    let mut objects = 0;
    // One of the samples names a ServiceAccount.
    let args = ["install", "--allow-service-account"];
    for object in documents(&printed(&args)) {
        let applied = cluster.apply(&object).await;
        applied.unwrap_or_else(|e| panic!("{} {}: {e}", kind(&object), name(&object)));
        if kind(&object) == "CustomResourceDefinition" {
            cluster.wait_established(&object).await;
        }
        objects += 1;
    }
    assert_eq!(objects, 19);
    // Again: nothing is in the way, and nothing changes.
    for object in documents(&printed(&args)) {
        let before = cluster.api(&object).get(name(&object)).await.unwrap();
        let after = cluster.apply(&object).await.unwrap();
        assert_eq!(
            before.metadata.generation, after.metadata.generation,
            "{object}"
        );
    }
    let mut samples = 0;
    for object in documents(&printed(&["samples"])) {
        let applied = cluster.apply(&object).await;
        let applied = applied.unwrap_or_else(|e| panic!("{}: {e}", name(&object)));
        assert!(applied.metadata.uid.is_some());
        // Nothing else than the API's own rules is against it, either.
        if kind(&object) == "EtcdBackupPolicy" {
            let policy = serde_json::from_value(json!(applied)).unwrap();
            let problems = deltafold::controller::jobs::problems(&policy);
            assert_eq!(problems, Vec::<String>::new(), "{}", name(&object));
            let settings = Settings::new(manifests::IMAGE);
            let forbidden = Allowed::default().problems(&policy, &settings);
            assert_eq!(
                forbidden.is_empty(),
                name(&object) != "gcs",
                "{forbidden:?}"
            );
        }
        samples += 1;
    }
    assert_eq!(samples, 10);
    // Users of a namespace, by the roles that come along.
    let view = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}});
    assert!(cluster.api(&view).get(SPACE).await.is_ok());
    // The columns that kubectl shows.
    let columns = crds().into_iter().flat_map(|crd| crd.spec.versions);
    let columns = columns.map(|v| v.additional_printer_columns.unwrap_or_default().len());
    assert_eq!(columns.collect::<Vec<_>>(), [11, 5]);
}

/// What the rights of the printed objects are for somebody: asked of the API server, as `kubectl auth can-i` does it.
struct Rights {
    own: Client,
    // The kubeconfig is in it.
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

    /// In a namespace; in all of them if it is empty.
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

    /// Each verb on each resource, a name behind a colon, is allowed in the namespace, or none.
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

/// What the controller does in a namespace of policies.
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

/// What it does not.
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

async fn install(cluster: &Cluster, args: &[&str]) {
    for object in documents(&printed(args)) {
        let applied = cluster.apply(&object).await;
        applied.unwrap_or_else(|e| panic!("{} {}: {e}", kind(&object), name(&object)));
        if kind(&object) == "CustomResourceDefinition" {
            cluster.wait_established(&object).await;
        }
    }
}

/// The rights are enough for what the controller does, and for nothing that it does not.
#[tokio::test(flavor = "multi_thread")]
async fn the_controllers_rights_are_what_it_needs() {
    let cluster = Cluster::start().await;
    install(&cluster, &["install"]).await;
    let own = Rights::of(&cluster, manifests::NAMESPACE, manifests::CONTROLLER).await;
    own.check(SPACE, &NEEDED, true).await;
    own.check("", &NEEDED, true).await;
    own.check(SPACE, &NOT_NEEDED, false).await;
    let lease = "leases:deltafold-controller";
    let leader = [("get create patch", "coordination.k8s.io", lease)];
    own.check(manifests::NAMESPACE, &leader, true).await;
    let others = [("patch", "coordination.k8s.io", lease)];
    own.check(SPACE, &others, false).await;
    let events = [("create patch", "events.k8s.io", "events")];
    own.check(SPACE, &events, true).await;
    // It makes what Jobs need in a namespace, and can bind nothing else.
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
    // A Job's own rights.
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

/// With named namespaces the controller has no right in others.
#[tokio::test(flavor = "multi_thread")]
async fn in_named_namespaces_it_has_rights_there_alone() {
    let cluster = Cluster::start().await;
    cluster.server.create_namespace("second").await;
    let named = [
        "install",
        "--watch-namespace",
        SPACE,
        "--watch-namespace",
        "second",
    ];
    install(&cluster, &named).await;
    // Again: nothing is in the way.
    install(&cluster, &named).await;
    let own = Rights::of(&cluster, manifests::NAMESPACE, manifests::CONTROLLER).await;
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
    own.check(manifests::NAMESPACE, &leader, true).await;
    let elsewhere = [("list watch", "coordination.k8s.io", "leases")];
    own.check(manifests::NAMESPACE, &elsewhere, false).await;
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

/// The API server refuses what the controller would, with the same sentence, in each of two installations.
#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_refuses_what_the_flags_do_not_allow() {
    let cluster = Cluster::start().await;
    cluster.define().await;
    for namespace in ["strict", "lax", "unwatched"] {
        cluster.server.create_namespace(namespace).await;
    }
    let on_node = json!({"url": "/b", "volume": {"hostPath": "/b"}});
    // It was there before.
    let mut old = policy_in("strict", "old", json!({"store": on_node}));
    cluster.apply(&old).await.unwrap();
    install(
        &cluster,
        &[
            "install",
            "-n",
            "one",
            "--image",
            "own:1",
            "--watch-namespace",
            "strict",
        ],
    )
    .await;
    let lax = [
        "install",
        "-n",
        "two",
        "--image",
        "own:1",
        "--watch-namespace",
        "lax",
        "--allow-host-path",
        "--allow-host-network",
        "--allow-service-account",
        "--allow-root",
        "--allow-tolerations",
        "--allowed-image-prefix",
        "registry.example/team,a.example/",
    ];
    install(&cluster, &lax).await;
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
    // They are in force a moment after they were written.
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
    // What was there before goes on, whatever else is written to it.
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
        // The default is no change.
        assert_eq!(changed.is_ok(), more == false, "{more}");
    }
    old["spec"]["store"] = json!({"url": "s3://b/p"});
    cluster.apply(&old).await.unwrap();
}

/// As 0.1 made it for a policy.
fn made_by_old(kind: &str, namespace: &str, policy: &str) -> Value {
    let version = match kind {
        "ServiceAccount" => "v1",
        _ => "rbac.authorization.k8s.io/v1",
    };
    let name = format!("deltafold-{policy}");
    let mut object = json!({
        "apiVersion": version, "kind": kind,
        "metadata": {
            "name": name, "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": "deltafold", "deltafold.io/policy": policy},
            "ownerReferences": [{"apiVersion": "deltafold.io/v1alpha1", "kind": "EtcdBackupPolicy",
                "name": policy, "uid": "0", "controller": true, "blockOwnerDeletion": true}],
        },
    });
    if kind == "RoleBinding" {
        object["roleRef"] = json!({"apiGroup": RBAC, "kind": "Role", "name": name});
        object["subjects"] =
            json!([{"kind": "ServiceAccount", "name": name, "namespace": namespace}]);
    }
    object
}

/// With the rights of its Job: what 0.1 made goes, what is used stays until it is not, and nothing else is touched.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_old_controller_made_is_cleaned_up() {
    let cluster = Cluster::start().await;
    cluster.server.create_namespace("elsewhere").await;
    cluster.server.create_namespace(manifests::NAMESPACE).await;
    install(&cluster, &["cleanup"]).await;
    const KINDS: [&str; 3] = ["ServiceAccount", "Role", "RoleBinding"];
    for (namespace, policy) in [
        (SPACE, "main"),
        ("elsewhere", "main"),
        (SPACE, "used"),
        (SPACE, "jobs"),
    ] {
        for kind in KINDS {
            cluster
                .apply(&made_by_old(kind, namespace, policy))
                .await
                .unwrap();
        }
    }
    let mut foreign = made_by_old("Role", SPACE, "foreign");
    foreign["metadata"]["labels"] = json!({});
    cluster.apply(&foreign).await.unwrap();
    let secret = |name: &str, finalizers: Value| {
        json!({"apiVersion": "v1", "kind": "Secret", "stringData": {"key": "hidden"},
            "metadata": {"name": name, "namespace": SPACE, "finalizers": finalizers}})
    };
    let secrets = [
        secret("s3", json!(["deltafold.io/in-use"])),
        secret("two", json!(["example.com/mine", "deltafold.io/in-use"])),
        secret("going", json!(["deltafold.io/in-use"])),
        secret("plain", json!([])),
    ];
    for secret in &secrets {
        cluster.apply(secret).await.unwrap();
    }
    let going = cluster.api(&secrets[2]);
    let _ = going
        .delete("going", &DeleteParams::default())
        .await
        .unwrap();
    let pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "main-full-1", "namespace": SPACE},
        "spec": {"serviceAccountName": "deltafold-used", "containers": [{"name": "a", "image": "b"}]}});
    cluster.apply(&pod).await.unwrap();

    let token = cluster
        .server
        .service_account_token(manifests::NAMESPACE, manifests::CLEANUP)
        .await;
    let folder = scratch::folder().unwrap();
    let config = folder.path().join("config");
    cluster.server.kubeconfig(&config, SPACE, &token);
    let schema = Schema::of("cleanup");
    let clean_up = |args: &[&str]| -> Value {
        let mut command = crate::support::deltafold();
        tools::forget_env(&mut command, &["KUBE"]);
        let out = command
            .arg("cleanup")
            .args(args)
            .args(["--output", "json"])
            .env("KUBECONFIG", &config)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{said}");
        let outcome = serde_json::from_slice(&out.stdout).unwrap();
        schema.check(&outcome);
        outcome
    };
    let count = |outcome: &Value| {
        ["released", "deleted", "disowned", "left"]
            .map(|list| outcome[list].as_array().unwrap().len())
    };
    let there = async |object: &Value| cluster.api(object).get_opt(name(object)).await.unwrap();

    let plan = clean_up(&["--dry-run"]);
    assert_eq!(count(&plan), [3, 8, 1, 3], "{plan:#}");
    assert!(there(&secrets[2]).await.is_some());
    // One namespace alone.
    let first = clean_up(&["--namespace", "elsewhere"]);
    assert_eq!(count(&first), [0, 3, 0, 0], "{first:#}");
    let outcome = clean_up(&[]);
    assert_eq!(count(&outcome), [3, 5, 1, 3], "{outcome:#}");
    for left in outcome["left"].as_array().unwrap() {
        assert_eq!(left["name"], "deltafold-used");
        let reason = "the Pod main-full-1 uses the ServiceAccount deltafold-used";
        assert_eq!(left["reason"], reason);
    }
    assert!(there(&secrets[2]).await.is_none());
    let two = there(&secrets[1]).await.unwrap();
    assert_eq!(two.metadata.finalizers.unwrap(), ["example.com/mine"]);
    for kind in KINDS {
        for namespace in [SPACE, "elsewhere"] {
            assert!(there(&made_by_old(kind, namespace, "main")).await.is_none());
        }
    }
    // The ServiceAccount of all Jobs stays when the policy `jobs` goes.
    let account = there(&made_by_old("ServiceAccount", SPACE, "jobs"))
        .await
        .unwrap();
    assert_eq!(account.metadata.owner_references.unwrap_or_default(), []);
    assert!(
        there(&made_by_old("RoleBinding", SPACE, "jobs"))
            .await
            .is_none()
    );
    assert!(there(&foreign).await.is_some());
    // Again; and once the Pod is gone.
    assert_eq!(count(&clean_up(&[])), [0, 0, 0, 3]);
    let params = DeleteParams::default().grace_period(0);
    let _ = cluster.api(&pod).delete(name(&pod), &params).await.unwrap();
    assert_eq!(count(&clean_up(&[])), [0, 3, 0, 0]);
    assert_eq!(count(&clean_up(&[])), [0, 0, 0, 0]);
}

/// What is refused, and by which of our sentences.
#[tokio::test(flavor = "multi_thread")]
async fn wrong_objects_are_refused_in_our_words() {
    let cluster = Cluster::start().await;
    cluster.define().await;
    let s3 = json!({"url": "s3://b/p"});
    let live = json!({"endpoints": ["http://etcd:2379"]});
    let policies = [
        (json!({}), "spec.store"),
        (json!({"store": {"url": ""}}), "at least 1 chars long"),
        (
            json!({"store": {"url": "b/p"}}),
            "give a URL such as s3://bucket/prefix",
        ),
        (json!({"store": {"url": "/b"}}), "needs a volume"),
        (
            json!({"store": {"url": "s3://b", "volume": {"hostPath": "/b"}}}),
            "needs a volume",
        ),
        (
            json!({"store": {"url": "/b", "volume": {}}}),
            "give either persistentVolumeClaim or hostPath",
        ),
        (
            json!({"store": {"url": "/b", "volume": {"hostPath": "/b", "persistentVolumeClaim": "c"}}}),
            "give either persistentVolumeClaim or hostPath",
        ),
        (
            json!({"store": s3, "snapshot": {"fullSchedule": "@daily"}}),
            "snapshots need etcd.endpoints",
        ),
        (
            json!({"store": s3, "snapshot": {"follow": {}}}),
            "snapshots need etcd.endpoints",
        ),
        (
            json!({"store": s3, "etcd": live, "snapshot": {"deltaSchedule": "@hourly", "follow": {}}}),
            "give either deltaSchedule or follow",
        ),
        (
            json!({"store": s3, "maintenance": {"schedule": "@daily", "defrag": "always"}}),
            "maintenance needs etcd.endpoints",
        ),
        (
            json!({"store": s3, "etcd": live, "maintenance": {"schedule": "@daily"}}),
            "give compactKeep, defrag, or both",
        ),
        (
            json!({"store": s3, "verify": {"schedule": "@daily", "againstCluster": true}}),
            "verify.againstCluster needs etcd.endpoints",
        ),
        (
            json!({"store": s3, "etcd": {"endpoints": []}}),
            "at least 1 items",
        ),
        (
            json!({"store": s3, "compaction": {"eventsThreshold": 0}}),
            "greater than or equal to 1",
        ),
        (
            json!({"store": s3, "compaction": {"activeDeadline": "soon"}}),
            "activeDeadline",
        ),
        (
            json!({"store": s3, "compaction": {"sizeThreshold": "1.5Gi"}}),
            "sizeThreshold",
        ),
        (
            json!({"store": s3, "compaction": {"keepHistory": "some"}}),
            "keepHistory",
        ),
        (
            json!({"store": s3, "retention": {"policy": "All"}}),
            "supported values",
        ),
        (json!({"store": s3, "unknown": 1}), "unknown"),
    ];
    let mut seen = 0;
    for (spec, says) in &policies {
        let object = json!({"apiVersion": "deltafold.io/v1alpha1", "kind": "EtcdBackupPolicy",
            "metadata": {"name": "bad"}, "spec": spec});
        let refused = cluster.apply(&object).await.unwrap_err().to_string();
        assert!(refused.contains(says), "{spec}: {refused}");
        seen += 1;
    }
    let long = json!({"apiVersion": "deltafold.io/v1alpha1", "kind": "EtcdBackupPolicy",
        "metadata": {"name": "n".repeat(41)}, "spec": {"store": s3}});
    let refused = cluster.apply(&long).await.unwrap_err().to_string();
    assert!(refused.contains("at most 40 characters"), "{refused}");

    let of =
        |type_: &str, config: Value| json!({"policy": "main", "type": type_, "config": config});
    let tasks = [
        (json!({"type": "Verify"}), "spec.policy"),
        (
            json!({"policy": "main", "type": "Other"}),
            "supported values",
        ),
        (
            json!({"policy": "main", "type": "Restore"}),
            "Restore needs config.restore",
        ),
        (
            json!({"policy": "main", "type": "OnDemandSnapshot"}),
            "needs config.onDemandSnapshot",
        ),
        (
            of("CopyBackups", json!({})),
            "CopyBackups needs config.copyBackups",
        ),
        (
            of("Maintenance", json!({})),
            "Maintenance needs config.maintenance",
        ),
        (
            of("Maintenance", json!({"maintenance": {}})),
            "give compactKeep, defrag, or both",
        ),
        (
            of(
                "OnDemandSnapshot",
                json!({"onDemandSnapshot": {"type": "delta", "final": true}}),
            ),
            "only a full snapshot can be final",
        ),
        (
            of("Verify", json!({"restore": {"claimName": "c"}})),
            "config.restore is for the type Restore",
        ),
        (
            of("Verify", json!({"onDemandCompaction": {}})),
            "config.onDemandCompaction is for the type OnDemandCompaction",
        ),
        (
            of(
                "Restore",
                json!({"restore": {"claimName": "c"}, "verify": {}}),
            ),
            "config.verify is for the type Verify",
        ),
        (
            of(
                "Restore",
                json!({"restore": {"claimName": "c", "revision": 1, "time": "2026-11-20T12:00:00Z"}}),
            ),
            "give either revision or time",
        ),
        (
            of(
                "Restore",
                json!({"restore": {"claimName": "c", "subPath": "/etc"}}),
            ),
            "subPath",
        ),
        (
            json!({"policy": "main", "type": "Verify", "ttlSecondsAfterFinished": -1}),
            "ttlSecondsAfterFinished",
        ),
    ];
    for (spec, says) in &tasks {
        let object = json!({"apiVersion": "deltafold.io/v1alpha1", "kind": "EtcdBackupTask",
            "metadata": {"name": "bad"}, "spec": spec});
        let refused = cluster.apply(&object).await.unwrap_err().to_string();
        assert!(refused.contains(says), "{spec}: {refused}");
        seen += 1;
    }
    assert_eq!(seen, 34);
    // A task is not changed once it is there.
    let mut task = json!({"apiVersion": "deltafold.io/v1alpha1", "kind": "EtcdBackupTask",
        "metadata": {"name": "good"}, "spec": {"policy": "main", "type": "Verify"}});
    cluster.apply(&task).await.unwrap();
    task["spec"]["policy"] = "other".into();
    let refused = cluster.apply(&task).await.unwrap_err().to_string();
    assert!(
        refused.contains("a task's spec cannot be changed"),
        "{refused}"
    );
}
