//! A real Kubernetes API server on a real etcd; Kubernetes' own controllers and a real informer on it.

use super::scratch;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use reqwest::{Client, Method};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::etcd::{Etcd, Process, free_port};
use super::tools::{self, tail};

/// Of the user who may do everything.
pub const TOKEN: &str = "deltafold-test";
/// Of a user who may do nothing.
pub const NOBODY: &str = "deltafold-nobody";
const TIMEOUT: Duration = Duration::from_secs(60);

/// What a ConfigMap is compared by: `resource_version` and `data`.
pub type ConfigMaps = BTreeMap<String, Value>;

/// What the API server said no to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The HTTP status; 0 where there was no answer.
    pub code: u16,
    pub text: String,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.code, self.text)
    }
}

/// How a body is to be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    Json,
    MergePatch,
    /// Of server-side apply.
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

    /// A client of the library that the program uses.
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
        let text = self.text(method, path, body).await?;
        Ok(serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    async fn text(
        &self,
        method: Method,
        path: &str,
        body: Option<(Body, &Value)>,
    ) -> Result<String, Refused> {
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
            true => Ok(text),
            false => Err(Refused {
                code: status.as_u16(),
                text,
            }),
        }
    }

    /// What must be answered.
    pub async fn must(&self, method: Method, path: &str, body: Option<(Body, &Value)>) -> Value {
        let what = format!("{method} {path}");
        let answer = self.ask(method, path, body).await;
        answer.unwrap_or_else(|err| panic!("{what}: {err}"))
    }

    /// What is there, if it is.
    pub async fn get(&self, path: &str) -> Option<Value> {
        match self.ask(Method::GET, path, None).await {
            Ok(found) => Some(found),
            Err(refused) if refused.code == 404 => None,
            Err(refused) => panic!("GET {path}: {refused}"),
        }
    }

    /// As `kubectl apply --server-side` does it.
    pub async fn apply(&self, path: &str, object: &Value) -> Result<Value, Refused> {
        let path = format!("{path}?fieldManager=kubectl&force=true&fieldValidation=Strict");
        self.ask(Method::PATCH, &path, Some((Body::Apply, object)))
            .await
    }

    pub async fn merge(&self, path: &str, patch: &Value) -> Result<Value, Refused> {
        self.ask(Method::PATCH, path, Some((Body::MergePatch, patch)))
            .await
    }

    /// What is not there any more is as good as deleted.
    pub async fn delete(&self, path: &str) {
        match self.ask(Method::DELETE, path, None).await {
            Ok(_) => {}
            Err(refused) if refused.code == 404 => {}
            Err(refused) => panic!("DELETE {path}: {refused}"),
        }
    }
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

/// Writes a kubeconfig for a server that is reached in this way, whatever it shows.
pub fn write_kubeconfig(file: &Path, url: &str, namespace: &str, token: &str) {
    let trust = match url.starts_with("https:") {
        true => json!({"insecure-skip-tls-verify": true}),
        false => json!({}),
    };
    // JSON is YAML.
    let config = kubeconfig(url, namespace, token, &trust);
    fs::write(file, config.to_string()).expect("write a kubeconfig");
}

/// A running kube-apiserver, killed when dropped.
#[derive(Debug)]
pub struct Apiserver {
    port: u16,
    api: Api,
    process: Process,
    log: PathBuf,
    // After the process: the folder goes when it has ended.
    _folder: TempDir,
}

impl Apiserver {
    pub async fn start(etcd: &Etcd) -> Self {
        Self::start_at(free_port(), etcd).await
    }

    /// At the port of one that has ended, so that its clients come back to this one.
    pub async fn start_at(port: u16, etcd: &Etcd) -> Self {
        let folder = scratch::folder_named("apiserver-").expect("a folder for kube-apiserver");
        Self::start_in(folder, port, etcd).await
    }

    /// With everything of its own in this folder.
    pub async fn start_in(folder: TempDir, port: u16, etcd: &Etcd) -> Self {
        let tokens = format!("{TOKEN},admin,admin,system:masters\n{NOBODY},nobody,nobody\n");
        fs::write(folder.path().join("tokens.csv"), tokens).expect("write the tokens");
        let mut server = Self {
            port,
            api: Api::new(&format!("https://127.0.0.1:{port}"), TOKEN),
            process: Self::spawn(folder.path(), port, etcd),
            log: folder.path().join("apiserver.log"),
            _folder: folder,
        };
        server.wait_until_ready().await;
        server
    }

    /// Ends it, as an upgrade does, and starts it again: what was signed holds.
    pub async fn restart(&mut self, etcd: &Etcd) {
        self.process.end();
        self.process = Self::spawn(self._folder.path(), self.port, etcd);
        self.wait_until_ready().await;
    }

