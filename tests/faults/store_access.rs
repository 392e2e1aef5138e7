//! Access to a store: certificates, proxies, retries, server-side encryption, Secrets that change.

use crate::support::conformance::runtime;
use crate::support::made_backups::{BASE, Bucket, LAST};
use crate::support::minio::Minio;
use crate::support::mounted_secret::Mounted;
use crate::support::process::http;
use crate::support::scratch;
use crate::support::{deltafold, run_json, succeed, tools};
use deltafold::Reason;
use deltafold::backup::catalog::mark_of;
use deltafold::store::{self, Store};
use object_store::ObjectStoreExt;
use object_store::path::Path;
use object_store::signer::{Method, Signer};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn options(given: &[(&str, &str)]) -> Vec<(String, String)> {
    let owned = |(k, v): &(&str, &str)| ((*k).to_owned(), (*v).to_owned());
    given.iter().map(owned).collect()
}

fn credentials(minio: &Minio) -> Vec<(String, String)> {
    options(&[
        ("endpoint", minio.endpoint()),
        ("region", "us-east-1"),
        ("access_key_id", minio.access_key()),
        ("secret_access_key", minio.secret_key()),
        ("max_retries", "0"),
    ])
}

fn with(minio: &Minio, given: &[(&str, &str)]) -> Vec<(String, String)> {
    [credentials(minio), options(given)].concat()
}

/// Returns a Secret in the form of etcd-backup-restore for a MinIO, with this key.
fn secret<'a>(minio: &'a Minio, key: &'a str) -> [(&'static str, &'a str); 4] {
    [
        ("accessKeyID", minio.access_key()),
        ("secretAccessKey", key),
        ("endpoint", minio.endpoint()),
        ("region", "us-east-1"),
    ]
}

/// Runs a command with only these settings.
fn run(command: &str, url: &str, options: &[(String, String)]) -> (i32, Value, String) {
    let mut c = deltafold();
    c.args([command, "--output", "json", "--store", url]);
    for (key, value) in options {
        c.args(["--store-option", &format!("{key}={value}")]);
    }
    run_json(&mut c)
}

/// Uploads a small backup that can be compacted.
fn fill(store: &Store) {
    let bucket = Bucket::with_base();
    bucket.delta(BASE + 1, LAST, 6);
    for (path, bytes) in bucket.objects() {
        store.create_small(&path, &bytes).unwrap();
    }
}

fn compacts(url: &str, options: &[(String, String)]) -> String {
    let (code, result, stderr) = run("compact", url, options);
    assert_eq!(
        (code, result["revision"].as_i64()),
        (0, Some(LAST)),
        "{stderr}"
    );
    assert_eq!(result["warnings"], serde_json::json!([]));
    result["snapshot"].as_str().unwrap().to_owned()
}

