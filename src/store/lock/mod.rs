//! A lock that expires: its holder renews it, and whoever waits takes it over from a dead one.
//!
//! It knows when a lock may be taken and when it is lost; where its record is kept, a [`LockStore`] knows.
//! Jobs that must not run twice at once call it.

mod object;

pub use object::LOCKS;

use crate::base::Cancel;
use crate::base::random::random_word;
use crate::base::{lock, unpoisoned};
use crate::error::{Error, Reason, Result};
use async_trait::async_trait;
use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// A lock is renewed so many times while it lasts.
const RENEWALS: u32 = 3;
/// After a renewal that failed the next comes so many times sooner.
const SOONER: u32 = 4;
/// No lock is held for longer without being renewed, so nobody waits longer for a dead holder.
pub const LONGEST: Duration = Duration::from_secs(3600);
/// How long a lock is held at least whose record cannot be understood, or does not say.
const UNKNOWN_LASTS: Duration = Duration::from_secs(60);
/// To give a lock back.
const RELEASE_PATIENCE: Duration = Duration::from_secs(5);

/// Who holds a lock: as Kubernetes' Leases have it, and a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// Who it is, for people; empty where nobody is.
    pub holder_identity: String,
    /// When it was taken, by the holder's clock: for people.
    pub acquire_time: DateTime<Utc>,
    /// When it was renewed, by the holder's clock: for people, and another one each time.
    pub renew_time: DateTime<Utc>,
    /// Others may take it over when it was not renewed for so long by their own clocks.
    pub lease_duration_seconds: u32,
    /// How often it went to another holder.
    #[serde(default)]
    pub lease_transitions: u32,
    /// Tells holders of one identity apart.
    pub token: String,
}

impl Record {
    /// A record that cannot be understood: somebody's, who may be alive as long as it changes.
    pub(crate) fn unknown(text: &str) -> Self {
        Record {
            holder_identity: "somebody unknown (its record cannot be understood)".to_owned(),
            acquire_time: DateTime::UNIX_EPOCH,
            renew_time: DateTime::UNIX_EPOCH,
            lease_duration_seconds: UNKNOWN_LASTS.as_secs() as u32,
            lease_transitions: 0,
            token: text.to_owned(),
        }
    }

    fn is_released(&self) -> bool {
        self.holder_identity.is_empty()
    }

    fn lasts(&self) -> Duration {
        match self.lease_duration_seconds {
            // A Lease need not say.
            0 => UNKNOWN_LASTS,
            seconds => Duration::from_secs(seconds.into()).min(LONGEST),
        }
    }

    /// The record of one who gives the lock back.
    fn released(&self, wall: DateTime<Utc>) -> Record {
        Record {
            holder_identity: String::new(),
            token: String::new(),
            renew_time: after(wall, self.renew_time),
            // Kubernetes takes no 0.
            lease_duration_seconds: 1,
            ..self.clone()
        }
    }
}

/// This time, or the next that differs from an earlier one, whatever the clock does.
fn after(wall: DateTime<Utc>, earlier: DateTime<Utc>) -> DateTime<Utc> {
    let next = earlier.checked_add_signed(TimeDelta::microseconds(1));
    next.map_or(wall, |next| wall.max(next)).trunc_subsecs(6)
}

/// Which version of a record was read, so that no other is replaced: the object's ETag or content, or its version,
/// generation or resourceVersion.
pub use object_store::UpdateVersion as Version;

/// What became of a conditional write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// It is written.
    Done,
    /// The record was not as the condition says.
    Refused,
}

/// Keeps the record of one lock.
#[async_trait]
pub trait LockStore: Send + Sync {
    /// The lock's name, for people.
    fn name(&self) -> String;
    /// The record, if there is one.
    async fn read(&self) -> Result<Option<(Record, Version)>>;
    /// Writes the record where there is none.
    async fn create(&self, record: &Record) -> Result<Written>;
    /// Replaces this version of the record and no other.
    async fn update(&self, record: &Record, version: &Version) -> Result<Written>;
    /// Why a request that was not answered in time failed.
    fn unanswered(&self) -> Reason;
}

