//! `deltafold lock` on real servers: locked objects stay, a lock only grows, and a server that only claims to
//! lock is detected.

use crate::support::lying_s3::{Lies, LyingServer};
use crate::support::minio::Minio;
use crate::support::s3::{Kind, S3};
use crate::support::schema::Schema;
use crate::support::versitygw::Versitygw;
use crate::support::{copy_fixture, deltafold, run_json};
use chrono::{DateTime, TimeDelta, Utc};
use deltafold::error::Reason;
use deltafold::store::Mode;
use object_store::ObjectStoreExt as _;
use object_store::path::Path;
use object_store::signer::Method;
use serde_json::Value;

/// Uploads a backup to `p/`. Returns its paths, sorted: a full and its deltas, one history.
async fn upload(s3: &S3, bucket: &str) -> Vec<String> {
    let fixture = copy_fixture("kubernetes");
    let mut paths = Vec::new();
    for file in std::fs::read_dir(fixture.path().join("v2")).unwrap() {
        let file = file.unwrap();
        let path = format!("v2/{}", file.file_name().into_string().unwrap());
        let content = std::fs::read(file.path()).unwrap();
        let key = Path::from(format!("p/{path}"));
        s3.store(bucket).put(&key, content.into()).await.unwrap();
        paths.push(path);
    }
    paths.sort();
    paths
}

fn lock(s3: &S3, bucket: &str, args: &[&str]) -> (i32, Value, String) {
    let mut c = deltafold();
    c.envs(s3.env()).args(["lock", "--output", "json"]);
    c.args(["--store", &format!("s3://{bucket}/p")]);
    c.args(["--store-option", "max_retries=1"]).args(args);
    let (code, outcome, stderr) = run_json(&mut c);
    // Even for a wrong command line, the JSON matches its schema.
    Schema::of("lock").check(&outcome);
    (code, outcome, stderr)
}

/// Returns mode and time of an object's lock, according to the server.
async fn retention(s3: &S3, bucket: &str, path: &str) -> Option<(String, DateTime<Utc>)> {
    let key = format!("p/{path}");
    let query = [("retention", "")];
    let (status, xml) = s3.ask(Method::GET, (bucket, &key), &query, &[], "").await;
    let element = |name: &str| {
        let rest = xml.split_once(&format!("<{name}>"))?.1;
        Some(rest.split_once(&format!("</{name}>"))?.0.to_owned())
    };
    match (status, element("Mode"), element("RetainUntilDate")) {
        (200, Some(mode), Some(until)) => Some((mode, until.parse().unwrap())),
        _ => None,
    }
}

fn is_about(got: DateTime<Utc>, from_now: TimeDelta) -> bool {
    let off = got - (Utc::now() + from_now);
    off.abs() < TimeDelta::minutes(5)
}

