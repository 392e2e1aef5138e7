//! Plain snapshots as a store: what k3s, kOps, Talos and OpenShift leave, in a folder and in a bucket.

use crate::support::etcd::{Etcd, EtcdVersion, etcdutl_restore, etcdutl_status};
use crate::support::gc_history::NEWEST_FULL;
use crate::support::history::Compression;
use crate::support::minio::Minio;
use crate::support::s3::Kind;
use crate::support::tiny_backup::{plain_snapshot, zip};
use crate::support::{copy_dir, deltafold, run_json, scratch};
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
            "openshift" => name
                .replace("snapshot_", "static_kuberesources_")
                .replace(".db", ".tar.gz"),
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
        // A subcommand comes before the flags.
        let subcommand = args
            .first()
            .filter(|a| command == "snapshot" && !a.starts_with('-'));
        c.arg(command).args(subcommand);
        c.args(["--output", "json", flag, url]);
        c.args(&args[usize::from(subcommand.is_some())..]);
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
    let (code, json, _) = place.run("compact", &[]);
    assert_eq!((code, &json["reason"]), (66, &json!("NoSnapshots")));
}

/// The paths of a listing of objects with this decision, of what it counts as a snapshot or not.
fn decided<'o>(outcome: &'o Value, decision: &str, is_full: bool) -> Vec<&'o str> {
    let objects = outcome["objects"].as_array().unwrap().iter();
    objects
        .filter(|o| o["decision"] == decision && (o["kind"] == "Full") == is_full)
        .map(|o| o["path"].as_str().unwrap())
        .collect()
}

/// Retention, and copies as they are and as fulls.
fn housekeeping(place: &Place<'_>, snapshots: &[String], other: &str) {
    let copy_to = |to: &str, args: &[&str]| {
        let args = [&["--to", to], args].concat();
        let (code, json, stderr) = place.run_on("--from", &place.url, "copy", &args);
        assert_eq!(code, 0, "{to}: {json:#} {stderr}");
        json
    };
    let (plain, chain) = (format!("{other}-plain"), format!("{other}-chain"));
    assert_eq!(copy_to(&plain, &[])["copied"], 5);
    assert_eq!(copy_to(&plain, &[])["kept"], 5);
    let copy = Place {
        url: plain,
        env: place.env,
    };
    let listed = copy.succeeds("list", &[]);
    assert_eq!(names(&listed), snapshots);
    copy.succeeds("verify", &["--all-chains"]);

    let few = copy_to(&chain, &["--layout", "chain", "--max-backups", "2"]);
    assert_eq!((&few["copied"], &few["skipped"]), (&json!(2), &json!(3)));
    let again = copy_to(&chain, &[]);
    let counts = (&again["copied"], &again["kept"], &again["skipped"]);
    assert_eq!(counts, (&json!(0), &json!(2), &json!(3)), "{again:#}");
    let copy = Place {
        url: chain,
        env: place.env,
    };
    let deep = copy.succeeds("list", &["--deep"]);
    let fulls = deep["snapshots"].as_array().unwrap().iter();
    let revisions: Vec<&Value> = fulls.map(|f| &f["last_revision"]).collect();
    assert_eq!(revisions, [&json!(44), &json!(45)]);
    assert_eq!(deep["timelines"].as_array().unwrap().len(), 1, "{deep:#}");
    copy.succeeds("verify", &[]);

    let policy = [
        "--policy",
        "limit",
        "--limit",
        "3",
        "--restorable-window",
        "0s",
    ];
    let dry = place.succeeds("gc", &policy);
    assert_eq!(decided(&dry, "Delete", true), snapshots[..2]);
    let beside = decided(&dry, "Delete", false).len();
    let has_beside = !snapshots[0].ends_with("Z.db") || snapshots[0].starts_with("snapshot_");
    assert_eq!(beside, if has_beside { 2 } else { 0 }, "{dry:#}");
    let done = place.succeeds("gc", &[&policy[..], &["--apply"]].concat());
    assert_eq!(done["totals"]["deleted"]["objects"], 2 + beside, "{done:#}");
    let listed = place.succeeds("list", &[]);
    assert_eq!(names(&listed), snapshots[2..]);
    let again = place.succeeds("gc", &policy);
    assert_eq!(again["status"], "NothingToDo", "{again:#}");
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
            let other = match env.is_empty() {
                true => format!("{url}-copy"),
                false => format!("s3://{bucket}/copy"),
            };
            let place = Place { url, env };
            all_that_reads(&place, &snapshots, folder.path());
            housekeeping(&place, &snapshots, &other);
        }
        // One level too high.
        let url = format!("s3://{bucket}");
        let (code, json, _) = Place { url, env: &env }.run("list", &[]);
        let message = json["message"].as_str().unwrap();
        assert_eq!((code, &json["reason"]), (66, &json!("NoSnapshots")));
        let below = "below it: cluster-a (plain snapshots), copy-chain (fulls and deltas), copy-plain (plain snapshots)";
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

