//! Thresholds: whether a Job is to fold the deltas or take a full snapshot instead, and how the last one ended.
//!
//! Pure. When, `threshold` decides; what the Job looks like, `jobs` knows. `plan` calls it.

use super::job_limits::{Asker, Wanted};
use super::threshold::{self, Backoff, Decision};
use super::{Action, Note};
use crate::controller::api::{EtcdBackupPolicy, LastCompaction, LastRun, RunState, TaskType};
use crate::controller::jobs::{self, Settings, WorkKind};
use crate::controller::names::{is_owned, label};
use crate::controller::observe::leases::LeaseFacts;
use crate::controller::observe::outcome::{self, JOB_DELETED, POD_STATUS_DELAY};
use crate::controller::observe::threshold_jobs::{ThresholdJob, ThresholdStart, is_of_threshold};
use crate::controller::observe::{Observed, UNSEEN_JOB_LIFETIME, WATCH_DELAY};
use crate::controller::times::{later, sooner};
use chrono::{DateTime, SubsecRound, Utc};
use k8s_openapi::api::batch::v1::Job;
use kube::ResourceExt;

/// The last compaction, from what the status tells and what the newest Job does: either may be the later one. `pending`
/// are Jobs that may be there though the cache has not got them yet.
fn observe(
    old: Option<&LastCompaction>,
    newest: Option<(&ThresholdJob, LastRun)>,
    pending: &[String],
    now: DateTime<Utc>,
) -> Option<LastCompaction> {
    let is_later = |job: &ThresholdJob, old: &LastCompaction| {
        let began = old.run.start_time.map(|t| t.trunc_subsecs(0));
        job.name == old.job_name || job.created >= began
    };
    match (old, newest) {
        (old, Some((job, run))) if old.is_none_or(|old| is_later(job, old)) => {
            let known = old.filter(|o| o.job_name == job.name);
            let known = known.filter(|o| outcome::is_more_complete(&o.run, &run));
            Some(known.cloned().unwrap_or_else(|| job.ran(run)))
        }
        (Some(old), _)
            if old.run.state == RunState::Running && !pending.contains(&old.job_name) =>
        {
            let mut gone = old.clone();
            gone.failures = old.failures.saturating_add(1);
            gone.run.state = RunState::Failed;
            gone.run.reason = Some(JOB_DELETED.to_owned());
            gone.run.message = Some("the Job was deleted before its end was seen".to_owned());
            gone.run.completion_time = Some(now.trunc_subsecs(0));
            Some(gone)
        }
        (old, _) => old.cloned(),
    }
}

/// What the Jobs of a policy tell of its compactions.
#[derive(Debug, Default)]
pub struct Look {
    /// The last one.
    pub last: Option<LastCompaction>,
    /// One that runs, of a threshold or a task.
    pub running: Option<String>,
    full_snapshot_runs: Option<String>,
    /// When time alone tells more.
    pub look_again: Option<DateTime<Utc>>,
}

