//! `deltafold diff`: its arguments, and the changes as text or JSON.
//!
//! The comparison itself is `ops::read::diff`.

use super::objects::{LabelArgs, ObjectArgs, SelectArgs};
use super::stream::Stream;
use super::terminal::{self, Style};
use super::{BackupArgs, Ended, Output, text};
use crate::base::flag_values::yes_or_no;
use crate::base::plural::count;
use crate::base::{Cancel, printable};
use crate::error::{Reason, Result};
use crate::mvcc::{KeyValue, Revision};
use crate::objects::key::ObjectKey;
use crate::objects::{EncryptionKeys, Object};
use crate::ops::options::Uncovered;
use crate::ops::read::deleted::Deletion;
use crate::ops::read::diff::{Diff, Omitted};
use crate::ops::read::json::{ChangeKind, KeyChange};
use crate::prefix::open::{BackupLocation, State};
use crate::prefix::select::{At, StateRequest};
use clap::Args;
use clap::builder::Resettable;
use serde::Serialize;
use std::ffi::OsString;

/// Show which keys were added, changed and deleted between two points
///
/// Keys are sorted by their bytes. A key that was written again counts as changed, even with the same value. Of
/// Kubernetes objects, the fields that changed are shown, with the managers who wrote them.
#[derive(Debug, Args)]
#[command(
    mut_arg("store", |a| a.required_unless_present_any(["snapshot", "words"])),
    mut_arg("words", |a| a.value_name("OBJECT|FILE").conflicts_with(Resettable::Reset).help(
        "Objects: KIND/NAMESPACE/NAME, KIND NAME..., or all of KIND; or, without --from, two plain snapshot files"
    )),
    after_long_help = "\
Examples:
  Show the changes since noon:
      deltafold diff --from 2026-11-20T12:00:00Z --store s3://backups/etcd-main
  Show how a Deployment changed between two revisions:
      deltafold diff deployment/shop/web --from 120000 --to 120400 --store s3://backups/etcd-main
  Show the changes in one namespace since yesterday, with the values:
      deltafold diff -n payments --from yesterday --store s3://backups/etcd-main --output json
  Compare two plain snapshot files:
      deltafold diff monday.db tuesday.db

Marks in the list:
  +  the key was added
  ~  the key was changed
  -  the key was deleted

--output json prints one object.")]
pub(super) struct DiffArgs {
    /// First point: a revision, or a time such as "yesterday 14:00"; see --time of `deltafold get`
    ///
    /// DELTAFOLD_FROM also sets --from of other commands.
    #[arg(long, value_name = "REV|TIME", value_parser = At::since, required_unless_present_any = ["from_snapshot", "words"])]
    from: Option<At>,
    /// First state: this plain snapshot file, at its newest revision or at --from
    #[arg(long, value_name = "FILE")]
    from_snapshot: Option<String>,
    /// Second point: a revision or a time, as --from [default: the newest revision]
    ///
    /// DELTAFOLD_TO also sets --to of other commands.
    #[arg(long, value_name = "REV|TIME", value_parser = At::until)]
    to: Option<At>,
    /// ID of the timeline to read, from `deltafold list --deep` [default: the newest timeline]
    #[arg(long, value_name = "ID")]
    timeline: Option<String>,
    /// Show the values of Secrets in the text, too
    #[arg(long, value_parser = yes_or_no)]
    show_secrets: bool,
    #[command(flatten)]
    uncovered: Uncovered,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    labels: LabelArgs,
    #[command(flatten)]
    objects: ObjectArgs,
    #[command(flatten)]
    backup: BackupArgs,
}

