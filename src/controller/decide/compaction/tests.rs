//! The last compaction by status and Jobs; and a simulated cluster in which Jobs, writes and the controller
//! fail.

use super::*;
use crate::controller::api::{EtcdBackupPolicySpec, EtcdSpec};
use crate::controller::cluster::KeptLease;
use crate::controller::facts::leases::tests::{at, druid, ours};
use crate::controller::facts::outcome::DEADLINE_EXCEEDED;
use crate::controller::facts::threshold_jobs::is_of_task;
use chrono::TimeDelta;

const THRESHOLD: i64 = 100;

fn policy() -> EtcdBackupPolicy {
    let mut spec = EtcdBackupPolicySpec {
        etcd: Some(EtcdSpec::default()),
        ..EtcdBackupPolicySpec::default()
    };
    spec.compaction.events_threshold = THRESHOLD;
    EtcdBackupPolicy::new("p", spec)
}

fn job(name: &str, created: i64, attempt: i32, finished: bool) -> ThresholdJob {
    ThresholdJob {
        name: name.to_owned(),
        trigger: "EventsThreshold".to_owned(),
        full_revision: 100,
        delta_revision: 200,
        full_snapshot: false,
        attempt,
        generation: None,
        created: Some(at(created)),
        finished,
    }
}

fn run(state: RunState, started: i64) -> LastRun {
    LastRun {
        state,
        start_time: Some(at(started)),
        ..LastRun::default()
    }
}

#[test]
fn the_annotations_of_a_job_tell_why_it_was_created() {
    let settings = Settings::new("image");
    let started = ThresholdJob {
        created: None,
        ..job("p-fullsnap-1", 0, 3, false)
    };
    let started = ThresholdJob {
        full_snapshot: true,
        ..started
    };
    let annotations = started.annotations("so many events");
    let made =
        jobs::compaction_job(&policy(), &settings, &started.name, true, annotations).unwrap();
    assert_eq!(ThresholdJob::read(&made), Some(started));
    assert!(is_of_threshold(&made) && !is_of_task(&made));
    // The Job of a scheduled full snapshot belongs to no threshold.
    let mut scheduled = made;
    scheduled.metadata.annotations = None;
    assert_eq!(ThresholdJob::read(&scheduled), None);
    assert!(!is_of_threshold(&scheduled));
}

#[test]
fn the_newest_job_replaces_a_status_that_was_not_written() {
    use RunState::{Failed, Running, Succeeded};
    let first = job("a", 10, 0, true);
    let second = job("b", 20, 1, false);
    let last = |in_status: Option<&LastCompaction>,
                newest: Option<(&ThresholdJob, LastRun)>,
                unseen: &[String]| {
        let newest = newest.map(|(job, run)| (job.clone(), run));
        last_compaction(in_status, newest, unseen, at(99))
    };
    // There is nothing yet; then a Job that no status mentions.
    assert_eq!(last(None, None, &[]), None);
    let of_first = last(None, Some((&first, run(Failed, 10))), &[]).unwrap();
    assert_eq!((of_first.job_name.as_str(), of_first.failures), ("a", 1));
    assert_eq!(
        (of_first.full_revision, of_first.delta_revision),
        (100, 200)
    );
    let of_second = last(Some(&of_first), Some((&second, run(Running, 20))), &[]).unwrap();
    assert_eq!((of_second.job_name.as_str(), of_second.failures), ("b", 1));
    let done = last(Some(&of_second), Some((&second, run(Succeeded, 20))), &[]).unwrap();
    assert_eq!((done.run.state, done.failures), (Succeeded, 0));
    // The Job is deleted some time after its end: the status stays.
    assert_eq!(last(Some(&done), None, &[]), Some(done.clone()));
    assert_eq!(
        last(Some(&done), Some((&first, run(Failed, 10))), &[]),
        Some(done.clone())
    );
    // A running Job is not in the cache yet, or was deleted before its end was seen.
    assert_eq!(
        last(Some(&of_second), None, &["b".to_owned()]),
        Some(of_second.clone())
    );
    let deleted = last(Some(&of_second), Some((&first, run(Failed, 10))), &[]).unwrap();
    assert_eq!(deleted.run.reason.as_deref(), Some(JOB_DELETED));
    assert_eq!((deleted.job_name.as_str(), deleted.failures), ("b", 2));
    // The result that a Pod reported stays when the Pod is deleted.
    let reported = LastRun {
        exit_code: Some(69),
        reason: Some("StoreUnreachable".to_owned()),
        ..run(Failed, 20)
    };
    let failed = last(Some(&of_second), Some((&second, reported)), &[]).unwrap();
    let without_pod = last(Some(&failed), Some((&second, run(Failed, 20))), &[]).unwrap();
    assert_eq!(without_pod, failed);
}

