//! Every version of keys, in the order of keys and revisions, with the deletions that nobody recorded.
//!
//! A full holds every key that exists at its compacted revision. So a key that was put before, is not changed up to there,
//! and lacks in the full, was deleted in between, in a gap. So was one that was created again since it was put.

use super::SORT_BUFFER_BYTES;
use super::versions::{self, Collect, Coverage, FoundVersion};
use crate::backup::chain::RevisionRange;
use crate::base::external_sort::{Sorted, Sorter};
use crate::base::temp::Dir;
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Result};
use crate::mvcc::{KeyRange, KeyValue, Revision};
use crate::prefix::Context;
use crate::prefix::open::{BackupLocation, State};
use std::sync::Mutex;

/// Adds what is kept of a record that was put.
pub(crate) type Digest<'d> = &'d (dyn Fn(&KeyValue<'_>, &mut Vec<u8>) -> Result<()> + Sync);

/// Keeps the whole record.
pub(crate) const RECORD: Digest<'static> = &|kv, out| {
    kv.encode(out);
    Ok(())
};

/// The versions of the keys of a range.
#[derive(Debug)]
pub(crate) struct VersionStream {
    /// What was read: also the holes, in which versions may lack.
    pub(crate) coverage: Coverage,
    sorted: Sorted,
    ended: bool,
    /// The compacted revisions of the fulls with their numbers, in ascending order.
    fulls: Vec<(Revision, u32)>,
    current: Found,
    /// Whether the current version is still to be returned.
    is_held: bool,
    /// The deletions before and after the current version that nobody recorded.
    gone: [Option<Gone>; 2],
    /// The newest revision at which the current key is known to exist; `None` if it was deleted since.
    exists_at: Option<Revision>,
}

/// A version of a key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeyVersion<'a> {
    /// The key.
    pub(crate) key: &'a [u8],
    /// The revision of the change. If the change is not recorded: the one by which it happened.
    pub(crate) revision: Revision,
    /// When the snapshotter received the change (RFC 3339); `None` if only a full holds it.
    pub(crate) time: Option<&'a str>,
    /// What happened.
    pub(crate) change: KeyChange<'a>,
}

/// What happened to a key.
#[derive(Debug, Clone, Copy)]
pub(crate) enum KeyChange<'a> {
    /// It was put: the encoded record, or its digest.
    Put(&'a [u8]),
    /// It was deleted.
    Deleted,
    /// It was deleted after this revision, at which it existed, and no snapshot records it.
    DeletedUnrecorded(Revision),
}

/// A deletion that nobody recorded: after the first revision, and by the second one.
#[derive(Debug, Clone, Copy)]
struct Gone(Revision, Revision);

/// A version that was found in snapshots.
#[derive(Debug, Default)]
struct Found {
    key: Vec<u8>,
    /// The key as it is sorted.
    escaped: Vec<u8>,
    version: (Revision, u32),
    entry: Vec<u8>,
    /// The numbers of the fulls that hold it, in ascending order.
    fulls: Vec<u32>,
}

/// The parts of an entry: the length of the time (1 byte), and the time. If the key was put, the revision of its creation (8
/// bytes), and the digest.
struct Entry<'a> {
    time: &'a str,
    put: Option<(Revision, &'a [u8])>,
}

impl<'a> Entry<'a> {
    fn encode(version: &FoundVersion<'_>, digest: Digest<'_>, entry: &mut Vec<u8>) -> Result<()> {
        let time = version.time.unwrap_or_default();
        let len = u8::try_from(time.len())
            .map_err(|_| Error::corrupt("the time of an event is longer than 255 bytes"))?;
        entry.push(len);
        entry.extend_from_slice(time.as_bytes());
        match version.kv {
            Some(kv) => {
                entry.extend(kv.create_revision.0.to_be_bytes());
                digest(kv, entry)
            }
            None => Ok(()),
        }
    }

