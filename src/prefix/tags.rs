//! Decides which tags an operation reads. A tag may exclude a snapshot, and reading the tags of one object is
//! a request.
//!
//! In a prefix of few snapshots all tags are read. In a larger one, an operation plans as if no tag excluded
//! anything, and then reads the tags of the snapshots on which the plan rests. If the server reports with an
//! object whether it has tags, tags of other snapshots are read only if they have some; otherwise they are
//! read before the snapshot. If a snapshot turns out to be excluded, the results from it are discarded and
//! the operation plans again without it.
//!
//! Requests are made by `store`.

use crate::backup::chain::{self, Chain, Choice, KnownBases};
use crate::backup::timeline::Timelines;
use crate::backup::{Catalog, Kind};
use crate::error::{Error, Result};
use crate::prefix::Context;
use crate::store::Store;
use std::collections::HashSet;

/// In a prefix of up to this many snapshots all tags are read.
pub const FEW: usize = 64;
/// The number of newest deltas of a chain whose tags are read: users exclude the newest snapshots first.
const NEWEST_DELTAS: usize = 8;
/// The number of newest fulls whose tags are read.
const NEWEST_FULLS: usize = 8;
/// In a prefix of up to this many snapshots, `list` reads all tags.
const MANY: usize = 10_000;

/// The snapshots of a large prefix whose tags are read, beside those that are known to have tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TagScope {
    /// The base and the newest deltas of the newest chain. The tags of other snapshots are read when these
    /// are read.
    Newest,
    /// All snapshots of the newest chain, for an operation that does not read them.
    Chain,
    /// As `All` in a prefix of up to 10,000 snapshots, otherwise as `Newest`.
    UpToMany,
    /// All snapshots.
    All,
}

impl TagScope {
    /// Returns this scope, or `All` if a command has the flag `--all-tags`.
    pub(crate) fn or_all(self, all_tags: bool) -> TagScope {
        if all_tags { TagScope::All } else { self }
    }

    /// Returns whether all tags are read with the listing of this many snapshots.
    pub(crate) fn has_all_of(self, snapshots: usize) -> bool {
        match self {
            TagScope::Newest | TagScope::Chain => snapshots <= FEW,
            TagScope::UpToMany => snapshots <= MANY,
            TagScope::All => true,
        }
    }
}

/// The snapshots of a scan whose tags were read, as indexes.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReadTags(HashSet<usize>);

impl ReadTags {
    /// Reads the tags of the snapshots in `which` that were not read yet, and marks excluded snapshots.
    /// Returns whether there are any.
    pub(crate) fn read(
        &mut self,
        store: &Store,
        catalog: &mut Catalog,
        which: impl IntoIterator<Item = usize>,
    ) -> Result<bool> {
        if !store.can_request_tags() {
            return Ok(false);
        }
        let is_new = |i: &usize| !catalog.snapshots[*i].excluded && self.0.insert(*i);
        let which: Vec<usize> = which.into_iter().filter(is_new).collect();
        let paths: Vec<String> = which
            .iter()
            .map(|&i| catalog.snapshots[i].path.clone())
            .collect();
        let mut any_excluded = false;
        for (i, excluded) in which.into_iter().zip(store.excluded_by_tag(&paths)?) {
            catalog.snapshots[i].excluded |= excluded;
            any_excluded |= excluded;
        }
        Ok(any_excluded)
    }

