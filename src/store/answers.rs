//! What the response to a request means. Stores say the same thing in different shapes: one says with 400 or in the
//! body of a 200 what another says with 503.
//!
//! Gives each response the status that its code stands for, so that the object_store crate and our own requests decide
//! about retries by the meaning. A refusal that no retry changes becomes an error at once. Called by `requests`.

use super::listing::asks_for_page;
use super::requests::query_names;
use super::xml::{Document, Refusal};
use crate::base::causes::causes;
use crate::base::tls;
use bytes::Bytes;
use chrono::{DateTime, Utc};
use http::header::{DATE, IF_MATCH, IF_NONE_MATCH, RETRY_AFTER};
use http::{HeaderMap, Method, StatusCode};
use object_store::client::{HttpError, HttpErrorKind, HttpRequest};
use std::time::Duration;

/// The longest pause that a server can ask for.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// The condition of a write to Google Cloud Storage.
const IF_GENERATION: &str = "x-goog-if-generation-match";
/// The beginning of the names of S3's headers with checksums.
const CHECKSUM: &str = "x-amz-checksum-";

/// What a request asks for, as far as its response is judged by it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Asked {
    is_conditional: bool,
    has_checksum: bool,
    /// It is about tags, versions, locks or uploads. Many stores lack these, and the caller decides what that means.
    is_optional: bool,
    /// A success may have an error in its body.
    is_post: bool,
    /// It is for a page of a listing, and a success may have an error in its body.
    is_page: bool,
}

impl Asked {
    pub(super) fn by(request: &HttpRequest) -> Self {
        const OPTIONAL: [&str; 5] = [
            "tagging",
            "versioning",
            "object-lock",
            "retention",
            "legal-hold",
        ];
        let is_read = request.method() == Method::GET;
        let headers = request.headers();
        let conditions = [IF_MATCH.as_str(), IF_NONE_MATCH.as_str(), IF_GENERATION];
        Asked {
            is_conditional: conditions.iter().any(|name| headers.contains_key(*name)),
            has_checksum: headers
                .keys()
                .any(|name| name.as_str().starts_with(CHECKSUM)),
            is_optional: query_names(request.uri())
                .any(|name| OPTIONAL.contains(&name) || (is_read && name == "uploads")),
            is_post: request.method() == Method::POST,
            is_page: asks_for_page(request.method(), request.uri()),
        }
    }
}

/// What a store refuses for good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// The condition of a write.
    Condition,
    /// A header with a checksum.
    Checksum,
    /// The whole call.
    Call,
    /// To overwrite or delete an object that a retention policy or a hold keeps.
    Locked,
}

/// A refusal that no retry changes. Its text has the status and the body.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(super) struct DefiniteRefusal {
    pub(super) refused: Refused,
    text: String,
}

