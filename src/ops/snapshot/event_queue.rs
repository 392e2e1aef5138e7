//! The queue between the watch and the follower: transactions in unnamed files in the temporary directory.
//!
//! While the store is away, the queue takes as much as its limit allows. Then the watch pauses, and etcd keeps the
//! events. It pauses as well while the temporary directory takes nothing. A large queue pays off: a watch that is far
//! behind receives only some thousand revisions a second, and none that etcd has compacted meanwhile. This module does
//! not save anything.

use super::delta_builder::{EncodedTransaction, READ_EVENTS, WRITE_EVENTS};
use crate::base::Cancel;
use crate::base::opt;
use crate::base::temp::{Dir, TempFile};
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Reason, Result};
use crate::etcd::feed::{Confirmed, Ended, Feed, Next, RaftProgress};
use crate::prefix::{Context, free_space};
use crate::store::Bandwidth;
use chrono::{DateTime, Utc};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The longest wait for the next transaction of the watch.
const WATCH_TIMEOUT: Duration = Duration::from_secs(1);
/// The first and the longest back-off before a failed watch is started again.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));
/// How often the answer to a question over the watch is looked for.
const TICK: Duration = Duration::from_millis(100);
/// The pause before events that could not be written to the temporary directory are written again.
const WRITE_PAUSE: Duration = Duration::from_secs(1);
/// How often a failure is logged that goes on.
pub(super) const WARNING_INTERVAL: Duration = Duration::from_secs(60);
/// The maximum size of the files together, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 30;
/// A file of the limit divided by this number takes no more transactions: the next ones go to another file, so that
/// its space is given back although others wait.
const FILES: u64 = 16;
/// If all of a file was read, a smaller file takes further transactions. A larger one is removed.
const CONTINUED_FILE_BYTES: u64 = 1 << 20;

/// Returns the maximum size of the files together, in bytes. The temporary directory must also hold a full and two deltas.
fn max_file_bytes(ctx: &Context) -> u64 {
    let free = free_space::free_bytes(&ctx.temp_dir).unwrap_or(u64::MAX);
    MAX_FILE_BYTES.min(free.min(ctx.limits.database_bytes) / 4)
}

/// What the watch delivers.
pub(super) enum WatchOutput {
    Transaction(EncodedTransaction),
    /// The watch cannot continue from its position.
    Ended(Ended),
    /// The watch has failed, and a retry cannot help.
    Failed(Error),
}

/// The transactions that wait, in temporary files.
struct Waiting {
    dir: Dir,
    /// The maximum size of the files together, in bytes.
    limit: u64,
    /// The oldest file comes first. Only the last one may have been read to its end.
    files: VecDeque<WaitingFile>,
    /// The origin of the times in the files.
    epoch: Instant,
}

struct WaitingFile {
    file: TempFile,
    /// The offset of the first transaction that was not read.
    read_to: u64,
    /// The offset after the last transaction.
    end: u64,
    /// Whether a write has failed: the file takes no more transactions.
    is_broken: bool,
}

impl WaitingFile {
    fn waiting_bytes(&self) -> u64 {
        self.end - self.read_to
    }
}

impl Waiting {
    fn new(dir: Dir, limit: u64) -> Self {
        Waiting {
            dir,
            limit,
            files: VecDeque::new(),
            epoch: Instant::now(),
        }
    }

    fn is_empty(&self) -> bool {
        self.waiting_bytes() == 0
    }

    /// Returns the size of the transactions that wait, in bytes.
    fn waiting_bytes(&self) -> u64 {
        self.files.iter().map(WaitingFile::waiting_bytes).sum()
    }

    /// Whether a transaction of this size in a file fits. An empty queue takes one of any size. A transaction that was
    /// read counts until its file is removed, because it takes space until then.
    fn has_room(&self, bytes: u64) -> bool {
        let size: u64 = self.files.iter().map(|f| f.end).sum();
        self.is_empty() || size + bytes <= self.limit
    }

