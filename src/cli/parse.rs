//! Parsing: the command line with an environment variable for each flag.
//!
//! `main` in `cli` calls [`parse`]; the controller checks the arguments of Jobs with [`check`].

use super::{Cli, advice, command, help};
use clap::builder::Resettable;
use clap::{Arg, ArgMatches, FromArgMatches};
use std::ffi::OsString;

/// Flags of a live etcd that etcdctl's variables set, too: `ETCDCTL_` and the flag's name.
const ETCDCTL: [&str; 10] = [
    "endpoints",
    "cacert",
    "cert",
    "key",
    "user",
    "password",
    "dial_timeout",
    "command_timeout",
    "keepalive_time",
    "keepalive_timeout",
];

/// Parses a command line, and returns it with the command's name, such as `snapshot full`.
///
/// # Errors
/// Fails with clap's error and advice.
pub(super) fn parse(args: &[OsString]) -> Result<(Cli, String), clap::Error> {
    let (args, is_usual_help) = help::asked(args);
    let args = &args[..];
    let mut command = for_line(command(), args);
    if is_usual_help {
        command = help::usual(command, args.get(1..).unwrap_or_default());
    }
    match command.try_get_matches_from_mut(args) {
        Ok(matches) => Ok((Cli::from_arg_matches(&matches)?, name_of(&matches))),
        Err(e) => Err(advice::explain(e, args)),
    }
}

/// Gives the flags that are not on this command line their variables.
///
/// A variable may be set for several commands of a Pod, so it is ignored if a flag on the command line excludes
/// its flag, and its flag does not require others.
fn for_line(command: clap::Command, args: &[OsString]) -> clap::Command {
    let is_on_line = |arg: &Arg| arg.get_long().is_some_and(|flag| is_given(args, flag));
    let mut excluded = Vec::new();
    for arg in command.get_arguments() {
        for other in command.get_arg_conflicts_with(arg) {
            if is_on_line(arg) {
                excluded.push(other.get_id().clone());
            } else if is_on_line(other) {
                excluded.push(arg.get_id().clone());
            }
        }
    }
    command
        .mut_args(|arg| {
            if is_on_line(&arg) || excluded.contains(arg.get_id()) {
                return arg;
            }
            with_variable(arg).requires(Resettable::Reset)
        })
        .mut_subcommands(|c| for_line(c, args))
}

/// Whether the flag with this name is on the command line.
fn is_given(args: &[OsString], flag: &str) -> bool {
    args.iter().filter_map(|a| a.to_str()).any(|a| {
        a.strip_prefix("--")
            .and_then(|a| a.strip_prefix(flag))
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
    })
}

/// The name of a parsed command, such as `snapshot full`.
fn name_of(matches: &ArgMatches) -> String {
    let (mut matches, mut names) = (matches, Vec::new());
    while let Some((name, of_subcommand)) = matches.subcommand() {
        names.push(name);
        matches = of_subcommand;
    }
    names.join(" ")
}

/// Gives each flag of the command and its subcommands its variable.
pub(super) fn with_variables(command: clap::Command) -> clap::Command {
    command
        .mut_args(with_variable)
        .mut_subcommands(with_variables)
}

fn with_variable(arg: Arg) -> Arg {
    match variable_of(&arg) {
        Some(name) => arg.env(name),
        None => arg,
    }
}

/// The environment variable of a flag: `DELTAFOLD_` and its name, as `DELTAFOLD_DATA_DIR` of `--data-dir`. If
/// it is not set, etcdctl's variable, if the flag has one and that is set.
fn variable_of(arg: &Arg) -> Option<String> {
    let name = arg.get_long()?.replace('-', "_").to_uppercase();
    let own = format!("DELTAFOLD_{name}");
    let id = arg.get_id().as_str();
    let etcdctl = format!("ETCDCTL_{}", id.to_uppercase());
    // Other commands have arguments with these IDs, but with other flags and meanings.
    let is_etcdctls = ETCDCTL.contains(&id) && name == id.to_uppercase();
    let is_set = |name: &str| std::env::var_os(name).is_some();
    if is_etcdctls && !is_set(&own) && is_set(&etcdctl) {
        Some(etcdctl)
    } else {
        Some(own)
    }
}

/// Checks that the program accepts this command line. The program's name is not part of `args`.
/// Variables of the environment do not count.
///
/// # Errors
/// With clap's sentence.
pub fn check(args: &[String]) -> Result<(), String> {
    let args = std::iter::once("deltafold").chain(args.iter().map(String::as_str));
    let parsed = command().try_get_matches_from(args);
    let parsed = parsed.and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.map(drop).map_err(|e| {
        let text = e.to_string();
        let sentence = text.lines().take_while(|line| !line.is_empty());
        let words: Vec<&str> = sentence.flat_map(str::split_whitespace).collect();
        words.join(" ").trim_start_matches("error: ").to_owned()
    })
}
