//! Object lock: whether a bucket has one, and until when its objects cannot be deleted.
//!
//! A server may take a retention and keep none, and one even writes the request over the object. So nothing
//! is asked or set before the bucket says that its lock is enabled, and what was set is read back. Which
//! objects are locked, and for how long, `ops` decides.

use crate::error::{Error, Reason, Result};
use crate::store::Store;
use crate::store::retrying_client::Answer;
use crate::store::xml::{DefaultRetention, Document, Retention as Said};
use chrono::{DateTime, DurationRound, SecondsFormat, TimeDelta, Utc};
use http::Method;
use object_store::path::Path;
use schemars::JsonSchema;
use serde::Serialize;
use std::fmt;
use strum::{EnumString, IntoStaticStr};

/// What a bucket says of its lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ObjectLock {
    /// It has one; and what new objects get without being asked, in its own words.
    Enabled {
        /// Such as `COMPLIANCE, 30 days`.
        default: Option<String>,
    },
    /// It has none; S3 lets it be enabled when a bucket is made, or later where it has versions.
    Disabled,
    /// This store knows no such thing; why that is believed.
    Unsupported(String),
}

/// Who may still delete what is locked. S3 writes it in capitals.
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

/// Until when a version of an object cannot be deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Who may delete it sooner.
    pub mode: Mode,
    /// By the store's clock.
    pub until: DateTime<Utc>,
}

impl Retention {
    /// Whether what it protects is protected by `other` as well: as long, and from as many.
    pub fn is_covered_by(&self, other: &Retention) -> bool {
        other.until >= self.until && other.mode >= self.mode
    }
}

impl fmt::Display for Retention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} until {}", self.mode, seconds(self.until))
    }
}

