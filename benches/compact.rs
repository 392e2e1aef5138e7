//! How far `compact` and `restore` are from what cannot be avoided: ratios, measured in one run.
//!
//! The floor decompresses and hashes the inputs, and hashes and compresses the output, or writes and
//! syncs it, with the same libraries and number of threads. `cargo bench` prints the tables of the
//! README; a part of it can be named: `cargo bench -- lease`, `churn`, `insert`, `restore`, `memory`,
//! `restore-memory`, `large` (needs 45 GB of disk) or `s3`. `large` is only run when named.

// It has shapes for the other benches, too.
#[allow(dead_code)]
mod generate;
#[path = "../tests/support/mod.rs"]
mod support;

use deltafold::backup::{Compression, codec, frame};
use generate::Shape;
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

/// Every figure is the best of so many rounds; floor and program take turns.
const ROUNDS: usize = 3;
const THREADS: [usize; 2] = [1, 2];
const MIB: u64 = 1 << 20;

fn main() -> Result<()> {
    let data = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("buckets");
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    let named = |name: &str| wanted.iter().any(|w| w == name);
    let is_wanted = |name: &str| wanted.is_empty() || named(name);
    let shapes = [generate::LEASE, generate::CHURN, generate::INSERT];
    if shapes.iter().any(|s| is_wanted(s.name)) {
        println!("\n| bucket | threads | floor | compact | ratio | goal |");
        println!("|---|---|---|---|---|---|");
    }
    for shape in &shapes {
        if is_wanted(shape.name) {
            ratios(&data, shape)?;
        }
    }
    if is_wanted("restore") {
        println!("\n| bucket | history | threads | floor | restore | ratio | goal |");
        println!("|---|---|---|---|---|---|---|");
        for shape in &shapes {
            for history in ["latest", "all"] {
                restores(&data, shape, history)?;
            }
        }
    }
    if is_wanted("memory") || named("large") {
        println!("\n| bucket | deltas | threads | compact | peak anonymous memory | limit |");
        println!("|---|---|---|---|---|---|");
    }
    if is_wanted("memory") {
        memory(&data, &generate::STEADY, &[])?;
        memory(&data, &generate::STEADY.times(10, "steady × 10"), &[])?;
        memory(&data, &generate::INSERT, &[])?;
        memory(&data, &generate::LONG, &[])?;
    }
    if is_wanted("restore-memory") {
        println!("\n| bucket | deltas | threads | restore | peak anonymous memory | limit |");
        println!("|---|---|---|---|---|---|");
        memory_of_restore(&data, &generate::STEADY.times(10, "steady × 10"))?;
        memory_of_restore(&data, &generate::INSERT)?;
        memory_of_restore(&data, &generate::LONG)?;
    }
    if named("large") {
        memory(&data, &generate::LARGE, &["--compression", "zstd:1"])?;
    }
    if is_wanted("s3") {
        println!(
            "\n| bucket | threads | local | transfer alone | S3 | (S3 − transfer) ÷ local | goal |"
        );
        println!("|---|---|---|---|---|---|---|");
        for shape in &shapes {
            s3(&data, shape)?;
        }
    }
    Ok(())
}

struct Run {
    seconds: f64,
    anonymous: u64,
    snapshot: String,
}

/// Runs the program on a bucket and takes the result away again, to `keep` if given.
fn compact(bucket: &Path, threads: usize, keep: Option<&Path>) -> Result<Run> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deltafold"));
    command.args(["compact", "--store"]).arg(bucket);
    let run = measure(command.arg("--temp-dir").arg(bucket), threads, false)?;
    let written = bucket.join("v2").join(&run.snapshot);
    match keep {
        Some(to) => fs::rename(written, to)?,
        None => fs::remove_file(written)?,
    }
    Ok(run)
}

/// Runs a command; `look` watches its memory.
fn measure(command: &mut Command, threads: usize, look: bool) -> Result<Run> {
    let started = Instant::now();
    let mut child = command
        .args(["--output", "json", "--threads", &threads.to_string()])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let status = format!("/proc/{}/status", child.id());
    let mut anonymous = 0;
    // Looking takes a part of a processor: only where it is wanted.
    while look && child.try_wait()?.is_none() {
        anonymous = anonymous.max(rss_anon(&status).unwrap_or(0));
        std::thread::sleep(Duration::from_millis(1));
    }
    child.wait()?;
    let seconds = started.elapsed().as_secs_f64();
    let mut said = String::new();
    if let Some(mut out) = child.stdout.take() {
        out.read_to_string(&mut said)?;
    }
    let outcome: serde_json::Value = serde_json::from_str(&said)?;
    if outcome["status"] != "Succeeded" {
        return Err(format!("compact failed: {said}").into());
    }
    Ok(Run {
        seconds,
        anonymous,
        // Of a restore there is none.
        snapshot: outcome["snapshot"].as_str().unwrap_or_default().to_owned(),
    })
}

