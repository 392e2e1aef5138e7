//! The operation `recover`: brings objects of a backup back into a live cluster through its API server.
//!
//! `select` reads them, `plan` decides which go in and in which order; here each is compared with what the server has and, if
//! it lacks, applied. A run that was interrupted is continued by the next one, since what is there already is left.

pub mod plan;
pub mod select;
mod wait;

use crate::base::Cancel;
use crate::base::opt::{NEW_ADDRESSES, OTHER_CLUSTER, OVERWRITE};
use crate::base::plural::{count, either};
use crate::error::{Error, Reason, Result};
use crate::kubernetes::live_objects::{Answer, LiveObjects, ObjectId};
use crate::mvcc::Revision;
use crate::objects::Object;
use crate::objects::changes::FieldChange;
use crate::ops::report::{Report, ReportBuilder};
use chrono::{DateTime, Utc};
use plan::{Left, Plan, Planned};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

/// How long a kind may take to be served after its definition was applied.
const SERVED_WITHIN: Duration = Duration::from_secs(20);
/// The pause before a server is asked again.
const PAUSE: Duration = Duration::from_millis(200);

/// The options of `recover`.
#[derive(Debug, Clone)]
pub struct Options {
    /// Write; otherwise the server only says what it would do.
    pub execute: bool,
    /// Also change objects that exist and differ.
    pub overwrite: bool,
    /// Leave what exists, and do not compare it.
    pub only_missing: bool,
    /// Also into another cluster than that of the backup.
    pub other_cluster: bool,
    /// Let the server choose addresses of Services that are taken.
    pub new_addresses: bool,
    /// How long to wait until what was recovered is ready; `None` for not at all.
    pub wait: Option<Duration>,
}

/// What happened to an object; in a dry run, what would.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It was missing, and was created.
    Created,
    /// It existed with other fields, and was changed.
    Updated,
    /// It exists as it was.
    Unchanged,
    /// It exists with other fields, and was left.
    Differs,
    /// It need not or must not be recovered.
    LeftOut,
    /// It cannot be recovered.
    Refused,
}

/// An object that was selected.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RecoveredObject {
    /// The name by which `get` finds it, such as `configmap/shop/settings`, or its key.
    pub object: String,
    /// What happened to it; in a dry run, what would.
    pub outcome: Outcome,
    /// Why; null if that needs no reason.
    pub reason: Option<String>,
    /// Whether the server could check it in a dry run: not if its namespace or its definition is to be created first.
    pub checked: bool,
    /// The fields that differ: `old` is the value in the cluster, `new` the value after the object of the backup is applied.
    pub changes: Vec<FieldChange>,
    /// Fields that the rules took out, beside those that a server sets in every object.
    pub without: Vec<String>,
    /// Whether it is ready; null if nobody waited for it.
    pub ready: Option<bool>,
}

/// The result of `recover`. The fields are a contract.
#[derive(Debug, Clone, Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RecoveredState {
    /// Whether this was a dry run, without `--execute`.
    pub dry_run: bool,
    /// The revision of the backup; of deletions, the last one of the span.
    pub revision: Revision,
    /// The revision after which deletions were looked for; null if objects of one state were.
    pub after_revision: Option<Revision>,
    /// The moment that was asked for; null if none was.
    pub as_of: Option<DateTime<Utc>>,
    /// The URL of the API server.
    pub server: String,
    /// Number of objects that were created.
    pub created: u64,
    /// Number of objects that were changed.
    pub updated: u64,
    /// Number of objects that exist as they were.
    pub unchanged: u64,
    /// Number of objects that exist with other fields and were left.
    pub differing: u64,
    /// Number of objects that need not or must not be recovered.
    pub left_out: u64,
    /// Number of objects that cannot be recovered.
    pub refused: u64,
    /// All objects: first those that are not recovered, then the others in the order in which they go in.
    pub objects: Vec<RecoveredObject>,
}

