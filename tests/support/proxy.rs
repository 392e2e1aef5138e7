//! A proxy in front of an HTTP server (an API server or an object store) that records every request. It delays
//! responses, limits the rate, and injects the faults that a test asks for.
//!
//! It speaks plain HTTP and forwards everything, tokens and signatures included. It does not model round trips of
//! connections and TLS.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{ConnectInfo, Request, State};
use axum::http::request::Parts;
use axum::response::Response;
use futures::stream;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// The longest body that is recorded: more than an object of Kubernetes has.
const RECORDED_BODY: usize = 2 << 20;

/// A request and its response.
#[derive(Clone, Debug)]
pub struct Call {
    /// The number of the request, counted from 0 over the life of the proxy.
    number: u64,
    pub method: String,
    /// Path and query.
    pub target: String,
    /// Whether an object store copies another object.
    pub copies: bool,
    /// The verb as Kubernetes' RBAC names it: get, list, watch, create, update, patch, delete.
    pub verb: &'static str,
    /// A resource of Kubernetes, such as `jobs` or `etcdbackuppolicies/status`. Empty if the path names none.
    pub resource: String,
    pub namespace: String,
    /// Empty for a create: the name is in the body.
    pub name: String,
    pub agent: String,
    /// Empty if it is very long.
    pub body: Bytes,
    /// When the request had arrived.
    pub began: Instant,
    /// When the response began.
    pub answered: Option<Instant>,
    /// When the last byte of the response was forwarded, so far.
    pub ended: Option<Instant>,
    /// The status of the response, or 0 if there was none.
    pub status: u16,
    pub bytes_up: u64,
    pub bytes_down: u64,
}

impl Call {
    pub fn query(&self) -> &str {
        self.target.split_once('?').map_or("", |(_, query)| query)
    }

    /// Whether it changes something in Kubernetes.
    pub fn writes(&self) -> bool {
        ["create", "update", "patch", "delete"].contains(&self.verb)
    }

    /// Whether the call is a write of the controller's work: no leader election, no Event.
    pub fn works(&self) -> bool {
        self.writes() && self.resource != "events" && !self.name.contains("leader")
    }

    /// The body as JSON, or null if it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// Returns the method, and the S3 subresource if the request is not for an object.
    pub fn kind(&self) -> String {
        const SUBRESOURCES: [&str; 8] = [
            "tagging",
            "versions",
            "versioning",
            "object-lock",
            "retention",
            "legal-hold",
            "delete",
            "uploads",
        ];
        let path = self.target.split('?').next().unwrap_or_default();
        let is_object = path.trim_matches('/').contains('/');
        let has = |name: &str| {
            let mut names = self.query().split('&').map(|p| p.split('=').next());
            names.any(|n| n == Some(name))
        };
        let method = if self.copies { "COPY" } else { &self.method };
        match SUBRESOURCES.into_iter().find(|name| has(name)) {
            Some(resource) => format!("{method} {resource}"),
            None if has("partNumber") => format!("{method} part"),
            None if has("uploadId") => format!("{method} upload"),
            None if !is_object && method == "GET" => "LIST".to_owned(),
            None => method.to_owned(),
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method, self.target)
    }
}

/// The traffic of a period.
#[derive(Clone, Debug, Default)]
pub struct Traffic {
    /// In order of arrival.
    pub requests: Vec<Call>,
    /// The largest number of requests that were under way at once.
    pub most_at_once: usize,
}

impl Traffic {
    pub fn counts(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for request in &self.requests {
            *counts.entry(request.kind()).or_default() += 1;
        }
        counts
    }
}

