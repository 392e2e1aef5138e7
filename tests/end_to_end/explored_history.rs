//! The page of `explore` shows what a real API server served, at every moment of a real history.
//!
//! The history is that of fixtures/history, too: `tests/generate explored_history` records it again.

use crate::support::explore::{Page, id};
use crate::support::kube::{Api, Body};
use crate::support::namespace::Kubernetes;
use crate::support::{copy_dir, deltafold, fixtures_dir, scratch, succeed};
use reqwest::Method;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// What the API server served at a moment.
struct Moment {
    revision: String,
    /// The keys in etcd, and the objects that were served.
    objects: Vec<(String, Value)>,
}

const NAMESPACES: [&str; 2] = ["shop", "old"];
/// The resources: the path of the API that serves them, and their name there and in etcd's keys.
const RESOURCES: [(&str, &str); 4] = [
    ("/api/v1", "configmaps"),
    ("/api/v1", "secrets"),
    ("/apis/apps/v1", "deployments"),
    ("/apis/apps/v1", "replicasets"),
];

/// Returns what is served now. Nothing changes meanwhile but what is not looked at.
async fn served(api: &Api) -> Moment {
    let mut objects = Vec::new();
    let mut revision = String::new();
    for namespace in NAMESPACES {
        for (root, resource) in RESOURCES {
            let path = format!("{root}/namespaces/{namespace}/{resource}");
            let list = api.must(Method::GET, &path, None).await;
            revision = text(&list["metadata"]["resourceVersion"]);
            for item in list["items"].as_array().unwrap() {
                let name = text(&item["metadata"]["name"]);
                let object = api.must(Method::GET, &format!("{path}/{name}"), None).await;
                objects.push((format!("/registry/{resource}/{namespace}/{name}"), object));
            }
        }
    }
    Moment { revision, objects }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

/// Waits until Kubernetes' controllers have nothing left to do.
async fn settled(api: &Api) -> Moment {
    let mut before = served(api).await;
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let now = served(api).await;
        if now.objects == before.objects {
            return now;
        }
        before = now;
    }
}

async fn create(api: &Api, path: &str, object: Value) {
    let body = Some((Body::Json, &object));
    api.must(Method::POST, path, body).await;
}

/// Applies fields of an object as this manager, by server-side apply.
async fn apply_as(api: &Api, manager: &str, path: &str, object: Value) {
    let path = format!("{path}?fieldManager={manager}&force=true");
    api.must(Method::PATCH, &path, Some((Body::Apply, &object)))
        .await;
}

fn snapshot(kubernetes: &Kubernetes, store: &Path, kind: &str) {
    let mut command = deltafold();
    command.args(["snapshot", kind, "--output", "json", "--endpoints"]);
    command
        .arg(kubernetes.etcd.endpoint())
        .arg("--store")
        .arg(store);
    succeed(&mut command);
}

fn settings(values: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": values})
}

/// Two namespaces: a Deployment is rolled, a ConfigMap has two managers, a namespace is deleted.
async fn live(kubernetes: &Kubernetes, store: &Path) -> Vec<Moment> {
    let api = kubernetes.server.api();
    snapshot(kubernetes, store, "full");
    for namespace in NAMESPACES {
        create(
            &api,
            "/api/v1/namespaces",
            json!({"metadata": {"name": namespace}}),
        )
        .await;
    }
    let map = "/api/v1/namespaces/shop/configmaps/settings";
    apply_as(
        &api,
        "alice",
        map,
        settings(json!({"colour": "green", "size": "3"})),
    )
    .await;
    let secret = json!({"metadata": {"name": "db"}, "stringData": {"password": "example"}});
    create(&api, "/api/v1/namespaces/old/secrets", secret).await;
    create(
        &api,
        "/api/v1/namespaces/old/configmaps",
        settings(json!({"colour": "grey"})),
    )
    .await;
    let web = json!({
        "metadata": {"name": "web", "labels": {"app": "web"}},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [{"name": "web", "image": "registry.example/web:1"}]},
            },
        },
    });
    create(&api, "/apis/apps/v1/namespaces/shop/deployments", web).await;
    let mut moments = vec![settled(&api).await];
    snapshot(kubernetes, store, "delta");
    // Rolled, and edited by a second manager.
    let container = json!([{"name": "web", "image": "registry.example/web:2"}]);
    let roll = json!({"spec": {"template": {"spec": {"containers": container}}}});
    let deployment = "/apis/apps/v1/namespaces/shop/deployments/web";
    api.merge(deployment, &roll).await.unwrap();
    apply_as(
        &api,
        "bob",
        map,
        settings(json!({"owner": "bob", "size": "5"})),
    )
    .await;
    moments.push(settled(&api).await);
    snapshot(kubernetes, store, "delta");
    // A namespace goes with everything in it.
    api.delete("/api/v1/namespaces/old").await;
    while api.get("/api/v1/namespaces/old").await.is_some() {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    moments.push(settled(&api).await);
    snapshot(kubernetes, store, "delta");
    moments
}

