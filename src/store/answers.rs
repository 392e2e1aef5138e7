//! What the response to a request means: one table, by what the request is for and by the store's code, then by the
//! status. Stores say the same thing in different shapes: one says with 400 or in the body of a 200 what another says
//! with 503.
//!
//! What will pass, what is missing and what is taken go on as the statuses by which the object_store crate decides.
//! Every other refusal becomes a [`Refusal`]: no retry changes it, and it has its reason and what to do.

use super::asked::{Asked, Kind};
use super::xml::{Document, StoreError};
use crate::base::causes::causes;
use crate::base::opt;
use crate::base::tls;
use crate::error::{Error, Reason};
use bytes::Bytes;
use chrono::{DateTime, Utc};
use http::header::{DATE, RETRY_AFTER};
use http::{HeaderMap, StatusCode};
use object_store::client::{HttpError, HttpErrorKind};
use std::fmt;
use std::time::Duration;

/// The longest pause that a server can ask for.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// The most bytes of a refusal that are read.
pub(super) const LONGEST_REFUSAL: usize = 64 << 10;
/// The most characters of a body that are shown.
const LONGEST_SHOWN: usize = 300;

/// What to do with a store that has no conditional writes.
pub(super) const NO_CONDITIONS: &str = "the store does not keep the conditions of writes: use another store; or, if nobody else writes to this prefix, set {store-option} conditional_put=disabled, and {lock-lease} for the commands that take a lock";
/// The settings with which a store may accept what it refused.
pub(super) const WITHOUT_CONDITIONS: &str = "conditional_put=disabled";
const WITHOUT_CHECKSUMS: &str = "checksum_algorithm=none";
const WITHOUT_PATH_STYLE: &str = "path_style=false";

/// What an answer means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meaning {
    /// As its status says.
    Stays,
    /// The same request may succeed in a moment.
    Later,
    /// There is no such object or upload.
    Missing,
    /// Another object has the name, or the object has changed.
    Taken,
    /// It is refused for good.
    Refused(Reason, &'static str),
    /// It is refused for good, and would be accepted with this setting.
    Setting(&'static str, &'static str),
    /// It is refused for good, and the store does not say which header it refuses.
    Unclear,
}

use Kind::{Complete, Delete, Facts, Login, Metadata, Page, Part, Read, SwiftPage, Write};
use Meaning::{Later, Missing, Refused, Setting, Stays, Taken, Unclear};

const ANY: &[Kind] = &[
    Page, SwiftPage, Read, Write, Part, Complete, Delete, Facts, Login, Metadata,
];
const WRITES: &[Kind] = &[Write, Part, Complete];
const CREDENTIALS: &str = "check the credentials and what they allow";
/// What to do with a proxy that refuses without a password.
pub(super) const PROXY_WANTS_PASSWORD: &str = "the proxy wants a user and a password: give them as http://USER:PASSWORD@HOST:PORT in HTTPS_PROXY";
const URL: &str = "check the URL and {store-option}";
const FULL: Meaning = Refused(
    Reason::NoSpace,
    "the store is full: make room in it, or raise the quota of the bucket",
);
const NO_BUCKET: Meaning = Refused(
    Reason::NoSnapshots,
    "create the bucket, or check its name in the URL",
);
const WRONG_ADDRESS: Meaning = Setting(
    WITHOUT_PATH_STYLE,
    "this address is not that of a bucket: check that the endpoint has no bucket in it, or set {store-option} path_style=false, which puts the bucket into the host name",
);
const BAD_TOKEN: Meaning = Refused(Reason::Unauthenticated, CREDENTIALS);
const BAD_KEY: Meaning = Refused(
    Reason::PermissionDenied,
    "check the access key (AWS_ACCESS_KEY_ID): the store does not know it",
);
const BAD_KMS_KEY: Meaning = Refused(
    Reason::Configuration,
    "the store cannot use the KMS key of the object: check the key and its policy",
);

