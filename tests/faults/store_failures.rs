//! `compact` on stores that fail: every call fails in every way, objects vanish, conditions are ignored.

use crate::support::conformance::runtime;
use crate::support::faults::{self, Call, Fault, FaultStore, Strike, at};
use crate::support::made_backups::{BASE, Bucket, LAST, Objects, T0, paths};
use crate::support::minio::Minio;
use crate::support::place::Place;
use crate::support::proxy::{Effect, Proxy, Timing};
use crate::support::{self, deltafold, expected, run_json, scratch};
use deltafold::backup::catalog::mark_of;
use deltafold::ops::compact::{Compacted, Options, run};
use deltafold::ops::report::{Report, Status};
use deltafold::store::exclude::ExcludeTags;
use deltafold::store::{LookFirst, Store};
use deltafold::{Error, Reason};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use std::fs;
use std::io::Read;
use tokio::runtime::Runtime;

/// A backup and what is known about its result.
struct Sample {
    objects: Objects,
    compression: &'static str,
    hash: u32,
    /// The path of the result.
    path: String,
    full: Vec<u8>,
}

impl Sample {
    fn new(bucket: &Bucket, compression: &'static str) -> Self {
        let objects = bucket.objects();
        let outcome = bucket.compact(&["--compression", compression]);
        let path = format!("v2/{}", outcome["snapshot"].as_str().unwrap());
        Sample {
            objects,
            compression,
            hash: outcome["hash_kv"].as_u64().unwrap() as u32,
            full: fs::read(bucket.path().join(&path)).unwrap(),
            path,
        }
    }

    /// The result is put by one request into an object store.
    fn small() -> Self {
        let bucket = Bucket::with_base();
        bucket.delta(BASE + 1, 1499, 6);
        bucket.delta(1500, LAST, 9);
        let sample = Self::new(&bucket, "same");
        let etcd = expected(crate::support::made_backups::FIXTURE);
        assert_eq!(sample.hash, etcd.compacted_at_last_revision.hash);
        sample
    }

    /// The result is uploaded in two parts.
    fn large() -> Self {
        let bucket = Bucket::with_base();
        bucket.delta(BASE + 1, LAST, 6);
        bucket.noise_delta(18);
        let sample = Self::new(&bucket, "none");
        assert!((9 << 20..16 << 20).contains(&sample.full.len()));
        sample
    }

    fn with_result(&self) -> Objects {
        let mut all = self.objects.clone();
        all.insert(self.path.clone(), self.full.clone());
        all
    }

    fn options(&self) -> Options {
        Options {
            compression: self.compression.parse().unwrap(),
            ..Options::default()
        }
    }
}

fn put(rt: &Runtime, store: &dyn ObjectStore, path: &str, bytes: &[u8]) {
    let path = Path::from(path);
    rt.block_on(store.put(&path, bytes.to_vec().into()))
        .unwrap();
}

fn tags(place: &Place) -> ExcludeTags {
    match place {
        Place::Memory(_) => ExcludeTags::metadata(),
        Place::Folder(_) | Place::Server(_) => ExcludeTags::none(),
    }
}

impl Place {
    fn run(
        &self,
        rt: &Runtime,
        faults: &FaultStore,
        options: &Options,
    ) -> Result<Report<Compacted>, Error> {
        let store = self.store(rt, faults, tags(self));
        faults.cancels(store.cancel());
        compact(store, options)
    }

    /// Asserts that a run without faults makes the right result and leaves nothing else.
    fn mends(&self, rt: &Runtime, sample: &Sample, after: &str) {
        let faults = FaultStore::new(self.inner(), Vec::new());
        let outcome = self.run(rt, &faults, &sample.options());
        let outcome = outcome.unwrap_or_else(|e| panic!("{after}, then: {e}"));
        assert_eq!(outcome.hash_kv, Some(sample.hash), "{after}");
        self.is(rt, &sample.with_result(), after);
    }