/// A part of the report that is shown at once.
pub enum Told<'a> {
    /// The next object.
    Object(&'a RecoveredObject),
    /// What is waited for.
    Waiting(&'a str),
}

/// What was selected of the backup.
pub struct Source {
    /// The plan.
    pub plan: Plan,
    /// The revision of the backup.
    pub revision: Revision,
    /// The revision after which deletions were looked for.
    pub after_revision: Option<Revision>,
    /// The UID of the backup's cluster, if it is known.
    pub cluster_uid: Option<String>,
}

/// Recovers what is planned.
///
/// The report's error is `PartlyDone` if an object was refused, or not ready in time; `OtherCluster` if the backup is that of
/// another cluster, or its cluster is unknown; as [`LiveObjects::get`].
pub fn run(
    cluster: &mut LiveObjects,
    cancel: &Cancel,
    options: &Options,
    source: Source,
    warnings: Vec<String>,
    tell: &mut dyn FnMut(Told<'_>) -> Result<()>,
) -> Report<RecoveredState> {
    let mut clock = ReportBuilder::start();
    clock.warnings = warnings;
    let mut state = RecoveredState {
        dry_run: !options.execute,
        revision: source.revision,
        after_revision: source.after_revision,
        server: cluster.server().to_owned(),
        ..RecoveredState::default()
    };
    let planned = source.plan.recovered;
    let mut run = Run {
        cluster,
        options,
        namespaces: HashMap::new(),
        planned: planned.iter().map(|one| Name::of(&one.id)).collect(),
        defined: planned
            .iter()
            .filter_map(|one| definition(&one.object))
            .collect(),
        uids: HashMap::new(),
    };
    let recover_all = || {
        run.check_cluster(source.cluster_uid.as_deref())?;
        for left in source.plan.left {
            let left = left.into();
            tell(Told::Object(&left))?;
            state.add(left);
        }
        run.all(cancel, &planned, &mut state, tell)
    };
    let failure = recover_all().err().or_else(|| state.failure());
    let did_something = state.created + state.updated > 0;
    clock.ended(state, did_something, failure)
}

/// An object, whatever the version of its API.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Name {
    group: String,
    kind: String,
    namespace: Option<String>,
    name: String,
}

impl Name {
    fn of(id: &ObjectId) -> Self {
        Name {
            group: id.group().to_owned(),
            kind: id.kind.clone(),
            namespace: id.namespace.clone(),
            name: id.name.clone(),
        }
    }
}

/// Returns the group and the kind that an object defines, if it is a definition.
fn definition(object: &Object) -> Option<(String, String)> {
    if object.kind() != "CustomResourceDefinition" {
        return None;
    }
    let spec = object.json.get("spec")?;
    let kind = spec.get("names")?.get("kind")?.as_str()?;
    Some((spec.get("group")?.as_str()?.to_owned(), kind.to_owned()))
}

/// What a namespace is now.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Namespace {
    Active,
    Missing,
    /// It is being deleted, and this is why that takes long.
    Terminating(String),
}

struct Run<'a> {
    cluster: &'a mut LiveObjects,
    options: &'a Options,
    namespaces: HashMap<String, Namespace>,
    /// All objects of the plan.
    planned: HashSet<Name>,
    /// The kinds whose definitions are in the plan.
    defined: HashSet<(String, String)>,
    /// The UIDs that possible owners have now; `None` if there is no such object.
    uids: HashMap<Name, Option<String>>,
}

