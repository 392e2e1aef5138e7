//! A new user's first mistake is met by a message that does not say what to do, by a flag that is ignored, or
//! by a folder on the wrong disk.

use crate::support::process::free_port;
use crate::support::{copy_fixture, deltafold, run_json, scratch, without_servers};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

/// A port at which nothing listens.
fn closed() -> String {
    format!("http://127.0.0.1:{}", free_port())
}

/// Runs a command that fails. Returns its message and standard error.
fn refused(command: &mut Command, code: i32, reason: &str) -> (String, String) {
    let (got, json, stderr) = run_json(command.args(["--output", "json"]));
    let message = json["message"].as_str().unwrap_or_default().to_owned();
    let got = (got, json["reason"].as_str().unwrap_or_default());
    assert_eq!(got, (code, reason), "{message}\n{stderr}");
    (message, stderr)
}

fn run(args: &[&str]) -> Command {
    let mut command = deltafold();
    command.args(args);
    command
}

#[track_caller]
fn assert_has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "\"{part}\" is not in: {text}");
    }
}

/// A mount that is not there must not become a folder on the disk below it.
#[test]
fn a_first_snapshot_makes_its_folder_but_no_parents() {
    let dir = scratch::folder().unwrap();
    let (missing, nested) = (dir.path().join("backups"), dir.path().join("a b/c"));
    let source = copy_fixture("kubernetes");
    let source = source.path().to_str().unwrap().to_owned();
    let etcd = closed();
    for parent in [&missing, &nested] {
        let store = parent.join("etcd-main");
        let store = store.to_str().unwrap();
        let url = format!("file://{store}");
        for (flag, url, args) in [
            (
                "--store",
                store,
                vec!["snapshot", "full", "--endpoints", &etcd],
            ),
            (
                "--store",
                store,
                vec!["snapshot", "delta", "--endpoints", &etcd],
            ),
            (
                "--store",
                &url,
                vec!["snapshot", "follow", "--endpoints", &etcd],
            ),
            ("--to", store, vec!["copy", "--from", &source]),
        ] {
            let (message, _) = refused(run(&args).args([flag, url]), 78, "Configuration");
            let parent = parent.to_str().unwrap();
            assert_has(&message, &[flag, url, parent, "mount", "`mkdir -p "]);
            let quoted = format!("`mkdir -p '{parent}'`");
            assert_eq!(message.contains(&quoted), parent.contains(' '), "{message}");
        }
        assert!(!parent.exists());
    }
    // The parent exists: the folder is made, and the command goes on.
    std::fs::create_dir(&missing).unwrap();
    let store = missing.join("etcd-main");
    let args = ["snapshot", "full", "--endpoints", &etcd, "--store"];
    refused(run(&args).arg(&store), 69, "EtcdUnreachable");
    assert!(store.is_dir());
    let copied = run(&["copy", "--from", &source, "--to"])
        .arg(missing.join("copy"))
        .status();
    assert!(copied.unwrap().success());
}

