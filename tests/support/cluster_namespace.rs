//! A namespace on a real Kubernetes cluster with kubelet and containerd: an etcd with TLS, a MinIO on this machine, a
//! policy. Used by the group `cluster` of `tests/end-to-end`.

use super::chart;
use super::etcd::Signal;
use super::minio::Minio;
use super::scratch;
use super::tools;
use super::{deltafold, run_json};
use etcd_client::{
    Certificate, Client, CompactionOptions, ConnectOptions, GetOptions, Identity, TlsOptions,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The user of everything in the image, and of etcd's data.
pub const USER: u32 = 65_532;

pub const BUCKET: &str = "backups";

pub const POLICY: &str = "main";

/// The controller's namespace.
pub const SYSTEM: &str = "deltafold-system";

pub const CONTROLLER: &str = "deltafold-controller";

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

pub fn kubectl_with(args: &[&str], input: Option<&str>) -> Output {
    let mut command = Command::new("kubectl");
    command
        .args(args)
        .stdin(input.map_or_else(Stdio::null, |_| Stdio::piped()))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("kubectl");
    if let Some(input) = input {
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(input.as_bytes()).unwrap();
    }
    child.wait_with_output().unwrap()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs kubectl, which must succeed. Returns its output.
pub fn kubectl(args: &[&str]) -> String {
    let output = kubectl_with(args, None);
    let err = text(&output.stderr);
    assert!(output.status.success(), "kubectl {args:?}: {err}");
    text(&output.stdout)
}

/// Returns the JSON of `kubectl get` if the object exists and the API server responds.
pub fn get(args: &[&str]) -> Option<Value> {
    let output = kubectl_with(&[&["get", "-o", "json"], args].concat(), None);
    let there = output.status.success();
    there.then(|| serde_json::from_slice(&output.stdout).unwrap())
}

pub fn apply(documents: &str) {
    let args = ["apply", "--server-side", "-f", "-"];
    let output = kubectl_with(&args, Some(documents));
    let err = text(&output.stderr);
    assert!(output.status.success(), "{err}\n{documents}");
}

pub fn apply_all(objects: &[Value]) {
    let documents: Vec<String> = objects.iter().map(Value::to_string).collect();
    apply(&documents.join("\n---\n"));
}

/// Polls until there is a result.
pub fn wait<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(started.elapsed() < PATIENCE, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Installs the chart with the image of the tests.
pub fn install() {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(|| {
        let image = setting("IN_CLUSTER_IMAGE");
        let (repository, tag) = image.rsplit_once(':').expect("an image with a tag");
        let objects = chart::objects(&[
            &format!("image.repository={repository}"),
            &format!("image.tag={tag}"),
            "allow.imagePrefixes={deltafold.test/etcd}",
        ]);
        let namespace =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}});
        apply_all(&[&[namespace], &objects[..]].concat());
        controller_is_there();
    });
}

pub fn controller_is_there() {
    let deployment = format!("deployment/{CONTROLLER}");
    kubectl(&[
        "-n",
        SYSTEM,
        "rollout",
        "status",
        &deployment,
        "--timeout=180s",
    ]);
}

/// Returns the Pods of the controller.
pub fn controller_pods() -> Vec<Value> {
    let selector = "app.kubernetes.io/component=controller";
    let list = get(&["-n", SYSTEM, "pods", "-l", selector]).expect("the controller's Pods");
    let pods = list["items"].as_array().unwrap().clone();
    assert!(!pods.is_empty(), "{list:#}");
    pods
}

