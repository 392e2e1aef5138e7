//! The limits and the order of slots, by examples and with random requests.

use super::*;
use crate::controller::observe::leases::tests::at;
use std::collections::BTreeSet;

fn key(name: &str) -> Key {
    ("ns".to_owned(), name.to_owned())
}

/// Jobs with the policy of each.
type Jobs = Vec<(Key, CountedJob)>;

fn counted(job: &str, policy: &str, finished: bool) -> (Key, CountedJob) {
    let counted = CountedJob {
        job: key(job),
        finished,
        is_restore: false,
        created: Some(at(0)),
    };
    (key(policy), counted)
}

impl JobLimiter {
    /// Replaces all Jobs of all policies.
    fn set_all_jobs(
        &mut self,
        jobs: impl IntoIterator<Item = (Key, CountedJob)>,
        now: DateTime<Utc>,
    ) {
        let mut by_policy: BTreeMap<Key, Vec<CountedJob>> = BTreeMap::new();
        for policy in self.running.keys() {
            by_policy.insert(policy.clone(), Vec::new());
        }
        for (policy, job) in jobs {
            by_policy.entry(policy).or_default().push(job);
        }
        for (policy, jobs) in by_policy {
            self.set_jobs(&policy, &jobs, now);
        }
    }

    /// Requests a slot for a Job of a threshold.
    fn request_job(&mut self, policy: &Key, job: &str, now: DateTime<Utc>) -> SlotDecision {
        self.request_for(policy, job, false, now)
    }

    fn request_restore(&mut self, policy: &Key, job: &str, now: DateTime<Utc>) -> SlotDecision {
        self.request_for(policy, job, true, now)
    }

    fn request_for(
        &mut self,
        policy: &Key,
        job: &str,
        is_restore: bool,
        now: DateTime<Utc>,
    ) -> SlotDecision {
        let request = SlotRequest {
            requester: Requester::Policy(policy.clone()),
            job: (policy.0.clone(), job.to_owned()),
            is_restore,
        };
        let job = request.job.clone();
        self.request(policy, &[request], now).remove(&job).unwrap()
    }
}

/// Asserts that a Job has to wait. Returns the freeze that is to be reported.
fn waits(decision: &SlotDecision) -> Option<Freeze> {
    match decision {
        SlotDecision::Wait { freeze, .. } => freeze.clone(),
        SlotDecision::Granted => panic!("the Job was granted a slot"),
    }
}

#[test]
fn no_more_jobs_are_granted_than_the_cap_allows() {
    let mut limiter = JobLimiter::new(2, 0);
    assert_eq!(
        limiter.request_job(&key("a"), "ja", at(0)),
        SlotDecision::Granted
    );
    // A second request for the same Job gets no second slot.
    assert_eq!(
        limiter.request_job(&key("a"), "ja", at(0)),
        SlotDecision::Granted
    );
    assert_eq!(
        limiter.request_job(&key("b"), "jb", at(0)),
        SlotDecision::Granted
    );
    assert_eq!(waits(&limiter.request_job(&key("c"), "jc", at(1))), None);
    assert_eq!(limiter.call_next(at(2)), []);
    limiter.set_all_jobs(
        [counted("ja", "a", false), counted("jb", "b", false)],
        at(3),
    );
    assert_eq!(
        (limiter.used_in_all().total(), limiter.call_next(at(3))),
        (2, vec![])
    );
    limiter.set_all_jobs([counted("ja", "a", true), counted("jb", "b", false)], at(4));
    assert_eq!(limiter.call_next(at(4)), [key("c")]);
    // It is called once, and no other policy gets ahead of it.
    assert_eq!(limiter.call_next(at(5)), []);
    waits(&limiter.request_job(&key("d"), "jd", at(5)));
    assert_eq!(
        limiter.request_job(&key("c"), "jc", at(6)),
        SlotDecision::Granted
    );
    waits(&limiter.request_job(&key("d"), "jd", at(6)));
    // A slot is released if the Job could not be created, and expires if the Job never appears.
    limiter.release(&key("jc"), at(7));
    assert_eq!(limiter.call_next(at(7)), [key("d")]);
    assert_eq!(
        limiter.request_job(&key("d"), "jd", at(8)),
        SlotDecision::Granted
    );
    limiter.set_all_jobs([counted("jb", "b", false)], at(9));
    assert_eq!(limiter.used_in_all().total(), 2);
    limiter.set_all_jobs([counted("jb", "b", false)], at(8 + 120));
    assert_eq!(limiter.used_in_all().total(), 1);
    limiter.forget_policy(&key("b"), at(130));
    assert_eq!((limiter.used_in_all().total(), limiter.used.len()), (0, 0));
}

#[test]
fn without_a_cap_all_jobs_are_granted() {
    let mut limiter = JobLimiter::new(0, 0);
    limiter.set_jobs(&("elsewhere".to_owned(), "p".to_owned()), &[], at(0));
    for i in 0..100 {
        let decision = limiter.request_job(&key("a"), &i.to_string(), at(0));
        assert_eq!(decision, SlotDecision::Granted);
    }
}

