//! `deltafold deleted`: its arguments, and what was deleted as a table or JSON.
//!
//! `ops::read::deleted` finds it.

use super::history::Missing;
use super::objects::{LabelArgs, ObjectArgs, SelectArgs};
use super::recover;
use super::render::{Blocks, Cell, Row};
use super::stream::Stream;
use super::{BackupArgs, Ended, Output};
use super::{render, terminal, text};
use crate::backup::chain::show_ranges;
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::base::plural::count;
use crate::error::Result;
use crate::mvcc::{KeyRange, Revision};
use crate::objects::EncryptionKeys;
use crate::objects::key::EtcdPrefixes;
use crate::objects::resource::{KeyNames, ObjectName, Resource};
use crate::ops::read::deleted::{Deleted, DeletedKey, Deletion, ObjectsRead, Owner};
use crate::ops::read::json::KeyJson;
use crate::ops::read::span::Begin;
use crate::prefix::open::BackupLocation;
use crate::prefix::select::{At, StateRequest};
use clap::Args;
use serde::Serialize;
use std::collections::HashMap;

/// Show what was deleted, and how to get it back
///
/// Objects of Kubernetes are shown with their owners, and a deleted namespace in one line with what was in it. Events
/// are counted, since they expire. etcd does not record who deleted something: the API server's audit log does.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Show all deletions that the backup holds:
      deltafold deleted --store s3://backups/etcd-main
  Show what was deleted in the last two hours:
      deltafold deleted --since 2h --store s3://backups/etcd-main
  Show the ConfigMaps of a namespace that were deleted between two moments:
      deltafold deleted configmaps -n shop --since 'yesterday 14:00' --until 'yesterday 18:00' \\
          --store s3://backups/etcd-main

--output json prints one object.")]
pub(super) struct DeletedArgs {
    #[command(flatten)]
    span: SpanArgs,
    /// ID of the timeline to read, from `deltafold list --deep` [default: the newest timeline]
    #[arg(long, value_name = "ID")]
    timeline: Option<String>,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    labels: LabelArgs,
    #[command(flatten)]
    objects: ObjectArgs,
    #[command(flatten)]
    backup: BackupArgs,
}

/// The span in which deletions are looked for.
#[derive(Debug, Args)]
#[command(next_help_heading = "Span")]
pub(super) struct SpanArgs {
    /// Begin of the span: a duration before now such as 2h, a time such as "yesterday 14:00", or a revision [default: all
    /// that the backup holds]
    #[arg(long, value_name = "DURATION|TIME|REV", value_parser = At::since)]
    pub(super) since: Option<At>,
    /// End of the span, as --since [default: the newest revision]
    #[arg(long, value_name = "DURATION|TIME|REV", value_parser = At::until)]
    pub(super) until: Option<At>,
}

/// Deletions that are undone.
#[derive(Debug, Args)]
#[command(
    next_help_heading = "Deletions",
    mut_arg("since", |a| a.requires("deleted")),
    mut_arg("until", |a| a.requires("deleted"))
)]
pub(super) struct DeletionArgs {
    /// Bring back what was deleted from --since to --until and is not there now, each as it was just before
    #[arg(long, conflicts_with_all = ["revision", "time"], value_parser = yes_or_no)]
    pub(super) deleted: bool,
    #[command(flatten)]
    pub(super) span: SpanArgs,
}

/// Which deletions are read, and what of them.
pub(super) struct Wanted<'a> {
    /// The timeline; `None` for the newest one.
    pub(super) timeline: Option<&'a str>,
    /// Returns the keys, by the kinds of objects.
    pub(super) range: &'a dyn Fn(&[Resource]) -> Result<KeyRange>,
    /// The labels of objects; `None` for any.
    pub(super) labels: Option<&'a LabelArgs>,
    pub(super) prefixes: &'a EtcdPrefixes,
    /// What opens encrypted objects.
    pub(super) keys: &'a EncryptionKeys,
    /// Whether the records are read, too.
    pub(super) records: bool,
    /// Whether Events are only counted.
    pub(super) counts_events: bool,
}

