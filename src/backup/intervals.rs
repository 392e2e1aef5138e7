//! Intervals of revisions, and a search for those that hold a revision.
//!
//! The first revisions are fixed; the last ones can be set, changed and removed. An operation takes logarithmic time in
//! the number of intervals, and a search also linear time in the number of results.

use crate::mvcc::Revision;
use std::rc::Rc;

/// The last revision of an absent interval.
const ABSENT: Revision = Revision(i64::MIN);

/// Intervals, numbered from 0. A clone shares the first revisions.
#[derive(Debug, Clone)]
pub struct Intervals {
    /// First revisions in ascending order, with the intervals' numbers.
    starts: Rc<[(Revision, usize)]>,
    /// The position of each interval in `starts`.
    positions: Rc<[usize]>,
    /// A binary tree. Node `n` has the children `2n` and `2n + 1`, and holds the higher last revision of the
    /// two. The leaves are the second half, in the order of `starts`.
    lasts: Vec<Revision>,
}

impl Intervals {
    /// Creates intervals with these first revisions. All of them are absent until [`set`](Self::set) is
    /// called.
    pub fn new(starts: impl IntoIterator<Item = Revision>) -> Self {
        let mut starts: Vec<(Revision, usize)> = starts.into_iter().zip(0..).collect();
        starts.sort_unstable();
        let mut positions = vec![0; starts.len()];
        for (position, &(_, i)) in starts.iter().enumerate() {
            positions[i] = position;
        }
        Intervals {
            lasts: vec![ABSENT; 2 * starts.len().next_power_of_two()],
            starts: starts.into(),
            positions: positions.into(),
        }
    }

    /// Sets the last revision of interval `i`, which makes it present.
    pub fn set(&mut self, i: usize, last: Revision) {
        let mut node = self.lasts.len() / 2 + self.positions[i];
        self.lasts[node] = last;
        while node > 1 {
            node /= 2;
            self.lasts[node] = self.lasts[2 * node].max(self.lasts[2 * node + 1]);
        }
    }

    /// Makes an interval absent.
    pub fn remove(&mut self, i: usize) {
        self.set(i, ABSENT);
    }

    /// Returns the intervals that hold `revision`. The first one is that which begins last.
    pub fn holding(&self, revision: Revision) -> impl Iterator<Item = usize> + '_ {
        self.meeting(revision, revision)
    }

    /// Returns the intervals that hold a revision from `from` to `to`. The first one is that which begins last.
    pub fn meeting(&self, from: Revision, to: Revision) -> impl Iterator<Item = usize> + '_ {
        let leaves = self.lasts.len() / 2;
        let begun = self.starts.partition_point(|s| s.0 <= to);
        // The nodes to visit, each with its first leaf and the number of its leaves.
        let mut open = vec![(1, 0, leaves)];
        std::iter::from_fn(move || {
            while let Some((node, first, count)) = open.pop() {
                if first >= begun || self.lasts[node] < from {
                    continue;
                }
                if count == 1 {
                    return Some(self.starts[first].1);
                }
                let half = count / 2;
                open.push((2 * node, first, half));
                open.push((2 * node + 1, first + half, half));
            }
            None
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_finds_what_a_scan_of_all_intervals_finds() {
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        for _ in 0..crate::rounds(300, 3000) {
            let count = rng.usize(..20);
            let starts: Vec<i64> = (0..count).map(|_| rng.i64(-1..30)).collect();
            let mut lasts: Vec<Option<i64>> = vec![None; count];
            let mut intervals = Intervals::new(starts.iter().map(|&s| Revision(s)));
            for _ in 0..30 {
                if count > 0 {
                    let (i, last) = (rng.usize(..count), rng.i64(-1..35));
                    lasts[i] = (rng.u8(..8) > 0).then_some(last);
                    match lasts[i] {
                        Some(last) => intervals.set(i, Revision(last)),
                        None => intervals.remove(i),
                    }
                }
                let from = rng.i64(-1..36);
                let to = from + rng.i64(..4);
                let found: Vec<usize> = intervals.meeting(Revision(from), Revision(to)).collect();
                let meets = |i: &usize| starts[*i] <= to && lasts[*i].is_some_and(|l| from <= l);
                let mut expected: Vec<usize> = (0..count).filter(meets).collect();
                expected.sort_by_key(|&i| std::cmp::Reverse((starts[i], i)));
                assert_eq!(found, expected, "{from} to {to} in {starts:?} to {lasts:?}");
            }
        }
    }
}
