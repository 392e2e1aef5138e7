//! Every kind of request with the statuses and codes of many stores.

use super::*;
use crate::error::Reason as R;
use std::error::Error as _;

const PLAIN: Asked = Asked::plain(Write);
const WRITE: Asked = Asked {
    is_conditional: true,
    has_checksum: true,
    ..PLAIN
};

fn of(kind: Kind) -> Asked {
    Asked::plain(kind)
}

fn xml(code: &str, message: &str) -> Bytes {
    format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>{message}</Message></Error>")
        .into()
}

fn parts(status: u16) -> http::response::Parts {
    let response = http::Response::builder().status(status).body(()).unwrap();
    response.into_parts().0
}

/// Returns the status with which a response goes on, or the refusal.
fn answer(asked: Asked, status: u16, body: Bytes) -> Result<u16, Refusal> {
    let meant = meaning(asked, &parts(status), body);
    meant.map(|(status, _)| status.as_u16()).map_err(|e| {
        assert_eq!(e.kind(), HttpErrorKind::Decode);
        e.source()
            .unwrap()
            .downcast_ref::<Refusal>()
            .unwrap()
            .clone()
    })
}

fn judged(asked: Asked, status: u16, code: &str) -> Result<u16, R> {
    answer(asked, status, xml(code, "No.")).map_err(|refusal| refusal.reason)
}

