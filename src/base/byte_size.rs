//! Parses sizes in bytes: `500`, `10MiB`, or Kubernetes quantities such as `10Mi` and `2G`.
//!
//! It checks the notation only; each option checks its own range. The flags of `cli` and the resources of
//! `controller` use it.

use super::text_value::Notation;
use std::str::FromStr;

/// The names of each unit, and its size in bytes. As in Kubernetes, units without an `i` are powers of 1000.
const UNITS: [(&[&str], u64); 9] = [
    (&["", "B"], 1),
    (&["Ki", "KiB"], 1 << 10),
    (&["Mi", "MiB"], 1 << 20),
    (&["Gi", "GiB"], 1 << 30),
    (&["Ti", "TiB"], 1 << 40),
    (&["k", "K", "kB", "KB"], 1_000),
    (&["M", "MB"], 1_000_000),
    (&["G", "GB"], 1_000_000_000),
    (&["T", "TB"], 1_000_000_000_000),
];

/// Parses a size such as `500`, `64Mi`, `1.5GiB` or `2G`. Returns bytes, rounded down.
///
/// # Errors
/// A message that says what is wrong, followed by the notation.
pub fn parse(s: &str) -> Result<u64, String> {
    const HOW: &str = "give bytes (500), or a number with KiB, MiB, GiB, TiB (powers of 1024, as Ki, Mi, Gi, Ti), \
         or K, M, G, T (powers of 1000), such as 64MiB";
    let s = s.trim();
    let end = s
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(s.len());
    let (number, unit) = s.split_at(end);
    let unit = unit.trim_start();
    if number.is_empty() {
        return Err(if s.starts_with('-') {
            format!("a size cannot be below zero; {HOW}")
        } else {
            format!("a size begins with a number; {HOW}")
        });
    }
    let Some((_, bytes)) = UNITS.iter().find(|(names, _)| names.contains(&unit)) else {
        return Err(match similar_unit(unit) {
            Some(name) => format!("unknown unit \"{unit}\", did you mean {name}? {HOW}"),
            None => format!("unknown unit \"{unit}\"; {HOW}"),
        });
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return Err(format!("invalid number \"{number}\"; {HOW}"));
    }
    let too_large = || format!("the size does not fit into 64 bits; {HOW}");
    let (mut numerator, mut denominator) = (0u128, 1u128);
    // 18 decimal places are exact enough: further digits add less than a byte, even to the largest unit.
    for digit in whole.bytes().chain(fraction.bytes().take(18)) {
        numerator = numerator
            .checked_mul(10)
            .and_then(|n| n.checked_add(u128::from(digit - b'0')))
            .ok_or_else(too_large)?;
    }
    for _ in fraction.bytes().take(18) {
        denominator *= 10;
    }
    let scaled = numerator
        .checked_mul((*bytes).into())
        .ok_or_else(too_large)?;
    u64::try_from(scaled / denominator).map_err(|_| too_large())
}

/// Returns the unit that differs from `text` in upper and lower case only. The longest wins, so that "m",
/// which Kubernetes reads as a thousandth, suggests "M".
fn similar_unit(text: &str) -> Option<&'static str> {
    let names = UNITS.iter().flat_map(|(names, _)| names.iter().copied());
    names
        .filter(|name| name.eq_ignore_ascii_case(text))
        .max_by_key(|name| name.len())
}

/// A size in bytes, as an option or a field of a resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse(text).map(Size)
    }
}

/// A resource takes Kubernetes quantities only.
impl Notation for Size {
    const PATTERN: &'static str = "^[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T)?$";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documented_notations_are_parsed() {
        for (s, bytes) in [
            ("0", 0),
            ("500", 500),
            ("500B", 500),
            ("1Ki", 1024),
            ("10MiB", 10 << 20),
            ("10 MiB", 10 << 20),
            ("64Mi", 64 << 20),
            ("1.5GiB", 3 << 29),
            ("0.5Ti", 1 << 39),
            (".5k", 500),
            ("2.", 2),
            ("2G", 2_000_000_000),
            ("3KB", 3_000),
            ("1.9999", 1),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse(s), Ok(bytes), "{s}");
        }
    }

    #[test]
    fn an_error_names_the_fault_and_the_notation() {
        for (s, says) in [
            ("", "number"),
            ("MiB", "number"),
            ("-1", "below zero"),
            (".", "invalid number"),
            ("1.2.3", "invalid number"),
            ("10m", "did you mean M?"),
            ("10mib", "did you mean MiB?"),
            ("10 parsecs", "unknown unit \"parsecs\""),
            ("1e3", "unknown unit"),
            ("18446744073709551616", "64 bits"),
            ("99999999999T", "64 bits"),
            ("9999999999999999999999999999999999999999", "64 bits"),
        ] {
            let e = parse(s).unwrap_err();
            assert!(e.contains(says) && e.contains("64MiB"), "{s}: {e}");
        }
    }
}
