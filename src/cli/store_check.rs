//! `deltafold store check`: its arguments, and its result as a table.
//!
//! The operation itself is `ops::store_check`.

use super::render::Render;
use super::{Ended, Output, StoreArgs, print_report};
use crate::base::Cancel;
use crate::ops::store_check::{CheckedStore, run};
use clap::{Args, Subcommand};

/// Work with a store itself, independent of its backups
#[derive(Debug, Args)]
pub(super) struct StoreCommand {
    #[command(subcommand)]
    command: StoreSubcommand,
}

#[derive(Debug, Subcommand)]
enum StoreSubcommand {
    Check(CheckArgs),
}

/// Try each call that the commands make: list, write, write on condition and in parts, lock, read, delete
///
/// Shows which step fails, what it is needed for, and which settings mend it. The objects are written to
/// deltafold-staging/ and deltafold-locks/ below the prefix, and deleted at the end; a local folder is made if its parent
/// exists. Snapshots are neither read nor changed, so flags for encryption and limits have no effect.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Check whether a bucket can hold backups safely:
      deltafold store check --store s3://backups/etcd-main
  List the problems for a script:
      deltafold store check --store s3://backups/etcd-main --output json |
          jq '.checks[] | select(.state != \"Works\")'

Exit codes: 0 if deltafold can work with the store, 69 if the store does not respond, 77 if it rejects the \
credentials or refuses a step, 78 if it does something else than it was asked. docs/exit-codes.md lists all others.")]
struct CheckArgs {
    #[command(flatten)]
    store: StoreArgs,
}

impl StoreCommand {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let StoreSubcommand::Check(args) = &self.command;
        let report = run(|settings| args.store.store_with(settings, cancel))?;
        print_report(output, report)
    }
}

impl Render for CheckedStore {}
