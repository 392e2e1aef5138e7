//! The write-ahead log: the first segment of a restored member, and a reader of any member's log.
//!
//! It applies no entry; of their requests it knows only which can make a revision. `ops` calls it.
//! Sources: etcd's `storage/wal` (wal.go, decoder.go, encoder.go, repair.go) and raft's `raft.proto`.

use crate::base::protobuf::Value::{Bytes, Varint};
use crate::base::protobuf::{message, take_field};
use crate::datadir::{Cluster, ClusterId, MemberId, TERM, corrupt, write_new};
use crate::error::{Error, Result};
use crc_fast::{CrcAlgorithm, Digest};
use std::fs::{self, File};
use std::io::{BufReader, ErrorKind, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

const METADATA: u64 = 1;
const ENTRY: u64 = 2;
const STATE: u64 = 3;
const CRC: u64 = 4;
const SNAPSHOT: u64 = 5;

/// Bytes of a segment as etcd lays it out; it cuts a new one when this is reached.
const SEGMENT_SIZE: u64 = 64_000_000;
/// No record may be longer: etcd's are as long as the largest request, 1.5 MiB unless configured.
const MAX_RECORD: u64 = 512 << 20;
/// What a disk writes at once. A torn write leaves some sectors zero.
const SECTOR: u64 = 512;

// Writing

/// Writes the only segment of a restored member into `dir`, which must be there, and syncs both.
///
/// The file is as long as etcd's, 64 MB, but sparse: etcd takes the room when it opens it.
///
/// # Errors
/// `TargetExists`; `Io`, `NoSpace`, `PermissionDenied`.
pub fn create(dir: &Path, cluster: &Cluster) -> Result<PathBuf> {
    write_new(dir, &segment_name(0, 0), &encode(cluster), SEGMENT_SIZE)
}

/// The records of that segment: CRC, metadata, an empty snapshot, a configuration change for each
/// member (sorted by ID, from index 1), the hard state with a vote for the first of them, and the
/// snapshot that is in the `.snap` file. They are those of etcdutl 3.5 and 3.6; 3.7 leaves out two
/// zero fields (the change's ID and `auto_leave`).
pub fn encode(cluster: &Cluster) -> Vec<u8> {
    let mut log = Encoder {
        crc: digest(0),
        out: Vec::new(),
    };
    log.record(CRC, None);
    log.record(METADATA, Some(&cluster.metadata()));
    log.record(SNAPSHOT, Some(&snapshot(0, 0, None)));
    for (m, index) in cluster.members().iter().zip(1..) {
        let entry = [EntryKind::CONF_CHANGE, TERM, index];
        log.record(ENTRY, Some(&numbers(entry, Some(&m.conf_change()))));
    }
    let state = [TERM, cluster.members()[0].id.0, cluster.index()];
    log.record(STATE, Some(&numbers(state, None)));
    let conf_state = cluster.conf_state();
    let last = snapshot(cluster.index(), TERM, Some(&conf_state));
    log.record(SNAPSHOT, Some(&last));
    log.out
}

/// `walpb.Snapshot`.
fn snapshot(index: u64, term: u64, conf_state: Option<&[u8]>) -> Vec<u8> {
    numbers([index, term], conf_state)
}

/// A message of integers from field 1 on, and bytes in the field behind them.
fn numbers<const N: usize>(numbers: [u64; N], bytes: Option<&[u8]>) -> Vec<u8> {
    let numbers = (1..).zip(numbers.map(Varint));
    let bytes = bytes.map(|b| (N as u64 + 1, Bytes(b)));
    message(numbers.chain(bytes))
}

struct Encoder {
    crc: Digest,
    out: Vec<u8>,
}

impl Encoder {
    /// Appends a frame: length and padding, `walpb.Record`, zeros up to a multiple of 8.
    fn record(&mut self, kind: u64, data: Option<&[u8]>) {
        self.crc.update(data.unwrap_or_default());
        let record = numbers([kind, u64::from(sum(&self.crc))], data);
        let padding = record.len().next_multiple_of(8) - record.len();
        let mut length = record.len() as u64;
        if padding > 0 {
            length |= (0x80 | padding as u64) << 56;
        }
        self.out.extend_from_slice(&length.to_le_bytes());
        self.out.extend_from_slice(&record);
        self.out.resize(self.out.len() + padding, 0);
    }
}

/// A CRC-32C that goes on from `crc`.
fn digest(crc: u32) -> Digest {
    Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc))
}

