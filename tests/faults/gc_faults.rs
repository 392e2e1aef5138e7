//! `gc` on stores that fail: every call fails in every way, runs are killed, two run at once, the clock is an
//! hour off. What must stay stays, and the next run completes the work.

use crate::support::faults::{Call, Fault, FaultStore, PlannedFault, Strike, at, every_call_fails};
use crate::support::gc_history::NEWEST_FULL;
use crate::support::history::Compression;
use crate::support::killed;
use crate::support::made_backups::{Bucket, Objects, in_memory, objects_of};
use crate::support::tiny_backup::{database, object};
use crate::support::{self, bucket_store, deltafold, run_json};
use chrono::TimeDelta;
use deltafold::backup::retention::{self, Periods, Policy};
use deltafold::ops::gc::{self, Options, pin};
use deltafold::ops::report::Report;
use deltafold::prefix::Context;
use deltafold::store::exclude::ExcludeTags;
use deltafold::{Error, Reason};
use object_store::ObjectStoreExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use rustix::process::Signal;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Child;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;

const HOUR: i64 = 3600;

fn name(kind: &str, start: i64, last: i64, created: i64) -> String {
    format!("v2/{kind}-{start:08}-{last:08}-{created}")
}

/// Returns three chains of a full and three deltas, an hour apart, and the newest full. The content of deltas
/// is not read.
fn bucket() -> (Objects, BTreeSet<String>) {
    let now = chrono::Utc::now().timestamp();
    let mut objects = Objects::new();
    let mut needed = BTreeSet::new();
    for chain in 0..4 {
        let (r, t) = (100 * (chain + 1), now - (4 - chain) * HOUR);
        let mut put = |path: String| {
            if chain == 3 {
                needed.insert(path.clone());
            }
            let content = match path.contains("Full") {
                true => object(&database(4096, 2..=r, 1), Compression::None),
                false => b"content".to_vec(),
            };
            objects.insert(path, content);
        };
        put(name("Full", 0, r, t));
        for d in 0..3 {
            let start = r + 1 + d * 33;
            let last = if d == 2 { r + 100 } else { start + 32 };
            put(name("Incr", start, last, t + 60 * (d + 1)));
        }
    }
    (objects, needed)
}

fn options() -> Options {
    Options {
        retention: retention::Options {
            policy: Policy::Exponential(Periods {
                hourly: 0,
                daily: 0,
                weekly: 0,
                monthly: 0,
            }),
            delta_retention: None,
            restorable_window: None,
        },
        staging_age: TimeDelta::hours(24),
        apply: true,
        allow_shrink: true,
        timeout: Duration::from_secs(3600),
        lock_lease: None,
        single_writer: true,
    }
}

pub fn context(rt: &Runtime, faults: &FaultStore) -> Context {
    let store = bucket_store(rt, faults.clone(), ExcludeTags::none());
    faults.cancels(store.cancel());
    support::context(store, 1)
}

type Ran = Result<Report<gc::CleanedBackup>, Error>;

fn run(
    rt: &Runtime,
    inner: &Arc<InMemory>,
    strikes: Vec<PlannedFault>,
    options: &Options,
) -> (Ran, FaultStore) {
    let faults = FaultStore::new(inner.clone(), strikes);
    let ran = gc::run(&context(rt, &faults), options);
    (ran, faults)
}

fn of_v2(objects: &Objects) -> BTreeSet<String> {
    let names = objects.keys().filter(|p| p.starts_with("v2/"));
    names.cloned().collect()
}

