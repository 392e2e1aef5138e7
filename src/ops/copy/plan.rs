//! What to copy, in which order, and why: a pure function of two listings, the options and the time.
//!
//! It reads names alone, and touches no store. `super::run` carries it out; a dry run prints it.

use crate::backup::catalog::V1;
use crate::backup::codec::{Compression, Encoding};
use crate::backup::{Catalog, Snapshot, SnapshotName};
use crate::mvcc::Revision;
use clap::Args;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap, HashSet};
use strum::IntoStaticStr;

/// Seconds of a day.
const DAY: i64 = 86_400;
/// A plan with more snapshots to copy is a large one.
const FEW: usize = 32;

/// What becomes of the bytes of a snapshot on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Form {
    /// Compressed so; as it is where `None`.
    pub encoding: Option<Encoding>,
    /// Encrypted for whom.
    pub encryption: Encryption,
}

/// Who can read what is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Encryption {
    /// Whoever can read the source.
    #[default]
    Keep,
    /// The recipients that were given, whoever can read the source.
    Encrypt,
    /// Everybody: what is encrypted is opened.
    Decrypt,
}

impl Form {
    /// The name that a snapshot has in the target.
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

    /// Whether its very bytes are copied. What has the method that is asked for is not compressed again.
    pub fn is_verbatim(&self, source: &SnapshotName) -> bool {
        self.encryption != Encryption::Encrypt && self.name(source) == *source
    }
}

/// How much of a backup is copied.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Most {
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

/// What is wanted.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    /// The newest so many backups; all where `None`.
    pub max_backups: Option<u32>,
    /// Those whose full is not older than so many days, by its name; all where `None`.
    pub max_backup_age_days: Option<u32>,
    /// Excluded snapshots, too, with their marks.
    pub excluded: bool,
    /// What becomes of the bytes.
    pub form: Form,
}

/// What happens to a snapshot of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Decision {
    /// It is copied.
    Copy,
    /// The target has it.
    Keep,
    /// It is not wanted, or would be of no use.
    Skip,
    /// The target has something else under its name.
    Conflict,
}

/// Why. The names are a contract (`docs/copy-result.schema.json`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, IntoStaticStr)]
pub enum Why {
    /// It is wanted, and not in the target.
    Wanted,
    /// It is beyond the limits, and a delta that is wanted needs it.
    NeededByNewer,
    /// The target has it under the same name.
    AlreadyThere,
    /// The target has it, compressed or encrypted otherwise.
    ThereInOtherForm,
    /// Another snapshot of the source becomes the same object.
    SameAsAnother,
    /// It is excluded.
    Excluded,
    /// More backups than are wanted are newer.
    BeyondMaxBackups,
    /// Its backup is too old.
    TooOld,
    /// What it follows is neither in the source nor in the target.
    NoBase,
    /// The target has an object of that name and another size.
    OtherSize,
}

impl Why {
    /// As in results.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// A sentence for people.
    pub fn in_words(self) -> &'static str {
        match self {
            Why::Wanted => "it is not in the target",
            Why::NeededByNewer => "a delta that is copied needs it",
            Why::AlreadyThere => "the target has it",
            Why::ThereInOtherForm => "the target has it, compressed or encrypted otherwise",
            Why::SameAsAnother => "another snapshot becomes the same object",
            Why::Excluded => "it is excluded",
            Why::BeyondMaxBackups => "more backups than are wanted are newer",
            Why::TooOld => "its backup is older than is wanted",
            Why::NoBase => "what it follows is neither in the source nor in the target",
            Why::OtherSize => "the target has another object of that name",
        }
    }
}

/// A snapshot of the source, and what happens to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planned {
    /// Index in the source's catalog.
    pub source: usize,
    /// Its name in the target.
    pub name: SnapshotName,
    /// Its path there.
    pub path: String,
    /// What happens to it.
    pub decision: Decision,
    /// Why.
    pub why: Why,
    /// Of a delta that is copied: any one of these must be in the target before it. Empty where nothing
    /// must.
    pub needs: Vec<Need>,
}

