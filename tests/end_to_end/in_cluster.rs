//! Everything on a real Kubernetes with kubelet and containerd, which `tests/end-to-end` starts: applied
//! objects become Pods, and the Pods do their work, whatever is killed meanwhile.
//!
//! Plain `cargo test` does not run this module: without the cluster it fails.

use crate::support::doc_commands;
use crate::support::etcd::Signal;
use crate::support::minio::Minio;
use crate::support::scratch;
use crate::support::tools;
use crate::support::{deltafold, run_json};
use etcd_client::{
    Certificate, Client, CompactionOptions, ConnectOptions, GetOptions, Identity, TlsOptions,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::Write as _;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::unix::fs::{chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The user of everything in the image, and of etcd's data.
const USER: u32 = 65_532;
const BUCKET: &str = "backups";
const POLICY: &str = "main";
/// The controller's namespace.
const SYSTEM: &str = "deltafold-system";
const CONTROLLER: &str = "deltafold-controller";
/// The event threshold of the policy.
const EVENTS: usize = 3000;
/// Generous: the machine may be busy, and a CronJob waits for its minute.
const PATIENCE: Duration = Duration::from_secs(240);

// --- the cluster ---

fn setting(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("no {name}: run tests/end-to-end"))
}

/// Returns the address of this machine for Pods.
fn host() -> String {
    setting("IN_CLUSTER_HOST")
}

fn cluster(args: &[&str]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cluster/cluster");
    let status = Command::new(script).args(args).status().unwrap();
    assert!(status.success(), "{args:?}");
}

fn kubectl_with(args: &[&str], input: Option<&str>) -> Output {
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

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs kubectl, which must succeed. Returns its output.
fn kubectl(args: &[&str]) -> String {
    let output = kubectl_with(args, None);
    let err = text(&output.stderr);
    assert!(output.status.success(), "kubectl {args:?}: {err}");
    text(&output.stdout)
}

/// Returns the JSON of `kubectl get` if the object exists and the API server responds.
fn get(args: &[&str]) -> Option<Value> {
    let output = kubectl_with(&[&["get", "-o", "json"], args].concat(), None);
    let there = output.status.success();
    there.then(|| serde_json::from_slice(&output.stdout).unwrap())
}

fn apply(documents: &str) {
    let args = ["apply", "--server-side", "-f", "-"];
    let output = kubectl_with(&args, Some(documents));
    let err = text(&output.stderr);
    assert!(output.status.success(), "{err}\n{documents}");
}

fn apply_all(objects: &[Value]) {
    let documents: Vec<String> = objects.iter().map(Value::to_string).collect();
    apply(&documents.join("\n---\n"));
}

/// Polls until there is a result.
fn wait<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(started.elapsed() < PATIENCE, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Runs `deltafold manifests install
/// kubectl apply` with the image of the tests.
fn install() {
    static DONE: OnceLock<()> = OnceLock::new();
    DONE.get_or_init(|| {
        let mut command = deltafold();
        command.args([
            "manifests",
            "install",
            "--image",
            &setting("IN_CLUSTER_IMAGE"),
        ]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        apply(&text(&output.stdout));
        controller_is_there();
    });
}

fn controller_is_there() {
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
fn controller_pods() -> Vec<Value> {
    let selector = "app.kubernetes.io/component=controller";
    let list = get(&["-n", SYSTEM, "pods", "-l", selector]).expect("the controller's Pods");
    let pods = list["items"].as_array().unwrap().clone();
    assert!(!pods.is_empty(), "{list:#}");
    pods
}

fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap()
}

/// Returns the pids of a Pod's containers on this machine.
fn processes(pod: &Value) -> Vec<u32> {
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

fn end(pid: u32, signal: Signal) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

// --- an etcd in a Pod, and its backup ---

/// Keys with value, create revision, mod revision and version.
type Content = BTreeMap<Vec<u8>, (Vec<u8>, i64, i64, i64)>;

/// A client of an etcd in a Pod.
struct Etcd {
    endpoint: String,
    certs: Option<PathBuf>,
}

impl Etcd {
    async fn client(&self) -> Client {
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
    async fn write(&self, from: usize, count: usize) {
        let mut client = self.client().await;
        for n in from..from + count {
            let key = match n % 3 {
                0 => "/registry/changes".to_owned(),
                _ => format!("/registry/things/{n:05}"),
            };
            client.put(key, format!("value {n}"), None).await.unwrap();
        }
    }

    async fn revision(&self) -> i64 {
        let got = self.client().await.get("/", None).await.unwrap();
        got.header().unwrap().revision()
    }

    /// Returns all keys.
    async fn content(&self) -> Content {
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
    async fn compacted_hash(&self, revision: i64) -> u32 {
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
struct ClusterNamespace {
    namespace: String,
    folder: TempDir,
    minio: Minio,
    etcd: Etcd,
}

impl ClusterNamespace {
    async fn new(namespace: &str) -> Self {
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

    fn get(&self, args: &[&str]) -> Option<Value> {
        get(&[&["-n", self.namespace.as_str()], args].concat())
    }

    fn kubectl(&self, args: &[&str]) -> String {
        kubectl(&[&["-n", self.namespace.as_str()], args].concat())
    }

    /// Applies a policy for this etcd and bucket, with `more` in its spec.
    fn apply_policy(&self, more: Value) {
        self.apply_policy_of(POLICY, &[&self.etcd], more);
    }

    fn apply_policy_of(&self, policy: &str, members: &[&Etcd], more: Value) {
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

    fn object(&self, kind: &str, name: &str, spec: Value) -> Value {
        json!({
            "apiVersion": "deltafold.io/v1alpha1",
            "kind": kind,
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": spec,
        })
    }

    fn policy(&self) -> Value {
        self.get(&["etcdbackuppolicy", POLICY]).unwrap_or_default()
    }

    /// Creates a task.
    fn task(&self, name: &str, kind: &str, config: Value) {
        self.task_of(POLICY, name, kind, config);
    }

    fn task_of(&self, policy: &str, name: &str, kind: &str, config: Value) {
        let mut spec = json!({"policy": policy, "type": kind});
        if !config.is_null() {
            spec["config"] = config;
        }
        apply_all(&[self.object("EtcdBackupTask", name, spec)]);
    }

    /// Waits until a task has ended.
    fn ended(&self, name: &str) -> Value {
        wait(&format!("the end of task {name}"), || {
            let task = self.get(&["etcdbackuptask", name])?;
            let state = task["status"]["state"].as_str()?;
            ["Succeeded", "Failed", "Rejected"]
                .contains(&state)
                .then_some(task)
        })
    }

    fn succeeded(&self, name: &str) -> Value {
        let task = self.ended(name);
        assert_eq!(task["status"]["state"], "Succeeded", "{:#}", task["status"]);
        task
    }

    /// Takes a snapshot by a task.
    fn snapshot(&self, name: &str, kind: &str) {
        self.task(
            name,
            "OnDemandSnapshot",
            json!({"onDemandSnapshot": {"type": kind}}),
        );
        self.succeeded(name);
    }

    /// Returns the Pods of a task's Job.
    fn pods_of(&self, task: &str) -> Vec<Value> {
        let selector = format!("deltafold.io/task={task}");
        let list = self.get(&["pods", "-l", &selector]).unwrap_or_default();
        list["items"].as_array().cloned().unwrap_or_default()
    }

    /// Waits for the running Pod of a task.
    fn running_pod(&self, task: &str) -> Value {
        wait(&format!("a Pod of task {task} runs"), || {
            let pods = self.pods_of(task);
            let runs =
                |pod: &&Value| !pod["status"]["containerStatuses"][0]["state"]["running"].is_null();
            pods.iter().find(runs).cloned()
        })
    }

    /// Takes a full and a delta, and starts a compaction that hangs because the store does not respond.
    async fn held_compaction(&self, task: &str) -> Value {
        self.snapshot(&format!("{task}-full"), "full");
        self.etcd.write(1000, 200).await;
        self.snapshot(&format!("{task}-delta"), "delta");
        self.minio.signal(Signal::STOP);
        self.task(task, "OnDemandCompaction", Value::Null);
        self.running_pod(task)
    }

    /// Asserts that the newest full is up to date and right.
    async fn is_compacted(&self) {
        let newest = self.etcd.revision().await;
        assert_eq!(self.fulls().last(), Some(&newest));
        let of_source = self.etcd.compacted_hash(newest).await;
        assert_eq!(self.hash_of_store(newest), of_source);
    }

    fn go_on(&self) {
        self.minio.signal(Signal::CONT);
    }

    /// Runs deltafold on this machine, on the same store.
    fn deltafold(&self, args: &[&str]) -> (i32, Value, String) {
        let mut command = deltafold();
        command.envs(self.minio.env());
        let store = format!("s3://{BUCKET}/main");
        command
            .args(args)
            .args(["--output", "json", "--store", &store]);
        run_json(&mut command)
    }

    /// Returns the revisions of the fulls, the newest last.
    fn fulls(&self) -> Vec<i64> {
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
    fn hash_of_store(&self, revision: i64) -> u32 {
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
    fn volume(&self, claim: &str) -> PathBuf {
        let volumes = Path::new(&setting("IN_CLUSTER_SCRATCH")).join("volumes");
        volumes.join(&self.namespace).join(claim)
    }

    /// Creates a volume on this machine that etcd's user may write to, and its claim.
    fn claim(&self, claim: &str) {
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
    fn etcd_on(&self, claim: &str, data_dir: &str) -> Etcd {
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
    fn tell(&self) {
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
fn etcd_pod(namespace: &str, name: &str, args: &[&str], volumes: Value) -> Value {
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

// --- a policy and its tasks ---

/// Returns the termination message of a Pod's container.
fn last_word(pod: &Value) -> Value {
    let ended = &pod["status"]["containerStatuses"][0]["state"]["terminated"];
    let message = ended["message"]
        .as_str()
        .unwrap_or_else(|| panic!("{pod:#}"));
    assert!(message.len() < 4096, "{message}");
    serde_json::from_str(message).unwrap_or_else(|e| panic!("{e}: {message}"))
}

/// One `kubectl apply` of a policy: the etcd is backed up by schedule and compacted when a threshold is
/// crossed. A task restores it into a volume, and a real etcd serves the result.
#[tokio::test(flavor = "multi_thread")]
async fn a_policy_backs_an_etcd_up_and_a_task_restores_it() {
    let world = ClusterNamespace::new("story").await;
    world.apply_policy(json!({
        "snapshot": {"deltaSchedule": "* * * * *"},
        "compaction": {"eventsThreshold": EVENTS},
    }));

    // Snapshots appear. The first is a full, because there is none.
    let policy = wait("the first full snapshot is told", || {
        let policy = world.policy();
        let full = &policy["status"]["snapshots"]["lastFull"]["endRevision"];
        full.is_i64().then_some(policy)
    });
    let first = world.etcd.revision().await;
    assert_eq!(
        policy["status"]["snapshots"]["lastFull"]["endRevision"], first,
        "{policy:#}"
    );
    assert_eq!(world.fulls(), [first]);

    // When everything written now is saved, the threshold is crossed and a compaction runs.
    world.etcd.write(1000, EVENTS).await;
    let newest = world.etcd.revision().await;
    let policy = wait("a compaction", || {
        let policy = world.policy();
        let state = &policy["status"]["lastCompaction"]["state"];
        assert_ne!(state, "Failed", "{policy:#}");
        (state == "Succeeded").then_some(policy)
    });
    let last = &policy["status"]["lastCompaction"];
    assert_eq!(last["trigger"], "EventsThreshold", "{policy:#}");
    let job = last["jobName"].as_str().unwrap();
    let pods = world
        .get(&["pods", "-l", &format!("job-name={job}")])
        .unwrap();
    let [pod] = &pods["items"].as_array().unwrap()[..] else {
        panic!("{pods:#}")
    };
    let word = last_word(pod);
    assert_eq!(word["status"], "Succeeded", "{word:#}");
    assert_eq!(world.fulls(), [first, newest]);

    // The full's HashKV, computed here by deltafold, is etcd's own.
    let of_source = world.etcd.compacted_hash(newest).await;
    assert_eq!(world.hash_of_store(newest), of_source);
    let jobs = world
        .get(&["jobs", "-l", "deltafold.io/work=compaction"])
        .unwrap();
    assert_eq!(jobs["items"].as_array().unwrap().len(), 1, "{jobs:#}");

    // A task restores it into a volume.
    world.claim("restored");
    world.task(
        "restore",
        "Restore",
        json!({"restore": {"claimName": "restored", "revision": newest}}),
    );
    world.succeeded("restore");
    let [pod] = &world.pods_of("restore")[..] else {
        panic!("not one Pod")
    };
    assert_eq!(last_word(pod)["status"], "Succeeded");
    let served = world.etcd_on("restored", "default.etcd");
    assert_eq!(served.content().await, world.etcd.content().await);
    assert_eq!(served.revision().await, newest);
    served.write(9000, 3).await;
    assert_eq!(served.revision().await, newest + 3);
}

// --- kills and restarts ---

/// How a Pod ends.
#[derive(Clone, Copy, Debug)]
enum End {
    /// `kubectl delete pod`
    Deleted,
    /// `kubectl delete pod --force`: the API forgets the Pod before it has ended.
    Forgotten,
    /// Its process is killed.
    Killed,
}

fn wait_for_ends<P: std::fmt::Display>(pids: impl IntoIterator<Item = P>) {
    for pid in pids {
        let process = PathBuf::from(format!("/proc/{pid}"));
        wait("the end of the Pod's process", || {
            (!process.exists()).then_some(())
        });
    }
}

/// A Pod that ends in the middle of its work is replaced by another one, which does it.
async fn a_pod_ends(namespace: &str, how: End) {
    let world = ClusterNamespace::new(namespace).await;
    world.apply_policy(json!({}));
    let pod = world.held_compaction("compact").await;
    match how {
        End::Deleted => {
            let pids = processes(&pod);
            world.kubectl(&["delete", "pod", name(&pod), "--wait=false"]);
            // If the store came back too soon, the Pod would finish before it is told to end.
            wait_for_ends(pids);
        }
        End::Forgotten => {
            drop(world.kubectl(&["delete", "pod", name(&pod), "--force", "--grace-period=0"]))
        }
        End::Killed => processes(&pod)
            .into_iter()
            .for_each(|pid| end(pid, Signal::KILL)),
    }
    world.go_on();
    world.succeeded("compact");
    let others = world.pods_of("compact");
    let done =
        |other: &&Value| other["status"]["phase"] == "Succeeded" && name(other) != name(&pod);
    assert_eq!(others.iter().filter(done).count(), 1, "{others:#?}");
    world.is_compacted().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_pod_is_replaced() {
    a_pod_ends("deleted", End::Deleted).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forgotten_pod_is_replaced() {
    a_pod_ends("forgotten", End::Forgotten).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_pod_is_replaced() {
    a_pod_ends("killed", End::Killed).await;
}

/// The Pod continues without a kubelet, and ends before the kubelet is back.
#[tokio::test(flavor = "multi_thread")]
async fn the_kubelet_restarts_in_the_midst_of_a_job() {
    let world = ClusterNamespace::new("kubelet").await;
    world.apply_policy(json!({}));
    let pod = world.held_compaction("compact").await;
    let pids = processes(&pod);
    cluster(&["kill", "kubelet"]);
    world.go_on();
    wait_for_ends(pids);
    cluster(&["up"]);
    world.succeeded("compact");
    let pods = world.pods_of("compact");
    assert_eq!(pods.len(), 1, "{pods:#?}");
    assert_eq!(name(&pods[0]), name(&pod));
    world.is_compacted().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_restarts_in_the_midst_of_a_job() {
    let world = ClusterNamespace::new("apiserver").await;
    world.apply_policy(json!({}));
    let pod = world.held_compaction("compact").await;
    cluster(&["kill", "apiserver"]);
    world.go_on();
    // Time in which the Pod ends unobserved.
    std::thread::sleep(Duration::from_secs(5));
    cluster(&["up"]);
    world.succeeded("compact");
    let pods = world.pods_of("compact");
    assert_eq!((pods.len(), name(&pods[0])), (1, name(&pod)), "{pods:#?}");
    world.is_compacted().await;
}

/// Another controller takes over what the killed one has begun, and what it has not seen.
#[tokio::test(flavor = "multi_thread")]
async fn the_controller_is_killed() {
    let world = ClusterNamespace::new("controller").await;
    world.apply_policy(json!({}));
    let kill = || {
        for pod in controller_pods() {
            kubectl(&[
                "-n",
                SYSTEM,
                "delete",
                "pod",
                name(&pod),
                "--force",
                "--grace-period=0",
            ]);
        }
    };
    // While a Job runs.
    let pod = world.held_compaction("compact").await;
    kill();
    world.go_on();
    world.succeeded("compact");
    let pods = world.pods_of("compact");
    assert_eq!((pods.len(), name(&pods[0])), (1, name(&pod)), "{pods:#?}");
    world.is_compacted().await;
    // As soon as there is something to do; this time by killing its process.
    world.etcd.write(3000, 50).await;
    world.task(
        "delta",
        "OnDemandSnapshot",
        json!({"onDemandSnapshot": {"type": "delta"}}),
    );
    for pod in controller_pods() {
        processes(&pod)
            .into_iter()
            .for_each(|pid| end(pid, Signal::KILL));
    }
    world.succeeded("delta");
    let jobs = world
        .get(&["jobs", "-l", "deltafold.io/task=delta"])
        .unwrap();
    assert_eq!(jobs["items"].as_array().unwrap().len(), 1, "{jobs:#}");
    controller_is_there();
}

// --- Secrets, privileges, the kubectl plugin ---

/// A Job uses the Secret's content at its start; a wrong one is reported, without a crash loop.
#[tokio::test(flavor = "multi_thread")]
async fn a_secret_is_rotated() {
    let mut world = ClusterNamespace::new("rotated").await;
    world.apply_policy(json!({}));
    world.snapshot("full", "full");
    let secret = world.get(&["secret", "store"]).unwrap();
    assert_eq!(secret["metadata"]["finalizers"], Value::Null, "{secret:#}");

    world.minio.rotate("another-secret-key");
    world.etcd.write(1000, 50).await;
    let delta = json!({"onDemandSnapshot": {"type": "delta"}});
    world.task("with-the-old-one", "OnDemandSnapshot", delta.clone());
    let task = world.ended("with-the-old-one");
    assert_eq!(task["status"]["state"], "Failed", "{task:#}");
    assert_eq!(
        task["status"]["lastErrors"][0]["code"], "PermissionDenied",
        "{task:#}"
    );
    assert_eq!(
        world.pods_of("with-the-old-one").len(),
        1,
        "tried again in vain"
    );

    let patch = json!({"stringData": {"secretAccessKey": "another-secret-key"}}).to_string();
    world.kubectl(&["patch", "secret", "store", "-p", &patch]);
    world.task("with-the-new-one", "OnDemandSnapshot", delta);
    world.succeeded("with-the-new-one");
}

/// Returns the kernel's status of a process.
fn status_of(pid: u32) -> BTreeMap<String, String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let fields = status.lines().filter_map(|line| line.split_once(":\t"));
    fields
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// Asserts that a Pod's processes run as an unprivileged user without capabilities, and can write only to their
/// volumes.
fn is_confined(pod: &Value) {
    let pids = processes(pod);
    assert!(!pids.is_empty(), "{pod:#}");
    for pid in pids {
        let status = status_of(pid);
        let ids = [USER; 4].map(|id| id.to_string()).join("\t");
        assert_eq!((&status["Uid"], &status["Gid"]), (&ids, &ids), "{pod:#}");
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(status[set], "0000000000000000", "{set}: {pod:#}");
        }
        assert_eq!(
            (&*status["NoNewPrivs"], &*status["Seccomp"]),
            ("1", "2"),
            "{pod:#}"
        );
        let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap();
        let root = mounts
            .lines()
            .map(|l| l.split(' ').collect::<Vec<_>>())
            .find(|f| f[4] == "/");
        let options = root.expect("a root")[5];
        assert!(options.split(',').any(|o| o == "ro"), "{options}: {pod:#}");
    }
}

/// According to the kernel, not only to the Pod's spec.
#[tokio::test(flavor = "multi_thread")]
async fn pods_are_confined() {
    let world = ClusterNamespace::new("confined").await;
    world.apply_policy(json!({"snapshot": {"follow": {"deltaPeriod": "1s"}}}));
    for pod in controller_pods() {
        is_confined(&pod);
    }
    let follower = wait("a follower", || {
        let pods = world.get(&["pods", "-l", "deltafold.io/work=follow"])?;
        let pod = pods["items"][0].clone();
        (!pod["status"]["containerStatuses"][0]["state"]["running"].is_null()).then_some(pod)
    });
    is_confined(&follower);
    wait("a first full", || {
        let full = &world.policy()["status"]["snapshots"]["lastFull"];
        full["endRevision"].is_i64().then_some(())
    });
    // The follower works: a delta is saved within moments.
    world.etcd.write(1000, 200).await;
    let newest = world.etcd.revision().await;
    wait("a delta", || {
        let delta = &world.policy()["status"]["snapshots"]["lastDelta"];
        (delta["endRevision"] == newest).then_some(())
    });
    // A Job as well, whose store secret is visible nowhere else.
    world.minio.signal(Signal::STOP);
    world.task("compact", "OnDemandCompaction", Value::Null);
    let pod = world.running_pod("compact");
    is_confined(&pod);
    for pid in processes(&pod) {
        for file in ["cmdline", "environ"] {
            let text = text(&fs::read(format!("/proc/{pid}/{file}")).unwrap());
            assert!(!text.contains(world.minio.secret_key()), "{file}: {text}");
        }
    }
    world.go_on();
    world.succeeded("compact");
}

/// Starts a DNS server that responds to every query with one address. It ends with the test.
fn name_server(address: Ipv4Addr) {
    let socket = UdpSocket::bind((address, 53)).expect("port 53 of the bridge");
    std::thread::spawn(move || {
        let mut query = [0; 512];
        while let Ok((length, from)) = socket.recv_from(&mut query) {
            let question = &query[12..length];
            let name = question.iter().position(|&b| b == 0).unwrap() + 1;
            let is_a = question[name..name + 2] == [0, 1];
            let mut answer = query[..2].to_vec();
            // No error, one question, one record or none.
            answer.extend([0x81, 0x80, 0, 1, 0, u8::from(is_a), 0, 0, 0, 0]);
            answer.extend(&question[..name + 4]);
            if is_a {
                // The name of the question; A, IN, 60 seconds, four bytes.
                answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
                answer.extend(address.octets());
            }
            let _ = socket.send_to(&answer, from);
        }
    });
}

/// The program is static and the image contains nothing else: it resolves names all the same.
#[tokio::test(flavor = "multi_thread")]
async fn the_image_resolves_names() {
    let world = ClusterNamespace::new("names").await;
    name_server(host().parse().unwrap());
    let port = world
        .minio
        .endpoint()
        .rsplit_once(':')
        .unwrap()
        .1
        .to_owned();
    let endpoint = format!("http://minio.storage.test:{port}");
    let mut env = world.minio.env();
    env.retain(|(name, _)| name != "AWS_ENDPOINT_URL");
    env.push(("AWS_ENDPOINT_URL".to_owned(), endpoint));
    let env: Vec<Value> = env
        .iter()
        .map(|(k, v)| json!({"name": k, "value": v}))
        .collect();
    let store = format!("s3://{BUCKET}/names");
    let pod = |name: &str, how: Value| {
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "namespace": world.namespace},
            "spec": {
                "restartPolicy": "Never",
                "containers": [{
                    "name": "deltafold", "image": setting("IN_CLUSTER_IMAGE"), "imagePullPolicy": "Never",
                    "args": ["store", "check", "--store", store], "env": env,
                }],
            },
        });
        let how = how.as_object().unwrap().clone();
        pod["spec"].as_object_mut().unwrap().extend(how);
        pod
    };
    apply_all(&[
        pod(
            "by-dns",
            json!({"dnsPolicy": "None", "dnsConfig": {"nameservers": [host()]}}),
        ),
        pod(
            "by-hosts",
            json!({"hostAliases": [{"ip": host(), "hostnames": ["minio.storage.test"]}]}),
        ),
    ]);
    for name in ["by-dns", "by-hosts"] {
        let pod = wait("the end of a Pod", || {
            let pod = world.get(&["pod", name])?;
            let phase = pod["status"]["phase"].as_str()?;
            ["Succeeded", "Failed"].contains(&phase).then_some(pod)
        });
        assert_eq!(
            pod["status"]["phase"], "Succeeded",
            "{name}: {:#}",
            pod["status"]
        );
    }
}

/// `kubectl deltafold`, with a link of that name to the program on the PATH.
#[tokio::test(flavor = "multi_thread")]
async fn the_program_is_a_plugin_of_kubectl() {
    let world = ClusterNamespace::new("plugin").await;
    world.apply_policy(json!({}));
    let bin = world.folder.path().join("bin");
    fs::create_dir(&bin).unwrap();
    symlink(
        env!("CARGO_BIN_EXE_deltafold"),
        bin.join("kubectl-deltafold"),
    )
    .unwrap();
    let path = format!("{}:{}", bin.display(), env::var("PATH").unwrap());
    let plugin = |args: &[&str]| {
        let mut command = Command::new("kubectl");
        tools::forget_env(&mut command, &["DELTAFOLD_"]);
        command.arg("deltafold").args(args).env("PATH", &path);
        let output = command
            .args(["--namespace", &world.namespace])
            .output()
            .unwrap();
        let err = text(&output.stderr);
        assert!(output.status.success(), "{args:?}: {err}");
        text(&output.stdout)
    };
    plugin(&[
        "task",
        "create",
        "snapshot",
        "--policy",
        POLICY,
        "--task-name",
        "first",
    ]);
    plugin(&["task", "wait", "first"]);
    world.succeeded("first");
    assert!(plugin(&["task", "list"]).contains("first"));
    assert!(plugin(&["task", "logs", "first"]).contains("Full-"));
    assert!(plugin(&["policy", "status", POLICY]).contains("Full-"));
}

// --- docs/quorum-loss.md ---

/// Starts three members of a StatefulSet, with the names of the page but without DNS.
fn members(world: &ClusterNamespace) -> Vec<Etcd> {
    let names: Vec<String> = (0..3).map(|n| format!("etcd-{n}")).collect();
    let mut aliases = Vec::new();
    let mut members = Vec::new();
    for name in &names {
        apply_all(&[json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {"name": name, "namespace": world.namespace},
            "spec": {
                "selector": {"statefulset.kubernetes.io/pod-name": name},
                "ports": [{"name": "client", "port": 2379}, {"name": "peer", "port": 2380}],
            },
        })]);
        let service = world.get(&["service", name]).unwrap();
        let address = service["spec"]["clusterIP"].as_str().unwrap();
        aliases.push(json!({"ip": address, "hostnames": [format!("{name}.etcd")]}));
        members.push(Etcd {
            endpoint: format!("http://{address}:2379"),
            certs: None,
        });
        world.claim(&format!("data-{name}"));
    }
    let all: Vec<String> = names
        .iter()
        .map(|n| format!("{n}=http://{n}.etcd:2380"))
        .collect();
    let args = [
        "--data-dir=/data/default.etcd",
        "--name=$(POD)",
        "--initial-advertise-peer-urls=http://$(POD).etcd:2380",
        "--listen-peer-urls=http://0.0.0.0:2380",
        "--listen-client-urls=http://0.0.0.0:2379",
        "--advertise-client-urls=http://$(ADDRESS):2379",
        &format!("--initial-cluster={}", all.join(",")),
        "--unsafe-no-fsync",
    ];
    let pod = etcd_pod(&world.namespace, "member", &args, json!([]));
    let mut template =
        json!({"metadata": {"labels": pod["metadata"]["labels"]}, "spec": pod["spec"]});
    template["spec"]["hostAliases"] = json!(aliases);
    let container = &mut template["spec"]["containers"][0];
    container["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    container["env"] = json!([
        field("POD", "metadata.name"),
        field("ADDRESS", "status.podIP")
    ]);
    apply_all(&[json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet",
        "metadata": {"name": "etcd", "namespace": world.namespace},
        "spec": {
            "serviceName": "etcd", "replicas": 3, "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": pod["metadata"]["labels"]},
            "template": template,
            "volumeClaimTemplates": [{
                "metadata": {"name": "data"},
                "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
            }],
        },
    })]);
    members
}

/// Two of three members are lost for good, and the page's commands make a new cluster from the backup.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_quorum_is_recovered_as_the_page_says() {
    let world = ClusterNamespace::new("quorum").await;
    let policy = "etcd-main";
    let etcd = members(&world);
    let delta = json!({"onDemandSnapshot": {"type": "delta"}});
    etcd[0].write(0, 50).await;
    world.apply_policy_of(policy, &etcd.iter().collect::<Vec<_>>(), json!({}));
    let full = json!({"onDemandSnapshot": {"type": "full"}});
    world.task_of(policy, "full", "OnDemandSnapshot", full);
    world.succeeded("full");
    etcd[0].write(100, 50).await;
    world.task_of(policy, "delta", "OnDemandSnapshot", delta.clone());
    world.succeeded("delta");
    let (wanted, newest) = (etcd[0].content().await, etcd[0].revision().await);

    // The loss. A task that needs a quorum is refused.
    world.kubectl(&["scale", "statefulset", "etcd", "--replicas", "1"]);
    for lost in ["etcd-1", "etcd-2"] {
        wait("the end of a member", || {
            world.get(&["pod", lost]).is_none().then_some(())
        });
        fs::remove_dir_all(world.volume(&format!("data-{lost}")).join("default.etcd")).unwrap();
    }
    world.task_of(policy, "too-late", "OnDemandSnapshot", delta);
    let task = world.ended("too-late");
    assert_ne!(task["status"]["state"], "Succeeded", "{task:#}");
    assert_eq!(
        task["status"]["lastErrors"][0]["code"], "NoQuorum",
        "{task:#}"
    );

    // The commands of the page, in a context of this namespace.
    let config = world.folder.path().join("kubeconfig");
    fs::copy(setting("KUBECONFIG"), &config).unwrap();
    let shell = |script: &str| {
        let mut command = Command::new("bash");
        command
            .args(["-euo", "pipefail", "-c", script])
            .env("KUBECONFIG", &config);
        let output = command.stdin(Stdio::null()).output().unwrap();
        let said = text(&[output.stdout, output.stderr].concat());
        println!("{script}\n-- {said}");
        assert!(output.status.success(), "{script}\n{said}");
    };
    shell(&format!(
        "kubectl config set-context --current --namespace {}",
        world.namespace
    ));
    let blocks = doc_commands::blocks("quorum-loss.md").into_iter();
    let blocks: Vec<_> = blocks.filter(|b| b.heading == "By tasks").collect();
    assert_eq!(blocks.len(), 4);
    for (at, block) in blocks.iter().enumerate() {
        assert_eq!(block.place, "By kubectl");
        shell(&block.lines.join("\n"));
        if at == 0 {
            // "In those of survivors, rename the data directory."
            let data = world.volume("data-etcd-0").join("default.etcd");
            fs::rename(&data, data.with_file_name("before.etcd")).unwrap();
        }
    }

    // One cluster, with everything that was saved, beyond all revisions that clients have seen; and it is
    // backed up.
    let bumped = newest + 1_000_000_000;
    let values = |content: &Content| -> Vec<(Vec<u8>, Vec<u8>)> {
        content
            .iter()
            .map(|(k, v)| (k.clone(), v.0.clone()))
            .collect()
    };
    for member in &etcd {
        assert_eq!(values(&member.content().await), values(&wanted));
        assert_eq!(member.revision().await, bumped);
    }
    assert_eq!(world.fulls().last(), Some(&bumped));
    let policy = world.get(&["etcdbackuppolicy", policy]).unwrap();
    assert_eq!(policy["spec"]["suspend"], false, "{policy:#}");
}
