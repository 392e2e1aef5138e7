//! `deltafold get`: its arguments, and keys with their values as text or JSON.
//!
//! `objects` prints objects alone, and `table` the table of a kind. `ops::read` reads the keys.

mod objects;
mod table;

pub use table::table;

use super::format::Format;
use super::objects::{NameArgs, ObjectArgs};
use super::stream::Stream;
use super::{BackupArgs, Ended, text};
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::error::{Error, Reason, Result};
use crate::mvcc::{KeyRange, KeyValue, Revision};
use crate::objects::reference::Reference;
use crate::objects::resource::{Resource, labels};
use crate::objects::selector::Selector;
use crate::objects::{EncryptionKeys, Object, yaml};
use crate::ops::options::StateOptions;
use crate::ops::read::json::KeyWithRecord;
use crate::ops::read::{self, Keys};
use crate::prefix::Context;
use crate::prefix::damage::up_to_damage;
use crate::prefix::open::BackupLocation;
use crate::prefix::open::State;
use clap::Args;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

/// Show keys and values of a backup, at any revision or time
///
/// Nothing is restored. Objects of Kubernetes are decoded and shown as YAML, as an API server serves them in their
/// stored version; so are other JSON objects, and other text is shown unchanged. Keys are sorted by their bytes.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Show the newest value of a key:
      deltafold get /registry/configmaps/default/settings --store s3://backups/etcd-main
  Show its value at noon:
      deltafold get /registry/configmaps/default/settings --store s3://backups/etcd-main \\
          --time 2026-11-20T12:00:00Z
  Bring a deleted ConfigMap back:
      deltafold get configmap/default/settings --store s3://backups/etcd-main \\
          --time '1h ago' -o yaml --clean | kubectl apply -f -
  Show the Pods of a namespace as they were at noon, as kubectl does:
      deltafold get pods -n shop --store s3://backups/etcd-main --time 12:00
  Show how many replicas a Deployment had:
      deltafold get deploy web -n shop --store s3://backups/etcd-main --time 12:00 \\
          -o jsonpath='{.spec.replicas}'
  Show a Secret with its values:
      deltafold get secret/shop/db --store s3://backups/etcd-main --show-secrets
  Write the bytes of a value to a file:
      deltafold get my-key --raw --store /backups/etcd-main > value

Formats (-o):
  yaml, json         the object as an API server serves it, or a List of several; values of Secrets are shown
  name               KIND/NAME of each object
  wide               the table of a kind with more columns
  jsonpath=TEMPLATE  what kubectl's simple paths find, such as '{.spec.replicas}' or '{.items[*].metadata.name}'
  result             keys, values and revisions as one JSON object: deltafold schema get

A KEY that does not exist is an error (KeyNotFound, exit code 66); a prefix without keys is not.")]
pub(super) struct GetArgs {
    /// Key to show; or KIND/NAMESPACE/NAME or KIND NAME of a Kubernetes object; or KIND for a table of objects
    ///
    /// The kind is in any case, singular, plural or a short name (deployment, Deployments, deploy); KIND.GROUP if two
    /// have the same name; several kinds are separated by commas, and `all` means the common ones. KIND/NAME if the kind
    /// has no namespace. A key that exists exactly as given comes first.
    #[arg(
        value_name = "KEY",
        required_unless_present = "prefix",
        conflicts_with = "prefix"
    )]
    words: Vec<OsString>,
    /// Show all keys with this prefix; an empty prefix means all keys
    #[arg(long, value_name = "P")]
    prefix: Option<OsString>,
    #[command(flatten)]
    names: NameArgs,
    /// Show the objects of KIND in all namespaces
    #[arg(short = 'A', long, visible_alias = "all-namespaces", conflicts_with_all = ["prefix", "namespace"], value_parser = yes_or_no)]
    all: bool,
    /// Only show objects with these labels, such as app=web, "tier in (a, b)" or !legacy
    #[arg(short = 'l', long, value_name = "LABELS", conflicts_with = "prefix")]
    selector: Option<Selector>,
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
    #[command(flatten)]
    state: StateOptions,
    #[command(flatten)]
    objects: ObjectArgs,
    #[command(flatten)]
    backup: BackupArgs,
}

/// The fields before the list of keys.
#[derive(JsonSchema, Serialize)]
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
        self.names.namespace.is_some() || self.all || self.selector.is_some()
    }

    pub(super) fn run(&self, cancel: &Cancel, format: &Format) -> Ended {
        if self.raw && (self.prefix.is_some() || *format != Format::Text) {
            return Err(Reason::Usage.error(
                "--raw prints the bytes of one value: give it a KEY, and neither --prefix nor -o",
            ));
        }
        if self.names.namespace.is_some() && self.prefix.is_some() {
            return Err(Reason::Usage
                .error("--namespace is for objects, and --prefix for keys: give one of them"));
        }
        let backup = self.backup.backup(cancel)?;
        let printer = Printer {
            args: self,
            format,
            keys: self.objects.keys()?,
            backup: &backup,
        };
        text::log_time(&self.state.point);
        let mut out = Stream::new();
        let printed = up_to_damage([backup.context()?], || {
            let (ctx, source) = backup.open(&self.state.request())?;
            printer.print(ctx, &source, &mut out)
        });
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
}

