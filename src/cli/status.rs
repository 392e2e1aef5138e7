//! `deltafold status`: its arguments, and its verdict as text.
//!
//! The operation itself is `ops::status`.

use super::render::{Blocks, Render};
use super::terminal::Style;
use super::text;
use super::{Ended, Output, StoreArgs, print_report, size};
use crate::base::plural::count;
use crate::base::{Cancel, duration};
use crate::error::{Reason, Result};
use crate::ops::list::RecordedIdentity;
use crate::ops::live_follower::LiveFollower;
use crate::ops::report::Report;
use crate::ops::status::{BackupState, Options, Verdict, Verification, of_nothing, run};
use crate::ops::verify::record::{RecordLevel, RecordResult};
use clap::Args;

/// Tell whether a backup is healthy, and what to do next
///
/// The verdict comes first: healthy, stale, set back, damaged or empty. Then come the age of the newest snapshot, what
/// can be restored, the last verifications, and the size.
///
/// status reads the names of the snapshots and the records of `deltafold verify`, and no snapshot. Whoever can
/// write to the store can forge both: only `deltafold verify` reads the backup. Plain snapshot
/// files are checked with `deltafold verify --snapshot`.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Show the state of a backup:
      deltafold status --store s3://backups/etcd-main
  Alert if no snapshot was taken for 2 hours, or no verification has succeeded for 2 days:
      deltafold status --store s3://backups/etcd-main --max-age 2h --verified-within 2d
  Print the age of the newest snapshot in seconds:
      deltafold status --store /backups/etcd-main --output json | jq .newest.age_seconds

Exit codes: 0 if the backup is healthy; 65 if the last verification failed, or if revisions are missing up to the \
newest snapshot; 66 if there is nothing to restore; 75 if the newest snapshot is too old (Stale), if the cluster \
was set back less than --set-back-age ago (SetBack), or if no verification has succeeded within --verified-within \
(NotVerified). If several apply, the first of 66, 65 and 75. \
docs/exit-codes.md lists all others.")]
pub(super) struct StatusArgs {
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    store: StoreArgs,
}

impl StatusArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        print_report(output, self.report(cancel)?)
    }

    fn report(&self, cancel: &Cancel) -> Result<Report<BackupState>> {
        match self.store.context(cancel) {
            // A local folder that is not there.
            Err(e) if e.reason() == Reason::NoSnapshots => {
                Ok(of_nothing(self.store.url(), &e, &self.options))
            }
            ctx => run(&ctx?, &self.options),
        }
    }
}

impl Render for BackupState {
    fn blocks(o: &Report<Self>) -> Blocks {
        let mut text = Blocks::default();
        let style = match o.verdict {
            Verdict::Healthy => Style::Good,
            _ => Style::Bad,
        };
        let verdict = match (&o.failure, &o.newest) {
            (Some(failure), _) => failure.to_string(),
            (None, Some(newest)) => {
                format!("the newest snapshot is {} old", ago(newest.age_seconds))
            }
            (None, None) => "nothing is wrong".to_owned(),
        };
        text.verdict(style, o.verdict.as_str(), format!(": {verdict}"));
        text::add_findings(o.findings.get(1..).unwrap_or_default(), &mut text);
        if let Some(n) = &o.newest {
            let revision = n.revision.map(|r| format!("revision {r}, "));
            let revision = revision.unwrap_or_default();
            let (age, most) = (ago(n.age_seconds), ago(o.max_age_seconds));
            text.field(
                "newest",
                format!("{}, {revision}{age} old (at most {most})", n.path),
            );
        }
        text.field("follower", o.follower.as_ref().map(LiveFollower::text));
        text::add_ranges("restorable", &o.restorable, &mut text);
        if o.restorable.len() > 1 {
            let gaps = count(o.restorable.len() - 1, "gap");
            text.field("gaps", format!("{gaps} between these ranges"));
        }
        if o.verifications.is_empty() && o.verdict != Verdict::Empty && o.timeline.is_some() {
            text.field("verified", "never, or not recorded");
        }
        for v in &o.verifications {
            text.field("verified", verification(v));
        }
        let s = &o.size;
        let growth = o.bytes_per_day;
        let growth = growth.map(|b| format!(", {} a day over the last 7 days", size(b)));
        let growth = growth.unwrap_or_default();
        let (bytes, fulls, deltas) = (
            size(s.bytes),
            count(s.fulls, "full"),
            count(s.deltas, "delta"),
        );
        let sizes = format!(
            "{bytes}, {fulls}, {deltas} ({} excluded){growth}",
            s.excluded
        );
        text.field("size", sizes.replace(" (0 excluded)", ""));
        text.field("cluster", o.identity.as_ref().map(RecordedIdentity::text));
        text::add_findings(&o.problems, &mut text);
        text.field("next", o.next.as_deref());
        text
    }
}

/// A duration by its two largest units, `1d 5h`, and at least a second.
fn ago(seconds: f64) -> String {
    duration::age(seconds.max(1.0))
}

fn verification(v: &Verification) -> String {
    let level = match v.level {
        RecordLevel::Cluster => "against the live etcd",
        level => level.as_str(),
    };
    let chains = match (v.level, v.all_chains) {
        (RecordLevel::Cluster, _) => "",
        (_, true) => ", all chains",
        (_, false) => ", newest chain",
    };
    let drill = match v.drill_succeeded {
        None => "",
        Some(true) => ", restore drill succeeded",
        Some(false) => ", restore drill failed",
    };
    let result = match (v.result, &v.reason) {
        (RecordResult::Verified, _) => "good".to_owned(),
        (RecordResult::Failed, None) => "FAILED".to_owned(),
        (RecordResult::Failed, Some(reason)) => format!("FAILED ({reason})"),
    };
    let behind = match (v.revision, v.revisions_behind) {
        (None, _) => String::new(),
        (Some(r), None | Some(0)) => format!(", up to revision {r}"),
        (Some(r), Some(n)) => format!(", up to revision {r}, {n} before the newest"),
    };
    let when = if v.age_seconds < 0.0 {
        "in the future".to_owned()
    } else {
        format!("{} ago", ago(v.age_seconds))
    };
    format!("{result}: {level}{chains}{drill}, {when}{behind}")
}
