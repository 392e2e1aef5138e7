//! Staging objects: their names, and which of them are debris of runs that were killed.
//!
//! A name tells who writes it: `<hint>.<holder>.<pid>.<start>.<word>`. The holder stands for
//! everything that must be the same before one process can tell whether another is alive.

use super::Store;
use super::folder::{self, Folder};
use crate::base::lock;
use crate::base::random::random_word;
use crate::error::Result;
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

/// Where unfinished objects wait, below the store's prefix and beside what is listed.
pub const STAGING: &str = "deltafold-staging";
/// Beyond this age a staging object is debris, whoever wrote it. An upload takes hours at most.
pub const STALE_AFTER: TimeDelta = TimeDelta::hours(24);
/// In names made where processes cannot be told apart: only age counts for these.
const NO_HOLDER: u64 = 0;

/// The uploads of this process that are under way, by word.
static UNDER_WAY: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

/// Who wrote a staging object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Owner {
    holder: u64,
    pid: u32,
    /// When the process began, in clock ticks since the machine did: tells a reused pid apart.
    started: u64,
    /// Tells the uploads of one process apart.
    word: u64,
}

/// This process; its `word` is of no use.
static SELF: LazyLock<Owner> = LazyLock::new(|| {
    let pid = std::process::id();
    let unknown = Owner {
        holder: NO_HOLDER,
        pid,
        started: 0,
        word: 0,
    };
    this_process(pid).unwrap_or(unknown)
});

/// A name that counts as one of a live upload until this is dropped.
pub(super) struct StagingName {
    /// Below the store's prefix.
    pub(super) path: String,
    word: u64,
}

impl StagingName {
    /// A name that nobody else has.
    pub(super) fn new(hint: &str) -> Self {
        let word = random_word();
        under_way().insert(word);
        let name = Owner { word, ..*SELF }.name(hint);
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

impl Owner {
    fn name(&self, hint: &str) -> String {
        format!(
            "{hint}.{:016x}.{}.{}.{:016x}",
            self.holder, self.pid, self.started, self.word
        )
    }

    fn parse(name: &str) -> Option<Owner> {
        // On a local disk an unfinished write is a file `<name>#<number>`.
        let name = name.split_once('#').map_or(name, |(name, _)| name);
        let mut parts = name.rsplitn(5, '.');
        let word = u64::from_str_radix(parts.next()?, 16).ok()?;
        let started = parts.next()?.parse().ok()?;
        let pid = parts.next()?.parse().ok()?;
        let holder = u64::from_str_radix(parts.next()?, 16).ok()?;
        parts.next()?;
        Some(Owner {
            holder,
            pid,
            started,
            word,
        })
    }

    /// Whether the upload may still go on; where that cannot be told, it does.
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

struct Stat {
    pid: u32,
    started: u64,
    /// It ended, and its parent has not asked how.
    has_ended: bool,
}

/// `/proc/<pid>/stat`; the program's name in it may hold anything.
fn parse_stat(stat: &[u8]) -> Option<Stat> {
    let stat = String::from_utf8_lossy(stat);
    let (before, after) = stat.rsplit_once(')')?;
    // The state is the third field of proc(5), the start the 22nd.
    let mut fields = after.split_whitespace();
    let state = fields.next()?;
    Some(Stat {
        pid: before.split_whitespace().next()?.parse().ok()?,
        started: fields.nth(18)?.parse().ok()?,
        has_ended: matches!(state, "Z" | "X"),
    })
}

/// `None` where processes cannot be told apart.
fn this_process(pid: u32) -> Option<Owner> {
    let stat = parse_stat(&fs::read("/proc/self/stat").ok()?)?;
    if stat.pid != pid {
        // `/proc` is that of another process namespace.
        return None;
    }
    let mut hash = Sha256::new();
    for file in ["hostname", "random/boot_id"] {
        hash.update(fs::read(format!("/proc/sys/kernel/{file}")).ok()?);
    }
    let link = |name: &str| fs::read_link(format!("/proc/self/ns/{name}"));
    hash.update(link("pid").ok()?.as_os_str().as_encoded_bytes());
    // Starts are counted in the time namespace, where the kernel has these.
    if let Ok(time) = link("time") {
        hash.update(time.as_os_str().as_encoded_bytes());
    }
    // `/proc` may hide the processes of other users.
    hash.update(fs::metadata("/proc/self").ok()?.uid().to_le_bytes());
    let hash: [u8; 32] = hash.finalize().into();
    let (holder, _) = hash.split_first_chunk()?;
    Some(Owner {
        holder: u64::from_be_bytes(*holder),
        pid,
        started: stat.started,
        word: 0,
    })
}

/// Whether a staging object can be deleted: its process is seen to be gone, or it is old.
fn is_debris(
    name: &str,
    modified: DateTime<Utc>,
    now: DateTime<Utc>,
    holder: u64,
    is_alive: impl Fn(&Owner) -> bool,
) -> bool {
    match Owner::parse(name) {
        Some(owner) if owner.holder == holder && holder != NO_HOLDER => !is_alive(&owner),
        _ => now - modified > STALE_AFTER,
    }
}

/// Whether the run that wrote a staging object has ended, as far as can be told from here.
pub(super) fn is_left_behind(name: &str, modified: DateTime<Utc>, now: DateTime<Utc>) -> bool {
    is_debris(name, modified, now, SELF.holder, Owner::is_alive)
}

/// Whether a staging object of this name was abandoned: its process is seen to be gone, or it is older than
/// `age` and not seen to be at work. `None` where the name is none of ours.
pub fn is_abandoned(
    name: &str,
    modified: DateTime<Utc>,
    now: DateTime<Utc>,
    age: TimeDelta,
) -> Option<bool> {
    let owner = Owner::parse(name)?;
    if owner.holder == SELF.holder && owner.holder != NO_HOLDER {
        return Some(!owner.is_alive());
    }
    Some(now - modified > age)
}

/// The local staging folder stays until this is dropped.
pub struct KeptFolder<'s>(&'s Store);

impl Drop for KeptFolder<'_> {
    fn drop(&mut self) {
        self.0.staging_kept.fetch_sub(1, Ordering::Relaxed);
        self.0.remove_staging_folder();
    }
}

impl Store {
    /// How far the store's clock is ahead of this one's, seen by an object that is written and deleted.
    /// Zero where they differ by no more than a request takes, or a second.
    ///
    /// # Errors
    /// The store's.
    pub fn clock_ahead(&self) -> Result<TimeDelta> {
        let name = StagingName::new("clock");
        let path = self.path(&name.path);
        let failed = |e| super::store_error(format!("ask {} for its time", self.url), e);
        let before = Utc::now();
        let written = self.block_on(async {
            self.inner.put(&path, PutPayload::from_static(b"?")).await?;
            self.inner.head(&path).await
        });
        let after = Utc::now();
        if let Err(e) = self.clean_up(self.inner.delete(&path)) {
            tracing::warn!("{} stays: {e}", self.name(&name.path));
        }
        self.remove_staging_folder();
        let at = written?.map_err(failed)?.last_modified;
        // Some stores tell whole seconds.
        Ok(match () {
            () if at + TimeDelta::seconds(1) < before => at - before,
            () if at > after => at - after,
            () => TimeDelta::zero(),
        })
    }

