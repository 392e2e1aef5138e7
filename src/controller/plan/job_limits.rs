//! How many Jobs of thresholds and tasks there may be at once, and whose turn it is.
//!
//! In memory alone: what counts is told anew of each policy that is looked at, so a controller that starts knows as much
//! as the one before it. No I/O, and the time is given. The loop in `controller` asks before Jobs are planned.

use crate::controller::names::Key;
use chrono::{DateTime, TimeDelta, Utc};
use std::collections::{BTreeMap, HashMap};

/// A Job that was granted and that nobody has seen after that time was never made.
const GRANT_LASTS: TimeDelta = TimeDelta::minutes(2);
/// Who was called and does not ask by then has no use for it any more.
const CALL_LASTS: TimeDelta = TimeDelta::minutes(1);
/// A policy has no more Jobs at once: one of a threshold, one of a task. More than that the controller did not make.
const MOST_OF_POLICY: usize = 2;

/// What a Job is made for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
    /// The policy, by which it is looked at.
    pub fn policy(&self) -> &Key {
        match self {
            Asker::Policy(policy) | Asker::Task { policy, .. } => policy,
        }
    }

    fn namespace(&self) -> &str {
        &self.policy().0
    }
}

/// A turn that is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// For whom.
    pub asker: Asker,
    /// The Job.
    pub job: Key,
    /// Restores go before all else, and have places of their own.
    pub is_restore: bool,
}

/// A Job of a policy that counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// The Job.
    pub job: Key,
    /// Whether it has ended.
    pub finished: bool,
    /// Whether it is a restore's.
    pub is_restore: bool,
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
    is_restore: bool,
    since: u64,
    called: Option<DateTime<Utc>>,
}

#[derive(Debug, Clone)]
struct Grant {
    asker: Asker,
    is_restore: bool,
    at: DateTime<Utc>,
}

impl Grant {
    fn is_valid(&self, now: DateTime<Utc>) -> bool {
        (now - self.at).abs() < GRANT_LASTS
    }
}

/// Jobs that run or were granted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Count {
    ordinary: usize,
    restores: usize,
}

impl Count {
    fn of(is_restore: bool) -> Count {
        Count {
            ordinary: usize::from(!is_restore),
            restores: usize::from(is_restore),
        }
    }

    fn all(self) -> usize {
        self.ordinary + self.restores
    }

    fn add(&mut self, more: Count) {
        self.ordinary += more.ordinary;
        self.restores += more.restores;
    }
}

/// The cap and those who wait for it.
///
/// Turns are fair: restores go first; then the namespace with the fewest Jobs is next, in it the policy that was granted
/// one longest ago, and what waits for one policy goes first in, first out. If there is more than one namespace, none
/// has more than half of the places, and none counts for more, whatever Jobs somebody else makes there. Restores have
/// places beyond the cap: a tenth of it, at least one.
///
/// Where there are more Jobs than the cap, as after it was lowered, nothing but restores is granted until no more than
/// nine tenths of it are left, and at least one is free: so it does not go on at the brink.
#[derive(Debug, Default)]
pub struct Limits {
    cap: usize,
    /// Of one namespace; 0 for half of the cap, as long as there are others.
    share: usize,
    /// Jobs that run, by policy; and whether each is a restore.
    running: HashMap<Key, BTreeMap<Key, bool>>,
    /// Policies, by namespace.
    policies: BTreeMap<String, usize>,
    /// Jobs that run or were granted, by namespace.
    active: BTreeMap<String, Count>,
    granted: BTreeMap<Key, Grant>,
    /// Those who wait, by namespace and policy.
    waiting: BTreeMap<String, BTreeMap<Key, Vec<Waiting>>>,
    /// When a policy was granted a Job last: a clock would not tell two of one second apart.
    last_grant: BTreeMap<Key, (DateTime<Utc>, u64)>,
    count: u64,
    frozen: bool,
    told: bool,
}

