//! Metrics: the document names what is exposed, the exposition is valid for Prometheus, and the endpoint of a
//! job can be scraped.

use crate::support::scratch;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::process::{free_port, http};
use crate::support::{copy_fixture, deltafold, expected, run_json};
use chrono::{DateTime, Utc};
use deltafold::Reason;
use deltafold::base::Cancel;
use deltafold::telemetry::endpoint::serve;
use deltafold::telemetry::metrics::{
    CompactionFigures, Metrics, RestorableWindow, SavedSnapshot, SnapshotKind, VerificationFigures,
};
use serde_json::Value;

/// An exposed metric.
#[derive(Debug, Default, PartialEq)]
struct Exposed {
    kind: String,
    unit: String,
    /// The labels of all samples.
    labels: BTreeSet<String>,
    /// Values by sample, including labels.
    samples: BTreeMap<String, f64>,
}

/// Parses an exposition strictly: metadata first, one family after the other, suffixes by type, and the end
/// mark.
fn parse(text: &str) -> BTreeMap<String, Exposed> {
    let text = text.strip_suffix("# EOF\n").expect("the end");
    let mut all: BTreeMap<String, Exposed> = BTreeMap::new();
    let (mut current, mut helped) = (String::new(), String::new());
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, help) = help.split_once(' ').expect("a help");
            assert!(help.len() > 10 && help.ends_with('.'), "{line}");
            helped = name.to_owned();
        } else if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').expect("a type");
            assert_eq!(name, helped);
            assert!(!name.ends_with("_total"), "{line}");
            current = name.to_owned();
            let exposed = Exposed {
                kind: kind.to_owned(),
                ..Exposed::default()
            };
            assert!(all.insert(current.clone(), exposed).is_none(), "{line}");
        } else if let Some(unit) = line.strip_prefix("# UNIT ") {
            let (name, unit) = unit.split_once(' ').expect("a unit");
            assert_eq!(name, current);
            assert!(name.ends_with(&format!("_{unit}")), "{line}");
            all.get_mut(name).expect("a metric").unit = unit.to_owned();
        } else {
            let (sample, value) = line.rsplit_once(' ').expect("a value");
            let (name, labels) = sample.split_once('{').unwrap_or((sample, ""));
            let metric = all.get_mut(&current).expect("a metric");
            let suffixes: &[&str] = match metric.kind.as_str() {
                "gauge" => &[""],
                "counter" => &["_total"],
                "info" => &["_info"],
                "histogram" => &["_bucket", "_sum", "_count"],
                other => panic!("the type {other}"),
            };
            assert!(
                suffixes.iter().any(|s| *name == format!("{current}{s}")),
                "{line}"
            );
            let names = labels.trim_end_matches('}').split("\",");
            for (label, value) in names.filter_map(|l| l.split_once("=\"")) {
                assert!(!value.trim_end_matches('"').contains(['"', '\\']), "{line}");
                if label != "le" {
                    metric.labels.insert(label.to_owned());
                }
            }
            let value: f64 = value.parse().expect("a number");
            assert!(value >= 0.0, "{line}");
            let before = metric.samples.insert(sample.to_owned(), value);
            assert_eq!(before, None, "{line}");
        }
    }
    all
}

/// Returns the table of the document: query name to type, labels and unit.
fn documented() -> BTreeMap<String, (String, BTreeSet<String>, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/metrics.md");
    let text = fs::read_to_string(path).expect("docs/metrics.md");
    // The controller's metrics have their own test.
    let (jobs, _) = text
        .split_once("## The controller's")
        .expect("the controller's section");
    let rows = jobs.lines().filter_map(|l| l.strip_prefix("| `deltafold_"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        assert!(cells[4].len() > 10, "{row}");
        let labels = cells[2].split(", ").map(|l| l.trim_matches('`').to_owned());
        let labels = labels.filter(|l| !l.is_empty()).collect();
        let name = format!("deltafold_{}", cells[0].trim_end_matches('`'));
        (name, (cells[1].to_owned(), labels, cells[3].to_owned()))
    })
    .collect()
}

