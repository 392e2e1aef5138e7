//! Help pages: examples are printed exactly as they are written, so that they can be copied.
//!
//! clap wraps all text at the terminal's width, but only at spaces. [`keep_examples`] replaces the spaces of
//! commands in examples, and [`print`] puts them back. `command` and `refuse` in `cli` call them; `man` calls [`examples`].

use clap::builder::StyledStr;
use std::io::Write;

/// Commands in examples are indented at least this deep; titles and paragraphs less.
pub(super) const COMMAND_INDENT: &str = "      ";
/// Stands for a space while clap wraps the text. No help text contains it.
const NO_BREAK_SPACE: &str = "\u{a0}";

/// Options of these groups are left to `--help`: `-h` shows what a command does, and the options that everybody needs.
const LONG_HELP_ONLY: [&str; 7] = [
    "Connection",
    "Encryption",
    "Live etcd",
    "Metrics",
    "Output",
    "Peers",
    "Resources",
];
/// The options of these groups that everybody needs.
const ALSO_IN_SHORT_HELP: [&str; 2] = ["endpoints", "output"];

/// Shortens the page of `-h`.
pub(super) fn shorten(command: clap::Command) -> clap::Command {
    let is_for_long_help = |arg: &clap::Arg| {
        let heading = arg.get_help_heading().unwrap_or_default();
        LONG_HELP_ONLY.contains(&heading) && !ALSO_IN_SHORT_HELP.contains(&arg.get_id().as_str())
    };
    command
        .mut_args(|arg| match is_for_long_help(&arg) {
            true => arg.hide_short_help(true),
            false => arg,
        })
        .mut_subcommands(shorten)
}

/// Protects the examples of a command and its subcommands from being wrapped.
pub(super) fn keep_examples(command: clap::Command) -> clap::Command {
    let text = command.get_after_long_help().map(StyledStr::to_string);
    let command = match text {
        Some(text) => command.after_long_help(without_breaks(&text)),
        None => command,
    };
    command.mut_subcommands(keep_examples)
}

fn without_breaks(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        match line.starts_with(COMMAND_INDENT) {
            true => kept += &line.replace(' ', NO_BREAK_SPACE),
            false => kept += line,
        }
    }
    kept
}

/// The examples of a command and what follows them, as they are written.
pub(super) fn examples(command: &clap::Command) -> Option<String> {
    let text = command.get_after_long_help()?.to_string();
    Some(text.replace(NO_BREAK_SPACE, " "))
}

/// Prints a help page on standard output, with colours and bold headings if there is colour.
///
/// # Errors
/// Fails if standard output cannot be written.
pub(super) fn print(help: &StyledStr) -> std::io::Result<()> {
    let mut stdout = std::io::stdout().lock();
    let text = match super::terminal::stdout_has_colour() {
        true => help.ansi().to_string(),
        false => help.to_string(),
    };
    stdout.write_all(text.replace(NO_BREAK_SPACE, " ").as_bytes())?;
    stdout.flush()
}
