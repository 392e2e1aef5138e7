//! The way to a member of a live etcd: TLS, credentials, and what a failure means.
//!
//! It connects to one endpoint and gives every failure its reason; what is asked there, and which endpoint
//! is tried, it does not decide. The other files of this room call it.

use crate::base::{Cancel, causes, duration, mounted_secret};
use crate::error::{Error, Reason, Result};
use clap::Args;
use etcd_client::{Certificate, ConnectOptions, Identity, TlsOptions};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, UnixTime};
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
    #[arg(long, value_name = "FILE")]
    pub cacert: Option<PathBuf>,
    /// Client certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "key")]
    pub cert: Option<PathBuf>,
    /// Key of the client certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub key: Option<PathBuf>,
    /// Folder with ca.crt and optionally tls.crt and tls.key, such as a mounted Secret
    ///
    /// It replaces --cacert, --cert and --key. The files are read again for each connection.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["cacert", "cert", "key"])]
    pub tls_secret: Option<PathBuf>,
    /// Who asks, if etcd has authentication enabled.
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

/// What an attempt came to.
#[derive(Debug)]
pub enum Failed {
    /// Another attempt, or another member, may do.
    TryAgain(Error),
    /// It will not.
    Final(Error),
    /// The request is too large for the server, or the answer for us.
    TooLarge(String),
}

impl Failed {
    /// The failure, whatever may be tried.
    pub fn into_error(self) -> Error {
        match self {
            Failed::TryAgain(e) | Failed::Final(e) => e,
            Failed::TooLarge(message) => Reason::Configuration.error(message),
        }
    }
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Streams {
    /// Requests and answers, and snapshots.
    Plain,
    /// Watches: a member that has lost its leader ends them.
    NeedLeader,
}

/// All that is needed to reach any member; clones are cheap. Its calls block: not for async threads.
#[derive(Clone)]
pub struct Connector {
    options: Arc<Endpoints>,
    handle: Handle,
    cancel: Cancel,
}

impl Connector {
    /// Looks at the endpoints and reads the certificates; nothing is sent.
    ///
    /// # Errors
    /// `Usage` and `Configuration`.
    pub fn new(options: Endpoints, handle: Handle, cancel: Cancel) -> Result<Self> {
        if options.endpoints.is_empty() {
            return Err(Reason::Usage.error("--endpoints names no endpoint"));
        }
        for endpoint in &options.endpoints {
            check_endpoint(endpoint, has_tls_files(&options))?;
        }
        crate::base::tls::ensure_provider();
        // What is wrong with the files is said before anything is sent.
        tls(&options)?;
        user(&options)?;
        Ok(Connector {
            options: Arc::new(options),
            handle,
            cancel,
        })
    }

    /// How to reach it.
    pub fn options(&self) -> &Endpoints {
        &self.options
    }

    /// The runtime that its requests run on.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// The switch that ends its waits.
    pub fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// Whether a URL that a member gives for itself may be asked. If TLS was asked for, a member's word is not enough to
    /// go without it: the password would be sent in plain text.
    pub(super) fn may_ask(&self, url: &str) -> bool {
        may_ask(&self.options, url)
    }

    /// Waits for `f`, unless cancelled first.
    ///
    /// # Errors
    /// `Terminated`.
    pub fn wait<F: Future>(&self, f: F) -> Result<F::Output, Failed> {
        self.handle
            .block_on(self.cancel.or(f))
            .map_err(Failed::Final)
    }

    /// Waits for an answer, for no longer than `--command-timeout`.
    ///
    /// # Errors
    /// Of any kind, with its reason.
    pub fn ask<T>(
        &self,
        what: &str,
        endpoint: &str,
        answer: impl Future<Output = Result<T, etcd_client::Error>>,
    ) -> Result<T, Failed> {
        self.ask_for(what, endpoint, self.options.command_timeout, answer)
    }

