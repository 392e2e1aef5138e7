//! Learns from responses what a server promises, and which objects have tags, so that few tags have to be requested.
//!
//! On S3 and Azure, the response to a read has a header with the number of tags if the object has any; on
//! Google Cloud Storage it has the metadata itself. Not every server sends the header. So a response without
//! it means "no tags" only if the server is known to send it: by its name, or because it has sent one. Called by
//! `requests` for each response, and by `exclude`.

use crate::base::lock;
use http::header::SERVER;
use http::{HeaderMap, Method, StatusCode, Uri};
use object_store::client::HttpResponse;
use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// The tag that keeps a snapshot out of every chain; its value is `true`.
pub const EXCLUDE_TAG: &str = "x-etcd-snapshot-exclude";
/// The most names that are remembered. If there are more, every object may have tags.
const MOST_NAMES: usize = 100_000;
/// The headers with the number of an object's tags.
const COUNT_HEADERS: [&str; 2] = ["x-amz-tagging-count", "x-ms-tag-count"];
/// Servers of S3's protocol, by their header `Server`, that send the number of tags and obey the conditions of writes.
/// docs/stores.md lists them.
const KNOWN_SERVERS: [&str; 3] = ["AmazonS3", "MinIO", "VERSITYGW"];
/// The prefix of a header with metadata on Google Cloud Storage.
const METADATA_PREFIX: &str = "x-goog-meta-";

/// What the responses have shown of a server, and of the tags of its objects.
#[derive(Debug, Default)]
pub struct ServerFacts {
    /// The store sends the header for objects with tags.
    responses_report_tags: AtomicBool,
    /// The server obeys the conditions of writes.
    keeps_conditions: AtomicBool,
    /// The last parts of the paths of objects that may have tags. That is enough: a name too many costs one
    /// request.
    names: Mutex<HashSet<String>>,
    /// There are more names than are remembered.
    overflowed: AtomicBool,
}

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

    /// Remembers that an object may have tags.
    pub fn remember(&self, path: &str) {
        let mut names = lock(&self.names);
        match names.len() < MOST_NAMES {
            true => {
                names.insert(last_part(path).to_owned());
            }
            false => self.overflowed.store(true, Ordering::Relaxed),
        }
    }

    /// Returns whether an object has or may have tags.
    pub fn has_tags(&self, path: &str) -> bool {
        let names = lock(&self.names);
        self.overflowed.load(Ordering::Relaxed) || names.contains(last_part(path))
    }

    /// Returns whether any object may have tags.
    pub fn knows_any(&self) -> bool {
        let names = lock(&self.names);
        self.overflowed.load(Ordering::Relaxed) || !names.is_empty()
    }

    /// Learns from the response to a read of the object at `uri`.
    pub(super) fn learn_from(&self, uri: &Uri, response: &HttpResponse) {
        let is_read = matches!(
            response.status(),
            StatusCode::OK | StatusCode::PARTIAL_CONTENT
        );
        if is_read {
            self.learn_from_headers(uri, response.headers());
        }
    }

    fn learn_from_headers(&self, uri: &Uri, headers: &HeaderMap) {
        let mut has_tags = headers.contains_key(format!("{METADATA_PREFIX}{EXCLUDE_TAG}"));
        for name in COUNT_HEADERS {
            let Some(count) = headers.get(name) else {
                continue;
            };
            self.set_responses_report_tags();
            // Take a count that is not a number for "some".
            has_tags |= count.to_str().is_ok_and(|count| count.trim() != "0");
        }
        if has_tags {
            self.remember(uri.path());
        }
    }
}

fn last_part(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Returns whether a request reads an object. Requests for listings, tags and versions have a query.
pub(super) fn reads_object(method: &Method, uri: &Uri) -> bool {
    *method == Method::GET && uri.query().is_none_or(str::is_empty)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    /// Returns what is known after a read of `path` with one header in the response.
    fn knowledge(path: &'static str, name: &'static str, value: &'static str) -> ServerFacts {
        let mut headers = HeaderMap::new();
        headers.insert(name, HeaderValue::from_static(value));
        let knowledge = ServerFacts::default();
        knowledge.learn_from_headers(&Uri::from_static(path), &headers);
        knowledge
    }

    #[test]
    fn a_count_header_shows_that_an_object_has_tags() {
        let path = "http://h/b/p/v2/Incr-00000001-00000002-3";
        let silent = knowledge(path, "etag", "x");
        assert!(!silent.responses_report_tags() && !silent.knows_any());
        assert!(!silent.has_tags("v2/Incr-00000001-00000002-3"));
        for name in COUNT_HEADERS {
            let one = knowledge(path, name, "1");
            assert!(
                one.responses_report_tags()
                    && one.knows_any()
                    && one.has_tags("v2/Incr-00000001-00000002-3")
            );
            assert!(!one.has_tags("v2/Incr-00000001-00000002-4"));
            let none = knowledge(path, name, "0");
            assert!(none.responses_report_tags() && !none.knows_any());
            assert!(knowledge(path, name, "many").knows_any());
        }
        let excluded = knowledge(path, "x-goog-meta-x-etcd-snapshot-exclude", "true");
        assert!(excluded.has_tags("v2/Incr-00000001-00000002-3"));
    }

    #[test]
    fn only_reads_of_objects_count() {
        let uri = Uri::from_static;
        assert!(reads_object(&Method::GET, &uri("http://h/b/v2/x")));
        assert!(!reads_object(&Method::PUT, &uri("http://h/b/v2/x")));
        assert!(!reads_object(
            &Method::GET,
            &uri("http://h/b/v2/x?tagging=")
        ));
        assert!(!reads_object(&Method::GET, &uri("http://h/b?list-type=2")));
    }

    #[test]
    fn with_too_many_names_every_object_may_have_tags() {
        let knowledge = ServerFacts::default();
        for i in 0..=MOST_NAMES {
            assert!(!knowledge.has_tags("v2/another"));
            knowledge.remember(&format!("v2/{i}"));
        }
        assert!(knowledge.has_tags("v2/another"));
    }
}
