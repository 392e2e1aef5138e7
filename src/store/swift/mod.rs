//! A client for OpenStack Swift's own protocol, as an `ObjectStore`.
//!
//! opendal's client does not write on a condition, does not log in, and leaves the segments of deleted
//! objects behind. This one does not read settings: `open::swift` does, and makes the client.
//!
//! - `client`: sends requests, with retries and a token
//! - `login`: gets the token
//! - `pages`: lists objects
//! - `segments`: uploads large objects

mod client;
mod login;
mod pages;
mod segments;

pub(super) use login::Login;

use crate::base::percent::encoded_path;
use async_trait::async_trait;
use bytes::Bytes;
use chrono::{DateTime, Utc};
use client::{Request, failed, text};
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use http::header::{self, HeaderMap, HeaderName};
use http::{Method, StatusCode};
use login::Session;
use object_store::client::{HttpClient, HttpResponse};
use object_store::path::Path;
use object_store::{
    Attributes, CopyOptions, Error, Extensions, GetOptions, GetRange, GetResult, GetResultPayload,
    ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMode, PutMultipartOptions, PutOptions,
    PutPayload, PutResult, Result, RetryConfig,
};
use segments::SegmentUpload;
use serde_json::Value;
use std::fmt;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;

/// Deletions under way at once.
const PARALLEL_DELETIONS: usize = 10;

const X_OBJECT_MANIFEST: HeaderName = HeaderName::from_static("x-object-manifest");
const X_STATIC_LARGE_OBJECT: HeaderName = HeaderName::from_static("x-static-large-object");
/// A client for one container of Swift.
#[derive(Clone)]
pub(super) struct Swift(Arc<Inner>);

struct Inner {
    http: HttpClient,
    container: String,
    retry: RetryConfig,
    /// Returns the credentials as they are now: a Secret may change.
    login: Box<dyn Fn() -> Login + Send + Sync>,
    session: tokio::sync::Mutex<Option<Arc<Session>>>,
}

impl Swift {
    /// Returns a client for `container`. `login` is called before each request and returns the credentials of
    /// now.
    pub(super) fn new(
        http: HttpClient,
        container: String,
        retry: RetryConfig,
        login: Box<dyn Fn() -> Login + Send + Sync>,
    ) -> Self {
        Swift(Arc::new(Inner {
            http,
            container,
            retry,
            login,
            session: tokio::sync::Mutex::default(),
        }))
    }

    /// Writes an object without segments. If `is_new`, fails with `AlreadyExists` if the name is taken.
    async fn put(&self, path: &Path, payload: PutPayload, is_new: bool) -> Result<PutResult> {
        let mut request = Request::new(Method::PUT, Some(path))
            .header(header::CONTENT_TYPE, "application/octet-stream")?
            .body(payload);
        if is_new {
            request = request.header(header::IF_NONE_MATCH, "*")?;
        }
        let response = self.send(request).await.map_err(|e| match e {
            Error::Precondition { path, source } if is_new => Error::AlreadyExists { path, source },
            e => e,
        })?;
        Ok(put_result(&response))
    }

    /// Deletes an object and its segments.
    async fn remove(&self, path: &Path) -> Result<()> {
        let headers = self.head(path).await?;
        let delete = |path: &Path| Request::new(Method::DELETE, Some(path));
        if headers.contains_key(X_STATIC_LARGE_OBJECT) {
            let request = delete(path)
                .query("multipart-manifest=delete")
                .header(header::ACCEPT, "application/json")?;
            let body = self.send_for_body(request).await?;
            // Swift answers 200 in any case. The body has the real status.
            let response: Value = serde_json::from_slice(&body).unwrap_or_default();
            let status = response["Response Status"].as_str().unwrap_or_default();
            let has_errors = response["Errors"].as_array().is_some_and(|e| !e.is_empty());
            let is_gone = status.starts_with("404") && !has_errors;
            if !status.starts_with("200") && !is_gone {
                let text = format!("status code: {status}: {}", response["Errors"]);
                return Err(failed(format!("delete {path}: {text}")));
            }
            return Ok(());
        }
        self.send(delete(path)).await?;
        // Delete segments only if they are below the object's own name, as etcd-backup-restore writes them.
        // Others may belong to somebody else.
        let own = format!("{}/{path}", self.0.container);
        let has_own_segments = text(&headers, X_OBJECT_MANIFEST).is_some_and(|manifest| {
            let manifest = manifest.trim_end_matches('/');
            manifest == own || manifest == encoded_path(&own)
        });
        if has_own_segments {
            let segments: Vec<_> = self.listing(format!("{path}/")).try_collect().await?;
            for segment in segments {
                match self.send(delete(&segment.location)).await {
                    Ok(_) | Err(Error::NotFound { .. }) => {}
                    Err(e) => return Err(e),
                }
            }
        }
        Ok(())
    }

