//! The Markdown pages of the repository: their files, headings, links and fenced blocks.
//!
//! `serverless/pages.rs` checks the pages. `integration/document_pages.rs` and `quorum_loss_page.rs` run their commands;
//! `stored_objects.rs`, `packages.rs` and `in_cluster.rs` of end_to_end run the rest.

use super::manifests::{path, read};
use super::tools;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// A fenced block.
#[derive(Clone, Debug, Default)]
pub struct Block {
    /// Such as `sh` or `sh,untested`; empty if the fence has none.
    pub language: String,
    /// The heading above it.
    pub heading: String,
    /// The line directly above the fence.
    pub above: String,
    /// The line number of the fence, from 1.
    pub line: usize,
    /// Where it is run, if [`placed`] has read it.
    pub place: String,
    pub lines: Vec<String>,
}

/// A page that takes longer hangs.
const SECONDS: &str = "300";

/// Returns the fenced blocks of a page, in order. Fences may be indented, as in a list.
pub fn blocks(name: &str) -> Vec<Block> {
    let (blocks, _, is_open) = parse(&read(name));
    assert!(!is_open, "{name}: a block without an end");
    blocks
}

/// Returns the page without its fenced blocks: prose, headings, tables.
pub fn prose(text: &str) -> String {
    parse(text).1
}

/// Returns the blocks of shell, in order.
pub fn shell(name: &str) -> Vec<Block> {
    let mut blocks = blocks(name);
    blocks.retain(|b| b.language == "sh");
    blocks
}

/// Returns the blocks of shell of a page on which each begins with a comment: where it is run.
pub fn placed(name: &str) -> Vec<Block> {
    let mut blocks = shell(name);
    for block in &mut blocks {
        let place = block.lines.remove(0);
        let place = place.strip_prefix("# ").expect("where it is run");
        block.place = place.to_owned();
    }
    blocks
}

/// Returns a command that runs lines of pages, with the programs of a folder.
pub fn runner(programs: &Path, script: &str) -> Command {
    let mut folders = programs.as_os_str().to_owned();
    folders.push(":");
    folders.push(std::env::var_os("PATH").expect("a path"));
    let mut command = Command::new("timeout");
    tools::forget_env(&mut command, &["DELTAFOLD_", "ETCDCTL_", "ETCD_", "AWS_"]);
    command
        .args(["--kill-after=5", SECONDS, "bash", "-eu", "-c", script])
        .env("PATH", folders)
        .stdin(Stdio::null());
    command
}

/// Returns the fenced blocks of a text, the text without them, and whether the last block has no end.
fn parse(text: &str) -> (Vec<Block>, String, bool) {
    let (mut blocks, mut prose) = (Vec::new(), String::new());
    let (mut heading, mut above) = ("", "");
    let mut open: Option<(Block, &str, usize)> = None;
    for (number, line) in text.lines().enumerate() {
        let text = line.trim_start();
        let indent = line.len() - text.len();
        let ticks = &text[..text.len() - text.trim_start_matches('`').len()];
        match &mut open {
            Some((_, fence, _)) if text == *fence => {
                blocks.extend(open.take().map(|(block, ..)| block));
            }
            Some((block, _, indent)) => {
                let line = line.get(*indent..).unwrap_or(text);
                block.lines.push(line.to_owned());
            }
            None if ticks.len() >= 3 => {
                let block = Block {
                    language: text[ticks.len()..].trim().to_owned(),
                    heading: heading.to_owned(),
                    above: above.trim().to_owned(),
                    line: number + 1,
                    ..Block::default()
                };
                open = Some((block, ticks, indent));
            }
            None => {
                if line.starts_with('#') {
                    heading = line.trim_start_matches(['#', ' ']);
                }
                prose += &format!("{line}\n");
            }
        }
        above = line;
    }
    (blocks, prose, open.is_some())
}

/// Returns the anchors of a page's headings, by GitHub's rule.
///
/// Letters and digits stay, in lower case; so do `-` and `_`. Spaces become `-`. All else goes. The second heading
/// with an anchor gets `-1` behind it, and so on.
pub fn anchors(text: &str) -> Vec<String> {
    let mut anchors: Vec<String> = Vec::new();
    let text = prose(text);
    for line in text.lines().filter(|l| l.starts_with('#')) {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        // The text of a link counts, its target does not.
        let mut plain = String::new();
        let mut rest = title.as_str();
        while let Some((before, after)) = rest.split_once("](") {
            plain += before;
            rest = after.split_once(')').map_or("", |(_, after)| after);
        }
        plain += rest;
        let kept = plain
            .chars()
            .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        let anchor = kept.collect::<String>().replace(' ', "-");
        let numbered = (1..).map(|n| format!("{anchor}-{n}"));
        let mut all = std::iter::once(anchor.clone()).chain(numbered);
        anchors.extend(all.find(|a| !anchors.contains(a)));
    }
    anchors
}

/// Returns the targets of a page's links and images, without those in code.
pub fn links(text: &str) -> Vec<String> {
    let text = prose(text);
    let mut links = Vec::new();
    for paragraph in text.split("\n\n") {
        // Every second part is code.
        for part in paragraph.split('`').step_by(2) {
            // The text of a link may itself be code: its end is enough.
            let targets = part.split("](").skip(1);
            links.extend(targets.map(|rest| rest.split(')').next().unwrap_or(rest).to_owned()));
        }
        let targets = paragraph.split("`](").skip(1);
        links.extend(targets.map(|rest| rest.split(')').next().unwrap_or(rest).to_owned()));
    }
    links.sort();
    links.dedup();
    links
}

/// Returns all Markdown files of the repository, sorted, by their paths from its root.
pub fn all() -> Vec<String> {
    let mut found = Vec::new();
    for folder in ["docs", "tests", "fixtures", "jobs", "packaging"] {
        collect(folder, &mut found);
    }
    let root = fs::read_dir(path("")).expect("the repository");
    let names = root.map(|f| f.expect("a file").file_name().into_string().expect("UTF-8"));
    found.extend(names.filter(|name| name.ends_with(".md")));
    found.sort();
    found
}

/// Returns the pages for users: README.md and all below docs/, sorted.
pub fn of_users() -> Vec<String> {
    let mut pages = all();
    pages.retain(|p| p == "README.md" || p.starts_with("docs/"));
    pages
}

fn collect(folder: &str, found: &mut Vec<String>) {
    let Ok(entries) = fs::read_dir(path(folder)) else {
        return;
    };
    for entry in entries {
        let entry = entry.expect("a file");
        let name = entry.file_name().into_string().expect("UTF-8");
        let inner = format!("{folder}/{name}");
        if entry.path().is_dir() {
            // Of the fuzzers' package: build results.
            if name != "target" {
                collect(&inner, found);
            }
        } else if name.ends_with(".md") {
            found.push(inner);
        }
    }
}
