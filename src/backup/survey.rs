//! What tells two histories apart: the fingerprints of every record that a snapshot holds.
//!
//! A survey is made if names leave doubt. Its fingerprints lie in unnamed files of the temporary
//! directory, one for each thread, so that memory does not grow with the snapshots. It draws no conclusion
//! about branches; `timeline` does.

use crate::backup::delta::DeltaReader;
use crate::backup::intervals::Intervals;
use crate::base::hash::hex;
use crate::base::temp::TempFile;
use crate::base::{ReadAt, fixed_record};
use crate::bolt::Database;
use crate::error::{Error, Result};
use crate::mvcc::history::{Base, key_bucket};
use crate::mvcc::{Change, KeyValue, RecordKey, Revision};
use chrono::{DateTime, Utc};
use hashbrown::HashMap;
use sha2::{Digest, Sha256};
use std::io::{BufWriter, Read, Write};

/// Bytes of an [`Entry`] on disk.
const ENTRY: usize = fixed_record::BYTES;
/// Entries that are read at once.
const BLOCK: usize = if cfg!(test) { 4 } else { 512 };

/// What one snapshot holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Survey {
    /// From here to `last` every change is held; below, only what compaction left.
    pub complete_from: Revision,
    /// The newest revision held; of a full it may be past its name.
    pub last: Revision,
    /// Of a full.
    pub base: Option<Base>,
    /// The newest event's time, of a delta.
    pub last_time: Option<DateTime<Utc>>,
    written: Written,
}

impl Survey {
    /// The first and the last revision that it holds.
    fn span(&self) -> (Revision, Revision) {
        let first = self.written.blocks.first().copied();
        let first = first.map_or(self.complete_from, |f| f.min(self.complete_from));
        (first, self.last)
    }
}

/// Where a snapshot's fingerprints are.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Written {
    /// Which file.
    file: usize,
    offset: u64,
    entries: usize,
    /// The revision of each block's first entry: it tells where a revision is.
    blocks: Vec<Revision>,
}

/// One record's fingerprint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    main: Revision,
    sub: u32,
    tombstone: bool,
    key: u64,
    create: i64,
    version: i64,
    digest: u64,
}

impl Entry {
    fn new(rk: RecordKey, kv: &KeyValue<'_>, record: &[u8]) -> Self {
        Entry {
            main: rk.main,
            sub: rk.sub,
            tombstone: rk.tombstone,
            key: short_hash(kv.key),
            create: kv.create_revision.0,
            version: kv.version,
            digest: short_hash(record),
        }
    }

    fn encode(&self) -> [u8; ENTRY] {
        fixed_record::encode([
            self.main.0 as u64,
            u64::from(self.sub) | u64::from(self.tombstone) << 32,
            self.key,
            self.create as u64,
            self.version as u64,
            self.digest,
        ])
    }

    fn decode(b: &[u8; ENTRY]) -> Self {
        let [main, sub, key, create, version, digest] = fixed_record::decode(b);
        Entry {
            main: Revision(main as i64),
            sub: sub as u32,
            tombstone: sub >> 32 != 0,
            key,
            create: create as i64,
            version: version as i64,
            digest,
        }
    }

    fn order(&self) -> (Revision, u32) {
        (self.main, self.sub)
    }

    /// Whether it can be the next change of its key behind `state`.
    fn follows(&self, state: &Entry) -> bool {
        let next = (state.create, state.version.wrapping_add(1));
        match state.tombstone {
            true => self.begins(),
            false => self.tombstone || (self.create, self.version) == next,
        }
    }

    /// Whether it creates its key.
    fn begins(&self) -> bool {
        !self.tombstone && self.version == 1
    }
}

fn short_hash(b: &[u8]) -> u64 {
    let mut w = [0; 8];
    w.copy_from_slice(&Sha256::digest(b)[..8]);
    u64::from_le_bytes(w)
}

/// What two snapshots say of each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Comparison {
    /// The first revision about which they disagree.
    pub conflict: Option<Revision>,
    /// The newest revision before that of which both hold the same change.
    pub agreed: Option<Revision>,
}

