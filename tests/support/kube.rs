//! A real Kubernetes API server on a real etcd, with Kubernetes' own controllers and a real informer.

use super::scratch;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use reqwest::{Client, Method};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::etcd::Etcd;
use super::manifests::{kind, name};
use super::namespace::TestNamespace;
use super::process::{Process, free_port, is_a_process};
use super::tools::{self, tail};

/// The token of the user who may do everything.
pub const TOKEN: &str = "deltafold-test";
/// The token of a user without rights.
pub const NOBODY: &str = "deltafold-nobody";
const TIMEOUT: Duration = Duration::from_secs(60);

/// ConfigMaps by name, each with `resource_version` and `data`.
pub type ConfigMaps = BTreeMap<String, Value>;

/// A refusal by the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The HTTP status, or 0 if there was no response.
    pub code: u16,
    pub text: String,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.code, self.text)
    }
}

impl Refused {
    /// Returns the sentence of the API server.
    pub fn message(&self) -> String {
        let status: Value = serde_json::from_str(&self.text).unwrap_or_default();
        status["message"].as_str().unwrap_or(&self.text).to_owned()
    }
}

/// The content type of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    Json,
    MergePatch,
    /// Server-side apply.
    Apply,
}

/// The API as the owner of a token sees it. Its connections belong to the runtime that used it first.
#[derive(Clone, Debug)]
pub struct Api {
    url: String,
    token: String,
    client: Client,
}

impl Api {
    pub fn new(url: &str, token: &str) -> Self {
        let client = super::http_client()
            .tls_danger_accept_invalid_certs(true)
            .timeout(TIMEOUT)
            .build()
            .expect("an HTTPS client");
        Self {
            url: url.to_owned(),
            token: token.to_owned(),
            client,
        }
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns a client of the kube crate.
    pub async fn library(&self) -> kube::Client {
        let config = serde_json::from_value(kubeconfig(
            &self.url,
            "default",
            &self.token,
            &json!({"insecure-skip-tls-verify": true}),
        ));
        let options = kube::config::KubeConfigOptions::default();
        let config = config.expect("a kubeconfig");
        let config = kube::Config::from_custom_kubeconfig(config, &options).await;
        let config = config.expect("a configuration");
        kube::Client::try_from(config).expect("a client")
    }

    pub async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<(Body, &Value)>,
    ) -> Result<Value, Refused> {
        let mut request = self
            .client
            .request(method, format!("{}{path}", self.url))
            .bearer_auth(&self.token);
        if let Some((kind, body)) = body {
            let kind = match kind {
                Body::Json => "application/json",
                Body::MergePatch => "application/merge-patch+json",
                Body::Apply => "application/apply-patch+yaml",
            };
            request = request.header("Content-Type", kind).body(body.to_string());
        }
        let lost = |err: reqwest::Error| Refused {
            code: 0,
            text: format!("{err:?}"),
        };
        let answer = request.send().await.map_err(lost)?;
        let status = answer.status();
        let text = answer.text().await.map_err(lost)?;
        match status.is_success() {
            true => Ok(serde_json::from_str(&text).unwrap_or(Value::String(text))),
            false => Err(Refused {
                code: status.as_u16(),
                text,
            }),
        }
    }

    /// Sends a request that must succeed.
    pub async fn must(&self, method: Method, path: &str, body: Option<(Body, &Value)>) -> Value {
        let what = format!("{method} {path}");
        let answer = self.ask(method, path, body).await;
        answer.unwrap_or_else(|err| panic!("{what}: {err}"))
    }

    /// Returns an object if it exists.
    pub async fn get(&self, path: &str) -> Option<Value> {
        match self.ask(Method::GET, path, None).await {
            Ok(found) => Some(found),
            Err(refused) if refused.code == 404 => None,
            Err(refused) => panic!("GET {path}: {refused}"),
        }
    }

    /// Applies an object as `kubectl apply --server-side` does.
    pub async fn apply(&self, path: &str, object: &Value) -> Result<Value, Refused> {
        let path = format!("{path}?fieldManager=kubectl&force=true&fieldValidation=Strict");
        self.ask(Method::PATCH, &path, Some((Body::Apply, object)))
            .await
    }

