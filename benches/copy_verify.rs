//! Compares `copy` and `verify --level checksums` with the minimal work, and bounds the memory of `copy`.
//!
//! The minimal work ("floor") reads, decompresses and hashes each snapshot (its SHA-256 covers the
//! decompressed payload), and for `copy` writes and syncs its bytes, with as many threads. Program and floor
//! are measured in the same run. `cargo bench --bench copy_verify` prints the tables; `copy`, `verify` and
//! `copy-memory` select one.

// Other benches use the shapes that this one does not.
#[allow(dead_code)]
mod generate;
mod process_memory;

use deltafold::backup::{Compression, SnapshotName, codec, frame};
use generate::Shape;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Every figure is the best of this many rounds. Floor and program take turns.
const ROUNDS: usize = 5;
const THREADS: [usize; 2] = [1, 2];
const MIB: u64 = 1 << 20;

fn main() -> Result<()> {
    let data = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("buckets");
    let tables: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    let is_selected = |name: &str| tables.is_empty() || tables.iter().any(|t| t == name);
    let shapes = [generate::LEASE, generate::CHURN, generate::INSERT];
    if is_selected("copy") {
        println!(
            "\n| bucket | compressed | snapshots | size | at once | floor | copy | ratio | goal |"
        );
        println!("|---|---|---|---|---|---|---|---|---|");
        for shape in &shapes {
            compare(&data, shape, Measured::Copy)?;
        }
    }
    if is_selected("verify") {
        println!(
            "\n| bucket | compressed | snapshots | size | threads | floor | verify | ratio | goal |"
        );
        println!("|---|---|---|---|---|---|---|---|---|");
        for shape in &shapes {
            compare(&data, shape, Measured::Verify)?;
        }
    }
    if is_selected("copy-memory") {
        println!("\n| bucket | at once | copy | peak anonymous memory | limit |");
        println!("|---|---|---|---|---|");
        copy_memory(&data, &generate::INSERT)?;
        copy_memory(&data, &generate::LONG)?;
    }
    Ok(())
}

/// The command that is measured.
#[derive(Clone, Copy)]
enum Measured {
    Copy,
    Verify,
}

/// Returns the snapshots of a backup, the oldest first.
fn snapshots(backup: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(backup.join("v2"))? {
        paths.push(entry?.path());
    }
    paths.sort();
    Ok(paths)
}

/// Copies a backup. Returns the seconds, and the peak of anonymous memory if `watch_memory` is set.
fn copy(from: &Path, to: &Path, threads: usize, watch_memory: bool) -> Result<(f64, u64)> {
    let threads = threads.to_string();
    let started = Instant::now();
    let mut child = Command::new(env!("CARGO_BIN_EXE_deltafold"))
        .args(["copy", "--parallel", &threads, "--threads", &threads])
        .arg("--from")
        .arg(from)
        .arg("--to")
        .arg(to)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let mut peak = 0;
    // Polling takes processor time from the copy, so it is off unless the caller wants the memory.
    while watch_memory && child.try_wait()?.is_none() {
        peak = peak.max(process_memory::anonymous(child.id()));
        std::thread::sleep(Duration::from_millis(1));
    }
    match child.wait()?.success() {
        true => Ok((started.elapsed().as_secs_f64(), peak)),
        false => Err("the copy failed".into()),
    }
}

/// Verifies a backup. Returns the seconds.
fn verify(backup: &Path, threads: usize) -> Result<f64> {
    let started = Instant::now();
    let status = Command::new(env!("CARGO_BIN_EXE_deltafold"))
        .args(["verify", "--level", "checksums", "--threads"])
        .arg(threads.to_string())
        .arg("--store")
        .arg(backup)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()?;
    match status.success() {
        true => Ok(started.elapsed().as_secs_f64()),
        false => Err("the verification failed".into()),
    }
}

/// A reader that also writes everything to a target, if there is one.
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

