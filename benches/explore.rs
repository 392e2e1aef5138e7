//! Measures the page of `deltafold explore`: the time to its first picture and to the whole backup, the time of an
//! answer to the slider, and its memory.
//!
//! `cargo bench --bench explore` prints the table of docs/design/measurements.md, each row next to its goal.

// Other benches use the shapes and the functions that this one does not.
#[allow(dead_code)]
mod generate;
#[allow(dead_code)]
mod process_memory;
#[path = "../tests/support/mod.rs"]
mod support;

use generate::{CHURN, LEASE, Shape};
use serde_json::Value;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use support::explore::Page;

/// A cluster of 25,000 objects, without changes.
const OBJECTS: Shape = Shape {
    name: "explore-objects",
    keys_in_base: 25_000,
    changes: 0,
    ..CHURN
};
/// The same with 500,000 revisions, most of them renewals.
const REVISIONS: Shape = Shape {
    name: "explore-revisions",
    keys_in_base: 25_000,
    changes: 500_000,
    value_bytes: 100..=600,
    base_bytes: Some(1024..=4096),
    inserts: 1,
    deletes: 1,
    step: 100,
    ..LEASE
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Returns the median of the times of `work`.
fn median(work: impl Fn(usize) -> Value) -> Duration {
    let mut times: Vec<Duration> = (0..21)
        .map(|nth| {
            let began = Instant::now();
            work(nth);
            began.elapsed()
        })
        .collect();
    times.sort();
    times[times.len() / 2]
}

fn main() -> Result<()> {
    let _ = support::PROGRAM.set(env!("CARGO_BIN_EXE_deltafold").into());
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    println!("| Backup | First picture | Whole backup | Tree at a moment | Search | Peak memory |");
    println!("|---|---|---|---|---|---|");
    for shape in [OBJECTS, REVISIONS] {
        let store = folder.join(shape.name);
        generate::backup(&store, &shape)?;
        let began = Instant::now();
        let page = Page::begin(&store);
        page.get("backup", &[]);
        let first = began.elapsed();
        page.wait();
        let all = began.elapsed();
        let window = &page.get("backup", &[])["window"];
        let (from, to) = (&window["first_revision"], &window["last_revision"]);
        let (from, to) = (from.as_i64().unwrap_or(1), to.as_i64().unwrap_or(1));
        let moment = |nth: usize| (from + (to - from) * nth as i64 / 20).to_string();
        let slider = median(|nth| page.get("state", &[("at", &moment(nth))]));
        let search = median(|nth| {
            page.get(
                "search",
                &[("at", &moment(nth)), ("q", "pod 12"), ("within", "names")],
            )
        });
        let status = std::fs::read_to_string(format!("/proc/{}/status", page.id()))?;
        println!(
            "| {} keys, {} versions | {:.2} s | {:.2} s | {:.0} ms | {:.0} ms | {} MiB |",
            window["keys"],
            window["versions"],
            first.as_secs_f64(),
            all.as_secs_f64(),
            slider.as_secs_f64() * 1000.0,
            search.as_secs_f64() * 1000.0,
            process_memory::field(&status, "VmHWM:") >> 20,
        );
    }
    Ok(())
}
