//! The conformance suite: what every store must do, and what the program must do on every store.

use super::made_backups::{BASE, Bucket, LAST, objects_in};
use super::random::{rounds, seed};
use super::{copy_fixture, deltafold, expected, fixture_names, run_json, scratch};
use chrono::Utc;
use deltafold::backup::catalog::mark_of;
use deltafold::error::{Error, Reason};
use deltafold::store::lock::{Lock, Wait};
use deltafold::store::{Published, Store, Upload};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Stdio;
use std::sync::Barrier;
use std::time::Duration;
use tokio::runtime::Runtime;

const STAGING: &str = "deltafold-staging";

pub fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().unwrap()
}

/// What some stores have and others do not.
#[derive(Debug, Clone, Copy, Default)]
pub struct Abilities {
    /// A deleted object leaves a delete marker.
    pub versions: bool,
    pub tags: bool,
    /// A condition holds against writes of the same moment, and an object can be replaced on condition that it has
    /// not changed.
    pub conditional_update: bool,
    /// An upload in parts is completed on condition that the name is free.
    pub conditional_completion: bool,
}

/// Asserts what every store must do, on an empty prefix.
pub fn conforms(store: &Store, has: Abilities) {
    what_is_not_there_is_told(store);
    what_is_written_is_read_and_listed(store);
    a_name_is_given_once(store, has.versions);
    if has.conditional_update {
        one_of_many_creates(store, 4, 6, 10);
    }
    if has.conditional_completion {
        one_of_many_creates(store, 1, 4, 9 << 20);
    }
    a_large_object_is_written_in_parts(store);
    what_is_deleted_is_gone(store);
    a_mark_is_set(store, has.tags);
    locks_hold_or_are_refused(store, has.conditional_update);
    nothing_is_locked(store);
    assert_eq!(paths(store, "v2"), BTreeSet::new());
}

pub fn content(store: &Store, path: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    store.read(path).read_to_end(&mut bytes).unwrap();
    bytes
}

pub fn paths(store: &Store, folder: &str) -> BTreeSet<String> {
    let listed = store.list(&[folder]).unwrap().into_iter();
    listed.map(|(path, _)| path).collect()
}

pub fn nothing_is_staged(store: &Store) {
    assert_eq!(paths(store, STAGING), BTreeSet::new());
}

fn publish(store: &Store, path: &str, content: &[u8]) -> Published {
    let mut upload = Upload::new(store, path, 0).unwrap();
    upload.write_all(content).unwrap();
    upload.finish().unwrap().complete().unwrap()
}

fn what_is_not_there_is_told(store: &Store) {
    let path = "v2/none";
    assert_eq!(store.list(&["v2", "v1"]).unwrap(), []);
    assert!(!store.exists(path).unwrap());
    assert_eq!(store.read_small(path, 10).unwrap(), None);
    let unread = store.read(path).read(&mut [0; 10]).unwrap_err();
    let gone = [
        Error::io("read", unread),
        store.current_version(path).unwrap_err(),
        store.exclude(path, "deltafold-excluded/none").unwrap_err(),
    ];
    for e in gone {
        assert_eq!(e.reason(), Reason::SnapshotVanished, "{e}");
    }
    store.delete(path).unwrap();
}

fn what_is_written_is_read_and_listed(store: &Store) {
    let long = format!("v2/{}", "long-".repeat(40));
    let names = [
        "v2/plain",
        "v2/a b+c&d=e;f",
        "v2/(x)!,@$'",
        "v2/a..b.",
        "v2/folder/deep/inner",
        &long,
    ];
    // Prefixes beside the folder and above it.
    let others = ["v22/plain", "v1/Backup-1/plain", "plain"];
    for (i, path) in names.iter().chain(&others).enumerate() {
        let bytes = vec![i as u8; [0, 1, 100_000][i % 3]];
        let created = store.create_small(path, &bytes).unwrap();
        assert_eq!(created, Published::Created, "{path}");
        assert!(store.exists(path).unwrap(), "{path}");
        let read = store.read_small(path, 100_000).unwrap();
        assert!(read.as_ref() == Some(&bytes), "{path}");
        assert!(content(store, path) == bytes, "{path}");
        if bytes.len() > 1 {
            assert!(store.read_small(path, bytes.len() as u64 - 1).is_err());
        }
    }
    let listed = store.objects(&["v2"]).unwrap();
    let mut sorted = names;
    sorted.sort_unstable();
    let found: Vec<&str> = listed.iter().map(|o| o.path.as_str()).collect();
    assert_eq!(found, sorted);
    for object in &listed {
        assert_eq!(object.bytes, content(store, &object.path).len() as u64);
        let age = Utc::now() - object.modified;
        assert!(age.num_minutes().abs() < 60, "{object:?}");
        assert!(!object.is_odd, "{object:?}");
    }
    let elsewhere = store.list(&["v1", "v22"]).unwrap();
    let elsewhere: Vec<&str> = elsewhere.iter().map(|(path, _)| path.as_str()).collect();
    assert_eq!(elsewhere, ["v1/Backup-1/plain", "v22/plain"]);
    for content in ["longer than before", "", "short"] {
        store.replace_small("v2/plain", content.as_bytes()).unwrap();
        let read = store.read_small("v2/plain", 100).unwrap();
        assert_eq!(read.as_deref(), Some(content.as_bytes()));
    }
    for path in names.iter().chain(&others) {
        store.delete(path).unwrap();
        assert!(!store.exists(path).unwrap(), "{path}");
    }
    nothing_is_staged(store);
}