/// A clock that only goes forward, and one for people.
trait Clock: Send + Sync {
    /// Since some moment.
    fn now(&self) -> Duration;
    fn wall(&self) -> DateTime<Utc>;
}

struct SystemClock(Instant);

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
    fn wall(&self) -> DateTime<Utc> {
        Utc::now()
    }
}

/// One that wants the lock or has it.
#[derive(Debug, Clone)]
struct Who {
    identity: String,
    token: String,
    duration: Duration,
}

impl Who {
    fn new(identity: &str, duration: Duration) -> Self {
        // In whole seconds, as the record has it.
        let seconds = duration.min(LONGEST).as_secs_f64().ceil().max(1.0);
        Who {
            identity: identity.to_owned(),
            token: format!("{:016x}", random_word()),
            duration: Duration::from_secs_f64(seconds),
        }
    }

    fn owns(&self, record: &Record) -> bool {
        record.holder_identity == self.identity && record.token == self.token
    }

    /// What it writes in place of `before`.
    fn record(&self, before: Option<&Record>, wall: DateTime<Utc>) -> Record {
        let own = before.filter(|b| self.owns(b));
        let others = before.map_or(0, |b| b.lease_transitions);
        Record {
            holder_identity: self.identity.clone(),
            acquire_time: own.map_or(wall.trunc_subsecs(6), |b| b.acquire_time),
            renew_time: own.map_or(wall.trunc_subsecs(6), |b| after(wall, b.renew_time)),
            lease_duration_seconds: self.duration.as_secs() as u32,
            lease_transitions: match (own, before) {
                (None, Some(_)) => others.saturating_add(1),
                _ => others,
            },
            token: self.token.clone(),
        }
    }
}

/// What one that waits has seen of others, and when by its own clock.
#[derive(Debug, Default)]
struct Watched(Option<(Record, Duration)>);

impl Watched {
    /// Who has the lock by the record as it was read at `now`, or before. `None` where it can be taken: nobody has it,
    /// or it was not renewed for as long as it lasts.
    fn look(&mut self, record: Option<&Record>, who: &Who, now: Duration) -> Option<Holder> {
        let Some(record) = record.filter(|r| !r.is_released()) else {
            self.0 = None;
            return None;
        };
        // An earlier attempt, whose answer was lost.
        if who.owns(record) {
            return None;
        }
        let (renewed, unchanged) = match &self.0 {
            Some((seen, since)) if seen == record => (false, now.saturating_sub(*since)),
            before => {
                let renewed = before.is_some();
                self.0 = Some((record.clone(), now));
                (renewed, Duration::ZERO)
            }
        };
        (unchanged < record.lasts()).then(|| Holder {
            identity: record.holder_identity.clone(),
            since: record.acquire_time,
            renewed,
            unchanged,
        })
    }
}

/// What an attempt came to.
#[derive(Debug)]
enum Attempted {
    /// It is ours, from this moment on.
    Acquired(Duration),
    HeldBy(Holder),
}

/// What a renewal came to.
#[derive(Debug)]
enum Renewed {
    /// It is ours, from this moment on.
    At(Duration),
    /// It is another's.
    Lost(String),
}

async fn attempt(
    store: &dyn LockStore,
    who: &Who,
    watched: &mut Watched,
    clock: &dyn Clock,
) -> Result<Attempted> {
    let seen = store.read().await?;
    let before = seen.as_ref().map(|(record, _)| record);
    if let Some(holder) = watched.look(before, who, clock.now()) {
        return Ok(Attempted::HeldBy(holder));
    }
    // It lasts from before it is written: nobody can have seen it earlier.
    let began = clock.now();
    let record = who.record(before, clock.wall());
    let written = match &seen {
        None => store.create(&record).await,
        Some((_, version)) => store.update(&record, version).await,
    };
    // A store may take the condition and ignore it, and an answer may be lost: what is there counts.
    match (written, store.read().await?) {
        (_, Some((now, _))) if now == record => Ok(Attempted::Acquired(began)),
        (Err(e), _) => Err(e),
        (Ok(_), other) => {
            let other = other.as_ref().map(|(record, _)| record);
            let holder = watched.look(other, who, clock.now());
            // Somebody was faster, and may have gone again.
            Ok(Attempted::HeldBy(holder.unwrap_or_else(|| Holder {
                identity: "somebody who just gave it free".to_owned(),
                since: clock.wall(),
                renewed: false,
                unchanged: Duration::ZERO,
            })))
        }
    }
}

