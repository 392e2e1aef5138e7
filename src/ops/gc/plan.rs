//! The plan of `gc`: what the backup holds, and what is decided on each object of it.
//!
//! Changes nothing in the backup. A later plan lists all names again, but reads contents only of
//! snapshots whose names came to be in doubt. `gc` makes one plan for a dry run, and one before each
//! batch that it removes.

use super::evidence::{EarlierContents, EarlierEvidence};
use super::read_fulls::{Damage, FullState, FullVersion, ReadFulls};
use super::side_objects::{SideObject, SideReason};
use super::{DamagedFull, Decision, Kind, Options};
use crate::backup::catalog::{EXCLUDED, PINS, SNAPSHOTS, TIMELINES, snapshot_name};
use crate::backup::retention::{Facts, RetentionDecision, RetentionReason, Uncounted, decide};
use crate::backup::timeline::{self, Evidence, Timelines};
use crate::backup::trust::Trust;
use crate::backup::{Catalog, ListedObject, Snapshot, SnapshotName};
use crate::error::{Error, Reason, Result};
use crate::fold::rebuild::read_every_page;
use crate::prefix::Context;
use crate::prefix::scan::{Contents, TAGS_UNREADABLE, no_snapshots_error, read_contents};
use crate::prefix::tags::{FEW, ReadTags};
use crate::store::ObjectInfo;
use crate::store::staging::{STAGING, is_temporary};
use chrono::{DateTime, TimeDelta, Utc};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant, SystemTime};

/// Returns every reason, for the JSON schema: those of snapshots and of side objects.
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
    /// Fulls that are ignored, since their content is not what their names say.
    pub(super) damaged: Vec<DamagedFull>,
    /// The indexes of the damaged fulls.
    pub(super) is_damaged: HashSet<usize>,
    /// Number of fulls that are ignored until they are read.
    pub(super) not_read: usize,
    /// Number of kept snapshots whose tags were not requested, which happens only if nothing is
    /// removed.
    pub(super) tags_unread: usize,
    /// The newest modification time of any object.
    pub(super) newest_modified: Option<DateTime<Utc>>,
    /// When the plan was begun.
    begun: (Instant, SystemTime),
    /// How long the plan took, without reading snapshots, which later plans need not repeat.
    took: Duration,
}

impl Plan {
    /// Returns whether the plan is older than `after`. Uses two clocks, since one of them may stop
    /// while the machine sleeps.
    pub(super) fn is_stale(&self, after: Duration) -> bool {
        if after.is_zero() {
            return true;
        }
        // Planning must not take most of the time.
        let after = after.max(self.took * 2);
        let wall = SystemTime::now().duration_since(self.begun.1);
        self.begun.0.elapsed() > after || wall.is_ok_and(|w| w > after)
    }

    /// Returns what is done with the snapshot of this index.
    pub(super) fn decision(&self, i: usize) -> Decision {
        Decision::from_keeps(self.why[i].keeps())
    }
}

/// Makes plans, and remembers the snapshots that were read for earlier ones.
pub(super) struct Planner<'a> {
    ctx: &'a Context,
    options: &'a Options,
    /// How far the store's clock is behind this machine's; zero or negative.
    skew: TimeDelta,
    /// The contents that were read, and the indexes that the snapshots of these paths had then.
    read: Option<(Contents, HashMap<String, usize>)>,
    pub(super) fulls: ReadFulls<'a>,
    /// Number of requests for tags, for the log.
    pub(super) tags_asked: usize,
}

impl<'a> Planner<'a> {
    pub(super) fn new(ctx: &'a Context, options: &'a Options) -> Self {
        Planner {
            ctx,
            options,
            skew: TimeDelta::zero(),
            read: None,
            fulls: ReadFulls::new(ctx, options.timeout),
            tags_asked: 0,
        }
    }

    /// Makes the earlier of the two clocks count. `ahead`: how far the store's clock is ahead of this
    /// machine's.
    pub(super) fn set_skew(&mut self, ahead: TimeDelta) {
        self.skew = ahead.min(TimeDelta::zero());
    }

    /// Returns the time by the earlier of the known clocks.
    pub(super) fn now(&self) -> DateTime<Utc> {
        let now = Utc::now();
        now.checked_add_signed(self.skew).unwrap_or(now)
    }

