//! Measures what `snapshot follow` costs its store: one delta, and the time to catch up after an outage.

use crate::measure::{Goal, MIB, Run, resident, row};
use crate::support::etcd::{Etcd, EtcdVersion};
use crate::support::follower::Follower;
use crate::support::proxy::{Call, Traffic};
use crate::support::restorable::Prefix;
use crate::{Bench, Result, Server};
use chrono::DateTime;
use deltafold::backup::events::{EventRef, encode_event};
use deltafold::mvcc::{Change, KeyValue, Revision};
use etcd_client::KvClient;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

const VERSION: EtcdVersion = EtcdVersion::V3_6;

impl Bench {
    /// Starts a follower that saves into a bucket behind the line, and waits for its first full.
    fn follow(&self, etcd: &Etcd, server: &Server, period: &str) -> Result<(Follower, Prefix)> {
        self.runtime.block_on(server.minio.create_bucket("follow"));
        let prefix = Prefix::minio(&server.minio, "follow", "etcd");
        let args = ["snapshot", "follow", "--delta-period", period];
        let mut command = self.command(&args, &server.env());
        command
            .args(["--endpoints", etcd.endpoint(), "--store", &prefix.url])
            .args(["--full-schedule", "0 0 29 2 *"])
            .args(["--output", "json", "--log-format", "json"]);
        let mut follower = Follower::spawn(&mut command);
        follower.wait_until("the first full", || !prefix.fulls().is_empty());
        Ok((follower, prefix))
    }

    /// Prints the row of one delta: requests and seconds.
    pub fn delta(&self) -> Result<()> {
        let delay = Duration::from_millis(50);
        let folder = self.scratch()?;
        let etcd = Etcd::start(VERSION, &folder.path().join("data"));
        let server = Server::start();
        let writers = Writers::start(&self.runtime, &etcd, 20);
        let (mut follower, prefix) = self.follow(&etcd, &server, "2s")?;
        server.proxy.delay(delay);
        let deltas = |n| move || prefix.deltas().len() >= n;
        follower.wait_until("a delta", deltas.clone()(2));
        server.proxy.take();
        follower.wait_until("ten deltas", deltas(12));
        let traffic = server.proxy.take();
        let resident = resident(follower.id());
        drop(writers);
        follower.terminate();
        let mut deltas = bursts(&traffic);
        // A burst that was cut off by the measurement may lack the upload.
        deltas.retain(|b| b.iter().any(|r| r.kind() == "PUT" || r.kind() == "COPY"));
        deltas.sort_by(|a, b| burst_seconds(a).total_cmp(&burst_seconds(b)));
        let median = deltas.get(deltas.len() / 2).ok_or("no delta was saved")?;
        let run = Run {
            seconds: burst_seconds(median),
            resident,
            traffic: Traffic {
                requests: median.clone(),
                most_at_once: traffic.most_at_once,
            },
            ..Run::default()
        };
        let goals = [Goal::Requests(4), Goal::Seconds(0.3)];
        row("follow: one delta", "S3 + 50 ms", &run, &run, delay, &goals);
        Ok(())
    }

