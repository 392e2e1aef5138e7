//! `deltafold task create` on a real API server. There is no controller: the tests play it.

use crate::support::kube::{NOBODY, TOKEN};
use crate::support::namespace::{Alone, Kubernetes, POLICIES, TASKS, TestNamespace};
use crate::support::schema::Schema;
use crate::support::{deltafold, run_json};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

async fn policy(space: &TestNamespace, name: &str) {
    let policy = json!({
        "metadata": {"name": name},
        "spec": {"store": {"url": "s3://backups/main"}, "etcd": {"endpoints": ["http://etcd:2379"]}},
    });
    space.create(POLICIES, policy).await;
}

/// Writes a status, as the controller would.
async fn set(space: &TestNamespace, name: &str, status: Value) {
    let status = json!({"status": status});
    space.patch(TASKS, &format!("{name}/status"), status).await;
}

/// Written once: other tests may be reading it.
fn config(space: &TestNamespace, token: &str) -> PathBuf {
    let file = space.folder.path().join(format!("config-{token}"));
    if !file.exists() {
        let server = &Kubernetes::shared().server;
        server.kubeconfig(&file, &space.name, token);
    }
    file
}

fn command(config: &Path, args: &[&str]) -> Command {
    let mut command = deltafold();
    command.env("KUBECONFIG", config).args(args);
    // Text logs, even if the tests run in a Pod.
    command.env("DELTAFOLD_LOG_FORMAT", "text");
    command.env_remove("KUBERNETES_SERVICE_HOST");
    command
}

/// Returns the exit code, standard output and standard error.
fn said(command: &mut Command) -> (i32, String, String) {
    let out = command.output().unwrap();
    let text = |b: Vec<u8>| String::from_utf8(b).unwrap();
    let code = out.status.code().unwrap();
    (code, text(out.stdout), text(out.stderr))
}

fn run(space: &TestNamespace, args: &[&str]) -> (i32, String, String) {
    said(&mut command(&config(space, TOKEN), args))
}

fn json(space: &TestNamespace, args: &[&str]) -> (i32, Value, String) {
    let mut command = command(&config(space, TOKEN), args);
    run_json(command.args(["--output", "json"]))
}

/// Starts `task create verify --wait`, and returns when the task exists.
async fn wait(space: &TestNamespace, name: &str, more: &[&str]) -> Child {
    let create = ["task", "create", "verify", "--policy", "main", "--wait"];
    let name_args = ["--task-name", name, "--output", "json"];
    let args = [&create, &name_args[..], more].concat();
    let mut command = command(&config(space, TOKEN), &args);
    let command = command.stdin(Stdio::null());
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    space.wait_for(TASKS, name).await;
    child
}

