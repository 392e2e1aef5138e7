//! Values that flags of many commands have.

use chrono::{DateTime, Utc};

/// Reads the value of a switch's variable. An empty one is a Kubernetes template's way to say no.
///
/// # Errors
/// It is neither.
pub fn yes_or_no(s: &str) -> Result<bool, String> {
    match s.to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "y" | "t" | "1" => Ok(true),
        "" | "false" | "no" | "off" | "n" | "f" | "0" => Ok(false),
        _ => Err("it is neither true nor false".to_owned()),
    }
}

/// Reads a point in time.
///
/// # Errors
/// What is wrong with it, and how it is written.
pub fn time(s: &str) -> Result<DateTime<Utc>, String> {
    DateTime::parse_from_rfc3339(s)
        .map(|t| t.with_timezone(&Utc))
        .map_err(|e| {
            format!("{e}; give date, time and zone, such as 2026-11-20T12:00:00Z or 2026-11-20T13:00:00+01:00")
        })
}
