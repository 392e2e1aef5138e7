//! The queue between the watch and the follower: a bounded buffer in memory, then in the temporary directory.
//!
//! While the store is away, the queue takes as much as its limits allow; then the watch pauses and etcd keeps
//! the events. A large buffer pays off: a watch that is far behind receives only some thousand revisions a
//! second, and none that etcd has compacted meanwhile. This module does not save anything. Called by
//! [`super::follow`].

use super::delta_builder::EncodedTransaction;
use crate::base::Cancel;
use crate::base::ReadAt as _;
use crate::base::temp::{Dir, TempFile};
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Reason, Result};
use crate::etcd::feed::{Ended, Feed, Next, RaftProgress};
use crate::store::Bandwidth;
use chrono::{DateTime, Utc};
use std::collections::VecDeque;
use std::io::Write as _;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The longest wait for the next transaction of the watch.
const WATCH_TIMEOUT: Duration = Duration::from_secs(1);
/// The first and the longest back-off before a failed watch is started again.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));

/// What the watch delivers.
pub(super) enum WatchOutput {
    Transaction(EncodedTransaction),
    /// The watch cannot continue from its position.
    Ended(Ended),
    /// The watch has failed, and a retry cannot help.
    Failed(Error),
}

/// An output in the queue.
struct QueuedOutput {
    output: WatchOutput,
    /// The offset of the transaction's text in the spool file; `None` if the text is in memory.
    spooled_at: Option<u64>,
}

impl QueuedOutput {
    fn in_memory(output: WatchOutput) -> Self {
        QueuedOutput {
            output,
            spooled_at: None,
        }
    }

    /// Returns the memory that counts toward the limit, in bytes. For a text in memory, the small rest is not
    /// counted.
    fn memory(&self) -> u64 {
        match (&self.output, self.spooled_at) {
            (WatchOutput::Transaction(t), None) => t.bytes(),
            (WatchOutput::Transaction(t), Some(_)) => (size_of::<Self>() + t.overhead()) as u64,
            _ => 0,
        }
    }
}

/// The texts of transactions in the temporary directory.
struct Spool {
    dir: Dir,
    /// The largest size of the file, in bytes.
    limit: u64,
    /// The file exists only while a text waits in it.
    file: Option<TempFile>,
    /// Number of texts that wait.
    texts: usize,
    /// Bytes of the texts that wait. The file also holds texts that were read already.
    waiting: u64,
}

impl Spool {
    fn has_room(&self, bytes: u64) -> bool {
        let used = self.file.as_ref().map_or(0, TempFile::len);
        used + bytes <= self.limit
    }

    /// Appends a text and returns its offset.
    fn write(&mut self, text: &[u8]) -> Result<u64> {
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(self.dir.file()?),
        };
        let offset = file.len();
        if let Err(e) = file.write_all(text) {
            if self.texts == 0 {
                self.file = None;
            }
            return Err(Error::io("write events to the temporary directory", e));
        }
        self.texts += 1;
        self.waiting += text.len() as u64;
        Ok(offset)
    }

    /// Reads a text, and removes the file after the last one.
    fn take(&mut self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut text = vec![0; len];
        let file = self.file.as_ref();
        let read = file.map_or(Ok(()), |f| f.read_exact_at(&mut text, offset));
        read.map_err(|e| Error::io("read events from the temporary directory", e))?;
        self.texts -= 1;
        self.waiting -= len as u64;
        if self.texts == 0 {
            self.file = None;
        }
        Ok(text)
    }
}

/// The limits of the queue.
pub(super) struct QueueLimits {
    /// Bytes in memory. If the spool is allowed, texts take at most half of it.
    pub(super) memory: u64,
    /// Bytes in the temporary directory; 0 disables the spool.
    pub(super) spool: u64,
    /// The temporary directory.
    pub(super) dir: Dir,
}

struct QueueState {
    outputs: VecDeque<QueuedOutput>,
    /// Bytes of memory that the outputs take.
    memory: u64,
    spool: Spool,
    closed: bool,
    /// The state of the watch, without the fields that are computed from the queue.
    watch: WatchStatus,
    /// Since when the watch has been failing.
    down_since: Option<Instant>,
}

struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
    memory_limit: u64,
}