impl SpanArgs {
    /// Reads the deletions of the span. Also returns the backup.
    ///
    /// # Errors
    /// As [`Deleted::read`].
    pub(super) fn read(
        &self,
        wanted: &Wanted<'_>,
        backup: &BackupArgs,
        cancel: &Cancel,
    ) -> Result<(BackupLocation, Deleted)> {
        let until = self.until.unwrap_or_default();
        let backup = backup.backup_at(until, cancel)?;
        let begin = self.since.map_or(Begin::Oldest, Begin::After);
        let end = end_of_span(until, wanted.timeline);
        let labels = wanted.labels;
        let objects = ObjectsRead {
            keys: wanted.keys,
            labels: &|object| labels.is_none_or(|labels| labels.match_object(object)),
            records: wanted.records,
        };
        let mut deleted = Deleted::read(
            &backup,
            begin,
            &end,
            wanted.prefixes,
            wanted.range,
            &objects,
            wanted.counts_events,
        )?;
        let are_labelled = |d: &DeletedKey| labels.is_none_or(|l| l.match_seen(d.has_labels));
        deleted.keys.retain(are_labelled);
        Ok((backup, deleted))
    }
}

/// Returns the request for the end of a span: it may lie in a hole, and after the newest snapshot.
pub(super) fn end_of_span(at: At, timeline: Option<&str>) -> StateRequest {
    StateRequest {
        at,
        timeline: timeline.map(str::to_owned),
        or_newest: true,
        or_before: true,
    }
}

/// The fields before the list of deletions.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Head<'a> {
    /// The revision of the first point; 0 if all deletions that the backup holds are listed.
    from_revision: Revision,
    /// The revision of the second point.
    to_revision: Revision,
    /// The timeline's ID; null for a plain snapshot file.
    timeline: Option<&'a str>,
    /// Ranges of revisions of the span for which the snapshots do not record every change, in order. What was deleted there
    /// is known from a full snapshot that follows, if there is one.
    missing: Vec<Missing>,
    /// Warnings for the operator.
    warnings: &'a [String],
}

/// A deleted key.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct DeletedJson<'a> {
    #[serde(flatten)]
    key: KeyJson<'a>,
    /// The name by which `get` finds the object, such as `deployment/shop/web`; null if the key is none of a known
    /// kind.
    object: Option<String>,
    /// The last deletion.
    #[serde(flatten)]
    deletion: &'a Deletion,
    /// The newest revision at which it is known to have been there and not about to be deleted (a deletionTimestamp).
    before: Revision,
    /// The owner of the object; null if it had none, or if it cannot be decoded.
    owner: Option<&'a Owner>,
    /// Whether the key exists again at the second point.
    recreated: bool,
}

