//! Tests what a store really does, by doing it: its documents and its responses are not believed.
//!
//! Writes a few small objects below the staging folder, lets several writers race for one name, and removes
//! everything again, whatever happens. Does not judge what the findings mean for a backup: `ops::store_check`
//! does, the caller.
//!
//! - `conditional`: writes and copies on a condition, and races
//! - `removal`: removes what was written

mod conditional;
mod removal;

use super::errors::refusal;
use super::exclude::TagFailure;
use super::staging::{STAGING, StagingName};
use super::{ObjectLock, Store, Versioning};
use crate::base::Cancel;
use crate::error::{Error, Reason, Result};
use bytes::Bytes;
use chrono::{DateTime, TimeDelta, Utc};
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{Error as E, MultipartUpload, ObjectStore, ObjectStoreExt, PutMode};
use schemars::JsonSchema;
use serde::Serialize;
use strum::VariantArray;

/// Size of the first part of the upload, in bytes: the smallest that S3 accepts, except for the last part.
const PART: usize = 5 << 20;
/// The largest difference between the store's clock and this machine's that is not reported.
const MAX_SKEW: TimeDelta = TimeDelta::seconds(30);

/// An ability that a store may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, JsonSchema, Serialize, VariantArray)]
pub enum Ability {
    /// Objects can be written.
    Put,
    /// An object reads back as it was written.
    ReadBack,
    /// A listing right after a write shows the object and its size.
    List,
    /// A deleted object is gone at once, also from the next listing.
    Delete,
    /// An upload in parts becomes one object; an aborted upload leaves none.
    Multipart,
    /// If several writers create one free name at once, exactly one succeeds.
    ConditionalCreate,
    /// An object can be replaced on condition that it has not changed.
    ConditionalUpdate,
    /// If several writers copy to one free name at once, exactly one succeeds.
    ConditionalCopy,
    /// An object that was damaged in transit is refused.
    Checksum,
    /// The largest object that one request copies.
    LargestCopy,
    /// A snapshot can be tagged as excluded, and the tag can be read.
    ExcludeTag,
    /// The response to a read says whether the object has tags.
    TagCount,
    /// The bucket keeps old versions of deleted objects.
    Versioning,
    /// The bucket can lock objects.
    ObjectLock,
    /// The store's clock agrees with this machine's.
    Clock,
}

impl Ability {
    /// All abilities, in the order of a report.
    pub const ALL: &[Ability] = Ability::VARIANTS;
}

/// Whether a store has an ability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, JsonSchema, Serialize)]
#[schemars(rename = "State")]
pub enum AbilityState {
    /// The store does it.
    Works,
    /// The store says that it does not do it, or not with these credentials.
    Refused,
    /// The store says that it does it, and does something else.
    Lies,
    /// The store has no such feature.
    Absent,
    /// Not tried, because something else does not work.
    NotTried,
}

/// The result of testing one ability.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The ability.
    pub ability: Ability,
    /// Whether the store has it.
    pub state: AbilityState,
    /// What was observed, for display.
    pub detail: String,
}

/// The result of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Findings {
    /// One finding for each of [`Ability::ALL`], in that order.
    pub all: Vec<Finding>,
    /// Objects and uploads of the probe that could not be removed, with the reason.
    pub left_behind: Vec<String>,
}

type StateAndDetail = (AbilityState, String);

/// Why a test ended without success.
enum Stop {
    /// The ability does not work.
    Found(StateAndDetail),
    /// The probe itself failed; a later one may succeed.
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(e: Error) -> Self {
        Stop::Failed(e)
    }
}

/// The result of a test: a description of what works, or why it ended.
type TestResult = Result<String, Stop>;

fn stop<T>(state: AbilityState, detail: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Found((state, detail.into())))
}

fn lies<T>(detail: impl Into<String>) -> Result<T, Stop> {
    stop(AbilityState::Lies, detail)
}

/// Returns a function that tells a refusal of the store from a failure of the probe. `action` is what was
/// tried.
fn refused(action: &str) -> impl Fn(E) -> Stop {
    move |e| match refusal(action, e) {
        Ok(refusal) => Stop::Found((AbilityState::Refused, refusal.to_string())),
        Err(e) => Stop::Failed(e),
    }
}

/// The state of a probe.
struct Prober {
    /// The store without the caller's cancellation: the objects are removed whatever happens.
    store: Store,
    /// The names of all objects that were written.
    names: Vec<StagingName>,
    multipart: Option<Box<dyn MultipartUpload>>,
    findings: Vec<Finding>,
    is_versioned: bool,
    /// Requests may still be under way at the server.
    was_cut_off: bool,
}

