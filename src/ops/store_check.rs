//! The operation `store check`: one round of the calls that the commands make, at the size that they make them.
//!
//! Works below the staging folder and with a lock of its own, and removes both. If a setting mends what fails, the round
//! is made again with it, so that all settings are known in the end. Called by `cli::store_check`.

use super::report::{FailureFields, Report, ReportBuilder};
use crate::backup::catalog::{V1, V2};
use crate::base::Cancel;
use crate::base::read_all::for_each_piece;
use crate::error::{Error, Reason, Result};
use crate::store::lock::{LOCKS, Lock, Wait};
use crate::store::staging::{STAGING, temporary_path};
use crate::store::{Published, Store, Upload, Versioning};
use schemars::JsonSchema;
use serde::Serialize;
use std::io::Write;
use std::time::Duration;

/// The size of an object that goes to an object store in two parts, in bytes.
const TWO_PARTS: u64 = (8 << 20) + 1;
/// What makes a store read an object by ranges, in bytes.
const BY_RANGES: u64 = 16 << 20;

/// The status of a store check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Status {
    /// deltafold can work in this store.
    Succeeded,
    /// A step failed without which deltafold cannot work.
    Failed,
}

/// The result of a store check. The fields are a contract: `deltafold schema store-check`.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Outcome {
    /// Whether deltafold can work in the store.
    pub status: Status,
    /// The error, if it failed.
    #[serde(flatten)]
    pub error: FailureFields,
    /// The store's URL, without secrets.
    pub store: String,
    /// The steps, in their order, with the settings that were given.
    pub checks: Vec<Check>,
    /// The settings (KEY=VALUE) with which deltafold can work in the store. Empty if it can without, or if none help.
    pub settings: Vec<String>,
}

/// A step of the round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
#[schemars(rename = "State")]
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
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
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
pub fn run(open: impl Fn(&[(&str, &str)]) -> Result<Store>) -> Result<Report<Outcome>> {
    let clock = ReportBuilder::start();
    let mut settings: Vec<&str> = Vec::new();
    let store = open(&[])?;
    let first = Round::go(&store)?;
    let mut failure = first.setting();
    let mut works = first.error.is_none();
    while let Some(setting) = failure.filter(|setting| !settings.contains(setting)) {
        settings.push(setting);
        let pairs: Vec<(&str, &str)> = settings.iter().filter_map(|s| s.split_once('=')).collect();
        store.cancel().check()?;
        let round = open(&pairs).and_then(|store| Round::go(&store));
        works = round.as_ref().is_ok_and(|round| round.error.is_none());
        failure = round.ok().and_then(|round| round.setting());
    }
    if !works {
        settings.clear();
    }
    let error = first.error.map(|(ability, e)| {
        e.reason().error(format!(
            "deltafold cannot work in {}: {}: {e}",
            store.url(),
            ability.needed_for()
        ))
    });
    let outcome = Outcome {
        status: match error {
            None => Status::Succeeded,
            Some(_) => Status::Failed,
        },
        error: FailureFields::from(&error),
        store: store.url().to_owned(),
        checks: first.checks,
        settings: settings.into_iter().map(str::to_owned).collect(),
    };
    Ok(clock.report_with(outcome, error))
}

fn wrong(what: &str) -> Error {
    Reason::Configuration.error(what)
}

fn is_created(published: Published) -> Result<()> {
    match published {
        Published::Created => Ok(()),
        _ => Err(wrong("a new object is said to exist")),
    }
}

/// Writes an object in parts, asks for its name once more, and reads it by ranges.
fn write_in_parts(store: &Store, path: &str) -> Result<()> {
    let piece: Vec<u8> = (0..1 << 20).map(|i: u32| (i % 251) as u8).collect();
    let write = || -> Result<Published> {
        let failed = |e| Error::io(format!("write {}", store.name(path)), e);
        let mut upload = Upload::new(store, path, TWO_PARTS)?;
        let mut left = TWO_PARTS as usize;
        while left > 0 {
            let n = left.min(piece.len());
            upload.write_all(&piece[..n]).map_err(failed)?;
            left -= n;
        }
        upload.finish()?.complete()
    };
    is_created(write()?)?;
    let (mut at, mut is_same) = (0_usize, true);
    let failed = |e| Error::io(format!("read {}", store.name(path)), e);
    for_each_piece(
        store.fetch(path, BY_RANGES),
        store.cancel(),
        failed,
        |bytes| {
            is_same &= bytes
                .iter()
                .enumerate()
                .all(|(i, b)| *b == piece[(at + i) % piece.len()]);
            at += bytes.len();
            Ok(())
        },
    )?;
    match (is_same && at as u64 == TWO_PARTS, write()?) {
        (false, _) => Err(wrong("other bytes came back than were written in parts")),
        (true, Published::Identical) => Ok(()),
        (true, _) => Err(wrong("an object in parts took a name that was not free")),
    }
}

fn are_gone(store: &Store, paths: &[String]) -> Result<()> {
    for path in paths {
        if store.exists(path)? {
            return Err(wrong("a deleted object is still there"));
        }
    }
    Ok(())
}