    pub async fn merge(&self, path: &str, patch: &Value) -> Result<Value, Refused> {
        self.ask(Method::PATCH, path, Some((Body::MergePatch, patch)))
            .await
    }

    /// Deletes an object. Succeeds if it does not exist.
    pub async fn delete(&self, path: &str) {
        match self.ask(Method::DELETE, path, None).await {
            Ok(_) => {}
            Err(refused) if refused.code == 404 => {}
            Err(refused) => panic!("DELETE {path}: {refused}"),
        }
    }

    /// Returns a token of a service account.
    pub async fn token(&self, namespace: &str, account: &str) -> Result<String, Refused> {
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token");
        let request =
            json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
        let answer = self
            .ask(Method::POST, &path, Some((Body::Json, &request)))
            .await?;
        let token = answer["status"]["token"].as_str();
        Ok(token.expect("a token").to_owned())
    }
}

/// Returns the API path of all objects of this one's kind: in its own namespace, or in this one if it names none.
pub fn collection(object: &Value, namespace: &str) -> String {
    let kind = kind(object).to_lowercase();
    let plural = match kind.strip_suffix('y') {
        Some(stem) => format!("{stem}ies"),
        None => format!("{kind}s"),
    };
    let version = object["apiVersion"].as_str().expect("a version");
    let root = match version.contains('/') {
        true => "apis",
        false => "api",
    };
    let of_cluster = [
        "namespaces",
        "persistentvolumes",
        "customresourcedefinitions",
        "clusterroles",
        "clusterrolebindings",
        "validatingadmissionpolicies",
        "validatingadmissionpolicybindings",
        "selfsubjectaccessreviews",
    ];
    if of_cluster.contains(&&*plural) {
        return format!("/{root}/{version}/{plural}");
    }
    let namespace = object["metadata"]["namespace"]
        .as_str()
        .unwrap_or(namespace);
    format!("/{root}/{version}/namespaces/{namespace}/{plural}")
}

fn kubeconfig(url: &str, namespace: &str, token: &str, trust: &Value) -> Value {
    let mut cluster = trust.clone();
    cluster["server"] = url.into();
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
        "current-context": "test",
    })
}

/// Writes a kubeconfig for this URL that trusts any certificate, also that of another server that takes the port.
pub fn write_kubeconfig(file: &Path, url: &str, namespace: &str, token: &str) {
    let trust = match url.starts_with("https:") {
        true => json!({"insecure-skip-tls-verify": true}),
        false => json!({}),
    };
    // JSON is valid YAML.
    let config = kubeconfig(url, namespace, token, &trust);
    fs::write(file, config.to_string()).expect("write a kubeconfig");
}

/// A running kube-apiserver. It is killed when dropped.
#[derive(Debug)]
pub struct Apiserver {
    port: u16,
    api: Api,
    process: Process,
    /// Its flags, beside those of every test.
    args: Vec<String>,
    // Declared after the process, so removed after it.
    _folder: TempDir,
}

is_a_process!(Apiserver);

impl Apiserver {
    pub async fn start(etcd: &Etcd) -> Self {
        Self::start_at(free_port(), etcd).await
    }

    /// Starts a server at the port of one that has ended, so that its clients reconnect to this one.
    pub async fn start_at(port: u16, etcd: &Etcd) -> Self {
        let folder = scratch::folder_named("apiserver-").expect("a folder for kube-apiserver");
        Self::start_in(folder, port, etcd).await
    }

    /// Starts a server with further flags.
    pub async fn start_with(etcd: &Etcd, args: &[String]) -> Self {
        let folder = scratch::folder_named("apiserver-").expect("a folder for kube-apiserver");
        Self::start_all(folder, free_port(), etcd, args).await
    }

    /// Starts a server that keeps its own files in this folder.
    pub async fn start_in(folder: TempDir, port: u16, etcd: &Etcd) -> Self {
        Self::start_all(folder, port, etcd, &[]).await
    }