#[test]
fn a_wrong_folder_is_named_with_the_right_one() {
    let dir = scratch::folder().unwrap();
    let root = dir.path().join("backups");
    let backup = root.join("etcd-main");
    crate::support::copy_dir(copy_fixture("kubernetes").path(), &backup);
    let full = std::fs::read_dir(backup.join("v2"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .find(|name| name.starts_with("Full-"))
        .unwrap();
    let list =
        |store: &Path, code, reason| refused(run(&["list", "--store"]).arg(store), code, reason).0;
    let right = backup.to_str().unwrap();
    for (wrong, code, reason) in [
        (root.clone(), 66, "NoSnapshots"),
        (root.join("etcd"), 66, "NoSnapshots"),
        (backup.join("v2"), 66, "NoSnapshots"),
        (backup.join("v2").join(&full), 64, "Usage"),
        (backup.join("v3"), 66, "NoSnapshots"),
    ] {
        let message = list(&wrong, code, reason);
        let trimmed = message.trim_end_matches('?');
        assert!(trimmed.ends_with(right), "{}: {message}", wrong.display());
        assert_has(&message, &[wrong.to_str().unwrap(), "v2/"]);
    }
    // Two backups: none of them is more likely.
    std::fs::create_dir_all(root.join("other/v2")).unwrap();
    let message = list(&root, 66, "NoSnapshots");
    assert!(!message.contains("did you mean"), "{message}");
    let message = list(Path::new("http://127.0.0.1:9000/bucket"), 64, "Usage");
    assert_has(&message, &["s3://BUCKET/PREFIX", "endpoint=URL"]);
}

#[test]
fn get_tells_of_prefixes() {
    let store = copy_fixture("kubernetes");
    let store = store.path().to_str().unwrap();
    let (message, _) = refused(&mut run(&["get", "--store", store]), 64, "Usage");
    assert_has(
        &message,
        &["<OBJECT|KEY>...", "--prefix /registry/configmaps/"],
    );
    let get = |key| refused(&mut run(&["get", key, "--store", store]), 66, "KeyNotFound").0;
    assert_has(&get("/registry/"), &["give --prefix /registry/"]);
    let nothing = get("/nothing");
    assert!(!nothing.contains("--prefix /nothing"), "{nothing}");
}

/// None of these flags would have an effect: nobody must believe in a rule that does not hold.
#[test]
fn a_flag_without_effect_is_refused_but_its_variable_is_not() {
    let store = copy_fixture("kubernetes");
    let store = store.path().to_str().unwrap();
    let dir = scratch::folder().unwrap();
    let out = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (file, data, copy) = (out("file.db"), out("data"), out("copy"));
    let restore = ["restore", "--store", store, "--data-dir", &data];
    let to_file = ["restore", "--store", store, "--to-snapshot", &file];
    let limit = ["gc", "--store", store, "--policy", "limit"];
    let exponential = ["gc", "--store", store, "--policy", "exponential"];
    let copy = ["copy", "--from", store, "--to", &copy];
    let verify = ["verify", "--store", store];
    let compact = ["compact", "--store", store, "--dry-run"];
    for (rules, flag, policy) in [
        (&limit, "--keep-hourly", "--policy exponential"),
        (&limit, "--keep-daily", "--policy exponential"),
        (&limit, "--keep-weekly", "--policy exponential"),
        (&limit, "--keep-monthly", "--policy exponential"),
        (&exponential, "--limit", "--policy limit"),
    ] {
        let ended = run(rules).args([flag, "3"]).output().unwrap();
        let stderr = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(64), "{flag}: {stderr}");
        assert_has(&stderr, &[flag, policy]);
    }
    let cases: [(&[&str], &str, &str, &str); 15] = [
        (
            &exponential,
            "metrics-scrape-wait",
            "1s",
            "--metrics-bind-address",
        ),
        (&verify, "drill-timeout", "1m", "--etcd-binary"),
        (&verify, "cacert", "ca.crt", "--endpoints"),
        (&verify, "tls-secret", "/nowhere", "--endpoints"),
        (&compact, "lease-namespace", "x", "--snapshot-lease-prefix"),
        (&copy, "wait-timeout", "1m", "--wait-for-final"),
        (&copy, "interval", "1m", "--wait-for-final"),
        (&to_file, "name", "a", "--to-snapshot"),
        (
            &to_file,
            "initial-cluster",
            "a=http://a:2380",
            "--to-snapshot",
        ),
        (&to_file, "initial-cluster-token", "a", "--to-snapshot"),
        (
            &to_file,
            "initial-advertise-peer-urls",
            "http://a:2380",
            "--to-snapshot",
        ),
        (&restore, "peer-trusted-ca-file", "ca.crt", "--if-needed"),
        (
            &["task", "create", "snapshot", "--policy", "main"],
            "timeout",
            "3s",
            "--wait",
        ),
        (
            &[
                "task", "create", "copy", "--policy", "main", "--to", "s3://b/p",
            ],
            "wait-timeout",
            "3s",
            "--wait-for-final",
        ),
        (
            &[
                "snapshot",
                "full",
                "--store",
                store,
                "--endpoints",
                "http://127.0.0.1:9",
            ],
            "lease-namespace",
            "x",
            "--snapshot-lease-prefix",
        ),
    ];
    for (command, flag, value, advice) in cases {
        let flag_on_line = format!("--{flag}");
        let mut given = run(command);
        let (message, stderr) = refused(given.args([&flag_on_line, value]), 64, "Usage");
        assert_has(&message, &[advice]);
        assert_has(&stderr, &[&format!("Usage: deltafold {} ", command[0])]);
        let variable = format!("DELTAFOLD_{}", flag.replace('-', "_").to_uppercase());
        let ended = run(command)
            .env(variable, value)
            .env("KUBECONFIG", "/nowhere")
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&ended.stderr);
        assert_ne!(ended.status.code(), Some(64), "{flag}: {stderr}");
        for made in [&file, &data] {
            let made = Path::new(made);
            let _ = std::fs::remove_file(made);
            let _ = std::fs::remove_dir_all(made);
        }
    }
}

