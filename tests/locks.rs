//! Locks that expire, in a folder, on a real S3 server, and as a Lease on a real API server: threads and
//! processes against each other, dead holders, outages, a store that lies.

mod support;

use deltafold::Reason;
use deltafold::kubernetes::{Client, lease};
use deltafold::store::exclude::ExcludeTags;
use deltafold::store::lock::{Attempt, Held, Lock, Wait};
use deltafold::store::{self, Cancel, LOCKS, Store};
use futures::TryStreamExt;
use kube::config::{KubeConfigOptions, Kubeconfig};
use object_store::memory::InMemory;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, ObjectStoreExt};
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use support::buckets::Bucket;
use support::etcd::Etcd;
use support::faults::{Call, Fault, FaultStore, Strike};
use support::kube::{Apiserver, TOKEN};
use support::minio::Minio;
use support::tools::EtcdVersion;
use tempfile::TempDir;
use tokio::runtime::{Handle, Runtime};

const SPACE: &str = "backup";
const NAME: &str = "test";
/// What a process that a test starts is told by.
const PLACE: &str = "DELTAFOLD_TEST_LOCK_PLACE";
const LOG: &str = "DELTAFOLD_TEST_LOCK_LOG";
const ROUNDS: &str = "DELTAFOLD_TEST_LOCK_ROUNDS";

/// Of a lock in most tests.
const SHORT: Duration = Duration::from_secs(2);
/// Of one that nobody is to wait for.
const LONG: Duration = Duration::from_secs(600);

/// Where a lock is kept, as a text that a process can be given.
#[derive(Clone)]
struct Place {
    /// A folder, a URL or `lease:` and a kubeconfig.
    url: String,
    options: Vec<(String, String)>,
}

impl Place {
    fn folder(path: &Path) -> Self {
        Place {
            url: path.to_str().unwrap().to_owned(),
            options: Vec::new(),
        }
    }

    fn minio(minio: &Minio, prefix: &str) -> Self {
        let options = [
            ("endpoint", minio.endpoint()),
            ("access_key_id", minio.access_key()),
            ("secret_access_key", minio.secret_key()),
            ("region", "us-east-1"),
        ];
        Place {
            url: format!("s3://backups/{prefix}"),
            options: options.map(|(k, v)| (k.to_owned(), v.to_owned())).to_vec(),
        }
    }

    fn lease(kubeconfig: &Path) -> Self {
        Place {
            url: format!("lease:{}", kubeconfig.display()),
            options: Vec::new(),
        }
    }

    fn lock(&self, handle: &Handle, cancel: &Cancel, who: &str, lasts: Duration) -> Lock {
        if let Some(file) = self.url.strip_prefix("lease:") {
            let config = Kubeconfig::read_from(file).unwrap();
            let options = KubeConfigOptions::default();
            let config = kube::Config::from_custom_kubeconfig(config, &options);
            let config = handle.block_on(config).unwrap();
            let client = Client::with_config(config, handle.clone(), cancel.clone()).unwrap();
            return lease::lock(&client, NAME, who, lasts);
        }
        let store = store::open(&self.url, &self.options, handle.clone()).unwrap();
        Lock::new(&store.with_cancel(cancel.clone()), NAME, who, lasts).unwrap()
    }

    fn text(&self) -> String {
        serde_json::to_string(&(&self.url, &self.options)).unwrap()
    }

    fn of(text: &str) -> Self {
        let (url, options) = serde_json::from_str(text).unwrap();
        Place { url, options }
    }
}

/// What serves the places; ended when dropped.
struct Servers {
    rt: Runtime,
    folder: TempDir,
    minio: Minio,
    server: Option<Apiserver>,
    etcd: Etcd,
}

