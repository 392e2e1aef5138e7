//! The findings about a backup: what is wrong or worth knowing, where, and what helps. `list`, `status` and `verify`
//! share them; `explore` shows them.

use crate::backup::chain;
use crate::backup::timeline::{Timeline, overlaps};
use crate::backup::{Catalog, Snapshot};
use crate::base::opt::TIMELINE;
use crate::base::shell;
use crate::error::{Error, Reason};
use crate::mvcc::Revision;
use crate::prefix::Context;
use crate::prefix::scan::{Scan, TAGS_UNREADABLE};
use serde::Serialize;

/// Whether something is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// It is wrong.
    Error,
    /// It is worth knowing.
    Note,
}

/// The reasons of notes. Errors have the reasons of exit-codes.md.
#[cfg(test)]
const NOTES: [&str; 17] = [
    "DrillSkipped",
    "Excluded",
    "ForeignObject",
    "ForkedHistory",
    "GapIsCovered",
    "HistoryNotProven",
    "IdentityUnreadable",
    "MisplacedMark",
    "MissingBase",
    "OverlappingDeltas",
    "RecordUnreadable",
    "RevisionPastName",
    "RevisionsNotCovered",
    "TagsUnreadable",
    "TimelineRecordUnreadable",
    "TimelinesUnverified",
    "TooManyTimelines",
];

/// Something that is wrong with a backup, or worth knowing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Finding {
    /// `error`: it is wrong. `note`: it is worth knowing.
    pub severity: Severity,
    /// A stable name. An error has one of exit-codes.md. A note has one of: `DrillSkipped` (the timeline cannot be
    /// folded to its end), `Excluded` (the snapshot has an exclusion marker), `ForeignObject` (the object is not named
    /// like a snapshot), `ForkedHistory` (there is more than one timeline), `GapIsCovered` (deltas are missing, but the
    /// next full holds their history), `HistoryNotProven` (etcd had compacted what was saved last, so it is not known
    /// whether it went on with that history), `IdentityUnreadable` (`deltafold-identity.json` cannot be read), `MissingBase`
    /// (by names, no full precedes these deltas), `OverlappingDeltas` (two streams of deltas), `RecordUnreadable` (a record in
    /// `deltafold-verified/` cannot be read), `RevisionPastName` (a full holds more than its name says; harmless),
    /// `RevisionsNotCovered` (no deltas lead up to a full),
    /// `TagsUnreadable` (the store does not permit to read tags, so excluded snapshots are not recognized),
    /// `TimelineRecordUnreadable` (a record in `deltafold-timelines/` cannot be read), `TimelinesUnverified` (only the
    /// contents show whether the history forked), `TooManyTimelines` (more than 100 histories contradict each other:
    /// these snapshots are on no timeline).
    #[cfg_attr(test, schemars(extend("enum" = super::report::reasons_and(&NOTES))))]
    pub reason: &'static str,
    /// What it is. Human-readable: the text may change.
    pub message: String,
    /// The ID of the timeline; null if it is about none, or about several.
    pub timeline: Option<String>,
    /// The paths of the objects concerned, below the store's prefix. May be empty.
    pub snapshots: Vec<String>,
    /// A command that helps or shows more; null if none does.
    pub remedy: Option<String>,
    /// The reason of an error.
    #[serde(skip)]
    failure: Option<Reason>,
}

impl Finding {
    /// A note.
    pub(super) fn note(
        reason: &'static str,
        message: impl Into<String>,
        snapshots: Vec<String>,
    ) -> Self {
        Finding {
            severity: Severity::Note,
            reason,
            message: message.into(),
            timeline: None,
            snapshots,
            remedy: None,
            failure: None,
        }
    }

    /// An error.
    pub(super) fn error(reason: Reason, message: impl Into<String>) -> Self {
        Finding {
            severity: Severity::Error,
            failure: Some(reason),
            ..Self::note(reason.as_str(), message, Vec::new())
        }
    }

    /// The finding about these objects.
    pub(super) fn about(self, snapshots: Vec<String>) -> Self {
        Finding { snapshots, ..self }
    }

    /// The finding about a timeline.
    pub(super) fn on(self, timeline: Option<&Timeline>) -> Self {
        let timeline = timeline.map(|t| t.id.clone());
        Finding { timeline, ..self }
    }

    /// Returns the reason of an error; `None` of a note.
    pub(super) fn failure(&self) -> Option<Reason> {
        self.failure
    }

    /// Returns whether it is wrong, and not only worth knowing.
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }

    /// Sets the remedy of a finding about a store.
    pub(super) fn with_remedy_in_store(self, url: &str) -> Self {
        let flags: &[&str] = match (self.failure, self.reason) {
            (Some(Reason::NoSnapshots | Reason::Stale), _) => {
                &["snapshot", "full", "--endpoints", "URL"]
            }
            (Some(Reason::NotVerified), _) => &["verify", "--level", "fold"],
            (Some(Reason::SetBack), _) => &["list"],
            (Some(Reason::InterleavedTimelines), _) | (None, "TimelinesUnverified") => {
                &["list", "--deep"]
            }
            (Some(_), _) => &["verify", "--all-chains"],
            (None, _) => return self,
        };
        let words = [&["deltafold"], flags, &["--store", url]].concat();
        let remedy = shell::command(words);
        let remedy = Some(remedy);
        Finding { remedy, ..self }
    }

    /// Sets the remedy of a finding about plain snapshot files.
    pub(super) fn with_remedy_of_files(self, path: &str) -> Self {
        let remedy = self.failure.map(|reason| match reason {
            Reason::NoSnapshots | Reason::Stale => "deltafold snapshot save FILE".to_owned(),
            _ => shell::command(["deltafold", "verify", "--all-chains", "--snapshot", path]),
        });
        Finding { remedy, ..self }
    }
}

