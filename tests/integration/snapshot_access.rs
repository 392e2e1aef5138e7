//! How `snapshot` connects to a live etcd: TLS, users, quorum. Each failure has its own message and exit code,
//! and no secret is printed.

use crate::support::etcd::{self, Etcd, EtcdOptions, EtcdVersion, START_TIMEOUT, Tls};
use crate::support::etcd_cluster::{Cluster, Member};
use crate::support::follower::{Ended, snapshot_command};
use crate::support::mounted_secret::Mounted;
use crate::support::process::{Process, free_port};
use crate::support::recorded_etcd::with_etcd;
use crate::support::restorable::Prefix;
use crate::support::scratch;
use crate::support::{deltafold, run_json, tools};
use etcd_client::Permission;
use std::collections::BTreeSet;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

const SECRET: &str = "hidden-from-all";

struct Here {
    folder: TempDir,
    prefix: Prefix,
}

impl Here {
    /// Call it inside a runtime.
    fn new() -> Self {
        let folder = scratch::folder().unwrap();
        let prefix = Prefix::local(&folder.path().join("store"));
        Here { folder, prefix }
    }

    fn certs(&self) -> Tls {
        let certs = self.folder.path().join("certs");
        std::fs::create_dir_all(&certs).unwrap();
        tools::write_certs(&certs);
        Tls::new(&certs)
    }

    fn start(&self, version: EtcdVersion, name: &str, tls: Option<Tls>) -> Etcd {
        let options = EtcdOptions {
            tls,
            ..EtcdOptions::default()
        };
        Etcd::start_with(version, &self.folder.path().join(name), &options)
    }

    /// Takes a full snapshot with these flags and short time-outs.
    fn take(&self, endpoints: &[String], args: &[&str]) -> Ended {
        let mut command = snapshot_command("full", &self.prefix, endpoints);
        command.args(["--dial-timeout", "1s", "--command-timeout", "3s"]);
        ended(command.args(args))
    }

    /// Asserts that a snapshot fails with this code and reason and saves nothing. Returns the message.
    #[track_caller]
    fn refused(&self, endpoints: &[String], args: &[&str], code: i32, reason: &str) -> String {
        for kind in ["full", "delta"] {
            let mut command = snapshot_command(kind, &self.prefix, endpoints);
            command.args(["--dial-timeout", "1s", "--command-timeout", "3s"]);
            let got = ended(command.args(args));
            let said = format!("{}\n{}", got.json, got.log);
            assert_eq!(
                (got.code, got.reason()),
                (code, reason),
                "{kind} {args:?}: {said}"
            );
            assert_no_secret(&said);
            if kind == "delta" {
                assert!(self.prefix.names().is_empty(), "{said}");
                return got.json["message"].as_str().unwrap().to_owned();
            }
        }
        unreachable!("the loop returns")
    }
}

fn ended(command: &mut Command) -> Ended {
    let (code, json, log) = run_json(command);
    Ended { code, json, log }
}

#[track_caller]
fn assert_no_secret(said: &str) {
    for secret in [SECRET, "wrong-one", "BEGIN PRIVATE", "BEGIN EC"] {
        assert!(!said.contains(secret), "{said}");
    }
}

fn path(folder: &Path, name: &str) -> String {
    folder.join(name).display().to_string()
}

fn in_a_runtime(f: impl FnOnce(&tokio::runtime::Runtime)) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _within = runtime.enter();
    f(&runtime);
}

