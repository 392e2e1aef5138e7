//! A TCP proxy in front of an HTTP server that delays responses, limits the rate of streams, loses responses,
//! and breaks.
//!
//! It parses just enough HTTP/1.1 to separate requests, and forwards every byte unchanged. Requests on
//! different connections never wait for each other. It does not model round trips of connections and TLS.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, ErrorKind};
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncWrite, AsyncWriteExt, BufReader, BufWriter};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Bytes forwarded at once: the step in which a stream is limited.
const PIECE: usize = 64 << 10;
/// The longest head of a request or response.
const LONGEST_HEAD: usize = 64 << 10;

/// The proxy. It ends with its connections when it is dropped.
pub struct Line {
    port: u16,
    shared: Arc<Shared>,
    thread: Option<std::thread::JoinHandle<()>>,
}

struct Shared {
    server: String,
    delay_micros: AtomicU64,
    /// Bytes per second of each stream, or 0 for no limit.
    rate: AtomicU64,
    state: Mutex<State>,
    way: watch::Sender<Way>,
}

#[derive(Default)]
struct State {
    requests: Vec<Request>,
    /// Incremented when the requests are taken: requests under way then no longer count.
    generation: u64,
    under_way: usize,
    most_under_way: usize,
    lost: Option<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Open,
    Broken,
    Ended,
}

/// A request and its response.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    /// Path and query.
    pub target: String,
    /// Whether the request copies another object.
    pub copies: bool,
    /// When the head of the request had arrived.
    pub began: Instant,
    /// When the response was forwarded; `None` if it was not.
    pub ended: Option<Instant>,
    pub bytes_up: u64,
    pub bytes_down: u64,
}

impl Request {
    /// Returns the method, and the S3 subresource if the request is not for an object.
    pub fn kind(&self) -> String {
        let (path, query) = self.target.split_once('?').unwrap_or((&self.target, ""));
        let is_object = path.trim_matches('/').contains('/');
        let names = || query.split('&').map(|p| p.split('=').next().unwrap_or(p));
        let has = |name: &str| names().any(|n| n == name);
        let method = if self.copies { "COPY" } else { &self.method };
        let resource = [
            "tagging",
            "versions",
            "versioning",
            "object-lock",
            "retention",
            "legal-hold",
            "delete",
            "uploads",
        ]
        .into_iter()
        .find(|name| has(name));
        match resource {
            Some(resource) => format!("{method} {resource}"),
            None if has("partNumber") => format!("{method} part"),
            None if has("uploadId") => format!("{method} upload"),
            None if !is_object && method == "GET" => "LIST".to_owned(),
            None => method.to_owned(),
        }
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method, self.target)
    }
}

/// The traffic of a period.
#[derive(Clone, Debug, Default)]
pub struct Traffic {
    /// In order of arrival.
    pub requests: Vec<Request>,
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

impl Line {
    /// Starts a proxy without delay in front of the server at `address`.
    pub fn start(address: &str) -> Self {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        listener.set_nonblocking(true).expect("a socket for tokio");
        let port = listener.local_addr().expect("an address").port();
        let shared = Arc::new(Shared {
            server: address.trim_start_matches("http://").to_owned(),
            delay_micros: AtomicU64::new(0),
            rate: AtomicU64::new(0),
            state: Mutex::default(),
            way: watch::Sender::new(Way::Open),
        });
        let of_thread = shared.clone();
        // In a runtime of its own: callers may block theirs.
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).expect("a listener");
                let mut way = of_thread.way.subscribe();
                tokio::select! {
                    () = accept(listener, &of_thread) => {}
                    _ = way.wait_for(|w| *w == Way::Ended) => {}
                }
            });
        });
        Line {
            port,
            shared,
            thread: Some(thread),
        }
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Sets the delay from the first byte of a response until it is forwarded.
    pub fn delay(&self, delay: Duration) {
        let micros = u64::try_from(delay.as_micros()).expect("a short time");
        self.shared.delay_micros.store(micros, Ordering::Relaxed);
    }

    /// Sets the bytes per second of each stream in either direction, or 0 for no limit.
    pub fn hold_to(&self, rate: u64) {
        self.shared.rate.store(rate, Ordering::Relaxed);
    }

    /// Breaks all connections and accepts no new one.
    pub fn cut(&self) {
        self.shared.way.send_replace(Way::Broken);
    }

    pub fn mend(&self) {
        self.shared.way.send_replace(Way::Open);
    }

    /// Returns the traffic since the last call, without requests that are still under way.
    pub fn take(&self) -> Traffic {
        let mut state = self.shared.state();
        state.generation += 1;
        Traffic {
            requests: std::mem::take(&mut state.requests),
            most_at_once: std::mem::take(&mut state.most_under_way),
        }
    }

    /// Loses the response to the `nth` request from now on, counted from 0: the server carries the request out,
    /// then the connection breaks. Returns the requests before it.
    pub fn lose(&self, nth: Option<usize>) -> Vec<Request> {
        let requests = self.take().requests;
        self.shared.state().lost = nth;
        requests
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.shared.way.send_replace(Way::Ended);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panicked")
    }

    /// Counts a request and returns its place.
    fn begin(&self, request: Request) -> Place {
        let mut state = self.state();
        state.requests.push(request);
        state.under_way += 1;
        state.most_under_way = state.most_under_way.max(state.under_way);
        Place {
            generation: state.generation,
            number: state.requests.len() - 1,
        }
    }

    /// Returns whether the response is forwarded.
    fn answers(&self, place: &Place) -> bool {
        let state = self.state();
        state.generation != place.generation || state.lost != Some(place.number)
    }

    fn end(&self, place: &Place, change: impl FnOnce(&mut Request)) {
        let mut state = self.state();
        state.under_way -= 1;
        if state.generation == place.generation {
            change(&mut state.requests[place.number]);
        }
    }
}

