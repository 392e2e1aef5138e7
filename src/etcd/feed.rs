//! A feed of the changes of a live etcd, transaction by transaction, from a revision on.
//!
//! It watches all keys at one member, and switches to another member if that fails. It never joins two
//! histories: every watch begins with the last known transactions, and these must equal the known ones; and the
//! raft log must not be shorter than before. Called by `ops::snapshot`, which saves the changes.

use crate::error::{Error, Reason, Result};
use crate::etcd::connect::{AttemptError, Connector, Streams};
use etcd_client::{Client, GetOptions, WatchOptions, WatchResponse, WatchStream};
use sha2::{Digest, Sha256};
use std::collections::{HashSet, VecDeque};
use std::ops::{AddAssign, SubAssign};
use std::time::{Duration, Instant};

/// How often the progress of the cluster is checked while the watched member sends nothing.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// How long a member may lag behind the cluster before the feed switches to another member.
const STALLED_AFTER: Duration = Duration::from_secs(15);

/// A change of a key. A deletion has only a key and a revision.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeyChange {
    /// Whether the key was deleted.
    pub delete: bool,
    /// The key.
    pub key: Vec<u8>,
    /// The revision that created the key.
    pub create_revision: i64,
    /// The revision of the change.
    pub mod_revision: i64,
    /// The number of writes since the key was created.
    pub version: i64,
    /// The value.
    pub value: Vec<u8>,
    /// The lease that the key is attached to, or 0.
    pub lease: i64,
}

impl KeyChange {
    /// Returns the approximate memory use in bytes.
    pub fn bytes(&self) -> usize {
        self.key.len() + self.value.len() + 64
    }

    /// Returns a SHA-256 of all that a snapshot saves of this change.
    pub fn digest(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        let mut bytes = |b: &[u8]| {
            hash.update((b.len() as u64).to_le_bytes());
            hash.update(b);
        };
        bytes(&[u8::from(self.delete)]);
        bytes(&self.key);
        // Snapshots save nothing else of a deletion.
        if !self.delete {
            bytes(&self.value);
            for n in [self.create_revision, self.version, self.lease] {
                bytes(&n.to_le_bytes());
            }
        }
        hash.finalize().into()
    }
}

/// All changes of one revision.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Transaction {
    /// The revision.
    pub revision: i64,
    /// The changes, in order.
    pub changes: Vec<KeyChange>,
}

impl Transaction {
    /// Returns the approximate memory use in bytes.
    pub fn bytes(&self) -> usize {
        self.changes.iter().map(KeyChange::bytes).sum()
    }

    /// Returns a fingerprint that differs from that of any other transaction of the same revision.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(self.bytes(), self.changes.iter().map(KeyChange::digest))
    }
}

/// The number of changes of a revision, their size, and a hash of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint {
    /// The number of changes.
    pub changes: usize,
    /// The approximate size of the changes in bytes.
    pub bytes: usize,
    /// A SHA-256 of the changes' digests.
    pub hash: [u8; 32],
}

impl Fingerprint {
    /// Returns the fingerprint of a transaction of this size in bytes, with changes of these digests.
    pub fn of(bytes: usize, digests: impl Iterator<Item = [u8; 32]>) -> Self {
        let (mut changes, mut hash) = (0, Sha256::new());
        for digest in digests {
            changes += 1;
            hash.update(digest);
        }
        Fingerprint {
            changes,
            bytes,
            hash: hash.finalize().into(),
        }
    }
}

/// A position in the history: everything up to `revision` is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// The last known revision.
    pub revision: i64,
    /// The fingerprint of that revision.
    pub fingerprint: Fingerprint,
}

impl Position {
    /// Returns the position after a transaction.
    pub fn after(transaction: &Transaction) -> Self {
        Position {
            revision: transaction.revision,
            fingerprint: transaction.fingerprint(),
        }
    }

    /// Returns whether changes of the revision are known, so that a watch can compare them.
    pub fn has_changes(&self) -> bool {
        self.fingerprint.changes > 0
    }
}

/// The last known transactions, which a watch compares with those of the cluster. One equal transaction proves
/// little: two histories may release the same lock at the same revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// The transactions, one for each revision; at least one.
    last: VecDeque<Position>,
    size: KnownSize,
    /// The revision of a transaction that is known without its deletions, because a compaction removed them.
    without_deletions: Option<i64>,
}