#[test]
fn a_refused_store_is_named_with_host_port_and_advice() {
    let list = |endpoint: &str| {
        let mut command = deltafold();
        without_servers(&mut command)
            .args(["list", "--store", "s3://b/p"])
            .args(["--store-option", "max_retries=0"])
            .args(["--store-option", &format!("endpoint={endpoint}")])
            .env("NO_PROXY", "*");
        command
    };
    let closed = closed();
    let (message, _) = refused(&mut list(&closed), 69, "StoreUnreachable");
    let at = format!("cannot list s3://b/p at {closed}: ");
    assert_has(&message, &[&at, "refused", "--store-option endpoint"]);
    let nowhere = "http://deltafold.invalid:9000";
    let (message, _) = refused(&mut list(nowhere), 69, "StoreUnreachable");
    assert_has(&message, &[nowhere, "check the host name"]);
    // A server without TLS.
    let plain = TcpListener::bind("127.0.0.1:0").unwrap();
    let https = format!("https://{}", plain.local_addr().unwrap());
    let answering = std::thread::spawn(move || {
        let (mut asked, _) = plain.accept().unwrap();
        let _ = asked.read(&mut [0; 1024]);
        let _ = asked.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
    });
    let (message, _) = refused(&mut list(&https), 69, "StoreUnreachable");
    answering.join().unwrap();
    assert_has(&message, &[&https, "does not speak TLS", "http://"]);
    // The crate would panic.
    for bad in [
        "127.0.0.1:9000",
        "minio:9000",
        "minio",
        "ftp://minio",
        "http://",
    ] {
        let (message, stderr) = refused(&mut list(bad), 78, "Configuration");
        assert_has(&message, &[bad, "endpoint=https://HOST:PORT"]);
        assert!(!stderr.contains("panicked"), "{stderr}");
    }
    let (message, _) = refused(&mut list("user:hidden@minio"), 78, "Configuration");
    assert!(!message.contains("hidden"), "{message}");
}

#[test]
fn a_store_without_its_settings_names_them() {
    for (url, code, reason, names) in [
        (
            "az://c/x",
            78,
            "Configuration",
            ["account_name", "AZURE_STORAGE_ACCOUNT_NAME"],
        ),
        (
            "swift://c/x",
            78,
            "Configuration",
            ["auth_url", "OS_AUTH_URL"],
        ),
    ] {
        let (message, _) = refused(&mut run(&["list", "--store", url]), code, reason);
        assert_has(&message, &[url]);
        assert_has(&message, &names);
    }
}

/// A name that a store would change, or that no listing shows again, is refused before anything is written.
#[test]
fn a_prefix_that_no_store_can_keep_is_refused() {
    let source = copy_fixture("kubernetes");
    let from = source.path().to_str().unwrap();
    let long = format!("s3://b/{}", "x".repeat(701));
    for (url, part) in [
        ("s3://b/a//b", "empty"),
        ("s3://b//a", "empty"),
        ("s3://b/a/../c", ".."),
        ("gs://b/./c", "empty, . or .."),
        ("swift://b/a\tb", "control character"),
        ("s3://b/ a", "white space"),
        ("s3://b/a\u{fffd}", "unreadable"),
        ("az://b/a\\b", "backslash"),
        ("az://b/a./b", "dot"),
        ("s3://b/a?x=1", "no ?"),
        ("file:///a?x=1", "no ?"),
        ("s3://user:secret@b/a", "no user"),
        ("s3://b:9000/a", "bucket"),
        ("s3://b#x/a", "bucket"),
        ("s3:///a", "bucket"),
        ("nfs://b/a", "use s3://"),
        (&long, "700 bytes"),
    ] {
        let (message, _) = refused(
            &mut run(&["copy", "--from", from, "--to", url]),
            64,
            "Usage",
        );
        assert_has(&message, &[part]);
        assert!(!message.contains("secret@"), "{message}");
    }
}

