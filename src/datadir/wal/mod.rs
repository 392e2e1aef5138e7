//! The write-ahead log: writes the first segment of a restored member ([`create`]), and reads the log of any
//! member.
//!
//! It applies no entries; of requests it only knows whether they can create a revision. Sources: etcd's `storage/wal`
//! (wal.go, decoder.go, encoder.go, repair.go) and raft's `raft.proto`.

mod encode;
mod record_reader;
mod segments;

pub use encode::{create, encode};
pub use segments::segment_paths;

use crate::base::protobuf::Value::{Bytes, Varint};
use crate::base::protobuf::take_field;
use crate::datadir::{ClusterId, MemberId, corrupt};
use crate::error::Result;
use crc_fast::{CrcAlgorithm, Digest};
use record_reader::RecordReader;
use std::path::{Path, PathBuf};

// The types of records.
const METADATA: u64 = 1;
const ENTRY: u64 = 2;
const STATE: u64 = 3;
const CRC: u64 = 4;
const SNAPSHOT: u64 = 5;

/// Returns a CRC-32C that continues from `crc`.
fn digest(crc: u32) -> Digest {
    Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc))
}

fn sum(digest: &Digest) -> u32 {
    digest.finalize() as u32
}

/// An incomplete record at the end of the last segment, left by a write that was interrupted. etcd removes it
/// when it starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TornRecord {
    /// The segment.
    pub path: PathBuf,
    /// The offset of the record, at which etcd truncates the segment.
    pub offset: u64,
}

/// The hard state of raft; all fields are 0 if none was saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HardState {
    /// The current term of the member.
    pub term: u64,
    /// The ID of the member that it voted for in that term, or 0.
    pub vote: u64,
    /// The highest index that the member had saved as committed. Later entries may be committed as well: etcd
    /// saves the index only together with the next write.
    pub commit: u64,
}

/// A record of a raft snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotRecord {
    /// The raft index of the snapshot; 0 in the first record of a new log.
    pub index: u64,
    /// The raft term of the snapshot.
    pub term: u64,
}

/// A summary of a whole log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// The member that the log belongs to.
    pub node_id: MemberId,
    /// The cluster of the member.
    pub cluster_id: ClusterId,
    /// The last hard state.
    pub hard_state: HardState,
    /// All snapshot records, in the order in which they were written.
    pub snapshots: Vec<SnapshotRecord>,
    /// The index of the first entry, or 0 if there are no entries.
    pub first_index: u64,
    /// The index of the last entry, or 0 if there are no entries.
    pub last_index: u64,
    /// The number of entries, without those that later entries replaced.
    pub entries: u64,
    /// The incomplete record at the end, if there is one.
    pub torn: Option<TornRecord>,
}

impl Summary {
    /// Whether the log holds a committed record of this snapshot, so that etcd can start from it.
    pub fn knows(&self, index: u64, term: u64) -> bool {
        index <= self.hard_state.commit && self.snapshots.contains(&SnapshotRecord { index, term })
    }

    /// Returns the index of the newest committed snapshot, or 0 if there is none.
    pub fn snapshot_index(&self) -> u64 {
        let committed = |s: &&SnapshotRecord| s.index <= self.hard_state.commit;
        let indices = self.snapshots.iter().filter(committed).map(|s| s.index);
        indices.max().unwrap_or(0)
    }
}

/// The type of an entry: a number of `raftpb.EntryType`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryKind(pub u64);

impl EntryKind {
    const CONF_CHANGE: u64 = 1;

    /// Whether the entry is a request to etcd (for keys, leases, users and so on) or empty.
    pub fn is_normal(self) -> bool {
        self.0 == 0
    }
}

/// An entry of raft's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogEntry<'a> {
    /// The index in the log, from 1.
    pub index: u64,
    /// The term in which a leader proposed the entry.
    pub term: u64,
    /// The type of the entry.
    pub kind: EntryKind,
    /// The request, or the configuration change; empty in the first entry of a leader.
    pub data: &'a [u8],
}

