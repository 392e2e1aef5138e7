//! Computes from the store what the snapshot Leases publish, and updates them.
//!
//! The format of the Leases and the requests to Kubernetes are in `kubernetes::snapshot_leases`.

use crate::backup::chain;
use crate::backup::timeline::Timeline;
use crate::backup::{Catalog, Snapshot};
use crate::error::Result;
use crate::kubernetes::{Behind, LeaseState, RestorableRange, SnapState, SnapshotLeases};
use crate::mvcc::Revision;
use crate::prefix::Context;
use crate::prefix::contents::Contents;
use crate::prefix::restorable::Bases;
use crate::prefix::scan::{Depth, scan};
use crate::prefix::set_aside::{Purpose, decide_again, refuse_excluded_end};
use chrono::Utc;

/// What an operation has done, as far as the store does not show it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct News {
    /// The operation saved a full.
    pub full: bool,
    /// The deltas reach the cluster's newest revision, even if there was nothing to save.
    pub deltas: bool,
    /// The operation began a new timeline.
    pub timeline: bool,
}

/// Lists the store, and updates the Leases with the state of its newest timeline. Returns failures as
/// warnings, because the snapshots are saved nevertheless.
pub fn renew(ctx: &Context, leases: &SnapshotLeases, news: News) -> Vec<String> {
    match newest_state(ctx, news) {
        // A state from a fresh listing is never behind the Leases.
        Ok(state) => update(ctx, leases, &state).unwrap_or_default(),
        Err(e) => logged(vec![format!("the snapshot Leases were not renewed: {e}")]),
    }
}

/// Updates the Leases with a given state, without reading the store. Returns failures as warnings.
///
/// # Errors
/// Fails as [`SnapshotLeases::renew`].
pub fn update(
    ctx: &Context,
    leases: &SnapshotLeases,
    state: &LeaseState,
) -> Result<Vec<String>, Behind> {
    let store = &ctx.store;
    let renewed = leases.renew(state, Utc::now(), store.handle(), store.cancel());
    renewed.map(logged)
}

fn logged(warnings: Vec<String>) -> Vec<String> {
    for warning in &warnings {
        tracing::warn!("{warning}");
    }
    warnings
}

fn newest_state(ctx: &Context, news: News) -> Result<LeaseState> {
    let ctx = &ctx.apart();
    decide_again([ctx], Purpose::Save, || {
        let scan = scan(ctx, Depth::Doubtful)?;
        refuse_excluded_end(ctx, &scan.catalog, &scan.timelines, &scan.contents)?;
        let timeline = scan.timelines.newest(&scan.catalog)?;
        Ok(state(&scan.catalog, timeline, news))
    })
}

fn snap_state(snapshot: &Snapshot, revision: Revision) -> SnapState {
    SnapState {
        name: snapshot.name.to_string(),
        revision: revision.0,
        bytes: snapshot.bytes,
        at: snapshot.name.created_at(),
    }
}

/// Returns the state of a timeline, by names: the newest full, the newest delta after it, and the sum of the
/// deltas after the full.
pub fn state(catalog: &Catalog, timeline: &Timeline, news: News) -> LeaseState {
    let snapshot = |i: usize| &catalog.snapshots[i];
    let full = chain::bases(catalog, timeline).into_iter().next();
    let full = full.map(|i| snap_state(snapshot(i), snapshot(i).name.last));
    let full_revision = full.as_ref().map_or(0, |f| f.revision);
    // The metrics show the same range.
    let restorable = Bases::default().restorable(catalog, &Contents::default(), timeline);
    let mut state = LeaseState {
        full,
        restorable: restorable.last().map(|range| RestorableRange {
            first_revision: range.first_revision.0,
            last_revision: range.last_revision.0,
            first_time: range.first_time,
            last_time: range.last_time,
        }),
        full_is_new: news.full,
        deltas_are_current: news.deltas,
        timeline_began: news.timeline,
        ..LeaseState::default()
    };
    for member in &timeline.members {
        let delta = snapshot(member.snapshot);
        let revision = delta.name.last.min(member.until).0;
        if delta.name.is_full() || revision <= full_revision {
            continue;
        }
        state.accumulated_bytes = state.accumulated_bytes.saturating_add(delta.bytes);
        if state.delta.as_ref().is_none_or(|d| d.revision <= revision) {
            state.accumulated_events = (revision - full_revision).unsigned_abs();
            state.delta = Some(snap_state(delta, Revision(revision)));
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

    fn revisions(state: &LeaseState) -> Option<(i64, i64)> {
        let range = state.restorable?;
        Some((range.first_revision, range.last_revision))
    }

    fn state_of(names: &[(&str, u64)]) -> LeaseState {
        let listing = names.iter().map(|(name, bytes)| ListedObject {
            path: format!("v2/{name}"),
            bytes: *bytes,
        });
        let catalog = Catalog::from_listing(listing.collect());
        let timelines = Timelines::build(&catalog, &NamesOnly).unwrap();
        let timeline = timelines.newest(&catalog).unwrap();
        state(&catalog, timeline, News::default())
    }

    fn snap(name: &str, revision: i64, bytes: u64, created: i64) -> Option<SnapState> {
        Some(SnapState {
            name: name.to_owned(),
            revision,
            bytes,
            at: DateTime::from_timestamp(created, 0).unwrap(),
        })
    }

    #[test]
    fn deltas_after_the_newest_full_accumulate() {
        let mut names = vec![
            ("Full-00000000-00000010-100", 1000),
            ("Incr-00000011-00000020-110", 7),
            ("Incr-00000021-00000050-120.gz", 5),
        ];
        let s = state_of(&names);
        assert_eq!(s.full, snap("Full-00000000-00000010-100", 10, 1000, 100));
        assert_eq!(s.delta, snap("Incr-00000021-00000050-120.gz", 50, 5, 120));
        assert_eq!((s.accumulated_bytes, s.accumulated_events), (12, 40));
        assert_eq!(revisions(&s), Some((10, 50)));
        // Compacted up to the first delta, then up to the end.
        names.push(("Full-00000000-00000020-111", 1000));
        let s = state_of(&names);
        assert_eq!(s.full, snap("Full-00000000-00000020-111", 20, 1000, 111));
        assert_eq!((s.accumulated_bytes, s.accumulated_events), (5, 30));
        names.push(("Full-00000000-00000050-121", 1000));
        let s = state_of(&names);
        assert_eq!(s.full, snap("Full-00000000-00000050-121", 50, 1000, 121));
        assert_eq!(s.delta, None);
        assert_eq!((s.accumulated_bytes, s.accumulated_events), (0, 0));
        // Deltas alone.
        let s = state_of(&[("Incr-00000011-00000020-110", 7)]);
        assert_eq!((s.full, s.accumulated_events), (None, 20));
        assert_eq!(s.restorable, None);
        // A gap before the newest delta, then a full after the gap.
        let mut names = vec![
            ("Full-00000000-00000010-100", 1000),
            ("Incr-00000011-00000020-110", 7),
            ("Incr-00000031-00000040-120", 7),
        ];
        assert_eq!(revisions(&state_of(&names)), Some((10, 20)));
        names.push(("Full-00000000-00000035-121", 1000));
        assert_eq!(revisions(&state_of(&names)), Some((35, 40)));
    }
}