    /// Appends a transaction.
    ///
    /// # Errors
    /// `Io`, `NoSpace`, `PermissionDenied`. The transactions before this one can still be read.
    fn push(&mut self, transaction: &EncodedTransaction) -> Result<()> {
        let takes_more = |last: &WaitingFile| !last.is_broken && last.end < self.limit / FILES;
        if !self.files.back().is_some_and(takes_more) {
            self.files.push_back(WaitingFile {
                file: self.dir.file()?,
                read_to: 0,
                end: 0,
                is_broken: false,
            });
        }
        let last = self.files.len() - 1;
        let last = &mut self.files[last];
        let written = transaction.write(&mut last.file, self.epoch);
        if written.is_ok() {
            last.end += transaction.file_bytes();
        } else {
            last.is_broken = true;
        }
        self.remove_read_files();
        written.map_err(|e| Error::io(opt::fill(WRITE_EVENTS), e))
    }

    /// Removes the first transaction; `None` if none waits.
    ///
    /// # Errors
    /// `Io`.
    fn pop(&mut self) -> Result<Option<EncodedTransaction>> {
        let mut files = self.files.iter_mut();
        let Some(first) = files.find(|f| f.waiting_bytes() > 0) else {
            return Ok(None);
        };
        let transaction = EncodedTransaction::read(&first.file, first.read_to, self.epoch)
            .map_err(|e| Error::io(READ_EVENTS, e))?;
        first.read_to += transaction.file_bytes();
        self.remove_read_files();
        Ok(Some(transaction))
    }

    /// Removes the files that were read, and broken ones that hold nothing. The last file is continued, unless it
    /// is large.
    fn remove_read_files(&mut self) {
        let last = self.files.len().saturating_sub(1);
        let mut nth = 0;
        self.files.retain(|file| {
            let is_continued = nth == last && !file.is_broken && file.end < CONTINUED_FILE_BYTES;
            nth += 1;
            file.waiting_bytes() > 0 || is_continued
        });
    }
}

struct QueueState {
    transactions: Waiting,
    /// Why the watch has ended, to be delivered after the transactions.
    end: Option<WatchOutput>,
    closed: bool,
    /// The state of the watch, without the fields that are computed from the queue.
    watch: WatchStatus,
    /// Whether the watch is to ask for the revision of the cluster.
    is_asked: bool,
    /// Since when the watch has been failing.
    down_since: Option<Instant>,
    /// When to log again that the temporary directory takes nothing.
    next_warning: Instant,
}

impl QueueState {
    /// Records that the temporary directory does not take events.
    fn record_pause(&mut self, e: &Error) {
        let now = Instant::now();
        if self.watch.paused.is_none() {
            self.watch.failures += 1;
            self.watch.failure.get_or_insert(e.reason());
            self.next_warning = now;
        }
        let since = self.watch.paused.as_ref().map_or(now, |pause| pause.since);
        self.watch.paused = Some(Pause {
            since,
            reason: e.reason(),
            message: e.to_string(),
        });
        if self.next_warning <= now {
            self.next_warning = now + WARNING_INTERVAL;
            tracing::warn!(
                reason = e.reason().as_str(),
                "the watch pauses until events can be written, and etcd keeps them: {e}"
            );
        }
    }
}

struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

