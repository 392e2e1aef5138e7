//! `deltafold restore`: its arguments, and its outcome in words.

use super::text::{self, Text};
use super::{Ended, MeansArgs, Output, print_report, size};
use crate::base::Cancel;
use crate::base::shorten;
use crate::ops::report::Report;
use crate::ops::restore::{Action, CandidateStatus, Membership, Options, Outcome, Status, run};
use clap::Args;
use std::path::PathBuf;

/// Restore a member's data directory, at any revision or time, without an etcd
///
/// The new member is written beside its place, synced, read back and verified (every page, etcd's
/// HashKV), and then put in place in one step. A member that is there already is never overwritten;
/// with --if-needed it is looked at, and replaced only if something is wrong with it: what was there is
/// kept aside.
#[derive(Debug, Args)]
#[command(
    mut_args(Membership::with_default),
    override_usage = "\
deltafold restore [OPTIONS] (--store <URL>... | --snapshot <FILE>) (--data-dir <DIR> | --to-snapshot <FILE>)",
    after_long_help = "\
Examples:
  The newest state, for a single member:
      deltafold restore --store s3://backups/etcd-main --data-dir /var/lib/etcd
  As it was at a point in time, for Kubernetes (the API server's clients notice, and list anew):
      deltafold restore --store s3://backups/etcd-main --time 2026-11-20T12:00:00Z \\
          --bump-revision 1000000000 --mark-compacted --data-dir /var/lib/etcd
  One of three members; the same on the others, at the same revision, with their --name and peer URL:
      deltafold restore --store s3://backups/etcd-main --revision 123456 \\
          --data-dir /var/lib/etcd --name a \\
          --initial-cluster a=http://10.0.0.1:2380,b=http://10.0.0.2:2380,c=http://10.0.0.3:2380 \\
          --initial-cluster-token restored-1 --initial-advertise-peer-urls http://10.0.0.1:2380
  Before etcd starts, in an init container: only if something is wrong with what is there:
      deltafold restore --store s3://backups/etcd-main --data-dir /var/lib/etcd --if-needed sanity
  From what etcdctl, k3s, kOps or OpenShift saved:
      deltafold restore --snapshot backup.db --data-dir /var/lib/etcd
  A plain snapshot file for other tools:
      deltafold restore --store s3://backups/etcd-main --revision 123456 --to-snapshot etcd.db

The exit code is 0, or tells the kind of failure: docs/exit-codes.md."
)]
pub(super) struct RestoreArgs {
    /// The folder that holds v2/ (or v1/); given again, the one that leads farthest is taken
    ///
    /// s3://bucket/prefix, gs://…, az://…, swift://…, oss://…, file:///dir or a path. Of several that lead equally far the
    /// first is taken; one that cannot be read is passed over. In the environment: one URL a line.
    #[arg(
        long,
        value_name = "URL",
        value_delimiter = '\n',
        required_unless_present = "snapshot",
        help_heading = "Backup"
    )]
    store: Vec<String>,
    /// A plain snapshot file instead, as etcdctl, k3s, kOps or OpenShift leave it, compressed or not
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "store",
        help_heading = "Backup"
    )]
    snapshot: Option<PathBuf>,
    #[command(flatten)]
    means: MeansArgs,
    #[command(flatten)]
    options: Options,
}

impl RestoreArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let mut backups = Vec::new();
        match &self.snapshot {
            Some(file) => backups.push(self.means.backup_file(file, cancel)?),
            None => {
                let urls = self.store.iter().map(|s| s.trim());
                let urls = urls.filter(|s| !s.is_empty());
                for (nth, url) in (1..).zip(urls) {
                    backups.push(self.means.backup_store(nth, url, cancel)?);
                }
            }
        }
        let report = run(&backups, &self.options, cancel)?;
        print_report(output, report, in_words)
    }
}

fn in_words(o: &Report<Outcome>) -> String {
    let mut text = Text::new();
    let target = o.data_dir.as_ref().or(o.snapshot_file.as_ref());
    let target = target.cloned().unwrap_or_default();
    let (would, did) = match o.snapshot_file {
        Some(_) => ("write", "wrote"),
        None => ("restore", "restored"),
    };
    let (action, why) = (&o.decision.action, &o.decision.message);
    text.line(match (o.status, o.dry_run) {
        (Status::NotNeeded, _) => format!("nothing to do: {why}"),
        (Status::Succeeded, true) => format!("would {would} {target}"),
        (Status::Succeeded, false) => format!("{did} {target} ({})", size(o.database_bytes)),
    });
    if *action == Action::Restore && o.decision.reason != "Asked" {
        text.field("because", format_args!("{why} [{}]", o.decision.reason));
    }
    for kept in &o.kept_aside {
        text.field("kept", format_args!("what was there before: {kept}"));
    }
    if let Some(base) = &o.base {
        text.from(base, &o.deltas);
    }
    if o.candidates.len() > 1 {
        for c in &o.candidates {
            let fate = match c.status {
                CandidateStatus::Chosen => "chosen",
                CandidateStatus::NotChosen => "not chosen",
                CandidateStatus::Excluded => "excluded",
            };
            let revision = c.revision.map(|r| format!(" at revision {r}"));
            let why = c.message.as_ref().map(|m| format!(": {m}"));
            let (revision, why) = (revision.unwrap_or_default(), why.unwrap_or_default());
            text.line(format_args!("  {fate:10}{}{revision}{why}", c.store));
        }
    }
    if let (Some(restored), Some(revision), Some(timeline)) =
        (o.restored_revision, o.revision, &o.timeline)
    {
        let raised = match revision == restored {
            true => String::new(),
            false => format!(", raised to {revision}"),
        };
        text.field(
            "revision",
            format_args!("{restored} on timeline {timeline}{raised}"),
        );
    }
    text.maybe(
        "holds",
        text::holds(o.live_keys, o.compact_revision, o.hash_kv),
    );
    if let Some(at) = o.metadata_revision {
        text.line(format_args!(
            "  users, roles, alarms and leases are as of revision {at}"
        ));
    }
    let leases = o.leases_added.filter(|&n| n > 0);
    let leases = leases.map(|n| format!("{n} that no snapshot recorded got a time to live"));
    text.maybe("leases", leases);
    if let Some(m) = &o.member {
        let members = shorten::line(&m.members, ", ", "");
        let member = format!(
            "{} ({}) of {members} in cluster {}",
            m.name, m.id, m.cluster_id
        );
        text.field("member", member);
    }
    if o.status == Status::Succeeded && !o.dry_run {
        let read = size(o.bytes_read);
        text.field("read", format_args!("{read}, in {:.2} s", o.seconds));
    }
    text.end()
}
