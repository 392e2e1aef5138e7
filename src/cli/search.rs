//! `deltafold search`: its arguments, and what was found as a table or JSON.
//!
//! `ops::read::search` finds it.

use super::objects::PrefixArgs;
use super::render::GrowingTable;
use super::stream::Stream;
use super::{BackupArgs, Ended, Output, text};
use crate::base::Cancel;
use crate::error::Result;
use crate::mvcc::Revision;
use crate::objects::names::NameSearch;
use crate::objects::resource::KeyNames;
use crate::ops::read::json::KeyJson;
use crate::ops::read::search::FoundNames;
use clap::Args;
use serde::Serialize;

/// Find objects and keys by words in their names, also those that were deleted
///
/// All words must be in the name, the namespace, the kind or the key, in any case. Exact names come first, and Events last.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Find what is called so, at any time:
      deltafold search checkout --store s3://backups/etcd-main
  Find the Deployments of that name:
      deltafold search deploy checkout --store s3://backups/etcd-main

--output json prints one object.")]
pub(super) struct SearchArgs {
    /// Words, such as `checkout`, `deploy checkout` or `configmap/shop/settings`
    #[arg(value_name = "WORD", required = true)]
    words: Vec<String>,
    /// ID of the timeline to read, from `deltafold list --deep` [default: the newest timeline]
    #[arg(long, value_name = "ID")]
    timeline: Option<String>,
    #[command(flatten)]
    prefix: PrefixArgs,
    #[command(flatten)]
    backup: BackupArgs,
}

/// The fields before the list.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Head<'a> {
    /// The newest revision that was read.
    revision: Revision,
    /// The timeline's ID; null for a plain snapshot file.
    timeline: Option<&'a str>,
    /// Warnings for the operator.
    warnings: &'a [String],
}

/// A key that was found.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct FoundJson<'a> {
    #[serde(flatten)]
    key: KeyJson<'a>,
    /// The name by which `get` finds the object, such as `deployment/shop/web`; null if the key is none of a known kind.
    object: Option<String>,
    /// The revision of its newest change; if that is a deletion which no snapshot records, the one by which it happened.
    revision: Revision,
    /// The time at which the snapshotter received the change (RFC 3339); null if no delta records it.
    time: Option<&'a str>,
    /// Whether it was deleted.
    deleted: bool,
}

impl SearchArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let words = NameSearch::parse(&self.words.join(" "));
        let prefixes = self.prefix.etcd_prefixes();
        let backup = self.backup.backup(cancel)?;
        let mut found = FoundNames::read(&backup, self.timeline.as_deref(), &prefixes, &words)?;
        let names = KeyNames::new(std::mem::take(&mut found.resources), &prefixes);
        let mut out = Stream::new();
        let printed = match output {
            Output::Json => print_json(&found, &names, &mut out),
            Output::Text => self.print_text(&found, &names, &mut out),
        };
        out.end(printed)
    }

    fn print_text(&self, found: &FoundNames, names: &KeyNames, out: &mut Stream) -> Result<()> {
        if found.keys.is_empty() {
            let none = format!("nothing is called so up to revision {}\n", found.revision);
            return out.write(none.as_bytes());
        }
        let mut table = GrowingTable::new(["OBJECT", "REVISION", "LAST CHANGE"], true);
        let mut print = |line: &str| out.write(line.as_bytes());
        for key in &found.keys {
            let name = names.object(&key.key).map(|object| object.to_string());
            let time = key.time.as_deref().map(text::event_time);
            let time = time.unwrap_or_else(|| "-".to_owned());
            let row = vec![
                name.unwrap_or_else(|| text::key(&key.key).into_owned()),
                key.revision.to_string(),
                if key.is_deleted {
                    format!("{time}  deleted")
                } else {
                    time
                },
            ];
            table.add(row, None, &mut print)?;
        }
        table.end(&mut print)
    }
}

fn print_json(found: &FoundNames, names: &KeyNames, out: &mut Stream) -> Result<()> {
    let head = Head {
        revision: found.revision,
        timeline: found.timeline.as_deref(),
        warnings: &found.warnings,
    };
    out.begin_list(&head, "found")?;
    for key in &found.keys {
        out.item(&FoundJson {
            key: KeyJson::new(&key.key, None),
            object: names.object(&key.key).map(|object| object.to_string()),
            revision: key.revision,
            time: key.time.as_deref(),
            deleted: key.is_deleted,
        })?;
    }
    out.end_list()
}
