//! The way of requests that the object_store crate has no call for: tries, answers, refusals.
//!
//! `s3`, `azure` and `gcs` sign them; what is asked and what an answer means is theirs and `exclude`'s to know.

use super::errors::{redact, status_error, store_error};
use super::requests::{LONGEST_ANSWER, collect};
use super::xml::Document;
use crate::base::causes::causes;
use crate::base::percent::encoded;
use crate::base::retry::{Retryable, backoff};
use crate::error::{Error, Reason, Result};
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Uri};
use object_store::RetryConfig;
use object_store::client::{HttpClient, HttpRequest, HttpRequestBody};
use std::time::{Duration, Instant};
use url::Url;

/// How long the first wait between two tries is; each next one is twice as long.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// What sends requests, the way all others go, and tries them again.
#[derive(Clone)]
pub struct RetryingClient {
    http: HttpClient,
    retries: usize,
    patience: Duration,
}

/// What a server answered, whatever that was.
pub(super) struct Answer {
    pub status: u16,
    pub body: Bytes,
}

/// Whether a failed request is worth another try.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Try {
    Again,
    Once,
}

impl RetryingClient {
    /// `retry` as the store's other requests have it.
    pub fn new(http: HttpClient, retry: &RetryConfig) -> Self {
        RetryingClient {
            http,
            retries: retry.max_retries,
            patience: retry.retry_timeout,
        }
    }

    /// Sends a request, signed anew for each try since a signature has its time; it tries again if the server is at
    /// fault. `what` says what is done, for messages.
    pub(super) async fn send(
        &self,
        what: &str,
        request: HttpRequest,
        sign: impl AsyncFn(&mut HttpRequest) -> object_store::Result<()>,
    ) -> Result<Answer> {
        let begun = Instant::now();
        let attempt = || async {
            let mut signed = request.clone();
            let done = sign(&mut signed).await;
            done.map_err(|e| (store_error(what, e), Try::Once))?;
            match self.try_once(signed).await {
                Ok(answer) if !answer.is_passing() => Ok(answer),
                Ok(answer) => Err((answer.refusal(what), Try::Again)),
                Err(why) => {
                    let message = format!(
                        "cannot {what}: {why}; check the URL, the endpoint and the network"
                    );
                    Err((Reason::StoreUnreachable.error(message), Try::Again))
                }
            }
        };
        let answer = attempt
            .retry(backoff(FIRST_WAIT, LONGEST_WAIT, self.retries))
            .when(|(_, again)| *again == Try::Again && begun.elapsed() < self.patience);
        answer.await.map_err(|(e, _)| e)
    }

    async fn try_once(&self, request: HttpRequest) -> Result<Answer, String> {
        let answer = self
            .http
            .execute(request)
            .await
            .map_err(|e| redact(&causes(&e)))?;
        let status = answer.status().as_u16();
        let body = collect(answer.into_body().bytes_stream(), LONGEST_ANSWER).await;
        let Some(body) = body.map_err(|e| redact(&causes(&e)))? else {
            return Err(format!(
                "it answers with more than {LONGEST_ANSWER} bytes, so not with what was asked for"
            ));
        };
        Ok(Answer {
            status,
            body: body.into(),
        })
    }
}

impl Answer {
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// Whether the same request may succeed in a moment.
    fn is_passing(&self) -> bool {
        self.status == 429 || (self.status >= 500 && self.status != 501 && self.status != 505)
    }

    /// Its XML, if that is a document that we know: a server may answer with something else altogether.
    pub fn document(&self) -> Option<Document> {
        Document::read(&self.body)
    }

    /// The code of a refusal, such as `NoSuchKey`.
    pub fn code(&self) -> String {
        match self.document() {
            Some(Document::Error(refusal)) => refusal.code.trim().to_owned(),
            _ => String::new(),
        }
    }

    /// Whether the object, or this version of it, is not there.
    pub fn is_object_missing(&self) -> bool {
        self.status == 404
            && matches!(
                &*self.code(),
                "NoSuchKey" | "NoSuchVersion" | "BlobNotFound"
            )
    }

    /// Itself, if it is no refusal.
    ///
    /// # Errors
    /// The refusal.
    pub fn accepted(self, what: &str) -> Result<Self> {
        match self.is_success() {
            true => Ok(self),
            false => Err(self.refusal(what)),
        }
    }

    /// As [`accepted`](Self::accepted), of the removal of something that may be gone.
    pub fn removed(self, what: &str) -> Result<()> {
        match self.status {
            404 => Ok(()),
            _ => self.accepted(what).map(|_| ()),
        }
    }

    /// As an error.
    pub fn refusal(&self, what: &str) -> Error {
        let status = http::StatusCode::from_u16(self.status)
            .map(|s| s.to_string())
            .unwrap_or_default();
        let body = String::from_utf8_lossy(&self.body);
        status_error(what, self.status, &format!("status code: {status}: {body}"))
    }

    /// An answer that means nothing.
    pub fn not_understood(&self, what: &str) -> Error {
        Reason::Configuration.error(format!(
                "cannot {what}: the store answers {} with something else than was asked for; it may not have this function: see `deltafold store check`",
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

/// A request that is not signed yet.
pub(super) fn request(
    method: Method,
    url: &Url,
    headers: &[(&'static str, String)],
    body: String,
) -> Result<HttpRequest> {
    let odd = |e: &dyn std::fmt::Display| Error::internal(format!("a request that is none: {e}"));
    let mut request = HttpRequest::new(HttpRequestBody::from(body));
    *request.method_mut() = method;
    *request.uri_mut() = url.as_str().parse::<Uri>().map_err(|e| odd(&e))?;
    for (name, value) in headers {
        let value = HeaderValue::from_str(value).map_err(|e| odd(&e))?;
        request
            .headers_mut()
            .insert(HeaderName::from_static(name), value);
    }
    Ok(request)
}

/// What a server might answer.
#[cfg(test)]
pub(super) fn answer(status: u16, body: &str) -> Answer {
    Answer {
        status,
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
        // As the server takes it apart.
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
            let answer = answer(status, &xml(code));
            assert_eq!(answer.code(), code);
            let e = answer.refusal("do it");
            assert_eq!(e.reason(), reason, "{e}");
            assert!(e.to_string().starts_with("cannot do it: "), "{e}");
            assert!(e.to_string().contains(&format!("{code}: No.")), "{e}");
        }
        assert!(answer(404, &xml("NoSuchKey")).is_object_missing());
        assert!(!answer(404, &xml("NoSuchTagSet")).is_object_missing());
    }
}
