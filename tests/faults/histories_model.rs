//! A random story of an etcd that is set back again and again, of the snapshots that are taken meanwhile, and of what is
//! done with them. After each step, what can be restored is compared with records of every history.

use crate::support::etcd::{EtcdVersion, Signal};
use crate::support::follower::{Ended, Follower, QUICK, snapshot_command};
use crate::support::recorded_etcd::{RecordedEtcd, with_etcd};
use crate::support::restorable::Prefix;
use crate::support::set_back::Checkpoint;
use crate::support::truth::Truth;
use crate::support::{deltafold, rounds, run_json};
use etcd_client::TxnOp;
use fastrand::Rng;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

/// The steps of a story.
const STEPS: usize = 24;

struct Story<'w> {
    world: &'w mut RecordedEtcd,
    rng: Rng,
    /// The records of the histories that were left, in order. The live one has the next number.
    left: Vec<Truth>,
    /// Copies of the data directory, each with the number of its history.
    checkpoints: Vec<(Checkpoint, usize)>,
    /// How far the live etcd has compacted.
    compacted: i64,
    /// Whether the newest snapshot is of the live history.
    is_saved: bool,
    told: Vec<String>,
}

impl Story<'_> {
    fn tell(&mut self, what: impl Into<String>) {
        let what = format!("{} at {}", what.into(), self.world.revision());
        println!("    {what}");
        self.told.push(what);
    }

    fn run(&self, args: &[&str]) -> (i32, Value, String) {
        let mut command = deltafold();
        command
            .args(args)
            .args(["--store", &self.world.prefix.url, "--output", "json"]);
        run_json(&mut command)
    }

    /// Runs a command that must succeed.
    #[track_caller]
    fn succeeds(&self, args: &[&str]) -> Value {
        let (code, json, log) = self.run(args);
        assert_eq!(code, 0, "{args:?}\n{json:#}\n{log}\n{:#?}", self.told);
        json
    }

    /// Changes keys. The same locks and heartbeats are written in all histories.
    fn write(&mut self) {
        for _ in 0..self.rng.usize(1..12) {
            let value = format!("{:x}", self.rng.u64(..));
            let key = format!("/k/{}", self.rng.u8(..12));
            match self.rng.u8(..8) {
                0 => _ = self.world.put("/heartbeat", "ok"),
                1 => {
                    self.world.put("/lock", value);
                    self.world.delete("/lock");
                }
                2 => {
                    let ops = vec![
                        TxnOp::put("/lock", "held", None),
                        TxnOp::put(key, value, None),
                    ];
                    self.world.txn(ops);
                    let ops = vec![
                        TxnOp::delete("/lock", None),
                        TxnOp::put("/state", "released", None),
                    ];
                    self.world.txn(ops);
                }
                _ => _ = self.world.put(key, value),
            }
        }
        self.tell("wrote");
    }

    fn save(&mut self) {
        let kind = *self
            .rng
            .choice(&["delta", "delta", "delta", "full"])
            .unwrap();
        let before = self.names();
        let ended = self.world.snapshot(kind, &[]).succeeded();
        // etcd may stand at the last saved revision, with nothing to compare.
        self.is_saved |= ended.json["status"] == "Succeeded" || ended.json["proven"] == true;
        self.tell(format!("{kind}: {}", ended.json["message"]));
        if self.rng.u8(..6) == 0 {
            self.shift_clock(&before);
        }
    }

    /// The names of the snapshots and of the records.
    fn names(&self) -> BTreeSet<(&'static str, String)> {
        let mut names = BTreeSet::new();
        for folder in ["v2", "deltafold-timelines"] {
            let listed = fs::read_dir(std::path::Path::new(&self.world.prefix.url).join(folder));
            for object in listed.into_iter().flatten() {
                names.insert((folder, object.unwrap().file_name().into_string().unwrap()));
            }
        }
        names
    }

    /// Gives what was saved since `before` the names of a clock that is ten minutes ahead. From then on, the clocks of
    /// all others are behind.
    fn shift_clock(&mut self, before: &BTreeSet<(&'static str, String)>) {
        let store = std::path::Path::new(&self.world.prefix.url);
        for (folder, name) in self.names().difference(before) {
            let (start, time) = name.rsplit_once('-').unwrap();
            let (seconds, suffix) = time.split_once('.').unwrap_or((time, ""));
            let later = seconds.parse::<i64>().unwrap() + 600;
            let dot = if suffix.is_empty() { "" } else { "." };
            let from = store.join(folder).join(name);
            let to = store
                .join(folder)
                .join(format!("{start}-{later}{dot}{suffix}"));
            fs::rename(from, to).unwrap();
        }
        self.tell("by a clock that is ten minutes ahead");
    }

    /// Starts a command on the prefix, and stops or kills it at a random moment.
    fn interrupted(&mut self, mut command: Command, signal: Signal) -> Follower {
        let job = Follower::spawn(&mut command);
        sleep(Duration::from_millis(self.rng.u64(..250)));
        job.signal(signal);
        job
    }

    /// Something is killed at a random moment.
    fn kill(&mut self) {
        let kind = *self.rng.choice(&["delta", "full", "compact"]).unwrap();
        let command = self.command(kind);
        self.interrupted(command, Signal::KILL).wait();
        self.tell(format!("{kind} killed"));
    }

    /// Something sleeps at a random moment, while etcd is set back and another snapshotter saves.
    fn sleep_midway(&mut self) {
        let kind = *self
            .rng
            .choice(&["delta", "full", "compact", "gc"])
            .unwrap();
        let command = self.command(kind);
        let mut job = self.interrupted(command, Signal::STOP);
        self.tell(format!("{kind} sleeps"));
        self.set_back();
        self.write();
        if self.rng.bool() {
            self.save();
            self.write();
        }
        job.signal(Signal::CONT);
        let Ended { code, json, .. } = job.wait();
        self.tell(format!(
            "{kind} woke up and ended with {code}: {}",
            json["message"]
        ));
        self.save();
    }

    fn command(&self, kind: &str) -> Command {
        let (prefix, endpoints) = (&self.world.prefix, self.world.endpoints());
        match kind {
            "compact" | "gc" => {
                let mut command = deltafold();
                command.args([kind, "--store", &prefix.url, "--output", "json"]);
                if kind == "gc" {
                    command.args(["--apply", "--allow-shrink", "--restorable-window", "0s"]);
                }
                command
            }
            _ => snapshot_command(kind, prefix, &endpoints),
        }
    }

    fn follow(&mut self) {
        let mut follower = Follower::start(&self.world.prefix, &self.world.endpoints(), &QUICK);
        follower.wait_begun();
        self.write();
        follower.terminate().succeeded();
        self.is_saved = true;
        self.tell("followed");
    }

    /// A follower sleeps while etcd is set back and another snapshotter saves.
    fn follow_late(&mut self) {
        let args = ["--delta-period", "1h", "--full-schedule", "0 0 29 2 *"];
        let mut follower = Follower::start(&self.world.prefix, &self.world.endpoints(), &args);
        follower.wait_begun();
        self.write();
        std::thread::sleep(std::time::Duration::from_millis(500));
        follower.signal(Signal::STOP);
        self.tell("a follower sleeps");
        self.set_back();
        self.write();
        if self.rng.bool() {
            self.save();
            self.write();
        }
        follower.signal(Signal::CONT);
        std::thread::sleep(std::time::Duration::from_millis(1500));
        // It may have to look at the store anew when it is stopped.
        follower.terminate();
        self.tell("it woke up");
        self.save();
    }

    fn copy_data(&mut self) {
        let history = self.left.len();
        let checkpoint = self.world.checkpoint();
        self.tell("a copy of the data directory");
        self.checkpoints.push((checkpoint, history));
    }

    /// Sets etcd back: to a copy of its data, to a state of the backup, or to nothing.
    fn set_back(&mut self) {
        let live = self.left.len();
        let kept = match self.rng.u8(..8) {
            0 => {
                let kept = self.world.wiped();
                self.compacted = 0;
                self.tell("wiped");
                kept
            }
            1..4 if !self.checkpoints.is_empty() => {
                let (checkpoint, history) = self.rng.choice(&self.checkpoints).unwrap();
                let of = (*history != live).then(|| &self.left[*history]);
                let told = format!("set back to {} of history {history}", checkpoint.revision);
                self.compacted = checkpoint.revision;
                let kept = self.world.set_back_to(checkpoint, of);
                self.tell(told);
                kept
            }
            _ => {
                let Some((timeline, revision, of)) = self.promised_state() else {
                    return self.write();
                };
                let told = format!("restored to {revision} of {timeline}");
                let of = (of != live).then(|| &self.left[of]);
                self.compacted = revision;
                let kept = self.world.restored_to(revision, Some(&timeline), of);
                self.tell(told);
                kept
            }
        };
        self.left.push(kept);
        self.is_saved = false;
    }

    /// A random state that is promised, and the number of a history that had it.
    fn promised_state(&mut self) -> Option<(String, i64, usize)> {
        let list = self.succeeds(&["list", "--deep"]);
        let range = self.rng.choice(list["restorable"].as_array()?)?;
        let number = |name: &str| range[name].as_i64().unwrap();
        let revision = self
            .rng
            .i64(number("first_revision")..=number("last_revision"));
        let timeline = range["timeline"].as_str()?.to_owned();
        let live = self.world.revision();
        self.world.truth.wait_for(live);
        let state = self.world.prefix.state_at(&timeline, revision);
        let all: Vec<&Truth> = self.left.iter().chain([&self.world.truth]).collect();
        let has = |truth: &Truth| {
            truth.revision() >= revision
                && truth.at(&BTreeSet::from([revision]))[&revision] == state
        };
        let of = all.iter().position(|truth| has(truth));
        Some((timeline, revision, of.expect("a state that no etcd had")))
    }

    fn compact_etcd(&mut self) {
        let revision = self.world.revision();
        if self.compacted + 1 < revision {
            let to = match self.rng.bool() {
                true => revision,
                false => self.rng.i64(self.compacted + 1..=revision),
            };
            self.world.compact(to);
            self.compacted = to;
            self.tell(format!("etcd compacted {to}"));
        }
    }

    /// Runs a command that changes what is stored, but not what the newest state is. If all older timelines go, the
    /// newest one becomes `main`.
    fn keeps_the_newest(&mut self, args: &[&str]) {
        let before = self.newest().1;
        self.succeeds(args);
        self.tell(args.join(" "));
        assert_eq!(self.newest().1, before, "{args:?}: {:#?}", self.told);
    }

    fn gc(&mut self) {
        let limit = self.rng.u8(1..5).to_string();
        let policy: &[&str] = match self.rng.bool() {
            true => &["--policy", "limit", "--limit", &limit],
            false => &["--policy", "exponential"],
        };
        let gc = [
            "gc",
            "--apply",
            "--allow-shrink",
            "--restorable-window",
            "0s",
        ];
        self.keeps_the_newest(&[&gc[..], policy].concat());
    }

    /// Copies the backup, and goes on with the copy.
    fn copy(&mut self) {
        let before = self.newest();
        let folder = self
            .world
            .folder()
            .join(format!("copy-{}", self.told.len()));
        let to = Prefix::local(&folder);
        let mut copy = deltafold();
        copy.args([
            "copy",
            "--from",
            &self.world.prefix.url,
            "--to",
            &to.url,
            "--output",
            "json",
        ]);
        let (code, json, log) = run_json(&mut copy);
        assert_eq!(code, 0, "{json:#}\n{log}");
        self.world.prefix = to;
        self.tell("copied");
        assert_eq!(self.newest(), before, "{:#?}", self.told);
    }

    /// The newest state, as a restore would choose it.
    fn newest(&self) -> (Value, Value) {
        let data = self.world.folder().join("newest");
        let json = self.succeeds(&["restore", "--dry-run", "--data-dir", data.to_str().unwrap()]);
        (json["timeline"].clone(), json["revision"].clone())
    }

    /// Compares what can be restored with the records.
    fn check(&mut self) {
        let revision = self.world.revision();
        self.world.truth.wait_for(revision);
        let (timeline, newest) = self.newest();
        let status = self.run(&["status", "--max-age", "1h"]).1;
        assert_eq!(status["timeline"], timeline, "{status:#}\n{:#?}", self.told);
        assert_eq!(
            status["latest_revision"], newest,
            "{status:#}\n{:#?}",
            self.told
        );
        let last = status["restorable"].as_array().unwrap().last().unwrap();
        assert_eq!(
            last["last_revision"], newest,
            "{status:#}\n{:#?}",
            self.told
        );
        let all: Vec<&Truth> = [&self.world.truth].into_iter().chain(&self.left).collect();
        let seed = self.rng.u64(..);
        let checked = self.world.prefix.check_every_restorable(&all, seed, 3);
        if self.is_saved {
            let line = &checked.timelines[timeline.as_str().unwrap()];
            let of_live = line.newest.get(&0).map(|r| json!(r));
            assert_eq!(of_live, Some(newest), "{checked:?}\n{:#?}", self.told);
            let first = status["restorable"].as_array().unwrap().iter();
            let first = first.filter(|range| range["timeline"] == timeline);
            let first = first.map(|range| range["first_revision"].as_i64().unwrap());
            self.check_log(first.min().unwrap());
        }
    }

    /// Each line of the log is what etcd did, and all that it did after the first state is a line, but in holes.
    fn check_log(&self, first: i64) {
        let mut log = deltafold();
        log.args(["log", "--since", "1", "--prefix", "", "--output", "json"]);
        let out = log
            .args(["--store", &self.world.prefix.url])
            .output()
            .unwrap();
        let lines = String::from_utf8(out.stdout).unwrap();
        let lines: Vec<Value> = lines
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let change = |event: &etcd_client::Event| {
            let kv = event.kv().unwrap();
            let what = match (event.event_type(), kv.version()) {
                (etcd_client::EventType::Delete, _) => "deleted",
                (etcd_client::EventType::Put, 1) => "created",
                _ => "changed",
            };
            (kv.mod_revision(), kv.key_str().unwrap().to_owned(), what)
        };
        let events = self.world.truth.timed_events();
        let happened: BTreeSet<_> = events.iter().map(|event| change(&event.0)).collect();
        let (mut told, mut holes, mut last) = (BTreeSet::new(), Vec::new(), 0);
        for line in &lines {
            let number = |value: &Value| value.as_i64().unwrap();
            if let Some(missing) = line.get("missing").filter(|m| m.is_object()) {
                let of = |name: &str| number(&missing[name]);
                holes.push(of("first_revision")..=of("last_revision"));
            }
            let (Some(key), revision) = (line["key"].as_str(), &line["revision"]) else {
                continue;
            };
            let revision = number(revision);
            assert!(last <= revision, "{line}");
            last = revision;
            if line["recorded"] == true {
                let what = line["change"].as_str().unwrap();
                let found = happened
                    .iter()
                    .find(|h| (h.0, &*h.1, h.2) == (revision, key, what));
                told.insert(found.unwrap_or_else(|| panic!("{line}\n{:#?}", self.told)));
            } else {
                let span = number(&line["before"])..=revision;
                let is_it = |h: &&(i64, String, &str)| {
                    span.contains(&h.0) && h.1 == key && h.2 == "deleted"
                };
                assert!(
                    happened.iter().any(|h| is_it(&h)),
                    "{line}\n{:#?}",
                    self.told
                );
            }
        }
        let is_known = |h: &&(i64, String, &str)| {
            first < h.0 && h.0 <= last && !holes.iter().any(|hole| hole.contains(&h.0))
        };
        let untold: Vec<_> = happened
            .iter()
            .filter(is_known)
            .filter(|h| !told.contains(h))
            .collect();
        assert!(
            untold.is_empty(),
            "{untold:?} of {lines:#?}\n{:#?}",
            self.told
        );
    }

    fn tell_all(mut self) {
        self.write();
        self.save();
        for _ in 0..STEPS {
            match self.rng.u8(..24) {
                20 => self.kill(),
                21..24 => self.sleep_midway(),
                0..6 => self.write(),
                6..10 => {
                    self.save();
                    self.check();
                }
                10 => self.follow(),
                11 => self.copy_data(),
                12..15 => self.set_back(),
                15 => self.compact_etcd(),
                16 => self.keeps_the_newest(&["compact"]),
                17 => self.gc(),
                18 => self.copy(),
                _ => self.follow_late(),
            }
        }
        self.save();
        self.check();
    }
}

#[test]
fn every_restored_state_is_one_that_an_etcd_had() {
    let mut seeds = Rng::with_seed(crate::support::seed());
    for round in 0..rounds(3, 9) {
        let seed = seeds.u64(..);
        println!("round {round}, seed {seed}");
        with_etcd(EtcdVersion::V3_6, |world| {
            let story = Story {
                world,
                rng: Rng::with_seed(seed),
                left: Vec::new(),
                checkpoints: Vec::new(),
                compacted: 0,
                is_saved: false,
                told: Vec::new(),
            };
            story.tell_all();
        });
    }
}
