//! A blocking client that reads and writes the keys of a live etcd.
//!
//! It tries the endpoints in turn, retries if that is safe, and gives every failure its reason.

use crate::base::retry::{BackoffBuilder, backoff};
use crate::base::{Cancel, causes};
use crate::error::{Error, Reason, Result};
use crate::etcd::connect::{AttemptError, Connector, Endpoints, Streams};
use crate::etcd::diff::{Action, LiveKey, PutLease, Write};
use etcd_client::{
    Compare, CompareOp, GetOptions, KvClient, PutOptions, Txn, TxnOp, TxnOpResponse,
};
use std::iter;
use std::time::Duration;
use tokio::runtime::Handle;

/// The beginning of a key range.
#[derive(Debug)]
pub struct KeyPage {
    /// The keys, in ascending order.
    pub keys: Vec<LiveKey>,
    /// Whether the range has more keys.
    pub more: bool,
    /// The newest revision of etcd at the time of the response.
    pub revision: i64,
}

/// The result of a guarded transaction.
#[derive(Debug)]
pub enum Committed {
    /// All writes were done.
    Done {
        /// The revision of the transaction.
        revision: i64,
    },
    /// A key had changed, and nothing was written.
    Changed {
        /// The current key, if the transaction had a single write and the key exists.
        now: Option<LiveKey>,
        /// Whether an earlier attempt got no response, so that this transaction itself may have changed the
        /// key.
        maybe_ours: bool,
    },
    /// The transaction exceeds a limit of the server, and nothing was written.
    TooLarge {
        /// The message of the server.
        message: String,
    },
}

/// The maximum number of rounds over all endpoints. The pauses between them are long enough for an election.
const ROUNDS: usize = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// The maximum size of a response with several keys. A larger one is refused before it is received, and
/// requested again with fewer keys.
const PAGE_BYTES: usize = 16 << 20;

/// A client for the keys of an etcd; clones share the connection. Its calls block, so they must not run on
/// the threads of the runtime.
#[derive(Clone)]
pub struct Client {
    connector: Connector,
    /// The index of the endpoint in use.
    endpoint: usize,
    /// The connection to that endpoint, once it exists.
    kv: Option<KvClient>,
}

impl Client {
    /// Connects to one member, and makes a linearizable read, which needs a quorum.
    ///
    /// # Errors
    /// `Usage` and `Configuration` for wrong options; `EtcdUnreachable`, `NoQuorum`, `Unauthenticated`,
    /// `PermissionDenied`, `Terminated`.
    pub fn connect(options: Endpoints, handle: Handle, cancel: Cancel) -> Result<Self> {
        let mut client = Client {
            connector: Connector::new(options, handle, cancel)?,
            endpoint: 0,
            kv: None,
        };
        // The key need not exist, and the user need not have the permission to read it.
        let probe = async |mut kv: KvClient| {
            let options = GetOptions::new().with_count_only();
            kv.get(vec![0], Some(options)).await.map(drop)
        };
        match client.call("connect", 1, probe) {
            Ok(_) => Ok(client),
            Err(AttemptError::Final(e)) if e.reason() == Reason::PermissionDenied => Ok(client),
            Err(f) => Err(f.into_error()),
        }
    }

    /// Returns the endpoints, for messages.
    pub fn name(&self) -> String {
        self.connector.options().endpoints.join(",")
    }

    /// Reads at most `limit` keys at `revision` (0: the newest), from `from` to before `end` (`[0]`: to the
    /// last key). Returns fewer keys if they are large.
    ///
    /// # Errors
    /// `Conflict` if etcd has compacted that revision; otherwise as [`connect`](Self::connect).
    pub fn page(
        &mut self,
        from: &[u8],
        end: &[u8],
        revision: i64,
        limit: usize,
    ) -> Result<KeyPage> {
        let mut limit = limit;
        let mut response = loop {
            let request = async |kv: KvClient| {
                let options = GetOptions::new()
                    .with_range(end)
                    .with_revision(revision)
                    .with_limit(i64::try_from(limit).unwrap_or(i64::MAX));
                // A single key is always received, however large it is.
                let largest = if limit > 1 { PAGE_BYTES } else { usize::MAX };
                let mut kv = kv.max_decoding_message_size(largest);
                kv.get(from, Some(options)).await
            };
            match self.call("read keys", ROUNDS, request) {
                Ok((response, _)) => break response,
                Err(AttemptError::TooLarge(_)) if limit > 1 => limit = (limit / 8).max(1),
                Err(e) => return Err(e.into_error()),
            }
        };
        let keys = response.take_kvs().into_iter().map(live_key).collect();
        Ok(KeyPage {
            keys,
            more: response.more(),
            revision: response.header().map_or(0, |h| h.revision()),
        })
    }

