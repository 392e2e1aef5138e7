//! What k3s, RKE2, RKE1, kOps, Talos, OpenShift and a script on a kubeadm node leave, in a folder and in a bucket: read by
//! pattern, imported, and restored at any night with a real etcd.

use crate::support::etcd::{Etcd, EtcdVersion, etcdutl_restore, etcdutl_status};
use crate::support::history::Compression;
use crate::support::minio::Minio;
use crate::support::s3::Kind;
use crate::support::tiny_backup::zip;
use crate::support::{deltafold, run_json, scratch, tools};
use chrono::{DateTime, TimeDelta, Utc};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use tokio::runtime::Runtime;

/// How a tool names its files: the pattern of the series, the form of a name, the file beside it, and how it is packed.
/// These are the rows of the table in docs/guides/snapshot-files.md.
const TOOLS: [(&str, &str, &str, Option<&str>, &str); 7] = [
    (
        "k3s",
        "etcd-snapshot-server1-*",
        "etcd-snapshot-server1-%s",
        Some(".metadata/etcd-snapshot-server1-%s"),
        "",
    ),
    (
        "RKE2",
        "etcd-snapshot-server1-*.zip",
        "etcd-snapshot-server1-%s.zip",
        Some(".metadata/etcd-snapshot-server1-%s.zip"),
        "zip",
    ),
    (
        "RKE1",
        "c-abcde-rl-xyz_*.zip",
        "c-abcde-rl-xyz_%Y-%m-%dT%H:%M:%SZ.zip",
        None,
        "zip",
    ),
    (
        "kOps",
        "*/etcd.backup.gz",
        "%Y-%m-%dT%H:%M:%SZ-000001/etcd.backup.gz",
        Some("%Y-%m-%dT%H:%M:%SZ-000001/_etcd_backup.meta"),
        "gzip",
    ),
    (
        "Talos",
        "prod-*.snap",
        "prod-%Y-%m-%dT%H:%M:%SZ.snap",
        None,
        "",
    ),
    (
        "OpenShift",
        "snapshot_*.db",
        "snapshot_%Y-%m-%d_%H%M%S.db",
        Some("static_kuberesources_%Y-%m-%d_%H%M%S.tar.gz"),
        "",
    ),
    (
        "kubeadm",
        "etcd-*.db",
        "etcd-%Y-%m-%d_%H-%M.db",
        Some("etcd-%Y-%m-%d_%H-%M.db.sha256"),
        "",
    ),
];

struct Night {
    at: DateTime<Utc>,
    revision: i64,
    content: Vec<u8>,
}

/// Five nights of a real etcd.
fn nights(runtime: &Runtime, folder: &Path) -> Vec<Night> {
    let etcd = Etcd::start(EtcdVersion::V3_6, &folder.join("source"));
    let mut nights = Vec::new();
    for nth in 0..5 {
        for key in 0..3 {
            runtime
                .block_on(etcd.put_when_led(&format!("/registry/{key}"), &format!("night {nth}")));
        }
        // Minutes alone are in some names.
        let at = Utc::now() - TimeDelta::days(5 - nth);
        let at = DateTime::from_timestamp(at.timestamp() / 60 * 60, 0).unwrap();
        nights.push(Night {
            at,
            revision: runtime.block_on(etcd.revision()),
            content: runtime.block_on(etcd.snapshot()),
        });
    }
    nights
}

fn run(env: &[(String, String)], args: &[&str]) -> (i32, Value) {
    let mut c = deltafold();
    c.envs(env.iter().cloned());
    let (code, json, stderr) = run_json(c.args(args).args(["--output", "json"]));
    eprintln!("{args:?}: {code} {stderr}");
    (code, json)
}

fn succeeds(env: &[(String, String)], args: &[&str]) -> Value {
    let (code, json) = run(env, args);
    assert_eq!(code, 0, "{args:?}: {json:#}");
    json
}

/// Restores with these flags, and asserts that an etcd serves this revision.
fn restores(
    runtime: &Runtime,
    env: &[(String, String)],
    folder: &Path,
    flags: &[&str],
    revision: i64,
) {
    let data = folder.join(format!("data-{}", fastrand::u64(..)));
    let to = ["restore", "--data-dir", data.to_str().unwrap()];
    let restored = succeeds(env, &[&to[..], flags].concat());
    assert_eq!(restored["revision"], revision, "{flags:?}");
    let etcd = Etcd::start(EtcdVersion::V3_6, &data);
    assert_eq!(runtime.block_on(etcd.revision()), revision);
}

