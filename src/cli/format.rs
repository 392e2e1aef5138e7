//! `-o`: the format of what a command prints.

use super::Output;
use crate::error::{Reason, Result};
use std::str::FromStr;

/// What is said of kubectl's formats that are not there.
const OTHERWISE: &str = "use -o json, and jq";

/// The format of the result on standard output. Only `get` knows those from `Result` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// Human-readable text.
    Text,
    /// One JSON object: the result; of `get`, the Kubernetes object.
    Json,
    /// The result of `get` as JSON, with keys and revisions.
    Result,
    /// The Kubernetes object as YAML.
    Yaml,
    /// `KIND/NAME` of objects.
    Name,
    /// A table with more columns.
    Wide,
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "text" => Format::Text,
            "json" => Format::Json,
            "result" => Format::Result,
            "yaml" => Format::Yaml,
            "name" => Format::Name,
            "wide" => Format::Wide,
            _ => match text.split_once('=').map_or(text, |(name, _)| name) {
                "custom-columns"
                | "custom-columns-file"
                | "go-template"
                | "go-template-file"
                | "jsonpath"
                | "jsonpath-file"
                | "jsonpath-as-json"
                | "template"
                | "templatefile" => {
                    return Err(format!("this format of kubectl is not there: {OTHERWISE}"));
                }
                _ => {
                    return Err(
                        "use text or json; for `get`, also yaml, name, wide or result".to_owned(),
                    );
                }
            },
        })
    }
}

impl Format {
    /// Returns the format of a command other than `get`.
    ///
    /// # Errors
    /// `Usage` if only `get` has it.
    pub(super) fn output(&self) -> Result<Output> {
        match self {
            Format::Text => Ok(Output::Text),
            Format::Json | Format::Result => Ok(Output::Json),
            _ => Err(Reason::Usage
                .error("this output format is for `deltafold get`: give --output text or json")),
        }
    }

    /// Returns the format in which an error of `get` is printed.
    pub(super) fn of_errors(&self) -> Output {
        if *self == Format::Result {
            return Output::Json;
        }
        Output::Text
    }
}