struct Place {
    generation: u64,
    number: usize,
}

async fn accept(listener: TcpListener, shared: &Arc<Shared>) {
    loop {
        let Ok((client, _)) = listener.accept().await else {
            continue;
        };
        if *shared.way.borrow() != Way::Open {
            continue;
        }
        let shared = shared.clone();
        tokio::spawn(async move {
            let mut way = shared.way.subscribe();
            tokio::select! {
                // The client reports a broken connection.
                _ = pass_on(client, &shared) => {}
                _ = way.wait_for(|w| *w != Way::Open) => {}
            }
        });
    }
}

/// Forwards the requests of one connection, one after the other.
async fn pass_on(client: TcpStream, shared: &Shared) -> io::Result<()> {
    let server = TcpStream::connect(&shared.server).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let mut from_client = BufReader::with_capacity(PIECE, from_client);
    let mut from_server = BufReader::with_capacity(PIECE, from_server);
    let mut to_client = BufWriter::new(to_client);
    let mut to_server = BufWriter::new(to_server);
    loop {
        let request = read_head(&mut from_client).await?;
        let mut words = request.first_line().split(' ').map(str::to_owned);
        let (method, target) = (
            words.next().unwrap_or_default(),
            words.next().unwrap_or_default(),
        );
        let body = request.body(false);
        let mut place = Under {
            place: shared.begin(Request {
                method: method.clone(),
                target,
                copies: request.field("x-amz-copy-source").is_some(),
                began: Instant::now(),
                ended: None,
                bytes_up: 0,
                bytes_down: 0,
            }),
            shared,
            up: 0,
            down: 0,
            is_answered: false,
        };
        let sent = async {
            to_server.write_all(&request.bytes).await?;
            let rate = shared.rate.load(Ordering::Relaxed);
            place.up = pass_body(&mut from_client, &mut to_server, body, rate).await?;
            to_server.flush().await
        };
        // A server may respond before it has read the whole body, and close.
        let sent = sent.await;
        let answer = loop {
            let answer = read_head(&mut from_server).await?;
            // A 1xx response is followed by another one.
            if !answer.status().starts_with('1') {
                break answer;
            }
        };
        let delay = Duration::from_micros(shared.delay_micros.load(Ordering::Relaxed));
        if delay > Duration::ZERO {
            tokio::time::sleep(delay).await;
        }
        if !shared.answers(&place.place) {
            return Ok(());
        }
        let body = match (method.as_str(), answer.status()) {
            ("HEAD", _) | (_, "204" | "304") => Framing::Length(0),
            _ => answer.body(true),
        };
        let ends = body == Framing::ToEnd || answer.closes() || request.closes();
        to_client.write_all(&answer.bytes).await?;
        let rate = shared.rate.load(Ordering::Relaxed);
        place.down = pass_body(&mut from_server, &mut to_client, body, rate).await?;
        to_client.flush().await?;
        place.is_answered = true;
        drop(place);
        if ends || sent.is_err() {
            return Ok(());
        }
    }
}