    /// Makes a plan. Tries again if another run deletes snapshots meanwhile.
    ///
    /// # Errors
    /// Fails with `NoSnapshots` if the backup is empty, `PermissionDenied` also if `--apply` is given
    /// and tags cannot be read, `SnapshotVanished` if others keep deleting, `Io`, `NoSpace`, or an
    /// error of the store.
    pub(super) fn plan(&mut self) -> Result<Plan> {
        const ATTEMPTS: u32 = 5;
        let mut attempts = 1;
        loop {
            match self.try_plan() {
                // Another run deleted a snapshot that was listed.
                Err(e) if e.reason() == Reason::SnapshotVanished && attempts < ATTEMPTS => {
                    attempts += 1
                }
                // A broken snapshot that somebody excluded must not make the others look superfluous.
                Ok(_) if self.options.apply && self.ctx.store.tags_forbidden() => {
                    return Err(Reason::PermissionDenied.error(TAGS_UNREADABLE));
                }
                result => return result,
            }
        }
    }

    fn try_plan(&mut self) -> Result<Plan> {
        let begun = (Instant::now(), SystemTime::now());
        // Objects that are written from now on must not look old.
        let now = self.now();
        let mut input = self.list(now)?;
        let untrusted = self.untrusted(&input.catalog)?;
        input.ignored.add_damaged(untrusted);
        let Decisions {
            timelines,
            why,
            doubts,
        } = loop {
            if let Some(decisions) = self.try_decide(&mut input)? {
                break decisions;
            }
        };
        self.tags_asked += input.asked.len();
        let not_read = input.ignored.reasons.values();
        let mut plan = Plan {
            timelines,
            why,
            side_objects: Vec::new(),
            doubts,
            not_read: not_read.filter(|a| **a == Uncounted::NotRead).count(),
            damaged: Vec::new(),
            is_damaged: HashSet::new(),
            tags_unread: match self.ctx.store.can_request_tags() {
                true => input.tags_unread,
                false => 0,
            },
            newest_modified: input.newest_modified,
            begun,
            took: begun.0.elapsed().saturating_sub(input.reading),
            catalog: input.catalog,
        };
        plan.side_objects = self.decide_side_objects(&plan, input.side_objects, now);
        for (i, (reason, message)) in input.ignored.damaged {
            plan.is_damaged.insert(i);
            plan.damaged.push(DamagedFull {
                path: plan.catalog.snapshots[i].path.clone(),
                reason,
                message,
            });
        }
        Ok(plan)
    }

