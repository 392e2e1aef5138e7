//! `deltafold log`: its arguments, and what changed, one line a change or JSON lines.
//!
//! `ops::read::log` collects the changes.

use super::deleted::{SpanArgs, end_of_span};
use super::history::Missing;
use super::objects::{LabelArgs, ObjectArgs, SelectArgs};
use super::recover;
use super::render::{self, Blocks, GrowingTable};
use super::stream::Stream;
use super::terminal::{self, Style};
use super::{BackupArgs, Ended, Output, text};
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::base::plural::count;
use crate::error::Result;
use crate::mvcc::Revision;
use crate::objects::key::EtcdPrefixes;
use crate::objects::resource::KeyNames;
use crate::ops::read::json::KeyJson;
use crate::ops::read::log::{Change, Happened, Item, Log, Summary, Wanted};
use crate::ops::read::span::Begin;
use crate::ops::read::versions::Wall;
use chrono::TimeDelta;
use clap::Args;
use serde::Serialize;

/// Show what was created, changed and deleted, newest last
///
/// One line a change: when, what, up to three fields that changed, and the manager who wrote them. A manager is a program:
/// the API server's audit log has the person. Events and Leases are left out unless names or a prefix ask for them.
#[derive(Debug, Args)]
#[command(
    mut_arg("since", |a| a.help("Begin of the span: a duration before now such as 2h, a time such as \"yesterday 14:00\", or a revision [default: 24 hours before its end]")),
    after_long_help = "\
Examples:
  Show what changed in the last 24 hours of the backup:
      deltafold log --store s3://backups/etcd-main
  Show what was changed or deleted in a namespace yesterday between two and three:
      deltafold log -n shop --since 'yesterday 14:00' --until 'yesterday 15:00' \\
          --only changed,deleted --store s3://backups/etcd-main
  Show the changes of the Deployments of an application:
      deltafold log deployments -l app=web --since 7d --store s3://backups/etcd-main

If changes of some revisions are not recorded, a line names these revisions. If the history leaves another one, a line says \
where. --output json prints one JSON object a line.")]
pub(super) struct LogArgs {
    /// Only these changes: created, changed, deleted; separated by commas
    #[arg(
        long,
        value_name = "CHANGES",
        value_delimiter = ',',
        value_enum,
        hide_possible_values = true
    )]
    only: Vec<Happened>,
    /// Show the changes of a transaction together, below its revision
    #[arg(long, value_parser = yes_or_no)]
    by_transaction: bool,
    /// Show the values of Secrets, too
    #[arg(long, value_parser = yes_or_no)]
    show_secrets: bool,
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

/// A line about a change.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct ChangeJson<'a> {
    #[serde(flatten)]
    key: KeyJson<'a>,
    /// The name by which `get` finds the object, such as `deployment/shop/web`; null if the key is none of a known kind.
    object: Option<String>,
    #[serde(flatten)]
    change: Change,
}

/// The changes of a transaction, with --by-transaction.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct TransactionJson<'a> {
    /// The revision.
    revision: Revision,
    /// Its changes.
    changes: Vec<ChangeJson<'a>>,
}

/// A line between the changes: one of the fields is not null.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct MarkJson {
    /// Not every change of these revisions is recorded; null otherwise.
    missing: Option<Missing>,
    /// The history leaves another one here; null otherwise.
    wall: Option<Wall>,
}

/// The span, if no begin is given.
const LAST_DAY: TimeDelta = TimeDelta::days(1);