impl LogEntry<'_> {
    /// Whether etcd can create a revision when it applies the entry. It never creates more than one.
    pub fn may_make_revision(&self) -> bool {
        self.kind.is_normal() && request_may_make_revision(self.data)
    }
}

/// Whether a request (`etcdserverpb.InternalRaftRequest`) can create a revision. That is true of a put, a
/// delete, a transaction, the revocation of a lease (which deletes its keys), and of every unknown request.
pub fn request_may_make_revision(mut data: &[u8]) -> bool {
    while !data.is_empty() {
        match take_field(&mut data) {
            // Fields that create no revision: ID and header; v2, range; compaction, lease_grant; alarm,
            // lease_checkpoint; auth_… and authenticate; cluster_version_set to downgrade_info_set;
            // downgrade_version_test.
            Some((
                1
                | 100
                | 2
                | 3
                | 7
                | 8
                | 10
                | 11
                | 1000
                | 1011..=1013
                | 1100..=1107
                | 1200..=1204
                | 1300..=1302
                | 9900,
                _,
            )) => {}
            // All others, including lease_revoke (9).
            _ => return true,
        }
    }
    false
}

/// Reads and checks a whole log. It holds one record at a time.
///
/// It refuses every log that etcd refuses, and also wrong CRCs, lengths and fields that etcd happens to
/// accept. An incomplete record at the end of the last segment is not an error: see [`Summary::torn`].
///
/// # Errors
/// `CorruptDataDir` if there is no segment, a segment is missing or damaged, entries are missing, or the log
/// ends before the committed index; `Io`, `PermissionDenied`.
pub fn read(dir: &Path) -> Result<Summary> {
    Ok(scan(dir)?.0)
}

/// Calls `each` for every entry above `after_index`, in order, except those that later entries replaced. It
/// reads the log twice; nobody may write to it meanwhile.
///
/// # Errors
/// As [`read`]; the errors of `each`.
pub fn for_each_entry(
    dir: &Path,
    after_index: u64,
    each: impl FnMut(&LogEntry) -> Result<()>,
) -> Result<Summary> {
    let (summary, truncations) = scan(dir)?;
    for_each_current_entry(dir, &truncations, after_index, each)?;
    Ok(summary)
}

fn for_each_current_entry(
    dir: &Path,
    truncations: &[Truncation],
    after_index: u64,
    mut each: impl FnMut(&LogEntry) -> Result<()>,
) -> Result<()> {
    let mut reader = RecordReader::open(dir)?;
    let mut truncations = truncations.iter().peekable();
    let mut ordinal = 0;
    while let Some(record) = reader.next()? {
        if record.kind != ENTRY {
            continue;
        }
        let Some(entry) = parse_entry(record.data) else {
            return Err(reader.damaged("invalid log entry"));
        };
        while truncations.next_if(|t| t.ordinal <= ordinal).is_some() {}
        ordinal += 1;
        // The next truncation has the lowest index of all that follow.
        let replaced = truncations.peek().is_some_and(|t| entry.index >= t.index);
        if !replaced && entry.index > after_index {
            each(&entry)?;
        }
    }
    Ok(())
}

/// Upper bounds of the number of revisions that a log can add to a database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PendingRevisions {
    /// The revisions of entries up to the saved commit index.
    pub committed: u64,
    /// The revisions of all entries. The only member of a cluster commits all of them when it starts, and
    /// clients may have received responses for some: etcd applies an entry before it saves that the entry is
    /// committed.
    pub logged: u64,
}

