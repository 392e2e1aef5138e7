//! A real Kubernetes API server on a real etcd, and a real informer on that server.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use reqwest::{Client, Method};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::etcd::{Etcd, Process, lasting_port};
use super::tools::{self, tail};

/// Of the user who may do everything.
pub const TOKEN: &str = "deltafold-test";
/// Of a user who may do nothing.
pub const NOBODY: &str = "deltafold-nobody";
const TIMEOUT: Duration = Duration::from_secs(60);

/// What a ConfigMap is compared by: `resource_version` and `data`.
pub type ConfigMaps = BTreeMap<String, Value>;

/// A running kube-apiserver, killed when dropped.
#[derive(Debug)]
pub struct Apiserver {
    port: u16,
    client: Client,
    process: Process,
    log: PathBuf,
    // After the process: the folder goes when it has ended.
    _folder: TempDir,
}

impl Apiserver {
    pub async fn start(etcd: &Etcd) -> Self {
        Self::start_at(lasting_port(), etcd).await
    }

    /// At the port of one that has ended, so that its clients come back to this one.
    pub async fn start_at(port: u16, etcd: &Etcd) -> Self {
        let program = tools::kube_apiserver();
        let folder = TempDir::with_prefix("apiserver-").expect("a folder for kube-apiserver");
        let log = folder.path().join("apiserver.log");
        let tokens = folder.path().join("tokens.csv");
        let users = format!("{TOKEN},admin,admin,system:masters\n{NOBODY},nobody,nobody\n");
        fs::write(&tokens, users).expect("write the tokens");
        let certs = folder.path().join("certs");
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
            .arg(&tokens);
        let process = Process::spawn(&mut command, &log).unwrap_or_else(|err| panic!("{err}"));
        let client = Client::builder()
            .tls_danger_accept_invalid_certs(true)
            .no_proxy()
            .timeout(TIMEOUT)
            .build()
            .expect("an HTTPS client");
        let mut server = Self {
            port,
            client,
            process,
            log,
            _folder: folder,
        };
        server.wait_until_ready().await;
        server
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
        let mut cluster = trust.clone();
        cluster["server"] = self.url().into();
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
            "current-context": "test",
        });
        // JSON is YAML.
        fs::write(file, config.to_string()).expect("write a kubeconfig");
    }

    async fn must(&self, method: Method, path: &str, body: Option<Value>) -> Value {
        let what = format!("{method} {path}");
        let answer = self.ask(method, path, body).await;
        let answer = answer.unwrap_or_else(|err| panic!("{what}: {err}"));
        serde_json::from_str(&answer).unwrap_or_else(|err| panic!("{what}: {err}: {answer}"))
    }

    async fn ask(&self, method: Method, path: &str, body: Option<Value>) -> Result<String, String> {
        let mut request = self
            .client
            .request(method, format!("{}{path}", self.url()))
            .bearer_auth(TOKEN);
        if let Some(body) = body {
            request = request
                .header("Content-Type", "application/json")
                .body(body.to_string());
        }
        let answer = request.send().await.map_err(|err| format!("{err:?}"))?;
        let status = answer.status();
        let text = answer.text().await.map_err(|err| format!("{err:?}"))?;
        if status.is_success() {
            Ok(text)
        } else {
            Err(format!("{status}: {text}"))
        }
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
        let folder = TempDir::with_prefix("informer-").expect("a folder for the informer");
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