impl LogArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let keys = self.objects.keys()?;
        let prefixes = self.select.names.etcd_prefixes();
        let until = self.span.until.unwrap_or_default();
        let backup = self.backup.backup_at(until, cancel)?;
        let begin = self.span.since.map(Begin::After);
        let wanted = Wanted {
            begin: begin.unwrap_or(Begin::Before(LAST_DAY)),
            end: end_of_span(until, self.timeline.as_deref()),
            prefixes: &prefixes,
            range: &|kinds| self.select.keys_of(kinds),
            has_labels: &|versions| self.labels.match_one(versions, &keys),
            only: &self.only,
            omits_events_and_leases: self.select.words.is_empty() && self.select.prefix.is_empty(),
            keys: &keys,
            show_secrets: self.show_secrets,
        };
        let mut log = Log::read(&backup, &wanted)?;
        let mut out = Stream::new();
        let printed = self.print(cancel, &mut log, &prefixes, output, &mut out);
        let printed = printed.and_then(|()| self.labels.end(!self.select.words.is_empty()));
        out.end(printed)
    }

    fn print(
        &self,
        cancel: &Cancel,
        log: &mut Log,
        prefixes: &EtcdPrefixes,
        output: Output,
        out: &mut Stream,
    ) -> Result<()> {
        let names = KeyNames::new(std::mem::take(&mut log.resources), prefixes);
        let mut lines = Lines {
            names: &names,
            in_colour: terminal::stdout_has_colour(),
            table: None,
            transaction: Vec::new(),
            revision: None,
        };
        if output == Output::Text {
            out.write(self.head(log).as_bytes())?;
        } else {
            out.begin_lines();
        }
        let mut has_item = false;
        while let Some((key, item)) = log.next()? {
            cancel.check()?;
            has_item = true;
            let revision = match &item {
                Item::Change(change) => Some(change.revision),
                Item::Missing(..) | Item::Wall(_) => None,
            };
            if lines.revision != revision || revision.is_none() {
                lines.end_transaction(output, out)?;
                lines.revision = revision;
            }
            match (item, output) {
                (Item::Change(change), _) if self.by_transaction => {
                    lines.transaction.push((key.to_vec(), change));
                }
                (Item::Change(change), Output::Json) => out.line(&lines.json(key, change))?,
                (Item::Change(change), Output::Text) => lines.row(key, &change, out)?,
                (Item::Missing(first, last), Output::Json) => {
                    let missing = Some(Missing::from(&(first, last)));
                    out.line(&MarkJson {
                        missing,
                        wall: None,
                    })?;
                }
                (Item::Wall(wall), Output::Json) => {
                    let wall = Some(wall);
                    out.line(&MarkJson {
                        missing: None,
                        wall,
                    })?;
                }
                (Item::Missing(first, last), Output::Text) => lines.mark(
                    &format!("not every change is recorded for revisions {first} to {last}"),
                    out,
                )?,
                (Item::Wall(wall), Output::Text) => {
                    let time = wall.time.as_deref().map(text::event_time);
                    let by = time.map(|time| format!(" by {time}")).unwrap_or_default();
                    let (after, left) = (wall.after_revision, &wall.left);
                    lines.mark(
                        &format!("etcd was set back to revision {after}{by}: --timeline {left} has what came after it there"),
                        out,
                    )?;
                }
            }
        }
        lines.end_transaction(output, out)?;
        if output == Output::Json {
            return Ok(());
        }
        lines.end_table(out)?;
        out.write(self.end(log, &names, has_item).as_bytes())
    }

    /// The span, in words.
    fn head(&self, log: &Log) -> String {
        let begin = match (log.since, log.from) {
            (Some(since), _) => format!("since {}", text::local_time(since)),
            (None, Revision(0)) => "of all that the backup holds,".to_owned(),
            (None, from) => format!("after revision {from}"),
        };
        let said = match self.span.since {
            None if log.since.is_some() => " (24 hours; --since gives another begin)",
            _ => "",
        };
        format!("Changes {begin}{said} up to revision {}\n", log.to)
    }

    /// What follows the lines.
    fn end(&self, log: &Log, names: &KeyNames, has_item: bool) -> String {
        let mut text = Blocks::default();
        if !has_item {
            text.line("nothing was changed");
        }
        if log.has_omitted {
            text.line("changes of Events and Leases are left out: --prefix '' lists them, too");
        }
        let lost = log.lost.as_ref();
        let lost = lost.and_then(|(key, before)| Some((names.object(key)?, *before)));
        if let Some((object, before)) = lost {
            text.line("To bring one back:");
            text.command(&recover::command_for(&object, before, &self.backup));
        }
        render::to_text(&text, terminal::stdout_width())
    }
}

/// Prints the lines.
struct Lines<'n> {
    names: &'n KeyNames,
    in_colour: bool,
    table: Option<GrowingTable>,
    /// The changes of a transaction that are to be printed together, with its revision.
    transaction: Vec<(Vec<u8>, Change)>,
    revision: Option<Revision>,
}

