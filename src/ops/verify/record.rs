//! Verification records: the last verification of each level, as one small object beside the snapshots.
//!
//! A record is about the bytes of one store, so `copy` leaves it behind. The records prove nothing: anybody who
//! can write to the store can write them. They hold no messages and no keys. `ops::verify` writes them, and
//! `ops::status` reads them.

use crate::base::opt::{ALL_CHAINS, ETCD_BINARY, NO_RECORD, Opt};
use crate::base::time::utc;
use crate::error::{Error, Reason, Result};
use crate::mvcc::Revision;
use crate::ops::report::ReportBuilder;
use crate::prefix::side_objects::VERIFIED;
use crate::store::Store;
use chrono::{DateTime, SubsecRound, Utc};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The version of the format.
const FORMAT_VERSION: u32 = 1;
/// The largest record that is read, in bytes: a record has some hundred.
const MOST_BYTES: u64 = 64 << 10;
/// The longest text in a record, in bytes.
const LONGEST_TEXT: usize = 128;

/// What a verification covered, the shallowest first.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum RecordLevel {
    /// Names only
    Names,
    /// Every byte
    Checksums,
    /// The folded state
    Fold,
    /// The folded state and the HashKV of a live etcd's members
    Cluster,
}

impl RecordLevel {
    /// All levels.
    pub const ALL: [RecordLevel; 4] = [
        RecordLevel::Names,
        RecordLevel::Checksums,
        RecordLevel::Fold,
        RecordLevel::Cluster,
    ];

    /// Returns the level's name.
    pub fn as_str(self) -> &'static str {
        match self {
            RecordLevel::Names => "names",
            RecordLevel::Checksums => "checksums",
            RecordLevel::Fold => "fold",
            RecordLevel::Cluster => "cluster",
        }
    }

    /// Returns the path of the level's record, below the prefix.
    pub fn path(self) -> String {
        format!("{VERIFIED}/{}.json", self.as_str())
    }
}

/// The result of a verification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RecordResult {
    /// No error was found
    Verified,
    /// At least one error was found
    Failed,
}

/// The last verification of a level.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VerificationRecord {
    /// The version of the format.
    pub format_version: u32,
    /// What was verified.
    pub level: RecordLevel,
    /// When the verification ended, by the clock of the machine that ran it.
    pub time: DateTime<Utc>,
    /// The result.
    pub result: RecordResult,
    /// The name of the reason of the worst error; `None` if there is none.
    #[serde(default)]
    pub reason: Option<String>,
    /// The ID of the timeline; `None` if no timeline is the newest.
    #[serde(default)]
    pub timeline: Option<String>,
    /// The newest revision that was verified; `None` if nothing can be restored.
    #[serde(default)]
    pub revision: Option<Revision>,
    /// The HashKV at `revision`; `None` if it was not computed.
    #[serde(default)]
    pub hash_kv: Option<u32>,
    /// The compacted revision that `hash_kv` depends on; −1 if nothing was compacted.
    #[serde(default)]
    pub compact_revision: Option<Revision>,
    /// Whether all chains of all timelines were verified; otherwise only the newest chain.
    #[serde(default)]
    pub all_chains: bool,
    /// Whether the restore drill succeeded; `None` if there was none.
    #[serde(default)]
    pub drill_succeeded: Option<bool>,
    /// The version of the program that verified.
    #[serde(default)]
    pub program_version: String,
}

