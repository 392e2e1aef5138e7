//! `compact` on MinIO: parts, tags, exit codes and signals.

use crate::support::made_backups::{Bucket, LAST, T0};
use crate::support::minio::Minio;
use crate::support::{copy_fixture, deltafold, expected, fixture_names, run_json, succeed};
use deltafold::backup::catalog::mark_of;
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;

/// Uploads a local folder to `bucket/prefix`.
async fn upload(minio: &Minio, bucket: &str, prefix: &str, from: &std::path::Path) {
    let store = minio.store(bucket);
    for entry in fs::read_dir(from.join("v2")).unwrap() {
        let file = entry.unwrap();
        let name = file.file_name().into_string().unwrap();
        let bytes = fs::read(file.path()).unwrap();
        let path = Path::from(format!("{prefix}/v2/{name}"));
        store.put(&path, PutPayload::from(bytes)).await.unwrap();
    }
}

/// Returns every object: path and content.
async fn objects(minio: &Minio, bucket: &str) -> BTreeMap<String, Vec<u8>> {
    let store = minio.store(bucket);
    let listed: Vec<_> = store.list(None).try_collect().await.unwrap();
    let mut all = BTreeMap::new();
    for object in listed {
        let bytes = store
            .get(&object.location)
            .await
            .unwrap()
            .bytes()
            .await
            .unwrap();
        all.insert(object.location.to_string(), bytes.to_vec());
    }
    all
}

fn run(minio: &Minio, command: &str, url: &str, args: &[&str]) -> (i32, Value, String) {
    let mut c = deltafold();
    c.envs(minio.env());
    c.args([command, "--output", "json", "--store", url])
        .args(args);
    run_json(&mut c)
}

