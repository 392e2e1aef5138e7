//! How far `snapshot` is from what cannot be avoided, and whether it keeps up with one etcd: measured in one
//! run on a real etcd.
//!
//! The floor of a full is etcd's own stream to a synced file, and compressing the same bytes with the same
//! library and number of threads. `cargo bench --bench snapshot` prints the tables of the README; a part of
//! it can be named: `full`, `follow` or `delta`.

#[allow(dead_code)]
mod generate;
#[path = "../tests/support/mod.rs"]
mod support;

use deltafold::backup::{Compression, codec};
use etcd_client::{Txn, TxnOp};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{self, BufReader, Read, Write};
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::etcd::{Etcd, EtcdVersion};
use support::follower::{Follower, snapshot_command};
use support::restorable::Prefix;
use tempfile::TempDir;
use tokio::runtime::Runtime;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Every figure is the best of so many rounds; floor and program take turns.
const ROUNDS: usize = 3;
const THREADS: [usize; 2] = [1, 2];
const MIB: u64 = 1 << 20;
const VERSION: EtcdVersion = EtcdVersion::V3_6;
/// How long the source is written to.
const LOAD: Duration = Duration::from_secs(30);
/// Writers at once: more do not make this etcd any faster.
const WRITERS: usize = 16;

/// What is written.
struct Shape {
    name: &'static str,
    /// Puts of one transaction.
    puts: usize,
    value_bytes: usize,
}

const SHAPES: [Shape; 3] = [
    Shape {
        name: "puts of 200 B",
        puts: 1,
        value_bytes: 200,
    },
    Shape {
        name: "puts of 4 KiB",
        puts: 1,
        value_bytes: 4096,
    },
    Shape {
        name: "transactions of 50 puts of 200 B",
        puts: 50,
        value_bytes: 200,
    },
];

fn main() -> Result<()> {
    let runtime = Runtime::new()?;
    let _within = runtime.enter();
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|w| w == name);
    if is_wanted("full") {
        full(&runtime)?;
    }
    if is_wanted("follow") {
        println!(
            "\n| load | etcd alone | etcd, followed | not saved at its end | saved after | peak anonymous memory |"
        );
        println!("|---|---|---|---|---|---|");
        for shape in &SHAPES {
            follow(&runtime, shape)?;
        }
    }
    if is_wanted("delta") {
        println!("\n| load | threads | events | etcd wrote | delta | peak anonymous memory |");
        println!("|---|---|---|---|---|---|");
        for shape in &SHAPES {
            delta(&runtime, shape)?;
        }
    }
    Ok(())
}

struct Here {
    etcd: Etcd,
    folder: TempDir,
}

impl Here {
    fn new() -> Result<Self> {
        // Where the disk is that the buckets of the other bench lie on, too.
        let folder = tempfile::Builder::new()
            .prefix("snapshot-")
            .tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
        let etcd = Etcd::start(VERSION, &folder.path().join("data"));
        Ok(Here { etcd, folder })
    }

    fn prefix(&self, name: &str) -> Prefix {
        Prefix::local(&self.folder.path().join(name))
    }

    fn endpoints(&self) -> Vec<String> {
        vec![self.etcd.endpoint().to_owned()]
    }
}

/// Runs a command and gives its outcome, and the most anonymous memory that it had where that is wanted.
fn run(command: &mut std::process::Command, look: bool) -> Result<(f64, Value, u64)> {
    let started = Instant::now();
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let status = format!("/proc/{}/status", child.id());
    let mut anonymous = 0;
    while look && child.try_wait()?.is_none() {
        anonymous = anonymous.max(rss_anon(&status));
        std::thread::sleep(Duration::from_millis(2));
    }
    child.wait()?;
    let seconds = started.elapsed().as_secs_f64();
    let mut said = String::new();
    if let Some(mut out) = child.stdout.take() {
        out.read_to_string(&mut said)?;
    }
    let outcome: Value = serde_json::from_str(&said)?;
    if outcome["status"] != "Succeeded" {
        return Err(format!("it failed: {said}").into());
    }
    Ok((seconds, outcome, anonymous))
}

fn rss_anon(status: &str) -> u64 {
    let text = fs::read_to_string(status).unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("RssAnon:"));
    let kib = line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// etcd's own stream, to a file that is synced.
