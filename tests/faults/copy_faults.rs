//! Copies that fail: every call on either side fails in every way, processes are killed, snapshots vanish, two
//! copies run at once. At every moment each delta in the target has its base (in a large plan, its full), and a
//! rerun completes the copy.

use crate::support::conformance::runtime;
use crate::support::faults::{self, Call, Fault, FaultStore, PlannedFault, Strike, at};
use crate::support::history::{Compression, with_checksum};
use crate::support::made_backups::{Objects, paths};
use crate::support::orphan_deltas::{baseless, catalog};
use crate::support::place::Place;
use crate::support::{self};
use deltafold::Reason;
use deltafold::backup::Catalog;
use deltafold::ops::copy::plan::{Encryption, Selection};
use deltafold::ops::copy::{CopiedBackup, CopyStatus, Options, run};
use deltafold::ops::report::{Report, Status};
use deltafold::prefix::Context;
use deltafold::store::exclude::ExcludeTags;
use deltafold::store::{Keys, Store};
use futures::FutureExt;
use object_store::ObjectStoreExt;
use object_store::path::Path;
use std::io::Write;
use std::time::Duration;
use tokio::runtime::Runtime;

pub const STAGING: &str = "deltafold-staging/";
const IDENTITY: &str = "deltafold-identity.json";
/// An identity as deltafold writes it: `copy` writes the same bytes.
const RECORDED: &str = r#"{
  "clusterId": "cafe",
  "memberNames": [],
  "recordedAt": "",
  "formerClusterIds": []
}
"#;

/// A snapshot of noise: `copy` checks only the checksum of its content.
fn noise(bytes: usize, compression: Compression) -> Vec<u8> {
    let mut payload = vec![0; bytes];
    fastrand::Rng::with_seed(bytes as u64).fill(&mut payload);
    compression.pack(&with_checksum(&payload))
}

/// Both layouts, two histories, a pin, an identity.
pub fn small() -> Objects {
    let mut all = Objects::new();
    let mut put = |path: &str, bytes: &[u8]| drop(all.insert(path.to_owned(), bytes.to_vec()));
    for (n, path) in [
        "v1/Backup-500/Full-00000000-00000050-500",
        "v1/Backup-500/Incr-00000051-00000100-600",
        "v2/Full-00000000-00000100-1000.gz",
        "v2/Incr-00000101-00000110-1001.gz",
        "v2/Incr-00000111-00000120-1002.gz",
        "v2/Full-00000000-00000105-1003.gz",
        "v2/Incr-00000106-00000115-1004.gz",
        "v2/Full-00000000-00000115-1005.gz.final",
    ]
    .into_iter()
    .enumerate()
    {
        let compression = match path.contains(".gz") {
            true => Compression::Gzip,
            false => Compression::None,
        };
        put(path, &noise(1000 + n, compression));
    }
    put(
        "deltafold-timelines/Full-00000000-00000105-1003.gz",
        b"begins",
    );
    put(
        "deltafold-pins/Full-00000000-00000100-1000.gz",
        br#"{"reason": "audit"}"#,
    );
    put(IDENTITY, RECORDED.as_bytes());
    all
}

/// A full that is uploaded in two parts, and a delta.
pub fn large() -> Objects {
    Objects::from([
        (
            "v2/Full-00000000-00000100-1000".to_owned(),
            noise(10 << 20, Compression::None),
        ),
        (
            "v2/Incr-00000101-00000110-1001".to_owned(),
            noise(3000, Compression::None),
        ),
    ])
}

/// A full and its deltas: a large plan.
pub fn wide() -> Objects {
    let full = "v2/Full-00000000-00000100-1000".to_owned();
    let mut all = Objects::from([(full, noise(5000, Compression::None))]);
    for n in 0..WIDE {
        all.insert(wide_delta(n), noise(1000 + n, Compression::None));
    }
    all
}

/// The number of deltas in [`wide`].
pub const WIDE: usize = 100;

pub fn wide_delta(n: usize) -> String {
    let revision = 101 + n;
    format!("v2/Incr-{revision:08}-{revision:08}-{}", 1001 + n)
}

pub fn options(encryption: Encryption) -> Options {
    Options {
        selection: Selection {
            encryption,
            ..Selection::default()
        },
        parallel: 3,
        wait_for_final: None,
        interval: Duration::from_millis(1),
        series: None,
        take_over: false,
        dry_run: false,
    }
}

