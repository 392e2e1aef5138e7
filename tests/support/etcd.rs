//! Real etcd servers of one or several members, and etcd's own tools for snapshot files.

use super::process::{Process, free_port, http, is_a_process};
use super::scratch;
use std::ffi::OsString;
use std::fs::{self};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use deltafold::etcd::connect::Endpoints;
use etcd_client::{
    Certificate, Client, CompactionOptions, ConnectOptions, GetOptions, Identity, KvClient,
    TlsOptions, WatchClient,
};
pub use rustix::process::Signal;
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

pub use super::tools::EtcdVersion;
use super::tools::{self, tail};

/// How long a server may take to start. Generous: the machine may be busy with a build.
pub const START_TIMEOUT: Duration = Duration::from_secs(60);
pub const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// The HashKV response of etcd at a revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashKv {
    pub hash: u32,
    /// -1 if nothing was compacted.
    pub compact_revision: i64,
    pub revision: i64,
}

#[derive(Clone, Debug)]
pub struct EtcdOptions {
    pub name: String,
    pub max_request_bytes: u64,
    pub max_txn_ops: u32,
    pub quota_backend_bytes: u64,
    /// Client port and peer port. Free ports are taken if there is none.
    pub ports: Option<(u16, u16)>,
    /// As for etcd's flag. `None`: this member alone. etcd ignores it if there is a WAL.
    pub initial_cluster: Option<String>,
    /// TLS for clients, if any.
    pub tls: Option<Tls>,
    /// Further arguments of etcd.
    pub args: Vec<OsString>,
}

/// The files of a TLS server, as `tools::write_certs` writes them.
#[derive(Clone, Debug)]
pub struct Tls {
    pub folder: PathBuf,
    /// The server's certificate: `NAME.crt` and `NAME.key`.
    pub server: &'static str,
    /// Whether the server requires client certificates.
    pub client_auth: bool,
}

impl Tls {
    pub fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
            server: "node",
            client_auth: true,
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Client options with CA, certificate and key.
    fn options(&self) -> TlsOptions {
        let read = |name: &str| fs::read(self.file(name)).expect("a file of the certificates");
        TlsOptions::new()
            .ca_certificate(Certificate::from_pem(read("ca.crt")))
            .identity(Identity::from_pem(read("node.crt"), read("node.key")))
    }
}

impl Default for EtcdOptions {
    fn default() -> Self {
        Self {
            name: "default".to_owned(),
            max_request_bytes: 64 << 20,
            max_txn_ops: 10_000,
            quota_backend_bytes: 8 << 30,
            ports: None,
            initial_cluster: None,
            tls: None,
            args: Vec::new(),
        }
    }
}

/// A running etcd of one member. It is killed when dropped; call `stop` to use its data afterwards.
#[derive(Debug)]
pub struct Etcd {
    pub version: EtcdVersion,
    pub data_dir: PathBuf,
    pub port: u16,
    pub endpoint: String,
    /// User name and password, if etcd requires them.
    pub user: Option<(String, String)>,
    pub tls: Option<Tls>,
    pub process: Process,
    // Declared after the process: the folders are removed when the process has ended.
    pub _folders: Vec<TempDir>,
}

/// Returns the command line of a member with these URLs for clients and for peers. It lacks `--initial-cluster`.
pub fn command(program: &Path, data_dir: &Path, client: &str, peer: &str) -> Command {
    let mut command = Command::new(program);
    tools::forget_env(&mut command, &["ETCD_"]);
    command
        .arg("--data-dir")
        .arg(data_dir)
        .args(["--listen-client-urls", client])
        .args(["--advertise-client-urls", client])
        .args(["--listen-peer-urls", peer])
        .args(["--initial-advertise-peer-urls", peer]);
    command
}

is_a_process!(Etcd);

impl Etcd {
    /// Starts an etcd on a data directory, which is created if it does not exist.
    pub fn start(version: EtcdVersion, data_dir: &Path) -> Self {
        Self::start_with(version, data_dir, &EtcdOptions::default())
    }

    pub fn start_with(version: EtcdVersion, data_dir: &Path, options: &EtcdOptions) -> Self {
        Self::try_start_with(version, data_dir, options).unwrap_or_else(|err| panic!("{err}"))
    }

    /// Like `start_with`, for tests in which etcd must refuse to start. The error ends with the tail of the
    /// log.
    pub fn try_start_with(
        version: EtcdVersion,
        data_dir: &Path,
        options: &EtcdOptions,
    ) -> Result<Self, String> {
        // Another process may take a free port before etcd binds it.
        for attempt in 1.. {
            let mut etcd = Self::spawn(version, data_dir, options)?;
            match etcd.wait_until_serving() {
                Ok(()) => return Ok(etcd),
                Err(_)
                    if attempt < 3
                        && options.ports.is_none()
                        && tail(&etcd.log).contains("address already in use") => {}
                Err(err) => return Err(err),
            }
        }
        unreachable!("the loop ends by returning")
    }