#[test]
fn a_certificate_authority_of_ones_own_is_given_by_a_file_or_a_secret() {
    let rt = runtime();
    let certs = scratch::folder().unwrap();
    tools::write_certs(certs.path());
    let minio = Minio::start_tls(certs.path());
    let file = |name: &str| certs.path().join(name).to_str().unwrap().to_owned();
    let pem = fs::read(file("ca.crt")).unwrap();
    let client = crate::support::http_client()
        .no_proxy()
        .add_root_certificate(reqwest::Certificate::from_pem(&pem).unwrap())
        .build()
        .unwrap();
    rt.block_on(async {
        let (store, top) = (minio.store("tls"), Path::from(""));
        let url = store
            .signed_url(Method::PUT, &top, Duration::from_secs(60))
            .await
            .unwrap();
        assert!(client.put(url).send().await.unwrap().status().is_success());
    });
    let url = "s3://tls/p";
    for (given, why) in [(None, "certificate"), (Some("other-ca.crt"), "certificate")] {
        let mut options = credentials(&minio);
        options.extend(given.map(|g| ("ca_certificate".to_owned(), file(g))));
        let (code, result, stderr) = run("list", url, &options);
        assert_eq!(
            (code, result["reason"].as_str()),
            (78, Some("Configuration")),
            "{stderr}"
        );
        assert!(stderr.contains(why), "{stderr}");
    }
    let trusted = with(&minio, &[("ca_certificate", &file("ca.crt"))]);
    fill(&store::open(url, &trusted, rt.handle().clone()).unwrap());
    compacts(url, &trusted);
    let (code, result, _) = run(
        "list",
        url,
        &with(&minio, &[("ca_certificate", &file("node.key"))]),
    );
    assert_eq!(
        (code, result["reason"].as_str()),
        (78, Some("Configuration"))
    );

    // Everything from a Secret, with a customer-provided encryption key.
    let pem = String::from_utf8(pem).unwrap();
    let key = "0123456789abcdef0123456789abcdef";
    let mut settings = secret(&minio, minio.secret_key()).to_vec();
    settings.extend([("s3ForcePathStyle", "true"), ("trustedCaCert", &pem)]);
    let mounted = Mounted::new(&settings);
    let secret = options(&[("secret_dir", mounted.path())]);
    assert_eq!(run("list", url, &secret).0, 0);
    settings.extend([("sseCustomerKey", key), ("sseCustomerAlgorithm", "AES256")]);
    let sealing = Mounted::new(&settings);
    let sealed = options(&[("secret_dir", sealing.path())]);
    fill(&store::open("s3://tls/sealed", &sealed, rt.handle().clone()).unwrap());
    compacts("s3://tls/sealed", &sealed);
    assert_ne!(run("compact", "s3://tls/sealed", &secret).0, 0);
}

/// What `openssl req -x509` makes is the certificate of an authority. Given as the trusted one, it is accepted.
#[test]
fn a_self_signed_certificate_that_is_given_is_accepted() {
    let certs = scratch::folder().unwrap();
    tools::write_certs(certs.path());
    let file = |name: &str| certs.path().join(name);
    for (from, to) in [("self.crt", "node.crt"), ("self.key", "node.key")] {
        fs::copy(file(from), file(to)).unwrap();
    }
    let minio = Minio::start_tls(certs.path());
    for (given, expected) in [
        (None, (78, "Configuration")),
        (Some("ca.crt"), (78, "Configuration")),
        (Some("self.crt"), (66, "NoSnapshots")),
    ] {
        let mut options = credentials(&minio);
        let given = given.map(|given| file(given).to_str().unwrap().to_owned());
        options.extend(given.map(|given| ("ca_certificate".to_owned(), given)));
        let (code, result, stderr) = run("list", "s3://none/p", &options);
        let found = (code, result["reason"].as_str().unwrap());
        assert_eq!(found, expected, "{stderr}");
        assert_eq!(
            stderr.contains("trust this very certificate"),
            code == 78,
            "{stderr}"
        );
    }
}

#[test]
fn the_server_encrypts_by_kms_and_checks_sums() {
    let rt = runtime();
    let minio = Minio::start_with(&[(
        "MINIO_KMS_SECRET_KEY",
        "own-key:MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=",
    )]);
    rt.block_on(minio.create_bucket("kms"));
    for (i, algorithm) in ["sha256", "crc64nvme"].into_iter().enumerate() {
        let options = with(
            &minio,
            &[
                ("server_side_encryption", "aws:kms"),
                ("sse_kms_key_id", "own-key"),
                ("checksum_algorithm", algorithm),
            ],
        );
        let url = format!("s3://kms/{i}");
        let store = store::open(&url, &options, rt.handle().clone()).unwrap();
        fill(&store);
        // So that it is uploaded in parts, too.
        let bucket = Bucket::with_base();
        bucket.delta(BASE + 1, LAST, 6);
        bucket.noise_delta(30);
        for (path, bytes) in bucket.objects() {
            store.create_small(&path, &bytes).unwrap();
        }
        let (code, result, stderr) = run("compact", &url, &options);
        assert_eq!(code, 0, "{algorithm}: {stderr}");
        assert!(result["bytes_written"].as_u64().unwrap() > 10 << 20);
        let key = format!("{i}/v2/{}", result["snapshot"].as_str().unwrap());
        let signed = rt.block_on(async {
            let (store, path) = (minio.store("kms"), Path::from(key));
            let signed = store.signed_url(Method::HEAD, &path, Duration::from_secs(60));
            signed.await.unwrap()
        });
        let target = &signed[url::Position::BeforePath..];
        let head = http(signed.port().unwrap(), "HEAD", target, "")
            .unwrap()
            .to_lowercase();
        assert!(
            head.contains("x-amz-server-side-encryption: aws:kms"),
            "{head}"
        );
        assert!(head.contains("own-key"), "{head}");
    }
}

