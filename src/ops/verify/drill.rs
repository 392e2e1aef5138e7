//! A restore drill: restores a state into a temporary directory and starts a real etcd on it.
//!
//! The steps: restore; start etcd; wait for its health; compare its HashKV with that of the restored state; write a
//! key; stop etcd. Neither the etcd nor the directory outlives the drill if a signal ends the process; after SIGKILL the
//! directory stays. The drill does not choose the state.

use crate::backup::timeline::MAIN;
use crate::base::opt::{ETCD_BINARY, PASSWORD, TEMP_DIR, USER};
use crate::base::random::random_word;
use crate::error::{Error, Reason, Result};
use crate::etcd::cluster::{self, AlarmKind};
use crate::etcd::connect::{AttemptError, Connector, Endpoints, Streams};
use crate::mvcc::Revision;
use crate::ops::options::Point;
use crate::ops::report::{Report, ReportBuilder};
use crate::ops::restore::{self, BackupLocation, Membership};
use crate::prefix::Context;
use rustix::process::{Pid, Signal};
use serde::Serialize;
use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The member's name.
const NAME: &str = "drill";
/// The member's peer URL. Nobody listens there, because a single member has no peers.
const PEER_URL: &str = "http://127.0.0.1:2380";
/// How long etcd may take to shut down before it is killed.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);
/// The time between two checks of etcd.
const TICK: Duration = Duration::from_millis(50);
/// The URLs of etcd's Unix sockets. A number must follow the name, and no path is accepted: the sockets are in etcd's
/// current directory, which is the drill's own.
const CLIENTS_URL: &str = "unix://c:1";
const PEERS_URL: &str = "unix://p:1";
/// The name of the socket for clients.
const SOCKET: &str = "c:1";
/// The longest path of a socket, in bytes: `sun_path` of sockaddr_un has 108, with a zero at the end.
const LONGEST_SOCKET_PATH: usize = 107;
/// The largest part of etcd's log in an error message, taken from the end.
const LOG_LINES: usize = 12;
const LOG_BYTES: usize = 4 << 10;

/// The options of a drill.
#[derive(Debug, Clone)]
pub struct Options {
    /// The etcd program to start.
    pub etcd: PathBuf,
    /// How long etcd may take to become healthy.
    pub health_timeout: Duration,
    /// The time-outs of requests, and the user if the backup has authentication enabled. The endpoints and
    /// certificates in it are ignored.
    pub client: Endpoints,
}

/// The result of a drill.
#[derive(Debug, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Drilled {
    /// The timeline's ID.
    pub timeline: String,
    /// The revision that was restored.
    pub revision: Revision,
    /// Whether etcd held the restored state and accepted a write.
    pub succeeded: bool,
    /// The version that etcd reported; null if it never did.
    pub etcd_version: Option<String>,
    /// The HashKV that etcd returned; null if it never did.
    pub hash_kv: Option<u32>,
    /// Duration of the restore, in seconds.
    pub restore_seconds: f64,
    /// Time until etcd was healthy, in seconds; null if it never was.
    pub start_seconds: Option<f64>,
}

/// Checks that a file is an executable program.
///
/// # Errors
/// Fails with `Usage` if it is not.
pub fn check_program(etcd: &Path) -> Result<()> {
    let wrong = |why: &str| {
        let message = format!("{ETCD_BINARY} {}: {why}", etcd.display());
        Err(Reason::Usage.error(message))
    };
    match std::fs::metadata(etcd) {
        Err(e) => wrong(&e.to_string()),
        Ok(m) if !m.is_file() => wrong("it is not a file"),
        Ok(m) if m.permissions().mode() & 0o111 == 0 => wrong("it is not executable"),
        Ok(_) => Ok(()),
    }
}

/// Drills the state of a timeline at a revision, or that of a plain snapshot file. A failed drill is not an error of this function, but part of the
/// report.
///
/// # Errors
/// Fails with the errors of a restore; with `Unauthenticated` if the backup has authentication enabled and no
/// user was given; with `Configuration` if the program cannot be started; with `Io`, `NoSpace`, `Terminated`.
pub fn run(
    backup: &BackupLocation,
    options: &Options,
    timeline: Option<&str>,
    revision: Revision,
) -> Result<Report<Drilled>> {
    let ctx = backup.context();
    let mut clock = ReportBuilder::start();
    let folder = make_folder(&ctx.temp_dir)?;
    let mut outcome = Drilled {
        timeline: timeline.unwrap_or(MAIN).to_owned(),
        revision,
        succeeded: false,
        etcd_version: None,
        hash_kv: None,
        restore_seconds: 0.0,
        start_seconds: None,
    };
    let drill = Drill {
        backup,
        ctx,
        options,
        timeline,
        revision,
        folder: folder.path(),
    };
    match drill.run(&mut outcome, &mut clock) {
        Ok(()) => {
            outcome.succeeded = true;
            let report = clock.report(outcome);
            tracing::info!(
                revision = revision.0,
                version = report.etcd_version,
                seconds = report.seconds,
                "the restore drill succeeded: etcd holds the restored state"
            );
            Ok(report)
        }
        // The restore may find damage itself.
        Err(e) if e.reason() == Reason::DrillFailed || e.reason().is_bad_data() => {
            Ok(clock.ended(outcome, true, Some(e)))
        }
        Err(e) => Err(e),
    }
}

