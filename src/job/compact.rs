//! Compaction: the newest full and the deltas after it become one new full.
//!
//! scan → choose a timeline and a chain → fold → lay out, compress and upload → verify → publish.

use crate::bolt::{Bucket, BucketValue, Database, Layout, PageBudget, ReadAt, TreeBuilder, Writer};
use crate::bucket::catalog::V2;
use crate::bucket::chain::{self, Chain, Choice, KnownBases};
use crate::bucket::codec::{self, CompressionChoice};
use crate::bucket::frame::FrameWriter;
use crate::bucket::timeline::Timeline;
use crate::bucket::{Kind, SnapshotName};
use crate::error::{Error, Reason, Result};
use crate::job::replay::{self, replay};
use crate::job::scan::{Depth, Scan, TAGS_UNREADABLE, scan};
use crate::job::{Context, Spool, space};
use crate::mvcc::history::{
    FINISHED_COMPACT, KEY_BUCKET, META_BUCKET, SCHEDULED_COMPACT, key_bucket, metadata_note,
};
use crate::mvcc::revision::encode_revision;
use crate::mvcc::{
    Base, Fold, FoldOptions, HashKv, KeepHistory, KeyValue, RecordKey, Revision, hash_kv,
};
use crate::store::{Published, Staged, Upload};
use crate::telemetry::memory::peak_memory_bytes;
use crate::telemetry::progress::Step;
use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::time::Instant;

/// Changes held in memory before they go to the temporary directory.
const CHANGE_BUFFER_BYTES: usize = 16 << 20;
/// Names that are tried when a name is taken: as many seconds after the newest input.
const NAMES_TRIED: i64 = 3600;

/// The point to fold to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The newest revision there is.
    Newest,
    /// A revision.
    Revision(Revision),
    /// The last event whose time is not after this.
    Time(DateTime<Utc>),
}

/// What to compact, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// Up to where.
    pub target: Target,
    /// The timeline's ID; the newest where `None`.
    pub timeline: Option<String>,
    /// How much history to keep.
    pub keep_history: KeepHistory,
    /// How to compress the result.
    pub compression: CompressionChoice,
    /// Only say what would be done.
    pub dry_run: bool,
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Status {
    /// A new full is there (or would be, in a dry run).
    Succeeded,
    /// Nothing is newer than the base.
    NothingToDo,
}

/// What was done. The fields are a contract: `docs/compact-result.schema.json`.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// The full that now holds `revision`; `None` in a dry run.
    pub snapshot: Option<String>,
    /// The full it was folded from.
    pub base: String,
    /// The deltas folded into it, in order.
    pub deltas: Vec<String>,
    /// Events of the deltas that were folded; `None` in a dry run.
    pub events: Option<u64>,
    /// The revision folded to.
    pub revision: Revision,
    /// The compacted revision of `snapshot`; −1 where it holds all history.
    pub compact_revision: Option<Revision>,
    /// Keys alive at `revision`.
    pub live_keys: Option<u64>,
    /// etcd's HashKV of `snapshot` at `revision`.
    pub hash_kv: Option<u32>,
    /// The timeline's ID.
    pub timeline: String,
    /// Bytes read from the store.
    pub bytes_read: u64,
    /// Size of `snapshot` in the store; 0 where nothing had to be written.
    pub bytes_written: u64,
    /// Wall-clock time.
    pub seconds: f64,
    /// The most memory that was resident at once.
    pub peak_memory_bytes: Option<u64>,
    /// Users, roles, members, alarms and leases are as of this revision: deltas hold only keys.
    pub metadata_revision: Revision,
    /// The compression of `snapshot`.
    pub compression: &'static str,
    /// Whether only a plan was made.
    pub dry_run: bool,
    /// What an operator should know.
    pub warnings: Vec<String>,
}

/// Runs a compaction.
///
/// # Errors
/// Any reason but `Usage`; nothing is visible in the store then but, at worst, a staging object.
pub fn run(ctx: &Context, options: &Options) -> Result<Outcome> {
    Run {
        ctx,
        options,
        started: Instant::now(),
        warnings: Vec::new(),
    }
    .run()
}

