//! Connects to a member of a live etcd: TLS, credentials, timeouts, and the reasons of failures.
//!
//! It uses the endpoint and the request that the caller chooses.

use crate::base::opt::{
    self, AUTH_SECRET, CACERT, CERT, COMMAND_TIMEOUT, ENDPOINTS, KEY, Opt, PASSWORD, TLS_SECRET,
    USER,
};
use crate::base::{Cancel, causes, duration, mounted_secret, tls};
use crate::error::{Error, Reason, Result};
use clap::Args;
use etcd_client::{Channel, ConnectOptions};
use http::Uri;
use rustls::ClientConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use std::collections::BTreeMap;
use std::error::Error as _;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;

/// How to reach an etcd. The flags are etcdctl's own.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Live etcd")]
pub struct Endpoints {
    /// Comma-separated client URLs of the members
    #[arg(long, value_name = "URLS", value_delimiter = ',', value_parser = trimmed, required = true)]
    pub endpoints: Vec<String>,
    /// CA certificates that verify the members (PEM) [default: the system's]
    #[arg(long, value_name = "FILE", requires = "endpoints")]
    pub cacert: Option<PathBuf>,
    /// Client certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "key", requires = "endpoints")]
    pub cert: Option<PathBuf>,
    /// Key of the client certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "cert", requires = "endpoints")]
    pub key: Option<PathBuf>,
    /// Folder with ca.crt and optionally tls.crt and tls.key, such as a mounted Secret
    ///
    /// It replaces --cacert, --cert and --key. The files are read again for each connection.
    #[arg(long, value_name = "DIR", requires = "endpoints", conflicts_with_all = ["cacert", "cert", "key"])]
    pub tls_secret: Option<PathBuf>,
    /// The user of --user, if etcd has authentication enabled.
    #[arg(skip)]
    pub user: Option<User>,
    /// Folder with the files username and password of an etcd user, such as a mounted Secret
    ///
    /// It replaces --user and --password. The files are read again for each connection.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["user", "password", "password_file"])]
    pub auth_secret: Option<PathBuf>,
    /// Timeout for a connection
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = duration::parse_above_zero)]
    pub dial_timeout: Duration,
    /// Timeout for a response
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = duration::parse_above_zero)]
    pub command_timeout: Duration,
    /// Send a keepalive ping after a connection was idle for this time
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration::parse_above_zero)]
    pub keepalive_time: Duration,
    /// Close a connection if a keepalive ping gets no response within this time
    #[arg(long, value_name = "DURATION", default_value = "6s", value_parser = duration::parse_above_zero)]
    pub keepalive_timeout: Duration,
}

fn trimmed(url: &str) -> Result<String, std::convert::Infallible> {
    Ok(url.trim().to_owned())
}

/// A user of etcd. The password is never printed.
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

/// Why one attempt at a request failed.
#[derive(Debug)]
pub enum AttemptError {
    /// Another attempt, or another member, may succeed.
    TryAgain(Error),
    /// Every attempt would fail.
    Final(Error),
    /// The request is too large for the server, or the response for the client.
    TooLarge(String),
}

impl AttemptError {
    /// Returns the error, for a caller that does not retry.
    pub fn into_error(self) -> Error {
        match self {
            AttemptError::TryAgain(e) | AttemptError::Final(e) => e,
            AttemptError::TooLarge(message) => Reason::Configuration.error(message),
        }
    }
}

/// The streams that a connection is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Streams {
    /// Single requests, and snapshots.
    Plain,
    /// Watches. A member that loses its leader ends them.
    NeedLeader,
}

/// Connects to any member; clones are cheap. Its calls block, so they must not run on the threads of the
/// runtime.
#[derive(Clone)]
pub struct Connector {
    options: Arc<Endpoints>,
    /// The URL of the Unix socket to which every connection goes.
    socket: Option<String>,
    handle: Handle,
    cancel: Cancel,
}