#[test]
fn each_failure_has_its_own_message_and_code() {
    in_a_runtime(|runtime| {
        let here = Here::new();
        let tls = here.certs();
        let certs = tls.folder.clone();
        let file = |name: &str| path(&certs, name);
        let (ca, other, cert, key) = (
            file("ca.crt"),
            file("other-ca.crt"),
            file("node.crt"),
            file("node.key"),
        );
        let (old_cert, old_key) = (file("expired.crt"), file("expired.key"));
        let one = |etcd: &Etcd| vec![etcd.endpoint().to_owned()];
        let mut messages = BTreeSet::new();
        let mut tell = |message: String, parts: &[&str]| {
            for part in parts {
                assert!(message.contains(part), "{part}: {message}");
            }
            assert!(messages.insert(message.clone()), "said twice: {message}");
        };

        let secure = here.start(EtcdVersion::V3_6, "secure", Some(tls.clone()));
        let with = |ca: &str, cert: &str, key: &str| {
            ["--cacert", ca, "--cert", cert, "--key", key].map(str::to_owned)
        };
        let refused = |etcd: &Etcd, args: [String; 6], code, reason| {
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            here.refused(&one(etcd), &args, code, reason)
        };
        let said = refused(&secure, with(&other, &cert, &key), 78, "Configuration");
        tell(said, &["--cacert", secure.endpoint()]);
        let said = refused(
            &secure,
            with(&ca, &old_cert, &old_key),
            76,
            "CertificateExpired",
        );
        tell(said, &["--cert"]);

        let old = Tls {
            server: "expired",
            client_auth: false,
            ..tls.clone()
        };
        let old = here.start(EtcdVersion::V3_6, "old", Some(old));
        let said = refused(&old, with(&ca, &cert, &key), 76, "CertificateExpired");
        tell(said, &[old.endpoint()]);

        let mut asking = here.start(EtcdVersion::V3_6, "asking", None);
        runtime.block_on(enable_users(&mut asking));
        let wrong = ["--user", "root:wrong-one"];
        let said = here.refused(&one(&asking), &wrong, 77, "Unauthenticated");
        tell(said, &["root", "--password"]);
        let said = here.refused(&one(&asking), &[], 77, "Unauthenticated");
        tell(said, &["--user"]);
        let half = format!("half:{SECRET}");
        let half = ["--user", &half];
        let said = here.refused(&one(&asking), &half, 77, "PermissionDenied");
        tell(said, &["role"]);

        let nobody = vec![format!("http://127.0.0.1:{}", free_port())];
        let said = here.refused(&nobody, &[], 69, "EtcdUnreachable");
        tell(said, &[&nobody[0]]);
        // A listener that never responds.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let silent = vec![format!("http://{}", silent.local_addr().unwrap())];
        let said = here.refused(&silent, &[], 69, "EtcdUnreachable");
        tell(said, &[&silent[0]]);

        let members = ["a", "b", "c"].map(|name| Member::new(name, here.folder.path().join(name)));
        let mut cluster = Cluster::start(EtcdVersion::V3_6, &members, "quorum");
        let endpoints = cluster.endpoints();
        cluster.kill(0);
        cluster.kill(1);
        let said = here.refused(&endpoints, &[], 69, "NoQuorum");
        tell(said, &["quorum"]);
        let said = here.refused(&endpoints[2..], &[], 69, "NoQuorum");
        assert!(said.contains("quorum"), "{said}");
    });
}

/// Creates a user without rights, and root. The password of both is the secret.
async fn enable_users(etcd: &mut Etcd) {
    let mut client = etcd.client().await;
    client.put("/a", "1", None).await.unwrap();
    client.role_add("root").await.unwrap();
    client.role_add("half").await.unwrap();
    let granted = Permission::read_write("/").with_prefix();
    client.role_grant_permission("half", granted).await.unwrap();
    for name in ["root", "half"] {
        client.user_add(name, SECRET, None).await.unwrap();
        client.user_grant_role(name, name).await.unwrap();
    }
    client.auth_enable().await.unwrap();
    etcd.log_in("root", SECRET);
}

#[test]
fn certificates_and_users_that_are_right() {
    for version in EtcdVersion::ALL {
        in_a_runtime(|runtime| {
            let here = Here::new();
            let tls = here.certs();
            let file = |name: &str| path(&tls.folder, name);
            let mut etcd = here.start(version, "data", Some(tls.clone()));
            runtime.block_on(enable_users(&mut etcd));
            let endpoints = vec![etcd.endpoint().to_owned()];
            let password = here.folder.path().join("password");
            std::fs::write(&password, format!("{SECRET}\n")).unwrap();
            let (ca, cert, key) = (file("ca.crt"), file("node.crt"), file("node.key"));
            let password = password.display().to_string();
            let args = [
                "--cacert",
                &ca,
                "--cert",
                &cert,
                "--key",
                &key,
                "--user",
                "root",
                "--password-file",
                &password,
                "--log-level",
                "trace",
            ];
            let got = here.take(&endpoints, &args).succeeded();
            assert_no_secret(&format!("{}{}", got.json, got.log));
            let revision = runtime.block_on(etcd.revision());
            assert_eq!(got.json["revision"], revision, "{version}");
            // A delta by a user with read permission.
            let mut client = runtime.block_on(etcd.client());
            runtime.block_on(client.put("/a", "2", None)).unwrap();
            let mut command = snapshot_command("delta", &here.prefix, &endpoints);
            let got = ended(command.args(args)).succeeded();
            assert_eq!(got.json["revision"], revision + 1, "{version}");
            assert_eq!(here.prefix.deltas().len(), 1, "{version}");
            assert_no_secret(&format!("{}{}", got.json, got.log));
        });
    }
}

