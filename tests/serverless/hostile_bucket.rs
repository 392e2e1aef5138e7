//! An attacker who can write into the bucket or runs the store tries to disable a prefix with keys that no
//! client can name, to have our objects deleted instead of such a key, to steer the terminal, or to receive
//! credentials for another server.

use std::process::Command;

use crate::support::fake_s3::{Dialect, FakeS3, NextPage};
use crate::support::gc_history::NOTHING;
use crate::support::history::Compression;
use crate::support::tiny_backup::{SMALL_BASE, object, put_events, small_database};
use crate::support::{deltafold, run_json, scratch};
use serde_json::Value;

/// Returns odd keys in the folders of snapshots.
fn odd_snapshots(full: &str) -> Vec<String> {
    let long = "x".repeat(1000);
    [
        "v2/a//b",
        "v2/../x",
        "v2/./x",
        "v2/x\ny",
        "v2/x\r",
        "v2/\u{1b}]0;owned\u{7}\u{1b}[2J",
        "v2/\u{9b}31m",
        "v2/a\u{202e}b",
        "v2/%2e%2e%2fx",
        "v2/ \u{a0}",
        "v2//",
        "v1/Backup-1//Full-00000000-00000001-1",
        // Keys that the object_store crate, or we, could confuse with the full itself.
        &format!("v2//{full}"),
        &format!("v2/./{full}"),
        &format!("v2/{full}/"),
        &format!("v2/{full}\n"),
        &format!("v2/{long}"),
    ]
    .map(str::to_owned)
    .to_vec()
}

/// A full, a delta, and other objects.
struct Bucket {
    server: FakeS3,
    full: String,
    last: i64,
}

impl Bucket {
    fn new() -> Self {
        Self::with(Dialect::default())
    }

    fn with(dialect: Dialect) -> Self {
        let since = chrono::Utc::now().timestamp() - 90_000;
        let bucket = Bucket {
            server: FakeS3::start(dialect),
            full: format!("Full-00000000-{SMALL_BASE:08}-{since}"),
            last: SMALL_BASE + 1,
        };
        bucket.put(&format!("v2/{}", bucket.full), &small_database(4096));
        let (last, later) = (bucket.last, since + 10);
        let events = serde_json::to_vec(&put_events(last..=last)).unwrap();
        bucket.put(&format!("v2/Incr-{last:08}-{last:08}-{later}"), &events);
        bucket
    }

    fn put(&self, key: &str, payload: &[u8]) {
        let object = object(payload, Compression::None);
        self.server.seed([(format!("b/p/{key}"), object)]);
    }

    fn put_rubbish(&self, keys: &[String]) {
        let objects = keys
            .iter()
            .map(|k| (format!("b/p/{k}"), b"rubbish".to_vec()));
        self.server.seed(objects);
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = deltafold();
        command.args(args).envs(self.server.s3().env());
        command
    }

    fn succeeds(&self, args: &[&str]) -> Value {
        let args = [args, &["--output", "json", "--store", "s3://b/p"]].concat();
        let (code, outcome, stderr) = run_json(&mut self.command(&args));
        assert_eq!(code, 0, "{args:?}: {outcome} {stderr}");
        outcome
    }

    fn listings(&self) -> usize {
        let requests = self.server.requests();
        requests.iter().filter(|r| r.contains("list-type")).count()
    }
}

/// Returns the names that a list of problems or findings calls foreign.
fn foreign(list: &Value) -> Vec<String> {
    let of = |p: &Value| serde_json::from_value::<Vec<String>>(p["snapshots"].clone()).unwrap();
    let mut problems = list.as_array().unwrap().iter();
    let problem = problems.find(|p| p["reason"] == "ForeignObject");
    problem.map(of).unwrap_or_default()
}

