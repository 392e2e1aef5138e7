//! Compares `compact` and `restore` with the minimal work, and their memory with its bound.
//!
//! The minimal work ("floor") decompresses and hashes the inputs, and hashes and compresses the output, or
//! for a restore writes and syncs it, with the same libraries and number of threads. Program and floor are
//! measured in the same run. `cargo bench` prints the tables of the README; arguments select some: `lease`,
//! `churn`, `insert`, `restore`, `memory`, `restore-memory`, `s3`, and `large`, which runs only when it is
//! named, because it needs 45 GB of disk.

// Other benches use the shapes that this one does not.
#[allow(dead_code)]
mod generate;
mod process_memory;
#[path = "../tests/support/mod.rs"]
mod support;

use deltafold::backup::{Compression, codec, frame};
use generate::Shape;
use object_store::aws::AmazonS3;
use object_store::{ObjectStoreExt, WriteMultipart};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use support::minio::Minio;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Every figure is the best of this many rounds. Floor and program take turns.
const ROUNDS: usize = 3;
const THREADS: [usize; 2] = [1, 2];
const MIB: u64 = 1 << 20;

fn main() -> Result<()> {
    let data = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("buckets");
    let tables: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    let is_named = |name: &str| tables.iter().any(|t| t == name);
    let is_selected = |name: &str| tables.is_empty() || is_named(name);
    let shapes = [generate::LEASE, generate::CHURN, generate::INSERT];
    if shapes.iter().any(|s| is_selected(s.name)) {
        println!("\n| bucket | threads | floor | compact | ratio | goal |");
        println!("|---|---|---|---|---|---|");
    }
    for shape in &shapes {
        if is_selected(shape.name) {
            compare_compact(&data, shape)?;
        }
    }
    if is_selected("restore") {
        println!("\n| bucket | history | threads | floor | restore | ratio | goal |");
        println!("|---|---|---|---|---|---|---|");
        for shape in &shapes {
            for history in ["latest", "all"] {
                compare_restore(&data, shape, history)?;
            }
        }
    }
    if is_selected("memory") || is_named("large") {
        println!("\n| bucket | deltas | threads | compact | peak anonymous memory | limit |");
        println!("|---|---|---|---|---|---|");
    }
    if is_selected("memory") {
        compact_memory(&data, &generate::STEADY, &[])?;
        compact_memory(&data, &generate::STEADY.times(10, "steady × 10"), &[])?;
        compact_memory(&data, &generate::INSERT, &[])?;
        compact_memory(&data, &generate::LONG, &[])?;
    }
    if is_selected("restore-memory") {
        println!("\n| bucket | deltas | threads | restore | peak anonymous memory | limit |");
        println!("|---|---|---|---|---|---|");
        restore_memory(&data, &generate::STEADY.times(10, "steady × 10"))?;
        restore_memory(&data, &generate::INSERT)?;
        restore_memory(&data, &generate::LONG)?;
    }
    if is_named("large") {
        compact_memory(&data, &generate::LARGE, &["--compression", "zstd:1"])?;
    }
    if is_selected("s3") {
        println!(
            "\n| bucket | threads | local | transfer alone | S3 | (S3 − transfer) ÷ local | goal |"
        );
        println!("|---|---|---|---|---|---|---|");
        for shape in &shapes {
            compare_s3(&data, shape)?;
        }
    }
    Ok(())
}

/// One run of the program.
struct Measurement {
    seconds: f64,
    peak_memory: u64,
    /// The name of the published snapshot; empty for a restore.
    snapshot: String,
}

/// Compacts a backup and removes the result from it; moves it to `keep` if given.
fn compact(backup: &Path, threads: usize, keep: Option<&Path>) -> Result<Measurement> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deltafold"));
    command.args(["compact", "--store"]).arg(backup);
    let run = measure(command.arg("--temp-dir").arg(backup), threads, false)?;
    let result = backup.join("v2").join(&run.snapshot);
    match keep {
        Some(to) => fs::rename(result, to)?,
        None => fs::remove_file(result)?,
    }
    Ok(run)
}

