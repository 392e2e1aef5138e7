//! The page's API shows what the commands show, at any moment, and only to its own page.

use crate::support::explore::{Page, id};
use crate::support::made_backups::{BASE, Bucket, LAST};
use crate::support::{copy_dir, deltafold, fixtures_dir, run_json, scratch, succeed};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Runs a command on a store, and returns its JSON.
fn told(store: &Path, args: &[&str]) -> Value {
    let mut command = deltafold();
    command
        .args(args)
        .args(["--output", "json", "--store"])
        .arg(store);
    succeed(&mut command)
}

/// Returns the keys of a state with their records, as `get` shows them.
fn records_of(store: &Path, revision: &str) -> Vec<Value> {
    let got = told(store, &["get", "--prefix", "", "--revision", revision]);
    got["keys"].as_array().unwrap().clone()
}

fn count(state: &Value) -> u64 {
    let namespaces = state["namespaces"].as_array().unwrap().iter();
    let objects: u64 = namespaces.map(|n| n["count"].as_u64().unwrap()).sum();
    objects + state["other_keys"].as_u64().unwrap()
}

/// Every object of a real Kubernetes, at several moments, is the one that `get` shows.
#[test]
fn every_object_at_every_moment_is_what_get_shows() {
    let store = fixtures_dir().join("kubernetes");
    let page = Page::start(&store);
    for revision in ["1", "275", "400", "523", "628"] {
        let records = records_of(&store, revision);
        let state = page.get("state", &[("at", revision)]);
        assert_eq!(count(&state), records.len() as u64, "{revision}");
        for record in &records {
            let key = record["key"].as_str().unwrap();
            let query = [
                ("id", &*id(key)),
                ("at", revision),
                ("secrets", "true"),
                ("managers", "true"),
            ];
            let (status, text) = page.ask("yaml", &query);
            assert_eq!(status, StatusCode::OK, "{key}");
            match &record["object"] {
                Value::Null => assert_eq!(record["value"], text, "{key} at {revision}"),
                object => {
                    let shown: Value = yaml_serde::from_str(&text).unwrap();
                    assert_eq!(&shown, object, "{key} at {revision}");
                }
            }
        }
    }
    let gone = page.get(
        "object",
        &[
            ("id", &id("/registry/deployments/shop/web-3")),
            ("at", "628"),
        ],
    );
    assert_eq!((&gone["object"], &gone["text"]), (&Value::Null, &json!("")));
    assert_eq!(gone["reference"], "deployment/shop/web-3");
}

/// Keys that are no objects: text as it is, other bytes in hexadecimal.
#[test]
fn other_keys_are_shown_as_they_are() {
    let store = fixtures_dir().join("etcd35-gzip");
    let page = Page::start(&store);
    let mut records = records_of(&store, &LAST.to_string());
    records.retain(|record| record["kubernetes"].is_null());
    let listed = page.get("objects", &[("other", "true")]);
    assert_eq!(listed["total"], records.len());
    let (mut texts, mut binaries) = (0, 0);
    for object in listed["objects"].as_array().unwrap() {
        let id = object["id"].as_str().unwrap();
        let key = URL_SAFE_NO_PAD.decode(id).unwrap();
        let is_it = |record: &&Value| match record["key"].as_str() {
            Some(text) => text.as_bytes() == key,
            None => record["key_base64"] == STANDARD.encode(&key),
        };
        let record = records.iter().find(is_it).unwrap();
        let (_, text) = page.ask("yaml", &[("id", id)]);
        if let Some(value) = record["value"].as_str() {
            assert_eq!(text, value, "{object}");
            texts += 1;
        } else {
            let value = STANDARD.decode(record["value_base64"].as_str().unwrap());
            let digits: String = text.split_whitespace().collect();
            let bytes = value.unwrap();
            let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
            assert_eq!(digits, hex, "{object}");
            binaries += 1;
        }
    }
    assert!(texts > 10 && binaries > 0, "{texts} {binaries}");
}

