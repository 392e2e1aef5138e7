//! What is to be looked at: policies by namespace and name, each by one worker at a time.
//!
//! Namespaces take turns: however much changes in one of them, another one's policy waits for one look in each at
//! most. A policy that changes while it is looked at is looked at again. `observe` puts policies in, the loop in `mod`
//! takes them out.

use super::names::Key;
use crate::base::lock;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Mutex;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// The policies to look at.
#[derive(Debug, Default)]
pub struct Work {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Those that can be looked at, by namespace, in their order.
    ready: HashMap<String, VecDeque<Key>>,
    /// The namespaces that have some, in the order of their turns.
    turns: VecDeque<String>,
    waiting: HashSet<Key>,
    busy: HashSet<Key>,
    /// How many of one namespace are looked at, and how many may be, so that some workers are left for others.
    of_namespace: HashMap<String, usize>,
    most_of_namespace: usize,
    /// Those that have changed while they are looked at.
    again: HashSet<Key>,
    later: BTreeSet<(Instant, Key)>,
    due: BTreeMap<Key, Instant>,
}

impl State {
    fn add(&mut self, key: Key) {
        if let Some(due) = self.due.remove(&key) {
            self.later.remove(&(due, key.clone()));
        }
        if self.busy.contains(&key) {
            self.again.insert(key);
        } else if self.waiting.insert(key.clone()) {
            let ready = self.ready.entry(key.0.clone()).or_default();
            if ready.is_empty() {
                self.turns.push_back(key.0.clone());
            }
            ready.push_back(key);
        }
    }

    /// The next one; or when there will be one.
    fn take(&mut self, now: Instant) -> Result<Key, Option<Instant>> {
        while let Some((_, key)) = self.later.first().filter(|(due, _)| *due <= now).cloned() {
            self.add(key);
        }
        let (busy, most) = (&self.of_namespace, self.most_of_namespace);
        let may = |namespace: &String| busy.get(namespace).is_none_or(|count| *count < most);
        let namespace = self.turns.iter().position(may);
        let namespace = namespace.and_then(|at| self.turns.remove(at));
        let ready = namespace.as_ref().and_then(|n| self.ready.get_mut(n));
        let Some(key) = ready.and_then(VecDeque::pop_front) else {
            return Err(self.later.first().map(|(due, _)| *due));
        };
        if self
            .ready
            .get(&key.0)
            .is_some_and(|ready| !ready.is_empty())
        {
            self.turns.push_back(key.0.clone());
        } else {
            self.ready.remove(&key.0);
        }
        *self.of_namespace.entry(key.0.clone()).or_default() += 1;
        self.waiting.remove(&key);
        self.busy.insert(key.clone());
        Ok(key)
    }

    fn done(&mut self, key: Key, again_at: Option<Instant>) {
        self.busy.remove(&key);
        if let Some(count) = self.of_namespace.get_mut(&key.0) {
            *count -= 1;
            if *count == 0 {
                self.of_namespace.remove(&key.0);
            }
        }
        if self.again.remove(&key) {
            self.add(key);
        } else if let Some(due) = again_at {
            self.due.insert(key.clone(), due);
            self.later.insert((due, key));
        }
    }
}

impl Work {
    /// For so many workers: two thirds of them look at policies of one namespace at most.
    pub fn new(workers: usize) -> Self {
        let work = Work::default();
        lock(&work.state).most_of_namespace = (workers * 2).div_ceil(3);
        work
    }

    /// Has a policy looked at, as soon as it is its turn.
    pub fn add(&self, key: Key) {
        lock(&self.state).add(key);
        self.changed.notify_one();
    }

    /// Waits for a policy to look at. [`done`](Self::done) has to be called for it.
    pub async fn next(&self) -> Key {
        loop {
            let taken = lock(&self.state).take(Instant::now());
            match taken {
                Ok(key) => {
                    // There may be one for another worker, too.
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

    /// A policy was looked at; it is looked at again after so long, if nothing changes before.
    pub fn done(&self, key: Key, again: Option<Duration>) {
        let at = again.map(|pause| Instant::now() + pause);
        lock(&self.state).done(key, at);
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
        let mut state = State {
            most_of_namespace: 3,
            ..State::default()
        };
        let now = Instant::now();
        for i in 0..1000 {
            state.add(key("large", &i.to_string()));
        }
        state.add(key("small", "a"));
        state.add(key("small", "b"));
        let order: Vec<Key> = (0..5).map(|_| state.take(now).unwrap()).collect();
        let namespaces: Vec<&str> = order.iter().map(|k| k.0.as_str()).collect();
        assert_eq!(namespaces, ["large", "small", "large", "small", "large"]);
        // It has as many workers as it may; the others are left for other namespaces.
        assert_eq!(state.take(now), Err(None));
        state.add(key("third", "c"));
        assert_eq!(state.take(now), Ok(key("third", "c")));
        state.done(key("large", "0"), None);
        assert_eq!(state.take(now), Ok(key("large", "3")));
    }

    #[test]
    fn one_worker_at_a_time_and_no_change_is_lost() {
        let mut state = State {
            most_of_namespace: 3,
            ..State::default()
        };
        let now = Instant::now();
        let a = key("n", "a");
        state.add(a.clone());
        state.add(a.clone());
        assert_eq!(state.take(now), Ok(a.clone()));
        assert_eq!(state.take(now), Err(None));
        state.add(a.clone());
        assert_eq!(state.take(now), Err(None), "it is being looked at");
        state.done(a.clone(), None);
        assert_eq!(state.take(now), Ok(a.clone()));
        // Later, or sooner if it changes.
        let due = now + Duration::from_secs(60);
        state.done(a.clone(), Some(due));
        assert_eq!(state.take(now), Err(Some(due)));
        assert_eq!(state.take(due), Ok(a.clone()));
        state.done(a.clone(), Some(due));
        state.add(a.clone());
        assert_eq!(state.take(now), Ok(a.clone()));
        state.done(a, None);
        assert_eq!(state.take(due), Err(None));
    }
}