fn a_name_is_given_once(store: &Store, is_versioned: bool) {
    let path = "v2/once";
    let create = |content: &[u8]| store.create_small(path, content).unwrap();
    assert_eq!(create(b"first"), Published::Created);
    assert_eq!(create(b"first"), Published::Identical);
    for other in ["other", "another length", ""] {
        assert_eq!(create(other.as_bytes()), Published::Taken);
    }
    assert_eq!(content(store, path), b"first");
    store.delete(path).unwrap();
    // versitygw lists a deletion marker as an object.
    if !is_versioned {
        assert_eq!(create(b"other"), Published::Created);
        store.delete(path).unwrap();
    }
    nothing_is_staged(store);
}

/// Every racer has its object ready before the first one asks for the name.
fn one_of_many_creates(store: &Store, rounds: usize, racers: usize, bytes: usize) {
    for round in 0..rounds {
        let (path, start) = (format!("v2/race-{bytes}-{round}"), &Barrier::new(racers));
        let results: Vec<Published> = std::thread::scope(|s| {
            let race = |i: usize| {
                let path = &path;
                s.spawn(move || {
                    let mut upload = Upload::new(store, path, 0).unwrap();
                    upload.write_all(&vec![i as u8; bytes]).unwrap();
                    let unnamed = upload.finish().unwrap();
                    start.wait();
                    unnamed.complete().unwrap()
                })
            };
            let racers: Vec<_> = (0..racers).map(race).collect();
            racers.into_iter().map(|r| r.join().unwrap()).collect()
        });
        let created: Vec<usize> = (0..racers)
            .filter(|&i| results[i] == Published::Created)
            .collect();
        assert_eq!(created.len(), 1, "{results:?}");
        assert!(content(store, &path) == vec![created[0] as u8; bytes]);
        assert!(results.iter().all(|r| *r != Published::Identical));
        store.delete(&path).unwrap();
    }
    nothing_is_staged(store);
}

fn a_large_object_is_written_in_parts(store: &Store) {
    let path = "v2/large";
    let mut noise = vec![0; (20 << 20) + 12_345];
    fastrand::Rng::with_seed(5).fill(&mut noise);
    assert_eq!(publish(store, path, &noise), Published::Created);
    assert_eq!(publish(store, path, &noise), Published::Identical);
    let listed = store.list(&["v2"]).unwrap();
    let bytes = noise.len() as u64;
    assert_eq!(listed, [(path.to_owned(), bytes)]);
    let mut fetched = Vec::new();
    store.fetch(path, bytes).read_to_end(&mut fetched).unwrap();
    assert!(fetched == noise, "what is fetched by ranges differs");
    *noise.last_mut().unwrap() ^= 1;
    assert_eq!(publish(store, path, &noise), Published::Taken);
    assert!(content(store, path) == fetched);
    nothing_is_staged(store);

    // An upload that is dropped leaves nothing behind.
    let mut upload = Upload::new(store, "v2/given-up", 0).unwrap();
    upload.write_all(&noise).unwrap();
    drop(upload);
    assert!(!store.exists("v2/given-up").unwrap());
    assert_eq!(store.uploads().unwrap(), []);
    nothing_is_staged(store);
    store.delete(path).unwrap();
}

