//! What a real API server stored is decoded to what it serves.
//!
//! The danger: a field that is lost or changed on the way looks like the object that somebody wants back.

use crate::support::etcd::Etcd;
use crate::support::kube::{Api, Apiserver, Body, TOKEN};
use crate::support::manifests::{documents, kind, name};
use crate::support::tools::{self, EtcdVersion};
use crate::support::{deltafold, pages, scratch, succeed};
use base64::prelude::{BASE64_STANDARD as STANDARD, Engine as _};
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const NAMESPACE: &str = "default";

/// The resources of an API server: plural and whether they have a namespace, by API version and kind.
pub struct Resources(BTreeMap<(String, String), (String, bool)>);

impl Resources {
    pub async fn of(api: &Api) -> Self {
        let mut versions = vec!["v1".to_owned()];
        let groups = api.must(Method::GET, "/apis", None).await;
        for group in groups["groups"].as_array().unwrap() {
            for version in group["versions"].as_array().unwrap() {
                versions.push(version["groupVersion"].as_str().unwrap().to_owned());
            }
        }
        let mut all = BTreeMap::new();
        for version in versions {
            // A group without a server behind it has no list.
            let Ok(list) = api.ask(Method::GET, &root(&version), None).await else {
                continue;
            };
            for resource in list["resources"].as_array().unwrap() {
                let text = |field: &str| resource[field].as_str().unwrap().to_owned();
                if !text("name").contains('/') {
                    let namespaced = resource["namespaced"].as_bool().unwrap();
                    all.insert((version.clone(), text("kind")), (text("name"), namespaced));
                }
            }
        }
        Resources(all)
    }

    /// The path of all objects of this one's kind in its namespace; `None` if the server does not serve the kind.
    pub fn collection(&self, object: &Value) -> Option<String> {
        let text = |field: &str| object[field].as_str().unwrap().to_owned();
        let (plural, namespaced) = self.0.get(&(text("apiVersion"), text("kind")))?;
        let root = root(&text("apiVersion"));
        let namespace = object["metadata"]["namespace"].as_str();
        Some(match namespaced {
            true => format!(
                "{root}/namespaces/{}/{plural}",
                namespace.unwrap_or(NAMESPACE)
            ),
            false => format!("{root}/{plural}"),
        })
    }

    pub fn path(&self, object: &Value) -> Option<String> {
        let name = object["metadata"]["name"].as_str()?;
        Some(format!("{}/{name}", self.collection(object)?))
    }
}

fn root(version: &str) -> String {
    match version.contains('/') {
        true => format!("/apis/{version}"),
        false => format!("/api/{version}"),
    }
}

fn objects() -> Vec<Value> {
    documents(include_str!("stored_objects.yaml"))
}

async fn create_all(api: &Api, objects: &[Value]) {
    let resources = Resources::of(api).await;
    let mut refusals = Vec::new();
    for object in objects {
        let collection = resources.collection(object);
        let collection = collection.unwrap_or_else(|| panic!("no such kind: {object}"));
        let path = format!("{collection}?fieldValidation=Strict");
        let created = api.ask(Method::POST, &path, Some((Body::Json, object)));
        let mut result = created.await;
        // Some defaults are set when an object is read, so they are stored by its second write.
        let path = format!("{collection}/{}", name(object));
        let annotation = json!({"metadata": {"annotations": {"second": "write"}}});
        if result.is_ok() {
            result = api.merge(&path, &annotation).await;
        }
        if let Err(refused) = result {
            refusals.push(format!("{}: {}", object["kind"], refused.message()));
        }
    }
    assert_eq!(refusals, [""; 0]);
}

/// Creates a custom resource, which is served a moment after its definition, and returns it.
async fn create_widget(api: &Api) -> Value {
    while api.get("/apis/example.com/v1").await.is_none() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let widget = json!({
        "apiVersion": "example.com/v1", "kind": "Widget", "metadata": {"name": "w"},
        "spec": {"size": 3, "ratio": 0.5, "none": null, "list": [{"a": "é"}]},
    });
    create_all(api, std::slice::from_ref(&widget)).await;
    widget
}

pub fn take_snapshot(kind: &str, etcd: &Etcd, store: &Path) {
    let mut snapshot = deltafold();
    snapshot.args([
        "snapshot",
        kind,
        "--output",
        "json",
        "--endpoints",
        etcd.endpoint(),
        "--store",
    ]);
    succeed(snapshot.arg(store));
}

/// Every key of the store, as `get` prints it.
fn stored(store: &Path, args: &[&str]) -> Vec<Value> {
    let mut get = deltafold();
    get.args([
        "get",
        "--prefix",
        "/registry/",
        "--output",
        "json",
        "--store",
    ]);
    let result = succeed(get.arg(store).args(args));
    result["keys"].as_array().unwrap().clone()
}

