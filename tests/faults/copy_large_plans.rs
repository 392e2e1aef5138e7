//! Copies of large plans: names are given concurrently, and a failure or a kill leaves only a small gap.

use super::copy_faults::{Sides, WIDE, options, wide, wide_delta};
use crate::support::conformance::runtime;
use crate::support::faults::{Call, Fault, at};
use crate::support::made_backups::Objects;
use crate::support::orphan_deltas::without_full;
use crate::support::place::Place;
use deltafold::Reason;
use deltafold::ops::copy::plan::Encryption;
use deltafold::ops::copy::{CopiedBackup, Options};
use deltafold::ops::report::Report;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// Returns how many deltas of [`wide`] are missing before the last one that is there, and how many are there.
pub fn gap(paths: &[String]) -> (usize, usize) {
    let there: Vec<usize> = (0..WIDE)
        .filter(|&n| paths.contains(&wide_delta(n)))
        .collect();
    let before = there.last().map_or(0, |last| last + 1);
    (before - there.len(), there.len())
}

/// Returns the first missing delta of [`wide`]. Names that are requested in order may reach the store in
/// another order.
fn first_missing(paths: &[String]) -> usize {
    let is_missing = |n: &usize| !paths.contains(&wide_delta(*n));
    (0..WIDE).find(is_missing).unwrap_or(WIDE)
}

/// Waits up to a minute until a condition holds. Returns whether it does.
fn comes_true(holds: impl Fn() -> bool) -> bool {
    let since = Instant::now();
    while !holds() && since.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(5));
    }
    holds()
}

/// The most names that are being given at once in [`large_plan`].
pub const AT_ONCE: usize = 8;

/// Copies [`wide`], with something happening when a certain name is given (the full's is the first). Returns
/// the outcome, the target, and what was recorded meanwhile.
fn large_plan<T: Clone + Default + Send + 'static>(
    rt: &Runtime,
    named: usize,
    fault: Fault,
    meanwhile: impl Fn(&Place) -> T + Send + 'static,
) -> (Report<CopiedBackup>, Place, T) {
    let (source, target) = (Place::memory(&wide()), Place::memory(&Objects::new()));
    let strike = at(Call::Put, named, fault);
    let mut sides = Sides::new(rt, &source, &target, [Vec::new(), vec![strike]]);
    sides.useless = without_full;
    let seen = Arc::new(Mutex::new(T::default()));
    let (place, saw) = (target.clone(), seen.clone());
    sides
        .to
        .meanwhile(move || *saw.lock().unwrap() = meanwhile(&place));
    let options = Options {
        parallel: AT_ONCE,
        ..options(Encryption::Keep)
    };
    let outcome = sides.run(&options).unwrap();
    let seen = seen.lock().unwrap().clone();
    (outcome, target, seen)
}

/// Returns how many names are missing, and how many follow the first missing one.
fn beside(place: &Place) -> (usize, usize) {
    let paths = place.paths();
    let (missing, there) = gap(&paths);
    (missing, there - first_missing(&paths))
}

/// Waits until all names are there that may be given beside one that takes long. Returns whether they are.
fn others_are_named(place: &Place) -> bool {
    comes_true(|| beside(place) == (1, AT_ONCE - 1))
}

#[test]
fn names_of_a_large_plan_wait_for_their_full() {
    let rt = runtime();
    let (o, target, seen) = large_plan(&rt, 0, Fault::Meanwhile, |place| {
        // Names that did not wait would appear now.
        std::thread::sleep(Duration::from_millis(300));
        gap(&place.paths())
    });
    assert_eq!(seen, (0, 0));
    assert_eq!(o.reason(), None, "{:?}", o.failure);
    assert!(target.objects(&rt) == wide());
}

/// If one name takes long, others are given meanwhile, but so few that the gap stays small.
#[test]
fn names_of_a_large_plan_go_side_by_side() {
    let rt = runtime();
    let (o, target, seen) = large_plan(&rt, 20, Fault::Meanwhile, |place| {
        let goes_on = others_are_named(place);
        // More would appear now.
        std::thread::sleep(Duration::from_millis(200));
        (goes_on, beside(place))
    });
    assert_eq!(seen, (true, (1, AT_ONCE - 1)));
    assert_eq!(o.reason(), None, "{:?}", o.failure);
    assert!(target.objects(&rt) == wide());
}

/// One name cannot be given: names under way end, none after them is begun, and a rerun fills the gap.
#[test]
fn a_failure_in_the_middle_of_a_large_plan() {
    let rt = runtime();
    let (o, target, goes_on) = large_plan(&rt, 20, Fault::DeniedMeanwhile, others_are_named);
    assert!(goes_on);
    assert_eq!(
        o.reason(),
        Some(Reason::PermissionDenied),
        "{:?}",
        o.failure
    );
    assert_eq!(o.failed, 1);
    assert_eq!(beside(&target), (1, AT_ONCE - 1));
    let (_, there) = gap(&target.paths());
    let lost = o.objects.iter().filter(|x| x.reason == "BaseNotCopied");
    assert_eq!(lost.count(), WIDE - there - 1);

    let source = Place::memory(&wide());
    let mut again = Sides::new(&rt, &source, &target, Default::default());
    again.useless = without_full;
    let o = again.run(&options(Encryption::Keep)).unwrap();
    assert_eq!(o.reason(), None, "{:?}", o.failure);
    assert!(target.objects(&rt) == wide());
}

/// A folder keeps the order even of a large plan: it costs nothing there.
#[test]
fn a_large_plan_in_a_folder_is_in_order() {
    let rt = runtime();
    let (source, target) = (Place::folder(&wide()), Place::folder(&Objects::new()));
    let sides = Sides::new(&rt, &source, &target, Default::default());
    let o = sides.run(&options(Encryption::Keep)).unwrap();
    assert_eq!((o.reason(), o.copied), (None, WIDE as u64 + 1));
    assert!(target.objects(&rt) == wide());
}