fn stream(runtime: &Runtime, etcd: &Etcd, to: &Path) -> Result<f64> {
    let started = Instant::now();
    let mut file = File::create(to)?;
    runtime.block_on(async {
        let mut stream = etcd.client().await.snapshot().await?;
        while let Some(part) = stream.message().await? {
            file.write_all(part.blob())?;
        }
        Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
    })?;
    file.sync_all()?;
    Ok(started.elapsed().as_secs_f64())
}

fn compress(plain: &Path, compression: Compression, threads: usize) -> Result<f64> {
    let started = Instant::now();
    let mut packed = codec::encoder(compression.into(), threads, io::sink())?;
    let mut plain = BufReader::with_capacity(256 << 10, File::open(plain)?);
    io::copy(&mut plain, &mut packed)?;
    packed.finish()?;
    Ok(started.elapsed().as_secs_f64())
}

fn full(runtime: &Runtime) -> Result<()> {
    let here = Here::new()?;
    eprintln!("filling an etcd …");
    runtime.block_on(async {
        let mut kv = here.etcd.kv().await;
        let mut rng = fastrand::Rng::with_seed(20_261_121);
        let mut value = Vec::new();
        for txn in 0..1500 {
            let puts = (0..100).map(|n| {
                let length = rng.usize(1024..=4096);
                generate::value(&mut rng, length, &mut value);
                TxnOp::put(
                    format!("/registry/pods/{txn:04}/{n:02}"),
                    value.clone(),
                    None,
                )
            });
            let puts: Vec<TxnOp> = puts.collect();
            kv.txn(Txn::new().and_then(puts)).await?;
        }
        Ok::<_, etcd_client::Error>(())
    })?;
    println!(
        "\n| method | threads | stream | compress | full | ratio | goal | peak anonymous memory |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    let methods = [
        ("none", Compression::None),
        ("gzip", Compression::Gzip),
        ("zstd", Compression::Zstd),
    ];
    let plain = here.folder.path().join("plain");
    for (name, method) in methods {
        for threads in THREADS {
            let (mut alone, mut packing, mut best) = (f64::MAX, f64::MAX, f64::MAX);
            for _ in 0..ROUNDS {
                alone = alone.min(stream(runtime, &here.etcd, &plain)?);
                if method != Compression::None {
                    packing = packing.min(compress(&plain, method, threads)?);
                }
                best = best.min(take_full(&here, name, threads, false)?.0);
            }
            if method == Compression::None {
                packing = 0.0;
            }
            let anonymous = take_full(&here, name, threads, true)?.1;
            println!(
                "| {name} | {threads} | {alone:.2} s | {packing:.2} s | {best:.2} s | {:.2} | 1.3 | {} MiB |",
                best / (alone + packing),
                anonymous / MIB
            );
        }
    }
    eprintln!("the database has {} MiB", fs::metadata(&plain)?.len() / MIB);
    Ok(())
}

fn take_full(here: &Here, method: &str, threads: usize, look: bool) -> Result<(f64, u64)> {
    let prefix = here.prefix("store");
    let mut command = snapshot_command("full", &prefix, &here.endpoints());
    command
        .args(["--compression", method, "--threads", &threads.to_string()])
        .arg("--temp-dir")
        .arg(here.folder.path());
    let (seconds, _, anonymous) = run(&mut command, look)?;
    fs::remove_dir_all(&prefix.url)?;
    Ok((seconds, anonymous))
}

/// Writers that put as fast as they can.
struct Writing {
    stop: Arc<AtomicBool>,
    events: Arc<AtomicU64>,
    tasks: Vec<tokio::task::JoinHandle<std::result::Result<(), etcd_client::Error>>>,
    started: Instant,
}