    /// Requests an object, or its headers only.
    async fn open(&self, path: &Path, options: &GetOptions) -> Result<HttpResponse> {
        let method = if options.head {
            Method::HEAD
        } else {
            Method::GET
        };
        let date = |d: &DateTime<Utc>| d.format("%a, %d %b %Y %H:%M:%S GMT").to_string();
        let range = options.range.as_ref();
        let mut request = Request::new(method, Some(path));
        for (name, value) in [
            (header::IF_MATCH, options.if_match.clone()),
            (header::IF_NONE_MATCH, options.if_none_match.clone()),
            (
                header::IF_MODIFIED_SINCE,
                options.if_modified_since.as_ref().map(date),
            ),
            (
                header::IF_UNMODIFIED_SINCE,
                options.if_unmodified_since.as_ref().map(date),
            ),
            (header::RANGE, range.map(GetRange::to_string)),
        ] {
            if let Some(value) = value {
                request = request.header(name, &value)?;
            }
        }
        self.send(request).await
    }

    /// Returns the bytes `range` of an object; `body` is the first response. If the connection breaks, the rest
    /// is requested again on condition of the same ETag.
    fn content(
        &self,
        path: Path,
        body: BoxStream<'static, Result<Bytes>>,
        range: Range<u64>,
        e_tag: Option<String>,
    ) -> BoxStream<'static, Result<Bytes>> {
        let read = ResumableRead {
            swift: self.clone(),
            path,
            e_tag,
            body,
            position: range.start,
            end: range.end,
            retries_left: self.0.retry.max_retries,
        };
        stream::try_unfold(read, ResumableRead::next).boxed()
    }
}

/// A read of an object that survives a broken connection.
struct ResumableRead {
    swift: Swift,
    path: Path,
    e_tag: Option<String>,
    body: BoxStream<'static, Result<Bytes>>,
    position: u64,
    end: u64,
    retries_left: usize,
}

impl ResumableRead {
    /// Returns the next piece and the read after it, or `None` at the end.
    async fn next(mut self) -> Result<Option<(Bytes, Self)>> {
        loop {
            let error = match self.body.next().await {
                Some(Ok(bytes)) => {
                    self.position += bytes.len() as u64;
                    return Ok(Some((bytes, self)));
                }
                None if self.position >= self.end => return Ok(None),
                None => failed(format!("{} ended too early", self.path)),
                Some(Err(e)) => e,
            };
            if self.position >= self.end {
                return Ok(None);
            }
            // Without an ETag nobody knows whether the object is still the same.
            if self.retries_left == 0 || self.e_tag.is_none() {
                return Err(error);
            }
            self.retries_left -= 1;
            let options = GetOptions {
                range: Some(GetRange::Bounded(self.position..self.end)),
                if_match: self.e_tag.clone(),
                ..GetOptions::default()
            };
            let response = self.swift.open(&self.path, &options).await?;
            if response.status() != StatusCode::PARTIAL_CONTENT {
                return Err(error);
            }
            self.body = response.into_body().bytes_stream().map_err(failed).boxed();
        }
    }
}

fn put_result(response: &HttpResponse) -> PutResult {
    PutResult {
        e_tag: text(response.headers(), header::ETAG),
        version: None,
        extensions: Extensions::new(),
    }
}