/// Whether a delta's events follow the state that another snapshot ends with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Continuity {
    /// A key's version does not follow.
    Contradicted,
    /// They have no key in common.
    Unknown,
    /// Every common key's version follows.
    Confirmed,
}

/// The fingerprints of all snapshots surveyed.
#[derive(Debug)]
pub struct Surveys {
    files: Vec<TempFile>,
}

/// Surveys one snapshot after the other.
pub struct Surveyor<'f> {
    nth: usize,
    file: &'f mut TempFile,
}

impl Surveyor<'_> {
    fn write(
        &mut self,
        mut entries: impl FnMut(&mut dyn FnMut(Entry) -> Result<()>) -> Result<()>,
    ) -> Result<Written> {
        let io = |e| Error::io("write fingerprints to the temporary directory", e);
        // Behind what a survey that failed has left, too.
        let offset = self.file.len();
        let mut out = BufWriter::with_capacity(256 << 10, &mut *self.file);
        let (mut n, mut blocks) = (0, Vec::new());
        entries(&mut |e| {
            if n % BLOCK == 0 {
                blocks.push(e.main);
            }
            n += 1;
            out.write_all(&e.encode()).map_err(io)
        })?;
        out.flush().map_err(io)?;
        Ok(Written {
            file: self.nth,
            offset,
            entries: n,
            blocks,
        })
    }

    /// Surveys a full snapshot.
    ///
    /// # Errors
    /// `CorruptSnapshot`, `Io`, `NoSpace`.
    pub fn full<R: ReadAt>(&mut self, db: &Database<R>) -> Result<Survey> {
        let base = Base::read(db)?;
        let bucket = key_bucket(db)?;
        let written = self.write(|put| {
            let mut c = db.cursor(&bucket);
            while let Some(e) = c.next()? {
                let rk = RecordKey::decode(e.key)?;
                put(Entry::new(rk, &KeyValue::decode(e.value)?, e.value))?;
            }
            Ok(())
        })?;
        Ok(Survey {
            complete_from: base.compact_revision.next().max(Revision(1)),
            last: base.revision,
            base: Some(base),
            last_time: None,
            written,
        })
    }

    /// Surveys a delta snapshot.
    ///
    /// # Errors
    /// `CorruptSnapshot`, `NameMismatch`; what the source returns; `Io`, `NoSpace`.
    pub fn delta<R: Read>(&mut self, mut delta: DeltaReader<'_, R>) -> Result<Survey> {
        let (mut first, mut last) = (None, Revision(0));
        let mut last_time = None;
        let (mut record, mut value) = (Vec::new(), Vec::new());
        let written = self.write(|put| {
            while let Some(e) = delta.next()? {
                // Only who asks for a time needs one.
                if let Ok(time) = e.instant() {
                    last_time = last_time.max(Some(time));
                }
                first.get_or_insert(e.main);
                last = e.main;
                value.clear();
                e.change.append_value(e.main, &mut value)?;
                let (kv, tombstone) = match e.change {
                    Change::Put(kv) | Change::PutBase64(kv) => {
                        let value = value.as_slice();
                        (KeyValue { value, ..kv }, false)
                    }
                    Change::Delete { key } => (KeyValue::tombstone(key), true),
                };
                record.clear();
                kv.encode(&mut record);
                let rk = RecordKey {
                    main: e.main,
                    sub: e.sub,
                    tombstone,
                };
                put(Entry::new(rk, &kv, &record))?;
            }
            Ok(())
        })?;
        Ok(Survey {
            complete_from: first.unwrap_or_default(),
            last,
            base: None,
            last_time,
            written,
        })
    }
}

impl Surveys {
    /// Keeps fingerprints in `files`, which are empty: as many as threads survey at the same time.
    pub fn new(files: Vec<TempFile>) -> Self {
        Surveys { files }
    }

