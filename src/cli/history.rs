//! `deltafold history`: its arguments, and a key's versions as a table or JSON.
//!
//! `ops::read::history` collects the versions.

use super::objects::{NameArgs, ObjectArgs};
use super::stream::Stream;
use super::{BackupArgs, Ended, Output, size, text};
use crate::backup::chain::{RevisionRange, show_ranges};
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::base::printable::line;
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;
use crate::objects::reference::{Names, Selection};
use crate::objects::resource::{KeyNames, Resource};
use crate::objects::{EncryptionKeys, Object};
use crate::ops::options::Point;
use crate::ops::read::custom_resources;
use crate::ops::read::history::{DatedEvent, EventsOf, History, Version};
use crate::ops::read::json::{KeyJson, VersionJson};
use crate::prefix::open::BackupLocation;
use clap::Args;
use schemars::JsonSchema;
use serde::Serialize;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

/// Show every recorded version of a key or object: what changed, and who changed it
///
/// For a Kubernetes object, its fields that changed are shown with the managers who wrote them, and the Event objects
/// about it. Reads the snapshots of the timeline: all deltas, the oldest full, and each full that follows missing
/// deltas. Revisions for which some changes are not recorded are listed at the end.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Show what happened to a Deployment:
      deltafold history deployment/shop/web --store s3://backups/etcd-main
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
    /// Object: KIND/NAMESPACE/NAME or KIND NAME; or a key, which comes first
    #[arg(value_name = "OBJECT|KEY", required = true)]
    words: Vec<OsString>,
    #[command(flatten)]
    names: NameArgs,
    /// Show the values of Secrets in the text, too
    #[arg(long, value_parser = yes_or_no)]
    show_secrets: bool,
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
    /// What Event objects say of the object, in the order of their revisions, at most 10,000.
    events: &'a [DatedEvent],
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
        let keys = self.objects.keys()?;
        let backup = self.backup.backup(cancel)?;
        let (key, mut history) = self.read(&backup, &keys)?;
        let mut out = Stream::new();
        let printed = match output {
            Output::Json => print_json(cancel, &key, &mut history, &keys, &mut out),
            Output::Text => self.print_text(cancel, &mut history, &keys, &mut out),
        };
        out.end(printed)
    }

    /// Reads the history of the key, and returns the key. A key that exists exactly as given comes before an object of
    /// that name.
    fn read(&self, backup: &BackupLocation, keys: &EncryptionKeys) -> Result<(Vec<u8>, History)> {
        let prefixes = &self.names.etcd_prefixes();
        let names = Names {
            words: &self.words,
            namespace: self.names.namespace.as_deref(),
            all_namespaces: true,
            prefixes,
        };
        let mut tried = match &self.words[..] {
            [key] if self.names.namespace.is_none() => vec![key.as_bytes().to_vec()],
            _ => Vec::new(),
        };
        let mut not_found = None;
        if let Some(key) = tried.first() {
            match self.read_key(backup, key, keys) {
                Err(e) if e.reason() == Reason::KeyNotFound => not_found = Some(e),
                history => return Ok((key.clone(), history?)),
            }
        }
        let custom = || {
            let request = Point::default().request(self.timeline.as_deref(), false);
            let (ctx, source) = backup.open(&request)?;
            custom_resources(ctx, &source, prefixes)
        };
        let objects = match names.select(custom) {
            Ok(Selection::Objects(objects)) => objects,
            Ok(Selection::Kinds(..)) => return Err(not_found.unwrap_or_else(|| Reason::Usage.error(
                "give the name of one object, too: `deltafold diff KIND --from TIME` shows how several changed",
            ))),
            Err(e) => return Err(not_found.unwrap_or(e)),
        };
        let [object] = &objects[..] else {
            return Err(Reason::Usage.error("give the name of one object"));
        };
        let mut absent = None;
        for key in object {
            if tried.contains(key) {
                continue;
            }
            tried.push(key.clone());
            match self.read_key(backup, key, keys) {
                Err(e) if e.reason() == Reason::KeyNotFound => absent = absent.or(Some(e)),
                history => return Ok((key.clone(), history?)),
            }
        }
        Err(absent
            .or(not_found)
            .unwrap_or_else(|| Error::internal("an object without a key")))
    }

    /// Reads the history of a key, with the Event objects if it is an object.
    fn read_key(
        &self,
        backup: &BackupLocation,
        key: &[u8],
        keys: &EncryptionKeys,
    ) -> Result<History> {
        let prefixes = self.names.etcd_prefixes();
        let names = KeyNames::new(Resource::built_in(), &prefixes);
        let prefix = prefixes.of_key(key).unwrap_or_default();
        let object = names.object(key);
        let events = object.map(|object| EventsOf {
            // The Events of objects without a namespace are in this one.
            prefix: format!("{prefix}/events/{}/", object.namespace.unwrap_or("default")),
            kind: &object.resource.kind,
            name: object.name,
            keys,
        });
        History::read(backup, self.timeline.as_deref(), key, events.as_ref())
    }

    fn print_text(
        &self,
        cancel: &Cancel,
        history: &mut History,
        keys: &EncryptionKeys,
        out: &mut Stream,
    ) -> Result<()> {
        out.write(row(["REVISION", "TIME", "CHANGE", "VERSION", "SIZE"]).as_bytes())?;
        let mut events = std::mem::take(&mut history.events).into_iter().peekable();
        let mut before = None;
        while let Some(version) = history.next()? {
            cancel.check()?;
            while let Some(event) = events.next_if(|event| event.revision < version.revision) {
                out.write(event_row(&event).as_bytes())?;
            }
            let Version { revision, time, kv } = version;
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
            let object = kv.and_then(|kv| Object::of_record(&kv, keys).ok());
            if let Some(object) = &object {
                let changes = text::changes(object, before.as_ref(), self.show_secrets);
                out.write(changes.as_bytes())?;
            }
            before = object;
        }
        for event in events {
            out.write(event_row(&event).as_bytes())?;
        }
        if !history.missing.is_empty() {
            let ranges = show_ranges(&history.missing);
            let note = format!("not every change is recorded for revisions {ranges}\n");
            out.write(note.as_bytes())?;
        }
        Ok(())
    }
}