impl Limits {
    /// So many at once, 0 for any number; and so many of one namespace, 0 for half of them.
    pub fn new(cap: usize, share: usize) -> Self {
        Limits {
            cap,
            share,
            ..Limits::default()
        }
    }

    /// Takes note of all Jobs of a policy that count.
    pub fn see(&mut self, policy: &Key, jobs: &[Seen], now: DateTime<Utc>) {
        let running = jobs.iter().filter(|j| !j.finished);
        let running: BTreeMap<Key, bool> = running.map(|j| (j.job.clone(), j.is_restore)).collect();
        for seen in jobs {
            if let Some(grant) = self.granted.remove(&seen.job) {
                self.ends(grant.asker.namespace(), Count::of(grant.is_restore));
            }
            if let Some(created) = seen.created {
                let last = self.last_grant.entry(policy.clone()).or_default();
                *last = (*last).max((created.min(now), 0));
            }
        }
        self.begins(&policy.0, counted(&running));
        match self.running.insert(policy.clone(), running) {
            None => *self.policies.entry(policy.0.clone()).or_default() += 1,
            Some(before) => self.ends(&policy.0, counted(&before)),
        }
        self.settle(now);
    }

    /// A policy is gone, and its tasks.
    pub fn forget(&mut self, policy: &Key, now: DateTime<Utc>) {
        self.see(policy, &[], now);
        self.running.remove(policy);
        self.last_grant.remove(policy);
        self.keep(policy, |_| false);
        if let Some(count) = self.policies.get_mut(&policy.0) {
            *count -= 1;
            if *count == 0 {
                self.policies.remove(&policy.0);
            }
        }
    }

    /// Answers all that a policy wants at this moment. What of it waited and is wanted no more is forgotten.
    pub fn ask(
        &mut self,
        policy: &Key,
        wanted: &[Wanted],
        now: DateTime<Utc>,
    ) -> BTreeMap<Key, Answer> {
        self.keep(policy, |asker| wanted.iter().any(|w| w.asker == *asker));
        let answers = wanted.iter().map(|w| (w.job.clone(), self.answer(w, now)));
        answers.collect()
    }

    fn answer(&mut self, wanted: &Wanted, now: DateTime<Utc>) -> Answer {
        let Wanted {
            asker,
            job,
            is_restore,
        } = wanted;
        let is_there = |jobs: &BTreeMap<Key, bool>| jobs.contains_key(job);
        // It is there, or granted: then it is no other one that counts.
        if self.running.get(asker.policy()).is_some_and(is_there) || self.granted.contains_key(job)
        {
            self.keep(asker.policy(), |other| other != asker);
            return Answer::Granted;
        }
        self.count += 1;
        let (since, policy) = (self.count, asker.policy());
        let of_namespace = self.waiting.entry(policy.0.clone()).or_default();
        let waiting = of_namespace.entry(policy.clone()).or_default();
        match waiting.iter_mut().find(|w| w.asker == *asker) {
            Some(waiting) => waiting.called = None,
            None => waiting.push(Waiting {
                asker: asker.clone(),
                is_restore: *is_restore,
                since,
                called: None,
            }),
        }
        if self.turns(now).contains(asker) {
            self.keep(asker.policy(), |other| other != asker);
            self.count += 1;
            let policy = asker.policy().clone();
            self.last_grant.insert(policy, (now, self.count));
            self.begins(asker.namespace(), Count::of(*is_restore));
            let grant = Grant {
                asker: asker.clone(),
                is_restore: *is_restore,
                at: now,
            };
            self.granted.insert(job.clone(), grant);
            return Answer::Granted;
        }
        let freeze = (self.frozen && !self.told).then(|| Freeze {
            active: self.total().all(),
            cap: self.cap,
            until: self.thawed_at(),
        });
        self.told |= freeze.is_some();
        // Without the numbers of the moment: it would be another one at every look.
        let cap = self.cap;
        let share = self.share();
        let reason = match self.frozen {
            true => format!(
                "more than {cap} Jobs run: none is started until there are {} or fewer",
                self.thawed_at()
            ),
            false if self.active_in(asker.namespace()) >= share => {
                format!("no more than {share} Jobs of a namespace may run at once")
            }
            false => format!("no more than {cap} Jobs may run at once, and others are first"),
        };
        Answer::Wait { reason, freeze }
    }

