//! The operation `apply`: writes the keys of a backup back into a live etcd.
//!
//! Compares the backup's keys with the live ones in order, and writes the differences in guarded
//! transactions while the comparison goes on. Does not know where the backup's keys come from. Called
//! by `cli::apply`.

use crate::base::opt::{DELETE_EXTRA, EXACT_KEY, PREFIX, RAW_KUBERNETES};
use crate::base::plural::{count, either};
use crate::base::{Cancel, shorten};
use crate::error::{Error, Reason, Result};
use crate::etcd::client::{Client, Committed};
use crate::etcd::diff::{
    Action, BackupKey, Batches, Diff, KeyDifference, LiveKey, PutLease, Write,
};
use crate::mvcc::{KeyRange, Revision};
use crate::objects::key::ObjectKey;
use crate::ops::read::deleted::DeletedKey;
use crate::ops::read::json::text_or_base64;
use crate::ops::report::{Report, ReportBuilder};
use chrono::{DateTime, Utc};
use serde::Serialize;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

/// etcd's own default for `--max-txn-ops`.
pub const MAX_TXN_OPS: usize = 128;
/// etcd's own default for `--max-request-bytes`.
pub const MAX_REQUEST_BYTES: usize = 1536 << 10;

/// The most differences, and the most skipped keys, that the outcome lists; it counts the rest.
const MOST_LISTED: usize = 1000;

/// The options of `apply`.
#[derive(Debug, Clone)]
pub struct Options {
    /// The keys that are compared; live keys outside are neither read nor written.
    pub keys: KeyRange,
    /// What was asked for: it is an error if one of these has no key on either side.
    pub parts: Vec<KeyRange>,
    /// The revision of the backup from which the keys are read; for the outcome only.
    pub revision: Revision,
    /// Write the differences; otherwise only compare.
    pub execute: bool,
    /// Also delete live keys that the backup does not have.
    pub delete_extra: bool,
    /// Put only keys that the live etcd lacks.
    pub only_missing: bool,
    /// Also write keys of Kubernetes' API servers.
    pub raw_kubernetes: bool,
    /// How long the backup's leases live, as far as a full recorded it: a new one is granted for each that is needed.
    pub leases: HashMap<i64, Duration>,
    /// The server's `--max-txn-ops`; 1 or more.
    pub max_txn_ops: usize,
    /// The server's `--max-request-bytes`; 1 or more.
    pub max_request_bytes: usize,
}

/// What is done with a key that differs (in a dry run: would be).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum DifferenceKind {
    /// The live etcd lacks it.
    Create,
    /// The live etcd has another value.
    Update,
    /// The backup lacks it, and it is deleted.
    Delete,
    /// The backup lacks it, or has another value of what was deleted, and it is kept.
    Leave,
}

/// A key in an outcome: as text, or in base64 if it is not UTF-8.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct KeyName {
    /// The key, if it is UTF-8; else null.
    pub key: Option<String>,
    /// The key in base64 (standard alphabet, padded), if it is not UTF-8; else null.
    pub key_base64: Option<String>,
}

impl From<&[u8]> for KeyName {
    fn from(key: &[u8]) -> Self {
        let (key, key_base64) = text_or_base64(key);
        KeyName {
            key: key.map(str::to_owned),
            key_base64,
        }
    }
}

/// A key that differs.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Difference {
    /// `create`: the live etcd lacks it. `update`: the live etcd has another value. `delete`: the
    /// backup lacks it, and it is deleted. `leave`: the backup lacks it, and it is kept.
    pub change: DifferenceKind,
    /// The key.
    #[serde(flatten)]
    pub key: KeyName,
    /// The mod_revision of the live key when it was compared; null if it was missing.
    pub live_mod_revision: Option<i64>,
    /// Size of the live value, in bytes; null if it was missing.
    pub live_bytes: Option<usize>,
    /// Size of the backup's value, in bytes; null if the backup lacks it.
    pub backup_bytes: Option<usize>,
}

