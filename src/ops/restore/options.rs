//! The options of a restore, described once for the command line, for tasks and for the arguments of
//! Jobs.

use super::needed::Depth;
use crate::base::{duration, flag_values};
use crate::datadir::membership::Cluster;
use crate::error::Result;
use crate::etcd::peers::PeerOptions;
use crate::fold::rebuild::Leases;
use crate::mvcc::KeepHistory;
use crate::ops::options::{Point, Uncovered};
use crate::prefix::select::StateRequest;
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

/// The new cluster, and which of its members this is; the flags are etcdutl's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize, JsonSchema)]
#[command(next_help_heading = "New cluster")]
#[serde(rename_all = "camelCase")]
pub struct Membership {
    /// Name of this member
    #[arg(long, value_name = "NAME")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// All members of the new cluster, as NAME=PEER-URL,…
    #[arg(long, value_name = "MEMBERS")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initial_cluster: Option<String>,
    /// Token of the new cluster; it must be unique if clusters have the same URLs
    #[arg(long, value_name = "TOKEN")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initial_cluster_token: Option<String>,
    /// Peer URLs of this member, as in --initial-cluster
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

    /// Returns the flags of etcd that fit the restored member. Flags with etcd's own defaults are left out.
    ///
    /// etcd reads the members from the data directory. It needs the name, and the URLs to listen on for its
    /// peers; a listening URL must have an IP address.
    pub(super) fn etcd_flags(&self) -> Vec<String> {
        let name = self.name.as_deref().unwrap_or(DEFAULT_NAME);
        let urls = self.initial_advertise_peer_urls.as_deref();
        let urls = urls.unwrap_or(DEFAULT_PEER_URL);
        let cluster = self.initial_cluster.as_deref().unwrap_or(DEFAULT_CLUSTER);
        let token = self.initial_cluster_token.as_deref();
        let mut flags = vec!["--name".to_owned(), name.to_owned()];
        let mut add = |flag: &str, value: &str, default: &str| {
            if value != default {
                flags.extend([flag.to_owned(), value.to_owned()]);
            }
        };
        if urls.split(',').all(has_ip_address) {
            add("--listen-peer-urls", urls, DEFAULT_PEER_URL);
        }
        add("--initial-advertise-peer-urls", urls, DEFAULT_PEER_URL);
        add("--initial-cluster", cluster, DEFAULT_CLUSTER);
        let token = token.unwrap_or(DEFAULT_TOKEN);
        add("--initial-cluster-token", token, DEFAULT_TOKEN);
        flags
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

/// Whether the host of a URL is an IP address.
fn has_ip_address(url: &str) -> bool {
    let url = url::Url::parse(url.trim());
    let host = url.as_ref().ok().and_then(url::Url::host);
    matches!(host, Some(url::Host::Ipv4(_) | url::Host::Ipv6(_)))
}

/// What to restore, and how.
#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    /// ID of the timeline to read, from `deltafold list --deep` [default: the newest timeline]
    #[arg(long, value_name = "ID", help_heading = "Point in time")]
    pub timeline: Option<String>,
    /// Data directory of the member; it may be a mount point
    #[arg(long, value_name = "DIR", required_unless_present = "to_snapshot")]
    pub data_dir: Option<PathBuf>,
    /// Separate WAL directory [default: in the data directory]
    #[arg(long, value_name = "DIR")]
    pub wal_dir: Option<PathBuf>,
    /// Write a plain snapshot file for etcdutl, k3s, Talos and other tools, by its path or URL, instead of a data directory
    ///
    /// The file is not compressed, ends with its SHA-256, and keeps the member list of the backup. --name and
    /// the other flags of the new cluster are refused. With --age-recipient the file is encrypted, and its
    /// name must end in `.age`.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["data_dir", "wal_dir", "if_needed", "name", "initial_cluster", "initial_cluster_token", "initial_advertise_peer_urls"])]
    pub to_snapshot: Option<PathBuf>,
    /// Whether the point may be after the newest snapshot.
    #[command(flatten)]
    pub uncovered: Uncovered,
    /// Which state.
    #[command(flatten)]
    pub point: Point,
    /// Which member.
    #[command(flatten)]
    pub membership: Membership,
    /// Raise the newest revision by N. Choose N so large that the result is above every revision that clients
    /// have seen
    #[arg(long, value_name = "N", requires = "mark_compacted", value_parser = clap::value_parser!(i64).range(1..), help_heading = None::<&str>)]
    pub bump_revision: Option<i64>,
    /// With a raised revision: mark all revisions below the raised one as compacted, so that clients with old
    /// watches must list again. The history is lost
    #[arg(long, requires = "bump_revision", value_parser = flag_values::yes_or_no, help_heading = None::<&str>)]
    pub mark_compacted: bool,
    /// Restore only if a check finds the existing member missing, damaged or behind the backup
    ///
    /// The check `sanity` reads the file list, the header of the database and the WAL. `full` also reads
    /// every page of the database, and compares its HashKV with that of the backup. The restore is refused if
    /// the other members of --initial-cluster have a quorum.
    #[arg(long, value_name = "LOOK", help_heading = None::<&str>)]
    pub if_needed: Option<Depth>,
    /// History to keep: latest, all, a number of revisions, or a duration such as 90s, 1h30m or 7d
    #[arg(
        long,
        value_name = "HISTORY",
        default_value = "all",
        help_heading = None::<&str>
    )]
    pub keep_history: KeepHistory,
    /// Keep the leases of keys, or drop them so that no key expires
    #[arg(
        long,
        value_name = "HOW",
        default_value = "keep",
        help_heading = None::<&str>
    )]
    pub leases: KeepOrDrop,
    /// Time to live of a lease that keys refer to, if no full snapshot contains it or an earlier lease of one of the keys
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = parse_ttl, help_heading = None::<&str>)]
    pub lease_ttl: Option<Duration>,
    /// How to ask the other members whether they still have a quorum.
    #[command(flatten)]
    pub peers: PeerOptions,
    /// Only show what would be restored
    #[arg(long, value_parser = flag_values::yes_or_no, help_heading = None::<&str>)]
    pub dry_run: bool,
}

/// What a restore does with leases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum KeepOrDrop {
    /// Keys keep their leases
    #[default]
    Keep,
    /// Keys lose their leases
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
    pub(super) fn request(&self) -> StateRequest {
        self.point
            .request(self.timeline.as_deref(), self.uncovered.or_newest)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etcd_is_given_the_flags_that_differ_from_its_defaults() {
        assert_eq!(Membership::default().etcd_flags(), ["--name", "default"]);
        let member = |url: &str| Membership {
            name: Some("a".to_owned()),
            initial_cluster: Some(format!("a={url},b=http://10.0.0.2:2380")),
            initial_cluster_token: Some("restored-1".to_owned()),
            initial_advertise_peer_urls: Some(url.to_owned()),
        };
        let flags = member("https://10.0.0.1:2380").etcd_flags().join(" ");
        assert_eq!(
            flags,
            "--name a --listen-peer-urls https://10.0.0.1:2380 --initial-advertise-peer-urls https://10.0.0.1:2380 --initial-cluster a=https://10.0.0.1:2380,b=http://10.0.0.2:2380 --initial-cluster-token restored-1"
        );
        // etcd cannot listen on a host name.
        let flags = member("https://etcd-0.etcd:2380").etcd_flags().join(" ");
        assert!(!flags.contains("--listen-peer-urls"), "{flags}");
    }
}
