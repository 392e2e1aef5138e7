//! The plan of `gc`: what the backup holds, and what is decided on each object of it.
//!
//! Changes nothing in the backup. One listing is decided on; a dry run and a real one decide alike.

use super::read_fulls::{FullVersion, ReadFulls, Rests};
use super::side_objects::{SideObject, SideReason};
use super::{DamagedFull, Decision, Kind, Options};
use crate::backup::catalog::{EXCLUDED, PINS, SNAPSHOTS, TIMELINES, snapshot_name};
use crate::backup::retention::{Facts, RetentionDecision, RetentionReason, Uncounted, decide};
use crate::backup::timeline::{self, Evidence, Timelines};
use crate::backup::trust::Trust;
use crate::backup::{Catalog, ListedObject, Snapshot, SnapshotName};
use crate::base::opt::AGE_IDENTITY;
use crate::error::{Error, Reason, Result};
use crate::fold::rebuild::read_every_page;
use crate::prefix::Context;
use crate::prefix::scan::{Contents, TAGS_UNREADABLE, no_snapshots_error, read_contents};
use crate::prefix::set_aside::{Purpose, SetAside, decide_again, refuse_excluded_end};
use crate::store::ObjectInfo;
use crate::store::staging::{STAGING, is_temporary};
use chrono::{DateTime, Utc};
use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// Returns every reason, for the JSON schema: those of snapshots and of side objects.
#[cfg(test)]
pub(super) fn reasons() -> Vec<&'static str> {
    use SideReason::{Abandoned, BelongsToRemoved, BelongsToSnapshot, InUse, Orphaned, Young};
    let side_reasons = [
        BelongsToSnapshot,
        Young,
        InUse,
        BelongsToRemoved,
        Orphaned,
        Abandoned,
    ];
    let mut reasons = RetentionReason::NAMES.to_vec();
    reasons.extend(side_reasons.map(|reason| reason.describe().0));
    reasons
}

/// The content of the backup, and the decisions.
pub(super) struct Plan {
    pub(super) catalog: Catalog,
    pub(super) timelines: Timelines,
    /// The reason for each snapshot's decision, in the catalog's order.
    pub(super) why: Vec<RetentionReason>,
    pub(super) side_objects: Vec<SideObject>,
    /// Messages about histories that are in doubt.
    pub(super) doubts: Vec<String>,
    /// Fulls that are kept and otherwise ignored: they are damaged, or cannot be opened or trusted.
    pub(super) damaged: Vec<DamagedFull>,
    /// What the removals rest on.
    pub(super) rests: Rests,
    /// Number of fulls that are ignored until they are read.
    pub(super) not_read: usize,
    /// Number of fulls that were read.
    pub(super) fulls_read: usize,
    /// The newest modification time of any object.
    pub(super) newest_modified: Option<DateTime<Utc>>,
    /// Problems that are not faults of a full.
    pub(super) warnings: Vec<String>,
}

impl Plan {
    /// Returns what is done with the snapshot of this index.
    pub(super) fn decision(&self, i: usize) -> Decision {
        Decision::from_keeps(self.why[i].keeps())
    }
}

/// Makes a plan. Tries again if another run deletes snapshots meanwhile.
///
/// # Errors
/// Fails with `NoSnapshots` if the backup is empty, `PermissionDenied` also if `--apply` is given
/// and tags cannot be read, `SnapshotVanished` if others keep deleting, `CannotDecrypt` if no identity is given and all
/// fulls are encrypted, `Io`, `NoSpace`, or an error of the store.
pub(super) fn plan(ctx: &Context, options: &Options, now: DateTime<Utc>) -> Result<Plan> {
    const ATTEMPTS: u32 = 5;
    let mut attempts = 1;
    // All attempts share the time. One that is beyond the clock's range is as good as a day.
    let begun = Instant::now();
    let day = begun + Duration::from_secs(24 * 3600);
    let until = begun.checked_add(options.timeout).unwrap_or(day);
    loop {
        let listed = Listed::read(ctx, now)?;
        let mut planner = Planner {
            ctx,
            options,
            untrusted: listed.untrusted(ctx)?,
            doubtful: timeline::doubtful(&listed.catalog).into_iter().collect(),
            contents: Contents::default(),
            fulls: ReadFulls::new(ctx, until),
            listed: &listed,
        };
        match decide_again([ctx], Purpose::Collect, || planner.plan()) {
            // Another run deleted a snapshot that was listed.
            Err(e) if e.reason() == Reason::SnapshotVanished && attempts < ATTEMPTS => {
                attempts += 1
            }
            // A broken snapshot that somebody excluded must not make the others look superfluous.
            Ok(_) if options.apply && ctx.store.tags_forbidden() => {
                return Err(Reason::PermissionDenied.error(TAGS_UNREADABLE));
            }
            result => return result,
        }
    }
}

