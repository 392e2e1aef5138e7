//! Uploads of large objects: segments, and a manifest that joins them.

use super::client::{Request, text};
use super::{Swift, put_result};
use crate::base::lock;
use crate::base::random::random_word;
use async_trait::async_trait;
use chrono::{DateTime, Utc};
use futures::TryStreamExt;
use http::{HeaderName, Method};
use object_store::path::Path;
use object_store::{Error, MultipartUpload, ObjectMeta, PutPayload, PutResult, Result, UploadPart};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The metadata of a manifest that names its upload.
const X_UPLOAD: HeaderName = HeaderName::from_static("x-object-meta-deltafold-upload");

/// An upload in segments, which are below the object's name: `NAME/WORD/00000000` is the first.
pub(super) struct SegmentUpload {
    swift: Swift,
    path: Path,
    /// Tells the segments of this upload from those of others.
    word: String,
    begun: usize,
    written: Arc<Mutex<Vec<Segment>>>,
}

/// Returns the object and the upload of a segment, by its path; `None` if the path is another object's.
pub(super) fn upload_of(segment: &Path) -> Option<(Path, String)> {
    let mut parts: Vec<_> = segment.parts().collect();
    let (number, word) = (parts.pop()?, parts.pop()?);
    let (number, word) = (number.as_ref(), word.as_ref());
    let is_number = number.len() == 8 && number.bytes().all(|b| b.is_ascii_digit());
    let is_word = word.len() == 16 && word.bytes().all(|b| b.is_ascii_hexdigit());
    let is_segment = is_number && is_word && !parts.is_empty();
    is_segment.then(|| (parts.into_iter().collect(), word.to_owned()))
}

/// A segment that was written.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Segment {
    number: usize,
    e_tag: String,
    bytes: usize,
}

impl fmt::Debug for SegmentUpload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} segments of {}", self.begun, self.path)
    }
}

impl SegmentUpload {
    pub(super) fn new(swift: &Swift, path: &Path) -> Self {
        SegmentUpload {
            swift: swift.clone(),
            path: path.clone(),
            word: format!("{:016x}", random_word()),
            begun: 0,
            written: Arc::default(),
        }
    }

    fn segment(&self, number: usize) -> Path {
        let folder = self.path.clone().join(self.word.as_str());
        folder.join(format!("{number:08}"))
    }
}

impl Swift {
    /// Returns the uploads below a prefix whose segments belong to no object: the object's path, the upload's word, and
    /// when the last segment was written.
    pub(in crate::store) async fn unfinished(
        &self,
        prefix: String,
    ) -> Result<Vec<(Path, String, DateTime<Utc>)>> {
        let mut found: BTreeMap<(Path, String), DateTime<Utc>> = BTreeMap::new();
        let mut listing = self.listing(prefix);
        while let Some(object) = listing.try_next().await? {
            if let Some(upload) = upload_of(&object.location) {
                let last = found.entry(upload).or_insert(object.last_modified);
                *last = (*last).max(object.last_modified);
            }
        }
        let mut unfinished = Vec::new();
        for ((path, word), begun) in found {
            let of_object = match self.head(&path).await {
                Ok(headers) => text(&headers, X_UPLOAD),
                Err(Error::NotFound { .. }) => None,
                Err(e) => return Err(e),
            };
            if of_object.as_ref() != Some(&word) {
                unfinished.push((path, word, begun));
            }
        }
        Ok(unfinished)
    }

    /// Deletes the segments of an upload.
    pub(in crate::store) async fn abort(&self, path: &Path, word: &str) -> Result<()> {
        let segments = self.listing(format!("{path}/{word}/"));
        let segments: Vec<ObjectMeta> = segments.try_collect().await?;
        for segment in segments {
            match self.remove(&segment.location).await {
                Ok(()) | Err(Error::NotFound { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

#[async_trait]
impl MultipartUpload for SegmentUpload {
    fn put_part(&mut self, part: PutPayload) -> UploadPart {
        let number = self.begun;
        self.begun += 1;
        let (swift, path, written) = (
            self.swift.clone(),
            self.segment(number),
            self.written.clone(),
        );
        Box::pin(async move {
            let bytes = part.content_length();
            let put = swift.put(&path, part, false).await?;
            let e_tag = put.e_tag.unwrap_or_default().trim_matches('"').to_owned();
            lock(&written).push(Segment {
                number,
                e_tag,
                bytes,
            });
            Ok(())
        })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let mut written = lock(&self.written).clone();
        written.sort();
        let mut manifest = Vec::new();
        for segment in written {
            let name = self.segment(segment.number);
            let path = format!("/{}/{name}", self.swift.0.container);
            manifest
                .push(json!({"path": path, "etag": segment.e_tag, "size_bytes": segment.bytes}));
        }
        let request = Request::new(Method::PUT, Some(&self.path))
            .query("multipart-manifest=put")
            .header(X_UPLOAD, &self.word)?
            .body(Value::from(manifest).to_string());
        Ok(put_result(&self.swift.send(request).await?))
    }

    async fn abort(&mut self) -> Result<()> {
        /// A segment that was sent whole before the abort may still arrive. So look for it once more after
        /// this time.
        const LATE: Duration = Duration::from_millis(500);
        let mut result = Ok(());
        let mut missing: Vec<usize> = (0..self.begun).collect();
        for pause in [Duration::ZERO, LATE] {
            if missing.is_empty() {
                break;
            }
            tokio::time::sleep(pause).await;
            for number in std::mem::take(&mut missing) {
                match self.swift.remove(&self.segment(number)).await {
                    Ok(()) => {}
                    Err(Error::NotFound { .. }) => missing.push(number),
                    Err(e) => result = Err(e),
                }
            }
        }
        result
    }
}
