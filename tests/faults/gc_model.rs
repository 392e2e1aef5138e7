//! A model of two collectors, a compactor, a snapshotter and an operator at once. Their steps in the store run
//! in random order, any of them dies at any step, and after each step everything that must be restorable is.

use crate::support::history::Compression;
use crate::support::hooked_store::{Call, Hooked, Hooks, Inner};
use crate::support::tiny_backup::{database, keep_all, object, put_events};
use crate::support::{self, bucket_store};
use chrono::{TimeDelta, Utc};
use deltafold::backup::catalog::mark_of;
use deltafold::backup::retention::{self, Periods, Policy};
use deltafold::backup::{Kind, SnapshotName};
use deltafold::mvcc::Revision;
use deltafold::ops::compact;
use deltafold::ops::gc::{self, Options};
use deltafold::prefix::Context;
use deltafold::store::exclude::ExcludeTags;
use deltafold::{Error, Reason};
use fastrand::Rng;
use futures::stream::{self, BoxStream};
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    GetOptions, GetResult, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions,
    PutPayload, PutResult,
};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot};

fn full_object(last: i64, created: i64) -> (String, Vec<u8>) {
    let name = format!("v2/Full-00000000-{last:08}-{created}");
    (
        name,
        object(&database(4096, 2..=last, 1), Compression::None),
    )
}

fn delta_object(start: i64, last: i64, created: i64) -> (String, Vec<u8>) {
    let name = format!("v2/Incr-{start:08}-{last:08}-{created}");
    let events = serde_json::to_vec(&put_events(start..=last)).expect("JSON");
    (name, object(&events, Compression::None))
}

/// What a step may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Run,
    /// The process dies before the step, or after it and before the response.
    Die {
        takes_effect: bool,
    },
}

struct Ticket {
    actor: usize,
    call: Call,
    path: String,
    go: oneshot::Sender<Verdict>,
    done: oneshot::Receiver<()>,
}

/// Hooks that ask before each call.
#[derive(Clone, Debug)]
struct Stepped {
    actor: usize,
    tickets: mpsc::UnboundedSender<Ticket>,
    /// How far this store's clock is ahead of the real time.
    clock: TimeDelta,
    locks: bool,
    /// The first listing of each folder, if it is believed for ever.
    believed: Option<Believed>,
}

type Believed = Arc<Mutex<BTreeMap<Path, Vec<ObjectMeta>>>>;

impl Stepped {
    fn told(&self, mut meta: ObjectMeta) -> ObjectMeta {
        meta.last_modified += self.clock;
        meta
    }
}

impl Hooks for Stepped {
    async fn around<T: Send>(
        &self,
        call: Call,
        path: &Path,
        run: impl Future<Output = object_store::Result<T>> + Send,
    ) -> object_store::Result<T> {
        let dead = || object_store::Error::Generic {
            store: "S3",
            source: "its process is dead".into(),
        };
        let (go, wait) = oneshot::channel();
        let (done, finished) = oneshot::channel();
        let ticket = Ticket {
            actor: self.actor,
            call,
            path: path.to_string(),
            go,
            done: finished,
        };
        self.tickets.send(ticket).map_err(|_| dead())?;
        let result = match wait.await.map_err(|_| dead())? {
            Verdict::Run => run.await,
            Verdict::Die { takes_effect } => {
                if takes_effect {
                    let _ = run.await;
                }
                Err(dead())
            }
        };
        let _ = done.send(());
        result
    }

    async fn put(
        &self,
        inner: &Inner,
        path: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> object_store::Result<PutResult> {
        let is_lock = path.as_ref().starts_with("deltafold-locks/");
        if is_lock && !self.locks && !matches!(options.mode, PutMode::Overwrite) {
            return Err(object_store::Error::NotImplemented {
                operation: "conditional put".into(),
                implementer: "this store".into(),
            });
        }
        let put = inner.put_opts(path, payload, options);
        self.around(Call::Put, path, put).await
    }

    async fn get(
        &self,
        inner: &Inner,
        path: &Path,
        options: GetOptions,
    ) -> object_store::Result<GetResult> {
        let got = inner.get_opts(path, options);
        let mut got = self.around(Call::Get, path, got).await?;
        got.meta = self.told(got.meta);
        Ok(got)
    }

    fn list(
        &self,
        inner: &Inner,
        path: Path,
    ) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        let (hooks, inner) = (self.clone(), inner.clone());
        let listing = async move {
            // The memory store lists when it is called, and that must be after the step has begun.
            let all = async { inner.list(Some(&path)).try_collect::<Vec<_>>().await };
            let all = hooks.around(Call::List, &path, all).await;
            let all = all.map(|all| all.into_iter().map(|m| hooks.told(m)).collect());
            let all = match (&hooks.believed, all) {
                (Some(believed), Ok(all)) => {
                    let mut believed = believed.lock().unwrap();
                    Ok(believed.entry(path.clone()).or_insert(all).clone())
                }
                (_, all) => all,
            };
            match all {
                Ok::<Vec<_>, _>(all) => stream::iter(all.into_iter().map(Ok)).boxed(),
                Err(e) => stream::iter([Err(e)]).boxed(),
            }
        };
        stream::once(listing).flatten().boxed()
    }
}

