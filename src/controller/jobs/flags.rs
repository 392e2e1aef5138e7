//! Command lines from the options of an operation: clap knows the flags, serde their values. And the way back: the
//! messages of Jobs name options, and their readers have written fields.
//!
//! It works for every type that derives both; options that are not in such a type are added by `pod`.

use super::super::api::{EtcdBackupPolicy, EtcdBackupTask};
use crate::error::{Error, Result};
use clap::{Arg, ArgAction, Args, Command};
use kube::CustomResourceExt;
use serde::Serialize;
use serde_json::Value;
use std::sync::LazyLock;

/// Returns the field of a policy or a task that sets an option, such as `subPath` of `data-dir`; `None` if none does.
pub(crate) fn field_of(option: &str) -> Option<String> {
    /// All names of fields, in quotes.
    static FIELDS: LazyLock<String> = LazyLock::new(|| {
        let resources = [EtcdBackupPolicy::crd(), EtcdBackupTask::crd()];
        serde_json::to_string(&resources).unwrap_or_default()
    });
    let field = match option {
        "age-identity" => "encryption.identitySecretRef".to_owned(),
        "age-recipient" => "encryption.recipients".to_owned(),
        "auth-secret" => "etcd.authSecretRef".to_owned(),
        "data-dir" => "subPath".to_owned(),
        "endpoints" => "etcd.endpoints".to_owned(),
        "max-database-bytes" => "jobTemplate.maxDatabaseSize".to_owned(),
        "max-value-bytes" => "jobTemplate.maxValueSize".to_owned(),
        "store" => "store.url".to_owned(),
        "store-option" => "store.options".to_owned(),
        "temp-dir" => "jobTemplate.scratchSize".to_owned(),
        "tls-secret" => "etcd.tlsSecretRef".to_owned(),
        option => camel_case(option),
    };
    let is_field = field.contains('.') || FIELDS.contains(&format!("\"{field}\":"));
    is_field.then_some(field)
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
}