impl From<&Error> for Finding {
    fn from(e: &Error) -> Self {
        Finding::error(e.reason(), e.to_string())
    }
}

/// Returns what the names, tags, records of timelines and the contents of a scan show. `deep_command` is the command
/// or flag that reads contents; `None` if they were read.
pub(super) fn of_scan(ctx: &Context, scan: &Scan, deep_command: Option<&str>) -> Vec<Finding> {
    let catalog = &scan.catalog;
    let path = |i: usize| catalog.snapshots[i].path.clone();
    let paths = |which: &[usize]| which.iter().map(|&i| path(i)).collect::<Vec<_>>();
    let mut findings = Vec::new();
    if !catalog.foreign.is_empty() {
        let message = "the names of these objects are not those of snapshots: they are left alone";
        let foreign = catalog.foreign.clone();
        for (path, place) in catalog.misplaced_marks() {
            let message = format!(
                "this object excludes nothing: put an empty object {place}, and delete this one"
            );
            findings.push(Finding::note(
                "MisplacedMark",
                message,
                vec![path.to_owned()],
            ));
        }
        findings.push(Finding::note("ForeignObject", message, foreign));
    }
    if let Some(message) = scan.timelines.warning() {
        let left_out = paths(&scan.timelines.left_out);
        findings.push(Finding::note("TooManyTimelines", message, left_out));
    }
    if ctx.store.tags_refused() {
        let finding = Finding::note("TagsUnreadable", TAGS_UNREADABLE, Vec::new());
        findings.push(finding);
    }
    if let Some(deep_command) = deep_command.filter(|_| !scan.doubtful.is_empty()) {
        let message = format!(
            "revisions do not only grow in order of creation, because of two streams, a late compaction, or a forked history: use {deep_command} to find out"
        );
        let doubtful = paths(&scan.doubtful);
        findings.push(Finding::note("TimelinesUnverified", message, doubtful));
    }
    if let Err(e) = scan.refuse_untrusted(ctx) {
        findings.push(Finding::from(&e).about(paths(&scan.untrusted.refused)));
    }
    for wall in scan.timelines.without_full(catalog) {
        let message = format!(
            "another history begins here, and no full snapshot of it was saved: what follows is not used; the next snapshot is a full, and {TIMELINE} of the history before reads across this record"
        );
        let finding = Finding::error(Reason::RevisionGap, message);
        findings.push(finding.about(vec![wall.path.clone()]));
    }
    for (&i, e) in &scan.contents.unreadable {
        findings.push(Finding::from(e).about(vec![path(i)]));
    }
    let surveys = scan.contents.surveys.iter();
    findings.extend(surveys.filter_map(|(&i, s)| past_name(&catalog.snapshots[i], Some(s.last))));
    findings
}

/// Returns a note if deltas of a timeline repeat revisions of others.
pub(super) fn overlapping(
    catalog: &Catalog,
    timeline: &Timeline,
    which: impl Iterator<Item = usize>,
) -> Option<Finding> {
    let overlaps = overlaps(catalog, which);
    let snapshot = |i: usize| &catalog.snapshots[i];
    let &(one, other) = overlaps.last()?;
    let (one, other) = (&snapshot(one).name, &snapshot(other).name);
    let message = format!(
        "two snapshotters write here, or have written here: at last, one saved revisions {} to {}, the other {} to {}; if both still run, stop one of them",
        one.start, one.last, other.start, other.last
    );
    let mut which: Vec<usize> = overlaps.iter().flat_map(|o| [o.0, o.1]).collect();
    which.sort_unstable();
    which.dedup();
    let paths = which.into_iter().map(|i| snapshot(i).path.clone());
    let finding = Finding::note("OverlappingDeltas", message, paths.collect());
    Some(finding.on(Some(timeline)))
}

/// Returns the error for a gap after a full that only the content of the full may close. `deep_command` reads it.
pub(super) fn gap_after(
    scan: &Scan,
    timeline: &Timeline,
    full: usize,
    deep_command: &str,
) -> Error {
    let s = &scan.catalog.snapshots[full];
    let last = timeline.last(&scan.catalog, &scan.contents);
    let last = last.unwrap_or(s.name.last);
    let missing = chain::missing(&scan.catalog, timeline, s.name.last, last);
    Reason::RevisionGap.error(format!(
        "no snapshot has revisions {} in its name, but {} may hold more than its name says: use {deep_command} to find out",
        chain::show_ranges(&missing),
        s.path
    ))
}

/// Returns a note if a full holds later revisions than its name says.
pub(super) fn past_name(full: &Snapshot, last: Option<Revision>) -> Option<Finding> {
    let named = full.name.last;
    let last = last.filter(|&r| r > named)?;
    let message = format!(
        "it holds revisions up to {last}, and its name says {named}: this is harmless, fulls of a running etcd may hold more"
    );
    let paths = vec![full.path.clone()];
    Some(Finding::note("RevisionPastName", message, paths))
}