    /// As [`ask`](Self::ask), for no longer than `patience`.
    ///
    /// # Errors
    /// Of any kind, with its reason.
    pub fn ask_for<T>(
        &self,
        what: &str,
        endpoint: &str,
        patience: Duration,
        answer: impl Future<Output = Result<T, etcd_client::Error>>,
    ) -> Result<T, Failed> {
        self.wait(self.answer(what, endpoint, patience, answer))?
    }

    /// As [`ask_for`](Self::ask_for), for async code: several members are asked at once.
    pub(super) async fn answer<T>(
        &self,
        what: &str,
        endpoint: &str,
        patience: Duration,
        answer: impl Future<Output = Result<T, etcd_client::Error>>,
    ) -> Result<T, Failed> {
        tokio::time::timeout(patience, answer)
            .await
            .map_err(|_| timed_out(what, endpoint, patience))?
            .map_err(|e| self.failure(what, endpoint, e))
    }

    /// Gives a failure at an endpoint its reason.
    pub fn failure(&self, what: &str, endpoint: &str, e: etcd_client::Error) -> Failed {
        failure(what, endpoint, &self.options, e)
    }

    /// Connects to one endpoint.
    ///
    /// # Errors
    /// Of any kind, with its reason.
    pub fn dial(&self, endpoint: &str, streams: Streams) -> Result<etcd_client::Client, Failed> {
        self.wait(self.connect(endpoint, streams))?
    }

    /// As [`dial`](Self::dial), for async code.
    pub(super) async fn connect(
        &self,
        endpoint: &str,
        streams: Streams,
    ) -> Result<etcd_client::Client, Failed> {
        if !self.may_ask(endpoint) {
            let what = format!("connect at {endpoint}: it is without TLS, and TLS was asked for");
            return Err(Failed::Final(Reason::Configuration.error(what)));
        }
        let patience = self.options.command_timeout + self.options.dial_timeout;
        // A follower outlives its certificates: they are read again where they were renewed.
        let tls = match endpoint.starts_with("http://") {
            true => None,
            false => tls(&self.options).map_err(Failed::Final)?,
        };
        let user = user(&self.options).map_err(Failed::Final)?;
        let once = self.dial_once(endpoint, streams, tls, user);
        self.answer("connect", endpoint, patience, once).await
    }

