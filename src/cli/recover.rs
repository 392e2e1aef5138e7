//! `deltafold recover`: its arguments, its list of objects, and its result as text.
//!
//! The operation itself is `ops::recover`.

use super::deleted::{DeletionArgs, Wanted};
use super::format::Format;
use super::objects::{LabelArgs, ObjectArgs, SelectArgs};
use super::render::{Blocks, Cell, Render};
use super::stream::Stream;
use super::terminal::{self, Style};
use super::{BackupArgs, Ended, Output, print, print_report};
use crate::base::flag_values::yes_or_no;
use crate::base::plural::count;
use crate::base::slips::nearest;
use crate::base::{Cancel, duration, printable, shell};
use crate::error::{Error, Reason, Result};
use crate::kubernetes::UserClient;
use crate::kubernetes::live_objects::LiveObjects;
use crate::mvcc::{KeyRange, KeyValue, Revision};
use crate::objects::key::EtcdPrefixes;
use crate::objects::reference::Reference;
use crate::objects::resource::{KeyNames, ObjectName, Resource};
use crate::objects::{EncryptionKeys, Object, yaml};
use crate::ops::options::StateOptions;
use crate::ops::read::deleted::{DeletedKey, NO_DELETION, last_deletion};
use crate::ops::recover::plan::{Plan, Selected, plan};
use crate::ops::recover::{
    Options, Outcome, RecoveredObject, RecoveredState, Source, Told, run, select,
};
use crate::ops::report::{Report, Status};
use crate::prefix::open::{BackupLocation, State};
use crate::prefix::scan::Scan;
use crate::prefix::set_aside::{Purpose, decide_again};
use crate::telemetry::logs;
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use serde::Deserialize as _;
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;
use tokio::runtime::Handle;

/// Bring objects back into a live cluster, by name and through its API server
///
/// Objects of a moment, or with --deleted what was deleted in a span, are applied as `kubectl apply --server-side` does, with
/// the rights of the kubeconfig or the Pod. Without --execute, the server only says what it would do, webhooks and quotas
/// included. What exists is left, unless --overwrite. What a controller makes anew from its owner, such as the Pods of a
/// Deployment, is left out unless it is named; so are fields that only a server sets.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Show what would bring a ConfigMap back as it was two hours ago, and then do it:
      deltafold recover configmap/shop/settings --time '2h ago' --store s3://backups/etcd-main
      deltafold recover configmap/shop/settings --time '2h ago' --store s3://backups/etcd-main --execute
  Bring a whole namespace back:
      deltafold recover -n shop --time 'yesterday 14:00' --store s3://backups/etcd-main --execute --wait
  Bring back just what was deleted between two moments and is not there now:
      deltafold recover --deleted --since 14:00 --until 15:00 --store s3://backups/etcd-main --execute
  Write a namespace as manifests, in the order in which they can be applied:
      deltafold recover -n shop --time 'yesterday 14:00' --store s3://backups/etcd-main -o yaml > shop.yaml

Marks in the list:
  +  the cluster lacks the object
  ~  it has the object with other fields; the fields stand below
  !  it cannot be recovered, and why

