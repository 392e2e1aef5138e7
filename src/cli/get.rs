//! `deltafold get`: its arguments, and keys with their values as text or JSON.
//!
//! `ops::read` reads the keys.

use super::stream::Stream;
use super::{BackupArgs, Ended, Output, text};
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::error::{Reason, Result};
use crate::mvcc::{KeyRange, KeyValue, Revision};
use crate::ops::Context;
use crate::ops::fold::Source;
use crate::ops::options::StateOptions;
use crate::ops::read::json::KeyWithRecord;
use crate::ops::read::{self, Keys};
use crate::ops::tags::without_excluded;
use clap::Args;
use schemars::JsonSchema;
use serde::Serialize;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

/// Show keys and values of a backup, at any revision or time
///
/// Nothing is restored. JSON objects are shown as YAML, and other text unchanged. For Kubernetes objects,
/// kind, namespace and name are shown, too. Keys are sorted by their bytes.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Show the newest value of a key:
      deltafold get /registry/configmaps/default/settings --store s3://backups/etcd-main
  Show its value at noon:
      deltafold get /registry/configmaps/default/settings --store s3://backups/etcd-main \\
          --time 2026-11-20T12:00:00Z
  Show all Secrets of a namespace as JSON:
      deltafold get --prefix /registry/secrets/payments/ --store s3://backups/etcd-main --output json
  Write the bytes of a value to a file:
      deltafold get my-key --raw --store /backups/etcd-main > value

A KEY that does not exist is an error (KeyNotFound, exit code 66); a prefix without keys is not. --output json \
prints one object: deltafold schema get.")]
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
    #[command(flatten)]
    state: StateOptions,
    #[command(flatten)]
    backup: BackupArgs,
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
        let backup = self.backup.backup(cancel)?;
        text::log_time(&self.state.point);
        let mut out = Stream::new();
        let printed = without_excluded(|| {
            let (ctx, source) = backup.open(&self.state.request())?;
            self.print(ctx, &source, output, &mut out)
        });
        out.end(printed)
    }

    fn print(
        &self,
        ctx: &Context,
        source: &Source,
        output: Output,
        out: &mut Stream,
    ) -> Result<()> {
        match (&self.key, &self.prefix) {
            (Some(key), _) => read::get(ctx, source, key.as_bytes(), |kv| {
                self.print_key(source, kv, output, out)
            }),
            (None, prefix) => {
                let prefix = prefix.as_ref().map(|p| p.as_bytes()).unwrap_or_default();
                let range = KeyRange::Prefix(prefix.to_vec());
                let keys = Keys::read(ctx, source, range)?;
                let any = print_keys(ctx, source, keys, output, out)?;
                if !any && output == Output::Text {
                    let prefix = text::key(prefix);
                    let none = format!(
                        "# no key begins with \"{prefix}\" at revision {}\n",
                        source.target
                    );
                    out.write(none.as_bytes())?;
                }
                Ok(())
            }
        }
    }

    fn print_key(
        &self,
        source: &Source,
        kv: &KeyValue<'_>,
        output: Output,
        out: &mut Stream,
    ) -> Result<()> {
        match output {
            _ if self.raw => out.write(kv.value),
            Output::Text => out.write(text::entry(kv).as_bytes()),
            Output::Json => {
                out.begin_list(&Head::of(source), "keys")?;
                out.item(&KeyWithRecord::new(kv))?;
                out.end_list()
            }
        }
    }
}

/// Prints keys, and returns whether there was one.
fn print_keys(
    ctx: &Context,
    source: &Source,
    mut keys: Keys,
    output: Output,
    out: &mut Stream,
) -> Result<bool> {
    if output == Output::Json {
        out.begin_list(&Head::of(source), "keys")?;
    }
    let mut is_first = true;
    while keys.advance()? {
        ctx.store.cancel().check()?;
        let kv = keys.current()?;
        match output {
            Output::Json => out.item(&KeyWithRecord::new(&kv))?,
            Output::Text => {
                if !is_first {
                    out.write(b"---\n")?;
                }
                out.write(text::entry(&kv).as_bytes())?;
            }
        }
        is_first = false;
    }
    if output == Output::Json {
        out.end_list()?;
    }
    Ok(!is_first)
}