struct Run<'a> {
    ctx: &'a Context,
    options: &'a Options,
    started: Instant,
    warnings: Vec<String>,
}

/// A chain whose full has been opened.
struct Opened {
    chain: Chain,
    db: Database<Spool>,
    base: Base,
}

impl Run<'_> {
    fn run(mut self) -> Result<Outcome> {
        let scan = scan(self.ctx, Depth::Doubtful)?;
        if !self.options.dry_run {
            self.ctx.store.clean_staging(Utc::now());
        }
        self.warn_about(&scan);
        // Where names leave doubt, a damaged snapshot may be the very one that tells the histories
        // apart, or the newest.
        if let Some(e) = scan.contents.unreadable.values().next()
            && self.options.timeline.is_none()
        {
            return Err(Error::new(
                e.reason(),
                format!(
                    "{e}; the histories cannot be told apart without it: exclude it, or choose with --timeline after `deltafold list --deep`"
                ),
            ));
        }
        let timeline = match &self.options.timeline {
            Some(id) => scan.timelines.by_id(id)?,
            None => scan.timelines.newest(&scan.catalog)?,
        };
        if scan.timelines.all.len() > 1 && self.options.timeline.is_none() {
            self.warn(format!(
                "the snapshots tell {} histories that fork; the newest, timeline {}, was taken (it has its own history from revision {} on)",
                scan.timelines.all.len(),
                timeline.id,
                timeline.forked_at().unwrap_or(Revision(1))
            ));
        }
        let known = scan.contents.known_bases();
        let target = match self.options.target {
            Target::Newest => None,
            Target::Revision(r) => Some(r),
            Target::Time(t) => Some(self.revision_at(&scan, timeline, t)?),
        };
        let name = |i: usize| &scan.catalog.snapshots[i].name;

        let opened = self.open_chain(&scan, timeline, target, known)?;
        let Opened { chain, db, base } = &opened;
        tracing::info!(
            base = %name(chain.base),
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
                left_out.join(", ")
            ));
        }
        if chain.deltas.is_empty() && base.revision == chain.target {
            let hash =
                hash_kv(db, None).map_err(self.ctx.at(&scan.catalog.snapshots[chain.base]))?;
            let compression = name(chain.base).compression.into();
            let mut outcome = self.outcome(&scan, timeline, &opened, compression);
            outcome.status = Status::NothingToDo;
            outcome.snapshot = Some(name(chain.base).to_string());
            outcome.events = Some(0);
            self.fill(&mut outcome, &hash);
            return Ok(outcome);
        }

        let encoding = self.resolve_compression(&scan, chain);
        self.warn_about_room(&scan, &opened);
        if self.options.dry_run {
            return Ok(self.outcome(&scan, timeline, &opened, encoding));
        }
        let cutoff = match self.options.keep_history {
            KeepHistory::Age(age) => self.too_old(&scan, &opened, age)?,
            _ => None,
        };
        let compact = self
            .options
            .keep_history
            .compact_revision(base, chain.target, cutoff);
        let (fold, events) = self.fold(&scan, &opened, compact)?;
        let mut new_name = SnapshotName {
            kind: Kind::Full,
            start: Revision(0),
            last: chain.target,
            created: self.newest_input(&scan, chain) + 1,
            compression: encoding.compression,
            is_final: self.newest_name(&scan, chain).is_final,
        };
        let (staged, folded) = self.write(&scan, &opened, compact, fold, &new_name, encoding)?;
        let bytes = self.publish(&staged, &mut new_name)?;
        tracing::info!(
            snapshot = %new_name,
            revision = chain.target.0,
            events,
            hash_kv = folded.hash,
            bytes,
            "{}",
            if bytes == 0 { "the very same full snapshot was there already" } else { "wrote a full snapshot" }
        );
        if scan
            .catalog
            .snapshots
            .iter()
            .any(|s| s.excluded && s.name == new_name)
        {
            self.warn(format!(
                "{new_name} was there already and is excluded: it is not used, and the next run folds the same again"
            ));
        }
        let mut outcome = self.outcome(&scan, timeline, &opened, encoding);
        outcome.snapshot = Some(new_name.to_string());
        outcome.events = Some(events);
        outcome.bytes_written = bytes;
        self.fill(&mut outcome, &folded);
        Ok(outcome)
    }

    fn warn(&mut self, message: String) {
        tracing::warn!("{message}");
        self.warnings.push(message);
    }

    fn warn_about(&mut self, scan: &Scan) {
        if self.ctx.store.hides_tags() {
            self.warn(TAGS_UNREADABLE.to_owned());
        }
        if !scan.catalog.foreign.is_empty() {
            self.warn(format!(
                "left alone, for their names are not those of snapshots: {}",
                scan.catalog.foreign.join(", ")
            ));
        }
        for (&i, e) in &scan.contents.unreadable {
            self.warn(format!(
                "{} is not used: {e}",
                scan.catalog.snapshots[i].path
            ));
        }
    }

    /// What will certainly not fit is an error where it is known for sure.
    fn warn_about_room(&mut self, scan: &Scan, Opened { chain, db, .. }: &Opened) {
        let base = db.meta().high_water.0 * db.page_size() as u64;
        let deltas = chain.deltas.iter();
        let deltas = deltas.map(|l| &scan.catalog.snapshots[l.snapshot]);
        let need = space::estimate(base, deltas);
        let free = space::free_bytes(&self.ctx.temp_dir).unwrap_or(u64::MAX);
        if free < need {
            self.warn(format!(
                "the temporary directory {} has {free} bytes free; up to about {need} may be needed: choose another with --temp-dir if it fails",
                self.ctx.temp_dir.display()
            ));
        }
    }

    fn resolve_compression(&mut self, scan: &Scan, chain: &Chain) -> codec::Encoding {
        let newest = self.newest_name(scan, chain).compression;
        let encoding = self.options.compression.resolve(newest);
        if !encoding.compression.is_read_by_others() {
            self.warn(format!(
                "{} is deltafold's own addition to the format: etcd-backup-restore cannot read this snapshot",
                encoding.compression
            ));
        }
        encoding
    }

    /// The last snapshot of the chain.
    fn newest_name<'s>(&self, scan: &'s Scan, chain: &Chain) -> &'s SnapshotName {
        let newest = chain.deltas.last().map_or(chain.base, |l| l.snapshot);
        &scan.catalog.snapshots[newest].name
    }

    /// When the newest of all inputs was taken, in seconds since 1970.
    fn newest_input(&self, scan: &Scan, chain: &Chain) -> i64 {
        let inputs = chain.deltas.iter().map(|l| l.snapshot).chain([chain.base]);
        let created = inputs.map(|i| scan.catalog.snapshots[i].name.created);
        created.max().unwrap_or_default()
    }

    fn outcome(
        &self,
        scan: &Scan,
        timeline: &Timeline,
        Opened { chain, base, .. }: &Opened,
        encoding: codec::Encoding,
    ) -> Outcome {
        let name = |i: usize| scan.catalog.snapshots[i].name.to_string();
        Outcome {
            status: Status::Succeeded,
            snapshot: None,
            base: name(chain.base),
            deltas: chain.deltas.iter().map(|l| name(l.snapshot)).collect(),
            events: None,
            revision: chain.target,
            compact_revision: None,
            live_keys: None,
            hash_kv: None,
            timeline: timeline.id.clone(),
            bytes_read: self.ctx.store.bytes_read(),
            bytes_written: 0,
            seconds: self.started.elapsed().as_secs_f64(),
            peak_memory_bytes: peak_memory_bytes(),
            metadata_revision: base.metadata_revision,
            compression: encoding.compression.as_str(),
            dry_run: self.options.dry_run,
            warnings: self.warnings.clone(),
        }
    }

    fn fill(&self, outcome: &mut Outcome, hash: &HashKv) {
        outcome.hash_kv = Some(hash.hash);
        outcome.live_keys = Some(hash.live_keys);
        outcome.compact_revision = Some(hash.compact_revision);
    }

    /// A gap may be there because a snapshot could not be read: say so.
    fn explain(&self, scan: &Scan, e: Error) -> Error {
        let unreadable: Vec<String> = scan
            .contents
            .unreadable
            .values()
            .map(Error::to_string)
            .collect();
        if e.reason() != Reason::RevisionGap || unreadable.is_empty() {
            return e;
        }
        Error::new(
            e.reason(),
            format!("{e}; not used were: {}", unreadable.join("; ")),
        )
    }

    /// Chooses the chain, looking into fulls as far as the choice depends on it.
    fn open_chain(
        &self,
        scan: &Scan,
        timeline: &Timeline,
        target: Option<Revision>,
        mut known: KnownBases,
    ) -> Result<Opened> {
        let mut open = None;
        loop {
            let choice = chain::choose(&scan.catalog, timeline, target, &known)
                .map_err(|e| self.explain(scan, e))?;
            let look_at = match &choice {
                Choice::Look(i) => *i,
                Choice::Found(chain) => chain.base,
            };
            let (db, base) = match open.take() {
                Some((i, db, base)) if i == look_at => (db, base),
                _ => self.ctx.full(&scan.catalog.snapshots[look_at])?,
            };
            match choice {
                Choice::Found(chain) if known.contains_key(&look_at) => {
                    return Ok(Opened { chain, db, base });
                }
                // What the full holds beyond its name may change the choice.
                _ => {
                    known.insert(look_at, base);
                    open = Some((look_at, db, base));
                }
            }
        }
    }

    /// The revision of the last event whose time is not after `time`.
    ///
    /// Events tell, from the oldest delta on, since clocks that run backward count from there.
    /// Where no event is left, a full tells by when it was made.
    fn revision_at(
        &mut self,
        scan: &Scan,
        timeline: &Timeline,
        time: DateTime<Utc>,
    ) -> Result<Revision> {
        let catalog = &scan.catalog;
        let mut now = DateTime::<Utc>::MIN_UTC;
        let mut found = None;
        let mut first_after = None;
        // Damage is only in the way where it hides the answer: no event after it counts as before
        // `time`.
        let mut lost = None;
        'links: for link in chain::all_links(catalog, timeline) {
            let snapshot = &catalog.snapshots[link.snapshot];
            let at = self.ctx.at(snapshot);
            let mut events = self.ctx.delta(snapshot)?;
            loop {
                let e = match events.next() {
                    Ok(Some(e)) => e,
                    Ok(None) => continue 'links,
                    Err(e) if e.reason().is_bad_data() => {
                        lost = Some(at(e));
                        continue 'links;
                    }
                    Err(e) => return Err(at(e)),
                };
                if e.main > link.until || found.is_some_and(|f| e.main < f) {
                    continue;
                }
                now = now.max(e.instant().map_err(&at)?);
                if now > time {
                    // A transaction counts whole, from its first event on.
                    let begun = found == Some(e.main);
                    first_after = Some(if begun { e.main.next() } else { e.main });
                    break 'links;
                }
                found = Some(e.main);
                lost = None;
            }
        }
        if let Some(e) = lost {
            return Err(e);
        }
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

    /// The deltas of the chain, each with the revisions that are taken of it.
    fn steps<'s>(&self, scan: &'s Scan, opened: &Opened) -> Vec<replay::Step<'s>> {
        let Opened { chain, base, .. } = opened;
        let mut done = base.revision;
        let steps = chain.deltas.iter().map(|link| {
            let after = done;
            done = done.max(link.until);
            replay::Step {
                snapshot: &scan.catalog.snapshots[link.snapshot],
                after,
                until: link.until.min(chain.target),
            }
        });
        steps.collect()
    }

    /// Calls `each` for every event that the fold takes, in order.
    fn for_each_event(
        &self,
        scan: &Scan,
        opened: &Opened,
        mut each: impl FnMut(&crate::bucket::delta::Event<'_>) -> Result<()>,
    ) -> Result<()> {
        for step in self.steps(scan, opened) {
            let at = self.ctx.at(step.snapshot);
            let mut delta = self.ctx.delta(step.snapshot)?;
            while let Some(e) = delta.next().map_err(&at)? {
                if e.main > step.after
                    && e.main <= step.until
                    && let Err(e) = each(&e)
                {
                    return Err(at(delta.explain(e)));
                }
            }
        }
        Ok(())
    }

    /// The newest revision whose events are at least `age` older than the last event.
    fn too_old(
        &self,
        scan: &Scan,
        opened: &Opened,
        age: std::time::Duration,
    ) -> Result<Option<Revision>> {
        let age = TimeDelta::from_std(age).unwrap_or(TimeDelta::MAX);
        let mut now = DateTime::<Utc>::MIN_UTC;
        // The revisions that are young enough so far, by the time they were seen.
        let mut young: VecDeque<(DateTime<Utc>, Revision)> = VecDeque::new();
        let mut cutoff = None;
        let old_at = |now: DateTime<Utc>| now.checked_sub_signed(age);
        self.for_each_event(scan, opened, |e| {
            now = now.max(e.instant()?);
            match young.back_mut() {
                Some(back) if back.0 == now => back.1 = e.main,
                _ => young.push_back((now, e.main)),
            }
            while let Some(&(seen, revision)) = young.front()
                && old_at(now).is_some_and(|old| seen <= old)
            {
                cutoff = Some(revision);
                young.pop_front();
            }
            Ok(())
        })?;
        if cutoff.is_none() && now > DateTime::<Utc>::MIN_UTC {
            // The base's events have no times, but they are older than the base.
            let made = scan.catalog.snapshots[opened.chain.base].name.created_at();
            if old_at(now).is_some_and(|old| made <= old) {
                cutoff = Some(opened.base.revision);
            }
        }
        Ok(cutoff)
    }

    /// Folds the chain. Gives the number of events that were taken, too.
    fn fold(&self, scan: &Scan, opened: &Opened, compact: Revision) -> Result<(Fold, u64)> {
        let Opened { chain, db, base } = opened;
        let options = FoldOptions {
            target: chain.target,
            compact,
            base: *base,
            temp_dir: self.ctx.temp_dir.clone(),
            buffer_bytes: CHANGE_BUFFER_BYTES,
        };
        let fold = Fold::new(options.clone(), db)
            .map_err(self.ctx.at(&scan.catalog.snapshots[chain.base]))?;
        replay(self.ctx, &self.steps(scan, opened), &options, fold)
    }

    /// Lays the new database out, compresses and uploads it on the way, and verifies it.
    fn write(
        &self,
        scan: &Scan,
        opened: &Opened,
        compact: Revision,
        mut fold: Fold,
        name: &SnapshotName,
        encoding: codec::Encoding,
    ) -> Result<(Staged, HashKv)> {
        let Opened { chain, db, base } = opened;
        let at_base = self.ctx.at(&scan.catalog.snapshots[chain.base]);
        let layout = {
            let step = Step::new("measure the new snapshot", None);
            let mut w = Writer::measuring(db.page_size())?;
            let root = build(opened, compact, &mut w, &at_base, |w, tree| {
                fold.measure(db, |key, len| {
                    step.add((key.len() + len) as u64);
                    self.ctx.store.cancel().check()?;
                    tree.push_len(w, key, len)
                })
            })?;
            w.layout(root, &metadata_note(base.metadata_revision))?
        };
        space::check(&self.ctx.temp_dir, layout.bytes(), "the new database")?;

        let failed = |e| Error::io("write the new snapshot", e);
        let upload = Upload::new(&self.ctx.store, &name.to_string(), self.ctx.threads);
        let packed = codec::encoder(encoding, self.ctx.threads, upload).map_err(failed)?;
        let mut both = Both {
            file: BufWriter::with_capacity(256 << 10, self.ctx.temp_file()?),
            stream: FrameWriter::new(packed),
            step: Step::new(format!("write {name}"), Some(layout.bytes())),
        };
        let mut fold = Some(fold);
        let mut folded = None;
        let mut w = Writer::writing(&layout, &mut both)?;
        let root = build(opened, compact, &mut w, &at_base, |w, tree| {
            let fold = fold
                .take()
                .ok_or_else(|| Error::corrupt("the snapshot has two buckets \"key\""))?;
            folded = Some(fold.finish(db, |key, record| {
                self.ctx.store.cancel().check()?;
                tree.push(w, key, record)
            })?);
            Ok(())
        })?;
        w.finish(root, &layout)?;
        let folded = folded.ok_or_else(|| Error::internal("the fold was not run"))?;

        let Both { file, stream, step } = both;
        let file = file.into_inner().map_err(|e| failed(e.into_error()))?;
        let verify = || self.verify(file, opened, &folded, &layout);
        let stage = || {
            let packed = stream.finish().map_err(failed)?;
            packed.finish().map_err(failed)?.finish()
        };
        let (verified, staged) = if self.ctx.threads > 1 {
            std::thread::scope(|s| {
                let panicked = |_| Err(Error::internal("the verification panicked"));
                match std::thread::Builder::new().spawn_scoped(s, verify) {
                    Ok(verified) => {
                        let staged = stage();
                        (verified.join().unwrap_or_else(panicked), staged)
                    }
                    Err(e) => {
                        let what = "start a thread (give fewer with --threads)";
                        (Err(Error::io(what, e)), stage())
                    }
                }
            })
        } else {
            (verify(), stage())
        };
        drop(step);
        let staged = staged?;
        verified?;
        Ok((staged, folded))
    }

    /// Reads the new file as a stranger would: every page, its revisions, and HashKV.
    fn verify(&self, file: File, opened: &Opened, folded: &HashKv, layout: &Layout) -> Result<()> {
        let target = opened.chain.target;
        let _step = Step::new("verify the new snapshot", None);
        let db = Database::open(self.ctx.spool(file))?;
        let base = Base::read(&db)?;
        let hash = hash_kv(&db, None)?;
        // HashKV has read all of the `key` bucket.
        read_all(&db, &db.root(), 0, |name| name != KEY_BUCKET)?;
        let bytes = db.into_inner().size();
        let bytes = bytes.map_err(|e| Error::io("read the new database", e))?;
        if base.revision != target
            || !base.compaction_finished
            || hash != *folded
            || bytes != layout.bytes()
        {
            check_compacted(&opened.db)?;
            return Err(Error::internal(format!(
                "the new file is not what was folded: it ends at revision {} with {hash:?}, folded were {target} and {:?}",
                base.revision, folded
            )));
        }
        Ok(())
    }

    /// Gives the staged object the first free name from `name` on. Returns its size, or 0 where it
    /// was there already.
    fn publish(&self, staged: &Staged, name: &mut SnapshotName) -> Result<u64> {
        let first = name.created;
        while name.created < first + NAMES_TRIED {
            match staged.publish(&format!("{V2}/{name}"))? {
                Published::Created => return Ok(staged.bytes()),
                Published::Identical => return Ok(0),
                Published::Taken => name.created += 1,
            }
        }
        name.created = first;
        Err(Error::new(
            Reason::TargetExists,
            format!(
                "{} and the {NAMES_TRIED} names after it are taken by other snapshots",
                self.ctx.store.name(&format!("{V2}/{name}"))
            ),
        ))
    }
}