/// The names in the prefix at a moment: all of one history.
#[derive(Clone, Default)]
struct Seen {
    /// Snapshots that are not excluded.
    usable: BTreeMap<String, SnapshotName>,
    all: HashSet<String>,
    excluded: HashSet<String>,
}

impl Seen {
    fn of(rt: &Runtime, inner: &InMemory) -> Self {
        let all: Vec<ObjectMeta> = rt.block_on(inner.list(None).try_collect()).unwrap();
        let mut seen = Seen::default();
        for o in all {
            let path = o.location.to_string();
            if let Some(path) = path.strip_prefix("deltafold-excluded/") {
                seen.excluded.insert(format!("v2/{path}"));
            } else if let Some(name) = path.strip_prefix("v2/").and_then(|n| n.parse().ok()) {
                seen.usable.insert(path.clone(), name);
                seen.all.insert(path);
            }
        }
        let excluded = &seen.excluded;
        seen.usable.retain(|path, _| !excluded.contains(path));
        seen
    }

    fn fulls(&self) -> impl Iterator<Item = (&String, &SnapshotName)> {
        self.usable.iter().filter(|s| s.1.kind == Kind::Full)
    }

    fn deltas(&self) -> impl Iterator<Item = (&String, &SnapshotName)> {
        self.usable.iter().filter(|s| s.1.kind == Kind::Incr)
    }

    fn next_full(&self, base: Revision) -> Option<Revision> {
        self.fulls().map(|s| s.1.last).filter(|l| *l > base).min()
    }

    fn restorable(&self) -> BTreeSet<i64> {
        let mut points: BTreeSet<i64> = self.fulls().map(|s| s.1.last.0).collect();
        let mut deltas: Vec<(i64, i64)> =
            self.deltas().map(|s| (s.1.start.0, s.1.last.0)).collect();
        deltas.sort_unstable();
        loop {
            let before = points.len();
            for &(start, last) in &deltas {
                if let Some(&at) = points.range(start - 1..=last).next() {
                    points.extend(at..=last);
                }
            }
            if points.len() == before {
                return points;
            }
        }
    }
}

struct ModelPrefix {
    /// The time of each revision, from 0 on.
    times: Vec<i64>,
    /// The last saved revision.
    saved: i64,
    now: i64,
}

impl ModelPrefix {
    fn last(&self) -> i64 {
        self.times.len() as i64 - 1
    }

    fn write(&mut self, rng: &mut Rng, most: usize) {
        for _ in 0..rng.usize(1..=most) {
            self.times.push(self.now);
        }
    }

    /// Returns the revisions that must be restorable with this window.
    fn must(&self, seen: &Seen, window: Option<i64>) -> BTreeSet<i64> {
        let newest = seen.fulls().map(|s| s.1.last.0).max().unwrap_or(0);
        let start = window.map(|w| self.now - w);
        let is_in = |r: i64| {
            let next = self.times.get(r as usize + 1);
            start.is_some_and(|s| self.times[r as usize] >= s || next.is_none_or(|n| *n > s))
        };
        let points = seen.restorable().into_iter();
        points.filter(|&r| r >= newest || is_in(r)).collect()
    }
}

const HOUR: i64 = 3600;

/// Creates five hours of history in random pieces.
fn begin(rng: &mut Rng, rt: &Runtime, inner: &InMemory, ahead: TimeDelta) -> ModelPrefix {
    let now = (Utc::now() + ahead).timestamp();
    let mut w = ModelPrefix {
        times: vec![now - 5 * HOUR; 3],
        saved: 2,
        now: now - 5 * HOUR,
    };
    put(rt, inner, full_object(2, w.now));
    while w.now < now - 700 {
        w.now += rng.i64(200..900);
        w.write(rng, 2);
        match rng.u8(..10) {
            0..3 => {
                put(rt, inner, full_object(w.last(), w.now));
                if rng.bool() {
                    put(rt, inner, delta_object(w.saved + 1, w.last(), w.now - 1));
                }
                w.saved = w.last();
            }
            3 => {
                let late = rng.i64(2..=w.saved);
                put(rt, inner, full_object(late, w.now));
            }
            _ => {
                put(rt, inner, delta_object(w.saved + 1, w.last(), w.now));
                w.saved = w.last();
            }
        }
    }
    w.now = now;
    w
}

