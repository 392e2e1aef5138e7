//! A state of a backup: what is selected, opened.
//!
//! What is made of the state it does not know: the jobs that read a backup hand it on to `replay` and `rebuild`.

use super::database_file::Spool;
use super::in_place::Proof;
use crate::backup::chain::{self, Chain, Choice, KnownBases};
use crate::backup::timeline::{self, Timeline};
use crate::backup::{Snapshot, SnapshotName};
use crate::bolt::Database;
use crate::error::{Error, Reason, Result};
use crate::mvcc::{Base, Revision};
use crate::ops::fold::by_time::revision_at;
use crate::ops::fold::select::{self, Request, Step, Target, choose_timeline};
use crate::ops::scan::Scan;
use crate::ops::{Context, free_space, tags, warn};
use crate::store::{PrefetchGuard, is_large};
use std::path::Path;
use std::sync::OnceLock;

/// A full's database, and what it holds.
type Opened = (Database<Spool>, Base);

/// A state that can be folded: an opened full, and the deltas that lead from it to a revision.
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
    /// The full's name, or the plain file's path.
    name: String,
    full: Option<Snapshot>,
    steps: Vec<Step>,
    /// Deltas whose tags were not asked for.
    tags_unread: Vec<String>,
    /// They were read, or asked for, and none is excluded.
    tags_known: OnceLock<()>,
    proof: Proof,
    /// Transfers of the first deltas.
    _begun: Option<PrefetchGuard>,
}

impl Source {
    /// Selects what leads to the state that is asked for, and opens its full.
    ///
    /// # Errors
    /// `NoSnapshots`, `NoSuchTimeline`, `OutOfRange`, `RevisionGap`, `InterleavedTimelines`; what a
    /// damaged full gives; the store's; `Io`, `NoSpace`, `Terminated`.
    pub fn open(ctx: &Context, scan: &Scan, request: &Request) -> Result<Source> {
        Opening::new(ctx, scan).open(request)
    }