    #[track_caller]
    fn is(&self, rt: &Runtime, objects: &Objects, after: &str) {
        let found = self.objects(rt);
        assert_eq!(paths(&found), paths(objects), "{after}");
        assert!(found == *objects, "{after}: contents differ");
    }
}

fn compact(store: Store, options: &Options) -> Result<Report<Compacted>, Error> {
    run(&support::context(store, 2), options)
}

/// Returns the allowed reasons for a fault; none: the run must succeed. `result` is the path of the result, which this
/// run writes.
fn outcome_of(call: Call, path: &str, result: &str, fault: Fault) -> Vec<Reason> {
    let is_result = path == result;
    let reason = match (call, fault) {
        // A failure of the clean-up fails no run.
        (Call::Delete | Call::Abort, _) => return Vec::new(),
        (_, Fault::Hang) => Reason::Terminated,
        // A further attempt.
        (Call::Put | Call::Complete, Fault::ServerError | Fault::Timeout | Fault::Throttled)
            if is_result =>
        {
            return Vec::new();
        }
        // Only the response is lost.
        (Call::Put | Call::Complete, Fault::LostAnswer | Fault::LostThenRefused) => {
            return Vec::new();
        }
        // The listing of the whole prefix is refused: the folders in it are listed.
        (Call::List, Fault::Denied) if path.is_empty() => return Vec::new(),
        (_, Fault::Denied) => Reason::PermissionDenied,
        (_, Fault::Full) => Reason::NoSpace,
        (Call::List, Fault::NotFound) => Reason::NoSnapshots,
        // No tags, or a free name.
        (Call::Head, Fault::NotFound) => return Vec::new(),
        (_, Fault::NotFound | Fault::Gone) => Reason::SnapshotVanished,
        (Call::Body, Fault::Flipped) => {
            return Reason::ALL
                .iter()
                .copied()
                .filter(|r| r.is_bad_data())
                .collect();
        }
        _ => Reason::StoreUnreachable,
    };
    vec![reason]
}

/// For each call of a clean run that `wanted` selects, and each fault: the outcome is as expected, nothing is
/// lost or half-written, and a run without faults completes the work.
fn every_call_fails(
    sample: &Sample,
    place: fn(&Objects) -> Place,
    wanted: impl Fn(Call, &str) -> bool,
) {
    let rt = runtime();
    let clean = place(&sample.objects);
    let faults = FaultStore::new(clean.inner(), Vec::new());
    clean.run(&rt, &faults, &sample.options()).unwrap();
    clean.is(&rt, &sample.with_result(), "a clean run");
    let (runs, failed) = faults::every_call_fails(&faults, |strike| {
        let &Strike { call, fault, .. } = strike;
        if fault == Fault::Gone || !wanted(call, &strike.path) {
            return None;
        }
        let what = format!("{strike:?}");
        let place = place(&sample.objects);
        let faults = FaultStore::new(place.inner(), vec![strike.planned]);
        let result = place.run(&rt, &faults, &sample.options());
        let reasons = outcome_of(call, &strike.path, &sample.path, fault);
        match &result {
            Ok(outcome) => {
                assert!(reasons.is_empty(), "{what} was not noticed");
                assert_eq!(outcome.status, Status::Succeeded, "{what}");
                assert_eq!(outcome.hash_kv, Some(sample.hash), "{what}");
                // The result of a write whose answer was lost is found, not written again.
                let written = [0, sample.full.len() as u64];
                assert!(written.contains(&outcome.bytes_written), "{what}");
            }
            Err(e) => {
                let reason = e.reason();
                assert!(reasons.contains(&reason), "{what}: {e} [{reason}]");
            }
        }
        let is_of_upload = matches!(call, Call::Part | Call::Complete);
        if result.is_err() && fault != Fault::Flipped && is_of_upload {
            let mut calls = faults.calls().into_iter();
            let is_given_up = calls.any(|(c, _)| c == Call::Abort);
            assert!(is_given_up, "{what} was not given up");
        }
        let mut left = place.objects(&rt);
        let named = left.remove(&sample.path);
        assert!(left == sample.objects, "{what}: {:?}", left.keys());
        assert!(
            named.as_ref().is_none_or(|full| *full == sample.full),
            "{what}: what has the name is not the result"
        );
        assert!(result.is_err() || named.is_some(), "{what}");
        place.mends(&rt, sample, &what);
        Some(result.is_err())
    });
    assert!(failed > 20, "{failed} of {runs}: hardly a fault struck");
}