    fn decode(entry: &'a [u8]) -> Result<Self> {
        let bad = || Error::internal("a version in the temporary directory cannot be read back");
        let (&len, rest) = entry.split_first().ok_or_else(|| {
            Error::corrupt(
                "a full snapshot lacks a version that one after it has: they are of two histories",
            )
        })?;
        let (time, rest) = rest.split_at_checked(len.into()).ok_or_else(bad)?;
        let put = match rest {
            [] => None,
            rest => {
                let (created, digest) = rest.split_first_chunk().ok_or_else(bad)?;
                Some((Revision(i64::from_be_bytes(*created)), digest))
            }
        };
        Ok(Entry {
            time: std::str::from_utf8(time).map_err(|_| bad())?,
            put,
        })
    }
}

impl VersionStream {
    /// Reads the versions of the keys of a range on the timeline with this ID, or on the newest one.
    ///
    /// # Errors
    /// As [`versions::read`]; those of `digest`.
    pub(crate) fn by_key(
        backup: &BackupLocation,
        timeline: Option<&str>,
        range: &KeyRange,
        digest: Digest<'_>,
    ) -> Result<Self> {
        let collector = Collector::new(backup.context().temp(), range, digest);
        let coverage = versions::read(backup, timeline, &collector)?;
        collector.finish(coverage)
    }

    /// Returns whether there is no version at all, as long as none was returned.
    pub(super) fn is_empty(&self) -> bool {
        self.ended
    }

    /// Returns the next version; `None` at the end.
    ///
    /// # Errors
    /// `Io`.
    #[allow(clippy::should_implement_trait)] // the versions borrow from the stream, which an Iterator cannot express
    pub(crate) fn next(&mut self) -> Result<Option<KeyVersion<'_>>> {
        if !self.is_held && self.gone[1].is_none() {
            if self.ended {
                return Ok(None);
            }
            let next = self.take_version()?;
            self.find_gone(next)?;
            self.is_held = true;
        }
        let key = &self.current.key;
        if let Some(Gone(after, by)) = self.gone[usize::from(!self.is_held)].take() {
            return Ok(Some(KeyVersion {
                key,
                revision: by,
                time: None,
                change: KeyChange::DeletedUnrecorded(after),
            }));
        }
        self.is_held = false;
        let Entry { time, put } = Entry::decode(&self.current.entry)?;
        Ok(Some(KeyVersion {
            key,
            revision: self.current.version.0,
            time: (!time.is_empty()).then_some(time),
            change: put.map_or(KeyChange::Deleted, |(_, digest)| KeyChange::Put(digest)),
        }))
    }

    /// Takes the current version from all snapshots that hold it. Returns the revision of the key's next one.
    fn take_version(&mut self) -> Result<Option<Revision>> {
        let (bytes, entry) = self.sorted.current();
        let (escaped, version, _) = SortKey::decode(bytes)?;
        if escaped != self.current.escaped {
            self.current.escaped.clear();
            self.current.escaped.extend_from_slice(escaped);
            self.current.key = SortKey::unescaped(escaped);
            self.exists_at = None;
        }
        self.current.version = version;
        self.current.fulls.clear();
        self.current.entry.clear();
        self.current.entry.extend_from_slice(entry);
        loop {
            let (escaped, version, from) = SortKey::decode(self.sorted.current().0)?;
            if escaped != self.current.escaped {
                return Ok(None);
            }
            if version != self.current.version {
                return Ok(Some(version.0));
            }
            if let Source::Full(nth) | Source::SameFull(nth) = from {
                self.current.fulls.push(nth);
            }
            if !self.sorted.advance()? {
                self.ended = true;
                return Ok(None);
            }
        }
    }
    /// Finds the deletions around the current version that nobody recorded. `next` is the revision of the key's next version.
    fn find_gone(&mut self, next: Option<Revision>) -> Result<()> {
        let revision = self.current.version.0;
        let before = self.exists_at.take();
        let Some((created, _)) = Entry::decode(&self.current.entry)?.put else {
            return Ok(());
        };
        let before = before.filter(|known| known.next() < created);
        self.gone[0] = before.map(|known| Gone(known, created.previous()));
        let mut known = revision;
        let begin = self.fulls.partition_point(|full| full.0 <= revision);
        for (compacted, nth) in &self.fulls[begin..] {
            if next.is_some_and(|next| next <= *compacted) {
                break;
            }
            if self.current.fulls.binary_search(nth).is_err() {
                self.gone[1] = Some(Gone(known, *compacted));
                return Ok(());
            }
            known = *compacted;
        }
        self.exists_at = Some(known);
        Ok(())
    }
}

