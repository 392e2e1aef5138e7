//! Expiring locks in a folder and on a real S3 server: concurrent threads and processes, dead holders, outages,
//! a store that lies.

use crate::support::faults::{Call, Fault, FaultStore, at};
use crate::support::lock_suite::{self, LONG, NAME, Place, SHORT, held, holder, wait_until};
use crate::support::made_backups::Bucket;
use crate::support::minio::Minio;
use crate::support::scratch;
use deltafold::Reason;
use deltafold::base::Cancel;
use deltafold::store::exclude::ExcludeTags;
use deltafold::store::lock::{Attempt, Lock, LockGuard, Wait};
use deltafold::store::{LOCKS, Store};
use futures::TryStreamExt;
use object_store::memory::InMemory;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, ObjectStoreExt};
use std::fs;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tokio::runtime::{Handle, Runtime};

/// The servers of the tests. They end when this is dropped.
struct Servers {
    rt: Runtime,
    folder: TempDir,
    minio: Minio,
}

impl Servers {
    fn start() -> Self {
        let rt = Runtime::new().unwrap();
        let folder = scratch::folder().unwrap();
        fs::create_dir(folder.path().join("store")).unwrap();
        let minio = Minio::start();
        rt.block_on(minio.create_bucket("backups"));
        Servers { rt, folder, minio }
    }

    fn places(&self) -> [Place; 2] {
        [
            Place::folder(&self.folder.path().join("store")),
            Place::minio(&self.minio, "etcd-main"),
        ]
    }
}

#[test]
fn threads_take_turns_everywhere() {
    let servers = Servers::start();
    for place in servers.places() {
        lock_suite::threads_take_turns(servers.rt.handle(), &place);
    }
}

#[test]
fn one_that_is_alive_is_not_waited_for_and_one_that_gives_back_is_followed_at_once() {
    let servers = Servers::start();
    for place in servers.places() {
        lock_suite::the_living_are_not_waited_for(servers.rt.handle(), &place);
    }
}

/// Run as a process by the tests below.
#[test]
fn a_process_of_its_own() {
    lock_suite::a_process_of_its_own();
}

#[test]
fn processes_take_turns_and_those_that_are_killed_block_nobody_for_good() {
    let servers = Servers::start();
    for (n, place) in servers.places().iter().enumerate() {
        let log = servers.folder.path().join(format!("log-{n}"));
        lock_suite::processes_take_turns(module_path!(), place, &log);
    }
}

fn in_memory(inner: Arc<dyn ObjectStore>, handle: &Handle) -> Store {
    let (prefix, url) = (ObjectPath::default(), "memory://".to_owned());
    Store::new(inner, prefix, url, ExcludeTags::none(), handle.clone())
}

#[test]
fn a_lock_survives_an_outage_of_the_store() {
    let rt = Runtime::new().unwrap();
    // Two reads acquire the lock; then so many fail that it expires, however fast they are.
    let strikes = (4..40).map(|nth| at(Call::Get, nth, Fault::ServerError));
    let faults = FaultStore::new(Arc::new(InMemory::new()), strikes.collect());
    let store = in_memory(Arc::new(faults.clone()), rt.handle());
    let second = Duration::from_secs(1);
    let mut lock = Lock::new(&store, NAME, "holder", second).unwrap();
    let held = held(lock.try_acquire().unwrap());
    wait_until("it has expired", || !held.is_held());
    wait_until("it goes on", || held.is_held());
    // A lost response does not matter: the record in the store counts.
    let puts = || {
        faults
            .calls()
            .iter()
            .filter(|(c, _)| *c == Call::Put)
            .count()
    };
    let before = puts();
    held.renew().unwrap();
    assert!(puts() > before);
    held.release().unwrap();
}

#[test]
fn answers_that_are_lost_do_no_harm() {
    let rt = Runtime::new().unwrap();
    for fault in [
        Fault::LostAnswer,
        Fault::LostThenRefused,
        Fault::ServerError,
    ] {
        let strike = |nth| at(Call::Put, nth, fault);
        let faults = FaultStore::new(Arc::new(InMemory::new()), vec![strike(0), strike(2)]);
        let store = in_memory(Arc::new(faults), rt.handle());
        let mut lock = Lock::new(&store, NAME, "holder", LONG).unwrap();
        let mut other = Lock::new(&store, NAME, "other", LONG).unwrap();
        let first = lock.try_acquire();
        let took_effect = fault != Fault::ServerError;
        assert_eq!(first.is_ok(), took_effect, "{fault:?}");
        let held = first.unwrap_or_else(|_| lock.try_acquire().unwrap());
        let held = self::held(held);
        assert_eq!(holder(other.try_acquire().unwrap()), "holder");
        for _ in 0..3 {
            let _ = held.renew();
        }
        held.renew().unwrap();
        held.release().unwrap();
        self::held(other.try_acquire().unwrap());
    }
}