impl Queue {
    fn new(limits: QueueLimits, current: i64) -> Self {
        let spool = Spool {
            dir: limits.dir,
            limit: limits.spool,
            file: None,
            texts: 0,
            waiting: 0,
        };
        Queue {
            state: Mutex::new(QueueState {
                outputs: VecDeque::new(),
                memory: 0,
                spool,
                closed: false,
                watch: WatchStatus {
                    current,
                    ..WatchStatus::default()
                },
                down_since: None,
            }),
            changed: Condvar::new(),
            memory_limit: limits.memory,
        }
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        lock(&self.state)
    }

    /// Appends an output, after waiting until the limits allow it. An empty queue takes a transaction of any
    /// size. Returns false if the queue is closed.
    fn push(&self, output: WatchOutput) -> bool {
        let mut queued = QueuedOutput::in_memory(output);
        let mut state = self.state();
        loop {
            if state.closed {
                return false;
            }
            let text_limit = match state.spool.limit {
                0 => self.memory_limit,
                _ => self.memory_limit / 2,
            };
            let is_text = matches!(queued.output, WatchOutput::Transaction(_));
            let fits =
                !is_text || state.memory == 0 || state.memory + queued.memory() <= text_limit;
            if fits || self.spool(&mut state, &mut queued) {
                break;
            }
            let waited = self.changed.wait(state);
            state = unpoisoned(waited);
        }
        state.memory += queued.memory();
        state.outputs.push_back(queued);
        self.changed.notify_all();
        true
    }

    /// Moves a transaction's text into the temporary directory if there is room. Returns whether the
    /// transaction may be queued. If the directory cannot be written, disables it: then all of the memory is
    /// for texts.
    fn spool(&self, state: &mut QueueState, queued: &mut QueuedOutput) -> bool {
        let WatchOutput::Transaction(transaction) = &mut queued.output else {
            return false;
        };
        if state.memory >= self.memory_limit || !state.spool.has_room(transaction.bytes()) {
            return false;
        }
        match state.spool.write(transaction.text()) {
            Ok(offset) => {
                transaction.drop_text();
                queued.spooled_at = Some(offset);
                true
            }
            Err(e) => {
                tracing::warn!("events wait in memory only from now on: {e}");
                state.spool.limit = 0;
                state.memory + transaction.bytes() <= self.memory_limit
            }
        }
    }

    /// Removes the first output. Returns `None` if there is none within `timeout`.
    fn pop(&self, timeout: Duration) -> Option<WatchOutput> {
        let state = self.state();
        let waited = self
            .changed
            .wait_timeout_while(state, timeout, |s| s.outputs.is_empty());
        let (mut state, _) = unpoisoned(waited);
        let mut queued = state.outputs.pop_front()?;
        state.memory -= queued.memory();
        self.changed.notify_all();
        if let (Some(offset), WatchOutput::Transaction(t)) = (queued.spooled_at, &mut queued.output)
        {
            match state.spool.take(offset, t.text_len()) {
                Ok(text) => t.restore_text(text),
                Err(e) => return Some(WatchOutput::Failed(e)),
            }
        }
        Some(queued.output)
    }

    /// Waits for `pause`, or until the queue is closed.
    fn pause(&self, pause: Duration) {
        let state = self.state();
        // The caller checks again whether the queue is closed.
        let _ = unpoisoned(self.changed.wait_timeout_while(state, pause, |s| !s.closed));
    }

    /// Records the state of the watch after it delivered. Returns false if the queue is closed.
    fn record_progress(&self, feed: &Feed, succeeded: bool) -> bool {
        let mut state = self.state();
        if state.closed {
            return false;
        }
        state.watch.current = feed.current();
        state.watch.reconnects = feed.reconnects();
        state.watch.raft = feed.raft();
        if succeeded {
            (state.down_since, state.watch.failure) = (None, None);
        }
        true
    }

    /// Records a failure of the watch that a retry may resolve.
    fn record_failure(&self, e: &Error) {
        let mut state = self.state();
        state.watch.failures += 1;
        state.watch.failure.get_or_insert(e.reason());
        state.down_since.get_or_insert_with(Instant::now);
    }
}

/// The state of a watch and its queue.
#[derive(Debug, Clone, Default)]
pub(super) struct WatchStatus {
    /// The newest revision of the cluster that the watch has seen.
    pub(super) current: i64,
    pub(super) reconnects: u64,
    /// The progress of the cluster's raft log at the last connection.
    pub(super) raft: Option<RaftProgress>,
    /// How often the watch has failed.
    pub(super) failures: u64,
    /// Why the watch is failing now; `None` if it works.
    pub(super) failure: Option<Reason>,
    /// Bytes of memory that waiting transactions take.
    pub(super) buffered_bytes: u64,
    /// Bytes of events that wait in the temporary directory.
    pub(super) spooled_bytes: u64,
    /// How long the watch has been failing; `None` if it works.
    pub(super) down_for: Option<Duration>,
}