impl Servers {
    fn start() -> Self {
        let rt = Runtime::new().unwrap();
        let folder = TempDir::new().unwrap();
        fs::create_dir(folder.path().join("store")).unwrap();
        let minio = Minio::start();
        rt.block_on(minio.create_bucket("backups"));
        let etcd = Etcd::start(EtcdVersion::V3_6, &folder.path().join("etcd"));
        let server = rt.block_on(Apiserver::start(&etcd));
        rt.block_on(server.create_namespace(SPACE));
        Servers {
            rt,
            folder,
            minio,
            server: Some(server),
            etcd,
        }
    }

    fn kubeconfig(&self) -> PathBuf {
        let file = self.folder.path().join("kubeconfig");
        let server = self.server.as_ref().unwrap();
        server.lasting_kubeconfig(&file, SPACE, TOKEN);
        file
    }

    fn places(&self) -> [Place; 3] {
        [
            Place::folder(&self.folder.path().join("store")),
            Place::minio(&self.minio, "etcd-main"),
            Place::lease(&self.kubeconfig()),
        ]
    }
}

fn held(attempt: Attempt) -> Held {
    match attempt {
        Attempt::Acquired(held) => held,
        Attempt::HeldBy(holder) => panic!("held by {holder:?}"),
    }
}

fn holder(attempt: Attempt) -> String {
    match attempt {
        Attempt::Acquired(_) => panic!("nobody had it"),
        Attempt::HeldBy(holder) => holder.identity,
    }
}

/// Waits for what must come sooner or later.
fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..6000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("never: {what}");
}

#[test]
fn threads_take_turns_everywhere() {
    const THREADS: usize = 4;
    const TURNS: usize = 3;
    let servers = Servers::start();
    for place in servers.places() {
        let (inside, turns) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for n in 0..THREADS {
                let (place, inside, turns) = (&place, &inside, &turns);
                let handle = servers.rt.handle().clone();
                scope.spawn(move || {
                    let cancel = Cancel::default();
                    let who = format!("thread-{n}");
                    let mut lock = place.lock(&handle, &cancel, &who, SHORT);
                    for _ in 0..TURNS {
                        let held = lock.acquire(Wait::Forever).unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "{}", held.name());
                        std::thread::sleep(Duration::from_millis(20));
                        held.renew().unwrap();
                        held.check().unwrap();
                        assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1);
                        turns.fetch_add(1, Ordering::SeqCst);
                        held.release().unwrap();
                    }
                });
            }
        });
        assert_eq!(turns.into_inner(), THREADS * TURNS, "{}", place.url);
    }
}

#[test]
fn one_that_is_alive_is_not_waited_for_and_one_that_gives_back_is_followed_at_once() {
    let servers = Servers::start();
    let handle = servers.rt.handle();
    for place in servers.places() {
        let cancel = Cancel::default();
        let mut first = place.lock(handle, &cancel, "first", SHORT);
        let mut second = place.lock(handle, &Cancel::default(), "second", LONG);
        let has_it = held(first.try_acquire().unwrap());
        assert_eq!(holder(second.try_acquire().unwrap()), "first");
        let e = second.acquire(Wait::UntilSeenDead).map(drop).unwrap_err();
        assert_eq!(e.reason(), Reason::LockHeld, "{e}");
        assert!(e.to_string().starts_with("first has the lock"), "{e}");
        assert!(has_it.is_held());
        // A run that a signal ends gives it back, too.
        cancel.cancel();
        drop(has_it);
        let has_it = held(second.try_acquire().unwrap());
        let e = first.acquire(Wait::Forever).map(drop).unwrap_err();
        assert_eq!(e.reason(), Reason::Terminated, "{e}");
        has_it.release().unwrap();
        held(second.try_acquire().unwrap());
    }
}

