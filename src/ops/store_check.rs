//! The operation `store check`: one round of the calls that the commands make, at the size that they make them.
//!
//! Works below the staging folder and with a lock of its own, and removes both. If a setting may mend what fails, the
//! round is made again with it, so that all settings are known in the end.

use super::report::{Report, ReportBuilder};
use crate::backup::catalog::{V1, V2};
use crate::base::Cancel;
use crate::base::opt::LOCK_LEASE;
use crate::error::{Error, Reason, Result};
use crate::store::lock::{LOCKS, Lock, Wait};
use crate::store::staging::{STAGING, temporary_path};
use crate::store::{Published, Store, Upload, Versioning};
use serde::Serialize;
use std::io::{Read, Write};
use std::time::Duration;

/// The size of an object that goes to an object store in two parts, in bytes.
const TWO_PARTS: u64 = (8 << 20) + 1;
/// What makes a store read an object by ranges, in bytes.
const BY_RANGES: u64 = 16 << 20;

/// The result of a store check. The fields are a contract.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct CheckedStore {
    /// The store's URL, without secrets.
    pub store: String,
    /// The steps, in their order, with the settings that were given.
    pub checks: Vec<Check>,
    /// The settings (KEY=VALUE) with which deltafold can work in the store. Empty if it can without, or if none help.
    pub settings: Vec<String>,
}

/// A step of the round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum Ability {
    /// The prefix can be listed.
    List,
    /// An object can be written.
    Put,
    /// A write on condition that the object does not exist succeeds, and is refused if it exists.
    ConditionalCreate,
    /// The object reads back as it was written.
    ReadBack,
    /// An object can be written in parts, gets its name on condition that it is free, and reads back by ranges.
    Multipart,
    /// An object can be replaced on condition that it has not changed: a lock can be taken, renewed and given back.
    Lock,
    /// Tags can be read.
    Tags,
    /// Whether deleted objects are kept as versions can be asked.
    Versions,
    /// Unfinished uploads can be listed.
    Uploads,
    /// Several objects can be deleted by one request.
    DeleteMany,
    /// The object can be deleted, and is gone then.
    Delete,
}

/// The result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum AbilityState {
    /// It worked.
    Works,
    /// It failed.
    Failed,
    /// The store does not have it, and deltafold does without.
    Lacking,
    /// It was not tried, because an earlier step failed.
    NotTried,
}

/// A step and its result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Check {
    /// The step.
    pub ability: Ability,
    /// Its result.
    pub state: AbilityState,
    /// What the step is needed for, as human-readable text; it may change.
    pub needed_for: String,
    /// The error, if it failed.
    pub error: Option<String>,
}

/// Goes through the store. `open` opens it with further settings (KEY, VALUE).
///
/// # Errors
/// Fails with the errors of a listing, such as `StoreUnreachable`, `PermissionDenied`, `Unauthenticated`, or
/// `NoSnapshots` if the bucket does not exist; with `Terminated`. Later failures are in the report.
pub fn run(open: impl Fn(&[(&str, &str)]) -> Result<Store>) -> Result<Report<CheckedStore>> {
    let clock = ReportBuilder::start();
    let store = open(&[])?;
    let first = Round::go(&store)?;
    let mut settings: Vec<&str> = Vec::new();
    let mut last = first.error.as_ref().map(|(_, e)| e.setting());
    while let Some(Some(setting)) = last
        && !settings.contains(&setting)
    {
        settings.push(setting);
        let pairs: Vec<(&str, &str)> = settings.iter().filter_map(|s| s.split_once('=')).collect();
        store.cancel().check()?;
        last = match open(&pairs).and_then(|store| Round::go(&store)) {
            Ok(round) => round.error.map(|(_, e)| e.setting()),
            Err(_) => Some(None),
        };
    }
    if last.is_some() {
        settings.clear();
    }
    let error = first.error.map(|(ability, e)| {
        let needed_for = ability.needed_for();
        e.reworded(format!(
            "deltafold cannot work in {}: {needed_for}: {e}",
            store.url()
        ))
    });
    let outcome = CheckedStore {
        store: store.url().to_owned(),
        checks: first.checks,
        settings: settings.into_iter().map(str::to_owned).collect(),
    };
    Ok(clock.ended(outcome, true, error))
}

