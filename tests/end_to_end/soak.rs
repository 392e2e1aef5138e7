//! A soak test: a cluster under random load is followed for two minutes (`DELTAFOLD_TEST_SOAK_SECONDS`) while
//! members are killed, paused and restarted, the leader changes, history is compacted, the follower is killed
//! and the store goes down. In the end everything is saved, and every restorable revision is what the cluster
//! had.

use crate::support::scratch;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::etcd::{EtcdOptions, EtcdVersion, Signal};
use crate::support::etcd_cluster::{Cluster, Member};
use crate::support::follower::Follower;
use crate::support::minio::Minio;
use crate::support::random_load::{Load, LoadOptions};
use crate::support::restorable::Prefix;
use crate::support::truth::Truth;
use crate::support::{deltafold, run_json};
use fastrand::Rng;
use tokio::runtime::{Handle, Runtime};

const ARGS: [&str; 10] = [
    "--delta-period",
    "1s",
    "--delta-bytes",
    "4MiB",
    "--full-schedule",
    "*/20 * * * * *",
    "--dial-timeout",
    "1s",
    "--command-timeout",
    "3s",
];

struct Soak {
    rng: Rng,
    runtime: Handle,
    load: Load,
    truth: Truth,
    followers: Vec<Option<Follower>>,
    minio: Minio,
    cluster: Cluster,
    prefix: Prefix,
}

impl Soak {
    fn say(&self, what: &str) {
        let (revision, done) = (self.truth.revision(), self.load.done());
        println!("at revision {revision}, after {done} operations: {what}");
    }

    fn pause(&mut self, most: u64) {
        std::thread::sleep(Duration::from_millis(self.rng.u64(200..most)));
    }

    /// Injects one failure, which is over when this returns.
    fn inject(&mut self) {
        for follower in self.followers.iter_mut().flatten() {
            follower.assert_runs();
        }
        let at = self.rng.usize(..3);
        let away = self.rng.u32(..6) == 0;
        if away {
            self.say("the store is away");
            self.minio.signal(Signal::STOP);
        }
        match self.rng.u32(..20) {
            0..4 => {
                self.say(&format!("member {at} is killed"));
                self.cluster.kill(at);
                self.pause(4000);
                self.cluster.start_again(at);
            }
            4..7 => {
                self.say(&format!("member {at} is held"));
                self.cluster.member(at).signal(Signal::STOP);
                self.pause(5000);
                self.cluster.member(at).signal(Signal::CONT);
            }
            7..9 => {
                self.say(&format!("member {at} shall lead"));
                let moved = self.cluster.move_leader_to(at);
                self.runtime.block_on(moved);
            }
            9..10 => {
                self.say("the whole cluster restarts");
                self.cluster.stop();
                self.pause(2000);
                self.cluster.start_all_again();
            }
            10..13 => {
                // Mostly saved revisions; if an unsaved one is compacted, it is lost.
                let newest = match self.rng.u32(..4) {
                    0 => self.truth.revision(),
                    _ if away => 0,
                    _ => self.prefix.last_saved().min(self.truth.revision()),
                };
                let revision = newest - self.rng.i64(0..20);
                self.say(&format!("history is compacted at {revision}"));
                self.compact(at, revision);
            }
            13..14 => {
                self.say(&format!("member {at} is defragmented"));
                let client = self.cluster.member(at).client();
                let defragment = async { client.await.defragment().await };
                self.runtime
                    .block_on(defragment)
                    .expect("a defragmentation");
            }
            14..17 => {
                let which = self.rng.usize(..self.followers.len());
                if let Some(follower) = self.followers[which].take() {
                    self.say(&format!("follower {which} is killed"));
                    follower.kill();
                }
                self.pause(1000);
                self.start_follower(which);
            }
            _ => {
                let other = 1;
                match self.followers[other].take() {
                    // A follower that is asked to end would wait for the store.
                    Some(follower) if !away => {
                        self.say("the second follower ends");
                        follower.terminate().succeeded();
                    }
                    Some(follower) => self.followers[other] = Some(follower),
                    None => self.start_follower(other),
                }
            }
        }
        if away {
            self.pause(4000);
            self.minio.signal(Signal::CONT);
            self.say("the store is back");
        }
        self.pause(2500);
    }