async fn renewal(store: &dyn LockStore, who: &Who, clock: &dyn Clock) -> Result<Renewed> {
    /// An own renewal of earlier, whose answer was lost, may come between.
    const TRIES: u32 = 3;
    for _ in 0..TRIES {
        let (before, version) = match store.read().await? {
            Some((record, version)) if who.owns(&record) => (record, version),
            Some((other, _)) => {
                return Ok(Renewed::Lost(match other.is_released() {
                    true => "it was given free".to_owned(),
                    false => format!("{} has it now", other.holder_identity),
                }));
            }
            None => return Ok(Renewed::Lost("its record is gone".to_owned())),
        };
        let began = clock.now();
        let record = who.record(Some(&before), clock.wall());
        if store.update(&record, &version).await? == Written::Done {
            return Ok(Renewed::At(began));
        }
    }
    Err(Reason::Conflict.error(format!("the lock {} changes all the time", store.name())))
}

/// Gives the lock back, if it still is one's own.
async fn give_back(store: &dyn LockStore, who: &Who, clock: &dyn Clock) -> Result<()> {
    if let Some((record, version)) = store.read().await?
        && who.owns(&record)
    {
        store
            .update(&record.released(clock.wall()), &version)
            .await?;
    }
    Ok(())
}

/// Who has a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Its identity.
    pub identity: String,
    /// Since when, by its own clock.
    pub since: DateTime<Utc>,
    /// It was seen to renew, or to take over, since it was first looked at.
    pub renewed: bool,
    /// It was not seen to renew for so long.
    pub unchanged: Duration,
}

/// What one try came to.
pub enum Attempt {
    /// The lock.
    Acquired(LockGuard),
    /// Somebody else has it.
    HeldBy(Holder),
}

/// How long to wait for a lock that somebody else has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Until it is free.
    Forever,
    /// Until its holder is seen to be alive, or is known to be dead.
    UntilSeenDead,
}

/// A lock that one wants. Its calls block: not for async threads.
pub struct Lock {
    store: Arc<dyn LockStore>,
    who: Who,
    watched: Watched,
    clock: Arc<dyn Clock>,
    handle: Handle,
    cancel: Cancel,
}

impl Lock {
    /// The lock that `store` keeps. Its holder counts as dead when it was not renewed for `duration`, which is rounded up
    /// to whole seconds, an hour at most.
    pub fn on(
        store: Arc<dyn LockStore>,
        identity: &str,
        duration: Duration,
        handle: Handle,
        cancel: Cancel,
    ) -> Self {
        Lock {
            store,
            who: Who::new(identity, duration),
            watched: Watched::default(),
            clock: Arc::new(SystemClock(Instant::now())),
            handle,
            cancel,
        }
    }

    /// The lock's name, for people.
    pub fn name(&self) -> String {
        self.store.name()
    }

    /// Tries once. Where somebody else has it, only further tries show whether that one is alive.
    ///
    /// # Errors
    /// Those of where it is kept; `Configuration` where that cannot write on a condition; `Terminated`.
    pub fn try_acquire(&mut self) -> Result<Attempt> {
        let (store, clock) = (&*self.store, &*self.clock);
        let attempted = attempt(store, &self.who, &mut self.watched, clock);
        let patience = patience(self.who.duration);
        match ask(&self.handle, &self.cancel, store, patience, attempted)? {
            Attempted::Acquired(since) => {
                // Who takes it again is another.
                let next = Who::new(&self.who.identity, self.who.duration);
                let who = std::mem::replace(&mut self.who, next);
                self.watched = Watched::default();
                tracing::info!(lock = self.name(), "took the lock");
                LockGuard::new(self, who, since).map(Attempt::Acquired)
            }
            Attempted::HeldBy(holder) => Ok(Attempt::HeldBy(holder)),
        }
    }

