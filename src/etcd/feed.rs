//! The changes of a live etcd, transaction by transaction, from a revision on.
//!
//! It watches all keys at one member after the other and never splices two histories: every watch begins
//! at the last revision that is known and not behind it, and what comes there must be what is known of it.
//! What is done with the changes it does not know. `ops::snapshot` calls it.

use crate::error::{Error, Reason, Result};
use crate::etcd::connect::{Connector, Failed, Streams};
use etcd_client::{GetOptions, WatchOptions, WatchResponse, WatchStream};
use sha2::{Digest, Sha256};
use std::time::{Duration, Instant};

/// A silent member is looked after this often: whether the cluster has gone on without it.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// A member that is behind for so long is left for another one.
const STALLED_AFTER: Duration = Duration::from_secs(15);

/// One change of a key. A delete has nothing but its key and its revision.
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
    /// How often the key was written since it was created.
    pub version: i64,
    /// The value.
    pub value: Vec<u8>,
    /// The lease it is attached to; 0 for none.
    pub lease: i64,
}

impl KeyChange {
    /// The bytes that it occupies, about.
    pub fn bytes(&self) -> usize {
        self.key.len() + self.value.len() + 64
    }
}

/// All changes of one revision.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Transaction {
    /// The revision.
    pub revision: i64,
    /// In order.
    pub changes: Vec<KeyChange>,
}

impl Transaction {
    /// The bytes that it occupies, about.
    pub fn bytes(&self) -> usize {
        self.changes.iter().map(KeyChange::bytes).sum()
    }

    /// What tells it apart from another transaction of the same revision.
    pub fn fingerprint(&self) -> Fingerprint {
        let mut hash = Sha256::new();
        let mut bytes = |b: &[u8]| {
            hash.update((b.len() as u64).to_le_bytes());
            hash.update(b);
        };
        for c in &self.changes {
            bytes(&[u8::from(c.delete)]);
            bytes(&c.key);
            // Of a delete nothing else is saved.
            if !c.delete {
                bytes(&c.value);
                for n in [c.create_revision, c.version, c.lease] {
                    bytes(&n.to_le_bytes());
                }
            }
        }
        Fingerprint {
            changes: self.changes.len(),
            hash: hash.finalize().into(),
        }
    }
}

/// What tells the changes of a revision apart from others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint {
    changes: usize,
    hash: [u8; 32],
}

/// Where the feed stands: everything up to `revision` is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// The last revision that is known.
    pub revision: i64,
    /// Its changes.
    pub fingerprint: Fingerprint,
}

impl Position {
    /// Behind a transaction.
    pub fn after(transaction: &Transaction) -> Self {
        Position {
            revision: transaction.revision,
            fingerprint: transaction.fingerprint(),
        }
    }
}

/// Why there is no going on from where the feed stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The cluster has compacted what comes next, or the position itself.
    Compacted {
        /// The oldest revision that is left.
        compact_revision: i64,
    },
    /// At the position the cluster holds other changes: it has another history.
    Forked,
    /// The cluster's newest revision is below the position: it has another history.
    Behind {
        /// The cluster's newest.
        revision: i64,
    },
}

/// What comes next.
#[derive(Debug)]
pub enum Next {
    /// A transaction, whole.
    Transaction(Transaction),
    /// After each connecting: the cluster holds at the position what is known of it.
    Verified,
    /// Nothing in the time given.
    Idle,
    /// No more.
    Ended(Ended),
}

struct Watch {
    // Dropping the client's half would end the stream.
    stream: WatchStream,
    endpoint: String,
    /// Whether what is at the position was seen to be the same.
    verified: bool,
    /// The events of the response that is being taken apart, the last one first.
    events: Vec<etcd_client::Event>,
    /// The events end with a whole transaction.
    whole: bool,
    /// When something last came.
    heard: Instant,
    looked: Instant,
}

/// A feed. Its calls block: not for async threads.
pub struct Feed {
    way: Connector,
    endpoints: Vec<String>,
    at: usize,
    position: Position,
    watch: Option<Watch>,
    /// The transaction that is not yet whole.
    partial: Transaction,
    /// The newest revision that the cluster was seen to have.
    current: i64,
    connects: u64,
    /// Watches in a row that ended before anything came.
    fruitless: usize,
    /// The cluster whose changes these are, by ID.
    cluster_id: Option<u64>,
}

