//! Command lines from the options of an operation: clap knows the flags, serde their values. And the way back: the
//! messages of Jobs name flags, and their readers have written fields.
//!
//! It works for every type that derives both; options that are not in such a type are added by `pod`.

use super::super::api::{GarbageCollectionConfig, OnDemandCompactionConfig};
use crate::error::{Error, Result};
use crate::ops::copy::plan::CopyLimits;
use crate::ops::gc::Rules;
use crate::ops::maintain::Upkeep;
use crate::ops::restore::SharedOptions;
use crate::ops::snapshot::Marks;
use crate::ops::snapshot::follow::Pace;
use crate::ops::verify::store::Thoroughness;
use clap::{Arg, ArgAction, Args, Command};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// The fields of flags that are not in the options of an operation.
const OTHER_FIELDS: [(&str, &str); 22] = [
    ("age-identity", "encryption.identitySecretRef"),
    ("age-recipient", "encryption.recipients"),
    ("auth-secret", "etcd.authSecretRef"),
    ("compression", "snapshot.compression"),
    ("data-dir", "subPath"),
    ("endpoints", "etcd.endpoints"),
    ("etcd-binary", "verify.drill.etcdImage"),
    ("from", "sourceStore.url"),
    ("from-option", "sourceStore.options"),
    ("full-schedule", "snapshot.fullSchedule"),
    ("max-database-bytes", "jobTemplate.maxDatabaseSize"),
    ("max-value-bytes", "jobTemplate.maxValueSize"),
    ("snapshot-lease-prefix", "snapshot.leasePrefix"),
    ("store", "store.url"),
    ("store-option", "store.options"),
    ("store-secret", "store.secretRef"),
    ("temp-dir", "jobTemplate.scratchSize"),
    ("time-zone", "snapshot.timeZone"),
    ("tls-secret", "etcd.tlsSecretRef"),
    ("to", "targetStore.url"),
    ("to-option", "targetStore.options"),
    ("wait-timeout", "waitForFinalSnapshot.timeout"),
];

/// The field of each flag that a policy or a task can set.
static FIELDS: LazyLock<BTreeMap<String, String>> = LazyLock::new(|| {
    let mut command = Pace::augment_args(Command::new("options"));
    for augment in [
        CopyLimits::augment_args,
        GarbageCollectionConfig::augment_args,
        Marks::augment_args,
        OnDemandCompactionConfig::augment_args,
        Rules::augment_args,
        SharedOptions::augment_args,
        Thoroughness::augment_args,
        Upkeep::augment_args,
    ] {
        let options = augment(Command::new("options"));
        let known = command.clone();
        let is_new = |arg: &&Arg| {
            known
                .get_arguments()
                .all(|other| other.get_id() != arg.get_id())
        };
        command = command.args(options.get_arguments().filter(is_new));
    }
    let flags = command.get_arguments().filter_map(Arg::get_long);
    let fields = flags.map(|flag| (flag.to_owned(), camel_case(flag)));
    let others = OTHER_FIELDS.map(|(flag, field)| (flag.to_owned(), field.to_owned()));
    fields.chain(others).collect()
});

/// Returns the message of a Job with the fields of a policy or a task in place of flags: `subPath` for `--data-dir`.
pub(in crate::controller) fn in_fields(message: &str) -> String {
    let mut text = String::with_capacity(message.len());
    let mut rest = message;
    while let Some((before, after)) = rest.split_once("--") {
        let is_flag_char = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let end = after.find(|c| !is_flag_char(c)).unwrap_or(after.len());
        text += before;
        match FIELDS.get(&after[..end]) {
            Some(field) => text += field,
            None => text.extend(["--", &after[..end]]),
        }
        rest = &after[end..];
    }
    text + rest
}

/// Returns the arguments that set these options, in the order of their fields. The name of a field must be
/// that of its flag in camel case. Options that are null or false are left out.
///
/// # Errors
/// `Internal` if the options cannot be written as JSON, or if one of them has no flag.
pub(in crate::controller) fn flags<T: Args + Serialize>(options: &T) -> Result<Vec<String>> {
    let fields = serde_json::to_value(options)
        .map_err(|e| Error::internal(format!("options of a Job cannot be written as JSON: {e}")))?;
    let command = T::augment_args(Command::new("options"));
    let mut args = Vec::new();
    for arg in command.get_arguments() {
        let Some(flag) = arg.get_long() else {
            let message = format!("the option {} of a Job has no flag", arg.get_id());
            return Err(Error::internal(message));
        };
        let values = match &fields[camel_case(flag)] {
            Value::Null | Value::Bool(false) => continue,
            Value::Array(values) => values.clone(),
            value => vec![value.clone()],
        };
        for value in values {
            args.push(format!("--{flag}"));
            if !matches!(arg.get_action(), ArgAction::SetTrue) {
                args.push(text(arg, &value));
            }
        }
    }
    Ok(args)
}

fn camel_case(flag: &str) -> String {
    let mut words = flag.split('-');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |name, word| {
        let (head, tail) = word.split_at(word.len().min(1));
        name + &head.to_uppercase() + tail
    })
}

/// Returns a value in the notation of its flag.
fn text(arg: &Arg, value: &Value) -> String {
    let Value::String(text) = value else {
        return value.to_string();
    };
    // In Kubernetes, values begin with a capital letter; those of flags do not.
    let possible = arg.get_possible_values();
    let same = possible.iter().find(|v| v.matches(text, true));
    same.map_or(text.as_str(), |v| v.get_name()).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_without_a_flag_is_not_left_out() {
        #[derive(Args, Serialize)]
        struct Positional {
            place: String,
        }
        let place = "here".to_owned();
        let e = flags(&Positional { place }).unwrap_err();
        assert!(e.to_string().contains("place"), "{e}");
    }

    #[test]
    fn messages_of_jobs_speak_fields() {
        for (message, told) in [
            (
                "/restore/etcd is not empty: give --if-needed, or another --data-dir",
                "/restore/etcd is not empty: give ifNeeded, or another subPath",
            ),
            (
                "raise --max-database-bytes",
                "raise jobTemplate.maxDatabaseSize",
            ),
            ("give --allow-shrink --apply", "give allowShrink --apply"),
            (
                "--bump-revision, --store=s3://b",
                "bumpRevision, store.url=s3://b",
            ),
            ("a -- b --- c --", "a -- b --- c --"),
        ] {
            assert_eq!(in_fields(message), told);
        }
    }
}
