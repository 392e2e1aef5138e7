//! The compaction of a cluster's history: up to which revision, and its execution.
//!
//! [`plan_compaction`] decides and is pure. With a store, history that is not saved is never compacted.
//! Called by [`super::run`].

use super::{Maintenance, pause};
use crate::base::duration;
use crate::base::text_value::Notation;
use crate::error::{Reason, Result};
use crate::etcd::cluster::{Cluster, CompactionResult};
use crate::ops::snapshot::same_history;
use crate::prefix::Context;
use crate::prefix::by_time::revision_at;
use crate::prefix::damage::without_excluded;
use crate::prefix::scan::{Depth, scan_with_tags};
use crate::prefix::select::{StateRequest, choose_timeline};
use crate::prefix::tags::TagScope;
use crate::telemetry::progress::Step;
use chrono::{DateTime, TimeDelta, Utc};
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::{Duration, Instant};

/// How long members may take to remove compacted records from their databases.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Members are done after this many observations in a row without a smaller database.
const UNCHANGED_OBSERVATIONS: u32 = 3;

/// How much history etcd keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// This many revisions.
    Revisions(u64),
    /// All events younger than this, by the times of the saved events.
    Age(Duration),
}

impl FromStr for Keep {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        if let Ok(n) = s.parse() {
            return Ok(Keep::Revisions(n));
        }
        duration::parse(s).map(Keep::Age).map_err(|_| {
            "give a number of revisions (1000) or a duration (90s, 30m, 1h30m, 7d)".to_owned()
        })
    }
}

impl Notation for Keep {
    const PATTERN: &'static str = "^([0-9]+|([0-9]+(ms|s|m|h|d|w))+)$";
}

/// The compaction in the report.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct CompactOutcome {
    /// The history to keep, as requested: a number of revisions, or seconds followed by `s`.
    pub requested: String,
    /// The revision of the compaction, also in a dry run; null if there is nothing to compact.
    pub revision: Option<i64>,
    /// The revision of the cluster's previous compaction; null if there was none.
    pub previous_revision: Option<i64>,
    /// Why this revision, or none. Human-readable: the text may change.
    pub reason: String,
    /// Whether the compaction was done.
    pub done: bool,
}

/// How much of the cluster's history the store holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SavedHistory {
    /// No store was given, so nothing needs to be saved.
    NoStore,
    /// The store holds nothing of this history that can be relied on, for this reason.
    Nothing(String),
    /// The store holds everything up to this revision.
    UpTo(i64),
}

/// The facts that a compaction is planned from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct History {
    /// The cluster's newest revision.
    pub current: i64,
    /// The revision of the previous compaction.
    pub compacted: Option<i64>,
    /// What the store holds.
    pub saved: SavedHistory,
    /// The newest revision that is older than [`Keep::Age`], by the times of the saved events; `None` if
    /// there is none.
    pub too_old: Option<i64>,
}

/// Returns the revision to compact at, or `None`, and the reason.
pub fn plan_compaction(keep: Keep, history: &History) -> (Option<i64>, String) {
    let requested = match keep {
        Keep::Revisions(n) => {
            let n = i64::try_from(n).unwrap_or(i64::MAX);
            let requested = history.current.saturating_sub(n);
            (requested >= 1).then_some(requested)
        }
        Keep::Age(_) => history.too_old,
    };
    let Some(requested) = requested else {
        return (
            None,
            "the cluster has no history beyond what is to be kept".to_owned(),
        );
    };
    let (revision, reason) = match &history.saved {
        SavedHistory::Nothing(why) => {
            let reason = format!("history that is not saved must not be compacted: {why}");
            return (None, reason);
        }
        // The last saved revision must stay in etcd: the next delta compares its events to find out whether
        // it continues the same history. A compaction at that revision may remove its deletions.
        SavedHistory::UpTo(last) if requested >= *last => (
            last - 1,
            format!(
                "the last saved revision is {last} and must stay; revision {requested} was asked for"
            ),
        ),
        _ => (
            requested,
            format!("history up to revision {requested} is beyond what is to be kept"),
        ),
    };
    match history.compacted {
        _ if revision < 1 => (None, format!("{reason}: nothing is left to compact")),
        Some(compacted) if compacted >= revision => (
            None,
            format!("{reason}: the cluster is already compacted at revision {compacted}"),
        ),
        _ => (Some(revision), reason),
    }
}