impl Queue {
    fn new(transactions: Waiting, current: i64) -> Self {
        Queue {
            state: Mutex::new(QueueState {
                transactions,
                end: None,
                closed: false,
                watch: WatchStatus {
                    current,
                    ..WatchStatus::default()
                },
                is_asked: false,
                down_since: None,
                next_warning: Instant::now(),
            }),
            changed: Condvar::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, QueueState> {
        lock(&self.state)
    }

    /// Appends a transaction, after waiting until it fits and the temporary directory takes it. Returns false if the
    /// queue is closed.
    fn push(&self, transaction: &EncodedTransaction) -> bool {
        let bytes = transaction.file_bytes();
        let mut state = self.state();
        loop {
            let waited = self
                .changed
                .wait_while(state, |s| !s.closed && !s.transactions.has_room(bytes));
            state = unpoisoned(waited);
            if state.closed {
                return false;
            }
            let Err(e) = state.transactions.push(transaction) else {
                break;
            };
            state.record_pause(&e);
            let waited = self
                .changed
                .wait_timeout_while(state, WRITE_PAUSE, |s| !s.closed);
            (state, _) = unpoisoned(waited);
        }
        if state.watch.paused.take().is_some() {
            tracing::info!("the watch goes on: the temporary directory takes events again");
        }
        self.changed.notify_all();
        true
    }

    /// Sets what is delivered after the transactions.
    fn end(&self, output: WatchOutput) {
        self.state().end = Some(output);
        self.changed.notify_all();
    }

    /// Removes the first output. Returns `None` if there is none within `timeout`.
    fn pop(&self, timeout: Duration) -> Option<WatchOutput> {
        let state = self.state();
        let waited = self.changed.wait_timeout_while(state, timeout, |s| {
            s.transactions.is_empty() && s.end.is_none()
        });
        let (mut state, _) = unpoisoned(waited);
        let output = match state.transactions.pop() {
            Ok(Some(transaction)) => Some(WatchOutput::Transaction(transaction)),
            Ok(None) => state.end.take(),
            Err(e) => Some(WatchOutput::Failed(e)),
        };
        self.changed.notify_all();
        output
    }

    /// Waits for `pause`, or until the queue is closed.
    fn pause(&self, pause: Duration) {
        let state = self.state();
        // The caller checks again whether the queue is closed.
        let _ = unpoisoned(self.changed.wait_timeout_while(state, pause, |s| !s.closed));
    }

    /// Records the state of the watch after it delivered, and lets it ask for the revision if that is wanted. Returns
    /// false if the queue is closed.
    fn record_progress(&self, feed: &mut Feed, succeeded: bool) -> bool {
        let mut state = self.state();
        if state.closed {
            return false;
        }
        state.watch.current = feed.current();
        state.watch.reconnects = feed.reconnects();
        state.watch.raft = feed.raft();
        state.watch.confirmed = feed.confirmed();
        if succeeded {
            (state.down_since, state.watch.failure) = (None, None);
        }
        let is_asked = std::mem::take(&mut state.is_asked);
        drop(state);
        if is_asked {
            feed.ask_revision();
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
    /// What the running watch has shown.
    confirmed: Option<Confirmed>,
    /// The progress of the cluster's raft log at the last connection.
    pub(super) raft: Option<RaftProgress>,
    /// How often the watch has failed.
    pub(super) failures: u64,
    /// Why the watch is failing now; `None` if it works.
    pub(super) failure: Option<Reason>,
    /// Why and since when the watch pauses; `None` if the temporary directory takes its events.
    pub(super) paused: Option<Pause>,
    /// Bytes of events that wait in the temporary directory.
    pub(super) waiting_bytes: u64,
    /// How long the watch has been failing; `None` if it works.
    pub(super) down_for: Option<Duration>,
}

/// A pause of the watch: the temporary directory does not take its events.
#[derive(Debug, Clone)]
pub(super) struct Pause {
    pub(super) since: Instant,
    pub(super) reason: Reason,
    pub(super) message: String,
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
        ctx: &Context,
        feed: Feed,
        bandwidth: Option<(Bandwidth, Cancel)>,
    ) -> std::io::Result<Self> {
        let transactions = Waiting::new(ctx.temp(), max_file_bytes(ctx));
        let queue = Arc::new(Queue::new(transactions, feed.current()));
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
        self.queue.end(output);
    }

    /// Whether the watch shows within `timeout` that the cluster has this revision, without a new connection.
    pub(super) fn confirms(&self, revision: i64, timeout: Duration) -> bool {
        let (began, reconnects) = (Instant::now(), self.status().reconnects);
        while began.elapsed() < timeout {
            self.queue.state().is_asked = true;
            std::thread::sleep(TICK);
            let status = self.status();
            if status.reconnects != reconnects || self.queue.state().end.is_some() {
                return false;
            }
            if status.confirmed.is_some_and(|c| c.shows(revision, began)) {
                return true;
            }
        }
        false
    }

    /// Returns the state of the watch and of the queue.
    pub(super) fn status(&self) -> WatchStatus {
        let state = self.queue.state();
        WatchStatus {
            waiting_bytes: state.transactions.waiting_bytes(),
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
        if !queue.record_progress(&mut feed, next.is_ok()) {
            return;
        }
        if next.is_ok() {
            back_off = BACK_OFF.0;
        }
        let output = match next {
            Ok(Next::Idle | Next::Verified) => continue,
            Ok(Next::Transaction(t, position)) => {
                event_time = event_time.max(Utc::now());
                let encoded = EncodedTransaction::new(&t, position, event_time);
                if let Some((limit, cancel)) = bandwidth
                    && limit.take(encoded.bytes(), cancel).is_err()
                {
                    // The operation was cancelled.
                    return;
                }
                if queue.push(&encoded) {
                    continue;
                }
                // The queue is closed.
                return;
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
        queue.end(output);
        return;
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

    fn queue(limit: u64) -> Arc<Queue> {
        let dir = Dir::new(std::env::temp_dir(), true);
        Arc::new(Queue::new(Waiting::new(dir, limit), 0))
    }

    fn assert_is(output: Option<WatchOutput>, revision: i64, bytes: usize) {
        match output {
            Some(WatchOutput::Transaction(t)) => {
                let whole = transaction(revision, bytes);
                assert_eq!(t.position(), whole.position());
                assert!(t.text == whole.text);
            }
            _ => panic!("no transaction {revision}"),
        }
    }

    /// Returns the size of the files together, in bytes.
    fn size(queue: &Queue) -> u64 {
        let state = queue.state();
        state.transactions.files.iter().map(|f| f.file.len()).sum()
    }

    #[test]
    fn the_watch_waits_while_the_file_is_full_and_one_transaction_always_fits() {
        const LIMIT: u64 = 2000;
        let queue = queue(LIMIT);
        // Some transactions are larger than the whole file; of the others several fit.
        let bytes = |revision| if revision % 7 == 0 { 5000 } else { 100 };
        let queue_of_thread = Arc::clone(&queue);
        let pushing = std::thread::spawn(move || {
            for revision in 1..=50 {
                let t = transaction(revision, bytes(revision));
                assert!(queue_of_thread.push(&t));
                assert!(
                    size(&queue_of_thread) <= LIMIT.max(t.file_bytes()),
                    "{revision}"
                );
            }
        });
        for revision in 1..=50 {
            let output = queue.pop(Duration::from_secs(60));
            assert_is(output, revision, bytes(revision));
        }
        pushing.join().unwrap();
        assert!(queue.state().transactions.is_empty());
        queue.state().closed = true;
        assert!(!queue.push(&transaction(51, 1)));
    }

    #[test]
    fn a_steady_backlog_of_three_quarters_of_the_limit_never_pauses_the_watch() {
        let bytes = transaction(4000, 1000).file_bytes();
        let limit = 400 * bytes;
        let queue = queue(limit);
        for revision in 1..=4000 {
            let t = transaction(revision, 1000);
            assert!(queue.state().transactions.has_room(bytes), "{revision}");
            assert!(queue.push(&t));
            if revision > 300 {
                assert_is(queue.pop(Duration::ZERO), revision - 300, 1000);
            }
            assert!(size(&queue) <= limit, "{revision}");
        }
        assert_eq!(queue.state().transactions.waiting_bytes(), 300 * bytes);
    }

    #[test]
    fn transactions_wait_in_order_before_the_end_and_a_large_file_that_was_read_is_removed() {
        let queue = queue(u64::MAX);
        let bytes = |revision: i64| (revision % 5) as usize * 1000;
        for round in 0..8 {
            let revisions = round * 100 + 1..=round * 100 + 100;
            for revision in revisions.clone() {
                assert!(queue.push(&transaction(revision, bytes(revision))));
            }
            queue.end(WatchOutput::Ended(Ended::SetBack { same_up_to: None }));
            for revision in revisions {
                assert_is(queue.pop(Duration::ZERO), revision, bytes(revision));
            }
            let end = queue.pop(Duration::ZERO);
            assert!(matches!(
                end,
                Some(WatchOutput::Ended(Ended::SetBack { same_up_to: None }))
            ));
            assert!(queue.pop(Duration::ZERO).is_none());
            let kept = size(&queue);
            assert!(kept < CONTINUED_FILE_BYTES, "{kept}");
        }
        // 1.1 MB were written to the first file, the rest to a second one.
        let kept = size(&queue);
        assert!(kept < 8 * 280_000 - CONTINUED_FILE_BYTES, "{kept}");
    }

    /// Returns whether the watch pauses.
    fn is_paused(queue: &Queue) -> bool {
        queue.state().watch.paused.is_some()
    }

    #[test]
    fn after_a_failed_write_the_next_file_takes_the_transaction() {
        let queue = queue(u64::MAX);
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        let open = std::fs::File::options().read(true).write(true).open(&path);
        queue.state().transactions.files.push_back(WaitingFile {
            file: TempFile::plain(open.unwrap()).unwrap(),
            read_to: 0,
            end: 0,
            is_broken: false,
        });
        for revision in 1..=3 {
            assert!(queue.push(&transaction(revision, 10)));
        }
        let read_only = std::fs::File::open(&path).unwrap();
        queue.state().transactions.files[0].file = TempFile::plain(read_only).unwrap();
        assert!(queue.push(&transaction(4, 10)));
        assert!(!is_paused(&queue));
        for revision in 1..=4 {
            assert_is(queue.pop(Duration::ZERO), revision, 10);
        }
    }

    /// The directory is away and comes back, with and without transactions that wait; the queue is not locked meanwhile.
    #[test]
    fn the_watch_pauses_while_the_directory_takes_nothing() {
        for waiting in [0, 2] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("temp");
            std::fs::create_dir(&path).unwrap();
            // A file takes one transaction.
            let waiting_files = Waiting::new(Dir::new(&path, false), 100 * FILES);
            let queue = Arc::new(Queue::new(waiting_files, 0));
            for revision in 1..=waiting {
                assert!(queue.push(&transaction(revision, 100)));
            }
            std::fs::remove_dir(&path).unwrap();
            let queue_of_thread = Arc::clone(&queue);
            let pushing =
                std::thread::spawn(move || queue_of_thread.push(&transaction(waiting + 1, 100)));
            while !is_paused(&queue) {
                std::thread::sleep(Duration::from_millis(10));
            }
            let message = queue.state().watch.paused.clone().unwrap().message;
            assert!(message.contains("temp-dir"), "{message}");
            for revision in 1..=waiting {
                assert_is(queue.pop(Duration::ZERO), revision, 100);
            }
            assert!(queue.pop(Duration::ZERO).is_none());
            std::fs::create_dir(&path).unwrap();
            assert_is(queue.pop(Duration::from_secs(60)), waiting + 1, 100);
            assert!(pushing.join().unwrap());
            assert!(!is_paused(&queue));
        }
    }

    #[test]
    fn a_watch_that_pauses_ends_with_its_queue() {
        let dir = Dir::new("/proc/no/such/folder", false);
        let queue = Arc::new(Queue::new(Waiting::new(dir, 1000), 0));
        let queue_of_thread = Arc::clone(&queue);
        let pushing = std::thread::spawn(move || queue_of_thread.push(&transaction(1, 10)));
        while !is_paused(&queue) {
            std::thread::sleep(Duration::from_millis(10));
        }
        queue.state().closed = true;
        queue.changed.notify_all();
        assert!(!pushing.join().unwrap());
    }
}
