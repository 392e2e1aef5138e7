//! The import of plain snapshot files: each becomes a full of a prefix, in the order of the times of their names.
//!
//! A file is read whole before its full gets its name. It is named by the revision in it and the second of its name, so
//! a later run knows by names what is there.

use super::copier::Copier;
use super::failures::summarize;
use super::plan::CopyReason;
use super::{CopiedObject, CopyStatus, Options};
use crate::backup::catalog::V2;
use crate::backup::codec::{Compression, Encoding};
use crate::backup::file_name::NameTime;
use crate::backup::frame::FrameWriter;
use crate::backup::survey::{Histories, Sequel};
use crate::backup::{Catalog, Kind, SnapshotName};
use crate::base::Sequential;
use crate::base::opt::{FROM_SNAPSHOTS, TAKE_OVER, TO};
use crate::base::read_all::for_each_piece;
use crate::error::{Error, Reason, Result};
use crate::fold::publish::{Packer, names_are_taken, refuse_plaintext};
use crate::fold::rebuild::read_every_page;
use crate::mvcc::Revision;
use crate::prefix::identity::{self, Identity};
use crate::prefix::open::PlainSnapshot;
use crate::prefix::scan::by_names;
use crate::prefix::snapshot_files::{Pattern, Series, SnapshotFile, series};
use crate::prefix::timeline_records::{Leaves, TimelineRecord};
use crate::prefix::{Context, warn};
use crate::telemetry::metrics::SnapshotKind;
use chrono::{DateTime, Utc};
use std::collections::HashSet;
use std::io::{self, Write};

/// The cause in the record of a history that a file begins.
const CAUSE: &str = "HistoryMismatch";

impl Copier<'_> {
    /// Imports the files of a series that are not in the target yet. The store of the source is the folder of the pattern.
    /// Returns one error for all failures. `OtherCluster`, and an error of a store, end the import.
    ///
    /// # Errors
    /// Fails before the first file with `NoSnapshots`, `Usage`, `Configuration` or an error of a store, and at any time with
    /// `Terminated`.
    pub(super) fn import(&mut self, pattern: &Pattern) -> Result<Option<Error>> {
        let (from, now) = (self.from, Utc::now());
        let mut target = Target::open(from, self.to, self.options)?;
        // A date ends with its last second.
        let Series { files, future } = series(from, pattern, |time| time.at > now)?;
        let o = &mut self.outcome;
        o.backups = (files.len() + future.len()) as u64;
        o.rounds += 1;
        (o.kept, o.skipped, o.failed, o.backups_wanted) = (0, 0, 0, 0);
        o.objects.clear();
        let mut failures = Vec::new();
        let mut end = None;
        for (file, time) in &files {
            let object = match target.import(file, time, now) {
                Err(e) if e.reason() == Reason::Terminated => return Err(e),
                Err(e) => {
                    o.failed += 1;
                    let (reason, message) = (e.reason().as_str(), e.to_string());
                    if e.reason().is_of_one_object() {
                        failures.push(e)
                    } else {
                        end = Some(e)
                    }
                    outcome_of(file, &file.name, CopyStatus::Failed, reason, &message)
                }
                Ok(imported) => {
                    match imported.status {
                        CopyStatus::Copied => {
                            o.copied += 1;
                            o.backups_wanted += 1;
                            if let Some(metrics) = &self.metrics {
                                metrics.copied(SnapshotKind::Full);
                            }
                        }
                        CopyStatus::Kept => o.kept += 1,
                        CopyStatus::Skipped | CopyStatus::Failed => o.skipped += 1,
                    }
                    o.bytes_written += imported.bytes;
                    let message = match imported.reason {
                        CopyReason::TooOld => "the target has a newer full".into(),
                        reason => reason.describe(),
                    };
                    let reason = imported.reason.as_str();
                    outcome_of(file, &imported.path, imported.status, reason, &message)
                }
            };
            o.objects.push(object);
            if end.is_some() {
                break;
            }
        }
        for file in &future {
            let why = "its time is in the future (a date ends with its last second): it is imported later";
            o.skipped += 1;
            let skipped = outcome_of(file, &file.name, CopyStatus::Skipped, "InTheFuture", why);
            o.objects.push(skipped);
        }
        self.clock.warnings.append(&mut target.warnings);
        Ok(end.or(summarize(failures, o.copied + o.kept > 0)))
    }
}