impl Lines<'_> {
    fn json<'k>(&self, key: &'k [u8], change: Change) -> ChangeJson<'k> {
        ChangeJson {
            key: KeyJson::new(key, None),
            object: self.names.object(key).map(|o| o.to_string()),
            change,
        }
    }

    fn row(&mut self, key: &[u8], change: &Change, out: &mut Stream) -> Result<()> {
        let shown = |part: &str| text::key(part.as_bytes()).into_owned();
        let (namespace, name) = match self.names.object(key) {
            Some(object) => {
                let kind = object.resource.reference();
                let namespace = object.namespace.map_or_else(|| "-".to_owned(), shown);
                (namespace, shown(&format!("{kind}/{}", object.name)))
            }
            None => ("-".to_owned(), text::key(key).into_owned()),
        };
        let row = vec![
            time_of(change),
            change.revision.to_string(),
            namespace,
            name,
            what(change),
        ];
        let style = match change.summary.change {
            Happened::Created => Style::Added,
            Happened::Changed => Style::Changed,
            Happened::Deleted => Style::Deleted,
        };
        let style = self.in_colour.then_some(style);
        let header = ["TIME", "REVISION", "NAMESPACE", "OBJECT", "CHANGE"];
        let table = self.table.get_or_insert_with(|| {
            let mut table = GrowingTable::new(header, true);
            table.width = terminal::stdout_width();
            table
        });
        table.add(row, style, &mut |line| out.write(line.as_bytes()))
    }

    /// Prints a line between the changes.
    fn mark(&mut self, mark: &str, out: &mut Stream) -> Result<()> {
        self.end_table(out)?;
        let line = terminal::painted(Style::Warning, mark, self.in_colour);
        out.write((line + "\n").as_bytes())
    }

    fn end_transaction(&mut self, output: Output, out: &mut Stream) -> Result<()> {
        let changes = std::mem::take(&mut self.transaction);
        let (Some(revision), Some((_, first))) = (self.revision, changes.first()) else {
            return Ok(());
        };
        if output == Output::Json {
            let changes = changes.iter();
            let changes = changes.map(|(key, change)| self.json(key, change.clone()));
            return out.line(&TransactionJson {
                revision,
                changes: changes.collect(),
            });
        }
        let keys = count(changes.len() as u64, "change");
        let head = format!("revision {revision}  {}  {keys}\n", time_of(first));
        out.write(head.as_bytes())?;
        for (key, change) in &changes {
            let name = self.names.object(key).map(|o| o.to_string());
            let name = name.unwrap_or_else(|| text::key(key).into_owned());
            let name = text::key(name.as_bytes());
            out.write(format!("    {name}  {}\n", what(change)).as_bytes())?;
        }
        Ok(())
    }

    /// Prints the rows that wait until the widths of columns are decided.
    fn end_table(&mut self, out: &mut Stream) -> Result<()> {
        match &mut self.table {
            Some(table) => table.end(&mut |line| out.write(line.as_bytes())),
            None => Ok(()),
        }
    }
}

/// When a change was, as far as that is known.
fn time_of(change: &Change) -> String {
    let by = |taken: &String| format!("by {}", text::event_time(taken));
    let time = change.time.as_deref().map(text::event_time);
    let time = time.or_else(|| change.not_after.as_ref().map(by));
    time.unwrap_or_else(|| "-".to_owned())
}

/// What happened, in words.
fn what(change: &Change) -> String {
    let Summary {
        managers,
        fields,
        more_fields,
        owner,
        ..
    } = &change.summary;
    let mut text = match change.summary.change {
        Happened::Created => "created",
        Happened::Changed => "changed",
        Happened::Deleted if change.recorded => "deleted",
        Happened::Deleted => "deleted by then, which is not recorded",
    }
    .to_owned();
    if !managers.is_empty() {
        text += &format!(" by {}", managers.join(", "));
    }
    if !fields.is_empty() {
        text += &format!(": {}", fields.join(", "));
    }
    if *more_fields > 0 {
        text += &format!(", and {more_fields} more");
    }
    match owner {
        Some(owner) if change.summary.change == Happened::Deleted => {
            text += &format!(" (of {}/{})", owner.kind, owner.name);
        }
        _ => {}
    }
    text::key(text.as_bytes()).into_owned()
}