pub struct Sides<'r> {
    pub rt: &'r Runtime,
    pub source: Place,
    pub target: Place,
    pub from: FaultStore,
    pub to: FaultStore,
    /// Returns what must not be visible.
    pub useless: fn(&Catalog) -> Vec<String>,
    pub keys: Keys,
}

impl<'r> Sides<'r> {
    pub fn new(
        rt: &'r Runtime,
        source: &Place,
        target: &Place,
        strikes: [Vec<PlannedFault>; 2],
    ) -> Self {
        let [from, to] = strikes;
        Sides {
            rt,
            source: source.clone(),
            target: target.clone(),
            from: FaultStore::new(source.inner(), from),
            to: FaultStore::new(target.inner(), to),
            useless: baseless,
            keys: Keys::default(),
        }
    }

    pub fn run(&self, options: &Options) -> deltafold::Result<Report<CopiedBackup>> {
        let shown = self.target.watched(&self.to, self.useless);
        let one = |store: Store| store.with_requests(options.parallel);
        let from = one(self.source.store(self.rt, &self.from, ExcludeTags::none()));
        let to = one(self.target.store(self.rt, &self.to, ExcludeTags::none()))
            .with_cancel(from.cancel().clone());
        self.from.cancels(from.cancel());
        self.to.cancels(from.cancel());
        let context = |store| Context {
            keys: self.keys.clone(),
            ..support::context(store, 2)
        };
        let ended = run(&context(from), &context(to), options);
        let mut shown = shown.lock().unwrap().clone();
        shown.extend((self.useless)(&catalog(&self.target.paths())));
        assert_eq!(shown, [""; 0], "shown without a base");
        ended
    }
}

/// Returns the reasons with which a fault may end; none: the copy must succeed.
fn allowed(side: usize, call: Call, fault: Fault) -> Vec<Reason> {
    match fault {
        Fault::Hang => vec![Reason::Terminated],
        Fault::Denied => vec![Reason::PermissionDenied],
        Fault::Full => vec![Reason::NoSpace, Reason::PartlyDone],
        Fault::Flipped if side == 0 && call == Call::Body => vec![Reason::CorruptSnapshot],
        Fault::Flipped => vec![Reason::Io, Reason::PartlyDone],
        Fault::NotFound if call == Call::List => vec![Reason::NoSnapshots],
        // A second listing settles it.
        Fault::NotFound | Fault::Gone => vec![Reason::SnapshotVanished, Reason::PartlyDone],
        _ => vec![Reason::StoreUnreachable, Reason::PartlyDone],
    }
}

/// For each call of a clean run and each fault: the result is as expected, the target has only bytes of the
/// source, no delta is visible without its base, and a run without faults completes the copy.
fn every_call_fails(
    objects: &Objects,
    place: fn(&Objects) -> Place,
    encryption: Encryption,
    expected: Option<&Objects>,
    wanted: impl Fn(usize, Call, &str) -> bool,
) {
    let rt = runtime();
    // One request at a time, so that the n-th call is always the same.
    let options = Options {
        parallel: 1,
        ..options(encryption)
    };
    let source = place(objects);
    let clean = place(&Objects::new());
    let sides = Sides::new(&rt, &source, &clean, Default::default());
    let outcome = sides.run(&options).unwrap();
    assert_eq!((outcome.status, outcome.failed), (Status::Succeeded, 0));
    let all = clean.objects(&rt);
    if let Some(expected) = expected {
        assert_eq!(paths(&all), paths(expected));
        assert!(all == *expected, "contents differ");
    }
    let mut failed = 0;
    for (side, faults) in [&sides.from, &sides.to].into_iter().enumerate() {
        let (_, of_side) = faults::every_call_fails(faults, |strike| {
            let &Strike { call, fault, .. } = strike;
            // A store that denies an object's existence, or a flipped bit in an object without checksum, goes
            // unnoticed.
            let is_unnoticed = matches!(fault, Fault::NotFound | Fault::Flipped)
                && matches!(call, Call::Get | Call::Body)
                && !strike.path.starts_with('v');
            // Objects deleted from the source have their own test.
            if is_unnoticed || fault == Fault::Gone || !wanted(side, call, &strike.path) {
                return None;
            }
            let what = format!("side {side}, {strike:?}");
            let target = place(&Objects::new());
            let mut strikes = [Vec::new(), Vec::new()];
            strikes[side].push(strike.planned);
            let struck = Sides::new(&rt, &source, &target, strikes);
            let (reason, message) = match &struck.run(&options) {
                Ok(o) => (
                    o.reason(),
                    o.failure
                        .as_ref()
                        .map(ToString::to_string)
                        .unwrap_or_default(),
                ),
                Err(e) => (Some(e.reason()), e.to_string()),
            };
            if let Some(reason) = reason {
                let is_allowed = allowed(side, call, fault).contains(&reason);
                assert!(is_allowed, "{what}: {message} [{reason}]");
            }
            let mut left = target.objects(&rt);
            left.retain(|path, _| !path.starts_with(STAGING));
            for (path, bytes) in &left {
                assert!(all.get(path) == Some(bytes), "{what}: {path} is wrong");
            }
            if reason.is_none() {
                assert_eq!(left.len(), all.len(), "{what}: {:?}", left.keys());
            }
            let again = Sides::new(&rt, &source, &target, Default::default());
            let o = again.run(&options);
            let o = o.unwrap_or_else(|e| panic!("{what}, then {e}"));
            assert_eq!(o.reason(), None, "{what}, then {:?}", o.failure);
            let now = target.objects(&rt);
            assert_eq!(paths(&now), paths(&all), "{what}, then a rerun");
            assert!(now == all, "{what}: contents differ");
            Some(reason.is_some())
        });
        failed += of_side;
    }
    assert!(failed > 20, "{failed}: hardly a fault struck");
}

