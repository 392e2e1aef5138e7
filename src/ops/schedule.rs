//! When a job is to run: a cron schedule in a time zone.
//!
//! It computes from what it is given, and looks at no clock. `0 */6 * * *` means here what it means in a
//! Kubernetes CronJob; the crate `cron` does the calendar, and what it sees otherwise is put right here.

use crate::error::{Error, Reason, Result};
use chrono::{DateTime, Duration, LocalResult, NaiveDateTime, TimeZone, Utc};
use chrono_tz::Tz;
use cron::TimeUnitSpec;
use std::collections::BTreeSet;
use std::str::FromStr;

/// No clock that is set back says the same hours again for longer.
const LONGEST_OVERLAP: Duration = Duration::hours(4);

/// The short forms, in five fields.
const SHORT: [(&str, &str); 7] = [
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
/// Where clocks are set forward, a run in the hour that is left out takes place as soon as that is over; where
/// they are set back, one in the hour that comes twice takes place once. Of a schedule for every hour (`*` or
/// the like in its place) runs simply stay as far apart as they are.
#[derive(Debug, Clone)]
pub struct Schedule {
    /// One, or two of which either counts: cron takes a day that either of its two fields allows.
    either: Vec<cron::Schedule>,
    zone: Tz,
    every_hour: bool,
}

impl Schedule {
    /// Reads a schedule: five fields (minute, hour, day of month, month, day of week), six with seconds
    /// before them, seven with years behind them, or `@hourly`, `@daily`, `@weekly`, `@monthly`, `@yearly`.
    /// Sunday is 0 or 7 in all of them. `zone` is a name of the IANA database, such as `Europe/Berlin`.
    ///
    /// # Errors
    /// `Usage`.
    pub fn parse(schedule: &str, zone: &str) -> Result<Self> {
        let zone = Tz::from_str(zone.trim()).map_err(|_| {
            Reason::Usage.error(format!(
                "\"{zone}\" is no time zone: give a name of the IANA database, such as UTC or Europe/Berlin"
            ))
        })?;
        let bad = |what: String| {
            Reason::Usage.error(format!(
                "the schedule \"{schedule}\" cannot be understood: {what}; give five fields (minute, hour, \
                 day of month, month, day of week), such as \"0 */6 * * *\", or @hourly, @daily, @weekly, @monthly, @yearly"
            ))
        };
        let mut text = schedule.trim();
        if text.starts_with("CRON_TZ=") || text.starts_with("TZ=") {
            return Err(bad("a time zone is given apart from it".to_owned()));
        }
        if text.starts_with('@') {
            let known = SHORT.iter().find(|(name, _)| *name == text);
            text = match known {
                Some((_, fields)) => fields,
                None => return Err(bad(format!("\"{text}\" is no short form"))),
            };
        }
        let fields: Vec<&str> = text.split_whitespace().collect();
        let (second, fields, year) = match fields.as_slice() {
            five @ [_, _, _, _, _] => ("0", five, "*"),
            [second, five @ ..] if five.len() == 5 => (*second, five, "*"),
            [second, five @ .., year] if five.len() == 5 => (*second, five, *year),
            other => return Err(bad(format!("it has {} fields", other.len()))),
        };
        let &[minute, hour, day, month, weekday] = fields else {
            return Err(Error::internal("five fields that are not five"));
        };
        let weekdays = weekdays(weekday).map_err(bad)?;
        let parse = |day: &str, weekdays: &str| {
            let fields = [second, minute, hour, day, month, weekdays, year].join(" ");
            fields.parse::<cron::Schedule>().map_err(|e| {
                // The crate's message is of several lines, of which the last one says what it is.
                let said = e.to_string();
                let said = said.lines().rfind(|l| !l.trim().is_empty());
                bad(said.unwrap_or("no field is of a known form").to_owned())
            })
        };
        let either = match is_any(day) || is_any(weekday) {
            true => vec![parse(day, &weekdays)?],
            false => vec![parse(day, "*")?, parse("*", &weekdays)?],
        };
        let every_hour = either[0].hours().count() == 24;
        let schedule = Schedule {
            either,
            zone,
            every_hour,
        };
        if schedule.next_after(DateTime::UNIX_EPOCH).is_none() {
            return Err(bad("such a day never comes".to_owned()));
        }
        Ok(schedule)
    }

    /// The first time for a run that is later than `t`. `None` where there is none to come: before 2100
    /// that is only where the years are named.
    pub fn next_after(&self, t: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let mut local = t.with_timezone(&self.zone).naive_local();
        if self.every_hour {
            // What comes twice may be before it on the clock's face, and after it all the same.
            local -= LONGEST_OVERLAP;
        }
        let of_one = |schedule: &cron::Schedule| {
            let mut second_time = None;
            for face in schedule.after(&local.and_utc()) {
                let (first, again) = self.instants(face.naive_utc());
                second_time = second_time.or(again.filter(|&at| at > t));
                // What comes later on the clock's face comes no earlier.
                if let Some(first) = first.filter(|&at| at > t) {
                    return Some(second_time.map_or(first, |again| first.min(again)));
                }
            }
            second_time
        };
        self.either.iter().filter_map(of_one).min()
    }

    /// The newest time for a run that is not later than `t`.
    fn newest_until(&self, t: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let local = t.with_timezone(&self.zone).naive_local() + LONGEST_OVERLAP;
        let of_one = |schedule: &cron::Schedule| {
            let mut newest = None;
            for face in schedule.after(&local.and_utc()).rev() {
                let (first, again) = self.instants(face.naive_utc());
                newest = newest.max(first.filter(|&at| at <= t));
                newest = newest.max(again.filter(|&at| at <= t));
                let all_past = first.is_some_and(|at| at <= t) && again.is_none_or(|at| at <= t);
                if all_past {
                    break;
                }
            }
            newest
        };
        self.either.iter().filter_map(of_one).max()
    }

    /// The newest time at which it should have run after `last_run` and until `now`: one run makes up for
    /// all that were missed. `None` also where the clock was set back to before the last run: what comes next
    /// then is [`next_after`](Self::next_after) now.
    pub fn missed(&self, last_run: DateTime<Utc>, now: DateTime<Utc>) -> Option<DateTime<Utc>> {
        self.newest_until(now).filter(|&at| at > last_run)
    }

    /// When a clock's face shows that: once, twice, or, where it is left out, as soon as that is over.
    fn instants(&self, face: NaiveDateTime) -> (Option<DateTime<Utc>>, Option<DateTime<Utc>>) {
        let utc = |t: DateTime<Tz>| t.with_timezone(&Utc);
        match self.zone.from_local_datetime(&face) {
            LocalResult::Single(t) => (Some(utc(t)), None),
            LocalResult::Ambiguous(a, b) => {
                let (first, again) = (utc(a.min(b)), utc(a.max(b)));
                (Some(first), self.every_hour.then_some(again))
            }
            LocalResult::None if self.every_hour => (None, None),
            LocalResult::None => (self.end_of_gap(face), None),
        }
    }

    /// The first moment after those that a clock leaves out, one of which is given.
    fn end_of_gap(&self, face: NaiveDateTime) -> Option<DateTime<Utc>> {
        let exists = |face: NaiveDateTime| self.zone.from_local_datetime(&face).earliest();
        // The longest that was ever left out is a day.
        let (mut gap, mut behind) = (0i64, 26 * 3600);
        let at = |seconds: i64| face + Duration::seconds(seconds);
        exists(at(behind))?;
        while behind - gap > 1 {
            let middle = (gap + behind) / 2;
            match exists(at(middle)) {
                Some(_) => behind = middle,
                None => gap = middle,
            }
        }
        exists(at(behind)).map(|t| t.with_timezone(&Utc))
    }
}

/// Whether a field of days allows all, so that the other one alone decides.
fn is_any(field: &str) -> bool {
    field
        .split(',')
        .any(|item| matches!(item, "*" | "?" | "*/1" | "?/1"))
}

/// Days of the week as the crate counts them, from 1 for Sunday.
fn weekdays(field: &str) -> Result<String, String> {
    let mut days = BTreeSet::new();
    for item in field.split(',') {
        let (range, step) = match item.split_once('/') {
            Some((range, step)) => {
                let n = step.parse().ok().filter(|&n: &usize| n > 0);
                let wrong = || format!("\"{step}\" in \"{item}\" is no number of days");
                (range, Some(n.ok_or_else(wrong)?))
            }
            None => (item, None),
        };
        let (from, to) = match range.split_once('-') {
            Some((from, to)) => (weekday(from)?, weekday(to)?),
            None if matches!(range, "*" | "?") => (0, 6),
            None => {
                let day = weekday(range)?;
                (day, if step.is_some() { 6.max(day) } else { day })
            }
        };
        if from > to {
            return Err(format!(
                "in \"{range}\" the week ends before it begins: Sunday is 0 or 7"
            ));
        }
        days.extend((from..=to).step_by(step.unwrap_or(1)).map(|d| d % 7 + 1));
    }
    let days: Vec<String> = days.iter().map(usize::to_string).collect();
    Ok(days.join(","))
}

/// A day of the week: 0 to 7, or its name.
fn weekday(s: &str) -> Result<usize, String> {
    let named = DAYS.iter().position(|name| {
        let long = s.len() > 3 && s.is_ascii() && s.to_ascii_lowercase().ends_with("day");
        s.eq_ignore_ascii_case(name) || (long && s[..3].eq_ignore_ascii_case(name))
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

    /// The next runs, in the zone's own time.
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
    fn fields_mean_what_they_mean_to_cron() {
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
            // Either of the two fields of days, unless one of them allows all.
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
    fn a_run_is_later_than_what_is_asked_from() {
        let run = "Fri 2026-11-20 12:00:00 +0000";
        let next = |after: &str| runs("0 12 * * *", "UTC", after, 1);
        assert_eq!(next("2026-11-20T11:59:59.999999999Z"), [run]);
        assert_ne!(next("2026-11-20T12:00:00Z"), [run]);
    }

    #[test]
    fn a_run_in_the_hour_that_is_left_out_comes_after_it() {
        // Berlin, 2026-03-29: 02:00 is 03:00.
        let from = "2026-03-28T12:00:00Z";
        assert_eq!(
            runs("30 2 * * *", "Europe/Berlin", from, 2),
            [
                "Sun 2026-03-29 03:00:00 +0200",
                "Mon 2026-03-30 02:30:00 +0200"
            ]
        );
        // Several are one.
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
        // Half an hour, and a whole day.
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
    fn a_run_in_the_hour_that_comes_twice_takes_place_once() {
        // Berlin, 2026-10-25: 03:00 is 02:00.
        let from = "2026-10-24T12:00:00Z";
        assert_eq!(
            runs("30 2 * * *", "Europe/Berlin", from, 2),
            [
                "Sun 2026-10-25 02:30:00 +0200",
                "Mon 2026-10-26 02:30:00 +0100"
            ]
        );
        // Asked within the second time.
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
        // A run at the very time was that run.
        assert_eq!(
            s.missed(at("2026-11-20T12:00:00Z"), at("2026-11-20T12:00:01Z")),
            None
        );
    }

    #[test]
    fn forwards_and_backwards_are_the_same_times() {
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
    fn what_is_wrong_is_said() {
        for (schedule, zone, says) in [
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
            let told = e.to_string();
            assert!(told.contains(says), "{schedule}: {told}");
            assert!(!told.contains('\n'), "{told}");
        }
    }
}
