//! `deltafold store check` on honest stores and on ones that lie: each lie is found, and nothing is left
//! behind.

use crate::support::schema::Schema;
use crate::support::scratch;
use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::Duration;

use crate::support::lying_s3::{Lies, LyingServer};
use crate::support::minio::Minio;
use crate::support::s3::{Kind, S3};
use crate::support::versitygw::Versitygw;
use crate::support::{deltafold, run_json};
use object_store::ObjectStore as _;
use serde_json::Value;

/// The report of a check: for each ability, its state and whether that is a problem.
type Table = BTreeMap<String, (String, bool)>;

fn table(outcome: &Value) -> Table {
    let checks = outcome["checks"].as_array().expect("checks");
    let row = |c: &Value| {
        for field in ["detail", "meaning"] {
            assert!(!c[field].as_str().unwrap().is_empty(), "{c}");
        }
        let state = c["state"].as_str().unwrap().to_owned();
        let name = c["ability"].as_str().unwrap().to_owned();
        (name, (state, c["is_problem"].as_bool().unwrap()))
    };
    let table: Table = checks.iter().map(row).collect();
    assert_eq!(table.len(), 15, "{outcome}");
    table
}

fn check(url: &str, env: &[(String, String)]) -> (i32, Value, String) {
    let mut c = deltafold();
    c.envs(env.iter().cloned());
    c.args(["store", "check", "--output", "json", "--store", url]);
    c.args(if url.starts_with("s3:") {
        &["--store-option", "max_retries=1"][..]
    } else {
        &[]
    });
    let (code, outcome, stderr) = run_json(&mut c);
    Schema::of("store-check").check(&outcome);
    (code, outcome, stderr)
}

/// Returns the abilities in this state.
fn those<'a>(table: &'a Table, state: &str) -> Vec<&'a str> {
    let rows = table.iter().filter(|(_, (s, _))| s == state);
    rows.map(|(name, _)| name.as_str()).collect()
}

async fn nothing_is_left(s3: &S3, bucket: &str) {
    use futures::TryStreamExt as _;
    let left: Vec<_> = s3.store(bucket).list(None).try_collect().await.unwrap();
    assert!(left.is_empty(), "{left:?}");
    for question in ["versions", "uploads"] {
        let query = [(question, "")];
        let answer = s3
            .must(
                object_store::signer::Method::GET,
                (bucket, ""),
                &query,
                &[],
                "",
            )
            .await;
        for entry in ["<Version>", "<DeleteMarker>", "<Upload>"] {
            assert!(!answer.contains(entry), "{bucket}: {answer}");
        }
    }
}

