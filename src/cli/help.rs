//! Help pages: `-h` has the common options, `--help` explains more and has examples, and `--help=all` has every option.
//! Examples are printed exactly as they are written, so that they can be copied.
//!
//! clap wraps all text at the terminal's width, but only at spaces. [`keep_examples`] replaces the spaces of
//! commands in examples, and [`print`] puts them back. `command` and `refuse` in `cli` call them; `man` calls [`examples`].

use clap::builder::StyledStr;
use std::ffi::OsString;
use std::io::Write;

/// Commands in examples are indented at least this deep; titles and paragraphs less.
pub(super) const COMMAND_INDENT: &str = "      ";
/// Stands for a space while clap wraps the text. No help text contains it.
const NO_BREAK_SPACE: &str = "\u{a0}";

/// Options of these groups are left to `--help=all`: the others are those that everybody needs.
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

/// What ends the page of `--help`.
const MORE: &str = "All options, with their environment variables: --help=all";
/// What clap says of its own flag. There is no more to see with `--help` on its own page.
const SEE_MORE: &str = " (see more with '--help')";

/// Returns a command line as clap takes it. `--help` becomes `-h`, and the second result is true: [`usual`] makes the page.
/// `--help=all` becomes clap's long page.
pub(super) fn asked(args: &[OsString]) -> (Vec<OsString>, bool) {
    let mut args = args.to_vec();
    let flags = args.iter().take_while(|arg| *arg != "--").count();
    if let Some(all) = args[..flags].iter().position(|arg| arg == "--help=all") {
        args[all] = "--help".into();
        return (args, false);
    }
    if args.get(1).is_some_and(|word| word == "help") {
        args.remove(1);
        args.push("-h".into());
        return (args, true);
    }
    match args[..flags].iter().position(|arg| arg == "--help") {
        Some(help) => {
            args[help] = "-h".into();
            (args, true)
        }
        None => (args, false),
    }
}

/// Makes the page of `-h` that of `--help`, for the innermost subcommand of these words.
pub(super) fn usual(command: clap::Command, words: &[OsString]) -> clap::Command {
    let command = command.mut_args(|arg| arg.hide_env(true));
    let mut names = words.iter().enumerate().filter_map(|(nth, word)| {
        let subcommand = command.find_subcommand(word)?;
        Some((nth, subcommand.get_name().to_owned()))
    });
    if let Some((nth, name)) = names.next() {
        return command.mut_subcommand(name, |c| usual(c, &words[nth + 1..]));
    }
    let about = command.get_long_about().or(command.get_about()).cloned();
    let end = command.get_after_long_help().map(StyledStr::to_string);
    let end = match end {
        Some(end) => format!("{end}\n\n{MORE}"),
        None => MORE.to_owned(),
    };
    let command = match about {
        Some(about) => command.about(about),
        None => command,
    };
    command.after_help(end)
}

/// Shortens the page of `-h`. That of `--help` is made of it.
pub(super) fn shorten(command: clap::Command) -> clap::Command {
    let is_for_long_help = |arg: &clap::Arg| {
        let heading = arg.get_help_heading().unwrap_or_default();
        LONG_HELP_ONLY.contains(&heading) && !ALSO_IN_SHORT_HELP.contains(&arg.get_id().as_str())
    };
    command
        .mut_args(|arg| {
            if is_for_long_help(&arg) {
                arg.hide_short_help(true)
            } else {
                arg
            }
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
        if line.starts_with(COMMAND_INDENT) {
            kept += &line.replace(' ', NO_BREAK_SPACE)
        } else {
            kept += line
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
    let text = if super::terminal::stdout_has_colour() {
        help.ansi().to_string()
    } else {
        help.to_string()
    };
    let text = text.replace(NO_BREAK_SPACE, " ");
    let text = if text.contains(MORE) {
        text.replace(SEE_MORE, "")
    } else {
        text
    };
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}
