//! Listings of Swift: page after page, each from a marker on.

use super::client::{Request, failed, refused};
use super::{Swift, meta_of};
use crate::base::percent::encoded;
use crate::error::Reason;
use crate::store::answers::Refusal;
use crate::store::listing::{self, Budget, NO_LISTING};
use chrono::NaiveDateTime;
use futures::stream::{self, BoxStream};
use futures::{Stream, StreamExt, TryStreamExt};
use http::{Method, StatusCode};
use object_store::path::Path;
use object_store::{Error, ObjectMeta, Result};
use serde::Deserialize;

/// One entry of a page: an object, or a folder if `subdir` is set.
#[derive(Deserialize)]
pub(super) struct PageEntry {
    #[serde(default)]
    name: String,
    #[serde(default)]
    bytes: u64,
    #[serde(default)]
    hash: String,
    #[serde(default)]
    last_modified: String,
    pub(super) subdir: Option<String>,
}

impl Swift {
    /// Returns one page of a listing: the entries after `marker`.
    async fn page(&self, prefix: &str, delimiter: &str, marker: &str) -> Result<Vec<PageEntry>> {
        let mut query = format!("format=json&prefix={}", encoded(prefix));
        for (key, value) in [("delimiter", delimiter), ("marker", marker)] {
            if !value.is_empty() {
                query.push_str(&format!("&{key}={}", encoded(value)));
            }
        }
        let request = Request::new(Method::GET, None).query(query);
        let response = self.send(request).await?;
        if response.status() == StatusCode::NO_CONTENT {
            return Ok(Vec::new());
        }
        let body = response.into_body().bytes().await.map_err(failed)?;
        serde_json::from_slice(&body).map_err(|e| {
            let why = format!("{NO_LISTING} (it is no JSON array of objects: {e})");
            refused(Refusal::new(Reason::Configuration, why))
        })
    }

    /// Returns the metadata of an entry. An object of segments is listed without its size, so it is asked
    /// for.
    pub(super) async fn meta_of_entry(&self, entry: PageEntry) -> Result<ObjectMeta> {
        let is_odd = listing::is_odd(&entry.name);
        let location = if is_odd {
            Path::from(listing::stand_in(&entry.name))
        } else {
            Path::parse(&entry.name)?
        };
        if entry.bytes == 0 && !is_odd {
            match self.head(&location).await {
                Ok(headers) => return Ok(meta_of(location, &headers)),
                Err(Error::NotFound { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        let modified = entry.last_modified.trim_end_matches('Z');
        let modified = NaiveDateTime::parse_from_str(modified, "%Y-%m-%dT%H:%M:%S%.f");
        Ok(ObjectMeta {
            location,
            last_modified: modified.map(|t| t.and_utc()).unwrap_or_default(),
            size: entry.bytes,
            e_tag: (!entry.hash.is_empty()).then_some(entry.hash),
            version: None,
        })
    }

    /// Returns the pages of a listing, up to its end.
    pub(super) fn pages(
        &self,
        prefix: String,
        delimiter: &'static str,
    ) -> impl Stream<Item = Result<Vec<PageEntry>>> + Send + 'static {
        let cursor = PageCursor {
            swift: self.clone(),
            prefix,
            delimiter,
            marker: String::new(),
            budget: Budget::default(),
        };
        stream::try_unfold(cursor, PageCursor::next)
    }

    /// Returns all objects below a prefix.
    pub(super) fn listing(&self, prefix: String) -> BoxStream<'static, Result<ObjectMeta>> {
        let swift = self.clone();
        let meta = move |entry| {
            let swift = swift.clone();
            async move { swift.meta_of_entry(entry).await }
        };
        self.pages(prefix, "")
            .map_ok(|page| stream::iter(page.into_iter().map(Ok)))
            .try_flatten()
            .and_then(meta)
            .boxed()
    }
}

/// How far a listing has come.
struct PageCursor {
    swift: Swift,
    prefix: String,
    delimiter: &'static str,
    /// The last name so far.
    marker: String,
    budget: Budget,
}

impl PageCursor {
    /// Returns the next page and the cursor after it, or `None` at the end.
    async fn next(mut self) -> Result<Option<(Vec<PageEntry>, Self)>> {
        let page = self.swift.page(&self.prefix, self.delimiter, &self.marker);
        let page = page.await?;
        let Some(last) = page.last() else {
            return Ok(None);
        };
        let next = last.subdir.as_ref().unwrap_or(&last.name).clone();
        let names = page.iter().map(|entry| entry.name.len()).sum();
        self.budget.pay(page.len(), names).map_err(refused)?;
        self.marker = next;
        Ok(Some((page, self)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Login;
    use super::*;
    use async_trait::async_trait;
    use object_store::client::{HttpClient, HttpError, HttpRequest, HttpResponse, HttpService};
    use object_store::{ObjectStore, RetryConfig};
    use serde_json::{Value, json};
    use std::sync::Mutex;

    /// A server that answers with these pages, the last one first, and then with empty ones, or the last one again.
    #[derive(Debug)]
    struct Pages(Mutex<Vec<String>>, bool);

    #[async_trait]
    impl HttpService for Pages {
        async fn call(&self, _: HttpRequest) -> Result<HttpResponse, HttpError> {
            let mut pages = self.0.lock().unwrap();
            let page = pages.pop().unwrap_or_else(|| "[]".to_owned());
            if self.1 {
                pages.insert(0, page.clone());
            }
            Ok(HttpResponse::new(page.into_bytes().into()))
        }
    }

    fn client_of(pages: Vec<String>, again: bool) -> Swift {
        let http = HttpClient::new(Pages(Mutex::new(pages), again));
        let login = || Login::Token {
            url: "http://s.example/v1/a".to_owned(),
            token: "t".to_owned(),
        };
        let retry = RetryConfig::default();
        Swift::new(http, "c".to_owned(), retry, Box::new(login))
    }

    #[tokio::test]
    async fn a_listing_that_goes_in_circles_is_refused() {
        let page = |name: &str| json!([{"name": name, "bytes": 1}]).to_string();
        for names in [["a", "b"], ["a", "a"]] {
            let pages = || names.map(page).to_vec();
            let listed = client_of(pages(), true).list(None);
            let e = listed.try_collect::<Vec<_>>().await.unwrap_err();
            assert!(e.to_string().contains("does not end"), "{e}");
            let listed = client_of(pages(), true).list_with_delimiter(None).await;
            let e = listed.unwrap_err();
            assert!(e.to_string().contains("does not end"), "{e}");
        }
    }

    #[tokio::test]
    async fn odd_names_do_not_fail_the_listing() {
        let names = ["p/v2/../x", "p/v2/a", "p/v2/a/", "p/v2/a//b", "p/v2/x\ny"];
        let page: Vec<Value> = names
            .iter()
            .map(|name| json!({"name": name, "bytes": 1, "last_modified": "2026-11-21T00:00:00.5"}))
            .collect();
        let swift = client_of(vec![Value::from(page).to_string()], false);
        let listed: Vec<ObjectMeta> = swift.list(None).try_collect().await.unwrap();
        let mut listed_names = Vec::new();
        for object in &listed {
            let odd = listing::odd_key(&object.location);
            listed_names.push(odd.unwrap_or_else(|| object.location.to_string()));
        }
        assert_eq!(listed_names, names);
        assert_eq!(listed[1].location.as_ref(), names[1]);
    }
}