impl Feed {
    /// A feed of what comes after `position`; the members at `endpoints` are taken in turn.
    pub fn new(way: Connector, endpoints: Vec<String>, position: Position) -> Self {
        Feed {
            way,
            endpoints,
            at: 0,
            position,
            watch: None,
            partial: Transaction::default(),
            current: position.revision,
            connects: 0,
            fruitless: 0,
            cluster_id: None,
        }
    }

    /// The same, of no other cluster than that one: its endpoints may suddenly be another's.
    pub fn of_cluster(mut self, cluster_id: u64) -> Self {
        self.cluster_id = Some(cluster_id);
        self
    }

    /// Whether an answer is of the cluster that is watched. One restored from it has the same history.
    fn check_cluster(&self, answered: u64, endpoint: &str) -> Result<(), Failed> {
        match self.cluster_id {
            // A proxy that leaves the ID out says nothing about it.
            Some(cluster_id) if answered != cluster_id && answered != 0 => {
                Err(Failed::Final(Reason::OtherCluster.error(format!(
                    "{endpoint} was of cluster {cluster_id:x} and is of cluster {answered:x} now: its changes are not added to the other's backup; check --endpoints, or if it has taken the other's place, say so with --take-over"
                ))))
            }
            _ => Ok(()),
        }
    }

    /// Where it stands.
    pub fn position(&self) -> Position {
        self.position
    }

    /// The newest revision that the cluster was seen to have.
    pub fn current(&self) -> i64 {
        self.current.max(self.position.revision)
    }

    /// How often it had to connect again.
    pub fn reconnects(&self) -> u64 {
        self.connects.saturating_sub(1)
    }