    async fn start_all(folder: TempDir, port: u16, etcd: &Etcd, args: &[String]) -> Self {
        let tokens = format!("{TOKEN},admin,admin,system:masters\n{NOBODY},nobody,nobody\n");
        fs::write(folder.path().join("tokens.csv"), tokens).expect("write the tokens");
        let mut server = Self {
            port,
            api: Api::new(&format!("https://127.0.0.1:{port}"), TOKEN),
            process: Self::spawn(folder.path(), port, etcd, args),
            args: args.to_vec(),
            _folder: folder,
        };
        server.wait_until_ready().await;
        server
    }

    /// Restarts the server, as an upgrade does. Tokens that it signed stay valid.
    pub async fn restart(&mut self, etcd: &Etcd) {
        self.process.end();
        self.process = Self::spawn(self._folder.path(), self.port, etcd, &self.args);
        self.wait_until_ready().await;
    }

    fn spawn(folder: &Path, port: u16, etcd: &Etcd, args: &[String]) -> Process {
        let program = tools::kube_apiserver();
        let certs = folder.join("certs");
        // The server creates its own certificate there first. Its key also serves for service account tokens.
        let key = certs.join("apiserver.key");
        let mut command = Command::new(&program);
        tools::forget_env(&mut command, &["KUBE"]);
        command
            .args(["--etcd-servers", etcd.endpoint()])
            .args(["--bind-address", "127.0.0.1"])
            .arg(format!("--secure-port={port}"))
            // Other addresses of this machine would be published to clients.
            .args(["--advertise-address", "127.0.0.1"])
            .args(["--endpoint-reconciler-type", "none"])
            .args(["--service-cluster-ip-range", "10.96.0.0/16"])
            .arg("--cert-dir")
            .arg(&certs)
            .arg("--service-account-key-file")
            .arg(&key)
            .arg("--service-account-signing-key-file")
            .arg(&key)
            .args(["--service-account-issuer", "https://kubernetes.default.svc"])
            .args(["--authorization-mode", "RBAC"])
            .arg("--token-auth-file")
            .arg(folder.join("tokens.csv"))
            .args(args);
        let log = folder.join("apiserver.log");
        Process::spawn(&mut command, &log).unwrap_or_else(|err| panic!("{err}"))
    }

