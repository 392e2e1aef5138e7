//! `recover` on a real API server with Kubernetes' controllers.
//!
//! The danger: what comes back is not what was there, something else is touched, or a second run does it once more.

use super::stored_objects::{Resources, take_snapshot};
use crate::support::etcd::Etcd;
use crate::support::kube::{Api, Apiserver, Body, ControllerManager, TOKEN};
use crate::support::manifests::{documents, kind, name};
use crate::support::namespace::until;
use crate::support::tools::EtcdVersion;
use crate::support::{deltafold, run_json, scratch};
use base64::prelude::{BASE64_STANDARD as STANDARD, Engine as _};
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// A cluster with controllers, encryption at rest, and a full snapshot of a namespace in it.
struct Shop {
    _controllers: ControllerManager,
    server: Apiserver,
    api: Api,
    etcd: Etcd,
    resources: Resources,
    store: PathBuf,
    kubeconfig: PathBuf,
    encryption: PathBuf,
    /// The objects as they were, by kind and name.
    before: BTreeMap<String, Value>,
    folder: TempDir,
}

const WIDGETS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/widgets.example.com";
const NAMESPACE: &str = "/api/v1/namespaces/shop";
const VOLUME: &str = "/api/v1/persistentvolumes/shop-data";

fn definition() -> Value {
    let all = documents(include_str!("stored_objects.yaml"));
    all.into_iter()
        .find(|object| kind(object) == "CustomResourceDefinition")
        .unwrap()
}

impl Shop {
    async fn start() -> Self {
        let folder = scratch::folder().unwrap();
        let etcd = Etcd::start(EtcdVersion::V3_6, &folder.path().join("data"));
        let encryption = folder.path().join("encryption.yaml");
        let key = json!({"name": "a", "secret": STANDARD.encode([7; 32])});
        let providers = json!([{"aescbc": {"keys": [key]}}, {"identity": {}}]);
        let configuration = json!({
            "kind": "EncryptionConfiguration", "apiVersion": "apiserver.config.k8s.io/v1",
            "resources": [{"resources": ["secrets"], "providers": providers}],
        });
        std::fs::write(&encryption, configuration.to_string()).unwrap();
        let args = format!("--encryption-provider-config={}", encryption.display());
        let server = Apiserver::start_with(&etcd, &[args]).await;
        let api = server.api();
        let path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
        api.must(Method::POST, path, Some((Body::Json, &definition())))
            .await;
        wait_until("widgets are served", async || {
            api.get("/apis/example.com/v1").await.is_some()
        })
        .await;
        let controllers = ControllerManager::start(&server);
        let resources = Resources::of(&api).await;
        let kubeconfig = folder.path().join("kubeconfig");
        server.kubeconfig(&kubeconfig, "default", TOKEN);
        let mut shop = Shop {
            _controllers: controllers,
            store: folder.path().join("store"),
            server,
            api,
            etcd,
            resources,
            kubeconfig,
            encryption,
            before: BTreeMap::new(),
            folder,
        };
        shop.create().await;
        take_snapshot("full", &shop.etcd, &shop.store);
        shop
    }

    /// Creates the namespace with all that is in it, and notes how the server serves it.
    async fn create(&mut self) {
        let mut uid = String::new();
        let objects = documents(include_str!("recovered_objects.yaml"));
        for object in &objects {
            let text = object.to_string().replace("\"UID\"", &format!("{uid:?}"));
            let object: Value = serde_json::from_str(&text).unwrap();
            let path = self.resources.collection(&object).unwrap();
            let created = self
                .api
                .must(Method::POST, &path, Some((Body::Json, &object)))
                .await;
            uid = created["metadata"]["uid"].as_str().unwrap().to_owned();
            if kind(&object) == "Namespace" {
                // No Pod is taken before its controller has made it.
                let account = "/api/v1/namespaces/shop/serviceaccounts/default";
                let has_account = async || self.api.get(account).await.is_some();
                wait_until("the namespace has its account", has_account).await;
            }
        }
        let bound = async || {
            self.get("/api/v1/namespaces/shop/persistentvolumeclaims/data")
                .await["status"]["phase"]
                == "Bound"
        };
        wait_until("the claim is bound", bound).await;
        let replicas = "/apis/apps/v1/namespaces/shop/replicasets";
        let has_replicas = async || {
            !self.get(replicas).await["items"]
                .as_array()
                .unwrap()
                .is_empty()
        };
        wait_until("the Deployment has its ReplicaSet", has_replicas).await;
        for object in &objects {
            let served = self.get(&self.resources.path(object).unwrap()).await;
            self.before
                .insert(format!("{}/{}", kind(object), name(object)), served);
        }
    }

