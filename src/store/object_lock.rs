//! S3's object lock: whether a bucket has it, and until when its objects cannot be deleted.
//!
//! Some servers accept a retention and do not keep it; one even writes the request's body over the object. So
//! nothing is requested or set before the bucket says that its lock is enabled, and a retention that was set
//! is read back. `ops::object_lock`, the caller, decides which objects are locked and for how long.

use crate::error::{Error, Reason, Result};
use crate::store::Store;
use crate::store::retrying_client::StoreResponse;
use crate::store::xml::{DefaultRetention, Document, RetentionDocument};
use chrono::{DateTime, DurationRound, SecondsFormat, TimeDelta, Utc};
use http::Method;
use object_store::path::Path;
use schemars::JsonSchema;
use serde::Serialize;
use std::fmt;
use strum::{EnumString, IntoStaticStr};

/// Whether a bucket has an object lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObjectLock {
    /// Yes.
    Enabled {
        /// The retention that new objects get by default, in the bucket's words: `COMPLIANCE, 30 days`.
        default: Option<String>,
    },
    /// No. S3 can enable it when a bucket is created, or later if the bucket keeps versions.
    Disabled,
    /// The store has no such feature, for this reason.
    Unsupported(String),
}

/// Who may still delete a locked version. S3 writes it in capitals.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    EnumString,
    IntoStaticStr,
    JsonSchema,
    Serialize,
    clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "UPPERCASE")]
pub enum Mode {
    /// Users with the permission s3:BypassGovernanceRetention
    Governance,
    /// Nobody until the lock ends; this cannot be undone
    Compliance,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&<&str>::from(*self).to_lowercase())
    }
}

/// S3's object retention: until when a version of an object cannot be deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectRetention {
    /// Who may delete it sooner.
    pub mode: Mode,
    /// When the retention ends, by the store's clock.
    pub until: DateTime<Utc>,
}

impl ObjectRetention {
    /// Returns whether `other` protects at least as long and as strictly.
    pub fn is_covered_by(&self, other: &ObjectRetention) -> bool {
        other.until >= self.until && other.mode >= self.mode
    }
}

impl fmt::Display for ObjectRetention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} until {}", self.mode, seconds(self.until))
    }
}

