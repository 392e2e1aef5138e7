//! A restore drill: a state of a backup is restored into a temporary directory, and a real etcd is started on it.
//!
//! restore → start → wait for health → HashKV against the fold's → a write → stop. Nothing of it stays: neither the
//! etcd nor the directory, also where we are ended by a signal. What is restored it does not choose. `verify_store`
//! calls it.

use crate::base::random::random_word;
use crate::error::{Error, Reason, Result};
use crate::etcd::cluster;
use crate::etcd::connect::{AttemptError, Connector, Endpoints, Streams};
use crate::mvcc::Revision;
use crate::ops::Context;
use crate::ops::options::Point;
use crate::ops::report::{Clock, Report};
use crate::ops::restore::{self, Backup, Membership};
use rustix::fs::{FlockOperation, OFlags};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use schemars::JsonSchema;
use serde::Serialize;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions, Permissions};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// What the directories of drills are called; those of dead ones are removed by the next.
const FOLDER: &str = "deltafold-drill-";
/// Held as long as the drill lives.
const LOCK: &str = "lock";
/// The member's name.
const NAME: &str = "drill";
/// Nobody listens there: a member by itself has no peers.
const PEER_URL: &str = "http://127.0.0.1:2380";
/// How long etcd may take to end by itself.
const GRACE: Duration = Duration::from_secs(10);
/// Between two looks.
const TICK: Duration = Duration::from_millis(50);
/// Starts in which somebody else had taken the port.
const TRIES: u32 = 5;
/// Of its log, at the end.
const LOG_LINES: usize = 12;
const LOG_BYTES: usize = 4 << 10;

/// How a drill is done.
#[derive(Debug, Clone)]
pub struct Options {
    /// The etcd to start.
    pub etcd: PathBuf,
    /// How long it may take until it is healthy.
    pub patience: Duration,
    /// How it is asked: time-outs, and the user where the backup has authentication enabled. Endpoints and
    /// certificates are not looked at.
    pub asked: Endpoints,
}

/// What it has to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// The newest revision.
    pub revision: Revision,
    /// What was folded up to there.
    pub hash_kv: u32,
    /// The compacted revision that the hash depends on.
    pub compact_revision: Revision,
}

/// What was found. A part of `docs/verify-result.schema.json`.
#[derive(Debug, JsonSchema, Serialize)]
pub struct Outcome {
    /// The timeline's ID.
    pub timeline: String,
    /// The revision that was restored.
    pub revision: Revision,
    /// Whether etcd held what was folded, and took a write.
    pub succeeded: bool,
    /// The version that etcd says it is; null if it did not come so far.
    pub etcd_version: Option<String>,
    /// What etcd said that its HashKV is; null if it did not come so far.
    pub hash_kv: Option<u32>,
    /// How long the restore took, in seconds.
    pub restore_seconds: f64,
    /// How long etcd took until it was healthy, in seconds; null if it did not come so far.
    pub start_seconds: Option<f64>,
}

/// Whether that file could be an etcd: it is a program.
///
/// # Errors
/// `Usage`.
pub fn check_program(etcd: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let wrong = |why: &str| {
        let message = format!("--etcd-binary {}: {why}", etcd.display());
        Err(Reason::Usage.error(message))
    };
    match std::fs::metadata(etcd) {
        Err(e) => wrong(&e.to_string()),
        Ok(m) if !m.is_file() => wrong("it is no file"),
        Ok(m) if m.permissions().mode() & 0o111 == 0 => wrong("it is not executable"),
        Ok(_) => Ok(()),
    }
}