    /// One for each file.
    pub fn surveyors(&mut self) -> impl Iterator<Item = Surveyor<'_>> {
        let files = self.files.iter_mut().enumerate();
        files.map(|(nth, file)| Surveyor { nth, file })
    }

    fn entries<'s>(&'s self, survey: &'s Survey) -> Entries<'s> {
        Entries {
            file: &self.files[survey.written.file],
            survey,
            at: 0,
            until: Revision(i64::MAX),
            read: None,
            buf: Vec::new(),
        }
    }

    /// Compares what two snapshots hold, revision by revision, up to where they disagree.
    ///
    /// They disagree about a change that both hold with different content, and about one that the
    /// first holds and the second lacks although it holds every change of that revision.
    ///
    /// # Errors
    /// `Io`.
    pub fn compare(&self, a: &Survey, b: &Survey) -> Result<Comparison> {
        compare(&mut self.entries(a), &mut self.entries(b))
    }

    /// Compares all of these with each other. For each of them, by its place here, what it has to do with
    /// those before it; those with which it shares nothing are left out.
    ///
    /// # Errors
    /// `Io`.
    pub fn compare_all(&self, surveys: &[&Survey]) -> Result<Vec<Vec<(usize, Comparison)>>> {
        let mut found = vec![Vec::new(); surveys.len()];
        let mut note = |a: usize, b: usize, compared: Comparison| {
            if compared != Comparison::default() {
                found[a.max(b)].push((a.min(b), compared));
            }
        };
        let is_delta = |&i: &usize| surveys[i].base.is_none();
        let (mut deltas, fulls): (Vec<usize>, Vec<usize>) = (0..surveys.len()).partition(is_delta);
        deltas.sort_unstable_by_key(|&i| surveys[i].complete_from);
        for (a, b) in overlapping(surveys, &deltas) {
            note(a, b, self.compare(surveys[a], surveys[b])?);
        }
        for (n, &full) in fulls.iter().enumerate() {
            let mut entries = self.entries(surveys[full]);
            // In the order of their revisions, so that the full is read only once.
            for &delta in &deltas {
                if surveys[delta].complete_from > surveys[full].last {
                    break;
                }
                let compared = compare(&mut entries, &mut self.entries(surveys[delta]))?;
                note(full, delta, compared);
            }
            for &other in &fulls[..n] {
                note(full, other, self.compare(surveys[full], surveys[other])?);
            }
        }
        Ok(found)
    }

    /// Whether the events of `after` above `until` follow the state that `before` has there, judged
    /// by the versions of the keys in both.
    ///
    /// # Errors
    /// `Io`.
    pub fn continuity(
        &self,
        before: &Survey,
        until: Revision,
        after: &Survey,
    ) -> Result<Continuity> {
        let mut firsts: HashMap<u64, Entry> = HashMap::new();
        let mut entries = self.entries(after);
        entries.seek(until.next())?;
        while let Some(e) = entries.next()? {
            firsts.entry(e.key).or_insert(e);
        }
        let mut verdict = Continuity::Unknown;
        // The newest entry of a key tells its state: from there on backward, until all are told.
        let mut blocks = before.written.blocks.partition_point(|&b| b <= until);
        let mut entries = self.entries(before);
        while blocks > 0 && !firsts.is_empty() {
            blocks -= 1;
            entries.read(blocks)?;
            for state in entries.block().rev().filter(|e| e.main <= until) {
                let Some(first) = firsts.remove(&state.key) else {
                    continue;
                };
                if !first.follows(&state) {
                    return Ok(Continuity::Contradicted);
                }
                verdict = Continuity::Confirmed;
            }
        }
        // A full that can tell the state there holds every key that is alive; a delta only those
        // that it changed.
        if before.base.is_some_and(|b| b.compact_revision <= until) {
            for first in firsts.values() {
                if !first.begins() {
                    return Ok(Continuity::Contradicted);
                }
                verdict = Continuity::Confirmed;
            }
        }
        Ok(verdict)
    }

    /// A short name for what a snapshot holds at `revision` (8 hexadecimal digits).
    ///
    /// # Errors
    /// `Io`.
    pub fn fingerprint(&self, s: &Survey, revision: Revision) -> Result<String> {
        let mut hash = Sha256::new();
        let mut entries = self.entries(s);
        entries.seek(revision)?;
        while let Some(e) = entries.next()?.filter(|e| e.main == revision) {
            hash.update(e.encode());
        }
        Ok(hex(&hash.finalize()[..4]))
    }
}

