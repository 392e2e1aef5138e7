//! The copy of plain snapshots: as they are, with what other tools wrote beside them, or as fulls of a chain.
//!
//! Each file is read whole and checked on its way. A file becomes a full only if it is newer than what the target has: so
//! the copies of one prefix are in order, and deltas can follow the last one. Called by `cli::copy`.

use super::copier::Copier;
use super::failures::{conflict, summarize};
use super::plan::{CopyReason, Encryption};
use super::{CopyStatus, ObjectOutcome, Options, Outcome};
use crate::backup::catalog::V2;
use crate::backup::codec::{Compression, Encoding};
use crate::backup::frame::FrameWriter;
use crate::backup::survey::Histories;
use crate::backup::{Catalog, Kind, SnapshotName};
use crate::base::parallel::each;
use crate::base::{ReadAt, Tee, lock};
use crate::error::{Error, Reason, Result};
use crate::fold::publish::{Packer, names_are_taken, refuse_plaintext};
use crate::fold::rebuild::read_every_page;
use crate::mvcc::Revision;
use crate::ops::report::Report;
use crate::prefix::open::PlainSnapshot;
use crate::prefix::plain_files::{PlainFile, PlainFiles};
use crate::prefix::scan::{by_names, has_plain_snapshots};
use crate::prefix::timeline_records::{Leaves, TimelineRecord};
use crate::prefix::{Context, PrefixLayout};
use crate::store::{Published, Upload};
use chrono::{TimeDelta, Utc};
use std::collections::HashMap;
use std::io::{self, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// The bytes of a database that are read at a time.
const PIECE: usize = 1 << 20;
/// The cause in the record of a history that a plain snapshot begins.
const CAUSE: &str = "HistoryMismatch";

/// Copies plain snapshots of a prefix once, which were found by their names: with the layout of the target, or else as they
/// are.
///
/// # Errors
/// Fails before the first copy with `Usage`, `Configuration`, `InterleavedTimelines` or an error of a
/// store. Other failures are in the report.
pub fn run(
    from: &Context,
    to: &Context,
    mut found: PlainFiles,
    options: &Options,
    layout: Option<PrefixLayout>,
) -> Result<Report<Outcome>> {
    let mut copier = Copier::new(from, to, options);
    let target = by_names(&to.store)?;
    let url = to.store.url();
    let as_chain = match layout {
        None => !target.snapshots.is_empty(),
        Some(PrefixLayout::Plain) if !target.snapshots.is_empty() => {
            return Err(Reason::Usage.error(format!(
                "{url} holds fulls and deltas: give another --to, or --layout chain"
            )));
        }
        Some(PrefixLayout::Plain) => false,
        Some(PrefixLayout::Chain) => {
            if has_plain_snapshots(&to.store.first_paths()?) {
                return Err(Reason::Usage.error(format!(
                    "{url} holds plain snapshots: give another --to, or --layout plain"
                )));
            }
            true
        }
    };
    let way = if as_chain {
        found = found.of_one_history(from, None)?;
        Way::Chain(Mutex::new(Chain::new(from, to, options, &target)?))
    } else {
        check_form(options)?;
        Way::AsTheyAre(to.store.list(&[""])?.into_iter().collect())
    };
    let companions = found.companions();
    let copy = Copy {
        from,
        to,
        options,
        way,
        companions: &companions,
        has_ended: AtomicBool::new(false),
    };
    let at_once = if as_chain { 1 } else { options.parallel.max(1) };
    let planned = planned(&found.files, options);
    let results = each(at_once, &planned, |(file, skipped)| match skipped {
        Some(reason) => Ok(Copied::skipped(file, *reason, reason.describe())),
        None => copy.one(file),
    });
    let o = &mut copier.outcome;
    o.backups = found.files.len() as u64;
    o.backups_wanted = planned.iter().filter(|p| p.1.is_none()).count() as u64;
    o.rounds = 1;
    let mut failures = Vec::new();
    for ((file, _), result) in planned.iter().zip(results) {
        let copied = result.unwrap_or_else(|e| {
            let failed = Copied::failed(file, &e);
            if e.reason() != Reason::Terminated {
                failures.push(e);
            }
            failed
        });
        match copied.object.decision {
            CopyStatus::Copied => o.copied += 1,
            CopyStatus::Kept => o.kept += 1,
            CopyStatus::Skipped => o.skipped += 1,
            CopyStatus::Failed => o.failed += 1,
        }
        o.bytes_written += copied.bytes_written;
        o.unchecked += u64::from(copied.is_unchecked);
        o.objects.push(copied.object);
        copier.clock.warnings.extend(copied.warning);
    }
    from.store.cancel().check()?;
    let is_partly_done = o.copied + o.kept > 0;
    Ok(copier.report(summarize(failures, is_partly_done)))
}

/// Returns the files, each with the reason if it is not selected.
fn planned<'f>(
    files: &'f [PlainFile],
    options: &Options,
) -> Vec<(&'f PlainFile, Option<CopyReason>)> {
    let selection = &options.selection;
    let most = selection.max_backups.map_or(files.len(), |n| n as usize);
    let first = files.len().saturating_sub(most);
    let days = selection.max_backup_age_days.map(i64::from);
    let oldest = days.and_then(|days| Utc::now().checked_sub_signed(TimeDelta::days(days)));
    let skipped = |nth: usize, file: &PlainFile| match oldest {
        Some(oldest) if file.created < oldest => Some(CopyReason::TooOld),
        _ if nth < first => Some(CopyReason::BeyondMaxBackups),
        _ => None,
    };
    let files = files.iter().enumerate();
    files
        .map(|(nth, file)| (file, skipped(nth, file)))
        .collect()
}