fn time(t: &str) -> DateTime<Utc> {
    t.parse().expect("a time")
}

/// Returns metrics in which everything was recorded.
fn told() -> Metrics {
    let m = Metrics::new();
    for (kind, succeeded) in [(SnapshotKind::Full, true), (SnapshotKind::Delta, false)] {
        m.snapshot_saved(&SavedSnapshot {
            kind,
            at: time("2026-11-20T12:00:00.5Z"),
            revision: 120_000,
            stored_bytes: 1 << 20,
            uncompressed_bytes: Some(5 << 20),
        });
        m.snapshot_took(kind, Duration::from_millis(1500), succeeded);
    }
    m.events_saved(17);
    m.etcd_read(100);
    m.store_read(200);
    m.store_written(300);
    m.failed("watch", Reason::EtcdUnreachable);
    m.failed("watch", Reason::EtcdUnreachable);
    m.unsaved(Some(3), None);
    m.spooled(500);
    m.restorable(&RestorableWindow {
        first_revision: 5,
        last_revision: 9,
        first_time: Some(time("2026-11-20T11:00:00Z")),
        last_time: Some(time("2026-11-20T12:00:00Z")),
    });
    m.timeline_began(time("2026-11-20T12:00:00Z"));
    m.history_proven(time("2026-11-20T12:00:00Z"));
    m.lock_held(true);
    m.reconnected();
    m.full_saved("FullTooOld");
    m.job_ended("compact", Duration::from_secs(2), None);
    m.job_ended("maintain", Duration::from_secs(2), Some(Reason::LockHeld));
    m.compacted(&CompactionFigures {
        deltas: 1,
        events: 2,
        read_bytes: 3,
        written_bytes: 4,
    });
    m.defragmented("etcd-0", 500);
    m.copied(SnapshotKind::Full);
    m.to_copy(1);
    m.in_step();
    m.verified(&VerificationFigures {
        findings: vec![("RevisionGap", 2), ("ForeignObject", 1)],
        errors: 2,
        snapshots: 7,
        read_bytes: 600,
        newest: Some((time("2026-11-20T12:00:00Z"), 61.5)),
        drill: Some((true, Duration::from_millis(2500))),
    });
    m
}

/// Node exporter's textfile collector needs the older text format, not OpenMetrics.
#[test]
fn a_file_for_node_exporter_is_the_older_text() {
    let text = told().encode_text().expect("a text");
    let mut types: BTreeMap<&str, &str> = BTreeMap::new();
    for line in text.lines() {
        if let Some(typed) = line.strip_prefix("# TYPE ") {
            let (name, kind) = typed.split_once(' ').expect("a type");
            let kinds = ["counter", "gauge", "histogram"];
            assert!(kinds.contains(&kind), "{line}");
            assert!(types.insert(name, kind).is_none(), "{line}");
        } else if !line.starts_with("# HELP ") {
            assert!(!line.starts_with('#'), "{line}");
            let name = line.split(['{', ' ']).next().expect("a name");
            let of_histogram = ["_bucket", "_sum", "_count"]
                .iter()
                .filter_map(|s| name.strip_suffix(s))
                .find(|n| types.get(n) == Some(&"histogram"));
            assert!(of_histogram.is_some() || types.contains_key(name), "{line}");
            assert_eq!(
                line.split(' ').count(),
                2,
                "a time stamp is refused: {line}"
            );
        }
    }
    assert_eq!(types["deltafold_failures_total"], "counter");
    assert_eq!(types["deltafold_build_info"], "gauge");
    assert_eq!(types["deltafold_verify_errors"], "gauge");
    assert!(text.contains("\ndeltafold_verify_findings{reason=\"RevisionGap\"} 2\n"));
}