/// Returns a folder as a store.
fn in_folder(folder: &Path) -> Place<'static> {
    Place {
        url: folder.to_str().unwrap().to_owned(),
        env: &[],
    }
}

fn run_live(etcd: &Etcd, args: &[&str]) -> (i32, Value, String) {
    let mut c = deltafold();
    c.args(args).args(["--output", "json"]);
    run_json(c.args(["--endpoints", etcd.endpoint()]))
}

/// The files of several nodes are one history if they hold one.
#[test]
fn nodes_of_one_cluster_are_one_history_and_those_of_two_are_told_apart() {
    let folder = scratch::folder().unwrap();
    let at = |hour: i64| (Utc::now() - TimeDelta::hours(hour)).timestamp();
    let put = |node: &str, hour: i64, content: &[u8]| {
        let name = format!("etcd-snapshot-{node}-{}", at(hour));
        fs::write(folder.path().join(name), content).unwrap();
    };
    for (node, hour, last) in [("a", 5, 41), ("b", 5, 42), ("a", 3, 44), ("b", 3, 43)] {
        put(node, hour, &plain_snapshot(last));
    }
    let place = in_folder(folder.path());
    let key = "/registry/a";
    let newest = place.succeeds("get", &[key]);
    assert!([44, 43].contains(&newest["revision"].as_i64().unwrap()));
    let of_a = place.succeeds("get", &[key, "--timeline", "a"]);
    assert_eq!(of_a["revision"], 44);
    place.succeeds("history", &[key]);

    let runtime = Runtime::new().unwrap();
    let data = scratch::folder().unwrap();
    let etcd = Etcd::start(EtcdVersion::V3_6, &data.path().join("data"));
    let other = runtime.block_on(async {
        for nth in 0..5 {
            etcd.put_when_led(&format!("/registry/{nth}"), "another")
                .await;
        }
        etcd.snapshot().await
    });
    put("c", 1, &other);
    for command in ["get", "history"] {
        let (code, json, _) = place.run(command, &[key]);
        let message = json["message"].as_str().unwrap();
        assert_eq!(
            (code, &json["reason"]),
            (65, &json!("InterleavedTimelines"))
        );
        assert!(message.contains("one of a, b, c"), "{message}");
    }
    assert_eq!(
        place.succeeds("get", &[key, "--timeline", "b"])["revision"],
        43
    );
    let (code, json, _) = place.run("get", &[key, "--timeline", "d"]);
    assert_eq!((code, &json["reason"]), (66, &json!("NoSuchTimeline")));
    let listed = place.succeeds("list", &[]);
    assert_eq!(listed["files"][4]["node"], "c", "{listed:#}");
    // Each node's files are counted by themselves.
    let gone = place.succeeds("gc", &NEWEST_FULL[1..]);
    let gone = decided(&gone, "Delete", true);
    assert_eq!(gone.len(), 2, "{gone:?}");
    assert!(gone.iter().all(|path| !path.contains("-c-")), "{gone:?}");
    let to = data.path().join("chain");
    let args = ["--to", to.to_str().unwrap(), "--layout", "chain"];
    let (code, json, _) = place.run_on("--from", &place.url, "copy", &args);
    assert_eq!(
        (code, &json["reason"]),
        (65, &json!("InterleavedTimelines"))
    );
}