fn what_is_deleted_is_gone(store: &Store) {
    let mut many: Vec<String> = (0..30).map(|i| format!("v2/many-{i}")).collect();
    for path in &many {
        store.create_small(path, b"x").unwrap();
    }
    // Deleting an object that does not exist succeeds.
    many.push("v2/none".to_owned());
    let mut deleted = Vec::new();
    let each = |path: &str, result: Result<(), Error>| {
        result.unwrap();
        deleted.push(path.to_owned());
    };
    store.delete_all(&many, each).unwrap();
    assert_eq!(deleted, many);
    assert_eq!(paths(store, "v2"), BTreeSet::new());
    store.delete(&many[0]).unwrap();
}

fn a_mark_is_set(store: &Store, has_tags: bool) {
    let (path, object) = ("v2/marked", "deltafold-excluded/marked");
    store.create_small(path, b"marked").unwrap();
    for _ in 0..2 {
        store.exclude(path, object).unwrap();
        let by_tag = store.excluded_by_tag(&[path.to_owned()]).unwrap();
        assert_eq!(by_tag, [has_tags]);
        assert_eq!(store.exists(object).unwrap(), !has_tags);
        assert_eq!(content(store, path), b"marked");
    }
    store.delete(object).unwrap();
    store.delete(path).unwrap();
}

fn locks_hold_or_are_refused(store: &Store, has_conditions: bool) {
    let lock =
        |identity: &str| Lock::new(store, "test", identity, Duration::from_secs(10)).unwrap();
    if !has_conditions {
        // A server without conditions may accept the lock or refuse it, but must not pretend to keep it.
        let take = |identity: &str| lock(identity).acquire(Wait::UntilSeenDead);
        let refused = match take("a").and_then(|held| held.renew()) {
            Ok(()) => take("b").err().expect("an error of the second one"),
            Err(e) => e,
        };
        assert_eq!(refused.reason(), Reason::Configuration, "{refused}");
        assert!(refused.to_string().contains("lock-lease"), "{refused}");
        return;
    }
    let held = lock("a").acquire(Wait::UntilSeenDead).unwrap();
    let refused = lock("b").acquire(Wait::UntilSeenDead).err().unwrap();
    assert_eq!(refused.reason(), Reason::LockHeld);
    held.renew().unwrap();
    held.release().unwrap();
    let held = lock("b").acquire(Wait::UntilSeenDead).unwrap();
    held.release().unwrap();
}

fn nothing_is_locked(store: &Store) {
    let path = "v2/locked";
    store.create_small(path, b"locked").unwrap();
    assert_eq!(store.retained_until(path).unwrap(), None);
    assert!(!store.legal_hold(path).unwrap());
    store.delete(path).unwrap();
    assert!(!store.exists(path).unwrap());
}

/// A server and how deltafold connects to it.
pub struct Server {
    pub runtime: Runtime,
    /// The store URL without the prefix.
    url: String,
    options: Vec<(String, String)>,
}

impl Server {
    pub fn new(runtime: Runtime, url: &str, options: &[(&str, &str)]) -> Self {
        let owned = |(k, v): &(&str, &str)| ((*k).to_owned(), (*v).to_owned());
        Server {
            runtime,
            url: url.to_owned(),
            options: options.iter().map(owned).collect(),
        }
    }

    pub fn url(&self, prefix: &str) -> String {
        format!("{}/{prefix}", self.url)
    }

    pub fn store(&self, prefix: &str) -> Store {
        let handle = self.runtime.handle().clone();
        deltafold::store::open(&self.url(prefix), &self.options, handle).unwrap()
    }

    fn flags(&self, flag: &str) -> Vec<String> {
        let options = self.options.iter();
        options
            .flat_map(|(k, v)| [flag.to_owned(), format!("{k}={v}")])
            .collect()
    }

    pub fn run(&self, command: &str, prefix: &str, args: &[&str]) -> (i32, Value, String) {
        let mut c = deltafold();
        c.args([command, "--output", "json", "--store", &self.url(prefix)]);
        c.args(self.flags("--store-option")).args(args);
        run_json(&mut c)
    }

    /// Uploads a local folder to a prefix.
    pub fn fill(&self, prefix: &str, from: &Path) -> Store {
        let store = self.store(prefix);
        for (path, bytes) in objects_in(from) {
            let created = store.create_small(&path, &bytes).unwrap();
            assert_eq!(created, Published::Created);
        }
        store
    }
}