/// The pairs of `deltas`, which are in the order of their first revisions, that hold a revision in common.
fn overlapping(surveys: &[&Survey], deltas: &[usize]) -> Vec<(usize, usize)> {
    let mut before = Intervals::new(surveys.iter().map(|s| s.complete_from));
    let mut pairs = Vec::new();
    for &delta in deltas {
        let others = before.holding(surveys[delta].complete_from);
        pairs.extend(others.map(|other| (other, delta)));
        before.set(delta, surveys[delta].last);
    }
    pairs
}

fn compare(left: &mut Entries<'_>, right: &mut Entries<'_>) -> Result<Comparison> {
    let mut found = Comparison::default();
    let (a, b) = (left.survey, right.survey);
    let (from, to) = (a.span().0.max(b.span().0), a.span().1.min(b.span().1));
    if from > to {
        return Ok(found);
    }
    left.until = to;
    left.seek(from)?;
    let mut l = left.next()?;
    if l.is_none() && to < a.complete_from {
        return Ok(found);
    }
    right.until = to;
    right.seek(from)?;
    let mut r = right.next()?;
    let complete = |s: &Survey, e: &Entry| e.main >= s.complete_from && e.main <= s.last;
    found.conflict = loop {
        match (l, r) {
            (Some(x), Some(y)) if x.order() == y.order() => {
                if (x.digest, x.tombstone) != (y.digest, y.tombstone) {
                    break Some(x.main);
                }
                found.agreed = Some(x.main);
                (l, r) = (left.next()?, right.next()?);
            }
            (Some(x), y) if y.is_none_or(|y| x.order() < y.order()) => {
                if complete(b, &x) {
                    break Some(x.main);
                }
                l = left.next()?;
            }
            (_, Some(y)) => {
                if complete(a, &y) {
                    break Some(y.main);
                }
                r = right.next()?;
            }
            _ => break None,
        }
    };
    // Of a transaction that differs, its first changes may be the same.
    if found.agreed == found.conflict {
        found.agreed = found.agreed.map(Revision::previous);
    }
    Ok(found)
}

/// Goes through a snapshot's entries, a block at a time.
struct Entries<'f> {
    file: &'f TempFile,
    survey: &'f Survey,
    /// The next one.
    at: usize,
    /// Those above do not count.
    until: Revision,
    /// The block that is in `buf`.
    read: Option<usize>,
    buf: Vec<u8>,
}

