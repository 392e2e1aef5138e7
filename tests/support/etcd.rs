//! Real etcd servers of one or several members, and etcd's own tools for snapshot files.

use super::scratch;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

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
const START_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

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
    version: EtcdVersion,
    data_dir: PathBuf,
    port: u16,
    endpoint: String,
    /// User name and password, if etcd requires them.
    user: Option<(String, String)>,
    tls: Option<Tls>,
    process: Process,
    log: PathBuf,
    // Declared after the process: the folders are removed when the process has ended.
    _folders: Vec<TempDir>,
}

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
    fn spawn(version: EtcdVersion, data_dir: &Path, options: &EtcdOptions) -> Result<Self, String> {
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
        let mut command = Command::new(&program);
        tools::forget_env(&mut command, &["ETCD_"]);
        command
            .arg("--data-dir")
            .arg(data_dir)
            .args(["--name", &options.name])
            .args(["--listen-client-urls", &endpoint])
            .args(["--advertise-client-urls", &endpoint])
            .args(["--listen-peer-urls", &peer])
            .args(["--initial-advertise-peer-urls", &peer])
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
            log,
            _folders: vec![folder],
        })
    }

    /// Waits for a line in etcd's own log first: another server on the port could respond to the health check.
    fn wait_until_serving(&mut self) -> Result<(), String> {
        let (tls, log, port) = (self.tls.is_some(), &self.log, self.port);
        let serving = self.process.wait_until(START_TIMEOUT, || {
            let text = fs::read(log).unwrap_or_default();
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

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Returns etcd's log so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Sets the user name and password of all clients from here on.
    pub fn log_in(&mut self, name: &str, password: &str) {
        self.user = Some((name.to_owned(), password.to_owned()));
    }

    /// Sends a signal to the process: `STOP` pauses it, `CONT` resumes it.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    pub async fn client(&self) -> Client {
        let mut options = ConnectOptions::new();
        if let Some((name, password)) = self.user.clone() {
            options = options.with_user(name, password);
        }
        if let Some(tls) = &self.tls {
            options = options.with_tls(tls.options());
        }
        Client::connect([&self.endpoint], Some(options))
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

    /// Returns the version that the server reports.
    pub async fn version_string(&self) -> String {
        let status = self.client().await.status().await.expect("etcd's status");
        status.version().to_owned()
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

/// A member of a cluster: its data directory and its addresses.
#[derive(Clone, Debug)]
pub struct Member {
    pub name: String,
    pub data_dir: PathBuf,
    client_port: u16,
    peer_port: u16,
}

impl Member {
    pub fn new(name: &str, data_dir: PathBuf) -> Self {
        Self {
            name: name.to_owned(),
            data_dir,
            client_port: free_port(),
            peer_port: free_port(),
        }
    }

    pub fn peer_url(&self) -> String {
        url(self.peer_port)
    }
}

/// Returns the value of `--initial-cluster`.
pub fn initial_cluster(members: &[Member]) -> String {
    let urls: Vec<String> = members
        .iter()
        .map(|member| format!("{}={}", member.name, member.peer_url()))
        .collect();
    urls.join(",")
}

/// An etcd cluster whose members stop and start one by one. It is killed when dropped.
#[derive(Debug)]
pub struct Cluster {
    version: EtcdVersion,
    members: Vec<Member>,
    token: String,
    options: EtcdOptions,
    running: Vec<Option<Etcd>>,
}

impl Cluster {
    /// Starts all members on their data directories and waits until each serves.
    pub fn start(version: EtcdVersion, members: &[Member], token: &str) -> Self {
        Self::start_with(version, members, token, &EtcdOptions::default())
    }

    /// Like `start`; `options` apply to each member, except its name, ports and members.
    pub fn start_with(
        version: EtcdVersion,
        members: &[Member],
        token: &str,
        options: &EtcdOptions,
    ) -> Self {
        let mut cluster = Self {
            version,
            members: members.to_vec(),
            token: token.to_owned(),
            options: options.clone(),
            running: members.iter().map(|_| None).collect(),
        };
        // No member serves alone, so start all before waiting.
        for at in 0..members.len() {
            cluster.spawn(at);
        }
        for at in 0..members.len() {
            cluster.wait(at);
        }
        cluster
    }

    /// Returns a running member.
    pub fn member(&self, at: usize) -> &Etcd {
        self.running[at].as_ref().expect("a member that runs")
    }

    /// Returns the running members.
    pub fn running(&self) -> impl Iterator<Item = &Etcd> {
        self.running.iter().flatten()
    }

    /// Returns the client endpoint of each member, running or not.
    pub fn endpoints(&self) -> Vec<String> {
        let scheme = match self.options.tls {
            Some(_) => "https",
            None => "http",
        };
        let ports = self.members.iter().map(|member| member.client_port);
        ports
            .map(|port| format!("{scheme}://127.0.0.1:{port}"))
            .collect()
    }

    /// Returns the leader, as soon as all running members agree on one.
    pub async fn leader(&self) -> usize {
        let started = Instant::now();
        loop {
            let mut leaders = Vec::new();
            for (at, etcd) in self.running.iter().enumerate() {
                let Some(etcd) = etcd else { continue };
                let status = etcd.client().await.status().await.expect("a status");
                let own = status.header().expect("a header").member_id();
                leaders.push((status.leader(), status.leader() == own, at));
            }
            let agreed = leaders.iter().all(|l| l.0 == leaders[0].0);
            if let Some(leader) = leaders.iter().find(|l| l.1).filter(|_| agreed) {
                return leader.2;
            }
            assert!(started.elapsed() < START_TIMEOUT, "no leader: {leaders:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Makes this member the leader.
    pub async fn move_leader_to(&self, to: usize) {
        if self.leader().await != to {
            self.move_leader(to).await;
        }
    }

    /// Makes another member the leader.
    pub async fn move_leader(&self, to: usize) {
        let status = self.member(to).client().await.status().await;
        let id = status
            .expect("a status")
            .header()
            .expect("a header")
            .member_id();
        let from = self.member(self.leader().await);
        let moved = from.client().await.move_leader(id).await;
        moved.expect("another leader");
        assert_eq!(self.leader().await, to);
    }

    /// Stops one member cleanly; its directory stays.
    pub fn stop_one(&mut self, at: usize) {
        self.running[at].take().expect("a member that runs").stop();
    }

    /// Stops all members cleanly; their directories stay.
    pub fn stop(&mut self) {
        // All at once: a member that waits for stopped members takes long to stop.
        for etcd in self.running() {
            etcd.signal(Signal::TERM);
        }
        for etcd in self.running.iter_mut().filter_map(Option::take) {
            etcd.stop();
        }
    }

    /// Starts all members again on their directories.
    pub fn start_all_again(&mut self) {
        for at in 0..self.members.len() {
            self.spawn(at);
        }
        for at in 0..self.members.len() {
            self.wait(at);
        }
    }

    /// Returns whether a member is running.
    pub fn runs(&self, at: usize) -> bool {
        self.running[at].is_some()
    }

    /// Kills a member, as a failure of its machine would.
    pub fn kill(&mut self, at: usize) {
        self.running[at].take().expect("a member that runs");
    }

    /// Starts a member again on its data directory.
    pub fn start_again(&mut self, at: usize) {
        self.spawn(at);
        self.wait(at);
    }

    /// Starts a member without waiting until it serves: without a quorum it never does.
    pub fn spawn(&mut self, at: usize) {
        let member = &self.members[at];
        let token = ["--initial-cluster-token", &self.token].map(OsString::from);
        let options = EtcdOptions {
            name: member.name.clone(),
            ports: Some((member.client_port, member.peer_port)),
            initial_cluster: Some(initial_cluster(&self.members)),
            args: [&self.options.args[..], &token[..]].concat(),
            ..self.options.clone()
        };
        let etcd = Etcd::spawn(self.version, &member.data_dir, &options);
        self.running[at] = Some(etcd.unwrap_or_else(|err| panic!("{err}")));
    }

    fn wait(&mut self, at: usize) {
        let etcd = self.running[at].as_mut().expect("a member that runs");
        etcd.wait_until_serving()
            .unwrap_or_else(|err| panic!("{err}"));
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

/// Returns a free port of 127.0.0.1 that stays free for a while: it is below the range that the kernel assigns
/// to clients, and each call returns another one.
pub fn free_port() -> u16 {
    const FIRST: u32 = 10_000;
    const COUNT: u32 = 20_000;
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let begin = std::process::id().wrapping_mul(7919);
    std::iter::repeat_with(|| {
        let call = CALLS.fetch_add(1, Ordering::Relaxed);
        let port = FIRST + begin.wrapping_add(call) % COUNT;
        u16::try_from(port).expect("a port")
    })
    .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
    .expect("an endless search")
}

fn url(port: u16) -> String {
    format!("http://127.0.0.1:{port}")
}

/// Sends one plain HTTP request. Returns the response with its headers, or `None` if there is none.
pub fn http(port: u16, method: &str, target: &str, body: &str) -> Option<String> {
    http_at("127.0.0.1", port, method, target, body)
}

/// Like `http`, at another address.
pub fn http_at(host: &str, port: u16, method: &str, target: &str, body: &str) -> Option<String> {
    let mut stream = TcpStream::connect((host, port)).ok()?;
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .ok()?;
    // HTTP/1.0: the response comes in one piece and ends with the connection.
    let request = format!(
        "{method} {target} HTTP/1.0\r\nHost: {host}:{port}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

/// A child process that is killed when dropped.
#[derive(Debug)]
pub struct Process(Child);

impl Process {
    pub fn spawn(command: &mut Command, log: &Path) -> Result<Self, String> {
        let out = File::create(log).map_err(|err| format!("{}: {err}", log.display()))?;
        let err = out.try_clone().map_err(|err| err.to_string())?;
        Self::spawn_to(command, out, err)
    }

    /// Starts a process with standard output and standard error in separate files.
    pub fn spawn_to(command: &mut Command, out: File, err: File) -> Result<Self, String> {
        let child = command
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .map_err(|err| format!("start {}: {err}", command.get_program().display()))?;
        Ok(Self(child))
    }

    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// Sends a signal. The process was not waited for, so the pid is still its own.
    pub fn signal(&self, signal: Signal) {
        let _ = rustix::process::kill_process(rustix::process::Pid::from_child(&self.0), signal);
    }

    /// Kills the process and waits for its end.
    pub fn end(&mut self) {
        self.kill();
    }

    /// Returns the exit status if the process ends within `timeout`.
    pub fn ended_within(&mut self, timeout: Duration) -> Option<std::process::ExitStatus> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().expect("the state of a child") {
                return Some(status);
            }
            if started.elapsed() > timeout {
                return None;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Fails if the process has ended.
    pub fn runs(&mut self) -> Result<(), String> {
        match self.0.try_wait().map_err(|err| err.to_string())? {
            Some(status) => Err(format!("it ended with {status}")),
            None => Ok(()),
        }
    }

    pub fn wait_until(
        &mut self,
        timeout: Duration,
        mut ready: impl FnMut() -> bool,
    ) -> Result<(), String> {
        let started = Instant::now();
        loop {
            self.runs()?;
            if ready() {
                return Ok(());
            }
            if started.elapsed() > timeout {
                return Err(format!("it did not serve within {} s", timeout.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Asks the process to end and waits; kills it if it does not.
    pub fn stop(&mut self) {
        if matches!(self.0.try_wait(), Ok(Some(_))) {
            return;
        }
        // Not waited for yet, so the pid is still this child's.
        let _ = rustix::process::kill_process(
            rustix::process::Pid::from_child(&self.0),
            rustix::process::Signal::TERM,
        );
        let started = Instant::now();
        while started.elapsed() < STOP_TIMEOUT {
            if matches!(self.0.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.kill();
    }

    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
