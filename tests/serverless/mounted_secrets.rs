//! Folders of mounted Secrets: which file names a store reads, and what an error says about a missing key. No
//! other credentials are used instead.

use crate::support::mounted_secret::Mounted;
use crate::support::{deltafold, run_json, scratch};
use serde_json::Value;
use std::fs;
use std::net::TcpListener;

const HIDDEN: &str = "hidden-from-all";

/// Complete credentials of all providers in the environment.
const AMBIENT: [(&str, &str); 14] = [
    ("AWS_ACCESS_KEY_ID", "ambient"),
    ("AWS_SECRET_ACCESS_KEY", HIDDEN),
    ("AWS_SESSION_TOKEN", HIDDEN),
    ("AZURE_STORAGE_ACCOUNT_NAME", "ambient"),
    ("AZURE_STORAGE_ACCOUNT_KEY", "aGlkZGVu"),
    ("GOOGLE_SERVICE_ACCOUNT", "/ambient.json"),
    ("OS_AUTH_URL", "http://127.0.0.1:9/v3"),
    ("OS_USERNAME", "ambient"),
    ("OS_PASSWORD", HIDDEN),
    ("OS_PROJECT_NAME", "ambient"),
    ("OS_APPLICATION_CREDENTIAL_ID", "ambient"),
    ("OS_APPLICATION_CREDENTIAL_SECRET", HIDDEN),
    ("ALIBABA_CLOUD_ACCESS_KEY_ID", "ambient"),
    ("ALIBABA_CLOUD_ACCESS_KEY_SECRET", HIDDEN),
];

/// Lists a store with these flags.
fn list(url: &str, args: &[&str]) -> (i32, String, String) {
    let mut command = deltafold();
    command
        .args(["list", "--output", "json", "--log-level", "trace"])
        .args(["--store", url, "--store-option", "max_retries=0"])
        .args(["--store-option", "retry_timeout=0"])
        .args(args)
        .envs(AMBIENT);
    told(run_json(&mut command))
}

fn told((code, result, stderr): (i32, Value, String)) -> (i32, String, String) {
    let message = result["message"].as_str().unwrap_or_default().to_owned();
    for text in [&message, &stderr] {
        assert!(
            !text.contains(HIDDEN) && !text.contains("PRIVATE KEY"),
            "{text}"
        );
    }
    let reason = result["reason"].as_str().unwrap_or_default().to_owned();
    (code, reason, message)
}

