//! `deltafold lock`: its arguments, and its result as text.
//!
//! The operation itself is `ops::object_lock`.

use super::text::Text;
use super::{Ended, Output, StoreArgs, print_report};
use crate::base::flag_values::{self, yes_or_no};
use crate::base::plural::count;
use crate::base::time::utc;
use crate::base::{Cancel, duration};
use crate::error::{Error, Reason, Result};
use crate::ops::object_lock::{Decision, Object, Options, Outcome, Status, run};
use crate::ops::report::Report;
use crate::store::Mode;
use chrono::{DateTime, TimeDelta, Utc};
use clap::Args;
use std::time::Duration;

/// Protect a chain against deletion with S3 object lock
///
/// Locks the full snapshot, all deltas after it and the objects that describe their timeline, and reads each
/// lock back. Existing locks are only extended. Object lock must be enabled for the bucket. Reading each lock
/// back reveals a store that accepts a lock but does not keep it. Later snapshots are not locked: run it again
/// after each snapshot, for example in a CronJob.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Lock the newest chain for 30 days; only users with a special permission can then delete it:
      deltafold lock --store s3://backups/etcd-main --for 30d
  Lock it so that nobody can delete it until the lock ends, not even the owner of the account; this cannot be undone:
      deltafold lock --store s3://backups/etcd-main --for 30d --mode compliance
  Show what would be locked:
      deltafold lock --store s3://backups/etcd-main --until 2027-01-01T00:00:00Z --dry-run
  Lock the chain of an older full:
      deltafold lock --store s3://backups/etcd-main --for 90d \\
          --chain Full-00000000-00012345-1763700000.gz

A lock protects a version of an object. Others can still hide the object behind a delete marker, or tag it as \
excluded: docs/stores.md explains how to undo that.

Exit codes: 0 on success, 75 if some objects are not locked, 78 if object lock is not enabled for the bucket. \
docs/exit-codes.md lists all others.")]
pub(super) struct LockArgs {
    /// Lock until this time: RFC 3339, or local time such as "2027-01-01 14:00" or 2027-01-01
    ///
    /// Local time is that of the variable TZ or of the system, and UTC in a Pod of Kubernetes.
    #[arg(long, value_name = "RFC3339", value_parser = flag_values::absolute_time, required_unless_present = "for", conflicts_with = "for")]
    until: Option<DateTime<Utc>>,
    /// Lock for this time from now on, such as 12h or 30d
    #[arg(long, value_name = "DURATION", value_parser = duration::parse_above_zero)]
    r#for: Option<Duration>,
    /// Lock mode: who can still delete locked objects
    #[arg(long, value_name = "MODE", default_value = "governance")]
    mode: Mode,
    /// Name of the full whose chain to lock [default: the newest full of the newest timeline]
    #[arg(long, value_name = "NAME")]
    chain: Option<String>,
    /// Only show what would be locked
    #[arg(long, value_parser = yes_or_no)]
    dry_run: bool,
    #[command(flatten)]
    store: StoreArgs,
}

impl LockArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let options = Options {
            until: self.end()?,
            mode: self.mode,
            chain: self.chain.clone(),
            dry_run: self.dry_run,
        };
        let report = run(&self.store.context(cancel)?, &options)?;
        print_report(output, report, to_text)
    }

    /// When the lock ends.
    fn end(&self) -> Result<DateTime<Utc>> {
        match (self.until, self.r#for) {
            (Some(until), _) => Ok(until),
            (None, Some(length)) => TimeDelta::from_std(length)
                .ok()
                .and_then(|length| Utc::now().checked_add_signed(length))
                .ok_or_else(|| Reason::Usage.error("--for is too long")),
            (None, None) => Err(Error::internal("neither --until nor --for is given")),
        }
    }
}

