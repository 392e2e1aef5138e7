//! A look at a prefix: what is there, and what is decided on each object of it.
//!
//! A later look reads again only what it must: names always, contents of what came to be in doubt. `gc`
//! takes one for a dry run, and one before each batch that it removes.

use super::verified::{Known, Verified};
use super::{DamagedFull, Options};
use crate::bucket::catalog::{EXCLUDE_SUFFIX, PINS, REMOVED, SNAPSHOTS, TIMELINES, snapshot_name};
use crate::bucket::retention::{Aside, Decided, Facts, Why, decide};
use crate::bucket::survey::{Comparison, Continuity};
use crate::bucket::timeline::{self, Evidence, Timelines};
use crate::bucket::{self, Catalog, Listed, Snapshot, SnapshotName};
use crate::error::{Error, Reason, Result};
use crate::job::Context;
use crate::job::rebuild::read_every_page;
use crate::job::scan::{Contents, TAGS_UNREADABLE, nothing_there, read_contents};
use crate::job::tags::FEW;
use crate::mvcc::Revision;
use crate::store::ObjectInfo;
use crate::store::staging::{STAGING, is_abandoned};
use chrono::{DateTime, TimeDelta, Utc};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant, SystemTime};

/// What is to become of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// It stays.
    Keep,
    /// It is excluded, and can be brought back.
    Remove,
    /// It is deleted.
    Delete,
}

/// What an object beside the snapshots is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BesideKind {
    Note,
    Mark,
    Staging,
}

/// Why an object beside the snapshots is kept or goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BesideWhy {
    BelongsToSnapshot,
    Young,
    InUse,
    BelongsToRemoved,
    Orphaned,
    Abandoned,
}

impl BesideWhy {
    pub(super) fn keeps(self) -> bool {
        matches!(
            self,
            BesideWhy::BelongsToSnapshot | BesideWhy::Young | BesideWhy::InUse
        )
    }

    pub(super) fn told(self) -> (&'static str, &'static str) {
        match self {
            BesideWhy::BelongsToSnapshot => ("BelongsToSnapshot", "of a snapshot that stays"),
            BesideWhy::Young => (
                "Young",
                "of no snapshot, and not older than --staging-age: one may come",
            ),
            BesideWhy::InUse => ("InUse", "of an upload that may go on"),
            BesideWhy::BelongsToRemoved => ("BelongsToRemoved", "of a snapshot that goes"),
            BesideWhy::Orphaned => ("Orphaned", "of no snapshot that is there"),
            BesideWhy::Abandoned => ("Abandoned", "of an upload that was not completed"),
        }
    }
}

/// Why a version goes that only a delete marker hides.
pub(super) const HIDDEN_VERSION: &str = "HiddenVersion";

/// For a schema: every reason, of snapshots and of objects beside them.
pub(super) fn reasons() -> Vec<&'static str> {
    use BesideWhy::{Abandoned, BelongsToRemoved, BelongsToSnapshot, InUse, Orphaned, Young};
    let beside = [
        BelongsToSnapshot,
        Young,
        InUse,
        BelongsToRemoved,
        Orphaned,
        Abandoned,
    ];
    let beside = beside.map(|why| why.told().0);
    let all = Why::NAMES.into_iter().chain(beside);
    all.chain([HIDDEN_VERSION]).collect()
}

/// An object beside the snapshots.
#[derive(Debug)]
pub(super) struct Beside {
    pub(super) path: String,
    pub(super) bytes: u64,
    pub(super) kind: BesideKind,
    pub(super) why: BesideWhy,
    /// The snapshots that it is about.
    pub(super) of: Vec<usize>,
}

/// What tells one version of an object from another.
#[derive(Debug, Clone)]
pub(super) struct Version {
    pub(super) bytes: u64,
    pub(super) modified: DateTime<Utc>,
    pub(super) etag: Option<String>,
}

/// What was seen, and what was decided.
pub(super) struct Look {
    pub(super) catalog: Catalog,
    pub(super) timelines: Timelines,
    pub(super) why: Vec<Why>,
    pub(super) beside: Vec<Beside>,
    /// Where histories are in doubt, why.
    pub(super) doubts: Vec<String>,
    /// Fulls that count for nothing, since what they hold is not what their names say.
    pub(super) damaged: Vec<DamagedFull>,
    /// These, as indexes.
    pub(super) is_damaged: HashSet<usize>,
    /// Fulls that count for nothing until they are read.
    pub(super) not_read: usize,
    /// Snapshots that stay and whose tags were not asked for, since nothing is removed.
    pub(super) tags_unread: usize,
    /// The newest time that the store gave anything.
    pub(super) newest_modified: Option<DateTime<Utc>>,
    taken: (Instant, SystemTime),
    /// Without what is read only once, however often one looks.
    took: Duration,
}