/// Where a version was found. In this order, the first entry of a version has its time and its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// In the delta at this position.
    Delta(u32),
    /// In the full with this number.
    Full(u32),
    /// In this full, and in one that was read before: without the record.
    SameFull(u32),
}

/// The bytes by which versions are sorted: first the key, escaped so that no key begins another one. Then the revision (8
/// bytes), the number within the transaction (4), the kind of the source (1), and its number (4).
struct SortKey;

impl SortKey {
    const TAIL: usize = 17;

    fn encode(key: &[u8], (main, sub): (Revision, u32), from: Source, out: &mut Vec<u8>) {
        out.clear();
        for part in key.split_inclusive(|byte| *byte == 0) {
            out.extend_from_slice(part);
            if part.ends_with(&[0]) {
                out.push(1);
            }
        }
        out.extend([0, 0]);
        out.extend(main.0.to_be_bytes());
        out.extend(sub.to_be_bytes());
        let (kind, nth) = match from {
            Source::Delta(nth) => (0, nth),
            Source::Full(nth) => (1, nth),
            Source::SameFull(nth) => (2, nth),
        };
        out.push(kind);
        out.extend(nth.to_be_bytes());
    }

    /// Returns the escaped key, and the rest.
    fn decode(bytes: &[u8]) -> Result<(&[u8], (Revision, u32), Source)> {
        let bad = || Error::internal("a version in the temporary directory has no sort key");
        let at = bytes.len().checked_sub(Self::TAIL).ok_or_else(bad)?;
        let (escaped, tail) = bytes.split_at(at);
        let number = |from: usize| {
            let bytes = tail.get(from..from + 4).and_then(|b| b.try_into().ok());
            bytes.map(u32::from_be_bytes).ok_or_else(bad)
        };
        let main = i64::from(number(0)?) << 32 | i64::from(number(4)?);
        let nth = number(13)?;
        let from = match tail.get(12) {
            Some(0) => Source::Delta(nth),
            Some(1) => Source::Full(nth),
            Some(2) => Source::SameFull(nth),
            _ => return Err(bad()),
        };
        Ok((escaped, (Revision(main), number(8)?), from))
    }

    fn unescaped(escaped: &[u8]) -> Vec<u8> {
        let mut key = Vec::with_capacity(escaped.len());
        let mut bytes = escaped.iter();
        while let Some(byte) = bytes.next() {
            // After a zero there is a one, or at the end another zero.
            if *byte != 0 || bytes.next() == Some(&1) {
                key.push(*byte);
            }
        }
        key
    }
}

/// Collects versions to sort them.
pub(super) struct Collector<'r> {
    range: &'r KeyRange,
    digest: Digest<'r>,
    temp: Dir,
    /// One for each thread, so that none waits while another sorts.
    lanes: Mutex<Vec<Lane>>,
    fulls: Mutex<Fulls>,
}

/// What a thread sorts, and its buffers.
struct Lane {
    sorter: Sorter,
    key: Vec<u8>,
    entry: Vec<u8>,
}

impl Lane {
    fn push(&mut self, version: &FoundVersion<'_>, from: Source, digest: Digest<'_>) -> Result<()> {
        SortKey::encode(version.key, version.revision, from, &mut self.key);
        self.entry.clear();
        if !matches!(from, Source::SameFull(_)) {
            Entry::encode(version, digest, &mut self.entry)?;
        }
        self.sorter.push(&self.key, &self.entry)
    }
}

/// The fulls that were read.
#[derive(Default)]
struct Fulls {
    states: Vec<RevisionRange>,
    /// What the current one has up to this revision, one before holds, too.
    seen: Revision,
}

impl<'r> Collector<'r> {
    pub(super) fn new(temp: Dir, range: &'r KeyRange, digest: Digest<'r>) -> Self {
        Collector {
            range,
            digest,
            temp,
            lanes: Mutex::default(),
            fulls: Mutex::default(),
        }
    }