    fn start_follower(&mut self, which: usize) {
        self.say(&format!("follower {which} starts"));
        let follower = Follower::start(&self.prefix, &self.cluster.endpoints(), &ARGS);
        self.followers[which] = Some(follower);
    }

    /// A revision that is compacted already is no failure of the test.
    fn compact(&self, at: usize, revision: i64) {
        let client = self.cluster.member(at).client();
        let compact = async { client.await.compact(revision, None).await };
        if let Err(e) = self.runtime.block_on(compact) {
            println!("    {e}");
        }
    }
}

fn soak(seed: u64, length: Duration) {
    let mut rng = Rng::with_seed(seed);
    let version = EtcdVersion::ALL[rng.usize(..3)];
    println!("etcd {version} for {} s", length.as_secs());
    let runtime = Runtime::new().unwrap();
    let _within = runtime.enter();
    let folder = scratch::folder().unwrap();
    let members = ["one", "two", "three"].map(|name| Member::new(name, folder.path().join(name)));
    let options = EtcdOptions {
        max_request_bytes: 10 << 20,
        ..EtcdOptions::default()
    };
    let cluster = Cluster::start_with(version, &members, "soak", &options);
    let minio = Minio::start();
    runtime.block_on(minio.create_bucket("soak"));
    let endpoints = cluster.endpoints();
    let load_options = LoadOptions {
        rate: Some(rng.i32(40..200).into()),
        max_value: 2 << 20,
        ..LoadOptions::default()
    };
    let mut soak = Soak {
        truth: Truth::start(&endpoints),
        load: Load::start(&endpoints, seed, &load_options),
        followers: vec![None, None],
        prefix: Prefix::minio(&minio, "soak", "prefix"),
        runtime: runtime.handle().clone(),
        minio,
        cluster,
        rng,
    };
    soak.load.wait_for(30);
    soak.start_follower(0);
    let prefix = soak.prefix.clone();
    let first = soak.followers[0].as_mut().unwrap();
    first.wait_until("the first full", || !prefix.fulls().is_empty());
    let started = Instant::now();
    while started.elapsed() < length {
        soak.inject();
    }

    if soak.followers[0].is_none() {
        soak.start_follower(0);
    }
    // If history was compacted before a follower saved it, the follower takes a full first, however long that
    // takes on a busy machine.
    let now = soak.runtime.block_on(soak.cluster.member(0).revision());
    let first = soak.followers[0].as_mut().expect("it was started");
    first.wait_saved(&prefix, now);
    soak.pause(2000);
    let Soak {
        truth,
        load,
        mut followers,
        minio,
        cluster,
        ..
    } = soak;
    let done = load.stop();
    let revision = runtime.block_on(cluster.member(0).revision());
    truth.wait_for(revision);
    println!(
        "{done} operations, {} events to revision {revision}",
        truth.events()
    );
    // The last one saves what is not saved yet.
    for mut follower in followers.drain(..).rev().flatten() {
        follower.assert_runs();
        follower.terminate().succeeded();
    }
    println!(
        "{} fulls, {} deltas",
        prefix.fulls().len(),
        prefix.deltas().len()
    );
    let samples = usize::try_from(length.as_secs() / 4).unwrap();
    let checked = prefix.check_every_restorable(&[&truth], seed, samples.min(100));
    assert_eq!(checked.newest_of(0), revision, "seed {seed}: {checked:?}");

    // Compared with the cluster's own HashKV, once by the program and once by the test.
    let mut verify: Command = deltafold();
    verify
        .args(["verify", "--output", "json", "--store", &prefix.url])
        .args(["--endpoints", &cluster.endpoints().join(",")])
        .envs(minio.env());
    let (code, json, log) = run_json(&mut verify);
    assert_eq!(
        (code, &json["verdict"]),
        (0, &"Equal".into()),
        "{json}\n{log}"
    );
    runtime.block_on(truth.is_that_of(cluster.member(0)));
}

#[test]
fn everything_that_is_restorable_is_what_the_cluster_had() {
    let seconds = std::env::var("DELTAFOLD_TEST_SOAK_SECONDS").ok();
    let seconds = seconds.map_or(120, |s| s.parse().expect("a number of seconds"));
    soak(crate::support::seed(), Duration::from_secs(seconds));
}