impl Store {
    /// Tests all abilities of the store. Writes about 6 MiB at most and removes it.
    ///
    /// # Errors
    /// Fails with `StoreUnreachable`, with `Terminated`, and with the errors of a listing, such as
    /// `PermissionDenied`, `Unauthenticated`, or `NoSnapshots` if the bucket does not exist.
    pub fn probe(&self) -> Result<Findings> {
        // List first: a wrong key or bucket fails here, with its own reason.
        self.list(&[STAGING])?;
        let mut prober = Prober {
            store: self.clone().with_cancel(Cancel::default()),
            names: Vec::new(),
            multipart: None,
            findings: Vec::new(),
            is_versioned: false,
            was_cut_off: false,
        };
        let may_write = prober.object_lock()?;
        prober.versioning()?;
        let result = match may_write {
            true => self.block_on(prober.test_all()),
            false => Ok(Ok(())),
        };
        prober.was_cut_off = !matches!(result, Ok(Ok(())));
        let left_behind = prober.clean_up();
        result??;
        let why_not = match may_write {
            true => "something that it needs does not work",
            false => "the bucket locks every new object: the probe could not remove what it writes",
        };
        let mut all = Vec::new();
        for &ability in Ability::ALL {
            let finding = prober.findings.iter().find(|f| f.ability == ability);
            all.push(finding.cloned().unwrap_or_else(|| Finding {
                ability,
                state: AbilityState::NotTried,
                detail: why_not.to_owned(),
            }));
        }
        Ok(Findings { all, left_behind })
    }
}

/// Compares the store's clock, in whole seconds, with the times before and after the write.
fn judge_clock(
    before: DateTime<Utc>,
    store: DateTime<Utc>,
    after: DateTime<Utc>,
) -> StateAndDetail {
    let early = before - TimeDelta::seconds(1) - store;
    let late = store - after;
    let off = early.max(late);
    if off <= MAX_SKEW {
        return (
            AbilityState::Works,
            "the store's clock and this machine's agree".to_owned(),
        );
    }
    let direction = if late > early { "ahead of" } else { "behind" };
    (
        AbilityState::Lies,
        format!(
            "the store's clock is {} s {direction} this machine's",
            off.num_seconds()
        ),
    )
}

impl Prober {
    fn add_finding(&mut self, ability: Ability, (state, detail): StateAndDetail) {
        self.findings.push(Finding {
            ability,
            state,
            detail,
        });
    }

    /// Records the result of a test. Returns whether the ability works.
    fn record(&mut self, ability: Ability, result: TestResult) -> Result<bool> {
        let found = match result {
            Ok(detail) => (AbilityState::Works, detail),
            Err(Stop::Found(found)) => found,
            Err(Stop::Failed(e)) => return Err(e),
        };
        let works = found.0 == AbilityState::Works;
        self.add_finding(ability, found);
        Ok(works)
    }

    /// Makes a new name in the staging folder. Returns it and its path in the store.
    fn name(&mut self, hint: &str) -> (String, Path) {
        let name = StagingName::new(&format!("check-{hint}"));
        let below = name.path.clone();
        self.names.push(name);
        let path = self.store.path(&below);
        (below, path)
    }

    /// Asks for the bucket's object lock. Returns whether objects may be written: with a default retention,
    /// they could not be removed.
    fn object_lock(&mut self) -> Result<bool> {
        let mut may_write = true;
        let (state, detail) = match self.store.object_lock() {
            Ok(ObjectLock::Enabled { default: None }) => (
                AbilityState::Works,
                "enabled; new objects are not locked by default".to_owned(),
            ),
            Ok(ObjectLock::Enabled {
                default: Some(rule),
            }) => {
                may_write = false;
                let detail = format!("enabled; every new object is locked at once ({rule})");
                (AbilityState::Works, detail)
            }
            Ok(ObjectLock::Disabled) => (
                AbilityState::Absent,
                "not enabled in this bucket".to_owned(),
            ),
            Ok(ObjectLock::Unsupported(why)) => (AbilityState::Absent, why),
            Err(e) if e.reason() == Reason::PermissionDenied => {
                (AbilityState::Refused, e.to_string())
            }
            Err(e) => return Err(e),
        };
        self.add_finding(Ability::ObjectLock, (state, detail));
        Ok(may_write)
    }

    fn versioning(&mut self) -> Result<()> {
        let versioning = self.store.versioning()?;
        let (state, detail) = match &versioning {
            Versioning::Off => (AbilityState::Absent, "off: a deleted object is gone"),
            Versioning::Enabled => (
                AbilityState::Works,
                "enabled: a deletion only hides an object",
            ),
            Versioning::Suspended => (
                AbilityState::Works,
                "suspended: older versions may still be there",
            ),
            Versioning::Unknown(why) => (AbilityState::Refused, &**why),
        };
        self.is_versioned = state != AbilityState::Absent;
        self.add_finding(Ability::Versioning, (state, detail.to_owned()));
        Ok(())
    }

