//! Golden outputs: what a command prints at 80 columns, in `fixtures/golden/NAME.snap`. Colour changes nothing but
//! colour. `tests/generate` writes them.

use super::etcd::Etcd;
use super::{deltafold, fixtures_dir};
use std::path::Path;
use std::process::Command;

/// The width of the terminal.
const COLUMNS: usize = 80;
/// A line may be longer if a word of this length is in it: a name, a path, a command.
const UNBREAKABLE: usize = 30;

/// The folder in which commands run. Its path has always the same length, so that lines break at the same words.
pub struct Folder(tempfile::TempDir);

impl Folder {
    pub fn new() -> Self {
        let mut builder = tempfile::Builder::new();
        let folder = builder.prefix("golden-").rand_bytes(8).tempdir_in("/tmp");
        Folder(folder.expect("a folder in /tmp"))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

/// Runs a command without colour and with it, each time in a new folder that `prepare` fills.
pub fn check(name: &str, args: &[&str], prepare: impl Fn(&Path)) {
    check_both(name, args, |folder| {
        prepare(folder);
        None
    });
}

/// Like `check`, with an etcd that `prepare` starts. Its URL replaces ENDPOINT in the arguments.
pub fn check_live(name: &str, args: &[&str], prepare: impl Fn(&Path) -> Etcd) {
    check_both(&format!("live-{name}"), args, |folder| {
        Some(prepare(folder))
    });
}

fn check_both(name: &str, args: &[&str], prepare: impl Fn(&Path) -> Option<Etcd>) {
    let [plain, coloured] = [false, true].map(|in_colour| {
        let folder = Folder::new();
        let etcd = prepare(folder.path());
        let endpoint = etcd.as_ref().map(|etcd| etcd.endpoint().to_owned());
        let mut command = deltafold();
        let url = endpoint.as_deref().unwrap_or("ENDPOINT");
        command.args(args.iter().map(|arg| arg.replace("ENDPOINT", url)));
        let text = printed(&mut command, args, folder.path(), in_colour);
        match endpoint {
            Some(endpoint) => masked_live(&masked(&text, folder.path()), &endpoint),
            None => masked(&text, folder.path()),
        }
    });
    assert!(
        !plain.contains('\u{1b}'),
        "{name}: colour without a terminal"
    );
    assert_eq!(without_colours(&coloured), plain, "{name}");
    // The command line itself is not the program's.
    let lines = plain.lines().skip(1).filter(|l| !l.starts_with("TIME "));
    for line in lines {
        assert!(
            !is_too_long(line),
            "{name}: more than {COLUMNS} columns: {line}"
        );
    }
    let mut settings = insta::Settings::new();
    settings.set_snapshot_path(fixtures_dir().join("golden"));
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| insta::assert_snapshot!(name, plain));
}

/// Returns the command line, both outputs and the exit code of a command.
fn printed(command: &mut Command, args: &[&str], folder: &Path, in_colour: bool) -> String {
    command
        .current_dir(folder)
        .env("COLUMNS", COLUMNS.to_string());
    command.env_remove("KUBERNETES_SERVICE_HOST");
    command.env_remove("KUBECONFIG").env("HOME", folder);
    if in_colour {
        command.env("CLICOLOR_FORCE", "1");
    }
    let output = command.output().expect("run the command");
    let mut text = format!("$ deltafold {}\n", args.join(" "));
    text += &String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    let lines = stderr
        .lines()
        .filter(|l| !without_colours(l).contains("Z  INFO "));
    let stderr: String = lines.map(|l| format!("{l}\n")).collect();
    if !stderr.is_empty() {
        text += "--- standard error\n";
        text += &stderr;
    }
    let code = output.status.code().expect("no signal");
    text + &format!("--- exit code {code}\n")
}

fn is_too_long(line: &str) -> bool {
    let width = line.chars().count();
    let words = line.split(' ').map(|w| w.chars().count());
    let longest = words.max().unwrap_or(0);
    width > COLUMNS && (longest < UNBREAKABLE || width - longest > COLUMNS)
}

fn without_colours(text: &str) -> String {
    let mut parts = text.split('\u{1b}');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        plain += part.split_once('m').map_or(part, |(_, rest)| rest);
    }
    plain
}

