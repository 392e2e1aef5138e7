#![no_main]
#[path = "../../support/fuzz_targets.rs"]
mod fuzz_targets;
libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_targets::tables(data));
