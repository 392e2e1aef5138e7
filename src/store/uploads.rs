//! What a plain listing does not show: whether the bucket keeps old versions (S3), and unfinished uploads (S3 and Swift).
//!
//! Lists uploads and aborts them; does not decide which.

use super::listing::Budget;
use super::retrying_client::StoreResponse;
use super::xml::{Document, UploadFields};
use super::{Store, store_error};
use crate::error::{Reason, Result};
use chrono::{DateTime, Utc};
use object_store::ObjectStoreExt;
use object_store::path::Path;

/// The most uploads of a page.
const PAGE: &str = "1000";

/// Whether a bucket keeps old versions of objects that are overwritten or deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Versioning {
    /// No: a deleted object is gone.
    Off,
    /// Yes: a deletion only hides an object.
    Enabled,
    /// No longer: there may be old versions, and no new ones are kept.
    Suspended,
    /// The store does not say, for this reason.
    Unknown(String),
}

/// A multipart upload that was neither completed nor aborted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnfinishedUpload {
    /// The path of the object that it would become, below the store's prefix.
    pub path: String,
    /// The store's ID of the upload.
    pub id: String,
    /// When the upload began, by the store's clock.
    pub begun: DateTime<Utc>,
}

impl Store {
    /// Returns whether the bucket keeps versions: `Off` on stores that are not S3.
    ///
    /// # Errors
    /// Fails with `StoreUnreachable`, `Unauthenticated`, or `NoSnapshots` if the bucket does not exist.
    pub fn versioning(&self) -> Result<Versioning> {
        let Some(s3) = &self.s3 else {
            return Ok(Versioning::Off);
        };
        let action = format!("ask whether {} keeps versions", self.url());
        let bucket = Path::default();
        let response = s3.get(&action, &bucket, &[("versioning", "")]);
        read_versioning(&action, &self.block_on(response)??)
    }

    /// Returns the ID of the version that a plain request sees, or `None` if the store does not say.
    ///
    /// # Errors
    /// Fails with the store's errors, and with `SnapshotVanished` if the object does not exist.
    pub fn current_version(&self, below: &str) -> Result<Option<String>> {
        match self.block_on(self.inner.head(&self.path(below)))? {
            Ok(meta) => Ok(meta.version),
            Err(object_store::Error::NotFound { .. }) => Err(Reason::SnapshotVanished.error(
                format!("{} was listed and is gone: run again", self.name(below)),
            )),
            Err(e) => Err(store_error(
                format!("read the headers of {}", self.name(below)),
                e,
            )),
        }
    }

    /// Returns the unfinished multipart uploads below the prefix. Some servers list only those of one named
    /// object, and abort old uploads by themselves.
    ///
    /// # Errors
    /// Fails with the errors of [`objects`](Self::objects), and with `Configuration` if the store has no such
    /// listing.
    pub fn uploads(&self) -> Result<Vec<UnfinishedUpload>> {
        let prefix = match self.path("").as_ref() {
            "" => String::new(),
            prefix => format!("{prefix}/"),
        };
        let Some(swift) = &self.swift else {
            return self.block_on(uploads_of(self, &prefix))?;
        };
        let unfinished = self.block_on(swift.unfinished(prefix))?;
        let failed = |e| store_error(format!("list the unfinished uploads in {}", self.url()), e);
        let mut uploads = Vec::new();
        for (path, id, begun) in unfinished.map_err(failed)? {
            let below = path.prefix_match(&self.prefix);
            let parts: Option<Vec<String>> =
                below.map(|parts| parts.map(|part| part.as_ref().to_owned()).collect());
            uploads.extend(parts.map(|parts| UnfinishedUpload {
                path: parts.join("/"),
                id,
                begun,
            }));
        }
        Ok(uploads)
    }

    /// Aborts an unfinished upload and frees its parts. Succeeds if it does not exist.
    ///
    /// # Errors
    /// Fails with the store's errors.
    pub fn abort_upload(&self, upload: &UnfinishedUpload) -> Result<()> {
        let action = format!("abort an unfinished upload of {}", self.name(&upload.path));
        let path = self.path(&upload.path);
        if let Some(swift) = &self.swift {
            let aborted = self.block_on(swift.abort(&path, &upload.id))?;
            return aborted.map_err(|e| store_error(action, e));
        }
        let query = [("uploadId", &*upload.id)];
        let response = self.s3(&action)?.delete(&action, &path, &query);
        self.block_on(response)??.removed(&action)
    }
}