#[test]
fn who_writes_odd_keys_disables_nothing() {
    let bucket = Bucket::new();
    let mut odd = odd_snapshots(&bucket.full);
    bucket.put_rubbish(&odd);
    odd.sort();
    let list = bucket.succeeds(&["list"]);
    assert_eq!(foreign(&list["problems"]), odd, "{list}");
    assert_eq!(list["latest_revision"], bucket.last);
    let verified = bucket.succeeds(&["verify", "--level", "fold"]);
    assert_eq!(foreign(&verified["findings"]), odd, "{verified}");

    let dir = scratch::folder().unwrap();
    let to = dir.path().join("db");
    let restored = bucket.succeeds(&["restore", "--to-snapshot", to.to_str().unwrap()]);
    assert_eq!(restored["revision"], bucket.last);
    let compacted = bucket.succeeds(&["compact"]);
    assert_eq!(compacted["revision"], bucket.last);
    let copies = scratch::folder().unwrap();
    let mut copy = bucket.command(&["copy", "--output", "json", "--from", "s3://b/p", "--to"]);
    let (code, outcome, stderr) = run_json(copy.arg(copies.path()));
    assert_eq!((code, &outcome["copied"]), (0, &3.into()), "{stderr}");

    // Without a signature, listings take the same way.
    let unsigned = ["--store-option", "skip_signature=true"];
    let list = bucket.succeeds(&[&["list"][..], &unsigned].concat());
    assert_eq!(foreign(&list["problems"]), odd, "{list}");
}

#[test]
fn who_writes_odd_keys_has_nothing_deleted() {
    let bucket = Bucket::new();
    let full = &bucket.full;
    let mut odd = odd_snapshots(full);
    let snapshots = odd.len();
    // A temporary object that looks abandoned next to the one of a running operation, and notes.
    const STAGED: &str = "Full.00000000000000ff.1.1.0000000000000001";
    let abandoned = format!("deltafold-staging//{STAGED}");
    odd.push(abandoned.clone());
    for key in [
        "deltafold-pins//{}",
        "deltafold-pins/{}/",
        "deltafold-pins//{}",
        "deltafold-staging/../v2/{}",
    ] {
        odd.push(key.replace("{}", full));
    }
    bucket.put_rubbish(&odd);
    bucket.put_rubbish(&[
        format!("deltafold-pins/{full}"),
        format!("deltafold-staging/{STAGED}"),
    ]);
    let two_days = chrono::TimeDelta::days(2);
    bucket.server.set_age(&format!("b/p/{abandoned}"), two_days);
    let before = bucket.server.objects();
    let args = [&NOTHING[..], &["--apply"]].concat();
    let collected = bucket.succeeds(&[&["gc"][..], &args].concat());
    assert_eq!(collected["totals"]["deleted"]["objects"], 0, "{collected}");
    // Objects beside snapshots are not touched either; foreign objects among the notes are not counted.
    let foreign = collected["foreign_objects"].as_u64().unwrap();
    assert!(foreign >= snapshots as u64, "{collected}");
    bucket.succeeds(&["compact"]);
    let after = bucket.server.objects();
    for (key, content) in &before {
        assert!(after.get(key) == Some(content), "{key:?}");
    }
}

#[test]
fn who_writes_a_thousand_odd_keys_costs_no_request() {
    let with = |name: &dyn Fn(usize) -> String| {
        let bucket = Bucket::new();
        let keys: Vec<String> = (0..1100).map(name).collect();
        bucket.put_rubbish(&keys);
        bucket.server.forget_requests();
        let list = bucket.succeeds(&["list"]);
        assert_eq!(foreign(&list["problems"]).len(), keys.len());
        (bucket.listings(), bucket.server.requests().len())
    };
    let sound = with(&|n| format!("v2/rubbish-{n:04}"));
    assert_eq!(with(&|n| format!("v2/rubbish-{n:04}//\n")), sound);
}

