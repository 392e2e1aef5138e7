//! What a store really does, found out by doing it: documents and answers are not believed.
//!
//! It writes a few small objects in the staging folder, lets several writers race, and removes all of it
//! again, whatever happened. What the findings mean for a backup, `ops::store_check` says.

use super::errors::{is_taken, refusal};
use super::exclude::Untold;
use super::staging::{STAGING, StagingName};
use super::{ObjectLock, Store, Versioning};
use crate::base::Cancel;
use crate::error::{Error, Reason, Result};
use bytes::Bytes;
use chrono::{DateTime, TimeDelta, Utc};
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{
    CopyMode, CopyOptions, Error as E, MultipartUpload, ObjectStore, ObjectStoreExt, PutMode,
    PutPayload, UpdateVersion,
};
use schemars::JsonSchema;
use serde::Serialize;
use std::time::Duration;
use strum::VariantArray;
use tokio::task::JoinSet;

/// Writers of one name at once.
const RACERS: usize = 8;
/// Times that they race; each time for another name.
const ROUNDS: usize = 3;
/// The smallest part of an upload that S3 takes, but for the last.
const PART: usize = 5 << 20;
/// A clock that is farther off than this is worth a word.
const SKEW: TimeDelta = TimeDelta::seconds(30);
/// How long the removal of what was written may take.
const CLEAN_UP: Duration = Duration::from_secs(20);
/// How long a request that is given up may still be at work.
const SETTLE: Duration = Duration::from_millis(300);

/// Something that a store may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, JsonSchema, Serialize, VariantArray)]
pub enum Ability {
    /// It takes an object.
    Put,
    /// What is read is what was written.
    ReadBack,
    /// What was written is listed at once, with its size.
    List,
    /// What is deleted is gone at once.
    Delete,
    /// It puts parts together, and forgets them when it is told to.
    Multipart,
    /// Of many that write a free name on that condition, one does.
    ConditionalCreate,
    /// An object is overwritten only by who has seen it as it is.
    ConditionalUpdate,
    /// Of many that copy to a free name on that condition, one does.
    ConditionalCopy,
    /// What is damaged on its way is refused.
    Checksum,
    /// The most that it copies at once.
    LargestCopy,
    /// A snapshot can be marked as excluded, and the mark be seen.
    ExcludeTag,
    /// Who reads an object is told that it has tags.
    TagCount,
    /// Whether it keeps what is deleted.
    Versioning,
    /// Whether objects can be locked.
    ObjectLock,
    /// Its clock against ours.
    Clock,
}

impl Ability {
    /// All, in the order in which they are shown.
    pub const ALL: &[Ability] = Ability::VARIANTS;
}

/// What was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, JsonSchema, Serialize)]
pub enum State {
    /// It does it.
    Works,
    /// It says that it does not, or not for us.
    Refused,
    /// It says that it does, and does something else.
    Lies,
    /// It has no such thing.
    Absent,
    /// It was not tried, because of something else.
    NotTried,
}

/// What was found of one ability.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Which.
    pub ability: Ability,
    /// How it is.
    pub state: State,
    /// What was seen.
    pub detail: String,
}

/// What came of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Findings {
    /// One for each of [`Ability::ALL`], in that order.
    pub all: Vec<Finding>,
    /// What could not be removed again.
    pub left_behind: Vec<String>,
}

type Found = (State, String);

/// Why an ability does not work, or is not known to.
enum Stop {
    Found(Found),
    /// A later run may not see this.
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(e: Error) -> Self {
        Stop::Failed(e)
    }
}

/// What came of trying an ability: how it works.
type Tried = Result<String, Stop>;

fn stop<T>(state: State, detail: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Found((state, detail.into())))
}

fn lies<T>(detail: impl Into<String>) -> Result<T, Stop> {
    stop(State::Lies, detail)
}

