//! Real etcd servers of one member, and etcd's own tools on snapshot files.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use etcd_client::{Client, CompactionOptions, GetOptions, KvClient, WatchClient};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

pub use super::tools::EtcdVersion;
use super::tools::{self, tail};

/// How long a server may take to serve. Generous: the machine may be busy with a build.
const START_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// What etcd says of its keyspace at a revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashKv {
    pub hash: u32,
    /// -1 where nothing was compacted.
    pub compact_revision: i64,
    pub revision: i64,
}

#[derive(Clone, Debug)]
pub struct EtcdOptions {
    pub name: String,
    pub max_request_bytes: u64,
    pub max_txn_ops: u32,
    pub quota_backend_bytes: u64,
    /// Further arguments as etcd takes them.
    pub args: Vec<OsString>,
}

impl Default for EtcdOptions {
    fn default() -> Self {
        Self {
            name: "default".to_owned(),
            max_request_bytes: 64 << 20,
            max_txn_ops: 10_000,
            quota_backend_bytes: 8 << 30,
            args: Vec::new(),
        }
    }
}

/// A running etcd of one member, killed when dropped; `stop` is for those who want its data.
#[derive(Debug)]
pub struct Etcd {
    version: EtcdVersion,
    data_dir: PathBuf,
    endpoint: String,
    process: Process,
    log: PathBuf,
    // After the process: the folders go when it has ended.
    _folders: Vec<TempDir>,
}

impl Etcd {
    /// Starts an etcd on that data directory, which is made where it is missing.
    pub fn start(version: EtcdVersion, data_dir: &Path) -> Self {
        Self::start_with(version, data_dir, &EtcdOptions::default())
    }

    pub fn start_with(version: EtcdVersion, data_dir: &Path, options: &EtcdOptions) -> Self {
        Self::try_start_with(version, data_dir, options).unwrap_or_else(|err| panic!("{err}"))
    }

    /// As `start_with`, for tests in which etcd is to refuse: the error ends with the log's tail.
    pub fn try_start_with(
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
        // A port is free when asked for and may be taken a moment later by somebody else's.
        for attempt in 1.. {
            let (client, peer) = (free_port(), free_port());
            let endpoint = format!("http://127.0.0.1:{client}");
            let peer = format!("http://127.0.0.1:{peer}");
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
                .args(["--initial-cluster", &format!("{}={peer}", options.name)])
                .arg(format!("--max-request-bytes={}", options.max_request_bytes))
                .arg(format!("--max-txn-ops={}", options.max_txn_ops))
                .arg(format!(
                    "--quota-backend-bytes={}",
                    options.quota_backend_bytes
                ))
                // The tests read what etcd wrote, they do not pull its plug.
                .arg("--unsafe-no-fsync")
                .args(&options.args);
            let mut process = Process::spawn(&mut command, &log)?;
            match wait_until_serving(&mut process, &log, client) {
                Ok(()) => {
                    return Ok(Self {
                        version,
                        data_dir: data_dir.to_owned(),
                        endpoint,
                        process,
                        log,
                        _folders: vec![folder],
                    });
                }
                Err(_) if attempt < 3 && tail(&log).contains("address already in use") => {}
                Err(err) => {
                    return Err(format!(
                        "etcd {version} on {}: {err}; the end of its log:\n{}",
                        data_dir.display(),
                        tail(&log)
                    ));
                }
            }
        }
        unreachable!("the loop ends by returning")
    }

    /// Restores a snapshot file with that version's own etcdutl and starts etcd on the result.
    pub fn restore_and_start(version: EtcdVersion, snapshot: &Path) -> Self {
        Self::try_restore_and_start(version, snapshot).unwrap_or_else(|err| panic!("{err}"))
    }

