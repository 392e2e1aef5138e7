//! A client for requests that the object_store crate has no call for: retries, responses, and refusals as
//! errors.
//!
//! Does not sign, and does not know what a request is for: `s3`, `azure` and `gcs`, the callers, do.

use super::answers::refusal_of_facts;
use super::errors::store_error;
use super::requests::whole;
use super::xml::Document;
use crate::base::percent::encoded;
use crate::base::retry::{Retryable, backoff};
use crate::error::{Error, Reason, Result};
use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, StatusCode, Uri};
use object_store::RetryConfig;
use object_store::client::{HttpClient, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody};
use std::time::{Duration, Instant};
use url::Url;

/// The first pause between two attempts. Each further pause is twice as long.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Sends requests through the same connections as all others, and retries them.
#[derive(Clone)]
pub struct RetryingClient {
    http: HttpClient,
    retries: usize,
    patience: Duration,
}

/// A server's response with any status.
pub(super) struct StoreResponse {
    pub status: StatusCode,
    pub body: Bytes,
}

/// Returns the error of a request without a response. `action` describes the request.
pub(super) fn no_response(action: &str, e: HttpError) -> Error {
    let source = Box::new(e);
    let store = "store";
    store_error(action, object_store::Error::Generic { store, source })
}

/// Whether a failed attempt is worth a retry.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Retry {
    Yes,
    No,
}

/// Signs requests of one store.
#[async_trait]
pub(super) trait SignRequest: Sync {
    /// Signs a request with the credentials of now.
    async fn sign(&self, request: &mut HttpRequest) -> object_store::Result<()>;
}

impl RetryingClient {
    /// Returns a client that retries like the store's other requests.
    pub fn new(http: HttpClient, retry: &RetryConfig) -> Self {
        RetryingClient {
            http,
            retries: retry.max_retries,
            patience: retry.retry_timeout,
        }
    }

    /// Sends a request, and retries it if the server or the network is at fault. Signs each attempt anew,
    /// since a signature expires. `action` describes the request in messages.
    pub(super) async fn send(
        &self,
        action: &str,
        request: HttpRequest,
        signer: &dyn SignRequest,
    ) -> Result<StoreResponse> {
        let begun = Instant::now();
        let attempt = || self.attempt(action, &request, signer);
        let response = attempt
            .retry(backoff(FIRST_WAIT, LONGEST_WAIT, self.retries))
            .when(|(_, retry)| *retry == Retry::Yes && begun.elapsed() < self.patience);
        response.await.map_err(|(e, _)| e)
    }

    /// Signs and sends a request once. Returns the error and whether a retry may help.
    async fn attempt(
        &self,
        action: &str,
        request: &HttpRequest,
        signer: &dyn SignRequest,
    ) -> Result<StoreResponse, (Error, Retry)> {
        let mut signed = request.clone();
        let result = signer.sign(&mut signed).await;
        result.map_err(|e| (store_error(action, e), Retry::No))?;
        match self.send_once(signed).await {
            Ok(response) if !response.is_transient() => Ok(response),
            Ok(response) => Err((response.refusal(action), Retry::Yes)),
            Err(e) => {
                // As the crate does: what cannot be decoded stays so.
                let retry = match e.kind() {
                    HttpErrorKind::Decode => Retry::No,
                    _ => Retry::Yes,
                };
                Err((no_response(action, e), retry))
            }
        }
    }

    /// Sends a signed request once.
    pub(super) async fn send_once(&self, request: HttpRequest) -> Result<StoreResponse, HttpError> {
        let response = self.http.execute(request).await?;
        let (parts, body) = whole(response).await?;
        Ok(StoreResponse {
            status: parts.status,
            body,
        })
    }
}

impl StoreResponse {
    /// Returns whether the status is one of success.
    pub fn is_success(&self) -> bool {
        self.status.is_success()
    }

    /// Returns whether the same request may succeed in a moment.
    fn is_transient(&self) -> bool {
        let is_final = matches!(self.status.as_u16(), 501 | 505 | 507);
        self.status == StatusCode::TOO_MANY_REQUESTS || (self.status.is_server_error() && !is_final)
    }

    /// Returns the XML document in the body, or `None` if the body is something else.
    pub fn document(&self) -> Option<Document> {
        Document::read(&self.body)
    }