Exit codes: 0 if all was recovered, 65 if the backup is of another cluster, 75 if some objects were refused or were not \
ready in time (run the command again). docs/exit-codes.md lists all others.")]
pub(super) struct RecoverArgs {
    /// Write to the cluster, instead of only asking the server what it would do
    #[arg(long, value_parser = yes_or_no)]
    execute: bool,
    /// Also change objects that exist with other fields; fields that only the cluster has stay
    #[arg(long, conflicts_with = "deleted", value_parser = yes_or_no)]
    overwrite: bool,
    #[command(flatten)]
    deletions: DeletionArgs,
    /// Recover the objects that this file names; - is standard input
    ///
    /// YAML or JSON: objects with kind and metadata, as kubectl prints them, or a list of names such as
    /// configmap/shop/settings.
    #[arg(short, long, value_name = "FILE", conflicts_with = "words")]
    filename: Option<PathBuf>,
    /// Keep finalizers: an object with one cannot be deleted until the finalizer's controller has removed it
    #[arg(long, value_parser = yes_or_no)]
    keep_finalizers: bool,
    /// Let the server choose cluster IPs and node ports of Services if theirs are taken
    #[arg(long, value_parser = yes_or_no)]
    new_addresses: bool,
    /// Recover into another cluster than that of the backup
    #[arg(long, value_parser = yes_or_no)]
    other_cluster: bool,
    /// Show the values of Secrets that differ, too
    #[arg(long, value_parser = yes_or_no)]
    show_secrets: bool,
    /// Wait until Deployments, StatefulSets, DaemonSets and claims are ready
    #[arg(long, requires = "execute", value_parser = yes_or_no)]
    wait: bool,
    /// With --wait: maximum time to wait
    #[arg(long, requires = "wait", value_name = "DURATION", default_value = "5m", value_parser = duration::parse)]
    timeout: Duration,
    /// Context of the kubeconfig [default: the current context]
    #[arg(long, value_name = "NAME", help_heading = "Kubernetes", value_parser = NonEmptyStringValueParser::new())]
    context: Option<String>,
    #[command(flatten)]
    state: StateOptions,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    labels: LabelArgs,
    #[command(flatten)]
    objects: ObjectArgs,
    #[command(flatten)]
    backup: BackupArgs,
}

/// Returns the command that brings back what some words name, as it was at a revision.
pub(super) fn command(words: &[&str], revision: Revision, backup: &BackupArgs) -> Vec<String> {
    let mut command = vec!["deltafold".to_owned(), "recover".to_owned()];
    command.extend(words.iter().map(|&word| word.to_owned()));
    command.extend(["--revision".to_owned(), revision.to_string()]);
    command.extend(backup.flags());
    command
}

/// Returns the command that brings an object back, and of a namespace all that was in it.
pub(super) fn command_for(
    object: &ObjectName<'_>,
    revision: Revision,
    backup: &BackupArgs,
) -> Vec<String> {
    match object.resource.full_name().as_str() {
        "namespaces" => command(&["-n", object.name], revision, backup),
        _ => command(&[&object.to_string()], revision, backup),
    }
}

/// What a state does not have.
pub(super) struct Lost<'a> {
    pub(super) args: &'a BackupArgs,
    pub(super) backup: &'a BackupLocation,
    pub(super) scan: Option<&'a Scan>,
    pub(super) state: &'a State,
    pub(super) prefixes: &'a EtcdPrefixes,
    pub(super) keys: &'a EncryptionKeys,
}

