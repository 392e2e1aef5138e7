//! Staging objects: their names, and the removal of those that killed processes left behind.
//!
//! The name of a staging object names its writer: `<hint>.<namespace>.<pid>.<start>.<word>`. Processes with
//! the same namespace can tell whether another one is alive; for all others only the age of the object
//! counts. Called by `publish` and everything else that writes to the staging folder, and by `ops` to clean
//! up.

use super::Store;
use super::folder::{self, Folder};
use crate::base::lock;
use crate::base::random::random_word;
use crate::error::{Reason, Result};
use chrono::{DateTime, TimeDelta, Utc};
use futures::TryStreamExt;
use object_store::{ObjectStoreExt, PutPayload};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;
use std::sync::{LazyLock, Mutex, MutexGuard};

/// The folder of unfinished objects, below the store's prefix and beside the folders that are listed for
/// snapshots.
pub const STAGING: &str = "deltafold-staging";
/// A staging object that is older than this is debris if its writer is unknown or of another namespace. An
/// upload takes hours at most.
pub const STALE_AFTER: TimeDelta = TimeDelta::hours(24);
/// The namespace if this process cannot be identified. Staging objects with it are judged by age only.
const NO_NAMESPACE: u64 = 0;

/// The words of this process's uploads under way.
static UNDER_WAY: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// The writer of a staging object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Writer {
    /// A hash of host name, boot, PID and time namespace, and user. Only a process with the same hash can look
    /// up in `/proc` whether this writer is alive.
    namespace: u64,
    pid: u32,
    /// When the process started, in clock ticks since boot: tells a reused PID apart.
    started: u64,
    /// A random number that tells the uploads of one process apart.
    word: u64,
}

/// This process. Its `word` is not used.
static SELF: LazyLock<Writer> = LazyLock::new(this_process);

/// The name of a live upload. Until this is dropped, processes of the same namespace do not delete the upload's
/// staging object.
pub(crate) struct StagingName {
    /// The path below the store's prefix.
    pub(crate) path: String,
    word: u64,
}

impl StagingName {
    /// Returns a name that no other upload has.
    pub(crate) fn new(hint: &str) -> Self {
        let word = random_word();
        under_way().insert(word);
        let name = Writer { word, ..*SELF }.name(hint);
        StagingName {
            path: format!("{STAGING}/{name}"),
            word,
        }
    }
}

impl Drop for StagingName {
    fn drop(&mut self) {
        under_way().remove(&self.word);
    }
}

fn under_way() -> MutexGuard<'static, BTreeSet<u64>> {
    lock(&UNDER_WAY)
}

impl Writer {
    fn name(&self, hint: &str) -> String {
        format!(
            "{hint}.{:016x}.{}.{}.{:016x}",
            self.namespace, self.pid, self.started, self.word
        )
    }

    fn parse(name: &str) -> Option<Writer> {
        // In a local folder an unfinished write is a file `<name>#<number>`.
        let name = name.split_once('#').map_or(name, |(name, _)| name);
        let mut parts = name.rsplitn(5, '.');
        let word = u64::from_str_radix(parts.next()?, 16).ok()?;
        let started = parts.next()?.parse().ok()?;
        let pid = parts.next()?.parse().ok()?;
        let namespace = u64::from_str_radix(parts.next()?, 16).ok()?;
        parts.next()?;
        Some(Writer {
            namespace,
            pid,
            started,
            word,
        })
    }

    /// Returns whether the upload may still be under way. True if that cannot be found out.
    fn is_alive(&self) -> bool {
        if (self.pid, self.started) == (SELF.pid, SELF.started) {
            return under_way().contains(&self.word);
        }
        match fs::read(format!("/proc/{}/stat", self.pid)) {
            Ok(stat) => match parse_stat(&stat) {
                Some(stat) => stat.started == self.started && !stat.has_ended,
                None => true,
            },
            Err(e) => e.kind() != ErrorKind::NotFound,
        }
    }
}

/// The part of `/proc/<pid>/stat` that is used.
struct ProcessStat {
    pid: u32,
    started: u64,
    /// The process is a zombie: its parent has not waited for it yet.
    has_ended: bool,
}

