//! What many snapshots and a slow store cost: seconds, requests by kind, memory; each next to its goal.
//!
//! `cargo bench --bench wide` prints the tables of ARCHITECTURE.md. Parts are named on the command line; `--scale 10`
//! makes all of it a tenth as large, for a quick look (goals are those of the whole). The S3 server is MinIO on this
//! machine, behind a line that counts requests and delays answers; "plain" is the same line without the delay, in the
//! same run. Times are medians of `--runs`; what takes longer than 20 s runs once.

mod followers;
#[allow(dead_code)]
#[path = "../generate.rs"]
mod generate;
mod measure;
#[path = "../../tests/support/mod.rs"]
mod support;

use chrono::{DateTime, SecondsFormat};
use clap::{Parser, ValueEnum};
use futures::{StreamExt, TryStreamExt};
use generate::Shape;
use measure::{Goal, MB, MIB, Run, local_row, row};
use object_store::aws::AmazonS3;
use object_store::{ObjectStoreExt, PutPayload};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use support::etcd::EtcdVersion;
use support::history::Compression;
use support::minio::Minio;
use support::s3::S3;
use support::slow_line::Line;
use support::tiny_backup::{database, object};
use support::tools;
use tempfile::TempDir;
use tokio::runtime::Runtime;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[derive(Parser)]
struct Args {
    /// What is measured [default: all]
    parts: Vec<Part>,
    /// Only rows whose work contains this, with `local`, `s3` and `year`
    #[arg(long)]
    only: Option<String>,
    /// Make everything so many times smaller
    #[arg(long, default_value_t = 1)]
    scale: usize,
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Milliseconds by which each answer is delayed, where the part has no delay of its own
    #[arg(long, default_value_t = 30)]
    delay: u64,
    /// Seconds after which a run is ended
    #[arg(long, default_value_t = 900)]
    give_up: u64,
    /// Measure another program than the one that was built
    #[arg(long, default_value = env!("CARGO_BIN_EXE_deltafold"))]
    program: PathBuf,
    /// With `shapes`: an older program, which must not be faster on a local disk
    #[arg(long)]
    before: Option<PathBuf>,
    /// With `outage`: seconds without a store [the goal's: 600]
    #[arg(long, default_value_t = 60)]
    outage: u64,
    /// Cargo gives it.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The wide bucket in a local folder
    Local,
    /// Two snapshotters that wrote side by side, in a local folder
    Overlap,
    /// The wide bucket on S3
    S3,
    /// Few large deltas, in a local folder and on S3
    Shapes,
    /// One object of 2 GB on S3, each stream held to 20 MB/s
    Object,
    /// Deltas of a follower, over 50 ms
    Delta,
    /// A follower after an outage of its store, over 50 ms
    Outage,
    /// The names of a year, in a local folder
    Year,
    /// A plain snapshot file, next to etcdutl
    Plain,
    /// A table of its own: by number of deltas, size of the database and delay
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
    let _within = bench.runtime.enter();
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

struct Bench {
    args: Args,
    /// Where buckets are kept from one run to the next.
    data: PathBuf,
    runtime: Runtime,
}

/// A bucket on S3, behind a line.
struct Server {
    line: Line,
    minio: Minio,
}

impl Server {
    fn start() -> Self {
        let minio = Minio::start();
        let line = Line::start(minio.endpoint());
        Server { line, minio }
    }

    /// For the program.
    fn env(&self) -> Vec<(String, String)> {
        S3::new(&self.line.endpoint()).env()
    }
}

impl Bench {
    fn delay(&self) -> Duration {
        Duration::from_millis(self.args.delay)
    }

    fn is_wanted(&self, work: &str) -> bool {
        let only = self.args.only.as_deref();
        only.is_none_or(|text| work.contains(text))
    }

    /// A part of what the goals speak of.
    fn scaled(&self, n: usize) -> usize {
        (n / self.args.scale).max(1)
    }

    fn wide(&self) -> Shape {
        Shape {
            changes: self.scaled(26_000) * 20,
            ..generate::WIDE
        }
    }

    /// A bucket that is made if it is not there. Gives the bound that ARCHITECTURE.md states, too.
    fn bucket(&self, shape: &Shape) -> Result<(PathBuf, u64)> {
        let folder = self.data.join(format!("{}-{}", shape.name, shape.changes));
        let (keys, key_bytes) = generate::bucket(&folder, shape)?;
        let threads = std::thread::available_parallelism()?.get() as u64;
        let event = shape.value_bytes.end() * 4 / 3;
        let most = 64 * MIB + 128 * keys + key_bytes + event as u64 + 8 * MIB * threads;
        Ok((folder, most))
    }

