//! `deltafold pin`: its arguments, and its outcome in words.

use super::text::Text;
use super::{Ended, Output, StoreArgs, print_report};
use crate::base::Cancel;
use crate::ops::gc::Status;
use crate::ops::gc::pin::{Options, Outcome, run};
use crate::ops::report::Report;
use clap::Args;

/// Keep a chain whatever the policy of `deltafold gc`, or let it go again
///
/// Kept are the full and the deltas after it, up to the next full of its timeline.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Keep the state from before an upgrade:
      deltafold pin --store s3://backups/etcd-main Full-00000000-00012345-1795224681.gz \\
          --reason 'before the upgrade to 1.36'
  Let it go:
      deltafold pin --store s3://backups/etcd-main Full-00000000-00012345-1795224681.gz --unpin")]
pub(super) struct PinArgs {
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    store: StoreArgs,
}

impl PinArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let report = run(&self.store.context(cancel)?, &self.options)?;
        print_report(output, report, in_words)
    }
}

fn in_words(o: &Report<Outcome>) -> String {
    let mut text = Text::new();
    let what = match (o.pinned, o.status) {
        (true, Status::NothingToDo) => "is pinned already; it keeps",
        (true, _) => "is pinned; this keeps",
        (false, Status::NothingToDo) => "was not pinned",
        (false, _) => "is no longer pinned; the policy decides on",
    };
    text.line(format_args!("{} {what}", o.full));
    if o.pinned || o.status != Status::NothingToDo {
        text.items("  ", &o.chain);
    }
    for warning in &o.warnings {
        text.line(format_args!("warning: {warning}"));
    }
    text.end()
}
