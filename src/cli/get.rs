//! `deltafold get`: its arguments, and keys with their values in words.

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

/// Show keys and values as they were, without restoring anything
///
/// JSON objects are shown as YAML, other text as it is; of Kubernetes objects kind, namespace and
/// name are told. Keys come in the order of their bytes.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  A key, as of now:
      deltafold get /registry/configmaps/default/settings --store s3://backups/etcd-main
  As it was at noon:
      deltafold get /registry/configmaps/default/settings --store s3://backups/etcd-main --time 2026-11-20T12:00:00Z
  All of a namespace, as JSON:
      deltafold get --prefix /registry/secrets/payments/ --store s3://backups/etcd-main --output json
  The value alone, byte by byte:
      deltafold get my-key --raw --store /backups/etcd-main > value

A key that is not there is an error (KeyNotFound, 66), a prefix without keys is none. --output json prints
one object: docs/get-result.schema.json.")]
pub(super) struct GetArgs {
    /// The key
    #[arg(
        value_name = "KEY",
        required_unless_present = "prefix",
        conflicts_with = "prefix"
    )]
    key: Option<OsString>,
    /// All keys that begin so; an empty one means all
    #[arg(long, value_name = "P")]
    prefix: Option<OsString>,
    /// Print the bytes of KEY's value and nothing else
    #[arg(long, value_parser = yes_or_no)]
    raw: bool,
    #[command(flatten)]
    state: StateOptions,
    #[command(flatten)]
    backup: BackupArgs,
}

/// What stands before the list of a state's keys.
#[derive(JsonSchema, Serialize)]
pub(super) struct Head<'a> {
    /// The revision of the state that the keys are read from.
    revision: Revision,
    /// The timeline's ID; null of a plain snapshot file.
    timeline: Option<&'a str>,
    /// What an operator should know.
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
            return Err(Reason::Usage.error("--raw prints the bytes of one value: it goes neither with --prefix nor with --output json"));
        }
        let backup = self.backup.backup(cancel)?;
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
        let mut count = 0;
        let text = |out: &mut Stream, kv: &KeyValue<'_>, first: bool| {
            if !first {
                out.write(b"---\n")?;
            }
            out.write(text::entry(kv).as_bytes())
        };
        let head = Head::of(source);
        match (&self.key, &self.prefix) {
            (Some(key), _) => read::get(ctx, source, key.as_bytes(), |kv| match output {
                _ if self.raw => out.write(kv.value),
                Output::Text => text(out, kv, true),
                Output::Json => {
                    out.begin_list(&head, "keys")?;
                    out.item(&KeyWithRecord::new(kv))?;
                    out.end_list()
                }
            }),
            (None, prefix) => {
                let prefix = prefix.as_ref().map(|p| p.as_bytes()).unwrap_or_default();
                let range = KeyRange::Prefix(prefix.to_vec());
                let mut keys = Keys::read(ctx, source, range)?;
                if output == Output::Json {
                    out.begin_list(&head, "keys")?;
                }
                while keys.advance()? {
                    ctx.store.cancel().check()?;
                    let kv = keys.current()?;
                    match output {
                        Output::Json => out.item(&KeyWithRecord::new(&kv))?,
                        Output::Text => text(out, &kv, count == 0)?,
                    }
                    count += 1;
                }
                match output {
                    Output::Json => out.end_list(),
                    Output::Text => Ok(()),
                }
            }
        }
    }
}