/// What the codes of stores mean, and for which requests.
#[rustfmt::skip]
const CODES: &[(&[Kind], &[&str], Meaning)] = &[
    (ANY, &[
        "BandwidthLimitExceeded", "Busy", "InternalError", "InternalFailure", "OperationTimedOut", "RequestLimitExceeded",
        "RequestThrottled", "RequestTimeout", "ServerBusy", "ServiceUnavailable", "SlowDown", "SlowDownRead",
        "SlowDownWrite", "Throttling", "ThrottlingException", "TooManyRequests",
    ], Later),
    (ANY, &["ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"], BAD_TOKEN),
    (ANY, &[
        "InvalidAccessKeyId", "UserNotFound", "XAdminUserNotFound", "XMinioAdminNoSuchUser", "XMinioInvalidIAMCredentials",
    ], BAD_KEY),
    (ANY, &["SignatureDoesNotMatch"], Refused(
        Reason::PermissionDenied, "check the secret key (AWS_SECRET_ACCESS_KEY), and that no space is in it")),
    (ANY, &["RequestTimeTooSkewed"], Refused(Reason::PermissionDenied, "set the clock of this machine")),
    (ANY, &["AuthorizationHeaderMalformed"], Refused(
        Reason::Configuration, "give the bucket's region with {store-option} region=… or AWS_REGION")),
    (ANY, &["IllegalLocationConstraintException"], Refused(
        Reason::Configuration, "the endpoint is that of another region: give the bucket's own {store-option} region=… and endpoint=…")),
    (ANY, &["PathStyleDomainForbidden", "SecondLevelDomainForbidden", "VirtualHostDomainRequired"], Setting(
        WITHOUT_PATH_STYLE,
        "the store wants the bucket in the host name: set {store-option} path_style=false")),
    (ANY, &[
        "AccountQuotaExceeded", "BucketQuotaExceeded", "InsufficientStorage", "InsufficientStorageSpace", "QuotaExceeded",
        "QuotaExceededException", "StorageFull", "StorageQuotaExceeded", "XMinioAdminBucketQuotaExceeded",
        "XMinioStorageFull",
    ], FULL),
    (ANY, &["InvalidObjectState", "BlobArchived", "BlobBeingRehydrated"], Refused(
        Reason::Archived,
        "the object is archived: restore it at the store first (S3: RestoreObject; Azure: change its tier), and run again")),
    // Azure's, Cloudflare's and Google's names.
    (ANY, &[
        "BlobImmutableDueToLegalHold", "BlobImmutableDueToPolicy", "ObjectLockedByBucketPolicy", "ObjectUnderActiveHold",
        "RetentionPolicyNotMet",
    ], Refused(Reason::ObjectLocked, "a retention policy or a hold keeps the object")),
    (&[Read], &[
        "KMS.DisabledException", "KMS.KMSInvalidStateException", "KMS.NotFoundException", "KMSKeyDisabled",
    ], BAD_KMS_KEY),
    (&[Page, Write, Part, Complete, Delete, Facts], &[
        "ContainerNotFound", "FilesystemNotFound", "NoSuchBucket", "NoSuchContainer",
    ], NO_BUCKET),
    (&[Part, Complete, Delete], &["NoSuchUpload"], Missing),
    (WRITES, &["ConditionalRequestConflict", "OperationAborted", "PreconditionFailed"], Taken),
    (&[Delete, Read], &["OperationAborted"], Later),
];

/// What a status means if the code says nothing: for which requests, from which status to which.
#[rustfmt::skip]
const STATUSES: &[(&[Kind], u16, u16, Meaning)] = &[
    (ANY, 401, 401, BAD_TOKEN),
    (ANY, 403, 403, Refused(Reason::PermissionDenied, CREDENTIALS)),
    (&[Read, Delete, Facts], 404, 404, Missing),
    (&[Page, Write, Part, Complete], 404, 404, WRONG_ADDRESS),
    (&[Login], 404, 404, Refused(Reason::Configuration, "no login is at this address: check its URL (auth_url)")),
    (ANY, 407, 407, Refused(Reason::Configuration, PROXY_WANTS_PASSWORD)),
    (ANY, 408, 408, Later),
    (WRITES, 409, 409, Taken),
    (ANY, 412, 412, Taken),
    (WRITES, 413, 413, Refused(
        Reason::Configuration,
        "something before the store limits the size of a request, such as a reverse proxy (nginx: client_max_body_size): allow 64 MiB")),
    // A response to HEAD has no words.
    (&[Read], 400, 400, Refused(
        Reason::Configuration,
        "check the URL and {store-option}; for an object that is encrypted with a key of yours (SSE-C), give that key")),
    (ANY, 416, 416, Stays),
    // It says itself what to do.
    (ANY, 421, 421, Refused(Reason::Configuration, "")),
    (ANY, 429, 429, Later),
    // Swift's limit of requests.
    (ANY, 498, 498, Later),
    (ANY, 400, 499, Refused(Reason::Configuration, URL)),
    (ANY, 507, 507, FULL),
    (ANY, 500, 599, Later),
];

