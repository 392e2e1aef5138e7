//! A look at a prefix: what is there, and what is decided on each object of it.
//!
//! A later look reads again only what it must: names always, contents of what came to be in doubt. `gc`
//! takes one for a dry run, and one before each batch that it removes.

use super::verified_fulls::{Bad, Known, Verified, Version};
use super::{DamagedFull, Decision, Kind, Options};
use crate::backup::catalog::{EXCLUDE_SUFFIX, PINS, REMOVED, SNAPSHOTS, TIMELINES, snapshot_name};
use crate::backup::retention::{Facts, RetentionDecision, RetentionReason, Uncounted, decide};
use crate::backup::survey::{Comparison, Continuity};
use crate::backup::timeline::{self, Evidence, Timelines};
use crate::backup::{Catalog, ListedObject, Snapshot, SnapshotName};
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;
use crate::ops::Context;
use crate::ops::fold::rebuild::read_every_page;
use crate::ops::scan::{Contents, TAGS_UNREADABLE, no_snapshots_error, read_contents};
use crate::ops::tags::{FEW, ReadTags};
use crate::store::ObjectInfo;
use crate::store::staging::{STAGING, is_abandoned};
use chrono::{DateTime, TimeDelta, Utc};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant, SystemTime};

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
    let all = RetentionReason::NAMES.iter().copied().chain(beside);
    all.chain([HIDDEN_VERSION]).collect()
}

/// An object beside the snapshots.
#[derive(Debug)]
pub(super) struct Beside {
    pub(super) path: String,
    pub(super) bytes: u64,
    pub(super) kind: Kind,
    pub(super) why: BesideWhy,
    /// The snapshots that it is about.
    pub(super) of: Vec<usize>,
}

/// What was seen, and what was decided.
pub(super) struct Look {
    pub(super) catalog: Catalog,
    pub(super) timelines: Timelines,
    pub(super) why: Vec<RetentionReason>,
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
        let fulls = all.filter(|s| s.name.is_full());
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

