//! Limits the requests under way to one store, and repeats slow reads.
//!
//! - At most a number of requests at once ([`ConcurrencyLimit`]). If the store answers "too many requests",
//!   all pause together, and fewer are sent at once.
//! - A read that is much slower than others is sent a second time ([`Latency`]): a hedged request.
//! - Responses that are not objects are read into memory, up to a limit.
//!
//! All requests of a store go through here, those of the object_store crate and our own. Both deciding types
//! take the time as an argument.

use super::tag_counts::{self, TagKnowledge};
use super::{connect, listing};
use crate::base::lock;
use async_trait::async_trait;
use bytes::Bytes;
use futures::{Stream, TryStreamExt};
use http::header::RETRY_AFTER;
use http::{Method, StatusCode};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService,
};
use reqwest::Certificate;
use std::collections::VecDeque;
use std::pin::pin;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// The most requests under way at once, unless the user gives another number.
pub const DEFAULT_REQUESTS: usize = 32;
/// The largest number that the user may give.
pub const MOST_REQUESTS: usize = 1024;

/// The longest response that is read into memory, in bytes. A page of a listing has a few MiB; a hostile
/// server may send any number of bytes.
pub(super) const LONGEST_RESPONSE: usize = 32 << 20;

/// The pause after the first refusal. Each further refusal in a row doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause, whatever the store asks for: its responses are not trusted.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// The limits of one store, which all its clients share.
#[derive(Debug)]
pub struct Requests {
    limit: Mutex<ConcurrencyLimit>,
    latency: Mutex<Latency>,
    changed: Notify,
    /// The number of empty pages of listings in a row.
    empty_pages: AtomicUsize,
    /// What the responses to reads show of tags.
    pub(super) tagged: Arc<TagKnowledge>,
}

impl Requests {
    /// Returns limits with at most `most` requests under way at once, at least 1.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Requests {
            limit: Mutex::new(ConcurrencyLimit::new(most.max(1))),
            latency: Mutex::default(),
            changed: Notify::new(),
            empty_pages: AtomicUsize::new(0),
            tagged: Arc::default(),
        })
    }

    /// Returns the most requests under way at once.
    pub fn most(&self) -> usize {
        self.limit().most
    }

    fn limit(&self) -> MutexGuard<'_, ConcurrencyLimit> {
        lock(&self.limit)
    }

    fn latency(&self) -> MutexGuard<'_, Latency> {
        lock(&self.latency)
    }

    /// Waits until one more request may begin.
    async fn begin(self: &Arc<Self>) -> RequestSlot {
        loop {
            let changed = self.changed.notified();
            let admission = self.limit().begin(Instant::now());
            match admission {
                Admission::Now => {
                    return RequestSlot {
                        requests: Arc::clone(self),
                        begun: Instant::now(),
                        end: RequestEnd::Unanswered,
                    };
                }
                Admission::WhenOneEnds => changed.await,
                Admission::At(time) => tokio::time::sleep_until(time).await,
            }
        }
    }
}

/// The slot of a request under way, from its beginning to the headers of the response. The body does not
/// count: a body that waits for its reader must not hold up a request that the reader waits for.
struct RequestSlot {
    requests: Arc<Requests>,
    begun: Instant,
    end: RequestEnd,
}

impl Drop for RequestSlot {
    fn drop(&mut self) {
        let now = Instant::now();
        let mut limit = self.requests.limit();
        if let Some(pause) = limit.end(self.begun, now, self.end) {
            tracing::debug!(
                requests = limit.limit,
                pause_ms = pause.as_millis() as u64,
                "the store asks for fewer requests"
            );
        }
        drop(limit);
        self.requests.changed.notify_waiters();
    }
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestEnd {
    /// With a response that does not complain about too many requests.
    Answered,
    /// Refused because of too many requests, with the pause that the store asks for.
    Throttled(Option<Duration>),
    /// Without a response, or cancelled.
    Unanswered,
}

impl RequestEnd {
    fn of(response: &HttpResponse) -> Self {
        match response.status() {
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => {
                let after = response.headers().get(RETRY_AFTER);
                // Ignore a date: the clocks may differ.
                let seconds = after.and_then(|v| v.to_str().ok()?.parse().ok());
                RequestEnd::Throttled(seconds.map(Duration::from_secs))
            }
            _ => RequestEnd::Answered,
        }
    }
}

/// When a request may begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Admission {
    Now,
    At(Instant),
    WhenOneEnds,
}