/// Parses `/proc/<pid>/stat`. The program's name in it may have any characters.
fn parse_stat(stat: &[u8]) -> Option<ProcessStat> {
    let stat = String::from_utf8_lossy(stat);
    let (before, after) = stat.rsplit_once(')')?;
    // The state is field 3 of proc(5), the start is field 22.
    let mut fields = after.split_whitespace();
    let state = fields.next()?;
    Some(ProcessStat {
        pid: before.split_whitespace().next()?.parse().ok()?,
        started: fields.nth(18)?.parse().ok()?,
        has_ended: matches!(state, "Z" | "X"),
    })
}

/// Returns this process as a writer.
fn this_process() -> Writer {
    let pid = std::process::id();
    let unknown = Writer {
        namespace: NO_NAMESPACE,
        pid,
        started: 0,
        word: 0,
    };
    identify(pid).unwrap_or(unknown)
}

/// Returns this process as a writer, or `None` if processes cannot be told apart here.
fn identify(pid: u32) -> Option<Writer> {
    let stat = parse_stat(&fs::read("/proc/self/stat").ok()?)?;
    if stat.pid != pid {
        // This `/proc` belongs to another PID namespace.
        return None;
    }
    let mut hash = Sha256::new();
    for file in ["hostname", "random/boot_id"] {
        hash.update(fs::read(format!("/proc/sys/kernel/{file}")).ok()?);
    }
    let link = |name: &str| fs::read_link(format!("/proc/self/ns/{name}"));
    hash.update(link("pid").ok()?.as_os_str().as_encoded_bytes());
    // The start times in `/proc` depend on the time namespace, if the kernel has time namespaces.
    if let Ok(time) = link("time") {
        hash.update(time.as_os_str().as_encoded_bytes());
    }
    // `/proc` may hide the processes of other users.
    hash.update(fs::metadata("/proc/self").ok()?.uid().to_le_bytes());
    let hash: [u8; 32] = hash.finalize().into();
    let (namespace, _) = hash.split_first_chunk()?;
    Some(Writer {
        namespace: u64::from_be_bytes(*namespace),
        pid,
        started: stat.started,
        word: 0,
    })
}

/// Returns whether a staging object of this age can be deleted. If its writer has our namespace, the writer
/// must be gone; otherwise the object must be older than `stale_after`.
fn is_debris(
    writer: Option<&Writer>,
    age: TimeDelta,
    stale_after: TimeDelta,
    namespace: u64,
    is_alive: impl Fn(&Writer) -> bool,
) -> bool {
    match writer {
        Some(w) if w.namespace == namespace && namespace != NO_NAMESPACE => !is_alive(w),
        _ => age > stale_after,
    }
}

/// Returns whether a staging object can be deleted, as far as this process can tell.
pub(super) fn is_left_behind(name: &str, modified: DateTime<Utc>, now: DateTime<Utc>) -> bool {
    let writer = Writer::parse(name);
    let (age, ours) = (now - modified, SELF.namespace);
    is_debris(writer.as_ref(), age, STALE_AFTER, ours, Writer::is_alive)
}

/// Returns whether a staging object was abandoned: its process is certainly gone, or, if that is unknown, the
/// object is older than `age`. Returns `None` if the name is not one of a staging object.
pub fn is_abandoned(
    name: &str,
    modified: DateTime<Utc>,
    now: DateTime<Utc>,
    age: TimeDelta,
) -> Option<bool> {
    let writer = Writer::parse(name)?;
    let (age_now, ours) = (now - modified, SELF.namespace);
    Some(is_debris(
        Some(&writer),
        age_now,
        age,
        ours,
        Writer::is_alive,
    ))
}

/// Keeps the local staging folder until this is dropped.
pub struct KeptFolder<'s>(&'s Store);

impl Drop for KeptFolder<'_> {
    fn drop(&mut self) {
        self.0.staging_kept.fetch_sub(1, Ordering::Relaxed);
        self.0.remove_staging_folder();
    }
}

