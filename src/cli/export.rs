//! `deltafold export`: its arguments, and the keys as JSON lines.
//!
//! `ops::read` reads the keys.

use super::objects::ObjectArgs;
use super::stream::Stream;
use super::{BackupArgs, Ended, text};
use crate::base::Cancel;
use crate::error::Result;
use crate::mvcc::KeyRange;
use crate::ops::options::StateOptions;
use crate::ops::read::Keys;
use crate::ops::read::json::KeyWithRecord;
use crate::prefix::damage::up_to_damage;
use clap::Args;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

/// Print all keys and values of a backup as JSON lines
///
/// Nothing is restored. Standard output has one key per line, sorted by the keys' bytes. Nothing is hidden: the values of
/// Secrets are in it.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Export the newest state:
      deltafold export --store s3://backups/etcd-main > etcd-main.jsonl
  Count the objects of each kind at noon:
      deltafold export --store s3://backups/etcd-main --time 2026-11-20T12:00:00Z |
          jq -r .kubernetes.kind | sort | uniq -c
  Export the Secrets of a plain snapshot file:
      deltafold export --prefix /registry/secrets/ --snapshot snapshot.db

The lines are the same with --output text and json: deltafold schema export. With --output json, a \
failure is printed as the last line.")]
pub(super) struct ExportArgs {
    /// Only export keys with this prefix
    #[arg(long, value_name = "P")]
    prefix: Option<OsString>,
    #[command(flatten)]
    state: StateOptions,
    #[command(flatten)]
    objects: ObjectArgs,
    #[command(flatten)]
    backup: BackupArgs,
}

impl ExportArgs {
    pub(super) fn run(&self, cancel: &Cancel) -> Ended {
        let mut out = Stream::new();
        out.begin_lines();
        let printed = self.print(cancel, &mut out);
        out.end(printed)
    }

    fn print(&self, cancel: &Cancel, out: &mut Stream) -> Result<()> {
        let object_keys = self.objects.keys()?;
        let backup = self.backup.backup(cancel)?;
        text::log_time(&self.state.point);
        let prefix = self.prefix.as_ref().map(|p| p.as_bytes().to_vec());
        let range = KeyRange::Prefix(prefix.unwrap_or_default());
        let (mut keys, revision) = up_to_damage([backup.context()?], || {
            let (ctx, source) = backup.open(&self.state.request())?;
            Ok((Keys::read(ctx, &source, range.clone())?, source.revision))
        })?;
        let mut is_empty = true;
        while keys.advance()? {
            is_empty = false;
            cancel.check()?;
            out.line(&KeyWithRecord::new(&keys.current()?, &object_keys))?;
        }
        if is_empty {
            // Standard output has nothing but keys.
            tracing::warn!("no keys match at revision {revision}");
        }
        Ok(())
    }
}