impl Lost<'_> {
    /// Says when keys were deleted, and which command brings them back.
    ///
    /// # Errors
    /// As [`last_deletion`].
    pub(super) fn keys(&self, range: &KeyRange) -> Result<String> {
        let deleted = last_deletion(self.backup, self.scan, self.state, range, self.keys)?;
        let Some(deleted) = deleted else {
            let meant = self.nearest(range)?;
            let meant = meant.map(|meant| format!("; did you mean {meant}?"));
            return Ok(NO_DELETION.to_owned() + &meant.unwrap_or_default());
        };
        let names = KeyNames::new(Resource::built_in(), self.prefixes);
        let (what, command) = match names.object(&deleted.key) {
            Some(object) => (
                "bring it back",
                command_for(&object, deleted.before, self.args),
            ),
            None => {
                let key = String::from_utf8_lossy(&deleted.key);
                let mut get = command(&[&key], deleted.before, self.args);
                get[1] = "get".to_owned();
                ("see it as it was before", get)
            }
        };
        let command = shell::command(command.iter().map(String::as_str));
        Ok(format!("it was {}; to {what}: {command}", deleted.deletion))
    }

    /// Returns the name nearest to those of keys, of an object in the same place.
    fn nearest(&self, range: &KeyRange) -> Result<Option<String>> {
        let KeyRange::Keys(keys) = range else {
            return Ok(None);
        };
        let parts = |key: &[u8]| {
            let (place, name) = std::str::from_utf8(key).ok()?.rsplit_once('/')?;
            Some((format!("{place}/"), name.to_owned()))
        };
        let places: BTreeMap<String, String> = keys.iter().filter_map(|k| parts(k)).collect();
        let mut found = None;
        let below = places.keys().map(|place| place.clone().into_bytes());
        let ctx = self.backup.context();
        self.state
            .for_each_live(ctx, KeyRange::prefixes(below), |kv| {
                let there =
                    parts(kv.key).and_then(|(place, name)| Some((places.get(&place)?, name)));
                if let Some((wanted, name)) = there {
                    found = nearest(wanted, found.take().into_iter().chain([name]));
                }
                Ok(())
            })?;
        Ok(found.map(|name| printable::line(&name).into_owned()))
    }

    /// Says when a namespace was deleted, and which command brings it back; `None` if it exists, or no deletion is recorded.
    ///
    /// # Errors
    /// As [`last_deletion`].
    pub(super) fn namespace(&self, namespace: &str) -> Result<Option<String>> {
        let keys = self.prefixes.namespace_keys(namespace);
        let range = KeyRange::Keys(keys.into_iter().collect());
        let deleted = last_deletion(self.backup, self.scan, self.state, &range, self.keys)?;
        Ok(deleted
            .filter(|deleted| !deleted.is_recreated)
            .map(|deleted| {
                let command = command(&["-n", namespace], deleted.before, self.args);
                format!(
                    "the namespace {} was {}; to bring it back: {}",
                    printable::line(namespace),
                    deleted.deletion,
                    shell::command(command.iter().map(String::as_str))
                )
            }))
    }
}

impl RecoverArgs {
    pub(super) fn run(&self, cancel: &Cancel, format: &Format) -> Ended {
        let mut select = self.select.clone();
        if let Some(file) = &self.filename {
            select.words = names_in(file)?;
        }
        if !select.is_given() && !self.deletions.deleted {
            return Err(Reason::Usage.error(
                "say what to recover: KIND/NAMESPACE/NAME, -n NAMESPACE for all in it, -f FILE, or --deleted",
            ));
        }
        let keys = self.objects.keys()?;
        // Connect first: it fails faster than reading the backup.
        let cluster = match format {
            Format::Yaml => None,
            _ => Some(self.cluster(cancel)?),
        };
        let (source, warnings) = if self.deletions.deleted {
            self.deleted(&select, &keys, cancel)?
        } else {
            self.at(&select, &keys, cancel)?
        };
        self.labels.end(!select.words.is_empty())?;
        let Some(mut cluster) = cluster else {
            logs::warn_of_others(&warnings);
            return print_manifests(&source.plan);
        };
        let output = format.output()?;
        let options = Options {
            execute: self.execute,
            overwrite: self.overwrite,
            only_missing: self.deletions.deleted,
            other_cluster: self.other_cluster,
            new_addresses: self.new_addresses,
            wait: self.wait.then_some(self.timeout),
        };
        let mut report = run(
            &mut cluster,
            cancel,
            &options,
            source,
            warnings,
            &mut |told| match output {
                Output::Json => Ok(()),
                Output::Text => self.tell(told),
            },
        );
        report.as_of = self.state.point.time;
        if !self.show_secrets {
            report
                .objects
                .iter_mut()
                .for_each(RecoveredObject::hide_secrets);
        }
        print_report(output, report)
    }

    fn cluster(&self, cancel: &Cancel) -> Result<LiveObjects> {
        let handle = Handle::current();
        let client = UserClient::connect(self.context.as_deref(), None);
        let client = handle.block_on(cancel.or(client))??;
        Ok(LiveObjects::new(client, handle, cancel.clone()))
    }