/// Returns the status and the body that a response stands for.
///
/// # Errors
/// Fails with a [`DefiniteRefusal`] that no retry changes.
pub(super) fn meaning(
    asked: Asked,
    status: StatusCode,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<(StatusCode, Bytes), HttpError> {
    let may_be_error = asked.is_post || (asked.is_page && begins_with_error(&body));
    if status.is_redirection() || (status.is_success() && !may_be_error) {
        return Ok((status, body));
    }
    let refusal = match Document::read(&body) {
        Some(Document::Error(refusal)) => refusal,
        _ if status.is_success() => return Ok((status, body)),
        _ => Refusal::default(),
    };
    let meant = status_of(status, refusal.code.trim());
    if let Some(refused) = definite(asked, meant, &refusal) {
        let text = String::from_utf8_lossy(&body);
        let refusal = DefiniteRefusal {
            refused,
            text: format!("status code: {status}: {text}"),
        };
        return Err(HttpError::new(HttpErrorKind::Decode, refusal));
    }
    let body = match refusal.code.trim() {
        "RequestTimeTooSkewed" => with_skew(&refusal, headers).unwrap_or(body),
        _ => body,
    };
    Ok((meant, body))
}

/// Returns whether the beginning of a page has S3's element of an error. A page is long, and not parsed for it.
fn begins_with_error(page: &[u8]) -> bool {
    const BEGINNING: usize = 512;
    let beginning = &page[..page.len().min(BEGINNING)];
    beginning.windows(6).any(|part| part == b"<Error")
}

/// Returns the status that a code stands for.
fn status_of(status: StatusCode, code: &str) -> StatusCode {
    match code {
        "BandwidthLimitExceeded"
        | "Busy"
        | "InternalError"
        | "InternalFailure"
        | "OperationTimedOut"
        | "RequestLimitExceeded"
        | "RequestThrottled"
        | "RequestTimeout"
        | "ServerBusy"
        | "ServiceUnavailable"
        | "SlowDown"
        | "SlowDownRead"
        | "SlowDownWrite"
        | "Throttling"
        | "ThrottlingException"
        | "TooManyRequests" => StatusCode::SERVICE_UNAVAILABLE,
        "ExpiredToken" | "ExpiredTokenException" | "TokenRefreshRequired" => {
            StatusCode::UNAUTHORIZED
        }
        _ if !status.is_success() => status,
        "PreconditionFailed" => StatusCode::PRECONDITION_FAILED,
        "ConditionalRequestConflict" | "OperationAborted" => StatusCode::CONFLICT,
        "AccessDenied" => StatusCode::FORBIDDEN,
        "NoSuchBucket" | "NoSuchKey" | "NoSuchUpload" => StatusCode::NOT_FOUND,
        "NotImplemented" => StatusCode::NOT_IMPLEMENTED,
        "EntityTooLarge" | "EntityTooSmall" | "InvalidArgument" | "InvalidPart"
        | "InvalidPartOrder" | "InvalidRequest" | "MalformedXML" => StatusCode::BAD_REQUEST,
        // What fails after the server has said 200 fails on the way.
        _ => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// Returns what a refusal is about, if it is for good.
fn definite(asked: Asked, status: StatusCode, refusal: &Refusal) -> Option<Refused> {
    let lacks_call = matches!(
        status,
        StatusCode::NOT_IMPLEMENTED | StatusCode::HTTP_VERSION_NOT_SUPPORTED
    );
    let may_be_a_header = status == StatusCode::BAD_REQUEST
        && matches!(
            refusal.code.trim(),
            "" | "InvalidArgument"
                | "InvalidHeader"
                | "InvalidRequest"
                | "NotImplemented"
                | "UnsupportedHeader"
        );
    // Azure's, Cloudflare's and Google's names.
    const LOCKED: [&str; 5] = [
        "BlobImmutableDueToLegalHold",
        "BlobImmutableDueToPolicy",
        "ObjectLockedByBucketPolicy",
        "ObjectUnderActiveHold",
        "RetentionPolicyNotMet",
    ];
    if LOCKED
        .iter()
        .any(|code| code.eq_ignore_ascii_case(refusal.code.trim()))
    {
        return Some(Refused::Locked);
    }
    if asked.is_optional || !(lacks_call || may_be_a_header) {
        return None;
    }
    let message = refusal.message.to_ascii_lowercase();
    let is_about_checksum = message.contains("checksum");
    match lacks_call {
        _ if is_about_checksum => asked.has_checksum.then_some(Refused::Checksum),
        _ if asked.is_conditional => Some(Refused::Condition),
        true if asked.has_checksum && !asked.is_post => Some(Refused::Checksum),
        true => Some(Refused::Call),
        false => None,
    }
}

/// Returns the body of a refusal of this machine's clock that says how wrong it is.
fn with_skew(refusal: &Refusal, headers: &HeaderMap) -> Option<Bytes> {
    let date = headers.get(DATE)?.to_str().ok()?;
    let theirs = DateTime::parse_from_rfc2822(date).ok()?;
    let seconds = (Utc::now() - theirs.to_utc()).num_seconds();
    let direction = if seconds < 0 { "behind" } else { "ahead of" };
    let message = quick_xml::escape::escape(&*refusal.message);
    Some(
        format!(
            "<Error><Code>{}</Code><Message>{message} The clock of this machine is {} s {direction} the store's.</Message></Error>",
            refusal.code.trim(),
            seconds.abs()
        )
        .into(),
    )
}

/// Returns the error of a request without a response. A certificate that is not accepted stays so.
pub(super) fn without_vain_retries(e: HttpError) -> HttpError {
    match tls::is_final(&causes(&e)) {
        true => HttpError::new(HttpErrorKind::Decode, e),
        false => e,
    }
}

/// Returns the pause that a server asks for before another attempt.
pub(super) fn pause(status: StatusCode, headers: &HeaderMap) -> Option<Duration> {
    let asks = matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
    );
    let after = headers
        .get(RETRY_AFTER)
        .filter(|_| asks)?
        .to_str()
        .ok()?
        .trim();
    let pause = match after.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => {
            let until = DateTime::parse_from_rfc2822(after).ok()?;
            (until.to_utc() - Utc::now()).to_std().ok()?
        }
    };
    Some(pause.min(LONGEST_PAUSE))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITE: Asked = Asked {
        is_conditional: true,
        has_checksum: true,
        is_optional: false,
        is_post: false,
        is_page: false,
    };

    fn xml(code: &str, message: &str) -> Bytes {
        format!(
            "<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
        )
        .into()
    }

    fn meant(asked: Asked, status: u16, code: &str, message: &str) -> Result<u16, Refused> {
        let status = StatusCode::from_u16(status).unwrap();
        let meant = meaning(asked, status, &HeaderMap::new(), xml(code, message));
        meant.map(|(status, _)| status.as_u16()).map_err(|e| {
            let source = std::error::Error::source(&e).unwrap();
            source.downcast_ref::<DefiniteRefusal>().unwrap().refused
        })
    }

    #[test]
    fn a_code_counts_whatever_the_status() {
        let completion = Asked {
            is_post: true,
            ..WRITE
        };
        for (asked, status, code, expected) in [
            (WRITE, 400, "RequestTimeout", 503),
            (WRITE, 400, "SlowDown", 503),
            (WRITE, 403, "ThrottlingException", 503),
            (WRITE, 400, "ExpiredToken", 401),
            (WRITE, 403, "ExpiredTokenException", 401),
            (WRITE, 403, "AccessDenied", 403),
            (WRITE, 400, "BadDigest", 400),
            (WRITE, 412, "PreconditionFailed", 412),
            (WRITE, 429, "x", 429),
            (completion, 200, "InternalError", 503),
            (completion, 200, "SomethingElse", 503),
            (completion, 200, "PreconditionFailed", 412),
            (completion, 200, "AccessDenied", 403),
            (completion, 200, "InvalidPart", 400),
        ] {
            assert_eq!(
                meant(asked, status, code, "No."),
                Ok(expected),
                "{status} {code}"
            );
        }
        let result = Bytes::from(
            "<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>",
        );
        let (ok, no_headers) = (StatusCode::OK, HeaderMap::new());
        let (status, body) = meaning(completion, ok, &no_headers, result.clone()).unwrap();
        assert_eq!((status, body), (ok, result));
    }

    #[test]
    fn what_is_refused_for_good_is_told_apart() {
        let plain = Asked {
            is_conditional: false,
            ..WRITE
        };
        let tags = Asked {
            is_optional: true,
            ..plain
        };
        let header = "Unsupported header 'x-amz-checksum-sha256' received for this API call.";
        for (asked, status, code, message, expected) in [
            (WRITE, 501, "NotImplemented", "No.", Err(Refused::Condition)),
            (
                WRITE,
                400,
                "InvalidArgument",
                "No.",
                Err(Refused::Condition),
            ),
            (
                WRITE,
                400,
                "InvalidArgument",
                header,
                Err(Refused::Checksum),
            ),
            (
                plain,
                400,
                "InvalidArgument",
                header,
                Err(Refused::Checksum),
            ),
            (plain, 501, "NotImplemented", "No.", Err(Refused::Checksum)),
            (plain, 400, "InvalidArgument", "No.", Ok(400)),
            (WRITE, 400, "InvalidDigest", "No.", Ok(400)),
            (
                Asked::default(),
                501,
                "NotImplemented",
                "No.",
                Err(Refused::Call),
            ),
            (tags, 501, "NotImplemented", "No.", Ok(501)),
            (
                WRITE,
                403,
                "RetentionPolicyNotMet",
                "No.",
                Err(Refused::Locked),
            ),
            (
                plain,
                403,
                "objectUnderActiveHold",
                "No.",
                Err(Refused::Locked),
            ),
            (
                plain,
                403,
                "ObjectLockedByBucketPolicy",
                "No.",
                Err(Refused::Locked),
            ),
            (
                plain,
                409,
                "BlobImmutableDueToPolicy",
                "No.",
                Err(Refused::Locked),
            ),
        ] {
            assert_eq!(
                meant(asked, status, code, message),
                expected,
                "{status} {code} {message}"
            );
        }
    }

    #[test]
    fn a_pause_is_kept_within_limits() {
        let of = |status: u16, after: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(RETRY_AFTER, after.parse().unwrap());
            pause(StatusCode::from_u16(status).unwrap(), &headers)
        };
        assert_eq!(of(503, "2"), Some(Duration::from_secs(2)));
        assert_eq!(of(429, "100000"), Some(LONGEST_PAUSE));
        assert_eq!(of(500, "2"), None);
        assert_eq!(of(503, "soon"), None);
        let later = (Utc::now() + chrono::TimeDelta::seconds(20)).to_rfc2822();
        assert!(of(503, &later).unwrap() > Duration::from_secs(10));
    }

    #[test]
    fn a_wrong_clock_is_told_by_how_much() {
        let mut headers = HeaderMap::new();
        let date = Utc::now() + chrono::TimeDelta::hours(1);
        headers.insert(DATE, date.to_rfc2822().parse().unwrap());
        let body = xml(
            "RequestTimeTooSkewed",
            "The difference is &lt;too&gt; large.",
        );
        let (_, body) = meaning(WRITE, StatusCode::FORBIDDEN, &headers, body).unwrap();
        let text = String::from_utf8_lossy(&body);
        assert!(
            text.contains("&lt;too&gt; large. The clock of this machine is 3"),
            "{text}"
        );
        assert!(text.contains(" s behind the store's"), "{text}");
    }
}
