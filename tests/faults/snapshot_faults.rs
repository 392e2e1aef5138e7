//! A store that fails while a live etcd is saved into it: every call of a run fails in every way. Every
//! published object is complete, everything reported as saved is saved, and the next run completes the work.

use crate::support::etcd::{self, Etcd, EtcdVersion};
use crate::support::faults::{self, Fault, FaultStore};
use crate::support::hooked_store::{Hooked, Hooks, Inner};
use crate::support::made_backups::{Objects, in_memory, objects_of};
use crate::support::{self, bucket_store, scratch};
use deltafold::backup::codec::CompressionChoice;
use deltafold::base::Cancel;
use deltafold::error::Result;
use deltafold::etcd::connect::Connector;
use deltafold::mvcc::{KeepHistory, KeyRange};
use deltafold::ops::list;
use deltafold::ops::report::Report;
use deltafold::ops::snapshot::{
    DeltaOptions, MetricsReporter, SnapshotSettings, TakenSnapshots, delta, full,
};
use deltafold::prefix::Context;
use deltafold::prefix::identity::IDENTITY;
use deltafold::prefix::open::State;
use deltafold::prefix::scan::{Depth, scan};
use deltafold::prefix::select::StateRequest;
use deltafold::store::exclude::ExcludeTags;
use deltafold::{Error, Reason};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStoreExt as _, PutOptions, PutPayload, PutResult};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::Runtime;

#[derive(Clone, Copy, Debug)]
enum Kind {
    Full,
    Delta,
}

struct Bench {
    runtime: Runtime,
    endpoint: String,
    /// The content of the store before each run.
    objects: Objects,
    takes_over: bool,
}

impl Bench {
    fn place(&self) -> Arc<InMemory> {
        in_memory(&self.objects)
    }

    fn context(&self, faults: &FaultStore, cancel: &Cancel) -> Context {
        let store = bucket_store(&self.runtime, faults.clone(), ExcludeTags::metadata());
        support::context(store.with_cancel(cancel.clone()), 2)
    }

    fn run(&self, kind: Kind, faults: &FaultStore) -> Result<Report<TakenSnapshots>> {
        let cancel = Cancel::default();
        faults.cancels(&cancel);
        self.save(kind, &self.context(faults, &cancel), cancel)
    }

    fn save(&self, kind: Kind, ctx: &Context, cancel: Cancel) -> Result<Report<TakenSnapshots>> {
        let endpoints = etcd::without_tls(vec![self.endpoint.clone()]);
        let settings = SnapshotSettings {
            connector: Connector::new(endpoints, self.runtime.handle().clone(), cancel)?,
            compression: CompressionChoice::Same,
            bandwidth: None,
            leases: None,
            take_over: self.takes_over,
        };
        let options = DeltaOptions {
            max_bytes: 10_000,
            max_full_age: Duration::ZERO,
        };
        match kind {
            Kind::Full => full(ctx, &settings, false, &MetricsReporter::default()),
            Kind::Delta => delta(ctx, &settings, options, &MetricsReporter::default()),
        }
    }

    /// Returns the newest restorable revision and its HashKV, compacted there. Asserts that nothing is damaged.
    fn state(&self, store: &Arc<InMemory>, after: &str) -> (i64, u32) {
        let faults = FaultStore::new(store.clone(), Vec::new());
        let ctx = self.context(&faults, &Cancel::default());
        let listed = list::run(&ctx, list::Options { deep: true }).unwrap();
        let problems: Vec<_> = listed.problems.iter().map(|p| p.reason).collect();
        assert!(problems.is_empty(), "{after}: {:?}", listed.problems);
        let scan = scan(&ctx, Depth::Doubtful).unwrap();
        let source = State::open(&ctx, &scan, &StateRequest::default());
        let source = source.unwrap_or_else(|e| panic!("{after}: {e}"));
        let compact = source.compact_revision(&ctx, KeepHistory::Latest).unwrap();
        let (fold, _) = source.fold(&ctx, compact, KeyRange::All, false).unwrap();
        let hash = fold.finish(&source.db, |_| Ok(())).unwrap();
        (source.revision.0, hash.hash)
    }
}

fn visible(objects: Objects) -> Objects {
    let staged = |path: &String| path.starts_with("deltafold-staging");
    objects.into_iter().filter(|(p, _)| !staged(p)).collect()
}