    /// A Job that was granted could not be made.
    pub fn give_back(&mut self, job: &Key, now: DateTime<Utc>) {
        if let Some(grant) = self.granted.remove(job) {
            self.ends(grant.asker.namespace(), Count::of(grant.is_restore));
            self.settle(now);
        }
    }

    /// The policies of those whose turn has come: they are to ask again. Nobody is called twice within a minute.
    pub fn next(&mut self, now: DateTime<Utc>) -> Vec<Key> {
        if self.waiting.is_empty() {
            return Vec::new();
        }
        self.settle(now);
        let turns = self.turns(now);
        let mut called = Vec::new();
        for asker in turns {
            let policy = asker.policy();
            let waiting = self
                .waiting
                .get_mut(&policy.0)
                .and_then(|w| w.get_mut(policy));
            let mut waiting = waiting.into_iter().flatten();
            if let Some(waiting) = waiting.find(|w| w.asker == asker && w.called.is_none()) {
                waiting.called = Some(now);
                called.push(policy.clone());
            }
        }
        called
    }

    /// Of those who wait for a policy, keeps these.
    fn keep(&mut self, policy: &Key, is_kept: impl Fn(&Asker) -> bool) {
        let Some(policies) = self.waiting.get_mut(&policy.0) else {
            return;
        };
        if let Some(waiting) = policies.get_mut(policy) {
            waiting.retain(|w| is_kept(&w.asker));
            if waiting.is_empty() {
                policies.remove(policy);
            }
        }
        if policies.is_empty() {
            self.waiting.remove(&policy.0);
        }
    }

    fn begins(&mut self, namespace: &str, more: Count) {
        self.active
            .entry(namespace.to_owned())
            .or_default()
            .add(more);
    }

    fn ends(&mut self, namespace: &str, less: Count) {
        if let Some(count) = self.active.get_mut(namespace) {
            count.ordinary -= less.ordinary;
            count.restores -= less.restores;
            if *count == Count::default() {
                self.active.remove(namespace);
            }
        }
    }

    fn active_in(&self, namespace: &str) -> usize {
        self.active.get(namespace).map_or(0, |count| count.all())
    }

    /// All that counts: of no namespace more than its share.
    fn total(&self) -> Count {
        let share = self.share();
        let mut total = Count::default();
        for count in self.active.values() {
            let ordinary = count.ordinary.min(share);
            total.ordinary += ordinary;
            let restores = (share - ordinary).max(self.restores_beyond_share());
            total.restores += count.restores.min(restores);
        }
        total
    }

    fn settle(&mut self, now: DateTime<Utc>) {
        let over = self.granted.extract_if(.., |_, g| !g.is_valid(now));
        let over: Vec<Grant> = over.map(|(_, grant)| grant).collect();
        for grant in over {
            self.ends(grant.asker.namespace(), Count::of(grant.is_restore));
        }
        if self.cap == 0 {
            return;
        }
        let ordinary = self.total().ordinary;
        if ordinary > self.cap {
            self.frozen = true;
        } else if self.frozen && ordinary <= self.thawed_at() {
            self.frozen = false;
            self.told = false;
        }
    }

    fn thawed_at(&self) -> usize {
        self.cap - (self.cap / 10).max(1)
    }

    /// Places beyond the cap, for restores alone.
    fn reserve(&self) -> usize {
        (self.cap / 10).max(1)
    }

    /// The restores of a namespace that may run though it has its share.
    fn restores_beyond_share(&self) -> usize {
        self.reserve().div_ceil(2)
    }

