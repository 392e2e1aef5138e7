//! Where a state comes from: an opened full, and the deltas that lead from it to a revision.
//!
//! It chooses them and reads them; what is made of the state, it does not know. `compact`, `restore`
//! and the jobs that read a backup call it.

use crate::bolt::Database;
use crate::bucket::chain::{self, Chain, Choice, KnownBases, Link};
use crate::bucket::timeline::{self, Timeline};
use crate::bucket::{Catalog, Snapshot, SnapshotName};
use crate::error::{Error, Reason, Result};
use crate::job::in_place::Proof;
use crate::job::moment::{self, Each, Moment};
use crate::job::reading::Reading;
use crate::job::replay::{Step, replay};
use crate::job::scan::{Scan, TAGS_UNREADABLE};
use crate::job::tags::{self, Ask};
use crate::job::{Context, Spool, space};
use crate::mvcc::{
    Base, Fold, FoldOptions, HashKv, KeepHistory, KeyRange, KeyValue, Revision, hash_kv,
};
use crate::shorten;
use crate::store::{Begun, is_large};
use chrono::{DateTime, TimeDelta, Utc};
use std::path::Path;
use std::sync::OnceLock;

/// Changes held in memory before they go to the temporary directory.
const CHANGE_BUFFER_BYTES: usize = 16 << 20;

/// Deltas whose tags are asked for at once, before they are read one by one.
const TAGS_AHEAD: usize = 16;

/// A point of a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Target {
    /// The newest revision there is.
    #[default]
    Newest,
    /// A revision.
    Revision(Revision),
    /// The last event whose time is not after this.
    Time(DateTime<Utc>),
}

/// Which state is wanted.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// As of when.
    pub target: Target,
    /// The timeline's ID; the newest where `None`.
    pub timeline: Option<String>,
}

/// A state that can be folded.
pub struct Source {
    /// The full's database.
    pub db: Database<Spool>,
    /// What the full says of itself.
    pub base: Base,
    /// The revision it leads to.
    pub target: Revision,
    /// The timeline's ID.
    pub timeline: String,
    /// What an operator should know.
    pub warnings: Vec<String>,
    full: Full,
    steps: Vec<Step>,
    /// Deltas whose tags were not asked for.
    tags_unread: Vec<String>,
    /// They were read, or asked for, and none is excluded.
    tags_known: OnceLock<()>,
    proof: Proof,
    /// Transfers of the first deltas.
    _begun: Option<Begun>,
}

/// Where the full is.
enum Full {
    Snapshot(Snapshot),
    /// A plain snapshot file: its path.
    File(String),
}

impl Source {
    /// Chooses what leads to the state that is asked for, and opens its full.
    ///
    /// # Errors
    /// `NoSnapshots`, `NoSuchTimeline`, `OutOfRange`, `RevisionGap`, `InterleavedTimelines`; what a
    /// damaged full gives; the store's; `Io`, `NoSpace`, `Terminated`.
    pub fn open(ctx: &Context, scan: &Scan, request: &Request) -> Result<Source> {
        Chooser::new(ctx, scan).open(request, Revision(i64::MAX))
    }