/// Asserts what the program must do on every server.
pub fn the_program_works_on(server: &Server) {
    every_fixture_is_compacted(server);
    marks_are_listed(server);
    a_killed_run_leaves_nothing_that_stays(server);
    a_copy_is_the_same(server);
    prefixes_are_taken_as_they_are_written(server, rounds(4, 20));
    let (code, result, _) = server.run("list", "nothing", &[]);
    assert_eq!((code, result["reason"].as_str()), (66, Some("NoSnapshots")));
}

fn every_fixture_is_compacted(server: &Server) {
    for name in fixture_names() {
        let local = copy_fixture(&name);
        let store = server.fill(&name, local.path());
        let before = store.objects(&["v2"]).unwrap();
        for object in &before {
            let file = fs::read(local.path().join(&object.path)).unwrap();
            assert_eq!(
                (object.bytes, content(&store, &object.path)),
                (file.len() as u64, file)
            );
            let age = Utc::now() - object.modified;
            assert!(age.num_minutes().abs() < 60, "{object:?}");
        }
        let e = expected(&name);
        let (code, list, stderr) = server.run("list", &name, &["--deep"]);
        let found = (code, list["latest_revision"].as_i64());
        assert_eq!(found, (0, Some(e.last_revision)), "{stderr}");
        let (code, result, stderr) = server.run("compact", &name, &[]);
        assert_eq!(code, 0, "{name}: {stderr}");
        assert_eq!(
            result["hash_kv"], e.compacted_at_last_revision.hash,
            "{name}"
        );
        assert_eq!(result["warnings"], json!([]), "{name}");

        // The result must have the same bytes as on a local disk.
        let mut c = deltafold();
        c.args(["compact", "--output", "json", "--store"])
            .arg(local.path());
        let (_, on_disk, _) = run_json(&mut c);
        assert_eq!(on_disk["snapshot"], result["snapshot"]);
        let path = format!("v2/{}", result["snapshot"].as_str().unwrap());
        assert!(
            content(&store, &path) == fs::read(local.path().join(&path)).unwrap(),
            "{name}"
        );

        let (code, again, _) = server.run("compact", &name, &[]);
        assert_eq!((code, again["status"].as_str()), (0, Some("NothingToDo")));
        assert_eq!(store.objects(&["v2"]).unwrap().len(), before.len() + 1);
        nothing_is_staged(&store);
    }
}

