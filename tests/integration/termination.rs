//! The termination message: one small JSON object that says how a command ended, in every case, and never
//! changes how it ends.

use crate::support::etcd::Etcd;
use crate::support::made_backups::{BASE, Bucket, LAST, objects_in};
use crate::support::schema::Schema;
use crate::support::scratch;
use crate::support::tools::EtcdVersion;
use crate::support::{copy_fixture, deltafold, run_json};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// A secret that no file may contain.
const SECRET: &str = "correct-horse-battery";

/// Runs commands with a termination log.
struct Pod {
    folder: TempDir,
    schema: Schema,
}

/// The result of a command.
struct Ended {
    code: i32,
    outcome: Value,
    stderr: String,
    message: Value,
}

impl Pod {
    fn new() -> Self {
        let schema = Schema::of("termination-message");
        let folder = scratch::folder().unwrap();
        Pod { folder, schema }
    }

    /// Returns a file as the kubelet creates it, with old content.
    fn file(&self) -> PathBuf {
        let file = self.folder.path().join("termination-log");
        fs::write(&file, "what another run has left ".repeat(999)).unwrap();
        file
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut c = deltafold();
        c.env("DELTAFOLD_TERMINATION_LOG", self.file());
        c.args(["--log-format", "text"]).args(args);
        c
    }

    /// Returns the message, validated against its schema.
    fn message(&self) -> Value {
        let text = fs::read_to_string(self.folder.path().join("termination-log")).unwrap();
        assert!(text.len() < 4096, "{}", text.len());
        assert!(!text.contains(SECRET), "{text}");
        let message: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        // Compact JSON and nothing else.
        assert!(
            text.starts_with("{\"command\":") && text.ends_with('}'),
            "{text}"
        );
        self.schema.check(&message);
        message
    }

    /// Runs a command. Asserts that message, exit code and standard output agree.
    fn run(&self, args: &[&str]) -> Ended {
        self.ends(&mut self.command(args))
    }

    fn ends(&self, command: &mut Command) -> Ended {
        let (code, outcome, stderr) = run_json(command);
        let message = self.message();
        assert_eq!(message["code"], code, "{stderr}");
        assert_eq!(message["status"] == "Failed", code != 0, "{message:#}");
        Ended {
            code,
            outcome,
            stderr,
            message,
        }
    }
}

