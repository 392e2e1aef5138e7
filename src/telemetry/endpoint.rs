//! The HTTP endpoint: `/metrics` for Prometheus, `/healthz` and `/readyz` for Kubernetes.
//!
//! It is read-only, without TLS and authentication: it is meant for the network of the cluster.

use super::connection_limit::{LimitedListener, Limits};
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
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// An address to listen at: `HOST:PORT`, or `:PORT` for all addresses of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BindAddress {
    /// The host; empty for all addresses.
    host: String,
    port: u16,
}

impl FromStr for BindAddress {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        const HOW: &str = "give an address and a port, such as 127.0.0.1:8080, [::1]:8080, or :8080 for all addresses of the machine";
        let (host, port) = s
            .rsplit_once(':')
            .ok_or_else(|| format!("the port is missing; {HOW}"))?;
        let port = port
            .parse()
            .map_err(|_| format!("invalid port \"{port}\"; {HOW}"))?;
        let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        if bare.is_none() && host.contains([':', '/', '[', ']']) {
            return Err(format!("invalid host \"{host}\"; {HOW}"));
        }
        let host = bare.unwrap_or(host).to_owned();
        Ok(BindAddress { host, port })
    }
}

impl fmt::Display for BindAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl BindAddress {
    /// Returns a port of the loopback address; 0 for any free one.
    pub fn loopback(port: u16) -> Self {
        BindAddress {
            host: Ipv4Addr::LOCALHOST.to_string(),
            port,
        }
    }

    /// Listens at the address, within a runtime. Returns the real address, too. `what` is served there.
    ///
    /// # Errors
    /// `Configuration` if the address is in use or not of this machine; `PermissionDenied`.
    pub fn listen(&self, what: &str) -> Result<(tokio::net::TcpListener, SocketAddr)> {
        let failed = |e: std::io::Error| {
            let (reason, advice) = match e.kind() {
                ErrorKind::AddrInUse => (
                    Reason::Configuration,
                    "another program listens there: give another port, or end that program",
                ),
                ErrorKind::PermissionDenied => (
                    Reason::PermissionDenied,
                    "ports below 1024 need a privilege: give a higher port",
                ),
                _ => (
                    Reason::Configuration,
                    "give an address of this machine, or only :PORT for all of its addresses",
                ),
            };
            reason.error(format!("cannot serve {what} at {self}: {e}; {advice}"))
        };
        let listener = self.bind().map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(failed)?;
        Ok((listener, address))
    }

    fn bind(&self) -> std::io::Result<TcpListener> {
        let bind = |host: &str| TcpListener::bind((host, self.port));
        match self.host.as_str() {
            // IPv6 and IPv4 if the system supports IPv6, otherwise IPv4.
            "" => bind("::").or_else(|e| match e.kind() {
                ErrorKind::AddrInUse | ErrorKind::PermissionDenied => Err(e),
                _ => bind("0.0.0.0"),
            }),
            host => bind(host),
        }
    }
}

/// A running endpoint. Dropping it closes the endpoint.
pub struct MetricsServer {
    address: SocketAddr,
    state: ServerState,
    task: JoinHandle<()>,
    handle: Handle,
}

impl fmt::Debug for MetricsServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MetricsServer at {}", self.address)
    }
}

/// A function that returns all metrics of a process as OpenMetrics text.
pub type Exposition = Arc<dyn Fn() -> Result<String> + Send + Sync>;

/// The data behind the responses.
#[derive(Clone)]
struct ServerState {
    metrics: Exposition,
    ready: Arc<AtomicBool>,
    cancel: Cancel,
}

/// Opens the endpoint for these metrics. `/readyz` fails until [`MetricsServer::set_ready`].
///
/// # Errors
/// `Configuration` if the address is in use or not of this machine; `PermissionDenied`.
pub fn serve(
    address: &BindAddress,
    metrics: &Metrics,
    handle: &Handle,
    cancel: &Cancel,
) -> Result<MetricsServer> {
    let metrics = metrics.clone();
    let exposition: Exposition = Arc::new(move || metrics.encode());
    serve_text(address, exposition, handle, cancel)
}

/// Opens the endpoint for other metrics; otherwise like [`serve`].
///
/// # Errors
/// As [`serve`].
pub fn serve_text(
    address: &BindAddress,
    metrics: Exposition,
    handle: &Handle,
    cancel: &Cancel,
) -> Result<MetricsServer> {
    serve_within(Limits::default(), address, metrics, handle, cancel)
}

