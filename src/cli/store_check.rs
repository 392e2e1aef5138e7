//! `deltafold store check`: its arguments, and its result as a table.
//!
//! The operation itself is `ops::store_check`.

use super::terminal::Style;
use super::text::Text;
use super::{Ended, Output, StoreArgs, print_report};
use crate::base::Cancel;
use crate::ops::report::Report;
use crate::ops::store_check::{Check, Outcome, Status, run};
use crate::store::probe::{Ability, AbilityState};
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

/// Test whether a store has all features that backups need
///
/// Each feature is tested by using it: several writers create the same object at the same time, for example,
/// and the object is read back. The test writes small objects (about 6 MiB in total) to deltafold-staging/
/// below the prefix, and deletes them at the end, even if it fails or is interrupted. It neither reads nor
/// changes snapshots, so flags for encryption and limits have no effect.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Check whether a bucket can hold backups safely:
      deltafold store check --store s3://backups/etcd-main
  List the problems for a script:
      deltafold store check --store s3://backups/etcd-main --output json |
          jq '.checks[] | select(.is_problem)'

Exit codes: 0 if deltafold can work safely with the store, 69 if the store does not respond, 77 if it rejects \
the credentials, 78 if a required feature is missing or works wrongly (the result says what \
to do). docs/exit-codes.md lists all others.")]
struct CheckArgs {
    #[command(flatten)]
    store: StoreArgs,
}

impl StoreCommand {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let StoreSubcommand::Check(args) = &self.command;
        let report = run(&args.store.context(cancel)?)?;
        print_report(output, report, to_text)
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
        Ability::TagCount => "tag count",
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
        (_, AbilityState::Lies) => "BROKEN",
        (_, AbilityState::Absent) => "missing",
        (_, AbilityState::NotTried) => "not tested",
    }
}

fn to_text(o: &Report<Outcome>) -> String {
    let mut text = Text::new();
    for check in &o.checks {
        let mark = if check.is_problem { "!" } else { " " };
        let (label, state) = (label(check.ability), state(check));
        text.hanging(
            34,
            format_args!("{mark} {label:<20} {state:<10} {}", check.detail),
        );
        text.hanging(36, format_args!("  {:<31} → {}", "", check.meaning));
    }
    for left in &o.left_behind {
        text.line(format_args!("  not deleted: {left}"));
    }
    let (style, can) = match o.status {
        Status::Succeeded => (Style::Good, "can"),
        Status::Failed => (Style::Bad, "cannot"),
    };
    let verdict = format!("deltafold {can} work safely");
    text.verdict(style, verdict, format_args!(" with {}", o.store));
    text.end()
}
