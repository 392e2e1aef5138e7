//! What a plain listing does not show: versions behind others, deletion marks, unfinished uploads.
//!
//! S3 only; other stores have none that this could tell. `job::gc` deletes them, `job::retain` locks them.

use super::listing::{Course, ENDLESS};
use super::signed::{Answer, S3};
use super::xml::Element;
use super::{Store, store_error};
use crate::error::{Error, Reason, Result};
use chrono::{DateTime, Utc};
use http::Method;
use object_store::ObjectStoreExt;
use object_store::path::Path;

/// Entries of a page.
const PAGE: &str = "1000";

/// Whether a bucket keeps what is overwritten or deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Versioning {
    /// What is deleted is gone.
    Off,
    /// A deletion only hides.
    Enabled,
    /// It was enabled once: there may be older versions, new ones are not kept.
    Suspended,
    /// The store does not tell, and why.
    Unknown(String),
}

/// A version of an object, or the mark of a deletion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectVersion {
    /// Below the store's prefix, with `/` between folders.
    pub path: String,
    /// `null` for what was written while there were no versions.
    pub version: String,
    /// Whether it is the one that a plain request sees.
    pub is_latest: bool,
    /// Whether it marks a deletion, and is no object.
    pub is_delete_marker: bool,
    /// Size in the store; 0 for a deletion's mark.
    pub bytes: u64,
    /// When it was written, by the store's clock.
    pub modified: DateTime<Utc>,
}

/// A multipart upload that was neither completed nor given up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnfinishedUpload {
    /// What it would become, below the store's prefix.
    pub path: String,
    /// The store's name for it.
    pub id: String,
    /// When it began, by the store's clock.
    pub begun: DateTime<Utc>,
}

impl Store {
    /// Whether the bucket keeps versions. A store that cannot is `Off`.
    ///
    /// # Errors
    /// `StoreUnreachable`, `Unauthenticated`, `NoSnapshots` where the bucket is not there.
    pub fn versioning(&self) -> Result<Versioning> {
        let Some(s3) = &self.s3 else {
            return Ok(Versioning::Off);
        };
        let what = format!("ask whether {} keeps versions", self.url());
        let query = [("versioning", "")];
        let asked = s3.ask_bucket(&what, &query);
        read_versioning(&what, &self.block_on(asked)??)
    }

    /// The version of an object that a plain request sees; `None` where the store tells none.
    ///
    /// # Errors
    /// The store's; `SnapshotVanished` where the object is not there.
    pub fn current_version(&self, below: &str) -> Result<Option<String>> {
        match self.block_on(self.inner.head(&self.path(below)))? {
            Ok(meta) => Ok(meta.version),
            Err(object_store::Error::NotFound { .. }) => Err(Error::new(
                Reason::SnapshotVanished,
                format!("{} was listed and is gone: run again", self.name(below)),
            )),
            Err(e) => Err(store_error(format!("look at {}", self.name(below)), e)),
        }
    }

    /// All versions of the objects in some folders below the prefix, and the marks of deletions.
    ///
    /// # Errors
    /// As [`objects`](Self::objects); `Configuration` where the store has no such listing.
    pub fn versions(&self, folders: &[&str]) -> Result<Vec<ObjectVersion>> {
        let mut all = Vec::new();
        self.each_version(folders, |v| {
            all.push(v);
            Ok(())
        })?;
        Ok(all)
    }

    /// The same, one by one, with a page of them in memory. The versions of an object follow each
    /// other, the newest first.
    ///
    /// # Errors
    /// As [`versions`](Self::versions), and those of `each`.
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

    /// The versions of objects whose names begin so.
    pub(super) async fn versions_behind(
        &self,
        prefix: String,
        mut each: impl FnMut(ObjectVersion) -> Result<()>,
    ) -> Result<()> {
        let Some(s3) = &self.s3 else {
            return Ok(());
        };
        let what = format!("list the versions in {}", self.url());
        let listing = Listing {
            question: "versions",
            root: "ListVersionsResult",
            // The page's last entry: where the next one begins.
            markers: [
                ("key-marker", "NextKeyMarker"),
                ("version-id-marker", "NextVersionIdMarker"),
            ],
            prefix,
        };
        let pages = self.pages(s3, &what, &listing, |page| {
            for entry in &page.children {
                let is_delete_marker = match &*entry.name {
                    "Version" => false,
                    "DeleteMarker" => true,
                    _ => continue,
                };
                if let Some(path) = self.path_of(page, entry) {
                    let read = version_of(entry, path, is_delete_marker);
                    each(read.ok_or_else(|| unclear(&what))?)?;
                }
            }
            Ok(())
        });
        pages.await
    }

    /// Deletes a version for good, or the mark of a deletion; one that is not there is deleted.
    ///
    /// # Errors
    /// The store's; `PermissionDenied` also where it is locked.
    pub fn delete_version(&self, below: &str, version: &str) -> Result<()> {
        self.block_on(self.delete_version_of(below, version))?
    }

