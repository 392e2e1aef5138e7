//! `deltafold deleted`: its arguments, and what was deleted as a table or JSON.
//!
//! `ops::read::deleted` finds it.

use super::objects::{NameArgs, ObjectArgs};
use super::stream::Stream;
use super::text::{self, Row, Text};
use super::{BackupArgs, Ended, Output};
use crate::base::plural::count;
use crate::base::shell;
use crate::base::{Cancel, duration};
use crate::error::{Reason, Result};
use crate::mvcc::{KeyRange, Revision};
use crate::objects::reference::Reference;
use crate::objects::resource::{KeyNames, ObjectName, Resource};
use crate::ops::read::deleted::{Deleted, DeletedKey, Owner};
use crate::ops::read::json::KeyJson;
use crate::prefix::select::{At, StateRequest};
use chrono::Utc;
use clap::Args;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::HashMap;

/// Show what was deleted in a span of time, and how to get it back
///
/// Objects of Kubernetes are shown with their owners, and a deleted namespace in one line with what was in it. Events
/// are counted, since they expire. etcd does not record who deleted something: the API server's audit log does.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Show what was deleted in the last two hours:
      deltafold deleted --since 2h --store s3://backups/etcd-main
  Show the ConfigMaps of a namespace that were deleted between two moments:
      deltafold deleted configmaps -n shop --since 'yesterday 14:00' --until 'yesterday 18:00' \\
          --store s3://backups/etcd-main

--output json prints one object: deltafold schema deleted.")]
pub(super) struct DeletedArgs {
    /// Only show objects of this kind: its name, plural or short name
    #[arg(value_name = "KIND")]
    kind: Option<String>,
    /// Begin of the span: a duration before now such as 2h, a time such as "yesterday 14:00", or a revision
    #[arg(long, value_name = "DURATION|TIME|REV", value_parser = parse_since)]
    since: At,
    /// End of the span, as --since [default: the newest revision]
    #[arg(long, value_name = "DURATION|TIME|REV", value_parser = parse_since)]
    until: Option<At>,
    #[command(flatten)]
    names: NameArgs,
    /// ID of the timeline to read, from `deltafold list --deep` [default: the newest timeline]
    #[arg(long, value_name = "ID")]
    timeline: Option<String>,
    #[command(flatten)]
    objects: ObjectArgs,
    #[command(flatten)]
    backup: BackupArgs,
}

/// Parses a duration before now, a time or a revision.
fn parse_since(s: &str) -> Result<At, String> {
    if let Ok(before) = duration::parse(s)
        && s.parse::<i64>().is_err()
    {
        let time = Utc::now() - before;
        return Ok(At::Time(time));
    }
    At::parse(s)
}

/// The fields before the list of deletions.
#[derive(JsonSchema, Serialize)]
pub(super) struct Head<'a> {
    /// The revision of the first point.
    from_revision: Revision,
    /// The revision of the second point.
    to_revision: Revision,
    /// The timeline's ID; null for a plain snapshot file.
    timeline: Option<&'a str>,
    /// Warnings for the operator.
    warnings: &'a [String],
}

/// A deleted key.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "Deleted")]
pub(super) struct DeletedJson<'a> {
    #[serde(flatten)]
    key: KeyJson<'a>,
    /// The name by which `get` finds the object, such as `deployment/shop/web`; null if the key is none of a known
    /// kind.
    object: Option<String>,
    /// The revision of the last deletion; null if no snapshot records it.
    revision: Option<Revision>,
    /// When the deletion was recorded in a delta (RFC 3339); null if no delta records it.
    time: Option<&'a str>,
    /// The owner of the object; null if it had none, or if it cannot be decoded.
    owner: Option<&'a Owner>,
    /// Whether the key exists again at the second point.
    recreated: bool,
}

