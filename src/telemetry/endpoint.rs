//! The HTTP endpoint: `/metrics` for Prometheus, `/healthz` and `/readyz` for Kubernetes.
//!
//! It shows what others tell it. It takes no request that changes anything, and has no TLS: it is for the
//! network of the cluster.

use super::connection_limit::{Guarded, Limits};
use super::metrics::Metrics;
use crate::base::Cancel;
use crate::error::{Reason, Result};
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use std::fmt;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Where to listen: `HOST:PORT`, or `:PORT` for all of the machine's addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BindAddress {
    /// Empty for all.
    host: String,
    port: u16,
}

impl FromStr for BindAddress {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        const HOW: &str = "give an address and a port, such as 127.0.0.1:8080, [::1]:8080, or :8080 for all addresses of the machine";
        let (host, port) = s
            .rsplit_once(':')
            .ok_or_else(|| format!("it has no port; {HOW}"))?;
        let port = port
            .parse()
            .map_err(|_| format!("\"{port}\" is no port; {HOW}"))?;
        let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        if bare.is_none() && host.contains([':', '/', '[', ']']) {
            return Err(format!("\"{host}\" is no host; {HOW}"));
        }
        let host = bare.unwrap_or(host).to_owned();
        Ok(BindAddress { host, port })
    }
}

impl fmt::Display for BindAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

impl BindAddress {
    fn bind(&self) -> std::io::Result<TcpListener> {
        let bind = |host: &str| TcpListener::bind((host, self.port));
        match self.host.as_str() {
            // Of both families where the system has the newer one.
            "" => bind("::").or_else(|e| match e.kind() {
                ErrorKind::AddrInUse | ErrorKind::PermissionDenied => Err(e),
                _ => bind("0.0.0.0"),
            }),
            host => bind(host),
        }
    }
}

/// The endpoint, as long as it is there.
pub struct Server {
    address: SocketAddr,
    shown: Shown,
    serving: JoinHandle<()>,
    handle: Handle,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Server at {}", self.address)
    }
}

/// Gives all metrics of a process as OpenMetrics text.
pub type Exposition = Arc<dyn Fn() -> Result<String> + Send + Sync>;

/// What requests see.
#[derive(Clone)]
struct Shown {
    metrics: Exposition,
    ready: Arc<AtomicBool>,
    cancel: Cancel,
}

/// Opens the endpoint; it is not ready yet. It is there until the server is dropped.
///
/// # Errors
/// `Configuration` where the address is taken or not this machine's, `PermissionDenied`.
pub fn serve(
    address: &BindAddress,
    metrics: &Metrics,
    handle: &Handle,
    cancel: &Cancel,
) -> Result<Server> {
    let metrics = metrics.clone();
    let exposition: Exposition = Arc::new(move || metrics.encode());
    serve_text(address, exposition, handle, cancel)
}

/// As [`serve`], for metrics of another kind.
///
/// # Errors
/// Those of [`serve`].
pub fn serve_text(
    address: &BindAddress,
    metrics: Exposition,
    handle: &Handle,
    cancel: &Cancel,
) -> Result<Server> {
    serve_within(Limits::default(), address, metrics, handle, cancel)
}

fn serve_within(
    limits: Limits,
    address: &BindAddress,
    metrics: Exposition,
    handle: &Handle,
    cancel: &Cancel,
) -> Result<Server> {
    let failed = |e: std::io::Error| {
        let what = match e.kind() {
            ErrorKind::AddrInUse => {
                "another program listens there: give another port, or end that one"
            }
            ErrorKind::PermissionDenied => {
                let what = format!(
                    "cannot serve metrics at {address}: {e}; ports below 1024 need a privilege: give a higher one"
                );
                return Reason::PermissionDenied.error(what);
            }
            _ => "give an address of this machine, or none before the colon for all of them",
        };
        Reason::Configuration.error(format!("cannot serve metrics at {address}: {e}; {what}"))
    };
    let listener = address.bind().map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let _entered = handle.enter();
    let listener = tokio::net::TcpListener::from_std(listener).map_err(failed)?;
    let shown = Shown {
        metrics,
        ready: Arc::default(),
        cancel: cancel.clone(),
    };
    let router = Router::new()
        .route("/metrics", get(show_metrics))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(show_ready))
        .with_state(shown.clone());
    let serving = handle.spawn(async move {
        if let Err(e) = axum::serve(Guarded::new(listener, limits), router).await {
            tracing::warn!("the endpoint for metrics has ended: {e}");
        }
    });
    tracing::info!(%address, "serving metrics at /metrics");
    Ok(Server {
        address,
        shown,
        serving,
        handle: handle.clone(),
    })
}

