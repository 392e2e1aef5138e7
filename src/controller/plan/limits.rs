//! How many Jobs of thresholds and tasks there may be at once, over all policies, and whose turn it is.
//!
//! In memory alone: what counts is told anew from the cache of Jobs, so a controller that starts knows as much as
//! the one before it. Pure, with the time given; `compaction` and `task` ask before they create a Job.

use chrono::{DateTime, TimeDelta, Utc};
use std::collections::{BTreeMap, BTreeSet};

/// A Job that was granted and is in no cache after that time was never made.
pub(super) const GRANT_LASTS: TimeDelta = TimeDelta::minutes(2);
/// Who was called and does not ask by then has no use for it any more.
const CALL_LASTS: TimeDelta = TimeDelta::minutes(1);

/// A namespace and a name.
pub type Key = (String, String);

/// What a Job is made for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Asker {
    /// A policy whose threshold is crossed.
    Policy(Key),
    /// A task, and the policy that it is for.
    Task {
        /// The task.
        task: Key,
        /// Its policy: tasks and thresholds of one take turns with those of others.
        policy: Key,
    },
}

impl Asker {
    fn policy(&self) -> &Key {
        match self {
            Asker::Policy(policy) | Asker::Task { policy, .. } => policy,
        }
    }
}

/// A Job that counts, as the cache has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// The Job.
    pub job: Key,
    /// Its policy.
    pub policy: Key,
    /// Whether it has ended.
    pub finished: bool,
    /// When it was created.
    pub created: Option<DateTime<Utc>>,
}

/// What to tell people, once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Freeze {
    /// How many Jobs there are.
    pub active: usize,
    /// How many there may be.
    pub cap: usize,
    /// Down to how many they have to fall.
    pub until: usize,
}

/// Whether a Job may be created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// At once; it counts from now on.
    Granted,
    /// Not now: the asker is called when its turn has come.
    Wait {
        /// Why.
        reason: String,
        /// There are more than there may be, which was not told yet.
        freeze: Option<Freeze>,
    },
}

#[derive(Debug, Clone)]
struct Waiting {
    asker: Asker,
    since: u64,
    called: Option<DateTime<Utc>>,
}

#[derive(Debug, Clone)]
struct Grant {
    asker: Asker,
    at: DateTime<Utc>,
}

impl Grant {
    fn is_valid(&self, now: DateTime<Utc>) -> bool {
        (now - self.at).abs() < GRANT_LASTS
    }
}

/// The cap and those who wait for it.
///
/// Turns are fair: the policy that was granted a Job longest ago is next, and what waits for one policy goes first
/// in, first out. Where there are more Jobs than the cap, since somebody else made some, nothing is granted until
/// no more than nine tenths of it are left, and at least one is free: so it does not go on at the brink.
#[derive(Debug, Default)]
pub struct Admission {
    cap: usize,
    active: BTreeSet<Key>,
    granted: BTreeMap<Key, Grant>,
    waiting: Vec<Waiting>,
    /// When a policy was granted a Job last: a clock would not tell two of one second apart.
    last_grant: BTreeMap<Key, (DateTime<Utc>, u64)>,
    count: u64,
    frozen: bool,
    told: bool,
}

impl Admission {
    /// So many at once; 0 for any number.
    pub fn new(cap: usize) -> Self {
        Admission {
            cap,
            ..Admission::default()
        }
    }

    /// Takes note of all Jobs that count.
    pub fn observe(&mut self, jobs: impl IntoIterator<Item = Seen>, now: DateTime<Utc>) {
        self.active.clear();
        let mut policies = BTreeSet::new();
        for seen in jobs {
            self.granted.remove(&seen.job);
            if let Some(created) = seen.created {
                let last = self.last_grant.entry(seen.policy.clone()).or_default();
                *last = (*last).max((created.min(now), 0));
            }
            policies.insert(seen.policy);
            if !seen.finished {
                self.active.insert(seen.job);
            }
        }
        self.granted.retain(|_, g| (now - g.at).abs() < GRANT_LASTS);
        // A policy without Jobs that is not about to have one is as one that never had any.
        let (granted, waiting) = (&self.granted, &self.waiting);
        self.last_grant.retain(|policy, _| {
            policies.contains(policy)
                || granted.values().any(|g| g.asker.policy() == policy)
                || waiting.iter().any(|w| w.asker.policy() == policy)
        });
        self.settle();
    }