/// Does the minimal work on all snapshots with several threads. Returns the seconds.
fn floor(snapshots: &[PathBuf], to: Option<&Path>, threads: usize) -> Result<f64> {
    let started = Instant::now();
    let queue = Mutex::new(snapshots.to_vec());
    std::thread::scope(|s| {
        let work = || floor_thread(&queue, to);
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

/// Reads and hashes snapshots from a queue, and writes them to the folder `to` if it is given.
fn floor_thread(queue: &Mutex<Vec<PathBuf>>, to: Option<&Path>) -> Result<()> {
    loop {
        let next = queue.lock().map_err(|_| "a worker panicked")?.pop();
        let Some(path) = next else {
            return Ok(());
        };
        let file = path.file_name().ok_or("the path has no file name")?;
        let name = file.to_string_lossy().parse::<SnapshotName>();
        let name = name.map_err(|_| "the file is not named like a snapshot")?;
        let target = to.map(|to| File::create(to.join(file))).transpose()?;
        let synced = target.as_ref().map(File::try_clone).transpose()?;
        let tee = Tee {
            from: File::open(&path)?,
            to: target,
        };
        let mut payload = frame::FrameReader::new(codec::decoder(name.compression, tee)?);
        let mut buf = vec![0; 256 << 10];
        while payload.read(&mut buf)? > 0 {}
        if let Some(synced) = synced {
            synced.sync_all()?;
        }
    }
}

/// Makes an uncompressed copy of a shape's backup.
fn uncompressed(data: &Path, shape: &Shape) -> Result<PathBuf> {
    let backup = data.join(shape.name);
    let uncompressed = data.join(format!("{}-none", shape.name));
    fs::create_dir_all(&uncompressed)?;
    for path in snapshots(&backup)? {
        let file = path.file_name().ok_or("the path has no file name")?;
        let name = file.to_string_lossy().parse::<SnapshotName>();
        let name = name.map_err(|_| "the file is not named like a snapshot")?;
        let plain = SnapshotName {
            compression: Compression::None,
            ..name.clone()
        };
        let target = uncompressed.join("v2").join(plain.to_string());
        fs::create_dir_all(uncompressed.join("v2"))?;
        let mut packed = codec::decoder(name.compression, File::open(&path)?)?;
        std::io::copy(&mut packed, &mut File::create(target)?)?;
    }
    Ok(uncompressed)
}

/// Prints the rows of one shape: floor and program on the compressed and on the uncompressed backup.
fn compare(data: &Path, shape: &Shape, measured: Measured) -> Result<()> {
    let backup = data.join(shape.name);
    generate::backup(&backup, shape)?;
    let uncompressed = uncompressed(data, shape)?;
    for (backup, compressed) in [(&backup, "gzip"), (&uncompressed, "none")] {
        let snapshots = snapshots(backup)?;
        let mut bytes = 0;
        for path in &snapshots {
            bytes += fs::metadata(path)?.len();
        }
        for threads in THREADS {
            let (mut best_floor, mut best) = (f64::MAX, f64::MAX);
            for _ in 0..ROUNDS {
                let (floor_seconds, seconds) = match measured {
                    Measured::Copy => {
                        let target = data.join("target");
                        fs::create_dir_all(&target)?;
                        let floor_seconds = floor(&snapshots, Some(&target), threads)?;
                        fs::remove_dir_all(&target)?;
                        fs::create_dir_all(&target)?;
                        let (seconds, _) = copy(backup, &target, threads, false)?;
                        fs::remove_dir_all(&target)?;
                        (floor_seconds, seconds)
                    }
                    Measured::Verify => {
                        let floor_seconds = floor(&snapshots, None, threads)?;
                        (floor_seconds, verify(backup, threads)?)
                    }
                };
                best_floor = best_floor.min(floor_seconds);
                best = best.min(seconds);
            }
            println!(
                "| {} | {compressed} | {} | {} MiB | {threads} | {best_floor:.2} s | {best:.2} s | {:.2} | 1.3 |",
                shape.name,
                snapshots.len(),
                bytes / MIB,
                best / best_floor,
            );
        }
    }
    fs::remove_dir_all(uncompressed)?;
    Ok(())
}

/// Prints the peak of anonymous memory of copies, next to the limit.
fn copy_memory(data: &Path, shape: &Shape) -> Result<()> {
    let backup = data.join(shape.name);
    generate::backup(&backup, shape)?;
    let target = data.join("target");
    for threads in [1, 2, 8] {
        fs::create_dir_all(&target)?;
        let (seconds, peak) = copy(&backup, &target, threads, true)?;
        println!(
            "| {} | {threads} | {seconds:.2} s | {} MiB | {} MiB |",
            shape.name,
            peak / MIB,
            16 + 32 * threads
        );
        fs::remove_dir_all(&target)?;
    }
    Ok(())
}
