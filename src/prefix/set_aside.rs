//! Snapshots that do not count, and what an operation does then.
//!
//! The listing shows the exclusion marks that are objects, and which snapshots are encrypted. Everything else is learnt
//! when a snapshot is opened: whether a tag excludes it, whether it can be decrypted, whether it is sound. Then the
//! operation decides again without it ([`decide_again`]). What is promised without opening asks for a few tags
//! ([`refuse_excluded_end`]). Nothing is written.

use super::Context;
use super::contents::Contents;
use crate::backup::chain::{self, Choice};
use crate::backup::timeline::Timelines;
use crate::backup::{Catalog, Snapshot};
use crate::base::{lock, printable};
use crate::error::{Error, Reason, Result};
use crate::telemetry::logs;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

/// The number of newest deltas whose tags are requested for a promise: users exclude the newest snapshots first.
const NEWEST_DELTAS: usize = 64;

/// Why a snapshot that is there does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetAside {
    /// Somebody has excluded it, by an object or a tag.
    Excluded,
    /// It is not encrypted although a key is given: see [`Trust`](crate::backup::trust::Trust).
    Untrusted,
    /// It is not what its name says.
    Damaged,
    /// No key that is given opens it.
    Sealed,
    /// It is larger than the limits.
    TooLarge,
    /// `gc` had no time or no space to read it.
    Unread,
}

impl SetAside {
    /// Returns why the snapshot of an error does not count; `None` if the error is of something else.
    pub fn of(e: &Error) -> Option<SetAside> {
        e.set_aside()?;
        Some(match e.reason() {
            Reason::SnapshotVanished => SetAside::Excluded,
            Reason::CannotDecrypt => SetAside::Sealed,
            Reason::TooLarge => SetAside::TooLarge,
            Reason::Untrusted => SetAside::Untrusted,
            Reason::PartlyDone | Reason::NoSpace => SetAside::Unread,
            _ => SetAside::Damaged,
        })
    }
}

/// What an operation is for, as far as it decides on snapshots that do not count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Purpose {
    /// It restores a state, or folds it into a new snapshot.
    Restore,
    /// It shows a state or a history.
    Read,
    /// It saves what follows what is there.
    Save,
    /// It removes what nobody needs.
    Collect,
    /// It tells what is wrong.
    #[default]
    Verify,
}

/// What an operation does about a snapshot that does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reaction {
    /// It decides as if the snapshot were not there.
    LeavesOut,
    /// It keeps the snapshot, and otherwise decides as if it were not there.
    Keeps,
    /// Other snapshots must lead to the same state.
    GoesAround,
    /// As `GoesAround`; if nothing leads around, what stands before is shown.
    StopsBefore,
    /// It ends with the error, or reports it.
    Fails,
}

impl Purpose {
    /// Returns what an operation of this purpose does. `docs/concepts.md` has the same table.
    ///
    /// Neither `GoesAround` nor `StopsBefore` leaves the timeline, since what the snapshots of a timeline have in common was
    /// decided with this one among them. A missing key never makes a backup look like an older one. A saver leaves out what
    /// anybody may have put there who can write to the store.
    pub fn reaction(self, to: SetAside) -> Reaction {
        match (self, to) {
            (_, SetAside::Excluded) | (Purpose::Save, _) => Reaction::LeavesOut,
            (Purpose::Collect, _) => Reaction::Keeps,
            (Purpose::Verify, _) | (_, SetAside::TooLarge | SetAside::Untrusted) => Reaction::Fails,
            (Purpose::Read, SetAside::Damaged) => Reaction::StopsBefore,
            (Purpose::Restore | Purpose::Read, _) => Reaction::GoesAround,
        }
    }
}

/// The snapshots of a store that an operation has set aside when it opened them. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Marks(Arc<Mutex<Marked>>);

#[derive(Debug, Default)]
struct Marked {
    purpose: Purpose,
    /// By the full names of the snapshots.
    snapshots: BTreeMap<String, Error>,
    /// The warnings that were logged: each is once, however often the operation decides.
    told: BTreeSet<String>,
}