    /// Returns the number of usable snapshots whose tags were not read.
    pub(crate) fn unread_count(&self, store: &Store, catalog: &Catalog) -> usize {
        if !store.can_request_tags() {
            return 0;
        }
        catalog.usable().filter(|i| !self.0.contains(i)).count()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn has(&self, i: usize) -> bool {
        self.0.contains(&i)
    }
}

/// Returns the snapshots that decide which chain is the newest, and those of that chain in `scope`.
pub(crate) fn deciding_snapshots(
    catalog: &Catalog,
    timelines: &Timelines,
    known: &KnownBases,
    scope: TagScope,
) -> Vec<usize> {
    // The newest snapshot of all decides which timeline is the newest.
    let mut which: Vec<usize> = catalog.usable().last().into_iter().collect();
    let is_full = |i: &usize| catalog.snapshots[*i].name.kind == Kind::Full;
    let fulls: Vec<usize> = catalog.usable().filter(is_full).collect();
    which.extend(fulls.iter().rev().take(NEWEST_FULLS));
    if let Ok(newest) = timelines.newest(catalog) {
        match chain::choose(catalog, newest, None, known) {
            Ok(Choice::Chosen(chain)) => which.extend(deciding_in_chain(&chain, scope)),
            Ok(Choice::ReadFirst(i)) => which.push(i),
            Err(_) => {}
        }
    }
    which
}

/// Returns the snapshots of a chain whose tags a plan needs.
pub(crate) fn deciding_in_chain(
    chain: &Chain,
    scope: TagScope,
) -> impl Iterator<Item = usize> + '_ {
    let most = match scope {
        TagScope::Newest | TagScope::UpToMany => NEWEST_DELTAS,
        TagScope::Chain | TagScope::All => usize::MAX,
    };
    let deltas = chain.deltas.iter().rev().take(most).map(|l| l.snapshot);
    deltas.chain([chain.base])
}

/// Fails if a tag excludes one of these snapshots, so that the operation plans again.
///
/// # Errors
/// An error for which [`Error::is_of_excluded`] is true; errors of the store.
pub(crate) fn refuse_excluded(ctx: &Context, paths: &[String]) -> Result<()> {
    let excluded = ctx.store.excluded_by_tag(paths)?;
    match paths.iter().zip(excluded).find(|e| e.1) {
        None => Ok(()),
        Some((path, _)) => Err(Error::excluded(ctx.store.name(path))),
    }
}

/// Calls `read`, which reads some snapshots, and fails if a tag excludes one of them, whatever the result of
/// `read` is.
///
/// # Errors
/// An error for which [`Error::is_of_excluded`] is true; errors of the store and of `read`.
pub(crate) fn unless_excluded<'p, T>(
    ctx: &Context,
    paths: impl Iterator<Item = &'p str> + Clone,
    read: impl FnOnce() -> Result<T>,
) -> Result<T> {
    if !ctx.store.can_request_tags() {
        return read();
    }
    if !ctx.store.responses_report_tags() {
        let paths: Vec<String> = paths.map(str::to_owned).collect();
        refuse_excluded(ctx, &paths)?;
        return read();
    }
    unless_excluded_by_known_tags(ctx, paths, read())
}

/// Returns `result`, which came of reading some of these snapshots, unless a tag excludes one of those that
/// the store knows to have tags.
///
/// # Errors
/// An error for which [`Error::is_of_excluded`] is true; errors of the store; the error of `result`.
pub(crate) fn unless_excluded_by_known_tags<'p, T>(
    ctx: &Context,
    paths: impl Iterator<Item = &'p str>,
    result: Result<T>,
) -> Result<T> {
    // Reading may have failed because of the damage for which a snapshot is excluded, so exclusion comes
    // first.
    match (refuse_excluded_by_known_tags(ctx, paths), result) {
        (Err(e), result) if result.is_ok() || e.is_of_excluded() => Err(e),
        (_, result) => result,
    }
}

/// Fails if a tag excludes one of these snapshots. Only snapshots that the store knows to have tags are
/// checked.
fn refuse_excluded_by_known_tags<'p>(
    ctx: &Context,
    paths: impl Iterator<Item = &'p str>,
) -> Result<()> {
    if !ctx.store.has_seen_tags() {
        return Ok(());
    }
    let tagged = paths.filter(|path| ctx.store.has_tags(path));
    let tagged: Vec<String> = tagged.map(str::to_owned).collect();
    refuse_excluded(ctx, &tagged)
}
