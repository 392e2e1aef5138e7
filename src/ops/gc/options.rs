//! The retention rules as options of the command line and as fields of policies.

use crate::backup::retention::{self, Periods, Policy};
use crate::base::{Span, TextValue};
use crate::error::{Reason, Result};
use chrono::TimeDelta;
use clap::{Args, ValueEnum};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The default number of fulls that the policy "limit" keeps.
pub const DEFAULT_LIMIT: i64 = 7;
/// The default time before now in which every revision stays restorable.
const DEFAULT_RESTORABLE_WINDOW: TimeDelta = TimeDelta::days(7);

/// Which fulls are kept.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema,
)]
pub enum PolicyName {
    /// Keep the newest full of each of the last hours, days, weeks and months
    #[default]
    Exponential,
    /// Keep the newest N fulls
    Limit,
}

/// Which snapshots are kept, and for how long.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Rules {
    /// Retention policy: which fulls to keep
    #[arg(long, value_name = "POLICY")]
    #[serde(default)]
    pub policy: PolicyName,
    /// With the policy "limit": keep this many of the newest fulls, with their deltas
    #[arg(long, value_name = "N", default_value = "7", value_parser = clap::value_parser!(i64).range(1..=u32::MAX.into()))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub limit: Option<i64>,
    /// Keep the deltas after a kept full for this time, counted from the next full [default: with "exponential"
    /// 0, with "limit" as long as their full]
    #[arg(long, value_name = "DURATION")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta_retention: Option<TextValue<Span>>,
    /// Keep every state of this last period restorable, with the deltas that it needs; 0s: only what the policy keeps
    #[arg(long, value_name = "DURATION", default_value = "7d")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restorable_window: Option<TextValue<Span>>,
}

impl Rules {
    /// Returns the rules without those that the policy does not use: `gc` refuses their flags.
    pub fn effective(&self) -> Rules {
        Rules {
            limit: self.limit.filter(|_| self.policy == PolicyName::Limit),
            ..self.clone()
        }
    }

    /// Returns the rules for [`retention::decide`]. The policy "exponential" uses `periods`.
    ///
    /// # Errors
    /// Fails with `Usage` if the limit or a duration is too large.
    pub fn retention(&self, periods: Periods) -> Result<retention::Options> {
        let limit = self.limit.unwrap_or(DEFAULT_LIMIT);
        let limit = u32::try_from(limit).map_err(|e| Reason::Usage.error(e.to_string()))?;
        let window = time_delta(self.restorable_window.as_ref())?;
        let window = window.unwrap_or(DEFAULT_RESTORABLE_WINDOW);
        Ok(retention::Options {
            policy: match self.policy {
                PolicyName::Exponential => Policy::Exponential(periods),
                PolicyName::Limit => Policy::Limit(limit),
            },
            delta_retention: time_delta(self.delta_retention.as_ref())?,
            restorable_window: Some(window).filter(|window| !window.is_zero()),
        })
    }
}

/// Returns a duration option as a `TimeDelta`. Fails with `Usage` if it cannot be read or is too large.
fn time_delta(option: Option<&TextValue<Span>>) -> Result<Option<TimeDelta>> {
    let Some(text) = option else { return Ok(None) };
    let span = text.check().map_err(|e| Reason::Usage.error(e))?;
    match TimeDelta::from_std(span.0) {
        Ok(time) => Ok(Some(time)),
        Err(e) => Err(Reason::Usage.error(format!("\"{}\": {e}", text.as_str()))),
    }
}