/// Mounted Secrets: whole, and read again for each connection.
#[test]
fn folders_of_certificates_and_of_a_user() {
    in_a_runtime(|runtime| {
        let here = Here::new();
        let tls = here.certs();
        let file = |name: &str| std::fs::read_to_string(tls.folder.join(name)).unwrap();
        let (ca, other, cert, key) = (
            file("ca.crt"),
            file("other-ca.crt"),
            file("node.crt"),
            file("node.key"),
        );
        let all = [
            ("ca.crt", ca.as_str()),
            ("tls.crt", cert.as_str()),
            ("tls.key", key.as_str()),
        ];
        let user = [("username", "root\n"), ("password", SECRET)];
        let (certificates, auth) = (Mounted::new(&all), Mounted::new(&user));
        let mut etcd = here.start(EtcdVersion::V3_6, "data", Some(tls.clone()));
        runtime.block_on(enable_users(&mut etcd));
        let endpoints = vec![etcd.endpoint().to_owned()];
        let args = [
            "--tls-secret",
            certificates.path(),
            "--auth-secret",
            auth.path(),
        ];
        let trace = [&args[..], &["--log-level", "trace"]].concat();
        let got = here.take(&endpoints, &trace).succeeded();
        assert_no_secret(&format!("{}{}", got.json, got.log));
        assert_eq!(got.json["revision"], runtime.block_on(etcd.revision()));
        // A flag wins over the variable of another flag.
        let mut command = snapshot_command("delta", &here.prefix, &endpoints);
        command.args(args).env("DELTAFOLD_CACERT", "/nowhere.crt");
        command.env("ETCDCTL_USER", "root:wrong-one");
        ended(&mut command).succeeded();
        // By variables alone.
        let mut command = snapshot_command("delta", &here.prefix, &endpoints);
        command.env("DELTAFOLD_TLS_SECRET", certificates.path());
        command.env("DELTAFOLD_AUTH_SECRET", auth.path());
        ended(&mut command).succeeded();
        // A server that asks for no client certificate gets none.
        let open = Tls {
            client_auth: false,
            ..tls.clone()
        };
        let open = here.start(EtcdVersion::V3_6, "open", Some(open));
        let alone = Mounted::new(&all[..1]);
        let mut command = snapshot_command("full", &here.prefix, &[open.endpoint().to_owned()]);
        command.args(["--tls-secret", alone.path(), "--take-over"]);
        ended(&mut command).succeeded();

        // Errors name the folder.
        let here = Here::new();
        auth.change(&[("username", "root"), ("password", "wrong-one")]);
        let said = here.refused(&endpoints, &args, 77, "Unauthenticated");
        assert!(
            said.contains("--auth-secret") && said.contains(auth.path()),
            "{said}"
        );
        auth.change(&user);
        certificates.change(&[("ca.crt", &other), all[1], all[2]]);
        let said = here.refused(&endpoints, &args, 78, "Configuration");
        assert!(said.contains("--tls-secret"), "{said}");
    });
}

