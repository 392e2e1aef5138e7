//! How far `copy` and `verify --level checksums` are from what cannot be avoided: ratios, measured in one run.
//!
//! The floor reads each snapshot, opens it, hashes what is in it (that is where its SHA-256 is), and for `copy`
//! writes and syncs its bytes, as many at once as there are threads. `cargo bench --bench bucket` prints the
//! tables of the README; `copy`, `verify` and `copy-memory` name a part of it.

// It has shapes for the other benches, too.
#[allow(dead_code)]
mod generate;

use deltafold::backup::{SnapshotName, codec, frame};
use generate::Shape;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Every figure is the best of so many rounds; floor and program take turns.
const ROUNDS: usize = 5;
const THREADS: [usize; 2] = [1, 2];
const MIB: u64 = 1 << 20;

fn main() -> Result<()> {
    let data = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("buckets");
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|w| w == name);
    let shapes = [generate::LEASE, generate::CHURN, generate::INSERT];
    if is_wanted("copy") {
        println!(
            "\n| bucket | compressed | snapshots | size | at once | floor | copy | ratio | goal |"
        );
        println!("|---|---|---|---|---|---|---|---|---|");
        for shape in &shapes {
            copies(&data, shape)?;
        }
    }
    if is_wanted("verify") {
        println!(
            "\n| bucket | compressed | snapshots | size | threads | floor | verify | ratio | goal |"
        );
        println!("|---|---|---|---|---|---|---|---|---|");
        for shape in &shapes {
            verifies(&data, shape)?;
        }
    }
    if is_wanted("copy-memory") {
        println!("\n| bucket | compressed into | at once | copy | peak anonymous memory | limit |");
        println!("|---|---|---|---|---|---|");
        memory(&data, &generate::INSERT)?;
        memory(&data, &generate::LONG)?;
    }
    Ok(())
}

/// The snapshots of a bucket, the oldest first.
fn snapshots(bucket: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(bucket.join("v2"))? {
        paths.push(entry?.path());
    }
    paths.sort();
    Ok(paths)
}

/// Runs the program; gives seconds, and the most anonymous memory where that is looked at.
fn copy(from: &Path, to: &Path, threads: usize, more: &[&str], look: bool) -> Result<(f64, u64)> {
    let threads = threads.to_string();
    let started = Instant::now();
    let mut child = Command::new(env!("CARGO_BIN_EXE_deltafold"))
        .args(["copy", "--parallel", &threads, "--threads", &threads])
        .arg("--from")
        .arg(from)
        .arg("--to")
        .arg(to)
        .args(more)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let status = format!("/proc/{}/status", child.id());
    let mut anonymous = 0;
    // Looking takes a part of a processor: only where it is wanted.
    while look && child.try_wait()?.is_none() {
        anonymous = anonymous.max(rss_anon(&status).unwrap_or(0));
        std::thread::sleep(Duration::from_millis(1));
    }
    match child.wait()?.success() {
        true => Ok((started.elapsed().as_secs_f64(), anonymous)),
        false => Err("the copy failed".into()),
    }
}

