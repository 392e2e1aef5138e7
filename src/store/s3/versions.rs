//! What a plain listing does not show: versions behind others, deletion marks, unfinished uploads.
//!
//! S3 only; other stores have none that this could tell. `ops::gc` deletes them, `ops::object_lock` locks them.

use crate::error::{Reason, Result};
use crate::store::listing::{Course, ENDLESS};
use crate::store::retrying_client::Answer;
use crate::store::xml::{Document, Entry, Fields};
use crate::store::{Store, store_error};
use chrono::{DateTime, Utc};
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
        let bucket = Path::default();
        let asked = s3.get(&what, &bucket, &[("versioning", "")]);
        read_versioning(&what, &self.block_on(asked)??)
    }

    /// The version of an object that a plain request sees; `None` where the store tells none.
    ///
    /// # Errors
    /// The store's; `SnapshotVanished` where the object is not there.
    pub fn current_version(&self, below: &str) -> Result<Option<String>> {
        match self.block_on(self.inner.head(&self.path(below)))? {
            Ok(meta) => Ok(meta.version),
            Err(object_store::Error::NotFound { .. }) => Err(Reason::SnapshotVanished.error(
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
    pub(in crate::store) async fn versions_behind(
        &self,
        prefix: String,
        mut each: impl FnMut(ObjectVersion) -> Result<()>,
    ) -> Result<()> {
        let what = format!("list the versions in {}", self.url());
        self.pages(&what, &VERSIONS, &prefix, |entry, path| match entry {
            Entry::Version(fields) => Some(each(version_of(&fields, path, false)?)),
            Entry::DeleteMarker(fields) => Some(each(version_of(&fields, path, true)?)),
            Entry::Upload(_) => Some(Ok(())),
        })
        .await
    }

    /// Deletes a version for good, or the mark of a deletion; one that is not there is deleted.
    ///
    /// # Errors
    /// The store's; `PermissionDenied` also where it is locked.
    pub fn delete_version(&self, below: &str, version: &str) -> Result<()> {
        self.block_on(self.delete_version_of(below, version))?
    }

    pub(in crate::store) async fn delete_version_of(
        &self,
        below: &str,
        version: &str,
    ) -> Result<()> {
        let what = format!("delete the version {version} of {}", self.name(below));
        let (path, query) = (self.path(below), [("versionId", version)]);
        let answer = self.s3(&what)?.delete(&what, &path, &query).await?;
        let is_wrong = answer.status == 400;
        match answer.removed(&what) {
            // versitygw's word for a version that is not there any more.
            Err(e) if is_wrong && e.to_string().contains("Invalid version id") => Ok(()),
            // MinIO's word for "locked" is that of a request that is wrong.
            Err(e) if is_wrong && e.to_string().contains("WORM") => {
                Err(Reason::PermissionDenied.error(e.to_string()))
            }
            removed => removed,
        }
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
    pub(in crate::store) async fn uploads_of(
        &self,
        prefix: String,
    ) -> Result<Vec<UnfinishedUpload>> {
        let what = format!("list the unfinished uploads in {}", self.url());
        let mut uploads = Vec::new();
        let pages = self.pages(&what, &UPLOADS, &prefix, |entry, path| {
            if let Entry::Upload(fields) = entry {
                uploads.push(upload_of(&fields, path)?);
            }
            Some(Ok(()))
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

    pub(in crate::store) async fn give_up(&self, upload: &UnfinishedUpload) -> Result<()> {
        let what = format!(
            "give up an unfinished upload of {}",
            self.name(&upload.path)
        );
        let (path, query) = (self.path(&upload.path), [("uploadId", &*upload.id)]);
        let answer = self.s3(&what)?.delete(&what, &path, &query).await?;
        answer.removed(&what)
    }

    /// Turns the pages of a listing. `each` gets what our own paths can name, and gives `None` if it lacks something.
    async fn pages(
        &self,
        what: &str,
        listing: &Listing,
        prefix: &str,
        mut each: impl FnMut(Entry, String) -> Option<Result<()>>,
    ) -> Result<()> {
        let Some(s3) = &self.s3 else {
            return Ok(());
        };
        let unclear = || {
            let why = format!("cannot {what}: the store's answer cannot be understood");
            Reason::StoreUnreachable.error(why)
        };
        let bucket = Path::default();
        let mut markers: [String; 2] = Default::default();
        let mut course = Course::default();
        loop {
            let mut query = vec![
                (listing.question, ""),
                ("encoding-type", "url"),
                (listing.size, PAGE),
                ("prefix", prefix),
            ];
            let given = listing.markers.iter().zip(&markers);
            query.extend(
                given
                    .filter(|(_, m)| !m.is_empty())
                    .map(|(n, m)| (*n, &**m)),
            );
            let answer = s3.get(what, &bucket, &query).await?.accepted(what)?;
            let Some(Document::ListVersionsResult(page)) = answer.document() else {
                return Err(answer.not_understood(what));
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
            if !course.may_end(entries, &next) {
                return Err(Reason::StoreUnreachable.error(format!("cannot {what}: {ENDLESS}")));
            }
            markers = next;
        }
    }

    /// An entry's path below the prefix; `None` for one that our own paths cannot name: it is none of ours.
    fn own_path(&self, is_encoded: bool, entry: &Entry) -> Option<String> {
        let (Entry::Version(fields) | Entry::DeleteMarker(fields) | Entry::Upload(fields)) = entry;
        let key = decoded(is_encoded, fields.key.as_deref()?)?;
        let path = Path::parse(&key).ok().filter(|p| p.as_ref() == key)?;
        let below: Vec<_> = path.prefix_match(&self.prefix)?.collect();
        let below: Vec<&str> = below.iter().map(|part| part.as_ref()).collect();
        Some(below.join("/")).filter(|below| !below.is_empty())
    }
}

/// What a listing is asked for by.
struct Listing {
    question: &'static str,
    size: &'static str,
    /// Where a page begins: a name, and what tells several of that name apart.
    markers: [&'static str; 2],
}

const VERSIONS: Listing = Listing {
    question: "versions",
    size: "max-keys",
    markers: ["key-marker", "version-id-marker"],
};

const UPLOADS: Listing = Listing {
    question: "uploads",
    size: "max-uploads",
    markers: ["key-marker", "upload-id-marker"],
};

/// A name on a page, which says itself whether its names are encoded.
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

fn version_of(fields: &Fields, path: String, is_delete_marker: bool) -> Option<ObjectVersion> {
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

fn upload_of(fields: &Fields, path: String) -> Option<UnfinishedUpload> {
    Some(UnfinishedUpload {
        path,
        id: fields.upload_id.clone()?,
        begun: time(fields.initiated.as_deref())?,
    })
}

fn time(text: Option<&str>) -> Option<DateTime<Utc>> {
    Some(DateTime::parse_from_rfc3339(text?).ok()?.to_utc())
}

fn read_versioning(what: &str, answer: &Answer) -> Result<Versioning> {
    match answer.status {
        200..=299 => Ok(match answer.document() {
            Some(Document::VersioningConfiguration(said)) => match &*said.status {
                "" => Versioning::Off,
                "Enabled" => Versioning::Enabled,
                "Suspended" => Versioning::Suspended,
                other => Versioning::Unknown(format!("its state is {other}")),
            },
            _ => Versioning::Unknown("the store answers something else".to_owned()),
        }),
        404 if answer.code() == "NoSuchBucket" => Err(answer.refusal(what)),
        401 => Err(answer.refusal(what)),
        _ => Ok(Versioning::Unknown(answer.refusal(what).to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_decoded_only_where_the_page_says_so() {
        assert_eq!(decoded(true, "a%20b+c%2F%C3%BC").unwrap(), "a b c/ü");
        assert_eq!(decoded(true, "a%2"), None);
        assert_eq!(decoded(true, "a%zz"), None);
        assert_eq!(decoded(false, "a%20b+c").unwrap(), "a%20b+c");
    }

    #[test]
    fn versions_are_read_and_what_lacks_something_is_not() {
        let version = |inner: &str, is_mark| {
            let xml =
                format!("<ListVersionsResult><Version>{inner}</Version></ListVersionsResult>");
            let Some(Document::ListVersionsResult(page)) = Document::read(xml.as_bytes()) else {
                panic!("{xml}");
            };
            let Entry::Version(fields) = &page.entries[0] else {
                panic!("{page:?}");
            };
            version_of(fields, "k".to_owned(), is_mark)
        };
        let whole = "<Key>k</Key><VersionId>v1</VersionId><IsLatest>true</IsLatest><LastModified>2026-11-21T01:02:03.000Z</LastModified><Size>7</Size>";
        let got = version(whole, false).unwrap();
        assert_eq!((&*got.version, got.is_latest, got.bytes), ("v1", true, 7));
        let without_size = whole.replace("<Size>7</Size>", "");
        assert_eq!(version(&without_size, false), None);
        let mark = version(&without_size, true).unwrap();
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