impl Look {
    /// The paths of all fulls, in order of creation.
    pub(super) fn fulls(&self) -> impl Iterator<Item = &str> {
        let all = self.catalog.snapshots.iter();
        let fulls = all.filter(|s| s.name.kind == bucket::Kind::Full);
        fulls.map(|s| s.path.as_str())
    }

    /// Whether it is too old to be believed. A machine that slept may have stopped one of its clocks.
    pub(super) fn is_stale(&self, after: Duration) -> bool {
        // Looking must not take all the time.
        let after = match after.is_zero() {
            true => return true,
            false => after.max(self.took * 2),
        };
        let wall = SystemTime::now().duration_since(self.taken.1);
        self.taken.0.elapsed() > after || wall.is_ok_and(|w| w > after)
    }

    pub(super) fn action(&self, i: usize, options: &Options) -> Action {
        match self.why[i] {
            why if why.keeps() => Action::Keep,
            Why::RemovedLongAgo => Action::Delete,
            _ if options.retention.purge_after.is_some() => Action::Remove,
            _ => Action::Delete,
        }
    }
}

/// Looks, and remembers what it read.
pub(super) struct Eyes<'a> {
    ctx: &'a Context,
    options: &'a Options,
    /// How far the store's clock is ahead of ours, where it is behind.
    skew: TimeDelta,
    read: Option<(Contents, HashMap<String, usize>)>,
    pub(super) verified: Verified<'a>,
    /// Questions for tags, for those who measure.
    pub(super) tags_asked: usize,
}

impl<'a> Eyes<'a> {
    pub(super) fn new(ctx: &'a Context, options: &'a Options) -> Self {
        Eyes {
            ctx,
            options,
            skew: TimeDelta::zero(),
            read: None,
            verified: Verified::new(ctx),
            tags_asked: 0,
        }
    }

    /// From now on the earlier of two clocks counts, of which the store's is so far ahead of ours.
    pub(super) fn set_skew(&mut self, ahead: TimeDelta) {
        self.skew = ahead.min(TimeDelta::zero());
    }

    /// The earlier of the clocks that are known.
    pub(super) fn now(&self) -> DateTime<Utc> {
        let now = Utc::now();
        now.checked_add_signed(self.skew).unwrap_or(now)
    }

    /// # Errors
    /// `NoSnapshots` where there is none; the store's; `PermissionDenied` also where something is to be
    /// removed and tags must not be read; `SnapshotVanished` where others delete all the time; `Io`,
    /// `NoSpace`.
    pub(super) fn look(&mut self) -> Result<Look> {
        const TRIES: u32 = 5;
        let mut tries = 1;
        loop {
            match self.try_look() {
                // Another run collects, too.
                Err(e) if e.reason() == Reason::SnapshotVanished && tries < TRIES => tries += 1,
                // What somebody excluded for being broken must not make the rest look superfluous.
                Ok(_) if self.options.apply && self.ctx.store.denies_tags() => {
                    return Err(Error::new(Reason::PermissionDenied, TAGS_UNREADABLE));
                }
                done => return done,
            }
        }
    }

