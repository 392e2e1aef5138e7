//! Measures commands on an S3 server behind a proxy that delays: the wide backup, a copy, deletions, and one large
//! object.

use crate::measure::{Goal, MB, MIB, Run, row};
use crate::support::history::Compression;
use crate::support::minio::Minio;
use crate::support::proxy::Proxy;
use crate::support::s3::S3;
use crate::support::tiny_backup::{database, object};
use crate::{Bench, Result, generate, in_scratch, published};
use futures::{StreamExt, TryStreamExt};
use generate::Shape;
use object_store::aws::AmazonS3;
use object_store::{ObjectStoreExt, PutPayload};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// An S3 server behind a proxy that delays.
pub struct Server {
    pub proxy: Proxy,
    pub minio: Minio,
}

impl Server {
    pub fn start() -> Self {
        let minio = Minio::start();
        let proxy = Proxy::start(minio.endpoint());
        Server { proxy, minio }
    }

    /// Returns the environment variables with which the program reaches the server.
    pub fn env(&self) -> Vec<(String, String)> {
        S3::new(&self.proxy.url()).env()
    }
}

impl Bench {
    /// Uploads the snapshots of a folder into a new bucket.
    pub fn upload(&self, server: &Server, folder: &Path, bucket: &str) -> Result<Arc<AmazonS3>> {
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

    /// Creates a bucket with objects. `content` makes the bytes of an object just before its upload.
    pub fn fill<T>(
        &self,
        server: &Server,
        bucket: &str,
        objects: impl Iterator<Item = (String, T)>,
        content: impl Fn(T) -> Result<Vec<u8>>,
    ) -> Result<Arc<AmazonS3>> {
        eprintln!("filling the bucket {bucket} …");
        self.runtime.block_on(server.minio.create_bucket(bucket));
        let store = server.minio.store(bucket);
        let puts = futures::stream::iter(objects).map(|(name, source)| {
            let (store, content) = (store.clone(), content(source));
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

    /// Prints the rows of the wide backup on S3.
    pub fn s3(&self) -> Result<()> {
        let shape = self.wide();
        let (folder, memory_limit) = self.backup(&shape)?;
        let deltas = shape.changes / 20;
        let server = Server::start();
        let store = self.upload(&server, &folder, "wide")?;
        let (day, key) = (self.day_30(&shape)?, shape.key(17));
        let in_flight = || vec![Goal::InFlight(1.3)];
        let names_only = || vec![Goal::Requests(100)];
        // 1.01 requests per delta, and 20 for everything else.
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
                    Goal::Anonymous(memory_limit),
                ],
            ),
            (
                "restore to day 30",
                &["restore", "--time", &day],
                vec![Goal::InFlight(1.3), Goal::Anonymous(memory_limit)],
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
            self.plain_and_delayed(&format!("wide: {work}"), goals, measure)?;
        }
        if self.is_wanted("copy") {
            self.copies(&server)?;
        }
        if self.is_wanted("gc --apply") {
            self.deletions(&server, &shape)?;
        }
        Ok(())
    }

    /// Prints two rows: without the delay and with it. `measure` gets the delay as its argument.
    pub fn plain_and_delayed(
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

    /// Measures a command on S3 with a delay, and removes the snapshot that it has published. `args` returns
    /// the arguments of a run by its number.
    pub fn measure_bucket(
        &self,
        server: &Server,
        delay: Duration,
        args: impl Fn(usize) -> Vec<String>,
        store: &AmazonS3,
    ) -> Result<Run> {
        server.proxy.delay(delay);
        Run::median(self.args.runs, |round| {
            let args = args(round);
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let scratch = self.scratch()?;
            let mut command = self.command(&args, &server.env());
            in_scratch(&mut command, &args, scratch.path());
            server.proxy.take();
            let mut run = self.run(&mut command)?;
            run.traffic = server.proxy.take();
            if let Some(snapshot) = published(&args, &run) {
                let path = object_store::path::Path::from(format!("v2/{snapshot}"));
                self.runtime.block_on(store.delete(&path))?;
            }
            Ok(run)
        })
    }

    /// Prints the rows of a copy from one bucket to another on the same server.
    pub fn copies(&self, server: &Server) -> Result<()> {
        self.runtime.block_on(server.minio.create_bucket("copies"));
        let store = server.minio.store("copies");
        let goals = vec![Goal::InFlight(1.3)];
        self.plain_and_delayed("wide: copy to S3", goals, |delay| {
            let args = |round| {
                let to = format!("s3://copies/{}-{round}", delay.as_millis());
                let args = ["copy", "--from", "s3://wide", "--to", &to];
                args.map(str::to_owned).to_vec()
            };
            self.measure_bucket(server, delay, args, &store)
        })
    }

    /// Prints the rows of `gc --apply` on a backup whose last full supersedes everything else. Only the fulls
    /// have real contents, because `gc` does not read the deltas.
    pub fn deletions(&self, server: &Server, shape: &Shape) -> Result<()> {
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
            let policy = ["--policy", "limit", "--limit", "1", "--allow-shrink"];
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
            server.proxy.delay(delay);
            server.proxy.take();
            let args = args(&bucket);
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let mut command = self.command(&args, &server.env());
            let mut run = self.run(command.args(["--output", "json"]))?;
            run.traffic = server.proxy.take();
            let left = self
                .runtime
                .block_on(object_store::ObjectStore::list(&*store, None).count());
            if left > 10 {
                return Err(format!("gc left {left} objects: {}", run.outcome["totals"]).into());
            }
            Ok(run)
        };
        // One request for a thousand objects, one for the lock, and one for the probe objects.
        let max_requests = names.len().div_ceil(1000) + 2;
        let goals = vec![
            Goal::RequestsOf("POST delete", max_requests),
            Goal::RequestsOf("DELETE", 10),
        ];
        self.plain_and_delayed("wide: gc --apply", goals, once)
    }

    /// Prints the rows of one large object, whose streams are slow: the program must use several at once.
    pub fn object(&self) -> Result<()> {
        /// The rate of one stream, in bytes per second.
        const STREAM_RATE: u64 = 20_000_000;
        /// The number of concurrent streams that the goal assumes.
        const STREAMS: u64 = 8;
        let shape = Shape::plain_base("object", self.scaled(2_000), 1_000_000..=1_000_000);
        let (folder, _) = self.backup(&shape)?;
        let store = folder.to_str().ok_or("the path is not UTF-8")?;
        let server = Server::start();
        let objects = self.upload(&server, &folder, "object")?;
        self.runtime.block_on(server.minio.create_bucket("uploads"));
        server.proxy.hold_to(STREAM_RATE);
        let min_rate = 0.8 * (STREAM_RATE * STREAMS) as f64 / MB;
        let goals = || [Goal::Rate(min_rate), Goal::Resident(256 * MIB)];
        let delay = self.delay();
        let place = format!("S3 + {} ms, 20 MB/s a stream", delay.as_millis());
        let args = |_| {
            ["copy", "--from", "s3://object"]
                .map(str::to_owned)
                .to_vec()
        };
        let download = self.measure_bucket(&server, delay, args, &objects)?;
        let work = "2 GB: copy from S3";
        row(work, &place, &download, &download, delay, &goals());
        let args = |round| {
            let to = format!("s3://uploads/{round}");
            let args = ["copy", "--from", store, "--to", &to];
            args.map(str::to_owned).to_vec()
        };
        let upload = self.measure_bucket(&server, delay, args, &objects)?;
        let work = "2 GB: copy to S3, read back";
        row(work, &place, &upload, &upload, delay, &goals());
        Ok(())
    }
}
