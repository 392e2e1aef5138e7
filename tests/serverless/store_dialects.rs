//! What people meet at stores that are not quite S3: the program says what is wrong and what mends it, or goes on.

use crate::support::fake_s3::{Conditions, Dialect, FakeS3, Refusal};
use crate::support::made_backups::{BASE, Bucket, LAST, objects_in};
use crate::support::process::free_port;
use crate::support::{copy_fixture, deltafold, run_json, scratch};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::time::Instant;

const NOT_IMPLEMENTED: Refusal = (501, "NotImplemented");

/// A server with the backup of the fixture `kubernetes` at `s3://b/p`, compacted: gc has something to delete.
fn compacted(dialect: Dialect) -> FakeS3 {
    let folder = copy_fixture("kubernetes");
    let mut compact = deltafold();
    compact.args(["compact", "--output", "json", "--store"]);
    let (code, json, log) = run_json(compact.arg(folder.path()));
    assert_eq!(code, 0, "{json:#}\n{log}");
    seeded(dialect, folder.path())
}

/// A server with the backup of the fixture `kubernetes` at `s3://b/p`.
fn server(dialect: Dialect) -> FakeS3 {
    seeded(dialect, copy_fixture("kubernetes").path())
}

fn seeded(dialect: Dialect, folder: &Path) -> FakeS3 {
    let server = FakeS3::start(dialect);
    let objects = objects_in(folder).into_iter();
    server.seed(objects.map(|(path, bytes)| (format!("b/p/{path}"), bytes)));
    server
}

fn run(server: &FakeS3, args: &[&str]) -> (i32, Value, String) {
    let mut command = deltafold();
    command.envs(server.s3().env()).args(args);
    run_json(command.args(["--output", "json"]))
}

/// Runs a command that must fail, and returns the message.
#[track_caller]
fn fails(server: &FakeS3, args: &[&str], code: i32) -> String {
    let (got, json, log) = run(server, args);
    assert_eq!(got, code, "{args:?}: {json:#}\n{log}");
    json["message"].as_str().unwrap().to_owned()
}

#[track_caller]
fn succeeds(server: &FakeS3, args: &[&str]) -> Value {
    let (code, json, log) = run(server, args);
    assert_eq!(code, 0, "{args:?}: {json:#}\n{log}");
    json
}

const STORE: [&str; 2] = ["--store", "s3://b/p"];
const GC: [&str; 10] = [
    "gc",
    "--policy",
    "limit",
    "--limit",
    "1",
    "--apply",
    "--allow-shrink",
    "--restorable-window",
    "0s",
    "--store-option=max_retries=2",
];

fn with_store<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [args, &STORE].concat()
}

#[test]
fn a_store_that_refuses_checksums_is_told_and_can_be_used_without() {
    let server = server(Dialect {
        refuses_checksums: true,
        ..Dialect::default()
    });
    for args in [&["compact"][..], &["store", "check"]] {
        let message = fails(&server, &with_store(args), 78);
        assert!(message.contains("checksum_algorithm=none"), "{message}");
        assert!(message.contains("requestChecksumCalculation"), "{message}");
    }
    let none = ["--store-option", "checksum_algorithm=none"];
    succeeds(
        &server,
        &[&with_store(&["store", "check"])[..], &none].concat(),
    );
    succeeds(&server, &[&with_store(&["compact"])[..], &none].concat());
    // The Secret's name for it, and what wins over it.
    let secret = scratch::folder().unwrap();
    for (name, value) in [
        ("accessKeyID", "x"),
        ("secretAccessKey", "y"),
        ("region", "us-east-1"),
        ("endpoint", server.s3().endpoint()),
        ("requestChecksumCalculation", "when_required"),
    ] {
        fs::write(secret.path().join(name), value).unwrap();
    }
    let check = with_store(&[
        "store",
        "check",
        "--store-secret",
        secret.path().to_str().unwrap(),
    ]);
    succeeds(&server, &check);
    let sha256 = ["--store-option", "checksum_algorithm=sha256"];
    fails(&server, &[&check[..], &sha256].concat(), 78);
    let message = fails(
        &server,
        &[&check[..], &["--store-option", "checksum_algorithm=md5"]].concat(),
        78,
    );
    assert!(
        message.contains("checksum_algorithm=md5: give none or sha256 or crc64nvme"),
        "{message}"
    );
    fs::write(secret.path().join("requestChecksumCalculation"), "never").unwrap();
    let message = fails(&server, &check, 78);
    assert!(
        message.contains("\"never\": give when_supported or when_required"),
        "{message}"
    );
}

