//! Looks at many items, several at once, with the result of one thread that looks at them in order.

use crate::error::Result;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// What `look` finds in the first of `items` in which it finds something, or its failure if that comes first.
/// Items after that one may not be looked at.
///
/// # Errors
/// What `look` returns.
pub(super) fn first<T: Send>(
    threads: usize,
    items: usize,
    look: impl Fn(usize) -> Result<Option<T>> + Sync,
) -> Result<Option<T>> {
    let next = AtomicUsize::new(0);
    // All items before one that was taken were taken, too, and are looked at to the end.
    let end = AtomicUsize::new(items);
    let ended: Mutex<Option<(usize, Result<Option<T>>)>> = Mutex::new(None);
    let work = || {
        loop {
            let nth = next.fetch_add(1, Ordering::Relaxed);
            if nth >= end.load(Ordering::Relaxed) {
                return;
            }
            let result = look(nth);
            if matches!(result, Ok(None)) {
                continue;
            }
            end.fetch_min(nth, Ordering::Relaxed);
            let mut ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
            if ended.as_ref().is_none_or(|(first, _)| nth < *first) {
                *ended = Some((nth, result));
            }
        }
    };
    std::thread::scope(|s| {
        for _ in 1..threads.min(items) {
            // If the system has no thread left, fewer look.
            let _ = std::thread::Builder::new().spawn_scoped(s, work);
        }
        work();
    });
    let ended = ended.into_inner().unwrap_or_else(PoisonError::into_inner);
    ended.map_or(Ok(None), |(_, result)| result)
}

/// Does something with each item, several at once; the results in order.
pub(super) fn each<T: Sync, R: Send>(
    threads: usize,
    items: &[T],
    work: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let results = Mutex::new(BTreeMap::new());
    // It finds nothing, so it looks at all.
    let _ = first(threads, items.len(), |nth| {
        let result = work(&items[nth]);
        let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
        results.insert(nth, result);
        Ok(None::<()>)
    });
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn the_first_item_tells_whatever_the_number_of_threads() {
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        for _ in 0..crate::rounds(200, 5_000) {
            let items = rng.usize(0..40);
            let found: Vec<u8> = (0..items).map(|_| rng.u8(..20)).collect();
            let looked_at = AtomicUsize::new(0);
            let look = |nth: usize| {
                looked_at.fetch_add(1, Ordering::Relaxed);
                match found[nth] {
                    0 => Err(Error::corrupt(format!("{nth}"))),
                    1 => Ok(Some(nth)),
                    _ => Ok(None),
                }
            };
            let expected = found.iter().position(|&f| f < 2);
            let threads = rng.usize(1..6);
            let nth = match first(threads, items, look) {
                Ok(found) => found,
                Err(e) => Some(e.to_string().parse().unwrap()),
            };
            assert_eq!(nth, expected, "{found:?}");
            let most = expected.map_or(items, |nth| (nth + threads).min(items));
            assert!(threads > 1 || looked_at.into_inner() <= most);
        }
    }

    #[test]
    fn many_are_done_in_their_order() {
        let all: Vec<usize> = (0..100).collect();
        let doubled = each(8, &all, |i| i * 2);
        assert_eq!(doubled, (0..100).map(|i| i * 2).collect::<Vec<_>>());
        assert!(each(8, &Vec::<usize>::new(), |_| ()).is_empty());
    }
}