/// A plain snapshot file has no times; its history that is not compacted can be shown by revisions.
#[test]
fn a_plain_snapshot_file_is_shown_by_revisions() {
    let folder = scratch::folder().unwrap();
    let file = folder.path().join("snapshot.db");
    let store = fixtures_dir().join("kubernetes");
    let history = ["--keep-history", "all", "--to-snapshot"];
    let mut restore = deltafold();
    restore.arg("restore").args(history).arg(&file);
    restore.args(["--output", "json", "--store"]).arg(&store);
    succeed(&mut restore);
    let page = Page::start(&file);
    let backup = page.get("backup", &[]);
    assert_eq!(
        (&backup["phase"], &backup["flag"]),
        (&json!("ready"), &json!("--snapshot"))
    );
    assert_eq!(backup["window"]["last_time"], Value::Null);
    for revision in ["400", "628"] {
        let state = page.get("state", &[("at", revision)]);
        assert_eq!(count(&state), records_of(&store, revision).len() as u64);
        assert_eq!(state["is_complete"], true);
    }
    let edges = page.get("density", &[("bars", "2")])["edges"].clone();
    assert_eq!(edges, json!(["1", "314", "628"]));
}

/// A time means what `--time` means.
#[test]
fn a_time_is_the_revision_that_get_reads() {
    let store = fixtures_dir().join("kubernetes");
    let page = Page::start(&store);
    for time in [
        "2026-11-21T02:30:50Z",
        "2026-11-21T02:31:32.5Z",
        "2026-11-21T02:32:10Z",
    ] {
        let got = told(
            &store,
            &["get", "--prefix", "/registry/namespaces/", "--time", time],
        );
        let state = page.get("state", &[("at", time)]);
        assert_eq!(state["revision"], got["revision"], "{time}");
    }
    // Steps go over every change that has a time.
    let after = page.get("step", &[("at", "445")]);
    assert_eq!(after["revision"], 446);
    let before = page.get("step", &[("at", "446"), ("back", "true")]);
    assert_eq!(before["revision"], 445);
    assert_eq!(page.get("step", &[])["revision"], 628);
}

#[test]
fn a_life_and_what_was_deleted_are_what_the_commands_show() {
    let store = fixtures_dir().join("kubernetes");
    let page = Page::start(&store);
    for object in ["deployment/shop/web-2", "configmap/shop/cm-3"] {
        let history = told(&store, &["history", object]);
        let key = history["key"].as_str().unwrap();
        let life = page.get("life", &[("id", &id(key))]);
        let revisions = |list: &Value| -> Vec<Value> {
            let time = |version: &Value| {
                let time = version["time"].as_str();
                time.map(|time| chrono::DateTime::parse_from_rfc3339(time).unwrap())
            };
            let list = list.as_array().unwrap().iter();
            list.map(|version| json!([version["revision"], time(version)]))
                .collect()
        };
        let mut versions = revisions(&life["versions"]);
        versions.reverse();
        assert_eq!(versions, revisions(&history["versions"]), "{object}");
        assert_eq!(
            life["events"].as_array().unwrap().len(),
            history["events"].as_array().unwrap().len()
        );
    }
    let deleted = told(&store, &["deleted", "--since", "275"]);
    let keys = deleted["deleted"].as_array().unwrap();
    let mut expected: Vec<Value> = keys.iter().map(|d| d["key"].clone()).collect();
    let changes = page.get("changes", &[("from", "275")]);
    let mut shown = Vec::new();
    for namespace in changes["namespaces"].as_array().unwrap() {
        for object in namespace["objects"].as_array().unwrap() {
            let query = [("id", object["id"].as_str().unwrap())];
            shown.push(page.get("object", &query)["key"].clone());
        }
    }
    let owner_of = |key: &str| {
        let is_it = |deleted: &&Value| deleted["key"] == key;
        keys.iter().find(is_it).unwrap()["owner"].clone()
    };
    let mut owned = 0;
    for namespace in changes["namespaces"].as_array().unwrap() {
        for object in namespace["objects"].as_array().unwrap() {
            let key = URL_SAFE_NO_PAD.decode(object["id"].as_str().unwrap());
            let key = String::from_utf8(key.unwrap()).unwrap();
            assert_eq!(object["owner"], owner_of(&key), "{key}");
            owned += usize::from(object["owner"].is_object());
        }
    }
    assert!(owned > 0);
    expected.retain(|key| !key.as_str().unwrap().contains("/events/"));
    expected.sort_by_key(Value::to_string);
    shown.sort_by_key(Value::to_string);
    assert_eq!(shown, expected);
}