#[test]
fn a_folder_that_lacks_a_key_is_named() {
    in_a_runtime(|_| {
        let here = Here::new();
        let endpoints = vec![format!("https://127.0.0.1:{}", free_port())];
        let path = here.folder.path().join("etcd-client");
        std::fs::create_dir(&path).unwrap();
        let path = path.to_str().unwrap();
        let file = |name: &str| Path::new(path).join(name);
        let refused = |flag: &str, lacks: &str| {
            let said = here.refused(&endpoints, &[flag, path], 78, "Configuration");
            let lacks = format!("{flag} {path} lacks {lacks}: give");
            assert!(said.contains(&lacks), "{said}");
            assert!(
                said.contains("a Secret etcd-client with this content"),
                "{said}"
            );
            assert!(said.contains("the Job's namespace"), "{said}");
        };
        refused("--tls-secret", "ca.crt");
        refused("--auth-secret", "username");
        std::fs::write(file("ca.crt"), "-----BEGIN CERTIFICATE-----").unwrap();
        std::fs::write(file("tls.key"), SECRET).unwrap();
        std::fs::write(file("username"), "root").unwrap();
        std::fs::write(file("password"), "\n").unwrap();
        refused("--tls-secret", "tls.crt");
        refused("--auth-secret", "password");
        std::fs::remove_file(file("tls.key")).unwrap();
        std::fs::write(file("tls.crt"), SECRET).unwrap();
        refused("--tls-secret", "tls.key");
        let nowhere = ["--tls-secret", "/nowhere"];
        let said = here.refused(&endpoints, &nowhere, 78, "Configuration");
        assert!(said.contains("cannot read --tls-secret /nowhere"), "{said}");
        // An endpoint without TLS cannot use it, and both ways at once are refused.
        let plain = vec!["http://127.0.0.1:9".to_owned()];
        here.refused(&plain, &["--tls-secret", path], 64, "Usage");
        for other in [["--cacert", "a"], ["--cert", "a"], ["--key", "a"]] {
            let both = [&["--tls-secret", path], &other[..]].concat();
            here.refused(&endpoints, &both, 64, "Usage");
        }
        for other in [
            ["--user", "a"],
            ["--password", "a"],
            ["--password-file", "a"],
        ] {
            let both = [&["--auth-secret", path], &other[..]].concat();
            here.refused(&endpoints, &both, 64, "Usage");
        }
    });
}

/// etcdctl's variables are used; ours come before them, and flags before both.
#[test]
fn variables_of_etcdctl() {
    in_a_runtime(|runtime| {
        let here = Here::new();
        let tls = here.certs();
        let file = |name: &str| path(&tls.folder, name);
        let mut etcd = here.start(EtcdVersion::V3_6, "data", Some(tls.clone()));
        runtime.block_on(enable_users(&mut etcd));
        let nobody = format!("http://127.0.0.1:{}", free_port());
        let user = format!("root:{SECRET}");
        let etcdctl = [
            ("ETCDCTL_ENDPOINTS", etcd.endpoint().to_owned()),
            ("ETCDCTL_CACERT", file("ca.crt")),
            ("ETCDCTL_CERT", file("node.crt")),
            ("ETCDCTL_KEY", file("node.key")),
            ("ETCDCTL_USER", user.clone()),
        ];
        let run = |args: &[&str], more: &[(&str, &str)]| {
            let mut command = deltafold();
            command
                .args([
                    "snapshot",
                    "full",
                    "--output",
                    "json",
                    "--log-format",
                    "json",
                ])
                .args(["--log-level", "debug", "--store", &here.prefix.url])
                .args(["--dial-timeout", "1s", "--command-timeout", "3s"])
                .args(args)
                .envs(etcdctl.iter().map(|(name, value)| (name, value)))
                .envs(more.iter().copied());
            let got = ended(&mut command);
            assert_no_secret(&format!("{}{}", got.json, got.log));
            got
        };
        run(&[], &[]).succeeded();
        let split = [("ETCDCTL_USER", "root"), ("ETCDCTL_PASSWORD", SECRET)];
        run(&[], &split).succeeded();
        let wrong = [("DELTAFOLD_USER", "root:wrong-one")];
        let got = run(&[], &wrong);
        assert_eq!(
            (got.code, got.reason()),
            (77, "Unauthenticated"),
            "{}",
            got.log
        );
        run(&["--user", &user], &wrong).succeeded();
        let got = run(&[], &[("DELTAFOLD_CACERT", &file("other-ca.crt"))]);
        assert_eq!(
            (got.code, got.reason()),
            (78, "Configuration"),
            "{}",
            got.log
        );
        // Without certificates, which an endpoint without TLS cannot use.
        let mut command = deltafold();
        command
            .args([
                "snapshot",
                "full",
                "--output",
                "json",
                "--store",
                &here.prefix.url,
            ])
            .args(["--dial-timeout", "1s", "--command-timeout", "3s"])
            .env("ETCDCTL_ENDPOINTS", etcd.endpoint())
            .env("DELTAFOLD_ENDPOINTS", &nobody);
        let got = ended(&mut command);
        assert_eq!(got.reason(), "EtcdUnreachable", "{}", got.log);
        assert!(got.json["message"].as_str().unwrap().contains(&nobody));
    });
}

