//! `gc` of a prefix of plain snapshots: the same policy, for the files of each node by themselves.
//!
//! Only files with a time in their names are counted; others somebody took by hand. What other tools wrote beside a
//! snapshot goes with it. Nothing is written to the prefix, so there is no lock. Called by `ops::gc`.

use super::deletion::Deleter;
use super::side_objects::SideReason;
use super::{
    DamagedFull, Decision, Kind, Object, Options, Outcome, RemovalStatus, Status, damage_warnings,
    partly_done, would_delete_most,
};
use crate::backup::catalog::{ListedObject, V2};
use crate::backup::codec::Compression;
use crate::backup::retention::{Facts, RetentionDecision, RetentionReason, Uncounted, decide};
use crate::backup::timeline::{NamesOnly, Timelines};
use crate::backup::{Catalog, Kind as NameKind, SnapshotName};
use crate::base::shorten;
use crate::error::Result;
use crate::fold::rebuild::read_every_page;
use crate::mvcc::Revision;
use crate::ops::report::{FailureFields, Report, ReportBuilder};
use crate::prefix::Context;
use crate::prefix::plain_files::{PlainFile, PlainFiles, is_fault_of_file};
use chrono::{DateTime, Utc};
use std::collections::BTreeMap;
use std::time::Instant;

/// Removes the plain snapshots that the policy does not keep, of those that were found by their names. In a dry run only
/// reports them.
///
/// # Errors
/// `Io`, `NoSpace`, `Terminated`, or an error of the store. Later failures are in the
/// report.
pub(super) fn run(ctx: &Context, found: PlainFiles, options: &Options) -> Result<Report<Outcome>> {
    let mut clock = ReportBuilder::start();
    let now = Utc::now();
    let (counted, others): (Vec<&PlainFile>, Vec<&PlainFile>) =
        found.files.iter().partition(|f| f.has_time_in_name());
    if !others.is_empty() {
        let names: Vec<&str> = others.iter().map(|f| f.name.as_str()).collect();
        clock.warn(format!(
            "kept, since their names tell no time: {}",
            shorten::line(&names, ", ", shorten::IN_LIST)
        ));
    }
    let mut by_node: BTreeMap<Option<&str>, Vec<&PlainFile>> = BTreeMap::new();
    for file in counted {
        by_node.entry(file.node.as_deref()).or_default().push(file);
    }
    let mut reader = Reader::new(ctx, options);
    let companions = found.companions();
    let mut objects = Vec::new();
    let mut removals = Vec::new();
    for files in by_node.values() {
        for (file, why) in files.iter().zip(reader.decide(files, now)?) {
            let decision = Decision::from_keeps(why.keeps());
            let side = match decision {
                Decision::Keep => SideReason::BelongsToSnapshot,
                Decision::Delete => SideReason::BelongsToRemoved,
            };
            let first = objects.len();
            let reason = (why.as_str(), why.text());
            let (path, bytes) = (file.name.clone(), file.bytes);
            objects.push(Object::new(path, Kind::Full, bytes, decision, reason));
            for (path, bytes) in companions.get(&*file.name).into_iter().flatten() {
                let reason = side.describe();
                objects.push(Object::new(
                    path.clone(),
                    Kind::Note,
                    *bytes,
                    decision,
                    reason,
                ));
            }
            if decision == Decision::Delete {
                removals.push(first..objects.len());
            }
        }
    }
    let fulls = found.files.len() - others.len();
    let refusal = would_delete_most(removals.len(), fulls);
    let mut error = refusal.filter(|_| !options.allow_shrink);
    if options.apply && error.is_none() {
        let deleter = Deleter::new(ctx, now, &mut clock.warnings)?;
        for of_snapshot in removals {
            if let Err(e) = ctx.store.cancel().check() {
                error = Some(e);
                break;
            }
            // What is beside a snapshot goes last: a snapshot that stays keeps it.
            for i in of_snapshot {
                let path = [objects[i].path.clone()];
                let result = deleter.delete(&path)?.into_iter().next();
                if let Some(result) = result {
                    objects[i].record(result);
                }
                if !objects[i].is_gone() {
                    break;
                }
            }
        }
    }
    if options.apply {
        for o in &mut objects {
            if o.decision == Decision::Delete {
                o.fate.get_or_insert(RemovalStatus::Waiting);
            }
        }
    }
    let warnings = damage_warnings(&reader.damaged, reader.not_read);
    clock.warnings.extend(warnings);
    let mut outcome = Outcome::of(objects, options, now);
    outcome.foreign_objects = others.len() as u64;
    outcome.fulls_read = reader.count;
    outcome.fulls_not_read = reader.not_read;
    outcome.damaged_fulls = reader.damaged;
    let error = error.or_else(|| partly_done(&outcome));
    if error.is_some() {
        outcome.status = Status::Failed;
    }
    outcome.error = FailureFields::from(&error);
    Ok(clock.report_with(outcome, error))
}