    fn try_look(&mut self) -> Result<Look> {
        let taken = (Instant::now(), SystemTime::now());
        // What is written meanwhile is not of the past.
        let now = self.now();
        let store = &self.ctx.store;
        let mut listing = Vec::new();
        let mut beside: Vec<(BesideKind, ObjectInfo)> = Vec::new();
        let mut newest_modified = None;
        let mut versions: HashMap<String, Version> = HashMap::new();
        let mut objects = store.objects(&SNAPSHOTS)?;
        objects.extend(store.objects(&[TIMELINES, PINS, REMOVED, STAGING])?);
        for o in objects {
            newest_modified = newest_modified.max(Some(o.modified));
            let kind = match o.path.split('/').next() {
                // None of ours, and no request can name it.
                _ if o.is_odd => None,
                Some(STAGING) => Some(BesideKind::Staging),
                Some(TIMELINES | PINS | REMOVED) => Some(BesideKind::Note),
                _ if o.path.ends_with(EXCLUDE_SUFFIX) => Some(BesideKind::Mark),
                _ => None,
            };
            if kind != Some(BesideKind::Staging) {
                listing.push(Listed {
                    path: o.path.clone(),
                    bytes: o.bytes,
                });
            }
            if kind.is_none()
                && snapshot_name(&o.path).is_some_and(|n| n.kind == bucket::Kind::Full)
            {
                let version = Version {
                    bytes: o.bytes,
                    modified: o.modified,
                    etag: o.etag.clone(),
                };
                versions.insert(o.path.clone(), version);
            }
            beside.extend(kind.map(|kind| (kind, o)));
        }
        let mut catalog = Catalog::from_listing(listing);
        if catalog.snapshots.is_empty() {
            return Err(nothing_there(self.ctx, &catalog));
        }
        let mut noted_since: HashMap<usize, DateTime<Utc>> = HashMap::new();
        {
            let notes = beside.iter().filter(|b| b.0 == BesideKind::Note);
            let removed: HashMap<&str, DateTime<Utc>> = notes
                .filter_map(|(_, o)| {
                    let name = o.path.strip_prefix(REMOVED)?.strip_prefix('/')?;
                    Some((name, o.modified))
                })
                .collect();
            if !removed.is_empty() {
                for (i, s) in catalog.snapshots.iter().enumerate() {
                    let noted = removed.get(s.name.to_string().as_str());
                    noted_since.extend(noted.map(|t| (i, *t)));
                }
            }
        }

        let mut asked = HashSet::new();
        let mut tags_unread = 0;
        let noted = noted_since.keys().copied().collect();
        self.ask_tags(&mut catalog, noted, &mut asked)?;
        let mut reading = Duration::ZERO;
        let mut aside = SetAside::default();
        let untrusted = self.ctx.trust.out_of_place(&catalog).into_iter();
        let untrusted = untrusted.map(|i| {
            let name = store.name(&catalog.snapshots[i].path);
            let why = format!(
                "{name} is not encrypted, and keys are given: whoever can write there may have made it"
            );
            (i, (Reason::Untrusted.as_str().to_owned(), why))
        });
        aside.add_damaged(untrusted.collect());
        let mut rounds = 0;
        let (timelines, why, doubts) = loop {
            let doubtful = aside.doubtful(&catalog);
            if self.ask_tags(&mut catalog, doubtful.clone(), &mut asked)? {
                continue;
            }
            let begun = Instant::now();
            self.read(&catalog, &doubtful)?;
            reading += begun.elapsed();
            let evidence = self.evidence(&catalog, &doubtful);
            let is_full = |i: usize| catalog.snapshots[i].name.kind == bucket::Kind::Full;
            let unreadable = doubtful.iter().filter(|&&i| is_full(i));
            // Without an identity nothing speaks against what is encrypted.
            let counts =
                |e: &Error| e.reason() == Reason::CannotDecrypt && !self.ctx.keys.decrypts();
            let why_bad = |i: usize| evidence.why_unreadable(i).filter(|e| !counts(e));
            let unreadable = unreadable.filter_map(|&i| Some((i, told(why_bad(i)?))));
            if aside.add_damaged(unreadable.collect()) {
                continue;
            }
            let counted = aside.catalog(&catalog);
            let timelines = Timelines::build(&counted, &evidence)?;
            let facts = Facts {
                catalog: &counted,
                timelines: &timelines,
                doubtful: &doubtful,
                is_unreadable: &|i| evidence.is_unreadable(i),
                noted_since: &noted_since,
                aside: &aside.why,
                now,
            };
            let Decided { why, rests_on } = decide(&facts, &self.options.retention);
            let mut doubts = Vec::new();
            if let Err(e) = timelines.newest(&counted) {
                doubts.push(e.to_string());
            }
            for &i in &doubtful {
                if let Some(e) = evidence.why_unreadable(i) {
                    doubts.push(e.to_string());
                }
            }
            // What something relies on must not be one that somebody excluded.
            let mut relied_on: Vec<usize> = catalog.usable().filter(|&i| why[i].keeps()).collect();
            let removes = self.options.apply && why.iter().any(|w| !w.keeps());
            if why.len() > FEW && !removes {
                tags_unread = newest_of(&catalog, &mut relied_on);
            }
            relied_on.extend(&rests_on);
            if self.ask_tags(&mut catalog, relied_on, &mut asked)? {
                continue;
            }
            // Neither must it be one that is not what its name says.
            let begun = Instant::now();
            let is_read = |i: usize| self.speaks_of(&catalog.snapshots[i]);
            let rests_on: Vec<usize> = rests_on.into_iter().filter(|&i| !is_read(i)).collect();
            let again = self.look_into(&catalog, &versions, &rests_on, rounds, &mut aside)?;
            reading += begun.elapsed();
            rounds += 1;
            if !again {
                break (timelines, why, doubts);
            }
        };
        let mut look = Look {
            catalog,
            timelines,
            why,
            beside: Vec::new(),
            doubts,
            not_read: aside.why.values().filter(|a| **a == Aside::NotRead).count(),
            damaged: Vec::new(),
            is_damaged: HashSet::new(),
            tags_unread: match store.asks_tags() {
                true => tags_unread,
                false => 0,
            },
            newest_modified,
            taken,
            took: taken.0.elapsed().saturating_sub(reading),
        };
        look.beside = self.beside(&look, beside, now);
        for (i, (reason, message)) in aside.damaged {
            look.is_damaged.insert(i);
            look.damaged.push(DamagedFull {
                path: look.catalog.snapshots[i].path.clone(),
                reason,
                message,
            });
        }
        Ok(look)
    }

