//! Looks at a prefix: lists it, finds out what is excluded, reads contents where names leave
//! doubt (or all of them), and sorts the snapshots into timelines.

use crate::backup::catalog::{NOTES, SNAPSHOTS, V1, V2};
use crate::backup::chain::{Chain, KnownBases};
use crate::backup::survey::{Comparison, Continuity, Survey, Surveyor, Surveys};
use crate::backup::timeline::{self, Evidence, NamesOnly, Timelines};
use crate::backup::trust::{self, Untrusted};
use crate::backup::{Catalog, Kind, Listed, SnapshotName};
use crate::base::lock;
use crate::base::shorten;
use crate::bolt::Database;
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;
use crate::ops::Context;
use crate::ops::fold::open::Reading;
use crate::ops::fold::open::Spool;
use crate::ops::parallel::{first, side_by_side};
use crate::ops::tags::{self, Ask, Asked, FEW};
use crate::store::Store;
use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

/// What is said where the store does not tell tags.
pub const TAGS_UNREADABLE: &str = "the store does not tell object tags: snapshots that are excluded by a tag are not known as such (allow s3:GetObjectTagging; on Azure reading tags)";

/// How much of the contents to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// None: names are believed.
    Names,
    /// Of snapshots whose names leave doubt about their timeline.
    Doubtful,
    /// Of all.
    All,
}

/// What a prefix holds.
pub struct Scan {
    /// The snapshots.
    pub catalog: Catalog,
    /// Their timelines.
    pub timelines: Timelines,
    /// Those whose names leave doubt about their timeline, by index, in ascending order.
    pub doubtful: Vec<usize>,
    /// What was found out by reading, by index.
    pub contents: Contents,
    /// Snapshots whose tags were not asked for: they may be excluded.
    pub tags_unread: usize,
    /// Snapshots that may be anybody's.
    pub untrusted: Untrusted,
    asked: Asked,
}

impl Scan {
    /// What names alone tell.
    #[cfg(test)]
    pub(super) fn of_names(catalog: Catalog) -> Result<Scan> {
        Ok(Scan {
            timelines: Timelines::build(&catalog, &NamesOnly)?,
            catalog,
            doubtful: Vec::new(),
            contents: Contents::default(),
            tags_unread: 0,
            untrusted: Untrusted::default(),
            asked: Asked::default(),
        })
    }

    /// Whether a snapshot's name leaves doubt about its timeline.
    pub fn is_doubtful(&self, snapshot: usize) -> bool {
        self.doubtful.binary_search(&snapshot).is_ok()
    }

    /// Fails if the newest state seems to stand on what is not trusted.
    ///
    /// # Errors
    /// `Untrusted`.
    pub fn refuse_untrusted(&self, ctx: &Context) -> Result<()> {
        let (untrusted, which) = (&self.untrusted, &self.untrusted.refused);
        match which.is_empty() {
            true => Ok(()),
            false => Err(untrusted_error(&ctx.store, &self.catalog, untrusted, which)),
        }
    }

    /// Explains a failure that may come of what was left out, for it is not trusted.
    pub(super) fn explain_untrusted(&self, ctx: &Context, e: Error) -> Error {
        let may_be = matches!(
            e.reason(),
            Reason::NoSnapshots
                | Reason::OutOfRange
                | Reason::RevisionGap
                | Reason::NoSuchTimeline
                | Reason::KeyNotFound
        );
        if !may_be || self.untrusted.is_empty() || ctx.trust.ignore_untrusted {
            return e;
        }
        let all: Vec<usize> = self.untrusted.all().collect();
        untrusted_error(&ctx.store, &self.catalog, &self.untrusted, &all).at(e.to_string())
    }

    /// What is to be said of what was left out.
    pub(super) fn untrusted_warning(&self) -> Option<String> {
        untrusted_warning(&self.catalog, &self.untrusted)
    }

    /// The deltas of a chain whose tags were not asked for.
    pub(super) fn unread_of(&self, chain: &Chain) -> Vec<String> {
        self.unread(chain.deltas.iter().map(|l| l.snapshot))
    }

    fn unread(&self, which: impl IntoIterator<Item = usize>) -> Vec<String> {
        if self.tags_unread == 0 {
            return Vec::new();
        }
        let unread = which.into_iter().filter(|&i| !self.asked.has(i));
        let path = |i: usize| self.catalog.snapshots[i].path.clone();
        unread.map(path).collect()
    }

