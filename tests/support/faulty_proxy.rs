//! A way to an API server on which requests are counted, and some of them fail.
//!
//! It speaks plain HTTP and sends on whatever it is asked, tokens and all. What goes wrong, and when, the test
//! says.

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
    /// As RBAC has it: get, list, watch, create, update, patch, delete.
    pub verb: &'static str,
    /// Such as `jobs`, or `etcdbackuppolicies/status`; empty for what is no resource.
    pub resource: String,
    pub namespace: String,
    /// Empty of what is created: its name is in the body.
    pub name: String,
    pub agent: String,
    pub query: String,
    pub body: Bytes,
    pub at: Instant,
    /// When the answer began.
    pub answered: Option<Instant>,
    /// Of the answer; 0 where there was none.
    pub status: u16,
}

impl Call {
    pub fn writes(&self) -> bool {
        ["create", "update", "patch", "delete"].contains(&self.verb)
    }

    /// A write that is part of the work: not of the leadership, and no Event.
    pub fn works(&self) -> bool {
        self.writes() && self.resource != "events" && !self.name.contains("leader")
    }

    /// The body, where it is JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

/// What befalls a request.
#[derive(Clone)]
pub enum Then {
    /// An answer of the proxy's own.
    Answer(u16, &'static str),
    /// The connection breaks.
    Break,
    /// Something happens, and the connection breaks.
    Do(Arc<dyn Fn() + Send + Sync>),
}

/// Where on its way that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// The API server does not get to see it.
    Before,
    /// The API server has done it, and its answer is lost.
    After,
}

struct Strike {
    which: Box<dyn Fn(&Call) -> bool + Send + Sync>,
    /// How many of them go well first.
    spared: usize,
    /// How many of them it befalls.
    times: usize,
    when: When,
    then: Then,
}

struct Shared {
    server: String,
    client: reqwest::Client,
    calls: Mutex<Vec<Call>>,
    strikes: Mutex<Vec<Strike>>,
    /// Every connection that there is, by the port of its inner half.
    connections: Mutex<BTreeMap<u16, AbortHandle>>,
    is_cut: watch::Sender<bool>,
    delay_millis: AtomicU64,
}

/// It ends when it is dropped.
pub struct Proxy {
    shared: Arc<Shared>,
    port: u16,
    tasks: Vec<JoinHandle<()>>,
}

impl Proxy {
    /// A way to the API server at this URL.
    pub async fn start(server: &str) -> Self {
        let shared = Arc::new(Shared {
            server: server.to_owned(),
            client: super::http_client()
                .tls_danger_accept_invalid_certs(true)
                .build()
                .expect("an HTTPS client"),
            calls: Mutex::default(),
            strikes: Mutex::default(),
            connections: Mutex::default(),
            is_cut: watch::Sender::new(false),
            delay_millis: AtomicU64::new(0),
        });
        // Two halves: the outer one holds the connections, and can break them.
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

    /// Every request so far, in the order in which they came.
    pub fn calls(&self) -> Vec<Call> {
        self.shared.calls.lock().expect("nobody panicked").clone()
    }

    /// Looks at every request so far; cheaper than a copy of them if there are many.
    pub fn look<T>(&self, at: impl FnOnce(&[Call]) -> T) -> T {
        at(&self.shared.calls.lock().expect("nobody panicked"))
    }

    /// How many requests there were of each kind: verb and resource.
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

    /// Of the requests from here on that are such, some go well and then this befalls some.
    pub fn strike(
        &self,
        which: impl Fn(&Call) -> bool + Send + Sync + 'static,
        spared: usize,
        times: usize,
        when: When,
        then: Then,
    ) {
        let strike = Strike {
            which: Box::new(which),
            spared,
            times,
            when,
            then,
        };
        let mut strikes = self.shared.strikes.lock().expect("nobody panicked");
        strikes.push(strike);
    }

    /// Whether every strike has befallen all that it was to befall.
    pub fn has_struck(&self) -> bool {
        let strikes = self.shared.strikes.lock().expect("nobody panicked");
        strikes.iter().all(|s| s.times == 0)
    }

    /// No more strikes.
    pub fn spare(&self) {
        let mut strikes = self.shared.strikes.lock().expect("nobody panicked");
        strikes.clear();
    }

    /// Every request waits so long first.
    pub fn delay(&self, delay: Duration) {
        let millis = u64::try_from(delay.as_millis()).expect("a short time");
        self.shared.delay_millis.store(millis, Ordering::Relaxed);
    }

    /// Breaks every connection, and takes no new one.
    pub fn cut(&self) {
        self.shared.is_cut.send_replace(true);
        let mut connections = self.shared.connections.lock().expect("nobody panicked");
        for (_, connection) in std::mem::take(&mut *connections) {
            connection.abort();
        }
    }

    /// Takes connections again.
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
    let call = call(&parts, body.clone());
    let at = {
        let mut calls = shared.calls.lock().expect("nobody panicked");
        calls.push(call.clone());
        calls.len() - 1
    };
    let delay = shared.delay_millis.load(Ordering::Relaxed);
    if delay > 0 {
        tokio::time::sleep(Duration::from_millis(delay)).await;
    }
    let strike = shared.strike(&call);
    if let Some((When::Before, then)) = &strike {
        return Ok(shared.befall(at, peer, then).await);
    }
    let method = reqwest::Method::from_bytes(parts.method.as_str().as_bytes()).expect("a method");
    let mut headers = parts.headers;
    // Its own; and bodies are passed on as they are.
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
        return Ok(shared.befall(at, peer, &Then::Break).await);
    };
    let status = answer.status().as_u16();
    shared.answered(at, status);
    let mut response = Response::builder().status(status);
    if let Some(headers) = response.headers_mut() {
        *headers = passed_on(answer.headers());
    }
    if let Some((When::After, then)) = &strike {
        // All of it has come back: it is done.
        let _ = answer.bytes().await;
        return Ok(shared.befall(at, peer, then).await);
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
    fn answered(&self, at: usize, status: u16) {
        let mut calls = self.calls.lock().expect("nobody panicked");
        // They may have been forgotten meanwhile.
        if let Some(call) = calls.get_mut(at) {
            call.status = status;
            call.answered = Some(Instant::now());
        }
    }

    /// What befalls this request, if anything does.
    fn strike(&self, call: &Call) -> Option<(When, Then)> {
        let mut strikes = self.strikes.lock().expect("nobody panicked");
        for strike in strikes.iter_mut().filter(|s| (s.which)(call)) {
            if strike.spared > 0 {
                strike.spared -= 1;
            } else if strike.times > 0 {
                strike.times -= 1;
                return Some((strike.when, strike.then.clone()));
            }
        }
        None
    }

    async fn befall(&self, at: usize, peer: SocketAddr, then: &Then) -> Response {
        if let Then::Answer(status, reason) = then {
            self.answered(at, *status);
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
        if let Then::Do(act) = then {
            act();
        }
        self.answered(at, 0);
        let connection = {
            let mut connections = self.connections.lock().expect("nobody panicked");
            connections.remove(&peer.port())
        };
        if let Some(connection) = connection {
            connection.abort();
        }
        // Nobody hears of it any more.
        std::future::pending().await
    }
}

fn call(parts: &axum::http::request::Parts, body: Bytes) -> Call {
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