/// The number of equal transactions that prove that two sources have one history.
const PROOF: i64 = 3;
/// The number of changes that are known, at least one transaction.
pub const MOST_KNOWN_CHANGES: usize = 1000;
/// The size of the changes that are known, in bytes: etcd sends them again with each watch.
const MOST_KNOWN_BYTES: usize = 8 << 20;

/// The number and the size in bytes of known changes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KnownSize {
    changes: usize,
    bytes: usize,
}

impl KnownSize {
    /// Whether no transaction before these is compared.
    pub fn is_enough(&self) -> bool {
        self.changes >= MOST_KNOWN_CHANGES || self.bytes >= MOST_KNOWN_BYTES
    }

    /// Whether the oldest transaction is one too many.
    pub fn is_too_large(&self) -> bool {
        self.changes > MOST_KNOWN_CHANGES || self.bytes > MOST_KNOWN_BYTES
    }
}

impl AddAssign<Fingerprint> for KnownSize {
    fn add_assign(&mut self, transaction: Fingerprint) {
        self.changes += transaction.changes;
        self.bytes += transaction.bytes;
    }
}

impl SubAssign<Fingerprint> for KnownSize {
    fn sub_assign(&mut self, transaction: Fingerprint) {
        self.changes -= transaction.changes;
        self.bytes -= transaction.bytes;
    }
}

impl Known {
    /// Begins with one transaction.
    pub fn new(first: Position) -> Self {
        let mut size = KnownSize::default();
        size += first.fingerprint;
        Known {
            last: VecDeque::from([first]),
            size,
            without_deletions: None,
        }
    }

    /// Says that of the first transaction only the puts are known.
    pub fn without_deletions(mut self) -> Self {
        self.without_deletions = Some(self.first_revision());
        self
    }

    /// Adds the next transaction, and forgets the oldest ones that are too many.
    pub fn push(&mut self, next: Position) {
        if next.revision != self.position().revision + 1 {
            self.last.clear();
            self.size = KnownSize::default();
        }
        self.last.push_back(next);
        self.size += next.fingerprint;
        while self.size.is_too_large() && self.last.len() > 1 {
            self.forget_oldest();
        }
    }

    /// Returns the position after the last transaction.
    pub fn position(&self) -> Position {
        self.last.back().copied().unwrap_or(Position {
            revision: 0,
            fingerprint: Transaction::default().fingerprint(),
        })
    }

    /// Returns the last revision up to which both know the same transactions; `None` if the first revision that both know
    /// differs, or if there is none.
    pub fn same_up_to(&self, other: &Known) -> Option<i64> {
        let both = self.last.iter().filter_map(|p| {
            let theirs = other.last.iter().find(|o| o.revision == p.revision)?;
            Some((p, theirs))
        });
        let same = both.take_while(|(p, theirs)| p == theirs && p.has_changes());
        same.last().map(|(p, _)| p.revision)
    }

    /// Returns whether these transactions and those of another source are proven to be of one history: at least
    /// [`PROOF`] of different revisions are known to both, and all are equal. A history that is shorter must be equal
    /// from revision 2 on.
    pub fn is_proven_by(&self, other: &Known) -> bool {
        let mut equal = 0;
        for theirs in &other.last {
            let ours = self.last.iter().find(|ours| {
                ours.revision == theirs.revision
                    && ours.has_changes()
                    && other.without_deletions != Some(theirs.revision)
            });
            match ours {
                Some(ours) if ours != theirs => return false,
                Some(_) => equal += 1,
                None => {}
            }
        }
        equal >= PROOF.min(other.position().revision - 1)
    }

    fn first_revision(&self) -> i64 {
        self.last.front().map_or(0, |p| p.revision)
    }

    fn forget_oldest(&mut self) {
        if let Some(oldest) = self.last.pop_front() {
            self.size -= oldest.fingerprint;
        }
    }

    /// Forgets the transactions up to a revision, but not the last one.
    fn forget_up_to(&mut self, revision: i64) {
        while self.last.len() > 1 && self.first_revision() <= revision {
            self.forget_oldest();
        }
    }
}