    /// Waits for the lock, at most as `wait` says.
    ///
    /// # Errors
    /// `LockHeld` where its holder is alive and `wait` does not wait for that one; `Terminated`; those of
    /// where it is kept, if the first look fails or no retry can help.
    pub fn acquire(&mut self, wait: Wait) -> Result<LockGuard> {
        let pause =
            (self.who.duration / 6).clamp(Duration::from_millis(50), Duration::from_secs(2));
        let mut looked = false;
        loop {
            match self.try_acquire() {
                Ok(Attempt::Acquired(held)) => return Ok(held),
                Ok(Attempt::HeldBy(holder)) => {
                    if wait == Wait::UntilSeenDead && holder.renewed {
                        return Err(Reason::LockHeld.error(format!(
                            "{} has the lock {} since {} and is alive: nothing is wrong, run again later",
                            holder.identity,
                            self.name(),
                            holder.since.format("%Y-%m-%dT%H:%M:%SZ"),
                        )));
                    }
                    if !looked {
                        tracing::info!(
                            lock = self.name(),
                            holder = holder.identity,
                            "waits for the lock"
                        );
                    }
                }
                // Whoever waits has time.
                Err(e) if looked && wait == Wait::Forever && e.reason().is_retryable() => {
                    tracing::warn!(lock = self.name(), "cannot look at the lock: {e}");
                }
                Err(e) => return Err(e),
            }
            looked = true;
            self.handle
                .block_on(self.cancel.or(async { tokio::time::sleep(pause).await }))?;
        }
    }
}

/// For all requests of one try: several fit into the time that a lock lasts.
fn patience(duration: Duration) -> Duration {
    (duration / RENEWALS).clamp(Duration::from_secs(2), Duration::from_secs(15))
}

fn ask<T>(
    handle: &Handle,
    cancel: &Cancel,
    store: &dyn LockStore,
    patience: Duration,
    what: impl Future<Output = Result<T>>,
) -> Result<T> {
    let answered = async { tokio::time::timeout(patience, what).await };
    match handle.block_on(cancel.or(answered))? {
        Ok(answer) => answer,
        Err(_) => Err(store.unanswered().error(format!(
            "the lock {}: no answer within {} s",
            store.name(),
            patience.as_secs_f64()
        ))),
    }
}

/// A lock that one has, renewed on a thread of its own; dropping it gives it back.
///
/// The thread goes on through outages: where the record still is its own after one, nobody else had the
/// lock meanwhile.
pub struct LockGuard {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    store: Arc<dyn LockStore>,
    who: Who,
    clock: Arc<dyn Clock>,
    handle: Handle,
    /// Ends the thread's waits.
    stop: Cancel,
    state: Mutex<State>,
    stopped: Condvar,
}

struct State {
    /// It lasts from here.
    since: Duration,
    /// Why it is ours no more.
    lost: Option<String>,
    stop: bool,
}

impl LockGuard {
    fn new(lock: &Lock, who: Who, since: Duration) -> Result<Self> {
        let shared = Arc::new(Shared {
            store: lock.store.clone(),
            who,
            clock: lock.clock.clone(),
            handle: lock.handle.clone(),
            stop: Cancel::default(),
            state: Mutex::new(State {
                since,
                lost: None,
                stop: false,
            }),
            stopped: Condvar::new(),
        });
        // From here on dropping it gives it back.
        let mut held = LockGuard {
            shared: shared.clone(),
            thread: None,
        };
        let thread = std::thread::Builder::new()
            .name("lock".to_owned())
            .spawn(move || shared.keep_renewing())
            .map_err(|e| Error::io("start a thread", e))?;
        held.thread = Some(thread);
        Ok(held)
    }

    /// The lock's name, for people.
    pub fn name(&self) -> String {
        self.shared.store.name()
    }

    /// Whether nobody else can have it, by one's own clock. After an outage it can be so again.
    pub fn is_held(&self) -> bool {
        self.shared.is_held()
    }

    /// [`is_held`](Self::is_held), for whoever outlives this; no longer so once it was given back.
    pub fn watch(&self) -> Box<dyn Fn() -> bool + Send + Sync> {
        let shared = self.shared.clone();
        Box::new(move || shared.is_held())
    }

    /// Whether somebody else has taken it, or may have: it does not come back.
    pub fn is_lost(&self) -> bool {
        self.shared.state().lost.is_some()
    }