/// Replaces what differs between two runs: the folder, durations, and times of today.
fn masked(text: &str, folder: &Path) -> String {
    let folder = folder.display().to_string();
    let name = "/tmp/golden-12345678";
    assert_eq!(folder.len(), name.len(), "{folder}");
    let text = text.replace(&folder, name);
    let (command, output) = text.split_once('\n').unwrap_or_default();
    let lines = output.lines().map(|line| {
        if let Some(time) = time_of_log(line) {
            return line.replace(time, "TIME");
        }
        let words: Vec<String> = line.split(' ').map(masked_word).collect();
        let mut line = words.join(" ");
        while line.contains("DURATION DURATION") {
            line = line.replace("DURATION DURATION", "DURATION");
        }
        line
    });
    let lines = std::iter::once(command.to_owned()).chain(lines);
    lines.map(|line| line + "\n").collect()
}

/// Replaces what two etcds with the same keys do not share: URLs, sizes, IDs, and times of today. A replacement
/// is as long as what it stands for, if lines could break elsewhere otherwise.
fn masked_live(text: &str, endpoint: &str) -> String {
    let url = "http://127.0.0.1:12379";
    assert_eq!(endpoint.len(), url.len(), "{endpoint}");
    let text = text.replace(endpoint, url);
    let lines = text.lines().map(|line| {
        let mut words: Vec<String> = line.split(' ').map(masked_live_word).collect();
        for i in 1..words.len() {
            let unit = words[i].trim_end_matches([',', ';', ':', ')']).to_owned();
            if ["B", "KiB", "MiB"].contains(&unit.as_str()) {
                words[i - 1] = "SIZE".to_owned();
                words[i] = words[i].replacen(&unit, "B", 1);
            }
        }
        squeezed(&words.join(" ")) + "\n"
    });
    lines.collect()
}

/// A line whose columns are two spaces apart: an ID may have a digit less.
fn squeezed(line: &str) -> String {
    let text = line.trim_start();
    let mut squeezed = line[..line.len() - text.len()].to_owned();
    let columns = text.split("  ").map(str::trim).filter(|c| !c.is_empty());
    squeezed += &columns.collect::<Vec<_>>().join("  ");
    squeezed
}

fn masked_live_word(word: &str) -> String {
    let core = word.trim_matches(|c: char| !c.is_ascii_alphanumeric());
    let is_id = core.len() >= 14 && core.bytes().all(|b| b.is_ascii_hexdigit());
    let is_time = chrono::DateTime::parse_from_rfc3339(core).is_ok();
    match (is_id, is_time) {
        (true, _) => word.replace(core, "0123456789abcdef"),
        (_, true) => word.replace(core, "2026-01-01T00:00:00Z"),
        _ => match word.find("Full-").or_else(|| word.find("Incr-")) {
            Some(at) => masked_seconds(word, at + "Full-00000000-00000000-".len()),
            None => word.to_owned(),
        },
    }
}

/// The name of a snapshot with another time of creation.
fn masked_seconds(word: &str, begin: usize) -> String {
    let end = begin + 10;
    match word.get(begin..end) {
        Some(seconds) if seconds.bytes().all(|b| b.is_ascii_digit()) => {
            format!("{}1234567890{}", &word[..begin], &word[end..])
        }
        _ => word.to_owned(),
    }
}

/// The time at the beginning of a log line, possibly after a colour.
fn time_of_log(line: &str) -> Option<&str> {
    let plain = without_colours(line);
    let (time, _) = plain.split_once("Z  WARN")?;
    let begin = line.find(time)?;
    line.get(begin..begin + time.len() + 1)
}

/// A word without the duration or the time of this run in it.
fn masked_word(word: &str) -> String {
    let core = word.trim_matches(|c: char| "(),;:".contains(c));
    if is_duration(core) {
        return word.replace(core, "DURATION");
    }
    // The backups of the fixtures are older.
    if let Ok(time) = chrono::DateTime::parse_from_rfc3339(core)
        && chrono::Utc::now() - time.to_utc() < chrono::TimeDelta::hours(1)
    {
        return word.replace(core, "2026-01-01T00:00:00Z");
    }
    word.to_owned()
}

fn is_duration(word: &str) -> bool {
    let number = word.trim_end_matches(|c: char| c.is_ascii_lowercase());
    let unit = &word[number.len()..];
    ["ms", "s", "m", "h", "d"].contains(&unit) && number.parse::<f64>().is_ok()
}