    /// Whether a snapshot was read since it was in doubt.
    fn speaks_of(&self, snapshot: &Snapshot) -> bool {
        self.read.as_ref().is_some_and(|(contents, paths)| {
            let read = paths.get(&snapshot.path);
            read.is_some_and(|i| contents.surveys.contains_key(i))
        })
    }

    /// Looks into the fulls that a decision rests on. True if one is to be set aside: then decide again.
    fn look_into(
        &mut self,
        catalog: &Catalog,
        versions: &HashMap<String, Version>,
        rests_on: &[usize],
        round: usize,
        aside: &mut SetAside,
    ) -> Result<bool> {
        /// Each round may find but one bad full. After so many, all that are known to be bad or not known are set
        /// aside at once.
        const ROUNDS: usize = 4;
        if rests_on.is_empty() {
            return Ok(false);
        }
        self.verified.load()?;
        let of = |i: usize| {
            let snapshot = &catalog.snapshots[i];
            Some((snapshot, versions.get(&snapshot.path)?))
        };
        let read = |verified: &mut Verified<'_>, which: &[usize]| {
            let unknown = which.iter().filter_map(|&i| of(i));
            let unknown = unknown.filter(|(s, v)| verified.known(&s.path, v).is_none());
            let unknown: Vec<_> = unknown.collect();
            verified.read(&unknown)
        };
        read(&mut self.verified, rests_on)?;
        let known = |verified: &Verified<'_>, i: usize| {
            let (snapshot, version) = of(i)?;
            verified.known(&snapshot.path, version)
        };
        let found =
            |verified: &Verified<'_>, i: usize| (i, known(verified, i).unwrap_or(Known::NotRead));
        let all: Vec<_> = rests_on.iter().map(|&i| found(&self.verified, i)).collect();
        if all.iter().all(|(_, known)| *known == Known::Good) {
            return Ok(false);
        }
        if round < ROUNDS && all.iter().all(|(_, known)| *known != Known::NotRead) {
            return Ok(aside.add(all));
        }
        let fulls = catalog.usable().filter(|&i| {
            let is_full = catalog.snapshots[i].name.kind == bucket::Kind::Full;
            is_full && !self.speaks_of(&catalog.snapshots[i])
        });
        let mut fulls: Vec<usize> = fulls.collect();
        // The newest first: they matter most to later runs.
        fulls.reverse();
        read(&mut self.verified, &fulls)?;
        let all = fulls.into_iter().map(|i| found(&self.verified, i));
        Ok(aside.add(all.collect()))
    }

    /// Asks for the tags of those that were not asked for, and says whether one is excluded.
    fn ask_tags(
        &mut self,
        catalog: &mut Catalog,
        which: Vec<usize>,
        asked: &mut HashSet<usize>,
    ) -> Result<bool> {
        let mut which = which;
        which.retain(|&i| !catalog.snapshots[i].excluded && asked.insert(i));
        let paths: Vec<String> = which
            .iter()
            .map(|&i| catalog.snapshots[i].path.clone())
            .collect();
        self.tags_asked += paths.len();
        let tagged = self.ctx.store.excluded_by_tag(&paths)?;
        let mut any = false;
        for (i, tagged) in which.into_iter().zip(tagged) {
            catalog.snapshots[i].excluded |= tagged;
            any |= tagged;
        }
        Ok(any)
    }

    /// Reads what is in doubt, unless all of it was read before.
    fn read(&mut self, catalog: &Catalog, doubtful: &[usize]) -> Result<()> {
        let path = |i: usize| &catalog.snapshots[i].path;
        let known = match &self.read {
            Some((_, paths)) => doubtful.iter().all(|&i| paths.contains_key(path(i))),
            None => false,
        };
        if known {
            return Ok(());
        }
        // Without the key a snapshot is as good as damaged here: it is kept.
        let is_told = |e: &Error| e.reason().is_bad_data() || e.reason() == Reason::CannotDecrypt;
        let contents = read_contents(
            self.ctx,
            catalog,
            doubtful.to_vec(),
            doubtful,
            is_told,
            |db| read_every_page(db).map(drop),
        )?;
        let paths = doubtful.iter().map(|&i| (path(i).clone(), i));
        self.read = Some((contents, paths.collect()));
        Ok(())
    }

    fn evidence(&self, catalog: &Catalog, doubtful: &[usize]) -> Remembered<'_> {
        let (mut as_read, mut as_seen) = (HashMap::new(), HashMap::new());
        if let Some((_, paths)) = &self.read {
            for &i in doubtful {
                if let Some(&read) = paths.get(&catalog.snapshots[i].path) {
                    as_read.insert(i, read);
                    as_seen.insert(read, i);
                }
            }
        }
        Remembered {
            contents: self.read.as_ref().map(|r| &r.0),
            as_read,
            as_seen,
        }
    }

    /// Decides on notes, marks and unfinished uploads.
    fn beside(
        &self,
        look: &Look,
        objects: Vec<(BesideKind, ObjectInfo)>,
        now: DateTime<Utc>,
    ) -> Vec<Beside> {
        let mut by_name: HashMap<String, Vec<usize>> = HashMap::new();
        for (i, s) in look.catalog.snapshots.iter().enumerate() {
            by_name.entry(s.name.to_string()).or_default().push(i);
        }
        let age = self.options.staging_age;
        let is_old = |o: &ObjectInfo| now - o.modified > age;
        let goes = |&i: &usize| look.action(i, self.options) == Action::Delete;
        let decided = objects.into_iter().filter_map(|(kind, o)| {
            let (of, why) = match kind {
                BesideKind::Staging => {
                    let name = o.path.rsplit('/').next().unwrap_or_default();
                    match is_abandoned(name, o.modified, now, age)? {
                        true => (Vec::new(), BesideWhy::Abandoned),
                        false => (Vec::new(), BesideWhy::InUse),
                    }
                }
                BesideKind::Note | BesideKind::Mark => {
                    let of = match kind {
                        BesideKind::Note => {
                            let name = o.path.split_once('/')?.1;
                            // Another name is somebody else's.
                            name.parse::<SnapshotName>().ok()?;
                            by_name.get(name).cloned().unwrap_or_default()
                        }
                        _ => {
                            let path = o.path.strip_suffix(EXCLUDE_SUFFIX)?;
                            let name = snapshot_name(path)?.to_string();
                            let mut of = by_name.get(&name).cloned().unwrap_or_default();
                            of.retain(|&i| look.catalog.snapshots[i].path == path);
                            of
                        }
                    };
                    // What is not excluded was brought back by somebody else.
                    let stale = o.path.starts_with(REMOVED)
                        && !self.ctx.store.hides_tags()
                        && of.iter().all(|&i| !look.catalog.snapshots[i].excluded);
                    let why = match of.is_empty() || stale {
                        true if is_old(&o) => BesideWhy::Orphaned,
                        true => BesideWhy::Young,
                        false if of.iter().all(goes) => BesideWhy::BelongsToRemoved,
                        false => BesideWhy::BelongsToSnapshot,
                    };
                    (of, why)
                }
            };
            Some(Beside {
                path: o.path,
                bytes: o.bytes,
                kind,
                why,
                of,
            })
        });
        decided.collect()
    }
}

