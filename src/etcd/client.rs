//! A blocking client for the keys of a live etcd.
//!
//! It takes the endpoints in turn, tries again where that is safe, and gives every failure its
//! reason; what is read and written it does not decide. `ops::apply` calls it.

use crate::base::Cancel;
use crate::base::retry::{BackoffBuilder, backoff};
use crate::error::{Error, Reason, Result};
use crate::etcd::connect::{Connector, Endpoints, Failed, Streams};
use crate::etcd::diff::{Action, LiveKey, Write};
use etcd_client::{
    Compare, CompareOp, GetOptions, KvClient, PutOptions, Txn, TxnOp, TxnOpResponse,
};
use std::iter;
use std::time::Duration;
use tokio::runtime::Handle;

/// Live keys of a range, in order.
#[derive(Debug)]
pub struct Page {
    /// The keys.
    pub keys: Vec<LiveKey>,
    /// Whether more follow.
    pub more: bool,
    /// etcd's newest revision when it answered.
    pub revision: i64,
}

/// What became of a guarded transaction.
#[derive(Debug)]
pub enum Committed {
    /// All its writes are done, in this revision.
    Done {
        /// The revision.
        revision: i64,
    },
    /// A key had changed: nothing was written.
    Changed {
        /// For a single write the key as it is now; `None` where it is missing.
        now: Option<LiveKey>,
        /// An answer was lost before, so the change may be this very transaction's.
        maybe_ours: bool,
    },
    /// The server's limits do not allow it: nothing was written.
    TooLarge {
        /// What the server said.
        message: String,
    },
}

/// Rounds over all endpoints for a request, with longer pauses between them: an election ends.
const ROUNDS: usize = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Bytes of an answer with several keys. A longer one is refused by its length, before it is received,
/// and asked for again with fewer keys.
const PAGE_BYTES: usize = 16 << 20;

/// A connection to an etcd; clones share it. Its calls block: not for async threads.
#[derive(Clone)]
pub struct Client {
    way: Connector,
    /// The endpoint in use, and its connection once there is one.
    at: usize,
    kv: Option<KvClient>,
}

impl Client {
    /// Connects, and has one member answer with what its quorum agrees on.
    ///
    /// # Errors
    /// `Usage` and `Configuration` for what is given, `EtcdUnreachable`, `Unauthenticated`,
    /// `PermissionDenied`, `Terminated`.
    pub fn connect(options: Endpoints, handle: Handle, cancel: Cancel) -> Result<Self> {
        let mut client = Client {
            way: Connector::new(options, handle, cancel)?,
            at: 0,
            kv: None,
        };
        // The key need not be there, and the user need not be allowed to read it.
        let probe = async |mut kv: KvClient| {
            let options = GetOptions::new().with_count_only();
            kv.get(vec![0], Some(options)).await.map(drop)
        };
        match client.call("connect", 1, probe) {
            Ok(_) => Ok(client),
            Err(Failed::Final(e)) if e.reason() == Reason::PermissionDenied => Ok(client),
            Err(f) => Err(f.into_error()),
        }
    }

    /// The endpoints, for messages.
    pub fn name(&self) -> String {
        self.way.options().endpoints.join(",")
    }

    /// Keys from `from` to before `end` (`[0]`: to the end), at most `limit`, as of `revision`
    /// (0: now). Where they are large it gives fewer.
    ///
    /// # Errors
    /// `Conflict` where etcd has compacted that revision meanwhile; as [`connect`](Self::connect).
    pub fn page(&mut self, from: &[u8], end: &[u8], revision: i64, limit: usize) -> Result<Page> {
        let mut limit = limit;
        let mut got = loop {
            let request = async |kv: KvClient| {
                let options = GetOptions::new().with_range(end).with_revision(revision);
                let options = options.with_limit(i64::try_from(limit).unwrap_or(i64::MAX));
                // One key must come through, however large it is.
                let longest = if limit > 1 { PAGE_BYTES } else { usize::MAX };
                let mut kv = kv.max_decoding_message_size(longest);
                kv.get(from, Some(options)).await
            };
            match self.call("read keys", ROUNDS, request) {
                Ok((got, _)) => break got,
                Err(Failed::TooLarge(_)) if limit > 1 => limit = (limit / 8).max(1),
                Err(f) => return Err(f.into_error()),
            }
        };
        let keys = got.take_kvs().into_iter().map(live_key).collect();
        Ok(Page {
            keys,
            more: got.more(),
            revision: got.header().map_or(0, |h| h.revision()),
        })
    }