impl Run<'_> {
    fn all(
        &mut self,
        cancel: &Cancel,
        planned: &[Planned],
        state: &mut RecoveredState,
        tell: &mut dyn FnMut(Told<'_>) -> Result<()>,
    ) -> Result<()> {
        let mut waited_for = Vec::new();
        for one in planned {
            cancel.check()?;
            let mut recovered = RecoveredObject::new(one.name.clone());
            recovered.without.clone_from(&one.without);
            self.recover(one, &mut recovered)?;
            tell(Told::Object(&recovered))?;
            if !matches!(recovered.outcome, Outcome::LeftOut | Outcome::Refused) {
                waited_for.push((state.objects.len(), &one.id));
            }
            state.add(recovered);
        }
        match self.options.wait {
            Some(timeout) if self.options.execute => {
                wait::until_ready(self.cluster, cancel, timeout, &waited_for, state, tell)
            }
            _ => Ok(()),
        }
    }

    /// Fails unless the cluster is that of the backup, or may be another one.
    fn check_cluster(&mut self, of_backup: Option<&str>) -> Result<()> {
        if self.options.other_cluster {
            return Ok(());
        }
        let server = self.cluster.server().to_owned();
        let refuse = |what: String| {
            Err(Reason::OtherCluster.error(format!(
                "{what}; give {OTHER_CLUSTER} if {server} is meant all the same"
            )))
        };
        let Some(of_backup) = of_backup else {
            return refuse(
                "the backup does not tell which cluster it is of: it has no namespace kube-system that can be read".to_owned(),
            );
        };
        match self.get(&namespace_id("kube-system"))? {
            Answer::Done(live) => {
                let live = live.metadata_text("uid");
                if live == of_backup {
                    return Ok(());
                }
                refuse(format!(
                    "the backup is of another cluster: the UID of its namespace kube-system is {of_backup}, there it is {live}"
                ))
            }
            Answer::Refused(why) => Err(Reason::PermissionDenied.error(format!(
                "cannot compare the cluster at {server} with that of the backup: {why}; {OTHER_CLUSTER} skips it"
            ))),
            Answer::Missing | Answer::NotServed => {
                refuse("the cluster has no namespace kube-system".to_owned())
            }
        }
    }

    /// Compares an object with what the server has, and applies it if that is wanted.
    fn recover(&mut self, one: &Planned, to: &mut RecoveredObject) -> Result<()> {
        let is_dry_run = !self.options.execute;
        if !self.has_place(one, to)? {
            return Ok(());
        }
        let live = match self.get_served(&one.id)? {
            Answer::Done(live) => Some(live),
            Answer::Missing => None,
            Answer::NotServed if is_dry_run && self.is_defined(&one.id) => {
                (to.outcome, to.checked) = (Outcome::Created, false);
                return Ok(());
            }
            Answer::NotServed => {
                to.refuse(format!(
                    "the API server does not serve {} of {}",
                    one.id.kind, one.id.api_version
                ));
                return Ok(());
            }
            Answer::Refused(why) => {
                to.refuse(why);
                return Ok(());
            }
        };
        if let Some(live) = live {
            return self.recover_existing(one, &live, to);
        }
        let mut object = self.with_owners(one, to)?;
        if let Some(applied) = self.apply(one, &mut object, is_dry_run, to)? {
            to.outcome = Outcome::Created;
            if !is_dry_run {
                let uid = applied.metadata_text("uid").to_owned();
                self.uids.insert(Name::of(&one.id), Some(uid));
                if one.id.kind == "Namespace" {
                    self.namespaces
                        .insert(one.id.name.clone(), Namespace::Active);
                }
            }
        }
        Ok(())
    }

    /// Whether an object's namespace takes it now. If not, `to` says why.
    fn has_place(&mut self, one: &Planned, to: &mut RecoveredObject) -> Result<bool> {
        let Some(namespace) = &one.id.namespace else {
            return Ok(true);
        };
        let is_planned = self.planned.contains(&Name::of(&namespace_id(namespace)));
        match self.namespace(namespace)? {
            Namespace::Active => return Ok(true),
            Namespace::Terminating(why) => to.refuse(format!(
                "its namespace is being deleted: run again when it is gone{why}"
            )),
            Namespace::Missing if !is_planned => to.refuse(format!(
                "there is no namespace {namespace}: recover it, too"
            )),
            Namespace::Missing if self.options.execute => return Ok(true),
            Namespace::Missing => (to.outcome, to.checked) = (Outcome::Created, false),
        }
        Ok(false)
    }

    /// Compares an object with the one that exists, and changes that if it is wanted.
    fn recover_existing(
        &mut self,
        one: &Planned,
        live: &Object,
        to: &mut RecoveredObject,
    ) -> Result<()> {
        if live.is_terminating() {
            to.refuse("it is being deleted: run again when it is gone".to_owned());
            return Ok(());
        }
        if self.options.only_missing {
            (to.outcome, to.reason) = (Outcome::LeftOut, Some("it exists".to_owned()));
            return Ok(());
        }
        let mut object = self.with_owners(one, to)?;
        // The server sets defaults, so it says what would be changed.
        let Some(applied) = self.apply(one, &mut object, true, to)? else {
            // Such as a field that is immutable.
            if !self.options.overwrite {
                let why = to.reason.take().unwrap_or_default();
                to.outcome = Outcome::Differs;
                to.reason = Some(format!("it exists, and cannot become so: {why}"));
            }
            return Ok(());
        };
        to.changes = applied.changes_since(live);
        let released = released_claim(live, &one.object);
        to.changes.extend(released.clone());
        if to.changes.is_empty() {
            to.outcome = Outcome::Unchanged;
            return Ok(());
        }
        if !self.options.overwrite {
            to.outcome = Outcome::Differs;
            to.reason = Some(format!(
                "it exists with other fields; {OVERWRITE} changes it"
            ));
            return Ok(());
        }
        to.outcome = Outcome::Updated;
        if self.options.execute
            && self.apply(one, &mut object, false, to)?.is_some()
            && released.is_some()
        {
            self.bind_by_name(&one.id, to)?;
        }
        Ok(())
    }

    /// Applies an object. `None` if the server refuses, with the reason in `to`.
    fn apply(
        &mut self,
        one: &Planned,
        object: &mut Object,
        is_dry_run: bool,
        to: &mut RecoveredObject,
    ) -> Result<Option<Object>> {
        let begun = Instant::now();
        loop {
            let why = match self.cluster.apply(&one.id, &object.json, is_dry_run)? {
                Answer::Done(applied) => return Ok(Some(Object::from_json(applied))),
                // A kind that was just defined is not served by all of the server yet.
                Answer::Missing if begun.elapsed() < SERVED_WITHIN && !self.defined.is_empty() => {
                    std::thread::sleep(PAUSE);
                    continue;
                }
                Answer::Missing => "the API server does not find its kind".to_owned(),
                Answer::NotServed => "the API server does not serve its kind".to_owned(),
                Answer::Refused(why) => why,
            };
            let is_of_address = why.contains("spec.clusterIP") || why.contains("odePort");
            if is_of_address && self.options.new_addresses && object.forget_addresses() {
                to.without.push("spec.clusterIP, node ports".to_owned());
                continue;
            }
            let advice = if is_of_address && object.clone().forget_addresses() {
                format!("; {NEW_ADDRESSES} lets the server choose others")
            } else {
                String::new()
            };
            to.refuse(format!("{why}{advice}"));
            return Ok(None);
        }
    }

    fn get(&mut self, id: &ObjectId) -> Result<Answer<Object>> {
        Ok(self.cluster.get(id)?.map(Object::from_json))
    }

    /// Reads an object. A kind that this run has defined may be served a moment later.
    fn get_served(&mut self, id: &ObjectId) -> Result<Answer<Object>> {
        let waits = self.options.execute && self.is_defined(id);
        let begun = Instant::now();
        loop {
            match self.get(id)? {
                Answer::NotServed if waits && begun.elapsed() < SERVED_WITHIN => {
                    std::thread::sleep(PAUSE);
                }
                answer => return Ok(answer),
            }
        }
    }

    /// Whether the definition of an object's kind is in the plan.
    fn is_defined(&self, id: &ObjectId) -> bool {
        let kind = (id.group().to_owned(), id.kind.clone());
        self.defined.contains(&kind)
    }

    /// Returns what a namespace is now.
    fn namespace(&mut self, name: &str) -> Result<Namespace> {
        if let Some(known) = self.namespaces.get(name) {
            return Ok(known.clone());
        }
        let found = match self.get(&namespace_id(name))? {
            Answer::Missing => Namespace::Missing,
            Answer::Done(live) if live.is_terminating() => {
                Namespace::Terminating(what_remains(&live))
            }
            // Who may not read it may still write in it.
            Answer::Done(_) | Answer::NotServed | Answer::Refused(_) => Namespace::Active,
        };
        self.namespaces.insert(name.to_owned(), found.clone());
        Ok(found)
    }

    /// Returns an object with the owners that exist, and the UIDs that they have now.
    fn with_owners(&mut self, one: &Planned, to: &mut RecoveredObject) -> Result<Object> {
        let mut object = one.object.clone();
        let mut kept = Vec::new();
        for reference in &one.owners {
            let text = |field: &str| reference[field].as_str().unwrap_or_default().to_owned();
            let id = ObjectId {
                api_version: text("apiVersion"),
                kind: text("kind"),
                namespace: one.id.namespace.clone(),
                name: text("name"),
            };
            match self.uid_of(&id)? {
                Some(uid) => {
                    let mut reference = reference.clone();
                    reference["uid"] = uid.into();
                    kept.push(reference);
                }
                // It is created before what it owns.
                None if !self.options.execute && self.is_planned(&id) => {
                    kept.push(reference.clone())
                }
                None => to
                    .without
                    .push(format!("metadata.ownerReferences[{}/{}]", id.kind, id.name)),
            }
        }
        if !kept.is_empty() {
            object.set_owners(kept);
        }
        Ok(object)
    }

    fn is_planned(&self, id: &ObjectId) -> bool {
        let mut name = Name::of(id);
        let is_namespaced = self.planned.contains(&name);
        name.namespace = None;
        is_namespaced || self.planned.contains(&name)
    }

    /// Returns the UID that an owner has now; `None` if it is gone or about to be.
    fn uid_of(&mut self, id: &ObjectId) -> Result<Option<String>> {
        let name = Name::of(id);
        if let Some(known) = self.uids.get(&name) {
            return Ok(known.clone());
        }
        let found = match self.get(id)? {
            Answer::Done(live) if !live.is_terminating() => {
                Some(live.metadata_text("uid").to_owned())
            }
            _ => None,
        };
        self.uids.insert(name, found.clone());
        Ok(found)
    }

    /// Makes a volume that waits for a claim which is gone one for the new claim of the same name.
    fn bind_by_name(&mut self, id: &ObjectId, to: &mut RecoveredObject) -> Result<()> {
        let patch = json!({"spec": {"claimRef": {"uid": null, "resourceVersion": null}}});
        if let Answer::Refused(why) = self.cluster.merge(id, &patch)? {
            to.refuse(why);
        }
        Ok(())
    }
}