impl Connector {
    /// Checks the endpoints and reads the certificates. Nothing is sent.
    ///
    /// # Errors
    /// `Usage` and `Configuration` for wrong options; `CertificateExpired`.
    pub fn new(options: Endpoints, handle: Handle, cancel: Cancel) -> Result<Self> {
        if options.endpoints.is_empty() {
            return Err(Reason::Usage.error(format!("{ENDPOINTS} names no endpoint")));
        }
        for endpoint in &options.endpoints {
            check_endpoint(endpoint, has_tls_files(&options))?;
        }
        tls::ensure_provider();
        // Report problems with the files before anything is sent.
        tls(&options)?;
        user(&options)?;
        Ok(Connector {
            options: Arc::new(options),
            socket: None,
            handle,
            cancel,
        })
    }

    /// Connects to a single member by its Unix socket, whatever URLs it advertises. Of the options, only the user and
    /// the times count.
    ///
    /// # Errors
    /// `Usage` and `Configuration` for wrong options.
    pub fn to_socket(
        socket: &Path,
        options: Endpoints,
        handle: Handle,
        cancel: Cancel,
    ) -> Result<Self> {
        let socket = format!("unix://{}", socket.display());
        let options = Endpoints {
            endpoints: vec![socket.clone()],
            cacert: None,
            cert: None,
            key: None,
            tls_secret: None,
            ..options
        };
        user(&options)?;
        Ok(Connector {
            options: Arc::new(options),
            socket: Some(socket),
            handle,
            cancel,
        })
    }

    /// Returns the options.
    pub fn options(&self) -> &Endpoints {
        &self.options
    }

    /// Returns the runtime of the requests.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Returns the cancellation flag, which ends every wait.
    pub fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// Whether a client URL that a member advertises may be used. If the user requested TLS, a URL without
    /// TLS must come from the user: otherwise a forged member list could obtain the password in plain text.
    pub(super) fn may_use(&self, url: &str) -> bool {
        may_use(&self.options, url)
    }

    /// Waits for `f`, unless cancelled first.
    ///
    /// # Errors
    /// `Terminated` if cancelled.
    pub fn wait<F: Future>(&self, f: F) -> Result<F::Output, AttemptError> {
        self.handle
            .block_on(self.cancel.or(f))
            .map_err(AttemptError::Final)
    }

    /// Waits for a response, no longer than `--command-timeout`. `operation` names the request in messages.
    ///
    /// # Errors
    /// Any error of etcd, with its reason; `EtcdUnreachable` after the timeout; `Terminated`.
    pub fn ask<T>(
        &self,
        operation: &str,
        endpoint: &str,
        response: impl Future<Output = Result<T, etcd_client::Error>>,
    ) -> Result<T, AttemptError> {
        self.ask_for(operation, endpoint, self.options.command_timeout, response)
    }

    /// Waits for a response, no longer than `timeout`; otherwise like [`ask`](Self::ask).
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn ask_for<T>(
        &self,
        operation: &str,
        endpoint: &str,
        timeout: Duration,
        response: impl Future<Output = Result<T, etcd_client::Error>>,
    ) -> Result<T, AttemptError> {
        self.wait(self.answer(operation, endpoint, timeout, response))?
    }

    /// Like [`ask_for`](Self::ask_for), for async code that queries several members at once.
    pub(super) async fn answer<T>(
        &self,
        operation: &str,
        endpoint: &str,
        timeout: Duration,
        response: impl Future<Output = Result<T, etcd_client::Error>>,
    ) -> Result<T, AttemptError> {
        tokio::time::timeout(timeout, response)
            .await
            .map_err(|_| timed_out(operation, endpoint, timeout))?
            .map_err(|e| self.failure(operation, endpoint, e))
    }

    /// Gives an error of a request at an endpoint its reason, and decides whether a retry can help.
    pub fn failure(&self, operation: &str, endpoint: &str, e: etcd_client::Error) -> AttemptError {
        failure(operation, endpoint, &self.options, e)
    }

