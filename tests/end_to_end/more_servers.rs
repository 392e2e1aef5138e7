//! The same on servers that need more than Rust and Go: Swift and Azurite, which `tests/end-to-end`
//! starts; and on Google Cloud Storage, as far as there is a server for it.
//!
//! Plain `cargo test` does not run this module: without the servers it fails.

use crate::support::buckets::{BASE, Bucket, LAST};
use crate::support::gcs::Gcs;
use crate::support::scratch;
use crate::support::{copy_fixture, deltafold, expected, fixture_names, run_json};
use chrono::{DateTime, Utc};
use deltafold::Reason;
use deltafold::store::lock::{Lock, Wait};
use deltafold::store::{Published, Store, Upload};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Barrier};
use std::time::Duration;
use tempfile::TempDir;
use tokio::runtime::Runtime;

const AZURITE_ACCOUNT: &str = "devstoreaccount1";
/// Azurite's own, which everybody knows.
const AZURITE_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

/// A server, and how deltafold comes to it.
struct Server {
    runtime: Runtime,
    /// Up to the prefix.
    url: String,
    options: Vec<(String, String)>,
    /// It writes on condition of what is there.
    locks: bool,
}

impl Server {
    fn new(runtime: Runtime, url: &str, options: &[(&str, &str)], locks: bool) -> Self {
        let owned = |(k, v): &(&str, &str)| ((*k).to_owned(), (*v).to_owned());
        Server {
            runtime,
            url: url.to_owned(),
            options: options.iter().map(owned).collect(),
            locks,
        }
    }

    fn with(mut self, key: &str, value: &str) -> Self {
        self.options.push((key.to_owned(), value.to_owned()));
        self
    }

    fn url(&self, prefix: &str) -> String {
        format!("{}/{prefix}", self.url)
    }

    fn store(&self, prefix: &str) -> Store {
        let handle = self.runtime.handle().clone();
        deltafold::store::open(&self.url(prefix), &self.options, handle).unwrap()
    }

    fn flags(&self, flag: &str) -> Vec<String> {
        let options = self.options.iter();
        options
            .flat_map(|(k, v)| [flag.to_owned(), format!("{k}={v}")])
            .collect()
    }

    fn run(&self, command: &str, prefix: &str, args: &[&str]) -> (i32, Value, String) {
        let mut c = deltafold();
        c.args([command, "--output", "json", "--store", &self.url(prefix)]);
        c.args(self.flags("--store-option")).args(args);
        run_json(&mut c)
    }

    /// Uploads a local bucket.
    fn fill(&self, prefix: &str, from: &Path) -> Store {
        let store = self.store(prefix);
        for (path, bytes) in crate::support::buckets::objects_in(from) {
            assert_eq!(
                store.create_small(&path, &bytes).unwrap(),
                Published::Created
            );
        }
        store
    }
}

fn content(store: &Store, path: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    store.read(path).read_to_end(&mut bytes).unwrap();
    bytes
}

fn paths(store: &Store, folder: &str) -> BTreeSet<String> {
    store
        .list(&[folder])
        .unwrap()
        .into_iter()
        .map(|(path, _)| path)
        .collect()
}

fn nothing_is_staged(store: &Store) {
    assert_eq!(paths(store, "deltafold-staging"), BTreeSet::new());
}

