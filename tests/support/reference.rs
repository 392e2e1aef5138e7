//! The generated pages of the book: commands and custom resources.
//!
//! Each function turns a definition of the program into Markdown, without text of its own about a flag or field.
//! docs/build includes them in the book.

use super::manifests::{documents, path, read};
use clap::{Arg, ArgAction, Command};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;

/// Headings of options in the order of the help pages. Options without a heading come first.
const OWN: &str = "Options";
const ARGUMENTS: &str = "Arguments";
/// Fields of Kubernetes' own types. Kubernetes documents what is in them.
const OF_KUBERNETES: [&str; 2] = ["resources", "tolerations"];

/// An option of one command.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    heading: String,
    /// Such as `--store <URL>`.
    flag: String,
    /// The whole Markdown of the option, as one element of a list.
    text: String,
}

/// A command without subcommands.
struct Leaf {
    /// Such as `snapshot full`.
    name: String,
    command: Command,
    entries: Vec<Entry>,
}

/// Returns the reference of all commands.
pub fn commands(mut program: Command) -> String {
    program.build();
    let mut leaves = Vec::new();
    collect(&program, "", &mut leaves);
    let shared = shared(&leaves);

    let mut page = String::new();
    for paragraph in paragraphs_after_examples(&program) {
        page += &format!("{}\n\n", prose(&paragraph));
    }
    page += "| Command | What it does |\n|---|---|\n";
    for leaf in &leaves {
        let link = format!("[`{}`](#{})", leaf.name, anchor(&leaf.name));
        let about = leaf.command.get_about().map(ToString::to_string);
        page += &format!("| {link} | {} |\n", cell(&about.unwrap_or_default()));
    }
    for leaf in &leaves {
        page += &section(leaf, &shared);
    }
    page += "\n## Options of several commands\n\nThe sections of the commands name these options. \
             Each option is described here once.\n";
    for (heading, entries) in &shared {
        page += &format!("\n### {}\n\n", shared_heading(heading));
        for entry in entries {
            page += &entry.text;
        }
    }
    page
}

fn collect(command: &Command, above: &str, leaves: &mut Vec<Leaf>) {
    let visible = command.get_subcommands().filter(|c| !c.is_hide_set());
    let below: Vec<&Command> = visible.filter(|c| c.get_name() != "help").collect();
    for command in below {
        let name = format!("{above} {}", command.get_name());
        let name = name.trim_start().to_owned();
        if command.get_subcommands().any(|c| c.get_name() != "help") {
            collect(command, &name, leaves);
            continue;
        }
        let args = command.get_arguments().filter(|a| !a.is_hide_set());
        let args = args.filter(|a| !["help", "version"].contains(&a.get_id().as_str()));
        leaves.push(Leaf {
            entries: args.map(entry).collect(),
            command: command.clone(),
            name,
        });
    }
}

/// Returns the options that several commands have with the same text, by heading.
///
/// If an option has several texts, the most frequent one is shared: a command with another text shows its own.
fn shared(leaves: &[Leaf]) -> BTreeMap<String, Vec<Entry>> {
    let mut counts: BTreeMap<Entry, usize> = BTreeMap::new();
    for entry in leaves.iter().flat_map(|l| &l.entries) {
        if ![OWN, ARGUMENTS].contains(&entry.heading.as_str()) {
            *counts.entry(entry.clone()).or_default() += 1;
        }
    }
    let mut best: BTreeMap<(String, String), (usize, Entry)> = BTreeMap::new();
    for (entry, count) in counts.into_iter().filter(|(_, count)| *count > 1) {
        let key = (entry.heading.clone(), entry.flag.clone());
        let found = best.entry(key).or_insert((count, entry.clone()));
        if count > found.0 {
            *found = (count, entry);
        }
    }
    let mut shared: BTreeMap<String, Vec<Entry>> = BTreeMap::new();
    for ((heading, _), (_, entry)) in best {
        shared.entry(heading).or_default().push(entry);
    }
    shared
}

