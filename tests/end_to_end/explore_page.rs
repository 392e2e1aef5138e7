//! The page of `deltafold explore` in a real browser: `tests/browser/explore.mjs` clicks through it.
//!
//! Plain `cargo test` does not run this module: `tests/browser/run` installs the browser.

use crate::support::explore::Page;
use crate::support::made_backups::{BASE, Bucket};
use crate::support::{copy_dir, deltafold, fixtures_dir, scratch};
use base64::Engine as _;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// Splits a command as a shell does that knows single quotes alone.
fn words(command: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    for (nth, part) in command.split('\'').enumerate() {
        let mut parts = part.split(' ');
        let is_quoted = nth % 2 == 1;
        if let Some(first) = parts.next().filter(|_| !is_quoted) {
            words.last_mut().unwrap().push_str(first);
            words.extend(parts.map(str::to_owned));
        } else {
            words.last_mut().unwrap().push_str(part);
        }
    }
    words
}

/// A store with 10,000 Pods in a namespace.
fn many_pods() -> Bucket {
    let bucket = Bucket::with_base();
    let base64 = base64::engine::general_purpose::STANDARD;
    let pod = |nth: i64| {
        let revision = BASE + nth;
        let object = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": format!("web-{nth:05}"), "namespace": "shop"},
            "spec": {"nodeName": format!("node-{}", nth % 10), "containers": [{"name": "web", "image": "web:1"}]},
            "status": {"phase": "Running"},
        });
        let key = format!("/registry/pods/shop/web-{nth:05}");
        json!({"etcdEvent": {"kv": {
            "key": base64.encode(key), "create_revision": revision, "mod_revision": revision, "version": 1,
            "value": base64.encode(object.to_string()),
        }}, "time": format!("2026-11-21T02:{:02}:{:02}Z", nth / 1000, nth % 60)})
    };
    let events: Vec<Value> = (1..=10_000).map(pod).collect();
    bucket.delta_of(BASE + 1, BASE + 10_000, 12, &events);
    bucket
}

/// Every function works, nothing is on the console, axe finds nothing, and every command that the page shows is
/// one.
#[test]
fn every_function_of_the_page_works_in_a_browser() {
    let modules = std::env::var("DELTAFOLD_TEST_BROWSER_MODULES");
    assert!(modules.is_ok(), "run tests/end-to-end browser");
    let folder = scratch::folder().unwrap();
    let store = folder.path().join("etcd-main");
    copy_dir(&fixtures_dir().join("kubernetes"), &store);
    let screenshots = std::env::var_os("DELTAFOLD_TEST_SCREENSHOTS");
    let screenshots = screenshots.map_or_else(|| folder.path().join("screenshots"), Into::into);
    std::fs::create_dir_all(&screenshots).unwrap();
    let page = Page::start(&store);
    let history = Page::start(&fixtures_dir().join("history"));
    let damaged = folder.path().join("damaged");
    copy_dir(&store, &damaged);
    let deltas = std::fs::read_dir(damaged.join("v2")).unwrap();
    let newest = deltas.map(|delta| delta.unwrap().path()).max().unwrap();
    std::fs::write(newest, b"damaged").unwrap();
    let damaged = Page::start(&damaged);
    let many = folder.path().join("many");
    copy_dir(many_pods().path(), &many);
    let many = Page::start(&many);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/browser/explore.mjs");
    let run = Command::new("node")
        .arg(script)
        .arg(&page.address)
        .arg(&history.address)
        .arg(&damaged.address)
        .arg(&many.address)
        .arg(&screenshots)
        .output()
        .expect("node");
    let (out, err) = (
        String::from_utf8_lossy(&run.stdout),
        String::from_utf8_lossy(&run.stderr),
    );
    assert!(run.status.success(), "{out}\n{err}");
    let commands: Vec<String> = serde_json::from_str(out.lines().last().unwrap()).unwrap();
    assert!(commands.len() >= 10, "{commands:?}");
    for command in commands {
        let words = words(&command);
        assert_eq!(words[0], "deltafold", "{command}");
        let mut program = deltafold();
        program.current_dir(folder.path()).args(&words[1..]);
        // It would need a live cluster.
        match words[1].as_str() {
            "recover" => program.args(["-o", "yaml"]),
            _ => &mut program,
        };
        let run = program.output().unwrap();
        let stderr = String::from_utf8_lossy(&run.stderr);
        assert_eq!(run.status.code(), Some(0), "{command}: {stderr}");
    }
}