    fn spawn(folder: &Path, port: u16, etcd: &Etcd) -> Process {
        let program = tools::kube_apiserver();
        let certs = folder.join("certs");
        // It makes its own certificate there first. The key is good enough for the tokens of service
        // accounts, too.
        let key = certs.join("apiserver.key");
        let mut command = Command::new(&program);
        tools::forget_env(&mut command, &["KUBE"]);
        command
            .args(["--etcd-servers", etcd.endpoint()])
            .args(["--bind-address", "127.0.0.1"])
            .arg(format!("--secure-port={port}"))
            // Others would look for an address of this machine for clients elsewhere.
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
            .arg(folder.join("tokens.csv"));
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
            // Only this one knows the token.
            if self.ask(Method::GET, "/readyz", None).await.is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// The API for a runtime of one's own, as the user who may do everything.
    pub fn api(&self) -> Api {
        Api::new(&self.url(), TOKEN)
    }

    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// All that it has logged so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    pub async fn create_namespace(&self, name: &str) {
        let object = json!({"metadata": {"name": name}});
        self.must(Method::POST, "/api/v1/namespaces", Some(object))
            .await;
    }

    pub async fn create_config_map(&self, namespace: &str, name: &str, value: &str) {
        let object = json!({"metadata": {"name": name}, "data": {"value": value}});
        self.must(Method::POST, &config_maps(namespace), Some(object))
            .await;
    }

    pub async fn replace_config_map(&self, namespace: &str, name: &str, value: &str) {
        let object = json!({"metadata": {"name": name}, "data": {"value": value}});
        let path = format!("{}/{name}", config_maps(namespace));
        self.must(Method::PUT, &path, Some(object)).await;
    }

    pub async fn delete_config_map(&self, namespace: &str, name: &str) {
        let path = format!("{}/{name}", config_maps(namespace));
        self.must(Method::DELETE, &path, None).await;
    }

    /// The ConfigMaps of a namespace and the revision at which they are so.
    pub async fn config_maps(&self, namespace: &str) -> (i64, ConfigMaps) {
        let list = self.must(Method::GET, &config_maps(namespace), None).await;
        let revision = list["metadata"]["resourceVersion"].as_str();
        let revision = revision.expect("a revision").parse().expect("a number");
        let items = list["items"].as_array().expect("the items").iter();
        let maps = items.map(|item| {
            let name = item["metadata"]["name"].as_str().expect("a name");
            let shown = json!({
                "resource_version": item["metadata"]["resourceVersion"],
                "data": item["data"],
            });
            (name.to_owned(), shown)
        });
        (revision, maps.collect())
    }

    /// Has it check an object as if it were created, field by field; nothing is.
    pub async fn would_create(&self, namespace: &str, object: &Value) {
        let kind = object["kind"].as_str().expect("a kind").to_lowercase();
        let version = object["apiVersion"].as_str().expect("a version");
        let path = format!(
            "{}/namespaces/{namespace}/{kind}s?dryRun=All&fieldValidation=Strict",
            group(version)
        );
        self.must(Method::POST, &path, Some(object.clone())).await;
    }

    /// Creates an object; gives it as it is then.
    pub async fn create(&self, namespace: &str, object: &Value) -> Value {
        let kind = object["kind"].as_str().expect("a kind").to_lowercase();
        let version = object["apiVersion"].as_str().expect("a version");
        let path = format!("{}/namespaces/{namespace}/{kind}s", group(version));
        self.must(Method::POST, &path, Some(object.clone())).await
    }

    /// A Lease, if it is there.
    pub async fn lease(&self, namespace: &str, name: &str) -> Option<Value> {
        let answer = self.ask(Method::GET, &lease(namespace, name), None).await;
        match answer {
            Ok(text) => Some(serde_json::from_str(&text).expect("a Lease")),
            Err(e) if e.starts_with("404") => None,
            Err(e) => panic!("{e}"),
        }
    }

    /// Writes a Lease; fails where its resourceVersion is an old one.
    pub async fn replace_lease(&self, namespace: &str, lease_: &Value) -> Result<Value, String> {
        let name = lease_["metadata"]["name"].as_str().expect("a name");
        let path = lease(namespace, name);
        let text = self.ask(Method::PUT, &path, Some(lease_.clone())).await?;
        Ok(serde_json::from_str(&text).expect("a Lease"))
    }

    /// A token of a service account.
    pub async fn service_account_token(&self, namespace: &str, name: &str) -> String {
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token");
        let request =
            json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
        let answer = self.must(Method::POST, &path, Some(request)).await;
        answer["status"]["token"]
            .as_str()
            .expect("a token")
            .to_owned()
    }

    /// Writes a kubeconfig for the owner of a token.
    pub fn kubeconfig(&self, file: &Path, namespace: &str, token: &str) {
        let authority = self._folder.path().join("certs/apiserver.crt");
        self.write_kubeconfig(
            file,
            namespace,
            token,
            &json!({"certificate-authority": authority}),
        );
    }