#[derive(Debug, Clone)]
struct SimJob {
    started: ThresholdJob,
    run: LastRun,
}

/// A simulated cluster with its store, Leases and Jobs, and a controller with an old cache that restarts at
/// any time. Times are in seconds.
struct Sim {
    rng: fastrand::Rng,
    policy: EtcdBackupPolicy,
    now: i64,
    /// How far the controller's clock is ahead.
    skew: i64,
    /// The revision of the live etcd.
    revision: i64,
    /// The last revision of the newest full snapshot in the store.
    full: i64,
    /// The last revision of the newest snapshot in the store.
    newest: i64,
    leases: [KeptLease; 2],
    /// Whether deltafold renews the Leases, or etcd-druid.
    has_own_leases: bool,
    is_store_up: bool,
    has_faults: bool,
    status: Option<LastCompaction>,
    jobs: Vec<SimJob>,
    /// The names of all Jobs that were created, in order.
    created: Vec<String>,
    successes: usize,
    // The memory of the controller.
    cached_status: Option<LastCompaction>,
    cached_jobs: Vec<SimJob>,
    unseen: Vec<String>,
    unanswered: Option<ThresholdStart>,
    recovered_at: Option<DateTime<Utc>>,
}

impl Sim {
    fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let has_own_leases = rng.bool();
        let mut policy = policy();
        if rng.u8(..4) == 0 {
            policy.spec.etcd = None;
        }
        policy.spec.compaction.full_snapshot_threshold =
            Some(5 * THRESHOLD).filter(|_| rng.u8(..3) == 0);
        let mut sim = Sim {
            rng,
            policy,
            now: 0,
            skew: 0,
            revision: 10,
            full: 10,
            newest: 10,
            leases: [druid("0", None), druid("0", None)],
            has_own_leases,
            is_store_up: true,
            has_faults: true,
            status: None,
            jobs: Vec::new(),
            created: Vec::new(),
            successes: 0,
            cached_status: None,
            cached_jobs: Vec::new(),
            unseen: Vec::new(),
            unanswered: None,
            recovered_at: None,
        };
        sim.renew();
        sim
    }

    /// Returns true with this probability.
    fn chance(&mut self, percent: u8) -> bool {
        self.rng.u8(..100) < percent
    }

    /// Whether a fault of this probability happens.
    fn fails(&mut self, percent: u8) -> bool {
        self.has_faults && self.chance(percent)
    }

    /// Renews the Leases with the snapshots in the store. Either renewal may fail.
    fn renew(&mut self) {
        let (full, newest) = (self.full, self.newest);
        let time = at(self.now + self.rng.i64(-3..3));
        let unix = time.timestamp();
        let of_full = format!("Full-00000000-{full:08}-{unix}");
        let last = if newest > full {
            format!("Incr-{:08}-{newest:08}-{unix}", full + 1)
        } else {
            of_full.clone()
        };
        let events = (newest - full).to_string();
        let renewed = [
            ours(&full.to_string(), time, &[("last-snapshot-name", &of_full)]),
            ours(
                &newest.to_string(),
                time,
                &[
                    ("last-snapshot-name", &last),
                    ("accumulated-delta-events", &events),
                    ("accumulated-delta-bytes", "7"),
                ],
            ),
        ];
        for (i, renewed) in renewed.into_iter().enumerate() {
            let revision = [full, newest][i].to_string();
            if !self.fails(10) {
                self.leases[i] = if self.has_own_leases {
                    renewed
                } else {
                    druid(&revision, Some(time))
                };
            }
        }
    }

    fn facts(&self) -> LeaseFacts {
        LeaseFacts::read(Some(&self.leases[0]), Some(&self.leases[1]))
    }

    /// Lets some time pass: events, snapshots, restores, outages, wrong clocks, ends of Jobs.
    fn advance(&mut self) {
        self.now += self.rng.i64(1..400);
        self.revision += self.rng.i64(0..40);
        if self.chance(50) {
            self.newest = self.revision;
            self.renew();
        }
        if self.fails(2) {
            (self.full, self.newest) = (self.revision, self.revision);
            self.renew();
        }
        if self.fails(1) {
            // The cluster is restored to an older snapshot.
            self.revision = (self.revision - self.rng.i64(0..300)).max(5);
            (self.full, self.newest) = (self.revision, self.revision);
            self.renew();
        }
        if self.fails(10) {
            self.is_store_up = !self.is_store_up;
            if self.is_store_up && self.rng.bool() {
                self.recovered_at = Some(self.clock());
            }
        }
        if self.fails(2) {
            self.skew = [-40_000_000, -4000, -10, 0, 10, 4000, 40_000_000][self.rng.usize(..7)];
        }
        self.advance_jobs();
    }

    fn advance_jobs(&mut self) {
        for i in 0..self.jobs.len() {
            if self.jobs[i].run.state != RunState::Running || !self.chance(30) {
                continue;
            }
            let name = self.jobs[i].started.name.clone();
            let is_unseen = self.unseen.contains(&name) || self.unanswered.is_some();
            if self.fails(3) && !is_unseen {
                self.jobs.remove(i);
                return;
            }
            let (code, reason) = match self.rng.u8(..100) {
                _ if !self.is_store_up => (Some(69), Some("StoreUnreachable")),
                0..70 => (Some(0), None),
                _ if !self.has_faults => (Some(0), None),
                70..78 => (Some(65), Some("CorruptSnapshot")),
                78..86 => (Some(74), Some("NoSpace")),
                86..92 => (None, Some("Evicted")),
                _ => (None, Some(DEADLINE_EXCEEDED)),
            };
            let mut revision = None;
            if code == Some(0) {
                self.successes += 1;
                if self.jobs[i].started.full_snapshot {
                    self.newest = self.revision;
                }
                self.full = self.newest;
                revision = Some(self.full);
                self.renew();
            }
            let job = &mut self.jobs[i];
            job.started.finished = true;
            job.run.state = match code {
                Some(0) => RunState::Succeeded,
                _ => RunState::Failed,
            };
            job.run.exit_code = code;
            job.run.reason = reason.map(str::to_owned);
            job.run.revision = revision;
            job.run.completion_time = Some(at(self.now));
        }
        // Kubernetes deletes Jobs a day after their end.
        let (now, last) = (self.now, self.status.as_ref().map(|s| s.job_name.clone()));
        self.jobs.retain(|j| {
            let ended = j.run.completion_time;
            ended.is_none_or(|t| at(now) - t < TimeDelta::days(1))
                || last.as_ref() != Some(&j.started.name)
        });
    }

    /// The time by the controller's clock.
    fn clock(&self) -> DateTime<Utc> {
        at(self.now + self.skew)
    }

    /// The controller's cache catches up with the API server.
    fn refresh(&mut self) {
        self.cached_status = self.status.clone();
        self.cached_jobs = self.jobs.clone();
        let unanswered = self.unanswered.is_some();
        let jobs = &self.jobs;
        self.unseen
            .retain(|name| unanswered && !jobs.iter().any(|j| j.started.name == *name));
    }

    /// The controller starts again without its memory.
    fn restart(&mut self) {
        self.unseen.clear();
        self.unanswered = None;
        self.recovered_at = None;
        self.refresh();
    }

    /// Reconciles once. Returns the time of the requeue.
    fn reconcile(&mut self) -> Option<DateTime<Utc>> {
        let now = self.clock();
        let by_age = |a: &&SimJob, b: &&SimJob| a.started.age().cmp(&b.started.age());
        let newest = self.cached_jobs.iter().max_by(by_age).cloned();
        let mut last = last_compaction(
            self.cached_status.as_ref(),
            newest.map(|j| (j.started, j.run)),
            &self.unseen,
            now,
        );
        let facts = self.facts();
        match self.next_job(&facts, last.as_ref(), now) {
            Err(not_due) => {
                self.write_status(last);
                not_due.again_at
            }
            Ok(start) => {
                last = Some(self.create_and_answer(start, &facts)?);
                self.write_status(last);
                None
            }
        }
    }

    fn next_job(
        &self,
        facts: &LeaseFacts,
        last: Option<&LastCompaction>,
        now: DateTime<Utc>,
    ) -> Result<ThresholdStart, NotDue> {
        if let Some(start) = &self.unanswered {
            return Ok(start.clone());
        }
        let active = self.cached_jobs.iter().find(|j| !j.started.finished);
        let running = active.map(|j| &j.started.name);
        let inputs = threshold::Inputs {
            spec: &self.policy.spec.compaction,
            is_suspended: false,
            has_etcd: self.policy.spec.etcd.is_some(),
            facts,
            last,
            running_job: running.or(self.unseen.first()).map(String::as_str),
            recovered_at: self.recovered_at,
            generation: None,
        };
        let start = threshold::decide(&inputs, now)?;
        Ok(named_job(&self.policy, start, facts))
    }

    /// Creates a Job. Returns `None` if the request or the response is lost, or the controller stops after
    /// it.
    fn create_and_answer(
        &mut self,
        start: ThresholdStart,
        facts: &LeaseFacts,
    ) -> Option<LastCompaction> {
        if !self.unseen.contains(&start.job.name) {
            self.unseen.push(start.job.name.clone());
        }
        let is_lost = self.fails(10);
        if !(is_lost && self.rng.bool()) {
            self.create(&start, facts);
        }
        if is_lost {
            // This controller or the next one retries.
            self.unanswered = Some(start);
            if self.fails(30) {
                self.restart();
            }
            return None;
        }
        self.unanswered = None;
        if self.fails(10) {
            self.restart();
            return None;
        }
        let job = self.jobs.iter().find(|j| j.started.name == start.job.name);
        Some(start.job.ran(LastRun {
            start_time: job.and_then(|j| j.started.created),
            ..LastRun::default()
        }))
    }

    fn write_status(&mut self, last: Option<LastCompaction>) {
        if self.fails(10) {
            self.restart();
        } else if last != self.cached_status {
            self.status = last;
        }
    }

    /// Creates a Job, unless there is one of that name. Asserts the rules for Jobs.
    fn create(&mut self, start: &ThresholdStart, facts: &LeaseFacts) {
        if self.jobs.iter().any(|j| j.started.name == start.job.name) {
            return;
        }
        let running = self.jobs.iter().find(|j| !j.started.finished);
        assert!(running.is_none(), "{start:?} beside {running:?}");
        let revisions = (start.job.full_revision, start.job.delta_revision);
        // Only the last Job counts: after a restore to an older revision the same revisions may come again.
        let mut jobs = self.jobs.iter();
        if let Some(last) = jobs.find(|j| Some(&j.started.name) == self.created.last()) {
            let of_last = (last.started.full_revision, last.started.delta_revision);
            let is_retry = outcome::is_unreachable(&last.run);
            assert!(of_last != revisions || is_retry, "{start:?} after {last:?}");
        }
        self.created.push(start.job.name.clone());
        if self.unanswered.is_none() {
            assert_eq!(facts.revisions(), Some(revisions));
        }
        let mut started = start.job.clone();
        started.created = Some(at(self.now));
        let run = LastRun {
            start_time: started.created,
            ..LastRun::default()
        };
        self.jobs.push(SimJob { started, run });
    }
}