/// The lines of changes are those of `log`, whatever is asked for: what the oldest full has was not created there.
#[test]
fn the_lines_are_those_of_log() {
    let store = fixtures_dir().join("kubernetes");
    let page = Page::start(&store);
    let parts = |line: &Value| {
        let parts = ["revision", "change", "managers", "fields", "owner"];
        json!(parts.map(|part| line[part].clone()))
    };
    for only in ["", "created", "changed", "deleted"] {
        let mut log = deltafold();
        log.args(["log", "--since", "275", "--output", "json", "--store"])
            .arg(&store);
        if !only.is_empty() {
            log.args(["--only", only]);
        }
        let told = log.output().unwrap().stdout;
        let told = serde_json::Deserializer::from_slice(&told).into_iter::<Value>();
        let mut told: Vec<Value> = told.map(|line| parts(&line.unwrap())).collect();
        told.reverse();
        assert!(!told.is_empty());
        let mut query = vec![("from", "275")];
        query.extend((!only.is_empty()).then_some(("only", only)));
        let shown = page.get("log", &query);
        let lines: Vec<Value> = shown["lines"]
            .as_array()
            .unwrap()
            .iter()
            .map(parts)
            .collect();
        assert_eq!(shown["total"], told.len(), "{only}");
        assert_eq!(lines, told, "{only}");
    }
}

#[test]
fn objects_are_found_by_name_label_and_content() {
    let store = fixtures_dir().join("kubernetes");
    let page = Page::start(&store);
    let found = |text: &str, within: &str| {
        let found = page.get("search", &[("q", text), ("within", within), ("at", "400")]);
        let objects = found["objects"].as_array().unwrap().clone();
        let mut names: Vec<String> = objects
            .iter()
            .map(|o| o["name"].as_str().unwrap().to_owned())
            .collect();
        names.sort();
        names
    };
    assert_eq!(
        found("DEPLOYMENT shop", "names"),
        ["web-1", "web-2", "web-3"]
    );
    // Names are found at all times, and what is not there says why.
    let absences = |at: &str| {
        let query = [("q", "deployment web-3"), ("within", "names"), ("at", at)];
        let found = page.get("search", &query);
        let objects = found["objects"].as_array().unwrap().clone();
        let mut objects = objects.into_iter();
        let object = objects.find(|object| object["name"] == "web-3").unwrap();
        assert!(object["time"].is_string(), "{object}");
        object["absence"].clone()
    };
    assert_eq!(absences("1"), "created");
    assert_eq!(absences("400"), Value::Null);
    assert_eq!(absences("628"), "deleted");
    let labelled = found("app=web-1", "labels");
    assert!(labelled.contains(&"web-1".to_owned()) && !labelled.contains(&"web-2".to_owned()));
    assert!(found("progressdeadlineseconds: 600", "content").contains(&"web-1".to_owned()));
    let (status, body) = page.ask("search", &[("q", "=x"), ("within", "labels")]);
    assert_eq!(status, StatusCode::BAD_REQUEST, "{body}");
}

/// Values of Secrets are shown only if they are asked for, in every view.
#[test]
fn secrets_are_hidden_until_they_are_asked_for() {
    let store = fixtures_dir().join("kubernetes");
    let page = Page::start(&store);
    let secrets = told(&store, &["get", "secrets", "--all"]);
    let key = secrets["keys"][0]["key"].as_str().unwrap();
    let data = secrets["keys"][0]["object"]["data"].as_object().unwrap();
    let value = data.values().next().unwrap().as_str().unwrap();
    let key = id(key);
    for path in ["object", "yaml", "diff", "life"] {
        let (_, hidden) = page.ask(path, &[("id", &key), ("from", "1")]);
        assert!(!hidden.contains(value), "{path}: {hidden}");
    }
    let (_, shown) = page.ask("yaml", &[("id", &key), ("secrets", "true")]);
    assert!(shown.contains(value), "{shown}");
    let query = [("q", value), ("within", "content")];
    assert_eq!(page.get("search", &query)["total"], 0);
}