    /// Lists the backup.
    fn list(&self, now: DateTime<Utc>) -> Result<PlanInput> {
        let store = &self.ctx.store;
        let mut input = PlanInput {
            now,
            ..PlanInput::default()
        };
        let mut listing = Vec::new();
        let mut objects = store.objects(&SNAPSHOTS)?;
        objects.extend(store.objects(&[TIMELINES, PINS, EXCLUDED, STAGING])?);
        for o in objects {
            input.newest_modified = input.newest_modified.max(Some(o.modified));
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
                input.versions.insert(o.path.clone(), FullVersion::from(&o));
            }
            input.side_objects.extend(kind.map(|kind| (kind, o)));
        }
        input.catalog = Catalog::from_listing(listing);
        if input.catalog.snapshots.is_empty() {
            return Err(no_snapshots_error(self.ctx, &input.catalog, None));
        }
        Ok(input)
    }

    /// Returns the fulls that are plain although keys are given, and those that are encrypted if no identity is.
    ///
    /// # Errors
    /// `CannotDecrypt` if no identity is given and all fulls are encrypted.
    fn untrusted(&self, catalog: &Catalog) -> Result<Vec<(usize, Damage)>> {
        let mut untrusted = Vec::new();
        let is_full = |&i: &usize| catalog.snapshots[i].name.is_full();
        let fulls: Vec<usize> = catalog.usable().filter(is_full).collect();
        let is_plain = |&i: &usize| !catalog.snapshots[i].name.is_encrypted;
        let only_encrypted = self.ctx.trust == Trust::OnlyEncrypted;
        for i in fulls
            .iter()
            .copied()
            .filter(|i| only_encrypted && is_plain(i))
        {
            let name = self.ctx.store.name(&catalog.snapshots[i].path);
            let message = format!(
                "{name} is not encrypted although keys are given, so anybody who can write to the store may have made it"
            );
            untrusted.push((i, (Reason::Untrusted.as_str().to_owned(), message)));
        }
        if self.ctx.keys.decrypts() {
            return Ok(untrusted);
        }
        let (plain, encrypted): (Vec<usize>, Vec<usize>) = fulls.into_iter().partition(is_plain);
        for &i in &encrypted {
            let name = self.ctx.store.name(&catalog.snapshots[i].path);
            let e = Reason::CannotDecrypt.error(format!(
                "{name} is encrypted, and nothing is removed for a full that was not read: give the identity with --age-identity"
            ));
            if plain.is_empty() {
                return Err(e);
            }
            untrusted.push((i, damage(&e)));
        }
        Ok(untrusted)
    }

    /// Decides on all snapshots. Returns `None` if a snapshot on which the decision depends turns out to be
    /// excluded or damaged: then the caller has to decide again.
    fn try_decide(&mut self, input: &mut PlanInput) -> Result<Option<Decisions>> {
        let doubtful = input.ignored.doubtful(&input.catalog);
        if self.ask_tags(input, doubtful.clone())? {
            return Ok(None);
        }
        let begun = Instant::now();
        self.read(&input.catalog, &doubtful)?;
        input.reading += begun.elapsed();
        let evidence = self.evidence(&input.catalog, &doubtful);
        let mut damaged = Vec::new();
        let mut doubts = Vec::new();
        for &i in &doubtful {
            let Some(e) = evidence.why_unreadable(i) else {
                continue;
            };
            doubts.push(e.to_string());
            if input.catalog.snapshots[i].name.is_full() {
                damaged.push((i, damage(e)));
            }
        }
        if input.ignored.add_damaged(damaged) {
            return Ok(None);
        }
        let counted = input.ignored.counted(&input.catalog);
        let timelines = Timelines::build(&counted, &evidence)?;
        let facts = Facts {
            catalog: &counted,
            timelines: &timelines,
            doubtful: &doubtful,
            is_unreadable: &|i| evidence.is_unreadable(i),
            uncounted: &input.ignored.reasons,
            now: input.now,
        };
        let RetentionDecision {
            reasons: why,
            rests_on,
        } = decide(&facts, &self.options.retention);
        doubts.extend(timelines.warning());
        if let Err(e) = timelines.newest(&counted) {
            doubts.insert(0, e.to_string());
        }
        // A snapshot that a decision relies on must not be excluded by a tag.
        let usable = input.catalog.usable();
        let mut relied_on: Vec<usize> = usable.filter(|&i| why[i].keeps()).collect();
        let removes = self.options.apply && why.iter().any(|w| !w.keeps());
        if why.len() > FEW && !removes {
            input.tags_unread = keep_newest(&input.catalog, &mut relied_on);
        }
        relied_on.extend(&rests_on);
        if self.ask_tags(input, relied_on)? {
            return Ok(None);
        }
        // Nor may a full that a decision relies on be damaged.
        let begun = Instant::now();
        let decide_again = self.check_fulls(input, rests_on)?;
        input.reading += begun.elapsed();
        input.rounds += 1;
        Ok((!decide_again).then_some(Decisions {
            timelines,
            why,
            doubts,
        }))
    }

    /// Returns whether a snapshot was read because its name was in doubt.
    fn was_read(&self, snapshot: &Snapshot) -> bool {
        self.read.as_ref().is_some_and(|(contents, paths)| {
            let index = paths.get(&snapshot.path);
            index.is_some_and(|i| contents.surveys.contains_key(i))
        })
    }

    /// Checks the contents of the fulls that a decision depends on. Returns whether one of them has to be
    /// ignored, so that the caller has to decide again.
    fn check_fulls(&mut self, input: &mut PlanInput, mut rests_on: Vec<usize>) -> Result<bool> {
        /// Each round may find only one bad full. After this many rounds, all fulls that are known to be bad, or
        /// are not known, are ignored at once.
        const ROUNDS: usize = 4;
        rests_on.retain(|&i| !self.was_read(&input.catalog.snapshots[i]));
        if rests_on.is_empty() {
            return Ok(false);
        }
        let states = self.full_states(input, rests_on)?;
        if states.iter().all(|(_, state)| *state == FullState::Good) {
            return Ok(false);
        }
        let are_all_read = states.iter().all(|(_, state)| *state != FullState::NotRead);
        if input.rounds < ROUNDS && are_all_read {
            return Ok(input.ignored.add(states));
        }
        // The oldest first, as they are removed.
        let mut fulls: Vec<usize> = input.catalog.usable().collect();
        fulls.retain(|&i| {
            let s = &input.catalog.snapshots[i];
            s.name.is_full() && !self.was_read(s)
        });
        let states = self.full_states(input, fulls)?;
        Ok(input.ignored.add(states))
    }

    /// Returns the state of each of these fulls. Reads those of unknown state, while there is time.
    fn full_states(
        &mut self,
        input: &PlanInput,
        fulls: Vec<usize>,
    ) -> Result<Vec<(usize, FullState)>> {
        let mut unknown = Vec::new();
        for &i in &fulls {
            if let Some((snapshot, version)) = input.snapshot_version(i)
                && self.fulls.state(&snapshot.path, version).is_none()
            {
                unknown.push((snapshot, version));
            }
        }
        self.fulls.read(&unknown)?;
        let mut states = Vec::with_capacity(fulls.len());
        for i in fulls {
            let known = input
                .snapshot_version(i)
                .and_then(|(snapshot, version)| self.fulls.state(&snapshot.path, version));
            states.push((i, known.unwrap_or(FullState::NotRead)));
        }
        Ok(states)
    }

    /// Requests the tags of snapshots that were not requested before. Returns whether one of them is
    /// excluded.
    fn ask_tags(&self, input: &mut PlanInput, snapshots: Vec<usize>) -> Result<bool> {
        let store = &self.ctx.store;
        input.asked.read(store, &mut input.catalog, snapshots)
    }

    /// Reads the snapshots whose names are in doubt, unless all of them were read before.
    fn read(&mut self, catalog: &Catalog, doubtful: &[usize]) -> Result<()> {
        let path = |i: usize| &catalog.snapshots[i].path;
        if let Some((_, paths)) = &self.read
            && doubtful.iter().all(|&i| paths.contains_key(path(i)))
        {
            return Ok(());
        }
        // Without its key a snapshot is treated like a damaged one: it is kept.
        let is_finding = |e: &Error| e.reason().is_unreadable();
        let contents = read_contents(
            self.ctx,
            catalog,
            doubtful.to_vec(),
            doubtful,
            is_finding,
            |db| read_every_page(db).map(drop),
        )?;
        let paths = doubtful.iter().map(|&i| (path(i).clone(), i));
        self.read = Some((contents, paths.collect()));
        Ok(())
    }

    /// Returns the evidence of the contents that were read, for the indexes of this catalog.
    fn evidence(&self, catalog: &Catalog, doubtful: &[usize]) -> EarlierEvidence<'_> {
        let read = self.read.as_ref();
        let read = read.map(|(contents, paths)| EarlierContents { contents, paths });
        EarlierEvidence::new(read, catalog, doubtful)
    }

    /// Decides on notes, exclusion marks and temporary objects.
    fn decide_side_objects(
        &self,
        plan: &Plan,
        objects: Vec<(Kind, ObjectInfo)>,
        now: DateTime<Utc>,
    ) -> Vec<SideObject> {
        let mut by_name: HashMap<String, Vec<usize>> = HashMap::new();
        for (i, s) in plan.catalog.snapshots.iter().enumerate() {
            by_name.entry(s.name.to_string()).or_default().push(i);
        }
        let mut decided = Vec::new();
        for (kind, object) in objects {
            let Some((reason, snapshots)) =
                self.decide_side_object(plan, kind, &object, &by_name, now)
            else {
                continue;
            };
            decided.push(SideObject {
                path: object.path,
                bytes: object.bytes,
                kind,
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
        now: DateTime<Utc>,
    ) -> Option<(SideReason, Vec<usize>)> {
        let named = |name: &str| by_name.get(name).cloned().unwrap_or_default();
        let snapshots = match kind {
            Kind::Staging => {
                let name = object.path.rsplit('/').next().unwrap_or_default();
                let is_old = now - object.modified > self.options.staging_age;
                let reason = if is_old {
                    SideReason::Abandoned
                } else {
                    SideReason::InUse
                };
                return is_temporary(name).then(|| (reason, Vec::new()));
            }
            _ => {
                let (folder, name) = object.path.split_once('/')?;
                // An object with any other name is not deltafold's.
                let full: SnapshotName = name.parse().ok()?;
                match folder {
                    // A record separates the snapshots before it from those behind it, and it goes with its full: a
                    // late writer of the history before it must find it.
                    TIMELINES => {
                        let mut about = plan.older_than(full.created);
                        about.extend(plan.fulls_of(&full));
                        about
                    }
                    _ => named(name),
                }
            }
        };
        let reason = self.note_reason(plan, object, &snapshots, now);
        Some((reason, snapshots))
    }

    /// Decides on a note or an exclusion mark that is about these snapshots.
    fn note_reason(
        &self,
        plan: &Plan,
        object: &ObjectInfo,
        snapshots: &[usize],
        now: DateTime<Utc>,
    ) -> SideReason {
        let is_deleted = |&i: &usize| plan.decision(i) == Decision::Delete;
        match snapshots.is_empty() {
            true if now - object.modified > self.options.staging_age => SideReason::Orphaned,
            true => SideReason::Young,
            false if snapshots.iter().all(is_deleted) => SideReason::BelongsToRemoved,
            false => SideReason::BelongsToSnapshot,
        }
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

/// The decisions on all snapshots.
struct Decisions {
    timelines: Timelines,
    /// In the catalog's order.
    why: Vec<RetentionReason>,
    /// Messages about histories that are in doubt.
    doubts: Vec<String>,
}

/// What a plan is made from. Deciding may take several rounds, and each of them adds what it found.
#[derive(Default)]
struct PlanInput {
    now: DateTime<Utc>,
    catalog: Catalog,
    side_objects: Vec<(Kind, ObjectInfo)>,
    /// The versions of fulls, by path.
    versions: HashMap<String, FullVersion>,
    newest_modified: Option<DateTime<Utc>>,
    asked: ReadTags,
    tags_unread: usize,
    ignored: IgnoredFulls,
    /// How often fulls were checked.
    rounds: usize,
    /// Time spent on reading snapshots.
    reading: Duration,
}

impl PlanInput {
    fn snapshot_version(&self, i: usize) -> Option<(&Snapshot, &FullVersion)> {
        let snapshot = &self.catalog.snapshots[i];
        Some((snapshot, self.versions.get(&snapshot.path)?))
    }
}

/// Fulls that are kept, but ignored in all decisions.
#[derive(Default)]
struct IgnoredFulls {
    reasons: BTreeMap<usize, Uncounted>,
    damaged: BTreeMap<usize, Damage>,
}

impl IgnoredFulls {
    /// Returns the catalog with the damaged fulls excluded.
    fn counted<'c>(&self, catalog: &'c Catalog) -> Cow<'c, Catalog> {
        if self.damaged.is_empty() {
            return Cow::Borrowed(catalog);
        }
        let mut counted = catalog.clone();
        for &i in self.damaged.keys() {
            counted.snapshots[i].excluded = true;
        }
        Cow::Owned(counted)
    }

    /// Returns the snapshots whose names are in doubt, with or without the damaged fulls: excluding a damaged
    /// full must not end a doubt.
    fn doubtful(&self, catalog: &Catalog) -> Vec<usize> {
        let mut doubtful = timeline::doubtful(catalog);
        if let Cow::Owned(counted) = self.counted(catalog) {
            doubtful.extend(timeline::doubtful(&counted));
            doubtful.sort_unstable();
            doubtful.dedup();
        }
        doubtful
    }

    /// Adds damaged fulls. Returns whether one of them is new.
    fn add_damaged(&mut self, fulls: Vec<(usize, Damage)>) -> bool {
        let states = fulls.into_iter().map(|(i, d)| (i, FullState::Damaged(d)));
        self.add(states.collect())
    }

    /// Adds the fulls that are not good. Returns whether one of them is new.
    fn add(&mut self, states: Vec<(usize, FullState)>) -> bool {
        let mut has_new = false;
        for (i, state) in states {
            if self.reasons.contains_key(&i) {
                continue;
            }
            let reason = match state {
                FullState::Good => continue,
                FullState::NotRead => Uncounted::NotRead,
                FullState::Damaged(damage) => {
                    self.damaged.insert(i, damage);
                    Uncounted::Damaged
                }
            };
            self.reasons.insert(i, reason);
            has_new = true;
        }
        has_new
    }
}

/// Returns an error as the damage of a full.
fn damage(e: &Error) -> Damage {
    (e.reason().as_str().to_owned(), e.to_string())
}

/// Keeps only the newest of these: fulls first, since most decisions depend on them. Returns how many
/// are left out.
fn keep_newest(catalog: &Catalog, snapshots: &mut Vec<usize>) -> usize {
    /// The most tags that a dry run requests.
    const MOST: usize = 32;
    let total = snapshots.len();
    snapshots.sort_by_key(|&i| {
        let name = &catalog.snapshots[i].name;
        (!name.is_full(), Reverse(i))
    });
    snapshots.truncate(MOST);
    total - snapshots.len()
}