#[test]
fn a_store_that_refuses_conditions_is_told_at_once() {
    for conditions in [
        Conditions::Refused(NOT_IMPLEMENTED),
        Conditions::Refused((400, "InvalidArgument")),
        Conditions::NeverHold,
    ] {
        let server = server(Dialect {
            conditions,
            ..Dialect::default()
        });
        let compacted = compacted(Dialect {
            conditions,
            ..Dialect::default()
        });
        let before = Instant::now();
        for (server, args) in [
            (&server, &["compact"][..]),
            (&compacted, &GC),
            (&server, &["store", "check"]),
        ] {
            println!("{conditions:?}");
            let message = fails(server, &with_store(args), 78);
            for what in ["conditional_put=disabled", "--lock-lease"] {
                assert!(message.contains(what), "{conditions:?} {args:?}: {message}");
            }
        }
        assert!(before.elapsed().as_secs() < 30, "{conditions:?}");
    }
    let server = server(Dialect {
        conditions: Conditions::Refused(NOT_IMPLEMENTED),
        ..Dialect::default()
    });
    let disabled = ["--store-option", "conditional_put=disabled"];
    succeeds(
        &server,
        &[&with_store(&["compact"])[..], &disabled].concat(),
    );
    let compacted = compacted(Dialect {
        conditions: Conditions::Refused(NOT_IMPLEMENTED),
        ..Dialect::default()
    });
    let collects = [&with_store(&GC)[..], &disabled].concat();
    let message = fails(&compacted, &collects, 78);
    for text in ["--single-writer", "--lock-lease"] {
        assert!(message.contains(text), "{message}");
    }
    let result = succeeds(&compacted, &[&collects[..], &["--single-writer"]].concat());
    let warnings = result["warnings"].to_string();
    assert!(
        warnings.contains("no lock keeps another gc or pin away"),
        "{warnings}"
    );
    let wrong = ["--store-option", "conditional_put=no"];
    let message = fails(&server, &[&with_store(&["list"])[..], &wrong].concat(), 78);
    assert!(
        message.contains("conditional_put=no: give etag or disabled"),
        "{message}"
    );
}

/// A store may lack several things: one check finds the settings for all of them.
#[test]
fn a_check_names_all_settings_that_are_needed() {
    let server = server(Dialect {
        refuses_checksums: true,
        conditions: Conditions::Refused(NOT_IMPLEMENTED),
        refuses_bulk_delete: Some(NOT_IMPLEMENTED),
        refuses_tags: Some(NOT_IMPLEMENTED),
        refuses_versioning: Some((403, "AccessDenied")),
        refuses_lists_of_uploads: Some(NOT_IMPLEMENTED),
        ..Dialect::default()
    });
    let before = server.objects();
    let check = with_store(&["store", "check"]);
    let (code, found, log) = run(&server, &check);
    let needed = ["checksum_algorithm=none", "conditional_put=disabled"];
    assert_eq!(
        (code, &found["settings"]),
        (78, &json!(needed)),
        "{found:#}\n{log}"
    );
    let with = ["--store-option", needed[0], "--store-option", needed[1]];
    let found = succeeds(&server, &[&check[..], &with].concat());
    let lacking = found["checks"].as_array().unwrap().iter();
    let lacking = lacking.filter(|c| c["state"] == "Lacking");
    let lacking: Vec<&str> = lacking.map(|c| c["ability"].as_str().unwrap()).collect();
    let expected = [
        "ConditionalCreate",
        "Lock",
        "Tags",
        "Versions",
        "Uploads",
        "DeleteMany",
    ];
    assert_eq!(lacking, expected, "{found:#}");
    assert_eq!(server.objects(), before);
    let ignores = FakeS3::start(Dialect {
        conditions: Conditions::Ignored,
        ..Dialect::default()
    });
    let (code, found, _) = run(&ignores, &check);
    assert_eq!(
        (code, &found["settings"]),
        (78, &json!(needed[1..])),
        "{found:#}"
    );
    // What no setting mends has none.
    let server = FakeS3::start(Dialect {
        damages: true,
        ..Dialect::default()
    });
    let (code, found, _) = run(&server, &check);
    assert_eq!((code, &found["settings"]), (78, &json!([])), "{found:#}");
}