/// At ten moments, the page and `get` have the same objects, or both refuse the moment.
fn assert_page_is_as_get(store: &Path) -> usize {
    let page = Page::start(store);
    let window = page.get("backup", &[])["window"].clone();
    let edge = |name: &str| window[name].as_i64().unwrap();
    let (first, last) = (edge("first_revision"), edge("last_revision"));
    let unknown = window["missing"].as_array().unwrap().clone();
    let mut moments: Vec<i64> = (0..10).map(|n| first + (last - first) * n / 9).collect();
    for range in &unknown {
        let [begin, end] = [0, 1].map(|side| range[side].as_i64().unwrap());
        moments.extend([begin - 1, begin, end, end + 1]);
    }
    let id_of = |record: &Value| match record["key"].as_str() {
        Some(key) => id(key),
        None => {
            let bytes = STANDARD.decode(record["key_base64"].as_str().unwrap());
            URL_SAFE_NO_PAD.encode(bytes.unwrap())
        }
    };
    let mut refused = 0;
    for revision in moments
        .into_iter()
        .filter(|r| *r >= first)
        .map(|r| r.to_string())
    {
        let mut get = deltafold();
        get.args([
            "get",
            "--prefix",
            "",
            "--revision",
            &revision,
            "--output",
            "result",
            "--store",
        ]);
        let got = get.arg(store).output().unwrap();
        let (status, state) = page.ask("state", &[("at", &revision)]);
        if !got.status.success() {
            let said = String::from_utf8_lossy(&got.stdout);
            let reasons = ["RevisionGap", "OutOfRange", "CorruptSnapshot"];
            let is_gap = reasons.iter().any(|reason| said.contains(reason));
            assert!(is_gap, "{revision}: {said}");
            assert_ne!(status, StatusCode::OK, "{revision} {unknown:?}: {state}");
            refused += 1;
            continue;
        }
        assert_eq!(status, StatusCode::OK, "{revision} {unknown:?}: {state}");
        let got: Value = serde_json::from_slice(&got.stdout).unwrap();
        let records = got["keys"].as_array().unwrap();
        assert_eq!(
            count(&serde_json::from_str(&state).unwrap()),
            records.len() as u64,
            "{revision}"
        );
        for record in records {
            let key = id_of(record);
            let shown = page.get("object", &[("id", &key), ("at", &revision)]);
            assert_eq!(
                shown["object"]["revision"], record["mod_revision"],
                "{key} at {revision}"
            );
        }
    }
    let (from, to) = (first.to_string(), last.to_string());
    let deleted = told(store, &["deleted", "--since", &from, "--until", &to]);
    let deleted = deleted["deleted"].as_array().unwrap().iter();
    let deleted = deleted.filter(|d| d["kubernetes"]["resource"] != "events");
    let deleted: BTreeMap<String, bool> = deleted
        .map(|d| (id_of(d), d["recreated"].as_bool().unwrap()))
        .collect();
    let changes = page.get("changes", &[("from", &from), ("to", &to)]);
    let namespaces = changes["namespaces"].as_array().unwrap().iter();
    let objects = namespaces.flat_map(|n| n["objects"].as_array().unwrap());
    let shown: BTreeMap<String, bool> = objects
        .map(|o| {
            let id = o["id"].as_str().unwrap().to_owned();
            (id, o["is_recreated"].as_bool().unwrap())
        })
        .collect();
    assert_eq!(shown, deleted);
    refused
}

