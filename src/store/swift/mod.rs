//! A client for OpenStack Swift's own protocol, as an object store.
//!
//! opendal's does not write on a condition, does not log in, and leaves the segments of what it
//! deletes. `open` makes it; what is behind the names it does not know.

use super::errors::redact;
use super::listing;
use crate::base::causes::causes;
use crate::base::lock;
use crate::base::percent::{encoded, encoded_path};
use crate::base::retry::{Retryable, backoff};
use async_trait::async_trait;
use bytes::Bytes;
use chrono::{DateTime, NaiveDateTime, Utc};
use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt, TryStreamExt};
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode};
use object_store::client::{HttpClient, HttpRequest, HttpRequestBody, HttpResponse};
use object_store::path::Path;
use object_store::{
    Attributes, CopyMode, CopyOptions, Error, Extensions, GetOptions, GetRange, GetResult,
    GetResultPayload, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, RetryConfig, UploadPart,
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Swift's own limit for an object that is not made of others, and so for what it copies.
pub(super) const LARGEST_OBJECT: u64 = 5 << 30;
/// A token is not used in its last moments.
const BEFORE_THE_END: Duration = Duration::from_secs(60);
/// No token is used for longer, whatever a server says: so long a time may be no time at all.
const LONGEST_SESSION: Duration = Duration::from_secs(24 * 60 * 60);
/// An answer that is not streamed is no longer than this in messages.
const LONGEST_ANSWER: usize = 300;
/// Deletions under way at once.
const AT_ONCE: usize = 10;
/// Pauses between tries double up to this.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

const X_AUTH_KEY: HeaderName = HeaderName::from_static("x-auth-key");
const X_AUTH_TOKEN: HeaderName = HeaderName::from_static("x-auth-token");
const X_AUTH_TOKEN_EXPIRES: HeaderName = HeaderName::from_static("x-auth-token-expires");
const X_AUTH_USER: HeaderName = HeaderName::from_static("x-auth-user");
const X_STORAGE_URL: HeaderName = HeaderName::from_static("x-storage-url");
const X_SUBJECT_TOKEN: HeaderName = HeaderName::from_static("x-subject-token");
const X_COPY_FROM: HeaderName = HeaderName::from_static("x-copy-from");
const X_OBJECT_MANIFEST: HeaderName = HeaderName::from_static("x-object-manifest");
const X_STATIC_LARGE_OBJECT: HeaderName = HeaderName::from_static("x-static-large-object");

/// Who logs in where.
#[derive(Clone, PartialEq)]
pub(super) enum Login {
    /// Nobody: there is a token.
    Token { url: String, token: String },
    /// By Swift's own first version, as tempauth has it.
    V1 {
        url: String,
        user: String,
        key: String,
    },
    /// By Keystone's third.
    V3 {
        url: String,
        request: Value,
        region: Option<String>,
        interface: String,
        /// Instead of the one in the catalogue.
        storage_url: Option<String>,
    },
}

impl Login {
    /// Where it leads to.
    pub(super) fn urls(&self) -> impl Iterator<Item = &str> {
        let (url, storage_url) = match self {
            Login::Token { url, .. } | Login::V1 { url, .. } => (url, None),
            Login::V3 {
                url, storage_url, ..
            } => (url, storage_url.as_deref()),
        };
        [Some(url.as_str()), storage_url].into_iter().flatten()
    }
}

/// What a login gave.
struct Session {
    login: Login,
    /// Of the account, without a slash at its end.
    url: String,
    token: HeaderValue,
    until: Option<Instant>,
}

impl Session {
    fn new(login: Login, url: &str, token: &str, lasts: Option<Duration>) -> Result<Self> {
        let mut token = header_value(token)?;
        token.set_sensitive(true);
        Ok(Session {
            login,
            url: url.trim_end_matches('/').to_owned(),
            token,
            until: lasts.and_then(until),
        })
    }
}

/// A container of Swift.
#[derive(Clone)]
pub(super) struct Swift(Arc<Inner>);

struct Inner {
    http: HttpClient,
    container: String,
    retry: RetryConfig,
    login: Box<dyn Fn() -> Login + Send + Sync>,
    session: tokio::sync::Mutex<Option<Arc<Session>>>,
}

/// A request but for where it goes and who sends it.
struct Request {
    method: Method,
    /// None: the container.
    path: Option<Path>,
    query: String,
    headers: HeaderMap,
    body: HttpRequestBody,
}

impl Request {
    fn new(method: Method, path: Option<&Path>) -> Self {
        Request {
            method,
            path: path.cloned(),
            query: String::new(),
            headers: HeaderMap::new(),
            body: HttpRequestBody::empty(),
        }
    }

    fn query(mut self, query: impl Into<String>) -> Self {
        self.query = query.into();
        self
    }

    fn header(mut self, name: HeaderName, value: &str) -> Result<Self> {
        self.headers.insert(name, header_value(value)?);
        Ok(self)
    }

    fn body(mut self, body: impl Into<HttpRequestBody>) -> Self {
        self.body = body.into();
        self
    }

    /// The request to this URL, as it is sent.
    fn to(&self, url: &str) -> Result<HttpRequest> {
        let mut sent = HttpRequest::new(self.body.clone());
        *sent.method_mut() = self.method.clone();
        *sent.uri_mut() = url.parse().map_err(|_| failed("a URL that is none"))?;
        *sent.headers_mut() = self.headers.clone();
        if matches!(self.method, Method::PUT | Method::POST) {
            let length = self.body.content_length();
            sent.headers_mut()
                .insert(header::CONTENT_LENGTH, length.into());
        }
        Ok(sent)
    }
}

#[derive(Deserialize)]
struct Listed {
    #[serde(default)]
    name: String,
    #[serde(default)]
    bytes: u64,
    #[serde(default)]
    hash: String,
    #[serde(default)]
    last_modified: String,
    subdir: Option<String>,
}

/// Whether the server or the way to it is at fault. 498: too many requests, as Swift's rate limit says it.
fn is_passing(status: StatusCode) -> bool {
    matches!(status.as_u16(), 408 | 429 | 498)
        || (status.is_server_error() && !matches!(status.as_u16(), 501 | 507))
}

fn failed(what: impl fmt::Display) -> Error {
    Error::Generic {
        store: "Swift",
        source: redact(&what.to_string()).into(),
    }
}

/// When a token that lasts so long is used no more.
fn until(lasts: Duration) -> Option<Instant> {
    let lasts = lasts.saturating_sub(BEFORE_THE_END).min(LONGEST_SESSION);
    Instant::now().checked_add(lasts)
}

fn header_value(text: &str) -> Result<HeaderValue> {
    HeaderValue::from_str(text).map_err(|_| failed("a header that is none"))
}

impl Swift {
    pub(super) fn new(
        http: HttpClient,
        container: String,
        retry: RetryConfig,
        login: Box<dyn Fn() -> Login + Send + Sync>,
    ) -> Self {
        Swift(Arc::new(Inner {
            http,
            container,
            retry,
            login,
            session: tokio::sync::Mutex::default(),
        }))
    }

    /// A session; another one than that with the token `refused`.
    async fn session(&self, refused: Option<&HeaderValue>) -> Result<Arc<Session>> {
        let mut session = self.0.session.lock().await;
        let login = (self.0.login)();
        if let Some(session) = &*session
            && session.login == login
            && session.until.is_none_or(|until| Instant::now() < until)
            && Some(&session.token) != refused
        {
            return Ok(session.clone());
        }
        let new = Arc::new(self.log_in(login).await?);
        *session = Some(new.clone());
        Ok(new)
    }

    async fn log_in(&self, login: Login) -> Result<Session> {
        let (url, request) = match &login {
            Login::Token { url, token } => {
                return Session::new(login.clone(), url, token, None);
            }
            Login::V1 { url, user, key } => {
                let request = Request::new(Method::GET, None)
                    .header(X_AUTH_USER, user)?
                    .header(X_AUTH_KEY, key)?;
                (url.clone(), request)
            }
            Login::V3 { url, request, .. } => {
                let request = Request::new(Method::POST, None)
                    .header(header::CONTENT_TYPE, "application/json")?
                    .body(request.to_string());
                (format!("{url}/auth/tokens"), request)
            }
        };
        let (parts, body) = self.tried(request.to(&url)?).await?.into_parts();
        let body = body.bytes().await.map_err(failed)?;
        if !parts.status.is_success() {
            let said = message(parts.status, &body);
            return Err(match parts.status {
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Error::Unauthenticated {
                    path: url,
                    source: said.into(),
                },
                _ => failed(format!("log in at {url}: {said}")),
            });
        }
        let told = |name| text(&parts.headers, name);
        let (url, token, lasts) = match &login {
            Login::V3 {
                region,
                interface,
                storage_url,
                ..
            } => {
                let answer: Value = serde_json::from_slice(&body)
                    .map_err(|e| failed(format!("what Keystone answers is no JSON: {e}")))?;
                let url = storage_url
                    .clone()
                    .or_else(|| endpoint(&answer, interface, region.as_deref()))
                    .ok_or_else(|| {
                        let region = region.as_deref().unwrap_or("any");
                        failed(format!(
                            "Keystone's catalogue has no {interface} endpoint for object-store in the region {region}: status code: 400"
                        ))
                    })?;
                let lasts = answer["token"]["expires_at"].as_str().and_then(|end| {
                    let end = DateTime::parse_from_rfc3339(end).ok()?;
                    (end.with_timezone(&Utc) - Utc::now()).to_std().ok()
                });
                (Some(url), told(X_SUBJECT_TOKEN), lasts)
            }
            _ => {
                let lasts = told(X_AUTH_TOKEN_EXPIRES).and_then(|s| s.parse().ok());
                let lasts = lasts.map(Duration::from_secs);
                (told(X_STORAGE_URL), told(X_AUTH_TOKEN), lasts)
            }
        };
        match (url, token) {
            (Some(url), Some(token)) => Session::new(login, &url, &token, lasts),
            _ => Err(failed("a login was answered without a token or a URL")),
        }
    }

    /// Sends a request, again where the server or the way to it is at fault.
    async fn tried(&self, request: HttpRequest) -> Result<HttpResponse> {
        let began = Instant::now();
        let retry = &self.0.retry;
        let first = retry.backoff.init_backoff.max(Duration::from_millis(1));
        // An answer that another try may better is a failure until no try is left.
        let attempt = || async {
            match self.0.http.execute(request.clone()).await {
                Ok(answer) if is_passing(answer.status()) => Err(Ok(answer)),
                Ok(answer) => Ok(answer),
                Err(e) => Err(Err(failed(causes(&e)))),
            }
        };
        let answer = attempt
            .retry(backoff(first, LONGEST_PAUSE, retry.max_retries))
            .when(|_| began.elapsed() < retry.retry_timeout);
        answer.await.or_else(|last| last)
    }

    /// Sends a request as whoever is logged in; once more where the token is not taken any longer.
    async fn send(&self, request: Request) -> Result<HttpResponse> {
        let mut refused = None;
        loop {
            let session = self.session(refused.as_ref()).await?;
            let mut url = format!("{}/{}", session.url, encoded(&self.0.container));
            if let Some(path) = &request.path {
                url = format!("{url}/{}", encoded_path(path.as_ref()));
            }
            if !request.query.is_empty() {
                url = format!("{url}?{}", request.query);
            }
            let mut sent = request.to(&url)?;
            sent.headers_mut()
                .insert(X_AUTH_TOKEN, session.token.clone());
            let answer = self.tried(sent).await?;
            let status = answer.status();
            if status == StatusCode::UNAUTHORIZED && refused.is_none() {
                refused = Some(session.token.clone());
                continue;
            }
            if status.is_success() {
                return Ok(answer);
            }
            let body = answer.into_body().bytes().await.unwrap_or_default();
            let path = request.path.map(String::from).unwrap_or_default();
            let source = message(status, &body).into();
            return Err(match status {
                StatusCode::NOT_FOUND => Error::NotFound { path, source },
                StatusCode::UNAUTHORIZED => Error::Unauthenticated { path, source },
                StatusCode::FORBIDDEN => Error::PermissionDenied { path, source },
                StatusCode::NOT_MODIFIED => Error::NotModified { path, source },
                StatusCode::CONFLICT | StatusCode::PRECONDITION_FAILED => {
                    Error::Precondition { path, source }
                }
                _ => Error::Generic {
                    store: "Swift",
                    source,
                },
            });
        }
    }

    /// The whole answer to a request.
    async fn ask(&self, request: Request) -> Result<Bytes> {
        let body = self.send(request).await?.into_body();
        body.bytes().await.map_err(failed)
    }

    async fn head(&self, path: &Path) -> Result<HeaderMap> {
        let request = Request::new(Method::HEAD, Some(path));
        Ok(self.send(request).await?.headers().clone())
    }

    /// One page of a listing, behind `marker`.
    async fn page(&self, prefix: &str, delimiter: &str, marker: &str) -> Result<Vec<Listed>> {
        let mut query = format!("format=json&prefix={}", encoded(prefix));
        for (key, value) in [("delimiter", delimiter), ("marker", marker)] {
            if !value.is_empty() {
                query.push_str(&format!("&{key}={}", encoded(value)));
            }
        }
        let request = Request::new(Method::GET, None).query(query);
        let body = self.ask(request).await?;
        if body.is_empty() {
            return Ok(Vec::new());
        }
        serde_json::from_slice(&body).map_err(|e| failed(format!("a listing that is none: {e}")))
    }

    /// A listed object. One that is put together when it is read has no size in a listing.
    async fn meta(&self, listed: Listed) -> Result<ObjectMeta> {
        let is_odd = listing::is_odd(&listed.name);
        let location = match is_odd {
            true => Path::from(listing::stand_in(&listed.name)),
            false => Path::parse(&listed.name)?,
        };
        if listed.bytes == 0 && !is_odd {
            match self.head(&location).await {
                Ok(headers) => return Ok(meta(location, &headers)),
                Err(Error::NotFound { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        let written = listed.last_modified.trim_end_matches('Z');
        let written = NaiveDateTime::parse_from_str(written, "%Y-%m-%dT%H:%M:%S%.f");
        Ok(ObjectMeta {
            location,
            last_modified: written.map(|t| t.and_utc()).unwrap_or_default(),
            size: listed.bytes,
            e_tag: (!listed.hash.is_empty()).then_some(listed.hash),
            version: None,
        })
    }

    /// The pages of a listing, up to its end. Swift lists in the order of the names' bytes, from a marker on: a page that
    /// leads back may lead there for ever.
    fn pages(
        &self,
        prefix: String,
        delimiter: &'static str,
    ) -> impl Stream<Item = Result<Vec<Listed>>> + Send + 'static {
        let begin = (self.clone(), String::new(), 0);
        stream::try_unfold(begin, move |(swift, marker, listed)| {
            let prefix = prefix.clone();
            async move {
                let page = swift.page(&prefix, delimiter, &marker).await?;
                let Some(last) = page.last() else {
                    return Ok(None);
                };
                let next = last.subdir.as_ref().unwrap_or(&last.name).clone();
                let listed = listed + page.len();
                match next > marker && listed <= listing::LARGEST_LISTING {
                    true => Ok(Some((page, (swift, next, listed)))),
                    false => Err(failed(listing::ENDLESS)),
                }
            }
        })
    }

    fn listing(&self, prefix: String) -> BoxStream<'static, Result<ObjectMeta>> {
        let swift = self.clone();
        let meta = move |listed| {
            let swift = swift.clone();
            async move { swift.meta(listed).await }
        };
        self.pages(prefix, "")
            .map_ok(|page| stream::iter(page.into_iter().map(Ok)))
            .try_flatten()
            .and_then(meta)
            .boxed()
    }

    async fn put(&self, path: &Path, payload: PutPayload, is_new: bool) -> Result<PutResult> {
        let mut request = Request::new(Method::PUT, Some(path))
            .header(header::CONTENT_TYPE, "application/octet-stream")?
            .body(payload);
        if is_new {
            request = request.header(header::IF_NONE_MATCH, "*")?;
        }
        let answer = self.send(request).await.map_err(|e| match e {
            Error::Precondition { path, source } if is_new => Error::AlreadyExists { path, source },
            e => e,
        })?;
        Ok(put_result(&answer))
    }

    /// Deletes an object, with the others that it is made of.
    async fn remove(&self, path: &Path) -> Result<()> {
        let headers = self.head(path).await?;
        let delete = |path: &Path| Request::new(Method::DELETE, Some(path));
        if headers.contains_key(X_STATIC_LARGE_OBJECT) {
            let request = delete(path)
                .query("multipart-manifest=delete")
                .header(header::ACCEPT, "application/json")?;
            let body = self.ask(request).await?;
            // It is answered with 200 whatever comes of it.
            let said: Value = serde_json::from_slice(&body).unwrap_or_default();
            let status = said["Response Status"].as_str().unwrap_or_default();
            let errors = said["Errors"].as_array().is_some_and(|e| !e.is_empty());
            let is_gone = status.starts_with("404") && !errors;
            if !status.starts_with("200") && !is_gone {
                let said = format!("status code: {status}: {}", said["Errors"]);
                return Err(failed(format!("delete {path}: {said}")));
            }
            return Ok(());
        }
        self.send(delete(path)).await?;
        // Its segments are below its own name, as etcd-backup-restore leaves them, or not ours to know.
        let own = format!("{}/{path}", self.0.container);
        let segments = text(&headers, X_OBJECT_MANIFEST).is_some_and(|m| {
            let m = m.trim_end_matches('/');
            m == own || m == encoded_path(&own)
        });
        if segments {
            let listed: Vec<_> = self.listing(format!("{path}/")).try_collect().await?;
            for segment in listed {
                match self.send(delete(&segment.location)).await {
                    Ok(_) | Err(Error::NotFound { .. }) => {}
                    Err(e) => return Err(e),
                }
            }
        }
        Ok(())
    }

    /// Opens an object for reading.
    async fn open(&self, path: &Path, options: &GetOptions) -> Result<HttpResponse> {
        let method = match options.head {
            true => Method::HEAD,
            false => Method::GET,
        };
        let date = |d: &DateTime<Utc>| d.format("%a, %d %b %Y %H:%M:%S GMT").to_string();
        let range = options.range.as_ref();
        let mut request = Request::new(method, Some(path));
        for (name, value) in [
            (header::IF_MATCH, options.if_match.clone()),
            (header::IF_NONE_MATCH, options.if_none_match.clone()),
            (
                header::IF_MODIFIED_SINCE,
                options.if_modified_since.as_ref().map(date),
            ),
            (
                header::IF_UNMODIFIED_SINCE,
                options.if_unmodified_since.as_ref().map(date),
            ),
            (header::RANGE, range.map(GetRange::to_string)),
        ] {
            if let Some(value) = value {
                request = request.header(name, &value)?;
            }
        }
        self.send(request).await
    }

    /// What is left of an object from `from` on, up to `end`; a connection that breaks is made again
    /// where the object is the same.
    fn content(
        &self,
        path: Path,
        body: BoxStream<'static, Result<Bytes>>,
        range: std::ops::Range<u64>,
        e_tag: Option<String>,
    ) -> BoxStream<'static, Result<Bytes>> {
        struct Left {
            swift: Swift,
            body: BoxStream<'static, Result<Bytes>>,
            at: u64,
            tries: usize,
        }
        let left = Left {
            swift: self.clone(),
            body,
            at: range.start,
            tries: self.0.retry.max_retries,
        };
        stream::try_unfold(left, move |mut left| {
            let (path, e_tag) = (path.clone(), e_tag.clone());
            async move {
                loop {
                    let error = match left.body.next().await {
                        Some(Ok(bytes)) => {
                            left.at += bytes.len() as u64;
                            return Ok(Some((bytes, left)));
                        }
                        None if left.at >= range.end => return Ok(None),
                        None => failed(format!("{path} ended too early")),
                        Some(Err(e)) => e,
                    };
                    if left.at >= range.end {
                        return Ok(None);
                    }
                    // Without a mark of its content nobody knows whether it is still the same.
                    if left.tries == 0 || e_tag.is_none() {
                        return Err(error);
                    }
                    left.tries -= 1;
                    let options = GetOptions {
                        range: Some(GetRange::Bounded(left.at..range.end)),
                        if_match: e_tag.clone(),
                        ..GetOptions::default()
                    };
                    let answer = left.swift.open(&path, &options).await?;
                    if answer.status() != StatusCode::PARTIAL_CONTENT {
                        return Err(error);
                    }
                    left.body = answer.into_body().bytes_stream().map_err(failed).boxed();
                }
            }
        })
        .boxed()
    }
}

fn message(status: StatusCode, body: &[u8]) -> String {
    let body = String::from_utf8_lossy(body);
    let short: String = body.chars().take(LONGEST_ANSWER).collect();
    let text = without_tags(&short);
    format!("status code: {status}: {}", redact(text.trim()))
}

/// Swift's errors are small pages of HTML.
fn without_tags(text: &str) -> String {
    let mut out = String::new();
    let mut inside = false;
    for c in text.chars() {
        match c {
            '<' => inside = true,
            '>' => {
                inside = false;
                out.push(' ');
            }
            c if !inside => out.push(c),
            _ => {}
        }
    }
    out
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<String> {
    Some(headers.get(name)?.to_str().ok()?.to_owned())
}

fn put_result(answer: &HttpResponse) -> PutResult {
    PutResult {
        e_tag: text(answer.headers(), header::ETAG),
        version: None,
        extensions: Extensions::new(),
    }
}

fn meta(location: Path, headers: &HeaderMap) -> ObjectMeta {
    let size = text(headers, header::CONTENT_LENGTH).and_then(|l| l.parse().ok());
    let written = text(headers, header::LAST_MODIFIED)
        .and_then(|t| DateTime::parse_from_rfc2822(&t).ok())
        .map(|t| t.with_timezone(&Utc));
    ObjectMeta {
        location,
        last_modified: written.unwrap_or_default(),
        size: size.unwrap_or_default(),
        e_tag: text(headers, header::ETAG),
        version: None,
    }
}

/// The bytes that a partial answer has, and the size of the whole.
fn content_range(headers: &HeaderMap) -> Option<(std::ops::Range<u64>, u64)> {
    let text = text(headers, header::CONTENT_RANGE)?;
    let (range, whole) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (from, to) = range.split_once('-')?;
    let (from, to): (u64, u64) = (from.parse().ok()?, to.parse().ok()?);
    Some((from..to + 1, whole.parse().ok()?))
}

/// Where a catalogue says that the objects are.
fn endpoint(answer: &Value, interface: &str, region: Option<&str>) -> Option<String> {
    let services = answer["token"]["catalog"].as_array()?.iter();
    let mut endpoints = services
        .filter(|s| s["type"] == "object-store")
        .filter_map(|s| s["endpoints"].as_array())
        .flatten();
    let found = endpoints.find(|e| {
        e["interface"] == interface
            && region.is_none_or(|r| e["region"] == r || e["region_id"] == r)
    })?;
    Some(found["url"].as_str()?.to_owned())
}

impl fmt::Debug for Swift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Swift({})", self.0.container)
    }
}

impl fmt::Display for Swift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Swift({})", self.0.container)
    }
}