    async fn dial_once(
        &self,
        endpoint: &str,
        streams: Streams,
        tls: Option<TlsOptions>,
        user: Option<User>,
    ) -> Result<etcd_client::Client, etcd_client::Error> {
        let mut connect = ConnectOptions::new()
            .with_connect_timeout(self.options.dial_timeout)
            .with_keep_alive(self.options.keepalive_time, self.options.keepalive_timeout)
            .with_require_leader(streams == Streams::NeedLeader);
        if let Some(tls) = tls {
            connect = connect.with_tls(tls);
        }
        let anonymous = connect.clone();
        if let Some(user) = &user {
            connect = connect
                .with_user(user.name.as_str(), user.password.as_str())
                .with_auto_token_refresh(true);
        }
        match etcd_client::Client::connect([endpoint], Some(connect)).await {
            // As etcdctl: a user is no harm where none is asked for.
            Err(e) if e.to_string().contains("authentication is not enabled") => {
                etcd_client::Client::connect([endpoint], Some(anonymous)).await
            }
            other => other,
        }
    }
}

fn timed_out(what: &str, endpoint: &str, patience: Duration) -> Failed {
    Failed::TryAgain(Reason::EtcdUnreachable.error(format!(
        "{what} at {endpoint}: no answer within {} s: check --endpoints, or give it more time with --command-timeout",
        patience.as_secs_f64()
    )))
}

/// Gives a failure its reason.
fn failure(what: &str, endpoint: &str, options: &Endpoints, e: etcd_client::Error) -> Failed {
    use etcd_client::Error as E;
    let error = |reason: Reason, said: &str, advice: &str| {
        reason.error(format!("{what} at {endpoint}: {said}{advice}"))
    };
    let last = |reason, said: &str, advice: &str| Failed::Final(error(reason, said, advice));
    let again = |reason, said: &str, advice: &str| Failed::TryAgain(error(reason, said, advice));
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
    if crate::base::tls::says_expired(&said) {
        let advice = ": renew the server's certificate, or the one of --cert or --tls-secret";
        return last(Reason::CertificateExpired, &said, advice);
    }
    if said.contains("UnknownIssuer") {
        let advice =
            ": no authority in --cacert or --tls-secret has signed the server's certificate";
        return last(Reason::Configuration, &said, advice);
    }
    let E::GRpcStatus(status) = &e else {
        return match &e {
            _ if certificate => last(Reason::Configuration, &said, CHECK_TLS),
            E::TransportError(_) | E::InvalidArgs(_) | E::InvalidUri(_) => {
                let advice = ": check --endpoints, and --cacert, --cert and --key or --tls-secret";
                last(Reason::Configuration, &said, advice)
            }
            _ => again(Reason::EtcdUnreachable, &said, ""),
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
    let who = match (&options.user, &options.auth_secret) {
        (_, Some(folder)) => format!(
            ": check username and password in --auth-secret {}",
            folder.display()
        ),
        (Some(user), None) => format!(": check --user and --password (user {})", user.name),
        (None, None) => ": it wants a user, give --user and --password".to_owned(),
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
        // Roles were changed meanwhile, or the member was restarted: the next connection logs in anew.
        _ if has("revision of auth store is old") || has("invalid auth token") => {
            again(Reason::EtcdUnreachable, message, "")
        }
        UNAUTHENTICATED => last(Reason::Unauthenticated, message, &who),
        INVALID_ARGUMENT | FAILED_PRECONDITION
            if has("authentication failed") || has("user name") =>
        {
            last(Reason::Unauthenticated, message, &who)
        }
        PERMISSION_DENIED => {
            let advice = ": grant the user's role what it lacks";
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
            let advice = ": the member answers, and its cluster has no quorum";
            again(Reason::NoQuorum, message, advice)
        }
        OUT_OF_RANGE if has("compacted") => {
            let advice = ": etcd was compacted while it was read, run again";
            last(Reason::Conflict, message, advice)
        }
        INVALID_ARGUMENT | FAILED_PRECONDITION | OUT_OF_RANGE => {
            last(Reason::Configuration, message, "")
        }
        _ if certificate => last(Reason::Configuration, &said, CHECK_TLS),
        // The connection came about and broke: so it does where one end wants TLS, or a certificate.
        _ if status.source().is_some() && !said.contains("tcp connect error") => {
            again(Reason::EtcdUnreachable, &said, CHECK_TLS)
        }
        _ => again(Reason::EtcdUnreachable, &said, ""),
    }
}

const CHECK_TLS: &str = ": check whether --endpoints are https:// or http://, and --cacert, --cert and --key or --tls-secret";

/// An error with what lies below it. A status by itself tells its code, too.
fn causes(e: &etcd_client::Error) -> String {
    match e {
        etcd_client::Error::GRpcStatus(s) => causes::below(s.message().to_owned(), s),
        etcd_client::Error::TransportError(t) => causes::below(e.to_string(), t),
        e => e.to_string(),
    }
}

fn has_tls_files(options: &Endpoints) -> bool {
    options.cacert.is_some() || options.cert.is_some() || options.tls_secret.is_some()
}

/// Whether a connection may be made: with TLS, or because the user named this very URL, or asked for TLS nowhere.
fn may_ask(options: &Endpoints, url: &str) -> bool {
    let is_tls = |url: &str| url.starts_with("https://");
    let asks_for_tls = has_tls_files(options) || options.endpoints.iter().any(|e| is_tls(e));
    is_tls(url) || !asks_for_tls || options.endpoints.iter().any(|e| e == url)
}

/// Refuses what can be seen to be wrong before anything is sent.
fn check_endpoint(endpoint: &str, has_tls_files: bool) -> Result<()> {
    let wrong = |why: &str| {
        Err(Reason::Usage.error(format!(
            "--endpoints: {why}: give URLs such as https://10.0.0.1:2379"
        )))
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
            "{endpoint} is without TLS, so --cacert, --cert, --key and --tls-secret are of no use there"
        )),
        Some("http" | "https") | None if !rest.trim_matches('/').is_empty() => Ok(()),
        _ => wrong(&format!("\"{endpoint}\" is no endpoint")),
    }
}

/// What TLS needs; `None` where no endpoint uses it.
fn tls(options: &Endpoints) -> Result<Option<TlsOptions>> {
    let read = |flag: &str, path: &Path| {
        std::fs::read(path).map_err(|e| {
            Reason::Configuration.error(format!("{flag} {} cannot be read: {e}", path.display()))
        })
    };
    let secure = options.endpoints.iter().any(|e| e.starts_with("https://"));
    if !secure && !has_tls_files(options) {
        return Ok(None);
    }
    let files = match &options.tls_secret {
        Some(folder) => TlsFiles::of_secret(folder)?,
        None => TlsFiles::of_flags(options, read)?,
    };
    let mut tls = TlsOptions::new();
    tls = match files.authorities {
        Some(pem) => tls.ca_certificate(Certificate::from_pem(pem)),
        None => tls.with_native_roots(),
    };
    if let Some(ClientFiles { what, cert, key }) = files.client {
        check_validity(&cert, &what)?;
        tls = tls.identity(Identity::from_pem(cert, key));
    }
    Ok(Some(tls))
}

/// What TLS needs, in PEM.
struct TlsFiles {
    authorities: Option<Vec<u8>>,
    client: Option<ClientFiles>,
}

/// A client's certificate and its key.
struct ClientFiles {
    /// Where the certificate is, for people
    what: String,
    cert: Vec<u8>,
    key: Vec<u8>,
}

impl TlsFiles {
    fn of_flags(
        options: &Endpoints,
        read: impl Fn(&str, &Path) -> Result<Vec<u8>>,
    ) -> Result<Self> {
        let authorities = options.cacert.as_ref();
        let authorities = authorities.map(|path| read("--cacert", path)).transpose()?;
        let client = match (&options.cert, &options.key) {
            (Some(cert), Some(key)) => Some(ClientFiles {
                what: format!("--cert, {}", cert.display()),
                cert: read("--cert", cert)?,
                key: read("--key", key)?,
            }),
            (None, None) => None,
            _ => {
                return Err(Reason::Usage.error("--cert and --key belong together: give both"));
            }
        };
        Ok(TlsFiles {
            authorities,
            client,
        })
    }