impl DeletedArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let keys = self.objects.keys()?;
        let prefixes = self.select.names.etcd_prefixes();
        let wanted = Wanted {
            timeline: self.timeline.as_deref(),
            range: &|kinds| self.select.keys_of(kinds),
            labels: Some(&self.labels),
            prefixes: &prefixes,
            keys: &keys,
            records: false,
            counts_events: output == Output::Text && self.select.words.is_empty(),
        };
        let (_, mut deleted) = self.span.read(&wanted, &self.backup, cancel)?;
        let names = KeyNames::new(std::mem::take(&mut deleted.resources), &prefixes);
        let mut out = Stream::new();
        let printed = match output {
            Output::Json => print_json(cancel, &deleted, &names, &mut out),
            Output::Text => out.write(self.text(&deleted, &names).as_bytes()),
        };
        let printed = printed.and_then(|()| self.labels.end(!self.select.words.is_empty()));
        out.end(printed)
    }

    fn text(&self, deleted: &Deleted, names: &KeyNames) -> String {
        let all = deleted.keys.iter().map(|d| (d, names.object(&d.key)));
        let all: Vec<(&DeletedKey, Option<ObjectName<'_>>)> = all.collect();
        // Unless something is asked for, a deleted namespace stands for all that was in it.
        let is_summary = !self.select.is_given();
        let objects = all
            .iter()
            .filter_map(|(d, object)| Some((d.deletion.revision, (*object)?)));
        let namespaces = objects.filter(|(_, o)| is_summary && kind_of(o) == "namespaces");
        let mut inside: HashMap<&str, Inside> = namespaces
            .map(|(ended, o)| (o.name, Inside { ended, objects: 0 }))
            .collect();
        let mut shown = Vec::new();
        for &(d, object) in &all {
            let namespace = object.and_then(|o| o.namespace);
            let inside = namespace.and_then(|n| inside.get_mut(n));
            // What was deleted later, was in a namespace of the same name that was made again.
            let is_later = |i: &&mut Inside| {
                i.ended
                    .is_some_and(|ended| d.deletion.revision > Some(ended))
            };
            if let Some(inside) = inside.filter(|i| !is_later(i)) {
                inside.objects += 1;
            } else {
                shown.push((d, object));
            }
        }
        let mut text = Blocks::default();
        let (from, to) = (deleted.from, deleted.to);
        let span = match from {
            Revision(0) => format!("up to revision {to}"),
            from => format!("after revision {from} up to {to}"),
        };
        text.line(format_args!("Deleted {span}"));
        let rows = shown.iter().map(|&(d, object)| row(d, object, &inside));
        if !shown.is_empty() {
            text.table(&["REVISION", "TIME", "DELETED", "OWNER"], rows.collect());
        }
        if !deleted.missing.is_empty() {
            let ranges = show_ranges(&deleted.missing);
            text.line(format_args!(
                "not every change is recorded for revisions {ranges}"
            ));
        }
        if deleted.events > 0 {
            text.line(format_args!(
                "{} expired or were deleted: `deltafold deleted events` shows them",
                count(deleted.events, "Event")
            ));
        }
        if all.is_empty() && deleted.events == 0 {
            text.line("nothing was deleted");
        }
        // What has an owner is made anew by it.
        let without_owner = shown
            .iter()
            .rfind(|(d, object)| d.owner.is_none() && !d.is_recreated && object.is_some());
        if let Some((d, Some(object))) = without_owner {
            text.line("To bring one back:");
            text.command(&recover::command_for(object, d.before, &self.backup));
        }
        render::to_text(&text, terminal::stdout_width())
    }
}

/// A deleted namespace.
struct Inside {
    /// The revision of its deletion, if it is known.
    ended: Option<Revision>,
    /// The number of deleted objects in it.
    objects: usize,
}

/// Returns the row of a deletion.
fn row(d: &DeletedKey, object: Option<ObjectName<'_>>, inside: &HashMap<&str, Inside>) -> Row {
    let mut name = match object {
        Some(object) => object.to_string(),
        None => text::key(&d.key).into_owned(),
    };
    let namespace = object.filter(|o| kind_of(o) == "namespaces");
    if let Some(Inside { objects, .. }) = namespace.and_then(|o| inside.get(o.name)) {
        name += &format!(" and {} in it", count(*objects, "object"));
    }
    if d.is_recreated {
        name += " (exists again)";
    }
    let owner = d.owner.as_ref();
    let cells: [Cell; 4] = [
        d.deletion.revision.map_or(Cell::None, Cell::Revision),
        text::deletion_time(&d.deletion).into(),
        name.into(),
        owner.map(|o| format!("{}/{}", o.kind, o.name)).into(),
    ];
    Vec::from(cells).into()
}

fn kind_of(object: &ObjectName<'_>) -> String {
    object.resource.full_name()
}

fn print_json(
    cancel: &Cancel,
    deleted: &Deleted,
    names: &KeyNames,
    out: &mut Stream,
) -> Result<()> {
    let head = Head {
        from_revision: deleted.from,
        to_revision: deleted.to,
        timeline: deleted.timeline.as_deref(),
        missing: deleted.missing.iter().map(Missing::from).collect(),
        warnings: &deleted.warnings,
    };
    out.begin_list(&head, "deleted")?;
    for d in &deleted.keys {
        cancel.check()?;
        out.item(&DeletedJson {
            key: KeyJson::new(&d.key, None),
            object: names.object(&d.key).map(|o| o.to_string()),
            deletion: &d.deletion,
            before: d.before,
            owner: d.owner.as_ref(),
            recreated: d.is_recreated,
        })?;
    }
    out.end_list()
}
