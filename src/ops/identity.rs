//! Whose backup a prefix is: the cluster that first wrote to it, noted beside the snapshots.
//!
//! A cluster of another ID is refused before it writes anything, unless it is said to have taken over. It does
//! not tell histories apart (`snapshot::next`), nor who writes at this moment (`store::lock`). `ops::snapshot`
//! claims a prefix; `list`, `verify`, `restore` and `copy` read whose it is.

use crate::error::{Error, Reason, Result};
use crate::etcd::cluster::Cluster;
use crate::ops::Context;
use crate::store::{Published, Store};
use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Serialize};

/// The object, directly in the prefix: neither layout of snapshots lists it.
pub const IDENTITY: &str = "deltafold-identity.json";
/// It has some hundred bytes; more is none of ours.
const MOST_BYTES: u64 = 1 << 20;

/// Whose backup a prefix is, as its object has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Identity {
    /// The cluster's ID, hexadecimal, as etcdctl shows it.
    pub cluster_id: String,
    /// Its members' names when it was recorded, sorted.
    #[serde(default)]
    pub member_names: Vec<String>,
    /// When it was recorded: RFC 3339.
    #[serde(default)]
    pub recorded_at: String,
    /// The clusters that wrote here before, the oldest first.
    #[serde(default)]
    pub former_cluster_ids: Vec<String>,
}

/// What a live cluster says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterFacts {
    /// Its ID.
    pub cluster_id: u64,
    /// The names of the members that have one.
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
    /// Reads what an object holds.
    fn parse(content: &[u8]) -> Result<Identity, String> {
        let identity: Identity = serde_json::from_slice(content).map_err(|e| e.to_string())?;
        let is_id =
            |id: &String| u64::from_str_radix(id, 16).is_ok_and(|n| format!("{n:x}") == *id);
        let former = identity.former_cluster_ids.iter();
        let wrong = former.chain([&identity.cluster_id]).find(|&id| !is_id(id));
        match wrong.map(|id| format!("\"{id}\" is no cluster ID")) {
            Some(why) => Err(why),
            None => Ok(identity),
        }
    }

    pub(super) fn bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = serde_json::to_vec_pretty(self)
            .map_err(|e| Error::internal(format!("an identity that is no JSON: {e}")))?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// The same, in the place of what was recorded before: that cluster and its former ones are former ones of this.
    pub(super) fn after(mut self, recorded: &Identity) -> Identity {
        let former = recorded.former_cluster_ids.iter();
        for id in former.chain([&recorded.cluster_id]) {
            // One that comes back stands at its last time only.
            self.former_cluster_ids.retain(|f| f != id);
            if *id != self.cluster_id {
                self.former_cluster_ids.push(id.clone());
            }
        }
        self
    }

    /// Its cluster for people: the ID, and the members' names where there are any.
    pub fn cluster(&self) -> String {
        format!("{}{}", self.cluster_id, members(&self.member_names))
    }

    /// Whether it is the backup of the cluster with that ID.
    pub fn is_of(&self, cluster_id: u64) -> bool {
        self.cluster_id == format!("{cluster_id:x}")
    }
}

/// What is to be done about a prefix before a cluster writes to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// Nobody wrote to it, or somebody who did not say: it becomes this cluster's.
    Record(Identity),
    /// It is this cluster's.
    Known,
    /// It was another cluster's, and this one took over.
    TakeOver(Identity),
    /// It is another cluster's.
    Refuse,
}

/// Decides by what is recorded.
pub fn decide(
    recorded: Option<&Identity>,
    facts: &ClusterFacts,
    take_over: bool,
    now: DateTime<Utc>,
) -> Decision {
    let identity = Identity {
        cluster_id: facts.hex_id(),
        member_names: facts.member_names.clone(),
        recorded_at: now.to_rfc3339_opts(SecondsFormat::Secs, true),
        former_cluster_ids: Vec::new(),
    };
    match recorded {
        None => Decision::Record(identity),
        Some(r) if r.is_of(facts.cluster_id) => Decision::Known,
        Some(r) if take_over => Decision::TakeOver(identity.after(r)),
        Some(_) => Decision::Refuse,
    }
}