fn rss_anon(status: &str) -> Option<u64> {
    let text = fs::read_to_string(status).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("RssAnon:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Decompresses an object, hashing it as its frame has it.
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

/// What cannot be avoided: seconds for the inputs and for the output, hashed and compressed.
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

/// Decompresses and hashes the inputs, as many at once as there are threads.
fn read_all(inputs: &[PathBuf], threads: usize) -> Result<()> {
    let queue = Mutex::new(inputs.to_vec());
    std::thread::scope(|s| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                s.spawn(|| -> Result<()> {
                    loop {
                        let next = queue.lock().map_err(|_| "a worker panicked")?.pop();
                        match next {
                            Some(path) => decompress(&path, |_| Ok(()))?,
                            None => return Ok(()),
                        }
                    }
                })
            })
            .collect();
        for w in workers {
            w.join().map_err(|_| "a worker panicked")??;
        }
        Ok(())
    })
}

/// The objects of a bucket, the oldest first.
fn objects(bucket: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(bucket.join("v2"))? {
        paths.push(entry?.path());
    }
    paths.sort();
    Ok(paths)
}

fn ratios(data: &Path, shape: &Shape) -> Result<()> {
    let bucket = data.join(shape.name);
    generate::bucket(&bucket, shape)?;
    let inputs = objects(&bucket)?;
    let packed = bucket.join("result.gz");
    compact(&bucket, 2, Some(&packed))?;
    let plain = bucket.join("result");
    let mut out = File::create(&plain)?;
    decompress(&packed, |b| out.write_all(b))?;
    for threads in THREADS {
        let (mut least, mut best) = (f64::MAX, f64::MAX);
        for _ in 0..ROUNDS {
            least = least.min(floor(&inputs, &plain, threads)?);
            best = best.min(compact(&bucket, threads, None)?.seconds);
        }
        println!(
            "| {} | {threads} | {least:.2} s | {best:.2} s | {:.2} | 1.5 |",
            shape.name,
            best / least,
        );
    }
    fs::remove_file(plain)?;
    fs::remove_file(packed)?;
    Ok(())
}

/// Runs the program into a new data directory, which is removed again.
fn restore(bucket: &Path, dir: &Path, threads: usize, history: &str, look: bool) -> Result<Run> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deltafold"));
    command.args(["restore", "--keep-history", history, "--store"]);
    command.arg(bucket).arg("--data-dir").arg(dir);
    let run = measure(command.arg("--temp-dir").arg(bucket), threads, look)?;
    fs::remove_dir_all(dir)?;
    Ok(run)
}

/// As `ratios`; the output is written and synced, as large as the database is.
fn restores(data: &Path, shape: &Shape, history: &str) -> Result<()> {
    let bucket = data.join(shape.name);
    generate::bucket(&bucket, shape)?;
    let inputs = objects(&bucket)?;
    let (plain, again, dir) = (
        bucket.join("result"),
        bucket.join("copy"),
        bucket.join("member"),
    );
    let mut command = Command::new(env!("CARGO_BIN_EXE_deltafold"));
    command.args(["restore", "--keep-history", history, "--store"]);
    command.arg(&bucket).arg("--to-snapshot").arg(&plain);
    measure(command.arg("--temp-dir").arg(&bucket), 2, false)?;
    for threads in THREADS {
        let (mut least, mut best) = (f64::MAX, f64::MAX);
        for _ in 0..ROUNDS {
            let started = Instant::now();
            read_all(&inputs, threads)?;
            let mut out = File::create(&again)?;
            io::copy(&mut BufReader::new(File::open(&plain)?), &mut out)?;
            out.sync_all()?;
            least = least.min(started.elapsed().as_secs_f64());
            fs::remove_file(&again)?;
            best = best.min(restore(&bucket, &dir, threads, history, false)?.seconds);
        }
        println!(
            "| {} | {history} | {threads} | {least:.2} s | {best:.2} s | {:.2} | 1.5 |",
            shape.name,
            best / least,
        );
    }
    fs::remove_file(plain)?;
    Ok(())
}

