//! The log that we write, and damaged, truncated and forked logs.

use super::encode::{Encoder, SEGMENT_SIZE, numbers, snapshot};
use super::segments::{parse_segment_name, segment_name};
use super::*;
use crate::Reason;
use crate::base::protobuf::message;
use crate::datadir::membership::tests::three;
use std::fs;
use tempfile::TempDir;

/// A segment that continues from `crc`, with its CRC record and its metadata.
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

/// A put request.
fn put() -> Vec<u8> {
    message([(1, Varint(77)), (4, Bytes(b"\x0a\x01a"))])
}

/// A folder with these segments: sequence number, first index, content.
fn folder(segments: &[(u64, u64, &[u8])]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (seq, index, bytes) in segments {
        fs::write(dir.path().join(segment_name(*seq, *index)), bytes).unwrap();
    }
    fs::write(dir.path().join("1.tmp"), b"x").unwrap();
    dir
}

fn refuses(dir: &TempDir, message: &str) {
    let e = read(dir.path()).unwrap_err();
    assert_eq!(e.reason(), Reason::CorruptDataDir, "{e}");
    assert!(e.to_string().contains(message), "{e}");
}

#[test]
fn a_written_log_can_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = three("b");
    let opened = crate::datadir::install::Dir::open(dir.path()).unwrap();
    let path = create(&opened, &cluster).unwrap();
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
    let mut entries = Vec::new();
    for_each_entry(dir.path(), 1, |e| {
        assert!(!e.may_make_revision());
        entries.push((e.index, e.kind.0, e.data.to_vec()));
        Ok(())
    })
    .unwrap();
    let conf_change = |i: usize| (i as u64 + 1, 1, cluster.members()[i].conf_change());
    assert_eq!(entries, [conf_change(1), conf_change(2)]);
    assert_eq!(revisions_at_most(dir.path(), 3).unwrap(), 0);
    assert_eq!(
        create(&opened, &cluster).unwrap_err().reason(),
        Reason::TargetExists
    );
    assert!(!crate::datadir::in_use(dir.path(), dir.path()).unwrap());
}

/// Like etcd, the reader takes a length beyond the end of the file for an incomplete record, wherever it is.
/// A flipped bit in a length therefore truncates the log; that is an error if committed entries are lost.
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
                // No CRC covers the padding.
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
    // A wrong byte without a sector of zeros is damage.
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
    // Older segments may be missing if a committed snapshot covers them.
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
        "does not continue",
    );
    refuses(&folder(&[]), "no segment");
    let mut other = log(0);
    other.record(METADATA, Some(&three("b").metadata()));
    refuses(&folder(&[(0, 0, &other.out)]), "metadata");
}

#[test]
fn entries_that_a_new_leader_replaced_are_skipped() {
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
    let mut entries = Vec::new();
    let s = for_each_entry(dir.path(), 0, |e| {
        entries.push((e.index, e.term));
        Ok(())
    })
    .unwrap();
    assert_eq!(entries, [(1, 1), (2, 1), (3, 3), (4, 3)]);
    assert_eq!((s.entries, s.last_index), (4, 4));
    let pending = pending_revisions(dir.path(), 1).unwrap();
    assert_eq!((pending.committed, pending.logged), (1, 2));
    // A snapshot from the leader voids all entries before it.
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
fn a_log_that_ends_before_its_committed_index_is_refused() {
    let mut l = log(0);
    l.record(SNAPSHOT, Some(&snapshot(0, 0, None)));
    entry(&mut l, 1, 1, &put());
    commit(&mut l, 2);
    refuses(&folder(&[(0, 0, &l.out)]), "its end is lost");
}

#[test]
fn only_known_requests_create_no_revision() {
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
fn only_names_of_segments_are_parsed() {
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