fn wrong(what: &str) -> Error {
    Reason::Configuration.error(what)
}

/// What a step saw: `None` if it worked, or why the store lacks it.
type StepResult = Result<Option<String>>;

const WORKS: StepResult = Ok(None);

fn lacks(why: impl Into<String>) -> StepResult {
    Ok(Some(why.into()))
}

fn is_created(published: Published) -> Result<()> {
    match published {
        Published::Created => Ok(()),
        _ => Err(wrong("a new object is said to exist")),
    }
}

/// Writes an object in parts, asks for its name once more, and reads it by ranges.
fn write_in_parts(store: &Store, path: &str) -> StepResult {
    let content: Vec<u8> = (0..TWO_PARTS).map(|i| (i % 251) as u8).collect();
    let write = || -> Result<Published> {
        let mut upload = Upload::new(store, path, content.len() as u64)?;
        let written = content
            .chunks(1 << 20)
            .try_for_each(|piece| upload.write_all(piece));
        written.map_err(|e| Error::io(format!("write {}", store.name(path)), e))?;
        upload.finish()?.complete()
    };
    is_created(write()?)?;
    let mut read = Vec::new();
    let mut object = store.fetch(path, BY_RANGES).take(BY_RANGES);
    let failed = |e| Error::io(format!("read {}", store.name(path)), e);
    object.read_to_end(&mut read).map_err(failed)?;
    match (read == content, write()?) {
        (false, _) => Err(wrong("other bytes came back than were written in parts")),
        (true, Published::Identical) => WORKS,
        (true, _) => Err(wrong("an object in parts took a name that was not free")),
    }
}

/// Takes, renews and gives back a lock.
fn lock(store: &Store) -> StepResult {
    let word = crate::base::random::random_word();
    let name = format!("check-{word:016x}");
    let locked = || {
        let mut lock = Lock::new(store, &name, "store check", Duration::from_secs(10))?;
        let held = lock.acquire(Wait::UntilSeenDead)?;
        held.renew()?;
        held.release()
    };
    let locked = locked();
    let cleaning = store.clone().with_cancel(Cancel::default());
    // In a local folder, a lock has a second file.
    let files: &[&str] = match store.requests() {
        Some(_) => &["json"],
        None => &["json", "flock"],
    };
    for file in files {
        if let Err(e) = cleaning.delete(&format!("{LOCKS}/{name}.{file}")) {
            tracing::debug!("a lock is left behind: {e}");
        }
    }
    match locked {
        Err(_) if !store.may_have_locks() => {
            lacks(format!("commands that take a lock need {LOCK_LEASE}"))
        }
        locked => locked.map(|()| None),
    }
}

fn are_gone(store: &Store, paths: &[String]) -> StepResult {
    for path in paths {
        if store.exists(path)? {
            return Err(wrong("a deleted object is still there"));
        }
    }
    WORKS
}

/// Deletes objects by one request.
fn delete_many(store: &Store, paths: &[String]) -> StepResult {
    let mut deleted = Ok(());
    store.delete_all(paths, |_, result| {
        if let Err(e) = result {
            deleted = Err(e);
        }
    })?;
    deleted.and_then(|()| are_gone(store, paths))?;
    if store.deletes_singly() {
        lacks("objects are deleted one by one")
    } else {
        WORKS
    }
}

/// The steps so far.
#[derive(Default)]
struct Round {
    checks: Vec<Check>,
    error: Option<(Ability, Error)>,
}