fn section(leaf: &Leaf, shared: &BTreeMap<String, Vec<Entry>>) -> String {
    let mut text = format!("\n## deltafold {}\n", leaf.name);
    let command = &leaf.command;
    let about = command.get_long_about().or_else(|| command.get_about());
    for paragraph in about
        .map(ToString::to_string)
        .unwrap_or_default()
        .split("\n\n")
    {
        text += &format!("\n{}\n", prose(paragraph));
    }
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ");
    text += &format!("\n```text\n{usage}\n```\n");

    let mut headings: Vec<&str> = leaf.entries.iter().map(|e| e.heading.as_str()).collect();
    headings.sort_by_key(|h| (*h != ARGUMENTS, *h != OWN));
    headings.dedup();
    let mut also = Vec::new();
    let mut seen = Vec::new();
    for heading in headings {
        if seen.contains(&heading) {
            continue;
        }
        seen.push(heading);
        let entries = leaf.entries.iter().filter(|e| e.heading == heading);
        let of_group = shared.get(heading);
        let (common, own): (Vec<&Entry>, Vec<&Entry>) =
            entries.partition(|e| of_group.is_some_and(|group| group.contains(e)));
        if !own.is_empty() {
            text += &format!("\n**{heading}**\n\n");
            text.extend(own.iter().map(|e| e.text.as_str()));
            text.truncate(text.trim_end().len());
            text.push('\n');
        }
        if !common.is_empty() {
            let names: Vec<String> = common
                .iter()
                .map(|e| format!("`{}`", name_of(&e.flag)))
                .collect();
            let link = format!("[{heading}](#{})", anchor_of(&shared_heading(heading)));
            also.push(format!("- {link}: {}\n", names.join(", ")));
        }
    }
    if !also.is_empty() {
        text += "\n**Options of several commands**\n\n";
        text.extend(also);
    }
    let examples = examples(command);
    if !examples.is_empty() {
        text += "\n**Examples**\n\n<!-- untested: examples of the help page; serverless/help_pages.rs parses each -->\n";
        text += &format!("```sh,untested\n{examples}```\n");
    }
    for paragraph in paragraphs_after_examples(command) {
        text += &format!("\n{}\n", prose(&paragraph));
    }
    text
}

fn shared_heading(heading: &str) -> String {
    format!("{heading} options")
}

fn anchor(command: &str) -> String {
    anchor_of(&format!("deltafold {command}"))
}

fn anchor_of(heading: &str) -> String {
    heading.to_lowercase().replace(' ', "-")
}

/// Returns `--store` of `--store <URL>`.
fn name_of(flag: &str) -> &str {
    flag.split([' ', '=', '[']).next().unwrap_or(flag)
}

