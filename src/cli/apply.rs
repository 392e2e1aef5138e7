//! `deltafold apply`: its arguments, and its result as text.
//!
//! The operation itself is `ops::apply`.

use super::deleted::{DeletionArgs, Wanted};
use super::endpoints::EndpointArgs;
use super::recover::Lost;
use super::render::{Blocks, Cell, Render, Row};
use super::{BackupArgs, Ended, Output, print, print_report, text};
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::base::plural::count;
use crate::error::{Error, Reason, Result};
use crate::etcd::client::Client;
use crate::etcd::diff::BackupKey;
use crate::mvcc::{KeyRange, KeyValue, Revision};
use crate::objects::EncryptionKeys;
use crate::objects::key::EtcdPrefixes;
use crate::ops::apply::{
    AppliedState, Difference, DifferenceKind, KeyName, MAX_REQUEST_BYTES, MAX_TXN_OPS, Options,
    Transaction, run,
};
use crate::ops::options::StateOptions;
use crate::ops::read::Keys;
use crate::ops::report::{Report, Status};
use crate::prefix::set_aside::{Purpose, decide_again};
use clap::Args;
use std::collections::{BTreeSet, HashMap};
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

/// Write keys of a backup back into a live etcd
///
/// For an etcd without Kubernetes: objects of Kubernetes come back through its API server, with `deltafold recover`.
/// Without --execute, apply only compares the keys and shows the differences. With --execute, it puts the keys that are
/// missing in etcd or have another value there. A key that changed since the comparison is skipped and reported; all
/// other keys are written. Live keys that the backup does not have are deleted only with --delete-extra. Values are
/// copied byte for byte.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Show what would change below a prefix:
      deltafold apply --prefix /app/ --store s3://backups/etcd-main \\
          --endpoints https://10.0.0.1:2379 --cacert ca.crt --cert client.crt --key client.key
  Put back just what was deleted between two moments and is not there now:
      deltafold apply --deleted --since 14:00 --until 15:00 --store s3://backups/etcd-main \\
          --endpoints https://10.0.0.1:2379 --cacert ca.crt --cert client.crt --key client.key --execute
  Make the keys exactly those of a plain snapshot file, and delete all others with the prefix:
      deltafold apply --snapshot backup.db --prefix /app/ --endpoints http://127.0.0.1:2379 \\
          --delete-extra --execute

Marks in the list:
  +  the key is missing in etcd
  ~  the key has another value in etcd
  -  only etcd has the key, and --delete-extra deletes it
  ?  only etcd has the key, and it is kept

Exit codes: 0 on success, 75 if some keys changed in the meantime and were not written (run the command \
again). docs/exit-codes.md lists all others.")]
pub(super) struct ApplyArgs {
    /// Keys with this prefix; an empty prefix means all keys; repeatable
    ///
    /// In the environment variable: one prefix per line.
    #[arg(long, value_name = "P", value_delimiter = '\n', help_heading = "Keys")]
    prefix: Vec<OsString>,
    /// This key alone; repeatable
    ///
    /// --key is another flag: the private key of the TLS client certificate. In the environment variable: one
    /// key per line.
    #[arg(
        long,
        value_name = "KEY",
        value_delimiter = '\n',
        help_heading = "Keys",
        conflicts_with = "prefix"
    )]
    exact_key: Vec<OsString>,
    #[command(flatten)]
    deletions: DeletionArgs,
    /// Also write keys of Kubernetes' API servers past these: without admission and owners, which are not looked at
    #[arg(long, value_parser = yes_or_no)]
    raw_kubernetes: bool,
    /// Write to etcd instead of only showing the differences
    #[arg(long, value_parser = yes_or_no)]
    execute: bool,
    /// Delete live keys with the prefix that the backup does not have
    #[arg(long, conflicts_with = "deleted", value_parser = yes_or_no)]
    delete_extra: bool,
    /// Maximum number of keys per transaction, as the etcd flag of the same name allows
    #[arg(long, value_name = "N", default_value_t = MAX_TXN_OPS as u32, value_parser = clap::value_parser!(u32).range(1..))]
    max_txn_ops: u32,
    /// Maximum size of a request in bytes, as the etcd flag of the same name allows
    #[arg(long, value_name = "N", default_value_t = MAX_REQUEST_BYTES as u32, value_parser = clap::value_parser!(u32).range(1..))]
    max_request_bytes: u32,
    #[command(flatten)]
    live: EndpointArgs,
    #[command(flatten)]
    state: StateOptions,
    #[command(flatten)]
    backup: BackupArgs,
}

