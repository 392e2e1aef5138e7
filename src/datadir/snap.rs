//! Writes and reads the `.snap` file: the raft snapshot with the members, and the index after which the log
//! begins.
//!
//! It holds no keys: they are in the database in the same folder. Sources: etcd's `snap/snapshotter.go`,
//! `snappb/snap.proto`, `v2store`, and raft's `raft.proto`.

use crate::base::protobuf::Value::{Bytes, Varint};
use crate::base::protobuf::{Value, message, take_field, take_varint};
use crate::datadir::install::Dir;
use crate::datadir::membership::go_json;
use crate::datadir::{Cluster, MemberId, TERM, corrupt, open_file, wal};
use crate::error::{Error, Result};
use crc_fast::crc32_iscsi;
use std::collections::BTreeMap;
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// The maximum size that is read. Files of etcd have some KiB, and some MiB with thousands of members.
const MAX_SIZE: u64 = 512 << 20;

/// The metadata of a raft snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Metadata {
    /// The raft index of the snapshot.
    pub index: u64,
    /// The raft term of the snapshot.
    pub term: u64,
    /// The voting members.
    pub voters: Vec<MemberId>,
    /// The learners.
    pub learners: Vec<MemberId>,
}

/// Writes `<term>-<index>.snap` (16 hexadecimal digits each) into `dir`, and syncs both.
/// Returns the path of the file.
///
/// # Errors
/// `TargetExists`; `Io`, `NoSpace`, `PermissionDenied`.
pub fn write(dir: &Dir, cluster: &Cluster) -> Result<PathBuf> {
    let name = format!("{TERM:016x}-{:016x}.snap", cluster.index());
    dir.write(&name, &encode(cluster), 0)
}

/// Encodes the file: a `snappb.Snapshot` with crc (1) and data (2), which is a `raftpb.Snapshot` with data
/// (1) and metadata (2). The bytes equal those of etcdutl 3.5.
pub fn encode(cluster: &Cluster) -> Vec<u8> {
    let conf_state = cluster.conf_state();
    let index = Varint(cluster.index());
    let metadata = message([(1, Bytes(&conf_state)), (2, index), (3, Varint(TERM))]);
    let store = v2_store(cluster);
    let snapshot = message([(1, Bytes(store.as_bytes())), (2, Bytes(&metadata))]);
    let crc = Varint(crc32_iscsi(&snapshot).into());
    message([(1, crc), (2, Bytes(&snapshot))])
}

