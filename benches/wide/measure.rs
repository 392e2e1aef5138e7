//! Measures a run of a program (seconds, memory, requests), and compares it with goals.

use crate::Result;
use crate::process_memory::field;
use crate::support::proxy::Traffic;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub const MIB: u64 = 1 << 20;
pub const MB: f64 = 1e6;
/// A run that takes longer, in seconds, is not repeated.
const SLOW: f64 = 20.0;
/// The number of concurrent requests that [`Goal::InFlight`] assumes.
const IN_FLIGHT: f64 = 32.0;

/// A run of a program, or the median of several.
#[derive(Clone, Default)]
pub struct Run {
    pub seconds: f64,
    /// The peak of resident memory (VmHWM) in bytes, including the page cache of mapped files.
    pub resident: u64,
    /// The peak of anonymous memory in bytes.
    pub anonymous: u64,
    pub outcome: Value,
    pub traffic: Traffic,
    /// Whether the run was killed after the time-out.
    pub timed_out: bool,
}

/// A limit for a run.
pub enum Goal {
    /// At most this many seconds.
    Seconds(f64),
    /// At most this much resident memory, in bytes.
    Resident(u64),
    /// At most this much anonymous memory, in bytes.
    Anonymous(u64),
    /// At most this many requests.
    Requests(usize),
    /// At most this many requests of the kinds that begin with the text.
    RequestsOf(&'static str, usize),
    /// At most this many times the longer of: the plain run, and the delays of all requests if 32 are in
    /// flight.
    InFlight(f64),
    /// At most this many times the plain run, plus this many delays.
    Plain(f64, u32),
    /// At least this many MB/s over the line, both directions together.
    Rate(f64),
}

impl Goal {
    /// Returns the goal in words, and whether the run reaches it.
    fn check(&self, run: &Run, plain: &Run, delay: Duration) -> (String, bool) {
        let mib = |bytes: u64| bytes.div_ceil(MIB);
        let delay = delay.as_secs_f64();
        let within = |limit: f64| (format!("≤ {limit:.2} s"), run.seconds <= limit);
        let (text, holds) = match *self {
            Goal::Seconds(limit) => within(limit),
            Goal::Resident(limit) => (format!("≤ {} MiB", mib(limit)), run.resident <= limit),
            Goal::Anonymous(limit) => (
                format!("anonymous ≤ {} MiB", mib(limit)),
                run.anonymous <= limit,
            ),
            Goal::Requests(limit) => {
                let n = run.traffic.requests.len();
                (format!("≤ {limit} requests"), n <= limit)
            }
            Goal::RequestsOf(kind, limit) => {
                let counts = run.traffic.counts();
                let of_kind = counts.iter().filter(|(k, _)| k.starts_with(kind));
                let n: usize = of_kind.map(|(_, n)| n).sum();
                (format!("≤ {limit} × {kind}"), n <= limit)
            }
            Goal::InFlight(factor) => {
                let delays = run.traffic.requests.len() as f64 * delay / IN_FLIGHT;
                within(factor * plain.seconds.max(delays))
            }
            Goal::Plain(factor, delays) => {
                within(factor * plain.seconds + f64::from(delays) * delay)
            }
            Goal::Rate(limit) => {
                let rate = run.bytes() as f64 / MB / run.seconds;
                (format!("{rate:.0} of ≥ {limit:.0} MB/s"), rate >= limit)
            }
        };
        (text, holds && !run.timed_out)
    }
}

impl Run {
    /// Runs a command to its end, or kills it after `timeout`.
    ///
    /// # Errors
    /// Fails if the command fails before the time-out.
    pub fn measure(command: &mut Command, timeout: Duration) -> Result<Run> {
        let started = Instant::now();
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let pid = i32::try_from(child.id())?;
        let has_ended = AtomicBool::new(false);
        let mut run = Run::default();
        let (mut out, mut err, mut seconds) = (Vec::new(), Vec::new(), 0.0);
        let pipes = child.stdout.take().zip(child.stderr.take());
        let (mut stdout, mut stderr) = pipes.ok_or("no output")?;
        let status = std::thread::scope(|s| -> Result<_> {
            s.spawn(|| stderr.read_to_end(&mut err));
            s.spawn(|| {
                while !has_ended.load(Ordering::Relaxed) {
                    let status = fs::read_to_string(format!("/proc/{pid}/status"));
                    let status = status.unwrap_or_default();
                    run.resident = run.resident.max(field(&status, "VmHWM:"));
                    run.anonymous = run.anonymous.max(field(&status, "RssAnon:"));
                    if started.elapsed() > timeout && !run.timed_out {
                        run.timed_out = true;
                        let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL));
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
            let read = stdout.read_to_end(&mut out);
            let status = child.wait();
            seconds = started.elapsed().as_secs_f64();
            has_ended.store(true, Ordering::Relaxed);
            read?;
            Ok(status?)
        })?;
        run.seconds = seconds;
        if !status.success() && !run.timed_out {
            let (out, err) = (String::from_utf8_lossy(&out), String::from_utf8_lossy(&err));
            let skipped = err.chars().count().saturating_sub(2000);
            let tail: String = err.chars().skip(skipped).collect();
            return Err(format!("{command:?}: {status}\n{out:.2000}\n{tail}").into());
        }
        run.outcome = serde_json::from_slice(&out).unwrap_or_default();
        Ok(run)
    }

    /// Returns the median of several runs by time, with the highest memory of all. A slow run is not
    /// repeated.
    pub fn median(count: usize, mut run: impl FnMut(usize) -> Result<Run>) -> Result<Run> {
        let mut runs: Vec<Run> = Vec::new();
        while runs.len() < count && runs.last().is_none_or(|r| r.seconds < SLOW) {
            runs.push(run(runs.len())?);
        }
        let resident = runs.iter().map(|r| r.resident).max().unwrap_or(0);
        let anonymous = runs.iter().map(|r| r.anonymous).max().unwrap_or(0);
        runs.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let middle = runs.len() / 2;
        Ok(Run {
            resident,
            anonymous,
            ..runs.swap_remove(middle)
        })
    }

    /// Returns the bytes sent over the line, in both directions.
    fn bytes(&self) -> u64 {
        let requests = self.traffic.requests.iter();
        requests.map(|r| r.bytes_up + r.bytes_down).sum()
    }

    /// Returns the time in words, with `>` if the run timed out.
    pub fn time(&self) -> String {
        let more_than = if self.timed_out { "> " } else { "" };
        format!("{more_than}{:.2} s", self.seconds)
    }

    /// Returns the number of requests in words: all, the most at once, and each kind.
    fn requests(&self) -> String {
        let mut counts: Vec<_> = self.traffic.counts().into_iter().collect();
        counts.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
        let kinds: Vec<String> = counts.iter().map(|(k, n)| format!("{n} {k}")).collect();
        match self.traffic.requests.len() {
            0 => "–".to_owned(),
            n => format!(
                "{n}, {} at once: {}",
                self.traffic.most_at_once,
                kinds.join(", ")
            ),
        }
    }
}

/// Prints a row of the table. `plain` is the same run without the delay.
pub fn row(work: &str, place: &str, run: &Run, plain: &Run, delay: Duration, goals: &[Goal]) {
    let checked: Vec<_> = goals.iter().map(|g| g.check(run, plain, delay)).collect();
    let texts: Vec<&str> = checked.iter().map(|(text, _)| text.as_str()).collect();
    let holds = match checked.iter().all(|(_, holds)| *holds) {
        _ if goals.is_empty() => "",
        true => "yes",
        false => "no",
    };
    println!(
        "| {work} | {place} | {} | {} | {} MiB | {} | {holds} |",
        run.time(),
        run.requests(),
        run.resident / MIB,
        texts.join(", "),
    );
}

/// Prints a row for a run on a local folder.
pub fn local_row(work: &str, run: &Run, goals: &[Goal]) {
    row(work, "local", run, run, Duration::ZERO, goals);
}

/// Returns the peak of resident memory of a running process, in bytes.
pub fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status"));
    field(&status.unwrap_or_default(), "VmHWM:")
}