    async fn wait_until_ready(&mut self) {
        let started = Instant::now();
        loop {
            let runs = self.process.runs();
            let late = started.elapsed() > TIMEOUT;
            if runs.is_err() || late {
                panic!(
                    "kube-apiserver is not ready ({runs:?}); the end of its log:\n{}",
                    tail(&self.log)
                );
            }
            // Only this server knows the token.
            if self.api.ask(Method::GET, "/readyz", None).await.is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the API for the current runtime, as the user who may do everything.
    pub fn api(&self) -> Api {
        Api::new(&self.url(), TOKEN)
    }

    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// Writes a kubeconfig for the owner of a token, valid as long as the server runs.
    pub fn kubeconfig(&self, file: &Path, namespace: &str, token: &str) {
        let authority = self._folder.path().join("certs/apiserver.crt");
        let trust = json!({"certificate-authority": authority});
        let config = kubeconfig(&self.url(), namespace, token, &trust);
        fs::write(file, config.to_string()).expect("write a kubeconfig");
    }
}

/// The controllers of Kubernetes that Jobs, their Pods, owned objects and claims need.
const CONTROLLERS: [&str; 12] = [
    "cronjob-controller",
    "deployment-controller",
    "garbage-collector-controller",
    "job-controller",
    "namespace-controller",
    "persistentvolume-binder-controller",
    "persistentvolume-protection-controller",
    "persistentvolumeclaim-protection-controller",
    "replicaset-controller",
    "resourcequota-controller",
    "serviceaccount-controller",
    "ttl-after-finished-controller",
];

/// A running kube-controller-manager. It is killed when dropped. Start it after the CRDs exist: its garbage
/// collector looks for new kinds only twice a minute.
#[derive(Debug)]
pub struct ControllerManager {
    process: Process,
    // Declared after the process, so removed after it.
    _folder: TempDir,
}

is_a_process!(ControllerManager);

impl ControllerManager {
    pub fn start(server: &Apiserver) -> Self {
        let folder = scratch::folder_named("controllers-").expect("a folder for the controllers");
        Self::start_in(folder, server)
    }

    pub fn start_in(folder: TempDir, server: &Apiserver) -> Self {
        let program = tools::kube_controller_manager();
        let log = folder.path().join("controllers.log");
        let config = folder.path().join("kubeconfig");
        write_kubeconfig(&config, &server.url(), "default", TOKEN);
        let mut command = Command::new(&program);
        tools::forget_env(&mut command, &["KUBE"]);
        command
            .arg("--kubeconfig")
            .arg(&config)
            .arg(format!("--controllers={}", CONTROLLERS.join(",")))
            .arg("--leader-elect=false")
            .arg("--use-service-account-credentials=false")
            // No test connects to it.
            .arg("--secure-port=0")
            // The default limits would slow the tests down.
            .args(["--kube-api-qps=1000", "--kube-api-burst=2000"]);
        let process = Process::spawn(&mut command, &log).unwrap_or_else(|err| panic!("{err}"));
        Self {
            process,
            _folder: folder,
        }
    }
}

/// A running informer for the ConfigMaps of a namespace. It is killed when dropped.
#[derive(Debug)]
pub struct Informer {
    process: Process,
    // Declared after the process, so removed after it.
    _folder: TempDir,
}

is_a_process!(Informer);

impl Informer {
    pub fn start(server: &Apiserver, namespace: &str) -> Self {
        let program = tools::informer();
        let folder = scratch::folder_named("informer-").expect("a folder for the informer");
        let log = folder.path().join("informer.log");
        let mut command = Command::new(&program);
        command.args([&server.url(), TOKEN, namespace]);
        // client-go reads these variables.
        tools::forget_env(&mut command, &["KUBE"]);
        let process = Process::spawn(&mut command, &log).unwrap_or_else(|err| panic!("{err}"));
        Self {
            process,
            _folder: folder,
        }
    }

    /// Returns the JSON lines that it has printed so far. client-go may log between them.
    pub fn said(&self) -> Vec<Value> {
        let text = fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&text)
            .split_inclusive('\n')
            .filter(|line| line.ends_with('\n'))
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect()
    }

    /// Waits until the lines from `since` on satisfy a condition, and returns them.
    pub async fn wait_until(
        &mut self,
        since: usize,
        wanted: &str,
        is_so: impl Fn(&[Value]) -> bool,
    ) -> Vec<Value> {
        let started = Instant::now();
        loop {
            let runs = self.process.runs();
            let said = self.said().split_off(since);
            if is_so(&said) {
                return said;
            }
            if runs.is_err() || started.elapsed() > 2 * TIMEOUT {
                panic!(
                    "the informer ({runs:?}) never told that {wanted}; the end of its log:\n{}",
                    tail(&self.log)
                );
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Creates or replaces a ConfigMap.
pub async fn set_config_map(space: &TestNamespace, name: &str, value: &str) {
    let object = json!({"metadata": {"name": name}, "data": {"value": value}});
    space.apply("configmaps", object).await;
}

/// Returns the ConfigMaps of a namespace and the revision of the list.
pub async fn config_maps(space: &TestNamespace) -> (i64, ConfigMaps) {
    let list = space
        .api
        .must(Method::GET, &space.path("configmaps"), None)
        .await;
    let revision = list["metadata"]["resourceVersion"].as_str();
    let revision = revision.expect("a revision").parse().expect("a number");
    let items = list["items"].as_array().expect("the items").iter();
    let maps = items.map(|item| {
        let shown = json!({
            "resource_version": item["metadata"]["resourceVersion"],
            "data": item["data"],
        });
        (name(item).to_owned(), shown)
    });
    (revision, maps.collect())
}

/// Returns the newest store among the lines.
pub fn store(said: &[Value]) -> Option<ConfigMaps> {
    let last = said.iter().rfind(|line| line["what"] == "store")?;
    serde_json::from_value(last["objects"].clone()).ok()
}