    /// Fails where [`is_held`](Self::is_held) is not so, and says why.
    ///
    /// # Errors
    /// `LockHeld`.
    pub fn check(&self) -> Result<()> {
        if self.is_held() {
            return Ok(());
        }
        let late = "it could not be renewed in time, so another run may have it";
        let state = self.shared.state();
        Err(self.shared.lost(state.lost.as_deref().unwrap_or(late)))
    }

    /// Renews it now.
    ///
    /// # Errors
    /// `LockHeld` where it was lost; those of where it is kept.
    pub fn renew(&self) -> Result<()> {
        self.shared.renew()
    }

    /// Gives it back, so that others need not wait.
    ///
    /// # Errors
    /// Those of where it is kept; others then have to wait until it has expired.
    pub fn release(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.shared.state().stop, true) {
            return Ok(());
        }
        self.shared.stopped.notify_all();
        self.shared.stop.cancel();
        // A thread that panicked has renewed nothing since.
        let _ = self.thread.take().map(JoinHandle::join);
        if self.shared.state().lost.is_some() {
            return Ok(());
        }
        // Whatever ended the run: this is to clean up.
        let s = &self.shared;
        let given = give_back(&*s.store, &s.who, s.clock.as_ref());
        let never = Cancel::default();
        ask(&s.handle, &never, &*s.store, RELEASE_PATIENCE, given)
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        if let Err(e) = self.end() {
            tracing::warn!(
                lock = self.name(),
                "the lock could not be given back, others wait until it expires: {e}"
            );
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn is_held(&self) -> bool {
        let state = self.state();
        let end = state.since + self.who.duration;
        state.lost.is_none() && !state.stop && self.clock.now() < end
    }

    fn lost(&self, why: &str) -> Error {
        Reason::LockHeld.error(format!("the lock {} was lost: {why}", self.store.name()))
    }

    fn renew(&self) -> Result<()> {
        let renewal = renewal(&*self.store, &self.who, self.clock.as_ref());
        let patience = patience(self.who.duration);
        match ask(&self.handle, &self.stop, &*self.store, patience, renewal)? {
            Renewed::At(since) => {
                let mut state = self.state();
                state.since = state.since.max(since);
                Ok(())
            }
            Renewed::Lost(why) => {
                let lost = self.lost(&why);
                self.state().lost = Some(why);
                Err(lost)
            }
        }
    }

    fn keep_renewing(&self) {
        let usual = self.who.duration / RENEWALS;
        let mut pause = usual;
        loop {
            let state = self.state();
            let waited = unpoisoned(self.stopped.wait_timeout_while(state, pause, |s| !s.stop));
            let (stop, lost) = (waited.0.stop, waited.0.lost.is_some());
            drop(waited);
            if stop || lost {
                return;
            }
            pause = match self.renew() {
                Ok(()) => usual,
                Err(e) if e.reason() == Reason::LockHeld => {
                    tracing::error!("{e}");
                    return;
                }
                Err(e) => {
                    if !self.stop.is_cancelled() {
                        tracing::warn!(lock = self.store.name(), "cannot renew the lock: {e}");
                    }
                    usual / SOONER
                }
            };
        }
    }
}

/// A name for this process as a holder: of its Pod or machine, and its process ID.
pub fn identity() -> String {
    let pod = std::env::var("POD_NAME").or_else(|_| std::env::var("HOSTNAME"));
    let host = pod.ok().filter(|h| !h.is_empty()).or_else(|| {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
        Some(name.trim().to_owned())
    });
    format!(
        "{}.{}",
        host.unwrap_or_else(|| "unknown".to_owned()),
        std::process::id()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use futures::future::LocalBoxFuture;
    use std::cell::RefCell;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::task::{Context, Poll, Waker};

    /// A clock that a test turns, and a wall clock that is wrong.
    #[derive(Clone, Default)]
    struct FakeClock {
        millis: Arc<AtomicU64>,
        wrong_by: i64,
    }

    impl FakeClock {
        fn turn(&self, millis: u64) {
            self.millis.fetch_add(millis, Ordering::Relaxed);
        }
    }

    impl Clock for FakeClock {
        fn now(&self) -> Duration {
            Duration::from_millis(self.millis.load(Ordering::Relaxed))
        }
        fn wall(&self) -> DateTime<Utc> {
            let millis = self.millis.load(Ordering::Relaxed) as i64;
            DateTime::from_timestamp_millis(1_790_000_000_000 + millis + self.wrong_by).unwrap()
        }
    }

    async fn pass() {
        let mut passed = false;
        std::future::poll_fn(|_| match std::mem::replace(&mut passed, true) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        })
        .await;
    }

    /// A store in which everything takes its time, and some of it goes wrong.
    struct FakeStore(Mutex<Fake>);

    struct Fake {
        record: Option<(Record, u64)>,
        writes: u64,
        rng: fastrand::Rng,
        /// So many of 100 requests fail.
        fails: u8,
        ignores_conditions: bool,
        /// Writes whose sender has given them up; they come yet.
        late: Vec<(Option<u64>, Record)>,
    }

    impl Fake {
        fn write(&mut self, condition: Option<u64>, record: &Record) -> Written {
            let there = self.record.as_ref().map(|(_, version)| *version);
            if there != condition && !self.ignores_conditions {
                return Written::Refused;
            }
            self.writes += 1;
            self.record = Some((record.clone(), self.writes));
            Written::Done
        }
    }

    impl FakeStore {
        fn new(seed: u64, fails: u8) -> Self {
            FakeStore(Mutex::new(Fake {
                record: None,
                writes: 0,
                rng: fastrand::Rng::with_seed(seed),
                fails,
                ignores_conditions: false,
                late: Vec::new(),
            }))
        }

        fn fake(&self) -> MutexGuard<'_, Fake> {
            self.0.lock().unwrap()
        }

        async fn takes_its_time(&self) {
            let turns = self.fake().rng.u8(..4);
            for _ in 0..turns {
                pass().await;
            }
        }

        fn fails(&self) -> Result<()> {
            let mut fake = self.fake();
            match fake.rng.u8(..100) < fake.fails {
                true => Err(Reason::StoreUnreachable.error("it fails")),
                false => Ok(()),
            }
        }

        async fn put(&self, condition: Option<u64>, record: &Record) -> Result<Written> {
            self.takes_its_time().await;
            if let Err(e) = self.fails() {
                let mut fake = self.fake();
                if fake.rng.bool() {
                    fake.late.push((condition, record.clone()));
                }
                return Err(e);
            }
            let written = self.fake().write(condition, record);
            self.takes_its_time().await;
            // Only the answer is lost.
            self.fails()?;
            Ok(written)
        }
    }