/// The systemd units have the umask 0077, and node exporter runs as another user.
#[test]
fn a_file_can_be_read_by_others_whatever_the_umask() {
    let store = copy_fixture("etcd35-gzip");
    let file = store.path().join("gc.prom");
    let gc = r#"umask 0077; exec "$0" gc --policy limit --store "$1" --metrics-file "$1/gc.prom""#;
    let mut shell = Command::new("sh");
    let program = crate::support::program();
    let out = shell
        .args(["-c", gc])
        .arg(program)
        .arg(store.path())
        .output();
    let out = out.expect("run sh");
    assert!(out.status.success(), "{out:?}");
    let mode = fs::metadata(&file).expect("the file").permissions().mode();
    assert_eq!(mode & 0o777, 0o644, "{mode:o}");
}

#[test]
fn the_document_names_what_is_exposed() {
    let m = told();
    let exposed = parse(&m.encode().expect("an exposition"));
    let names: BTreeSet<&str> = m.names().iter().map(String::as_str).collect();
    let told: BTreeSet<&str> = exposed.keys().map(String::as_str).collect();
    assert_eq!(told, names, "told() does not tell all");
    let exposed: BTreeMap<_, _> = exposed
        .into_iter()
        .map(|(name, e)| {
            let suffix = match e.kind.as_str() {
                "counter" => "_total",
                "info" => "_info",
                _ => "",
            };
            (name + suffix, (e.kind, e.labels, e.unit))
        })
        .collect();
    assert_eq!(documented(), exposed);
}

#[test]
fn values_are_what_was_told() {
    let exposed = parse(&told().encode().expect("an exposition"));
    let samples: BTreeMap<&str, f64> = exposed
        .values()
        .flat_map(|e| e.samples.iter().map(|(s, v)| (s.as_str(), *v)))
        .collect();
    for (sample, value) in [
        (
            "deltafold_last_snapshot_timestamp_seconds{kind=\"full\"}",
            1_795_176_000.5,
        ),
        (
            "deltafold_last_snapshot_revision{kind=\"delta\"}",
            120_000.0,
        ),
        (
            "deltafold_snapshot_duration_seconds_count{kind=\"delta\",succeeded=\"false\"}",
            1.0,
        ),
        (
            "deltafold_snapshot_duration_seconds_bucket{le=\"1.0\",kind=\"full\",succeeded=\"true\"}",
            0.0,
        ),
        (
            "deltafold_snapshot_duration_seconds_bucket{le=\"2.5\",kind=\"full\",succeeded=\"true\"}",
            1.0,
        ),
        ("deltafold_saved_events_total", 17.0),
        (
            "deltafold_failures_total{operation=\"watch\",reason=\"EtcdUnreachable\",code=\"69\"}",
            2.0,
        ),
        (
            "deltafold_failures_total{operation=\"maintain\",reason=\"LockHeld\",code=\"75\"}",
            1.0,
        ),
        ("deltafold_job_succeeded{job=\"compact\"}", 1.0),
        ("deltafold_job_succeeded{job=\"maintain\"}", 0.0),
        ("deltafold_unsaved_revisions", 3.0),
        ("deltafold_unsaved_age_seconds", 0.0),
        ("deltafold_lock_held", 1.0),
    ] {
        assert_eq!(
            samples.get(sample),
            Some(&value),
            "{sample} in {samples:#?}"
        );
    }
}

#[test]
fn the_endpoint_answers_and_is_ready_when_told() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let (metrics, cancel) = (Metrics::new(), Cancel::default());
    let address = "127.0.0.1:0".parse().expect("an address");
    let server = serve(&address, &metrics, runtime.handle(), &cancel).expect("an endpoint");
    let port = server.address().port();
    let status = |target: &str| {
        let answer = http(port, "GET", target, "").expect("an answer");
        let status = answer.split(' ').nth(1).expect("a status");
        status.parse::<u16>().expect("a number")
    };
    assert_eq!((status("/healthz"), status("/readyz")), (200, 503));
    server.set_ready(true);
    assert_eq!((status("/readyz"), status("/")), (200, 404));
    metrics.events_saved(1);
    let answer = http(port, "GET", "/metrics", "").expect("an answer");
    assert!(
        answer.contains("deltafold_saved_events_total 1\n"),
        "{answer}"
    );
    let refused = http(port, "POST", "/metrics", "x").expect("an answer");
    assert_eq!(refused.split(' ').nth(1), Some("405"));
    cancel.cancel();
    assert_eq!((status("/healthz"), status("/readyz")), (200, 503));
    drop(server);
    // The port is free again as soon as the task has ended.
    while TcpListener::bind(("127.0.0.1", port)).is_err() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A job that waits to be scraped. It is killed when dropped.