    /// The places of one namespace.
    fn share(&self) -> usize {
        match (self.share, self.policies.len()) {
            (0, ..=1) => usize::MAX,
            (0, _) if self.cap == 0 => usize::MAX,
            (0, _) => self.cap.div_ceil(2),
            (share, _) => share,
        }
    }

    /// Whether there is a place, with so many more that are about to run.
    fn is_free(&self, is_restore: bool, more: usize) -> bool {
        let total = self.total();
        match (self.cap, is_restore) {
            (0, _) => true,
            (cap, true) => total.ordinary.min(cap) + total.restores + more < cap + self.reserve(),
            (cap, false) => !self.frozen && total.all() + more < cap,
        }
    }

    /// How many a namespace has, with those that are about to run; `None` if it may have no more.
    fn open(&self, namespace: &str, is_restore: bool, more: Count) -> Option<usize> {
        let count = self.active.get(namespace).copied().unwrap_or_default();
        let all = count.all() + more.all();
        let restores = count.restores + more.restores;
        let is_reserved = is_restore && restores < self.restores_beyond_share();
        (all < self.share() || is_reserved).then_some(all)
    }

    /// Those who may have a Job now, if nobody else asks.
    fn turns(&self, now: DateTime<Utc>) -> Vec<Asker> {
        let mut turns = Vec::new();
        let mut picked: BTreeMap<&str, Count> = BTreeMap::new();
        for is_restore in [true, false] {
            if !self.is_free(is_restore, turns.len()) {
                continue;
            }
            // The policy that was granted one longest ago is next, and stands last.
            let turn = |w: &Waiting| (self.last_grant.get(w.asker.policy()).copied(), w.since);
            let queues = self.waiting.iter().filter_map(|(namespace, waiting)| {
                self.open(namespace, is_restore, Count::default())?;
                let waits = |w: &&Waiting| w.is_restore == is_restore && !is_over(w.called, now);
                let mut queue: Vec<&Waiting> = waiting.values().flatten().filter(waits).collect();
                queue.sort_by_key(|w| std::cmp::Reverse(turn(w)));
                Some((namespace.as_str(), queue))
            });
            let mut queues: Vec<(&str, Vec<&Waiting>)> = queues.collect();
            while self.is_free(is_restore, turns.len()) {
                let open = queues.iter_mut().filter_map(|(namespace, queue)| {
                    let more = picked.get(namespace).copied().unwrap_or_default();
                    let count = self.open(namespace, is_restore, more)?;
                    Some(((count, turn(queue.last()?)), *namespace, queue))
                });
                let Some((_, namespace, queue)) = open.min_by_key(|(turn, ..)| *turn) else {
                    break;
                };
                turns.extend(queue.pop().map(|w| w.asker.clone()));
                picked
                    .entry(namespace)
                    .or_default()
                    .add(Count::of(is_restore));
            }
        }
        turns
    }
}