    /// Deletes the staging objects of runs that were killed, and says which. What cannot be
    /// deleted is only warned of.
    pub fn clean_staging(&self, now: DateTime<Utc>) -> Vec<String> {
        let debris = |name: &str, modified| is_left_behind(name, modified, now);
        let mut removed = Vec::new();
        let cleaned = match &self.local_root {
            Some(root) => clean_folder(root, debris, &mut removed).map_err(|e| e.to_string()),
            None => self
                .clean_objects(debris, &mut removed)
                .map_err(|e| e.to_string()),
        };
        self.remove_staging_folder();
        if let Err(e) = cleaned {
            tracing::warn!("what killed runs left in {} stays: {e}", self.name(STAGING));
        }
        if !removed.is_empty() {
            tracing::info!(
                removed = removed.join(", "),
                "removed what killed runs left"
            );
        }
        removed
    }

    fn clean_objects(
        &self,
        debris: impl Fn(&str, DateTime<Utc>) -> bool,
        removed: &mut Vec<String>,
    ) -> Result<()> {
        self.block_on(async {
            let failed = |e| super::store_error(format!("clean {}", self.name(STAGING)), e);
            let mut listing = self.inner.list(Some(&self.path(STAGING)));
            while let Some(object) = listing.try_next().await.map_err(failed)? {
                let name = object.location.filename().unwrap_or_default();
                if !debris(name, object.last_modified) {
                    continue;
                }
                match self.inner.delete(&object.location).await {
                    // Another run cleans, too.
                    Ok(()) | Err(object_store::Error::NotFound { .. }) => {
                        removed.push(name.to_owned());
                    }
                    Err(e) => return Err(failed(e)),
                }
            }
            Ok(())
        })?
    }

