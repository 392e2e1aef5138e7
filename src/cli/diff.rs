//! `deltafold diff`: its arguments, and what changed in words.

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
/// Keys come in the order of their bytes. A key that was put again counts as changed, with the same
/// value, too.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Since noon:
      deltafold diff --from 2026-11-20T12:00:00Z --store s3://backups/etcd-main
  Between two revisions, in one namespace, with the values:
      deltafold diff --from 120000 --to 120400 --prefix /registry/secrets/payments/ --store s3://backups/etcd-main --output json

+ is added, ~ changed, - deleted. --output json prints one object: docs/diff-result.schema.json.")]
pub(super) struct DiffArgs {
    /// The first point: a revision or a time
    #[arg(long, value_name = "REV|TIME", value_parser = parse_point)]
    from: Target,
    /// The second point: a revision or a time [default: the newest]
    #[arg(long, value_name = "REV|TIME", value_parser = parse_point)]
    to: Option<Target>,
    /// Only keys that begin so
    #[arg(long, value_name = "P")]
    prefix: Option<OsString>,
    /// Take this timeline, by its ID in `deltafold list --deep` [default: the newest]
    #[arg(long, value_name = "ID")]
    timeline: Option<String>,
    #[command(flatten)]
    backup: BackupArgs,
}

/// A revision, or a time.
fn parse_point(s: &str) -> Result<Target, String> {
    match s.parse() {
        Ok(r) if r > 0 => Ok(Target::Revision(Revision(r))),
        Ok(r) => Err(format!("{r} is no revision: they begin at 1")),
        Err(_) => flag_values::time(s)
            .map(Target::Time)
            .map_err(|e| format!("neither a revision nor a time: {e}")),
    }
}

/// What stands before the list of changes.
#[derive(JsonSchema, Serialize)]
pub(super) struct Head<'a> {
    /// The revision of the first point.
    from_revision: Revision,
    /// The revision of the second point.
    to_revision: Revision,
    /// The timeline's ID; null of a plain snapshot file.
    timeline: Option<&'a str>,
    /// What an operator should know.
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
    // Both may say the same.
    let more = new.warnings.iter().filter(|w| !old.warnings.contains(w));
    let head = Head {
        from_revision: old.target,
        to_revision: new.target,
        timeline: new.timeline_id(),
        warnings: old.warnings.iter().chain(more).collect(),
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
        let revision = |kv: crate::mvcc::KeyValue<'_>| kv.mod_revision.to_string();
        let (mark, count, revisions) = match (kind, changed.old.map(revision)) {
            (ChangeKind::Added, _) => ('+', &mut added, revision(kv)),
            (ChangeKind::Changed, was) => (
                '~',
                &mut differ,
                format!("{} to {}", was.unwrap_or_default(), revision(kv)),
            ),
            (ChangeKind::Deleted, _) => ('-', &mut deleted, revision(kv)),
        };
        *count += 1;
        let object = Object::from_key(kv.key, Some(kv.value));
        let kind = object.and_then(|o| Some(format!("{}, ", o.kind?)));
        let kind = kind.unwrap_or_default();
        let line = format!(
            "{mark} {} ({}revision {revisions})\n",
            text::key(kv.key),
            text::key(kind.as_bytes())
        );
        out.write(line.as_bytes())?;
    }
    let sum = format!(
        "{added} added, {differ} changed, {deleted} deleted from revision {} to {}\n",
        old.target, new.target
    );
    out.write(sum.as_bytes())
}
