//! Help pages: options stand under the right heading, and examples can be copied.

use crate::support::process::Process;
use crate::support::{copy_dir, deltafold, fixtures_dir, scratch};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

/// Options that stand under a heading of their own. All others are a command's own: they stand under
/// "Options".
const GROUPS: [(&str, &[&str]); 14] = [
    (
        "Store",
        &[
            "store",
            "from",
            "to",
            "from-option",
            "to-option",
            "compression",
            "take-over",
        ],
    ),
    ("Backup", &["store", "snapshot"]),
    (
        "Connection",
        &["store-option", "store-secret", "requests", "file-mode"],
    ),
    (
        "Resources",
        &[
            "temp-dir",
            "threads",
            "max-database-bytes",
            "max-value-bytes",
            "parallel",
            "bandwidth",
        ],
    ),
    (
        "Encryption",
        &[
            "age-recipient",
            "age-recipients-file",
            "age-identity",
            "allow-plaintext-below",
            "ignore-untrusted",
            "decrypt",
        ],
    ),
    (
        "Live etcd",
        &[
            "endpoints",
            "cacert",
            "cert",
            "key",
            "tls-secret",
            "auth-secret",
            "dial-timeout",
            "command-timeout",
            "keepalive-time",
            "keepalive-timeout",
            "user",
            "password",
            "password-file",
        ],
    ),
    (
        "Point in time",
        &["revision", "time", "or-newest", "timeline"],
    ),
    (
        "New cluster",
        &[
            "name",
            "initial-cluster",
            "initial-cluster-token",
            "initial-advertise-peer-urls",
        ],
    ),
    (
        "Peers",
        &["peer-trusted-ca-file", "peer-cert-file", "peer-key-file"],
    ),
    (
        "Kubernetes",
        &[
            "namespace",
            "context",
            "snapshot-lease-prefix",
            "lease-namespace",
            "lock-lease",
        ],
    ),
    ("Task", &["policy", "task-name", "ttl", "wait", "timeout"]),
    (
        "Features allowed to policies and tasks",
        &[
            "allow-host-path",
            "allow-host-network",
            "allow-service-account",
            "allow-root",
            "allow-tolerations",
            "allow-priority-class",
            "allowed-image-prefix",
        ],
    ),
    (
        "Metrics",
        &[
            "metrics-bind-address",
            "metrics-scrape-wait",
            "metrics-file",
        ],
    ),
    (
        "Output",
        &["output", "log-format", "log-level", "termination-log"],
    ),
];

/// Headings whose options stand there on every page.
const EVERYWHERE: [&str; 4] = ["Connection", "Encryption", "Live etcd", "Output"];