    /// Starts the process without waiting: it may need other members before it serves.
    pub fn spawn(
        version: EtcdVersion,
        data_dir: &Path,
        options: &EtcdOptions,
    ) -> Result<Self, String> {
        let program = tools::etcd(version);
        let beside = match data_dir.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let folder = tempfile::Builder::new()
            .prefix("etcd-log-")
            .tempdir_in(beside)
            .map_err(|err| format!("a folder for etcd's log in {}: {err}", beside.display()))?;
        let log = folder.path().join("etcd.log");
        let (port, peer) = options.ports.unwrap_or_else(|| (free_port(), free_port()));
        let endpoint = match options.tls {
            Some(_) => url(port).replace("http:", "https:"),
            None => url(port),
        };
        let peer = url(peer);
        let alone = format!("{}={peer}", options.name);
        let mut command = command(&program, data_dir, &endpoint, &peer);
        command
            .args(["--name", &options.name])
            .arg("--initial-cluster")
            .arg(options.initial_cluster.as_ref().unwrap_or(&alone))
            .arg(format!("--max-request-bytes={}", options.max_request_bytes))
            .arg(format!("--max-txn-ops={}", options.max_txn_ops))
            .arg(format!(
                "--quota-backend-bytes={}",
                options.quota_backend_bytes
            ))
            // The tests read what etcd wrote; none cuts its power.
            .arg("--unsafe-no-fsync")
            .args(&options.args);
        if let Some(tls) = &options.tls {
            command
                .arg("--cert-file")
                .arg(tls.file(&format!("{}.crt", tls.server)))
                .arg("--key-file")
                .arg(tls.file(&format!("{}.key", tls.server)));
            // With a CA file, etcd requires client certificates whatever else is set.
            if tls.client_auth {
                command
                    .arg("--client-cert-auth")
                    .arg("--trusted-ca-file")
                    .arg(tls.file("ca.crt"));
            }
        }
        let process = Process::spawn(&mut command, &log)?;
        Ok(Self {
            version,
            data_dir: data_dir.to_owned(),
            port,
            endpoint,
            user: None,
            tls: options.tls.clone(),
            process,
            _folders: vec![folder],
        })
    }

