//! The plan of a copy: what is copied, in which order, and why. A pure function of two listings, the
//! options and the time.
//!
//! Reads names only, and no store. `ops::copy::copier` carries it out; a dry run prints it.

use crate::backup::catalog::V1;
use crate::backup::codec::Compression;
use crate::backup::{Catalog, Snapshot, SnapshotName};
use crate::base::opt;
use crate::mvcc::Revision;
use clap::Args;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use strum::IntoStaticStr;

/// Seconds per day.
const DAY: i64 = 86_400;

/// Who can read the copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Encryption {
    /// Whoever can read the source: the encryption does not change.
    #[default]
    Keep,
    /// The given recipients only.
    Encrypt,
    /// Everybody: encrypted snapshots are decrypted.
    Decrypt,
}

impl Encryption {
    /// Returns the name of a snapshot in the target.
    pub fn name(self, source: &SnapshotName) -> SnapshotName {
        SnapshotName {
            is_encrypted: match self {
                Encryption::Keep => source.is_encrypted,
                Encryption::Encrypt => true,
                Encryption::Decrypt => false,
            },
            ..source.clone()
        }
    }

    /// Returns whether a snapshot is copied byte for byte.
    pub fn is_verbatim(self, source: &SnapshotName) -> bool {
        self != Encryption::Encrypt && self.name(source) == *source
    }
}

/// Limits of what is copied.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CopyLimits {
    /// Copy only the newest N backups [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(1..=u32::MAX.into()))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_backups: Option<i64>,
    /// Copy only backups whose full snapshot is at most this many days old [default: all]
    #[arg(long, value_name = "DAYS", value_parser = clap::value_parser!(i64).range(0..=u32::MAX.into()))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_backup_age: Option<i64>,
}

/// Which snapshots are copied, and in which form.
#[derive(Debug, Clone, Default)]
pub struct Selection {
    /// The number of newest backups to copy; `None` copies all.
    pub max_backups: Option<u32>,
    /// The largest age in days of a backup, by the name of its full; `None` copies all.
    pub max_backup_age_days: Option<u32>,
    /// Copy excluded snapshots, too, with their exclusion markers.
    pub excluded: bool,
    /// How the encryption changes.
    pub encryption: Encryption,
}

/// What the plan does with a snapshot of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Decision {
    /// It is copied.
    Copy,
    /// The target has it.
    Keep,
    /// It is not selected, or would be useless in the target.
    Skip,
    /// The target has another object of its name.
    Conflict,
}

/// The reason for a decision. The names are a contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, IntoStaticStr)]
pub enum CopyReason {
    /// It is selected, and not in the target.
    Wanted,
    /// The target has it under the same name.
    AlreadyThere,
    /// The target has it with another compression or encryption.
    ThereInOtherForm,
    /// Another snapshot of the source becomes the same object.
    SameAsAnother,
    /// It is excluded.
    Excluded,
    /// It is not among the newest backups that are selected.
    BeyondMaxBackups,
    /// Its backup is too old.
    TooOld,
    /// Neither the source nor the target has a snapshot that it follows.
    NoBase,
    /// The target has an object of its name with another size.
    OtherSize,
}

impl CopyReason {
    /// Returns the name as in results.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns the reason as human-readable text.
    pub fn describe(self) -> Cow<'static, str> {
        let text = match self {
            CopyReason::Wanted => "it is not in the target",
            CopyReason::AlreadyThere => "the target has it",
            CopyReason::ThereInOtherForm => {
                "the target has it with another compression or encryption"
            }
            CopyReason::SameAsAnother => "another snapshot becomes the same object",
            CopyReason::Excluded => "it is excluded",
            CopyReason::BeyondMaxBackups => "newer backups fill {max-backups}",
            CopyReason::TooOld => "its backup is older than {max-backup-age}",
            CopyReason::NoBase => {
                "neither the source nor the target has the snapshot that it follows"
            }
            CopyReason::OtherSize => "the target has another object of that name",
        };
        opt::fill(text)
    }
}

