//! A feed of the changes of a live etcd, transaction by transaction, from a revision on.
//!
//! It watches all keys at one member, and switches to another member if that fails. It never joins two histories: every
//! watch begins with the last known transactions, and these must equal the known ones; and the raft log must not be
//! shorter than before.

use crate::base::opt::{ENDPOINTS, TAKE_OVER};
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
        self.digest_with(self.lease)
    }

    /// Returns a SHA-256 of all that a snapshot of any tool saves of this change: some drop the lease.
    pub fn digest_without_lease(&self) -> [u8; 32] {
        self.digest_with(0)
    }

    fn digest_with(&self, lease: i64) -> [u8; 32] {
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
            for n in [self.create_revision, self.version, lease] {
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
        let mut hash = Sha256::new();
        for change in &self.changes {
            hash.update(change.digest());
        }
        Fingerprint {
            changes: self.changes.len(),
            bytes: self.bytes(),
            hash: hash.finalize().into(),
        }
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
}

/// The last known transactions, which a watch compares with those of the cluster. One equal transaction proves
/// little: two histories may release the same lock at the same revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// The transactions, one for each revision, each with all its changes.
    last: VecDeque<Position>,
    size: KnownSize,
    /// The last revision, also if its changes are not known.
    revision: i64,
}

/// What two sources say of one history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Likeness {
    /// [`PROOF`] transactions are equal, and none differs.
    Same,
    /// Too few can be compared.
    Unknown,
    /// A transaction differs: they are of two histories.
    Differs,
}

/// The number of equal transactions that prove that two sources have one history. A history that is shorter must be
/// equal from revision 2 on.
const PROOF: usize = 3;
/// The number of changes that are known, at least [`PROOF`] transactions.
pub const MOST_KNOWN_CHANGES: usize = 1000;
/// The size of the changes that are known, in bytes: etcd sends them again with each watch.
const MOST_KNOWN_BYTES: usize = 8 << 20;

/// The number and the size in bytes of known changes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct KnownSize {
    changes: usize,
    bytes: usize,
}

impl KnownSize {
    /// Whether the oldest of several transactions is one too many.
    fn is_too_large(&self) -> bool {
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
    /// Begins after a revision whose changes are not known.
    pub fn nothing_at(revision: i64) -> Self {
        Known {
            last: VecDeque::new(),
            size: KnownSize::default(),
            revision,
        }
    }

    /// Adds the next transaction, and forgets the oldest ones that are too many.
    pub fn push(&mut self, next: Position) {
        if next.revision != self.revision + 1 {
            self.last.clear();
            self.size = KnownSize::default();
        }
        self.revision = next.revision;
        self.last.push_back(next);
        self.size += next.fingerprint;
        while self.size.is_too_large() && self.last.len() > PROOF {
            self.forget_oldest();
        }
    }

    /// Returns the last revision.
    pub fn revision(&self) -> i64 {
        self.revision
    }

    /// Returns the revision of the first transaction; if none is known, the one after the last revision.
    pub fn first_revision(&self) -> i64 {
        self.last.front().map_or(self.revision + 1, |p| p.revision)
    }

    /// Returns the transactions, the oldest first.
    pub fn positions(&self) -> impl Iterator<Item = &Position> {
        self.last.iter()
    }

    /// Whether no transaction before these is compared.
    pub fn is_enough(&self) -> bool {
        let KnownSize { changes, bytes } = self.size;
        let is_full = changes >= MOST_KNOWN_CHANGES || bytes >= MOST_KNOWN_BYTES;
        is_full && self.last.len() >= PROOF
    }

    /// Returns whether no transaction is known, although there must be some.
    pub fn is_nothing(&self) -> bool {
        self.last.is_empty() && self.revision > 1
    }

    /// Returns whether a source that has all these transactions is proven to have their history.
    pub fn can_prove(&self) -> bool {
        self.last.len() >= needed(self.revision)
    }

    /// Compares these transactions with those of another source.
    pub fn compare(&self, other: &Known) -> Likeness {
        let (mut equal, mut compared) = (0, 0);
        for (ours, theirs) in self.in_both(other) {
            compared += 1;
            equal += usize::from(ours == theirs);
        }
        match equal >= needed(self.revision.min(other.revision)) {
            _ if equal < compared => Likeness::Differs,
            true => Likeness::Same,
            false => Likeness::Unknown,
        }
    }

    /// Returns the last revision up to which both are proven to have one history; `None` if too few transactions before
    /// the first difference are known to both.
    pub fn same_up_to(&self, other: &Known) -> Option<i64> {
        let same = self.in_both(other).take_while(|(p, theirs)| p == theirs);
        let (mut equal, mut last) = (0, None);
        for (position, _) in same {
            (equal, last) = (equal + 1, Some(position.revision));
        }
        last.filter(|&last| equal >= needed(last))
    }

    /// Returns the transactions of the revisions that both know.
    fn in_both<'a>(
        &'a self,
        other: &'a Known,
    ) -> impl Iterator<Item = (&'a Position, &'a Position)> {
        self.last.iter().filter_map(|ours| {
            let theirs = other.last.iter().find(|o| o.revision == ours.revision)?;
            Some((ours, theirs))
        })
    }