#[test]
fn every_call_of_a_copy_between_object_stores() {
    let objects = small();
    every_call_fails(
        &objects,
        Place::memory,
        Encryption::Keep,
        Some(&objects),
        |_, _, _| true,
    );
}

#[test]
fn every_call_of_a_copy_between_folders() {
    let objects = small();
    every_call_fails(
        &objects,
        Place::folder,
        Encryption::Keep,
        Some(&objects),
        |_, _, _| true,
    );
}

#[test]
fn every_call_of_an_upload_in_parts() {
    let objects = large();
    let of_upload = |side, call, path: &str| match side {
        0 => matches!(call, Call::Get | Call::Body),
        _ => path.starts_with('v') && !matches!(call, Call::List | Call::Delete),
    };
    every_call_fails(
        &objects,
        Place::memory,
        Encryption::Keep,
        Some(&objects),
        of_upload,
    );
}

/// The source is compacted and cleared while it is copied. A second listing settles what is gone, and new
/// snapshots are copied, too.
#[test]
fn a_source_that_is_cleared_meanwhile() {
    let rt = runtime();
    let mut objects = small();
    objects.retain(|path, _| path.starts_with('v'));
    let snapshots: Vec<&String> = objects.keys().collect();
    // Two reads of the identity come before them.
    for nth in 2..2 + snapshots.len() {
        let (source, target) = (Place::memory(&objects), Place::memory(&Objects::new()));
        let strike = at(Call::Get, nth, Fault::Meanwhile);
        let sides = Sides::new(&rt, &source, &target, [vec![strike], Vec::new()]);
        let store = source.inner();
        let new = "v2/Full-00000000-00000120-1006.gz".to_owned();
        let (full, bytes) = (new.clone(), noise(777, Compression::Gzip));
        let gone: Vec<String> = snapshots.iter().map(|p| (*p).clone()).collect();
        sides.from.meanwhile(move || {
            let full = Path::from(full.as_str());
            let put = store.put(&full, bytes.clone().into());
            put.now_or_never().unwrap().unwrap();
            for path in &gone {
                let path = Path::from(path.as_str());
                store.delete(&path).now_or_never().unwrap().unwrap();
            }
        });
        let o = sides.run(&options(Encryption::Keep)).unwrap();
        assert_eq!(o.reason(), None, "{nth}: {:?}", o.failure);
        assert!(o.rounds >= 2, "{nth}: {}", o.rounds);
        assert!(target.paths().contains(&new), "{nth}: {:?}", target.paths());
    }
}

/// A thread that panics fails its snapshot and blocks nobody.
#[test]
fn a_panic_is_a_failure_of_one_snapshot() {
    let (send, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let rt = runtime();
        let (source, target) = (Place::memory(&small()), Place::memory(&Objects::new()));
        // The first one is the identity's.
        let strike = at(Call::Put, 2, Fault::Meanwhile);
        let sides = Sides::new(&rt, &source, &target, [Vec::new(), vec![strike]]);
        sides.to.meanwhile(|| panic!("on purpose"));
        send.send(sides.run(&options(Encryption::Keep)).unwrap())
            .unwrap();
    });
    let o = ended
        .recv_timeout(Duration::from_secs(120))
        .expect("it waits for a thread that died");
    assert_eq!(o.reason(), Some(Reason::Internal), "{:?}", o.failure);
    assert_eq!(o.failed, 1);
    assert!(o.copied > 0);
}