#[test]
fn a_folder_of_both_layouts_asks_which_is_meant() {
    let folder = scratch::folder().unwrap();
    let place = in_folder(folder.path());
    let (files, _) = layout("k3s");
    fs::create_dir_all(folder.path().join(".metadata")).unwrap();
    for (name, content) in &files {
        fs::write(folder.path().join(name), content).unwrap();
    }
    let data = scratch::folder().unwrap();
    let etcd = Etcd::start(EtcdVersion::V3_6, &data.path().join("data"));
    // Nothing that is saved makes such a prefix.
    for args in [&["snapshot", "full"][..], &["snapshot", "delta"]] {
        let (code, json, _) = run_live(&etcd, &[args, &["--store", &place.url]].concat());
        let message = json["message"].as_str().unwrap();
        assert_eq!((code, &json["reason"]), (66, &json!("NoSnapshots")));
        assert!(message.contains("holds plain snapshots"), "{message}");
    }
    let (code, _, stderr) = run_live(
        &etcd,
        &[
            "snapshot",
            "full",
            "--store",
            data.path().join("s").to_str().unwrap(),
        ],
    );
    assert_eq!(code, 0, "{stderr}");
    let v2 = data.path().join("s/v2");
    fs::rename(v2, folder.path().join("v2")).unwrap();
    for (command, args) in [
        ("list", &[][..]),
        ("get", &["/registry/a"]),
        ("gc", &["--policy", "limit"]),
    ] {
        let (code, json, _) = place.run(command, args);
        let message = json["message"].as_str().unwrap();
        assert_eq!((code, &json["reason"]), (64, &json!("Usage")), "{command}");
        assert!(message.contains("--layout"), "{message}");
    }
    let plain = place.succeeds("list", &["--layout", "plain"]);
    assert_eq!(plain["latest_revision"], 45);
    let chain = place.succeeds("list", &["--layout", "chain"]);
    assert_eq!(chain["snapshots"].as_array().unwrap().len(), 1);

    // In a bucket, too; but what saves goes on.
    let runtime = Runtime::new().unwrap();
    let minio = Minio::start();
    let env = minio.env();
    runtime.block_on(minio.s3().create_bucket("both", Kind::Plain));
    let url = "s3://both/p".to_owned();
    let copy = ["--to", &url, "--layout", "chain"];
    let mut c = deltafold();
    c.envs(env.iter().cloned())
        .args(["copy", "--output", "json"]);
    let (code, _, stderr) = run_json(c.args(["--from", &place.url]).args(copy));
    assert_eq!(code, 0, "{stderr}");
    let store = minio.store("both");
    let (name, content) = files
        .into_iter()
        .find(|(name, _)| !name.starts_with('.'))
        .unwrap();
    let path = object_store::path::Path::parse(format!("p/{name}")).unwrap();
    runtime.block_on(store.put(&path, content.into())).unwrap();
    let place = Place { url, env: &env };
    let (code, json, _) = place.run("list", &[]);
    assert_eq!((code, &json["reason"]), (64, &json!("Usage")), "{json:#}");
    assert!(json["message"].as_str().unwrap().contains(&name));
    assert_eq!(
        place.succeeds("list", &["--layout", "plain"])["files"][0]["name"],
        name
    );
    place.succeeds("status", &["--layout", "chain"]);
    place.succeeds("snapshot", &["full", "--endpoints", etcd.endpoint()]);
    place.succeeds("compact", &[]);
}

