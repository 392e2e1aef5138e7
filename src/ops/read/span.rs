//! A span of a timeline: what it lies between, and the versions of keys in it.
//!
//! The changes of the span are read once, beside what existed before it, which tells what a change that no snapshot records
//! took away. `deleted`, `log` and `diff` call it.

use super::kinds;
use super::stream::{Collector, Digest, VersionStream, add_state};
use super::versions::{Collect, Coverage, FoundVersion, known_before, read_between};
use crate::backup::chain::RevisionRange;
use crate::base::opt::SINCE;
use crate::error::{Reason, Result};
use crate::mvcc::{KeyRange, Revision};
use crate::objects::key::EtcdPrefixes;
use crate::objects::reference::KindsOf;
use crate::objects::resource::{KeyNames, Resource};
use crate::prefix::open::{BackupLocation, State};
use crate::prefix::scan::Scan;
use crate::prefix::select::{At, StateRequest};
use crate::prefix::warn;
use chrono::{DateTime, TimeDelta, Utc};

/// Where a span begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// With the oldest change that the backup holds.
    Oldest,
    /// As long before its end.
    Before(TimeDelta),
    /// After a point.
    After(At),
}

impl Begin {
    /// Returns the point after which a span begins that ends with a state; `None` for the oldest change.
    fn point(self, end: &StateRequest, to: &State) -> Option<At> {
        match self {
            Begin::Oldest => None,
            Begin::After(at) => Some(at),
            Begin::Before(length) => {
                let time = match end.at {
                    At::Time(time) => Some(time),
                    At::Newest | At::Revision(_) => to.newest_name().map(|name| name.created_at()),
                };
                time.map(|time| At::Time(time - length))
            }
        }
    }
}

/// Whether a point is a revision after a state.
fn is_after(at: Option<At>, state: &State) -> bool {
    matches!(at, Some(At::Revision(r)) if r > state.revision)
}

/// The points of a span, and the keys that are read.
pub(super) struct Opened {
    /// The state before the span; `None` if it begins with all that the backup holds.
    pub(super) from: Option<State>,
    /// When the span begins, if that is given as a time.
    pub(super) since: Option<DateTime<Utc>>,
    /// A state at its end.
    pub(super) to: State,
    /// The snapshots of a store.
    pub(super) scan: Option<Scan>,
    /// The first revision and the last one.
    pub(super) revisions: RevisionRange,
    /// The kinds of objects that are known: Kubernetes' own, and more if [`name`](Self::name) or the range needed them.
    pub(super) resources: Vec<Resource>,
    /// The keys.
    pub(super) range: KeyRange,
    /// Warnings for the report.
    pub(super) warnings: Vec<String>,
}

impl Opened {
    /// Opens the points of a span that ends at `end`. `range` chooses the keys by the kinds of objects.
    ///
    /// # Errors
    /// Those of `range`; as [`State::open`] and [`State::for_each_live`].
    pub(super) fn open(
        backup: &BackupLocation,
        begin: Begin,
        end: &StateRequest,
        prefixes: &EtcdPrefixes,
        range: &dyn Fn(&[Resource]) -> Result<KeyRange>,
    ) -> Result<Self> {
        let ctx = backup.context();
        let (to, mut scan) = backup.open_with_scan(end)?;
        if let Some(known) = &scan
            && to.wall.is_some()
            && !known.knows_paths()
        {
            // The timeline goes on before the wall, in the one that it left.
            scan = Some(known.with_paths(ctx)?);
        }
        let mut warnings = to.warnings.clone();
        let at = begin.point(end, &to);
        let from = match at.map(|at| Self::open_begin(backup, scan.as_ref(), at, end, &to)) {
            None => None,
            Some(Err(e)) if e.reason() == Reason::OutOfRange && !is_after(at, &to) => {
                if matches!(begin, Begin::After(_)) {
                    let cut = format!(
                        "{SINCE} is before the oldest state of the backup: all that the backup holds is shown"
                    );
                    warn(&mut warnings, cut);
                }
                None
            }
            Some(from) => Some(from?),
        };
        let mut resources: Vec<Resource> = Resource::built_in().collect();
        let mut found = range(&resources);
        for of in [KindsOf::State, KindsOf::AllTimes] {
            if !matches!(&found, Err(e) if e.reason() == Reason::KeyNotFound) {
                break;
            }
            // The history of all times is that of either state.
            let all = of == KindsOf::AllTimes;
            for state in from
                .iter()
                .chain([&to])
                .skip(usize::from(all && from.is_some()))
            {
                add_kinds(backup, state, of, prefixes, &mut resources)?;
            }
            found = range(&resources);
        }
        let range = found?;
        let after = from.as_ref().map_or(Revision(0), |from| from.asked);
        let last = match end.at {
            // Snapshots after a gap record deletions although they lead to no state.
            At::Newest => Revision(i64::MAX),
            At::Revision(_) | At::Time(_) => to.asked,
        };
        Ok(Opened {
            since: match at {
                Some(At::Time(time)) => from.is_some().then_some(time),
                _ => None,
            },
            from,
            to,
            scan,
            revisions: (after.next(), last),
            resources,
            range,
            warnings,
        })
    }

