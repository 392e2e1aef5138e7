//! What is kept beside snapshots and goes with them: that a full begins a timeline, that it is pinned,
//! that a snapshot is excluded.
//!
//! Whoever sees a snapshot in the target must not see it without the first and the last of them.

use super::plan::Planned;
use super::round::{Round, is_full};
use crate::bucket::Snapshot;
use crate::bucket::catalog::{EXCLUDE_SUFFIX, PINS, TIMELINES};
use crate::error::{Reason, Result};
use crate::store::Store;

/// A note is a line for people.
const MOST_BYTES: u64 = 64 << 10;

/// What is written before a snapshot has its name.
///
/// # Errors
/// Those of both stores.
pub(super) fn before(round: &Round<'_>, planned: &Planned, snapshot: &Snapshot) -> Result<()> {
    if is_full(snapshot) && snapshot.begins_timeline {
        carry(round, TIMELINES, planned, snapshot)?;
    }
    if snapshot.excluded {
        let mark = format!("{}{EXCLUDE_SUFFIX}", planned.path);
        create(&round.to.store, &mark, b"")?;
    }
    Ok(())
}

/// What is written once it has it.
///
/// # Errors
/// Those of both stores.
pub(super) fn after(round: &Round<'_>, planned: &Planned, snapshot: &Snapshot) -> Result<()> {
    if snapshot.excluded {
        // Other tools may know the store's own mark alone.
        round.to.store.set_excluded(&planned.path, true)?;
    }
    if is_full(snapshot) && snapshot.pinned {
        carry(round, PINS, planned, snapshot)?;
    }
    Ok(())
}

/// Of a full that the target has already: notes that it lacks.
///
/// # Errors
/// Those of both stores.
pub(super) fn keep(round: &Round<'_>, planned: &Planned) -> Result<()> {
    let snapshot = &round.source.snapshots[planned.source];
    if !is_full(snapshot) || !(snapshot.begins_timeline || snapshot.pinned) {
        return Ok(());
    }
    let there = round.target.snapshots.iter();
    let Some(there) = there.into_iter().find(|t| t.path == planned.path) else {
        return Ok(());
    };
    if snapshot.begins_timeline && !there.begins_timeline {
        carry(round, TIMELINES, planned, snapshot)?;
    }
    if snapshot.pinned && !there.pinned {
        carry(round, PINS, planned, snapshot)?;
    }
    Ok(())
}

fn carry(round: &Round<'_>, folder: &str, planned: &Planned, snapshot: &Snapshot) -> Result<()> {
    let note = format!("{folder}/{}", snapshot.name);
    let Some(text) = round.from.store.read_small(&note, MOST_BYTES)? else {
        // Another look tells whether it still counts.
        return Err(Reason::SnapshotVanished.error(format!(
            "{} was listed and is gone: it was deleted meanwhile; run again",
            round.from.store.name(&note)
        )));
    };
    create(
        &round.to.store,
        &format!("{folder}/{}", planned.name),
        &text,
    )
}

/// Writes a note, unless it is there.
fn create(store: &Store, path: &str, text: &[u8]) -> Result<()> {
    if !store.exists(path)? {
        store.create_small(path, text)?;
    }
    Ok(())
}
