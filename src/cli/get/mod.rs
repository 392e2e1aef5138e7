//! `deltafold get`: its arguments, and keys with their values as text or JSON.
//!
//! `objects` prints objects alone, and `table` the table of a kind. `ops::read` reads the keys.

mod objects;
mod table;

pub use table::table;

use super::format::Format;
use super::objects::{LabelArgs, ObjectArgs, SelectArgs};
use super::recover::Lost;
use super::stream::Stream;
use super::{BackupArgs, Ended, text};
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::error::{Error, Reason, Result};
use crate::mvcc::{KeyRange, KeyValue, Revision};
use crate::objects::json_path::JsonPath;
use crate::objects::key::{EtcdPrefixes, ObjectKey};
use crate::objects::reference::{KindsOf, Selection};
use crate::objects::resource::{KeyNames, Resource};
use crate::objects::{EncryptionKeys, yaml};
use crate::ops::options::StateOptions;
use crate::ops::read::json::KeyWithRecord;
use crate::ops::read::{self, Got, Keys};
use crate::prefix::Context;
use crate::prefix::open::BackupLocation;
use crate::prefix::open::State;
use crate::prefix::scan::Scan;
use crate::prefix::set_aside::{Purpose, decide_again};
use clap::Args;
use serde::Serialize;
use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt;

/// Show keys and values of a backup, at any revision or time
///
/// Nothing is restored. Objects of Kubernetes are decoded and shown as YAML, as an API server serves them in their
/// stored version; so are other JSON objects, and other text is shown unchanged. Keys are sorted by their bytes.
#[derive(Debug, Args)]
#[command(
    mut_arg("words", |a| a.value_name("OBJECT|KEY").required_unless_present("prefix").help(
        "Objects: KIND/NAMESPACE/NAME, KIND NAME..., or KIND for a table of objects; or a key, which comes first"
    )),
    after_long_help = "\
Examples:
  Show the newest value of a key:
      deltafold get /registry/configmaps/default/settings --store s3://backups/etcd-main
  Show its value at noon:
      deltafold get /registry/configmaps/default/settings --store s3://backups/etcd-main \\
          --time 2026-11-20T12:00:00Z
  Write a ConfigMap so that kubectl apply takes it:
      deltafold get configmap/default/settings --store s3://backups/etcd-main \\
          --time '1h ago' -o yaml --clean
  Show the Pods of a namespace as they were at noon, as kubectl does:
      deltafold get pods -n shop --store s3://backups/etcd-main --time 12:00
  Show how many replicas a Deployment had:
      deltafold get deploy web -n shop --store s3://backups/etcd-main --time 12:00 \\
          -o json | jq .spec.replicas
  Show a Secret with its values:
      deltafold get secret/shop/db --store s3://backups/etcd-main --show-secrets
  Write the bytes of a value to a file:
      deltafold get my-key --raw --store /backups/etcd-main > value

Formats (-o):
  yaml, json  the object as an API server serves it, or a List of several; values of Secrets are shown
  name        KIND/NAME of each object
  wide        the table of a kind with more columns
  result      keys, values and revisions as one JSON object

A KEY that does not exist is an error (KeyNotFound, exit code 66); a prefix without keys is not.")]
pub(super) struct GetArgs {
    /// Print only the bytes of the value, as etcd has them: those of a Secret, too
    #[arg(long, value_parser = yes_or_no)]
    raw: bool,
    /// Leave out what an API server or a controller sets, so that `kubectl apply -f` takes the object: status, uid,
    /// resourceVersion, managedFields, owners and the like
    #[arg(long, value_parser = yes_or_no)]
    clean: bool,
    /// Show metadata.managedFields of objects
    #[arg(long, value_parser = yes_or_no)]
    show_managed_fields: bool,
    /// Show the values of Secrets in the text, too
    #[arg(long, conflicts_with = "raw", value_parser = yes_or_no)]
    show_secrets: bool,
    /// Sort the table of a kind by a value of the objects, such as .metadata.creationTimestamp or .lastTimestamp
    #[arg(long, value_name = "PATH", value_parser = JsonPath::parse)]
    sort_by: Option<JsonPath>,
    /// Print tables without their headers
    #[arg(long, value_parser = yes_or_no)]
    no_headers: bool,
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

/// The fields before the list of keys.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Head<'a> {
    /// The revision at which the keys are read.
    revision: Revision,
    /// The timeline's ID; null for a plain snapshot file.
    timeline: Option<&'a str>,
    /// Warnings for the operator.
    warnings: &'a [String],
}

