//! `deltafold undelete`: its arguments, and its outcome in words.

use super::text::Text;
use super::{Ended, Output, StoreArgs, print_report};
use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::ops::gc::undelete::{Options, Outcome, Restored, run};
use crate::ops::report::Report;
use clap::Args;

/// Bring back snapshots that `deltafold gc --purge-after` removed
///
/// A full brings the deltas behind it along. The next `deltafold gc` removes them again if its policy does:
/// pin what is to stay.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  What was removed, and until when can it be brought back?
      deltafold gc --store s3://backups/etcd-main --policy exponential --purge-after 7d --output json |
          jq -r '.objects[] | select(.reason == \"Removed\") | [.path, .explanation] | @tsv'
  Bring a chain back, and keep it:
      deltafold undelete --store s3://backups/etcd-main Full-00000000-00012345-1795224681.gz
      deltafold pin --store s3://backups/etcd-main Full-00000000-00012345-1795224681.gz
  Bring back all that gc removed:
      deltafold undelete --store s3://backups/etcd-main --all

A snapshot that is named comes back whoever excluded it; --all leaves alone what others excluded.")]
pub(super) struct UndeleteArgs {
    /// Names or paths of snapshots
    #[arg(value_name = "NAME", required_unless_present = "all")]
    names: Vec<String>,
    /// All that gc removed
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
        print_report(output, report, in_words)
    }
}

fn in_words(o: &Report<Outcome>) -> String {
    let mut text = Text::new();
    if o.snapshots.is_empty() {
        text.line("nothing to do: none of it is excluded");
    }
    let back = o.snapshots.iter().filter(|x| x.error.is_none());
    let back: Vec<&String> = back.map(|x| &x.path).collect();
    text.items("brought back ", &back);
    let failed = |x: &Restored| x.error.as_ref().map(|e| format!("{}: {e}", x.path));
    let failed: Vec<String> = o.snapshots.iter().filter_map(failed).collect();
    text.items("not brought back ", &failed);
    for warning in &o.warnings {
        text.line(format_args!("warning: {warning}"));
    }
    text.end()
}