fn to_text(o: &Report<Outcome>) -> String {
    let mut text = Text::new();
    text.line(headline(o));
    text.field(
        "until",
        format_args!("{}, in mode {}", utc(o.until), o.mode),
    );
    let locked = if o.dry_run { "to lock" } else { "locked" };
    text.field(
        "objects",
        format_args!(
            "{} {locked}, {} already locked, {} failed",
            o.locked, o.kept, o.failed
        ),
    );
    // Two lists, which are shortened separately, so that failures stay visible.
    let (mut succeeded, mut failed) = (Vec::new(), Vec::new());
    for object in &o.objects {
        let line = format!("{}  {}", object.path, state(object, o.dry_run));
        match object.decision {
            Some(_) => succeeded.push(line),
            None => failed.push(line),
        }
    }
    text.items("  ", &succeeded);
    text.items("  ", &failed);
    text.each("warning", &o.warnings);
    text.end()
}

/// Whether the chain is locked, in one line.
fn headline(o: &Outcome) -> String {
    let chain = &o.chain;
    let (succeeded, all) = (o.locked + o.kept, count(o.objects.len(), "object"));
    match o.status {
        Status::NothingToDo => format!("nothing to do: the chain of {chain} is already locked"),
        Status::Succeeded if o.dry_run => format!("would lock the chain of {chain}"),
        Status::Succeeded => format!("locked the chain of {chain}"),
        Status::Failed if succeeded == 0 => format!("the chain of {chain} is not locked"),
        Status::Failed if o.dry_run => {
            format!("would lock the chain of {chain} only in part: {succeeded} of {all}")
        }
        Status::Failed => {
            format!("the chain of {chain} is only partly locked: {succeeded} of {all}")
        }
    }
}

/// One phrase for the list: what was done with the object, or what a run without --dry-run would do.
fn state(object: &Object, dry_run: bool) -> String {
    let locked = if dry_run { "would be locked" } else { "locked" };
    match (object.decision, &object.after) {
        (None, _) => format!("FAILED: {}", object.reason),
        (Some(Decision::Keep), _) => object.reason.clone(),
        (Some(Decision::Lock), Some(lock)) => {
            format!("{locked}, {} until {}", lock.mode, utc(lock.until))
        }
        (Some(Decision::Lock), None) => locked.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(decision: Option<Decision>) -> Object {
        Object {
            path: "v2/Full".to_owned(),
            version: None,
            before: None,
            after: None,
            decision,
            reason: "no permission".to_owned(),
            done: false,
        }
    }

    fn outcome(decisions: &[Option<Decision>], dry_run: bool) -> Outcome {
        let count = |wanted| decisions.iter().filter(|d| **d == wanted).count();
        Outcome {
            status: Status::Failed,
            error: Default::default(),
            chain: "Full".to_owned(),
            timeline: "main".to_owned(),
            mode: Mode::Governance,
            until: DateTime::UNIX_EPOCH,
            objects: decisions.iter().map(|d| object(*d)).collect(),
            locked: count(Some(Decision::Lock)),
            kept: count(Some(Decision::Keep)),
            failed: count(None),
            dry_run,
        }
    }

    /// A chain with one failed object is partly locked, and a dry run locks nothing.
    #[test]
    fn the_headline_says_how_much_is_locked() {
        let (lock, keep) = (Some(Decision::Lock), Some(Decision::Keep));
        let text = |decisions: &[_], dry_run| headline(&outcome(decisions, dry_run));
        assert_eq!(
            text(&[None, None], false),
            "the chain of Full is not locked"
        );
        assert_eq!(
            text(&[lock, keep, None], false),
            "the chain of Full is only partly locked: 2 of 3 objects"
        );
        assert_eq!(
            text(&[lock, keep, None], true),
            "would lock the chain of Full only in part: 2 of 3 objects"
        );
    }

    #[test]
    fn a_dry_run_does_not_say_that_an_object_is_locked() {
        let lock = object(Some(Decision::Lock));
        assert_eq!(state(&lock, true), "would be locked");
        assert_eq!(state(&lock, false), "locked");
        assert_eq!(state(&object(None), true), "FAILED: no permission");
    }
}
