//! Every version of keys, in the order of keys and revisions, with the deletions that nobody recorded.
//!
//! A full holds every key that exists at its compacted revision. So a key that was put before, is not changed up to there,
//! and lacks in the full, was deleted in between, in a gap.

use super::SORT_BUFFER_BYTES;
use super::versions::{self, Collect, Coverage, FoundVersion};
use crate::backup::chain::RevisionRange;
use crate::base::external_sort::{Sorted, Sorter};
use crate::base::temp::Dir;
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Result};
use crate::mvcc::{KeyRange, Revision};
use crate::prefix::open::BackupLocation;
use std::sync::Mutex;

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
    /// The full that lacks the key of the current version.
    lacking: Option<Revision>,
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
    /// It was put: the encoded record.
    Put(&'a [u8]),
    /// It was deleted.
    Deleted,
    /// It was deleted after the version before, and no snapshot records it.
    DeletedUnrecorded,
}

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

impl VersionStream {
    /// Reads the versions of the keys of a range on the timeline with this ID, or on the newest one.
    ///
    /// # Errors
    /// As [`versions::read`].
    pub(crate) fn by_key(
        backup: &BackupLocation,
        timeline: Option<&str>,
        range: &KeyRange,
    ) -> Result<Self> {
        let collector = Collector::new(backup.context().temp(), range);
        let coverage = versions::read(backup, timeline, &collector)?;
        collector.finish(coverage)
    }

    /// Returns the next version; `None` at the end.
    ///
    /// # Errors
    /// `Io`.
    #[allow(clippy::should_implement_trait)] // the versions borrow from the stream, which an Iterator cannot express
    pub(crate) fn next(&mut self) -> Result<Option<KeyVersion<'_>>> {
        if let Some(revision) = self.lacking.take() {
            return Ok(Some(KeyVersion {
                key: &self.current.key,
                revision,
                time: None,
                change: KeyChange::DeletedUnrecorded,
            }));
        }
        if self.ended {
            return Ok(None);
        }
        let (bytes, entry) = self.sorted.current();
        let (escaped, version, _) = SortKey::decode(bytes)?;
        if escaped != self.current.escaped {
            self.current.escaped.clear();
            self.current.escaped.extend_from_slice(escaped);
            self.current.key = SortKey::unescaped(escaped);
        }
        self.current.version = version;
        self.current.fulls.clear();
        self.current.entry.clear();
        self.current.entry.extend_from_slice(entry);
        let mut next = None;
        loop {
            let (escaped, version, from) = SortKey::decode(self.sorted.current().0)?;
            if escaped != self.current.escaped {
                break;
            }
            if version != self.current.version {
                next = Some(version.0);
                break;
            }
            if let Source::Full(nth) | Source::SameFull(nth) = from {
                self.current.fulls.push(nth);
            }
            if !self.sorted.advance()? {
                self.ended = true;
                break;
            }
        }
        let bad = || Error::internal("a version in the temporary directory cannot be read back");
        let (&len, rest) = self.current.entry.split_first().ok_or_else(|| {
            Error::corrupt(
                "a full snapshot lacks a version that one after it has: they are of two histories",
            )
        })?;
        let (time, record) = rest.split_at_checked(len.into()).ok_or_else(bad)?;
        let time = std::str::from_utf8(time).map_err(|_| bad())?;
        let revision = self.current.version.0;
        if !record.is_empty() {
            let begin = self.fulls.partition_point(|full| full.0 <= revision);
            let within = self.fulls[begin..].iter();
            let within = within.take_while(|full| next.is_none_or(|next| full.0 < next));
            let has = |nth: &u32| self.current.fulls.binary_search(nth).is_ok();
            self.lacking = within
                .filter(|full| !has(&full.1))
                .map(|full| full.0)
                .next();
        }
        Ok(Some(KeyVersion {
            key: &self.current.key,
            revision,
            time: (!time.is_empty()).then_some(time),
            change: match record {
                [] => KeyChange::Deleted,
                record => KeyChange::Put(record),
            },
        }))
    }
}