    pub fn try_restore_and_start(version: EtcdVersion, snapshot: &Path) -> Result<Self, String> {
        let folder = TempDir::with_prefix("etcd-restored-").map_err(|err| err.to_string())?;
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

    /// All that etcd has logged so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    pub async fn client(&self) -> Client {
        Client::connect([&self.endpoint], None)
            .await
            .unwrap_or_else(|err| panic!("connect to etcd at {}: {err}", self.endpoint))
    }

    /// A client for the keys that takes answers of any size.
    pub async fn kv(&self) -> KvClient {
        let client = self.client().await.kv_client();
        client.max_decoding_message_size(usize::MAX)
    }

    /// A client for watches that takes answers of any size.
    pub async fn watcher(&self) -> WatchClient {
        let client = self.client().await.watch_client();
        client.max_decoding_message_size(usize::MAX)
    }

    /// The version that the server itself answers with.
    pub async fn version_string(&self) -> String {
        let status = self.client().await.status().await.expect("etcd's status");
        status.version().to_owned()
    }

    /// The newest revision.
    pub async fn revision(&self) -> i64 {
        let options = GetOptions::new().with_count_only();
        let mut kv = self.kv().await;
        let got = kv.get(vec![0], Some(options)).await.expect("a get");
        got.header().expect("a header").revision()
    }

    /// HashKV at a revision. At the newest one etcd is asked for "now" instead: a revision that it
    /// compacted at is answered from memory with the hash from before that compaction.
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

    /// How many keys are alive at a revision.
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

    /// A snapshot as etcd streams it: the database, then the 32 bytes of its SHA-256.
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

    /// Has etcd end in good order, so that its database holds all and the directory is free. On a
    /// runtime of one thread this takes 7 seconds, for which etcd waits for clients to hang up.
    pub fn stop(mut self) {
        self.process.stop();
    }
}

/// `etcdutl snapshot restore` into a new data directory.
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

/// `etcdutl snapshot status -w json`.
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

/// `bbolt check` of a database file, with or without a snapshot's checksum behind it.
pub fn bbolt_check(file: &Path) -> Result<(), String> {
    let out = tools::run(&tools::bbolt(), ["check".as_ref(), file.as_os_str()])?;
    match String::from_utf8_lossy(&out).trim() {
        "OK" => Ok(()),
        other => Err(other.to_owned()),
    }
}

/// A port of 127.0.0.1 that nobody listens on just now.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("find a free port");
    listener.local_addr().expect("the port").port()
}

/// Waits for etcd's own word in its own log first: somebody else's server on the port could answer
/// the health check.
fn wait_until_serving(process: &mut Process, log: &Path, port: u16) -> Result<(), String> {
    process.wait_until(START_TIMEOUT, || {
        let text = fs::read(log).unwrap_or_default();
        let said = String::from_utf8_lossy(&text).contains("serving client traffic insecurely");
        said && http(port, "GET", "/health", "")
            .is_some_and(|body| body.contains(r#""health":"true""#))
    })
}

/// One plain HTTP request: the answer, headers and all; `None` where there is none.
pub fn http(port: u16, method: &str, target: &str, body: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .ok()?;
    // HTTP/1.0: the answer comes in one piece and ends with the connection.
    let request = format!(
        "{method} {target} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {}\r\n\r\n{body}",
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
        let child = command
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .map_err(|err| format!("start {}: {err}", command.get_program().display()))?;
        Ok(Self(child))
    }

    pub fn wait_until(
        &mut self,
        timeout: Duration,
        mut ready: impl FnMut() -> bool,
    ) -> Result<(), String> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().map_err(|err| err.to_string())? {
                return Err(format!("it ended with {status}"));
            }
            if ready() {
                return Ok(());
            }
            if started.elapsed() > timeout {
                return Err(format!("it did not serve within {} s", timeout.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Asks it to end and waits; kills it where it does not.
    pub fn stop(&mut self) {
        if matches!(self.0.try_wait(), Ok(Some(_))) {
            return;
        }
        // Not waited for until now, so the id still is this child's.
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
