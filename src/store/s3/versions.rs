//! What a plain listing does not show: old versions, delete markers, unfinished uploads. S3 only.
//!
//! Lists and deletes them; does not decide which. Called by `ops::gc`, which deletes them, and
//! `ops::object_lock`, which locks them.

use crate::error::{Reason, Result};
use crate::store::listing::{ENDLESS, ListingProgress};
use crate::store::retrying_client::StoreResponse;
use crate::store::xml::{Document, EntryFields, PageEntry};
use crate::store::{Store, store_error};
use chrono::{DateTime, Utc};
use object_store::ObjectStoreExt;
use object_store::path::Path;

/// The most entries of a page.
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

/// A version of an object, or a delete marker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectVersion {
    /// The object's path below the store's prefix, with `/` between folders.
    pub path: String,
    /// The version's ID; `null` if it was written while the bucket kept no versions.
    pub version: String,
    /// Whether a request without a version sees this one.
    pub is_latest: bool,
    /// Whether this is a delete marker, not an object.
    pub is_delete_marker: bool,
    /// Size in the store; 0 for a delete marker.
    pub bytes: u64,
    /// When it was written, by the store's clock.
    pub modified: DateTime<Utc>,
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

    /// Returns all versions and delete markers in some folders below the prefix.
    ///
    /// # Errors
    /// Fails with the errors of [`objects`](Self::objects), and with `Configuration` if the store has no such
    /// listing.
    pub fn versions(&self, folders: &[&str]) -> Result<Vec<ObjectVersion>> {
        let mut all = Vec::new();
        self.each_version(folders, |version| {
            all.push(version);
            Ok(())
        })?;
        Ok(all)
    }

    /// Calls `each` for all versions, with one page of them in memory. The versions of one object follow each
    /// other, the newest first.
    ///
    /// # Errors
    /// Fails with the errors of [`versions`](Self::versions) and of `each`.
    pub fn each_version(
        &self,
        folders: &[&str],
        mut each: impl FnMut(ObjectVersion) -> Result<()>,
    ) -> Result<()> {
        for folder in folders {
            let prefix = format!("{}/", self.path(folder));
            self.block_on(self.versions_behind(prefix, &mut each))??;
        }
        Ok(())
    }

    /// Calls `each` for the versions of all objects whose keys begin with `prefix`.
    pub(in crate::store) async fn versions_behind(
        &self,
        prefix: String,
        mut each: impl FnMut(ObjectVersion) -> Result<()>,
    ) -> Result<()> {
        let action = format!("list the versions in {}", self.url());
        self.pages(&action, &VERSIONS, &prefix, |entry, path| match entry {
            PageEntry::Version(fields) => Some(each(version_of(&fields, path, false)?)),
            PageEntry::DeleteMarker(fields) => Some(each(version_of(&fields, path, true)?)),
            PageEntry::Upload(_) => Some(Ok(())),
        })
        .await
    }

    /// Deletes a version or a delete marker for good. Succeeds if it does not exist.
    ///
    /// # Errors
    /// Fails with the store's errors, and with `PermissionDenied` also if the version is locked.
    pub fn delete_version(&self, below: &str, version: &str) -> Result<()> {
        self.block_on(self.delete_version_of(below, version))?
    }

    pub(in crate::store) async fn delete_version_of(
        &self,
        below: &str,
        version: &str,
    ) -> Result<()> {
        let action = format!("delete the version {version} of {}", self.name(below));
        let (path, query) = (self.path(below), [("versionId", version)]);
        let response = self.s3(&action)?.delete(&action, &path, &query).await?;
        let is_wrong = response.status == 400;
        match response.removed(&action) {
            // versitygw's error for a version that does not exist.
            Err(e) if is_wrong && e.to_string().contains("Invalid version id") => Ok(()),
            // MinIO's error for a locked version has the status of a bad request.
            Err(e) if is_wrong && e.to_string().contains("WORM") => {
                Err(Reason::PermissionDenied.error(e.to_string()))
            }
            removed => removed,
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
        self.block_on(self.uploads_of(prefix))?
    }

    /// Returns the unfinished uploads of all objects whose keys begin with `prefix`.
    pub(in crate::store) async fn uploads_of(
        &self,
        prefix: String,
    ) -> Result<Vec<UnfinishedUpload>> {
        let action = format!("list the unfinished uploads in {}", self.url());
        let mut uploads = Vec::new();
        let pages = self.pages(&action, &UPLOADS, &prefix, |entry, path| {
            if let PageEntry::Upload(fields) = entry {
                uploads.push(upload_of(&fields, path)?);
            }
            Some(Ok(()))
        });
        pages.await?;
        Ok(uploads)
    }

    /// Aborts an unfinished upload and frees its parts. Succeeds if it does not exist.
    ///
    /// # Errors
    /// Fails with the store's errors.
    pub fn abort_upload(&self, upload: &UnfinishedUpload) -> Result<()> {
        self.block_on(self.give_up(upload))?
    }

    pub(in crate::store) async fn give_up(&self, upload: &UnfinishedUpload) -> Result<()> {
        let action = format!("abort an unfinished upload of {}", self.name(&upload.path));
        let (path, query) = (self.path(&upload.path), [("uploadId", &*upload.id)]);
        let response = self.s3(&action)?.delete(&action, &path, &query).await?;
        response.removed(&action)
    }

    /// Lists page after page. Calls `each` for entries whose keys our paths can name; `each` returns `None`
    /// if an entry lacks a field.
    async fn pages(
        &self,
        action: &str,
        listing: &Listing,
        prefix: &str,
        mut each: impl FnMut(PageEntry, String) -> Option<Result<()>>,
    ) -> Result<()> {
        let Some(s3) = &self.s3 else {
            return Ok(());
        };
        let unclear = || {
            let error = format!("cannot {action}: the store's response cannot be understood");
            Reason::StoreUnreachable.error(error)
        };
        let bucket = Path::default();
        let mut markers: [String; 2] = Default::default();
        let mut progress = ListingProgress::default();
        loop {
            let mut query = vec![
                (listing.subresource, ""),
                ("encoding-type", "url"),
                (listing.size, PAGE),
                ("prefix", prefix),
            ];
            for (name, marker) in listing.markers.iter().zip(&markers) {
                if !marker.is_empty() {
                    query.push((*name, marker));
                }
            }
            let response = s3.get(action, &bucket, &query).await?.accepted(action)?;
            let Some(Document::ListVersionsResult(page)) = response.document() else {
                return Err(response.not_understood(action));
            };
            let entries = page.entries.len();
            for entry in page.entries {
                if let Some(path) = self.own_path(page.is_encoded, &entry) {
                    each(entry, path).ok_or_else(unclear)??;
                }
            }
            if !page.is_truncated {
                return Ok(());
            }
            let key = decoded(page.is_encoded, &page.next_key).filter(|key| !key.is_empty());
            let next = [key.ok_or_else(unclear)?, page.next_id];
            if !progress.may_end(entries, &next) {
                return Err(Reason::StoreUnreachable.error(format!("cannot {action}: {ENDLESS}")));
            }
            markers = next;
        }
    }

    /// Returns an entry's path below the prefix, or `None` if our paths cannot name it: then it is a foreign
    /// object.
    fn own_path(&self, is_encoded: bool, entry: &PageEntry) -> Option<String> {
        let (PageEntry::Version(fields)
        | PageEntry::DeleteMarker(fields)
        | PageEntry::Upload(fields)) = entry;
        let key = decoded(is_encoded, fields.key.as_deref()?)?;
        let path = Path::parse(&key).ok().filter(|p| p.as_ref() == key)?;
        let below: Vec<_> = path.prefix_match(&self.prefix)?.collect();
        let below: Vec<&str> = below.iter().map(|part| part.as_ref()).collect();
        Some(below.join("/")).filter(|below| !below.is_empty())
    }
}