/// Fulls that count for nothing.
#[derive(Default)]
struct SetAside {
    why: BTreeMap<usize, Aside>,
    /// The reason's name, and in words.
    damaged: BTreeMap<usize, (String, String)>,
}

impl SetAside {
    /// The catalog without what is not what its name says.
    fn catalog<'c>(&self, catalog: &'c Catalog) -> Cow<'c, Catalog> {
        if self.damaged.is_empty() {
            return Cow::Borrowed(catalog);
        }
        let mut counted = catalog.clone();
        for &i in self.damaged.keys() {
            counted.snapshots[i].excluded = true;
        }
        Cow::Owned(counted)
    }

    /// What is in doubt, with and without what is damaged: that must not end a doubt.
    fn doubtful(&self, catalog: &Catalog) -> Vec<usize> {
        let mut doubtful = timeline::doubtful(catalog);
        if let Cow::Owned(counted) = self.catalog(catalog) {
            doubtful.extend(timeline::doubtful(&counted));
            doubtful.sort_unstable();
            doubtful.dedup();
        }
        doubtful
    }

    /// True if one of these was not aside.
    fn add_damaged(&mut self, which: Vec<(usize, (String, String))>) -> bool {
        let bad = |(i, (reason, message))| (i, Known::Bad(reason, message));
        self.add(which.into_iter().map(bad).collect())
    }

    /// Takes in what is not good. True if one of these was not aside.
    fn add(&mut self, found: Vec<(usize, Known)>) -> bool {
        let mut any = false;
        for (i, known) in found {
            if self.why.contains_key(&i) {
                continue;
            }
            let why = match known {
                Known::Good => continue,
                Known::NotRead => Aside::NotRead,
                Known::Bad(reason, message) => {
                    self.damaged.insert(i, (reason, message));
                    Aside::Damaged
                }
            };
            self.why.insert(i, why);
            any = true;
        }
        any
    }
}