/// What a listing shows.
struct Listed {
    now: DateTime<Utc>,
    catalog: Catalog,
    side_objects: Vec<(Kind, ObjectInfo)>,
    /// The versions of fulls, by path.
    versions: HashMap<String, FullVersion>,
    newest_modified: Option<DateTime<Utc>>,
}

impl Listed {
    fn read(ctx: &Context, now: DateTime<Utc>) -> Result<Self> {
        let store = &ctx.store;
        let (mut listing, mut side_objects) = (Vec::new(), Vec::new());
        let (mut versions, mut newest_modified) = (HashMap::new(), None);
        let mut objects = store.objects(&SNAPSHOTS)?;
        objects.extend(store.objects(&[TIMELINES, PINS, EXCLUDED, STAGING])?);
        for o in objects {
            newest_modified = newest_modified.max(Some(o.modified));
            let kind = match o.path.split_once('/') {
                // Not deltafold's, and no request can name it.
                _ if o.is_odd => None,
                Some((STAGING, _)) => Some(Kind::Staging),
                Some((TIMELINES | PINS, _)) => Some(Kind::Note),
                Some((EXCLUDED, _)) => Some(Kind::Mark),
                _ => None,
            };
            if kind != Some(Kind::Staging) {
                listing.push(ListedObject {
                    path: o.path.clone(),
                    bytes: o.bytes,
                });
            }
            if kind.is_none() && snapshot_name(&o.path).is_some_and(|n| n.is_full()) {
                versions.insert(o.path.clone(), FullVersion::from(&o));
            }
            side_objects.extend(kind.map(|kind| (kind, o)));
        }
        let catalog = Catalog::from_listing(listing);
        if catalog.snapshots.is_empty() {
            return Err(no_snapshots_error(ctx, &catalog, None));
        }
        Ok(Listed {
            now,
            catalog,
            side_objects,
            versions,
            newest_modified,
        })
    }

    fn is_full(&self, i: usize) -> bool {
        self.catalog.snapshots[i].name.is_full()
    }

    /// Returns the errors of the fulls that are plain although keys are given, and those that are encrypted if no identity is.
    ///
    /// # Errors
    /// `CannotDecrypt` if no identity is given and all fulls are encrypted.
    fn untrusted(&self, ctx: &Context) -> Result<Vec<Error>> {
        let catalog = &self.catalog;
        let fulls = catalog.usable().filter(|&i| self.is_full(i));
        let is_encrypted = |&i: &usize| catalog.snapshots[i].name.is_encrypted;
        let (encrypted, plain): (Vec<usize>, Vec<usize>) = fulls.partition(is_encrypted);
        let name = |i: usize| ctx.store.name(&catalog.snapshots[i].path);
        let mut untrusted = Vec::new();
        if ctx.trust == Trust::OnlyEncrypted {
            untrusted.extend(plain.iter().map(|&i| {
                let name = name(i);
                let e = Reason::Untrusted.error(format!(
                    "{name} is not encrypted although keys are given, so anybody who can write to the store may have made it"
                ));
                e.setting_aside(name)
            }));
        }
        if ctx.keys.decrypts() {
            return Ok(untrusted);
        }
        for i in encrypted {
            let name = name(i);
            let e = Reason::CannotDecrypt.error(format!(
                "{name} is encrypted, and nothing is removed for a full that was not read: give the identity with {AGE_IDENTITY}"
            ));
            if plain.is_empty() {
                return Err(e);
            }
            untrusted.push(e.setting_aside(name));
        }
        Ok(untrusted)
    }
}

/// A plan in the making, from one listing. What was read is kept from round to round.
struct Planner<'a> {
    ctx: &'a Context,
    options: &'a Options,
    listed: &'a Listed,
    /// The errors of the fulls that are set aside by their names.
    untrusted: Vec<Error>,
    /// The snapshots that were in doubt at any time: a full that is set aside must not end a doubt.
    doubtful: BTreeSet<usize>,
    /// What was read of them.
    contents: Contents,
    fulls: ReadFulls<'a>,
}