fn event_row(event: &DatedEvent) -> String {
    let time = event
        .time
        .as_deref()
        .map_or_else(|| "-".to_owned(), text::event_time);
    let note = event.note.to_string();
    let revision = event.revision.to_string();
    format!("{revision:>10}  {time:25}  event   {}\n", line(&note))
}

fn print_json(
    cancel: &Cancel,
    key: &[u8],
    history: &mut History,
    keys: &EncryptionKeys,
    out: &mut Stream,
) -> Result<()> {
    let head = Head {
        name: KeyJson::new(key, None),
        timeline: history.timeline.as_deref(),
        revision: history.revision,
        missing: history.missing.iter().map(Missing::from).collect(),
        events: &history.events,
        warnings: &history.warnings,
    };
    out.begin_list(&head, "versions")?;
    let mut before: Option<Object> = None;
    while let Some(version) = history.next()? {
        cancel.check()?;
        let object = version.kv.and_then(|kv| Object::of_record(&kv, keys).ok());
        let managers = object.as_ref().map(|o| o.managers_since(before.as_ref()));
        let changes = object.as_ref().zip(before.as_ref());
        let changes = changes.map(|(object, before)| object.changes_since(before));
        out.item(&VersionJson::new(
            &version,
            keys,
            managers.unwrap_or_default(),
            changes.unwrap_or_default(),
        ))?;
        before = object;
    }
    out.end_list()
}

/// A line of the table. Rows are written one by one, so the widths are fixed.
fn row([revision, time, change, version, size]: [&str; 5]) -> String {
    let row = format!("{revision:>10}  {time:25}  {change:6}  {version:>7}  {size}");
    row.trim_end().to_owned() + "\n"
}