    /// Runs all tests that write.
    async fn test_all(&mut self) -> Result<()> {
        let Some((name, clock)) = self.put_and_read().await? else {
            return Ok(());
        };
        let result = self.list(&name).await;
        self.record(Ability::List, result)?;
        let result = self.multipart().await;
        self.record(Ability::Multipart, result)?;
        let result = self.create().await;
        self.record(Ability::ConditionalCreate, result)?;
        let result = self.update().await;
        self.record(Ability::ConditionalUpdate, result)?;
        let result = self.copy(&name).await;
        self.record(Ability::ConditionalCopy, result)?;
        let result = self.checksum().await;
        self.record(Ability::Checksum, result)?;
        let result = self.set_exclude_tag(&name).await;
        let result = match self.record(Ability::ExcludeTag, result)? {
            true => self.tag_count(&name).await,
            false => stop(AbilityState::Absent, "no tag could be set"),
        };
        self.record(Ability::TagCount, result)?;
        // Delete last: the other tests use the object.
        let result = self.delete(&name).await;
        self.record(Ability::Delete, result)?;
        if let Some(found) = clock {
            self.add_finding(Ability::Clock, found);
        }
        let detail = match (self.store.largest_copy, self.store.largest_range) {
            (Some(most), _) => {
                format!(
                    "up to {} GiB by the store's documents; not tried",
                    most >> 30
                )
            }
            (None, Some(most)) => format!(
                "up to {} GiB by one request, more by ranges, by the store's documents; not tried",
                most >> 30
            ),
            (None, None) => "no limit is known; not tried".to_owned(),
        };
        self.add_finding(Ability::LargestCopy, (AbilityState::Works, detail));
        Ok(())
    }

    /// Writes and reads the first object, which other tests use. Returns its name and a finding about the
    /// store's clock, or `None` if nothing can be written and read.
    async fn put_and_read(&mut self) -> Result<Option<(String, Option<StateAndDetail>)>> {
        let (name, path) = self.name("put");
        let content = Bytes::from(format!("deltafold checks this store: {name}"));
        let before = Utc::now();
        let put = self.store.inner.put(&path, content.clone().into()).await;
        let after = Utc::now();
        let put = put.map_err(refused("write an object"));
        let put = put.map(|_| "an object was written".to_owned());
        if !self.record(Ability::Put, put)? {
            return Ok(None);
        }
        let read = match self.get(&path).await {
            Ok(bytes) if bytes == content => {
                Ok("an object reads back as it was written".to_owned())
            }
            Ok(bytes) => lies(format!(
                "{} bytes were written, and {} different ones were read back",
                content.len(),
                bytes.len()
            )),
            Err(stop) => Err(stop),
        };
        if !self.record(Ability::ReadBack, read)? {
            return Ok(None);
        }
        let meta = self.store.inner.head(&path).await.ok();
        let clock = meta.map(|meta| judge_clock(before, meta.last_modified, after));
        Ok(Some((name, clock)))
    }

    async fn get(&self, path: &Path) -> Result<Bytes, Stop> {
        let read = async { self.store.inner.get(path).await?.bytes().await };
        match read.await {
            Err(E::NotFound { .. }) => lies("an object was written, and is not there"),
            read => read.map_err(refused("read an object")),
        }
    }

    async fn exists(&self, path: &Path) -> Result<bool, Stop> {
        match self.store.inner.head(path).await {
            Ok(_) => Ok(true),
            Err(E::NotFound { .. }) => Ok(false),
            Err(e) => Err(refused("read an object's headers")(e)),
        }
    }

    /// Returns the size of an object in a listing, or `None` if it is not listed.
    async fn listed_size(&self, name: &str) -> Result<Option<u64>, Stop> {
        let folder = self.store.path(STAGING);
        let path = self.store.path(name);
        let mut listing = self.store.inner.list(Some(&folder));
        let failed = refused("list objects");
        while let Some(object) = listing.try_next().await.map_err(&failed)? {
            if object.location == path {
                return Ok(Some(object.size));
            }
        }
        Ok(None)
    }

    async fn list(&mut self, first: &str) -> TestResult {
        // `first` was there before the listing. The other object is written just before it.
        let (name, path) = self.name("list");
        let content = "listed";
        let put = self.store.inner.put(&path, content.into()).await;
        put.map_err(refused("write an object"))?;
        let sizes = (
            self.listed_size(&name).await?,
            self.listed_size(first).await?,
        );
        match sizes {
            (None, _) | (_, None) => {
                lies("an object was written, and a listing right after it does not show it")
            }
            (Some(bytes), _) if bytes != content.len() as u64 => lies(format!(
                "an object of {} bytes is listed with {bytes}",
                content.len()
            )),
            _ => Ok("a new object is listed at once".to_owned()),
        }
    }

