#![no_main]
#[path = "../../support/fuzz_hostile.rs"]
mod fuzz_hostile;
libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_hostile::listings_and_notes(data));