/// Returns the field by which a released volume waits for a claim that is gone, if the volume of the backup names the same
/// claim.
fn released_claim(live: &Object, backup: &Object) -> Option<FieldChange> {
    if live.kind() != "PersistentVolume" {
        return None;
    }
    let is_released = live.json.get("status")?.get("phase")? == "Released";
    let claim = |object: &Object| object.json.get("spec")?.get("claimRef").cloned();
    let (live, backup) = (claim(live)?, claim(backup)?);
    let is_same = live["namespace"] == backup["namespace"] && live["name"] == backup["name"];
    Some(FieldChange {
        path: "spec.claimRef.uid".to_owned(),
        old: Some(live.get("uid")?.clone()),
        new: None,
    })
    .filter(|_| is_released && is_same)
}

fn namespace_id(name: &str) -> ObjectId {
    ObjectId {
        api_version: "v1".to_owned(),
        kind: "Namespace".to_owned(),
        namespace: None,
        name: name.to_owned(),
    }
}

/// Says what is left in a namespace that is being deleted.
fn what_remains(namespace: &Object) -> String {
    let conditions = namespace
        .json
        .get("status")
        .and_then(|s| s.get("conditions"));
    let conditions = conditions.and_then(Value::as_array).into_iter().flatten();
    let true_ones = conditions.filter(|c| c["status"] == "True");
    let messages: Vec<&str> = true_ones.filter_map(|c| c["message"].as_str()).collect();
    if messages.is_empty() {
        return String::new();
    }
    format!(" ({})", messages.join("; "))
}

