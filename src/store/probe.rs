//! What a store really does, found out by doing it: documents and answers are not believed.
//!
//! It writes a few small objects in the staging folder, lets several writers race, and removes all of it
//! again, whatever happened. What the findings mean for a backup, `job::store_check` says.

use super::direct::is_taken;
use super::exclude::Told;
use super::staging::{STAGING, StagingName};
use super::{ObjectLock, Store, Versioning, store_error};
use crate::base::Cancel;
use crate::error::{Reason, Result};
use bytes::Bytes;
use chrono::{DateTime, TimeDelta, Utc};
use futures::TryStreamExt;
use object_store::{
    CopyMode, CopyOptions, Error as E, MultipartUpload, ObjectStore, ObjectStoreExt, PutMode,
    PutOptions, PutPayload, UpdateVersion,
};
use schemars::JsonSchema;
use serde::Serialize;
use std::time::Duration;
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, JsonSchema, Serialize)]
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
    pub const ALL: [Ability; 15] = [
        Ability::Put,
        Ability::ReadBack,
        Ability::List,
        Ability::Delete,
        Ability::Multipart,
        Ability::ConditionalCreate,
        Ability::ConditionalUpdate,
        Ability::ConditionalCopy,
        Ability::Checksum,
        Ability::LargestCopy,
        Ability::ExcludeTag,
        Ability::TagCount,
        Ability::Versioning,
        Ability::ObjectLock,
        Ability::Clock,
    ];
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

struct Prober {
    /// It is not cancelled: what was written is removed whatever happens.
    store: Store,
    names: Vec<StagingName>,
    multipart: Option<Box<dyn MultipartUpload>>,
    found: Vec<Finding>,
    clock: Option<Found>,
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
            clock: None,
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
        let all = Ability::ALL.map(|ability| {
            let known = prober.found.iter().find(|f| f.ability == ability);
            known.cloned().unwrap_or_else(|| Finding {
                ability,
                state: State::NotTried,
                detail: why_not.to_owned(),
            })
        });
        Ok(Findings {
            all: all.to_vec(),
            left_behind,
        })
    }
}

