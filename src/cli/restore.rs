//! `deltafold restore`: its arguments, and its outcome in words.

use super::{MeansArgs, Output, print_outcome, size};
use crate::base::Cancel;
use crate::error::Result;
use crate::job::restore::{Action, Fate, Membership, Options, Outcome, Status, run};
use crate::mvcc::Revision;
use crate::shorten::{self, IN_JSON};
use crate::shown;
use clap::Args;
use std::fmt::Write;
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
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Result<()> {
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
        let outcome = run(&backups, &self.options, cancel)?;
        print_outcome(output, &outcome, in_words)
    }
}

fn in_words(o: &Outcome) -> String {
    let mut s = String::new();
    let target = o.data_dir.as_ref().or(o.snapshot_file.as_ref());
    let target = target.cloned().unwrap_or_default();
    let (would, did) = match o.snapshot_file {
        Some(_) => ("write", "wrote"),
        None => ("restore", "restored"),
    };
    // Writing to a String cannot fail.
    let _ = match (o.status, o.dry_run) {
        (Status::NotNeeded, _) => {
            writeln!(s, "nothing to do: {}", shown::line(&o.decision.message))
        }
        (Status::Succeeded, true) => writeln!(s, "would {would} {target}"),
        (Status::Succeeded, false) => {
            writeln!(s, "{did} {target} ({})", size(o.database_bytes))
        }
    };
    if o.decision.action == Action::Restore && o.decision.reason != "Asked" {
        let _ = writeln!(
            s,
            "  because   {} [{}]",
            shown::line(&o.decision.message),
            o.decision.reason
        );
    }
    for kept in &o.kept_aside {
        let _ = writeln!(s, "  kept      what was there before: {}", kept);
    }
    if let Some(base) = &o.base {
        let _ = writeln!(s, "  from      {base}");
        for d in shorten::lines(&o.deltas, IN_JSON) {
            let _ = writeln!(s, "            {d}");
        }
    }
    if o.candidates.len() > 1 {
        for c in &o.candidates {
            let fate = match c.status {
                Fate::Chosen => "chosen",
                Fate::NotChosen => "not chosen",
                Fate::Excluded => "excluded",
            };
            let revision = c.revision.map(|r| format!(" at revision {r}"));
            let why = c.message.as_ref().map(|m| format!(": {}", shown::line(m)));
            let _ = writeln!(
                s,
                "  {fate:10}{}{}{}",
                c.store,
                revision.unwrap_or_default(),
                why.unwrap_or_default()
            );
        }
    }
    if let (Some(restored), Some(revision), Some(timeline)) =
        (o.restored_revision, o.revision, &o.timeline)
    {
        let _ = write!(s, "  revision  {restored} on timeline {timeline}");
        let _ = match revision == restored {
            true => writeln!(s),
            false => writeln!(s, ", raised to {revision}"),
        };
    }
    if let (Some(hash), Some(live), Some(compact)) = (o.hash_kv, o.live_keys, o.compact_revision) {
        let compacted = match compact {
            Revision::NONE => "never compacted".to_owned(),
            at => format!("compacted at {at}"),
        };
        let _ = writeln!(
            s,
            "  holds     {live} live keys, {compacted}, HashKV {hash}"
        );
    }
    if let Some(at) = o.metadata_revision {
        let _ = writeln!(
            s,
            "  users, roles, alarms and leases are as of revision {at}"
        );
    }
    if let Some(n) = o.leases_added.filter(|&n| n > 0) {
        let _ = writeln!(
            s,
            "  leases    {n} that no snapshot recorded got a time to live"
        );
    }
    if let Some(m) = &o.member {
        let _ = writeln!(
            s,
            "  member    {} ({}) of {} in cluster {}",
            shown::line(&m.name),
            m.id,
            shorten::line(&m.members, ", ", ""),
            m.cluster_id
        );
    }
    if o.status == Status::Succeeded && !o.dry_run {
        let _ = writeln!(
            s,
            "  read      {}, in {:.2} s",
            size(o.bytes_read),
            o.seconds
        );
    }
    s
}