/// Asserts that the remaining deltas of each chain still have their full, and with `in_order` no hole.
fn is_sound(objects: &Objects, all: &Objects, in_order: bool, context: &str) {
    let mut chains: BTreeMap<String, Vec<(String, bool)>> = BTreeMap::new();
    let mut full = String::new();
    let mut order: Vec<&String> = all.keys().collect();
    order.sort_by_key(|p| {
        let parts: Vec<&str> = p.split('-').collect();
        (parts[2].to_owned(), p.contains("Full"))
    });
    for path in order {
        if path.contains("Full") {
            full = path.clone();
        }
        let chain = chains.entry(full.clone()).or_default();
        chain.push((path.clone(), objects.contains_key(path)));
    }
    for chain in chains.values() {
        let usable: Vec<bool> = chain.iter().map(|c| c.1).collect();
        let left = match in_order {
            true => usable.iter().take_while(|u| **u).count(),
            // One bulk request deletes in no order.
            false if usable[0] || !chain[0].0.contains("Full") => continue,
            false => 0,
        };
        assert!(usable[left..].iter().all(|u| !u), "{context}: {chain:?}");
    }
}

/// Returns whether an error blames the store or a signal.
fn is_honest(e: &Error) -> bool {
    ![Reason::Internal, Reason::CorruptSnapshot, Reason::Usage].contains(&e.reason())
}

#[test]
fn every_call_fails_and_the_next_run_mends_it() {
    let rt = Runtime::new().unwrap();
    let (objects, needed) = bucket();
    let prepared = || in_memory(&objects);
    let options = options();
    // Find out which calls there are.
    let inner = prepared();
    let (ran, faults) = run(&rt, &inner, Vec::new(), &options);
    let error = ran.unwrap().failure;
    assert!(error.is_none(), "{error:?}");
    let whole = rt.block_on(objects_of(&*inner));
    assert!(faults.calls().len() > 20);
    let mut partly = 0;
    let (struck, _) = every_call_fails(&faults, |strike| {
        if is_left_out(strike) {
            return None;
        }
        let (fault, context) = (strike.fault, format!("{strike:?}"));
        let inner = prepared();
        let (ran, _) = run(&rt, &inner, vec![strike.planned], &options);
        match &ran {
            Ok(report) => {
                let error = report.failure.as_ref();
                assert_eq!(report.reason(), error.map(|e| e.reason()));
                partly += usize::from(error.is_some());
                assert!(error.is_none_or(is_honest), "{context}: {error:?}");
            }
            Err(e) => assert!(is_honest(e), "{context}: {e}"),
        }
        let after = rt.block_on(objects_of(&*inner));
        // With `Gone`, the store deletes the object by itself.
        if fault != Fault::Gone {
            for path in &needed {
                assert!(after.contains_key(path), "{context}: {path}");
            }
            is_sound(&after, &objects, false, &context);
        }
        // The next run completes the removal.
        unlock(&rt, &inner);
        let (again, _) = run(&rt, &inner, Vec::new(), &options);
        let outcome = again.unwrap_or_else(|e| panic!("{context}, then: {e}"));
        let error = &outcome.failure;
        assert!(error.is_none(), "{context}, then: {error:?}");
        let mended = rt.block_on(objects_of(&*inner));
        // The store itself may have deleted the full that was to be read, so what it superseded stays.
        if fault != Fault::Gone || needed.iter().all(|path| mended.contains_key(path)) {
            assert_eq!(of_v2(&mended), of_v2(&whole), "{context}: {outcome:#?}");
        }
        Some(ran.is_err())
    });
    println!("{partly} partly done");
    assert!(struck > 100 && partly > 5);
}

/// Cleaning up waits for calls that hang: not each of them is tried.
fn is_left_out(strike: &Strike) -> bool {
    strike.fault == Fault::Hang && !strike.planned.nth.is_multiple_of(7)
}

/// As if the lock of the dead run had expired; `tests/faults/locks.rs` tests that wait.
fn unlock(rt: &Runtime, inner: &Arc<InMemory>) {
    let _ = rt.block_on(inner.delete(&Path::from("deltafold-locks/gc.json")));
}