    /// Connects to one endpoint.
    ///
    /// # Errors
    /// As [`ask`](Self::ask); `Configuration` if the endpoint has no TLS although the user requested it.
    pub fn dial(
        &self,
        endpoint: &str,
        streams: Streams,
    ) -> Result<etcd_client::Client, AttemptError> {
        self.wait(self.connect(endpoint, streams))?
    }

    /// Like [`dial`](Self::dial), for async code.
    pub(super) async fn connect(
        &self,
        endpoint: &str,
        streams: Streams,
    ) -> Result<etcd_client::Client, AttemptError> {
        if !self.may_use(endpoint) {
            return Err(AttemptError::Final(Reason::Configuration.error(format!(
                "connect at {endpoint}: this http:// URL is not in {ENDPOINTS}, and TLS was requested: give the member an https:// URL, or add this one to {ENDPOINTS} to allow it"
            ))));
        }
        let timeout = self.options.command_timeout + self.options.dial_timeout;
        // Files are read for each connection, because a follower runs longer than its certificates are valid.
        let tls = if endpoint.starts_with("http://") || self.socket.is_some() {
            None
        } else {
            tls(&self.options).map_err(AttemptError::Final)?
        };
        let user = user(&self.options).map_err(AttemptError::Final)?;
        let once = self.dial_once(endpoint, streams, tls, user);
        self.answer("connect", endpoint, timeout, once).await
    }

    async fn dial_once(
        &self,
        endpoint: &str,
        streams: Streams,
        tls: Option<ClientConfig>,
        user: Option<User>,
    ) -> Result<etcd_client::Client, etcd_client::Error> {
        let channel = self.channel(endpoint, tls)?;
        let mut connect = ConnectOptions::new().with_require_leader(streams == Streams::NeedLeader);
        let anonymous = connect.clone();
        if let Some(user) = &user {
            connect = connect
                .with_user(user.name.as_str(), user.password.as_str())
                .with_auto_token_refresh(true);
        }
        match etcd_client::Client::from_channel(channel.clone(), Some(connect)).await {
            // As in etcdctl, a user is ignored if authentication is disabled.
            Err(e) if e.to_string().contains("authentication is not enabled") => {
                etcd_client::Client::from_channel(channel, Some(anonymous)).await
            }
            other => other,
        }
    }

    /// Returns a channel that connects with the first request. The TLS of etcd-client has no verifier of ours.
    fn channel(
        &self,
        endpoint: &str,
        tls: Option<ClientConfig>,
    ) -> Result<Channel, etcd_client::Error> {
        let address = endpoint
            .strip_prefix("https://")
            .or(endpoint.strip_prefix("http://"));
        let address = address.unwrap_or(endpoint);
        // tonic takes a URL with https:// only with its own TLS.
        let url = self.socket.clone();
        let url = url.unwrap_or_else(|| format!("http://{address}"));
        let mut channel = tonic::transport::Endpoint::from_shared(url)?
            .connect_timeout(self.options.dial_timeout)
            .keep_alive_while_idle(true)
            .http2_keep_alive_interval(self.options.keepalive_time)
            .keep_alive_timeout(self.options.keepalive_timeout);
        let Some(tls) = tls else {
            return Ok(Channel::Tonic(channel.connect_lazy()));
        };
        channel = channel.origin(format!("https://{address}").parse()?);
        let connector = hyper_rustls::HttpsConnectorBuilder::new()
            .with_tls_config(tls)
            .https_only()
            .enable_http2()
            .build();
        let connector = tower::ServiceBuilder::new()
            .map_request(with_tls)
            .service(connector);
        Ok(Channel::Tonic(
            channel.connect_with_connector_lazy(connector),
        ))
    }
}

/// Returns the URL with the scheme of TLS.
fn with_tls(url: Uri) -> Uri {
    let mut parts = url.clone().into_parts();
    parts.scheme = Some(http::uri::Scheme::HTTPS);
    Uri::from_parts(parts).unwrap_or(url)
}

fn timed_out(operation: &str, endpoint: &str, timeout: Duration) -> AttemptError {
    AttemptError::TryAgain(Reason::EtcdUnreachable.error(format!(
        "{operation} at {endpoint}: no response within {} s: check {ENDPOINTS}, or raise {COMMAND_TIMEOUT}",
        timeout.as_secs_f64()
    )))
}

