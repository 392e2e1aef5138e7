//! Finds the last event at or before a time, and reads as few deltas as possible.
//!
//! A delta gets its name after its events were received, so the time in the name bounds theirs, and only the
//! deltas around the time are read. If names or events show that a clock ran backward, all deltas are read,
//! oldest first. Nothing is opened here: the caller reads.

use super::select::DeltaSlice;
use crate::backup::delta::Event;
use crate::error::{Error, Result};
use crate::mvcc::Revision;
use chrono::{DateTime, Utc};

/// The seconds by which times may go back without counting as a clock that ran backward: two snapshotters
/// have different clocks, and a clock may be corrected.
const CLOCK_TOLERANCE: i64 = 10;

/// Called for each event of a slice. It returns false to end the reading of the slice.
pub(crate) type EventVisitor<'a> = dyn FnMut(&Event<'_>) -> Result<bool> + 'a;

/// The end of the events up to a time.
#[derive(Debug)]
pub(crate) struct Moment {
    /// The revision of the last event at or before the time.
    pub(crate) found: Option<Revision>,
    /// The first revision whose events are all after the time.
    pub(crate) first_after: Option<Revision>,
    /// The latest time of the events that were read. It is the clock of the search: it never goes back.
    pub(crate) now: DateTime<Utc>,
    /// The error of a damaged slice after `found`, which may hide a later event at or before the time.
    damage: Option<Error>,
}

