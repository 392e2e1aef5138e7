//! What the page shows, computed from the index: pure functions, apart from reading records.
//!
//! The types are the answers of the API, which docs/design/explore.md documents.
//!
//! - `plot`: changes over time; `state`: what exists at a moment; `object`: one object
//! - `life`, `comparison`: one object over time; `lines`, `changes`: what changed between two moments

mod changes;
mod comparison;
mod life;
mod lines;
mod object;
mod plot;
mod state;
mod table;

pub(super) use changes::Changes;
pub(super) use comparison::Comparison;
pub(super) use life::Life;
pub(super) use lines::{Filter as LineFilter, Lines};
pub(super) use object::{Show, Shown};
pub(super) use plot::Density;
pub(super) use state::{Objects, Search, State};
pub(super) use table::{Filter, Table};

use super::index::{Index, Moment};
use super::kinds::Kind;
use crate::backup::chain::RevisionRange;
use crate::base::time::{self, Day, Zone, rfc3339};
use crate::error::{Reason, Result};
use crate::mvcc::Revision;
use crate::ops::read::versions::{DamagedSnapshot, Wall};
use chrono::{DateTime, Utc};
use serde::Serialize;

/// What the index covers.
#[derive(Debug, Serialize)]
pub(in crate::explore) struct Window {
    /// The timeline's ID; null for a plain snapshot file.
    timeline: Option<String>,
    /// The oldest revision whose state is known.
    first_revision: Revision,
    /// The newest revision whose state is known.
    last_revision: Revision,
    /// The time of the oldest state; null if no time is known.
    first_time: Option<String>,
    /// The newest time.
    last_time: Option<String>,
    /// Ranges of revisions whose states are unknown: from a change that no snapshot holds to the next full.
    missing: Vec<RevisionRange>,
    /// The snapshots that are left out because they are damaged.
    damaged: Vec<DamagedSnapshot>,
    /// All kinds.
    kinds: Vec<Kind>,
    /// The number of keys over the whole window.
    keys: usize,
    /// The number of their versions.
    versions: usize,
    /// Where the history left others.
    walls: Vec<Wall>,
    /// Warnings for the operator.
    warnings: Vec<String>,
}

impl Window {
    pub(in crate::explore) fn of(index: &Index) -> Self {
        let last = index.newest();
        let (first, newest) = (index.moments().first(), index.moments().last());
        Window {
            timeline: index.coverage.timeline.clone(),
            first_revision: index.first,
            last_revision: last,
            first_time: first.map(|m| rfc3339(m.time)),
            last_time: newest.map(|m| rfc3339(m.time)),
            missing: index.unknown.clone(),
            damaged: index.coverage.damaged.clone(),
            kinds: index.kinds.all().to_vec(),
            keys: index.keys.len(),
            versions: index.keys.iter().map(|k| index.versions(k).len()).sum(),
            walls: index.coverage.walls.clone(),
            warnings: index.coverage.warnings.clone(),
        }
    }
}

/// A moment of the backup.
#[derive(Debug, Clone, Serialize)]
pub(in crate::explore) struct At {
    /// The revision.
    revision: Revision,
    /// Its time, if it is known.
    time: Option<String>,
    /// Whether the state is known: others are not shown.
    is_complete: bool,
}

impl At {
    pub(in crate::explore) fn of(index: &Index, revision: Revision) -> Self {
        At {
            revision,
            time: index.time_of(revision).map(rfc3339),
            is_complete: index.unknown_at(revision).is_none(),
        }
    }
}

/// Returns the revision that a text means, as [`any_revision_of`].
///
/// # Errors
/// `Usage`; `RevisionGap` if the state at the revision is unknown.
pub(in crate::explore) fn revision_of(index: &Index, text: Option<&str>) -> Result<Revision> {
    let revision = any_revision_of(index, text)?;
    match index.unknown_at(revision) {
        None => Ok(revision),
        Some((first, last)) => {
            let after = if last < index.coverage.newest {
                format!("{} or later", last.next())
            } else {
                "none after it".to_owned()
            };
            Err(Reason::RevisionGap.error(format!(
                "nothing is known of revision {revision}: snapshots are missing or damaged, and no full tells the state from revision {first} to {last}; choose revision {} or earlier, or {after}",
                first.previous()
            )))
        }
    }
}

/// Returns the revision that a text means: a revision, or a time in RFC 3339; the newest known one without a text.
///
/// # Errors
/// `Usage`.
pub(in crate::explore) fn any_revision_of(index: &Index, text: Option<&str>) -> Result<Revision> {
    let newest = index.coverage.newest;
    let revision = match text {
        None | Some("") => index.newest(),
        Some(text) => match text.parse::<i64>() {
            Ok(revision) => Revision(revision),
            Err(_) => {
                let time = DateTime::parse_from_rfc3339(text).map_err(|_| {
                    Reason::Usage.error(format!("\"{text}\" is neither a revision nor a time"))
                })?;
                index.revision_at(time.to_utc())
            }
        },
    };
    Ok(revision.clamp(index.first, newest.max(index.first)))
}

/// A moment that a user gave.
#[derive(Debug, Serialize)]
pub(in crate::explore) struct Given {
    /// A revision, or a time in RFC 3339; empty for the newest.
    at: String,
    /// Why the text is none.
    refusal: Option<String>,
}

impl Given {
    /// Reads a revision, or a time in the forms of `--time` in a zone of the IANA database; with `begins`, in those of `--since`.
    pub(in crate::explore) fn of(text: &str, zone: Option<&str>, begins: bool) -> Self {
        let text = text.trim();
        let day = if begins { Day::Begin } else { Day::NoMoment };
        let zone = || zone.and_then(Zone::named).unwrap_or_else(Zone::local);
        let at = if text.bytes().all(|b| b.is_ascii_digit()) {
            Ok(text.to_owned())
        } else {
            time::parse(text, Utc::now(), zone(), day).map(rfc3339)
        };
        Given {
            at: at.clone().unwrap_or_default(),
            refusal: at
                .err()
                .map(|e| format!("this is neither a revision nor a time: {e}")),
        }
    }
}

/// Returns the next known moment of a change after a revision, or the last one before it; the same one if there is none.
pub(in crate::explore) fn step(index: &Index, revision: Revision, is_forward: bool) -> At {
    let moments = index.moments();
    let is_known = |m: &&Moment| index.unknown_at(m.revision).is_none();
    let next = if is_forward {
        let later = moments.partition_point(|m| m.revision <= revision);
        moments[later..].iter().find(is_known)
    } else {
        let earlier = moments.partition_point(|m| m.revision < revision);
        moments[..earlier].iter().rfind(is_known)
    };
    At::of(index, next.map_or(revision, |m| m.revision))
}