#[test]
fn who_names_keys_does_not_steer_the_terminal() {
    let bucket = Bucket::new();
    // Lines of output that are forged.
    let forged = "v2/x\nFORGED: all is well\r";
    bucket.put_rubbish(&[forged.to_owned()]);
    bucket.put_rubbish(&odd_snapshots(&bucket.full)[5..8]);
    let folder = scratch::folder().unwrap();
    let copy = folder.path().join("copy").to_str().unwrap().to_owned();
    let data_dir = format!("{copy}\u{202e}\u{1b}[2J");
    let full = bucket.full.rsplit('/').next().unwrap();
    // Every report with a table, a list of names or a text of the user's.
    let commands: [&[&str]; 10] = [
        &["list"],
        &["list", "--deep"],
        &["status", "--max-age", "9999d"],
        &["verify", "--no-record"],
        &["verify", "--all-chains", "--no-record"],
        &["compact", "--dry-run"],
        &["gc", "--policy", "limit", "--limit", "1"],
        &["pin", full, "--reason", forged],
        &["restore", "--dry-run", "--data-dir", &data_dir],
        &["copy", "--to", &copy],
    ];
    for (command, log, columns) in commands.iter().flat_map(|command| {
        [("text", "80"), ("text", "200"), ("json", "80")].map(|(log, wide)| (command, log, wide))
    }) {
        let store = if command[0] == "copy" {
            "--from"
        } else {
            "--store"
        };
        let args = [command, &[store, "s3://b/p", "--log-format", log][..]].concat();
        let output = bucket
            .command(&args)
            .env("COLUMNS", columns)
            .output()
            .unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!stdout.is_empty(), "{command:?}: {stderr}");
        for (name, text) in [("stdout", &stdout), ("stderr", &stderr)] {
            let steers = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
            assert!(!text.contains(steers), "{command:?}: {name}: {text:?}");
            let is_forged = |line: &str| line.trim_start().starts_with("FORGED");
            assert!(!text.lines().any(is_forged), "{command:?}: {name}: {text}");
        }
        if ["list", "verify"].contains(&command[0]) && columns == "200" {
            assert!(stdout.contains("x\\nFORGED: all is well\\r"), "{stdout}");
            assert!(stdout.contains("\\u{1b}[2J"), "{stdout}");
        }
    }
    // JSON has the names unchanged, as escapes.
    for log in ["text", "json"] {
        let mut list = bucket.command(&["list", "--store", "s3://b/p", "--output", "json"]);
        let output = list.args(["--log-format", log]).output().unwrap();
        for text in [output.stdout, output.stderr] {
            let text = String::from_utf8(text).unwrap();
            let steers = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
            assert!(!text.contains(steers), "{text:?}");
        }
    }
    let list = bucket.succeeds(&["list"]);
    assert!(foreign(&list["problems"]).contains(&"v2/\u{9b}31m".to_owned()));
    assert!(foreign(&list["problems"]).contains(&forged.to_owned()));
}

/// Returns the flags of each kind of store at an endpoint, with secrets.
fn stores(endpoint: &str) -> Vec<(&'static str, Vec<String>)> {
    let key = "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2U=";
    let account = serde_json::json!({
        "type": "service_account", "gcs_base_url": endpoint, "disable_oauth": true,
        "client_email": "", "private_key": "", "private_key_id": "",
    });
    let options = |of: &[&str]| of.iter().map(|o| (*o).to_owned()).collect();
    let at = |key: &str| format!("{key}={endpoint}");
    let storage = format!("storage_url={endpoint}/v1/AUTH_x");
    let auth = format!("auth_url={endpoint}/v3");
    vec![
        (
            "s3://b/p",
            options(&[
                &at("endpoint"),
                "region=us-east-1",
                "access_key_id=secret-id",
                "secret_access_key=secret-key",
                "session_token=secret-token",
                "server_side_encryption=sse-c",
                &format!("sse_customer_key_base64={key}"),
            ]),
        ),
        (
            "swift://b/p",
            options(&[&storage, "auth_token=secret-token"]),
        ),
        (
            "swift://b/p",
            options(&[
                &auth,
                "username=u",
                "password=secret-password",
                "tenant_name=t",
            ]),
        ),
        (
            "az://b/p",
            options(&[
                &at("endpoint"),
                "allow_http=true",
                "account_name=a",
                &format!("account_key={key}"),
            ]),
        ),
        (
            "gs://b/p",
            options(&[&format!("service_account_key={account}"), "allow_http=true"]),
        ),
    ]
}

#[test]
fn who_redirects_is_sent_no_credentials() {
    let (server, listener) = (
        FakeS3::start(Dialect::default()),
        FakeS3::start(Dialect::default()),
    );
    let elsewhere = listener.s3().endpoint();
    for status in [301, 302, 303, 307, 308] {
        server.redirect(status, elsewhere);
        for (url, options) in stores(server.s3().endpoint()) {
            let mut command = deltafold();
            command.args(["list", "--output", "json", "--store", url]);
            for option in &options {
                command.args(["--store-option", option]);
            }
            server.forget_requests();
            let (code, outcome, stderr) = run_json(&mut command);
            let message = outcome["message"].as_str().unwrap_or_default();
            assert_eq!(
                (code, outcome["reason"].as_str()),
                (78, Some("Configuration")),
                "{url}: {outcome} {stderr}"
            );
            assert!(
                message.contains(&format!("({status}) to {elsewhere},")),
                "{url}: {message}"
            );
            assert!(
                !(message.to_owned() + &stderr).contains("secret-"),
                "{stderr}"
            );
            // The server was asked once for each listing, and nobody else was.
            assert!((1..=4).contains(&server.requests().len()), "{url}");
            assert_eq!(listener.requests(), [""; 0], "{url} {status}");
        }
    }
    // Writes are not redirected either.
    let bucket = Bucket::new();
    bucket.server.redirect(307, elsewhere);
    let args = ["compact", "--output", "json", "--store", "s3://b/p"];
    let (code, _, stderr) = run_json(&mut bucket.command(&args));
    assert_eq!(code, 78, "{stderr}");
    assert_eq!(listener.requests(), [""; 0]);
}