fn every_call_fails(kind: Kind) {
    let runtime = Runtime::new().unwrap();
    let folder = scratch::folder().unwrap();
    let _within = runtime.enter();
    let etcd = Etcd::start(EtcdVersion::V3_6, folder.path());
    let kv = runtime.block_on(etcd.kv());
    let put = |n: usize| {
        runtime.block_on(async {
            for i in 0..n {
                let (key, value) = (format!("/k/{}", i % 17), vec![i as u8; 500]);
                kv.clone().put(key, value, None).await.unwrap();
            }
        });
    };
    put(20);
    let mut bench = Bench {
        endpoint: etcd.endpoint().to_owned(),
        objects: Objects::new(),
        takes_over: false,
        runtime: Runtime::new().unwrap(),
    };
    // A full and a delta are there, and more than one delta will follow.
    let prepared = bench.place();
    let none = || FaultStore::new(prepared.clone(), Vec::new());
    bench.run(Kind::Delta, &none()).unwrap();
    put(7);
    bench.run(Kind::Delta, &none()).unwrap();
    bench.objects = bench.runtime.block_on(objects_of(&prepared));
    // The identity is beside them.
    let snapshots = bench.objects.keys().filter(|p| p.starts_with("v2/"));
    assert_eq!(snapshots.count(), 2);
    put(40);

    let clean = bench.place();
    let faults = FaultStore::new(clean.clone(), Vec::new());
    let outcome = bench.run(kind, &faults).unwrap();
    let revision = runtime.block_on(etcd.revision());
    assert_eq!(outcome.revision.0, revision);
    let right = bench.state(&clean, "a clean run");
    assert_eq!(right.0, revision);
    let named = outcome.snapshots.len();
    assert_eq!(
        named,
        match kind {
            // The changes since the last delta come first.
            Kind::Full => 2,
            Kind::Delta => 4,
        }
    );

    let (runs, failed) = faults::every_call_fails(&faults, |strike| {
        // Deleting the snapshots of others is not a fault of the store.
        if strike.fault == Fault::Gone {
            return None;
        }
        let what = format!("{kind:?}: {strike:?}");
        let place = bench.place();
        let faults = FaultStore::new(place.clone(), vec![strike.planned]);
        let result = bench.run(kind, &faults);
        let left = visible(bench.runtime.block_on(objects_of(&place)));
        for (path, bytes) in &bench.objects {
            assert!(
                left.get(path) == Some(bytes),
                "{what}: {path} is not as it was"
            );
        }
        match &result {
            Ok(outcome) => {
                assert_eq!(outcome.revision.0, revision, "{what}");
                assert_eq!(bench.state(&place, &what), right, "{what}");
            }
            Err(e) => {
                // The identity has no checksum: damage makes it another identity, or none.
                let of_identity = [Reason::Configuration, Reason::OtherCluster];
                if strike.path != IDENTITY || !of_identity.contains(&e.reason()) {
                    assert_failure(e, &what);
                }
                // Every published object is complete and ends with a whole transaction.
                let (reached, _) = bench.state(&place, &what);
                assert!(reached <= revision, "{what}");
            }
        }
        let again = FaultStore::new(place.clone(), Vec::new());
        let again = bench.run(Kind::Delta, &again);
        let again = again.unwrap_or_else(|e| panic!("{what}, then: {e}"));
        assert_eq!(again.revision.0, revision, "{what}, then");
        assert_eq!(bench.state(&place, &what), right, "{what}, then");
        Some(result.is_err())
    });
    assert!(failed > runs / 3, "{failed} of {runs}");
}

/// A fault of the store is reported as one.
fn assert_failure(e: &Error, what: &str) {
    let told = [
        Reason::StoreUnreachable,
        Reason::PermissionDenied,
        Reason::NoSpace,
        Reason::SnapshotVanished,
        Reason::Io,
        Reason::Terminated,
        Reason::NoSnapshots,
    ];
    assert!(told.contains(&e.reason()), "{what}: {e} [{}]", e.reason());
}

/// Another writer, who puts a full under the name for which the first record of a history was written.
#[derive(Clone, Debug, Default)]
struct Faster(Arc<Mutex<Option<String>>>);

impl Hooks for Faster {
    async fn put(
        &self,
        inner: &Inner,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> object_store::Result<PutResult> {
        if let Some(name) = path.as_ref().strip_prefix("deltafold-timelines/") {
            let is_first = self.0.lock().unwrap().replace(name.to_owned()).is_none();
            if is_first {
                let theirs = Path::from(format!("v2/{name}"));
                inner.put(&theirs, "theirs".into()).await?;
            }
        }
        inner.put_opts(path, payload, options).await
    }
}

#[test]
fn a_history_begins_with_our_full_though_another_writer_takes_its_name() {
    let runtime = Runtime::new().unwrap();
    let folder = scratch::folder().unwrap();
    let _within = runtime.enter();
    let store = Arc::new(InMemory::new());
    let hooks = Faster::default();
    let mut full = String::new();
    for nth in 0..2 {
        let etcd = Etcd::start(EtcdVersion::V3_6, &folder.path().join(nth.to_string()));
        let kv = runtime.block_on(etcd.kv());
        for i in 0..10 {
            let key = format!("/{nth}/{i}");
            runtime.block_on(kv.clone().put(key, "a", None)).unwrap();
        }
        let bench = Bench {
            endpoint: etcd.endpoint().to_owned(),
            objects: Objects::new(),
            takes_over: true,
            runtime: Runtime::new().unwrap(),
        };
        let hooked = Hooked {
            inner: store.clone(),
            hooks: hooks.clone(),
        };
        let place = bucket_store(&bench.runtime, hooked, ExcludeTags::metadata());
        let ctx = support::context(place, 2);
        let outcome = bench.save(Kind::Full, &ctx, Cancel::default()).unwrap();
        assert_eq!(outcome.timeline_began, nth == 1);
        full = outcome.snapshots.last().unwrap().name.clone();
    }
    assert_eq!(hooks.0.lock().unwrap().as_deref(), Some(full.as_str()));
    let objects = runtime.block_on(objects_of(&store));
    let fulls = objects.keys().filter(|path| path.starts_with("v2/Full-"));
    assert_eq!(fulls.count(), 3);
}

#[test]
fn every_call_of_a_full() {
    every_call_fails(Kind::Full);
}

#[test]
fn every_call_of_deltas() {
    every_call_fails(Kind::Delta);
}
