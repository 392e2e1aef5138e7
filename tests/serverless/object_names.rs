//! What `get NAME` shows: a key, an object or a table.

use crate::support::deltafold;
use crate::support::made_backups::{BASE, Bucket};
use base64::prelude::{BASE64_STANDARD as STANDARD, Engine as _};
use serde_json::{Value, json};

/// Writes a delta of one event for each change: a value, or `None` for a deletion.
fn change(bucket: &Bucket, changes: &[(&str, Option<&str>)]) {
    for (n, (key, value)) in (1..).zip(changes) {
        let at = BASE + n;
        let key = STANDARD.encode(key);
        let event = match value {
            Some(value) => {
                let value = STANDARD.encode(value);
                json!({"kv": {"key": key, "value": value, "create_revision": at, "mod_revision": at, "version": 1}})
            }
            None => json!({"type": 1, "kv": {"key": key, "mod_revision": at}}),
        };
        let event = json!({"etcdEvent": event, "time": "2026-11-21T02:30:00Z"});
        bucket.delta_of(at, at, n, &[event]);
    }
}

/// Returns the key that is shown at a revision; the reason of the error if there is none.
fn shown(bucket: &Bucket, name: &str, after: i64) -> String {
    let revision = (BASE + after).to_string();
    let (_, result, _) = bucket.run("get", &[name, "--revision", &revision]);
    let shown = if result["status"] == "Failed" {
        &result["reason"]
    } else {
        &result["keys"][0]["key"]
    };
    shown.as_str().unwrap().to_owned()
}

#[test]
fn a_key_that_exists_exactly_as_given_comes_first() {
    let node = r#"{"apiVersion":"v1","kind":"Node","metadata":{"name":"x"}}"#;
    let bucket = Bucket::with_base();
    let key = "/registry/minions/x";
    change(
        &bucket,
        &[
            (key, Some(node)),
            ("node/x", Some("exact")),
            (key, Some(node)),
            ("node/x", None),
            (key, None),
        ],
    );
    let expected = [key, "node/x", "node/x", key, "KeyNotFound"];
    for (after, expected) in (1..).zip(expected) {
        assert_eq!(shown(&bucket, "node/x", after), expected, "{after}");
    }
    assert_eq!(shown(&bucket, "no/x", 2), key);
    // A flag says that it is an object.
    let (_, result, _) = bucket.run(
        "get",
        &["nodes", "-l", "!a", "--revision", &(BASE + 2).to_string()],
    );
    let keys: Vec<&Value> = result["keys"]
        .as_array()
        .unwrap()
        .iter()
        .map(|k| &k["key"])
        .collect();
    assert!(keys.contains(&&json!(key)), "{keys:?}");
}

#[test]
fn options_that_contradict_each_other_are_refused() {
    let bucket = Bucket::with_base();
    for (args, message) in [
        (&["node/x", "--all"][..], "leave out the name"),
        (&["pods"], "give -n NAMESPACE, or -A"),
        (&["pod/x"], "give pod/NAMESPACE/x"),
        (&["node/a/x"], "nodes have no namespace"),
        (&["--prefix", "node", "-n", "a"], "cannot be used with"),
    ] {
        let (code, result, _) = bucket.run("get", args);
        let told = result["message"].as_str().unwrap();
        assert!(
            code == 64 && told.contains(message),
            "{args:?}: {code} {told}"
        );
    }
}

#[test]
fn what_was_deleted_is_shown_even_if_it_was_created_meanwhile() {
    let owned = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"ownerReferences":[{"kind":"Job","name":"j"}]}}"#;
    let bucket = Bucket::with_base();
    change(
        &bucket,
        &[
            ("/registry/namespaces/gone", Some("{}")),
            ("/registry/pods/gone/a", Some("{}")),
            ("/registry/pods/gone/b", Some("{}")),
            ("/registry/pods/left/owned", Some(owned)),
            ("/registry/pods/left/again", Some("{}")),
            ("/registry/events/left/e", Some("{}")),
            ("own-key", Some("x")),
            ("/registry/pods/left/owned", None),
            ("/registry/pods/left/again", None),
            ("/registry/pods/left/again", Some("{}")),
            ("/registry/pods/gone/a", None),
            ("/registry/pods/gone/b", None),
            ("/registry/events/left/e", None),
            ("/registry/namespaces/gone", None),
            ("own-key", None),
        ],
    );
    let since = BASE.to_string();
    let (_, result, _) = bucket.run("deleted", &["--since", &since]);
    let all = result["deleted"].as_array().unwrap();
    let shown = |d: &Value| {
        let name = d["object"].as_str().or(d["key"].as_str()).unwrap();
        let owner = d["owner"]["name"].as_str().unwrap_or("-");
        let at = d["revision"].as_i64().unwrap() - BASE;
        format!("{at} {name} {owner} {}", d["recreated"])
    };
    assert_eq!(
        all.iter().map(shown).collect::<Vec<_>>(),
        [
            "8 pod/left/owned j false",
            "9 pod/left/again - true",
            "11 pod/gone/a - false",
            "12 pod/gone/b - false",
            "13 event/left/e - false",
            "14 namespace/gone - false",
            "15 own-key - false",
        ]
    );
    let text = |args: &[&str]| {
        let mut deleted = deltafold();
        deleted.args(["deleted", "--since", &since]).args(args);
        let printed = deleted.arg("--store").arg(bucket.path()).output().unwrap();
        let lines = String::from_utf8(printed.stdout).unwrap();
        let columns = lines
            .lines()
            .map(|l| l.split_whitespace().skip(2).collect::<Vec<_>>());
        columns
            .map(|c| c.join(" "))
            .filter(|l| !l.is_empty())
            .collect::<Vec<_>>()
    };
    let summary = text(&[]);
    assert!(
        summary.contains(&"namespace/gone and 2 objects in it".to_owned()),
        "{summary:?}"
    );
    assert!(
        summary.contains(&"pod/left/again (exists again)".to_owned()),
        "{summary:?}"
    );
    assert!(summary.contains(&"own-key".to_owned()), "{summary:?}");
    assert!(!summary.iter().any(|l| l.contains("gone/a")), "{summary:?}");
    assert!(text(&["-n", "gone"]).contains(&"pod/gone/a".to_owned()));
    assert!(text(&["events"]).contains(&"event/left/e".to_owned()));
}