impl Planner<'_> {
    /// Decides on all snapshots.
    ///
    /// # Errors
    /// Of the fulls that a decision depends on, one that sets a full aside; the others, as [`plan`].
    fn plan(&mut self) -> Result<Plan> {
        let (ctx, listed) = (self.ctx, self.listed);
        for e in &self.untrusted {
            ctx.marks.add(e);
        }
        let mut catalog = listed.catalog.clone();
        let ignored = ctx.marks.apply(ctx, &mut catalog);
        let doubtful = self.read_doubtful(&catalog)?;
        let unreadable = &self.contents.unreadable;
        let mut doubts: Vec<String> = Vec::new();
        for &i in &doubtful {
            doubts.extend(unreadable.get(&i).map(Error::to_string));
        }
        let is_full = |i: &&usize| listed.is_full(**i);
        let bad = doubtful.iter().filter(is_full).filter_map(|i| {
            let name = ctx.store.name(&catalog.snapshots[*i].path);
            Some(unreadable.get(i)?.again().setting_aside(name))
        });
        ctx.marks.decide_without(bad.collect())?;
        let timelines = Timelines::build(&catalog, &self.contents)?;
        let uncounted = ignored.iter().map(|(&i, e)| match SetAside::of(e) {
            Some(SetAside::Unread) => (i, Uncounted::NotRead),
            _ => (i, Uncounted::Damaged),
        });
        let facts = Facts {
            catalog: &catalog,
            timelines: &timelines,
            doubtful: &doubtful,
            is_unreadable: &|i| unreadable.contains_key(&i),
            uncounted: &uncounted.collect(),
            now: listed.now,
        };
        let RetentionDecision {
            reasons: why,
            rests_on,
        } = decide(&facts, &self.options.retention);
        doubts.extend(timelines.warning());
        if let Err(e) = timelines.newest(&catalog) {
            doubts.insert(0, e.to_string());
        }
        let rests = self.check_fulls(&catalog, rests_on)?;
        refuse_excluded_end(ctx, &catalog, &timelines, &self.contents)?;
        let mut plan = Plan {
            timelines,
            why,
            side_objects: Vec::new(),
            doubts,
            rests,
            not_read: 0,
            damaged: Vec::new(),
            fulls_read: self.fulls.count,
            newest_modified: listed.newest_modified,
            warnings: std::mem::take(&mut self.fulls.warnings),
            catalog,
        };
        plan.side_objects = self.decide_side_objects(&plan);
        for (i, e) in ignored {
            match SetAside::of(&e) {
                Some(SetAside::Unread) => plan.not_read += 1,
                _ => plan.damaged.push(DamagedFull {
                    path: plan.catalog.snapshots[i].path.clone(),
                    reason: e.reason().as_str().to_owned(),
                    message: e.to_string(),
                }),
            }
        }
        Ok(plan)
    }

    /// Reads the snapshots whose names are in doubt, unless all of them were read before, and returns them.
    fn read_doubtful(&mut self, catalog: &Catalog) -> Result<Vec<usize>> {
        let ctx = self.ctx;
        self.doubtful.extend(timeline::doubtful(catalog));
        self.doubtful.retain(|&i| !catalog.snapshots[i].excluded);
        let doubtful: Vec<usize> = self.doubtful.iter().copied().collect();
        let is_read = |i| self.contents.has_content(i) || self.contents.is_unreadable(i);
        if !doubtful.iter().all(|&i| is_read(i)) {
            // Without its key a snapshot is treated like a damaged one: it is kept.
            let is_finding = |e: &Error| e.reason().is_unreadable();
            let check = |db: &_| read_every_page(db).map(drop);
            let to_read = doubtful.clone();
            self.contents = read_contents(ctx, catalog, to_read, &doubtful, is_finding, check)?;
        }
        Ok(doubtful)
    }

    /// Checks the contents of the fulls that a decision depends on. Returns what it rests on.
    ///
    /// # Errors
    /// One that sets a full aside if it is bad, or not read; errors of the store.
    fn check_fulls(&mut self, catalog: &Catalog, rests_on: Vec<usize>) -> Result<Rests> {
        let mut bad = Vec::new();
        for &i in &rests_on {
            if self.contents.was_read(i) || self.fulls.has_read(i) {
                continue;
            }
            if !self.fulls.has_time() {
                bad.extend(self.unread(catalog));
                break;
            }
            match self.fulls.read(i, &catalog.snapshots[i]) {
                Err(e) if e.set_aside().is_some() => bad.push(e),
                result => result?,
            }
        }
        self.ctx.marks.decide_without(bad)?;
        let version = |i: usize| {
            let path = &catalog.snapshots[i].path;
            Some((i, path.clone(), self.listed.versions.get(path)?.clone()))
        };
        let notes = self.listed.side_objects.iter().map(|(_, o)| o.path.clone());
        let fulls = rests_on.into_iter().filter_map(version).collect();
        self.fulls.rests(&self.contents, fulls, notes)
    }

    /// Returns the errors of the fulls that no time is left to read.
    fn unread(&self, catalog: &Catalog) -> impl Iterator<Item = Error> {
        let unread = catalog.usable().filter(|&i| {
            self.listed.is_full(i) && !self.contents.was_read(i) && !self.fulls.has_read(i)
        });
        unread.map(|i| {
            let name = self.ctx.store.name(&catalog.snapshots[i].path);
            let e = Reason::PartlyDone.error(format!("{name} was not read: there is no time left"));
            e.setting_aside(name)
        })
    }

    /// Decides on notes, exclusion marks and temporary objects.
    fn decide_side_objects(&self, plan: &Plan) -> Vec<SideObject> {
        let mut by_name: HashMap<String, Vec<usize>> = HashMap::new();
        for (i, s) in plan.catalog.snapshots.iter().enumerate() {
            by_name.entry(s.name.to_string()).or_default().push(i);
        }
        let mut decided = Vec::new();
        for (kind, object) in &self.listed.side_objects {
            let Some((reason, snapshots)) = self.decide_side_object(plan, *kind, object, &by_name)
            else {
                continue;
            };
            decided.push(SideObject {
                path: object.path.clone(),
                bytes: object.bytes,
                kind: *kind,
                reason,
                snapshots,
            });
        }
        decided
    }

    /// Returns the reason for keeping or deleting a side object, and the snapshots that it is about;
    /// `None` if it is not deltafold's.
    fn decide_side_object(
        &self,
        plan: &Plan,
        kind: Kind,
        object: &ObjectInfo,
        by_name: &HashMap<String, Vec<usize>>,
    ) -> Option<(SideReason, Vec<usize>)> {
        let is_old = self.listed.now - object.modified > self.options.staging_age;
        let (folder, name) = object.path.split_once('/')?;
        if kind == Kind::Staging {
            let reason = if is_old {
                SideReason::Abandoned
            } else {
                SideReason::InUse
            };
            let name = name.rsplit('/').next().unwrap_or_default();
            return is_temporary(name).then(|| (reason, Vec::new()));
        }
        // An object with any other name is not deltafold's.
        let about: SnapshotName = name.parse().ok()?;
        let snapshots = match folder {
            // A record separates the snapshots before it from those behind it, and it goes with its full: a
            // late writer of the history before it must find it.
            TIMELINES => {
                let mut snapshots = plan.older_than(about.created);
                snapshots.extend(plan.fulls_of(&about));
                snapshots
            }
            _ => by_name.get(name).cloned().unwrap_or_default(),
        };
        let is_deleted = |&i: &usize| plan.decision(i) == Decision::Delete;
        let reason = match snapshots.is_empty() {
            true if is_old => SideReason::Orphaned,
            true => SideReason::Young,
            false if snapshots.iter().all(is_deleted) => SideReason::BelongsToRemoved,
            false => SideReason::BelongsToSnapshot,
        };
        Some((reason, snapshots))
    }
}

impl Plan {
    /// Returns the fulls that begin with the record of this name. A copy may have another compression.
    fn fulls_of(&self, record: &SnapshotName) -> impl Iterator<Item = usize> {
        let is_of = |s: &Snapshot| {
            s.name.is_full() && (s.name.created, s.name.last) == (record.created, record.last)
        };
        (0..self.catalog.snapshots.len()).filter(move |&i| is_of(&self.catalog.snapshots[i]))
    }

    /// Returns the snapshots whose names have an earlier time.
    fn older_than(&self, created: i64) -> Vec<usize> {
        let snapshots = &self.catalog.snapshots;
        (0..snapshots.partition_point(|s| s.name.created < created)).collect()
    }
}
