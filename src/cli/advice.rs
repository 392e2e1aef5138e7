//! What a user meant: advice for command lines that are refused, and for variables with a slip in their name.
//!
//! Pure functions of the command line and the environment. `parse` and `refusal` call them.

use super::words;
use crate::base::opt::Opt;
use crate::base::slips::{distance, nearest};
use crate::controller::jobs::flags::field_of;
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::collections::BTreeSet;
use std::error::Error as _;
use std::ffi::OsString;
use std::num::{IntErrorKind, ParseIntError};

/// Variables of the tests, which are no flags.
const OF_TESTS: &str = "DELTAFOLD_TEST_";
/// The most slips between a word and the one that was meant.
const MOST_SLIPS: usize = 2;
/// The beginning of all our variables.
const OURS: &str = "DELTAFOLD_";

/// Adds advice to a refusal by clap: what a number is expected to be, and the flag that was probably meant.
pub(super) fn explain(
    e: clap::Error,
    command: &mut clap::Command,
    args: &[OsString],
) -> clap::Error {
    let words: Vec<&str> = args.iter().filter_map(|a| a.to_str()).collect();
    let mut e = with_expected_number(e, command, words.get(1..).unwrap_or_default());
    // "to pass '-x' as a value, use '-- -x'" helps nobody here: no value begins with a dash.
    if let Some(ContextValue::StyledStrs(tips)) = e.get(ContextKind::Suggested) {
        let tips = tips.iter().filter(|tip| !tip.to_string().contains("'-- "));
        let tips = ContextValue::StyledStrs(tips.cloned().collect());
        e.insert(ContextKind::Suggested, tips);
    }
    drop_far(&mut e);
    if let Some(tip) = tip(&e, &words) {
        // What another tool calls so is known: no guess stands beside it.
        for kind in [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand] {
            e.remove(kind);
        }
        let tip = ContextValue::StyledStrs(vec![StyledStr::from(tip)]);
        e.insert(ContextKind::Suggested, tip);
    }
    e
}

/// Drops the guesses of clap that are more than two slips away: they are other words.
fn drop_far(e: &mut clap::Error) {
    for (wrong, guess) in [
        (ContextKind::InvalidArg, ContextKind::SuggestedArg),
        (
            ContextKind::InvalidSubcommand,
            ContextKind::SuggestedSubcommand,
        ),
        (ContextKind::InvalidValue, ContextKind::SuggestedValue),
    ] {
        let Some(ContextValue::String(given)) = e.get(wrong).cloned() else {
            continue;
        };
        let is_near = |word: &String| distance(&given, word) <= MOST_SLIPS;
        let near = match e.remove(guess) {
            Some(ContextValue::String(word)) => {
                Some(word).filter(is_near).map(ContextValue::String)
            }
            Some(ContextValue::Strings(mut all)) => {
                all.retain(is_near);
                (!all.is_empty()).then_some(ContextValue::Strings(all))
            }
            other => other,
        };
        if let Some(near) = near {
            e.insert(guess, near);
        }
    }
}

/// Sets how messages write options: as flags of the command, or with --policy-words as fields of a policy.
pub(super) fn write_options(args: &[OsString]) {
    let policy_words = args.iter().any(|arg| arg == "--policy-words");
    let command = args.get(1).map(|c| c.to_string_lossy().into_owned());
    let command = command.unwrap_or_default();
    Opt::write_as(move |option| written(&command, policy_words, option));
}

fn written(command: &str, policy_words: bool, option: &str) -> String {
    if let Some(field) = policy_words.then(|| field_of(option)).flatten() {
        return field;
    }
    match (command, option) {
        ("deleted", "revision" | "time") => "--since or --until".to_owned(),
        ("diff", "revision" | "time") => "--from or --to".to_owned(),
        _ => format!("--{option}"),
    }
}