impl Round {
    /// Makes one round.
    fn go(store: &Store) -> Result<Round> {
        store.list(&[V2, V1, STAGING])?;
        let paths = ["check", "check-free", "check-parts"].map(temporary_path);
        let [path, free, parts] = &paths;
        let content = format!("deltafold checks this store: {path}").into_bytes();
        let mut round = Round::default();
        round.step(Ability::List, || WORKS);
        round.step(Ability::Put, || {
            store.replace_small(path, &content).map(|()| None)
        });
        round.step(Ability::ConditionalCreate, || {
            if !store.uses_conditions() {
                return lacks("nobody else may write to this prefix");
            }
            is_created(store.create_small(free, &content)?)?;
            store.refuses_to_replace(path).map(|()| None)
        });
        round.step(Ability::ReadBack, || {
            match store.read_small(path, content.len() as u64)? {
                Some(read) if read == content => WORKS,
                _ => Err(wrong("other bytes came back than were written")),
            }
        });
        round.step(Ability::Multipart, || write_in_parts(store, parts));
        round.step(Ability::Lock, || lock(store));
        round.step(Ability::Tags, || {
            store.excluded_by_tag(std::slice::from_ref(path))?;
            if store.can_request_tags() {
                WORKS
            } else {
                lacks("marks are objects beside the snapshots")
            }
        });
        round.step(Ability::Versions, || match store.versioning()? {
            _ if !store.tells_versions() => lacks("only S3 is asked"),
            Versioning::Unknown(why) => lacks(why),
            _ => WORKS,
        });
        round.step(Ability::Uploads, || {
            if store.lists_uploads() {
                store.uploads().map(|_| None)
            } else {
                lacks("a killed upload leaves nothing that could be listed")
            }
        });
        // The objects go whatever happened, also after a signal.
        let cleaning = store.clone().with_cancel(Cancel::default());
        let many = delete_many(&cleaning, &paths[1..]);
        let one = cleaning
            .delete(path)
            .and_then(|()| are_gone(&cleaning, &paths[..1]));
        store.cancel().check()?;
        round.step(Ability::DeleteMany, || many);
        round.step(Ability::Delete, || one);
        Ok(round)
    }

    /// Makes a step, unless one before it failed.
    fn step(&mut self, ability: Ability, step: impl FnOnce() -> StepResult) {
        let (state, error) = match self.error {
            Some(_) => (AbilityState::NotTried, None),
            None => match step() {
                Ok(None) => (AbilityState::Works, None),
                Ok(Some(why)) => (AbilityState::Lacking, Some(why)),
                Err(e) if ability.is_optional(e.reason()) => {
                    (AbilityState::Lacking, Some(e.to_string()))
                }
                Err(e) => {
                    let text = e.to_string();
                    self.error = Some((ability, e));
                    (AbilityState::Failed, Some(text))
                }
            },
        };
        self.checks.push(Check {
            ability,
            state,
            needed_for: ability.needed_for().to_owned(),
            error,
        });
    }
}

impl Ability {
    /// Whether deltafold does without the step if it fails like this. A bucket may keep objects by a policy.
    fn is_optional(self, reason: Reason) -> bool {
        match self {
            Ability::Versions | Ability::Uploads => {
                !matches!(reason, Reason::StoreUnreachable | Reason::Terminated)
            }
            Ability::DeleteMany | Ability::Delete => reason == Reason::ObjectLocked,
            _ => false,
        }
    }

    /// What the step is needed for.
    fn needed_for(self) -> &'static str {
        match self {
            Ability::List => "every command lists the snapshots",
            Ability::Put => "snapshots, locks and pins are written",
            Ability::ConditionalCreate => {
                "only one of several runs may give a snapshot its name, or hold the lock"
            }
            Ability::ReadBack => "every snapshot is read back when it is used",
            Ability::Multipart => "snapshots of more than 8 MiB are written in parts",
            Ability::Lock => "one follower, and one gc, may work at a time",
            Ability::Tags => "a snapshot can be excluded by a tag",
            Ability::Versions => "gc says what a bucket with versions keeps",
            Ability::Uploads => "gc removes what a killed upload left",
            Ability::DeleteMany => "gc deletes many objects by one request",
            Ability::Delete => "old snapshots are deleted",
        }
    }
}