#[async_trait]
impl ObjectStore for Swift {
    async fn put_opts(
        &self,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        match options.mode {
            PutMode::Overwrite => self.put(path, payload, false).await,
            PutMode::Create => self.put(path, payload, true).await,
            PutMode::Update(_) => Err(Error::NotImplemented {
                operation: "a write on condition of what is there".to_owned(),
                implementer: "Swift".to_owned(),
            }),
        }
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        Ok(Box::new(Segments {
            swift: self.clone(),
            path: path.clone(),
            begun: 0,
            written: Arc::default(),
        }))
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        let answer = self.open(path, &options).await?;
        let headers = answer.headers().clone();
        let mut meta = meta(path.clone(), &headers);
        let range = match (&options.range, options.head) {
            (Some(_), false) => {
                let (range, whole) = content_range(&headers).ok_or_else(|| {
                    failed(format!("a part of {path} was answered with the whole"))
                })?;
                meta.size = whole;
                range
            }
            _ => 0..meta.size,
        };
        let payload = match options.head {
            true => stream::empty().boxed(),
            false => {
                let body = answer.into_body().bytes_stream().map_err(failed).boxed();
                self.content(path.clone(), body, range.clone(), meta.e_tag.clone())
            }
        };
        Ok(GetResult {
            payload: GetResultPayload::Stream(payload),
            meta,
            range,
            attributes: Attributes::default(),
            extensions: Extensions::new(),
        })
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let swift = self.clone();
        paths
            .map(move |path| {
                let swift = swift.clone();
                async move {
                    let path = path?;
                    swift.remove(&path).await?;
                    Ok(path)
                }
            })
            .buffered(AT_ONCE)
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.listing(folder(prefix))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let mut pages = pin!(self.pages(folder(prefix), "/"));
        let (mut objects, mut common_prefixes) = (Vec::new(), Vec::new());
        while let Some(page) = pages.try_next().await? {
            for listed in page {
                match &listed.subdir {
                    // One that no path names holds nothing of ours.
                    Some(subdir) => common_prefixes.extend(Path::parse(subdir)),
                    None => objects.push(self.meta(listed).await?),
                }
            }
        }
        Ok(ListResult {
            objects,
            common_prefixes,
            extensions: Extensions::new(),
        })
    }

