//! Which tags a run asks for: those of snapshots that a decision rests on. Each tag costs a request.
//!
//! In a small prefix all are asked for. In a wide one a plan is made as if nothing was excluded by a tag; then the
//! tags of the snapshots that decide it are asked for. Of those that are read, the answer says whether there are
//! tags, if the server tells; if it does not, they are asked for before. If one turns out to be excluded, nothing
//! that came of it is used, and the run plans again without it.

use crate::backup::chain::{self, Chain, Choice, KnownBases};
use crate::backup::timeline::Timelines;
use crate::backup::{Catalog, Kind};
use crate::error::{Error, Result};
use crate::ops::Context;
use crate::store::Store;
use std::collections::HashSet;

/// In a prefix of so many snapshots all tags are asked for.
pub const FEW: usize = 64;
/// Of a chain so many of its newest deltas are asked for: what was saved last is what gets excluded first.
const NEWEST_DELTAS: usize = 8;
/// And so many of the newest fulls.
const NEWEST_FULLS: usize = 8;
/// A run plans again at most so often.
const TRIES: u32 = 32;

/// Whose tags are asked for in a wide prefix, beside those that are known to have some.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ask {
    /// The base and the newest deltas of the newest chain: what is read besides is asked for as it is read.
    Newest,
    /// All of the newest chain, by somebody who does not read it.
    Chain,
    /// All.
    All,
}

impl Ask {
    /// What is asked for by a command that has `--all-tags`.
    pub(super) fn newest_or(all: bool) -> Ask {
        match all {
            true => Ask::All,
            false => Ask::Newest,
        }
    }
}

/// The snapshots of a scan whose tags were asked for, as indexes.
#[derive(Debug, Default)]
pub(super) struct Asked(HashSet<usize>);

impl Asked {
    /// Asks for those that were not asked for, and marks what is excluded. True if something is.
    pub(super) fn ask(
        &mut self,
        store: &Store,
        catalog: &mut Catalog,
        which: impl IntoIterator<Item = usize>,
    ) -> Result<bool> {
        if !store.asks_tags() {
            return Ok(false);
        }
        let is_new = |i: &usize| !catalog.snapshots[*i].excluded && self.0.insert(*i);
        let which: Vec<usize> = which.into_iter().filter(is_new).collect();
        let paths: Vec<String> = which
            .iter()
            .map(|&i| catalog.snapshots[i].path.clone())
            .collect();
        let mut any = false;
        for (i, excluded) in which.into_iter().zip(store.excluded_by_tag(&paths)?) {
            catalog.snapshots[i].excluded |= excluded;
            any |= excluded;
        }
        Ok(any)
    }

    /// Those that are not excluded as far as is known, and were not asked for.
    pub(super) fn unasked(&self, store: &Store, catalog: &Catalog) -> usize {
        if !store.asks_tags() {
            return 0;
        }
        catalog.usable().filter(|i| !self.0.contains(i)).count()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn has(&self, i: usize) -> bool {
        self.0.contains(&i)
    }
}

/// The snapshots that decide which chain is the newest, or all of that chain.
pub(super) fn deciding(
    catalog: &Catalog,
    timelines: &Timelines,
    known: &KnownBases,
    ask: Ask,
) -> Vec<usize> {
    // Each timeline's newest snapshot may make it the newest.
    let mut which: Vec<usize> = catalog.usable().last().into_iter().collect();
    let is_full = |i: &usize| catalog.snapshots[*i].name.kind == Kind::Full;
    let fulls: Vec<usize> = catalog.usable().filter(is_full).collect();
    which.extend(fulls.iter().rev().take(NEWEST_FULLS));
    if let Ok(newest) = timelines.newest(catalog) {
        match chain::choose(catalog, newest, None, known) {
            Ok(Choice::Found(chain)) => which.extend(deciding_of(&chain, ask)),
            Ok(Choice::Look(i)) => which.push(i),
            Err(_) => {}
        }
    }
    which
}

/// Snapshots at which revisions do not grow in order of creation, each with the one before it: one of the two may
/// be excluded, and then there is no doubt.
pub(super) fn breaks(catalog: &Catalog, doubtful: &[usize]) -> Vec<usize> {
    /// Where there are more, two streams were written.
    const MOST: usize = 16;
    let mut breaks = Vec::new();
    let mut highest: Option<usize> = None;
    for &i in doubtful {
        let name = &catalog.snapshots[i].name;
        let last = highest.map(|h| catalog.snapshots[h].name.last);
        let grows = match name.kind {
            Kind::Full => Some(name.last) >= last,
            Kind::Incr => Some(name.start) > last,
        };
        if !grows {
            breaks.extend([Some(i), highest].into_iter().flatten());
        }
        if breaks.len() >= 2 * MOST {
            break;
        }
        if Some(name.last) >= last {
            highest = Some(i);
        }
    }
    breaks
}

/// The snapshots of a chain that a plan rests on.
pub(super) fn deciding_of(chain: &Chain, ask: Ask) -> impl Iterator<Item = usize> + '_ {
    let most = match ask {
        Ask::Newest => NEWEST_DELTAS,
        Ask::Chain | Ask::All => usize::MAX,
    };
    let deltas = chain.deltas.iter().rev().take(most).map(|l| l.snapshot);
    deltas.chain([chain.base])
}