impl<'a> Head<'a> {
    fn of(source: &'a State) -> Self {
        Head {
            revision: source.revision,
            timeline: source.timeline_id(),
            warnings: &source.warnings,
        }
    }
}

impl GetArgs {
    /// Whether flags say that KEY is a kind or an object.
    fn means_objects(&self) -> bool {
        let is_labelled = self.labels.selector.is_some();
        self.select.names.namespace.is_some() || self.select.all || is_labelled
    }

    pub(super) fn run(&self, cancel: &Cancel, format: &Format) -> Ended {
        if self.raw && (!self.select.prefix.is_empty() || *format != Format::Text) {
            return Err(Reason::Usage.error(
                "--raw prints the bytes of one value: give it a KEY, and neither --prefix nor -o",
            ));
        }
        if self.sort_by.is_some() && !matches!(format, Format::Text | Format::Wide) {
            return Err(Reason::Usage.error("--sort-by is for tables: leave out -o"));
        }
        let backup = self.backup.backup_at(self.state.request().at, cancel)?;
        let printer = Printer {
            args: self,
            format,
            keys: self.objects.keys()?,
            backup: &backup,
            prefixes: self.select.names.etcd_prefixes(),
        };
        text::log_time(&self.state.point);
        let mut out = Stream::new();
        let printed = decide_again([backup.context()], Purpose::Read, || {
            let (source, scan) = backup.open_with_scan(&self.state.request())?;
            printer.print(backup.context(), scan.as_ref(), &source, &mut out)
        });
        let printed = printed.and_then(|()| self.labels.end(!self.select.words.is_empty()));
        out.end(printed)
    }
}

/// How keys are printed.
struct Printer<'a> {
    args: &'a GetArgs,
    format: &'a Format,
    /// What opens objects that an API server has encrypted.
    keys: EncryptionKeys,
    backup: &'a BackupLocation,
    /// What the keys of API servers begin with.
    prefixes: EtcdPrefixes,
}