/// Drills the newest state of a timeline.
///
/// # Errors
/// Those of a restore; `Unauthenticated` where the backup has authentication enabled and no user was given;
/// `Configuration` where the program cannot be started; `Io`, `NoSpace`, `Terminated`.
pub fn run(
    ctx: &Context,
    options: &Options,
    timeline: &str,
    expected: Expected,
) -> Result<Report<Outcome>> {
    let mut clock = Clock::start();
    remove_leftovers(&ctx.temp_dir);
    let folder = Folder::new(&ctx.temp_dir)?;
    let mut outcome = Outcome {
        timeline: timeline.to_owned(),
        revision: expected.revision,
        succeeded: false,
        etcd_version: None,
        hash_kv: None,
        restore_seconds: 0.0,
        start_seconds: None,
    };
    let drill = Drill {
        ctx,
        options,
        timeline,
        expected,
        folder: folder.0.path(),
    };
    match drill.run(&mut outcome, &mut clock) {
        Ok(()) => {
            outcome.succeeded = true;
            let report = clock.report(outcome);
            tracing::info!(
                revision = expected.revision.0,
                version = report.etcd_version,
                seconds = report.seconds,
                "an etcd that was started on the backup holds what was folded"
            );
            Ok(report)
        }
        // What the restore itself finds to be damaged is as telling.
        Err(e) if e.reason() == Reason::DrillFailed || e.reason().is_bad_data() => {
            Ok(clock.ended(outcome, Some(e)))
        }
        Err(e) => Err(e),
    }
}

struct Drill<'a> {
    ctx: &'a Context,
    options: &'a Options,
    timeline: &'a str,
    expected: Expected,
    folder: &'a Path,
}