/// What an error means, of what was tried.
fn refused(what: &str) -> impl Fn(E) -> Stop {
    move |e| match refusal(what, e) {
        Ok(refusal) => Stop::Found((State::Refused, refusal.to_string())),
        Err(e) => Stop::Failed(e),
    }
}

/// Whether a condition that does not hold was refused.
fn was_refused<T>(done: Result<T, E>, what: &str, lie: &str) -> Result<(), Stop> {
    match done {
        Err(e) if is_taken(&e) => Ok(()),
        Err(e) => Err(refused(what)(e)),
        Ok(_) => lies(lie),
    }
}

struct Prober {
    /// It is not cancelled: what was written is removed whatever happens.
    store: Store,
    names: Vec<StagingName>,
    multipart: Option<Box<dyn MultipartUpload>>,
    found: Vec<Finding>,
    is_versioned: bool,
    /// Requests may still be under way.
    was_cut_off: bool,
}

impl Store {
    /// Finds out what the store does. It writes at most around 6 MiB.
    ///
    /// # Errors
    /// `StoreUnreachable`; what a listing gives, such as `PermissionDenied`, `Unauthenticated`, or
    /// `NoSnapshots` where the bucket is not there; `Terminated`.
    pub fn probe(&self) -> Result<Findings> {
        // First of all, so that a wrong key or a wrong bucket is told as such.
        self.list(&[STAGING])?;
        let mut prober = Prober {
            store: self.clone().with_cancel(Cancel::default()),
            names: Vec::new(),
            multipart: None,
            found: Vec::new(),
            is_versioned: false,
            was_cut_off: false,
        };
        let locks = prober.object_lock()?;
        prober.versioning()?;
        let result = match locks {
            true => self.block_on(prober.all()),
            false => Ok(Ok(())),
        };
        prober.was_cut_off = !matches!(result, Ok(Ok(())));
        let left_behind = prober.clean_up();
        result??;
        let why_not = match locks {
            true => "what it needs does not work",
            false => "the bucket locks all that is written: what is tried could not be removed",
        };
        let finding = |&ability: &Ability| {
            let known = prober.found.iter().find(|f| f.ability == ability);
            known.cloned().unwrap_or_else(|| Finding {
                ability,
                state: State::NotTried,
                detail: why_not.to_owned(),
            })
        };
        Ok(Findings {
            all: Ability::ALL.iter().map(finding).collect(),
            left_behind,
        })
    }
}

/// What became of a race for a free name: how many were told that they won, and whose content is there.
fn judge_race(winners: &[usize], refusals: usize, content: Option<usize>) -> Result<(), Found> {
    let lies = |detail: String| Err((State::Lies, detail));
    match (winners, content) {
        (_, None) => lies(format!(
            "of {RACERS} that wrote one free name at once {} were told that they did, and no such content is there",
            winners.len()
        )),
        ([winner], Some(there)) if *winner == there => Ok(()),
        ([_], Some(_)) => lies(format!(
            "of {RACERS} that wrote one free name at once one was told that it did, and another's content is there"
        )),
        // The winner's answer was lost, and its second try was refused.
        ([], Some(_)) if refusals == RACERS => Ok(()),
        ([], Some(_)) => lies("one wrote it, and was told that it did not".to_owned()),
        (several, Some(_)) => lies(format!(
            "of {RACERS} that wrote one free name at once {} were told that they did: all but one overwrote another's",
            several.len()
        )),
    }
}

/// What a difference of clocks comes to; the store's time has whole seconds at best.
fn judge_clock(before: DateTime<Utc>, store: DateTime<Utc>, after: DateTime<Utc>) -> Found {
    let early = before - TimeDelta::seconds(1) - store;
    let late = store - after;
    let off = early.max(late);
    if off <= SKEW {
        return (
            State::Works,
            "the store's clock and this machine's agree".to_owned(),
        );
    }
    let direction = if late > early { "ahead of" } else { "behind" };
    (
        State::Lies,
        format!(
            "the store's clock is {} s {direction} this machine's",
            off.num_seconds()
        ),
    )
}