impl RecoveredObject {
    fn new(object: String) -> Self {
        RecoveredObject {
            object,
            outcome: Outcome::Refused,
            reason: None,
            checked: true,
            changes: Vec::new(),
            without: Vec::new(),
            ready: None,
        }
    }

    fn refuse(&mut self, reason: String) {
        (self.outcome, self.reason) = (Outcome::Refused, Some(reason));
    }
}

impl From<Left> for RecoveredObject {
    fn from(left: Left) -> Self {
        RecoveredObject {
            outcome: left.outcome,
            reason: Some(left.reason),
            ..RecoveredObject::new(left.name)
        }
    }
}

impl RecoveredState {
    fn add(&mut self, object: RecoveredObject) {
        *match object.outcome {
            Outcome::Created => &mut self.created,
            Outcome::Updated => &mut self.updated,
            Outcome::Unchanged => &mut self.unchanged,
            Outcome::Differs => &mut self.differing,
            Outcome::LeftOut => &mut self.left_out,
            Outcome::Refused => &mut self.refused,
        } += 1;
        self.objects.push(object);
    }

    /// Returns the error for what was not recovered, or is not ready.
    fn failure(&self) -> Option<Error> {
        if self.refused > 0 {
            return Some(Reason::PartlyDone.error(format!(
                "{} {} refused",
                count(self.refused, "object"),
                either(self.refused, "was", "were")
            )));
        }
        let not_ready = self
            .objects
            .iter()
            .filter(|o| o.ready == Some(false))
            .count();
        (not_ready > 0).then(|| {
            Reason::PartlyDone.error(format!("{} not ready in time", count(not_ready, "object")))
        })
    }
}
