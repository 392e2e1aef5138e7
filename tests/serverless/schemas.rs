//! The schemas in docs/reference/schemas.json are complete and strict. Every result in every test is checked by
//! them: `support::run_json` does it.

use super::documents::{TEXT, run};
use crate::support::made_backups::{BASE, Bucket, LAST};
use crate::support::manifests::read;
use crate::support::pages;
use crate::support::schema::{self, Schema};
use crate::support::scratch;
use crate::support::{copy_fixture, deltafold, fixture_names, run_json};
use deltafold::Reason;
use deltafold::backup::retention::RetentionReason;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;

const MESSAGE: &str = "termination-message";

/// Returns the names of the schemas of what commands print.
fn results() -> impl Iterator<Item = String> {
    schema::names().into_iter().filter(|name| name != MESSAGE)
}

/// Every object with named fields describes them all, requires them all and allows no other.
#[test]
fn schemas_describe_every_field() {
    fn check(value: &Value, at: &str) {
        if let Some(properties) = value.get("properties").and_then(Value::as_object)
            && value.get("type") == Some(&json!("object"))
        {
            assert_eq!(value["additionalProperties"], false, "{at}");
            let required: BTreeSet<&str> = value["required"]
                .as_array()
                .unwrap()
                .iter()
                .map(|r| r.as_str().unwrap())
                .collect();
            let named: BTreeSet<&str> = properties.keys().map(String::as_str).collect();
            assert_eq!(required, named, "{at}");
            for (name, field) in properties {
                let description = field["description"].as_str().unwrap_or_default();
                assert!(description.len() > 5, "{at}: {name}");
            }
        }
        let children: Vec<(String, &Value)> = match value {
            Value::Object(o) => o.iter().map(|(k, v)| (format!("{at}/{k}"), v)).collect(),
            Value::Array(a) => a.iter().map(|v| (at.to_owned(), v)).collect(),
            _ => Vec::new(),
        };
        for (at, child) in children {
            check(child, &at);
        }
    }
    let all = schema::all();
    check(all, "");
    let real: Vec<&str> = Reason::ALL.iter().map(|r| r.as_str()).collect();
    assert_eq!(all["$defs"]["Reason"]["enum"], json!(real));
}

/// Each reason belongs to exactly one exit code.
#[test]
fn schemas_know_every_failure() {
    for name in results() {
        let schema = Schema::of(&name);
        for &reason in Reason::ALL {
            for code in Reason::ALL.iter().map(|r| r.exit_code()) {
                let failure = json!({"status": "Failed", "code": code, "reason": reason.as_str(), "message": "it failed"});
                let own = code == reason.exit_code();
                assert_eq!(schema.is_valid(&failure), own, "{name}: {failure}");
            }
        }
    }
}

#[test]
fn lines_of_export_are_as_documented() {
    let schema = Schema::of("export");
    for name in fixture_names() {
        let store = copy_fixture(&name);
        let (code, lines, stderr) = run(&["export", "--store", store.path().to_str().unwrap()]);
        assert_eq!(code, 0, "{stderr}");
        assert!(!lines.is_empty(), "{name}");
        for line in lines.lines() {
            schema.check(&serde_json::from_str(line).unwrap());
        }
    }
}

#[test]
fn every_reason_of_gc_is_documented() {
    let reasons = &schema::all()["$defs"]["Object"]["properties"]["reason"]["enum"];
    let reasons: Vec<&str> = reasons
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r.as_str().unwrap())
        .collect();
    let pages = pages::of_users();
    let documents: String = pages.iter().map(|p| read(p)).collect();
    for name in RetentionReason::NAMES {
        assert!(reasons.contains(name), "{name}");
    }
    for name in reasons {
        assert!(documents.contains(&format!("`{name}`")), "{name}");
    }
}