/// How far the raft log of a cluster had come when it had a revision. A cluster that is restored from a snapshot
/// begins a new log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RaftProgress {
    /// The term.
    pub term: u64,
    /// The index of the last entry.
    pub index: u64,
    /// The revision of the cluster.
    pub revision: i64,
}

impl RaftProgress {
    /// Returns whether this can be the progress of the same log later on. Each revision takes an entry at least.
    pub fn may_follow(&self, before: &RaftProgress) -> bool {
        let revisions = self.revision.saturating_sub(before.revision).max(0);
        self.term >= before.term && self.index >= before.index.saturating_add(revisions as u64)
    }
}

/// Why the feed cannot continue from its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The cluster has compacted the next revision, or the position itself.
    Compacted {
        /// The oldest revision that can be read.
        compact_revision: i64,
    },
    /// The cluster holds other changes at the known revisions: it has another history.
    Forked {
        /// The last known revision that is the same in both; `None` if the first one that was compared differs.
        same_up_to: Option<i64>,
    },
    /// The raft log of the cluster is shorter than before: it was restored from a snapshot.
    SetBack {
        /// The last known revision if all known transactions are the same; `None` if that is not known.
        same_up_to: Option<i64>,
    },
    /// The newest revision of the cluster is before the position: it has another history.
    Behind {
        /// The newest revision of the cluster.
        revision: i64,
    },
}

/// The next item of the feed.
#[derive(Debug)]
pub enum Next {
    /// A complete transaction.
    Transaction(Transaction),
    /// The cluster holds the known changes at the position. It follows each connection.
    Verified,
    /// Nothing happened before the timeout.
    Idle,
    /// The feed has ended.
    Ended(Ended),
}

/// A watch at one member.
struct Watch {
    stream: WatchStream,
    endpoint: String,
    /// The number of the next known transaction that is compared; `None` once all are equal.
    next_known: Option<usize>,
    /// Whether the cluster has compacted the only known revision, so that deletions may lack.
    is_compacted: bool,
    /// Whether the raft log is shorter than before. Then the known transactions only tell how far the history is the same.
    is_set_back: bool,
    /// The remaining events of the current response, the last one first.
    events: Vec<etcd_client::Event>,
    /// Whether the last event of the response completes a transaction.
    ends_transaction: bool,
    /// The time of the last response.
    last_response: Instant,
    /// The time of the last check by [`Feed::check_progress`].
    last_check: Instant,
}

/// A feed. Its calls block, so they must not run on the threads of the runtime.
pub struct Feed {
    connector: Connector,
    endpoints: Vec<String>,
    /// The index of the endpoint in use.
    endpoint: usize,
    known: Known,
    /// The compacted revision of the cluster, as far as it is known.
    compacted: i64,
    raft: Option<RaftProgress>,
    /// The endpoints at which the known transactions differ, since they were last equal somewhere.
    differing: HashSet<usize>,
    watch: Option<Watch>,
    /// The incomplete transaction.
    partial: Transaction,
    /// The newest known revision of the cluster.
    current: i64,
    connects: u64,
    /// The number of consecutive watches that ended before they were verified.
    fruitless: usize,
    /// The ID of the only cluster that the feed accepts.
    cluster_id: Option<u64>,
}

impl Feed {
    /// Creates a feed of the changes after the known ones. The members at `endpoints` are tried in turn.
    pub fn new(connector: Connector, endpoints: Vec<String>, known: Known) -> Self {
        Feed {
            connector,
            endpoints,
            endpoint: 0,
            current: known.position().revision,
            known,
            compacted: 0,
            raft: None,
            differing: HashSet::new(),
            watch: None,
            partial: Transaction::default(),
            connects: 0,
            fruitless: 0,
            cluster_id: None,
        }
    }

    /// Makes the feed fail if an endpoint suddenly belongs to another cluster than this one.
    pub fn of_cluster(mut self, cluster_id: u64) -> Self {
        self.cluster_id = Some(cluster_id);
        self
    }

    /// Makes the feed end if the cluster's raft log is shorter than it was before.
    pub fn after(mut self, raft: Option<RaftProgress>) -> Self {
        self.raft = raft;
        self
    }

