//! Cron schedules in a time zone, with the same meaning as in a Kubernetes CronJob.
//!
//! The crate `cron` computes the calendar; this module corrects the differences: days of the week, changes of the
//! clock, and two restricted day fields. It reads no clock.

use crate::error::{Reason, Result};
use chrono::{DateTime, Duration, LocalResult, NaiveDateTime, TimeZone, Utc};
use chrono_tz::Tz;
use cron::TimeUnitSpec;
use std::collections::BTreeSet;
use std::str::FromStr;

/// An upper bound for the local time that is repeated when a clock is set back.
const MAX_OVERLAP: Duration = Duration::hours(4);

/// The short forms and their meanings in five fields.
const SHORT_FORMS: [(&str, &str); 7] = [
    ("@yearly", "0 0 1 1 *"),
    ("@annually", "0 0 1 1 *"),
    ("@monthly", "0 0 1 * *"),
    ("@weekly", "0 0 * * 0"),
    ("@daily", "0 0 * * *"),
    ("@midnight", "0 0 * * *"),
    ("@hourly", "0 * * * *"),
];

const DAYS: [&str; 7] = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"];

/// A cron schedule in a time zone.
///
/// When clocks are set forward, a run in the skipped hour takes place as soon as that hour is over. When they
/// are set back, a run in the repeated hour takes place once. A schedule for every hour (`*` or the like in
/// the field of the hour) is not affected: its runs keep their distance.
#[derive(Debug, Clone)]
pub struct Schedule {
    /// A run takes place when any of these says so. There are two if both day fields are restricted: then
    /// cron runs on a day that either field allows.
    alternatives: Vec<cron::Schedule>,
    zone: Tz,
    every_hour: bool,
}

impl Schedule {
    /// Parses a schedule: five fields (minute, hour, day of month, month, day of week), six with seconds in
    /// front, seven with years at the end, or `@hourly`, `@daily`, `@weekly`, `@monthly`, `@yearly`. Sunday
    /// is 0 or 7. `zone` is a name of the IANA database, such as `Europe/Berlin`.
    ///
    /// # Errors
    /// Fails with `Usage` if the schedule or the zone is invalid.
    pub fn parse(schedule: &str, zone: &str) -> Result<Self> {
        let zone = Tz::from_str(zone.trim()).map_err(|_| {
            Reason::Usage.error(format!(
                "unknown time zone \"{zone}\": give a name of the IANA database, such as UTC or Europe/Berlin"
            ))
        })?;
        let invalid = |problem: String| {
            Reason::Usage.error(format!(
                "invalid schedule \"{schedule}\": {problem}; give five fields (minute, hour, \
                 day of month, month, day of week), such as \"0 */6 * * *\", or @hourly, @daily, @weekly, @monthly, @yearly"
            ))
        };
        let alternatives = parse_fields(schedule.trim()).map_err(invalid)?;
        let every_hour = alternatives[0].hours().count() == 24;
        let schedule = Schedule {
            alternatives,
            zone,
            every_hour,
        };
        if schedule.next_after(DateTime::UNIX_EPOCH).is_none() {
            return Err(invalid("such a day never comes".to_owned()));
        }
        Ok(schedule)
    }

    /// Returns the first run after `t`. Returns `None` if there is none; before 2100 that happens only if the
    /// schedule names years.
    pub fn next_after(&self, t: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let mut local = t.with_timezone(&self.zone).naive_local();
        if self.every_hour {
            // A repeated hour has local times before `t`'s that are nevertheless later than `t`.
            local -= MAX_OVERLAP;
        }
        let runs = self.alternatives.iter();
        runs.filter_map(|s| self.next_of(s, local, t)).min()
    }