/// Returns an error with the usage of the innermost of these subcommands. Words after their names are ignored.
pub(super) fn error_of(
    command: &mut clap::Command,
    path: &[&str],
    kind: ErrorKind,
    message: String,
) -> clap::Error {
    if let Some((first, rest)) = path.split_first()
        && let Some(subcommand) = command.find_subcommand_mut(first)
    {
        return error_of(subcommand, rest, kind, message);
    }
    command.error(kind, message)
}

/// Says what is expected in place of "invalid digit found in string".
fn with_expected_number(e: clap::Error, command: &mut clap::Command, path: &[&str]) -> clap::Error {
    let wrong = e.source().and_then(|s| s.downcast_ref::<ParseIntError>());
    let (Some(wrong), Some(ContextValue::String(arg)), Some(ContextValue::String(value))) = (
        wrong,
        e.get(ContextKind::InvalidArg),
        e.get(ContextKind::InvalidValue),
    ) else {
        return e;
    };
    let flag = arg.split([' ', '=']).next().unwrap_or_default();
    let expected = match wrong.kind() {
        IntErrorKind::PosOverflow => "the number is too large".to_owned(),
        IntErrorKind::NegOverflow => "the number is too small".to_owned(),
        _ => format!("give a whole number, such as {flag} {}", example(flag)),
    };
    let message = format!("invalid value '{value}' for '{arg}': {expected}");
    let mut explained = error_of(command, path, ErrorKind::ValueValidation, message);
    for kind in [ContextKind::InvalidArg, ContextKind::InvalidValue] {
        if let Some(value) = e.get(kind) {
            explained.insert(kind, value.clone());
        }
    }
    explained
}

/// A sensible number for a flag.
fn example(flag: &str) -> &'static str {
    match flag {
        "--revision" => "120000",
        "--bump-revision" => "1000000000",
        "--max-request-bytes" => "1572864",
        "--delta-events" => "1000000",
        "--requests" => "64",
        _ => "4",
    }
}

/// The advice for a command line, if it looks like a usual mistake.
fn tip(e: &clap::Error, words: &[&str]) -> Option<&'static str> {
    let lacks = |what: &str| match e.get(ContextKind::InvalidArg) {
        Some(ContextValue::Strings(args)) => args.iter().any(|a| a.contains(what)),
        Some(ContextValue::String(arg)) => arg.contains(what),
        _ => false,
    };
    let command = words.get(1).copied().unwrap_or_default();
    let text = |kind| match e.get(kind) {
        Some(ContextValue::String(text)) => text.as_str(),
        _ => "",
    };
    match e.kind() {
        ErrorKind::InvalidSubcommand => {
            let word = text(ContextKind::InvalidSubcommand);
            let path = words.iter().skip(1).position(|w| *w == word);
            return words::command(words.get(1..=path?).unwrap_or_default(), word);
        }
        ErrorKind::UnknownArgument => {
            let flag = text(ContextKind::InvalidArg).split('=').next();
            if let Some(advice) = flag.and_then(words::flag) {
                return Some(advice);
            }
        }
        _ => {}
    }
    let is_missing = e.kind() == ErrorKind::MissingRequiredArgument;
    match command {
        "get" if is_missing && lacks("<OBJECT|KEY>...") => Some(
            "name an object, such as `deltafold get configmap/default/settings`, or give a key; for all keys below one give --prefix, such as --prefix /registry/configmaps/",
        ),
        "apply" if e.kind() == ErrorKind::UnknownArgument => Some(
            "objects of Kubernetes, by name, namespace or labels, come back through the API server: `deltafold recover`",
        ),
        "apply"
            if is_missing
                && words.iter().any(|w| is_flag(w, "--key"))
                && !words.iter().any(|w| is_flag(w, "--exact-key")) =>
        {
            Some(
                "--key is the private key of the TLS client certificate; to apply one key of etcd, give --exact-key KEY",
            )
        }
        _ => None,
    }
}