    /// Fails if a response is from another cluster. The fingerprint cannot tell: a cluster that was restored
    /// from a backup of the other one has the same history.
    fn check_cluster(&self, response_id: u64, endpoint: &str) -> Result<(), AttemptError> {
        match self.cluster_id {
            // A proxy may omit the ID.
            Some(cluster_id) if response_id != cluster_id && response_id != 0 => {
                Err(AttemptError::Final(Reason::OtherCluster.error(format!(
                    "{endpoint} belonged to cluster {cluster_id:x}, and now belongs to cluster {response_id:x}, whose changes must not get into the backup of the first: check --endpoints, or if the new cluster replaces the old one, use --take-over"
                ))))
            }
            _ => Ok(()),
        }
    }

    /// Returns the position.
    pub fn position(&self) -> Position {
        self.known.position()
    }

    /// Returns the last known transactions.
    pub fn known(&self) -> &Known {
        &self.known
    }

    /// Returns the newest known revision of the cluster.
    pub fn current(&self) -> i64 {
        self.current.max(self.position().revision)
    }

    /// Returns the progress of the raft log at the last connection.
    pub fn raft(&self) -> Option<RaftProgress> {
        self.raft
    }

    /// Returns the number of connections after the first one.
    pub fn reconnects(&self) -> u64 {
        self.connects.saturating_sub(1)
    }