    /// Prints the row of an outage: how long the follower takes to save everything after it.
    pub fn outage(&self) -> Result<()> {
        const CHANGES_PER_SECOND: u64 = 500;
        /// The default of --delta-bytes.
        const DELTA_BYTES: u64 = 10 * MIB;
        let delay = Duration::from_millis(50);
        let folder = self.scratch()?;
        let etcd = Etcd::start(VERSION, &folder.path().join("data"));
        let server = Server::start();
        server.proxy.delay(delay);
        let writers = Writers::start(&self.runtime, &etcd, CHANGES_PER_SECOND);
        let (mut follower, prefix) = self.follow(&etcd, &server, "5s")?;
        let saved = prefix.last_saved();
        follower.wait_until("the first delta", || prefix.last_saved() > saved);
        server.proxy.cut();
        std::thread::sleep(Duration::from_secs(self.args.outage));
        follower.assert_runs();
        let (before, saved) = (prefix.deltas().len(), prefix.last_saved());
        let revision = self.runtime.block_on(etcd.revision());
        server.proxy.take();
        server.proxy.mend();
        let began = Instant::now();
        let timeout = Duration::from_secs(self.args.give_up);
        // Not `wait_saved`: its time-out may be shorter.
        while prefix.last_saved() < revision && began.elapsed() < timeout {
            follower.assert_runs();
            std::thread::sleep(Duration::from_millis(200));
        }
        let run = Run {
            seconds: began.elapsed().as_secs_f64(),
            resident: resident(follower.id()),
            timed_out: prefix.last_saved() < revision,
            traffic: server.proxy.take(),
            ..Run::default()
        };
        let deltas = prefix.deltas().len() - before;
        drop(writers);
        let missing = (revision - saved) as u64;
        let max_deltas = missing * event_bytes() / DELTA_BYTES + run.seconds as u64 / 5 + 5;
        let work = format!(
            "follow: {missing} changes after {} s without a store, {deltas} deltas of at most {max_deltas}",
            self.args.outage
        );
        row(
            &work,
            "S3 + 50 ms",
            &run,
            &run,
            delay,
            &[Goal::Seconds(60.0)],
        );
        if deltas as u64 > max_deltas {
            println!("| too many deltas | | | | | | no |");
        }
        Ok(())
    }
}

/// Groups requests by the pauses between them. Each burst belongs to one delta.
fn bursts(traffic: &Traffic) -> Vec<Vec<Call>> {
    const PAUSE: Duration = Duration::from_millis(400);
    let mut bursts: Vec<Vec<Call>> = Vec::new();
    let mut quiet_from: Option<Instant> = None;
    for request in &traffic.requests {
        let ended = request.ended.unwrap_or(request.began);
        match bursts.last_mut() {
            Some(burst) if quiet_from.is_some_and(|q| request.began < q + PAUSE) => {
                burst.push(request.clone());
            }
            _ => bursts.push(vec![request.clone()]),
        }
        quiet_from = quiet_from.max(Some(ended));
    }
    bursts
}

/// Returns the seconds from the first request to the last response.
fn burst_seconds(burst: &[Call]) -> f64 {
    let began = burst.iter().map(|r| r.began).min();
    let ended = burst.iter().filter_map(|r| r.ended).max();
    let duration = began.zip(ended).map(|(began, ended)| ended - began);
    duration.unwrap_or_default().as_secs_f64()
}

/// The value that [`Writers`] put.
const VALUE: [u8; 400] = [b'v'; 400];

/// Returns the size of one event of the writers in a delta, in bytes.
fn event_bytes() -> u64 {
    let revision = Revision(1_000_000);
    let event = EventRef {
        main: revision,
        change: Change::Put(KeyValue {
            key: b"/registry/00/object-0000",
            create_revision: revision,
            mod_revision: revision,
            version: 1000,
            value: &VALUE,
            lease: 0,
        }),
    };
    let mut out = Vec::new();
    encode_event(&mut out, &event, DateTime::UNIX_EPOCH);
    out.len() as u64
}

/// Puts values at a steady rate until it is dropped.
struct Writers {
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Writers {
    fn start(runtime: &Runtime, etcd: &Etcd, puts_per_second: u64) -> Self {
        /// Several, because each put waits for etcd's disk.
        const WRITERS: u64 = 10;
        let interval = Duration::from_secs_f64(WRITERS as f64 / puts_per_second as f64);
        let mut tasks = Vec::new();
        for writer in 0..WRITERS {
            let kv = runtime.block_on(etcd.kv());
            tasks.push(runtime.spawn(put_forever(writer, kv, interval)));
        }
        Writers { tasks }
    }
}

/// Puts a value into one of 1000 keys in each interval.
async fn put_forever(writer: u64, mut kv: KvClient, interval: Duration) {
    let mut clock = tokio::time::interval(interval);
    for n in 0.. {
        clock.tick().await;
        let key = format!("/registry/{writer:02}/object-{:04}", n % 1000);
        // A failed put lowers the number of changes in the table.
        let _ = kv.put(key, VALUE, None).await;
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}
