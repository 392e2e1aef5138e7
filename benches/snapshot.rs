//! Compares `snapshot full` with the minimal work, and shows whether `snapshot follow` and `delta` keep up
//! with etcd.
//!
//! The minimal work of a full is etcd's own stream to a synced file, and compressing the same bytes with the
//! same library and number of threads. Everything is measured in the same run, on a real etcd. `cargo bench
//! --bench snapshot` prints the tables of the README; `full`, `follow` or `delta` selects one.

#[allow(dead_code)]
mod generate;
mod process_memory;
#[path = "../tests/support/mod.rs"]
mod support;

use deltafold::backup::{Compression, codec};
use etcd_client::{KvClient, Txn, TxnOp};
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

/// Every figure is the best of this many rounds. Floor and program take turns.
const ROUNDS: usize = 3;
const THREADS: [usize; 2] = [1, 2];
const MIB: u64 = 1 << 20;
const VERSION: EtcdVersion = EtcdVersion::V3_6;
/// How long the load writes to etcd.
const LOAD_DURATION: Duration = Duration::from_secs(30);
/// Concurrent writers. More of them do not make this etcd faster.
const WRITERS: usize = 16;

/// A kind of load on etcd.
struct Load {
    name: &'static str,
    /// Puts in one transaction.
    puts: usize,
    value_bytes: usize,
}

const LOADS: [Load; 3] = [
    Load {
        name: "puts of 200 B",
        puts: 1,
        value_bytes: 200,
    },
    Load {
        name: "puts of 4 KiB",
        puts: 1,
        value_bytes: 4096,
    },
    Load {
        name: "transactions of 50 puts of 200 B",
        puts: 50,
        value_bytes: 200,
    },
];

fn main() -> Result<()> {
    let runtime = Runtime::new()?;
    let _entered = runtime.enter();
    let tables: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    let is_selected = |name: &str| tables.is_empty() || tables.iter().any(|t| t == name);
    if is_selected("full") {
        full(&runtime)?;
    }
    if is_selected("follow") {
        println!(
            "\n| load | etcd alone | etcd, followed | not saved at its end | saved after | peak anonymous memory |"
        );
        println!("|---|---|---|---|---|---|");
        for load in &LOADS {
            follow(&runtime, load)?;
        }
    }
    if is_selected("delta") {
        println!("\n| load | threads | events | etcd wrote | delta | peak anonymous memory |");
        println!("|---|---|---|---|---|---|");
        for load in &LOADS {
            delta(&runtime, load)?;
        }
    }
    Ok(())
}

/// An etcd, and a folder for its data and for stores.
struct Setup {
    etcd: Etcd,
    folder: TempDir,
}

impl Setup {
    fn new() -> Result<Self> {
        // The disk that the other benches use, too.
        let folder = tempfile::Builder::new()
            .prefix("snapshot-")
            .tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
        let etcd = Etcd::start(VERSION, &folder.path().join("data"));
        Ok(Setup { etcd, folder })
    }

    fn prefix(&self, name: &str) -> Prefix {
        Prefix::local(&self.folder.path().join(name))
    }

    fn endpoints(&self) -> Vec<String> {
        vec![self.etcd.endpoint().to_owned()]
    }
}

/// Runs a command. Returns the seconds, its outcome, and the peak of its anonymous memory if `watch_memory`
/// is set.
fn run(command: &mut std::process::Command, watch_memory: bool) -> Result<(f64, Value, u64)> {
    let started = Instant::now();
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut peak = 0;
    while watch_memory && child.try_wait()?.is_none() {
        peak = peak.max(process_memory::anonymous(child.id()));
        std::thread::sleep(Duration::from_millis(2));
    }
    child.wait()?;
    let seconds = started.elapsed().as_secs_f64();
    let mut output = String::new();
    if let Some(mut out) = child.stdout.take() {
        out.read_to_string(&mut output)?;
    }
    let outcome: Value = serde_json::from_str(&output)?;
    if outcome["status"] != "Succeeded" {
        return Err(format!("the program failed: {output}").into());
    }
    Ok((seconds, outcome, peak))
}

/// Writes etcd's own snapshot stream to a file and syncs it. Returns the seconds.
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

/// Compresses a file. Returns the seconds.
fn compress(plain: &Path, compression: Compression, threads: usize) -> Result<f64> {
    let started = Instant::now();
    let mut packed = codec::encoder(compression.into(), threads, io::sink())?;
    let mut plain = BufReader::with_capacity(256 << 10, File::open(plain)?);
    io::copy(&mut plain, &mut packed)?;
    packed.finish()?;
    Ok(started.elapsed().as_secs_f64())
}