/// A user moves from k3s to deltafold, and back.
#[test]
fn plain_snapshots_become_a_chain_and_a_chain_becomes_one() {
    let folder = scratch::folder().unwrap();
    let runtime = Runtime::new().unwrap();
    let minio = Minio::start();
    runtime.block_on(minio.s3().create_bucket("plain", Kind::Plain));
    let env = minio.env();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let etcd = Etcd::start(EtcdVersion::V3_6, &folder.path().join("data"));
    let put = |key: &str| runtime.block_on(etcd.put_when_led(key, "value"));
    fs::create_dir(path("k3s")).unwrap();
    let mut saved = Vec::new();
    for hour in [3, 2, 1] {
        put(&format!("/registry/{hour}"));
        let at = (Utc::now() - TimeDelta::hours(hour)).timestamp();
        let file = path(&format!("k3s/etcd-snapshot-node-{at}"));
        let (code, json, stderr) = run_live(&etcd, &["snapshot", "save", &file]);
        assert_eq!(code, 0, "{stderr}");
        let revision = runtime.block_on(etcd.revision());
        assert_eq!(json["revision"], revision);
        let status = etcdutl_status(EtcdVersion::V3_6, Path::new(&file));
        assert_eq!(status["revision"], revision);
        saved.push(file);
    }
    let (code, json, _) = run_live(&etcd, &["snapshot", "save", &saved[0]]);
    assert_eq!((code, &json["reason"]), (73, &json!("TargetExists")));
    let mut c = deltafold();
    c.env("DELTAFOLD_STORE", "/nowhere");
    let (code, diff, stderr) = run_json(c.args(["diff", &saved[0], &saved[1], "--output", "json"]));
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(diff["changes"].as_array().unwrap().len(), 1, "{diff:#}");

    // Deltas follow the copies.
    let chain = path("chain");
    let copy = [
        "copy",
        "--from",
        &path("k3s"),
        "--to",
        &chain,
        "--layout",
        "chain",
    ];
    let (code, copied, stderr) = run_json(deltafold().args(copy).args(["--output", "json"]));
    assert_eq!((code, &copied["copied"]), (0, &json!(3)), "{stderr}");
    // Files of another cluster are refused, until they are said to be those of its successor.
    let (other, both) = (path("other"), path("both"));
    fs::create_dir(&other).unwrap();
    for (seconds, last) in [(60, 41), (30, 42)] {
        let at = Utc::now().timestamp() - seconds;
        let name = format!("{other}/etcd-snapshot-node-{at}");
        fs::write(name, plain_snapshot(last)).unwrap();
    }
    copy_dir(Path::new(&chain), Path::new(&both));
    let args = ["copy", "--output", "json", "--from", &other, "--to", &both];
    let (code, refused, _) = run_json(deltafold().args(args));
    assert_eq!((code, &refused["reason"]), (65, &json!("OtherCluster")));
    assert_eq!(
        (&refused["copied"], &refused["failed"]),
        (&json!(0), &json!(2))
    );
    let (code, taken, stderr) = run_json(deltafold().args(args).arg("--take-over"));
    assert_eq!((code, &taken["copied"]), (0, &json!(2)), "{stderr}");
    let deep = in_folder(Path::new(&both)).succeeds("list", &["--deep"]);
    assert_eq!(deep["timelines"].as_array().unwrap().len(), 2, "{deep:#}");
    let newest = in_folder(Path::new(&both)).succeeds("get", &["/registry/a"]);
    assert_eq!(newest["revision"], 42);

    put("/registry/later");
    let (code, delta, stderr) = run_live(&etcd, &["snapshot", "delta", "--store", &chain]);
    assert_eq!((code, &delta["full_reason"]), (0, &Value::Null), "{stderr}");
    let place = in_folder(Path::new(&chain));
    let verified = place.succeeds("verify", &["--endpoints", etcd.endpoint()]);
    assert_eq!(verified["status"], "Equal", "{verified:#}");
    let (code, json, _) = run_json(deltafold().args(copy).args(["--output", "json"]));
    assert_eq!((code, &json["reason"]), (64, &json!("Usage")));

    // etcdutl takes what is written to a bucket.
    let url = "s3://plain/by-hand/before.db";
    let place = Place {
        url: chain,
        env: &env,
    };
    let written = place.succeeds("restore", &["--to-snapshot", url]);
    assert_eq!(written["snapshot_file"], url);
    let store = minio.store("plain");
    let bytes = runtime.block_on(async {
        let object = store.get(&"by-hand/before.db".into()).await.unwrap();
        object.bytes().await.unwrap()
    });
    fs::write(path("before.db"), bytes).unwrap();
    etcdutl_restore(
        EtcdVersion::V3_6,
        Path::new(&path("before.db")),
        Path::new(&path("restored")),
    )
    .unwrap();
    let revision = runtime.block_on(etcd.revision());
    let hash = runtime.block_on(etcd.hash_kv(revision)).hash;
    let restored = Etcd::start(EtcdVersion::V3_6, Path::new(&path("restored")));
    assert_eq!(runtime.block_on(restored.hash_kv(revision)).hash, hash);
    let (code, json, _) = place.run("restore", &["--to-snapshot", url]);
    assert_eq!((code, &json["reason"]), (73, &json!("TargetExists")));
}
