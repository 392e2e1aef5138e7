//! The plan of a copy: what is copied, in which order, and why. A pure function of two listings, the
//! options and the time.
//!
//! Reads names only, and no store. `ops::copy::copier` carries it out; a dry run prints it.

use crate::backup::catalog::V1;
use crate::backup::codec::{Compression, Encoding};
use crate::backup::{Catalog, Snapshot, SnapshotName};
use crate::mvcc::Revision;
use clap::Args;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap, HashSet};
use strum::IntoStaticStr;

/// Seconds per day.
const DAY: i64 = 86_400;
/// A plan that copies more snapshots is large.
const FEW: usize = 32;

/// How a copy changes the bytes of snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Form {
    /// The new compression; `None` keeps it.
    pub encoding: Option<Encoding>,
    /// How the encryption changes.
    pub encryption: Encryption,
}

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

impl Form {
    /// Returns the name of a snapshot in the target.
    pub fn name(&self, source: &SnapshotName) -> SnapshotName {
        SnapshotName {
            compression: self.compression(source),
            is_encrypted: match self.encryption {
                Encryption::Keep => source.is_encrypted,
                Encryption::Encrypt => true,
                Encryption::Decrypt => false,
            },
            ..source.clone()
        }
    }

    fn compression(&self, source: &SnapshotName) -> Compression {
        self.encoding.map_or(source.compression, |e| e.compression)
    }

    /// Returns whether a snapshot is copied byte for byte. One that already has the requested
    /// compression is not compressed again.
    pub fn is_verbatim(&self, source: &SnapshotName) -> bool {
        self.encryption != Encryption::Encrypt && self.name(source) == *source
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
    /// How the bytes change.
    pub form: Form,
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

/// The reason for a decision. The names are a contract (`deltafold schema copy`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, IntoStaticStr)]
pub enum CopyReason {
    /// It is selected, and not in the target.
    Wanted,
    /// It is beyond the limits, but a selected delta needs it.
    NeededByNewer,
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
    pub fn describe(self) -> &'static str {
        match self {
            CopyReason::Wanted => "it is not in the target",
            CopyReason::NeededByNewer => "a delta that is copied needs it",
            CopyReason::AlreadyThere => "the target has it",
            CopyReason::ThereInOtherForm => {
                "the target has it with another compression or encryption"
            }
            CopyReason::SameAsAnother => "another snapshot becomes the same object",
            CopyReason::Excluded => "it is excluded",
            CopyReason::BeyondMaxBackups => "newer backups fill --max-backups",
            CopyReason::TooOld => "its backup is older than --max-backup-age",
            CopyReason::NoBase => {
                "neither the source nor the target has the snapshot that it follows"
            }
            CopyReason::OtherSize => "the target has another object of that name",
        }
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
    /// The snapshots that a copied delta follows: any one of them must be in the target before it.
    /// Empty if nothing must.
    pub needs: Vec<Need>,
}

/// A snapshot that a delta follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Need {
    /// It is in the target.
    InTarget,
    /// It is copied; its index in the plan.
    Planned(usize),
}

/// All snapshots of the source, in the order in which they get their names in the target: each copied
/// one comes after one that it follows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// The snapshots.
    pub objects: Vec<Planned>,
    /// The number of backups in the source: usable fulls, each with its deltas.
    pub backups: usize,
    /// The number of backups within the limits.
    pub backups_wanted: usize,
}

impl Plan {
    /// Returns whether names in an object store may be given concurrently: one after the other would
    /// take hours, and a run that is killed in the middle is followed by another one anyway.
    pub fn is_large(&self) -> bool {
        let copies = self.objects.iter();
        copies.filter(|p| p.decision == Decision::Copy).count() > FEW
    }
}

/// A snapshot in the source, in the target, or in both.
struct Node<'a> {
    snapshot: &'a Snapshot,
    /// The index in the source's catalog; `None` if only the target has it.
    source: Option<usize>,
    /// The path and the name in the target.
    path: String,
    name: SnapshotName,
    /// Set if the target has it in this form or another, or gets it from another snapshot.
    in_target: Option<CopyReason>,
    /// Whether the target's copy may be used.
    is_usable_in_target: bool,
    /// Whether the target should have it after the copy.
    is_selected: bool,
    /// The section of the order of creation that it belongs to: a new section begins where revisions
    /// start again.
    section: usize,
}

