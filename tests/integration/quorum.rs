//! Whether the other members have a quorum, on real clusters.

use crate::support::etcd::EtcdVersion;
use crate::support::process::{Process, free_port};
use crate::support::scratch;
use crate::support::tools;
use deltafold::base::Cancel;
use deltafold::datadir::Member;
use deltafold::etcd::peers::{PeerOptions, QuorumState, ask, find_quorum, has_quorum};
use deltafold::{Error, Reason};
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// A cluster of three. A member ends when it is taken out.
struct Cluster {
    dir: TempDir,
    scheme: &'static str,
    ports: [u16; 3],
    running: [Option<Process>; 3],
}

impl Cluster {
    fn start(version: EtcdVersion, scheme: &'static str, args: &[&str]) -> Self {
        let dir = scratch::folder().unwrap();
        let ports = [free_port(), free_port(), free_port()];
        let url = |i: usize| format!("{scheme}://127.0.0.1:{}", ports[i]);
        let initial = (0..3)
            .map(|i| format!("m{i}={}", url(i)))
            .collect::<Vec<_>>();
        let clients = [free_port(), free_port(), free_port()];
        let running = [0, 1, 2].map(|i| {
            let mut c = Command::new(tools::etcd(version));
            tools::forget_env(&mut c, &["ETCD_"]);
            let client = format!("http://127.0.0.1:{}", clients[i]);
            c.arg("--data-dir")
                .arg(dir.path().join(format!("m{i}")))
                .args(["--name", &format!("m{i}")])
                .args(["--listen-client-urls", &client])
                .args(["--advertise-client-urls", &client])
                .args(["--listen-peer-urls", &url(i)])
                .args(["--initial-advertise-peer-urls", &url(i)])
                .args(["--initial-cluster", &initial.join(",")])
                .arg("--unsafe-no-fsync")
                .args(args);
            Some(Process::spawn(&mut c, &dir.path().join(format!("m{i}.log"))).unwrap())
        });
        let mut cluster = Cluster {
            dir,
            scheme,
            ports,
            running,
        };
        for (i, client) in clients.into_iter().enumerate() {
            let process = cluster.running[i].as_mut().unwrap();
            let healthy = || {
                crate::support::process::http(client, "GET", "/health", "")
                    .is_some_and(|body| body.contains(r#""health":"true""#))
            };
            process
                .wait_until(Duration::from_secs(60), healthy)
                .unwrap();
        }
        cluster
    }

    fn stop(&mut self, i: usize) {
        drop(self.running[i].take());
    }

    fn others(&self) -> Vec<Member> {
        let url = |i: usize| format!("{}://127.0.0.1:{}", self.scheme, self.ports[i]);
        let member = |i: usize| Member {
            id: deltafold::datadir::MemberId(i as u64),
            name: format!("m{i}"),
            peer_urls: vec![url(i)],
        };
        vec![member(1), member(2)]
    }

    fn find_quorum(&self, options: &PeerOptions) -> Result<Option<String>, Error> {
        let others = self.others();
        let others: Vec<&Member> = others.iter().collect();
        find_quorum(&others, 3, options, &Cancel::default())
    }
}

/// Blocking calls need a runtime, but must not run on one of its threads.
fn in_a_runtime(f: impl FnOnce()) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap();
    let _entered = runtime.enter();
    f();
}

fn a_quorum_is_told_from_none(version: EtcdVersion) {
    in_a_runtime(|| {
        let mut cluster = Cluster::start(version, "http", &[]);
        let options = PeerOptions::default();
        cluster.stop(0);
        // Directly after the loss: the others may still be electing a leader.
        let why = cluster.find_quorum(&options).unwrap().expect("a quorum");
        assert!(why.contains("m1, m2"), "{why}");
        let others = cluster.others();
        let others: Vec<&Member> = others.iter().collect();
        let seen = ask(&others, &options, &Cancel::default()).unwrap();
        for s in &seen {
            assert!(s.reachable && s.linearizable == Some(true), "{s:?}");
            assert_eq!(s.version.as_deref(), Some(version.as_str()));
        }
        assert!(seen[0].cluster_id.is_some());
        assert_eq!(seen[0].cluster_id, seen[1].cluster_id);

        cluster.stop(1);
        let seen = ask(&others, &options, &Cancel::default()).unwrap();
        assert!(!seen[0].reachable && seen[1].reachable, "{seen:?}");
        assert_eq!(seen[1].linearizable, Some(false), "{seen:?}");
        let decision = has_quorum(&seen, 3);
        assert_eq!(decision.state, QuorumState::NoQuorum, "{decision:?}");
        assert!(decision.reason.contains("(m2)"), "{decision:?}");

        cluster.stop(2);
        assert_eq!(cluster.find_quorum(&options).unwrap(), None);
    });
}

#[test]
fn a_quorum_is_told_from_none_3_5() {
    a_quorum_is_told_from_none(EtcdVersion::V3_5);
}

#[test]
fn a_quorum_is_told_from_none_3_6() {
    a_quorum_is_told_from_none(EtcdVersion::V3_6);
}

#[test]
fn a_quorum_is_told_from_none_3_7() {
    a_quorum_is_told_from_none(EtcdVersion::V3_7);
}

/// If TLS hides the answer, the result is unknown.
#[test]
fn peers_with_tls_cannot_be_told_without_its_files() {
    in_a_runtime(|| {
        let mut cluster = Cluster::start(EtcdVersion::V3_6, "https", &["--peer-auto-tls"]);
        let refused = |cluster: &Cluster, options: &PeerOptions, says: &str| {
            let e = cluster
                .find_quorum(options)
                .expect_err("nothing can be told");
            assert_eq!(e.reason(), Reason::Configuration, "{e}");
            assert!(e.to_string().contains(says), "{e}");
        };
        let none = PeerOptions::default();
        refused(&cluster, &none, "peer-trusted-ca-file");
        cluster.scheme = "http";
        refused(&cluster, &none, "https://");
        cluster.scheme = "https";
        // A file that is no certificate.
        let log = cluster.dir.path().join("m0.log");
        let with = |file: &Path| PeerOptions {
            trusted_ca_file: Some(file.to_owned()),
            ..PeerOptions::default()
        };
        refused(&cluster, &with(&log), "peer-trusted-ca-file");
        refused(&cluster, &with(Path::new("/nowhere")), "/nowhere");
        for i in 0..3 {
            cluster.stop(i);
        }
        assert_eq!(cluster.find_quorum(&none).unwrap(), None);
    });
}

/// With etcd's own files, a cluster that requires client certificates can be asked.
#[test]
fn peers_that_want_a_certificate() {
    in_a_runtime(|| {
        let certs = scratch::folder().unwrap();
        tools::write_certs(certs.path());
        let file = |name: &str| certs.path().join(name);
        let arg = |flag: &str, name: &str| format!("{flag}={}", file(name).display());
        let args = [
            arg("--peer-trusted-ca-file", "ca.crt"),
            arg("--peer-cert-file", "node.crt"),
            arg("--peer-key-file", "node.key"),
            "--peer-client-cert-auth".to_owned(),
        ];
        let args = args.each_ref().map(String::as_str);
        let mut cluster = Cluster::start(EtcdVersion::V3_6, "https", &args);
        let with = PeerOptions {
            trusted_ca_file: Some(file("ca.crt")),
            cert_file: Some(file("node.crt")),
            key_file: Some(file("node.key")),
        };
        let without = PeerOptions {
            trusted_ca_file: Some(file("ca.crt")),
            ..PeerOptions::default()
        };
        assert!(cluster.find_quorum(&with).unwrap().is_some());
        let e = cluster.find_quorum(&without).unwrap_err();
        assert!(e.to_string().contains("peer-cert-file"), "{e}");
        cluster.stop(0);
        cluster.stop(1);
        assert_eq!(cluster.find_quorum(&with).unwrap(), None);
        let e = cluster.find_quorum(&without).unwrap_err();
        assert_eq!(e.reason(), Reason::Configuration, "{e}");
    });
}

/// A server at a peer URL that is no etcd, or closes the connection, makes the result unknown.
#[test]
fn a_foreign_server_is_no_peer() {
    use std::io::{Read, Write};
    in_a_runtime(|| {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let _ = stream.read(&mut [0; 1024]);
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi");
            }
        });
        let member = Member {
            id: deltafold::datadir::MemberId(1),
            name: "m1".to_owned(),
            peer_urls: vec![format!("http://127.0.0.1:{port}")],
        };
        let e =
            find_quorum(&[&member], 2, &PeerOptions::default(), &Cancel::default()).unwrap_err();
        assert!(e.to_string().contains("is not etcd"), "{e}");
        let cancel = Cancel::default();
        cancel.cancel();
        let e = find_quorum(&[&member], 2, &PeerOptions::default(), &cancel).unwrap_err();
        assert_eq!(e.reason(), Reason::Terminated);
    });
}