fn outcome_of(
    file: &SnapshotFile,
    target_path: &str,
    decision: CopyStatus,
    reason: &'static str,
    message: &str,
) -> CopiedObject {
    CopiedObject {
        path: file.name.clone(),
        target_path: target_path.to_owned(),
        bytes: file.bytes,
        decision,
        reason,
        message: message.to_owned(),
    }
}

/// The fulls of the target.
struct Target<'a> {
    from: &'a Context,
    to: &'a Context,
    options: &'a Options,
    catalog: Catalog,
    /// The seconds of the fulls, and when the newest one was taken.
    seconds: HashSet<i64>,
    newest: Option<i64>,
    /// The history of the newest full, once it was read.
    histories: Option<Histories>,
    /// The recorded cluster.
    identity: Option<Identity>,
    /// The UID of `kube-system`: that of the last file, or the recorded one.
    kube_system: Option<String>,
    warnings: Vec<String>,
}

/// What was done with a file: its path in the target, why, and the bytes that were written.
struct Imported {
    status: CopyStatus,
    path: String,
    reason: CopyReason,
    bytes: u64,
}

impl<'a> Target<'a> {
    fn open(from: &'a Context, to: &'a Context, options: &'a Options) -> Result<Self> {
        refuse_plaintext(to)?;
        let catalog = by_names(&to.store)?;
        if let Some(delta) = catalog.snapshots.iter().find(|s| !s.name.is_full()) {
            return Err(Reason::Usage.error(format!(
                "{} holds deltas such as {}, so its backup goes on without these files: give another {TO}",
                to.store.url(),
                delta.path
            )));
        }
        let identity = identity::read(&to.store)?;
        let seconds: HashSet<i64> = catalog.snapshots.iter().map(|s| s.name.created).collect();
        Ok(Target {
            from,
            to,
            options,
            newest: seconds.iter().max().copied(),
            seconds,
            catalog,
            histories: None,
            kube_system: identity.as_ref().and_then(|i| i.kube_system_uid.clone()),
            identity,
            warnings: Vec::new(),
        })
    }

    /// Imports a file, if the target has nothing of its second, and nothing newer.
    fn import(
        &mut self,
        file: &SnapshotFile,
        time: &NameTime,
        now: DateTime<Utc>,
    ) -> Result<Imported> {
        let created = time.at.timestamp();
        self.from.store.cancel().check()?;
        let unchanged = |status, reason| {
            Ok(Imported {
                status,
                path: file.name.clone(),
                reason,
                bytes: 0,
            })
        };
        if self.seconds.contains(&created) {
            return unchanged(CopyStatus::Kept, CopyReason::AlreadyThere);
        }
        if self.newest.is_some_and(|newest| created < newest) {
            return unchanged(CopyStatus::Skipped, CopyReason::TooOld);
        }
        let name = file.place.name(self.from);
        let snapshot = self.from.plain(&file.place)?;
        read_every_page(&snapshot.db).map_err(|e| e.at(&name))?;
        if let Some(warning) = snapshot.warning(&name) {
            warn(&mut self.warnings, warning);
        }
        let set_back = self.compare(&snapshot, &name)?;
        let encoding = Encoding::from(Compression::Gzip);
        let full = SnapshotName {
            kind: Kind::Full,
            start: Revision(0),
            last: snapshot.base.revision,
            created,
            compression: encoding.compression,
            is_final: false,
            is_encrypted: self.to.keys.encrypts(),
        };
        let path = format!("{V2}/{full}");
        let mut written = 0;
        if !self.options.dry_run {
            self.record_cluster(now)?;
            if let Some(why) = set_back {
                warn(
                    &mut self.warnings,
                    format!("{name}: {why}: another history begins"),
                );
                let record = TimelineRecord::new(Leaves::UNKNOWN, CAUSE, now);
                record.write(&self.to.store, &full)?;
            }
            written = self.write(snapshot, &full, encoding)?;
        }
        self.newest = Some(created);
        self.seconds.insert(created);
        Ok(Imported {
            status: CopyStatus::Copied,
            path,
            reason: CopyReason::Wanted,
            bytes: written,
        })
    }

