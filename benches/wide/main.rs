//! Measures commands on backups of many snapshots and on a slow store: seconds, requests by kind, memory,
//! next to goals.
//!
//! `cargo bench --bench wide` prints the tables of docs/design/measurements.md; arguments select parts. `--scale 10`
//! makes everything a tenth as large for a quick look, with unchanged goals. The S3 server is MinIO on this
//! machine, behind a line that counts requests and delays responses; "plain" is the same line without the
//! delay, in the same run. Times are medians of `--runs`; a run that takes longer than 20 s is not repeated.

mod followers;
#[allow(dead_code)]
#[path = "../generate.rs"]
mod generate;
mod local;
mod measure;
#[allow(dead_code)]
#[path = "../process_memory.rs"]
mod process_memory;
mod s3;
#[path = "../../tests/support/mod.rs"]
mod support;

use chrono::{DateTime, SecondsFormat};
use clap::{Parser, ValueEnum};
use generate::Shape;
use measure::{Goal, MB, MIB, Run, local_row};
use s3::Server;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use support::tools;
use tempfile::TempDir;
use tokio::runtime::Runtime;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[derive(Parser)]
struct Args {
    /// The parts to measure [default: all]
    parts: Vec<Part>,
    /// Only rows whose name contains this text; for `local`, `s3` and `year`
    #[arg(long)]
    only: Option<String>,
    /// Make everything this many times smaller
    #[arg(long, default_value_t = 1)]
    scale: usize,
    /// Runs of each row
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Delay of each response in milliseconds, for parts without a fixed delay
    #[arg(long, default_value_t = 30)]
    delay: u64,
    /// Seconds after which a run is killed
    #[arg(long, default_value_t = 900)]
    give_up: u64,
    /// Measure this program instead of the one that was built
    #[arg(long, default_value = env!("CARGO_BIN_EXE_deltafold"))]
    program: PathBuf,
    /// With `shapes`: an older program, which must not be faster on a local disk
    #[arg(long)]
    before: Option<PathBuf>,
    /// With `outage`: seconds without a store [the goal assumes 600]
    #[arg(long, default_value_t = 60)]
    outage: u64,
    /// Ignored; Cargo adds it.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The wide backup in a local folder
    Local,
    /// A backup that two snapshotters wrote at the same time, in a local folder
    Overlap,
    /// The wide backup on S3
    S3,
    /// Few large deltas, in a local folder and on S3
    Shapes,
    /// One object of 2 GB on S3, with 20 MB/s for each stream
    Object,
    /// Deltas of a follower, with a delay of 50 ms
    Delta,
    /// A follower after an outage of its store, with a delay of 50 ms
    Outage,
    /// A year of small snapshots, in a local folder
    Year,
    /// A plain snapshot file, compared with etcdutl
    Plain,
    /// A separate table by number of deltas, size of the database and delay
    Sizes,
}

fn main() -> Result<()> {
    let mut args = Args::parse();
    if args.parts.is_empty() {
        args.parts = Part::value_variants().to_vec();
    }
    let data = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("buckets");
    fs::create_dir_all(&data)?;
    let bench = Bench {
        runtime: Runtime::new()?,
        data,
        args,
    };
    let _entered = bench.runtime.enter();
    if bench.args.parts.iter().any(|p| *p != Part::Sizes) {
        println!("\n| work | where | time | requests | peak memory | goal | holds |");
        println!("|---|---|---|---|---|---|---|");
    }
    for part in bench.args.parts.clone() {
        match part {
            Part::Local => bench.local()?,
            Part::Overlap => bench.overlap()?,
            Part::S3 => bench.s3()?,
            Part::Shapes => bench.shapes()?,
            Part::Object => bench.object()?,
            Part::Delta => bench.delta()?,
            Part::Outage => bench.outage()?,
            Part::Year => bench.year()?,
            Part::Plain => bench.plain()?,
            Part::Sizes => bench.sizes()?,
        }
    }
    Ok(())
}

/// The arguments and the resources that all parts share.
struct Bench {
    args: Args,
    /// The folder of generated backups, which are kept for the next run.
    data: PathBuf,
    runtime: Runtime,
}

impl Bench {
    fn delay(&self) -> Duration {
        Duration::from_millis(self.args.delay)
    }

    fn is_wanted(&self, work: &str) -> bool {
        let only = self.args.only.as_deref();
        only.is_none_or(|text| work.contains(text))
    }

    /// Returns a size divided by `--scale`.
    fn scaled(&self, n: usize) -> usize {
        (n / self.args.scale).max(1)
    }

    fn wide(&self) -> Shape {
        Shape {
            changes: self.scaled(26_000) * 20,
            ..generate::WIDE
        }
    }

    /// Generates the backup of a shape, unless it exists. Also returns the memory bound of
    /// docs/design/resources.md in bytes.
    fn backup(&self, shape: &Shape) -> Result<(PathBuf, u64)> {
        let folder = self.data.join(format!("{}-{}", shape.name, shape.changes));
        let (keys, key_bytes) = generate::backup(&folder, shape)?;
        let threads = std::thread::available_parallelism()?.get() as u64;
        let event = shape.value_bytes.end() * 4 / 3;
        let memory_limit = 64 * MIB + 128 * keys + key_bytes + event as u64 + 8 * MIB * threads;
        Ok((folder, memory_limit))
    }

    fn scratch(&self) -> Result<TempDir> {
        Ok(TempDir::with_prefix_in("wide-", &self.data)?)
    }

    /// Runs a command to its end.
    fn run(&self, command: &mut Command) -> Result<Run> {
        Run::measure(command, Duration::from_secs(self.args.give_up))
    }