/// A snapshot of the source, with the decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planned {
    /// The index in the source's catalog.
    pub source: usize,
    /// The name in the target.
    pub name: SnapshotName,
    /// The path in the target.
    pub path: String,
    /// What is done with it.
    pub decision: Decision,
    /// The reason.
    pub reason: CopyReason,
    /// The full of the backup that a copied delta belongs to, if it is copied, too: its index in the plan.
    pub full: Option<usize>,
}

/// All snapshots of the source, in the order in which they get their names in the target: by their last revisions, so
/// that each delta comes after what it follows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// The snapshots.
    pub objects: Vec<Planned>,
    /// The last revisions of the usable snapshots that the target has.
    pub there: BTreeSet<Revision>,
    /// The number of backups in the source: usable fulls, each with its deltas.
    pub backups: usize,
    /// The number of backups within the limits.
    pub backups_wanted: usize,
}

impl Plan {
    /// Returns the indexes of the snapshots that are copied.
    pub fn copies(&self) -> Vec<usize> {
        let is_copied = |&i: &usize| self.objects[i].decision == Decision::Copy;
        (0..self.objects.len()).filter(is_copied).collect()
    }
}

/// Returns the folder of a path, with its `/`.
fn folder(path: &str) -> &str {
    path.rfind('/').map_or("", |end| &path[..=end])
}

/// Returns what a snapshot has in common in every form: its path with a name without compression and
/// encryption, and without `.final`, which etcd-backup-restore drops when it copies.
pub(super) fn identity(path: &str, name: &SnapshotName) -> String {
    let plain = SnapshotName {
        compression: Compression::None,
        is_encrypted: false,
        is_final: false,
        ..name.clone()
    };
    format!("{}{plain}", folder(path))
}

/// Returns the last revisions of snapshots that a delta may follow: of a full at its start, or of any snapshot that
/// leads into it.
fn follows(delta: &SnapshotName) -> Range<Revision> {
    // A hostile name may end before it starts.
    let first = delta.start.previous().min(delta.last);
    first..delta.last
}

/// Returns whether a snapshot is usable after those with these last revisions: a full needs none of them.
pub(super) fn is_based(name: &SnapshotName, there: &BTreeSet<Revision>) -> bool {
    name.is_full() || there.range(follows(name)).next().is_some()
}

/// Returns the plan of a copy. `now` is in seconds since 1970.
pub fn plan(source: &Catalog, target: &Catalog, selection: &Selection, now: i64) -> Plan {
    let backups = Backups::new(source, selection, now);
    let forms = Forms::new(source, target, selection);
    let usable_there = || target.snapshots.iter().filter(|t| forms.is_usable(t));
    let mut plan = Plan {
        there: usable_there().map(|t| t.name.last).collect(),
        backups: backups.fulls,
        backups_wanted: backups.fulls - backups.refused.len(),
        ..Plan::default()
    };
    // What the target has comes first of equals: it is not copied.
    let of_source = source.snapshots.iter().enumerate();
    let mut all: Vec<(&Snapshot, Option<usize>)> = usable_there().map(|t| (t, None)).collect();
    all.extend(of_source.map(|(i, s)| (s, Some(i))));
    all.sort_by_key(|(s, i)| (s.name.last, i.is_some()));
    // The last revisions of snapshots that are, or will be, in the target with all that they follow.
    let mut complete = BTreeSet::new();
    let mut planned_as = HashMap::new();
    for (s, source_index) in all {
        let has_base = is_based(&s.name, &complete);
        let Some(i) = source_index else {
            if has_base {
                complete.insert(s.name.last);
            }
            continue;
        };
        let (decision, reason) = match (forms.in_target(i), backups.reason_against(i)) {
            (Some(why @ CopyReason::OtherSize), None) => (Decision::Conflict, why),
            (Some(why @ (CopyReason::AlreadyThere | CopyReason::ThereInOtherForm)), _) => {
                (Decision::Keep, why)
            }
            (_, Some(why)) => (Decision::Skip, why),
            (Some(why), None) => (Decision::Skip, why),
            // An excluded snapshot is not used, so it needs no base.
            (None, None) if s.excluded || has_base => (Decision::Copy, CopyReason::Wanted),
            (None, None) => (Decision::Skip, CopyReason::NoBase),
        };
        let is_used = decision == Decision::Copy && !s.excluded;
        if is_used {
            complete.insert(s.name.last);
            planned_as.insert(i, plan.objects.len());
        }
        let full = backups.full_of[i].filter(|_| is_used && !s.name.is_full());
        let (path, name) = forms.in_form(s);
        plan.objects.push(Planned {
            source: i,
            name,
            path,
            decision,
            reason,
            full: full.and_then(|full| planned_as.get(&full).copied()),
        });
    }
    plan
}