/// The number of requests that may be under way: halved when the store refuses some because there are too
/// many, and raised again by responses.
#[derive(Debug)]
struct ConcurrencyLimit {
    most: usize,
    limit: usize,
    under_way: usize,
    /// Responses since the limit was changed.
    answered: usize,
    /// Refusals in a row that lowered the limit.
    refused: u32,
    /// No request begins before this moment, since the limit was lowered. A refusal of a request that began
    /// earlier does not lower the limit again.
    not_before: Option<Instant>,
}

impl ConcurrencyLimit {
    fn new(most: usize) -> Self {
        ConcurrencyLimit {
            most,
            limit: most,
            under_way: 0,
            answered: 0,
            refused: 0,
            not_before: None,
        }
    }

    fn begin(&mut self, now: Instant) -> Admission {
        match self.not_before {
            Some(time) if now < time => Admission::At(time),
            _ if self.under_way >= self.limit => Admission::WhenOneEnds,
            _ => {
                self.under_way += 1;
                Admission::Now
            }
        }
    }

    /// Counts the end of a request. Returns the pause that a refusal starts.
    fn end(&mut self, begun: Instant, now: Instant, end: RequestEnd) -> Option<Duration> {
        self.under_way = self.under_way.saturating_sub(1);
        match end {
            RequestEnd::Unanswered => None,
            RequestEnd::Answered => {
                self.answered += 1;
                if self.answered >= self.limit {
                    self.answered = 0;
                    self.refused = 0;
                    self.limit = self.most.min(self.limit + self.limit.div_ceil(4));
                }
                None
            }
            RequestEnd::Throttled(_) if self.not_before.is_some_and(|t| begun < t) => None,
            RequestEnd::Throttled(requested) => {
                let own = FIRST_PAUSE * 2u32.saturating_pow(self.refused.min(16));
                let pause = requested.map_or(own, |r| r.max(own)).min(LONGEST_PAUSE);
                self.limit = (self.limit / 2).max(1);
                self.answered = 0;
                self.refused += 1;
                self.not_before = Some(now + pause);
                Some(pause)
            }
        }
    }

    /// Returns whether the store has refused requests a short while ago.
    fn is_lowered(&self) -> bool {
        self.limit < self.most
    }
}

/// How long responses take, to find requests that are slow compared with others.
#[derive(Debug, Default)]
struct Latency {
    recent: VecDeque<Duration>,
    /// Requests that were counted, less those that hedged requests have used up.
    budget: u32,
}

impl Latency {
    /// The number of responses that are remembered.
    const REMEMBERED: usize = 64;
    /// The number of responses without which no request is called slow.
    const ENOUGH: usize = 32;
    /// At most one of this many requests is hedged.
    const REQUESTS_PER_HEDGE: u32 = 20;
    /// A request is slow after this many times the time within which nine of ten responses came.
    const SLOW: u32 = 4;
    /// No request is slow before this time: a busy machine is late, too.
    const SLOW_AT_LEAST: Duration = Duration::from_millis(250);

    fn add(&mut self, took: Duration) {
        self.recent.push_back(took);
        if self.recent.len() > Self::REMEMBERED {
            self.recent.pop_front();
        }
        self.budget = (self.budget + 1).min(10 * Self::REQUESTS_PER_HEDGE);
    }

    /// Returns the time after which a request is slow, if enough is known.
    fn slow(&self) -> Option<Duration> {
        if self.recent.len() < Self::ENOUGH {
            return None;
        }
        let mut sorted: Vec<Duration> = self.recent.iter().copied().collect();
        let index = sorted.len() * 9 / 10;
        let (_, ninth, _) = sorted.select_nth_unstable(index);
        Some((*ninth * Self::SLOW).max(Self::SLOW_AT_LEAST))
    }

    /// Returns whether a request may be hedged, and takes it from the budget.
    fn take_hedge(&mut self) -> bool {
        let may = self.budget >= Self::REQUESTS_PER_HEDGE;
        if may {
            self.budget -= Self::REQUESTS_PER_HEDGE;
        }
        may
    }
}

