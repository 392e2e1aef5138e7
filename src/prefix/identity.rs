//! The identity of a backup: the cluster that first wrote to the prefix, recorded beside the snapshots.
//!
//! A cluster with another ID is refused before it writes anything, unless it takes over. The identity
//! does not distinguish histories (`snapshot::next` does), and does not keep out a second writer
//! (`store::lock` does). `ops::snapshot` claims a prefix; `list`, `verify`, `restore` and `copy` read
//! its identity.

use crate::base::opt::{ENDPOINTS, STORE, TAKE_OVER};
use crate::error::{Error, Reason, Result};
use crate::etcd::cluster::Cluster;
use crate::prefix::Context;
use crate::store::{Published, Store};
use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Serialize};

/// The object's path, directly in the prefix: no layout of snapshots lists it.
pub const IDENTITY: &str = "deltafold-identity.json";
/// The largest object that is read, in bytes: an identity has some hundred.
const MOST_BYTES: u64 = 1 << 20;

/// The cluster that a backup belongs to, as recorded in its object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Identity {
    /// The cluster's ID, hexadecimal, as etcdctl prints it. Empty if only snapshot files were imported, which do not tell it.
    #[serde(default)]
    pub cluster_id: String,
    /// The UID of the namespace `kube-system`, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kube_system_uid: Option<String>,
    /// The names of the cluster's members when it was recorded, sorted.
    #[serde(default)]
    pub member_names: Vec<String>,
    /// When it was recorded: RFC 3339.
    #[serde(default)]
    pub recorded_at: String,
    /// The clusters that wrote here before, the oldest first.
    #[serde(default)]
    pub former_cluster_ids: Vec<String>,
}

/// The ID and the members of a live cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterFacts {
    /// The cluster's ID.
    pub cluster_id: u64,
    /// The names of the members; a member that has not started has none.
    pub member_names: Vec<String>,
}

impl ClusterFacts {
    fn hex_id(&self) -> String {
        format!("{:x}", self.cluster_id)
    }
}

impl From<&Cluster> for ClusterFacts {
    fn from(cluster: &Cluster) -> Self {
        let names = cluster.members.iter().map(|m| m.name.clone());
        let mut member_names: Vec<String> = names.filter(|n| !n.is_empty()).collect();
        member_names.sort();
        ClusterFacts {
            cluster_id: cluster.cluster_id,
            member_names,
        }
    }
}

impl Identity {
    /// Parses the content of an identity object.
    fn parse(content: &[u8]) -> Result<Identity, String> {
        let identity: Identity = serde_json::from_slice(content).map_err(|e| e.to_string())?;
        let is_id =
            |id: &String| u64::from_str_radix(id, 16).is_ok_and(|n| format!("{n:x}") == *id);
        let former = identity.former_cluster_ids.iter();
        let is_imported = identity.is_imported() && identity.kube_system_uid.is_some();
        let own = Some(&identity.cluster_id).filter(|_| !is_imported);
        let invalid = former.chain(own).find(|&id| !is_id(id));
        match invalid.cloned() {
            Some(id) => Err(format!("\"{id}\" is not a cluster ID")),
            None => Ok(identity),
        }
    }

    /// Returns the content of the object.
    pub(crate) fn bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = serde_json::to_vec_pretty(self)
            .map_err(|e| Error::internal(format!("an identity cannot be written as JSON: {e}")))?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Returns this identity with the recorded cluster and its former ones as former clusters.
    pub(crate) fn replacing(mut self, recorded: &Identity) -> Identity {
        let former = recorded.former_cluster_ids.iter();
        let own = Some(&recorded.cluster_id).filter(|id| !id.is_empty());
        for id in former.chain(own) {
            // A cluster that comes back is listed once, at its latest place.
            self.former_cluster_ids.retain(|f| f != id);
            if *id != self.cluster_id {
                self.former_cluster_ids.push(id.clone());
            }
        }
        self
    }

    /// Returns the cluster as human-readable text: the ID and the members' names, if there are any.
    pub fn describe_cluster(&self) -> String {
        match &self.kube_system_uid {
            Some(uid) if self.is_imported() => format!("with kube-system {uid}"),
            _ => format!("{}{}", self.cluster_id, members_suffix(&self.member_names)),
        }
    }

    /// Whether only snapshot files were imported, which do not tell the cluster's ID.
    fn is_imported(&self) -> bool {
        self.cluster_id.is_empty()
    }

    /// Returns whether two backups are of the same cluster, as far as their records tell.
    pub(crate) fn is_same_cluster(&self, other: &Identity) -> bool {
        match (&self.kube_system_uid, &other.kube_system_uid) {
            (Some(ours), Some(theirs)) => ours == theirs,
            _ => self.cluster_id == other.cluster_id,
        }
    }

    /// Returns whether the backup belongs to the cluster with this ID.
    pub fn is_of(&self, cluster_id: u64) -> bool {
        self.cluster_id == format!("{cluster_id:x}")
    }
}