    /// Waits for the next item, at most `timeout`. It can be called again after an error, and then connects
    /// again.
    ///
    /// # Errors
    /// `EtcdUnreachable` and `NoQuorum` if no member can be watched at the moment; the reasons of wrong
    /// settings and credentials; `OtherCluster`; `Terminated`.
    pub fn next(&mut self, timeout: Duration) -> Result<Next> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(next) = self.take_transaction() {
                return Ok(next);
            }
            if self.watch.is_none()
                && let Some(ended) = self.connect()?
            {
                return Ok(Next::Ended(ended));
            }
            match self.receive(deadline) {
                Ok(Some(next)) => return Ok(next),
                Ok(None) => {}
                Err(AttemptError::Final(e)) => return Err(e),
                Err(AttemptError::TryAgain(e)) => {
                    let is_fruitless = self.watch.as_ref().is_some_and(|w| w.next_known.is_some());
                    self.fruitless = if is_fruitless { self.fruitless + 1 } else { 0 };
                    self.switch_member(&e.to_string());
                    // After a round over all members, the caller waits before the next round, or gives up.
                    if self.fruitless > self.endpoints.len() {
                        self.fruitless = 0;
                        return Err(e);
                    }
                }
                Err(AttemptError::TooLarge(e)) => return Err(Reason::Configuration.error(e)),
            }
        }
    }

    /// Waits until the known transactions were compared with those of the cluster. Returns why the feed has
    /// ended if they differ.
    ///
    /// # Errors
    /// As [`next`](Self::next).
    pub fn verify(&mut self) -> Result<Option<Ended>> {
        if !self.position().has_changes() {
            // No event is expected at the position. If there is one, the first transaction reveals it.
            return match self.watch {
                Some(_) => Ok(None),
                None => self.connect(),
            };
        }
        loop {
            match self.next(CHECK_INTERVAL)? {
                Next::Verified => return Ok(None),
                Next::Ended(ended) => return Ok(Some(ended)),
                Next::Idle => {}
                Next::Transaction(_) => {
                    return Err(Error::internal("a watch continued before it was verified"));
                }
            }
        }
    }

    /// Ends the watch, and selects the next member.
    fn switch_member(&mut self, why: &str) {
        if let Some(watch) = self.watch.take() {
            tracing::warn!(endpoint = watch.endpoint, "the watch ended: {why}");
        }
        self.partial = Transaction::default();
        self.endpoint = (self.endpoint + 1) % self.endpoints.len().max(1);
    }

    /// Begins a watch at the first possible member, from the selected one on.
    fn connect(&mut self) -> Result<Option<Ended>> {
        let mut failures: Vec<Error> = Vec::new();
        for _ in 0..self.endpoints.len() {
            let endpoint = self.endpoints[self.endpoint].clone();
            match self.connect_to(&endpoint) {
                Ok(ended) => return Ok(ended),
                Err(AttemptError::Final(e)) if e.reason() == Reason::Terminated => return Err(e),
                // Even after a final error, another endpoint may be configured correctly.
                Err(f) => failures.push(f.into_error()),
            }
            self.endpoint = (self.endpoint + 1) % self.endpoints.len();
        }
        Err(merge_failures(failures))
    }

    fn connect_to(&mut self, endpoint: &str) -> Result<Option<Ended>, AttemptError> {
        let client = self.connector.dial(endpoint, Streams::NeedLeader)?;
        let revision = self.read_revision(&client, endpoint)?;
        if revision < self.position().revision {
            return Ok(Some(Ended::Behind { revision }));
        }
        self.current = revision;
        let mut is_set_back = false;
        let mut maintenance = client.maintenance_client();
        let status = self
            .connector
            .ask("request the status", endpoint, maintenance.status());
        if let Ok(status) = status {
            // After the linearizable read, this member has all entries up to that read.
            let raft = RaftProgress {
                term: status.raft_term(),
                index: status.raft_index(),
                revision,
            };
            is_set_back = self.raft.is_some_and(|before| !raft.may_follow(&before));
            if is_set_back && !self.position().has_changes() {
                return Ok(Some(Ended::SetBack { same_up_to: None }));
            }
            // The entries of later revisions may count already.
            let revision = self.read_revision(&client, endpoint)?;
            if !is_set_back {
                self.raft = Some(RaftProgress { revision, ..raft });
            }
        }
        // At the compacted revision itself, etcd sends what the compaction left, so the watch begins one earlier:
        // etcd refuses that if the first known revision is compacted.
        let first = self.known.first_revision();
        let is_compacted = self.compacted >= first;
        let start = if is_compacted {
            first
        } else {
            (first - 1).max(1)
        };
        let options = WatchOptions::new()
            .with_all_keys()
            .with_start_revision(start)
            .with_fragment();
        let mut watching = client.watch_client().max_decoding_message_size(usize::MAX);
        let stream =
            self.connector
                .ask("watch", endpoint, watching.watch(vec![0], Some(options)))?;
        self.connects += 1;
        let now = Instant::now();
        self.watch = Some(Watch {
            stream,
            endpoint: endpoint.to_owned(),
            next_known: Some(0),
            is_compacted,
            is_set_back,
            events: Vec::new(),
            ends_transaction: true,
            last_response: now,
            last_check: now,
        });
        self.partial = Transaction::default();
        tracing::info!(endpoint, revision = self.position().revision, "watching");
        Ok(None)
    }

    /// Reads the revision by a linearizable read: that of a single member could be older than the position.
    fn read_revision(&self, client: &Client, endpoint: &str) -> Result<i64, AttemptError> {
        let count = GetOptions::new().with_count_only();
        let mut kv = client.kv_client();
        let response = self.connector.ask(
            "request the revision",
            endpoint,
            kv.get(vec![0], Some(count)),
        )?;
        let header = response.header();
        self.check_cluster(header.map_or(0, |h| h.cluster_id()), endpoint)?;
        Ok(header.map_or(0, |h| h.revision()))
    }

    /// Takes the next complete transaction from the received events.
    fn take_transaction(&mut self) -> Option<Next> {
        loop {
            let watch = self.watch.as_mut()?;
            let next_revision = watch
                .events
                .last()
                .and_then(|e| e.kv())
                .map(|kv| kv.mod_revision());
            let partial = &mut self.partial;
            let is_complete = !partial.changes.is_empty()
                && match next_revision {
                    Some(revision) => revision != partial.revision,
                    None => watch.ends_transaction,
                };
            if is_complete {
                let transaction = std::mem::take(partial);
                match self.complete(transaction) {
                    Some(next) => return Some(next),
                    None => continue,
                }
            }
            let event = watch.events.pop()?;
            let delete = event.0.r#type == TYPE_DELETE;
            let Some(kv) = event.0.kv else { continue };
            partial.revision = kv.mod_revision;
            partial.changes.push(KeyChange {
                delete,
                key: kv.key,
                create_revision: kv.create_revision,
                mod_revision: kv.mod_revision,
                version: kv.version,
                value: kv.value,
                lease: kv.lease,
            });
        }
    }

    /// Compares the first transactions of a watch with the known ones, and returns the later ones.
    fn complete(&mut self, mut transaction: Transaction) -> Option<Next> {
        let watch = self.watch.as_mut()?;
        if let Some(mut nth) = watch.next_known {
            let mut known = self.known.last.get(nth).copied()?;
            // No event comes of a revision without known changes: this one is compared with the next known revision.
            while !known.has_changes()
                && transaction.revision > known.revision
                && let Some(next) = self.known.last.get(nth + 1)
            {
                (nth, known) = (nth + 1, *next);
            }
            if transaction.revision < known.revision && nth == 0 {
                return None;
            }
            let is_at_known = transaction.revision == known.revision;
            if is_at_known && self.known.without_deletions == Some(known.revision) {
                transaction.changes.retain(|change| !change.delete);
            }
            let received = match is_at_known {
                true => transaction.fingerprint(),
                false => Transaction::default().fingerprint(),
            };
            if received != known.fingerprint {
                let ended = match watch.is_compacted {
                    true if watch.is_set_back => Ended::SetBack { same_up_to: None },
                    true => Ended::Compacted {
                        compact_revision: self.compacted,
                    },
                    false => Ended::Forked {
                        same_up_to: nth.checked_sub(1).map(|_| known.revision - 1),
                    },
                };
                // If another member has them, this one is damaged, and the cluster was not set back.
                let is_new = self.differing.insert(self.endpoint);
                if is_new && self.differing.len() < self.endpoints.len() {
                    self.switch_member(
                        "it holds other changes than the store: trying another member",
                    );
                    return None;
                }
                self.watch = None;
                return Some(Next::Ended(ended));
            }
            let is_last = nth + 1 == self.known.last.len();
            watch.next_known = (!is_last).then_some(nth + 1);
            if is_last {
                self.differing.clear();
            }
            if is_last && watch.is_set_back {
                self.watch = None;
                let same_up_to = Some(known.revision);
                return Some(Next::Ended(Ended::SetBack { same_up_to }));
            }
            if is_at_known {
                return is_last.then_some(Next::Verified);
            }
        }
        self.known.push(Position::after(&transaction));
        self.current = self.current.max(transaction.revision);
        Some(Next::Transaction(transaction))
    }

    /// Receives one response, or checks the progress of the cluster if none comes. Returns `Idle` after the
    /// deadline.
    fn receive(&mut self, deadline: Instant) -> Result<Option<Next>, AttemptError> {
        let Some(watch) = self.watch.as_mut() else {
            return Ok(None);
        };
        let now = Instant::now();
        let next_check = (watch.last_check.max(watch.last_response) + CHECK_INTERVAL).max(now);
        let timeout = deadline.min(next_check).saturating_duration_since(now);
        // The async block creates the timer inside of the runtime.
        let message = self
            .connector
            .wait(async { tokio::time::timeout(timeout, watch.stream.message()).await })?;
        let Ok(message) = message else {
            if Instant::now() >= next_check {
                self.check_progress()?;
            }
            return Ok((Instant::now() >= deadline).then_some(Next::Idle));
        };
        let endpoint = watch.endpoint.clone();
        watch.last_response = Instant::now();
        let response = message
            .map_err(|e| self.connector.failure("watch", &endpoint, e))?
            .ok_or_else(|| {
                AttemptError::TryAgain(
                    Reason::EtcdUnreachable
                        .error(format!("watch at {endpoint}: the member ended it")),
                )
            })?;
        self.handle_response(response, &endpoint)
    }

    fn handle_response(
        &mut self,
        response: WatchResponse,
        endpoint: &str,
    ) -> Result<Option<Next>, AttemptError> {
        // A proxy may have switched to another cluster.
        let cluster_id = response.0.header.as_ref().map_or(0, |h| h.cluster_id);
        self.check_cluster(cluster_id, endpoint)?;
        if response.canceled() {
            let compact_revision = response.compact_revision();
            if compact_revision > 0 {
                let is_set_back = self.watch.as_ref().is_some_and(|w| w.is_set_back);
                self.watch = None;
                let is_new = compact_revision > self.compacted;
                self.compacted = self.compacted.max(compact_revision);
                self.known.forget_up_to(compact_revision);
                // What is left of the known transactions is compared.
                let is_left = is_new && compact_revision <= self.position().revision;
                return Ok(match (is_left, is_set_back) {
                    (true, _) => None,
                    (false, true) => Some(Next::Ended(Ended::SetBack { same_up_to: None })),
                    (false, false) => Some(Next::Ended(Ended::Compacted { compact_revision })),
                });
            }
            let why = response.cancel_reason();
            let error = |reason: Reason, advice: &str| {
                let message = format!("watch at {endpoint}: {why}{advice}");
                reason.error(message)
            };
            return Err(match why {
                w if w.contains("permission denied") => AttemptError::Final(error(
                    Reason::PermissionDenied,
                    ": grant the user's role read permission for all keys",
                )),
                w if w.contains("no leader") => {
                    AttemptError::TryAgain(error(Reason::NoQuorum, ": the member has no leader"))
                }
                _ => AttemptError::TryAgain(error(Reason::EtcdUnreachable, "")),
            });
        }
        if let (Some(watch), false) = (self.watch.as_mut(), response.created()) {
            watch.ends_transaction = !response.0.fragment;
            let events = response.0.events.into_iter().map(etcd_client::Event);
            watch.events = events.rev().collect();
        }
        Ok(None)
    }

    /// Checks, if nothing came for a while, whether the cluster has new revisions that this member does not
    /// send, or has fallen back.
    fn check_progress(&mut self) -> Result<(), AttemptError> {
        let now = Instant::now();
        let revision = self.quorum_revision();
        let Some(watch) = self.watch.as_mut() else {
            return Ok(());
        };
        watch.last_check = now;
        // Without a quorum there are no new revisions. A broken connection is detected by the stream.
        let Ok(revision) = revision else {
            return Ok(());
        };
        let silence = now.duration_since(watch.last_response);
        let last = self.known.position();
        let position = last.revision;
        // A member sends the changes at the position at once, so they are missing as well.
        let is_missing_events =
            revision > position || (watch.next_known.is_some() && last.has_changes());
        self.current = revision;
        if revision < position {
            let message = format!("the cluster is only at revision {revision}");
            return Err(AttemptError::TryAgain(
                Reason::EtcdUnreachable.error(message),
            ));
        }
        if is_missing_events && silence >= STALLED_AFTER {
            return Err(AttemptError::TryAgain(Reason::EtcdUnreachable.error(format!(
                "the cluster is at revision {revision}, but nothing came after {position} for {} s",
                silence.as_secs()
            ))));
        }
        Ok(())
    }

    /// Reads the newest revision by a linearizable read.
    ///
    /// # Errors
    /// As [`next`](Self::next).
    pub fn quorum_revision(&self) -> Result<i64> {
        quorum_revision(&self.connector, &self.endpoints)
    }
}

