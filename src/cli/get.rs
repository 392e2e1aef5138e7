//! `deltafold get`: its arguments, and keys with their values as text or JSON.
//!
//! `ops::read` reads the keys.

use super::objects::ObjectArgs;
use super::stream::Stream;
use super::{BackupArgs, Ended, Output, text};
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::base::printable;
use crate::error::{Error, Reason, Result};
use crate::mvcc::{KeyRange, KeyValue, Revision};
use crate::objects::{EncryptionKeys, NotDecoded, Object, yaml};
use crate::ops::Context;
use crate::ops::fold::Source;
use crate::ops::options::StateOptions;
use crate::ops::read::json::KeyWithRecord;
use crate::ops::read::{self, Keys};
use crate::ops::tags::without_excluded;
use clap::{Args, ValueEnum};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::ser::{PrettyFormatter, Serializer};
use serde_json::{Map, Value};
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

/// Show keys and values of a backup, at any revision or time
///
/// Nothing is restored. Objects of Kubernetes are decoded and shown as YAML, as an API server serves them in their
/// stored version; so are other JSON objects, and other text is shown unchanged. Keys are sorted by their bytes.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Show the newest value of a key:
      deltafold get /registry/configmaps/default/settings --store s3://backups/etcd-main
  Show its value at noon:
      deltafold get /registry/configmaps/default/settings --store s3://backups/etcd-main \\
          --time 2026-11-20T12:00:00Z
  Bring a deleted ConfigMap back:
      deltafold get /registry/configmaps/default/settings --store s3://backups/etcd-main \\
          --time '1h ago' -o yaml --clean | kubectl apply -f -
  Show all Secrets of a namespace with their values:
      deltafold get --prefix /registry/secrets/payments/ --store s3://backups/etcd-main \\
          --show-secrets
  Write the bytes of a value to a file:
      deltafold get my-key --raw --store /backups/etcd-main > value

A KEY that does not exist is an error (KeyNotFound, exit code 66); a prefix without keys is not. -o prints nothing \
but the object, or a List of the objects of a prefix; --output json prints the keys and their revisions with it: \
deltafold schema get. Both have the values of Secrets, which the text hides.")]
pub(super) struct GetArgs {
    /// Key to show
    #[arg(
        value_name = "KEY",
        required_unless_present = "prefix",
        conflicts_with = "prefix"
    )]
    key: Option<OsString>,
    /// Show all keys with this prefix; an empty prefix means all keys
    #[arg(long, value_name = "P")]
    prefix: Option<OsString>,
    /// Print only the bytes of KEY's value
    #[arg(long, value_parser = yes_or_no)]
    raw: bool,
    /// Print only the Kubernetes object, as an API server serves it: as YAML or as JSON
    #[arg(short, value_name = "FORMAT", conflicts_with = "raw")]
    object_format: Option<ObjectFormat>,
    /// Leave out what an API server or a controller sets, so that `kubectl apply -f` takes the object: status, uid,
    /// resourceVersion, managedFields, owners and the like
    #[arg(long, requires = "object_format", value_parser = yes_or_no)]
    clean: bool,
    /// Show the values of Secrets in the text, too
    #[arg(long, conflicts_with_all = ["raw", "object_format"], value_parser = yes_or_no)]
    show_secrets: bool,
    #[command(flatten)]
    state: StateOptions,
    #[command(flatten)]
    objects: ObjectArgs,
    #[command(flatten)]
    backup: BackupArgs,
}

/// The format of Kubernetes objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ObjectFormat {
    /// YAML
    Yaml,
    /// JSON
    Json,
}

/// The fields before the list of keys.
#[derive(JsonSchema, Serialize)]
pub(super) struct Head<'a> {
    /// The revision at which the keys are read.
    revision: Revision,
    /// The timeline's ID; null for a plain snapshot file.
    timeline: Option<&'a str>,
    /// Warnings for the operator.
    warnings: &'a [String],
}

impl<'a> Head<'a> {
    fn of(source: &'a Source) -> Self {
        Head {
            revision: source.target,
            timeline: source.timeline_id(),
            warnings: &source.warnings,
        }
    }
}

impl GetArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        if self.raw && (self.prefix.is_some() || output == Output::Json) {
            return Err(Reason::Usage.error("--raw prints the bytes of one value: give it a KEY, and neither --prefix nor --output json"));
        }
        if self.object_format.is_some() && output == Output::Json {
            return Err(Reason::Usage.error(
                "-o prints only objects, and --output json a result with keys and revisions: give one of them",
            ));
        }
        let printer = Printer {
            args: self,
            output,
            keys: self.objects.keys()?,
        };
        let backup = self.backup.backup(cancel)?;
        text::log_time(&self.state.point);
        let mut out = Stream::new();
        let printed = without_excluded(|| {
            let (ctx, source) = backup.open(&self.state.request())?;
            printer.print(ctx, &source, &mut out)
        });
        out.end(printed)
    }
}

/// How keys are printed.
struct Printer<'a> {
    args: &'a GetArgs,
    output: Output,
    /// What opens objects that an API server has encrypted.
    keys: EncryptionKeys,
}