/// What to do before a cluster writes to a prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// The prefix has no identity: record this cluster's.
    Record(Identity),
    /// The prefix belongs to this cluster.
    Known,
    /// The prefix belonged to another cluster, and this one takes over.
    TakeOver(Identity),
    /// The prefix belongs to another cluster.
    Refuse,
}

/// Decides by the recorded identity.
pub fn decide(
    recorded: Option<&Identity>,
    facts: &ClusterFacts,
    take_over: bool,
    now: DateTime<Utc>,
) -> Decision {
    let imported = recorded.filter(|r| r.is_imported());
    let identity = Identity {
        kube_system_uid: imported.and_then(|r| r.kube_system_uid.clone()),
        cluster_id: facts.hex_id(),
        member_names: facts.member_names.clone(),
        recorded_at: now.to_rfc3339_opts(SecondsFormat::Secs, true),
        former_cluster_ids: Vec::new(),
    };
    match recorded {
        None => Decision::Record(identity),
        Some(r) if r.is_imported() => Decision::Record(identity),
        Some(r) if r.is_of(facts.cluster_id) => Decision::Known,
        Some(r) if take_over => Decision::TakeOver(identity.replacing(r)),
        Some(_) => Decision::Refuse,
    }
}

/// Reads the identity of a backup. Returns `None` if none is recorded.
///
/// # Errors
/// Fails with `Configuration` if the object holds something else, or with an error of the store.
pub fn read(store: &Store) -> Result<Option<Identity>> {
    let Some(content) = store.read_small(IDENTITY, MOST_BYTES)? else {
        return Ok(None);
    };
    Identity::parse(&content).map(Some).map_err(|problem| {
        Reason::Configuration.error(format!(
            "{} is not a valid identity, so the cluster that this backup belongs to is unknown: {problem}. The next snapshot compares the histories and writes it anew",
            store.name(IDENTITY)
        ))
    })
}

/// Makes sure that a prefix belongs to this cluster before the cluster writes to it. The first cluster is recorded if
/// `may_record` says so, also in place of an object that cannot be read. With `take_over`, a prefix of another cluster
/// becomes this one's. Returns whether the cluster is recorded.
///
/// # Errors
/// Fails with `OtherCluster` if the prefix belongs to another cluster, or with the errors of `may_record` and of the
/// store.
pub fn claim(
    ctx: &Context,
    facts: &ClusterFacts,
    take_over: bool,
    may_record: impl FnOnce() -> Result<bool>,
) -> Result<bool> {
    let store = &ctx.store;
    let (recorded, unreadable) = match read(store) {
        Err(e) if e.reason() == Reason::Configuration => {
            // The version is that of an object that cannot be read, if it is the same after that.
            let version = store.version(IDENTITY)?;
            match read(store) {
                Err(again) if again.reason() == Reason::Configuration => (None, version),
                recorded => (recorded?, None),
            }
        }
        Ok(Some(r)) if r.is_imported() => (Some(r), store.version(IDENTITY)?),
        recorded => (recorded?, None),
    };
    match decide(recorded.as_ref(), facts, take_over, Utc::now()) {
        Decision::Known => return Ok(true),
        Decision::Refuse => {}
        Decision::Record(identity) => {
            if !may_record()? {
                return Ok(false);
            }
            let is_written = match unreadable {
                Some(version) => {
                    tracing::warn!(
                        "{} tells no cluster ID: it is replaced",
                        store.name(IDENTITY)
                    );
                    store.replace_version(IDENTITY, version, &identity.bytes()?)?
                }
                None => store.create_small(IDENTITY, &identity.bytes()?)? != Published::Taken,
            };
            if is_written {
                tracing::info!(
                    cluster_id = identity.cluster_id,
                    "{} is the backup of this cluster from now on",
                    store.url()
                );
            }
        }
        Decision::TakeOver(identity) => {
            store.replace_small(IDENTITY, &identity.bytes()?)?;
            tracing::warn!(
                cluster_id = identity.cluster_id,
                former = identity.former_cluster_ids.join(", "),
                "this cluster has taken {} over",
                store.url()
            );
        }
    }
    // Another first writer may have been faster, and some servers ignore the condition of a write.
    match read(store)? {
        Some(r) if r.is_of(facts.cluster_id) => Ok(true),
        Some(r) => Err(other_cluster_error(store, &r, facts)),
        None => Err(Reason::SnapshotVanished.error(format!(
            "{} was deleted right after it was written: run again",
            store.name(IDENTITY)
        ))),
    }
}

/// Records the cluster of imported snapshot files by the UID of its namespace `kube-system`, in place of `recorded` if there
/// is one. Returns the new record.
///
/// # Errors
/// Fails with the errors of the store.
pub(crate) fn record_imported(
    store: &Store,
    uid: &str,
    recorded: Option<&Identity>,
    now: DateTime<Utc>,
) -> Result<Identity> {
    let mut identity = Identity {
        cluster_id: String::new(),
        kube_system_uid: Some(uid.to_owned()),
        member_names: Vec::new(),
        recorded_at: now.to_rfc3339_opts(SecondsFormat::Secs, true),
        former_cluster_ids: Vec::new(),
    };
    match recorded {
        None => store.create_small(IDENTITY, &identity.bytes()?).map(drop)?,
        Some(recorded) => {
            identity = identity.replacing(recorded);
            store.replace_small(IDENTITY, &identity.bytes()?)?;
        }
    }
    Ok(identity)
}