#[test]
fn folders_and_buckets_of_all_tools() {
    let runtime = Runtime::new().unwrap();
    let folder = scratch::folder().unwrap();
    let nights = nights(&runtime, folder.path());
    let minio = Minio::start();
    for (nth, (tool, pattern, form, beside, packing)) in TOOLS.into_iter().enumerate() {
        let local = folder.path().join(nth.to_string());
        let bucket = format!("files-{nth}");
        runtime.block_on(minio.s3().create_bucket(&bucket, Kind::Plain));
        let store = minio.store(&bucket);
        let put = |name: &str, content: &[u8]| {
            let path = local.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
            let path = object_store::path::Path::parse(format!("cluster-a/{name}")).unwrap();
            runtime
                .block_on(object_store::ObjectStoreExt::put(
                    &store,
                    &path,
                    content.to_vec().into(),
                ))
                .unwrap();
        };
        for night in &nights {
            let content = match packing {
                "zip" => zip(&night.content),
                "gzip" => Compression::Gzip.pack(&night.content),
                _ => night.content.clone(),
            };
            put(&night.at.format(form).to_string(), &content);
            if let Some(beside) = beside {
                put(&night.at.format(beside).to_string(), b"{}");
            }
        }
        let url = format!("s3://{bucket}/cluster-a");
        let copy = format!("s3://{bucket}/copy");
        let local_copy = folder.path().join(format!("{nth}-copy"));
        for (place, to, env) in [
            (
                local.to_str().unwrap(),
                local_copy.to_str().unwrap(),
                &[][..],
            ),
            (&url, &copy, &minio.env()),
        ] {
            eprintln!("{tool}: {place}");
            let series = format!("{place}/{pattern}");
            // The folder says what to give.
            let list = succeeds(env, &["list", "--store", place]);
            assert_eq!(list["files"].as_array().unwrap().len(), 5, "{list:#}");
            let next = list["next"].as_str().unwrap();
            assert!(next.contains(&series), "{next}");
            let deep = succeeds(env, &["list", "--store", place, "--deep"]);
            assert_eq!(deep["latest_revision"], nights[4].revision, "{deep:#}");
            let middle = nights[2].at + TimeDelta::hours(1);
            let time = middle.to_rfc3339();
            let etcd = tools::etcd(EtcdVersion::V3_6);
            let etcd = etcd.to_str().unwrap();
            let verified = succeeds(
                env,
                &[
                    "verify",
                    "--snapshot",
                    &series,
                    "--max-age",
                    "26h",
                    "--etcd-binary",
                    etcd,
                ],
            );
            assert_eq!(verified["drill"]["succeeded"], true, "{verified:#}");
            let (code, stale) = run(env, &["verify", "--snapshot", &series, "--max-age", "2h"]);
            assert_eq!((code, &stale["reason"]), (75, &json!("Stale")));
            restores(
                &runtime,
                env,
                folder.path(),
                &["--snapshot", &series, "--time", &time],
                nights[2].revision,
            );

            // Each night, from the import on.
            let import = ["copy", "--from-snapshots", &series, "--to", to];
            let imported = succeeds(env, &import);
            assert_eq!(imported["copied"], 5, "{imported:#}");
            let again = succeeds(env, &import);
            assert_eq!((&again["copied"], &again["kept"]), (&json!(0), &json!(5)));
            let list = succeeds(env, &["list", "--store", to]);
            for (listed, night) in list["snapshots"].as_array().unwrap().iter().zip(&nights) {
                assert_eq!(listed["last_revision"], night.revision);
                assert_eq!(listed["created"], json!(night.at), "{tool}");
            }
            let at = |nth: usize| nights[nth].at.to_rfc3339();
            let some = [nth % 5, (nth + 2) % 5];
            for nth in some {
                let flags = ["--store", to, "--time", &at(nth)];
                restores(&runtime, env, folder.path(), &flags, nights[nth].revision);
            }
            let verified = succeeds(env, &["verify", "--store", to, "--all-chains"]);
            assert_eq!(verified["verdict"], "Verified");
            let status = succeeds(env, &["status", "--store", to, "--max-age", "26h"]);
            assert_eq!(status["verdict"], "Healthy", "{status:#}");
            let history = succeeds(env, &["history", "/registry/0", "--store", to]);
            assert!(history["versions"].as_array().unwrap().len() >= 5);
            let gc = [
                "gc",
                "--store",
                to,
                "--policy",
                "limit",
                "--limit",
                "2",
                "--restorable-window",
                "36h",
                "--apply",
            ];
            let removed = succeeds(env, &gc);
            assert_eq!(removed["totals"]["deleted"]["objects"], 3, "{removed:#}");
            // What was removed does not come back.
            let again = succeeds(env, &import);
            assert_eq!(
                (&again["copied"], &again["kept"], &again["skipped"]),
                (&json!(0), &json!(2), &json!(3))
            );
        }
        // One level too high.
        let (code, json) = run(
            &minio.env(),
            &["list", "--store", &format!("s3://{bucket}")],
        );
        let message = json["message"].as_str().unwrap();
        assert_eq!((code, &json["reason"]), (66, &json!("NoSnapshots")));
        assert!(
            message.contains("copy (fulls and deltas)"),
            "{tool}: {message}"
        );
    }
}