impl Marks {
    /// Applies the marks to the catalog of the context's store. Returns the errors of the snapshots that were tried, by
    /// index.
    pub(crate) fn apply(&self, ctx: &Context, catalog: &mut Catalog) -> BTreeMap<usize, Error> {
        let marked = &lock(&self.0);
        let mut tried = BTreeMap::new();
        // Large prefixes are scanned often, and marks are rare.
        if marked.snapshots.is_empty() {
            return tried;
        }
        // Without any key, no other sealed snapshot needs to be tried.
        let goes_around = marked.purpose.reaction(SetAside::Sealed) == Reaction::GoesAround;
        let is_sealed = |e: &&Error| SetAside::of(e) == Some(SetAside::Sealed);
        let mut sealed = marked.snapshots.values().filter(is_sealed);
        let sealed = sealed
            .next()
            .filter(|_| goes_around && !ctx.keys.decrypts());
        let usable: Vec<usize> = catalog.usable().collect();
        for i in usable {
            let s = &mut catalog.snapshots[i];
            let e = marked.snapshots.get(&ctx.store.name(&s.path));
            let Some(e) = e.or(sealed.filter(|_| s.name.is_encrypted)) else {
                continue;
            };
            match SetAside::of(e) {
                Some(SetAside::Excluded) => s.excluded = true,
                why => {
                    let reaction = why.map(|why| marked.purpose.reaction(why));
                    // What was not read may be sound.
                    s.untrusted = why != Some(SetAside::Unread)
                        && matches!(reaction, Some(Reaction::LeavesOut | Reaction::Keeps));
                    tried.insert(i, e.again());
                }
            }
        }
        tried
    }

    /// Adds a warning to those of a report, and logs it if it is new.
    pub(crate) fn warn(&self, warnings: &mut Vec<String>, message: impl Into<String>) {
        let message = printable::message(message.into());
        if lock(&self.0).told.insert(message.clone()) {
            logs::warn(&message);
        }
        warnings.push(message);
    }

    /// Returns what the operation is for.
    pub(crate) fn purpose(&self) -> Purpose {
        lock(&self.0).purpose
    }

    /// Returns whether a snapshot is set aside. `name` is its full name.
    pub(crate) fn has(&self, name: &str) -> bool {
        lock(&self.0).snapshots.contains_key(name)
    }

    /// Returns whether a state before the set-aside snapshots will do if the requested one is the newest.
    pub(crate) fn stops_before(&self) -> bool {
        let marked = lock(&self.0);
        let mut why = marked.snapshots.values().filter_map(SetAside::of);
        let stops = |why| {
            let reaction = marked.purpose.reaction(why);
            matches!(reaction, Reaction::StopsBefore | Reaction::LeavesOut)
        };
        marked.purpose == Purpose::Read && why.all(stops)
    }

    /// Adds a snapshot that an error sets aside. Returns whether it is new.
    pub(crate) fn add(&self, e: &Error) -> bool {
        let Some(name) = e.set_aside() else {
            return false;
        };
        let marked = &mut lock(&self.0).snapshots;
        marked.insert(name.to_owned(), e.again()).is_none()
    }

    /// Fails with the first of errors that set further snapshots aside, and adds the others: the operation decides again
    /// once for all of them.
    ///
    /// # Errors
    /// The first of `errors` whose snapshot is not set aside yet.
    pub(crate) fn decide_without(&self, errors: Vec<Error>) -> Result<()> {
        let is_known = |e: &Error| e.set_aside().is_some_and(|name| self.has(name));
        let mut errors = errors.into_iter().filter(|e| !is_known(e));
        let Some(first) = errors.next() else {
            return Ok(());
        };
        for e in errors {
            self.add(&e);
        }
        Err(first)
    }

    fn begin(&self, purpose: Purpose) {
        *lock(&self.0) = Marked {
            purpose,
            ..Marked::default()
        };
    }