    async fn get(&self, path: &str) -> Value {
        self.api.must(Method::GET, path, None).await
    }

    /// Deletes the namespace, and waits until it is gone.
    async fn delete(&self) {
        self.api.delete(NAMESPACE).await;
        let settings = "/api/v1/namespaces/shop/configmaps/settings";
        if self.api.get(settings).await.is_some() {
            let patch = json!({"metadata": {"finalizers": null}});
            self.api.merge(settings, &patch).await.unwrap();
        }
        wait_until("the namespace is gone", async || {
            self.api.get(NAMESPACE).await.is_none()
        })
        .await;
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = deltafold();
        command
            .arg("recover")
            .args(args)
            .env("KUBECONFIG", &self.kubeconfig);
        command
            .arg("--store")
            .arg(&self.store)
            .arg("--encryption-config")
            .arg(&self.encryption);
        command
    }

    fn recover(&self, args: &[&str]) -> (i32, Value, String) {
        run_json(self.command(args).args(["--output", "json"]))
    }

    /// Compares all objects with those before, but for what the rules leave out.
    async fn is_as_before(&self) {
        for (key, before) in &self.before {
            if key.starts_with("Lease/") {
                continue;
            }
            let path = self.resources.path(before).unwrap();
            let now = self.api.get(&path).await;
            let now = now.unwrap_or_else(|| panic!("{key} is not back"));
            assert_eq!(user_fields(&now), user_fields(before), "{key}");
        }
    }
}

/// What people set of an object: the rest is from the server and from controllers.
fn user_fields(object: &Value) -> Value {
    let mut object = object.clone();
    let kind = kind(&object).to_owned();
    object.as_object_mut().unwrap().remove("status");
    let metadata = object["metadata"].as_object_mut().unwrap();
    for field in [
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "managedFields",
        "finalizers",
    ] {
        metadata.remove(field);
    }
    if let Some(annotations) = metadata
        .get_mut("annotations")
        .and_then(Value::as_object_mut)
    {
        annotations.retain(|name, _| {
            !name.starts_with("pv.kubernetes.io/") && !name.starts_with("deployment.kubernetes.io/")
        });
        if annotations.is_empty() {
            metadata.remove("annotations");
        }
    }
    for owner in metadata
        .get_mut("ownerReferences")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        owner.as_object_mut().unwrap().remove("uid");
    }
    match kind.as_str() {
        "PersistentVolume" => {
            let claim = object["spec"]["claimRef"].as_object_mut().unwrap();
            claim.retain(|field, _| field == "name" || field == "namespace");
        }
        // The name of the volume with the token is random.
        "Pod" => {
            object["spec"].as_object_mut().unwrap().remove("volumes");
            object["spec"]["containers"][0]
                .as_object_mut()
                .unwrap()
                .remove("volumeMounts");
        }
        _ => {}
    }
    object
}

fn outcome<'r>(report: &'r Value, object: &str) -> &'r Value {
    let all = report["objects"].as_array().unwrap();
    let found = all.iter().find(|one| one["object"] == object);
    found.unwrap_or_else(|| panic!("{object} is not in {report:#}"))
}