/// Fails if the options ask for another form than that of the files.
fn check_form(options: &Options) -> Result<()> {
    let form = &options.selection.form;
    if form.encoding.is_some() || form.encryption != Encryption::Keep {
        return Err(Reason::Usage.error(
            "plain snapshots are copied as they are: leave out --compression, --decrypt and recipients, or make fulls of them with --layout chain",
        ));
    }
    Ok(())
}

/// In which form the files are copied.
enum Way {
    /// Byte for byte. The target has these objects: bytes by path.
    AsTheyAre(HashMap<String, u64>),
    /// As fulls.
    Chain(Mutex<Chain>),
}

/// The chain of fulls in the target.
struct Chain {
    histories: Histories,
    /// The time and the revision of the newest full.
    newest: Option<(i64, Revision)>,
    /// Whether that full was there before this run.
    is_of_others: bool,
    /// The times of all fulls, with their paths.
    fulls: HashMap<i64, String>,
}

impl Chain {
    fn new(from: &Context, to: &Context, options: &Options, target: &Catalog) -> Result<Self> {
        let encryption = options.selection.form.encryption;
        if encryption != Encryption::Decrypt {
            refuse_plaintext(to)?;
        }
        let mut chain = Chain {
            histories: Histories::new(from.temp_file()?),
            newest: None,
            is_of_others: true,
            fulls: HashMap::new(),
        };
        for snapshot in &target.snapshots {
            if !snapshot.name.is_full() {
                return Err(Reason::Usage.error(format!(
                    "{} holds deltas, so its backup goes on without these files: give another --to",
                    to.store.url()
                )));
            }
            let path = snapshot.path.clone();
            chain.fulls.insert(snapshot.name.created, path);
        }
        if let Some(newest) = target.snapshots.last() {
            let (db, base) = to.full(newest)?;
            chain.histories.follows(&db)?;
            chain.newest = Some((newest.name.created, base.revision));
        }
        Ok(chain)
    }
}

/// The result of a file.
struct Copied {
    object: ObjectOutcome,
    bytes_written: u64,
    is_unchecked: bool,
    warning: Option<String>,
}

impl Copied {
    fn new(
        file: &PlainFile,
        target_path: &str,
        decision: CopyStatus,
        reason: &'static str,
        message: &str,
    ) -> Self {
        Copied {
            object: ObjectOutcome {
                path: file.name.clone(),
                target_path: target_path.to_owned(),
                bytes: file.bytes,
                decision,
                reason,
                message: message.to_owned(),
            },
            bytes_written: 0,
            is_unchecked: false,
            warning: None,
        }
    }

