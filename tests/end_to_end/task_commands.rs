//! `deltafold task` and `deltafold policy` on a real API server. There is no controller: the tests play it.
//!
//! One file of more than 700 lines: all tests share one API server that knows the CRDs.

use crate::support::etcd::Etcd;
use crate::support::kube::{Apiserver, NOBODY, TOKEN};
use crate::support::schema::Schema;
use crate::support::scratch;
use crate::support::tools::EtcdVersion;
use crate::support::{deltafold, run_json};
use deltafold::controller::api::{EtcdBackupPolicy, EtcdBackupTask, crds};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub const SPACE: &str = "backup";
const PATIENCE: Duration = Duration::from_secs(60);

/// A real API server with our CRDs.
struct Cluster {
    server: Apiserver,
    client: Client,
    folder: TempDir,
    _etcd: Etcd,
}

impl Cluster {
    async fn start() -> Self {
        let cluster = Self::bare().await;
        let api: Api<k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition> =
            Api::all(cluster.client.clone());
        for crd in crds() {
            api.create(&PostParams::default(), &crd).await.unwrap();
        }
        let started = Instant::now();
        // Served as soon as they are established.
        while cluster.tasks().list(&ListParams::default()).await.is_err()
            || cluster
                .policies()
                .list(&ListParams::default())
                .await
                .is_err()
        {
            assert!(started.elapsed() < PATIENCE);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        cluster
    }

    /// An API server without our CRDs.
    async fn bare() -> Self {
        let folder = scratch::folder().unwrap();
        let etcd = Etcd::start(EtcdVersion::V3_6, &folder.path().join("etcd"));
        let server = Apiserver::start(&etcd).await;
        server.create_namespace(SPACE).await;
        let config = folder.path().join("admin");
        server.kubeconfig(&config, SPACE, TOKEN);
        let config = Kubeconfig::read_from(&config).unwrap();
        let options = KubeConfigOptions::default();
        let config = Config::from_custom_kubeconfig(config, &options).await;
        let client = Client::try_from(config.unwrap()).unwrap();
        Cluster {
            server,
            client,
            folder,
            _etcd: etcd,
        }
    }

    fn tasks(&self) -> Api<EtcdBackupTask> {
        Api::namespaced(self.client.clone(), SPACE)
    }

    fn policies(&self) -> Api<EtcdBackupPolicy> {
        Api::namespaced(self.client.clone(), SPACE)
    }

    async fn policy(&self, name: &str) {
        let policy = json!({
            "apiVersion": "deltafold.io/v1alpha1", "kind": "EtcdBackupPolicy",
            "metadata": {"name": name},
            "spec": {"store": {"url": "s3://backups/main"}, "etcd": {"endpoints": ["http://etcd:2379"]}},
        });
        let policy = serde_json::from_value(policy).unwrap();
        let params = PostParams::default();
        self.policies().create(&params, &policy).await.unwrap();
    }

    async fn task(&self, name: &str) {
        let task = json!({
            "apiVersion": "deltafold.io/v1alpha1", "kind": "EtcdBackupTask",
            "metadata": {"name": name},
            "spec": {"policy": "main", "type": "Verify"},
        });
        let task = serde_json::from_value(task).unwrap();
        let params = PostParams::default();
        self.tasks().create(&params, &task).await.unwrap();
    }

    /// Writes a status, as the controller would.
    async fn set(&self, name: &str, status: Value) {
        let patch = Patch::Merge(json!({"status": status}));
        let params = PatchParams::default();
        let patched = self.tasks().patch_status(name, &params, &patch).await;
        patched.unwrap();
    }

    /// Written once: other tests may be reading it.
    fn config(&self, token: &str) -> PathBuf {
        let file = self.folder.path().join(format!("config-{token}"));
        if !file.exists() {
            self.server.kubeconfig(&file, SPACE, token);
        }
        file
    }

    fn command(&self, args: &[&str]) -> Command {
        command(&self.config(TOKEN), args)
    }

    /// Returns the exit code, standard output and standard error.
    fn run(&self, args: &[&str]) -> (i32, String, String) {
        run(&mut self.command(args))
    }

    fn json(&self, args: &[&str]) -> (i32, Value, String) {
        run_json(self.command(args).args(["--output", "json"]))
    }

    /// Starts `task wait`.
    fn wait(&self, args: &[&str]) -> Child {
        let mut command = self.command(&[&["task", "wait"], args].concat());
        let command = command.args(["--output", "json"]).stdin(Stdio::null());
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }
}

pub fn command(config: &Path, args: &[&str]) -> Command {
    let mut command = deltafold();
    command.env("KUBECONFIG", config).args(args);
    // Text logs, even if the tests run in a Pod.
    command.env("DELTAFOLD_LOG_FORMAT", "text");
    command.env_remove("KUBERNETES_SERVICE_HOST");
    command
}

pub fn run(command: &mut Command) -> (i32, String, String) {
    let out = command.output().unwrap();
    let text = |b: Vec<u8>| String::from_utf8(b).unwrap();
    let code = out.status.code().unwrap();
    (code, text(out.stdout), text(out.stderr))
}

pub fn ended(child: Child) -> (i32, Value, String) {
    let out = child.wait_with_output().unwrap();
    let stdout = String::from_utf8(out.stdout).unwrap();
    let stderr = String::from_utf8(out.stderr).unwrap();
    let result = serde_json::from_str(&stdout).unwrap_or(Value::Null);
    (out.status.code().unwrap(), result, stderr)
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_of_each_type_are_created_as_asked_for() {
    let cluster = Cluster::start().await;
    cluster.policy("main").await;
    let schema = Schema::of("task");
    let table: [(&[&str], &str, Value); 9] = [
        (
            &["snapshot"],
            "OnDemandSnapshot",
            json!({"onDemandSnapshot": {"type": "full", "final": false, "takeOver": false}}),
        ),
        (
            &[
                "OnDemandSnapshot",
                "--type",
                "full",
                "--final",
                "--take-over",
            ],
            "OnDemandSnapshot",
            json!({"onDemandSnapshot": {"type": "full", "final": true, "takeOver": true}}),
        ),
        (&["compaction"], "OnDemandCompaction", Value::Null),
        (
            &["compaction", "--revision", "7", "--keep-history", "all"],
            "OnDemandCompaction",
            json!({"onDemandCompaction": {"revision": 7, "keepHistory": "all"}}),
        ),
        (
            &[
                "copy",
                "--to",
                "file:///copies",
                "--to-claim",
                "claim",
                "--from",
                "s3://old",
                "--from-secret",
                "s3",
                "--from-option",
                "region=x",
                "--max-backups",
                "2",
                "--max-backup-age",
                "9",
                "--wait-for-final",
                "--wait-timeout",
                "1h",
            ],
            "CopyBackups",
            json!({"copyBackups": {
                "sourceStore": {"url": "s3://old", "secretRef": {"name": "s3"}, "options": {"region": "x"}},
                "targetStore": {"url": "file:///copies", "volume": {"persistentVolumeClaim": "claim"}},
                "maxBackups": 2,
                "maxBackupAge": 9,
                "waitForFinalSnapshot": {"enabled": true, "timeout": "3600s"},
            }}),
        ),
        (
            &[
                "restore",
                "--claim",
                "data",
                "--sub-path",
                "a/b",
                "--time",
                "2026-11-20T12:00:00Z",
                "--name",
                "a",
                "--initial-cluster",
                "a=http://a:2380",
                "--initial-cluster-token",
                "t",
                "--initial-advertise-peer-urls",
                "http://a:2380",
                "--bump-revision",
                "9",
                "--mark-compacted",
                "--if-needed",
                "sanity",
                "--run-as-user",
                "1000",
            ],
            "Restore",
            json!({"restore": {
                "claimName": "data",
                "subPath": "a/b",
                "time": "2026-11-20T12:00:00Z",
                "name": "a",
                "initialCluster": "a=http://a:2380",
                "initialClusterToken": "t",
                "initialAdvertisePeerUrls": "http://a:2380",
                "bumpRevision": 9,
                "markCompacted": true,
                "ifNeeded": "sanity",
                "runAsUser": 1000,
            }}),
        ),
        (
            &["restore", "--claim", "data", "--revision", "41"],
            "Restore",
            json!({"restore": {"claimName": "data", "revision": 41, "markCompacted": false}}),
        ),
        (
            &["verify", "--level", "fold", "--against-cluster"],
            "Verify",
            json!({"verify": {"level": "fold", "againstCluster": true}}),
        ),
        (
            &["maintenance", "--compact-keep", "1h", "--defrag", "0.3"],
            "Maintenance",
            json!({"maintenance": {"compactKeep": "1h", "defrag": "0.3"}}),
        ),
    ];
    for (args, type_, config) in table {
        let args = [
            &["task", "create"],
            args,
            &["--policy", "main", "--ttl", "1h"],
        ]
        .concat();
        let (code, outcome, stderr) = cluster.json(&args);
        assert_eq!(code, 0, "{args:?}: {stderr}");
        schema.check(&outcome);
        assert_eq!(
            (&outcome["state"], &outcome["type"]),
            (&json!("Pending"), &json!(type_))
        );
        let name = outcome["name"].as_str().unwrap();
        assert!(name.starts_with("main-") && name.len() <= 52, "{name}");
        let there = cluster.tasks().get(name).await.unwrap();
        let spec = serde_json::to_value(&there.spec).unwrap();
        assert_eq!(spec["config"], config, "{args:?}");
        assert_eq!(spec["ttlSecondsAfterFinished"], 3600);
    }
    // The text output is only the name.
    let named = [
        "task",
        "create",
        "verify",
        "--policy",
        "main",
        "--task-name",
        "now",
    ];
    assert_eq!(cluster.run(&named), (0, "now\n".to_owned(), String::new()));
    let (code, result, _) = cluster.json(&named);
    assert_eq!((code, &result["reason"]), (73, &json!("TargetExists")));
    schema.check(&result);
    // A long policy name leaves room for the rest.
    cluster.policy(&"p".repeat(40)).await;
    let long = ["task", "create", "snapshot", "--policy", &"p".repeat(40)];
    let (code, name, stderr) = cluster.run(&long);
    assert_eq!(
        (code, name.trim().len() <= 52),
        (0, true),
        "{name} {stderr}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_is_told_by_exit_code() {
    let cluster = Cluster::start().await;
    cluster.policy("main").await;
    let schema = Schema::of("task");
    let nobody = cluster.config(NOBODY);
    let nowhere = cluster.folder.path().join("nowhere");
    let text = fs::read_to_string(cluster.config(TOKEN)).unwrap();
    let gone = text.replace(&cluster.server.url(), "https://127.0.0.1:1");
    fs::write(&nowhere, gone).unwrap();
    let config = cluster.config(TOKEN);
    let missing = cluster.folder.path().join("missing");
    let create =
        |type_: &[&'static str]| [&["task", "create"], type_, &["--policy", "main"]].concat();
    let table: [(&Path, Vec<&str>, i32, &str, &str); 11] = [
        (
            &config,
            vec!["task", "create", "verify", "--policy", "man"],
            64,
            "Usage",
            "no EtcdBackupPolicy man",
        ),
        (
            &config,
            create(&["maintenance", "--defrag", "2"]),
            64,
            "Usage",
            "defrag",
        ),
        (
            &config,
            create(&["copy", "--to", "b/p"]),
            64,
            "Usage",
            "give a URL such as",
        ),
        (
            &config,
            vec!["task", "wait", "none"],
            64,
            "Usage",
            "no EtcdBackupTask none",
        ),
        (
            &config,
            vec!["task", "logs", "none"],
            64,
            "Usage",
            "no EtcdBackupTask none",
        ),
        (
            &config,
            vec!["task", "logs", "none", "-f"],
            64,
            "Usage",
            "no EtcdBackupTask none",
        ),
        (
            &config,
            vec!["task", "list", "--context", "other"],
            78,
            "Configuration",
            "--context",
        ),
        (
            &missing,
            vec!["task", "list"],
            78,
            "Configuration",
            "KUBECONFIG",
        ),
        (
            &nobody,
            vec!["task", "list"],
            77,
            "PermissionDenied",
            "cannot list the tasks",
        ),
        (
            &nobody,
            vec!["task", "wait", "none"],
            77,
            "PermissionDenied",
            "cannot watch the task",
        ),
        (
            &nowhere,
            vec!["task", "list"],
            69,
            "KubernetesUnreachable",
            "127.0.0.1:1",
        ),
    ];
    for (config, args, code, reason, says) in table {
        let mut command = command(config, &args);
        let (got, result, stderr) = run_json(command.args(["--output", "json"]));
        assert_eq!(
            (got, &result["reason"]),
            (code, &json!(reason)),
            "{args:?}: {stderr}"
        );
        assert!(stderr.contains(says), "{args:?}: {stderr}");
        if args[1] != "logs" {
            schema.check(&result);
        }
    }
    // Wrong usage is detected without any server.
    for args in [
        &["task", "create", "verify"][..],
        &["task", "create", "copy", "--policy", "main"],
        &["task", "create", "maintenance", "--policy", "main"],
        &[
            "task",
            "create",
            "copy",
            "--policy",
            "main",
            "--to",
            "s3://x",
            "--from-secret",
            "y",
        ],
        &[
            "task",
            "create",
            "restore",
            "--policy",
            "main",
            "--claim",
            "c",
            "--bump-revision",
            "1",
        ],
        &["policy", "status", "main", "-A"],
    ] {
        assert_eq!(cluster.run(args).0, 64, "{args:?}");
    }
    let bare = Cluster::bare().await;
    let (code, _, stderr) = bare.run(&["policy", "status"]);
    assert!(
        code == 78 && stderr.contains("deltafold manifests crds"),
        "{stderr}"
    );
}

fn error(code: &str) -> Value {
    json!([{"code": code, "description": "it is so", "observedAt": "2026-11-20T12:00:00Z"}])
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_ends_with_the_task_and_with_its_exit_code() {
    let cluster = Cluster::start().await;
    let schema = Schema::of("task");
    let table = [
        ("Succeeded", None, 0),
        ("Failed", Some("NoSpace"), 74),
        ("Failed", Some("CorruptSnapshot"), 65),
        ("Failed", Some("DeadlineExceeded"), 143),
        ("Rejected", Some("DuplicateTask"), 75),
        ("Rejected", Some("PolicyNotFound"), 78),
    ];
    let mut waiting = Vec::new();
    for n in 0..table.len() {
        cluster.task(&format!("t{n}")).await;
        waiting.push(cluster.wait(&[&format!("t{n}")]));
    }
    for (n, (state, code, _)) in table.iter().enumerate() {
        let name = format!("t{n}");
        let operation = json!({"name": "Job", "state": "InProgress", "reason": "the Job runs",
            "lastTransitionTime": "2026-11-20T12:00:00Z"});
        let begun = json!({"state": "InProgress", "jobName": "job", "lastOperation": operation,
            "initiatedAt": "2026-11-20T12:00:00Z"});
        cluster.set(&name, begun).await;
        assert_eq!(waiting[n].try_wait().unwrap(), None, "{name}");
        let errors = code.map_or(json!([]), error);
        cluster
            .set(&name, json!({"state": state, "lastErrors": errors}))
            .await;
    }
    for (child, (state, error, code)) in waiting.into_iter().zip(table) {
        let (got, outcome, stderr) = ended(child);
        assert_eq!((got, &outcome["state"]), (code, &json!(state)), "{stderr}");
        schema.check(&outcome);
        assert_eq!(outcome["message"], "the Job runs");
        let told = stderr.contains("error: ");
        assert_eq!(told, error.is_some(), "{stderr}");
    }
    // A task that has ended is reported at once, as text, too.
    let (code, stdout, _) = cluster.run(&["task", "wait", "t1", "--timeout", "1m"]);
    assert_eq!(code, 74);
    assert!(
        stdout.starts_with("t1 Failed\n") && stdout.contains("[NoSpace]"),
        "{stdout}"
    );
    // It does not wait forever, nor for a deleted task.
    cluster.task("late").await;
    let (code, result, stderr) = cluster.json(&["task", "wait", "late", "--timeout", "200ms"]);
    assert_eq!(
        (code, &result["reason"]),
        (75, &json!("PartlyDone")),
        "{stderr}"
    );
    let (code, result, stderr) = cluster.json(&["task", "logs", "late"]);
    assert_eq!(
        (code, &result["reason"]),
        (75, &json!("Conflict")),
        "{stderr}"
    );
    let child = cluster.wait(&["late"]);
    // After it has seen the task; before that it would report that there is no such task.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let params = DeleteParams::default();
    cluster.tasks().delete("late", &params).await.unwrap();
    let (code, result, stderr) = ended(child);
    assert_eq!(
        (code, &result["reason"]),
        (75, &json!("Conflict")),
        "{stderr}"
    );
    assert!(stderr.contains("deleted"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn creating_and_waiting_is_one_command() {
    let cluster = Cluster::start().await;
    cluster.policy("main").await;
    let mut command = cluster.command(&[
        "task",
        "create",
        "verify",
        "--policy",
        "main",
        "--task-name",
        "now",
        "--wait",
        "--output",
        "json",
    ]);
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let started = Instant::now();
    while cluster.tasks().get_opt("now").await.unwrap().is_none() {
        assert!(started.elapsed() < PATIENCE);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    cluster
        .set(
            "now",
            json!({"state": "Failed", "lastErrors": error("BackupDiffers")}),
        )
        .await;
    let (code, outcome, stderr) = ended(child);
    assert_eq!(
        (code, &outcome["errors"][0]["code"]),
        (65, &json!("BackupDiffers")),
        "{stderr}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_are_listed_for_people_and_machines() {
    let cluster = Cluster::start().await;
    let schema = Schema::of("task");
    assert_eq!(cluster.run(&["task", "list"]).1, "no tasks\n");
    for name in ["first", "second"] {
        cluster.task(name).await;
    }
    cluster
        .set(
            "first",
            json!({"state": "Failed", "lastErrors": error("NoSpace")}),
        )
        .await;
    let (code, list, stderr) = cluster.json(&["task", "list"]);
    assert_eq!(code, 0, "{stderr}");
    schema.check(&list);
    let names = list["tasks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t["name"].as_str().unwrap());
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    assert_eq!(names, ["first", "second"]);
    let (_, text, _) = cluster.run(&["task", "list"]);
    let header: Vec<&str> = text.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(header, ["NAME", "POLICY", "TYPE", "STATE", "ERROR", "AGE"]);
    let row = text.lines().find(|l| l.starts_with("first")).unwrap();
    let row: Vec<&str> = row.split_whitespace().collect();
    assert_eq!(row[..5], ["first", "main", "Verify", "Failed", "NoSpace"]);
    let others = cluster.run(&["task", "list", "--policy", "other"]);
    assert_eq!(others.1, "no tasks\n");
    assert_eq!(
        cluster.run(&["task", "list", "-n", "default"]).1,
        "no tasks\n"
    );
    let (_, text, _) = cluster.run(&["task", "list", "-A", "-n", "default"]);
    assert!(text.contains("backup/first"), "{text}");
    // As kubectl finds plugins.
    let link = cluster.folder.path().join("kubectl-deltafold");
    std::os::unix::fs::symlink(crate::support::program(), &link).unwrap();
    let mut plugin = Command::new(&link);
    let plugin = plugin.env("KUBECONFIG", cluster.config(TOKEN));
    let (code, text, stderr) = run(plugin.args(["task", "list", "-n", SPACE]));
    assert!(code == 0 && text.contains("second"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn how_policies_are_is_told_for_people_and_machines() {
    let cluster = Cluster::start().await;
    let schema = Schema::of("policy");
    assert_eq!(cluster.run(&["policy", "status"]).1, "no policies\n");
    cluster.policy("main").await;
    cluster.policy("new").await;
    let ago = |minutes| {
        let at = chrono::Utc::now() - chrono::TimeDelta::minutes(minutes);
        at.to_rfc3339_opts(chrono::SecondsFormat::Secs, true)
    };
    let condition = |type_: &str, status: &str, reason: &str| {
        json!({"type": type_, "status": status, "reason": reason, "message": format!("of {type_}"),
            "lastTransitionTime": ago(150)})
    };
    let status = json!({
        "observedGeneration": 1,
        "conditions": [
            condition("Ready", "True", "Applied"),
            condition("BackupReady", "False", "Late"),
            condition("BackupVerified", "Unknown", "Never"),
            condition("CompactionHealthy", "True", "Succeeded"),
        ],
        "snapshots": {
            "lastFull": {"name": "Full-1", "endRevision": 100, "time": ago(1441), "size": 1_048_576},
            "lastDelta": {"name": "Incr-2", "startRevision": 101, "endRevision": 222, "time": ago(3)},
            "accumulatedDeltaSize": 2048,
            "accumulatedDeltaEvents": 122,
        },
        "restorableWindow": {"firstRevision": 7, "lastRevision": 222,
            "firstTime": "2026-11-20T12:00:00Z", "lastTime": "2026-11-21T12:30:00Z"},
        "lastCompaction": {"jobName": "main-compact-1", "trigger": "EventsThreshold", "fullRevision": 7,
            "deltaRevision": 100, "state": "Failed", "reason": "NoSpace", "message": "full",
            "completionTime": ago(60)},
        "lastVerification": {"state": "Succeeded", "completionTime": ago(120), "revision": 200},
        "activeJobs": ["main-full-1"],
    });
    let patch = Patch::Merge(json!({"status": status}));
    let params = PatchParams::default();
    let patched = cluster
        .policies()
        .patch_status("main", &params, &patch)
        .await;
    patched.unwrap();
    let (code, all, stderr) = cluster.json(&["policy", "status"]);
    assert_eq!(code, 0, "{stderr}");
    schema.check(&all);
    assert_eq!(all["policies"][0]["name"], "main");
    let told = &all["policies"][0]["status"];
    assert_eq!(told["snapshots"]["accumulatedDeltaEvents"], 122);
    assert_eq!(told["conditions"][1]["reason"], "Late");
    let (_, text, _) = cluster.run(&["policy", "status"]);
    let rows: Vec<Vec<&str>> = text
        .lines()
        .map(|l| l.split_whitespace().collect())
        .collect();
    let shown = ["main", "True", "False", "Unknown", "True", "1d", "1m", "3m"];
    assert_eq!(rows[1][..8], shown, "{text}");
    assert!(rows[1].contains(&"122"), "{text}");
    let window = "2026-11-20 12:00:00Z to 2026-11-21 12:30:00Z";
    assert!(text.contains(window), "{text}");
    assert_eq!(rows[2][..2], ["new", "-"]);
    let (code, one, _) = cluster.json(&["policy", "status", "main"]);
    assert_eq!((code, one["policies"].as_array().unwrap().len()), (0, 1));
    let (_, text, _) = cluster.run(&["policy", "status", "main"]);
    for said in [
        "backup/main",
        "s3://backups/main",
        "BackupReady         False for 2h 30m [Late]: of BackupReady",
        "last full           Full-1, to revision 100, 1.00 MiB, 1d 1m ago",
        "Incr-2, to revision 222, 3m",
        "122 events, 2.00 KiB",
        "revisions 7 to 222, 2026-11-20 12:00:00Z to 2026-11-21 12:30:00Z",
        "failed 1h",
        "[NoSpace]: full; EventsThreshold",
        "succeeded 2h",
        "main-full-1",
    ] {
        assert!(text.contains(said), "{said}\n{text}");
    }
    let (_, text, _) = cluster.run(&["policy", "status", "new"]);
    assert!(text.contains("not yet processed by a controller"), "{text}");
    let (code, result, _) = cluster.json(&["policy", "status", "none"]);
    assert_eq!((code, &result["reason"]), (64, &json!("Usage")));
    schema.check(&result);
    let (_, text, _) = cluster.run(&["policy", "status", "-A"]);
    assert!(text.contains("backup/main"), "{text}");
}
