//! Seed and number of rounds of random tests. The library's unit tests include this file, too.

/// Returns the seed of a random test and prints it, so that the test can be repeated.
pub fn seed() -> u64 {
    let given = std::env::var("DELTAFOLD_TEST_SEED").ok();
    let seed = given.map_or_else(|| fastrand::u64(..1 << 48), |s| s.parse().expect("a seed"));
    println!("seed {seed} (DELTAFOLD_TEST_SEED={seed} runs it again)");
    seed
}

/// Returns the number of rounds: `few` by default, `many` if `DELTAFOLD_TEST_ROUNDS` is `many` (as in
/// `.ci/run`), or the number in that variable.
pub fn rounds(few: usize, many: usize) -> usize {
    match std::env::var("DELTAFOLD_TEST_ROUNDS").as_deref() {
        Err(_) => few,
        Ok("many") => many,
        Ok(number) => number.parse().expect("DELTAFOLD_TEST_ROUNDS"),
    }
}