async fn show_metrics(State(shown): State<Shown>) -> Response {
    match (shown.metrics)() {
        Ok(text) => ([(CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")).into_response(),
    }
}

async fn show_ready(State(shown): State<Shown>) -> Response {
    match shown.ready.load(Ordering::Relaxed) && shown.cancel.check().is_ok() {
        true => "ok\n".into_response(),
        false => (StatusCode::SERVICE_UNAVAILABLE, "not ready\n").into_response(),
    }
}

impl Server {
    /// Where it really listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether `/readyz` says so; once cancelled it says no.
    pub fn set_ready(&self, ready: bool) {
        self.shown.ready.store(ready, Ordering::Relaxed);
    }

    /// Holds the endpoint open for so long, unless cancelled first: Prometheus comes by at its own pace, and
    /// a job that is done at once would not be seen.
    pub fn wait_for_scrape(&self, wait: Duration, cancel: &Cancel) {
        let wait = async { cancel.or(tokio::time::sleep(wait)).await };
        // A signal is no failure of a job that is done.
        let _ = self.handle.block_on(wait);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_documented() {
        for (s, shown) in [
            (":8080", ":8080"),
            ("127.0.0.1:0", "127.0.0.1:0"),
            ("[::1]:80", "[::1]:80"),
            ("localhost:65535", "localhost:65535"),
        ] {
            let address: BindAddress = s.parse().unwrap();
            assert_eq!(address.to_string(), shown);
        }
        for (s, says) in [
            ("8080", "no port"),
            ("", "no port"),
            ("localhost:", "no port"),
            ("localhost:65536", "no port"),
            ("::1:80", "no host"),
            ("http://localhost:80", "no host"),
        ] {
            let e = BindAddress::from_str(s).unwrap_err();
            assert!(e.contains(says) && e.contains(":8080"), "{s}: {e}");
        }
    }

    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;

    /// Sends the beginning of a request, or all of it.
    fn sent(server: &Server, text: &str) -> TcpStream {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        let patience = Some(Duration::from_secs(30));
        stream.set_read_timeout(patience).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        stream
    }

    /// All that the server says until it closes the connection.
    fn heard(mut stream: TcpStream) -> String {
        let mut text = String::new();
        // A connection that is reset has said nothing more, either.
        let _ = stream.read_to_string(&mut text);
        text
    }

    fn serving(runtime: &tokio::runtime::Runtime, connections: usize, ms: u64) -> Server {
        let limits = Limits {
            connections,
            patience: Duration::from_millis(ms),
        };
        let exposition: Exposition = Arc::new(|| Ok("# EOF\n".to_owned()));
        let address = "127.0.0.1:0".parse().unwrap();
        let cancel = Cancel::default();
        serve_within(limits, &address, exposition, runtime.handle(), &cancel).unwrap()
    }

    #[test]
    fn who_holds_all_connections_does_not_fail_the_probes() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let server = serving(&runtime, 4, 3_600_000);
        let held: Vec<TcpStream> = (0..20)
            .map(|n| match n % 2 {
                0 => sent(&server, "GET /metrics HTTP/1.1\r\nHost: a\r\nX: "),
                _ => sent(&server, "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"),
            })
            .collect();
        for path in ["/healthz", "/metrics", "/readyz"] {
            let ask = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
            let status = if path == "/readyz" { "503" } else { "200" };
            let answer = heard(sent(&server, &ask));
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status}")),
                "{answer}"
            );
        }
        // The oldest were closed for those that came later.
        assert_eq!(heard(held.into_iter().next().unwrap()), "");
    }

    #[test]
    fn who_never_ends_a_header_is_cut_off() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let server = serving(&runtime, 4, 100);
        assert_eq!(heard(sent(&server, "GET /metrics HT")), "");
        assert_eq!(heard(sent(&server, "")), "");
        // Byte by byte is no better.
        let mut slow = sent(&server, "GET /metrics HTTP/1.1\r\nX: ");
        while slow.write_all(b"x").is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
        // A connection that was answered ends, too, if nothing more is asked for.
        let answer = heard(sent(&server, "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"));
        assert!(answer.ends_with("ok\n"), "{answer}");
    }

    #[test]
    fn what_cannot_be_bound_is_said() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let cancel = Cancel::default();
        let open = |address: &str| {
            serve(
                &address.parse().unwrap(),
                &Metrics::new(),
                runtime.handle(),
                &cancel,
            )
        };
        let first = open("127.0.0.1:0").unwrap();
        let taken = first.address().to_string();
        let e = open(&taken).unwrap_err();
        assert_eq!(e.reason(), Reason::Configuration);
        assert!(e.to_string().contains("another program"), "{e}");
        // Of the range that is kept for documentation.
        let e = open("192.0.2.1:0").unwrap_err();
        assert_eq!(e.reason(), Reason::Configuration);
        assert!(e.to_string().contains("of this machine"), "{e}");
        open(":0").unwrap();
        // A wait ends with a signal, also one that came before.
        cancel.cancel();
        first.wait_for_scrape(Duration::from_secs(3600), &cancel);
    }
}
