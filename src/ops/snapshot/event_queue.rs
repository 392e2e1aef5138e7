//! Transactions on their way from the watch to the deltas: so many bytes in memory, then so many in the temporary
//! directory, and no more. If the store is away for longer, the watch waits, and etcd keeps what comes.
//!
//! A watch that is far behind gets no more than some thousand revisions a second from etcd, and none that etcd has
//! compacted meanwhile: so as much as possible is taken while the store is away.

use super::delta_builder::Encoded;
use crate::base::Cancel;
use crate::base::ReadAt as _;
use crate::base::temp::{Dir, TempFile};
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Reason, Result};
use crate::etcd::feed::{Ended, Feed, Next};
use crate::store::Bandwidth;
use chrono::{DateTime, Utc};
use std::collections::VecDeque;
use std::io::Write as _;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
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

/// What waits.
struct Entry {
    item: Item,
    /// Where the text of a transaction is, if it is not in memory.
    spooled_at: Option<u64>,
}

impl Entry {
    /// In memory.
    fn new(item: Item) -> Self {
        Entry {
            item,
            spooled_at: None,
        }
    }

    /// Bytes of memory. Beside a text that is in memory the rest is little, and not counted.
    fn bytes(&self) -> u64 {
        match (&self.item, self.spooled_at) {
            (Item::Transaction(t), None) => t.bytes(),
            (Item::Transaction(t), Some(_)) => (size_of::<Self>() + t.overhead()) as u64,
            _ => 0,
        }
    }
}

/// Texts in the temporary directory.
struct Spool {
    dir: Dir,
    limit: u64,
    /// Begun when there is a text for it, and gone when none waits in it.
    file: Option<TempFile>,
    texts: usize,
    /// Bytes of the texts that wait. The file also has those that were read.
    waiting: u64,
}

impl Spool {
    fn has_room(&self, bytes: u64) -> bool {
        let used = self.file.as_ref().map_or(0, TempFile::len);
        used + bytes <= self.limit
    }

    /// Gives where the text is now.
    fn write(&mut self, text: &[u8]) -> Result<u64> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(self.dir.file()?),
        };
        let at = file.len();
        if let Err(e) = file.write_all(text) {
            if self.texts == 0 {
                self.file = None;
            }
            return Err(Error::io("write events to the temporary directory", e));
        }
        self.texts += 1;
        self.waiting += text.len() as u64;
        Ok(at)
    }

    fn read(&mut self, at: u64, len: usize) -> Result<Vec<u8>> {
        let mut text = vec![0; len];
        let file = self.file.as_ref();
        let read = file.map_or(Ok(()), |f| f.read_exact_at(&mut text, at));
        read.map_err(|e| Error::io("read events from the temporary directory", e))?;
        self.texts -= 1;
        self.waiting -= len as u64;
        if self.texts == 0 {
            self.file = None;
        }
        Ok(text)
    }
}

/// How much may wait, and where.
pub(super) struct Room {
    /// Bytes in memory. While some may wait in the temporary directory, texts take half of it.
    pub(super) memory: u64,
    /// Bytes in the temporary directory.
    pub(super) spool: u64,
    pub(super) dir: Dir,
}

struct State {
    items: VecDeque<Entry>,
    /// Of memory.
    bytes: u64,
    spool: Spool,
    closed: bool,
    seen: Pulse,
    /// Nothing can be watched: since when.
    down: Option<Instant>,
}

struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    limit: u64,
}