    /// Writes all of `writes` in one transaction, if no key has changed since it was seen.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); `NoSpace` where etcd's quota is used up.
    pub fn commit(&mut self, writes: &[Write]) -> Result<Committed> {
        let single = writes.len() == 1;
        let request = async |mut kv: KvClient| kv.txn(txn(writes)).await;
        let (answer, retried) = match self.call("write keys", ROUNDS, request) {
            Ok(done) => done,
            Err(Failed::TooLarge(message)) => return Ok(Committed::TooLarge { message }),
            Err(f) => return Err(f.into_error()),
        };
        if answer.succeeded() {
            let revision = answer.header().map_or(0, |h| h.revision());
            return Ok(Committed::Done { revision });
        }
        let now = match answer.op_responses().into_iter().next() {
            Some(TxnOpResponse::Get(mut got)) if single => {
                got.take_kvs().into_iter().next().map(live_key)
            }
            _ => None,
        };
        Ok(Committed::Changed {
            now,
            maybe_ours: retried,
        })
    }

    /// Makes a request, at one endpoint after the other. The flag tells whether an attempt failed
    /// before, of which it is not known what became.
    fn call<T>(
        &mut self,
        what: &str,
        rounds: usize,
        request: impl AsyncFn(KvClient) -> Result<T, etcd_client::Error>,
    ) -> Result<(T, bool), Failed> {
        let mut failures: Vec<Error> = Vec::new();
        let pauses = backoff(FIRST_PAUSE, LONGEST_PAUSE, rounds - 1).build();
        for (round, pause) in iter::once(None).chain(pauses.map(Some)).enumerate() {
            if let Some(pause) = pause {
                self.way.wait(async { tokio::time::sleep(pause).await })?;
            }
            failures.clear();
            for _ in 0..self.way.options().endpoints.len() {
                match self.attempt(what, &request) {
                    Ok(done) => return Ok((done, round > 0 || !failures.is_empty())),
                    Err(Failed::TryAgain(e)) => failures.push(e),
                    Err(other) => return Err(other),
                }
                self.kv = None;
                self.at = (self.at + 1) % self.way.options().endpoints.len();
            }
        }
        let reason = failures
            .first()
            .map_or(Reason::EtcdUnreachable, Error::reason);
        let said: Vec<String> = failures.iter().map(Error::to_string).collect();
        Err(Failed::Final(reason.error(said.join("; "))))
    }

    fn attempt<T>(
        &mut self,
        what: &str,
        request: &impl AsyncFn(KvClient) -> Result<T, etcd_client::Error>,
    ) -> Result<T, Failed> {
        let endpoint = self.way.options().endpoints[self.at].clone();
        let kv = match &self.kv {
            Some(kv) => kv.clone(),
            None => {
                let client = self.way.dial(&endpoint, Streams::Plain)?;
                // HashKV and pages of large values are far above the 4 MiB that gRPC takes by default.
                let kv = client
                    .kv_client()
                    .max_decoding_message_size(usize::MAX)
                    .max_encoding_message_size(usize::MAX);
                self.kv.insert(kv).clone()
            }
        };
        self.way.ask(what, &endpoint, request(kv))
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

/// The guarded transaction. Only one write alone asks for the key as it is where its guard fails.
fn txn(writes: &[Write]) -> Txn {
    let guards: Vec<Compare> = writes
        .iter()
        .map(|w| Compare::mod_revision(w.key.as_slice(), CompareOp::Equal, w.seen))
        .collect();
    let ops: Vec<TxnOp> = writes
        .iter()
        .map(|w| match &w.action {
            Action::Put { value, keep_lease } => {
                let options = keep_lease.then(|| PutOptions::new().with_ignore_lease());
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