    /// Plans to recover objects of a moment.
    fn at(
        &self,
        select: &SelectArgs,
        keys: &EncryptionKeys,
        cancel: &Cancel,
    ) -> Result<(Source, Vec<String>)> {
        let request = self.state.request();
        let backup = self.backup.backup_at(request.at, cancel)?;
        let prefixes = select.names.etcd_prefixes();
        decide_again([backup.context()], Purpose::Restore, || {
            let (state, scan) = backup.open_with_scan(&request)?;
            let (range, parts) = select.keys_in(&backup, &state, false)?;
            let is_named = matches!(range, KeyRange::Keys(_));
            let range = range.with_its_namespace();
            let mut warnings = state.warnings.clone();
            let matches = |kv: &KeyValue<'_>| self.labels.match_one([kv], keys);
            let selected = select::at(
                &backup,
                &state,
                range,
                is_named,
                keys,
                &matches,
                &mut warnings,
            )?;
            let is_missing = |part: &&KeyRange| !selected.iter().any(|one| part.contains(&one.key));
            if let Some(part) = parts.iter().find(is_missing)
                && self.labels.selector.is_none()
            {
                let lost = Lost {
                    args: &self.backup,
                    backup: &backup,
                    scan: scan.as_ref(),
                    state: &state,
                    prefixes: &prefixes,
                    keys,
                };
                return Err(self.absent(&lost, part));
            }
            if selected.is_empty() {
                return Err(Reason::KeyNotFound.error(format!(
                    "no object has these labels at revision {}",
                    state.revision
                )));
            }
            let names = select::names(&backup, &state, &selected, &prefixes)?;
            let source = Source {
                plan: plan(selected, &names, self.keep_finalizers),
                revision: state.revision,
                after_revision: None,
                cluster_uid: select::cluster_uid(&backup, &state, &prefixes, keys)?,
            };
            Ok((source, warnings))
        })
    }

    /// Returns the error about a part of the selection that has no object: when it was deleted, and the command.
    fn absent(&self, lost: &Lost<'_>, part: &KeyRange) -> Error {
        let revision = lost.state.revision;
        let namespace = self.select.names.namespace.as_deref();
        let advice = match (part, namespace) {
            (KeyRange::Keys(_), _) | (_, None) => lost.keys(part),
            (_, Some(namespace)) => {
                let gone = lost.namespace(namespace);
                gone.map(|gone| gone.unwrap_or_else(|| NO_DELETION.to_owned()))
            }
        };
        let what = part.last().unwrap_or_default().escape_ascii();
        match advice {
            Err(e) => e,
            Ok(advice) => Reason::KeyNotFound.error(match (part, namespace) {
                (KeyRange::Namespace { .. }, Some(namespace)) => {
                    let namespace = printable::line(namespace);
                    format!("there is nothing in the namespace {namespace} at revision {revision}: {advice}")
                }
                (KeyRange::Keys(_), _) => format!("there is no key {what} at revision {revision}: {advice}"),
                _ => format!("there is no key below {what} at revision {revision}: {advice}"),
            }),
        }
    }

    /// Plans to recover what was deleted in a span.
    fn deleted(
        &self,
        select: &SelectArgs,
        keys: &EncryptionKeys,
        cancel: &Cancel,
    ) -> Result<(Source, Vec<String>)> {
        let prefixes = select.names.etcd_prefixes();
        let wanted = Wanted {
            timeline: self.state.timeline.as_deref(),
            range: &|kinds| Ok(select.keys_of(kinds)?.with_its_namespace()),
            labels: Some(&self.labels),
            prefixes: &prefixes,
            keys,
            records: true,
            counts_events: select.words.is_empty(),
        };
        let (backup, deleted) = self.deletions.span.read(&wanted, &self.backup, cancel)?;
        let is_named = select
            .words
            .iter()
            .any(|word| word.to_string_lossy().contains('/'));
        let found = deleted.keys.iter();
        let selected = found.map(|d: &DeletedKey| Selected::of_deleted(d, is_named, keys));
        let selected = selected.collect::<Result<Vec<_>>>()?;
        let names = select::names(&backup, &deleted.state, &selected, &prefixes)?;
        let source = Source {
            plan: plan(selected, &names, self.keep_finalizers),
            revision: deleted.to,
            after_revision: Some(deleted.from),
            cluster_uid: select::cluster_uid(&backup, &deleted.state, &prefixes, keys)?,
        };
        Ok((source, deleted.warnings))
    }

