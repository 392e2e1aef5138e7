//! The documents match the program: exit codes, settings, the test command, the flags of the incumbent.

use crate::support::deltafold;
use crate::support::manifests::{documents, path, read};
use crate::support::pages;
use deltafold::Reason;
use object_store::ClientConfigKey;
use object_store::aws::AmazonS3ConfigKey;
use object_store::azure::AzureConfigKey;
use object_store::gcp::GoogleConfigKey;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;

/// deltafold's own settings of every object store.
const OWN_SETTINGS: [&str; 5] = [
    "max_retries",
    "requests",
    "retry_timeout",
    "ca_certificate",
    "secret_dir",
];

/// Text logs, even if the tests run in a Pod.
pub const TEXT: (&str, &str) = ("DELTAFOLD_LOG_FORMAT", "text");

/// Runs a command and returns the exit code, standard output and standard error.
pub fn run(args: &[&str]) -> (i32, String, String) {
    let mut c = deltafold();
    let out = c.env(TEXT.0, TEXT.1).args(args).output().unwrap();
    let text = |b: Vec<u8>| String::from_utf8(b).unwrap();
    let code = out.status.code().unwrap();
    (code, text(out.stdout), text(out.stderr))
}

/// Returns the files in `jobs/` by name, with their YAML documents.
fn jobs() -> Vec<(String, Vec<Value>)> {
    let files = fs::read_dir(path("jobs")).unwrap();
    let mut names: Vec<String> = files
        .map(|f| format!("jobs/{}", f.unwrap().file_name().to_str().unwrap()))
        .filter(|name| name.ends_with(".yaml"))
        .collect();
    names.sort();
    let parse = |name: String| {
        let documents = documents(&read(&name));
        (name, documents)
    };
    names.into_iter().map(parse).collect()
}

/// Returns every value with this name, at any depth.
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

/// Returns the cells of all Markdown tables in a text.
fn rows(text: &str) -> Vec<Vec<&str>> {
    let lines = text.lines().filter_map(|l| l.strip_prefix('|'));
    lines
        .map(|l| l.trim_end_matches('|').split('|').map(str::trim).collect())
        .collect()
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
    // A process that a signal ended has no exit code of its own.
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
    let keys = keys("Swift settings");
    assert!(keys.len() > 5);
    for key in keys {
        let (setting, url) = (format!("{key}="), "swift://b");
        let (code, _, stderr) = run(&["list", "--store", url, "--store-option", &setting]);
        assert_ne!(code, 0);
        assert!(!stderr.contains("no such setting"), "{key}: {stderr}");
    }
    let (code, _, stderr) = run(&["list", "--store", "oss://b"]);
    assert_eq!(code, 64);
    assert!(stderr.contains("virtual_hosted_style_request"), "{stderr}");
}

#[test]
fn the_two_commands_are_what_ci_runs() {
    let blocks = pages::shell("README.md");
    let quick_start = blocks.iter().filter(|b| b.heading == "Quick start");
    assert!(quick_start.clone().all(|b| b.lines.len() == 1));
    let commands: Vec<&str> = quick_start.map(|b| b.lines[0].as_str()).collect();
    assert_eq!(commands.len(), 2, "{commands:?}");
    assert!(commands[0].ends_with("cargo run --release --locked -- compact --store target/demo"));
    assert_eq!(commands[1], "cargo test --locked");
    let ci = read(".ci/run");
    let lines: Vec<&str> = ci.lines().collect();
    assert!(lines.contains(&"set -euo pipefail"));
    for command in commands.into_iter().chain([
        "step 'formatting' cargo fmt --check",
        "cargo clippy --all-targets --locked -- -D warnings",
        "cargo clippy --test '*' --locked -- -D warnings",
        "step 'lints' lints",
    ]) {
        assert!(lines.contains(&command), ".ci/run does not run: {command}");
    }
    use std::os::unix::fs::PermissionsExt;
    let mode = fs::metadata(path(".ci/run")).unwrap().permissions().mode();
    assert_eq!(mode & 0o111, 0o111, "{mode:o}");
}

/// docs/migration.md names every flag of etcd-backup-restore 0.4x in the first column of a table, with an answer.
#[test]
fn every_flag_of_the_incumbent_has_an_answer() {
    let page = read("docs/migration.md").replace("\\|", "/");
    let (page, _) = page
        .split_once("## What changes for other readers")
        .unwrap();
    let rows = rows(page);
    let flags = include_str!("../support/incumbent_flags.txt");
    let known: BTreeSet<String> = flags.lines().map(|flag| format!("--{flag}")).collect();
    let first: Vec<&Vec<&str>> = rows.iter().filter(|cells| cells.len() == 2).collect();
    let mut told = BTreeSet::new();
    for cells in first {
        assert!(cells[1].len() > 2, "{cells:?}");
        let quoted = cells[0].split('`').skip(1).step_by(2);
        let words = quoted.flat_map(|code| code.split([' ', '=', ',']));
        let flags = words.filter(|word| word.starts_with("--"));
        told.extend(flags.map(str::to_owned));
    }
    let missing: Vec<_> = known.difference(&told).collect();
    assert!(missing.is_empty(), "docs/migration.md: {missing:?}");
    let unknown: Vec<_> = told.difference(&known).collect();
    assert!(
        unknown.is_empty(),
        "tests/support/incumbent_flags.txt: {unknown:?}"
    );
}