struct Drill<'a> {
    backup: &'a BackupLocation,
    ctx: &'a Context,
    options: &'a Options,
    timeline: Option<&'a str>,
    revision: Revision,
    folder: &'a Path,
}

impl Drill<'_> {
    fn run(&self, outcome: &mut Drilled, clock: &mut ReportBuilder) -> Result<()> {
        let data_dir = self.folder.join("data");
        let restore_started = Instant::now();
        let token = format!("deltafold-drill-{}-{:x}", std::process::id(), random_word());
        let membership = Membership {
            name: Some(NAME.to_owned()),
            initial_cluster: Some(format!("{NAME}={PEER_URL}")),
            initial_cluster_token: Some(token.clone()),
            initial_advertise_peer_urls: Some(PEER_URL.to_owned()),
        };
        let cluster_id = membership.cluster()?.id();
        let restored = restore::run_for_drill(
            self.backup.clone(),
            &restore::Options {
                timeline: self.timeline.map(str::to_owned),
                data_dir: Some(data_dir.clone()),
                point: Point {
                    revision: Some(self.revision.0),
                    time: None,
                },
                membership,
                ..restore::Options::default()
            },
            self.ctx.store.cancel(),
        )?;
        clock.warnings.extend(restored.warnings.iter().cloned());
        outcome.restore_seconds = restore_started.elapsed().as_secs_f64();
        let etcd_started = Instant::now();
        let mut etcd = self.start(&data_dir, restored.database_bytes, &token)?;
        let healthy = self.wait_until_healthy(&mut etcd);
        let (connector, cluster) = healthy.map_err(|e| etcd.explain(e))?;
        outcome.start_seconds = Some(etcd_started.elapsed().as_secs_f64());
        let restored_id = cluster_id.to_string();
        let checked = self.check(&connector, &cluster, &restored_id, &restored, outcome);
        // If etcd has died meanwhile, its log explains the failure.
        checked.map_err(|e| etcd.explain(e))
    }

    /// Starts etcd on the restored data directory. It listens on Unix sockets in the drill's directory alone, which no
    /// other user can open. `bytes` is the size of the database.
    fn start(&self, data_dir: &Path, bytes: u64, token: &str) -> Result<RunningEtcd> {
        let log = self.folder.join("etcd.log");
        let out =
            File::create(&log).map_err(|e| Error::io(format!("create {}", log.display()), e))?;
        let err = out
            .try_clone()
            .map_err(|e| Error::io(format!("open {}", log.display()), e))?;
        // If the database has reached the quota already, etcd refuses the write.
        let quota = (8u64 << 30).max(bytes.saturating_mul(2));
        let mut command = Command::new(&self.options.etcd);
        command
            .arg("--data-dir")
            .arg(data_dir)
            .args(["--name", NAME])
            .args(["--listen-client-urls", CLIENTS_URL])
            .args(["--advertise-client-urls", CLIENTS_URL])
            .args(["--listen-peer-urls", PEERS_URL])
            .args(["--initial-advertise-peer-urls", PEER_URL])
            .args(["--initial-cluster", &format!("{NAME}={PEER_URL}")])
            .args(["--initial-cluster-token", token])
            .args(["--quota-backend-bytes", &quota.to_string()])
            .current_dir(self.folder)
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            // --etcd-binary may be a wrapper script: a signal to the group ends its children, too.
            .process_group(0);
        for (name, _) in std::env::vars_os() {
            if is_etcd_variable(&name) {
                command.env_remove(name);
            }
        }
        kill_with_parent(&mut command);
        let child = command.spawn().map_err(|e| {
            Reason::Configuration.error(format!(
                "{ETCD_BINARY} {} cannot be started: {e}",
                self.options.etcd.display()
            ))
        })?;
        tracing::info!(pid = child.id(), "started an etcd for the drill");
        Ok(RunningEtcd { child, log })
    }

    /// Waits until etcd is healthy.
    fn wait_until_healthy(&self, etcd: &mut RunningEtcd) -> Result<(Connector, cluster::Cluster)> {
        let store = &self.ctx.store;
        let socket = self.folder.join(SOCKET);
        let (options, handle) = (self.options.client.clone(), store.handle().clone());
        let connector = Connector::to_socket(&socket, options, handle, store.cancel().clone())?;
        let deadline = Instant::now() + self.options.health_timeout;
        let mut last_problem = "it does not listen".to_owned();
        loop {
            store.cancel().check()?;
            if etcd.exit_status()?.is_some() {
                return Err(failed("etcd ended before it was healthy"));
            }
            if UnixStream::connect(&socket).is_ok() {
                match cluster::Cluster::observe(&connector) {
                    Ok(cluster) => return Ok((connector, cluster)),
                    Err(e) if e.reason() == Reason::Terminated => return Err(e),
                    Err(e)
                        if matches!(
                            e.reason(),
                            Reason::Unauthenticated | Reason::PermissionDenied
                        ) =>
                    {
                        return Err(e.reason().error(format!(
                            "the backup has authentication enabled: give {USER} and {PASSWORD} of a user with the role root, for the drill's etcd: {e}"
                        )));
                    }
                    Err(e) => last_problem = e.to_string(),
                }
            }
            if Instant::now() >= deadline {
                return Err(failed(format!(
                    "etcd was not healthy within {} s: {last_problem}",
                    self.options.health_timeout.as_secs_f64()
                )));
            }
            std::thread::sleep(TICK);
        }
    }

    /// Checks that etcd holds the restored state and accepts a write.
    fn check(
        &self,
        connector: &Connector,
        cluster: &cluster::Cluster,
        restored_id: &str,
        restored: &restore::Restored,
        outcome: &mut Drilled,
    ) -> Result<()> {
        let status = cluster.members.iter().find_map(|m| m.status.as_ref());
        outcome.etcd_version = status.map(|s| s.version.clone());
        if cluster.hex_id() != restored_id {
            return Err(failed(format!(
                "etcd serves cluster {}, but cluster {restored_id} was restored: etcd was started on other data",
                cluster.hex_id()
            )));
        }
        let revision = self.revision;
        if cluster.revision < revision.0 {
            return Err(failed(format!(
                "etcd is at revision {}, but revision {revision} was restored",
                cluster.revision
            )));
        }
        let hashes = cluster.hash_kv_all(connector, revision.0)?;
        let member = hashes.first();
        let member = member.ok_or_else(|| failed("etcd has no member with a vote"))?;
        let hash = match (member.hash, &member.error) {
            (Some(hash), _) => hash,
            (None, Some((reason, why))) if *reason == Reason::Unauthenticated => {
                return Err(reason.error(why.as_str()));
            }
            (None, error) => {
                let why = error.as_ref().map_or("it did not answer", |e| e.1.as_str());
                return Err(failed(format!(
                    "etcd does not return its HashKV at revision {revision}: {why}"
                )));
            }
        };
        outcome.hash_kv = Some(hash.hash);
        // Another chain of the backup may hold the same revision with more or less history.
        let (Some(hash_kv), Some(compact_revision)) = (restored.hash_kv, restored.compact_revision)
        else {
            return Err(Error::internal("the drill's restore wrote nothing"));
        };
        if (hash.hash, hash.compact_revision) != (hash_kv, compact_revision.0) {
            return Err(failed(format!(
                "at revision {revision} etcd has HashKV {} (compacted at {}), but the restored state has {hash_kv} (compacted at {compact_revision})",
                hash.hash, hash.compact_revision
            )));
        }
        // The alarm of the cluster that the backup was taken from says nothing about this etcd.
        if cluster.alarms.iter().any(|a| a.kind == AlarmKind::NoSpace) {
            let disarmed = cluster.disarm_no_space(connector);
            disarmed.map_err(|e| match e.reason() {
                Reason::Terminated | Reason::Unauthenticated | Reason::PermissionDenied => e,
                _ => failed(format!(
                    "the NOSPACE alarm of the backup cannot be disarmed: {e}"
                )),
            })?;
        }
        self.check_write(connector, cluster.revision)
    }

    /// Writes a key and reads it back. `before` is the revision before the write.
    fn check_write(&self, connector: &Connector, before: i64) -> Result<()> {
        let endpoint = &connector.options().endpoints[0];
        let client = connector
            .dial(endpoint, Streams::Plain)
            .map_err(write_failure)?;
        let mut kv = client.kv_client();
        let (key, value) = ("deltafold-drill", format!("{:x}", random_word()));
        let put = connector
            .ask("write", endpoint, kv.put(key, value.as_str(), None))
            .map_err(write_failure)?;
        let revision = put.header().map_or(0, |h| h.revision());
        let response = connector
            .ask("read", endpoint, kv.get(key, None))
            .map_err(write_failure)?;
        let read = response.kvs().first();
        let read = read.map(|kv| (kv.value(), kv.mod_revision()));
        if revision <= before || read != Some((value.as_bytes(), revision)) {
            return Err(failed(format!(
                "etcd accepted a write at revision {revision}, after {before}, but does not return the value"
            )));
        }
        Ok(())
    }
}

