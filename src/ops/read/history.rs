//! One key's history: every version that any snapshot of a timeline still holds.
//!
//! All deltas are read, the oldest full, and where deltas are missing the fulls behind the hole. It
//! does not check that versions follow each other: what is recorded is told. `cli` calls it.

use super::{SORT_BUFFER_BYTES, versions};
use crate::backup::chain::{self, KnownBases, Range};
use crate::base::ReadAt;
use crate::base::lock;
use crate::bolt::Database;
use crate::error::{Error, Reason, Result};
use crate::mvcc::history::key_bucket;
use crate::mvcc::{Base, KeyValue, RecordKey, Revision};
use crate::ops::Context;
use crate::ops::external_sort::{Sorted, Sorter};
use crate::ops::fold::open::Reading;
use crate::ops::fold::select::Step;
use crate::ops::fold::{Request, Source, select};
use crate::ops::parallel::first;
use crate::ops::restore::Backup;
use crate::ops::scan::{Depth, scan};
use crate::ops::tags::{unless_excluded, without_excluded};
use std::path::Path;
use std::sync::Mutex;

/// What is known of a key's past.
#[derive(Debug)]
pub struct History {
    /// The timeline's ID; `None` of a plain snapshot file.
    pub timeline: Option<String>,
    /// The newest revision that was looked at.
    pub revision: Revision,
    /// Revisions up to `revision` of which no snapshot tells every change: versions may be missing
    /// there.
    pub missing: Vec<Range>,
    /// What an operator should know.
    pub warnings: Vec<String>,
    versions: Sorted,
    last: Option<(Revision, u32)>,
}

/// A version of the key, or its deletion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version<'a> {
    /// The revision of the change.
    pub revision: Revision,
    /// When the snapshotter saw it, in RFC 3339; `None` where only a full holds it.
    pub time: Option<&'a str>,
    /// The record; `None` where the key was deleted.
    pub kv: Option<KeyValue<'a>>,
}

impl History {
    /// Collects the versions of `key` on a timeline, or on the newest one.
    ///
    /// # Errors
    /// `KeyNotFound` where there is none; `NoSnapshots`, `NoSuchTimeline`, `InterleavedTimelines`; what
    /// damaged snapshots give; the store's; `Io`, `NoSpace`, `Terminated`.
    pub fn read(backup: &Backup, timeline: Option<&str>, key: &[u8]) -> Result<History> {
        without_excluded(|| Self::try_read(backup, timeline, key))
    }

    fn try_read(backup: &Backup, timeline: Option<&str>, key: &[u8]) -> Result<History> {
        let ctx = backup.context()?;
        let mut found = Collector {
            key,
            sorter: Sorter::new(ctx.temp(), SORT_BUFFER_BYTES),
            any: false,
            covered: Vec::new(),
            newest: Revision(1),
        };
        let (timeline, warnings) = match backup {
            Backup::File(_, path) => (None, found.file(ctx, path, timeline)?),
            _ => {
                let (id, warnings) = found.store(ctx, timeline)?;
                (Some(id), warnings)
            }
        };
        let missing = uncovered(&found.covered, found.newest);
        if !found.any {
            let mut message = format!(
                "no snapshot holds a version of key \"{}\" up to revision {}",
                key.escape_ascii(),
                found.newest
            );
            if !missing.is_empty() {
                message += &format!(
                    "; not every change is known of revisions {}",
                    chain::show_ranges(&missing)
                );
            }
            return Err(Reason::KeyNotFound.error(message));
        }
        Ok(History {
            timeline,
            revision: found.newest,
            missing,
            warnings,
            versions: found.sorter.finish()?,
            last: None,
        })
    }

    /// The next version, oldest first; `None` at the end.
    ///
    /// # Errors
    /// `Io`.
    #[allow(clippy::should_implement_trait)] // it lends: an Iterator cannot
    pub fn next(&mut self) -> Result<Option<Version<'_>>> {
        loop {
            if !self.versions.advance()? {
                return Ok(None);
            }
            let at = Some(decode_place(self.versions.current().0)?);
            // Several snapshots may hold it; a delta's comes first.
            if at != self.last {
                self.last = at;
                break;
            }
        }
        let (place, record) = self.versions.current();
        decode(decode_place(place)?.0, record).map(Some)
    }
}

struct Collector<'k> {
    key: &'k [u8],
    sorter: Sorter,
    any: bool,
    /// Revisions of which every change is known.
    covered: Vec<Range>,
    newest: Revision,
}

