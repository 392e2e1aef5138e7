//! `deltafold verify`: its arguments, and its outcome in words.

use super::endpoints::EndpointArgs;
use super::metrics::MetricsArgs;
use super::{Output, StoreArgs, print, print_json};
use crate::error::Result;
use crate::job::verify::{Options, Outcome, run};
use crate::mvcc::Revision;
use crate::store::Cancel;
use crate::telemetry::metrics::Metrics;
use clap::Args;
use std::fmt::Write;

/// Prove that a backup holds what a live etcd holds
///
/// Folds the backup up to its newest revision and compares its HashKV with that of every member of the
/// cluster at the same revision. Nothing is written and nothing restored; every member reads its
/// keyspace once.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Is the backup what the cluster holds?
      deltafold verify --store s3://backups/etcd-main --endpoints https://10.0.0.1:2379 \\
          --cacert ca.crt --cert client.crt --key client.key
  At a revision of your choice, as JSON:
      deltafold verify --store /backups/etcd-main --endpoints http://127.0.0.1:2379 \\
          --revision 41000 --output json

The exit code is 0 where all members that answer hold what the backup holds, 65 where one does not, 66
where there is no revision that both sides still have; all others are in docs/exit-codes.md.")]
pub(super) struct VerifyArgs {
    #[command(flatten)]
    store: StoreArgs,
    #[command(flatten)]
    live: EndpointArgs,
    /// Compare at this revision [default: the newest that the backup holds]
    #[arg(long, env = "DELTAFOLD_REVISION", value_name = "N", value_parser = clap::value_parser!(i64).range(1..))]
    revision: Option<i64>,
    /// Take this timeline, by its ID in `deltafold list --deep` [default: the newest]
    #[arg(long, env = "DELTAFOLD_TIMELINE", value_name = "ID")]
    timeline: Option<String>,
    #[command(flatten)]
    metrics: MetricsArgs,
}

impl VerifyArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Result<()> {
        self.metrics.around("verify", cancel, |metrics| {
            self.verify(cancel, metrics, output)
        })
    }

    fn verify(&self, cancel: &Cancel, metrics: &Metrics, output: Output) -> Result<()> {
        let way = self.live.connector(cancel)?;
        let ctx = self.store.context(cancel)?;
        let options = Options {
            timeline: self.timeline.clone(),
            revision: self.revision.map(Revision),
        };
        let ended = run(&ctx, &way, &options);
        metrics.store_read(ctx.store.bytes_read());
        let outcome = ended?;
        match output {
            Output::Json => print_json(&outcome),
            Output::Text => print(&in_words(&outcome)),
        }
    }
}

fn in_words(o: &Outcome) -> String {
    let mut s = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(
        s,
        "equal: at revision {} the backup holds what the cluster holds",
        o.revision
    );
    let compacted = match o.compact_revision {
        Revision::NONE => "never compacted".to_owned(),
        at => format!("compacted at {at}"),
    };
    let _ = writeln!(
        s,
        "  HashKV    {}, {compacted}, {} live keys",
        o.hash_kv, o.live_keys
    );
    let _ = writeln!(s, "  from      {}", o.base);
    for d in &o.deltas {
        let _ = writeln!(s, "            {d}");
    }
    for m in &o.members {
        let at = m.endpoint.as_deref().unwrap_or("no endpoint");
        let said = match m.equal {
            Some(_) => "equal",
            None => "not compared",
        };
        let _ = writeln!(s, "  member    {} at {at}: {said}", m.name);
    }
    for warning in &o.warnings {
        let _ = writeln!(s, "  warning   {warning}");
    }
    let _ = writeln!(
        s,
        "  folded    {} events in {:.2} s, on timeline {}",
        o.events, o.seconds, o.timeline
    );
    s
}