    /// Logs what an operation has done without. In the results of others it is a finding.
    fn tell(&self) {
        let marked = lock(&self.0);
        if !matches!(marked.purpose, Purpose::Collect | Purpose::Verify) {
            let warnings = marked.snapshots.values().filter_map(warning);
            warnings.for_each(|warning| logs::warn(&warning));
        }
    }
}

/// Returns the warning about a snapshot that was set aside when it was opened. One that is excluded is as it should be.
pub(crate) fn warning(e: &Error) -> Option<String> {
    match SetAside::of(e)? {
        SetAside::Excluded | SetAside::Untrusted => None,
        SetAside::Damaged => Some(format!("damaged, and not used: {e}")),
        SetAside::Sealed | SetAside::TooLarge | SetAside::Unread => {
            Some(format!("not opened, and not used: {e}"))
        }
    }
}

/// Calls `step`, which plans and opens, again as long as it finds a snapshot that does not count and the operation can go on
/// without it.
///
/// # Errors
/// The errors of `step`.
pub fn decide_again<'c, T>(
    contexts: impl IntoIterator<Item = &'c Context>,
    purpose: Purpose,
    mut step: impl FnMut() -> Result<T>,
) -> Result<T> {
    let contexts: Vec<&Context> = contexts.into_iter().collect();
    for ctx in &contexts {
        ctx.marks.begin(purpose);
    }
    // Each snapshot is set aside once, so there is an end.
    loop {
        let result = step();
        let Err(e) = &result else {
            // Each context has all of them.
            if let Some(ctx) = contexts.first() {
                ctx.marks.tell();
            }
            return result;
        };
        let Some(why) = SetAside::of(e) else {
            return result;
        };
        let mut is_new = false;
        if purpose.reaction(why) != Reaction::Fails {
            for ctx in &contexts {
                is_new |= ctx.marks.add(e);
            }
        }
        if !is_new {
            return result;
        }
        tracing::debug!("deciding again without a snapshot: {e}");
    }
}

/// Requests the tags of what a promise about the newest state rests on if nothing opens it: the base and the newest deltas of
/// the newest chain, by names.
///
/// # Errors
/// One that sets a snapshot aside if a tag excludes it; errors of the store.
pub(crate) fn refuse_excluded_end(
    ctx: &Context,
    catalog: &Catalog,
    timelines: &Timelines,
    contents: &Contents,
) -> Result<()> {
    let known = contents.known_bases();
    let Ok(newest) = timelines.newest(catalog) else {
        return Ok(());
    };
    let end = match chain::choose(catalog, newest, None, &known) {
        Ok(Choice::Chosen(chain)) => {
            let newest = chain.deltas.iter().rev().take(NEWEST_DELTAS);
            newest
                .map(|link| link.snapshot)
                .chain([chain.base])
                .collect()
        }
        Ok(Choice::ReadFirst(full)) => vec![full],
        Err(_) => Vec::new(),
    };
    let is_unopened = |i: &usize| !contents.surveys.contains_key(i);
    let end = end.into_iter().filter(is_unopened);
    refuse_excluded(ctx, end.map(|i| &catalog.snapshots[i]))
}

/// Requests the tags of the newest of these deltas, for a dry run, which does not open them.
///
/// # Errors
/// As [`refuse_excluded_end`].
pub(crate) fn refuse_excluded_deltas<'s>(
    ctx: &Context,
    deltas: impl DoubleEndedIterator<Item = &'s Snapshot>,
) -> Result<()> {
    refuse_excluded(ctx, deltas.rev().take(NEWEST_DELTAS))
}

fn refuse_excluded<'s>(ctx: &Context, snapshots: impl Iterator<Item = &'s Snapshot>) -> Result<()> {
    let paths: Vec<String> = snapshots.map(|s| s.path.clone()).collect();
    let excluded = ctx.store.excluded_by_tag(&paths)?;
    let excluded = paths.iter().zip(excluded).filter(|e| e.1);
    let errors = excluded.map(|(path, _)| Error::excluded(ctx.store.name(path)));
    ctx.marks.decide_without(errors.collect())
}