#[test]
fn every_call_of_a_run_in_an_object_store() {
    every_call_fails(&Sample::small(), Place::memory, |_, _| true);
}

#[test]
fn every_call_of_a_run_in_a_local_folder() {
    every_call_fails(&Sample::small(), Place::folder, |_, _| true);
}

#[test]
fn every_call_of_an_upload_in_parts() {
    let of_upload = |call, _: &str| {
        matches!(
            call,
            Call::Multipart | Call::Part | Call::Complete | Call::Abort | Call::Head
        )
    };
    every_call_fails(&Sample::large(), Place::memory, of_upload);
}

#[test]
fn an_upload_that_fails_and_cannot_be_given_up() {
    let (rt, sample) = (runtime(), Sample::large());
    for fault in Fault::of(Call::Abort) {
        let place = Place::memory(&sample.objects);
        let strikes = [
            at(Call::Part, 1, Fault::ServerError),
            at(Call::Abort, 0, fault),
        ];
        let faults = FaultStore::new(place.inner(), strikes.to_vec());
        let e = place.run(&rt, &faults, &sample.options()).unwrap_err();
        assert_eq!(e.reason(), Reason::StoreUnreachable, "{fault:?}: {e}");
        place.mends(&rt, &sample, &format!("{fault:?}"));
    }
}

#[test]
fn a_snapshot_deleted_while_the_job_runs() {
    let (rt, sample) = (runtime(), Sample::small());
    let inputs: Vec<&String> = sample.objects.keys().collect();
    for (place, in_order) in [
        (Place::memory as fn(&Objects) -> Place, false),
        (Place::folder, true),
    ] {
        for nth in 0..inputs.len() {
            let here = place(&sample.objects);
            let strike = at(Call::Get, nth, Fault::Gone);
            let faults = FaultStore::new(here.inner(), vec![strike]);
            let e = here.run(&rt, &faults, &sample.options()).unwrap_err();
            assert_eq!(e.reason(), Reason::SnapshotVanished, "{e}");
            // On object stores, fetches run concurrently, so which one is first is open. In a folder it is the
            // full.
            let gone = inputs.iter().position(|i| e.to_string().contains(*i));
            let gone = gone.unwrap_or_else(|| panic!("{e}"));
            assert!(!in_order || (gone == 0) == (nth == 0), "{e}");
            let input = inputs[gone];
            let mut left = sample.objects.clone();
            left.remove(input);
            here.is(&rt, &left, input);
            // The next run works with what is left: the fold up to the hole, a gap, or no base.
            let faults = FaultStore::new(here.inner(), Vec::new());
            let next = here.run(&rt, &faults, &sample.options());
            let next = next.map(|o| o.revision.0).map_err(|e| e.reason());
            let expected = match gone {
                0 => Err(Reason::NoSnapshots),
                1 => Err(Reason::RevisionGap),
                _ => Ok(1499),
            };
            assert_eq!(next, expected, "without {input}");
        }
    }
}

#[test]
fn a_local_file_that_is_cut_short_while_it_is_read() {
    let rt = runtime();
    let folder = scratch::folder_named("bucket-").unwrap();
    let file = folder.path().join("object");
    fs::write(&file, vec![7; 8 << 20]).unwrap();
    let url = folder.path().to_str().unwrap();
    let store = deltafold::store::open(url, &[], rt.handle().clone()).unwrap();
    let mut object = store.read("object");
    let mut first = [0; 1];
    object.read_exact(&mut first).unwrap();
    fs::File::options()
        .write(true)
        .open(&file)
        .unwrap()
        .set_len(4 << 20)
        .unwrap();
    let e = std::io::copy(&mut object, &mut std::io::sink()).unwrap_err();
    assert_eq!(Error::io("", e).reason(), Reason::StoreUnreachable);
}