/// Where a version was found. In this order, the first entry of a version has its time and its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// In a delta.
    Delta,
    /// In the full with this number.
    Full(u32),
    /// In this full, and in one that was read before: without the record.
    SameFull(u32),
}

/// The bytes by which versions are sorted: first the key, escaped so that no key begins another one. Then the revision (8
/// bytes), the number within the transaction (4), the kind of the source (1), and the number of the full (4).
struct SortKey;

impl SortKey {
    const TAIL: usize = 17;

    fn encode(key: &[u8], (main, sub): (Revision, u32), from: Source, out: &mut Vec<u8>) {
        out.clear();
        for byte in key {
            match byte {
                0 => out.extend([0, 1]),
                byte => out.push(*byte),
            }
        }
        out.extend([0, 0]);
        out.extend(main.0.to_be_bytes());
        out.extend(sub.to_be_bytes());
        let (kind, nth) = match from {
            Source::Delta => (0, 0),
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
            Some(0) => Source::Delta,
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
struct Collector<'r> {
    range: &'r KeyRange,
    found: Mutex<Collected>,
}

struct Collected {
    sorter: Sorter,
    /// The number of the current full.
    nth: u32,
    /// What the current full has up to this revision, the fulls before hold, too.
    seen: Revision,
    key: Vec<u8>,
    entry: Vec<u8>,
}

impl<'r> Collector<'r> {
    fn new(temp: Dir, range: &'r KeyRange) -> Self {
        Collector {
            range,
            found: Mutex::new(Collected {
                sorter: Sorter::new(temp, SORT_BUFFER_BYTES),
                nth: 0,
                seen: Revision(0),
                key: Vec::new(),
                entry: Vec::new(),
            }),
        }
    }

    fn finish(self, coverage: Coverage) -> Result<VersionStream> {
        let found = unpoisoned(self.found.into_inner());
        let fulls = coverage.in_fulls.iter().map(|full| full.0);
        let mut fulls: Vec<(Revision, u32)> = fulls.zip(0..).collect();
        fulls.sort_unstable();
        let mut sorted = found.sorter.finish()?;
        Ok(VersionStream {
            coverage,
            ended: !sorted.advance()?,
            sorted,
            fulls,
            current: Found::default(),
            lacking: None,
        })
    }
}

impl Collect for Collector<'_> {
    fn wants(&self, key: &[u8]) -> bool {
        self.range.contains(key)
    }

    fn begin_full(&self, in_fulls: &[RevisionRange]) {
        let Some(((compacted, _), before)) = in_fulls.split_last() else {
            return;
        };
        // A full that is not compacted further has all versions that this one has up to there.
        let others = before.iter().filter(|full| full.0 <= *compacted);
        let seen = others.map(|full| full.1).max().unwrap_or(Revision(0));
        let mut found = lock(&self.found);
        found.seen = seen.min(*compacted);
        found.nth = before.len() as u32;
    }

    fn add(&self, version: FoundVersion<'_>) -> Result<()> {
        lock(&self.found).add(&version)
    }
}

impl Collected {
    fn add(&mut self, version: &FoundVersion<'_>) -> Result<()> {
        let revision = version.revision.0;
        let nth = self.nth;
        let from = match version.time {
            Some(_) => Source::Delta,
            None if revision <= self.seen => Source::SameFull(nth),
            None => Source::Full(nth),
        };
        self.entry.clear();
        if !matches!(from, Source::SameFull(_)) {
            let time = version.time.map_or("", |(text, _)| text);
            let len = u8::try_from(time.len())
                .map_err(|_| Error::corrupt("the time of an event is longer than 255 bytes"))?;
            self.entry.push(len);
            self.entry.extend_from_slice(time.as_bytes());
            if let Some(kv) = version.kv {
                kv.encode(&mut self.entry);
            }
        }
        SortKey::encode(version.key, version.revision, from, &mut self.key);
        self.sorter.push(&self.key, &self.entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::temp;
    use crate::mvcc::KeyValue;
    use chrono::DateTime;

    fn collector(range: &KeyRange) -> Collector<'_> {
        let dir = temp::Dir::new(std::env::temp_dir(), false);
        Collector::new(dir, range)
    }

    fn add(c: &Collector<'_>, key: &[u8], revision: i64, time: Option<&str>, value: Option<&[u8]>) {
        let kv = value.map(|value| KeyValue {
            key,
            value,
            ..KeyValue::default()
        });
        let version = FoundVersion {
            key,
            revision: (Revision(revision), 0),
            time: time.map(|time| (time, DateTime::UNIX_EPOCH)),
            nth: 0,
            kv: kv.as_ref(),
        };
        c.add(version).unwrap();
    }

    /// Begins a full of these revisions, after those of `coverage`.
    fn begin(c: &Collector<'_>, coverage: &mut Coverage, compacted: i64, last: i64) {
        coverage
            .in_fulls
            .push((Revision(compacted), Revision(last)));
        c.begin_full(&coverage.in_fulls);
    }

    fn all(c: Collector<'_>, coverage: Coverage) -> Vec<String> {
        let mut stream = c.finish(coverage).unwrap();
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
                KeyChange::DeletedUnrecorded => " gone by then".to_owned(),
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
        let (c, mut coverage) = (collector(&KeyRange::All), Coverage::default());
        let (a, nul) = (&b"a"[..], &b"a\0"[..]);
        add(&c, nul, 7, Some("t7"), Some(b"x"));
        add(&c, b"ab", 5, Some("t5"), Some(b"y"));
        add(&c, a, 300, Some("t300"), None);
        add(&c, a, 6, Some("t6"), Some(b"z"));
        begin(&c, &mut coverage, 4, 7);
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
        assert_eq!(all(c, coverage), expected);
    }

    /// Fulls that are compacted to 10, 20 and 30 are all that there is.
    #[test]
    fn a_key_that_a_full_lacks_was_deleted_before() {
        let (c, mut coverage) = (collector(&KeyRange::All), Coverage::default());
        add(&c, b"in a delta alone", 15, Some("t"), Some(b""));
        for compacted in [20, 10, 30] {
            begin(&c, &mut coverage, compacted, compacted);
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
            all(c, coverage),
            [
                "always 5 -=v",
                "back unseen 6 -=",
                "back unseen 20 - gone by then",
                "first alone 7 -=",
                "first alone 20 - gone by then",
                "in a delta alone 15 t=",
                "in a delta alone 20 - gone by then",
                "later 12 -=l",
            ]
        );
    }

    /// The first full has the newest versions alone, and the second one the history before.
    #[test]
    fn a_version_that_an_earlier_full_has_compacted_is_not_lost() {
        let (c, mut coverage) = (collector(&KeyRange::All), Coverage::default());
        begin(&c, &mut coverage, 100, 100);
        add(&c, b"k", 80, None, Some(b"new"));
        begin(&c, &mut coverage, 50, 120);
        add(&c, b"k", 60, None, Some(b"old"));
        add(&c, b"k", 80, None, Some(b"new"));
        assert_eq!(all(c, coverage), ["k 60 -=old", "k 80 -=new"]);
    }

    /// What a full repeats is a place in the order alone.
    #[test]
    fn unchanged_values_are_written_once() {
        let (c, mut coverage) = (collector(&KeyRange::All), Coverage::default());
        let value = [b'v'; 1000];
        for full in 0..100 {
            begin(&c, &mut coverage, 1000 + full, 1000 + full);
            add(&c, b"k", 5, None, Some(&value));
        }
        let entry = c.found.lock().unwrap().entry.len();
        assert_eq!((entry, all(c, coverage).len()), (0, 1));
    }
}
