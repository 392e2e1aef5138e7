//! The documents match the program: exit codes, schemas, flags, settings, commands.

use crate::support::manifests::{documents, path, read};
use crate::support::{copy_fixture, deltafold};
use crate::support::{pages, reference, scratch};
use deltafold::Reason;
use object_store::ClientConfigKey;
use object_store::aws::AmazonS3ConfigKey;
use object_store::azure::AzureConfigKey;
use object_store::gcp::GoogleConfigKey;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;

/// Commands that print JSON, each with a schema.
pub const COMMANDS: [&str; 15] = [
    "snapshot", "compact", "list", "status", "restore", "get", "history", "diff", "export",
    "apply", "verify", "maintain", "copy", "gc", "pin",
];

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

/// Returns the documents of today: a changelog names what is gone, too.
fn documents_of_today() -> Vec<String> {
    let mut pages = pages::all();
    pages.retain(|p| p != "CHANGELOG.md");
    pages
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

/// Returns the commands in the shell blocks of a text.
fn shell_blocks(text: &str) -> Vec<&str> {
    let blocks = text.split("```sh\n").skip(1);
    blocks
        .map(|b| b.split("```").next().unwrap().trim())
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
        &["store", "check", "--help"],
        &["copy", "--help"],
        &["gc", "--help"],
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
    // Without a command, the help is an error.
    let (code, stdout, stderr) = run(&[]);
    assert_eq!((code, stdout.as_str()), (64, ""));
    assert!(stderr.contains("Usage: deltafold"));
}

#[test]
fn completions_know_the_commands() {
    let documents = pages::of_users()
        .iter()
        .map(|p| read(p))
        .collect::<String>();
    for shell in ["bash", "zsh", "fish"] {
        let command = format!("deltafold completions {shell} > ");
        assert!(documents.contains(&command), "{command}");
        let (code, script, stderr) = run(&["completions", shell]);
        assert_eq!((code, stderr.as_str()), (0, ""), "{shell}");
        for word in ["compact", "list", "restore", "completions", "keep-history"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    assert_eq!(run(&["completions", "tcsh"]).0, 64);
}

/// Returns the reference of all commands: every flag, and every variable.
fn reference() -> String {
    reference::commands(deltafold::cli::command_line())
}

/// Returns the `--flags` in a text.
fn flags(text: &str) -> BTreeSet<&str> {
    let is_flag_char = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
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
    /// Flags of cargo, etcd and its tools, Kubernetes and its distributions, aws, and scripts of this repository.
    const OTHERS: [&str; 38] = [
        "--set",
        "--binary",
        "--cluster-init",
        "--enable-backup-compaction",
        "--encryption-provider-config",
        "--initial-cluster-state",
        "--token",
        "--url",
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
        // A flag of the bench `wide`.
        "--before",
        "--program",
        "--runs",
        "--scale",
        "--outage",
    ];
    let reference = reference();
    let mut real = flags(&reference);
    real.extend(["--help", "--version"]);
    let mut wrong = Vec::new();
    for name in documents_of_today() {
        let mut text = pages::prose(&read(&name));
        if name == "docs/migration.md" {
            // The first column has the flags of another tool.
            let ours = |line: &str| match line.strip_prefix('|') {
                Some(row) => row
                    .replace("\\|", "/")
                    .split_once('|')
                    .map(|(_, rest)| rest.to_owned()),
                None => Some(line.to_owned()),
            };
            text = text.lines().filter_map(ours).collect::<Vec<_>>().join("\n");
        }
        // Every second part is code. Of code, only flags alone and command lines of deltafold are checked.
        for (at, part) in text.split('`').enumerate() {
            if at % 2 == 1 && !part.starts_with("--") && !part.starts_with("deltafold ") {
                continue;
            }
            let mentioned = flags(part).into_iter();
            let unknown = mentioned.filter(|f| !real.contains(f) && !OTHERS.contains(f));
            wrong.extend(unknown.map(|flag| format!("{name}: {flag}")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
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
    let reference = reference();
    let mut documents: Vec<String> = documents_of_today().iter().map(|p| read(p)).collect();
    documents.extend(jobs().iter().map(|(name, _)| read(name)));
    let mut seen = 0;
    for text in documents {
        for (at, _) in text.match_indices("DELTAFOLD_") {
            let name = &text[at..];
            let end = name.find(|c: char| !c.is_ascii_uppercase() && c != '_');
            let name = &name[..end.unwrap_or(name.len())];
            // `DELTAFOLD_…` stands for all variables; the others belong to the tests.
            if name == "DELTAFOLD_" || name.starts_with("DELTAFOLD_TEST_") {
                continue;
            }
            seen += 1;
            assert!(
                reference.contains(&format!("Variable: `{name}`.")),
                "{name}"
            );
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

/// Each `cargo test --test TIER MODULE::NAME` in a document names a module and the beginning of a test's name.
/// Without a tier no test is named.
#[test]
fn tests_that_documents_name_exist() {
    let mut named = 0;
    for document in documents_of_today() {
        let text = read(&document);
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
    for document in documents_of_today() {
        let text = read(&document);
        for (at, call) in text.match_indices("cargo test ") {
            let next = text[at + call.len()..].trim_start();
            let is_option = next.starts_with(['-', '#']);
            assert!(is_option, "{document}: no tier: cargo test {next:.40}");
        }
    }
}

/// tests/README.md has one line for each module of the tiers, sorted.
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

/// The documents show the real output of the main job and of others on the same bucket, except for durations.
#[test]
fn the_documents_show_what_the_main_job_says() {
    let store = copy_fixture("kubernetes");
    let store = store.path().to_str().unwrap();
    let steady = |text: &str| text.split(" read, in ").next().unwrap().trim().to_owned();
    let readme = read("README.md");
    let documents = pages::of_users()
        .iter()
        .map(|p| read(p))
        .collect::<String>();
    let (code, said, stderr) = run(&["compact", "--store", store]);
    assert_eq!(code, 0, "{stderr}");
    assert!(readme.contains(&steady(&said)), "{said}");
    let (code, said, stderr) = run(&["list", "--store", store]);
    assert_eq!(code, 0, "{stderr}");
    assert!(documents.contains(said.trim()), "{said}");
    let (code, said, stderr) = run(&["diff", "--from", "275", "--to", "280", "--store", store]);
    assert_eq!(code, 0, "{stderr}");
    assert!(documents.contains(said.trim()), "{said}");
    // Restore the state before the snapshot that was written above.
    let store = copy_fixture("kubernetes");
    let folder = scratch::folder().unwrap();
    let dir = folder.path().join("etcd");
    let (store, dir) = (store.path().to_str().unwrap(), dir.to_str().unwrap());
    let args = ["restore", "--store", store, "--data-dir", dir];
    let (code, said, stderr) = run(&args);
    assert_eq!(code, 0, "{stderr}");
    let said = said.split("  read ").next().unwrap().trim();
    let said = said.replace(dir, "/var/lib/etcd");
    assert!(documents.contains(&said), "{said}");
}

/// ARCHITECTURE's table lists exactly the packages in use, each with a reason.
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
        told.extend(self::flags(cells[0]).into_iter().map(str::to_owned));
    }
    let missing: Vec<_> = known.difference(&told).collect();
    assert!(missing.is_empty(), "docs/migration.md: {missing:?}");
    let unknown: Vec<_> = told.difference(&known).collect();
    assert!(
        unknown.is_empty(),
        "tests/support/incumbent_flags.txt: {unknown:?}"
    );
}
