//! `deltafold restore`: its arguments, and its result as text.
//!
//! The operation itself is `ops::restore`; most of its flags are in `ops::restore::options`.

use super::render::{Blocks, Render};
use super::store_access::{FileArg, NthStore, object_url};
use super::text;
use super::{AccessArgs, Ended, Output, print_report, size};
use crate::base::{Cancel, duration, plural, shorten};
use crate::ops::report::{Report, Status};
use crate::ops::restore::{
    Action, CandidateStatus, Membership, NamedBackup, Options, Restored, run,
};
use crate::prefix::select::At;
use clap::Args;

/// Restore the data directory of an etcd member, at any revision or time
///
/// No etcd is needed. The new data directory is written next to its destination, synced, read back, verified
/// (every page, etcd's HashKV), and then renamed in one step. An existing data directory is never overwritten.
/// With --if-needed, it is checked, and replaced if it is damaged or lacks data that the backup has; the old
/// one is then kept under another name.
#[derive(Debug, Args)]
#[command(
    mut_args(Membership::with_default),
    override_usage = "\
deltafold restore [OPTIONS] (--store <URL>... | --snapshot <FILE>) (--data-dir <DIR> | --to-snapshot <FILE>)",
    after_long_help = "\
Examples:
  Restore the newest state as a cluster of one member:
      deltafold restore --store s3://backups/etcd-main --data-dir /var/lib/etcd
  Restore a point in time for Kubernetes, so that the clients of the API server list everything again:
      deltafold restore --store s3://backups/etcd-main --time 2026-11-20T12:00:00Z \\
          --bump-revision 1000000000 --mark-compacted --data-dir /var/lib/etcd
  Restore one of three members; repeat it for the others with the same revision and their --name and URL:
      deltafold restore --store s3://backups/etcd-main --revision 123456 \\
          --data-dir /var/lib/etcd --name a \\
          --initial-cluster a=http://10.0.0.1:2380,b=http://10.0.0.2:2380,c=http://10.0.0.3:2380 \\
          --initial-cluster-token restored-1 --initial-advertise-peer-urls http://10.0.0.1:2380
  Restore in an init container before etcd starts, only if the data directory is missing or damaged:
      deltafold restore --store s3://backups/etcd-main --data-dir /var/lib/etcd --if-needed sanity
  Restore from a snapshot file of etcdctl, k3s, kOps or OpenShift, or from the newest of k3s:
      deltafold restore --snapshot backup.db --data-dir /var/lib/etcd
      deltafold restore --snapshot 's3://b/k3s/etcd-snapshot-server1-*' --data-dir /var/lib/etcd
  Write a plain snapshot file for other tools:
      deltafold restore --store s3://backups/etcd-main --revision 123456 --to-snapshot etcd.db

The exit code is 0 on success. docs/exit-codes.md lists all others."
)]
pub(super) struct RestoreArgs {
    /// URL of the folder that holds v2/ (or v1/): s3://bucket/prefix, gs://…, az://…, swift://…,
    /// file:///dir or a path; repeatable
    ///
    /// Of several stores, restore uses the one with the newest revision; if several are equal, the first of
    /// them. A store that cannot be read is skipped. In the environment variable: one URL per line.
    #[arg(
        long,
        value_name = "URL",
        value_delimiter = '\n',
        required_unless_present = "snapshot",
        help_heading = "Backup"
    )]
    store: Vec<String>,
    #[command(flatten)]
    file: FileArg,
    #[command(flatten)]
    options: Options,
    #[command(flatten)]
    access: AccessArgs,
}

impl RestoreArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Ended {
        let time = self.options.point.time;
        let urls = self.store.iter().map(|s| s.trim());
        let urls: Vec<&str> = urls.filter(|s| !s.is_empty()).collect();
        let to_snapshot = self.options.to_snapshot.as_deref();
        let to_store = to_snapshot.and_then(object_url);
        let of = urls.len().max(1) + usize::from(to_store.is_some());
        let mut backups = Vec::new();
        match &self.file.snapshot {
            Some(file) => {
                let at = time.map_or(At::Newest, At::Time);
                let location = self
                    .access
                    .backup_file(file, self.file.plaintext, at, cancel)?;
                backups.push(NamedBackup::from(location));
            }
            None => {
                for (nth, url) in urls.into_iter().enumerate() {
                    let (nth, plaintext) = (NthStore { nth, of }, self.file.plaintext);
                    backups.push(self.access.backup_store(nth, url, plaintext, cancel)?);
                }
            }
        }
        let nth = NthStore { nth: of - 1, of };
        let to_snapshot = to_snapshot
            .map(|file| self.access.plain_target(nth, file, cancel))
            .transpose()?;
        let report = run(&backups, &self.options, to_snapshot.as_ref(), cancel)?;
        print_report(output, report)
    }
}