#[tokio::test(flavor = "multi_thread")]
async fn who_writes_odd_keys_into_minio_disables_nothing() {
    let minio = Minio::start();
    minio.create_bucket("odd").await;
    let name = &fixture_names()[0];
    upload(&minio, "odd", "p", copy_fixture(name).path()).await;
    let mut odd = Vec::new();
    for (encoded, key) in [
        ("x%0Ay", "v2/x\ny"),
        ("x%0D", "v2/x\r"),
        ("%1B%5B2J", "v2/\u{1b}[2J"),
        ("a%20", "v2/a "),
        ("folder/", "v2/folder/"),
        ("a//b", "v2/a//b"),
    ] {
        let key_encoded = format!("p/v2/{encoded}");
        let status = minio.s3().put_odd("odd", &key_encoded, "rubbish").await;
        eprintln!("{key:?}: {status}");
        if status == 200 {
            odd.push(key);
        }
    }
    assert!(odd.len() >= 3, "MinIO takes few: {odd:?}");
    let (code, list, stderr) = run(&minio, "list", "s3://odd/p", &[]);
    assert_eq!(code, 0, "{stderr}");
    let problems = list["problems"].as_array().unwrap();
    let foreign = problems.iter().find(|p| p["reason"] == "ForeignObject");
    let foreign = foreign.unwrap()["snapshots"].as_array().unwrap();
    // MinIO lists characters that XML cannot express as U+FFFD.
    assert_eq!(foreign.len(), odd.len(), "{foreign:?}");
    assert!(foreign.contains(&json!("v2/x\ny")), "{foreign:?}");
    let (code, result, stderr) = run(&minio, "compact", "s3://odd/p", &[]);
    assert_eq!(code, 0, "{stderr}");
    let hash = expected(name).compacted_at_last_revision.hash;
    assert_eq!(result["hash_kv"], hash);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_snapshot_is_uploaded_in_parts_and_named_at_the_end() {
    let minio = Minio::start();
    minio.create_bucket("large").await;
    let local = Bucket::with_base();
    local.delta(747, LAST, 6);
    // 30 MB of noise, which does not compress.
    let mut rng = fastrand::Rng::with_seed(7);
    let events: Vec<Value> = (1..=60)
        .map(|i| {
            use base64::Engine as _;
            let base64 = base64::engine::general_purpose::STANDARD;
            let value: Vec<u8> = std::iter::repeat_with(|| rng.u8(..))
                .take(500_000)
                .collect();
            let revision = LAST + i;
            json!({"etcdEvent": {"kv": {
                "key": base64.encode(format!("large/{i}")), "create_revision": revision,
                "mod_revision": revision, "version": 1, "value": base64.encode(value),
            }}, "time": "2026-11-21T00:00:00Z"})
        })
        .collect();
    local.delta_of(LAST + 1, LAST + 60, 12, &events);
    upload(&minio, "large", "p", local.path()).await;
    // Another object has the name that it would get.
    let taken = format!("v2/Full-00000000-{:08}-{}.gz", LAST + 60, T0 + 13);
    let store = minio.store("large");
    store
        .put(&Path::from(format!("p/{taken}")), "another's".into())
        .await
        .unwrap();
    store
        .put(&Path::from(format!("p/{}", mark_of(&taken))), "".into())
        .await
        .unwrap();

    let (code, result, stderr) = run(&minio, "compact", "s3://large/p", &[]);
    assert_eq!(code, 0, "{stderr}");
    assert!(
        result["bytes_written"].as_u64().unwrap() > 25 << 20,
        "{result}"
    );
    let snapshot = result["snapshot"].as_str().unwrap();
    assert_eq!(
        snapshot,
        format!("Full-00000000-{:08}-{}.gz", LAST + 60, T0 + 14)
    );
    let on_disk = local.compact(&[]);
    assert_eq!(on_disk["hash_kv"], result["hash_kv"]);
    let on_disk = fs::read(
        local
            .path()
            .join("v2")
            .join(on_disk["snapshot"].as_str().unwrap()),
    )
    .unwrap();
    let all = objects(&minio, "large").await;
    assert!(all[&format!("p/v2/{snapshot}")] == on_disk);
    assert_eq!(all[&format!("p/{taken}")], b"another's");
    // Base, two deltas, the taken name with its marker, the result: nothing else is left.
    assert_eq!(all.len(), 6, "{:?}", all.keys());
    let local_names = fs::read_dir(local.path())
        .unwrap()
        .map(|e| e.unwrap().file_name());
    for name in local_names.filter(|n| n != "v2") {
        assert_eq!(
            fs::read_dir(local.path().join(&name)).unwrap().count(),
            0,
            "{name:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tagged_snapshot_is_not_used() {
    let minio = Minio::start();
    minio.create_bucket("tags").await;
    let local = Bucket::with_base();
    local.delta(747, LAST, 6);
    // Nothing else leads to its revision.
    let bad = format!("v2/Full-00000000-{:08}-{}.gz", LAST + 10, T0 + 8);
    local.put(&bad, b"damaged");
    upload(&minio, "tags", "p", local.path()).await;
    assert_eq!(run(&minio, "compact", "s3://tags/p", &[]).0, 65);
    let key = format!("p/{bad}");
    minio
        .set_tag("tags", &key, "x-etcd-snapshot-exclude", "false")
        .await;
    assert_eq!(run(&minio, "compact", "s3://tags/p", &[]).0, 65);
    minio
        .set_tag("tags", &key, "x-etcd-snapshot-exclude", "true")
        .await;
    let (_, list, _) = run(&minio, "list", "s3://tags/p", &[]);
    let excluded: Vec<_> = list["snapshots"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| s["excluded"].as_bool().unwrap())
        .collect();
    assert_eq!(excluded, [false, false, true]);
    let (code, result, stderr) = run(&minio, "compact", "s3://tags/p", &[]);
    assert_eq!(
        (code, result["revision"].as_i64()),
        (0, Some(LAST)),
        "{stderr}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_of_the_store_have_their_codes_and_show_no_secret() {
    let minio = Minio::start();
    minio.create_bucket("one").await;
    let local = copy_fixture("kubernetes");
    upload(&minio, "one", "p", local.path()).await;
    let with = |url: &str, env: &[(&str, &str)], args: &[&str]| {
        let mut c = deltafold();
        c.envs(minio.env()).envs(env.iter().copied());
        c.args(["compact", "--output", "json", "--store", url])
            .args(args);
        let (code, json, stderr) = run_json(&mut c);
        for shown in [json.to_string(), stderr] {
            assert!(
                !shown.contains(minio.secret_key()) && !shown.contains("hush-hush"),
                "{shown}"
            );
        }
        (code, json["reason"].as_str().unwrap_or_default().to_owned())
    };
    let reason = |code: i32, reason: &str| (code, reason.to_owned());
    let wrong_key = [("AWS_SECRET_ACCESS_KEY", "hush-hush-but-wrong")];
    assert_eq!(
        with("s3://one/p", &wrong_key, &[]),
        reason(77, "PermissionDenied")
    );
    assert_eq!(with("s3://two/p", &[], &[]), reason(66, "NoSnapshots"));
    assert_eq!(with("s3://one/empty", &[], &[]), reason(66, "NoSnapshots"));
    assert_eq!(
        with(
            "s3://one/p",
            &[],
            &["--store-option", "no_such_setting=hush-hush"]
        ),
        reason(78, "Configuration")
    );
    assert_eq!(
        with("s3://one/p", &[], &["--store-option", "hush-hush"]),
        reason(64, "Usage")
    );
    assert_eq!(
        with("s3://user:hush-hush@one/p", &[], &[]),
        reason(64, "Usage")
    );
    assert_eq!(with("ftp://one/p", &[], &[]), reason(64, "Usage"));
    let nobody = format!("http://127.0.0.1:{}", crate::support::process::free_port());
    assert_eq!(
        with(
            "s3://one/p",
            &[],
            &[
                "--store-option",
                &format!("endpoint={nobody}"),
                "--store-option",
                "max_retries=1"
            ]
        ),
        reason(69, "StoreUnreachable")
    );
    // Without these variables it works, with all settings given as options.
    let mut c = deltafold();
    c.args(["compact", "--output", "json", "--store", "s3://one/p"]);
    c.args(["--store-option", &format!("endpoint={}", minio.endpoint())]);
    c.args(["--store-option", "region=us-east-1"]);
    c.env(
        "DELTAFOLD_STORE_OPTION",
        "ignored=for the command line wins",
    );
    c.args([
        "--store-option",
        &format!("access_key_id={}", minio.access_key()),
    ]);
    c.args([
        "--store-option",
        &format!("secret_access_key={}", minio.secret_key()),
    ]);
    let (code, result, stderr) = run_json(&mut c);
    assert_eq!(
        (code, result["status"].as_str()),
        (0, Some("Succeeded")),
        "{stderr}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_may_be_the_whole_bucket_and_the_endpoint_s3s_own() {
    let minio = Minio::start();
    minio.create_bucket("whole").await;
    let local = copy_fixture("kubernetes");
    upload(&minio, "whole", "", local.path()).await;
    for url in ["s3://whole", "s3://whole/"] {
        let mut c = deltafold();
        c.envs(minio.env());
        c.env_remove("AWS_ALLOW_HTTP")
            .env_remove("AWS_ENDPOINT_URL")
            .env_remove("AWS_ENDPOINT");
        c.env("AWS_ENDPOINT_URL_S3", minio.endpoint());
        c.args(["compact", "--output", "json", "--store", url]);
        let result = succeed(&mut c);
        assert_eq!(result["revision"], 628);
        assert_eq!(result["warnings"].as_array().unwrap().len(), 0, "{result}");
    }
    assert_eq!(objects(&minio, "whole").await.len(), 7);
}

#[test]
fn a_signal_ends_a_job_whose_store_hangs() {
    use std::io::Read;
    // A server that accepts connections and never responds.
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut c = deltafold();
    c.args(["compact", "--output", "json", "--store", "s3://bucket/p"]);
    c.args([
        "--store-option",
        &format!("endpoint=http://{}", server.local_addr().unwrap()),
    ]);
    c.args([
        "--store-option",
        "access_key_id=a",
        "--store-option",
        "secret_access_key=b",
    ]);
    c.stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let mut job = c.spawn().unwrap();
    let (mut asked, _) = server.accept().unwrap();
    asked.read_exact(&mut [0; 3]).unwrap();
    let pid = rustix::process::Pid::from_child(&job);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(job.wait().unwrap().code(), Some(143));
    let mut out = String::new();
    job.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (&json["reason"], &json["code"]),
        (&json!("Terminated"), &json!(143))
    );
}