    /// Compares a file with the one before it, or the first one with the newest full of the target. Returns why it is of a
    /// history that was set back, if it is.
    fn compare(&mut self, snapshot: &PlainSnapshot, name: &str) -> Result<Option<String>> {
        if self.histories.is_none() {
            let mut histories = Histories::new(self.from.temp())?;
            if let Some(newest) = self.catalog.snapshots.last() {
                let read = self.to.full(newest);
                match read.and_then(|(db, _)| histories.next(&db)) {
                    Err(e) if e.reason().is_unreadable() => {
                        warn(
                            &mut self.warnings,
                            format!("not compared with the newest full: {e}"),
                        );
                    }
                    compared => drop(compared?),
                }
            }
            self.histories = Some(histories);
        }
        let histories = self.histories.as_mut();
        let histories = histories.ok_or_else(|| Error::internal("there are no histories"))?;
        let sequel = histories.next(&snapshot.db).map_err(|e| e.at(name))?;
        let uid = histories.kube_system().map(str::to_owned);
        let recorded = self.kube_system.clone().zip(uid.clone());
        let other = match (&sequel, recorded) {
            (Some(Sequel::OtherCluster(uid, before)), _) => Some((uid.clone(), before.clone())),
            (_, Some((before, uid))) if before != uid => Some((uid, before)),
            _ => None,
        };
        self.kube_system = uid.or(self.kube_system.take());
        if let Some((uid, before)) = other {
            let why = format!("the UID of kube-system is {uid} instead of {before}");
            return if self.options.take_over {
                Ok(Some(why))
            } else {
                Err(Reason::OtherCluster.error(format!(
                    "{name} is of another cluster than {}: {why}; nothing more was imported. Check {FROM_SNAPSHOTS} and {TO}; if the cluster was replaced, give {TAKE_OVER} once",
                    self.to.store.url()
                )))
            };
        }
        Ok(match sequel {
            Some(Sequel::SetBack(why)) => Some(why),
            _ => None,
        })
    }

    /// Records the cluster by the UID of `kube-system`, unless one is recorded. With `take_over` it replaces another one.
    fn record_cluster(&mut self, now: DateTime<Utc>) -> Result<()> {
        let recorded = self.identity.as_ref();
        let is_another =
            |r: &Identity| self.options.take_over && r.kube_system_uid != self.kube_system;
        if let Some(uid) = &self.kube_system
            && recorded.is_none_or(is_another)
        {
            let identity = identity::record_imported(&self.to.store, uid, recorded, now)?;
            self.identity = Some(identity);
        }
        Ok(())
    }

    /// Writes the database as a full. Returns the bytes that were written.
    fn write(
        &self,
        snapshot: PlainSnapshot,
        full: &SnapshotName,
        encoding: Encoding,
    ) -> Result<u64> {
        let bytes = snapshot.db.meta().bytes();
        let database = Sequential::new(snapshot.db.into_inner(), bytes);
        let packer = Packer::to_store(self.to, full, encoding, bytes)?;
        let mut frame = FrameWriter::new(packer);
        let failed = |e: io::Error| Error::io("import a snapshot", e);
        for_each_piece(database, self.from.store.cancel(), failed, |piece| {
            frame.write_all(piece).map_err(failed)
        })?;
        let unnamed = frame.finish().map_err(failed)?.uploaded()?;
        let written = unnamed.complete(self.to, full)?;
        written.ok_or_else(|| names_are_taken(self.to, full, 1))
    }
}
