//! Transactions on their way from the watch to the deltas: so many bytes and no more. Where the store is
//! away for longer, the watch waits, and etcd keeps what comes.

use super::pending::Encoded;
use crate::error::{Error, Reason};
use crate::etcd::feed::{Ended, Feed, Next};
use crate::store::{Bandwidth, Cancel};
use chrono::{DateTime, Utc};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A watch that is silent for so long is asked again.
const PATIENCE: Duration = Duration::from_secs(1);
/// Pauses before a watch that failed is begun again: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));

/// What a watch gave.
pub(super) enum Item {
    Transaction(Encoded),
    Ended(Ended),
    /// It will not go on, whatever is tried.
    Failed(Error),
}

#[derive(Default)]
struct State {
    items: VecDeque<Item>,
    bytes: u64,
    closed: bool,
    /// The newest revision that the cluster was seen to have.
    current: i64,
    reconnects: u64,
    failures: u64,
    /// Nothing can be watched at this moment: since when, and why.
    down: Option<(Instant, Reason)>,
}

struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    limit: u64,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for room. False once nobody takes any more.
    fn push(&self, item: Item, bytes: u64) -> bool {
        let mut state = self.state();
        while !state.closed && state.bytes > 0 && state.bytes + bytes > self.limit {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        if state.closed {
            return false;
        }
        state.bytes += bytes;
        state.items.push_back(item);
        self.changed.notify_all();
        true
    }

    fn pop(&self, patience: Duration) -> Option<Item> {
        let state = self.state();
        let (mut state, _) = self
            .changed
            .wait_timeout_while(state, patience, |s| s.items.is_empty())
            .unwrap_or_else(PoisonError::into_inner);
        let item = state.items.pop_front()?;
        if let Item::Transaction(t) = &item {
            state.bytes -= t.bytes();
        }
        self.changed.notify_all();
        Some(item)
    }

    /// Waits, unless nobody takes any more.
    fn pause(&self, pause: Duration) {
        let state = self.state();
        // What comes meanwhile is the result either way.
        let _ = self
            .changed
            .wait_timeout_while(state, pause, |s| !s.closed)
            .unwrap_or_else(PoisonError::into_inner);
    }
}

/// What a tail is at.
#[derive(Debug, Clone, Default)]
pub(super) struct Pulse {
    /// The newest revision that the cluster was seen to have.
    pub(super) current: i64,
    pub(super) reconnects: u64,
    /// How often nothing could be watched.
    pub(super) failures: u64,
    /// Why, where it is so at this moment.
    pub(super) failure: Option<Reason>,
    /// Bytes that wait.
    pub(super) buffered_bytes: u64,
    /// For how long nothing could be watched.
    pub(super) down_for: Option<Duration>,
}

/// A watch on a thread of its own. Dropping it ends it.
pub(super) struct Tail {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

impl Tail {
    /// Goes on behind where `feed` stands; at most `limit` bytes wait, and one transaction whatever its size.
    pub(super) fn start(
        feed: Feed,
        limit: u64,
        bandwidth: Option<(Bandwidth, Cancel)>,
    ) -> std::io::Result<Self> {
        let queue = Arc::new(Queue {
            state: Mutex::new(State {
                current: feed.current(),
                ..State::default()
            }),
            changed: Condvar::new(),
            limit,
        });
        let theirs = Arc::clone(&queue);
        let thread = std::thread::Builder::new()
            .name("watch".to_owned())
            .spawn(move || watch(feed, &theirs, bandwidth.as_ref()))?;
        Ok(Tail {
            queue,
            thread: Some(thread),
        })
    }

    pub(super) fn pop(&self, patience: Duration) -> Option<Item> {
        self.queue.pop(patience)
    }

    /// What was taken and is no transaction, to be taken again.
    pub(super) fn put_back(&self, item: Item) {
        self.queue.state().items.push_front(item);
    }

    pub(super) fn pulse(&self) -> Pulse {
        let state = self.queue.state();
        Pulse {
            current: state.current,
            reconnects: state.reconnects,
            failures: state.failures,
            buffered_bytes: state.bytes,
            failure: state.down.map(|d| d.1),
            down_for: state.down.map(|d| d.0.elapsed()),
        }
    }
}

impl Drop for Tail {
    fn drop(&mut self) {
        self.queue.state().closed = true;
        self.queue.changed.notify_all();
        // It looks at the switch every second or so; it must not outlive what it was started for.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn watch(mut feed: Feed, queue: &Queue, bandwidth: Option<&(Bandwidth, Cancel)>) {
    let mut pause = PAUSES.0;
    // A clock that is set back does not make later events look older.
    let mut seen = DateTime::<Utc>::MIN_UTC;
    loop {
        let next = feed.next(PATIENCE);
        {
            let mut state = queue.state();
            if state.closed {
                return;
            }
            state.current = feed.current();
            state.reconnects = feed.reconnects();
            if next.is_ok() {
                state.down = None;
                pause = PAUSES.0;
            }
        }
        let goes_on = match next {
            Ok(Next::Idle | Next::Verified) => true,
            Ok(Next::Transaction(t)) => {
                seen = seen.max(Utc::now());
                let encoded = Encoded::new(&t, seen);
                let bytes = encoded.bytes();
                // Cancelled, all ends soon.
                if let Some((limit, cancel)) = bandwidth
                    && limit.take(bytes, cancel).is_err()
                {
                    return;
                }
                queue.push(Item::Transaction(encoded), bytes)
            }
            Ok(Next::Ended(ended)) => {
                queue.push(Item::Ended(ended), 0);
                return;
            }
            Err(e) if e.reason().is_retryable() => {
                tracing::warn!(reason = e.reason().as_str(), "no watch: {e}");
                let mut state = queue.state();
                state.failures += 1;
                state.down.get_or_insert((Instant::now(), e.reason()));
                drop(state);
                queue.pause(pause);
                pause = (pause * 2).min(PAUSES.1);
                true
            }
            Err(e) => {
                queue.push(Item::Failed(e), 0);
                return;
            }
        };
        if !goes_on {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::etcd::feed::{KeyChange, Transaction};

    fn transaction(revision: i64, bytes: usize) -> Encoded {
        let change = KeyChange {
            key: b"k".to_vec(),
            value: vec![0; bytes],
            mod_revision: revision,
            ..KeyChange::default()
        };
        let changes = vec![change];
        Encoded::new(&Transaction { revision, changes }, Utc::now())
    }

    #[test]
    fn the_watch_waits_where_the_buffer_is_full_and_one_transaction_always_fits() {
        let queue = Arc::new(Queue {
            state: Mutex::default(),
            changed: Condvar::new(),
            limit: 1000,
        });
        let theirs = Arc::clone(&queue);
        let pushing = std::thread::spawn(move || {
            for revision in 1..=50 {
                // Larger than the whole buffer, and several in it.
                let t = transaction(revision, if revision % 7 == 0 { 5000 } else { 100 });
                let bytes = t.bytes();
                assert!(theirs.push(Item::Transaction(t), bytes));
                let state = theirs.state();
                assert!(
                    state.bytes <= 1000 || state.items.len() == 1,
                    "{}",
                    state.bytes
                );
            }
        });
        for revision in 1..=50 {
            match queue.pop(Duration::from_secs(60)) {
                Some(Item::Transaction(t)) => assert_eq!(t.revision().0, revision),
                _ => panic!("no transaction {revision}"),
            }
        }
        pushing.join().unwrap();
        assert_eq!(queue.state().bytes, 0);
        queue.state().closed = true;
        assert!(!queue.push(Item::Ended(Ended::Forked), 0));
    }
}