/// A fault of `pin` is reported, and repeating the command does the work.
#[test]
fn every_call_of_pin_fails_and_again_does_it() {
    let rt = Runtime::new().unwrap();
    let (objects, _) = bucket();
    let full = objects.keys().find(|p| p.contains("Full")).unwrap().clone();
    let pin = |inner: &Arc<InMemory>, faults: Vec<PlannedFault>| {
        let options = pin::Options {
            name: full.clone(),
            reason: None,
            unpin: false,
        };
        let faults = FaultStore::new(inner.clone(), faults);
        let ran = pin::run(&context(&rt, &faults), &options);
        unlock(&rt, inner);
        (ran.map(|_| ()), faults)
    };
    let left = |inner: &Arc<InMemory>| {
        let mut keys: Vec<String> = rt.block_on(objects_of(&**inner)).into_keys().collect();
        keys.retain(|k| !k.contains("staging"));
        keys
    };
    let inner = in_memory(&objects);
    let (ran, faults) = pin(&inner, Vec::new());
    ran.unwrap();
    let whole = left(&inner);
    every_call_fails(&faults, |strike| {
        if strike.fault == Fault::Gone || is_left_out(strike) {
            return None;
        }
        let inner = in_memory(&objects);
        let (first, _) = pin(&inner, vec![strike.planned]);
        if let Err(e) = &first {
            assert!(is_honest(e), "{strike:?}: {e}");
        }
        let (again, _) = pin(&inner, Vec::new());
        again.unwrap_or_else(|e| panic!("{strike:?}, then: {e}"));
        assert_eq!(left(&inner), whole, "{strike:?}");
        Some(first.is_err())
    });
}

/// Some deletions always fail: the rest is removed, and the exit code reports it.
#[test]
fn what_cannot_be_deleted_holds_only_its_own_chain_back() {
    let rt = Runtime::new().unwrap();
    let (objects, needed) = bucket();
    let inner = in_memory(&objects);
    // Two of the nine deltas of the first batch, and their retries.
    let deny = |nth| at(Call::Delete, nth, Fault::Denied);
    // The object that probes the clock is deleted first.
    let strikes = [1, 2, 10, 11].map(deny).to_vec();
    let (ran, _) = run(&rt, &inner, strikes, &options());
    let outcome = ran.unwrap();
    assert_eq!(outcome.reason(), Some(Reason::PartlyDone));
    assert!(outcome.totals.left.objects > 0 && outcome.totals.deleted.objects > 0);
    let after = rt.block_on(objects_of(&*inner));
    is_sound(&after, &objects, false, "denied");
    assert!(needed.iter().all(|n| after.contains_key(n)));
    let fates = outcome.objects.iter().filter(|o| o.error.is_some()).count() as u64;
    assert!(
        fates >= 1 && fates < outcome.totals.left.objects,
        "{outcome:#?}"
    );
}

/// The store's clock is an hour behind ours, so ours may be an hour ahead: nothing is removed too early.
#[test]
fn a_clock_an_hour_ahead_removes_nothing_early() {
    let (objects, _) = bucket();
    let now = chrono::Utc::now().timestamp();
    let b = Bucket::of(&objects);
    // What was removed 50 minutes ago by the store's clock, and 110 minutes ago by ours.
    let before = b.objects();
    let window = |hours: &str| {
        let args = [
            "--policy",
            "limit",
            "--limit",
            "1",
            "--allow-shrink",
            "--restorable-window",
            hours,
        ];
        let result = b.succeeds("gc", &args);
        let goes = result["objects"].as_array().unwrap().iter();
        goes.filter(|o| o["decision"] == "Delete").count()
    };
    // By the right clock a window an hour longer reaches one chain farther.
    assert!(window("150m") < window("90m"));
    assert_eq!(b.objects(), before);
    // An object from the future shows that our clock is behind: there is a warning.
    let path = b.path().join(before.keys().next().unwrap());
    let ahead = std::time::SystemTime::now() + Duration::from_secs(3600);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_modified(ahead).unwrap();
    let (_, result, _) = b.run("gc", &["--policy", "limit"]);
    let warnings = result["warnings"].to_string();
    assert!(warnings.contains("ahead of this one"), "{warnings}");
    // A snapshot from the future supersedes nothing and stays.
    let future = name("Full", 0, 1000, now + HOUR);
    b.put(&future, b"content");
    let (_, result, _) = b.run("gc", &[&NEWEST_FULL[..], &["--apply"]].concat());
    let told = result["objects"].as_array().unwrap();
    let of = |path: &str| told.iter().find(|o| o["path"] == path).unwrap()["reason"].clone();
    assert_eq!(of(&future), "NewestChain");
    assert!(result["warnings"].to_string().contains("check the clock"));
    assert_eq!(
        told.iter().filter(|o| o["reason"] == "NewestChain").count(),
        5,
        "{result:#}"
    );
}

