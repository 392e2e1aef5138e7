//! Parses moments as users type them, such as `2026-11-20 14:00`, `yesterday 14:00` and `2h ago`, and shows
//! them in the local time zone.
//!
//! Parsing is a pure function of the text, the time now and a zone. The grammar is strict: no text has two readings,
//! since a restore to the wrong one would not be noticed.

use super::duration;
use chrono::{
    DateTime, Days, FixedOffset, Local, MappedLocalTime, NaiveDate, NaiveDateTime, NaiveTime,
    Offset, SecondsFormat, TimeDelta, TimeZone, Utc,
};
use chrono_tz::Tz;
use std::time::Duration;

/// The accepted forms, for messages.
const FORMS: &str = "give RFC 3339 (2026-11-20T14:00:00+01:00), local time (2026-11-20 14:00, 14:00, yesterday 14:00; seconds and a date alone work, too) or an age (2h ago, 1d12h ago, 5 minutes ago; with or without \"ago\")";
/// The accepted forms of [`parse_absolute`], for messages.
const ABSOLUTE_FORMS: &str = "give RFC 3339 (2026-11-20T14:00:00+01:00) or local date and time (2026-11-20 14:00, 2026-11-20 14:00:30 or 2026-11-20)";

/// Formats a moment for messages in UTC, to the second: `2026-11-20T14:00:00Z`.
pub fn utc(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// Formats a moment for machines and messages in UTC, with as many digits as it has: `2026-11-20T14:00:00Z`.
pub fn rfc3339(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::AutoSi, true)
}

/// A time zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Zone {
    /// A zone of the IANA database.
    Named(Tz),
    /// The zone of the operating system, whose name is unknown.
    System,
}

impl Zone {
    /// Returns the zone in which users give times: UTC in a Kubernetes Pod, else the zone of the variable TZ
    /// or of the operating system.
    pub fn local() -> Zone {
        let in_pod = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
        let tz = std::env::var("TZ").ok();
        let system = || iana_time_zone::get_timezone().ok();
        Zone::choose(in_pod, tz.as_deref(), system)
    }

    /// Returns the zone with a name of the IANA database, such as `Europe/Berlin`; `None` if there is none.
    pub fn named(name: &str) -> Option<Zone> {
        name.parse().ok().map(Zone::Named)
    }

    /// Chooses the zone. `system` returns the name of the operating system's zone.
    fn choose(in_pod: bool, tz: Option<&str>, system: impl FnOnce() -> Option<String>) -> Zone {
        if in_pod {
            return Zone::Named(Tz::UTC);
        }
        let name = match tz {
            // POSIX: a colon may precede the name, and an empty variable means UTC.
            Some(tz) => match tz.strip_prefix(':').unwrap_or(tz) {
                "" => Some("UTC".to_owned()),
                name => Some(name.to_owned()),
            },
            None => system(),
        };
        let zone = name.and_then(|name| Zone::named(&name));
        // `Local` reads TZ itself and also knows rules such as `CET-1CEST` and paths.
        zone.unwrap_or(Zone::System)
    }

    /// Returns the time in this zone.
    fn local_time(self, time: DateTime<Utc>) -> DateTime<FixedOffset> {
        let fixed = |offset: FixedOffset| time.with_timezone(&offset);
        match self {
            Zone::Named(tz) => fixed(tz.offset_from_utc_datetime(&time.naive_utc()).fix()),
            Zone::System => fixed(Local.offset_from_utc_datetime(&time.naive_utc()).fix()),
        }
    }

    /// Returns the moments that a local time denotes: one, two, or none.
    fn moments(self, local: NaiveDateTime) -> MappedLocalTime<DateTime<FixedOffset>> {
        let offsets = match self {
            Zone::Named(tz) => tz.offset_from_local_datetime(&local).map(|o| o.fix()),
            Zone::System => Local.offset_from_local_datetime(&local),
        };
        offsets.map(|offset| DateTime::from_naive_utc_and_offset(local - offset, offset))
    }

    /// Returns the name of the zone; `None` if it is unknown.
    fn name(self) -> Option<&'static str> {
        match self {
            Zone::Named(tz) => Some(tz.name()),
            Zone::System => None,
        }
    }
}