/// A proxy that forwards requests for any host to one server and records them.
struct Proxy {
    url: String,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Proxy {
    fn start(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let seen: Arc<Mutex<Vec<String>>> = Arc::default();
        let notes = seen.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (server, notes) = (server.clone(), notes.clone());
                std::thread::spawn(move || pass(client, &server, &notes));
            }
        });
        Proxy { url, seen }
    }
}

/// Records the first request of a connection; the following ones take the same way.
fn pass(client: TcpStream, server: &str, notes: &Mutex<Vec<String>>) -> std::io::Result<()> {
    let mut reader = BufReader::new(client.try_clone()?);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head)? > 0 {}
    // A connection may be opened and not used.
    if head.is_empty() {
        return Ok(());
    }
    notes
        .lock()
        .unwrap()
        .push(head.lines().next().unwrap_or_default().to_owned());
    let mut upstream = TcpStream::connect(server)?;
    upstream.write_all(head.as_bytes())?;
    let (mut back_from, mut back_to) = (upstream.try_clone()?, client);
    std::thread::spawn(move || std::io::copy(&mut back_from, &mut back_to));
    std::io::copy(&mut reader, &mut upstream)?;
    Ok(())
}

#[test]
fn a_proxy_is_used_and_the_bucket_may_be_part_of_the_host_name() {
    let rt = runtime();
    let minio = Minio::start_with(&[("MINIO_DOMAIN", "s3.test")]);
    rt.block_on(minio.create_bucket("virtual"));
    let server = minio.endpoint().trim_start_matches("http://").to_owned();
    let proxy = Proxy::start(server);
    let mut given = credentials(&minio);
    // A host name that only the proxy knows.
    given[0].1 = "http://s3.test".to_owned();
    given.extend(options(&[("proxy_url", &proxy.url)]));
    let path = |line: &str| line.split(' ').nth(1).unwrap_or_default().to_owned();
    for (style, expected) in [
        ("true", "http://s3.test/virtual"),
        ("false", "http://virtual.s3.test/"),
    ] {
        let url = format!("s3://virtual/{style}");
        let mut given = given.clone();
        given.extend(options(&[("path_style", style)]));
        fill(&store::open(&url, &given, rt.handle().clone()).unwrap());
        compacts(&url, &given);
        let seen: Vec<String> = std::mem::take(&mut *proxy.seen.lock().unwrap());
        assert!(
            !seen.is_empty() && seen.iter().all(|l| path(l).starts_with(expected)),
            "{seen:?}"
        );
    }
    // Somebody on the way to that host could read credentials; a request without credentials has none.
    let warnings = |given: &[(String, String)]| {
        let (code, _, stderr) = run("list", "s3://virtual/true", given);
        assert!(!stderr.contains(minio.secret_key()), "{stderr}");
        (code, stderr.matches("without TLS").count())
    };
    assert_eq!(warnings(&given), (0, 1));
    assert_eq!(warnings(&credentials(&minio)), (0, 0));
    given.push(("skip_signature".to_owned(), "true".to_owned()));
    assert_eq!(warnings(&given), (77, 0));
    let (code, result, _) = run(
        "list",
        "s3://virtual/true",
        &with(&minio, &[("path_style", "maybe")]),
    );
    assert_eq!(
        (code, result["reason"].as_str()),
        (78, Some("Configuration"))
    );
}