#[test]
fn policies_take_turns() {
    let mut limiter = JobLimiter::new(1, 0);
    assert_eq!(
        limiter.request_job(&key("a"), "a0", at(0)),
        SlotDecision::Granted
    );
    for policy in ["a", "b", "c"] {
        waits(&limiter.request_job(&key(policy), &format!("{policy}1"), at(1)));
    }
    let mut order = Vec::new();
    for second in 2..8 {
        let now = at(second * 200);
        limiter.set_all_jobs([], now);
        let next = limiter.call_next(now);
        assert_eq!(next.len(), 1);
        let job = format!("{}{second}", next[0].1);
        assert_eq!(
            limiter.request_job(&next[0], &job, now),
            SlotDecision::Granted
        );
        order.push(next[0].1.clone());
        waits(&limiter.request_job(&next[0], "again", now));
    }
    assert_eq!(order, ["b", "c", "a", "b", "c", "a"]);
}

#[test]
fn a_namespace_has_half_of_the_slots_and_restores_go_first() {
    let mut limiter = JobLimiter::new(4, 0);
    let of = |namespace: &str, name: &str| (namespace.to_owned(), name.to_owned());
    for namespace in ["small", "large"] {
        limiter.set_jobs(&of(namespace, "p"), &[], at(0));
    }
    for (i, policy) in ["1", "2"].iter().enumerate() {
        let decision = limiter.request_job(&of("large", policy), &format!("l{i}"), at(0));
        assert_eq!(decision, SlotDecision::Granted);
    }
    // Half of the slots, even if others are free.
    waits(&limiter.request_job(&of("large", "3"), "l3", at(0)));
    assert_eq!(
        limiter.request_job(&of("small", "s"), "s1", at(1)),
        SlotDecision::Granted
    );
    assert_eq!(
        limiter.request_job(&of("third", "t"), "t1", at(1)),
        SlotDecision::Granted
    );
    waits(&limiter.request_job(&of("third", "u"), "u1", at(1)));
    // A slot beyond the cap for restores alone, even in a namespace that has used up its half.
    let restore = limiter.request_restore(&of("large", "r"), "r1", at(2));
    assert_eq!(restore, SlotDecision::Granted);
    waits(&limiter.request_restore(&of("third", "r"), "r2", at(2)));
    // The next free slot goes to the restore.
    limiter.release(&of("small", "s1"), at(3));
    assert_eq!(limiter.call_next(at(3)), [of("third", "r")]);
    // A single namespace may use all slots.
    let mut limiter = JobLimiter::new(4, 0);
    for i in 0..4 {
        let decision = limiter.request_job(&key(&i.to_string()), &i.to_string(), at(0));
        assert_eq!(decision, SlotDecision::Granted);
    }
    // A given limit for each namespace replaces the half.
    let mut limiter = JobLimiter::new(4, 1);
    assert_eq!(
        limiter.request_job(&key("1"), "1", at(0)),
        SlotDecision::Granted
    );
    waits(&limiter.request_job(&key("2"), "2", at(0)));
}

#[test]
fn jobs_that_users_create_take_no_slots_of_other_namespaces() {
    let mut limiter = JobLimiter::new(4, 0);
    let of = |namespace: &str, name: &str| (namespace.to_owned(), name.to_owned());
    limiter.set_jobs(&of("fine", "p"), &[], at(0));
    for policy in 0..20 {
        let (_, job) = counted("job", "p", false);
        let jobs: Vec<CountedJob> = (0..20)
            .map(|i| CountedJob {
                job: of("forger", &i.to_string()),
                ..job.clone()
            })
            .collect();
        limiter.set_jobs(&of("forger", &policy.to_string()), &jobs, at(0));
    }
    assert_eq!(limiter.used_in_all().total(), 2);
    waits(&limiter.request_job(&of("forger", "x"), "x", at(1)));
    assert_eq!(
        limiter.request_job(&of("fine", "p"), "1", at(1)),
        SlotDecision::Granted
    );
    assert_eq!(
        limiter.request_job(&of("fine", "q"), "2", at(1)),
        SlotDecision::Granted
    );
}

#[test]
fn a_waiter_that_misses_its_call_is_skipped() {
    let mut limiter = JobLimiter::new(1, 0);
    limiter.set_all_jobs([counted("x", "x", false)], at(0));
    waits(&limiter.request_job(&key("a"), "a", at(0)));
    waits(&limiter.request_job(&key("b"), "b", at(0)));
    limiter.set_all_jobs([], at(10));
    assert_eq!(limiter.call_next(at(10)), [key("a")]);
    waits(&limiter.request_job(&key("b"), "b", at(11)));
    assert_eq!(limiter.call_next(at(69)), []);
    assert_eq!(limiter.call_next(at(70)), [key("b")]);
    // A policy that needs no slot any more gives up its turn.
    limiter.request(&key("b"), &[], at(70));
    assert_eq!(
        limiter.request_job(&key("c"), "c", at(71)),
        SlotDecision::Granted
    );
}