#[test]
fn without_a_kubeconfig_the_remedy_comes_first() {
    let home = scratch::folder().unwrap();
    let store = copy_fixture("kubernetes");
    let store = store.path().to_str().unwrap();
    let etcd = closed();
    let follow = [
        "snapshot",
        "follow",
        "--lock-lease",
        "x",
        "--store",
        store,
        "--endpoints",
        &etcd,
    ];
    let task = ["task", "create", "verify", "--policy", "main"];
    for args in [&task[..], &["controller"], &follow] {
        let mut command = run(args);
        command
            .env("HOME", home.path())
            .env_remove("KUBECONFIG")
            .env_remove("KUBERNETES_SERVICE_HOST");
        let (message, _) = match args[0] {
            // It has no result.
            "controller" => {
                let ended = command.args(["--log-format", "text"]).output().unwrap();
                assert_eq!(ended.status.code(), Some(78));
                let stderr = String::from_utf8_lossy(&ended.stderr).into_owned();
                (
                    stderr.trim_start_matches("error: ").to_owned(),
                    String::new(),
                )
            }
            _ => refused(&mut command, 78, "Configuration"),
        };
        let remedy = "no Kubernetes API is configured: set KUBECONFIG";
        let at = message.find(remedy);
        assert!(at.is_some(), "{args:?}: {message}");
        assert!(message.find("No such file") > at, "{args:?}: {message}");
    }
}

/// The failure of an endpoint was logged, and was then the error, and had its cause twice.
#[test]
fn a_refused_etcd_is_told_once() {
    let dir = scratch::folder().unwrap();
    let (a, b) = (closed(), closed());
    for endpoints in [a.clone(), format!("{a},{b}")] {
        let mut command = run(&["snapshot", "full", "--endpoints", &endpoints]);
        command.arg("--store").arg(dir.path());
        command.args(["--log-format", "text", "--log-level", "info"]);
        let ended = command.output().unwrap();
        assert_eq!(ended.status.code(), Some(69));
        let stderr = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(stderr.matches("refused").count(), 1, "{stderr}");
        assert!(!stderr.contains("transport error"), "{stderr}");
        assert_has(&stderr, &["nothing listens", "--endpoints"]);
        for endpoint in endpoints.split(',') {
            assert_eq!(stderr.matches(endpoint).count(), 1, "{stderr}");
        }
    }
}

#[test]
fn apply_tells_the_tls_key_from_a_key_of_etcd() {
    let store = copy_fixture("kubernetes");
    let store = store.path().to_str().unwrap();
    let etcd = closed();
    let apply = ["apply", "--store", store, "--endpoints", &etcd];
    let with = |args: &[&str]| {
        let mut command = run(&apply);
        command.args(args).env("DELTAFOLD_COMMAND_TIMEOUT", "10ms");
        command
    };
    let (message, _) = refused(&mut with(&["--key", "/registry/x"]), 64, "Usage");
    assert_has(&message, &["TLS", "--exact-key KEY"]);
    let tls = [
        "--prefix",
        "/x/",
        "--cert",
        "/registry/x",
        "--key",
        "/registry/x",
    ];
    let mut command = run(&[
        "apply",
        "--store",
        store,
        "--endpoints",
        "https://127.0.0.1:9",
    ]);
    let (message, _) = refused(command.args(tls), 78, "Configuration");
    assert_has(&message, &["/registry/x"]);
    let both = ["--exact-key", "/x", "--prefix", "/x"];
    refused(&mut with(&both), 64, "Usage");
    refused(&mut with(&["--exact-key", ""]), 64, "Usage");
    refused(&mut with(&["--delete-extra", "--prefix", ""]), 64, "Usage");
    for objects in [
        &["configmap/shop/settings"][..],
        &["-n", "shop"],
        &["-l", "app=web"],
    ] {
        let (message, _) = refused(&mut with(objects), 64, "Usage");
        assert_has(&message, &["deltafold recover"]);
    }
    // The variable of the other flag does not count.
    for (given, variable) in [
        ("--exact-key", "DELTAFOLD_PREFIX"),
        ("--prefix", "DELTAFOLD_EXACT_KEY"),
    ] {
        let mut command = with(&[given, "/x"]);
        refused(command.env(variable, "/y"), 69, "EtcdUnreachable");
    }
}
