//! Options that several operations share. Each operation's own options are in its module.
//!
//! An option is a field of one struct: the command line (clap), the resources (serde, JSON schema) and the
//! arguments of Jobs (`controller::jobs::flags`) derive from it.

use crate::base::flag_values;
use crate::mvcc::Revision;
use crate::prefix::select::{At, StateRequest};
use chrono::{DateTime, Utc};
use clap::Args;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A point in the history of a backup.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize, JsonSchema)]
#[command(next_help_heading = "Point in time")]
#[serde(rename_all = "camelCase")]
pub struct Point {
    /// Use the state at this revision [default: the newest revision]
    #[arg(long, value_name = "N", conflicts_with = "time", value_parser = clap::value_parser!(i64).range(1..))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub revision: Option<i64>,
    /// Use the state after the last event recorded at or before this time
    #[arg(
        long,
        value_name = "RFC3339",
        value_parser = flag_values::past_time,
        help = "Use the state after the last event recorded at or before this time, such as 2026-11-20T14:00:00Z, \
\"yesterday 14:00\" or \"2h ago\"",
        long_help = "\
Use the state after the last event recorded at or before this time

Forms: RFC 3339 (2026-11-20T14:00:00+01:00); local time (\"2026-11-20 14:00\", 2026-11-20, 14:00, \
\"yesterday 14:00\"), with seconds or without; an age (\"2h ago\", \
\"1d12h\", \"5 minutes ago\"). Local time is that of the \
variable TZ or of the system, and UTC in a Pod of Kubernetes. The clock of the backup tool decides: it recorded \
the times. If that clock differs from the one you read, choose the time accordingly."
    )]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<DateTime<Utc>>,
}

impl Point {
    /// Returns the request for this point on a timeline; on the newest one if `None`. `or_newest`: see
    /// [`StateRequest::or_newest`].
    pub fn request(&self, timeline: Option<&str>, or_newest: bool) -> StateRequest {
        StateRequest {
            or_before: false,
            at: match (self.revision, self.time) {
                (Some(r), _) => At::Revision(Revision(r)),
                (None, Some(t)) => At::Time(t),
                (None, None) => At::Newest,
            },
            timeline: timeline.map(str::to_owned),
            or_newest,
        }
    }
}

/// What to do about a time that the backup does not cover. It is no part of [`Point`]: tasks have no such
/// option, since their Jobs always set it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Point in time")]
pub struct Uncovered {
    /// If a given time is after the newest snapshot: use the newest state, with a warning, instead of a refusal
    #[arg(long, value_parser = flag_values::yes_or_no)]
    pub or_newest: bool,
}

/// The state of a backup: a point and a timeline.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "State")]
pub struct StateOptions {
    /// When.
    #[command(flatten)]
    pub point: Point,
    /// Whether the point may be after the newest snapshot.
    #[command(flatten)]
    pub uncovered: Uncovered,
    /// ID of the timeline to read, from `deltafold list --deep` [default: the newest timeline]
    #[arg(long, value_name = "ID")]
    pub timeline: Option<String>,
}

impl StateOptions {
    /// Returns the request for this state.
    pub fn request(&self) -> StateRequest {
        self.point
            .request(self.timeline.as_deref(), self.uncovered.or_newest)
    }
}