/// Killed while it deletes and run again; two at once.
#[test]
fn killed_midway_and_two_at_once_leave_what_is_needed() {
    let (mut objects, needed) = bucket();
    let now = chrono::Utc::now().timestamp();
    // Enough that deleting them takes longer than the longest wait before a kill.
    const MANY: i64 = 3000;
    for n in 0..MANY {
        let (r, t) = (n * 90 / MANY + 1, now - 100 * HOUR + n);
        objects.insert(name("Full", 0, r, t), b"content".to_vec());
    }
    let b = RefCell::new(Bucket::of(&objects));
    let command = || {
        let mut c = deltafold();
        c.arg("gc").args(NEWEST_FULL).arg("--apply");
        c.args(["--output", "json", "--store"]);
        c.arg(b.borrow().path());
        c
    };
    let moment = |job: &mut Child, rng: &mut fastrand::Rng, _| {
        let v2 = b.borrow().path().join("v2");
        let is_touched = || std::fs::read_dir(&v2).unwrap().count() < objects.len();
        killed::wait_until(job, is_touched);
        std::thread::sleep(Duration::from_micros(rng.u64(..20_000)));
    };
    let mut midway = 0;
    killed::at_random_moments(14, Signal::KILL, Duration::ZERO, command, moment, |ended| {
        let after = b.borrow().objects();
        let gone = objects.keys().filter(|k| !after.contains_key(*k)).count();
        midway += usize::from(gone > 0 && gone < objects.len() - 1 - needed.len());
        let context = format!("{}, {gone} gone", ended.what);
        for path in &needed {
            assert!(after.contains_key(path), "{context}: {path}");
        }
        is_sound(&after, &bucket_of_chains(&objects), true, &context);
        // The next run takes over the dead run's lock, as if time had passed.
        let _ = std::fs::remove_dir_all(b.borrow().path().join("deltafold-locks"));
        let mut both = [command(), command()];
        let codes: Vec<i32> = std::thread::scope(|scope| {
            let runs = both.each_mut().map(|c| scope.spawn(|| run_json(c).0));
            runs.map(|run| run.join().unwrap()).to_vec()
        });
        // The lock keeps one of them away, or they run one after the other.
        assert!(
            codes.contains(&0) && codes.iter().all(|c| [0, 75].contains(c)),
            "{codes:?}"
        );
        let last = b.borrow().objects();
        for path in &needed {
            assert!(last.contains_key(path), "{context}: {path}");
        }
        assert_eq!(of_v2(&last), needed, "{context}");
        b.replace(Bucket::of(&objects));
    });
    println!("{midway} were killed midway");
    assert!(midway >= 3);
}

/// Returns only the chains of [`bucket`].
fn bucket_of_chains(objects: &Objects) -> Objects {
    let mut chains = objects.clone();
    chains.retain(|path, _| {
        let last: i64 = path.split('-').nth(2).unwrap().parse().unwrap();
        last >= 100
    });
    chains
}
