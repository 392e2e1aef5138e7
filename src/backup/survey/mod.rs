//! Surveys of snapshots: fingerprints of all records that a snapshot holds, to tell histories apart.
//!
//! A survey is made if names do not tell which timeline a snapshot belongs to. Fingerprints are stored in
//! unnamed files of the temporary directory, one for each thread, so memory does not grow with the snapshots.
//! Surveys are compared here; `timeline` concludes from the comparison.

mod fingerprints;

#[cfg(test)]
mod tests;

use crate::backup::delta::DeltaReader;
use crate::base::ReadAt;
use crate::base::hash::hex;
use crate::base::temp::{self, TempFile};
use crate::bolt::Database;
use crate::error::{Error, Result};
use crate::mvcc::history::{Base, key_bucket};
use crate::mvcc::{Change, KeyValue, RecordKey, Revision};
use crate::objects::{Detail, EncryptionKeys, Object};
use chrono::{DateTime, Utc};
use fingerprints::{BLOCK, Fingerprint, FingerprintReader, StoredFingerprints};
use hashbrown::HashMap;
use sha2::{Digest, Sha256};
use std::io::{BufWriter, Read, Write};

/// The keys of the namespace `kube-system`: those of Kubernetes and of OpenShift.
const KUBE_SYSTEM: [&[u8]; 2] = [
    b"/registry/namespaces/kube-system",
    b"/kubernetes.io/namespaces/kube-system",
];

/// Returns the UID of an object; `None` if it was deleted, or cannot be decoded.
fn uid_of(kv: &KeyValue<'_>) -> Option<String> {
    let keys = EncryptionKeys::default();
    let object = Object::of_record_with(kv, &keys, Detail::WithoutManagers).ok()?;
    let uid = object.json.get("metadata")?.get("uid")?.as_str()?;
    Some(uid.to_owned())
}

/// A summary of one snapshot's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Survey {
    /// The snapshot holds every change from this revision to `last`; below it, only what a compaction left.
    pub complete_from: Revision,
    /// The newest revision. That of a full may be higher than its name says.
    pub last: Revision,
    /// The revisions of a full; `None` for a delta.
    pub base: Option<Base>,
    /// The time of the newest event of a delta; `None` for a full.
    pub last_time: Option<DateTime<Utc>>,
    /// The UID of the namespace `kube-system`, which stands for its cluster. Only that of a full is known.
    pub kube_system: Option<String>,
    stored: StoredFingerprints,
}

impl Survey {
    /// The revisions that the snapshot holds.
    pub fn held(&self) -> Held {
        let first = self.stored.blocks.first().copied();
        Held {
            first: first.map_or(self.complete_from, |f| f.min(self.complete_from)),
            complete_from: self.complete_from,
            last: self.last,
        }
    }
}

/// The revisions that a snapshot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// The first one with a change.
    pub first: Revision,
    /// From here to `last` the snapshot holds every change; below, only what a compaction left.
    pub complete_from: Revision,
    /// The last one.
    pub last: Revision,
}

/// The result of comparing two snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Comparison {
    /// The first revision at which they disagree.
    pub conflict: Option<Revision>,
    /// The newest revision below the conflict at which both hold the same change.
    pub agreed: Option<Revision>,
}

impl Comparison {
    /// Adds a comparison with another snapshot. Of that snapshot, only the revisions up to `until` count.
    pub fn add(&mut self, with: Comparison, until: Revision) {
        let conflicts = [self.conflict, with.conflict.filter(|&r| r <= until)];
        self.conflict = conflicts.into_iter().flatten().min();
        self.agreed = self.agreed.max(with.agreed.map(|r| r.min(until)));
    }

    /// Returns the newest revision below the conflict at which both hold the same change.
    pub fn common(&self) -> Option<Revision> {
        let before = self.conflict.map(Revision::previous);
        self.agreed
            .map(|agreed| before.map_or(agreed, |before| agreed.min(before)))
    }
}

/// Whether the events of a delta follow the state at the end of another snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Continuity {
    /// The version of a key does not follow.
    Contradicted,
    /// The snapshots have no key in common.
    Unknown,
    /// The versions of all common keys follow.
    Confirmed,
}

/// The files that hold the fingerprints of all surveyed snapshots.
#[derive(Debug)]
pub struct FingerprintFiles {
    files: Vec<TempFile>,
}

/// Surveys one snapshot after the other, and writes their fingerprints to one file.
pub struct Surveyor<'f> {
    /// The index of the file.
    nth: usize,
    file: &'f mut TempFile,
}