/// What happens to a request that is hit by a fault.
#[derive(Clone)]
pub enum Effect {
    /// The proxy responds itself, with this status code and a Kubernetes `Status` that has this reason.
    Answer(u16, &'static str),
    /// The proxy responds itself, with this status code and an S3 error that has this code.
    S3Answer(u16, &'static str),
    /// The proxy breaks the connection.
    Break,
    /// The proxy calls the function, then breaks the connection.
    Do(Arc<dyn Fn() + Send + Sync>),
}

/// When the fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// Before the server sees the request.
    Before,
    /// After the server has carried it out: the response is lost.
    After,
}

struct PlannedFault {
    matches: Box<dyn Fn(&Call) -> bool + Send + Sync>,
    /// How many matching requests succeed first.
    spared: usize,
    /// How many matching requests fail after that.
    times: usize,
    timing: Timing,
    effect: Effect,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Open,
    Cut,
    Ended,
}

struct Shared {
    server: String,
    client: reqwest::Client,
    traffic: Mutex<Traffic>,
    under_way: Mutex<usize>,
    planned: Mutex<Vec<PlannedFault>>,
    /// The task that pumps each open connection, by the local port from which the outer half connects to the
    /// inner one.
    connections: Mutex<BTreeMap<u16, AbortHandle>>,
    way: watch::Sender<Way>,
    delay_micros: AtomicU64,
    /// Bytes per second of each connection in either direction, or 0 for no limit.
    rate: AtomicU64,
    number: AtomicU64,
}

/// The proxy. It ends with its connections when it is dropped.
pub struct Proxy {
    shared: Arc<Shared>,
    port: u16,
    thread: Option<std::thread::JoinHandle<()>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nobody panicked")
}

impl Proxy {
    /// Starts a proxy in front of the server at this URL.
    pub fn start(server: &str) -> Self {
        let client = super::http_client()
            .tls_danger_accept_invalid_certs(true)
            .redirect(reqwest::redirect::Policy::none())
            // The server must see the Host that the client signed.
            .http1_only();
        let shared = Arc::new(Shared {
            server: server.trim_end_matches('/').to_owned(),
            client: client.build().expect("an HTTP client"),
            traffic: Mutex::default(),
            under_way: Mutex::default(),
            planned: Mutex::default(),
            connections: Mutex::default(),
            way: watch::Sender::new(Way::Open),
            delay_micros: AtomicU64::new(0),
            rate: AtomicU64::new(0),
            number: AtomicU64::new(0),
        });
        let outer = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        outer.set_nonblocking(true).expect("a socket for tokio");
        let port = outer.local_addr().expect("an address").port();
        let of_thread = shared.clone();
        // In a runtime of its own: callers may block theirs.
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(serve(outer, of_thread));
        });
        Self {
            shared,
            port,
            thread: Some(thread),
        }
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Returns every request so far, in order of arrival.
    pub fn calls(&self) -> Vec<Call> {
        self.look(<[Call]>::to_vec)
    }

    /// Passes every request so far to `at`. Cheaper than `calls`, which copies them.
    pub fn look<T>(&self, at: impl FnOnce(&[Call]) -> T) -> T {
        at(&locked(&self.shared.traffic).requests)
    }

    /// Returns the number of requests of each verb and resource of Kubernetes.
    pub fn counts(&self) -> BTreeMap<(&'static str, String), usize> {
        let mut counts = BTreeMap::new();
        for call in &locked(&self.shared.traffic).requests {
            *counts
                .entry((call.verb, call.resource.clone()))
                .or_default() += 1;
        }
        counts
    }

    /// Returns the traffic since the last call, and forgets it. Requests that are still under way are in it, without
    /// their end.
    pub fn take(&self) -> Traffic {
        std::mem::take(&mut *locked(&self.shared.traffic))
    }

    /// Injects a fault: of the requests that match from now on, the first `spared` succeed and the next `times`
    /// fail.
    pub fn inject(
        &self,
        matches: impl Fn(&Call) -> bool + Send + Sync + 'static,
        spared: usize,
        times: usize,
        timing: Timing,
        effect: Effect,
    ) {
        let fault = PlannedFault {
            matches: Box::new(matches),
            spared,
            times,
            timing,
            effect,
        };
        locked(&self.shared.planned).push(fault);
    }

    /// Refuses requests, as S3 does if a role lacks a right.
    pub fn deny(&self, denied: impl Fn(&Call) -> bool + Send + Sync + 'static) {
        let effect = Effect::S3Answer(403, "AccessDenied");
        self.inject(denied, 0, usize::MAX, Timing::Before, effect);
    }

    /// Returns whether every fault has struck as often as it should.
    pub fn all_faults_struck(&self) -> bool {
        locked(&self.shared.planned).iter().all(|s| s.times == 0)
    }

    /// Removes all faults.
    pub fn clear_faults(&self) {
        locked(&self.shared.planned).clear();
    }

    /// Delays every response, from its first byte on.
    pub fn delay(&self, delay: Duration) {
        let micros = u64::try_from(delay.as_micros()).expect("a short time");
        self.shared.delay_micros.store(micros, Ordering::Relaxed);
    }

    /// Sets the bytes per second of each connection in either direction, or 0 for no limit.
    pub fn hold_to(&self, rate: u64) {
        self.shared.rate.store(rate, Ordering::Relaxed);
    }

