//! `deltafold diff`: its arguments, and the changes as text or JSON.
//!
//! The comparison itself is `ops::read::diff`.

use super::stream::Stream;
use super::{BackupArgs, Ended, Output, text};
use crate::base::{Cancel, flag_values};
use crate::error::Result;
use crate::mvcc::{KeyRange, Revision};
use crate::ops::fold::{Request, Source, Target};
use crate::ops::read::diff::Diff;
use crate::ops::read::json::{ChangeKind, KeyChange};
use crate::ops::read::kubernetes::Object;
use crate::ops::tags::without_excluded;
use clap::Args;
use schemars::JsonSchema;
use serde::Serialize;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

/// Show which keys were added, changed and deleted between two points
///
/// Keys are sorted by their bytes. A key that was written again counts as changed, even with the same value.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Show the changes since noon:
      deltafold diff --from 2026-11-20T12:00:00Z --store s3://backups/etcd-main
  Show the changes between two revisions in one namespace, with the values:
      deltafold diff --from 120000 --to 120400 --prefix /registry/secrets/payments/ \\
          --store s3://backups/etcd-main --output json

Marks in the list:
  +  the key was added
  ~  the key was changed
  -  the key was deleted

--output json prints one object: docs/diff-result.schema.json.")]
pub(super) struct DiffArgs {
    /// First point: a revision or a time (RFC 3339)
    ///
    /// DELTAFOLD_FROM also sets --from of other commands.
    #[arg(long, value_name = "REV|TIME", value_parser = parse_point)]
    from: Target,
    /// Second point: a revision or a time (RFC 3339) [default: the newest revision]
    ///
    /// DELTAFOLD_TO also sets --to of other commands.
    #[arg(long, value_name = "REV|TIME", value_parser = parse_point)]
    to: Option<Target>,
    /// Only compare keys with this prefix
    #[arg(long, value_name = "P")]
    prefix: Option<OsString>,
    /// ID of the timeline to read, from `deltafold list --deep` [default: the newest timeline]
    #[arg(long, value_name = "ID")]
    timeline: Option<String>,
    #[command(flatten)]
    backup: BackupArgs,
}

/// Parses a revision or a time.
fn parse_point(s: &str) -> Result<Target, String> {
    match s.parse() {
        Ok(r) if r > 0 => Ok(Target::Revision(Revision(r))),
        Ok(r) => Err(format!("{r} is not a revision: revisions begin at 1")),
        Err(_) => flag_values::time(s)
            .map(Target::Time)
            .map_err(|e| format!("neither a revision nor a time: {e}")),
    }
}

/// The fields before the list of changes.
#[derive(JsonSchema, Serialize)]
pub(super) struct Head<'a> {
    /// The revision of the first point.
    from_revision: Revision,
    /// The revision of the second point.
    to_revision: Revision,
    /// The timeline's ID; null for a plain snapshot file.
    timeline: Option<&'a str>,
    /// Warnings for the operator.
    warnings: Vec<&'a String>,
}

impl DiffArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let backup = self.backup.backup(cancel)?;
        let request = |target| Request {
            target,
            timeline: self.timeline.clone(),
        };
        let prefix = self.prefix.as_ref().map(|p| p.as_bytes().to_vec());
        let range = KeyRange::Prefix(prefix.unwrap_or_default());
        let (old, new, mut diff) = without_excluded(|| {
            let (ctx, old) = backup.open(&request(self.from))?;
            let (_, new) = backup.open(&request(self.to.unwrap_or_default()))?;
            let diff = Diff::read(ctx, &old, &new, &range)?;
            Ok((old, new, diff))
        })?;
        let mut out = Stream::new();
        let printed = match output {
            Output::Json => print_json(cancel, &old, &new, &mut diff, &mut out),
            Output::Text => print_text(cancel, &old, &new, &mut diff, &mut out),
        };
        out.end(printed)
    }
}

fn print_json(
    cancel: &Cancel,
    old: &Source,
    new: &Source,
    diff: &mut Diff,
    out: &mut Stream,
) -> Result<()> {
    // Both points may have the same warnings.
    let only_new = new.warnings.iter().filter(|w| !old.warnings.contains(w));
    let head = Head {
        from_revision: old.target,
        to_revision: new.target,
        timeline: new.timeline_id(),
        warnings: old.warnings.iter().chain(only_new).collect(),
    };
    out.begin_list(&head, "changes")?;
    while let Some(changed) = diff.next()? {
        cancel.check()?;
        if let Some(change) = KeyChange::new(&changed) {
            out.item(&change)?;
        }
    }
    out.end_list()
}

fn print_text(
    cancel: &Cancel,
    old: &Source,
    new: &Source,
    diff: &mut Diff,
    out: &mut Stream,
) -> Result<()> {
    let (mut added, mut differ, mut deleted) = (0u64, 0u64, 0u64);
    while let Some(changed) = diff.next()? {
        cancel.check()?;
        let Some(kind) = ChangeKind::new(&changed) else {
            continue;
        };
        let Some(kv) = changed.new.or(changed.old) else {
            continue;
        };
        let revision = kv.mod_revision;
        let (mark, count, revisions) = match (kind, changed.old) {
            (ChangeKind::Added, _) => ('+', &mut added, revision.to_string()),
            (ChangeKind::Changed, Some(old)) => {
                let revisions = format!("{} to {revision}", old.mod_revision);
                ('~', &mut differ, revisions)
            }
            (ChangeKind::Changed, None) => ('~', &mut differ, format!(" to {revision}")),
            (ChangeKind::Deleted, _) => ('-', &mut deleted, revision.to_string()),
        };
        *count += 1;
        let object = Object::from_key(kv.key, Some(kv.value));
        let object_kind = object.and_then(|o| Some(format!("{}, ", o.kind?)));
        let line = format!(
            "{mark} {} ({}revision {revisions})\n",
            text::key(kv.key),
            text::key(object_kind.unwrap_or_default().as_bytes())
        );
        out.write(line.as_bytes())?;
    }
    let sum = format!(
        "{added} added, {differ} changed, {deleted} deleted from revision {} to {}\n",
        old.target, new.target
    );
    out.write(sum.as_bytes())
}