impl Surveyor<'_> {
    fn write(
        &mut self,
        mut each_fingerprint: impl FnMut(&mut dyn FnMut(Fingerprint) -> Result<()>) -> Result<()>,
    ) -> Result<StoredFingerprints> {
        let io = |e| Error::io("write fingerprints to the temporary directory", e);
        // A survey that failed may have left bytes before this offset.
        let offset = self.file.len();
        let mut out = BufWriter::with_capacity(256 << 10, &mut *self.file);
        let (mut count, mut blocks) = (0, Vec::new());
        each_fingerprint(&mut |e| {
            if count % BLOCK == 0 {
                blocks.push(e.main);
            }
            count += 1;
            out.write_all(&e.encode()).map_err(io)
        })?;
        out.flush().map_err(io)?;
        Ok(StoredFingerprints {
            file: self.nth,
            offset,
            count,
            blocks,
        })
    }

    /// Surveys a full.
    ///
    /// # Errors
    /// `CorruptSnapshot`, `Io`, `NoSpace`.
    pub fn full<R: ReadAt>(&mut self, db: &Database<R>) -> Result<Survey> {
        let base = Base::read(db)?;
        let bucket = key_bucket(db)?;
        let mut kube_system = None;
        let stored = self.write(|put| {
            let mut c = db.cursor(&bucket);
            while let Some(e) = c.next()? {
                let rk = RecordKey::decode(e.key)?;
                let kv = KeyValue::decode(e.value)?;
                if KUBE_SYSTEM.contains(&kv.key) {
                    kube_system = uid_of(&kv);
                }
                put(Fingerprint::new(rk, &kv, e.value))?;
            }
            Ok(())
        })?;
        Ok(Survey {
            complete_from: base.compact_revision.next().max(Revision(1)),
            last: base.revision,
            base: Some(base),
            last_time: None,
            kube_system,
            stored,
        })
    }

    /// Surveys a delta.
    ///
    /// # Errors
    /// `CorruptSnapshot`, `NameMismatch`; errors of the delta's source; `Io`, `NoSpace`.
    pub fn delta<R: Read>(&mut self, mut delta: DeltaReader<'_, R>) -> Result<Survey> {
        let (mut first, mut last) = (None, Revision(0));
        let mut last_time = None;
        let (mut record, mut value) = (Vec::new(), Vec::new());
        let stored = self.write(|put| {
            while let Some(e) = delta.next()? {
                // An invalid time is no error here: only a restore to a time needs the times.
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
                put(Fingerprint::new(rk, &kv, &record))?;
            }
            Ok(())
        })?;
        Ok(Survey {
            complete_from: first.unwrap_or_default(),
            last,
            base: None,
            last_time,
            kube_system: None,
            stored,
        })
    }
}

impl FingerprintFiles {
    /// Stores fingerprints in `files`, which must be empty. There is one file for each thread that surveys.
    pub fn new(files: Vec<TempFile>) -> Self {
        FingerprintFiles { files }
    }

    /// Returns a surveyor for each file.
    pub fn surveyors(&mut self) -> impl Iterator<Item = Surveyor<'_>> {
        let files = self.files.iter_mut().enumerate();
        files.map(|(nth, file)| Surveyor { nth, file })
    }

    fn fingerprints<'s>(&'s self, survey: &'s Survey) -> FingerprintReader<'s> {
        FingerprintReader {
            file: &self.files[survey.stored.file],
            survey,
            next: 0,
            until: Revision(i64::MAX),
            block: None,
            buf: Vec::new(),
        }
    }

    /// Compares two snapshots revision by revision, up to the first conflict.
    ///
    /// A conflict is a change that differs, or that one snapshot lacks although it holds every change of the
    /// revision.
    ///
    /// # Errors
    /// `Io`.
    pub fn compare(&self, a: &Survey, b: &Survey) -> Result<Comparison> {
        compare(&mut self.fingerprints(a), &mut self.fingerprints(b))
    }

    /// Returns whether the events of `after` above `until` follow the state of `before` at `until`, by the
    /// versions of the keys that are in both.
    ///
    /// # Errors
    /// `Io`.
    pub fn continuity(
        &self,
        before: &Survey,
        until: Revision,
        after: &Survey,
    ) -> Result<Continuity> {
        let mut first_changes: HashMap<u64, Fingerprint> = HashMap::new();
        let mut fingerprints = self.fingerprints(after);
        fingerprints.seek(until.next())?;
        while let Some(e) = fingerprints.next()? {
            first_changes.entry(e.key).or_insert(e);
        }
        let mut continuity = Continuity::Unknown;
        // The newest fingerprint of a key gives its state. Read backward until the state of every key is
        // found.
        let mut blocks = before.stored.blocks.partition_point(|&b| b <= until);
        let mut fingerprints = self.fingerprints(before);
        while blocks > 0 && !first_changes.is_empty() {
            blocks -= 1;
            fingerprints.read_block(blocks)?;
            for state in fingerprints.block().rev().filter(|e| e.main <= until) {
                let Some(first) = first_changes.remove(&state.key) else {
                    continue;
                };
                if !first.follows(&state) {
                    return Ok(Continuity::Contradicted);
                }
                continuity = Continuity::Confirmed;
            }
        }
        // A full that was not compacted past `until` holds every live key, so a key that it lacks must be
        // created anew. A delta holds only the keys that it changed.
        if before.base.is_some_and(|b| b.compact_revision <= until) {
            for first in first_changes.values() {
                if !first.creates_key() {
                    return Ok(Continuity::Contradicted);
                }
                continuity = Continuity::Confirmed;
            }
        }
        Ok(continuity)
    }

    /// Returns a short name for what a snapshot holds at `revision`: 8 hexadecimal digits.
    ///
    /// # Errors
    /// `Io`.
    pub fn fingerprint(&self, s: &Survey, revision: Revision) -> Result<String> {
        let mut hash = Sha256::new();
        let mut fingerprints = self.fingerprints(s);
        fingerprints.seek(revision)?;
        while let Some(e) = fingerprints.next()?.filter(|e| e.main == revision) {
            hash.update(e.encode());
        }
        Ok(hex(&hash.finalize()[..4]))
    }
}