/// Waits until something holds; at most a minute.
async fn wait_until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let held = until(Duration::from_secs(60), async || {
        holds().await.then_some(())
    });
    assert!(held.await.is_some(), "{what}: not within a minute");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_comes_back_as_it_was() {
    let shop = Shop::start().await;
    // The whole namespace is there.
    let (code, report, stderr) = shop.recover(&["-n", "shop"]);
    assert_eq!(
        (code, &report["status"]),
        (0, &json!("NothingToDo")),
        "{report:#}\n{stderr}"
    );
    assert_eq!(report["differing"], 0, "{report:#}");

    // It is about to be deleted: one of its objects has a finalizer.
    shop.api.delete(NAMESPACE).await;
    let said = async || {
        shop.get(NAMESPACE).await["status"]["conditions"]
            .to_string()
            .contains("example.com/keep")
    };
    wait_until("the namespace tells what holds it", said).await;
    let (code, report, _) = shop.recover(&["-n", "shop", "--execute"]);
    assert_eq!(
        (code, &report["reason"]),
        (75, &json!("PartlyDone")),
        "{report:#}"
    );
    assert_eq!(
        (&report["created"], &report["updated"]),
        (&json!(0), &json!(0))
    );
    let reason = &outcome(&report, "secret/shop/db")["reason"];
    assert!(
        reason.as_str().unwrap().contains("example.com/keep"),
        "{reason}"
    );
    shop.delete().await;

    // What would be done: nothing can be checked in a namespace that lacks.
    let (code, report, stderr) = shop.recover(&["-n", "shop"]);
    assert_eq!(code, 0, "{report:#}\n{stderr}");
    assert_eq!(report["dry_run"], true);
    assert_eq!(outcome(&report, "namespace/shop")["checked"], true);
    assert_eq!(
        outcome(&report, "configmap/shop/settings")["checked"],
        false
    );
    assert!(shop.api.get(NAMESPACE).await.is_none());

    let (code, report, stderr) = shop.recover(&["-n", "shop", "--execute"]);
    assert_eq!(code, 0, "{report:#}\n{stderr}");
    let lost = json!(["metadata.finalizers"]);
    assert_eq!(outcome(&report, "configmap/shop/settings")["without"], lost);
    for (kind, why) in [
        ("replicaset/", "its Deployment makes it anew"),
        ("lease/", "its holder makes it anew"),
    ] {
        let all = report["objects"].as_array().unwrap();
        let one = all
            .iter()
            .find(|one| one["object"].as_str().unwrap().starts_with(kind))
            .unwrap();
        assert_eq!(
            (&one["outcome"], &one["reason"]),
            (&json!("left_out"), &json!(why))
        );
    }
    shop.is_as_before().await;
    let (code, report, _) = shop.recover(&["-n", "shop", "--execute"]);
    assert_eq!(
        (code, &report["status"]),
        (0, &json!("NothingToDo")),
        "{report:#}"
    );
    assert_eq!(report["differing"], 0, "{report:#}");

    // The volume waits for the claim that is gone.
    assert_eq!(shop.get(VOLUME).await["status"]["phase"], "Released");
    let (_, report, _) = shop.recover(&["pv/shop-data", "--execute"]);
    assert_eq!(report["differing"], 1, "{report:#}");
    let (code, report, stderr) = shop.recover(&["pv/shop-data", "--execute", "--overwrite"]);
    assert_eq!(
        (code, &report["updated"]),
        (0, &json!(1)),
        "{report:#}\n{stderr}"
    );
    let (code, report, stderr) = shop.recover(&["pvc/shop/data", "--execute", "--wait"]);
    assert_eq!(code, 0, "{report:#}\n{stderr}");
    assert_eq!(
        outcome(&report, "persistentvolumeclaim/shop/data")["ready"],
        true
    );
    assert_eq!(shop.get(VOLUME).await["status"]["phase"], "Bound");
    // No kubelet runs its Pods.
    let (code, report, _) =
        shop.recover(&["deploy/shop/web", "--execute", "--wait", "--timeout", "1s"]);
    assert_eq!(
        (code, &report["reason"]),
        (75, &json!("PartlyDone")),
        "{report:#}"
    );
    assert_eq!(outcome(&report, "deployment/shop/web")["ready"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_is_killed_after_each_object_is_continued() {
    let shop = Shop::start().await;
    shop.delete().await;
    shop.api.delete(WIDGETS).await;
    shop.api
        .merge(VOLUME, &json!({"metadata": {"finalizers": null}}))
        .await
        .unwrap();
    shop.api.delete(VOLUME).await;
    let all = ["-n", "shop", "--execute"];
    let others = ["pv/shop-data", "crd/widgets.example.com", "--execute"];
    let mut runs = 0;
    for args in [&others[..], &all] {
        loop {
            let mut run = shop.command(args).stdout(Stdio::piped()).spawn().unwrap();
            let mut lines = BufReader::new(run.stdout.take().unwrap()).lines();
            let first = lines.next().unwrap().unwrap();
            if !first.starts_with('+') {
                assert!(first.starts_with("nothing to do"), "{first}");
                run.wait().unwrap();
                break;
            }
            run.kill().unwrap();
            run.wait().unwrap();
            runs += 1;
            assert!(runs < 100, "{first}");
        }
    }
    assert!(runs > 20, "{runs}");
    shop.is_as_before().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_was_asked_for_is_touched() {
    let shop = Shop::start().await;
    let config_maps = "/api/v1/namespaces/shop/configmaps";
    let begin = shop.etcd.revision().await;
    // Somebody changes one object, deletes others, and one of these is there again with other data.
    let changed = json!({"data": {"colour": "red"}});
    shop.api
        .merge(&format!("{config_maps}/settings"), &changed)
        .await
        .unwrap();
    shop.api
        .delete("/apis/example.com/v1/namespaces/shop/widgets/w")
        .await;
    wait_until("what it owns is deleted", async || {
        shop.api
            .get(&format!("{config_maps}/great-grandchild"))
            .await
            .is_none()
    })
    .await;
    shop.api
        .delete("/api/v1/namespaces/shop/services/web")
        .await;
    shop.api.delete("/api/v1/namespaces/shop/secrets/db").await;
    take_snapshot("delta", &shop.etcd, &shop.store);
    let since = begin.to_string();
    let deleted = ["--deleted", "--since", &since];
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "db", "namespace": "shop"}, "data": {"password": "bmV3"}});
    shop.api
        .must(
            Method::POST,
            "/api/v1/namespaces/shop/secrets",
            Some((Body::Json, &secret)),
        )
        .await;
    let ip = shop.before["Service/web"]["spec"]["clusterIP"].clone();
    let thief = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": "thief", "namespace": "shop"},
        "spec": {"clusterIP": ip, "ports": [{"port": 80}]},
    });
    shop.api
        .must(
            Method::POST,
            "/api/v1/namespaces/shop/services",
            Some((Body::Json, &thief)),
        )
        .await;

    // An object whose owner is gone stands alone.
    let (code, report, stderr) = shop.recover(&["cm/shop/child", "--revision", &since]);
    assert_eq!(code, 0, "{report:#}\n{stderr}");
    let without = json!(["metadata.ownerReferences[Widget/w]"]);
    assert_eq!(outcome(&report, "configmap/shop/child")["without"], without);

    // A dry run of the server does not look whether addresses are free.
    let (code, report, stderr) = shop.recover(&[&deleted[..], &["--execute"]].concat());
    assert_eq!(
        (code, &report["reason"]),
        (75, &json!("PartlyDone")),
        "{report:#}\n{stderr}"
    );
    let service = outcome(&report, "service/shop/web");
    let reason = service["reason"].as_str().unwrap();
    assert!(
        reason.contains("already allocated") && reason.contains("--new-addresses"),
        "{reason}"
    );
    let args = [&deleted[..], &["--new-addresses", "--execute"]].concat();
    let (code, report, stderr) = shop.recover(&args);
    assert_eq!(code, 0, "{report:#}\n{stderr}");
    assert_eq!(outcome(&report, "secret/shop/db")["reason"], "it exists");
    assert_eq!(
        shop.get("/api/v1/namespaces/shop/secrets/db").await["data"]["password"],
        "bmV3"
    );
    assert_eq!(
        shop.get(&format!("{config_maps}/settings")).await["data"]["colour"],
        "red"
    );
    let widget = shop
        .get("/apis/example.com/v1/namespaces/shop/widgets/w")
        .await;
    let child = shop.get(&format!("{config_maps}/child")).await;
    assert_eq!(
        child["metadata"]["ownerReferences"][0]["uid"],
        widget["metadata"]["uid"]
    );
    assert!(
        shop.api
            .get(&format!("{config_maps}/great-grandchild"))
            .await
            .is_some()
    );

    // What differs is left, and told; a Secret without its values.
    let list = shop.folder.path().join("list.yaml");
    std::fs::write(&list, "- configmap/shop/settings\n- apiVersion: v1\n  kind: Secret\n  metadata: {name: db, namespace: shop}\n").unwrap();
    let args = ["-f", list.to_str().unwrap(), "--revision", &since];
    let (code, report, _) = shop.recover(&[&args[..], &["--execute"]].concat());
    assert_eq!((code, &report["differing"]), (0, &json!(2)), "{report:#}");
    let changes = &outcome(&report, "configmap/shop/settings")["changes"];
    assert_eq!(
        changes,
        &json!([{"path": "data.colour", "old": "red", "new": "green"}])
    );
    assert!(!report.to_string().contains("aHVudGVyMg"), "{report:#}");
    let (code, report, _) = shop.recover(&[&args[..], &["--execute", "--overwrite"]].concat());
    assert_eq!((code, &report["updated"]), (0, &json!(2)), "{report:#}");
    assert_eq!(
        shop.get(&format!("{config_maps}/settings")).await["data"]["colour"],
        "green"
    );

    // An immutable object that differs is reported. The run does not fail.
    let fixed = json!({"data": {"colour": "blue"}, "immutable": true});
    let path = format!("{config_maps}/settings");
    shop.api.merge(&path, &fixed).await.unwrap();
    let (code, report, _) = shop.recover(&args);
    assert_eq!((code, &report["differing"]), (0, &json!(1)), "{report:#}");
    let reason = &outcome(&report, "configmap/shop/settings")["reason"];
    assert!(reason.to_string().contains("immutable"), "{reason}");

    // Quotas and webhooks speak before anything is written.
    shop.api.delete(&format!("{config_maps}/settings")).await;
    shop.api
        .merge(
            &format!("{config_maps}/settings"),
            &json!({"metadata": {"finalizers": null}}),
        )
        .await
        .unwrap_or_default();
    let tight = json!({"spec": {"hard": {"count/configmaps": "1"}}});
    shop.api
        .merge("/api/v1/namespaces/shop/resourcequotas/quota", &tight)
        .await
        .unwrap();
    let hook = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration", "metadata": {"name": "nobody"},
        "webhooks": [{
            "name": "nobody.example.com", "admissionReviewVersions": ["v1"], "sideEffects": "None", "failurePolicy": "Fail",
            "clientConfig": {"url": "https://127.0.0.1:1/"},
            "rules": [{"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["services"]}],
        }],
    });
    let path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations";
    shop.api
        .must(Method::POST, path, Some((Body::Json, &hook)))
        .await;
    shop.api
        .delete("/api/v1/namespaces/shop/services/headless")
        .await;
    let args = [
        "cm/shop/settings",
        "svc/shop/headless",
        "--revision",
        &since,
    ];
    let told = async || {
        let (code, report, _) = shop.recover(&args);
        let reason = |object| outcome(&report, object)["reason"].to_string();
        code == 75
            && reason("configmap/shop/settings").contains("exceeded quota")
            && reason("service/shop/headless").contains("nobody.example.com")
    };
    wait_until("the refusals of the quota and the webhook are told", told).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_cluster_is_refused() {
    let shop = Shop::start().await;
    let etcd = Etcd::start(EtcdVersion::V3_6, &shop.folder.path().join("other"));
    let other = Apiserver::start(&etcd).await;
    let kubeconfig = shop.folder.path().join("other.kubeconfig");
    other.kubeconfig(&kubeconfig, "default", TOKEN);
    let recover = |args: &[&str]| {
        let mut command = shop.command(args);
        run_json(
            command
                .args(["--output", "json"])
                .env("KUBECONFIG", &kubeconfig),
        )
    };
    let (code, report, _) = recover(&["-n", "shop", "--execute"]);
    assert_eq!(
        (code, &report["reason"]),
        (65, &json!("OtherCluster")),
        "{report:#}"
    );
    assert!(other.api().get(NAMESPACE).await.is_none());
    let args = ["-n", "shop", "--other-cluster", "--execute"];
    let (code, report, _) = recover(&args);
    // Its definition is not there.
    assert_eq!(code, 75, "{report:#}");
    let refused = outcome(&report, "widget.example.com/shop/w");
    assert_eq!(
        refused["reason"],
        "the API server does not serve Widget of example.com/v1"
    );
    assert_eq!(report["refused"], 1, "{report:#}");
    assert!(
        other
            .api()
            .get("/api/v1/namespaces/shop/configmaps/settings")
            .await
            .is_some()
    );
    drop(shop.server);
}

/// The manifests are those that kubectl applies, to a cluster without them.
#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_is_one_file_of_manifests() {
    let shop = Shop::start().await;
    let yaml = |store: &Path| {
        let mut command = deltafold();
        command
            .args(["recover", "-n", "shop", "-o", "yaml", "--store"])
            .arg(store);
        command
            .arg("--encryption-config")
            .arg(&shop.encryption)
            .output()
            .unwrap()
    };
    let printed = yaml(&shop.store);
    assert!(
        printed.status.success(),
        "{}",
        String::from_utf8_lossy(&printed.stderr)
    );
    let text = String::from_utf8(printed.stdout).unwrap();
    assert!(text.contains("# not here: replicaset/shop/web-"), "{text}");
    shop.delete().await;
    let manifests = documents(text.split_once("---\n").unwrap().1);
    assert_eq!(kind(&manifests[0]), "Namespace");
    for object in &manifests {
        let path = shop.resources.path(object).unwrap();
        shop.api
            .apply(&path, object)
            .await
            .unwrap_or_else(|e| panic!("{object}: {e}"));
    }
    assert!(
        shop.api
            .get("/api/v1/namespaces/shop/secrets/db")
            .await
            .is_some()
    );
}