#[test]
fn a_reason_is_that_of_the_request_and_the_code() {
    for (kinds, status, code, expected) in [
        // What will pass, whatever its status.
        (ANY, 400, "RequestTimeout", Ok(503)),
        (ANY, 403, "ThrottlingException", Ok(503)),
        (ANY, 429, "", Ok(429)),
        (ANY, 408, "", Ok(503)),
        (ANY, 500, "InternalError", Ok(500)),
        (ANY, 503, "SlowDown", Ok(503)),
        // Credentials.
        (ANY, 401, "", Err(R::Unauthenticated)),
        (ANY, 400, "ExpiredToken", Err(R::Unauthenticated)),
        (ANY, 403, "AccessDenied", Err(R::PermissionDenied)),
        (ANY, 403, "SignatureDoesNotMatch", Err(R::PermissionDenied)),
        (ANY, 404, "XAdminUserNotFound", Err(R::PermissionDenied)),
        (ANY, 403, "RequestTimeTooSkewed", Err(R::PermissionDenied)),
        // Full, archived, kept.
        (ANY, 403, "QuotaExceeded", Err(R::NoSpace)),
        (ANY, 400, "XMinioAdminBucketQuotaExceeded", Err(R::NoSpace)),
        (ANY, 507, "XMinioStorageFull", Err(R::NoSpace)),
        (ANY, 507, "", Err(R::NoSpace)),
        (ANY, 403, "InvalidObjectState", Err(R::Archived)),
        (ANY, 409, "BlobArchived", Err(R::Archived)),
        (ANY, 409, "blobBeingRehydrated", Err(R::Archived)),
        (ANY, 403, "RetentionPolicyNotMet", Err(R::ObjectLocked)),
        (ANY, 403, "objectUnderActiveHold", Err(R::ObjectLocked)),
        (ANY, 409, "BlobImmutableDueToPolicy", Err(R::ObjectLocked)),
        // Where it is not.
        (
            &[Page, Write, Part, Complete, Delete],
            404,
            "NoSuchBucket",
            Err(R::NoSnapshots),
        ),
        (
            &[Page, Write, Part, Complete],
            404,
            "ContainerNotFound",
            Err(R::NoSnapshots),
        ),
        (
            &[Page, Write, Part, Complete, Login],
            404,
            "NoSuchKey",
            Err(R::Configuration),
        ),
        (
            &[Page, Write, Part, Complete, Login],
            404,
            "",
            Err(R::Configuration),
        ),
        (&[Part, Complete, Delete], 404, "NoSuchUpload", Ok(404)),
        (&[Read, Delete], 404, "NoSuchKey", Ok(404)),
        (&[Read], 404, "NoSuchBucket", Ok(404)),
        // What is there already, or has changed.
        (WRITES, 409, "BlobAlreadyExists", Ok(409)),
        (WRITES, 409, "ConditionalRequestConflict", Ok(409)),
        (WRITES, 412, "PreconditionFailed", Ok(412)),
        (&[Read], 412, "", Ok(412)),
        (&[Read, Page], 409, "", Err(R::Configuration)),
        (&[Delete], 409, "OperationAborted", Ok(503)),
        // What the user can change.
        (ANY, 403, "PathStyleDomainForbidden", Err(R::Configuration)),
        (
            ANY,
            403,
            "SecondLevelDomainForbidden",
            Err(R::Configuration),
        ),
        (
            ANY,
            400,
            "IllegalLocationConstraintException",
            Err(R::Configuration),
        ),
        (
            ANY,
            400,
            "AuthorizationHeaderMalformed",
            Err(R::Configuration),
        ),
        (ANY, 407, "", Err(R::Configuration)),
        (ANY, 421, "", Err(R::Configuration)),
        (WRITES, 413, "", Err(R::Configuration)),
        (ANY, 400, "SomethingElse", Err(R::Configuration)),
        (ANY, 501, "NotImplemented", Err(R::Configuration)),
        (ANY, 505, "", Err(R::Configuration)),
        (ANY, 416, "InvalidRange", Ok(416)),
        // In the body of a success.
        (
            &[Part, Complete, Delete, Page],
            200,
            "InternalError",
            Ok(503),
        ),
        (&[Complete, Page], 200, "SomethingElse", Ok(503)),
        (&[Complete], 200, "PreconditionFailed", Ok(412)),
        (
            &[Complete, Page],
            200,
            "AccessDenied",
            Err(R::PermissionDenied),
        ),
        (&[Complete], 200, "InvalidPart", Err(R::Configuration)),
        (&[Complete], 200, "QuotaExceeded", Err(R::NoSpace)),
        (&[Write, Read], 200, "InternalError", Ok(200)),
    ] {
        for &kind in kinds {
            // The caller decides about these.
            let expected = match kind {
                Facts if expected.is_err() => Ok(status),
                Metadata if status == 403 && expected != Ok(503) => Ok(status),
                _ => expected,
            };
            let got = judged(of(kind), status, code);
            assert_eq!(got, expected, "{kind:?} {status} {code}");
        }
    }
    let swift = |kind| Asked {
        has_swift_token: true,
        ..of(kind)
    };
    let page = || Bytes::from("<html><h1>Not Found</h1><p>It is not there.</p></html>");
    for (kind, status, expected) in [
        (SwiftPage, 404, Err(R::NoSnapshots)),
        (Write, 404, Err(R::NoSnapshots)),
        (Read, 404, Ok(404)),
        (Read, 401, Ok(401)),
        (Read, 403, Err(R::PermissionDenied)),
        (Write, 498, Ok(503)),
    ] {
        let got = answer(swift(kind), status, page()).map_err(|refusal| refusal.reason);
        assert_eq!(got, expected, "{kind:?} {status}");
    }
    let full = answer(swift(Write), 413, "Upload exceeds quota.".into());
    assert_eq!(full.unwrap_err().reason, R::NoSpace);
}