async fn keeps_a_chain(s3: &S3) {
    let handle = tokio::runtime::Handle::current();
    s3.create_bucket("locked", Kind::Locked).await;
    let paths = upload(s3, "locked").await;
    let hour = TimeDelta::hours(1);

    // A dry run changes nothing.
    let (code, dry, stderr) = lock(s3, "locked", &["--for", "1h", "--dry-run"]);
    assert_eq!(
        (code, dry["status"].as_str()),
        (0, Some("Succeeded")),
        "{stderr}"
    );
    assert_eq!(dry["locked"].as_u64(), Some(paths.len() as u64));
    assert!(
        dry["objects"][0]["done"] == false && dry["dry_run"] == true,
        "{dry}"
    );
    for path in &paths {
        assert_eq!(retention(s3, "locked", path).await, None);
    }

    let (code, done, stderr) = lock(s3, "locked", &["--for", "1h"]);
    assert_eq!(
        (code, done["status"].as_str()),
        (0, Some("Succeeded")),
        "{stderr}"
    );
    assert_eq!(done["mode"], "governance");
    let objects = done["objects"].as_array().unwrap();
    let mut locked: Vec<_> = objects
        .iter()
        .map(|o| o["path"].as_str().unwrap())
        .collect();
    locked.sort_unstable();
    assert_eq!(locked, paths, "{done}");
    for path in &paths {
        let (mode, until) = retention(s3, "locked", path).await.unwrap();
        assert_eq!(mode, "GOVERNANCE");
        assert!(is_about(until, hour), "{until}");
    }

    // No version of it can be deleted; a delete by name only hides it, and it can be brought back.
    let store = s3.open("s3://locked/p", &handle);
    let (path, version) = {
        let object = &objects[0];
        let text = |field: &str| object[field].as_str().unwrap().to_owned();
        (text("path"), text("version"))
    };
    let (at, v) = (path.clone(), version.clone());
    let of_store = store.clone();
    let refused = tokio::task::spawn_blocking(move || of_store.delete_version(&at, &v))
        .await
        .unwrap()
        .unwrap_err();
    assert_eq!(refused.reason(), Reason::PermissionDenied, "{refused}");
    let key = Path::from(format!("p/{path}"));
    s3.store("locked").delete(&key).await.unwrap();
    assert!(s3.store("locked").head(&key).await.is_err());
    let (at, of_store) = (path.clone(), store.clone());
    tokio::task::spawn_blocking(move || {
        let versions = of_store.versions(&["v2"]).unwrap();
        let of_it: Vec<_> = versions.iter().filter(|v| v.path == at).collect();
        assert_eq!(of_it.len(), 2, "{of_it:?}");
        let mark = of_it.iter().find(|v| v.is_delete_marker).unwrap();
        assert!(mark.is_latest);
        assert_eq!(of_store.retention(&at, Some(&mark.version)).unwrap(), None);
        let kept = of_it.iter().find(|v| !v.is_delete_marker).unwrap();
        let has = of_store.retention(&at, Some(&kept.version)).unwrap();
        assert_eq!(has.unwrap().mode, Mode::Governance);
        assert!(!of_store.legal_hold(&at, Some(&kept.version)).unwrap());
        of_store.delete_version(&at, &mark.version).unwrap();
    })
    .await
    .unwrap();
    let object = s3.store("locked").head(&key).await.unwrap();
    assert_eq!(object.version.as_deref(), Some(version.as_str()));

    // A shorter time changes nothing.
    let (code, same, _) = lock(s3, "locked", &["--for", "30m"]);
    assert_eq!((code, same["status"].as_str()), (0, Some("NothingToDo")));
    assert_eq!(same["kept"].as_u64(), Some(paths.len() as u64), "{same}");
    let (_, until) = retention(s3, "locked", &paths[0]).await.unwrap();
    assert!(is_about(until, hour), "{until}");

    // A longer time changes it, and so does the stricter mode; the later date stays.
    let (code, longer, stderr) = lock(s3, "locked", &["--for", "3h"]);
    assert_eq!(code, 0, "{longer} {stderr}");
    let until = (Utc::now() + hour).to_rfc3339();
    let compliance = ["--until", &until, "--mode", "compliance"];
    let (code, stricter, stderr) = lock(s3, "locked", &compliance);
    assert_eq!(code, 0, "{stricter} {stderr}");
    for path in &paths {
        let (mode, until) = retention(s3, "locked", path).await.unwrap();
        assert_eq!(mode, "COMPLIANCE");
        assert!(is_about(until, hour * 3), "{until}");
    }
    // There is no way back, not even in part.
    let (code, refused, _) = lock(s3, "locked", &["--for", "5h"]);
    assert_eq!(
        (code, refused["reason"].as_str()),
        (64, Some("Usage")),
        "{refused}"
    );
    let (_, until) = retention(s3, "locked", &paths[0]).await.unwrap();
    assert!(is_about(until, hour * 3), "{until}");

    // Locked objects can be read.
    let mut c = deltafold();
    c.envs(s3.env())
        .args(["compact", "--output", "json", "--dry-run"]);
    c.args(["--store", "s3://locked/p"]);
    let (code, plan, stderr) = run_json(&mut c);
    assert_eq!(code, 0, "{plan} {stderr}");
}

