//! Parsing: the command line with an environment variable for each flag.
//!
//! `main` in `cli` calls [`parse`]; the controller's tests check the arguments of Jobs with [`check`].

use super::{Cli, advice, command, no_effect};
use crate::error::{Reason, Result};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgMatches, FromArgMatches};
use std::ffi::OsString;

/// Pairs of flags that exclude each other, by their IDs.
const EXCLUSIVE: [(&str, &str); 18] = [
    ("store", "snapshot"),
    ("prefix", "exact_key"),
    ("revision", "time"),
    ("data_dir", "to_snapshot"),
    ("wal_dir", "to_snapshot"),
    ("if_needed", "to_snapshot"),
    ("password", "password_file"),
    ("tls_secret", "cacert"),
    ("tls_secret", "cert"),
    ("tls_secret", "key"),
    ("auth_secret", "user"),
    ("auth_secret", "password"),
    ("auth_secret", "password_file"),
    ("until", "for"),
    ("endpoints", "level"),
    ("endpoints", "all_chains"),
    ("endpoints", "all_tags"),
    ("endpoints", "etcd_binary"),
];

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
/// If a flag is given, the variables of flags that exclude it are ignored. In a Pod, DELTAFOLD_STORE is set,
/// and `--snapshot` must not be refused for that.
///
/// # Errors
/// Fails with clap's error and advice, or if a flag on the command line cannot have an effect.
pub(super) fn parse(args: &[OsString]) -> Result<(Cli, String), clap::Error> {
    let mut ignored = Vec::new();
    for (a, b) in EXCLUSIVE {
        if is_given(args, b) {
            ignored.push(a);
        }
        if is_given(args, a) {
            ignored.push(b);
        }
    }
    let mut command = with_variables(command(), &ignored);
    let matches = match command.try_get_matches_from_mut(args) {
        Ok(matches) => matches,
        Err(e) => return Err(advice::explain(e, &mut command, args)),
    };
    let name = name_of(&matches);
    if let Some((id, message)) = no_effect::find(innermost(&matches)) {
        let path: Vec<&str> = name.split(' ').collect();
        let kind = ErrorKind::ArgumentConflict;
        let mut e = advice::error_of(&mut command, &path, kind, message);
        let flag = format!("--{}", id.replace('_', "-"));
        e.insert(ContextKind::InvalidArg, ContextValue::String(flag));
        return Err(e);
    }
    Ok((Cli::from_arg_matches(&matches)?, name))
}

/// Whether the flag with this ID is on the command line.
fn is_given(args: &[OsString], id: &str) -> bool {
    let flag = format!("--{}", id.replace('_', "-"));
    args.iter().filter_map(|a| a.to_str()).any(|a| {
        a.strip_prefix(&flag)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
    })
}

/// The arguments of the innermost subcommand, which also hold the global ones.
fn innermost(mut matches: &ArgMatches) -> &ArgMatches {
    while let Some((_, of_subcommand)) = matches.subcommand() {
        matches = of_subcommand;
    }
    matches
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

/// Gives each flag of the command and its subcommands its variable, except the `ignored` ones.
pub(super) fn with_variables(command: clap::Command, ignored: &[&str]) -> clap::Command {
    command
        .mut_args(|arg| match variable_of(&arg) {
            Some(name) if !ignored.contains(&arg.get_id().as_str()) => arg.env(name),
            _ => arg,
        })
        .mut_subcommands(|c| with_variables(c, ignored))
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
    match is_etcdctls && !is_set(&own) && is_set(&etcdctl) {
        true => Some(etcdctl),
        false => Some(own),
    }
}

/// Checks that the program accepts this command line. The program's name is not part of `args`.
///
/// # Errors
/// `Usage`, with what is wrong.
pub fn check(args: &[String]) -> Result<()> {
    let args: Vec<OsString> = std::iter::once("deltafold")
        .chain(args.iter().map(String::as_str))
        .map(OsString::from)
        .collect();
    match parse(&args) {
        Ok(_) => Ok(()),
        Err(e) => Err(Reason::Usage.error(e.to_string())),
    }
}