    /// One that still holds when the server was replaced by another at its port.
    pub fn lasting_kubeconfig(&self, file: &Path, namespace: &str, token: &str) {
        self.write_kubeconfig(
            file,
            namespace,
            token,
            &json!({"insecure-skip-tls-verify": true}),
        );
    }

    fn write_kubeconfig(&self, file: &Path, namespace: &str, token: &str, trust: &Value) {
        let config = kubeconfig(&self.url(), namespace, token, trust);
        // JSON is YAML.
        fs::write(file, config.to_string()).expect("write a kubeconfig");
    }

    async fn must(&self, method: Method, path: &str, body: Option<Value>) -> Value {
        let body = body.as_ref().map(|body| (Body::Json, body));
        self.api.must(method, path, body).await
    }

    async fn ask(&self, method: Method, path: &str, body: Option<Value>) -> Result<String, String> {
        let body = body.as_ref().map(|body| (Body::Json, body));
        let answer = self.api.text(method, path, body).await;
        answer.map_err(|refused| refused.to_string())
    }
}

/// Where the objects of an apiVersion are.
fn group(version: &str) -> String {
    match version.contains('/') {
        true => format!("/apis/{version}"),
        false => format!("/api/{version}"),
    }
}

fn lease(namespace: &str, name: &str) -> String {
    format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}")
}

fn config_maps(namespace: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/configmaps")
}

/// Those of Kubernetes' own controllers that Jobs, their Pods and owned objects need.
const CONTROLLERS: [&str; 8] = [
    "cronjob-controller",
    "deployment-controller",
    "garbage-collector-controller",
    "job-controller",
    "namespace-controller",
    "replicaset-controller",
    "serviceaccount-controller",
    "ttl-after-finished-controller",
];

/// A running kube-controller-manager, killed when dropped. Start it when the CRDs are there: its garbage
/// collector looks for new kinds of objects twice a minute.
#[derive(Debug)]
pub struct ControllerManager {
    process: Process,
    log: PathBuf,
    // After the process: the folder goes when it has ended.
    _folder: TempDir,
}

impl ControllerManager {
    pub fn start(server: &Apiserver) -> Self {
        let folder = scratch::folder_named("controllers-").expect("a folder for the controllers");
        Self::start_in(folder, server)
    }

    pub fn start_in(folder: TempDir, server: &Apiserver) -> Self {
        let program = tools::kube_controller_manager();
        let log = folder.path().join("controllers.log");
        let config = folder.path().join("kubeconfig");
        server.lasting_kubeconfig(&config, "default", TOKEN);
        let mut command = Command::new(&program);
        tools::forget_env(&mut command, &["KUBE"]);
        command
            .arg("--kubeconfig")
            .arg(&config)
            .arg(format!("--controllers={}", CONTROLLERS.join(",")))
            .arg("--leader-elect=false")
            .arg("--use-service-account-credentials=false")
            // Nobody asks it for anything.
            .arg("--secure-port=0")
            // The tests wait for it, not the other way round.
            .args(["--kube-api-qps=1000", "--kube-api-burst=2000"]);
        let process = Process::spawn(&mut command, &log).unwrap_or_else(|err| panic!("{err}"));
        Self {
            process,
            log,
            _folder: folder,
        }
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// All that it has logged so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }
}

/// A running informer on the ConfigMaps of a namespace, killed when dropped.
#[derive(Debug)]
pub struct Informer {
    process: Process,
    log: PathBuf,
    // After the process: the folder goes when it has ended.
    _folder: TempDir,
}

impl Informer {
    pub fn start(server: &Apiserver, namespace: &str) -> Self {
        let program = tools::informer();
        let folder = scratch::folder_named("informer-").expect("a folder for the informer");
        let log = folder.path().join("informer.log");
        let mut command = Command::new(&program);
        command.args([&server.url(), TOKEN, namespace]);
        // Switches of its library.
        tools::forget_env(&mut command, &["KUBE"]);
        let process = Process::spawn(&mut command, &log).unwrap_or_else(|err| panic!("{err}"));
        Self {
            process,
            log,
            _folder: folder,
        }
    }

    /// What it has printed so far. Between its own lines client-go may have logged something.
    pub fn said(&self) -> Vec<Value> {
        let text = fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&text)
            .split_inclusive('\n')
            .filter(|line| line.ends_with('\n'))
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect()
    }

    /// Waits until what it has printed since some line is as wanted, and returns that.
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

/// The newest store among the lines.
pub fn store(said: &[Value]) -> Option<ConfigMaps> {
    let last = said.iter().rfind(|line| line["what"] == "store")?;
    serde_json::from_value(last["objects"].clone()).ok()
}
