//! S3's object lock: until when an object cannot be deleted.
//!
//! Some servers answer a question about a retention with something else, so nothing is asked before the bucket
//! says that its lock is enabled. deltafold sets no retention: a bucket's default retention does.

use crate::error::{Error, Reason, Result};
use crate::store::Store;
use crate::store::retrying_client::StoreResponse;
use crate::store::xml::{Document, RetentionDocument};
use chrono::{DateTime, Utc};
use object_store::path::Path;

impl Store {
    /// Returns whether the bucket has an object lock: false on stores that are not S3. Only the first call sends
    /// a request.
    ///
    /// # Errors
    /// Fails with `StoreUnreachable`, `PermissionDenied`, `Unauthenticated`, or `NoSnapshots` if the bucket
    /// does not exist.
    pub fn has_object_lock(&self) -> Result<bool> {
        let Some(s3) = &self.s3 else {
            return Ok(false);
        };
        let action = format!("ask whether {} has an object lock", self.url());
        let lock = self.object_lock.get_or_try_init(async || {
            let bucket = Path::default();
            let response = s3.get(&action, &bucket, &[("object-lock", "")]).await?;
            read_lock(&action, &response)
        });
        self.block_on(lock)?.copied()
    }

    /// Returns the time until which a retention protects an object, by the store's clock; `None` if it has no
    /// retention. It may be over.
    ///
    /// # Errors
    /// Fails with the store's errors, and with `SnapshotVanished` if the object does not exist.
    pub fn retained_until(&self, below: &str) -> Result<Option<DateTime<Utc>>> {
        let read = |document| match document {
            Document::Retention(retention) => retention_of(&retention),
            _ => None,
        };
        let retention = read_lock_of(self, "retention", below, "retention", read);
        retention.map(Option::flatten)
    }

    /// Returns whether a legal hold protects an object from deletion.
    ///
    /// # Errors
    /// Fails with the errors of [`retained_until`](Self::retained_until).
    pub fn legal_hold(&self, below: &str) -> Result<bool> {
        let read = |document| match document {
            Document::LegalHold(hold) => Some(hold.status == "ON"),
            _ => None,
        };
        let hold = read_lock_of(self, "legal hold", below, "legal-hold", read);
        hold.map(|is_on| is_on == Some(true))
    }
}

/// Reads a lock of an object: the subresource `retention` or `legal-hold`. Returns `None` if the object
/// has no such lock or the bucket cannot have any.
fn read_lock_of<T>(
    store: &Store,
    kind: &str,
    below: &str,
    subresource: &str,
    read: impl Fn(Document) -> Option<T>,
) -> Result<Option<T>> {
    let action = &format!("read the {kind} of {}", store.name(below));
    let Some(s3) = &store.s3 else {
        return Ok(None);
    };
    match store.has_object_lock() {
        Ok(true) => {}
        Ok(false) => return Ok(None),
        // The permission may be missing for the bucket and not for its objects.
        Err(e) if e.reason() == Reason::PermissionDenied => {}
        Err(e) => return Err(e),
    }
    let query = [(subresource, "")];
    let path = store.path(below);
    let response = store.block_on(s3.get(action, &path, &query))??;
    if response.is_object_missing() {
        return Err(vanished(action));
    }
    match (response.status.as_u16(), &*response.code()) {
        (200..=299, _) => match response.document().and_then(read) {
            Some(lock) => Ok(Some(lock)),
            None => Err(response.not_understood(action)),
        },
        // The object has no such lock, it is a delete marker, or the bucket has no object lock.
        (404 | 405 | 501, _)
        | (
            400,
            "InvalidRequest"
            | "NoSuchObjectLockConfiguration"
            | "ObjectLockConfigurationNotFoundError",
        ) => Ok(None),
        _ => Err(response.refusal(action)),
    }
}

fn vanished(action: &str) -> Error {
    let error = format!("cannot {action}: the object is gone; run again");
    Reason::SnapshotVanished.error(error)
}

fn read_lock(action: &str, response: &StoreResponse) -> Result<bool> {
    match response.status.as_u16() {
        200..=299 => Ok(match response.document() {
            Some(Document::ObjectLockConfiguration(lock)) => lock.object_lock_enabled == "Enabled",
            _ => false,
        }),
        404 if response.code() != "NoSuchBucket" => Ok(false),
        400 | 405 | 501 => Ok(false),
        _ => Err(response.refusal(action)),
    }
}

/// Returns the end of the retention in a document, `Some(None)` if it says that there is none, or `None` if it
/// is unreadable.
fn retention_of(document: &RetentionDocument) -> Option<Option<DateTime<Utc>>> {
    match (&*document.mode, &*document.retain_until_date) {
        ("", "") => Some(None),
        ("", _) => None,
        (_, until) => Some(Some(DateTime::parse_from_rfc3339(until).ok()?.to_utc())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::retrying_client::response;

    #[test]
    fn a_bucket_has_a_lock_only_if_it_says_so() {
        let lock = |status, body: &str| read_lock("ask", &response(status, body));
        let enabled = |more: &str| {
            format!(
                "<ObjectLockConfiguration><ObjectLockEnabled>Enabled</ObjectLockEnabled>{more}</ObjectLockConfiguration>"
            )
        };
        assert!(lock(200, &enabled("")).unwrap());
        let rule = "<Rule><DefaultRetention><Mode>GOVERNANCE</Mode><Days>30</Days></DefaultRetention></Rule>";
        assert!(lock(200, &enabled(rule)).unwrap());
        assert!(!lock(200, "<ObjectLockConfiguration/>").unwrap());
        let none = "<Error><Code>ObjectLockConfigurationNotFoundError</Code></Error>";
        assert!(!lock(404, none).unwrap());
        // Servers that ignore the subresource, and list the bucket.
        for (status, body) in [
            (200, "<ListBucketResult/>"),
            (200, ""),
            (501, ""),
            (400, ""),
        ] {
            assert!(!lock(status, body).unwrap(), "{status} {body}");
        }
        assert_eq!(
            lock(403, "").unwrap_err().reason(),
            Reason::PermissionDenied
        );
        let gone = "<Error><Code>NoSuchBucket</Code></Error>";
        assert_eq!(lock(404, gone).unwrap_err().reason(), Reason::NoSnapshots);
    }

    #[test]
    fn a_retention_with_an_unreadable_field_is_unreadable() {
        let read = |inner: &str| {
            let xml = format!("<Retention>{inner}</Retention>");
            match Document::read(xml.as_bytes()) {
                Some(Document::Retention(retention)) => retention_of(&retention),
                other => panic!("{other:?}"),
            }
        };
        let until = "<RetainUntilDate>2027-01-01T00:00:00.5Z</RetainUntilDate>";
        let retention = read(&format!("<Mode>COMPLIANCE</Mode>{until}"))
            .unwrap()
            .unwrap();
        assert_eq!(retention.to_rfc3339(), "2027-01-01T00:00:00.500+00:00");
        assert_eq!(read(""), Some(None));
        assert_eq!(read(until), None);
        assert_eq!(
            read("<Mode>GOVERNANCE</Mode><RetainUntilDate>soon</RetainUntilDate>"),
            None
        );
    }
}
