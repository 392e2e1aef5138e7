//! `deltafold apply`: its arguments, and its outcome in words.

use super::endpoints::EndpointArgs;
use super::{BackupArgs, Output, print, print_outcome, show};
use crate::base::Cancel;
use crate::base::flag::yes_or_no;
use crate::error::{Error, Reason, Result};
use crate::etcd::diff::Wanted;
use crate::job::apply::{
    Difference, KeyName, MAX_REQUEST_BYTES, MAX_TXN_OPS, Options, Outcome, Status, Verb, run,
};
use crate::job::options::State;
use crate::job::read::Keys;
use crate::job::tags::without_excluded;
use crate::mvcc::KeyRange;
use crate::shown;
use clap::Args;
use std::ffi::OsString;
use std::fmt::Write;
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
    state: State,
    #[command(flatten)]
    backup: BackupArgs,
}

impl ApplyArgs {
    /// Gives the failure whose outcome is printed already, if it is one.
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Result<Option<Error>> {
        // A shell variable that is not set must not delete what is in an etcd.
        if self.delete_extra && self.prefix.is_empty() {
            return Err(Error::new(
                Reason::Usage,
                "--delete-extra with an empty --prefix would delete whatever the backup does not have: name a prefix, or restore the whole backup",
            ));
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
        let (mut outcome, error) = run(
            &client,
            cancel,
            &options,
            |each| {
                while wanted.advance()? {
                    let kv = wanted.current()?;
                    each(Wanted {
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
        outcome
            .warnings
            .splice(0..0, source.warnings.iter().cloned());
        print_outcome(output, &outcome, in_words)?;
        Ok(error)
    }
}

fn show(key: &KeyName) -> String {
    match (&key.key, &key.key_base64) {
        (Some(text), _) => super::show::key(text.as_bytes()).into_owned(),
        (None, base64) => format!("base64:{}", base64.as_deref().unwrap_or_default()),
    }
}

/// A difference, as a line.
fn line(d: &Difference) -> String {
    let key = show(&d.key);
    match (d.change, d.live_bytes, d.backup_bytes) {
        (Verb::Create, _, bytes) => format!("+ {key} ({} bytes)\n", bytes.unwrap_or(0)),
        (Verb::Update, live, backup) => format!(
            "~ {key} ({} bytes, now {})\n",
            backup.unwrap_or(0),
            live.unwrap_or(0)
        ),
        (Verb::Delete, ..) => format!("- {key}\n"),
        (Verb::Leave, ..) => format!("? {key}\n"),
    }
}

fn in_words(o: &Outcome) -> String {
    let mut s = String::new();
    for skipped in &o.skipped {
        // Writing to a String cannot fail.
        let _ = writeln!(
            s,
            "! {}: {}",
            show(&skipped.key),
            shown::line(&skipped.message)
        );
    }
    let differ = o.to_create + o.to_update + o.to_delete;
    let _ = match (o.status, o.dry_run) {
        (Status::NothingToDo, _) => {
            writeln!(s, "nothing to do: all keys of the backup are as they were")
        }
        (Status::Succeeded, true) => writeln!(
            s,
            "would put {} keys and delete {}; --execute does it",
            o.to_create + o.to_update,
            o.to_delete
        ),
        (Status::Succeeded, false) => writeln!(s, "put {} keys, deleted {}", o.put, o.deleted),
        (Status::Failed, _) => writeln!(
            s,
            "put {} keys and deleted {} of {differ} that differ so far",
            o.put, o.deleted
        ),
    };
    let _ = writeln!(
        s,
        "  compared  revision {} of the backup with revision {} of the live etcd",
        o.revision, o.live_revision
    );
    let _ = writeln!(
        s,
        "  differ    {} missing, {} with another value; {} the same",
        o.to_create, o.to_update, o.unchanged
    );
    if o.left_alone > 0 {
        let _ = writeln!(
            s,
            "  left      {} keys that the backup does not have; --delete-extra deletes such",
            o.left_alone
        );
    }
    if let (Some(first), Some(last)) = (o.first_revision, o.last_revision) {
        let _ = writeln!(
            s,
            "  written   in {} transactions, revisions {first} to {last}",
            o.transactions
        );
    }
    if o.conflicts + o.too_large > 0 {
        let _ = writeln!(
            s,
            "  skipped   {} keys that were changed meanwhile, {} that are too large",
            o.conflicts, o.too_large
        );
    }
    show::each(&mut s, "  warning   ", &o.warnings);
    s
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
