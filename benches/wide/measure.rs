//! A run of a program: what it took, and what that is held against.

use crate::Result;
use crate::support::slow_line::Traffic;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub const MIB: u64 = 1 << 20;
pub const MB: f64 = 1e6;
/// A run that takes longer is not run again.
const SLOW: f64 = 20.0;
/// Requests in flight that the goals count with.
const IN_FLIGHT: f64 = 32.0;
/// A run of a program, or the median of several.
#[derive(Clone, Default)]
pub struct Run {
    pub seconds: f64,
    /// VmHWM: with the page cache of mapped files.
    pub resident: u64,
    pub anonymous: u64,
    pub outcome: Value,
    pub traffic: Traffic,
    pub is_given_up: bool,
}

/// What a run is held against.
pub enum Goal {
    Seconds(f64),
    /// Of resident memory.
    Resident(u64),
    /// Of anonymous memory, as ARCHITECTURE.md bounds it.
    Anonymous(u64),
    Requests(usize),
    /// Of the kinds that begin so.
    RequestsOf(&'static str, usize),
    /// No slower than this many times the plain run, or than its requests take, so many at once.
    InFlight(f64),
    /// No slower than so many times the plain run and so many answers.
    Plain(f64, u32),
    /// MB/s over the line, in both directions together.
    Rate(f64),
}

impl Goal {
    /// In words, and whether it is reached.
    fn judge(&self, run: &Run, plain: &Run, delay: Duration) -> (String, bool) {
        let mib = |bytes: u64| bytes.div_ceil(MIB);
        let delay = delay.as_secs_f64();
        let within = |most: f64| (format!("≤ {most:.2} s"), run.seconds <= most);
        let (text, holds) = match *self {
            Goal::Seconds(most) => within(most),
            Goal::Resident(most) => (format!("≤ {} MiB", mib(most)), run.resident <= most),
            Goal::Anonymous(most) => (
                format!("anonymous ≤ {} MiB", mib(most)),
                run.anonymous <= most,
            ),
            Goal::Requests(most) => {
                let n = run.traffic.requests.len();
                (format!("≤ {most} requests"), n <= most)
            }
            Goal::RequestsOf(kind, most) => {
                let counts = run.traffic.counts();
                let of_kind = counts.iter().filter(|(k, _)| k.starts_with(kind));
                let n: usize = of_kind.map(|(_, n)| n).sum();
                (format!("≤ {most} × {kind}"), n <= most)
            }
            Goal::InFlight(times) => {
                let waits = run.traffic.requests.len() as f64 * delay / IN_FLIGHT;
                within(times * plain.seconds.max(waits))
            }
            Goal::Plain(times, answers) => {
                within(times * plain.seconds + f64::from(answers) * delay)
            }
            Goal::Rate(least) => {
                let rate = run.bytes() as f64 / MB / run.seconds;
                (format!("{rate:.0} of ≥ {least:.0} MB/s"), rate >= least)
            }
        };
        (text, holds && !run.is_given_up)
    }
}

impl Run {
    /// Runs a command to its end, or for so long.
    pub fn of(command: &mut Command, give_up: Duration) -> Result<Run> {
        let started = Instant::now();
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let pid = i32::try_from(child.id())?;
        let has_ended = AtomicBool::new(false);
        let mut peak = Run::default();
        let (mut out, mut err, mut seconds) = (Vec::new(), Vec::new(), 0.0);
        let pipes = child.stdout.take().zip(child.stderr.take());
        let (mut stdout, mut stderr) = pipes.ok_or("no output")?;
        let status = std::thread::scope(|s| -> Result<_> {
            s.spawn(|| stderr.read_to_end(&mut err));
            s.spawn(|| {
                while !has_ended.load(Ordering::Relaxed) {
                    let text = fs::read_to_string(format!("/proc/{pid}/status"));
                    let text = text.unwrap_or_default();
                    peak.resident = peak.resident.max(memory(&text, "VmHWM:"));
                    peak.anonymous = peak.anonymous.max(memory(&text, "RssAnon:"));
                    if started.elapsed() > give_up && !peak.is_given_up {
                        peak.is_given_up = true;
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
        peak.seconds = seconds;
        if !status.success() && !peak.is_given_up {
            let (out, err) = (String::from_utf8_lossy(&out), String::from_utf8_lossy(&err));
            let tail: String = err.chars().rev().take(2000).collect();
            let tail: String = tail.chars().rev().collect();
            return Err(format!("{command:?}: {status}\n{out:.2000}\n{tail}").into());
        }
        peak.outcome = serde_json::from_slice(&out).unwrap_or_default();
        Ok(peak)
    }

    /// The median of several runs, with the most memory of all; of slow ones there is one.
    pub fn median(count: usize, mut run: impl FnMut(usize) -> Result<Run>) -> Result<Run> {
        let mut runs: Vec<Run> = Vec::new();
        while runs.len() < count && runs.last().is_none_or(|r| r.seconds < SLOW) {
            runs.push(run(runs.len())?);
        }
        let resident = runs.iter().map(|r| r.resident).max().unwrap_or(0);
        let anonymous = runs.iter().map(|r| r.anonymous).max().unwrap_or(0);
        runs.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let at = runs.len() / 2;
        Ok(Run {
            resident,
            anonymous,
            ..runs.swap_remove(at)
        })
    }

    /// Over the line, in both directions.
    fn bytes(&self) -> u64 {
        let requests = self.traffic.requests.iter();
        requests.map(|r| r.bytes_up + r.bytes_down).sum()
    }

    pub fn time(&self) -> String {
        let more_than = if self.is_given_up { "> " } else { "" };
        format!("{more_than}{:.2} s", self.seconds)
    }

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

/// A row of the table.
pub fn row(work: &str, place: &str, run: &Run, plain: &Run, delay: Duration, goals: &[Goal]) {
    let judged: Vec<_> = goals.iter().map(|g| g.judge(run, plain, delay)).collect();
    let texts: Vec<&str> = judged.iter().map(|(text, _)| text.as_str()).collect();
    let holds = match judged.iter().all(|(_, holds)| *holds) {
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

/// Of the folder's own disk.
pub fn local_row(work: &str, run: &Run, goals: &[Goal]) {
    row(work, "local", run, run, Duration::ZERO, goals);
}

/// A line of `/proc/PID/status`, in bytes.
fn memory(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|l| l.strip_prefix(name));
    let kib = line.and_then(|l| l.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// The most that was resident at once of a process that runs.
pub fn resident(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status"));
    memory(&status.unwrap_or_default(), "VmHWM:")
}
