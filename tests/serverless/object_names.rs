//! What `get NAME` shows: a key, an object or a table.

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
        (&["pods"], "give -n NAMESPACE, or --all"),
        (&["pod/x"], "give pod/NAMESPACE/x"),
        (&["node/a/x"], "nodes have no namespace"),
        (&["node/x", "-o", "yaml"], "give one of them"),
    ] {
        let (code, result, _) = bucket.run("get", args);
        let told = result["message"].as_str().unwrap();
        assert!(
            code == 64 && told.contains(message),
            "{args:?}: {code} {told}"
        );
    }
}
