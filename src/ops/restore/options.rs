//! The options of a restore, described once for the command line, for tasks and for the arguments of
//! Jobs.
//!
//! Called by `cli::restore`, `controller::api::task` and `ops::verify`.

use super::needed::Depth;
use crate::base::{duration, flag_values};
use crate::datadir::membership::Cluster;
use crate::error::Result;
use crate::etcd::peers::PeerOptions;
use crate::mvcc::KeepHistory;
use crate::ops::fold::Request;
use crate::ops::fold::rebuild::Leases;
use crate::ops::options::Point;
use clap::{Arg, Args, ValueEnum};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// The longest time to live that etcd accepts, in seconds.
const LONGEST_LEASE: u64 = 9_000_000_000;
/// The default time to live of a lease that no snapshot recorded.
const DEFAULT_LEASE_TTL: Duration = Duration::from_secs(3600);

const DEFAULT_NAME: &str = "default";
const DEFAULT_PEER_URL: &str = "http://localhost:2380";
const DEFAULT_CLUSTER: &str = "default=http://localhost:2380";
const DEFAULT_TOKEN: &str = "etcd-cluster";

/// Options that the command line and tasks have in common.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize, JsonSchema)]
#[command(next_help_heading = "Content")]
#[serde(rename_all = "camelCase")]
pub struct SharedOptions {
    /// Which state.
    #[command(flatten)]
    #[serde(flatten)]
    pub point: Point,
    /// Which member.
    #[command(flatten)]
    #[serde(flatten)]
    pub membership: Membership,
    /// Raise the newest revision by so many, past all that clients have seen
    #[arg(long, value_name = "N", requires = "mark_compacted", value_parser = clap::value_parser!(i64).range(1..))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub bump_revision: Option<i64>,
    /// Count all below the raised revision as compacted, so that clients list anew; no history is kept
    #[arg(long, requires = "bump_revision", value_parser = flag_values::yes_or_no)]
    #[serde(default)]
    pub mark_compacted: bool,
    /// Restore only if the member that is there needs it, after a look at it
    ///
    /// sanity: the files are there, the database's header is right, the WAL can be read. full: every page
    /// of the database, too, and its HashKV agrees with the backup's. Refused where the other members of
    /// --initial-cluster have a quorum.
    #[arg(long, value_name = "LOOK", help_heading = "Target")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_needed: Option<Depth>,
}

/// The new cluster, and which of its members this is; the flags are etcdutl's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize, JsonSchema)]
#[command(next_help_heading = "Target")]
#[serde(rename_all = "camelCase")]
pub struct Membership {
    /// This member's name
    #[arg(long, value_name = "NAME")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// All members of the new cluster: NAME=PEER-URL,…
    #[arg(long, value_name = "MEMBERS")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initial_cluster: Option<String>,
    /// Tells clusters with the same URLs apart
    #[arg(long, value_name = "TOKEN")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initial_cluster_token: Option<String>,
    /// This member's peer URLs, as in --initial-cluster
    #[arg(long, value_name = "URLS")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initial_advertise_peer_urls: Option<String>,
}

impl Membership {
    /// Adds a flag's default value. A task has no defaults: if it names only a member, that member is
    /// the whole cluster.
    pub fn with_default(arg: Arg) -> Arg {
        match arg.get_id().as_str() {
            "name" => arg.default_value(DEFAULT_NAME),
            "initial_cluster" => arg.default_value(DEFAULT_CLUSTER),
            "initial_cluster_token" => arg.default_value(DEFAULT_TOKEN),
            "initial_advertise_peer_urls" => arg.default_value(DEFAULT_PEER_URL),
            _ => arg,
        }
    }