impl Drill<'_> {
    fn run(&self, outcome: &mut Outcome, clock: &mut Clock) -> Result<()> {
        let data_dir = self.folder.join("data");
        let begun = Instant::now();
        let token = format!("deltafold-drill-{}-{:x}", std::process::id(), random_word());
        let membership = Membership {
            name: Some(NAME.to_owned()),
            initial_cluster: Some(format!("{NAME}={PEER_URL}")),
            initial_cluster_token: Some(token.clone()),
            initial_advertise_peer_urls: Some(PEER_URL.to_owned()),
        };
        let cluster_id = membership.cluster()?.id();
        let restored = restore::run_for_drill(
            Backup::Store(self.ctx.clone()),
            &restore::Options {
                timeline: Some(self.timeline.to_owned()),
                data_dir: Some(data_dir.clone()),
                wanted: restore::Wanted {
                    point: Point {
                        revision: Some(self.expected.revision.0),
                        time: None,
                    },
                    membership,
                    ..restore::Wanted::default()
                },
                ..restore::Options::default()
            },
            self.ctx.store.cancel(),
        )?;
        clock.warnings.extend(restored.warnings.iter().cloned());
        outcome.restore_seconds = begun.elapsed().as_secs_f64();
        for tried in 1.. {
            let begun = Instant::now();
            let mut etcd = self.start(&data_dir, restored.database_bytes, &token)?;
            match self.wait(&mut etcd) {
                Ok((way, cluster)) => {
                    outcome.start_seconds = Some(begun.elapsed().as_secs_f64());
                    let ended = self.judge(&way, &cluster, &cluster_id.to_string(), outcome);
                    // It may have died meanwhile: its own words tell more than ours.
                    return ended.map_err(|e| etcd.explain(e));
                }
                // Another program took the port in the moment in which it was free.
                Err(e)
                    if e.reason() == Reason::DrillFailed
                        && tried < TRIES
                        && etcd.log().contains("address already in use") => {}
                Err(e) => return Err(etcd.explain(e)),
            }
        }
        Ok(())
    }

    fn start(&self, data_dir: &Path, bytes: u64, token: &str) -> Result<Running> {
        // Two at once, so that they differ.
        let free = || TcpListener::bind("127.0.0.1:0").and_then(|l| Ok((l.local_addr()?, l)));
        let failed = |e| Error::io("find a free port on 127.0.0.1", e);
        let ((clients, a), (peers, b)) = (free().map_err(failed)?, free().map_err(failed)?);
        drop((a, b));
        let log = self.folder.join("etcd.log");
        let out =
            File::create(&log).map_err(|e| Error::io(format!("create {}", log.display()), e))?;
        let err = out
            .try_clone()
            .map_err(|e| Error::io(format!("open {}", log.display()), e))?;
        let url = |at: SocketAddr| format!("http://{at}");
        // A quota that the database has reached already would refuse the write.
        let quota = (8u64 << 30).max(bytes.saturating_mul(2));
        let mut command = Command::new(&self.options.etcd);
        command
            .arg("--data-dir")
            .arg(data_dir)
            .args(["--name", NAME])
            .args(["--listen-client-urls", &url(clients)])
            .args(["--advertise-client-urls", &url(clients)])
            .args(["--listen-peer-urls", &url(peers)])
            .args(["--initial-advertise-peer-urls", PEER_URL])
            .args(["--initial-cluster", &format!("{NAME}={PEER_URL}")])
            .args(["--initial-cluster-token", token])
            .args(["--quota-backend-bytes", &quota.to_string()])
            .current_dir(self.folder)
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            // A wrapper's children end with it.
            .process_group(0);
        for (name, _) in std::env::vars_os() {
            if is_etcds(&name) {
                command.env_remove(name);
            }
        }
        die_with_us(&mut command);
        let child = command.spawn().map_err(|e| {
            Reason::Configuration.error(format!(
                "--etcd-binary {} cannot be started: {e}",
                self.options.etcd.display()
            ))
        })?;
        tracing::info!(pid = child.id(), clients = %clients, "started an etcd for the drill");
        Ok(Running {
            child: Some(child),
            log,
            clients,
        })
    }

    /// Waits until it is healthy.
    fn wait(&self, etcd: &mut Running) -> Result<(Connector, cluster::Cluster)> {
        let asked = Endpoints {
            endpoints: vec![format!("http://{}", etcd.clients)],
            cacert: None,
            cert: None,
            key: None,
            tls_secret: None,
            ..self.options.asked.clone()
        };
        let store = &self.ctx.store;
        let way = Connector::new(asked, store.handle().clone(), store.cancel().clone())?;
        let deadline = Instant::now() + self.options.patience;
        let mut last = "it does not listen".to_owned();
        loop {
            store.cancel().check()?;
            if etcd.has_ended()? {
                return Err(failed("etcd ended before it was healthy"));
            }
            if TcpStream::connect_timeout(&etcd.clients, TICK).is_ok() {
                match cluster::Cluster::observe(&way) {
                    Ok(cluster) => return Ok((way, cluster)),
                    Err(e) if e.reason() == Reason::Terminated => return Err(e),
                    Err(e)
                        if matches!(
                            e.reason(),
                            Reason::Unauthenticated | Reason::PermissionDenied
                        ) =>
                    {
                        return Err(e.reason().error(format!(
                            "the backup has authentication enabled, so the drill's etcd wants --user and --password of a user with the role root: {e}"
                        )));
                    }
                    Err(e) => last = e.to_string(),
                }
            }
            if Instant::now() >= deadline {
                return Err(failed(format!(
                    "etcd was not healthy within {} s: {last}",
                    self.options.patience.as_secs_f64()
                )));
            }
            std::thread::sleep(TICK);
        }
    }

    /// Whether it holds what was folded, and takes a write.
    fn judge(
        &self,
        way: &Connector,
        cluster: &cluster::Cluster,
        restored: &str,
        outcome: &mut Outcome,
    ) -> Result<()> {
        let status = cluster.members.iter().find_map(|m| m.status.as_ref());
        outcome.etcd_version = status.map(|s| s.version.clone());
        if cluster.hex_id() != restored {
            return Err(failed(format!(
                "etcd serves cluster {}, and the restored one is {restored}: it was started on other data",
                cluster.hex_id()
            )));
        }
        let wanted = self.expected;
        if cluster.revision < wanted.revision.0 {
            return Err(failed(format!(
                "etcd is at revision {}, and revision {} was restored",
                cluster.revision, wanted.revision
            )));
        }
        let answers = cluster.hash_kv_all(way, wanted.revision.0)?;
        let answer = answers.first();
        let answer = answer.ok_or_else(|| failed("etcd has no member with a vote"))?;
        let hash = match (answer.hash, &answer.error) {
            (Some(hash), _) => hash,
            (None, Some((reason, why))) if *reason == Reason::Unauthenticated => {
                return Err(reason.error(why.as_str()));
            }
            (None, why) => {
                let why = why.as_ref().map_or("it did not answer", |w| w.1.as_str());
                return Err(failed(format!(
                    "etcd does not tell its HashKV at revision {}: {why}",
                    wanted.revision
                )));
            }
        };
        outcome.hash_kv = Some(hash.hash);
        if (hash.hash, hash.compact_revision) != (wanted.hash_kv, wanted.compact_revision.0) {
            return Err(failed(format!(
                "at revision {} etcd has HashKV {} (compacted at {}), and the backup folds to {} (compacted at {})",
                wanted.revision,
                hash.hash,
                hash.compact_revision,
                wanted.hash_kv,
                wanted.compact_revision
            )));
        }
        self.write(way, cluster.revision)
    }

    /// A write, and what was written read back.
    fn write(&self, way: &Connector, before: i64) -> Result<()> {
        let refused = |f: AttemptError| match f.into_error() {
            e if matches!(
                e.reason(),
                Reason::Terminated | Reason::Unauthenticated | Reason::PermissionDenied
            ) =>
            {
                e
            }
            e => failed(format!("etcd takes no write: {e}")),
        };
        let endpoint = &way.options().endpoints[0];
        let client = way.dial(endpoint, Streams::Plain).map_err(refused)?;
        let mut kv = client.kv_client();
        let (key, value) = ("deltafold-drill", format!("{:x}", random_word()));
        let put = way
            .ask("write", endpoint, kv.put(key, value.as_str(), None))
            .map_err(refused)?;
        let revision = put.header().map_or(0, |h| h.revision());
        let got = way
            .ask("read", endpoint, kv.get(key, None))
            .map_err(refused)?;
        let read = got.kvs().first().map(|kv| (kv.value(), kv.mod_revision()));
        if revision <= before || read != Some((value.as_bytes(), revision)) {
            return Err(failed(format!(
                "etcd took a write at revision {revision}, after {before}, and does not give it back"
            )));
        }
        Ok(())
    }
}

