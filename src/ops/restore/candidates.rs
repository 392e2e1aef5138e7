//! The choice between several backups: the one that leads to the highest revision and can be read.
//!
//! Ranking is a pure function of revisions; opening the backups is not. Writes nothing.

use super::NamedBackup;
use crate::base::opt::TIMELINE;
use crate::error::{Error, Reason, Result};
use crate::mvcc::{HashKv, Revision};
use crate::prefix::Context;
use crate::prefix::open::BackupLocation;
use crate::prefix::open::State;
use crate::prefix::scan::{Depth, Scan, scan};
use crate::prefix::select::{At, StateRequest, timeline_of};
use serde::Serialize;

/// What a restore does with a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum CandidateStatus {
    /// The restore reads this one.
    Chosen,
    /// It can be restored, but another leads to a higher revision, or to the same and was named first.
    NotChosen,
    /// It cannot be read, or does not hold the requested state.
    Excluded,
}

/// A candidate in the report. The fields are a contract.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("oneOf" = [
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
])))]
pub struct CandidateFate {
    /// The store's URL, or the plain snapshot file.
    pub store: String,
    /// Whether it is restored.
    pub status: CandidateStatus,
    /// The revision that it leads to. null if that is not known.
    pub revision: Option<Revision>,
    /// The timeline that leads there. null if that is not known.
    pub timeline: Option<String>,
    /// Why it is excluded: a reason from exit-codes.md; else null.
    pub reason: Option<Reason>,
    /// The reason as human-readable text; it may change.
    pub message: Option<String>,
}

/// A backup that may be restored, and the result of opening it.
pub(super) struct Candidate<'a> {
    backup: &'a NamedBackup,
    pub(super) opened: Result<OpenedBackup<'a>>,
    /// The wall behind which its history begins; the newest one is that of the live history.
    wall: Option<i64>,
}

/// A backup that could be opened: judging by names, it has a chain up to the requested state.
pub(super) struct OpenedBackup<'a> {
    pub(super) ctx: &'a Context,
    location: &'a BackupLocation,
    pub(super) source: State,
    scan: Option<Scan>,
}

impl<'a> OpenedBackup<'a> {
    fn new(backup: &'a NamedBackup, request: &StateRequest) -> Result<Self> {
        let location = backup.location.as_ref().map_err(Error::again)?;
        let (source, scan) = location.open_with_scan(request)?;
        Ok(OpenedBackup {
            ctx: location.context(),
            location,
            source,
            scan,
        })
    }
}

impl<'a> Candidate<'a> {
    fn open(backup: &'a NamedBackup, request: &StateRequest) -> Self {
        let opened = OpenedBackup::new(backup, request);
        let wall = match &opened {
            Ok(opened) => opened.source.wall,
            // What cannot be restored here must not be restored from a history that was left.
            Err(_) => backup.context().and_then(|ctx| wall_by_names(ctx, request)),
        };
        Candidate {
            backup,
            opened,
            wall,
        }
    }

    fn outcome(&self) -> CandidateFate {
        let source = self.opened.as_ref().ok().map(|o| &o.source);
        CandidateFate {
            store: self.backup.name.clone(),
            status: CandidateStatus::NotChosen,
            revision: source.map(|s| s.revision),
            timeline: source.map(|s| s.timeline.clone()),
            reason: None,
            message: None,
        }
    }

    /// Opens this candidate's chain to `revision` on the timeline that it is ranked by.
    pub(super) fn source_at(&self, revision: Revision) -> Result<State> {
        let opened = self.opened.as_ref().map_err(Error::again)?;
        let OpenedBackup {
            ctx, source, scan, ..
        } = opened;
        let request = StateRequest {
            at: At::Revision(revision),
            timeline: source.timeline_id().map(str::to_owned),
            ..StateRequest::default()
        };
        match scan {
            Some(scan) => State::open(ctx, scan, &request),
            None => opened.location.open(&request),
        }
    }

    /// Returns the HashKV of one of this candidate's sources, compacted at `compact`.
    pub(super) fn hash(
        &self,
        source: &State,
        compact: Revision,
        detach_leases: bool,
    ) -> Result<HashKv> {
        let ctx = self.opened.as_ref().map_err(Error::again)?.ctx;
        Ok(source.hash(ctx, compact, detach_leases)?.0)
    }
}

/// Returns the wall behind which the requested history of a store begins, by names.
fn wall_by_names(ctx: &Context, request: &StateRequest) -> Option<i64> {
    let scan = scan(ctx, Depth::Names).ok()?;
    let timeline = timeline_of(ctx, &scan, request).ok()?;
    timeline.wall.as_ref().map(|wall| wall.second)
}

/// Returns whether a failure is the candidate's own, so that another may be restored instead.
pub(super) fn is_candidate_failure(e: &Error) -> bool {
    let is_its_own = !matches!(
        e.reason(),
        Reason::Terminated | Reason::Internal | Reason::NoSpace | Reason::Usage
    );
    // If the operation plans again, this candidate may be usable then.
    is_its_own && !e.is_of_excluded()
}

