//! The check of fulls' contents: anybody who can write to the store can give any object the name of a
//! full.
//!
//! A full is read whole once, when a decision first depends on it. A note in the backup remembers the
//! result by path, size, ETag and time. The note is as easy to forge as a full: it saves work and
//! proves nothing. Called by `ops::gc::plan`.

use super::as_json;
use crate::backup::Snapshot;
use crate::error::{Reason, Result};
use crate::ops::Context;
use crate::ops::fold::open::SnapshotReader;
use crate::ops::fold::rebuild::read_every_page;
use crate::store::{ObjectInfo, encryption};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

/// The path of the note.
pub(super) const NOTE_PATH: &str = "deltafold-verified.json";
/// The version of the note's format.
const FORMAT_VERSION: u32 = 1;
/// The largest note that is read, in bytes.
const MOST_NOTE_BYTES: u64 = 8 << 20;
/// The most fulls in the note: the newest ones.
const MOST_NOTED: usize = 10_000;
/// The longest message in the note, in characters.
const LONGEST_MESSAGE: usize = 300;
/// The most fulls that one run reads.
const MOST_READ: usize = 32;
/// A run that has spent this time on reading reads no further full.
const LONGEST_READING: Duration = Duration::from_secs(600);

/// Why a full is ignored: the name of the reason, and a message.
pub(super) type Damage = (String, String);

/// What is known about the content of a full.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum FullState {
    /// It is what its name says.
    Good,
    /// It is damaged, or not what its name says.
    Damaged(Damage),
    /// It was not read, for lack of time or space.
    NotRead,
}

/// The content of the note.
#[derive(Serialize, Deserialize)]
struct Note {
    /// The version of the format.
    form: u32,
    fulls: BTreeMap<String, FullRecord>,
}

/// What distinguishes the versions of a full's object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FullVersion {
    bytes: u64,
    etag: Option<String>,
    modified: DateTime<Utc>,
}

impl From<&ObjectInfo> for FullVersion {
    fn from(o: &ObjectInfo) -> Self {
        FullVersion {
            bytes: o.bytes,
            etag: o.etag.clone(),
            modified: o.modified,
        }
    }
}

/// The result of reading a full.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct FullRecord {
    #[serde(flatten)]
    version: FullVersion,
    read_at: DateTime<Utc>,
    /// The SHA-256 of the object as stored. `None` if the full is bad, or if only its header could be
    /// checked since there is no identity.
    sha256: Option<String>,
    #[serde(rename = "bad")]
    damage: Option<Damage>,
    /// The result depends on the flags of this run, so it is not written to the note.
    #[serde(skip)]
    depends_on_flags: bool,
}

/// The results of reading fulls, in this run and in earlier ones.
pub(super) struct VerifiedFulls<'a> {
    ctx: &'a Context,
    /// The records by path; `None` until the note is read.
    records: Option<BTreeMap<String, FullRecord>>,
    /// Whether a record was added that the stored note lacks.
    has_new: bool,
    /// Number of fulls that this run has read.
    pub(super) read: usize,
    reading: Duration,
    /// Problems that are not faults of a full.
    pub(super) warnings: Vec<String>,
}

impl<'a> VerifiedFulls<'a> {
    pub(super) fn new(ctx: &'a Context) -> Self {
        VerifiedFulls {
            ctx,
            records: None,
            has_new: false,
            read: 0,
            reading: Duration::ZERO,
            warnings: Vec::new(),
        }
    }

    /// Reads the note, unless it was read before.
    ///
    /// # Errors
    /// Fails with the store's errors, except those about the note itself: without it, fulls are read
    /// again.
    pub(super) fn load(&mut self) -> Result<()> {
        if self.records.is_none() {
            self.records = Some(self.read_note()?);
        }
        Ok(())
    }

    fn read_note(&mut self) -> Result<BTreeMap<String, FullRecord>> {
        let name = self.ctx.store.name(NOTE_PATH);
        let problem = match self.ctx.store.read_small(NOTE_PATH, MOST_NOTE_BYTES) {
            Ok(None) => return Ok(BTreeMap::new()),
            Ok(Some(text)) => match serde_json::from_slice::<Note>(&text) {
                Ok(note) if note.form == FORMAT_VERSION => return Ok(note.fulls),
                Ok(Note { form, .. }) => format!(
                    "{name} has the format version {form}, which this deltafold does not know: fulls are read again"
                ),
                Err(e) => format!("{name} is damaged, so fulls are read again: {e}"),
            },
            Err(e) if matches!(e.reason(), Reason::Configuration | Reason::PermissionDenied) => {
                format!("fulls are read again, without their note: {e}")
            }
            Err(e) => return Err(e),
        };
        self.warnings.push(problem);
        Ok(BTreeMap::new())
    }

    /// Returns what is known about a full without reading it; `None` if nothing is.
    pub(super) fn state(&self, path: &str, version: &FullVersion) -> Option<FullState> {
        let record = self.records.as_ref()?.get(path)?;
        // With an identity, the check of a header alone is not enough.
        let is_enough =
            record.sha256.is_some() || record.damage.is_some() || !self.ctx.keys.decrypts();
        (record.version == *version && is_enough).then(|| match &record.damage {
            None => FullState::Good,
            Some(damage) => FullState::Damaged(damage.clone()),
        })
    }

    /// Returns whether this run may read another full.
    pub(super) fn may_read(&self) -> bool {
        self.read < MOST_READ && self.reading < LONGEST_READING
    }

