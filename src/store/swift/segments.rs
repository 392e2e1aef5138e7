//! Uploads of large objects: segments, and a manifest that joins them.
//!
//! Called by `store::swift`.

use super::client::Request;
use super::{Swift, put_result};
use crate::base::lock;
use async_trait::async_trait;
use http::Method;
use object_store::path::Path;
use object_store::{Error, MultipartUpload, PutPayload, PutResult, Result, UploadPart};
use serde_json::{Value, json};
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// An upload in segments. They are beside the object and carry its name, so the cleanup after a killed
/// process finds them.
pub(super) struct SegmentUpload {
    swift: Swift,
    path: Path,
    begun: usize,
    written: Arc<Mutex<Vec<Segment>>>,
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
            begun: 0,
            written: Arc::default(),
        }
    }

    /// Returns the name of a segment: `00000000.NAME` for the first.
    fn segment(&self, number: usize) -> Path {
        let name = self.path.filename().unwrap_or_default();
        let mut parts: Vec<_> = self.path.parts().map(|p| p.as_ref().to_owned()).collect();
        parts.pop();
        parts.push(format!("{number:08}.{name}"));
        parts.into_iter().collect()
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