/// The fields before the list of changes.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
    /// Returns the plain snapshot files of both sides. Two words without --from are files.
    fn files(&self) -> Result<(Option<String>, Option<String>)> {
        if self.from.is_some() || self.from_snapshot.is_some() {
            return Ok((self.from_snapshot.clone(), None));
        }
        match &self.select.words[..] {
            [old, new] => {
                let file = |word: &OsString| Some(word.to_string_lossy().into_owned());
                Ok((file(old), file(new)))
            }
            _ => Err(Reason::Usage
                .error("give the first point with --from REV|TIME, or two plain snapshot files")),
        }
    }

    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let (first, second) = self.files()?;
        let (from_at, to_at) = (self.from.unwrap_or_default(), self.to.unwrap_or_default());
        let first = match &first {
            Some(file) => Some(self.backup.file(file, from_at, cancel)?),
            // Each of the two times has a file of its own.
            None if self.backup.is_series() && matches!(from_at, At::Time(_)) => {
                Some(self.backup.backup_at(from_at, cancel)?)
            }
            None => None,
        };
        let backup = match &second {
            Some(file) => self.backup.file(file, to_at, cancel)?,
            None => self.backup.backup_at(to_at, cancel)?,
        };
        let request = |at| StateRequest {
            at,
            timeline: self.timeline.clone(),
            or_newest: self.uncovered.or_newest,
            // What is known is compared. A point that was given is meant.
            or_before: at == At::Newest,
        };
        let (mut from, to) = (request(from_at), request(to_at));
        if first.is_some() {
            // A backup of its own has other timelines.
            from.timeline = None;
        }
        let mut select = self.select.clone();
        if second.is_some() {
            select.words.clear();
        }
        let range =
            |backup: &BackupLocation, state: &State| Ok(select.keys_in(backup, state, true)?.0);
        let mut diff = Diff::read(&backup, first.as_ref(), [&from, &to], &range)?;
        diff.omits_events_and_leases = select.words.is_empty() && select.prefix.is_empty();
        let keys = self.objects.keys()?;
        let mut out = Stream::new();
        let printed = match output {
            Output::Json => self.print_json(cancel, &mut diff, &keys, &mut out),
            Output::Text => self
                .print_text(cancel, &mut diff, &keys, &mut out)
                .and_then(|()| self.print_times(&diff, &mut out)),
        };
        let printed = printed.and_then(|()| self.labels.end(!self.select.words.is_empty()));
        out.end(printed)
    }

    fn print_text(
        &self,
        cancel: &Cancel,
        diff: &mut Diff<'_>,
        keys: &EncryptionKeys,
        out: &mut Stream,
    ) -> Result<()> {
        let (mut added, mut differ, mut deleted) = (0u64, 0u64, 0u64);
        let in_colour = terminal::stdout_has_colour();
        while let Some(changed) = diff.next()? {
            cancel.check()?;
            let versions = [changed.new, changed.old];
            if !self.labels.match_one(versions.iter().flatten(), keys) {
                continue;
            }
            let Some(kind) = ChangeKind::new(&changed) else {
                continue;
            };
            let Some(kv) = changed.new.or(changed.old) else {
                continue;
            };
            let revision = kv.mod_revision;
            let (mark, style, number, when) = match (kind, changed.old) {
                (ChangeKind::Added, _) => (
                    '+',
                    Style::Added,
                    &mut added,
                    format!("revision {revision}"),
                ),
                (ChangeKind::Changed, Some(old)) => {
                    let when = format!("revision {} to {revision}", old.mod_revision);
                    ('~', Style::Changed, &mut differ, when)
                }
                (ChangeKind::Changed, None) => {
                    ('~', Style::Changed, &mut differ, format!("to {revision}"))
                }
                (ChangeKind::Deleted, _) => {
                    let deletion = changed.deletion.as_ref();
                    let when = deletion_text(&deletion.cloned().unwrap_or_default(), revision);
                    ('-', Style::Deleted, &mut deleted, when)
                }
            };
            *number += 1;
            let object = ObjectKey::from_key(kv.key, Some(kv.value));
            let object_kind = object.and_then(|o| Some(format!("{}, ", o.kind?)));
            let details = format!("{}{when}", object_kind.unwrap_or_default());
            let line = format!(
                "{mark} {} ({})",
                text::key(kv.key),
                printable::line(&details)
            );
            let line = terminal::painted(style, &line, in_colour);
            out.write((line + "\n").as_bytes())?;
            let decode = |kv: &KeyValue<'_>| Object::of_record(kv, keys).ok();
            let versions = changed.old.as_ref().zip(changed.new.as_ref());
            if let Some((old, new)) = versions
                && let (Some(old), Some(new)) = (decode(old), decode(new))
            {
                let changes = text::changes(&new, Some(&old), self.show_secrets);
                out.write(changes.as_bytes())?;
            }
        }
        let (from, to) = diff.revisions();
        if !diff.has_keys() {
            let none = format!("no keys match, neither at revision {from} nor at {to}\n");
            return out.write(none.as_bytes());
        }
        let sum = format!(
            "{added} added, {differ} changed, {deleted} deleted from revision {from} to {to}\n"
        );
        out.write(sum.as_bytes())?;
        let Omitted { events, leases } = diff.omitted;
        let omitted = [(events, "Event"), (leases, "Lease")].into_iter();
        let omitted = omitted.filter(|(n, _)| *n > 0);
        let omitted: Vec<String> = omitted.map(|(n, kind)| count(n, kind)).collect();
        if omitted.is_empty() {
            return Ok(());
        }
        let omitted = omitted.join(" and ");
        let more = format!("and {omitted}: --prefix '' lists them, too\n");
        out.write(more.as_bytes())
    }

    /// Prints which times the revisions stand for, if the points were given as times.
    fn print_times(&self, diff: &Diff<'_>, out: &mut Stream) -> Result<()> {
        for (point, source) in [(self.from, &diff.from), (self.to, &diff.to)] {
            if let Some(At::Time(time)) = point {
                let line = format!(
                    "revision {} is as of {}\n",
                    source.revision,
                    text::local_time(time)
                );
                out.write(line.as_bytes())?;
            }
        }
        Ok(())
    }

    fn print_json(
        &self,
        cancel: &Cancel,
        diff: &mut Diff<'_>,
        keys: &EncryptionKeys,
        out: &mut Stream,
    ) -> Result<()> {
        // Both points may have the same warnings.
        let (old, new) = (&diff.from, &diff.to);
        let only_new = new.warnings.iter().filter(|w| !old.warnings.contains(w));
        let head = Head {
            from_revision: old.revision,
            to_revision: new.revision,
            timeline: new.timeline_id(),
            warnings: old.warnings.iter().chain(only_new).collect(),
        };
        out.begin_list(&head, "changes")?;
        while let Some(changed) = diff.next()? {
            cancel.check()?;
            let versions = [changed.new, changed.old];
            if !self.labels.match_one(versions.iter().flatten(), keys) {
                continue;
            }
            if let Some(change) = KeyChange::new(&changed, keys) {
                out.item(&change)?;
            }
        }
        out.end_list_with(&serde_json::json!({"omitted": diff.omitted}))
    }
}