fn failed(message: impl Into<String>) -> Error {
    let message = message.into();
    Reason::DrillFailed.error(format!("the restore drill failed: {message}"))
}

/// What etcd reads its flags from.
fn is_etcds(name: &OsStr) -> bool {
    name.to_str().is_some_and(|n| n.starts_with("ETCD_"))
}

/// Has the system end the process when we are ended in a way that leaves us no time to do it.
#[cfg(target_os = "linux")]
fn die_with_us(command: &mut Command) {
    let us = rustix::process::getpid();
    let ask = move || {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        // We may have died before the system was asked.
        match rustix::process::getppid() == Some(us) {
            true => Ok(()),
            false => Err(std::io::Error::other("the drill was ended")),
        }
    };
    // SAFETY: between fork and exec it makes system calls only, and takes no lock and no memory where they succeed.
    unsafe {
        command.pre_exec(ask);
    }
}

/// Elsewhere there is no such thing.
#[cfg(not(target_os = "linux"))]
fn die_with_us(_: &mut Command) {}

/// An etcd that runs. It is ended when this is dropped.
struct Running {
    child: Option<Child>,
    log: PathBuf,
    clients: SocketAddr,
}

impl Running {
    /// Whether it has ended. Until it is waited for, its number is nobody else's.
    fn has_ended(&self) -> Result<bool> {
        let ended = self.child.as_ref().map_or(Ok(true), has_ended);
        ended.map_err(|e| Error::io("look after the drill's etcd", e.into()))
    }

