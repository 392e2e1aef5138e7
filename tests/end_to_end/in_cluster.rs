//! Everything on a real Kubernetes with kubelet and containerd, which `tests/end-to-end` starts: applied
//! objects become Pods, and the Pods do their work, whatever is killed meanwhile.
//!
//! Plain `cargo test` does not run this module: without the cluster it fails.

use crate::support::cluster_namespace::{
    BUCKET, ClusterNamespace, Content, Etcd, POLICY, SYSTEM, USER, apply_all, cluster,
    controller_is_there, controller_pods, end, etcd_pod, host, kubectl, last_word, name, processes,
    setting, text, wait,
};
use crate::support::doc_commands;
use crate::support::etcd::Signal;
use crate::support::tools;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The event threshold of the policy.
const EVENTS: usize = 3000;

// --- a policy and its tasks ---

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

/// A scheduled verification restores the backup and starts the etcd of another image on it.
#[tokio::test(flavor = "multi_thread")]
async fn a_verification_drills_with_the_etcd_of_another_image() {
    let world = ClusterNamespace::new("drill").await;
    // The backup is there before the first verification.
    let compaction = json!({"enabled": false});
    world.apply_policy(json!({"compaction": compaction}));
    world.snapshot("full", "full");
    world.apply_policy(json!({
        "verify": {
            "schedule": "* * * * *",
            "againstCluster": true,
            "drill": {"etcdImage": setting("IN_CLUSTER_ETCD_IMAGE")},
        },
        "compaction": compaction,
    }));
    let verified = || {
        let policy = world.policy();
        (policy["status"]["lastVerification"]["state"] == "Succeeded").then_some(policy)
    };
    wait("a verification", verified);
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
    symlink(crate::support::program(), bin.join("kubectl-deltafold")).unwrap();
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
        "--wait",
    ]);
    world.succeeded("first");
    let selector = ["--selector", "deltafold.io/task=first", "--tail", "-1"];
    let logs = world.kubectl(&[&["logs"], &selector[..]].concat());
    assert!(logs.contains("Full-"), "{logs}");
}

// --- docs/quorum-loss.md ---

/// Starts three members of a StatefulSet, with the names of the page but without DNS.
pub fn members(world: &ClusterNamespace) -> Vec<Etcd> {
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