    pub(super) async fn delete_version_of(&self, below: &str, version: &str) -> Result<()> {
        let what = format!("delete the version {version} of {}", self.name(below));
        let Some(s3) = &self.s3 else {
            return Err(Error::internal(format!("cannot {what}: it has none")));
        };
        let (path, query) = (self.path(below), [("versionId", version)]);
        let asked = s3.ask(&what, Method::DELETE, &path, &query, String::new());
        let answer = asked.await?;
        if answer.is_success() || answer.status == 404 {
            return Ok(());
        }
        let refusal = answer.refusal(&what);
        // versitygw's word for a version that is not there any more.
        if answer.status == 400 && refusal.to_string().contains("Invalid version id") {
            return Ok(());
        }
        // MinIO's word for "locked" is that of a request that is wrong.
        if answer.status == 400 && refusal.to_string().contains("WORM") {
            return Err(Error::new(Reason::PermissionDenied, refusal.to_string()));
        }
        Err(refusal)
    }

    /// The unfinished multipart uploads below the prefix. Some servers tell of none but those of an
    /// object that is named; they give them up by themselves.
    ///
    /// # Errors
    /// As [`objects`](Self::objects); `Configuration` where the store has no such listing.
    pub fn uploads(&self) -> Result<Vec<UnfinishedUpload>> {
        let prefix = match self.path("").as_ref() {
            "" => String::new(),
            prefix => format!("{prefix}/"),
        };
        self.block_on(self.uploads_of(prefix))?
    }

    /// The unfinished uploads of objects whose names begin so.
    pub(super) async fn uploads_of(&self, prefix: String) -> Result<Vec<UnfinishedUpload>> {
        let Some(s3) = &self.s3 else {
            return Ok(Vec::new());
        };
        let what = format!("list the unfinished uploads in {}", self.url());
        let listing = Listing {
            question: "uploads",
            root: "ListMultipartUploadsResult",
            markers: [
                ("key-marker", "NextKeyMarker"),
                ("upload-id-marker", "NextUploadIdMarker"),
            ],
            prefix,
        };
        let mut uploads = Vec::new();
        let pages = self.pages(s3, &what, &listing, |page| {
            for entry in page.all("Upload") {
                if let Some(path) = self.path_of(page, entry) {
                    uploads.push(upload_of(entry, path).ok_or_else(|| unclear(&what))?);
                }
            }
            Ok(())
        });
        pages.await?;
        Ok(uploads)
    }

    /// Gives an unfinished upload up, so that its parts take no room; one that is not there is given
    /// up.
    ///
    /// # Errors
    /// The store's.
    pub fn abort_upload(&self, upload: &UnfinishedUpload) -> Result<()> {
        self.block_on(self.give_up(upload))?
    }

    pub(super) async fn give_up(&self, upload: &UnfinishedUpload) -> Result<()> {
        let what = format!(
            "give up an unfinished upload of {}",
            self.name(&upload.path)
        );
        let Some(s3) = &self.s3 else {
            return Err(Error::internal(format!("cannot {what}: there is none")));
        };
        let (path, query) = (self.path(&upload.path), [("uploadId", &*upload.id)]);
        let asked = s3.ask(&what, Method::DELETE, &path, &query, String::new());
        let answer = asked.await?;
        if answer.is_success() || answer.status == 404 {
            return Ok(());
        }
        Err(answer.refusal(&what))
    }

    async fn pages(
        &self,
        s3: &S3,
        what: &str,
        listing: &Listing,
        mut each: impl FnMut(&Element) -> Result<()>,
    ) -> Result<()> {
        let mut markers: [String; 2] = Default::default();
        let mut course = Course::default();
        loop {
            let size = match listing.question {
                "uploads" => "max-uploads",
                _ => "max-keys",
            };
            let mut query = vec![
                (listing.question, ""),
                ("encoding-type", "url"),
                (size, PAGE),
                ("prefix", &*listing.prefix),
            ];
            for ((name, _), marker) in listing.markers.iter().zip(&markers) {
                if !marker.is_empty() {
                    query.push((name, marker));
                }
            }
            let answer = s3.ask_bucket(what, &query).await?;
            if !answer.is_success() {
                return Err(answer.refusal(what));
            }
            let page = answer
                .xml(listing.root)
                .ok_or_else(|| answer.not_understood(what))?;
            each(&page)?;
            if page.text_of("IsTruncated") != Some("true") {
                return Ok(());
            }
            let [(_, key), (_, id)] = listing.markers;
            let next = [
                decoded(&page, page.text_of(key).unwrap_or_default())
                    .ok_or_else(|| unclear(what))?,
                page.text_of(id).unwrap_or_default().to_owned(),
            ];
            let is_entry = |e: &&Element| matches!(&*e.name, "Version" | "DeleteMarker" | "Upload");
            let entries = page.children.iter().filter(is_entry).count();
            if next[0].is_empty() {
                return Err(unclear(what));
            }
            if !course.may_end(entries, &next) {
                return Err(Error::new(
                    Reason::StoreUnreachable,
                    format!("cannot {what}: {ENDLESS}"),
                ));
            }
            markers = next;
        }
    }