/// A key that was not written.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Skipped {
    /// The key.
    #[serde(flatten)]
    pub key: KeyName,
    /// `Conflict`: it changed after it was compared. `TooLarge`: the server does not accept such a
    /// large request.
    pub cause: Reason,
    /// Its mod_revision when it was compared; 0 if it was missing.
    pub seen_mod_revision: i64,
    /// Its mod_revision now; null if it is missing or was not read again.
    pub mod_revision: Option<i64>,
    /// The cause as human-readable text.
    pub message: String,
}

/// The result of `apply`. The fields are a contract.
#[derive(Debug, Clone, Default, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct AppliedState {
    /// Whether this was a dry run, without `--execute`.
    pub dry_run: bool,
    /// The revision of the backup that was compared.
    pub revision: Revision,
    /// The moment that was asked for; null if none was.
    pub as_of: Option<DateTime<Utc>>,
    /// The revision of the live etcd that was compared; 0 if it could not be read.
    pub live_revision: i64,
    /// Keys that the backup has and the live etcd lacked.
    pub to_create: u64,
    /// Keys with another value in the live etcd.
    pub to_update: u64,
    /// Keys that the backup lacks and that are deleted: `--delete-extra`.
    pub to_delete: u64,
    /// Keys that the backup lacks and that are kept; of what was deleted: keys that exist with another value.
    pub left_alone: u64,
    /// Keys with the same value on both sides.
    pub unchanged: u64,
    /// Keys that were put.
    pub put: u64,
    /// Keys that were deleted.
    pub deleted: u64,
    /// Keys that changed after they were compared, and were not written.
    pub conflicts: u64,
    /// Keys that exceed the server's limits and were not written.
    pub too_large: u64,
    /// Keys that had a lease in the backup and are written without one (in a dry run: would be), because no full tells the time
    /// to live of the lease.
    pub leases_detached: u64,
    /// Number of transactions that wrote.
    pub transactions: u64,
    /// The revision of the first of these transactions.
    pub first_revision: Option<i64>,
    /// The revision of the last of these transactions.
    pub last_revision: Option<i64>,
    /// The differences, in key order: the first 1000.
    pub differences: Vec<Difference>,
    /// Number of differences that are not listed.
    pub differences_omitted: u64,
    /// The keys that were not written: the first 1000.
    pub skipped: Vec<Skipped>,
    /// Number of keys that were not written and are not listed.
    pub skipped_omitted: u64,
    /// The transactions that deleted the keys, in order: the first 1000. Without `--deleted`, empty.
    pub deleted_in: Vec<Transaction>,
}

/// A transaction that deleted keys.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Transaction {
    /// Its revision; null for what was deleted while no delta recorded it.
    pub revision: Option<Revision>,
    /// When it was recorded (RFC 3339); null if no delta records it.
    pub time: Option<String>,
    /// Number of keys.
    pub keys: u64,
}

impl Transaction {
    /// Returns the transactions of deletions, which are in the order of their revisions.
    pub fn of(deleted: &[DeletedKey]) -> Vec<Self> {
        let groups = deleted.chunk_by(|a, b| a.deletion.revision == b.deletion.revision);
        let transactions = groups.take(MOST_LISTED).map(|group| Transaction {
            revision: group[0].deletion.revision,
            time: group[0].deletion.time.clone(),
            keys: group.len() as u64,
        });
        transactions.collect()
    }
}

