//! `deltafold store`: its arguments, and what a store does as a table.

use super::text::Text;
use super::{Ended, Output, StoreArgs, print_report};
use crate::base::Cancel;
use crate::ops::report::Report;
use crate::ops::store_check::{Check, Outcome, Status, run};
use crate::store::probe::{Ability, AbilityState};
use clap::{Args, Subcommand};

/// Look at a store itself, whatever it holds
#[derive(Debug, Args)]
pub(super) struct StoreCommand {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Check(CheckArgs),
}

/// Find out what a store really does: write, race, read back, and remove it all again
///
/// Documents and answers are not believed: several writers race for one name, and what they wrote is read
/// back. It writes a few small objects in deltafold-staging/ below the prefix, around 6 MiB in all, and removes
/// them, also when it fails or is ended. Snapshots are neither read nor changed.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Can this bucket be trusted with backups?
      deltafold store check --store s3://backups/etcd-main
  What is wrong with it, for a script:
      deltafold store check --store s3://backups/etcd-main --output json | jq '.checks[] | select(.is_problem)'

The exit code is 0 where deltafold can work safely there. 78 means that something which it needs is
missing, or that the store says it does something and does not; what to do stands beside it. 69 means that
the store does not answer, 77 that it does not accept the credentials. docs/exit-codes.md has all.")]
struct CheckArgs {
    #[command(flatten)]
    store: StoreArgs,
}

impl StoreCommand {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let What::Check(args) = &self.what;
        let report = run(&args.store.context(cancel)?)?;
        print_report(output, report, in_words)
    }
}

fn label(ability: Ability) -> &'static str {
    match ability {
        Ability::Put => "write",
        Ability::ReadBack => "read back",
        Ability::List => "list",
        Ability::Delete => "delete",
        Ability::Multipart => "upload in parts",
        Ability::ConditionalCreate => "create if free",
        Ability::ConditionalUpdate => "update if unchanged",
        Ability::ConditionalCopy => "copy if free",
        Ability::Checksum => "checksum",
        Ability::LargestCopy => "largest copy",
        Ability::ExcludeTag => "tags",
        Ability::TagCount => "told of tags",
        Ability::Versioning => "versions",
        Ability::ObjectLock => "object lock",
        Ability::Clock => "clock",
    }
}

fn state(check: &Check) -> &'static str {
    match (check.ability, check.state) {
        (Ability::Clock, AbilityState::Lies) => "is off",
        (_, AbilityState::Works) => "works",
        (_, AbilityState::Refused) => "refused",
        (_, AbilityState::Lies) => "LIES",
        (_, AbilityState::Absent) => "not there",
        (_, AbilityState::NotTried) => "not tried",
    }
}

fn in_words(o: &Report<Outcome>) -> String {
    let mut text = Text::new();
    for check in &o.checks {
        let mark = if check.is_problem { "!" } else { " " };
        let (label, state) = (label(check.ability), state(check));
        text.line(format_args!(
            "{mark} {label:<20} {state:<10} {}",
            check.detail
        ));
        text.line(format_args!("  {:<31} → {}", "", check.meaning));
    }
    for left in &o.left_behind {
        text.line(format_args!("  left behind: {left}"));
    }
    text.line(match o.status {
        Status::Succeeded => format!("deltafold can work safely in {}", o.store),
        Status::Failed => format!("deltafold cannot work safely in {}", o.store),
    });
    text.end()
}
