//! `deltafold restore`: its arguments, and its outcome in words.

use super::show::{self, Text};
use super::{Ended, MeansArgs, Output, StateArgs, print_report, size};
use crate::base::Cancel;
use crate::datadir::Cluster;
use crate::datadir::place::Place;
use crate::error::{Error, Reason, Result};
use crate::job::report::Report;
use crate::job::restore::{Action, Depth, Fate, Leases, Options, Outcome, Status, To, run};
use crate::mvcc::KeepHistory;
use crate::mvcc::history::parse_duration;
use crate::shorten;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// The longest time to live that etcd takes, in seconds.
const LONGEST_LEASE: u64 = 9_000_000_000;

/// Restore a member's data directory, at any revision or time, without an etcd
///
/// The new member is written beside its place, synced, read back and verified (every page, etcd's
/// HashKV), and then put in place in one step. A member that is there already is never overwritten;
/// with --if-needed it is looked at, and replaced only if something is wrong with it: what was there is
/// kept aside.
#[derive(Debug, Args)]
#[command(
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
    state: StateArgs,
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    content: ContentArgs,
    /// Restore only if the member that is there needs it, after a look at it
    ///
    /// sanity: the files are there, the database's header is right, the WAL can be read. full: every page
    /// of the database, too, and its HashKV agrees with the backup's. Refused where the other members of
    /// --initial-cluster have a quorum.
    #[arg(
        long,
        value_name = "LOOK",
        conflicts_with = "to_snapshot",
        help_heading = "Target"
    )]
    if_needed: Option<Look>,
    #[command(flatten)]
    peers: super::peers::PeerArgs,
    /// Only say what would be done
    #[arg(long, help_heading = "Output", value_parser = super::yes_or_no)]
    dry_run: bool,
}

/// Where to; the flags are etcdutl's.
#[derive(Debug, Args)]
#[command(next_help_heading = "Target")]
struct TargetArgs {
    /// The member's data directory; it may be a mount point
    #[arg(long, value_name = "DIR", required_unless_present = "to_snapshot")]
    data_dir: Option<PathBuf>,
    /// A WAL directory of its own [default: in the data directory]
    #[arg(long, value_name = "DIR", conflicts_with = "to_snapshot")]
    wal_dir: Option<PathBuf>,
    /// Write a plain snapshot file instead, for etcdutl and others
    ///
    /// Not compressed, its SHA-256 behind it. It holds the members of the backup: --name and the other
    /// flags of the new cluster are for whatever restores from it. It is encrypted where --age-recipient is
    /// given, and its name must end in `.age` then.
    #[arg(long, value_name = "FILE", conflicts_with = "data_dir")]
    to_snapshot: Option<PathBuf>,
    /// This member's name
    #[arg(long, value_name = "NAME", default_value = "default")]
    name: String,
    /// All members of the new cluster: NAME=PEER-URL,…
    #[arg(
        long,
        value_name = "MEMBERS",
        default_value = "default=http://localhost:2380"
    )]
    initial_cluster: String,
    /// Tells clusters with the same URLs apart
    #[arg(long, value_name = "TOKEN", default_value = "etcd-cluster")]
    initial_cluster_token: String,
    /// This member's peer URLs, as in --initial-cluster
    #[arg(long, value_name = "URLS", default_value = "http://localhost:2380")]
    initial_advertise_peer_urls: String,
}

/// What the result holds.
#[derive(Debug, Args)]
#[command(next_help_heading = "Content")]
struct ContentArgs {
    /// How much history to keep: latest, all, a number of revisions, or a duration (90s, 1h30m, 7d)
    #[arg(long, value_name = "HISTORY", default_value = "all")]
    keep_history: KeepHistory,
    /// Raise the newest revision by so many, past all that clients have seen
    #[arg(long, value_name = "N", requires = "mark_compacted", value_parser = clap::value_parser!(i64).range(1..))]
    bump_revision: Option<i64>,
    /// Count all below the raised revision as compacted, so that clients list anew; no history is kept
    #[arg(long, requires = "bump_revision", value_parser = super::yes_or_no)]
    mark_compacted: bool,
    /// keep: keys stay attached to their leases; drop: no key has one, and none expires
    #[arg(long, value_name = "HOW", default_value = "keep")]
    leases: KeepOrDrop,
    /// How long a lease lives that keys are attached to and no snapshot recorded: 90s, 1h30m, 7d
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = parse_ttl)]
    lease_ttl: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Look {
    /// Files, headers, WAL
    Sanity,
    /// Every page, and HashKV against the backup
    Full,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum KeepOrDrop {
    /// Keys stay attached
    Keep,
    /// No key has a lease
    Drop,
}

fn parse_ttl(s: &str) -> Result<Duration, String> {
    match parse_duration(s) {
        Some(d) if (1..=LONGEST_LEASE).contains(&d.as_secs()) => Ok(d),
        Some(_) => Err(format!("a lease lives from 1s to {LONGEST_LEASE}s")),
        None => Err("give a duration such as 90s, 30m, 1h30m or 7d".to_owned()),
    }
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
        let options = Options {
            request: self.state.request(),
            to: self.to()?,
            keep_history: self.content.keep_history,
            bump_revision: self.content.bump_revision,
            leases: match self.content.leases {
                KeepOrDrop::Keep => Leases::Keep {
                    time_to_live: self.content.lease_ttl,
                },
                KeepOrDrop::Drop => Leases::Drop,
            },
            dry_run: self.dry_run,
        };
        let report = run(&backups, &options, cancel)?;
        print_report(output, report, in_words)
    }

    fn to(&self) -> Result<To> {
        let t = &self.target;
        match (&t.data_dir, &t.to_snapshot) {
            (Some(dir), _) => Ok(To::DataDir {
                place: Place::new(dir, t.wal_dir.as_deref())?,
                cluster: Box::new(Cluster::new(
                    &t.name,
                    &t.initial_cluster,
                    &t.initial_cluster_token,
                    &t.initial_advertise_peer_urls,
                )?),
                if_needed: self.if_needed.map(|look| match look {
                    Look::Sanity => Depth::Sanity,
                    Look::Full => Depth::Full,
                }),
                peers: self.peers.options(),
            }),
            (None, Some(file)) => Ok(To::File(file.clone())),
            (None, None) => Err(Error::new(
                Reason::Usage,
                "give --data-dir or --to-snapshot",
            )),
        }
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
                Fate::Chosen => "chosen",
                Fate::NotChosen => "not chosen",
                Fate::Excluded => "excluded",
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
        show::holds(o.live_keys, o.compact_revision, o.hash_kv),
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
