//! `deltafold history`: its arguments, and a key's versions as a table.

use super::stream::Stream;
use super::{BackupArgs, Ended, Output, size, text};
use crate::backup::chain::{RevisionRange, show_ranges};
use crate::base::Cancel;
use crate::error::Result;
use crate::mvcc::Revision;
use crate::ops::read::history::{History, Version};
use crate::ops::read::json::{KeyJson, VersionJson};
use clap::Args;
use schemars::JsonSchema;
use serde::Serialize;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

/// Show every recorded version of a key, deletions included
///
/// What the snapshots of the timeline still hold: all deltas, the oldest full, and the fulls behind
/// deltas that are missing. Of which revisions not every change is known, it says.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  When was it changed, and when was it deleted?
      deltafold history /registry/configmaps/default/settings --store s3://backups/etcd-main
  With the values:
      deltafold history /registry/configmaps/default/settings --store s3://backups/etcd-main --output json
  The value of one of them:
      deltafold get /registry/configmaps/default/settings --revision 120000 --store s3://backups/etcd-main

Times are those at which the snapshotter saw the change; of what only a full snapshot holds there is none.
--output json prints one object: docs/history-result.schema.json.")]
pub(super) struct HistoryArgs {
    /// The key
    #[arg(value_name = "KEY")]
    key: OsString,
    /// Take this timeline, by its ID in `deltafold list --deep` [default: the newest]
    #[arg(long, value_name = "ID")]
    timeline: Option<String>,
    #[command(flatten)]
    backup: BackupArgs,
}

/// What stands before the list of versions.
#[derive(JsonSchema, Serialize)]
pub(super) struct Head<'a> {
    #[serde(flatten)]
    name: KeyJson<'a>,
    /// The timeline's ID; null of a plain snapshot file.
    timeline: Option<&'a str>,
    /// The newest revision that was looked at.
    revision: Revision,
    /// Revisions up to `revision` of which no snapshot tells every change, in order: versions may be missing
    /// there.
    missing: Vec<Missing>,
    /// What an operator should know.
    warnings: &'a [String],
}

/// Revisions of which not every change is known.
#[derive(JsonSchema, Serialize)]
struct Missing {
    /// The first of them.
    first_revision: Revision,
    /// The last of them.
    last_revision: Revision,
}

impl From<&RevisionRange> for Missing {
    fn from(&(first_revision, last_revision): &RevisionRange) -> Self {
        Missing {
            first_revision,
            last_revision,
        }
    }
}

impl HistoryArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let backup = self.backup.backup(cancel)?;
        let timeline = self.timeline.as_deref();
        let mut history = History::read(&backup, timeline, self.key.as_bytes())?;
        let mut out = Stream::new();
        let printed = match output {
            Output::Json => self.print_json(cancel, &mut history, &mut out),
            Output::Text => self.print_text(cancel, &mut history, &mut out),
        };
        out.end(printed)
    }

    fn print_json(&self, cancel: &Cancel, history: &mut History, out: &mut Stream) -> Result<()> {
        let head = Head {
            name: KeyJson::new(self.key.as_bytes(), None),
            timeline: history.timeline.as_deref(),
            revision: history.revision,
            missing: history.missing.iter().map(Missing::from).collect(),
            warnings: &history.warnings,
        };
        out.begin_list(&head, "versions")?;
        while let Some(version) = history.next()? {
            cancel.check()?;
            out.item(&VersionJson::new(&version))?;
        }
        out.end_list()
    }

    fn print_text(&self, cancel: &Cancel, history: &mut History, out: &mut Stream) -> Result<()> {
        let line = |a: &str, b: &str, c: &str, d: &str, e: &str| {
            let line = format!("{a:>10}  {b:30}  {c:6}  {d:>7}  {e}");
            line.trim_end().to_owned() + "\n"
        };
        out.write(line("REVISION", "TIME", "CHANGE", "VERSION", "SIZE").as_bytes())?;
        while let Some(Version { revision, time, kv }) = history.next()? {
            cancel.check()?;
            let revision = revision.to_string();
            let time = text::key(time.unwrap_or("-").as_bytes()).into_owned();
            let line = match kv {
                Some(kv) => {
                    let bytes = size(kv.value.len() as u64);
                    line(&revision, &time, "put", &kv.version.to_string(), &bytes)
                }
                None => line(&revision, &time, "delete", "", ""),
            };
            out.write(line.as_bytes())?;
        }
        if !history.missing.is_empty() {
            let ranges = show_ranges(&history.missing);
            let note = format!("not every change is known of revisions {ranges}\n");
            out.write(note.as_bytes())?;
        }
        Ok(())
    }
}