impl Store {
    /// Returns how far the store's clock is ahead of this machine's; negative if it is behind. Writes and
    /// deletes an object to find out. Returns zero if the duration of the request, or times in whole seconds,
    /// can explain the difference, and otherwise the lowest value that is possible: a time that is computed
    /// with it is never later than the store's.
    ///
    /// # Errors
    /// Fails with the store's errors.
    pub fn clock_ahead(&self) -> Result<TimeDelta> {
        let name = StagingName::new("clock");
        let path = self.path(&name.path);
        let failed = |e| super::store_error(format!("read the clock of {}", self.url), e);
        let before = Utc::now();
        let written = self.block_on(async {
            self.inner.put(&path, PutPayload::from_static(b"?")).await?;
            self.inner.head(&path).await
        });
        let after = Utc::now();
        if let Err(e) = self.clean_up(self.inner.delete(&path)) {
            tracing::warn!(
                "a staging object is left behind: {}: {e}",
                self.name(&name.path)
            );
        }
        self.remove_staging_folder();
        let modified = written?.map_err(failed)?.last_modified;
        // Some stores have whole seconds.
        let is_behind = modified + TimeDelta::seconds(1) < before;
        Ok(if is_behind || modified > after {
            modified - after
        } else {
            TimeDelta::zero()
        })
    }

    /// Deletes the staging objects that killed processes left behind. Returns their names. A failure is only
    /// logged.
    pub fn clean_staging(&self, now: DateTime<Utc>) -> Vec<String> {
        let is_debris = |name: &str, modified| is_left_behind(name, modified, now);
        let mut removed = Vec::new();
        let cleaned = match &self.local_root {
            Some(root) => clean_folder(root, is_debris, &mut removed).map_err(|e| e.to_string()),
            None => match self.clean_objects(is_debris, &mut removed) {
                // The operation itself fails with the same error.
                Err(e) if matches!(e.reason(), Reason::StoreUnreachable | Reason::NoSnapshots) => {
                    tracing::debug!("cannot clean up {}: {e}", self.name(STAGING));
                    Ok(())
                }
                cleaned => cleaned.map_err(|e| e.to_string()),
            },
        };
        self.remove_staging_folder();
        if let Err(e) = cleaned {
            tracing::warn!(
                "cannot clean up {} after killed runs: {e}",
                self.name(STAGING)
            );
        }
        if !removed.is_empty() {
            tracing::info!(
                removed = removed.join(", "),
                "removed the staging objects of killed runs"
            );
        }
        removed
    }

    fn clean_objects(
        &self,
        is_debris: impl Fn(&str, DateTime<Utc>) -> bool,
        removed: &mut Vec<String>,
    ) -> Result<()> {
        self.block_on(async {
            let failed = |e| super::store_error(format!("clean {}", self.name(STAGING)), e);
            let mut listing = self.inner.list(Some(&self.path(STAGING)));
            while let Some(object) = listing.try_next().await.map_err(failed)? {
                let name = object.location.filename().unwrap_or_default();
                if !is_debris(name, object.last_modified) {
                    continue;
                }
                match self.inner.delete(&object.location).await {
                    // Another process may clean up, too.
                    Ok(()) | Err(object_store::Error::NotFound { .. }) => {
                        removed.push(name.to_owned());
                    }
                    Err(e) => return Err(failed(e)),
                }
            }
            Ok(())
        })?
    }

    /// Keeps the local staging folder while many objects are written. Otherwise each would create it anew.
    pub fn keep_staging_folder(&self) -> KeptFolder<'_> {
        self.staging_kept.fetch_add(1, Ordering::Relaxed);
        KeptFolder(self)
    }

    /// Removes the local staging folder, unless this process keeps it or another one uses it.
    pub(super) fn remove_staging_folder(&self) {
        if let Some(root) = &self.local_root
            && self.staging_kept.load(Ordering::Relaxed) == 0
        {
            // It may be missing or not empty. Both are fine.
            let _ = root.remove_empty(STAGING);
        }
    }
}

