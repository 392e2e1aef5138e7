//! Limits the requests under way to one store, and the length of their responses.
//!
//! Reads and writes have separate limits: with one for both, the readers of a copy would take the slots of its
//! writers. Responses that are not objects are read into memory, up to a limit. All requests of a store go through
//! here, those of the object_store crate and our own; the crate retries them, with pauses that grow.

use super::answers;
use super::asked::{Asked, Kind};
use super::connect::{self, Bodies};
use super::listing;
use super::server_facts::ServerFacts;
use async_trait::async_trait;
use bytes::Bytes;
use futures::{Stream, TryStreamExt};
use http::header::{ACCEPT_ENCODING, IF_NONE_MATCH};
use http::{HeaderValue, Method};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService,
};
use rustls::pki_types::CertificateDer;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// The most reads, and the most writes, under way at once, unless the user gives another number.
pub const DEFAULT_REQUESTS: usize = 32;
/// The largest number that the user may give.
pub const MAX_REQUESTS: usize = 1024;

/// The longest response that is read into memory, in bytes. A page of a listing has a few MiB; a hostile
/// server may send any number of bytes.
pub(super) const MAX_RESPONSE: usize = 32 << 20;

/// The condition that no object has the name.
const IF_FREE: HeaderValue = HeaderValue::from_static("*");

/// The limits of one store, which all its clients share.
#[derive(Debug)]
pub struct Requests {
    most: usize,
    reads: Semaphore,
    writes: Semaphore,
    /// What is left for the pages of a listing.
    listing: listing::Budget,
    /// What the responses to reads show of tags.
    pub(super) server: Arc<ServerFacts>,
}

impl Requests {
    /// Returns limits with at most `most` reads and `most` writes under way at once, at least 1.
    pub fn new(most: usize) -> Arc<Self> {
        let most = most.max(1);
        Arc::new(Requests {
            most,
            reads: Semaphore::new(most),
            writes: Semaphore::new(most),
            listing: listing::Budget::default(),
            server: Arc::default(),
        })
    }

    /// Returns the most reads, and the most writes, under way at once.
    pub fn most(&self) -> usize {
        self.most
    }
}

/// Makes the connections of a store. Their requests share the store's limits.
#[derive(Debug, Clone)]
pub(super) struct Connector {
    pub(super) requests: Arc<Requests>,
    /// Trusted beside the system's.
    pub(super) certificates: Vec<CertificateDer<'static>>,
    /// Completes uploads on condition that the name is free, which S3 knows.
    pub(super) completes_if_free: bool,
    /// Google Cloud Storage unpacks objects with `Content-Encoding: gzip` for who does not take gzip.
    pub(super) takes_gzip: bool,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let connect = |bodies| connect::connect(options, &self.certificates, bodies);
        Ok(HttpClient::new(LimitedClient {
            inner: connect(Bodies::Received)?,
            sender: connect(Bodies::Sent)?,
            read_timeout: connect::read_timeout(options)?,
            requests: Arc::clone(&self.requests),
            completes_if_free: self.completes_if_free,
            takes_gzip: self.takes_gzip,
        }))
    }
}

#[derive(Debug)]
struct LimitedClient {
    inner: HttpClient,
    /// For requests with bodies.
    sender: HttpClient,
    /// The longest time without a byte.
    read_timeout: Option<Duration>,
    requests: Arc<Requests>,
    completes_if_free: bool,
    takes_gzip: bool,
}

