//! A proxy in front of an API server that counts requests and injects faults.
//!
//! It speaks plain HTTP and forwards everything, tokens included. The test says which requests fail, and how.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use futures::stream;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinHandle};

/// A request to the API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The number of the request, counted from 0 over the life of the proxy.
    number: u64,
    /// The verb as RBAC names it: get, list, watch, create, update, patch, delete.
    pub verb: &'static str,
    /// Such as `jobs` or `etcdbackuppolicies/status`. Empty if the path names no resource.
    pub resource: String,
    pub namespace: String,
    /// Empty for a create: the name is in the body.
    pub name: String,
    pub agent: String,
    pub query: String,
    pub body: Bytes,
    pub at: Instant,
    /// When the response began.
    pub answered: Option<Instant>,
    /// The status of the response, or 0 if there was none.
    pub status: u16,
}

impl Call {
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
}

/// What happens to a request that is hit by a fault.
#[derive(Clone)]
pub enum Effect {
    /// The proxy responds itself, with this status code and a Kubernetes `Status` that has this reason.
    Answer(u16, &'static str),
    /// The proxy breaks the connection.
    Break,
    /// The proxy calls the function, then breaks the connection.
    Do(Arc<dyn Fn() + Send + Sync>),
}

/// When the fault strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timing {
    /// Before the API server sees the request.
    Before,
    /// After the API server has carried it out: the response is lost.
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

struct Shared {
    server: String,
    client: reqwest::Client,
    calls: Mutex<Vec<Call>>,
    planned: Mutex<Vec<PlannedFault>>,
    /// The task that pumps each open connection, by the local port from which the outer half connects to the
    /// inner one.
    connections: Mutex<BTreeMap<u16, AbortHandle>>,
    is_cut: watch::Sender<bool>,
    delay_millis: AtomicU64,
    requests: AtomicU64,
}

/// The proxy. It stops when it is dropped.
pub struct Proxy {
    shared: Arc<Shared>,
    port: u16,
    tasks: Vec<JoinHandle<()>>,
}

impl Proxy {
    /// Starts a proxy in front of the API server at this URL.
    pub async fn start(server: &str) -> Self {
        let shared = Arc::new(Shared {
            server: server.to_owned(),
            client: super::http_client()
                .tls_danger_accept_invalid_certs(true)
                .build()
                .expect("an HTTPS client"),
            calls: Mutex::default(),
            planned: Mutex::default(),
            connections: Mutex::default(),
            is_cut: watch::Sender::new(false),
            delay_millis: AtomicU64::new(0),
            requests: AtomicU64::new(0),
        });
        // The outer half accepts connections and pumps their bytes to the inner half, an HTTP server. So a
        // connection can be broken by aborting its pump.
        let inner = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let inside = inner.local_addr().expect("an address");
        let router = axum::Router::new()
            .fallback(handle)
            .with_state(shared.clone())
            .into_make_service_with_connect_info::<SocketAddr>();
        let serves = tokio::spawn(async move {
            let _ = axum::serve(inner, router).await;
        });
        let outer = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = outer.local_addr().expect("an address").port();
        let accepts = tokio::spawn(accept(outer, inside, shared.clone()));
        Self {
            shared,
            port,
            tasks: vec![serves, accepts],
        }
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Returns every request so far, in order of arrival.
    pub fn calls(&self) -> Vec<Call> {
        self.shared.calls.lock().expect("nobody panicked").clone()
    }

    /// Passes every request so far to `at`. Cheaper than `calls`, which copies them.
    pub fn look<T>(&self, at: impl FnOnce(&[Call]) -> T) -> T {
        at(&self.shared.calls.lock().expect("nobody panicked"))
    }

    /// Returns the number of requests of each verb and resource.
    pub fn counts(&self) -> BTreeMap<(&'static str, String), usize> {
        let mut counts = BTreeMap::new();
        for call in self.shared.calls.lock().expect("nobody panicked").iter() {
            *counts
                .entry((call.verb, call.resource.clone()))
                .or_default() += 1;
        }
        counts
    }

    /// Forgets the requests so far.
    pub fn forget(&self) {
        self.shared.calls.lock().expect("nobody panicked").clear();
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
        let mut planned = self.shared.planned.lock().expect("nobody panicked");
        planned.push(fault);
    }

    /// Returns whether every fault has struck as often as it should.
    pub fn all_faults_struck(&self) -> bool {
        let planned = self.shared.planned.lock().expect("nobody panicked");
        planned.iter().all(|s| s.times == 0)
    }

    /// Removes all faults.
    pub fn clear_faults(&self) {
        let mut planned = self.shared.planned.lock().expect("nobody panicked");
        planned.clear();
    }

    /// Delays every request.
    pub fn delay(&self, delay: Duration) {
        let millis = u64::try_from(delay.as_millis()).expect("a short time");
        self.shared.delay_millis.store(millis, Ordering::Relaxed);
    }

    /// Breaks every connection and accepts no new one.
    pub fn cut(&self) {
        self.shared.is_cut.send_replace(true);
        let mut connections = self.shared.connections.lock().expect("nobody panicked");
        for (_, connection) in std::mem::take(&mut *connections) {
            connection.abort();
        }
    }

    /// Accepts connections again.
    pub fn mend(&self) {
        self.shared.is_cut.send_replace(false);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.cut();
        for task in &self.tasks {
            task.abort();
        }
    }
}

async fn accept(outer: TcpListener, inside: SocketAddr, shared: Arc<Shared>) {
    loop {
        let Ok((mut client, _)) = outer.accept().await else {
            continue;
        };
        if *shared.is_cut.borrow() {
            continue;
        }
        let Ok(mut inner) = TcpStream::connect(inside).await else {
            continue;
        };
        let _ = client.set_nodelay(true);
        let _ = inner.set_nodelay(true);
        let port = inner.local_addr().expect("an address").port();
        let of_pump = shared.clone();
        let mut connections = shared.connections.lock().expect("nobody panicked");
        let pump = tokio::spawn(async move {
            let _ = tokio::io::copy_bidirectional(&mut client, &mut inner).await;
            let mut connections = of_pump.connections.lock().expect("nobody panicked");
            connections.remove(&port);
        });
        connections.insert(port, pump.abort_handle());
    }
}

async fn handle(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    request: Request,
) -> Result<Response, Infallible> {
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, usize::MAX).await.unwrap_or_default();
    let number = shared.requests.fetch_add(1, Ordering::Relaxed);
    let call = call(number, &parts, body.clone());
    shared
        .calls
        .lock()
        .expect("nobody panicked")
        .push(call.clone());
    let delay = shared.delay_millis.load(Ordering::Relaxed);
    if delay > 0 {
        tokio::time::sleep(Duration::from_millis(delay)).await;
    }
    let fault = shared.next_fault(&call);
    if let Some((Timing::Before, effect)) = &fault {
        return Ok(shared.apply(number, peer, effect).await);
    }
    let method = reqwest::Method::from_bytes(parts.method.as_str().as_bytes()).expect("a method");
    let mut headers = parts.headers;
    // The HTTP client sets these headers itself.
    for name in ["host", "accept-encoding", "connection", "content-length"] {
        headers.remove(name);
    }
    let path = parts.uri.path_and_query().map_or("/", |p| p.as_str());
    let sent = shared
        .client
        .request(method, format!("{}{path}", shared.server))
        .headers(headers)
        .body(body)
        .send();
    let Ok(answer) = sent.await else {
        return Ok(shared.apply(number, peer, &Effect::Break).await);
    };
    let status = answer.status().as_u16();
    shared.answered(number, status);
    let mut response = Response::builder().status(status);
    if let Some(headers) = response.headers_mut() {
        *headers = passed_on(answer.headers());
    }
    if let Some((Timing::After, effect)) = &fault {
        // Read the whole response, to be sure that the API server has carried out the request.
        let _ = answer.bytes().await;
        return Ok(shared.apply(number, peer, effect).await);
    }
    let chunks = stream::unfold(answer, |mut answer| async move {
        match answer.chunk().await {
            Ok(Some(chunk)) => Some((Ok::<_, reqwest::Error>(chunk), answer)),
            Ok(None) => None,
            Err(err) => Some((Err(err), answer)),
        }
    });
    Ok(response.body(Body::from_stream(chunks)).expect("an answer"))
}

fn passed_on(headers: &HeaderMap) -> HeaderMap {
    let own = ["connection", "transfer-encoding", "content-length"];
    let passed = headers.iter().filter(|(k, _)| !own.contains(&k.as_str()));
    passed.map(|(k, v)| (k.clone(), v.clone())).collect()
}

impl Shared {
    fn answered(&self, number: u64, status: u16) {
        let mut calls = self.calls.lock().expect("nobody panicked");
        // `forget` may have removed it meanwhile.
        let call = calls.iter_mut().rev().find(|c| c.number == number);
        if let Some(call) = call {
            call.status = status;
            call.answered = Some(Instant::now());
        }
    }