    /// Waits for a line in etcd's own log first: another server on the port could respond to the health check.
    pub fn wait_until_serving(&mut self) -> Result<(), String> {
        let (tls, log, port) = (self.tls.is_some(), self.log.clone(), self.port);
        let serving = self.process.wait_until(START_TIMEOUT, || {
            let text = fs::read(&log).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            if tls {
                // etcd logs this when there is a leader.
                return text.contains("serving client traffic securely");
            }
            let said = text.contains("serving client traffic insecurely");
            said && http(port, "GET", "/health", "")
                .is_some_and(|body| body.contains(r#""health":"true""#))
        });
        serving.map_err(|err| {
            format!(
                "etcd {} on {}: {err}; the end of its log:\n{}",
                self.version,
                self.data_dir.display(),
                tail(&self.log)
            )
        })
    }

    /// Restores a snapshot file with the etcdutl of that version and starts etcd on the result.
    pub fn restore_and_start(version: EtcdVersion, snapshot: &Path) -> Self {
        Self::try_restore_and_start(version, snapshot).unwrap_or_else(|err| panic!("{err}"))
    }

    pub fn try_restore_and_start(version: EtcdVersion, snapshot: &Path) -> Result<Self, String> {
        let folder = scratch::folder_named("etcd-restored-").map_err(|err| err.to_string())?;
        let data_dir = folder.path().join("data");
        etcdutl_restore(version, snapshot, &data_dir)?;
        let mut etcd = Self::try_start_with(version, &data_dir, &EtcdOptions::default())?;
        etcd._folders.push(folder);
        Ok(etcd)
    }

    pub fn version(&self) -> EtcdVersion {
        self.version
    }

    pub fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Sets the user name and password of all clients from here on.
    pub fn log_in(&mut self, name: &str, password: &str) {
        self.user = Some((name.to_owned(), password.to_owned()));
    }

    pub fn connect_options(&self) -> ConnectOptions {
        let mut options = ConnectOptions::new();
        if let Some((name, password)) = self.user.clone() {
            options = options.with_user(name, password);
        }
        if let Some(tls) = &self.tls {
            options = options.with_tls(tls.options());
        }
        options
    }

    pub async fn client(&self) -> Client {
        Client::connect([&self.endpoint], Some(self.connect_options()))
            .await
            .unwrap_or_else(|err| panic!("connect to etcd at {}: {err}", self.endpoint))
    }

    /// Returns a client for keys that accepts responses of any size.
    pub async fn kv(&self) -> KvClient {
        let client = self.client().await.kv_client();
        client.max_decoding_message_size(usize::MAX)
    }

    /// Returns a client for watches that accepts responses of any size.
    pub async fn watcher(&self) -> WatchClient {
        let client = self.client().await.watch_client();
        client.max_decoding_message_size(usize::MAX)
    }

    /// Puts a key and waits for a leader. Until a cluster has a new leader, writes are refused or lost, and a
    /// write that seemed lost may have been applied.
    pub async fn put_when_led(&self, key: &str, value: &str) {
        let started = Instant::now();
        let mut client = self.client().await;
        while let Err(err) = client.put(key, value, None).await {
            assert!(started.elapsed() < START_TIMEOUT, "no writes: {err}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Returns the newest revision. Waits for a leader, which must respond.
    pub async fn revision(&self) -> i64 {
        let options = GetOptions::new().with_count_only();
        let started = Instant::now();
        let mut kv = self.kv().await;
        loop {
            match kv.get(vec![0], Some(options.clone())).await {
                Ok(got) => return got.header().expect("a header").revision(),
                Err(err) => assert!(started.elapsed() < START_TIMEOUT, "no reads: {err}"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Returns HashKV at a revision. At the newest revision it asks for "now" instead: for a revision at which
    /// etcd was compacted, etcd responds from memory with the hash from before that compaction.
    pub async fn hash_kv(&self, revision: i64) -> HashKv {
        let mut client = self.client().await;
        let now = client.hash_kv(0).await.expect("HashKV");
        let answer = if now.header().expect("a header").revision() == revision {
            now
        } else {
            client
                .hash_kv(revision)
                .await
                .unwrap_or_else(|err| panic!("HashKV at {revision}: {err}"))
        };
        HashKv {
            hash: answer.hash(),
            compact_revision: answer.compact_version(),
            revision,
        }
    }

    /// Returns the number of live keys at a revision.
    pub async fn live_keys_at(&self, revision: i64) -> u64 {
        let options = GetOptions::new()
            .with_range(vec![0])
            .with_revision(revision)
            .with_count_only();
        let mut kv = self.kv().await;
        let got = kv
            .get(vec![0], Some(options))
            .await
            .unwrap_or_else(|err| panic!("count the keys at {revision}: {err}"));
        u64::try_from(got.count()).expect("a count")
    }

    /// Compacts, and returns when the old revisions are gone from the database.
    pub async fn compact(&self, revision: i64) {
        let options = CompactionOptions::new().with_physical();
        let mut kv = self.kv().await;
        kv.compact(revision, Some(options))
            .await
            .unwrap_or_else(|err| panic!("compact at {revision}: {err}"));
    }

    /// Returns a snapshot as etcd streams it: the database, then 32 bytes of SHA-256.
    pub async fn snapshot(&self) -> Vec<u8> {
        let mut client = self.client().await;
        let mut stream = client.snapshot().await.expect("start a snapshot");
        let mut bytes = Vec::new();
        while let Some(part) = stream.message().await.expect("the snapshot's next part") {
            bytes.extend_from_slice(part.blob());
        }
        let (db, sum) = bytes.split_last_chunk::<32>().expect("a checksum");
        assert_eq!(
            Sha256::digest(db).as_slice(),
            sum,
            "the snapshot's checksum"
        );
        bytes
    }

    /// Stops etcd cleanly, so that the database holds everything and the directory is free. On a runtime with
    /// one thread this takes 7 seconds: etcd waits for clients to close their connections.
    pub fn stop(mut self) {
        self.end();
    }

    /// Like `stop`, for tests that start another etcd in its place.
    pub fn end(&mut self) {
        self.process.stop();
    }
}

/// Runs `etcdutl snapshot restore` into a new data directory.
pub fn etcdutl_restore(
    version: EtcdVersion,
    snapshot: &Path,
    data_dir: &Path,
) -> Result<(), String> {
    let args = [
        "snapshot".as_ref(),
        "restore".as_ref(),
        snapshot.as_os_str(),
        "--data-dir".as_ref(),
        data_dir.as_os_str(),
    ];
    tools::run(&tools::etcdutl(version), args).map(drop)
}

/// Runs `etcdutl snapshot status -w json`.
pub fn etcdutl_status(version: EtcdVersion, file: &Path) -> serde_json::Value {
    let args = [
        "snapshot".as_ref(),
        "status".as_ref(),
        file.as_os_str(),
        "-w".as_ref(),
        "json".as_ref(),
    ];
    let out = tools::run(&tools::etcdutl(version), args).unwrap_or_else(|err| panic!("{err}"));
    serde_json::from_slice(&out).expect("JSON from etcdutl")
}

/// Runs `bbolt check` on a database file, with or without a trailing checksum.
pub fn bbolt_check(file: &Path) -> Result<(), String> {
    let out = tools::run(&tools::bbolt(), ["check".as_ref(), file.as_os_str()])?;
    match String::from_utf8_lossy(&out).trim() {
        "OK" => Ok(()),
        other => Err(other.to_owned()),
    }
}

pub fn url(port: u16) -> String {
    format!("http://127.0.0.1:{port}")
}

/// Returns endpoints without TLS and users.
pub fn without_tls(endpoints: Vec<String>) -> Endpoints {
    Endpoints {
        endpoints,
        cacert: None,
        cert: None,
        key: None,
        tls_secret: None,
        user: None,
        auth_secret: None,
        dial_timeout: Duration::from_secs(2),
        command_timeout: Duration::from_secs(5),
        keepalive_time: Duration::from_secs(10),
        keepalive_timeout: Duration::from_secs(6),
    }
}
