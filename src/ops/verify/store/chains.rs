//! Checks chains: that their deltas have no gap, that they fold, and that each equals the next full.
//!
//! Nothing is restored here.

use super::{Level, Verification, deeper};
use crate::backup::chain::{self, Chain, ChainSpan, Choice};
use crate::backup::timeline::Timeline;
use crate::error::{Reason, Result};
use crate::mvcc::{Base, HashKv, KeepHistory, Revision};
use crate::ops::findings::gap_after;
use crate::prefix::open::State;
use crate::telemetry::progress::Step;
use serde::Serialize;

/// A chain that was verified.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct VerifiedChain {
    /// The ID of the timeline.
    pub timeline: String,
    /// The path of the chain's full.
    pub base: String,
    /// Number of deltas after the full.
    pub deltas: usize,
    /// The last revision of the chain.
    pub last_revision: Revision,
    /// etcd's HashKV at `last_revision`, with all the history that the chain has. null if it was not folded.
    pub hash_kv: Option<u32>,
    /// The compacted revision that `hash_kv` depends on; -1 if nothing was compacted. null if the chain was
    /// not folded.
    pub compact_revision: Option<Revision>,
    /// Number of live keys at `last_revision`; null if the chain was not folded.
    pub live_keys: Option<u64>,
    /// Number of events of the deltas; null if the chain was not folded.
    pub events: Option<u64>,
    /// Whether the next full of the timeline holds the result of this chain's fold. null if that was not
    /// compared: without --all-chains, below the level fold, or if the deltas do not lead up to the next
    /// full.
    pub equals_next: Option<bool>,
}

/// The chain of a full and its deltas up to `target`.
fn chain_of(span: &ChainSpan, target: Revision) -> Chain {
    Chain {
        base: span.base,
        deltas: span.deltas.clone(),
        target,
    }
}