fn seconds(t: DateTime<Utc>) -> String {
    t.to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// Rounds up to whole seconds: servers keep fractions differently.
fn whole_seconds(t: DateTime<Utc>) -> DateTime<Utc> {
    match t.duration_trunc(TimeDelta::seconds(1)) {
        Ok(cut) if cut < t => cut + TimeDelta::seconds(1),
        Ok(cut) => cut,
        Err(_) => t,
    }
}

impl Store {
    /// Returns whether objects can be locked here. Only the first call sends a request.
    ///
    /// # Errors
    /// Fails with `StoreUnreachable`, `PermissionDenied`, `Unauthenticated`, or `NoSnapshots` if the bucket
    /// does not exist.
    pub fn object_lock(&self) -> Result<ObjectLock> {
        let Some(s3) = &self.s3 else {
            return Ok(ObjectLock::Unsupported(
                "only S3 has an object lock".to_owned(),
            ));
        };
        let action = format!("ask whether {} has an object lock", self.url());
        let lock = self.object_lock.get_or_try_init(async || {
            let bucket = Path::default();
            let response = s3.get(&action, &bucket, &[("object-lock", "")]).await?;
            read_lock(&action, &response)
        });
        self.block_on(lock)?.cloned()
    }

    /// Returns the retention of an object, or of a version of it; `None` if it has none.
    ///
    /// # Errors
    /// Fails with the store's errors, and with `SnapshotVanished` if the object or the version does not
    /// exist.
    pub fn retention(&self, below: &str, version: Option<&str>) -> Result<Option<ObjectRetention>> {
        let read = |document| match document {
            Document::Retention(retention) => retention_of(&retention),
            _ => None,
        };
        let retention = self.read_lock_of("retention", below, version, "retention", read);
        retention.map(Option::flatten)
    }

    /// Returns whether a legal hold protects an object, or a version of it, from deletion.
    ///
    /// # Errors
    /// Fails with the errors of [`retention`](Self::retention).
    pub fn legal_hold(&self, below: &str, version: Option<&str>) -> Result<bool> {
        let read = |document| match document {
            Document::LegalHold(hold) => Some(hold.status == "ON"),
            _ => None,
        };
        let hold = self.read_lock_of("legal hold", below, version, "legal-hold", read);
        hold.map(|is_on| is_on == Some(true))
    }

    /// Reads a lock of an object: the subresource `retention` or `legal-hold`. Returns `None` if the object
    /// has no such lock or the bucket cannot have any.
    fn read_lock_of<T>(
        &self,
        kind: &str,
        below: &str,
        version: Option<&str>,
        subresource: &str,
        read: impl Fn(Document) -> Option<T>,
    ) -> Result<Option<T>> {
        let action = &format!("read the {kind} of {}", self.name(below));
        let Some(s3) = &self.s3 else {
            return Ok(None);
        };
        match self.object_lock() {
            Ok(ObjectLock::Enabled { .. }) => {}
            Ok(_) => return Ok(None),
            // The permission may be missing for the bucket and not for its objects.
            Err(e) if e.reason() == Reason::PermissionDenied => {}
            Err(e) => return Err(e),
        }
        let mut query = vec![(subresource, "")];
        query.extend(version.map(|v| ("versionId", v)));
        let path = self.path(below);
        let response = self.block_on(s3.get(action, &path, &query))??;
        if response.is_object_missing() {
            return Err(vanished(action));
        }
        match (response.status, &*response.code()) {
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

    /// Sets the retention of an object, or of a version of it, and reads it back. Does not look at the
    /// retention that the object has: the caller decides whether this one is longer.
    ///
    /// # Errors
    /// Fails with the store's errors; with `Configuration` if the bucket has no object lock, or if the store
    /// accepts the retention and does not keep it; with `PermissionDenied` also if the store refuses to
    /// shorten a retention; and with `SnapshotVanished` if the object does not exist.
    pub fn retain(
        &self,
        below: &str,
        version: Option<&str>,
        retention: &ObjectRetention,
    ) -> Result<()> {
        let action = format!("lock {}", self.name(below));
        let (Some(s3), ObjectLock::Enabled { .. }) = (&self.s3, self.object_lock()?) else {
            return Err(Reason::Configuration.error(format!(
                "cannot {action}: the bucket has no object lock enabled"
            )));
        };
        let requested = ObjectRetention {
            until: whole_seconds(retention.until),
            ..*retention
        };
        let body = format!(
            r#"<Retention xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Mode>{}</Mode><RetainUntilDate>{}</RetainUntilDate></Retention>"#,
            <&str>::from(requested.mode),
            seconds(requested.until)
        );
        let mut query = vec![("retention", "")];
        query.extend(version.map(|v| ("versionId", v)));
        let path = self.path(below);
        let put = |headers| s3.send(&action, Method::PUT, &path, &query, headers, body.clone());
        let mut response = self.block_on(put(&[]))??;
        if response.is_object_missing() {
            return Err(vanished(&action));
        }
        // Some servers require the permission to bypass a lock even to make it stricter. Nothing is lost by
        // that.
        if matches!(response.status, 400 | 403)
            && let Some(current) = self.retention(below, version)?
            && current.mode < requested.mode
            && current.is_covered_by(&requested)
        {
            let bypass = [("x-amz-bypass-governance-retention", "true".to_owned())];
            response = self.block_on(put(&bypass))??;
        }
        response.accepted(&action)?;
        match self.retention(below, version)? {
            Some(kept) if requested.is_covered_by(&kept) => Ok(()),
            kept => Err(Reason::Configuration.error(format!(
                    "cannot lock {} ({requested}): the store accepted it, but reads back {}: do not rely on this store's locks",
                    self.name(below),
                    kept.map_or("unlocked".to_owned(), |k| k.to_string())
                ),
            )),
        }
    }
}

fn vanished(action: &str) -> Error {
    let error = format!("cannot {action}: the object is gone; run again");
    Reason::SnapshotVanished.error(error)
}

fn read_lock(action: &str, response: &StoreResponse) -> Result<ObjectLock> {
    let code = response.code();
    match response.status {
        200..=299 => Ok(match response.document() {
            Some(Document::ObjectLockConfiguration(lock)) => {
                match lock.object_lock_enabled == "Enabled" {
                    true => ObjectLock::Enabled {
                        default: lock.rule.default_retention.map(default_rule),
                    },
                    false => ObjectLock::Disabled,
                }
            }
            _ => ObjectLock::Unsupported(
                "the store's response to a request for the bucket's lock is something else"
                    .to_owned(),
            ),
        }),
        404 if code != "NoSuchBucket" => Ok(ObjectLock::Disabled),
        400 | 405 | 501 => {
            let code = if code.is_empty() { "no reason" } else { &code };
            let status = response.status;
            let why = format!("the store answers {status} ({code})");
            Ok(ObjectLock::Unsupported(why))
        }
        _ => Err(response.refusal(action)),
    }
}

fn default_rule(rule: DefaultRetention) -> String {
    let mode = match &*rule.mode {
        "" => "no mode",
        mode => mode,
    };
    let is_set = |n: &str| !matches!(n, "" | "0");
    match (&*rule.days, &*rule.years) {
        (days, _) if is_set(days) => format!("{mode}, {days} days"),
        (_, years) if is_set(years) => format!("{mode}, {years} years"),
        _ => mode.to_owned(),
    }
}

/// Returns the retention in a document, `Some(None)` if it says that there is none, or `None` if it is
/// unreadable.
fn retention_of(document: &RetentionDocument) -> Option<Option<ObjectRetention>> {
    match (&*document.mode, &*document.retain_until_date) {
        ("", "") => Some(None),
        (mode, until) => Some(Some(ObjectRetention {
            mode: mode.parse().ok()?,
            until: DateTime::parse_from_rfc3339(until).ok()?.to_utc(),
        })),
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
        assert_eq!(
            lock(200, &enabled("")).unwrap(),
            ObjectLock::Enabled { default: None }
        );
        let rule = "<Rule><DefaultRetention><Mode>GOVERNANCE</Mode><Days>30</Days></DefaultRetention></Rule>";
        assert_eq!(
            lock(200, &enabled(rule)).unwrap(),
            ObjectLock::Enabled {
                default: Some("GOVERNANCE, 30 days".to_owned())
            }
        );
        assert_eq!(
            lock(200, "<ObjectLockConfiguration/>").unwrap(),
            ObjectLock::Disabled
        );
        let none = "<Error><Code>ObjectLockConfigurationNotFoundError</Code></Error>";
        assert_eq!(lock(404, none).unwrap(), ObjectLock::Disabled);
        // Servers that ignore the subresource, and list the bucket.
        for (status, body) in [
            (200, "<ListBucketResult/>"),
            (200, ""),
            (501, ""),
            (400, ""),
        ] {
            assert!(
                matches!(lock(status, body), Ok(ObjectLock::Unsupported(_))),
                "{status} {body}"
            );
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
        assert_eq!(retention.mode, Mode::Compliance);
        assert_eq!(
            retention.until.to_rfc3339(),
            "2027-01-01T00:00:00.500+00:00"
        );
        assert_eq!(read(""), Some(None));
        assert_eq!(read(until), None);
        assert_eq!(read(&format!("<Mode>FOREVER</Mode>{until}")), None);
        assert_eq!(
            read("<Mode>GOVERNANCE</Mode><RetainUntilDate>soon</RetainUntilDate>"),
            None
        );
    }

    #[test]
    fn a_time_is_rounded_up() {
        let t = |s: &str| s.parse::<DateTime<Utc>>().unwrap();
        assert_eq!(
            whole_seconds(t("2027-01-01T00:00:00.000000001Z")),
            t("2027-01-01T00:00:01Z")
        );
        assert_eq!(
            whole_seconds(t("2027-01-01T00:00:01Z")),
            t("2027-01-01T00:00:01Z")
        );
    }

    #[test]
    fn a_retention_covers_one_that_is_shorter_and_not_stricter() {
        let r = |mode, hour: u32| ObjectRetention {
            mode,
            until: format!("2027-01-01T{hour:02}:00:00Z").parse().unwrap(),
        };
        use Mode::*;
        assert!(r(Governance, 1).is_covered_by(&r(Compliance, 1)));
        assert!(r(Governance, 1).is_covered_by(&r(Governance, 2)));
        assert!(!r(Governance, 2).is_covered_by(&r(Compliance, 1)));
        assert!(!r(Compliance, 1).is_covered_by(&r(Governance, 2)));
    }
}
