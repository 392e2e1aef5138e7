//! Names of snapshots: parses and writes them, in the format of etcd-backup-restore.
//!
//! It does not look at contents. Called wherever objects of a store are named.

use crate::backup::codec::Compression;
use crate::mvcc::Revision;
use chrono::{DateTime, Utc};
use serde::Serialize;
use std::fmt;
use std::str::FromStr;

/// The suffix of encrypted snapshots. It is the last suffix of a name.
pub const ENCRYPTED: &str = ".age";

/// The kind of a snapshot: full or delta.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    strum::EnumString,
    strum::IntoStaticStr,
)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Kind {
    /// A full snapshot: etcd's database.
    Full,
    /// A delta snapshot: the events of a range of revisions.
    Incr,
}

impl Kind {
    /// The kind as it is spelled in names: `Full` or `Incr`.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// A snapshot's name: `Full|Incr-<start>-<last>-<unix seconds>[.gz|.zlib|.Z|.zst][.final][.age]`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SnapshotName {
    /// The kind: full or delta.
    pub kind: Kind,
    /// The first revision of a delta; 0 for a full.
    pub start: Revision,
    /// The last revision.
    pub last: Revision,
    /// When the snapshot was taken, in seconds since 1970 (UTC).
    pub created: i64,
    /// The compression, by the suffix.
    pub compression: Compression,
    /// Whether it is the last snapshot of a cluster that was given up (`.final`).
    pub is_final: bool,
    /// Whether it is encrypted with age (`.age`). etcd-backup-restore cannot read such a snapshot.
    pub is_encrypted: bool,
}

impl SnapshotName {
    /// Returns when the snapshot was taken.
    pub fn created_at(&self) -> DateTime<Utc> {
        DateTime::from_timestamp(self.created, 0).unwrap_or_default()
    }

    /// Returns a short text for progress: `full 275`, or `delta to 445`.
    pub fn label(&self) -> String {
        let kind = match self.kind {
            Kind::Full => "full",
            Kind::Incr => "delta to",
        };
        format!("{kind} {}", self.last)
    }

    /// Returns whether it is the name of a full.
    pub fn is_full(&self) -> bool {
        self.kind == Kind::Full
    }
}

impl fmt::Display for SnapshotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}-{:08}-{:08}-{}{}{}{}",
            self.kind.as_str(),
            self.start.0,
            self.last.0,
            self.created,
            self.compression.suffix(),
            if self.is_final { ".final" } else { "" },
            if self.is_encrypted { ENCRYPTED } else { "" }
        )
    }
}

/// The error for a text that is not the name of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotASnapshot;

impl FromStr for SnapshotName {
    type Err = NotASnapshot;

    fn from_str(s: &str) -> Result<Self, NotASnapshot> {
        fn cut<'s>(s: &'s str, suffix: &str) -> (&'s str, bool) {
            s.strip_suffix(suffix).map_or((s, false), |s| (s, true))
        }
        let (s, is_encrypted) = cut(s, ENCRYPTED);
        let (s, is_final) = cut(s, ".final");
        let (s, suffix) = s.split_at(s.find('.').unwrap_or(s.len()));
        let compression = Compression::from_suffix(suffix).ok_or(NotASnapshot)?;
        let mut parts = s.split('-');
        let kind = parts.next().and_then(|p| p.parse().ok());
        let kind: Kind = kind.ok_or(NotASnapshot)?;
        let mut number = || {
            let digits = parts.next().ok_or(NotASnapshot)?;
            if digits.bytes().all(|b| b.is_ascii_digit()) {
                digits.parse::<i64>().map_err(|_| NotASnapshot)
            } else {
                Err(NotASnapshot)
            }
        };
        let (start, last, created) = (Revision(number()?), Revision(number()?), number()?);
        let is_valid_range = match kind {
            Kind::Full => start.0 == 0,
            Kind::Incr => start.0 > 0 && start <= last,
        };
        // Arithmetic with these revisions and times cannot overflow.
        let in_range = last.0 < i64::MAX && DateTime::from_timestamp(created, 0).is_some();
        if parts.next().is_some() || !is_valid_range || !in_range {
            return Err(NotASnapshot);
        }
        Ok(SnapshotName {
            kind,
            start,
            last,
            created,
            compression,
            is_final,
            is_encrypted,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_and_written_back_unchanged() {
        for s in [
            "Full-00000000-00000746-1795224681.gz",
            "Incr-00000747-00001499-1795224687",
            "Incr-00001502-00002254-1795224740.Z",
            "Full-00000000-123456789012-1795224740.zlib.final",
            "Full-00000000-00000001-1.zst",
            "Incr-00000001-00000001-1.final",
            "Incr-00000001-00000001-1.age",
            "Full-00000000-00000001-1.gz.age",
            "Full-00000000-00000001-1.zst.final.age",
        ] {
            assert_eq!(s.parse::<SnapshotName>().unwrap().to_string(), s);
        }
    }

    /// A progress bar has 26 columns for the step: a longer text would be cut.
    #[test]
    fn a_label_fits_a_progress_bar() {
        for (name, label) in [
            ("Full-00000000-00000746-1795224681.gz", "full 746"),
            (
                "Incr-00000747-123456789012-1795224687",
                "delta to 123456789012",
            ),
        ] {
            let shown = name.parse::<SnapshotName>().unwrap().label();
            assert_eq!(shown, label);
            assert!("copy ".len() + shown.len() <= 26, "{shown}");
        }
    }

    #[test]
    fn other_objects_are_not_snapshots() {
        for s in [
            "",
            "Full",
            "README.md",
            "Full-00000000-00000746-1795224681.bz2",
            "Full-00000001-00000746-1795224681",
            "Incr-00000000-00000746-1795224681",
            "Incr-00000748-00000747-1795224681",
            "Incr-+0000747-00000748-1795224681",
            "Full-00000000-00000746-1795224681-1",
            "Full-00000000-00000746-1795224681.gz.tmp",
            "Full-00000000-00000746-1795224681.age.gz",
            "Full-00000000-00000746-1795224681.age.final",
            "Full-00000000-00000746-1795224681.age.age",
            "Full-00000000-00000746",
            "full-00000000-00000746-1795224681",
            "Full-00000000-99999999999999999999-1795224681",
            "Full-00000000-9223372036854775807-1795224681",
            "Full-00000000-00000746-9223372036854775807",
            "Full-00000000-00000746-1795224681.gz#1",
        ] {
            assert!(s.parse::<SnapshotName>().is_err(), "{s}");
        }
    }
}
