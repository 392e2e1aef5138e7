//! Measures a controller: CPU, memory, requests, and the latencies of its Jobs.

use crate::Result;
use crate::support::controller::Controller;
use crate::support::proxy::{Call, Proxy};
use std::collections::BTreeMap;
use std::fs;
use std::time::Instant;

/// The CPU time and the memory of a process.
#[derive(Clone, Copy)]
pub struct Usage {
    pub cpu_seconds: f64,
    /// Resident memory in MiB.
    resident: u64,
    /// The peak of resident memory in MiB.
    pub peak: u64,
}

/// Reads the usage of a process from `/proc`.
///
/// # Errors
/// Fails if the process has ended.
pub fn usage(pid: u32) -> Result<Usage> {
    /// The unit of CPU time in /proc, the same on all Linux systems.
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat.rsplit_once(')').ok_or("no process name in stat")?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let ticks = |index: usize| fields.get(index).and_then(|f| f.parse::<f64>().ok());
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let mib = |key: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(key))?;
        let kib = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?;
        Some(kib.div_ceil(1024))
    };
    Ok(Usage {
        cpu_seconds: (ticks(11).ok_or("utime")? + ticks(12).ok_or("stime")?) / TICKS_PER_SECOND,
        resident: mib("VmRSS:").ok_or("VmRSS")?,
        peak: mib("VmHWM:").ok_or("VmHWM")?,
    })
}

/// Whether a request belongs to the controller's work. Renewals of the leader's Lease and new watches do not:
/// they happen at fixed times.
pub fn is_work(call: &Call) -> bool {
    let is_leadership = call.resource == "leases" && call.name.contains("controller");
    // No Pod ever starts here, so Warnings about the Jobs are read again and again.
    let reads_warnings = call.verb == "list" && call.resource == "events";
    call.verb != "watch" && !is_leadership && !reads_warnings
}

/// The beginning of a measured period.
pub struct Phase {
    began: Instant,
    cpu_seconds: f64,
}

/// The cost of a measured period.
pub struct Cost {
    pub seconds: f64,
    pub requests: usize,
    writes: usize,
    pub cpu_seconds: f64,
    pub usage: Usage,
}

impl Phase {
    /// Begins a period now. Without a controller, the period includes everything that the next one does.
    pub fn begin(controller: Option<&Controller>, proxy: &Proxy) -> Result<Self> {
        proxy.take();
        let usage = controller.map(|c| usage(c.id())).transpose()?;
        Ok(Self {
            began: Instant::now(),
            cpu_seconds: usage.map_or(0.0, |u| u.cpu_seconds),
        })
    }

    /// Ends the period at the time `at`. Prints the kinds of requests on standard error.
    pub fn end(
        &self,
        work: &str,
        controller: &Controller,
        proxy: &Proxy,
        at: Instant,
    ) -> Result<Cost> {
        let usage = usage(controller.id())?;
        let kinds = proxy.counts().into_iter();
        let kinds = kinds.map(|((verb, resource), n)| format!("{verb} {resource} {n}"));
        eprintln!("{work}: {}", kinds.collect::<Vec<_>>().join(", "));
        let (requests, writes) = proxy.look(|calls| {
            let work = || calls.iter().filter(|c| is_work(c));
            (work().count(), work().filter(|c| c.writes()).count())
        });
        Ok(Cost {
            seconds: at.saturating_duration_since(self.began).as_secs_f64(),
            requests,
            writes,
            cpu_seconds: usage.cpu_seconds - self.cpu_seconds,
            usage,
        })
    }
}

impl Cost {
    /// Prints the row of the period.
    pub fn row(&self, work: &str, renewals: usize, goals: &[String]) {
        let per_1000 = match renewals {
            0 => "–".to_owned(),
            n => format!("{:.2} s", self.cpu_seconds * 1000.0 / n as f64),
        };
        println!(
            "| {work} | {:.0} s | {} | {} | {:.2} s | {per_1000} | {} MiB | {} MiB | {} |",
            self.seconds,
            self.requests,
            self.writes,
            self.cpu_seconds,
            self.usage.resident,
            self.usage.peak,
            goals.join(", "),
        );
    }

    pub fn writes_nothing(&self) -> String {
        goal("0 writes", self.writes == 0)
    }

    pub fn within_a_minute(&self) -> String {
        goal("≤ 60 s", self.seconds <= 60.0)
    }

    pub fn fits(&self) -> String {
        goal("peak ≤ 400 MiB", self.usage.peak <= 400)
    }
}

/// Returns a goal in words, and whether it is reached.
pub fn goal(text: &str, holds: bool) -> String {
    format!("{text}: {}", if holds { "yes" } else { "**no**" })
}

/// The times from a renewal that crosses a threshold to the response for its Job, in seconds. A missing Job
/// counts as infinity.
#[derive(Default)]
pub struct Latencies {
    /// The latency of each Job, sorted.
    pub seconds: Vec<f64>,
    /// The time from the first renewal to the last Job.
    pub all: f64,
}

impl Latencies {
    /// Returns a percentile; `fraction` is from 0 to 1.
    pub fn percentile(&self, fraction: f64) -> f64 {
        let count = self.seconds.len();
        let rank = ((count as f64 * fraction).ceil() as usize).clamp(1, count);
        self.seconds[rank - 1]
    }

    /// Returns the cells of a row: p50, p99, the longest latency, and the time of all.
    pub fn cells(&self) -> String {
        let [p50, p99, longest] = [0.5, 0.99, 1.0].map(|fraction| self.percentile(fraction));
        let times = [p50, p99, longest, self.all].map(|seconds| match seconds.is_finite() {
            true => format!("{seconds:.2} s"),
            false => "never".to_owned(),
        });
        times.join(" | ")
    }
}

/// Whether a request has created a Job.
pub fn creates_job(call: &Call) -> bool {
    call.verb == "create" && call.resource == "jobs" && call.status == 201
}

/// Returns when the API server confirmed each policy's Job, by the name of the policy.
pub fn job_times(calls: &[Call]) -> BTreeMap<String, Instant> {
    let mut times = BTreeMap::new();
    for call in calls.iter().filter(|c| creates_job(c)) {
        let job = call.json();
        let policy = job["metadata"]["labels"]["deltafold.io/policy"].as_str();
        if let (Some(policy), Some(answered)) = (policy, call.answered) {
            times.insert(policy.to_owned(), answered);
        }
    }
    times
}
