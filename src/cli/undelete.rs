//! `deltafold undelete`: its arguments, and its result as text.
//!
//! The operation itself is `ops::gc::undelete`.

use super::text::Text;
use super::{Ended, Output, StoreArgs, print_report};
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::ops::gc::undelete::{Options, Outcome, run};
use crate::ops::report::Report;
use clap::Args;

/// Bring back snapshots that `deltafold gc` removed but has not yet deleted
///
/// gc keeps removed snapshots for --purge-after. A full brings back the deltas after it, too. The next gc
/// removes the snapshots again if its policy does not keep them: pin them with `deltafold pin`.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Show what was removed, and until when it can be brought back:
      deltafold gc --store s3://backups/etcd-main --policy exponential --purge-after 7d --output json |
          jq -r '.objects[] | select(.reason == \"Removed\") | [.path, .explanation] | @tsv'
  Bring a chain back and keep it:
      deltafold undelete --store s3://backups/etcd-main Full-00000000-00012345-1795224681.gz
      deltafold pin --store s3://backups/etcd-main Full-00000000-00012345-1795224681.gz
  Bring back everything that gc removed:
      deltafold undelete --store s3://backups/etcd-main --all

A snapshot given by NAME is brought back even if it was not gc that excluded it. --all skips snapshots that were \
excluded by others.")]
pub(super) struct UndeleteArgs {
    /// Names or paths of the snapshots
    #[arg(value_name = "NAME", required_unless_present = "all")]
    names: Vec<String>,
    /// Bring back all snapshots that gc removed
    #[arg(long, conflicts_with = "names", value_parser = yes_or_no)]
    all: bool,
    #[command(flatten)]
    store: StoreArgs,
}

impl UndeleteArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let ctx = self.store.context(cancel)?;
        let options = Options {
            names: self.names.clone(),
        };
        let report = run(&ctx, &options)?;
        print_report(output, report, to_text)
    }
}

fn to_text(o: &Report<Outcome>) -> String {
    let mut text = Text::new();
    if o.snapshots.is_empty() {
        text.line("nothing to do: none of the snapshots is excluded");
    }
    let (mut succeeded, mut failed) = (Vec::new(), Vec::new());
    for snapshot in &o.snapshots {
        match &snapshot.error {
            None => succeeded.push(snapshot.path.clone()),
            Some(e) => failed.push(format!("{}: {e}", snapshot.path)),
        }
    }
    text.items("brought back ", &succeeded);
    text.items("not brought back ", &failed);
    for warning in &o.warnings {
        text.line(format_args!("warning: {warning}"));
    }
    text.end()
}