/// The most anonymous memory of a restore with all history, next to the most it may have.
fn memory_of_restore(data: &Path, shape: &Shape) -> Result<()> {
    let bucket = data.join(format!("{}-{}", shape.name, shape.changes));
    let (keys, key_bytes) = generate::bucket(&bucket, shape)?;
    for threads in THREADS.into_iter().chain([8]) {
        let run = restore(&bucket, &bucket.join("member"), threads, "all", true)?;
        println!(
            "| {} | {} | {threads} | {:.2} s | {} MiB | {} MiB |",
            shape.name,
            objects(&bucket)?.len() - 1,
            run.seconds,
            run.anonymous / MIB,
            limit(shape, keys, key_bytes, threads) / MIB
        );
    }
    fs::remove_dir_all(bucket)?;
    Ok(())
}

/// The bound that ARCHITECTURE.md states.
fn limit(shape: &Shape, keys: u64, key_bytes: u64, threads: usize) -> u64 {
    let event = shape.value_bytes.end() * 4 / 3;
    64 * MIB + 128 * keys + key_bytes + event as u64 + 8 * MIB * threads as u64
}

/// The most anonymous memory that a run had, next to the most it may have.
fn memory(data: &Path, shape: &Shape, more: &[&str]) -> Result<()> {
    let bucket = data.join(format!("{}-{}", shape.name, shape.changes));
    let (keys, key_bytes) = generate::bucket(&bucket, shape)?;
    let inputs = objects(&bucket)?;
    for threads in THREADS.into_iter().chain([8]) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_deltafold"));
        command.args(["compact", "--store"]).arg(&bucket).args(more);
        let run = measure(command.arg("--temp-dir").arg(&bucket), threads, true)?;
        fs::remove_file(bucket.join("v2").join(&run.snapshot))?;
        println!(
            "| {} | {} | {threads} | {:.2} s | {} MiB | {} MiB |",
            shape.name,
            inputs.len() - 1,
            run.seconds,
            run.anonymous / MIB,
            limit(shape, keys, key_bytes, threads) / MIB
        );
    }
    // Tens of gigabytes are not kept.
    fs::remove_dir_all(bucket)?;
    Ok(())
}

/// The same on a real S3 server, beside which the transfer alone is measured.
fn s3(data: &Path, shape: &Shape) -> Result<()> {
    let local = data.join(shape.name);
    generate::bucket(&local, shape)?;
    let runtime = tokio::runtime::Runtime::new()?;
    let minio = Minio::start();
    runtime.block_on(minio.create_bucket("bench"));
    let store = minio.store("bench");
    let mut inputs = Vec::new();
    for path in objects(&local)? {
        let name = path.file_name().ok_or("no name")?.to_string_lossy();
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
        let (mut near, mut far, mut alone) = (f64::MAX, f64::MAX, f64::MAX);
        for _ in 0..ROUNDS {
            near = near.min(compact(&local, threads, None)?.seconds);
            let mut command = Command::new(env!("CARGO_BIN_EXE_deltafold"));
            command.args(["compact", "--store", "s3://bench", "--temp-dir"]);
            let run = measure(command.arg(&local).envs(minio.env()), threads, false)?;
            far = far.min(run.seconds);
            let written = object_store::path::Path::from(format!("v2/{}", run.snapshot));
            alone = alone.min(runtime.block_on(async {
                let result = store.get(&written).await?.bytes().await?;
                store.delete(&written).await?;
                let started = Instant::now();
                for input in &inputs {
                    let mut stream = store.get(input).await?.into_stream();
                    while let Some(chunk) = futures::StreamExt::next(&mut stream).await {
                        chunk?;
                    }
                }
                let upload = store.put_multipart(&written).await?;
                let mut upload = WriteMultipart::new_with_chunk_size(upload, 8 << 20);
                upload.put(result);
                upload.finish().await?;
                let seconds = started.elapsed().as_secs_f64();
                store.delete(&written).await?;
                Ok::<_, object_store::Error>(seconds)
            })?);
        }
        println!(
            "| {} | {threads} | {near:.2} s | {alone:.2} s | {far:.2} s | {:.2} | 1.2 |",
            shape.name,
            (far - alone) / near,
        );
    }
    Ok(())
}
