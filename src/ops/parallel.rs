//! Work on several threads with the result of one: items that are looked at, and two things side by side.

use crate::base::{lock, unpoisoned};
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

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
            let mut ended = lock(&ended);
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
    let ended = unpoisoned(ended.into_inner());
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
        let mut results = lock(&results);
        results.insert(nth, result);
        Ok(None::<()>)
    });
    let results = unpoisoned(results.into_inner());
    results.into_values().collect()
}

/// Does two things at once, such as to verify a file while the upload is completed and read back; one after the
/// other with one thread.
pub(super) fn side_by_side<A: Send, B>(
    threads: usize,
    a: impl FnOnce() -> Result<A> + Send,
    b: impl FnOnce() -> Result<B>,
) -> (Result<A>, Result<B>) {
    if threads <= 1 {
        return (a(), b());
    }
    let a = Mutex::new(Some(a));
    let a = || match lock(&a).take() {
        Some(a) => a(),
        None => Err(Error::internal("a thing was done twice")),
    };
    std::thread::scope(|s| match std::thread::Builder::new().spawn_scoped(s, a) {
        Ok(thread) => {
            let b = b();
            let panicked = |_| Err(Error::internal("a thread panicked"));
            (thread.join().unwrap_or_else(panicked), b)
        }
        // The system has no thread left.
        Err(_) => (a(), b()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
