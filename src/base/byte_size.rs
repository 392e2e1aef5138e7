//! Sizes in bytes.
//!
//! They are written as for people (`10MiB`) or as Kubernetes writes quantities (`10Mi`, `2G`). Nothing else
//! is known here: which sizes make sense is for the option to say.

use super::text_value::Notation;
use std::str::FromStr;

/// Bytes of each unit. Kubernetes' decimal ones are powers of 1000.
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

/// Reads a size such as `500`, `64Mi`, `1.5GiB` or `2G`: bytes, rounded down.
///
/// # Errors
/// What is wrong with it, and how it is written.
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
        return Err(match s.starts_with('-') {
            true => format!("no size is below zero; {HOW}"),
            false => format!("it does not begin with a number; {HOW}"),
        });
    }
    let Some((_, bytes)) = UNITS.iter().find(|(names, _)| names.contains(&unit)) else {
        let known = UNITS.iter().flat_map(|(names, _)| names.iter());
        let meant = known
            .filter(|name| name.eq_ignore_ascii_case(unit))
            .max_by_key(|name| name.len());
        return Err(match meant {
            // To Kubernetes "m" is a thousandth.
            Some(name) => format!("\"{unit}\" is no unit, did you mean {name}? {HOW}"),
            None => format!("\"{unit}\" is no unit; {HOW}"),
        });
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return Err(format!("\"{number}\" is no number; {HOW}"));
    }
    let too_large = || format!("it is more than can be counted; {HOW}");
    let (mut n, mut of) = (0u128, 1u128);
    // What is behind the ninth digit is less than a byte of any size that fits.
    for digit in whole.bytes().chain(fraction.bytes().take(18)) {
        n = n
            .checked_mul(10)
            .and_then(|n| n.checked_add(u128::from(digit - b'0')))
            .ok_or_else(too_large)?;
    }
    for _ in fraction.bytes().take(18) {
        of *= 10;
    }
    let size = n.checked_mul((*bytes).into()).ok_or_else(too_large)? / of;
    u64::try_from(size).map_err(|_| too_large())
}

/// A size in a resource, or of an option that resources share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse(text).map(Size)
    }
}

/// Kubernetes' quantities of bytes.
impl Notation for Size {
    const PATTERN: &'static str = "^[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T)?$";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_documented() {
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
    fn what_is_wrong_is_said() {
        for (s, says) in [
            ("", "number"),
            ("MiB", "number"),
            ("-1", "below zero"),
            (".", "no number"),
            ("1.2.3", "no number"),
            ("10m", "did you mean M?"),
            ("10mib", "did you mean MiB?"),
            ("10 parsecs", "\"parsecs\" is no unit"),
            ("1e3", "is no unit"),
            ("18446744073709551616", "more than"),
            ("99999999999T", "more than"),
            ("9999999999999999999999999999999999999999", "more than"),
        ] {
            let e = parse(s).unwrap_err();
            assert!(e.contains(says) && e.contains("64MiB"), "{s}: {e}");
        }
    }
}