pub fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap()
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
        let started = Instant::now();
        loop {
            let connected = Client::connect([&self.endpoint], Some(options.clone())).await;
            let answer = match connected {
                Ok(mut client) => client.status().await.map(|_| client),
                Err(e) => Err(e),
            };
            match answer {
                Ok(client) => return client,
                Err(e) => assert!(started.elapsed() < PATIENCE, "{}: {e}", self.endpoint),
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
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
    pub namespace: String,
    pub folder: TempDir,
    pub minio: Minio,
    pub etcd: Etcd,
}

impl ClusterNamespace {
    pub async fn new(namespace: &str) -> Self {
        install();
        apply_all(&[
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}),
        ]);
        // Kubernetes adds it a moment later; before that, no Pod can be created.
        wait("the service account of a namespace", || {
            get(&["-n", namespace, "serviceaccount", "default"])
        });
        let minio = Minio::start_at(&host());
        minio.create_bucket(BUCKET).await;
        let folder = scratch::folder().unwrap();
        let metadata = |name: &str| json!({"name": name, "namespace": namespace});
        let secret = |name: &str, data: Value| json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata(name), "stringData": data});
        // The certificate needs the address of the Service.
        apply_all(&[json!({
            "apiVersion": "v1", "kind": "Service", "metadata": metadata("etcd"),
            "spec": {"selector": {"app": "etcd"}, "ports": [{"port": 2379}]},
        })]);
        let service = get(&["-n", namespace, "service", "etcd"]).unwrap();
        let address = service["spec"]["clusterIP"].as_str().unwrap();
        let certs = folder.path().join("certs");
        fs::create_dir(&certs).unwrap();
        tools::write_certs_for(&certs, &[address]);
        let pem = |name: &str| fs::read_to_string(certs.join(name)).unwrap();
        let endpoint = format!("https://{address}:2379");
        apply_all(&[
            secret(
                "etcd-tls",
                json!({
                    "ca.crt": pem("ca.crt"), "tls.crt": pem("node.crt"), "tls.key": pem("node.key"),
                }),
            ),
            secret(
                "store",
                json!({
                    "accessKeyID": minio.access_key(), "secretAccessKey": minio.secret_key(),
                }),
            ),
            etcd_pod(
                namespace,
                "etcd",
                &[
                    "--data-dir=/data/etcd",
                    "--listen-client-urls=https://0.0.0.0:2379",
                    &format!("--advertise-client-urls={endpoint}"),
                    "--trusted-ca-file=/tls/ca.crt",
                    "--cert-file=/tls/tls.crt",
                    "--key-file=/tls/tls.key",
                    "--client-cert-auth",
                    "--unsafe-no-fsync",
                ],
                json!([
                    {"name": "data", "emptyDir": {}},
                    {"name": "tls", "secret": {"secretName": "etcd-tls"}},
                ]),
            ),
        ]);
        let world = ClusterNamespace {
            namespace: namespace.to_owned(),
            minio,
            etcd: Etcd {
                endpoint,
                certs: Some(certs),
            },
            folder,
        };
        world.etcd.write(0, 100).await;
        world
    }

    pub fn get(&self, args: &[&str]) -> Option<Value> {
        get(&[&["-n", self.namespace.as_str()], args].concat())
    }

    pub fn kubectl(&self, args: &[&str]) -> String {
        kubectl(&[&["-n", self.namespace.as_str()], args].concat())
    }

    /// Applies a policy for this etcd and bucket, with `more` in its spec.
    pub fn apply_policy(&self, more: Value) {
        self.apply_policy_of(POLICY, &[&self.etcd], more);
    }

    pub fn apply_policy_of(&self, policy: &str, members: &[&Etcd], more: Value) {
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
        apply_all(&[self.object("EtcdBackupPolicy", policy, spec)]);
    }

    pub fn object(&self, kind: &str, name: &str, spec: Value) -> Value {
        json!({
            "apiVersion": "deltafold.io/v1alpha1",
            "kind": kind,
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": spec,
        })
    }

    pub fn policy(&self) -> Value {
        self.get(&["etcdbackuppolicy", POLICY]).unwrap_or_default()
    }

    /// Creates a task.
    pub fn task(&self, name: &str, kind: &str, config: Value) {
        self.task_of(POLICY, name, kind, config);
    }

    pub fn task_of(&self, policy: &str, name: &str, kind: &str, config: Value) {
        let mut spec = json!({"policy": policy, "type": kind});
        if !config.is_null() {
            spec["config"] = config;
        }
        apply_all(&[self.object("EtcdBackupTask", name, spec)]);
    }

    /// Waits until a task has ended.
    pub fn ended(&self, name: &str) -> Value {
        wait(&format!("the end of task {name}"), || {
            let task = self.get(&["etcdbackuptask", name])?;
            let state = task["status"]["state"].as_str()?;
            ["Succeeded", "Failed", "Rejected"]
                .contains(&state)
                .then_some(task)
        })
    }

    pub fn succeeded(&self, name: &str) -> Value {
        let task = self.ended(name);
        assert_eq!(task["status"]["state"], "Succeeded", "{:#}", task["status"]);
        task
    }

    /// Takes a snapshot by a task.
    pub fn snapshot(&self, name: &str, kind: &str) {
        self.task(
            name,
            "OnDemandSnapshot",
            json!({"onDemandSnapshot": {"type": kind}}),
        );
        self.succeeded(name);
    }

    /// Returns the Pods of a task's Job.
    pub fn pods_of(&self, task: &str) -> Vec<Value> {
        let selector = format!("deltafold.io/task={task}");
        let list = self.get(&["pods", "-l", &selector]).unwrap_or_default();
        list["items"].as_array().cloned().unwrap_or_default()
    }

    /// Waits for the running Pod of a task.
    pub fn running_pod(&self, task: &str) -> Value {
        wait(&format!("a Pod of task {task} runs"), || {
            let pods = self.pods_of(task);
            let runs =
                |pod: &&Value| !pod["status"]["containerStatuses"][0]["state"]["running"].is_null();
            pods.iter().find(runs).cloned()
        })
    }

    /// Takes a full and a delta, and starts a compaction that hangs because the store does not respond.
    pub async fn held_compaction(&self, task: &str) -> Value {
        self.snapshot(&format!("{task}-full"), "full");
        self.etcd.write(1000, 200).await;
        self.snapshot(&format!("{task}-delta"), "delta");
        self.minio.signal(Signal::STOP);
        self.task(task, "OnDemandCompaction", Value::Null);
        self.running_pod(task)
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
        let file = self.folder.path().join(format!("at-{revision}.db"));
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
        volumes.join(&self.namespace).join(claim)
    }

    /// Creates a volume on this machine that etcd's user may write to, and its claim.
    pub fn claim(&self, claim: &str) {
        let folder = self.volume(claim);
        fs::create_dir_all(&folder).unwrap();
        chown(&folder, Some(USER), Some(USER)).unwrap();
        let size = json!({"storage": "1Gi"});
        let volume = format!("{}-{claim}", self.namespace);
        apply_all(&[
            json!({
                "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume},
                "spec": {
                    "capacity": size, "accessModes": ["ReadWriteOnce"], "storageClassName": "",
                    "persistentVolumeReclaimPolicy": "Retain",
                    "hostPath": {"path": folder, "type": "Directory"},
                    "claimRef": {"namespace": self.namespace, "name": claim},
                },
            }),
            json!({
                "apiVersion": "v1", "kind": "PersistentVolumeClaim",
                "metadata": {"name": claim, "namespace": self.namespace},
                "spec": {
                    "accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": volume,
                    "resources": {"requests": size},
                },
            }),
        ]);
    }

    /// Starts an etcd in a Pod on a claim.
    pub fn etcd_on(&self, claim: &str, data_dir: &str) -> Etcd {
        apply_all(&[etcd_pod(
            &self.namespace,
            claim,
            &[
                &format!("--data-dir=/data/{data_dir}"),
                "--listen-client-urls=http://0.0.0.0:2379",
                "--advertise-client-urls=http://localhost:2379",
            ],
            json!([{"name": "data", "persistentVolumeClaim": {"claimName": claim}}]),
        )]);
        let address = wait("the address of an etcd's Pod", || {
            let pod = self.get(&["pod", claim])?;
            Some(pod["status"]["podIP"].as_str()?.to_owned())
        });
        Etcd {
            endpoint: format!("http://{address}:2379"),
            certs: None,
        }
    }

    /// Prints what a person would look at.
    pub fn tell(&self) {
        let show = |args: &[&str]| {
            let output = kubectl_with(args, None);
            let said = [output.stdout, output.stderr].concat();
            eprintln!("$ kubectl {}\n{}", args.join(" "), text(&said));
        };
        let ns = self.namespace.as_str();
        show(&[
            "-n",
            ns,
            "get",
            "pods,jobs,cronjobs,deployments,leases,ebp,ebt",
            "-o",
            "wide",
        ]);
        show(&["-n", ns, "get", "ebp,ebt", "-o", "yaml"]);
        show(&["-n", ns, "get", "events", "--sort-by=.lastTimestamp"]);
        let pods = self.get(&["pods"]).unwrap_or_default();
        for pod in pods["items"].as_array().into_iter().flatten() {
            show(&["-n", ns, "logs", name(pod), "--all-containers", "--tail=15"]);
        }
        show(&["-n", SYSTEM, "get", "pods", "-o", "wide"]);
        let deployment = format!("deployment/{CONTROLLER}");
        show(&["-n", SYSTEM, "logs", &deployment, "--all-pods", "--tail=60"]);
    }
}

impl Drop for ClusterNamespace {
    fn drop(&mut self) {
        self.go_on();
        if std::thread::panicking() {
            self.tell();
        } else {
            kubectl_with(
                &["delete", "namespace", &self.namespace, "--wait=false"],
                None,
            );
        }
    }
}

/// Returns a Pod with a one-member etcd. Volumes are mounted under their names.
pub fn etcd_pod(namespace: &str, name: &str, args: &[&str], volumes: Value) -> Value {
    let mounts = volumes.as_array().unwrap().iter().map(|volume| {
        let name = volume["name"].as_str().unwrap();
        json!({"name": name, "mountPath": format!("/{name}")})
    });
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
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
