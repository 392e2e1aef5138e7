//! A blocking client for the keys of a live etcd.
//!
//! It takes the endpoints in turn, tries again where that is safe, and gives every failure its
//! reason; what is read and written it does not decide. `job::apply` calls it.

use crate::error::{Error, Reason, Result};
use crate::etcd::diff::{Action, LiveKey, Write};
use crate::store::Cancel;
use etcd_client::{
    Certificate, Compare, CompareOp, ConnectOptions, GetOptions, Identity, KvClient, PutOptions,
    TlsOptions, Txn, TxnOp, TxnOpResponse,
};
use std::error::Error as _;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::runtime::Handle;

/// How to reach an etcd. The fields are etcdctl's flags of these names.
#[derive(Debug, Clone)]
pub struct Endpoints {
    /// URLs of members, tried in turn; one at least.
    pub endpoints: Vec<String>,
    /// PEM of the authorities whose certificates count; those of the system where `None`.
    pub cacert: Option<PathBuf>,
    /// PEM of the client's certificate; together with `key`.
    pub cert: Option<PathBuf>,
    /// PEM of the client's key.
    pub key: Option<PathBuf>,
    /// Who asks, where etcd has authentication enabled.
    pub user: Option<User>,
    /// To connect to one member.
    pub dial_timeout: Duration,
    /// For one request.
    pub command_timeout: Duration,
}

/// A user of etcd; its password shows nowhere.
#[derive(Clone)]
pub struct User {
    /// The name.
    pub name: String,
    /// The password.
    pub password: String,
}

impl fmt::Debug for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("User")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

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

/// What an attempt came to.
enum Failed {
    /// Another attempt, or another member, may do.
    TryAgain(Error),
    /// It will not.
    Final(Error),
    /// The request is too large for the server, or the answer for us.
    TooLarge(String),
}

/// Rounds over all endpoints for a request, with longer pauses between them: an election ends.
const ROUNDS: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// Bytes of an answer with several keys. A longer one is refused by its length, before it is received,
/// and asked for again with fewer keys.
const PAGE_BYTES: usize = 16 << 20;

/// A connection to an etcd; clones share it. Its calls block: not for async threads.
#[derive(Clone)]
pub struct Client {
    options: Endpoints,
    tls: Option<TlsOptions>,
    handle: Handle,
    cancel: Cancel,
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
        if options.endpoints.is_empty() {
            return Err(Error::new(Reason::Usage, "--endpoints names no endpoint"));
        }
        for endpoint in &options.endpoints {
            check_endpoint(endpoint, has_tls_files(&options))?;
        }
        let tls = tls(&options)?;
        let mut client = Client {
            options,
            tls,
            handle,
            cancel,
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
        self.options.endpoints.join(",")
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
        rounds: u32,
        request: impl AsyncFn(KvClient) -> Result<T, etcd_client::Error>,
    ) -> Result<(T, bool), Failed> {
        let mut failures: Vec<Error> = Vec::new();
        for round in 0..rounds {
            if round > 0 {
                let pause = FIRST_PAUSE * 2u32.pow(round - 1);
                self.wait(async { tokio::time::sleep(pause).await })?;
            }
            failures.clear();
            for _ in 0..self.options.endpoints.len() {
                match self.attempt(what, &request) {
                    Ok(done) => return Ok((done, round > 0 || !failures.is_empty())),
                    Err(Failed::TryAgain(e)) => failures.push(e),
                    Err(other) => return Err(other),
                }
                self.kv = None;
                self.at = (self.at + 1) % self.options.endpoints.len();
            }
        }
        let reason = failures
            .first()
            .map_or(Reason::EtcdUnreachable, Error::reason);
        let said: Vec<String> = failures.iter().map(Error::to_string).collect();
        Err(Failed::Final(Error::new(reason, said.join("; "))))
    }

    fn attempt<T>(
        &mut self,
        what: &str,
        request: &impl AsyncFn(KvClient) -> Result<T, etcd_client::Error>,
    ) -> Result<T, Failed> {
        let endpoint = self.options.endpoints[self.at].clone();
        let patience = self.options.command_timeout;
        let kv = match &self.kv {
            Some(kv) => kv.clone(),
            None => {
                let patience = patience + self.options.dial_timeout;
                let connecting = connect_one(&endpoint, &self.options, self.tls.clone());
                let kv = self
                    .wait(async { tokio::time::timeout(patience, connecting).await })?
                    .map_err(|_| timed_out("connect", &endpoint, patience))?
                    .map_err(|e| failure("connect", &endpoint, &self.options, e))?;
                self.kv.insert(kv).clone()
            }
        };
        self.wait(async { tokio::time::timeout(patience, request(kv)).await })?
            .map_err(|_| timed_out(what, &endpoint, patience))?
            .map_err(|e| failure(what, &endpoint, &self.options, e))
    }