impl Render for Restored {
    fn blocks(o: &Report<Self>) -> Blocks {
        let mut text = Blocks::default();
        let target = o.data_dir.as_ref().or(o.snapshot_file.as_ref());
        let target = target.cloned().unwrap_or_default();
        let (would, did) = match o.snapshot_file {
            Some(_) => ("write", "wrote"),
            None => ("restore", "restored"),
        };
        let (action, message) = (&o.decision.action, &o.decision.message);
        text.line(match (o.status, o.dry_run) {
            (Status::NothingToDo, _) => format!("nothing to do: {message}"),
            (_, true) => format!("would {would} {target}"),
            (_, false) => format!("{did} {target} ({})", size(o.database_bytes)),
        });
        if *action == Action::Restore && o.decision.reason != "Asked" {
            text.field("reason", format!("{message} [{}]", o.decision.reason));
        }
        for kept in &o.kept_aside {
            text.field("kept", format!("the old data: {kept}"));
        }
        text.field("from", o.base.as_deref());
        text.list("", &o.deltas);
        if o.candidates.len() > 1 {
            for c in &o.candidates {
                let status = match c.status {
                    CandidateStatus::Chosen => "chosen",
                    CandidateStatus::NotChosen => "not chosen",
                    CandidateStatus::Excluded => "excluded",
                };
                let at = c.revision.map(|r| format!(" at revision {r}"));
                let why = c.message.as_ref().map(|message| format!(": {message}"));
                let (at, why) = (at.unwrap_or_default(), why.unwrap_or_default());
                text.field(status, format!("{}{at}{why}", c.store));
            }
        }
        if let (Some(restored), Some(revision), Some(timeline)) =
            (o.restored_revision, o.revision, &o.timeline)
        {
            let raised = format!(", raised to {revision}");
            let raised = if revision == restored { "" } else { &raised };
            text.field(
                "revision",
                format!("{restored} on timeline {timeline}{raised}"),
            );
        }
        text.field("as of", o.as_of);
        let holds = text::holds(o.live_keys, o.compact_revision, o.hash_kv);
        text.field("holds", holds);
        if let Some(at) = o.metadata_revision {
            let of = "users, roles, alarms and leases are those of revision";
            text.field("note", format!("{of} {at} (deltas do not record them)"));
        }
        if let Some(n) = o.leases_added.filter(|&n| n > 0) {
            let were = plural::either(n, "was", "were");
            let added = format!("{n} that no snapshot recorded {were} created with --lease-ttl");
            text.field("leases", added);
        }
        if let Some(m) = &o.member {
            let members = shorten::line(&m.members, ", ", "");
            let (name, id, cluster) = (&m.name, &m.id, &m.cluster_id);
            text.field(
                "member",
                format!("{name} ({id}) of {members} in cluster {cluster}"),
            );
        }
        if o.status == Status::Succeeded && !o.dry_run {
            let (read, took) = (size(o.bytes_read), duration::human(o.seconds));
            text.field("read", format!("{read}, in {took}"));
            add_next_steps(o, &mut text);
        }
        text
    }
}

/// Adds what to run next: etcd on the data directory, or a restore from the snapshot file.
fn add_next_steps(o: &Restored, text: &mut Blocks) {
    if o.revision != o.restored_revision {
        text.line("clients with older revisions get an error from etcd, and list everything again");
    }
    if let Some(command) = &o.start_command {
        text.line("start etcd on it (add your flags for clients and TLS):");
        text.command(command);
        let members = o.member.as_ref().map_or(1, |m| m.members.len());
        if members > 1 {
            let most = members / 2 + 1;
            text.line(format!(
                "etcd serves when {most} of the {members} members run: restore all of them from the same revision"
            ));
        }
    }
    if let Some(file) = &o.snapshot_file {
        let command = |words: &[&str]| -> Vec<String> {
            let rest = [file.as_str(), "--data-dir", "DIR"];
            let words = words.iter().copied().chain(rest);
            words.map(str::to_owned).collect()
        };
        text.line("restore a member from it with one of:");
        text.command(&command(&["deltafold", "restore", "--snapshot"]));
        // etcdutl reads no encrypted file.
        if !file.ends_with(".age") {
            text.command(&command(&["etcdutl", "snapshot", "restore"]));
        }
    }
}
