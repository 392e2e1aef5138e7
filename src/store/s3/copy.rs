//! Copies of more than S3 copies at once: by ranges, put together on condition that the name is free.
//!
//! The object_store crate copies whole objects only. `publish` calls it.

use super::S3;
use crate::base::percent::encoded_path;
use crate::error::{Error, Reason, Result};
use crate::store::retrying_client::Answer;
use crate::store::xml::Document;
use crate::store::{Store, store_error};
use futures::{StreamExt, TryStreamExt};
use http::Method;
use object_store::MultipartId;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use quick_xml::escape::escape;
use std::collections::BTreeMap;

/// Ranges copied at once.
const AT_ONCE: usize = 8;
/// Of a range; S3 takes 10,000 of them.
const LARGEST_RANGE: u64 = 1 << 30;

/// What became of the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) enum Copied {
    /// The object has it.
    Done,
    /// Something has it.
    Taken,
}

/// The ranges of an object of so many bytes: first and last byte of each, both included.
fn ranges(bytes: u64, most: u64) -> Vec<(u64, u64)> {
    let most = most.min(LARGEST_RANGE);
    // The last may be short.
    (0..bytes.div_ceil(most))
        .map(|i| (i * most, ((i + 1) * most).min(bytes) - 1))
        .collect()
}

/// A part as the answer to its copy tells it: its XML for putting the parts together.
fn part_of(number: usize, copied: &BTreeMap<String, String>) -> Option<String> {
    let etag = copied.get("ETag").filter(|e| !e.is_empty())?;
    let etag = escape(etag.as_str());
    let mut part = format!("<PartNumber>{number}</PartNumber><ETag>{etag}</ETag>");
    // If the upload was begun with a checksum, each part has to name its own.
    for (name, text) in copied {
        if name.starts_with("Checksum") && name != "ChecksumType" {
            part.push_str(&format!("<{name}>{}</{name}>", escape(text.trim())));
        }
    }
    Some(format!("<Part>{part}</Part>"))
}

/// Copies on S3, step by step.
pub(in crate::store) struct Copying<'a> {
    s3: &'a S3,
    /// The most bytes that are copied at once.
    most: u64,
}

/// A copy that has all its bytes. Nobody sees it before it is completed.
pub(in crate::store) struct Prepared {
    id: MultipartId,
    /// The XML of each part.
    parts: Vec<String>,
}

impl Store {
    /// The way to copy step by step, if there is one.
    pub(in crate::store) fn copying(&self) -> Option<Copying<'_>> {
        let s3 = self.s3.as_deref()?;
        let most = self.largest_range?;
        Some(Copying { s3, most })
    }
}

impl Copying<'_> {
    /// The most bytes that are copied at once.
    pub(in crate::store) fn most(&self) -> u64 {
        self.most
    }

    /// Copies an object of so many bytes to where a name shall be.
    ///
    /// # Errors
    /// The store's. What was copied by then is given up.
    pub(in crate::store) async fn prepare(
        &self,
        (from, to): (&Path, &Path),
        bytes: u64,
    ) -> Result<Prepared> {
        let what = format!("copy {from} to {to}");
        let failed = |e| store_error(&what, e);
        // By the crate: with the encryption that the settings ask for.
        let id = self.s3.store.create_multipart(to).await.map_err(failed)?;
        let copied = self.copy_ranges(&what, (from, to), bytes, &id).await;
        match copied {
            Ok(parts) => Ok(Prepared { id, parts }),
            Err(e) => {
                self.abort(to, &id).await;
                Err(e)
            }
        }
    }

    /// Removes what was copied.
    pub(in crate::store) async fn give_up(&self, to: &Path, prepared: Prepared) {
        self.abort(to, &prepared.id).await;
    }

    async fn abort(&self, to: &Path, id: &MultipartId) {
        if let Err(e) = self.s3.store.abort_multipart(to, id).await {
            tracing::warn!("an unfinished upload of {to} could not be given up: {e}");
        }
    }

    async fn copy_ranges(
        &self,
        what: &str,
        (from, to): (&Path, &Path),
        bytes: u64,
        id: &str,
    ) -> Result<Vec<String>> {
        let s3 = self.s3;
        let source = format!("{}/{}", s3.bucket(), encoded_path(from.as_ref()));
        let ranges = ranges(bytes, self.most);
        // S3 takes ranges of large objects alone.
        let is_whole = ranges.len() <= 1;
        let source = &source;
        let copies = ranges.into_iter().enumerate();
        let copies = copies.map(|(i, (first, last))| async move {
            let number = i + 1;
            let shown = number.to_string();
            let query = [("partNumber", shown.as_str()), ("uploadId", id)];
            let mut headers = vec![("x-amz-copy-source", source.clone())];
            if !is_whole {
                headers.push(("x-amz-copy-source-range", format!("bytes={first}-{last}")));
            }
            let asked = s3.ask(what, Method::PUT, to, &query, &headers, String::new());
            let answer = asked.await?;
            if !answer.is_success() {
                return Err(refusal(what, &answer));
            }
            match answer.document() {
                Some(Document::CopyPartResult(copied)) => part_of(number, &copied),
                _ => None,
            }
            .ok_or_else(|| answer.not_understood(what))
        });
        futures::stream::iter(copies)
            .buffered(AT_ONCE)
            .try_collect()
            .await
    }

    /// Gives a copy its name, on condition that it is free if `if_free`.
    ///
    /// # Errors
    /// The store's. What was copied is given up then, and if the name is taken.
    pub(in crate::store) async fn complete(
        &self,
        to: &Path,
        prepared: Prepared,
        if_free: bool,
    ) -> Result<Copied> {
        let completed = self.try_complete(to, &prepared, if_free).await;
        if !matches!(completed, Ok(Copied::Done)) {
            self.give_up(to, prepared).await;
        }
        completed
    }

    async fn try_complete(
        &self,
        to: &Path,
        Prepared { id, parts }: &Prepared,
        if_free: bool,
    ) -> Result<Copied> {
        let (s3, what) = (self.s3, &format!("put {to} together"));
        let body = format!(
            "<CompleteMultipartUpload>{}</CompleteMultipartUpload>",
            parts.concat()
        );
        let condition = [("if-none-match", "*".to_owned())];
        let headers = if if_free { &condition[..] } else { &[] };
        let query = [("uploadId", id.as_str())];
        let asked = s3.ask(what, Method::POST, to, &query, headers, body);
        let answer = asked.await?;
        match answer.status {
            // It may say so after it has begun to answer.
            200..=299 if matches!(answer.document(), Some(Document::Error(_))) => {
                Err(answer.refusal(what))
            }
            200..=299 => Ok(Copied::Done),
            409 | 412 if if_free => Ok(Copied::Taken),
            _ => Err(refusal(what, &answer)),
        }
    }
}

fn refusal(what: &str, answer: &Answer) -> Error {
    match answer.status {
        404 => Reason::SnapshotVanished.error(format!(
            "cannot {what}: the object or the upload is gone: it was deleted meanwhile; run again"
        )),
        _ => answer.refusal(what),
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