fn sum(digest: &Digest) -> u32 {
    digest.finalize() as u32
}

// Segments

fn segment_name(seq: u64, index: u64) -> String {
    format!("{seq:016x}-{index:016x}.wal")
}

/// The sequence number of a segment; `None` for any other name.
fn parse_segment_name(name: &str) -> Option<u64> {
    let (seq, index) = name.strip_suffix(".wal")?.split_once('-')?;
    let hex = |s: &str| {
        let digits = s.len() == 16 && s.bytes().all(|c| c.is_ascii_hexdigit());
        digits.then(|| u64::from_str_radix(s, 16).ok()).flatten()
    };
    hex(index)?;
    hex(seq)
}

/// The segments of `dir`, oldest first; other files are passed over. None where there is no such folder.
///
/// # Errors
/// `Io`, `PermissionDenied`.
pub fn segment_paths(dir: &Path) -> Result<Vec<PathBuf>> {
    Ok(segments(dir)?.into_iter().map(|s| s.1).collect())
}

fn segments(dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let failed = |e| Error::io(format!("list {}", dir.display()), e);
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(Vec::new());
        }
        Err(e) => return Err(failed(e)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        if let Some(seq) = entry.file_name().to_str().and_then(parse_segment_name) {
            found.push((seq, entry.path()));
        }
    }
    found.sort();
    Ok(found)
}

// Reading

/// Where the last segment ends in a record that was never written as a whole. etcd cuts it off when it
/// starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Torn {
    /// The segment.
    pub path: PathBuf,
    /// The byte that it would be cut at.
    pub offset: u64,
}

/// Raft's hard state; all zero where none was saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HardState {
    /// The term that the member was in.
    pub term: u64,
    /// The ID of the member that it voted for in that term, or 0.
    pub vote: u64,
    /// The highest index that it knew to be committed. More may be: etcd saves it with the next write.
    pub commit: u64,
}

/// A record that a snapshot was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotRecord {
    /// The raft index of the snapshot; 0 in the record that a new log begins with.
    pub index: u64,
    /// Its raft term.
    pub term: u64,
}

/// What a log says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// The member that it belongs to.
    pub node_id: MemberId,
    /// The member's cluster.
    pub cluster_id: ClusterId,
    /// The last hard state.
    pub hard_state: HardState,
    /// Every snapshot record, in the order in which they were written.
    pub snapshots: Vec<SnapshotRecord>,
    /// The first index of the log, or 0 where it has no entries.
    pub first_index: u64,
    /// The last index of the log, or 0 where it has no entries.
    pub last_index: u64,
    /// How many entries there are from the first to the last, those replaced by later ones not counted.
    pub entries: u64,
    /// Where a torn record was met.
    pub torn: Option<Torn>,
}

impl Summary {
    /// Whether the log holds a committed record of that snapshot, so that etcd would start from it.
    pub fn knows(&self, index: u64, term: u64) -> bool {
        index <= self.hard_state.commit && self.snapshots.contains(&SnapshotRecord { index, term })
    }

    /// The index of the newest committed snapshot; 0 where there is none.
    pub fn snapshot_index(&self) -> u64 {
        let committed = |s: &&SnapshotRecord| s.index <= self.hard_state.commit;
        let indices = self.snapshots.iter().filter(committed).map(|s| s.index);
        indices.max().unwrap_or(0)
    }
}

/// What an entry is for: the number in `raftpb.EntryType`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryKind(pub u64);

impl EntryKind {
    const CONF_CHANGE: u64 = 1;

    /// A request to the keyspace, the leases, the users and so on; or empty.
    pub fn is_normal(self) -> bool {
        self.0 == 0
    }
}

/// An entry of raft's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Its place in the log, from 1.
    pub index: u64,
    /// The term in which a leader proposed it.
    pub term: u64,
    /// What it is for.
    pub kind: EntryKind,
    /// The request, or the change of the members; empty in the first entry of a leader.
    pub data: &'a [u8],
}

impl Entry<'_> {
    /// Whether applying it can make a revision. It never makes more than one.
    pub fn may_make_revision(&self) -> bool {
        self.kind.is_normal() && request_may_make_revision(self.data)
    }
}