    /// The end of what it said.
    fn log(&self) -> String {
        let said = std::fs::read(&self.log).unwrap_or_default();
        let said = &said[said.len().saturating_sub(LOG_BYTES)..];
        let said = String::from_utf8_lossy(said);
        let lines: Vec<&str> = said.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
    }

    /// Adds its last words, and how it ended, to what it has failed with.
    fn explain(&mut self, e: Error) -> Error {
        if e.reason() != Reason::DrillFailed {
            return e;
        }
        let child = match self.has_ended() {
            Ok(true) => self.child.take(),
            _ => None,
        };
        let status = child.and_then(|mut child| {
            signal(&child, Signal::KILL);
            child.wait().ok()
        });
        let ended = status.map_or_else(String::new, |status| format!(" ({status})"));
        let log = match self.log() {
            log if log.trim().is_empty() => "; it logged nothing".to_owned(),
            log => format!("; the end of its log:\n{log}"),
        };
        e.reason().error(format!("{e}{ended}{log}"))
    }
}

/// Whether a process has ended that was not waited for.
fn has_ended(child: &Child) -> rustix::io::Result<bool> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let ended = rustix::process::waitid(WaitId::Pid(Pid::from_child(child)), options)?;
    Ok(ended.is_some())
}

/// To it and its children: the group has its number, which is nobody else's as long as it was not waited for.
fn signal(child: &Child, signal: Signal) {
    // It may have ended.
    let _ = rustix::process::kill_process_group(Pid::from_child(child), signal);
}

impl Drop for Running {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else {
            return;
        };
        signal(&child, Signal::TERM);
        let deadline = Instant::now() + GRACE;
        while has_ended(&child) == Ok(false) && Instant::now() < deadline {
            std::thread::sleep(TICK);
        }
        signal(&child, Signal::KILL);
        // It was killed: this ends.
        let _ = child.wait();
    }
}

/// A directory for a drill, and the lock that says that it is in use.
struct Folder(
    TempDir,
    #[expect(dead_code, reason = "held until it is dropped")] File,
);

impl Folder {
    fn new(temp_dir: &Path) -> Result<Folder> {
        let failed = |e| {
            let what = format!(
                "create a folder in the temporary directory {} (choose another with --temp-dir)",
                temp_dir.display()
            );
            Error::io(what, e)
        };
        let folder = tempfile::Builder::new()
            .prefix(FOLDER)
            // What it holds is a whole database.
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(temp_dir)
            .map_err(failed)?;
        // Whoever removes leftovers sees it when it is held.
        let (made, named) = (folder.path().join("lock.new"), folder.path().join(LOCK));
        let lock = File::create(&made).map_err(failed)?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive).map_err(|e| failed(e.into()))?;
        std::fs::rename(made, named).map_err(failed)?;
        Ok(Folder(folder, lock))
    }
}

/// Removes what drills have left that were killed.
fn remove_leftovers(temp_dir: &Path) {
    let entries = std::fs::read_dir(temp_dir).into_iter().flatten().flatten();
    for entry in entries {
        let is_drills = entry
            .file_name()
            .to_str()
            .is_some_and(|n| n.starts_with(FOLDER));
        if !is_drills {
            continue;
        }
        // One that is just being made has no lock yet. What is no file of ours must not make us wait.
        let lock = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits() as i32)
            .open(entry.path().join(LOCK));
        let Ok(lock) = lock else {
            continue;
        };
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let path = entry.path();
            match std::fs::remove_dir_all(&path) {
                Ok(()) => {
                    tracing::info!(path = %path.display(), "removed what a killed drill has left")
                }
                Err(e) => {
                    tracing::warn!(path = %path.display(), "what a killed drill has left cannot be removed: {e}")
                }
            }
        }
    }
}