    pub(super) fn decision(&self, i: usize, options: &Options) -> Decision {
        match self.why[i] {
            why if why.keeps() => Decision::Keep,
            RetentionReason::RemovedLongAgo => Decision::Delete,
            _ if options.retention.purge_after.is_some() => Decision::Remove,
            _ => Decision::Delete,
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
                    return Err(Reason::PermissionDenied.error(TAGS_UNREADABLE));
                }
                done => return done,
            }
        }
    }

    fn try_look(&mut self) -> Result<Look> {
        let taken = (Instant::now(), SystemTime::now());
        // What is written meanwhile is not of the past.
        let now = self.now();
        let mut seen = self.list(now)?;
        let noted: Vec<usize> = seen.noted_since.keys().copied().collect();
        self.ask_tags(&mut seen, noted)?;
        let untrusted = self.untrusted(&seen.catalog);
        seen.aside.add_damaged(untrusted);
        let (timelines, why, doubts) = loop {
            if let Some(decided) = self.try_decide(&mut seen)? {
                break decided;
            }
        };
        self.tags_asked += seen.asked.len();
        let (of_note, aside) = (seen.beside, seen.aside);
        let mut look = Look {
            catalog: seen.catalog,
            timelines,
            why,
            beside: Vec::new(),
            doubts,
            not_read: aside
                .why
                .values()
                .filter(|a| **a == Uncounted::NotRead)
                .count(),
            damaged: Vec::new(),
            is_damaged: HashSet::new(),
            tags_unread: match self.ctx.store.asks_tags() {
                true => seen.tags_unread,
                false => 0,
            },
            newest_modified: seen.newest_modified,
            taken,
            took: taken.0.elapsed().saturating_sub(seen.reading),
        };
        look.beside = self.beside(&look, of_note, now);
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

    /// Lists the prefix.
    fn list(&self, now: DateTime<Utc>) -> Result<Seen> {
        let store = &self.ctx.store;
        let mut seen = Seen {
            now,
            ..Seen::default()
        };
        let mut listing = Vec::new();
        let mut removed: HashMap<String, DateTime<Utc>> = HashMap::new();
        let mut objects = store.objects(&SNAPSHOTS)?;
        objects.extend(store.objects(&[TIMELINES, PINS, REMOVED, STAGING])?);
        for o in objects {
            seen.newest_modified = seen.newest_modified.max(Some(o.modified));
            let kind = match o.path.split_once('/') {
                // None of ours, and no request can name it.
                _ if o.is_odd => None,
                Some((STAGING, _)) => Some(Kind::Staging),
                Some((REMOVED, name)) => {
                    removed.insert(name.to_owned(), o.modified);
                    Some(Kind::Note)
                }
                Some((TIMELINES | PINS, _)) => Some(Kind::Note),
                _ if o.path.ends_with(EXCLUDE_SUFFIX) => Some(Kind::Mark),
                _ => None,
            };
            if kind != Some(Kind::Staging) {
                listing.push(ListedObject {
                    path: o.path.clone(),
                    bytes: o.bytes,
                });
            }
            if kind.is_none() && snapshot_name(&o.path).is_some_and(|n| n.is_full()) {
                seen.versions.insert(o.path.clone(), Version::from(&o));
            }
            seen.beside.extend(kind.map(|kind| (kind, o)));
        }
        seen.catalog = Catalog::from_listing(listing);
        if seen.catalog.snapshots.is_empty() {
            return Err(no_snapshots_error(self.ctx, &seen.catalog));
        }
        if !removed.is_empty() {
            for (i, s) in seen.catalog.snapshots.iter().enumerate() {
                let noted = removed.get(&s.name.to_string());
                seen.noted_since.extend(noted.map(|&t| (i, t)));
            }
        }
        Ok(seen)
    }

    /// Fulls that are not encrypted where they should be.
    fn untrusted(&self, catalog: &Catalog) -> Vec<(usize, Bad)> {
        let untrusted = self.ctx.trust.out_of_place(catalog).into_iter();
        let told = untrusted.map(|i| {
            let name = self.ctx.store.name(&catalog.snapshots[i].path);
            let why = format!(
                "{name} is not encrypted, and keys are given: whoever can write there may have made it"
            );
            (i, (Reason::Untrusted.as_str().to_owned(), why))
        });
        told.collect()
    }

    /// Decides on what is seen, and says what is in doubt; `None` if something that counted turns out not to: then decide
    /// again.
    fn try_decide(&mut self, seen: &mut Seen) -> Result<Option<Judged>> {
        let doubtful = seen.aside.doubtful(&seen.catalog);
        if self.ask_tags(seen, doubtful.clone())? {
            return Ok(None);
        }
        let begun = Instant::now();
        self.read(&seen.catalog, &doubtful)?;
        seen.reading += begun.elapsed();
        let evidence = self.evidence(&seen.catalog, &doubtful);
        // Without an identity nothing speaks against what is encrypted.
        let counts = |e: &Error| e.reason() == Reason::CannotDecrypt && !self.ctx.keys.decrypts();
        let unreadable = doubtful.iter().filter_map(|&i| {
            let why = evidence.why_unreadable(i).filter(|e| !counts(e))?;
            let is_full = seen.catalog.snapshots[i].name.is_full();
            is_full.then(|| (i, told(why)))
        });
        if seen.aside.add_damaged(unreadable.collect()) {
            return Ok(None);
        }
        let counted = seen.aside.catalog(&seen.catalog);
        let timelines = Timelines::build(&counted, &evidence)?;
        let facts = Facts {
            catalog: &counted,
            timelines: &timelines,
            doubtful: &doubtful,
            is_unreadable: &|i| evidence.is_unreadable(i),
            noted_since: &seen.noted_since,
            uncounted: &seen.aside.why,
            now: seen.now,
        };
        let RetentionDecision {
            reasons: why,
            rests_on,
        } = decide(&facts, &self.options.retention);
        let newest = timelines.newest(&counted).err();
        let unreadable = doubtful.iter().filter_map(|&i| evidence.why_unreadable(i));
        let doubts = newest.iter().chain(unreadable).map(Error::to_string);
        let doubts: Vec<String> = doubts.collect();
        // What something relies on must not be one that somebody excluded.
        let usable = seen.catalog.usable();
        let mut relied_on: Vec<usize> = usable.filter(|&i| why[i].keeps()).collect();
        let removes = self.options.apply && why.iter().any(|w| !w.keeps());
        if why.len() > FEW && !removes {
            seen.tags_unread = newest_of(&seen.catalog, &mut relied_on);
        }
        relied_on.extend(&rests_on);
        if self.ask_tags(seen, relied_on)? {
            return Ok(None);
        }
        // Neither must it be one that is not what its name says.
        let begun = Instant::now();
        let again = self.look_into(seen, rests_on)?;
        seen.reading += begun.elapsed();
        seen.rounds += 1;
        Ok((!again).then_some((timelines, why, doubts)))
    }

    /// Whether a snapshot was read since it was in doubt.
    fn was_read(&self, snapshot: &Snapshot) -> bool {
        self.read.as_ref().is_some_and(|(contents, paths)| {
            let read = paths.get(&snapshot.path);
            read.is_some_and(|i| contents.surveys.contains_key(i))
        })
    }

    /// Looks into the fulls that a decision rests on. True if one is to be set aside: then decide again.
    fn look_into(&mut self, seen: &mut Seen, mut rests_on: Vec<usize>) -> Result<bool> {
        /// Each round may find but one bad full. After so many, all that are known to be bad or not known are set
        /// aside at once.
        const ROUNDS: usize = 4;
        rests_on.retain(|&i| !self.was_read(&seen.catalog.snapshots[i]));
        if rests_on.is_empty() {
            return Ok(false);
        }
        let found = self.found(seen, rests_on)?;
        if found.iter().all(|(_, known)| *known == Known::Good) {
            return Ok(false);
        }
        if seen.rounds < ROUNDS && found.iter().all(|(_, known)| *known != Known::NotRead) {
            return Ok(seen.aside.add(found));
        }
        let mut fulls: Vec<usize> = seen.catalog.usable().collect();
        fulls.retain(|&i| {
            let s = &seen.catalog.snapshots[i];
            s.name.is_full() && !self.was_read(s)
        });
        // The newest first: they matter most to later runs.
        fulls.reverse();
        let found = self.found(seen, fulls)?;
        Ok(seen.aside.add(found))
    }

    /// What is known of fulls: those of which nothing is are read, as many as one run may.
    fn found(&mut self, seen: &Seen, which: Vec<usize>) -> Result<Vec<(usize, Known)>> {
        self.verified.load()?;
        let of = |i: usize| {
            let snapshot = &seen.catalog.snapshots[i];
            Some((snapshot, seen.versions.get(&snapshot.path)?))
        };
        let unknown = which.iter().filter_map(|&i| of(i));
        let unknown = unknown.filter(|(s, v)| self.verified.known(&s.path, v).is_none());
        let unknown: Vec<_> = unknown.collect();
        self.verified.read(&unknown)?;
        let known = |i: usize| of(i).and_then(|(s, v)| self.verified.known(&s.path, v));
        let found = which
            .into_iter()
            .map(|i| (i, known(i).unwrap_or(Known::NotRead)));
        Ok(found.collect())
    }

    /// Asks for the tags of those that were not asked for, and says whether one is excluded.
    fn ask_tags(&self, seen: &mut Seen, which: Vec<usize>) -> Result<bool> {
        seen.asked.read(&self.ctx.store, &mut seen.catalog, which)
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
        objects: Vec<(Kind, ObjectInfo)>,
        now: DateTime<Utc>,
    ) -> Vec<Beside> {
        let mut by_name: HashMap<String, Vec<usize>> = HashMap::new();
        for (i, s) in look.catalog.snapshots.iter().enumerate() {
            by_name.entry(s.name.to_string()).or_default().push(i);
        }
        let named = |name: &str| by_name.get(name).cloned().unwrap_or_default();
        let age = self.options.staging_age;
        let decided = objects.into_iter().filter_map(|(kind, o)| {
            let of = match kind {
                Kind::Staging => Vec::new(),
                Kind::Mark => {
                    let path = o.path.strip_suffix(EXCLUDE_SUFFIX)?;
                    let mut of = named(&snapshot_name(path)?.to_string());
                    of.retain(|&i| look.catalog.snapshots[i].path == path);
                    of
                }
                _ => {
                    let name = o.path.split_once('/')?.1;
                    // Another name is somebody else's.
                    name.parse::<SnapshotName>().ok()?;
                    named(name)
                }
            };
            let why = match kind {
                Kind::Staging => {
                    let name = o.path.rsplit('/').next().unwrap_or_default();
                    match is_abandoned(name, o.modified, now, age)? {
                        true => BesideWhy::Abandoned,
                        false => BesideWhy::InUse,
                    }
                }
                _ => self.why_beside(look, &o, &of, now),
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

    /// Decides on a note or mark on these snapshots.
    fn why_beside(
        &self,
        look: &Look,
        o: &ObjectInfo,
        of: &[usize],
        now: DateTime<Utc>,
    ) -> BesideWhy {
        let goes = |&i: &usize| look.decision(i, self.options) == Decision::Delete;
        // What is not excluded was brought back by somebody else.
        let stale = o.path.starts_with(REMOVED)
            && !self.ctx.store.hides_tags()
            && of.iter().all(|&i| !look.catalog.snapshots[i].excluded);
        match of.is_empty() || stale {
            true if now - o.modified > self.options.staging_age => BesideWhy::Orphaned,
            true => BesideWhy::Young,
            false if of.iter().all(goes) => BesideWhy::BelongsToRemoved,
            false => BesideWhy::BelongsToSnapshot,
        }
    }
}

/// What is decided, on which timelines, and what is in doubt.
type Judged = (Timelines, Vec<RetentionReason>, Vec<String>);

/// What a look has seen so far.
#[derive(Default)]
struct Seen {
    now: DateTime<Utc>,
    catalog: Catalog,
    /// What is beside the snapshots.
    beside: Vec<(Kind, ObjectInfo)>,
    /// Of fulls, by path.
    versions: HashMap<String, Version>,
    /// Since when snapshots are noted as removed.
    noted_since: HashMap<usize, DateTime<Utc>>,
    newest_modified: Option<DateTime<Utc>>,
    asked: ReadTags,
    tags_unread: usize,
    aside: SetAside,
    /// How often fulls were looked into.
    rounds: usize,
    /// How long snapshots were read.
    reading: Duration,
}

/// Fulls that count for nothing.
#[derive(Default)]
struct SetAside {
    why: BTreeMap<usize, Uncounted>,
    damaged: BTreeMap<usize, Bad>,
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
    fn add_damaged(&mut self, which: Vec<(usize, Bad)>) -> bool {
        self.add(
            which
                .into_iter()
                .map(|(i, bad)| (i, Known::Bad(bad)))
                .collect(),
        )
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
                Known::NotRead => Uncounted::NotRead,
                Known::Bad(bad) => {
                    self.damaged.insert(i, bad);
                    Uncounted::Damaged
                }
            };
            self.why.insert(i, why);
            any = true;
        }
        any
    }
}

/// An error as it is reported: the reason's name, and in words.
fn told(e: &Error) -> Bad {
    (e.reason().as_str().to_owned(), e.to_string())
}

/// Leaves of these the newest: fulls first, since they decide most. Gives how many are left out.
fn newest_of(catalog: &Catalog, which: &mut Vec<usize>) -> usize {
    /// A plan asks for the tags of so many.
    const MOST: usize = 32;
    let all = which.len();
    which.sort_by_key(|&i| {
        let name = &catalog.snapshots[i].name;
        (!name.is_full(), Reverse(i))
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

    fn was_read(&self, snapshot: usize) -> bool {
        self.of(snapshot)
            .is_some_and(|(contents, i)| contents.was_read(i))
    }
}
