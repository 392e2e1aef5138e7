//! Everything on a real Kubernetes with kubelet and containerd, which `tests/end-to-end` starts: applied
//! objects become Pods, and the Pods do their work, whatever is killed meanwhile.
//!
//! Plain `cargo test` does not run this module: without the cluster it fails.

use crate::support::cluster_namespace::{
    BUCKET, ClusterNamespace, Content, Etcd, POLICY, SYSTEM, USER, cluster, controller_is_there,
    end, etcd_pod, host, kubectl, last_word, processes, service, setting, text,
};
use crate::support::etcd::Signal;
use crate::support::http_client;
use crate::support::manifests;
use crate::support::namespace::{POLICIES, TASKS, has_ended, name};
use crate::support::pages;
use crate::support::tools;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, UdpSocket};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The event threshold of the policy.
const EVENTS: usize = 3000;

// --- a policy and its tasks ---

/// One `kubectl apply` of a policy: the etcd is backed up by schedule and compacted when a threshold is
/// crossed. A task restores it into a volume, and a real etcd serves the result.
#[tokio::test(flavor = "multi_thread")]
async fn a_policy_backs_an_etcd_up_and_a_task_restores_it() {
    let world = ClusterNamespace::new("story").await;
    world
        .apply_policy(json!({
            "snapshot": {"deltaSchedule": "* * * * *"},
            "compaction": {"eventsThreshold": EVENTS},
        }))
        .await;

    // Snapshots appear. The first is a full, because there is none.
    let is_told =
        |policy: &Value| policy["status"]["snapshots"]["lastFull"]["endRevision"].is_i64();
    let wanted = "the first full snapshot is told";
    let policy = world.wait_policy(POLICY, wanted, is_told).await;
    let first = world.etcd.revision().await;
    assert_eq!(
        policy["status"]["snapshots"]["lastFull"]["endRevision"], first,
        "{policy:#}"
    );
    assert_eq!(world.fulls(), [first]);

    // When everything written now is saved, the threshold is crossed and a compaction runs.
    world.etcd.write(1000, EVENTS).await;
    let newest = world.etcd.revision().await;
    let is_compacted = |policy: &Value| {
        let state = &policy["status"]["lastCompaction"]["state"];
        assert_ne!(state, "Failed", "{policy:#}");
        state == "Succeeded"
    };
    let policy = world.wait_policy(POLICY, "it is compacted", is_compacted);
    let policy = policy.await;
    let last = &policy["status"]["lastCompaction"];
    assert_eq!(last["trigger"], "EventsThreshold", "{policy:#}");
    let job = last["jobName"].as_str().unwrap();
    let pods = world.list("pods", &format!("job-name={job}")).await;
    let [pod] = &pods[..] else {
        panic!("{pods:#?}")
    };
    let word = last_word(pod);
    assert_eq!(word["status"], "Succeeded", "{word:#}");
    assert_eq!(world.fulls(), [first, newest]);

    // The full's HashKV, computed here by deltafold, is etcd's own.
    let of_source = world.etcd.compacted_hash(newest).await;
    assert_eq!(world.hash_of_store(newest), of_source);
    let jobs = world.list("jobs", "deltafold.io/work=compaction").await;
    assert_eq!(jobs.len(), 1, "{jobs:#?}");

    // A task restores it into a volume.
    world.claim("restored").await;
    let config = json!({"restore": {"claimName": "restored", "revision": newest}});
    world.task("restore", POLICY, "Restore", config).await;
    world.wait_task("restore", "Succeeded").await;
    let [pod] = &world.pods_of("restore").await[..] else {
        panic!("not one Pod")
    };
    assert_eq!(last_word(pod)["status"], "Succeeded");
    let served = world.etcd_on("restored", "default.etcd").await;
    assert_eq!(served.content().await, world.etcd.content().await);
    assert_eq!(served.revision().await, newest);
    served.write(9000, 3).await;
    assert_eq!(served.revision().await, newest + 3);
}