    /// Fails if one of these is excluded by a tag that was not asked for.
    ///
    /// # Errors
    /// One that [`Error::plans_again`]; the store's.
    pub(super) fn refuse_excluded(
        &self,
        ctx: &Context,
        which: impl IntoIterator<Item = usize>,
    ) -> Result<()> {
        tags::refuse_excluded(ctx, &self.unread(which))
    }
}

/// What was read of snapshots.
#[derive(Default)]
pub struct Contents {
    file: Option<Surveys>,
    /// By index in the catalog.
    pub surveys: BTreeMap<usize, Survey>,
    /// Why a snapshot could not be read.
    pub unreadable: BTreeMap<usize, Error>,
    /// What each of the doubtful has to do with those before it.
    compared: HashMap<usize, Vec<(usize, Comparison)>>,
}

impl Contents {
    /// The fulls that were read.
    pub fn known_bases(&self) -> KnownBases {
        let bases = self.surveys.iter();
        bases.filter_map(|(&i, s)| Some((i, s.base?))).collect()
    }

    /// Where the contents of two snapshots that were read first disagree, in doubt or not.
    ///
    /// # Errors
    /// `Io`.
    pub fn disagreement(&self, a: usize, b: usize) -> Result<Option<Revision>> {
        let Some((file, a, b)) = self.pair(a, b) else {
            return Ok(None);
        };
        Ok(file.compare(a, b)?.conflict)
    }

    fn pair(&self, a: usize, b: usize) -> Option<(&Surveys, &Survey, &Survey)> {
        let (a, b) = (self.surveys.get(&a)?, self.surveys.get(&b)?);
        Some((self.file.as_ref()?, a, b))
    }
}

impl Evidence for Contents {
    fn compared(&self, snapshot: usize) -> Vec<(usize, Comparison)> {
        self.compared.get(&snapshot).cloned().unwrap_or_default()
    }

    fn continuity(&self, before: usize, until: Revision, after: usize) -> Result<Continuity> {
        match self.pair(before, after) {
            Some((file, before, after)) => file.continuity(before, until, after),
            None => Ok(Continuity::Unknown),
        }
    }

    fn fingerprint(&self, snapshot: usize, revision: Revision) -> Result<String> {
        match (&self.file, self.surveys.get(&snapshot)) {
            (Some(file), Some(s)) => file.fingerprint(s, revision),
            _ => Err(Error::internal("a fork at a snapshot that was not read")),
        }
    }

    fn last(&self, snapshot: usize) -> Option<Revision> {
        self.surveys.get(&snapshot).map(|s| s.last)
    }

    fn is_unreadable(&self, snapshot: usize) -> bool {
        self.unreadable.contains_key(&snapshot)
    }

    fn speaks_of(&self, snapshot: usize) -> bool {
        self.surveys.contains_key(&snapshot)
    }
}

/// Scans the context's prefix.
///
/// # Errors
/// `NoSnapshots` where there is none; the store's; `Io`, `NoSpace`. A damaged snapshot is no error
/// here: it is told in [`Contents::unreadable`].
pub fn scan(ctx: &Context, depth: Depth) -> Result<Scan> {
    scan_with(ctx, depth, Ask::Newest, |_| Ok(()))
}

/// As [`scan`], by somebody who relies on more than the newest chain, or does not read it.
///
/// # Errors
/// As [`scan`].
pub fn scan_asking(ctx: &Context, depth: Depth, ask: Ask) -> Result<Scan> {
    scan_with(ctx, depth, ask, |_| Ok(()))
}

/// What the prefix holds, by names.
///
/// # Errors
/// The store's.
pub(super) fn by_names(ctx: &Context) -> Result<Catalog> {
    let mut catalog = Catalog::from_listing(listed(&ctx.store, &SNAPSHOTS)?);
    catalog.add_notes(&listed(&ctx.store, &NOTES)?);
    Ok(catalog)
}

/// The objects in some folders.
///
/// # Errors
/// The store's.
pub(super) fn listed(store: &Store, folders: &[&str]) -> Result<Vec<Listed>> {
    let listing = store.list(folders)?.into_iter();
    let listed = listing.map(|(path, bytes)| Listed { path, bytes });
    Ok(listed.collect())
}