impl Printer<'_> {
    fn print(&self, ctx: &Context, source: &Source, out: &mut Stream) -> Result<()> {
        if let Some(key) = &self.args.key {
            return read::get(ctx, source, key.as_bytes(), |kv| {
                self.print_key(source, kv, out)
            });
        }
        let prefix = self.args.prefix.as_ref().map(|p| p.as_bytes());
        let prefix = prefix.unwrap_or_default();
        let mut keys = Keys::read(ctx, source, KeyRange::Prefix(prefix.to_vec()))?;
        if let Some(format) = self.args.object_format {
            return self.print_objects(ctx, &mut keys, format, out);
        }
        let has_keys = self.print_keys(ctx, source, &mut keys, out)?;
        if !has_keys && self.output == Output::Text {
            let prefix = text::key(prefix);
            let revision = source.target;
            let none = format!("# no key begins with \"{prefix}\" at revision {revision}\n");
            out.write(none.as_bytes())?;
        }
        Ok(())
    }

    fn print_key(&self, source: &Source, kv: &KeyValue<'_>, out: &mut Stream) -> Result<()> {
        if self.args.raw {
            return out.write(kv.value);
        }
        if let Some(format) = self.args.object_format {
            let object = self.object(kv).map_err(|e| not_decoded(kv, &e))?;
            return match format {
                ObjectFormat::Yaml => out.write(yaml::from_object(&object).as_bytes()),
                ObjectFormat::Json => out.write((pretty(&object, "")? + "\n").as_bytes()),
            };
        }
        match self.output {
            Output::Text => out.write(self.text(kv).as_bytes()),
            Output::Json => {
                out.begin_list(&Head::of(source), "keys")?;
                out.item(&KeyWithRecord::new(kv, &self.keys))?;
                out.end_list()
            }
        }
    }

    fn text(&self, kv: &KeyValue<'_>) -> String {
        text::entry(kv, &self.keys, self.args.show_secrets)
    }

    /// Prints keys, and returns whether there was one.
    fn print_keys(
        &self,
        ctx: &Context,
        source: &Source,
        keys: &mut Keys,
        out: &mut Stream,
    ) -> Result<bool> {
        if self.output == Output::Json {
            out.begin_list(&Head::of(source), "keys")?;
        }
        let mut is_first = true;
        while keys.advance()? {
            ctx.store.cancel().check()?;
            let kv = keys.current()?;
            match self.output {
                Output::Json => out.item(&KeyWithRecord::new(&kv, &self.keys))?,
                Output::Text => {
                    if !is_first {
                        out.write(b"---\n")?;
                    }
                    out.write(self.text(&kv).as_bytes())?;
                }
            }
            is_first = false;
        }
        if self.output == Output::Json {
            out.end_list()?;
        }
        Ok(!is_first)
    }

    /// Prints the objects of the keys as a List. Values that cannot be decoded are logged.
    fn print_objects(
        &self,
        ctx: &Context,
        keys: &mut Keys,
        format: ObjectFormat,
        out: &mut Stream,
    ) -> Result<()> {
        let mut is_first = true;
        while keys.advance()? {
            ctx.store.cancel().check()?;
            let kv = keys.current()?;
            let object = match self.object(&kv) {
                Ok(object) => object,
                Err(e) => {
                    tracing::warn!("not in the list: {}", not_decoded(&kv, &e));
                    continue;
                }
            };
            let item = match (format, is_first) {
                (ObjectFormat::Yaml, true) => {
                    format!("apiVersion: v1\nitems:\n{}", yaml::from_item(&object))
                }
                (ObjectFormat::Yaml, false) => yaml::from_item(&object),
                (ObjectFormat::Json, true) => format!(
                    "{{\n    \"apiVersion\": \"v1\",\n    \"items\": [\n{}",
                    pretty(&object, LIST_INDENT)?
                ),
                (ObjectFormat::Json, false) => format!(",\n{}", pretty(&object, LIST_INDENT)?),
            };
            out.write(item.as_bytes())?;
            is_first = false;
        }
        let end = match (format, is_first) {
            (ObjectFormat::Yaml, true) => "apiVersion: v1\nitems: []\nkind: List\n",
            (ObjectFormat::Yaml, false) => "kind: List\n",
            (ObjectFormat::Json, true) => {
                "{\n    \"apiVersion\": \"v1\",\n    \"items\": [],\n    \"kind\": \"List\"\n}\n"
            }
            (ObjectFormat::Json, false) => "\n    ],\n    \"kind\": \"List\"\n}\n",
        };
        out.write(end.as_bytes())
    }

    /// Returns the object of a key, as it is printed with `-o`.
    fn object(&self, kv: &KeyValue<'_>) -> Result<Map<String, Value>, NotDecoded> {
        let mut object = Object::of_record(kv, &self.keys)?;
        if object.unknown_fields > 0 {
            tracing::warn!("{}: {}", text::key(kv.key), text::unknown_fields(&object));
        }
        if self.args.clean {
            object.clean();
        }
        Ok(object.json)
    }
}

/// The indentation of the objects in a List.
const LIST_INDENT: &str = "        ";

fn not_decoded(kv: &KeyValue<'_>, e: &NotDecoded) -> Error {
    let reason = match e {
        NotDecoded::Encrypted { .. } => Reason::CannotDecrypt,
        _ => Reason::NotDecoded,
    };
    reason.error(format!("{}: {e}", text::key(kv.key)))
}

/// Returns an object as JSON on several lines, indented as kubectl does and by `indent`.
fn pretty(object: &Map<String, Value>, indent: &str) -> Result<String> {
    let mut json = Vec::new();
    let formatter = PrettyFormatter::with_indent(b"    ");
    let mut serializer = Serializer::with_formatter(&mut json, formatter);
    let failed = |e| Error::internal(format!("an object cannot be written as JSON: {e}"));
    object.serialize(&mut serializer).map_err(failed)?;
    let json = String::from_utf8_lossy(&json);
    let json = json.replace('\n', &format!("\n{indent}"));
    Ok(format!("{indent}{}", printable::json(&json)))
}