impl Writing {
    fn start(runtime: &Runtime, etcd: &Etcd, shape: &Shape) -> Self {
        let (stop, events) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let tasks = (0..WRITERS)
            .map(|writer| {
                let mut kv = runtime.block_on(etcd.kv());
                let (stop, events) = (Arc::clone(&stop), Arc::clone(&events));
                let (puts, length) = (shape.puts, shape.value_bytes);
                runtime.spawn(async move {
                    let mut rng = fastrand::Rng::with_seed(writer as u64);
                    let mut value = Vec::new();
                    let mut next = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let mut ops = Vec::new();
                        for _ in 0..puts {
                            next = (next + 1) % 5000;
                            generate::value(&mut rng, length, &mut value);
                            let key = format!("/registry/{writer}/object-{next:04}");
                            ops.push(TxnOp::put(key, value.clone(), None));
                        }
                        kv.txn(Txn::new().and_then(ops)).await?;
                        events.fetch_add(puts as u64, Ordering::Relaxed);
                    }
                    Ok(())
                })
            })
            .collect();
        Writing {
            stop,
            events,
            tasks,
            started: Instant::now(),
        }
    }

    /// Events in all, and in a second.
    fn stop(self, runtime: &Runtime) -> Result<(u64, f64)> {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            runtime.block_on(task)??;
        }
        let events = self.events.load(Ordering::Relaxed);
        Ok((events, events as f64 / self.started.elapsed().as_secs_f64()))
    }
}

/// The source is written to as fast as it can be, alone and while it is followed.
fn follow(runtime: &Runtime, shape: &Shape) -> Result<()> {
    let here = Here::new()?;
    let writing = Writing::start(runtime, &here.etcd, shape);
    std::thread::sleep(LOAD / 3);
    let (_, alone) = writing.stop(runtime)?;

    let prefix = here.prefix("store");
    let mut command = snapshot_command("follow", &prefix, &here.endpoints());
    command.args(["--delta-period", "5s"]);
    command.arg("--temp-dir").arg(here.folder.path());
    let mut follower = Follower::spawn(&mut command);
    follower.wait_until("the first full", || !prefix.fulls().is_empty());
    let writing = Writing::start(runtime, &here.etcd, shape);
    let status = format!("/proc/{}/status", follower.id());
    let mut anonymous = 0;
    while writing.started.elapsed() < LOAD {
        anonymous = anonymous.max(rss_anon(&status));
        std::thread::sleep(Duration::from_millis(5));
    }
    let (_, followed) = writing.stop(runtime)?;
    let revision = runtime.block_on(here.etcd.revision());
    let lag = (revision - prefix.last_saved()) * shape.puts as i64;
    let stopped = Instant::now();
    follower.wait_saved(&prefix, revision);
    let caught_up = stopped.elapsed().as_secs_f64();
    let fulls = prefix.fulls().len();
    if fulls != 1 {
        return Err(format!("{fulls} fulls: it did not keep up").into());
    }
    follower.terminate();
    println!(
        "| {} | {alone:.0} events/s | {followed:.0} events/s | {lag} events | {caught_up:.1} s | {} MiB |",
        shape.name,
        anonymous / MIB
    );
    Ok(())
}

/// What was written for a while is saved at once.
fn delta(runtime: &Runtime, shape: &Shape) -> Result<()> {
    let here = Here::new()?;
    let base = here.prefix("base");
    run(
        &mut snapshot_command("delta", &base, &here.endpoints()),
        false,
    )?;
    let writing = Writing::start(runtime, &here.etcd, shape);
    std::thread::sleep(LOAD);
    let (events, rate) = writing.stop(runtime)?;
    for threads in THREADS {
        let (mut best, mut anonymous) = (f64::MAX, 0);
        for _ in 0..ROUNDS {
            let prefix = here.prefix("again");
            let v2 = Path::new(&prefix.url).join("v2");
            fs::create_dir_all(&v2)?;
            for entry in fs::read_dir(Path::new(&base.url).join("v2"))? {
                let from = entry?.path();
                fs::copy(&from, v2.join(from.file_name().ok_or("no name")?))?;
            }
            let mut command = snapshot_command("delta", &prefix, &here.endpoints());
            command.args(["--threads", &threads.to_string(), "--temp-dir"]);
            command.arg(here.folder.path());
            let (seconds, outcome, memory) = run(&mut command, true)?;
            if outcome["events"] != events {
                return Err(format!("{events} events were written: {outcome}").into());
            }
            (best, anonymous) = (best.min(seconds), anonymous.max(memory));
            fs::remove_dir_all(&prefix.url)?;
        }
        println!(
            "| {} | {threads} | {events} | {rate:.0} events/s | {:.0} events/s | {} MiB |",
            shape.name,
            events as f64 / best,
            anonymous / MIB
        );
    }
    Ok(())
}