    /// Returns the first run of one alternative after `t`, searching from the local time `from`.
    fn next_of(
        &self,
        schedule: &cron::Schedule,
        from: NaiveDateTime,
        t: DateTime<Utc>,
    ) -> Option<DateTime<Utc>> {
        let mut in_repeated_hour = None;
        for local in schedule.after(&from.and_utc()) {
            let (first, second) = self.instants(local.naive_utc());
            in_repeated_hour = in_repeated_hour.or(second.filter(|&at| at > t));
            // First occurrences come in the order of local times, so this is the earliest of them.
            if let Some(first) = first.filter(|&at| at > t) {
                return Some(in_repeated_hour.map_or(first, |second| first.min(second)));
            }
        }
        in_repeated_hour
    }

    /// Returns the last run at or before `t`.
    fn last_until(&self, t: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let local = t.with_timezone(&self.zone).naive_local() + MAX_OVERLAP;
        let runs = self.alternatives.iter();
        runs.filter_map(|s| self.last_of(s, local, t)).max()
    }

    /// Returns the last run of one alternative at or before `t`, searching backward from the local time
    /// `from`.
    fn last_of(
        &self,
        schedule: &cron::Schedule,
        from: NaiveDateTime,
        t: DateTime<Utc>,
    ) -> Option<DateTime<Utc>> {
        let mut last = None;
        for local in schedule.after(&from.and_utc()).rev() {
            let (first, second) = self.instants(local.naive_utc());
            last = last.max(first.filter(|&at| at <= t));
            last = last.max(second.filter(|&at| at <= t));
            let are_all_past = first.is_some_and(|at| at <= t) && second.is_none_or(|at| at <= t);
            if are_all_past {
                break;
            }
        }
        last
    }

    /// Returns the last run that was due after `last_run` and until `now`: one run makes up for all that were
    /// missed. Also returns `None` if the clock was set back to before `last_run`; the next run is then
    /// [`next_after`](Self::next_after) `now`.
    pub fn missed(&self, last_run: DateTime<Utc>, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        self.last_until(now).filter(|&at| at > last_run)
    }

    /// Returns when a local time occurs. It occurs once, or twice if the clock is set back. If the clock
    /// skips it, that is the first moment after the skipped time.
    fn instants(&self, local: NaiveDateTime) -> (Option<DateTime<Utc>>, Option<DateTime<Utc>>) {
        let utc = |t: DateTime<Tz>| t.with_timezone(&Utc);
        match self.zone.from_local_datetime(&local) {
            LocalResult::Single(t) => (Some(utc(t)), None),
            LocalResult::Ambiguous(a, b) => {
                let (first, second) = (utc(a.min(b)), utc(a.max(b)));
                (Some(first), self.every_hour.then_some(second))
            }
            LocalResult::None if self.every_hour => (None, None),
            LocalResult::None => (self.end_of_gap(local), None),
        }
    }

    /// Returns the first moment after a gap of the clock, given a local time in the gap.
    fn end_of_gap(&self, skipped: NaiveDateTime) -> Option<DateTime<Utc>> {
        let instant = |local: NaiveDateTime| self.zone.from_local_datetime(&local).earliest();
        let local = |seconds: i64| skipped + Duration::seconds(seconds);
        // A binary search. The longest gap ever was a day, in Pacific/Apia.
        let (mut in_gap, mut after_gap) = (0i64, 26 * 3600);
        instant(local(after_gap))?;
        while after_gap - in_gap > 1 {
            let middle = (in_gap + after_gap) / 2;
            match instant(local(middle)) {
                Some(_) => after_gap = middle,
                None => in_gap = middle,
            }
        }
        instant(local(after_gap)).map(|t| t.with_timezone(&Utc))
    }
}