#[test]
fn failures_are_as_documented() {
    let empty = scratch::folder().unwrap();
    let gap = Bucket::with_base();
    gap.delta(1601, LAST, 9);
    let damaged = Bucket::with_base();
    damaged.put("v2/Incr-00000747-00000748-1795224690.gz", b"damaged");
    let usual = copy_fixture("kubernetes");
    let taken = scratch::folder().unwrap();
    fs::create_dir(taken.path().join("member")).unwrap();
    fs::write(taken.path().join("member/any"), "").unwrap();
    let new = empty.path().join("new");
    let [empty, gap, damaged, usual, taken, new] = [
        empty.path(),
        gap.path(),
        damaged.path(),
        usual.path(),
        taken.path(),
        &new,
    ]
    .map(|p| p.to_str().unwrap());
    fn into<'a>(args: &[&'a str], store: &'a str, dir: &'a str) -> Vec<&'a str> {
        let head = ["restore", "--store", store, "--data-dir", dir];
        [&head[..], args].concat()
    }
    let restores = [
        (into(&["--bump-revision", "1"], usual, new), 64, "Usage"),
        (into(&["--name", "a"], usual, new), 64, "Usage"),
        (into(&["--lease-ttl", "0s"], usual, new), 64, "Usage"),
        (into(&["--leases", "some"], usual, new), 64, "Usage"),
        (into(&["--if-needed", "look"], usual, new), 64, "Usage"),
        (vec!["restore", "--data-dir", new], 64, "Usage"),
        (vec!["restore", "--store", usual], 64, "Usage"),
        (into(&[], gap, new), 65, "RevisionGap"),
        (into(&[], damaged, new), 65, "CorruptSnapshot"),
        (into(&[], empty, new), 66, "NoSnapshots"),
        (into(&["--revision", "9999"], usual, new), 66, "OutOfRange"),
        (
            into(&["--timeline", "r1-00000000"], usual, new),
            66,
            "NoSuchTimeline",
        ),
        (into(&[], usual, taken), 73, "TargetExists"),
        (
            vec!["restore", "--snapshot", "no-such.db", "--data-dir", new],
            66,
            "NoSnapshots",
        ),
    ];
    for (args, code, reason) in [
        (&["compact"][..], 64, "Usage"),
        (&["compact", "--no-such-flag"], 64, "Usage"),
        (&["no-such-command"], 64, "Usage"),
        (
            &["compact", "--store", usual, "--revision", "0"],
            64,
            "Usage",
        ),
        (
            &["compact", "--store", usual, "--time", "noon"],
            64,
            "Usage",
        ),
        (
            &["compact", "--store", usual, "--keep-history", "some"],
            64,
            "Usage",
        ),
        (
            &["compact", "--store", usual, "--compression", "gzip:9"],
            64,
            "Usage",
        ),
        (
            &["compact", "--store", usual, "--temp-dir", "/dev/null"],
            64,
            "Usage",
        ),
        (&["compact", "--store", "ftp://host/dir"], 64, "Usage"),
        (&["list", "--store", ""], 64, "Usage"),
        (
            &["list", "--store", usual, "--log-level", "a=b=c"],
            64,
            "Usage",
        ),
        (&["compact", "--store", gap], 65, "RevisionGap"),
        (&["compact", "--store", damaged], 65, "CorruptSnapshot"),
        (&["compact", "--store", empty], 66, "NoSnapshots"),
        (&["list", "--store", empty], 66, "NoSnapshots"),
        (
            &["compact", "--store", usual, "--revision", "9999"],
            66,
            "OutOfRange",
        ),
        (
            &["compact", "--store", usual, "--timeline", "r1-00000000"],
            66,
            "NoSuchTimeline",
        ),
        (&["get", "k", "--store", usual], 66, "KeyNotFound"),
        (&["history", "k", "--store", usual], 66, "KeyNotFound"),
        (
            &["diff", "--from", "9999", "--store", usual],
            66,
            "OutOfRange",
        ),
        (&["export", "--store", gap], 65, "RevisionGap"),
        (&["export", "--prefix", "k"], 64, "Usage"),
        (
            &["list", "--store", usual, "--store-option", "a=b"],
            78,
            "Configuration",
        ),
    ]
    .into_iter()
    .chain(restores.iter().map(|(a, c, r)| (a.as_slice(), *c, *r)))
    {
        for json_by in [&["--output", "json"][..], &["--output=json"]] {
            let mut c = deltafold();
            c.env(TEXT.0, TEXT.1).args(args).args(json_by);
            let (got, result, stderr) = run_json(&mut c);
            let told = result["reason"].as_str().unwrap_or_default();
            assert_eq!((got, told), (code, reason), "{args:?}: {stderr}");
            assert_eq!(result["code"], code, "{args:?}");
            let told = stderr.lines().any(|l| l.starts_with("error: "));
            assert!(told, "{args:?}: {stderr}");
        }
        // Without --output json there is only the exit code and a line of text.
        let (got, stdout, stderr) = run(args);
        assert_eq!((got, stdout.as_str()), (code, ""), "{args:?}");
        assert!(stderr.contains("error: "), "{args:?}: {stderr}");
    }
}

/// The schemas are strict.
#[test]
fn schemas_refuse_what_is_not_documented() {
    let schema = Schema::of("compact");
    let b = Bucket::with_base();
    b.delta(BASE + 1, LAST, 6);
    let good = b.compact(&[]);
    schema.check(&good);
    for field in good.as_object().unwrap().keys() {
        let mut bad = good.clone();
        bad.as_object_mut().unwrap().remove(field);
        assert!(!schema.is_valid(&bad), "without {field}");
    }
    for (field, value) in [
        ("more", json!(1)),
        ("status", json!("Done")),
        ("snapshot", json!(1)),
        ("base", json!(null)),
        ("hash_kv", json!(4_294_967_296_u64)),
        ("dry_run", json!("true")),
        ("bytes_written", json!(-1)),
        ("metadata_revision", json!(null)),
        ("compression", json!("brotli")),
    ] {
        let mut bad = good.clone();
        bad[field] = value;
        assert!(!schema.is_valid(&bad), "{field}: {}", bad[field]);
    }

    // A list that breaks off says so.
    let get = Schema::of("get");
    let good = b.run("get", &["--prefix", "/registry/"]).1;
    let mut broken = good.clone();
    broken["status"] = "Failed".into();
    assert!(!get.is_valid(&broken));
    broken["code"] = 74.into();
    broken["reason"] = "Io".into();
    broken["message"] = "it failed".into();
    get.check(&broken);
    for (field, value) in [
        ("key_base64", json!("AA==")),
        ("value", json!(null)),
        ("more", json!(1)),
    ] {
        let mut bad = good.clone();
        bad["keys"][0][field] = value;
        assert!(!get.is_valid(&bad), "{field}");
    }
}