    fn scratch(&self) -> Result<TempDir> {
        Ok(TempDir::with_prefix_in("wide-", &self.data)?)
    }

    /// Runs a command to its end.
    fn run(&self, command: &mut Command) -> Result<Run> {
        Run::of(command, Duration::from_secs(self.args.give_up))
    }

    fn command(&self, args: &[&str], env: &[(String, String)]) -> Command {
        let mut command = Command::new(&self.args.program);
        tools::forget_env(&mut command, &["DELTAFOLD_", "AWS_"]);
        command.args(args).envs(env.iter().cloned());
        command
    }

    /// The time a third of the way into a bucket: day 30 of the wide one.
    fn day_30(&self, shape: &Shape) -> Result<String> {
        let at = shape.start() + (generate::END - shape.start()) / 3;
        let at = DateTime::from_timestamp(at, 0).ok_or("a time")?;
        Ok(at.to_rfc3339_opts(SecondsFormat::Secs, true))
    }

    fn local(&self) -> Result<()> {
        let shape = self.wide();
        let (folder, most) = self.bucket(&shape)?;
        let store = folder.to_str().ok_or("a plain path")?;
        let (day, key) = (self.day_30(&shape)?, shape.key(17));
        let seconds = |s| vec![Goal::Seconds(s)];
        let works: [(&str, &[&str], Vec<Goal>); 9] = [
            (
                "compact",
                &["compact"],
                vec![Goal::Seconds(2.0), Goal::Anonymous(most)],
            ),
            (
                "restore to day 30",
                &["restore", "--time", &day],
                vec![Goal::Seconds(2.0), Goal::Anonymous(most)],
            ),
            (
                "verify checksums",
                &["verify", "--level", "checksums"],
                seconds(3.0),
            ),
            ("list", &["list"], vec![]),
            ("list --deep", &["list", "--deep"], seconds(3.0)),
            ("history of a key", &["history", &key], seconds(2.0)),
            (
                "get at day 30",
                &["get", &key, "--time", &day],
                seconds(1.0),
            ),
            ("gc, plan", &["gc", "--policy", "exponential"], vec![]),
            ("copy", &["copy"], seconds(8.0)),
        ];
        for (work, args, goals) in works {
            if !self.is_wanted(work) {
                continue;
            }
            let with_store = [args, &[store_flag(args), store]].concat();
            let run = self.measure_local(&folder, &with_store)?;
            local_row(&format!("wide: {work}"), &run, &goals);
        }
        Ok(())
    }

    /// Runs on a local store; leaves nothing behind.
    fn measure_local(&self, folder: &Path, args: &[&str]) -> Result<Run> {
        Run::median(self.args.runs, |_| {
            let scratch = self.scratch()?;
            let mut command = self.command(args, &[]);
            let run = self.run(in_scratch(&mut command, args, scratch.path()))?;
            if let Some(snapshot) = published(args, &run) {
                fs::remove_file(folder.join("v2").join(snapshot))?;
            }
            Ok(run)
        })
    }

    fn overlap(&self) -> Result<()> {
        let mut few: Option<Run> = None;
        for deltas in [1_000, 4_000] {
            let deltas = self.scaled(deltas);
            let shape = Shape {
                name: "side-by-side",
                changes: deltas * 20,
                streams: 2,
                ..generate::WIDE
            };
            let (folder, most) = self.bucket(&shape)?;
            let store = folder.to_str().ok_or("a plain path")?;
            let run = self.measure_local(&folder, &["compact", "--store", store])?;
            let mut goals = vec![Goal::Anonymous(most)];
            if let Some(few) = &few {
                // Linear, give or take a fifth.
                goals.push(Goal::Seconds(1.5));
                goals.push(Goal::Seconds(4.0 * 1.2 * few.seconds));
            }
            local_row(&format!("2 × {deltas} deltas: compact"), &run, &goals);
            few = Some(run);
        }
        Ok(())
    }

    /// Puts the objects of a folder into a new bucket.
    fn upload(&self, server: &Server, folder: &Path, bucket: &str) -> Result<Arc<AmazonS3>> {
        let mut paths = Vec::new();
        for entry in fs::read_dir(folder.join("v2"))? {
            paths.push(entry?.path());
        }
        let objects = paths.into_iter().map(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            (format!("v2/{name}"), path)
        });
        self.fill(server, bucket, objects, |path| Ok(fs::read(path)?))
    }

