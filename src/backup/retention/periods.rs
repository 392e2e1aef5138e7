//! Calendar periods, and which fulls the policy `exponential` keeps of them.
//!
//! All periods are in UTC.

use super::kept::KeepReasons;
use super::{Facts, RetentionReason, time_at};
use chrono::{DateTime, Datelike, TimeDelta, Utc};
use std::collections::BTreeMap;

/// For how many calendar periods (UTC), including the current one, the newest full is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::Args)]
pub struct Periods {
    /// With "exponential": keep the newest full of each of the last N hours (UTC), including the current one
    #[arg(long = "keep-hourly", value_name = "N", default_value_t = 24)]
    pub hourly: u32,
    /// With "exponential": keep the newest full of each of the last N days
    #[arg(long = "keep-daily", value_name = "N", default_value_t = 7)]
    pub daily: u32,
    /// With "exponential": keep the newest full of each of the last N weeks, which begin on Monday
    #[arg(long = "keep-weekly", value_name = "N", default_value_t = 4)]
    pub weekly: u32,
    /// With "exponential": keep the newest full of each of the last N months
    #[arg(long = "keep-monthly", value_name = "N", default_value_t = 0)]
    pub monthly: u32,
}

impl Default for Periods {
    fn default() -> Self {
        Periods {
            hourly: 24,
            daily: 7,
            weekly: 4,
            monthly: 0,
        }
    }
}

/// A calendar period.
pub(super) struct Period {
    /// The number of the period: it grows by one from each period to the next.
    pub(super) number: i64,
    pub(super) begins: DateTime<Utc>,
}

fn hour(t: DateTime<Utc>) -> Period {
    let number = t.timestamp().div_euclid(3600);
    Period {
        number,
        begins: time_at(number * 3600),
    }
}

fn day(t: DateTime<Utc>) -> Period {
    let number = t.timestamp().div_euclid(86_400);
    Period {
        number,
        begins: time_at(number * 86_400),
    }
}

pub(super) fn week(t: DateTime<Utc>) -> Period {
    // 1970 began on a Thursday.
    let number = (day(t).number + 3).div_euclid(7);
    Period {
        number,
        begins: time_at((number * 7 - 3) * 86_400),
    }
}

pub(super) fn month(t: DateTime<Utc>) -> Period {
    let number = i64::from(t.year()) * 12 + i64::from(t.month0());
    let first_day = day(t).number - i64::from(t.day0());
    Period {
        number,
        begins: time_at(first_day * 86_400),
    }
}

/// How many periods of one kind keep their newest full.
struct Rule {
    count: u32,
    period: fn(DateTime<Utc>) -> Period,
    reason: fn(DateTime<Utc>) -> RetentionReason,
}

impl Periods {
    fn rules(self) -> [Rule; 4] {
        [
            Rule {
                count: self.hourly,
                period: hour,
                reason: RetentionReason::Hourly,
            },
            Rule {
                count: self.daily,
                period: day,
                reason: RetentionReason::Daily,
            },
            Rule {
                count: self.weekly,
                period: week,
                reason: RetentionReason::Weekly,
            },
            Rule {
                count: self.monthly,
                period: month,
                reason: RetentionReason::Monthly,
            },
        ]
    }
}

/// The fulls of one period, as positions in a list of fulls. The last one is kept and supersedes the others.
pub(super) struct PeriodFulls {
    pub(super) first: usize,
    pub(super) last: usize,
}

/// Keeps the newest full of each period. `fulls` are in order of creation. Returns the periods in which a
/// full is kept.
pub(super) fn keep_newest_of_each_period(
    facts: &Facts,
    fulls: &[usize],
    periods: Periods,
    kept: &mut KeepReasons,
) -> Vec<PeriodFulls> {
    let created = |position: usize| facts.name(fulls[position]).created_at();
    let mut all = Vec::new();
    for Rule {
        count,
        period,
        reason,
    } in periods.rules()
    {
        let current = period(facts.now).number;
        let mut by_period: BTreeMap<i64, PeriodFulls> = BTreeMap::new();
        for last in 0..fulls.len() {
            let number = period(created(last)).number;
            if number <= current && current - number < i64::from(count) {
                let first = by_period.get(&number).map_or(last, |p| p.first);
                by_period.insert(number, PeriodFulls { first, last });
            }
        }
        for period_fulls in by_period.into_values() {
            let newest = period_fulls.last;
            kept.keep(fulls[newest], reason(period(created(newest)).begins));
            all.push(period_fulls);
        }
    }
    all
}

/// Returns the beginning of the oldest period that keeps a full; `now` if there is no period.
pub(super) fn oldest_period_start(periods: Periods, now: DateTime<Utc>) -> DateTime<Utc> {
    let rules = periods.rules();
    let starts = rules.iter().filter(|r| r.count > 0).map(|rule| {
        let period = rule.period;
        let oldest = period(now).number - i64::from(rule.count) + 1;
        let mut t = now;
        // Months differ in length, so this goes back one period at a time.
        while period(t).number > oldest && t.timestamp() > 0 {
            t = period(t).begins - TimeDelta::seconds(1);
        }
        period(t).begins
    });
    starts.min().unwrap_or(now)
}