/// Starts `etcd grpc-proxy`, and waits until it listens. Returns its endpoint, too.
fn grpc_proxy(version: EtcdVersion, endpoints: &[String], folder: &Path) -> (Process, String) {
    let address = format!("127.0.0.1:{}", free_port());
    let mut command = Command::new(tools::etcd(version));
    command
        .args(["grpc-proxy", "start", "--listen-addr", &address])
        .args(["--endpoints", &endpoints.join(",")])
        .current_dir(folder);
    let mut process = Process::spawn(&mut command, &folder.join("proxy.log")).unwrap();
    let listens = || TcpStream::connect(&address).is_ok();
    process.wait_until(START_TIMEOUT, listens).unwrap();
    (process, format!("http://{address}"))
}

/// Behind a proxy, members cannot be told apart. `apply` reads and writes keys, and needs no members.
#[test]
fn a_grpc_proxy_serves_apply_and_is_refused_by_all_that_needs_members() {
    for version in EtcdVersion::ALL {
        with_etcd(version, |world| {
            world.put("/a", "saved");
            world.snapshot("full", &[]).succeeded();
            world.put("/a", "changed");
            let (_proxy, at) = grpc_proxy(version, &world.endpoints(), world.folder());
            let run = |args: &[&str]| {
                let mut command = deltafold();
                command
                    .args(args)
                    .args(["--output", "json", "--endpoints", &at]);
                ended(&mut command)
            };
            let store = ["--store", &world.prefix.url];
            for args in [
                &["snapshot", "full", store[0], store[1]][..],
                &["snapshot", "delta", store[0], store[1]],
                &["snapshot", "follow", store[0], store[1]],
                &["verify", store[0], store[1]],
                &["maintain", "--defrag", "0"],
            ] {
                let done = run(args);
                let reason = (done.code, done.reason());
                assert_eq!(
                    reason,
                    (78, "Configuration"),
                    "{version} {args:?}: {}",
                    done.json
                );
                let message = done.json["message"].as_str().unwrap();
                assert!(message.contains("grpc-proxy"), "{args:?}: {message}");
            }
            run(&["apply", store[0], store[1], "--prefix", "/a", "--execute"]).succeeded();
            let got = world.wait(async { world.etcd.kv().await.get("/a", None).await });
            assert_eq!(got.unwrap().kvs()[0].value(), b"saved", "{version}");
        });
    }
}

/// What `openssl req -x509` makes is the certificate of an authority. Given as the trusted one, it is accepted.
#[test]
fn a_self_signed_certificate_that_is_given_is_accepted() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _within = runtime.enter();
    let here = Here::new();
    let certs = here.certs().folder;
    let file = |name: &str| certs.join(name).to_str().unwrap().to_owned();
    let (client, peer) = (
        format!("https://127.0.0.1:{}", free_port()),
        format!("http://127.0.0.1:{}", free_port()),
    );
    let program = tools::etcd(EtcdVersion::V3_6);
    let data = here.folder.path().join("etcd");
    let mut command = etcd::command(&program, &data, &client, &peer);
    command
        .args(["--initial-cluster", &format!("default={peer}")])
        .args(["--cert-file", &file("self.crt")])
        .args(["--key-file", &file("self.key")]);
    let log = here.folder.path().join("etcd.log");
    let mut process = Process::spawn(&mut command, &log).unwrap();
    let endpoints = [client];
    let takes = || here.take(&endpoints, &["--cacert", &file("self.crt")]).code == 0;
    process.wait_until(START_TIMEOUT, takes).unwrap();
    assert_eq!(here.prefix.fulls().len(), 1);
    let refused = here.take(&endpoints, &["--cacert", &file("ca.crt")]);
    assert_eq!((refused.code, refused.reason()), (78, "Configuration"));
    assert!(
        refused.log.contains("trust this very certificate"),
        "{}",
        refused.log
    );
}