/// Parses a schedule into its alternatives. The error says what is wrong.
fn parse_fields(schedule: &str) -> Result<Vec<cron::Schedule>, String> {
    if schedule.starts_with("CRON_TZ=") || schedule.starts_with("TZ=") {
        return Err("the time zone is given apart from it".to_owned());
    }
    let mut text = schedule;
    if schedule.starts_with('@') {
        let short_form = SHORT_FORMS.iter().find(|(name, _)| *name == schedule);
        text = match short_form {
            Some((_, fields)) => fields,
            None => return Err(format!("unknown short form \"{schedule}\"")),
        };
    }
    let fields: Vec<&str> = text.split_whitespace().collect();
    let (second, fields, year) = match fields.as_slice() {
        five @ [_, _, _, _, _] => ("0", five, "*"),
        [second, five @ ..] if five.len() == 5 => (*second, five, "*"),
        [second, five @ .., year] if five.len() == 5 => (*second, five, *year),
        other => return Err(format!("it has {} fields", other.len())),
    };
    let &[minute, hour, day, month, weekday] = fields else {
        return Err(format!("it has {} fields", fields.len()));
    };
    let weekdays = weekdays(weekday)?;
    let parse = |day: &str, weekdays: &str| {
        let fields = [second, minute, hour, day, month, weekdays, year].join(" ");
        fields
            .parse::<cron::Schedule>()
            .map_err(|e| last_line(&e.to_string()))
    };
    if allows_all(day) || allows_all(weekday) {
        return Ok(vec![parse(day, &weekdays)?]);
    }
    Ok(vec![parse(day, "*")?, parse("*", &weekdays)?])
}

/// Returns the last line of the crate's message, which says what is wrong; the lines before show where.
fn last_line(message: &str) -> String {
    let last = message.lines().rfind(|l| !l.trim().is_empty());
    last.unwrap_or("no field has a known form").to_owned()
}

/// Whether a day field allows all days, so that the other day field alone decides.
fn allows_all(field: &str) -> bool {
    field
        .split(',')
        .any(|part| matches!(part, "*" | "?" | "*/1" | "?/1"))
}

/// Converts a day-of-week field into the crate's numbers, which begin with 1 for Sunday.
fn weekdays(field: &str) -> Result<String, String> {
    let mut days = BTreeSet::new();
    for part in field.split(',') {
        let (range, step) = match part.split_once('/') {
            Some((range, step)) => {
                let n = step.parse().ok().filter(|&n: &usize| n > 0);
                let invalid = || format!("\"{step}\" in \"{part}\" is no number of days");
                (range, Some(n.ok_or_else(invalid)?))
            }
            None => (part, None),
        };
        let (first, last) = match range.split_once('-') {
            Some((first, last)) => (weekday(first)?, weekday(last)?),
            None if matches!(range, "*" | "?") => (0, 6),
            None => {
                let day = weekday(range)?;
                (day, if step.is_some() { 6.max(day) } else { day })
            }
        };
        if first > last {
            return Err(format!(
                "in \"{range}\" the week ends before it begins: Sunday is 0 or 7"
            ));
        }
        days.extend((first..=last).step_by(step.unwrap_or(1)).map(|d| d % 7 + 1));
    }
    let days: Vec<String> = days.iter().map(usize::to_string).collect();
    Ok(days.join(","))
}

