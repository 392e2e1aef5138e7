//! Servers that accept conditional writes and ignore the condition: of several writers that want the same name
//! at the same moment, none loses its data.

use crate::support::faults::{Call, Fault, FaultStore, PlannedFault};
use crate::support::lying_s3::{Lies, LyingServer};
use deltafold::store::exclude::ExcludeTags;
use deltafold::store::{Published, Staged, Store, Upload};
use object_store::memory::InMemory;
use object_store::path::Path;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::sync::{Arc, Mutex};
use tokio::runtime::Runtime;

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(4)
        .enable_all()
        .build()
        .unwrap()
}

fn staged(store: &Store, content: &str) -> Staged {
    let mut upload = Upload::new(store, "Full", 1);
    upload.write_all(content.as_bytes()).unwrap();
    upload.finish().unwrap()
}

fn content(store: &Store, path: &str) -> String {
    let mut text = String::new();
    store.read(path).read_to_string(&mut text).unwrap();
    text
}

/// Publishes under the first free name, as an operation does. Returns the name.
fn give_name(staged: &Staged) -> String {
    for second in 0..100 {
        let name = format!("v2/Full-00000000-00000007-{second}");
        if staged.publish(&name).unwrap() != Published::Taken {
            return name;
        }
    }
    panic!("a hundred names are taken");
}

/// One writer has seen that the name is free; before it takes the name, another one comes and publishes.
/// Returns what both were told, and the content of the object.
fn overtaken(doubted: bool) -> (Published, Published, String) {
    let rt = runtime();
    // The probe of the store takes two copies.
    let nth = if doubted { 2 } else { 0 };
    let strike = PlannedFault {
        call: Call::Copy,
        nth,
        fault: Fault::Meanwhile,
    };
    let lying = FaultStore::new(Arc::new(InMemory::new()), vec![strike]).that_ignores_conditions();
    let store = Store::new(
        Arc::new(lying.clone()),
        Path::from("p"),
        "memory".to_owned(),
        ExcludeTags::none(),
        rt.handle().clone(),
    );
    let store = if doubted {
        store.with_doubted_conditions()
    } else {
        store
    };
    let second = Arc::new(Mutex::new(None));
    let (told, other) = (second.clone(), store.clone());
    lying.meanwhile(move || {
        let other = other.clone();
        let overtakes = move || staged(&other, "of the second").publish("v2/name").unwrap();
        *told.lock().unwrap() = Some(std::thread::spawn(overtakes).join().unwrap());
    });
    let first = staged(&store, "of the first").publish("v2/name").unwrap();
    let second = second.lock().unwrap().take().expect("it came");
    (first, second, content(&store, "v2/name"))
}

#[test]
fn a_writer_that_is_overtaken_is_seen_by_the_other() {
    // What would happen if the store were believed: both writers think the name is theirs, and one loses its
    // data.
    let believed = overtaken(false);
    assert_eq!(
        (believed.0, believed.1),
        (Published::Created, Published::Created)
    );
    let (first, second, kept) = overtaken(true);
    assert_eq!((first, second), (Published::Created, Published::Taken));
    assert_eq!(kept, "of the first");
}

#[test]
fn of_racers_on_a_server_that_lies_nobody_loses_anything() {
    const RACERS: usize = 5;
    let rt = runtime();
    let ignores = Lies {
        ignores_conditions: true,
        ..Lies::default()
    };
    let lets_win = Lies {
        lets_racers_win: true,
        ..Lies::default()
    };
    let refuses = Lies {
        refuses_conditions: true,
        ..Lies::default()
    };
    for (lies, rounds) in [
        (ignores, 4),
        (lets_win, 4),
        (refuses, 2),
        (Lies::default(), 2),
    ] {
        let server = LyingServer::start(lies);
        for round in 0..rounds {
            let url = format!("s3://bucket/{round}");
            let wrote: BTreeMap<String, String> = std::thread::scope(|s| {
                let race = |i: usize| {
                    // Each is a process of its own that knows nothing about the server yet.
                    let store = server.s3().open(&url, rt.handle());
                    s.spawn(move || {
                        let text = format!("of racer {i} in round {round}");
                        (give_name(&staged(&store, &text)), text)
                    })
                };
                let racers: Vec<_> = (0..RACERS).map(race).collect();
                racers.into_iter().map(|r| r.join().unwrap()).collect()
            });
            assert_eq!(
                wrote.len(),
                RACERS,
                "{lies:?}: two have one name: {wrote:?}"
            );
            let store = server.s3().open(&url, rt.handle());
            for (name, text) in &wrote {
                assert_eq!(content(&store, name), *text, "{lies:?}");
            }
            assert_eq!(store.list(&["v2"]).unwrap().len(), RACERS, "{lies:?}");
            assert_eq!(store.list(&["deltafold-staging"]).unwrap(), [], "{lies:?}");
        }
    }
}

#[test]
fn a_claim_that_was_left_behind_costs_a_name_and_no_more() {
    let rt = runtime();
    let lies = Lies {
        ignores_conditions: true,
        ..Lies::default()
    };
    let server = LyingServer::start(lies);
    let store = server.s3().open("s3://bucket/p", rt.handle());
    assert_eq!(
        staged(&store, "a").publish("v2/a").unwrap(),
        Published::Created
    );
    // The name of a claim, as the requests show it. Its owner cannot be asked whether it is alive.
    let shown = server
        .requests()
        .into_iter()
        .find(|r| r.contains("claim-"))
        .unwrap();
    let hash = shown.split("claim-").nth(1).unwrap()[..16].to_owned();
    let left = format!("deltafold-staging/claim-{hash}.00000000000000ff.1.1.0000000000000001");
    store.replace_small(&left, b"claim").unwrap();
    store.delete("v2/a").unwrap();
    let again = staged(&store, "b");
    assert_eq!(again.publish("v2/a").unwrap(), Published::Taken);
    assert_eq!(again.publish("v2/b").unwrap(), Published::Created);
    assert!(!store.exists("v2/a").unwrap());
}