impl ApplyArgs {
    /// Returns the keys, and those of each part that was asked for. It must be clear what is written and deleted: an unset
    /// shell variable must not delete all keys of an etcd.
    fn keys(&self) -> Result<(KeyRange, Vec<KeyRange>)> {
        let usage = |message| Err(Reason::Usage.error(message));
        // In the environment variable, a line may be empty.
        let exact = self.exact_key.iter().map(|key| key.as_bytes().to_vec());
        let exact: BTreeSet<Vec<u8>> = exact.filter(|key| !key.is_empty()).collect();
        if !self.exact_key.is_empty() && exact.is_empty() {
            return usage("--exact-key is empty: give a key, such as /app/settings");
        }
        if !exact.is_empty() {
            let parts = exact.iter().cloned().map(KeyRange::Key).collect();
            return Ok((KeyRange::Keys(exact), parts));
        }
        if self.prefix.is_empty() && !self.deletions.deleted {
            return usage(
                "say what to apply: --prefix, --exact-key or --deleted; objects of Kubernetes come back with `deltafold recover`",
            );
        }
        if self.delete_extra && self.prefix.iter().any(|p| p.is_empty()) {
            return usage(
                "--delete-extra with an empty --prefix would delete every key that the backup does not have: give a prefix, or restore the whole backup",
            );
        }
        if self.prefix.is_empty() {
            return Ok((KeyRange::All, Vec::new()));
        }
        let prefixes = self.prefix.iter().map(|p| p.as_bytes().to_vec());
        let parts = prefixes.clone().map(KeyRange::Prefix).collect();
        Ok((KeyRange::prefixes(prefixes), parts))
    }

    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let (keys, parts) = self.keys()?;
        // Connect first: it fails faster than reading the backup.
        let client = self.live.connect(cancel).map_err(with_exact_key)?;
        let mut options = Options {
            keys,
            parts,
            revision: Revision(0),
            execute: self.execute,
            delete_extra: self.delete_extra,
            only_missing: self.deletions.deleted,
            raw_kubernetes: self.raw_kubernetes,
            leases: HashMap::new(),
            max_txn_ops: self.max_txn_ops as usize,
            max_request_bytes: self.max_request_bytes as usize,
        };
        let mut tell = |difference: &Difference| match output {
            Output::Text if !self.deletions.deleted => print(&line(difference)),
            _ => Ok(()),
        };
        if self.deletions.deleted {
            return self.put_deleted(&client, cancel, options, &mut tell, output);
        }
        let backup = self.backup.backup_at(self.state.request().at, cancel)?;
        let ctx = backup.context();
        let (source, scan, mut wanted) = decide_again([ctx], Purpose::Restore, || {
            let (source, scan) = backup.open_with_scan(&self.state.request())?;
            let wanted = Keys::read(ctx, &source, options.keys.clone())?;
            Ok((source, scan, wanted))
        })?;
        options.revision = source.revision;
        options.leases = source.leases()?;
        let mut report = run(
            &client,
            cancel,
            &options,
            |each| visit_keys(&mut wanted, each),
            &mut tell,
            |absent| {
                let lost = Lost {
                    args: &self.backup,
                    backup: &backup,
                    scan: scan.as_ref(),
                    state: &source,
                    prefixes: &EtcdPrefixes::new(None),
                    keys: &EncryptionKeys::default(),
                };
                lost.keys(&absent)
            },
        );
        let backup_warnings = source.warnings.iter().cloned();
        report.warnings.splice(0..0, backup_warnings);
        report.as_of = self.state.point.time;
        print_report(output, report)
    }

    /// Puts what was deleted in a span.
    fn put_deleted(
        &self,
        client: &Client,
        cancel: &Cancel,
        mut options: Options,
        tell: &mut dyn FnMut(&Difference) -> Result<()>,
        output: Output,
    ) -> Ended {
        let wanted = Wanted {
            timeline: self.state.timeline.as_deref(),
            range: &|_| Ok(options.keys.clone()),
            labels: None,
            prefixes: &EtcdPrefixes::new(None),
            keys: &EncryptionKeys::default(),
            records: true,
            counts_events: false,
        };
        let (_, mut deleted) = self.deletions.span.read(&wanted, &self.backup, cancel)?;
        let known = deleted.keys.len();
        let transactions = Transaction::of(&deleted.keys);
        deleted.keys.retain(|d| !d.record.is_empty());
        if deleted.keys.len() < known {
            deleted.warnings.push(format!(
                "{} were deleted whose values no snapshot holds",
                count((known - deleted.keys.len()) as u64, "key")
            ));
        }
        deleted.keys.sort_by(|a, b| a.key.cmp(&b.key));
        options.revision = deleted.to;
        options.leases = deleted.state.leases()?;
        options.parts.clear();
        options.keys = KeyRange::Keys(deleted.keys.iter().map(|d| d.key.clone()).collect());
        let visit = |each: &mut dyn FnMut(BackupKey<'_>) -> Result<()>| {
            let mut records = deleted.keys.iter();
            records.try_for_each(|d| each(backup_key(&KeyValue::decode(&d.record)?)))
        };
        let mut report = run(client, cancel, &options, visit, tell, |_| Ok(String::new()));
        report.warnings.splice(0..0, deleted.warnings);
        report.deleted_in = transactions;
        print_report(output, report)
    }
}

