//! What the answers to reads tell of tags: whether the server tells at all, and which objects have some.
//!
//! S3 and Azure say with an object how many tags it has, if it has any; Google Cloud Storage shows the metadata
//! itself. So an object that is read anyway need not be asked for its tags. Not every server does it: until one
//! answer has shown that this server does, silence means nothing.

use crate::base::lock;
use http::{HeaderMap, Method, StatusCode, Uri};
use object_store::client::HttpResponse;
use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// The tag that keeps a snapshot out of every chain; its value is `true`.
pub const EXCLUDE_TAG: &str = "x-etcd-snapshot-exclude";
/// Names that are remembered. With more, each object may have tags.
const MOST_NAMES: usize = 100_000;
/// The headers that tell how many tags an object has.
const COUNTS: [&str; 2] = ["x-amz-tagging-count", "x-ms-tag-count"];
/// What Google Cloud Storage puts before the name of metadata.
const METADATA: &str = "x-goog-meta-";

/// What one store has told.
#[derive(Debug, Default)]
pub struct Tagged {
    /// An answer had the header, or the store is known to send it.
    tells: AtomicBool,
    /// Objects that have tags, by the last part of their path: a snapshot's name is enough, since one too many is
    /// only asked for in vain.
    names: Mutex<HashSet<String>>,
    /// More than can be remembered.
    overflowed: AtomicBool,
}

impl Tagged {
    /// The store is known to tell.
    pub fn set_tells(&self) {
        self.tells.store(true, Ordering::Relaxed);
    }

    /// Whether an object that was read without a word of tags has none.
    pub fn tells(&self) -> bool {
        self.tells.load(Ordering::Relaxed)
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

    /// Whether an object is known to have, or to have had, tags.
    pub fn has_tags(&self, path: &str) -> bool {
        let names = lock(&self.names);
        self.overflowed.load(Ordering::Relaxed) || names.contains(last_part(path))
    }

    /// Whether an object with tags was met at all.
    pub fn knows_any(&self) -> bool {
        let names = lock(&self.names);
        self.overflowed.load(Ordering::Relaxed) || !names.is_empty()
    }

    /// Takes in the answer to a request for `uri`, if it is an object.
    pub(super) fn take_in(&self, uri: &Uri, answer: &HttpResponse) {
        let is_read = matches!(
            answer.status(),
            StatusCode::OK | StatusCode::PARTIAL_CONTENT
        );
        if is_read {
            self.note(uri, answer.headers());
        }
    }

    fn note(&self, uri: &Uri, headers: &HeaderMap) {
        let is_some = |name: &&str| {
            let count = headers.get(*name).and_then(|v| v.to_str().ok());
            count.is_some_and(|count| count.trim() != "0")
        };
        let tells = COUNTS.iter().any(|name| headers.contains_key(*name));
        let marked = headers.contains_key(format!("{METADATA}{EXCLUDE_TAG}"));
        if tells {
            self.set_tells();
        }
        if marked || COUNTS.iter().any(is_some) {
            self.remember(uri.path());
        }
    }
}

fn last_part(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Whether a request reads an object: those for lists, tags and versions have a query.
pub(super) fn reads_object(method: &Method, uri: &Uri) -> bool {
    *method == Method::GET && uri.query().is_none_or(str::is_empty)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn headers(of: &[(&'static str, &'static str)]) -> HeaderMap {
        let of = of.iter().map(|&(name, value)| {
            let name = http::HeaderName::from_static(name);
            (name, HeaderValue::from_static(value))
        });
        of.collect()
    }

    fn noted(path: &'static str, of: &[(&'static str, &'static str)]) -> Tagged {
        let tagged = Tagged::default();
        tagged.note(&Uri::from_static(path), &headers(of));
        tagged
    }

    #[test]
    fn an_object_with_tags_is_told_from_silence() {
        let path = "http://h/b/p/v2/Incr-00000001-00000002-3";
        let silent = noted(path, &[("etag", "x")]);
        assert!(!silent.tells() && !silent.knows_any());
        assert!(!silent.has_tags("v2/Incr-00000001-00000002-3"));
        for name in COUNTS {
            let t = noted(path, &[(name, "1")]);
            assert!(t.tells() && t.knows_any() && t.has_tags("v2/Incr-00000001-00000002-3"));
            assert!(!t.has_tags("v2/Incr-00000001-00000002-4"));
            let none = noted(path, &[(name, "0")]);
            assert!(none.tells() && !none.knows_any());
            // What is no number is looked at.
            assert!(noted(path, &[(name, "many")]).knows_any());
        }
        let marked = noted(path, &[("x-goog-meta-x-etcd-snapshot-exclude", "true")]);
        assert!(marked.has_tags("v2/Incr-00000001-00000002-3"));
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
    fn what_cannot_be_remembered_may_have_tags() {
        let tagged = Tagged::default();
        for i in 0..=MOST_NAMES {
            assert!(!tagged.has_tags("v2/another"));
            tagged.remember(&format!("v2/{i}"));
        }
        assert!(tagged.has_tags("v2/another"));
    }
}