/// Gives an error its reason, and adds advice to its message.
fn failure(
    operation: &str,
    endpoint: &str,
    options: &Endpoints,
    e: etcd_client::Error,
) -> AttemptError {
    use etcd_client::Error as E;
    let error = |reason: Reason, text: &str, advice: &str| {
        reason.error(format!("{operation} at {endpoint}: {text}{advice}"))
    };
    let last = |reason, text: &str, advice: &str| AttemptError::Final(error(reason, text, advice));
    let again =
        |reason, text: &str, advice: &str| AttemptError::TryAgain(error(reason, text, advice));
    let text = causes::without_layers(&causes(&e));
    // The libraries have no types for errors of TLS, so the text decides.
    let is_certificate_error = [
        "certificate",
        "CertificateRequired",
        "BadCertificate",
        "UnknownCA",
        "HandshakeFailure",
    ]
    .iter()
    .any(|sign| text.contains(sign));
    if tls::says_expired(&text) {
        let advice =
            format!(": renew the server's certificate, or the one of {CERT} or {TLS_SECRET}");
        return last(Reason::CertificateExpired, &text, &advice);
    }
    if text.contains("UnknownIssuer") {
        let advice = match (&options.cacert, &options.tls_secret) {
            (None, None) => {
                format!(
                    ": no authority of this machine has signed the server's certificate: give etcd's CA with {CACERT} or {TLS_SECRET}"
                )
            }
            _ => format!(
                ": no authority in {CACERT} or {TLS_SECRET} has signed the server's certificate"
            ),
        };
        return last(Reason::Configuration, &text, &advice);
    }
    if text.contains("not valid for name") {
        let advice = format!(": use one of the certificate's names or addresses in {ENDPOINTS}");
        return last(Reason::Configuration, &text, &advice);
    }
    if let Some(advice) = tls::advice(&text) {
        return last(Reason::Configuration, &text, &format!(": {advice}"));
    }
    let tls_advice = if text.contains("CertificateRequired") {
        check_tls(endpoint, options)
    } else {
        opt::fill(CHECK_TLS).into_owned()
    };
    let E::GRpcStatus(status) = &e else {
        return match &e {
            _ if is_certificate_error => last(Reason::Configuration, &text, &tls_advice),
            E::TransportError(_) | E::InvalidArgs(_) | E::InvalidUri(_) => {
                let advice =
                    format!(": check {ENDPOINTS}, and {CACERT}, {CERT} and {KEY} or {TLS_SECRET}");
                last(Reason::Configuration, &text, &advice)
            }
            _ => again(Reason::EtcdUnreachable, &text, ""),
        };
    };
    // Status codes of gRPC; etcd-client does not export their type.
    let (code, message) = (status.code() as i32, status.message());
    const INVALID_ARGUMENT: i32 = 3;
    const PERMISSION_DENIED: i32 = 7;
    const RESOURCE_EXHAUSTED: i32 = 8;
    const FAILED_PRECONDITION: i32 = 9;
    const OUT_OF_RANGE: i32 = 11;
    const UNAUTHENTICATED: i32 = 16;
    let check_user = match (&options.user, &options.auth_secret) {
        (_, Some(folder)) => format!(
            ": check username and password in {AUTH_SECRET} {}",
            folder.display()
        ),
        (Some(user), None) => format!(": check {USER} and {PASSWORD} (user {})", user.name),
        (None, None) => format!(": etcd requires a user, give {USER} and {PASSWORD}"),
    };
    let has = |text: &str| message.contains(text);
    match code {
        _ if has("request is too large")
            || has("too many operations")
            || has("larger than max")
            || has("message length too large") =>
        {
            AttemptError::TooLarge(message.to_owned())
        }
        // Roles were changed, or the member was restarted. The next connection logs in again.
        _ if has("revision of auth store is old") || has("invalid auth token") => {
            again(Reason::EtcdUnreachable, message, "")
        }
        UNAUTHENTICATED => last(Reason::Unauthenticated, message, &check_user),
        INVALID_ARGUMENT | FAILED_PRECONDITION
            if has("authentication failed") || has("user name") =>
        {
            last(Reason::Unauthenticated, message, &check_user)
        }
        PERMISSION_DENIED => {
            let advice = ": grant the user's role the missing permission";
            last(Reason::PermissionDenied, message, advice)
        }
        RESOURCE_EXHAUSTED if has("database space exceeded") => {
            let advice = ": compact and defragment etcd, then `etcdctl alarm disarm`";
            last(Reason::NoSpace, message, advice)
        }
        _ if has("etcdserver: no leader")
            || has("etcdserver: leader changed")
            || has("etcdserver: request timed out") =>
        {
            let advice = ": the member responds, but its cluster has no quorum";
            again(Reason::NoQuorum, message, advice)
        }
        _ if has("rpc not supported for learner") => {
            let advice = format!(": the member is a learner, give a voting member in {ENDPOINTS}");
            again(Reason::Configuration, message, &advice)
        }
        OUT_OF_RANGE if has("compacted") => {
            let advice = ": etcd was compacted while it was read, run again";
            last(Reason::Conflict, message, advice)
        }
        INVALID_ARGUMENT | FAILED_PRECONDITION | OUT_OF_RANGE => {
            last(Reason::Configuration, message, "")
        }
        _ if is_certificate_error => last(Reason::Configuration, &text, &tls_advice),
        // The connection was made and broke. That happens if only one end uses TLS, or a certificate is
        // missing.
        _ if text.contains("Connection refused") => {
            let advice = format!(
                ": nothing listens at this host and port: check {ENDPOINTS}, and that etcd runs"
            );
            again(Reason::EtcdUnreachable, &text, &advice)
        }
        _ if text.contains("dns error") => {
            let advice = format!(": check the host name in {ENDPOINTS}");
            again(Reason::EtcdUnreachable, &text, &advice)
        }
        _ if status.source().is_some() && !text.contains("tcp connect error") => again(
            Reason::EtcdUnreachable,
            &text,
            &check_tls(endpoint, options),
        ),
        _ => again(Reason::EtcdUnreachable, &text, ""),
    }
}