    /// Keeps the local staging folder for many objects: each would make it anew.
    pub fn keep_staging_folder(&self) -> KeptFolder<'_> {
        self.staging_kept.fetch_add(1, Ordering::Relaxed);
        KeptFolder(self)
    }

    /// Removes the local staging folder, unless another run uses it.
    pub(super) fn remove_staging_folder(&self) {
        if let Some(root) = &self.local_root
            && self.staging_kept.load(Ordering::Relaxed) == 0
        {
            // It is not empty, or not there: both are fine.
            let _ = root.remove_empty(STAGING);
        }
    }
}

/// object_store hides unfinished writes, so a local folder is listed without it.
fn clean_folder(
    root: &Folder,
    debris: impl Fn(&str, DateTime<Utc>) -> bool,
    removed: &mut Vec<String>,
) -> Result<()> {
    for object in root.list(STAGING, 0)? {
        let (_, name) = folder::split(&object.path);
        if object.path.ends_with(folder::LINK) || !debris(name, object.modified) {
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
    fn a_name_tells_its_owner() {
        let owner = Owner {
            holder: 0xabc,
            pid: 17,
            started: 99,
            word: 3,
        };
        let name = owner.name(HINT);
        assert_eq!(Owner::parse(&name), Some(owner));
        assert_eq!(Owner::parse(&format!("{name}#12")), Some(owner));
        for other in [
            "",
            HINT,
            "Full-00000000-00000009-100.gz.00000000000000ff",
            "x.1.2.3",
        ] {
            assert_eq!(Owner::parse(other), None, "{other}");
        }
    }

    #[test]
    fn what_goes_and_what_stays() {
        let now = DateTime::UNIX_EPOCH + TimeDelta::days(9);
        let ours = 7;
        let name = |holder| {
            let owner = Owner {
                holder,
                pid: 17,
                started: 99,
                word: 3,
            };
            owner.name(HINT)
        };
        let goes = |name: &str, age: TimeDelta, alive: bool| {
            is_debris(name, now - age, now, ours, |_| alive)
        };
        let (fresh, old) = (TimeDelta::zero(), STALE_AFTER + TimeDelta::seconds(1));
        // Of this machine: the process decides, age does not.
        for age in [fresh, old] {
            assert!(goes(&name(ours), age, false));
            assert!(!goes(&name(ours), age, true));
            assert!(goes(&format!("{}#1", name(ours)), age, false));
        }
        // Of another, or of nobody known: age decides, whatever runs here under that number.
        for other in [name(8), name(NO_HOLDER), HINT.to_owned(), "x#1".to_owned()] {
            for alive in [true, false] {
                assert!(!goes(&other, fresh, alive), "{other}");
                assert!(!goes(&other, STALE_AFTER, alive), "{other}");
                assert!(goes(&other, old, alive), "{other}");
                // A clock that is behind the store's.
                assert!(!goes(&other, -old, alive), "{other}");
            }
        }
        // Where processes cannot be told apart, equal holders say nothing.
        assert!(!is_debris(&name(NO_HOLDER), now, now, NO_HOLDER, |_| false));
    }

    #[test]
    fn processes_are_told_apart() {
        let me = *SELF;
        assert_ne!(me.holder, NO_HOLDER, "/proc does not tell");
        let upload = StagingName::new(HINT);
        let owner = Owner::parse(upload.path.rsplit('/').next().unwrap()).unwrap();
        assert_eq!((owner.holder, owner.pid), (me.holder, me.pid));
        assert!(owner.is_alive());
        drop(upload);
        assert!(!owner.is_alive(), "its upload is over");

        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let stat = fs::read(format!("/proc/{}/stat", child.id())).unwrap();
        let child_owner = Owner {
            pid: child.id(),
            started: parse_stat(&stat).unwrap().started,
            ..me
        };
        let reused = Owner {
            started: child_owner.started + 1,
            ..child_owner
        };
        assert!(child_owner.is_alive());
        assert!(!reused.is_alive());
        child.kill().unwrap();
        // Dead, but not waited for: /proc still shows it.
        while child_owner.is_alive() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        child.wait().unwrap();
        assert!(!child_owner.is_alive());
    }

    #[test]
    fn a_programs_name_may_hold_anything() {
        let fields: Vec<String> = (4..=52).map(|n| n.to_string()).collect();
        let stat = format!("12 (a) Z 1 2 (b)) S {}\n", fields.join(" "));
        let stat = parse_stat(stat.as_bytes()).unwrap();
        assert_eq!((stat.pid, stat.started, stat.has_ended), (12, 22, false));
        assert!(parse_stat(b"12 (a").is_none());
    }
}