/// Without an object lock the command is refused, and nothing is written.
async fn refuses_without_a_lock(s3: &S3) {
    for (bucket, kind) in [("plain", Kind::Plain), ("versioned", Kind::Versioned)] {
        s3.create_bucket(bucket, kind).await;
        let paths = upload(s3, bucket).await;
        let before = s3
            .store(bucket)
            .head(&Path::from(format!("p/{}", paths[0])))
            .await;
        let (code, refused, _) = lock(s3, bucket, &["--for", "1h"]);
        assert_eq!(
            (code, refused["reason"].as_str()),
            (78, Some("Configuration")),
            "{bucket}: {refused}"
        );
        let message = refused["message"].as_str().unwrap();
        assert!(message.contains("object lock"), "{message}");
        let after = s3
            .store(bucket)
            .head(&Path::from(format!("p/{}", paths[0])))
            .await;
        assert_eq!(before.unwrap(), after.unwrap());
        assert_eq!(retention(s3, bucket, &paths[0]).await, None);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn minio_keeps_what_is_locked() {
    let minio = Minio::start();
    keeps_a_chain(&minio.s3()).await;
    refuses_without_a_lock(&minio.s3()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn versitygw_keeps_what_is_locked() {
    let server = Versitygw::start();
    keeps_a_chain(server.s3()).await;
    refuses_without_a_lock(server.s3()).await;
}

/// A server that accepts the request and keeps nothing, and one that writes it over the object.
#[tokio::test(flavor = "multi_thread")]
async fn who_only_says_that_it_locks_is_not_believed() {
    let server = LyingServer::start(Lies {
        forgets_retention: true,
        ..Lies::default()
    });
    let all = upload(server.s3(), "b").await.len() as u64;
    let before = server.objects();
    let (code, failed, _) = lock(server.s3(), "b", &["--for", "1h"]);
    assert_eq!(
        (code, failed["reason"].as_str()),
        (78, Some("Configuration"))
    );
    assert_eq!(failed["status"], "Failed");
    assert_eq!(
        (failed["locked"].as_u64(), failed["failed"].as_u64()),
        (Some(0), Some(all)),
        "{failed}"
    );
    let message = failed["message"].as_str().unwrap();
    assert!(message.contains("reads back unlocked"), "{message}");
    assert_eq!(server.objects(), before);

    let server = LyingServer::start(Lies {
        retention_overwrites: true,
        ..Lies::default()
    });
    upload(server.s3(), "b").await;
    let before = server.objects();
    let (code, refused, _) = lock(server.s3(), "b", &["--for", "1h"]);
    assert_eq!(
        (code, refused["reason"].as_str()),
        (78, Some("Configuration"))
    );
    assert_eq!(server.objects(), before, "it was sent after all");
    let sent = server
        .requests()
        .into_iter()
        .filter(|r| r.starts_with("PUT"));
    assert_eq!(sent.filter(|r| r.contains("retention")).count(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn some_that_fail_do_not_end_the_rest_and_a_rerun_goes_on() {
    let server = LyingServer::start(Lies {
        locks: true,
        denies_first_retention: true,
        ..Lies::default()
    });
    let paths = upload(server.s3(), "b").await;
    let (code, part, stderr) = lock(server.s3(), "b", &["--for", "1h"]);
    assert_eq!(
        (code, part["reason"].as_str()),
        (75, Some("PartlyDone")),
        "{stderr}"
    );
    let all = paths.len() as u64;
    assert_eq!(part["locked"].as_u64(), Some(all - 1), "{part}");
    let objects = part["objects"].as_array().unwrap();
    let failed: Vec<_> = objects.iter().filter(|o| o["done"] == false).collect();
    assert_eq!(failed.len(), 1);
    assert!(
        failed[0]["reason"]
            .as_str()
            .unwrap()
            .contains("AccessDenied")
    );
    let until = part["until"].as_str().unwrap();
    let (code, rest, stderr) = lock(server.s3(), "b", &["--until", until]);
    assert_eq!(
        (code, rest["status"].as_str()),
        (0, Some("Succeeded")),
        "{stderr}"
    );
    assert_eq!(
        (rest["locked"].as_u64(), rest["kept"].as_u64()),
        (Some(1), Some(all - 1))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn another_chain_is_named_by_its_full() {
    let server = LyingServer::start(Lies {
        locks: true,
        ..Lies::default()
    });
    let s3 = server.s3();
    let paths = upload(s3, "b").await;
    let full = paths.iter().find(|p| p.contains("Full-")).unwrap();
    let name = full.strip_prefix("v2/").unwrap();
    let delta = paths.iter().find(|p| p.contains("Incr-")).unwrap();
    let delta = delta.strip_prefix("v2/").unwrap();
    let (code, done, stderr) = lock(s3, "b", &["--for", "1h", "--chain", name]);
    assert_eq!((code, done["chain"].as_str()), (0, Some(name)), "{stderr}");
    let (code, refused, _) = lock(s3, "b", &["--for", "1h", "--chain", delta]);
    assert_eq!((code, refused["reason"].as_str()), (64, Some("Usage")));
    let (code, refused, _) = lock(s3, "b", &["--for", "1h", "--chain", "Full-1"]);
    assert_eq!(
        (code, refused["reason"].as_str()),
        (66, Some("NoSnapshots"))
    );
    for bad in [
        &["--until", "2020-01-01T00:00:00Z"][..],
        &["--for", "0s"],
        &["--for", "200000d"],
        &[],
        &["--for", "1h", "--until", "2100-01-01T00:00:00Z"],
        &["--for", "1h", "--mode", "forever"],
    ] {
        let (code, refused, _) = lock(s3, "b", bad);
        assert_eq!(
            (code, refused["reason"].as_str()),
            (64, Some("Usage")),
            "{bad:?}"
        );
    }
}

#[test]
fn a_folder_has_no_lock() {
    let fixture = copy_fixture("kubernetes");
    let mut c = deltafold();
    c.args(["lock", "--output", "json", "--for", "1h", "--store"]);
    c.arg(fixture.path());
    let (code, refused, _) = run_json(&mut c);
    assert_eq!(
        (code, refused["reason"].as_str()),
        (78, Some("Configuration"))
    );
}