/// A Secret that does not exist is mounted as an empty folder. That must not select other credentials.
#[test]
fn a_secret_that_is_not_there_or_lacks_a_key_is_named() {
    let folder = scratch::folder().unwrap();
    let cases = [
        ("s3://b/p", "roleARN", "token"),
        ("s3://b/p", "accessKeyID", "secretAccessKey"),
        ("s3://b/p", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"),
        ("gs://b/p", "somethingElse", "GOOGLE_SERVICE_ACCOUNT_KEY"),
        ("az://b/p", "storageAccount", "storageKey"),
        (
            "az://b/p",
            "AZURE_STORAGE_ACCOUNT_KEY",
            "AZURE_STORAGE_ACCOUNT_NAME",
        ),
        ("swift://b/p", "authURL", "password"),
        ("swift://b/p", "OS_PASSWORD", "OS_USERNAME"),
    ];
    for (i, (url, has, lacks)) in cases.into_iter().enumerate() {
        let name = format!("secret-{i}");
        let dir = folder.path().join(&name);
        fs::create_dir(&dir).unwrap();
        let dir = dir.to_str().unwrap();
        for is_empty in [true, false] {
            if !is_empty {
                fs::write(folder.path().join(&name).join(has), HIDDEN).unwrap();
            }
            let (code, reason, said) = list(url, &["--store-secret", dir]);
            assert_eq!(
                (code, reason.as_str()),
                (78, "Configuration"),
                "{url} {said}"
            );
            let parts = [dir, lacks, "a Secret ", &name, "the Job's namespace"];
            for part in parts {
                assert!(said.contains(part), "{url} {part}: {said}");
            }
            assert_eq!(said.contains("is empty"), is_empty, "{url} {said}");
        }
    }
}

/// Each store connects to its server, where nobody listens: the credentials were sufficient.
#[test]
fn the_providers_variables_are_names_of_files() {
    // Bound, so that no other process gets this port.
    let closed = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = format!("http://{}", closed.local_addr().unwrap());
    drop(closed);
    let key = serde_json::json!({
        "private_key": "-----BEGIN PRIVATE KEY-----\nhidden\n-----END PRIVATE KEY-----",
        "private_key_id": "1", "client_email": "a@b", "disable_oauth": true,
    });
    let key = key.to_string();
    let server = server.as_str();
    for (url, files) in [
        (
            "s3://b/p",
            vec![
                ("AWS_ACCESS_KEY_ID", "a"),
                ("AWS_SECRET_ACCESS_KEY", HIDDEN),
                ("AWS_REGION", "nowhere"),
                ("AWS_ENDPOINT", server),
            ],
        ),
        (
            "gs://b/p",
            vec![
                ("GOOGLE_SERVICE_ACCOUNT_KEY", key.as_str()),
                ("GOOGLE_BASE_URL", server),
                ("GOOGLE_ALLOW_HTTP", "true"),
            ],
        ),
        (
            "az://b/p",
            vec![
                ("AZURE_STORAGE_ACCOUNT_NAME", "a"),
                ("AZURE_STORAGE_ACCOUNT_KEY", "aGlkZGVu"),
                ("AZURE_STORAGE_ENDPOINT", server),
                ("AZURE_ALLOW_HTTP", "true"),
            ],
        ),
        (
            "swift://b/p",
            vec![
                ("OS_AUTH_URL", server),
                ("OS_USERNAME", "a"),
                ("OS_PASSWORD", HIDDEN),
                ("OS_PROJECT_NAME", "p"),
            ],
        ),
        (
            "swift://b/p",
            vec![("ST_AUTH", server), ("ST_USER", "a"), ("ST_KEY", HIDDEN)],
        ),
    ] {
        let mounted = Mounted::new(&files);
        let (code, reason, said) = list(url, &["--store-secret", mounted.path()]);
        assert_eq!(
            (code, reason.as_str()),
            (69, "StoreUnreachable"),
            "{url} {said}"
        );
        // Each of the two stores of a copy has its own.
        let secret = format!("secret_dir={}", mounted.path());
        let empty = scratch::folder().unwrap();
        let none = format!("secret_dir={}", empty.path().display());
        for (from, to, code) in [
            (&secret, &secret, 69),
            (&none, &secret, 78),
            (&secret, &none, 78),
        ] {
            let mut command = deltafold();
            command
                .args([
                    "copy",
                    "--output",
                    "json",
                    "--from",
                    url,
                    "--to",
                    &format!("{url}2"),
                ])
                .args(["--from-option", from, "--to-option", to])
                .args([
                    "--store-option",
                    "max_retries=0",
                    "--store-option",
                    "retry_timeout=0",
                ])
                .envs(AMBIENT);
            let (ended, _, said) = told(run_json(&mut command));
            assert_eq!(ended, code, "{url} {from} {to}: {said}");
        }
    }
}

/// Options given beside a Secret win, as before.
#[test]
fn an_option_wins_over_a_secret() {
    let mounted = Mounted::new(&[("region", "nowhere"), ("endpoint", "http://127.0.0.1:9")]);
    let args = ["--store-secret", mounted.path()];
    let (code, _, said) = list("s3://b/p", &args);
    assert_eq!(code, 78, "{said}");
    let given = [
        "--store-option",
        "access_key_id=a",
        "--store-option",
        "secret_access_key=b",
    ];
    let (code, _, said) = list("s3://b/p", &[&args[..], &given].concat());
    assert_eq!(code, 69, "{said}");
}

/// `echo key | base64` adds a line break. At an end it is taken off; within a value the setting is named.
#[test]
fn a_setting_with_a_line_break_is_named() {
    let s3 = ("s3://b/p", "endpoint=http://127.0.0.1:9");
    let azure = ("az://c/p", "endpoint=http://127.0.0.1:9/ambient");
    let swift = ("swift://c/p", "region=r");
    for ((url, option), name) in [
        (s3, "AWS_ACCESS_KEY_ID"),
        (s3, "AWS_SECRET_ACCESS_KEY"),
        (s3, "AWS_SESSION_TOKEN"),
        (s3, "AWS_REGION"),
        (azure, "AZURE_STORAGE_ACCOUNT_NAME"),
        (swift, "OS_PASSWORD"),
        (swift, "OS_AUTH_URL"),
    ] {
        let valid = match name {
            "OS_AUTH_URL" => "http://127.0.0.1:9/v3",
            _ => "aGlkZGVu",
        };
        for (value, expected) in [(format!("{valid}\n"), 69), (format!("{valid}\nx"), 78)] {
            let mut c = deltafold();
            c.args(["list", "--output", "json", "--store", url]);
            c.args(["--store-option", option, "--store-option", "max_retries=0"]);
            let (code, reason, message) = told(run_json(c.envs(AMBIENT).env(name, &value)));
            assert_eq!(code, expected, "{name} {value:?}: {reason} {message}");
            assert!(code != 78 || message.contains(name), "{name}: {message}");
        }
    }
    // Encoded twice, or of another program: in a Secret, and in an option.
    let folder = scratch::folder().unwrap();
    fs::write(folder.path().join("accessKeyID"), "a\u{1}b").unwrap();
    fs::write(folder.path().join("secretAccessKey"), HIDDEN).unwrap();
    let secret = folder.path().to_str().unwrap();
    let (code, _, message) = list("s3://b/p", &["--store-secret", secret]);
    assert!(
        code == 78 && message.contains("accessKeyID in the Secret"),
        "{message}"
    );
    let signature = "sas_token=sv=2022-11-02&se=2020-01-02T03%3A04%3A05Z&sig=HIDDEN";
    let account = [
        "--store-option",
        "account_name=a",
        "--store-option",
        signature,
    ];
    let (code, _, message) = list("az://c/p", &account);
    assert!(
        code == 77 && message.contains("has expired at 2020-01-02"),
        "{message}"
    );
    assert!(!message.contains("HIDDEN"), "{message}");
    let (code, _, message) = list("s3://b/p", &["--store-option", "region=a\tb"]);
    assert!(
        code == 78 && message.contains("--store-option region"),
        "{message}"
    );
}