    /// As [`open`](Self::open), by somebody who will read the deltas: their transfers begin beside that of the full.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_to_fold(ctx: &Context, scan: &Scan, request: &Request) -> Result<Source> {
        let mut chooser = Chooser::new(ctx, scan);
        chooser.reads_deltas = true;
        chooser.open(request, Revision(i64::MAX))
    }

    /// Opens a chain that was chosen already, with what its full really holds known.
    ///
    /// # Errors
    /// What a damaged full gives; the store's; `Io`, `NoSpace`, `Terminated`.
    pub(super) fn of_chain(
        ctx: &Context,
        scan: &Scan,
        timeline: &Timeline,
        chain: &Chain,
    ) -> Result<Source> {
        scan.refuse_excluded(ctx, [chain.base])?;
        let (db, base) = ctx.full(&scan.catalog.snapshots[chain.base])?;
        Ok(Self::put_together(scan, timeline, chain, db, base))
    }

    fn put_together(
        scan: &Scan,
        timeline: &Timeline,
        chain: &Chain,
        db: Database<Spool>,
        base: Base,
    ) -> Source {
        let snapshot = |i: usize| scan.catalog.snapshots[i].clone();
        let mut done = base.revision;
        let steps = chain.deltas.iter().map(|link| {
            let after = done;
            done = done.max(link.until);
            Step {
                snapshot: snapshot(link.snapshot),
                after,
                until: link.until.min(chain.target),
            }
        });
        let steps = steps.collect();
        Source {
            db,
            base,
            target: chain.target,
            timeline: timeline.id.clone(),
            warnings: Vec::new(),
            full: Full::Snapshot(snapshot(chain.base)),
            steps,
            tags_unread: scan.unread_of(chain),
            tags_known: OnceLock::new(),
            proof: Proof::known(),
            _begun: None,
        }
    }

    /// As [`open`](Self::open), with a full that holds all history above `history`: the newest such.
    ///
    /// # Errors
    /// As [`open`](Self::open); `OutOfRange` too where every full was compacted past `history`.
    pub fn open_with_history(
        ctx: &Context,
        scan: &Scan,
        request: &Request,
        history: Revision,
    ) -> Result<Source> {
        Chooser::new(ctx, scan).open(request, history)
    }

    /// Opens a plain snapshot file at its newest revision, or at one that it still holds.
    ///
    /// # Errors
    /// `Usage` for a time, which no plain snapshot knows, or a timeline; `OutOfRange`; those of
    /// [`Context::plain`].
    pub fn open_file(ctx: &Context, path: &Path, request: &Request) -> Result<Source> {
        let source = Self::open_file_unproven(ctx, path, request)?;
        source.prove()?;
        Ok(source)
    }

    /// As [`open_file`](Self::open_file). The file may still be hashed when this returns: nothing that comes of
    /// it counts before [`prove`](Self::prove) has returned.
    ///
    /// # Errors
    /// As [`open_file`](Self::open_file).
    pub(super) fn open_file_unproven(
        ctx: &Context,
        path: &Path,
        request: &Request,
    ) -> Result<Source> {
        if request.timeline.is_some() {
            return Err(Error::new(
                Reason::Usage,
                "a plain snapshot has no timelines: leave --timeline out",
            ));
        }
        let plain = ctx.plain_unproven(path)?;
        let base = plain.base;
        let target = match request.target {
            Target::Newest => base.revision,
            Target::Revision(r) if r >= base.first_revision() && r <= base.revision => r,
            Target::Revision(r) => {
                plain.proof.wait()?;
                return Err(Error::new(
                    Reason::OutOfRange,
                    format!(
                        "revision {r} is not covered by {}: it holds {}",
                        path.display(),
                        chain::show_ranges(&[(base.first_revision(), base.revision)])
                    ),
                ));
            }
            Target::Time(_) => {
                return Err(Error::new(
                    Reason::Usage,
                    "a plain snapshot knows no times: use --revision, or --store with the deltas",
                ));
            }
        };
        let warnings: Vec<String> = plain.warning(path).into_iter().collect();
        for warning in &warnings {
            tracing::warn!("{warning}");
        }
        Ok(Source {
            db: plain.db,
            base,
            target,
            timeline: timeline::MAIN.to_owned(),
            warnings,
            full: Full::File(path.display().to_string()),
            steps: Vec::new(),
            tags_unread: Vec::new(),
            tags_known: OnceLock::new(),
            proof: plain.proof,
            _begun: None,
        })
    }

    /// Waits until the hash of a plain snapshot file was compared.
    ///
    /// # Errors
    /// `CorruptSnapshot` if the file is damaged, or was changed since it was opened; `Io`, `Terminated`.
    pub(super) fn prove(&self) -> Result<()> {
        self.proof.wait()
    }

    /// The full's name, for people.
    pub fn base_name(&self) -> String {
        match &self.full {
            Full::Snapshot(s) => s.name.to_string(),
            Full::File(path) => path.clone(),
        }
    }

    /// The timeline's ID; `None` where the full is a plain file.
    pub fn timeline_id(&self) -> Option<&str> {
        self.base_snapshot().map(|_| self.timeline.as_str())
    }

    /// The full; `None` where it is a plain file.
    pub fn base_snapshot(&self) -> Option<&Snapshot> {
        match &self.full {
            Full::Snapshot(s) => Some(s),
            Full::File(_) => None,
        }
    }

    /// The deltas, in order.
    pub fn deltas(&self) -> impl DoubleEndedIterator<Item = &Snapshot> + ExactSizeIterator {
        self.steps.iter().map(|s| &s.snapshot)
    }

    /// The deltas with the revisions that count of each, in order.
    pub(super) fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The newest snapshot that takes part.
    pub fn newest_name(&self) -> Option<&SnapshotName> {
        let newest = self.deltas().next_back();
        newest.or(self.base_snapshot()).map(|s| &s.name)
    }

    /// Puts the full's name before an error's message.
    pub fn at_base<'a>(&'a self, ctx: &'a Context) -> impl Fn(Error) -> Error + 'a {
        |e| match &self.full {
            Full::Snapshot(s) => ctx.at(s)(e),
            Full::File(path) if e.reason().is_bad_data() => e.at(path),
            Full::File(_) => e,
        }
    }

    /// What is to be said of a plan that nobody carries out, so that nothing looks at the tags of its deltas.
    pub fn tags_warning(&self) -> Option<String> {
        match self.tags_unread.len() {
            0 => None,
            n => Some(format!(
                "the tags of {n} deltas of this plan were not read, since each is a request: a run looks at them as it reads the deltas, and plans again if one is excluded"
            )),
        }
    }

    /// Reads deltas, and fails if one turns out to be excluded.
    fn read_deltas<T>(&self, ctx: &Context, read: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.tags_known.get().is_some() {
            return read();
        }
        let done = tags::unless_excluded(ctx, self.tags_unread.iter().map(String::as_str), read)?;
        let _ = self.tags_known.set(());
        Ok(done)
    }

    /// As [`read_deltas`](Self::read_deltas), of some deltas alone: the others may have tags that nobody asked for.
    pub(super) fn read_some_deltas<T>(
        &self,
        ctx: &Context,
        read: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        match ctx.store.tells_tags() {
            true => tags::unless_noted(ctx, self.tags_unread.iter().map(String::as_str), read()),
            false => self.read_deltas(ctx, read),
        }
    }

    /// Whether the full is the state already.
    pub fn is_folded(&self) -> bool {
        self.steps.is_empty() && self.base.revision == self.target
    }

    /// HashKV of the full itself.
    ///
    /// # Errors
    /// `CorruptSnapshot`, `Io`.
    pub fn hash_of_base(&self, ctx: &Context) -> Result<HashKv> {
        hash_kv(&self.db, None).map_err(self.at_base(ctx))
    }

    /// Bytes that folding it may need in the temporary directory beside the full, at most.
    pub fn temp_bytes(&self) -> u64 {
        let base = self.db.meta().high_water.0 * self.db.page_size() as u64;
        space::estimate(base, self.deltas())
    }

    /// The newest revision whose events are at least `age` older than the last event.
    fn too_old(&self, ctx: &Context, age: std::time::Duration) -> Result<Option<Revision>> {
        self.read_some_deltas(ctx, || self.too_old_by_events(ctx, age))
    }

    fn too_old_by_events(
        &self,
        ctx: &Context,
        age: std::time::Duration,
    ) -> Result<Option<Revision>> {
        let mut reader = StepReader::new(ctx, &self.steps);
        let mut read = |nth: usize, each: &mut Each<'_>| reader.events(nth, each);
        let Some(now) = moment::latest(&self.steps, &mut read)? else {
            return Ok(None);
        };
        let age = TimeDelta::from_std(age).unwrap_or(TimeDelta::MAX);
        let Some(time) = now.checked_sub_signed(age) else {
            return Ok(None);
        };
        let moment = Moment::look_for(&self.steps, time, read)?;
        // The base's events have no times, but they are older than the base.
        let made = self.base_snapshot().map(|s| s.name.created_at());
        let by_base = made.filter(|&made| made <= time);
        Ok(moment.found.or(by_base.map(|_| self.base.revision)))
    }

    /// The compacted revision of a result that keeps so much history.
    ///
    /// # Errors
    /// As [`fold`](Self::fold): for a duration the deltas are read.
    pub fn compact_revision(&self, ctx: &Context, keep: KeepHistory) -> Result<Revision> {
        let cutoff = match keep {
            KeepHistory::Age(age) => self.too_old(ctx, age)?,
            _ => None,
        };
        Ok(keep.compact_revision(&self.base, self.target, cutoff))
    }

    /// Folds the records of some keys. Gives the number of events that were taken, too.
    ///
    /// # Errors
    /// Those of a damaged or foreign delta; the store's; `Io`, `NoSpace`, `Terminated`.
    pub fn fold(
        &self,
        ctx: &Context,
        compact: Revision,
        keys: KeyRange,
        detach_leases: bool,
    ) -> Result<(Fold<'static>, u64)> {
        self.fold_to(ctx, compact, keys, detach_leases, Ok)
    }

    /// As [`fold`](Self::fold); `to` says where the changes go before they come.
    ///
    /// # Errors
    /// As [`fold`](Self::fold); what `to` returns.
    pub(super) fn fold_to<'f>(
        &self,
        ctx: &Context,
        compact: Revision,
        keys: KeyRange,
        detach_leases: bool,
        to: impl FnOnce(Fold<'static>) -> Result<Fold<'f>>,
    ) -> Result<(Fold<'f>, u64)> {
        let options = self.fold_options(ctx, compact, keys, detach_leases);
        let fold = Fold::new(options.clone(), &self.db).map_err(self.at_base(ctx))?;
        let fold = to(fold)?;
        self.read_deltas(ctx, || replay(ctx, &self.steps, &options, fold))
    }

    fn fold_options(
        &self,
        ctx: &Context,
        compact: Revision,
        keys: KeyRange,
        detach_leases: bool,
    ) -> FoldOptions {
        FoldOptions {
            target: self.target,
            compact,
            keys,
            detach_leases,
            base: self.base,
            temp_dir: ctx.temp(),
            buffer_bytes: CHANGE_BUFFER_BYTES,
            limits: ctx.limits,
        }
    }

    /// Hands every one of `keys` that is alive to `each`, in the order of their newest revisions.
    ///
    /// # Errors
    /// As [`fold`](Self::fold); what `each` returns.
    pub fn for_each_live(
        &self,
        ctx: &Context,
        keys: KeyRange,
        each: impl FnMut(&KeyValue<'_>) -> Result<()>,
    ) -> Result<()> {
        let (fold, _) = self.fold(ctx, self.target, keys, false)?;
        self.hand_on(ctx, fold, each)
    }

    /// As [`for_each_live`](Self::for_each_live), as if no delta changed one of `keys`.
    pub(super) fn for_each_live_in_base(
        &self,
        ctx: &Context,
        keys: KeyRange,
        each: impl FnMut(&KeyValue<'_>) -> Result<()>,
    ) -> Result<()> {
        let options = self.fold_options(ctx, self.target, keys, false);
        let fold = Fold::new(options, &self.db).map_err(self.at_base(ctx))?;
        self.hand_on(ctx, fold, each)
    }

    fn hand_on(
        &self,
        ctx: &Context,
        fold: Fold<'_>,
        mut each: impl FnMut(&KeyValue<'_>) -> Result<()>,
    ) -> Result<()> {
        fold.finish(&self.db, |r| {
            ctx.store.cancel().check()?;
            if r.rk.tombstone {
                return Ok(());
            }
            match KeyValue::decode(r.record)? {
                // etcdutl's mark of a bumped revision is no key.
                kv if kv.key.is_empty() => Ok(()),
                kv => each(&kv),
            }
        })?;
        Ok(())
    }
}

/// All deltas of a timeline that add a revision, in order, across gaps.
pub(super) fn all_steps(catalog: &Catalog, timeline: &Timeline) -> Vec<Step> {
    steps_of(catalog, &chain::all_links(catalog, timeline))
}

fn steps_of(catalog: &Catalog, links: &[Link]) -> Vec<Step> {
    let steps = links.iter().map(|link| Step {
        snapshot: catalog.snapshots[link.snapshot].clone(),
        after: Revision::NONE,
        until: link.until,
    });
    steps.collect()
}

/// Reads steps, in about their order.
struct StepReader<'a> {
    ctx: &'a Context,
    steps: &'a [Step],
    /// And the step after the one that was read last.
    reading: Option<(Reading<'a>, usize)>,
}

impl<'a> StepReader<'a> {
    fn new(ctx: &'a Context, steps: &'a [Step]) -> Self {
        StepReader {
            ctx,
            steps,
            reading: None,
        }
    }

    /// Hands the events of a step to `each`, until it says false.
    fn events(&mut self, nth: usize, each: &mut Each<'_>) -> Result<()> {
        let step = &self.steps[nth];
        let at = self.ctx.at(&step.snapshot);
        // What was begun ahead is of no use for who goes back.
        let reading = match self.reading.take() {
            Some((reading, next)) if nth >= next => reading,
            _ => Reading::new(self.ctx, self.steps.iter().map(|s| &s.snapshot)),
        };
        let delta = reading.delta(nth);
        self.reading = Some((reading, nth + 1));
        let mut delta = delta?;
        while let Some(e) = delta.next().map_err(&at)? {
            if e.main <= step.after || e.main > step.until {
                continue;
            }
            match each(&e) {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) => return Err(at(delta.explain(e))),
            }
        }
        Ok(())
    }
}

/// Chooses the timeline of that ID, or the newest where `None`. Gives what an operator should know, too.
///
/// # Errors
/// `NoSuchTimeline`, `InterleavedTimelines`; that of a damaged snapshot without which the histories
/// cannot be told apart.
pub(super) fn choose_timeline<'a>(
    ctx: &'a Context,
    scan: &'a Scan,
    wanted: Option<&str>,
) -> Result<(&'a Timeline, Vec<String>)> {
    let mut chooser = Chooser::new(ctx, scan);
    let timeline = chooser.timeline(wanted);
    let timeline = timeline.map_err(|e| scan.explain_untrusted(ctx, e))?;
    Ok((timeline, chooser.warnings))
}