#[test]
fn a_freeze_holds_until_a_slot_is_free_and_is_reported_once() {
    let mut limiter = JobLimiter::new(10, 0);
    let jobs = |n: usize| -> Jobs {
        (0..n)
            .map(|i| counted("job", &format!("other{i}"), false))
            .collect()
    };
    limiter.set_all_jobs(jobs(12), at(0));
    let freeze = waits(&limiter.request_job(&key("a"), "a", at(0)));
    let expected = Freeze {
        active: 12,
        cap: 10,
        until: 9,
    };
    assert_eq!(freeze, Some(expected));
    assert_eq!(waits(&limiter.request_job(&key("b"), "b", at(0))), None);
    limiter.set_all_jobs(jobs(10), at(1));
    assert_eq!(limiter.call_next(at(1)), []);
    assert_eq!(waits(&limiter.request_job(&key("a"), "a", at(1))), None);
    limiter.set_all_jobs(jobs(9), at(2));
    assert_eq!(limiter.call_next(at(2)), [key("a")]);
    // The next freeze is reported again.
    limiter.set_all_jobs(jobs(11), at(3));
    assert!(waits(&limiter.request_job(&key("a"), "a", at(3))).is_some());
    // A freeze does not hold up restores.
    let mut limiter = JobLimiter::new(1, 0);
    limiter.set_all_jobs(jobs(2), at(0));
    assert!(waits(&limiter.request_job(&key("a"), "a", at(0))).is_some());
    let restore = limiter.request_restore(&key("r"), "r", at(0));
    assert_eq!(restore, SlotDecision::Granted);
    limiter.release(&key("r"), at(1));
    limiter.set_all_jobs(jobs(1), at(1));
    assert_eq!(limiter.call_next(at(1)), []);
    // With a cap of one the freeze ends when no Job is left.
    limiter.set_all_jobs(jobs(0), at(2));
    assert_eq!(limiter.call_next(at(2)), [key("a")]);
}

#[test]
fn a_new_controller_knows_the_order_of_policies() {
    let mut limiter = JobLimiter::new(1, 0);
    let job = |job: &str, policy: &str, created: i64| {
        let (policy, mut job) = counted(job, policy, true);
        job.created = Some(at(created));
        (policy, job)
    };
    let ended = [job("1", "a", 10), job("2", "b", 5), job("3", "a", 1)];
    limiter.set_all_jobs(ended.into_iter().chain([counted("4", "c", false)]), at(20));
    waits(&limiter.request_job(&key("a"), "a", at(20)));
    waits(&limiter.request_job(&key("b"), "b", at(21)));
    limiter.set_all_jobs([job("1", "a", 10), job("2", "b", 5)], at(22));
    assert_eq!(limiter.call_next(at(22)), [key("b")]);
}

#[test]
fn with_random_requests_the_cap_holds_and_every_policy_gets_its_share() {
    let seed = crate::seed();
    let mut rng = fastrand::Rng::with_seed(seed);
    for _ in 0..crate::rounds(10, 50) {
        let cap = rng.usize(1..6);
        let mut limiter = JobLimiter::new(cap, 0);
        let names: Vec<String> = (0..8).map(|i| format!("p{i}")).collect();
        let mut due: BTreeSet<usize> = BTreeSet::new();
        let mut jobs: Jobs = Vec::new();
        let mut granted = [0; 8];
        let mut has_foreign_jobs = false;
        let mut now = 0;
        for step in 0..2000 {
            now += rng.i64(0..20);
            if rng.u8(..) < 3 {
                // The controller starts again.
                limiter = JobLimiter::new(cap, 0);
            }
            if rng.u8(..) < 2 {
                let policy = format!("foreign{step}");
                jobs.push(counted(&policy, &policy, false));
                has_foreign_jobs = true;
            }
            let i = rng.usize(..8);
            // A policy has one Job at a time.
            if jobs.iter().all(|(policy, _)| *policy != key(&names[i])) {
                due.insert(i);
            }
            let mut requesters = vec![key(&names[i])];
            if !jobs.is_empty() && rng.bool() {
                jobs.swap_remove(rng.usize(..jobs.len()));
            }
            limiter.set_all_jobs(jobs.iter().cloned(), at(now));
            requesters.extend(limiter.call_next(at(now)));
            // All policies are reconciled after a start of the controller.
            requesters.extend(due.iter().map(|&i| key(&names[i])));
            for policy in requesters {
                let i = names.iter().position(|n| *n == policy.1).unwrap();
                if !due.contains(&i) {
                    limiter.request(&policy, &[], at(now));
                    continue;
                }
                let job = format!("{}-{}", names[i], granted[i]);
                if limiter.request_job(&policy, &job, at(now)) == SlotDecision::Granted {
                    due.remove(&i);
                    granted[i] += 1;
                    jobs.push(counted(&job, &names[i], false));
                }
            }
            has_foreign_jobs &= jobs.len() > cap;
            assert!(
                has_foreign_jobs || jobs.len() <= cap,
                "{} of {cap}",
                jobs.len()
            );
        }
        let (least, most) = (granted.iter().min().unwrap(), granted.iter().max().unwrap());
        assert!(*least > 10 && *most < 4 * *least, "{granted:?}");
    }
}
