//! `deltafold apply`: its arguments, and its outcome in words.

use super::endpoints::EndpointArgs;
use super::text::Text;
use super::{BackupArgs, Ended, Output, print, print_report};
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::error::Reason;
use crate::etcd::diff::BackupKey;
use crate::mvcc::KeyRange;
use crate::ops::apply::{
    Difference, DifferenceKind, KeyName, MAX_REQUEST_BYTES, MAX_TXN_OPS, Options, Outcome, Status,
    run,
};
use crate::ops::options::StateOptions;
use crate::ops::read::Keys;
use crate::ops::report::Report;
use crate::ops::tags::without_excluded;
use clap::Args;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

/// Put a part of a backup back into a live etcd: a deleted namespace, say
///
/// Only compares, and shows what differs, unless --execute is given. Then it puts the keys that are
/// missing or have another value, in transactions that write nothing that was changed since it was
/// compared: such keys are named, and all others are written. Live keys that the backup does not have
/// are left alone unless --delete-extra is given.
///
/// In Kubernetes, API servers and controllers see the writes as any other change. Values are copied as
/// they are, protobuf and encrypted ones too: the API servers must be able to read them. Owners are not
/// looked at: what belongs to an object that is no more is collected as garbage again.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  What would change?
      deltafold apply --store s3://backups/etcd-main --prefix /registry/configmaps/payments/ \\
          --endpoints https://10.0.0.1:2379 --cacert ca.crt --cert client.crt --key client.key
  As it was at noon, and now in earnest:
      deltafold apply --store s3://backups/etcd-main --time 2026-11-20T12:00:00Z \\
          --prefix /registry/configmaps/payments/ --endpoints https://10.0.0.1:2379 \\
          --cacert ca.crt --cert client.crt --key client.key --execute
  Exactly what the backup has, nothing more, from a plain snapshot file:
      deltafold apply --snapshot backup.db --prefix /app/ --endpoints http://127.0.0.1:2379 \\
          --delete-extra --execute

In the list + is a key that is missing, ~ one with another value, - one to delete, ? one that is left
alone. The exit code is 0, or tells the kind of failure: docs/exit-codes.md. 75 means that some keys were
changed meanwhile and not written: run it again to compare anew.")]
pub(super) struct ApplyArgs {
    /// The keys that begin so; an empty one means all
    #[arg(long, value_name = "P")]
    prefix: OsString,
    /// Write; without it only what differs is shown
    #[arg(long, value_parser = yes_or_no)]
    execute: bool,
    /// Also delete the live keys with the prefix that the backup does not have
    #[arg(long, value_parser = yes_or_no)]
    delete_extra: bool,
    /// The most keys in a transaction: etcd's own flag of this name
    #[arg(long, value_name = "N", default_value_t = MAX_TXN_OPS as u32, value_parser = clap::value_parser!(u32).range(1..))]
    max_txn_ops: u32,
    /// The most bytes in a request: etcd's own flag of this name
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
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        // A shell variable that is not set must not delete what is in an etcd.
        if self.delete_extra && self.prefix.is_empty() {
            return Err(Reason::Usage.error("--delete-extra with an empty --prefix would delete whatever the backup does not have: name a prefix, or restore the whole backup"));
        }
        // First what fails fast.
        let client = self.live.connect(cancel)?;
        let backup = self.backup.backup(cancel)?;
        let keys = KeyRange::Prefix(self.prefix.as_bytes().to_vec());
        let (source, mut wanted) = without_excluded(|| {
            let (ctx, source) = backup.open(&self.state.request())?;
            let wanted = Keys::read(ctx, &source, keys.clone())?;
            Ok((source, wanted))
        })?;
        let options = Options {
            keys,
            revision: source.target,
            execute: self.execute,
            delete_extra: self.delete_extra,
            max_txn_ops: self.max_txn_ops as usize,
            max_request_bytes: self.max_request_bytes as usize,
        };
        let mut report = run(
            &client,
            cancel,
            &options,
            |each| {
                while wanted.advance()? {
                    let kv = wanted.current()?;
                    each(BackupKey {
                        key: kv.key,
                        value: kv.value,
                        lease: kv.lease,
                    })?;
                }
                Ok(())
            },
            &mut |d| match output {
                Output::Json => Ok(()),
                Output::Text => print(&line(d)),
            },
        );
        let of_backup = source.warnings.iter().cloned();
        report.warnings.splice(0..0, of_backup);
        print_report(output, report, in_words)
    }
}