/// Two clusters are copied to the same empty place at once: the slower one is refused and copies nothing.
#[test]
fn another_cluster_was_faster() {
    let rt = runtime();
    let (source, target) = (Place::memory(&small()), Place::memory(&Objects::new()));
    // The identity is written first.
    let strike = at(Call::Put, 0, Fault::Meanwhile);
    let sides = Sides::new(&rt, &source, &target, [Vec::new(), vec![strike]]);
    let store = target.inner();
    sides.to.meanwhile(move || {
        let (path, theirs) = (Path::from(IDENTITY), br#"{"clusterId": "beef"}"#.to_vec());
        let put = store.put(&path, theirs.into());
        put.now_or_never().unwrap().unwrap();
    });
    let e = sides.run(&options(Encryption::Keep)).unwrap_err();
    assert_eq!(e.reason(), Reason::OtherCluster, "{e}");
    assert_eq!(target.paths(), [IDENTITY]);
}

/// A snapshot of the source is damaged: it stays behind with everything that depends on it, and the rest is
/// copied.
#[test]
fn a_damaged_source() {
    let rt = runtime();
    let clean = small();
    for damaged in clean.keys().filter(|p| p.starts_with('v')) {
        let mut objects = clean.clone();
        let bytes = objects.get_mut(damaged).unwrap();
        let at = bytes.len() / 2;
        bytes[at] ^= 1;
        let (source, target) = (Place::memory(&objects), Place::memory(&Objects::new()));
        let sides = Sides::new(&rt, &source, &target, Default::default());
        let o = sides.run(&options(Encryption::Keep)).unwrap();
        assert_eq!(o.reason(), Some(Reason::CorruptSnapshot), "{damaged}");
        assert_eq!(
            (o.reason(), o.failed),
            (Some(Reason::CorruptSnapshot), 1),
            "{damaged}"
        );
        assert!(
            o.failure
                .as_ref()
                .unwrap()
                .to_string()
                .contains(damaged.as_str()),
            "{damaged}"
        );
        let there = target.objects(&rt);
        assert!(!there.contains_key(damaged), "{damaged}");
        for lost in o
            .objects
            .iter()
            .filter(|x| x.decision == CopyStatus::Skipped)
        {
            assert_eq!(lost.reason, "BaseNotCopied");
            assert!(lost.path.contains("/Incr-"), "{damaged}: {lost:?}");
        }
        let copied = o
            .objects
            .iter()
            .filter(|x| x.decision == CopyStatus::Copied);
        assert_eq!(copied.count() as u64, o.copied);
        assert!(o.copied >= 5, "{damaged}: {}", o.copied);
    }
}

/// A large full turns out to be damaged when its whole chain is uploaded and waits for it.
#[test]
fn a_chain_that_waits_for_a_damaged_full() {
    let mut full = noise(12 << 20, Compression::None);
    *full.last_mut().unwrap() ^= 1;
    let mut objects = Objects::from([("v2/Full-00000000-00000100-1000".to_owned(), full)]);
    for n in 101..113 {
        let path = format!("v2/Incr-{n:08}-{n:08}-{}", 900 + n);
        objects.insert(path, noise(n, Compression::None));
    }
    let (send, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let rt = runtime();
        let (source, target) = (Place::memory(&objects), Place::memory(&Objects::new()));
        let sides = Sides::new(&rt, &source, &target, Default::default());
        let o = sides.run(&options(Encryption::Keep)).unwrap();
        send.send((o, target.paths())).unwrap();
    });
    let (o, there) = ended
        .recv_timeout(Duration::from_secs(120))
        .expect("it waits for what never comes");
    assert_eq!(o.reason(), Some(Reason::CorruptSnapshot));
    let of_base = o.objects.iter().filter(|x| x.reason == "BaseNotCopied");
    assert_eq!((o.failed, of_base.count()), (1, 12));
    assert_eq!(there, [""; 0]);
}