fn rss_anon(status: &str) -> Option<u64> {
    let text = fs::read_to_string(status).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("RssAnon:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Writes what is read through it, if it shall.
struct Tee {
    from: File,
    to: Option<File>,
}

impl Read for Tee {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.from.read(out)?;
        if let Some(to) = &mut self.to {
            to.write_all(&out[..n])?;
        }
        Ok(n)
    }
}

/// Reads and hashes snapshots, and writes them where there is a target, as many at once as there are threads.
fn floor(inputs: &[PathBuf], to: Option<&Path>, threads: usize) -> Result<f64> {
    let started = Instant::now();
    let queue = Mutex::new(inputs.to_vec());
    std::thread::scope(|s| {
        let work = || -> Result<()> {
            loop {
                let next = queue.lock().map_err(|_| "a worker panicked")?.pop();
                let Some(path) = next else {
                    return Ok(());
                };
                let file = path.file_name().ok_or("no name")?;
                let name = file.to_string_lossy().parse::<SnapshotName>();
                let name = name.map_err(|_| "no snapshot")?;
                let to = to.map(|to| File::create(to.join(file))).transpose()?;
                let synced = to.as_ref().map(File::try_clone).transpose()?;
                let tee = Tee {
                    from: File::open(&path)?,
                    to,
                };
                let mut payload = frame::FrameReader::new(codec::decoder(name.compression, tee)?);
                let mut buf = vec![0; 256 << 10];
                while payload.read(&mut buf)? > 0 {}
                if let Some(synced) = synced {
                    synced.sync_all()?;
                }
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| s.spawn(work)).collect();
        for w in workers {
            w.join().map_err(|_| "a worker panicked")??;
        }
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
    })?;
    if let Some(to) = to {
        File::open(to)?.sync_all()?;
    }
    Ok(started.elapsed().as_secs_f64())
}

/// The same bucket with no compression: what is copied is what is hashed.
fn plain(data: &Path, shape: &Shape) -> Result<PathBuf> {
    let bucket = data.join(shape.name);
    let plain = data.join(format!("{}-none", shape.name));
    fs::create_dir_all(&plain)?;
    copy(&bucket, &plain, 2, &["--compression", "none"], false)?;
    Ok(plain)
}

fn copies(data: &Path, shape: &Shape) -> Result<()> {
    let bucket = data.join(shape.name);
    generate::bucket(&bucket, shape)?;
    let plain = plain(data, shape)?;
    for (bucket, compressed) in [(&bucket, "gzip"), (&plain, "none")] {
        let inputs = snapshots(bucket)?;
        let mut bytes = 0;
        for path in &inputs {
            bytes += fs::metadata(path)?.len();
        }
        for threads in THREADS {
            let (mut least, mut best) = (f64::MAX, f64::MAX);
            for _ in 0..ROUNDS {
                let to = data.join("target");
                fs::create_dir_all(&to)?;
                least = least.min(floor(&inputs, Some(&to), threads)?);
                fs::remove_dir_all(&to)?;
                fs::create_dir_all(&to)?;
                best = best.min(copy(bucket, &to, threads, &[], false)?.0);
                fs::remove_dir_all(&to)?;
            }
            println!(
                "| {} | {compressed} | {} | {} MiB | {threads} | {least:.2} s | {best:.2} s | {:.2} | 1.3 |",
                shape.name,
                inputs.len(),
                bytes / MIB,
                best / least,
            );
        }
    }
    fs::remove_dir_all(plain)?;
    Ok(())
}

/// As `copies`, with nothing written.
fn verifies(data: &Path, shape: &Shape) -> Result<()> {
    let bucket = data.join(shape.name);
    generate::bucket(&bucket, shape)?;
    let plain = plain(data, shape)?;
    for (bucket, compressed) in [(&bucket, "gzip"), (&plain, "none")] {
        let inputs = snapshots(bucket)?;
        let mut bytes = 0;
        for path in &inputs {
            bytes += fs::metadata(path)?.len();
        }
        for threads in THREADS {
            let (mut least, mut best) = (f64::MAX, f64::MAX);
            for _ in 0..ROUNDS {
                least = least.min(floor(&inputs, None, threads)?);
                let started = Instant::now();
                let status = Command::new(env!("CARGO_BIN_EXE_deltafold"))
                    .args(["verify", "--level", "checksums", "--threads"])
                    .arg(threads.to_string())
                    .arg("--store")
                    .arg(bucket)
                    .stdout(Stdio::null())
                    .stderr(Stdio::null())
                    .status()?;
                if !status.success() {
                    return Err("the verification failed".into());
                }
                best = best.min(started.elapsed().as_secs_f64());
            }
            println!(
                "| {} | {compressed} | {} | {} MiB | {threads} | {least:.2} s | {best:.2} s | {:.2} | 1.3 |",
                shape.name,
                inputs.len(),
                bytes / MIB,
                best / least,
            );
        }
    }
    fs::remove_dir_all(plain)?;
    Ok(())
}

/// The most anonymous memory that a copy had, next to the most it may have.
fn memory(data: &Path, shape: &Shape) -> Result<()> {
    let bucket = data.join(shape.name);
    generate::bucket(&bucket, shape)?;
    let to = data.join("target");
    for method in ["same", "zstd"] {
        for threads in [1, 2, 8] {
            fs::create_dir_all(&to)?;
            let more = ["--compression", method];
            let (seconds, anonymous) = copy(&bucket, &to, threads, &more, true)?;
            println!(
                "| {} | {method} | {threads} | {seconds:.2} s | {} MiB | {} MiB |",
                shape.name,
                anonymous / MIB,
                16 + 32 * threads
            );
            fs::remove_dir_all(&to)?;
        }
    }
    Ok(())
}