    /// Swift takes a condition for the source of a copy, never for its target.
    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        if options.mode == CopyMode::Create {
            return Err(Error::NotSupported {
                source: "Swift does not copy on condition that a name is free".into(),
            });
        }
        let source = format!("{}/{from}", self.0.container);
        let request = Request::new(Method::PUT, Some(to));
        let request = request.header(X_COPY_FROM, &encoded_path(&source))?;
        self.send(request).await.map(|_| ())
    }
}

fn folder(prefix: Option<&Path>) -> String {
    match prefix.map(Path::as_ref) {
        None | Some("") => String::new(),
        Some(prefix) => format!("{prefix}/"),
    }
}

/// An object that is put together from segments. They lie beside it, so that whoever cleans up behind a
/// run that was killed finds them by its name.
struct Segments {
    swift: Swift,
    path: Path,
    begun: usize,
    /// What each answered: its ETag and its size.
    written: Arc<Mutex<Vec<(usize, String, usize)>>>,
}

impl fmt::Debug for Segments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} segments of {}", self.begun, self.path)
    }
}

impl Segments {
    fn segment(&self, number: usize) -> Path {
        let name = self.path.filename().unwrap_or_default();
        let mut parts: Vec<_> = self.path.parts().map(|p| p.as_ref().to_owned()).collect();
        parts.pop();
        parts.push(format!("{number:08}.{name}"));
        parts.into_iter().collect()
    }
}