    /// Whether there is nothing that a change of the Jobs could matter to.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.granted.is_empty()
    }

    /// The Jobs of a policy that were granted and are not in the cache yet, and for whom: they may be there.
    pub fn pending(
        &self,
        policy: &Key,
        now: DateTime<Utc>,
    ) -> impl Iterator<Item = (&Key, &Asker)> {
        let granted = self.granted.iter();
        granted
            .filter(move |(_, g)| g.asker.policy() == policy && g.is_valid(now))
            .map(|(job, g)| (job, &g.asker))
    }

    /// How many count now: those that run, and those that are about to be made.
    pub fn active(&self) -> usize {
        self.active.len() + self.granted.len()
    }

    fn settle(&mut self) {
        if self.cap == 0 {
            return;
        }
        if self.active() > self.cap {
            self.frozen = true;
        } else if self.frozen && self.active() <= self.thawed_at() {
            self.frozen = false;
            self.told = false;
        }
    }

    fn thawed_at(&self) -> usize {
        self.cap - (self.cap / 10).max(1)
    }

    fn free(&self) -> usize {
        match (self.cap, self.frozen) {
            (0, _) => usize::MAX,
            (_, true) => 0,
            (cap, false) => cap.saturating_sub(self.active()),
        }
    }

    /// Asks for a Job of this name. What was granted counts until the Job is in the cache, or is given back.
    pub fn ask(&mut self, asker: &Asker, job: &Key, now: DateTime<Utc>) -> Answer {
        // It is there, or granted: then it is no other one that counts.
        if self.active.contains(job) || self.granted.contains_key(job) {
            self.withdraw(asker);
            return Answer::Granted;
        }
        if !self.waiting.iter().any(|w| w.asker == *asker) {
            self.count += 1;
            self.waiting.push(Waiting {
                asker: asker.clone(),
                since: self.count,
                called: None,
            });
        }
        self.forget(asker, now);
        let turn = self.turns().iter().position(|a| a == asker);
        let turn = turn.unwrap_or(usize::MAX);
        if turn < self.free() {
            self.withdraw(asker);
            self.count += 1;
            let policy = asker.policy().clone();
            self.last_grant.insert(policy, (now, self.count));
            let asker = asker.clone();
            self.granted.insert(job.clone(), Grant { asker, at: now });
            return Answer::Granted;
        }
        let (active, cap) = (self.active(), self.cap);
        let freeze = (self.frozen && !self.told).then(|| Freeze {
            active,
            cap,
            until: self.thawed_at(),
        });
        self.told |= freeze.is_some();
        let reason = match self.frozen {
            true => format!(
                "{active} Jobs run, and no more than {cap} may: none is started until there are {} or fewer",
                self.thawed_at()
            ),
            false if active >= cap => {
                format!("{active} Jobs run, and no more than {cap} may at once")
            }
            false => format!(
                "{turn} others that wait are first, and {} of {cap} Jobs are free",
                cap - active
            ),
        };
        Answer::Wait { reason, freeze }
    }

    /// The asker needs no Job any more. Whether it had waited: then it may be another one's turn.
    pub fn withdraw(&mut self, asker: &Asker) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|w| w.asker != *asker);
        self.waiting.len() < before
    }

    /// Forgets those who wait and are no more.
    pub fn keep(&mut self, exists: impl Fn(&Asker) -> bool) {
        self.waiting.retain(|w| exists(&w.asker));
    }

    /// A Job that was granted could not be made.
    pub fn give_back(&mut self, job: &Key) {
        self.granted.remove(job);
        self.settle();
    }

    /// Those whose turn has come: they are to ask again. Nobody is called twice within a minute.
    pub fn next(&mut self, now: DateTime<Utc>) -> Vec<Asker> {
        self.waiting.retain(|w| !is_over(w.called, now));
        let turns = self.turns();
        let due: Vec<Asker> = turns.into_iter().take(self.free()).collect();
        let mut called = Vec::new();
        for waiting in &mut self.waiting {
            if due.contains(&waiting.asker) && waiting.called.is_none() {
                waiting.called = Some(now);
                called.push(waiting.asker.clone());
            }
        }
        called
    }

    /// Forgets those who were called and did not ask, but for the one who does.
    fn forget(&mut self, asker: &Asker, now: DateTime<Utc>) {
        self.waiting
            .retain(|w| w.asker == *asker || !is_over(w.called, now));
        let asks = self.waiting.iter_mut().find(|w| w.asker == *asker);
        if let Some(asks) = asks {
            asks.called = None;
        }
    }

    /// All who wait, in the order of their turns.
    fn turns(&self) -> Vec<Asker> {
        let mut queues: BTreeMap<&Key, Vec<&Waiting>> = BTreeMap::new();
        for waiting in &self.waiting {
            queues
                .entry(waiting.asker.policy())
                .or_default()
                .push(waiting);
        }
        for queue in queues.values_mut() {
            queue.sort_by_key(|w| std::cmp::Reverse(w.since));
        }
        let mut last: BTreeMap<&Key, (DateTime<Utc>, u64)> = self
            .last_grant
            .iter()
            .map(|(policy, last)| (policy, *last))
            .collect();
        let mut turns = Vec::new();
        while let Some((&policy, _)) = queues.iter().min_by_key(|(policy, queue)| {
            let granted = last.get(*policy).copied();
            (granted, queue.last().map(|w| w.since))
        }) {
            let Some(queue) = queues.get_mut(policy) else {
                break;
            };
            turns.extend(queue.pop().map(|w| w.asker.clone()));
            last.insert(policy, (DateTime::<Utc>::MAX_UTC, turns.len() as u64));
            if queue.is_empty() {
                queues.remove(policy);
            }
        }
        turns
    }
}