fn put(rt: &Runtime, inner: &InMemory, (path, bytes): (String, Vec<u8>)) {
    rt.block_on(inner.put(&Path::from(path), bytes.into()))
        .unwrap();
}

fn context(rt: &Runtime, inner: &Arc<InMemory>, hooks: Stepped) -> Context {
    let inner = inner.clone();
    let store = bucket_store(rt, Hooked { inner, hooks }, ExcludeTags::none());
    support::context(store, 1)
}

type Ended = Result<(), Error>;

fn collector(ctx: Context, options: Options) -> Ended {
    match gc::run(&ctx, &options)?.failure {
        Some(e) => Err(e),
        None => Ok(()),
    }
}

fn compactor(ctx: Context) -> Ended {
    compact::run(&ctx, &keep_all()).map(|_| ())
}

#[derive(Debug, Default)]
struct Counts {
    steps: usize,
    deaths: usize,
    removals: usize,
    operated: usize,
    ended_well: usize,
}

struct Round<'a> {
    rng: &'a mut Rng,
    rt: &'a Runtime,
    inner: Arc<InMemory>,
    world: ModelPrefix,
    /// How far the real time is ahead of the machine's clock.
    ahead: TimeDelta,
    window: Option<i64>,
    /// For each actor, the step at which it dies.
    deaths: Vec<Option<usize>>,
    steps: Vec<usize>,
    trace: Vec<String>,
    /// What pins keep: fulls, each with the deltas after it at the time of the pin.
    pinned: BTreeMap<String, Vec<String>>,
    snapshots_left: usize,
    /// Whether the operator ignores locks.
    heedless: bool,
}

