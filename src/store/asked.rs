//! What a request is for: with it, `answers` says what a response means.
//!
//! The method, the query and the headers of a request tell it, so that requests of the object_store crate and of our own
//! clients are alike.

use http::{HeaderMap, HeaderName, Method, Uri};
use object_store::client::HttpRequest;

/// What a request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A page of a listing of objects: of S3, Google Cloud Storage, OSS or Azure.
    Page,
    /// A page of Swift's.
    SwiftPage,
    /// The content or the headers of an object.
    Read,
    /// A whole object.
    Write,
    /// A part of an upload, or what begins it.
    Part,
    /// The end of an upload, which gives the object its name.
    Complete,
    /// The removal of objects or of an upload.
    Delete,
    /// Tags, versions, locks, unfinished uploads. Many stores lack these, and the caller decides what that means.
    Facts,
    /// A login, or a token for one.
    Login,
    /// The metadata service of a machine.
    Metadata,
}

/// A request, as far as its response is judged by it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    pub(super) kind: Kind,
    pub(super) is_conditional: bool,
    pub(super) has_checksum: bool,
    /// It asks the store to encrypt.
    pub(super) encrypts: bool,
    /// It has a token of Swift's, which expires: the client logs in again.
    pub(super) has_swift_token: bool,
}

/// Headers of the metadata services of clouds.
const METADATA: [&str; 4] = [
    "metadata",
    "metadata-flavor",
    "x-aws-ec2-metadata-token",
    "x-aws-ec2-metadata-token-ttl-seconds",
];
/// Parameters of requests for facts about objects and buckets.
const FACTS: [&str; 10] = [
    "legal-hold",
    "location",
    "object-lock",
    "policy",
    "restype",
    "retention",
    "tagging",
    "uploads",
    "versioning",
    "versions",
];

impl Asked {
    /// A request without any of these headers.
    pub(super) const fn plain(kind: Kind) -> Self {
        Asked {
            kind,
            is_conditional: false,
            has_checksum: false,
            encrypts: false,
            has_swift_token: false,
        }
    }

    pub(super) fn by(request: &HttpRequest) -> Self {
        let headers = request.headers();
        let has = |part: &str| headers.keys().any(|name| name.as_str().contains(part));
        Asked {
            kind: Kind::of(request.method(), request.uri(), headers),
            is_conditional: has("if-match") || has("if-none-match") || has("if-generation-match"),
            has_checksum: has("x-amz-checksum-") || has("x-amz-sdk-checksum"),
            encrypts: has("server-side-encryption"),
            has_swift_token: headers.contains_key(HeaderName::from_static("x-auth-token")),
        }
    }
}

impl Kind {
    fn of(method: &Method, uri: &Uri, headers: &HeaderMap) -> Kind {
        let query = uri.query().unwrap_or_default();
        let pairs = || {
            query
                .split('&')
                .map(|p| p.split_once('=').unwrap_or((p, "")))
        };
        let is = |name: &str| pairs().any(|pair| pair.0 == name);
        let comp = pairs().find(|pair| pair.0 == "comp").map(|pair| pair.1);
        let asks_facts = comp == Some("tags") || FACTS.iter().any(|name| is(name));
        let is_read = matches!(*method, Method::GET | Method::HEAD);
        match method.as_str() {
            _ if METADATA.iter().any(|name| headers.contains_key(*name)) => Kind::Metadata,
            "GET" if comp == Some("list") || pairs().any(|p| p == ("list-type", "2")) => Kind::Page,
            "GET" if pairs().any(|pair| pair == ("format", "json")) => Kind::SwiftPage,
            "GET" if headers.contains_key("x-auth-key") || is("Action") => Kind::Login,
            "POST" if is("uploads") => Kind::Part,
            "GET" | "HEAD" | "PUT" if asks_facts => Kind::Facts,
            _ if is_read => Kind::Read,
            "PUT" if comp == Some("blocklist") || is("multipart-manifest") => Kind::Complete,
            "PUT" if comp == Some("block") || is("partNumber") => Kind::Part,
            "PUT" => Kind::Write,
            "POST" if is("uploadId") => Kind::Complete,
            "POST" if is("delete") || is("bulk-delete") || comp == Some("batch") => Kind::Delete,
            "POST" => Kind::Login,
            "DELETE" => Kind::Delete,
            _ => Kind::Facts,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    #[test]
    fn each_request_has_its_kind() {
        let none = HeaderMap::new();
        for (method, uri, kind) in [
            (Method::GET, "/b?list-type=2&prefix=v2", Kind::Page),
            (Method::GET, "/c?restype=container&comp=list", Kind::Page),
            (Method::GET, "/c?format=json&prefix=v2", Kind::SwiftPage),
            (Method::GET, "/b?versions=&prefix=list-type=2", Kind::Facts),
            (Method::GET, "/b/list-type=2", Kind::Read),
            (Method::GET, "/b/v2/Full?versionId=3", Kind::Read),
            (Method::HEAD, "/b/x?sv=2026&sig=prefix", Kind::Read),
            (Method::GET, "/b/x?tagging", Kind::Facts),
            (Method::GET, "/c/x?comp=tags", Kind::Facts),
            (Method::GET, "/b?uploads=", Kind::Facts),
            (Method::GET, "/?Action=AssumeRole", Kind::Login),
            (Method::PUT, "/b/x?tagging", Kind::Facts),
            (Method::PUT, "/b/x", Kind::Write),
            (Method::PUT, "/b/x?partNumber=1&uploadId=u", Kind::Part),
            (Method::PUT, "/c/x?comp=block&blockid=1", Kind::Part),
            (Method::PUT, "/c/x?comp=blocklist", Kind::Complete),
            (Method::PUT, "/c/x?multipart-manifest=put", Kind::Complete),
            (Method::POST, "/b/x?uploads", Kind::Part),
            (Method::POST, "/b/x?uploadId=u", Kind::Complete),
            (Method::POST, "/b?delete", Kind::Delete),
            (
                Method::POST,
                "/c?restype=container&comp=batch",
                Kind::Delete,
            ),
            (Method::POST, "/v3/auth/tokens", Kind::Login),
            (Method::DELETE, "/b/x?uploadId=u", Kind::Delete),
            (Method::PATCH, "/storage/v1/b/b/o/x", Kind::Facts),
        ] {
            let of = Kind::of(&method, &uri.parse().unwrap(), &none);
            assert_eq!(of, kind, "{method} {uri}");
        }
        for (header, kind) in [
            ("x-auth-key", Kind::Login),
            ("metadata", Kind::Metadata),
            ("x-aws-ec2-metadata-token", Kind::Metadata),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header, HeaderValue::from_static("x"));
            let of = Kind::of(&Method::GET, &Uri::from_static("/auth/v1.0"), &headers);
            assert_eq!(of, kind, "{header}");
        }
    }
}