/// Lists the unfinished uploads of all objects whose keys begin with `prefix` and can be named by our paths.
async fn uploads_of(store: &Store, prefix: &str) -> Result<Vec<UnfinishedUpload>> {
    let Some(s3) = &store.s3 else {
        return Ok(Vec::new());
    };
    let action = &format!("list the unfinished uploads in {}", store.url());
    let unclear = || {
        let error = format!("cannot {action}: the store's response cannot be understood");
        Reason::StoreUnreachable.error(error)
    };
    let mut uploads = Vec::new();
    let bucket = Path::default();
    let mut markers: [String; 2] = Default::default();
    let budget = Budget::default();
    loop {
        let mut query = vec![
            ("uploads", ""),
            ("encoding-type", "url"),
            ("max-uploads", PAGE),
            ("prefix", prefix),
        ];
        for (name, marker) in ["key-marker", "upload-id-marker"].iter().zip(&markers) {
            if !marker.is_empty() {
                query.push((*name, marker));
            }
        }
        let response = s3.get(action, &bucket, &query).await?.accepted(action)?;
        let Some(Document::ListMultipartUploadsResult(page)) = response.document() else {
            return Err(response.not_understood(action));
        };
        let entries = page.entries.len();
        for upload in page.entries {
            if let Some(path) = own_path(store, page.is_encoded, &upload) {
                uploads.push(upload_of(&upload, path).ok_or_else(unclear)?);
            }
        }
        if !page.is_truncated {
            return Ok(uploads);
        }
        let key = decoded(page.is_encoded, &page.next_key).filter(|key| !key.is_empty());
        let next = [key.ok_or_else(unclear)?, page.next_id];
        let paid = budget.pay(entries, next.iter().map(String::len).sum());
        paid.map_err(|e| e.error(action))?;
        markers = next;
    }
}

/// Returns an entry's path below the prefix, or `None` if our paths cannot name it: then it is a foreign
/// object.
fn own_path(store: &Store, is_encoded: bool, upload: &UploadFields) -> Option<String> {
    let key = decoded(is_encoded, upload.key.as_deref()?)?;
    let path = Path::parse(&key).ok().filter(|p| p.as_ref() == key)?;
    let below: Vec<_> = path.prefix_match(&store.prefix)?.collect();
    let below: Vec<&str> = below.iter().map(|part| part.as_ref()).collect();
    Some(below.join("/")).filter(|below| !below.is_empty())
}

/// Decodes a name on a page. The page says whether its names are encoded.
fn decoded(is_encoded: bool, text: &str) -> Option<String> {
    if !is_encoded {
        return Some(text.to_owned());
    }
    let spaced = text.replace('+', " ");
    let bytes = percent_encoding::percent_decode_str(&spaced);
    Some(bytes.decode_utf8().ok()?.into_owned())
}

fn upload_of(fields: &UploadFields, path: String) -> Option<UnfinishedUpload> {
    let begun = DateTime::parse_from_rfc3339(fields.initiated.as_deref()?).ok()?;
    Some(UnfinishedUpload {
        path,
        id: fields.upload_id.clone()?,
        begun: begun.to_utc(),
    })
}

fn read_versioning(action: &str, response: &StoreResponse) -> Result<Versioning> {
    match response.status.as_u16() {
        200..=299 => Ok(match response.document() {
            Some(Document::VersioningConfiguration(versioning)) => match &*versioning.status {
                "" => Versioning::Off,
                "Enabled" => Versioning::Enabled,
                "Suspended" => Versioning::Suspended,
                other => Versioning::Unknown(format!("the status of its versioning is {other}")),
            },
            _ => Versioning::Unknown("the store's response is not about versioning".to_owned()),
        }),
        404 if response.code() == "NoSuchBucket" => Err(response.refusal(action)),
        401 => Err(response.refusal(action)),
        _ => Ok(Versioning::Unknown(response.refusal(action).to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::super::retrying_client::response;
    use super::*;

    #[test]
    fn a_name_is_decoded_only_if_the_page_says_so() {
        assert_eq!(decoded(true, "a%20b+c%2F%C3%BC").unwrap(), "a b c/ü");
        // What is not encoded stays.
        assert_eq!(decoded(true, "a%2").unwrap(), "a%2");
        assert_eq!(decoded(true, "%ff"), None);
        assert_eq!(decoded(false, "a%20b+c").unwrap(), "a%20b+c");
    }

    #[test]
    fn an_upload_without_a_required_field_is_refused() {
        let upload = |inner: &str| {
            let xml = format!(
                "<ListMultipartUploadsResult><Upload>{inner}</Upload></ListMultipartUploadsResult>"
            );
            let Some(Document::ListMultipartUploadsResult(page)) = Document::read(xml.as_bytes())
            else {
                panic!("{xml}");
            };
            upload_of(&page.entries[0], "k".to_owned())
        };
        let id = "<Key>k</Key><UploadId>u1</UploadId>";
        let begun = "<Initiated>2026-11-21T01:02:03.000Z</Initiated>";
        assert_eq!(upload(&format!("{id}{begun}")).unwrap().id, "u1");
        assert_eq!(upload(id), None);
        assert_eq!(upload(begun), None);
    }

    #[test]
    fn a_bucket_without_a_versioning_status_has_none() {
        let read = |status, body: &str| read_versioning("ask", &response(status, body));
        let state = |s: &str| format!("<VersioningConfiguration>{s}</VersioningConfiguration>");
        assert_eq!(read(200, &state("")).unwrap(), Versioning::Off);
        assert_eq!(
            read(200, &state("<Status>Enabled</Status>")).unwrap(),
            Versioning::Enabled
        );
        assert_eq!(
            read(200, &state("<Status>Suspended</Status>")).unwrap(),
            Versioning::Suspended
        );
        for (status, body) in [(200, "<ListBucketResult/>"), (403, ""), (501, "")] {
            let parsed = read(status, body).unwrap();
            assert!(
                matches!(parsed, Versioning::Unknown(_)),
                "{status}: {parsed:?}"
            );
        }
        let gone = "<Error><Code>NoSuchBucket</Code></Error>";
        assert_eq!(read(404, gone).unwrap_err().reason(), Reason::NoSnapshots);
    }
}