/// Returns the order in which candidates are tried: the highest revision first; among equals, the one
/// named first. Candidates without a revision are left out.
pub(super) fn rank(revisions: &[Option<Revision>]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..revisions.len())
        .filter(|&i| revisions[i].is_some())
        .collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(revisions[i]), i));
    order
}

/// All candidates, with what is reported of each.
pub(super) struct Candidates<'a> {
    pub(super) all: Vec<Candidate<'a>>,
    pub(super) outcomes: Vec<CandidateFate>,
}

impl<'a> Candidates<'a> {
    /// Opens all candidates.
    ///
    /// # Errors
    /// Fails only with errors that are not a candidate's own, such as `Terminated`, `NoSpace` and
    /// `Usage`.
    pub(super) fn open(backups: &'a [NamedBackup], request: &StateRequest) -> Result<Self> {
        let all: Vec<Candidate<'a>> = backups
            .iter()
            .map(|b| Candidate::open(b, request))
            .collect();
        let outcomes = all.iter().map(Candidate::outcome).collect();
        let mut candidates = Candidates { all, outcomes };
        for i in 0..candidates.all.len() {
            let failed = candidates.all[i].opened.as_ref().err().map(Error::again);
            match failed {
                Some(e) if is_candidate_failure(&e) => candidates.exclude(i, &e),
                Some(e) => return Err(e),
                None => {}
            }
        }
        if request.timeline.is_none() {
            candidates.exclude_left_histories();
        }
        Ok(candidates)
    }

    /// Excludes the candidates whose history was left, because another candidate holds the one that began later.
    fn exclude_left_histories(&mut self) {
        let live = self.all.iter().map(|c| c.wall).max().flatten();
        for i in 0..self.all.len() {
            let is_left = self.all[i].wall < live;
            if is_left && self.outcomes[i].status != CandidateStatus::Excluded {
                let timeline = self.outcomes[i].timeline.clone().unwrap_or_default();
                let e = Reason::HistoryMismatch.error(format!(
                    "its timeline {timeline} is a history that was left: another store has the one that began later; restore it with this store alone, or with {TIMELINE}"
                ));
                self.exclude(i, &e);
            }
        }
    }

    /// Returns the indexes of the candidates that are not excluded, the best first.
    pub(super) fn ranked(&self) -> Vec<usize> {
        let mut revisions = Vec::new();
        for outcome in &self.outcomes {
            let is_excluded = outcome.status == CandidateStatus::Excluded;
            revisions.push(outcome.revision.filter(|_| !is_excluded));
        }
        rank(&revisions)
    }

    /// Excludes a candidate because of a failure.
    pub(super) fn exclude(&mut self, i: usize, e: &Error) {
        let outcome = &mut self.outcomes[i];
        if self.all.len() > 1 {
            tracing::warn!("{} is not used: {e} [{}]", outcome.store, e.reason());
        }
        outcome.status = CandidateStatus::Excluded;
        outcome.reason = Some(e.reason());
        outcome.message = Some(e.to_string());
    }

    /// Returns the error for a restore without any candidate left. `write_failure` is the first error while a
    /// candidate was being restored.
    pub(super) fn none_left(&self, write_failure: Option<Error>) -> Error {
        let not_opened = self.all.iter().filter_map(|c| c.opened.as_ref().err());
        // Damage explains more than a store that is missing.
        let not_opened = not_opened.reduce(|a, b| if b.set_aside().is_some() { b } else { a });
        let failure = write_failure.or_else(|| not_opened.map(Error::again));
        let is_known = |name: &str| {
            let mut contexts = self.all.iter().filter_map(|c| c.backup.context());
            contexts.any(|ctx| ctx.marks.has(name))
        };
        if let Some(e) = &failure
            && e.set_aside().is_some_and(|name| !is_known(name))
        {
            // The restore goes around this damage next.
            return e.again();
        }
        let messages: Vec<String> = self
            .outcomes
            .iter()
            .filter_map(|o| Some(format!("{}: {}", o.store, o.message.as_ref()?)))
            .collect();
        match failure {
            Some(e) if self.all.len() == 1 => e,
            Some(e) => e.reworded(format!(
                "none of the candidates can be restored: {}",
                messages.join("; ")
            )),
            None => Reason::NoSnapshots.error("there is no candidate to restore from"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_revision_wins_and_the_first_named_breaks_ties() {
        let ranked = |r: &[Option<i64>]| {
            let r: Vec<_> = r.iter().map(|r| r.map(Revision)).collect();
            rank(&r)
        };
        assert_eq!(
            ranked(&[Some(5), Some(9), Some(9), None, Some(7)]),
            [1, 2, 4, 0]
        );
        assert_eq!(ranked(&[None, None]), Vec::<usize>::new());
        assert_eq!(ranked(&[Some(3), Some(3)]), [0, 1]);
    }
}
