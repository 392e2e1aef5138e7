//! `deltafold history`: its arguments, and a key's versions as a table or JSON.
//!
//! `ops::read::history` collects the versions.

use super::objects::ObjectArgs;
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

/// Show every recorded version of a key, including deletions
///
/// Reads the snapshots of the timeline: all deltas, the oldest full, and each full that follows missing
/// deltas. Revisions for which some changes are not recorded are listed at the end.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Show when a key was changed and deleted:
      deltafold history /registry/configmaps/default/settings --store s3://backups/etcd-main
  Show the values, too:
      deltafold history /registry/configmaps/default/settings \\
          --store s3://backups/etcd-main --output json
  Show the value at one of the revisions:
      deltafold get /registry/configmaps/default/settings --revision 120000 \\
          --store s3://backups/etcd-main

TIME is when the backup tool received the change. Versions that only a full snapshot has are shown without a \
time. --output json prints one object: deltafold schema history.")]
pub(super) struct HistoryArgs {
    /// Key to show
    #[arg(value_name = "KEY")]
    key: OsString,
    /// ID of the timeline to read, from `deltafold list --deep` [default: the newest timeline]
    #[arg(long, value_name = "ID")]
    timeline: Option<String>,
    #[command(flatten)]
    objects: ObjectArgs,
    #[command(flatten)]
    backup: BackupArgs,
}

/// The fields before the list of versions.
#[derive(JsonSchema, Serialize)]
pub(super) struct Head<'a> {
    #[serde(flatten)]
    name: KeyJson<'a>,
    /// The timeline's ID; null for a plain snapshot file.
    timeline: Option<&'a str>,
    /// The newest revision that was read.
    revision: Revision,
    /// Ranges of revisions, up to `revision`, for which the snapshots do not record every change, in order.
    /// Versions may be missing there.
    missing: Vec<Missing>,
    /// Warnings for the operator.
    warnings: &'a [String],
}

/// A range of revisions with changes that are not recorded.
#[derive(JsonSchema, Serialize)]
struct Missing {
    /// The first revision of the range.
    first_revision: Revision,
    /// The last revision of the range.
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
        let keys = self.objects.keys()?;
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
            out.item(&VersionJson::new(&version, &keys))?;
        }
        out.end_list()
    }

    fn print_text(&self, cancel: &Cancel, history: &mut History, out: &mut Stream) -> Result<()> {
        out.write(row(["REVISION", "TIME", "CHANGE", "VERSION", "SIZE"]).as_bytes())?;
        while let Some(Version { revision, time, kv }) = history.next()? {
            cancel.check()?;
            let revision = revision.to_string();
            let time = time.map_or_else(|| "-".to_owned(), text::event_time);
            let row = match kv {
                Some(kv) => {
                    let bytes = size(kv.value.len() as u64);
                    let version = kv.version.to_string();
                    row([&revision, &time, "put", &version, &bytes])
                }
                None => row([&revision, &time, "delete", "", ""]),
            };
            out.write(row.as_bytes())?;
        }
        if !history.missing.is_empty() {
            let ranges = show_ranges(&history.missing);
            let note = format!("not every change is recorded for revisions {ranges}\n");
            out.write(note.as_bytes())?;
        }
        Ok(())
    }
}

/// A line of the table. Rows are written one by one, so the widths are fixed.
fn row([revision, time, change, version, size]: [&str; 5]) -> String {
    let row = format!("{revision:>10}  {time:20}  {change:6}  {version:>7}  {size}");
    row.trim_end().to_owned() + "\n"
}