/// A scheduled verification restores the backup and starts the etcd of another image on it.
#[tokio::test(flavor = "multi_thread")]
async fn a_verification_drills_with_the_etcd_of_another_image() {
    let world = ClusterNamespace::new("drill").await;
    // The backup is there before the first verification.
    let compaction = json!({"enabled": false});
    world.apply_policy(json!({"compaction": compaction})).await;
    world.snapshot(POLICY, "full", "full").await;
    world
        .apply_policy(json!({
            "verify": {
                "schedule": "* * * * *",
                "againstCluster": true,
                "drill": {"etcdImage": setting("IN_CLUSTER_ETCD_IMAGE")},
            },
            "compaction": compaction,
        }))
        .await;
    let is_verified = |policy: &Value| policy["status"]["lastVerification"]["state"] == "Succeeded";
    world
        .wait_policy(POLICY, "it is verified", is_verified)
        .await;
    let (code, status, said) = world.deltafold(&["status"]);
    assert_eq!(code, 0, "{said}");
    let verifications = status["verifications"].as_array().unwrap();
    let fold = verifications.iter().find(|v| v["level"] == "fold").unwrap();
    assert_eq!(fold["drill_succeeded"], true, "{status:#}");
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

/// Waits until the processes of a Pod have ended.
async fn wait_for_ends(world: &ClusterNamespace, pids: Vec<u32>) {
    for pid in pids {
        let process = PathBuf::from(format!("/proc/{pid}"));
        let ended = async || (!process.exists()).then_some(());
        world.wait("the end of the Pod's process", ended).await;
    }
}

/// A Pod that ends in the middle of its work is replaced by another one, which does it.
async fn a_pod_ends(namespace: &str, how: End) {
    let world = ClusterNamespace::new(namespace).await;
    world.apply_policy(json!({})).await;
    let pod = world.held_compaction("compact").await;
    match how {
        End::Deleted => {
            let pids = processes(&pod);
            world.kubectl(&["delete", "pod", name(&pod), "--wait=false"]);
            // If the store came back too soon, the Pod would finish before it is told to end.
            wait_for_ends(&world, pids).await;
        }
        End::Forgotten => {
            drop(world.kubectl(&["delete", "pod", name(&pod), "--force", "--grace-period=0"]))
        }
        End::Killed => processes(&pod)
            .into_iter()
            .for_each(|pid| end(pid, Signal::KILL)),
    }
    world.go_on();
    world.wait_task("compact", "Succeeded").await;
    let others = world.pods_of("compact").await;
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
    world.apply_policy(json!({})).await;
    let pod = world.held_compaction("compact").await;
    let pids = processes(&pod);
    cluster(&["kill", "kubelet"]);
    world.go_on();
    wait_for_ends(&world, pids).await;
    cluster(&["up"]);
    world.is_done_by("compact", &pod).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_restarts_in_the_midst_of_a_job() {
    let world = ClusterNamespace::new("apiserver").await;
    world.apply_policy(json!({})).await;
    let pod = world.held_compaction("compact").await;
    cluster(&["kill", "apiserver"]);
    world.go_on();
    // Time in which the Pod ends unobserved.
    std::thread::sleep(Duration::from_secs(5));
    cluster(&["up"]);
    world.is_done_by("compact", &pod).await;
}

/// Returns the Pods of the controller.
async fn controller_pods(world: &ClusterNamespace) -> Vec<Value> {
    let component = "app.kubernetes.io/component=controller";
    let pods = world.system.list("pods", component).await;
    assert!(!pods.is_empty(), "no Pod of the controller");
    pods
}

/// Another controller takes over what the killed one has begun, and what it has not seen.
#[tokio::test(flavor = "multi_thread")]
async fn the_controller_is_killed() {
    let world = ClusterNamespace::new("controller").await;
    world.apply_policy(json!({})).await;
    let kill = async || {
        for pod in controller_pods(&world).await {
            let delete = ["delete", "pod", name(&pod), "--force", "--grace-period=0"];
            kubectl(&[&["-n", SYSTEM], &delete[..]].concat());
        }
    };
    // While a Job runs.
    let pod = world.held_compaction("compact").await;
    kill().await;
    world.go_on();
    world.is_done_by("compact", &pod).await;
    // As soon as there is something to do; this time by killing its process.
    world.etcd.write(3000, 50).await;
    let delta = json!({"onDemandSnapshot": {"type": "delta"}});
    world.task("delta", POLICY, "OnDemandSnapshot", delta).await;
    for pod in controller_pods(&world).await {
        processes(&pod)
            .into_iter()
            .for_each(|pid| end(pid, Signal::KILL));
    }
    world.wait_task("delta", "Succeeded").await;
    let jobs = world.list("jobs", "deltafold.io/task=delta").await;
    assert_eq!(jobs.len(), 1, "{jobs:#?}");
    controller_is_there();
}

// --- Secrets, privileges, the kubectl plugin ---

/// A Job uses the Secret's content at its start; a wrong one is reported, without a crash loop.
#[tokio::test(flavor = "multi_thread")]
async fn a_secret_is_rotated() {
    let mut world = ClusterNamespace::new("rotated").await;
    world.apply_policy(json!({})).await;
    world.snapshot(POLICY, "full", "full").await;
    let secret = world.must_get("secrets", "store").await;
    assert_eq!(secret["metadata"]["finalizers"], Value::Null, "{secret:#}");

    world.minio.rotate("another-secret-key");
    world.etcd.write(1000, 50).await;
    let delta = json!({"onDemandSnapshot": {"type": "delta"}});
    let snapshot = "OnDemandSnapshot";
    world
        .task("with-the-old-one", POLICY, snapshot, delta.clone())
        .await;
    let task = world.wait_task("with-the-old-one", "Failed").await;
    assert_eq!(
        task["status"]["lastErrors"][0]["code"], "PermissionDenied",
        "{task:#}"
    );
    assert_eq!(
        world.pods_of("with-the-old-one").await.len(),
        1,
        "tried again in vain"
    );

    let patch = json!({"stringData": {"secretAccessKey": "another-secret-key"}});
    world.patch("secrets", "store", patch).await;
    world
        .task("with-the-new-one", POLICY, snapshot, delta)
        .await;
    world.wait_task("with-the-new-one", "Succeeded").await;
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
    world
        .apply_policy(json!({"snapshot": {"follow": {"deltaPeriod": "1s"}}}))
        .await;
    for pod in controller_pods(&world).await {
        is_confined(&pod);
    }
    is_confined(&world.running_pod("deltafold.io/work=follow").await);
    let is_full =
        |policy: &Value| policy["status"]["snapshots"]["lastFull"]["endRevision"].is_i64();
    world.wait_policy(POLICY, "it has a full", is_full).await;
    // The follower works: a delta is saved within moments.
    world.etcd.write(1000, 200).await;
    let newest = world.etcd.revision().await;
    let is_newest =
        |policy: &Value| policy["status"]["snapshots"]["lastDelta"]["endRevision"] == newest;
    world
        .wait_policy(POLICY, "a delta has it all", is_newest)
        .await;
    // A Job as well, whose store secret is visible nowhere else.
    world.minio.signal(Signal::STOP);
    let compaction = "OnDemandCompaction";
    world.task("compact", POLICY, compaction, Value::Null).await;
    let pod = world.running_pod("deltafold.io/task=compact").await;
    is_confined(&pod);
    for pid in processes(&pod) {
        for file in ["cmdline", "environ"] {
            let text = text(&fs::read(format!("/proc/{pid}/{file}")).unwrap());
            assert!(!text.contains(world.minio.secret_key()), "{file}: {text}");
        }
    }
    world.go_on();
    world.wait_task("compact", "Succeeded").await;
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
            "metadata": {"name": name},
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
    let dns = json!({"dnsPolicy": "None", "dnsConfig": {"nameservers": [host()]}});
    let hosts = json!({"hostAliases": [{"ip": host(), "hostnames": ["minio.storage.test"]}]});
    for (name, how) in [("by-dns", dns), ("by-hosts", hosts)] {
        world.create("pods", pod(name, how)).await;
        let has_ended = |pod: &Value| {
            let phase = pod["status"]["phase"].as_str();
            phase.is_some_and(|p| ["Succeeded", "Failed"].contains(&p))
        };
        let pod = world.wait_until("pods", name, "it has ended", has_ended);
        let pod = pod.await;
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
    world.apply_policy(json!({})).await;
    let bin = world.folder("bin");
    symlink(crate::support::program(), bin.join("kubectl-deltafold")).unwrap();
    let path = format!("{}:{}", bin.display(), env::var("PATH").unwrap());
    let plugin = |args: &[&str]| {
        let mut command = Command::new("kubectl");
        tools::forget_env(&mut command, &["DELTAFOLD_"]);
        command.arg("deltafold").args(args).env("PATH", &path);
        let output = command.args(["--namespace", &world.name]).output().unwrap();
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
        "--wait",
    ]);
    world.wait_task("first", "Succeeded").await;
    let selector = ["--selector", "deltafold.io/task=first", "--tail", "-1"];
    let logs = world.kubectl(&[&["logs"], &selector[..]].concat());
    assert!(logs.contains("Full-"), "{logs}");
}

// --- docs/guides/explore.md ---

/// Stops a program that would run until it is stopped.
struct Stopped(Child);

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The page of jobs/explore.yaml is reached by port-forward alone, with the address that exec shows and no log has.
#[tokio::test(flavor = "multi_thread")]
async fn the_page_runs_in_a_pod() {
    let world = ClusterNamespace::new("explore").await;
    world.apply_policy(json!({})).await;
    world.snapshot(POLICY, "first", "full").await;
    let keys = json!({
        "AWS_ACCESS_KEY_ID": world.minio.access_key(), "AWS_SECRET_ACCESS_KEY": world.minio.secret_key(),
    });
    let secret = json!({"metadata": {"name": "deltafold-s3"}, "stringData": keys});
    world.create("secrets", secret).await;
    let manifest = fs::read_to_string(manifests::path("jobs/explore.yaml")).unwrap();
    let mut deployment = manifests::documents(&manifest).remove(0);
    let container = &mut deployment["spec"]["template"]["spec"]["containers"][0];
    container["image"] = json!(setting("IN_CLUSTER_IMAGE"));
    container["imagePullPolicy"] = json!("Never");
    let mut env = world.minio.env();
    env.push(("DELTAFOLD_STORE".into(), format!("s3://{BUCKET}/main")));
    env.push(("DELTAFOLD_ADDRESS_FILE".into(), "/scratch/address".into()));
    env.retain(|(name, _)| !name.contains("_KEY"));
    let env = env
        .iter()
        .map(|(name, value)| json!({"name": name, "value": value}));
    container["env"] = env.collect();
    let file = world.folder("explore").join("explore.json");
    fs::write(&file, deployment.to_string()).unwrap();
    world.kubectl(&["apply", "-f", file.to_str().unwrap()]);
    let pod = "deployment/deltafold-explore";
    world.kubectl(&["rollout", "status", pod, "--timeout=180s"]);
    let show = ["exec", pod, "--", "deltafold", "explore", "--show-address"];
    let shown = world.kubectl(&show);
    let (_, token) = shown.split_once("#token=").unwrap();
    let token = token.split_whitespace().next().unwrap();
    assert!(!world.kubectl(&["logs", pod]).contains(token));
    let forward = Command::new("kubectl")
        .args(["-n", &world.name, "port-forward", pod, ":8080"])
        .stdout(Stdio::piped())
        .spawn();
    let mut forward = Stopped(forward.unwrap());
    let mut line = String::new();
    let mut out = BufReader::new(forward.0.stdout.take().unwrap());
    out.read_line(&mut line).unwrap();
    let port = line.split(' ').nth(2).and_then(|at| at.rsplit_once(':'));
    let url = format!("http://127.0.0.1:{}/api/backup", port.unwrap().1);
    let client = http_client().build().unwrap();
    let refused = client.get(&url).send().await.unwrap();
    assert_eq!(refused.status().as_u16(), 401);
    let answer = client.get(&url).bearer_auth(token).send().await.unwrap();
    let backup: Value = serde_json::from_str(&answer.text().await.unwrap()).unwrap();
    assert_eq!(backup["name"], format!("s3://{BUCKET}/main"));
}

// --- docs/quorum-loss.md ---

/// Starts three members of a StatefulSet, with the names of the page but without DNS.
async fn members(world: &ClusterNamespace) -> Vec<Etcd> {
    let names: Vec<String> = (0..3).map(|n| format!("etcd-{n}")).collect();
    let mut aliases = Vec::new();
    let mut members = Vec::new();
    for name in &names {
        let selector = json!({"statefulset.kubernetes.io/pod-name": name});
        let ports = json!([{"name": "client", "port": 2379}, {"name": "peer", "port": 2380}]);
        let address = service(world, name, selector, ports).await;
        aliases.push(json!({"ip": address, "hostnames": [format!("{name}.etcd")]}));
        members.push(Etcd {
            endpoint: format!("http://{address}:2379"),
            certs: None,
        });
        world.claim(&format!("data-{name}")).await;
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
    let pod = etcd_pod("member", &args, json!([]));
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
    let set = json!({
        "metadata": {"name": "etcd"},
        "spec": {
            "serviceName": "etcd", "replicas": 3, "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": pod["metadata"]["labels"]},
            "template": template,
            "volumeClaimTemplates": [{
                "metadata": {"name": "data"},
                "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
            }],
        },
    });
    world.create("statefulsets", set).await;
    members
}

/// Two of three members are lost for good, and the page's commands make a new cluster from the backup.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_quorum_is_recovered_as_the_page_says() {
    let world = ClusterNamespace::new("quorum").await;
    let policy = "etcd-main";
    let etcd = members(&world).await;
    let delta = json!({"onDemandSnapshot": {"type": "delta"}});
    etcd[0].write(0, 50).await;
    let all: Vec<&Etcd> = etcd.iter().collect();
    world.apply_policy_of(policy, &all, json!({})).await;
    world.snapshot(policy, "full", "full").await;
    etcd[0].write(100, 50).await;
    world.snapshot(policy, "delta", "delta").await;
    let (wanted, newest) = (etcd[0].content().await, etcd[0].revision().await);

    // The loss. A task that needs a quorum is refused.
    world.kubectl(&["scale", "statefulset", "etcd", "--replicas", "1"]);
    for lost in ["etcd-1", "etcd-2"] {
        world.wait_until_gone("pods", lost).await;
        fs::remove_dir_all(world.volume(&format!("data-{lost}")).join("default.etcd")).unwrap();
    }
    world
        .task("too-late", policy, "OnDemandSnapshot", delta)
        .await;
    let task = world
        .wait_until(TASKS, "too-late", "it has ended", has_ended)
        .await;
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
        world.name
    ));
    let blocks = pages::placed("docs/quorum-loss.md").into_iter();
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
    let policy = world.must_get(POLICIES, policy).await;
    assert_eq!(policy["spec"]["suspend"], false, "{policy:#}");
}