/// Runs a command; `watch_memory` polls its memory.
fn measure(command: &mut Command, threads: usize, watch_memory: bool) -> Result<Measurement> {
    let started = Instant::now();
    let mut child = command
        .args(["--output", "json", "--threads", &threads.to_string()])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut peak_memory = 0;
    // Polling takes processor time from the program, so it is off unless the caller wants the memory.
    while watch_memory && child.try_wait()?.is_none() {
        peak_memory = peak_memory.max(process_memory::anonymous(child.id()));
        std::thread::sleep(Duration::from_millis(1));
    }
    child.wait()?;
    let seconds = started.elapsed().as_secs_f64();
    let mut output = String::new();
    if let Some(mut out) = child.stdout.take() {
        out.read_to_string(&mut output)?;
    }
    let outcome: serde_json::Value = serde_json::from_str(&output)?;
    if outcome["status"] != "Succeeded" {
        return Err(format!("the program failed: {output}").into());
    }
    Ok(Measurement {
        seconds,
        peak_memory,
        snapshot: outcome["snapshot"].as_str().unwrap_or_default().to_owned(),
    })
}

/// Decompresses a snapshot and checks its hash, passing on its payload.
fn decompress(path: &Path, mut each: impl FnMut(&[u8]) -> io::Result<()>) -> Result<()> {
    let compression = match path.extension().and_then(|e| e.to_str()) {
        Some("gz") => Compression::Gzip,
        _ => Compression::None,
    };
    let mut r = frame::FrameReader::new(codec::decoder(compression, File::open(path)?)?);
    let mut buf = vec![0; 256 << 10];
    loop {
        let n = r.read(&mut buf)?;
        if n == 0 {
            return Ok(());
        }
        each(&buf[..n])?;
    }
}

/// Does the minimal work of a compaction: reads the inputs, hashes and compresses the output. Returns the
/// seconds.
fn floor(inputs: &[PathBuf], output: &Path, threads: usize) -> Result<f64> {
    let started = Instant::now();
    read_all(inputs, threads)?;
    let mut packed = codec::encoder(Compression::Gzip.into(), threads, io::sink())?;
    let mut hash = Sha256::new();
    let mut plain = BufReader::new(File::open(output)?);
    let mut buf = vec![0; 256 << 10];
    loop {
        let n = plain.read(&mut buf)?;
        if n == 0 {
            break;
        }
        hash.update(&buf[..n]);
        packed.write_all(&buf[..n])?;
    }
    packed.write_all(hash.finalize().as_slice())?;
    packed.finish()?;
    Ok(started.elapsed().as_secs_f64())
}

