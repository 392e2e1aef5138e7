//! What is known of the contents of fulls: whoever can write can put a full's name on anything.
//!
//! A full is read whole once, when a decision first rests on it. A note of the prefix remembers what was found, by
//! path, size, ETag and time. It is as easy to forge as a full: it saves work and proves nothing.

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

/// Where the note is.
pub(super) const NOTE: &str = "deltafold-verified.json";
/// The form of the note.
const FORM: u32 = 1;
/// Bytes of the note, at most.
const LONGEST: u64 = 8 << 20;
/// Fulls in the note, at most: the newest.
const MOST_NOTED: usize = 10_000;
/// Characters of a noted message.
const LONGEST_MESSAGE: usize = 300;
/// Fulls that a run reads, at most.
const MOST_READ: usize = 32;
/// A run that has read for so long reads no further full.
const LONGEST_READING: Duration = Duration::from_secs(600);

/// Why a full is bad: the reason's name, and in words.
pub(super) type Bad = (String, String);

/// What is known of a full.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Known {
    /// It is what its name says.
    Good,
    /// It is not.
    Bad(Bad),
    /// It was not read, for lack of time or room.
    NotRead,
}

#[derive(Serialize, Deserialize)]
struct Note {
    form: u32,
    fulls: BTreeMap<String, Entry>,
}

/// What tells one version of an object from another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Version {
    bytes: u64,
    etag: Option<String>,
    modified: DateTime<Utc>,
}

impl From<&ObjectInfo> for Version {
    fn from(o: &ObjectInfo) -> Self {
        Version {
            bytes: o.bytes,
            etag: o.etag.clone(),
            modified: o.modified,
        }
    }
}

/// What is remembered of a full.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    #[serde(flatten)]
    version: Version,
    read_at: DateTime<Utc>,
    /// Of the object as it is stored; `None` if only its header could be read, for lack of an identity.
    sha256: Option<String>,
    bad: Option<Bad>,
    /// It depends on the flags of this run.
    #[serde(skip)]
    of_this_run: bool,
}

/// What was found out about fulls, in this run and in earlier ones.
pub(super) struct Verified<'a> {
    ctx: &'a Context,
    entries: Option<BTreeMap<String, Entry>>,
    is_new: bool,
    /// Fulls that this run has read.
    pub(super) read: usize,
    reading: Duration,
    /// What went wrong beside the fulls.
    pub(super) warnings: Vec<String>,
}

impl<'a> Verified<'a> {
    pub(super) fn new(ctx: &'a Context) -> Self {
        Verified {
            ctx,
            entries: None,
            is_new: false,
            read: 0,
            reading: Duration::ZERO,
            warnings: Vec::new(),
        }
    }

    /// Reads the note, unless it was read.
    ///
    /// # Errors
    /// The store's, but for those about the note itself: without it fulls are read again.
    pub(super) fn load(&mut self) -> Result<()> {
        if self.entries.is_none() {
            self.entries = Some(self.read_note()?);
        }
        Ok(())
    }