impl Prober {
    fn note(&mut self, ability: Ability, (state, detail): Found) {
        self.found.push(Finding {
            ability,
            state,
            detail,
        });
    }

    /// Notes what came of trying; gives whether it works.
    fn tried(&mut self, ability: Ability, tried: Tried) -> Result<bool> {
        let found = match tried {
            Ok(detail) => (State::Works, detail),
            Err(Stop::Found(found)) => found,
            Err(Stop::Failed(e)) => return Err(e),
        };
        let works = found.0 == State::Works;
        self.note(ability, found);
        Ok(works)
    }

    /// A new name in the staging folder, and its path in the store.
    fn name(&mut self, hint: &str) -> (String, Path) {
        let name = StagingName::new(&format!("check-{hint}"));
        let below = name.path.clone();
        self.names.push(name);
        let path = self.store.path(&below);
        (below, path)
    }

    /// Whether something may be written: what is locked at once could not be removed.
    fn object_lock(&mut self) -> Result<bool> {
        let (mut writes, word) = (true, str::to_owned);
        let found = match self.store.object_lock() {
            Ok(ObjectLock::Enabled { default: None }) => {
                let detail = word("enabled; what is written is not locked by itself");
                (State::Works, detail)
            }
            Ok(ObjectLock::Enabled {
                default: Some(rule),
            }) => {
                writes = false;
                let detail = format!("enabled; all that is written is locked at once ({rule})");
                (State::Works, detail)
            }
            Ok(ObjectLock::Disabled) => (State::Absent, word("not enabled in this bucket")),
            Ok(ObjectLock::Unsupported(why)) => (State::Absent, why),
            Err(e) if e.reason() == Reason::PermissionDenied => (State::Refused, e.to_string()),
            Err(e) => return Err(e),
        };
        self.note(Ability::ObjectLock, found);
        Ok(writes)
    }

    fn versioning(&mut self) -> Result<()> {
        let versioning = self.store.versioning()?;
        let (state, detail) = match &versioning {
            Versioning::Off => (State::Absent, "what is deleted is gone"),
            Versioning::Enabled => (State::Works, "enabled: a deletion only hides"),
            Versioning::Suspended => (State::Works, "suspended: older versions may still be there"),
            Versioning::Unknown(why) => (State::Refused, &**why),
        };
        self.is_versioned = state != State::Absent;
        self.note(Ability::Versioning, (state, detail.to_owned()));
        Ok(())
    }

    async fn all(&mut self) -> Result<()> {
        let Some((path, clock)) = self.put_and_read().await? else {
            return Ok(());
        };
        let listed = self.list(&path).await;
        self.tried(Ability::List, listed)?;
        let uploaded = self.multipart().await;
        self.tried(Ability::Multipart, uploaded)?;
        let created = self.create().await;
        self.tried(Ability::ConditionalCreate, created)?;
        let updated = self.update().await;
        self.tried(Ability::ConditionalUpdate, updated)?;
        let copied = self.copy(&path).await;
        self.tried(Ability::ConditionalCopy, copied)?;
        let summed = self.checksum().await;
        self.tried(Ability::Checksum, summed)?;
        let marked = self.mark(&path).await;
        let told = match self.tried(Ability::ExcludeTag, marked)? {
            true => self.tells_mark(&path).await,
            false => stop(State::Absent, "no mark could be set"),
        };
        self.tried(Ability::TagCount, told)?;
        // Last: the others want it.
        let deleted = self.delete(&path).await;
        self.tried(Ability::Delete, deleted)?;
        if let Some(found) = clock {
            self.note(Ability::Clock, found);
        }
        let detail = match (self.store.largest_copy, self.store.largest_range) {
            (Some(most), _) => {
                format!("up to {} GiB, by its documents: not tried", most >> 30)
            }
            (None, Some(most)) => format!(
                "up to {} GiB at once, more by ranges, by its documents: not tried",
                most >> 30
            ),
            (None, None) => "no limit is known: not tried".to_owned(),
        };
        self.note(Ability::LargestCopy, (State::Works, detail));
        Ok(())
    }