/// Allocations of addresses and ports, and what servers tell each other, are served to nobody. CRDs are stored in a
/// version that is not served any more.
fn is_unserved(object: &Value) -> bool {
    let has_no_name = object["metadata"]["name"].is_null();
    has_no_name || object["kind"] == "CustomResourceDefinition"
}

/// `get KIND/NAMESPACE/NAME` finds every object.
async fn objects_have_names(
    store: &Path,
    resources: &Resources,
    api: &Api,
    objects: impl Iterator<Item = &Value>,
) {
    for object in objects.filter(|o| !is_unserved(o)) {
        let path = resources.path(object).unwrap();
        let parts = match path.contains("/namespaces/default/") {
            true => [kind(object), NAMESPACE, name(object)].join("/"),
            false => [kind(object), name(object)].join("/"),
        };
        let mut get = deltafold();
        get.args([
            "get",
            &parts,
            "-o",
            "json",
            "--show-managed-fields",
            "--store",
        ])
        .arg(store);
        let printed = get.output().unwrap();
        let stderr = String::from_utf8_lossy(&printed.stderr);
        let got = serde_json::from_slice(&printed.stdout);
        let got: Value = got.unwrap_or_else(|e| panic!("{parts}: {e}: {stderr}"));
        assert_eq!(got, api.must(Method::GET, &path, None).await, "{parts}");
    }
    for (args, expected) in [
        (
            &["get", "wd", "--all"][..],
            "NAMESPACE   NAME   SIZE   AGE\ndefault     w      3      ",
        ),
        (
            &["get", "widgets.example.com", "-n", NAMESPACE],
            "NAME   SIZE   AGE\nw      3      ",
        ),
        (
            &["get", "po", "-n", NAMESPACE, "-l", "app in (web), !other"],
            "NAME   READY   STATUS",
        ),
        (
            &["get", "pod", "-n", NAMESPACE, "-l", "app!=web"],
            "no pods at revision ",
        ),
    ] {
        let mut get = deltafold();
        let printed = get.args(args).arg("--store").arg(store).output().unwrap();
        let stdout = String::from_utf8_lossy(&printed.stdout);
        assert!(stdout.starts_with(expected), "{args:?}: {stdout}");
    }
}