    /// Prints an object, or what is waited for, when it happens.
    fn tell(&self, told: Told<'_>) -> Result<()> {
        let object = match told {
            Told::Waiting(text) => return print(&format!("{}\n", printable::line(text))),
            Told::Object(object) => object,
        };
        let (mark, style) = match object.outcome {
            Outcome::Created => ('+', Style::Added),
            Outcome::Updated | Outcome::Differs => ('~', Style::Changed),
            Outcome::Refused => ('!', Style::Bad),
            Outcome::Unchanged | Outcome::LeftOut => return Ok(()),
        };
        let reason = object.reason.as_ref().map(|reason| format!(": {reason}"));
        let line = format!("{mark} {}{}", object.object, reason.unwrap_or_default());
        let line = printable::line(&line);
        print(&(terminal::painted(style, &line, terminal::stdout_has_colour()) + "\n"))?;
        let is_hidden = !self.show_secrets && object.is_secret();
        let changes = object.changes.iter().map(|change| change.text(is_hidden));
        let without = object.without.join(", ");
        let without = (!without.is_empty()).then(|| format!("without {without}"));
        for detail in changes.chain(without) {
            print(&format!("    {}\n", printable::line(&detail)))?;
        }
        Ok(())
    }
}

/// Prints manifests in the order in which they can be applied.
fn print_manifests(plan: &Plan) -> Ended {
    let mut out = Stream::new();
    for (name, reason, n) in groups(plan.left.iter().map(|left| (&*left.name, &*left.reason))) {
        let line = format!(
            "# not here: {}\n",
            printable::line(&group_text(name, reason, n))
        );
        out.write(line.as_bytes())?;
    }
    for one in &plan.recovered {
        let yaml = yaml::from_object(&one.object.json);
        out.write(format!("---\n{yaml}").as_bytes())?;
    }
    let refused = plan
        .left
        .iter()
        .find(|left| left.outcome == Outcome::Refused);
    out.end(match refused {
        None => Ok(()),
        Some(left) => Err(Reason::PartlyDone.error(format!(
            "the manifests are not complete: {}: {}",
            left.name, left.reason
        ))),
    })
}

/// Returns how many objects of a kind have the same reason, with the name of the first.
fn groups<'a>(objects: impl Iterator<Item = (&'a str, &'a str)>) -> Vec<(&'a str, &'a str, u64)> {
    let mut groups: BTreeMap<(&str, &str), (&str, u64)> = BTreeMap::new();
    for (name, reason) in objects {
        let kind = name.split('/').next().unwrap_or_default();
        groups.entry((kind, reason)).or_insert((name, 0)).1 += 1;
    }
    let groups = groups.into_iter();
    groups
        .map(|((_, reason), (name, n))| (name, reason, n))
        .collect()
}

fn group_text(name: &str, reason: &str, n: u64) -> String {
    match n {
        1 => format!("{name}: {reason}"),
        n => format!("{name} and {} more: {reason}", n - 1),
    }
}