/// Some servers accept conditional writes and ignore the condition: the look before the write keeps a taken name.
#[test]
fn conditions_that_are_ignored() {
    let (rt, sample) = (runtime(), Sample::small());
    let here = Place::memory(&sample.objects);
    // Another object has the name; it is not a snapshot of this history.
    let mut expected = sample.objects.clone();
    for (path, bytes) in [
        (sample.path.clone(), b"another's".to_vec()),
        (mark_of(&sample.path), Vec::new()),
    ] {
        put(&rt, &here.inner(), &path, &bytes);
        expected.insert(path, bytes);
    }
    let faults = FaultStore::new(here.inner(), Vec::new()).that_ignores_conditions();
    let store = here
        .store(&rt, &faults, tags(&here))
        .with_look_first(LookFirst::Always);
    compact(store, &sample.options()).unwrap();
    let next = format!("v2/Full-00000000-{LAST:08}-{}.gz", T0 + 11);
    expected.insert(next, sample.full.clone());
    here.is(&rt, &expected, "a name that was taken");

    for round in 0..10 {
        let here = Place::memory(&sample.objects);
        let faults = FaultStore::new(here.inner(), Vec::new()).that_ignores_conditions();
        std::thread::scope(|scope| {
            let start = || scope.spawn(|| here.run(&rt, &faults, &sample.options()).unwrap());
            for job in [start(), start(), start()] {
                assert_eq!(job.join().unwrap().hash_kv, Some(sample.hash), "{round}");
            }
        });
        here.is(&rt, &sample.with_result(), "Jobs at once");
    }
}

/// The client's own retries on a real server: an effect of the first try must not be mistaken for a conflict.
#[test]
fn every_answer_of_minio_is_lost_once() {
    let rt = runtime();
    let minio = Minio::start();
    for (name, sample) in [("small", Sample::small()), ("large", Sample::large())] {
        rt.block_on(minio.create_bucket(name));
        let store = minio.store(name);
        for (path, bytes) in &sample.objects {
            put(&rt, &*store, path, bytes);
        }
        let here = Place::Server(store.clone());
        let proxy = Proxy::start(minio.endpoint());
        let run = || {
            let mut c = deltafold();
            c.envs(minio.env()).env("AWS_ENDPOINT_URL", proxy.url());
            c.args(["compact", "--compression", sample.compression]);
            c.args(["--output", "json", "--store", &format!("s3://{name}")]);
            run_json(&mut c)
        };
        let (mut nth, mut requests) = (None, Vec::new());
        while nth.is_none_or(|n| n < requests.len()) {
            if let Some(nth) = nth {
                proxy.inject(|_| true, nth, 1, Timing::After, Effect::Break);
            }
            let (code, json, stderr) = run();
            let seen = proxy.take().requests;
            assert!(proxy.all_faults_struck());
            let what = match nth {
                None => "a clean run".to_owned(),
                Some(n) => format!("the answer lost to {}", seen[n]),
            };
            assert_eq!(code, 0, "{what}: {stderr}");
            assert_eq!(json["hash_kv"], sample.hash, "{what}");
            let written = json["bytes_written"].as_u64().unwrap();
            assert!([0, sample.full.len() as u64].contains(&written), "{what}");
            here.is(&rt, &sample.with_result(), &what);
            rt.block_on(store.delete(&Path::from(sample.path.as_str())))
                .unwrap();
            if nth.is_none() {
                requests = seen;
            }
            nth = Some(nth.map_or(0, |n| n + 1));
        }
        println!("{} answers were lost", requests.len());
        assert!(requests.len() >= 7, "{}", requests.len());
    }
}