fn ended(child: Child) -> (i32, Value, String) {
    let out = child.wait_with_output().unwrap();
    let stdout = String::from_utf8(out.stdout).unwrap();
    let stderr = String::from_utf8(out.stderr).unwrap();
    let result = serde_json::from_str(&stdout).unwrap_or(Value::Null);
    (out.status.code().unwrap(), result, stderr)
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_of_each_type_are_created_as_asked_for() {
    let cluster = TestNamespace::new("tasks").await;
    policy(&cluster, "main").await;
    let schema = Schema::of("task");
    let table: [(&[&str], &str, Value); 9] = [
        (
            &["snapshot"],
            "OnDemandSnapshot",
            json!({"onDemandSnapshot": {"type": "full", "final": false}}),
        ),
        (
            &["OnDemandSnapshot", "--type", "full", "--final"],
            "OnDemandSnapshot",
            json!({"onDemandSnapshot": {"type": "full", "final": true}}),
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
                "runAsUser": 1000,
            }}),
        ),
        (
            &["restore", "--claim", "data", "--revision", "41"],
            "Restore",
            json!({"restore": {"claimName": "data", "revision": 41}}),
        ),
        (
            &["verify", "--level", "fold", "--against-cluster"],
            "Verify",
            json!({"verify": {"level": "fold", "againstCluster": true}}),
        ),
        (
            &["maintenance", "--defrag", "0.3"],
            "Maintenance",
            json!({"maintenance": {"defrag": "0.3"}}),
        ),
    ];
    for (args, type_, config) in table {
        let args = [
            &["task", "create"],
            args,
            &["--policy", "main", "--ttl", "1h"],
        ]
        .concat();
        let (code, outcome, stderr) = json(&cluster, &args);
        assert_eq!(code, 0, "{args:?}: {stderr}");
        schema.check(&outcome);
        assert_eq!(
            (&outcome["state"], &outcome["type"]),
            (&json!("Pending"), &json!(type_))
        );
        let name = outcome["name"].as_str().unwrap();
        assert!(name.starts_with("main-") && name.len() <= 52, "{name}");
        let spec = cluster.must_get(TASKS, name).await["spec"].clone();
        assert_eq!(spec["config"], config, "{args:?}");
        assert_eq!(spec["ttlSecondsAfterFinished"], 3600);
        assert_eq!(spec["args"], Value::Null);
    }
    let own = [
        "task", "create", "restore", "--policy", "main", "--claim", "data", "--",
    ];
    let args = ["--if-needed=sanity", "--mark-compacted"];
    let (code, name, stderr) = run(&cluster, &[&own[..], &args].concat());
    assert_eq!(code, 0, "{stderr}");
    let task = cluster.must_get(TASKS, name.trim()).await;
    assert_eq!(task["spec"]["args"], json!(args));
    // The text output is only the name; what follows is said beside it.
    let named = [
        "task",
        "create",
        "verify",
        "--policy",
        "main",
        "--task-name",
        "now",
    ];
    let (code, name, stderr) = run(&cluster, &named);
    assert_eq!((code, name.as_str()), (0, "now\n"), "{stderr}");
    let watch = format!("kubectl get ebt now --namespace {}", cluster.name);
    assert!(stderr.contains(&watch), "{stderr}");
    let (code, result, _) = json(&cluster, &named);
    assert_eq!((code, &result["reason"]), (73, &json!("TargetExists")));
    schema.check(&result);
    // A long policy name leaves room for the rest.
    policy(&cluster, &"p".repeat(40)).await;
    let long = ["task", "create", "snapshot", "--policy", &"p".repeat(40)];
    let (code, name, stderr) = run(&cluster, &long);
    assert_eq!(
        (code, name.trim().len() <= 52),
        (0, true),
        "{name} {stderr}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_is_told_by_exit_code() {
    let cluster = TestNamespace::new("tasks").await;
    policy(&cluster, "main").await;
    let schema = Schema::of("task");
    let nobody = config(&cluster, NOBODY);
    let nowhere = cluster.folder.path().join("nowhere");
    let text = fs::read_to_string(config(&cluster, TOKEN)).unwrap();
    let gone = text.replace(cluster.api.url(), "https://127.0.0.1:1");
    fs::write(&nowhere, gone).unwrap();
    let config = config(&cluster, TOKEN);
    let missing = cluster.folder.path().join("missing");
    let create =
        |type_: &[&'static str]| [&["task", "create"], type_, &["--policy", "main"]].concat();
    let table: [(&Path, Vec<&str>, i32, &str, &str); 7] = [
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
            [&create(&["verify"])[..], &["--context", "other"]].concat(),
            78,
            "Configuration",
            "--context",
        ),
        (
            &missing,
            create(&["verify"]),
            78,
            "Configuration",
            "KUBECONFIG",
        ),
        (
            &nobody,
            create(&["verify"]),
            77,
            "PermissionDenied",
            "cannot create the task",
        ),
        (
            &nowhere,
            create(&["verify"]),
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
        schema.check(&result);
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
    ] {
        assert_eq!(run(&cluster, args).0, 64, "{args:?}");
    }
    // A server without our CRDs.
    let bare = Alone::start().await;
    let config = bare.folder.path().join("config");
    bare.server.kubeconfig(&config, "backup", TOKEN);
    let (code, _, stderr) = said(&mut command(&config, &create(&["verify"])));
    assert!(code == 78 && stderr.contains("jobs/crds.yaml"), "{stderr}");
}

fn error(code: &str) -> Value {
    json!([{"code": code, "description": "it is so", "observedAt": "2026-11-20T12:00:00Z"}])
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_ends_with_the_task_and_with_its_exit_code() {
    let cluster = TestNamespace::new("tasks").await;
    policy(&cluster, "main").await;
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
        waiting.push(wait(&cluster, &format!("t{n}"), &[]).await);
    }
    for (n, (state, code, _)) in table.iter().enumerate() {
        let name = format!("t{n}");
        let operation = json!({"name": "Job", "state": "InProgress", "reason": "the Job runs",
            "lastTransitionTime": "2026-11-20T12:00:00Z"});
        let begun = json!({"state": "InProgress", "jobName": "job", "lastOperation": operation,
            "initiatedAt": "2026-11-20T12:00:00Z"});
        set(&cluster, &name, begun).await;
        assert_eq!(waiting[n].try_wait().unwrap(), None, "{name}");
        let errors = code.map_or(json!([]), error);
        set(
            &cluster,
            &name,
            json!({"state": state, "lastErrors": errors}),
        )
        .await;
    }
    for (child, (state, error, code)) in waiting.into_iter().zip(table) {
        let (got, outcome, stderr) = ended(child);
        assert_eq!((got, &outcome["state"]), (code, &json!(state)), "{stderr}");
        schema.check(&outcome);
        assert_eq!(outcome["operation"], "the Job runs");
        let told = stderr.contains("error: ");
        assert_eq!(told, error.is_some(), "{stderr}");
    }
    // It does not wait forever, nor for a deleted task.
    let child = wait(&cluster, "slow", &["--timeout", "200ms"]).await;
    let (code, result, stderr) = ended(child);
    assert_eq!(
        (code, &result["reason"]),
        (75, &json!("PartlyDone")),
        "{stderr}"
    );
    let child = wait(&cluster, "late", &[]).await;
    cluster.delete(TASKS, "late").await;
    let (code, result, stderr) = ended(child);
    assert_eq!(
        (code, &result["reason"]),
        (75, &json!("Conflict")),
        "{stderr}"
    );
    assert!(stderr.contains("deleted"), "{stderr}");
}
