//! What a user meant: advice for command lines that are refused.
//!
//! Pure functions of the command line. `parse` calls them.

use super::words;
use crate::base::opt::Opt;
use crate::base::slips::distance;
use crate::controller::jobs::flags::field_of;
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::ffi::OsString;

/// The most slips between a word and the one that was meant.
const MOST_SLIPS: usize = 2;

/// Adds advice to a refusal by clap: what was probably meant.
pub(super) fn explain(mut e: clap::Error, args: &[OsString]) -> clap::Error {
    let words: Vec<&str> = args.iter().filter_map(|a| a.to_str()).collect();
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
        "copy" if e.kind() == ErrorKind::UnknownArgument && lacks("--compression") => Some(
            "copies are as their source; `deltafold compact --compression gzip` writes a new full that other programs read",
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::opt;

    fn has(command: &clap::Command, flag: &str) -> bool {
        command
            .get_arguments()
            .any(|arg| arg.get_long() == Some(flag))
            || command.get_subcommands().any(|c| has(c, flag))
    }

    #[test]
    fn each_surface_writes_options_in_its_words() {
        for option in opt::ALL {
            let flag = option.name();
            assert!(
                has(&super::super::command(), &flag),
                "no command has --{flag}"
            );
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
}