fn compare(
    left: &mut FingerprintReader<'_>,
    right: &mut FingerprintReader<'_>,
) -> Result<Comparison> {
    let mut comparison = Comparison::default();
    let (a, b) = (left.survey, right.survey);
    let (from, to) = (a.held().first.max(b.held().first), a.last.min(b.last));
    if from > to {
        return Ok(comparison);
    }
    left.until = to;
    left.seek(from)?;
    let mut l = left.next()?;
    if l.is_none() && to < a.complete_from {
        return Ok(comparison);
    }
    right.until = to;
    right.seek(from)?;
    let mut r = right.next()?;
    let holds_all_of = |s: &Survey, e: &Fingerprint| s.complete_from <= e.main && e.main <= s.last;
    comparison.conflict = loop {
        match (l, r) {
            (Some(x), Some(y)) if x.order() == y.order() => {
                if (x.digest, x.tombstone) != (y.digest, y.tombstone) {
                    break Some(x.main);
                }
                comparison.agreed = Some(x.main);
                (l, r) = (left.next()?, right.next()?);
            }
            (Some(x), y) if y.is_none_or(|y| x.order() < y.order()) => {
                if holds_all_of(b, &x) {
                    break Some(x.main);
                }
                l = left.next()?;
            }
            (_, Some(y)) => {
                if holds_all_of(a, &y) {
                    break Some(y.main);
                }
                r = right.next()?;
            }
            _ => break None,
        }
    };
    // The first changes of a transaction may be the same although the transaction differs.
    if comparison.agreed == comparison.conflict {
        comparison.agreed = comparison.agreed.map(Revision::previous);
    }
    Ok(comparison)
}

/// How a full goes on from another one, by their contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sequel {
    /// Both hold a change at the same revision, and nothing that disagrees.
    Continues,
    /// Nothing disagrees, and no change is in both.
    NothingInCommon,
    /// The cluster was set back: the words say what disagrees.
    SetBack(String),
    /// The namespace `kube-system` is another one: it has this UID instead of that of the full before.
    OtherCluster(String, String),
}

/// Compares the histories of fulls, one after the other.
pub struct Histories {
    temp: temp::Dir,
    /// The files of the last two fulls, in turn: memory and disk do not grow with the number of fulls.
    fingerprints: FingerprintFiles,
    last: Option<Survey>,
}

impl Histories {
    /// Compares none yet. The fingerprints go to this directory.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`.
    pub fn new(temp: temp::Dir) -> Result<Self> {
        Ok(Histories {
            fingerprints: FingerprintFiles::new(vec![temp.file()?, temp.file()?]),
            temp,
            last: None,
        })
    }

    /// Compares a full with the one before it; `None` if it is the first one.
    ///
    /// # Errors
    /// `CorruptSnapshot`, `Io`, `NoSpace`.
    pub fn next<R: ReadAt>(&mut self, db: &Database<R>) -> Result<Option<Sequel>> {
        let nth = self.last.as_ref().map_or(0, |last| 1 - last.stored.file);
        let file = &mut self.fingerprints.files[nth];
        *file = self.temp.file()?;
        let survey = Surveyor { nth, file }.full(db)?;
        let last = self.last.replace(survey);
        let (Some(last), Some(survey)) = (last, &self.last) else {
            return Ok(None);
        };
        if let (Some(before), Some(uid)) = (&last.kube_system, &survey.kube_system)
            && before != uid
        {
            return Ok(Some(Sequel::OtherCluster(uid.clone(), before.clone())));
        }
        let compared = self.fingerprints.compare(&last, survey)?;
        Ok(Some(if let Some(revision) = compared.conflict {
            Sequel::SetBack(format!("they differ at revision {revision}"))
        } else if survey.last < last.last {
            Sequel::SetBack(format!(
                "it ends at revision {}, before {}",
                survey.last, last.last
            ))
        } else if compared.agreed.is_none() {
            Sequel::NothingInCommon
        } else {
            Sequel::Continues
        }))
    }

    /// Returns the UID of the namespace `kube-system` in the last full; `None` if it has none.
    pub fn kube_system(&self) -> Option<&str> {
        self.last.as_ref()?.kube_system.as_deref()
    }
}