/// Whether a request (`etcdserverpb.InternalRaftRequest`) can make a revision: a put, a delete, a
/// transaction, the end of a lease (which deletes its keys), or anything that is not known not to.
pub fn request_may_make_revision(mut data: &[u8]) -> bool {
    while !data.is_empty() {
        match take_field(&mut data) {
            // ID and header; v2, range; compaction, lease_grant; alarm, lease_checkpoint; auth_… and
            // authenticate; cluster_version_set to downgrade_info_set; downgrade_version_test.
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
            // lease_revoke (9) too.
            _ => return true,
        }
    }
    false
}

/// Reads a whole log, each record once, one at a time.
///
/// All that etcd would refuse is an error, and a CRC, a length or a field that etcd would let pass by
/// luck. A torn end of the last segment is none: see [`Summary::torn`].
///
/// # Errors
/// `CorruptDataDir` where there is no segment, one is missing or damaged, entries are missing, or more
/// is committed than is there; `Io`, `PermissionDenied`.
pub fn read(dir: &Path) -> Result<Summary> {
    Ok(survey(dir)?.0)
}

/// Calls `f` with each entry above `after_index`, in order; those that a later one replaced are left
/// out. Reads the log twice. Nobody may write to it meanwhile.
///
/// # Errors
/// As [`read`]; and what `f` returns.
pub fn for_each_entry(
    dir: &Path,
    after_index: u64,
    f: impl FnMut(&Entry) -> Result<()>,
) -> Result<Summary> {
    let (summary, cuts) = survey(dir)?;
    walk(dir, &cuts, after_index, f)?;
    Ok(summary)
}

fn walk(
    dir: &Path,
    cuts: &[Cut],
    after_index: u64,
    mut f: impl FnMut(&Entry) -> Result<()>,
) -> Result<()> {
    let mut reader = Reader::open(dir)?;
    let mut cuts = cuts.iter().peekable();
    let mut ordinal = 0;
    while let Some(record) = reader.next()? {
        if record.kind != ENTRY {
            continue;
        }
        let Some(entry) = parse_entry(record.data) else {
            return Err(reader.damage("an entry is none"));
        };
        while cuts.next_if(|cut| cut.ordinal <= ordinal).is_some() {}
        ordinal += 1;
        // Of the cuts behind an entry the first has the lowest index.
        let replaced = cuts.peek().is_some_and(|cut| entry.index >= cut.index);
        if !replaced && entry.index > after_index {
            f(&entry)?;
        }
    }
    Ok(())
}

/// How many revisions a log can add to a database: upper bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pending {
    /// Of the entries up to the last saved commit index.
    pub committed: u64,
    /// Of all entries. A member alone commits them all when it starts, and has answered clients for
    /// some: etcd applies an entry before it saves that it is committed.
    pub logged: u64,
}

/// How many revisions the log holds for a database that has applied the entries up to
/// `consistent_index` (from its bucket `meta`; 0 where there is none).
///
/// # Errors
/// As [`read`]; `CorruptDataDir` also where entries are missing between the database and the log.
pub fn pending_revisions(dir: &Path, consistent_index: u64) -> Result<Pending> {
    let (log, cuts) = survey(dir)?;
    let end = log.last_index.max(log.snapshot_index());
    let joined = log.entries > 0 && log.first_index <= consistent_index.saturating_add(1);
    if consistent_index < end && !joined {
        return Err(corrupt(format!(
            "the database has applied the entries up to {consistent_index}, but {} begins at {} and \
             ends at {end}: entries are missing between them",
            dir.display(),
            log.first_index
        )));
    }
    let mut pending = Pending {
        committed: 0,
        logged: 0,
    };
    walk(dir, &cuts, consistent_index, |entry| {
        if entry.may_make_revision() {
            pending.logged += 1;
            pending.committed += u64::from(entry.index <= log.hard_state.commit);
        }
        Ok(())
    })?;
    Ok(pending)
}

/// An upper bound of the revisions that a member has beyond those of its database, which has applied
/// the entries up to `consistent_index`: [`Pending::logged`].
///
/// # Errors
/// As [`pending_revisions`].
pub fn revisions_at_most(dir: &Path, consistent_index: u64) -> Result<u64> {
    Ok(pending_revisions(dir, consistent_index)?.logged)
}