    fn forget_oldest(&mut self) {
        if let Some(oldest) = self.last.pop_front() {
            self.size -= oldest.fingerprint;
        }
    }

    /// Forgets the transactions up to a revision.
    fn forget_up_to(&mut self, revision: i64) {
        while self.last.front().is_some_and(|p| p.revision <= revision) {
            self.forget_oldest();
        }
    }
}

/// Returns how many transactions prove a history up to this revision. Revision 1 is the same in each etcd.
fn needed(revision: i64) -> usize {
    usize::try_from(revision - 1).unwrap_or(0).min(PROOF)
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

/// The newest revision of the cluster that came over a watch, and when.
#[derive(Debug, Clone, Copy)]
pub struct Confirmed {
    revision: i64,
    at: Instant,
}

impl Confirmed {
    /// Whether the cluster had this revision, as of `began` or later.
    pub fn shows(&self, revision: i64, began: Instant) -> bool {
        self.revision >= revision && self.at >= began
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
    /// Too few known transactions could be compared: see [`PROOF`].
    Unproven,
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
    /// A complete transaction, and its position.
    Transaction(Transaction, Position),
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
    raft: Option<RaftProgress>,
    /// The endpoints at which the known transactions differ, since they were last equal somewhere.
    differing: HashSet<usize>,
    watch: Option<Watch>,
    /// The incomplete transaction.
    partial: Transaction,
    /// The newest known revision of the cluster.
    current: i64,
    /// What the running watch has shown.
    confirmed: Option<Confirmed>,
    connects: u64,
    /// The number of consecutive watches that ended before they were verified.
    fruitless: usize,
    /// The ID of the only cluster that the feed accepts.
    cluster_id: Option<u64>,
}

impl Feed {
    /// Creates a feed of the changes after the known ones, which each connection must send again. If none is known, the
    /// first connection may begin without. The members at `endpoints` are tried in turn.
    pub fn new(connector: Connector, endpoints: Vec<String>, known: Known) -> Self {
        Feed {
            connector,
            endpoints,
            endpoint: 0,
            current: known.revision,
            known,
            confirmed: None,
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
                    "{endpoint} belonged to cluster {cluster_id:x}, and now belongs to cluster {response_id:x}, whose changes must not get into the backup of the first: check {ENDPOINTS}, or if the new cluster replaces the old one, use {TAKE_OVER}"
                ))))
            }
            _ => Ok(()),
        }
    }

    /// Returns the last known transactions.
    pub fn known(&self) -> &Known {
        &self.known
    }

    /// Returns the newest known revision of the cluster.
    pub fn current(&self) -> i64 {
        self.current.max(self.known.revision)
    }

    /// Returns what the running watch has shown.
    pub fn confirmed(&self) -> Option<Confirmed> {
        self.confirmed
    }

    /// Asks over the running watch for the revision. The answer shows in [`confirmed`](Self::confirmed); none comes while
    /// the member has other events to send.
    pub fn ask_revision(&mut self) {
        if let Some(watch) = &mut self.watch {
            // A watch that failed is found by the next item.
            let _ = self
                .connector
                .wait(async { watch.stream.request_progress().await });
        }
    }

    /// Whether the running watch shows within `timeout` that the cluster has this revision, without a new connection.
    /// Drops the transactions that come meanwhile.
    ///
    /// # Errors
    /// As [`next`](Self::next).
    pub fn confirms(&mut self, revision: i64, timeout: Duration) -> Result<bool> {
        let (began, connects) = (Instant::now(), self.connects);
        while began.elapsed() < timeout && self.connects == connects && self.watch.is_some() {
            self.ask_revision();
            if let Next::Ended(_) = self.next(Duration::from_secs(1))? {
                return Ok(false);
            }
            if self.confirmed.is_some_and(|c| c.shows(revision, began)) {
                return Ok(true);
            }
        }
        Ok(false)
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
        if self.known.last.is_empty() {
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
                Next::Transaction(..) => {
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
        if revision < self.known.revision {
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
            if is_set_back && self.known.last.is_empty() {
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
        let start = match self.known.last.front() {
            Some(first) => (first.revision - 1).max(1),
            None if self.connects > 0 && !self.known.can_prove() => {
                return Ok(Some(Ended::Unproven));
            }
            // etcd tells the revision only to watches that begin at or below it.
            None => self.known.revision.max(1),
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
            next_known: (!self.known.last.is_empty()).then_some(0),
            is_set_back,
            events: Vec::new(),
            ends_transaction: true,
            last_response: now,
            last_check: now,
        });
        self.partial = Transaction::default();
        self.confirmed = None;
        tracing::info!(endpoint, revision = self.known.revision, "watching");
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
    fn complete(&mut self, transaction: Transaction) -> Option<Next> {
        let watch = self.watch.as_mut()?;
        if let Some(nth) = watch.next_known {
            let known = self.known.last.get(nth).copied()?;
            if transaction.revision < known.revision && nth == 0 {
                return None;
            }
            if Position::after(&transaction) != known {
                // If another member has them, this one is damaged, and the cluster was not set back.
                let is_new = self.differing.insert(self.endpoint);
                if is_new && self.differing.len() < self.endpoints.len() {
                    self.switch_member(
                        "it holds other changes than the store: trying another member",
                    );
                    return None;
                }
                self.watch = None;
                let before = known.revision - 1;
                let same_up_to = (nth > 0 && nth >= needed(before)).then_some(before);
                return Some(Next::Ended(Ended::Forked { same_up_to }));
            }
            let is_last = nth + 1 == self.known.last.len();
            watch.next_known = (!is_last).then_some(nth + 1);
            if !is_last {
                return None;
            }
            self.differing.clear();
            let ended = match () {
                () if watch.is_set_back => Ended::SetBack {
                    same_up_to: self.known.can_prove().then_some(known.revision),
                },
                () if !self.known.can_prove() => Ended::Unproven,
                () => return Some(Next::Verified),
            };
            self.watch = None;
            return Some(Next::Ended(ended));
        }
        if transaction.revision <= self.known.revision {
            return None;
        }
        let position = Position::after(&transaction);
        self.known.push(position);
        self.current = self.current.max(position.revision);
        Some(Next::Transaction(transaction, position))
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
                self.known.forget_up_to(compact_revision);
                return Ok(match self.known.last.is_empty() {
                    // What is left of the known transactions is compared.
                    false => None,
                    true if is_set_back => Some(Next::Ended(Ended::SetBack { same_up_to: None })),
                    true => Some(Next::Ended(Ended::Compacted { compact_revision })),
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
        let Some(watch) = self.watch.as_mut().filter(|_| !response.created()) else {
            return Ok(None);
        };
        if watch.next_known.is_none() {
            let revision = response.0.header.as_ref().map_or(0, |h| h.revision);
            let at = Instant::now();
            self.confirmed = Some(Confirmed { revision, at });
        }
        // The answer to a question has no events.
        if !response.events().is_empty() {
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
        let position = self.known.revision;
        // A member sends the known changes at once, so they are missing as well.
        let is_missing_events = revision > position || watch.next_known.is_some();
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
        let mut known = Known::nothing_at(first - 1);
        for (revision, value) in (first..).zip(values) {
            known.push(at(revision, value));
        }
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
        let first = |known: &Known| known.last.front().map(|p| p.revision);
        assert_eq!((first(&many), many.revision), (Some(511), 1510));
        many.forget_up_to(1400);
        assert_eq!((first(&many), many.size.changes), (Some(1401), 110));
        many.forget_up_to(9999);
        assert_eq!((first(&many), many.size), (None, KnownSize::default()));
        assert_eq!(many.revision, 1510);
        // After a gap, what was known before proves nothing.
        let mut gap = known(11, &["a", "b"]);
        gap.push(at(2000, "x"));
        assert_eq!((gap.last.len(), gap.size.changes), (1, 1));
        // Large values are not read again from etcd, but for the proof.
        let value = "v".repeat(2 << 20);
        let large = known(1, &[value.as_str(); 5]);
        assert_eq!((first(&large), large.revision), (Some(3), 5));
        let value = "v".repeat(9 << 20);
        assert_eq!(first(&known(1, &[value.as_str(); 5])), Some(3));
    }

    #[test]
    fn two_histories_are_the_same_up_to_the_first_difference() {
        let old = known(5, &["a", "b", "c", "lock"]);
        for (new, expected) in [
            (known(5, &["a", "b", "c", "lock"]), Some(8)),
            (known(5, &["a", "b", "c", "x"]), Some(7)),
            (known(5, &["a", "b", "x", "lock"]), None),
            (known(5, &["x", "b", "c", "lock"]), None),
            (known(1, &["1", "2", "3", "4", "a", "b", "c"]), Some(7)),
            (known(8, &["lock", "more"]), None),
            (known(20, &["a"]), None),
        ] {
            assert_eq!(old.same_up_to(&new), expected, "{new:?}");
        }
    }

    #[test]
    fn three_equal_transactions_prove_one_history() {
        use Likeness::{Differs, Same, Unknown};
        let ours = known(5, &["a", "b", "c", "d"]);
        assert!(ours.can_prove());
        for (theirs, expected) in [
            (known(5, &["a", "b", "c", "d"]), Same),
            (known(3, &["x", "y", "a", "b", "c"]), Same),
            (known(6, &["b", "c", "d", "more"]), Same),
            (known(7, &["c", "d", "more"]), Unknown),
            (known(5, &["a", "b", "c", "x"]), Differs),
            (known(20, &["a", "b", "c"]), Unknown),
            (Known::nothing_at(8), Unknown),
        ] {
            assert_eq!(ours.compare(&theirs), expected, "{theirs:?}");
        }
        // A short history is proven as a whole.
        let short = known(2, &["b"]);
        assert_eq!(short.compare(&known(2, &["b", "c", "d", "e"])), Same);
        assert_eq!(short.compare(&known(3, &["c", "d", "e"])), Unknown);
        for (known, expected) in [
            (Known::nothing_at(1), true),
            (Known::nothing_at(2), false),
            (short, true),
            (known(3, &["c"]), false),
            (known(2, &["b", "c"]), true),
            (known(4, &["d", "e"]), false),
        ] {
            assert_eq!(known.can_prove(), expected, "{known:?}");
        }
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