/// The revision of the last event of a timeline whose time is not after `time`. Gives what an operator
/// should know, too.
///
/// # Errors
/// `OutOfRange` where the timeline begins after it; `RevisionGap`, `NoSnapshots`; those of a damaged
/// delta; the store's; `Terminated`.
pub(super) fn revision_at(
    ctx: &Context,
    scan: &Scan,
    timeline: &Timeline,
    time: DateTime<Utc>,
) -> Result<(Revision, Vec<String>)> {
    let mut chooser = Chooser::new(ctx, scan);
    let revision = chooser.revision_at(timeline, time);
    let revision = revision.map_err(|e| scan.explain_untrusted(ctx, e))?;
    Ok((revision, chooser.warnings))
}

/// Chooses a source in what was scanned.
struct Chooser<'a> {
    ctx: &'a Context,
    scan: &'a Scan,
    reads_deltas: bool,
    warnings: Vec<String>,
}

impl<'a> Chooser<'a> {
    fn new(ctx: &'a Context, scan: &'a Scan) -> Self {
        Chooser {
            ctx,
            scan,
            reads_deltas: false,
            warnings: Vec::new(),
        }
    }

    fn open(self, request: &Request, history: Revision) -> Result<Source> {
        let (ctx, scan) = (self.ctx, self.scan);
        self.try_open(request, history)
            .map_err(|e| scan.explain_untrusted(ctx, e))
    }