#[test]
fn who_echoes_what_was_asked_has_no_secret_printed() {
    let server = FakeS3::start(Dialect {
        refuses_at_length: true,
        ..Dialect::default()
    });
    for (url, options) in stores(server.s3().endpoint()) {
        let mut command = deltafold();
        command.args(["list", "--output", "json", "--store", url]);
        command.args(["--log-format", "json", "--log-level", "debug"]);
        for option in &options {
            command.args(["--store-option", option]);
        }
        let (code, outcome, stderr) = run_json(&mut command);
        let message = outcome["message"].as_str().unwrap_or_default();
        assert_eq!(code, 77, "{url}: {message:.2000}");
        assert!(message.len() <= 1024, "{url}: {}", message.len());
        assert!(stderr.len() < 10_000, "{url}: {}", stderr.len());
        assert!(
            message.ends_with("check the credentials and what they allow"),
            "{message}"
        );
        for secret in ["secret-", "c2VjcmV0c2Vj", "Signature=", "SharedKey a:"] {
            assert!(!message.contains(secret), "{url}: {message}");
            assert!(!stderr.contains(secret), "{url}: {stderr}");
        }
    }
}

/// Half a listing must not look like a whole backup: servers that know only version 1 of S3's listing, and proxies that
/// answer from a cache, end every command.
#[test]
fn a_listing_is_whole_or_an_error() {
    let circles = Dialect {
        next_page: NextPage::Circles,
        ..Dialect::default()
    };
    let cut_off = Dialect {
        next_page: NextPage::Hidden,
        lists_small_pages: true,
        ..Dialect::default()
    };
    let wide_circles = Dialect {
        lists_small_pages: true,
        ..circles
    };
    let endless = "listing does not end";
    for (dialect, code, text, most) in [
        (circles, 69, endless, 10_000),
        (wide_circles, 69, endless, 10_000),
        (cut_off, 78, "listing is cut off", 12),
    ] {
        let bucket = Bucket::with(dialect);
        bucket.put_rubbish(&["v2/x", "v2/y", "v2/z"].map(str::to_owned));
        let folder = scratch::folder().unwrap();
        let there = folder.path().join("there");
        let there = there.to_str().unwrap();
        for args in [
            &["list", "--store", "s3://b/p"][..],
            &["status", "--store", "s3://b/p"],
            &["verify", "--store", "s3://b/p"],
            &["restore", "--store", "s3://b/p", "--data-dir", there],
            &["compact", "--store", "s3://b/p"],
            &["gc", "--store", "s3://b/p", "--policy", "exponential"],
            &["copy", "--from", "s3://b/p", "--to", there],
            &["store", "check", "--store", "s3://b/p"],
        ] {
            // Thousands of requests each.
            if text == endless && !["list", "gc"].contains(&args[0]) {
                continue;
            }
            let before = bucket.server.requests().len();
            let mut command = bucket.command(&[args, &["--output", "json"]].concat());
            let (got, outcome, stderr) = run_json(&mut command);
            assert_eq!(got, code, "{args:?}: {outcome} {stderr}");
            let message = outcome["message"].as_str().unwrap();
            assert!(message.contains(text), "{args:?}: {message}");
            // A page without an object costs 32 KiB of the 128 MiB that a listing may have.
            let requests = bucket.server.requests().len() - before;
            assert!(requests <= most, "{args:?}: {requests}");
        }
    }
}

#[test]
fn who_announces_a_terabyte_ends_no_process() {
    let bucket = Bucket::with(Dialect {
        announces_terabytes: true,
        ..Dialect::default()
    });
    let retries = ["--store-option", "max_retries=0"];
    let args = ["compact", "--output", "json", "--store", "s3://b/p"];
    let (code, outcome, stderr) = run_json(&mut bucket.command(&[&args[..], &retries].concat()));
    // The object is there, whatever the server says about it.
    assert_eq!(
        (code, &outcome["status"]),
        (0, &"Succeeded".into()),
        "{outcome} {stderr}"
    );
}
