//! What a follower knows of the changes that are not saved, also while it has no session: without the lock, or while
//! the store refuses it.
//!
//! Does no I/O.

use chrono::{DateTime, Utc};

/// The changes that are not saved.
pub(super) struct Unsaved {
    /// The last saved revision; `None` if the store was never read.
    pub(super) last_saved: Option<i64>,
    /// When all changes were last known to be saved; at first, when the follower began.
    all_saved_at: DateTime<Utc>,
    /// The time of the oldest change that is not known to be saved, at `last_saved`.
    since: Option<DateTime<Utc>>,
}

impl Unsaved {
    pub(super) fn new(now: DateTime<Utc>) -> Self {
        Unsaved {
            last_saved: None,
            all_saved_at: now,
            since: None,
        }
    }

    /// Records the newest revision of etcd (`None`: it does not answer), the last saved one, and when the oldest change
    /// arrived that waits here, if one does.
    ///
    /// Returns the number of revisions that are not saved, if it is known, and the time of the oldest of them.
    pub(super) fn observe(
        &mut self,
        current: Option<i64>,
        last_saved: Option<i64>,
        oldest_here: Option<DateTime<Utc>>,
        now: DateTime<Utc>,
    ) -> (Option<u64>, Option<DateTime<Utc>>) {
        if self.last_saved != last_saved {
            (self.last_saved, self.since) = (last_saved, None);
        }
        let behind = |(current, last): (i64, i64)| u64::try_from(current - last).unwrap_or(0);
        let revisions = current.zip(last_saved).map(behind);
        if revisions == Some(0) && oldest_here.is_none() {
            (self.all_saved_at, self.since) = (now, None);
        } else {
            let since = oldest_here.unwrap_or(self.all_saved_at);
            // A change that was read again from etcd is as old as before.
            self.since = Some(self.since.map_or(since, |before| before.min(since)));
        }
        (revisions, self.since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(1_800_000_000 + seconds, 0).unwrap()
    }

    #[test]
    fn what_is_not_known_to_be_saved_has_an_age() {
        let mut unsaved = Unsaved::new(at(0));
        // The store refuses the follower from the beginning.
        let seen = unsaved.observe(Some(9), None, None, at(10));
        assert_eq!(seen, (None, Some(at(0))));
        assert_eq!(
            unsaved.observe(Some(9), Some(9), None, at(20)),
            (Some(0), None)
        );
        // A change arrives, and waits longer than its session.
        let arrived = Some(at(25));
        let seen = unsaved.observe(Some(10), Some(9), arrived, at(26));
        assert_eq!(seen, (Some(1), arrived));
        let seen = unsaved.observe(Some(12), Some(9), None, at(40));
        assert_eq!(seen, (Some(3), Some(at(20))));
        let seen = unsaved.observe(Some(12), Some(9), Some(at(50)), at(51));
        assert_eq!(seen, (Some(3), Some(at(20))));
        // Another snapshotter saves some of the changes.
        let seen = unsaved.observe(Some(12), Some(11), Some(at(50)), at(52));
        assert_eq!(seen, (Some(1), Some(at(50))));
        assert_eq!(
            unsaved.observe(Some(12), Some(12), None, at(60)),
            (Some(0), None)
        );
        // etcd does not answer.
        let seen = unsaved.observe(None, Some(12), None, at(70));
        assert_eq!(seen, (None, Some(at(60))));
        assert_eq!(
            unsaved.observe(Some(12), Some(12), None, at(80)),
            (Some(0), None)
        );
    }
}