async fn is_honest(s3: &S3) {
    for (bucket, kind) in [
        ("plain", Kind::Plain),
        ("versioned", Kind::Versioned),
        ("locked", Kind::Locked),
    ] {
        s3.create_bucket(bucket, kind).await;
        let (code, outcome, stderr) = check(&format!("s3://{bucket}/deep/prefix"), &s3.env());
        assert_eq!(code, 0, "{bucket}: {outcome} {stderr}");
        assert_eq!(outcome["status"], "Succeeded");
        assert_eq!(outcome["left_behind"].as_array().unwrap().len(), 0);
        let table = table(&outcome);
        let absent = match kind {
            Kind::Plain => vec!["ObjectLock", "Versioning"],
            Kind::Versioned => vec!["ObjectLock"],
            Kind::Locked => vec![],
        };
        assert_eq!(those(&table, "Absent"), absent, "{bucket}: {outcome}");
        assert_eq!(
            those(&table, "Works").len() + absent.len(),
            table.len(),
            "{bucket}: {outcome}"
        );
        nothing_is_left(s3, bucket).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn minio_is_honest() {
    let minio = Minio::start();
    is_honest(&minio.s3()).await;

    // If a bucket locks every new object by default, no probe may be written.
    let (s3, place) = (minio.s3(), ("locked", ""));
    let rule = "<ObjectLockConfiguration><ObjectLockEnabled>Enabled</ObjectLockEnabled><Rule><DefaultRetention><Mode>GOVERNANCE</Mode><Days>1</Days></DefaultRetention></Rule></ObjectLockConfiguration>";
    let query = [("object-lock", "")];
    s3.must(object_store::signer::Method::PUT, place, &query, &[], rule)
        .await;
    let (code, outcome, _) = check("s3://locked/p", &s3.env());
    assert_eq!(
        (code, outcome["reason"].as_str()),
        (78, Some("Configuration"))
    );
    assert_eq!(those(&table(&outcome), "NotTried").len(), 13, "{outcome}");
    let message = outcome["message"].as_str().unwrap();
    assert!(message.contains("GOVERNANCE, 1 days"), "{message}");
    nothing_is_left(&s3, "locked").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn versitygw_is_honest() {
    let server = Versitygw::start();
    is_honest(server.s3()).await;
}

#[test]
fn a_folder_is_honest() {
    let folder = scratch::folder().unwrap();
    std::fs::create_dir(folder.path().join("v2")).unwrap();
    std::fs::write(folder.path().join("v2/Full-1"), "is left alone").unwrap();
    let (code, outcome, stderr) = check(folder.path().to_str().unwrap(), &[]);
    assert_eq!(code, 0, "{outcome} {stderr}");
    let table = table(&outcome);
    let absent = those(&table, "Absent");
    let expected = [
        "Checksum",
        "ExcludeTag",
        "ObjectLock",
        "TagCount",
        "Versioning",
    ];
    assert_eq!(absent, expected);
    assert_eq!(those(&table, "Works").len(), 10, "{outcome}");
    let left: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(left, ["v2"]);
}

#[test]
fn each_lie_is_found_and_nothing_is_left() {
    let honest = Lies::default();
    let lies = |set: fn(&mut Lies)| {
        let mut lies = honest;
        set(&mut lies);
        lies
    };
    let conditions = ["ConditionalCopy", "ConditionalCreate", "ConditionalUpdate"];
    let cases: [(Lies, &str, &[&str], i32); 13] = [
        (honest, "Lies", &[], 0),
        (
            lies(|l| l.ignores_conditions = true),
            "Lies",
            &conditions,
            78,
        ),
        (
            lies(|l| l.lets_racers_win = true),
            "Lies",
            &conditions[..2],
            78,
        ),
        (
            lies(|l| l.refuses_conditions = true),
            "Refused",
            &conditions,
            0,
        ),
        (lies(|l| l.takes_damaged = true), "Lies", &["Checksum"], 0),
        (
            lies(|l| l.refuses_checksums = true),
            "Refused",
            &["Checksum"],
            0,
        ),
        (
            lies(|l| l.hides_tag_counts = true),
            "Absent",
            &["ObjectLock", "TagCount", "Versioning"],
            0,
        ),
        (lies(|l| l.forgets_tags = true), "Lies", &["ExcludeTag"], 0),
        (
            lies(|l| l.refuses_tags = true),
            "Refused",
            &["ExcludeTag"],
            0,
        ),
        (lies(|l| l.lists_late = true), "Lies", &["List"], 78),
        (lies(|l| l.damages = true), "Lies", &["ReadBack"], 78),
        (
            lies(|l| l.loses_last_part = true),
            "Lies",
            &["Multipart"],
            78,
        ),
        (lies(|l| l.clock_ahead = 3600), "Lies", &["Clock"], 0),
    ];
    for (lies, state, expected, expected_code) in cases {
        let server = LyingServer::start(lies);
        let (code, outcome, stderr) = check("s3://b/p", &server.s3().env());
        assert_eq!(code, expected_code, "{lies:?}: {outcome} {stderr}");
        let table = table(&outcome);
        assert_eq!(those(&table, state), expected, "{lies:?}: {outcome}");
        for name in expected {
            assert_eq!(table[*name].1, expected_code != 0, "{lies:?}: {outcome}");
        }
        if code != 0 {
            assert_eq!(outcome["reason"], "Configuration");
            assert!(!outcome["message"].as_str().unwrap().is_empty());
        }
        assert_eq!(server.uploads(), 0, "{lies:?}");
        let left = server.objects();
        assert!(left.is_empty(), "{lies:?}: {:?}", left.keys());
    }
    let server = LyingServer::start(lies(|l| l.keeps_deleted = true));
    let (code, outcome, _) = check("s3://b/p", &server.s3().env());
    assert_eq!(code, 78);
    assert_eq!(those(&table(&outcome), "Lies"), ["Delete"], "{outcome}");
}

#[test]
fn a_lock_that_is_only_said_to_be_there_is_not_tried_on_anything() {
    let server = LyingServer::start(Lies {
        retention_overwrites: true,
        ..Lies::default()
    });
    let (code, outcome, _) = check("s3://b/p", &server.s3().env());
    assert_eq!(code, 0, "{outcome}");
    let asked = server.requests();
    assert!(asked.iter().any(|r| r.contains("object-lock")));
    let sets = asked
        .iter()
        .filter(|r| r.starts_with("PUT") && r.contains("retention"));
    assert_eq!(sets.count(), 0, "{asked:?}");
}

#[test]
fn what_is_wrong_with_the_way_there_is_told_as_such() {
    let nobody = format!("http://127.0.0.1:{}", crate::support::process::free_port());
    let (code, outcome, _) = check("s3://b/p", &S3::new(&nobody).env());
    assert_eq!(code, 69, "{outcome}");
    assert_eq!(outcome["reason"], "StoreUnreachable");
    let (code, outcome, _) = check("/no/such/folder", &[]);
    assert_eq!(
        (code, outcome["reason"].as_str()),
        (66, Some("NoSnapshots"))
    );
}

/// SIGTERM at many points: everything that was written is removed.
#[test]
fn ended_midway_it_cleans_up() {
    let seed = crate::support::seed();
    let mut rng = fastrand::Rng::with_seed(seed);
    let server = LyingServer::start(Lies::default());
    let mut ended = 0;
    for _ in 0..12 {
        let before = server.requests().len();
        let mut c = deltafold();
        c.envs(server.s3().env());
        c.args(["store", "check", "--store", "s3://b/p"]);
        c.stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = c.spawn().unwrap();
        let after = before + rng.usize(1..60);
        while server.requests().len() < after && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let pid = rustix::process::Pid::from_child(&child);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let status = child.wait().unwrap();
        ended += usize::from(status.code() == Some(143));
        let left = server.objects();
        assert!(left.is_empty(), "{status}: {:?}", left.keys());
        assert_eq!(server.uploads(), 0);
    }
    assert!(ended > 0, "no run was ended midway");
}
