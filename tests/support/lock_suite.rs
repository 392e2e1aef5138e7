//! The test suite of expiring locks, for every place that can keep one: a folder, an S3 server, a Lease.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use deltafold::Reason;
use deltafold::base::Cancel;
use deltafold::kubernetes::{Client, lease};
use deltafold::store;
use deltafold::store::lock::{Attempt, Lock, LockGuard, Wait};
use kube::config::{KubeConfigOptions, Kubeconfig};
use tokio::runtime::{Handle, Runtime};

use super::minio::Minio;

pub const NAME: &str = "test";
/// Environment variables with which a test tells a process that it starts what to do.
const PLACE: &str = "DELTAFOLD_TEST_LOCK_PLACE";
const LOG: &str = "DELTAFOLD_TEST_LOCK_LOG";
const ROUNDS: &str = "DELTAFOLD_TEST_LOCK_ROUNDS";

/// The lifetime of a lock in most tests.
pub const SHORT: Duration = Duration::from_secs(2);
/// A lifetime longer than any test: such a lock never expires.
pub const LONG: Duration = Duration::from_secs(600);

/// Where a lock is kept. It can be passed to another process as text.
#[derive(Clone)]
pub struct Place {
    /// A folder, a URL, or `lease:` and a kubeconfig.
    url: String,
    pub options: Vec<(String, String)>,
}

impl Place {
    pub fn folder(path: &Path) -> Self {
        Place {
            url: path.to_str().expect("a path in UTF-8").to_owned(),
            options: Vec::new(),
        }
    }

    pub fn minio(minio: &Minio, prefix: &str) -> Self {
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

    pub fn lease(kubeconfig: &Path) -> Self {
        Place {
            url: format!("lease:{}", kubeconfig.display()),
            options: Vec::new(),
        }
    }

    pub fn lock(&self, handle: &Handle, cancel: &Cancel, who: &str, lasts: Duration) -> Lock {
        if let Some(file) = self.url.strip_prefix("lease:") {
            let config = Kubeconfig::read_from(file).expect("a kubeconfig");
            let options = KubeConfigOptions::default();
            let config = kube::Config::from_custom_kubeconfig(config, &options);
            let config = handle.block_on(config).expect("a configuration");
            let client = Client::with_config(config, handle.clone(), cancel.clone());
            return lease::lock(&client.expect("a client"), NAME, who, lasts);
        }
        let store = store::open(&self.url, &self.options, handle.clone()).expect("a store");
        let store = store.with_cancel(cancel.clone());
        Lock::new(&store, NAME, who, lasts).expect("a lock")
    }

    fn text(&self) -> String {
        serde_json::to_string(&(&self.url, &self.options)).expect("JSON")
    }

    fn of(text: &str) -> Self {
        let (url, options) = serde_json::from_str(text).expect("JSON");
        Place { url, options }
    }
}

#[track_caller]
pub fn held(attempt: Attempt) -> LockGuard {
    match attempt {
        Attempt::Acquired(held) => held,
        Attempt::HeldBy(holder) => panic!("held by {holder:?}"),
    }
}

#[track_caller]
pub fn holder(attempt: Attempt) -> String {
    match attempt {
        Attempt::Acquired(_) => panic!("nobody had it"),
        Attempt::HeldBy(holder) => holder.identity,
    }
}

/// Waits until a condition holds.
#[track_caller]
pub fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..6000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("never: {what}");
}

pub fn threads_take_turns(handle: &Handle, place: &Place) {
    const THREADS: usize = 4;
    const TURNS: usize = 3;
    let (inside, turns) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for n in 0..THREADS {
            let (inside, turns) = (&inside, &turns);
            scope.spawn(move || {
                let cancel = Cancel::default();
                let who = format!("thread-{n}");
                let mut lock = place.lock(handle, &cancel, &who, SHORT);
                for _ in 0..TURNS {
                    let held = lock.acquire(Wait::Forever).expect("the lock");
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "{}", held.name());
                    std::thread::sleep(Duration::from_millis(20));
                    held.renew().expect("a renewal");
                    held.check().expect("it is held");
                    assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1);
                    turns.fetch_add(1, Ordering::SeqCst);
                    held.release().expect("a release");
                }
            });
        }
    });
    assert_eq!(turns.into_inner(), THREADS * TURNS, "{}", place.url);
}