#[test]
fn the_page_has_the_states_of_get_also_around_holes_and_damage() {
    for fixture in ["kubernetes", "history", "etcd36-gzip"] {
        assert_eq!(
            assert_page_is_as_get(&fixtures_dir().join(fixture)),
            0,
            "{fixture}"
        );
    }
    for nth in 0..8 {
        let fixture = ["kubernetes", "history"][nth % 2];
        let (is_damaged, has_full) = (nth & 2 > 0, nth & 4 > 0);
        let folder = scratch::folder().unwrap();
        let store = folder.path().join("store");
        copy_dir(&fixtures_dir().join(fixture), &store);
        let files = std::fs::read_dir(store.join("v2")).unwrap();
        let mut deltas: Vec<_> = files
            .map(|f| f.unwrap().path())
            .filter(|p| p.to_string_lossy().contains("/Incr"))
            .collect();
        deltas.sort();
        let middle = &deltas[deltas.len() / 2];
        if has_full {
            // A full of the state after the next delta tells the state again.
            let name = deltas[deltas.len() / 2 + 1]
                .file_name()
                .unwrap()
                .to_str()
                .unwrap();
            let last = name.split('-').nth(2).unwrap().trim_start_matches('0');
            let mut compact = deltafold();
            compact.args(["compact", "--revision", last, "--store"]);
            assert!(compact.arg(&store).status().unwrap().success());
        }
        match is_damaged {
            true => std::fs::write(middle, b"damaged").unwrap(),
            false => std::fs::remove_file(middle).unwrap(),
        }
        let refused = assert_page_is_as_get(&store);
        assert!(refused > 0, "{fixture} {is_damaged} {has_full}");
    }
}

/// A delta is missing: what was deleted meanwhile is gone at the full that follows, and the page says what is missing.
#[test]
fn after_a_gap_the_state_is_that_of_the_next_full() {
    let whole = Bucket::with_base();
    let middle = whole.delta(BASE + 1, 1499, 6);
    let last = whole.delta(1500, LAST, 9);
    whole.compact(&["--keep-history", "0"]);
    for missing in [&middle, &last] {
        std::fs::remove_file(whole.path().join("v2").join(missing)).unwrap();
    }
    let page = Page::start(whole.path());
    let expected = records_of(whole.path(), &LAST.to_string());
    let state = page.get("state", &[]);
    assert_eq!(state["revision"], LAST);
    assert_eq!(count(&state), expected.len() as u64);
    let base = records_of(whole.path(), &BASE.to_string());
    let is_there = |key: &Value| expected.iter().any(|record| record["key"] == key["key"]);
    assert!(!base.iter().all(is_there), "nothing was deleted");
    for path in ["state", "objects", "search"] {
        let (status, refusal) = page.ask(path, &[("at", "1600"), ("within", "names")]);
        assert!(
            status == StatusCode::CONFLICT && refusal.contains("RevisionGap"),
            "{refusal}"
        );
    }
    let window = &page.get("backup", &[])["window"];
    assert_eq!(window["missing"], json!([[BASE + 1, LAST - 1]]));
    // The steps are those that are known.
    let step = |at: i64, back: &str| {
        page.get("step", &[("at", &at.to_string()), ("back", back)])["revision"].clone()
    };
    assert_eq!(
        [step(BASE, "false"), step(LAST, "true")],
        [json!(LAST), json!(BASE)]
    );
    assert_eq!(
        page.get("density", &[])["gaps"].as_array().unwrap().len(),
        1
    );
}

/// Nothing is answered without the token, from another site, by another name of the host, or to a write.
#[test]
fn only_the_page_itself_is_answered() {
    let store = fixtures_dir().join("kubernetes");
    let page = Page::start(&store);
    let (status, body) = page.send(Method::GET, "api/state", &[], &[]);
    assert_eq!(status, StatusCode::UNAUTHORIZED, "{body}");
    let token = page.address.split_once("token=").unwrap().1.to_owned();
    // Another user's web server is sent our cookies: they open nothing.
    let cookie = (
        "cookie",
        format!("deltafold-explore={token}; token={token}"),
    );
    let (status, _) = page.send(Method::GET, "api/state", &[("token", &token)], &[cookie]);
    assert_eq!(status, StatusCode::UNAUTHORIZED);
    let bearer = || ("authorization", format!("Bearer {token}"));
    let with = |method, header| page.send(method, "api/state", &[], &[bearer(), header]).0;
    let host = |host: &str| ("host", host.to_owned());
    assert_eq!(
        with(Method::GET, host("evil.example")),
        StatusCode::MISDIRECTED_REQUEST
    );
    assert_eq!(with(Method::GET, host("localhost:1")), StatusCode::OK);
    let origin = ("origin", "http://evil.example".to_owned());
    assert_eq!(with(Method::GET, origin), StatusCode::FORBIDDEN);
    assert_eq!(
        with(Method::POST, host("localhost:1")),
        StatusCode::METHOD_NOT_ALLOWED
    );
}

