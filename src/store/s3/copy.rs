//! Copies on S3 by ranges: for objects that are too large for one request, and for copies that are prepared
//! before their name is known to be free.
//!
//! A prepared copy is an unfinished upload that nobody sees. Completing it can be conditional. The
//! object_store crate only copies whole objects. Called by `publish`.

use super::S3;
use crate::base::percent::encoded_path;
use crate::error::{Error, Reason, Result};
use crate::store::retrying_client::StoreResponse;
use crate::store::xml::Document;
use crate::store::{Store, store_error};
use futures::{StreamExt, TryStreamExt};
use http::Method;
use object_store::MultipartId;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use quick_xml::escape::escape;
use std::collections::BTreeMap;

/// Ranges that are copied at once.
const PARALLEL_RANGES: usize = 8;
/// The most bytes of a range. S3 accepts 10,000 ranges.
const LARGEST_RANGE: u64 = 1 << 30;

/// The result of a copy to a free name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) enum CopyOutcome {
    /// The object has the name.
    Done,
    /// Another object has the name.
    Taken,
}

/// Returns the ranges of an object: the first and the last byte of each.
fn ranges(bytes: u64, most: u64) -> Vec<(u64, u64)> {
    let most = most.min(LARGEST_RANGE);
    // The last range may be shorter.
    (0..bytes.div_ceil(most))
        .map(|i| (i * most, ((i + 1) * most).min(bytes) - 1))
        .collect()
}

/// Returns the XML of a part for completing the upload. `copied` is the response to the copy of the part.
fn part_of(number: usize, copied: &BTreeMap<String, String>) -> Option<String> {
    let etag = copied.get("ETag").filter(|e| !e.is_empty())?;
    let etag = escape(etag.as_str());
    let mut part = format!("<PartNumber>{number}</PartNumber><ETag>{etag}</ETag>");
    // An upload that was begun with checksums must be completed with the checksum of each part.
    for (name, text) in copied {
        if name.starts_with("Checksum") && name != "ChecksumType" {
            part.push_str(&format!("<{name}>{}</{name}>", escape(text.trim())));
        }
    }
    Some(format!("<Part>{part}</Part>"))
}

/// Copies objects by ranges.
pub(in crate::store) struct RangeCopier<'a> {
    s3: &'a S3,
    /// The most bytes that one request copies.
    most: u64,
}

/// A copy with all its bytes and without a name. Nobody sees it before it is completed.
pub(in crate::store) struct UnnamedCopy {
    id: MultipartId,
    /// The XML of each part, for completing the upload.
    parts: Vec<String>,
}

impl Store {
    /// Returns a copier, if this store is S3 and copies by ranges.
    pub(in crate::store) fn copier(&self) -> Option<RangeCopier<'_>> {
        let s3 = self.s3.as_deref()?;
        let most = self.largest_range?;
        Some(RangeCopier { s3, most })
    }
}

