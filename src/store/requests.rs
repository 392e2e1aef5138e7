//! The requests under way to one store: how many at once, a common pause if the store asks for less, and a
//! second try beside a slow one.
//!
//! All requests of a store go through here, those of the object_store crate and ours. What is decided is in
//! [`Pace`] and [`Latency`], of which time is an argument.

use super::tag_counts::{self, Tagged};
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

/// Requests under way at once, unless the user says otherwise.
pub const DEFAULT_REQUESTS: usize = 32;
/// The most that can be asked for.
pub const MOST_REQUESTS: usize = 1024;

/// The longest answer that is read into memory: a page of a listing has a few megabytes. A server may send any number of
/// bytes, or say that it will.
pub(super) const LONGEST_ANSWER: usize = 32 << 20;

/// The pause after a first refusal; each further one in a row doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// No pause is longer, whatever the store asks for: its answers are not trusted.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// The means of one store, shared by all that ask it.
#[derive(Debug)]
pub struct Requests {
    pace: Mutex<Pace>,
    latency: Mutex<Latency>,
    changed: Notify,
    /// Empty pages of listings in a row.
    empty_pages: AtomicUsize,
    /// What the answers to reads tell of tags.
    pub(super) tagged: Arc<Tagged>,
}

impl Requests {
    /// At most `most` requests are under way at once, 1 or more.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Requests {
            pace: Mutex::new(Pace::new(most.max(1))),
            latency: Mutex::default(),
            changed: Notify::new(),
            empty_pages: AtomicUsize::new(0),
            tagged: Arc::default(),
        })
    }

    /// The most requests under way at once.
    pub fn most(&self) -> usize {
        self.pace().most
    }

    fn pace(&self) -> MutexGuard<'_, Pace> {
        lock(&self.pace)
    }

    fn latency(&self) -> MutexGuard<'_, Latency> {
        lock(&self.latency)
    }

    /// Waits until one more request may be under way.
    async fn begin(self: &Arc<Self>) -> UnderWay {
        loop {
            let changed = self.changed.notified();
            let begun = self.pace().begin(Instant::now());
            match begun {
                Begin::Now => {
                    return UnderWay {
                        requests: Arc::clone(self),
                        begun: Instant::now(),
                        ended: Ended::Otherwise,
                    };
                }
                Begin::Later => changed.await,
                Begin::At(time) => tokio::time::sleep_until(time).await,
            }
        }
    }
}

/// A request under way, from its beginning to the head of its answer. The body is not counted: one that waits
/// for its reader must not hold up the request that the reader waits for.
struct UnderWay {
    requests: Arc<Requests>,
    begun: Instant,
    ended: Ended,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let now = Instant::now();
        let mut pace = self.requests.pace();
        if let Some(pause) = pace.end(self.begun, now, self.ended) {
            tracing::debug!(
                requests = pace.limit,
                pause_ms = pause.as_millis() as u64,
                "the store asks for fewer requests"
            );
        }
        drop(pace);
        self.requests.changed.notify_waiters();
    }
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// With an answer that is no complaint about the rate.
    Answered,
    /// Refused for the rate; the time that the store asks to wait.
    Throttled(Option<Duration>),
    /// Without an answer, or given up.
    Otherwise,
}

impl Ended {
    fn of(answer: &HttpResponse) -> Self {
        match answer.status() {
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => {
                let after = answer.headers().get(RETRY_AFTER);
                // A date is as good as nothing: whose clock is right?
                let seconds = after.and_then(|v| v.to_str().ok()?.parse().ok());
                Ended::Throttled(seconds.map(Duration::from_secs))
            }
            _ => Ended::Answered,
        }
    }
}

/// Whether a request may begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Begin {
    Now,
    At(Instant),
    /// If another one has ended.
    Later,
}

/// How many requests may be under way: halved if the store refuses some for their rate, and grown again by
/// answers.
#[derive(Debug)]
struct Pace {
    most: usize,
    limit: usize,
    under_way: usize,
    /// Answers since the limit was changed.
    answered: usize,
    /// Refusals in a row that changed the limit.
    refused: u32,
    /// No request begins before, since the limit was lowered. A refusal of one that was begun earlier says nothing new.
    not_before: Option<Instant>,
}

impl Pace {
    fn new(most: usize) -> Self {
        Pace {
            most,
            limit: most,
            under_way: 0,
            answered: 0,
            refused: 0,
            not_before: None,
        }
    }