impl Printer<'_> {
    fn print(
        &self,
        ctx: &Context,
        scan: Option<&Scan>,
        source: &State,
        out: &mut Stream,
    ) -> Result<()> {
        let select = &self.args.select;
        if select.words.is_empty() {
            return self.print_prefixes(ctx, source, out);
        }
        let prefixes = &self.prefixes;
        let names = select.named(prefixes, false);
        let built_in = names.select(|_| Ok(Vec::new()));
        let mut no_key = None;
        if let [key] = &select.words[..]
            && !self.args.means_objects()
            && *self.format != Format::Wide
        {
            // A key that exists exactly as given comes first. An object of a known kind is looked for in the same pass.
            let mut keys = vec![key.as_bytes().to_vec()];
            let mut objects = match &built_in {
                Ok(Selection::Objects(objects)) => objects.concat(),
                _ => Vec::new(),
            };
            let is_decided = !objects.is_empty();
            objects.retain(|object| object != key.as_bytes());
            keys.append(&mut objects);
            match self.print_first_of(ctx, source, &keys, out)? {
                Got::Record => return Ok(()),
                got if is_decided => return Err(self.absent(scan, source, &keys, got)),
                got => no_key = Some((keys, got)),
            }
        }
        let selection = match built_in {
            Err(e) if e.reason() == Reason::KeyNotFound => {
                names.select(|of| read::kinds(self.backup, source, of, prefixes))
            }
            selection => selection,
        };
        let selection = match (selection, no_key) {
            (Err(e), Some((keys, got))) if e.reason() == Reason::KeyNotFound => {
                let no_key = read::not_found(&keys, source.revision);
                return Err(match got {
                    Got::Beginning => self.absent(scan, source, &keys, got),
                    _ => e.reason().error(format!("{no_key}, and {e}")),
                });
            }
            (selection, _) => selection?,
        };
        let usage = |message| Err(Reason::Usage.error(message));
        match &selection {
            Selection::Kinds(..) if self.args.raw => {
                usage("--raw prints the bytes of one value: give a KEY or the name of an object")
            }
            Selection::Kinds(kinds, range) => {
                self.print_kinds(ctx, scan, source, kinds, range.clone(), out)
            }
            Selection::Objects(_) if select.all || self.args.labels.selector.is_some() => {
                usage("--all and --selector are for all objects of a KIND: leave out the name")
            }
            Selection::Objects(objects)
                if *self.format == Format::Wide
                    && self.print_wide(ctx, scan, source, objects, out)? =>
            {
                Ok(())
            }
            Selection::Objects(objects) => match &objects[..] {
                [keys] => match self.print_first_of(ctx, source, keys, out)? {
                    Got::Record => Ok(()),
                    got => Err(self.absent(scan, source, keys, got)),
                },
                _ => self.print_objects_named(ctx, scan, source, objects, out),
            },
        }
    }

    /// Prints the table of objects, if all of them exist and are of known kinds.
    fn print_wide(
        &self,
        ctx: &Context,
        scan: Option<&Scan>,
        source: &State,
        objects: &[Vec<Vec<u8>>],
        out: &mut Stream,
    ) -> Result<bool> {
        let range = KeyRange::Keys(objects.iter().flatten().cloned().collect());
        let mut found = Keys::read(ctx, source, range.clone())?;
        let mut names = KeyNames::new(Resource::built_in(), &self.prefixes);
        if objects
            .iter()
            .flatten()
            .any(|key| names.lacks(key, &self.prefixes))
        {
            let custom = read::kinds(self.backup, source, KindsOf::State, &self.prefixes)?;
            names = KeyNames::new(Resource::built_in().chain(custom), &self.prefixes);
        }
        let (mut kinds, mut number) = (Vec::new(), 0);
        while found.advance()? {
            let Some(object) = names
                .object(found.current()?.key)
                .map(|o| o.resource.clone())
            else {
                return Ok(false);
            };
            number += 1;
            if !kinds.contains(&object) {
                kinds.push(object);
            }
        }
        if number < objects.len() {
            return Ok(false);
        }
        self.print_table(ctx, scan, source, &kinds, range, out)
    }

    /// Prints several objects. Each may have several keys.
    fn print_objects_named(
        &self,
        ctx: &Context,
        scan: Option<&Scan>,
        source: &State,
        objects: &[Vec<Vec<u8>>],
        out: &mut Stream,
    ) -> Result<()> {
        let mut missing: BTreeSet<Vec<u8>> = objects.iter().flatten().cloned().collect();
        let mut keys = Keys::read(ctx, source, KeyRange::Keys(missing.clone()))?;
        self.print_keys(ctx, source, &mut keys, &mut missing, out)?;
        let is_missing = |keys: &&Vec<Vec<u8>>| keys.iter().all(|key| missing.contains(key));
        match objects.iter().find(is_missing) {
            None => Ok(()),
            Some(keys) => Err(self.absent(scan, source, keys, Got::Nothing)),
        }
    }

    /// Returns the error about keys that do not exist: when they were deleted, and the command that shows them. The first
    /// key may be a name.
    fn absent(&self, scan: Option<&Scan>, source: &State, keys: &[Vec<u8>], got: Got) -> Error {
        // The places of other API servers say nothing more.
        let is_name = keys.first().is_some_and(|key| !key.starts_with(b"/"));
        let e = read::not_found(keys.iter().take(1 + usize::from(is_name)), source.revision);
        if let (Got::Beginning, Some(key)) = (got, keys.first()) {
            return e.reason().error(format!(
                "{e}: for the keys that begin so give --prefix {}",
                key.escape_ascii()
            ));
        }
        let range = KeyRange::Keys(keys.iter().cloned().collect());
        match self.lost(scan, source).keys(&range) {
            Err(e) => e,
            Ok(advice) => e.reason().error(format!("{e}: {advice}")),
        }
    }

    fn lost<'a>(&'a self, scan: Option<&'a Scan>, source: &'a State) -> Lost<'a> {
        Lost {
            args: &self.args.backup,
            backup: self.backup,
            scan,
            state: source,
            prefixes: &self.prefixes,
            keys: &self.keys,
        }
    }

    /// Prints the objects of these kinds in a range.
    fn print_kinds(
        &self,
        ctx: &Context,
        scan: Option<&Scan>,
        source: &State,
        kinds: &[Resource],
        range: KeyRange,
        out: &mut Stream,
    ) -> Result<()> {
        let is_table = matches!(self.format, Format::Text | Format::Wide) && !self.args.clean;
        let has_objects = if is_table {
            self.print_table(ctx, scan, source, kinds, range, out)?
        } else {
            let mut keys = Keys::read(ctx, source, range)?;
            self.print_keys(ctx, source, &mut keys, &mut BTreeSet::new(), out)?
        };
        match &self.args.select.names.namespace {
            Some(namespace) if !has_objects => {
                if let Some(gone) = self.lost(scan, source).namespace(namespace)? {
                    tracing::warn!("{gone}");
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Prints the first of these keys that exists.
    fn print_first_of(
        &self,
        ctx: &Context,
        source: &State,
        keys: &[Vec<u8>],
        out: &mut Stream,
    ) -> Result<Got> {
        read::get(ctx, source, keys, |kv| self.print_key(source, kv, out))
    }

    fn print_prefixes(&self, ctx: &Context, source: &State, out: &mut Stream) -> Result<()> {
        let select = &self.args.select;
        let mut keys = Keys::read(ctx, source, select.prefixes())?;
        let has_keys = self.print_keys(ctx, source, &mut keys, &mut BTreeSet::new(), out)?;
        if !has_keys && *self.format == Format::Text {
            let prefixes = select.prefix.iter();
            let prefixes = prefixes.map(|p| format!("\"{}\"", text::key(p.as_bytes())));
            let prefixes = prefixes.collect::<Vec<_>>().join(" or ");
            let revision = source.revision;
            let none = format!("# no key begins with {prefixes} at revision {revision}\n");
            out.write(none.as_bytes())?;
        }
        Ok(())
    }

    fn print_key(&self, source: &State, kv: &KeyValue<'_>, out: &mut Stream) -> Result<()> {
        if self.args.raw {
            return out.write(kv.value);
        }
        let format = match self.format {
            Format::Text | Format::Wide => return out.write(self.text(kv)?.as_bytes()),
            Format::Result => {
                out.begin_list(&Head::of(source), "keys")?;
                out.item(&KeyWithRecord::new(kv, &self.keys))?;
                return out.end_list();
            }
            format => format,
        };
        let object = self.object(kv).map_err(|e| objects::failure(kv, &e))?;
        let text = match format {
            Format::Yaml => yaml::from_object(&object),
            Format::Name => objects::name(&object) + "\n",
            _ => objects::pretty(&object, "")? + "\n",
        };
        out.write(text.as_bytes())
    }

    fn text(&self, kv: &KeyValue<'_>) -> Result<String> {
        let is_secret = |o: ObjectKey<'_>| o.resource == "secrets";
        if self.args.clean
            && !self.args.show_secrets
            && ObjectKey::from_key(kv.key, Some(kv.value)).is_some_and(is_secret)
        {
            return Err(Reason::Usage.error(format!(
                "{}: with its values hidden, a Secret cannot be applied: give --show-secrets, or -o yaml",
                text::key(kv.key)
            )));
        }
        let shown = text::Shown {
            secrets: self.args.show_secrets,
            managers: self.args.show_managed_fields,
            clean: self.args.clean,
        };
        text::entry(kv, &self.keys, shown).map_err(|e| objects::failure(kv, &e))
    }

    /// Prints keys, or their objects alone, and returns whether there was a key. Removes those that exist from `missing`.
    fn print_keys(
        &self,
        ctx: &Context,
        source: &State,
        keys: &mut Keys,
        missing: &mut BTreeSet<Vec<u8>>,
        out: &mut Stream,
    ) -> Result<bool> {
        if !matches!(self.format, Format::Text | Format::Wide | Format::Result) {
            return self.print_objects(ctx, keys, missing, out);
        }
        if *self.format == Format::Result {
            out.begin_list(&Head::of(source), "keys")?;
        }
        let mut is_first = true;
        while keys.advance()? {
            ctx.store.cancel().check()?;
            let kv = keys.current()?;
            missing.remove(kv.key);
            if !self.args.labels.match_one([&kv], &self.keys) {
                continue;
            }
            if *self.format == Format::Result {
                out.item(&KeyWithRecord::new(&kv, &self.keys))?;
            } else {
                if !is_first {
                    out.write(b"---\n")?;
                }
                out.write(self.text(&kv)?.as_bytes())?;
            }
            is_first = false;
        }
        if *self.format == Format::Result {
            out.end_list()?;
        }
        Ok(!is_first)
    }
}