    /// Breaks every connection and accepts no new one.
    pub fn cut(&self) {
        self.shared.way.send_replace(Way::Cut);
        let connections = std::mem::take(&mut *locked(&self.shared.connections));
        connections.values().for_each(AbortHandle::abort);
        // A client that finds its connection open may use it again.
        while !connections.values().all(AbortHandle::is_finished) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Accepts connections again.
    pub fn mend(&self) {
        self.shared.way.send_replace(Way::Open);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.way.send_replace(Way::Ended);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Serves until the proxy ends.
async fn serve(outer: std::net::TcpListener, shared: Arc<Shared>) {
    // The outer half accepts connections and pumps their bytes to the inner half, an HTTP server. So a
    // connection can be broken by aborting its pump.
    let inner = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let inside = inner.local_addr().expect("an address");
    let router = axum::Router::new()
        .fallback(handle)
        .with_state(shared.clone())
        .into_make_service_with_connect_info::<SocketAddr>();
    let outer = TcpListener::from_std(outer).expect("a listener");
    let mut way = shared.way.subscribe();
    tokio::select! {
        _ = async { axum::serve(inner, router).await } => {}
        () = accept(outer, inside, &shared) => {}
        _ = way.wait_for(|w| *w == Way::Ended) => {}
    }
}

async fn accept(outer: TcpListener, inside: SocketAddr, shared: &Arc<Shared>) {
    loop {
        let Ok((client, _)) = outer.accept().await else {
            continue;
        };
        if *shared.way.borrow() != Way::Open {
            continue;
        }
        let Ok(inner) = TcpStream::connect(inside).await else {
            continue;
        };
        let _ = client.set_nodelay(true);
        let _ = inner.set_nodelay(true);
        let port = inner.local_addr().expect("an address").port();
        let of_pump = shared.clone();
        let mut connections = locked(&shared.connections);
        let pump = tokio::spawn(async move {
            let (from_client, to_client) = client.into_split();
            let (from_inner, to_inner) = inner.into_split();
            let up = pass(from_client, to_inner, &of_pump.rate);
            let down = pass(from_inner, to_client, &of_pump.rate);
            // A half that is closed closes the other one; both ends report a broken connection.
            let _ = tokio::join!(up, down);
            locked(&of_pump.connections).remove(&port);
        });
        connections.insert(port, pump.abort_handle());
    }
}

/// Forwards bytes at the rate that is set.
async fn pass(
    from: impl AsyncRead,
    to: impl AsyncWrite,
    bytes_per_second: &AtomicU64,
) -> io::Result<()> {
    /// What an idle connection may make up for. A timer of tokio has milliseconds.
    const BURST: Duration = Duration::from_millis(5);
    let (mut from, mut to) = (pin!(from), pin!(to));
    let mut buffer = vec![0; 64 << 10];
    let mut due = tokio::time::Instant::now();
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buffer[..read]).await?;
        let rate = bytes_per_second.load(Ordering::Relaxed);
        if rate > 0 {
            let earliest = tokio::time::Instant::now() - BURST;
            due = due.max(earliest) + Duration::from_secs_f64(read as f64 / rate as f64);
            tokio::time::sleep_until(due).await;
        }
    }
}

async fn handle(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    request: Request,
) -> Result<Response, Infallible> {
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, usize::MAX).await.unwrap_or_default();
    let call = call(shared.number.fetch_add(1, Ordering::Relaxed), &parts, &body);
    let under_way = UnderWay::begin(&shared, &call);
    let fault = shared.next_fault(&call);
    if let Some((Timing::Before, effect)) = &fault {
        return Ok(under_way.strike(peer, effect).await);
    }
    let mut headers = parts.headers;
    // The HTTP client sets these headers itself.
    for name in [
        "connection",
        "content-length",
        "expect",
        "transfer-encoding",
    ] {
        headers.remove(name);
    }
    let sent = shared
        .client
        .request(parts.method, format!("{}{}", shared.server, call.target))
        .headers(headers)
        .body(body)
        .send();
    let Ok(answer) = sent.await else {
        return Ok(under_way.strike(peer, &Effect::Break).await);
    };
    let delay = Duration::from_micros(shared.delay_micros.load(Ordering::Relaxed));
    if delay > Duration::ZERO {
        tokio::time::sleep(delay).await;
    }
    let status = answer.status();
    under_way.answered(status.as_u16());
    if let Some((Timing::After, effect)) = &fault {
        // Read the whole response, to be sure that the server has carried out the request.
        let _ = answer.bytes().await;
        return Ok(under_way.strike(peer, effect).await);
    }
    let mut response = Response::builder().status(status);
    for (name, value) in answer.headers() {
        if !["connection", "transfer-encoding"].contains(&name.as_str()) {
            response = response.header(name, value);
        }
    }
    let chunks = stream::unfold((answer, under_way), |(mut answer, under_way)| async move {
        match answer.chunk().await {
            Ok(Some(chunk)) => {
                under_way.change(|call| {
                    call.bytes_down += chunk.len() as u64;
                    call.ended = Some(Instant::now());
                });
                Some((Ok::<_, reqwest::Error>(chunk), (answer, under_way)))
            }
            Ok(None) => None,
            Err(err) => Some((Err(err), (answer, under_way))),
        }
    });
    Ok(response
        .body(Body::from_stream(chunks))
        .expect("a response"))
}

/// A request that is under way until this is dropped.
struct UnderWay {
    shared: Arc<Shared>,
    number: u64,
}