impl Queue {
    fn new(room: Room, current: i64) -> Self {
        let spool = Spool {
            dir: room.dir,
            limit: room.spool,
            file: None,
            texts: 0,
            waiting: 0,
        };
        Queue {
            state: Mutex::new(State {
                items: VecDeque::new(),
                bytes: 0,
                spool,
                closed: false,
                seen: Pulse {
                    current,
                    ..Pulse::default()
                },
                down: None,
            }),
            changed: Condvar::new(),
            limit: room.memory,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Waits for room. False once nobody takes any more.
    fn push(&self, item: Item) -> bool {
        let mut entry = Entry::new(item);
        let mut state = self.state();
        loop {
            if state.closed {
                return false;
            }
            let texts = match state.spool.limit {
                0 => self.limit,
                _ => self.limit / 2,
            };
            let is_text = matches!(entry.item, Item::Transaction(_));
            let fits = !is_text || state.bytes == 0 || state.bytes + entry.bytes() <= texts;
            if fits || self.spool(&mut state, &mut entry) {
                break;
            }
            let waited = self.changed.wait(state);
            state = unpoisoned(waited);
        }
        state.bytes += entry.bytes();
        state.items.push_back(entry);
        self.changed.notify_all();
        true
    }

    /// Puts a transaction's text into the temporary directory, if there is room. If that fails, memory is all there is,
    /// and may have room.
    fn spool(&self, state: &mut State, entry: &mut Entry) -> bool {
        let Item::Transaction(t) = &mut entry.item else {
            return false;
        };
        if state.bytes >= self.limit || !state.spool.has_room(t.bytes()) {
            return false;
        }
        match state.spool.write(t.text()) {
            Ok(at) => {
                t.forget_text();
                entry.spooled_at = Some(at);
                true
            }
            Err(e) => {
                tracing::warn!("events wait in memory alone from now on: {e}");
                state.spool.limit = 0;
                state.bytes + t.bytes() <= self.limit
            }
        }
    }

    fn pop(&self, patience: Duration) -> Option<Item> {
        let state = self.state();
        let waited = self
            .changed
            .wait_timeout_while(state, patience, |s| s.items.is_empty());
        let (mut state, _) = unpoisoned(waited);
        let mut entry = state.items.pop_front()?;
        state.bytes -= entry.bytes();
        self.changed.notify_all();
        if let (Some(at), Item::Transaction(t)) = (entry.spooled_at, &mut entry.item) {
            match state.spool.read(at, t.text_len()) {
                Ok(text) => t.put_text(text),
                Err(e) => return Some(Item::Failed(e)),
            }
        }
        Some(entry.item)
    }

    /// Waits, unless nobody takes any more.
    fn pause(&self, pause: Duration) {
        let state = self.state();
        // What comes meanwhile is the result either way.
        let _ = unpoisoned(self.changed.wait_timeout_while(state, pause, |s| !s.closed));
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
    /// Bytes of memory that what waits takes.
    pub(super) buffered_bytes: u64,
    /// Bytes of events that wait in the temporary directory.
    pub(super) spooled_bytes: u64,
    /// For how long nothing could be watched.
    pub(super) down_for: Option<Duration>,
}

/// A watch on a thread of its own. Dropping it ends it.
pub(super) struct Tail {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

impl Tail {
    /// Goes on behind where `feed` stands; as much waits as there is room for, and one transaction whatever its size.
    pub(super) fn start(
        feed: Feed,
        room: Room,
        bandwidth: Option<(Bandwidth, Cancel)>,
    ) -> std::io::Result<Self> {
        let queue = Arc::new(Queue::new(room, feed.current()));
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
        self.queue.state().items.push_front(Entry::new(item));
    }

    pub(super) fn pulse(&self) -> Pulse {
        let state = self.queue.state();
        Pulse {
            buffered_bytes: state.bytes,
            spooled_bytes: state.spool.waiting,
            down_for: state.down.map(|since| since.elapsed()),
            ..state.seen.clone()
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
            state.seen.current = feed.current();
            state.seen.reconnects = feed.reconnects();
            if next.is_ok() {
                (state.down, state.seen.failure) = (None, None);
                pause = PAUSES.0;
            }
        }
        let item = match next {
            Ok(Next::Idle | Next::Verified) => continue,
            Ok(Next::Transaction(t)) => {
                seen = seen.max(Utc::now());
                let encoded = Encoded::new(&t, feed.position(), seen);
                // Cancelled, all ends soon.
                if let Some((limit, cancel)) = bandwidth
                    && limit.take(encoded.bytes(), cancel).is_err()
                {
                    return;
                }
                Item::Transaction(encoded)
            }
            Ok(Next::Ended(ended)) => Item::Ended(ended),
            Err(e) if e.reason().is_retryable() => {
                tracing::warn!(reason = e.reason().as_str(), "no watch: {e}");
                let mut state = queue.state();
                state.seen.failures += 1;
                state.seen.failure.get_or_insert(e.reason());
                state.down.get_or_insert_with(Instant::now);
                drop(state);
                queue.pause(pause);
                pause = (pause * 2).min(PAUSES.1);
                continue;
            }
            Err(e) => Item::Failed(e),
        };
        let is_last = !matches!(item, Item::Transaction(_));
        if !queue.push(item) || is_last {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::etcd::feed::{KeyChange, Position, Transaction};

    fn transaction(revision: i64, bytes: usize) -> Encoded {
        let change = KeyChange {
            key: b"k".to_vec(),
            value: vec![0; bytes],
            mod_revision: revision,
            ..KeyChange::default()
        };
        let changes = vec![change];
        let t = Transaction { revision, changes };
        Encoded::new(&t, Position::after(&t), DateTime::UNIX_EPOCH)
    }

    fn queue(memory: u64, spool: u64) -> Arc<Queue> {
        let dir = Dir::new(std::env::temp_dir(), false);
        Arc::new(Queue::new(Room { memory, spool, dir }, 0))
    }

    fn assert_is(item: Option<Item>, revision: i64, bytes: usize) {
        match item {
            Some(Item::Transaction(t)) => {
                let whole = transaction(revision, bytes);
                assert_eq!(t.position(), whole.position());
                assert_eq!(t.text(), whole.text());
            }
            _ => panic!("no transaction {revision}"),
        }
    }

    #[test]
    fn the_watch_waits_where_the_buffer_is_full_and_one_transaction_always_fits() {
        let queue = queue(1000, 0);
        // Larger than the whole buffer, and several in it.
        let bytes = |revision| if revision % 7 == 0 { 5000 } else { 100 };
        let theirs = Arc::clone(&queue);
        let pushing = std::thread::spawn(move || {
            for revision in 1..=50 {
                let t = transaction(revision, bytes(revision));
                assert!(theirs.push(Item::Transaction(t)));
                let state = theirs.state();
                assert!(
                    state.bytes <= 1000 || state.items.len() == 1,
                    "{}",
                    state.bytes
                );
                assert!(state.spool.file.is_none());
            }
        });
        for revision in 1..=50 {
            let item = queue.pop(Duration::from_secs(60));
            assert_is(item, revision, bytes(revision));
        }
        pushing.join().unwrap();
        assert_eq!(queue.state().bytes, 0);
        queue.state().closed = true;
        assert!(!queue.push(Item::Ended(Ended::Forked)));
    }

    #[test]
    fn what_memory_has_no_room_for_waits_in_the_temporary_directory_in_order() {
        let queue = queue(100_000, 1_000_000);
        let bytes = |revision: i64| (revision % 5) as usize * 1000;
        for round in 0..2 {
            let revisions = round * 100 + 1..=round * 100 + 100;
            for revision in revisions.clone() {
                let t = transaction(revision, bytes(revision));
                assert!(queue.push(Item::Transaction(t)));
            }
            assert!(queue.push(Item::Ended(Ended::Forked)));
            {
                let state = queue.state();
                assert!(state.bytes <= 100_000, "{}", state.bytes);
                assert!(state.spool.texts > 50, "{}", state.spool.texts);
            }
            for revision in revisions {
                assert_is(queue.pop(Duration::ZERO), revision, bytes(revision));
                let state = queue.state();
                let spooled = state.items.iter().filter(|e| e.spooled_at.is_some());
                let waiting = spooled.map(|e| match &e.item {
                    Item::Transaction(t) => t.text_len() as u64,
                    _ => 0,
                });
                assert_eq!(state.spool.waiting, waiting.sum::<u64>());
            }
            let end = queue.pop(Duration::ZERO);
            assert!(matches!(end, Some(Item::Ended(Ended::Forked))));
            let state = queue.state();
            // Its room is free again.
            assert_eq!((state.bytes, state.spool.texts), (0, 0));
            assert!(state.spool.file.is_none());
        }
    }

    /// Which revision finds no room.
    fn first_without_room(queue: &Arc<Queue>) -> i64 {
        let theirs = Arc::clone(queue);
        let pushing = std::thread::spawn(move || {
            (1..)
                .find(|&revision| !theirs.push(Item::Transaction(transaction(revision, 1000))))
                .unwrap()
        });
        // It waits for room, or is about to.
        let count = || queue.state().items.len();
        let mut before = usize::MAX;
        while before != count() {
            before = count();
            std::thread::sleep(Duration::from_millis(200));
        }
        queue.state().closed = true;
        queue.changed.notify_all();
        pushing.join().unwrap()
    }

    #[test]
    fn room_ends_in_the_temporary_directory_too() {
        let text = transaction(1, 1000).bytes() as i64;
        let with = |spool| first_without_room(&queue(20_000, spool));
        assert_eq!(with(0), 20_000 / text + 1);
        let spooled = 5;
        let spool = (spooled * text + text / 2) as u64;
        assert_eq!(with(spool), 10_000 / text + spooled + 1);
        // What is known of each takes memory as well.
        let most = with(u64::MAX);
        assert!(most < 20_000 / size_of::<Entry>() as i64, "{most}");
    }

    #[test]
    fn a_temporary_directory_that_takes_nothing_is_done_without() {
        let dir = Dir::new("/proc/no/such/folder", false);
        let room = Room {
            memory: 20_000,
            spool: 1_000_000,
            dir,
        };
        let queue = Arc::new(Queue::new(room, 0));
        let text = transaction(1, 1000).bytes() as i64;
        assert_eq!(first_without_room(&queue), 20_000 / text + 1);
    }
}