impl LimitedClient {
    async fn send(&self, asked: Asked, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let changes_nothing = matches!(*request.method(), Method::GET | Method::HEAD);
        let is_content = asked.kind == Kind::Read && request.method() == Method::GET;
        let limit = if changes_nothing {
            &self.requests.reads
        } else {
            &self.requests.writes
        };
        // The permit of a read lasts until the headers have come. A body that waits for its reader must not hold up a
        // request that the reader waits for.
        let permit = limit.acquire().await;
        let (mut parts, body) = match request.body().content_length() {
            0 => {
                let response = self.inner.execute(request).await;
                drop(permit);
                let response = response.map_err(answers::without_vain_retries)?;
                let status = response.status();
                // Only the content of an object may have any length.
                if is_content && !status.is_client_error() && !status.is_server_error() {
                    return Ok(response);
                }
                whole(response).await?
            }
            sent => {
                let answer = async {
                    let response = self.sender.execute(request).await;
                    whole(response.map_err(answers::without_vain_retries)?).await
                };
                let answer = match self.read_timeout.map(|time| time_to_send(time, sent)) {
                    Some(limit) => tokio::time::timeout(limit, answer).await,
                    None => Ok(answer.await),
                };
                drop(permit);
                answer.map_err(|e| HttpError::new(HttpErrorKind::Timeout, TimedOut(e)))??
            }
        };
        let meant = answers::meaning(asked, &parts, body)?;
        if let Some(pause) = answers::pause(meant.0, &parts.headers) {
            tokio::time::sleep(pause).await;
        }
        parts.status = meant.0;
        Ok(HttpResponse::from_parts(
            parts,
            HttpResponseBody::from(meant.1),
        ))
    }
}

/// Returns how long a request with a body of `bytes` may take. Parts that are sent at once share a slow line; one that has
/// broken off is noticed by the kernel, which waits for `read_timeout` (see `connect`).
fn time_to_send(read_timeout: Duration, bytes: usize) -> Duration {
    /// The bytes for which the time is given once more. With the default of 60 s, a part of 5 MiB has 11 minutes.
    const STEP: usize = 512 << 10;
    let steps = u32::try_from(bytes / STEP).unwrap_or(u32::MAX);
    read_timeout.saturating_mul(steps.saturating_add(1))
}

/// An error, and the server that was asked: the crate does not name those that give credentials.
#[derive(Debug, thiserror::Error)]
#[error("{source}")]
pub(super) struct At {
    pub(super) server: String,
    source: HttpError,
}