    /// A new bucket with objects; what each holds is made only when it is its turn.
    fn fill<T>(
        &self,
        server: &Server,
        bucket: &str,
        objects: impl Iterator<Item = (String, T)>,
        content: impl Fn(T) -> Result<Vec<u8>>,
    ) -> Result<Arc<AmazonS3>> {
        eprintln!("filling the bucket {bucket} …");
        self.runtime.block_on(server.minio.create_bucket(bucket));
        let store = server.minio.store(bucket);
        let puts = futures::stream::iter(objects).map(|(name, what)| {
            let (store, content) = (store.clone(), content(what));
            async move {
                let path = object_store::path::Path::from(name);
                store.put(&path, PutPayload::from(content?)).await?;
                Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
            }
        });
        let done = puts.buffer_unordered(32).try_collect::<Vec<()>>();
        self.runtime.block_on(done)?;
        Ok(store)
    }

    fn s3(&self) -> Result<()> {
        let shape = self.wide();
        let (folder, most) = self.bucket(&shape)?;
        let deltas = shape.changes / 20;
        let server = Server::start();
        let store = self.upload(&server, &folder, "wide")?;
        let (day, key) = (self.day_30(&shape)?, shape.key(17));
        let in_flight = || vec![Goal::InFlight(1.3)];
        let names_only = || vec![Goal::Requests(100)];
        // 1.01 requests a delta, and a few for the rest.
        let each_once = deltas + deltas / 100 + 20;
        let works: [(&str, &[&str], Vec<Goal>); 10] = [
            ("list", &["list"], names_only()),
            ("gc, plan", &["gc", "--policy", "exponential"], names_only()),
            (
                "restore to day 30, plan",
                &["restore", "--dry-run", "--time", &day],
                vec![Goal::Seconds(10.0), Goal::Requests(100)],
            ),
            (
                "verify names",
                &["verify", "--level", "names"],
                vec![Goal::InFlight(1.3), Goal::Requests(100)],
            ),
            (
                "compact",
                &["compact"],
                vec![
                    Goal::InFlight(1.3),
                    Goal::Requests(each_once),
                    Goal::Anonymous(most),
                ],
            ),
            (
                "restore to day 30",
                &["restore", "--time", &day],
                vec![Goal::InFlight(1.3), Goal::Anonymous(most)],
            ),
            (
                "verify checksums",
                &["verify", "--level", "checksums"],
                in_flight(),
            ),
            ("list --deep", &["list", "--deep"], in_flight()),
            ("history of a key", &["history", &key], in_flight()),
            ("get at day 30", &["get", &key, "--time", &day], vec![]),
        ];
        for (work, args, goals) in works {
            if !self.is_wanted(work) {
                continue;
            }
            let args = [args, &["--store", "s3://wide"]].concat();
            let measure = |delay| {
                self.measure_bucket(
                    &server,
                    delay,
                    |_| args.iter().map(|a| (*a).to_owned()).collect(),
                    &store,
                )
            };
            self.both(&format!("wide: {work}"), goals, measure)?;
        }
        if self.is_wanted("copy") {
            self.copies(&server)?;
        }
        if self.is_wanted("gc --apply") {
            self.deletions(&server, &shape)?;
        }
        Ok(())
    }

    /// Without the delay and with it: two rows. `measure` is given the delay.
    fn both(
        &self,
        work: &str,
        goals: Vec<Goal>,
        measure: impl Fn(Duration) -> Result<Run>,
    ) -> Result<()> {
        let plain = measure(Duration::ZERO)?;
        row(work, "S3, plain", &plain, &plain, Duration::ZERO, &[]);
        let delay = self.delay();
        let run = measure(delay)?;
        let place = format!("S3 + {} ms", delay.as_millis());
        row(work, &place, &run, &plain, delay, &goals);
        Ok(())
    }

    /// The same on S3, over a delay; `args` gives each run its arguments.
    fn measure_bucket(
        &self,
        server: &Server,
        delay: Duration,
        args: impl Fn(usize) -> Vec<String>,
        store: &AmazonS3,
    ) -> Result<Run> {
        server.line.delay(delay);
        Run::median(self.args.runs, |round| {
            let args = args(round);
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let scratch = self.scratch()?;
            let mut command = self.command(&args, &server.env());
            in_scratch(&mut command, &args, scratch.path());
            server.line.take();
            let mut run = self.run(&mut command)?;
            run.traffic = server.line.take();
            if let Some(snapshot) = published(&args, &run) {
                let path = object_store::path::Path::from(format!("v2/{snapshot}"));
                self.runtime.block_on(store.delete(&path))?;
            }
            Ok(run)
        })
    }