/// A request that is under way until this is dropped.
struct Under<'a> {
    shared: &'a Shared,
    place: Place,
    up: u64,
    down: u64,
    is_answered: bool,
}

impl Drop for Under<'_> {
    fn drop(&mut self) {
        let (up, down) = (self.up, self.down);
        let ended = self.is_answered.then(Instant::now);
        self.shared.end(&self.place, |request| {
            (request.bytes_up, request.bytes_down) = (up, down);
            request.ended = ended;
        });
    }
}

/// The head of a request or response, including the empty line.
struct Head {
    bytes: Vec<u8>,
    text: String,
}

/// How the end of a body is recognised.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Framing {
    Length(u64),
    Chunked,
    /// The body ends with the connection.
    ToEnd,
}

impl Head {
    fn first_line(&self) -> &str {
        self.text.lines().next().unwrap_or_default()
    }

    fn status(&self) -> &str {
        self.first_line().split(' ').nth(1).unwrap_or_default()
    }

    fn field(&self, name: &str) -> Option<&str> {
        self.text.lines().skip(1).find_map(|line| {
            let (n, value) = line.split_once(':')?;
            n.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    fn closes(&self) -> bool {
        let asks = |value: &str| value.eq_ignore_ascii_case("close");
        self.field("connection").is_some_and(asks)
    }

    fn body(&self, is_answer: bool) -> Framing {
        let is_chunked = |value: &str| value.to_ascii_lowercase().contains("chunked");
        if self.field("transfer-encoding").is_some_and(is_chunked) {
            return Framing::Chunked;
        }
        match self.field("content-length").and_then(|v| v.parse().ok()) {
            Some(length) => Framing::Length(length),
            None if is_answer => Framing::ToEnd,
            None => Framing::Length(0),
        }
    }
}

async fn read_head(from: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Head> {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        if bytes.len() > LONGEST_HEAD || from.read_until(b'\n', &mut bytes).await? == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
    }
    let text = String::from_utf8_lossy(&bytes).into_owned();
    Ok(Head { bytes, text })
}

/// Forwards a body and counts its bytes, at `rate` bytes per second unless that is 0.
async fn pass_body(
    from: &mut (impl AsyncBufRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    body: Framing,
    rate: u64,
) -> io::Result<u64> {
    let mut stream = Stream {
        began: tokio::time::Instant::now(),
        bytes: 0,
        rate,
    };
    match body {
        Framing::Length(length) => stream.pass(from, to, length).await?,
        Framing::ToEnd => while stream.piece(from, to, u64::MAX).await? > 0 {},
        Framing::Chunked => loop {
            let line = pass_line(from, to).await?;
            let size = line.split(';').next().unwrap_or_default().trim();
            let size = u64::from_str_radix(size, 16).map_err(|_| ErrorKind::InvalidData)?;
            if size == 0 {
                // Trailers, if any, and an empty line.
                while !pass_line(from, to).await?.trim().is_empty() {}
                break;
            }
            stream.pass(from, to, size + 2).await?;
        },
    }
    Ok(stream.bytes)
}

async fn pass_line(
    from: &mut (impl AsyncBufRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
) -> io::Result<String> {
    let mut line = Vec::new();
    if from.read_until(b'\n', &mut line).await? == 0 {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    to.write_all(&line).await?;
    Ok(String::from_utf8_lossy(&line).into_owned())
}

/// A body being forwarded.
struct Stream {
    began: tokio::time::Instant,
    bytes: u64,
    rate: u64,
}

impl Stream {
    async fn pass(
        &mut self,
        from: &mut (impl AsyncBufRead + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
        mut length: u64,
    ) -> io::Result<()> {
        while length > 0 {
            match self.piece(from, to, length).await? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                n => length -= n,
            }
        }
        Ok(())
    }

    /// Reads what is available, at most `most` bytes; returns 0 at the end.
    async fn piece(
        &mut self,
        from: &mut (impl AsyncBufRead + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
        most: u64,
    ) -> io::Result<u64> {
        let there = from.fill_buf().await?;
        let n = usize::try_from(most).map_or(there.len(), |m| m.min(there.len()));
        to.write_all(&there[..n]).await?;
        from.consume(n);
        self.bytes += n as u64;
        if self.rate > 0 {
            to.flush().await?;
            let due = Duration::from_secs_f64(self.bytes as f64 / self.rate as f64);
            tokio::time::sleep_until(self.began + due).await;
        }
        Ok(n as u64)
    }
}