    fn read_note(&mut self) -> Result<BTreeMap<String, Entry>> {
        let name = self.ctx.store.name(NOTE);
        let problem = match self.ctx.store.read_small(NOTE, LONGEST) {
            Ok(None) => return Ok(BTreeMap::new()),
            Ok(Some(text)) => match serde_json::from_slice::<Note>(&text) {
                Ok(note) if note.form == FORM => return Ok(note.fulls),
                Ok(Note { form, .. }) => format!(
                    "{name} has form {form}, which this version does not know: fulls are read again"
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

    /// What is known of a full without reading it.
    pub(super) fn known(&self, path: &str, version: &Version) -> Option<Known> {
        let entry = self.entries.as_ref()?.get(path)?;
        // A header tells less than is asked for by somebody who has an identity.
        let is_enough = entry.sha256.is_some() || entry.bad.is_some() || !self.ctx.keys.decrypts();
        (entry.version == *version && is_enough).then(|| match &entry.bad {
            None => Known::Good,
            Some(bad) => Known::Bad(bad.clone()),
        })
    }

    /// Whether this run may read another full.
    pub(super) fn may_read(&self) -> bool {
        self.read < MOST_READ && self.reading < LONGEST_READING
    }

    /// Reads fulls of which nothing is known, one after the other, as many as one run may.
    ///
    /// # Errors
    /// The store's; `SnapshotVanished`; `Io`, `Terminated`. What is wrong with a full is no error.
    pub(super) fn read(&mut self, fulls: &[(&Snapshot, &Version)]) -> Result<()> {
        let fulls = &fulls[..fulls.len().min(MOST_READ - self.read)];
        let reading = SnapshotReader::new(self.ctx, fulls.iter().map(|f| f.0));
        for (nth, (snapshot, version)) in fulls.iter().enumerate() {
            if !self.may_read() {
                break;
            }
            self.read += 1;
            let begun = Instant::now();
            let mut found = read_whole(self.ctx, &reading, nth);
            if found.as_ref().is_err_and(|e| e.reason().is_bad_data()) {
                // What a store garbles once must not be remembered as damage of the object.
                found = read_whole(self.ctx, &SnapshotReader::new(self.ctx, [*snapshot]), 0);
            }
            self.reading += begun.elapsed();
            let (sha256, bad, of_this_run) = match found {
                Ok(sha256) => (sha256, None, false),
                Err(e) if e.reason().is_bad_data() || e.reason() == Reason::CannotDecrypt => {
                    let message: String = e.to_string().chars().take(LONGEST_MESSAGE).collect();
                    let bad = (e.reason().as_str().to_owned(), message);
                    let of_this_run =
                        matches!(e.reason(), Reason::CannotDecrypt | Reason::TooLarge);
                    (None, Some(bad), of_this_run)
                }
                Err(e) if e.reason() == Reason::NoSpace => {
                    let name = self.ctx.store.name(&snapshot.path);
                    self.warnings.push(format!(
                        "{name} is not read and counts for nothing, for lack of room in --temp-dir: {e}"
                    ));
                    continue;
                }
                Err(e) => return Err(e),
            };
            let entry = Entry {
                version: (*version).clone(),
                read_at: Utc::now(),
                sha256,
                bad,
                of_this_run,
            };
            let entries = self.entries.get_or_insert_default();
            let before = entries.insert(snapshot.path.clone(), entry.clone());
            if let Some(Entry {
                sha256: Some(before),
                ..
            }) = before
                && entry.sha256.is_none_or(|now| now != before)
            {
                self.warnings.push(format!(
                    "{} was replaced by another object since an earlier run has read it",
                    self.ctx.store.name(&snapshot.path)
                ));
            }
            self.is_new = true;
        }
        Ok(())
    }

    /// Writes the note, if anything was read: of the fulls that are there, given in order of creation.
    pub(super) fn save<'p>(&mut self, fulls: impl Iterator<Item = &'p str>) {
        let (true, Some(entries)) = (self.is_new, &self.entries) else {
            return;
        };
        let is_noted = |path: &&str| entries.get(*path).is_some_and(|e| !e.of_this_run);
        let there: Vec<&str> = fulls.filter(is_noted).collect();
        let newest: HashSet<&str> = there.into_iter().rev().take(MOST_NOTED).collect();
        let kept = entries.iter().filter(|e| newest.contains(e.0.as_str()));
        let note = Note {
            form: FORM,
            fulls: kept.map(|(path, e)| (path.clone(), e.clone())).collect(),
        };
        match as_json(&note).and_then(|text| self.ctx.store.replace_small(NOTE, &text)) {
            Ok(()) => self.is_new = false,
            Err(e) => self.warnings.push(format!(
                "{} cannot be written, so the next run reads the same fulls again: {e}",
                self.ctx.store.name(NOTE)
            )),
        }
    }
}

/// Reads a full to its end: checksum, every page, and whether it holds the revision of its name. Gives its SHA-256;
/// `None` for one that is encrypted if there is no identity: only its header can be read.
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
            "its name promises revision {}, it holds revisions from {} on",
            snapshot.name.last,
            base.first_revision()
        ))));
    }
    Ok(Some(sha256))
}