/// `--follow` imports what comes.
#[test]
fn a_follower_imports_each_new_file() {
    let folder = scratch::folder().unwrap();
    let runtime = Runtime::new().unwrap();
    let nights = nights(&runtime, folder.path());
    let name = |night: &Night| folder.path().join(format!("f/e-{}", night.at.timestamp()));
    fs::create_dir(folder.path().join("f")).unwrap();
    fs::write(name(&nights[0]), &nights[0].content).unwrap();
    let to = folder.path().join("to");
    let mut c = deltafold();
    c.args([
        "copy",
        "--follow",
        "--interval",
        "100ms",
        "--output",
        "json",
        "--from-snapshots",
    ]);
    c.arg(folder.path().join("f/e-*")).arg("--to").arg(&to);
    let mut child = c.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let fulls = || fs::read_dir(to.join("v2")).into_iter().flatten().count();
    for (nth, night) in nights.iter().enumerate() {
        fs::write(name(night).with_extension("tmp"), &night.content).unwrap();
        fs::rename(name(night).with_extension("tmp"), name(night)).unwrap();
        while fulls() <= nth {
            assert!(child.try_wait().unwrap().is_none());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (output.status.code(), &json["copied"]),
        (Some(0), &json!(5)),
        "{json:#}"
    );
}

/// A user moves from k3s to deltafold, and back.
#[test]
fn files_become_a_chain_and_a_chain_becomes_a_file() {
    let folder = scratch::folder().unwrap();
    let runtime = Runtime::new().unwrap();
    let minio = Minio::start();
    runtime.block_on(minio.s3().create_bucket("plain", Kind::Plain));
    let env = minio.env();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let etcd = Etcd::start(EtcdVersion::V3_6, &folder.path().join("data"));
    let put = |key: &str| runtime.block_on(etcd.put_when_led(key, "value"));
    let endpoints = ["--endpoints", etcd.endpoint()];
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kube-system", "uid": "u-1"}});
    let namespace = namespace.to_string();
    runtime.block_on(etcd.put_when_led("/registry/namespaces/kube-system", &namespace));
    fs::create_dir(path("k3s")).unwrap();
    let mut saved = Vec::new();
    for hour in [3, 2, 1] {
        put(&format!("/registry/{hour}"));
        let at = (Utc::now() - TimeDelta::hours(hour)).timestamp();
        let file = path(&format!("k3s/etcd-snapshot-node-{at}"));
        let json = succeeds(
            &env,
            &[&["snapshot", "save", &file], &endpoints[..]].concat(),
        );
        let revision = runtime.block_on(etcd.revision());
        assert_eq!(json["revision"], revision);
        let status = etcdutl_status(EtcdVersion::V3_6, Path::new(&file));
        assert_eq!(status["revision"], revision);
        saved.push(file);
    }
    let (code, json) = run(
        &env,
        &[&["snapshot", "save", &saved[0]], &endpoints[..]].concat(),
    );
    assert_eq!((code, &json["reason"]), (73, &json!("TargetExists")));
    let diff = succeeds(&env, &["diff", &saved[0], &saved[1]]);
    assert_eq!(diff["changes"].as_array().unwrap().len(), 1, "{diff:#}");

    // Deltas follow the import. From then on, the files are no longer imported.
    let chain = path("chain");
    let series = path("k3s/etcd-snapshot-node-*");
    let import = ["copy", "--from-snapshots", &series, "--to", &chain];
    assert_eq!(succeeds(&env, &import)["copied"], 3);
    put("/registry/later");
    let delta = succeeds(
        &env,
        &[&["snapshot", "delta", "--store", &chain], &endpoints[..]].concat(),
    );
    assert_eq!(delta["full_reason"], Value::Null, "{delta:#}");
    // The files tell the namespace alone, and the live etcd its ID.
    let list = succeeds(&env, &["list", "--store", &chain]);
    assert_eq!(list["identity"]["kube_system_uid"], "u-1", "{list:#}");
    assert!(list["identity"]["cluster_id"].is_string(), "{list:#}");
    let verified = succeeds(
        &env,
        &[&["verify", "--store", &chain], &endpoints[..]].concat(),
    );
    assert_eq!(verified["verdict"], "Equal", "{verified:#}");
    let (code, json) = run(&env, &import);
    assert_eq!((code, &json["reason"]), (64, &json!("Usage")));

    // etcdutl takes what is written to a bucket.
    let url = "s3://plain/by-hand/before.db";
    succeeds(&env, &["restore", "--store", &chain, "--to-snapshot", url]);
    let got = succeeds(&env, &["get", "/registry/later", "--snapshot", url]);
    let revision = got["revision"].as_i64().unwrap();
    let object = object_store::path::Path::from("by-hand/before.db");
    let bytes = runtime.block_on(async {
        let got = object_store::ObjectStoreExt::get(&minio.store("plain"), &object)
            .await
            .unwrap();
        got.bytes().await.unwrap()
    });
    fs::write(path("before.db"), bytes).unwrap();
    let data = folder.path().join("by-etcdutl");
    etcdutl_restore(EtcdVersion::V3_6, Path::new(&path("before.db")), &data).unwrap();
    let restored = Etcd::start(EtcdVersion::V3_6, &data);
    assert_eq!(runtime.block_on(restored.revision()), revision);
}
