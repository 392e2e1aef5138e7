//! Requests to Swift: built, sent with a token, retried; and its responses' errors.

use super::Swift;
use crate::base::percent::{encoded, encoded_path};
use crate::base::retry::{Retryable, backoff};
use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, StatusCode};
use object_store::client::{HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse};
use object_store::path::Path;
use object_store::{Error, Result};
use std::fmt;
use std::time::{Duration, Instant};

/// The longest pause between attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// A request without its host and its token.
pub(super) struct Request {
    method: Method,
    /// The object; `None` for the container itself.
    path: Option<Path>,
    query: String,
    headers: HeaderMap,
    body: HttpRequestBody,
}

impl Request {
    pub(super) fn new(method: Method, path: Option<&Path>) -> Self {
        Request {
            method,
            path: path.cloned(),
            query: String::new(),
            headers: HeaderMap::new(),
            body: HttpRequestBody::empty(),
        }
    }

    pub(super) fn query(mut self, query: impl Into<String>) -> Self {
        self.query = query.into();
        self
    }

    pub(super) fn header(mut self, name: HeaderName, value: &str) -> Result<Self> {
        self.headers.insert(name, header_value(value)?);
        Ok(self)
    }

    pub(super) fn body(mut self, body: impl Into<HttpRequestBody>) -> Self {
        self.body = body.into();
        self
    }

    /// Returns the HTTP request to this URL.
    pub(super) fn to(&self, url: &str) -> Result<HttpRequest> {
        let mut sent = HttpRequest::new(self.body.clone());
        *sent.method_mut() = self.method.clone();
        *sent.uri_mut() = url
            .parse()
            .map_err(|_| failed("the URL of Swift or Keystone is invalid"))?;
        *sent.headers_mut() = self.headers.clone();
        if matches!(self.method, Method::PUT | Method::POST) {
            let length = self.body.content_length();
            sent.headers_mut()
                .insert(header::CONTENT_LENGTH, length.into());
        }
        Ok(sent)
    }
}

/// Returns whether a later attempt may succeed: the server or the network is at fault.
fn is_transient(status: StatusCode) -> bool {
    status == StatusCode::TOO_MANY_REQUESTS || status.is_server_error()
}

/// Returns the error of a request that got no answer, or one that is refused for good.
pub(super) fn refused(source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Generic {
        store: "Swift",
        source: source.into(),
    }
}

/// Returns an error of the client.
pub(super) fn failed(what: impl fmt::Display) -> Error {
    refused(what.to_string())
}

pub(super) fn header_value(text: &str) -> Result<HeaderValue> {
    HeaderValue::from_str(text)
        .map_err(|_| failed("a setting has characters that no header can have"))
}

impl Swift {
    /// Sends a request, and sends it again if the server or the network is at fault.
    pub(super) async fn send_with_retries(&self, request: HttpRequest) -> Result<HttpResponse> {
        let began = Instant::now();
        let retry = &self.0.retry;
        let first = retry.backoff.init_backoff.max(Duration::from_millis(1));
        // A response that a retry may improve counts as a failure until the attempts are used up:
        // `Err(Ok(_))`.
        let attempt = || async {
            match self.0.http.execute(request.clone()).await {
                Ok(response) if is_transient(response.status()) => Err(Ok(response)),
                Ok(response) => Ok(response),
                Err(e) => Err(Err(e)),
            }
        };
        let may_help = |e: &std::result::Result<HttpResponse, HttpError>| match e {
            Ok(_) => true,
            Err(e) => e.kind() != HttpErrorKind::Decode,
        };
        let response = attempt
            .retry(backoff(first, LONGEST_PAUSE, retry.max_retries))
            .when(|e| may_help(e) && began.elapsed() < retry.retry_timeout);
        let response = response.await.or_else(|last| last);
        response.map_err(refused)
    }

    /// Sends a request with a token. If the server refuses the token, logs in again and sends the request
    /// once more.
    pub(super) async fn send(&self, request: Request) -> Result<HttpResponse> {
        let mut old = None;
        loop {
            let session = self.session(old.as_ref()).await?;
            let mut url = format!("{}/{}", session.url, encoded(&self.0.container));
            if let Some(path) = &request.path {
                url = format!("{url}/{}", encoded_path(path.as_ref()));
            }
            if !request.query.is_empty() {
                url = format!("{url}?{}", request.query);
            }
            let mut sent = request.to(&url)?;
            let (header, token) = session.header();
            sent.headers_mut().insert(header, token);
            let response = self.send_with_retries(sent).await?;
            let status = response.status();
            if status == StatusCode::UNAUTHORIZED && old.is_none() {
                old = Some(session.token.clone());
                continue;
            }
            if status.is_success() {
                return Ok(response);
            }
            let body = response.into_body().bytes().await.unwrap_or_default();
            let path = request.path.map(String::from).unwrap_or_default();
            let text = String::from_utf8_lossy(&body);
            let source = format!("the store answers {status}: {text}").into();
            return Err(match status {
                StatusCode::NOT_FOUND => Error::NotFound { path, source },
                StatusCode::UNAUTHORIZED => Error::Unauthenticated { path, source },
                StatusCode::NOT_MODIFIED => Error::NotModified { path, source },
                StatusCode::CONFLICT | StatusCode::PRECONDITION_FAILED => {
                    Error::Precondition { path, source }
                }
                _ => refused(source),
            });
        }
    }

    /// Sends a request and returns the whole body of the response.
    pub(super) async fn send_for_body(&self, request: Request) -> Result<Bytes> {
        let body = self.send(request).await?.into_body();
        body.bytes().await.map_err(failed)
    }

    /// Returns an object's headers.
    pub(super) async fn head(&self, path: &Path) -> Result<HeaderMap> {
        let request = Request::new(Method::HEAD, Some(path));
        Ok(self.send(request).await?.headers().clone())
    }
}

/// Returns a header's value, if it is there and is text.
pub(super) fn text(headers: &HeaderMap, name: HeaderName) -> Option<String> {
    Some(headers.get(name)?.to_str().ok()?.to_owned())
}
