//! Options that several operations share. Each operation's own options are in its module.
//!
//! An option is a field of one struct: the command line (clap), the resources (serde, JSON schema) and the
//! arguments of Jobs (`controller::jobs::flags`) derive from it.

use crate::base::flag_values;
use crate::mvcc::Revision;
use crate::ops::fold::{Request, Target};
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
    #[arg(long, value_name = "RFC3339", value_parser = flag_values::time)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<DateTime<Utc>>,
}

impl Point {
    /// Returns the request for this point on a timeline; on the newest one if `None`.
    pub fn request(&self, timeline: Option<&str>) -> Request {
        Request {
            target: match (self.revision, self.time) {
                (Some(r), _) => Target::Revision(Revision(r)),
                (None, Some(t)) => Target::Time(t),
                (None, None) => Target::Newest,
            },
            timeline: timeline.map(str::to_owned),
        }
    }
}

/// The state of a backup: a point and a timeline.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "State")]
pub struct StateOptions {
    /// When.
    #[command(flatten)]
    pub point: Point,
    /// ID of the timeline to read, from `deltafold list --deep` [default: the newest timeline]
    #[arg(long, value_name = "ID")]
    pub timeline: Option<String>,
}

impl StateOptions {
    /// Returns the request for this state.
    pub fn request(&self) -> Request {
        self.point.request(self.timeline.as_deref())
    }
}