    fn command(&self, args: &[&str], env: &[(String, String)]) -> Command {
        let mut command = Command::new(&self.args.program);
        tools::forget_env(&mut command, &["DELTAFOLD_", "AWS_"]);
        command.args(args).envs(env.iter().cloned());
        command
    }

    /// Returns the time after a third of a backup: day 30 of the wide one.
    fn day_30(&self, shape: &Shape) -> Result<String> {
        let at = shape.start() + (generate::END - shape.start()) / 3;
        let at = DateTime::from_timestamp(at, 0).ok_or("a time")?;
        Ok(at.to_rfc3339_opts(SecondsFormat::Secs, true))
    }

    /// Prints the rows of few large deltas, in a local folder and on S3.
    fn shapes(&self) -> Result<()> {
        let server = Server::start();
        for shape in [generate::LEASE, generate::CHURN, generate::INSERT] {
            let (folder, memory_limit) = self.backup(&shape)?;
            let store = folder.to_str().ok_or("the path is not UTF-8")?;
            let work = format!("{}: compact", shape.name);
            let run = self.measure_local(&folder, &["compact", "--store", store])?;
            local_row(&work, &run, &[Goal::Anonymous(memory_limit)]);
            if let Some(before) = &self.args.before {
                self.compare_programs(before, &shape, &folder)?;
            }
            let bucket = shape.name;
            let objects = self.upload(&server, &folder, bucket)?;
            let args = |_| {
                let args = ["compact", "--store", &format!("s3://{bucket}")];
                args.map(str::to_owned).to_vec()
            };
            self.plain_and_delayed(&work, vec![Goal::Plain(1.1, 5)], |delay| {
                self.measure_bucket(&server, delay, args, &objects)
            })?;
        }
        Ok(())
    }

    /// Prints the row that compares an older program with this one. They take turns, and the best run of each
    /// counts.
    fn compare_programs(&self, before: &Path, shape: &Shape, folder: &Path) -> Result<()> {
        const ROUNDS: usize = 7;
        let store = folder.to_str().ok_or("the path is not UTF-8")?;
        let args = ["compact", "--store", store];
        let (mut old, mut new) = (f64::MAX, f64::MAX);
        for _ in 0..ROUNDS {
            for (program, best) in [(before, &mut old), (&*self.args.program, &mut new)] {
                let scratch = self.scratch()?;
                let mut command = Command::new(program);
                command.args(args);
                let run = self.run(in_scratch(&mut command, &args, scratch.path()))?;
                if let Some(snapshot) = published(&args, &run) {
                    fs::remove_file(folder.join("v2").join(snapshot))?;
                }
                *best = best.min(run.seconds);
            }
        }
        println!(
            "| {}: compact ÷ before | local | {:.3} ({new:.3} s ÷ {old:.3} s) | – | | ≤ 1.02 | {} |",
            shape.name,
            new / old,
            if new <= 1.02 * old { "yes" } else { "no" }
        );
        Ok(())
    }

    /// Prints the table of docs/sizing.md: compact and restore by number of deltas, size of the database and
    /// delay.
    fn sizes(&self) -> Result<()> {
        const DELAYS: [u64; 3] = [0, 30, 100];
        let head = DELAYS.map(|d| format!("{d} ms"));
        println!(
            "\n| deltas | database | work | requests | {} |",
            head.join(" | ")
        );
        println!("|---|---|---|---|{}", "---|".repeat(DELAYS.len()));
        let small = (2_000, 100..=300);
        let large = (100_000, 1_024..=4_096);
        for (deltas, base) in [
            (100, &small),
            (1_000, &small),
            (10_000, &small),
            (100, &large),
            (1_000, &large),
        ] {
            let (keys_in_base, base_bytes) = base.clone();
            let deltas = self.scaled(deltas);
            let shape = Shape {
                name: if keys_in_base > 2_000 {
                    "large"
                } else {
                    "small"
                },
                changes: deltas * 20,
                keys_in_base,
                base_bytes: Some(base_bytes),
                ..generate::WIDE
            };
            let (folder, _) = self.backup(&shape)?;
            let server = Server::start();
            let store = self.upload(&server, &folder, "sizes")?;
            let mut database = 0.0;
            // The restore comes first, because only its outcome has the size of the database.
            for work in ["restore", "compact"] {
                let args = |_| [work, "--store", "s3://sizes"].map(str::to_owned).to_vec();
                let mut cells = Vec::new();
                for delay in DELAYS {
                    let delay = Duration::from_millis(delay);
                    cells.push(self.measure_bucket(&server, delay, args, &store)?);
                }
                let last = cells.last().ok_or("no run")?;
                database = last.outcome["database_bytes"].as_f64().unwrap_or(database);
                let times: Vec<String> = cells.iter().map(Run::time).collect();
                println!(
                    "| {deltas} | {:.1} MB | {work} | {} | {} |",
                    database / MB,
                    last.traffic.requests.len(),
                    times.join(" | ")
                );
            }
        }
        Ok(())
    }
}

/// Adds the arguments that each command needs: a target in `scratch`, and JSON on standard output.
fn in_scratch<'a>(command: &'a mut Command, args: &[&str], scratch: &Path) -> &'a mut Command {
    match args[0] {
        "restore" => command.arg("--data-dir").arg(scratch.join("member")),
        "copy" if !args.contains(&"--to") => command.arg("--to").arg(scratch),
        _ => command,
    };
    if ["restore", "compact"].contains(&args[0]) {
        command.arg("--temp-dir").arg(scratch);
    }
    command.args(["--output", "json"])
}

/// Returns the name of the snapshot that a compaction has published; `None` for other commands.
fn published<'a>(args: &[&str], run: &'a Run) -> Option<&'a str> {
    run.outcome["snapshot"]
        .as_str()
        .filter(|_| args[0] == "compact")
}