#[tokio::test(flavor = "multi_thread")]
async fn every_moment_is_what_the_server_served() {
    let kubernetes = Kubernetes::start().await;
    let folder = scratch::folder().unwrap();
    let store = folder.path().join("history");
    let moments = live(&kubernetes, &store).await;
    if std::env::var_os("DELTAFOLD_TEST_WRITE").is_some() {
        let fixture = fixtures_dir().join("history/v2");
        let _ = std::fs::remove_dir_all(&fixture);
        copy_dir(&store.join("v2"), &fixture);
    }
    tokio::task::spawn_blocking(move || compare(&store, &moments))
        .await
        .unwrap();
}

/// The page shows each object as it was served, and those of later moments not at all.
fn compare(store: &Path, moments: &[Moment]) {
    let page = Page::start(store);
    let kinds = &page.get("backup", &[])["window"]["kinds"];
    let kinds = kinds.as_array().unwrap();
    let mut compared = 0;
    for moment in moments {
        let at = ("at", moment.revision.as_str());
        for (key, object) in &moment.objects {
            let query = [
                at,
                ("id", &*id(key)),
                ("secrets", "true"),
                ("managers", "true"),
            ];
            let (_, text) = page.ask("yaml", &query);
            let shown: Value = yaml_serde::from_str(&text).unwrap();
            assert_eq!(&shown, object, "{key} at {}", moment.revision);
            compared += 1;
        }
        let state = page.get("state", &[at]);
        for namespace in NAMESPACES {
            let count = |kind: &str| {
                let kind = kinds.iter().position(|k| k["kind"] == kind).unwrap();
                let spaces = state["namespaces"].as_array().unwrap();
                let space = spaces.iter().find(|n| n["name"] == namespace);
                space.map_or(0, |n| n["kinds"][kind.to_string()].as_u64().unwrap_or(0))
            };
            let prefix = format!("/registry/configmaps/{namespace}/");
            let served = moment
                .objects
                .iter()
                .filter(|(key, _)| key.starts_with(&prefix));
            assert_eq!(count("ConfigMap"), served.count() as u64, "{namespace}");
        }
    }
    assert!(compared > 10, "{compared}");
    // Who changed the ConfigMap, and what went with the namespace.
    let life = page.get("life", &[("id", &id("/registry/configmaps/shop/settings"))]);
    let managers = |nth: usize| life["versions"][nth]["managers"].to_string();
    assert!(
        managers(0).contains("bob") && managers(1).contains("alice"),
        "{life:#}"
    );
    let changes = page.get("changes", &[("from", &*moments[1].revision)]);
    let spaces = changes["namespaces"].as_array().unwrap();
    let old = spaces.iter().find(|n| n["name"] == "old").unwrap();
    assert_eq!(old["is_deleted"], true);
    let gone = old["objects"].as_array().unwrap().iter();
    let gone: Vec<&str> = gone.map(|o| o["name"].as_str().unwrap()).collect();
    assert!(
        gone.contains(&"settings") && gone.contains(&"db"),
        "{gone:?}"
    );
}