/// Counts the revisions in the log that a database can lack. The database has applied the entries up to
/// `consistent_index` (a value in its bucket `meta`; 0 if there is none).
///
/// # Errors
/// As [`read`]; `CorruptDataDir` also if entries are missing between the database and the log.
pub fn pending_revisions(dir: &Path, consistent_index: u64) -> Result<PendingRevisions> {
    let (log, truncations) = scan(dir)?;
    let end = log.last_index.max(log.snapshot_index());
    let is_contiguous = log.entries > 0 && log.first_index <= consistent_index.saturating_add(1);
    if consistent_index < end && !is_contiguous {
        return Err(corrupt(format!(
            "the database has applied the entries up to {consistent_index}, but {} begins at {} and \
             ends at {end}: entries are missing between them",
            dir.display(),
            log.first_index
        )));
    }
    let mut pending = PendingRevisions {
        committed: 0,
        logged: 0,
    };
    for_each_current_entry(dir, &truncations, consistent_index, |entry| {
        if entry.may_make_revision() {
            pending.logged += 1;
            pending.committed += u64::from(entry.index <= log.hard_state.commit);
        }
        Ok(())
    })?;
    Ok(pending)
}

/// Returns [`PendingRevisions::logged`]: the maximum number of revisions that a member has beyond those of
/// its database, which has applied the entries up to `consistent_index`.
///
/// # Errors
/// As [`pending_revisions`].
pub fn revisions_at_most(dir: &Path, consistent_index: u64) -> Result<u64> {
    Ok(pending_revisions(dir, consistent_index)?.logged)
}

/// A point at which a new leader replaced the end of the log: earlier entries with this index or a higher one
/// are void.
struct Truncation {
    /// The number of entries before that point, counted over the whole log.
    ordinal: u64,
    index: u64,
}

/// The entries and snapshots of a log, while it is scanned.
#[derive(Default)]
struct LogScan {
    snapshots: Vec<SnapshotRecord>,
    /// The indices of the first and the last entry; 0 if there are none.
    first: u64,
    last: u64,
    /// The index of the newest snapshot, committed or not.
    newest_snapshot: Option<u64>,
    /// Truncations with ascending ordinals and indices; those that others make redundant are dropped.
    truncations: Vec<Truncation>,
    /// The number of entries so far.
    ordinal: u64,
}

impl LogScan {
    /// Adds an entry.
    ///
    /// # Errors
    /// A phrase that says which entries are missing before it.
    fn add_entry(&mut self, index: u64) -> std::result::Result<(), String> {
        // If the leader sent a snapshot, the log continues after that snapshot.
        let reach = self.newest_snapshot.unwrap_or(0).max(self.last);
        let has_begun = self.last > 0 || self.newest_snapshot.is_some();
        if has_begun && index > reach + 1 {
            return Err(format!(
                "entry {index} follows entry {}: entries are missing",
                self.last
            ));
        }
        if self.last > 0 && index > self.last + 1 {
            self.truncate_from(0);
            self.first = index;
        } else if self.last > 0 && index <= self.last {
            self.truncate_from(index);
        }
        if self.first == 0 || index < self.first {
            self.first = index;
        }
        self.last = index;
        self.ordinal += 1;
        Ok(())
    }

    fn truncate_from(&mut self, index: u64) {
        while self.truncations.last().is_some_and(|t| t.index >= index) {
            self.truncations.pop();
        }
        let ordinal = self.ordinal;
        self.truncations.push(Truncation { ordinal, index });
    }

    fn add_snapshot(&mut self, snapshot: SnapshotRecord) {
        self.newest_snapshot = self.newest_snapshot.max(Some(snapshot.index));
        self.snapshots.push(snapshot);
    }
}