    /// The first object, which the others use, and how the store's clock is; `None` if nothing can be written.
    async fn put_and_read(&mut self) -> Result<Option<(String, Option<Found>)>> {
        let (name, path) = self.name("put");
        let content = Bytes::from(format!("deltafold checks this store: {name}"));
        let before = Utc::now();
        let put = self.store.inner.put(&path, content.clone().into()).await;
        let after = Utc::now();
        let put = put.map_err(refused("write an object"));
        if !self.tried(
            Ability::Put,
            put.map(|_| "an object was written".to_owned()),
        )? {
            return Ok(None);
        }
        let read = match self.get(&path).await {
            Ok(got) if got == content => Ok("it reads back as it was written".to_owned()),
            Ok(got) => lies(format!(
                "{} bytes were written, and {} other ones are read back",
                content.len(),
                got.len()
            )),
            Err(stop) => Err(stop),
        };
        if !self.tried(Ability::ReadBack, read)? {
            return Ok(None);
        }
        let seen = self.store.inner.head(&path).await.ok();
        let clock = seen.map(|meta| judge_clock(before, meta.last_modified, after));
        Ok(Some((name, clock)))
    }

    async fn get(&self, path: &Path) -> Result<Bytes, Stop> {
        let got = async { self.store.inner.get(path).await?.bytes().await };
        match got.await {
            Err(E::NotFound { .. }) => lies("an object was written, and is not there"),
            got => got.map_err(refused("read an object")),
        }
    }

    async fn is_there(&self, path: &Path) -> Result<bool, Stop> {
        match self.store.inner.head(path).await {
            Ok(_) => Ok(true),
            Err(E::NotFound { .. }) => Ok(false),
            Err(e) => Err(refused("look at an object")(e)),
        }
    }

    async fn size_listed(&self, name: &str) -> Result<Option<u64>, Stop> {
        let folder = self.store.path(STAGING);
        let wanted = self.store.path(name);
        let mut listing = self.store.inner.list(Some(&folder));
        let failed = refused("list objects");
        while let Some(object) = listing.try_next().await.map_err(&failed)? {
            if object.location == wanted {
                return Ok(Some(object.size));
            }
        }
        Ok(None)
    }

    async fn list(&mut self, first: &str) -> Tried {
        // One that was there before the listing, and one that was written a moment ago.
        let (name, path) = self.name("list");
        let content = "listed";
        let put = self.store.inner.put(&path, content.into()).await;
        put.map_err(refused("write an object"))?;
        let sizes = (
            self.size_listed(&name).await?,
            self.size_listed(first).await?,
        );
        match sizes {
            (None, _) | (_, None) => {
                lies("an object was written, and a listing right after it does not show it")
            }
            (Some(bytes), _) if bytes != content.len() as u64 => lies(format!(
                "an object of {} bytes is listed with {bytes}",
                content.len()
            )),
            _ => Ok("what was written is listed at once".to_owned()),
        }
    }

    async fn multipart(&mut self) -> Tried {
        let (_, path) = self.name("multipart");
        // Not all the same, so that parts that change places show.
        let mut content: Vec<u8> = (0..PART + 100).map(|i| (i / 7 + i / 4096) as u8).collect();
        content[PART] ^= 0x55;
        let content = Bytes::from(content);
        let parts = [content.slice(..PART), content.slice(PART..)];
        let uploaded = self.upload(&path, &parts, true).await;
        uploaded.map_err(refused("upload an object in parts"))?;
        let got = self.get(&path).await?;
        if got != content {
            return lies(format!(
                "an object of {} bytes was uploaded in parts, and {} other ones are read back",
                content.len(),
                got.len()
            ));
        }
        // An upload that is given up must leave no object.
        let (_, path) = self.name("abort");
        let aborted = self.upload(&path, &[content.slice(..100)], false).await;
        aborted.map_err(refused("give up an upload in parts"))?;
        match self.is_there(&path).await? {
            false => Ok("parts were put together, and given up".to_owned()),
            true => lies("an upload was given up, and its object is there"),
        }
    }