/// Decompresses and hashes the inputs with several threads.
fn read_all(inputs: &[PathBuf], threads: usize) -> Result<()> {
    let queue = Mutex::new(inputs.to_vec());
    std::thread::scope(|s| {
        let work = || -> Result<()> {
            loop {
                let next = queue.lock().map_err(|_| "a worker panicked")?.pop();
                match next {
                    Some(path) => decompress(&path, |_| Ok(()))?,
                    None => return Ok(()),
                }
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| s.spawn(work)).collect();
        for w in workers {
            w.join().map_err(|_| "a worker panicked")??;
        }
        Ok(())
    })
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

/// Prints the rows of `compact` for one shape.
fn compare_compact(data: &Path, shape: &Shape) -> Result<()> {
    let backup = data.join(shape.name);
    generate::backup(&backup, shape)?;
    let inputs = snapshots(&backup)?;
    let compressed = backup.join("result.gz");
    compact(&backup, 2, Some(&compressed))?;
    let output = backup.join("result");
    let mut out = File::create(&output)?;
    decompress(&compressed, |b| out.write_all(b))?;
    for threads in THREADS {
        let (mut best_floor, mut best) = (f64::MAX, f64::MAX);
        for _ in 0..ROUNDS {
            best_floor = best_floor.min(floor(&inputs, &output, threads)?);
            best = best.min(compact(&backup, threads, None)?.seconds);
        }
        println!(
            "| {} | {threads} | {best_floor:.2} s | {best:.2} s | {:.2} | 1.5 |",
            shape.name,
            best / best_floor,
        );
    }
    fs::remove_file(output)?;
    fs::remove_file(compressed)?;
    Ok(())
}

/// Restores into a new data directory, and removes it again.
fn restore(
    backup: &Path,
    data_dir: &Path,
    threads: usize,
    history: &str,
    watch_memory: bool,
) -> Result<Measurement> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deltafold"));
    command.args(["restore", "--keep-history", history, "--store"]);
    command.arg(backup).arg("--data-dir").arg(data_dir);
    command.arg("--temp-dir").arg(backup);
    let run = measure(&mut command, threads, watch_memory)?;
    fs::remove_dir_all(data_dir)?;
    Ok(run)
}

/// Prints the rows of `restore` for one shape. The floor reads the inputs, and writes and syncs a file of the
/// database's size.
fn compare_restore(data: &Path, shape: &Shape, history: &str) -> Result<()> {
    let backup = data.join(shape.name);
    generate::backup(&backup, shape)?;
    let inputs = snapshots(&backup)?;
    let database = backup.join("result");
    let database_copy = backup.join("copy");
    let data_dir = backup.join("member");
    let mut command = Command::new(env!("CARGO_BIN_EXE_deltafold"));
    command.args(["restore", "--keep-history", history, "--store"]);
    command.arg(&backup).arg("--to-snapshot").arg(&database);
    measure(command.arg("--temp-dir").arg(&backup), 2, false)?;
    for threads in THREADS {
        let (mut best_floor, mut best) = (f64::MAX, f64::MAX);
        for _ in 0..ROUNDS {
            let started = Instant::now();
            read_all(&inputs, threads)?;
            let mut out = File::create(&database_copy)?;
            io::copy(&mut BufReader::new(File::open(&database)?), &mut out)?;
            out.sync_all()?;
            best_floor = best_floor.min(started.elapsed().as_secs_f64());
            fs::remove_file(&database_copy)?;
            best = best.min(restore(&backup, &data_dir, threads, history, false)?.seconds);
        }
        println!(
            "| {} | {history} | {threads} | {best_floor:.2} s | {best:.2} s | {:.2} | 1.5 |",
            shape.name,
            best / best_floor,
        );
    }
    fs::remove_file(database)?;
    Ok(())
}

/// Prints the peak of anonymous memory of restores with all history, next to the limit.
fn restore_memory(data: &Path, shape: &Shape) -> Result<()> {
    let backup = data.join(format!("{}-{}", shape.name, shape.changes));
    let (keys, key_bytes) = generate::backup(&backup, shape)?;
    for threads in THREADS.into_iter().chain([8]) {
        let run = restore(&backup, &backup.join("member"), threads, "all", true)?;
        println!(
            "| {} | {} | {threads} | {:.2} s | {} MiB | {} MiB |",
            shape.name,
            snapshots(&backup)?.len() - 1,
            run.seconds,
            run.peak_memory / MIB,
            memory_limit(shape, keys, key_bytes, threads) / MIB
        );
    }
    fs::remove_dir_all(backup)?;
    Ok(())
}

/// Returns the memory bound of docs/design/resources.md, in bytes.
fn memory_limit(shape: &Shape, keys: u64, key_bytes: u64, threads: usize) -> u64 {
    let event = shape.value_bytes.end() * 4 / 3;
    64 * MIB + 128 * keys + key_bytes + event as u64 + 8 * MIB * threads as u64
}

/// Prints the peak of anonymous memory of compactions, next to the limit.
fn compact_memory(data: &Path, shape: &Shape, args: &[&str]) -> Result<()> {
    let backup = data.join(format!("{}-{}", shape.name, shape.changes));
    let (keys, key_bytes) = generate::backup(&backup, shape)?;
    let inputs = snapshots(&backup)?;
    for threads in THREADS.into_iter().chain([8]) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_deltafold"));
        command.args(["compact", "--store"]).arg(&backup).args(args);
        let run = measure(command.arg("--temp-dir").arg(&backup), threads, true)?;
        fs::remove_file(backup.join("v2").join(&run.snapshot))?;
        println!(
            "| {} | {} | {threads} | {:.2} s | {} MiB | {} MiB |",
            shape.name,
            inputs.len() - 1,
            run.seconds,
            run.peak_memory / MIB,
            memory_limit(shape, keys, key_bytes, threads) / MIB
        );
    }
    // The backups of this table can have tens of gigabytes: do not keep them.
    fs::remove_dir_all(backup)?;
    Ok(())
}

