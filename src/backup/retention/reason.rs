//! The reasons for which snapshots are kept or go.
//!
//! A reason decides nothing; `decide` chooses it. `cli` prints its name and its text.

use crate::base::opt;
use chrono::{DateTime, Utc};
use std::borrow::Cow;
use strum::{IntoStaticStr, VariantNames};

/// The reason for which a snapshot is kept or goes. If there are several, the most important one is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoStaticStr, VariantNames)]
pub enum RetentionReason {
    /// Kept: the newest chain of the newest timeline needs it.
    NewestChain,
    /// Kept: a revision within the restorable window needs it.
    RestorableWindow,
    /// Kept: a pinned chain needs it.
    Pinned,
    /// Kept: timelines interleave, so it may belong to any of them.
    InterleavedTimelines,
    /// Kept: its timeline is in doubt, and a snapshot that would tell cannot be read.
    Unreadable,
    /// Kept: by names, no full leads to the end of its timeline, so any snapshot may be needed.
    RevisionGap,
    /// Kept: the time in its name is in the future.
    InTheFuture,
    /// Kept: the newest full of the hour that begins at this time.
    Hourly(DateTime<Utc>),
    /// Kept: the newest full of the day that begins at this time.
    Daily(DateTime<Utc>),
    /// Kept: the newest full of the week that begins at this time.
    Weekly(DateTime<Utc>),
    /// Kept: the newest full of the month that begins at this time.
    Monthly(DateTime<Utc>),
    /// Kept: one of this many newest fulls.
    WithinLimit(u32),
    /// Kept: of all fulls it was created last.
    NewestFull,
    /// Kept: a delta that follows a kept full.
    WithItsFull,
    /// Kept: a delta that is younger than the delta retention.
    DeltaRetention,
    /// Kept: a delta that no later full of its timeline supersedes.
    EndOfTimeline,
    /// Kept: another snapshot of its `v1` backup is kept, and these are kept as a whole.
    V1Backup,
    /// Kept: a user excluded it, and it is not yet older than everything that the policy keeps.
    Excluded,
    /// Kept: a full that the policy would count if its content matched its name.
    Damaged,
    /// Kept: a full whose content was not read yet.
    NotRead,
    /// Kept: no full was taken within the restorable window, so nothing goes until the next one.
    NoRecentFull,
    /// Goes: a full that the policy does not keep.
    BeyondPolicy,
    /// Goes: a delta that a newer full has superseded.
    Superseded,
    /// Goes: a delta to which no kept full leads.
    NoBase,
    /// Goes: a user excluded it, and it is older than everything that the policy keeps.
    ExcludedBeyondPolicy,
}

impl RetentionReason {
    /// The names of all reasons.
    pub const NAMES: &'static [&'static str] = Self::VARIANTS;

    /// Returns whether a snapshot with this reason is kept.
    pub fn keeps(self) -> bool {
        !matches!(
            self,
            Self::BeyondPolicy | Self::Superseded | Self::NoBase | Self::ExcludedBeyondPolicy
        )
    }

    /// The name of the reason, in CamelCase. It is stable.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// The reason as human-readable text.
    pub fn text(self) -> Cow<'static, str> {
        let text = match self {
            Self::Hourly(t) => return newest_full_of("hour", t, "%Y-%m-%dT%HZ"),
            Self::Daily(t) => return newest_full_of("day", t, "%Y-%m-%d"),
            Self::Weekly(t) => return newest_full_of("week from", t, "%Y-%m-%d"),
            Self::Monthly(t) => return newest_full_of("month", t, "%Y-%m"),
            Self::WithinLimit(n) => return format!("one of the newest {n} fulls").into(),
            Self::NewestChain => "the newest chain needs it",
            Self::RestorableWindow => "a point within {restorable-window} needs it",
            Self::Pinned => "a pinned chain needs it",
            Self::InterleavedTimelines => {
                "timelines interleave here, so it is unknown which snapshots are needed: see `deltafold list --deep`"
            }
            Self::Unreadable => {
                "its timeline is in doubt and a snapshot that would tell cannot be read: see `deltafold list --deep`"
            }
            Self::RevisionGap => {
                "by names no full leads to the end of its timeline, so it is unknown which snapshots are needed: see `deltafold list`"
            }
            Self::InTheFuture => "the time in its name is in the future",
            Self::NewestFull => "of all fulls it was created last",
            Self::WithItsFull => "a delta that follows a kept full",
            Self::DeltaRetention => "a delta younger than {delta-retention}",
            Self::EndOfTimeline => "no full of its timeline has superseded it",
            Self::V1Backup => "a v1 backup is kept as a whole",
            Self::Excluded => {
                "excluded by a user, and younger than the oldest snapshot that the policy keeps"
            }
            Self::Damaged => {
                "its content is damaged or does not match its name: it is kept but not counted"
            }
            Self::NotRead => {
                "there was no time or space to read its content: it is not counted until a later run"
            }
            Self::NoRecentFull => {
                "the newest full is older than {restorable-window}, and nothing is removed until there is a newer one"
            }
            Self::BeyondPolicy => "a full that the policy does not keep",
            Self::Superseded => "a newer full has superseded this delta",
            Self::NoBase => "no kept full leads to this delta",
            Self::ExcludedBeyondPolicy => {
                "excluded by a user, and older than everything that the policy keeps"
            }
        };
        opt::fill(text)
    }
}

fn newest_full_of(period: &str, begins: DateTime<Utc>, format: &str) -> Cow<'static, str> {
    format!("the newest full of the {period} {}", begins.format(format)).into()
}