    async fn multipart(&mut self) -> TestResult {
        let (_, path) = self.name("multipart");
        // Vary the bytes, so that swapped parts show.
        let mut content: Vec<u8> = (0..PART + 100).map(|i| (i / 7 + i / 4096) as u8).collect();
        content[PART] ^= 0x55;
        let content = Bytes::from(content);
        let parts = [content.slice(..PART), content.slice(PART..)];
        let uploaded = self.upload(&path, &parts, true).await;
        uploaded.map_err(refused("upload an object in parts"))?;
        let read = self.get(&path).await?;
        if read != content {
            return lies(format!(
                "an object of {} bytes was uploaded in parts, and {} different ones were read back",
                content.len(),
                read.len()
            ));
        }
        // An aborted upload must leave no object.
        let (_, path) = self.name("abort");
        let aborted = self.upload(&path, &[content.slice(..100)], false).await;
        aborted.map_err(refused("abort an upload in parts"))?;
        match self.exists(&path).await? {
            false => Ok("one upload in parts became an object, an aborted one did not".to_owned()),
            true => lies("an upload was aborted, and its object is there"),
        }
    }

    /// Uploads an object in parts, then completes or aborts the upload.
    async fn upload(&mut self, path: &Path, parts: &[Bytes], complete: bool) -> Result<(), E> {
        let upload = self.store.inner.put_multipart(path).await?;
        // Keep the upload where the removal finds it if the probe ends here.
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

    async fn checksum(&mut self) -> TestResult {
        let Some(direct) = self.store.direct.clone() else {
            let detail = "objects are sent to this store without a checksum";
            return stop(AbilityState::Absent, detail);
        };
        let (_, path) = self.name("checksum");
        if !direct.refuses_damage(&path).await? {
            return lies("an object was damaged in transit, and the store accepted it");
        }
        if self.exists(&path).await? {
            return lies("an object that was damaged in transit was refused, and is there");
        }
        let put = direct.put(&path, "whole".into(), "check", PutMode::Overwrite);
        let put = put
            .await
            .map_err(refused("write an object with its checksum"));
        put.map(|()| "an object that was damaged in transit was refused".to_owned())
    }

    async fn set_exclude_tag(&self, name: &str) -> TestResult {
        let (store, tags) = (&self.store, &self.store.tags);
        if !tags.can_tell() {
            return stop(AbilityState::Absent, "this store has no tags");
        }
        match tags.set(&store.inner, &store.path(name), true).await {
            Ok(()) => Ok("a tag was set, and can be read".to_owned()),
            Err(TagFailure::Gone) => lies("an object was written, and is not there"),
            Err(TagFailure::Refused(e)) => stop(AbilityState::Refused, e.to_string()),
            Err(TagFailure::Lied(e)) => lies(e.to_string()),
            Err(TagFailure::Failed(e)) => Err(Stop::Failed(e)),
        }
    }

    async fn tag_count(&self, name: &str) -> TestResult {
        let read = self.store.inner.get(&self.store.path(name)).await;
        read.map_err(refused("read an object with a tag"))?;
        match self.store.has_tags(name) {
            true => Ok("the response to a read says that the object has tags".to_owned()),
            false => stop(
                AbilityState::Absent,
                "the response to a read does not say that the object has tags",
            ),
        }
    }

    async fn delete(&mut self, name: &str) -> TestResult {
        let path = self.store.path(name);
        let deleted = self.store.inner.delete(&path).await;
        deleted.map_err(refused("delete an object"))?;
        if self.exists(&path).await? {
            return lies("an object was deleted, and is still there");
        }
        match self.listed_size(name).await? {
            None => Ok("a deleted object is gone at once".to_owned()),
            Some(_) => lies("an object was deleted, and a listing right after it shows it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_may_be_off_by_its_rounding() {
        let t = |s: i64| DateTime::from_timestamp(1_763_700_000 + s, 0).unwrap();
        let state = |store: i64| judge_clock(t(0), t(store), t(2));
        assert_eq!(state(0).0, AbilityState::Works);
        assert_eq!(state(-20).0, AbilityState::Works);
        assert_eq!(state(32).0, AbilityState::Works);
        let (bad, detail) = state(3602);
        assert_eq!(bad, AbilityState::Lies);
        assert_eq!(
            detail,
            "the store's clock is 3600 s ahead of this machine's"
        );
        let (bad, detail) = state(-3601);
        assert_eq!(bad, AbilityState::Lies);
        assert_eq!(detail, "the store's clock is 3600 s behind this machine's");
    }
}
