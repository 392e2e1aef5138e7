//! `deltafold snapshot` as a process, run to its end or observed while it follows.

use super::scratch;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use super::etcd::Signal;
use super::process::{Process, is_a_process};
use super::restorable::Prefix;

/// The longest wait. Generous: the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(90);

/// Arguments for a delta every second and no full but the first.
pub const QUICK: [&str; 4] = ["--delta-period", "1s", "--full-schedule", "0 0 29 2 *"];

/// The result of a run.
#[derive(Debug)]
pub struct Ended {
    pub code: i32,
    /// Null if nothing was printed.
    pub json: Value,
    /// The log, one JSON object a line.
    pub log: String,
}

impl Ended {
    pub fn reason(&self) -> &str {
        self.json["reason"].as_str().unwrap_or_default()
    }

    /// Returns the last snapshot of the run.
    pub fn last_snapshot(&self) -> &Value {
        let all = self.json["snapshots"].as_array().expect("snapshots");
        all.last().expect("a snapshot")
    }

    #[track_caller]
    pub fn succeeded(self) -> Self {
        assert_eq!(self.code, 0, "{}\n{}", self.json, self.log);
        self
    }
}

/// Returns the command `deltafold snapshot KIND` for an etcd and a prefix.
pub fn snapshot_command(kind: &str, prefix: &Prefix, endpoints: &[String]) -> Command {
    let mut command = super::deltafold();
    command
        .args(["snapshot", kind, "--output", "json", "--log-format", "json"])
        .args(["--endpoints", &endpoints.join(",")])
        .args(["--store", &prefix.url])
        .envs(prefix.env.iter().map(|(name, value)| (name, value)));
    command
}

/// Runs `deltafold snapshot KIND` to its end.
pub fn snapshot(kind: &str, prefix: &Prefix, endpoints: &[String], args: &[&str]) -> Ended {
    let mut command = snapshot_command(kind, prefix, endpoints);
    let (code, json, log) = super::run_json(command.args(args));
    Ended { code, json, log }
}

/// A running `deltafold snapshot follow`. It is killed when dropped.
pub struct Follower {
    process: Process,
    out: PathBuf,
    // Declared after the process, so removed after it.
    _folder: TempDir,
}

is_a_process!(Follower);

impl Follower {
    pub fn start(prefix: &Prefix, endpoints: &[String], args: &[&str]) -> Self {
        let mut command = snapshot_command("follow", prefix, endpoints);
        Self::spawn(command.args(args))
    }

    pub fn spawn(command: &mut Command) -> Self {
        let folder = scratch::folder_named("follower-").expect("a folder for its log");
        let (out, log) = (folder.path().join("out"), folder.path().join("log"));
        let create = |path| File::create(path).expect("create a log");
        let process = Process::spawn_to(command, create(&out), create(&log), &log);
        Self {
            process: process.unwrap_or_else(|err| panic!("{err}")),
            out,
            _folder: folder,
        }
    }

    #[track_caller]
    pub fn assert_runs(&mut self) {
        if let Err(err) = self.process.runs() {
            let out = fs::read_to_string(&self.out).unwrap_or_default();
            panic!("the follower: {err}\n{out}\n{}", self.log());
        }
    }

    /// Waits until `holds` returns true. Fails if the follower ends.
    #[track_caller]
    pub fn wait_until(&mut self, what: &str, mut holds: impl FnMut() -> bool) {
        let started = Instant::now();
        while !holds() {
            self.assert_runs();
            let log = self.log();
            assert!(
                started.elapsed() < PATIENCE,
                "not within {PATIENCE:?}: {what}\n{log}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until the prefix holds this revision.
    #[track_caller]
    pub fn wait_saved(&mut self, prefix: &Prefix, revision: i64) {
        let what = format!("revision {revision} is saved");
        self.wait_until(&what, || prefix.last_saved() >= revision);
    }

    /// Waits until a line of the log contains all of these parts.
    #[track_caller]
    pub fn wait_log(&mut self, parts: &[&str]) {
        let log = self.log.clone();
        self.wait_until(&format!("its log says {parts:?}"), || {
            let text = fs::read(&log).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            text.lines()
                .any(|line| parts.iter().all(|p| line.contains(p)))
        });
    }

    /// Waits until it watches, or waits for a change.
    #[track_caller]
    pub fn wait_begun(&mut self) {
        let log = self.log.clone();
        self.wait_until("it has begun", || {
            let text = fs::read_to_string(&log).unwrap_or_default();
            text.contains("\"watching\"") || text.contains("nothing is saved until it changes")
        });
    }

    /// Kills the process, as a failure of its machine would.
    pub fn kill(mut self) {
        self.process.end();
    }

    /// Sends SIGTERM. The follower saves a last delta and ends.
    #[track_caller]
    pub fn terminate(mut self) -> Ended {
        self.process.signal(Signal::TERM);
        self.wait()
    }

    /// Waits for the end of the process.
    #[track_caller]
    pub fn wait(&mut self) -> Ended {
        let Some(status) = self.process.ended_within(PATIENCE) else {
            panic!(
                "the follower does not end within {PATIENCE:?}\n{}",
                self.log()
            );
        };
        let out = fs::read(&self.out).unwrap_or_default();
        let out = out.trim_ascii();
        Ended {
            code: status.code().unwrap_or(-1),
            json: match out.is_empty() {
                true => Value::Null,
                // Either one object, or a line for each snapshot: the last line counts.
                false => serde_json::from_slice(out)
                    .or_else(|_| {
                        let last = out.rsplit(|b| *b == b'\n').next().unwrap_or_default();
                        serde_json::from_slice(last)
                    })
                    .unwrap_or_else(|err| panic!("{err}: {}", String::from_utf8_lossy(out))),
            },
            log: self.log(),
        }
    }
}
