//! Every result and failure is valid by the schema that `deltafold schema` prints.

use super::documents::{COMMANDS, TEXT, run};
use crate::support::gc_history::NEWEST_FULL;
use crate::support::made_backups::{BASE, Bucket, LAST, T0};
use crate::support::manifests::read;
use crate::support::pages;
use crate::support::schema::Schema;
use crate::support::scratch;
use crate::support::{copy_fixture, deltafold, fixture_names, restore, rounds, run_json};
use deltafold::Reason;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Returns the names of all schemas.
fn schemas() -> Vec<&'static str> {
    let commands = COMMANDS.into_iter().filter(|c| *c != "snapshot");
    commands
        .chain(["snapshot", "follow", "store-check", "task"])
        .collect()
}

#[test]
fn each_schema_is_printed_by_its_name() {
    for (name, schema) in deltafold::cli::schemas() {
        let (code, printed, stderr) = run(&["schema", name]);
        assert_eq!(code, 0, "{name}: {stderr}");
        assert_eq!(serde_json::from_str::<Value>(&printed).unwrap(), schema);
    }
    let (code, _, stderr) = run(&["schema", "lst"]);
    assert!(code == 64 && stderr.contains("'list'"), "{stderr}");
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
    let real: Vec<&str> = Reason::ALL.iter().map(|r| r.as_str()).collect();
    for command in schemas() {
        let (schema, name) = (Schema::json(command), command);
        check(&schema, name);
        let reasons = &schema["$defs"]["Reason"]["enum"];
        assert_eq!(*reasons, json!(real), "{name}");
    }
}

/// Each reason belongs to exactly one exit code.
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
    // Warnings, an own suffix, and a timeline that is not the first.
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

    // Candidates that are behind or damaged, several stores, and a separate WAL directory.
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

    // A plain file without its checksum is accepted with a warning.
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
    // Every problem at once.
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
    // A gap, and a full that holds more than its name says.
    let b = Bucket::with_base();
    b.delta(1601, LAST, 9);
    let base = fs::read(b.path().join(format!("v2/Full-00000000-{BASE:08}-{T0}.gz")));
    let base = base.unwrap();
    b.put(&format!("v2/Full-00000000-00000700-{}.gz", T0 - 5), &base);
    b.put(&format!("v2/Full-00000000-00000800-{}.gz", T0 + 5), &base);
    for args in [&[][..], &["--deep"]] {
        schema.check(&b.list(args));
    }
    // No usable snapshot.
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
    // The schema of lists is strict, and a list that breaks off says so.
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
    let [gc, pin] = ["gc", "pin"].map(Schema::of);
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
    let limit = NEWEST_FULL;
    let with = |more: &[&'static str]| [&limit[..], more].concat();
    assert_eq!(told("pin", &[&base, "--reason", "why"], &pin), "Succeeded");
    assert_eq!(told("pin", &[&base], &pin), "NothingToDo");
    assert_eq!(told("gc", &limit, &gc), "NothingToDo");
    assert_eq!(told("pin", &[&base, "--unpin"], &pin), "Succeeded");
    assert_eq!(told("gc", &limit, &gc), "Succeeded");
    assert_eq!(told("gc", &with(&["--apply"]), &gc), "Succeeded");
    assert_eq!(told("gc", &with(&["--apply"]), &gc), "NothingToDo");
    // Every reason is in the schema and in the documents.
    let reasons = &Schema::json("gc")["$defs"]["Object"]["properties"]["reason"]["enum"];
    let reasons: Vec<&str> = reasons
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r.as_str().unwrap())
        .collect();
    let documents = pages::of_users()
        .iter()
        .map(|p| read(p))
        .collect::<String>();
    for &name in deltafold::backup::retention::RetentionReason::NAMES {
        assert!(reasons.contains(&name), "{name}");
    }
    for name in reasons {
        assert!(documents.contains(&format!("`{name}`")), "{name}");
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