/// Returns the advice for a connection that was made and broke at once.
fn check_tls(endpoint: &str, options: &Endpoints) -> String {
    let has_client = options.cert.is_some() || options.tls_secret.is_some();
    match (endpoint.starts_with("https://"), has_client) {
        (false, _) => {
            format!(
                ": the member closed the connection: see in its log whether it has ended; if it has not, it may need TLS (https:// in {ENDPOINTS}, with {CACERT}, {CERT} and {KEY} or {TLS_SECRET}), or the port is that of its peers"
            )
        }
        (true, false) => {
            format!(
                ": the member may need a client certificate ({CERT} and {KEY} beside {CACERT}, or {TLS_SECRET}), or serve without TLS: check whether {ENDPOINTS} are https:// or http://"
            )
        }
        (true, true) => opt::fill(CHECK_TLS).into_owned(),
    }
}

const CHECK_TLS: &str = ": check whether {endpoints} are https:// or http://, and {cacert}, {cert} and {key} or {tls-secret}";

/// Returns the text of an error with its causes. Of a gRPC status it takes only the message, without the
/// code.
fn causes(e: &etcd_client::Error) -> String {
    match e {
        etcd_client::Error::GRpcStatus(s) => causes::append_causes(s.message().to_owned(), s),
        etcd_client::Error::TransportError(t) => causes::append_causes(e.to_string(), t),
        e => e.to_string(),
    }
}

fn has_tls_files(options: &Endpoints) -> bool {
    options.cacert.is_some() || options.cert.is_some() || options.tls_secret.is_some()
}