impl Collector<'_> {
    fn file(&mut self, ctx: &Context, path: &Path, timeline: Option<&str>) -> Result<Vec<String>> {
        let request = Request {
            timeline: timeline.map(str::to_owned),
            ..Request::default()
        };
        let source = Source::open_file(ctx, path, &request)?;
        self.full(ctx, &source.db, &source.base, Revision(i64::MAX))
            .map_err(source.at_base(ctx))?;
        Ok(source.warnings)
    }

    fn store(&mut self, ctx: &Context, timeline: Option<&str>) -> Result<(String, Vec<String>)> {
        let scan = scan(ctx, Depth::Doubtful)?;
        let (timeline, warnings) = select::choose_timeline(ctx, &scan, timeline)?;
        let snapshots = &scan.catalog.snapshots;
        let steps = select::all_steps(&scan.catalog, timeline);
        let paths = steps.iter().map(|s| s.snapshot.path.as_str());
        unless_excluded(ctx, paths.filter(|_| scan.tags_unread > 0), || {
            self.deltas(ctx, &steps)
        })?;
        let mut fulls = chain::bases(&scan.catalog, timeline);
        fulls.reverse();
        let named: Vec<(usize, Revision)> = fulls
            .into_iter()
            .map(|i| (i, snapshots[i].name.last))
            .collect();
        for &(_, last) in &named {
            self.newest = self.newest.max(last);
        }
        let mut read = KnownBases::new();
        while let Some(i) = full_to_read(&named, &read, &uncovered(&self.covered, self.newest)) {
            scan.refuse_excluded(ctx, [i])?;
            let (db, base) = ctx.full(&snapshots[i])?;
            let until = timeline.members.iter().find(|m| m.snapshot == i);
            let until = until.map_or(Revision(i64::MAX), |m| m.until);
            self.full(ctx, &db, &base, until)
                .map_err(ctx.at(&snapshots[i]))?;
            read.insert(i, base);
        }
        if named.is_empty() && self.covered.is_empty() {
            let nothing = Reason::NoSnapshots.error("there is no snapshot that can be used");
            return Err(scan.explain_untrusted(ctx, nothing));
        }
        Ok((timeline.id.clone(), warnings))
    }

    /// Takes a version of the snapshot that is the `nth` to tell: of two deltas that hold a version, the first
    /// one counts.
    fn push(
        &mut self,
        at: (Revision, u32),
        nth: usize,
        time: Option<&str>,
        kv: Option<&KeyValue<'_>>,
    ) -> Result<()> {
        self.any = true;
        let mut record = Vec::new();
        encode(time, kv, &mut record)?;
        self.sorter
            .push(&encode_place(at, time.is_some(), nth), &record)
    }

    fn full<R: ReadAt>(
        &mut self,
        ctx: &Context,
        db: &Database<R>,
        base: &Base,
        until: Revision,
    ) -> Result<()> {
        let last = base.revision.min(until);
        let mut c = db.cursor(&key_bucket(db)?);
        while let Some(e) = c.next()? {
            let rk = RecordKey::decode(e.key)?;
            if rk.main > last {
                break;
            }
            ctx.store.cancel().check()?;
            let kv = KeyValue::decode(e.value)?;
            if kv.key == self.key {
                let put = (!rk.tombstone).then_some(&kv);
                self.push((rk.main, rk.sub), 0, None, put)?;
            }
        }
        // Of what is at or below the compacted revision only each key's newest is left.
        let first = Revision(base.compact_revision.0.max(0)).next();
        if first <= last {
            self.covered.push((first, last));
        }
        self.newest = self.newest.max(last);
        Ok(())
    }

    /// Reads deltas, several at once.
    fn deltas(&mut self, ctx: &Context, steps: &[Step]) -> Result<()> {
        let key = self.key;
        let reading = Reading::new(ctx, steps.iter().map(|s| &s.snapshot));
        let found = Mutex::new(&mut *self);
        first(ctx.threads, steps.len(), |nth| {
            let delta = reading.delta_in_turn(nth)?;
            versions(ctx, delta, &steps[nth], key, |e, kv| {
                e.instant()?;
                let mut found = lock(&found);
                found.push((e.main, e.sub), nth, Some(e.time), kv)
            })?;
            Ok(None::<()>)
        })?;
        for step in steps {
            let name = &step.snapshot.name;
            let last = name.last.min(step.until);
            self.covered.push((name.start, last));
            self.newest = self.newest.max(last);
        }
        Ok(())
    }
}

/// The full to read next: the oldest, and then, for each hole behind its end, those that reach into
/// it or over it, until it is closed. What the oldest has lost by compaction is not looked for.
///
/// `fulls` are (index, last revision of the name), oldest first; `read` are those that were read.
fn full_to_read(fulls: &[(usize, Revision)], read: &KnownBases, holes: &[Range]) -> Option<usize> {
    let (oldest, _) = fulls.first()?;
    let Some(base) = read.get(oldest) else {
        return Some(*oldest);
    };
    let mut holes = holes.iter().filter(|hole| hole.1 > base.revision);
    holes.find_map(|hole| {
        let mut reaching = fulls.iter().filter(|f| f.1 >= hole.0);
        let unread = reaching.find(|f| !read.contains_key(&f.0));
        unread.map(|f| f.0)
    })
}

/// The revisions from 1 to `newest` that are in no range.
fn uncovered(covered: &[Range], newest: Revision) -> Vec<Range> {
    let mut covered = covered.to_vec();
    covered.sort_unstable();
    let mut holes = Vec::new();
    let mut next = Revision(1);
    for (first, last) in covered {
        if first > next {
            holes.push((next, first.previous()));
        }
        next = next.max(last.next());
    }
    if next <= newest {
        holes.push((next, newest));
    }
    holes
}

