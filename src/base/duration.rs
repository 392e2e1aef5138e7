//! Durations as people write them: numbers with units, `90s`, `1h30m`, `7d`.

use super::text_value::Notation;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Milliseconds of each unit.
const UNITS: [(&str, u64); 6] = [
    ("w", 604_800_000),
    ("d", 86_400_000),
    ("h", 3_600_000),
    ("m", 60_000),
    ("s", 1_000),
    ("ms", 1),
];

/// A thousand years: no time that is reckoned with a duration overflows.
const LONGEST: Duration = Duration::from_secs(1000 * 365 * 86_400);

/// Reads a duration such as `90s`, `1h30m` or `7d`, of a thousand years at most; the units are w, d, h, m, s and ms.
///
/// # Errors
/// How a duration is written.
pub fn parse(text: &str) -> Result<Duration, String> {
    const HOW: &str = "give a duration such as 90s, 30m, 1h30m or 7d";
    match read(text) {
        Some(long) if long > LONGEST => Err("it is longer than 1000 years (365000d)".to_owned()),
        Some(duration) => Ok(duration),
        None => Err(HOW.to_owned()),
    }
}

fn read(text: &str) -> Option<Duration> {
    let (mut rest, mut total) = (text, Duration::ZERO);
    loop {
        let (number, behind) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit())?);
        let next = behind.find(|c: char| c.is_ascii_digit());
        let (unit, behind) = behind.split_at(next.unwrap_or(behind.len()));
        let (_, millis) = UNITS.iter().find(|(name, _)| *name == unit)?;
        let part = number.parse::<u64>().ok()?.checked_mul(*millis)?;
        total = total.checked_add(Duration::from_millis(part))?;
        rest = behind;
        if rest.is_empty() {
            return Some(total);
        }
    }
}

/// As [`parse`], but for zero.
///
/// # Errors
/// How a duration is written.
pub fn parse_above_zero(text: &str) -> Result<Duration, String> {
    match parse(text)? {
        Duration::ZERO => Err("it must be longer than that, such as 500ms, 5s or 1m".to_owned()),
        long => Ok(long),
    }
}

/// A duration's two largest units: `1d4h`, `90s` as `1m30s`.
pub fn show(d: Duration) -> String {
    let mut millis = d.as_secs().saturating_mul(1000);
    let mut parts = Vec::new();
    for (unit, size) in &UNITS[1..5] {
        if millis >= *size {
            parts.push(format!("{}{unit}", millis / size));
            millis %= size;
        }
    }
    match parts.len() {
        0 => format!("{}ms", d.as_millis()),
        n => parts[..n.min(2)].concat(),
    }
}

/// A duration in a resource, or of an option that resources share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse(text).map(Span)
    }
}

/// In seconds, or milliseconds if it has a part of a second: every version's flags take that.
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
    fn durations_are_read_as_documented() {
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
    fn durations_are_shown_as_they_are_read() {
        for s in ["0ms", "250ms", "59s", "1m30s", "24m", "1d4h", "400d"] {
            assert_eq!(show(parse(s).unwrap()), s);
        }
        assert_eq!(show(Duration::from_secs(93_784)), "1d2h");
    }
}