/// Another holder takes the lock between read and write.
fn raced(faults: &FaultStore, rt: &Runtime) -> (Result<Attempt, deltafold::Error>, LockGuard) {
    let store = in_memory(Arc::new(faults.clone()), rt.handle());
    let (send, receive) = std::sync::mpsc::channel();
    let other = store.clone();
    faults.meanwhile(move || {
        let (other, send) = (other.clone(), send.clone());
        let thread = std::thread::spawn(move || {
            let mut lock = Lock::new(&other, NAME, "faster", SHORT).unwrap();
            send.send(held(lock.try_acquire().unwrap())).unwrap();
        });
        thread.join().unwrap();
    });
    let mut lock = Lock::new(&store, NAME, "slower", SHORT).unwrap();
    let slower = lock.try_acquire();
    (slower, receive.recv().unwrap())
}

#[test]
fn a_store_that_honours_conditions_lets_one_win_and_one_that_lies_is_found_out() {
    let rt = Runtime::new().unwrap();
    let strikes = vec![at(Call::Put, 0, Fault::Meanwhile)];
    let honest = FaultStore::new(Arc::new(InMemory::new()), strikes.clone());
    let (slower, faster) = raced(&honest, &rt);
    assert_eq!(holder(slower.unwrap()), "faster");
    faster.renew().unwrap();
    drop(faster);

    let lying = FaultStore::new(Arc::new(InMemory::new()), strikes);
    let lying = lying.that_ignores_conditions();
    let (slower, faster) = raced(&lying, &rt);
    let slower = held(slower.unwrap());
    // Both believe that they have it until the loser looks again.
    wait_until("one has lost", || {
        slower.check().is_err() || faster.check().is_err()
    });
    let lost = [&slower, &faster].map(|h| h.renew().err());
    let lost: Vec<_> = lost.into_iter().flatten().collect();
    assert_eq!(lost.len(), 1, "{lost:?}");
    assert_eq!(lost[0].reason(), Reason::LockHeld);
    assert!(
        lost[0].to_string().contains("slower has it now"),
        "{}",
        lost[0]
    );
    assert!(slower.is_held() && !faster.is_held());
    // The loser must not release the other's lock.
    drop(faster);
    slower.renew().unwrap();
}

#[test]
fn locks_are_in_no_listing_and_a_damaged_one_is_somebodys() {
    let rt = Runtime::new().unwrap();
    let bucket = Bucket::with_base();
    let place = Place::folder(bucket.path());
    let mut lock = place.lock(rt.handle(), &Cancel::default(), "holder", LONG);
    let held = held(lock.try_acquire().unwrap());
    let listed = bucket.list(&["--deep"]);
    assert_eq!(listed["problems"], serde_json::json!([]));
    assert_eq!(bucket.compact(&[])["warnings"], serde_json::json!([]));
    held.release().unwrap();
    // Only the record, without a holder, and the file for flock are left.
    let mut left: Vec<_> = fs::read_dir(bucket.path().join(LOCKS)).unwrap().collect();
    left.sort_by_key(|e| e.as_ref().unwrap().file_name());
    let left: Vec<_> = left.into_iter().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["test.flock", "test.json"]);

    let path = bucket.path().join(LOCKS).join("test.json");
    fs::write(&path, "half a rec").unwrap();
    let said = holder(lock.try_acquire().unwrap());
    assert!(said.starts_with("somebody unknown"), "{said}");
    fs::remove_file(path).unwrap();
    self::held(lock.try_acquire().unwrap());
}

#[test]
fn a_store_without_conditions_and_one_that_is_not_there_say_so() {
    let servers = Servers::start();
    let handle = servers.rt.handle();
    let mut place = Place::minio(&servers.minio, "p");
    place
        .options
        .push(("conditional_put".to_owned(), "disabled".to_owned()));
    let mut lock = place.lock(handle, &Cancel::default(), "a", SHORT);
    let e = lock.acquire(Wait::Forever).map(drop).unwrap_err();
    assert_eq!(e.reason(), Reason::Configuration, "{e}");
    assert!(e.to_string().contains("lock-lease"), "{e}");
    let mut place = Place::minio(&servers.minio, "p");
    place
        .options
        .push(("max_retries".to_owned(), "0".to_owned()));
    place.options[0].1 = "http://127.0.0.1:9".to_owned();
    let mut lock = place.lock(handle, &Cancel::default(), "a", SHORT);
    let e = lock.acquire(Wait::Forever).map(drop).unwrap_err();
    assert_eq!(e.reason(), Reason::StoreUnreachable, "{e}");
    // Nothing else was written.
    let store = servers.minio.store("backups");
    let listed: Vec<_> = servers.rt.block_on(store.list(None).try_collect()).unwrap();
    assert!(listed.is_empty(), "{listed:?}");
    let path = ObjectPath::from(format!("{LOCKS}/x"));
    assert!(servers.rt.block_on(store.head(&path)).is_err());
}