    /// What comes next, within `patience`. After an error it can be asked again, and tries anew.
    ///
    /// # Errors
    /// `EtcdUnreachable` and `NoQuorum` where no member can be watched at this moment; those of wrong
    /// settings and credentials; `Terminated`.
    pub fn next(&mut self, patience: Duration) -> Result<Next> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(next) = self.take() {
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
                Err(Failed::Final(e)) => return Err(e),
                Err(Failed::TryAgain(e)) => {
                    let in_vain = self.watch.as_ref().is_some_and(|w| !w.verified);
                    self.fruitless = if in_vain { self.fruitless + 1 } else { 0 };
                    self.leave(&e.to_string());
                    // Whoever asks waits before the next round, or gives up.
                    if self.fruitless > self.endpoints.len() {
                        self.fruitless = 0;
                        return Err(e);
                    }
                }
                Err(Failed::TooLarge(e)) => return Err(Reason::Configuration.error(e)),
            }
        }
    }

    /// Waits until what the cluster holds at the position is seen to be what is known of it; gives why it
    /// is not.
    ///
    /// # Errors
    /// As [`next`](Self::next).
    pub fn verify(&mut self) -> Result<Option<Ended>> {
        if self.position.fingerprint.changes == 0 {
            // Nothing will come for it; whether something does, the first transaction tells.
            return match self.watch {
                Some(_) => Ok(None),
                None => self.connect(),
            };
        }
        loop {
            match self.next(LOOK_EVERY)? {
                Next::Verified => return Ok(None),
                Next::Ended(ended) => return Ok(Some(ended)),
                Next::Idle => {}
                Next::Transaction(_) => {
                    return Err(Error::internal("a watch went on before it was verified"));
                }
            }
        }
    }

    /// Gives up the member in use for the next one.
    fn leave(&mut self, why: &str) {
        if let Some(watch) = self.watch.take() {
            tracing::warn!(endpoint = watch.endpoint, "the watch ended: {why}");
        }
        self.partial = Transaction::default();
        self.at = (self.at + 1) % self.endpoints.len().max(1);
    }

    /// Watches at the first member that lets it, from the one in turn on.
    fn connect(&mut self) -> Result<Option<Ended>> {
        let mut failures: Vec<Error> = Vec::new();
        for _ in 0..self.endpoints.len() {
            let endpoint = self.endpoints[self.at].clone();
            match self.connect_to(&endpoint) {
                Ok(ended) => return Ok(ended),
                Err(Failed::Final(e)) if e.reason() == Reason::Terminated => return Err(e),
                // Another endpoint may be set up rightly.
                Err(f) => failures.push(f.into_error()),
            }
            self.at = (self.at + 1) % self.endpoints.len();
        }
        Err(most_telling(failures))
    }

    fn connect_to(&mut self, endpoint: &str) -> Result<Option<Ended>, Failed> {
        let client = self.way.dial(endpoint, Streams::NeedLeader)?;
        // What a quorum agrees on: a member by itself may only be late.
        let mut kv = client.kv_client();
        let count = GetOptions::new().with_count_only();
        let answer = self.way.ask(
            "ask for the revision",
            endpoint,
            kv.get(vec![0], Some(count)),
        )?;
        let header = answer.header();
        self.check_cluster(header.map_or(0, |h| h.cluster_id()), endpoint)?;
        let revision = header.map_or(0, |h| h.revision());
        if revision < self.position.revision {
            return Ok(Some(Ended::Behind { revision }));
        }
        self.current = revision;
        let options = WatchOptions::new()
            .with_all_keys()
            .with_start_revision(self.position.revision)
            .with_fragment();
        let mut watching = client.watch_client().max_decoding_message_size(usize::MAX);
        let stream = self
            .way
            .ask("watch", endpoint, watching.watch(vec![0], Some(options)))?;
        self.connects += 1;
        let now = Instant::now();
        self.watch = Some(Watch {
            stream,
            endpoint: endpoint.to_owned(),
            verified: false,
            events: Vec::new(),
            whole: true,
            heard: now,
            looked: now,
        });
        self.partial = Transaction::default();
        tracing::info!(endpoint, revision = self.position.revision, "watching");
        Ok(None)
    }

    /// Takes the next whole transaction out of what was received.
    fn take(&mut self) -> Option<Next> {
        loop {
            let watch = self.watch.as_mut()?;
            let next = watch
                .events
                .last()
                .and_then(|e| e.kv())
                .map(|kv| kv.mod_revision());
            let partial = &mut self.partial;
            let ends = !partial.changes.is_empty()
                && match next {
                    Some(revision) => revision != partial.revision,
                    None => watch.whole,
                };
            if ends {
                let transaction = std::mem::take(partial);
                return self.complete(transaction);
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

    /// Compares the first transaction with what is known; hands on the others.
    fn complete(&mut self, transaction: Transaction) -> Option<Next> {
        let watch = self.watch.as_mut()?;
        if !watch.verified {
            watch.verified = true;
            let at_position = transaction.revision == self.position.revision;
            let seen = match at_position {
                true => transaction.fingerprint(),
                false => Transaction::default().fingerprint(),
            };
            if seen != self.position.fingerprint {
                self.watch = None;
                return Some(Next::Ended(Ended::Forked));
            }
            if at_position {
                return Some(Next::Verified);
            }
        }
        self.position = Position::after(&transaction);
        self.current = self.current.max(transaction.revision);
        Some(Next::Transaction(transaction))
    }

    /// Receives one response, or finds out that nothing comes.
    fn receive(&mut self, deadline: Instant) -> Result<Option<Next>, Failed> {
        let Some(watch) = self.watch.as_mut() else {
            return Ok(None);
        };
        let now = Instant::now();
        let look_at = (watch.looked.max(watch.heard) + LOOK_EVERY).max(now);
        let until = deadline.min(look_at);
        let patience = until.saturating_duration_since(now);
        // The timer must be made within the runtime.
        let received = self
            .way
            .wait(async { tokio::time::timeout(patience, watch.stream.message()).await })?;
        let Ok(received) = received else {
            if Instant::now() >= look_at {
                self.look()?;
            }
            return Ok((Instant::now() >= deadline).then_some(Next::Idle));
        };
        let endpoint = watch.endpoint.clone();
        watch.heard = Instant::now();
        let response = received
            .map_err(|e| self.way.failure("watch", &endpoint, e))?
            .ok_or_else(|| {
                Failed::TryAgain(
                    Reason::EtcdUnreachable
                        .error(format!("watch at {endpoint}: the member ended it")),
                )
            })?;
        self.respond(response, &endpoint)
    }

    fn respond(&mut self, response: WatchResponse, endpoint: &str) -> Result<Option<Next>, Failed> {
        // A proxy may have gone on with another one.
        let answered = response.0.header.as_ref().map_or(0, |h| h.cluster_id);
        self.check_cluster(answered, endpoint)?;
        if response.canceled() {
            let compact_revision = response.compact_revision();
            if compact_revision > 0 {
                self.watch = None;
                return Ok(Some(Next::Ended(Ended::Compacted { compact_revision })));
            }
            let why = response.cancel_reason();
            let error = |reason: Reason, advice: &str| {
                let message = format!("watch at {endpoint}: {why}{advice}");
                reason.error(message)
            };
            return Err(match why {
                w if w.contains("permission denied") => Failed::Final(error(
                    Reason::PermissionDenied,
                    ": grant the user's role to read all keys",
                )),
                w if w.contains("no leader") => {
                    Failed::TryAgain(error(Reason::NoQuorum, ": the member has no leader"))
                }
                _ => Failed::TryAgain(error(Reason::EtcdUnreachable, "")),
            });
        }
        if let (Some(watch), false) = (self.watch.as_mut(), response.created()) {
            watch.whole = !response.0.fragment;
            let events = response.0.events.into_iter().map(etcd_client::Event);
            watch.events = events.rev().collect();
        }
        Ok(None)
    }

    /// Nothing came for a while: has the cluster gone on without this member, or back?
    fn look(&mut self) -> Result<(), Failed> {
        let now = Instant::now();
        let revision = self.quorum_revision();
        let Some(watch) = self.watch.as_mut() else {
            return Ok(());
        };
        watch.looked = now;
        // Where the cluster has no quorum there is nothing to miss; a broken connection is told apart.
        let Ok(revision) = revision else {
            return Ok(());
        };
        let silent = now.duration_since(watch.heard);
        let position = self.position.revision;
        // What is at the position comes at once where the cluster holds it.
        let owed =
            revision > position || (!watch.verified && self.position.fingerprint.changes > 0);
        self.current = revision;
        if revision < position {
            let why = format!("the cluster is at revision {revision} only");
            return Err(Failed::TryAgain(Reason::EtcdUnreachable.error(why)));
        }
        if owed && silent >= STALLED_AFTER {
            return Err(Failed::TryAgain(Reason::EtcdUnreachable.error(format!(
                "the cluster is at revision {revision}, and nothing came after {position} for {} s",
                silent.as_secs()
            ))));
        }
        Ok(())
    }

    /// The newest revision, as a quorum has it.
    ///
    /// # Errors
    /// As [`next`](Self::next).
    pub fn quorum_revision(&self) -> Result<i64> {
        quorum_revision(&self.way, &self.endpoints)
    }
}

/// The type of a delete in etcd's messages.
const TYPE_DELETE: i32 = 1;

/// The newest revision as a quorum has it, from the first member that tells.
///
/// # Errors
/// `EtcdUnreachable`, `NoQuorum`; those of wrong settings and credentials; `Terminated`.
pub fn quorum_revision(way: &Connector, endpoints: &[String]) -> Result<i64> {
    let mut failures = Vec::new();
    for endpoint in endpoints {
        let asked = way.dial(endpoint, Streams::Plain).and_then(|client| {
            let count = GetOptions::new().with_count_only();
            let mut kv = client.kv_client();
            way.ask(
                "ask for the revision",
                endpoint,
                kv.get(vec![0], Some(count)),
            )
        });
        match asked {
            Ok(answer) => return Ok(answer.header().map_or(0, |h| h.revision())),
            Err(Failed::Final(e)) if e.reason() == Reason::Terminated => return Err(e),
            Err(f) => failures.push(f.into_error()),
        }
    }
    Err(most_telling(failures))
}

/// Of what went wrong at several members, what helps most; all of it in one message.
pub(super) fn most_telling(failures: Vec<Error>) -> Error {
    let rank = |e: &Error| match e.reason() {
        Reason::EtcdUnreachable => 2,
        Reason::NoQuorum => 1,
        _ => 0,
    };
    let reason = failures.iter().min_by_key(|e| rank(e)).map(Error::reason);
    let said: Vec<String> = failures.iter().map(Error::to_string).collect();
    match reason {
        Some(reason) => reason.error(said.join("; ")),
        None => Reason::Usage.error("--endpoints names no endpoint"),
    }
}
