//! `deltafold export`: its arguments, and the keys as JSON lines.
//!
//! `ops::read` reads the keys.

use super::objects::{LabelArgs, ObjectArgs, SelectArgs};
use super::stream::Stream;
use super::{BackupArgs, Ended, text};
use crate::base::Cancel;
use crate::error::Result;
use crate::ops::options::StateOptions;
use crate::ops::read::Keys;
use crate::ops::read::json::KeyWithRecord;
use crate::prefix::set_aside::{Purpose, decide_again};
use clap::Args;

/// Print keys and values of a backup as JSON lines: all of them, or those of objects
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
  Export the ConfigMaps and Secrets of a namespace in a plain snapshot file:
      deltafold export cm,secret -n shop --snapshot snapshot.db

The lines are the same with --output text and json. With --output json, a \
failure is printed as the last line.")]
pub(super) struct ExportArgs {
    #[command(flatten)]
    state: StateOptions,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    labels: LabelArgs,
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
        let backup = self.backup.backup_at(self.state.request().at, cancel)?;
        text::log_time(&self.state.point);
        let ctx = backup.context();
        let (mut keys, revision) = decide_again([ctx], Purpose::Read, || {
            let source = backup.open(&self.state.request())?;
            let (range, _) = self.select.keys_in(&backup, &source, true)?;
            Ok((Keys::read(ctx, &source, range)?, source.revision))
        })?;
        let mut is_empty = true;
        while keys.advance()? {
            cancel.check()?;
            let kv = keys.current()?;
            if self.labels.match_one([&kv], &object_keys) {
                is_empty = false;
                out.line(&KeyWithRecord::new(&kv, &object_keys))?;
            }
        }
        if is_empty {
            // Standard output has nothing but keys.
            tracing::warn!("no keys match at revision {revision}");
        }
        self.labels.end(!self.select.words.is_empty())
    }
}