impl Verification<'_> {
    /// Verifies the chain that a restore of the newest state would use.
    pub(super) fn verify_newest_chain(&mut self, timeline: &Timeline) -> Result<()> {
        let reads_contents = self.options.level >= Level::Checksums;
        let chain = loop {
            match chain::choose(&self.scan.catalog, timeline, None, &self.known_bases) {
                // The choice depends on what this full holds beyond its name: read the full and choose again.
                Ok(Choice::ReadFirst(i)) if reads_contents && !self.unusable.contains(&i) => {
                    self.check_contents(vec![i])?;
                    if self.unusable.contains(&i) {
                        return Ok(());
                    }
                }
                Ok(Choice::ReadFirst(i)) => {
                    let e = gap_after(self.scan, timeline, i, &deeper());
                    self.error(&e, Some(timeline), &[i]);
                    return Ok(());
                }
                Ok(Choice::Chosen(chain)) => {
                    if !reads_contents || self.known_bases.contains_key(&chain.base) {
                        break chain;
                    }
                    self.check_contents(vec![chain.base])?;
                    if self.unusable.contains(&chain.base) {
                        break chain;
                    }
                }
                Err(e) => {
                    self.error(&e, Some(timeline), &[]);
                    return Ok(());
                }
            }
        };
        if reads_contents {
            self.check_contents(chain.deltas.iter().map(|l| l.snapshot).collect())?;
        }
        let mut outcome = self.chain_outcome(timeline, &chain);
        if self.options.level >= Level::Fold {
            self.fold(timeline, &chain, &mut outcome)?;
        }
        self.chains.push(outcome);
        Ok(())
    }

    /// Verifies every chain of a timeline.
    pub(super) fn verify_all_chains(&mut self, timeline: &Timeline) -> Result<()> {
        let spans = chain::spans(&self.scan.catalog, timeline, &self.known_bases);
        if spans.is_empty() {
            let e = Reason::NoSnapshots.error(format!(
                "timeline {} has no full snapshot to start from",
                timeline.id
            ));
            self.error(&e, Some(timeline), &[]);
        } else {
            self.report_deltas_without_base(timeline);
        }
        for span in spans {
            self.report_gap(timeline, &span);
            let chain = chain_of(&span, span.reached);
            let mut outcome = self.chain_outcome(timeline, &chain);
            // Timelines share the chains before their fork.
            let is_verified = self.chains.iter().any(|c| {
                (&c.base, c.deltas, c.last_revision)
                    == (&outcome.base, outcome.deltas, outcome.last_revision)
            });
            if is_verified {
                continue;
            }
            if self.options.level >= Level::Fold
                && let Some(compact) = self.fold(timeline, &chain, &mut outcome)?
            {
                self.compare_with_next(timeline, &span, compact, &mut outcome)?;
            }
            self.chains.push(outcome);
        }
        Ok(())
    }

    fn chain_outcome(&self, timeline: &Timeline, chain: &Chain) -> VerifiedChain {
        VerifiedChain {
            timeline: timeline.id.clone(),
            base: self.path(chain.base),
            deltas: chain.deltas.len(),
            last_revision: chain.target,
            hash_kv: None,
            compact_revision: None,
            live_keys: None,
            events: None,
            equals_next: None,
        }
    }

    fn is_usable(&self, chain: &Chain) -> bool {
        !chain.snapshots().any(|i| self.unusable.contains(&i))
    }

    /// Reports the deltas that no full precedes.
    fn report_deltas_without_base(&mut self, timeline: &Timeline) {
        let deltas = chain::without_base(&self.scan.catalog, timeline, &self.known_bases);
        if deltas.is_empty() {
            return;
        }
        let message = "no full snapshot precedes these deltas: their events cannot be restored";
        match self.options.level {
            // The contents were not read, and the next full may hold the history.
            Level::Names => {
                let message = format!("{message}, unless the next full holds them");
                self.note(Some(timeline), &deltas, "MissingBase", message);
            }
            _ => {
                let e = Reason::RevisionGap.error(message);
                self.error(&e, Some(timeline), &deltas);
            }
        }
    }

    /// Reports the revisions that are missing between a chain and the next full.
    fn report_gap(&mut self, timeline: &Timeline, span: &ChainSpan) {
        let next = span.next.map(|(i, _)| i);
        // A full that holds history covers revisions before its own.
        let first_in_next = next
            .and_then(|i| self.known_bases.get(&i))
            .map(Base::first_revision);
        let neighbors: Vec<usize> = [Some(span.base), next].into_iter().flatten().collect();
        if let Some(first_missing) = span.missing.first().map(|m| m.0) {
            let missing = chain::show_ranges(&span.missing);
            if first_in_next.is_some_and(|n| n <= first_missing) {
                let message = format!(
                    "deltas are missing (revisions {missing}), but the next full holds their history"
                );
                self.note(Some(timeline), &neighbors, "GapIsCovered", message);
                return;
            }
            let e = Reason::RevisionGap.error(format!(
                "the deltas after {} have a gap: revisions {missing} are missing",
                self.path(span.base)
            ));
            self.error(&e, Some(timeline), &neighbors);
            return;
        }
        let Some((_, next_revision)) = span.next else {
            return;
        };
        let first = first_in_next.unwrap_or(next_revision);
        if span.reached.next() < first {
            let message = format!(
                "revisions {} are in no snapshot: no deltas lead up to the full after them",
                chain::show_ranges(&[(span.reached.next(), first.previous())])
            );
            self.note(Some(timeline), &neighbors, "RevisionsNotCovered", message);
        }
    }

    /// Folds a chain. Returns the compacted revision of its hash; `None` if the chain is damaged.
    fn fold(
        &mut self,
        timeline: &Timeline,
        chain: &Chain,
        outcome: &mut VerifiedChain,
    ) -> Result<Option<Revision>> {
        if !self.is_usable(chain) {
            return Ok(None);
        }
        match self.hash_chain(timeline, chain, None) {
            Ok((hash, events)) => {
                outcome.hash_kv = Some(hash.hash);
                outcome.compact_revision = Some(hash.compact_revision);
                outcome.live_keys = Some(hash.live_keys);
                outcome.events = Some(events);
                Ok(Some(hash.compact_revision))
            }
            Err(e) if e.reason().is_bad_data() => {
                let damaged = self.snapshots_named_by(&e.to_string());
                let concerned = if damaged.is_empty() {
                    &[chain.base]
                } else {
                    damaged.as_slice()
                };
                self.error(&e, Some(timeline), concerned);
                self.unusable.extend(damaged);
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }

    /// Returns the snapshots with whose name an error's message begins.
    fn snapshots_named_by(&self, message: &str) -> Vec<usize> {
        (0..self.scan.catalog.snapshots.len())
            .filter(|&i| message.starts_with(&self.ctx.store.name(&self.path(i))))
            .collect()
    }

    /// Returns the HashKV of a chain at its end, and the number of events. The hash counts as compacted at
    /// `compact`; with `None`, it includes all the history of the chain.
    fn hash_chain(
        &self,
        timeline: &Timeline,
        chain: &Chain,
        compact: Option<Revision>,
    ) -> Result<(HashKv, u64)> {
        let ctx = self.ctx;
        let _step = Step::new(
            format!("fold {}", self.snapshot(chain.base).name.label()),
            None,
        );
        let source = State::of_chain(ctx, self.scan, timeline, chain)?;
        let compact = match compact {
            Some(compact) => compact,
            None => source.compact_revision(ctx, KeepHistory::All)?,
        };
        source.hash(ctx, compact, false)
    }

    /// Compares the fold of a chain with the next full, at the newest revision and with the history that both
    /// hold.
    fn compare_with_next(
        &mut self,
        timeline: &Timeline,
        span: &ChainSpan,
        compact: Revision,
        outcome: &mut VerifiedChain,
    ) -> Result<()> {
        let Some((next, next_revision)) = span.next.filter(|n| !self.unusable.contains(&n.0))
        else {
            return Ok(());
        };
        let Some(&next_base) = self.known_bases.get(&next) else {
            return Ok(());
        };
        let at = span.reached.min(next_revision);
        if at < next_base.first_revision() {
            return Ok(());
        }
        let compact = compact.max(next_base.compact_revision);
        let hashes = self.hash_both(timeline, span, (next, next_base), at, compact);
        let (chain_hash, full_hash) = match hashes {
            Ok(hashes) => hashes,
            Err(e) if e.reason().is_bad_data() => {
                self.error(&e, Some(timeline), &[span.base, next]);
                return Ok(());
            }
            Err(e) => return Err(e),
        };
        let is_equal =
            (chain_hash.hash, chain_hash.live_keys) == (full_hash.hash, full_hash.live_keys);
        outcome.equals_next = Some(is_equal);
        if !is_equal {
            let e = Reason::HistoryDiffers.error(format!(
                "at revision {at} {} and its deltas fold to HashKV {} with {} keys, but {} has HashKV {} with {} keys (both compacted at {compact}): they hold different histories, or one of them was made from damaged data",
                self.path(span.base),
                chain_hash.hash,
                chain_hash.live_keys,
                self.path(next),
                full_hash.hash,
                full_hash.live_keys
            ));
            self.error(&e, Some(timeline), &[span.base, next]);
        }
        Ok(())
    }

    /// Returns the hashes of a chain and of the next full, at the same revision and as if compacted alike.
    fn hash_both(
        &self,
        timeline: &Timeline,
        span: &ChainSpan,
        (next, next_base): (usize, Base),
        at: Revision,
        compact: Revision,
    ) -> Result<(HashKv, HashKv)> {
        let (chain_hash, _) = self.hash_chain(timeline, &chain_of(span, at), Some(compact))?;
        // Reading the full may have computed this very hash.
        let known = self.contents.get(&next).and_then(|c| c.hash);
        if let Some(known) = known
            && known.compact_revision == compact
            && at == next_base.revision
        {
            return Ok((chain_hash, known));
        }
        let full_alone = Chain {
            base: next,
            deltas: Vec::new(),
            target: at,
        };
        let (full_hash, _) = self.hash_chain(timeline, &full_alone, Some(compact))?;
        Ok((chain_hash, full_hash))
    }
}