impl VerificationRecord {
    /// Returns the record of a verification of this program that ends now and found no error.
    pub fn new(level: RecordLevel) -> Self {
        VerificationRecord {
            format_version: FORMAT_VERSION,
            level,
            time: Utc::now().trunc_subsecs(0),
            result: RecordResult::Verified,
            reason: None,
            timeline: None,
            revision: None,
            hash_kv: None,
            compact_revision: None,
            all_chains: false,
            drill_succeeded: None,
            program_version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    /// Returns the record of a verification that failed for this reason.
    pub fn failed(self, reason: Reason) -> Self {
        VerificationRecord {
            result: RecordResult::Failed,
            reason: Some(reason.as_str().to_owned()),
            ..self
        }
    }

    /// Returns the reason of the failure, if this program knows it.
    pub fn known_reason(&self) -> Option<Reason> {
        let name = self.reason.as_deref()?;
        Reason::ALL.iter().copied().find(|r| r.as_str() == name)
    }

    /// Returns whether this verification looked at all that the other one looked at.
    pub fn covers(&self, other: &VerificationRecord) -> bool {
        self.level >= other.level
            && self.all_chains >= other.all_chains
            && (other.drill_succeeded != Some(false) || self.drill_succeeded.is_some())
    }

    /// Parses the content of a level's object, which anybody may have written.
    fn parse(level: RecordLevel, content: &[u8]) -> Result<Self, String> {
        let record: VerificationRecord =
            serde_json::from_slice(content).map_err(|e| e.to_string())?;
        if record.format_version != FORMAT_VERSION {
            return Err(format!(
                "its format version is {}, and this deltafold knows {FORMAT_VERSION}",
                record.format_version
            ));
        }
        if record.level != level {
            return Err(format!("it is of the level {}", record.level.as_str()));
        }
        let texts = [&record.reason, &record.timeline].into_iter().flatten();
        if texts
            .chain([&record.program_version])
            .any(|t| t.len() > LONGEST_TEXT)
        {
            return Err(format!("it has a text of more than {LONGEST_TEXT} bytes"));
        }
        if record.revision.is_some_and(|r| r.0 < 0) {
            return Err("its revision is below 0".to_owned());
        }
        Ok(record)
    }
}

/// Writes a record over the last one of its level. Returns its path, or `None` with a warning: if the store
/// refuses the write, or if the last one is a failure that this verification did not look for. The
/// verification counts without its record.
pub(super) fn save(
    store: &Store,
    record: &VerificationRecord,
    clock: &mut ReportBuilder,
) -> Option<String> {
    // A record that cannot be read is replaced. If the store fails, the write says so.
    if let Ok(Ok(Some(last))) = read(store, record.level)
        && last.result == RecordResult::Failed
        && !record.covers(&last)
    {
        let (what, flag) = match last.drill_succeeded {
            Some(false) => ("restore drill", ETCD_BINARY),
            _ => ("verification of all chains", ALL_CHAINS),
        };
        clock.warn(format!(
            "this verification is not recorded: {} tells of a {what} that failed at {}, and stays until {flag} has repeated it",
            record.level.path(),
            utc(last.time)
        ));
        return None;
    }
    match replace(store, record) {
        Ok(()) => Some(record.level.path()),
        Err(e) => {
            clock.warn(format!(
                "this verification is not recorded in {VERIFIED}/, so `deltafold status` does not know of it: {e}; allow the write, or give {NO_RECORD}"
            ));
            None
        }
    }
}

/// Returns the warning about a verification that a flag has bounded: a record tells of the whole newest chain.
pub(super) fn not_recorded(flag: Opt) -> String {
    format!("this verification is not recorded for `deltafold status`, because of {flag}")
}

fn replace(store: &Store, record: &VerificationRecord) -> Result<()> {
    let mut bytes = serde_json::to_vec_pretty(record)
        .map_err(|e| Error::internal(format!("a record cannot be written as JSON: {e}")))?;
    bytes.push(b'\n');
    store.replace_small(&record.level.path(), &bytes)
}

/// Reads the record of a level. Returns `None` if there is none, and a message if the object is no record or
/// cannot be read.
///
/// # Errors
/// `StoreUnreachable`, `Terminated`.
pub fn read(
    store: &Store,
    level: RecordLevel,
) -> Result<Result<Option<VerificationRecord>, String>> {
    let path = level.path();
    let content = match store.read_small(&path, MOST_BYTES) {
        Ok(content) => content,
        Err(e) if matches!(e.reason(), Reason::StoreUnreachable | Reason::Terminated) => {
            return Err(e);
        }
        Err(e) => return Ok(Err(e.to_string())),
    };
    let record = content.map(|c| VerificationRecord::parse(level, &c));
    Ok(record.transpose().map_err(|problem| {
        format!(
            "{} is not a valid record and is ignored, until the next `deltafold verify` of that level replaces it: {problem}",
            store.name(&path)
        )
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verification_covers_what_is_not_deeper_nor_wider() {
        let fold = VerificationRecord::new(RecordLevel::Fold);
        let drill = |succeeded| VerificationRecord {
            drill_succeeded: Some(succeeded),
            ..fold.clone()
        };
        let wide = VerificationRecord {
            all_chains: true,
            ..fold.clone()
        };
        let names = VerificationRecord::new(RecordLevel::Names);
        for (new, old, covers) in [
            (&fold, &fold, true),
            (&fold, &names, true),
            (&names, &fold, false),
            (&fold, &wide, false),
            (&wide, &fold, true),
            (&fold, &drill(false), false),
            (&fold, &drill(true), true),
            (&drill(true), &drill(false), true),
            (&wide, &drill(false), false),
        ] {
            assert_eq!(new.covers(old), covers, "{new:?} {old:?}");
        }
    }

    #[test]
    fn only_valid_records_are_parsed() {
        let record = VerificationRecord {
            timeline: Some("main".to_owned()),
            revision: Some(Revision(7)),
            hash_kv: Some(1),
            ..VerificationRecord::new(RecordLevel::Fold)
        }
        .failed(Reason::DrillFailed);
        let text = serde_json::to_vec(&record).unwrap();
        let parsed = VerificationRecord::parse(RecordLevel::Fold, &text).unwrap();
        assert_eq!(parsed, record);
        assert_eq!(parsed.known_reason(), Some(Reason::DrillFailed));
        assert!(VerificationRecord::parse(RecordLevel::Names, &text).is_err());

        let valid =
            r#""formatVersion":1,"level":"fold","time":"2026-11-20T12:00:00Z","result":"Verified""#;
        let long = "x".repeat(LONGEST_TEXT + 1);
        for (content, ok) in [
            (format!("{{{valid}}}"), true),
            (format!("{{{valid},\"later\":[1]}}"), true),
            (format!("{{{valid},\"revision\":-1}}"), false),
            (format!("{{{valid},\"timeline\":\"{long}\"}}"), false),
            (format!("{{{valid},\"reason\":\"{long}\"}}"), false),
            (format!("{{{valid},\"programVersion\":\"{long}\"}}"), false),
            (format!("{{{}}}", valid.replace(":1,", ":2,")), false),
            (format!("{{{}}}", valid.replace("2026-", "")), false),
            (format!("{{{}}}", valid.replace("Verified", "Fine")), false),
            ("{}".to_owned(), false),
            (String::new(), false),
        ] {
            let parsed = VerificationRecord::parse(RecordLevel::Fold, content.as_bytes());
            assert_eq!(parsed.is_ok(), ok, "{content}");
        }
    }
}
