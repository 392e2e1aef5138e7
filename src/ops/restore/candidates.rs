//! Which of several backups is restored: the one that leads farthest and can be read.
//!
//! Ranking is a pure function of revisions; opening and comparing stand around it. `restore` calls it.

use crate::error::{Error, Reason, Result};
use crate::mvcc::{HashKv, Revision};
use crate::ops::Context;
use crate::ops::fold::open::BackupLocation;
use crate::ops::fold::{Request, Source, Target};
use crate::ops::scan::Scan;
use schemars::JsonSchema;
use serde::Serialize;

/// What became of a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Fate {
    /// It is restored.
    Chosen,
    /// It could be; another leads farther, or as far and was named before it.
    NotChosen,
    /// It cannot be read, or what was asked for is not in it.
    Excluded,
}

/// A candidate, as it is told. The fields are a contract.
#[derive(Debug, Clone, JsonSchema, Serialize)]
#[schemars(extend("oneOf" = [
    {"properties": {
        "status": {"enum": ["Excluded"]},
        "reason": {"type": "string"},
        "message": {"type": "string"},
    }},
    {"properties": {
        "status": {"enum": ["Chosen", "NotChosen"]},
        "revision": {"type": "integer"},
        "timeline": {"type": "string"},
        "reason": {"type": "null"},
        "message": {"type": "null"},
    }},
]))]
pub struct Told {
    /// Its URL, or the plain snapshot file.
    pub store: String,
    /// What became of it.
    pub status: Fate,
    /// The revision it leads to. null if that was not found out.
    pub revision: Option<Revision>,
    /// The timeline that leads there. null if that was not found out.
    pub timeline: Option<String>,
    /// Why it is excluded: a reason of exit-codes.md; else null.
    pub reason: Option<Reason>,
    /// The same in words. For people: it may change.
    pub message: Option<String>,
}

/// A backup that was looked at.
pub(super) struct Candidate<'a> {
    backup: &'a BackupLocation,
    pub(super) opened: Result<Opened<'a>>,
}

/// A backup that can be read, as far as was seen.
pub(super) struct Opened<'a> {
    pub(super) ctx: &'a Context,
    pub(super) source: Source,
    scan: Option<Scan>,
}

impl<'a> Candidate<'a> {
    fn open(backup: &'a BackupLocation, request: &Request, proven: bool) -> Self {
        let open = || {
            let (source, scan) = backup.open_unchecked(request)?;
            if proven {
                source.wait_for_hash()?;
            }
            let ctx = backup.context()?;
            Ok(Opened { ctx, source, scan })
        };
        Candidate {
            backup,
            opened: open(),
        }
    }

    fn told(&self) -> Told {
        let source = self.opened.as_ref().ok().map(|o| &o.source);
        Told {
            store: self.backup.name(),
            status: Fate::NotChosen,
            revision: source.map(|s| s.target),
            timeline: source.map(|s| s.timeline.clone()),
            reason: None,
            message: None,
        }
    }

    /// What leads to the state at `revision`.
    pub(super) fn source_at(&self, revision: Revision) -> Result<Source> {
        let Opened { ctx, source, scan } = self.opened.as_ref().map_err(Error::again)?;
        let request = Request {
            target: Target::Revision(revision),
            timeline: source.timeline_id().map(str::to_owned),
        };
        match scan {
            Some(scan) => Source::open(ctx, scan, &request),
            None => Ok(self.backup.open(&request)?.1),
        }
    }

    /// HashKV of a source of this candidate, compacted at a revision.
    pub(super) fn hash(
        &self,
        at: &Source,
        compact: Revision,
        detach_leases: bool,
    ) -> Result<HashKv> {
        let ctx = self.opened.as_ref().map_err(Error::again)?.ctx;
        Ok(at.hash(ctx, compact, detach_leases)?.0)
    }
}

/// HashKV of two candidates at a revision, above what either has compacted.
fn hashes_at(
    one: &Candidate<'_>,
    two: &Candidate<'_>,
    at: Revision,
) -> (Result<HashKv>, Result<HashKv>) {
    let (ours, theirs) = (one.source_at(at), two.source_at(at));
    let sources = [&ours, &theirs].into_iter().flatten();
    let compact = sources.map(|s| s.base.compact_revision).max();
    let compact = compact.unwrap_or(Revision::NONE);
    let hash = |of: &Candidate<'_>, source: Result<Source>| of.hash(&source?, compact, false);
    (hash(one, ours), hash(two, theirs))
}

/// Whether a candidate that failed so may be passed over for another.
pub(super) fn excludes(e: &Error) -> bool {
    let is_its_own = !matches!(
        e.reason(),
        Reason::Terminated | Reason::Internal | Reason::NoSpace | Reason::Usage
    );
    // It may well be restored by another plan.
    is_its_own && !e.plans_again()
}

/// The order in which candidates are tried: the highest revision first, of equals the one that was
/// named first. Those without a revision are out.
pub(super) fn rank(revisions: &[Option<Revision>]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..revisions.len())
        .filter(|&i| revisions[i].is_some())
        .collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(revisions[i]), i));
    order
}

/// All candidates, and what becomes of them.
pub(super) struct Candidates<'a> {
    pub(super) all: Vec<Candidate<'a>>,
    pub(super) told: Vec<Told>,
    /// Which of them the others were compared with.
    compared_with: Option<usize>,
}