/// What cannot be read is said on the page, with the reason.
#[test]
fn a_backup_that_cannot_be_read_is_told() {
    let bucket = Bucket::with_base();
    let full = bucket.path().join("v2").join(&bucket.names()[0]);
    std::fs::write(full, b"damaged").unwrap();
    let page = Page::start(bucket.path());
    let backup = page.get("backup", &[]);
    assert_eq!(backup["phase"], "failed");
    assert_eq!(backup["error"]["reason"], "CorruptSnapshot");
}

/// A page of nothing would be no use: the command ends as other readers do.
#[test]
fn without_a_snapshot_there_is_no_page() {
    let folder = scratch::folder().unwrap();
    for flag in ["--store", "--snapshot"] {
        let mut command = deltafold();
        command.args(["explore", "--output", "json", flag]);
        let (code, result, stderr) = run_json(command.arg(folder.path()));
        let mut get = deltafold();
        get.args(["get", "--prefix", "", "--output", "json", flag]);
        let (expected, _, _) = run_json(get.arg(folder.path()));
        assert_eq!(
            (code, result["reason"].as_str()),
            (expected, Some("NoSnapshots")),
            "{flag}: {stderr}"
        );
    }
}

/// The last change is that of the spec, and not those of the status after it.
#[test]
fn a_life_tells_what_a_user_sets_from_the_status() {
    let store = fixtures_dir().join("kubernetes");
    let page = Page::start(&store);
    let id = id("/registry/deployments/shop/web-2");
    let brief = page.get("life", &[("id", &id), ("brief", "true")]);
    let change = &brief["last_change"];
    assert_eq!(
        (&change["from"], &change["revision"]),
        (&json!(557), &json!(559))
    );
    assert_eq!(change["fields"], json!(["spec.replicas: 3 → 1"]));
    let older = page.get("life", &[("id", &id), ("brief", "true"), ("before", "559")]);
    assert_eq!(older["last_change"]["revision"], 535);
    let life = page.get("life", &[("id", &id), ("clean", "true")]);
    for version in life["versions"].as_array().unwrap() {
        let fields = version["fields"].as_array().unwrap();
        let is_of_user = version["is_of_user"] == true;
        assert_eq!(
            is_of_user,
            !fields.is_empty() || version["change"] == "created"
        );
        let has_status = |field: &Value| field.as_str().unwrap().contains("status");
        assert!(!fields.iter().any(has_status), "{version}");
    }
}

/// A part of the plot has as many bars as the whole, and the same changes.
#[test]
fn a_part_of_the_plot_has_the_changes_of_its_time() {
    let store = fixtures_dir().join("kubernetes");
    let page = Page::start(&store);
    let total = |density: &Value| -> u64 {
        let kinds = density["kinds"].as_array().unwrap().iter();
        let counts = kinds.flat_map(|kind| kind["counts"].as_array().unwrap());
        counts.map(|count| count.as_u64().unwrap()).sum()
    };
    let whole = page.get("density", &[("bars", "4")]);
    let edges = whole["edges"].as_array().unwrap();
    let (from, to) = (edges[1].as_str().unwrap(), edges[3].as_str().unwrap());
    let part = page.get("density", &[("bars", "4"), ("from", from), ("to", to)]);
    assert_eq!(
        (&part["edges"][0], &part["edges"][4]),
        (&edges[1], &edges[3])
    );
    assert!(0 < total(&part) && total(&part) < total(&whole));
    let (status, body) = page.ask("density", &[("from", "x"), ("to", to)]);
    assert_eq!(status, StatusCode::BAD_REQUEST, "{body}");
}