/// Reads an object's metadata from the headers of a response.
fn meta_of(location: Path, headers: &HeaderMap) -> ObjectMeta {
    let size = text(headers, header::CONTENT_LENGTH).and_then(|l| l.parse().ok());
    let modified = text(headers, header::LAST_MODIFIED)
        .and_then(|t| DateTime::parse_from_rfc2822(&t).ok())
        .map(|t| t.with_timezone(&Utc));
    ObjectMeta {
        location,
        last_modified: modified.unwrap_or_default(),
        size: size.unwrap_or_default(),
        e_tag: text(headers, header::ETAG),
        version: None,
    }
}

/// Returns the range of bytes in a partial response, and the size of the whole object.
fn content_range(headers: &HeaderMap) -> Option<(Range<u64>, u64)> {
    let text = text(headers, header::CONTENT_RANGE)?;
    let (range, whole) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (from, to) = range.split_once('-')?;
    let (from, to): (u64, u64) = (from.parse().ok()?, to.parse().ok()?);
    Some((from..to + 1, whole.parse().ok()?))
}

impl fmt::Debug for Swift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Swift({})", self.0.container)
    }
}

impl fmt::Display for Swift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Swift({})", self.0.container)
    }
}

#[async_trait]
impl ObjectStore for Swift {
    async fn put_opts(
        &self,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        match options.mode {
            PutMode::Overwrite => self.put(path, payload, false).await,
            PutMode::Create => self.put(path, payload, true).await,
            PutMode::Update(_) => Err(Error::NotImplemented {
                operation: "a conditional write over an existing object".to_owned(),
                implementer: "Swift".to_owned(),
            }),
        }
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        _: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        Ok(Box::new(SegmentUpload::new(self, path)))
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        let response = self.open(path, &options).await?;
        let headers = response.headers().clone();
        let mut meta = meta_of(path.clone(), &headers);
        let range = match (&options.range, options.head) {
            (Some(_), false) => {
                let (range, whole) = content_range(&headers).ok_or_else(|| {
                    failed(format!(
                        "a range of {path} was requested, and the whole came"
                    ))
                })?;
                meta.size = whole;
                range
            }
            _ => 0..meta.size,
        };
        let payload = if options.head {
            stream::empty().boxed()
        } else {
            let body = response.into_body().bytes_stream().map_err(failed).boxed();
            self.content(path.clone(), body, range.clone(), meta.e_tag.clone())
        };
        Ok(GetResult {
            payload: GetResultPayload::Stream(payload),
            meta,
            range,
            attributes: Attributes::default(),
            extensions: Extensions::new(),
        })
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let swift = self.clone();
        let remove = move |path: Result<Path>| {
            let swift = swift.clone();
            async move {
                let path = path?;
                swift.remove(&path).await?;
                Ok(path)
            }
        };
        paths.map(remove).buffered(PARALLEL_DELETIONS).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let is_object = |object: &ObjectMeta| segments::upload_of(&object.location).is_none();
        self.listing(folder(prefix))
            .try_filter(move |object| std::future::ready(is_object(object)))
            .boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let mut pages = pin!(self.pages(folder(prefix), "/"));
        let (mut objects, mut common_prefixes) = (Vec::new(), Vec::new());
        while let Some(page) = pages.try_next().await? {
            for entry in page {
                match &entry.subdir {
                    // A folder that no path can name holds no objects of ours.
                    Some(subdir) => common_prefixes.extend(Path::parse(subdir)),
                    None => objects.push(self.meta_of_entry(entry).await?),
                }
            }
        }
        Ok(ListResult {
            objects,
            common_prefixes,
            extensions: Extensions::new(),
        })
    }

    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        Err(Error::NotImplemented {
            operation: "a copy".to_owned(),
            implementer: "Swift".to_owned(),
        })
    }
}

/// Returns the prefix of the names in a folder.
fn folder(prefix: Option<&Path>) -> String {
    match prefix.map(Path::as_ref) {
        None | Some("") => String::new(),
        Some(prefix) => format!("{prefix}/"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    #[test]
    fn a_partial_response_names_its_range() {
        let mut headers = HeaderMap::new();
        headers.insert(
            header::CONTENT_RANGE,
            HeaderValue::from_static("bytes 5-9/20"),
        );
        assert_eq!(content_range(&headers), Some((5..10, 20)));
    }
}
