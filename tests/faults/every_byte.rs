//! Damage at every byte of a small backup, compacted in this process: it is refused with the object's name or
//! makes no difference. Nothing is lost, and nothing half-written is visible.

use crate::support::history::Compression;
use crate::support::tiny_backup::*;
use deltafold::bolt::Database;
use deltafold::mvcc::{Revision, hash_kv};
use deltafold::ops::compact::Compacted;
use deltafold::ops::report::{Report, Status};
use deltafold::{Reason, Result};

/// Compacts a backup with one object replaced. Asserts that nothing but a result was added, and that an error
/// is one of bad data and names the object.
fn compact(
    runner: &InProcess,
    good: &Objects,
    path: &str,
    bad: Vec<u8>,
    what: &str,
) -> Result<(Report<Compacted>, Option<Vec<u8>>)> {
    let mut objects = good.clone();
    objects.insert(path.to_owned(), bad);
    let (outcome, mut after) = runner.compact(&objects);
    let made = match &outcome {
        Ok(o) if o.status == Status::Succeeded => {
            let name = o.snapshot.as_ref().expect("a name");
            after.remove(&format!("v2/{name}"))
        }
        _ => None,
    };
    assert!(
        after == objects,
        "{what}: the objects are not what they were"
    );
    if let Err(e) = &outcome {
        assert!(e.reason().is_bad_data(), "{what}: {e} [{}]", e.reason());
        // Whether the base or the deltas have another history cannot be known.
        let named = e.reason() == Reason::HistoryMismatch || e.to_string().contains(path);
        assert!(named, "{what}: {e}");
    }
    outcome.map(|o| (o, made))
}

/// Returns the result of the undamaged backup.
fn good_result(runner: &InProcess, good: &Objects) -> (Report<Compacted>, Vec<u8>) {
    let (path, bytes) = good.first_key_value().expect("an object");
    let (outcome, made) = compact(runner, good, path, bytes.clone(), "the good bucket").unwrap();
    (outcome, made.expect("a result"))
}

/// What was done to an object, and its bytes afterwards.
type Variant = (String, Vec<u8>);

/// Asserts that each variant of each object is refused as corrupt or gives the same bytes as a result. Returns
/// how many of each.
fn refused_or_identical(variants: fn(&[u8]) -> Vec<Variant>) -> [u32; 2] {
    let runner = InProcess::new();
    let mut counts = [0, 0];
    for compression in Compression::ALL {
        let good = small_bucket(1024, compression);
        let (want, want_bytes) = good_result(&runner, &good);
        assert_eq!(want.revision, Revision(SMALL_LAST));
        for path in [full_name(compression), delta_name(compression)] {
            for (how, bad) in variants(&good[&path]) {
                let what = format!("{path}, {how}");
                match compact(&runner, &good, &path, bad, &what) {
                    Err(e) => {
                        assert_eq!(e.reason(), Reason::CorruptSnapshot, "{what}: {e}");
                        counts[0] += 1;
                    }
                    Ok((outcome, made)) => {
                        assert_eq!(outcome.hash_kv, want.hash_kv, "{what}");
                        assert!(made.as_ref() == Some(&want_bytes), "{what}: other bytes");
                        counts[1] += 1;
                    }
                }
            }
        }
    }
    counts
}

#[test]
fn a_flipped_bit_at_every_byte() {
    let [refused, same] = refused_or_identical(|good| {
        let flipped = |at: usize| {
            let mut bad = good.to_vec();
            bad[at] ^= 1 << (at % 8);
            (format!("bit {} of byte {at} flipped", at % 8), bad)
        };
        (0..good.len()).map(flipped).collect()
    });
    // Only a few bits of compressed formats mean nothing, such as the time in gzip's header.
    assert!(
        refused > 50 * same,
        "{refused} refused, {same} of no consequence"
    );
}

#[test]
fn a_cut_at_every_byte() {
    let [refused, same] = refused_or_identical(|good| {
        let cut = |at: usize| (format!("cut to {at} bytes"), good[..at].to_vec());
        // Without compression every cut is alike, except those at the end.
        let step = |at: &usize| good.len() < 4096 || at.is_multiple_of(37) || at + 100 > good.len();
        (0..good.len()).filter(step).map(cut).collect()
    });
    assert_eq!(same, 0, "of {refused} cuts");
}

/// With a valid checksum, the readers of bbolt and of records must find the damage.
#[test]
fn a_flipped_bit_at_every_byte_of_a_database_in_a_right_frame() {
    let runner = InProcess::new();
    let none = Compression::None;
    let good = small_bucket(1024, none);
    let database = small_database(1024);
    let path = full_name(none);
    let mut refused = 0;
    for at in 0..database.len() {
        let mut bad = database.clone();
        bad[at] ^= 1 << (at * 5 % 8);
        let what = format!("byte {at} of the database");
        match compact(&runner, &good, &path, object(&bad, none), &what) {
            Err(_) => refused += 1,
            // A value may differ, and free pages may hold anything, but the report about the result must be
            // true.
            Ok((outcome, Some(made))) => {
                let made = made[..made.len() - 32].to_vec();
                let sum = hash_kv(&Database::open(made).unwrap(), None).unwrap();
                assert_eq!(outcome.hash_kv, Some(sum.hash), "{what}");
                assert_eq!(outcome.live_keys, Some(sum.live_keys), "{what}");
            }
            // The base claims to hold more than the delta.
            Ok((outcome, None)) => assert!(outcome.revision > Revision(SMALL_LAST), "{what}"),
        }
    }
    assert!(
        refused > database.len() / 8,
        "only {refused} of {} were refused",
        database.len()
    );
}

#[test]
fn a_flipped_bit_at_every_bit_of_a_database_is_survived_by_its_reader() {
    let mut input = small_database(1024);
    input.insert(0, 0);
    for bit in 8..8 * input.len() {
        input[bit / 8] ^= 1 << (bit % 8);
        crate::support::fuzz_targets::bbolt_reader(&input);
        input[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn every_page_size_that_bbolt_writes_gives_the_same_keyspace() {
    let runner = InProcess::new();
    let mut hashes = Vec::new();
    for shift in 10..=16 {
        for compression in [Compression::None, Compression::Zstd] {
            let (outcome, made) = good_result(&runner, &small_bucket(1 << shift, compression));
            hashes.push((outcome.hash_kv, outcome.live_keys));
            if compression == Compression::None {
                let db = Database::open(made).unwrap();
                assert_eq!(db.page_size(), 1 << shift);
            }
        }
    }
    hashes.dedup();
    assert_eq!(hashes.len(), 1, "{hashes:?}");
}