    fn begin(&mut self, now: Instant) -> Begin {
        match self.not_before {
            Some(time) if now < time => Begin::At(time),
            _ if self.under_way >= self.limit => Begin::Later,
            _ => {
                self.under_way += 1;
                Begin::Now
            }
        }
    }

    /// Gives the pause that this refusal brings, if it brings one.
    fn end(&mut self, begun: Instant, now: Instant, ended: Ended) -> Option<Duration> {
        self.under_way = self.under_way.saturating_sub(1);
        match ended {
            Ended::Otherwise => None,
            Ended::Answered => {
                self.answered += 1;
                if self.answered >= self.limit {
                    self.answered = 0;
                    self.refused = 0;
                    self.limit = self.most.min(self.limit + self.limit.div_ceil(4));
                }
                None
            }
            Ended::Throttled(_) if self.not_before.is_some_and(|t| begun < t) => None,
            Ended::Throttled(asked) => {
                let own = FIRST_PAUSE * 2u32.saturating_pow(self.refused.min(16));
                let pause = asked.map_or(own, |a| a.max(own)).min(LONGEST_PAUSE);
                self.limit = (self.limit / 2).max(1);
                self.answered = 0;
                self.refused += 1;
                self.not_before = Some(now + pause);
                Some(pause)
            }
        }
    }

    /// Whether the store has refused requests a short while ago.
    fn is_lowered(&self) -> bool {
        self.limit < self.most
    }
}

/// How long answers take, to tell a slow one from those around it.
#[derive(Debug, Default)]
struct Latency {
    recent: VecDeque<Duration>,
    /// Requests that were counted, less those that pay for second tries.
    saved: u32,
}

impl Latency {
    /// Answers that are remembered.
    const REMEMBERED: usize = 64;
    /// With fewer nothing is called slow.
    const ENOUGH: usize = 32;
    /// A second try for no more than one in so many requests.
    const REQUESTS_A_TRY: u32 = 20;
    /// As many times as long as nine of ten answers took is slow.
    const SLOW: u32 = 4;
    /// And no less than this: a busy machine is late, too.
    const SLOW_AT_LEAST: Duration = Duration::from_millis(250);

    fn add(&mut self, took: Duration) {
        self.recent.push_back(took);
        if self.recent.len() > Self::REMEMBERED {
            self.recent.pop_front();
        }
        self.saved = (self.saved + 1).min(10 * Self::REQUESTS_A_TRY);
    }

    /// After how long a request is slow.
    fn slow(&self) -> Option<Duration> {
        if self.recent.len() < Self::ENOUGH {
            return None;
        }
        let mut sorted: Vec<Duration> = self.recent.iter().copied().collect();
        let nth = sorted.len() * 9 / 10;
        let (_, at, _) = sorted.select_nth_unstable(nth);
        Some((*at * Self::SLOW).max(Self::SLOW_AT_LEAST))
    }

    /// Whether a second try may be made; it is counted.
    fn may_try(&mut self) -> bool {
        let may = self.saved >= Self::REQUESTS_A_TRY;
        if may {
            self.saved -= Self::REQUESTS_A_TRY;
        }
        may
    }
}

/// Connects a store; all requests are counted by `Requests`.
#[derive(Debug, Clone)]
pub(super) struct Connector {
    pub(super) requests: Arc<Requests>,
    /// Servers are trusted by these, beside the system's.
    pub(super) certificates: Vec<Certificate>,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Client {
            inner: connect::connect(options, &self.certificates)?,
            requests: Arc::clone(&self.requests),
        }))
    }
}

#[derive(Debug)]
struct Client {
    inner: HttpClient,
    requests: Arc<Requests>,
}

impl Client {
    async fn send(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let mut under_way = self.requests.begin().await;
        let is_read = request.method() == Method::GET && !is_question(&request);
        let answer = self.inner.execute(request).await?;
        under_way.ended = Ended::of(&answer);
        let is_refusal = answer.status().is_client_error() || answer.status().is_server_error();
        drop(under_way);
        // Only the content of an object may have any length.
        match is_read && !is_refusal {
            true => Ok(answer),
            false => bounded(answer).await,
        }
    }