/// Adds to an error about the file of --key what else may have been meant.
fn with_exact_key(e: Error) -> Error {
    let message = e.to_string();
    if message.starts_with("cannot read --key ") {
        e.reason().error(format!(
            "{message}; --key is the private key of the TLS client certificate, to apply one key of etcd give --exact-key"
        ))
    } else {
        e
    }
}

/// Passes each key of the backup to `each`.
fn visit_keys(keys: &mut Keys, each: &mut dyn FnMut(BackupKey<'_>) -> Result<()>) -> Result<()> {
    while keys.advance()? {
        each(backup_key(&keys.current()?))?;
    }
    Ok(())
}

fn backup_key<'k>(kv: &KeyValue<'k>) -> BackupKey<'k> {
    BackupKey {
        key: kv.key,
        value: kv.value,
        lease: kv.lease,
    }
}

/// A key on one line; base64 if it is not UTF-8.
fn show_key(key: &KeyName) -> String {
    match (&key.key, &key.key_base64) {
        (Some(text), _) => text::key(text.as_bytes()).into_owned(),
        (None, base64) => format!("base64:{}", base64.as_deref().unwrap_or_default()),
    }
}

/// The line of a difference in the list.
fn line(d: &Difference) -> String {
    let key = show_key(&d.key);
    match (d.change, d.live_bytes, d.backup_bytes) {
        (DifferenceKind::Create, _, bytes) => {
            format!("+ {key} ({})\n", count(bytes.unwrap_or(0), "byte"))
        }
        (DifferenceKind::Update, live, backup) => format!(
            "~ {key} ({}, now {})\n",
            count(backup.unwrap_or(0), "byte"),
            live.unwrap_or(0)
        ),
        (DifferenceKind::Delete, ..) => format!("- {key}\n"),
        (DifferenceKind::Leave, ..) => format!("? {key}\n"),
    }
}

impl Render for AppliedState {
    fn blocks(o: &Report<Self>) -> Blocks {
        let mut text = Blocks::default();
        for skipped in &o.skipped {
            text.line(format!("! {}: {}", show_key(&skipped.key), skipped.message));
        }
        let differ = o.to_create + o.to_update + o.to_delete;
        let (put, deleted) = (count(o.put, "key"), o.deleted);
        text.line(match (o.status, o.dry_run) {
            (Status::NothingToDo, _) => {
                "nothing to do: all keys of the backup are as they were".to_owned()
            }
            (Status::Succeeded, true) => format!(
                "would put {} and delete {}; --execute does it",
                count(o.to_create + o.to_update, "key"),
                o.to_delete
            ),
            (Status::Succeeded, false) => format!("put {put}, deleted {deleted}"),
            (Status::Failed, _) if o.put + deleted == 0 => "nothing was written".to_owned(),
            (Status::Failed, _) => {
                format!("put {put} and deleted {deleted}, of {differ} that differ")
            }
        });
        let (backup, live) = (o.revision, o.live_revision);
        let compared =
            format!("revision {backup} of the backup with revision {live} of the live etcd");
        text.field("compared", compared);
        text.field("as of", o.as_of);
        let (missing, changed, equal) = (o.to_create, o.to_update, o.unchanged);
        text.field(
            "keys",
            format!("{missing} missing, {changed} with another value, {equal} equal"),
        );
        if o.left_alone > 0 {
            let keys = count(o.left_alone, "key");
            let kept = if o.deleted_in.is_empty() {
                "that the backup does not have; --delete-extra would delete"
            } else {
                "that exist with another value"
            };
            text.field("kept", format!("{keys} {kept}"));
        }
        if let (Some(first), Some(last)) = (o.first_revision, o.last_revision) {
            let n = count(o.transactions, "transaction");
            text.field("written", format!("in {n}, revisions {first} to {last}"));
        }
        if o.conflicts + o.too_large > 0 {
            let (conflicts, too_large) = (count(o.conflicts, "key"), o.too_large);
            let skipped = format!("{conflicts} changed in the meantime, too large: {too_large}");
            text.field("skipped", skipped);
        }
        let rows = o.deleted_in.iter().map(|t| {
            let cells = [
                t.revision.map_or(Cell::None, Cell::Revision),
                t.time.as_deref().map(text::event_time).into(),
                Cell::Count(t.keys),
            ];
            Row::from(Vec::from(cells))
        });
        if !o.deleted_in.is_empty() {
            text.table(&["REVISION", "DELETED", "KEYS"], rows.collect());
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_steers_no_terminal() {
        let shown = |key: &[u8]| show_key(&KeyName::from(key));
        assert_eq!(shown("/a/ü".as_bytes()), "/a/ü");
        assert_eq!(shown(b"/a\x1b[2J"), "/a\\u{1b}[2J");
        // Not a control character, but a terminal would write the rest from right to left.
        assert_eq!(shown("/a\u{202e}b".as_bytes()), "/a\\u{202e}b");
        assert_eq!(shown(b"\xff"), "base64:/w==");
    }
}
