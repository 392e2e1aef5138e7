//! The pages of the repository: links and paths lead somewhere, the book has every page, and every block of shell is
//! run by a test or says why not.

use crate::support::manifests::{path, read};
use crate::support::pages::{all, anchors, blocks, links, of_users, prose};
use std::path::{Component, Path, PathBuf};

/// Blocks in these languages are not run.
const NOT_RUN: [&str; 9] = [
    "", "text", "yaml", "json", "toml", "ini", "rust", "promql", "mermaid",
];
/// Returns the path of a link's target, from the repository's root.
fn target(page: &str, link: &str) -> PathBuf {
    let mut parts: Vec<Component> = Vec::new();
    let folder = Path::new(page).parent().unwrap();
    let joined = folder.join(link);
    for part in joined.components() {
        match part {
            Component::ParentDir => {
                assert!(
                    parts.pop().is_some(),
                    "{page}: {link} leaves the repository"
                );
            }
            part => parts.push(part),
        }
    }
    parts.iter().collect()
}

#[test]
fn links_and_paths_lead_somewhere() {
    let mut count = 0;
    let mut wrong = Vec::new();
    for name in all() {
        let text = read(&name);
        for link in links(&text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            count += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let file = match file {
                "" => PathBuf::from(&name),
                file => target(&name, file),
            };
            let file = file.to_str().unwrap();
            if !path(file).exists() {
                wrong.push(format!("{name}: {link}"));
                continue;
            }
            if !anchor.is_empty() {
                let known = anchors(&read(file));
                if !known.iter().any(|a| a == anchor) {
                    wrong.push(format!("{name}: {link}"));
                }
            }
        }
        // A changelog names what is gone, too.
        if name == "CHANGELOG.md" {
            continue;
        }
        let prose = prose(&text);
        for quoted in prose.split('`').skip(1).step_by(2) {
            let is_path = [
                "src/",
                "tests/",
                "docs/",
                "jobs/",
                "fixtures/",
                "packaging/",
            ]
            .iter()
            .any(|p| quoted.starts_with(p));
            let is_name = !quoted.contains([' ', '*', '\n', '<', '…', '{']);
            if is_path && is_name && !path(quoted).exists() {
                wrong.push(format!("{name}: {quoted}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 100, "{count}");
}

/// A block of `sh` is run by `integration/document_pages.rs` or `quorum_loss_page.rs`, or by `.ci/run` if it calls
/// cargo. A block of `sh,untested` has its reason in a comment above it.
#[test]
fn every_block_of_shell_is_run_or_says_why_not() {
    let mut untested = 0;
    let mut wrong = Vec::new();
    for page in of_users() {
        for block in blocks(&page) {
            let at = format!("{page}:{}", block.line);
            match block.language.as_str() {
                "sh" => {}
                "sh,untested" => {
                    let reason = block.above.strip_prefix("<!-- untested: ");
                    let reason = reason.and_then(|r| r.strip_suffix(" -->"));
                    if reason.is_none_or(|r| r.len() < 10) {
                        wrong.push(format!(
                            "{at}: no line <!-- untested: REASON --> above the block"
                        ));
                    }
                    untested += 1;
                }
                language if NOT_RUN.contains(&language) => {}
                language => wrong.push(format!("{at}: unknown language \"{language}\"")),
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "languages are sh, sh,untested, text or another of {NOT_RUN:?}\n{}",
        wrong.join("\n")
    );
    assert!(untested > 10, "{untested}");
}

/// Returns the words of each command in a line of shell, without assignments before them.
fn segments(line: &str) -> Vec<Vec<&str>> {
    let parts = line.split(['|', ';', '(', ')']).flat_map(|p| p.split("&&"));
    let words = parts.map(|part| {
        let is_before =
            |w: &&str| *w == "$" || *w == "sudo" || w.split('=').next().is_some_and(is_variable);
        part.split_whitespace().skip_while(is_before).collect()
    });
    words.collect()
}

fn is_variable(name: &str) -> bool {
    name.len() > 1 && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
}

/// A command line of deltafold on a page names a command that exists, and only flags that the command has.
#[test]
fn every_command_on_a_page_exists() {
    let mut program = deltafold::cli::command_line();
    program.build();
    let mut checked = 0;
    let mut wrong = Vec::new();
    for page in all().iter().filter(|p| *p != "CHANGELOG.md") {
        for block in blocks(page).iter().filter(|b| b.language.starts_with("sh")) {
            let text = block.lines.join("\n").replace("\\\n", " ");
            for line in text.lines().filter(|l| !l.trim_start().starts_with('#')) {
                for words in segments(line) {
                    if words.first() != Some(&"deltafold") {
                        continue;
                    }
                    let at = format!("{page}:{}: {line}", block.line);
                    let mut command = &program;
                    let mut rest = &words[1..];
                    while let Some(below) = rest.first().and_then(|w| command.find_subcommand(w)) {
                        (command, rest) = (below, &rest[1..]);
                    }
                    let asks = |w: &&str| ["--help", "--version", "-V"].contains(w);
                    if command.has_subcommands() && !rest.iter().any(asks) {
                        wrong.push(format!("{at}: no such command"));
                    }
                    for word in rest.iter().take_while(|w| **w != "--") {
                        let word = word.trim_matches(['\'', '"', '[', ']']);
                        let Some(flag) = word.strip_prefix("--") else {
                            continue;
                        };
                        let flag = flag.split('=').next().unwrap();
                        let mut args = command.get_arguments();
                        if !args.any(|a| a.get_long() == Some(flag)) {
                            wrong.push(format!("{at}: --{flag}"));
                        }
                    }
                    checked += 1;
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(checked > 50, "{checked}");
}