/// Entries that came before the one of this ordinal (counted over the whole log from 0) and have this
/// index or a higher one are replaced.
struct Cut {
    ordinal: u64,
    index: u64,
}

/// Only cuts that matter are kept: by ordinals and by indices, ascending.
fn push_cut(cuts: &mut Vec<Cut>, cut: Cut) {
    while cuts.last().is_some_and(|c| c.index >= cut.index) {
        cuts.pop();
    }
    cuts.push(cut);
}

fn survey(dir: &Path) -> Result<(Summary, Vec<Cut>)> {
    let mut reader = Reader::open(dir)?;
    let mut metadata: Option<Vec<u8>> = None;
    let mut hard_state = HardState::default();
    let mut snapshots = Vec::new();
    // The log so far, and the newest snapshot in it, committed or not.
    let (mut first, mut last, mut newest) = (0u64, 0u64, None::<u64>);
    let mut cuts = Vec::new();
    let mut ordinal = 0;
    while let Some(record) = reader.next()? {
        match record.kind {
            METADATA => match &metadata {
                None => metadata = Some(record.data.to_vec()),
                Some(m) if m == record.data => {}
                Some(_) => {
                    return Err(reader.damage("its metadata is not that of the segments before"));
                }
            },
            ENTRY => {
                let index = match parse_entry(record.data) {
                    Some(entry) if entry.index > 0 && entry.index < u64::MAX => entry.index,
                    _ => return Err(reader.damage("an entry is none")),
                };
                // After a snapshot from the leader the log goes on behind the snapshot.
                let reach = newest.unwrap_or(0).max(last);
                let begun = last > 0 || newest.is_some();
                if begun && index > reach + 1 {
                    return Err(reader.damage(format!(
                        "entry {index} follows entry {last}: entries are missing"
                    )));
                }
                if last > 0 && index > last + 1 {
                    push_cut(&mut cuts, Cut { ordinal, index: 0 });
                    first = index;
                } else if last > 0 && index <= last {
                    push_cut(&mut cuts, Cut { ordinal, index });
                }
                if first == 0 || index < first {
                    first = index;
                }
                last = index;
                ordinal += 1;
            }
            STATE => {
                hard_state = parse_state(record.data)
                    .ok_or_else(|| reader.damage("a hard state is none"))?;
            }
            SNAPSHOT => {
                let s = parse_snapshot(record.data)
                    .filter(|s| s.index < u64::MAX)
                    .ok_or_else(|| reader.damage("a snapshot record is none"))?;
                newest = newest.max(Some(s.index));
                snapshots.push(s);
            }
            kind => return Err(reader.damage(format!("a record is of the unknown type {kind}"))),
        }
    }
    let at = |message: String| corrupt(format!("{}: {message}", dir.display()));
    let (node_id, cluster_id) = metadata
        .as_deref()
        .and_then(parse_ids)
        .ok_or_else(|| at("no record says whose write-ahead log this is".to_owned()))?;
    let summary = Summary {
        node_id: MemberId(node_id),
        cluster_id: ClusterId(cluster_id),
        hard_state,
        snapshots,
        first_index: first,
        last_index: last,
        entries: if last == 0 { 0 } else { last - first + 1 },
        torn: reader.torn,
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
            "the log begins at entry {first}, but its newest committed snapshot is of {start}"
        )));
    }
    Ok((summary, cuts))
}

struct Record<'a> {
    kind: u64,
    data: &'a [u8],
}

/// Reads records, one at a time, through all segments.
struct Reader {
    /// The segments that are not open yet, newest first.
    rest: Vec<PathBuf>,
    path: PathBuf,
    file: Option<BufReader<File>>,
    size: u64,
    /// Behind the last good record.
    offset: u64,
    crc: Digest,
    frame: Vec<u8>,
    torn: Option<Torn>,
}

impl Reader {
    fn open(dir: &Path) -> Result<Self> {
        let segments = segments(dir)?;
        if segments.is_empty() {
            return Err(corrupt(format!(
                "{} holds no segment of a write-ahead log",
                dir.display()
            )));
        }
        for w in segments.windows(2) {
            if w[0].0.checked_add(1) != Some(w[1].0) {
                return Err(corrupt(format!(
                    "{} follows {}: segments are missing",
                    w[1].1.display(),
                    w[0].1.display()
                )));
            }
        }
        Ok(Reader {
            rest: segments.into_iter().rev().map(|s| s.1).collect(),
            path: dir.to_owned(),
            file: None,
            size: 0,
            offset: 0,
            crc: digest(0),
            frame: Vec::new(),
            torn: None,
        })
    }