fn seconds(t: DateTime<Utc>) -> String {
    t.to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// Not earlier, and without a fraction: servers keep fractions differently.
fn whole_seconds(t: DateTime<Utc>) -> DateTime<Utc> {
    match t.duration_trunc(TimeDelta::seconds(1)) {
        Ok(cut) if cut < t => cut + TimeDelta::seconds(1),
        Ok(cut) => cut,
        Err(_) => t,
    }
}

impl Store {
    /// Whether objects can be locked here. The answer is asked for once.
    ///
    /// # Errors
    /// `StoreUnreachable`, `PermissionDenied`, `Unauthenticated`, `NoSnapshots` where the bucket is
    /// not there.
    pub fn object_lock(&self) -> Result<ObjectLock> {
        let Some(s3) = &self.s3 else {
            return Ok(ObjectLock::Unsupported(
                "only S3 locks objects this way".to_owned(),
            ));
        };
        let what = format!("ask whether {} has an object lock", self.url());
        let asked = self.object_lock.get_or_try_init(async || {
            let bucket = Path::default();
            let answer = s3.get(&what, &bucket, &[("object-lock", "")]).await?;
            read_lock(&what, &answer)
        });
        self.block_on(asked)?.cloned()
    }

    /// Until when an object cannot be deleted, or that version of it; `None` where it is not locked.
    ///
    /// # Errors
    /// The store's; `SnapshotVanished` where the object or the version is not there.
    pub fn retention(&self, below: &str, version: Option<&str>) -> Result<Option<Retention>> {
        let read = |said| match said {
            Document::Retention(said) => retention_of(&said),
            _ => None,
        };
        let said = self.ask_of_lock("retention", below, version, "retention", read);
        said.map(Option::flatten)
    }

    /// Whether a legal hold keeps an object, or that version of it, from being deleted.
    ///
    /// # Errors
    /// Those of [`retention`](Self::retention).
    pub fn legal_hold(&self, below: &str, version: Option<&str>) -> Result<bool> {
        let read = |said| match said {
            Document::LegalHold(said) => Some(said.status == "ON"),
            _ => None,
        };
        let said = self.ask_of_lock("legal hold", below, version, "legal-hold", read);
        said.map(|said| said == Some(true))
    }

    /// `None` if there is no lock that could be set.
    fn ask_of_lock<T>(
        &self,
        of_what: &str,
        below: &str,
        version: Option<&str>,
        question: &str,
        read: impl Fn(Document) -> Option<T>,
    ) -> Result<Option<T>> {
        let what = &format!("read the {of_what} of {}", self.name(below));
        let Some(s3) = &self.s3 else {
            return Ok(None);
        };
        match self.object_lock() {
            Ok(ObjectLock::Enabled { .. }) => {}
            Ok(_) => return Ok(None),
            // Who may not ask of the bucket may still ask of an object.
            Err(e) if e.reason() == Reason::PermissionDenied => {}
            Err(e) => return Err(e),
        }
        let mut query = vec![(question, "")];
        query.extend(version.map(|v| ("versionId", v)));
        let path = self.path(below);
        let answer = self.block_on(s3.get(what, &path, &query))??;
        if answer.is_object_missing() {
            return Err(gone(what));
        }
        match (answer.status, &*answer.code()) {
            (200..=299, _) => match answer.document().and_then(read) {
                Some(said) => Ok(Some(said)),
                None => Err(answer.not_understood(what)),
            },
            // It has none; a deletion's mark cannot have any; the bucket has no lock.
            (404 | 405 | 501, _)
            | (
                400,
                "InvalidRequest"
                | "NoSuchObjectLockConfiguration"
                | "ObjectLockConfigurationNotFoundError",
            ) => Ok(None),
            _ => Err(answer.refusal(what)),
        }
    }

    /// Locks an object, or a version of it, and reads back that it is. Which retention it had is the
    /// caller's to know: this one is set whatever that was, so far as the store lets it.
    ///
    /// # Errors
    /// The store's; `Configuration` where the bucket has no lock enabled, or where the store took the
    /// retention and does not keep it; `PermissionDenied` also where it would shorten what must not be
    /// shortened; `SnapshotVanished`.
    pub fn retain(&self, below: &str, version: Option<&str>, retention: &Retention) -> Result<()> {
        let what = format!("lock {}", self.name(below));
        let (Some(s3), ObjectLock::Enabled { .. }) = (&self.s3, self.object_lock()?) else {
            return Err(Reason::Configuration.error(format!(
                "cannot {what}: the bucket has no object lock enabled"
            )));
        };
        let asked = Retention {
            until: whole_seconds(retention.until),
            ..*retention
        };
        let body = format!(
            r#"<Retention xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Mode>{}</Mode><RetainUntilDate>{}</RetainUntilDate></Retention>"#,
            <&str>::from(asked.mode),
            seconds(asked.until)
        );
        let mut query = vec![("retention", "")];
        query.extend(version.map(|v| ("versionId", v)));
        let path = self.path(below);
        let put = |headers| s3.ask(&what, Method::PUT, &path, &query, headers, body.clone());
        let mut answer = self.block_on(put(&[]))??;
        if answer.is_object_missing() {
            return Err(gone(&what));
        }
        // Some servers want the right to pass over a lock even to make it stricter; nothing of it is lost.
        if matches!(answer.status, 400 | 403)
            && let Some(has) = self.retention(below, version)?
            && has.mode < asked.mode
            && has.is_covered_by(&asked)
        {
            let bypass = [("x-amz-bypass-governance-retention", "true".to_owned())];
            answer = self.block_on(put(&bypass))??;
        }
        answer.accepted(&what)?;
        match self.retention(below, version)? {
            Some(kept) if asked.is_covered_by(&kept) => Ok(()),
            kept => Err(Reason::Configuration.error(format!(
                    "{} was to be locked ({asked}) and the store said that it is, but reads back {}: do not rely on this store's locks",
                    self.name(below),
                    kept.map_or("unlocked".to_owned(), |k| k.to_string())
                ),
            )),
        }
    }
}

fn gone(what: &str) -> Error {
    let why = format!("cannot {what}: it is gone; run again");
    Reason::SnapshotVanished.error(why)
}

fn read_lock(what: &str, answer: &Answer) -> Result<ObjectLock> {
    let code = answer.code();
    match answer.status {
        200..=299 => Ok(match answer.document() {
            Some(Document::ObjectLockConfiguration(said)) => {
                match said.object_lock_enabled == "Enabled" {
                    true => ObjectLock::Enabled {
                        default: said.rule.default_retention.map(default_rule),
                    },
                    false => ObjectLock::Disabled,
                }
            }
            _ => ObjectLock::Unsupported(
                "the store answers something else when it is asked for the bucket's lock"
                    .to_owned(),
            ),
        }),
        404 if code != "NoSuchBucket" => Ok(ObjectLock::Disabled),
        400 | 405 | 501 => {
            let code = if code.is_empty() { "no reason" } else { &code };
            let status = answer.status;
            let why = format!("the store answers {status} ({code})");
            Ok(ObjectLock::Unsupported(why))
        }
        _ => Err(answer.refusal(what)),
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

/// `Some(None)` if it says that there is none.
fn retention_of(said: &Said) -> Option<Option<Retention>> {
    match (&*said.mode, &*said.retain_until_date) {
        ("", "") => Some(None),
        (mode, until) => Some(Some(Retention {
            mode: mode.parse().ok()?,
            until: DateTime::parse_from_rfc3339(until).ok()?.to_utc(),
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::retrying_client::answer;

    #[test]
    fn only_a_bucket_that_says_so_has_a_lock() {
        let lock = |status, body: &str| read_lock("ask", &answer(status, body));
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
        // A server that ignores the question, and lists the bucket.
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
    fn a_retention_is_read_whole_or_not_at_all() {
        let read = |inner: &str| {
            let xml = format!("<Retention>{inner}</Retention>");
            match Document::read(xml.as_bytes()) {
                Some(Document::Retention(said)) => retention_of(&said),
                other => panic!("{other:?}"),
            }
        };
        let until = "<RetainUntilDate>2027-01-01T00:00:00.5Z</RetainUntilDate>";
        let got = read(&format!("<Mode>COMPLIANCE</Mode>{until}"))
            .unwrap()
            .unwrap();
        assert_eq!(got.mode, Mode::Compliance);
        assert_eq!(got.until.to_rfc3339(), "2027-01-01T00:00:00.500+00:00");
        assert_eq!(read(""), Some(None));
        assert_eq!(read(until), None);
        assert_eq!(read(&format!("<Mode>FOREVER</Mode>{until}")), None);
        assert_eq!(
            read("<Mode>GOVERNANCE</Mode><RetainUntilDate>soon</RetainUntilDate>"),
            None
        );
    }

    #[test]
    fn a_time_is_never_cut_short() {
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
    fn covered_is_as_long_and_as_strict() {
        let r = |mode, hour: u32| Retention {
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