#[test]
fn requests_are_tried_again_as_often_as_is_said() {
    let asked = Arc::new(AtomicUsize::new(0));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let count = asked.clone();
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            count.fetch_add(1, Ordering::SeqCst);
            let mut client = client;
            let _ = client.read(&mut [0; 8192]);
            let answer = "HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            let _ = client.write_all(answer.as_bytes());
        }
    });
    for (url, given) in [
        (
            "s3://b/p",
            vec![("access_key_id", "a"), ("secret_access_key", "b")],
        ),
        (
            "az://b/p",
            vec![
                ("account_name", "a"),
                ("account_key", "YQ=="),
                ("allow_http", "true"),
            ],
        ),
        (
            "swift://b/p",
            vec![("auth_token", "a"), ("storage_url", endpoint.as_str())],
        ),
    ] {
        for retries in [0, 2] {
            asked.store(0, Ordering::SeqCst);
            let mut options = options(&given);
            if !url.starts_with("swift") {
                options.push(("endpoint".to_owned(), endpoint.clone()));
            }
            options.push(("max_retries".to_owned(), retries.to_string()));
            let (code, result, stderr) = run("list", url, &options);
            assert_eq!(
                (code, result["reason"].as_str()),
                (69, Some("StoreUnreachable")),
                "{stderr}"
            );
            // Both layouts are listed at once; the first failure ends the other.
            let times = asked.load(Ordering::SeqCst);
            assert!(
                (retries + 1..=2 * (retries + 1)).contains(&times),
                "{url}: {times} requests with {retries} retries"
            );
        }
    }
}

#[test]
fn a_changed_secret_counts_within_a_run() {
    let rt = runtime();
    let minio = Minio::start();
    rt.block_on(minio.create_bucket("secret"));
    let (right, wrong) = (
        secret(&minio, minio.secret_key()),
        secret(&minio, "SECRET-but-wrong"),
    );
    let mounted = Mounted::new(&wrong);
    let given = options(&[("secret_dir", mounted.path()), ("max_retries", "0")]);
    let store = store::open("s3://secret/p", &given, rt.handle().clone()).unwrap();
    let refused = store.list(&["v2"]).unwrap_err();
    assert_eq!(refused.reason(), Reason::PermissionDenied, "{refused}");
    let soon = Duration::from_millis(1100);
    mounted.change(&right);
    std::thread::sleep(soon);
    fill(&store);
    assert_eq!(store.list(&["v2"]).unwrap().len(), 2);
    // A Secret without the needed keys changes nothing.
    mounted.change(&[("somethingElse", "x")]);
    std::thread::sleep(soon);
    assert_eq!(store.list(&["v2"]).unwrap().len(), 2);
    mounted.change(&wrong);
    std::thread::sleep(soon);
    assert!(store.list(&["v2"]).is_err());
    // Requests of our own use the same credentials.
    mounted.change(&right);
    std::thread::sleep(soon);
    let name = store.list(&["v2"]).unwrap()[0].0.clone();
    store.exclude(&name, &mark_of(&name)).unwrap();
    assert_eq!(store.excluded_by_tag(&[name]).unwrap(), [true]);

    // By etcd-backup-restore's variable, and overridden by a setting.
    let mut c = deltafold();
    c.args(["list", "--output", "json", "--store", "s3://secret/p"]);
    c.env("AWS_APPLICATION_CREDENTIALS", mounted.path());
    succeed(&mut c);
    mounted.change(&wrong);
    let mut c = deltafold();
    c.args([
        "list",
        "--output",
        "json",
        "--store",
        "s3://secret/p",
        "--store-secret",
        mounted.path(),
    ]);
    c.args([
        "--store-option",
        &format!("access_key_id={}", minio.access_key()),
    ]);
    c.args([
        "--store-option",
        &format!("secret_access_key={}", minio.secret_key()),
    ]);
    succeed(&mut c);
    let mut c = deltafold();
    c.args([
        "list",
        "--output",
        "json",
        "--store",
        "s3://secret/p",
        "--store-secret",
        mounted.path(),
    ]);
    let (code, result, stderr) = run_json(&mut c);
    assert_eq!(
        (code, result["reason"].as_str()),
        (77, Some("PermissionDenied"))
    );
    assert!(!stderr.contains("SECRET-but"), "{stderr}");
}