    /// From one bucket to another on the same server.
    fn copies(&self, server: &Server) -> Result<()> {
        self.runtime.block_on(server.minio.create_bucket("copies"));
        let store = server.minio.store("copies");
        self.both("wide: copy to S3", vec![Goal::InFlight(1.3)], |delay| {
            let args = |round| {
                let to = format!("s3://copies/{}-{round}", delay.as_millis());
                let args = ["copy", "--from", "s3://wide", "--to", &to];
                args.map(str::to_owned).to_vec()
            };
            self.measure_bucket(server, delay, args, &store)
        })
    }

    /// A bucket whose last full supersedes all else: it is read, of the rest names alone count.
    fn deletions(&self, server: &Server, shape: &Shape) -> Result<()> {
        let deltas = shape.changes / 20;
        let full = |revision, at| format!("v2/Full-00000000-{revision:08}-{at}");
        let first = 2 + shape.keys_in_base as i64;
        let mut names = vec![full(first - 1, shape.start())];
        for number in 0..deltas as i64 {
            let (start, at) = (first + 20 * number, shape.start() + 300 * (number + 1));
            names.push(format!("v2/Incr-{start:08}-{:08}-{at}", start + 19));
        }
        let last = first + 20 * deltas as i64 - 1;
        names.push(full(last, generate::END));
        let full_object = object(&database(4096, last..=last, 1), Compression::None);
        let args = |bucket: &str| {
            let store = format!("s3://{bucket}");
            let policy = ["--policy", "limit", "--limit", "1", "--purge-after", "0s"];
            let args = [&["gc", "--apply", "--store", &store], &policy[..]].concat();
            args.into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        let once = |delay: Duration| {
            let bucket = format!("superseded-{}", delay.as_millis());
            let objects = names.iter().map(|n| (n.clone(), n.contains("/Full-")));
            let store = self.fill(server, &bucket, objects, |is_full| match is_full {
                true => Ok(full_object.clone()),
                false => Ok(b"x".to_vec()),
            })?;
            server.line.delay(delay);
            server.line.take();
            let strings = args(&bucket);
            let strings: Vec<&str> = strings.iter().map(String::as_str).collect();
            let mut run = self.run(
                self.command(&strings, &server.env())
                    .args(["--output", "json"]),
            )?;
            run.traffic = server.line.take();
            let left = self
                .runtime
                .block_on(object_store::ObjectStore::list(&*store, None).count());
            if left > 10 {
                return Err(format!("gc left {left} objects: {}", run.outcome["totals"]).into());
            }
            Ok(run)
        };
        // One request for a thousand objects, and one each for the lock and for what was tried out.
        let most = names.len().div_ceil(1000) + 2;
        let goals = vec![
            Goal::RequestsOf("POST delete", most),
            Goal::RequestsOf("DELETE", 10),
        ];
        self.both("wide: gc --apply", goals, once)
    }

    fn shapes(&self) -> Result<()> {
        let server = Server::start();
        for shape in [generate::LEASE, generate::CHURN, generate::INSERT] {
            let (folder, most) = self.bucket(&shape)?;
            let store = folder.to_str().ok_or("a plain path")?;
            let work = format!("{}: compact", shape.name);
            let run = self.measure_local(&folder, &["compact", "--store", store])?;
            local_row(&work, &run, &[Goal::Anonymous(most)]);
            if let Some(before) = &self.args.before {
                self.against(before, &shape, &folder)?;
            }
            let bucket = shape.name;
            let objects = self.upload(&server, &folder, bucket)?;
            let args = |_| {
                let args = ["compact", "--store", &format!("s3://{bucket}")];
                args.map(str::to_owned).to_vec()
            };
            self.both(&work, vec![Goal::Plain(1.1, 5)], |delay| {
                self.measure_bucket(&server, delay, args, &objects)
            })?;
        }
        Ok(())
    }

    /// The best of each of two programs that take turns.
    fn against(&self, before: &Path, shape: &Shape, folder: &Path) -> Result<()> {
        const ROUNDS: usize = 7;
        let store = folder.to_str().ok_or("a plain path")?;
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

    fn object(&self) -> Result<()> {
        /// Bytes a second of a stream, and how many streams the goal counts with.
        const STREAM: u64 = 20_000_000;
        const STREAMS: u64 = 8;
        let shape = Shape::plain_base("object", self.scaled(2_000), 1_000_000..=1_000_000);
        let (folder, _) = self.bucket(&shape)?;
        let store = folder.to_str().ok_or("a plain path")?;
        let server = Server::start();
        let objects = self.upload(&server, &folder, "object")?;
        self.runtime.block_on(server.minio.create_bucket("uploads"));
        server.line.hold_to(STREAM);
        let least = 0.8 * (STREAM * STREAMS) as f64 / MB;
        let goals = || [Goal::Rate(least), Goal::Resident(256 * MIB)];
        let delay = self.delay();
        let place = format!("S3 + {} ms, 20 MB/s a stream", delay.as_millis());
        let args = |_| {
            ["copy", "--from", "s3://object"]
                .map(str::to_owned)
                .to_vec()
        };
        let down = self.measure_bucket(&server, delay, args, &objects)?;
        row("2 GB: copy from S3", &place, &down, &down, delay, &goals());
        let args = |round| {
            let to = format!("s3://uploads/{round}");
            let args = ["copy", "--from", store, "--to", &to];
            args.map(str::to_owned).to_vec()
        };
        let up = self.measure_bucket(&server, delay, args, &objects)?;
        row(
            "2 GB: copy to S3, read back",
            &place,
            &up,
            &up,
            delay,
            &goals(),
        );
        Ok(())
    }

    fn year(&self) -> Result<()> {
        let (deltas, fulls) = (self.scaled(105_000), self.scaled(10_000));
        let folder = self.data.join(format!("year-{deltas}"));
        generate::names(&folder, deltas, fulls)?;
        let store = folder.to_str().ok_or("a plain path")?;
        let at = DateTime::from_timestamp(generate::END - deltas as i64 * 150 + 60, 0);
        let at = at
            .ok_or("a time")?
            .to_rfc3339_opts(SecondsFormat::Secs, true);
        let works: [(&str, &[&str]); 5] = [
            ("list", &["list"]),
            ("restore, plan", &["restore", "--dry-run", "--time", &at]),
            ("get --time", &["get", generate::NAMES_KEY, "--time", &at]),
            ("gc, plan", &["gc", "--policy", "exponential"]),
            ("copy, plan", &["copy", "--dry-run"]),
        ];
        for (work, args) in works {
            if !self.is_wanted(work) {
                continue;
            }
            let args = [args, &[store_flag(args), store]].concat();
            let goals = [Goal::Seconds(5.0), Goal::Resident(256 * MIB)];
            local_row(
                &format!("a year: {work}"),
                &self.measure_local(&folder, &args)?,
                &goals,
            );
        }
        Ok(())
    }

    fn plain(&self) -> Result<()> {
        let shape = Shape::plain_base("plain", self.scaled(105_000), 1_000..=3_000);
        let (folder, _) = self.bucket(&shape)?;
        let mut entries = fs::read_dir(folder.join("v2"))?;
        let file = entries.next().ok_or("no full")??.path();
        let file = file.to_str().ok_or("a plain path")?;
        let etcdutl = tools::etcdutl(EtcdVersion::V3_6);
        let theirs = Run::median(self.args.runs, |_| {
            let scratch = self.scratch()?;
            let mut command = Command::new(&etcdutl);
            command.args(["snapshot", "restore", file, "--data-dir"]);
            self.run(command.arg(scratch.path().join("member")))
        })?;
        let work = format!("plain file of {} MB", fs::metadata(file)?.len() / 1_000_000);
        local_row(&format!("{work}: etcdutl snapshot restore"), &theirs, &[]);
        let ours = self.measure_local(&folder, &["restore", "--snapshot", file])?;
        let goals = [Goal::Plain(1.0, 0)];
        let work = format!("{work}: restore --snapshot");
        row(&work, "local", &ours, &theirs, Duration::ZERO, &goals);
        Ok(())
    }
}

impl Bench {
    /// Compactions and restorations by what they depend on.
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
            let (folder, _) = self.bucket(&shape)?;
            let server = Server::start();
            let store = self.upload(&server, &folder, "sizes")?;
            let mut database = 0.0;
            // A restoration says how large the database is.
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

fn store_flag(args: &[&str]) -> &'static str {
    if args[0] == "copy" {
        "--from"
    } else {
        "--store"
    }
}

/// Adds what each command needs beside: a target in `scratch` and JSON on standard output.
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

/// The snapshot that a compaction has published.
fn published<'a>(args: &[&str], run: &'a Run) -> Option<&'a str> {
    run.outcome["snapshot"]
        .as_str()
        .filter(|_| args[0] == "compact")
}