/// What a delta follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Need {
    /// It is in the target.
    InTarget,
    /// It is copied: an index in the plan.
    Planned(usize),
}

/// All snapshots of the source, in the order in which they are named in the target: those that are copied,
/// each behind one that it follows; the others in between.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// The snapshots.
    pub objects: Vec<Planned>,
    /// Fulls of the source that may be used, each with its deltas a backup.
    pub backups: usize,
    /// Those that are wanted.
    pub backups_wanted: usize,
}

impl Plan {
    /// Whether the order of names in an object store may be loosened: names one after the other would take hours, and
    /// a run that is killed in the middle is followed by another one anyway.
    pub fn is_large(&self) -> bool {
        let copies = self.objects.iter();
        copies.filter(|p| p.decision == Decision::Copy).count() > FEW
    }
}

/// A snapshot in the source, in the target, or in both.
struct Node<'a> {
    of: &'a Snapshot,
    source: Option<usize>,
    path: String,
    name: SnapshotName,
    /// The target has it in this form or another.
    there: Option<Why>,
    /// What the target has of it may be used.
    usable_there: bool,
    /// It shall be in the target when all is done.
    wanted: bool,
    /// A place in the order of creation where revisions begin anew.
    segment: usize,
}

impl<'a> Node<'a> {
    /// `of` becomes `path` in the target, where it may be already.
    fn new(of: &'a Snapshot, path: String, name: SnapshotName, there: Option<Why>) -> Self {
        Node {
            of,
            source: None,
            path,
            name,
            there,
            usable_there: false,
            wanted: false,
            segment: 0,
        }
    }

    fn is_full(&self) -> bool {
        self.of.name.is_full()
    }

    /// Whether it is the base of a backup of the source.
    fn is_usable_full(&self) -> bool {
        self.source.is_some() && self.is_full() && !self.of.excluded
    }

    /// Whether it may be brought to the target to be used.
    fn may_come(&self) -> bool {
        !self.of.excluded && self.there.is_none()
    }

    /// Whether it is a delta that is copied to be used.
    fn is_delta_to_copy(&self) -> bool {
        self.wanted && self.may_come() && !self.is_full()
    }

    /// A full that begins there, or a delta that leads there.
    fn supports(&self, start: Revision, last: Revision) -> bool {
        (start.previous()..last).contains(&self.of.name.last)
    }
}

/// The folder of a path, with its `/`.
fn folder(path: &str) -> &str {
    path.rfind('/').map_or("", |end| &path[..=end])
}

/// What is the same in every form: the folder, and the name but for what tells the form.
pub(super) fn identity(path: &str, name: &SnapshotName) -> String {
    let plain = SnapshotName {
        compression: Compression::None,
        is_encrypted: false,
        ..name.clone()
    };
    format!("{}{plain}", folder(path))
}

/// Makes the plan. `now` is in seconds since 1970.
pub fn plan(source: &Catalog, target: &Catalog, wanted: &Wanted, now: i64) -> Plan {
    let mut planner = Planner {
        nodes: nodes(source, target, wanted),
        by_last: Vec::new(),
    };
    planner.order();
    let chosen = planner.choose(source, wanted, now);
    let there = planner.supported(|i| planner.nodes[i].usable_there);
    planner.close(&there);
    let supported = planner.supported(|i| planner.will_be_there(i));
    planner.plan(wanted, &chosen, &there, &supported)
}