#[test]
fn objects_are_deleted_one_by_one_where_a_bulk_request_is_refused() {
    for refusal in [
        NOT_IMPLEMENTED,
        (400, "InvalidRequest"),
        (405, "MethodNotAllowed"),
    ] {
        let server = compacted(Dialect {
            refuses_bulk_delete: Some(refusal),
            ..Dialect::default()
        });
        let result = succeeds(&server, &with_store(&GC));
        let left = server.objects();
        let left = left.keys().filter(|path| path.contains("/v2/"));
        assert_eq!(left.count(), 1, "{result:#}");
        let requests = server.requests();
        let bulk = requests
            .iter()
            .filter(|r| r.starts_with("POST") && r.contains("\"delete\""));
        assert_eq!(bulk.count(), 1, "{refusal:?} {requests:#?}");
        succeeds(&server, &with_store(&["store", "check"]));
    }
}

#[test]
fn what_will_pass_is_tried_again_whatever_its_status() {
    for refusal in [
        (400, "RequestTimeout"),
        (429, "TooManyRequests"),
        (400, "SlowDown"),
        (403, "ThrottlingException"),
        (503, "SlowDown"),
        (500, "InternalError"),
    ] {
        let server = server(Dialect::default());
        server.fail(2, refusal, &[], |r| r.starts_with("GET"));
        server.fail(1, refusal, &[], |r| {
            r.starts_with("PUT") && r.contains("/v2/")
        });
        succeeds(&server, &with_store(&["compact"]));
        // What does not pass can be tried again later.
        server.fail(usize::MAX, refusal, &[], |r| r.starts_with("GET"));
        let list = with_store(&["list", "--store-option", "max_retries=1"]);
        fails(&server, &list, 69);
    }
}

#[test]
fn a_store_says_how_long_to_wait() {
    let server = server(Dialect::default());
    server.fail(1, (503, "SlowDown"), &[("Retry-After", "2")], |r| {
        r.starts_with("GET")
    });
    let before = Instant::now();
    succeeds(&server, &with_store(&["list"]));
    assert!(before.elapsed().as_secs() >= 2);
}

/// An upload of several parts is completed by a request that some stores answer with 200 before they know.
#[test]
fn a_completion_that_fails_is_tried_again_and_the_first_refusal_is_shown() {
    for (refusal, times, code) in [
        ((200, "InternalError"), 2, 0),
        ((200, "SomethingElse"), 1, 0),
        ((503, "SlowDown"), 2, 0),
        ((403, "AccessDenied"), 1, 77),
        ((200, "AccessDenied"), 1, 77),
    ] {
        let bucket = Bucket::with_base();
        bucket.delta(BASE + 1, LAST, 6);
        bucket.noise_delta(30);
        let server = FakeS3::start(Dialect::default());
        server.fail(times, refusal, &[], |r| {
            r.starts_with("POST") && r.contains("\"uploadId\"")
        });
        let from = bucket.path().to_str().unwrap();
        let args = ["copy", "--from", from, "--to", "s3://b/p"];
        let (got, json, log) = run(&server, &args);
        assert_eq!(got, code, "{refusal:?}: {json:#}\n{log}");
        if code != 0 {
            let message = format!("{json} {log}");
            assert!(message.contains(refusal.1), "{refusal:?}: {message}");
        }
        assert_eq!(server.uploads(), 0, "{refusal:?}");
    }
}

#[test]
fn expired_credentials_and_a_wrong_clock_are_told() {
    for (refusal, text) in [
        ((400, "ExpiredToken"), "check the credentials"),
        ((403, "ExpiredTokenException"), "check the credentials"),
        (
            (403, "RequestTimeTooSkewed"),
            "set the clock of this machine",
        ),
    ] {
        let server = server(Dialect::default());
        server.fail(usize::MAX, refusal, &[], |_| true);
        let message = fails(&server, &with_store(&["list"]), 77);
        assert!(message.contains(text), "{message}");
        if refusal.1 == "RequestTimeTooSkewed" {
            assert!(
                message.contains("The clock of this machine is 0 s"),
                "{message}"
            );
        }
    }
}

#[test]
fn what_many_stores_lack_is_not_needed() {
    for refusal in [
        NOT_IMPLEMENTED,
        (400, "InvalidArgument"),
        (403, "AccessDenied"),
    ] {
        let server = server(Dialect {
            refuses_tags: Some(refusal),
            refuses_versioning: Some(refusal),
            refuses_locks: Some(refusal),
            refuses_lists_of_uploads: Some(refusal),
            ..Dialect::default()
        });
        succeeds(&server, &with_store(&["compact"]));
        for args in [
            &["list"][..],
            &["verify"],
            &["status", "--max-age", "3650d"],
        ] {
            succeeds(&server, &with_store(args));
        }
    }
}