impl Maintenance<'_> {
    /// Plans the compaction and does it, except in a dry run. Returns whether history was compacted.
    pub(super) fn compact(&mut self, keep: Keep, cluster: &Cluster) -> Result<bool> {
        let requested = match keep {
            Keep::Revisions(n) => n.to_string(),
            Keep::Age(age) => format!("{}s", age.as_secs_f64()),
        };
        let (saved, too_old) = match self.store {
            None => (SavedHistory::NoStore, None),
            Some(ctx) => self.saved_history(ctx, keep, cluster)?,
        };
        let history = History {
            current: cluster.revision,
            compacted: cluster.compacted_revision(self.connector)?,
            saved,
            too_old,
        };
        let (revision, reason) = plan_compaction(keep, &history);
        tracing::info!(
            revision,
            reason,
            current = history.current,
            compacted = history.compacted,
            dry_run = self.options.dry_run,
            "planned the compaction"
        );
        if let (SavedHistory::Nothing(_), None) = (&history.saved, revision) {
            self.clock.warn(reason.clone());
        }
        let outcome = self.outcome.compact.insert(CompactOutcome {
            requested,
            revision,
            previous_revision: history.compacted,
            reason,
            done: false,
        });
        let Some(revision) = revision.filter(|_| !self.options.dry_run) else {
            return Ok(false);
        };
        self.lock.check()?;
        let step = Step::new(format!("compact at {revision}"), None);
        // Compact in two steps. A member counts freed pages as free only after its next commit; if no client
        // writes, only the second compaction causes that commit. The pause separates the two: members commit
        // every 100 ms.
        if revision - 1 > history.compacted.unwrap_or(0) {
            cluster.compact(self.connector, revision - 1)?;
            cluster.await_compaction(self.connector, revision - 1)?;
            pause(self.connector)?;
        }
        let compacted = cluster.compact(self.connector, revision)?;
        cluster.await_compaction(self.connector, revision)?;
        drop(step);
        outcome.done = true;
        if compacted == CompactionResult::Already {
            outcome.reason = format!(
                "{}; the cluster was compacted there in the meantime",
                outcome.reason
            );
        }
        tracing::info!(revision, "compacted");
        Ok(true)
    }

    /// Returns how much of the cluster's history the store holds, and the newest revision that is older than
    /// [`Keep::Age`].
    fn saved_history(
        &mut self,
        ctx: &Context,
        keep: Keep,
        cluster: &Cluster,
    ) -> Result<(SavedHistory, Option<i64>)> {
        let last = match same_history(ctx, self.connector, cluster)? {
            Err(why) => return Ok((SavedHistory::Nothing(why), None)),
            Ok(last) => last.0,
        };
        self.outcome.last_saved_revision = Some(last);
        let oldest_kept = match keep {
            Keep::Revisions(_) => None,
            Keep::Age(age) => {
                let age = TimeDelta::from_std(age).unwrap_or(TimeDelta::MAX);
                Utc::now().checked_sub_signed(age)
            }
        };
        let Some(oldest_kept) = oldest_kept else {
            return Ok((SavedHistory::UpTo(last), None));
        };
        let (too_old, warnings) = without_excluded(|| newest_revision_at(ctx, oldest_kept))?;
        self.clock.warnings.extend(warnings);
        Ok((SavedHistory::UpTo(last), too_old))
    }

    /// Waits until no member removes compacted records any more. Only then the members' sizes show the waste.
    pub(super) fn wait_until_settled(&self) -> Result<Cluster> {
        let deadline = Instant::now() + SETTLE_TIMEOUT;
        let mut sizes_before = BTreeMap::new();
        let mut unchanged = 0;
        loop {
            pause(self.connector)?;
            let cluster = Cluster::observe(self.connector)?;
            let sizes = sizes_in_use(&cluster);
            // Clients may write, so that a size grows.
            let any_shrinks = sizes
                .iter()
                .any(|(id, size)| sizes_before.get(id).is_none_or(|before| size < before));
            unchanged = if any_shrinks { 0 } else { unchanged + 1 };
            if unchanged >= UNCHANGED_OBSERVATIONS || Instant::now() > deadline {
                return Ok(cluster);
            }
            sizes_before = sizes;
        }
    }
}

/// Returns for each member's ID the bytes of its database that hold data.
fn sizes_in_use(cluster: &Cluster) -> BTreeMap<u64, u64> {
    let mut sizes = BTreeMap::new();
    for member in &cluster.members {
        if let Some(status) = &member.status {
            sizes.insert(member.id, status.db_size_in_use);
        }
    }
    sizes
}

/// Returns the newest saved revision at or before `time`, `None` if all are newer, and warnings.
fn newest_revision_at(ctx: &Context, time: DateTime<Utc>) -> Result<(Option<i64>, Vec<String>)> {
    let scan = scan_with_tags(ctx, Depth::Doubtful, TagScope::Chain)?;
    let (timeline, mut warnings) = choose_timeline(ctx, &scan, &StateRequest::default())?;
    match revision_at(ctx, &scan, timeline, time) {
        Ok((revision, more)) => {
            warnings.extend(more);
            Ok((Some(revision.0), warnings))
        }
        Err(e) if e.reason() == Reason::OutOfRange => Ok((None, warnings)),
        Err(e) => Err(e),
    }
}
