//! Small objects that are published by a single conditional PUT: the number of requests, and stores on which
//! that would not be safe.

use crate::support::conformance::runtime;
use crate::support::etcd::EtcdVersion;
use crate::support::faults::{Call, Fault, FaultStore, PlannedFault};
use crate::support::follower::QUICK;
use crate::support::lying_s3::{Lies, LyingServer};
use crate::support::minio::Minio;
use crate::support::proxy::Proxy;
use crate::support::recorded_etcd::with_etcd;
use crate::support::restorable::Prefix;
use crate::support::s3::{Kind, S3};
use crate::support::versitygw::Versitygw;
use deltafold::Reason;
use deltafold::store::exclude::ExcludeTags;
use deltafold::store::publish::direct::Direct;
use deltafold::store::{Published, Store};
use object_store::memory::InMemory;
use object_store::path::Path;
use std::sync::Arc;
use tokio::runtime::Runtime;

const NAME: &str = "v2/name";
const STAGING: &str = "deltafold-staging";

fn in_memory(rt: &Runtime, faults: &FaultStore, direct: Direct) -> Store {
    let store = Store::new(
        Arc::new(faults.clone()),
        Path::default(),
        "memory".to_owned(),
        ExcludeTags::none(),
        rt.handle().clone(),
    );
    store.with_direct(direct)
}

fn content(store: &Store, name: &str) -> Vec<u8> {
    store.read_small(name, 100).unwrap().unwrap_or_default()
}

#[test]
fn a_small_object_takes_one_put_and_one_get() {
    let rt = runtime();
    let faults = FaultStore::new(Arc::new(InMemory::new()), Vec::new());
    let store = in_memory(&rt, &faults, faults.direct());
    // The first object probes the store and leaves nothing else there.
    let created = store.create_small("v2/first", b"first").unwrap();
    assert_eq!(created, Published::Created);
    assert_eq!(store.list(&[STAGING]).unwrap(), []);
    let before = faults.calls().len();
    let created = store.create_small(NAME, b"second").unwrap();
    assert_eq!(created, Published::Created);
    let calls: Vec<_> = faults.calls().split_off(before);
    let on_name = |call| (call, NAME.to_owned());
    assert_eq!(calls, [Call::Put, Call::Get, Call::Body].map(on_name));
    // An existing object keeps its name.
    let again = store.create_small(NAME, b"second").unwrap();
    assert_eq!(again, Published::Identical);
    let other = store.create_small(NAME, b"another").unwrap();
    assert_eq!(other, Published::Taken);
    assert_eq!(content(&store, NAME), b"second");
}

#[test]
fn where_damage_or_a_taken_name_is_not_refused_staging_is_used() {
    let rt = runtime();
    let honest = FaultStore::new(Arc::new(InMemory::new()), Vec::new());
    let ignoring = FaultStore::ignoring_conditions(Arc::new(InMemory::new()));
    for (faults, direct) in [
        (&honest, honest.careless()),
        (&ignoring, ignoring.direct()),
        (&ignoring, ignoring.careless()),
    ] {
        let store = in_memory(&rt, faults, direct);
        for n in 0..2 {
            let name = format!("{NAME}-{n}");
            store.delete(&name).unwrap();
            let created = store.create_small(&name, b"content").unwrap();
            assert_eq!(created, Published::Created);
            assert_eq!(content(&store, &name), b"content");
        }
        let calls = faults.calls();
        let puts = calls.iter().filter(|(call, _)| *call == Call::Put);
        for (_, path) in puts {
            assert!(path.starts_with(STAGING), "{path}");
        }
        assert_eq!(store.list(&[STAGING]).unwrap(), []);
    }
}

#[test]
fn what_could_not_be_tried_is_tried_again() {
    let rt = runtime();
    // The second of the three requests of the probe.
    let strike = PlannedFault {
        call: Call::Put,
        nth: 1,
        fault: Fault::ServerError,
    };
    let faults = FaultStore::new(Arc::new(InMemory::new()), vec![strike]);
    let store = in_memory(&rt, &faults, faults.direct());
    let copies = || {
        let calls = faults.calls();
        calls.iter().filter(|(call, _)| *call == Call::Copy).count()
    };
    store.create_small("v2/a", b"a").unwrap();
    assert_eq!(copies(), 1);
    store.create_small("v2/b", b"b").unwrap();
    assert_eq!(copies(), 1);
}