/// The steps so far.
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
        let mut round = Round {
            checks: Vec::new(),
            error: None,
        };
        round.add(Ability::List, Ok(()));
        round.step(Ability::Put, || store.replace_small(path, &content));
        match store.uses_conditions() {
            true => round.step(Ability::ConditionalCreate, || {
                is_created(store.create_small(free, &content)?)?;
                store.refuses_to_replace(path)
            }),
            false => round.lacks(
                Ability::ConditionalCreate,
                "nobody else may write to this prefix",
            ),
        };
        round.step(Ability::ReadBack, || {
            match store.read_small(path, content.len() as u64)? {
                Some(read) if read == content => Ok(()),
                _ => Err(wrong("other bytes came back than were written")),
            }
        });
        round.step(Ability::Multipart, || write_in_parts(store, parts));
        round.try_lock(store);
        round.step(Ability::Tags, || {
            store.excluded_by_tag(std::slice::from_ref(path)).map(drop)
        });
        if store.tags_refused() {
            round.now_lacks("marks are objects beside the snapshots");
        }
        round.optional(
            Ability::Versions,
            store.versioning().map(|versions| match versions {
                Versioning::Unknown(why) => Some(why),
                _ => None,
            }),
        );
        round.optional(Ability::Uploads, store.uploads().map(|_| None));
        // The objects go whatever happened, also after a signal.
        let cleaning = store.clone().with_cancel(Cancel::default());
        round.remove(&cleaning, &paths);
        store.cancel().check()?;
        Ok(round)
    }

    /// Takes, renews and gives back a lock.
    fn try_lock(&mut self, store: &Store) {
        let word = crate::base::random::random_word();
        let name = format!("check-{word:016x}");
        let locked = || {
            let mut lock = Lock::new(store, &name, "store check", Duration::from_secs(10))?;
            let held = lock.acquire(Wait::UntilSeenDead)?;
            held.renew()?;
            held.release()
        };
        if self.error.is_some() {
            return self.skip(Ability::Lock);
        }
        match locked() {
            Err(_) if !store.may_have_locks() => {
                self.lacks(Ability::Lock, "commands that take a lock need --lock-lease");
            }
            result => self.add(Ability::Lock, result),
        }
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
    }

    /// Deletes two objects by one request, and one by another.
    fn remove(&mut self, store: &Store, [path, others @ ..]: &[String; 3]) {
        let mut deleted = Ok(());
        let many = store.delete_all(others, |_, result| {
            if let Err(e) = result {
                deleted = Err(e);
            }
        });
        let deleted = many.and(deleted);
        let is_written = self.is(Ability::Put, AbilityState::Works);
        match is_written {
            true => self.add_unless_locked(
                Ability::DeleteMany,
                deleted.and_then(|()| are_gone(store, others)),
            ),
            false => self.skip(Ability::DeleteMany),
        };
        if store.deletes_singly() {
            self.now_lacks("objects are deleted one by one");
        }
        let one = std::slice::from_ref(path);
        let deleted = store.delete(path).and_then(|()| are_gone(store, one));
        match is_written {
            true => self.add_unless_locked(Ability::Delete, deleted),
            false => self.skip(Ability::Delete),
        };
    }

    /// Returns a setting that may mend the failure.
    fn setting(&self) -> Option<&'static str> {
        self.error.as_ref()?.1.setting()
    }

    fn is(&self, ability: Ability, state: AbilityState) -> bool {
        let mut checks = self.checks.iter();
        checks.any(|check| check.ability == ability && check.state == state)
    }

    /// Adds a step that the store lacks.
    fn lacks(&mut self, ability: Ability, consequence: &str) {
        match self.error {
            None => self.push(ability, AbilityState::Lacking, Some(consequence.to_owned())),
            Some(_) => self.skip(ability),
        }
    }

    /// Says that the store lacks what the last step asked for, if that went well.
    fn now_lacks(&mut self, consequence: &str) {
        if let Some(last) = self.checks.last_mut()
            && last.state == AbilityState::Works
        {
            last.state = AbilityState::Lacking;
            last.error = Some(consequence.to_owned());
        }
    }

    /// Adds a step that deltafold can do without. `why` says what is lacking.
    fn optional(&mut self, ability: Ability, why: Result<Option<String>>) {
        match why {
            _ if self.error.is_some() => self.skip(ability),
            Ok(None) => self.add(ability, Ok(())),
            Ok(Some(why)) => self.lacks(ability, &why),
            Err(e) if e.reason() == Reason::StoreUnreachable => self.add(ability, Err(e)),
            Err(e) => self.lacks(ability, &e.to_string()),
        }
    }

    /// Adds the result of a deletion. A bucket may keep objects by a policy.
    fn add_unless_locked(&mut self, ability: Ability, result: Result<()>) {
        match result {
            Err(e) if e.reason() == Reason::ObjectLocked => self.lacks(ability, &e.to_string()),
            result => self.add(ability, result),
        }
    }

    /// Tries a step, unless one before it failed.
    fn step(&mut self, ability: Ability, step: impl FnOnce() -> Result<()>) {
        match self.error {
            None => self.add(ability, step()),
            Some(_) => self.skip(ability),
        }
    }

    /// Adds the result of a step.
    fn add(&mut self, ability: Ability, result: Result<()>) {
        match result {
            Ok(()) => self.push(ability, AbilityState::Works, None),
            Err(e) => {
                self.push(ability, AbilityState::Failed, Some(e.to_string()));
                self.error.get_or_insert((ability, e));
            }
        }
    }

    /// Adds a step that was not tried.
    fn skip(&mut self, ability: Ability) {
        self.push(ability, AbilityState::NotTried, None);
    }

    fn push(&mut self, ability: Ability, state: AbilityState, error: Option<String>) {
        self.checks.push(Check {
            ability,
            state,
            needed_for: ability.needed_for().to_owned(),
            error,
        });
    }
}

impl Ability {
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