    /// Below the prefix; `None` for one that our own paths cannot name: it is none of ours.
    fn path_of(&self, page: &Element, entry: &Element) -> Option<String> {
        let key = decoded(page, entry.child("Key").map(|k| &*k.text)?)?;
        let path = Path::parse(&key).ok().filter(|p| p.as_ref() == key)?;
        let below: Vec<_> = path.prefix_match(&self.prefix)?.collect();
        let below: Vec<&str> = below.iter().map(|part| part.as_ref()).collect();
        Some(below.join("/")).filter(|below| !below.is_empty())
    }
}

struct Listing {
    question: &'static str,
    root: &'static str,
    markers: [(&'static str, &'static str); 2],
    prefix: String,
}

fn unclear(what: &str) -> Error {
    Error::new(
        Reason::StoreUnreachable,
        format!("cannot {what}: the store's answer cannot be understood"),
    )
}

/// A name on a page, which says itself whether its names are encoded.
fn decoded(page: &Element, text: &str) -> Option<String> {
    if page.text_of("EncodingType") != Some("url") {
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

fn time_of(entry: &Element, name: &str) -> Option<DateTime<Utc>> {
    let time = DateTime::parse_from_rfc3339(entry.text_of(name)?).ok()?;
    Some(time.to_utc())
}

fn version_of(entry: &Element, path: String, is_delete_marker: bool) -> Option<ObjectVersion> {
    Some(ObjectVersion {
        path,
        version: entry.text_of("VersionId")?.to_owned(),
        is_latest: entry.text_of("IsLatest")? == "true",
        is_delete_marker,
        bytes: match is_delete_marker {
            true => 0,
            false => entry.text_of("Size")?.parse().ok()?,
        },
        modified: time_of(entry, "LastModified")?,
    })
}

fn upload_of(entry: &Element, path: String) -> Option<UnfinishedUpload> {
    Some(UnfinishedUpload {
        path,
        id: entry.text_of("UploadId")?.to_owned(),
        begun: time_of(entry, "Initiated")?,
    })
}

fn read_versioning(what: &str, answer: &Answer) -> Result<Versioning> {
    match answer.status {
        200..=299 => Ok(match answer.xml("VersioningConfiguration") {
            None => Versioning::Unknown("the store answers something else".to_owned()),
            Some(root) => match root.text_of("Status") {
                None | Some("") => Versioning::Off,
                Some("Enabled") => Versioning::Enabled,
                Some("Suspended") => Versioning::Suspended,
                Some(other) => Versioning::Unknown(format!("its state is {other}")),
            },
        }),
        404 if answer.code() == "NoSuchBucket" => Err(answer.refusal(what)),
        401 => Err(answer.refusal(what)),
        _ => Ok(Versioning::Unknown(answer.refusal(what).to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::xml::parse;

    #[test]
    fn a_name_is_decoded_only_where_the_page_says_so() {
        let page = |kind: &str| parse(format!("<P>{kind}</P>").as_bytes()).unwrap();
        let url = page("<EncodingType>url</EncodingType>");
        assert_eq!(decoded(&url, "a%20b+c%2F%C3%BC").unwrap(), "a b c/ü");
        assert_eq!(decoded(&url, "a%2"), None);
        assert_eq!(decoded(&url, "a%zz"), None);
        assert_eq!(decoded(&page(""), "a%20b+c").unwrap(), "a%20b+c");
    }

    #[test]
    fn versions_are_read_and_what_lacks_something_is_not() {
        let entry = |inner: &str| parse(format!("<Version>{inner}</Version>").as_bytes()).unwrap();
        let whole = "<Key>k</Key><VersionId>v1</VersionId><IsLatest>true</IsLatest><LastModified>2026-11-21T01:02:03.000Z</LastModified><Size>7</Size>";
        let got = version_of(&entry(whole), "k".to_owned(), false).unwrap();
        assert_eq!((&*got.version, got.is_latest, got.bytes), ("v1", true, 7));
        let without_size = whole.replace("<Size>7</Size>", "");
        assert_eq!(
            version_of(&entry(&without_size), "k".to_owned(), false),
            None
        );
        let mark = version_of(&entry(&without_size), "k".to_owned(), true).unwrap();
        assert!(mark.is_delete_marker && mark.bytes == 0);
    }

    #[test]
    fn a_bucket_without_a_word_on_versions_has_none() {
        let read = |status, body: &str| {
            let answer = Answer {
                status,
                body: body.to_owned().into(),
            };
            read_versioning("ask", &answer)
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
            let got = read(status, body).unwrap();
            assert!(matches!(got, Versioning::Unknown(_)), "{status}: {got:?}");
        }
        let gone = "<Error><Code>NoSuchBucket</Code></Error>";
        assert_eq!(read(404, gone).unwrap_err().reason(), Reason::NoSnapshots);
    }
}
