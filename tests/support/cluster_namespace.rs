//! A namespace on a real Kubernetes cluster with kubelet and containerd: an etcd with TLS, a MinIO on this machine, a
//! policy. Used by the group `cluster` of `tests/end-to-end`.

use super::chart;
pub use super::chart::{CONTROLLER, NAMESPACE as SYSTEM};
use super::etcd::Signal;
use super::kube::Api;
use super::manifests::name;
use super::minio::Minio;
use super::namespace::{POLICIES, TestNamespace, until};
use super::tools;
use super::{deltafold, run_json};
use etcd_client::{
    Certificate, Client, CompactionOptions, ConnectOptions, GetOptions, Identity, TlsOptions,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::ops::Deref;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;
use tokio::sync::OnceCell;

/// The user of everything in the image, and of etcd's data.
pub const USER: u32 = 65_532;

pub const BUCKET: &str = "backups";

pub const POLICY: &str = "main";

/// Generous: the machine may be busy, and a CronJob waits for its minute.
pub const PATIENCE: Duration = Duration::from_secs(240);

pub fn setting(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("no {name}: run tests/end-to-end"))
}

/// Returns the address of this machine for Pods.
pub fn host() -> String {
    setting("IN_CLUSTER_HOST")
}

pub fn cluster(args: &[&str]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cluster/cluster");
    let status = Command::new(script).args(args).status().unwrap();
    assert!(status.success(), "{args:?}");
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs kubectl, which must succeed. Returns its output.
pub fn kubectl(args: &[&str]) -> String {
    let output = Command::new("kubectl").args(args).output().unwrap();
    let err = text(&output.stderr);
    assert!(output.status.success(), "kubectl {args:?}: {err}");
    text(&output.stdout)
}

/// Returns the API of the cluster, for an administrator. Fails before it touches a cluster that is not the tests' own.
fn api() -> Api {
    static ADMIN: OnceLock<(String, String)> = OnceLock::new();
    let (url, token) = ADMIN.get_or_init(|| {
        let run = |command: &str| kubectl(&command.split(' ').collect::<Vec<_>>());
        let url = format!("https://{}:", host());
        let server = run("config view --minify -o jsonpath={.clusters[0].cluster.server}");
        assert!(server.starts_with(&url), "{server} is not of {url}");
        let admin = "clusterrolebinding tests --clusterrole=cluster-admin";
        run("-n kube-system create serviceaccount tests");
        run(&format!(
            "create {admin} --serviceaccount=kube-system:tests"
        ));
        let token = run("-n kube-system create token tests --duration=12h");
        (server, token)
    });
    Api::new(url, token)
}

/// Installs the chart with the image of the tests.
async fn install(api: &Api) {
    static DONE: OnceCell<()> = OnceCell::const_new();
    let install = async || {
        let image = setting("IN_CLUSTER_IMAGE");
        let (repository, tag) = image.rsplit_once(':').expect("an image with a tag");
        let objects = chart::objects(&[
            &format!("image.repository={repository}"),
            &format!("image.tag={tag}"),
            "allow.imagePrefixes={deltafold.test/etcd}",
        ]);
        let system = TestNamespace::named(api, SYSTEM).await;
        system.apply_all(&objects).await;
        controller_is_there();
    };
    DONE.get_or_init(install).await;
}

pub fn controller_is_there() {
    let deployment = format!("deployment/{CONTROLLER}");
    let wait = ["rollout", "status", &deployment, "--timeout=180s"];
    kubectl(&[&["-n", SYSTEM], &wait[..]].concat());
}

/// Returns whether a Pod's container runs.
pub fn runs(pod: &Value) -> bool {
    !pod["status"]["containerStatuses"][0]["state"]["running"].is_null()
}

/// Returns the pids of a Pod's containers on this machine.
pub fn processes(pod: &Value) -> Vec<u32> {
    let socket = Path::new(&setting("IN_CLUSTER_SCRATCH")).join("containerd/containerd.sock");
    let mut command = Command::new("ctr");
    command.arg("--address").arg(socket);
    let output = command
        .args(["-n", "k8s.io", "tasks", "ls"])
        .output()
        .unwrap();
    let tasks = text(&output.stdout);
    let statuses = pod["status"]["containerStatuses"].as_array();
    let ids = statuses.into_iter().flatten().map(|status| {
        let id = status["containerID"].as_str().unwrap();
        id.strip_prefix("containerd://").unwrap()
    });
    ids.map(|id| {
        let line = tasks.lines().find(|line| line.starts_with(id));
        let line = line.unwrap_or_else(|| panic!("no task {id}:\n{tasks}"));
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    })
    .collect()
}

pub fn end(pid: u32, signal: Signal) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

/// Keys with value, create revision, mod revision and version.
pub type Content = BTreeMap<Vec<u8>, (Vec<u8>, i64, i64, i64)>;

/// A client of an etcd in a Pod.
pub struct Etcd {
    pub endpoint: String,
    pub certs: Option<PathBuf>,
}

impl Etcd {
    pub async fn client(&self) -> Client {
        let mut options = ConnectOptions::new();
        if let Some(certs) = &self.certs {
            let read = |name: &str| fs::read(certs.join(name)).unwrap();
            let tls = TlsOptions::new()
                .ca_certificate(Certificate::from_pem(read("ca.crt")))
                .identity(Identity::from_pem(read("node.crt"), read("node.key")));
            options = options.with_tls(tls);
        }
        let mut last = None;
        let connected = until(PATIENCE, async || {
            let connected = Client::connect([&self.endpoint], Some(options.clone())).await;
            let answer = match connected {
                Ok(mut client) => client.status().await.map(|_| client),
                Err(e) => Err(e),
            };
            answer.map_err(|e| last = Some(e)).ok()
        });
        let client = connected.await;
        client.unwrap_or_else(|| panic!("{}: {last:?}", self.endpoint))
    }

    /// Writes `count` revisions: keys that stay, and one that keeps changing.
    pub async fn write(&self, from: usize, count: usize) {
        let mut client = self.client().await;
        for n in from..from + count {
            let key = match n % 3 {
                0 => "/registry/changes".to_owned(),
                _ => format!("/registry/things/{n:05}"),
            };
            client.put(key, format!("value {n}"), None).await.unwrap();
        }
    }

    pub async fn revision(&self) -> i64 {
        let got = self.client().await.get("/", None).await.unwrap();
        got.header().unwrap().revision()
    }

    /// Returns all keys.
    pub async fn content(&self) -> Content {
        let options = GetOptions::new().with_all_keys();
        let got = self.client().await.get("", Some(options)).await.unwrap();
        let keys = got.kvs().iter().map(|kv| {
            let revisions = (kv.create_revision(), kv.mod_revision(), kv.version());
            let value = (kv.value().to_vec(), revisions.0, revisions.1, revisions.2);
            (kv.key().to_vec(), value)
        });
        keys.collect()
    }

    /// Compacts everything before the newest revision and returns the HashKV there.
    pub async fn compacted_hash(&self, revision: i64) -> u32 {
        let mut client = self.client().await;
        let options = CompactionOptions::new().with_physical();
        client.compact(revision, Some(options)).await.unwrap();
        let answer = client.hash_kv(0).await.unwrap();
        assert_eq!(answer.header().unwrap().revision(), revision);
        assert_eq!(answer.compact_version(), revision);
        answer.hash()
    }
}

/// A namespace with an etcd that uses TLS, and a bucket on a MinIO of this machine.
pub struct ClusterNamespace {
    pub space: TestNamespace,
    /// The controller's namespace.
    pub system: TestNamespace,
    pub minio: Minio,
    pub etcd: Etcd,
}

impl Deref for ClusterNamespace {
    type Target = TestNamespace;

    fn deref(&self) -> &TestNamespace {
        &self.space
    }
}

impl ClusterNamespace {
    pub async fn new(namespace: &str) -> Self {
        let api = api();
        install(&api).await;
        let mut space = TestNamespace::named(&api, namespace).await;
        space.patience = PATIENCE;
        // Kubernetes adds it a moment later; before that, no Pod can be created.
        space.wait_for("serviceaccounts", "default").await;
        let minio = Minio::start_at(&host());
        minio.create_bucket(BUCKET).await;
        // The certificate needs the address of the Service.
        let ports = json!([{"port": 2379}]);
        let address = service(&space, "etcd", json!({"app": "etcd"}), ports).await;
        let certs = space.folder("certs");
        tools::write_certs_for(&certs, &[&address]);
        let pem = |name: &str| fs::read_to_string(certs.join(name)).unwrap();
        let tls = json!({
            "ca.crt": pem("ca.crt"), "tls.crt": pem("node.crt"), "tls.key": pem("node.key"),
        });
        let store = json!({
            "accessKeyID": minio.access_key(), "secretAccessKey": minio.secret_key(),
        });
        for (name, data) in [("etcd-tls", tls), ("store", store)] {
            let secret = json!({"metadata": {"name": name}, "stringData": data});
            space.create("secrets", secret).await;
        }
        let endpoint = format!("https://{address}:2379");
        let args = [
            "--data-dir=/data/etcd",
            "--listen-client-urls=https://0.0.0.0:2379",
            &format!("--advertise-client-urls={endpoint}"),
            "--trusted-ca-file=/tls/ca.crt",
            "--cert-file=/tls/tls.crt",
            "--key-file=/tls/tls.key",
            "--client-cert-auth",
            "--unsafe-no-fsync",
        ];
        let volumes = json!([
            {"name": "data", "emptyDir": {}},
            {"name": "tls", "secret": {"secretName": "etcd-tls"}},
        ]);
        space.create("pods", etcd_pod("etcd", &args, volumes)).await;
        let world = ClusterNamespace {
            system: TestNamespace::existing(&api, SYSTEM).await,
            space,
            minio,
            etcd: Etcd {
                endpoint,
                certs: Some(certs),
            },
        };
        world.etcd.write(0, 100).await;
        world
    }

    pub fn kubectl(&self, args: &[&str]) -> String {
        kubectl(&[&["-n", self.name.as_str()], args].concat())
    }

    /// Applies a policy for this etcd and bucket, with `more` in its spec.
    pub async fn apply_policy(&self, more: Value) {
        self.apply_policy_of(POLICY, &[&self.etcd], more).await;
    }

    pub async fn apply_policy_of(&self, policy: &str, members: &[&Etcd], more: Value) {
        let endpoints: Vec<&str> = members.iter().map(|e| e.endpoint.as_str()).collect();
        let mut etcd = json!({"endpoints": endpoints});
        if members[0].certs.is_some() {
            etcd["tlsSecretRef"] = json!({"name": "etcd-tls"});
        }
        let mut spec = json!({
            "etcd": etcd,
            "store": {
                "url": format!("s3://{BUCKET}/main"),
                "secretRef": {"name": "store"},
                "options": {"endpoint": self.minio.endpoint(), "region": "us-east-1"},
            },
            "jobTemplate": {"image": setting("IN_CLUSTER_IMAGE"), "imagePullPolicy": "Never"},
        });
        let more = more.as_object().unwrap().clone();
        spec.as_object_mut().unwrap().extend(more);
        let policy = json!({"metadata": {"name": policy}, "spec": spec});
        self.apply(POLICIES, policy).await;
    }

    /// Takes a snapshot by a task.
    pub async fn snapshot(&self, policy: &str, name: &str, kind: &str) {
        let config = json!({"onDemandSnapshot": {"type": kind}});
        self.task(name, policy, "OnDemandSnapshot", config).await;
        self.wait_task(name, "Succeeded").await;
    }

    /// Returns the Pods of a task's Job.
    pub async fn pods_of(&self, task: &str) -> Vec<Value> {
        self.list("pods", &format!("deltafold.io/task={task}"))
            .await
    }

    /// Waits for a running Pod with these labels.
    pub async fn running_pod(&self, labels: &str) -> Value {
        let found = async || self.list("pods", labels).await.into_iter().find(runs);
        self.wait(&format!("a Pod with {labels} runs"), found).await
    }

    /// Takes a full and a delta, and starts a compaction that hangs because the store does not respond.
    pub async fn held_compaction(&self, task: &str) -> Value {
        self.snapshot(POLICY, &format!("{task}-full"), "full").await;
        self.etcd.write(1000, 200).await;
        self.snapshot(POLICY, &format!("{task}-delta"), "delta")
            .await;
        self.minio.signal(Signal::STOP);
        self.task(task, POLICY, "OnDemandCompaction", Value::Null)
            .await;
        self.running_pod(&format!("deltafold.io/task={task}")).await
    }

    /// Waits until the held compaction has succeeded, by the same Pod.
    pub async fn is_done_by(&self, task: &str, pod: &Value) {
        self.wait_task(task, "Succeeded").await;
        let pods = self.pods_of(task).await;
        assert_eq!((pods.len(), name(&pods[0])), (1, name(pod)), "{pods:#?}");
        self.is_compacted().await;
    }

    /// Asserts that the newest full is up to date and right.
    pub async fn is_compacted(&self) {
        let newest = self.etcd.revision().await;
        assert_eq!(self.fulls().last(), Some(&newest));
        let of_source = self.etcd.compacted_hash(newest).await;
        assert_eq!(self.hash_of_store(newest), of_source);
    }

    pub fn go_on(&self) {
        self.minio.signal(Signal::CONT);
    }

    /// Runs deltafold on this machine, on the same store.
    pub fn deltafold(&self, args: &[&str]) -> (i32, Value, String) {
        let mut command = deltafold();
        command.envs(self.minio.env());
        let store = format!("s3://{BUCKET}/main");
        command
            .args(args)
            .args(["--output", "json", "--store", &store]);
        run_json(&mut command)
    }

    /// Returns the revisions of the fulls, the newest last.
    pub fn fulls(&self) -> Vec<i64> {
        let (code, list, stderr) = self.deltafold(&["list"]);
        assert_eq!(code, 0, "{stderr}");
        let snapshots = list["snapshots"].as_array().unwrap().iter();
        let mut fulls: Vec<i64> = snapshots
            .filter(|s| s["kind"] == "Full")
            .map(|s| s["last_revision"].as_i64().unwrap())
            .collect();
        fulls.sort_unstable();
        fulls
    }

    /// Returns the HashKV of the backup at a revision, without history, computed by deltafold on this machine.
    pub fn hash_of_store(&self, revision: i64) -> u32 {
        let file = self.space.folder.path().join(format!("at-{revision}.db"));
        let (code, result, stderr) = self.deltafold(&[
            "restore",
            "--revision",
            &revision.to_string(),
            "--keep-history",
            "latest",
            "--to-snapshot",
            file.to_str().unwrap(),
        ]);
        assert_eq!(code, 0, "{stderr}");
        u32::try_from(result["hash_kv"].as_u64().unwrap()).unwrap()
    }

    /// Returns the folder of a claim's volume.
    pub fn volume(&self, claim: &str) -> PathBuf {
        let volumes = Path::new(&setting("IN_CLUSTER_SCRATCH")).join("volumes");
        volumes.join(&self.name).join(claim)
    }

    /// Creates a volume on this machine that etcd's user may write to, and its claim.
    pub async fn claim(&self, claim: &str) {
        let folder = self.volume(claim);
        fs::create_dir_all(&folder).unwrap();
        chown(&folder, Some(USER), Some(USER)).unwrap();
        let size = json!({"storage": "1Gi"});
        let volume = format!("{}-{claim}", self.name);
        let object = json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume},
            "spec": {
                "capacity": size, "accessModes": ["ReadWriteOnce"], "storageClassName": "",
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": folder, "type": "Directory"},
                "claimRef": {"namespace": self.name, "name": claim},
            },
        });
        self.apply_all(&[object]).await;
        let object = json!({
            "metadata": {"name": claim},
            "spec": {
                "accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": volume,
                "resources": {"requests": size},
            },
        });
        self.create("persistentvolumeclaims", object).await;
    }

    /// Starts an etcd in a Pod on a claim.
    pub async fn etcd_on(&self, claim: &str, data_dir: &str) -> Etcd {
        let args = [
            &format!("--data-dir=/data/{data_dir}"),
            "--listen-client-urls=http://0.0.0.0:2379",
            "--advertise-client-urls=http://localhost:2379",
        ];
        let volumes = json!([{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]);
        self.create("pods", etcd_pod(claim, &args, volumes)).await;
        let has_address = |pod: &Value| pod["status"]["podIP"].is_string();
        let pod = self.wait_until("pods", claim, "it has an address", has_address);
        let address = pod.await["status"]["podIP"].as_str().unwrap().to_owned();
        Etcd {
            endpoint: format!("http://{address}:2379"),
            certs: None,
        }
    }

    /// Prints what a person would look at.
    fn tell(&self) {
        let script = "
            exec 2>&1
            set -x
            kubectl -n $0 get pods,jobs,cronjobs,deployments,leases,ebp,ebt -o wide
            kubectl -n $0 get ebp,ebt -o yaml
            kubectl -n $0 get events --sort-by=.lastTimestamp
            for pod in $(kubectl -n $0 get pods -o name); do
                kubectl -n $0 logs $pod --all-containers --tail=15
            done
            kubectl -n $1 get pods -o wide
            kubectl -n $1 logs deployment/$2 --all-pods --tail=60
        ";
        let mut command = Command::new("sh");
        let command = command.args(["-c", script, &self.name, SYSTEM, CONTROLLER]);
        let output = command.output().unwrap();
        eprintln!("{}", text(&output.stdout));
    }
}