/// Merges the two listings.
fn nodes<'a>(source: &'a Catalog, target: &'a Catalog, wanted: &Wanted) -> Vec<Node<'a>> {
    let in_target: HashMap<&str, &Snapshot> = target
        .snapshots
        .iter()
        .map(|s| (s.path.as_str(), s))
        .collect();
    let mut other_forms: HashMap<String, Vec<&Snapshot>> = HashMap::new();
    for s in &target.snapshots {
        let forms = other_forms.entry(identity(&s.path, &s.name)).or_default();
        forms.push(s);
    }
    let becomes = |s: &Snapshot| {
        let name = wanted.form.name(&s.name);
        (format!("{}{name}", folder(&s.path)), name)
    };
    let mut becoming: HashMap<String, usize> = HashMap::new();
    // Of several that become the same object the one is copied that may be used, as it is if it can be.
    let rank = |i: usize| {
        let s = &source.snapshots[i];
        (s.excluded, !wanted.form.is_verbatim(&s.name), i)
    };
    for (i, s) in source.snapshots.iter().enumerate() {
        let first = becoming.entry(becomes(s).0).or_insert(i);
        if rank(i) < rank(*first) {
            *first = i;
        }
    }
    let mut nodes = Vec::with_capacity(source.snapshots.len() + target.snapshots.len());
    let mut told: HashSet<&str> = HashSet::new();
    for (i, s) in source.snapshots.iter().enumerate() {
        let (path, name) = becomes(s);
        let same = in_target.get(path.as_str()).copied();
        // One that the source has in two forms is not the other one's.
        let other = other_forms
            .get(&identity(&s.path, &s.name))
            .into_iter()
            .flatten()
            .find(|t| !becoming.contains_key(&t.path));
        let verbatim = wanted.form.is_verbatim(&s.name);
        let (there, found) = match (same, other) {
            // Nothing may follow it: what has the name is no copy.
            (Some(t), _) if verbatim && t.bytes != s.bytes => {
                told.insert(&t.path);
                (Some(Why::OtherSize), None)
            }
            (Some(t), _) => (Some(Why::AlreadyThere), Some(t)),
            (None, Some(t)) => (Some(Why::ThereInOtherForm), Some(*t)),
            (None, None) if becoming.get(&path) != Some(&i) => (Some(Why::SameAsAnother), None),
            (None, None) => (None, None),
        };
        if let Some(t) = found {
            told.insert(&t.path);
        }
        nodes.push(Node {
            source: Some(i),
            usable_there: found.is_some_and(|t| !t.excluded),
            ..Node::new(s, path, name, there)
        });
    }
    let only_there = target.snapshots.iter();
    for t in only_there.filter(|t| !told.contains(t.path.as_str())) {
        let there = Some(Why::AlreadyThere);
        nodes.push(Node {
            usable_there: !t.excluded,
            ..Node::new(t, t.path.clone(), t.name.clone(), there)
        });
    }
    nodes
}

struct Planner<'a> {
    /// In order of creation.
    nodes: Vec<Node<'a>>,
    /// Indexes by the last revision.
    by_last: Vec<(Revision, usize)>,
}

/// The backups that are wanted.
struct Chosen {
    backups: usize,
    wanted: usize,
    /// By index in the nodes, of what is not wanted: why.
    not: HashMap<usize, Why>,
}

