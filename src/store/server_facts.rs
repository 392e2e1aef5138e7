//! Learns from responses what a server promises, and whether an object has tags, so that few tags have to be requested.
//!
//! On S3 and Azure, the response to a read has a header with the number of tags if the object has any. Not every server
//! sends the header. So a response without it means "no tags" only if the server is known to send it: by its name, or
//! because it has sent one.

use http::header::SERVER;
use http::{HeaderMap, StatusCode};
use object_store::client::HttpResponse;
use std::sync::atomic::{AtomicBool, Ordering};

/// The tag that keeps a snapshot out of every chain; its value is `true`.
pub const EXCLUDE_TAG: &str = "x-etcd-snapshot-exclude";
/// The headers with the number of an object's tags.
const COUNT_HEADERS: [&str; 2] = ["x-amz-tagging-count", "x-ms-tag-count"];
/// Servers of S3's protocol, by their header `Server`, that send the number of tags and obey the conditions of writes.
/// docs/stores.md lists them.
const KNOWN_SERVERS: [&str; 3] = ["AmazonS3", "MinIO", "VERSITYGW"];

/// What the responses have shown of a server, and of the tags of its objects.
#[derive(Debug, Default)]
pub struct ServerFacts {
    /// The store sends the header for objects with tags.
    responses_report_tags: AtomicBool,
    /// The server obeys the conditions of writes.
    keeps_conditions: AtomicBool,
}

/// Whether an object has tags, in the extensions of a response to a read. Without it, the response does not tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HasTags(pub bool);

impl ServerFacts {
    /// Notes that the store sends the header for objects with tags.
    pub fn set_responses_report_tags(&self) {
        self.responses_report_tags.store(true, Ordering::Relaxed);
    }

    /// Returns whether the store sends the header. Then an object that was read without it has no tags.
    pub fn responses_report_tags(&self) -> bool {
        self.responses_report_tags.load(Ordering::Relaxed)
    }

    /// Returns whether the server is known to obey the conditions of writes.
    pub fn keeps_conditions(&self) -> bool {
        self.keeps_conditions.load(Ordering::Relaxed)
    }

    /// Learns from the name of a server.
    pub(super) fn learn_server(&self, headers: &HeaderMap) {
        let name = headers.get(SERVER).and_then(|name| name.to_str().ok());
        if name.is_some_and(|name| KNOWN_SERVERS.contains(&name)) {
            self.set_responses_report_tags();
            self.keeps_conditions.store(true, Ordering::Relaxed);
        }
    }

    /// Notes in the response to a read whether the object has tags, if that is known.
    pub(super) fn note_tags(&self, response: &mut HttpResponse) {
        let is_read = matches!(
            response.status(),
            StatusCode::OK | StatusCode::PARTIAL_CONTENT
        );
        if is_read && let Some(has_tags) = self.has_tags(response.headers()) {
            response.extensions_mut().insert(HasTags(has_tags));
        }
    }

    fn has_tags(&self, headers: &HeaderMap) -> Option<bool> {
        let count = COUNT_HEADERS.iter().find_map(|name| headers.get(*name));
        if count.is_some() {
            self.set_responses_report_tags();
        }
        // Take a count that is not a number for "some".
        let has_tags = count.is_some_and(|count| count.to_str().is_ok_and(|n| n.trim() != "0"));
        self.responses_report_tags().then_some(has_tags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    #[test]
    fn a_count_header_shows_that_an_object_has_tags() {
        let has_tags = |facts: &ServerFacts, name: &'static str, value| {
            let mut headers = HeaderMap::new();
            headers.insert(name, HeaderValue::from_static(value));
            facts.has_tags(&headers)
        };
        let silent = ServerFacts::default();
        assert_eq!(has_tags(&silent, "etag", "x"), None);
        for name in COUNT_HEADERS {
            let facts = ServerFacts::default();
            for (count, tells) in [("1", true), ("0", false), ("many", true)] {
                assert_eq!(has_tags(&facts, name, count), Some(tells));
            }
            // A server that has told once always tells.
            assert_eq!(has_tags(&facts, "etag", "x"), Some(false));
        }
    }
}