    async fn upload(&mut self, path: &Path, parts: &[Bytes], complete: bool) -> Result<(), E> {
        let upload = self.store.inner.put_multipart(path).await?;
        // Kept where the removal finds it.
        let upload = self.multipart.insert(upload);
        for part in parts {
            upload.put_part(part.clone().into()).await?;
        }
        match complete {
            true => upload.complete().await.map(|_| ())?,
            false => upload.abort().await?,
        }
        self.multipart = None;
        Ok(())
    }

    async fn create(&mut self) -> Tried {
        let what = "write an object on condition that it is new";
        let (_, path) = self.name("create");
        let inner = self.store.inner.clone();
        let create = |path: &Path, text: String| {
            let (inner, path) = (inner.clone(), path.clone());
            async move {
                let put = inner.put_opts(&path, text.into(), PutMode::Create.into());
                put.await.map(|_| ())
            }
        };
        let first = create(&path, "first".to_owned()).await;
        first.map_err(refused(what))?;
        was_refused(
            create(&path, "second".to_owned()).await,
            what,
            "an object was written on condition that its name is free, which it was not, and the store said that it did: it overwrites",
        )?;
        let racer = |i, path: &Path| create(path, format!("racer {i}"));
        self.races("race", racer).await?;
        Ok(format!(
            "{ROUNDS} times, of {RACERS} that wrote one free name at once, exactly one did"
        ))
    }

    /// Lets several write one free name at once, some times.
    async fn races<F>(&mut self, hint: &str, racer: impl Fn(usize, &Path) -> F) -> Result<(), Stop>
    where
        F: Future<Output = Result<(), E>> + Send + 'static,
    {
        for _ in 0..ROUNDS {
            let (_, path) = self.name(hint);
            let mut racers = JoinSet::new();
            for i in 0..RACERS {
                let racer = racer(i, &path);
                racers.spawn(async move { (i, racer.await) });
            }
            let (mut winners, mut refusals) = (Vec::new(), 0);
            while let Some(ended) = racers.join_next().await {
                match ended {
                    Ok((i, Ok(()))) => winners.push(i),
                    Ok((_, Err(e))) if is_taken(&e) => refusals += 1,
                    Ok((_, Err(e))) => {
                        return Err(refused("write at the same time as others")(e));
                    }
                    Err(_) => {}
                }
            }
            let content = match self.get(&path).await {
                Ok(bytes) => std::str::from_utf8(&bytes)
                    .ok()
                    .and_then(|t| t.strip_prefix("racer ")?.parse().ok()),
                Err(Stop::Found((State::Lies, _))) => None,
                Err(stop) => return Err(stop),
            };
            judge_race(&winners, refusals, content).map_err(Stop::Found)?;
        }
        Ok(())
    }

