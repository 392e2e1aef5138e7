//! Object lock: whether a bucket has one, and until when its objects cannot be deleted.
//!
//! A server may take a retention and keep none, and one even writes the request over the object. So nothing
//! is asked or set before the bucket says that its lock is enabled, and what was set is read back. Which
//! objects are locked, and for how long, `job` decides.

use super::Store;
use super::signed::{Answer, S3};
use super::xml::Element;
use crate::error::{Error, Reason, Result};
use chrono::{DateTime, DurationRound, SecondsFormat, TimeDelta, Utc};
use http::Method;
use schemars::JsonSchema;
use serde::Serialize;
use std::fmt;

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

/// Who may still delete what is locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, JsonSchema, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Whoever has the right to pass over it.
    Governance,
    /// Nobody, before the time has come.
    Compliance,
}

impl Mode {
    fn as_s3(self) -> &'static str {
        match self {
            Mode::Governance => "GOVERNANCE",
            Mode::Compliance => "COMPLIANCE",
        }
    }

    fn of_s3(text: &str) -> Option<Self> {
        match text {
            "GOVERNANCE" => Some(Mode::Governance),
            "COMPLIANCE" => Some(Mode::Compliance),
            _ => None,
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Governance => "governance",
            Mode::Compliance => "compliance",
        })
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
        self.block_on(lock_of(s3, self.url()))?
    }

    /// Until when an object cannot be deleted, or that version of it; `None` where it is not locked.
    ///
    /// # Errors
    /// The store's; `SnapshotVanished` where the object or the version is not there.
    pub fn retention(&self, below: &str, version: Option<&str>) -> Result<Option<Retention>> {
        let what = format!("read the retention of {}", self.name(below));
        let Some(answer) = self.ask_of_lock(&what, below, version, "retention")? else {
            return Ok(None);
        };
        // versitygw's word for it is the longer one.
        let root = answer
            .xml("Retention")
            .or(answer.xml("ObjectLockRetention"));
        let read = root.and_then(|e| retention_of(&e));
        read.ok_or_else(|| answer.not_understood(&what))
    }

    /// Whether a legal hold keeps an object, or that version of it, from being deleted.
    ///
    /// # Errors
    /// Those of [`retention`](Self::retention).
    pub fn legal_hold(&self, below: &str, version: Option<&str>) -> Result<bool> {
        let what = format!("read the legal hold of {}", self.name(below));
        let Some(answer) = self.ask_of_lock(&what, below, version, "legal-hold")? else {
            return Ok(false);
        };
        let root = answer
            .xml("LegalHold")
            .ok_or_else(|| answer.not_understood(&what))?;
        Ok(root.text_of("Status") == Some("ON"))
    }

    /// `None` where there is no lock that could be set.
    fn ask_of_lock(
        &self,
        what: &str,
        below: &str,
        version: Option<&str>,
        question: &str,
    ) -> Result<Option<Answer>> {
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
        let answer = self.block_on(s3.ask(what, Method::GET, &path, &query, String::new()))??;
        if answer.is_object_missing() {
            return Err(Error::new(
                Reason::SnapshotVanished,
                format!("cannot {what}: it is gone; run again"),
            ));
        }
        match (answer.status, &*answer.code()) {
            (200..=299, _) => Ok(Some(answer)),
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
            return Err(Error::new(
                Reason::Configuration,
                format!("cannot {what}: the bucket has no object lock enabled"),
            ));
        };
        let asked = Retention {
            until: whole_seconds(retention.until),
            ..*retention
        };
        let body = format!(
            r#"<Retention xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Mode>{}</Mode><RetainUntilDate>{}</RetainUntilDate></Retention>"#,
            asked.mode.as_s3(),
            seconds(asked.until)
        );
        let mut query = vec![("retention", "")];
        query.extend(version.map(|v| ("versionId", v)));
        let path = self.path(below);
        let put = |headers| s3.ask_with(&what, Method::PUT, &path, &query, headers, body.clone());
        let mut answer = self.block_on(put(&[]))??;
        if answer.is_object_missing() {
            return Err(Error::new(
                Reason::SnapshotVanished,
                format!("cannot {what}: it is gone; run again"),
            ));
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
        if !answer.is_success() {
            return Err(answer.refusal(&what));
        }
        let kept = self.retention(below, version)?;
        match kept {
            Some(kept) if asked.is_covered_by(&kept) => Ok(()),
            kept => Err(Error::new(
                Reason::Configuration,
                format!(
                    "{} was to be locked ({asked}) and the store said that it is, but reads back {}: do not rely on this store's locks",
                    self.name(below),
                    kept.map_or("unlocked".to_owned(), |k| k.to_string())
                ),
            )),
        }
    }
}

async fn lock_of(s3: &S3, url: &str) -> Result<ObjectLock> {
    let what = format!("ask whether {url} has an object lock");
    let asked = s3.lock.get_or_try_init(async || {
        let asked = s3.ask_bucket(&what, &[("object-lock", "")]);
        read_lock(&what, &asked.await?)
    });
    asked.await.cloned()
}

fn read_lock(what: &str, answer: &Answer) -> Result<ObjectLock> {
    let said = || {
        let code = answer.code();
        let code = if code.is_empty() { "no reason" } else { &code };
        format!("the store answers {} ({code})", answer.status)
    };
    match answer.status {
        200..=299 => {
            let Some(root) = answer.xml("ObjectLockConfiguration") else {
                return Ok(ObjectLock::Unsupported(
                    "the store answers something else when it is asked for the bucket's lock"
                        .to_owned(),
                ));
            };
            if root.text_of("ObjectLockEnabled") != Some("Enabled") {
                return Ok(ObjectLock::Disabled);
            }
            let rule = root.child("Rule").and_then(|r| r.child("DefaultRetention"));
            Ok(ObjectLock::Enabled {
                default: rule.map(default_rule),
            })
        }
        404 if answer.code() == "NoSuchBucket" => Err(answer.refusal(what)),
        404 => Ok(ObjectLock::Disabled),
        400 | 405 | 501 => Ok(ObjectLock::Unsupported(said())),
        _ => Err(answer.refusal(what)),
    }
}

fn default_rule(rule: &Element) -> String {
    let mode = rule.text_of("Mode").unwrap_or("no mode");
    let time = |unit: &str| {
        let n = rule.text_of(unit).filter(|n| !n.is_empty() && *n != "0")?;
        Some(format!("{mode}, {n} {}", unit.to_lowercase()))
    };
    time("Days")
        .or_else(|| time("Years"))
        .unwrap_or_else(|| mode.to_owned())
}

/// `Some(None)` where it says that there is none.
fn retention_of(root: &Element) -> Option<Option<Retention>> {
    let (mode, until) = (root.text_of("Mode"), root.text_of("RetainUntilDate"));
    match (mode, until) {
        (None | Some(""), None | Some("")) => Some(None),
        (Some(mode), Some(until)) => Some(Some(Retention {
            mode: Mode::of_s3(mode)?,
            until: DateTime::parse_from_rfc3339(until).ok()?.to_utc(),
        })),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, body: &str) -> Answer {
        Answer {
            status,
            body: body.to_owned().into(),
        }
    }

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
            retention_of(&super::super::xml::parse(xml.as_bytes()).unwrap())
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