/// Reads the whole log once. Returns its summary, and the truncations that tell which entries are void.
fn scan(dir: &Path) -> Result<(Summary, Vec<Truncation>)> {
    let mut reader = RecordReader::open(dir)?;
    let mut metadata: Option<Vec<u8>> = None;
    let mut hard_state = HardState::default();
    let mut log = LogScan::default();
    while let Some(record) = reader.next()? {
        match record.kind {
            METADATA => match &metadata {
                None => metadata = Some(record.data.to_vec()),
                Some(first) if first == record.data => {}
                Some(_) => {
                    return Err(
                        reader.damaged("the metadata differs from that of an earlier segment")
                    );
                }
            },
            ENTRY => match parse_entry(record.data) {
                Some(entry) if entry.index > 0 && entry.index < u64::MAX => {
                    let index = entry.index;
                    log.add_entry(index).map_err(|e| reader.damaged(e))?;
                }
                _ => return Err(reader.damaged("invalid log entry")),
            },
            STATE => {
                hard_state =
                    parse_state(record.data).ok_or_else(|| reader.damaged("invalid hard state"))?;
            }
            SNAPSHOT => {
                let snapshot = parse_snapshot(record.data)
                    .filter(|s| s.index < u64::MAX)
                    .ok_or_else(|| reader.damaged("invalid snapshot record"))?;
                log.add_snapshot(snapshot);
            }
            kind => return Err(reader.damaged(format!("unknown record type {kind}"))),
        }
    }
    let at = |message: String| corrupt(format!("{}: {message}", dir.display()));
    let (node_id, cluster_id) = metadata
        .as_deref()
        .and_then(parse_ids)
        .ok_or_else(|| at("the write-ahead log does not name its member".to_owned()))?;
    let (first, last) = (log.first, log.last);
    let summary = Summary {
        node_id: MemberId(node_id),
        cluster_id: ClusterId(cluster_id),
        hard_state,
        snapshots: log.snapshots,
        first_index: first,
        last_index: last,
        entries: if last == 0 { 0 } else { last - first + 1 },
        torn: reader.into_torn(),
    };
    let start = summary.snapshot_index();
    if hard_state.commit > last.max(start) {
        return Err(at(format!(
            "the log ends at entry {}, but {} are committed: its end is lost",
            last.max(start),
            hard_state.commit
        )));
    }
    if first > start + 1 {
        return Err(at(format!(
            "the log begins at entry {first}, but its newest committed snapshot is at entry {start}"
        )));
    }
    Ok((summary, log.truncations))
}

/// Decodes a `raftpb.Entry`: type (1), term (2), index (3), data (4).
fn parse_entry(mut b: &[u8]) -> Option<LogEntry<'_>> {
    let mut entry = LogEntry {
        index: 0,
        term: 0,
        kind: EntryKind(0),
        data: &[],
    };
    while !b.is_empty() {
        match take_field(&mut b)? {
            (1, Varint(n)) => entry.kind = EntryKind(n),
            (2, Varint(n)) => entry.term = n,
            (3, Varint(n)) => entry.index = n,
            (4, Bytes(x)) => entry.data = x,
            (0..=4, _) => return None,
            _ => {}
        }
    }
    Some(entry)
}

/// Decodes the fields 1, 2 and 3 of a message if they are integers. Missing ones are 0, and others are
/// skipped.
fn parse_integers(mut b: &[u8]) -> Option<[u64; 3]> {
    let mut n = [0; 3];
    while !b.is_empty() {
        match take_field(&mut b)? {
            (0, _) => return None,
            (field @ 1..=3, Varint(x)) => n[field as usize - 1] = x,
            _ => {}
        }
    }
    Some(n)
}

/// Decodes a `raftpb.HardState`: term (1), vote (2), commit (3).
fn parse_state(b: &[u8]) -> Option<HardState> {
    let [term, vote, commit] = parse_integers(b)?;
    Some(HardState { term, vote, commit })
}

/// Decodes a `walpb.Snapshot`: index (1), term (2), conf_state (3).
fn parse_snapshot(b: &[u8]) -> Option<SnapshotRecord> {
    let [index, term, _] = parse_integers(b)?;
    Some(SnapshotRecord { index, term })
}

/// Decodes an `etcdserverpb.Metadata`: NodeID (1), ClusterID (2).
fn parse_ids(b: &[u8]) -> Option<(u64, u64)> {
    let [node, cluster, _] = parse_integers(b)?;
    Some((node, cluster))
}

#[cfg(test)]
mod tests;