/// Whether a URL may be used: it has TLS, or the user named exactly this URL, or did not request TLS at all.
fn may_use(options: &Endpoints, url: &str) -> bool {
    let is_tls = |url: &str| url.starts_with("https://");
    let requests_tls = has_tls_files(options) || options.endpoints.iter().any(|e| is_tls(e));
    is_tls(url) || !requests_tls || options.endpoints.iter().any(|e| e == url)
}

/// Checks the form of an endpoint.
fn check_endpoint(endpoint: &str, has_tls_files: bool) -> Result<()> {
    let wrong = |why: &str| {
        Err(Reason::Usage.error(format!(
            "{ENDPOINTS}: {why}: give URLs such as https://10.0.0.1:2379"
        )))
    };
    let (scheme, rest) = match endpoint.split_once("://") {
        Some((scheme, rest)) => (Some(scheme), rest),
        None => (None, endpoint),
    };
    if rest.contains('@') {
        // The endpoint may contain a password, so it is not printed.
        return wrong(&format!(
            "an endpoint contains a user, which belongs into {USER}"
        ));
    }
    match scheme {
        Some("http") if has_tls_files => wrong(&format!(
            "{endpoint} has no TLS, so {CACERT}, {CERT}, {KEY} and {TLS_SECRET} have no effect there"
        )),
        Some("http" | "https") | None if !rest.trim_matches('/').is_empty() => Ok(()),
        _ => wrong(&format!("invalid endpoint \"{endpoint}\"")),
    }
}

/// Reads the certificates. Returns `None` if no endpoint uses TLS.
fn tls(options: &Endpoints) -> Result<Option<ClientConfig>> {
    let read = |flag: Opt, path: &Path| {
        std::fs::read(path).map_err(|e| {
            Reason::Configuration.error(format!("cannot read {flag} {}: {e}", path.display()))
        })
    };
    let secure = options.endpoints.iter().any(|e| e.starts_with("https://"));
    if !secure && !has_tls_files(options) {
        return Ok(None);
    }
    let files = match &options.tls_secret {
        Some(folder) => TlsFiles::from_secret(folder)?,
        None => TlsFiles::from_flags(options, read)?,
    };
    let wrong = |e: &dyn fmt::Display| {
        Reason::Configuration.error(format!(
            "the certificates for etcd cannot be used: {e}: check {CACERT}, {CERT} and {KEY} or {TLS_SECRET}"
        ))
    };
    let chain = |pem: &[u8]| tls::certificates(pem).map_err(|e| wrong(&e));
    let authorities = match &files.authorities {
        Some(pem) => chain(pem)?,
        None => Vec::new(),
    };
    let identity = match files.client {
        Some(ClientFiles { origin, cert, key }) => {
            check_validity(&cert, &origin)?;
            let key = PrivateKeyDer::from_pem_slice(&key).map_err(|e| wrong(&e))?;
            Some((chain(&cert)?, key))
        }
        None => None,
    };
    let config = tls::client_config(authorities, files.authorities.is_none(), identity);
    Ok(Some(config.map_err(|e| wrong(&e))?))
}

/// The certificates in PEM.
struct TlsFiles {
    authorities: Option<Vec<u8>>,
    client: Option<ClientFiles>,
}

/// The certificate of the client and its key, in PEM.
struct ClientFiles {
    /// The flag and the path of the certificate, for messages.
    origin: String,
    cert: Vec<u8>,
    key: Vec<u8>,
}

impl TlsFiles {
    fn from_flags(
        options: &Endpoints,
        read: impl Fn(Opt, &Path) -> Result<Vec<u8>>,
    ) -> Result<Self> {
        let authorities = match &options.cacert {
            Some(path) => Some(read(CACERT, path)?),
            None => None,
        };
        let client = match (&options.cert, &options.key) {
            (Some(cert), Some(key)) => Some(ClientFiles {
                origin: format!("{CERT}, {}", cert.display()),
                cert: read(CERT, cert)?,
                key: read(KEY, key)?,
            }),
            (None, None) => None,
            _ => {
                return Err(
                    Reason::Usage.error(format!("{CERT} and {KEY} belong together: give both"))
                );
            }
        };
        Ok(TlsFiles {
            authorities,
            client,
        })
    }