    async fn update(&mut self) -> Tried {
        if self.store.local_root.is_some() {
            return Ok("a folder needs none: files are locked".to_owned());
        }
        let what = "write an object on condition that it is unchanged";
        let (_, path) = self.name("update");
        let inner = self.store.inner.clone();
        let put = |text: &'static str, version: UpdateVersion| {
            inner.put_opts(&path, text.into(), PutMode::Update(version).into())
        };
        let first = inner.put(&path, "first".into()).await;
        let first = UpdateVersion::from(first.map_err(refused(what))?);
        match put("second", first.clone()).await {
            Err(e) if is_taken(&e) => {
                return lies(
                    "an object was written on condition that it is as it is, and the store said that it is not",
                );
            }
            second => second.map_err(refused(what))?,
        };
        was_refused(
            put("third", first).await,
            what,
            "an object was written on condition that it is as it was before it was changed, and the store said that it did: it overwrites",
        )?;
        match self.get(&path).await? == "second".as_bytes() {
            true => Ok("who has not seen the last change is refused".to_owned()),
            false => lies("a change was refused, and is there"),
        }
    }

    async fn copy(&mut self, taken: &str) -> Tried {
        let what = "copy an object on condition that the name is free";
        let inner = self.store.inner.clone();
        let mut sources = Vec::new();
        for i in 0..RACERS {
            let (_, path) = self.name("source");
            let text = PutPayload::from(format!("racer {i}"));
            inner.put(&path, text).await.map_err(refused(what))?;
            sources.push(path);
        }
        let copy = |i: usize, to: &Path| {
            let (inner, source, to) = (inner.clone(), sources[i].clone(), to.clone());
            let options = CopyOptions::new().with_mode(CopyMode::Create);
            async move { inner.copy_opts(&source, &to, options).await }
        };
        was_refused(
            copy(0, &self.store.path(taken)).await,
            what,
            "an object was copied on condition that the new name is free, which it was not, and the store said that it did: it overwrites",
        )?;
        self.races("copy", copy).await?;
        Ok(format!(
            "{ROUNDS} times, of {RACERS} that copied to one free name at once, exactly one did"
        ))
    }

    async fn checksum(&mut self) -> Tried {
        let Some(direct) = self.store.direct.clone() else {
            let detail = "objects are sent to it without a checksum";
            return stop(State::Absent, detail);
        };
        let (_, path) = self.name("checksum");
        if !direct.refuses_damage(&path).await? {
            return lies("an object was damaged on its way, and the store said that it wrote it");
        }
        if self.is_there(&path).await? {
            return lies("an object that was damaged on its way was refused, and is there");
        }
        let put = direct.put(&path, "whole".into(), "check", PutMode::Overwrite);
        let put = put
            .await
            .map_err(refused("write an object with its checksum"));
        put.map(|()| "an object that was damaged on its way was refused".to_owned())
    }

    async fn mark(&self, name: &str) -> Tried {
        let (store, tags) = (&self.store, &self.store.tags);
        if !tags.can_tell() {
            return stop(State::Absent, "it has no tags");
        }
        match tags.set(&store.inner, &store.path(name), true).await {
            Ok(()) => Ok("a mark was set, and is there".to_owned()),
            Err(Untold::Gone) => lies("the object is not there"),
            Err(Untold::Refused(e)) => stop(State::Refused, e.to_string()),
            Err(Untold::Lied(e)) => lies(e.to_string()),
            Err(Untold::Failed(e)) => Err(Stop::Failed(e)),
        }
    }

    async fn tells_mark(&self, name: &str) -> Tried {
        let read = self.store.inner.get(&self.store.path(name)).await;
        read.map_err(refused("read an object with a mark"))?;
        match self.store.has_tags(name) {
            true => Ok(
                "an object with a mark was read, and the answer says that it has one".to_owned(),
            ),
            false => stop(
                State::Absent,
                "an object with a mark was read, and the answer does not say that it has one",
            ),
        }
    }

    async fn delete(&mut self, name: &str) -> Tried {
        let path = self.store.path(name);
        let deleted = self.store.inner.delete(&path).await;
        deleted.map_err(refused("delete an object"))?;
        if self.is_there(&path).await? {
            return lies("an object was deleted, and is still there");
        }
        match self.size_listed(name).await? {
            None => Ok("what was deleted is gone".to_owned()),
            Some(_) => lies("an object was deleted, and a listing right after it shows it"),
        }
    }

    /// Removes all that was written, with its versions; gives what could not be removed.
    fn clean_up(&mut self) -> Vec<String> {
        let (names, mut multipart) = (std::mem::take(&mut self.names), self.multipart.take());
        let store = &self.store;
        let (is_versioned, was_cut_off) = (self.is_versioned, self.was_cut_off);
        let removal = async {
            if was_cut_off {
                // The server may be about to do what it was asked for last.
                tokio::time::sleep(SETTLE).await;
            }
            if let Some(upload) = &mut multipart {
                let _ = upload.abort().await;
            }
            let mut left = Vec::new();
            for name in &names {
                let path = store.path(&name.path);
                if was_cut_off && let Err(e) = give_uploads_up(store, &name.path).await {
                    left.push(format!("an unfinished upload of {}: {e}", name.path));
                }
                match store.inner.delete(&path).await {
                    Ok(()) | Err(E::NotFound { .. }) => {}
                    Err(e) => left.push(format!("{}: {e}", name.path)),
                }
                // A deletion that only hides leaves versions, and its own mark.
                if is_versioned && let Err(e) = remove_versions(store, &name.path).await {
                    left.push(format!("versions of {}: {e}", name.path));
                }
            }
            left
        };
        let removed = store
            .handle
            .block_on(async { tokio::time::timeout(CLEAN_UP, removal).await });
        let left = removed.unwrap_or_else(|_| {
            vec![format!(
                "{STAGING}/check-…: the store did not answer in time; any later run removes what is there after a day"
            )]
        });
        drop(names);
        store.remove_staging_folder();
        for one in &left {
            tracing::warn!("left behind: {one}");
        }
        left
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        if !self.names.is_empty() {
            self.clean_up();
        }
    }
}