impl DeletedArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let keys = self.objects.keys()?;
        let backup = self.backup.backup(cancel)?;
        let request = |at| StateRequest {
            at,
            timeline: self.timeline.clone(),
            or_newest: true,
        };
        let points = [
            &request(self.since),
            &request(self.until.unwrap_or_default()),
        ];
        let prefixes = self.names.etcd_prefixes();
        let range = |resources: &[Resource]| self.range(resources);
        let mut deleted = Deleted::read(&backup, points, &prefixes, range, &keys)?;
        let names = KeyNames::new(std::mem::take(&mut deleted.resources), &prefixes);
        let mut out = Stream::new();
        let printed = match output {
            Output::Json => print_json(cancel, &deleted, &names, &mut out),
            Output::Text => out.write(self.text(&deleted, &names).as_bytes()),
        };
        out.end(printed)
    }

    /// Returns the keys of the kind and the namespace of the arguments.
    fn range(&self, resources: &[Resource]) -> Result<KeyRange> {
        let namespace = self.names.namespace.as_deref();
        let prefixes = &self.names.etcd_prefixes();
        let Some(kind) = &self.kind else {
            return Ok(match namespace {
                None => KeyRange::All,
                Some(_) => {
                    let namespaced = resources.iter().filter(|r| r.is_namespaced);
                    KeyRange::prefixes(namespaced.flat_map(|r| r.prefixes(prefixes, namespace)))
                }
            });
        };
        let reference = Reference::parse(kind, None).filter(|r| r.name.is_none());
        let resource = reference.map(|r| r.resource(resources)).transpose()?;
        match resource.flatten() {
            Some(resource) => Ok(KeyRange::prefixes(resource.prefixes(prefixes, namespace))),
            None => Err(Reason::Usage.error(format!(
                "\"{kind}\" is neither a kind of Kubernetes' own nor of a CustomResourceDefinition in the backup"
            ))),
        }
    }

    fn text(&self, deleted: &Deleted, names: &KeyNames) -> String {
        let all = deleted.keys.iter().map(|d| (d, names.object(&d.key)));
        let all: Vec<(&DeletedKey, Option<ObjectName<'_>>)> = all.collect();
        // Unless a kind or a namespace is asked for, a deleted namespace stands for all that was in it.
        let is_summary = self.kind.is_none() && self.names.namespace.is_none();
        let objects = all.iter().filter_map(|(_, object)| *object);
        let namespaces = objects.filter(|o| is_summary && kind_of(o) == "namespaces");
        let mut inside: HashMap<&str, usize> = namespaces.map(|o| (o.name, 0)).collect();
        let mut events = 0;
        let mut shown = Vec::new();
        for &(d, object) in &all {
            let namespace = object.and_then(|o| o.namespace);
            if let Some(count) = namespace.and_then(|n| inside.get_mut(n)) {
                *count += 1;
            } else if self.kind.is_none() && object.is_some_and(|o| kind_of(&o) == "events") {
                events += 1;
            } else {
                shown.push((d, object));
            }
        }
        let mut text = Text::new();
        let rows = shown.iter().map(|&(d, object)| row(d, object, &inside));
        let rows: Vec<Row> = rows.collect();
        if !rows.is_empty() {
            text.table(&["REVISION", "TIME", "DELETED", "OWNER"], &rows);
        }
        if events > 0 {
            text.line(format_args!(
                "{} expired or were deleted: `deltafold deleted events` shows them",
                count(events, "Event")
            ));
        }
        let (from, to) = (deleted.from.revision, deleted.to.revision);
        if all.is_empty() {
            text.line(format_args!(
                "nothing was deleted from revision {from} to {to}"
            ));
        }
        // What has an owner is made anew by it.
        let without_owner = shown
            .iter()
            .rfind(|(d, object)| d.owner.is_none() && !d.is_recreated && object.is_some());
        if let Some((d, Some(object))) = without_owner {
            let before = d.revision.map_or(from, Revision::previous);
            text.line("To bring one back:");
            // It is copied, so it is not wrapped.
            let (object, before) = (object.to_string(), before.to_string());
            let get = ["deltafold", "get", &object, "--revision", &before];
            let get = shell::command([&get[..], &["-o", "yaml", "--clean"]].concat());
            let get = format!("  {get} |\n    kubectl apply -f -\n");
            text.block(&get);
        }
        text.end()
    }
}

/// Returns the row of a deletion. `inside` has the number of deleted objects in each deleted namespace.
fn row(d: &DeletedKey, object: Option<ObjectName<'_>>, inside: &HashMap<&str, usize>) -> Row {
    let mut name = match object {
        Some(object) => object.to_string(),
        None => text::key(&d.key).into_owned(),
    };
    let namespace = object.filter(|o| kind_of(o) == "namespaces");
    if let Some(&objects) = namespace.and_then(|o| inside.get(o.name)) {
        name += &format!(" and {} in it", count(objects, "object"));
    }
    if d.is_recreated {
        name += " (exists again)";
    }
    let owner = d.owner.as_ref();
    Row::new(vec![
        d.revision.map_or_else(String::new, |r| r.to_string()),
        d.time.as_deref().map_or_else(String::new, text::event_time),
        name,
        owner.map_or_else(String::new, |o| format!("{}/{}", o.kind, o.name)),
    ])
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
        from_revision: deleted.from.revision,
        to_revision: deleted.to.revision,
        timeline: deleted.to.timeline_id(),
        warnings: &deleted.to.warnings,
    };
    out.begin_list(&head, "deleted")?;
    for d in &deleted.keys {
        cancel.check()?;
        out.item(&DeletedJson {
            key: KeyJson::new(&d.key, None),
            object: names.object(&d.key).map(|o| o.to_string()),
            revision: d.revision,
            time: d.time.as_deref(),
            owner: d.owner.as_ref(),
            recreated: d.is_recreated,
        })?;
    }
    out.end_list()
}