/// In the body of a 200, what has failed fails on the way, but for these codes.
#[rustfmt::skip]
const IN_A_SUCCESS: &[(&[&str], StatusCode)] = &[
    (&["AccessDenied"], StatusCode::FORBIDDEN),
    (&["PreconditionFailed"], StatusCode::PRECONDITION_FAILED),
    (&["NoSuchBucket", "NoSuchKey", "NoSuchUpload"], StatusCode::NOT_FOUND),
    (&["NotImplemented"], StatusCode::NOT_IMPLEMENTED),
    (&[
        "EntityTooLarge", "EntityTooSmall", "InvalidArgument", "InvalidPart", "InvalidPartOrder", "InvalidRequest",
        "MalformedXML",
    ], StatusCode::BAD_REQUEST),
];

/// A refusal that no retry changes.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{text}")]
pub(super) struct Refusal {
    pub(super) reason: Reason,
    /// What was answered: the status, and the store's own words.
    text: String,
    /// What to do; empty if the text says it.
    advice: &'static str,
    /// The setting (KEY=VALUE) with which the store may accept the same request.
    setting: Option<&'static str>,
    /// The condition of a write may be what is refused: the store does not say.
    pub(super) may_be_condition: bool,
}

impl Refusal {
    /// Returns a refusal that says itself what to do.
    pub(super) fn new(reason: Reason, text: impl Into<String>) -> Self {
        Refusal {
            reason,
            text: text.into(),
            advice: "",
            setting: None,
            may_be_condition: false,
        }
    }

    fn of(meaning: Meaning, text: String) -> Self {
        let unclear =
            "the store does not have this call, or one of its headers: see `deltafold store check`";
        let (reason, advice, setting) = match meaning {
            Refused(reason, advice) => (reason, advice, None),
            Setting(setting, advice) => (Reason::Configuration, advice, Some(setting)),
            Unclear => (Reason::Configuration, unclear, None),
            Missing => (Reason::NoSnapshots, "", None),
            Taken => (Reason::TargetExists, "", None),
            Stays | Later => (Reason::StoreUnreachable, "", None),
        };
        Refusal {
            advice,
            setting,
            ..Refusal::new(reason, text)
        }
    }

    /// Returns the refusal of a request that succeeds without its condition.
    pub(super) fn of_condition(self) -> Self {
        Self::of(Setting(WITHOUT_CONDITIONS, NO_CONDITIONS), self.text)
    }

    /// Returns the error. `action` says what was tried, and where.
    pub(super) fn error(&self, action: impl fmt::Display) -> Error {
        let advice = match self.advice {
            "" => String::new(),
            advice => format!("; {}", opt::fill(advice)),
        };
        let error = self
            .reason
            .error(format!("cannot {action}: {}{advice}", self.text));
        match self.setting {
            Some(setting) => error.with_setting(setting),
            None => error,
        }
    }
}

impl From<Refusal> for HttpError {
    fn from(refusal: Refusal) -> Self {
        // The crate does not retry what cannot be decoded.
        HttpError::new(HttpErrorKind::Decode, refusal)
    }
}

/// An extension of a response: the proxy that it came through.
#[derive(Debug, Clone)]
pub(super) struct Through(pub(super) String);