/// Formats a moment in a zone, so that it can be given as a time again: `2026-11-20T14:00:00+01:00`. Fractions of a second
/// are left out.
pub fn show(time: DateTime<Utc>, zone: Zone) -> String {
    let local = zone.local_time(time);
    local.to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// What `yesterday` and `today` alone mean: they are days.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Day {
    /// A moment is asked for, so they are refused.
    NoMoment,
    /// Their midnight: a span begins.
    Begin,
    /// The midnight after them, or now: a span ends.
    End,
}

/// Parses a moment of the past: RFC 3339; `2026-11-20 14:00`; `2026-11-20`, which is midnight; `14:00`,
/// `today 14:00` and `yesterday 14:00`; `yesterday` and `today` as `day` says; `2h`, `1d12h` and `5 minutes`, with or
/// without `ago`. Clock times may have seconds. All forms but RFC 3339 and ages are in `zone`.
///
/// # Errors
/// A message with the accepted forms; with both readings in RFC 3339 if the change of daylight saving time
/// makes a local time ambiguous or nonexistent; with a remedy if a time of today is after `now`.
pub fn parse(
    text: &str,
    now: DateTime<Utc>,
    zone: Zone,
    day: Day,
) -> Result<DateTime<Utc>, String> {
    let text = text.trim();
    if let Some(time) = before(now, text.strip_suffix(" ago").unwrap_or(text)) {
        return Ok(time);
    }
    if let Some(parsed) = absolute(text, zone) {
        return parsed;
    }
    let today = zone.local_time(now).date_naive();
    let back = match (text, day) {
        ("yesterday" | "today", Day::NoMoment) => {
            return Err(format!(
                "\"{text}\" is a day: which hour? Such as \"{text} 14:00\""
            ));
        }
        ("yesterday", Day::Begin) => Some(1),
        ("yesterday", Day::End) | ("today", Day::Begin) => Some(0),
        ("today", Day::End) => return Ok(now),
        _ => None,
    };
    if let Some(back) = back {
        let midnight = today.checked_sub_days(Days::new(back));
        let midnight = midnight.ok_or_else(|| not_a_time(text, FORMS))?;
        return first_moment(midnight, zone);
    }
    let (day, clock) = match text.split_once(' ') {
        Some((day @ ("today" | "yesterday"), clock)) => (day, clock),
        Some(_) => return Err(not_a_time(text, FORMS)),
        None => ("today", text),
    };
    let clock = clock_time(clock).ok_or_else(|| not_a_time(text, FORMS))?;
    let date = match day {
        "yesterday" => today.pred_opt(),
        _ => Some(today),
    };
    let date = date.ok_or_else(|| not_a_time(text, FORMS))?;
    let time = moment(date.and_time(clock), zone)?;
    if time > now {
        return Err(format!(
            "{} is in the future: give \"yesterday {}\" or a date",
            show(time, zone),
            clock.format("%H:%M:%S")
        ));
    }
    Ok(time)
}

/// Parses a moment of the past or the future: RFC 3339, `2026-11-20 14:00`, or `2026-11-20`, which is midnight.
///
/// # Errors
/// As [`parse`].
pub fn parse_absolute(text: &str, zone: Zone) -> Result<DateTime<Utc>, String> {
    let text = text.trim();
    absolute(text, zone).unwrap_or_else(|| Err(not_a_time(text, ABSOLUTE_FORMS)))
}

fn not_a_time(text: &str, forms: &str) -> String {
    format!("\"{}\" is not a time: {forms}", text.escape_debug())
}

/// Parses a moment with a date. Returns `None` if the text has another form.
fn absolute(text: &str, zone: Zone) -> Option<Result<DateTime<Utc>, String>> {
    if let Ok(time) = DateTime::parse_from_rfc3339(text) {
        return Some(Ok(time.to_utc()));
    }
    let local = match text.split_once(' ') {
        Some((date, clock)) => calendar_date(date)?.and_time(clock_time(clock)?),
        None => calendar_date(text)?.and_time(NaiveTime::MIN),
    };
    Some(moment(local, zone))
}