/// The type of a deletion in etcd's messages.
const TYPE_DELETE: i32 = 1;

/// Reads the newest revision by a linearizable read at the first endpoint that serves it.
///
/// # Errors
/// `EtcdUnreachable`, `NoQuorum`; the reasons of wrong settings and credentials; `Terminated`.
pub fn quorum_revision(connector: &Connector, endpoints: &[String]) -> Result<i64> {
    let mut failures = Vec::new();
    for endpoint in endpoints {
        let result = connector.dial(endpoint, Streams::Plain).and_then(|client| {
            let count = GetOptions::new().with_count_only();
            let mut kv = client.kv_client();
            connector.ask(
                "request the revision",
                endpoint,
                kv.get(vec![0], Some(count)),
            )
        });
        match result {
            Ok(response) => return Ok(response.header().map_or(0, |h| h.revision())),
            Err(AttemptError::Final(e)) if e.reason() == Reason::Terminated => return Err(e),
            Err(f) => failures.push(f.into_error()),
        }
    }
    Err(merge_failures(failures))
}

/// Merges the failures of several endpoints into one error: all messages, and the reason that helps most.
fn merge_failures(failures: Vec<Error>) -> Error {
    let rank = |e: &Error| match e.reason() {
        Reason::EtcdUnreachable => 2,
        Reason::NoQuorum => 1,
        _ => 0,
    };
    let reason = failures.iter().min_by_key(|e| rank(e)).map(Error::reason);
    let messages: Vec<String> = failures.iter().map(Error::to_string).collect();
    match reason {
        Some(reason) => reason.error(messages.join("; ")),
        None => Reason::EtcdUnreachable
            .error("no healthy member holds the same data as most of the others"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(revision: i64, value: &str) -> Position {
        Position::after(&Transaction {
            revision,
            changes: vec![KeyChange {
                key: b"k".to_vec(),
                value: value.into(),
                ..KeyChange::default()
            }],
        })
    }

    fn known(first: i64, values: &[&str]) -> Known {
        let mut positions = (first..).zip(values).map(|(r, value)| at(r, value));
        let mut known = Known::new(positions.next().unwrap());
        positions.for_each(|position| known.push(position));
        known
    }

    #[test]
    fn the_last_changes_are_known_up_to_a_number() {
        let values: Vec<String> = (0..1500).map(|n| n.to_string()).collect();
        let values: Vec<&str> = values.iter().map(String::as_str).collect();
        let mut many = known(11, &values);
        assert_eq!(
            (many.last.len(), many.size.changes),
            (MOST_KNOWN_CHANGES, MOST_KNOWN_CHANGES)
        );
        assert_eq!(
            (many.first_revision(), many.position().revision),
            (511, 1510)
        );
        many.forget_up_to(1400);
        assert_eq!((many.first_revision(), many.size.changes), (1401, 110));
        many.forget_up_to(9999);
        assert_eq!((many.first_revision(), many.size.changes), (1510, 1));
        // After a gap, what was known before proves nothing.
        many.push(at(2000, "x"));
        assert_eq!((many.last.len(), many.size.changes), (1, 1));
        // Large values are not read again from etcd.
        let value = "v".repeat(3 << 20);
        let large = known(1, &[value.as_str(); 5]);
        assert_eq!((large.first_revision(), large.position().revision), (4, 5));
        let value = "v".repeat(9 << 20);
        assert_eq!(known(1, &[value.as_str(); 2]).first_revision(), 2);
    }

    #[test]
    fn two_histories_are_the_same_up_to_the_first_difference() {
        let old = known(5, &["a", "b", "c", "lock"]);
        for (new, expected) in [
            (known(5, &["a", "b", "c", "lock"]), Some(8)),
            (known(5, &["a", "b", "x", "lock"]), Some(6)),
            (known(5, &["x", "b", "c", "lock"]), None),
            (known(1, &["1", "2", "3", "4", "a", "b"]), Some(6)),
            (known(8, &["lock", "more"]), Some(8)),
            (known(20, &["a"]), None),
        ] {
            assert_eq!(old.same_up_to(&new), expected, "{new:?}");
        }
    }

    #[test]
    fn three_equal_transactions_prove_one_history() {
        let ours = known(5, &["a", "b", "c", "d"]);
        for (theirs, expected) in [
            (known(5, &["a", "b", "c", "d"]), true),
            (known(3, &["x", "y", "a", "b", "c"]), true),
            (known(6, &["b", "c", "d", "more"]), true),
            (known(7, &["c", "d", "more"]), false),
            (known(5, &["a", "b", "c", "x"]), false),
            (known(20, &["a", "b", "c"]), false),
        ] {
            assert_eq!(ours.is_proven_by(&theirs), expected, "{theirs:?}");
        }
        // Of the first one the deletions are not known: it proves nothing.
        let without = known(6, &["b", "c", "d"]).without_deletions();
        assert!(!ours.is_proven_by(&without));
        // A short history is proven as a whole.
        let short = known(1, &["a", "b", "c"]);
        assert!(short.is_proven_by(&known(2, &["b"])));
        assert!(!short.is_proven_by(&known(3, &["c"])));
    }

    #[test]
    fn a_raft_log_takes_an_entry_for_each_revision() {
        let before = RaftProgress {
            term: 3,
            index: 20,
            revision: 10,
        };
        let later = |term, index, revision| RaftProgress {
            term,
            index,
            revision,
        };
        assert!(later(3, 25, 15).may_follow(&before));
        assert!(later(4, 40, 15).may_follow(&before));
        // The cluster runs ahead, but its log is new.
        assert!(!later(3, 24, 15).may_follow(&before));
        assert!(!later(3, 19, 9).may_follow(&before));
        assert!(!later(2, 30, 15).may_follow(&before));
    }
}