/// `get --clean` prints objects that a new cluster takes: definitions, too, in the version that is served.
async fn is_taken_by_another_server(store: &Path, first: &Api, objects: &[Value]) {
    let folder = scratch::folder().unwrap();
    let etcd = Etcd::start(EtcdVersion::V3_6, &folder.path().join("data"));
    let server = Apiserver::start(&etcd).await;
    let api = server.api();
    let mut get = deltafold();
    get.args([
        "get",
        "--prefix",
        "/registry/",
        "-o",
        "json",
        "--clean",
        "--store",
    ]);
    let printed = get.arg(store).output().unwrap();
    let list: Value = serde_json::from_slice(&printed.stdout).unwrap();
    assert_eq!(list["kind"], "List");
    let same = |a: &Value, b: &Value| {
        a["kind"] == b["kind"] && a["metadata"]["name"] == b["metadata"]["name"]
    };
    let items = list["items"].as_array().unwrap();
    let clean = objects.iter().filter(|o| !o["metadata"]["name"].is_null());
    let clean = clean.map(|o| items.iter().find(|item| same(o, item)).unwrap().clone());
    let (widgets, clean): (Vec<Value>, Vec<Value>) = clean.partition(|o| o["kind"] == "Widget");
    create_all(&api, &clean).await;
    while api.get("/apis/example.com/v1").await.is_none() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    create_all(&api, &widgets).await;
    let definition = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/widgets.example.com";
    let [before, again] = [
        first.must(Method::GET, definition, None).await,
        api.must(Method::GET, definition, None).await,
    ];
    assert_eq!(before["spec"], again["spec"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_object_is_what_the_server_serves() {
    let folder = scratch::folder().unwrap();
    let etcd = Etcd::start(EtcdVersion::V3_6, &folder.path().join("data"));
    let server = Apiserver::start(&etcd).await;
    let api = server.api();
    let objects = objects();
    create_all(&api, &objects).await;
    let widget = create_widget(&api).await;
    let store = folder.path().join("store");
    take_snapshot("full", &etcd, &store);

    let resources = Resources::of(&api).await;
    let (mut same, mut changed, mut kinds) = (0, 0, BTreeMap::new());
    for key in stored(&store, &[]) {
        let object = &key["object"];
        assert!(object.is_object(), "{}: {}", key["key"], key["not_decoded"]);
        let Some(path) = resources.path(object) else {
            assert!(is_unserved(object), "{}", key["key"]);
            continue;
        };
        let served = api.must(Method::GET, &path, None).await;
        if served["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
            // Servers renew their Leases and report conditions.
            changed += 1;
            continue;
        }
        assert_eq!(*object, served, "{}", key["key"]);
        same += 1;
        *kinds.entry(kind(object).to_owned()).or_insert(0) += 1;
    }
    println!("{same} are the same, {changed} have changed: {kinds:?}");
    assert!(same > 200 && changed < 10, "{same} {changed}");
    let objects = objects.iter().chain([&widget]);
    for object in objects.clone().filter(|o| !is_unserved(o)) {
        assert!(
            kinds.contains_key(kind(object)),
            "{object} was not compared"
        );
    }
    objects_have_names(&store, &resources, &api, objects.clone()).await;
    is_taken_by_another_server(&store, &api, &objects.cloned().collect::<Vec<_>>()).await;
}

/// Custom resources in CBOR, and objects that are encrypted at rest with each provider whose keys are in a file.
#[tokio::test(flavor = "multi_thread")]
async fn cbor_and_encryption_at_rest() {
    let folder = scratch::folder().unwrap();
    let secret = |n: u8, len: usize| STANDARD.encode(vec![n; len]);
    let keys = |name: &str, secret: String| json!({"keys": [{"name": name, "secret": secret}]});
    let provider = |resource: &str, provider: &str, keys: Value| json!({"resources": [resource], "providers": [{provider: keys}, {"identity": {}}]});
    let configuration = json!({
        "apiVersion": "apiserver.config.k8s.io/v1",
        "kind": "EncryptionConfiguration",
        "resources": [
            provider("secrets", "aescbc", keys("a", secret(1, 32))),
            provider("configmaps", "aesgcm", keys("b", secret(2, 24))),
            provider("serviceaccounts", "aesgcm", keys("c", secret(3, 16))),
            provider("deployments.apps", "secretbox", keys("d", secret(4, 32))),
        ],
    });
    let file = folder.path().join("encryption.yaml");
    std::fs::write(&file, configuration.to_string()).unwrap();
    let file = file.to_str().unwrap();
    let etcd = Etcd::start(EtcdVersion::V3_6, &folder.path().join("data"));
    let args = [
        format!("--encryption-provider-config={file}"),
        "--feature-gates=CBORServingAndStorage=true".to_owned(),
    ];
    let server = Apiserver::start_with(&etcd, &args).await;
    let api = server.api();
    let encrypted = ["Secret", "ConfigMap", "ServiceAccount", "Deployment"];
    let objects = objects();
    let wanted = |o: &&Value| {
        let kind = o["kind"].as_str().unwrap();
        encrypted.contains(&kind) || kind == "CustomResourceDefinition"
    };
    create_all(
        &api,
        &objects.iter().filter(wanted).cloned().collect::<Vec<_>>(),
    )
    .await;
    create_widget(&api).await;
    let store = folder.path().join("store");
    take_snapshot("full", &etcd, &store);

    let resources = Resources::of(&api).await;
    let mut compared = BTreeSet::new();
    for key in stored(&store, &["--encryption-config", file]) {
        let object = &key["object"];
        let kind = object["kind"].as_str().unwrap();
        if encrypted.contains(&kind) || kind == "Widget" {
            let path = resources.path(object).unwrap();
            assert_eq!(*object, api.must(Method::GET, &path, None).await);
            compared.insert(kind.to_owned());
        }
        let value = key["value_base64"].as_str().unwrap_or("");
        let value = STANDARD.decode(value).unwrap();
        if kind == "Widget" {
            assert!(value.starts_with(b"\xd9\xd9\xf7"), "{kind}: {value:?}");
        } else if encrypted.contains(&kind) {
            assert!(value.starts_with(b"k8s:enc:"), "{kind}: {value:?}");
        }
    }
    assert_eq!(compared.len(), 5, "{compared:?}");

    // Without the keys, and with others of the same names.
    let others = configuration.to_string().replace("AQEB", "BQUF");
    let wrong = folder.path().join("others.yaml");
    std::fs::write(&wrong, others).unwrap();
    let wrong = ["--encryption-config", wrong.to_str().unwrap()];
    for (args, why) in [
        (&[][..], "give its key with --encryption-config"),
        (
            &wrong[..],
            "the key of that name in --encryption-config does not open it",
        ),
    ] {
        let all = stored(&store, args);
        let secret = all
            .iter()
            .find(|k| k["key"] == "/registry/secrets/default/secret");
        let expected = format!("encrypted at rest with aescbc:v1:a: {why}");
        assert_eq!(secret.unwrap()["not_decoded"], expected);
    }
}

/// The guide, on a real cluster: a ConfigMap, and then its whole namespace, is deleted and brought back.
#[tokio::test(flavor = "multi_thread")]
async fn the_deleted_config_map_is_brought_back() {
    let folder = scratch::folder().unwrap();
    let etcd = Etcd::start(EtcdVersion::V3_6, &folder.path().join("data"));
    let server = Apiserver::start(&etcd).await;
    let api = server.api();
    let store = folder.path().join("store");
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}});
    let settings = |data: &str| {
        json!({
            "apiVersion": "v1", "kind": "ConfigMap", "data": {"colour": data},
            "metadata": {"name": "settings", "namespace": "shop"},
        })
    };
    create_all(&api, &[namespace]).await;
    take_snapshot("full", &etcd, &store);
    let begin = etcd.revision().await;
    create_all(&api, &[settings("green")]).await;
    let path = "/api/v1/namespaces/shop/configmaps/settings";
    api.delete(path).await;
    let deleted = etcd.revision().await;
    take_snapshot("delta", &etcd, &store);

    let bin = folder.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    let program = std::path::absolute(deltafold().get_program()).unwrap();
    symlink(program, bin.join("deltafold")).unwrap();
    symlink(tools::kubectl(), bin.join("kubectl")).unwrap();
    let kubeconfig = folder.path().join("kubeconfig");
    server.kubeconfig(&kubeconfig, "default", TOKEN);
    let blocks = pages::shell("docs/guides/deleted-object.md");
    let lines: Vec<String> = blocks.into_iter().flat_map(|b| b.lines).collect();
    let script = lines.join("\n");
    // The page's times and revisions are others than those of the test.
    let script = script
        .replace("--since 2h", &format!("--since {begin}"))
        .replace("597", &(deleted - 1).to_string());
    let mut shell = Command::new("bash");
    let system = std::env::var("PATH").unwrap();
    shell
        .args(["-euxo", "pipefail", "-c", &script])
        .current_dir(folder.path())
        .env("PATH", format!("{}:{system}", bin.display()))
        .env("DELTAFOLD_STORE", &store)
        .env("KUBECONFIG", &kubeconfig);
    let ran = shell.output().unwrap();
    let (stdout, stderr) = (
        String::from_utf8_lossy(&ran.stdout),
        String::from_utf8_lossy(&ran.stderr),
    );
    assert!(ran.status.success(), "{stdout}\n{stderr}");
    let advice = format!(
        "deltafold recover configmap/shop/settings --revision {} --store {}",
        deleted - 1,
        store.display()
    );
    assert!(stdout.contains(&advice), "{stdout}");
    let back = api.get(path).await.unwrap();
    assert_eq!(back["data"], settings("green")["data"]);
}

