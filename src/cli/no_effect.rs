//! Flags that cannot have an effect beside the other flags: they are refused, so that nobody believes in a
//! rule that does not hold.
//!
//! Only the command line is refused. A variable may be set for several commands of a Pod, and is ignored where
//! it does not apply. Called by `parse`.

use clap::ArgMatches;
use clap::parser::ValueSource;
use std::ffi::OsStr;

/// Flags that need one of others, by their IDs. A rule is for the commands that have all of its flags.
const NEEDED: [(&[&str], &[&str]); 7] = [
    (&["drill_timeout"], &["etcd_binary"]),
    (&["metrics_scrape_wait"], &["metrics_bind_address"]),
    (&["wait_timeout"], &["wait_for_final"]),
    (&["interval"], &["wait_for_final", "follow"]),
    (
        &["trusted_ca_file", "cert_file", "key_file"],
        &["if_needed"],
    ),
    (&["cacert", "cert", "key", "tls_secret"], &["endpoints"]),
    (&["timeout"], &["wait"]),
];

/// Flags of Leases that need one of others. Which of these a command has differs.
const OF_LEASES: (&str, [&str; 2]) = ("lease_namespace", ["snapshot_lease_prefix", "lock_lease"]);

/// Flags that another one makes useless: the flags, the other one, and what then decides.
const USELESS: [(&[&str], &str, &str); 1] = [(
    &[
        "name",
        "initial_cluster",
        "initial_cluster_token",
        "initial_advertise_peer_urls",
    ],
    "to_snapshot",
    "the file keeps the member list of the backup",
)];

/// Flags that one value of another flag makes useless: the flags, the other flag, its value, and the value
/// that they are for.
const WITH_VALUE: [(&[&str], &str, &str, &str); 3] = [
    (
        &["hourly", "daily", "weekly", "monthly"],
        "policy",
        "limit",
        "exponential",
    ),
    (&["limit"], "policy", "exponential", "limit"),
    (&["lease_ttl"], "leases", "drop", "keep"),
];

/// Returns the first flag of the command line that has no effect, by its ID, and the message for it.
pub(super) fn find(matches: &ArgMatches) -> Option<(&'static str, String)> {
    let names = |ids: &[&str]| {
        let flags: Vec<String> = ids.iter().map(|id| flag(id)).collect();
        flags.join(" or ")
    };
    for (flags, needed) in NEEDED {
        if needed
            .iter()
            .any(|id| !has(matches, id) || is_on(matches, id))
        {
            continue;
        }
        if let Some(id) = typed(matches, flags) {
            let needed = names(needed);
            let without = format!(
                "{} has no effect without {needed}: give {needed} too, or leave it out",
                flag(id)
            );
            return Some((id, without));
        }
    }
    let (id, needed) = OF_LEASES;
    let needed: Vec<&str> = needed.into_iter().filter(|id| has(matches, id)).collect();
    if !needed.is_empty()
        && !needed.iter().any(|id| is_on(matches, id))
        && typed(matches, &[id]).is_some()
    {
        let needed = names(&needed);
        let without = format!(
            "{} has no effect without {needed}: give {needed} too, or leave it out",
            flag(id)
        );
        return Some((id, without));
    }
    for (flags, other, why) in USELESS {
        if is_on(matches, other)
            && let Some(id) = typed(matches, flags)
        {
            let with = format!(
                "{} has no effect with {}: {why}; leave it out",
                flag(id),
                flag(other)
            );
            return Some((id, with));
        }
    }
    for (flags, other, value, right) in WITH_VALUE {
        if is_value(matches, other, value)
            && !(flags == ["limit"] && is_old_job(matches))
            && let Some(id) = typed(matches, flags)
        {
            let (id_flag, other) = (flag(id), flag(other));
            let with = format!(
                "{id_flag} has no effect with {other} {value}: leave it out, or give {other} {right}"
            );
            return Some((id, with));
        }
    }
    None
}

/// Whether this can be the Job of a controller of version 0.1, whose image may be newer: its `gc` has the
/// policy's limit, whatever the policy. Every Job has a termination message.
fn is_old_job(matches: &ArgMatches) -> bool {
    typed(matches, &["termination_log"]).is_some()
}

/// The flag with this ID. Some flags are longer than their IDs.
fn flag(id: &str) -> String {
    match id {
        "hourly" | "daily" | "weekly" | "monthly" => format!("--keep-{id}"),
        "trusted_ca_file" | "cert_file" | "key_file" => format!("--peer-{}", id.replace('_', "-")),
        _ => format!("--{}", id.replace('_', "-")),
    }
}

/// Whether the command has this flag.
fn has(matches: &ArgMatches, id: &str) -> bool {
    matches.try_contains_id(id).is_ok()
}

/// The source of the flag's value, if the command has the flag and it has a value.
fn source(matches: &ArgMatches, id: &str) -> Option<ValueSource> {
    has(matches, id).then(|| matches.value_source(id)).flatten()
}

/// The first of these flags that is on the command line.
fn typed(matches: &ArgMatches, ids: &[&'static str]) -> Option<&'static str> {
    let is_typed = |id: &&&str| source(matches, id) == Some(ValueSource::CommandLine);
    ids.iter().find(is_typed).copied()
}

/// Whether a flag is given, by the command line or its variable. A switch must also be true.
fn is_on(matches: &ArgMatches, id: &str) -> bool {
    let is_given = source(matches, id).is_some_and(|source| source != ValueSource::DefaultValue);
    let switch = has(matches, id).then(|| matches.try_get_one::<bool>(id).ok().flatten());
    is_given && !matches!(switch, Some(Some(false)))
}

/// Whether a flag has this value, whoever gave it.
fn is_value(matches: &ArgMatches, id: &str, value: &str) -> bool {
    let raw = has(matches, id).then(|| matches.get_raw(id)).flatten();
    raw.is_some_and(|mut values| values.any(|v| v == OsStr::new(value)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The IDs of all commands' arguments, with their flags.
    fn flags(command: &clap::Command, all: &mut BTreeSet<(String, String)>) {
        for arg in command.get_arguments() {
            let id = arg.get_id().to_string();
            all.insert((id, format!("--{}", arg.get_long().unwrap_or_default())));
        }
        for subcommand in command.get_subcommands() {
            flags(subcommand, all);
        }
    }

    #[test]
    fn every_flag_in_the_rules_exists() {
        let mut all = BTreeSet::new();
        flags(&super::super::command(), &mut all);
        let needed = NEEDED.iter().flat_map(|(a, b)| a.iter().chain(*b));
        let useless = USELESS.iter().flat_map(|(a, b, _)| a.iter().chain([b]));
        let with_value = WITH_VALUE.iter().flat_map(|(a, b, ..)| a.iter().chain([b]));
        let of_leases = [&OF_LEASES.0].into_iter().chain(&OF_LEASES.1);
        for id in needed.chain(useless).chain(with_value).chain(of_leases) {
            assert!(all.contains(&((*id).to_owned(), flag(id))), "{id}");
        }
    }
}