/// Fails if a prefix belongs to another cluster. Returns whether a cluster is recorded. Writes nothing.
///
/// # Errors
/// Fails with `OtherCluster`, or with the errors of [`read`].
pub fn check(store: &Store, facts: &ClusterFacts) -> Result<bool> {
    match read(store)? {
        Some(r) if r.is_imported() => Ok(false),
        Some(r) if !r.is_of(facts.cluster_id) => Err(other_cluster_error(store, &r, facts)),
        recorded => Ok(recorded.is_some()),
    }
}

/// Returns the members' names as a suffix of a cluster's ID.
fn members_suffix(names: &[String]) -> String {
    if names.is_empty() {
        String::new()
    } else {
        format!(" (members {})", names.join(", "))
    }
}

/// Returns the error for a prefix that records no cluster, and whose snapshots differ from the history of this
/// cluster.
pub(crate) fn other_history_error(store: &Store, facts: &ClusterFacts, difference: &str) -> Error {
    Reason::OtherCluster.error(format!(
        "{} holds snapshots, records no cluster in {IDENTITY}, and is not the backup of cluster {}{} at {ENDPOINTS}: {difference}; nothing was saved. Check {ENDPOINTS} and {STORE}; if this cluster continues the backup (it was restored from it, or set back), give {TAKE_OVER} once",
        store.url(),
        facts.hex_id(),
        members_suffix(&facts.member_names)
    ))
}

fn other_cluster_error(store: &Store, recorded: &Identity, facts: &ClusterFacts) -> Error {
    let names = members_suffix(&facts.member_names);
    let since = match recorded.recorded_at.as_str() {
        "" => String::new(),
        at => format!(" since {at}"),
    };
    let was = if recorded.former_cluster_ids.contains(&facts.hex_id()) {
        ", from which this backup was taken over"
    } else {
        ""
    };
    Reason::OtherCluster.error(format!(
        "{} is the backup of cluster {}{since}, but the members at {ENDPOINTS} are of cluster {}{names}{was}: nothing was saved. Check {ENDPOINTS} and {STORE}; if this cluster has replaced the other (it was restored from this backup), give {TAKE_OVER} once. The backup's cluster is recorded in {}",
        store.url(),
        recorded.describe_cluster(),
        facts.hex_id(),
        store.name(IDENTITY)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(cluster_id: u64) -> ClusterFacts {
        ClusterFacts {
            cluster_id,
            member_names: vec!["m1".to_owned(), "m2".to_owned()],
        }
    }

    fn now() -> DateTime<Utc> {
        DateTime::from_timestamp(1_750_000_000, 5).unwrap()
    }

    #[test]
    fn the_first_cluster_is_recorded_and_another_refused() {
        let Decision::Record(first) = decide(None, &facts(0xa1), false, now()) else {
            panic!("not recorded");
        };
        assert_eq!(first.cluster_id, "a1");
        assert_eq!(first.recorded_at, "2025-06-15T15:06:40Z");
        assert_eq!(first.describe_cluster(), "a1 (members m1, m2)");
        assert_eq!(Identity::parse(&first.bytes().unwrap()).unwrap(), first);
        // Taking over one's own backup does nothing.
        for take_over in [false, true] {
            let again = decide(Some(&first), &facts(0xa1), take_over, now());
            assert_eq!(again, Decision::Known);
        }
        let other = decide(Some(&first), &facts(0xb2), false, now());
        assert_eq!(other, Decision::Refuse);
    }

    #[test]
    fn a_takeover_keeps_the_former_clusters() {
        let mut identity = match decide(None, &facts(1), true, now()) {
            Decision::Record(identity) => identity,
            other => panic!("{other:?}"),
        };
        for (next, former) in [
            (2, ["1"].as_slice()),
            (3, &["1", "2"]),
            (1, &["2", "3"]),
            (3, &["2", "1"]),
        ] {
            identity = match decide(Some(&identity), &facts(next), true, now()) {
                Decision::TakeOver(identity) => identity,
                other => panic!("{other:?}"),
            };
            assert_eq!(identity.cluster_id, next.to_string());
            assert_eq!(identity.former_cluster_ids, former);
        }
    }

    #[test]
    fn only_valid_identities_are_parsed() {
        for (content, ok) in [
            (r#"{"clusterId":"cdf818194e3a8c32"}"#, true),
            (
                r#"{"clusterId":"a","memberNames":["x"],"recordedAt":"","formerClusterIds":["b"],"more":1}"#,
                true,
            ),
            (r#"{"clusterId":""}"#, false),
            (r#"{"clusterId":"0a"}"#, false),
            (r#"{"clusterId":"A"}"#, false),
            (r#"{"clusterId":"a","formerClusterIds":["x"]}"#, false),
            (r#"{"clusterId":7}"#, false),
            ("{}", false),
            ("", false),
        ] {
            assert_eq!(Identity::parse(content.as_bytes()).is_ok(), ok, "{content}");
        }
    }
}
