//! Runs the fuzz targets on the corpus (tests/fuzz/corpus), then on random mutations of it.
//!
//! A long random run, with at least this many inputs for each target: `DELTAFOLD_TEST_ROUNDS=1000000 cargo test
//! --release --test serverless fuzz_corpus -- --nocapture`

use crate::support::{rounds, seed};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Runs a target and prints the input if it fails.
fn run(target: fn(&[u8]), input: &[u8], what: &str) {
    let done = catch_unwind(AssertUnwindSafe(|| target(input)));
    assert!(done.is_ok(), "{what} fails; the message is above");
}

fn replay_and_mutate(name: &str, target: fn(&[u8]), rounds: usize) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fuzz/corpus")
        .join(name);
    let mut paths: Vec<_> = fs::read_dir(&folder)
        .unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
        .map(|e| e.expect("an entry").path())
        .collect();
    paths.sort();
    let corpus: Vec<Vec<u8>> = paths
        .iter()
        .map(|p| fs::read(p).expect("an input"))
        .collect();
    assert!(corpus.len() > 10, "the corpus of {name} is gone");
    for (path, input) in paths.iter().zip(&corpus) {
        run(target, input, &format!("{name} on {}", path.display()));
    }

    let first = seed();
    for seed in first..first + rounds as u64 {
        let input = mutated(&mut fastrand::Rng::with_seed(seed), &corpus);
        run(
            target,
            &input,
            &format!(
                "{name}: seed {seed} (DELTAFOLD_TEST_ROUNDS=1 DELTAFOLD_TEST_SEED={seed} runs it again)"
            ),
        );
    }
}

/// Returns an input with some bytes, words or stretches changed.
fn mutated(rng: &mut fastrand::Rng, corpus: &[Vec<u8>]) -> Vec<u8> {
    const WORDS: [u64; 8] = [
        0,
        1,
        2,
        0x7f,
        0xffff,
        0xffff_ffff,
        i64::MAX as u64,
        u64::MAX,
    ];
    let mut input = corpus[rng.usize(..corpus.len())].clone();
    for _ in 0..rng.usize(1..6) {
        if input.is_empty() {
            return input;
        }
        let at = rng.usize(..input.len());
        match rng.u8(..7) {
            0 => input[at] ^= 1 << rng.u8(..8),
            1 => input[at] = rng.u8(..),
            2 => input.insert(at, rng.u8(..)),
            3 => drop(input.drain(at..(at + rng.usize(1..9)).min(input.len()))),
            4 => {
                let word = rng.choice(WORDS).expect("a word").to_le_bytes();
                for (b, w) in input[at..].iter_mut().zip(&word[..1 << rng.u8(..4)]) {
                    *b = *w;
                }
            }
            5 => {
                let to = (at + rng.usize(1..1025)).min(input.len());
                let dest = rng.usize(..=input.len() - (to - at));
                input.copy_within(at..to, dest);
            }
            _ => {
                let other = &corpus[rng.usize(..corpus.len())];
                input.truncate(at);
                input.extend_from_slice(&other[at.min(other.len())..]);
            }
        }
    }
    input
}

#[test]
fn bbolt_reader() {
    replay_and_mutate(
        "bbolt_reader",
        crate::support::fuzz_targets::bbolt_reader,
        rounds(300, 3000),
    );
}

#[test]
fn delta_parser() {
    replay_and_mutate(
        "delta_parser",
        crate::support::fuzz_targets::delta_parser,
        rounds(300, 3000),
    );
}

#[test]
fn chain_builder() {
    replay_and_mutate(
        "chain_builder",
        crate::support::fuzz_targets::chain_builder,
        rounds(300, 3000),
    );
}

#[test]
fn listings_and_notes() {
    replay_and_mutate(
        "listings_and_notes",
        crate::support::fuzz_hostile::listings_and_notes,
        rounds(60, 1000),
    );
}

#[test]
fn object_decoder() {
    replay_and_mutate(
        "object_decoder",
        crate::support::fuzz_targets::object_decoder,
        rounds(2000, 40_000),
    );
}

#[test]
fn tables() {
    replay_and_mutate(
        "tables",
        crate::support::fuzz_targets::tables,
        rounds(300, 3000),
    );
}