/// The help page of a command, on a terminal with this many columns.
fn page(command: &[String], columns: usize) -> String {
    let mut program = deltafold();
    program.env("COLUMNS", columns.to_string());
    let output = program.args(command).arg("--help").output().unwrap();
    assert!(output.status.success(), "{command:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// All commands, each with the names before it, such as `task create snapshot`.
fn commands() -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut next = 0;
    while next < commands.len() {
        let command: Vec<String> = commands[next].clone();
        next += 1;
        for name in subcommands(&page(&command, 100)) {
            commands.push([command.clone(), vec![name]].concat());
        }
    }
    assert!(commands.len() > 30, "{commands:?}");
    commands
}

fn subcommands(page: &str) -> Vec<String> {
    let list = page
        .split_once("\nCommands:\n")
        .map_or("", |(_, list)| list);
    let mut names = Vec::new();
    for line in list.lines().take_while(|line| !line.is_empty()) {
        let line = line.strip_prefix("  ").unwrap();
        // A description that is wrapped continues at a deeper indent.
        if !line.starts_with(' ') {
            names.push(line.split(' ').next().unwrap().to_owned());
        }
    }
    names.retain(|name| name != "help");
    names
}

/// The options on a page, each with its heading.
fn options(page: &str) -> Vec<(String, String)> {
    let mut heading = "";
    let mut options = Vec::new();
    let page = page.split("\nExamples:\n").next().unwrap();
    for line in page.lines() {
        if !line.starts_with(' ') && line.ends_with(':') {
            heading = line.trim_end_matches(':');
        }
        let option = line.trim_start();
        // `-n, --namespace <NAMESPACE>` or `--apply`; descriptions are indented deeper.
        let is_option = line.len() - option.len() <= 6 && option.starts_with('-');
        if let Some((_, long)) = option.split_once("--").filter(|_| is_option) {
            let name = long.split([' ', '=']).next().unwrap();
            options.push((heading.to_owned(), name.to_owned()));
        }
    }
    options
}

/// A heading must not hold the options that come after its group: `gc --apply` is not under "Encryption".
#[test]
fn options_stand_under_the_right_heading() {
    let of_command = |words: &str| {
        let command: Vec<String> = words.split(' ').map(str::to_owned).collect();
        options(&page(&command, 100))
    };
    for (command, option) in [
        ("gc", "apply"),
        ("gc", "policy"),
        ("snapshot follow", "delta-period"),
        ("snapshot full", "final"),
        ("maintain", "defrag"),
        ("restore", "dry-run"),
        ("restore", "data-dir"),
        ("verify", "level"),
        ("task create restore", "claim"),
    ] {
        let own = ("Options".to_owned(), option.to_owned());
        let found = of_command(command);
        assert!(found.contains(&own), "{command} --{option}: {found:?}");
    }
    let mut seen = BTreeSet::new();
    for command in commands() {
        let found = options(&page(&command, 100));
        assert!(found.len() > 4, "{command:?}: {found:?}");
        for (heading, option) in &found {
            let group = GROUPS.iter().find(|(name, _)| name == heading);
            if let Some((_, members)) = group {
                assert!(
                    members.contains(&option.as_str()),
                    "{command:?}: --{option} is under {heading}"
                );
                seen.insert((heading.clone(), option.clone()));
                continue;
            }
            assert_eq!(heading, "Options", "{command:?} --{option}");
            for (name, members) in GROUPS {
                let is_member = EVERYWHERE.contains(&name) && members.contains(&option.as_str());
                assert!(!is_member, "{command:?}: --{option} is not under {name}");
            }
        }
    }
    // The table has no option that does not exist.
    for (heading, members) in GROUPS {
        for member in members {
            let listed = (heading.to_owned(), (*member).to_owned());
            assert!(seen.contains(&listed), "{listed:?}");
        }
    }
}

/// `-h` has a command's own options and those that everybody needs; the rest is for `--help`.
#[test]
fn the_short_page_has_what_everybody_needs() {
    let short = |words: &str| {
        let output = deltafold()
            .args(words.split(' '))
            .arg("-h")
            .output()
            .unwrap();
        let page = String::from_utf8(output.stdout).unwrap();
        let options: BTreeSet<String> = options(&page).into_iter().map(|(_, name)| name).collect();
        (page.lines().count(), options)
    };
    for (command, own) in [
        ("gc", &["policy", "apply", "store"][..]),
        ("get", &["prefix", "time", "store", "snapshot"]),
        ("snapshot follow", &["delta-period", "store", "endpoints"]),
        ("restore", &["data-dir", "if-needed", "store"]),
        ("status", &["max-age", "store"]),
    ] {
        let (length, options) = short(command);
        for option in own.iter().chain(&["output", "help"]) {
            assert!(
                options.contains(*option),
                "{command} --{option}: {options:?}"
            );
        }
        for other in [
            "threads",
            "age-recipient",
            "requests",
            "metrics-file",
            "log-level",
            "cacert",
        ] {
            assert!(!options.contains(other), "{command} --{other}");
        }
        let words: Vec<String> = command.split(' ').map(str::to_owned).collect();
        let long = page(&words, 100).lines().count();
        assert!(2 * length < long, "{command}: {length} of {long} lines");
    }
}

/// Commands that only read do not offer what is for writing, but a variable for all commands does no harm.
#[test]
fn a_command_that_reads_offers_no_encryption() {
    for command in [
        "list", "status", "get", "history", "diff", "export", "apply", "verify",
    ] {
        let found = options(&page(&[command.to_owned()], 100));
        for option in ["file-mode", "age-recipient", "age-recipients-file"] {
            assert!(
                !found.iter().any(|(_, name)| name == option),
                "{command} --{option}"
            );
        }
        assert!(
            found.iter().any(|(_, name)| name == "age-identity"),
            "{command}"
        );
    }
}

/// The lines of commands in a page's examples.
fn example_lines(page: &str) -> Vec<&str> {
    let examples = page
        .split_once("\nExamples:\n")
        .map_or("", |(_, text)| text);
    let is_command = |line: &&str| line.starts_with("      ");
    examples.lines().filter(is_command).collect()
}

#[test]
fn examples_are_printed_as_they_are_written() {
    let mut long_lines = 0;
    for command in commands() {
        let [wide, narrow] = [1000, 40].map(|columns| page(&command, columns));
        assert_eq!(example_lines(&wide), example_lines(&narrow), "{command:?}");
        assert!(!narrow.contains('\u{a0}'), "{command:?}");
        long_lines += example_lines(&narrow)
            .iter()
            .filter(|line| line.chars().count() > 40)
            .count();
        // All else is wrapped.
        let text = narrow.split("\nExamples:\n").next().unwrap();
        let about = text.split("\nUsage:").next().unwrap();
        for line in about.lines() {
            assert!(line.chars().count() <= 40, "{command:?}: {line}");
        }
        for line in example_lines(&wide) {
            assert!(line.chars().count() <= 105, "{command:?}: {line}");
        }
    }
    assert!(long_lines > 40, "{long_lines}");
}

/// The command line of an example, without redirections and the programs behind a pipe.
fn arguments(example: &str) -> Vec<String> {
    let mut arguments = Vec::new();
    let mut quoted = false;
    let mut argument = String::new();
    for c in example.chars() {
        match c {
            '\'' => quoted = !quoted,
            '|' | '>' if !quoted => break,
            ' ' if !quoted => arguments.push(std::mem::take(&mut argument)),
            c => argument.push(c),
        }
    }
    arguments.push(argument);
    arguments.retain(|a| !a.is_empty());
    arguments
}

/// The commands of a page's examples, each on one line.
fn examples(page: &str) -> Vec<String> {
    let mut examples: Vec<String> = Vec::new();
    for line in example_lines(page) {
        // Continuations are indented by four more spaces.
        match (line.starts_with("          "), examples.last_mut()) {
            (true, Some(example)) => {
                *example = example.trim_end_matches('\\').to_owned() + line.trim_start();
            }
            _ => examples.push(line.trim_start().to_owned()),
        }
    }
    examples
}

/// `argument` of an example, with places of this test: folders and stores below `root`, and an etcd that is not there.
fn here(argument: &str, root: &Path) -> String {
    if argument.contains("://10.0.0.") || argument.contains("://127.0.0.1") {
        return "http://127.0.0.1:9".to_owned();
    }
    match argument.split_once("://") {
        Some((_, place)) => root.join(place).display().to_string(),
        None if argument.starts_with('/') && !argument.starts_with("/registry") => {
            root.join(&argument[1..]).display().to_string()
        }
        None => argument.to_owned(),
    }
}

/// Each example is run by the program that users get. It may fail for what is not there, but not for its command
/// line; a command that runs on is accepted, and ended.
#[test]
fn examples_are_accepted_by_the_program() {
    let folder = scratch::folder().unwrap();
    let backup = folder.path().join("backups/etcd-main");
    std::fs::create_dir_all(backup.parent().unwrap()).unwrap();
    copy_dir(&fixtures_dir().join("kubernetes"), &backup);
    let (mut checked, mut succeeded) = (0, 0);
    for command in commands() {
        for example in examples(&page(&command, 100)) {
            let arguments = arguments(&example);
            assert_eq!(arguments[0], "deltafold", "{command:?}: {example}");
            let log = folder.path().join("log");
            let mut program = deltafold();
            program
                .current_dir(folder.path())
                .env("KUBECONFIG", "/nowhere");
            program.args(arguments[1..].iter().map(|a| here(a, folder.path())));
            let mut running = Process::spawn(&mut program, &log).unwrap();
            let ended = running.ended_within(Duration::from_secs(2));
            running.end();
            let said = std::fs::read_to_string(&log).unwrap();
            assert!(
                !said.contains("\nUsage: "),
                "{command:?}: {example}\n{said}"
            );
            checked += 1;
            succeeded += u32::from(ended.is_some_and(|status| status.success()));
        }
    }
    assert!(checked > 50 && succeeded > 15, "{checked}, {succeeded}");
}

/// Each flag's variable is shared by all commands; the help says so if it means different things.
#[test]
fn variables_with_two_meanings_are_explained() {
    for (command, variable) in [
        ("gc", "DELTAFOLD_POLICY"),
        ("task create snapshot", "DELTAFOLD_POLICY"),
        ("controller", "DELTAFOLD_NAMESPACE"),
        ("task create snapshot", "DELTAFOLD_NAMESPACE"),
        ("diff", "DELTAFOLD_FROM"),
        ("diff", "DELTAFOLD_TO"),
        ("copy", "DELTAFOLD_FROM"),
        ("copy", "DELTAFOLD_TO"),
    ] {
        let command: Vec<String> = command.split(' ').map(str::to_owned).collect();
        let note = format!("{variable} also sets ");
        assert!(page(&command, 100).contains(&note), "{command:?}: {note}");
    }
}

/// Manual pages come from the same definition: one for each command, with examples that can be copied.
#[test]
fn every_command_has_a_manual_page() {
    let folder = scratch::folder().unwrap();
    let dir = folder.path().join("man/man1");
    let output = deltafold().args(["man", "--dir"]).arg(&dir).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(
        output.stdout.is_empty() && output.stderr.is_empty(),
        "{output:?}"
    );
    let commands = commands();
    for command in &commands {
        let name = [&["deltafold".to_owned()], command.as_slice()].concat();
        let file = dir.join(format!("{}.1", name.join("-")));
        let text = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{file:?}: {e}"));
        assert!(!text.contains('\u{a0}'), "{command:?}");
        // roff escapes hyphens, backslashes and apostrophes.
        let text = text
            .replace("\\*(Aq", "'")
            .replace("\\-", "-")
            .replace("\\\\", "\\");
        let page = page(command, 1000);
        for line in example_lines(&page) {
            // No-fill mode keeps the line; the page's own indent replaces the first six spaces.
            let line = &line[6..];
            assert!(
                text.lines().any(|l| l.trim_start_matches("\\&") == line),
                "{command:?}: {line}\n{text}"
            );
        }
        for (_, option) in options(&page) {
            assert!(
                text.contains(&format!("--{option}")),
                "{command:?}: --{option}"
            );
        }
        let usage = page
            .split_once("\nUsage: ")
            .unwrap()
            .1
            .lines()
            .next()
            .unwrap();
        assert!(text.lines().any(|l| l == usage), "{command:?}: {usage}");
    }
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), commands.len());
}

#[test]
fn manual_pages_need_a_folder() {
    let folder = scratch::folder().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let output = deltafold()
        .args(["man", "--dir"])
        .arg(&file)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(74));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("write manual pages to ") && said.contains("[Io]"),
        "{said}"
    );
}