/// What versions are sorted by: main 8, sub 4, 0 for a delta's, so that it comes before a full's, and 8 for the
/// snapshot's place among its kind.
fn encode_place((main, sub): (Revision, u32), has_time: bool, nth: usize) -> [u8; 21] {
    let mut b = [0; 21];
    b[..8].copy_from_slice(&main.0.to_be_bytes());
    b[8..12].copy_from_slice(&sub.to_be_bytes());
    b[12] = u8::from(!has_time);
    b[13..].copy_from_slice(&(nth as u64).to_be_bytes());
    b
}

fn decode_place(b: &[u8]) -> Result<(Revision, u32)> {
    let main = b.get(..8).and_then(|b| b.try_into().ok());
    let sub = b.get(8..12).and_then(|b| b.try_into().ok());
    match (main, sub) {
        (Some(main), Some(sub)) => {
            Ok((Revision(i64::from_be_bytes(main)), u32::from_be_bytes(sub)))
        }
        _ => Err(Error::internal("a version without a place")),
    }
}

/// The time's length 1, the time, and the record; nothing more where the key was deleted.
fn encode(time: Option<&str>, kv: Option<&KeyValue<'_>>, out: &mut Vec<u8>) -> Result<()> {
    let time = time.unwrap_or_default();
    let len = u8::try_from(time.len())
        .map_err(|_| Error::corrupt("the time of an event is longer than 255 bytes"))?;
    out.push(len);
    out.extend_from_slice(time.as_bytes());
    if let Some(kv) = kv {
        kv.encode(out);
    }
    Ok(())
}

fn decode(revision: Revision, b: &[u8]) -> Result<Version<'_>> {
    let bad = || Error::internal("a version that cannot be read back");
    let (&len, rest) = b.split_first().ok_or_else(bad)?;
    let (time, record) = rest.split_at_checked(len.into()).ok_or_else(bad)?;
    let time = std::str::from_utf8(time).map_err(|_| bad())?;
    Ok(Version {
        revision,
        time: (!time.is_empty()).then_some(time),
        kv: match record {
            [] => None,
            record => Some(KeyValue::decode(record)?),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(r: &[(i64, i64)]) -> Vec<Range> {
        r.iter().map(|&(a, b)| (Revision(a), Revision(b))).collect()
    }

    #[test]
    fn holes_are_what_nothing_covers() {
        for (covered, newest, holes) in [
            (&[][..], 5, &[(1, 5)][..]),
            (&[(1, 5)], 5, &[]),
            (&[(3, 4), (8, 9), (2, 6)], 12, &[(1, 1), (7, 7), (10, 12)]),
            (&[(5, 9), (1, 4)], 9, &[]),
        ] {
            let got = uncovered(&ranges(covered), Revision(newest));
            assert_eq!(got, ranges(holes), "{covered:?}");
        }
    }

    #[test]
    fn fulls_are_read_where_deltas_are_missing() {
        let base = |revision: i64, compact_revision: i64| Base {
            revision: Revision(revision),
            compact_revision: Revision(compact_revision),
            compaction_finished: true,
            metadata_revision: Revision(revision),
        };
        let fulls = [(7, Revision(10)), (3, Revision(20)), (5, Revision(40))];
        let mut read = KnownBases::new();
        let next = |read: &KnownBases, holes| full_to_read(&fulls, read, &ranges(holes));
        assert_eq!(next(&read, &[(1, 10)]), Some(7));
        read.insert(7, base(10, 4));
        // What is below the oldest one's compacted revision stays unknown.
        assert_eq!(next(&read, &[(1, 4)]), None);
        // Only one that reaches behind the hole's beginning can close it.
        assert_eq!(next(&read, &[(1, 4), (25, 30)]), Some(5));
        assert_eq!(next(&read, &[(15, 30)]), Some(3));
        read.insert(3, base(20, 18));
        assert_eq!(next(&read, &[(15, 18), (21, 30)]), Some(5));
        read.insert(5, base(40, 40));
        assert_eq!(next(&read, &[(15, 18), (21, 30)]), None);
        assert_eq!(full_to_read(&[], &KnownBases::new(), &[]), None);
    }

    #[test]
    fn versions_come_back() {
        let kv = KeyValue {
            key: b"k",
            create_revision: Revision(3),
            mod_revision: Revision(5),
            version: 2,
            value: b"",
            lease: 9,
        };
        for (time, kv) in [(None, Some(kv)), (Some("2026-11-21T02:30:00Z"), None)] {
            let mut b = Vec::new();
            encode(time, kv.as_ref(), &mut b).unwrap();
            let version = decode(Revision(5), &b).unwrap();
            assert_eq!((version.time, version.kv), (time, kv));
        }
        let place = (Revision(258), 7);
        let first = encode_place(place, true, 256);
        assert_eq!(decode_place(&first).unwrap(), place);
        assert!(first < encode_place(place, true, 257));
        assert!(encode_place(place, true, 257) < encode_place(place, false, 0));
    }
}