struct Waiting {
    child: Option<Child>,
    port: u16,
}

impl Waiting {
    fn start(command: &mut Command) -> Self {
        let port = free_port();
        let child = command
            .args(["--metrics-bind-address", &format!("127.0.0.1:{port}")])
            .args(["--metrics-scrape-wait", "1h", "--output", "json"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start deltafold");
        let child = Some(child);
        Waiting { child, port }
    }

    /// Returns what is exposed after the operation: the whole body, and its samples.
    fn scrape(&mut self) -> (String, BTreeMap<String, f64>) {
        const OPEN_METRICS: &str =
            "content-type: application/openmetrics-text; version=1.0.0; charset=utf-8";
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(120) {
            let child = self.child.as_mut().expect("a child");
            if let Some(status) = child.try_wait().expect("its status") {
                panic!("it did not wait: {status}");
            }
            if let Some(answer) = http(self.port, "GET", "/metrics", "")
                && answer.contains("deltafold_job_succeeded{")
            {
                let (head, body) = answer.split_once("\r\n\r\n").expect("a body");
                assert!(head.to_lowercase().contains(OPEN_METRICS), "{head}");
                let samples = parse(body).into_values().flat_map(|e| e.samples);
                return (body.to_owned(), samples.collect());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("it did not end");
    }

    /// Ends the wait. Returns the exit code, the JSON and standard error.
    fn end(mut self) -> (i32, Value, String) {
        use rustix::process::{Pid, Signal, kill_process};
        let child = self.child.take().expect("a child");
        kill_process(Pid::from_child(&child), Signal::TERM).expect("send SIGTERM");
        let out = child.wait_with_output().expect("its end");
        let result = serde_json::from_slice(&out.stdout).expect("a result");
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        (out.status.code().expect("an exit code"), result, stderr)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

const SECRET: &str = "c0rrect-h0rse";

/// Returns a `compact` of a folder, with a secret in its environment.
fn compact(store: &Path) -> Command {
    let mut command = deltafold();
    command
        .args(["compact", "--store"])
        .arg(store)
        .args(["--log-level", "info", "--log-format", "text"])
        .env("AWS_SECRET_ACCESS_KEY", SECRET);
    command
}

#[test]
fn a_compaction_is_seen_after_it_has_ended() {
    let store = copy_fixture("etcd35-gzip");
    let mut job = Waiting::start(&mut compact(store.path()));
    let (text, samples) = job.scrape();
    let (code, result, stderr) = job.end();
    // The signal ended the wait, not the operation.
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(result["status"], "Succeeded");
    let field = |name: &str| result[name].as_f64().expect("a number");
    let last = expected("etcd35-gzip").last_revision as f64;
    for (sample, value) in [
        ("deltafold_job_succeeded{job=\"compact\"}", 1.0),
        ("deltafold_compact_deltas", 2.0),
        ("deltafold_compact_events", field("events")),
        ("deltafold_compact_read_bytes", field("bytes_read")),
        ("deltafold_compact_written_bytes", field("bytes_written")),
        ("deltafold_store_read_bytes_total", field("bytes_read")),
        (
            "deltafold_store_written_bytes_total",
            field("bytes_written"),
        ),
        ("deltafold_last_snapshot_revision{kind=\"full\"}", last),
        (
            "deltafold_last_snapshot_stored_bytes{kind=\"full\"}",
            field("bytes_written"),
        ),
        (
            "deltafold_snapshot_duration_seconds_count{kind=\"full\",succeeded=\"true\"}",
            1.0,
        ),
    ] {
        assert_eq!(samples.get(sample), Some(&value), "{sample} in {text}");
    }
    let took = samples["deltafold_job_duration_seconds{job=\"compact\"}"];
    assert!(took >= field("seconds"), "{took}");
    assert!(!text.contains("deltafold_failures") && !text.contains("deltafold_unsaved"));
    let path = store.path().to_str().expect("a path");
    assert!(!text.contains(SECRET) && !text.contains(path), "{text}");

    // A second run has nothing to do and saves no snapshot.
    let mut job = Waiting::start(&mut compact(store.path()));
    let (text, samples) = job.scrape();
    let (code, result, stderr) = job.end();
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(result["status"], "NothingToDo");
    assert_eq!(samples["deltafold_compact_written_bytes"], 0.0);
    assert!(!text.contains("deltafold_last_snapshot"), "{text}");
}

#[test]
fn a_failure_is_seen_too() {
    let empty = scratch::folder().expect("a folder");
    let store = empty.path().join(format!("{SECRET}-in-the-name"));
    let mut job = Waiting::start(&mut compact(&store));
    let (text, samples) = job.scrape();
    let (code, result, stderr) = job.end();
    assert_eq!(code, 66, "{stderr}");
    assert_eq!(result["reason"], "NoSnapshots");
    assert_eq!(samples["deltafold_job_succeeded{job=\"compact\"}"], 0.0);
    let failure =
        "deltafold_failures_total{operation=\"compact\",reason=\"NoSnapshots\",code=\"66\"}";
    assert_eq!(samples.get(failure), Some(&1.0), "{text}");
    assert!(!text.contains(SECRET), "{text}");
    // The error was logged before the wait, too.
    assert!(stderr.contains("compact failed"), "{stderr}");

    // A secret on the command line, and a run that never opened the store.
    let mut command = compact(&store);
    command.args(["--store-option", &format!("secret_access_key={SECRET}")]);
    let mut job = Waiting::start(&mut command);
    let (text, samples) = job.scrape();
    let (code, _, stderr) = job.end();
    assert_eq!(code, 78, "{stderr}");
    let failure =
        "deltafold_failures_total{operation=\"compact\",reason=\"Configuration\",code=\"78\"}";
    assert_eq!(samples.get(failure), Some(&1.0), "{text}");
    assert!(
        !text.contains(SECRET) && !text.contains("_compact_"),
        "{text}"
    );
}

#[test]
fn without_a_wait_the_job_ends_at_once() {
    let store = copy_fixture("etcd35-gzip");
    let address = format!("127.0.0.1:{}", free_port());
    let mut command = compact(store.path());
    command.args(["--output", "json", "--metrics-bind-address", &address]);
    let (code, result, stderr) = run_json(&mut command);
    assert_eq!(
        (code, &result["status"]),
        (0, &"Succeeded".into()),
        "{stderr}"
    );
}

#[test]
fn an_endpoint_that_cannot_be_had_is_an_error_at_once() {
    let store = copy_fixture("etcd35-gzip");
    let other = TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = other.local_addr().expect("its address").to_string();
    let run = |address: &str| {
        let mut command = compact(store.path());
        command.args(["--output", "json", "--metrics-bind-address", address]);
        run_json(&mut command)
    };
    let (code, result, _) = run(&taken);
    assert_eq!((code, &result["reason"]), (78, &"Configuration".into()));
    let message = result["message"].as_str().expect("a message");
    assert!(
        message.contains(&taken) && message.contains("another program"),
        "{message}"
    );
    let fulls = fs::read_dir(store.path().join("v2")).expect("v2").count();
    assert_eq!(fulls, 3, "it has begun");
    let (code, result, _) = run("nowhere");
    assert_eq!((code, &result["reason"]), (64, &"Usage".into()));
}
