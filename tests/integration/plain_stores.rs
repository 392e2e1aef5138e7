//! Plain snapshots as a store: what k3s, kOps, Talos and OpenShift leave, in a folder and in a bucket.

use crate::support::etcd::{Etcd, EtcdVersion};
use crate::support::history::Compression;
use crate::support::minio::Minio;
use crate::support::s3::Kind;
use crate::support::tiny_backup::{plain_snapshot, zip};
use crate::support::{deltafold, run_json, scratch};
use chrono::{TimeDelta, Utc};
use object_store::ObjectStoreExt as _;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use tokio::runtime::Runtime;

type Files = Vec<(String, Vec<u8>)>;

/// Returns the files of a tool, which hold revisions up to 41, 42, … and were taken each hour until an hour ago, with the
/// names of the snapshots.
fn layout(tool: &str) -> (Files, Vec<String>) {
    let (mut files, mut names) = (Files::new(), Vec::new());
    for nth in 0..5 {
        let content = plain_snapshot(41 + nth);
        let at = Utc::now() - TimeDelta::hours(5 - nth);
        let name = match tool {
            "k3s" => format!("etcd-snapshot-node-1-{}", at.timestamp()),
            "k3s, zipped" => format!("etcd-snapshot-node-1-{}.zip", at.timestamp()),
            "kops" => format!(
                "{}-00000{nth}/etcd.backup.gz",
                at.format("%Y-%m-%dT%H:%M:%SZ")
            ),
            "talos" => format!("{}.db", at.format("%Y-%m-%dT%H:%M:%SZ")),
            _ => format!("snapshot_{}.db", at.format("%Y-%m-%d_%H%M%SZ")),
        };
        let content = match tool {
            "k3s, zipped" => zip(&content),
            "kops" => Compression::Gzip.pack(&content),
            _ => content,
        };
        let beside = match tool {
            "k3s" | "k3s, zipped" => format!(".metadata/{name}"),
            "kops" => format!("{}/_etcd_backup.meta", name.split('/').next().unwrap()),
            "openshift" => format!("static_kuberesources_{nth}.tar.gz"),
            _ => format!("{nth}.log"),
        };
        files.push((beside, b"{}".to_vec()));
        files.push((name.clone(), content));
        names.push(name);
    }
    (files, names)
}

/// A store of plain snapshots.
struct Place<'a> {
    url: String,
    env: &'a [(String, String)],
}

impl Place<'_> {
    fn run(&self, command: &str, args: &[&str]) -> (i32, Value, String) {
        self.run_on("--store", &self.url, command, args)
    }

    fn run_on(&self, flag: &str, url: &str, command: &str, args: &[&str]) -> (i32, Value, String) {
        let mut c = deltafold();
        c.envs(self.env.iter().cloned());
        c.args([command, "--output", "json", flag, url]).args(args);
        run_json(&mut c)
    }

    fn succeeds(&self, command: &str, args: &[&str]) -> Value {
        let (code, json, stderr) = self.run(command, args);
        assert_eq!(code, 0, "{command} {args:?} of {}: {stderr}", self.url);
        json
    }
}

fn names(listed: &Value) -> Vec<&str> {
    let files = listed["files"].as_array().unwrap().iter();
    files.map(|f| f["name"].as_str().unwrap()).collect()
}