/// Returns when a day begins: some zones change their clocks at midnight.
fn first_moment(day: NaiveDate, zone: Zone) -> Result<DateTime<Utc>, String> {
    let midnight = day.and_time(NaiveTime::MIN);
    match zone.moments(midnight) {
        MappedLocalTime::Ambiguous(first, _) => Ok(first.to_utc()),
        MappedLocalTime::None => moment(midnight + TimeDelta::hours(1), zone),
        MappedLocalTime::Single(_) => moment(midnight, zone),
    }
}

/// Returns the moment of a local time.
fn moment(local: NaiveDateTime, zone: Zone) -> Result<DateTime<Utc>, String> {
    let readings = match zone.moments(local) {
        MappedLocalTime::Single(time) => return Ok(time.to_utc()),
        MappedLocalTime::Ambiguous(a, b) => [a, b],
        // The clock was set forward: the offsets of the day before and of the day after.
        MappedLocalTime::None => {
            let near = |days| {
                let day = local.checked_add_signed(TimeDelta::days(days))?;
                let offset = zone.local_time(day.and_utc()).offset().fix();
                offset.from_local_datetime(&local).single()
            };
            match (near(-1), near(1)) {
                (Some(before), Some(after)) => [before, after],
                _ => return Err(format!("{local} does not exist in the local time zone")),
            }
        }
    };
    let [a, b] = readings.map(|t| t.to_rfc3339_opts(SecondsFormat::Secs, true));
    let why = if readings[0] < readings[1] {
        "occurs twice"
    } else {
        "does not exist"
    };
    let name = zone.name().unwrap_or("the local time zone");
    Err(format!(
        "{local} {why} in {name}, because the clock changes: give {a} or {b}"
    ))
}

/// Parses `2026-11-20`.
fn calendar_date(text: &str) -> Option<NaiveDate> {
    let [year, month, day] = numbers(text, '-', [4, 2, 2])?;
    NaiveDate::from_ymd_opt(i32::try_from(year).ok()?, month, day)
}

/// Parses `14:00` or `14:00:30`.
fn clock_time(text: &str) -> Option<NaiveTime> {
    let [hour, minute, second] = match text.len() {
        5 => numbers(text, ':', [2, 2]).map(|[h, m]| [h, m, 0]),
        _ => numbers(text, ':', [2, 2, 2]),
    }?;
    NaiveTime::from_hms_opt(hour, minute, second)
}

/// Parses numbers of these widths with a separator between them.
fn numbers<const N: usize>(text: &str, separator: char, widths: [usize; N]) -> Option<[u32; N]> {
    let mut numbers = [0; N];
    let mut parts = text.split(separator);
    for (number, width) in numbers.iter_mut().zip(widths) {
        let part = parts.next()?;
        let is_digits = part.bytes().all(|b| b.is_ascii_digit());
        *number = part
            .parse()
            .ok()
            .filter(|_| is_digits && part.len() == width)?;
    }
    parts.next().is_none().then_some(numbers)
}

