//! What a controller has used, what it has asked for, and how soon its Jobs were there.

use crate::Result;
use crate::support::controller::Controller;
use crate::support::faulty_proxy::{Call, Proxy};
use std::collections::BTreeMap;
use std::fs;
use std::time::Instant;

/// What a process has used so far.
#[derive(Clone, Copy)]
pub struct Used {
    pub cpu_seconds: f64,
    resident: u64,
    pub peak: u64,
}

pub fn used(pid: u32) -> Result<Used> {
    /// Of /proc, on Linux everywhere.
    const TICKS_A_SECOND: f64 = 100.0;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat.rsplit_once(')').ok_or("a stat")?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|f| f.parse::<f64>().ok());
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let mib = |key: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(key))?;
        let kib = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?;
        Some(kib.div_ceil(1024))
    };
    Ok(Used {
        cpu_seconds: (ticks(11).ok_or("utime")? + ticks(12).ok_or("stime")?) / TICKS_A_SECOND,
        resident: mib("VmRSS:").ok_or("VmRSS")?,
        peak: mib("VmHWM:").ok_or("VmHWM")?,
    })
}

/// Requests of the work: the leader's own Lease is renewed, and watches begin again, by the clock.
pub fn counts(call: &Call) -> bool {
    let of_leadership = call.resource == "leases" && call.name.contains("controller");
    call.verb != "watch" && !of_leadership
}

/// A controller's work since a moment.
pub struct Phase {
    began: Instant,
    cpu_seconds: f64,
}

pub struct Cost {
    pub seconds: f64,
    pub requests: usize,
    writes: usize,
    pub cpu_seconds: f64,
    pub used: Used,
}

impl Phase {
    /// From now on; of a process that does not run yet, everything.
    pub fn begin(controller: Option<&Controller>, proxy: &Proxy) -> Result<Self> {
        proxy.forget();
        let used = controller.map(|c| used(c.id())).transpose()?;
        Ok(Self {
            began: Instant::now(),
            cpu_seconds: used.map_or(0.0, |u| u.cpu_seconds),
        })
    }

    /// Until a moment. Says on standard error what the requests were.
    pub fn end(&self, what: &str, of: &Controller, proxy: &Proxy, at: Instant) -> Result<Cost> {
        let used = used(of.id())?;
        let kinds = proxy.counts().into_iter();
        let kinds = kinds.map(|((verb, resource), n)| format!("{verb} {resource} {n}"));
        eprintln!("{what}: {}", kinds.collect::<Vec<_>>().join(", "));
        let (requests, writes) = proxy.look(|calls| {
            let of_work = || calls.iter().filter(|c| counts(c));
            (of_work().count(), of_work().filter(|c| c.writes()).count())
        });
        Ok(Cost {
            seconds: at.saturating_duration_since(self.began).as_secs_f64(),
            requests,
            writes,
            cpu_seconds: used.cpu_seconds - self.cpu_seconds,
            used,
        })
    }
}

impl Cost {
    pub fn row(&self, what: &str, renewals: usize, goals: &[String]) {
        let per_1000 = match renewals {
            0 => "–".to_owned(),
            n => format!("{:.2} s", self.cpu_seconds * 1000.0 / n as f64),
        };
        println!(
            "| {what} | {:.0} s | {} | {} | {:.2} s | {per_1000} | {} MiB | {} MiB | {} |",
            self.seconds,
            self.requests,
            self.writes,
            self.cpu_seconds,
            self.used.resident,
            self.used.peak,
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
        goal("peak ≤ 400 MiB", self.used.peak <= 400)
    }
}

pub fn goal(text: &str, holds: bool) -> String {
    format!("{text}: {}", if holds { "yes" } else { "**no**" })
}

/// From a renewal that crosses a threshold to the answer that its Job was made, in seconds.
#[derive(Default)]
pub struct Crossed {
    /// Sorted.
    pub latencies: Vec<f64>,
    /// From the first renewal to the last Job.
    pub all: f64,
}

impl Crossed {
    pub fn percentile(&self, part: f64) -> f64 {
        let count = self.latencies.len();
        let at = ((count as f64 * part).ceil() as usize).clamp(1, count);
        self.latencies[at - 1]
    }

    /// p50, p99, the longest, and all.
    pub fn times(&self) -> String {
        let [p50, p99, longest] = [0.5, 0.99, 1.0].map(|part| self.percentile(part));
        let times = [p50, p99, longest, self.all].map(|seconds| match seconds.is_finite() {
            true => format!("{seconds:.2} s"),
            false => "never".to_owned(),
        });
        times.join(" | ")
    }
}

pub fn makes_job(call: &Call) -> bool {
    call.verb == "create" && call.resource == "jobs" && call.status == 201
}

/// By policy, when the API server told that its Job was made.
pub fn jobs_made(calls: &[Call]) -> BTreeMap<String, Instant> {
    let made = calls.iter().filter(|c| makes_job(c)).filter_map(|call| {
        let job = call.json();
        let policy = job["metadata"]["labels"]["deltafold.io/policy"].as_str()?;
        Some((policy.to_owned(), call.answered?))
    });
    made.collect()
}