    /// Waits for `f`, unless cancelled first.
    fn wait<F: Future>(&self, f: F) -> Result<F::Output, Failed> {
        self.handle
            .block_on(self.cancel.or(f))
            .map_err(Failed::Final)
    }
}

impl Failed {
    fn into_error(self) -> Error {
        match self {
            Failed::TryAgain(e) | Failed::Final(e) => e,
            Failed::TooLarge(message) => Error::new(Reason::Configuration, message),
        }
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

async fn connect_one(
    endpoint: &str,
    options: &Endpoints,
    tls: Option<TlsOptions>,
) -> Result<KvClient, etcd_client::Error> {
    // HashKV and pages of large values are far above the 4 MiB that gRPC takes by default.
    let kv = |c: etcd_client::Client| {
        c.kv_client()
            .max_decoding_message_size(usize::MAX)
            .max_encoding_message_size(usize::MAX)
    };
    let mut connect = ConnectOptions::new().with_connect_timeout(options.dial_timeout);
    if let Some(tls) = tls.filter(|_| !endpoint.starts_with("http://")) {
        connect = connect.with_tls(tls);
    }
    let anonymous = connect.clone();
    if let Some(user) = &options.user {
        connect = connect
            .with_user(user.name.as_str(), user.password.as_str())
            .with_auto_token_refresh(true);
    }
    match etcd_client::Client::connect([endpoint], Some(connect)).await {
        // As etcdctl: a user is no harm where none is asked for.
        Err(e) if e.to_string().contains("authentication is not enabled") => {
            let client = etcd_client::Client::connect([endpoint], Some(anonymous)).await?;
            Ok(kv(client))
        }
        other => other.map(kv),
    }
}

fn timed_out(what: &str, endpoint: &str, patience: Duration) -> Failed {
    Failed::TryAgain(Error::new(
        Reason::EtcdUnreachable,
        format!(
            "{what} at {endpoint}: no answer within {} s: check --endpoints, or give it more time with --command-timeout",
            patience.as_secs_f64()
        ),
    ))
}

/// Gives a failure its reason.
fn failure(what: &str, endpoint: &str, options: &Endpoints, e: etcd_client::Error) -> Failed {
    use etcd_client::Error as E;
    let error = |reason, said: &str, advice: &str| {
        Error::new(reason, format!("{what} at {endpoint}: {said}{advice}"))
    };
    let said = causes(&e);
    // TLS fails deep below what the libraries tell apart.
    let certificate = [
        "certificate",
        "CertificateRequired",
        "BadCertificate",
        "UnknownCA",
        "HandshakeFailure",
    ]
    .iter()
    .any(|sign| said.contains(sign));
    let E::GRpcStatus(status) = &e else {
        return match &e {
            _ if certificate => Failed::Final(error(Reason::Configuration, &said, CHECK_TLS)),
            E::TransportError(_) | E::InvalidArgs(_) | E::InvalidUri(_) => Failed::Final(error(
                Reason::Configuration,
                &said,
                ": check --endpoints, --cacert, --cert and --key",
            )),
            _ => Failed::TryAgain(error(Reason::EtcdUnreachable, &said, "")),
        };
    };
    // Codes of gRPC; the type itself is not etcd-client's to give.
    let (code, message) = (status.code() as i32, status.message());
    const INVALID_ARGUMENT: i32 = 3;
    const PERMISSION_DENIED: i32 = 7;
    const RESOURCE_EXHAUSTED: i32 = 8;
    const FAILED_PRECONDITION: i32 = 9;
    const OUT_OF_RANGE: i32 = 11;
    const UNAUTHENTICATED: i32 = 16;
    let who = match &options.user {
        Some(user) => format!(": check --user and --password (user {})", user.name),
        None => ": it wants a user, give --user and --password".to_owned(),
    };
    let has = |text: &str| message.contains(text);
    match code {
        _ if has("request is too large")
            || has("too many operations")
            || has("larger than max")
            || has("message length too large") =>
        {
            Failed::TooLarge(message.to_owned())
        }
        UNAUTHENTICATED => Failed::Final(error(Reason::Unauthenticated, message, &who)),
        INVALID_ARGUMENT | FAILED_PRECONDITION
            if has("authentication failed") || has("user name") || has("user name is empty") =>
        {
            Failed::Final(error(Reason::Unauthenticated, message, &who))
        }
        PERMISSION_DENIED => Failed::Final(error(
            Reason::PermissionDenied,
            message,
            ": grant the user's role what it lacks",
        )),
        RESOURCE_EXHAUSTED if has("database space exceeded") => Failed::Final(error(
            Reason::NoSpace,
            message,
            ": compact and defragment etcd, then `etcdctl alarm disarm`",
        )),
        OUT_OF_RANGE if has("compacted") => Failed::Final(error(
            Reason::Conflict,
            message,
            ": etcd was compacted while it was read, run again",
        )),
        INVALID_ARGUMENT | FAILED_PRECONDITION | OUT_OF_RANGE => {
            Failed::Final(error(Reason::Configuration, message, ""))
        }
        _ if certificate => Failed::Final(error(Reason::Configuration, &said, CHECK_TLS)),
        // The connection came about and broke: so it does where one end wants TLS, or a certificate.
        _ if status.source().is_some() && !said.contains("tcp connect error") => {
            Failed::TryAgain(error(Reason::EtcdUnreachable, &said, CHECK_TLS))
        }
        _ => Failed::TryAgain(error(Reason::EtcdUnreachable, &said, "")),
    }
}

const CHECK_TLS: &str =
    ": check whether --endpoints are https:// or http://, and --cacert, --cert and --key";

/// An error with what lies below it.
fn causes(e: &etcd_client::Error) -> String {
    let mut said = match e {
        etcd_client::Error::GRpcStatus(s) => s.message().to_owned(),
        e => e.to_string(),
    };
    let mut source = match e {
        etcd_client::Error::GRpcStatus(s) => s.source(),
        etcd_client::Error::TransportError(t) => t.source(),
        _ => None,
    };
    while let Some(cause) = source {
        let text = cause.to_string();
        if !said.contains(&text) {
            said = format!("{said}: {text}");
        }
        source = cause.source();
    }
    said
}

fn has_tls_files(options: &Endpoints) -> bool {
    options.cacert.is_some() || options.cert.is_some()
}

/// Refuses what can be seen to be wrong before anything is sent.
fn check_endpoint(endpoint: &str, has_tls_files: bool) -> Result<()> {
    let wrong = |why: &str| {
        Err(Error::new(
            Reason::Usage,
            format!("--endpoints: {why}: give URLs such as https://10.0.0.1:2379"),
        ))
    };
    let (scheme, rest) = match endpoint.split_once("://") {
        Some((scheme, rest)) => (Some(scheme), rest),
        None => (None, endpoint),
    };
    if rest.contains('@') {
        // It may hold a password: it is not shown.
        return wrong("an endpoint has a user in it; that is what --user is for");
    }
    match scheme {
        Some("http") if has_tls_files => wrong(&format!(
            "{endpoint} is without TLS, so --cacert, --cert and --key are of no use there"
        )),
        Some("http" | "https") | None if !rest.trim_matches('/').is_empty() => Ok(()),
        _ => wrong(&format!("\"{endpoint}\" is no endpoint")),
    }
}

/// What TLS needs; `None` where no endpoint uses it.
fn tls(options: &Endpoints) -> Result<Option<TlsOptions>> {
    let read = |flag: &str, path: &Path| {
        std::fs::read(path).map_err(|e| {
            Error::new(
                Reason::Configuration,
                format!("{flag} {} cannot be read: {e}", path.display()),
            )
        })
    };
    let secure = options.endpoints.iter().any(|e| e.starts_with("https://"));
    if !secure && !has_tls_files(options) {
        return Ok(None);
    }
    let mut tls = TlsOptions::new();
    tls = match &options.cacert {
        Some(path) => tls.ca_certificate(Certificate::from_pem(read("--cacert", path)?)),
        None => tls.with_native_roots(),
    };
    match (&options.cert, &options.key) {
        (Some(cert), Some(key)) => {
            let identity = Identity::from_pem(read("--cert", cert)?, read("--key", key)?);
            tls = tls.identity(identity);
        }
        (None, None) => {}
        _ => {
            return Err(Error::new(
                Reason::Usage,
                "--cert and --key belong together: give both",
            ));
        }
    }
    Ok(Some(tls))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_looked_at_before_anything_is_sent() {
        for good in [
            "http://a:2379",
            "https://a:2379",
            "a:2379",
            "http://[::1]:2379/",
        ] {
            check_endpoint(good, false).unwrap();
        }
        check_endpoint("https://a:2379", true).unwrap();
        check_endpoint("a:2379", true).unwrap();
        for bad in ["", "http://", "ftp://a", "unix:///a", "http://u:secret@a:1"] {
            let e = check_endpoint(bad, false).unwrap_err();
            assert_eq!(e.reason(), Reason::Usage, "{bad}");
            assert!(!e.to_string().contains("secret"), "{e}");
        }
        assert!(check_endpoint("http://a:2379", true).is_err());
    }

    #[test]
    fn a_password_shows_nowhere() {
        let user = User {
            name: "root".to_owned(),
            password: "secret".to_owned(),
        };
        let shown = format!("{user:?}");
        assert!(
            shown.contains("root") && !shown.contains("secret"),
            "{shown}"
        );
    }
}