/// As [`scan`]; `each` is called for every full that is read, as long as it is open.
///
/// # Errors
/// As [`scan`]. What `each` finds to be bad data makes that full unreadable.
pub(super) fn scan_with(
    ctx: &Context,
    depth: Depth,
    ask: Ask,
    each: impl Fn(&Database<Spool>) -> Result<()> + Sync,
) -> Result<Scan> {
    let mut catalog = Catalog::from_listing(listed(&ctx.store, &SNAPSHOTS)?);
    if catalog.snapshots.is_empty() {
        return Err(nothing_there(ctx, &catalog));
    }
    ctx.trust.mark(&mut catalog);
    let mut asked = Asked::default();
    let all = 0..catalog.snapshots.len();
    let asks_all = ask == Ask::All || all.len() <= FEW;
    // Whose tags are asked for does not depend on the notes.
    let (notes, tags) = side_by_side(
        ctx.store.requests().map_or(1, |_| 2),
        || listed(&ctx.store, &NOTES),
        || match asks_all {
            true => asked.ask(&ctx.store, &mut catalog, all),
            false => Ok(false),
        },
    );
    tags?;
    catalog.add_notes(&notes?);
    let is_told = |e: &Error| e.reason().is_bad_data();
    let (doubtful, contents, timelines) = loop {
        // Those that are known to have tags.
        if ctx.store.knows_tags() {
            let tagged: Vec<usize> = catalog
                .usable()
                .filter(|&i| ctx.store.has_tags(&catalog.snapshots[i].path))
                .collect();
            asked.ask(&ctx.store, &mut catalog, tagged)?;
        }
        let doubtful = timeline::doubtful(&catalog);
        let breaks = tags::breaks(&catalog, &doubtful);
        if asked.ask(&ctx.store, &mut catalog, breaks)? {
            continue;
        }
        let to_read: Vec<usize> = match depth {
            Depth::Names => Vec::new(),
            Depth::Doubtful => doubtful.clone(),
            Depth::All => catalog.usable().collect(),
        };
        let paths = to_read.iter().filter(|&&i| !asked.has(i));
        let paths = paths.map(|&i| catalog.snapshots[i].path.as_str());
        let contents = tags::unless_excluded(ctx, paths, || {
            read_contents(ctx, &catalog, to_read.clone(), &doubtful, is_told, &each)
        });
        let contents = match contents {
            Err(e) if e.plans_again() => continue,
            contents => contents?,
        };
        let evidence: &dyn Evidence = match depth {
            Depth::Names => &NamesOnly,
            _ => &contents,
        };
        let timelines = Timelines::build(&catalog, evidence)?;
        let deciding = match asked.unasked(&ctx.store, &catalog) {
            0 => Vec::new(),
            _ => tags::deciding(&catalog, &timelines, &contents.known_bases(), ask),
        };
        if !asked.ask(&ctx.store, &mut catalog, deciding)? {
            break (doubtful, contents, timelines);
        }
    };
    Ok(Scan {
        tags_unread: asked.unasked(&ctx.store, &catalog),
        untrusted: trust::untrusted(&catalog, &ctx.trust),
        catalog,
        timelines,
        doubtful,
        contents,
        asked,
    })
}