impl Printer<'_> {
    fn print(&self, ctx: &Context, source: &State, out: &mut Stream) -> Result<()> {
        let [key, others @ ..] = &self.args.words[..] else {
            let prefix = self.args.prefix.as_ref().map(|p| p.as_bytes());
            return self.print_prefix(ctx, source, prefix.unwrap_or_default(), out);
        };
        let namespace = self.args.names.namespace.as_deref();
        let words: Option<Vec<&str>> = self.args.words.iter().map(|word| word.to_str()).collect();
        let named = words.and_then(|words| Reference::parse_all(&words, namespace));
        let may_be_key = others.is_empty() && !self.args.means_objects();
        let exact = may_be_key.then_some(key.as_bytes());
        match named.as_deref() {
            Some([one]) => self.print_referred(ctx, source, exact, one, out),
            Some(several) => {
                if let Some(exact) = exact {
                    match self.print_first_of(ctx, source, &[exact.to_vec()], out) {
                        Err(e) if e.reason() == Reason::KeyNotFound => {}
                        printed => return printed,
                    }
                }
                self.print_several(ctx, source, several, out)
            }
            None if others.is_empty() => {
                self.print_first_of(ctx, source, &[key.as_bytes().to_vec()], out)
            }
            None => Err(Reason::Usage.error(
                "give one KEY, KIND NAME..., or KIND/NAMESPACE/NAME of each object; for several keys give --prefix",
            )),
        }
    }

    /// Prints the objects of several kinds, or with several names.
    fn print_several(
        &self,
        ctx: &Context,
        source: &State,
        references: &[Reference],
        out: &mut Stream,
    ) -> Result<()> {
        let prefixes = &self.args.names.etcd_prefixes();
        let mut resources: Vec<Resource> = Resource::built_in().collect();
        let find = |r: &Reference, resources: &[Resource]| {
            r.resource(resources).map(Option::<&Resource>::cloned)
        };
        for reference in references {
            if find(reference, &resources)?.is_none() {
                resources.extend(read::custom_resources(ctx, source, prefixes)?);
                break;
            }
        }
        let (mut kinds, mut below, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
        for reference in references {
            let resource = find(reference, &resources)?
                .ok_or_else(|| self.unknown_kind(&reference.kind, None, source))?;
            if reference.name.is_some() {
                wanted.push(reference.keys(&resource, prefixes)?);
                continue;
            }
            below.extend(reference.prefixes(&resource, prefixes, self.args.all)?);
            kinds.push(resource);
        }
        if wanted.is_empty() {
            return self.print_kinds(ctx, source, &kinds, KeyRange::prefixes(below), out);
        }
        let mut missing: BTreeSet<Vec<u8>> = wanted.iter().flatten().cloned().collect();
        let mut keys = Keys::read(ctx, source, KeyRange::Keys(missing.clone()))?;
        self.print_keys(ctx, source, &mut keys, &mut missing, out)?;
        let mut wanted = wanted.iter();
        match wanted.find(|keys| keys.iter().all(|key| missing.contains(key))) {
            None => Ok(()),
            Some(keys) => Err(Reason::KeyNotFound.error(format!(
                "there is no key \"{}\" at revision {}",
                text::key(&keys[0]),
                source.revision
            ))),
        }
    }

    /// Returns the error for a kind that is unknown, and for the key that is not there either, if it may be one.
    fn unknown_kind(&self, kind: &str, exact: Option<&[u8]>, source: &State) -> Error {
        let no_key = |key| {
            let (key, revision) = (text::key(key), source.revision);
            format!("there is no key \"{key}\" at revision {revision}, and ")
        };
        Reason::KeyNotFound.error(format!(
            "{}\"{kind}\" is neither a kind of Kubernetes' own nor of a CustomResourceDefinition below {}: check the name, or --etcd-prefix",
            exact.map_or_else(String::new, no_key),
            self.args.names.etcd_prefixes()
        ))
    }

    /// Prints an object, or the objects of a kind. A key that exists exactly as given, if it may be one, comes first.
    fn print_referred(
        &self,
        ctx: &Context,
        source: &State,
        exact: Option<&[u8]>,
        reference: &Reference,
        out: &mut Stream,
    ) -> Result<()> {
        let prefixes = &self.args.names.etcd_prefixes();
        let mut resources: Vec<Resource> = Resource::built_in().collect();
        let mut resource = reference.resource(&resources)?;
        let mut not_found = None;
        if let Some(exact) = exact {
            let mut keys = vec![exact.to_vec()];
            if let Some(resource) = resource
                && let Ok(of_object) = reference.keys(resource, prefixes)
                && reference.name.is_some()
            {
                keys.extend(of_object);
            }
            match self.print_first_of(ctx, source, &keys, out) {
                Err(e) if e.reason() == Reason::KeyNotFound => not_found = Some(e),
                printed => return printed,
            }
        }
        let is_built_in = resource.is_some();
        if !is_built_in {
            resources = read::custom_resources(ctx, source, prefixes)?;
            resource = reference.resource(&resources)?;
        }
        let Some(resource) = resource else {
            if let (Some(e), None) = (not_found, &reference.name) {
                return Err(e);
            }
            return Err(self.unknown_kind(&reference.kind, exact, source));
        };
        if reference.name.is_none() {
            if self.args.raw {
                return Err(Reason::Usage.error(
                    "--raw prints the bytes of one value: give a KEY or the name of an object",
                ));
            }
            let below = reference.prefixes(resource, prefixes, self.args.all)?;
            let kinds = std::slice::from_ref(resource);
            return self.print_kinds(ctx, source, kinds, KeyRange::prefixes(below), out);
        }
        if self.args.all || self.args.selector.is_some() {
            return Err(Reason::Usage
                .error("--all and --selector are for all objects of a KIND: leave out the name"));
        }
        let keys = reference.keys(resource, prefixes)?;
        match not_found {
            Some(e) if is_built_in => Err(e),
            _ => self.print_first_of(ctx, source, &keys, out),
        }
    }

    /// Prints the objects of these kinds in a range.
    fn print_kinds(
        &self,
        ctx: &Context,
        source: &State,
        kinds: &[Resource],
        range: KeyRange,
        out: &mut Stream,
    ) -> Result<()> {
        if matches!(self.format, Format::Text | Format::Wide) && !self.args.clean {
            return self.print_table(ctx, source, kinds, range, out);
        }
        let mut keys = Keys::read(ctx, source, range)?;
        self.print_keys(ctx, source, &mut keys, &mut BTreeSet::new(), out)
            .map(drop)
    }

    /// Prints the first of these keys that exists.
    fn print_first_of(
        &self,
        ctx: &Context,
        source: &State,
        keys: &[Vec<u8>],
        out: &mut Stream,
    ) -> Result<()> {
        read::get(ctx, source, keys, |kv| self.print_key(source, kv, out))
    }

    fn print_prefix(
        &self,
        ctx: &Context,
        source: &State,
        prefix: &[u8],
        out: &mut Stream,
    ) -> Result<()> {
        let mut keys = Keys::read(ctx, source, KeyRange::Prefix(prefix.to_vec()))?;
        let has_keys = self.print_keys(ctx, source, &mut keys, &mut BTreeSet::new(), out)?;
        if !has_keys && *self.format == Format::Text {
            let prefix = text::key(prefix);
            let revision = source.revision;
            let none = format!("# no key begins with \"{prefix}\" at revision {revision}\n");
            out.write(none.as_bytes())?;
        }
        Ok(())
    }

    /// Whether the labels of an object are those that are asked for.
    fn is_selected(&self, object: &Map<String, Value>) -> bool {
        let selector = self.args.selector.as_ref();
        selector.is_none_or(|selector| selector.matches(labels(object)))
    }

    fn print_key(&self, source: &State, kv: &KeyValue<'_>, out: &mut Stream) -> Result<()> {
        if self.args.raw {
            return out.write(kv.value);
        }
        let format = match self.format {
            Format::Text | Format::Wide => return out.write(self.text(kv).as_bytes()),
            Format::Result => {
                out.begin_list(&Head::of(source), "keys")?;
                out.item(&KeyWithRecord::new(kv, &self.keys))?;
                return out.end_list();
            }
            format => format,
        };
        let object = self.object(kv).map_err(|e| objects::not_decoded(kv, &e))?;
        let text = match format {
            Format::Yaml => yaml::from_object(&object),
            Format::Name => objects::name(&object) + "\n",
            Format::JsonPath(template) => template.of_object(&Value::Object(object)),
            _ => objects::pretty(&object, "")? + "\n",
        };
        out.write(text.as_bytes())
    }

    fn text(&self, kv: &KeyValue<'_>) -> String {
        let shown = text::Shown {
            secrets: self.args.show_secrets,
            managers: self.args.show_managed_fields,
            clean: self.args.clean,
        };
        text::entry(kv, &self.keys, shown)
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
            return self.print_objects(ctx, keys, missing, out).map(|()| true);
        }
        if *self.format == Format::Result {
            out.begin_list(&Head::of(source), "keys")?;
        }
        let mut is_first = true;
        while keys.advance()? {
            ctx.store.cancel().check()?;
            let kv = keys.current()?;
            missing.remove(kv.key);
            if self.args.selector.is_some() {
                let object = Object::of_record(&kv, &self.keys);
                if !object.is_ok_and(|object| self.is_selected(&object.json)) {
                    continue;
                }
            }
            if *self.format == Format::Result {
                out.item(&KeyWithRecord::new(&kv, &self.keys))?;
            } else {
                if !is_first {
                    out.write(b"---\n")?;
                }
                out.write(self.text(&kv).as_bytes())?;
            }
            is_first = false;
        }
        if *self.format == Format::Result {
            out.end_list()?;
        }
        Ok(!is_first)
    }
}