impl UnderWay {
    fn begin(shared: &Arc<Shared>, call: &Call) -> Self {
        let mut under_way = locked(&shared.under_way);
        *under_way += 1;
        let mut traffic = locked(&shared.traffic);
        traffic.most_at_once = traffic.most_at_once.max(*under_way);
        traffic.requests.push(call.clone());
        UnderWay {
            shared: shared.clone(),
            number: call.number,
        }
    }

    fn change(&self, change: impl FnOnce(&mut Call)) {
        let mut traffic = locked(&self.shared.traffic);
        // `take` may have removed it meanwhile.
        let mut newest_first = traffic.requests.iter_mut().rev();
        if let Some(call) = newest_first.find(|c| c.number == self.number) {
            change(call);
        }
    }

    fn answered(&self, status: u16) {
        self.change(|call| {
            call.status = status;
            call.answered = Some(Instant::now());
            call.ended = call.answered.filter(|_| status > 0);
        });
    }

    async fn strike(&self, peer: SocketAddr, effect: &Effect) -> Response {
        let (status, kind, body) = match effect {
            Effect::Answer(status, reason) => {
                let body = json!({
                    "kind": "Status", "apiVersion": "v1", "status": "Failure",
                    "message": format!("the test says: {reason}"),
                    "reason": reason, "code": status,
                });
                (*status, "application/json", body.to_string())
            }
            Effect::S3Answer(status, code) => {
                let body = format!("<Error><Code>{code}</Code><Message>No.</Message></Error>");
                (*status, "application/xml", body)
            }
            Effect::Break => return self.break_off(peer).await,
            Effect::Do(act) => {
                act();
                return self.break_off(peer).await;
            }
        };
        self.answered(status);
        let response = Response::builder()
            .status(status)
            .header("Content-Type", kind);
        response.body(Body::from(body)).expect("a response")
    }

    /// Breaks the connection: the client gets no response any more.
    async fn break_off(&self, peer: SocketAddr) -> Response {
        self.answered(0);
        let connection = locked(&self.shared.connections).remove(&peer.port());
        if let Some(connection) = connection {
            connection.abort();
        }
        std::future::pending().await
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        *locked(&self.shared.under_way) -= 1;
    }
}

impl Shared {
    /// Returns the fault for this request, if there is one.
    fn next_fault(&self, call: &Call) -> Option<(Timing, Effect)> {
        let mut planned = locked(&self.planned);
        for fault in planned.iter_mut().filter(|s| (s.matches)(call)) {
            if fault.spared > 0 {
                fault.spared -= 1;
            } else if fault.times > 0 {
                fault.times -= 1;
                return Some((fault.timing, fault.effect.clone()));
            }
        }
        None
    }
}

fn call(number: u64, parts: &Parts, body: &Bytes) -> Call {
    let target = parts.uri.path_and_query().map_or("/", |p| p.as_str());
    let mut words = parts.uri.path().split('/').filter(|w| !w.is_empty());
    let is_resource = match words.next() {
        Some("api") => words.next().is_some(),
        Some("apis") => words.nth(1).is_some(),
        _ => false,
    };
    let mut rest: Vec<&str> = words.filter(|_| is_resource).collect();
    let mut namespace = String::new();
    if rest.len() > 2 && rest[0] == "namespaces" {
        namespace = rest[1].to_owned();
        rest.drain(..2);
    }
    let word = |at: usize| rest.get(at).copied().unwrap_or_default();
    let resource = match word(2) {
        "" => word(0).to_owned(),
        sub => format!("{}/{sub}", word(0)),
    };
    let mut query = parts.uri.query().unwrap_or_default().split('&');
    let is_watch = query.any(|p| p == "watch=true" || p == "watch=1");
    let verb = match (parts.method.as_str(), word(1)) {
        ("GET", "") if is_watch => "watch",
        ("GET", "") if !rest.is_empty() => "list",
        ("POST", _) => "create",
        ("PUT", _) => "update",
        ("PATCH", _) => "patch",
        ("DELETE", _) => "delete",
        _ => "get",
    };
    let agent = parts.headers.get("user-agent");
    let agent = agent.and_then(|a| a.to_str().ok()).unwrap_or_default();
    Call {
        number,
        method: parts.method.to_string(),
        target: target.to_owned(),
        copies: parts.headers.contains_key("x-amz-copy-source"),
        verb,
        resource,
        namespace,
        name: word(1).to_owned(),
        agent: agent.to_owned(),
        body: match body.len() {
            ..=RECORDED_BODY => body.clone(),
            _ => Bytes::new(),
        },
        began: Instant::now(),
        answered: None,
        ended: None,
        status: 0,
        bytes_up: body.len() as u64,
        bytes_down: 0,
    }
}