    fn with_reason(
        file: &PlainFile,
        target_path: &str,
        decision: CopyStatus,
        reason: CopyReason,
    ) -> Self {
        Self::new(
            file,
            target_path,
            decision,
            reason.as_str(),
            reason.describe(),
        )
    }

    fn wanted(file: &PlainFile, target_path: &str, bytes_written: u64) -> Self {
        Copied {
            bytes_written,
            ..Self::with_reason(file, target_path, CopyStatus::Copied, CopyReason::Wanted)
        }
    }

    fn kept(file: &PlainFile, target_path: &str, reason: CopyReason) -> Self {
        Self::with_reason(file, target_path, CopyStatus::Kept, reason)
    }

    fn skipped(file: &PlainFile, reason: CopyReason, message: &str) -> Self {
        Self::new(
            file,
            &file.name,
            CopyStatus::Skipped,
            reason.as_str(),
            message,
        )
    }

    fn failed(file: &PlainFile, e: &Error) -> Self {
        let reason = match e.reason() {
            Reason::Terminated => "NotTried",
            reason => reason.as_str(),
        };
        Self::new(file, &file.name, CopyStatus::Failed, reason, &e.to_string())
    }
}

struct Copy<'a> {
    from: &'a Context,
    to: &'a Context,
    options: &'a Options,
    way: Way,
    companions: &'a HashMap<&'a str, Vec<&'a (String, u64)>>,
    has_ended: AtomicBool,
}