impl Ended {
    fn told(&self) -> (i32, &str, Option<&str>) {
        let m = &self.message;
        (
            self.code,
            m["status"].as_str().unwrap(),
            m["reason"].as_str(),
        )
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn outcomes_are_told_whatever_is_printed() {
    let pod = Pod::new();
    let store = copy_fixture("etcd36-gzip");
    let place = text(store.path());
    let done = pod.run(&["compact", "--output", "json", "--store", place]);
    assert_eq!(done.told(), (0, "Succeeded", None), "{}", done.stderr);
    assert_eq!(done.message["command"], "compact");
    // The outcome is small enough to be included unchanged.
    assert_eq!(done.message["result"], done.outcome);
    assert!(done.outcome["hash_kv"].is_u64() && done.outcome["bytes_written"].as_u64() > Some(0));
    // Without JSON on standard output the message is the same.
    let mut again = pod.command(&["compact", "--store", place]);
    assert!(again.output().unwrap().status.success());
    let message = pod.message();
    assert_eq!(
        (&message["status"], &message["code"]),
        (&json!("NothingToDo"), &json!(0))
    );
    assert_eq!(message["result"]["snapshot"], done.outcome["snapshot"]);
    // A restored member, with flags instead of the variable.
    let folder = scratch::folder().unwrap();
    let member = folder.path().join("member");
    let file = pod.file();
    let mut c = deltafold();
    c.args(["restore", "--output", "json", "--store", place]);
    c.args([
        "--data-dir",
        text(&member),
        "--termination-log",
        text(&file),
    ]);
    let restored = pod.ends(&mut c);
    assert_eq!(
        restored.told(),
        (0, "Succeeded", None),
        "{}",
        restored.stderr
    );
    for field in [
        "revision",
        "restored_revision",
        "hash_kv",
        "database_bytes",
        "live_keys",
    ] {
        let value = &restored.outcome[field];
        assert!(value.is_u64(), "{field}");
        assert_eq!(restored.message["result"][field], *value, "{field}");
    }
    let member = text(&member);
    for (args, command) in [
        (&["list", "--store", place][..], "list"),
        (&["verify", "--store", place], "verify"),
        (&["gc", "--policy", "limit", "--store", place], "gc"),
        (&["store", "check", "--store", place], "store check"),
        (
            &[
                "restore",
                "--if-needed",
                "sanity",
                "--store",
                place,
                "--data-dir",
                member,
            ],
            "restore",
        ),
    ] {
        let done = pod.run(&[args, &["--output", "json"]].concat());
        assert_eq!(done.code, 0, "{args:?}: {}", done.stderr);
        assert_eq!(done.message["command"], command);
        let status = done.outcome["status"].as_str().unwrap_or("Succeeded");
        assert_eq!(done.message["status"], status);
        let result = &done.message["result"];
        assert_eq!(result["status"], done.outcome["status"]);
        for field in ["totals", "freed_bytes", "newest", "restorable"] {
            assert_eq!(result[field], done.outcome[field], "{command}: {field}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_of_a_live_etcd_are_told() {
    let pod = Pod::new();
    let folder = scratch::folder().unwrap();
    let mut etcd = Etcd::start(EtcdVersion::V3_6, &folder.path().join("etcd"));
    let store = folder.path().join("store");
    let endpoint = etcd.endpoint().to_owned();
    let live = [
        "--output",
        "json",
        "--endpoints",
        &endpoint,
        "--store",
        text(&store),
    ];
    let mut kv = etcd.kv().await;
    for (kind, status) in [
        ("full", "Succeeded"),
        ("delta", "Succeeded"),
        ("delta", "NothingToDo"),
    ] {
        if status == "Succeeded" {
            kv.put("k", kind, None).await.unwrap();
        }
        let done = pod.run(&[&["snapshot", kind][..], &live].concat());
        assert_eq!(done.told(), (0, status, None), "{}", done.stderr);
        assert_eq!(done.message["command"], format!("snapshot {kind}"));
        assert_eq!(done.message["result"], done.outcome);
    }
    let done = pod.run(&[&["maintain", "--defrag", "always"][..], &live].concat());
    assert_eq!(done.told(), (0, "Succeeded", None), "{}", done.stderr);
    assert!(done.outcome["members"][0]["db_size_after"].is_u64());
    assert_eq!(done.message["result"]["members"], done.outcome["members"]);
    // Stopped cleanly; the changes after its first look become a delta.
    kv.put("k", "followed", None).await.unwrap();
    let mut c = pod.command(&["snapshot", "follow", "--delta-period", "1s"]);
    let mut job = c
        .args(live)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let deltas = || {
        objects_in(&store)
            .keys()
            .filter(|path| path.contains("Incr"))
            .count()
    };
    while deltas() < 2 {
        assert!(job.try_wait().unwrap().is_none(), "it has ended");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    signal(&job, Signal::TERM);
    let out = job.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(0));
    let message = pod.message();
    assert_eq!(message["command"], "snapshot follow");
    let outcome: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(message["result"], outcome);
    assert!(outcome["last_delta"].is_string());
    // Nobody is there any more.
    etcd.end();
    let failed = pod.run(&[&["snapshot", "delta", "--dial-timeout", "1s"][..], &live].concat());
    assert_eq!(failed.told(), (69, "Failed", Some("EtcdUnreachable")));
    assert_eq!(failed.message["retry"], true);
}

/// Users who may see Pods must not see what is in etcd.
#[test]
fn what_is_in_etcd_is_not_told() {
    let pod = Pod::new();
    let store = copy_fixture("kubernetes");
    for args in [
        &["get", "--prefix", "/registry/"][..],
        &["history", "/registry/"],
        &["export"],
    ] {
        let out = pod
            .command(args)
            .arg("--store")
            .arg(store.path())
            .output()
            .unwrap();
        let message = pod.message();
        assert_eq!(message["code"], out.status.code().unwrap());
        assert_eq!(message["command"], args[0]);
        assert_eq!(message["result"], Value::Null);
        assert!(!message.to_string().contains("configmaps"));
    }
}

#[test]
fn failures_are_told_with_their_reason() {
    let pod = Pod::new();
    let empty = scratch::folder().unwrap();
    let place = text(empty.path());
    let failed = pod.run(&["compact", "--output", "json", "--store", place]);
    assert_eq!(failed.told(), (66, "Failed", Some("NoSnapshots")));
    assert_eq!(failed.message["retry"], false);
    assert_eq!(failed.message["message"], failed.outcome["message"]);
    assert_eq!(failed.message["result"], Value::Null);
    // Damaged in the middle.
    let bucket = Bucket::with_base();
    let delta = bucket.delta(BASE + 1, LAST, 6);
    let path = bucket.path().join("v2").join(&delta);
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, bytes).unwrap();
    let place = text(bucket.path());
    let failed = pod.run(&["compact", "--output", "json", "--store", place]);
    assert_eq!(failed.told(), (65, "Failed", Some("CorruptSnapshot")));
    assert!(failed.message["message"].as_str().unwrap().contains(&delta));
    // An outcome that is a failure is included, too.
    let failed = pod.run(&["verify", "--output", "json", "--store", place]);
    assert_eq!(
        failed.told(),
        (65, "Failed", Some("CorruptSnapshot")),
        "{}",
        failed.stderr
    );
    let result = &failed.message["result"];
    assert_eq!(result["status"], "Failed");
    assert_eq!(
        result["newest"]["last_revision"],
        failed.outcome["newest"]["last_revision"]
    );
    let target = scratch::folder().unwrap();
    let failed = pod.run(&[
        "copy",
        "--output",
        "json",
        "--from",
        place,
        "--to",
        text(target.path()),
    ]);
    assert_eq!(
        (failed.code, &failed.message["result"]["copied"]),
        (65, &json!(1))
    );
    // A failure that is worth a retry.
    let failed = pod.ends(crate::support::without_servers(&mut pod.command(&[
        "list",
        "--output",
        "json",
        "--store",
        "s3://bucket/prefix",
        "--store-option",
        "max_retries=0",
    ])));
    assert_eq!(failed.told(), (69, "Failed", Some("StoreUnreachable")));
    assert_eq!(failed.message["retry"], true);
    // The operation is reported although the output could not be printed.
    let store = copy_fixture("etcd36-gzip");
    let full = fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let mut c = pod.command(&["compact", "--output", "json", "--store", text(store.path())]);
    assert_eq!(c.stdout(full).status().unwrap().code(), Some(74));
    let message = pod.message();
    assert_eq!(
        (&message["status"], &message["reason"]),
        (&json!("Failed"), &json!("NoSpace"))
    );
    assert_eq!(message["result"]["status"], "Succeeded");
}

#[test]
fn a_refused_command_line_is_told_without_its_values() {
    let pod = Pod::new();
    for (args, command, said) in [
        (
            &["compact", "--keep-history", SECRET, "--store", "x"][..],
            json!("compact"),
            "the log has the details",
        ),
        (&["compact", SECRET], json!("compact"), ""),
        (
            &["snapshot", "full", "--store", SECRET],
            json!("snapshot full"),
            "the log has the details",
        ),
        (
            &["compact", "--store", "x", "--passwort", SECRET],
            json!("compact"),
            "",
        ),
        (
            &["compact", "--store", "x", &format!("--{SECRET}")],
            json!("compact"),
            "",
        ),
        (&[SECRET], Value::Null, ""),
        (&["snapshot", SECRET], json!("snapshot"), ""),
        (
            &["compact", "--store", "x", "--store-option", SECRET],
            json!("compact"),
            "--store-option",
        ),
        (
            &["list", "--store", &format!("s3://u:{SECRET}@b/p")],
            json!("list"),
            "--store",
        ),
        (
            &["list", "--store", "x", "--log-level", "a=b=c"],
            json!("list"),
            "--log-level",
        ),
    ] {
        let mut c = deltafold();
        c.env("DELTAFOLD_TERMINATION_LOG", pod.file()).args(args);
        let refused = pod.ends(&mut c);
        assert_eq!(refused.told(), (64, "Failed", Some("Usage")), "{args:?}");
        let message = &refused.message;
        assert_eq!(message["command"], command, "{args:?}");
        assert!(
            message["message"].as_str().unwrap().contains(said),
            "{message}"
        );
    }
    // By the flag, in both forms.
    for joined in [true, false] {
        let file = pod.file();
        let mut c = deltafold();
        c.args(["compact", "--nonsense"]);
        match joined {
            true => c.arg(format!("--termination-log={}", file.display())),
            false => c.arg("--termination-log").arg(file),
        };
        assert_eq!(pod.ends(&mut c).told(), (64, "Failed", Some("Usage")));
    }
    // --help prints help and does nothing else.
    let file = pod.file();
    let before = fs::read(&file).unwrap();
    for args in [&["--help"][..], &["compact", "--help"], &["--version"]] {
        let mut c = deltafold();
        c.env("DELTAFOLD_TERMINATION_LOG", &file).args(args);
        assert!(c.output().unwrap().status.success());
        assert_eq!(fs::read(&file).unwrap(), before);
    }
}

#[test]
fn many_findings_are_counted() {
    let pod = Pod::new();
    let bucket = Bucket::with_base();
    // Judged by names: holes between all of them, and foreign objects.
    for i in 0..1500 {
        let first = LAST + 10 * i;
        bucket.put(
            &format!("v2/Incr-{first:08}-{:08}-{}", first + 3, 1_795_300_000 + i),
            b"",
        );
        bucket.put(&format!("v2/\"no\" snäpshot\\{i}"), b"");
    }
    let args = [
        "--level",
        "names",
        "--all-chains",
        "--store",
        text(bucket.path()),
    ];
    let done = pod.run(&[&["verify", "--output", "json"][..], &args].concat());
    assert_eq!(
        done.told(),
        (65, "Failed", Some("RevisionGap")),
        "{}",
        done.stderr
    );
    let findings = done.outcome["findings"].as_array().unwrap();
    assert!(done.outcome.to_string().len() > 30_000);
    let result = &done.message["result"];
    for field in ["status", "reason", "snapshots", "snapshots_read", "newest"] {
        assert_eq!(result[field], done.outcome[field], "{field}");
    }
    assert_eq!(done.outcome["newest"]["last_revision"], BASE);
    match &result["findings"] {
        Value::Array(told) => assert_eq!(told.len(), findings.len()),
        told => {
            assert_eq!(told["count"], findings.len());
            let errors = findings.iter().filter(|f| f["severity"] == "error").count();
            assert_eq!(told["counts"]["severity"]["error"], errors);
        }
    }
    // Thousands of objects.
    let target = scratch::folder().unwrap();
    let to = [
        "--dry-run",
        "--to",
        text(target.path()),
        "--from",
        text(bucket.path()),
    ];
    let done = pod.run(&[&["copy", "--output", "json"][..], &to].concat());
    assert_eq!(done.code, 0, "{}", done.stderr);
    let objects = done.outcome["objects"].as_array().unwrap();
    assert!(objects.len() > 1000, "{}", objects.len());
    let result = &done.message["result"];
    assert_eq!(result["objects"]["count"], objects.len());
    for field in ["copied", "skipped", "failed", "backups", "bytes_written"] {
        assert_eq!(result[field], done.outcome[field], "{field}");
    }
    let by_decision = result["objects"]["counts"]["decision"].as_object().unwrap();
    let counted: u64 = by_decision.values().map(|n| n.as_u64().unwrap()).sum();
    assert_eq!(counted, objects.len() as u64);
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

/// Starts a run that waits for a server which never responds.
fn hangs(pod: &Pod) -> (Child, TcpListener, std::net::TcpStream) {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("endpoint=http://{}", server.local_addr().unwrap());
    let mut c = pod.command(&[
        "compact",
        "--store",
        "s3://bucket/p",
        "--store-option",
        &endpoint,
    ]);
    c.args(["--store-option", "access_key_id=a", "--store-option"]);
    c.arg(format!("secret_access_key={SECRET}"));
    let job = c
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let (mut asked, _) = server.accept().unwrap();
    asked.read_exact(&mut [0; 3]).unwrap();
    (job, server, asked)
}

#[test]
fn signals_are_told_and_a_killed_run_says_nothing() {
    let pod = Pod::new();
    for (end, code) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        let (mut job, _server, _asked) = hangs(&pod);
        // Nothing of an earlier run is left.
        assert_eq!(
            fs::read(pod.folder.path().join("termination-log")).unwrap(),
            b""
        );
        signal(&job, end);
        assert_eq!(job.wait().unwrap().code(), Some(code));
        let message = pod.message();
        let told = [&message["code"], &message["reason"], &message["retry"]];
        assert_eq!(told, [&json!(code), &json!("Terminated"), &json!(false)]);
        assert_eq!(message["command"], "compact");
    }
    let (mut job, _server, _asked) = hangs(&pod);
    signal(&job, Signal::KILL);
    assert_eq!(job.wait().unwrap().code(), None);
    assert_eq!(
        fs::read(pod.folder.path().join("termination-log")).unwrap(),
        b""
    );
}

/// A command that runs until it is stopped reports what it has done.
#[test]
fn a_follower_that_is_stopped_tells_what_it_did() {
    let pod = Pod::new();
    let store = copy_fixture("etcd36-gzip");
    let target = scratch::folder().unwrap();
    let mut c = pod.command(&["copy", "--follow", "--interval", "20ms", "--output", "json"]);
    c.args(["--from", text(store.path()), "--to", text(target.path())]);
    let mut job = c
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    while objects_in(target.path()) != objects_in(store.path()) {
        assert!(job.try_wait().unwrap().is_none(), "it has ended");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    signal(&job, Signal::TERM);
    let out = job.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(0));
    let outcome: Value = serde_json::from_slice(&out.stdout).unwrap();
    let message = pod.message();
    assert_eq!(message["code"], 0);
    assert_eq!(message["command"], "copy");
    assert_eq!(message["result"], outcome);
}

#[test]
fn a_file_that_cannot_be_written_changes_nothing_else() {
    let folder = scratch::folder().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(
        Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    let no_folder = folder.path().join("no/such/folder");
    let places = [folder.path(), &no_folder, &pipe, Path::new("/dev/full")];
    for place in places {
        let store = copy_fixture("etcd36-gzip");
        let empty = scratch::folder().unwrap();
        for (store, code) in [(store.path(), 0), (store.path(), 0), (empty.path(), 66)] {
            let mut c = deltafold();
            c.args([
                "compact",
                "--output",
                "json",
                "--log-format",
                "text",
                "--store",
            ]);
            c.arg(store).arg("--termination-log").arg(place);
            let (got, outcome, stderr) = run_json(&mut c);
            assert_eq!(got, code, "{place:?}: {stderr}");
            assert!(outcome["status"].is_string());
            let warning = format!(
                "cannot write the termination message to {}",
                place.display()
            );
            assert!(
                stderr.contains("WARN") && stderr.contains(&warning),
                "{stderr}"
            );
            assert_eq!(
                stderr.trim_end().ends_with("[NoSnapshots]"),
                code == 66,
                "{stderr}"
            );
        }
        let mut c = deltafold();
        c.args(["compact", "--nonsense", "--termination-log"])
            .arg(place);
        let out = c.output().unwrap();
        assert_eq!(out.status.code(), Some(64));
        assert!(
            String::from_utf8_lossy(&out.stderr)
                .contains("warning: cannot write the termination message")
        );
    }
}