fn marks_are_listed(server: &Server) {
    let bucket = Bucket::with_base();
    let delta = bucket.delta(BASE + 1, LAST, 6);
    let store = server.fill("marks", bucket.path());
    let path = format!("v2/{delta}");
    let excluded = || {
        let (code, list, stderr) = server.run("list", "marks", &["--deep"]);
        assert_eq!(code, 0, "{stderr}");
        let all = list["snapshots"].as_array().unwrap().iter();
        all.map(|s| s["excluded"].as_bool().unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(excluded(), [false, false]);
    store.exclude(&path, &mark_of(&path)).unwrap();
    assert_eq!(excluded(), [false, true]);
}

fn a_killed_run_leaves_nothing_that_stays(server: &Server) {
    let bucket = Bucket::with_base();
    bucket.delta(BASE + 1, LAST, 6);
    let last = bucket.noise_delta(30);
    let store = server.fill("killed", bucket.path());
    let before = paths(&store, "v2");
    for pause in [100, 300, 700] {
        let mut c = deltafold();
        c.args(["compact", "--store", &server.url("killed")]);
        c.args(server.flags("--store-option"));
        let mut job = c
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(pause));
        job.kill().unwrap();
        job.wait().unwrap();
        let now = paths(&store, "v2");
        assert!(now == before || now.len() == before.len() + 1);
    }
    let (code, result, stderr) = server.run("compact", "killed", &[]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(result["revision"].as_i64(), Some(last));
    nothing_is_staged(&store);
}

fn a_copy_is_the_same(server: &Server) {
    let name = &fixture_names()[0];
    let source = copy_fixture(name);
    let local = scratch::folder().unwrap();
    let there = server.url("copied");
    let copy = |from: &str, to: &str, flag: &str| {
        let mut c = deltafold();
        c.args(["copy", "--output", "json", "--from", from, "--to", to]);
        run_json(c.args(server.flags(flag)))
    };
    let from = source.path().to_str().unwrap();
    let (code, _, stderr) = copy(from, &there, "--to-option");
    assert_eq!(code, 0, "{stderr}");
    let (code, _, stderr) = copy(&there, local.path().to_str().unwrap(), "--from-option");
    assert_eq!(code, 0, "{stderr}");
    let v2 = |root: &Path| objects_in(&root.join("v2"));
    assert!(v2(source.path()) == v2(local.path()));
    let (code, again, stderr) = copy(from, &there, "--to-option");
    assert_eq!(
        (code, again["bytes_written"].as_u64()),
        (0, Some(0)),
        "{stderr}"
    );
    nothing_is_staged(&server.store("copied"));
}

/// Prefixes that people have, and some that only random finds. What is written below one can be read again, and the
/// server has the very name.
pub fn prefixes_are_taken_as_they_are_written(server: &Server, random: usize) {
    let mut rng = fastrand::Rng::with_seed(seed());
    let fixed = [
        "team~a",
        "gr\u{f6}\u{df}e",
        "x#y",
        "%7E",
        "100%25/a b",
        "a*b[c]{d}|e^f\"g<h>i`j",
        "back\\slash.",
    ];
    let mut prefixes: Vec<String> = fixed.iter().map(|p| (*p).to_owned()).collect();
    prefixes.extend((0..random).map(|_| random_prefix(&mut rng)));
    let source = copy_fixture("kubernetes");
    let from = source.path().to_str().unwrap();
    for (i, prefix) in prefixes.iter().enumerate() {
        // Several could be equal, or one below another.
        let mut prefix = format!("{i}-{prefix}");
        if server.url.starts_with("az://") {
            let refused = prefix.contains('\\') || prefix.split('/').any(|p| p.ends_with('.'));
            let (code, _, stderr) = server.run("list", &prefix, &[]);
            assert_eq!(code == 64, refused, "{prefix}: {stderr}");
            prefix = prefix.replace(['\\', '.'], "_");
        }
        if let Some(folder) = deltafold::store::open::local_folder(&server.url(&prefix)) {
            fs::create_dir_all(folder.parent().unwrap()).unwrap();
        }
        let (there, local) = (server.url(&prefix), scratch::folder().unwrap());
        let copied = |from: &str, to: &str, flag: &str| {
            let mut c = deltafold();
            c.args(["copy", "--output", "json", "--from", from, "--to", to]);
            let (code, _, stderr) = run_json(c.args(server.flags(flag)));
            assert_eq!(code, 0, "{prefix}: {stderr}");
        };
        copied(from, &there, "--to-option");
        let (code, list, stderr) = server.run("list", &prefix, &[]);
        assert_eq!(code, 0, "{prefix}: {stderr}");
        let snapshots = list["snapshots"].as_array().unwrap().len();
        let file = local.path().join("restored.db");
        let to_file = ["--to-snapshot", file.to_str().unwrap()];
        let (code, _, stderr) = server.run("restore", &prefix, &to_file);
        assert_eq!(code, 0, "{prefix}: {stderr}");
        let back = local.path().join("back");
        copied(&there, back.to_str().unwrap(), "--from-option");
        assert!(objects_in(&back.join("v2")) == objects_in(&source.path().join("v2")));
        // The whole bucket, without a prefix.
        let all = paths(&server.store(""), "");
        let below = all
            .iter()
            .filter(|p| p.starts_with(&format!("{prefix}/v2/")));
        assert_eq!(below.count(), snapshots, "{prefix}: {all:?}");
        let store = server.store(&prefix);
        for path in paths(&store, "v2") {
            store.delete(&path).unwrap();
        }
        assert_eq!(paths(&store, "v2"), BTreeSet::new());
    }
}

fn random_prefix(rng: &mut fastrand::Rng) -> String {
    let characters: Vec<char> =
        "~*[]{}|\\^\"<>%#`!$&'()+,-.:;=@_ aZ09\u{e9}\u{df}\u{20ac}\u{65e5}\u{1f600}\u{308}"
            .chars()
            .collect();
    let parts = rng.usize(1..3);
    // A part `.` or `..` is refused. MinIO also refuses it between backslashes. White space at an end is cut off below.
    let dots = |part: &str| {
        let mut parts = part.trim_end().split('\\');
        parts.any(|p| matches!(p.trim(), "." | ".."))
    };
    let mut part = || loop {
        let n = rng.usize(1..12);
        let part: String = (0..n)
            .map(|_| characters[rng.usize(..characters.len())])
            .collect();
        if !dots(&part) && !part.trim_end().is_empty() {
            break part;
        }
    };
    let prefix: Vec<String> = (0..parts).map(|_| part()).collect();
    // White space at an end is refused.
    prefix.join("/").trim_end().to_owned()
}