    fn damage(&self, what: impl std::fmt::Display) -> Error {
        corrupt(format!(
            "{} at byte {}: {what}",
            self.path.display(),
            self.offset
        ))
    }

    fn io(&self, e: std::io::Error) -> Error {
        Error::io(format!("read {}", self.path.display()), e)
    }

    /// The next record that is no CRC; `None` at the end.
    fn next(&mut self) -> Result<Option<Record<'_>>> {
        loop {
            let Some((record, padding)) = self.next_frame()? else {
                return Ok(None);
            };
            let Some((kind, crc, data)) = parse_record(&self.frame[..record]) else {
                return self.tear_if_torn("a record is none");
            };
            if kind == CRC {
                let so_far = sum(&self.crc);
                // 0 where nothing was read yet: older segments may have been removed.
                if so_far != 0 && so_far != crc {
                    return Err(self.damage("it does not go on from the segment before"));
                }
                self.crc = digest(crc);
            } else {
                self.crc.update(&self.frame[data.clone()]);
                let real = sum(&self.crc);
                if real != crc {
                    let what =
                        format!("a record's CRC-32C is {real:08x}, not {crc:08x} as it says");
                    return self.tear_if_torn(what);
                }
            }
            self.offset += 8 + record as u64 + padding;
            if kind != CRC {
                return Ok(Some(Record {
                    kind,
                    data: &self.frame[data],
                }));
            }
        }
    }

    /// Reads a frame into `self.frame`: the bytes of its record and its padding.
    fn next_frame(&mut self) -> Result<Option<(usize, u64)>> {
        loop {
            let Some(file) = &mut self.file else {
                let Some(path) = self.rest.pop() else {
                    return Ok(None);
                };
                self.path = path;
                let file = File::open(&self.path).map_err(|e| self.io(e))?;
                self.size = file.metadata().map_err(|e| self.io(e))?.len();
                self.offset = 0;
                self.file = Some(BufReader::with_capacity(1 << 16, file));
                continue;
            };
            let mut length = [0; 8];
            let n = read_full(file, &mut length).map_err(|e| self.io(e))?;
            let length = u64::from_le_bytes(length);
            // The end of the file, or of what was written into room that was taken in advance.
            if n == 0 || n == 8 && length == 0 {
                self.file = None;
                continue;
            }
            if n < 8 {
                return self.tear("the length of a record is cut short");
            }
            let record = length & ((1 << 56) - 1);
            let padding = if length >> 63 == 1 {
                length >> 56 & 7
            } else {
                0
            };
            let left = self.size.saturating_sub(self.offset);
            // Sums of 56 bits cannot overflow.
            if record + padding > left {
                return self.tear("a record is longer than the rest of the file");
            }
            if record > MAX_RECORD {
                return Err(
                    self.damage(format!("a record of {record} bytes is longer than 512 MiB"))
                );
            }
            self.frame.resize((record + padding) as usize, 0);
            let Some(file) = &mut self.file else {
                return Err(Error::internal("a segment was closed while it was read"));
            };
            let n = read_full(file, &mut self.frame).map_err(|e| self.io(e))?;
            if n < self.frame.len() {
                return self.tear("a record is cut short");
            }
            return Ok(Some((record as usize, padding)));
        }
    }

    /// Whether a sector of the frame is zero, as a write that was cut off leaves it. Only the last
    /// segment can end so.
    fn is_torn(&self) -> bool {
        let mut rest = &self.frame[..];
        let mut at = self.offset + 8;
        while self.rest.is_empty() && !rest.is_empty() {
            let n = ((SECTOR - at % SECTOR) as usize).min(rest.len());
            if rest[..n].iter().all(|&b| b == 0) {
                return true;
            }
            rest = &rest[n..];
            at += n as u64;
        }
        false
    }

    fn tear_if_torn<T>(&mut self, what: impl std::fmt::Display) -> Result<Option<T>> {
        match self.is_torn() {
            true => self.tear(what),
            false => Err(self.damage(what)),
        }
    }

    /// The end of a log whose last record is not whole: etcd's `Repair` cuts it off in the last
    /// segment, and in any other it refuses to start.
    fn tear<T>(&mut self, what: impl std::fmt::Display) -> Result<Option<T>> {
        if !self.rest.is_empty() {
            return Err(self.damage(what));
        }
        self.file = None;
        self.torn = Some(Torn {
            path: self.path.clone(),
            offset: self.offset,
        });
        Ok(None)
    }
}