impl Entries<'_> {
    fn read(&mut self, block: usize) -> Result<()> {
        if self.read == Some(block) {
            return Ok(());
        }
        let first = block * BLOCK;
        let n = BLOCK.min(self.survey.written.entries - first);
        self.buf.resize(n * ENTRY, 0);
        let offset = self.survey.written.offset + (first * ENTRY) as u64;
        ReadAt::read_exact_at(self.file, &mut self.buf, offset)
            .map_err(|e| Error::io("read fingerprints from the temporary directory", e))?;
        self.read = Some(block);
        Ok(())
    }

    fn entries(&self) -> &[[u8; ENTRY]] {
        self.buf.as_chunks().0
    }

    /// The entries of the block that was read.
    fn block(&self) -> impl DoubleEndedIterator<Item = Entry> + ExactSizeIterator + '_ {
        self.entries().iter().map(Entry::decode)
    }

    /// Goes to the first entry that is not below `from`.
    fn seek(&mut self, from: Revision) -> Result<()> {
        // All before this block is below, and nothing behind it is.
        let block = self.survey.written.blocks.partition_point(|&b| b < from);
        let Some(block) = block.checked_sub(1) else {
            self.at = 0;
            return Ok(());
        };
        self.read(block)?;
        let below = self
            .entries()
            .partition_point(|b| Entry::decode(b).main < from);
        self.at = block * BLOCK + below;
        Ok(())
    }

    fn next(&mut self) -> Result<Option<Entry>> {
        if self.at == self.survey.written.entries {
            return Ok(None);
        }
        self.read(self.at / BLOCK)?;
        let e = Entry::decode(&self.entries()[self.at % BLOCK]);
        self.at += 1;
        Ok(Some(e).filter(|e| e.main <= self.until))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::temp::TempFile;

    /// One of the histories that are the same below a revision: a key changes in each revision, some keys are
    /// deleted now and then.
    struct History(Vec<Entry>);

    impl History {
        fn new(rng: &mut fastrand::Rng) -> Self {
            let (fork, own) = (rng.i64(1..80), rng.u64(..));
            let mut rng = fastrand::Rng::with_seed(0x5eed_5eed_5eed_5eed);
            let mut states: HashMap<u64, Entry> = HashMap::new();
            let mut entries = Vec::new();
            for r in 1..80 {
                if r == fork {
                    rng = fastrand::Rng::with_seed(own);
                }
                for sub in 0..rng.u32(1..3) {
                    let key = rng.u64(..6);
                    let before = states.get(&key).filter(|s| !s.tombstone);
                    let e = Entry {
                        main: Revision(r),
                        sub,
                        tombstone: before.is_some() && rng.u8(..4) == 0,
                        key,
                        create: before.map_or(r, |b| b.create),
                        version: before.map_or(1, |b| b.version + 1),
                        digest: rng.u64(..3),
                    };
                    states.insert(key, e);
                    entries.push(e);
                }
            }
            History(entries)
        }

        /// What a full of `last` holds that was compacted at `compact`.
        fn full(&self, compact: i64, last: i64) -> Vec<Entry> {
            let below = |e: &&Entry| e.main.0 <= compact;
            let newest: HashMap<u64, &Entry> =
                self.0.iter().filter(below).map(|e| (e.key, e)).collect();
            let is_held = |e: &&Entry| {
                let is_newest = newest.get(&e.key).is_none_or(|n| n == e);
                e.main.0 <= last && (e.main.0 > compact || is_newest && !e.tombstone)
            };
            self.0.iter().filter(is_held).copied().collect()
        }

        fn delta(&self, first: i64, last: i64) -> Vec<Entry> {
            let held = self.0.iter().filter(|e| (first..=last).contains(&e.main.0));
            held.copied().collect()
        }
    }

    fn random(rng: &mut fastrand::Rng, surveys: &mut Surveys) -> (Survey, Vec<Entry>) {
        let history = History::new(rng);
        let last = rng.i64(1..80);
        let first = last - rng.i64(0..last.min(30));
        let base = (rng.u8(..3) == 0).then_some(Base {
            revision: Revision(last),
            compact_revision: Revision(first),
            compaction_finished: true,
            metadata_revision: Revision(last),
        });
        let entries = match base {
            Some(_) => history.full(first, last),
            None => history.delta(first, last),
        };
        let nth = rng.usize(..2);
        let mut surveyor = surveys.surveyors().nth(nth).unwrap();
        let written = surveyor.write(|put| entries.iter().try_for_each(|&e| put(e)));
        let survey = Survey {
            complete_from: Revision(first + i64::from(base.is_some())),
            last: Revision(last),
            base,
            last_time: None,
            written: written.unwrap(),
        };
        (survey, entries)
    }

    /// By looking at every revision.
    fn compared(a: &(Survey, Vec<Entry>), b: &(Survey, Vec<Entry>)) -> Comparison {
        let mut found = Comparison::default();
        let of = |s: &(Survey, Vec<Entry>), r: i64, sub: u32| {
            let e = s.1.iter().find(|e| (e.main.0, e.sub) == (r, sub));
            e.map(|e| (e.digest, e.tombstone))
        };
        let all = |s: &Survey, r: i64| (s.complete_from.0..=s.last.0).contains(&r);
        for (r, sub) in (0..90).flat_map(|r| [(r, 0), (r, 1)]) {
            let differ = match (of(a, r, sub), of(b, r, sub)) {
                (Some(x), Some(y)) => x != y,
                (Some(_), None) => all(&b.0, r),
                (None, Some(_)) => all(&a.0, r),
                (None, None) => continue,
            };
            if differ {
                found.conflict = Some(Revision(r));
                let is_here = |agreed: Revision| agreed.0 == r;
                if found.agreed.is_some_and(is_here) {
                    found.agreed = Some(Revision(r - 1));
                }
                return found;
            }
            if of(a, r, sub).is_some() && of(b, r, sub).is_some() {
                found.agreed = Some(Revision(r));
            }
        }
        found
    }

    /// By the state of every key.
    fn continuity(a: &(Survey, Vec<Entry>), until: i64, b: &(Survey, Vec<Entry>)) -> Continuity {
        let tells_all = a.0.base.is_some_and(|b| b.compact_revision.0 <= until);
        let mut verdict = Continuity::Unknown;
        for key in 0..6 {
            let first = b.1.iter().find(|e| e.key == key && e.main.0 > until);
            let mut states = a.1.iter().filter(|e| e.key == key && e.main.0 <= until);
            let follows = match (first, states.next_back()) {
                (None, _) => continue,
                (Some(_), None) if !tells_all => continue,
                (Some(f), s) if s.is_none_or(|s| s.tombstone) => !f.tombstone && f.version == 1,
                (Some(f), s) => {
                    let is_next = |s: &Entry| f.create == s.create && f.version == s.version + 1;
                    f.tombstone || s.is_some_and(is_next)
                }
            };
            match follows {
                true => verdict = Continuity::Confirmed,
                false => return Continuity::Contradicted,
            }
        }
        verdict
    }

    #[test]
    fn surveys_tell_the_same_as_all_that_they_hold() {
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        let (mut conflicts, mut verdicts) = (0, [0; 3]);
        for round in 0..crate::rounds(100, 1000) {
            let file = || TempFile::plain(tempfile::tempfile().unwrap()).unwrap();
            let mut file = Surveys::new(vec![file(), file()]);
            let all: Vec<_> = (0..8).map(|_| random(&mut rng, &mut file)).collect();
            let surveys: Vec<&Survey> = all.iter().map(|s| &s.0).collect();
            let found = file.compare_all(&surveys).unwrap();
            for (b, found) in found.into_iter().enumerate() {
                let mut found: HashMap<usize, Comparison> = found.into_iter().collect();
                for a in 0..b {
                    let expected = compared(&all[a], &all[b]);
                    let told = format!("round {round}: {:?} and {:?}", all[a], all[b]);
                    let found = found.remove(&a).unwrap_or_default();
                    assert_eq!(found, expected, "{told}");
                    assert_eq!(file.compare(surveys[b], surveys[a]).unwrap(), expected);
                    conflicts += usize::from(expected.conflict.is_some());
                    for until in [surveys[a].last.0, surveys[b].complete_from.0 - 1] {
                        let said = file.continuity(surveys[a], Revision(until), surveys[b]);
                        let expected = continuity(&all[a], until, &all[b]);
                        assert_eq!(said.unwrap(), expected, "{until}, {told}");
                        verdicts[expected as usize] += 1;
                    }
                }
                assert!(found.is_empty());
            }
        }
        println!("{conflicts} conflicts, verdicts {verdicts:?}");
        assert!(conflicts > 100 && verdicts.iter().all(|&n| n > 100));
    }

    /// Two streams of the same events: a delta is compared with those that it overlaps alone.
    #[test]
    fn comparisons_grow_with_the_snapshots_and_not_with_their_square() {
        let delta = |first: i64| Survey {
            complete_from: Revision(first),
            last: Revision(first + 9),
            base: None,
            last_time: None,
            written: Written {
                file: 0,
                offset: 0,
                entries: 0,
                blocks: Vec::new(),
            },
        };
        let all: Vec<Survey> = (0..8000).map(|n| delta(1 + n * 5)).collect();
        let surveys: Vec<&Survey> = all.iter().collect();
        let deltas: Vec<usize> = (0..surveys.len()).collect();
        let pairs = overlapping(&surveys, &deltas).len();
        assert_eq!(pairs, deltas.len() - 1);
    }
}
