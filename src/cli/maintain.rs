//! `deltafold maintain`: its arguments, and its outcome in words.

use super::endpoints::EndpointArgs;
use super::metrics::MetricsArgs;
use super::text::Text;
use super::{Ended, MeansArgs, Output, print_report, size};
use crate::base::flag_values::yes_or_no;
use crate::base::{Cancel, byte_size};
use crate::ops::maintain::{
    Decision, LockLease, MemberOutcome, Options, Outcome, Status, Upkeep, run,
};
use crate::ops::report::Report;
use crate::telemetry::metrics::Metrics;
use clap::Args;

/// Keep a live etcd lean: compact its history, defragment its members, disarm NOSPACE
///
/// History is compacted first, and with --store no farther than it is saved there. Then members whose
/// databases waste too much are defragmented, one at a time and the leader last, each only while all
/// others are healthy and as far as it, and the next only when the one before is back. An alarm for want
/// of space (NOSPACE) makes a defragmentation wanted whatever the fraction, and is disarmed once there is
/// room. Two runs never overlap.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  What would be done, with half of a database wasted?
      deltafold maintain --endpoints https://10.0.0.1:2379 --cacert ca.crt --cert client.crt \\
          --key client.key --defrag 0.5 --dry-run
  Keep an hour's history, and nothing that is not saved is compacted:
      deltafold maintain --endpoints http://127.0.0.1:2379 --store s3://backups/etcd-main \\
          --compact-keep 1h --defrag 0.3
  Keep the last 10000 revisions, and defragment all:
      deltafold maintain --endpoints http://127.0.0.1:2379 --compact-keep 10000 --defrag always

Kubernetes' API servers compact etcd themselves, every 5 minutes: there
--defrag alone is of use. A member serves nobody while it is defragmented, around 10 s for each GiB.

The exit code is 0, or tells the kind of failure: docs/exit-codes.md. 75 means that a member is not
healthy, or that another run is at work.")]
pub(super) struct MaintainArgs {
    #[command(flatten)]
    live: EndpointArgs,
    #[command(flatten)]
    upkeep: Upkeep,
    /// Their quota, as etcd has it; beyond 80 % of it less waste is enough [default: what they say]
    ///
    /// Servers before 3.6 do not say.
    #[arg(long, value_name = "SIZE", value_parser = byte_size::parse)]
    quota_backend_bytes: Option<u64>,
    /// Only say what would be done
    #[arg(long, value_parser = yes_or_no)]
    dry_run: bool,
    /// The folder that holds v2/: nothing is compacted that is not saved in it
    #[arg(long, value_name = "URL", help_heading = "Store")]
    store: Option<String>,
    /// The Lease that keeps a second run away [default: an object of the store, or a lock on this machine]
    #[arg(long, value_name = "NAME", help_heading = "Kubernetes")]
    lock_lease: Option<String>,
    /// Where it is [default: the kubeconfig's or the Pod's]
    #[arg(long, value_name = "NAMESPACE", help_heading = "Kubernetes")]
    lease_namespace: Option<String>,
    #[command(flatten)]
    means: MeansArgs,
    #[command(flatten)]
    metrics: MetricsArgs,
}

impl MaintainArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        self.metrics.around("maintain", cancel, |metrics| {
            self.maintain(cancel, metrics, output)
        })
    }

    fn maintain(&self, cancel: &Cancel, metrics: &Metrics, output: Output) -> Ended {
        let way = self.live.connector(cancel)?;
        let store = self.store.as_deref();
        let ctx = store
            .map(|url| self.means.context(url, cancel))
            .transpose()?;
        let options = Options {
            upkeep: self.upkeep.clone(),
            quota: self.quota_backend_bytes,
            dry_run: self.dry_run,
            temp_dir: self.means.temp_dir()?,
            lock_lease: self.lock_lease.clone().map(|name| LockLease {
                name,
                namespace: self.lease_namespace.clone(),
            }),
        };
        let report = run(&way, ctx.as_ref(), &options)?;
        for m in &report.members {
            if let (Some(before), Some(after)) = (m.db_size_before, m.db_size_after) {
                metrics.defragmented(&m.name, before.saturating_sub(after));
            }
        }
        print_report(output, report, in_words)
    }
}

fn in_words(o: &Report<Outcome>) -> String {
    let mut text = Text::new();
    let would = match o.dry_run {
        true => "would be ",
        false => "",
    };
    text.line(match o.status {
        Status::NothingToDo => "nothing to do".to_owned(),
        Status::Succeeded if o.dry_run => "would maintain the cluster".to_owned(),
        Status::Succeeded => format!("maintained the cluster in {:.2} s", o.seconds),
        Status::Failed => "not all is done".to_owned(),
    });
    if let Some(c) = &o.compact {
        let why = &c.reason;
        let history = match c.revision {
            Some(r) if c.done || o.dry_run => format!("{would}compacted at revision {r}: {why}"),
            Some(r) => format!("not compacted at revision {r}"),
            None => format!("left as it is: {why}"),
        };
        text.field("history", history);
    }
    for m in &o.members {
        text.field("member", member(m, would, o.dry_run));
    }
    if !o.alarms_cleared.is_empty() {
        let members = o.alarms_cleared.join(", ");
        text.field("alarm", format_args!("NOSPACE of {members} disarmed"));
    }
    text.each("warning", &o.warnings);
    text.end()
}

fn member(m: &MemberOutcome, would: &str, dry_run: bool) -> String {
    let name = match m.name.as_str() {
        "" => &m.id,
        name => name,
    };
    let leader = if m.leader { " (leader)" } else { "" };
    let before = m.db_size_before.map_or("?".to_owned(), size);
    let what = match (m.decision, m.db_size_after) {
        (Decision::Defragment, Some(after)) => {
            format!("defragmented, {before} → {}", size(after))
        }
        (Decision::Defragment, None) if dry_run || m.done => {
            format!("{would}defragmented, {before}")
        }
        (Decision::Defragment, None) => format!("not defragmented, {before}"),
        (Decision::Leave, _) => format!("left as it is, {before}"),
    };
    format!("{name}{leader} {what}: {}", m.reason)
}