/// Fills an etcd with 150,000 keys.
async fn fill(etcd: &Etcd) -> std::result::Result<(), etcd_client::Error> {
    let mut kv = etcd.kv().await;
    let mut rng = fastrand::Rng::with_seed(20_261_121);
    let mut value = Vec::new();
    for txn in 0..1500 {
        let mut puts = Vec::new();
        for n in 0..100 {
            let length = rng.usize(1024..=4096);
            generate::value(&mut rng, length, &mut value);
            let key = format!("/registry/pods/{txn:04}/{n:02}");
            puts.push(TxnOp::put(key, value.clone(), None));
        }
        kv.txn(Txn::new().and_then(puts)).await?;
    }
    Ok(())
}

/// Prints the table of fulls.
fn full(runtime: &Runtime) -> Result<()> {
    let setup = Setup::new()?;
    eprintln!("filling an etcd …");
    runtime.block_on(fill(&setup.etcd))?;
    println!(
        "\n| method | threads | stream | compress | full | ratio | goal | peak anonymous memory |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    let methods = [
        ("none", Compression::None),
        ("gzip", Compression::Gzip),
        ("zstd", Compression::Zstd),
    ];
    let plain = setup.folder.path().join("plain");
    for (name, method) in methods {
        for threads in THREADS {
            let (mut streaming, mut compressing, mut best) = (f64::MAX, f64::MAX, f64::MAX);
            for _ in 0..ROUNDS {
                streaming = streaming.min(stream(runtime, &setup.etcd, &plain)?);
                if method != Compression::None {
                    compressing = compressing.min(compress(&plain, method, threads)?);
                }
                best = best.min(take_full(&setup, name, threads, false)?.0);
            }
            if method == Compression::None {
                compressing = 0.0;
            }
            let peak_memory = take_full(&setup, name, threads, true)?.1;
            println!(
                "| {name} | {threads} | {streaming:.2} s | {compressing:.2} s | {best:.2} s | {:.2} | 1.3 | {} MiB |",
                best / (streaming + compressing),
                peak_memory / MIB
            );
        }
    }
    eprintln!("the database has {} MiB", fs::metadata(&plain)?.len() / MIB);
    Ok(())
}

/// Takes a full and removes it. Returns the seconds, and the peak of anonymous memory if `watch_memory` is
/// set.
fn take_full(
    setup: &Setup,
    method: &str,
    threads: usize,
    watch_memory: bool,
) -> Result<(f64, u64)> {
    let prefix = setup.prefix("store");
    let mut command = snapshot_command("full", &prefix, &setup.endpoints());
    command
        .args(["--compression", method, "--threads", &threads.to_string()])
        .arg("--temp-dir")
        .arg(setup.folder.path());
    let (seconds, _, peak_memory) = run(&mut command, watch_memory)?;
    fs::remove_dir_all(&prefix.url)?;
    Ok((seconds, peak_memory))
}

/// Writers that put values as fast as they can.
struct Writers {
    stop: Arc<AtomicBool>,
    events: Arc<AtomicU64>,
    tasks: Vec<tokio::task::JoinHandle<std::result::Result<(), etcd_client::Error>>>,
    started: Instant,
}

impl Writers {
    fn start(runtime: &Runtime, etcd: &Etcd, load: &Load) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let events = Arc::new(AtomicU64::new(0));
        let mut tasks = Vec::new();
        for writer in 0..WRITERS {
            let kv = runtime.block_on(etcd.kv());
            let (stop, events) = (Arc::clone(&stop), Arc::clone(&events));
            let (puts, value_bytes) = (load.puts, load.value_bytes);
            tasks.push(runtime.spawn(write(writer, kv, puts, value_bytes, stop, events)));
        }
        Writers {
            stop,
            events,
            tasks,
            started: Instant::now(),
        }
    }

    /// Ends the writers. Returns the number of events, and the events per second.
    fn stop(self, runtime: &Runtime) -> Result<(u64, f64)> {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            runtime.block_on(task)??;
        }
        let events = self.events.load(Ordering::Relaxed);
        Ok((events, events as f64 / self.started.elapsed().as_secs_f64()))
    }
}