impl<'a> Node<'a> {
    /// Returns a node for a snapshot that has this path and name in the target.
    fn new(
        snapshot: &'a Snapshot,
        path: String,
        name: SnapshotName,
        in_target: Option<CopyReason>,
    ) -> Self {
        Node {
            snapshot,
            source: None,
            path,
            name,
            in_target,
            is_usable_in_target: false,
            is_selected: false,
            section: 0,
        }
    }

    fn is_full(&self) -> bool {
        self.snapshot.name.is_full()
    }

    /// Returns whether it is the full of a backup in the source.
    fn is_usable_full(&self) -> bool {
        self.source.is_some() && self.is_full() && !self.snapshot.excluded
    }

    /// Returns whether it may be copied to be used.
    fn may_be_copied(&self) -> bool {
        !self.snapshot.excluded && self.in_target.is_none()
    }

    /// Returns whether it is a delta that is copied to be used.
    fn is_delta_to_copy(&self) -> bool {
        self.is_selected && self.may_be_copied() && !self.is_full()
    }

    /// Returns whether a delta from `start` to `last` may follow it: a full at the start, or a delta
    /// that leads into the delta.
    fn supports(&self, start: Revision, last: Revision) -> bool {
        (start.previous()..last).contains(&self.snapshot.name.last)
    }
}

/// Returns the folder of a path, with its `/`.
fn folder(path: &str) -> &str {
    path.rfind('/').map_or("", |end| &path[..=end])
}

/// Returns what a snapshot has in common in every form: its path with a name without compression and
/// encryption.
pub(super) fn identity(path: &str, name: &SnapshotName) -> String {
    let plain = SnapshotName {
        compression: Compression::None,
        is_encrypted: false,
        ..name.clone()
    };
    format!("{}{plain}", folder(path))
}

/// Returns the plan of a copy. `now` is in seconds since 1970.
pub fn plan(source: &Catalog, target: &Catalog, selection: &Selection, now: i64) -> Plan {
    let mut planner = Planner {
        nodes: nodes(source, target, selection),
        by_last: Vec::new(),
    };
    planner.order();
    let chosen = planner.choose(source, selection, now);
    let in_target = planner.supported(|i| planner.nodes[i].is_usable_in_target);
    planner.select_needed(&in_target);
    let supported = planner.supported(|i| planner.will_be_there(i));
    planner.plan(selection, &chosen, &in_target, &supported)
}

/// Merges the two listings into nodes.
fn nodes<'a>(source: &'a Catalog, target: &'a Catalog, selection: &Selection) -> Vec<Node<'a>> {
    let target_by_path: HashMap<&str, &Snapshot> = target
        .snapshots
        .iter()
        .map(|s| (s.path.as_str(), s))
        .collect();
    let mut other_forms: HashMap<String, Vec<&Snapshot>> = HashMap::new();
    for s in &target.snapshots {
        let forms = other_forms.entry(identity(&s.path, &s.name)).or_default();
        forms.push(s);
    }
    let target_name = |s: &Snapshot| {
        let name = selection.form.name(&s.name);
        (format!("{}{name}", folder(&s.path)), name)
    };
    let mut source_by_target_path: HashMap<String, usize> = HashMap::new();
    // If several snapshots become the same object, prefer one that may be used, then one that needs no
    // change of form.
    let rank = |i: usize| {
        let s = &source.snapshots[i];
        (s.excluded, !selection.form.is_verbatim(&s.name), i)
    };
    for (i, s) in source.snapshots.iter().enumerate() {
        let first = source_by_target_path.entry(target_name(s).0).or_insert(i);
        if rank(i) < rank(*first) {
            *first = i;
        }
    }
    let mut nodes = Vec::with_capacity(source.snapshots.len() + target.snapshots.len());
    let mut matched: HashSet<&str> = HashSet::new();
    for (i, s) in source.snapshots.iter().enumerate() {
        let (path, name) = target_name(s);
        let same = target_by_path.get(path.as_str()).copied();
        // If the source has two forms of a snapshot, the copy of the one is not a copy of the other.
        let other = other_forms
            .get(&identity(&s.path, &s.name))
            .into_iter()
            .flatten()
            .find(|t| !source_by_target_path.contains_key(&t.path));
        let verbatim = selection.form.is_verbatim(&s.name);
        let (in_target, copy) = match (same, other) {
            // Nothing may follow this: the object of that name is no copy.
            (Some(t), _) if verbatim && t.bytes != s.bytes => {
                matched.insert(&t.path);
                (Some(CopyReason::OtherSize), None)
            }
            (Some(t), _) => (Some(CopyReason::AlreadyThere), Some(t)),
            (None, Some(t)) => (Some(CopyReason::ThereInOtherForm), Some(*t)),
            (None, None) if source_by_target_path.get(&path) != Some(&i) => {
                (Some(CopyReason::SameAsAnother), None)
            }
            (None, None) => (None, None),
        };
        if let Some(t) = copy {
            matched.insert(&t.path);
        }
        nodes.push(Node {
            source: Some(i),
            is_usable_in_target: copy.is_some_and(|t| !t.excluded),
            ..Node::new(s, path, name, in_target)
        });
    }
    let target_only = target.snapshots.iter();
    for t in target_only.filter(|t| !matched.contains(t.path.as_str())) {
        let in_target = Some(CopyReason::AlreadyThere);
        nodes.push(Node {
            is_usable_in_target: !t.excluded,
            ..Node::new(t, t.path.clone(), t.name.clone(), in_target)
        });
    }
    nodes
}