impl Drop for ClusterNamespace {
    fn drop(&mut self) {
        self.go_on();
        if std::thread::panicking() {
            self.tell();
        } else {
            self.kubectl(&["delete", "namespace", &self.name, "--wait=false"]);
        }
    }
}

/// Creates a Service and returns its address.
pub async fn service(space: &TestNamespace, name: &str, selector: Value, ports: Value) -> String {
    let spec = json!({"selector": selector, "ports": ports});
    let service = json!({"metadata": {"name": name}, "spec": spec});
    let service = space.create("services", service).await;
    service["spec"]["clusterIP"].as_str().unwrap().to_owned()
}

/// Returns a Pod with a one-member etcd. Volumes are mounted under their names.
pub fn etcd_pod(name: &str, args: &[&str], volumes: Value) -> Value {
    let mounts = volumes.as_array().unwrap().iter().map(|volume| {
        let name = volume["name"].as_str().unwrap();
        json!({"name": name, "mountPath": format!("/{name}")})
    });
    json!({
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 2,
            "securityContext": {
                "runAsNonRoot": true, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
            },
            "containers": [{
                "name": "etcd", "image": setting("IN_CLUSTER_ETCD_IMAGE"), "imagePullPolicy": "Never",
                "args": args, "volumeMounts": mounts.collect::<Vec<_>>(),
            }],
            "volumes": volumes,
        },
    })
}

/// Returns the termination message of a Pod's container.
pub fn last_word(pod: &Value) -> Value {
    let ended = &pod["status"]["containerStatuses"][0]["state"]["terminated"];
    let message = ended["message"]
        .as_str()
        .unwrap_or_else(|| panic!("{pod:#}"));
    assert!(message.len() < 4096, "{message}");
    serde_json::from_str(message).unwrap_or_else(|e| panic!("{e}: {message}"))
}