/// Parses a day of the week: 0 to 7, or its name.
fn weekday(s: &str) -> Result<usize, String> {
    let is_long_name = s.len() > 3 && s.is_ascii() && s.to_ascii_lowercase().ends_with("day");
    let named = DAYS.iter().position(|name| {
        s.eq_ignore_ascii_case(name) || (is_long_name && s[..3].eq_ignore_ascii_case(name))
    });
    named
        .or_else(|| s.parse().ok().filter(|&n| n <= 7))
        .ok_or_else(|| {
            format!("\"{s}\" is no day of the week (0 to 7, Sunday is 0 and 7, or sun to sat)")
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(t: &str) -> DateTime<Utc> {
        t.parse().unwrap()
    }

    /// Returns the next `n` runs after a time, in the zone's local time.
    fn runs(schedule: &str, zone: &str, after: &str, n: usize) -> Vec<String> {
        let schedule = Schedule::parse(schedule, zone).unwrap();
        let mut t = at(after);
        let mut runs = Vec::new();
        for _ in 0..n {
            t = schedule.next_after(t).unwrap();
            let local = t.with_timezone(&schedule.zone);
            runs.push(local.format("%a %Y-%m-%d %H:%M:%S %z").to_string());
        }
        runs
    }

    #[test]
    fn fields_have_the_same_meaning_as_in_cron() {
        // 2026-11-20 is a Friday.
        let from = "2026-11-20T12:00:00Z";
        for (schedule, next) in [
            ("0 */6 * * *", "Fri 2026-11-20 18:00:00 +0000"),
            ("*/5 * * * *", "Fri 2026-11-20 12:05:00 +0000"),
            ("5/20 * * * *", "Fri 2026-11-20 12:05:00 +0000"),
            ("@hourly", "Fri 2026-11-20 13:00:00 +0000"),
            ("@daily", "Sat 2026-11-21 00:00:00 +0000"),
            ("@midnight", "Sat 2026-11-21 00:00:00 +0000"),
            ("@weekly", "Sun 2026-11-22 00:00:00 +0000"),
            ("@monthly", "Tue 2026-12-01 00:00:00 +0000"),
            ("@yearly", "Fri 2027-01-01 00:00:00 +0000"),
            (" 0  0 * * 0 ", "Sun 2026-11-22 00:00:00 +0000"),
            ("0 0 * * 7", "Sun 2026-11-22 00:00:00 +0000"),
            ("0 0 * * 1", "Mon 2026-11-23 00:00:00 +0000"),
            ("0 0 * * 6", "Sat 2026-11-21 00:00:00 +0000"),
            ("0 0 * * sun", "Sun 2026-11-22 00:00:00 +0000"),
            ("0 0 * * Monday", "Mon 2026-11-23 00:00:00 +0000"),
            ("0 0 * * 2-4", "Tue 2026-11-24 00:00:00 +0000"),
            ("0 0 * * 6-7", "Sat 2026-11-21 00:00:00 +0000"),
            ("0 0 * * 1-5/2", "Mon 2026-11-23 00:00:00 +0000"),
            ("0 0 * * 3/2", "Wed 2026-11-25 00:00:00 +0000"),
            ("0 0 * dec mon-tue", "Tue 2026-12-01 00:00:00 +0000"),
            ("0 0 ? * ?", "Sat 2026-11-21 00:00:00 +0000"),
            // A day that either day field allows, unless one of them allows all days.
            ("0 0 30 * 2", "Tue 2026-11-24 00:00:00 +0000"),
            ("0 0 22 * 2", "Sun 2026-11-22 00:00:00 +0000"),
            ("0 0 */29 * *", "Mon 2026-11-30 00:00:00 +0000"),
            // With seconds, and with years.
            ("30 0 12 * * *", "Fri 2026-11-20 12:00:30 +0000"),
            ("0 0 0 * * 1", "Mon 2026-11-23 00:00:00 +0000"),
            ("0 0 0 1 1 * 2030", "Tue 2030-01-01 00:00:00 +0000"),
        ] {
            assert_eq!(runs(schedule, "UTC", from, 1), [next], "{schedule}");
        }
        assert_eq!(
            Schedule::parse("0 0 0 1 1 * 2020", "UTC")
                .unwrap()
                .next_after(at(from)),
            None
        );
    }

    #[test]
    fn the_next_run_is_strictly_later() {
        let run = "Fri 2026-11-20 12:00:00 +0000";
        let next = |after: &str| runs("0 12 * * *", "UTC", after, 1);
        assert_eq!(next("2026-11-20T11:59:59.999999999Z"), [run]);
        assert_ne!(next("2026-11-20T12:00:00Z"), [run]);
    }

    #[test]
    fn a_run_in_a_skipped_hour_takes_place_after_it() {
        // Berlin, 2026-03-29: 02:00 is 03:00.
        let from = "2026-03-28T12:00:00Z";
        assert_eq!(
            runs("30 2 * * *", "Europe/Berlin", from, 2),
            [
                "Sun 2026-03-29 03:00:00 +0200",
                "Mon 2026-03-30 02:30:00 +0200"
            ]
        );
        // Several runs in the skipped hour become one.
        assert_eq!(
            runs("*/20 2 * * *", "Europe/Berlin", from, 2),
            [
                "Sun 2026-03-29 03:00:00 +0200",
                "Mon 2026-03-30 02:00:00 +0200"
            ]
        );
        assert_eq!(
            runs("30 * * * *", "Europe/Berlin", "2026-03-29T00:00:00Z", 2),
            [
                "Sun 2026-03-29 01:30:00 +0100",
                "Sun 2026-03-29 03:30:00 +0200"
            ]
        );
        // Zones that skip half an hour, and a whole day.
        assert_eq!(
            runs(
                "15 2 * * *",
                "Australia/Lord_Howe",
                "2026-10-03T00:00:00Z",
                1
            ),
            ["Sun 2026-10-04 02:30:00 +1100"]
        );
        assert_eq!(
            runs("0 12 * * *", "Pacific/Apia", "2011-12-29T23:00:00Z", 2),
            [
                "Sat 2011-12-31 00:00:00 +1400",
                "Sat 2011-12-31 12:00:00 +1400"
            ]
        );
    }

    #[test]
    fn a_run_in_a_repeated_hour_takes_place_once() {
        // Berlin, 2026-10-25: 03:00 is 02:00.
        let from = "2026-10-24T12:00:00Z";
        assert_eq!(
            runs("30 2 * * *", "Europe/Berlin", from, 2),
            [
                "Sun 2026-10-25 02:30:00 +0200",
                "Mon 2026-10-26 02:30:00 +0100"
            ]
        );
        // From within the repetition.
        assert_eq!(
            runs("30 2 * * *", "Europe/Berlin", "2026-10-25T01:10:00Z", 1),
            ["Mon 2026-10-26 02:30:00 +0100"]
        );
        assert_eq!(
            runs("*/30 * * * *", "Europe/Berlin", "2026-10-24T23:45:00Z", 6),
            [
                "Sun 2026-10-25 02:00:00 +0200",
                "Sun 2026-10-25 02:30:00 +0200",
                "Sun 2026-10-25 02:00:00 +0100",
                "Sun 2026-10-25 02:30:00 +0100",
                "Sun 2026-10-25 03:00:00 +0100",
                "Sun 2026-10-25 03:30:00 +0100"
            ]
        );
    }

    #[test]
    fn leap_days() {
        assert_eq!(
            runs("0 0 29 2 *", "UTC", "2026-11-20T12:00:00Z", 2),
            [
                "Tue 2028-02-29 00:00:00 +0000",
                "Sun 2032-02-29 00:00:00 +0000"
            ]
        );
        assert_eq!(
            runs("0 0 31 * *", "UTC", "2028-01-31T00:00:00Z", 1),
            ["Fri 2028-03-31 00:00:00 +0000"]
        );
    }

    #[test]
    fn one_run_makes_up_for_all_that_were_missed() {
        let s = Schedule::parse("0 */6 * * *", "UTC").unwrap();
        let last = at("2026-11-20T06:00:02Z");
        for (now, missed) in [
            ("2026-11-20T06:00:02Z", None),
            ("2026-11-20T11:59:59Z", None),
            ("2026-11-20T12:00:00Z", Some("2026-11-20T12:00:00Z")),
            ("2026-11-20T17:00:00Z", Some("2026-11-20T12:00:00Z")),
            ("2026-11-23T03:00:00Z", Some("2026-11-23T00:00:00Z")),
            // A clock that jumped ahead by years, and one that went back.
            ("2040-01-01T05:59:59Z", Some("2040-01-01T00:00:00Z")),
            ("2026-11-20T06:00:01Z", None),
            ("2026-11-19T23:00:00Z", None),
            ("1970-01-01T00:00:00Z", None),
        ] {
            assert_eq!(s.missed(last, at(now)), missed.map(at), "{now}");
        }
        // A run at exactly the due time is not missed.
        assert_eq!(
            s.missed(at("2026-11-20T12:00:00Z"), at("2026-11-20T12:00:01Z")),
            None
        );
    }

    #[test]
    fn the_next_run_and_the_missed_run_are_the_same() {
        let seed = crate::seed();
        let mut rng = fastrand::Rng::with_seed(seed);
        let schedules = [
            "0 */6 * * *",
            "*/20 * * * *",
            "30 2 * * *",
            "15 1,2,3 * * *",
            "*/7 2 * * *",
            "0 0 13 * 5",
            "59 23 * * 1-5",
        ];
        let zones = [
            "UTC",
            "Europe/Berlin",
            "America/New_York",
            "Australia/Lord_Howe",
            "Asia/Kathmandu",
            "Antarctica/Troll",
            "Pacific/Apia",
        ];
        for _ in 0..60 {
            let schedule = schedules[rng.usize(..schedules.len())];
            let zone = zones[rng.usize(..zones.len())];
            let s = Schedule::parse(schedule, zone).unwrap();
            // Days around a change of clocks in many zones.
            let days = [
                "2026-03-29T00:00:00Z",
                "2026-10-25T00:00:00Z",
                "2026-03-08T06:00:00Z",
                "2026-11-01T05:00:00Z",
                "2026-04-04T15:00:00Z",
                "2026-10-03T15:00:00Z",
                "2011-12-30T09:00:00Z",
            ];
            let day = at(days[rng.usize(..days.len())]);
            let from = day + Duration::seconds(rng.i64(-90_000..90_000));
            let mut t = from;
            for _ in 0..20 {
                let next = s.next_after(t).unwrap();
                let shown = format!("{schedule} {zone}: {t} {next}");
                assert!(next > t, "{shown}");
                assert_eq!(s.missed(t, next), Some(next), "{shown}");
                assert_eq!(s.missed(t, next - Duration::seconds(1)), None, "{shown}");
                let between = t + Duration::seconds(rng.i64(0..(next - t).num_seconds()));
                assert_eq!(s.next_after(between), Some(next), "{shown}");
                t = next;
            }
            assert_eq!(s.missed(from, t), Some(t));
        }
    }

    #[test]
    fn errors_name_the_problem() {
        for (schedule, zone, expected) in [
            ("", "UTC", "0 fields"),
            ("* * * *", "UTC", "4 fields"),
            ("0 0 0 * * * 2030 2", "UTC", "8 fields"),
            ("61 * * * *", "UTC", "61"),
            ("* 24 * * *", "UTC", "24"),
            ("x * * * *", "UTC", "0 */6 * * *"),
            ("0 0 * * 8", "UTC", "Sunday"),
            ("0 0 * * fri-mon", "UTC", "fri-mon"),
            ("0 0 * * 1/0", "UTC", "no number of days"),
            ("0 0 * * ", "UTC", "4 fields"),
            ("0 0 30 2 *", "UTC", "never comes"),
            ("@often", "UTC", "@often"),
            ("@every 1h", "UTC", "@every 1h"),
            ("TZ=UTC 0 0 * * *", "UTC", "apart"),
            ("0 0 * * *", "Berlin", "Europe/Berlin"),
            ("0 0 * * *", "+02:00", "Europe/Berlin"),
        ] {
            let e = Schedule::parse(schedule, zone).unwrap_err();
            assert_eq!(e.reason(), Reason::Usage);
            let message = e.to_string();
            assert!(message.contains(expected), "{schedule}: {message}");
            assert!(!message.contains('\n'), "{message}");
        }
    }
}
