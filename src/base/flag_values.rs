//! Value parsers that the flags of several commands share.
//!
//! Called by `cli` and by the options in `ops`.

use chrono::{DateTime, Utc};

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

/// Parses a time in RFC 3339 notation.
///
/// # Errors
/// A message that says what is wrong, followed by the notation.
pub fn time(s: &str) -> Result<DateTime<Utc>, String> {
    DateTime::parse_from_rfc3339(s)
        .map(|t| t.with_timezone(&Utc))
        .map_err(|e| {
            format!("{e}; give date, time and zone, such as 2026-11-20T12:00:00Z or 2026-11-20T13:00:00+01:00")
        })
}
