//! The seed and the length of random tests. The unit tests of the library use this file, too.

/// The seed of a random test, printed so that it can be run again.
pub fn seed() -> u64 {
    let given = std::env::var("DELTAFOLD_TEST_SEED").ok();
    let seed = given.map_or_else(|| fastrand::u64(..1 << 48), |s| s.parse().expect("a seed"));
    println!("seed {seed} (DELTAFOLD_TEST_SEED={seed} runs it again)");
    seed
}

/// How often a random test goes round: `few` by default; `many` if `DELTAFOLD_TEST_ROUNDS` is `many`, as
/// `.ci/run` has it; or the number that it is.
pub fn rounds(few: usize, many: usize) -> usize {
    match std::env::var("DELTAFOLD_TEST_ROUNDS").as_deref() {
        Err(_) => few,
        Ok("many") => many,
        Ok(number) => number.parse().expect("DELTAFOLD_TEST_ROUNDS"),
    }
}
