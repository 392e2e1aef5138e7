//! The queue of policies to reconcile. A policy is handed to one worker at a time.
//!
//! Namespaces take turns: however many policies of one namespace change, a policy of another namespace waits
//! for at most one reconciliation in each. A policy that changes while it is reconciled is queued again
//! afterwards.
//!
//! `observe` adds policies; the workers in `controller` take them out.

use super::names::Key;
use crate::base::lock;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Mutex;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// The policies to reconcile, shared by all workers.
#[derive(Debug, Default)]
pub struct WorkQueue {
    queues: Mutex<Queues>,
    changed: Notify,
}

/// Each policy is in at most one of `queued`, `in_progress` and `due`.
#[derive(Debug, Default)]
struct Queues {
    /// The queued policies of each namespace, first in, first out.
    by_namespace: HashMap<String, VecDeque<Key>>,
    /// The namespaces with queued policies, in the order of their turns.
    namespaces: VecDeque<String>,
    /// All policies in `by_namespace`.
    queued: HashSet<Key>,
    in_progress: HashSet<Key>,
    /// The policies that changed while in progress.
    changed_in_progress: HashSet<Key>,
    workers_by_namespace: HashMap<String, usize>,
    /// The most workers for one namespace, so that some are left for the others.
    max_workers_per_namespace: usize,
    /// When to queue policies again that have not changed until then: by policy, and in the order of time.
    due: BTreeMap<Key, Instant>,
    due_in_order: BTreeSet<(Instant, Key)>,
}

impl Queues {
    fn add(&mut self, key: Key) {
        if let Some(due) = self.due.remove(&key) {
            self.due_in_order.remove(&(due, key.clone()));
        }
        if self.in_progress.contains(&key) {
            self.changed_in_progress.insert(key);
        } else if self.queued.insert(key.clone()) {
            let policies = self.by_namespace.entry(key.0.clone()).or_default();
            if policies.is_empty() {
                self.namespaces.push_back(key.0.clone());
            }
            policies.push_back(key);
        }
    }

    /// Takes the next policy. If there is none, returns the time at which one is due.
    fn take(&mut self, now: Instant) -> Result<Key, Option<Instant>> {
        self.queue_due(now);
        let Some(key) = self.take_queued() else {
            return Err(self.due_in_order.first().map(|(due, _)| *due));
        };
        *self.workers_by_namespace.entry(key.0.clone()).or_default() += 1;
        self.in_progress.insert(key.clone());
        Ok(key)
    }

    fn queue_due(&mut self, now: Instant) {
        while let Some((due, key)) = self.due_in_order.first()
            && *due <= now
        {
            let key = key.clone();
            self.add(key);
        }
    }

    /// Takes the first policy of the first namespace that may have one more worker.
    fn take_queued(&mut self) -> Option<Key> {
        let may_have_worker = |namespace: &String| {
            let workers = self.workers_by_namespace.get(namespace).copied();
            workers.unwrap_or_default() < self.max_workers_per_namespace
        };
        let turn = self.namespaces.iter().position(may_have_worker)?;
        let namespace = self.namespaces.remove(turn)?;
        let policies = self.by_namespace.get_mut(&namespace)?;
        let key = policies.pop_front()?;
        if policies.is_empty() {
            self.by_namespace.remove(&namespace);
        } else {
            self.namespaces.push_back(namespace);
        }
        self.queued.remove(&key);
        Some(key)
    }

    fn done(&mut self, key: Key, requeue_at: Option<Instant>) {
        self.in_progress.remove(&key);
        if let Some(workers) = self.workers_by_namespace.get_mut(&key.0) {
            *workers -= 1;
            if *workers == 0 {
                self.workers_by_namespace.remove(&key.0);
            }
        }
        if self.changed_in_progress.remove(&key) {
            self.add(key);
        } else if let Some(due) = requeue_at {
            self.due.insert(key.clone(), due);
            self.due_in_order.insert((due, key));
        }
    }
}

impl WorkQueue {
    /// Creates a queue for this many workers. At most two thirds of them reconcile policies of the same
    /// namespace.
    pub fn new(workers: usize) -> Self {
        let queue = WorkQueue::default();
        lock(&queue.queues).max_workers_per_namespace = (workers * 2).div_ceil(3);
        queue
    }

    /// Queues a policy, unless it is queued already.
    pub fn add(&self, key: Key) {
        lock(&self.queues).add(key);
        self.changed.notify_one();
    }

    /// Waits for the next policy. The caller must call [`done`](Self::done) for it afterwards.
    pub async fn next(&self) -> Key {
        loop {
            let taken = lock(&self.queues).take(Instant::now());
            match taken {
                Ok(key) => {
                    // Wake another worker: there may be one more policy.
                    self.changed.notify_one();
                    return key;
                }
                Err(None) => self.changed.notified().await,
                Err(Some(due)) => {
                    let _ = tokio::time::timeout_at(due, self.changed.notified()).await;
                }
            }
        }
    }

    /// Marks a policy as reconciled. It is queued again after `requeue_after`, or earlier if it changes.
    pub fn done(&self, key: Key, requeue_after: Option<Duration>) {
        let requeue_at = requeue_after.map(|pause| Instant::now() + pause);
        lock(&self.queues).done(key, requeue_at);
        self.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(namespace: &str, name: &str) -> Key {
        (namespace.to_owned(), name.to_owned())
    }

    #[test]
    fn namespaces_take_turns() {
        let mut queues = Queues {
            max_workers_per_namespace: 3,
            ..Queues::default()
        };
        let now = Instant::now();
        for i in 0..1000 {
            queues.add(key("large", &i.to_string()));
        }
        queues.add(key("small", "a"));
        queues.add(key("small", "b"));
        let order: Vec<Key> = (0..5).map(|_| queues.take(now).unwrap()).collect();
        let namespaces: Vec<&str> = order.iter().map(|k| k.0.as_str()).collect();
        assert_eq!(namespaces, ["large", "small", "large", "small", "large"]);
        // It has its share of the workers; the others are left for other namespaces.
        assert_eq!(queues.take(now), Err(None));
        queues.add(key("third", "c"));
        assert_eq!(queues.take(now), Ok(key("third", "c")));
        queues.done(key("large", "0"), None);
        assert_eq!(queues.take(now), Ok(key("large", "3")));
    }

    #[test]
    fn one_worker_at_a_time_and_no_change_is_lost() {
        let mut queues = Queues {
            max_workers_per_namespace: 3,
            ..Queues::default()
        };
        let now = Instant::now();
        let a = key("n", "a");
        queues.add(a.clone());
        queues.add(a.clone());
        assert_eq!(queues.take(now), Ok(a.clone()));
        assert_eq!(queues.take(now), Err(None));
        queues.add(a.clone());
        assert_eq!(queues.take(now), Err(None), "a worker has it");
        queues.done(a.clone(), None);
        assert_eq!(queues.take(now), Ok(a.clone()));
        // It is taken when it is due, or earlier if it changes.
        let due = now + Duration::from_secs(60);
        queues.done(a.clone(), Some(due));
        assert_eq!(queues.take(now), Err(Some(due)));
        assert_eq!(queues.take(due), Ok(a.clone()));
        queues.done(a.clone(), Some(due));
        queues.add(a.clone());
        assert_eq!(queues.take(now), Ok(a.clone()));
        queues.done(a, None);
        assert_eq!(queues.take(due), Err(None));
    }
}
