//! What the snapshot Leases shall say, told from what the store holds.
//!
//! `compact` and `snapshot` call it when they have written; how Leases are written, `kubernetes` knows.

use crate::backup::chain::{self, KnownBases};
use crate::backup::timeline::Timeline;
use crate::backup::{Catalog, Snapshot};
use crate::error::Result;
use crate::kubernetes::{Behind, LeaseState, SnapState, SnapshotLeases};
use crate::mvcc::Revision;
use crate::ops::Context;
use crate::ops::scan::{Depth, scan};
use chrono::Utc;

/// What a run has done, beyond what the store shows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct News {
    /// It made a full.
    pub full: bool,
    /// It brought the deltas up to the cluster's newest revision, whether or not there was one to take.
    pub deltas: bool,
    /// It began a new timeline.
    pub timeline: bool,
}

/// Lists the store again, and has the Leases say how far its newest timeline is. What fails is told as
/// warnings: the snapshots are there all the same.
pub fn renew(ctx: &Context, leases: &SnapshotLeases, news: News) -> Vec<String> {
    match newest(ctx, news) {
        // A state that is new is never behind.
        Ok(state) => bring(ctx, leases, &state).unwrap_or_default(),
        Err(e) => told(vec![format!("the snapshot Leases were not renewed: {e}")]),
    }
}

/// Has the Leases say this, without a look at the store. What fails is told as warnings.
///
/// # Errors
/// Those of [`SnapshotLeases::renew`].
pub fn bring(
    ctx: &Context,
    leases: &SnapshotLeases,
    state: &LeaseState,
) -> Result<Vec<String>, Behind> {
    let store = &ctx.store;
    let renewed = leases.renew(state, Utc::now(), store.handle(), store.cancel());
    renewed.map(told)
}

fn told(warnings: Vec<String>) -> Vec<String> {
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    warnings
}

fn newest(ctx: &Context, news: News) -> Result<LeaseState> {
    let scan = scan(ctx, Depth::Doubtful)?;
    let timeline = scan.timelines.newest(&scan.catalog)?;
    Ok(state(&scan.catalog, timeline, news))
}

fn saved(snapshot: &Snapshot, revision: Revision) -> SnapState {
    SnapState {
        name: snapshot.name.to_string(),
        revision: revision.0,
        bytes: snapshot.bytes,
        at: snapshot.name.created_at(),
    }
}

/// How far a timeline is, by names.
pub fn state(catalog: &Catalog, timeline: &Timeline, news: News) -> LeaseState {
    let snapshot = |i: usize| &catalog.snapshots[i];
    let full = chain::bases(catalog, timeline).into_iter().next();
    let full = full.map(|i| saved(snapshot(i), snapshot(i).name.last));
    let from = full.as_ref().map_or(0, |f| f.revision);
    // By names, as the metrics have it.
    let restorable = chain::restorable(catalog, timeline, &KnownBases::new());
    let mut state = LeaseState {
        full,
        restorable: restorable.last().map(|(first, last)| (first.0, last.0)),
        full_is_new: news.full,
        deltas_are_current: news.deltas,
        timeline_began: news.timeline,
        ..LeaseState::default()
    };
    for member in &timeline.members {
        let delta = snapshot(member.snapshot);
        let revision = delta.name.last.min(member.until).0;
        if delta.name.is_full() || revision <= from {
            continue;
        }
        state.accumulated_bytes = state.accumulated_bytes.saturating_add(delta.bytes);
        if state.delta.as_ref().is_none_or(|d| d.revision <= revision) {
            state.accumulated_events = (revision - from).unsigned_abs();
            state.delta = Some(saved(delta, Revision(revision)));
        }
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::catalog::ListedObject;
    use crate::backup::timeline::{NamesOnly, Timelines};
    use chrono::DateTime;

    fn of(names: &[(&str, u64)]) -> LeaseState {
        let listing = names.iter().map(|(name, bytes)| ListedObject {
            path: format!("v2/{name}"),
            bytes: *bytes,
        });
        let catalog = Catalog::from_listing(listing.collect());
        let timelines = Timelines::build(&catalog, &NamesOnly).unwrap();
        let timeline = timelines.newest(&catalog).unwrap();
        state(&catalog, timeline, News::default())
    }

    fn at(name: &str, revision: i64, bytes: u64, created: i64) -> Option<SnapState> {
        Some(SnapState {
            name: name.to_owned(),
            revision,
            bytes,
            at: DateTime::from_timestamp(created, 0).unwrap(),
        })
    }

    #[test]
    fn what_has_accumulated_is_what_lies_after_the_newest_full() {
        let mut names = vec![
            ("Full-00000000-00000010-100", 1000),
            ("Incr-00000011-00000020-110", 7),
            ("Incr-00000021-00000050-120.gz", 5),
        ];
        let s = of(&names);
        assert_eq!(s.full, at("Full-00000000-00000010-100", 10, 1000, 100));
        assert_eq!(s.delta, at("Incr-00000021-00000050-120.gz", 50, 5, 120));
        assert_eq!((s.accumulated_bytes, s.accumulated_events), (12, 40));
        assert_eq!(s.restorable, Some((10, 50)));
        // Compacted up to the first delta, then up to the end.
        names.push(("Full-00000000-00000020-111", 1000));
        let s = of(&names);
        assert_eq!(s.full, at("Full-00000000-00000020-111", 20, 1000, 111));
        assert_eq!((s.accumulated_bytes, s.accumulated_events), (5, 30));
        names.push(("Full-00000000-00000050-121", 1000));
        let s = of(&names);
        assert_eq!(s.full, at("Full-00000000-00000050-121", 50, 1000, 121));
        assert_eq!(s.delta, None);
        assert_eq!((s.accumulated_bytes, s.accumulated_events), (0, 0));
        // Deltas alone.
        let s = of(&[("Incr-00000011-00000020-110", 7)]);
        assert_eq!((s.full, s.accumulated_events), (None, 20));
        assert_eq!(s.restorable, None);
        // Behind a gap, and past it again.
        let mut names = vec![
            ("Full-00000000-00000010-100", 1000),
            ("Incr-00000011-00000020-110", 7),
            ("Incr-00000031-00000040-120", 7),
        ];
        assert_eq!(of(&names).restorable, Some((10, 20)));
        names.push(("Full-00000000-00000035-121", 1000));
        assert_eq!(of(&names).restorable, Some((35, 40)));
    }
}
