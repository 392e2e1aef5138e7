//! The documents say what the program does: exit codes, schemas, flags, settings, commands.

use crate::support::made_backups::{BASE, Bucket, LAST, T0};
use crate::support::schema::Schema;
use crate::support::scratch;
use crate::support::{copy_fixture, deltafold, fixture_names, restore, rounds, run_json};
use deltafold::Reason;
use object_store::ClientConfigKey;
use object_store::aws::AmazonS3ConfigKey;
use object_store::azure::AzureConfigKey;
use object_store::gcp::GoogleConfigKey;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// What people read.
const DOCUMENTS: [&str; 12] = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/controller.md",
    "docs/exit-codes.md",
    "docs/metrics.md",
    "docs/migration.md",
    "docs/quorum-loss.md",
    "docs/sizing.md",
    "docs/stores.md",
    "tests/README.md",
];

/// The commands that print JSON, each with a schema.
const COMMANDS: [&str; 16] = [
    "snapshot", "compact", "list", "restore", "get", "history", "diff", "export", "apply",
    "verify", "maintain", "lock", "copy", "gc", "undelete", "pin",
];

/// Settings of every object store that are deltafold's own.
const OWN_SETTINGS: [&str; 5] = [
    "max_retries",
    "requests",
    "retry_timeout",
    "ca_certificate",
    "secret_dir",
];

/// What prints JSON, by the name of its schema.
fn schemas() -> Vec<&'static str> {
    let commands = COMMANDS.into_iter().filter(|c| *c != "snapshot");
    commands
        .chain([
            "snapshot",
            "follow",
            "store-check",
            "task",
            "policy",
            "cleanup",
        ])
        .collect()
}