/// Prints the rows of `compact` on a real S3 server, next to the transfer of the same bytes alone.
fn compare_s3(data: &Path, shape: &Shape) -> Result<()> {
    let local = data.join(shape.name);
    generate::backup(&local, shape)?;
    let runtime = tokio::runtime::Runtime::new()?;
    let minio = Minio::start();
    runtime.block_on(minio.create_bucket("bench"));
    let store = minio.store("bench");
    let mut inputs = Vec::new();
    for path in snapshots(&local)? {
        let name = path
            .file_name()
            .ok_or("the path has no file name")?
            .to_string_lossy();
        let object = object_store::path::Path::from(format!("v2/{name}"));
        runtime.block_on(async {
            let mut upload = WriteMultipart::new(store.put_multipart(&object).await?);
            upload.write(&fs::read(&path)?);
            upload.finish().await?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
        })?;
        inputs.push(object);
    }
    for threads in THREADS {
        let (mut on_disk, mut on_s3, mut transfer) = (f64::MAX, f64::MAX, f64::MAX);
        for _ in 0..ROUNDS {
            on_disk = on_disk.min(compact(&local, threads, None)?.seconds);
            let mut command = Command::new(env!("CARGO_BIN_EXE_deltafold"));
            command.args(["compact", "--store", "s3://bench", "--temp-dir"]);
            let run = measure(command.arg(&local).envs(minio.env()), threads, false)?;
            on_s3 = on_s3.min(run.seconds);
            let result = object_store::path::Path::from(format!("v2/{}", run.snapshot));
            let seconds = runtime.block_on(transfer_alone(&store, &inputs, &result))?;
            transfer = transfer.min(seconds);
        }
        println!(
            "| {} | {threads} | {on_disk:.2} s | {transfer:.2} s | {on_s3:.2} s | {:.2} | 1.2 |",
            shape.name,
            (on_s3 - transfer) / on_disk,
        );
    }
    Ok(())
}

/// Downloads the inputs of a compaction and uploads its result again. Removes the result. Returns the
/// seconds.
async fn transfer_alone(
    store: &AmazonS3,
    inputs: &[object_store::path::Path],
    result: &object_store::path::Path,
) -> object_store::Result<f64> {
    let bytes = store.get(result).await?.bytes().await?;
    store.delete(result).await?;
    let started = Instant::now();
    for input in inputs {
        let mut stream = store.get(input).await?.into_stream();
        while let Some(chunk) = futures::StreamExt::next(&mut stream).await {
            chunk?;
        }
    }
    let upload = store.put_multipart(result).await?;
    let mut upload = WriteMultipart::new_with_chunk_size(upload, 8 << 20);
    upload.put(bytes);
    upload.finish().await?;
    let seconds = started.elapsed().as_secs_f64();
    store.delete(result).await?;
    Ok(seconds)
}