    fn try_open(mut self, request: &Request, history: Revision) -> Result<Source> {
        let scan = self.scan;
        let timeline = self.timeline(request.timeline.as_deref())?;
        let target = match request.target {
            Target::Newest => None,
            Target::Revision(r) => Some(r),
            Target::Time(t) => Some(self.revision_at(timeline, t)?),
        };
        let known = scan.contents.known_bases();
        let mut begun = None;
        let (chain, db, base) = self.open_chain(timeline, target, history, known, &mut begun)?;
        let snapshot = |i: usize| scan.catalog.snapshots[i].clone();
        tracing::info!(
            base = %snapshot(chain.base).name,
            base_revision = base.revision.0,
            deltas = chain.deltas.len(),
            revision = chain.target.0,
            timeline = timeline.id,
            "chose what to fold"
        );
        let left_out: Vec<&str> = scan
            .catalog
            .snapshots
            .iter()
            .filter(|s| s.excluded && s.name.last > chain.target && target.is_none())
            .map(|s| s.path.as_str())
            .collect();
        if !left_out.is_empty() {
            self.warn(format!(
                "excluded, though newer than revision {}: {}",
                chain.target,
                shorten::line(&left_out, ", ", shorten::IN_LIST)
            ));
        }
        let mut source = Source::put_together(scan, timeline, &chain, db, base);
        source.warnings = self.warnings;
        source._begun = begun;
        Ok(source)
    }

