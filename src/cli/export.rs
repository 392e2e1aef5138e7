//! `deltafold export`: its arguments, and keys as JSON lines.

use super::stream::Stream;
use super::{BackupArgs, Ended};
use crate::base::Cancel;
use crate::error::Result;
use crate::mvcc::KeyRange;
use crate::ops::options::StateOptions;
use crate::ops::read::Keys;
use crate::ops::read::json::KeyWithRecord;
use crate::ops::tags::without_excluded;
use clap::Args;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

/// Write all keys as JSON lines, without restoring anything
///
/// One key a line, in the order of the keys' bytes, on standard output.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Everything, as of now:
      deltafold export --store s3://backups/etcd-main > etcd-main.jsonl
  How many objects of each kind there were:
      deltafold export --store s3://backups/etcd-main --time 2026-11-20T12:00:00Z | jq -r .kubernetes.kind | sort | uniq -c
  Of a plain snapshot file:
      deltafold export --prefix /registry/secrets/ --snapshot snapshot.db

Lines are the same with any --output: docs/export-result.schema.json. With --output json a failure is a line, too:
the last one.")]
pub(super) struct ExportArgs {
    /// Only keys that begin so
    #[arg(long, value_name = "P")]
    prefix: Option<OsString>,
    #[command(flatten)]
    state: StateOptions,
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
        let backup = self.backup.backup(cancel)?;
        let prefix = self.prefix.as_ref().map(|p| p.as_bytes().to_vec());
        let range = KeyRange::Prefix(prefix.unwrap_or_default());
        let mut keys = without_excluded(|| {
            let (ctx, source) = backup.open(&self.state.request())?;
            Keys::read(ctx, &source, range.clone())
        })?;
        while keys.advance()? {
            cancel.check()?;
            out.line(&KeyWithRecord::new(&keys.current()?))?;
        }
        Ok(())
    }
}