/// Whether who was called then has not asked for too long.
fn is_over(called: Option<DateTime<Utc>>, now: DateTime<Utc>) -> bool {
    called.is_some_and(|at| now - at >= CALL_LASTS || at > now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::observe::leases::tests::at;

    fn key(name: &str) -> Key {
        ("ns".to_owned(), name.to_owned())
    }

    fn policy(name: &str) -> Asker {
        Asker::Policy(key(name))
    }

    fn task(name: &str, policy: &str) -> Asker {
        Asker::Task {
            task: key(name),
            policy: key(policy),
        }
    }

    fn seen(job: &str, policy: &str, finished: bool) -> Seen {
        Seen {
            job: key(job),
            policy: key(policy),
            finished,
            created: Some(at(0)),
        }
    }

    fn waits(answer: &Answer) -> Option<Freeze> {
        match answer {
            Answer::Wait { freeze, .. } => freeze.clone(),
            Answer::Granted => panic!("it was granted"),
        }
    }

    #[test]
    fn no_more_are_granted_than_may_be() {
        let mut a = Admission::new(2);
        assert_eq!(a.ask(&policy("a"), &key("ja"), at(0)), Answer::Granted);
        // The same once more is the same Job.
        assert_eq!(a.ask(&policy("a"), &key("ja"), at(0)), Answer::Granted);
        assert_eq!(a.ask(&policy("b"), &key("jb"), at(0)), Answer::Granted);
        assert_eq!(waits(&a.ask(&policy("c"), &key("jc"), at(1))), None);
        assert_eq!(a.next(at(2)), []);
        a.observe([seen("ja", "a", false), seen("jb", "b", false)], at(3));
        assert_eq!((a.active(), a.next(at(3))), (2, vec![]));
        a.observe([seen("ja", "a", true), seen("jb", "b", false)], at(4));
        assert_eq!(a.next(at(4)), [policy("c")]);
        // It is called once, and another one does not get ahead of it.
        assert_eq!(a.next(at(5)), []);
        waits(&a.ask(&policy("d"), &key("jd"), at(5)));
        assert_eq!(a.ask(&policy("c"), &key("jc"), at(6)), Answer::Granted);
        waits(&a.ask(&policy("d"), &key("jd"), at(6)));
        // What could not be made is given back; what never came is forgotten.
        a.give_back(&key("jc"));
        assert_eq!(a.next(at(7)), [policy("d")]);
        assert_eq!(a.ask(&policy("d"), &key("jd"), at(8)), Answer::Granted);
        a.observe([seen("jb", "b", false)], at(9));
        assert_eq!(a.active(), 2);
        a.observe([seen("jb", "b", false)], at(8 + 120));
        assert_eq!(a.active(), 1);
    }

    #[test]
    fn without_a_cap_all_go() {
        let mut a = Admission::new(0);
        for i in 0..100 {
            assert_eq!(
                a.ask(&policy("a"), &key(&i.to_string()), at(0)),
                Answer::Granted
            );
        }
    }

    #[test]
    fn policies_take_turns_and_a_policys_own_go_in_their_order() {
        let mut a = Admission::new(1);
        assert_eq!(a.ask(&task("t0", "a"), &key("t0"), at(0)), Answer::Granted);
        for (name, of) in [
            ("t1", "a"),
            ("t2", "a"),
            ("t3", "b"),
            ("t4", "a"),
            ("t5", "b"),
        ] {
            waits(&a.ask(&task(name, of), &key(name), at(1)));
        }
        waits(&a.ask(&policy("c"), &key("c"), at(1)));
        let mut order = Vec::new();
        for second in 2..8 {
            a.observe([], at(second * 200));
            let next = a.next(at(second * 200));
            assert_eq!(next.len(), 1);
            let name = match &next[0] {
                Asker::Policy(key) | Asker::Task { task: key, .. } => key.1.clone(),
            };
            assert_eq!(
                a.ask(&next[0], &key(&name), at(second * 200)),
                Answer::Granted
            );
            order.push(name);
        }
        assert_eq!(order, ["t3", "c", "t1", "t5", "t2", "t4"]);
    }

    #[test]
    fn who_was_called_and_does_not_come_is_passed_over() {
        let mut a = Admission::new(1);
        a.observe([seen("x", "x", false)], at(0));
        waits(&a.ask(&policy("a"), &key("a"), at(0)));
        waits(&a.ask(&policy("b"), &key("b"), at(0)));
        a.observe([], at(10));
        assert_eq!(a.next(at(10)), [policy("a")]);
        waits(&a.ask(&policy("b"), &key("b"), at(11)));
        assert_eq!(a.next(at(69)), []);
        assert_eq!(a.next(at(70)), [policy("b")]);
        // One that needs none any more says so.
        a.withdraw(&policy("b"));
        assert_eq!(a.ask(&policy("c"), &key("c"), at(71)), Answer::Granted);
    }

    #[test]
    fn too_many_freeze_it_and_that_is_told_once() {
        let mut a = Admission::new(10);
        let jobs = |n: usize| (0..n).map(|i| seen(&i.to_string(), "other", false));
        a.observe(jobs(12), at(0));
        let freeze = waits(&a.ask(&policy("a"), &key("a"), at(0)));
        assert_eq!(
            freeze,
            Some(Freeze {
                active: 12,
                cap: 10,
                until: 9
            })
        );
        assert_eq!(waits(&a.ask(&policy("b"), &key("b"), at(0))), None);
        a.observe(jobs(10), at(1));
        assert_eq!(a.next(at(1)), []);
        assert_eq!(waits(&a.ask(&policy("a"), &key("a"), at(1))), None);
        a.observe(jobs(9), at(2));
        assert_eq!(a.next(at(2)), [policy("a")]);
        // The next freeze is told again.
        a.observe(jobs(11), at(3));
        assert!(waits(&a.ask(&policy("a"), &key("a"), at(3))).is_some());
        // A cap of one thaws when none is left.
        let mut a = Admission::new(1);
        a.observe(jobs(2), at(0));
        assert!(waits(&a.ask(&policy("a"), &key("a"), at(0))).is_some());
        a.observe(jobs(1), at(1));
        assert_eq!(a.next(at(1)), []);
        a.observe(jobs(0), at(2));
        assert_eq!(a.next(at(2)), [policy("a")]);
    }

    #[test]
    fn a_controller_that_starts_knows_whose_turn_it_is() {
        let mut a = Admission::new(1);
        let job = |job: &str, policy: &str, created: i64| Seen {
            created: Some(at(created)),
            ..seen(job, policy, true)
        };
        a.observe(
            [job("1", "a", 10), job("2", "b", 5), job("3", "a", 1)],
            at(20),
        );
        a.observe(
            [job("1", "a", 10), job("2", "b", 5), seen("4", "c", false)],
            at(20),
        );
        waits(&a.ask(&policy("a"), &key("a"), at(20)));
        waits(&a.ask(&policy("b"), &key("b"), at(21)));
        a.observe([job("1", "a", 10), job("2", "b", 5)], at(22));
        assert_eq!(a.next(at(22)), [policy("b")]);
    }

    #[test]
    fn whatever_happens_the_cap_holds_and_all_get_their_turn() {
        let seed = crate::seed();
        let mut rng = fastrand::Rng::with_seed(seed);
        for _ in 0..crate::rounds(10, 50) {
            let cap = rng.usize(1..6);
            let mut a = Admission::new(cap);
            let names: Vec<String> = (0..8).map(|i| format!("p{i}")).collect();
            let mut wants: BTreeSet<usize> = BTreeSet::new();
            let mut jobs: Vec<Seen> = Vec::new();
            let mut got = [0; 8];
            let mut foreign = false;
            let mut now = 0;
            for step in 0..2000 {
                now += rng.i64(0..20);
                if rng.u8(..) < 3 {
                    // The controller starts anew.
                    a = Admission::new(cap);
                    a.observe(jobs.iter().cloned(), at(now));
                }
                if rng.u8(..) < 2 {
                    jobs.push(seen(&format!("foreign{step}"), "foreign", false));
                    foreign = true;
                }
                let i = rng.usize(..8);
                wants.insert(i);
                let mut asks = vec![policy(&names[i])];
                if !jobs.is_empty() && rng.bool() {
                    jobs.swap_remove(rng.usize(..jobs.len()));
                }
                a.observe(jobs.iter().cloned(), at(now));
                asks.extend(a.next(at(now)));
                // All ask again when the controller has started.
                asks.extend(wants.iter().map(|&i| policy(&names[i])));
                for asker in asks {
                    let i = names.iter().position(|n| *n == asker.policy().1).unwrap();
                    if !wants.contains(&i) {
                        a.withdraw(&asker);
                        continue;
                    }
                    let job = format!("{}-{}", names[i], got[i]);
                    if a.ask(&asker, &key(&job), at(now)) == Answer::Granted {
                        wants.remove(&i);
                        got[i] += 1;
                        jobs.push(seen(&job, &names[i], false));
                    }
                }
                foreign &= jobs.len() > cap;
                assert!(foreign || jobs.len() <= cap, "{} of {cap}", jobs.len());
            }
            let (least, most) = (got.iter().min().unwrap(), got.iter().max().unwrap());
            assert!(*least > 10 && *most < 4 * *least, "{got:?}");
        }
    }
}