impl Copy<'_> {
    fn one(&self, file: &PlainFile) -> Result<Copied> {
        if self.has_ended.load(Ordering::Relaxed) {
            return Err(Reason::Terminated.error("the run ended before it was copied"));
        }
        let copied = match &self.way {
            Way::AsTheyAre(there) => self.as_it_is(file, there),
            Way::Chain(chain) => self.as_full(file, &mut lock(chain)),
        };
        copied.inspect_err(|e| {
            let concerns_file = e.reason().is_bad_data()
                || matches!(
                    e.reason(),
                    Reason::TargetExists | Reason::NoSnapshots | Reason::SnapshotVanished
                );
            self.has_ended.fetch_or(!concerns_file, Ordering::Relaxed);
        })
    }

    /// Copies a file with its companions. Those come first: a snapshot with its name is complete.
    fn as_it_is(&self, file: &PlainFile, there: &HashMap<String, u64>) -> Result<Copied> {
        let path = &file.name;
        match there.get(path) {
            Some(bytes) if *bytes == file.bytes => {
                return Ok(Copied::kept(file, path, CopyReason::AlreadyThere));
            }
            Some(_) => return Err(conflict(&self.to.store.name(path))),
            None if self.options.dry_run => return Ok(Copied::wanted(file, path, 0)),
            None => {}
        }
        for (path, bytes) in self.companions.get(&**path).into_iter().flatten() {
            if there.contains_key(path) {
                continue;
            }
            let mut upload = Upload::new(&self.to.store, path, *bytes)?;
            io::copy(&mut self.from.store.fetch(path, *bytes), &mut upload).map_err(copy_error)?;
            upload.finish()?.complete()?;
        }
        let mut tee = Tee {
            from: self.from.store.fetch(path, file.bytes),
            to: Upload::new(&self.to.store, path, file.bytes)?,
        };
        let name = file.place.name(self.from);
        let plain = self.from.plain_stream(&name, file.bytes, &mut tee);
        let plain = match plain.and_then(checked) {
            Ok(plain) => Some(plain),
            Err(e) if e.reason() == Reason::CannotDecrypt => None,
            Err(e) => return Err(e),
        };
        // What the check has not read.
        io::copy(&mut tee, &mut io::sink()).map_err(copy_error)?;
        let unnamed = tee.to.finish()?;
        let bytes = unnamed.bytes();
        match unnamed.complete()? {
            Published::Created => Ok(Copied {
                is_unchecked: plain.is_none(),
                warning: plain.and_then(|plain| plain.warning(&name)),
                ..Copied::wanted(file, path, bytes)
            }),
            Published::Identical => Ok(Copied::kept(file, path, CopyReason::AlreadyThere)),
            Published::Taken => Err(conflict(&self.to.store.name(path))),
        }
    }

    /// Writes a file as a full, if it is newer than the newest one.
    fn as_full(&self, file: &PlainFile, chain: &mut Chain) -> Result<Copied> {
        let created = file.created.timestamp();
        if let Some(path) = chain.fulls.get(&created) {
            return Ok(Copied::kept(file, path, CopyReason::ThereInOtherForm));
        }
        if chain.newest.is_some_and(|(newest, _)| created < newest) {
            let message = "the target has a newer full";
            return Ok(Copied::skipped(file, CopyReason::TooOld, message));
        }
        if self.options.dry_run {
            return Ok(Copied::wanted(file, &file.name, 0));
        }
        let name = file.place.name(self.from);
        let plain = self.from.plain(&file.place).and_then(checked)?;
        let (base, warning) = (plain.base, plain.warning(&name));
        let follows = chain.histories.follows(&plain.db);
        let follows = follows.map_err(|e| e.at(&name))?;
        if !follows && chain.is_of_others && !self.options.take_over {
            return Err(Reason::OtherCluster.error(format!(
                "{name} does not hold the history of the newest full in {}: nothing was copied. Check --from and --to; if the cluster was set back or replaced, give --take-over once",
                self.to.store.url()
            )));
        }
        let has_more = chain
            .newest
            .is_none_or(|(_, newest)| base.revision > newest);
        if follows && !has_more {
            let message = "the full before it has the same revisions";
            return Ok(Copied::skipped(file, CopyReason::SameAsAnother, message));
        }
        let form = &self.options.selection.form;
        let encoding = form.encoding.unwrap_or(Encoding::from(Compression::Gzip));
        let full = SnapshotName {
            kind: Kind::Full,
            start: Revision(0),
            last: base.revision,
            created,
            compression: encoding.compression,
            is_final: false,
            is_encrypted: self.to.keys.encrypts(),
        };
        if !follows {
            let record = TimelineRecord::new(Leaves::UNKNOWN, CAUSE, Utc::now());
            record.write(&self.to.store, &full)?;
        }
        let bytes = self.write(plain, &full, encoding)?;
        chain.newest = Some((created, base.revision));
        chain.is_of_others = false;
        let path = format!("{V2}/{full}");
        chain.fulls.insert(created, path.clone());
        Ok(Copied {
            warning,
            ..Copied::wanted(file, &path, bytes)
        })
    }

    /// Writes the database as a full. Returns the bytes that were written.
    fn write(&self, plain: PlainSnapshot, full: &SnapshotName, encoding: Encoding) -> Result<u64> {
        let bytes = plain.db.meta().bytes();
        let database = plain.db.into_inner();
        let packer = Packer::to_store(self.to, full, encoding, bytes)?;
        let mut frame = FrameWriter::new(packer);
        let mut piece = vec![0; PIECE];
        let mut at = 0;
        while at < bytes {
            self.from.store.cancel().check()?;
            let length = (bytes - at).min(PIECE as u64) as usize;
            database
                .read_exact_at(&mut piece[..length], at)
                .map_err(copy_error)?;
            frame.write_all(&piece[..length]).map_err(copy_error)?;
            at += length as u64;
        }
        let unnamed = frame.finish().map_err(copy_error)?.uploaded()?;
        let written = unnamed.complete(self.to, full)?;
        written.ok_or_else(|| names_are_taken(self.to, full, 1))
    }
}

/// Reads every page of a snapshot.
fn checked(plain: PlainSnapshot) -> Result<PlainSnapshot> {
    read_every_page(&plain.db)?;
    Ok(plain)
}

fn copy_error(e: io::Error) -> Error {
    Error::io("copy a snapshot", e)
}
