//! Value parsers that the flags of several commands share.

use super::time::{self, Day, Zone};
use chrono::{DateTime, SubsecRound, Utc};

/// Parses the environment variable of a switch. An empty value means false: Kubernetes templates produce it.
///
/// # Errors
/// A message if the text is neither true nor false.
pub fn yes_or_no(s: &str) -> Result<bool, String> {
    match s.to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "y" | "t" | "1" => Ok(true),
        "" | "false" | "no" | "off" | "n" | "f" | "0" => Ok(false),
        _ => Err("give true or false".to_owned()),
    }
}

/// Parses a moment of the past, in any form of [`time::parse`], in the local zone.
///
/// # Errors
/// A message that says what is wrong, followed by the accepted forms.
pub fn past_time(s: &str) -> Result<DateTime<Utc>, String> {
    // An age means no part of a second.
    time_of_day(s, Day::NoMoment)
}

/// Parses a moment of the past as [`past_time`] does; `yesterday` and `today` are as `day` says.
///
/// # Errors
/// As [`past_time`].
pub fn time_of_day(s: &str, day: Day) -> Result<DateTime<Utc>, String> {
    time::parse(s, Utc::now().trunc_subsecs(0), Zone::local(), day)
}