/// Returns the error for a failed write or read.
fn write_failure(failure: AttemptError) -> Error {
    let e = failure.into_error();
    match e.reason() {
        Reason::Terminated | Reason::Unauthenticated | Reason::PermissionDenied => e,
        _ => failed(format!("etcd refuses a write: {e}")),
    }
}

fn failed(message: impl Into<String>) -> Error {
    let message = message.into();
    Reason::DrillFailed.error(format!("the restore drill failed: {message}"))
}

/// Whether an environment variable sets a flag of etcd.
fn is_etcd_variable(name: &OsStr) -> bool {
    name.to_str().is_some_and(|n| n.starts_with("ETCD_"))
}

/// Makes the system kill the child if this process dies without ending it.
#[cfg(target_os = "linux")]
fn kill_with_parent(command: &mut Command) {
    let parent = rustix::process::getpid();
    let set_death_signal = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the signal was set.
        if rustix::process::getppid() == Some(parent) {
            Ok(())
        } else {
            Err(std::io::Error::other("the drill was ended"))
        }
    };
    // SAFETY: between fork and exec the closure makes only system calls. If they succeed, it takes no lock
    // and allocates no memory.
    unsafe {
        command.pre_exec(set_death_signal);
    }
}

/// Other systems have no such signal.
#[cfg(not(target_os = "linux"))]
fn kill_with_parent(_: &mut Command) {}