    /// Does all writes in one transaction, if none of the keys has changed since it was compared.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); `NoSpace` if etcd's quota is used up.
    pub fn commit(&mut self, writes: &[Write]) -> Result<Committed> {
        let single = writes.len() == 1;
        let request = async |mut kv: KvClient| kv.txn(txn(writes)).await;
        let (response, retried) = match self.call("write keys", ROUNDS, request) {
            Ok(done) => done,
            Err(AttemptError::TooLarge(message)) => return Ok(Committed::TooLarge { message }),
            Err(e) => return Err(e.into_error()),
        };
        if response.succeeded() {
            let revision = response.header().map_or(0, |h| h.revision());
            return Ok(Committed::Done { revision });
        }
        let now = match response.op_responses().into_iter().next() {
            Some(TxnOpResponse::Get(mut current)) if single => {
                current.take_kvs().into_iter().next().map(live_key)
            }
            _ => None,
        };
        Ok(Committed::Changed {
            now,
            maybe_ours: retried,
        })
    }

    /// Grants a lease, and returns its ID.
    ///
    /// # Errors
    /// As [`page`](Self::page).
    pub fn grant_lease(&self, time_to_live: Duration) -> Result<i64> {
        let endpoint = &self.connector.options().endpoints[self.endpoint];
        let seconds = i64::try_from(time_to_live.as_secs()).unwrap_or(i64::MAX);
        let granted = self.connector.dial(endpoint, Streams::Plain);
        let granted = granted.and_then(|client| {
            let grant = async { client.lease_client().grant(seconds, None).await };
            self.connector.ask("grant a lease", endpoint, grant)
        });
        granted
            .map(|lease| lease.id())
            .map_err(AttemptError::into_error)
    }

    /// Makes a request, at one endpoint after the other. Returns the response, and whether an earlier attempt
    /// failed, which may have been executed nevertheless.
    fn call<T>(
        &mut self,
        operation: &str,
        rounds: usize,
        request: impl AsyncFn(KvClient) -> Result<T, etcd_client::Error>,
    ) -> Result<(T, bool), AttemptError> {
        let mut failures: Vec<Error> = Vec::new();
        let pauses = backoff(FIRST_PAUSE, LONGEST_PAUSE, rounds - 1).build();
        for (round, pause) in iter::once(None).chain(pauses.map(Some)).enumerate() {
            if let Some(pause) = pause {
                self.connector
                    .wait(async { tokio::time::sleep(pause).await })?;
            }
            failures.clear();
            for _ in 0..self.connector.options().endpoints.len() {
                match self.attempt(operation, &request) {
                    Ok(done) => return Ok((done, round > 0 || !failures.is_empty())),
                    Err(AttemptError::TryAgain(e)) => failures.push(e),
                    Err(other) => return Err(other),
                }
                self.kv = None;
                self.endpoint = (self.endpoint + 1) % self.connector.options().endpoints.len();
            }
        }
        let reason = failures
            .first()
            .map_or(Reason::EtcdUnreachable, Error::reason);
        let messages: Vec<String> = failures.iter().map(Error::to_string).collect();
        Err(AttemptError::Final(reason.error(causes::join(&messages))))
    }

    /// Makes a request at the endpoint in use, and connects to it if necessary.
    fn attempt<T>(
        &mut self,
        operation: &str,
        request: &impl AsyncFn(KvClient) -> Result<T, etcd_client::Error>,
    ) -> Result<T, AttemptError> {
        let endpoint = self.connector.options().endpoints[self.endpoint].clone();
        let kv = match &self.kv {
            Some(kv) => kv.clone(),
            None => {
                let client = self.connector.dial(&endpoint, Streams::Plain)?;
                // Pages of large values exceed the 4 MiB that gRPC accepts by default.
                let kv = client
                    .kv_client()
                    .max_decoding_message_size(usize::MAX)
                    .max_encoding_message_size(usize::MAX);
                self.kv.insert(kv).clone()
            }
        };
        self.connector.ask(operation, &endpoint, request(kv))
    }
}

fn live_key(kv: etcd_client::KeyValue) -> LiveKey {
    let (mod_revision, lease) = (kv.mod_revision(), kv.lease());
    let (key, value) = kv.into_key_value();
    LiveKey {
        key,
        value,
        mod_revision,
        lease,
    }
}

/// Builds the guarded transaction. If it has a single write whose guard fails, it returns the current key.
fn txn(writes: &[Write]) -> Txn {
    let guards: Vec<Compare> = writes
        .iter()
        .map(|w| Compare::mod_revision(w.key.as_slice(), CompareOp::Equal, w.mod_revision))
        .collect();
    let ops: Vec<TxnOp> = writes
        .iter()
        .map(|w| match &w.action {
            Action::Put { value, lease } => {
                let options = match lease {
                    PutLease::Keep => Some(PutOptions::new().with_ignore_lease()),
                    PutLease::Of(0) => None,
                    PutLease::Of(lease) => Some(PutOptions::new().with_lease(*lease)),
                };
                TxnOp::put(w.key.as_slice(), value.as_slice(), options)
            }
            Action::Delete => TxnOp::delete(w.key.as_slice(), None),
        })
        .collect();
    let txn = Txn::new().when(guards).and_then(ops);
    match writes {
        [one] => txn.or_else([TxnOp::get(one.key.as_slice(), None)]),
        _ => txn,
    }
}
