//! Runs work on several threads. The results are the same for any number of threads.
//!
//! If the system has no threads left, fewer of them work.

use crate::base::{lock, unpoisoned};
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Calls `search` for the items from 0 to `items` and returns its first result, in the order of the items.
/// Items after that one may be skipped.
///
/// # Errors
/// An error of `search` counts as a result: if it is the first one, it is returned.
pub(crate) fn find_first<T: Send>(
    threads: usize,
    items: usize,
    search: impl Fn(usize) -> Result<Option<T>> + Sync,
) -> Result<Option<T>> {
    let next = AtomicUsize::new(0);
    // Threads take items in order and finish each one they take. So when an item has a result, all items before
    // it are searched as well.
    let end = AtomicUsize::new(items);
    let earliest: Mutex<Option<(usize, Result<Option<T>>)>> = Mutex::new(None);
    let work = || {
        loop {
            let nth = next.fetch_add(1, Ordering::Relaxed);
            if nth >= end.load(Ordering::Relaxed) {
                return;
            }
            let result = search(nth);
            if matches!(result, Ok(None)) {
                continue;
            }
            end.fetch_min(nth, Ordering::Relaxed);
            let mut earliest = lock(&earliest);
            if earliest.as_ref().is_none_or(|(first, _)| nth < *first) {
                *earliest = Some((nth, result));
            }
        }
    };
    std::thread::scope(|s| {
        for _ in 1..threads.min(items) {
            let _ = std::thread::Builder::new().spawn_scoped(s, work);
        }
        work();
    });
    let earliest = unpoisoned(earliest.into_inner());
    earliest.map_or(Ok(None), |(_, result)| result)
}

/// Calls `work` for each item, on several threads. Returns the results in the order of the items.
pub(crate) fn each<T: Sync, R: Send>(
    threads: usize,
    items: &[T],
    work: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let results = Mutex::new(BTreeMap::new());
    // `find_first` as a loop: no item has a result, so it visits all of them.
    let _ = find_first(threads, items.len(), |nth| {
        let result = work(&items[nth]);
        let mut results = lock(&results);
        results.insert(nth, result);
        Ok(None::<()>)
    });
    let results = unpoisoned(results.into_inner());
    results.into_values().collect()
}

/// Calls two functions at the same time, such as the verification of a file and the end of its upload. With
/// one thread they are called one after the other.
pub(crate) fn side_by_side<A: Send, B>(
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
        None => Err(Error::internal("a function was called twice")),
    };
    std::thread::scope(|s| match std::thread::Builder::new().spawn_scoped(s, a) {
        Ok(thread) => {
            let b = b();
            let panicked = |_| Err(Error::internal("a thread panicked"));
            (thread.join().unwrap_or_else(panicked), b)
        }
        Err(_) => (a(), b()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_result_does_not_depend_on_the_number_of_threads() {
        let mut rng = fastrand::Rng::with_seed(crate::seed());
        for _ in 0..crate::rounds(200, 5_000) {
            let items = rng.usize(0..40);
            let found: Vec<u8> = (0..items).map(|_| rng.u8(..20)).collect();
            let searched = AtomicUsize::new(0);
            let search = |nth: usize| {
                searched.fetch_add(1, Ordering::Relaxed);
                match found[nth] {
                    0 => Err(Error::corrupt(format!("{nth}"))),
                    1 => Ok(Some(nth)),
                    _ => Ok(None),
                }
            };
            let expected = found.iter().position(|&f| f < 2);
            let threads = rng.usize(1..6);
            let nth = match find_first(threads, items, search) {
                Ok(found) => found,
                Err(e) => Some(e.to_string().parse().unwrap()),
            };
            assert_eq!(nth, expected, "{found:?}");
            let most = expected.map_or(items, |nth| (nth + threads).min(items));
            assert!(threads > 1 || searched.into_inner() <= most);
        }
    }

    #[test]
    fn results_are_in_the_order_of_the_items() {
        let all: Vec<usize> = (0..100).collect();
        let doubled = each(8, &all, |i| i * 2);
        assert_eq!(doubled, (0..100).map(|i| i * 2).collect::<Vec<_>>());
        assert!(each(8, &Vec::<usize>::new(), |_| ()).is_empty());
    }
}