    /// Opens the state at the begin of a span.
    fn open_begin(
        backup: &BackupLocation,
        scan: Option<&Scan>,
        at: At,
        end: &StateRequest,
        to: &State,
    ) -> Result<State> {
        let request = StateRequest {
            at,
            // The span is one of this timeline, whichever was live when it began.
            timeline: to.timeline_id().map(str::to_owned),
            ..end.clone()
        };
        match scan {
            Some(scan) => State::open(backup.context(), scan, &request),
            None => backup.open(&request),
        }
    }

    /// Adds the kinds that the states define, if one of these keys is of none that is known: reading them takes a pass.
    pub(super) fn name<'k>(
        &mut self,
        backup: &BackupLocation,
        prefixes: &EtcdPrefixes,
        mut keys: impl Iterator<Item = &'k [u8]>,
    ) -> Result<()> {
        let names = KeyNames::new(self.resources.clone(), prefixes);
        if keys.any(|key| names.lacks(key, prefixes)) {
            for state in self.from.iter().chain([&self.to]) {
                add_kinds(backup, state, KindsOf::State, prefixes, &mut self.resources)?;
            }
        }
        Ok(())
    }

    /// The revision after which the span begins.
    pub(super) fn after(&self) -> Revision {
        self.revisions.0.previous()
    }

    /// The last revision of the span that was read.
    pub(super) fn last(&self, coverage: &Coverage) -> Revision {
        self.revisions.1.min(coverage.newest.max(self.to.revision))
    }

    /// The revisions of the span whose changes no snapshot holds completely.
    pub(super) fn missing(&self, coverage: &Coverage) -> Vec<RevisionRange> {
        // Before the first state, nothing is known anyway.
        let first = match self.from {
            Some(_) => self.after(),
            None => coverage.first_state().unwrap_or_default(),
        };
        coverage.missing_in((first.next(), self.last(coverage)))
    }

    pub(super) fn span<'a>(&'a self, backup: &'a BackupLocation) -> Span<'a> {
        Span {
            backup,
            scan: self.scan.as_ref(),
            state: &self.to,
            from: self.from.as_ref(),
            revisions: self.revisions,
        }
    }
}

fn add_kinds(
    backup: &BackupLocation,
    state: &State,
    of: KindsOf,
    prefixes: &EtcdPrefixes,
    resources: &mut Vec<Resource>,
) -> Result<()> {
    let new = kinds(backup, state, of, prefixes)?.into_iter();
    let new: Vec<Resource> = new.filter(|r| !resources.contains(r)).collect();
    resources.extend(new);
    Ok(())
}

/// A span of a timeline.
pub(crate) struct Span<'a> {
    /// The backup.
    pub(crate) backup: &'a BackupLocation,
    /// The snapshots of a store; `None` for a plain snapshot file.
    pub(crate) scan: Option<&'a Scan>,
    /// A state of the timeline.
    pub(crate) state: &'a State,
    /// The state before the span, if what existed then counts although nothing in the span changes it.
    pub(crate) from: Option<&'a State>,
    /// The first revision and the last one.
    pub(crate) revisions: RevisionRange,
}