#[test]
fn in_a_cluster_with_faults_jobs_run_one_at_a_time_and_every_threshold_is_acted_on() {
    let seed = crate::seed();
    let mut seeds = fastrand::Rng::with_seed(seed);
    let (mut jobs, mut failures) = (0, 0);
    let rounds = crate::rounds(60, 300);
    for _ in 0..rounds {
        let seed = seeds.u64(..);
        println!("cluster {seed}");
        let mut sim = Sim::new(seed);
        for _ in 0..400 {
            sim.advance();
            if sim.chance(70) {
                sim.refresh();
            }
            if sim.fails(2) {
                sim.restart();
            }
            sim.reconcile();
        }
        jobs += sim.jobs.len();
        failures += sim
            .jobs
            .iter()
            .filter(|j| j.run.state == RunState::Failed)
            .count();
        // Without faults, the deltas are compacted within four hours.
        (sim.has_faults, sim.is_store_up, sim.skew) = (false, true, 0);
        let before = sim.successes;
        sim.revision += THRESHOLD;
        let began = sim.now;
        while sim.successes == before {
            sim.advance();
            sim.refresh();
            sim.reconcile();
            assert!(
                sim.now - began < 4 * 3600,
                "{:?} {:?}",
                sim.status,
                sim.facts()
            );
        }
    }
    println!("{jobs} Jobs, {failures} of them failed");
    assert!(jobs * 3 > rounds * 10 && failures * 3 > rounds);
}

#[test]
fn after_an_outage_the_deltas_are_compacted_even_if_no_lease_moves() {
    let seed = crate::seed();
    for i in 0..100 {
        let mut sim = Sim::new(seed.wrapping_add(i));
        sim.has_faults = false;
        sim.is_store_up = false;
        sim.newest = sim.full + THRESHOLD;
        sim.renew();
        let mut attempts = Vec::new();
        // Only time passes, and the controller reconciles when its requeue is due.
        for round in 0..12 {
            sim.is_store_up = round == 11;
            sim.refresh();
            if let Some(again_at) = sim.reconcile() {
                sim.now += (again_at - at(sim.now)).num_seconds();
                sim.reconcile();
            }
            attempts.push(sim.now);
            sim.refresh();
            while sim.jobs.iter().any(|j| !j.started.finished) {
                sim.now += 1;
                sim.advance_jobs();
            }
            sim.refresh();
            sim.reconcile();
        }
        assert_eq!((sim.successes, sim.jobs.len()), (1, 12));
        let pauses: Vec<i64> = attempts.windows(2).map(|w| (w[1] - w[0]) / 60).collect();
        assert!(pauses[..7].is_sorted() && pauses[10] <= 61, "{pauses:?}");
    }
}
