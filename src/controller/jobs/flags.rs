//! Command lines from the options of an operation: clap knows the flags, serde their values.
//!
//! It works for every type that derives both; options that are not in such a type are added by `pod`. Called
//! by `pod` and `manifests`.

use clap::{Arg, ArgAction, Args, Command};
use serde::Serialize;
use serde_json::Value;

/// Returns the arguments that set these options, in the order of their fields. The name of a field must be
/// that of its flag in camel case. Options that are null or false are left out.
pub(in crate::controller) fn flags<T: Args + Serialize>(options: &T) -> Vec<String> {
    let fields = serde_json::to_value(options).unwrap_or_default();
    let command = T::augment_args(Command::new("options"));
    let mut args = Vec::new();
    for arg in command.get_arguments() {
        let flag = arg.get_long().unwrap_or_default();
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
    args
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