impl RangeCopier<'_> {
    /// Returns the most bytes that one request copies.
    pub(in crate::store) fn most(&self) -> u64 {
        self.most
    }

    /// Copies an object of `bytes` bytes, for the name `to`, without giving the name.
    ///
    /// # Errors
    /// Fails with the store's errors. Then the copy is removed.
    pub(in crate::store) async fn prepare(
        &self,
        (from, to): (&Path, &Path),
        bytes: u64,
    ) -> Result<UnnamedCopy> {
        let action = format!("copy {from} to {to}");
        let failed = |e| store_error(&action, e);
        // Begin with the crate's call: it adds the encryption in the settings.
        let id = self.s3.store.create_multipart(to).await.map_err(failed)?;
        let copied = self.copy_ranges(&action, (from, to), bytes, &id).await;
        match copied {
            Ok(parts) => Ok(UnnamedCopy { id, parts }),
            Err(e) => {
                self.abort(to, &id).await;
                Err(e)
            }
        }
    }

    /// Removes a copy.
    pub(in crate::store) async fn discard(&self, to: &Path, prepared: UnnamedCopy) {
        self.abort(to, &prepared.id).await;
    }

    async fn abort(&self, to: &Path, id: &MultipartId) {
        if let Err(e) = self.s3.store.abort_multipart(to, id).await {
            tracing::warn!("cannot abort an unfinished upload of {to}: {e}");
        }
    }

    async fn copy_ranges(
        &self,
        action: &str,
        (from, to): (&Path, &Path),
        bytes: u64,
        id: &str,
    ) -> Result<Vec<String>> {
        let s3 = self.s3;
        let source = format!("{}/{}", s3.bucket(), encoded_path(from.as_ref()));
        let ranges = ranges(bytes, self.most);
        // S3 accepts ranges only of large objects.
        let is_whole = ranges.len() <= 1;
        let source = &source;
        let copies = ranges.into_iter().enumerate().map(|(i, range)| {
            let range = (!is_whole).then_some(range);
            self.copy_part(action, source, to, (i + 1, range), id)
        });
        futures::stream::iter(copies)
            .buffered(PARALLEL_RANGES)
            .try_collect()
            .await
    }

    /// Copies a range, or the whole of the source, to a part of an upload. Returns the part's XML.
    async fn copy_part(
        &self,
        action: &str,
        source: &str,
        to: &Path,
        (number, range): (usize, Option<(u64, u64)>),
        id: &str,
    ) -> Result<String> {
        let shown = number.to_string();
        let query = [("partNumber", shown.as_str()), ("uploadId", id)];
        let mut headers = vec![("x-amz-copy-source", source.to_owned())];
        if let Some((first, last)) = range {
            headers.push(("x-amz-copy-source-range", format!("bytes={first}-{last}")));
        }
        let sent = self
            .s3
            .send(action, Method::PUT, to, &query, &headers, String::new());
        let response = sent.await?;
        if !response.is_success() {
            return Err(refusal(action, &response));
        }
        let part = match response.document() {
            Some(Document::CopyPartResult(copied)) => part_of(number, &copied),
            _ => None,
        };
        part.ok_or_else(|| response.not_understood(action))
    }

    /// Gives a copy its name; if `if_free`, on condition that the name is free.
    ///
    /// # Errors
    /// Fails with the store's errors. Then the copy is removed, as it is if the name is taken.
    pub(in crate::store) async fn complete(
        &self,
        to: &Path,
        prepared: UnnamedCopy,
        if_free: bool,
    ) -> Result<CopyOutcome> {
        let completed = self.try_complete(to, &prepared, if_free).await;
        if !matches!(completed, Ok(CopyOutcome::Done)) {
            self.discard(to, prepared).await;
        }
        completed
    }

    async fn try_complete(
        &self,
        to: &Path,
        UnnamedCopy { id, parts }: &UnnamedCopy,
        if_free: bool,
    ) -> Result<CopyOutcome> {
        let (s3, action) = (self.s3, &format!("complete the copy to {to}"));
        let body = format!(
            "<CompleteMultipartUpload>{}</CompleteMultipartUpload>",
            parts.concat()
        );
        let condition = [("if-none-match", "*".to_owned())];
        let headers = if if_free { &condition[..] } else { &[] };
        let query = [("uploadId", id.as_str())];
        let sent = s3.send(action, Method::POST, to, &query, headers, body);
        let response = sent.await?;
        match response.status {
            // S3 may report an error after it has sent the status.
            200..=299 if matches!(response.document(), Some(Document::Error(_))) => {
                Err(response.refusal(action))
            }
            200..=299 => Ok(CopyOutcome::Done),
            409 | 412 if if_free => Ok(CopyOutcome::Taken),
            _ => Err(refusal(action, &response)),
        }
    }
}

fn refusal(action: &str, response: &StoreResponse) -> Error {
    match response.status {
        404 => Reason::SnapshotVanished.error(format!(
            "cannot {action}: the object or the upload is gone: it was deleted meanwhile; run again"
        )),
        _ => response.refusal(action),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cover_every_byte_once() {
        for (bytes, most) in [(1, 5), (5, 5), (6, 5), (17, 4), (100, 1)] {
            let all = ranges(bytes, most);
            let covered: Vec<u64> = all.iter().flat_map(|&(a, b)| a..=b).collect();
            assert_eq!(covered, (0..bytes).collect::<Vec<_>>(), "{bytes} {most}");
            assert!(all.iter().all(|(a, b)| b - a < most));
        }
    }

    #[test]
    fn a_part_names_its_checksum() {
        let part = |number, xml: &str| match Document::read(xml.as_bytes()) {
            Some(Document::CopyPartResult(copied)) => part_of(number, &copied),
            other => panic!("{other:?}"),
        };
        let xml = "<CopyPartResult xmlns=\"urn:x\"><LastModified>x</LastModified><ETag>&quot;e&quot;</ETag><ChecksumSHA256>c=</ChecksumSHA256></CopyPartResult>";
        assert_eq!(
            part(3, xml).unwrap(),
            "<Part><PartNumber>3</PartNumber><ETag>&quot;e&quot;</ETag><ChecksumSHA256>c=</ChecksumSHA256></Part>"
        );
        assert_eq!(part(1, "<CopyPartResult></CopyPartResult>"), None);
    }
}