fn entry(arg: &Arg) -> Entry {
    let heading = match (arg.is_positional(), arg.get_help_heading()) {
        (true, _) => ARGUMENTS,
        (_, heading) => heading.unwrap_or(OWN),
    };
    let takes_value =
        arg.get_action().takes_values() && !arg.get_value_names().is_none_or(|n| n.is_empty());
    let names = arg.get_value_names().unwrap_or_default().iter();
    let values: Vec<String> = names.map(|name| format!("<{name}>")).collect();
    // A flag without a value may still take `true` or `false`.
    let is_optional = arg.get_num_args().is_some_and(|n| n.min_values() == 0);
    let flag = match arg.get_long() {
        None => values.join(" "),
        Some(long) if takes_value && !is_optional => format!("--{long} {}", values.join(" ")),
        Some(long) => format!("--{long}"),
    };
    let mut notes = Vec::new();
    if let Some(short) = arg.get_short() {
        notes.push(format!("short: `-{short}`"));
    }
    if arg.is_required_set() {
        notes.push("required".to_owned());
    }
    if matches!(arg.get_action(), ArgAction::Append) {
        notes.push("can be repeated".to_owned());
    }
    let notes = match notes.is_empty() {
        true => String::new(),
        false => format!(" ({})", notes.join(", ")),
    };
    let mut text = format!("- **`{flag}`**{notes}\n");
    let help = arg.get_long_help().or_else(|| arg.get_help());
    let help = help.map(ToString::to_string).unwrap_or_default();
    for paragraph in help.split("\n\n").filter(|p| !p.trim().is_empty()) {
        text += &format!("\n  {}\n", prose(paragraph));
    }
    let possible = arg.get_possible_values();
    // Of a switch they would be `true` and `false`.
    if takes_value && !is_optional && !possible.is_empty() {
        text.push('\n');
        for value in possible.iter().filter(|v| !v.is_hide_set()) {
            let help = value.get_help().map(ToString::to_string);
            let help = help.map(|h| format!(": {}", prose(&h))).unwrap_or_default();
            text += &format!("  - `{}`{help}\n", value.get_name());
        }
    }
    let mut facts = Vec::new();
    let defaults = arg.get_default_values().iter();
    let defaults: Vec<String> = defaults.map(|v| v.to_string_lossy().into_owned()).collect();
    if takes_value && !is_optional && !defaults.is_empty() && !arg.is_hide_default_value_set() {
        facts.push(format!("Default: `{}`.", defaults.join(",")));
    }
    if let Some(variable) = arg.get_env() {
        facts.push(format!("Variable: `{}`.", variable.to_string_lossy()));
    }
    if !facts.is_empty() {
        text += &format!("\n  {}\n", facts.join(" "));
    }
    text.push('\n');
    Entry {
        heading: heading.to_owned(),
        flag,
        text,
    }
}

fn after_help(command: &Command) -> String {
    let text = command.get_after_long_help().map(ToString::to_string);
    text.unwrap_or_default().replace('\u{a0}', " ")
}

/// Returns the examples of a help page as one block: titles are comments.
fn examples(command: &Command) -> String {
    let text = after_help(command);
    let mut block = String::new();
    let mut was_title = false;
    for line in text.lines().filter(|l| l.starts_with("  ")) {
        match line.strip_prefix("      ") {
            Some(code) => block += &format!("{code}\n"),
            None if was_title => block += &format!("# {}\n", line.trim()),
            None => {
                let gap = if block.is_empty() { "" } else { "\n" };
                block += &format!("{gap}# {}\n", line.trim());
            }
        }
        was_title = !line.starts_with("      ");
    }
    block
}

/// Returns the paragraphs of a help page that are no examples, such as the exit codes.
fn paragraphs_after_examples(command: &Command) -> Vec<String> {
    let text = after_help(command);
    let plain = text
        .lines()
        .filter(|l| !l.starts_with("  ") && *l != "Examples:");
    let plain: Vec<&str> = plain.collect();
    let plain = plain.join("\n");
    let paragraphs = plain
        .split("\n\n")
        .map(|p| p.replace('\n', " ").trim().to_owned());
    paragraphs.filter(|p| !p.is_empty()).collect()
}

/// Returns plain text as one line of Markdown: flags are code, pages in `docs/` are links, `<` and `*` are escaped.
fn prose(text: &str) -> String {
    let mut out = String::new();
    let mut is_code = false;
    for word in text.split_whitespace() {
        if !out.is_empty() {
            out.push(' ');
        }
        let ticks = word.matches('`').count();
        if is_code || ticks > 0 {
            out += &match is_code || ticks == 2 {
                true => word.to_owned(),
                false => word.replace('<', "\\<"),
            };
            is_code ^= ticks % 2 == 1;
            continue;
        }
        let open = word.len() - word.trim_start_matches(['(', '"', '[']).len();
        let (before, rest) = word.split_at(open);
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
        let end = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
        let name = rest[..end].trim_end_matches(['.', '/']);
        let after = &rest[name.len()..];
        match name {
            flag if flag.starts_with("--") && flag.len() > 2 => {
                out += &format!("{before}`{flag}`{}", escaped(after));
            }
            page if page.starts_with("docs/") && page.ends_with(".md") => {
                let page = &page["docs/".len()..];
                out += &format!("{before}[{page}](../{page}){}", escaped(after));
            }
            _ => out += &escaped(word),
        }
    }
    out
}