/// Returns the moment that was an age such as `2h`, `1d12h` or `3 years` before `now`.
fn before(now: DateTime<Utc>, age: &str) -> Option<DateTime<Utc>> {
    let age = match age.split_once(' ') {
        None => duration::parse(age).ok()?,
        Some((number, word)) => {
            let unit = match word.strip_suffix('s').unwrap_or(word) {
                "second" => 1,
                "minute" => 60,
                "hour" => 3600,
                "day" => 86_400,
                "week" => 7 * 86_400,
                "year" => 365 * 86_400,
                _ => return None,
            };
            Duration::from_secs(number.parse::<u64>().ok()?.checked_mul(unit)?)
        }
    };
    now.checked_sub_signed(TimeDelta::from_std(age).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use chrono::Timelike;

    const BERLIN: Zone = Zone::Named(Tz::Europe__Berlin);
    const NEW_YORK: Zone = Zone::Named(Tz::America__New_York);
    const UTC: Zone = Zone::Named(Tz::UTC);

    fn at(text: &str) -> DateTime<Utc> {
        DateTime::parse_from_rfc3339(text).unwrap().to_utc()
    }

    #[test]
    fn every_form_has_one_reading() {
        let now = "2026-11-20T15:00:30.5Z";
        for (zone, now, text, expected) in [
            (UTC, now, "2026-11-20T13:00:00Z", "2026-11-20T13:00:00Z"),
            (
                BERLIN,
                now,
                "2026-11-20T13:00:00.25-05:00",
                "2026-11-20T18:00:00.25Z",
            ),
            (BERLIN, now, "2026-11-20 14:00", "2026-11-20T13:00:00Z"),
            (BERLIN, now, "2026-11-20 14:00:07", "2026-11-20T13:00:07Z"),
            (BERLIN, now, "2026-07-20 14:00", "2026-07-20T12:00:00Z"),
            (BERLIN, now, "2026-11-20", "2026-11-19T23:00:00Z"),
            (BERLIN, now, "  2026-11-20\n", "2026-11-19T23:00:00Z"),
            (BERLIN, now, "2027-02-01 14:00", "2027-02-01T13:00:00Z"),
            (BERLIN, now, "14:00", "2026-11-20T13:00:00Z"),
            (BERLIN, now, "16:00:30", "2026-11-20T15:00:30Z"),
            (BERLIN, now, "today 14:00", "2026-11-20T13:00:00Z"),
            (BERLIN, now, "yesterday 14:00", "2026-11-19T13:00:00Z"),
            (BERLIN, now, "yesterday 23:59:59", "2026-11-19T22:59:59Z"),
            (NEW_YORK, now, "09:30", "2026-11-20T14:30:00Z"),
            (BERLIN, now, "2h ago", "2026-11-20T13:00:30.5Z"),
            (BERLIN, now, "1d12h ago", "2026-11-19T03:00:30.5Z"),
            (BERLIN, now, "2h", "2026-11-20T13:00:30.5Z"),
            (BERLIN, now, "5m", "2026-11-20T14:55:30.5Z"),
            (BERLIN, now, "5 minutes", "2026-11-20T14:55:30.5Z"),
            (BERLIN, now, "3 years ago", "2023-11-21T15:00:30.5Z"),
            (BERLIN, now, "0s ago", now),
            (BERLIN, now, "5 minutes ago", "2026-11-20T14:55:30.5Z"),
            // A leap day, the turn of a year, and a date that differs from that of UTC.
            (
                BERLIN,
                "2028-03-01T08:00:00Z",
                "yesterday 12:00",
                "2028-02-29T11:00:00Z",
            ),
            (
                UTC,
                "2028-03-01T08:00:00Z",
                "2028-02-29",
                "2028-02-29T00:00:00Z",
            ),
            (
                BERLIN,
                "2027-01-01T08:00:00Z",
                "yesterday 14:00",
                "2026-12-31T13:00:00Z",
            ),
            (
                NEW_YORK,
                "2027-01-01T03:00:00Z",
                "21:00",
                "2027-01-01T02:00:00Z",
            ),
            (
                NEW_YORK,
                "2027-01-01T03:00:00Z",
                "yesterday 21:00",
                "2026-12-31T02:00:00Z",
            ),
            // A day of 23 and one of 25 hours: an age counts hours, not clock times.
            (
                BERLIN,
                "2026-03-29T10:00:00Z",
                "24h ago",
                "2026-03-28T10:00:00Z",
            ),
            (
                BERLIN,
                "2026-03-29T10:00:00Z",
                "yesterday 12:00",
                "2026-03-28T11:00:00Z",
            ),
            (
                BERLIN,
                "2026-10-25T11:00:00Z",
                "yesterday 12:00",
                "2026-10-24T10:00:00Z",
            ),
            // The last second before, and the first after the clock changes.
            (BERLIN, now, "2026-03-29 01:59:59", "2026-03-29T00:59:59Z"),
            (BERLIN, now, "2026-03-29 03:00", "2026-03-29T01:00:00Z"),
            (BERLIN, now, "2026-10-25 01:59:59", "2026-10-24T23:59:59Z"),
            (BERLIN, now, "2026-10-25 03:00", "2026-10-25T02:00:00Z"),
            (NEW_YORK, now, "2026-03-08 01:59:59", "2026-03-08T06:59:59Z"),
            (NEW_YORK, now, "2026-03-08 03:00", "2026-03-08T07:00:00Z"),
            (NEW_YORK, now, "2026-11-01 00:59:59", "2026-11-01T04:59:59Z"),
            (NEW_YORK, now, "2026-11-01 02:00", "2026-11-01T07:00:00Z"),
        ] {
            assert_eq!(
                parse(text, at(now), zone, Day::NoMoment),
                Ok(at(expected)),
                "{text}"
            );
        }
    }

    #[test]
    fn yesterday_and_today_are_days() {
        const CAIRO: Zone = Zone::Named(Tz::Africa__Cairo);
        for (zone, now, text, begin, end) in [
            (
                BERLIN,
                "2026-11-20T15:00:30Z",
                "yesterday",
                "2026-11-18T23:00:00Z",
                "2026-11-19T23:00:00Z",
            ),
            (
                BERLIN,
                "2026-11-20T15:00:30Z",
                "today",
                "2026-11-19T23:00:00Z",
                "2026-11-20T15:00:30Z",
            ),
            // A day of 25 hours.
            (
                BERLIN,
                "2026-10-26T12:00:00Z",
                "yesterday",
                "2026-10-24T22:00:00Z",
                "2026-10-25T23:00:00Z",
            ),
            // Midnight does not exist.
            (
                CAIRO,
                "2026-04-25T12:00:00Z",
                "yesterday",
                "2026-04-23T22:00:00Z",
                "2026-04-24T21:00:00Z",
            ),
        ] {
            let of = |day| parse(text, at(now), zone, day);
            assert_eq!(of(Day::Begin), Ok(at(begin)), "{now} {text}");
            assert_eq!(of(Day::End), Ok(at(end)), "{now} {text}");
            assert!(of(Day::NoMoment).unwrap_err().contains("which hour?"));
        }
    }

    #[test]
    fn a_local_time_with_two_readings_or_none_names_both() {
        for (zone, text, why, readings) in [
            (
                BERLIN,
                "2026-10-25 02:00",
                "twice",
                ["02:00:00+02:00", "02:00:00+01:00"],
            ),
            (
                BERLIN,
                "2026-10-25 02:59:59",
                "twice",
                ["02:59:59+02:00", "02:59:59+01:00"],
            ),
            (
                BERLIN,
                "2026-03-29 02:00",
                "not exist",
                ["02:00:00+01:00", "02:00:00+02:00"],
            ),
            (
                BERLIN,
                "2026-03-29 02:30",
                "not exist",
                ["02:30:00+01:00", "02:30:00+02:00"],
            ),
            (
                NEW_YORK,
                "2026-11-01 01:30",
                "twice",
                ["01:30:00-04:00", "01:30:00-05:00"],
            ),
            (
                NEW_YORK,
                "2026-03-08 02:30",
                "not exist",
                ["02:30:00-05:00", "02:30:00-04:00"],
            ),
        ] {
            let message = parse(text, at("2026-11-20T15:00:00Z"), zone, Day::NoMoment).unwrap_err();
            let date = &text[..10];
            let [a, b] = readings.map(|r| format!("{date}T{r}"));
            assert!(message.contains(why), "{message}");
            assert!(message.ends_with(&format!("give {a} or {b}")), "{message}");
            assert_eq!(parse_absolute(text, zone), Err(message));
        }
        // The same holds for a clock time of today.
        let e = parse("02:30", at("2026-10-25T12:00:00Z"), BERLIN, Day::NoMoment).unwrap_err();
        assert!(e.contains("2026-10-25T02:30:00+02:00"), "{e}");
        // Midnight does not exist where the clock changes then.
        let cairo = Zone::Named(Tz::Africa__Cairo);
        let e = parse_absolute("2026-04-24", cairo).unwrap_err();
        assert!(e.contains("does not exist"), "{e}");
    }

    #[test]
    fn a_clock_time_of_today_is_not_in_the_future() {
        for (text, hint) in [
            ("14:00", "yesterday 14:00:00"),
            ("today 13:00:01", "yesterday 13:00:01"),
        ] {
            let e = parse(text, at("2026-11-20T12:00:00Z"), BERLIN, Day::NoMoment).unwrap_err();
            assert!(e.contains("in the future") && e.contains(hint), "{e}");
            assert!(e.contains("+01:00"), "{e}");
            assert!(parse(hint, at("2026-11-20T12:00:00Z"), BERLIN, Day::NoMoment).is_ok());
        }
    }

    #[test]
    fn anything_else_is_refused_with_the_forms() {
        for text in [
            "",
            " ",
            "noon",
            "now",
            "tomorrow 14:00",
            "4/5",
            "04/05/2026",
            "5.4.2026 14:00",
            "2026-4-5",
            "26-04-05",
            "2026-04-05T14:00:00",
            "2026-04-05T14:00",
            "2026-02-29",
            "2026-13-01",
            "2026-11-31 10:00",
            "9:00",
            "24:00",
            "14:60",
            "23:59:60",
            "14",
            "14:0",
            "+4:00",
            "2 pm",
            "14:00 yesterday",
            "yesterday  14:00",
            "h ago",
            "2 h ago",
            "-2h ago",
            "2h  ago",
            " ago",
            "1M ago",
            "5 months ago",
            "5  minutes ago",
            "5 ago",
            "minutes ago",
            "400000d ago",
            "2026-11-20 14:00 UTC",
            "2026-11-20 14:00 CET",
            "2026-11-20 14:00:00.5",
            "1795224681",
            "٢٠٢٦-11-20",
        ] {
            let e = parse(text, at("2026-11-20T12:00:00Z"), BERLIN, Day::NoMoment).unwrap_err();
            assert!(
                e.contains("2h ago") && e.contains("RFC 3339"),
                "{text:?}: {e}"
            );
        }
        for text in ["14:00", "yesterday 14:00", "2h ago", "noon"] {
            let e = parse_absolute(text, BERLIN).unwrap_err();
            assert!(e.contains("RFC 3339") && !e.contains("ago)"), "{text}: {e}");
        }
    }

    #[test]
    fn a_shown_moment_parses_to_itself() {
        let seed = crate::base::random::random_word();
        let mut rng = fastrand::Rng::with_seed(seed);
        let now = at("2038-01-01T00:00:00Z");
        for _ in 0..5000 {
            let zone =
                Zone::Named(chrono_tz::TZ_VARIANTS[rng.usize(..chrono_tz::TZ_VARIANTS.len())]);
            let time = DateTime::from_timestamp(rng.i64(1_000_000_000..2_100_000_000), 0).unwrap();
            let shown = show(time, zone);
            // With the offset it is exact; without it, it is exact or refused as having two readings.
            assert_eq!(
                parse(&shown, now, zone, Day::NoMoment),
                Ok(time),
                "seed {seed}: {shown}"
            );
            let local = shown[..19].replace('T', " ");
            match parse(&local, now, zone, Day::NoMoment) {
                Ok(parsed) => assert_eq!(parsed, time, "seed {seed}: {shown}"),
                Err(e) => assert!(e.contains("occurs twice"), "seed {seed}: {shown}: {e}"),
            }
            assert_eq!(zone.local_time(time).nanosecond(), 0);
        }
    }

    #[test]
    fn a_pod_uses_utc_and_tz_comes_before_the_system() {
        let choose = |in_pod, tz| Zone::choose(in_pod, tz, || Some("Asia/Tokyo".to_owned()));
        assert_eq!(choose(true, Some("Europe/Berlin")), UTC);
        assert_eq!(choose(false, Some("Europe/Berlin")), BERLIN);
        assert_eq!(choose(false, Some(":Europe/Berlin")), BERLIN);
        assert_eq!(choose(false, Some("")), UTC);
        assert_eq!(choose(false, None), Zone::Named(Tz::Asia__Tokyo));
        assert_eq!(choose(false, Some("CET-1CEST")), Zone::System);
        assert_eq!(Zone::choose(false, None, || None), Zone::System);
        assert_eq!(
            show(at("2026-11-20T13:00:00.9Z"), BERLIN),
            "2026-11-20T14:00:00+01:00"
        );
        assert_eq!(
            show(at("2026-11-20T13:00:00.9Z"), UTC),
            "2026-11-20T13:00:00Z"
        );
    }
}