/// The backups of the source, and which of them are beyond the limits.
struct Backups {
    /// The number of backups.
    fulls: usize,
    /// For each snapshot: the full of its backup, which is the newest before it.
    full_of: Vec<Option<usize>>,
    /// The reasons against backups, by their fulls.
    refused: HashMap<usize, CopyReason>,
    /// The reason against deltas that are older than every full.
    against_oldest: Option<CopyReason>,
    /// The deltas that end after the full that was created next, by its index: what follows that full follows them.
    leads_into: HashMap<usize, usize>,
    /// Excluded snapshots that are not copied.
    excluded: Vec<bool>,
}

impl Backups {
    fn new(source: &Catalog, selection: &Selection, now: i64) -> Self {
        let snapshots = &source.snapshots;
        let mut full_of = Vec::with_capacity(snapshots.len());
        let mut leads_into = HashMap::new();
        let mut fulls = Vec::new();
        // In the layout v1, a folder is a backup.
        let mut newest_in: HashMap<&str, usize> = HashMap::new();
        for (i, s) in snapshots.iter().enumerate() {
            let folder = folder(&s.path);
            if s.name.is_full() && !s.excluded {
                let begin = fulls.last().copied().unwrap_or_default();
                let before = (begin..i).filter(|_| !s.begins_timeline);
                let leads = |d: &usize| {
                    let name = &snapshots[*d].name;
                    !name.is_full() && name.last > s.name.last
                };
                leads_into.extend(before.filter(leads).map(|d| (d, i)));
                fulls.push(i);
                newest_in.insert(folder, i);
            }
            let in_folder = newest_in.get(folder).filter(|_| folder.starts_with(V1));
            full_of.push(in_folder.or(fulls.last()).copied());
        }
        let days = selection.max_backup_age_days.map(i64::from);
        let oldest = days.map(|d| now.saturating_sub(d.saturating_mul(DAY)));
        let reason = |newer: usize, full: usize| {
            let most = selection.max_backups.map(|most| most as usize);
            let created = snapshots[full].name.created;
            match (most, oldest) {
                (Some(most), _) if newer >= most => Some(CopyReason::BeyondMaxBackups),
                (_, Some(oldest)) if created < oldest => Some(CopyReason::TooOld),
                _ => None,
            }
        };
        let newest_first = fulls.iter().rev().enumerate();
        let refused = newest_first.filter_map(|(newer, &f)| Some((f, reason(newer, f)?)));
        Backups {
            refused: refused.collect(),
            fulls: fulls.len(),
            full_of,
            against_oldest: match (selection.max_backups, oldest) {
                (Some(_), _) => Some(CopyReason::BeyondMaxBackups),
                (None, Some(_)) => Some(CopyReason::TooOld),
                (None, None) => None,
            },
            leads_into,
            excluded: snapshots
                .iter()
                .map(|s| s.excluded && !selection.excluded)
                .collect(),
        }
    }