    #[async_trait]
    impl LockStore for FakeStore {
        fn name(&self) -> String {
            "fake".to_owned()
        }
        async fn read(&self) -> Result<Option<(Record, Version)>> {
            self.takes_its_time().await;
            self.fails()?;
            let seen = self.fake().record.clone();
            self.takes_its_time().await;
            Ok(seen.map(|(record, version)| {
                let version = Version {
                    e_tag: None,
                    version: Some(version.to_string()),
                };
                (record, version)
            }))
        }
        async fn create(&self, record: &Record) -> Result<Written> {
            self.put(None, record).await
        }
        async fn update(&self, record: &Record, version: &Version) -> Result<Written> {
            let version = version.version.as_ref().map(|v| v.parse().unwrap());
            self.put(version, record).await
        }
        fn unanswered(&self) -> Reason {
            Reason::StoreUnreachable
        }
    }

    /// What the parties do, and who believes to have the lock: since when, for how long.
    struct World {
        store: FakeStore,
        clock: FakeClock,
        rng: RefCell<fastrand::Rng>,
        believes: RefCell<Vec<Option<(Duration, Duration)>>>,
        acquired: RefCell<Vec<u32>>,
    }

    impl World {
        async fn sleep(&self, at_most: Duration) {
            let millis = self.rng.borrow_mut().u64(..=at_most.as_millis() as u64);
            let until = self.clock.now() + Duration::from_millis(millis);
            while self.clock.now() < until {
                pass().await;
            }
        }