/// Compares the keys, and with `execute` writes the differences.
///
/// `backup_keys` calls its argument with each key of the backup, in order. `on_difference` is called
/// for every difference before it is written. The outcome tells what was written, whatever the error.
///
/// The error is `Conflict` if keys changed after they were compared, `Configuration` if a value exceeds
/// the server's limits, or else the one that ended the run: of `backup_keys`, `on_difference` or etcd,
/// or `Terminated`.
///
/// `KeyNotFound` if neither side has any key for one of the keys or prefixes that were asked for; `advice` is then
/// called with the first one, and what it returns ends the message.
pub fn run(
    client: &Client,
    cancel: &Cancel,
    options: &Options,
    backup_keys: impl FnOnce(&mut dyn FnMut(BackupKey<'_>) -> Result<()>) -> Result<()>,
    on_difference: &mut dyn FnMut(&Difference) -> Result<()>,
    advice: impl FnOnce(KeyRange) -> Result<String>,
) -> Report<AppliedState> {
    let mut clock = ReportBuilder::start();
    let mut applier = Applier {
        client: client.clone(),
        cancel,
        options,
        on_difference,
        batches: Batches::new(options.max_txn_ops, options.max_request_bytes),
        outcome: AppliedState {
            dry_run: !options.execute,
            revision: options.revision,
            ..AppliedState::default()
        },
        beside: None,
        leases: HashMap::new(),
        unseen: options.parts.iter().collect(),
    };
    let compared = applier.compare(backup_keys);
    clock.warnings.extend(applier.beside_warning());
    let unseen = compared.and_then(|()| applier.unseen_error(advice)).err();
    let outcome = applier.outcome;
    let error = unseen.or_else(|| outcome.unwritten());
    let differ = outcome.to_create + outcome.to_update + outcome.to_delete;
    if outcome.leases_detached > 0 {
        clock.warnings.push(format!(
            "{} had a lease in the backup and {} put without one: {}",
            count(outcome.leases_detached, "key"),
            if options.execute {
                either(outcome.leases_detached, "is", "are")
            } else {
                "would be"
            },
            either(
                outcome.leases_detached,
                "it does not expire",
                "they do not expire"
            )
        ));
    }
    clock.ended(outcome, differ > 0, error)
}

/// Compares the keys, and writes the differences.
struct Applier<'a> {
    client: Client,
    cancel: &'a Cancel,
    options: &'a Options,
    on_difference: &'a mut dyn FnMut(&Difference) -> Result<()>,
    batches: Batches,
    outcome: AppliedState,
    /// The first key to delete that only begins like its prefix, the prefix, and how many such keys there are.
    beside: Option<(Vec<u8>, Vec<u8>, u64)>,
    /// The leases that were granted, by those of the backup.
    leases: HashMap<i64, i64>,
    /// The parts with no key in the backup or in etcd so far.
    unseen: Vec<&'a KeyRange>,
}

/// Whether a key only begins like a prefix that was probably meant as a name: `/a/b` matches `/a/bc`. The keys
/// `/a/b` and `/a/b/c` are the name itself and what is below it.
fn is_beside(prefix: &[u8], key: &[u8]) -> bool {
    let rest = key.strip_prefix(prefix).unwrap_or_default();
    !prefix.is_empty() && !prefix.ends_with(b"/") && rest.first().is_some_and(|&next| next != b'/')
}

/// Refuses a key of an API server: written past it, an object that was about to be deleted goes on with that, and owners and
/// claims are those of old UIDs.
fn refuse_kubernetes(key: &[u8], value: Option<&[u8]>) -> Result<()> {
    let Some(object) = ObjectKey::from_key(key, value) else {
        return Ok(());
    };
    let group = object.group.as_deref().filter(|group| !group.is_empty());
    let group = group.map(|group| format!(".{group}")).unwrap_or_default();
    let namespace = object
        .namespace
        .map(|n| format!("/{n}"))
        .unwrap_or_default();
    Err(Reason::Usage.error(format!(
        "{} is a key of Kubernetes, whose objects come back through its API server: `deltafold recover {}{group}{namespace}/{}`; {RAW_KUBERNETES} writes such keys all the same",
        key.escape_ascii(),
        object.resource,
        object.name
    )))
}

impl Applier<'_> {
    /// Returns the warning that a prefix without `/` at its end deletes keys of other names.
    fn beside_warning(&self) -> Option<String> {
        let (key, prefix, count) = self.beside.as_ref()?;
        let prefix = prefix.escape_ascii();
        let deleted = if self.options.execute {
            "deletes"
        } else {
            "would delete"
        };
        Some(format!(
            "{PREFIX} {prefix} does not end with /, so {DELETE_EXTRA} {deleted} keys of other names, too: {count}, such as {}; for the one key give {EXACT_KEY} {prefix}, for the keys below it {PREFIX} {prefix}/",
            key.escape_ascii()
        ))
    }

    /// Fails if neither side has a key for something that was asked for.
    fn unseen_error(&self, advice: impl FnOnce(KeyRange) -> Result<String>) -> Result<()> {
        let Some(first) = self.unseen.first() else {
            return Ok(());
        };
        let what = match first {
            KeyRange::Prefix(_) | KeyRange::Prefixes(_) => "key with the prefix",
            _ => "key",
        };
        // Of the places that an object may have, Kubernetes' own is the last.
        let unseen = self.unseen.iter().filter_map(|part| part.last());
        let unseen = unseen.map(|key| key.escape_ascii().to_string());
        let unseen: Vec<String> = unseen.collect();
        Err(Reason::KeyNotFound.error(format!(
            "no such {what} at revision {} of the backup, and none in etcd: {}; {}",
            self.options.revision,
            shorten::line(&unseen, ", ", ""),
            advice((*first).clone())?
        )))
    }

    /// Compares all keys, and writes the differences in batches.
    fn compare(
        &mut self,
        backup_keys: impl FnOnce(&mut dyn FnMut(BackupKey<'_>) -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        let live = LiveKeys::new(self.client.clone(), &self.options.keys);
        let mut diff = Diff::new(live);
        let compared = backup_keys(&mut |key| diff.push(key, |change| self.handle(change)))
            .and_then(|()| diff.finish(|change| self.handle(change)));
        self.outcome.live_revision = diff.live().revision;
        compared?;
        match self.batches.take() {
            Some(last) => self.commit(last),
            None => Ok(()),
        }
    }

    /// Reports a difference, and adds it to the next batch.
    fn handle(&mut self, change: KeyDifference<'_>) -> Result<()> {
        self.cancel.check()?;
        let seen = match change {
            KeyDifference::Unchanged { key } => key,
            KeyDifference::Put { backup, .. } => backup.key,
            KeyDifference::Extra { live } => live.key.as_slice(),
        };
        self.unseen.retain(|part| !part.contains(seen));
        let o = &mut self.outcome;
        let (kind, key, live, value) = match change {
            KeyDifference::Unchanged { .. } => {
                o.unchanged += 1;
                return Ok(());
            }
            KeyDifference::Put {
                backup: wanted,
                live,
            } => {
                let kind = match live {
                    None => DifferenceKind::Create,
                    Some(_) if self.options.only_missing => DifferenceKind::Leave,
                    Some(_) => DifferenceKind::Update,
                };
                (kind, wanted.key, live, Some(wanted))
            }
            KeyDifference::Extra { live } => {
                let kind = if self.options.delete_extra {
                    DifferenceKind::Delete
                } else {
                    DifferenceKind::Leave
                };
                (kind, live.key.as_slice(), Some(live), None)
            }
        };
        if kind != DifferenceKind::Leave && !self.options.raw_kubernetes {
            refuse_kubernetes(key, value.map(|w| w.value))?;
        }
        match kind {
            DifferenceKind::Create => o.to_create += 1,
            DifferenceKind::Update => o.to_update += 1,
            DifferenceKind::Delete => {
                o.to_delete += 1;
                if let KeyRange::Prefixes(all) = &self.options.keys
                    && let Some(prefix) = all.iter().find(|prefix| is_beside(prefix, key))
                {
                    let first = || (key.to_vec(), prefix.clone(), 0);
                    self.beside.get_or_insert_with(first).2 += 1;
                }
            }
            DifferenceKind::Leave => o.left_alone += 1,
        }
        // A live key keeps its own lease.
        let keep_lease = live.is_some_and(|l| l.lease != 0);
        let time_to_live = value.and_then(|w| self.options.leases.get(&w.lease));
        if value.is_some_and(|w| w.lease != 0) && !keep_lease && time_to_live.is_none() {
            o.leases_detached += 1;
        }
        let difference = Difference {
            change: kind,
            key: key.into(),
            live_mod_revision: live.map(|l| l.mod_revision),
            live_bytes: live.map(|l| l.value.len()),
            backup_bytes: value.map(|w| w.value.len()),
        };
        (self.on_difference)(&difference)?;
        if o.differences.len() < MOST_LISTED {
            o.differences.push(difference);
        } else {
            o.differences_omitted += 1;
        }
        if kind == DifferenceKind::Leave || !self.options.execute {
            return Ok(());
        }
        let action = match value {
            Some(w) => Action::Put {
                value: w.value.to_vec(),
                lease: match (keep_lease, time_to_live) {
                    (true, _) => PutLease::Keep,
                    (false, Some(time)) => PutLease::Of(self.lease(w.lease, *time)?),
                    (false, None) => PutLease::Of(0),
                },
            },
            None => Action::Delete,
        };
        let full_batch = self.batches.push(Write {
            key: key.to_vec(),
            action,
            mod_revision: live.map_or(0, |l| l.mod_revision),
        });
        match full_batch {
            Some(batch) => self.commit(batch),
            None => Ok(()),
        }
    }

    /// Returns the lease that stands for one of the backup.
    fn lease(&mut self, of_backup: i64, time_to_live: Duration) -> Result<i64> {
        if let Some(granted) = self.leases.get(&of_backup) {
            return Ok(*granted);
        }
        let granted = self.client.grant_lease(time_to_live)?;
        self.leases.insert(of_backup, granted);
        Ok(granted)
    }

    /// Writes a batch. If it cannot be written as one, writes key by key, so that the outcome can name
    /// the keys that prevent it.
    fn commit(&mut self, batch: Vec<Write>) -> Result<()> {
        self.cancel.check()?;
        match (self.client.commit(&batch)?, batch.as_slice()) {
            (Committed::Done { revision }, _) => self.outcome.count_written(&batch, revision),
            (committed, [one]) => self.outcome.record(one, committed, false),
            (Committed::Changed { maybe_ours, .. }, _) => {
                self.commit_one_by_one(&batch, maybe_ours)?
            }
            (Committed::TooLarge { .. }, _) => self.commit_one_by_one(&batch, false)?,
        }
        Ok(())
    }

    /// Writes a batch key by key. `maybe_ours`: a response was lost, so the batch may be written
    /// already.
    fn commit_one_by_one(&mut self, batch: &[Write], maybe_ours: bool) -> Result<()> {
        for write in batch {
            self.cancel.check()?;
            let committed = self.client.commit(std::slice::from_ref(write))?;
            self.outcome.record(write, committed, maybe_ours);
        }
        Ok(())
    }
}

impl AppliedState {
    fn count_written(&mut self, batch: &[Write], revision: i64) {
        self.transactions += 1;
        self.first_revision.get_or_insert(revision);
        self.last_revision = Some(revision);
        for write in batch {
            match write.action {
                Action::Put { .. } => self.put += 1,
                Action::Delete => self.deleted += 1,
            }
        }
    }

    /// Records the result of a key that was written alone.
    fn record(&mut self, write: &Write, committed: Committed, maybe_ours: bool) {
        match committed {
            Committed::Done { revision } => {
                self.count_written(std::slice::from_ref(write), revision)
            }
            Committed::Changed {
                now,
                maybe_ours: now_ours,
            } => self.record_changed(write, now, maybe_ours || now_ours),
            Committed::TooLarge { message } => {
                let message = format!(
                    "{message}: {} bytes; raise etcd's --max-request-bytes",
                    write.request_bytes()
                );
                self.skip(write, Reason::TooLarge, None, message);
            }
        }
    }

    /// Records a key whose guard failed. If it has the desired value all the same, that is not a
    /// conflict.
    fn record_changed(&mut self, write: &Write, now: Option<LiveKey>, maybe_ours: bool) {
        let is_as_desired = match (&write.action, &now) {
            (Action::Put { value, .. }, Some(now)) => *value == now.value,
            (Action::Delete, None) => true,
            _ => false,
        };
        if is_as_desired && maybe_ours {
            let revision = now
                .map(|n| n.mod_revision)
                .or(self.last_revision)
                .unwrap_or(self.live_revision);
            self.count_written(std::slice::from_ref(write), revision);
        } else if is_as_desired {
            self.unchanged += 1;
        } else {
            let event = match (&now, write.mod_revision) {
                (None, _) => "was deleted",
                (Some(_), 0) => "was created",
                (Some(_), _) => "was changed",
            };
            let now = now.map(|n| n.mod_revision);
            let message = format!("it {event} after it was compared");
            self.skip(write, Reason::Conflict, now, message);
        }
    }

    /// Adds a key that was not written.
    fn skip(&mut self, write: &Write, cause: Reason, now: Option<i64>, message: String) {
        match cause {
            Reason::Conflict => self.conflicts += 1,
            _ => self.too_large += 1,
        }
        if self.skipped.len() >= MOST_LISTED {
            self.skipped_omitted += 1;
            return;
        }
        self.skipped.push(Skipped {
            key: write.key.as_slice().into(),
            cause,
            seen_mod_revision: write.mod_revision,
            mod_revision: now,
            message,
        });
    }

    /// Returns the error for keys that were not written, if there are any.
    fn unwritten(&self) -> Option<Error> {
        if self.too_large > 0 {
            return Some(Reason::Configuration.error(format!(
                "{} {} the server's limits and {} not written: raise etcd's --max-request-bytes",
                count(self.too_large, "key"),
                either(self.too_large, "exceeds", "exceed"),
                either(self.too_large, "was", "were")
            )));
        }
        (self.conflicts > 0).then(|| {
            Reason::Conflict.error(format!(
                "{} changed after the comparison and {} not written; all others were: run again to compare anew",
                count(self.conflicts, "key"),
                either(self.conflicts, "was", "were")
            ))
        })
    }
}

/// The desired size of a page of live keys, in bytes.
const PAGE_BYTES: usize = 4 << 20;
/// Number of keys of the first page. It is small, since each value may have 1.5 MiB.
const FIRST_PAGE: usize = 16;
/// The most keys of a page, as in requests of the Kubernetes API server. Large values may follow small
/// ones, and the live etcd holds a page in memory.
const LARGEST_PAGE: usize = 500;

/// Returns the number of keys to request for the next page, after one of `keys` keys with `bytes` bytes
/// in total.
fn next_limit(limit: usize, keys: usize, bytes: usize) -> usize {
    let each = bytes / keys.max(1);
    let fits = PAGE_BYTES / each.max(1);
    fits.clamp(1, LARGEST_PAGE).min(limit.saturating_mul(4))
}

/// The live keys of a range, read page by page as of one revision.
struct LiveKeys {
    client: Client,
    keys: KeyRange,
    /// What is not read yet: the first key of each part, and the end after its last.
    parts: VecDeque<(Vec<u8>, Vec<u8>)>,
    /// 0 until the first page is read.
    revision: i64,
    /// Number of keys to request for the next page.
    limit: usize,
    page: VecDeque<LiveKey>,
}

impl LiveKeys {
    fn new(client: Client, keys: &KeyRange) -> Self {
        LiveKeys {
            client,
            keys: keys.clone(),
            parts: parts(keys),
            revision: 0,
            limit: FIRST_PAGE,
            page: VecDeque::new(),
        }
    }

    /// Reads the next page of a part.
    fn fetch(&mut self, (from, end): (Vec<u8>, Vec<u8>)) -> Result<()> {
        let page = self.client.page(&from, &end, self.revision, self.limit)?;
        if self.revision == 0 {
            self.revision = page.revision;
        }
        let bytes = page.keys.iter().map(|k| k.key.len() + k.value.len()).sum();
        self.limit = next_limit(self.limit, page.keys.len(), bytes);
        if let (true, Some(last)) = (page.more, page.keys.last()) {
            // The smallest key after the last one.
            let next = single(&last.key).1;
            self.parts.push_front((next, end));
        }
        // A namespace is not contiguous.
        let keys = page.keys.into_iter().filter(|k| self.keys.contains(&k.key));
        self.page = keys.collect();
        Ok(())
    }
}

impl Iterator for LiveKeys {
    type Item = Result<LiveKey>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.page.is_empty()
            && let Some(part) = self.parts.pop_front()
        {
            if let Err(e) = self.fetch(part) {
                self.parts.clear();
                return Some(Err(e));
            }
        }
        self.page.pop_front().map(Ok)
    }
}

/// Returns a key, and the smallest key after it.
fn single(key: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let mut end = key.to_vec();
    end.push(0);
    (key.to_vec(), end)
}

/// Returns the parts of a range, in order: the first key of each, and the end after its last; `[0]` stands for the
/// end of all keys, as in etcd.
fn parts(keys: &KeyRange) -> VecDeque<(Vec<u8>, Vec<u8>)> {
    match keys {
        KeyRange::All => [with_prefix(b"")].into(),
        KeyRange::Key(key) => [single(key)].into(),
        KeyRange::Keys(keys) => keys.iter().map(|key| single(key)).collect(),
        KeyRange::Prefix(prefix) => [with_prefix(prefix)].into(),
        KeyRange::Prefixes(all) => all.iter().map(|prefix| with_prefix(prefix)).collect(),
        KeyRange::Namespace { roots, .. } => {
            let below = roots.iter().map(|root| [&root[..], b"/"].concat());
            below.map(|below| with_prefix(&below)).collect()
        }
    }
}

/// Returns the first key with a prefix, and the end after the last one.
fn with_prefix(prefix: &[u8]) -> (Vec<u8>, Vec<u8>) {
    if prefix.is_empty() {
        return (vec![0], vec![0]);
    }
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < 0xff {
            end.push(last + 1);
            return (prefix.to_vec(), end);
        }
    }
    (prefix.to_vec(), vec![0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_those_of_etcd() {
        let bounds = |keys: &KeyRange| {
            let mut parts = parts(keys);
            assert_eq!(parts.len(), 1);
            parts.remove(0).unwrap()
        };
        let prefix = |p: &[u8]| bounds(&KeyRange::Prefix(p.to_vec()));
        assert_eq!(prefix(b"/a/"), (b"/a/".to_vec(), b"/a0".to_vec()));
        assert_eq!(prefix(b"a\xff\xff"), (b"a\xff\xff".to_vec(), b"b".to_vec()));
        assert_eq!(prefix(b"\xff"), (b"\xff".to_vec(), vec![0]));
        assert_eq!(prefix(b""), (vec![0], vec![0]));
        assert_eq!(bounds(&KeyRange::All), (vec![0], vec![0]));
        let key = bounds(&KeyRange::Key(b"a".to_vec()));
        assert_eq!(key, (b"a".to_vec(), b"a\0".to_vec()));
    }

    #[test]
    fn a_prefix_without_a_slash_also_begins_other_names() {
        for (prefix, key, beside) in [
            ("/cm/cm-1", "/cm/cm-10", true),
            ("/cm/cm-1", "/cm/cm-1", false),
            ("/cm/cm-1", "/cm/cm-1/x", false),
            ("/cm/", "/cm/cm-1", false),
            ("/app", "/application/x", true),
            ("", "/x", false),
        ] {
            let is_beside = is_beside(prefix.as_bytes(), key.as_bytes());
            assert_eq!(is_beside, beside, "{prefix} {key}");
        }
    }

    #[test]
    fn pages_grow_slowly_and_shrink_at_once() {
        assert_eq!(next_limit(16, 16, 16 * 100), 64);
        assert_eq!(next_limit(64, 64, 64 * (1 << 20)), 4);
        assert_eq!(next_limit(4, 4, 4 * (6 << 20)), 1);
        assert_eq!(next_limit(1, 1, 10), 4);
        assert_eq!(next_limit(500, 500, 500), LARGEST_PAGE);
        assert_eq!(next_limit(16, 0, 0), 64);
    }

    #[test]
    fn a_key_that_is_not_utf8_is_written_in_base64() {
        let json = |key: &[u8]| serde_json::to_string(&KeyName::from(key)).unwrap();
        assert_eq!(json(b"/a"), r#"{"key":"/a","key_base64":null}"#);
        assert_eq!(json(b"\xff"), r#"{"key":null,"key_base64":"/w=="}"#);
    }
}
