//! `deltafold pin`: its arguments, and its result as text.
//!
//! The operation itself is `ops::gc::pin`.

use super::render::Render;
use super::{Ended, Output, StoreArgs, print_report};
use crate::base::Cancel;
use crate::ops::gc::pin::{Options, PinnedChain, run};
use clap::Args;

/// Protect a chain from `deltafold gc`, or remove the protection
///
/// gc keeps the full and the deltas after it, up to the next full of the timeline, whatever its policy.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Keep the state before an upgrade:
      deltafold pin --store s3://backups/etcd-main Full-00000000-00012345-1795224681.gz \\
          --reason 'before the upgrade to 1.36'
  Remove the pin of the full at revision 12345:
      deltafold pin --store s3://backups/etcd-main 12345 --unpin")]
pub(super) struct PinArgs {
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    store: StoreArgs,
}

impl PinArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let report = run(&self.store.context(cancel)?, &self.options)?;
        print_report(output, report)
    }
}

impl Render for PinnedChain {}