/// Fills `b` as far as the source goes.
fn read_full(src: &mut impl Read, b: &mut [u8]) -> std::io::Result<usize> {
    let mut n = 0;
    while n < b.len() {
        match src.read(&mut b[n..]) {
            Ok(0) => break,
            Ok(more) => n += more,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(n)
}

/// `walpb.Record`: type (1), crc (2), data (3).
/// The data is told by its place in `frame`.
fn parse_record(frame: &[u8]) -> Option<(u64, u32, Range<usize>)> {
    let mut b = frame;
    let (mut kind, mut crc, mut data) = (0, 0, 0..0);
    while !b.is_empty() {
        match take_field(&mut b)? {
            (1, Varint(n)) => kind = n,
            (2, Varint(n)) => crc = u32::try_from(n).ok()?,
            (3, Bytes(x)) => {
                let end = frame.len() - b.len();
                data = end - x.len()..end;
            }
            (0..=3, _) => return None,
            _ => {}
        }
    }
    Some((kind, crc, data))
}

/// `raftpb.Entry`: type (1), term (2), index (3), data (4).
fn parse_entry(mut b: &[u8]) -> Option<Entry<'_>> {
    let mut entry = Entry {
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

/// Fields 1, 2 and 3 of a message that are integers; zero where missing. Others are passed over.
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

/// `raftpb.HardState`: term (1), vote (2), commit (3).
fn parse_state(b: &[u8]) -> Option<HardState> {
    let [term, vote, commit] = parse_integers(b)?;
    Some(HardState { term, vote, commit })
}

/// `walpb.Snapshot`: index (1), term (2), conf_state (3).
fn parse_snapshot(b: &[u8]) -> Option<SnapshotRecord> {
    let [index, term, _] = parse_integers(b)?;
    Some(SnapshotRecord { index, term })
}

/// `etcdserverpb.Metadata`: NodeID (1), ClusterID (2).
fn parse_ids(b: &[u8]) -> Option<(u64, u64)> {
    let [node, cluster, _] = parse_integers(b)?;
    Some((node, cluster))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Reason;
    use crate::datadir::membership::tests::three;
    use tempfile::TempDir;

    fn log(crc: u32) -> Encoder {
        let mut log = Encoder {
            crc: digest(crc),
            out: Vec::new(),
        };
        let mut first = numbers([CRC, u64::from(crc)], None);
        log.out.extend_from_slice(
            &((first.len() as u64) | (0x80 | (8 - first.len() as u64 % 8)) << 56).to_le_bytes(),
        );
        first.resize(first.len().next_multiple_of(8), 0);
        log.out.extend_from_slice(&first);
        log.record(METADATA, Some(&three("a").metadata()));
        log
    }

    fn entry(log: &mut Encoder, index: u64, term: u64, data: &[u8]) {
        log.record(ENTRY, Some(&numbers([0, term, index], Some(data))));
    }

    fn commit(log: &mut Encoder, commit: u64) {
        let state = message([(1, Varint(1)), (3, Varint(commit))]);
        log.record(STATE, Some(&state));
    }

    fn put() -> Vec<u8> {
        message([(1, Varint(77)), (4, Bytes(b"\x0a\x01a"))])
    }

    fn folder(segments: &[(u64, u64, &[u8])]) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (seq, index, bytes) in segments {
            fs::write(dir.path().join(segment_name(*seq, *index)), bytes).unwrap();
        }
        fs::write(dir.path().join("1.tmp"), b"x").unwrap();
        dir
    }

    fn refuses(dir: &TempDir, what: &str) {
        let e = read(dir.path()).unwrap_err();
        assert_eq!(e.reason(), Reason::CorruptDataDir, "{e}");
        assert!(e.to_string().contains(what), "{e}");
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let cluster = three("b");
        let path = create(dir.path(), &cluster).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), SEGMENT_SIZE);
        let s = read(dir.path()).unwrap();
        assert_eq!((s.node_id, s.cluster_id), (cluster.me().id, cluster.id()));
        let vote = cluster.members()[0].id.0;
        assert_eq!(
            s.hard_state,
            HardState {
                term: 1,
                vote,
                commit: 3
            }
        );
        assert_eq!((s.first_index, s.last_index, s.entries), (1, 3, 3));
        let records = [(0, 0), (3, 1)].map(|(index, term)| SnapshotRecord { index, term });
        assert_eq!(s.snapshots, records);
        assert_eq!(s.torn, None);
        assert!(s.knows(3, 1) && !s.knows(3, 2));
        let mut seen = Vec::new();
        for_each_entry(dir.path(), 1, |e| {
            assert!(!e.may_make_revision());
            seen.push((e.index, e.kind.0, e.data.to_vec()));
            Ok(())
        })
        .unwrap();
        let of = |i: usize| (i as u64 + 1, 1, cluster.members()[i].conf_change());
        assert_eq!(seen, [of(1), of(2)]);
        assert_eq!(revisions_at_most(dir.path(), 3).unwrap(), 0);
        assert_eq!(
            create(dir.path(), &cluster).unwrap_err().reason(),
            Reason::TargetExists
        );
        assert!(!crate::datadir::in_use(dir.path(), dir.path()).unwrap());
    }

    /// etcd takes a length beyond the file for a torn write wherever it stands, so a flipped bit there
    /// cuts the log off, which then shows where more is committed than is left.
    #[test]
    fn a_flipped_bit_or_a_cut_is_an_error_or_a_torn_tail() {
        let good = encode(&three("a"));
        let whole = read(folder(&[(0, 0, &good)]).path()).unwrap();
        for i in 0..good.len() {
            let mut bad = good.clone();
            bad[i] ^= 1 << (i % 8);
            for bytes in [&bad[..], &good[..i]] {
                let dir = folder(&[(0, 0, bytes)]);
                match read(dir.path()) {
                    // Padding is not covered by anything.
                    Ok(s) if s == whole => assert_ne!(bytes, &good[..i], "cut at {i}"),
                    Ok(s) => assert!(s.hard_state.commit <= s.last_index, "byte {i}"),
                    Err(e) => assert_eq!(e.reason(), Reason::CorruptDataDir, "{e}"),
                }
            }
        }
    }

    #[test]
    fn a_record_with_a_sector_of_zeros_is_torn_only_at_the_end() {
        let mut l = log(0);
        l.record(SNAPSHOT, Some(&snapshot(0, 0, None)));
        entry(&mut l, 1, 1, &[7; 2000]);
        let whole = l.out.len();
        let start = whole - 2048;
        entry(&mut l, 2, 1, &[7; 2000]);
        let crc = sum(&l.crc);
        let mut torn = l.out.clone();
        torn[whole + 600..].fill(0);
        let s = read(folder(&[(0, 0, &torn)]).path()).unwrap();
        assert_eq!((s.last_index, s.torn.unwrap().offset), (1, whole as u64));
        // The same damage with data behind it that is not zero, but no sector of zeros, is damage.
        let mut bad = l.out.clone();
        bad[start + 700] ^= 1;
        refuses(&folder(&[(0, 0, &bad)]), "CRC-32C");
        let next = log(crc).out;
        refuses(&folder(&[(0, 0, &torn), (1, 3, &next)]), "CRC-32C");
        let s = read(folder(&[(0, 0, &l.out), (1, 3, &next)]).path()).unwrap();
        assert_eq!((s.last_index, s.torn), (2, None));
    }

    #[test]
    fn segments_follow_each_other() {
        let mut l = log(0);
        l.record(SNAPSHOT, Some(&snapshot(0, 0, None)));
        entry(&mut l, 1, 1, &put());
        commit(&mut l, 1);
        let crc = sum(&l.crc);
        let mut m = log(crc);
        entry(&mut m, 2, 1, &put());
        m.record(SNAPSHOT, Some(&snapshot(1, 1, None)));
        entry(&mut m, 3, 1, &put());
        let s = read(folder(&[(0, 0, &l.out), (1, 2, &m.out)]).path()).unwrap();
        assert_eq!((s.first_index, s.entries), (1, 3));
        // Older segments may be gone as long as a snapshot stands for them.
        let kept = folder(&[(1, 2, &m.out)]);
        refuses(&kept, "begins at entry 2");
        commit(&mut m, 2);
        let kept = folder(&[(1, 2, &m.out)]);
        let s = read(kept.path()).unwrap();
        assert_eq!((s.first_index, s.entries, s.snapshot_index()), (2, 2, 1));
        assert_eq!(revisions_at_most(kept.path(), 1).unwrap(), 2);
        assert!(revisions_at_most(kept.path(), 0).is_err());
        refuses(
            &folder(&[(0, 0, &l.out), (2, 2, &m.out)]),
            "segments are missing",
        );
        refuses(
            &folder(&[(0, 0, &l.out), (1, 2, &log(crc ^ 1).out)]),
            "go on",
        );
        refuses(&folder(&[]), "no segment");
        let mut other = log(0);
        other.record(METADATA, Some(&three("b").metadata()));
        refuses(&folder(&[(0, 0, &other.out)]), "metadata");
    }

    #[test]
    fn entries_that_a_new_leader_replaced_do_not_count() {
        let mut l = log(0);
        l.record(SNAPSHOT, Some(&snapshot(0, 0, None)));
        for index in 1..=5 {
            entry(&mut l, index, 1, &put());
        }
        for index in 4..=6 {
            entry(&mut l, index, 2, &put());
        }
        entry(&mut l, 3, 3, b"");
        entry(&mut l, 4, 3, &put());
        commit(&mut l, 3);
        let dir = folder(&[(0, 0, &l.out)]);
        let mut seen = Vec::new();
        let s = for_each_entry(dir.path(), 0, |e| {
            seen.push((e.index, e.term));
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, [(1, 1), (2, 1), (3, 3), (4, 3)]);
        assert_eq!((s.entries, s.last_index), (4, 4));
        let pending = pending_revisions(dir.path(), 1).unwrap();
        assert_eq!((pending.committed, pending.logged), (1, 2));
        // A snapshot from the leader: what was before it does not count any more.
        l.record(SNAPSHOT, Some(&snapshot(10, 3, None)));
        entry(&mut l, 11, 3, &put());
        commit(&mut l, 11);
        let dir = folder(&[(0, 0, &l.out)]);
        assert_eq!(revisions_at_most(dir.path(), 10).unwrap(), 1);
        assert!(revisions_at_most(dir.path(), 4).is_err());
        entry(&mut l, 13, 3, &put());
        refuses(&folder(&[(0, 0, &l.out)]), "entries are missing");
        commit(&mut l, 99);
    }

    #[test]
    fn more_committed_than_there_is_means_that_the_end_is_lost() {
        let mut l = log(0);
        l.record(SNAPSHOT, Some(&snapshot(0, 0, None)));
        entry(&mut l, 1, 1, &put());
        commit(&mut l, 2);
        refuses(&folder(&[(0, 0, &l.out)]), "its end is lost");
    }

    #[test]
    fn requests_that_cannot_make_a_revision_are_known() {
        let request = |field| message([(100, Bytes(b"")), (field, Bytes(b""))]);
        for field in [4, 5, 6, 9, 12, 99, 1303, 20_000] {
            assert!(request_may_make_revision(&request(field)), "{field}");
        }
        for field in [1, 2, 3, 7, 8, 10, 11, 1000, 1012, 1107, 1204, 1300] {
            assert!(!request_may_make_revision(&request(field)), "{field}");
        }
        assert!(!request_may_make_revision(b""));
        assert!(request_may_make_revision(b"\x0a"));
    }

    #[test]
    fn random_bytes_never_panic() {
        let mut rng = fastrand::Rng::with_seed(7);
        let good = encode(&three("a"));
        for _ in 0..300 {
            let mut b = good.clone();
            for _ in 0..rng.usize(1..20) {
                let i = rng.usize(..b.len());
                b[i] = rng.u8(..);
            }
            b.truncate(rng.usize(..=b.len()));
            let _ = read(folder(&[(0, 0, &b)]).path());
            let _ = request_may_make_revision(&b);
            let _ = parse_entry(&b);
        }
    }

    #[test]
    fn names_are_those_of_segments() {
        assert_eq!(parse_segment_name(&segment_name(255, 7)), Some(255));
        for bad in [
            "",
            ".wal",
            "0-0.wal",
            "1.tmp",
            "0000000000000000-0000000000000000.wal.broken",
        ] {
            assert_eq!(parse_segment_name(bad), None, "{bad}");
        }
    }
}