impl<'a> Candidates<'a> {
    /// Looks at all of them. If not `proven`, a single plain snapshot file may still be hashed when this
    /// returns: [`Source::prove`] waits for that.
    ///
    /// # Errors
    /// Only what is not a candidate's own fault: `Terminated`, `NoSpace`, `Usage`.
    pub(super) fn open(
        backups: &'a [BackupLocation],
        request: &Request,
        proven: bool,
    ) -> Result<Self> {
        // A damaged one must not keep the others from being tried first.
        let proven = proven || backups.len() > 1;
        let all: Vec<Candidate<'a>> = backups
            .iter()
            .map(|b| Candidate::open(b, request, proven))
            .collect();
        let told = all.iter().map(Candidate::told).collect();
        let mut candidates = Candidates {
            all,
            told,
            compared_with: None,
        };
        for i in 0..candidates.all.len() {
            let failed = candidates.all[i].opened.as_ref().err().map(Error::again);
            match failed {
                Some(e) if excludes(&e) => candidates.exclude(i, &e),
                Some(e) => return Err(e),
                None => {}
            }
        }
        Ok(candidates)
    }

    /// Those that can be tried, the best first.
    pub(super) fn ranked(&self) -> Vec<usize> {
        let revision = |t: &Told| t.revision.filter(|_| t.status != Fate::Excluded);
        let revisions: Vec<_> = self.told.iter().map(revision).collect();
        rank(&revisions)
    }

    /// Passes a candidate over.
    pub(super) fn exclude(&mut self, i: usize, e: &Error) {
        let told = &mut self.told[i];
        if self.all.len() > 1 {
            tracing::warn!("{} is not used: {e} [{}]", told.store, e.reason());
        }
        told.status = Fate::Excluded;
        told.reason = Some(e.reason());
        told.message = Some(e.to_string());
    }

    /// The error where no candidate is left.
    pub(super) fn none_left(&self, last: Option<Error>) -> Error {
        let failed = self.all.iter().find_map(|c| c.opened.as_ref().err());
        let first = last.or_else(|| failed.map(Error::again));
        let told = self.told.iter();
        let texts: Vec<String> = told
            .filter_map(|t| Some(format!("{}: {}", t.store, t.message.as_ref()?)))
            .collect();
        match first {
            Some(e) if self.all.len() == 1 => e,
            Some(e) => e.reason().error(format!(
                "none of the candidates can be restored: {}",
                texts.join("; ")
            )),
            None => Reason::NoSnapshots.error("there is no candidate to restore from"),
        }
    }

    /// Compares the histories of those that can be tried with that of the first of them: two that hold
    /// the same revision must agree on it. One that cannot be read up to its own end is passed over.
    /// Gives what an operator should know: the first may begin after another's end, or have damage
    /// there, and be right for all that.
    ///
    /// # Errors
    /// `HistoryMismatch` where two disagree.
    pub(super) fn compare(&mut self) -> Result<Vec<String>> {
        let mut warnings = Vec::new();
        let ranked = self.ranked();
        let Some((&first, others)) = ranked.split_first() else {
            return Ok(warnings);
        };
        if self.compared_with == Some(first) {
            return Ok(warnings);
        }
        for &other in others {
            // The first leads at least as far.
            let at = self.revision(other);
            if self.is_copy(first, other) {
                continue;
            }
            tracing::info!(
                revision = at.0,
                "comparing {} with {}",
                self.told[first].store,
                self.told[other].store
            );
            let (one, two) = (&self.all[first], &self.all[other]);
            let (ours, theirs) = hashes_at(one, two, at);
            let theirs = match theirs {
                Err(e) if excludes(&e) => {
                    self.exclude(other, &e);
                    continue;
                }
                theirs => theirs?,
            };
            let ours = match ours {
                Err(e) if excludes(&e) => {
                    warnings.push(format!(
                        "whether {} and {} hold the same history could not be told at revision {at}: {e}",
                        self.told[first].store, self.told[other].store
                    ));
                    continue;
                }
                ours => ours?,
            };
            // Not by the number of records: a tombstone at exactly the compacted revision is in the bases
            // of some versions of etcd and not of others.
            if (ours.hash, ours.live_keys) != (theirs.hash, theirs.live_keys) {
                return Err(Reason::HistoryMismatch.error(format!(
                    "{} and {} hold different histories: at revision {at} their HashKV is {} and {}; name only the one to restore from",
                    self.told[first].store, self.told[other].store, ours.hash, theirs.hash
                )));
            }
        }
        self.compared_with = Some(first);
        Ok(warnings)
    }

    fn revision(&self, i: usize) -> Revision {
        self.told[i].revision.unwrap_or_default()
    }

    /// Whether two lead to one revision by objects of the same names and sizes: names hold the time of
    /// their making, so one is a copy of the other.
    fn is_copy(&self, a: usize, b: usize) -> bool {
        let objects = |i: usize| {
            let source = &self.all[i].opened.as_ref().ok()?.source;
            let all = source.base_snapshot().into_iter().chain(source.deltas());
            let all: Vec<_> = all.map(|s| (s.name.to_string(), s.bytes)).collect();
            Some((source.target, all))
        };
        match (objects(a), objects(b)) {
            (Some(a), Some(b)) => a == b && !a.1.is_empty(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_revision_wins_and_the_first_named_breaks_ties() {
        let of = |r: &[Option<i64>]| {
            let r: Vec<_> = r.iter().map(|r| r.map(Revision)).collect();
            rank(&r)
        };
        assert_eq!(
            of(&[Some(5), Some(9), Some(9), None, Some(7)]),
            [1, 2, 4, 0]
        );
        assert_eq!(of(&[None, None]), Vec::<usize>::new());
        assert_eq!(of(&[Some(3), Some(3)]), [0, 1]);
    }
}