    /// Only reads are asked for twice: they change nothing.
    async fn read(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let begun = Instant::now();
        let slow = self.requests.latency().slow();
        let again = request.clone();
        let first = self.send(request);
        tokio::pin!(first);
        let in_time = match slow {
            Some(slow) => tokio::time::timeout(slow, &mut first).await.ok(),
            None => Some((&mut first).await),
        };
        let answer = match in_time {
            Some(answer) => answer,
            None if self.may_ask_again() => {
                tracing::debug!("a slow request is asked again");
                let second = self.send(again);
                tokio::pin!(second);
                tokio::select! {
                    answer = &mut first => match answer {
                        Ok(answer) => Ok(answer),
                        Err(_) => second.await,
                    },
                    answer = &mut second => match answer {
                        Ok(answer) => Ok(answer),
                        Err(_) => first.await,
                    },
                }
            }
            None => first.await,
        };
        self.requests.latency().add(begun.elapsed());
        answer
    }

    fn may_ask_again(&self) -> bool {
        !self.requests.pace().is_lowered() && self.requests.latency().may_try()
    }
}

/// Whether a request logs in, asks for a listing, or for something about an object or a bucket, and not for an object.
fn is_question(request: &HttpRequest) -> bool {
    const ASKS: [&str; 14] = [
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
    /// Headers of logins to Swift, and of the metadata services of clouds.
    const LOGS_IN: [&str; 4] = [
        "metadata",
        "metadata-flavor",
        "x-auth-key",
        "x-aws-ec2-metadata-token",
    ];
    let query = request.uri().query().unwrap_or_default();
    let asks = query.split('&').any(|part| {
        let name = part.split_once('=').map_or(part, |(name, _)| name);
        ASKS.contains(&name)
    });
    asks || LOGS_IN.iter().any(|h| request.headers().contains_key(*h))
}

/// An answer that was read whole.
async fn bounded(answer: HttpResponse) -> Result<HttpResponse, HttpError> {
    let (parts, body) = answer.into_parts();
    let Some(whole) = collect(body.bytes_stream(), LONGEST_ANSWER).await? else {
        let e = format!("an answer of more than {LONGEST_ANSWER} bytes");
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

/// All of a stream; `None` if that is more than `most` bytes.
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
impl HttpService for Client {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let asks_for_page = listing::asks_for_page(request.method(), request.uri());
        let token = asks_for_page
            .then(|| listing::token_of(request.uri()))
            .flatten();
        let object = tag_counts::reads_object(request.method(), request.uri());
        let object = object.then(|| request.uri().clone());
        let answer = match *request.method() == Method::GET && request.body().content_length() == 0
        {
            true => self.read(request).await?,
            false => self.send(request).await?,
        };
        if let Some(uri) = object {
            self.requests.tagged.take_in(&uri, &answer);
        }
        match asks_for_page && answer.status().is_success() {
            true => {
                let empty = &self.requests.empty_pages;
                listing::with_stand_ins(answer, token.as_deref(), empty).await
            }
            false => Ok(answer),
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
    fn no_more_than_the_limit_are_under_way() {
        let (now, mut pace) = (Instant::now(), Pace::new(3));
        for _ in 0..3 {
            assert_eq!(pace.begin(now), Begin::Now);
        }
        assert_eq!(pace.begin(now), Begin::Later);
        pace.end(now, now, Ended::Otherwise);
        assert_eq!(pace.begin(now), Begin::Now);
        assert_eq!(pace.begin(now), Begin::Later);
    }

    #[test]
    fn refusals_slow_all_and_answers_speed_up_again() {
        let start = Instant::now();
        let mut pace = Pace::new(32);
        for _ in 0..32 {
            assert_eq!(pace.begin(start), Begin::Now);
        }
        // A burst of refusals counts once.
        let now = start + 10 * MS;
        assert_eq!(
            pace.end(start, now, Ended::Throttled(None)),
            Some(FIRST_PAUSE)
        );
        for _ in 1..32 {
            assert_eq!(pace.end(start, now, Ended::Throttled(None)), None);
        }
        assert_eq!(pace.limit, 16);
        assert!(pace.is_lowered());
        assert_eq!(pace.begin(now), Begin::At(now + FIRST_PAUSE));
        // The next one lowers it further, with a longer pause.
        let now = now + FIRST_PAUSE;
        assert_eq!(pace.begin(now), Begin::Now);
        assert_eq!(
            pace.end(now, now, Ended::Throttled(None)),
            Some(2 * FIRST_PAUSE)
        );
        assert_eq!(pace.limit, 8);
        let now = now + 2 * FIRST_PAUSE;
        let mut answers = 0;
        while pace.is_lowered() {
            assert_eq!(pace.begin(now), Begin::Now);
            pace.end(now, now, Ended::Answered);
            answers += 1;
        }
        assert!((8..200).contains(&answers), "{answers}");
        assert_eq!(pace.limit, 32);
    }

    #[test]
    fn no_store_makes_us_wait_for_ever() {
        let now = Instant::now();
        let mut pace = Pace::new(2);
        for _ in 0..100 {
            let at = pace.not_before.unwrap_or(now);
            assert_eq!(pace.begin(at), Begin::Now);
            let asked = Some(Duration::from_secs(u64::MAX));
            assert_eq!(
                pace.end(at, at, Ended::Throttled(asked)),
                Some(LONGEST_PAUSE)
            );
            assert_eq!(pace.limit, 1);
        }
    }

    #[test]
    fn a_slow_answer_is_told_from_those_around_it() {
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
        let tries = (0..).take_while(|_| latency.may_try()).count();
        assert_eq!(tries, (Latency::ENOUGH + Latency::REMEMBERED) / 20);
    }

    /// Answers each request but one: that one hangs.
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

    fn client(hangs: usize) -> (Client, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let hanging = Hanging {
            asked: Arc::clone(&asked),
            hangs,
        };
        let client = Client {
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

    /// Answers with so many bytes.
    #[derive(Debug)]
    struct Long(StatusCode, usize);

    #[async_trait]
    impl HttpService for Long {
        async fn call(&self, _: HttpRequest) -> Result<HttpResponse, HttpError> {
            let mut answer = http::Response::new(HttpResponseBody::from(vec![b' '; self.1]));
            *answer.status_mut() = self.0;
            Ok(answer)
        }
    }

    #[tokio::test]
    async fn an_answer_that_is_no_object_is_not_read_without_end() {
        let objects = [
            "/b/v2/Full?versionId=3",
            "/b/v2/Full",
            "/b/x?sv=2026&sig=prefix",
        ];
        let questions = ["/b?list-type=2&prefix=v2", "/b/x?tagging", "/b?comp=list"];
        let (ok, bad) = (StatusCode::OK, StatusCode::SERVICE_UNAVAILABLE);
        let all = objects.map(|uri| (uri, true)).into_iter();
        for (uri, is_object) in all.chain(questions.map(|uri| (uri, false))) {
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
                let client = Client {
                    inner: HttpClient::new(Long(status, LONGEST_ANSWER + more)),
                    requests: Requests::new(4),
                };
                let mut request = request(method.clone());
                *request.uri_mut() = uri.parse().unwrap();
                let answer = client.call(request).await;
                assert_eq!(answer.is_ok(), fits, "{method} {uri} {status} {more}");
                if let Ok(answer) = answer {
                    let body = answer.into_body().bytes().await.unwrap();
                    assert_eq!(body.len(), LONGEST_ANSWER + more);
                }
            }
        }
    }

    #[tokio::test]
    async fn the_answer_to_a_login_is_not_read_without_end() {
        for header in ["x-auth-key", "metadata", "x-aws-ec2-metadata-token"] {
            let client = Client {
                inner: HttpClient::new(Long(StatusCode::OK, LONGEST_ANSWER + 1)),
                requests: Requests::new(4),
            };
            let mut login = request(Method::GET);
            let value = http::HeaderValue::from_static("x");
            login.headers_mut().insert(header, value);
            client.call(login).await.unwrap_err();
        }
    }

    #[tokio::test]
    async fn a_read_that_hangs_is_asked_again() {
        let (client, asked) = client(50);
        for _ in 0..51 {
            client.call(request(Method::GET)).await.unwrap();
        }
        assert_eq!(asked.load(Ordering::Relaxed), 52);
        assert_eq!(client.requests.pace().under_way, 0);
    }

    #[tokio::test]
    async fn what_writes_is_never_asked_twice() {
        let (client, asked) = client(50);
        for _ in 0..50 {
            client.call(request(Method::GET)).await.unwrap();
        }
        let put = client.call(request(Method::PUT));
        let waited = tokio::time::timeout(4 * Latency::SLOW_AT_LEAST, put).await;
        assert!(waited.is_err());
        assert_eq!(asked.load(Ordering::Relaxed), 51);
        // Given up, it is under way no more.
        assert_eq!(client.requests.pace().under_way, 0);
    }
}
