//! `deltafold store check` names the step that does not work, and leaves nothing behind.

use super::gc_faults::context;
use crate::support::fake_s3::{Conditions, Dialect, FakeS3};
use crate::support::faults::{Call, Fault, FaultStore, at};
use crate::support::made_backups::objects_of;
use crate::support::process::free_port;
use crate::support::s3::{Kind, S3};
use crate::support::versitygw::Versitygw;
use crate::support::{deltafold, run_json, scratch};
use deltafold::error::Reason;
use object_store::memory::InMemory;
use serde_json::Value;
use std::sync::Arc;

fn check(url: &str, env: &[(String, String)]) -> (i32, Value) {
    let mut c = deltafold();
    c.envs(env.iter().cloned());
    c.args(["store", "check", "--output", "json", "--store", url]);
    if url.starts_with("s3:") {
        c.args(["--store-option", "max_retries=1"]);
    }
    let (code, outcome, _) = run_json(&mut c);
    (code, outcome)
}

/// Returns the steps in this state.
fn those(outcome: &Value, state: &str) -> Vec<String> {
    let checks = outcome["checks"].as_array().unwrap().iter();
    let those = checks.filter(|c| c["state"] == state);
    those
        .map(|c| c["ability"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn a_folder_and_a_server_work() {
    let folder = scratch::folder().unwrap();
    let rt = tokio::runtime::Runtime::new().unwrap();
    let server = Versitygw::start();
    rt.block_on(server.s3().create_bucket("plain", Kind::Plain));
    let url = folder.path().to_str().unwrap();
    // Nothing is said to work that was not seen: a folder has no tags, versions and uploads.
    for (url, env, lacking) in [
        (url, vec![], &["Tags", "Versions", "Uploads"][..]),
        ("s3://plain/deep/prefix", server.s3().env(), &[]),
    ] {
        let (code, outcome) = check(url, &env);
        assert_eq!(code, 0, "{outcome}");
        assert_eq!(those(&outcome, "Lacking"), lacking, "{outcome}");
        assert_eq!(
            those(&outcome, "Works").len(),
            11 - lacking.len(),
            "{outcome}"
        );
    }
    let mut left = Vec::new();
    for entry in std::fs::read_dir(url).unwrap() {
        let entry = entry.unwrap();
        let within = std::fs::read_dir(entry.path()).unwrap().count();
        assert_eq!(within, 0, "{entry:?}");
        left.push(entry.file_name().into_string().unwrap());
    }
    left.sort();
    assert_eq!(left, ["deltafold-locks", "deltafold-staging"]);
}

#[test]
fn the_step_that_fails_is_named_and_nothing_is_left() {
    const REFUSED: Conditions = Conditions::Refused((501, "NotImplemented"));
    type Set = fn(&mut Dialect);
    let cases: [(Set, &str, i32); 4] = [
        (
            |d| d.conditions = Conditions::Ignored,
            "ConditionalCreate",
            78,
        ),
        (|d| d.conditions = REFUSED, "ConditionalCreate", 78),
        (|d| d.damages = true, "ReadBack", 78),
        (|d| d.keeps_deleted = true, "Delete", 78),
    ];
    for (set, step, expected) in cases {
        let mut dialect = Dialect::default();
        set(&mut dialect);
        let server = FakeS3::start(dialect);
        let (code, outcome) = check("s3://b/p", &server.s3().env());
        assert_eq!(code, expected, "{step}: {outcome}");
        let mut failed = those(&outcome, "Failed");
        // The first step that deletes ends the round.
        for failed in &mut failed {
            *failed = failed.replace("DeleteMany", "Delete");
        }
        assert_eq!(failed, [step], "{outcome}");
        let message = outcome["message"].as_str().unwrap();
        assert!(message.contains("deltafold cannot work"), "{message}");
        assert_eq!(server.objects().is_empty(), step != "Delete", "{step}");
    }
}

/// A call hangs until a signal comes.
#[test]
fn ended_midway_it_leaves_nothing() {
    let rt = tokio::runtime::Runtime::new().unwrap();
    for call in [Call::Get, Call::Body] {
        let inner = Arc::new(InMemory::new());
        let (nth, fault) = (0, Fault::Hang);
        let faults = FaultStore::new(inner.clone(), vec![at(call, nth, fault)]);
        let ended = deltafold::ops::store_check::run(|_| Ok(context(&rt, &faults).store));
        assert_eq!(
            ended.err().unwrap().reason(),
            Reason::Terminated,
            "{call:?}"
        );
        let left = rt.block_on(objects_of(&*inner));
        assert!(left.is_empty(), "{call:?}: {:?}", left.keys());
    }
}

#[test]
fn without_a_way_to_the_store_there_is_no_table() {
    let nobody = S3::new(&format!("http://127.0.0.1:{}", free_port()));
    let (code, outcome) = check("s3://b/p", &nobody.env());
    assert_eq!(
        (code, outcome["reason"].as_str()),
        (69, Some("StoreUnreachable"))
    );
    let (code, outcome) = check("/no/such/folder", &[]);
    assert_eq!(
        (code, outcome["reason"].as_str()),
        (78, Some("Configuration"))
    );
    let parent = scratch::folder().unwrap();
    let missing = parent.path().join("backup");
    let (code, outcome) = check(missing.to_str().unwrap(), &[]);
    assert!(code == 0 && missing.is_dir(), "{outcome}");
}