    pub(super) fn finish(self, coverage: Coverage) -> Result<VersionStream> {
        let fulls = unpoisoned(self.fulls.into_inner()).states.into_iter();
        let mut fulls: Vec<(Revision, u32)> = fulls.map(|full| full.0).zip(0..).collect();
        fulls.sort_unstable();
        let mut all = Sorter::new(self.temp, SORT_BUFFER_BYTES);
        for lane in unpoisoned(self.lanes.into_inner()) {
            all.absorb(lane.sorter)?;
        }
        let mut sorted = all.finish()?;
        Ok(VersionStream {
            coverage,
            ended: !sorted.advance()?,
            sorted,
            fulls,
            current: Found::default(),
            is_held: false,
            gone: [None; 2],
            exists_at: None,
        })
    }
}

/// Adds a state, as a full that is compacted to it.
///
/// # Errors
/// As [`State::for_each_live`].
pub(super) fn add_state(
    ctx: &Context,
    state: &State,
    range: &KeyRange,
    collect: &impl Collect,
) -> Result<()> {
    collect.begin_full((state.revision, state.revision));
    state.for_each_live_version(ctx, range.clone(), |rk, kv| {
        collect.add(FoundVersion {
            key: kv.key,
            revision: (rk.main, rk.sub),
            time: None,
            nth: 0,
            kv: Some(kv),
        })
    })
}