/// Makes the connections of a store. Their requests share the store's limits.
#[derive(Debug, Clone)]
pub(super) struct Connector {
    pub(super) requests: Arc<Requests>,
    /// Trusted beside the system's.
    pub(super) certificates: Vec<Certificate>,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(LimitedClient {
            inner: connect::connect(options, &self.certificates)?,
            requests: Arc::clone(&self.requests),
        }))
    }
}

#[derive(Debug)]
struct LimitedClient {
    inner: HttpClient,
    requests: Arc<Requests>,
}

impl LimitedClient {
    async fn send(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let mut slot = self.requests.begin().await;
        let is_read = request.method() == Method::GET && !is_query(&request);
        let response = self.inner.execute(request).await?;
        slot.end = RequestEnd::of(&response);
        let is_refusal = response.status().is_client_error() || response.status().is_server_error();
        drop(slot);
        // Only the content of an object may have any length.
        match is_read && !is_refusal {
            true => Ok(response),
            false => read_whole(response).await,
        }
    }

    /// Sends a read, and hedges it if it is slow. Only reads are hedged: they change nothing.
    async fn read(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let begun = Instant::now();
        let slow = self.requests.latency().slow();
        let copy = request.clone();
        let first = self.send(request);
        tokio::pin!(first);
        let in_time = match slow {
            Some(slow) => tokio::time::timeout(slow, &mut first).await.ok(),
            None => Some((&mut first).await),
        };
        let response = match in_time {
            Some(response) => response,
            None if self.may_hedge() => {
                tracing::debug!("sending a slow request a second time");
                let second = self.send(copy);
                tokio::pin!(second);
                tokio::select! {
                    response = &mut first => match response {
                        Ok(response) => Ok(response),
                        Err(_) => second.await,
                    },
                    response = &mut second => match response {
                        Ok(response) => Ok(response),
                        Err(_) => first.await,
                    },
                }
            }
            None => first.await,
        };
        self.requests.latency().add(begun.elapsed());
        response
    }

    fn may_hedge(&self) -> bool {
        !self.requests.limit().is_lowered() && self.requests.latency().take_hedge()
    }
}

/// Returns whether a GET request is for something else than an object: a login, a listing, or facts about an
/// object or bucket.
fn is_query(request: &HttpRequest) -> bool {
    const PARAMETERS: [&str; 14] = [
        "comp",
        "delimiter",
        "format",
        "legal-hold",
        "list-type",
        "marker",
        "object-lock",
        "prefix",
        "restype",
        "retention",
        "tagging",
        "uploads",
        "versioning",
        "versions",
    ];
    /// Headers of logins to Swift and to the metadata services of clouds.
    const LOGIN_HEADERS: [&str; 4] = [
        "metadata",
        "metadata-flavor",
        "x-auth-key",
        "x-aws-ec2-metadata-token",
    ];
    let query = request.uri().query().unwrap_or_default();
    let has_parameter = query.split('&').any(|part| {
        let name = part.split_once('=').map_or(part, |(name, _)| name);
        PARAMETERS.contains(&name)
    });
    let headers = request.headers();
    has_parameter || LOGIN_HEADERS.iter().any(|h| headers.contains_key(*h))
}

/// Reads a response into memory.
///
/// # Errors
/// Fails if the response is too long.
async fn read_whole(response: HttpResponse) -> Result<HttpResponse, HttpError> {
    let (parts, body) = response.into_parts();
    let Some(whole) = collect(body.bytes_stream(), LONGEST_RESPONSE).await? else {
        let e = format!("the response has more than {LONGEST_RESPONSE} bytes");
        return Err(HttpError::new(
            HttpErrorKind::Decode,
            std::io::Error::other(e),
        ));
    };
    Ok(HttpResponse::from_parts(
        parts,
        HttpResponseBody::from(whole),
    ))
}

/// Collects a stream. Returns `None` if it has more than `most` bytes.
pub(super) async fn collect<E>(
    stream: impl Stream<Item = Result<Bytes, E>>,
    most: usize,
) -> Result<Option<Vec<u8>>, E> {
    let mut stream = pin!(stream);
    let mut whole = Vec::new();
    while let Some(piece) = stream.try_next().await? {
        if whole.len() + piece.len() > most {
            return Ok(None);
        }
        whole.extend_from_slice(&piece);
    }
    Ok(Some(whole))
}