/// Puts random values into 5000 keys of one writer, until `stop` is set.
async fn write(
    writer: usize,
    mut kv: KvClient,
    puts: usize,
    value_bytes: usize,
    stop: Arc<AtomicBool>,
    events: Arc<AtomicU64>,
) -> std::result::Result<(), etcd_client::Error> {
    let mut rng = fastrand::Rng::with_seed(writer as u64);
    let mut value = Vec::new();
    let mut next = 0;
    while !stop.load(Ordering::Relaxed) {
        let mut ops = Vec::new();
        for _ in 0..puts {
            next = (next + 1) % 5000;
            generate::value(&mut rng, value_bytes, &mut value);
            let key = format!("/registry/{writer}/object-{next:04}");
            ops.push(TxnOp::put(key, value.clone(), None));
        }
        kv.txn(Txn::new().and_then(ops)).await?;
        events.fetch_add(puts as u64, Ordering::Relaxed);
    }
    Ok(())
}

/// Prints a row of `follow`: writes to etcd as fast as possible, first alone and then with a follower.
fn follow(runtime: &Runtime, load: &Load) -> Result<()> {
    let setup = Setup::new()?;
    let writers = Writers::start(runtime, &setup.etcd, load);
    std::thread::sleep(LOAD_DURATION / 3);
    let (_, rate_alone) = writers.stop(runtime)?;

    let prefix = setup.prefix("store");
    let mut command = snapshot_command("follow", &prefix, &setup.endpoints());
    command.args(["--delta-period", "5s"]);
    command.arg("--temp-dir").arg(setup.folder.path());
    let mut follower = Follower::spawn(&mut command);
    follower.wait_until("the first full", || !prefix.fulls().is_empty());
    let writers = Writers::start(runtime, &setup.etcd, load);
    let mut peak_memory = 0;
    while writers.started.elapsed() < LOAD_DURATION {
        peak_memory = peak_memory.max(process_memory::anonymous(follower.id()));
        std::thread::sleep(Duration::from_millis(5));
    }
    let (_, rate_followed) = writers.stop(runtime)?;
    let revision = runtime.block_on(setup.etcd.revision());
    let unsaved = (revision - prefix.last_saved()) * load.puts as i64;
    let stopped = Instant::now();
    follower.wait_saved(&prefix, revision);
    let caught_up = stopped.elapsed().as_secs_f64();
    let fulls = prefix.fulls().len();
    if fulls != 1 {
        return Err(format!("{fulls} fulls: the follower did not keep up").into());
    }
    follower.terminate();
    println!(
        "| {} | {rate_alone:.0} events/s | {rate_followed:.0} events/s | {unsaved} events | {caught_up:.1} s | {} MiB |",
        load.name,
        peak_memory / MIB
    );
    Ok(())
}

/// Prints the rows of `delta` for one load: saves all events of the load at once.
fn delta(runtime: &Runtime, load: &Load) -> Result<()> {
    let setup = Setup::new()?;
    let base = setup.prefix("base");
    let mut first = snapshot_command("delta", &base, &setup.endpoints());
    run(&mut first, false)?;
    let writers = Writers::start(runtime, &setup.etcd, load);
    std::thread::sleep(LOAD_DURATION);
    let (events, rate) = writers.stop(runtime)?;
    for threads in THREADS {
        let (mut best, mut peak_memory) = (f64::MAX, 0);
        for _ in 0..ROUNDS {
            // Each round saves the same events into a copy of the store.
            let prefix = setup.prefix("copy");
            let v2 = Path::new(&prefix.url).join("v2");
            fs::create_dir_all(&v2)?;
            for entry in fs::read_dir(Path::new(&base.url).join("v2"))? {
                let from = entry?.path();
                let name = from.file_name().ok_or("the path has no file name")?;
                fs::copy(&from, v2.join(name))?;
            }
            let mut command = snapshot_command("delta", &prefix, &setup.endpoints());
            command.args(["--threads", &threads.to_string(), "--temp-dir"]);
            command.arg(setup.folder.path());
            let (seconds, outcome, memory) = run(&mut command, true)?;
            if outcome["events"] != events {
                return Err(format!("{events} events were written: {outcome}").into());
            }
            (best, peak_memory) = (best.min(seconds), peak_memory.max(memory));
            fs::remove_dir_all(&prefix.url)?;
        }
        println!(
            "| {} | {threads} | {events} | {rate:.0} events/s | {:.0} events/s | {} MiB |",
            load.name,
            events as f64 / best,
            peak_memory / MIB
        );
    }
    Ok(())
}