/// What an error tells of the store; one that a later run may not see is passed on.
pub(super) fn refused(what: &str, e: E) -> Result<Found> {
    let is_answer = matches!(e, E::NotImplemented { .. } | E::NotSupported { .. });
    let e = store_error(what, e);
    match e.reason() {
        // A server may call 501 an error of its own.
        Reason::StoreUnreachable
            if !is_answer && !e.to_string().contains("501 Not Implemented") =>
        {
            Err(e)
        }
        Reason::Terminated => Err(e),
        _ => Ok((State::Refused, e.to_string())),
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

    fn works(&mut self, ability: Ability, detail: &str) {
        self.note(ability, (State::Works, detail.to_owned()));
    }

    /// A new name in the staging folder.
    fn name(&mut self, hint: &str) -> String {
        let name = StagingName::new(&format!("check-{hint}"));
        let path = name.path.clone();
        self.names.push(name);
        path
    }

    /// Whether something may be written: what is locked at once could not be removed.
    fn object_lock(&mut self) -> Result<bool> {
        let (found, writes) = match self.store.object_lock() {
            Ok(ObjectLock::Enabled { default: None }) => (
                (
                    State::Works,
                    "enabled; what is written is not locked by itself".to_owned(),
                ),
                true,
            ),
            Ok(ObjectLock::Enabled {
                default: Some(rule),
            }) => (
                (
                    State::Works,
                    format!("enabled; all that is written is locked at once ({rule})"),
                ),
                false,
            ),
            Ok(ObjectLock::Disabled) => (
                (State::Absent, "not enabled in this bucket".to_owned()),
                true,
            ),
            Ok(ObjectLock::Unsupported(why)) => ((State::Absent, why), true),
            Err(e) if e.reason() == Reason::PermissionDenied => {
                ((State::Refused, e.to_string()), true)
            }
            Err(e) => return Err(e),
        };
        self.note(Ability::ObjectLock, found);
        Ok(writes)
    }

    fn versioning(&mut self) -> Result<()> {
        let found = match self.store.versioning()? {
            Versioning::Off => (State::Absent, "what is deleted is gone".to_owned()),
            Versioning::Enabled => (State::Works, "enabled: a deletion only hides".to_owned()),
            Versioning::Suspended => (
                State::Works,
                "suspended: older versions may still be there".to_owned(),
            ),
            Versioning::Unknown(why) => (State::Refused, why),
        };
        self.is_versioned = found.0 != State::Absent;
        self.note(Ability::Versioning, found);
        Ok(())
    }

    async fn all(&mut self) -> Result<()> {
        let Some(path) = self.put_and_read().await? else {
            return Ok(());
        };
        self.list(&path).await?;
        self.multipart().await?;
        self.create().await?;
        self.update().await?;
        self.copy(&path).await?;
        self.checksum().await?;
        self.tag(&path).await?;
        // Last: the others want it.
        self.delete(&path).await?;
        if let Some(found) = self.clock.take() {
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
        let found = (State::Works, detail);
        self.note(Ability::LargestCopy, found);
        Ok(())
    }

    /// The first object, which the others use; `None` where nothing can be written.
    async fn put_and_read(&mut self) -> Result<Option<String>> {
        let name = self.name("put");
        let path = self.store.path(&name);
        let content = Bytes::from(format!("deltafold checks this store: {name}"));
        let before = Utc::now();
        let put = self.store.inner.put(&path, content.clone().into()).await;
        let after = Utc::now();
        if let Err(e) = put {
            let found = refused("write an object", e)?;
            self.note(Ability::Put, found);
            return Ok(None);
        }
        self.works(Ability::Put, "an object was written");
        match self.get(&name).await? {
            Ok(got) if got == content => {
                self.works(Ability::ReadBack, "it reads back as it was written");
            }
            Ok(got) => {
                let detail = format!(
                    "{} bytes were written, and {} other ones are read back",
                    content.len(),
                    got.len()
                );
                self.note(Ability::ReadBack, (State::Lies, detail));
                return Ok(None);
            }
            Err(found) => {
                self.note(Ability::ReadBack, found);
                return Ok(None);
            }
        }
        if let Ok(meta) = self.store.inner.head(&path).await {
            self.clock = Some(judge_clock(before, meta.last_modified, after));
        }
        Ok(Some(name))
    }

    async fn get(&self, name: &str) -> Result<Result<Bytes, Found>> {
        let got = async {
            let got = self.store.inner.get(&self.store.path(name)).await?;
            got.bytes().await
        };
        match got.await {
            Ok(bytes) => Ok(Ok(bytes)),
            Err(E::NotFound { .. }) => Ok(Err((
                State::Lies,
                "an object was written, and is not there".to_owned(),
            ))),
            Err(e) => refused("read an object", e).map(Err),
        }
    }

    async fn size_listed(&self, name: &str) -> Result<Option<u64>, E> {
        let folder = self.store.path(STAGING);
        let wanted = self.store.path(name);
        let mut listing = self.store.inner.list(Some(&folder));
        while let Some(object) = listing.try_next().await? {
            if object.location == wanted {
                return Ok(Some(object.size));
            }
        }
        Ok(None)
    }

    async fn list(&mut self, first: &str) -> Result<()> {
        // One that was there before the listing, and one that was written a moment ago.
        let name = self.name("list");
        let path = self.store.path(&name);
        let content = Bytes::from_static(b"listed");
        if let Err(e) = self.store.inner.put(&path, content.clone().into()).await {
            let found = refused("write an object", e)?;
            self.note(Ability::List, found);
            return Ok(());
        }
        let found = match (self.size_listed(&name).await, self.size_listed(first).await) {
            (Err(e), _) | (_, Err(e)) => refused("list objects", e)?,
            (Ok(None), _) | (_, Ok(None)) => (
                State::Lies,
                "an object was written, and a listing right after it does not show it".to_owned(),
            ),
            (Ok(Some(bytes)), _) if bytes != content.len() as u64 => (
                State::Lies,
                format!(
                    "an object of {} bytes is listed with {bytes}",
                    content.len()
                ),
            ),
            _ => (
                State::Works,
                "what was written is listed at once".to_owned(),
            ),
        };
        self.note(Ability::List, found);
        Ok(())
    }

    async fn multipart(&mut self) -> Result<()> {
        let name = self.name("multipart");
        let path = self.store.path(&name);
        // Not all the same, so that parts that change places show.
        let mut content: Vec<u8> = (0..PART + 100).map(|i| (i / 7 + i / 4096) as u8).collect();
        content[PART] ^= 0x55;
        let content = Bytes::from(content);
        let parts = [content.slice(..PART), content.slice(PART..)];
        let found = match self.upload(&path, &parts, true).await {
            Err(e) => refused("upload an object in parts", e)?,
            Ok(()) => match self.get(&name).await? {
                Err(found) => found,
                Ok(got) if got != content => (
                    State::Lies,
                    format!(
                        "an object of {} bytes was uploaded in parts, and {} other ones are read back",
                        content.len(),
                        got.len()
                    ),
                ),
                Ok(_) => self.abort(&content.slice(..100)).await?,
            },
        };
        self.note(Ability::Multipart, found);
        Ok(())
    }

    /// An upload that is given up must leave no object.
    async fn abort(&mut self, content: &Bytes) -> Result<Found> {
        let name = self.name("abort");
        let path = self.store.path(&name);
        if let Err(e) = self
            .upload(&path, std::slice::from_ref(content), false)
            .await
        {
            return refused("give up an upload in parts", e);
        }
        match self.store.inner.head(&path).await {
            Err(E::NotFound { .. }) => Ok((
                State::Works,
                "parts were put together, and given up".to_owned(),
            )),
            Err(e) => refused("look at an object", e),
            Ok(_) => Ok((
                State::Lies,
                "an upload was given up, and its object is there".to_owned(),
            )),
        }
    }

    async fn upload(
        &mut self,
        path: &object_store::path::Path,
        parts: &[Bytes],
        complete: bool,
    ) -> Result<(), E> {
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

    async fn create(&mut self) -> Result<()> {
        let name = self.name("create");
        let path = self.store.path(&name);
        let create = || PutOptions {
            mode: PutMode::Create,
            ..PutOptions::default()
        };
        let inner = self.store.inner.clone();
        let put = |text: &'static str| inner.put_opts(&path, text.into(), create());
        let found = match put("first").await {
            Err(e) => Some(refused("write an object on condition that it is new", e)?),
            Ok(_) => match put("second").await {
                Err(e) if is_taken(&e) => None,
                Err(e) => Some(refused("write an object on condition that it is new", e)?),
                Ok(_) => Some((
                    State::Lies,
                    "an object was written on condition that its name is free, which it was not, and the store said that it did: it overwrites"
                        .to_owned(),
                )),
            },
        };
        let found = match found {
            Some(found) => found,
            None => {
                let mut found = None;
                for _ in 0..ROUNDS {
                    let name = self.name("race");
                    let path = self.store.path(&name);
                    let mut racers = JoinSet::new();
                    for i in 0..RACERS {
                        let (inner, path) = (self.store.inner.clone(), path.clone());
                        let text = PutPayload::from(format!("racer {i}"));
                        racers.spawn(async move {
                            let put = inner.put_opts(&path, text, create()).await;
                            (i, put.map(|_| ()))
                        });
                    }
                    if let Some(bad) = self.race(racers, &name).await? {
                        found = Some(bad);
                        break;
                    }
                }
                found.unwrap_or_else(|| {
                    (
                        State::Works,
                        format!("{ROUNDS} times, of {RACERS} that wrote one free name at once, exactly one did"),
                    )
                })
            }
        };
        self.note(Ability::ConditionalCreate, found);
        Ok(())
    }

    /// What is wrong with a race, if something is.
    async fn race(
        &mut self,
        mut racers: JoinSet<(usize, Result<(), E>)>,
        name: &str,
    ) -> Result<Option<Found>> {
        let (mut winners, mut refusals) = (Vec::new(), 0);
        while let Some(ended) = racers.join_next().await {
            match ended {
                Ok((i, Ok(()))) => winners.push(i),
                Ok((_, Err(e))) if is_taken(&e) => refusals += 1,
                Ok((_, Err(e))) => {
                    return refused("write at the same time as others", e).map(Some);
                }
                Err(_) => {}
            }
        }
        let content = match self.get(name).await? {
            Ok(bytes) => std::str::from_utf8(&bytes)
                .ok()
                .and_then(|t| t.strip_prefix("racer ")?.parse().ok()),
            Err((State::Lies, _)) => None,
            Err(found) => return Ok(Some(found)),
        };
        Ok(judge_race(&winners, refusals, content).err())
    }

    async fn update(&mut self) -> Result<()> {
        if self.store.local_root.is_some() {
            self.works(
                Ability::ConditionalUpdate,
                "a folder needs none: files are locked",
            );
            return Ok(());
        }
        let name = self.name("update");
        let path = self.store.path(&name);
        let inner = self.store.inner.clone();
        let what = "write an object on condition that it is unchanged";
        let put = |text: &'static str, version: UpdateVersion| {
            let options = PutOptions {
                mode: PutMode::Update(version),
                ..PutOptions::default()
            };
            inner.put_opts(&path, text.into(), options)
        };
        let found = 'found: {
            let first: UpdateVersion = match inner.put(&path, "first".into()).await {
                Ok(first) => first.into(),
                Err(e) => break 'found refused(what, e)?,
            };
            match put("second", first.clone()).await {
                Ok(_) => {}
                Err(e) if is_taken(&e) => {
                    break 'found (
                        State::Lies,
                        "an object was written on condition that it is as it is, and the store said that it is not"
                            .to_owned(),
                    );
                }
                Err(e) => break 'found refused(what, e)?,
            }
            match put("third", first).await {
                Err(e) if is_taken(&e) => {}
                Err(e) => break 'found refused(what, e)?,
                Ok(_) => {
                    break 'found (
                        State::Lies,
                        "an object was written on condition that it is as it was before it was changed, and the store said that it did: it overwrites"
                            .to_owned(),
                    );
                }
            }
            match self.get(&name).await? {
                Ok(got) if got == "second".as_bytes() => (
                    State::Works,
                    "who has not seen the last change is refused".to_owned(),
                ),
                Ok(_) => (State::Lies, "a change was refused, and is there".to_owned()),
                Err(found) => found,
            }
        };
        self.note(Ability::ConditionalUpdate, found);
        Ok(())
    }

    async fn copy(&mut self, taken: &str) -> Result<()> {
        let what = "copy an object on condition that the name is free";
        let inner = self.store.inner.clone();
        let create = || CopyOptions::new().with_mode(CopyMode::Create);
        let mut sources = Vec::new();
        let found = 'found: {
            for i in 0..RACERS {
                let name = self.name("source");
                let path = self.store.path(&name);
                let text = PutPayload::from(format!("racer {i}"));
                if let Err(e) = inner.put(&path, text).await {
                    break 'found refused(what, e)?;
                }
                sources.push(path);
            }
            let taken = self.store.path(taken);
            match inner.copy_opts(&sources[0], &taken, create()).await {
                Err(e) if is_taken(&e) => {}
                Err(e) => break 'found refused(what, e)?,
                Ok(()) => {
                    break 'found (
                        State::Lies,
                        "an object was copied on condition that the new name is free, which it was not, and the store said that it did: it overwrites"
                            .to_owned(),
                    );
                }
            }
            for _ in 0..ROUNDS {
                let name = self.name("copy");
                let path = self.store.path(&name);
                let mut racers = JoinSet::new();
                for (i, source) in sources.iter().enumerate() {
                    let (inner, source, path) = (inner.clone(), source.clone(), path.clone());
                    racers
                        .spawn(async move { (i, inner.copy_opts(&source, &path, create()).await) });
                }
                if let Some(bad) = self.race(racers, &name).await? {
                    break 'found bad;
                }
            }
            (
                State::Works,
                format!(
                    "{ROUNDS} times, of {RACERS} that copied to one free name at once, exactly one did"
                ),
            )
        };
        self.note(Ability::ConditionalCopy, found);
        Ok(())
    }

    async fn checksum(&mut self) -> Result<()> {
        let Some(direct) = self.store.direct.clone() else {
            let detail = "objects are sent to it without a checksum".to_owned();
            self.note(Ability::Checksum, (State::Absent, detail));
            return Ok(());
        };
        let name = self.name("checksum");
        let path = self.store.path(&name);
        let found = match direct.refuses_damage(&path).await? {
            false => (
                State::Lies,
                "an object was damaged on its way, and the store said that it wrote it".to_owned(),
            ),
            true => match self.store.inner.head(&path).await {
                Ok(_) => (
                    State::Lies,
                    "an object that was damaged on its way was refused, and is there".to_owned(),
                ),
                Err(E::NotFound { .. }) => {
                    let mode = PutMode::Overwrite;
                    match direct.put(&path, "whole".into(), "check", mode).await {
                        Ok(()) => (
                            State::Works,
                            "an object that was damaged on its way was refused".to_owned(),
                        ),
                        Err(e) => refused("write an object with its checksum", e)?,
                    }
                }
                Err(e) => refused("look at an object", e)?,
            },
        };
        self.note(Ability::Checksum, found);
        Ok(())
    }

    async fn tag(&mut self, name: &str) -> Result<()> {
        let tags = &self.store.tags;
        let found = if tags.can_tell() {
            let path = self.store.path(name);
            match tags.set(&self.store.inner, &path, true).await? {
                Told::Yes(()) => (State::Works, "a mark was set, and is there".to_owned()),
                Told::Gone => (State::Lies, "the object is not there".to_owned()),
                Told::Refused(e) => (State::Refused, e.to_string()),
                Told::Lied(e) => (State::Lies, e.to_string()),
            }
        } else {
            (State::Absent, "it has no tags".to_owned())
        };
        let told = match found.0 {
            State::Works => match self.store.inner.get(&self.store.path(name)).await {
                Err(e) => refused("read an object with a mark", e)?,
                Ok(_) if self.store.has_tags(name) => (
                    State::Works,
                    "an object with a mark was read, and the answer says that it has one"
                        .to_owned(),
                ),
                Ok(_) => (
                    State::Absent,
                    "an object with a mark was read, and the answer does not say that it has one"
                        .to_owned(),
                ),
            },
            _ => (State::Absent, "no mark could be set".to_owned()),
        };
        self.note(Ability::ExcludeTag, found);
        self.note(Ability::TagCount, told);
        Ok(())
    }

    async fn delete(&mut self, name: &str) -> Result<()> {
        let path = self.store.path(name);
        let found = match self.store.inner.delete(&path).await {
            Err(e) => refused("delete an object", e)?,
            Ok(()) => match self.store.inner.head(&path).await {
                Err(E::NotFound { .. }) => match self.size_listed(name).await {
                    Ok(None) => (State::Works, "what was deleted is gone".to_owned()),
                    Ok(Some(_)) => (
                        State::Lies,
                        "an object was deleted, and a listing right after it shows it".to_owned(),
                    ),
                    Err(e) => refused("list objects", e)?,
                },
                Err(e) => refused("look at an object", e)?,
                Ok(_) => (
                    State::Lies,
                    "an object was deleted, and is still there".to_owned(),
                ),
            },
        };
        self.note(Ability::Delete, found);
        Ok(())
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
