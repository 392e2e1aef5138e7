//! Applying: a part of a backup is put back into a live etcd.
//!
//! The backup's keys and the live ones are compared in order, and what differs is written in guarded
//! transactions while the comparison goes on. Where the backup's keys come from it does not know.

use crate::base::Cancel;
use crate::error::{Error, Reason, Result};
use crate::etcd::client::{Client, Committed};
use crate::etcd::diff::{Action, BackupKey, Batches, Diff, KeyDifference, LiveKey, Write};
use crate::mvcc::{KeyRange, Revision};
use crate::ops::read::json::text_or_base64;
use crate::ops::report::{Clock, Failed, Report};
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::VecDeque;

/// etcd's own default for `--max-txn-ops`.
pub const MAX_TXN_OPS: usize = 128;
/// etcd's own default for `--max-request-bytes`.
pub const MAX_REQUEST_BYTES: usize = 1536 << 10;

/// As many keys of each kind the outcome lists; what more there are it counts.
const LISTED: usize = 1000;

/// What to write, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// The keys that are compared; live ones outside are neither read nor written.
    pub keys: KeyRange,
    /// The revision of the backup that they are taken from; for the outcome.
    pub revision: Revision,
    /// Write; else only compare.
    pub execute: bool,
    /// Also delete live keys that the backup does not have.
    pub delete_extra: bool,
    /// The server's `--max-txn-ops`; 1 or more.
    pub max_txn_ops: usize,
    /// The server's `--max-request-bytes`; 1 or more.
    pub max_request_bytes: usize,
}

/// How it ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Status {
    /// All that differs is written (or would be, in a dry run).
    Succeeded,
    /// Nothing differs.
    NothingToDo,
    /// Not all is written: the other fields tell what is.
    #[default]
    Failed,
}

/// What is (or would be) done to a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verb {
    /// It is missing live.
    Create,
    /// It has another value live.
    Update,
    /// It is live and not in the backup, and goes.
    Delete,
    /// It is live and not in the backup, and stays.
    Leave,
}

/// A key in an outcome: as text where it is text.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
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
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Difference {
    /// `create`: missing live. `update`: another value live. `delete`: not in the backup, and to go. `leave`:
    /// not in the backup, and left alone.
    pub change: Verb,
    /// The key.
    #[serde(flatten)]
    pub key: KeyName,
    /// The live key's revision of its last change when it was compared; null if it was missing.
    pub live_mod_revision: Option<i64>,
    /// Bytes of the live value.
    pub live_bytes: Option<usize>,
    /// Bytes of the backup's value.
    pub backup_bytes: Option<usize>,
}

/// A key that was not written.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Skipped {
    /// The key.
    #[serde(flatten)]
    pub key: KeyName,
    /// `Conflict`: it changed after it was compared. `TooLarge`: the server takes no such request.
    pub cause: Reason,
    /// Its revision when it was compared; 0 if it was missing.
    pub seen_mod_revision: i64,
    /// Its revision now; null if it is missing, or nobody looked.
    pub mod_revision: Option<i64>,
    /// In words.
    pub message: String,
}

/// What was done. The fields are a contract: `docs/apply-result.schema.json`.
#[derive(Debug, Clone, Default, JsonSchema, Serialize)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// Why, if it failed.
    #[serde(flatten)]
    pub error: Failed,
    /// Whether nothing was to be written: no `--execute`.
    pub dry_run: bool,
    /// The revision of the backup that was compared.
    pub revision: Revision,
    /// The revision of the live etcd that was compared; 0 if it could not be read.
    pub live_revision: i64,
    /// Keys that the backup has and the live etcd had not.
    pub to_create: u64,
    /// Keys with another value in the live etcd.
    pub to_update: u64,
    /// Keys that the backup has not and that are to go: `--delete-extra`.
    pub to_delete: u64,
    /// Keys that the backup has not and that stay.
    pub left_alone: u64,
    /// Keys with the same value on both sides.
    pub unchanged: u64,
    /// Keys that were put.
    pub put: u64,
    /// Keys that were deleted.
    pub deleted: u64,
    /// Keys that changed after they were compared, and were not written.
    pub conflicts: u64,
    /// Keys that the server's limits do not allow to be written.
    pub too_large: u64,
    /// Keys that had a lease in the backup and are (or would be) put without one.
    pub leases_detached: u64,
    /// Transactions that wrote.
    pub transactions: u64,
    /// The live etcd's revision of the first of them.
    pub first_revision: Option<i64>,
    /// The live etcd's revision of the last of them.
    pub last_revision: Option<i64>,
    /// What differs, in the order of the keys: the first 1000.
    pub differences: Vec<Difference>,
    /// Keys that differ and are not listed.
    pub differences_omitted: u64,
    /// What was not written: the first 1000.
    pub skipped: Vec<Skipped>,
    /// Keys that were not written and are not listed.
    pub skipped_omitted: u64,
}