/// Copies, too, are uploads on their way. Asked for by the whole name, since some servers tell no others.
async fn give_uploads_up(store: &Store, below: &str) -> Result<()> {
    let prefix = store.path(below).to_string();
    for upload in store.uploads_of(prefix).await? {
        store.give_up(&upload).await?;
    }
    Ok(())
}

async fn remove_versions(store: &Store, below: &str) -> Result<()> {
    let mut versions = Vec::new();
    let prefix = store.path(below).to_string();
    let listed = store.versions_behind(prefix, |v| {
        versions.push(v);
        Ok(())
    });
    listed.await?;
    for v in versions.iter().filter(|v| v.path == below) {
        store.delete_version_of(&v.path, &v.version).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_one_racer_wins() {
        let judge = |winners: &[usize], refusals, content| judge_race(winners, refusals, content);
        assert_eq!(judge(&[3], 7, Some(3)), Ok(()));
        assert_eq!(judge(&[], 8, Some(3)), Ok(()));
        for (winners, refusals, content) in [
            (&[3][..], 7, Some(4)),
            (&[3], 7, None),
            (&[3, 4], 6, Some(4)),
            (&[0, 1, 2, 3, 4, 5, 6, 7], 0, Some(7)),
            (&[], 8, None),
        ] {
            let (state, detail) = judge(winners, refusals, content).unwrap_err();
            assert_eq!(state, State::Lies, "{winners:?} {content:?}: {detail}");
        }
    }

    #[test]
    fn a_clock_may_be_off_by_what_it_rounds() {
        let t = |s: i64| DateTime::from_timestamp(1_763_700_000 + s, 0).unwrap();
        let state = |store: i64| judge_clock(t(0), t(store), t(2));
        assert_eq!(state(0).0, State::Works);
        assert_eq!(state(-20).0, State::Works);
        assert_eq!(state(32).0, State::Works);
        let (bad, detail) = state(3602);
        assert_eq!(bad, State::Lies);
        assert_eq!(
            detail,
            "the store's clock is 3600 s ahead of this machine's"
        );
        let (bad, detail) = state(-3601);
        assert_eq!(bad, State::Lies);
        assert_eq!(detail, "the store's clock is 3600 s behind this machine's");
    }
}
