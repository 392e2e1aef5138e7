//! What collecting garbage costs beside the listing that cannot be avoided, and its memory: measured in one run.
//!
//! The floor is a plain listing of the same objects by the same client. `cargo bench --bench gc` prints the table
//! of ARCHITECTURE.md; `local` or `s3` names a part of it, and a number the objects.

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

/// A full an hour, eleven deltas between. Of these gc reads the names alone.
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

/// A full that holds the revisions of all names.
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

struct Run {
    seconds: f64,
    anonymous: u64,
    deleted: u64,
}

fn gc(store: &str, env: &[(String, String)], args: &[&str]) -> Result<Run> {
    let started = Instant::now();
    let mut child = Command::new(env!("CARGO_BIN_EXE_deltafold"))
        .args(["gc", "--policy", "exponential", "--restorable-window", "3d"])
        .args(["--purge-after", "0s", "--output", "json"])
        .args(["--store", store])
        .args(args)
        .envs(env.iter().map(|(k, v)| (k, v)))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let status = format!("/proc/{}/status", child.id());
    let mut out = child.stdout.take().ok_or("no output")?;
    let reader = std::thread::spawn(move || {
        let mut said = String::new();
        out.read_to_string(&mut said).map(|_| said)
    });
    let mut anonymous = 0;
    while child.try_wait()?.is_none() {
        anonymous = anonymous.max(rss_anon(&status).unwrap_or(0));
        std::thread::sleep(Duration::from_millis(2));
    }
    let seconds = started.elapsed().as_secs_f64();
    let said = reader.join().map_err(|_| "the reader panicked")??;
    let outcome: serde_json::Value = serde_json::from_str(&said)?;
    if outcome["status"] == "Failed" {
        return Err(format!("gc failed: {}", outcome["message"]).into());
    }
    Ok(Run {
        seconds,
        anonymous,
        deleted: outcome["totals"]["deleted"]["objects"]
            .as_u64()
            .unwrap_or(0),
    })
}

fn rss_anon(status: &str) -> Option<u64> {
    let text = fs::read_to_string(status).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("RssAnon:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

fn row(place: &str, count: usize, what: &str, listing: f64, run: &Run) {
    println!(
        "| {place} | {count} | {what} | {listing:.2} s | {:.2} s | {:.2} | {} | {} MiB |",
        run.seconds,
        run.seconds / listing,
        run.deleted,
        run.anonymous >> 20
    );
}

fn local(count: usize) -> Result<()> {
    let folder = TempDir::new_in(env!("CARGO_TARGET_TMPDIR"))?;
    fs::create_dir(folder.path().join("v2"))?;
    let full = full(count);
    let mut bytes = 0;
    for name in names(count) {
        let content = content(&name, &full);
        bytes += content.len() as u64;
        fs::write(folder.path().join("v2").join(name), content)?;
    }
    let written = bytes;
    let listing = || -> Result<f64> {
        let started = Instant::now();
        let mut bytes = 0;
        for entry in fs::read_dir(folder.path().join("v2"))? {
            bytes += fs::metadata(entry?.path())?.len();
        }
        assert_eq!(bytes, written);
        Ok(started.elapsed().as_secs_f64())
    };
    let floor = listing()?.min(listing()?);
    let url = folder.path().to_str().ok_or("a plain path")?;
    row("local folder", count, "dry run", floor, &gc(url, &[], &[])?);
    row(
        "local folder",
        count,
        "--apply",
        floor,
        &gc(url, &[], &["--apply"])?,
    );
    Ok(())
}

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
    let floor = listing()?.min(listing()?);
    let env = server.env();
    row(
        "MinIO",
        count,
        "dry run",
        floor,
        &gc("s3://many", &env, &[])?,
    );
    row(
        "MinIO",
        count,
        "--apply",
        floor,
        &gc("s3://many", &env, &["--apply"])?,
    );
    Ok(())
}

fn main() -> Result<()> {
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    let is_wanted = |name: &str| {
        let named = wanted.iter().any(|w| w.parse::<usize>().is_err());
        !named || wanted.iter().any(|w| w == name)
    };
    let count = wanted.iter().find_map(|w| w.parse().ok());
    println!(
        "| place | objects | run | listing alone | gc | ratio | deleted | peak anonymous memory |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    if is_wanted("local") {
        local(count.unwrap_or(100_000))?;
    }
    if is_wanted("s3") {
        let rt = Runtime::new()?;
        s3(&rt, count.unwrap_or(100_000))?;
    }
    Ok(())
}