/// A watch on its own thread. Dropping it ends the thread.
pub(super) struct WatchThread {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

impl WatchThread {
    /// Starts to watch from the position of `feed`.
    ///
    /// # Errors
    /// Fails if the system cannot start a thread.
    pub(super) fn start(
        feed: Feed,
        limits: QueueLimits,
        bandwidth: Option<(Bandwidth, Cancel)>,
    ) -> std::io::Result<Self> {
        let queue = Arc::new(Queue::new(limits, feed.current()));
        let thread_queue = Arc::clone(&queue);
        let thread = std::thread::Builder::new()
            .name("watch".to_owned())
            .spawn(move || fill_queue(feed, &thread_queue, bandwidth.as_ref()))?;
        Ok(WatchThread {
            queue,
            thread: Some(thread),
        })
    }

    /// Removes the first output of the queue. Returns `None` if there is none within `timeout`.
    pub(super) fn pop(&self, timeout: Duration) -> Option<WatchOutput> {
        self.queue.pop(timeout)
    }

    /// Puts back an output that is not a transaction, for the next [`pop`](Self::pop).
    pub(super) fn put_back(&self, output: WatchOutput) {
        let queued = QueuedOutput::in_memory(output);
        self.queue.state().outputs.push_front(queued);
    }

    /// Returns the state of the watch and of the queue.
    pub(super) fn status(&self) -> WatchStatus {
        let state = self.queue.state();
        WatchStatus {
            buffered_bytes: state.memory,
            spooled_bytes: state.spool.waiting,
            down_for: state.down_since.map(|since| since.elapsed()),
            ..state.watch.clone()
        }
    }
}

impl Drop for WatchThread {
    fn drop(&mut self) {
        self.queue.state().closed = true;
        self.queue.changed.notify_all();
        // The thread checks about once a second whether the queue is closed. It must not outlive its owner.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The body of the watch's thread: moves what the feed delivers into the queue, until the feed ends or the
/// queue is closed.
fn fill_queue(mut feed: Feed, queue: &Queue, bandwidth: Option<&(Bandwidth, Cancel)>) {
    let mut back_off = BACK_OFF.0;
    // The recorded times never decrease, even if the clock is set back.
    let mut event_time = DateTime::<Utc>::MIN_UTC;
    loop {
        let next = feed.next(WATCH_TIMEOUT);
        if !queue.record_progress(&feed, next.is_ok()) {
            return;
        }
        if next.is_ok() {
            back_off = BACK_OFF.0;
        }
        let output = match next {
            Ok(Next::Idle | Next::Verified) => continue,
            Ok(Next::Transaction(t)) => {
                event_time = event_time.max(Utc::now());
                let encoded = EncodedTransaction::new(&t, feed.position(), event_time);
                if let Some((limit, cancel)) = bandwidth
                    && limit.take(encoded.bytes(), cancel).is_err()
                {
                    // The operation was cancelled.
                    return;
                }
                WatchOutput::Transaction(encoded)
            }
            Ok(Next::Ended(ended)) => WatchOutput::Ended(ended),
            Err(e) if e.reason().is_retryable() => {
                tracing::warn!(reason = e.reason().as_str(), "cannot watch etcd: {e}");
                queue.record_failure(&e);
                queue.pause(back_off);
                back_off = (back_off * 2).min(BACK_OFF.1);
                continue;
            }
            Err(e) => WatchOutput::Failed(e),
        };
        let is_last = !matches!(output, WatchOutput::Transaction(_));
        if !queue.push(output) || is_last {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::etcd::feed::{KeyChange, Position, Transaction};

    fn transaction(revision: i64, bytes: usize) -> EncodedTransaction {
        let change = KeyChange {
            key: b"k".to_vec(),
            value: vec![0; bytes],
            mod_revision: revision,
            ..KeyChange::default()
        };
        let changes = vec![change];
        let t = Transaction { revision, changes };
        EncodedTransaction::new(&t, Position::after(&t), DateTime::UNIX_EPOCH)
    }

    fn queue(memory: u64, spool: u64) -> Arc<Queue> {
        let dir = Dir::new(std::env::temp_dir(), false);
        Arc::new(Queue::new(QueueLimits { memory, spool, dir }, 0))
    }

    fn assert_is(output: Option<WatchOutput>, revision: i64, bytes: usize) {
        match output {
            Some(WatchOutput::Transaction(t)) => {
                let whole = transaction(revision, bytes);
                assert_eq!(t.position(), whole.position());
                assert_eq!(t.text(), whole.text());
            }
            _ => panic!("no transaction {revision}"),
        }
    }

    #[test]
    fn the_watch_waits_while_the_buffer_is_full_and_one_transaction_always_fits() {
        let queue = queue(1000, 0);
        // Some transactions are larger than the whole buffer; of the others several fit.
        let bytes = |revision| if revision % 7 == 0 { 5000 } else { 100 };
        let queue_of_thread = Arc::clone(&queue);
        let pushing = std::thread::spawn(move || {
            for revision in 1..=50 {
                let t = transaction(revision, bytes(revision));
                assert!(queue_of_thread.push(WatchOutput::Transaction(t)));
                let state = queue_of_thread.state();
                assert!(
                    state.memory <= 1000 || state.outputs.len() == 1,
                    "{}",
                    state.memory
                );
                assert!(state.spool.file.is_none());
            }
        });
        for revision in 1..=50 {
            let output = queue.pop(Duration::from_secs(60));
            assert_is(output, revision, bytes(revision));
        }
        pushing.join().unwrap();
        assert_eq!(queue.state().memory, 0);
        queue.state().closed = true;
        assert!(!queue.push(WatchOutput::Ended(Ended::SetBack { same_up_to: None })));
    }

    #[test]
    fn transactions_beyond_the_memory_limit_wait_in_the_temporary_directory_in_order() {
        let queue = queue(100_000, 1_000_000);
        let bytes = |revision: i64| (revision % 5) as usize * 1000;
        for round in 0..2 {
            let revisions = round * 100 + 1..=round * 100 + 100;
            for revision in revisions.clone() {
                let t = transaction(revision, bytes(revision));
                assert!(queue.push(WatchOutput::Transaction(t)));
            }
            assert!(queue.push(WatchOutput::Ended(Ended::SetBack { same_up_to: None })));
            {
                let state = queue.state();
                assert!(state.memory <= 100_000, "{}", state.memory);
                assert!(state.spool.texts > 50, "{}", state.spool.texts);
            }
            for revision in revisions {
                assert_is(queue.pop(Duration::ZERO), revision, bytes(revision));
                let state = queue.state();
                let spooled = state.outputs.iter().filter(|e| e.spooled_at.is_some());
                let waiting = spooled.map(|e| match &e.output {
                    WatchOutput::Transaction(t) => t.text_len() as u64,
                    _ => 0,
                });
                assert_eq!(state.spool.waiting, waiting.sum::<u64>());
            }
            let end = queue.pop(Duration::ZERO);
            assert!(matches!(
                end,
                Some(WatchOutput::Ended(Ended::SetBack { same_up_to: None }))
            ));
            let state = queue.state();
            // All space is free again.
            assert_eq!((state.memory, state.spool.texts), (0, 0));
            assert!(state.spool.file.is_none());
        }
    }

    /// Pushes transactions until one does not fit, and returns its revision.
    fn first_without_room(queue: &Arc<Queue>) -> i64 {
        let queue_of_thread = Arc::clone(queue);
        let pushing = std::thread::spawn(move || {
            (1..)
                .find(|&revision| {
                    !queue_of_thread.push(WatchOutput::Transaction(transaction(revision, 1000)))
                })
                .unwrap()
        });
        // Wait until the pushing thread is blocked.
        let count = || queue.state().outputs.len();
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
    fn the_spool_is_bounded() {
        let text = transaction(1, 1000).bytes() as i64;
        let with = |spool| first_without_room(&queue(20_000, spool));
        assert_eq!(with(0), 20_000 / text + 1);
        let spooled = 5;
        let spool = (spooled * text + text / 2) as u64;
        assert_eq!(with(spool), 10_000 / text + spooled + 1);
        // The bookkeeping of each spooled transaction takes memory, too.
        let most = with(u64::MAX);
        assert!(most < 20_000 / size_of::<QueuedOutput>() as i64, "{most}");
    }

    #[test]
    fn an_unwritable_temporary_directory_leaves_all_memory_to_texts() {
        let dir = Dir::new("/proc/no/such/folder", false);
        let limits = QueueLimits {
            memory: 20_000,
            spool: 1_000_000,
            dir,
        };
        let queue = Arc::new(Queue::new(limits, 0));
        let text = transaction(1, 1000).bytes() as i64;
        assert_eq!(first_without_room(&queue), 20_000 / text + 1);
    }
}
