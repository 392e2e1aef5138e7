//! `deltafold apply`: its arguments, and its result as text.
//!
//! The operation itself is `ops::apply`.

use super::endpoints::EndpointArgs;
use super::objects::{LabelArgs, ObjectArgs, SelectArgs};
use super::render::{Blocks, Render};
use super::{BackupArgs, Ended, Output, print, print_report};
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::base::plural::count;
use crate::error::{Error, Reason, Result};
use crate::etcd::diff::BackupKey;
use crate::mvcc::KeyRange;
use crate::objects::EncryptionKeys;
use crate::ops::apply::{
    AppliedState, Difference, DifferenceKind, KeyName, MAX_REQUEST_BYTES, MAX_TXN_OPS, Options, run,
};
use crate::ops::options::StateOptions;
use crate::ops::read::Keys;
use crate::ops::read::deleted::deletion_advice;
use crate::ops::report::{Report, Status};
use crate::prefix::open::{BackupLocation, State};
use crate::prefix::set_aside::{Purpose, decide_again};
use clap::Args;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

/// Write part of a backup, such as a deleted namespace, back into a live etcd
///
/// The keys are those of the objects that are named, or those of --prefix or --exact-key. Without --execute, apply only
/// compares the keys and shows the differences. With --execute, it puts the keys that are missing in etcd or have
/// another value there. A key that changed since the comparison is
/// skipped and reported; all other keys are written. Live keys that the backup does not have are deleted
/// only with --delete-extra.
///
/// In Kubernetes, API servers and controllers see the writes like any other change. Values are copied
/// byte for byte, including protobuf and encrypted values, so the API servers must be able to read them.
/// Owner references are not checked: Kubernetes deletes a restored object again if its owner is gone.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Show what would change of a ConfigMap:
      deltafold apply configmap/payments/limits --store s3://backups/etcd-main \\
          --endpoints https://10.0.0.1:2379 --cacert ca.crt --cert client.crt --key client.key
  Write all objects of a namespace back as they were at noon:
      deltafold apply -n payments --store s3://backups/etcd-main --time 2026-11-20T12:00:00Z \\
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
    /// This key alone; repeatable
    ///
    /// --key is another flag: the private key of the TLS client certificate. In the environment variable: one
    /// key per line.
    #[arg(long, value_name = "KEY", value_delimiter = '\n', help_heading = "Keys", conflicts_with_all = ["prefix", "words", "namespace", "selector"])]
    exact_key: Vec<OsString>,
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
    select: SelectArgs,
    #[command(flatten)]
    labels: LabelArgs,
    #[command(flatten)]
    objects: ObjectArgs,
    #[command(flatten)]
    backup: BackupArgs,
}

impl ApplyArgs {
    /// Checks that it is clear what is written and deleted: an unset shell variable must not delete all keys of an etcd.
    fn check(&self) -> Result<()> {
        let usage = |message| Err(Reason::Usage.error(message));
        if !self.exact_key.is_empty() && self.exact_keys().is_empty() {
            return usage(
                "--exact-key is empty: give a key, such as /registry/configmaps/default/settings",
            );
        }
        let is_labelled = self.labels.selector.is_some();
        if !self.select.is_given() && self.exact_key.is_empty() && !is_labelled {
            return usage(
                "say what to apply: KIND/NAMESPACE/NAME, -n NAMESPACE for all in it, --prefix or --exact-key",
            );
        }
        if self.delete_extra && self.select.prefix.iter().any(|p| p.is_empty()) {
            return usage(
                "--delete-extra with an empty --prefix would delete every key that the backup does not have: give a prefix, or restore the whole backup",
            );
        }
        if self.delete_extra && is_labelled {
            return usage(
                "--delete-extra and --selector do not go together: the backup does not know the labels of other objects",
            );
        }
        Ok(())
    }

    /// The keys of --exact-key. In the environment variable, a line may be empty.
    fn exact_keys(&self) -> BTreeSet<Vec<u8>> {
        let exact = self.exact_key.iter().map(|key| key.as_bytes().to_vec());
        exact.filter(|key| !key.is_empty()).collect()
    }

    /// The keys to apply, and the parts that were asked for.
    fn keys_in(
        &self,
        backup: &BackupLocation,
        source: &State,
        keys: &EncryptionKeys,
    ) -> Result<(KeyRange, Vec<KeyRange>)> {
        let exact = self.exact_keys();
        if !exact.is_empty() {
            let parts = exact.iter().cloned().map(KeyRange::Key).collect();
            return Ok((KeyRange::Keys(exact), parts));
        }
        let (range, parts) = self.select.keys_in(backup, source, false)?;
        if self.labels.selector.is_none() {
            return Ok((range, parts));
        }
        // The other objects of the range are neither compared nor read from etcd.
        let mut all = Keys::read(backup.context(), source, range)?;
        let mut matching = BTreeSet::new();
        while all.advance()? {
            let kv = all.current()?;
            if self.labels.match_one([&kv], keys) {
                matching.insert(kv.key.to_vec());
            }
        }
        self.labels.end(!self.select.words.is_empty())?;
        if matching.is_empty() {
            return Err(Reason::KeyNotFound.error(format!(
                "no object has these labels at revision {}",
                source.revision
            )));
        }
        Ok((KeyRange::Keys(matching), Vec::new()))
    }

    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        self.check()?;
        let object_keys = self.objects.keys()?;
        // Connect first: it fails faster than reading the backup.
        let client = self.live.connect(cancel).map_err(with_exact_key)?;
        let backup = self.backup.backup_at(self.state.request().at, cancel)?;
        let ctx = backup.context();
        let (source, scan, (keys, parts), mut wanted) =
            decide_again([ctx], Purpose::Restore, || {
                let (source, scan) = backup.open_with_scan(&self.state.request())?;
                let keys = self.keys_in(&backup, &source, &object_keys)?;
                let wanted = Keys::read(ctx, &source, keys.0.clone())?;
                Ok((source, scan, keys, wanted))
            })?;
        let options = Options {
            keys,
            parts,
            revision: source.revision,
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
            |absent| deletion_advice(&backup, scan.as_ref(), &source, &absent, &object_keys),
        );
        let backup_warnings = source.warnings.iter().cloned();
        report.warnings.splice(0..0, backup_warnings);
        report.as_of = self.state.point.time;
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
            let kept = "that the backup does not have; --delete-extra would delete";
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