/// Also where the tests run in a Pod.
const TEXT: (&str, &str) = ("DELTAFOLD_LOG_FORMAT", "text");

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn read(name: &str) -> String {
    fs::read_to_string(path(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Runs to the end: exit code, standard output, standard error.
fn run(args: &[&str]) -> (i32, String, String) {
    let mut c = deltafold();
    let out = c.env(TEXT.0, TEXT.1).args(args).output().unwrap();
    let text = |b: Vec<u8>| String::from_utf8(b).unwrap();
    let code = out.status.code().unwrap();
    (code, text(out.stdout), text(out.stderr))
}

/// The files in `jobs/`: their names and their documents.
fn jobs() -> Vec<(String, Vec<Value>)> {
    let files = fs::read_dir(path("jobs")).unwrap();
    let mut names: Vec<String> = files
        .map(|f| format!("jobs/{}", f.unwrap().file_name().to_str().unwrap()))
        .filter(|name| name.ends_with(".yaml"))
        .collect();
    names.sort();
    let parse = |name: String| {
        let text = read(&name);
        let documents = text.split("\n---\n");
        let documents = documents.map(|d| yaml_serde::from_str(d).unwrap());
        let documents = documents.collect();
        (name, documents)
    };
    names.into_iter().map(parse).collect()
}

/// Every value of this name, wherever one stands.
fn all_named<'v>(value: &'v Value, name: &str) -> Vec<&'v Value> {
    let mut found = Vec::new();
    match value {
        Value::Object(o) => {
            found.extend(o.get(name));
            found.extend(o.values().flat_map(|v| all_named(v, name)));
        }
        Value::Array(a) => found.extend(a.iter().flat_map(|v| all_named(v, name))),
        _ => {}
    }
    found
}

/// The cells of a Markdown table's rows, wherever one stands in the text.
fn rows(text: &str) -> Vec<Vec<&str>> {
    let lines = text.lines().filter_map(|l| l.strip_prefix('|'));
    lines
        .map(|l| l.trim_end_matches('|').split('|').map(str::trim).collect())
        .collect()
}

/// The commands in a text's blocks of shell.
fn shell_blocks(text: &str) -> Vec<&str> {
    let blocks = text.split("```sh\n").skip(1);
    blocks
        .map(|b| b.split("```").next().unwrap().trim())
        .collect()
}

/// `DELTAFOLD_TEST_WRITE_SCHEMAS=1` writes them.
#[test]
fn schemas_are_made_from_the_types() {
    for (name, schema) in deltafold::cli::schemas() {
        let file = format!("docs/{name}.schema.json");
        let text = serde_json::to_string_pretty(&schema).unwrap() + "\n";
        if std::env::var_os("DELTAFOLD_TEST_WRITE_SCHEMAS").is_some() {
            fs::write(path(&file), &text).unwrap();
        }
        let is_same = read(&file) == text;
        assert!(
            is_same,
            "{file} is not as the types are: CONTRIBUTING.md tells how to write it"
        );
    }
}

#[test]
fn every_reason_is_documented_with_its_code() {
    let text = read("docs/exit-codes.md");
    let documented: Vec<(String, String, String)> = rows(&text)
        .iter()
        .filter(|cells| cells[0].parse::<u8>().is_ok_and(|code| code > 0))
        .map(|cells| {
            assert!(cells[3].len() > 10 && cells[4].len() > 10, "{cells:?}");
            let reason = cells[1].trim_matches('`');
            (cells[0].to_owned(), reason.to_owned(), cells[2].to_owned())
        })
        .collect();
    let real: Vec<_> = Reason::ALL
        .iter()
        .map(|r| {
            let retry = if r.is_retryable() { "yes" } else { "no" };
            (r.exit_code().to_string(), r.to_string(), retry.to_owned())
        })
        .collect();
    assert_eq!(documented, real);
}

#[test]
fn jobs_fail_at_once_on_what_a_retry_cannot_mend() {
    // A process that a signal ended is not judged by its code.
    let real: BTreeSet<u8> = Reason::ALL
        .iter()
        .filter(|r| !r.is_retryable() && **r != Reason::Terminated)
        .map(|r| r.exit_code())
        .collect();
    let text = read("docs/exit-codes.md");
    let rule = text.split_once("action: FailJob").unwrap().1;
    let values = rule.split_once("values: [").unwrap().1;
    let values = values.split_once(']').unwrap().0;
    let told: BTreeSet<u8> = values.split(", ").map(|v| v.parse().unwrap()).collect();
    assert_eq!(told, real);
    let mut rules = 0;
    for (name, documents) in jobs() {
        for codes in documents.iter().flat_map(|d| all_named(d, "onExitCodes")) {
            let told: BTreeSet<u8> = serde_json::from_value(codes["values"].clone()).unwrap();
            assert_eq!(told, real, "{name}");
            rules += 1;
        }
    }
    assert_eq!(rules, 8);
}

fn schema(name: &str) -> Value {
    serde_json::from_str(&read(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Every object with named fields describes them all, needs them all and takes no other.
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
    let real: Vec<&str> = Reason::ALL.iter().map(|r| r.as_str()).collect();
    for command in schemas() {
        let name = &format!("docs/{command}-result.schema.json");
        let schema = schema(name);
        check(&schema, name);
        let reasons = &schema["$defs"]["Reason"]["enum"];
        assert_eq!(*reasons, json!(real), "{name}");
    }
}

/// Each reason goes with its own code, and with no other.
#[test]
fn schemas_know_every_failure() {
    for name in schemas() {
        let schema = Schema::of(name);
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
fn results_of_compact_are_as_documented() {
    let schema = Schema::of("compact");
    let title = |result: &Value| {
        schema.check(result);
        (
            result["status"].as_str().unwrap().to_owned(),
            result["dry_run"].as_bool().unwrap(),
        )
    };
    let is = |status: &str, dry_run: bool| (status.to_owned(), dry_run);
    for name in fixture_names() {
        for keep in ["latest", "all", "1h"] {
            let store = copy_fixture(&name);
            let compact = |args: &[&str]| {
                let mut c = deltafold();
                c.args(["compact", "--output", "json", "--store"]);
                c.arg(store.path())
                    .args(["--keep-history", keep])
                    .args(args);
                let (code, result, stderr) = run_json(&mut c);
                assert_eq!(code, 0, "{stderr}");
                result
            };
            assert_eq!(title(&compact(&["--dry-run"])), is("Succeeded", true));
            assert_eq!(title(&compact(&[])), is("Succeeded", false));
            assert_eq!(title(&compact(&[])), is("NothingToDo", false));
            assert_eq!(title(&compact(&["--dry-run"])), is("NothingToDo", true));
        }
    }
    // Warnings, a suffix of our own, a timeline that is not the first.
    let b = Bucket::with_base();
    b.delta(BASE + 1, LAST, 6);
    b.altered_delta(1600, 1900, 100);
    b.put("v2/notes.txt", b"hello");
    let result = b.compact(&["--compression", "zstd"]);
    assert_eq!(title(&result), is("Succeeded", false));
    assert_eq!(result["warnings"].as_array().unwrap().len(), 3, "{result}");
    assert!(result["timeline"].as_str().unwrap().starts_with('r'));
}

#[test]
fn results_of_copy_are_as_documented() {
    let schema = Schema::of("copy");
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    b.delta(1500, LAST, 9);
    b.put("v2/Incr-00000003-00000004-5.gz", b"an orphan");
    b.put("v2/notes.txt", b"hello");
    let target = scratch::folder().unwrap();
    let copy = |args: &[&str]| {
        let mut c = deltafold();
        c.args(["copy", "--output", "json", "--from"]).arg(b.path());
        let (code, result, stderr) = run_json(c.arg("--to").arg(target.path()).args(args));
        schema.check(&result);
        let status = result["status"].as_str().unwrap().to_owned();
        (code, status, result["copied"].clone(), stderr)
    };
    let is = |told: (i32, String, Value, String), code: i32, status: &str, copied: Value| {
        assert_eq!(
            (told.0, told.1.as_str(), told.2),
            (code, status, copied),
            "{}",
            told.3
        );
    };
    is(copy(&["--dry-run"]), 0, "Succeeded", 3.into());
    is(copy(&["--max-backup-age", "0"]), 0, "NothingToDo", 0.into());
    let wait = [
        "--wait-for-final",
        "--wait-timeout",
        "1ms",
        "--compression",
        "zstd",
    ];
    is(copy(&wait), 0, "Succeeded", 3.into());
    is(copy(&[]), 0, "NothingToDo", 0.into());
    b.put(
        &format!("v2/Full-00000000-{LAST:08}-{}.gz", T0 + 99),
        b"damaged",
    );
    is(copy(&[]), 65, "Failed", 0.into());
    is(copy(&["--interval", "0s"]), 64, "Failed", Value::Null);
}

#[test]
fn results_of_restore_are_as_documented() {
    let schema = Schema::of("restore");
    let folder = scratch::folder().unwrap();
    let folder = folder.path();
    let title = |(code, result, stderr): (i32, Value, String)| {
        assert_eq!(code, 0, "{stderr}");
        schema.check(&result);
        let reason = result["decision"]["reason"].as_str().unwrap().to_owned();
        let status = result["status"].as_str().unwrap().to_owned();
        (status, reason, result)
    };
    let of = |ended: (i32, Value, String), status: &str, reason: &str| {
        let (told, why, result) = title(ended);
        assert_eq!((told.as_str(), why.as_str()), (status, reason), "{result}");
        result
    };
    let file = |store: &Path, to: &Path, args: &[&str]| {
        let mut c = deltafold();
        c.args(["restore", "--output", "json", "--store"]);
        c.arg(store).arg("--to-snapshot").arg(to).args(args);
        run_json(&mut c)
    };
    for name in fixture_names() {
        let store = copy_fixture(&name);
        let store = store.path();
        let dir = folder.join(&name);
        let dry = restore(store, &dir, &["--dry-run"]);
        assert_eq!(of(dry, "Succeeded", "Asked")["dry_run"], true);
        let done = restore(store, &dir, &["--keep-history", "1h"]);
        of(done, "Succeeded", "Asked");
        for look in ["sanity", "full"] {
            let args = ["--if-needed", look];
            let kept = of(restore(store, &dir, &args), "NotNeeded", "MemberSound");
            let looked_at = usize::from(look == "full");
            assert_eq!(kept["candidates"].as_array().unwrap().len(), looked_at);
        }
        fs::remove_dir_all(dir.join("member/wal")).unwrap();
        for dry_run in [&["--dry-run"][..], &[]] {
            let args = [&["--if-needed", "sanity"], dry_run].concat();
            let done = of(restore(store, &dir, &args), "Succeeded", "WalMissing");
            let kept = done["kept_aside"].as_array().unwrap();
            assert_eq!(kept.len(), usize::from(dry_run.is_empty()), "{done}");
        }
        let to = folder.join(format!("{name}.db"));
        of(file(store, &to, &["--dry-run"]), "Succeeded", "Asked");
        let bumped = ["--bump-revision", "1000", "--mark-compacted"];
        let done = of(file(store, &to, &bumped), "Succeeded", "Asked");
        let restored = done["restored_revision"].as_i64().unwrap();
        assert_eq!(done["revision"], restored + 1000);
    }

    // One that is behind, and one that is damaged beside its copy; several stores, a WAL elsewhere.
    let usual = copy_fixture("kubernetes");
    let behind = folder.join("behind");
    of(
        restore(usual.path(), &behind, &["--revision", "500"]),
        "Succeeded",
        "Asked",
    );
    let wal = folder.join("wal");
    let args = [
        "--if-needed",
        "full",
        "--store",
        usual.path().to_str().unwrap(),
        "--store",
        folder.to_str().unwrap(),
    ];
    let done = restore(usual.path(), &behind, &args);
    let done = of(done, "Succeeded", "BehindBackup");
    let fates: Vec<&str> = done["candidates"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["status"].as_str().unwrap())
        .collect();
    assert_eq!(fates, ["Chosen", "NotChosen", "Excluded"], "{done}");
    let args = ["--if-needed", "full", "--wal-dir", wal.to_str().unwrap()];
    let new = restore(usual.path(), &folder.join("new"), &args);
    let new = of(new, "Succeeded", "MemberMissing");
    assert_eq!(new["wal_dir"], wal.to_str().unwrap());

    // A plain file, without its checksum: it is said, and taken.
    let plain = folder.join("kubernetes.db");
    let mut bytes = fs::read(&plain).unwrap();
    bytes.truncate(bytes.len() - 32);
    fs::write(&plain, bytes).unwrap();
    let mut c = deltafold();
    c.args(["restore", "--output", "json", "--snapshot"]);
    c.arg(&plain).arg("--data-dir").arg(folder.join("plain"));
    let done = of(run_json(&mut c), "Succeeded", "Asked");
    assert_eq!(done["warnings"].as_array().unwrap().len(), 1, "{done}");
    assert_eq!(done["base"], plain.to_str().unwrap());
}

#[test]
fn results_of_list_are_as_documented() {
    let schema = Schema::of("list");
    for name in fixture_names() {
        let store = copy_fixture(&name);
        for args in [&[][..], &["--deep"]] {
            let mut c = deltafold();
            c.args(["list", "--output", "json", "--store"]);
            c.arg(store.path()).args(args);
            let (code, result, stderr) = run_json(&mut c);
            assert_eq!(code, 0, "{stderr}");
            schema.check(&result);
        }
    }
    // Everything that can be wrong at once.
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    b.altered_delta(BASE + 1, 1400, 7);
    b.delta(1500, 1800, 9);
    b.altered_delta(1401, 1700, 10);
    b.put("v2/notes.txt", b"hello");
    b.put("v2/Incr-00001801-00001802-1795224800.gz", b"damaged");
    b.put(&format!("v2/Full-00000000-00001499-{}", T0 + 8), b"");
    b.put(
        &format!("v2/Full-00000000-00001499-{}.exclude", T0 + 8),
        b"",
    );
    for args in [&[][..], &["--deep"]] {
        let result = b.list(args);
        schema.check(&result);
        let problems = result["problems"].as_array().unwrap();
        assert!(problems.len() >= 2, "{result}");
    }
    // A gap, and a full without a name's promise.
    let b = Bucket::with_base();
    b.delta(1601, LAST, 9);
    let base = fs::read(b.path().join(format!("v2/Full-00000000-{BASE:08}-{T0}.gz")));
    let base = base.unwrap();
    b.put(&format!("v2/Full-00000000-00000700-{}.gz", T0 - 5), &base);
    b.put(&format!("v2/Full-00000000-00000800-{}.gz", T0 + 5), &base);
    for args in [&[][..], &["--deep"]] {
        schema.check(&b.list(args));
    }
    // Nothing that can be used.
    let b = Bucket::with_base();
    b.put(&format!("v2/Full-00000000-{BASE:08}-{T0}.gz.exclude"), b"");
    let result = b.list(&[]);
    schema.check(&result);
    assert_eq!(result["latest_revision"], Value::Null);
}

#[test]
fn results_of_reading_are_as_documented() {
    let [get, history, diff, export] = ["get", "history", "diff", "export"].map(Schema::of);
    let json = |store: &Path, args: &[&str], schema: &Schema| {
        let mut c = deltafold();
        c.arg(args[0])
            .args(["--output", "json", "--store"])
            .arg(store)
            .args(&args[1..]);
        let (code, result, stderr) = run_json(&mut c);
        assert_eq!(code, 0, "{args:?}: {stderr}");
        schema.check(&result);
        result
    };
    for name in fixture_names() {
        let store = copy_fixture(&name);
        let got = json(store.path(), &["get", "--prefix", ""], &get);
        json(store.path(), &["get", "--prefix", "no such"], &get);
        let keys = got["keys"].as_array().unwrap();
        let first = crate::support::expected(&name).hash_kv[0]
            .revision
            .to_string();
        let changed = json(store.path(), &["diff", "--from", &first], &diff);
        let changes = changed["changes"].as_array().unwrap();
        let texts = keys.iter().chain(changes).filter_map(|k| k["key"].as_str());
        for key in texts
            .filter(|k| !k.contains('\0'))
            .step_by(40)
            .take(rounds(1, 1000))
        {
            json(store.path(), &["history", "--", key], &history);
        }
        let lines = run(&["export", "--store", store.path().to_str().unwrap()]).1;
        let lines: Vec<Value> = lines
            .lines()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect();
        assert_eq!(&lines, keys);
        assert!(lines.iter().all(|l| export.is_valid(l)));
    }
    // The list is not so wide that anything passes; one that breaks off says so.
    let b = Bucket::with_base();
    let good = b.run("get", &["--prefix", "/registry/"]).1;
    assert!(get.is_valid(&good));
    let mut broken = good.clone();
    broken["status"] = "Failed".into();
    assert!(!get.is_valid(&broken));
    broken["code"] = 74.into();
    broken["reason"] = "Io".into();
    broken["message"] = "it failed".into();
    assert!(get.is_valid(&broken));
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

#[test]
fn results_of_collecting_garbage_are_as_documented() {
    let [gc, undelete, pin] = ["gc", "undelete", "pin"].map(Schema::of);
    let b = Bucket::with_base();
    b.delta(BASE + 1, 1499, 6);
    b.compact(&[]);
    let told = |command: &str, args: &[&str], schema: &Schema| {
        let (code, result, stderr) = b.run(command, args);
        assert_eq!(code, 0, "{args:?}: {stderr}");
        schema.check(&result);
        result["status"].as_str().unwrap().to_owned()
    };
    let base = format!("Full-00000000-{BASE:08}-{T0}.gz");
    let limit = ["--policy", "limit", "--limit", "1"];
    let with = |more: &[&'static str]| [&limit[..], more].concat();
    assert_eq!(told("pin", &[&base, "--reason", "why"], &pin), "Succeeded");
    assert_eq!(told("pin", &[&base], &pin), "NothingToDo");
    assert_eq!(told("gc", &limit, &gc), "NothingToDo");
    assert_eq!(told("pin", &[&base, "--unpin"], &pin), "Succeeded");
    assert_eq!(told("gc", &limit, &gc), "Succeeded");
    let recoverable = with(&["--purge-after", "1d", "--apply"]);
    assert_eq!(told("gc", &recoverable, &gc), "Succeeded");
    assert_eq!(told("undelete", &["--all"], &undelete), "Succeeded");
    assert_eq!(told("undelete", &["--all"], &undelete), "NothingToDo");
    assert_eq!(told("gc", &with(&["--apply"]), &gc), "Succeeded");
    assert_eq!(told("gc", &with(&["--apply"]), &gc), "NothingToDo");
    // Every reason that there is stands in the schema and in the README.
    let reasons =
        &schema("docs/gc-result.schema.json")["$defs"]["Object"]["properties"]["reason"]["enum"];
    let reasons: Vec<&str> = reasons
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r.as_str().unwrap())
        .collect();
    let readme = read("README.md");
    for &name in deltafold::backup::retention::RetentionReason::NAMES {
        assert!(reasons.contains(&name), "{name}");
    }
    for name in reasons {
        assert!(readme.contains(&format!("`{name}`")), "{name}");
    }
}

#[test]
fn failures_are_as_documented() {
    let schemas = COMMANDS.map(Schema::of);
    let empty = scratch::folder().unwrap();
    let gap = Bucket::with_base();
    gap.delta(1601, LAST, 9);
    let damaged = Bucket::with_base();
    damaged.put("v2/Incr-00000747-00000748-1795224690.gz", b"damaged");
    let usual = copy_fixture("kubernetes");
    let other = copy_fixture("etcd35-gzip");
    let taken = scratch::folder().unwrap();
    fs::create_dir(taken.path().join("member")).unwrap();
    fs::write(taken.path().join("member/any"), "").unwrap();
    let new = empty.path().join("new");
    let [empty, gap, damaged, usual, other, taken, new] = [
        empty.path(),
        gap.path(),
        damaged.path(),
        usual.path(),
        other.path(),
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
        (
            [into(&[], usual, new), vec!["--store", other]].concat(),
            65,
            "HistoryMismatch",
        ),
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
            for schema in &schemas {
                schema.check(&result);
            }
            let told = stderr.lines().any(|l| l.starts_with("error: "));
            assert!(told, "{args:?}: {stderr}");
        }
        // Without --output json nothing but the outcome's code and a line for people.
        let (got, stdout, stderr) = run(args);
        assert_eq!((got, stdout.as_str()), (code, ""), "{args:?}");
        assert!(stderr.contains("error: "), "{args:?}: {stderr}");
    }
}

/// The schemas are not so wide that anything passes.
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
        ("status", json!("NotNeeded")),
        ("status", json!("Failed")),
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

    let schema = Schema::of("restore");
    let folder = scratch::folder().unwrap();
    let (code, good, stderr) = restore(b.path(), &folder.path().join("data"), &[]);
    assert_eq!(code, 0, "{stderr}");
    schema.check(&good);
    for field in good.as_object().unwrap().keys() {
        let mut bad = good.clone();
        bad.as_object_mut().unwrap().remove(field);
        assert!(!schema.is_valid(&bad), "without {field}");
    }
    for (pointer, value) in [
        ("/more", json!(1)),
        ("/status", json!("NothingToDo")),
        ("/data_dir", json!(1)),
        ("/member", json!("a")),
        ("/member/id", json!(1)),
        ("/member/more", json!(1)),
        ("/decision/action", json!("Leave")),
        ("/decision/reason", json!("Other")),
        ("/candidates/0/status", json!("Excluded")),
        ("/candidates/0/reason", json!("RevisionGap")),
        ("/candidates/0/revision", json!(null)),
        ("/hash_kv", json!(4_294_967_296_u64)),
        ("/leases_added", json!(-1)),
        ("/warnings", json!([1])),
    ] {
        let mut bad = good.clone();
        match bad.pointer_mut(pointer) {
            Some(at) => *at = value.clone(),
            None => bad[&pointer[1..]] = value.clone(),
        }
        assert!(!schema.is_valid(&bad), "{pointer}: {value}");
    }
}

#[test]
fn help_and_version_succeed() {
    for args in [
        &["--help"][..],
        &["-h"],
        &["help"],
        &["compact", "--help"],
        &["list", "--help"],
        &["restore", "--help"],
        &["get", "--help"],
        &["history", "--help"],
        &["diff", "--help"],
        &["export", "--help"],
        &["verify", "--help"],
        &["maintain", "--help"],
        &["lock", "--help"],
        &["store", "check", "--help"],
        &["copy", "--help"],
        &["gc", "--help"],
        &["undelete", "--help"],
        &["pin", "--help"],
        &["snapshot", "full", "--help"],
        &["snapshot", "delta", "--help"],
        &["snapshot", "follow", "--help"],
        &["completions", "--help"],
    ] {
        let (code, stdout, stderr) = run(args);
        assert_eq!((code, stderr.as_str()), (0, ""), "{args:?}");
        assert!(stdout.contains("Usage: deltafold"), "{args:?}: {stdout}");
        if args.contains(&"--help") {
            assert!(stdout.contains("Examples:"), "{args:?}: {stdout}");
        }
    }
    for flag in ["--version", "-V"] {
        let (code, stdout, _) = run(&[flag]);
        let version = concat!("deltafold ", env!("CARGO_PKG_VERSION"), "\n");
        assert_eq!((code, stdout.as_str()), (0, version));
    }
    // No command at all: the help, as an error.
    let (code, stdout, stderr) = run(&[]);
    assert_eq!((code, stdout.as_str()), (64, ""));
    assert!(stderr.contains("Usage: deltafold"));
}

#[test]
fn completions_know_the_commands() {
    let readme = read("README.md");
    for shell in ["bash", "zsh", "fish"] {
        let command = format!("deltafold completions {shell} > ");
        assert!(readme.contains(&command), "{command}");
        let (code, script, stderr) = run(&["completions", shell]);
        assert_eq!((code, stderr.as_str()), (0, ""), "{shell}");
        for word in ["compact", "list", "restore", "completions", "keep-history"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    assert_eq!(run(&["completions", "tcsh"]).0, 64);
}

fn help() -> String {
    let all = COMMANDS.map(|c| run(&[c, "--help"]).1).join("\n");
    let below = ["full", "delta", "follow"].map(|c| run(&["snapshot", c, "--help"]).1);
    let check = run(&["store", "check", "--help"]).1;
    run(&["--help"]).1 + &all + &below.join("\n") + &check + &help_of_people()
}

/// Of the controller, and the commands that people give it.
fn help_of_people() -> String {
    let commands: [&[&str]; 17] = [
        &["controller"],
        &["manifests", "install"],
        &["manifests", "namespace"],
        &["manifests", "cleanup"],
        &["manifests", "crds"],
        &["manifests", "samples"],
        &["task", "create", "snapshot"],
        &["task", "create", "compaction"],
        &["task", "create", "copy"],
        &["task", "create", "restore"],
        &["task", "create", "verify"],
        &["task", "create", "maintenance"],
        &["task", "list"],
        &["task", "wait"],
        &["task", "logs"],
        &["policy", "status"],
        &["cleanup"],
    ];
    commands
        .map(|command| run(&[command, &["--help"]].concat()).1)
        .join("\n")
}

/// The `--flags` in a text.
fn flags(text: &str) -> BTreeSet<&str> {
    let is_flag_char = |c: char| c.is_ascii_lowercase() || c == '-';
    let starts = text.match_indices("--").filter(|(at, _)| {
        let before = text[..*at].chars().next_back();
        before.is_none_or(|c| !c.is_ascii_alphanumeric() && c != '-' && c != '<')
    });
    starts
        .map(|(at, _)| {
            let flag = &text[at..];
            let end = flag.find(|c| !is_flag_char(c)).unwrap_or(flag.len());
            flag[..end].trim_end_matches('-')
        })
        .filter(|flag| flag.len() > 2)
        .collect()
}

#[test]
fn every_flag_that_is_mentioned_exists() {
    /// Those of cargo, etcd and its tools, kubectl and aws.
    const OTHERS: [&str; 30] = [
        "--all-targets",
        "--duplicates",
        "--features",
        "--lib",
        "--list",
        "--precise",
        "--timings",
        "--create-namespace",
        "--server-side",
        "--bench",
        "--release",
        "--test",
        "--locked",
        "--nocapture",
        "--fuzz-dir",
        "--sanitizer",
        "--rev",
        "--skip-hash-check",
        "--version-id",
        "--profile",
        "--listen-peer-urls",
        "--for",
        "--replicas",
        "--timeout",
        "--type",
        // Of the bench of wide buckets.
        "--before",
        "--program",
        "--runs",
        "--scale",
        "--outage",
    ];
    let help = help();
    let real = flags(&help);
    for name in DOCUMENTS {
        let mut text = read(name);
        if name == "docs/migration.md" {
            // The first column has the other tool's.
            let ours = |line: &str| match line.strip_prefix('|') {
                Some(row) => row
                    .replace("\\|", "/")
                    .split_once('|')
                    .map(|(_, rest)| rest.to_owned()),
                None => Some(line.to_owned()),
            };
            text = text.lines().filter_map(ours).collect::<Vec<_>>().join("\n");
        }
        for flag in flags(&text) {
            assert!(
                real.contains(flag) || OTHERS.contains(&flag),
                "{name}: {flag}"
            );
        }
    }
    let readme = read("README.md");
    let told = flags(&readme);
    for flag in real.iter().filter(|f| !["--help", "--version"].contains(f)) {
        assert!(told.contains(flag), "README.md does not mention {flag}");
    }
    let mut commands = 0;
    for (name, documents) in jobs() {
        let args = documents.iter().flat_map(|d| all_named(d, "containers"));
        let more = documents
            .iter()
            .flat_map(|d| all_named(d, "initContainers"));
        let containers = args.chain(more).flat_map(|c| c.as_array().unwrap());
        for container in containers.filter(|c| c["command"] == json!(["deltafold"])) {
            let args: Vec<String> = serde_json::from_value(container["args"].clone()).unwrap();
            let args = args.join("\n");
            let used = flags(&args);
            assert!(used.len() >= 2 && used.is_subset(&real), "{name}: {used:?}");
            commands += 1;
        }
    }
    assert_eq!(commands, 12);
}

#[test]
fn every_variable_that_is_mentioned_exists() {
    let help = help();
    let mut documents: Vec<String> = DOCUMENTS.map(read).to_vec();
    documents.extend(jobs().iter().map(|(name, _)| read(name)));
    let mut seen = 0;
    for text in documents {
        for (at, _) in text.match_indices("DELTAFOLD_") {
            let name = &text[at..];
            let end = name.find(|c: char| !c.is_ascii_uppercase() && c != '_');
            let name = &name[..end.unwrap_or(name.len())];
            // `DELTAFOLD_…` for all of them, and the tests' own.
            if name == "DELTAFOLD_" || name.starts_with("DELTAFOLD_TEST_") {
                continue;
            }
            seen += 1;
            let told = [format!("[env: {name}="), format!("[env: {name}]")];
            assert!(told.iter().any(|t| help.contains(t)), "{name}");
        }
    }
    assert!(seen > 5);
}

#[test]
fn every_setting_of_a_store_exists() {
    let text = read("docs/stores.md");
    let keys = |section: &str| -> Vec<String> {
        let section = text.split_once(&format!("### {section}\n")).unwrap().1;
        let section = section.split("\n#").next().unwrap();
        let keys = rows(section).into_iter().map(|cells| cells[0].to_owned());
        let keys = keys.filter_map(|k| Some(k.strip_prefix('`')?.strip_suffix('`')?.to_owned()));
        keys.collect()
    };
    let s3 = keys("S3 settings");
    let google = keys("Google Cloud Storage settings");
    let azure = keys("Azure settings");
    let every = keys("Settings of every object store");
    assert!(s3.len() > 10 && google.len() > 3 && azure.len() > 5 && every.len() > 5);
    for key in &s3 {
        assert!(key.parse::<AmazonS3ConfigKey>().is_ok(), "{key}");
        let prefixed = format!("aws_{key}").parse::<AmazonS3ConfigKey>();
        assert!(prefixed.is_ok(), "aws_{key}");
    }
    for key in &google {
        assert!(key.parse::<GoogleConfigKey>().is_ok(), "{key}");
    }
    for key in &azure {
        assert!(key.parse::<AzureConfigKey>().is_ok(), "{key}");
    }
    let (own, client): (Vec<&String>, Vec<&String>) = every
        .iter()
        .partition(|k| OWN_SETTINGS.contains(&k.as_str()));
    assert_eq!(own.len(), OWN_SETTINGS.len());
    for key in client {
        assert!(key.parse::<ClientConfigKey>().is_ok(), "{key}");
    }
    for (section, url) in [("Swift settings", "swift://b"), ("OSS settings", "oss://b")] {
        let keys = keys(section);
        assert!(keys.len() > 5, "{section}");
        if url == "oss://b" && !cfg!(feature = "oss") {
            let (code, _, stderr) = run(&["list", "--store", url]);
            assert!(code == 64 && stderr.contains("--features oss"), "{stderr}");
            continue;
        }
        for key in keys {
            let setting = format!("{key}=");
            let (code, _, stderr) = run(&["list", "--store", url, "--store-option", &setting]);
            assert_ne!(code, 0);
            assert!(!stderr.contains("no such setting"), "{key}: {stderr}");
        }
    }
    // The program takes them: what it complains of is something else, later.
    for key in s3.iter().chain(&every) {
        let setting = format!("{key}=");
        let args = ["list", "--store", "s3://b/p", "--store-option", &setting];
        let (code, _, stderr) = run(&args);
        assert_ne!(code, 0);
        assert!(!stderr.contains("no such setting"), "{key}: {stderr}");
    }
    let args = ["list", "--store", "s3://b/p", "--store-option", "nope="];
    let (code, _, stderr) = run(&args);
    assert!(
        code == 78 && stderr.contains("no such setting"),
        "{code}: {stderr}"
    );
}

#[test]
fn the_two_commands_are_what_ci_runs() {
    let readme = read("README.md");
    let quick_start = readme.split_once("## Quick start").unwrap().1;
    let quick_start = quick_start.split("\n## ").next().unwrap();
    let commands = shell_blocks(quick_start);
    assert_eq!(commands.len(), 2, "{commands:?}");
    assert!(commands[0].ends_with("cargo run --release --locked -- compact --store target/demo"));
    assert!(commands.iter().all(|c| !c.contains('\n')), "{commands:?}");
    assert_eq!(commands[1], "cargo test --locked");
    let ci = read(".ci/run");
    let lines: Vec<&str> = ci.lines().collect();
    assert!(lines.contains(&"set -euo pipefail"));
    for command in commands.into_iter().chain([
        "step 'formatting' cargo fmt --check",
        "cargo clippy --all-targets --locked \"$@\" -- -D warnings",
        "cargo clippy --test '*' --locked \"$@\" -- -D warnings",
        "step 'lints' lints",
    ]) {
        assert!(lines.contains(&command), ".ci/run does not run: {command}");
    }
    use std::os::unix::fs::PermissionsExt;
    let mode = fs::metadata(path(".ci/run")).unwrap().permissions().mode();
    assert_eq!(mode & 0o111, 0o111, "{mode:o}");
}

/// Each `cargo test --test TIER MODULE::NAME` in a document runs something: the module is there, and in it a test
/// whose name begins so. Without a tier there is no name of a test.
#[test]
fn tests_that_documents_name_exist() {
    let mut named = 0;
    for document in DOCUMENTS {
        let text = read(document);
        for (at, call) in text.match_indices("cargo test --test ") {
            let rest = &text[at + call.len()..];
            let end = rest.find(['`', '\n']).unwrap_or(rest.len());
            let mut words = rest[..end].split_whitespace();
            let tier = words.next().unwrap();
            let is_tier = path(&format!("tests/{tier}/main.rs")).exists();
            assert!(is_tier || tier == "TIER", "{document}: no tier {tier}");
            let Some(filter) = words.next() else { continue };
            if filter.starts_with(['-', '#']) || filter.contains("MODULE") {
                continue;
            }
            let (module, name) = filter.split_once("::").unwrap_or((filter, ""));
            let file = format!("tests/{tier}/{module}.rs");
            assert!(path(&file).exists(), "{document}: no {file}");
            let test = format!("fn {name}");
            assert!(read(&file).contains(&test), "{document}: no {filter}");
            named += 1;
        }
    }
    assert!(named > 30, "{named}");
    for document in DOCUMENTS {
        let text = read(document);
        for (at, call) in text.match_indices("cargo test ") {
            let next = text[at + call.len()..].trim_start();
            let is_option = next.starts_with(['-', '#']);
            assert!(is_option, "{document}: no tier: cargo test {next:.40}");
        }
    }
}

/// tests/README.md has one line for each module of the tiers, in the order of the folders' names.
#[test]
fn every_module_of_the_tiers_has_its_danger() {
    let table = read("tests/README.md");
    for tier in ["serverless", "integration", "faults", "end_to_end"] {
        let files = fs::read_dir(path("tests").join(tier)).unwrap();
        let mut modules: Vec<String> = files
            .map(|f| f.unwrap().file_name().into_string().unwrap())
            .filter(|f| f != "main.rs")
            .map(|f| format!("{tier}/{f}"))
            .collect();
        modules.sort();
        let listed: Vec<&str> = table
            .lines()
            .filter_map(|l| l.strip_prefix("| `")?.split_once("` | "))
            .map(|(module, _)| module)
            .filter(|m| m.starts_with(&format!("{tier}/")))
            .collect();
        assert_eq!(listed, modules);
    }
}

/// What the README shows of the main job is what the main job says, but for the time it took.
#[test]
fn the_readme_shows_what_the_main_job_says() {
    let store = copy_fixture("kubernetes");
    let store = store.path().to_str().unwrap();
    let steady = |text: &str| text.split(" read, in ").next().unwrap().trim().to_owned();
    let readme = read("README.md");
    let (code, said, stderr) = run(&["compact", "--store", store]);
    assert_eq!(code, 0, "{stderr}");
    assert!(readme.contains(&steady(&said)), "{said}");
    let (code, said, stderr) = run(&["list", "--store", store]);
    assert_eq!(code, 0, "{stderr}");
    assert!(readme.contains(said.trim()), "{said}");
    let (code, said, stderr) = run(&["diff", "--from", "275", "--to", "280", "--store", store]);
    assert_eq!(code, 0, "{stderr}");
    assert!(readme.contains(said.trim()), "{said}");
    // Before the snapshot that was written above there was this one.
    let store = copy_fixture("kubernetes");
    let folder = scratch::folder().unwrap();
    let dir = folder.path().join("etcd");
    let (store, dir) = (store.path().to_str().unwrap(), dir.to_str().unwrap());
    let args = ["restore", "--store", store, "--data-dir", dir];
    let (code, said, stderr) = run(&args);
    assert_eq!(code, 0, "{stderr}");
    let said = said.split("  read ").next().unwrap().trim();
    let said = said.replace(dir, "/var/lib/etcd");
    assert!(readme.contains(&said), "{said}");
}

/// The packages that the program and its tests use, and no others, stand in the table with a reason.
#[test]
fn every_package_is_accounted_for() {
    let manifest = read("Cargo.toml");
    let section = |name: &str| -> BTreeSet<String> {
        let text = manifest.split_once(&format!("\n[{name}]\n")).unwrap().1;
        let lines = text.split("\n[").next().unwrap().lines();
        let packages = lines.filter_map(|l| Some(l.split_once(" = ")?.0));
        packages
            .filter(|p| !p.starts_with('#'))
            .map(str::to_owned)
            .collect()
    };
    let architecture = read("ARCHITECTURE.md");
    let table = architecture
        .split_once("| Package | Why | Licence |")
        .unwrap()
        .1;
    let table = table.split_once("\n\n").unwrap().0;
    let (mut program, mut tests) = (BTreeSet::new(), BTreeSet::new());
    for cells in rows(table).iter().filter(|c| !c[0].starts_with("---")) {
        assert!(cells[1].len() > 2 && cells[2].len() > 2, "{cells:?}");
        let (told, packages) = match cells[0].strip_prefix("*tests:* ") {
            Some(packages) => (&mut tests, packages),
            None => (&mut program, cells[0]),
        };
        let names = packages.split(", ").filter_map(|p| p.split(' ').next());
        told.extend(names.map(str::to_owned));
    }
    assert_eq!(program, section("dependencies"));
    assert_eq!(tests, section("dev-dependencies"));
}

#[test]
fn links_and_paths_lead_somewhere() {
    let mut links = 0;
    for name in DOCUMENTS.into_iter().chain(["CHANGELOG.md"]) {
        let text = read(name);
        let folder = path(name).parent().unwrap().to_owned();
        for (at, _) in text.match_indices("](") {
            let target = text[at + 2..].split(')').next().unwrap();
            if target.contains("://") {
                continue;
            }
            links += 1;
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let file = match file {
                "" => path(name),
                file => folder.join(file),
            };
            assert!(file.exists(), "{name}: {target}");
            if !anchor.is_empty() {
                let linked = fs::read_to_string(&file).unwrap();
                let headings = linked.lines().filter(|l| l.starts_with('#'));
                let anchors = headings.map(|h| {
                    let h = h.trim_start_matches('#').trim().to_lowercase();
                    let kept = h
                        .chars()
                        .filter(|c| c.is_alphanumeric() || " -".contains(*c));
                    kept.collect::<String>().replace(' ', "-")
                });
                assert!(anchors.into_iter().any(|a| a == anchor), "{name}: {target}");
            }
        }
        for (at, _) in text.match_indices('`') {
            let quoted = text[at + 1..].split('`').next().unwrap();
            let is_path = ["src/", "tests/", "docs/", "jobs/", "fixtures/", "tools/"]
                .iter()
                .any(|p| quoted.starts_with(p));
            if is_path && !quoted.contains([' ', '*', '\n', '<']) {
                assert!(path(quoted).exists(), "{name}: {quoted}");
            }
        }
    }
    assert!(links > 20);
}
