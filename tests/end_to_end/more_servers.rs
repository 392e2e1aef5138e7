//! Stores that need more than Rust and Go: Swift and Azurite, which `tests/end-to-end` starts, and Google Cloud
//! Storage on an emulator.
//!
//! Plain `cargo test` does not run this module: without the servers it fails.

use crate::support::conformance::{
    Abilities, Server, conforms, content, paths, runtime, the_program_works_on,
};
use crate::support::gcs::Gcs;
use crate::support::made_backups::{BASE, Bucket, LAST};
use crate::support::mounted_secret::Mounted;
use crate::support::{deltafold, run_json};
use chrono::{DateTime, Utc};
use deltafold::Reason;
use deltafold::store::{Published, Upload};
use serde_json::{Value, json};
use std::env;
use std::fs;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;

const AZURITE_ACCOUNT: &str = "devstoreaccount1";
/// Azurite's well-known key.
const AZURITE_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

/// What Azure has.
const HAVE: Abilities = Abilities {
    versions: false,
    tags: true,
    conditional_update: true,
    conditional_completion: true,
};

fn address(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run tests/end-to-end"))
}

// --- Swift ---

/// Sends a request as tempauth's user. Returns status, headers and body.
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
    Server::new(runtime, &format!("swift://{container}"), &options)
}

#[test]
fn swift_does_all_of_it() {
    let server = swift_server("cycle");
    conforms(&server.store("conforms"), Abilities::default());
    the_program_works_on(&server);
}

/// A large object as etcd-backup-restore writes it: segments below its own name, and an empty object that names
/// them.
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

/// Static large objects: the segments of a killed run are an unfinished upload, those of an object are not.
#[test]
fn swift_segments_of_a_run_that_was_killed_are_cleaned_away() {
    let server = swift_server("segments");
    let store = server.store("p");
    let whole = vec![7; 12 << 20];
    let mut upload = Upload::new(&store, "v2/whole", 0).unwrap();
    upload.write_all(&whole).unwrap();
    assert_eq!(
        upload.finish().unwrap().complete().unwrap(),
        Published::Created
    );
    for number in ["00000000", "00000001"] {
        let path = format!("segments/p/v2/killed/0123456789abcdef/{number}");
        swift(&server.runtime, "PUT", &path, &[], b"part".to_vec());
    }
    assert_eq!(paths(&store, "v2"), ["v2/whole".to_owned()].into());
    let unfinished = store.uploads().unwrap();
    let found: Vec<_> = unfinished.iter().map(|u| (&*u.path, &*u.id)).collect();
    assert_eq!(found, [("v2/killed", "0123456789abcdef")]);
    store.abort_upload(&unfinished[0]).unwrap();
    assert_eq!(store.uploads().unwrap(), []);
    assert!(content(&store, "v2/whole") == whole);
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
    let folder = Mounted::new(&with("test:tester", "SECRET-but-wrong"));
    let dir = folder.path();
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
    folder.change(&with("test:tester", "testing"));
    assert_eq!(list().0, 0);

    // And within one run.
    let options = [("secret_dir".to_owned(), dir.to_owned())];
    let handle = server.runtime.handle().clone();
    let store = deltafold::store::open(&server.url("p"), &options, handle).unwrap();
    assert_eq!(store.list(&["v2"]).unwrap().len(), 1);
    folder.change(&with("test:tester", "no longer"));
    std::thread::sleep(Duration::from_millis(1100));
    let e = store.list(&["v2"]).unwrap_err();
    assert_eq!(e.reason(), Reason::Unauthenticated, "{e}");
    folder.change(&with("test:other", "rotated"));
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(store.list(&["v2"]).unwrap().len(), 1);
}

/// Starts a Keystone that knows one user and one application credential, and returns tempauth's token; the
/// first token that it returns is invalid.
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
    // The refused token is not used again.
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

/// Creates a container, signed with Azure's shared key.
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
    Server::new(runtime, &format!("az://{container}"), &options)
}

#[test]
fn azure_does_all_of_it() {
    let server = azure_server("cycle");
    conforms(&server.store("conforms"), HAVE);
    the_program_works_on(&server);
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
    let folder = Mounted::new(&with(&wrong));
    let options = [
        ("secret_dir".to_owned(), folder.path().to_owned()),
        ("max_retries".to_owned(), "0".to_owned()),
    ];
    let handle = server.runtime.handle().clone();
    let store = deltafold::store::open(&server.url("p"), &options, handle).unwrap();
    let e = store.list(&["v2"]).unwrap_err();
    assert_eq!(e.reason(), Reason::PermissionDenied, "{e}");
    folder.change(&with(AZURITE_KEY));
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(store.list(&["v2"]).unwrap().len(), 1);
}

// --- Google Cloud Storage ---

#[test]
fn google_does_all_of_it() {
    let runtime = runtime();
    let gcs = Gcs::start(&runtime);
    gcs.create_bucket("cycle");
    let key = gcs.service_account();
    let options = [
        ("allow_http", "true"),
        ("base_url", gcs.endpoint()),
        ("service_account_key", &key),
    ];
    let server = Server::new(runtime, "gs://cycle", &options);
    let has = Abilities {
        conditional_completion: false,
        ..HAVE
    };
    conforms(&server.store("conforms"), has);
    the_program_works_on(&server);
}

#[test]
fn google_takes_its_key_from_a_secret() {
    let runtime = runtime();
    let gcs = Gcs::start(&runtime);
    gcs.create_bucket("secret");
    let endpoint = format!("{}/storage/v1/", gcs.endpoint());
    let folder = Mounted::new(&[
        ("serviceaccount.json", &gcs.service_account()),
        ("storageAPIEndpoint", &endpoint),
        ("emulatorEnabled", "true"),
    ]);
    let dir = folder.path();
    let server = Server::new(runtime, "gs://secret", &[("secret_dir", dir)]);
    let bucket = Bucket::with_base();
    let store = server.fill("p", bucket.path());
    assert_eq!(store.list(&["v2"]).unwrap().len(), 1);
    // A key of another kind is reported.
    folder.change(&[("serviceaccount.json", r#"{"type": "external_account"}"#)]);
    let (code, result, stderr) = server.run("list", "p", &[]);
    assert_eq!(
        (code, result["reason"].as_str()),
        (78, Some("Configuration")),
        "{stderr}"
    );
    assert!(stderr.contains("external accounts"), "{stderr}");
}