#[async_trait]
impl HttpService for LimitedClient {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let asks_for_page = listing::asks_for_page(request.method(), request.uri());
        let token = asks_for_page
            .then(|| listing::token_of(request.uri()))
            .flatten();
        let object = tag_counts::reads_object(request.method(), request.uri());
        let object = object.then(|| request.uri().clone());
        let is_read = *request.method() == Method::GET && request.body().content_length() == 0;
        let response = match is_read {
            true => self.read(request).await?,
            false => self.send(request).await?,
        };
        if let Some(uri) = object {
            self.requests.tagged.learn_from(&uri, &response);
        }
        match asks_for_page && response.status().is_success() {
            true => {
                let empty = &self.requests.empty_pages;
                listing::with_stand_ins(response, token.as_deref(), empty).await
            }
            false => Ok(response),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::client::HttpRequestBody;
    use std::sync::atomic::Ordering;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn no_more_requests_than_the_limit_are_under_way() {
        let (now, mut limit) = (Instant::now(), ConcurrencyLimit::new(3));
        for _ in 0..3 {
            assert_eq!(limit.begin(now), Admission::Now);
        }
        assert_eq!(limit.begin(now), Admission::WhenOneEnds);
        limit.end(now, now, RequestEnd::Unanswered);
        assert_eq!(limit.begin(now), Admission::Now);
        assert_eq!(limit.begin(now), Admission::WhenOneEnds);
    }

    #[test]
    fn refusals_lower_the_limit_and_responses_raise_it_again() {
        let start = Instant::now();
        let mut limit = ConcurrencyLimit::new(32);
        for _ in 0..32 {
            assert_eq!(limit.begin(start), Admission::Now);
        }
        // A burst of refusals counts once.
        let now = start + 10 * MS;
        assert_eq!(
            limit.end(start, now, RequestEnd::Throttled(None)),
            Some(FIRST_PAUSE)
        );
        for _ in 1..32 {
            assert_eq!(limit.end(start, now, RequestEnd::Throttled(None)), None);
        }
        assert_eq!(limit.limit, 16);
        assert!(limit.is_lowered());
        assert_eq!(limit.begin(now), Admission::At(now + FIRST_PAUSE));
        // A further refusal lowers the limit again, with a longer pause.
        let now = now + FIRST_PAUSE;
        assert_eq!(limit.begin(now), Admission::Now);
        assert_eq!(
            limit.end(now, now, RequestEnd::Throttled(None)),
            Some(2 * FIRST_PAUSE)
        );
        assert_eq!(limit.limit, 8);
        let now = now + 2 * FIRST_PAUSE;
        let mut answers = 0;
        while limit.is_lowered() {
            assert_eq!(limit.begin(now), Admission::Now);
            limit.end(now, now, RequestEnd::Answered);
            answers += 1;
        }
        assert!((8..200).contains(&answers), "{answers}");
        assert_eq!(limit.limit, 32);
    }

    #[test]
    fn the_store_cannot_ask_for_an_endless_pause() {
        let now = Instant::now();
        let mut limit = ConcurrencyLimit::new(2);
        for _ in 0..100 {
            let at = limit.not_before.unwrap_or(now);
            assert_eq!(limit.begin(at), Admission::Now);
            let asked = Some(Duration::from_secs(u64::MAX));
            assert_eq!(
                limit.end(at, at, RequestEnd::Throttled(asked)),
                Some(LONGEST_PAUSE)
            );
            assert_eq!(limit.limit, 1);
        }
    }

    #[test]
    fn a_request_is_slow_compared_with_others() {
        let mut latency = Latency::default();
        for _ in 1..Latency::ENOUGH {
            latency.add(100 * MS);
        }
        assert_eq!(latency.slow(), None);
        latency.add(3000 * MS);
        assert_eq!(latency.slow(), Some(400 * MS));
        for _ in 0..Latency::REMEMBERED {
            latency.add(MS);
        }
        assert_eq!(latency.slow(), Some(Latency::SLOW_AT_LEAST));
        let hedges = (0..).take_while(|_| latency.take_hedge()).count();
        assert_eq!(hedges, (Latency::ENOUGH + Latency::REMEMBERED) / 20);
    }

    /// Answers each request except one, which hangs.
    #[derive(Debug)]
    struct Hanging {
        asked: Arc<AtomicUsize>,
        hangs: usize,
    }

    #[async_trait]
    impl HttpService for Hanging {
        async fn call(&self, _: HttpRequest) -> Result<HttpResponse, HttpError> {
            if self.asked.fetch_add(1, Ordering::Relaxed) == self.hangs {
                std::future::pending::<()>().await;
            }
            Ok(http::Response::new(HttpResponseBody::from(Vec::new())))
        }
    }

    fn client(hangs: usize) -> (LimitedClient, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let hanging = Hanging {
            asked: Arc::clone(&asked),
            hangs,
        };
        let client = LimitedClient {
            inner: HttpClient::new(hanging),
            requests: Requests::new(4),
        };
        (client, asked)
    }

    fn request(method: Method) -> HttpRequest {
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.method_mut() = method;
        request
    }

    /// Answers with a status and a number of bytes.
    #[derive(Debug)]
    struct Long(StatusCode, usize);

    #[async_trait]
    impl HttpService for Long {
        async fn call(&self, _: HttpRequest) -> Result<HttpResponse, HttpError> {
            let mut response = http::Response::new(HttpResponseBody::from(vec![b' '; self.1]));
            *response.status_mut() = self.0;
            Ok(response)
        }
    }

    #[tokio::test]
    async fn a_response_that_is_no_object_has_a_limit() {
        let objects = [
            "/b/v2/Full?versionId=3",
            "/b/v2/Full",
            "/b/x?sv=2026&sig=prefix",
        ];
        let queries = ["/b?list-type=2&prefix=v2", "/b/x?tagging", "/b?comp=list"];
        let (ok, bad) = (StatusCode::OK, StatusCode::SERVICE_UNAVAILABLE);
        let all = objects.map(|uri| (uri, true)).into_iter();
        for (uri, is_object) in all.chain(queries.map(|uri| (uri, false))) {
            for (method, status, more, fits) in [
                (Method::GET, ok, 0, true),
                (Method::GET, ok, 1, is_object),
                (Method::GET, bad, 0, true),
                (Method::GET, bad, 1, false),
                (Method::POST, ok, 0, true),
                (Method::POST, ok, 1, false),
                (Method::PUT, ok, 1, false),
                (Method::DELETE, ok, 1, false),
                (Method::HEAD, ok, 1, false),
            ] {
                let client = LimitedClient {
                    inner: HttpClient::new(Long(status, LONGEST_RESPONSE + more)),
                    requests: Requests::new(4),
                };
                let mut request = request(method.clone());
                *request.uri_mut() = uri.parse().unwrap();
                let response = client.call(request).await;
                assert_eq!(response.is_ok(), fits, "{method} {uri} {status} {more}");
                if let Ok(response) = response {
                    let body = response.into_body().bytes().await.unwrap();
                    assert_eq!(body.len(), LONGEST_RESPONSE + more);
                }
            }
        }
    }

    #[tokio::test]
    async fn the_response_to_a_login_has_a_limit() {
        for header in ["x-auth-key", "metadata", "x-aws-ec2-metadata-token"] {
            let client = LimitedClient {
                inner: HttpClient::new(Long(StatusCode::OK, LONGEST_RESPONSE + 1)),
                requests: Requests::new(4),
            };
            let mut login = request(Method::GET);
            let value = http::HeaderValue::from_static("x");
            login.headers_mut().insert(header, value);
            client.call(login).await.unwrap_err();
        }
    }

    #[tokio::test]
    async fn a_read_that_hangs_is_sent_again() {
        let (client, asked) = client(50);
        for _ in 0..51 {
            client.call(request(Method::GET)).await.unwrap();
        }
        assert_eq!(asked.load(Ordering::Relaxed), 52);
        assert_eq!(client.requests.limit().under_way, 0);
    }

    #[tokio::test]
    async fn a_write_is_never_sent_twice() {
        let (client, asked) = client(50);
        for _ in 0..50 {
            client.call(request(Method::GET)).await.unwrap();
        }
        let put = client.call(request(Method::PUT));
        let waited = tokio::time::timeout(4 * Latency::SLOW_AT_LEAST, put).await;
        assert!(waited.is_err());
        assert_eq!(asked.load(Ordering::Relaxed), 51);
        // A request that was cancelled is no longer under way.
        assert_eq!(client.requests.limit().under_way, 0);
    }
}