/// Reads the snapshots that a removal rests on.
struct Reader<'a> {
    ctx: &'a Context,
    options: &'a Options,
    begun: Instant,
    count: usize,
    not_read: usize,
    damaged: Vec<DamagedFull>,
}

impl<'a> Reader<'a> {
    fn new(ctx: &'a Context, options: &'a Options) -> Self {
        Reader {
            ctx,
            options,
            begun: Instant::now(),
            count: 0,
            not_read: 0,
            damaged: Vec::new(),
        }
    }

    /// Decides about the files of one node, as if they were fulls whose revisions grow. Decides again without those that
    /// a removal rests on and that cannot be read.
    fn decide(&mut self, files: &[&PlainFile], now: DateTime<Utc>) -> Result<Vec<RetentionReason>> {
        let catalog = Catalog::from_listing((0i64..).zip(files).map(as_full).collect());
        let timelines = Timelines::build(&catalog, &NamesOnly)?;
        let mut uncounted = BTreeMap::new();
        let mut good = vec![false; files.len()];
        loop {
            let facts = Facts {
                catalog: &catalog,
                timelines: &timelines,
                doubtful: &[],
                is_unreadable: &|_| false,
                uncounted: &uncounted,
                now,
            };
            let RetentionDecision { reasons, rests_on } = decide(&facts, &self.options.retention);
            let mut is_decided = true;
            for i in rests_on {
                if good[i] {
                    continue;
                }
                match self.uncounted(files[i])? {
                    None => good[i] = true,
                    Some(why) => {
                        uncounted.insert(i, why);
                        is_decided = false;
                    }
                }
            }
            if is_decided {
                return Ok(reasons);
            }
        }
    }

    /// Reads a snapshot to its end. Returns why it does not count, if it does not.
    fn uncounted(&mut self, file: &PlainFile) -> Result<Option<Uncounted>> {
        if self.begun.elapsed() >= self.options.timeout {
            self.not_read += 1;
            return Ok(Some(Uncounted::NotRead));
        }
        self.count += 1;
        let read = self.ctx.plain(&file.place);
        let read = read.and_then(|plain| read_every_page(&plain.db).map_err(|e| e.at(&file.name)));
        match read {
            Ok(_) => Ok(None),
            Err(e) if is_fault_of_file(&e) => {
                self.damaged.push(DamagedFull {
                    path: file.name.clone(),
                    reason: e.reason().as_str().to_owned(),
                    message: e.to_string(),
                });
                Ok(Some(Uncounted::Damaged))
            }
            Err(e) => Err(e),
        }
    }
}

/// Describes a file as a full with a revision that grows with its place in the order of time.
fn as_full((nth, file): (i64, &&PlainFile)) -> ListedObject {
    let name = SnapshotName {
        kind: NameKind::Full,
        start: Revision(0),
        last: Revision(nth + 1),
        created: file.created.timestamp(),
        compression: Compression::None,
        is_final: false,
        is_encrypted: false,
    };
    ListedObject {
        path: format!("{}/{name}", V2),
        bytes: file.bytes,
    }
}