/// Everything that reads, on the files of a tool.
fn all_that_reads(place: &Place<'_>, snapshots: &[String], folder: &Path) {
    let is_local = place.env.is_empty();
    let listed = place.succeeds("list", &[]);
    assert_eq!(names(&listed), snapshots, "{listed:#}");
    let file = &listed["files"][0];
    assert_eq!(file["time_source"], "name", "{file}");
    // A bucket's contents are read only if that is asked for.
    let revision = if is_local { json!(41) } else { Value::Null };
    assert_eq!(file["revision"], revision, "{file}");
    // What k3s has beside them is hidden.
    let is_noted = !snapshots[0].starts_with("etcd-snapshot");
    let problems = listed["problems"].as_array().unwrap().len();
    assert_eq!(problems, usize::from(is_noted), "{listed:#}");
    let deep = place.succeeds("list", &["--deep"]);
    assert_eq!(deep["latest_revision"], 45, "{deep:#}");

    let status = place.succeeds("status", &[]);
    assert_eq!(status["newest"]["path"], snapshots[4].as_str());
    let (code, stale, _) = place.run("status", &["--max-age", "30m"]);
    assert_eq!((code, &stale["reason"]), (75, &json!("Stale")));
    let verified = place.succeeds("verify", &["--all-chains"]);
    assert_eq!(verified["files"].as_array().unwrap().len(), 5);

    let key = "/registry/a";
    let at = |args: &[&str]| place.succeeds("get", &[&[key], args].concat())["revision"].clone();
    assert_eq!(at(&[]), 45);
    assert_eq!(at(&["--revision", "42"]), 42);
    let time = (Utc::now() - TimeDelta::minutes(150)).to_rfc3339();
    assert_eq!(at(&["--time", &time]), 43);
    let (code, early, _) = place.run("get", &[key, "--time", "2020-01-01T00:00:00Z"]);
    assert_eq!((code, &early["reason"]), (66, &json!("OutOfRange")));
    let (code, late, _) = place.run("get", &[key, "--revision", "46"]);
    assert_eq!((code, &late["reason"]), (66, &json!("OutOfRange")));
    let history = place.succeeds("history", &[key]);
    assert!(
        history["versions"].as_array().unwrap().len() > 3,
        "{history}"
    );
    let diff = place.succeeds("diff", &["--from", "42", "--to", "44"]);
    assert!(!diff["changes"].as_array().unwrap().is_empty(), "{diff}");

    // --snapshot has one file, or a folder of files, by a URL, too.
    let one = format!("{}/{}", place.url, snapshots[2]);
    for (url, revision) in [(&one, 43), (&place.url, 45)] {
        let (code, got, stderr) = place.run_on("--snapshot", url, "get", &[key]);
        assert_eq!((code, &got["revision"]), (0, &json!(revision)), "{stderr}");
    }
    let data = folder.join(format!("data-{}", fastrand::u64(..)));
    let to = ["--data-dir", data.to_str().unwrap(), "--time", &time];
    assert_eq!(place.succeeds("restore", &to)["revision"], 43);
    let etcd = Etcd::start(EtcdVersion::V3_6, &data);
    let revision = Runtime::new().unwrap().block_on(etcd.revision());
    assert_eq!(revision, 43);

    // What needs fulls and deltas is refused.
    for (command, args) in [("compact", &[][..]), ("gc", &["--policy", "limit"])] {
        let (code, json, _) = place.run(command, args);
        assert_eq!(
            (code, &json["reason"]),
            (66, &json!("NoSnapshots")),
            "{command}"
        );
    }
}

#[test]
fn folders_and_buckets_of_all_tools() {
    let runtime = Runtime::new().unwrap();
    let folder = scratch::folder().unwrap();
    let minio = Minio::start();
    let env = minio.env();
    for (nth, tool) in ["k3s", "k3s, zipped", "kops", "talos", "openshift"]
        .into_iter()
        .enumerate()
    {
        let (files, snapshots) = layout(tool);
        let local = folder.path().join(nth.to_string());
        let bucket = format!("plain-{nth}");
        runtime.block_on(minio.s3().create_bucket(&bucket, Kind::Plain));
        let store = minio.store(&bucket);
        for (name, content) in files {
            let path = local.join(&name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, &content).unwrap();
            let path = object_store::path::Path::parse(format!("cluster-a/{name}")).unwrap();
            runtime.block_on(store.put(&path, content.into())).unwrap();
        }
        for (url, env) in [
            (local.to_str().unwrap().to_owned(), &[][..]),
            (format!("s3://{bucket}/cluster-a"), &env),
        ] {
            eprintln!("{tool}: {url}");
            all_that_reads(&Place { url, env }, &snapshots, folder.path());
        }
        // One level too high.
        let url = format!("s3://{bucket}");
        let (code, json, _) = Place { url, env: &env }.run("list", &[]);
        let message = json["message"].as_str().unwrap();
        assert_eq!((code, &json["reason"]), (66, &json!("NoSnapshots")));
        let below = "below it: cluster-a (plain snapshots)";
        assert!(message.contains(below), "{tool}: {message}");
    }
}

#[test]
fn a_damaged_file_hides_no_other() {
    let folder = scratch::folder().unwrap();
    let (mut files, snapshots) = layout("k3s");
    for (name, content) in &mut files {
        if *name == snapshots[2] {
            content.truncate(5000);
        }
        fs::create_dir_all(folder.path().join(".metadata")).unwrap();
        fs::write(folder.path().join(name), content).unwrap();
    }
    let url = folder.path().to_str().unwrap().to_owned();
    let place = Place { url, env: &[] };
    let listed = place.succeeds("list", &[]);
    assert_eq!(listed["files"][2]["reason"], "CorruptSnapshot");
    let got = place.succeeds("get", &["/registry/a", "--revision", "42"]);
    assert_eq!(got["revision"], 42);
    let history = place.succeeds("history", &["/registry/a"]);
    assert!(history["warnings"].to_string().contains("left out"));
    let (code, json, _) = place.run("verify", &["--all-chains"]);
    assert_eq!((code, &json["reason"]), (65, &json!("CorruptSnapshot")));
}