        /// Takes the lock, renews it, gives it back; stands still in between as if it were dead.
        async fn party(&self, n: usize) {
            let clock = FakeClock {
                wrong_by: self.rng.borrow_mut().i64(-4_000_000_000..4_000_000_000),
                ..self.clock.clone()
            };
            let duration = Duration::from_secs(self.rng.borrow_mut().u64(1..=3));
            loop {
                let who = Who::new(&format!("party {n}"), duration);
                let mut watched = Watched::default();
                let since = loop {
                    let tried = attempt(&self.store, &who, &mut watched, &clock).await;
                    if let Ok(Attempted::Acquired(since)) = tried {
                        break since;
                    }
                    self.sleep(duration).await;
                };
                self.acquired.borrow_mut()[n] += 1;
                self.believes.borrow_mut()[n] = Some((since, duration));
                let renewals = self.rng.borrow_mut().u8(..8);
                let mut lost = false;
                for _ in 0..renewals {
                    let paused = self.rng.borrow_mut().u8(..6) == 0;
                    self.sleep(if paused { duration * 6 } else { duration / 2 })
                        .await;
                    match renewal(&self.store, &who, &clock).await {
                        Ok(Renewed::At(since)) => {
                            self.believes.borrow_mut()[n] = Some((since, duration));
                        }
                        Ok(Renewed::Lost(_)) => {
                            lost = true;
                            break;
                        }
                        Err(_) => {}
                    }
                }
                let dies = self.rng.borrow_mut().u8(..4) == 0;
                if dies {
                    self.sleep(duration * 6).await;
                }
                self.believes.borrow_mut()[n] = None;
                if !dies && !lost {
                    let _ = give_back(&self.store, &who, &clock).await;
                }
            }
        }
    }

    /// Runs the parties against each other; gives the moments at which two believed to have the lock, and
    /// how often each has had it.
    fn run(seed: u64, fails: u8, ignores_conditions: bool) -> (usize, Vec<u32>) {
        let world = World {
            store: FakeStore::new(seed, fails),
            clock: FakeClock::default(),
            rng: RefCell::new(fastrand::Rng::with_seed(seed ^ 1)),
            believes: RefCell::new(vec![None; 4]),
            acquired: RefCell::new(vec![0; 4]),
        };
        world.store.fake().ignores_conditions = ignores_conditions;
        let mut parties: Vec<LocalBoxFuture<'_, ()>> =
            (0..4).map(|n| world.party(n).boxed_local()).collect();
        let mut rng = fastrand::Rng::with_seed(seed ^ 2);
        let mut both = 0;
        let mut context = Context::from_waker(Waker::noop());
        for _ in 0..20_000 {
            world.clock.turn(rng.u64(..60));
            assert!(
                parties[rng.usize(..4)]
                    .as_mut()
                    .poll(&mut context)
                    .is_pending()
            );
            let mut fake = world.store.fake();
            if !fake.late.is_empty() && rng.u8(..20) == 0 {
                let i = rng.usize(..fake.late.len());
                let (condition, record) = fake.late.swap_remove(i);
                fake.write(condition, &record);
            }
            drop(fake);
            let now = world.clock.now();
            let believes = world.believes.borrow();
            let holders = believes.iter().flatten();
            both += usize::from(holders.filter(|(since, d)| now < *since + *d).count() > 1);
        }
        drop(parties);
        (both, world.acquired.into_inner())
    }

    #[test]
    fn never_do_two_believe_to_have_it() {
        let seed = crate::seed();
        let mut acquired = 0;
        for n in 0..100 {
            let fails = [0, 5, 30][n as usize % 3];
            let (both, each) = run(seed.wrapping_add(n), fails, false);
            assert_eq!(both, 0, "seed {seed} + {n}: {each:?}");
            acquired += each.iter().sum::<u32>();
        }
        assert!(acquired > 1000, "it was had {acquired} times only");
    }

    /// The test above would see it.
    #[test]
    fn without_conditions_two_believe_it() {
        let seed = crate::seed();
        let both: usize = (0..20).map(|n| run(seed.wrapping_add(n), 5, true).0).sum();
        assert!(both > 0);
    }