impl Round<'_> {
    /// Lets the actors run until all have ended.
    fn run(
        &mut self,
        mut tickets: mpsc::UnboundedReceiver<Ticket>,
        has_ended: &dyn Fn(usize) -> bool,
        collectors: usize,
        counts: &mut Counts,
    ) {
        let mut waiting: Vec<Ticket> = Vec::new();
        loop {
            // An actor that wants to continue says so soon.
            let more = self.rt.block_on(async {
                tokio::time::timeout(Duration::from_micros(250), tickets.recv()).await
            });
            match more {
                Ok(Some(t)) => {
                    waiting.push(t);
                    continue;
                }
                Ok(None) => break,
                Err(_) if waiting.is_empty() => {
                    let all_ended = (0..self.deaths.len()).all(has_ended);
                    if all_ended && self.snapshots_left == 0 {
                        break;
                    }
                    if self.snapshots_left > 0 {
                        self.snapshot();
                    }
                    continue;
                }
                Err(_) => {}
            }
            if self.snapshots_left > 0 && self.rng.u8(..12) == 0 {
                self.snapshot();
            }
            // An operator that a lock, or luck, keeps from what is being removed. A silent actor is working
            // with its last listing.
            // The step begins a listing of the prefix.
            let is_look = |t: &Ticket| t.call == Call::List && t.path == "v2";
            let looks = |actor| waiting.iter().any(|t| t.actor == actor && is_look(t));
            let at_rest =
                self.heedless || (0..collectors).all(|actor| has_ended(actor) || looks(actor));
            if at_rest && self.rng.u8(..6) == 0 {
                self.operate(counts);
            }
            let t = waiting.swap_remove(self.rng.usize(..waiting.len()));
            self.steps[t.actor] += 1;
            counts.steps += 1;
            let verdict = match self.deaths[t.actor] {
                Some(at) if self.steps[t.actor] == at => {
                    counts.deaths += 1;
                    Verdict::Die {
                        takes_effect: self.rng.bool(),
                    }
                }
                Some(at) if self.steps[t.actor] > at => Verdict::Die {
                    takes_effect: false,
                },
                _ => Verdict::Run,
            };
            let changes = !matches!(t.call, Call::List | Call::Get);
            let before = changes.then(|| Seen::of(self.rt, &self.inner));
            let step = format!("{} {:?} {} {verdict:?}", t.actor, t.call, t.path);
            self.trace.push(step);
            if t.go.send(verdict).is_err() {
                continue;
            }
            let _ = self.rt.block_on(t.done);
            if let Some(before) = before {
                let after = Seen::of(self.rt, &self.inner);
                counts.removals += before.usable.len().saturating_sub(after.usable.len());
                self.check(&before, &after);
            }
        }
    }

    fn check(&mut self, before: &Seen, after: &Seen) {
        self.world.now = (Utc::now() + self.ahead).timestamp();
        let left = after.restorable();
        let lost: Vec<i64> = self
            .world
            .must(before, self.window)
            .into_iter()
            .filter(|r| !left.contains(r))
            .collect();
        let names = || before.usable.keys().cloned().collect::<Vec<_>>();
        let tail = || {
            self.trace
                .iter()
                .rev()
                .take(60)
                .rev()
                .cloned()
                .collect::<Vec<_>>()
        };
        assert!(
            lost.is_empty(),
            "revisions {lost:?} cannot be restored any more, window {:?}\n{:#?}\n{:#?}",
            self.window,
            names(),
            tail()
        );
        for (full, deltas) in &self.pinned {
            // A full that a compactor has added to the chain since then ends it.
            let next = before.next_full(before.usable[full].last);
            let still = deltas.iter().filter(|path| {
                let delta = before.usable.get(*path);
                delta.is_some_and(|d| next.is_none_or(|n| d.start <= n))
            });
            for path in still.chain([full]) {
                assert!(
                    after.usable.contains_key(path),
                    "{path} is pinned\n{:#?}",
                    tail()
                );
            }
        }
    }

    fn snapshot(&mut self) {
        self.snapshots_left -= 1;
        let w = &mut self.world;
        w.write(self.rng, 2);
        let (last, created) = (w.last(), w.now);
        let object = match self.rng.u8(..3) {
            0 => full_object(last, created),
            _ => delta_object(w.saved + 1, last, created),
        };
        w.saved = last;
        self.trace.push(format!("snapshotter {}", object.0));
        put(self.rt, &self.inner, object);
    }

    fn operate(&mut self, counts: &mut Counts) {
        counts.operated += 1;
        let seen = Seen::of(self.rt, &self.inner);
        let pick = |rng: &mut Rng, of: Vec<String>| {
            (!of.is_empty()).then(|| of[rng.usize(..of.len())].clone())
        };
        match self.rng.u8(..2) {
            0 => {
                // The pin and what it keeps.
                let fulls = seen.fulls().map(|s| s.0.clone()).collect();
                let Some(full) = pick(self.rng, fulls) else {
                    return;
                };
                self.trace.push(format!("operator pins {full}"));
                let note = full.replace("v2/", "deltafold-pins/");
                put(self.rt, &self.inner, (note, b"{}".to_vec()));
                let base = seen.usable[&full].last;
                let next = seen.next_full(base);
                let chain = seen
                    .deltas()
                    .filter(|s| s.1.last > base && next.is_none_or(|n| s.1.start <= n));
                let chain = chain.map(|s| s.0.clone()).collect();
                self.pinned.entry(full).or_insert(chain);
            }
            _ => {
                // As if the newest full were bad: what it has superseded is needed again.
                let Some(full) = seen.fulls().max_by_key(|s| s.1.last).map(|s| s.0.clone()) else {
                    return;
                };
                if seen.fulls().count() < 2 || self.pinned.contains_key(&full) {
                    return;
                }
                self.trace.push(format!("operator excludes {full}"));
                put(self.rt, &self.inner, (mark_of(&full), Vec::new()));
            }
        }
    }
}

fn options(rng: &mut Rng, window: Option<i64>) -> Options {
    let policy = match rng.bool() {
        true => Policy::Limit(rng.u32(1..4)),
        false => Policy::Exponential(Periods {
            hourly: rng.u32(..3),
            daily: 0,
            weekly: 0,
            monthly: 0,
        }),
    };
    Options {
        retention: retention::Options {
            policy,
            delta_retention: rng.bool().then(|| TimeDelta::seconds(rng.i64(0..2 * HOUR))),
            restorable_window: window.map(TimeDelta::seconds),
        },
        staging_age: TimeDelta::hours(24),
        apply: true,
        allow_shrink: true,
        timeout: Duration::from_secs(3600),
        lock_lease: None,
        single_writer: true,
    }
}