/// Makes the plan from the nodes.
struct Planner<'a> {
    /// In order of creation.
    nodes: Vec<Node<'a>>,
    /// Indexes of nodes with the snapshots' last revisions, sorted by these.
    by_last: Vec<(Revision, usize)>,
}

/// The backups within the limits, and why other snapshots are not selected.
struct ChosenBackups {
    backups: usize,
    backups_wanted: usize,
    /// The reasons against snapshots that are not selected, by index of the node.
    reasons_against: HashMap<usize, CopyReason>,
}

impl Planner<'_> {
    /// Sorts the nodes like a catalog, and numbers the sections in which revisions grow.
    fn order(&mut self) {
        self.nodes.sort_by(|a, b| {
            let key = |n: &Node<'_>| {
                let name = &n.snapshot.name;
                (name.created, n.is_full(), name.last, name.start)
            };
            key(a).cmp(&key(b)).then_with(|| a.path.cmp(&b.path))
        });
        let (mut section, mut highest) = (0, Revision(-1));
        for n in &mut self.nodes {
            let begins = n.snapshot.begins_timeline || n.snapshot.name.last < highest;
            if n.snapshot.name.is_full() && begins {
                section += 1;
                highest = n.snapshot.name.last;
            }
            highest = highest.max(n.snapshot.name.last);
            n.section = section;
        }
        let nodes = self.nodes.iter().enumerate();
        self.by_last = nodes.map(|(i, n)| (n.snapshot.name.last, i)).collect();
        self.by_last.sort_unstable();
    }

    /// Returns the snapshots that a delta may follow, and their rank by names alone: 0 for those before
    /// it in its own section, 1 for others before it, 2 for those after it. Only the best rank with any
    /// snapshot counts.
    fn may_follow(&self, delta: usize, is_member: impl Fn(usize) -> bool) -> (u8, Vec<usize>) {
        let n = &self.nodes[delta];
        let (start, last) = (n.snapshot.name.start, n.snapshot.name.last);
        let from = self.by_last.partition_point(|&(l, _)| l < start.previous());
        let near = self.by_last[from..]
            .iter()
            .take_while(|&&(l, _)| l < last)
            .map(|&(_, i)| i)
            .filter(|&i| self.nodes[i].supports(start, last) && is_member(i));
        let mut by_rank: [Vec<usize>; 3] = Default::default();
        for i in near {
            let rank = match i < delta {
                true if self.nodes[i].section == n.section => 0,
                true => 1,
                false => 2,
            };
            by_rank[rank].push(i);
        }
        by_rank.iter_mut().for_each(|nodes| nodes.sort_unstable());
        by_rank[..2].iter_mut().for_each(|nodes| nodes.reverse());
        let mut by_rank = (0..).zip(by_rank);
        let best = by_rank.find(|(_, nodes)| !nodes.is_empty());
        best.unwrap_or((u8::MAX, Vec::new()))
    }

    /// Returns whether a node is, or will be, in the target to be used.
    fn will_be_there(&self, i: usize) -> bool {
        let n = &self.nodes[i];
        n.is_usable_in_target || n.is_selected && n.may_be_copied()
    }

    /// Selects the snapshots that belong to backups within the limits.
    fn choose(&mut self, source: &Catalog, selection: &Selection, now: i64) -> ChosenBackups {
        let refused = self.refused(selection, now);
        let is_usable = |s: &&Snapshot| !s.excluded && s.name.is_full();
        let fulls = self.nodes.iter().filter(|n| n.is_usable_full()).count();
        let mut chosen = ChosenBackups {
            backups: source.snapshots.iter().filter(is_usable).count(),
            backups_wanted: fulls - refused.len(),
            reasons_against: HashMap::new(),
        };
        // The reason against deltas that are older than every full.
        let oldest = match (selection.max_backups, selection.max_backup_age_days) {
            (Some(_), _) => Some(CopyReason::BeyondMaxBackups),
            (None, Some(_)) => Some(CopyReason::TooOld),
            (None, None) => None,
        };
        let mut newest = None;
        // In the layout v1, a folder is a backup.
        let mut newest_in: HashMap<&str, usize> = HashMap::new();
        for (i, n) in self.nodes.iter_mut().enumerate() {
            if n.source.is_none() {
                continue;
            }
            let folder = folder(&n.snapshot.path);
            if n.is_usable_full() {
                newest = Some(i);
                newest_in.insert(folder, i);
            }
            let owner = match folder.starts_with(V1) {
                true => newest_in.get(folder).copied().or(newest),
                false => newest,
            };
            let reason = match owner {
                _ if n.snapshot.excluded && !selection.excluded => Some(CopyReason::Excluded),
                Some(full) => refused.get(&full).copied(),
                None => oldest,
            };
            n.is_selected = reason.is_none();
            if let Some(reason) = reason {
                chosen.reasons_against.insert(i, reason);
            }
        }
        chosen
    }

    /// Returns the fulls of the source that are beyond the limits, with the reason.
    fn refused(&self, selection: &Selection, now: i64) -> HashMap<usize, CopyReason> {
        let days = selection.max_backup_age_days.map(i64::from);
        let oldest = days.map(|d| now.saturating_sub(d.saturating_mul(DAY)));
        let newest_first = self.nodes.iter().enumerate().rev();
        let fulls = newest_first.filter(|(_, n)| n.is_usable_full());
        let mut refused = HashMap::new();
        for (newer, (i, n)) in fulls.enumerate() {
            if selection
                .max_backups
                .is_some_and(|most| newer >= most as usize)
            {
                refused.insert(i, CopyReason::BeyondMaxBackups);
            } else if oldest.is_some_and(|oldest| n.snapshot.name.created < oldest) {
                refused.insert(i, CopyReason::TooOld);
            }
        }
        refused
    }

    /// Selects also the snapshots that selected deltas need.
    fn select_needed(&mut self, in_target: &[bool]) {
        let could_be_there =
            |n: &Node<'_>| n.is_usable_in_target || n.source.is_some() && n.may_be_copied();
        // A delta in the target that has lost its base needs one as well if others follow it.
        let has_lost_base =
            |n: &Node<'_>, i: usize| n.is_usable_in_target && !n.is_full() && !in_target[i];
        let mut open: Vec<usize> = (0..self.nodes.len())
            .filter(|&i| self.nodes[i].is_delta_to_copy())
            .collect();
        let mut seen: HashSet<usize> = open.iter().copied().collect();
        while let Some(delta) = open.pop() {
            let (rank, available) = self.may_follow(delta, |i| self.will_be_there(i));
            let (possible_rank, possible) =
                self.may_follow(delta, |i| could_be_there(&self.nodes[i]));
            // A base of a better rank than all that will be there is worth copying.
            let bases = match rank <= possible_rank {
                true => available,
                false => possible.into_iter().take(1).collect(),
            };
            for base in bases {
                let n = &mut self.nodes[base];
                n.is_selected |= rank > possible_rank && n.in_target.is_none();
                if (n.is_delta_to_copy() || has_lost_base(n, base)) && seen.insert(base) {
                    open.push(base);
                }
            }
        }
    }

    /// Returns for each node whether `is_member` holds for it and for its base, all the way down to a
    /// full.
    fn supported(&self, is_member: impl Fn(usize) -> bool) -> Vec<bool> {
        let mut supported = vec![false; self.nodes.len()];
        // Bases end before the deltas that follow them, so they come first.
        for &(_, i) in &self.by_last {
            supported[i] = is_member(i)
                && (self.nodes[i].is_full() || !self.may_follow(i, |p| supported[p]).1.is_empty());
        }
        supported
    }

    /// Puts the snapshots in order, and decides on each.
    fn plan(
        self,
        selection: &Selection,
        chosen: &ChosenBackups,
        in_target: &[bool],
        supported: &[bool],
    ) -> Plan {
        let mut plan = Plan {
            objects: Vec::new(),
            backups: chosen.backups,
            backups_wanted: chosen.backups_wanted,
        };
        // For each node: it is of use once any one of these is in the target.
        let mut usable_after: Vec<Vec<Need>> = (0..self.nodes.len())
            .map(|i| match in_target[i] {
                true => vec![Need::InTarget],
                false => Vec::new(),
            })
            .collect();
        // Deltas come after what they follow, whatever their times: in rounds, each in order of
        // creation.
        let mut round: BTreeSet<usize> = (0..self.nodes.len()).collect();
        let mut next_round = BTreeSet::new();
        // The nodes that wait for the node of this index.
        let mut waiting: HashMap<usize, Vec<usize>> = HashMap::new();
        let mut is_done = vec![false; self.nodes.len()];
        while let Some(i) = round.pop_first().or_else(|| {
            std::mem::swap(&mut round, &mut next_round);
            round.pop_first()
        }) {
            if is_done[i] {
                continue;
            }
            let (decision, reason) = self.decide(i, selection, chosen, supported);
            let n = &self.nodes[i];
            let copies = decision == Decision::Copy && !n.snapshot.excluded;
            let follows = !n.is_full() && supported[i] && !in_target[i];
            let mut needs = Vec::new();
            if follows {
                let (_, bases) = self.may_follow(i, |p| supported[p]);
                let mut seen = HashSet::new();
                let of_bases = bases.iter().flat_map(|&p| &usable_after[p]).copied();
                needs.extend(of_bases.filter(|&n| seen.insert(n)));
                if needs.is_empty() {
                    for base in bases {
                        waiting.entry(base).or_default().push(i);
                    }
                    continue;
                }
            }
            is_done[i] = true;
            match copies {
                true => usable_after[i] = vec![Need::Planned(plan.objects.len())],
                false if follows => usable_after[i].clone_from(&needs),
                false => {}
            }
            if !usable_after[i].is_empty() {
                for follower in waiting.remove(&i).unwrap_or_default() {
                    match follower > i {
                        true => round.insert(follower),
                        false => next_round.insert(follower),
                    };
                }
            }
            if let Some(source) = n.source {
                plan.objects.push(Planned {
                    source,
                    name: n.name.clone(),
                    path: n.path.clone(),
                    decision,
                    reason,
                    needs: if copies { needs } else { Vec::new() },
                });
            }
        }
        plan
    }

    /// Decides on a snapshot, apart from the order.
    fn decide(
        &self,
        i: usize,
        selection: &Selection,
        chosen: &ChosenBackups,
        supported: &[bool],
    ) -> (Decision, CopyReason) {
        let n = &self.nodes[i];
        match (n.in_target, chosen.reasons_against.get(&i).copied()) {
            (Some(why @ CopyReason::OtherSize), _) if n.is_selected => (Decision::Conflict, why),
            (Some(why @ (CopyReason::AlreadyThere | CopyReason::ThereInOtherForm)), _) => {
                (Decision::Keep, why)
            }
            (Some(why @ CopyReason::SameAsAnother), _) if n.is_selected => (Decision::Skip, why),
            (_, Some(why)) if !n.is_selected => (Decision::Skip, why),
            // An excluded snapshot is not used, so it needs no base.
            _ if n.snapshot.excluded && selection.excluded => (Decision::Copy, CopyReason::Wanted),
            _ if !supported[i] => (Decision::Skip, CopyReason::NoBase),
            (_, Some(_)) => (Decision::Copy, CopyReason::NeededByNewer),
            (_, None) => (Decision::Copy, CopyReason::Wanted),
        }
    }
}