/// A process that a test starts: takes the lock some times, and tells about it in a file.
#[test]
fn a_process_of_its_own() {
    let Ok(place) = std::env::var(PLACE) else {
        return;
    };
    let place = Place::of(&place);
    let rounds: u32 = std::env::var(ROUNDS).unwrap().parse().unwrap();
    let id = std::process::id();
    let tell = |what: &str| {
        // One line is one write at the end.
        let log = fs::OpenOptions::new()
            .append(true)
            .open(std::env::var(LOG).unwrap());
        log.unwrap()
            .write_all(format!("{what} {id}\n").as_bytes())
            .unwrap();
    };
    let rt = Runtime::new().unwrap();
    let who = format!("process-{id}");
    let mut lock = place.lock(rt.handle(), &Cancel::default(), &who, SHORT);
    for _ in 0..rounds {
        let held = lock.acquire(Wait::Forever).unwrap();
        tell("begins");
        std::thread::sleep(Duration::from_millis(200));
        if held.is_held() {
            tell("ends");
        }
        held.release().unwrap();
        // Others look now and then: they get their turn.
        std::thread::sleep(Duration::from_millis(500));
    }
}

fn process(place: &Place, log: &Path, rounds: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_process_of_its_own", "--nocapture"])
        .env(PLACE, place.text())
        .env(LOG, log)
        .env(ROUNDS, rounds)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn processes_take_turns_and_those_that_are_killed_block_nobody_for_good() {
    let servers = Servers::start();
    for (n, place) in servers.places().into_iter().enumerate() {
        let log = servers.folder.path().join(format!("log-{n}"));
        fs::write(&log, "").unwrap();
        let told = || -> Vec<(String, u32)> {
            let text = fs::read_to_string(&log).unwrap();
            let lines = text.lines().map(|l| l.split_once(' ').unwrap());
            lines
                .map(|(what, id)| (what.to_owned(), id.parse().unwrap()))
                .collect()
        };
        let begins = |id: u32| {
            told()
                .iter()
                .filter(|(w, i)| (w.as_str(), *i) == ("begins", id))
                .count()
        };
        // Two that have it once and die with it, and two that want it to the end.
        let mut killed = Vec::new();
        let mut to_die: Vec<Child> = (0..2).map(|_| process(&place, &log, "1000")).collect();
        let others: Vec<Child> = (0..2).map(|_| process(&place, &log, "3")).collect();
        while let Some(mut child) = to_die.pop() {
            wait_until("it has its turn", || begins(child.id()) > 0);
            // In the middle of its turn, or of the next one's.
            child.kill().unwrap();
            child.wait().unwrap();
            killed.push(child.id());
        }
        for mut child in others {
            assert!(child.wait().unwrap().success(), "{}", place.url);
            assert_eq!(begins(child.id()), 3, "{}", place.url);
        }
        let told = told();
        for pair in told.windows(2) {
            let ((what, id), (next, next_id)) = (&pair[0], &pair[1]);
            let own_end = next == "ends" && id == next_id;
            let well = match what.as_str() {
                "begins" => own_end || killed.contains(id) && next == "begins",
                _ => next == "begins",
            };
            assert!(well, "{}: {told:?}", place.url);
        }
    }
}

#[test]
fn a_lock_survives_an_outage_of_the_api_server() {
    let mut servers = Servers::start();
    let place = Place::lease(&servers.kubeconfig());
    let handle = servers.rt.handle().clone();
    let mut lock = place.lock(&handle, &Cancel::default(), "holder", SHORT);
    let held = held(lock.try_acquire().unwrap());
    let port = servers.server.as_ref().unwrap().port();
    servers.server = None;
    wait_until("it has expired", || !held.is_held());
    let e = held.check().unwrap_err();
    assert_eq!(e.reason(), Reason::LockHeld, "{e}");
    let e = held.renew().unwrap_err();
    assert_eq!(e.reason(), Reason::KubernetesUnreachable, "{e}");
    let server = servers
        .rt
        .block_on(Apiserver::start_at(port, &servers.etcd));
    wait_until("it goes on", || held.is_held());
    // The Lease is as client-go's are, and whatever else is in it stays.
    let mut lease = servers.rt.block_on(server.lease(SPACE, NAME)).unwrap();
    let spec = &lease["spec"];
    assert!(
        spec["holderIdentity"]
            .as_str()
            .unwrap()
            .starts_with("holder_"),
        "{lease}"
    );
    assert_eq!(spec["leaseDurationSeconds"], 2);
    assert!(
        spec["acquireTime"].is_string() && spec["renewTime"].is_string(),
        "{lease}"
    );
    lease["metadata"]["labels"] = serde_json::json!({"others": "stay"});
    while servers
        .rt
        .block_on(server.replace_lease(SPACE, &lease))
        .is_err()
    {
        let now = servers.rt.block_on(server.lease(SPACE, NAME)).unwrap();
        lease["metadata"]["resourceVersion"] = now["metadata"]["resourceVersion"].clone();
        lease["spec"] = now["spec"].clone();
    }
    held.renew().unwrap();
    held.release().unwrap();
    let lease = servers.rt.block_on(server.lease(SPACE, NAME)).unwrap();
    assert_eq!(lease["metadata"]["labels"]["others"], "stay");
    assert_eq!(lease["spec"]["holderIdentity"], "");
}

fn in_memory(inner: Arc<dyn ObjectStore>, handle: &Handle) -> Store {
    let (prefix, url) = (ObjectPath::default(), "memory://".to_owned());
    Store::new(inner, prefix, url, ExcludeTags::none(), handle.clone())
}

#[test]
fn a_lock_survives_an_outage_of_the_store() {
    let rt = Runtime::new().unwrap();
    // Two reads acquire it; so many fail that it expires, however fast they are.
    let strikes = (4..40).map(|nth| Strike {
        call: Call::Get,
        nth,
        fault: Fault::ServerError,
    });
    let faults = FaultStore::new(Arc::new(InMemory::new()), strikes.collect());
    let store = in_memory(Arc::new(faults.clone()), rt.handle());
    let second = Duration::from_secs(1);
    let mut lock = Lock::new(&store, NAME, "holder", second).unwrap();
    let held = held(lock.try_acquire().unwrap());
    wait_until("it has expired", || !held.is_held());
    wait_until("it goes on", || held.is_held());
    // A lost answer does not matter: what is there counts.
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
        let strike = |nth| Strike {
            call: Call::Put,
            nth,
            fault,
        };
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

/// Another takes the lock between the look and the write.
fn raced(faults: &FaultStore, rt: &Runtime) -> (Result<Attempt, deltafold::Error>, Held) {
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
    let strikes = vec![Strike {
        call: Call::Put,
        nth: 0,
        fault: Fault::Meanwhile,
    }];
    let honest = FaultStore::new(Arc::new(InMemory::new()), strikes.clone());
    let (slower, faster) = raced(&honest, &rt);
    assert_eq!(holder(slower.unwrap()), "faster");
    faster.renew().unwrap();
    drop(faster);

    let lying = FaultStore::new(Arc::new(InMemory::new()), strikes);
    let lying = lying.that_ignores_conditions();
    let (slower, faster) = raced(&lying, &rt);
    let slower = held(slower.unwrap());
    // Both believe it, until the loser looks again.
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
    // The loser gives back what is not its own: nothing.
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
    // Nothing is left but the record, of nobody, and the file for the flock.
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
    assert!(e.to_string().contains("--lock-lease"), "{e}");
    let mut place = Place::minio(&servers.minio, "p");
    place
        .options
        .push(("max_retries".to_owned(), "0".to_owned()));
    place.options[0].1 = "http://127.0.0.1:9".to_owned();
    let mut lock = place.lock(handle, &Cancel::default(), "a", SHORT);
    let e = lock.acquire(Wait::Forever).map(drop).unwrap_err();
    assert_eq!(e.reason(), Reason::StoreUnreachable, "{e}");
    // Nothing was written on the way.
    let store = servers.minio.store("backups");
    let listed: Vec<_> = servers.rt.block_on(store.list(None).try_collect()).unwrap();
    assert!(listed.is_empty(), "{listed:?}");
    let path = ObjectPath::from(format!("{LOCKS}/x"));
    assert!(servers.rt.block_on(store.head(&path)).is_err());
}