    fn of_secret(folder: &Path) -> Result<Self> {
        const KEYS: &str = "ca.crt, and tls.crt and tls.key or neither";
        let mut files = secret_files("--tls-secret", folder)?;
        let mut take = |key| files.remove(key).ok_or(key);
        let lacks = |key| Err(lacks("--tls-secret", folder, key, KEYS));
        let authorities = match take("ca.crt") {
            Ok(pem) => Some(pem),
            Err(key) => return lacks(key),
        };
        let client = match (take("tls.crt"), take("tls.key")) {
            (Ok(cert), Ok(key)) => Some(ClientFiles {
                what: format!("--tls-secret, tls.crt in {}", folder.display()),
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

/// Who asks, if etcd has authentication enabled.
fn user(options: &Endpoints) -> Result<Option<User>> {
    const FLAG: &str = "--auth-secret";
    let Some(folder) = &options.auth_secret else {
        return Ok(options.user.clone());
    };
    let mut files = secret_files(FLAG, folder)?;
    let mut take = |key: &str| {
        let bytes = files.remove(key);
        let bytes = bytes.ok_or_else(|| lacks(FLAG, folder, key, "username and password"))?;
        let text = String::from_utf8(bytes).map_err(|_| {
            let what = format!("{FLAG} {}: {key} is no text", folder.display());
            Reason::Configuration.error(what)
        })?;
        // Without the line's end that editors leave.
        Ok::<_, Error>(text.trim_end_matches(['\r', '\n']).to_owned())
    };
    let (name, password) = (take("username")?, take("password")?);
    Ok(Some(User { name, password }))
}

/// The files of a mounted Secret, without empty ones.
fn secret_files(flag: &str, folder: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut files = mounted_secret::read(folder).map_err(|e| {
        Reason::Configuration.error(format!("{flag} {} cannot be read: {e}", folder.display()))
    })?;
    files.retain(|_, bytes| !bytes.trim_ascii().is_empty());
    Ok(files)
}

fn lacks(flag: &str, folder: &Path, key: &str, keys: &str) -> Error {
    let (place, advice) = (folder.display(), mounted_secret::advice(folder, keys));
    Reason::Configuration.error(format!("{flag} {place} lacks {key}: {advice}"))
}

/// Refuses a certificate of our own that the server would refuse: its alert may not come through before the
/// connection breaks. What cannot be parsed the TLS library judges.
fn check_validity(pem: &[u8], place: &str) -> Result<()> {
    let Ok(certificate) = CertificateDer::from_pem_slice(pem) else {
        return Ok(());
    };
    let Ok(certificate) = webpki::EndEntityCert::try_from(&certificate) else {
        return Ok(());
    };
    // The dates are checked before an issuer is looked for, and no issuer is given.
    let verified = certificate.verify_for_usage(
        &[],
        &[],
        &[],
        UnixTime::now(),
        webpki::KeyUsage::client_auth(),
        None,
        None,
    );
    let what = match verified {
        Err(webpki::Error::CertExpired { not_after, .. }) => {
            format!("expired on {}", date(not_after))
        }
        Err(webpki::Error::CertNotValidYet { not_before, .. }) => {
            format!("is not valid before {}", date(not_before))
        }
        _ => return Ok(()),
    };
    Err(Reason::CertificateExpired.error(format!("the certificate of {place}, {what}: renew it")))
}

fn date(time: UnixTime) -> String {
    i64::try_from(time.as_secs())
        .ok()
        .and_then(|secs| chrono::DateTime::from_timestamp(secs, 0))
        .map_or_else(|| format!("second {}", time.as_secs()), |t| t.to_rfc3339())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asking(endpoints: &[&str], cacert: Option<&str>) -> Endpoints {
        Endpoints {
            endpoints: endpoints.iter().map(|&e| e.to_owned()).collect(),
            cacert: cacert.map(PathBuf::from),
            cert: None,
            key: None,
            tls_secret: None,
            auth_secret: None,
            user: Some(User {
                name: "root".to_owned(),
                password: "secret".to_owned(),
            }),
            dial_timeout: Duration::from_secs(2),
            command_timeout: Duration::from_secs(5),
            keepalive_time: Duration::from_secs(10),
            keepalive_timeout: Duration::from_secs(10),
        }
    }

    #[test]
    fn who_forges_the_member_list_is_not_asked_without_tls() {
        let plain = "http://evil:2379";
        for endpoints in [
            &["https://a:2379"][..],
            &["https://a:2379", "http://b:2379"],
        ] {
            let options = asking(endpoints, None);
            assert!(!may_ask(&options, plain), "{endpoints:?}");
            assert!(!may_ask(&options, "HTTP://evil:2379"));
            assert!(!may_ask(&options, "evil:2379"));
            assert!(may_ask(&options, "https://c:2379"));
            assert!(endpoints.iter().all(|e| may_ask(&options, e)));
        }
        // Without a scheme, the certificates ask for TLS.
        let options = asking(&["a:2379"], Some("ca.crt"));
        assert!(!may_ask(&options, plain));
        assert!(may_ask(&options, "a:2379"));
        let options = asking(&["http://a:2379"], None);
        assert!(may_ask(&options, "http://c:2379"));
    }

    #[test]
    fn who_listens_without_tls_hears_no_password() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let options = asking(&["https://127.0.0.1:1"], None);
        let way = Connector::new(options, runtime.handle().clone(), Cancel::default()).unwrap();
        let Err(Failed::Final(e)) = way.dial(&url, Streams::Plain) else {
            panic!("it was asked");
        };
        assert_eq!(e.reason(), Reason::Configuration);
        assert!(!e.to_string().contains("secret"), "{e}");
        let heard = listener.accept().map(|_| ());
        assert_eq!(heard.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    }

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