/// A tenant's ConfigMap once made a whole list unreadable: with U+FFFE, U+FFFF, or a key of more than 1,024 characters.
#[test]
fn kubectl_reads_every_character_and_long_keys_of_a_tenants_config_map() {
    let mut data = serde_json::Map::new();
    // Some of each kind, and all on both sides of where kinds meet.
    let edges = [
        0, 0x9, 0xa, 0xd, 0x20, 0x7e, 0x85, 0xa0, 0x61c, 0x200e, 0x2028, 0x202e, 0x2066, 0xd7ff,
        0xe000, 0xfdd0, 0xfdef, 0xfeff, 0xfffd, 0xfffe, 0xffff, 0x1_0000, 0x1_fffe, 0x10_ffff,
    ];
    for edge in edges {
        for code in [edge - i32::from(edge > 0), edge, edge + 1] {
            if let Some(c) = char::from_u32(code.unsigned_abs()) {
                for (kind, text) in [
                    ("alone", c.to_string()),
                    ("plain", format!("a{c}b")),
                    ("block", format!("a\n{c}b\n")),
                ] {
                    data.insert(format!("{kind}-{code:x}"), text.into());
                }
            }
        }
    }
    let long = "k".repeat(5000);
    data.insert(long.clone(), "plain".into());
    data.insert(format!("{long}: #"), "a\nblock\n".into());
    let annotations = serde_json::json!({&long: "x"});
    let object = serde_json::json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "a", "annotations": annotations}, "data": data,
    });
    let folder = scratch::folder().unwrap();
    let file = folder.path().join("a.yaml");
    let yaml = deltafold::objects::yaml::from_object(object.as_object().unwrap());
    std::fs::write(&file, yaml).unwrap();
    let mut kubectl = Command::new(tools::kubectl());
    kubectl.args(["label", "--local", "read=yes", "--output=json", "-f"]);
    let read = kubectl.arg(&file).output().unwrap();
    assert!(
        read.status.success(),
        "{}",
        String::from_utf8_lossy(&read.stderr)
    );
    let mut read: Value = serde_json::from_slice(&read.stdout).unwrap();
    let metadata = read["metadata"].as_object_mut().unwrap();
    metadata.retain(|name, _| name == "name" || name == "annotations");
    assert_eq!(read, object);
}