impl Planner<'_> {
    /// Sorts as a catalog does, and notes where revisions begin anew.
    fn order(&mut self) {
        self.nodes.sort_by(|a, b| {
            let key = |n: &Node<'_>| {
                let name = &n.of.name;
                (name.created, n.is_full(), name.last, name.start)
            };
            key(a).cmp(&key(b)).then_with(|| a.path.cmp(&b.path))
        });
        let (mut segment, mut highest) = (0, Revision(-1));
        for n in &mut self.nodes {
            let begins = n.of.begins_timeline || n.of.name.last < highest;
            if n.of.name.is_full() && begins {
                segment += 1;
                highest = n.of.name.last;
            }
            highest = highest.max(n.of.name.last);
            n.segment = segment;
        }
        let last = self.nodes.iter().enumerate();
        self.by_last = last.map(|(i, n)| (n.of.name.last, i)).collect();
        self.by_last.sort_unstable();
    }

    /// What a delta may follow, the likeliest first: what came before it in its own segment, before it,
    /// after it. Names alone tell; only the first class that is not empty counts.
    fn may_follow(&self, delta: usize, of: impl Fn(usize) -> bool) -> (u8, Vec<usize>) {
        let n = &self.nodes[delta];
        let (start, last) = (n.of.name.start, n.of.name.last);
        let from = self.by_last.partition_point(|&(l, _)| l < start.previous());
        let near = self.by_last[from..]
            .iter()
            .take_while(|&&(l, _)| l < last)
            .map(|&(_, i)| i)
            .filter(|&i| self.nodes[i].supports(start, last) && of(i));
        let mut classes: [Vec<usize>; 3] = Default::default();
        for i in near {
            let class = match i < delta {
                true if self.nodes[i].segment == n.segment => 0,
                true => 1,
                false => 2,
            };
            classes[class].push(i);
        }
        classes.iter_mut().for_each(|c| c.sort_unstable());
        classes[..2].iter_mut().for_each(|c| c.reverse());
        let mut classes = (0..).zip(classes);
        let first = classes.find(|(_, found)| !found.is_empty());
        first.unwrap_or((u8::MAX, Vec::new()))
    }

    /// Whether it is, or shall be, in the target to be used.
    fn will_be_there(&self, i: usize) -> bool {
        let n = &self.nodes[i];
        n.usable_there || n.wanted && n.may_come()
    }

    fn choose(&mut self, source: &Catalog, wanted: &Wanted, now: i64) -> Chosen {
        let refused = self.refused(wanted, now);
        let is_usable = |s: &&Snapshot| !s.excluded && s.name.is_full();
        let fulls = self.nodes.iter().filter(|n| n.is_usable_full()).count();
        let mut chosen = Chosen {
            backups: source.snapshots.iter().filter(is_usable).count(),
            wanted: fulls - refused.len(),
            not: HashMap::new(),
        };
        // What is older than every full.
        let oldest = match (wanted.max_backups, wanted.max_backup_age_days) {
            (Some(_), _) => Some(Why::BeyondMaxBackups),
            (None, Some(_)) => Some(Why::TooOld),
            (None, None) => None,
        };
        let mut newest = None;
        // In the old layout a folder is a backup.
        let mut newest_in: HashMap<&str, usize> = HashMap::new();
        for (i, n) in self.nodes.iter_mut().enumerate() {
            if n.source.is_none() {
                continue;
            }
            let folder = folder(&n.of.path);
            if n.is_usable_full() {
                newest = Some(i);
                newest_in.insert(folder, i);
            }
            let owner = match folder.starts_with(V1) {
                true => newest_in.get(folder).copied().or(newest),
                false => newest,
            };
            let why = match owner {
                _ if n.of.excluded && !wanted.excluded => Some(Why::Excluded),
                Some(full) => refused.get(&full).copied(),
                None => oldest,
            };
            n.wanted = why.is_none();
            chosen.not.extend(why.map(|why| (i, why)));
        }
        chosen
    }

    /// The fulls of the source that are beyond the limits.
    fn refused(&self, wanted: &Wanted, now: i64) -> HashMap<usize, Why> {
        let days = wanted.max_backup_age_days.map(i64::from);
        let oldest = days.map(|d| now.saturating_sub(d.saturating_mul(DAY)));
        let newest_first = self.nodes.iter().enumerate().rev();
        let fulls = newest_first.filter(|(_, n)| n.is_usable_full());
        let refused = fulls.enumerate().filter_map(|(age, (i, n))| {
            let why = match () {
                () if wanted.max_backups.is_some_and(|most| age >= most as usize) => {
                    Why::BeyondMaxBackups
                }
                () if oldest.is_some_and(|oldest| n.of.name.created < oldest) => Why::TooOld,
                () => return None,
            };
            Some((i, why))
        });
        refused.collect()
    }

    /// Wants, too, what the deltas that are wanted need.
    fn close(&mut self, there: &[bool]) {
        let may_be = |n: &Node<'_>| n.usable_there || n.source.is_some() && n.may_come();
        // A delta of the target that has lost its base needs one as well, where others follow it.
        let has_lost = |n: &Node<'_>, i: usize| n.usable_there && !n.is_full() && !there[i];
        let mut open: Vec<usize> = (0..self.nodes.len())
            .filter(|&i| self.nodes[i].is_delta_to_copy())
            .collect();
        let mut seen: HashSet<usize> = open.iter().copied().collect();
        while let Some(delta) = open.pop() {
            let (have, at_hand) = self.may_follow(delta, |i| self.will_be_there(i));
            let (could, found) = self.may_follow(delta, |i| may_be(&self.nodes[i]));
            // What is likelier than all that will be there is worth its bytes.
            let bases = match have <= could {
                true => at_hand,
                false => found.into_iter().take(1).collect(),
            };
            for base in bases {
                let n = &mut self.nodes[base];
                n.wanted |= have > could && n.there.is_none();
                if (n.is_delta_to_copy() || has_lost(n, base)) && seen.insert(base) {
                    open.push(base);
                }
            }
        }
    }

    /// Whether each of these has its base among them, all the way down.
    fn supported(&self, of: impl Fn(usize) -> bool) -> Vec<bool> {
        let mut supported = vec![false; self.nodes.len()];
        // What a delta follows ends before it does.
        for &(_, i) in &self.by_last {
            supported[i] = of(i)
                && (self.nodes[i].is_full() || !self.may_follow(i, |p| supported[p]).1.is_empty());
        }
        supported
    }

    fn plan(self, wanted: &Wanted, chosen: &Chosen, there: &[bool], supported: &[bool]) -> Plan {
        let mut plan = Plan {
            objects: Vec::new(),
            backups: chosen.backups,
            backups_wanted: chosen.wanted,
        };
        // What has to be in the target for each to be of use: any one of these.
        let mut placed: Vec<Vec<Need>> = (0..self.nodes.len())
            .map(|i| match there[i] {
                true => vec![Need::InTarget],
                false => Vec::new(),
            })
            .collect();
        // Deltas go behind what they follow, wherever their times would put them: in rounds, each in the order
        // of creation.
        let mut round: BTreeSet<usize> = (0..self.nodes.len()).collect();
        let mut next_round = BTreeSet::new();
        // By what they wait for.
        let mut waiting: HashMap<usize, Vec<usize>> = HashMap::new();
        let mut is_done = vec![false; self.nodes.len()];
        while let Some(i) = round.pop_first().or_else(|| {
            std::mem::swap(&mut round, &mut next_round);
            round.pop_first()
        }) {
            if is_done[i] {
                continue;
            }
            let (decision, why) = self.decide(i, wanted, chosen, supported);
            let n = &self.nodes[i];
            let copies = decision == Decision::Copy && !n.of.excluded;
            let follows = !n.is_full() && supported[i] && !there[i];
            let mut needs = Vec::new();
            if follows {
                let (_, bases) = self.may_follow(i, |p| supported[p]);
                let mut seen = HashSet::new();
                let of_bases = bases.iter().flat_map(|&p| &placed[p]).copied();
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
                true => placed[i] = vec![Need::Planned(plan.objects.len())],
                false if follows => placed[i].clone_from(&needs),
                false => {}
            }
            if !placed[i].is_empty() {
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
                    why,
                    needs: if copies { needs } else { Vec::new() },
                });
            }
        }
        plan
    }

    fn decide(
        &self,
        i: usize,
        wanted: &Wanted,
        chosen: &Chosen,
        supported: &[bool],
    ) -> (Decision, Why) {
        let n = &self.nodes[i];
        match (n.there, chosen.not.get(&i).copied()) {
            (Some(why @ Why::OtherSize), _) if n.wanted => (Decision::Conflict, why),
            (Some(why @ (Why::AlreadyThere | Why::ThereInOtherForm)), _) => (Decision::Keep, why),
            (Some(why @ Why::SameAsAnother), _) if n.wanted => (Decision::Skip, why),
            (_, Some(why)) if !n.wanted => (Decision::Skip, why),
            // An excluded one is not to be used, so it needs no base.
            _ if n.of.excluded && wanted.excluded => (Decision::Copy, Why::Wanted),
            _ if !supported[i] => (Decision::Skip, Why::NoBase),
            (_, Some(_)) => (Decision::Copy, Why::NeededByNewer),
            (_, None) => (Decision::Copy, Why::Wanted),
        }
    }
}