/// All that every store must do.
fn the_whole_cycle(server: &Server) {
    every_fixture_is_compacted(server);
    one_of_many_racers_creates(server);
    a_large_object_is_written_in_parts(server);
    marks_are_set_and_taken_away(server);
    locks_hold_or_are_refused(server);
    a_killed_run_leaves_nothing_that_stays(server);
    a_copy_is_the_same(server);
    what_is_not_there_is_told(server);
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

        // The same bytes as on a local disk.
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

fn one_of_many_racers_creates(server: &Server) {
    const RACERS: usize = 6;
    let store = server.store("racers");
    for round in 0..4 {
        let (path, start) = (format!("v2/race-{round}"), Arc::new(Barrier::new(RACERS)));
        let results: Vec<Published> = std::thread::scope(|s| {
            let race = |i: usize| {
                let (store, path, start) = (store.clone(), path.clone(), start.clone());
                s.spawn(move || {
                    let mut upload = Upload::new(&store, "race", 1);
                    upload
                        .write_all(format!("of racer {i}").as_bytes())
                        .unwrap();
                    let staged = upload.finish().unwrap();
                    start.wait();
                    staged.publish(&path).unwrap()
                })
            };
            let racers: Vec<_> = (0..RACERS).map(race).collect();
            racers.into_iter().map(|r| r.join().unwrap()).collect()
        });
        let created: Vec<usize> = (0..RACERS)
            .filter(|&i| results[i] == Published::Created)
            .collect();
        assert_eq!(created.len(), 1, "{results:?}");
        let winner = format!("of racer {}", created[0]);
        assert_eq!(String::from_utf8(content(&store, &path)).unwrap(), winner);
        assert!(results.iter().all(|r| *r != Published::Identical));
    }
    nothing_is_staged(&store);
}

fn a_large_object_is_written_in_parts(server: &Server) {
    let store = server.store("large");
    let mut noise = vec![0; (20 << 20) + 12_345];
    fastrand::Rng::with_seed(5).fill(&mut noise);
    let mut upload = Upload::new(&store, "large", 4);
    upload.write_all(&noise).unwrap();
    let staged = upload.finish().unwrap();
    assert_eq!(staged.publish("v2/large").unwrap(), Published::Created);
    assert_eq!(staged.publish("v2/large").unwrap(), Published::Identical);
    drop(staged);
    let listed = store.list(&["v2"]).unwrap();
    assert_eq!(listed, [("v2/large".to_owned(), noise.len() as u64)]);
    assert!(content(&store, "v2/large") == noise);
    nothing_is_staged(&store);

    // One that is given up leaves nothing.
    let mut upload = Upload::new(&store, "given-up", 4);
    upload.write_all(&noise).unwrap();
    drop(upload);
    nothing_is_staged(&store);

    store.delete("v2/large").unwrap();
    assert_eq!(paths(&store, "v2"), BTreeSet::new());
    store.delete("v2/large").unwrap();
    let many: Vec<String> = (0..30).map(|i| format!("v2/many-{i}")).collect();
    for path in &many {
        store.create_small(path, b"x").unwrap();
    }
    let mut deleted = 0;
    store
        .delete_all(&many, |_, result| {
            result.unwrap();
            deleted += 1;
        })
        .unwrap();
    assert_eq!((deleted, paths(&store, "v2")), (30, BTreeSet::new()));
}

fn marks_are_set_and_taken_away(server: &Server) {
    let bucket = Bucket::with_base();
    let delta = bucket.delta(BASE + 1, LAST, 6);
    let store = server.fill("marks", bucket.path());
    let path = format!("v2/{delta}");
    let excluded = || {
        let (code, list, stderr) = server.run("list", "marks", &[]);
        assert_eq!(code, 0, "{stderr}");
        let all = list["snapshots"].as_array().unwrap().iter();
        all.map(|s| s["excluded"].as_bool().unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(excluded(), [false, false]);
    store.set_excluded(&path, true).unwrap();
    assert_eq!(excluded(), [false, true]);
    let before = content(&store, &path);
    store.set_excluded(&path, false).unwrap();
    assert_eq!(excluded(), [false, false]);
    assert!(before == content(&store, &path));
}

fn locks_hold_or_are_refused(server: &Server) {
    let store = server.store("locks");
    let lock =
        |identity: &str| Lock::new(&store, "test", identity, Duration::from_secs(10)).unwrap();
    if !server.locks {
        // Taking it would do; keeping it would not.
        let refused = match lock("a").acquire(Wait::UntilSeenDead) {
            Ok(held) => held.renew().unwrap_err(),
            Err(e) => e,
        };
        assert_eq!(refused.reason(), Reason::Configuration, "{refused}");
        assert!(refused.to_string().contains("--lock-lease"), "{refused}");
        return;
    }
    let held = lock("a").acquire(Wait::UntilSeenDead).unwrap();
    let refused = lock("b").acquire(Wait::UntilSeenDead).err().unwrap();
    assert_eq!(refused.reason(), Reason::LockHeld);
    held.renew().unwrap();
    held.release().unwrap();
    lock("b")
        .acquire(Wait::UntilSeenDead)
        .unwrap()
        .release()
        .unwrap();
}

fn a_killed_run_leaves_nothing_that_stays(server: &Server) {
    let bucket = Bucket::with_base();
    bucket.delta(BASE + 1, LAST, 6);
    let last = bucket.noise_delta(30);
    let store = server.fill("killed", bucket.path());
    let before = paths(&store, "v2");
    for _ in 0..3 {
        let mut c = deltafold();
        c.args(["compact", "--store", &server.url("killed")]);
        c.args(server.flags("--store-option"));
        let mut job = c
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        while job.try_wait().unwrap().is_none() && paths(&store, "deltafold-staging").is_empty() {
            std::thread::sleep(Duration::from_millis(5));
        }
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
    let v2 = |root: &Path| crate::support::buckets::objects_in(&root.join("v2"));
    assert!(v2(source.path()) == v2(local.path()));
    let (code, again, stderr) = copy(from, &there, "--to-option");
    assert_eq!(
        (code, again["bytes_written"].as_u64()),
        (0, Some(0)),
        "{stderr}"
    );
    nothing_is_staged(&server.store("copied"));
}

fn what_is_not_there_is_told(server: &Server) {
    let (code, result, _) = server.run("list", "nothing", &[]);
    assert_eq!((code, result["reason"].as_str()), (66, Some("NoSnapshots")));
    assert_eq!(
        server.store("nothing").read_small("v2/none", 10).unwrap(),
        None
    );
    assert!(!server.store("nothing").exists("v2/none").unwrap());
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

fn address(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run tests/end-to-end"))
}

/// A Secret as Kubernetes mounts it.
fn secret(settings: &[(&str, &str)]) -> TempDir {
    let folder = scratch::folder_named("secret-").unwrap();
    change(&folder, settings);
    for (name, _) in settings {
        let link = folder.path().join(name);
        std::os::unix::fs::symlink(format!("..data/{name}"), link).unwrap();
    }
    folder
}

fn change(folder: &TempDir, settings: &[(&str, &str)]) {
    let state = format!("..{:08x}", fastrand::u32(..));
    fs::create_dir(folder.path().join(&state)).unwrap();
    for (name, value) in settings {
        fs::write(folder.path().join(&state).join(name), value).unwrap();
    }
    let new = folder.path().join("..data_tmp");
    std::os::unix::fs::symlink(&state, &new).unwrap();
    fs::rename(new, folder.path().join("..data")).unwrap();
}

// --- Swift ---

/// A request of the tests' own, as tempauth's user: the answer's status, headers and body.
fn swift(
    runtime: &Runtime,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: Vec<u8>,
) -> reqwest::Response {
    runtime.block_on(async {
        let client = crate::support::http_client().build().unwrap();
        let auth = format!("{}/auth/v1.0", address("MORE_SERVERS_SWIFT"));
        let login = client.get(auth).header("x-auth-user", "test:tester");
        let login = login.header("x-auth-key", "testing").send().await.unwrap();
        let told = |name: &str| login.headers()[name].to_str().unwrap().to_owned();
        let url = format!("{}/{path}", told("x-storage-url"));
        let mut request = client.request(method.parse().unwrap(), url);
        request = request.header("content-length", body.len());
        request = request
            .header("x-auth-token", told("x-auth-token"))
            .body(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let answer = request.send().await.unwrap();
        assert!(
            answer.status().is_success(),
            "{method} {path}: {}",
            answer.status()
        );
        answer
    })
}

fn swift_server(container: &str) -> Server {
    let runtime = runtime();
    swift(&runtime, "PUT", container, &[], Vec::new());
    let auth = format!("{}/auth/v1.0", address("MORE_SERVERS_SWIFT"));
    let options = [
        ("auth_url", auth.as_str()),
        ("username", "test:tester"),
        ("password", "testing"),
    ];
    Server::new(runtime, &format!("swift://{container}"), &options, false)
}

#[test]
fn swift_does_all_of_it() {
    the_whole_cycle(&swift_server("cycle"));
}

/// A large object as etcd-backup-restore writes it: segments below its own name, and an empty object
/// that names them.
#[test]
fn swift_objects_of_the_other_tool_are_read_copied_and_deleted_whole() {
    let server = swift_server("dynamic");
    let bucket = Bucket::with_base();
    let delta = bucket.delta(BASE + 1, LAST, 6);
    for name in bucket.names() {
        let whole = fs::read(bucket.path().join("v2").join(&name)).unwrap();
        let path = format!("dynamic/p/v2/{name}");
        for (i, segment) in whole.chunks(whole.len() / 3 + 1).enumerate() {
            let segment_path = format!("{path}/{:010}", i + 1);
            swift(&server.runtime, "PUT", &segment_path, &[], segment.to_vec());
        }
        swift(
            &server.runtime,
            "PUT",
            &path,
            &[("x-object-manifest", &path)],
            Vec::new(),
        );
        let store = server.store("p");
        let listed = store.list(&["v2"]).unwrap();
        let bytes = listed
            .iter()
            .find(|(p, _)| *p == format!("v2/{name}"))
            .unwrap()
            .1;
        assert_eq!(bytes, whole.len() as u64);
        assert!(content(&store, &format!("v2/{name}")) == whole);
    }
    let (code, result, stderr) = server.run("compact", "p", &[]);
    assert_eq!(
        (code, result["revision"].as_i64()),
        (0, Some(LAST)),
        "{stderr}"
    );
    let store = server.store("p");
    store.delete(&format!("v2/{delta}")).unwrap();
    let left = paths(&store, "v2");
    assert!(!left.iter().any(|p| p.contains(&delta)), "{left:?}");
    // The base with its three segments, and the result.
    assert_eq!(left.len(), 5, "{left:?}");
}

/// Static large objects: the staging object is one, and goes with its segments.
#[test]
fn swift_segments_of_a_run_that_was_killed_are_cleaned_away() {
    let server = swift_server("segments");
    let store = server.store("p");
    // Parts of a run on this machine that is gone, and of one that is not known.
    for name in ["00000000.Full.0000000000000000.1.1.1", "00000001.Full.x"] {
        let path = format!("segments/p/deltafold-staging/{name}");
        swift(&server.runtime, "PUT", &path, &[], b"part".to_vec());
    }
    assert!(store.clean_staging(Utc::now()).is_empty());
    let later = Utc::now() + chrono::TimeDelta::hours(25);
    assert_eq!(store.clean_staging(later).len(), 2);
    nothing_is_staged(&store);
}

#[test]
fn swift_refuses_a_wrong_password_and_takes_a_changed_one() {
    let server = swift_server("rotated");
    let bucket = Bucket::with_base();
    server.fill("p", bucket.path());
    let auth = format!("{}/auth/v1.0", address("MORE_SERVERS_SWIFT"));
    let with = |user, password| {
        [
            ("authURL", auth.as_str()),
            ("username", user),
            ("password", password),
        ]
    };
    let folder = secret(&with("test:tester", "SECRET-but-wrong"));
    let dir = folder.path().to_str().unwrap();
    let list = || {
        let mut c = deltafold();
        c.args([
            "list",
            "--output",
            "json",
            "--store",
            &server.url("p"),
            "--store-secret",
            dir,
        ]);
        run_json(&mut c)
    };
    let (code, result, stderr) = list();
    assert_eq!(
        (code, result["reason"].as_str()),
        (77, Some("Unauthenticated")),
        "{stderr}"
    );
    assert!(!stderr.contains("SECRET"), "{stderr}");
    change(&folder, &with("test:tester", "testing"));
    assert_eq!(list().0, 0);

    // And within one run.
    let options = [("secret_dir".to_owned(), dir.to_owned())];
    let handle = server.runtime.handle().clone();
    let store = deltafold::store::open(&server.url("p"), &options, handle).unwrap();
    assert_eq!(store.list(&["v2"]).unwrap().len(), 1);
    change(&folder, &with("test:tester", "no longer"));
    std::thread::sleep(Duration::from_millis(1100));
    let e = store.list(&["v2"]).unwrap_err();
    assert_eq!(e.reason(), Reason::Unauthenticated, "{e}");
    change(&folder, &with("test:other", "rotated"));
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(store.list(&["v2"]).unwrap().len(), 1);
}

/// A Keystone that knows one user and one application credential, and gives tempauth's token; the first
/// is good for nothing.
fn keystone(runtime: &Runtime) -> (String, Arc<std::sync::Mutex<Vec<Value>>>) {
    use axum::http::StatusCode;
    let asked = Arc::new(std::sync::Mutex::new(Vec::new()));
    let (seen, swift_url) = (asked.clone(), address("MORE_SERVERS_SWIFT"));
    let answer = move |body: String| {
        let (seen, swift_url) = (seen.clone(), swift_url.clone());
        async move {
            let request: Value = serde_json::from_str(&body).unwrap();
            let is_first = {
                let mut seen = seen.lock().unwrap();
                seen.push(request.clone());
                seen.len() == 1
            };
            let identity = &request["auth"]["identity"];
            let known = identity["password"]["user"]["password"] == "p"
                || identity["application_credential"]["secret"] == "s";
            if !known {
                return (
                    StatusCode::UNAUTHORIZED,
                    [("x-subject-token", String::new())],
                    String::new(),
                );
            }
            let client = crate::support::http_client().build().unwrap();
            let login = client.get(format!("{swift_url}/auth/v1.0"));
            let login = login
                .header("x-auth-user", "test:tester")
                .header("x-auth-key", "testing");
            let login = login.send().await.unwrap();
            let token = match is_first {
                true => "stale".to_owned(),
                false => login.headers()["x-auth-token"].to_str().unwrap().to_owned(),
            };
            let endpoint = |region: &str, url: String| json!({"interface": "public", "region": region, "region_id": region, "url": url});
            let catalog = json!([{"type": "object-store", "endpoints": [
                endpoint("elsewhere", "http://127.0.0.1:9".to_owned()),
                endpoint("here", format!("{swift_url}/v1/AUTH_test")),
            ]}]);
            let expires: DateTime<Utc> = Utc::now() + chrono::TimeDelta::hours(1);
            let token_body =
                json!({"token": {"expires_at": expires.to_rfc3339(), "catalog": catalog}});
            (
                StatusCode::CREATED,
                [("x-subject-token", token)],
                token_body.to_string(),
            )
        }
    };
    let url = runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/v3", listener.local_addr().unwrap());
        let app = axum::Router::new().route("/v3/auth/tokens", axum::routing::post(answer));
        tokio::spawn(async { axum::serve(listener, app).await });
        url
    });
    (url, asked)
}

#[test]
fn swift_is_reached_through_keystone_by_password_and_by_credential() {
    let server = swift_server("keystone");
    let bucket = Bucket::with_base();
    server.fill("p", bucket.path());
    let (url, asked) = keystone(&server.runtime);
    let run = |env: &[(&str, &str)]| {
        let mut c = deltafold();
        c.env("OS_AUTH_URL", &url).env("OS_REGION_NAME", "here");
        c.envs(env.iter().copied());
        c.args(["list", "--output", "json", "--store", &server.url("p")]);
        run_json(&mut c)
    };
    let user = [
        ("OS_USERNAME", "u"),
        ("OS_PASSWORD", "p"),
        ("OS_PROJECT_NAME", "t"),
        ("OS_USER_DOMAIN_NAME", "d"),
    ];
    // The token that is refused is not used again.
    let (code, _, stderr) = run(&user);
    assert_eq!((code, asked.lock().unwrap().len()), (0, 2), "{stderr}");
    let credential = [
        ("OS_APPLICATION_CREDENTIAL_ID", "i"),
        ("OS_APPLICATION_CREDENTIAL_SECRET", "s"),
    ];
    let (code, _, stderr) = run(&credential);
    assert_eq!(code, 0, "{stderr}");
    let last = asked.lock().unwrap().last().unwrap().clone();
    assert_eq!(
        last["auth"]["identity"]["methods"],
        json!(["application_credential"])
    );
    let (code, result, stderr) =
        run(&[&user[..1], &[("OS_PASSWORD", "SECRET")], &user[2..]].concat());
    assert_eq!(
        (code, result["reason"].as_str()),
        (77, Some("Unauthenticated")),
        "{stderr}"
    );
    assert!(!stderr.contains("SECRET"), "{stderr}");
    let (code, result, _) = run(&[&user[..], &[("OS_REGION_NAME", "nowhere")]].concat());
    assert_eq!(
        (code, result["reason"].as_str()),
        (78, Some("Configuration"))
    );
}

// --- Azure ---

/// Makes a container. What signs is Azure's shared key.
fn azure_container(runtime: &Runtime, name: &str) {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use hmac::{Hmac, KeyInit as _, Mac as _};
    let (date, version) = (
        Utc::now().format("%a, %d %b %Y %H:%M:%S GMT").to_string(),
        "2021-12-02",
    );
    let resource = format!("/{AZURITE_ACCOUNT}/{AZURITE_ACCOUNT}/{name}\nrestype:container");
    let text =
        format!("PUT\n\n\n\n\n\n\n\n\n\n\n\nx-ms-date:{date}\nx-ms-version:{version}\n{resource}");
    let key = STANDARD.decode(AZURITE_KEY).unwrap();
    let mut mac = Hmac::<sha2::Sha256>::new_from_slice(&key).unwrap();
    mac.update(text.as_bytes());
    let signature = STANDARD.encode(mac.finalize().into_bytes());
    let base = address("MORE_SERVERS_AZURITE");
    let status = runtime.block_on(async {
        let client = crate::support::http_client().build().unwrap();
        let url = format!("{base}/{AZURITE_ACCOUNT}/{name}?restype=container");
        let request = client
            .put(url)
            .header("x-ms-date", date)
            .header("x-ms-version", version);
        let authorization = format!("SharedKey {AZURITE_ACCOUNT}:{signature}");
        let request = request
            .header("authorization", authorization)
            .header("content-length", "0");
        request.send().await.unwrap().status()
    });
    assert!(status.is_success(), "create the container {name}: {status}");
}

fn azure_server(container: &str) -> Server {
    let runtime = runtime();
    azure_container(&runtime, container);
    let endpoint = format!("{}/{AZURITE_ACCOUNT}", address("MORE_SERVERS_AZURITE"));
    let options = [
        ("account_name", AZURITE_ACCOUNT),
        ("account_key", AZURITE_KEY),
        ("endpoint", endpoint.as_str()),
        ("allow_http", "true"),
    ];
    Server::new(runtime, &format!("az://{container}"), &options, true)
}

#[test]
fn azure_does_all_of_it() {
    the_whole_cycle(&azure_server("cycle"));
}

#[test]
fn azure_takes_its_key_from_a_secret_that_changes() {
    let server = azure_server("secret");
    let bucket = Bucket::with_base();
    server.fill("p", bucket.path());
    let domain = address("MORE_SERVERS_AZURITE")
        .trim_start_matches("http://")
        .to_owned();
    let with = |key| {
        [
            ("storageAccount", AZURITE_ACCOUNT),
            ("storageKey", key),
            ("domain", domain.as_str()),
            ("emulatorEnabled", "true"),
        ]
    };
    let wrong = AZURITE_KEY.replace('E', "F");
    let folder = secret(&with(&wrong));
    let options = [
        (
            "secret_dir".to_owned(),
            folder.path().to_str().unwrap().to_owned(),
        ),
        ("max_retries".to_owned(), "0".to_owned()),
    ];
    let handle = server.runtime.handle().clone();
    let store = deltafold::store::open(&server.url("p"), &options, handle).unwrap();
    let e = store.list(&["v2"]).unwrap_err();
    assert_eq!(e.reason(), Reason::PermissionDenied, "{e}");
    change(&folder, &with(AZURITE_KEY));
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(store.list(&["v2"]).unwrap().len(), 1);
}

// --- Google Cloud Storage ---

#[test]
fn google_does_all_of_it() {
    let runtime = runtime();
    let gcs = Gcs::start(&runtime);
    gcs.create_bucket("cycle");
    let server = Server::new(runtime, "gs://cycle", &[("allow_http", "true")], true);
    let server = server.with("base_url", gcs.endpoint());
    the_whole_cycle(&server.with("service_account_key", &gcs.service_account()));
}

#[test]
fn google_takes_its_key_from_a_secret() {
    let runtime = runtime();
    let gcs = Gcs::start(&runtime);
    gcs.create_bucket("secret");
    let endpoint = format!("{}/storage/v1/", gcs.endpoint());
    let folder = secret(&[
        ("serviceaccount.json", &gcs.service_account()),
        ("storageAPIEndpoint", &endpoint),
        ("emulatorEnabled", "true"),
    ]);
    let dir = folder.path().to_str().unwrap();
    let server = Server::new(runtime, "gs://secret", &[("secret_dir", dir)], true);
    let bucket = Bucket::with_base();
    let store = server.fill("p", bucket.path());
    assert_eq!(store.list(&["v2"]).unwrap().len(), 1);
    // A key that is of another kind is told.
    change(
        &folder,
        &[("serviceaccount.json", r#"{"type": "external_account"}"#)],
    );
    let (code, result, stderr) = server.run("list", "p", &[]);
    assert_eq!(
        (code, result["reason"].as_str()),
        (78, Some("Configuration")),
        "{stderr}"
    );
    assert!(stderr.contains("external accounts"), "{stderr}");
}
