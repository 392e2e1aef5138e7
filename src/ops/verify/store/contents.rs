//! Reads whole snapshots and checks everything that one snapshot alone can show: checksums, compression,
//! pages, JSON.
//!
//! Chains are not checked here.

use super::Verification;
use crate::backup::Kind;
use crate::base::parallel::find_first;
use crate::base::{lock, unpoisoned};
use crate::error::{Reason, Result};
use crate::fold::rebuild::read_every_page;
use crate::mvcc::{Base, HashKv};
use crate::prefix::Context;
use crate::prefix::open::SnapshotReader;
use crate::prefix::scan::Scan;
use chrono::{DateTime, Utc};
use std::collections::BTreeMap;
use std::sync::Mutex;

/// The largest number of snapshots that are read at once. Each needs its own buffers.
const MAX_PARALLEL: usize = 4;

/// What is known of a snapshot after reading all of it.
#[derive(Debug, Clone, Default)]
pub(super) struct SnapshotContents {
    pub(super) base: Option<Base>,
    pub(super) hash: Option<HashKv>,
    pub(super) last_time: Option<DateTime<Utc>>,
}

impl Verification<'_> {
    /// Reads the given snapshots, except those that were read before. Adds damaged ones to the findings.
    pub(super) fn check_contents(&mut self, snapshots: Vec<usize>) -> Result<()> {
        let mut unread = Vec::new();
        for i in snapshots {
            let contents = &self.scan.contents;
            if !self.contents.contains_key(&i)
                && !contents.surveys.contains_key(&i)
                && !contents.unreadable.contains_key(&i)
            {
                unread.push(i);
            }
        }
        for (i, result) in read_all(self.ctx, self.scan, &unread)? {
            match result {
                Ok(contents) => {
                    if let Some(base) = contents.base {
                        self.known_bases.insert(i, base);
                        self.note_past_name(i);
                    }
                    self.contents.insert(i, contents);
                }
                Err(e) => {
                    self.error(&e, None, &[i]);
                    self.unusable.insert(i);
                    self.contents.insert(i, SnapshotContents::default());
                }
            }
        }
        Ok(())
    }
}

/// Reads whole snapshots, several at once. Returns for each one its contents or the damage.
fn read_all(
    ctx: &Context,
    scan: &Scan,
    snapshots: &[usize],
) -> Result<BTreeMap<usize, Result<SnapshotContents>>> {
    // Fulls are read one at a time, because each needs a temporary file of its size.
    let one_full = Mutex::new(());
    let results = Mutex::new(BTreeMap::new());
    let excluded = Mutex::new(Vec::new());
    let reading = SnapshotReader::new(ctx, snapshots.iter().map(|&i| &scan.catalog.snapshots[i]));
    let read = |nth| {
        let guard = (reading.snapshot(nth).name.is_full()).then(|| lock(&one_full));
        let result = read_whole(ctx, &reading, nth);
        drop(guard);
        match result {
            Err(e) if e.is_of_excluded() => {
                lock(&excluded).push(e);
                Ok(None)
            }
            // Without any key the next snapshot cannot be opened either.
            Err(e) if e.reason() == Reason::CannotDecrypt && !ctx.keys.decrypts() => Err(e),
            Err(e) if !e.reason().is_of_one_object() => Err(e),
            result => {
                lock(&results).insert(snapshots[nth], result);
                Ok(None::<()>)
            }
        }
    };
    find_first(ctx.threads.min(MAX_PARALLEL), snapshots.len(), read)?;
    ctx.marks
        .decide_without(unpoisoned(excluded.into_inner()))?;
    Ok(unpoisoned(results.into_inner()))
}

/// Reads a snapshot to its end.
fn read_whole(ctx: &Context, reading: &SnapshotReader<'_>, nth: usize) -> Result<SnapshotContents> {
    let snapshot = reading.snapshot(nth);
    let at = ctx.at(snapshot);
    match snapshot.name.kind {
        Kind::Full => {
            let (db, base) = reading.full(nth)?;
            let hash = read_every_page(&db).map_err(at)?;
            Ok(SnapshotContents {
                base: Some(base),
                hash: Some(hash),
                last_time: None,
            })
        }
        Kind::Incr => {
            let mut delta = reading.delta_in_turn(nth)?;
            let (mut value, mut last_time) = (Vec::new(), None);
            while let Some(e) = delta.next().map_err(&at)? {
                value.clear();
                e.change.append_value(e.main, &mut value).map_err(&at)?;
                // An unreadable time is no damage: only a restore to a time needs it.
                if let Ok(time) = e.instant() {
                    last_time = last_time.max(Some(time));
                }
            }
            Ok(SnapshotContents {
                last_time,
                ..SnapshotContents::default()
            })
        }
    }
}