    /// Returns why a snapshot is not selected.
    fn reason_against(&self, i: usize) -> Option<CopyReason> {
        if self.excluded[i] {
            return Some(CopyReason::Excluded);
        }
        let against = match self.full_of[i] {
            Some(full) => self.refused.get(&full).copied(),
            None => self.against_oldest,
        };
        let next = self.leads_into.get(&i);
        against.filter(|_| next.is_none_or(|full| self.refused.contains_key(full)))
    }
}

/// What the source's snapshots are in the target.
struct Forms<'a> {
    source: &'a Catalog,
    target: &'a Catalog,
    encryption: Encryption,
    /// The target's snapshots by path.
    by_path: HashMap<&'a str, &'a Snapshot>,
    /// The target's snapshots by what they have in common in every form, without those that are a form of another
    /// snapshot of the source.
    by_identity: HashMap<String, &'a Snapshot>,
    /// The snapshot of the source that becomes the object of a path.
    becomes: HashMap<String, usize>,
}

impl<'a> Forms<'a> {
    fn new(source: &'a Catalog, target: &'a Catalog, selection: &'a Selection) -> Self {
        let mut forms = Forms {
            source,
            target,
            encryption: selection.encryption,
            by_path: target
                .snapshots
                .iter()
                .map(|t| (t.path.as_str(), t))
                .collect(),
            by_identity: HashMap::new(),
            becomes: HashMap::new(),
        };
        // If several snapshots become the same object, prefer one that may be used, then one that needs no change of
        // form.
        let rank = |i: usize| {
            let s = &source.snapshots[i];
            (s.excluded, !selection.encryption.is_verbatim(&s.name), i)
        };
        for (i, s) in source.snapshots.iter().enumerate() {
            let (path, _) = forms.in_form(s);
            let first = forms.becomes.entry(path).or_insert(i);
            if rank(i) < rank(*first) {
                *first = i;
            }
        }
        for t in &target.snapshots {
            // If the source has two forms of a snapshot, the copy of the one is not a copy of the other.
            if !forms.becomes.contains_key(&t.path) {
                let identity = identity(&t.path, &t.name);
                forms.by_identity.entry(identity).or_insert(t);
            }
        }
        forms
    }

    /// Returns the path and the name of a copy.
    fn in_form(&self, s: &Snapshot) -> (String, SnapshotName) {
        let name = self.encryption.name(&s.name);
        (format!("{}{name}", folder(&s.path)), name)
    }

    /// Returns why a snapshot of the source is not copied, if the target has, gets or excludes it.
    fn in_target(&self, i: usize) -> Option<CopyReason> {
        let s = &self.source.snapshots[i];
        let (path, name) = self.in_form(s);
        let is_first = self.becomes.get(&path) == Some(&i);
        match self.by_path.get(path.as_str()) {
            Some(t) if self.is_other(s, t) => Some(CopyReason::OtherSize),
            Some(_) => Some(CopyReason::AlreadyThere),
            None if self.by_identity.contains_key(&identity(&s.path, &s.name)) => {
                Some(CopyReason::ThereInOtherForm)
            }
            None if !is_first => Some(CopyReason::SameAsAnother),
            // The mark is there without its snapshot.
            None if !s.excluded && self.target.marks.contains(&name.to_string()) => {
                Some(CopyReason::Excluded)
            }
            None => None,
        }
    }

    /// Returns whether the target's object of a copy's name is no copy.
    fn is_other(&self, s: &Snapshot, t: &Snapshot) -> bool {
        self.encryption.is_verbatim(&s.name) && t.bytes != s.bytes
    }

    /// Returns whether deltas may follow a snapshot of the target.
    fn is_usable(&self, t: &Snapshot) -> bool {
        let copied = self.becomes.get(&t.path);
        let is_other = copied.is_some_and(|&i| self.is_other(&self.source.snapshots[i], t));
        !t.excluded && !is_other
    }
}
