//! Options as arguments of a Job: clap knows the flags, serde their values.

use crate::base::{Span, TextValue};
use crate::ops::maintain::Keep;
use clap::{Arg, ArgAction, Args, Command};
use serde::Serialize;
use serde_json::Value;
use std::any::TypeId;

/// The command line that gives these options, in the order of their fields. A field is named after its flag.
pub(in crate::controller) fn flags<T: Args + Serialize>(options: &T) -> Vec<String> {
    let fields = serde_json::to_value(options).unwrap_or_default();
    let command = T::augment_args(Command::new("options"));
    let mut args = Vec::new();
    for arg in command.get_arguments() {
        let flag = arg.get_long().unwrap_or_default();
        let values = match &fields[camel_case(flag)] {
            Value::Null | Value::Bool(false) => continue,
            Value::Array(several) => several.clone(),
            one => vec![one.clone()],
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

/// A value as its flag takes it.
fn text(arg: &Arg, value: &Value) -> String {
    let Value::String(text) = value else {
        return value.to_string();
    };
    let parser = arg.get_value_parser().type_id();
    let spans = [
        TypeId::of::<TextValue<Span>>(),
        TypeId::of::<TextValue<Keep>>(),
    ];
    // Flags of older images know no weeks.
    if spans.iter().any(|id| parser == *id)
        && let Ok(span) = text.parse::<Span>()
    {
        return span.to_string();
    }
    // Kubernetes' names begin with a capital letter.
    let possible = arg.get_possible_values();
    let named = possible.iter().find(|v| v.matches(text, true));
    named.map_or(text.as_str(), |v| v.get_name()).to_owned()
}