/// Returns the setting by which Google's client asks this server.
fn account_of(server: &FakeS3) -> (tempfile::TempDir, String) {
    let account = json!({
        "type": "service_account", "gcs_base_url": server.s3().endpoint(), "disable_oauth": true,
        "client_email": "test@example.com", "private_key": "", "private_key_id": "1",
    });
    let folder = scratch::folder().unwrap();
    let file = folder.path().join("account.json");
    fs::write(&file, account.to_string()).unwrap();
    let option = format!("service_account={}", file.display());
    (folder, option)
}

/// A bucket of Google Cloud Storage with a retention policy: what exists can be neither overwritten nor deleted.
#[test]
fn an_immutable_bucket_keeps_snapshots_and_takes_no_lock() {
    let server = compacted(Dialect {
        is_immutable: Some((403, "RetentionPolicyNotMet")),
        ..Dialect::default()
    });
    let (_folder, option) = account_of(&server);
    let of_gcs = ["--store", "gs://b/p", "--store-option", &option];
    let with = |args: &[&'static str]| [args, &of_gcs].concat();
    succeeds(&server, &with(&["list"]));
    for _ in 0..2 {
        let before = server.objects().len();
        let result = succeeds(&server, &[&with(&GC)[..], &["--single-writer"]].concat());
        let fates = result["objects"].as_array().unwrap().iter();
        let locked = fates.filter(|o| o["fate"] == "Locked");
        // A chain stops at its first locked object.
        assert!(locked.count() >= 1, "{result:#}");
        let warnings = result["warnings"].to_string();
        assert!(warnings.contains("immutable bucket"), "{warnings}");
        assert!(server.objects().len() >= before, "{result:#}");
    }
    let nobody = format!("http://127.0.0.1:{}", free_port());
    let follow = with(&["snapshot", "follow", "--endpoints"]);
    let follow = [&follow[..3], &[&nobody], &follow[3..]].concat();
    let message = fails(&server, &follow, 78);
    assert!(message.contains("--lock-lease"), "{message}");
}

/// Lists the backup with these variables and no others. Returns the exit code and the message.
fn list_with(variables: &[(&str, &str)], args: &[&str]) -> (i32, String) {
    let mut command = deltafold();
    command.envs(variables.iter().copied());
    command.args(["list", "--store", "s3://b/p", "--output", "json"]);
    command.args(["--store-option", "max_retries=1"]);
    let (code, json, log) = run_json(command.args(args));
    let message = json["message"].as_str().map_or(log, str::to_owned);
    (code, message)
}

#[test]
fn an_empty_variable_is_not_set_and_no_variable_wins_over_an_option() {
    let server = server(Dialect::default());
    let endpoint = server.s3().endpoint();
    let nobody = format!("http://127.0.0.1:{}", free_port());
    let keys = [("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "y")];
    let with = |more: &[(&'static str, &str)], args: &[&str]| {
        let variables: Vec<(&str, &str)> = keys.iter().chain(more).copied().collect();
        list_with(&variables, args)
    };
    let empty = [
        ("AWS_SESSION_TOKEN", ""),
        ("AWS_ENDPOINT_URL_S3", ""),
        ("AWS_REGION", " "),
        ("AWS_PROFILE", ""),
        ("HTTP_PROXY", ""),
        ("AWS_ENDPOINT_URL", endpoint),
    ];
    let (code, message) = with(&empty, &[]);
    assert_eq!(code, 0, "{message}");
    let given = format!("endpoint={endpoint}");
    for name in ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"] {
        let (code, message) = with(&[(name, &nobody)], &["--store-option", &given]);
        assert_eq!(code, 0, "{name}: {message}");
    }
    // A proxy is for other machines.
    for name in ["HTTP_PROXY", "http_proxy", "ALL_PROXY"] {
        let (code, message) = with(&[(name, &nobody)], &["--store-option", &given]);
        assert_eq!(code, 0, "{name}: {message}");
    }
    let other = ["--store-option", "endpoint=http://store.invalid:9000"];
    let (code, message) = with(&[("HTTP_PROXY", &nobody)], &other);
    assert_eq!(code, 69, "{message}");
    assert!(
        message.contains(&format!("through the proxy {nobody}")),
        "{message}"
    );
    let sts = [("AWS_ENDPOINT_URL_STS", nobody.as_str())];
    let (code, message) = with(&sts, &["--store-option", &given]);
    assert_eq!(code, 78, "{message}");
    assert!(message.contains("AWS_ENDPOINT_URL_STS"), "{message}");
}

#[test]
fn the_files_that_awss_tools_share_give_keys() {
    let server = server(Dialect::default());
    let home = scratch::folder().unwrap();
    let aws = home.path().join(".aws");
    fs::create_dir(&aws).unwrap();
    let keys = "[backup]\naws_access_key_id = x\naws_secret_access_key = y\n";
    fs::write(aws.join("credentials"), keys).unwrap();
    let endpoint = server.s3().endpoint();
    let config = format!("[profile backup]\nregion = us-east-1\nendpoint_url = {endpoint}\n");
    fs::write(aws.join("config"), config).unwrap();
    let home = home.path().to_str().unwrap();
    let (code, message) = list_with(&[("HOME", home), ("AWS_PROFILE", "backup")], &[]);
    assert_eq!(code, 0, "{message}");
    let (code, message) = list_with(&[("HOME", home), ("AWS_PROFILE", "other")], &[]);
    assert_eq!(code, 78, "{message}");
    assert!(message.contains("AWS_PROFILE is other"), "{message}");
}

/// An archived object, or one that this user may not read, is a finding with its name, and no end of the run.
#[test]
fn what_the_store_does_not_hand_out_is_a_finding() {
    let bucket = Bucket::with_base();
    let delta = bucket.delta(BASE + 1, 1499, 6);
    bucket.delta(1500, LAST, 9);
    let full = bucket
        .names()
        .into_iter()
        .find(|n| n.starts_with("Full-"))
        .unwrap();
    for name in [delta, full] {
        for refusal in [(403, "InvalidObjectState"), (403, "AccessDenied")] {
            let server = FakeS3::start(Dialect::default());
            let objects = bucket.objects().into_iter();
            server.seed(objects.map(|(path, bytes)| (format!("b/p/{path}"), bytes)));
            let refused = name.clone();
            server.fail(1000, refusal, &[], move |request| {
                request.starts_with("GET ")
                    && request.contains(&refused)
                    && !request.contains("tagging")
            });
            let run = |args: &[&str]| {
                let mut c = deltafold();
                c.args(args)
                    .args(["--output", "json", "--store", "s3://b/p"]);
                run_json(c.envs(server.s3().env()))
            };
            for (args, findings) in [
                (&["verify", "--all-chains", "--no-record"][..], "findings"),
                (&["list", "--deep"], "problems"),
                (&["status", "--max-age", "36500d"], "findings"),
            ] {
                let (code, json, stderr) = run(args);
                let told = json[findings].as_array();
                let told = told.unwrap_or_else(|| panic!("{args:?}: {stderr}"));
                let about = told
                    .iter()
                    .filter(|f| f.to_string().contains(&name))
                    .count();
                // Without --deep, names are believed but for the full on which a range begins.
                let is_read = args[0] != "status" || name.starts_with("Full-");
                assert_eq!(about > 0, is_read, "{args:?} {name}: {json:#}");
                assert_eq!(
                    code == 0,
                    args[0] == "list" || !is_read,
                    "{args:?} {name}: {stderr}"
                );
            }
        }
    }
}

/// A console, a login, a proxy or a list of buckets says nothing about what is in the bucket: nothing counts as empty.
#[test]
fn what_is_no_listing_ends_the_run() {
    const CONSOLE: &str = "<!doctype html><html><head><title>Console</title></head></html>";
    const BUCKETS: &str = "<ListAllMyBucketsResult><Buckets/></ListAllMyBucketsResult>";
    const SHORT: &str = "<ListBucketResult><KeyCount>3</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>";
    const DENIED: &str = "<Error><Code>AccessDenied</Code><Message>No.</Message></Error>";
    const LATER: &str = "<?xml version=\"1.0\"?><Error><Code>SlowDown</Code></Error>";
    let folder = scratch::folder().unwrap();
    let data = folder.path().join("data").display().to_string();
    let collect = [&GC[..], &["--single-writer"]].concat();
    for (page, code, what) in [
        (CONSOLE, 78, "it is <html>"),
        (BUCKETS, 78, "it is <ListAllMyBucketsResult>"),
        (SHORT, 78, "it says that it has 3 names, and it has 0"),
        ("ok", 78, "it is no XML"),
        ("", 78, "it is no XML"),
        (DENIED, 77, "AccessDenied"),
        (LATER, 69, "SlowDown"),
    ] {
        // Of all listings, or of the notes alone.
        for folder in ["", "deltafold-pins"] {
            let server = compacted(Dialect::default());
            server.answer_with(page, move |request| {
                request.contains("\"list-type\"") && request.contains(folder)
            });
            let before = server.objects();
            for args in [&["list"][..], &["restore", "--data-dir", &data], &collect] {
                // One page shows all of a small prefix.
                if folder.is_empty() || args == collect {
                    let retries = ["--store-option", "max_retries=1"];
                    let message = fails(&server, &[&with_store(args)[..], &retries].concat(), code);
                    assert!(message.contains(what), "{args:?}: {message}");
                }
            }
            let snapshots = |objects: &std::collections::BTreeMap<String, Vec<u8>>| {
                objects.keys().filter(|path| path.contains("/v2/")).count()
            };
            assert_eq!(snapshots(&server.objects()), snapshots(&before));
        }
    }
}

/// Which of a command's requests are refused.
type Requests = fn(&str) -> bool;

const PAGES: Requests = |r| r.contains("\"list-type\"");
const READS: Requests = |r| r.starts_with("GET") && r.contains("/v2/") && !r.contains("tagging");
const WRITES: Requests =
    |r| r.starts_with("PUT") && r.contains("/v2/") && !r.contains("\"uploadId\"");
const BEGINS: Requests = |r| r.starts_with("POST") && r.contains("\"uploads\"");
const PARTS: Requests = |r| r.starts_with("PUT") && r.contains("\"partNumber\"");
const ENDS: Requests = |r| r.starts_with("POST") && r.contains("\"uploadId\"");

/// The reason of a refusal is that of what was asked for and of the store's code, and nothing is sent again in vain.
#[test]
fn each_refusal_has_its_reason_and_says_what_to_do() {
    let large = Bucket::with_base();
    large.delta(BASE + 1, LAST, 6);
    large.noise_delta(30);
    let large = large.path().to_str().unwrap();
    let folder = scratch::folder().unwrap();
    let data = folder.path().join("data").display().to_string();
    let restore = ["restore", "--store", "s3://b/p", "--data-dir", &data];
    let compact = ["compact", "--store", "s3://b/p"];
    let copy = ["copy", "--from", large, "--to", "s3://b/q"];
    let (list, status) = (with_store(&["list"]), with_store(&["status"]));
    let full = ["make room", "quota"];
    let path_style = ["path_style=false"];
    let credentials = ["check the credentials"];
    let key = ["AWS_ACCESS_KEY_ID"];
    for (requests, args, refusal, reason, says) in [
        (
            PAGES,
            &list[..],
            (404, "NoSuchBucket"),
            "NoSnapshots",
            &["create the bucket"][..],
        ),
        (
            PAGES,
            &list,
            (404, "NoSuchKey"),
            "Configuration",
            &["endpoint has no bucket in it", "path_style"],
        ),
        (
            PAGES,
            &status,
            (404, "NoSuchKey"),
            "Configuration",
            &path_style,
        ),
        (
            PAGES,
            &list,
            (403, "PathStyleDomainForbidden"),
            "Configuration",
            &path_style,
        ),
        (
            PAGES,
            &list,
            (403, "SecondLevelDomainForbidden"),
            "Configuration",
            &path_style,
        ),
        (
            PAGES,
            &list,
            (400, "IllegalLocationConstraintException"),
            "Configuration",
            &["region"],
        ),
        (
            PAGES,
            &list,
            (404, "XAdminUserNotFound"),
            "PermissionDenied",
            &key,
        ),
        (
            PAGES,
            &list,
            (403, "InvalidAccessKeyId"),
            "PermissionDenied",
            &key,
        ),
        (
            PAGES,
            &list,
            (401, "Unauthorized"),
            "Unauthenticated",
            &credentials,
        ),
        (
            PAGES,
            &list,
            (403, "AccessDenied"),
            "PermissionDenied",
            &credentials,
        ),
        (
            READS,
            &restore,
            (403, "InvalidObjectState"),
            "Archived",
            &["archived", "restore it at the store"],
        ),
        (
            READS,
            &restore,
            (409, "BlobArchived"),
            "Archived",
            &["archived"],
        ),
        (
            READS,
            &restore,
            (409, "BlobBeingRehydrated"),
            "Archived",
            &["archived"],
        ),
        (
            READS,
            &restore,
            (409, "Conflict"),
            "Configuration",
            &["409 Conflict"],
        ),
        (
            READS,
            &restore,
            (400, "KMS.DisabledException"),
            "Configuration",
            &["KMS key"],
        ),
        (
            WRITES,
            &compact,
            (404, "NoSuchKey"),
            "Configuration",
            &path_style,
        ),
        (
            WRITES,
            &compact,
            (404, "NoSuchBucket"),
            "NoSnapshots",
            &["create the bucket"],
        ),
        (WRITES, &compact, (403, "QuotaExceeded"), "NoSpace", &full),
        (
            WRITES,
            &compact,
            (400, "XMinioAdminBucketQuotaExceeded"),
            "NoSpace",
            &full,
        ),
        (
            WRITES,
            &compact,
            (507, "XMinioStorageFull"),
            "NoSpace",
            &full,
        ),
        (
            WRITES,
            &compact,
            (413, ""),
            "Configuration",
            &["client_max_body_size"],
        ),
        (
            WRITES,
            &compact,
            (403, "AccessDenied"),
            "PermissionDenied",
            &credentials,
        ),
        (
            WRITES,
            &compact,
            (403, "RetentionPolicyNotMet"),
            "ObjectLocked",
            &["retention policy"],
        ),
        (
            BEGINS,
            &copy,
            (404, "NoSuchKey"),
            "Configuration",
            &path_style,
        ),
        (PARTS, &copy, (507, ""), "NoSpace", &full),
        (
            PARTS,
            &copy,
            (404, "NoSuchUpload"),
            "SnapshotVanished",
            &["aborted meanwhile"],
        ),
        (ENDS, &copy, (403, "QuotaExceeded"), "NoSpace", &full),
        (
            ENDS,
            &copy,
            (404, "NoSuchUpload"),
            "SnapshotVanished",
            &["aborted meanwhile"],
        ),
    ] {
        let server = server(Dialect::default());
        server.fail(usize::MAX, refusal, &[], requests);
        let (code, json, log) = run(&server, args);
        let what = format!("{args:?} {refusal:?}: {json:#}\n{log}");
        assert_ne!(code, 0, "{what}");
        // The snapshots that fail have reasons of their own.
        let told = json.to_string();
        assert!(told.contains(&format!("\"reason\":\"{reason}\"")), "{what}");
        for text in says {
            assert!(told.contains(text), "{text}: {what}");
        }
        let is_about_credentials = ["PermissionDenied", "Unauthenticated"].contains(&reason);
        assert_eq!(
            told.contains("check the credentials"),
            says == credentials,
            "{what}"
        );
        assert!(is_about_credentials || code != 77, "{what}");
        let again = server.requests().iter().filter(|r| requests(r)).count();
        assert!(again <= 8, "sent {again} times: {what}");
    }
}

/// The quota of the target may be raised: who follows goes on then.
#[test]
fn a_follower_waits_until_a_full_store_has_room() {
    let server = FakeS3::start(Dialect::default());
    server.fail(2, (403, "QuotaExceeded"), &[], WRITES);
    let from = copy_fixture("kubernetes");
    let mut follow = deltafold();
    follow.envs(server.s3().env());
    follow.args(["copy", "--follow", "--interval", "1s", "--to", "s3://b/p"]);
    follow.arg("--from").arg(from.path());
    follow.stdout(std::process::Stdio::null());
    let mut follower = follow.spawn().unwrap();
    let expected = objects_in(from.path()).len();
    let copied = || {
        server
            .objects()
            .keys()
            .filter(|path| path.contains("/v2/"))
            .count()
    };
    let begun = Instant::now();
    while copied() < expected && begun.elapsed().as_secs() < 60 {
        assert!(follower.try_wait().unwrap().is_none(), "it has ended");
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    follower.kill().unwrap();
    follower.wait().unwrap();
    assert_eq!(copied(), expected);
}

/// A web tool or a transfer may say that the objects are packed by gzip for the way alone.
#[test]
fn google_sends_objects_as_they_are_stored() {
    let server = server(Dialect {
        unpacks: true,
        ..Dialect::default()
    });
    let (_folder, option) = account_of(&server);
    let of_gcs = ["--store", "gs://b/p", "--store-option", &option];
    succeeds(&server, &[&["verify", "--no-record"][..], &of_gcs].concat());
}

/// The time of a request is that of its length: parts that move are not broken off.
#[test]
fn a_slow_line_is_not_a_dead_one() {
    let large = Bucket::with_base();
    large.delta(BASE + 1, LAST, 6);
    large.noise_delta(30);
    let server = FakeS3::start(Dialect {
        reads_slowly: Some(4 << 20),
        ..Dialect::default()
    });
    let copy = [
        "copy",
        "--from",
        large.path().to_str().unwrap(),
        "--to",
        "s3://b/p",
    ];
    let timeouts = ["read_timeout=1s", "retry_timeout=1"].map(|t| format!("--to-option={t}"));
    succeeds(
        &server,
        &[&copy[..], &[&timeouts[0], &timeouts[1]]].concat(),
    );
    assert!(server.requests().iter().any(|r| PARTS(r)));
}

/// Starts a proxy that refuses everything with this status.
fn refusing_proxy(status: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let mut lines = BufReader::new(&client).lines();
            while lines
                .next()
                .is_some_and(|line| line.is_ok_and(|line| !line.is_empty()))
            {}
            let _ = write!(
                &client,
                "HTTP/1.1 {status}\r\nContent-Length: 6\r\nConnection: close\r\n\r\nDENIED"
            );
        }
    });
    address.to_string()
}

#[test]
fn a_proxy_that_refuses_is_named_and_final() {
    let plain = "http://store.invalid";
    let tls = "https://store.invalid";
    for (status, endpoint, code, says) in [
        (
            "407 Proxy Authentication Required",
            tls,
            78,
            "a user and a password",
        ),
        (
            "407 Proxy Authentication Required",
            plain,
            78,
            "a user and a password",
        ),
        ("403 Forbidden", tls, 78, "refuses the connection"),
        ("403 Forbidden", plain, 77, "the proxy may forbid this host"),
    ] {
        let proxy = refusing_proxy(status);
        for (with, named) in [
            (
                format!("http://u:HIDDEN@{proxy}"),
                format!("through the proxy http://{proxy}"),
            ),
            (
                format!("u:HIDDEN@{proxy}"),
                format!("through the proxy http://{proxy}"),
            ),
        ] {
            let endpoint = format!("endpoint={endpoint}");
            let keys = [("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "y")];
            let proxies = [("HTTP_PROXY", &*with), ("HTTPS_PROXY", &*with)];
            let variables = [&keys[..], &proxies].concat();
            let (got, message) = list_with(&variables, &["--store-option", &endpoint]);
            assert_eq!(got, code, "{status}: {message}");
            assert!(
                message.contains(&named) && message.contains(says),
                "{message}"
            );
            assert!(!message.contains("HIDDEN"), "{message}");
            assert!(!message.contains("check the credentials"), "{message}");
        }
    }
    let keys = [("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "y")];
    let socks = [&keys[..], &[("HTTPS_PROXY", "socks5://127.0.0.1:9")]].concat();
    let (code, message) = list_with(
        &socks,
        &["--store-option", "endpoint=https://store.invalid"],
    );
    assert_eq!(code, 78, "{message}");
    assert!(message.contains("a proxy that speaks HTTP"), "{message}");
}

/// The endpoints of AWS are those of the region's cloud, and a missing token is no outage.
#[test]
fn the_host_that_was_asked_is_named() {
    let proxy = format!("http://{}", refusing_proxy("403 Forbidden"));
    let keys = [("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "y")];
    let role = [("AWS_ROLE_ARN", "arn:aws:iam::1:role/r")];
    let token = scratch::folder().unwrap();
    let file = token.path().join("token");
    fs::write(&file, "t").unwrap();
    let file = [("AWS_WEB_IDENTITY_TOKEN_FILE", file.to_str().unwrap())];
    let none = [("AWS_WEB_IDENTITY_TOKEN_FILE", "/no/such/token")];
    let (fips, dual) = (
        [("AWS_USE_FIPS_ENDPOINT", "true")],
        [("AWS_USE_DUALSTACK_ENDPOINT", "true")],
    );
    for (region, more, says) in [
        (
            "cn-north-1",
            [&keys[..], &[]],
            "https://s3.cn-north-1.amazonaws.com.cn",
        ),
        (
            "us-east-1",
            [&keys, &fips],
            "https://s3-fips.us-east-1.amazonaws.com",
        ),
        (
            "us-east-1",
            [&keys, &dual],
            "https://s3.dualstack.us-east-1.amazonaws.com",
        ),
        (
            "cn-north-1",
            [&role, &file],
            "https://sts.cn-north-1.amazonaws.com.cn",
        ),
        (
            "us-east-1",
            [&role, &file],
            "https://sts.us-east-1.amazonaws.com",
        ),
        ("us-east-1", [&role, &none], "AWS_WEB_IDENTITY_TOKEN_FILE"),
    ] {
        let variables = [
            &[("AWS_REGION", region), ("HTTPS_PROXY", &proxy)],
            more[0],
            more[1],
        ];
        let (code, message) = list_with(&variables.concat(), &[]);
        assert_eq!(code, 78, "{message}");
        assert!(message.contains(says), "{says}: {message}");
    }
}