/// Plays rounds, each with its own seed. Heedless collectors see nothing but their first listings.
fn play(seed: u64, rounds: usize, heedless: bool) -> Counts {
    let rt = Runtime::new().unwrap();
    let mut counts = Counts::default();
    for round in 0..rounds as u64 {
        let mut rng = Rng::with_seed(seed.wrapping_add(round));
        println!(
            "round {round}: DELTAFOLD_TEST_SEED={}",
            seed.wrapping_add(round)
        );
        let inner = Arc::new(InMemory::new());
        // The collectors' own clocks are ahead of the real time and of the store's clock.
        let ahead = TimeDelta::seconds(-[0, HOUR][rng.usize(..2)]);
        let world = begin(&mut rng, &rt, &inner, ahead);
        let window = rng.bool().then(|| rng.i64(0..4 * HOUR));
        let (send, tickets) = mpsc::unbounded_channel();
        const COLLECTORS: usize = 2;
        let actors = COLLECTORS + 1;
        let handles: Vec<std::thread::JoinHandle<Ended>> = (0..actors)
            .map(|actor| {
                // A collector whose clock, or whose store's clock, is behind.
                let behind = TimeDelta::seconds(-[0, rng.i64(0..HOUR)][rng.usize(..2)]);
                let store = Stepped {
                    actor,
                    tickets: send.clone(),
                    clock: ahead + behind,
                    locks: false,
                    believed: (heedless && actor < COLLECTORS).then(Believed::default),
                };
                let ctx = context(&rt, &inner, store);
                let options = options(&mut rng, window);
                std::thread::spawn(move || match actor < COLLECTORS {
                    true => collector(ctx, options),
                    false => compactor(ctx),
                })
            })
            .collect();
        drop(send);
        let deaths = (0..actors)
            .map(|_| rng.bool().then(|| rng.usize(1..60)))
            .collect();
        let mut r = Round {
            rng: &mut rng,
            rt: &rt,
            inner: inner.clone(),
            world,
            ahead,
            window,
            deaths,
            steps: vec![0; actors],
            trace: Vec::new(),
            pinned: BTreeMap::new(),
            snapshots_left: 4,
            heedless,
        };
        let has_ended = |actor: usize| handles[actor].is_finished();
        r.run(tickets, &has_ended, COLLECTORS, &mut counts);
        let died = r.deaths.clone();
        let steps = r.steps.clone();
        for (actor, handle) in handles.into_iter().enumerate() {
            let result = handle.join().expect("no panic");
            match result {
                Ok(()) => counts.ended_well += 1,
                Err(e) => {
                    let dead = died[actor].is_some_and(|at| steps[actor] >= at);
                    // A compactor's input may be removed, and its name may be taken.
                    let compacts = actor == COLLECTORS && e.reason() != Reason::Internal;
                    // Without the lock, another actor may be faster at each attempt.
                    let overtaken =
                        matches!(e.reason(), Reason::SnapshotVanished | Reason::Conflict);
                    assert!(dead || compacts || overtaken, "actor {actor}: {e}");
                }
            }
        }
        // What is left is complete, and a collector finishes the work.
        let before = Seen::of(&rt, &inner);
        let (send, mut rest) = mpsc::unbounded_channel::<Ticket>();
        let pass = rt.spawn(async move {
            while let Some(t) = rest.recv().await {
                let _ = t.go.send(Verdict::Run);
                let _ = t.done.await;
            }
        });
        let store = Stepped {
            actor: 0,
            tickets: send,
            clock: ahead,
            locks: true,
            believed: None,
        };
        let result = collector(context(&rt, &inner, store.clone()), options(r.rng, window));
        // `pass` ends with the last sender.
        drop(store);
        result.unwrap_or_else(|e| panic!("the last collector: {e}"));
        r.check(&before, &Seen::of(&rt, &inner));
        rt.block_on(pass).unwrap();
    }
    counts
}

#[test]
fn whatever_the_order_of_steps_what_must_be_restorable_is() {
    let rounds = crate::support::rounds(20, 60);
    let counts = play(crate::support::seed(), rounds, false);
    println!("{counts:?}");
    assert!(counts.removals * 3 > rounds * 5 && counts.steps * 3 > rounds * 50);
    assert!(counts.ended_well * 3 > rounds && counts.operated > 0);
    assert!(counts.deaths * 12 > rounds);
}

/// The model finds what it should find: collectors that do not look again break what an operator has pinned or
/// needs again.
#[test]
fn a_collector_that_believes_an_old_look_is_found_out() {
    let seed = crate::support::seed();
    let found = (0..40).any(|round| {
        let played = std::panic::catch_unwind(|| play(seed.wrapping_add(round), 1, true));
        played.is_err()
    });
    assert!(found);
}
