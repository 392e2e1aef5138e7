//! `deltafold lock`: its arguments, and its outcome in words.

use super::text::Text;
use super::{Ended, Output, StoreArgs, print_report};
use crate::base::flag_values::{self, yes_or_no};
use crate::base::{Cancel, duration};
use crate::error::{Error, Reason};
use crate::ops::object_lock::{Decision, Options, Outcome, Status, run};
use crate::ops::report::Report;
use crate::store::Mode;
use chrono::{DateTime, TimeDelta, Utc};
use clap::Args;
use std::time::Duration;

/// Lock a chain against deletion, by S3's object lock
///
/// The full, all deltas after it and the notes on their timeline get a retention, or a longer one: it is only
/// ever extended. Each is read back. The bucket must have an object lock enabled; a store that only says so
/// is found out. What is saved later is not locked: run it again after each snapshot, or from a CronJob.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  The newest chain for 30 days, so that only a special right deletes it:
      deltafold lock --store s3://backups/etcd-main --for 30d
  So that nobody does, not even the account's owner; this cannot be taken back:
      deltafold lock --store s3://backups/etcd-main --for 30d --mode compliance
  What would be locked?
      deltafold lock --store s3://backups/etcd-main --until 2027-01-01T00:00:00Z --dry-run
  The chain of an older full:
      deltafold lock --store s3://backups/etcd-main --for 90d --chain Full-00000000-00012345-1763700000.gz

A lock keeps versions. Somebody may still hide an object behind a deletion mark, or tag it as excluded:
docs/stores.md tells how to get it back.

The exit code is 0, or tells the kind of failure: docs/exit-codes.md. 75 means that some objects are not
locked, 78 that the bucket has no lock enabled.")]
pub(super) struct LockArgs {
    #[command(flatten)]
    store: StoreArgs,
    /// Until when
    #[arg(long, value_name = "RFC3339", value_parser = flag_values::time, required_unless_present = "for", conflicts_with = "for")]
    until: Option<DateTime<Utc>>,
    /// For how long from now on (12h, 30d)
    #[arg(long, value_name = "DURATION", value_parser = duration::parse_above_zero)]
    r#for: Option<Duration>,
    /// Who may still delete it
    #[arg(long, value_name = "MODE", default_value = "governance")]
    mode: Mode,
    /// The full whose chain is locked, by its name [default: the newest chain of the newest timeline]
    #[arg(long, value_name = "NAME")]
    chain: Option<String>,
    /// Only say what would be done
    #[arg(long, value_parser = yes_or_no)]
    dry_run: bool,
}

impl LockArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let until = match (self.until, self.r#for) {
            (Some(until), _) => until,
            (None, Some(long)) => TimeDelta::from_std(long)
                .ok()
                .and_then(|long| Utc::now().checked_add_signed(long))
                .ok_or_else(|| Reason::Usage.error("--for is too long"))?,
            (None, None) => return Err(Error::internal("neither --until nor --for")),
        };
        let options = Options {
            until,
            mode: self.mode,
            chain: self.chain.clone(),
            dry_run: self.dry_run,
        };
        let report = run(&self.store.context(cancel)?, &options)?;
        print_report(output, report, in_words)
    }
}

fn in_words(o: &Report<Outcome>) -> String {
    let mut text = Text::new();
    let chain = &o.chain;
    text.line(match o.status {
        Status::NothingToDo => format!("nothing to do: the chain of {chain} is locked"),
        Status::Succeeded if o.dry_run => format!("would lock the chain of {chain}"),
        Status::Succeeded => format!("locked the chain of {chain}"),
        Status::Failed => format!("the chain of {chain} is not locked"),
    });
    let time = |t: DateTime<Utc>| t.format("%Y-%m-%d %H:%M:%SZ").to_string();
    text.field(
        "until",
        format_args!("{}, in mode {}", time(o.until), o.mode),
    );
    let what = if o.dry_run { "to lock" } else { "locked" };
    let (locked, kept, failed) = (o.locked, o.kept, o.failed);
    let objects = format!("{locked} {what}, {kept} locked already, {failed} failed");
    text.field("objects", objects);
    // What failed stands by itself: it must not vanish among the others.
    let (mut fine, mut failed) = (Vec::new(), Vec::new());
    for object in &o.objects {
        let locked = if o.dry_run {
            "would be locked"
        } else {
            "locked"
        };
        let what = match (object.decision, &object.after) {
            (None, _) => format!("FAILED: {}", object.reason),
            (Some(Decision::Keep), _) => object.reason.clone(),
            (Some(Decision::Lock), Some(l)) => {
                format!("{locked}, {} until {}", l.mode, time(l.until))
            }
            (Some(Decision::Lock), None) => "locked".to_owned(),
        };
        let of_its_kind = match object.decision {
            None => &mut failed,
            Some(_) => &mut fine,
        };
        of_its_kind.push(format!("{}  {what}", object.path));
    }
    text.items("  ", &fine);
    text.items("  ", &failed);
    text.each("warning", &o.warnings);
    text.end()
}