/// Returns the store of etcd's old v2 API as JSON, which holds the members. Servers up to 3.7 still load it.
///
/// etcdutl 3.6 writes another value of one statistic (`getsFail` is 1); 3.7 also adds the members in random
/// order.
fn v2_store(cluster: &Cluster) -> String {
    const NO_EXPIRY: &str = r#""ExpireTime":"0001-01-01T00:00:00Z""#;
    // The capacity of the ring buffer with the history for v2 watchers; unused slots are written as null.
    const CAPACITY: usize = 1000;
    let node = |path: &str, index: usize, value: &str, children: &str| {
        format!(
            r#"{{"Path":"{path}","CreatedIndex":{index},"ModifiedIndex":{index},{NO_EXPIRY},"Value":{value},"Children":{children}}}"#
        )
    };
    // Go sorts the keys of a map by their text, while the indices follow the numeric order of the IDs.
    let mut children = BTreeMap::new();
    let mut events = Vec::new();
    for (m, index) in cluster.members().iter().zip(1..) {
        let path = format!("/0/members/{}", m.id);
        let attributes = format!("{path}/raftAttributes");
        let value = go_json(&format!(r#"{{"peerURLs":{}}}"#, m.peer_urls_json()));
        let leaf = node(&attributes, index, &value, "null");
        let member = node(
            &path,
            index,
            "\"\"",
            &format!(r#"{{"raftAttributes":{leaf}}}"#),
        );
        children.insert(m.id.to_string(), member);
        events.push(format!(
            r#"{{"action":"create","node":{{"key":"{attributes}","value":{value},"modifiedIndex":{index},"createdIndex":{index}}}}}"#
        ));
    }
    let n = events.len();
    events.resize(CAPACITY.max(n), "null".to_owned());
    let children: Vec<String> = children
        .iter()
        .map(|(k, v)| format!("\"{k}\":{v}"))
        .collect();
    let members = node(
        "/0/members",
        1,
        "\"\"",
        &format!("{{{}}}", children.join(",")),
    );
    let zero = node("/0", 0, "\"\"", &format!(r#"{{"members":{members}}}"#));
    let one = node("/1", 0, "\"\"", "{}");
    let root = node("/", 0, "\"\"", &format!(r#"{{"0":{zero},"1":{one}}}"#));
    let (events, capacity) = (events.join(","), CAPACITY.max(n));
    let back = n % capacity;
    format!(
        r#"{{"Root":{root},"WatcherHub":{{"EventHistory":{{"Queue":{{"Events":[{events}],"Size":{n},"Front":0,"Back":{back},"Capacity":{capacity}}},"StartIndex":1,"LastIndex":{n}}}}},"CurrentIndex":{n},"Stats":{{"getsSuccess":0,"getsFail":0,"setsSuccess":0,"setsFail":0,"deleteSuccess":0,"deleteFail":0,"updateSuccess":0,"updateFail":0,"createSuccess":{n},"createFail":0,"compareAndSwapSuccess":0,"compareAndSwapFail":0,"compareAndDeleteSuccess":0,"compareAndDeleteFail":0,"expireCount":0,"watchers":0}},"CurrentVersion":2}}"#
    )
}

/// Reads the metadata of a `.snap` file and checks its CRC-32C. It reads at most 512 MiB.
///
/// # Errors
/// `CorruptDataDir` if the file is empty, too long, damaged or not a snapshot; `Io`, `PermissionDenied`.
pub fn read(path: &Path) -> Result<Metadata> {
    let failed = |e| Error::io(format!("read {}", path.display()), e);
    let mut bytes = Vec::new();
    let file = open_file(path).map_err(failed)?;
    file.take(MAX_SIZE + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > MAX_SIZE {
        return Err(corrupt(format!(
            "{} is longer than 512 MiB",
            path.display()
        )));
    }
    decode(&bytes).map_err(|e| e.at(path.display()))
}

/// Decodes the bytes of a `.snap` file.
///
/// # Errors
/// `CorruptDataDir`.
pub fn decode(bytes: &[u8]) -> Result<Metadata> {
    let (crc, data) =
        parse_outer(bytes).ok_or_else(|| corrupt("the file is not a valid snappb.Snapshot"))?;
    if data.is_empty() || crc == 0 {
        return Err(corrupt("the raft snapshot is empty"));
    }
    let computed = crc32_iscsi(data);
    if crc != computed {
        return Err(corrupt(format!(
            "the CRC-32C of the raft snapshot is {computed:08x}, but the file says {crc:08x}"
        )));
    }
    parse_snapshot(data).ok_or_else(|| corrupt("the file holds no valid raftpb.Snapshot"))
}

fn parse_outer(mut b: &[u8]) -> Option<(u32, &[u8])> {
    let (mut crc, mut data) = (0, &[][..]);
    while !b.is_empty() {
        match take_field(&mut b)? {
            (1, Varint(n)) => crc = u32::try_from(n).ok()?,
            (2, Bytes(x)) => data = x,
            (0..=2, _) => return None,
            _ => {}
        }
    }
    Some((crc, data))
}

fn parse_snapshot(mut b: &[u8]) -> Option<Metadata> {
    let mut m = Metadata::default();
    while !b.is_empty() {
        match take_field(&mut b)? {
            (1, Bytes(_)) => {}
            (2, Bytes(x)) => parse_metadata(x, &mut m)?,
            (0..=2, _) => return None,
            _ => {}
        }
    }
    Some(m)
}

fn parse_metadata(mut b: &[u8], m: &mut Metadata) -> Option<()> {
    while !b.is_empty() {
        match take_field(&mut b)? {
            (1, Bytes(x)) => parse_conf_state(x, m)?,
            (2, Varint(n)) => m.index = n,
            (3, Varint(n)) => m.term = n,
            (0..=3, _) => return None,
            _ => {}
        }
    }
    Some(())
}

fn parse_conf_state(mut b: &[u8], m: &mut Metadata) -> Option<()> {
    while !b.is_empty() {
        let (field, value) = take_field(&mut b)?;
        let ids = match field {
            1 => &mut m.voters,
            2 => &mut m.learners,
            0 => return None,
            _ => continue,
        };
        match value {
            Varint(n) => ids.push(MemberId(n)),
            // Newer protobuf versions may pack the IDs into one field.
            Bytes(mut packed) => {
                while !packed.is_empty() {
                    ids.push(MemberId(take_varint(&mut packed)?));
                }
            }
            Value::Fixed => return None,
        }
    }
    Some(())
}

/// Returns the `.snap` files of a folder, newest first. Like etcd, it sorts them by name.
///
/// # Errors
/// `Io`, `PermissionDenied`.
pub fn list(dir: &Path) -> Result<Vec<PathBuf>> {
    let failed = |e| Error::io(format!("list {}", dir.display()), e);
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension().is_some_and(|e| e == "snap") {
            paths.push(path);
        }
    }
    paths.sort();
    paths.reverse();
    Ok(paths)
}

/// Returns the snapshot that etcd would start from: the newest readable one that the WAL records as
/// committed. Like etcd, it skips damaged ones. If it returns `None`, etcd reads the log from the beginning,
/// which works as long as the first segment of the WAL still exists.
///
/// # Errors
/// `Io`, `PermissionDenied`.
pub fn newest(dir: &Path, wal: &wal::Summary) -> Result<Option<Metadata>> {
    for path in list(dir)? {
        match read(&path) {
            Ok(m) if wal.knows(m.index, m.term) => return Ok(Some(m)),
            Ok(_) => {}
            Err(e) if e.reason().is_bad_data() => {}
            Err(e) => return Err(e),
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datadir::membership::tests::three;

    #[test]
    fn a_written_snapshot_can_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let cluster = three("a");
        let opened = Dir::open(dir.path()).unwrap();
        let path = write(&opened, &cluster).unwrap();
        assert!(path.ends_with("0000000000000001-0000000000000003.snap"));
        let m = read(&path).unwrap();
        let ids: Vec<MemberId> = cluster.members().iter().map(|m| m.id).collect();
        assert_eq!((m.index, m.term, m.voters), (3, 1, ids));
        assert_eq!(m.learners, []);
        let json: serde_json::Value = serde_json::from_str(&v2_store(&cluster)).unwrap();
        assert_eq!(
            json["WatcherHub"]["EventHistory"]["Queue"]["Events"]
                .as_array()
                .unwrap()
                .len(),
            1000
        );
        assert_eq!(
            write(&opened, &cluster).unwrap_err().reason(),
            crate::Reason::TargetExists
        );
        assert_eq!(list(dir.path()).unwrap(), [path]);
    }

    #[test]
    fn every_flipped_bit_and_every_truncation_is_an_error() {
        let good = encode(&three("a"));
        for i in 0..good.len() {
            let mut bad = good.clone();
            bad[i] ^= 1 << (i % 8);
            assert!(decode(&bad).is_err(), "byte {i}");
            assert!(decode(&good[..i]).is_err(), "cut at {i}");
        }
    }

    #[test]
    fn random_bytes_never_panic() {
        let mut rng = fastrand::Rng::with_seed(7);
        for _ in 0..20_000 {
            let b: Vec<u8> = (0..rng.usize(..60)).map(|_| rng.u8(..)).collect();
            let _ = decode(&b);
            let _ = parse_snapshot(&b);
            let _ = parse_conf_state(&b, &mut Metadata::default());
        }
    }
}