    /// The timeline of that ID; the newest where `None`.
    fn timeline(&mut self, wanted: Option<&str>) -> Result<&'a Timeline> {
        let scan = self.scan;
        scan.refuse_untrusted(self.ctx)?;
        self.warn_about_scan();
        // Where names leave doubt, a damaged snapshot may be the very one that tells the histories
        // apart, or the newest.
        if let Some(e) = scan.contents.unreadable.values().next()
            && wanted.is_none()
        {
            return Err(Error::new(
                e.reason(),
                format!(
                    "{e}; the histories cannot be told apart without it: exclude it, or choose with --timeline after `deltafold list --deep`"
                ),
            ));
        }
        let timeline = match wanted {
            Some(id) => scan.timelines.by_id(id)?,
            None => scan.timelines.newest(&scan.catalog)?,
        };
        if scan.timelines.all.len() > 1 && wanted.is_none() {
            self.warn(format!(
                "the snapshots tell {} histories that fork; the newest, timeline {}, was taken (it has its own history from revision {} on)",
                scan.timelines.all.len(),
                timeline.id,
                timeline.forked_at().unwrap_or(Revision(1))
            ));
        }
        Ok(timeline)
    }

    fn warn(&mut self, message: String) {
        tracing::warn!("{message}");
        self.warnings.push(message);
    }

    fn warn_about_scan(&mut self) {
        if self.ctx.store.hides_tags() {
            self.warn(TAGS_UNREADABLE.to_owned());
        }
        let (catalog, contents) = (&self.scan.catalog, &self.scan.contents);
        if !catalog.foreign.is_empty() {
            self.warn(format!(
                "left alone, for their names are not those of snapshots: {}",
                shorten::line(&catalog.foreign, ", ", shorten::IN_LIST)
            ));
        }
        if let Some(warning) = self.scan.untrusted_warning() {
            self.warn(warning);
        }
        for (&i, e) in &contents.unreadable {
            self.warn(format!("{} is not used: {e}", catalog.snapshots[i].path));
        }
    }

    /// A gap may be there because a snapshot could not be read: say so.
    fn explain(&self, e: Error) -> Error {
        let unreadable: Vec<&Error> = self.scan.contents.unreadable.values().collect();
        if e.reason() != Reason::RevisionGap || unreadable.is_empty() {
            return e;
        }
        Error::new(
            e.reason(),
            format!(
                "{e}; not used were: {}",
                shorten::line(&unreadable, "; ", "")
            ),
        )
    }

    /// Chooses the chain, looking into fulls as far as the choice depends on it.
    fn open_chain(
        &self,
        timeline: &Timeline,
        target: Option<Revision>,
        history: Revision,
        mut known: KnownBases,
        begun: &mut Option<Begun>,
    ) -> Result<(Chain, Database<Spool>, Base)> {
        let scan = self.scan;
        let mut open = None;
        loop {
            let choice =
                chain::choose_with_history(&scan.catalog, timeline, target, history, &known)
                    .map_err(|e| self.explain(e))?;
            let look_at = match &choice {
                Choice::Look(i) => *i,
                Choice::Found(chain) => chain.base,
            };
            let (db, base) = match open.take() {
                Some((i, db, base)) if i == look_at => (db, base),
                _ => {
                    let rests_on: Vec<usize> = match &choice {
                        Choice::Found(chain) => tags::deciding_of(chain, Ask::Newest).collect(),
                        Choice::Look(i) => vec![*i],
                    };
                    scan.refuse_excluded(self.ctx, rests_on)?;
                    if let Choice::Found(chain) = &choice
                        && self.reads_deltas
                    {
                        *begun = self.begin_deltas(chain);
                    }
                    self.ctx.full(&scan.catalog.snapshots[look_at])?
                }
            };
            match choice {
                Choice::Found(chain) if known.contains_key(&look_at) => {
                    return Ok((chain, db, base));
                }
                // What the full holds beyond its name may change the choice.
                _ => {
                    known.insert(look_at, base);
                    open = Some((look_at, db, base));
                }
            }
        }
    }

    /// Begins to fetch deltas, unless the full is large: that has all the ranges to itself.
    fn begin_deltas(&self, chain: &Chain) -> Option<Begun> {
        let snapshot = |i: usize| &self.scan.catalog.snapshots[i];
        let deltas = chain.deltas.iter().map(|link| snapshot(link.snapshot));
        let deltas = deltas.map(|s| (s.path.as_str(), s.bytes));
        let store = &self.ctx.store;
        (!is_large(snapshot(chain.base).bytes)).then(|| store.begin(deltas))
    }

    /// The revision of the last event whose time is not after `time`.
    ///
    /// Events tell, across gaps. Where no event is left, a full tells by when it was made.
    fn revision_at(&mut self, timeline: &Timeline, time: DateTime<Utc>) -> Result<Revision> {
        let found = self.revision_by_events(timeline, time);
        // What was read and has tags may be excluded, whatever came of reading it.
        let paths = timeline.members.iter().map(|m| m.snapshot);
        let paths = paths.map(|i| self.scan.catalog.snapshots[i].path.as_str());
        tags::unless_noted(self.ctx, paths, found)
    }

    fn revision_by_events(&mut self, timeline: &Timeline, time: DateTime<Utc>) -> Result<Revision> {
        let scan = self.scan;
        let catalog = &scan.catalog;
        let links = chain::all_links(catalog, timeline);
        let steps = steps_of(catalog, &links);
        let mut reader = StepReader::new(self.ctx, &steps);
        let mut asked = None;
        let Moment {
            found,
            first_after,
            now,
            ..
        } = Moment::look_for(&steps, time, |nth, each| {
            // Where a read does not tell of tags, they are asked for before it, many at once.
            let batch = nth / TAGS_AHEAD;
            if asked != Some(batch) && !self.ctx.store.tells_tags() {
                asked = Some(batch);
                let ahead = links[nth..].iter().take(TAGS_AHEAD - nth % TAGS_AHEAD);
                scan.refuse_excluded(self.ctx, ahead.map(|l| l.snapshot))?;
            }
            reader.events(nth, each)
        })?;
        let by_full = chain::bases(catalog, timeline)
            .into_iter()
            .map(|i| &catalog.snapshots[i].name)
            .filter(|n| n.created_at() <= time && first_after.is_none_or(|after| n.last < after))
            .map(|n| n.last)
            .max();
        let Some(revision) = found.max(by_full) else {
            let Some(&oldest) = chain::bases(catalog, timeline).last() else {
                return Err(Error::new(
                    Reason::NoSnapshots,
                    "there is no full snapshot to start from: take one first",
                ));
            };
            return Err(Error::new(
                Reason::OutOfRange,
                format!(
                    "{} is before the oldest state on timeline {}: that is {}, of {}",
                    time.to_rfc3339(),
                    timeline.id,
                    catalog.snapshots[oldest].name,
                    catalog.snapshots[oldest].name.created_at().to_rfc3339()
                ),
            ));
        };
        let known_to = first_after
            .map(Revision::previous)
            .or(timeline.last(catalog, &scan.contents));
        let holes = chain::missing(catalog, timeline, revision, known_to.unwrap_or(revision));
        if holes.is_empty() {
            if first_after.is_none() && found == Some(revision) {
                self.warn(format!(
                    "the last event is of {}: what happened from then to {} is in no snapshot",
                    now.to_rfc3339(),
                    time.to_rfc3339()
                ));
            }
            return Ok(revision);
        }
        Err(Error::new(
            Reason::RevisionGap,
            format!(
                "whether the last event up to {} is at revision {revision} cannot be told: missing are {}",
                time.to_rfc3339(),
                chain::show_ranges(&holes)
            ),
        ))
    }
}