/// The parameters of a listing.
struct Listing {
    subresource: &'static str,
    size: &'static str,
    /// The parameters with which a page begins: a key, and the ID of a version or upload of it.
    markers: [&'static str; 2],
}

const VERSIONS: Listing = Listing {
    subresource: "versions",
    size: "max-keys",
    markers: ["key-marker", "version-id-marker"],
};

const UPLOADS: Listing = Listing {
    subresource: "uploads",
    size: "max-uploads",
    markers: ["key-marker", "upload-id-marker"],
};

/// Decodes a name on a page. The page says whether its names are encoded.
fn decoded(is_encoded: bool, text: &str) -> Option<String> {
    if !is_encoded {
        return Some(text.to_owned());
    }
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(b) = bytes.next() {
        out.push(match b {
            b'+' => b' ',
            b'%' => {
                let hex = [bytes.next()?, bytes.next()?];
                u8::from_str_radix(std::str::from_utf8(&hex).ok()?, 16).ok()?
            }
            b => b,
        });
    }
    String::from_utf8(out).ok()
}

fn version_of(fields: &EntryFields, path: String, is_delete_marker: bool) -> Option<ObjectVersion> {
    Some(ObjectVersion {
        path,
        version: fields.version_id.clone()?,
        is_latest: fields.is_latest.as_deref()? == "true",
        is_delete_marker,
        bytes: match is_delete_marker {
            true => 0,
            false => fields.size.as_deref()?.parse().ok()?,
        },
        modified: time(fields.last_modified.as_deref())?,
    })
}

fn upload_of(fields: &EntryFields, path: String) -> Option<UnfinishedUpload> {
    Some(UnfinishedUpload {
        path,
        id: fields.upload_id.clone()?,
        begun: time(fields.initiated.as_deref())?,
    })
}

fn time(text: Option<&str>) -> Option<DateTime<Utc>> {
    Some(DateTime::parse_from_rfc3339(text?).ok()?.to_utc())
}

fn read_versioning(action: &str, response: &StoreResponse) -> Result<Versioning> {
    match response.status {
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
    use super::*;

    #[test]
    fn a_name_is_decoded_only_if_the_page_says_so() {
        assert_eq!(decoded(true, "a%20b+c%2F%C3%BC").unwrap(), "a b c/ü");
        assert_eq!(decoded(true, "a%2"), None);
        assert_eq!(decoded(true, "a%zz"), None);
        assert_eq!(decoded(false, "a%20b+c").unwrap(), "a%20b+c");
    }

    #[test]
    fn an_entry_without_a_required_field_is_refused() {
        let version = |inner: &str, is_delete_marker| {
            let xml =
                format!("<ListVersionsResult><Version>{inner}</Version></ListVersionsResult>");
            let Some(Document::ListVersionsResult(page)) = Document::read(xml.as_bytes()) else {
                panic!("{xml}");
            };
            let PageEntry::Version(fields) = &page.entries[0] else {
                panic!("{page:?}");
            };
            version_of(fields, "k".to_owned(), is_delete_marker)
        };
        let whole = "<Key>k</Key><VersionId>v1</VersionId><IsLatest>true</IsLatest><LastModified>2026-11-21T01:02:03.000Z</LastModified><Size>7</Size>";
        let parsed = version(whole, false).unwrap();
        assert_eq!(
            (&*parsed.version, parsed.is_latest, parsed.bytes),
            ("v1", true, 7)
        );
        let without_size = whole.replace("<Size>7</Size>", "");
        assert_eq!(version(&without_size, false), None);
        let marker = version(&without_size, true).unwrap();
        assert!(marker.is_delete_marker && marker.bytes == 0);
    }

    #[test]
    fn a_bucket_without_a_versioning_status_has_none() {
        let read = |status, body: &str| {
            let response = StoreResponse {
                status,
                body: body.to_owned().into(),
            };
            read_versioning("ask", &response)
        };
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
