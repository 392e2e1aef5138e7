//! Command lines that cannot be parsed, and requests for help: what is printed, and the exit code.
//!
//! `main` in `cli` calls [`refuse`]. Nothing has been parsed: the flags needed here are searched for by hand.

use super::print::Failure;
use super::termination::Termination;
use super::{command, end_without_log, help, print_json};
use crate::error::Reason;
use clap::error::ErrorKind;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Prints help, the version, or what is wrong with the command line, and returns the exit code.
pub(super) fn refuse(e: &clap::Error, args: &[OsString], started: Instant) -> ExitCode {
    // Ignore failures to print: there is no other place to report them.
    match e.kind() {
        ErrorKind::DisplayHelp => {
            let _ = help::print(&e.render());
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayVersion => {
            let _ = e.print();
            ExitCode::SUCCESS
        }
        _ => {
            let _ = e.print();
            let file = value_of(args, &["--termination-log"], "DELTAFOLD_TERMINATION_LOG");
            let file = file.filter(|f| !f.is_empty()).map(PathBuf::from);
            let termination = Termination::begin(file, command_name(args), started);
            // A given value may be a secret, and more people can read a Pod's status than its log.
            let problem = e.kind().as_str().unwrap_or("it cannot be parsed");
            let message = format!("the command line: {problem}; the log has the details");
            end_without_log(&termination, &Reason::Usage.error(message));
            if wants_json(args) {
                let _ = print_json(&Failure::new(Reason::Usage, one_line(e)));
            }
            ExitCode::from(Reason::Usage.exit_code())
        }
    }
}

/// The message up to the usage, on one line.
fn one_line(e: &clap::Error) -> String {
    let message = e.render().to_string();
    let mut message = message.as_str();
    for end in ["\n\nUsage:", "\n\nFor more information"] {
        message = message.split(end).next().unwrap_or_default();
    }
    let words: Vec<&str> = message.split_whitespace().collect();
    let line = words.join(" ");
    line.trim_start_matches("error: ").to_owned()
}

/// The command's name, such as `snapshot full`, if the command line begins with it.
fn command_name(args: &[OsString]) -> Option<String> {
    let mut command = command();
    let mut names = Vec::new();
    for arg in args.iter().skip(1) {
        let Some(subcommand) = command.find_subcommand(arg).cloned() else {
            break;
        };
        names.push(subcommand.get_name().to_owned());
        command = subcommand;
    }
    (!names.is_empty()).then(|| names.join(" "))
}

/// The last value of a flag, by any of its names (`--flag VALUE` or `--flag=VALUE`), or otherwise that of its variable.
fn value_of(args: &[OsString], names: &[&str], variable: &str) -> Option<OsString> {
    for (i, arg) in args.iter().enumerate().rev() {
        for name in names {
            let rest = arg.as_bytes().strip_prefix(name.as_bytes());
            if let Some(value) = rest.and_then(|rest| rest.strip_prefix(b"=")) {
                return Some(OsString::from_vec(value.to_vec()));
            }
            if i > 0 && args[i - 1] == *name {
                return Some(arg.clone());
            }
        }
    }
    std::env::var_os(variable)
}

/// Whether the command line or the environment asks for JSON output.
fn wants_json(args: &[OsString]) -> bool {
    let value = value_of(args, &["--output", "-o"], "DELTAFOLD_OUTPUT");
    value.is_some_and(|format| format == "json" || format == "result")
}
