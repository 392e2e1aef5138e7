//! What tells two histories apart: the fingerprints of every record that a snapshot holds.
//!
//! A survey is made where names leave doubt. Its fingerprints lie in one unnamed file of the
//! temporary directory, so that memory does not grow with the snapshots. It draws no conclusion
//! about branches; `timeline` does.

use crate::bolt::{Database, ReadAt};
use crate::bucket::delta::DeltaReader;
use crate::error::{Error, Result};
use crate::mvcc::history::{Base, key_bucket};
use crate::mvcc::{Change, KeyValue, RecordKey, Revision};
use crate::temp::TempFile;
use chrono::{DateTime, Utc};
use hashbrown::HashMap;
use sha2::{Digest, Sha256};
use std::io::{BufWriter, Read, Write};

/// Bytes of an [`Entry`] on disk.
const ENTRY: usize = 48;

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
    offset: u64,
    entries: u64,
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
        let mut b = [0; ENTRY];
        b[..8].copy_from_slice(&self.main.0.to_le_bytes());
        b[8..12].copy_from_slice(&self.sub.to_le_bytes());
        b[12] = u8::from(self.tombstone);
        b[16..24].copy_from_slice(&self.key.to_le_bytes());
        b[24..32].copy_from_slice(&self.create.to_le_bytes());
        b[32..40].copy_from_slice(&self.version.to_le_bytes());
        b[40..].copy_from_slice(&self.digest.to_le_bytes());
        b
    }

    fn decode(b: &[u8]) -> Self {
        let word = |at: usize| {
            let mut w = [0; 8];
            w.copy_from_slice(&b[at..at + 8]);
            u64::from_le_bytes(w)
        };
        Entry {
            main: Revision(word(0) as i64),
            sub: word(8) as u32,
            tombstone: b[12] != 0,
            key: word(16),
            create: word(24) as i64,
            version: word(32) as i64,
            digest: word(40),
        }
    }

    fn order(&self) -> (Revision, u32) {
        (self.main, self.sub)
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
pub struct SurveyFile {
    file: TempFile,
}

impl SurveyFile {
    /// Keeps fingerprints in `file`, which is empty.
    pub fn new(file: TempFile) -> Self {
        SurveyFile { file }
    }

    fn write(
        &mut self,
        mut entries: impl FnMut(&mut dyn FnMut(Entry) -> Result<()>) -> Result<()>,
    ) -> Result<(u64, u64)> {
        let io = |e| Error::io("write fingerprints to the temporary directory", e);
        // Behind what a survey that failed has left, too.
        let offset = self.file.len();
        let mut out = BufWriter::with_capacity(256 << 10, &mut self.file);
        let mut n = 0;
        entries(&mut |e| {
            n += 1;
            out.write_all(&e.encode()).map_err(io)
        })?;
        out.flush().map_err(io)?;
        Ok((offset, n))
    }

    /// Surveys a full snapshot.
    ///
    /// # Errors
    /// `CorruptSnapshot`, `Io`, `NoSpace`.
    pub fn full<R: ReadAt>(&mut self, db: &Database<R>) -> Result<Survey> {
        let base = Base::read(db)?;
        let bucket = key_bucket(db)?;
        let (offset, entries) = self.write(|put| {
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
            offset,
            entries,
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
        let (offset, entries) = self.write(|put| {
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
            offset,
            entries,
        })
    }

    fn entries(&self, s: &Survey) -> Entries<'_> {
        Entries {
            file: &self.file,
            next: s.offset,
            end: s.offset + s.entries * ENTRY as u64,
            buf: Vec::new(),
            at: 0,
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
        let mut found = Comparison::default();
        // A delta shares nothing with what ends before it.
        let apart = |x: &Survey, y: &Survey| y.base.is_none() && x.last < y.complete_from;
        if apart(a, b) || apart(b, a) {
            return Ok(found);
        }
        let complete = |s: &Survey, e: &Entry| e.main >= s.complete_from && e.main <= s.last;
        let (mut left, mut right) = (self.entries(a), self.entries(b));
        let (mut l, mut r) = (left.next()?, right.next()?);
        loop {
            match (l, r) {
                (Some(x), Some(y)) if x.order() == y.order() => {
                    if (x.digest, x.tombstone) != (y.digest, y.tombstone) {
                        found.conflict = Some(x.main);
                        break;
                    }
                    found.agreed = Some(x.main);
                    (l, r) = (left.next()?, right.next()?);
                }
                (Some(x), y) if y.is_none_or(|y| x.order() < y.order()) => {
                    if complete(b, &x) {
                        found.conflict = Some(x.main);
                        break;
                    }
                    l = left.next()?;
                }
                (_, Some(y)) => {
                    if complete(a, &y) {
                        found.conflict = Some(y.main);
                        break;
                    }
                    r = right.next()?;
                }
                _ => break,
            }
        }
        // Of a transaction that differs, its first changes may be the same.
        if found.agreed == found.conflict {
            found.agreed = found.agreed.map(Revision::previous);
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
        while let Some(e) = entries.next()? {
            if e.main > until {
                firsts.entry(e.key).or_insert(e);
            }
        }
        let mut states: HashMap<u64, Entry> = HashMap::new();
        let mut entries = self.entries(before);
        while let Some(e) = entries.next()?.filter(|e| e.main <= until) {
            if firsts.contains_key(&e.key) {
                states.insert(e.key, e);
            }
        }
        // A full that can tell the state there holds every key that is alive; a delta only those
        // that it changed.
        let tells_all = before.base.is_some_and(|b| b.compact_revision <= until);
        let mut verdict = Continuity::Unknown;
        for (key, first) in &firsts {
            let follows = match states.get(key) {
                None if tells_all => !first.tombstone && first.version == 1,
                None => continue,
                Some(s) if s.tombstone => !first.tombstone && first.version == 1,
                Some(s) => {
                    first.tombstone
                        || (first.create == s.create && first.version == s.version.wrapping_add(1))
                }
            };
            if !follows {
                return Ok(Continuity::Contradicted);
            }
            verdict = Continuity::Confirmed;
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
        while let Some(e) = entries.next()? {
            if e.main == revision {
                hash.update(e.encode());
            }
        }
        Ok(hash.finalize()[..4]
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect())
    }
}

struct Entries<'f> {
    file: &'f TempFile,
    next: u64,
    end: u64,
    buf: Vec<u8>,
    at: usize,
}

impl Entries<'_> {
    fn next(&mut self) -> Result<Option<Entry>> {
        if self.at == self.buf.len() {
            let n = (self.end - self.next).min(1024 * ENTRY as u64) as usize;
            if n == 0 {
                return Ok(None);
            }
            self.buf.resize(n, 0);
            ReadAt::read_exact_at(self.file, &mut self.buf, self.next)
                .map_err(|e| Error::io("read fingerprints from the temporary directory", e))?;
            self.next += n as u64;
            self.at = 0;
        }
        let e = Entry::decode(&self.buf[self.at..self.at + ENTRY]);
        self.at += ENTRY;
        Ok(Some(e))
    }
}