/// Fails if one of these is excluded: whoever relied on it plans again.
///
/// # Errors
/// One that [`Error::plans_again`]; the store's.
pub(super) fn refuse_excluded(ctx: &Context, paths: &[String]) -> Result<()> {
    let excluded = ctx.store.excluded_by_tag(paths)?;
    match paths.iter().zip(excluded).find(|e| e.1) {
        None => Ok(()),
        Some((path, _)) => Err(Error::plan_again(format!(
            "{} is excluded by its tag, which a plan did not look at: run again",
            ctx.store.name(path)
        ))),
    }
}

/// Reads some snapshots, and fails if one of them turns out to be excluded, whatever came of reading it.
///
/// # Errors
/// One that [`Error::plans_again`]; the store's; those of `read`.
pub(super) fn unless_excluded<'p, T>(
    ctx: &Context,
    paths: impl Iterator<Item = &'p str> + Clone,
    read: impl FnOnce() -> Result<T>,
) -> Result<T> {
    if !ctx.store.asks_tags() {
        return read();
    }
    if !ctx.store.tells_tags() {
        let paths: Vec<String> = paths.map(str::to_owned).collect();
        refuse_excluded(ctx, &paths)?;
        return read();
    }
    unless_noted(ctx, paths, read())
}

/// What came of reading some of these snapshots, unless one that was met with tags is excluded.
///
/// # Errors
/// One that [`Error::plans_again`]; the store's; that of `done`.
pub(super) fn unless_noted<'p, T>(
    ctx: &Context,
    paths: impl Iterator<Item = &'p str>,
    done: Result<T>,
) -> Result<T> {
    // What failed may have failed for the very damage that it is excluded for.
    match (refuse_noted(ctx, paths), done) {
        (Err(e), done) if done.is_ok() || e.plans_again() => Err(e),
        (_, done) => done,
    }
}

/// Fails if one of these is excluded, of those that are known to have tags.
fn refuse_noted<'p>(ctx: &Context, paths: impl Iterator<Item = &'p str>) -> Result<()> {
    if !ctx.store.knows_tags() {
        return Ok(());
    }
    let noted = paths.filter(|path| ctx.store.has_tags(path));
    let noted: Vec<String> = noted.map(str::to_owned).collect();
    refuse_excluded(ctx, &noted)
}

/// Does `work` anew as long as what it relies on turns out to be excluded: each scan asks for the tags of what
/// was met with some.
///
/// # Errors
/// Those of `work`.
pub fn without_excluded<T>(mut work: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 1..TRIES {
        match work() {
            Err(e) if e.plans_again() => tracing::info!("planning again: {e}"),
            done => return done,
        }
    }
    work()
}

/// What is said of snapshots whose tags were not asked for.
pub(super) fn not_read(count: usize) -> String {
    format!(
        "the tags of {count} snapshots were not read, since each is a request: one that is excluded by its tag is shown as if it was not; whatever reads a snapshot looks at its tags. --all-tags reads all"
    )
}
