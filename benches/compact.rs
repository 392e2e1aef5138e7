//! How far `compact` is from what cannot be avoided: ratios, measured in one run.
//!
//! The floor decompresses and hashes the inputs, hashes and compresses the output, with the same
//! libraries and number of threads. `cargo bench` prints the table of the README.

mod generate;

use deltafold::bucket::{Compression, codec, frame};
use generate::Shape;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Every figure is the best of so many rounds; floor and program take turns.
const ROUNDS: usize = 3;
const THREADS: [usize; 2] = [1, 2];

fn main() -> Result<()> {
    let data = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("buckets");
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|w| w == name);
    println!("| bucket | threads | floor | compact | ratio | peak anonymous memory |");
    println!("|---|---|---|---|---|---|");
    for shape in [generate::LEASE, generate::CHURN, generate::INSERT] {
        if is_wanted(shape.name) {
            ratios(&data, &shape)?;
        }
    }
    Ok(())
}

struct Run {
    seconds: f64,
    anonymous: u64,
    outcome: serde_json::Value,
}

/// Runs the program on a bucket and takes the result away again, to `keep` if given.
fn compact(bucket: &Path, threads: usize, more: &[&str], keep: Option<&Path>) -> Result<Run> {
    let started = Instant::now();
    let mut child = Command::new(env!("CARGO_BIN_EXE_deltafold"))
        .args(["compact", "--output", "json", "--store"])
        .arg(bucket)
        .arg("--temp-dir")
        .arg(bucket)
        .args(["--threads", &threads.to_string()])
        .args(more)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let status = format!("/proc/{}/status", child.id());
    let mut anonymous = 0;
    while child.try_wait()?.is_none() {
        anonymous = anonymous.max(rss_anon(&status).unwrap_or(0));
        std::thread::sleep(Duration::from_millis(1));
    }
    let seconds = started.elapsed().as_secs_f64();
    let mut said = String::new();
    if let Some(mut out) = child.stdout.take() {
        out.read_to_string(&mut said)?;
    }
    let outcome: serde_json::Value = serde_json::from_str(&said)?;
    if outcome["status"] != "Succeeded" {
        return Err(format!("compact failed: {said}").into());
    }
    let name = outcome["snapshot"].as_str().ok_or("no snapshot")?;
    let written = bucket.join("v2").join(name);
    match keep {
        Some(to) => fs::rename(written, to)?,
        None => fs::remove_file(written)?,
    }
    Ok(Run {
        seconds,
        anonymous,
        outcome,
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

/// What cannot be avoided: seconds for the inputs (as many at once as there are threads) and for
/// the output.
fn floor(inputs: &[PathBuf], output: &Path, threads: usize) -> Result<f64> {
    let started = Instant::now();
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
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
    })?;
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

fn ratios(data: &Path, shape: &Shape) -> Result<()> {
    let bucket = data.join(shape.name);
    generate::bucket(&bucket, shape)?;
    let mut inputs = Vec::new();
    for entry in fs::read_dir(bucket.join("v2"))? {
        inputs.push(entry?.path());
    }
    // Taken from the end: the largest first would be best, names are close to it.
    inputs.sort();
    let packed = bucket.join("result.gz");
    compact(&bucket, 2, &[], Some(&packed))?;
    let plain = bucket.join("result");
    let mut out = File::create(&plain)?;
    decompress(&packed, |b| out.write_all(b))?;
    for threads in THREADS {
        let (mut least, mut best) = (f64::MAX, f64::MAX);
        let mut anonymous = 0;
        for _ in 0..ROUNDS {
            least = least.min(floor(&inputs, &plain, threads)?);
            let run = compact(&bucket, threads, &[], None)?;
            best = best.min(run.seconds);
            anonymous = anonymous.max(run.anonymous);
        }
        println!(
            "| {} | {threads} | {least:.2} s | {best:.2} s | {:.2} | {} MiB |",
            shape.name,
            best / least,
            anonymous >> 20
        );
    }
    fs::remove_file(plain)?;
    fs::remove_file(packed)?;
    Ok(())
}