/// Reads some snapshots, and compares those in doubt with each other. A failure of a kind that `is_told` is
/// told in [`Contents::unreadable`]; `each` is called for every full, as long as it is open.
///
/// # Errors
/// Other failures: the store's; `Io`, `NoSpace`.
pub(super) fn read_contents(
    ctx: &Context,
    catalog: &Catalog,
    to_read: Vec<usize>,
    doubtful: &[usize],
    is_told: impl Fn(&Error) -> bool + Sync,
    each: impl Fn(&Database<Spool>) -> Result<()> + Sync,
) -> Result<Contents> {
    let mut contents = Contents::default();
    if to_read.is_empty() {
        return Ok(contents);
    }
    let threads = ctx.threads.clamp(1, to_read.len());
    let files: Result<_> = (0..threads).map(|_| ctx.temp_file()).collect();
    let mut file = Surveys::new(files?);
    {
        let free: Mutex<Vec<Surveyor<'_>>> = Mutex::new(file.surveyors().collect());
        let (read, one_full) = (Mutex::new(&mut contents), Mutex::new(()));
        let reading = Reading::new(ctx, to_read.iter().map(|&i| &catalog.snapshots[i]));
        first(threads, to_read.len(), |nth| {
            let Some(mut surveyor) = lock(&free).pop() else {
                return Err(Error::internal("more threads survey than there are files"));
            };
            let survey = survey(ctx, &reading, nth, &mut surveyor, &one_full, &each);
            lock(&free).push(surveyor);
            let i = to_read[nth];
            match survey {
                Ok(s) => drop(lock(&read).surveys.insert(i, s)),
                Err(e) if is_told(&e) => drop(lock(&read).unreadable.insert(i, e)),
                Err(e) => return Err(e),
            }
            Ok(None::<()>)
        })?;
    }
    // Only pairs in doubt make timelines, so that these do not depend on the depth.
    let read = |&i: &usize| Some((i, contents.surveys.get(&i)?));
    let (indexes, surveys): (Vec<usize>, Vec<&Survey>) = doubtful.iter().filter_map(read).unzip();
    for (&i, with) in indexes.iter().zip(file.compare_all(&surveys)?) {
        let with = with.into_iter().map(|(other, c)| (indexes[other], c));
        contents.compared.insert(i, with.collect());
    }
    contents.file = Some(file);
    Ok(contents)
}

fn survey(
    ctx: &Context,
    reading: &Reading<'_>,
    nth: usize,
    surveyor: &mut Surveyor<'_>,
    one_full: &Mutex<()>,
    each: impl Fn(&Database<Spool>) -> Result<()>,
) -> Result<Survey> {
    let snapshot = reading.snapshot(nth);
    let at = ctx.at(snapshot);
    match snapshot.name.kind {
        Kind::Full => {
            // The temporary directory has room for one.
            let _one = lock(one_full);
            let db = reading.full(nth)?.0;
            each(&db).map_err(&at)?;
            surveyor.full(&db).map_err(at)
        }
        Kind::Incr => surveyor.delta(reading.delta_in_turn(nth)?).map_err(at),
    }
}

/// The failure that some snapshots may be anybody's.
pub(super) fn untrusted_error(
    store: &Store,
    catalog: &Catalog,
    untrusted: &Untrusted,
    which: &[usize],
) -> Error {
    let flag = untrusted.allowed_below.map(|below| {
        format!(
            "; or, if they are from before the prefix was encrypted, trust them by --allow-plaintext-below {below}"
        )
    });
    Reason::Untrusted.error(format!(
        "keys are given, and these snapshots of {} are not encrypted, so anybody who can write there may have made them: {}; remove or exclude what is not yours; go on without them by --ignore-untrusted{}",
        store.url(),
        paths(catalog, which.iter().copied()),
        flag.unwrap_or_default()
    ))
}

/// What is to be said of snapshots that are left out, for they may be anybody's.
pub(super) fn untrusted_warning(catalog: &Catalog, untrusted: &Untrusted) -> Option<String> {
    let say = || {
        format!(
            "left out, for they are not encrypted and keys are given: {}",
            paths(catalog, untrusted.all())
        )
    };
    (!untrusted.is_empty()).then(say)
}

fn paths(catalog: &Catalog, which: impl Iterator<Item = usize>) -> String {
    let paths: Vec<&str> = which.map(|i| catalog.snapshots[i].path.as_str()).collect();
    shorten::line(&paths, ", ", shorten::IN_LIST)
}

/// The error for a prefix without snapshots, with a hint at what is there instead.
pub(super) fn nothing_there(ctx: &Context, catalog: &Catalog) -> Error {
    let url = ctx.store.url();
    let is_snapshot = |n: &String| n.parse::<SnapshotName>().is_ok();
    let message = if !catalog.foreign.is_empty() {
        format!(
            "{url} holds {} objects in {V1}/ and {V2}/ and none is a snapshot",
            catalog.foreign.len()
        )
    } else if ctx
        .store
        .list_directly()
        .is_ok_and(|names| names.iter().any(is_snapshot))
    {
        format!(
            "{url} holds snapshots directly: name the folder above it, the one that holds {V2}/"
        )
    } else {
        format!("{url} holds no snapshots (looked for {V2}/ and {V1}/ below it): check --store")
    };
    Reason::NoSnapshots.error(message)
}