    /// Reads fulls one after the other, as many as this run may.
    ///
    /// # Errors
    /// Fails with the store's errors, `SnapshotVanished`, `Io` or `Terminated`. Damage of a full is a
    /// result, not an error.
    pub(super) fn read(&mut self, fulls: &[(&Snapshot, &FullVersion)]) -> Result<()> {
        let fulls = &fulls[..fulls.len().min(MOST_READ - self.read)];
        let reading = SnapshotReader::new(self.ctx, fulls.iter().map(|f| f.0));
        for (nth, (snapshot, version)) in fulls.iter().enumerate() {
            if !self.may_read() {
                break;
            }
            if let Some(record) = self.read_one(&reading, nth, version)? {
                self.add_record(snapshot, record);
            }
        }
        Ok(())
    }

    /// Reads one full. Returns `None` if there is no space for it.
    fn read_one(
        &mut self,
        reading: &SnapshotReader<'_>,
        nth: usize,
        version: &FullVersion,
    ) -> Result<Option<FullRecord>> {
        let snapshot = reading.snapshot(nth);
        self.read += 1;
        let begun = Instant::now();
        let mut result = read_whole(self.ctx, reading, nth);
        if result.as_ref().is_err_and(|e| e.reason().is_bad_data()) {
            // A transient fault of the store must not be remembered as damage of the object.
            result = read_whole(self.ctx, &SnapshotReader::new(self.ctx, [snapshot]), 0);
        }
        self.reading += begun.elapsed();
        let (sha256, damage, depends_on_flags) = match result {
            Ok(sha256) => (sha256, None, false),
            Err(e) if e.reason().is_bad_data() || e.reason() == Reason::CannotDecrypt => {
                let message: String = e.to_string().chars().take(LONGEST_MESSAGE).collect();
                let damage = (e.reason().as_str().to_owned(), message);
                let depends_on_flags =
                    matches!(e.reason(), Reason::CannotDecrypt | Reason::TooLarge);
                (None, Some(damage), depends_on_flags)
            }
            Err(e) if e.reason() == Reason::NoSpace => {
                let name = self.ctx.store.name(&snapshot.path);
                self.warnings.push(format!(
                    "{name} is not read, for lack of space in --temp-dir, and is ignored: {e}"
                ));
                return Ok(None);
            }
            Err(e) => return Err(e),
        };
        Ok(Some(FullRecord {
            version: version.clone(),
            read_at: Utc::now(),
            sha256,
            damage,
            depends_on_flags,
        }))
    }

    /// Adds a record. Warns if an earlier run read other bytes under the same path.
    fn add_record(&mut self, snapshot: &Snapshot, record: FullRecord) {
        let sha256 = record.sha256.clone();
        let records = self.records.get_or_insert_default();
        let previous = records.insert(snapshot.path.clone(), record);
        self.has_new = true;
        if let Some(previous_sha256) = previous.and_then(|p| p.sha256)
            && sha256.is_none_or(|sha256| sha256 != previous_sha256)
        {
            self.warnings.push(format!(
                "{} was replaced by another object after an earlier run had read it",
                self.ctx.store.name(&snapshot.path)
            ));
        }
    }

    /// Writes the note if this run has read a full. `fulls` are the paths of the existing fulls in
    /// order of creation; all others are dropped from the note.
    pub(super) fn save<'p>(&mut self, fulls: impl Iterator<Item = &'p str>) {
        let (true, Some(records)) = (self.has_new, &self.records) else {
            return;
        };
        let is_noted = |path: &&str| records.get(*path).is_some_and(|r| !r.depends_on_flags);
        let existing: Vec<&str> = fulls.filter(is_noted).collect();
        let newest: HashSet<&str> = existing.into_iter().rev().take(MOST_NOTED).collect();
        let kept = records.iter().filter(|e| newest.contains(e.0.as_str()));
        let note = Note {
            form: FORMAT_VERSION,
            fulls: kept.map(|(path, e)| (path.clone(), e.clone())).collect(),
        };
        match as_json(&note).and_then(|text| self.ctx.store.replace_small(NOTE_PATH, &text)) {
            Ok(()) => self.has_new = false,
            Err(e) => self.warnings.push(format!(
                "{} cannot be written, so the next run reads the same fulls again: {e}",
                self.ctx.store.name(NOTE_PATH)
            )),
        }
    }
}

/// Reads a full to its end and checks its SHA-256, every page, and whether it holds the revision of its
/// name. Returns the object's SHA-256; `None` for an encrypted full if there is no identity, since only
/// its header can be checked.
fn read_whole(ctx: &Context, reading: &SnapshotReader<'_>, nth: usize) -> Result<Option<String>> {
    let snapshot = reading.snapshot(nth);
    let at = ctx.at(snapshot);
    if snapshot.name.is_encrypted && !ctx.keys.decrypts() {
        let object = ctx.store.read(&snapshot.path);
        encryption::check_header(object, snapshot.bytes).map_err(at)?;
        return Ok(None);
    }
    let (db, base, sha256) = reading.full_with_hash(nth)?;
    read_every_page(&db).map_err(&at)?;
    if base.first_revision() > snapshot.name.last {
        return Err(at(Reason::NameMismatch.error(format!(
            "its name says revision {}, but it holds revisions from {} on",
            snapshot.name.last,
            base.first_revision()
        ))));
    }
    Ok(Some(sha256))
}
