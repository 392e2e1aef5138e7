//! `recover` without a cluster: what is selected, and the manifests.
//!
//! The danger: a namespace comes back as it was while it was emptied, or a slip in a list of names is taken for nothing.

use crate::support::{deltafold, fixtures_dir, scratch};
use std::io::Write as _;
use std::process::{Output, Stdio};

fn recover(fixture: &str, args: &[&str]) -> (Option<i32>, String, String) {
    told(&run(fixture, args, ""))
}

fn told(out: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (out.status.code(), text(&out.stdout), text(&out.stderr))
}

fn run(fixture: &str, args: &[&str], input: &str) -> Output {
    let home = scratch::folder().unwrap();
    let mut command = deltafold();
    command
        .arg("recover")
        .args(args)
        .arg("--store")
        .arg(fixtures_dir().join(fixture))
        .env_remove("KUBECONFIG")
        .env("HOME", home.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // It may have ended without reading.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

#[test]
fn a_namespace_that_was_being_deleted_is_taken_as_it_was_before() {
    // It was deleted at revision 252, and emptied before.
    let (code, yaml, stderr) = recover(
        "history",
        &["namespace/old", "--revision", "251", "-o", "yaml"],
    );
    assert_eq!(code, Some(0), "{stderr}");
    assert!(
        yaml.starts_with("---\napiVersion: v1\nkind: Namespace\n"),
        "{yaml}"
    );
    let warning = "the namespace old was being deleted from revision ";
    let (_, since) = stderr
        .split_once(warning)
        .unwrap_or_else(|| panic!("{stderr}"));
    let (_, before) = since.split_once("give --revision ").unwrap();
    let before = before.split_whitespace().next().unwrap();
    let (code, yaml, stderr) = recover(
        "history",
        &["-n", "old", "--revision", before, "-o", "yaml"],
    );
    assert_eq!(code, Some(0), "{stderr}");
    assert!(!stderr.contains("being deleted"), "{stderr}");
    for part in ["kind: Namespace\n", "name: settings\n"] {
        assert!(yaml.contains(part), "{yaml}");
    }
    let (code, _, stderr) = recover("history", &["-n", "old", "-o", "yaml"]);
    assert_eq!(code, Some(66), "{stderr}");
    let command = format!("deltafold recover -n old --revision {before}");
    assert!(stderr.contains(&command), "{stderr}");
}

#[test]
fn a_list_names_objects_in_the_ways_of_kubectl() {
    let list = "
- configmap/shop/cm-1
---
kind: List
apiVersion: v1
items:
- {apiVersion: v1, kind: ConfigMap, metadata: {name: cm-2, namespace: shop}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web-1, namespace: shop}
";
    let (code, yaml, stderr) = told(&run("kubernetes", &["-f", "-", "-o", "yaml"], list));
    assert_eq!(code, Some(0), "{stderr}");
    let names = yaml.lines().filter(|line| line.starts_with("  name: "));
    assert_eq!(
        names.collect::<Vec<_>>(),
        ["  name: cm-1", "  name: cm-2", "  name: web-1"]
    );
    for (list, part) in [
        ("", "names no object"),
        ("- configmaps", "neither KIND/NAMESPACE/NAME"),
        (
            "kind: ConfigMap\nmetadata: {}",
            "neither KIND/NAMESPACE/NAME",
        ),
        ("a: [", "--filename -"),
        ("3", "neither"),
    ] {
        let (code, _, stderr) = told(&run("kubernetes", &["-f", "-", "-o", "yaml"], list));
        assert!(
            code == Some(64) && stderr.contains(part),
            "{list}: {stderr}"
        );
    }
}

#[test]
fn what_cannot_be_recovered_is_said_before_a_cluster_is_asked() {
    for (args, code, part) in [
        (&[][..], 64, "say what to recover"),
        (&["cm/shop/cm-1"], 78, "KUBECONFIG"),
        (&["cm/shop/cm-1", "--since", "1h"], 64, "--deleted"),
        (&["cm/shop/cm-1", "--wait"], 64, "--execute"),
        (&["cm/shop/cm-1", "-o", "name"], 64, "this output format"),
        (
            &["--deleted", "--overwrite", "-o", "yaml"],
            64,
            "--overwrite",
        ),
        (&["cm/shop/never", "-o", "yaml"], 66, "check the name"),
        (
            &["cm", "-n", "shop", "-l", "app=none", "-o", "yaml"],
            66,
            "labels",
        ),
    ] {
        let (ended, _, stderr) = recover("kubernetes", args);
        assert!(
            ended == Some(code) && stderr.contains(part),
            "{args:?}: {ended:?} {stderr}"
        );
    }
}

/// What was deleted is written as it was just before, without what its owner makes anew.
#[test]
fn deletions_are_manifests() {
    let (code, yaml, stderr) = recover("kubernetes", &["--deleted", "-n", "shop", "-o", "yaml"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(yaml.contains("\n  name: cm-3\n"), "{yaml}");
    assert!(yaml.contains("# not here: pod/shop/"), "{yaml}");
    assert!(
        !yaml.contains("kind: Pod\n") && !yaml.contains("uid:"),
        "{yaml}"
    );
}