#[test]
fn on_servers_that_lie_or_lack_something() {
    let rt = runtime();
    let honest = Lies::default();
    for (lies, at_once) in [
        (honest, true),
        (
            Lies {
                forgets_metadata: true,
                ..honest
            },
            true,
        ),
        (
            Lies {
                takes_damaged: true,
                ..honest
            },
            false,
        ),
        (
            Lies {
                refuses_checksums: true,
                ..honest
            },
            false,
        ),
        (
            Lies {
                ignores_conditions: true,
                ..honest
            },
            false,
        ),
        (
            Lies {
                lets_racers_win: true,
                ..honest
            },
            false,
        ),
        (
            Lies {
                refuses_conditions: true,
                ..honest
            },
            false,
        ),
    ] {
        let server = LyingServer::start(lies);
        let store = server.s3().open("s3://bucket/p", rt.handle());
        for name in ["v2/a", "v2/b"] {
            let created = store.create_small(name, b"content").unwrap();
            assert_eq!(created, Published::Created, "{lies:?}");
        }
        let requests = server.requests();
        let staged = |r: &String| r.starts_with("PUT bucket/p/deltafold-staging/b.");
        assert_ne!(
            requests.iter().any(staged),
            at_once,
            "{lies:?}: {requests:?}"
        );
        if at_once {
            let last = &requests[requests.len() - 2..];
            assert!(last.iter().all(|r| r.contains("/v2/b ")), "{last:?}");
        }
        let other = store.create_small("v2/a", b"another").unwrap();
        assert_eq!(other, Published::Taken, "{lies:?}");
        assert_eq!(content(&store, "v2/a"), b"content", "{lies:?}");
        let left: Vec<_> = server.objects().into_keys().collect();
        assert_eq!(left, ["bucket/p/v2/a", "bucket/p/v2/b"], "{lies:?}");
    }
}

#[test]
fn what_reads_back_differently_does_not_keep_the_name() {
    let rt = runtime();
    for forgets_metadata in [false, true] {
        let server = LyingServer::start(Lies {
            damages: true,
            forgets_metadata,
            ..Lies::default()
        });
        let store = server.s3().open("s3://bucket/p", rt.handle());
        let e = store.create_small(NAME, b"content").unwrap_err();
        assert_eq!(e.reason(), Reason::Io);
        assert!(e.to_string().contains("reads back differently"), "{e}");
        // Without metadata nobody knows whose object it is, so it stays.
        let left: Vec<_> = server.objects().into_keys().collect();
        let expected: &[&str] = if forgets_metadata {
            &["bucket/p/v2/name"]
        } else {
            &[]
        };
        assert_eq!(left, expected);
    }
}

#[test]
fn what_is_lost_is_not_taken_for_written() {
    let rt = runtime();
    // The put of the result, after the three requests of the probe.
    let strike = PlannedFault {
        call: Call::Get,
        nth: 0,
        fault: Fault::Gone,
    };
    let faults = FaultStore::new(Arc::new(InMemory::new()), vec![strike]);
    let store = in_memory(&rt, &faults, faults.direct());
    let e = store.create_small(NAME, b"content").unwrap_err();
    assert_eq!(e.reason(), Reason::SnapshotVanished, "{e}");
}

/// Asserts the number of requests for each delta of a follower that has run for a while, without those of its
/// lock.
fn requests_of_deltas(server: &S3) {
    const DELTAS: usize = 20;
    with_etcd(EtcdVersion::V3_6, |world| {
        world.wait(server.create_bucket("follow", Kind::Plain));
        let proxy = Proxy::start(server.endpoint());
        world.prefix = Prefix::s3(&S3::new(&proxy.url()), "follow", "prefix");
        let seen = Prefix::s3(server, "follow", "prefix");
        let mut follower = world.follow(&QUICK);
        let revision = world.put_many("/first/", 3, 100);
        follower.wait_saved(&seen, revision);
        let before = seen.deltas().len();
        proxy.take();
        while seen.deltas().len() < before + DELTAS {
            let revision = world.put_many("/k/", 3, 100);
            follower.wait_saved(&seen, revision);
        }
        // The last one may be read back a moment later.
        let deltas = seen.deltas().len() - before;
        let mut requests = proxy.take().requests;
        requests.retain(|r| !r.target.contains("deltafold-locks"));
        println!("{} requests for {deltas} deltas", requests.len());
        assert!(requests.len() <= 4 * deltas, "{deltas}: {requests:#?}");
        let puts = requests.iter().filter(|r| r.method == "PUT");
        assert_eq!(puts.count(), deltas, "{requests:#?}");
        world.prefix = seen;
        follower.terminate().succeeded();
        world.check_all_is_saved();
    });
}

#[test]
fn a_delta_takes_four_requests_at_most_on_minio() {
    let minio = Minio::start();
    requests_of_deltas(&minio.s3());
}

#[test]
fn a_delta_takes_four_requests_at_most_on_versitygw() {
    let server = Versitygw::start();
    requests_of_deltas(server.s3());
}

#[test]
fn a_follower_falls_back_to_staging() {
    let server = LyingServer::start(Lies {
        takes_damaged: true,
        ..Lies::default()
    });
    with_etcd(EtcdVersion::V3_6, |world| {
        world.prefix = Prefix::s3(server.s3(), "follow", "prefix");
        let mut follower = world.follow(&QUICK);
        for _ in 0..2 {
            let revision = world.put_many("/k/", 3, 100);
            follower.wait_saved(&world.prefix, revision);
        }
        follower.terminate().succeeded();
        world.check_all_is_saved();
        let requests = server.requests();
        let staged = requests
            .iter()
            .filter(|r| r.starts_with("PUT follow/prefix/deltafold-staging/Incr"));
        assert!(staged.count() >= 2, "{requests:#?}");
        let left = server.objects();
        assert!(
            left.keys().all(|k| !k.contains(STAGING)),
            "{:?}",
            left.keys()
        );
    });
}