#[test]
fn a_header_is_blamed_only_if_the_store_names_it() {
    let encrypting = Asked {
        encrypts: true,
        ..WRITE
    };
    let checksum = "Unsupported header 'x-amz-checksum-sha256' received for this API call.";
    let condition = "If-None-Match is not supported";
    let kms = "Server side encryption specified but KMS is not configured";
    let unnamed = "A header you provided implies functionality that is not implemented";
    for (asked, status, code, message, setting, says) in [
        (
            WRITE,
            400,
            "InvalidArgument",
            checksum,
            Some(WITHOUT_CHECKSUMS),
            "requestChecksumCalculation",
        ),
        (
            WRITE,
            501,
            "NotImplemented",
            checksum,
            Some(WITHOUT_CHECKSUMS),
            "",
        ),
        (
            WRITE,
            501,
            "NotImplemented",
            condition,
            Some(WITHOUT_CONDITIONS),
            "lock-lease",
        ),
        (PLAIN, 501, "NotImplemented", condition, None, "store check"),
        (
            encrypting,
            501,
            "NotImplemented",
            kms,
            None,
            "server_side_encryption",
        ),
        (
            encrypting,
            400,
            "InvalidRequest",
            kms,
            None,
            "server_side_encryption",
        ),
        (WRITE, 501, "NotImplemented", unnamed, None, "store check"),
        (
            WRITE,
            400,
            "InvalidRequest",
            "Object Lock requires another mode",
            None,
            "store check",
        ),
        (PLAIN, 400, "InvalidArgument", "No.", None, "check the URL"),
        (
            Asked {
                is_conditional: false,
                ..WRITE
            },
            400,
            "InvalidRequest",
            "Content-MD5 or a checksum is required",
            None,
            "check the URL",
        ),
        (WRITE, 400, "InvalidDigest", "No.", None, "check the URL"),
        (of(Page), 501, "NotImplemented", "No.", None, "store check"),
        (
            of(Read),
            400,
            "InvalidRequest",
            "stored using a form of Server Side Encryption",
            None,
            "sse_customer_key_base64",
        ),
        (
            of(Page),
            400,
            "",
            "Client sent an HTTP request to an HTTPS server.",
            None,
            "https://",
        ),
    ] {
        let refusal = answer(asked, status, xml(code, message)).unwrap_err();
        assert_eq!(refusal.setting, setting, "{status} {message}");
        let error = refusal.error("write x");
        assert_eq!(
            (error.reason(), error.setting()),
            (R::Configuration, setting)
        );
        let error = error.to_string();
        assert!(error.contains(says) && error.contains(message), "{error}");
        // Only a whole object is written once more without its condition.
        let may = asked.is_conditional && setting.is_none() && says == "store check";
        assert_eq!(refusal.may_be_condition, may, "{status} {message}");
    }
}

#[test]
fn a_body_becomes_one_line() {
    let said = |body: &str| {
        let error = error_in(body.as_bytes()).unwrap_or_default();
        words(&error, &HeaderMap::new(), body.as_bytes())
    };
    let error = "<?xml version=\"1.0\"?>\n<Error><Code>No</Code><Message>Not\nyou.</Message><Id>7</Id></Error>";
    assert_eq!(said(error), "No: Not you.");
    let sas = "<Error><Code>AuthenticationFailed</Code><Message>No.</Message><AuthenticationErrorDetail>Signature not valid in the specified time frame. String to sign used was r\nSECRET</AuthenticationErrorDetail></Error>";
    assert_eq!(
        said(sas),
        "AuthenticationFailed: No. Signature not valid in the specified time frame."
    );
    let page =
        "<html>\r\n<head><title>413 Request Entity Too Large</title></head><body>x</body></html>";
    assert_eq!(said(page), "413 Request Entity Too Large");
    assert_eq!(
        said("<html><h1>Unauthorized</h1><p>No</p></html>"),
        "Unauthorized No"
    );
    assert_eq!(said(&"x".repeat(400)).chars().count(), LONGEST_SHOWN + 1);
}

#[test]
fn a_proxy_is_named_and_may_be_what_refuses() {
    let mut parts = parts(403);
    parts.extensions.insert(Through("http://p:3128".to_owned()));
    for (body, advice) in [
        (
            Bytes::from("<html><body>DENIED</body></html>"),
            "the proxy may forbid",
        ),
        (xml("AccessDenied", "No."), "check the credentials"),
    ] {
        let e = meaning(of(Page), &parts, body).unwrap_err();
        let refusal = e.source().unwrap().downcast_ref::<Refusal>().unwrap();
        let text = refusal.error("list s3://b").to_string();
        assert!(text.contains("through the proxy http://p:3128"), "{text}");
        assert!(text.contains(advice), "{text}");
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
    let mut parts = parts(403);
    let date = Utc::now() + chrono::TimeDelta::hours(1);
    parts
        .headers
        .insert(DATE, date.to_rfc2822().parse().unwrap());
    let body = xml(
        "RequestTimeTooSkewed",
        "The difference is &lt;too&gt; large.",
    );
    let e = meaning(WRITE, &parts, body).unwrap_err();
    let text = e.source().unwrap().to_string();
    assert!(
        text.contains("<too> large. The clock of this machine is 3"),
        "{text}"
    );
    assert!(text.contains(" s behind the store's"), "{text}");
}
