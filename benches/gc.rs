//! Compares `gc` with a plain listing of the same objects, and shows its memory.
//!
//! A listing is the minimal work of `gc`. Both are measured in the same run, with the same client. `cargo
//! bench --bench gc` prints the table of docs/design/gc.md; `local` or `s3` selects rows, and a number sets the
//! number of objects.

mod process_memory;
#[path = "../tests/support/mod.rs"]
mod support;

use futures::{StreamExt, TryStreamExt};
use object_store::aws::AmazonS3;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use std::fs;
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::history::Compression;
use support::minio::Minio;
use support::s3::{Kind, S3};
use support::tiny_backup::{database, object};
use tempfile::TempDir;
use tokio::runtime::Runtime;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Returns the names of a backup with an hourly full and eleven deltas in between.
fn names(count: usize) -> Vec<String> {
    let now = chrono::Utc::now().timestamp();
    let name = |n: usize| {
        let (r, t) = (10 * (n + 1), now - 300 * (count - n) as i64);
        match n % 12 {
            0 => format!("Full-00000000-{r:08}-{t}"),
            _ => format!("Incr-{:08}-{r:08}-{t}", r - 9),
        }
    };
    (0..count).map(name).collect()
}

/// Returns the content of the fulls. `gc` reads only the newest full, which must hold the revision of its
/// name.
fn full(count: usize) -> Vec<u8> {
    let last = 10 * count as i64;
    object(&database(4096, last..=last, 1), Compression::None)
}

fn content<'a>(name: &str, full: &'a [u8]) -> &'a [u8] {
    match name.starts_with("Full") {
        true => full,
        false => b"x",
    }
}

/// One run of `gc`.
struct Measurement {
    seconds: f64,
    peak_memory: u64,
    deleted: u64,
}

fn gc(store: &str, env: &[(String, String)], args: &[&str]) -> Result<Measurement> {
    let started = Instant::now();
    let mut child = Command::new(env!("CARGO_BIN_EXE_deltafold"))
        .args(["gc", "--policy", "exponential", "--restorable-window", "3d"])
        .args(["--allow-shrink", "--output", "json"])
        .args(["--store", store])
        .args(args)
        .envs(env.iter().map(|(k, v)| (k, v)))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut stdout = child.stdout.take().ok_or("no output")?;
    // The report is larger than a pipe's buffer: read it while the program runs.
    let reader = std::thread::spawn(move || {
        let mut report = String::new();
        stdout.read_to_string(&mut report).map(|_| report)
    });
    let mut peak_memory = 0;
    while child.try_wait()?.is_none() {
        peak_memory = peak_memory.max(process_memory::anonymous(child.id()));
        std::thread::sleep(Duration::from_millis(2));
    }
    let seconds = started.elapsed().as_secs_f64();
    let report = reader.join().map_err(|_| "the reader panicked")??;
    let outcome: serde_json::Value = serde_json::from_str(&report)?;
    if outcome["status"] == "Failed" {
        return Err(format!("gc failed: {}", outcome["message"]).into());
    }
    Ok(Measurement {
        seconds,
        peak_memory,
        deleted: outcome["totals"]["deleted"]["objects"]
            .as_u64()
            .unwrap_or(0),
    })
}

fn print_row(store: &str, count: usize, mode: &str, listing: f64, run: &Measurement) {
    println!(
        "| {store} | {count} | {mode} | {listing:.2} s | {:.2} s | {:.2} | {} | {} MiB |",
        run.seconds,
        run.seconds / listing,
        run.deleted,
        run.peak_memory >> 20
    );
}

/// Prints the rows of a local folder.
fn local(count: usize) -> Result<()> {
    let folder = TempDir::new_in(env!("CARGO_TARGET_TMPDIR"))?;
    fs::create_dir(folder.path().join("v2"))?;
    let full = full(count);
    let mut written = 0;
    for name in names(count) {
        let content = content(&name, &full);
        written += content.len() as u64;
        fs::write(folder.path().join("v2").join(name), content)?;
    }
    let listing = || -> Result<f64> {
        let started = Instant::now();
        let mut bytes = 0;
        for entry in fs::read_dir(folder.path().join("v2"))? {
            bytes += fs::metadata(entry?.path())?.len();
        }
        assert_eq!(bytes, written);
        Ok(started.elapsed().as_secs_f64())
    };
    let listing = listing()?.min(listing()?);
    let url = folder.path().to_str().ok_or("the path is not UTF-8")?;
    for (mode, args) in MODES {
        print_row("local folder", count, mode, listing, &gc(url, &[], args)?);
    }
    Ok(())
}

/// The modes of `gc` that are measured, and their arguments.
const MODES: [(&str, &[&str]); 2] = [("dry run", &[]), ("--apply", &["--apply"])];

/// Prints the rows of an S3 server.
fn s3(rt: &Runtime, count: usize) -> Result<()> {
    let minio = Minio::start();
    let server: S3 = minio.s3();
    rt.block_on(server.create_bucket("many", Kind::Plain));
    let store: Arc<AmazonS3> = minio.store("many");
    let full = full(count);
    rt.block_on(
        futures::stream::iter(names(count))
            .map(|n| {
                let store = store.clone();
                let content = content(&n, &full).to_vec();
                async move {
                    let path = Path::from(format!("v2/{n}"));
                    store.put(&path, content.into()).await.map(|_| ())
                }
            })
            .buffer_unordered(16)
            .try_collect::<Vec<()>>(),
    )?;
    let listing = || -> Result<f64> {
        let started = Instant::now();
        let all = rt.block_on(store.list(Some(&Path::from("v2"))).try_collect::<Vec<_>>())?;
        assert_eq!(all.len(), count);
        Ok(started.elapsed().as_secs_f64())
    };
    let listing = listing()?.min(listing()?);
    let env = server.env();
    for (mode, args) in MODES {
        print_row("MinIO", count, mode, listing, &gc("s3://many", &env, args)?);
    }
    Ok(())
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    let is_selected = |name: &str| {
        let selects_any = args.iter().any(|a| a.parse::<usize>().is_err());
        !selects_any || args.iter().any(|a| a == name)
    };
    let count = args.iter().find_map(|a| a.parse().ok());
    println!(
        "| place | objects | run | listing alone | gc | ratio | deleted | peak anonymous memory |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    if is_selected("local") {
        local(count.unwrap_or(100_000))?;
    }
    if is_selected("s3") {
        let rt = Runtime::new()?;
        s3(&rt, count.unwrap_or(100_000))?;
    }
    Ok(())
}
