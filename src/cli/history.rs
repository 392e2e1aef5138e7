//! `deltafold history`: its arguments, and a key's versions as a table or JSON.
//!
//! `ops::read::history` collects the versions.

use super::objects::{LabelArgs, ObjectArgs, SelectArgs};
use super::stream::Stream;
use super::{BackupArgs, Ended, Output, size, text};
use crate::backup::chain::{RevisionRange, show_ranges};
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::base::printable::line;
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;
use crate::objects::reference::Selection;
use crate::objects::resource::{KeyNames, Resource};
use crate::objects::{EncryptionKeys, Object};
use crate::ops::read::history::{DatedEvent, EventsOf, History, Version};
use crate::ops::read::json::{KeyJson, VersionJson};
use crate::ops::read::{Keys, kinds};
use crate::prefix::open::BackupLocation;
use crate::prefix::select::StateRequest;
use crate::prefix::set_aside::{Purpose, decide_again};
use clap::Args;
use serde::Serialize;
use std::os::unix::ffi::OsStrExt;

/// Show every recorded version of a key or object: what changed, and who changed it
///
/// For a Kubernetes object, its fields that changed are shown with the managers who wrote them, and the Event objects
/// about it. Reads the snapshots of the timeline: all deltas, the oldest full, and each full that follows missing
/// deltas. Revisions for which some changes are not recorded are listed at the end.
#[derive(Debug, Args)]
#[command(
    mut_arg("words", |a| a.value_name("OBJECT|KEY").required_unless_present("prefix").help(
        "Objects: KIND/NAMESPACE/NAME, KIND NAME..., or all of KIND; or a key, which comes first"
    )),
    after_long_help = "\
Examples:
  Show what happened to a Deployment:
      deltafold history deployment/shop/web --store s3://backups/etcd-main
  Show what happened to the ConfigMaps of a namespace:
      deltafold history configmaps -n shop --store s3://backups/etcd-main
  Show when a key was changed and deleted:
      deltafold history /registry/configmaps/default/settings --store s3://backups/etcd-main
  Show the values, too:
      deltafold history /registry/configmaps/default/settings \\
          --store s3://backups/etcd-main --output json
  Show the value at one of the revisions:
      deltafold get /registry/configmaps/default/settings --revision 120000 \\
          --store s3://backups/etcd-main

TIME is when the backup tool received the change. Versions that only a full snapshot has are shown without a \
time. --output json prints one JSON object for each of these objects.")]
pub(super) struct HistoryArgs {
    /// Show the values of Secrets in the text, too
    #[arg(long, value_parser = yes_or_no)]
    show_secrets: bool,
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

/// The fields before the list of versions.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Missing {
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

/// The most objects of a kind whose histories are shown: each takes a pass over the snapshots.
const MOST_OBJECTS: usize = 100;

impl HistoryArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let keys = self.objects.keys()?;
        let backup = self.backup.backup(cancel)?;
        let mut out = Stream::new();
        let printed = self.print(cancel, &backup, &keys, output, &mut out);
        out.end(printed)
    }

    /// Prints the histories of what is named. A key that exists exactly as given comes before an object of that name.
    fn print(
        &self,
        cancel: &Cancel,
        backup: &BackupLocation,
        keys: &EncryptionKeys,
        output: Output,
        out: &mut Stream,
    ) -> Result<()> {
        let mut print = |key: &[u8], mut history: History, is_one: bool| match output {
            Output::Json => print_json(cancel, key, &mut history, keys, out),
            Output::Text => {
                if !is_one {
                    out.write(format!("{}\n", text::key(key)).as_bytes())?;
                }
                self.print_text(cancel, &mut history, keys, out)
            }
        };
        let mut not_found = None;
        if let [key] = &self.select.words[..]
            && self.select.names.namespace.is_none()
        {
            match self.read_key(backup, key.as_bytes(), keys) {
                Err(e) if e.reason() == Reason::KeyNotFound => not_found = Some(e),
                history => return print(key.as_bytes(), history?, true),
            }
        }
        let objects = decide_again([backup.context()], Purpose::Read, || {
            self.objects_named(backup, keys)
        });
        let objects = match (objects, &not_found) {
            (Err(e), Some(no_key)) if e.reason() == Reason::KeyNotFound => {
                return Err(no_key.again());
            }
            (objects, _) => objects?,
        };
        for object in &objects {
            let (mut found, mut absent) = (None, None);
            for key in object {
                match self.read_key(backup, key, keys) {
                    Err(e) if e.reason() == Reason::KeyNotFound => absent = absent.or(Some(e)),
                    history => {
                        found = Some((key, history?));
                        break;
                    }
                }
            }
            let Some((key, history)) = found else {
                return Err(absent
                    .or(not_found)
                    .unwrap_or_else(|| Error::internal("an object without a key")));
            };
            print(key, history, objects.len() == 1)?;
        }
        Ok(())
    }

    /// Returns the objects that are named, each by the keys that it may have. All objects of a kind are those of the newest
    /// state.
    fn objects_named(
        &self,
        backup: &BackupLocation,
        keys: &EncryptionKeys,
    ) -> Result<Vec<Vec<Vec<u8>>>> {
        let newest = || {
            backup.open(&StateRequest {
                timeline: self.timeline.clone(),
                or_before: true,
                ..StateRequest::default()
            })
        };
        let prefixes = &self.select.names.etcd_prefixes();
        let custom = |of| kinds(backup, &newest()?, of, prefixes);
        let range = if self.select.prefix.is_empty() {
            match self.select.named(prefixes, true).select(custom)? {
                Selection::Objects(objects) => return Ok(objects),
                Selection::Kinds(_, range) => range,
            }
        } else {
            self.select.prefixes()
        };
        let state = newest()?;
        let mut all = Keys::read(backup.context(), &state, range)?;
        let mut objects = Vec::new();
        while all.advance()? {
            let kv = all.current()?;
            if self.labels.match_one([&kv], keys) {
                objects.push(vec![kv.key.to_vec()]);
            }
        }
        self.labels.end(!self.select.words.is_empty())?;
        match objects.len() {
            0 => Err(Reason::KeyNotFound.error(format!(
                "no such object exists at revision {}: of one that is deleted, give the name",
                state.revision
            ))),
            n if n > MOST_OBJECTS => Err(Reason::TooLarge.error(format!(
                "{n} objects are meant, and at most {MOST_OBJECTS} histories are shown at once: give names, a namespace or labels"
            ))),
            _ => Ok(objects),
        }
    }

    /// Reads the history of a key, with the Event objects if it is an object.
    fn read_key(
        &self,
        backup: &BackupLocation,
        key: &[u8],
        keys: &EncryptionKeys,
    ) -> Result<History> {
        let prefixes = self.select.names.etcd_prefixes();
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
            let Version {
                revision, time, kv, ..
            } = version;
            let by = if version.is_recorded { "" } else { "by " };
            let revision = format!("{by}{revision}");
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