    /// Returns the code of a refusal, such as `NoSuchKey`, or an empty text.
    pub fn code(&self) -> String {
        match self.document() {
            Some(Document::Error(error)) => error.code.trim().to_owned(),
            _ => String::new(),
        }
    }

    /// Returns whether the response says that the object, or this version of it, does not exist.
    pub fn is_object_missing(&self) -> bool {
        self.status == StatusCode::NOT_FOUND
            && matches!(
                &*self.code(),
                "NoSuchKey" | "NoSuchVersion" | "BlobNotFound"
            )
    }

    /// Returns the response if it is a success.
    ///
    /// # Errors
    /// Fails with the refusal.
    pub fn accepted(self, action: &str) -> Result<Self> {
        if self.is_success() {
            Ok(self)
        } else {
            Err(self.refusal(action))
        }
    }

    /// Checks the response to a removal: it succeeded, or there was nothing to remove.
    pub fn removed(self, action: &str) -> Result<()> {
        match self.status {
            StatusCode::NOT_FOUND => Ok(()),
            _ => self.accepted(action).map(|_| ()),
        }
    }

    /// Returns the refusal as an error.
    pub fn refusal(&self, action: &str) -> Error {
        refusal_of_facts(self.status, &self.body).error(action)
    }

    /// Returns the error for a success whose body is not what was requested.
    pub fn not_understood(&self, action: &str) -> Error {
        Reason::Configuration.error(format!(
                "cannot {action}: the store answers {} with something else than was requested; it may not have this function: see `deltafold store check`",
                self.status
            ),
        )
    }
}

pub(super) fn query_string(pairs: &[(&str, &str)]) -> String {
    let pairs: Vec<String> = pairs
        .iter()
        .map(|(name, value)| format!("{}={}", encoded(name), encoded(value)))
        .collect();
    pairs.join("&")
}

/// Returns a request that is not signed yet.
pub(super) fn request(
    method: Method,
    url: &Url,
    headers: &[(&'static str, String)],
    body: String,
) -> Result<HttpRequest> {
    let invalid = |e: &dyn std::fmt::Display| Error::internal(format!("invalid request: {e}"));
    let mut request = HttpRequest::new(HttpRequestBody::from(body));
    *request.method_mut() = method;
    *request.uri_mut() = url.as_str().parse::<Uri>().map_err(|e| invalid(&e))?;
    for (name, value) in headers {
        let value = HeaderValue::from_str(value).map_err(|e| invalid(&e))?;
        request
            .headers_mut()
            .insert(HeaderName::from_static(name), value);
    }
    Ok(request)
}

/// Returns a response for a test.
#[cfg(test)]
pub(super) fn response(status: u16, body: &str) -> StoreResponse {
    StoreResponse {
        status: StatusCode::from_u16(status).unwrap(),
        body: body.to_owned().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_is_encoded_strictly() {
        let pairs = [("versions", ""), ("prefix", "a b/ü+&=~")];
        let query = query_string(&pairs);
        assert_eq!(query, "versions=&prefix=a%20b%2F%C3%BC%2B%26%3D~");
        // Decode it as a server does.
        let url = Url::parse(&format!("http://h/?{query}")).unwrap();
        let back: Vec<(String, String)> = url.query_pairs().into_owned().collect();
        assert_eq!(back[1].1, "a b/ü+&=~");
    }

    #[test]
    fn a_refusal_has_a_reason_and_its_code() {
        let xml = |code: &str| format!("<Error><Code>{code}</Code><Message>No.</Message></Error>");
        for (status, code, reason) in [
            (403, "AccessDenied", Reason::PermissionDenied),
            (401, "x", Reason::Unauthenticated),
            (404, "NoSuchBucket", Reason::NoSnapshots),
            (501, "NotImplemented", Reason::Configuration),
            (400, "InvalidRequest", Reason::Configuration),
            (503, "SlowDown", Reason::StoreUnreachable),
            (429, "x", Reason::StoreUnreachable),
        ] {
            let response = response(status, &xml(code));
            assert_eq!(response.code(), code);
            let e = response.refusal("do it");
            assert_eq!(e.reason(), reason, "{e}");
            assert!(e.to_string().starts_with("cannot do it: "), "{e}");
            assert!(e.to_string().contains(&format!("{code}: No.")), "{e}");
        }
        assert!(response(404, &xml("NoSuchKey")).is_object_missing());
        assert!(!response(404, &xml("NoSuchTagSet")).is_object_missing());
    }
}