/// Compares and, with `execute`, writes.
///
/// `wanted` calls what it is given with each of the backup's keys, in order. `tell` hears of every
/// difference before it is written. The outcome tells what was written, whatever the error is.
///
/// The error is `Conflict` where keys changed meanwhile, `Configuration` where the server takes no
/// request as large as some value; else what ended the work: of `wanted`, of `tell`, of etcd,
/// `Terminated`.
pub fn run(
    client: &Client,
    cancel: &Cancel,
    options: &Options,
    wanted: impl FnOnce(&mut dyn FnMut(BackupKey<'_>) -> Result<()>) -> Result<()>,
    tell: &mut dyn FnMut(&Difference) -> Result<()>,
) -> Report<Outcome> {
    let mut clock = Clock::start();
    let mut run = Run {
        client: client.clone(),
        cancel,
        options,
        tell,
        batches: Batches::new(options.max_txn_ops, options.max_request_bytes),
        outcome: Outcome {
            dry_run: !options.execute,
            revision: options.revision,
            ..Outcome::default()
        },
    };
    let mut error = run.compare(wanted).err();
    let mut outcome = run.outcome;
    if error.is_none() {
        error = outcome.left_over();
    }
    outcome.status = match &error {
        Some(_) => Status::Failed,
        None if outcome.to_create + outcome.to_update + outcome.to_delete == 0 => {
            Status::NothingToDo
        }
        None => Status::Succeeded,
    };
    outcome.error = Failed::from(&error);
    if outcome.leases_detached > 0 {
        clock.warnings.push(format!(
            "{} keys had a lease in the backup and {} put without one: they do not expire",
            outcome.leases_detached,
            if options.execute { "are" } else { "would be" }
        ));
    }
    clock.ended(outcome, error)
}

struct Run<'a> {
    client: Client,
    cancel: &'a Cancel,
    options: &'a Options,
    tell: &'a mut dyn FnMut(&Difference) -> Result<()>,
    batches: Batches,
    outcome: Outcome,
}

impl Run<'_> {
    fn compare(
        &mut self,
        wanted: impl FnOnce(&mut dyn FnMut(BackupKey<'_>) -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        let live = Live::new(self.client.clone(), &self.options.keys);
        let mut diff = Diff::new(live);
        let compared = wanted(&mut |w| diff.push(w, |change| self.change(change)))
            .and_then(|()| diff.finish(|change| self.change(change)));
        self.outcome.live_revision = diff.live().revision;
        compared?;
        match self.batches.take() {
            Some(last) => self.commit(last),
            None => Ok(()),
        }
    }

    fn change(&mut self, change: KeyDifference<'_>) -> Result<()> {
        self.cancel.check()?;
        let o = &mut self.outcome;
        let (verb, key, live, value) = match change {
            KeyDifference::Unchanged { .. } => {
                o.unchanged += 1;
                return Ok(());
            }
            KeyDifference::Put {
                backup: wanted,
                live,
            } => {
                let verb = match live {
                    None => Verb::Create,
                    Some(_) => Verb::Update,
                };
                (verb, wanted.key, live, Some(wanted))
            }
            KeyDifference::Extra { live } => {
                let verb = match self.options.delete_extra {
                    true => Verb::Delete,
                    false => Verb::Leave,
                };
                (verb, live.key.as_slice(), Some(live), None)
            }
        };
        match verb {
            Verb::Create => o.to_create += 1,
            Verb::Update => o.to_update += 1,
            Verb::Delete => o.to_delete += 1,
            Verb::Leave => o.left_alone += 1,
        }
        // A live key's own lease stays on it.
        let keep_lease = live.is_some_and(|l| l.lease != 0);
        if value.is_some_and(|w| w.lease != 0) && !keep_lease {
            o.leases_detached += 1;
        }
        let difference = Difference {
            change: verb,
            key: key.into(),
            live_mod_revision: live.map(|l| l.mod_revision),
            live_bytes: live.map(|l| l.value.len()),
            backup_bytes: value.map(|w| w.value.len()),
        };
        (self.tell)(&difference)?;
        if o.differences.len() < LISTED {
            o.differences.push(difference);
        } else {
            o.differences_omitted += 1;
        }
        if verb == Verb::Leave || !self.options.execute {
            return Ok(());
        }
        let action = match value {
            Some(w) => Action::Put {
                value: w.value.to_vec(),
                keep_lease,
            },
            None => Action::Delete,
        };
        let full = self.batches.push(Write {
            key: key.to_vec(),
            action,
            mod_revision: live.map_or(0, |l| l.mod_revision),
        });
        match full {
            Some(batch) => self.commit(batch),
            None => Ok(()),
        }
    }

    /// Writes a batch; key by key where it cannot be written as one, so that the keys in the way
    /// are known by name.
    fn commit(&mut self, batch: Vec<Write>) -> Result<()> {
        self.cancel.check()?;
        match (self.client.commit(&batch)?, batch.as_slice()) {
            (Committed::Done { revision }, _) => self.outcome.wrote(&batch, revision),
            (committed, [one]) => self.outcome.settle(one, committed, false),
            (Committed::Changed { maybe_ours, .. }, _) => self.one_by_one(&batch, maybe_ours)?,
            (Committed::TooLarge { .. }, _) => self.one_by_one(&batch, false)?,
        }
        Ok(())
    }

    /// `maybe_ours`: an answer was lost, so the batch may be written already.
    fn one_by_one(&mut self, batch: &[Write], maybe_ours: bool) -> Result<()> {
        for write in batch {
            self.cancel.check()?;
            let committed = self.client.commit(std::slice::from_ref(write))?;
            self.outcome.settle(write, committed, maybe_ours);
        }
        Ok(())
    }
}

impl Outcome {
    fn wrote(&mut self, batch: &[Write], revision: i64) {
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

    /// What became of a key that was written alone.
    fn settle(&mut self, write: &Write, committed: Committed, maybe_ours: bool) {
        match committed {
            Committed::Done { revision } => self.wrote(std::slice::from_ref(write), revision),
            Committed::Changed {
                now,
                maybe_ours: now_ours,
            } => self.changed(write, now, maybe_ours || now_ours),
            Committed::TooLarge { message } => {
                let message = format!(
                    "{message}: {} bytes; raise etcd's --max-request-bytes",
                    write.request_bytes()
                );
                self.skip(write, Reason::TooLarge, None, message);
            }
        }
    }

    /// A key's guard did not hold: is it as it is to be all the same?
    fn changed(&mut self, write: &Write, now: Option<LiveKey>, maybe_ours: bool) {
        let as_wanted = match (&write.action, &now) {
            (Action::Put { value, .. }, Some(now)) => *value == now.value,
            (Action::Delete, None) => true,
            _ => false,
        };
        if as_wanted && maybe_ours {
            let revision = now.map(|n| n.mod_revision);
            let revision = revision
                .or(self.last_revision)
                .unwrap_or(self.live_revision);
            self.wrote(std::slice::from_ref(write), revision);
        } else if as_wanted {
            self.unchanged += 1;
        } else {
            let what = match (&now, write.mod_revision) {
                (None, _) => "was deleted",
                (Some(_), 0) => "came into being",
                (Some(_), _) => "was changed",
            };
            let now = now.map(|n| n.mod_revision);
            let message = format!("it {what} after it was compared");
            self.skip(write, Reason::Conflict, now, message);
        }
    }

    fn skip(&mut self, write: &Write, cause: Reason, now: Option<i64>, message: String) {
        match cause {
            Reason::Conflict => self.conflicts += 1,
            _ => self.too_large += 1,
        }
        if self.skipped.len() >= LISTED {
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

    /// What keys that were not written come to.
    fn left_over(&self) -> Option<Error> {
        if self.too_large > 0 {
            return Some(Reason::Configuration.error(format!(
                "{} keys are larger than the server's limits allow and were not written: raise etcd's --max-request-bytes",
                self.too_large
            )));
        }
        (self.conflicts > 0).then(|| {
            Reason::Conflict.error(format!(
                "{} keys changed after they were compared and were not written; all else is: run again to compare anew",
                self.conflicts
            ))
        })
    }
}

/// About as many bytes as one page of live keys is to have.
const PAGE_BYTES: usize = 4 << 20;
/// Keys of the first page: values of 1.5 MiB each must not be too many.
const FIRST_PAGE: usize = 16;
/// As many as API servers ask for at once. Large values may come after small ones, and what is asked
/// for the live etcd has in its memory.
const LARGEST_PAGE: usize = 500;

/// Keys of the next page, after one of `keys` keys with `bytes` in all.
fn next_limit(limit: usize, keys: usize, bytes: usize) -> usize {
    let each = bytes / keys.max(1);
    let fits = PAGE_BYTES / each.max(1);
    fits.clamp(1, LARGEST_PAGE).min(limit.saturating_mul(4))
}

/// The live keys of a range, page by page, all as of one revision.
struct Live {
    client: Client,
    from: Vec<u8>,
    end: Vec<u8>,
    /// 0 until the first page is there.
    revision: i64,
    limit: usize,
    page: VecDeque<LiveKey>,
    more: bool,
}

impl Live {
    fn new(client: Client, keys: &KeyRange) -> Self {
        let (from, end) = bounds(keys);
        Live {
            client,
            from,
            end,
            revision: 0,
            limit: FIRST_PAGE,
            page: VecDeque::new(),
            more: true,
        }
    }

    fn fetch(&mut self) -> Result<()> {
        let page = self
            .client
            .page(&self.from, &self.end, self.revision, self.limit)?;
        if self.revision == 0 {
            self.revision = page.revision;
        }
        let bytes = page.keys.iter().map(|k| k.key.len() + k.value.len()).sum();
        self.limit = next_limit(self.limit, page.keys.len(), bytes);
        self.more = page.more;
        if let Some(last) = page.keys.last() {
            // The very next key there can be.
            self.from.clone_from(&last.key);
            self.from.push(0);
        }
        self.page = page.keys.into();
        Ok(())
    }
}

impl Iterator for Live {
    type Item = Result<LiveKey>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.page.is_empty()
            && self.more
            && let Err(e) = self.fetch()
        {
            self.more = false;
            return Some(Err(e));
        }
        self.page.pop_front().map(Ok)
    }
}

/// From where to before where keys lie; `[0]` stands for the end of all keys, as in etcd.
fn bounds(keys: &KeyRange) -> (Vec<u8>, Vec<u8>) {
    match keys {
        KeyRange::All => (vec![0], vec![0]),
        KeyRange::Key(key) => {
            let mut end = key.clone();
            end.push(0);
            (key.clone(), end)
        }
        KeyRange::Prefix(prefix) if prefix.is_empty() => (vec![0], vec![0]),
        KeyRange::Prefix(prefix) => {
            let mut end = prefix.clone();
            while let Some(last) = end.pop() {
                if last < 0xff {
                    end.push(last + 1);
                    return (prefix.clone(), end);
                }
            }
            (prefix.clone(), vec![0])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_those_of_etcd() {
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
    fn pages_grow_slowly_and_shrink_at_once() {
        assert_eq!(next_limit(16, 16, 16 * 100), 64);
        assert_eq!(next_limit(64, 64, 64 * (1 << 20)), 4);
        assert_eq!(next_limit(4, 4, 4 * (6 << 20)), 1);
        assert_eq!(next_limit(1, 1, 10), 4);
        assert_eq!(next_limit(500, 500, 500), LARGEST_PAGE);
        assert_eq!(next_limit(16, 0, 0), 64);
    }

    #[test]
    fn a_key_that_is_no_text_is_told_in_base64() {
        let json = |key: &[u8]| serde_json::to_string(&KeyName::from(key)).unwrap();
        assert_eq!(json(b"/a"), r#"{"key":"/a","key_base64":null}"#);
        assert_eq!(json(b"\xff"), r#"{"key":null,"key_base64":"/w=="}"#);
    }
}
