//! What `get NAME` shows: a key, an object or a table.

use crate::support::made_backups::{BASE, Bucket};
use crate::support::{deltafold, fixtures_dir};
use base64::prelude::{BASE64_STANDARD as STANDARD, Engine as _};
use serde_json::{Value, json};
use std::collections::HashMap;

/// Writes a delta of one event for each change: a value, or `None` for a deletion.
fn change(bucket: &Bucket, changes: &[(&str, Option<&str>)]) {
    let mut lives: HashMap<&str, (i64, i64)> = HashMap::new();
    for (n, (key, value)) in (1..).zip(changes) {
        let at = BASE + n;
        let (created, version) = match value {
            Some(_) => lives.entry(key).or_insert((at, 0)),
            None => &mut lives.remove(key).unwrap_or_default(),
        };
        *version += 1;
        let key = STANDARD.encode(key);
        let event = match value {
            Some(value) => {
                let value = STANDARD.encode(value);
                json!({"kv": {"key": key, "value": value, "create_revision": created, "mod_revision": at, "version": version}})
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

const DEFINITION: &str =
    "/registry/apiextensions.k8s.io/customresourcedefinitions/widgets.example.com";
const WIDGET: &str = "/registry/example.com/widgets/shop/w1";

/// Runs a command, and returns its exit code, what it prints, and its messages.
fn said(bucket: &Bucket, line: &str) -> (i32, String, String) {
    let words = line.split(' ');
    let out = deltafold()
        .args(words)
        .arg("--store")
        .arg(bucket.path())
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        out.status.code().unwrap(),
        text(&out.stdout),
        text(&out.stderr),
    )
}

#[test]
fn objects_of_a_definition_that_was_deleted_are_found() {
    let definition = r#"{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition",
        "metadata":{"name":"widgets.example.com"},"spec":{"group":"example.com","scope":"Namespaced",
        "names":{"plural":"widgets","singular":"widget","kind":"Widget","shortNames":["wd"]}}}"#;
    let widget = r#"{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"w1","namespace":"shop"}}"#;
    let bucket = Bucket::with_base();
    change(
        &bucket,
        &[
            (DEFINITION, Some(definition)),
            (WIDGET, Some(widget)),
            (WIDGET, None),
            (DEFINITION, None),
        ],
    );
    let (deleted, gone) = (BASE + 3, BASE + 4);
    for line in ["history wd/shop/w1", "deleted widgets -A"] {
        let (code, text, stderr) = said(&bucket, line);
        assert!(
            code == 0 && text.contains(&deleted.to_string()),
            "{line}: {text} {stderr}"
        );
        let was_deleted = format!("widgets.example.com was deleted at revision {gone}");
        assert!(stderr.contains(&was_deleted), "{line}: {stderr}");
    }
    let (code, _, stderr) = said(&bucket, "get widget/shop/w1");
    let why = format!("it was deleted at revision {deleted}");
    assert!(code == 66 && stderr.contains(&why), "{stderr}");
    let (code, _, stderr) = said(&bucket, "get gadget/shop/w1");
    assert!(code == 66 && stderr.contains("neither a kind"), "{stderr}");
}

#[test]
fn a_namespace_is_all_its_keys() {
    let json = |kind: &str| {
        format!(r#"{{"apiVersion":"example.com/v1","kind":"{kind}","metadata":{{}}}}"#)
    };
    let (policy, widget) = (json("NetworkPolicy"), json("Widget"));
    let bucket = Bucket::with_base();
    let route = "/openshift.io/routes/shop/web";
    let calico = "/registry/projectcalico.org/networkpolicies/shop/allow";
    change(
        &bucket,
        &[
            (
                route,
                Some("k8s\0\x0a\x21\x0a\x15route.openshift.io/v1\x12\x05Route"),
            ),
            (calico, Some(&policy)),
            (WIDGET, Some(&widget)),
            ("/registry/example.com/shop/all", Some(&widget)),
            ("/registry/pods/shops/web", Some(&widget)),
            (route, None),
            (WIDGET, None),
        ],
    );
    let at = (BASE + 5).to_string();
    for (line, expected) in [
        (
            format!("export -n shop --revision {at}"),
            &[route, calico, WIDGET][..],
        ),
        (
            format!("diff -n shop --from {BASE} --to {at}"),
            &[route, calico, WIDGET],
        ),
        ("deleted -n shop -o json".to_owned(), &[route, WIDGET]),
        // Kinds that nobody defines have the names of their keys.
        (format!("get routes -n shop --revision {at}"), &["web"]),
        (
            format!("get networkpolicies.projectcalico.org -A --revision {at}"),
            &["allow"],
        ),
    ] {
        let (code, text, stderr) = said(&bucket, &line);
        assert_eq!(code, 0, "{line}: {stderr}");
        for key in expected {
            assert!(text.contains(key), "{line} without {key}: {text}{stderr}");
        }
        assert!(
            !text.contains("example.com/shop/all") && !text.contains("/shops/"),
            "{line}: {text}"
        );
    }
}

#[test]
fn an_etcd_prefix_has_a_slash_whoever_gives_it() {
    let bucket = Bucket::with_base();
    let pod = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"web","namespace":"shop"}}"#;
    change(&bucket, &[("/tenant-00/pods/shop/web", Some(pod))]);
    for prefix in ["tenant-00", "/tenant-00", "/tenant-00/"] {
        let (code, text, stderr) =
            said(&bucket, &format!("get pods -n shop --etcd-prefix {prefix}"));
        assert!(
            code == 0 && text.contains("web"),
            "{prefix}: {text}{stderr}"
        );
    }
}

/// The labels of encrypted objects are unknown. A list that lacks what was named never ends with 0.
#[test]
fn a_list_that_lacks_encrypted_objects_says_so() {
    let bucket = Bucket::with_base();
    let before = BASE.to_string();
    change(
        &bucket,
        &[
            ("/registry/secrets/shop/a", Some("k8s:enc:kms:v2:vault:x")),
            ("/registry/secrets/shop/b", Some("k8s:enc:aescbc:v1:k:x")),
        ],
    );
    for line in [
        "get secrets -n shop -l app=web",
        "get secrets -n shop -l app=web -o yaml",
        "export secrets -n shop -l app=web",
        &format!("diff secrets -n shop -l app=web --from {before}"),
        "history secrets -n shop -l app=web",
    ] {
        let (code, _, stderr) = said(&bucket, line);
        assert!(
            code == 77 && stderr.contains("the labels of 2 objects"),
            "{line}: {code} {stderr}"
        );
    }
    let (code, _, stderr) = said(&bucket, "export -n shop -l app=web");
    assert!(
        code == 0 && stderr.contains("the labels of 2 objects"),
        "{code} {stderr}"
    );
    let (code, text, stderr) = said(&bucket, "get secrets -n shop -o name");
    assert!(
        code == 77 && stderr.contains("the list is not complete"),
        "{text} {stderr}"
    );
    let (_, text, _) = said(&bucket, "get secrets -n shop");
    assert!(
        text.contains("no file opens it, because its key is in a KMS"),
        "{text}"
    );
}

/// A namespace empties while it is Terminating: what is offered is from before. A namespace that was made again is another.
#[test]
fn a_deleted_namespace_is_offered_as_it_was_before_it_emptied() {
    let terminating = r#"{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"gone","deletionTimestamp":"2026-11-21T02:29:00Z"}}"#;
    let whole = r#"{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"gone"}}"#;
    let bucket = Bucket::with_base();
    let (namespace, pod) = ("/registry/namespaces/gone", "/registry/pods/gone/a");
    change(
        &bucket,
        &[
            (namespace, Some(whole)),
            (pod, Some("{}")),
            (namespace, Some(terminating)),
            (pod, None),
            (namespace, Some(terminating)),
            (namespace, None),
            (namespace, Some(whole)),
            ("/registry/pods/gone/later", Some("{}")),
            ("/registry/pods/gone/later", None),
        ],
    );
    let (_, text, stderr) = said(&bucket, &format!("deleted --since {BASE}"));
    let last = BASE + 9;
    assert!(
        text.starts_with(&format!("Deleted after revision {BASE} up to {last}")),
        "{text}{stderr}"
    );
    assert!(
        text.contains("namespace/gone and 1 object in it (exists again)"),
        "{text}"
    );
    assert!(text.contains("pod/gone/later"), "{text}");
    let (_, result, _) = bucket.run("deleted", &["--since", &BASE.to_string()]);
    let all = result["deleted"].as_array().unwrap();
    let gone = all
        .iter()
        .find(|d| d["object"] == "namespace/gone")
        .unwrap();
    assert_eq!(
        [&gone["revision"], &gone["before"]],
        [&json!(BASE + 6), &json!(BASE + 2)]
    );
}

/// Snapshots of changes are missing, and those before and after them tell what they know. A full after them tells the rest.
#[test]
fn deletions_around_a_hole_are_told_and_the_hole_is_named() {
    let changes = [
        ("/registry/pods/a/known", Some("{}")),
        ("/registry/pods/a/again", Some("{}")),
        ("/registry/pods/a/lost", Some("{}")),
        ("/registry/pods/a/known", None),
        // The deltas of the next three changes will be missing.
        ("/registry/pods/a/lost", None),
        ("/registry/pods/a/again", None),
        ("/registry/pods/a/again", Some("{}")),
        ("/registry/pods/a/unseen", Some("{}")),
        ("/registry/pods/a/unseen", None),
    ];
    for has_full in [false, true] {
        let bucket = Bucket::with_base();
        change(&bucket, &changes);
        if has_full {
            let last = BASE + 8;
            bucket.compact(&["--keep-history", "0", "--revision", &last.to_string()]);
        }
        for name in bucket.names() {
            let is_lost = (5..=7).any(|n| name.contains(&format!("Incr-{:08}-", BASE + n)));
            if is_lost {
                std::fs::remove_file(bucket.path().join("v2").join(name)).unwrap();
            }
        }
        let (code, text, stderr) = said(&bucket, "deleted pods -n a");
        let hole = format!(
            "not every change is recorded for revisions {} to {}",
            BASE + 5,
            BASE + 7
        );
        assert!(code == 0 && text.contains(&hole), "{text}{stderr}");
        let (_, result, _) = bucket.run("deleted", &["pods", "-n", "a"]);
        let missing = json!([{"first_revision": BASE + 5, "last_revision": BASE + 7}]);
        assert_eq!(result["missing"], missing);
        let all = result["deleted"].as_array().unwrap();
        let mut told: Vec<String> = all
            .iter()
            .map(|d| {
                let at = d["revision"]
                    .as_i64()
                    .map_or("unknown".to_owned(), |r| (r - BASE).to_string());
                let before = d["before"].as_i64().unwrap();
                let name = d["object"].as_str().unwrap();
                // The revision that is offered has the object.
                let is_known = has_full || before <= BASE + 4;
                if is_known {
                    let (code, _, stderr) =
                        said(&bucket, &format!("get {name} --revision {before}"));
                    assert_eq!(code, 0, "{name} at {before}: {stderr}");
                }
                format!("{at} {name} {} {}", before - BASE, d["recreated"])
            })
            .collect();
        told.sort();
        let known = "4 pod/a/known 3 false";
        let expected = match has_full {
            // Nothing tells when the object was put that is deleted last.
            false => vec![known, "9 pod/a/unseen 8 false"],
            true => vec![
                known,
                "9 pod/a/unseen 8 false",
                "unknown pod/a/again 4 true",
                "unknown pod/a/lost 4 false",
            ],
        };
        assert_eq!(told, expected, "{has_full}");
        let (code, text, stderr) = said(&bucket, &format!("diff pods -n a --from {}", BASE + 3));
        let last = if has_full { 9 } else { 4 };
        assert!(
            code == 0 && text.contains(&format!("to {}\n", BASE + last)),
            "{text}{stderr}"
        );
        assert_eq!(stderr.contains("have a gap"), !has_full, "{stderr}");
        let (_, text, _) = said(&bucket, "history pod/a/lost");
        assert_eq!(
            text.contains(&format!("by {}", BASE + 8)),
            has_full,
            "{text}"
        );
        let (_, table, _) = said(&bucket, &format!("get pods -n a --revision {}", BASE + 3));
        let lost = table.lines().find(|line| line.starts_with("lost")).unwrap();
        assert_eq!(lost.contains("by 2026"), has_full, "{table}");
    }
}

#[test]
fn deleted_takes_labels_and_a_namespace_that_is_gone_is_told() {
    let fixture = fixtures_dir().join("kubernetes");
    let run = |line: &str| {
        let out = deltafold()
            .args(line.split(' '))
            .arg("--store")
            .arg(&fixture)
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (out.status.code(), text(&out.stdout), text(&out.stderr))
    };
    let (code, text, stderr) = run("deleted pods -n shop -l app=web-2");
    assert_eq!(code, Some(0), "{stderr}");
    assert!(
        text.contains("web-2-") && !text.contains("web-3-"),
        "{text}"
    );

    let history = fixtures_dir().join("history");
    let get = |args: &[&str]| {
        let out = deltafold()
            .arg("get")
            .args(args)
            .arg("--store")
            .arg(&history)
            .output()
            .unwrap();
        (
            out.status.code(),
            out.stdout,
            String::from_utf8(out.stderr).unwrap(),
        )
    };
    for args in [&["cm", "-n", "old"][..], &["cm", "-n", "old", "-o", "yaml"]] {
        let (code, _, stderr) = get(args);
        assert_eq!(code, Some(0));
        assert!(
            stderr.contains("the namespace old was deleted at revision 252"),
            "{stderr}"
        );
        let command = stderr
            .split("to bring it back: deltafold recover ")
            .nth(1)
            .unwrap();
        let (command, _) = command.split_once(" --store").unwrap();
        let out = deltafold()
            .arg("recover")
            .args(command.split(' '))
            .args(["-o", "yaml", "--store"])
            .arg(&history)
            .output()
            .unwrap();
        let printed = String::from_utf8(out.stdout).unwrap();
        assert!(printed.contains("name: settings"), "{printed}{stderr}");
        assert!(
            printed.starts_with("---\napiVersion: v1\nkind: Namespace\n"),
            "{printed}"
        );
    }
    let (_, _, stderr) = get(&["cm", "-n", "never"]);
    assert!(!stderr.contains("was deleted"), "{stderr}");
}