    /// Waits for what does not wait.
    fn now<T>(what: impl Future<Output = T>) -> T {
        let mut what = std::pin::pin!(what);
        let mut context = Context::from_waker(Waker::noop());
        loop {
            if let Poll::Ready(done) = what.as_mut().poll(&mut context) {
                return done;
            }
        }
    }

    fn seconds(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    #[test]
    fn a_dead_holder_blocks_for_its_own_duration_whatever_the_clocks_say() {
        let store = FakeStore::new(1, 0);
        let clock = FakeClock::default();
        let dead = Who::new("dead", seconds(30));
        let one = now(attempt(&store, &dead, &mut Watched::default(), &clock));
        assert!(matches!(one, Ok(Attempted::Acquired(_))));
        // Years later, by its own clock.
        let mut late = clock.clone();
        late.wrong_by = 100_000_000_000;
        let next = Who::new("next", seconds(5));
        let mut watched = Watched::default();
        for looked in 0..30 {
            let tried = now(attempt(&store, &next, &mut watched, &late)).unwrap();
            let Attempted::HeldBy(holder) = tried else {
                panic!("after {looked} s: {tried:?}");
            };
            assert_eq!((holder.identity.as_str(), holder.renewed), ("dead", false));
            assert_eq!(holder.unchanged, seconds(looked));
            clock.turn(1000);
        }
        let tried = now(attempt(&store, &next, &mut watched, &late)).unwrap();
        assert!(matches!(tried, Attempted::Acquired(at) if at == seconds(30)));
        assert_eq!(store.fake().record.as_ref().unwrap().0.lease_transitions, 1);
        // The dead one was only slow.
        let renewed = now(renewal(&store, &dead, &clock)).unwrap();
        assert!(matches!(renewed, Renewed::Lost(why) if why.contains("next")));
    }

    #[test]
    fn a_holder_that_renews_is_seen_to_be_alive_though_its_clock_stands_still() {
        let store = FakeStore::new(1, 0);
        let stands = FakeClock::default();
        let clock = FakeClock::default();
        let holder = Who::new("holder", seconds(30));
        let one = now(attempt(&store, &holder, &mut Watched::default(), &stands));
        assert!(matches!(one, Ok(Attempted::Acquired(_))));
        let next = Who::new("next", seconds(30));
        let mut watched = Watched::default();
        for looked in 0..100 {
            let tried = now(attempt(&store, &next, &mut watched, &clock)).unwrap();
            assert!(matches!(tried, Attempted::HeldBy(h) if h.renewed == (looked > 0)));
            assert!(matches!(
                now(renewal(&store, &holder, &stands)),
                Ok(Renewed::At(_))
            ));
            clock.turn(29_000);
        }
        // It gives it back: nobody waits.
        now(give_back(&store, &holder, &stands)).unwrap();
        let tried = now(attempt(&store, &next, &mut watched, &clock)).unwrap();
        assert!(matches!(tried, Attempted::Acquired(_)));
        let renewed = now(renewal(&store, &holder, &stands)).unwrap();
        assert!(matches!(renewed, Renewed::Lost(_)));
        now(give_back(&store, &holder, &stands)).unwrap();
        assert!(matches!(
            now(renewal(&store, &next, &clock)),
            Ok(Renewed::At(_))
        ));
    }

    #[test]
    fn a_record_that_cannot_be_understood_counts_as_somebodys() {
        let (store, clock) = (FakeStore::new(1, 0), FakeClock::default());
        store.fake().write(None, &Record::unknown("?"));
        let who = Who::new("a", seconds(1));
        let mut watched = Watched::default();
        for _ in 0..60 {
            let tried = now(attempt(&store, &who, &mut watched, &clock)).unwrap();
            assert!(matches!(tried, Attempted::HeldBy(_)));
            clock.turn(1000);
        }
        let tried = now(attempt(&store, &who, &mut watched, &clock)).unwrap();
        assert!(matches!(tried, Attempted::Acquired(_)));
        // An hour is the longest, whatever a record says.
        let mut eternal = Record::unknown("?");
        eternal.lease_duration_seconds = u32::MAX;
        assert_eq!(eternal.lasts(), LONGEST);
        eternal.lease_duration_seconds = 0;
        assert_eq!(eternal.lasts(), UNKNOWN_LASTS);
    }
}