impl Moment {
    /// Finds the last event of `slices` at or before `time`. `read` reads the slice of an index, and calls
    /// the visitor for its events.
    ///
    /// # Errors
    /// Errors of `read`. Damage in a slice is ignored if an event at or before `time` follows in a later
    /// slice.
    pub(crate) fn find(
        slices: &[DeltaSlice],
        time: DateTime<Utc>,
        mut read: impl FnMut(usize, &mut EventVisitor<'_>) -> Result<()>,
    ) -> Result<Moment> {
        // The last slice that was saved before the time is read, too, since it may hold the event.
        let first = saved_before(slices, time).map_or(0, |n| n.saturating_sub(1));
        if first > 0
            && let Some(moment) = Moment::read(slices, first, time, true, &mut read)?
        {
            return moment.or_damage();
        }
        let moment = Moment::read(slices, 0, time, false, &mut read)?;
        moment
            .ok_or_else(|| {
                Error::internal("the search for a moment found none without checking clocks")
            })?
            .or_damage()
    }

    /// Reads slices from `first` on up to the first event after `time`. With `check_clocks` it returns `None`
    /// if a clock ran backward, or if a slice is damaged.
    fn read(
        slices: &[DeltaSlice],
        first: usize,
        time: DateTime<Utc>,
        check_clocks: bool,
        read: &mut impl FnMut(usize, &mut EventVisitor<'_>) -> Result<()>,
    ) -> Result<Option<Moment>> {
        let mut moment = Moment {
            found: None,
            first_after: None,
            now: DateTime::<Utc>::MIN_UTC,
            damage: None,
        };
        let mut clock_ran_backward = false;
        for (nth, slice) in slices.iter().enumerate().skip(first) {
            let result = read(nth, &mut |e| {
                if moment.found.is_some_and(|found| e.main < found) {
                    return Ok(true);
                }
                let received = e.instant()?;
                if check_clocks
                    && (is_later_than_name(received, slice) || runs_backward(moment.now, received))
                {
                    clock_ran_backward = true;
                    return Ok(false);
                }
                Ok(moment.add_event(e.main, received, time))
            });
            match result {
                Ok(()) => {}
                // The event may be in an earlier delta: streams of two snapshotters have different times.
                Err(e) if e.reason().is_bad_data() && check_clocks => return Ok(None),
                Err(e) if e.reason().is_bad_data() => moment.damage = Some(e),
                Err(e) => return Err(e),
            }
            if clock_ran_backward {
                return Ok(None);
            }
            if moment.first_after.is_some() {
                break;
            }
        }
        Ok(Some(moment))
    }

    /// Adds the next event. Returns false if it is after `time`.
    fn add_event(&mut self, main: Revision, received: DateTime<Utc>, time: DateTime<Utc>) -> bool {
        self.now = self.now.max(received);
        if self.now > time {
            // A transaction counts as a whole if its first event counts.
            let has_begun = self.found == Some(main);
            self.first_after = Some(if has_begun { main.next() } else { main });
            return false;
        }
        self.found = Some(main);
        self.damage = None;
        true
    }

    /// Fails if damage may hide a later event.
    fn or_damage(self) -> Result<Moment> {
        match self.damage {
            Some(e) => Err(e),
            None => Ok(self),
        }
    }
}

/// Returns the time of the latest event of `slices`; `None` if there is no event.
///
/// # Errors
/// Errors of `read`.
pub(crate) fn latest_event(
    slices: &[DeltaSlice],
    mut read: impl FnMut(usize, &mut EventVisitor<'_>) -> Result<()>,
) -> Result<Option<DateTime<Utc>>> {
    let mut names_bound_times = saved_before(slices, DateTime::<Utc>::MAX_UTC).is_some();
    let mut latest: Option<DateTime<Utc>> = None;
    for (nth, slice) in slices.iter().enumerate().rev() {
        if names_bound_times && latest.is_some_and(|latest| is_later_than_name(latest, slice)) {
            continue;
        }
        read(nth, &mut |e| {
            let received = e.instant()?;
            names_bound_times &= !is_later_than_name(received, slice);
            latest = latest.max(Some(received));
            Ok(true)
        })?;
    }
    Ok(latest)
}

/// Returns the number of slices at the beginning whose names show that all of their events are at or before
/// `time`; `None` if the names show that a clock ran backward.
fn saved_before(slices: &[DeltaSlice], time: DateTime<Utc>) -> Option<usize> {
    let mut newest = i64::MIN;
    let mut saved = None;
    for (i, slice) in slices.iter().enumerate() {
        let created = slice.snapshot.name.created;
        if created.saturating_add(CLOCK_TOLERANCE) < newest {
            return None;
        }
        newest = newest.max(created);
        if saved.is_none() && !is_later_than_name(time, slice) {
            saved = Some(i);
        }
    }
    Some(saved.unwrap_or(slices.len()))
}

/// Whether a time is later than any event of a slice can be, by its name. Names have whole seconds.
fn is_later_than_name(time: DateTime<Utc>, slice: &DeltaSlice) -> bool {
    let created = slice.snapshot.name.created;
    time.timestamp() > created.saturating_add(CLOCK_TOLERANCE)
}

/// Whether an event is earlier than those before it by more than the tolerance.
fn runs_backward(now: DateTime<Utc>, received: DateTime<Utc>) -> bool {
    received.timestamp().saturating_add(CLOCK_TOLERANCE) < now.timestamp()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup::Snapshot;
    use crate::mvcc::Change;
    use chrono::TimeDelta;
    use fastrand::Rng;

    const T0: i64 = 1_795_224_681;

    /// A delta in memory.
    struct Delta {
        slice: DeltaSlice,
        /// The revision and the time of each event, in milliseconds after `T0`.
        events: Vec<(i64, i64)>,
        /// The number of events before the damage.
        damaged: Option<usize>,
    }

    fn at(millis: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(T0, 0).unwrap() + TimeDelta::milliseconds(millis)
    }

    /// A delta whose events are a second apart from `millis` on, named `named` milliseconds after `T0`.
    fn delta(start: i64, until: i64, millis: i64, named: i64) -> Delta {
        let created = at(named).timestamp();
        let path = format!("v2/Incr-{start:08}-{until:08}-{created}");
        Delta {
            slice: DeltaSlice {
                snapshot: Snapshot {
                    name: path[3..].parse().unwrap(),
                    path,
                    bytes: 1,
                    excluded: false,
                    untrusted: false,
                    begins_timeline: false,
                    pinned: false,
                },
                after: Revision::NONE,
                until: Revision(until),
            },
            events: (start..=until)
                .zip(0..)
                .map(|(r, n)| (r, millis + n * 1000))
                .collect(),
            damaged: None,
        }
    }

    fn slices(deltas: &[Delta]) -> Vec<DeltaSlice> {
        deltas.iter().map(|d| d.slice.clone()).collect()
    }

    /// Visits the events of a delta, and counts the deltas in `reads`.
    fn read(
        deltas: &[Delta],
        reads: &mut usize,
        nth: usize,
        visit: &mut EventVisitor<'_>,
    ) -> Result<()> {
        *reads += 1;
        let delta = &deltas[nth];
        for (n, &(revision, millis)) in delta.events.iter().enumerate() {
            if delta.damaged == Some(n) {
                return Err(Error::corrupt("damaged"));
            }
            let event = Event {
                main: Revision(revision),
                sub: 0,
                change: Change::Delete { key: b"k" },
                time: &at(millis).to_rfc3339(),
            };
            if revision <= delta.slice.until.0 && !visit(&event)? {
                return Ok(());
            }
        }
        match delta.damaged {
            Some(_) => Err(Error::corrupt("damaged")),
            None => Ok(()),
        }
    }

    /// The last revision up to a time and the first one after it; `None` if damage hides them.
    type MomentFound = Option<(Option<Revision>, Option<Revision>)>;

    /// Returns the number of slices that were read, and the result.
    fn find(deltas: &[Delta], time: DateTime<Utc>) -> (usize, MomentFound) {
        let mut reads = 0;
        let moment = Moment::find(&slices(deltas), time, |nth, visit| {
            read(deltas, &mut reads, nth, visit)
        });
        let found = moment.ok().map(|m| (m.found, m.first_after));
        (reads, found)
    }

    /// Finds the moment by a scan of all events, oldest first.
    fn find_by_scan(deltas: &[Delta], time: DateTime<Utc>) -> MomentFound {
        let (mut now, mut found, mut lost) = (DateTime::<Utc>::MIN_UTC, None, false);
        for d in deltas {
            for (n, &(revision, millis)) in d.events.iter().enumerate() {
                if d.damaged == Some(n) {
                    break;
                }
                let revision = Revision(revision);
                if revision > d.slice.until || found.is_some_and(|found| revision < found) {
                    continue;
                }
                now = now.max(at(millis));
                if now > time {
                    let begun = found == Some(revision);
                    let after = if begun { revision.next() } else { revision };
                    return (!lost).then_some((found, Some(after)));
                }
                (found, lost) = (Some(revision), false);
            }
            lost |= d.damaged.is_some();
        }
        (!lost).then_some((found, None))
    }

    fn latest_of(deltas: &[Delta]) -> (usize, Option<DateTime<Utc>>) {
        let mut reads = 0;
        let latest = latest_event(&slices(deltas), |nth, visit| {
            read(deltas, &mut reads, nth, visit)
        });
        (reads, latest.unwrap())
    }

    /// A random chain of deltas with gaps, overlaps and forks, whose clock is sometimes set back.
    fn random_chain(rng: &mut Rng) -> Vec<Delta> {
        let (mut millis, mut reached) = (0, rng.i64(0..100));
        let mut deltas = Vec::new();
        for _ in 0..rng.usize(1..30) {
            let start = match rng.u8(..10) {
                0 => reached + rng.i64(2..20),
                1 => (reached - rng.i64(0..5)).max(1),
                _ => reached + 1,
            };
            let until = reached.max(start) + rng.i64(1..10);
            millis += rng.i64(0..120_000);
            if rng.u8(..40) == 0 {
                millis -= 600_000;
            }
            let ended = millis + (until - start) * 1000;
            // The name is of a later time, or rarely of a clock that was set back.
            let named = match rng.u8(..60) {
                0 => ended - rng.i64(0..300_000),
                _ => ended + rng.i64(0..20_000),
            };
            let mut d = delta(start, until, millis, named);
            if rng.u8(..8) == 0 {
                // The delta belongs to this timeline only up to a fork.
                let fork = rng.i64(reached.max(start)..=until);
                d.slice.until = Revision(fork.max(reached + 1));
            }
            if rng.u8(..15) == 0 {
                d.damaged = Some(rng.usize(..=d.events.len()));
            }
            reached = d.slice.until.0;
            millis = ended + rng.i64(0..3_000);
            deltas.push(d);
        }
        deltas
    }

    #[test]
    fn the_result_is_that_of_a_scan_of_all_events() {
        let mut rng = Rng::with_seed(crate::seed());
        let mut compared = 0;
        for _ in 0..crate::rounds(2_000, 100_000) {
            let mut deltas = random_chain(&mut rng);
            let name_bounds_times = |d: &Delta| {
                let is_bounded =
                    |&(_, millis): &(i64, i64)| !is_later_than_name(at(millis), &d.slice);
                d.events.iter().all(is_bounded)
            };
            let names_grow = saved_before(&slices(&deltas), at(0)).is_some();
            // If names grow but do not bound the times, only reading the deltas shows it. Such chains are
            // skipped.
            if names_grow && !deltas.iter().all(name_bounds_times) {
                continue;
            }
            let events: Vec<i64> = deltas.iter().flat_map(|d| &d.events).map(|e| e.1).collect();
            let around = rng.choice(events.iter().copied()).unwrap();
            let time = at(around + rng.i64(-2_000..=2_000));
            let expected = find_by_scan(&deltas, time);
            let names = || {
                let name = |d: &Delta| (d.slice.snapshot.path.clone(), d.slice.until, d.damaged);
                deltas.iter().map(name).collect::<Vec<_>>()
            };
            assert_eq!(find(&deltas, time).1, expected, "{time} {:?}", names());
            deltas.iter_mut().for_each(|d| d.damaged = None);
            let taken = |d: &Delta| {
                let until = d.slice.until.0;
                let taken = d.events.iter().filter(|e| e.0 <= until);
                taken.map(|e| e.1).max()
            };
            let newest = deltas.iter().filter_map(taken).max().map(at);
            assert_eq!(latest_of(&deltas).1, newest);
            compared += usize::from(names_grow);
        }
        assert!(compared > 100, "{compared}");
    }

    /// A thousand deltas, one each minute.
    fn long_chain() -> Vec<Delta> {
        (0..1000)
            .map(|n| delta(n * 10 + 1, n * 10 + 10, n * 60_000, n * 60_000 + 30_000))
            .collect()
    }

    #[test]
    fn few_deltas_are_read_and_damage_far_from_the_moment_is_ignored() {
        let mut deltas = long_chain();
        for (n, d) in deltas.iter_mut().enumerate() {
            d.damaged = (!(498..=501).contains(&n)).then_some(0);
        }
        let (reads, found) = find(&deltas, at(500 * 60_000 + 5_500));
        assert_eq!(found, Some((Some(Revision(5006)), Some(Revision(5007)))));
        assert!(reads <= 3, "{reads}");
        // For a time after the end, the newest delta is enough.
        let mut deltas = long_chain();
        let (reads, found) = find(&deltas, at(5000 * 60_000));
        assert_eq!((reads, found), (1, Some((Some(Revision(10_000)), None))));
        assert_eq!(latest_of(&deltas), (1, Some(at(999 * 60_000 + 9_000))));
        // A time before the first event.
        let (reads, found) = find(&deltas, at(-1));
        assert_eq!((reads, found), (1, Some((None, Some(Revision(1))))));
        // Damage in the delta before the moment hides the last event, so all deltas are read.
        deltas[499].damaged = Some(3);
        let (reads, found) = find(&deltas, at(499 * 60_000 + 50_000));
        assert!(found.is_none() && reads > 500, "{found:?} {reads}");
    }

    #[test]
    fn a_clock_that_ran_backward_makes_all_deltas_count() {
        let time = at(500 * 60_000);
        let with = |change: fn(&mut Vec<Delta>)| {
            let mut deltas = long_chain();
            change(&mut deltas);
            let (reads, found) = find(&deltas, time);
            assert_eq!(found, find_by_scan(&deltas, time));
            (reads, found.and_then(|f| f.0))
        };
        let ahead = |deltas: &mut Vec<Delta>| deltas[100].events[4].1 += 600 * 60_000;
        // An early event with a later time counts if a clock ran backward. A name shows that it did …
        let (reads, found) = with(|deltas| {
            deltas[100] = delta(1001, 1010, 700 * 60_000, 701 * 60_000);
        });
        assert_eq!((reads, found), (101, Some(Revision(1000))));
        // … or an event that is later than the name of its delta …
        let by_late_event = |deltas: &mut Vec<Delta>| {
            deltas[100].events[4].1 += 600 * 60_000;
            deltas[499].events[9].1 += 55_000;
        };
        assert_eq!(with(by_late_event).1, Some(Revision(1004)));
        // … or an event that is earlier than the one before it.
        let by_early_event = |deltas: &mut Vec<Delta>| {
            deltas[100].events[4].1 += 600 * 60_000;
            deltas[499].events[9].1 -= 60_000;
        };
        assert_eq!(with(by_early_event).1, Some(Revision(1004)));
        // Otherwise the early event is not read.
        let mut deltas = long_chain();
        ahead(&mut deltas);
        assert_eq!(find(&deltas, time).1.unwrap().0, Some(Revision(5001)));
    }
}