#[async_trait]
impl MultipartUpload for Segments {
    fn put_part(&mut self, part: PutPayload) -> UploadPart {
        let number = self.begun;
        self.begun += 1;
        let (swift, path, written) = (
            self.swift.clone(),
            self.segment(number),
            self.written.clone(),
        );
        Box::pin(async move {
            let bytes = part.content_length();
            let put = swift.put(&path, part, false).await?;
            let e_tag = put.e_tag.unwrap_or_default().trim_matches('"').to_owned();
            let mut written = lock(&written);
            written.push((number, e_tag, bytes));
            Ok(())
        })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let mut written = lock(&self.written).clone();
        written.sort();
        let manifest: Vec<Value> = written
            .into_iter()
            .map(|(number, e_tag, bytes)| {
                let path = format!("/{}/{}", self.swift.0.container, self.segment(number));
                json!({"path": path, "etag": e_tag, "size_bytes": bytes})
            })
            .collect();
        let request = Request::new(Method::PUT, Some(&self.path))
            .query("multipart-manifest=put")
            .body(Value::from(manifest).to_string());
        Ok(put_result(&self.swift.send(request).await?))
    }

    async fn abort(&mut self) -> Result<()> {
        /// What was sent whole before it was given up may still be on its way.
        const LATE: Duration = Duration::from_millis(500);
        let mut result = Ok(());
        let mut left: Vec<usize> = (0..self.begun).collect();
        for pause in [Duration::ZERO, LATE] {
            if left.is_empty() {
                break;
            }
            tokio::time::sleep(pause).await;
            for number in std::mem::take(&mut left) {
                match self.swift.remove(&self.segment(number)).await {
                    Ok(()) => {}
                    Err(Error::NotFound { .. }) => left.push(number),
                    Err(e) => result = Err(e),
                }
            }
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_catalogue_tells_where_the_objects_are() {
        let answer = json!({"token": {"catalog": [
            {"type": "compute", "endpoints": [{"interface": "public", "region": "r", "url": "c"}]},
            {"type": "object-store", "endpoints": [
                {"interface": "internal", "region": "r", "url": "https://i/"},
                {"interface": "public", "region": "other", "url": "https://o/"},
                {"interface": "public", "region_id": "r", "url": "https://p/"},
            ]},
        ]}});
        let at = |interface, region| endpoint(&answer, interface, region);
        assert_eq!(at("public", Some("r")).as_deref(), Some("https://p/"));
        assert_eq!(at("public", None).as_deref(), Some("https://o/"));
        assert_eq!(at("internal", Some("r")).as_deref(), Some("https://i/"));
        assert_eq!(at("public", Some("none")), None);
    }

    /// Answers with these pages, one after the other, and with empty ones after them.
    #[derive(Debug)]
    struct Pages(Mutex<Vec<String>>);

    #[async_trait]
    impl object_store::client::HttpService for Pages {
        async fn call(
            &self,
            _: object_store::client::HttpRequest,
        ) -> Result<HttpResponse, object_store::client::HttpError> {
            let page = self.0.lock().unwrap().pop().unwrap_or_default();
            Ok(HttpResponse::new(page.into_bytes().into()))
        }
    }

    fn listed_by(pages: Vec<String>) -> Swift {
        let http = HttpClient::new(Pages(Mutex::new(pages)));
        let login = || Login::Token {
            url: "http://s.example/v1/a".to_owned(),
            token: "t".to_owned(),
        };
        let retry = RetryConfig::default();
        Swift::new(http, "c".to_owned(), retry, Box::new(login))
    }

    #[tokio::test]
    async fn a_listing_that_goes_in_circles_is_refused() {
        let page = |name: &str| json!([{"name": name, "bytes": 1}]).to_string();
        for names in [["a", "b"], ["a", "a"]] {
            let pages = || names.map(page).to_vec();
            let listed = listed_by(pages()).list(None);
            let e = listed.try_collect::<Vec<_>>().await.unwrap_err();
            assert!(e.to_string().contains("does not end"), "{e}");
            let listed = listed_by(pages()).list_with_delimiter(None).await;
            let e = listed.unwrap_err();
            assert!(e.to_string().contains("does not end"), "{e}");
        }
    }

    #[test]
    fn a_token_that_lasts_for_ever_is_used_for_a_day() {
        let day = Instant::now() + LONGEST_SESSION;
        for lasts in [Duration::MAX, Duration::from_secs(u64::MAX)] {
            let until = until(lasts).unwrap();
            assert!(until >= day && until < day + BEFORE_THE_END);
        }
        assert!(until(Duration::ZERO).unwrap() <= Instant::now());
    }

    #[tokio::test]
    async fn who_writes_odd_names_does_not_fail_the_listing() {
        let names = ["p/v2/../x", "p/v2/a", "p/v2/a/", "p/v2/a//b", "p/v2/x\ny"];
        let page: Vec<Value> = names
            .iter()
            .map(|name| json!({"name": name, "bytes": 1, "last_modified": "2026-11-21T00:00:00.5"}))
            .collect();
        let swift = listed_by(vec![Value::from(page).to_string()]);
        let listed: Vec<ObjectMeta> = swift.list(None).try_collect().await.unwrap();
        let told = listed
            .iter()
            .map(|o| listing::odd_key(&o.location).unwrap_or_else(|| o.location.to_string()));
        assert_eq!(told.collect::<Vec<_>>(), names);
        assert_eq!(listed[1].location.as_ref(), names[1]);
    }

    #[test]
    fn messages_are_one_line() {
        let html = b"<html><h1>Unauthorized</h1><p>No &amp; no</p></html>";
        let said = message(StatusCode::UNAUTHORIZED, html);
        assert!(said.starts_with("status code: 401 Unauthorized:"), "{said}");
        assert!(!said.contains('<'), "{said}");
    }

    #[test]
    fn a_partial_answer_tells_what_it_has() {
        let mut headers = HeaderMap::new();
        headers.insert(
            header::CONTENT_RANGE,
            HeaderValue::from_static("bytes 5-9/20"),
        );
        assert_eq!(content_range(&headers), Some((5..10, 20)));
    }
}