    /// Sets the cluster to a single member if a member is named but no cluster.
    pub fn complete(mut self) -> Self {
        let (name, urls) = (&self.name, &self.initial_advertise_peer_urls);
        if self.initial_cluster.is_none() && (name.is_some() || urls.is_some()) {
            let name = name.as_deref().unwrap_or(DEFAULT_NAME);
            let urls = urls.as_deref().unwrap_or(DEFAULT_PEER_URL).split(',');
            let members: Vec<String> = urls.map(|url| format!("{name}={url}")).collect();
            self.initial_cluster = Some(members.join(","));
        }
        self
    }

    /// Returns the cluster with all its IDs.
    ///
    /// # Errors
    /// Fails with `Usage` if the names and URLs are inconsistent.
    pub fn cluster(&self) -> Result<Cluster> {
        Cluster::new(
            self.name.as_deref().unwrap_or(DEFAULT_NAME),
            self.initial_cluster.as_deref().unwrap_or(DEFAULT_CLUSTER),
            self.initial_cluster_token
                .as_deref()
                .unwrap_or(DEFAULT_TOKEN),
            self.initial_advertise_peer_urls
                .as_deref()
                .unwrap_or(DEFAULT_PEER_URL),
        )
    }
}

/// What to restore, and how.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Target")]
pub struct Options {
    /// Take this timeline, by its ID in `deltafold list --deep` [default: the newest]
    #[arg(long, value_name = "ID", help_heading = "State")]
    pub timeline: Option<String>,
    /// The member's data directory; it may be a mount point
    #[arg(long, value_name = "DIR", required_unless_present = "to_snapshot")]
    pub data_dir: Option<PathBuf>,
    /// A WAL directory of its own [default: in the data directory]
    #[arg(long, value_name = "DIR")]
    pub wal_dir: Option<PathBuf>,
    /// Write a plain snapshot file instead, for etcdutl and others
    ///
    /// Not compressed, its SHA-256 behind it. It holds the members of the backup: --name and the other
    /// flags of the new cluster are for whatever restores from it. It is encrypted where --age-recipient is
    /// given, and its name must end in `.age` then.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["data_dir", "wal_dir", "if_needed"])]
    pub to_snapshot: Option<PathBuf>,
    /// What tasks have, too.
    #[command(flatten)]
    pub shared: SharedOptions,
    /// How much history to keep: latest, all, a number of revisions, or a duration (90s, 1h30m, 7d)
    #[arg(
        long,
        value_name = "HISTORY",
        default_value = "all",
        help_heading = "Content"
    )]
    pub keep_history: KeepHistory,
    /// keep: keys stay attached to their leases; drop: no key has one, and none expires
    #[arg(
        long,
        value_name = "HOW",
        default_value = "keep",
        help_heading = "Content"
    )]
    pub leases: KeepOrDrop,
    /// How long a lease lives that keys are attached to and no snapshot recorded: 90s, 1h30m, 7d
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = parse_ttl, help_heading = "Content")]
    pub lease_ttl: Option<Duration>,
    /// How to ask the other members whether they still have a quorum.
    #[command(flatten)]
    pub peers: PeerOptions,
    /// Only say what would be done
    #[arg(long, value_parser = flag_values::yes_or_no, help_heading = "Output")]
    pub dry_run: bool,
}

/// What a restore does with leases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum KeepOrDrop {
    /// Keys stay attached
    #[default]
    Keep,
    /// No key has a lease
    Drop,
}

fn parse_ttl(s: &str) -> Result<Duration, String> {
    match duration::parse(s)? {
        d if (1..=LONGEST_LEASE).contains(&d.as_secs()) => Ok(d),
        _ => Err(format!("a lease lives from 1s to {LONGEST_LEASE}s")),
    }
}

impl Options {
    /// Returns which state to restore.
    pub(super) fn request(&self) -> Request {
        self.shared.point.request(self.timeline.as_deref())
    }

    /// Returns what to do with leases.
    pub(super) fn leases(&self) -> Leases {
        match self.leases {
            KeepOrDrop::Keep => Leases::Keep {
                time_to_live: self.lease_ttl.unwrap_or(DEFAULT_LEASE_TTL),
            },
            KeepOrDrop::Drop => Leases::Drop,
        }
    }
}