/// A copy that follows lives through wrong credentials in its Secret.
#[test]
fn a_long_job_lives_through_a_change_of_its_key() {
    let rt = runtime();
    let minio = Minio::start();
    rt.block_on(minio.create_bucket("long"));
    let mounted = Mounted::new(&secret(&minio, minio.secret_key()));
    let store = minio.store("long");
    let bucket = Bucket::with_base();
    let put = |name: &str| {
        let bytes = fs::read(bucket.path().join("v2").join(name)).unwrap();
        let path = Path::from(format!("p/v2/{name}"));
        rt.block_on(store.put(&path, bytes.into())).unwrap();
    };
    put(&bucket.names()[0]);
    let target = scratch::folder().unwrap();
    let mut c = deltafold();
    c.args([
        "copy",
        "--from",
        "s3://long/p",
        "--follow",
        "--interval",
        "1s",
        "--to",
    ]);
    c.arg(target.path());
    c.args(["--from-option", &format!("secret_dir={}", mounted.path())]);
    c.args(["--from-option", "max_retries=1"]);
    let mut job = c.spawn().unwrap();
    let copied = |job: &mut std::process::Child, name: &str| {
        let path = target.path().join("v2").join(name);
        while !path.exists() {
            if let Some(ended) = job.try_wait().unwrap() {
                panic!("it ended with {ended} and has not copied {name}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    copied(&mut job, &bucket.names()[0]);
    // The Secret changes again: it is read anew and is valid.
    mounted.change(
        &[
            &secret(&minio, minio.secret_key())[..],
            &[("bucketName", "long")],
        ]
        .concat(),
    );
    std::thread::sleep(Duration::from_millis(1500));
    let first = bucket.delta(BASE + 1, 1499, 6);
    put(&first);
    copied(&mut job, &first);
    let pid = rustix::process::Pid::from_child(&job);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    job.wait().unwrap();
}

/// The providers' variables as files, as Jobs mount them: for one store, and for each of the two of a copy.
/// Credentials in the environment are not used.
#[test]
fn a_folder_of_variables_is_as_good_as_the_environment() {
    let rt = runtime();
    let minio = Minio::start();
    rt.block_on(minio.create_bucket("folders"));
    let url = "s3://folders/p";
    fill(&store::open(url, &credentials(&minio), rt.handle().clone()).unwrap());
    let files = |secret| {
        [
            ("AWS_ACCESS_KEY_ID", minio.access_key()),
            ("AWS_SECRET_ACCESS_KEY", secret),
            ("AWS_ENDPOINT_URL", minio.endpoint()),
            ("AWS_REGION", "us-east-1"),
        ]
    };
    let good = Mounted::new(&files(minio.secret_key()));
    let wrong = Mounted::new(&files("quite-wrong"));
    let ambient = [
        ("AWS_ACCESS_KEY_ID", minio.access_key()),
        ("AWS_SECRET_ACCESS_KEY", minio.secret_key()),
        ("AWS_ENDPOINT_URL", minio.endpoint()),
        ("AWS_REGION", "us-east-1"),
    ];
    let nobody = [
        ("AWS_ACCESS_KEY_ID", "nobody"),
        ("AWS_SECRET_ACCESS_KEY", "nothing"),
        ("AWS_SESSION_TOKEN", "nowhere"),
    ];
    let list = |secret: &Mounted, env: &[(&str, &str)]| {
        let mut command = deltafold();
        command.args(["list", "--output", "json", "--store", url]);
        command.args(["--store-secret", secret.path()]);
        run_json(command.envs(env.iter().copied()))
    };
    let (code, _, stderr) = list(&good, &nobody);
    assert_eq!(code, 0, "{stderr}");
    let (code, result, stderr) = list(&wrong, &ambient);
    assert_eq!(code, 77, "{stderr}");
    assert!(!format!("{result}{stderr}").contains("quite-wrong"));
    let options = options(&[("secret_dir", good.path())]);
    compacts(url, &options);

    let copy = |from: &Mounted, to: &Mounted| {
        let mut command = deltafold();
        let option = |secret: &Mounted| format!("secret_dir={}", secret.path());
        command
            .args(["copy", "--output", "json"])
            .args(["--from", url, "--to", "s3://folders/copy"])
            .args(["--from-option", &option(from), "--to-option", &option(to)]);
        run_json(command.envs(ambient)).0
    };
    assert_eq!(copy(&wrong, &good), 77);
    assert_eq!(copy(&good, &wrong), 77);
    assert_eq!(copy(&good, &good), 0);
}

#[test]
fn each_of_several_stores_has_its_secret() {
    let rt = runtime();
    let minio = Minio::start();
    rt.block_on(minio.create_bucket("several"));
    fill(&store::open("s3://several/p", &credentials(&minio), rt.handle().clone()).unwrap());
    let folder = scratch::folder().unwrap();
    let restored = folder.path().join("restored.db");
    let right = Mounted::new(&secret(&minio, minio.secret_key()));
    let wrong = Mounted::new(&secret(&minio, "another"));
    let restore = |secrets: &[&Mounted]| {
        let mut c = deltafold();
        // A file of this machine is no store, however it is written.
        let file = format!("file://{}", restored.display());
        c.args(["restore", "--output", "json", "--to-snapshot", &file]);
        c.args(["--store", "s3://several/p", "--store", "s3://several/p"]);
        for secret in secrets {
            c.args(["--store-secret", secret.path()]);
        }
        run_json(&mut c)
    };
    let (code, result, stderr) = restore(&[&wrong, &right]);
    assert_eq!(
        (code, result["revision"].as_i64()),
        (0, Some(LAST)),
        "{stderr}"
    );
    assert_eq!(
        result["candidates"][0]["reason"], "PermissionDenied",
        "{result}"
    );
    assert!(restored.exists());
    let (code, result, _) = restore(&[&right, &right, &right]);
    assert_eq!((code, &result["reason"]), (64, &"Usage".into()), "{result}");
}

#[test]
fn a_setting_that_belongs_to_no_store_is_told() {
    for url in ["s3://b", "gs://b", "az://b", "swift://b"] {
        let given = [
            ("no_such_setting", "SECRET"),
            ("endpoint", "http://127.0.0.1:9"),
        ];
        let given = &given[..if ["gs://b", "swift://b"].contains(&url) {
            1
        } else {
            2
        }];
        let (code, result, stderr) = run("list", url, &options(given));
        assert_eq!(
            (code, result["reason"].as_str()),
            (78, Some("Configuration")),
            "{stderr}"
        );
        assert!(
            stderr.contains("no_such_setting") && !stderr.contains("SECRET"),
            "{stderr}"
        );
    }
    let (code, _, stderr) = run(
        "list",
        "s3://b",
        &options(&[("secret_dir", "/no/such/folder")]),
    );
    assert_eq!(code, 78);
    assert!(stderr.contains("/no/such/folder"), "{stderr}");
}