/// When a key was deleted. `last` is the revision of its last version before.
fn deletion_text(deletion: &Deletion, last: Revision) -> String {
    let at = deletion.revision.map(|r| format!("at revision {r}"));
    let time = text::deletion_time(deletion).map(|time| match deletion.time {
        Some(_) => format!("on {time}"),
        None => time,
    });
    match [at, time].into_iter().flatten().collect::<Vec<_>>() {
        known if known.is_empty() => format!("revision {last}"),
        known => format!("deleted {}", known.join(" ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deletion_is_told_as_exactly_as_it_is_known() {
        let told = |revision: Option<i64>, time: Option<&str>, not_after: Option<&str>| {
            let deletion = Deletion {
                revision: revision.map(Revision),
                time: time.map(str::to_owned),
                not_after: not_after.map(str::to_owned),
            };
            deletion_text(&deletion, Revision(5))
        };
        let (event, full) = (
            Some("2026-11-21T02:30:00.7+01:00"),
            Some("2026-11-22T00:00:00Z"),
        );
        let shown = |time: Option<&str>| text::event_time(time.unwrap());
        assert_eq!(
            told(Some(7), event, None),
            format!("deleted at revision 7 on {}", shown(event))
        );
        assert_eq!(
            told(Some(7), None, full),
            format!("deleted at revision 7 by {}", shown(full))
        );
        assert_eq!(
            told(None, None, full),
            format!("deleted by {}", shown(full))
        );
        assert_eq!(told(Some(7), None, None), "deleted at revision 7");
        // The second point is the earlier one.
        assert_eq!(told(None, None, None), "revision 5");
    }
}