fn serve_within(
    limits: Limits,
    address: &BindAddress,
    metrics: Exposition,
    handle: &Handle,
    cancel: &Cancel,
) -> Result<MetricsServer> {
    let _entered = handle.enter();
    let (listener, address) = address.listen("metrics")?;
    let state = ServerState {
        metrics,
        ready: Arc::default(),
        cancel: cancel.clone(),
    };
    let router = Router::new()
        .route("/metrics", get(show_metrics))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(show_ready))
        .with_state(state.clone());
    let task = handle.spawn(async move {
        if let Err(e) = axum::serve(LimitedListener::new(listener, limits), router).await {
            tracing::warn!("the endpoint for metrics has stopped: {e}");
        }
    });
    tracing::info!(%address, "serving metrics at /metrics");
    Ok(MetricsServer {
        address,
        state,
        task,
        handle: handle.clone(),
    })
}

async fn show_metrics(State(state): State<ServerState>) -> Response {
    match (state.metrics)() {
        Ok(text) => ([(CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")).into_response(),
    }
}

async fn show_ready(State(state): State<ServerState>) -> Response {
    if state.ready.load(Ordering::Relaxed) && state.cancel.check().is_ok() {
        "ok\n".into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "not ready\n").into_response()
    }
}

impl MetricsServer {
    /// Returns the address it listens at, with the real port if port 0 was given.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets whether `/readyz` succeeds. After a cancellation it fails in any case.
    pub fn set_ready(&self, ready: bool) {
        self.state.ready.store(ready, Ordering::Relaxed);
    }

    /// Keeps the endpoint open for this time, unless cancelled: otherwise Prometheus could miss a short
    /// operation.
    pub fn wait_for_scrape(&self, time: Duration, cancel: &Cancel) {
        let wait = async { cancel.or(tokio::time::sleep(time)).await };
        // The operation is complete, so a signal is not an error.
        let _ = self.handle.block_on(wait);
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documented_addresses_are_parsed() {
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
            ("8080", "port is missing"),
            ("", "port is missing"),
            ("localhost:", "invalid port"),
            ("localhost:65536", "invalid port"),
            ("::1:80", "invalid host"),
            ("http://localhost:80", "invalid host"),
        ] {
            let e = BindAddress::from_str(s).unwrap_err();
            assert!(e.contains(says) && e.contains(":8080"), "{s}: {e}");
        }
    }

    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;

    /// Connects and sends a text.
    fn sent(server: &MetricsServer, text: &str) -> TcpStream {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        let timeout = Some(Duration::from_secs(30));
        stream.set_read_timeout(timeout).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        stream
    }

    /// Returns everything that the server sends until it closes the connection.
    fn received(mut stream: TcpStream) -> String {
        let mut text = String::new();
        // A reset also ends the text.
        let _ = stream.read_to_string(&mut text);
        text
    }

    fn serving(runtime: &tokio::runtime::Runtime, connections: usize, ms: u64) -> MetricsServer {
        let limits = Limits {
            connections,
            idle_timeout: Duration::from_millis(ms),
        };
        let exposition: Exposition = Arc::new(|| Ok("# EOF\n".to_owned()));
        let address = "127.0.0.1:0".parse().unwrap();
        let cancel = Cancel::default();
        serve_within(limits, &address, exposition, runtime.handle(), &cancel).unwrap()
    }

    #[test]
    fn probes_succeed_while_others_hold_all_connections() {
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
            let answer = received(sent(&server, &ask));
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status}")),
                "{answer}"
            );
        }
        // The oldest connections were closed in favor of later ones.
        assert_eq!(received(held.into_iter().next().unwrap()), "");
    }

    #[test]
    fn a_connection_that_never_completes_its_headers_is_closed() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let server = serving(&runtime, 4, 100);
        assert_eq!(received(sent(&server, "GET /metrics HT")), "");
        assert_eq!(received(sent(&server, "")), "");
        // Sending byte by byte does not help.
        let mut slow = sent(&server, "GET /metrics HTTP/1.1\r\nX: ");
        while slow.write_all(b"x").is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
        // An idle connection is closed after its response.
        let answer = received(sent(&server, "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"));
        assert!(answer.ends_with("ok\n"), "{answer}");
    }

    #[test]
    fn an_address_that_cannot_be_bound_is_an_error() {
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
        // An address of the range that is reserved for documentation.
        let e = open("192.0.2.1:0").unwrap_err();
        assert_eq!(e.reason(), Reason::Configuration);
        assert!(e.to_string().contains("of this machine"), "{e}");
        open(":0").unwrap();
        // An earlier cancellation ends the wait as well.
        cancel.cancel();
        first.wait_for_scrape(Duration::from_secs(3600), &cancel);
    }
}
