//! Tests of the lock's protocol: no two processes may believe at once that they hold a lock.

use super::protocol::*;
use super::record::*;
use super::*;
use async_trait::async_trait;
use chrono::{DateTime, Utc};
use futures::FutureExt;
use futures::future::LocalBoxFuture;
use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

/// A clock that a test advances, and a wall clock that is wrong by some milliseconds.
#[derive(Clone, Default)]
struct FakeClock {
    millis: Arc<AtomicU64>,
    wrong_by: i64,
}

impl FakeClock {
    fn advance(&self, millis: u64) {
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

/// Lets the other futures run once.
async fn yield_once() {
    let mut passed = false;
    std::future::poll_fn(|_| {
        if std::mem::replace(&mut passed, true) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
}

/// A store whose requests take several polls, and some of whose requests fail.
struct FakeStore(Mutex<FakeState>);

struct FakeState {
    record: Option<(LockRecord, u64)>,
    writes: u64,
    rng: fastrand::Rng,
    /// The percentage of requests that fail.
    failing_percent: u8,
    ignores_conditions: bool,
    /// Writes that failed for their sender and take effect later.
    late: Vec<(Option<u64>, LockRecord)>,
}

impl FakeState {
    fn write(&mut self, condition: Option<u64>, record: &LockRecord) -> ConditionalWrite {
        let current = self.record.as_ref().map(|(_, version)| *version);
        if current != condition && !self.ignores_conditions {
            return ConditionalWrite::Refused;
        }
        self.writes += 1;
        self.record = Some((record.clone(), self.writes));
        ConditionalWrite::Done
    }
}

impl FakeStore {
    fn new(seed: u64, failing_percent: u8) -> Self {
        FakeStore(Mutex::new(FakeState {
            record: None,
            writes: 0,
            rng: fastrand::Rng::with_seed(seed),
            failing_percent,
            ignores_conditions: false,
            late: Vec::new(),
        }))
    }

    fn state(&self) -> MutexGuard<'_, FakeState> {
        self.0.lock().unwrap()
    }

    async fn delay(&self) {
        let polls = self.state().rng.u8(..4);
        for _ in 0..polls {
            yield_once().await;
        }
    }

    fn maybe_fail(&self) -> Result<()> {
        let mut state = self.state();
        if state.rng.u8(..100) < state.failing_percent {
            Err(Reason::StoreUnreachable.error("the fake store fails"))
        } else {
            Ok(())
        }
    }

    async fn put(&self, condition: Option<u64>, record: &LockRecord) -> Result<ConditionalWrite> {
        self.delay().await;
        if let Err(e) = self.maybe_fail() {
            let mut state = self.state();
            if state.rng.bool() {
                state.late.push((condition, record.clone()));
            }
            return Err(e);
        }
        let written = self.state().write(condition, record);
        self.delay().await;
        // The write took effect; only the response is lost.
        self.maybe_fail()?;
        Ok(written)
    }
}

#[async_trait]
impl LockStore for FakeStore {
    fn name(&self) -> String {
        "fake".to_owned()
    }
    async fn read(&self) -> Result<Option<(LockRecord, RecordVersion)>> {
        self.delay().await;
        self.maybe_fail()?;
        let record = self.state().record.clone();
        self.delay().await;
        let Some((record, version)) = record else {
            return Ok(None);
        };
        let version = RecordVersion {
            e_tag: None,
            version: Some(version.to_string()),
        };
        Ok(Some((record, version)))
    }
    async fn create(&self, record: &LockRecord) -> Result<ConditionalWrite> {
        self.put(None, record).await
    }
    async fn update(
        &self,
        record: &LockRecord,
        version: &RecordVersion,
    ) -> Result<ConditionalWrite> {
        let version = version.version.as_ref().map(|v| v.parse().unwrap());
        self.put(version, record).await
    }
    fn unanswered(&self) -> Reason {
        Reason::StoreUnreachable
    }
}

/// Four processes that want one lock, and what each believes: since when it holds the lock, and for how
/// long.
struct Simulation {
    store: FakeStore,
    clock: FakeClock,
    rng: RefCell<fastrand::Rng>,
    believes: RefCell<Vec<Option<(Duration, Duration)>>>,
    acquired: RefCell<Vec<u32>>,
}

impl Simulation {
    async fn sleep(&self, at_most: Duration) {
        let millis = self.rng.borrow_mut().u64(..=at_most.as_millis() as u64);
        let until = self.clock.now() + Duration::from_millis(millis);
        while self.clock.now() < until {
            yield_once().await;
        }
    }

    /// Takes the lock, renews it and gives it back, in a loop. At times it stops in between, as if it
    /// were dead.
    async fn process(&self, n: usize) {
        let clock = FakeClock {
            wrong_by: self.rng.borrow_mut().i64(-4_000_000_000..4_000_000_000),
            ..self.clock.clone()
        };
        let duration = Duration::from_secs(self.rng.borrow_mut().u64(1..=3));
        loop {
            let claimant = Claimant::new(&format!("process {n}"), duration);
            let mut observer = HolderObserver::default();
            let since = loop {
                let acquisition = attempt(&self.store, &claimant, &mut observer, &clock).await;
                if let Ok(Acquisition::Since(since)) = acquisition {
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
                match renew(&self.store, &claimant, &clock).await {
                    Ok(Renewal::Since(since)) => {
                        self.believes.borrow_mut()[n] = Some((since, duration));
                    }
                    Ok(Renewal::Lost(_)) => {
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
                let _ = give_back(&self.store, &claimant, &clock).await;
            }
        }
    }
}

/// Runs four processes against each other. Returns the number of moments at which two of them believed to
/// hold the lock, and how often each has acquired it.
fn simulate(seed: u64, failing_percent: u8, ignores_conditions: bool) -> (usize, Vec<u32>) {
    let simulation = Simulation {
        store: FakeStore::new(seed, failing_percent),
        clock: FakeClock::default(),
        rng: RefCell::new(fastrand::Rng::with_seed(seed ^ 1)),
        believes: RefCell::new(vec![None; 4]),
        acquired: RefCell::new(vec![0; 4]),
    };
    simulation.store.state().ignores_conditions = ignores_conditions;
    let mut processes: Vec<LocalBoxFuture<'_, ()>> = (0..4)
        .map(|n| simulation.process(n).boxed_local())
        .collect();
    let mut rng = fastrand::Rng::with_seed(seed ^ 2);
    let mut overlaps = 0;
    let mut context = Context::from_waker(Waker::noop());
    for _ in 0..20_000 {
        simulation.clock.advance(rng.u64(..60));
        assert!(
            processes[rng.usize(..4)]
                .as_mut()
                .poll(&mut context)
                .is_pending()
        );
        let mut state = simulation.store.state();
        if !state.late.is_empty() && rng.u8(..20) == 0 {
            let i = rng.usize(..state.late.len());
            let (condition, record) = state.late.swap_remove(i);
            state.write(condition, &record);
        }
        drop(state);
        let now = simulation.clock.now();
        let believes = simulation.believes.borrow();
        let holders = believes.iter().flatten();
        overlaps += usize::from(holders.filter(|(since, d)| now < *since + *d).count() > 1);
    }
    drop(processes);
    (overlaps, simulation.acquired.into_inner())
}

#[test]
fn two_processes_never_believe_at_once_that_they_hold_the_lock() {
    let seed = crate::seed();
    let mut acquired = 0;
    for n in 0..100 {
        let failing_percent = [0, 5, 30][n as usize % 3];
        let (overlaps, each) = simulate(seed.wrapping_add(n), failing_percent, false);
        assert_eq!(overlaps, 0, "seed {seed} + {n}: {each:?}");
        acquired += each.iter().sum::<u32>();
    }
    assert!(
        acquired > 1000,
        "the lock was acquired {acquired} times only"
    );
}

/// Shows that the simulation detects overlaps.
#[test]
fn without_conditional_writes_two_processes_believe_that_they_hold_the_lock() {
    let seed = crate::seed();
    let overlaps: usize = (0..20)
        .map(|n| simulate(seed.wrapping_add(n), 5, true).0)
        .sum();
    assert!(overlaps > 0);
}

/// Polls a future, which never waits long, until it is done.
fn now<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(done) = future.as_mut().poll(&mut context) {
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
    let dead = Claimant::new("dead", seconds(30));
    let first = now(attempt(
        &store,
        &dead,
        &mut HolderObserver::default(),
        &clock,
    ));
    assert!(matches!(first, Ok(Acquisition::Since(_))));
    // The next process's wall clock is years ahead.
    let mut ahead = clock.clone();
    ahead.wrong_by = 100_000_000_000;
    let next = Claimant::new("next", seconds(5));
    let mut observer = HolderObserver::default();
    for elapsed in 0..30 {
        let acquisition = now(attempt(&store, &next, &mut observer, &ahead)).unwrap();
        let Acquisition::HeldBy(holder) = acquisition else {
            panic!("after {elapsed} s: {acquisition:?}");
        };
        assert_eq!((holder.identity.as_str(), holder.renewed), ("dead", false));
        assert_eq!(holder.unchanged, seconds(elapsed));
        clock.advance(1000);
    }
    let acquisition = now(attempt(&store, &next, &mut observer, &ahead)).unwrap();
    assert!(matches!(acquisition, Acquisition::Since(at) if at == seconds(30)));
    let record = store.state().record.as_ref().unwrap().0.clone();
    assert_eq!(record.lease_transitions, 1);
    // The dead holder was only slow: it learns that it lost the lock.
    let renewed = now(renew(&store, &dead, &clock)).unwrap();
    assert!(matches!(renewed, Renewal::Lost(why) if why.contains("next")));
}

#[test]
fn a_holder_that_renews_is_seen_to_be_alive_though_its_clock_stands_still() {
    let store = FakeStore::new(1, 0);
    let stopped = FakeClock::default();
    let clock = FakeClock::default();
    let holder = Claimant::new("holder", seconds(30));
    let first = now(attempt(
        &store,
        &holder,
        &mut HolderObserver::default(),
        &stopped,
    ));
    assert!(matches!(first, Ok(Acquisition::Since(_))));
    let next = Claimant::new("next", seconds(30));
    let mut observer = HolderObserver::default();
    for round in 0..100 {
        let acquisition = now(attempt(&store, &next, &mut observer, &clock)).unwrap();
        assert!(matches!(acquisition, Acquisition::HeldBy(h) if h.renewed == (round > 0)));
        let renewed = now(renew(&store, &holder, &stopped));
        assert!(matches!(renewed, Ok(Renewal::Since(_))));
        clock.advance(29_000);
    }
    // The holder gives the lock back: the next process does not wait.
    now(give_back(&store, &holder, &stopped)).unwrap();
    let acquisition = now(attempt(&store, &next, &mut observer, &clock)).unwrap();
    assert!(matches!(acquisition, Acquisition::Since(_)));
    let renewed = now(renew(&store, &holder, &stopped)).unwrap();
    assert!(matches!(renewed, Renewal::Lost(_)));
    now(give_back(&store, &holder, &stopped)).unwrap();
    let renewed = now(renew(&store, &next, &clock));
    assert!(matches!(renewed, Ok(Renewal::Since(_))));
}

#[test]
fn an_unreadable_record_counts_as_a_holder() {
    let (store, clock) = (FakeStore::new(1, 0), FakeClock::default());
    store.state().write(None, &LockRecord::unknown("?"));
    let claimant = Claimant::new("a", seconds(1));
    let mut observer = HolderObserver::default();
    for _ in 0..60 {
        let acquisition = now(attempt(&store, &claimant, &mut observer, &clock)).unwrap();
        assert!(matches!(acquisition, Acquisition::HeldBy(_)));
        clock.advance(1000);
    }
    let acquisition = now(attempt(&store, &claimant, &mut observer, &clock)).unwrap();
    assert!(matches!(acquisition, Acquisition::Since(_)));
    // A lock lasts an hour at most, whatever its record says.
    let mut eternal = LockRecord::unknown("?");
    eternal.lease_duration_seconds = u32::MAX;
    assert_eq!(eternal.duration(), LONGEST_DURATION);
    eternal.lease_duration_seconds = 0;
    assert_eq!(eternal.duration(), UNKNOWN_DURATION);
}
