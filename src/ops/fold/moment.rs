//! The last event that is not after a time, found by names first.
//!
//! A delta is named after its events were seen, so its name bounds their times, and only the deltas around
//! the time are read. If names or events show that a clock ran backward, all deltas are read, oldest first.
//! It decides; the caller reads.

use super::select::Step;
use crate::backup::delta::Event;
use crate::error::{Error, Result};
use crate::mvcc::Revision;
use chrono::{DateTime, Utc};

/// Seconds by which clocks may differ without running backward: those of two snapshotters, or one that was
/// corrected.
const CLOCKS_AGREE: i64 = 10;

/// What an event of a step is handed to. False ends the reading of the step.
pub(super) type Each<'a> = dyn FnMut(&Event<'_>) -> Result<bool> + 'a;

/// Where the events up to a time end.
#[derive(Debug)]
pub(super) struct Moment {
    /// The revision of the last event that is not after the time.
    pub(super) found: Option<Revision>,
    /// The first revision that is after the time as a whole.
    pub(super) first_after: Option<Revision>,
    /// The latest time of the events that were read.
    pub(super) now: DateTime<Utc>,
    /// Damage behind `found`: it may hide a later event that is not after the time.
    lost: Option<Error>,
}

impl Moment {
    /// Looks for the last event of `steps` that is not after `time`. `read` hands over the events of a step,
    /// which is named by its index.
    ///
    /// # Errors
    /// What `read` returns, but for damage in steps that an event not after `time` follows.
    pub(super) fn look_for(
        steps: &[Step],
        time: DateTime<Utc>,
        mut read: impl FnMut(usize, &mut Each<'_>) -> Result<()>,
    ) -> Result<Moment> {
        // The last step before the time is read, too: it tells the last event, or that it is damaged.
        let first = saved_before(steps, time).map_or(0, |n| n.saturating_sub(1));
        if first > 0
            && let Some(moment) = Moment::read(steps, first, time, true, &mut read)?
        {
            return moment.known();
        }
        let moment = Moment::read(steps, 0, time, false, &mut read)?;
        moment
            .ok_or_else(|| Error::internal("a clock stopped the search for a moment"))?
            .known()
    }

    /// Reads steps from `first` on up to the first event after `time`. `None` if `clocks_agree` is to hold, and
    /// does not.
    fn read(
        steps: &[Step],
        first: usize,
        time: DateTime<Utc>,
        clocks_agree: bool,
        read: &mut impl FnMut(usize, &mut Each<'_>) -> Result<()>,
    ) -> Result<Option<Moment>> {
        let mut moment = Moment {
            found: None,
            first_after: None,
            now: DateTime::<Utc>::MIN_UTC,
            lost: None,
        };
        let mut contradicted = false;
        for (nth, step) in steps.iter().enumerate().skip(first) {
            let ended = read(nth, &mut |e| {
                if moment.found.is_some_and(|found| e.main < found) {
                    return Ok(true);
                }
                let seen = e.instant()?;
                if clocks_agree && (is_later(seen, step) || runs_backward(moment.now, seen)) {
                    contradicted = true;
                    return Ok(false);
                }
                Ok(moment.take(e.main, seen, time))
            });
            match ended {
                Ok(()) => {}
                // What it hid may be in deltas before it: who wrote side by side has other times.
                Err(e) if e.reason().is_bad_data() && clocks_agree => return Ok(None),
                Err(e) if e.reason().is_bad_data() => moment.lost = Some(e),
                Err(e) => return Err(e),
            }
            if contradicted {
                return Ok(None);
            }
            if moment.first_after.is_some() {
                break;
            }
        }
        Ok(Some(moment))
    }

    /// Takes the next event. False if it is after `time`.
    fn take(&mut self, main: Revision, seen: DateTime<Utc>, time: DateTime<Utc>) -> bool {
        self.now = self.now.max(seen);
        if self.now > time {
            // A transaction counts whole, from its first event on.
            let begun = self.found == Some(main);
            self.first_after = Some(if begun { main.next() } else { main });
            return false;
        }
        self.found = Some(main);
        self.lost = None;
        true
    }

    fn known(self) -> Result<Moment> {
        match self.lost {
            Some(e) => Err(e),
            None => Ok(self),
        }
    }
}

/// The time of the latest event of `steps`, if there is an event.
///
/// # Errors
/// What `read` returns.
pub(super) fn latest(
    steps: &[Step],
    mut read: impl FnMut(usize, &mut Each<'_>) -> Result<()>,
) -> Result<Option<DateTime<Utc>>> {
    let mut names_agree = saved_before(steps, DateTime::<Utc>::MAX_UTC).is_some();
    let mut latest: Option<DateTime<Utc>> = None;
    for (nth, step) in steps.iter().enumerate().rev() {
        if names_agree && latest.is_some_and(|latest| is_later(latest, step)) {
            continue;
        }
        read(nth, &mut |e| {
            let seen = e.instant()?;
            names_agree &= !is_later(seen, step);
            latest = latest.max(Some(seen));
            Ok(true)
        })?;
    }
    Ok(latest)
}

/// The number of steps in front whose names say that no event of theirs is after `time`. `None` if the names
/// show that a clock ran backward.
fn saved_before(steps: &[Step], time: DateTime<Utc>) -> Option<usize> {
    let mut newest = i64::MIN;
    let mut saved = None;
    for (i, step) in steps.iter().enumerate() {
        let created = step.snapshot.name.created;
        if created.saturating_add(CLOCKS_AGREE) < newest {
            return None;
        }
        newest = newest.max(created);
        if saved.is_none() && !is_later(time, step) {
            saved = Some(i);
        }
    }
    Some(saved.unwrap_or(steps.len()))
}

/// Whether a time is later than any event of a step can be, by its name. Names hold whole seconds.
fn is_later(time: DateTime<Utc>, step: &Step) -> bool {
    let created = step.snapshot.name.created;
    time.timestamp() > created.saturating_add(CLOCKS_AGREE)
}

fn runs_backward(now: DateTime<Utc>, seen: DateTime<Utc>) -> bool {
    seen.timestamp().saturating_add(CLOCKS_AGREE) < now.timestamp()
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
        step: Step,
        /// (revision, milliseconds from `T0` on).
        events: Vec<(i64, i64)>,
        /// How many events stand before the damage.
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
            step: Step {
                snapshot: Snapshot {
                    name: path[3..].parse().unwrap(),
                    path,
                    bytes: 1,
                    excluded: false,
                    untrusted: false,
                    begins_timeline: false,
                    pinned: false,
                    removal_noted: false,
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

    fn steps(deltas: &[Delta]) -> Vec<Step> {
        deltas.iter().map(|d| d.step.clone()).collect()
    }

    /// Hands over the events of a delta, and counts the deltas in `reads`.
    fn read(deltas: &[Delta], reads: &mut usize, nth: usize, each: &mut Each<'_>) -> Result<()> {
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
            if revision <= delta.step.until.0 && !each(&event)? {
                return Ok(());
            }
        }
        match delta.damaged {
            Some(_) => Err(Error::corrupt("damaged")),
            None => Ok(()),
        }
    }

    /// The number of steps that were read, and what was found; `None` if damage hides it.
    type Found = Option<(Option<Revision>, Option<Revision>)>;

    fn look_for(deltas: &[Delta], time: DateTime<Utc>) -> (usize, Found) {
        let mut reads = 0;
        let moment = Moment::look_for(&steps(deltas), time, |nth, each| {
            read(deltas, &mut reads, nth, each)
        });
        let found = moment.ok().map(|m| (m.found, m.first_after));
        (reads, found)
    }

    /// All events from the oldest on, on the clock of the running maximum.
    fn by_all_events(deltas: &[Delta], time: DateTime<Utc>) -> Found {
        let (mut now, mut found, mut lost) = (DateTime::<Utc>::MIN_UTC, None, false);
        for d in deltas {
            for (n, &(revision, millis)) in d.events.iter().enumerate() {
                if d.damaged == Some(n) {
                    break;
                }
                let revision = Revision(revision);
                if revision > d.step.until || found.is_some_and(|found| revision < found) {
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
        let latest = latest(&steps(deltas), |nth, each| {
            read(deltas, &mut reads, nth, each)
        });
        (reads, latest.unwrap())
    }

    /// A chain of deltas with gaps, overlaps and forks, whose clock now and then is set back.
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
            // A name is late, or of a clock that was set back since.
            let named = match rng.u8(..60) {
                0 => ended - rng.i64(0..300_000),
                _ => ended + rng.i64(0..20_000),
            };
            let mut d = delta(start, until, millis, named);
            if rng.u8(..8) == 0 {
                // It belongs to this timeline only up to a fork.
                let fork = rng.i64(reached.max(start)..=until);
                d.step.until = Revision(fork.max(reached + 1));
            }
            if rng.u8(..15) == 0 {
                d.damaged = Some(rng.usize(..=d.events.len()));
            }
            reached = d.step.until.0;
            millis = ended + rng.i64(0..3_000);
            deltas.push(d);
        }
        deltas
    }

    #[test]
    fn names_lead_to_what_all_events_tell() {
        let mut rng = Rng::with_seed(crate::seed());
        let mut compared = 0;
        for _ in 0..crate::rounds(2_000, 100_000) {
            let mut deltas = random_chain(&mut rng);
            let is_named_well = |d: &Delta| {
                let seen = |&(_, millis): &(i64, i64)| !is_later(at(millis), &d.step);
                d.events.iter().all(seen)
            };
            let names_grow = saved_before(&steps(&deltas), at(0)).is_some();
            // Names that grow and do not bound the times are only seen through if they are read.
            if names_grow && !deltas.iter().all(is_named_well) {
                continue;
            }
            let events: Vec<i64> = deltas.iter().flat_map(|d| &d.events).map(|e| e.1).collect();
            let around = rng.choice(events.iter().copied()).unwrap();
            let time = at(around + rng.i64(-2_000..=2_000));
            let expected = by_all_events(&deltas, time);
            let names = || {
                let name = |d: &Delta| (d.step.snapshot.path.clone(), d.step.until, d.damaged);
                deltas.iter().map(name).collect::<Vec<_>>()
            };
            assert_eq!(look_for(&deltas, time).1, expected, "{time} {:?}", names());
            deltas.iter_mut().for_each(|d| d.damaged = None);
            let taken = |d: &Delta| {
                let until = d.step.until.0;
                let taken = d.events.iter().filter(|e| e.0 <= until);
                taken.map(|e| e.1).max()
            };
            let newest = deltas.iter().filter_map(taken).max().map(at);
            assert_eq!(latest_of(&deltas).1, newest);
            compared += usize::from(names_grow);
        }
        assert!(compared > 100, "{compared}");
    }

    /// A thousand deltas, one in a minute.
    fn long_chain() -> Vec<Delta> {
        (0..1000)
            .map(|n| delta(n * 10 + 1, n * 10 + 10, n * 60_000, n * 60_000 + 30_000))
            .collect()
    }

    #[test]
    fn few_deltas_are_read_and_damage_far_from_the_moment_does_not_matter() {
        let mut deltas = long_chain();
        for (n, d) in deltas.iter_mut().enumerate() {
            d.damaged = (!(498..=501).contains(&n)).then_some(0);
        }
        let (reads, found) = look_for(&deltas, at(500 * 60_000 + 5_500));
        assert_eq!(found, Some((Some(Revision(5006)), Some(Revision(5007)))));
        assert!(reads <= 3, "{reads}");
        // At the end, the newest delta tells.
        let mut deltas = long_chain();
        let (reads, found) = look_for(&deltas, at(5000 * 60_000));
        assert_eq!((reads, found), (1, Some((Some(Revision(10_000)), None))));
        assert_eq!(latest_of(&deltas), (1, Some(at(999 * 60_000 + 9_000))));
        // Before the first event.
        let (reads, found) = look_for(&deltas, at(-1));
        assert_eq!((reads, found), (1, Some((None, Some(Revision(1))))));
        // Damage in the delta before the moment hides the last event; all are read to make sure.
        deltas[499].damaged = Some(3);
        let (reads, found) = look_for(&deltas, at(499 * 60_000 + 50_000));
        assert!(found.is_none() && reads > 500, "{found:?} {reads}");
    }

    #[test]
    fn a_clock_that_is_seen_to_run_backward_makes_all_deltas_count() {
        let time = at(500 * 60_000);
        let with = |change: fn(&mut Vec<Delta>)| {
            let mut deltas = long_chain();
            change(&mut deltas);
            let (reads, found) = look_for(&deltas, time);
            assert_eq!(found, by_all_events(&deltas, time));
            (reads, found.and_then(|f| f.0))
        };
        let ahead = |deltas: &mut Vec<Delta>| deltas[100].events[4].1 += 600 * 60_000;
        // An early event of a later time counts if a clock is seen to have run backward: by a name …
        let (reads, found) = with(|deltas| {
            deltas[100] = delta(1001, 1010, 700 * 60_000, 701 * 60_000);
        });
        assert_eq!((reads, found), (101, Some(Revision(1000))));
        // … by an event that is later than its delta's name …
        let by_late_event = |deltas: &mut Vec<Delta>| {
            deltas[100].events[4].1 += 600 * 60_000;
            deltas[499].events[9].1 += 55_000;
        };
        assert_eq!(with(by_late_event).1, Some(Revision(1004)));
        // … or by an event that is earlier than the one before it.
        let by_early_event = |deltas: &mut Vec<Delta>| {
            deltas[100].events[4].1 += 600 * 60_000;
            deltas[499].events[9].1 -= 60_000;
        };
        assert_eq!(with(by_early_event).1, Some(Revision(1004)));
        // Otherwise nobody looks there.
        let mut deltas = long_chain();
        ahead(&mut deltas);
        assert_eq!(look_for(&deltas, time).1.unwrap().0, Some(Revision(5001)));
    }
}