    /// As [`open`](Self::open), by a caller that will read the deltas: their transfers begin beside that of the full.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_to_fold(ctx: &Context, scan: &Scan, request: &Request) -> Result<Source> {
        let mut opening = Opening::new(ctx, scan);
        opening.begins_deltas = true;
        opening.open(request)
    }

    /// As [`open`](Self::open), with a full that holds all history above `history`: the newest such.
    ///
    /// # Errors
    /// As [`open`](Self::open); `OutOfRange` too if every full was compacted past `history`.
    pub fn open_with_history(
        ctx: &Context,
        scan: &Scan,
        request: &Request,
        history: Revision,
    ) -> Result<Source> {
        let mut opening = Opening::new(ctx, scan);
        opening.history = history;
        opening.open(request)
    }

    /// Opens a chain that was selected already, with what its full really holds known.
    ///
    /// # Errors
    /// What a damaged full gives; the store's; `Io`, `NoSpace`, `Terminated`.
    pub(crate) fn of_chain(
        ctx: &Context,
        scan: &Scan,
        timeline: &Timeline,
        chain: &Chain,
    ) -> Result<Source> {
        scan.refuse_excluded(ctx, [chain.base])?;
        let opened = ctx.full(&scan.catalog.snapshots[chain.base])?;
        Ok(Self::put_together(scan, timeline, chain, opened))
    }

    fn put_together(scan: &Scan, timeline: &Timeline, chain: &Chain, opened: Opened) -> Source {
        let full = &scan.catalog.snapshots[chain.base];
        let timeline = timeline.id.clone();
        let name = full.name.to_string();
        Source {
            full: Some(full.clone()),
            steps: select::steps(&scan.catalog, chain, &opened.1),
            tags_unread: scan.unread_of(chain),
            ..Self::of_full(opened, chain.target, timeline, name)
        }
    }

    fn of_full((db, base): Opened, target: Revision, timeline: String, name: String) -> Source {
        Source {
            db,
            base,
            target,
            timeline,
            warnings: Vec::new(),
            name,
            full: None,
            steps: Vec::new(),
            tags_unread: Vec::new(),
            tags_known: OnceLock::new(),
            proof: Proof::known(),
            _begun: None,
        }
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
        let usage = |message| Err(Reason::Usage.error(message));
        if request.timeline.is_some() {
            return usage("a plain snapshot has no timelines: leave --timeline out");
        }
        let plain = ctx.plain_unproven(path)?;
        let base = plain.base;
        let target = match request.target {
            Target::Newest => base.revision,
            Target::Revision(r) if r >= base.first_revision() && r <= base.revision => r,
            Target::Revision(r) => {
                plain.proof.wait()?;
                return Err(Reason::OutOfRange.error(format!(
                    "revision {r} is not covered by {}: it holds {}",
                    path.display(),
                    chain::show_ranges(&[(base.first_revision(), base.revision)])
                )));
            }
            Target::Time(_) => {
                return usage(
                    "a plain snapshot knows no times: use --revision, or --store with the deltas",
                );
            }
        };
        let mut warnings = Vec::new();
        if let Some(warning) = plain.warning(path) {
            warn(&mut warnings, warning);
        }
        let (timeline, name) = (timeline::MAIN.to_owned(), path.display().to_string());
        Ok(Source {
            warnings,
            proof: plain.proof,
            ..Self::of_full((plain.db, base), target, timeline, name)
        })
    }

    /// Waits until the hash of a plain snapshot file was compared.
    ///
    /// # Errors
    /// `CorruptSnapshot` if the file is damaged, or was changed since it was opened; `Io`, `Terminated`.
    pub(crate) fn prove(&self) -> Result<()> {
        self.proof.wait()
    }

    /// The full's name, for people.
    pub fn base_name(&self) -> String {
        self.name.clone()
    }

    /// The timeline's ID; `None` if the full is a plain file.
    pub fn timeline_id(&self) -> Option<&str> {
        self.base_snapshot().map(|_| self.timeline.as_str())
    }

    /// The full; `None` if it is a plain file.
    pub fn base_snapshot(&self) -> Option<&Snapshot> {
        self.full.as_ref()
    }

    /// The deltas, in order.
    pub fn deltas(&self) -> impl DoubleEndedIterator<Item = &Snapshot> + ExactSizeIterator {
        self.steps.iter().map(|s| &s.snapshot)
    }

    /// The deltas with the revisions that count of each, in order.
    pub(crate) fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The deltas, then the full: all snapshots that take part.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = &Snapshot> {
        self.deltas().chain(self.base_snapshot())
    }

    /// The newest snapshot that takes part.
    pub fn newest_name(&self) -> Option<&SnapshotName> {
        let newest = self.deltas().next_back();
        newest.or(self.base_snapshot()).map(|s| &s.name)
    }

    /// Puts the full's name before an error's message.
    pub fn at_base<'a>(&'a self, ctx: &'a Context) -> impl Fn(Error) -> Error + 'a {
        |e| match &self.full {
            Some(full) => ctx.at(full)(e),
            None if e.reason().is_bad_data() => e.at(&self.name),
            None => e,
        }
    }

    /// What is to be said of a plan that nobody carries out, so that nothing looks at the tags of its deltas.
    pub fn tags_warning(&self) -> Option<String> {
        let n = self.tags_unread.len();
        (n > 0).then(|| format!(
            "the tags of {n} deltas of this plan were not read, since each is a request: a run looks at them as it reads the deltas, and plans again if one is excluded"
        ))
    }

    /// Reads deltas, and fails if one turns out to be excluded.
    pub(crate) fn read_deltas<T>(
        &self,
        ctx: &Context,
        read: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        if self.tags_known.get().is_some() {
            return read();
        }
        let done = tags::unless_excluded(ctx, self.tags_unread.iter().map(String::as_str), read)?;
        let _ = self.tags_known.set(());
        Ok(done)
    }

    /// As [`read_deltas`](Self::read_deltas), of some deltas alone: the others may have tags that nobody asked for.
    pub(crate) fn read_some_deltas<T>(
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

    /// Bytes that folding it may need in the temporary directory beside the full, at most.
    pub fn temp_bytes(&self) -> u64 {
        let base = self.db.meta().high_water.0 * self.db.page_size() as u64;
        free_space::estimate(base, self.deltas())
    }
}