impl Span<'_> {
    /// Reads the versions of the keys of a range, also of what existed before the span. `sees` gets each version of the span
    /// first, and returns whether it is read. With `is_tolerant`, damage is logged.
    ///
    /// # Errors
    /// As [`read_between`]; those of `digest`.
    pub(super) fn read(
        &self,
        range: &KeyRange,
        digest: Digest<'_>,
        sees: &(dyn Fn(&FoundVersion<'_>) -> bool + Sync),
        is_tolerant: bool,
    ) -> Result<(VersionStream, Known)> {
        let ctx = self.backup.context();
        let versions = Seeing {
            inner: Collector::new(ctx.temp(), range, digest),
            sees,
        };
        if let Some(from) = self.from {
            add_state(ctx, from, range, &versions)?;
        }
        // What happened between that state and the span tells what existed when it began.
        let before = self
            .from
            .map_or(self.revisions.0, |from| from.revision.next());
        let read = (self.revisions.0.min(before), self.revisions.1);
        let coverage = read_between(self.backup, self.scan, self.state, read, &versions);
        let coverage = match coverage {
            Err(e) if is_tolerant && e.reason() != Reason::Terminated => {
                tracing::warn!("not every deletion can be dated: {e}");
                Coverage::default()
            }
            coverage => coverage?,
        };
        let known = Known {
            span: self.revisions,
            unknown: coverage.unknown_in(read),
            moments: coverage.moments.clone(),
        };
        Ok((versions.inner.finish(coverage)?, known))
    }
}

/// Collects the versions for which `sees` returns true.
struct Seeing<'c> {
    inner: Collector<'c>,
    sees: &'c (dyn Fn(&FoundVersion<'_>) -> bool + Sync),
}

impl Collect for Seeing<'_> {
    fn wants(&self, key: &[u8]) -> bool {
        self.inner.wants(key)
    }

    fn begin_full(&self, states: RevisionRange) {
        self.inner.begin_full(states);
    }

    fn add(&self, version: FoundVersion<'_>) -> Result<()> {
        if (self.sees)(&version) {
            self.inner.add(version)
        } else {
            Ok(())
        }
    }
}

/// What is known of a span.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) span: RevisionRange,
    /// The revisions whose states are unknown.
    pub(super) unknown: Vec<RevisionRange>,
    /// The last revisions of snapshots, and when these were taken.
    moments: Vec<(Revision, DateTime<Utc>)>,
}

impl Known {
    /// Returns the newest revision at which a key is known to be unchanged since a revision: deletions are recorded but in
    /// gaps.
    pub(super) fn until(&self, since: Revision) -> Revision {
        let gap = self.unknown.iter().find(|gap| gap.1 > since);
        gap.map_or(since, |gap| gap.0.previous().max(since))
    }

    pub(super) fn contains(&self, revision: Revision) -> bool {
        self.span.0 <= revision && revision <= self.span.1
    }

    /// Returns when the first snapshot was taken that reaches a revision.
    pub(super) fn first_after(&self, revision: Revision) -> Option<DateTime<Utc>> {
        let after = self.moments.iter().filter(|(last, _)| *last >= revision);
        after.map(|(_, taken)| *taken).min()
    }

    /// Returns the newest revision at which a key is known to have been there and not about to be deleted, if it was there up
    /// to `last`.
    pub(super) fn before(&self, existed: Option<&Existence>, last: Revision) -> Revision {
        let put = existed.map_or(last, |e| e.put);
        let terminating = existed.and_then(|e| e.terminating);
        known_before(
            &self.unknown,
            terminating.map_or(last, Revision::previous),
            put,
        )
    }
}

/// Since when a key exists.
#[derive(Debug)]
pub(super) struct Existence {
    /// The revision at which it was put without a deletionTimestamp, if that is known.
    put: Revision,
    /// The revision since which it has a deletionTimestamp.
    terminating: Option<Revision>,
}

impl Existence {
    /// A key is put at a revision. `before` says since when it exists.
    pub(super) fn put(before: Option<Self>, revision: Revision, is_terminating: bool) -> Self {
        let before = before.filter(|_| is_terminating);
        let since = before.as_ref().and_then(|e| e.terminating);
        Existence {
            terminating: is_terminating.then(|| since.unwrap_or(revision)),
            put: before.map_or(revision, |e| e.put),
        }
    }
}