/// Whose backup a prefix is; `None` where nobody has recorded it.
///
/// # Errors
/// `Configuration` where the object holds something else; the store's.
pub fn read(store: &Store) -> Result<Option<Identity>> {
    let Some(content) = store.read_small(IDENTITY, MOST_BYTES)? else {
        return Ok(None);
    };
    Identity::parse(&content).map(Some).map_err(|why| {
        Reason::Configuration.error(format!(
            "{} does not tell whose backup this is: {why}; look at it, and delete it if this prefix is the right one: the next snapshot writes it anew",
            store.name(IDENTITY)
        ))
    })
}

/// Sees to it that a prefix is this cluster's before anything of it is written there; the first one to come
/// records that it is. `take_over`: also where it was another cluster's.
///
/// # Errors
/// `OtherCluster` where it is another cluster's; those of [`read`]; the store's.
pub fn claim(ctx: &Context, facts: &ClusterFacts, take_over: bool) -> Result<()> {
    let store = &ctx.store;
    let recorded = read(store)?;
    match decide(recorded.as_ref(), facts, take_over, Utc::now()) {
        Decision::Known => return Ok(()),
        Decision::Refuse => {}
        Decision::Record(identity) => match store.create_small(IDENTITY, &identity.bytes()?)? {
            Published::Created | Published::Identical => tracing::info!(
                cluster_id = identity.cluster_id,
                "{} is the backup of this cluster from now on",
                store.url()
            ),
            Published::Taken => {}
        },
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
    // Another first writer may have been faster, and some servers take a condition and ignore it.
    match read(store)? {
        Some(r) if r.is_of(facts.cluster_id) => Ok(()),
        Some(r) => Err(other_cluster(store, &r, facts)),
        None => Err(Reason::SnapshotVanished.error(format!(
            "{} was written and is gone: it was deleted meanwhile; run again",
            store.name(IDENTITY)
        ))),
    }
}

/// Fails where a prefix is recorded to be another cluster's; writes nothing.
///
/// # Errors
/// As [`claim`].
pub fn check(store: &Store, facts: &ClusterFacts) -> Result<()> {
    match read(store)? {
        Some(r) if !r.is_of(facts.cluster_id) => Err(other_cluster(store, &r, facts)),
        _ => Ok(()),
    }
}

fn members(names: &[String]) -> String {
    match names.is_empty() {
        true => String::new(),
        false => format!(" (members {})", names.join(", ")),
    }
}

fn other_cluster(store: &Store, recorded: &Identity, facts: &ClusterFacts) -> Error {
    let names = members(&facts.member_names);
    let since = match recorded.recorded_at.as_str() {
        "" => String::new(),
        at => format!(" since {at}"),
    };
    let was = match recorded.former_cluster_ids.contains(&facts.hex_id()) {
        true => ", which was taken over from",
        false => "",
    };
    Reason::OtherCluster.error(format!(
        "{} is the backup of cluster {}{since}, and --endpoints is cluster {}{names}{was}: nothing was saved. Check --endpoints and --store; if this cluster has taken the other's place (it was restored from this backup), say so once with --take-over. It is recorded in {}",
        store.url(),
        recorded.cluster(),
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
        assert_eq!(first.cluster(), "a1 (members m1, m2)");
        assert_eq!(Identity::parse(&first.bytes().unwrap()).unwrap(), first);
        // Without a change taking over does nothing.
        for take_over in [false, true] {
            let again = decide(Some(&first), &facts(0xa1), take_over, now());
            assert_eq!(again, Decision::Known);
        }
        let other = decide(Some(&first), &facts(0xb2), false, now());
        assert_eq!(other, Decision::Refuse);
    }

    #[test]
    fn who_took_over_keeps_the_former_ones() {
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
    fn what_is_no_identity_is_not_taken_for_one() {
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