fn show(key: &KeyName) -> String {
    match (&key.key, &key.key_base64) {
        (Some(text), _) => super::text::key(text.as_bytes()).into_owned(),
        (None, base64) => format!("base64:{}", base64.as_deref().unwrap_or_default()),
    }
}

/// A difference, as a line.
fn line(d: &Difference) -> String {
    let key = show(&d.key);
    match (d.change, d.live_bytes, d.backup_bytes) {
        (DifferenceKind::Create, _, bytes) => format!("+ {key} ({} bytes)\n", bytes.unwrap_or(0)),
        (DifferenceKind::Update, live, backup) => format!(
            "~ {key} ({} bytes, now {})\n",
            backup.unwrap_or(0),
            live.unwrap_or(0)
        ),
        (DifferenceKind::Delete, ..) => format!("- {key}\n"),
        (DifferenceKind::Leave, ..) => format!("? {key}\n"),
    }
}

fn in_words(o: &Report<Outcome>) -> String {
    let mut text = Text::new();
    for skipped in &o.skipped {
        text.line(format_args!(
            "! {}: {}",
            show(&skipped.key),
            skipped.message
        ));
    }
    let differ = o.to_create + o.to_update + o.to_delete;
    let (put, deleted) = (o.put, o.deleted);
    text.line(match (o.status, o.dry_run) {
        (Status::NothingToDo, _) => {
            "nothing to do: all keys of the backup are as they were".to_owned()
        }
        (Status::Succeeded, true) => format!(
            "would put {} keys and delete {}; --execute does it",
            o.to_create + o.to_update,
            o.to_delete
        ),
        (Status::Succeeded, false) => format!("put {put} keys, deleted {deleted}"),
        (Status::Failed, _) => {
            format!("put {put} keys and deleted {deleted} of {differ} that differ so far")
        }
    });
    let (at, live) = (o.revision, o.live_revision);
    let compared = format!("revision {at} of the backup with revision {live} of the live etcd");
    text.field("compared", compared);
    let (missing, other, same) = (o.to_create, o.to_update, o.unchanged);
    let differ = format!("{missing} missing, {other} with another value; {same} the same");
    text.field("differ", differ);
    if o.left_alone > 0 {
        let left = "keys that the backup does not have; --delete-extra deletes such";
        text.field("left", format_args!("{} {left}", o.left_alone));
    }
    if let (Some(first), Some(last)) = (o.first_revision, o.last_revision) {
        let n = o.transactions;
        let written = format!("in {n} transactions, revisions {first} to {last}");
        text.field("written", written);
    }
    let (changed, large) = (o.conflicts, o.too_large);
    if changed + large > 0 {
        let skipped =
            format!("{changed} keys that were changed meanwhile, {large} that are too large");
        text.field("skipped", skipped);
    }
    text.each("warning", &o.warnings);
    text.end()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_steers_no_terminal() {
        let shown = |key: &[u8]| show(&KeyName::from(key));
        assert_eq!(shown("/a/ü".as_bytes()), "/a/ü");
        assert_eq!(shown(b"/a\x1b[2J"), "/a\\u{1b}[2J");
        // No control character, but what follows would be written backward.
        assert_eq!(shown("/a\u{202e}b".as_bytes()), "/a\\u{202e}b");
        assert_eq!(shown(b"\xff"), "base64:/w==");
    }
}