impl Collect for Collector<'_> {
    fn wants(&self, key: &[u8]) -> bool {
        self.range.contains(key)
    }

    fn begin_full(&self, states: RevisionRange) {
        let fulls = &mut *lock(&self.fulls);
        // A full that is not compacted further has all versions that this one has up to there.
        let others = fulls.states.iter().filter(|full| full.0 <= states.0);
        let seen = others.map(|full| full.1).max().unwrap_or(Revision(0));
        fulls.seen = seen.min(states.0);
        fulls.states.push(states);
    }

    fn add(&self, version: FoundVersion<'_>) -> Result<()> {
        let from = match version.time {
            Some(_) => Source::Delta(version.nth),
            None => {
                let fulls = lock(&self.fulls);
                let nth = fulls.states.len().saturating_sub(1) as u32;
                if version.revision.0 <= fulls.seen {
                    Source::SameFull(nth)
                } else {
                    Source::Full(nth)
                }
            }
        };
        let lane = lock(&self.lanes).pop();
        let mut lane = lane.unwrap_or_else(|| Lane {
            sorter: Sorter::new(self.temp.clone(), SORT_BUFFER_BYTES / 2),
            key: Vec::new(),
            entry: Vec::new(),
        });
        lane.push(&version, from, self.digest)?;
        lock(&self.lanes).push(lane);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::temp;
    use crate::mvcc::KeyValue;

    fn collector() -> Collector<'static> {
        let dir = temp::Dir::new(std::env::temp_dir(), false);
        Collector::new(dir, &KeyRange::All, RECORD)
    }

    fn add(c: &Collector<'_>, key: &[u8], revision: i64, time: Option<&str>, value: Option<&[u8]>) {
        add_created(c, key, 1, revision, time, value);
    }

    fn add_created(
        c: &Collector<'_>,
        key: &[u8],
        created: i64,
        revision: i64,
        time: Option<&str>,
        value: Option<&[u8]>,
    ) {
        let kv = value.map(|value| KeyValue {
            key,
            value,
            create_revision: Revision(created),
            ..KeyValue::default()
        });
        let version = FoundVersion {
            key,
            revision: (Revision(revision), 0),
            time,
            nth: 0,
            kv: kv.as_ref(),
        };
        c.add(version).unwrap();
    }

    /// Begins a full of these revisions.
    fn begin(c: &Collector<'_>, compacted: i64, last: i64) {
        c.begin_full((Revision(compacted), Revision(last)));
    }

    fn all(c: Collector<'_>) -> Vec<String> {
        let mut stream = c.finish(Coverage::default()).unwrap();
        let mut all = Vec::new();
        while let Some(v) = stream.next().unwrap() {
            let what = match v.change {
                KeyChange::Put(record) => {
                    let value = KeyValue::decode(record)
                        .unwrap()
                        .value
                        .escape_ascii()
                        .to_string();
                    format!("={value}")
                }
                KeyChange::Deleted => " deleted".to_owned(),
                KeyChange::DeletedUnrecorded(after) => format!(" gone after {after}"),
            };
            let time = v.time.unwrap_or("-");
            all.push(format!(
                "{} {} {time}{what}",
                v.key.escape_ascii(),
                v.revision
            ));
        }
        all
    }

    #[test]
    fn versions_come_by_key_and_revision_once_with_the_time_of_the_delta() {
        let c = collector();
        let (a, nul) = (&b"a"[..], &b"a\0"[..]);
        add(&c, nul, 7, Some("t7"), Some(b"x"));
        add(&c, b"ab", 5, Some("t5"), Some(b"y"));
        add(&c, a, 300, Some("t300"), None);
        add(&c, a, 6, Some("t6"), Some(b"z"));
        begin(&c, 4, 7);
        add(&c, a, 3, None, Some(b"old"));
        add(&c, a, 6, None, Some(b"z"));
        add(&c, b"ab", 5, None, Some(b"y"));
        add(&c, nul, 7, None, Some(b"x"));
        let expected = [
            "a 3 -=old",
            "a 6 t6=z",
            "a 300 t300 deleted",
            "a\\x00 7 t7=x",
            "ab 5 t5=y",
        ];
        assert_eq!(all(c), expected);
    }

    /// Fulls that are compacted to 10, 20 and 30 are all that there is.
    #[test]
    fn a_key_that_a_full_lacks_was_deleted_before() {
        let c = collector();
        add(&c, b"in a delta alone", 15, Some("t"), Some(b""));
        for compacted in [20, 10, 30] {
            begin(&c, compacted, compacted);
            add(&c, b"always", 5, None, Some(b"v"));
            if compacted != 20 {
                add(&c, b"back unseen", 6, None, Some(b""));
            }
            if compacted == 10 {
                add(&c, b"first alone", 7, None, Some(b""));
            } else {
                add(&c, b"later", 12, None, Some(b"l"));
            }
        }
        assert_eq!(
            all(c),
            [
                "always 5 -=v",
                "back unseen 6 -=",
                "back unseen 20 - gone after 10",
                "first alone 7 -=",
                "first alone 20 - gone after 10",
                "in a delta alone 15 t=",
                "in a delta alone 20 - gone after 15",
                "later 12 -=l",
            ]
        );
    }

    /// The first full has the newest versions alone, and the second one the history before.
    #[test]
    fn a_version_that_an_earlier_full_has_compacted_is_not_lost() {
        let c = collector();
        begin(&c, 100, 100);
        add(&c, b"k", 80, None, Some(b"new"));
        begin(&c, 50, 120);
        add(&c, b"k", 60, None, Some(b"old"));
        add(&c, b"k", 80, None, Some(b"new"));
        assert_eq!(all(c), ["k 60 -=old", "k 80 -=new"]);
    }

    /// Nothing lacks the key: that it was created again tells that it was deleted.
    #[test]
    fn a_key_that_was_created_again_was_deleted_before() {
        let c = collector();
        add_created(&c, b"k", 3, 3, Some("t3"), Some(b"old"));
        add_created(&c, b"k", 20, 25, Some("t25"), Some(b"new"));
        add_created(&c, b"k", 20, 26, Some("t26"), Some(b"newer"));
        add(&c, b"k", 27, Some("t27"), None);
        add_created(&c, b"k", 30, 30, Some("t30"), Some(b"recorded"));
        begin(&c, 40, 40);
        add(&c, b"other", 35, None, Some(b""));
        assert_eq!(
            all(c),
            [
                "k 3 t3=old",
                "k 19 - gone after 3",
                "k 25 t25=new",
                "k 26 t26=newer",
                "k 27 t27 deleted",
                "k 30 t30=recorded",
                "k 40 - gone after 30",
                "other 35 -=",
            ]
        );
    }

    /// What a full repeats is a place in the order alone.
    #[test]
    fn unchanged_values_are_written_once() {
        let written = std::sync::atomic::AtomicUsize::new(0);
        let digest = |_: &KeyValue<'_>, _: &mut Vec<u8>| {
            written.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            Ok(())
        };
        let mut c = collector();
        c.digest = &digest;
        for full in 0..100 {
            begin(&c, 1000 + full, 1000 + full);
            add(&c, b"k", 5, None, Some(b"v"));
        }
        assert_eq!(c.finish(Coverage::default()).unwrap().fulls.len(), 100);
        assert_eq!(written.into_inner(), 1);
    }
}