    /// Returns the fault for this request, if there is one.
    fn next_fault(&self, call: &Call) -> Option<(Timing, Effect)> {
        let mut planned = self.planned.lock().expect("nobody panicked");
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

    async fn apply(&self, number: u64, peer: SocketAddr, effect: &Effect) -> Response {
        if let Effect::Answer(status, reason) = effect {
            self.answered(number, *status);
            let body = json!({
                "kind": "Status", "apiVersion": "v1", "status": "Failure",
                "message": format!("the test says: {reason}"),
                "reason": reason, "code": status,
            });
            return Response::builder()
                .status(StatusCode::from_u16(*status).expect("a status"))
                .header("Content-Type", "application/json")
                .body(Body::from(body.to_string()))
                .expect("an answer");
        }
        if let Effect::Do(act) = effect {
            act();
        }
        self.answered(number, 0);
        let connection = {
            let mut connections = self.connections.lock().expect("nobody panicked");
            connections.remove(&peer.port())
        };
        if let Some(connection) = connection {
            connection.abort();
        }
        // The client gets no response any more.
        std::future::pending().await
    }
}

fn call(number: u64, parts: &axum::http::request::Parts, body: Bytes) -> Call {
    let query = parts.uri.query().unwrap_or_default().to_owned();
    let mut words = parts.uri.path().split('/').filter(|w| !w.is_empty());
    let is_resource = match words.next() {
        Some("api") => words.next().is_some(),
        Some("apis") => words.nth(1).is_some(),
        _ => false,
    };
    let mut rest: Vec<&str> = match is_resource {
        true => words.collect(),
        false => Vec::new(),
    };
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
    let is_watch = query
        .split('&')
        .any(|p| p == "watch=true" || p == "watch=1");
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
    Call {
        number,
        verb,
        resource,
        namespace,
        name: word(1).to_owned(),
        agent: agent
            .and_then(|a| a.to_str().ok())
            .unwrap_or_default()
            .to_owned(),
        query,
        body,
        at: Instant::now(),
        answered: None,
        status: 0,
    }
}
