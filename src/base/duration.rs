//! Parses and formats durations such as `90s`, `1h30m` and `7d`.
//!
//! The flags of `cli` and the resources of `controller` use it.

use super::text_value::Notation;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// The units, longest first, and their length in milliseconds.
const UNITS: [(&str, u64); 6] = [
    ("w", 604_800_000),
    ("d", 86_400_000),
    ("h", 3_600_000),
    ("m", 60_000),
    ("s", 1_000),
    ("ms", 1),
];

/// A thousand years: short enough that adding a duration to a date cannot overflow.
const LONGEST: Duration = Duration::from_secs(1000 * 365 * 86_400);

/// Parses a duration such as `90s`, `1h30m` or `7d`. The units are w, d, h, m, s and ms; the maximum is a
/// thousand years.
///
/// # Errors
/// A message with the notation or the maximum.
pub fn parse(text: &str) -> Result<Duration, String> {
    const HOW: &str = "give a duration such as 90s, 30m, 1h30m or 7d";
    match sum_of_parts(text) {
        Some(long) if long > LONGEST => {
            Err("a duration is at most 1000 years (365000d)".to_owned())
        }
        Some(duration) => Ok(duration),
        None => Err(HOW.to_owned()),
    }
}

fn sum_of_parts(text: &str) -> Option<Duration> {
    let (mut rest, mut total) = (text, Duration::ZERO);
    loop {
        let (number, after_number) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit())?);
        let next_digit = after_number.find(|c: char| c.is_ascii_digit());
        let (unit, after_unit) = after_number.split_at(next_digit.unwrap_or(after_number.len()));
        let (_, millis) = UNITS.iter().find(|(name, _)| *name == unit)?;
        let part = number.parse::<u64>().ok()?.checked_mul(*millis)?;
        total = total.checked_add(Duration::from_millis(part))?;
        rest = after_unit;
        if rest.is_empty() {
            return Some(total);
        }
    }
}

/// Parses a duration that must be longer than zero; otherwise like [`parse`].
///
/// # Errors
/// A message with the notation.
pub fn parse_above_zero(text: &str) -> Result<Duration, String> {
    match parse(text)? {
        Duration::ZERO => {
            Err("the duration must be longer than zero, such as 500ms, 5s or 1m".to_owned())
        }
        duration => Ok(duration),
    }
}

/// The two largest units of a duration, from days to seconds.
fn parts(d: Duration) -> Vec<String> {
    let mut millis = d.as_secs().saturating_mul(1000);
    let mut parts = Vec::new();
    for (unit, size) in &UNITS[1..5] {
        if millis >= *size {
            parts.push(format!("{}{unit}", millis / size));
            millis %= size;
        }
    }
    parts.truncate(2);
    parts
}

/// Formats seconds for people: `1d 5h`, `3m 20s`, `44s`, `4.2s`, `60ms`. Less than zero counts as zero.
pub fn human(seconds: f64) -> String {
    let duration = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default();
    match duration.as_millis() {
        millis @ 0..1_000 => format!("{millis}ms"),
        // Rounded down, so that 9.99 s is not "10.0s".
        millis @ 1_000..10_000 => format!("{}.{}s", millis / 1000, millis % 1000 / 100),
        _ => parts(duration).join(" "),
    }
}

/// Formats whole seconds for people: `0s`, `12s`, `3m 20s`, `1d 5h`.
pub fn whole(d: Duration) -> String {
    match parts(d) {
        parts if parts.is_empty() => "0s".to_owned(),
        parts => parts.join(" "),
    }
}

/// Formats an age in seconds for people, as [`whole`] does. Less than zero counts as zero.
pub fn age(seconds: f64) -> String {
    whole(Duration::from_secs(seconds.max(0.0) as u64))
}

/// A duration as an option or a field of a resource.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse(text).map(Span)
    }
}

/// Formats whole seconds as `90s`, otherwise milliseconds as `1500ms`. Flags of every version accept these
/// two units.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.subsec_millis() {
            0 => write!(f, "{}s", self.0.as_secs()),
            _ => write!(f, "{}ms", self.0.as_millis()),
        }
    }
}

impl Notation for Span {
    const PATTERN: &'static str = "^([0-9]+(ms|s|m|h|d|w))+$";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documented_notations_are_parsed() {
        for (text, millis) in [
            ("1h30m", 5_400_000),
            ("7d", 604_800_000),
            ("2w", 1_209_600_000),
            ("250ms", 250),
            ("0s", 0),
            ("365000d", 31_536_000_000_000),
        ] {
            let read: Span = text.parse().unwrap();
            assert_eq!(read.0, Duration::from_millis(millis), "{text}");
            assert_eq!(read.to_string().parse(), Ok(read));
        }
        for bad in [
            "",
            "5",
            "h",
            "5x",
            "1y",
            "-1s",
            "1h2",
            "1h 2m",
            "99999999999999999999s",
            "99999999999999999d",
            "365000d1ms",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert!(parse_above_zero("0s").is_err());
    }

    #[test]
    fn a_live_line_shows_whole_seconds() {
        let shown = |millis| whole(Duration::from_millis(millis));
        assert_eq!((shown(999).as_str(), shown(12_300).as_str()), ("0s", "12s"));
        assert_eq!(shown(200_000), "3m 20s");
    }

    #[test]
    fn people_read_days_hours_and_minutes() {
        for (seconds, text) in [
            (-3.0, "0ms"),
            (f64::NAN, "0ms"),
            (0.06, "60ms"),
            (1.0, "1.0s"),
            (9.99, "9.9s"),
            (44.04, "44s"),
            (200.0, "3m 20s"),
            (3600.0, "1h"),
            (106_971.0, "1d 5h"),
            (1e30, "0ms"),
        ] {
            assert_eq!(human(seconds), text, "{seconds}");
        }
    }
}