/// How a state of a store is opened.
struct Opening<'a> {
    ctx: &'a Context,
    scan: &'a Scan,
    /// The full holds all history above this.
    history: Revision,
    /// The transfers of deltas begin beside that of the full.
    begins_deltas: bool,
}

impl<'a> Opening<'a> {
    fn new(ctx: &'a Context, scan: &'a Scan) -> Self {
        Opening {
            ctx,
            scan,
            history: Revision(i64::MAX),
            begins_deltas: false,
        }
    }

    fn open(self, request: &Request) -> Result<Source> {
        self.try_open(request)
            .map_err(|e| self.scan.explain_untrusted(self.ctx, e))
    }

    fn try_open(&self, request: &Request) -> Result<Source> {
        let (ctx, scan) = (self.ctx, self.scan);
        let (timeline, mut warnings) = choose_timeline(ctx, scan, request.timeline.as_deref())?;
        let target = match request.target {
            Target::Newest => None,
            Target::Revision(r) => Some(r),
            Target::Time(time) => {
                let (revision, more) = revision_at(ctx, scan, timeline, time)?;
                warnings.extend(more);
                Some(revision)
            }
        };
        let (chain, opened, begun) = self.open_chain(timeline, target)?;
        tracing::info!(
            base = %scan.catalog.snapshots[chain.base].name,
            base_revision = opened.1.revision.0,
            deltas = chain.deltas.len(),
            revision = chain.target.0,
            timeline = timeline.id,
            "chose what to fold"
        );
        if target.is_none()
            && let Some(message) = select::left_out(&scan.catalog, &chain)
        {
            warn(&mut warnings, message);
        }
        Ok(Source {
            warnings,
            _begun: begun,
            ..Source::put_together(scan, timeline, &chain, opened)
        })
    }

    /// Selects the chain, and opens fulls as far as the selection depends on them.
    fn open_chain(
        &self,
        timeline: &Timeline,
        target: Option<Revision>,
    ) -> Result<(Chain, Opened, Option<PrefetchGuard>)> {
        let scan = self.scan;
        let mut known: KnownBases = scan.contents.known_bases();
        let (mut open, mut begun) = (None, None);
        loop {
            let choice = select::choose_chain(scan, timeline, target, self.history, &known)?;
            let full = select::full_of(&choice);
            let opened = match open.take() {
                Some((i, opened)) if i == full => opened,
                _ => {
                    scan.refuse_excluded(self.ctx, select::rests_on(&choice))?;
                    if let Choice::Found(chain) = &choice
                        && self.begins_deltas
                    {
                        begun = self.begin_deltas(chain);
                    }
                    self.ctx.full(&scan.catalog.snapshots[full])?
                }
            };
            match choice {
                Choice::Found(chain) if known.contains_key(&full) => {
                    return Ok((chain, opened, begun));
                }
                // What the full holds beyond its name may change the choice.
                _ => {
                    known.insert(full, opened.1);
                    open = Some((full, opened));
                }
            }
        }
    }

    /// Begins to fetch deltas, unless the full is large: that has all the ranges to itself.
    fn begin_deltas(&self, chain: &Chain) -> Option<PrefetchGuard> {
        let snapshot = |i: usize| &self.scan.catalog.snapshots[i];
        let deltas = chain.deltas.iter().map(|link| snapshot(link.snapshot));
        let deltas = deltas.map(|s| (s.path.as_str(), s.bytes));
        (!is_large(snapshot(chain.base).bytes)).then(|| self.ctx.store.prefetch(deltas))
    }
}
