//! Help pages and manual pages: their examples can be copied, and each is run.

use crate::support::process::Process;
use crate::support::{copy_dir, deltafold, fixtures_dir, scratch};
use std::path::Path;
use std::time::Duration;

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

/// The lines of commands in a page's examples.
fn example_lines(page: &str) -> Vec<&str> {
    let examples = page
        .split_once("\nExamples:\n")
        .map_or("", |(_, text)| text);
    let is_command = |line: &&str| line.starts_with("      ");
    examples.lines().filter(is_command).collect()
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