fn is_flag(word: &str, flag: &str) -> bool {
    word.strip_prefix(flag)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
}

/// Returns warnings for set variables that no flag has and that are one slip away from one that a flag has.
/// Other variables of our name are not ours alone: Kubernetes sets `DELTAFOLD_SERVICE_HOST` and its like.
pub(super) fn slips(command: &clap::Command, set: impl Iterator<Item = OsString>) -> Vec<String> {
    let mut known = BTreeSet::new();
    add_variables(command, &mut known);
    let set = set.filter_map(|name| name.into_string().ok());
    let unknown = set.filter(|name| {
        name.starts_with(OURS) && !name.starts_with(OF_TESTS) && !known.contains(name)
    });
    let mut warnings = Vec::new();
    for name in unknown {
        let ours = known.iter().filter_map(|known| known.strip_prefix(OURS));
        if let Some(meant) = nearest(&name[OURS.len()..], ours) {
            warnings.push(format!(
                "the variable {name} is set, but no flag has it: did you mean {OURS}{meant}?"
            ));
        }
    }
    warnings
}

fn add_variables(command: &clap::Command, known: &mut BTreeSet<String>) {
    for flag in command.get_arguments().filter_map(clap::Arg::get_long) {
        known.insert(format!("{OURS}{}", flag.replace('-', "_").to_uppercase()));
    }
    for subcommand in command.get_subcommands() {
        add_variables(subcommand, known);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::opt;

    #[test]
    fn each_surface_writes_options_in_its_words() {
        let mut flags = BTreeSet::new();
        add_variables(&super::super::command(), &mut flags);
        for option in opt::ALL {
            let name = option.name();
            let variable = format!("{OURS}{}", name.replace('-', "_").to_uppercase());
            assert!(flags.contains(&variable), "no command has --{name}");
        }
        assert_eq!(written("gc", false, "allow-shrink"), "--allow-shrink");
        assert_eq!(written("gc", true, "allow-shrink"), "allowShrink");
        assert_eq!(written("restore", true, "data-dir"), "subPath");
        // A policy cannot set it.
        assert_eq!(written("list", true, "max-age"), "--max-age");
        for command in ["deleted", "diff"] {
            assert!(!written(command, false, "revision").contains("--revision"));
        }
    }

    #[test]
    fn a_slip_in_a_variable_is_noticed_and_others_variables_are_not() {
        let warn = |name: &str| {
            let set = [OsString::from(name)];
            slips(&super::super::command(), set.into_iter()).join("\n")
        };
        for (slip, meant) in [
            ("DELTAFOLD_STROE", "DELTAFOLD_STORE"),
            ("DELTAFOLD_ENDPOINT", "DELTAFOLD_ENDPOINTS"),
            ("DELTAFOLD_AGE_IDENTIY", "DELTAFOLD_AGE_IDENTITY"),
            ("DELTAFOLD_PASWORD", "DELTAFOLD_PASSWORD"),
            ("DELTAFOLD_DATADIR", "DELTAFOLD_DATA_DIR"),
        ] {
            let warning = warn(slip);
            assert!(warning.ends_with(&format!("{meant}?")), "{slip}: {warning}");
        }
        // Kubernetes sets these for a Service, in each Pod of its namespace.
        for other in [
            "DELTAFOLD_STORE",
            "DELTAFOLD_SERVICE_HOST",
            "DELTAFOLD_SERVICE_PORT",
            "DELTAFOLD_SERVICE_PORT_METRICS",
            "DELTAFOLD_PORT",
            "DELTAFOLD_PORT_8080_TCP",
            "DELTAFOLD_PORT_8080_TCP_ADDR",
            "DELTAFOLD_IMAGE",
            "DELTAFOLD_TEST_SEED",
            "DELTAFOLD_",
            "STROE",
        ] {
            assert_eq!(warn(other), "");
        }
    }
}