impl Look {
    /// At a policy.
    pub fn at(observed: &Observed, now: DateTime<Utc>) -> Look {
        let Some(policy) = observed.policy.as_deref() else {
            return Look::default();
        };
        let is_its = |job: &Job| is_of_threshold(job) && is_owned(job, policy);
        let started = observed.jobs.iter().filter(|j| is_its(j));
        let started = started.filter_map(|j| Some((ThresholdJob::read(j)?, j)));
        let newest = started.max_by(|(a, _), (b, _)| a.age().cmp(&b.age()));
        let mut look_again = None;
        let newest = newest.map(|(started, job)| {
            let mut run = outcome::last_run(job, &observed.pods_of(job));
            if !outcome::is_settled(&run, now) {
                look_again = Some(later(now, POD_STATUS_DELAY));
                run = LastRun {
                    start_time: run.start_time,
                    ..LastRun::default()
                };
            }
            (started, run)
        });
        let old = policy
            .status
            .as_ref()
            .and_then(|s| s.last_compaction.as_ref());
        let mut pending = Vec::new();
        if let Some(start) = &observed.unconfirmed_start
            && observed.job(&start.job.name).is_none()
        {
            pending.push(start.job.name.clone());
            // Should it never come, nothing else would have this looked at.
            look_again = sooner(look_again, Some(later(now, UNSEEN_JOB_LIFETIME)));
        }
        let made = old.filter(|l| l.run.state == RunState::Running);
        if let Some(young) = made.filter(|l| is_young(l.run.start_time, now))
            && observed.job(&young.job_name).is_none()
        {
            pending.push(young.job_name.clone());
            look_again = sooner(look_again, Some(later(now, WATCH_DELAY)));
        }
        let newest = newest.as_ref().map(|(started, run)| (started, run.clone()));
        let last = observe(old, newest, &pending, now);
        let active = || observed.jobs.iter().filter(|j| !outcome::is_finished(j));
        let compacts = |job: &Job| {
            is_its(job)
                || label(job, jobs::LABEL_TASK_TYPE) == Some(TaskType::OnDemandCompaction.as_str())
        };
        let takes_full =
            |job: &Job| label(job, jobs::LABEL_WORK) == Some(WorkKind::FullSnapshot.as_str());
        // One that is not in the cache yet runs all the same.
        let running = active().find(|j| compacts(j)).map(|j| j.name_any());
        Look {
            last,
            running: running.or_else(|| pending.first().cloned()),
            full_snapshot_runs: active().find(|j| takes_full(j)).map(|j| j.name_any()),
            look_again,
        }
    }

    /// The Job to start; or why there is none, and when to look again.
    pub fn start(&self, observed: &Observed, now: DateTime<Utc>) -> Result<ThresholdStart, Idle> {
        let Some(policy) = observed.policy.as_deref() else {
            return Err(("there is no policy".to_owned(), None));
        };
        let spec = &policy.spec;
        if let Some(start) = &observed.unconfirmed_start {
            // Retry with the same name: a new name could create a second Job.
            return Ok(start.clone());
        }
        let waiting = Backoff {
            running: self.running.clone(),
            recovered_at: observed.recovered_at,
        };
        let decision = threshold::decide(
            &spec.compaction,
            spec.suspend,
            spec.etcd.is_some(),
            &observed.facts,
            self.last.as_ref(),
            &waiting,
            now,
        );
        start(policy, decision, &observed.facts, self)
    }
}

/// Why nothing is started, and when to look again.
pub type Idle = (String, Option<DateTime<Utc>>);

/// Whether a Job that was made at that time may be there although no watch has told of it: lists differ.
pub(super) fn is_young(made: Option<DateTime<Utc>>, now: DateTime<Utc>) -> bool {
    made.is_some_and(|made| (now - made).abs() < WATCH_DELAY)
}

/// The Job of a decision; or why there is none, and when to look again.
fn start(
    policy: &EtcdBackupPolicy,
    decision: Decision,
    facts: &LeaseFacts,
    look: &Look,
) -> Result<ThresholdStart, Idle> {
    match decision {
        Decision::Nothing { reason, look_again } => Err((reason, look_again)),
        Decision::Start {
            trigger,
            full_snapshot,
            reason,
            attempt,
            events,
        } => {
            if let Some(job) = look.full_snapshot_runs.as_ref().filter(|_| full_snapshot) {
                return Err((format!("{reason}; the Job {job} takes one already"), None));
            }
            let (full, delta) = facts.revisions().unwrap_or_default();
            let count = u32::try_from(attempt).unwrap_or_default();
            let name = jobs::compaction_job_name(policy, full, delta, count, full_snapshot);
            let job = ThresholdJob {
                name,
                trigger: trigger.as_str().to_owned(),
                full_revision: full,
                delta_revision: delta,
                full_snapshot,
                attempt,
                created: None,
                finished: false,
            };
            Ok(ThresholdStart {
                policy_uid: policy.metadata.uid.clone(),
                job,
                reason,
                events,
            })
        }
    }
}