/// Where the new database goes: into a file to be verified, and on its way into the store.
struct Both<W> {
    file: BufWriter<File>,
    stream: W,
    step: Step,
}

impl<W: Write> Write for Both<W> {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        self.file.write_all(b).map_err(|e| {
            Error::io(
                "write the new database to the temporary directory (choose another with --temp-dir)",
                e,
            )
        })?;
        self.stream.write_all(b)?;
        self.step.add(b.len() as u64);
        Ok(b.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Builds the new database out of the base's buckets; `records` fills the one of records.
fn build(
    opened: &Opened,
    compact: Revision,
    w: &mut Writer<'_>,
    at_base: impl Fn(Error) -> Error,
    mut records: impl FnMut(&mut Writer<'_>, &mut TreeBuilder) -> Result<()>,
) -> Result<TreeBuilder> {
    // What is wrong with the new file, or with where it goes, is not the base's fault; and a
    // contradiction between histories is the deltas'.
    let at_base = |e: Error| match e.reason() {
        Reason::HistoryMismatch => e,
        reason if reason.is_bad_data() => at_base(e),
        _ => e,
    };
    let db = &opened.db;
    let mut root = TreeBuilder::new(db.meta().sequence);
    let budget = db.page_budget();
    let mut buckets = db.cursor_within(&db.root(), &budget);
    while let Some(e) = buckets.next().map_err(&at_base)? {
        if !e.is_bucket() {
            root.push(w, e.key, e.value)?;
            continue;
        }
        let bucket = Bucket::decode(e.value).map_err(&at_base)?;
        let value = match e.key {
            KEY_BUCKET => {
                let mut tree = TreeBuilder::new(bucket.sequence);
                records(w, &mut tree).map_err(&at_base)?;
                tree.finish(w)?
            }
            META_BUCKET => rewrite_meta(db, &bucket, compact, w).map_err(&at_base)?,
            _ => copy_bucket(db, &bucket, &budget, w, 0).map_err(&at_base)?,
        };
        root.push_bucket(w, e.key, &value)?;
    }
    Ok(root)
}

/// A base that says it is compacted holds one record a key up to there. The fold relies on that;
/// whether it is so is only looked at when something does not add up.
fn check_compacted<R: ReadAt>(db: &Database<R>) -> Result<()> {
    let base = Base::read(db)?;
    let mut keys = HashSet::new();
    let mut c = db.cursor(&key_bucket(db)?);
    while let Some(e) = c.next()? {
        let rk = RecordKey::decode(e.key)?;
        if rk.main > base.compact_revision || !base.compaction_finished {
            break;
        }
        if !keys.insert(KeyValue::decode(e.value)?.key.to_vec()) {
            return Err(Error::corrupt(format!(
                "the base says that it was compacted at revision {}, and holds a key twice below",
                base.compact_revision
            )));
        }
    }
    Ok(())
}

/// Nesting of buckets beyond which a file is damaged; etcd nests none.
const MAX_NESTING: usize = 16;

fn copy_bucket<R: ReadAt>(
    db: &Database<R>,
    bucket: &Bucket,
    budget: &PageBudget,
    writer: &mut Writer<'_>,
    depth: usize,
) -> Result<BucketValue> {
    if depth > MAX_NESTING {
        return Err(Error::corrupt("buckets are nested without end"));
    }
    let mut tree = TreeBuilder::new(bucket.sequence);
    let mut c = db.cursor_within(bucket, budget);
    while let Some(e) = c.next()? {
        if e.is_bucket() {
            let nested = copy_bucket(db, &Bucket::decode(e.value)?, budget, writer, depth + 1)?;
            tree.push_bucket(writer, e.key, &nested)?;
        } else {
            tree.push(writer, e.key, e.value)?;
        }
    }
    tree.finish(writer)
}

/// The base's `meta` with the new compacted revision.
fn rewrite_meta<R: ReadAt>(
    db: &Database<R>,
    bucket: &Bucket,
    compact: Revision,
    writer: &mut Writer<'_>,
) -> Result<BucketValue> {
    let mut entries = BTreeMap::new();
    let mut c = db.cursor(bucket);
    while let Some(e) = c.next()? {
        entries.insert(e.key.to_vec(), e.value.to_vec());
    }
    if compact != Revision::NONE {
        for key in [SCHEDULED_COMPACT, FINISHED_COMPACT] {
            entries.insert(key.to_vec(), encode_revision(compact, 0).to_vec());
        }
    }
    let mut tree = TreeBuilder::new(bucket.sequence);
    for (key, value) in entries {
        tree.push(writer, &key, &value)?;
    }
    tree.finish(writer)
}

/// Reads every page of a bucket, and of those in it that `wanted` names.
fn read_all<R: ReadAt>(
    db: &Database<R>,
    bucket: &Bucket,
    depth: usize,
    wanted: fn(&[u8]) -> bool,
) -> Result<()> {
    if depth > MAX_NESTING {
        return Err(Error::corrupt("buckets are nested without end"));
    }
    let mut c = db.cursor(bucket);
    while let Some(e) = c.next()? {
        if e.is_bucket() && wanted(e.key) {
            read_all(db, &Bucket::decode(e.value)?, depth + 1, |_| true)?;
        }
    }
    Ok(())
}