/// A store that accepts conditions and ignores them: an existing object keeps its name.
#[test]
fn conditions_that_are_ignored() {
    let rt = runtime();
    let objects = small();
    let mut there = Objects::new();
    let taken = "v2/Full-00000000-00000100-1000.gz".to_owned();
    there.insert(taken.clone(), b"another's".to_vec());
    let (source, target) = (Place::memory(&objects), Place::memory(&there));
    let mut sides = Sides::new(&rt, &source, &target, Default::default());
    sides.to = sides.to.that_ignores_conditions();
    let o = sides.run(&options(Encryption::Keep)).unwrap();
    assert_eq!(o.reason(), Some(Reason::TargetExists), "{:?}", o.failure);
    assert_eq!(target.objects(&rt)[&taken], b"another's");
}

/// Another process gives the last name meanwhile, to the object of `theirs`. Returns the reason of the failure, if any.
fn taken_meanwhile(
    objects: &Objects,
    encryption: Encryption,
    keys: &Keys,
    theirs: &[u8],
) -> Option<Reason> {
    let rt = runtime();
    let (source, target) = (Place::memory(objects), Place::memory(&Objects::new()));
    // The first one is the identity's.
    let strike = at(Call::Put, 1, Fault::Meanwhile);
    let mut sides = Sides::new(&rt, &source, &target, [Vec::new(), vec![strike]]);
    sides.keys = keys.clone();
    let path = match encryption {
        Encryption::Encrypt => format!("{LAST_FULL}.age"),
        _ => LAST_FULL.to_owned(),
    };
    let (store, bytes) = (target.inner(), theirs.to_vec());
    let taken = Path::from(path.as_str());
    sides.to.meanwhile(move || {
        let put = store.put(&taken, bytes.clone().into());
        put.now_or_never().unwrap().unwrap();
    });
    let o = sides.run(&options(encryption)).unwrap();
    assert_eq!(target.objects(&rt)[&path], theirs);
    let last = o.objects.iter().find(|x| x.path == LAST_FULL).unwrap();
    let expected = match o.reason() {
        Some(_) => CopyStatus::Failed,
        None => CopyStatus::Kept,
    };
    assert_eq!(last.decision, expected);
    o.reason()
}

/// The last full of [`small`].
const LAST_FULL: &str = "v2/Full-00000000-00000115-1005.gz.final";

/// A name that is given to other bytes meanwhile: their content decides, encrypted or not.
#[test]
fn a_name_that_is_taken_meanwhile() {
    let objects = small();
    let encryption = Encryption::Keep;
    let mut same = objects[LAST_FULL].clone();
    // The operating system in gzip's header.
    same[9] ^= 1;
    let none = Keys::default();
    assert_eq!(taken_meanwhile(&objects, encryption, &none, &same), None);
    let other = &objects["v2/Full-00000000-00000105-1003.gz"];
    let taken = Some(Reason::TargetExists);
    assert_eq!(taken_meanwhile(&objects, encryption, &none, other), taken);

    let encryption = Encryption::Encrypt;
    let identity = age::x25519::Identity::generate();
    let recipients = vec![identity.to_public()];
    let blind = Keys::new(Vec::new(), recipients.clone());
    let seeing = Keys::new(vec![identity], recipients);
    let seal = |bytes: &[u8]| {
        let mut sealed = seeing.encrypt(Vec::new()).unwrap();
        sealed.write_all(bytes).unwrap();
        sealed.finish().unwrap()
    };
    let (same, other) = (seal(&objects[LAST_FULL]), seal(other));
    assert_eq!(taken_meanwhile(&objects, encryption, &seeing, &same), None);
    assert_eq!(
        taken_meanwhile(&objects, encryption, &seeing, &other),
        taken
    );
    // Without an identity, the name decides.
    assert_eq!(taken_meanwhile(&objects, encryption, &blind, &other), None);
}

#[test]
fn several_copy_at_once() {
    let rt = runtime();
    let objects = small();
    for place in [Place::memory, Place::folder] {
        for _ in 0..10 {
            let (source, target) = (place(&objects), place(&Objects::new()));
            std::thread::scope(|scope| {
                let copies: Vec<_> = (0..3)
                    .map(|_| {
                        let sides = Sides::new(&rt, &source, &target, Default::default());
                        scope.spawn(move || sides.run(&options(Encryption::Keep)).unwrap())
                    })
                    .collect();
                for copy in copies {
                    let o = copy.join().unwrap();
                    assert_eq!(o.reason(), None, "{:?}", o.failure);
                }
            });
            assert!(target.objects(&rt) == objects, "{:?}", target.paths());
        }
    }
}
