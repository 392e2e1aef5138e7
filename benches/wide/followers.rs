//! What a follower of an etcd costs its store.

use crate::measure::{Goal, MIB, Run, resident, row};
use crate::support::etcd::{Etcd, EtcdVersion};
use crate::support::follower::Follower;
use crate::support::restorable::Prefix;
use crate::support::slow_line::{Request, Traffic};
use crate::{Bench, Result, Server};
use chrono::DateTime;
use deltafold::backup::events::{EventRef, encode_event};
use deltafold::mvcc::{Change, KeyValue, Revision};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

const VERSION: EtcdVersion = EtcdVersion::V3_6;

impl Bench {
    /// A follower of an etcd, into a bucket over a line.
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

    pub fn delta(&self) -> Result<()> {
        let delay = Duration::from_millis(50);
        let folder = self.scratch()?;
        let etcd = Etcd::start(VERSION, &folder.path().join("data"));
        let server = Server::start();
        let writing = Writing::start(&self.runtime, &etcd, 20);
        let (mut follower, prefix) = self.follow(&etcd, &server, "2s")?;
        server.line.delay(delay);
        let deltas = |n| move || prefix.deltas().len() >= n;
        follower.wait_until("a delta", deltas.clone()(2));
        server.line.take();
        follower.wait_until("ten deltas", deltas(12));
        let traffic = server.line.take();
        let resident = resident(follower.id());
        drop(writing);
        follower.terminate();
        let mut saved = bursts(&traffic);
        // What began or ended outside has no whole delta.
        saved.retain(|b| b.iter().any(|r| r.kind() == "PUT" || r.kind() == "COPY"));
        saved.sort_by(|a, b| span(a).total_cmp(&span(b)));
        let median = saved.get(saved.len() / 2).ok_or("no delta was saved")?;
        let run = Run {
            seconds: span(median),
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

    pub fn outage(&self) -> Result<()> {
        /// Changes a second, and bytes of each.
        const CHANGES: u64 = 500;
        const DELTA_BYTES: u64 = 10 * MIB;
        let delay = Duration::from_millis(50);
        let folder = self.scratch()?;
        let etcd = Etcd::start(VERSION, &folder.path().join("data"));
        let server = Server::start();
        server.line.delay(delay);
        let writing = Writing::start(&self.runtime, &etcd, CHANGES);
        let (mut follower, prefix) = self.follow(&etcd, &server, "5s")?;
        let saved = prefix.last_saved();
        follower.wait_until("the first delta", || prefix.last_saved() > saved);
        server.line.cut();
        std::thread::sleep(Duration::from_secs(self.args.outage));
        follower.assert_runs();
        let (before, saved) = (prefix.deltas().len(), prefix.last_saved());
        let revision = self.runtime.block_on(etcd.revision());
        server.line.take();
        server.line.mend();
        let began = Instant::now();
        let give_up = Duration::from_secs(self.args.give_up);
        // Its own patience may be shorter than what is measured.
        while prefix.last_saved() < revision && began.elapsed() < give_up {
            follower.assert_runs();
            std::thread::sleep(Duration::from_millis(200));
        }
        let run = Run {
            seconds: began.elapsed().as_secs_f64(),
            resident: resident(follower.id()),
            is_given_up: prefix.last_saved() < revision,
            traffic: server.line.take(),
            ..Run::default()
        };
        let deltas = prefix.deltas().len() - before;
        drop(writing);
        let missing = (revision - saved) as u64;
        let most = missing * event_bytes() / DELTA_BYTES + run.seconds as u64 / 5 + 5;
        let work = format!(
            "follow: {missing} changes after {} s without a store, {deltas} deltas of at most {most}",
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
        if deltas as u64 > most {
            println!("| too many deltas | | | | | | no |");
        }
        Ok(())
    }
}

/// Requests with pauses between them: each burst is what one delta took.
fn bursts(traffic: &Traffic) -> Vec<Vec<Request>> {
    const PAUSE: Duration = Duration::from_millis(400);
    let mut bursts: Vec<Vec<Request>> = Vec::new();
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

/// Seconds from the first request to the last answer.
fn span(burst: &[Request]) -> f64 {
    let began = burst.iter().map(|r| r.began).min();
    let ended = burst.iter().filter_map(|r| r.ended).max();
    let span = began.zip(ended).map(|(from, to)| to - from);
    span.unwrap_or_default().as_secs_f64()
}

/// What `Writing` puts.
const VALUE: [u8; 400] = [b'v'; 400];

/// Bytes of one of its events in a delta.
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

/// Puts so many values a second until it is dropped.
struct Writing {
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Writing {
    fn start(runtime: &Runtime, etcd: &Etcd, a_second: u64) -> Self {
        /// One waits for its disk while the others go on.
        const WRITERS: u64 = 10;
        let tasks = (0..WRITERS).map(|writer| {
            let mut kv = runtime.block_on(etcd.kv());
            let every = Duration::from_secs_f64(WRITERS as f64 / a_second as f64);
            runtime.spawn(async move {
                let mut clock = tokio::time::interval(every);
                for n in 0.. {
                    clock.tick().await;
                    let key = format!("/registry/{writer:02}/object-{:04}", n % 1000);
                    // One that fails is missing, and shows in the number of changes.
                    let _ = kv.put(key, VALUE, None).await;
                }
            })
        });
        Writing {
            tasks: tasks.collect(),
        }
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}