    fn from_secret(folder: &Path) -> Result<Self> {
        const KEYS: &str = "ca.crt, and tls.crt and tls.key or neither";
        let mut files = secret_files(TLS_SECRET, folder)?;
        let mut take = |key| files.remove(key).ok_or(key);
        let lacks = |key| Err(lacks(TLS_SECRET, folder, key, KEYS));
        let authorities = match take("ca.crt") {
            Ok(pem) => Some(pem),
            Err(key) => return lacks(key),
        };
        let client = match (take("tls.crt"), take("tls.key")) {
            (Ok(cert), Ok(key)) => Some(ClientFiles {
                origin: format!("{TLS_SECRET}, tls.crt in {}", folder.display()),
                cert,
                key,
            }),
            (Err(_), Err(_)) => None,
            (Err(key), Ok(_)) | (Ok(_), Err(key)) => return lacks(key),
        };
        Ok(TlsFiles {
            authorities,
            client,
        })
    }
}

/// Returns the user, from `--auth-secret` or from the options.
fn user(options: &Endpoints) -> Result<Option<User>> {
    let Some(folder) = &options.auth_secret else {
        return Ok(options.user.clone());
    };
    let mut files = secret_files(AUTH_SECRET, folder)?;
    let mut take = |key: &str| {
        let bytes = files
            .remove(key)
            .ok_or_else(|| lacks(AUTH_SECRET, folder, key, "username and password"))?;
        let text = String::from_utf8(bytes).map_err(|_| {
            let message = format!(
                "{AUTH_SECRET} {}: {key} is not valid UTF-8",
                folder.display()
            );
            Reason::Configuration.error(message)
        })?;
        // Remove the line break that editors append.
        Ok::<_, Error>(text.trim_end_matches(['\r', '\n']).to_owned())
    };
    let (name, password) = (take("username")?, take("password")?);
    Ok(Some(User { name, password }))
}

/// Reads the files of a mounted Secret, without empty ones.
fn secret_files(flag: Opt, folder: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut files = mounted_secret::read(folder).map_err(|e| {
        Reason::Configuration.error(format!("cannot read {flag} {}: {e}", folder.display()))
    })?;
    files.retain(|_, bytes| !bytes.trim_ascii().is_empty());
    Ok(files)
}

fn lacks(flag: Opt, folder: &Path, key: &str, keys: &str) -> Error {
    let (place, advice) = (folder.display(), mounted_secret::advice(folder, keys));
    Reason::Configuration.error(format!("{flag} {place} lacks {key}: {advice}"))
}

/// Refuses an expired certificate of our own. The server would refuse it as well, but its alert may be lost
/// when the connection breaks. A certificate that cannot be parsed is left to the TLS library.
fn check_validity(pem: &[u8], place: &str) -> Result<()> {
    let Ok(certificate) = CertificateDer::from_pem_slice(pem) else {
        return Ok(());
    };
    let Ok(certificate) = webpki::EndEntityCert::try_from(&certificate) else {
        return Ok(());
    };
    // The verification fails in any case, because no issuer is given; but it checks the dates first.
    let verified = certificate.verify_for_usage(
        &[],
        &[],
        &[],
        UnixTime::now(),
        webpki::KeyUsage::client_auth(),
        None,
        None,
    );
    let problem = match verified {
        Err(webpki::Error::CertExpired { not_after, .. }) => {
            format!("expired on {}", date(not_after))
        }
        Err(webpki::Error::CertNotValidYet { not_before, .. }) => {
            format!("is not valid before {}", date(not_before))
        }
        _ => return Ok(()),
    };
    Err(Reason::CertificateExpired
        .error(format!("the certificate of {place}, {problem}: renew it")))
}

fn date(time: UnixTime) -> String {
    i64::try_from(time.as_secs())
        .ok()
        .and_then(|secs| chrono::DateTime::from_timestamp(secs, 0))
        .map_or_else(|| format!("second {}", time.as_secs()), |t| t.to_rfc3339())
}

#[cfg(test)]
mod tests;