/// What counts of a policy's Jobs.
fn counted(running: &BTreeMap<Key, bool>) -> Count {
    let restores = running.values().filter(|is_restore| **is_restore).count();
    let restores = restores.min(1);
    Count {
        ordinary: (running.len() - restores).min(MOST_OF_POLICY - restores),
        restores,
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
    use std::collections::BTreeSet;

    fn key(name: &str) -> Key {
        ("ns".to_owned(), name.to_owned())
    }

    /// Jobs, each of a policy.
    type Jobs = Vec<(Key, Seen)>;

    fn seen(job: &str, policy: &str, finished: bool) -> (Key, Seen) {
        let seen = Seen {
            job: key(job),
            finished,
            is_restore: false,
            created: Some(at(0)),
        };
        (key(policy), seen)
    }

    impl Limits {
        /// These Jobs are there, and no others.
        fn observe(&mut self, jobs: impl IntoIterator<Item = (Key, Seen)>, now: DateTime<Utc>) {
            let mut all: BTreeMap<Key, Vec<Seen>> = BTreeMap::new();
            all.extend(
                self.running
                    .keys()
                    .map(|policy| (policy.clone(), Vec::new())),
            );
            for (policy, seen) in jobs {
                all.entry(policy).or_default().push(seen);
            }
            for (policy, jobs) in all {
                self.see(&policy, &jobs, now);
            }
        }

        /// A policy's threshold wants a Job.
        fn wants(&mut self, policy: &Key, job: &str, now: DateTime<Utc>) -> Answer {
            self.wants_one(policy, job, false, now)
        }

        fn wants_one(
            &mut self,
            policy: &Key,
            job: &str,
            restore: bool,
            now: DateTime<Utc>,
        ) -> Answer {
            let wanted = Wanted {
                asker: Asker::Policy(policy.clone()),
                job: (policy.0.clone(), job.to_owned()),
                is_restore: restore,
            };
            let job = wanted.job.clone();
            self.ask(policy, &[wanted], now).remove(&job).unwrap()
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
        let mut a = Limits::new(2, 0);
        assert_eq!(a.wants(&key("a"), "ja", at(0)), Answer::Granted);
        // The same once more is the same Job.
        assert_eq!(a.wants(&key("a"), "ja", at(0)), Answer::Granted);
        assert_eq!(a.wants(&key("b"), "jb", at(0)), Answer::Granted);
        assert_eq!(waits(&a.wants(&key("c"), "jc", at(1))), None);
        assert_eq!(a.next(at(2)), []);
        a.observe([seen("ja", "a", false), seen("jb", "b", false)], at(3));
        assert_eq!((a.total().all(), a.next(at(3))), (2, vec![]));
        a.observe([seen("ja", "a", true), seen("jb", "b", false)], at(4));
        assert_eq!(a.next(at(4)), [key("c")]);
        // It is called once, and another one does not get ahead of it.
        assert_eq!(a.next(at(5)), []);
        waits(&a.wants(&key("d"), "jd", at(5)));
        assert_eq!(a.wants(&key("c"), "jc", at(6)), Answer::Granted);
        waits(&a.wants(&key("d"), "jd", at(6)));
        // What could not be made is given back; what never came is forgotten.
        a.give_back(&key("jc"), at(7));
        assert_eq!(a.next(at(7)), [key("d")]);
        assert_eq!(a.wants(&key("d"), "jd", at(8)), Answer::Granted);
        a.observe([seen("jb", "b", false)], at(9));
        assert_eq!(a.total().all(), 2);
        a.observe([seen("jb", "b", false)], at(8 + 120));
        assert_eq!(a.total().all(), 1);
        a.forget(&key("b"), at(130));
        assert_eq!((a.total().all(), a.active.len()), (0, 0));
    }

    #[test]
    fn without_a_cap_all_go() {
        let mut a = Limits::new(0, 0);
        a.see(&("elsewhere".to_owned(), "p".to_owned()), &[], at(0));
        for i in 0..100 {
            let answer = a.wants(&key("a"), &i.to_string(), at(0));
            assert_eq!(answer, Answer::Granted);
        }
    }

    #[test]
    fn policies_take_turns() {
        let mut a = Limits::new(1, 0);
        assert_eq!(a.wants(&key("a"), "a0", at(0)), Answer::Granted);
        for policy in ["a", "b", "c"] {
            waits(&a.wants(&key(policy), &format!("{policy}1"), at(1)));
        }
        let mut order = Vec::new();
        for second in 2..8 {
            let now = at(second * 200);
            a.observe([], now);
            let next = a.next(now);
            assert_eq!(next.len(), 1);
            let job = format!("{}{second}", next[0].1);
            assert_eq!(a.wants(&next[0], &job, now), Answer::Granted);
            order.push(next[0].1.clone());
            waits(&a.wants(&next[0], "again", now));
        }
        assert_eq!(order, ["b", "c", "a", "b", "c", "a"]);
    }

    #[test]
    fn a_namespace_has_its_share_and_restores_go_first() {
        let mut a = Limits::new(4, 0);
        let of = |namespace: &str, name: &str| (namespace.to_owned(), name.to_owned());
        for namespace in ["small", "large"] {
            a.see(&of(namespace, "p"), &[], at(0));
        }
        for (i, policy) in ["1", "2"].iter().enumerate() {
            let answer = a.wants(&of("large", policy), &format!("l{i}"), at(0));
            assert_eq!(answer, Answer::Granted);
        }
        // Half of the places, though others are free.
        waits(&a.wants(&of("large", "3"), "l3", at(0)));
        assert_eq!(a.wants(&of("small", "s"), "s1", at(1)), Answer::Granted);
        assert_eq!(a.wants(&of("third", "t"), "t1", at(1)), Answer::Granted);
        waits(&a.wants(&of("third", "u"), "u1", at(1)));
        // A place beyond the cap, for restores alone; also for one of a namespace that has its share.
        let restore = a.wants_one(&of("large", "r"), "r1", true, at(2));
        assert_eq!(restore, Answer::Granted);
        waits(&a.wants_one(&of("third", "r"), "r2", true, at(2)));
        // The next one that is free is a restore's.
        a.give_back(&of("small", "s1"), at(3));
        assert_eq!(a.next(at(3)), [of("third", "r")]);
        // Whoever is alone has all places.
        let mut a = Limits::new(4, 0);
        for i in 0..4 {
            let answer = a.wants(&key(&i.to_string()), &i.to_string(), at(0));
            assert_eq!(answer, Answer::Granted);
        }
        // Or as many as were said.
        let mut a = Limits::new(4, 1);
        assert_eq!(a.wants(&key("1"), "1", at(0)), Answer::Granted);
        waits(&a.wants(&key("2"), "2", at(0)));
    }

    #[test]
    fn jobs_that_somebody_else_makes_take_nobodys_places() {
        let mut a = Limits::new(4, 0);
        let of = |namespace: &str, name: &str| (namespace.to_owned(), name.to_owned());
        a.see(&of("fine", "p"), &[], at(0));
        for policy in 0..20 {
            let (_, seen) = seen("job", "p", false);
            let jobs: Vec<Seen> = (0..20)
                .map(|i| Seen {
                    job: of("forger", &i.to_string()),
                    ..seen.clone()
                })
                .collect();
            a.see(&of("forger", &policy.to_string()), &jobs, at(0));
        }
        assert_eq!(a.total().all(), 2);
        waits(&a.wants(&of("forger", "x"), "x", at(1)));
        assert_eq!(a.wants(&of("fine", "p"), "1", at(1)), Answer::Granted);
        assert_eq!(a.wants(&of("fine", "q"), "2", at(1)), Answer::Granted);
    }

    #[test]
    fn who_was_called_and_does_not_come_is_passed_over() {
        let mut a = Limits::new(1, 0);
        a.observe([seen("x", "x", false)], at(0));
        waits(&a.wants(&key("a"), "a", at(0)));
        waits(&a.wants(&key("b"), "b", at(0)));
        a.observe([], at(10));
        assert_eq!(a.next(at(10)), [key("a")]);
        waits(&a.wants(&key("b"), "b", at(11)));
        assert_eq!(a.next(at(69)), []);
        assert_eq!(a.next(at(70)), [key("b")]);
        // One that needs none any more says so.
        a.ask(&key("b"), &[], at(70));
        assert_eq!(a.wants(&key("c"), "c", at(71)), Answer::Granted);
    }

    #[test]
    fn too_many_freeze_it_and_that_is_told_once() {
        let mut a = Limits::new(10, 0);
        let jobs = |n: usize| -> Jobs {
            (0..n)
                .map(|i| seen("job", &format!("other{i}"), false))
                .collect()
        };
        a.observe(jobs(12), at(0));
        let freeze = waits(&a.wants(&key("a"), "a", at(0)));
        let told = Freeze {
            active: 12,
            cap: 10,
            until: 9,
        };
        assert_eq!(freeze, Some(told));
        assert_eq!(waits(&a.wants(&key("b"), "b", at(0))), None);
        a.observe(jobs(10), at(1));
        assert_eq!(a.next(at(1)), []);
        assert_eq!(waits(&a.wants(&key("a"), "a", at(1))), None);
        a.observe(jobs(9), at(2));
        assert_eq!(a.next(at(2)), [key("a")]);
        // The next freeze is told again.
        a.observe(jobs(11), at(3));
        assert!(waits(&a.wants(&key("a"), "a", at(3))).is_some());
        // A restore is not held up by it.
        let mut a = Limits::new(1, 0);
        a.observe(jobs(2), at(0));
        assert!(waits(&a.wants(&key("a"), "a", at(0))).is_some());
        let restore = a.wants_one(&key("r"), "r", true, at(0));
        assert_eq!(restore, Answer::Granted);
        a.give_back(&key("r"), at(1));
        a.observe(jobs(1), at(1));
        assert_eq!(a.next(at(1)), []);
        // A cap of one thaws when none is left.
        a.observe(jobs(0), at(2));
        assert_eq!(a.next(at(2)), [key("a")]);
    }

    #[test]
    fn a_controller_that_starts_knows_whose_turn_it_is() {
        let mut a = Limits::new(1, 0);
        let job = |job: &str, policy: &str, created: i64| {
            let (policy, mut seen) = seen(job, policy, true);
            seen.created = Some(at(created));
            (policy, seen)
        };
        let ended = [job("1", "a", 10), job("2", "b", 5), job("3", "a", 1)];
        a.observe(ended.into_iter().chain([seen("4", "c", false)]), at(20));
        waits(&a.wants(&key("a"), "a", at(20)));
        waits(&a.wants(&key("b"), "b", at(21)));
        a.observe([job("1", "a", 10), job("2", "b", 5)], at(22));
        assert_eq!(a.next(at(22)), [key("b")]);
    }

    #[test]
    fn whatever_happens_the_cap_holds_and_all_get_their_turn() {
        let seed = crate::seed();
        let mut rng = fastrand::Rng::with_seed(seed);
        for _ in 0..crate::rounds(10, 50) {
            let cap = rng.usize(1..6);
            let mut a = Limits::new(cap, 0);
            let names: Vec<String> = (0..8).map(|i| format!("p{i}")).collect();
            let mut wants: BTreeSet<usize> = BTreeSet::new();
            let mut jobs: Jobs = Vec::new();
            let mut got = [0; 8];
            let mut foreign = false;
            let mut now = 0;
            for step in 0..2000 {
                now += rng.i64(0..20);
                if rng.u8(..) < 3 {
                    // The controller starts anew.
                    a = Limits::new(cap, 0);
                }
                if rng.u8(..) < 2 {
                    let policy = format!("foreign{step}");
                    jobs.push(seen(&policy, &policy, false));
                    foreign = true;
                }
                let i = rng.usize(..8);
                // It has one at a time.
                if jobs.iter().all(|(policy, _)| *policy != key(&names[i])) {
                    wants.insert(i);
                }
                let mut asks = vec![key(&names[i])];
                if !jobs.is_empty() && rng.bool() {
                    jobs.swap_remove(rng.usize(..jobs.len()));
                }
                a.observe(jobs.iter().cloned(), at(now));
                asks.extend(a.next(at(now)));
                // All ask again when the controller has started.
                asks.extend(wants.iter().map(|&i| key(&names[i])));
                for policy in asks {
                    let i = names.iter().position(|n| *n == policy.1).unwrap();
                    if !wants.contains(&i) {
                        a.ask(&policy, &[], at(now));
                        continue;
                    }
                    let job = format!("{}-{}", names[i], got[i]);
                    if a.wants(&policy, &job, at(now)) == Answer::Granted {
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