/// The error of a request that took too long.
#[derive(Debug, thiserror::Error)]
#[error("operation timed out")]
struct TimedOut(#[source] tokio::time::error::Elapsed);

/// Reads a response into memory.
///
/// # Errors
/// Fails if the response is too long.
pub(super) async fn whole(
    response: HttpResponse,
) -> Result<(http::response::Parts, Bytes), HttpError> {
    let (parts, body) = response.into_parts();
    match collect(body.bytes_stream(), MAX_RESPONSE).await? {
        Some(whole) => Ok((parts, whole.into())),
        None => {
            let e = format!("the response has more than {MAX_RESPONSE} bytes");
            Err(HttpError::new(
                HttpErrorKind::Decode,
                std::io::Error::other(e),
            ))
        }
    }
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
    async fn call(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let mut asked = Asked::by(&request);
        // The object_store crate completes without a condition. S3 takes headers that are not signed.
        if self.completes_if_free
            && asked.kind == Kind::Complete
            && *request.method() == Method::POST
        {
            request.headers_mut().insert(IF_NONE_MATCH, IF_FREE);
            asked.is_conditional = true;
        }
        if self.takes_gzip && asked.kind == Kind::Read {
            let headers = request.headers_mut();
            headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
        }
        let is_page = asked.kind == Kind::Page;
        let is_first = listing::begins(request.uri());
        let reads_object = asked.kind == Kind::Read && *request.method() == Method::GET;
        let uri = request.uri().clone();
        let mut response = self.send(asked, request).await.map_err(|source| {
            let server = connect::server_of(&uri);
            HttpError::new(source.kind(), At { server, source })
        })?;
        self.requests.server.learn_server(response.headers());
        if reads_object {
            self.requests.server.note_tags(&mut response);
        }
        if is_page && response.status().is_success() {
            listing::with_stand_ins(response, is_first, &self.requests.listing).await
        } else {
            Ok(response)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::StatusCode;
    use object_store::client::HttpRequestBody;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn request(method: Method) -> HttpRequest {
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.method_mut() = method;
        request
    }

    fn client() -> LimitedClient {
        LimitedClient {
            inner: HttpClient::new(WantsCondition),
            sender: HttpClient::new(Hanging(Arc::default())),
            read_timeout: Some(Duration::from_millis(10)),
            requests: Requests::new(4),
            completes_if_free: false,
            takes_gzip: false,
        }
    }

    /// Answers with a status and a listing of a number of bytes.
    #[derive(Debug)]
    struct Long(StatusCode, usize);

    #[async_trait]
    impl HttpService for Long {
        async fn call(&self, _: HttpRequest) -> Result<HttpResponse, HttpError> {
            let mut body = b"<ListBucketResult/>".to_vec();
            body.resize(self.1, b' ');
            let mut response = http::Response::new(HttpResponseBody::from(body));
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
                    inner: HttpClient::new(Long(status, MAX_RESPONSE + more)),
                    ..client()
                };
                let mut request = request(method.clone());
                *request.uri_mut() = uri.parse().unwrap();
                let response = client.call(request).await;
                assert_eq!(response.is_ok(), fits, "{method} {uri} {status} {more}");
                if let Ok(response) = response
                    && status == ok
                {
                    let body = response.into_body().bytes().await.unwrap();
                    assert_eq!(body.len(), MAX_RESPONSE + more);
                }
            }
        }
    }

    #[tokio::test]
    async fn the_response_to_a_login_has_a_limit() {
        for header in ["x-auth-key", "metadata", "x-aws-ec2-metadata-token"] {
            let client = LimitedClient {
                inner: HttpClient::new(Long(StatusCode::OK, MAX_RESPONSE + 1)),
                ..client()
            };
            let mut login = request(Method::GET);
            let value = http::HeaderValue::from_static("x");
            login.headers_mut().insert(header, value);
            client.call(login).await.unwrap_err();
        }
    }

    /// Accepts a request that has the condition, and refuses others.
    #[derive(Debug)]
    struct WantsCondition;

    #[async_trait]
    impl HttpService for WantsCondition {
        async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
            let mut response = http::Response::new(HttpResponseBody::from(Vec::new()));
            if request.headers().get(IF_NONE_MATCH) != Some(&IF_FREE) {
                *response.status_mut() = StatusCode::PRECONDITION_REQUIRED;
            }
            Ok(response)
        }
    }

    #[tokio::test]
    async fn only_s3_completes_an_upload_on_condition() {
        for (completes_if_free, method, query, has_condition) in [
            (true, Method::POST, "uploadId=x", true),
            (false, Method::POST, "uploadId=x", false),
            (true, Method::POST, "uploads", false),
            (true, Method::PUT, "partNumber=1&uploadId=x", false),
            (true, Method::DELETE, "uploadId=x", false),
        ] {
            let client = LimitedClient {
                inner: HttpClient::new(WantsCondition),
                completes_if_free,
                ..client()
            };
            let mut request = request(method.clone());
            *request.uri_mut() = format!("http://h/b/v2/x?{query}").parse().unwrap();
            let response = client.call(request).await;
            assert_eq!(response.is_ok(), has_condition, "{method} {query}");
        }
    }

    /// Never answers.
    #[derive(Debug)]
    struct Hanging(Arc<AtomicUsize>);

    #[async_trait]
    impl HttpService for Hanging {
        async fn call(&self, _: HttpRequest) -> Result<HttpResponse, HttpError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            std::future::pending().await
        }
    }

    #[tokio::test]
    async fn reads_and_writes_have_limits_of_their_own() {
        let asked = Arc::new(AtomicUsize::new(0));
        let client = LimitedClient {
            inner: HttpClient::new(Hanging(Arc::clone(&asked))),
            requests: Requests::new(3),
            ..client()
        };
        for (method, under_way) in [(Method::GET, 3), (Method::PUT, 6), (Method::HEAD, 6)] {
            let calls = (0..5).map(|_| client.call(request(method.clone())));
            let mut calls: Vec<_> = calls.collect();
            for call in &mut calls {
                assert!(futures::poll!(call).is_pending());
            }
            assert_eq!(asked.load(Ordering::Relaxed), under_way, "{method}");
            // They stay under way.
            std::mem::forget(calls);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_has_time_by_its_length() {
        for (bytes, steps) in [(1, 1), (512 << 10, 2), (5 << 20, 11)] {
            let mut part = HttpRequest::new(HttpRequestBody::from(vec![0; bytes]));
            *part.method_mut() = Method::PUT;
            let begun = tokio::time::Instant::now();
            let e = client().call(part).await.unwrap_err();
            assert_eq!(e.kind(), HttpErrorKind::Timeout);
            assert_eq!(begun.elapsed().as_millis() / 10, steps, "{bytes}");
        }
    }
}