/// Returns the names of the objects in a file.
fn names_in(file: &PathBuf) -> Result<Vec<OsString>> {
    let mut text = String::new();
    let read = match file.to_str() {
        Some("-") => std::io::stdin().read_to_string(&mut text).map(|_| ()),
        _ => std::fs::read_to_string(file).map(|read| text = read),
    };
    read.map_err(|e| Error::io(format!("read {}", file.display()), e))?;
    let bad = |what: String| Reason::Usage.error(format!("--filename {}: {what}", file.display()));
    let mut names = Vec::new();
    for document in yaml_serde::Deserializer::from_str(&text) {
        let document = Value::deserialize(document).map_err(|e| bad(e.to_string()))?;
        add_names(&document, &mut names).map_err(bad)?;
    }
    if names.is_empty() {
        return Err(bad("it names no object".to_owned()));
    }
    Ok(names)
}

/// Adds the names of a document: a name, an object, or a list of these.
fn add_names(document: &Value, names: &mut Vec<OsString>) -> Result<(), String> {
    let list = document
        .as_array()
        .or_else(|| document.get("items")?.as_array());
    if let Some(list) = list {
        return list.iter().try_for_each(|item| add_names(item, names));
    }
    let name = match document {
        Value::Null => return Ok(()),
        Value::String(name) => name.clone(),
        Value::Object(json) => reference(&Object::from_json(json.clone())),
        _ => String::new(),
    };
    let is_one = Reference::parse(&name, None).is_some_and(|reference| reference.name.is_some());
    if !is_one {
        return Err(format!(
            "neither KIND/NAMESPACE/NAME nor an object with kind and metadata: {}",
            printable::line(&document.to_string())
        ));
    }
    names.push(name.into());
    Ok(())
}

/// Returns the name by which an object is selected; empty if it has none.
fn reference(object: &Object) -> String {
    let parts = [
        object.kind_and_group(),
        object.metadata_text("namespace").to_owned(),
        object.metadata_text("name").to_owned(),
    ];
    let [kind, _, name] = &parts;
    if kind.is_empty() || name.is_empty() {
        return String::new();
    }
    let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    parts.join("/")
}

impl RecoveredObject {
    fn is_secret(&self) -> bool {
        self.object.starts_with("secret/")
    }

    fn hide_secrets(&mut self) {
        if self.is_secret() {
            let hidden = Value::from("(hidden)");
            for change in &mut self.changes {
                for value in [&mut change.old, &mut change.new].into_iter().flatten() {
                    *value = hidden.clone();
                }
            }
        }
    }
}

impl Render for RecoveredState {
    fn blocks(o: &Report<Self>) -> Blocks {
        let mut text = Blocks::default();
        let (created, updated) = (o.created, o.updated);
        text.line(match (o.status, o.dry_run) {
            (Status::NothingToDo, _) => "nothing to do".to_owned(),
            (_, true) => format!(
                "would create {} and change {updated}; --execute does it",
                count(created, "object")
            ),
            (_, false) => format!("created {}, changed {updated}", count(created, "object")),
        });
        let from = match o.after_revision {
            None => format!("revision {} of the backup", o.revision),
            Some(after) => format!("deleted after revision {after} up to {}", o.revision),
        };
        text.field("recovered", from);
        text.field("into", &o.server);
        text.field("as of", o.as_of);
        for (label, n) in [
            ("as they were", o.unchanged),
            ("differ", o.differing),
            ("refused", o.refused),
        ] {
            text.field(label, (n > 0).then_some(Cell::Count(n)));
        }
        let unchecked = o.objects.iter().filter(|one| !one.checked).count();
        if unchecked > 0 {
            let objects = count(unchecked, "object");
            text.field(
                "not checked",
                format!("{objects}, whose namespace or definition is created first"),
            );
        }
        let left = o
            .objects
            .iter()
            .filter(|one| one.outcome == Outcome::LeftOut);
        let left = left.map(|one| (&*one.object, one.reason.as_deref().unwrap_or_default()));
        let left: Vec<String> = groups(left)
            .into_iter()
            .map(|(name, reason, n)| group_text(name, reason, n))
            .collect();
        text.list("left out", &left);
        text
    }
}