/// The turn that is asked for.
pub fn wanted(observed: &Observed, start: &ThresholdStart) -> Wanted {
    Wanted {
        asker: Asker::Policy(observed.key.clone()),
        job: (observed.key.0.clone(), start.job.name.clone()),
        is_restore: false,
    }
}

/// The creation of a threshold's Job.
pub fn creation(policy: &EtcdBackupPolicy, start: ThresholdStart, settings: &Settings) -> Action {
    let job = jobs::compaction_job(
        policy,
        settings,
        &start.job.name,
        start.job.full_snapshot,
        start.job.annotations(&start.reason),
    );
    let note = Note {
        warning: false,
        reason: match start.job.full_snapshot {
            true => "FullSnapshotStarted",
            false => "CompactionStarted",
        }
        .to_owned(),
        action: "Compact",
        text: format!("{}: {}", start.job.name, start.reason),
    };
    Action::CreateJob {
        job: Box::new(job),
        start: Some(start),
        note,
    }
}

/// What is told of a Job that has ended, once its end is in the status.
pub fn end(old: Option<&LastCompaction>, last: Option<&LastCompaction>) -> Option<Note> {
    let has_ended = |l: &LastCompaction| l.run.state != RunState::Running;
    let last = last.filter(|l| has_ended(l))?;
    if old.is_some_and(|o| o.job_name == last.job_name && has_ended(o)) {
        return None;
    }
    let succeeded = last.run.state == RunState::Succeeded;
    let job = &last.job_name;
    let (reason, text) = match succeeded {
        true => {
            let to = last.run.revision.map(|r| format!(" up to revision {r}"));
            (
                "CompactionSucceeded",
                format!("{job} is done{}", to.unwrap_or_default()),
            )
        }
        false => (
            "CompactionFailed",
            format!("{job} failed: {}", outcome::failure_text(&last.run)),
        ),
    };
    Some(Note {
        warning: !succeeded,
        reason: reason.to_owned(),
        action: "Compact",
        text,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::api::{EtcdBackupPolicySpec, EtcdSpec};
    use crate::controller::observe::leases::tests::{at, druid, ours};
    use crate::controller::observe::outcome::DEADLINE_EXCEEDED;
    use crate::controller::observe::threshold_jobs::is_of_task;
    use chrono::TimeDelta;
    use k8s_openapi::api::coordination::v1::Lease;

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
    fn what_a_job_was_made_for_stands_on_it() {
        let settings = Settings::new("image");
        let started = ThresholdJob {
            created: None,
            ..job("p-fullsnap-1", 0, 3, false)
        };
        let started = ThresholdJob {
            full_snapshot: true,
            ..started
        };
        let annotations = started.annotations("since it is so");
        let made = jobs::compaction_job(&policy(), &settings, &started.name, true, annotations);
        assert_eq!(ThresholdJob::read(&made), Some(started));
        assert!(is_of_threshold(&made) && !is_of_task(&made));
        // A full snapshot's of a schedule is none.
        let mut scheduled = made;
        scheduled.metadata.annotations = None;
        assert_eq!(ThresholdJob::read(&scheduled), None);
        assert!(!is_of_threshold(&scheduled));
    }

    #[test]
    fn a_lost_status_is_made_up_for_by_the_job() {
        use RunState::{Failed, Running, Succeeded};
        let first = job("a", 10, 0, true);
        let second = job("b", 20, 1, false);
        let seen = |old, newest, pending: &[String]| observe(old, newest, pending, at(99));
        // There is nothing yet; then a Job of which no status tells.
        assert_eq!(seen(None, None, &[]), None);
        let of_first = seen(None, Some((&first, run(Failed, 10))), &[]).unwrap();
        assert_eq!((of_first.job_name.as_str(), of_first.failures), ("a", 1));
        assert_eq!(
            (of_first.full_revision, of_first.delta_revision),
            (100, 200)
        );
        let of_second = seen(Some(&of_first), Some((&second, run(Running, 20))), &[]).unwrap();
        assert_eq!((of_second.job_name.as_str(), of_second.failures), ("b", 1));
        let done = seen(Some(&of_second), Some((&second, run(Succeeded, 20))), &[]).unwrap();
        assert_eq!((done.run.state, done.failures), (Succeeded, 0));
        // The Job is gone after its time: what is known stays.
        assert_eq!(seen(Some(&done), None, &[]), Some(done.clone()));
        assert_eq!(
            seen(Some(&done), Some((&first, run(Failed, 10))), &[]),
            Some(done.clone())
        );
        // It is gone before its end was seen, or is not in the cache yet.
        assert_eq!(
            seen(Some(&of_second), None, &["b".to_owned()]),
            Some(of_second.clone())
        );
        let gone = seen(Some(&of_second), Some((&first, run(Failed, 10))), &[]).unwrap();
        assert_eq!(gone.run.reason.as_deref(), Some(JOB_DELETED));
        assert_eq!((gone.job_name.as_str(), gone.failures), ("b", 2));
        // What its Pod told is not forgotten when that is gone.
        let told = LastRun {
            exit_code: Some(69),
            reason: Some("StoreUnreachable".to_owned()),
            ..run(Failed, 20)
        };
        let whole = seen(Some(&of_second), Some((&second, told)), &[]).unwrap();
        let again = seen(Some(&whole), Some((&second, run(Failed, 20))), &[]).unwrap();
        assert_eq!(again, whole);
    }

    #[derive(Debug, Clone)]
    struct SimJob {
        started: ThresholdJob,
        run: LastRun,
    }

    /// A cluster with its store, its Leases, its Jobs; and a controller that forgets, is late, or dies.
    struct Sim {
        rng: fastrand::Rng,
        policy: EtcdBackupPolicy,
        now: i64,
        skew: i64,
        revision: i64,
        full: i64,
        newest: i64,
        leases: [Lease; 2],
        ours: bool,
        up: bool,
        calm: bool,
        status: Option<LastCompaction>,
        jobs: Vec<SimJob>,
        // The controller's.
        seen_status: Option<LastCompaction>,
        seen_jobs: Vec<SimJob>,
        pending: Vec<String>,
        unanswered: Option<ThresholdStart>,
        recovered_at: Option<DateTime<Utc>>,
        successes: usize,
        made: Vec<String>,
    }

    impl Sim {
        fn new(seed: u64) -> Self {
            let mut rng = fastrand::Rng::with_seed(seed);
            let ours = rng.bool();
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
                leases: [Lease::default(), Lease::default()],
                ours,
                up: true,
                calm: false,
                status: None,
                jobs: Vec::new(),
                seen_status: None,
                seen_jobs: Vec::new(),
                pending: Vec::new(),
                unanswered: None,
                recovered_at: None,
                successes: 0,
                made: Vec::new(),
            };
            sim.renew();
            sim
        }

        fn chance(&mut self, percent: u8) -> bool {
            self.rng.u8(..100) < percent
        }

        fn fails(&mut self, percent: u8) -> bool {
            !self.calm && self.chance(percent)
        }

        /// Whoever has saved something renews the Leases, as far as that works.
        fn renew(&mut self) {
            let (full, newest) = (self.full, self.newest);
            let time = at(self.now + self.rng.i64(-3..3));
            let unix = time.timestamp();
            let of_full = format!("Full-00000000-{full:08}-{unix}");
            let last = match newest > full {
                true => format!("Incr-{:08}-{newest:08}-{unix}", full + 1),
                false => of_full.clone(),
            };
            let events = (newest - full).to_string();
            let told = [
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
            for (i, told) in told.into_iter().enumerate() {
                let revision = [full, newest][i].to_string();
                if !self.fails(10) {
                    self.leases[i] = match self.ours {
                        true => told,
                        false => druid(&revision, Some(time)),
                    };
                }
            }
        }

        fn facts(&self) -> LeaseFacts {
            LeaseFacts::read(Some(&self.leases[0]), Some(&self.leases[1]))
        }

        /// What happens without the controller.
        fn world(&mut self) {
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
                // Set back to an older snapshot.
                self.revision = (self.revision - self.rng.i64(0..300)).max(5);
                (self.full, self.newest) = (self.revision, self.revision);
                self.renew();
            }
            if self.fails(10) {
                self.up = !self.up;
                if self.up && self.rng.bool() {
                    self.recovered_at = Some(self.clock());
                }
            }
            if self.fails(2) {
                self.skew = [-40_000_000, -4000, -10, 0, 10, 4000, 40_000_000][self.rng.usize(..7)];
            }
            self.jobs_go_on();
        }

        fn jobs_go_on(&mut self) {
            for i in 0..self.jobs.len() {
                if self.jobs[i].run.state != RunState::Running || !self.chance(30) {
                    continue;
                }
                let name = self.jobs[i].started.name.clone();
                let is_pending = self.pending.contains(&name) || self.unanswered.is_some();
                if self.fails(3) && !is_pending {
                    self.jobs.remove(i);
                    return;
                }
                let (code, reason) = match self.rng.u8(..100) {
                    _ if !self.up => (Some(69), Some("StoreUnreachable")),
                    0..70 => (Some(0), None),
                    _ if self.calm => (Some(0), None),
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
            // Kubernetes deletes what has ended, a day later.
            let (now, seen) = (self.now, self.status.as_ref().map(|s| s.job_name.clone()));
            self.jobs.retain(|j| {
                let ended = j.run.completion_time;
                ended.is_none_or(|t| at(now) - t < TimeDelta::days(1))
                    || seen.as_ref() != Some(&j.started.name)
            });
        }

        fn clock(&self) -> DateTime<Utc> {
            at(self.now + self.skew)
        }

        fn refresh(&mut self) {
            self.seen_status = self.status.clone();
            self.seen_jobs = self.jobs.clone();
            let unanswered = self.unanswered.is_some();
            let jobs = &self.jobs;
            self.pending
                .retain(|p| unanswered && !jobs.iter().any(|j| j.started.name == *p));
        }

        fn restart(&mut self) {
            self.pending.clear();
            self.unanswered = None;
            self.recovered_at = None;
            self.refresh();
        }

        /// One run of the reconciler; gives when it wants to look again.
        fn reconcile(&mut self) -> Option<DateTime<Utc>> {
            let now = self.clock();
            let newest = self.seen_jobs.iter();
            let newest = newest
                .max_by(|a, b| a.started.age().cmp(&b.started.age()))
                .cloned();
            let mut last = observe(
                self.seen_status.as_ref(),
                newest.as_ref().map(|j| (&j.started, j.run.clone())),
                &self.pending,
                now,
            );
            let active = self.seen_jobs.iter().find(|j| !j.started.finished);
            let running = active.map(|j| j.started.name.clone());
            let facts = self.facts();
            let waiting = Backoff {
                running: running.or(self.pending.first().cloned()),
                recovered_at: self.recovered_at,
            };
            let look = Look::default();
            let decided = match self.unanswered.clone() {
                Some(start) => Ok(start),
                None => {
                    let decision = threshold::decide(
                        &self.policy.spec.compaction,
                        false,
                        self.policy.spec.etcd.is_some(),
                        &facts,
                        last.as_ref(),
                        &waiting,
                        now,
                    );
                    start(&self.policy, decision, &facts, &look)
                }
            };
            let mut again = None;
            match decided {
                Err((_, look_again)) => again = look_again,
                Ok(start) => {
                    if !self.pending.contains(&start.job.name) {
                        self.pending.push(start.job.name.clone());
                    }
                    let lost = self.fails(10);
                    if !(lost && self.rng.bool()) {
                        self.create(&start, &facts);
                    }
                    if lost {
                        // No answer: it is tried again, by this controller or the next one.
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
                    let made = self.jobs.iter().find(|j| j.started.name == start.job.name);
                    last = Some(start.job.ran(LastRun {
                        start_time: made.and_then(|j| j.started.created),
                        ..LastRun::default()
                    }));
                }
            }
            if self.fails(10) {
                self.restart();
            } else if last != self.seen_status {
                self.status = last;
            }
            again
        }

        fn create(&mut self, start: &ThresholdStart, facts: &LeaseFacts) {
            if self.jobs.iter().any(|j| j.started.name == start.job.name) {
                return;
            }
            let running = self.jobs.iter().find(|j| !j.started.finished);
            assert!(running.is_none(), "{start:?} beside {running:?}");
            let of_status = (start.job.full_revision, start.job.delta_revision);
            // A status may come again after others, where a cluster is set back: the last Job's is meant.
            let last = self
                .jobs
                .iter()
                .find(|j| Some(&j.started.name) == self.made.last());
            if let Some(last) = last {
                let status = (last.started.full_revision, last.started.delta_revision);
                let may_again = outcome::is_unreachable(&last.run);
                assert!(status != of_status || may_again, "{start:?} after {last:?}");
            }
            self.made.push(start.job.name.clone());
            if self.unanswered.is_none() {
                assert_eq!(facts.revisions(), Some(of_status));
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
    fn whatever_happens_jobs_come_one_at_a_time_and_every_crossing_is_acted_on() {
        let seed = crate::seed();
        let mut seeds = fastrand::Rng::with_seed(seed);
        let (mut jobs, mut failures) = (0, 0);
        let rounds = crate::rounds(60, 300);
        for _ in 0..rounds {
            let seed = seeds.u64(..);
            println!("world {seed}");
            let mut sim = Sim::new(seed);
            for _ in 0..400 {
                sim.world();
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
            // All is well again, and goes on: what has accumulated is folded before long.
            (sim.calm, sim.up, sim.skew) = (true, true, 0);
            let before = sim.successes;
            sim.revision += THRESHOLD;
            let began = sim.now;
            while sim.successes == before {
                sim.world();
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
        println!("{jobs} Jobs at their ends, {failures} had failed");
        assert!(jobs * 3 > rounds * 10 && failures * 3 > rounds);
    }

    #[test]
    fn what_did_not_answer_is_folded_when_it_does_though_nothing_moves() {
        let seed = crate::seed();
        for i in 0..100 {
            let mut sim = Sim::new(seed.wrapping_add(i));
            sim.calm = true;
            sim.up = false;
            sim.newest = sim.full + THRESHOLD;
            sim.renew();
            let mut attempts = Vec::new();
            // Only time goes on, and the controller looks when it wanted to.
            for round in 0..12 {
                sim.up = round == 11;
                sim.refresh();
                if let Some(again) = sim.reconcile() {
                    sim.now += (again - at(sim.now)).num_seconds();
                    sim.reconcile();
                }
                attempts.push(sim.now);
                sim.refresh();
                while sim.jobs.iter().any(|j| !j.started.finished) {
                    sim.now += 1;
                    sim.jobs_go_on();
                }
                sim.refresh();
                sim.reconcile();
            }
            assert_eq!((sim.successes, sim.jobs.len()), (1, 12));
            let pauses: Vec<i64> = attempts.windows(2).map(|w| (w[1] - w[0]) / 60).collect();
            assert!(pauses[..7].is_sorted() && pauses[10] <= 61, "{pauses:?}");
        }
    }
}
