//! Refusals of a real S3 server and a real etcd, as a new user meets them: wrong region, keys and bucket, TLS
//! on one end only.

use crate::support::etcd::{Etcd, EtcdOptions, EtcdVersion, Tls};
use crate::support::versitygw::Versitygw;
use crate::support::{deltafold, run_json, scratch, tools};
use serde_json::Value;
use std::process::Command;
use tokio::runtime::Runtime;

fn refused(command: &mut Command, code: i32, reason: &str) -> String {
    let (got, json, stderr) = run_json(command.args(["--output", "json"]));
    let message = json["message"].as_str().unwrap_or_default().to_owned();
    let got = (got, json["reason"].as_str().unwrap_or_default());
    assert_eq!(got, (code, reason), "{message}\n{stderr}");
    message
}

#[test]
fn a_refusal_of_s3_names_the_server_and_what_to_do() {
    let server = Versitygw::start();
    let endpoint = server.s3().endpoint().to_owned();
    let list = |url: &str, changes: &[(&str, &str)]| {
        let mut command = deltafold();
        command
            .args(["list", "--store", url, "--store-option", "max_retries=0"])
            .envs(server.s3().env())
            .envs(changes.iter().copied());
        command
    };
    let bucket = "s3://nobody-made-this/p";
    type Case = (
        &'static [(&'static str, &'static str)],
        i32,
        &'static str,
        &'static str,
    );
    let cases: [Case; 3] = [
        (&[], 66, "NoSnapshots", "create the bucket"),
        (
            &[
                ("AWS_REGION", "eu-west-1"),
                ("AWS_DEFAULT_REGION", "eu-west-1"),
            ],
            78,
            "Configuration",
            "--store-option region=",
        ),
        (
            &[("AWS_SECRET_ACCESS_KEY", "wrong")],
            77,
            "PermissionDenied",
            "AWS_SECRET_ACCESS_KEY",
        ),
    ];
    for (changes, code, reason, says) in cases {
        let message = refused(&mut list(bucket, changes), code, reason);
        let at = format!("cannot list {bucket} at {endpoint}: ");
        assert!(message.starts_with(&at), "{message}");
        assert!(message.contains(says), "{message}");
        assert!(!message.contains("&#34;"), "{message}");
    }
    let https = endpoint.replace("http://", "https://");
    let mut command = list(bucket, &[("AWS_ENDPOINT_URL", &https)]);
    let message = refused(command.env("AWS_ENDPOINT", &https), 69, "StoreUnreachable");
    assert!(message.contains("does not speak TLS"), "{message}");
}

#[test]
fn tls_on_one_end_only_is_told_with_the_scheme_to_try() {
    let dir = scratch::folder().unwrap();
    tools::write_certs(dir.path());
    let tls = Tls::new(dir.path());
    let ca = dir.path().join("ca.crt");
    let options = EtcdOptions {
        tls: Some(tls),
        ..EtcdOptions::default()
    };
    let with_tls = Etcd::start_with(EtcdVersion::V3_6, &dir.path().join("tls"), &options);
    let plain = Etcd::start(EtcdVersion::V3_6, &dir.path().join("plain"));
    let snapshot = |endpoint: &str| {
        let mut command = deltafold();
        command
            .args(["snapshot", "full", "--endpoints", endpoint, "--store"])
            .arg(dir.path().join("backup"));
        command
    };
    let http = with_tls.endpoint().replace("https://", "http://");
    let message = refused(&mut snapshot(&http), 69, "EtcdUnreachable");
    assert!(message.contains("it may need TLS (https://"), "{message}");
    let https = plain.endpoint().replace("http://", "https://");
    let message = refused(&mut snapshot(&https), 69, "EtcdUnreachable");
    assert!(message.contains("serve without TLS: check"), "{message}");
    let message = refused(&mut snapshot(with_tls.endpoint()), 78, "Configuration");
    assert!(
        message.contains("give etcd's CA with --cacert"),
        "{message}"
    );
    // What arrives first decides: the server's alert (78), or the end of the connection (69).
    let mut command = snapshot(with_tls.endpoint());
    let ended = command.arg("--cacert").arg(ca).output().unwrap();
    let message = String::from_utf8_lossy(&ended.stderr);
    assert!(matches!(ended.status.code(), Some(69 | 78)), "{message}");
    assert!(message.contains("client certificate (--cert"), "{message}");
}

/// A slip in --store would begin a new backup silently.
#[test]
fn a_new_backup_is_said() {
    let runtime = Runtime::new().unwrap();
    let _within = runtime.enter();
    let folder = scratch::folder().unwrap();
    let etcd = Etcd::start(EtcdVersion::V3_6, &folder.path().join("data"));
    let snapshot = || {
        let mut c = deltafold();
        c.args(["snapshot", "full", "--output", "json"]);
        c.args(["--endpoints", etcd.endpoint(), "--store"]);
        let (code, json, stderr) = run_json(c.arg(folder.path().join("backup")));
        assert_eq!((code, &json["warnings"]), (0, &Value::Array(vec![])));
        stderr
    };
    let said = snapshot();
    assert!(said.contains("so a new backup begins there"), "{said}");
    let said = snapshot();
    assert!(!said.contains("new backup"), "{said}");
}