/// An error as it is reported: the reason's name, and in words.
fn told(e: &Error) -> (String, String) {
    (e.reason().as_str().to_owned(), e.to_string())
}

/// Leaves of these the newest: fulls first, since they decide most. Gives how many are left out.
fn newest_of(catalog: &Catalog, which: &mut Vec<usize>) -> usize {
    /// A plan asks for the tags of so many.
    const MOST: usize = 32;
    let all = which.len();
    which.sort_by_key(|&i| {
        let name = &catalog.snapshots[i].name;
        (name.kind != bucket::Kind::Full, Reverse(i))
    });
    which.truncate(MOST);
    all - which.len()
}

/// What was read of a prefix at an earlier look, by the indexes of this one.
struct Remembered<'a> {
    contents: Option<&'a Contents>,
    /// Of those in doubt now.
    as_read: HashMap<usize, usize>,
    /// The other way round.
    as_seen: HashMap<usize, usize>,
}

impl Remembered<'_> {
    fn of(&self, i: usize) -> Option<(&Contents, usize)> {
        Some((self.contents?, *self.as_read.get(&i)?))
    }

    fn why_unreadable(&self, i: usize) -> Option<&Error> {
        let (contents, i) = self.of(i)?;
        contents.unreadable.get(&i)
    }
}

impl Evidence for Remembered<'_> {
    fn compared(&self, snapshot: usize) -> Vec<(usize, Comparison)> {
        let Some((contents, read)) = self.of(snapshot) else {
            return Vec::new();
        };
        let with = contents.compared(read).into_iter();
        with.filter_map(|(other, c)| Some((*self.as_seen.get(&other)?, c)))
            .collect()
    }

    fn continuity(&self, before: usize, until: Revision, after: usize) -> Result<Continuity> {
        match (self.of(before), self.of(after)) {
            (Some((contents, before)), Some((_, after))) => {
                contents.continuity(before, until, after)
            }
            _ => Ok(Continuity::Unknown),
        }
    }

    fn fingerprint(&self, snapshot: usize, revision: Revision) -> Result<String> {
        match self.of(snapshot) {
            Some((contents, i)) => contents.fingerprint(i, revision),
            None => Err(Error::internal("a fork at a snapshot that was not read")),
        }
    }

    fn last(&self, snapshot: usize) -> Option<Revision> {
        self.of(snapshot).and_then(|(contents, i)| contents.last(i))
    }

    fn is_unreadable(&self, snapshot: usize) -> bool {
        self.why_unreadable(snapshot).is_some()
    }

    fn speaks_of(&self, snapshot: usize) -> bool {
        self.of(snapshot)
            .is_some_and(|(contents, i)| contents.speaks_of(i))
    }
}