fn escaped(text: &str) -> String {
    text.replace('<', "\\<").replace('*', "\\*")
}

/// Returns a text as a cell of a table.
fn cell(text: &str) -> String {
    prose(text).replace('|', "\\|")
}

/// Returns the reference of the custom resources from their definitions.
pub fn crds(definitions: &[Value]) -> String {
    let mut page = String::new();
    for definition in definitions {
        let spec = &definition["spec"];
        let version = &spec["versions"][0];
        let schema = &version["schema"]["openAPIV3Schema"];
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        page += &format!(
            "\n## {}\n\n{}\n\n`apiVersion: {}/{}`. Short name: `{}`.\n",
            word(&spec["names"]["kind"]),
            prose(&word(&schema["description"])),
            word(&spec["group"]),
            word(&version["name"]),
            word(&spec["names"]["shortNames"][0]),
        );
        for part in ["spec", "status"] {
            page += "\n| Field | Type | Meaning |\n|---|---|---|\n";
            let is_required = is_required(schema, part);
            row(part, &schema["properties"][part], is_required, &mut page);
        }
    }
    page
}

fn is_required(object: &Value, name: &str) -> bool {
    let required = object["required"].as_array();
    required.is_some_and(|names| names.iter().any(|n| n == name))
}

/// Adds the row of a field and of all fields in it.
fn row(path: &str, field: &Value, is_required: bool, page: &mut String) {
    let kind = field["type"].as_str().unwrap_or_default();
    let items = &field["items"];
    let values = &field["additionalProperties"];
    let type_ = match (kind, items["type"].as_str(), values["type"].as_str()) {
        ("array", Some(of), _) => format!("list of {of}"),
        ("object", _, Some(of)) => format!("map of {of}"),
        _ => field["format"]
            .as_str()
            .filter(|f| *f == "date-time")
            .unwrap_or(kind)
            .to_owned(),
    };
    let mut meaning = cell(field["description"].as_str().unwrap_or_default());
    let mut add = |fact: String| {
        if !meaning.is_empty() && !meaning.ends_with(['.', ':']) {
            meaning.push('.');
        }
        meaning += &format!(" {fact}");
    };
    if is_required {
        add("Required.".to_owned());
    }
    if let Some(names) = field["enum"].as_array() {
        let names = names.iter().filter_map(Value::as_str);
        let names: Vec<String> = names.map(|n| format!("`{n}`")).collect();
        add(format!("One of {}.", names.join(", ")));
    }
    match &field["default"] {
        Value::Null | Value::Object(_) | Value::Array(_) => {}
        Value::String(text) => add(format!("Default: `{text}`.")),
        other => add(format!("Default: `{other}`.")),
    }
    for rule in field["x-kubernetes-validations"]
        .as_array()
        .into_iter()
        .flatten()
    {
        add(format!(
            "Rule: {}.",
            cell(rule["message"].as_str().unwrap_or_default())
        ));
    }
    *page += &format!("| `{path}` | {type_} | {} |\n", meaning.trim());
    if OF_KUBERNETES.contains(&path.rsplit('.').next().unwrap_or_default()) {
        return;
    }
    let children = [(path.to_owned(), field), (format!("{path}[]"), items)];
    for (path, object) in children {
        for (name, child) in object["properties"].as_object().into_iter().flatten() {
            row(
                &format!("{path}.{name}"),
                child,
                self::is_required(object, name),
                page,
            );
        }
    }
}

/// Writes the pages to target/reference/. The book includes these files.
pub fn write() {
    let folder = path("target/reference");
    fs::create_dir_all(&folder).unwrap();
    let commands = commands(deltafold::cli::command_line());
    fs::write(folder.join("commands.md"), commands).unwrap();
    let crds = crds(&documents(&read("jobs/crds.yaml")));
    fs::write(folder.join("crds.md"), crds).unwrap();
}
