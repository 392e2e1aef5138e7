//! `deltafold apply`: its arguments, and its result as text.
//!
//! The operation itself is `ops::apply`.

use super::endpoints::EndpointArgs;
use super::text::Text;
use super::{BackupArgs, Ended, Output, print, print_report};
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::error::{Reason, Result};
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

/// Write part of a backup, such as a deleted namespace, back into a live etcd
///
/// Without --execute, apply only compares the keys and shows the differences. With --execute, it puts the
/// keys that are missing in etcd or have another value there. A key that changed since the comparison is
/// skipped and reported; all other keys are written. Live keys that the backup does not have are deleted
/// only with --delete-extra.
///
/// In Kubernetes, API servers and controllers see the writes like any other change. Values are copied
/// byte for byte, including protobuf and encrypted values, so the API servers must be able to read them.
/// Owner references are not checked: Kubernetes deletes a restored object again if its owner is gone.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Show what would change:
      deltafold apply --store s3://backups/etcd-main --prefix /registry/configmaps/payments/ \\
          --endpoints https://10.0.0.1:2379 --cacert ca.crt --cert client.crt --key client.key
  Write the keys back as they were at noon:
      deltafold apply --store s3://backups/etcd-main --time 2026-11-20T12:00:00Z \\
          --prefix /registry/configmaps/payments/ --endpoints https://10.0.0.1:2379 \\
          --cacert ca.crt --cert client.crt --key client.key --execute
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
    /// Apply the keys with this prefix; an empty prefix means all keys
    #[arg(long, value_name = "P")]
    prefix: OsString,
    /// Write to etcd instead of only showing the differences
    #[arg(long, value_parser = yes_or_no)]
    execute: bool,
    /// Delete live keys with the prefix that the backup does not have
    #[arg(long, value_parser = yes_or_no)]
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
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        // An unset shell variable must not delete all keys of an etcd.
        if self.delete_extra && self.prefix.is_empty() {
            return Err(Reason::Usage.error("--delete-extra with an empty --prefix would delete every key that the backup does not have: give a prefix, or restore the whole backup"));
        }
        // Connect first: it fails faster than reading the backup.
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
            |each| visit_keys(&mut wanted, each),
            &mut |difference| match output {
                Output::Json => Ok(()),
                Output::Text => print(&line(difference)),
            },
        );
        let backup_warnings = source.warnings.iter().cloned();
        report.warnings.splice(0..0, backup_warnings);
        print_report(output, report, to_text)
    }
}

/// Passes each key of the backup to `each`.
fn visit_keys(keys: &mut Keys, each: &mut dyn FnMut(BackupKey<'_>) -> Result<()>) -> Result<()> {
    while keys.advance()? {
        let kv = keys.current()?;
        each(BackupKey {
            key: kv.key,
            value: kv.value,
            lease: kv.lease,
        })?;
    }
    Ok(())
}

/// A key on one line; base64 if it is not UTF-8.
fn show_key(key: &KeyName) -> String {
    match (&key.key, &key.key_base64) {
        (Some(text), _) => super::text::key(text.as_bytes()).into_owned(),
        (None, base64) => format!("base64:{}", base64.as_deref().unwrap_or_default()),
    }
}

/// The line of a difference in the list.
fn line(d: &Difference) -> String {
    let key = show_key(&d.key);
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

fn to_text(o: &Report<Outcome>) -> String {
    let mut text = Text::new();
    for skipped in &o.skipped {
        text.line(format_args!(
            "! {}: {}",
            show_key(&skipped.key),
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
            format!("put {put} keys and deleted {deleted} of {differ} that differ, then failed")
        }
    });
    text.field(
        "compared",
        format_args!(
            "revision {} of the backup with revision {} of the live etcd",
            o.revision, o.live_revision
        ),
    );
    text.field(
        "keys",
        format_args!(
            "{} missing, {} with another value, {} equal",
            o.to_create, o.to_update, o.unchanged
        ),
    );
    if o.left_alone > 0 {
        let kept = "keys that the backup does not have; --delete-extra would delete them";
        text.field("kept", format_args!("{} {kept}", o.left_alone));
    }
    if let (Some(first), Some(last)) = (o.first_revision, o.last_revision) {
        let n = o.transactions;
        let written = format!("in {n} transactions, revisions {first} to {last}");
        text.field("written", written);
    }
    let (conflicts, too_large) = (o.conflicts, o.too_large);
    if conflicts + too_large > 0 {
        let skipped = format!(
            "{conflicts} keys that changed in the meantime, {too_large} that are too large"
        );
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
        let shown = |key: &[u8]| show_key(&KeyName::from(key));
        assert_eq!(shown("/a/ü".as_bytes()), "/a/ü");
        assert_eq!(shown(b"/a\x1b[2J"), "/a\\u{1b}[2J");
        // Not a control character, but a terminal would write the rest from right to left.
        assert_eq!(shown("/a\u{202e}b".as_bytes()), "/a\\u{202e}b");
        assert_eq!(shown(b"\xff"), "base64:/w==");
    }
}