/// Returns the status and the body that a response stands for.
///
/// # Errors
/// Fails with a [`Refusal`] that no retry changes.
pub(super) fn meaning(
    asked: Asked,
    parts: &http::response::Parts,
    body: Bytes,
) -> Result<(StatusCode, Bytes), HttpError> {
    let status = parts.status;
    let may_be_error = match asked.kind {
        // A page is long, and not parsed for it.
        Page => begins_with_error(&body),
        Part | Complete | Delete => !body.is_empty(),
        _ => false,
    };
    if status.is_redirection() || (status.is_success() && !may_be_error) {
        return Ok((status, body));
    }
    let error = error_in(&body);
    if status.is_success() && error.is_none() {
        return Ok((status, body));
    }
    let error = error.unwrap_or_default();
    let body = body.slice(..body.len().min(LONGEST_REFUSAL));
    let meant = judge(asked, status, &error, &parts.headers, &body);
    let is_later = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
    let later = if is_later {
        status
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    // The caller decides; of a metadata service, the crate asks in another way after a 403.
    let is_callers = asked.kind == Facts || (asked.kind == Metadata && status.as_u16() == 403);
    if is_callers {
        return Ok((if meant == Later { later } else { status }, body));
    }
    let text = words(&error, &parts.headers, &body);
    let status = match meant {
        Stays => status,
        Later => later,
        Missing => StatusCode::NOT_FOUND,
        Taken if status == StatusCode::CONFLICT => status,
        Taken => StatusCode::PRECONDITION_FAILED,
        Refused(Reason::Unauthenticated, _) if asked.has_swift_token => StatusCode::UNAUTHORIZED,
        refused => {
            let through = parts.extensions.get::<Through>();
            return Err(Refusal {
                // The end of an upload is not tried without its condition.
                may_be_condition: refused == Unclear && asked.is_conditional && asked.kind == Write,
                ..refusal_of(refused, status, &error, &text, through)
            }
            .into());
        }
    };
    Ok((status, text.into()))
}

fn refusal_of(
    meant: Meaning,
    status: StatusCode,
    error: &StoreError,
    text: &str,
    through: Option<&Through>,
) -> Refusal {
    let who = match through {
        Some(Through(proxy)) => format!("the answer through the proxy {proxy} is"),
        None => "the store answers".to_owned(),
    };
    let text = match text {
        "" => format!("{who} {status}"),
        // A redirect, which `connect` has put into words.
        text if status == StatusCode::MISDIRECTED_REQUEST => text.to_owned(),
        text => format!("{who} {status}: {text}"),
    };
    let refusal = Refusal::of(meant, text);
    let is_proxys = through.is_some() && error.code.is_empty() && status == StatusCode::FORBIDDEN;
    Refusal {
        advice: if is_proxys {
            "it has no code of a store: the proxy may forbid this host"
        } else {
            refusal.advice
        },
        ..refusal
    }
}

/// Returns the refusal in a response to a request for facts, which the caller takes for one.
pub(super) fn refusal_of_facts(status: StatusCode, body: &[u8]) -> Refusal {
    let (error, headers) = (error_in(body).unwrap_or_default(), HeaderMap::new());
    let meant = judge(Asked::plain(Facts), status, &error, &headers, body);
    let text = words(&error, &headers, body);
    refusal_of(meant, status, &error, &text, None)
}

fn error_in(body: &[u8]) -> Option<StoreError> {
    match Document::read(body)? {
        Document::Error(error) => Some(error),
        _ => None,
    }
}

/// Returns whether the beginning of a page has S3's element of an error.
fn begins_with_error(page: &[u8]) -> bool {
    const BEGINNING: usize = 512;
    let beginning = &page[..page.len().min(BEGINNING)];
    beginning.windows(6).any(|part| part == b"<Error")
}

/// Returns what a refusal means.
fn judge(
    asked: Asked,
    status: StatusCode,
    error: &StoreError,
    headers: &HeaderMap,
    body: &[u8],
) -> Meaning {
    // A response to HEAD has no body. Azure says the code in a header, too.
    let in_header = headers.get("x-ms-error-code").and_then(|v| v.to_str().ok());
    let code = match error.code.trim() {
        "" => in_header.unwrap_or_default(),
        code => code,
    };
    let is_code = |known: &&str| known.eq_ignore_ascii_case(code);
    let by_code = CODES
        .iter()
        .find(|(kinds, codes, _)| kinds.contains(&asked.kind) && codes.iter().any(is_code));
    if let Some((_, _, meaning)) = by_code {
        return *meaning;
    }
    let status = if status.is_success() {
        let known = IN_A_SUCCESS.iter().find(|(codes, _)| codes.contains(&code));
        known.map_or(StatusCode::SERVICE_UNAVAILABLE, |(_, status)| *status)
    } else {
        status
    };
    if let Some(meaning) = by_words(asked, status, code, body) {
        return meaning;
    }
    let status = status.as_u16();
    // Swift has no codes, and its container is no part of the host.
    if status == 404 && asked.has_swift_token && !matches!(asked.kind, Read | Delete) {
        return NO_BUCKET;
    }
    let by_status = STATUSES.iter().find(|(kinds, from, to, _)| {
        kinds.contains(&asked.kind) && (*from..=*to).contains(&status)
    });
    by_status.map_or(Stays, |(_, _, _, meaning)| *meaning)
}

/// Returns what a refusal means for which stores have no code of its own: which header is refused. A header is blamed only
/// if the store names it.
fn by_words(asked: Asked, status: StatusCode, code: &str, body: &[u8]) -> Option<Meaning> {
    let words = String::from_utf8_lossy(body).to_ascii_lowercase();
    let names = |parts: &[&str]| parts.iter().any(|part| words.contains(part));
    if status == StatusCode::PAYLOAD_TOO_LARGE && names(&["quota"]) {
        return Some(FULL);
    }
    let is_denied = status == StatusCode::FORBIDDEN && WRITES.contains(&asked.kind);
    if is_denied && !asked.encrypts && names(&["explicit deny"]) {
        return Some(Refused(
            Reason::PermissionDenied,
            "check the credentials and what they allow; a policy may demand an encryption ({store-option} server_side_encryption)",
        ));
    }
    let lacks = matches!(status.as_u16(), 501 | 505);
    let may_be_a_header = status == StatusCode::BAD_REQUEST
        && matches!(
            code,
            "" | "InvalidArgument"
                | "InvalidHeader"
                | "InvalidRequest"
                | "NotImplemented"
                | "UnsupportedHeader"
        );
    if !lacks && !may_be_a_header {
        return None;
    }
    let encryption = [
        "server side encryption",
        "server-side-encryption",
        "server-side encryption",
        "kms",
    ];
    let condition = [
        "if-match",
        "if-none-match",
        "if-generation-match",
        "conditional",
        "precondition",
    ];
    Some(match asked.kind {
        _ if names(&["http request to an https server"]) => Refused(
            Reason::Configuration,
            "the server speaks TLS at this port: give an endpoint with https://",
        ),
        Read if names(&encryption) => Refused(
            Reason::Configuration,
            "the object is encrypted with a key of yours (SSE-C): give it with {store-option} server_side_encryption=sse-c and sse_customer_key_base64=…, or as sseCustomerKey in the Secret",
        ),
        _ if asked.encrypts && names(&encryption) => Refused(
            Reason::Configuration,
            "the store does not encrypt like this: leave {store-option} server_side_encryption out, or set up encryption (KMS) at the store",
        ),
        _ if asked.has_checksum && names(&["checksum"]) && !names(&["required"]) => Setting(
            WITHOUT_CHECKSUMS,
            "the store refuses headers with checksums: set {store-option} checksum_algorithm=none, or requestChecksumCalculation: when_required in the Secret",
        ),
        _ if asked.is_conditional && names(&condition) => {
            Setting(WITHOUT_CONDITIONS, NO_CONDITIONS)
        }
        _ if lacks || asked.is_conditional => Unclear,
        _ => return None,
    })
}

/// Returns what a body says, in one line: the code and the message of a store, the title of a page, or the beginning of
/// another text.
fn words(error: &StoreError, headers: &HeaderMap, body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let text = if error.code.is_empty() && error.message.is_empty() {
        title(&text).map_or_else(|| without_tags(&text), str::to_owned)
    } else {
        let is_skewed = error.code.trim() == "RequestTimeTooSkewed";
        let skew = is_skewed.then(|| skew(headers)).flatten();
        let skew = skew.unwrap_or_default();
        // Azure's detail ends with what was signed.
        let mut detail = error.authentication_error_detail.split("String to sign");
        let detail = detail.next().unwrap_or_default();
        format!("{}: {} {detail} {skew}", error.code, error.message)
    };
    let line = text.split_whitespace().collect::<Vec<&str>>().join(" ");
    let line = ["&#34;", "&quot;"]
        .iter()
        .fold(line, |line, quote| line.replace(quote, "\""));
    match line.char_indices().nth(LONGEST_SHOWN) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

fn title(page: &str) -> Option<&str> {
    let (_, rest) = page.split_once("<title>")?;
    let (title, _) = rest.split_once("</title>")?;
    Some(title).filter(|title| !title.trim().is_empty())
}

fn without_tags(text: &str) -> String {
    let mut inside = false;
    let shown = text.chars().map(|c| match c {
        '<' | '>' => {
            inside = c == '<';
            ' '
        }
        _ if inside => ' ',
        c => c,
    });
    shown.collect()
}

/// Returns how wrong this machine's clock is, by the time of a response.
fn skew(headers: &HeaderMap) -> Option<String> {
    let date = headers.get(DATE)?.to_str().ok()?;
    let theirs = DateTime::parse_from_rfc2822(date).ok()?;
    let seconds = (Utc::now() - theirs.to_utc()).num_seconds();
    let direction = if seconds < 0 { "behind" } else { "ahead of" };
    Some(format!(
        "The clock of this machine is {} s {direction} the store's.",
        seconds.abs()
    ))
}

/// Returns the error of a request without a response. A certificate that is not accepted stays so.
pub(super) fn without_vain_retries(e: HttpError) -> HttpError {
    if tls::is_final(&causes(&e)) {
        HttpError::new(HttpErrorKind::Decode, e)
    } else {
        e
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
mod tests;