/// Asserts that `Wait::UntilSeenDead` does not wait for a living holder, that a dropped guard releases its lock
/// even after a cancellation, and that a cancelled process gets no lock.
pub fn the_living_are_not_waited_for(handle: &Handle, place: &Place) {
    let cancel = Cancel::default();
    let mut first = place.lock(handle, &cancel, "first", SHORT);
    let mut second = place.lock(handle, &Cancel::default(), "second", LONG);
    let has_it = held(first.try_acquire().expect("an answer"));
    assert_eq!(holder(second.try_acquire().expect("an answer")), "first");
    let e = second.acquire(Wait::UntilSeenDead).map(drop);
    let e = e.expect_err("the first is alive");
    assert_eq!(e.reason(), Reason::LockHeld, "{e}");
    assert!(e.to_string().starts_with("first has held the lock"), "{e}");
    assert!(has_it.is_held());
    // A run that a signal ends releases its lock, too.
    cancel.cancel();
    drop(has_it);
    let has_it = held(second.try_acquire().expect("an answer"));
    let e = first.acquire(Wait::Forever).map(drop);
    let e = e.expect_err("it was ended");
    assert_eq!(e.reason(), Reason::Terminated, "{e}");
    has_it.release().expect("a release");
    held(second.try_acquire().expect("an answer"));
}

/// Does nothing unless a test has started this process: then it takes the lock several times and logs when.
pub fn a_process_of_its_own() {
    let Ok(place) = std::env::var(PLACE) else {
        return;
    };
    let place = Place::of(&place);
    let told = |name: &str| std::env::var(name).expect("what the test tells");
    let rounds: u32 = told(ROUNDS).parse().expect("a number");
    let id = std::process::id();
    let tell = |what: &str| {
        // Each line is one write at the end of the file.
        let log = fs::OpenOptions::new().append(true).open(told(LOG));
        let line = format!("{what} {id}\n");
        let written = log.expect("the log").write_all(line.as_bytes());
        written.expect("write a line");
    };
    let rt = Runtime::new().expect("a runtime");
    let who = format!("process-{id}");
    let mut lock = place.lock(rt.handle(), &Cancel::default(), &who, SHORT);
    for _ in 0..rounds {
        let held = lock.acquire(Wait::Forever).expect("the lock");
        tell("begins");
        std::thread::sleep(Duration::from_millis(200));
        if held.is_held() {
            tell("ends");
        }
        held.release().expect("a release");
        // Other processes poll: leave them time to take the lock.
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Returns the command that runs the test `a_process_of_its_own` of a module in a new process.
fn process(module: &str, place: &Place, log: &Path, rounds: &str) -> Child {
    // The harness's test names lack the first part of `module_path!()`, the name of the program.
    let (_, module) = module.split_once("::").expect("a module of a program");
    let program = std::env::current_exe().expect("this program");
    let child = Command::new(program)
        .args(["--exact", &format!("{module}::a_process_of_its_own")])
        .arg("--nocapture")
        .env(PLACE, place.text())
        .env(LOG, log)
        .env(ROUNDS, rounds)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn();
    child.expect("start a process")
}

/// Asserts that killed holders block nobody for good. `module` is the caller's `module_path!()`. That module
/// must have a test `a_process_of_its_own` that calls [`a_process_of_its_own`] of this file.
pub fn processes_take_turns(module: &str, place: &Place, log: &Path) {
    fs::write(log, "").expect("write the log");
    let told = || -> Vec<(String, u32)> {
        let text = fs::read_to_string(log).expect("the log");
        let lines = text.lines().map(|l| l.split_once(' ').expect("two words"));
        lines
            .map(|(what, id)| (what.to_owned(), id.parse().expect("an ID")))
            .collect()
    };
    let begins = |id: u32| {
        told()
            .iter()
            .filter(|(w, i)| (w.as_str(), *i) == ("begins", id))
            .count()
    };
    // Two processes that take the lock and are killed, and two that run to the end.
    let mut killed = Vec::new();
    let start = |rounds: &str| [(); 2].map(|()| process(module, place, log, rounds));
    let (to_die, others) = (start("1000"), start("3"));
    for mut child in to_die.into_iter().rev() {
        wait_until("it has its turn", || begins(child.id()) > 0);
        // Kill it while it holds the lock or soon after.
        child.kill().expect("kill it");
        child.wait().expect("its end");
        killed.push(child.id());
    }
    for mut child in others {
        let ended = child.wait().expect("its end");
        assert!(ended.success(), "{}", place.url);
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