/// A running etcd. It is ended when this is dropped.
struct RunningEtcd {
    child: Child,
    log: PathBuf,
}

impl RunningEtcd {
    fn exit_status(&mut self) -> Result<Option<ExitStatus>> {
        let status = self.child.try_wait();
        status.map_err(|e| Error::io("check the drill's etcd", e))
    }

    /// Returns the end of etcd's log.
    fn log(&self) -> String {
        let bytes = std::fs::read(&self.log).unwrap_or_default();
        let end = &bytes[bytes.len().saturating_sub(LOG_BYTES)..];
        let text = String::from_utf8_lossy(end);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
    }

    /// Adds etcd's exit status and the end of its log to a failure.
    fn explain(&mut self, e: Error) -> Error {
        if e.reason() != Reason::DrillFailed {
            return e;
        }
        let status = self.exit_status().ok().flatten();
        let status = status.map_or_else(String::new, |status| format!(" ({status})"));
        let log = match self.log() {
            log if log.trim().is_empty() => "; it logged nothing".to_owned(),
            log => format!("; the end of its log:\n{log}"),
        };
        e.reason().error(format!("{e}{status}{log}"))
    }

    /// Sends a signal to etcd and to its children.
    fn signal(&self, signal: Signal) {
        // The processes may have ended already.
        let _ = rustix::process::kill_process_group(Pid::from_child(&self.child), signal);
    }
}

impl Drop for RunningEtcd {
    fn drop(&mut self) {
        self.signal(Signal::TERM);
        let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(TICK);
        }
        self.signal(Signal::KILL);
        // Returns soon, because the process was killed.
        let _ = self.child.wait();
    }
}

/// Makes the directory of a drill, which no other user can read: it holds a whole database.
fn make_folder(temp_dir: &Path) -> Result<TempDir> {
    let folder = tempfile::Builder::new()
        .prefix("deltafold-drill-")
        .permissions(Permissions::from_mode(0o700))
        .tempdir_in(temp_dir)
        .map_err(|e| {
            let what = format!(
                "create a folder in the temporary directory {} (choose another with {TEMP_DIR})",
                temp_dir.display()
            );
            Error::io(what, e)
        })?;
    let socket = folder.path().join(SOCKET);
    if socket.as_os_str().len() > LONGEST_SOCKET_PATH {
        return Err(Reason::Configuration.error(format!(
            "{} is longer than the {LONGEST_SOCKET_PATH} bytes of a socket's path: choose a shorter {TEMP_DIR} for the drill",
            socket.display()
        )));
    }
    Ok(folder)
}