/// Cleans the staging folder of a local folder. Lists it directly: the object_store crate hides unfinished
/// writes.
fn clean_folder(
    root: &Folder,
    is_debris: impl Fn(&str, DateTime<Utc>) -> bool,
    removed: &mut Vec<String>,
) -> Result<()> {
    for object in root.list(STAGING, 0)? {
        let (_, name) = folder::split(&object.path);
        if object.path.ends_with(folder::LINK) || !is_debris(name, object.modified) {
            continue;
        }
        root.delete(&object.path)?;
        removed.push(name.to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HINT: &str = "Full-00000000-00000009-100.gz";

    #[test]
    fn a_name_is_parsed_into_its_writer() {
        let writer = Writer {
            namespace: 0xabc,
            pid: 17,
            started: 99,
            word: 3,
        };
        let name = writer.name(HINT);
        assert_eq!(Writer::parse(&name), Some(writer));
        assert_eq!(Writer::parse(&format!("{name}#12")), Some(writer));
        for other in [
            "",
            HINT,
            "Full-00000000-00000009-100.gz.00000000000000ff",
            "x.1.2.3",
        ] {
            assert_eq!(Writer::parse(other), None, "{other}");
        }
    }

    #[test]
    fn a_dead_writer_decides_and_else_the_age() {
        let ours = 7;
        let name = |namespace| {
            let writer = Writer {
                namespace,
                pid: 17,
                started: 99,
                word: 3,
            };
            writer.name(HINT)
        };
        let is_removed = |name: &str, age: TimeDelta, alive: bool| {
            is_debris(Writer::parse(name).as_ref(), age, STALE_AFTER, ours, |_| {
                alive
            })
        };
        let (fresh, old) = (TimeDelta::zero(), STALE_AFTER + TimeDelta::seconds(1));
        // With our namespace, the process decides and the age does not.
        for age in [fresh, old] {
            assert!(is_removed(&name(ours), age, false));
            assert!(!is_removed(&name(ours), age, true));
            assert!(is_removed(&format!("{}#1", name(ours)), age, false));
        }
        // With another namespace or none, the age decides, whatever process has the PID here.
        for other in [
            name(8),
            name(NO_NAMESPACE),
            HINT.to_owned(),
            "x#1".to_owned(),
        ] {
            for alive in [true, false] {
                assert!(!is_removed(&other, fresh, alive), "{other}");
                assert!(!is_removed(&other, STALE_AFTER, alive), "{other}");
                assert!(is_removed(&other, old, alive), "{other}");
                // This machine's clock is behind the store's.
                assert!(!is_removed(&other, -old, alive), "{other}");
            }
        }
        // If processes cannot be told apart, equal namespaces mean nothing.
        assert!(!is_debris(
            Writer::parse(&name(NO_NAMESPACE)).as_ref(),
            TimeDelta::zero(),
            STALE_AFTER,
            NO_NAMESPACE,
            |_| false
        ));
    }

    #[test]
    fn live_dead_and_reused_processes_are_told_apart() {
        let me = *SELF;
        assert_ne!(me.namespace, NO_NAMESPACE, "/proc is not usable");
        let upload = StagingName::new(HINT);
        let writer = Writer::parse(upload.path.rsplit('/').next().unwrap()).unwrap();
        assert_eq!((writer.namespace, writer.pid), (me.namespace, me.pid));
        assert!(writer.is_alive());
        drop(upload);
        assert!(!writer.is_alive(), "its upload is over");

        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let stat = fs::read(format!("/proc/{}/stat", child.id())).unwrap();
        let child_writer = Writer {
            pid: child.id(),
            started: parse_stat(&stat).unwrap().started,
            ..me
        };
        let reused = Writer {
            started: child_writer.started + 1,
            ..child_writer
        };
        assert!(child_writer.is_alive());
        assert!(!reused.is_alive());
        child.kill().unwrap();
        // The child is dead, and nobody has waited for it: /proc still shows it.
        while child_writer.is_alive() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.wait().unwrap();
        assert!(!child_writer.is_alive());
    }

    #[test]
    fn a_programs_name_may_have_any_characters() {
        let fields: Vec<String> = (4..=52).map(|n| n.to_string()).collect();
        let stat = format!("12 (a) Z 1 2 (b)) S {}\n", fields.join(" "));
        let stat = parse_stat(stat.as_bytes()).unwrap();
        assert_eq!((stat.pid, stat.started, stat.has_ended), (12, 22, false));
        assert!(parse_stat(b"12 (a").is_none());
    }
}
