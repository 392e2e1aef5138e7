//! A store whose responses come late, out of order, in pieces, not at all, or from another version of the
//! object.

use crate::support::history::Compression;
use crate::support::hooked_store::{Call, Hooked, Hooks, Inner};
use crate::support::made_backups::{in_memory, objects_of};
use crate::support::tiny_backup::{self, Objects, SMALL_BASE};
use crate::support::{bucket_store, context, seed};
use bytes::Bytes;
use deltafold::base::Cancel;
use deltafold::ops::compact;
use deltafold::ops::report::Report;
use deltafold::store::{Store, Upload, exclude::ExcludeTags};
use deltafold::{Error, Reason};
use futures::stream::{self, StreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{GetOptions, GetResult, GetResultPayload, ObjectStoreExt, Result, UploadPart};
use std::io::{Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

const DELTAS: i64 = 200;
const EVENTS: i64 = 5;
const REQUESTS: usize = 32;
/// The name of the first delta that never ends, the 101st.
const STALLED: &str = "Incr-00000541";

/// The behaviour of reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Each read takes its own time, and comes in pieces.
    OutOfOrder,
    /// From the delta `STALLED` on, no read ends.
    Stalled,
    /// The object is overwritten after the first response, and conditions are ignored.
    WrittenAnew,
    /// Nothing after this many bytes ever arrives.
    StalledFrom(u64),
}

/// Delays reads of a store in memory.
#[derive(Clone, Debug)]
struct Slow {
    way: Way,
    random: Arc<Mutex<fastrand::Rng>>,
    open: Arc<Open>,
    parts: Arc<Parts>,
}

/// Reads under way, with or without a response yet.
#[derive(Debug, Default)]
struct Open {
    now: AtomicUsize,
    most: AtomicUsize,
    ever: AtomicUsize,
}

/// Parts that are being uploaded.
#[derive(Debug)]
struct Parts {
    now: AtomicUsize,
    bytes: AtomicUsize,
    most_bytes: AtomicUsize,
    /// Parts wait until this is closed.
    gate: Semaphore,
}

struct Opened(Arc<Open>);

impl Opened {
    fn new(open: &Arc<Open>) -> Self {
        let now = open.now.fetch_add(1, Ordering::SeqCst) + 1;
        open.most.fetch_max(now, Ordering::SeqCst);
        open.ever.fetch_add(1, Ordering::SeqCst);
        Opened(Arc::clone(open))
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Slow {
    fn below(&self, most: u64) -> u64 {
        self.random.lock().unwrap().u64(..most)
    }

    /// Returns the same response in delayed pieces.
    async fn late(&self, got: GetResult, opened: Opened) -> Result<GetResult> {
        let (meta, range, attributes) =
            (got.meta.clone(), got.range.clone(), got.attributes.clone());
        let extensions = got.extensions.clone();
        let bytes = got.bytes().await?;
        let size = 1 + self.below(1 + bytes.len() as u64) as usize;
        let pieces: Vec<Bytes> = bytes.chunks(size).map(Bytes::copy_from_slice).collect();
        let pause = Duration::from_millis(self.below(3));
        let pieces = stream::iter(pieces).then(move |piece| async move {
            tokio::time::sleep(pause).await;
            Ok(piece)
        });
        let pieces = match self.way {
            Way::Stalled if meta.location.filename() >= Some(STALLED) => {
                pieces.chain(stream::pending()).boxed()
            }
            Way::StalledFrom(begin) if range.start >= begin => {
                pieces.chain(stream::pending()).boxed()
            }
            _ => pieces.boxed(),
        };
        // A read counts as open as long as its stream exists.
        let pieces = pieces.map(move |piece| {
            let _ = &opened;
            piece
        });
        Ok(GetResult {
            payload: GetResultPayload::Stream(pieces.boxed()),
            meta,
            range,
            attributes,
            extensions,
        })
    }
}

impl Hooks for Slow {
    async fn around<T: Send>(
        &self,
        _: Call,
        _: &Path,
        run: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        run.await
    }

    async fn get(&self, inner: &Inner, path: &Path, mut options: GetOptions) -> Result<GetResult> {
        if options.head {
            return inner.get_opts(path, options).await;
        }
        let opened = Opened::new(&self.open);
        tokio::time::sleep(Duration::from_millis(self.below(8))).await;
        if self.way == Way::WrittenAnew {
            options.if_match = None;
        }
        let got = inner.get_opts(path, options).await?;
        if self.way == Way::WrittenAnew {
            let other = vec![1; got.meta.size as usize];
            inner.put(path, other.into()).await?;
        }
        self.late(got, opened).await
    }

    /// Lets parts through the gate.
    fn part(&self, _: Path, len: usize, sent: UploadPart) -> UploadPart {
        let parts = Arc::clone(&self.parts);
        Box::pin(async move {
            let bytes = parts.bytes.fetch_add(len, Ordering::SeqCst) + len;
            parts.most_bytes.fetch_max(bytes, Ordering::SeqCst);
            parts.now.fetch_add(1, Ordering::SeqCst);
            let _closed = parts.gate.acquire().await;
            parts.now.fetch_sub(1, Ordering::SeqCst);
            parts.bytes.fetch_sub(len, Ordering::SeqCst);
            sent.await
        })
    }
}

/// Returns a base and many small deltas.
fn bucket() -> Objects {
    let gzip = Compression::Gzip;
    let mut objects = Objects::from([(
        tiny_backup::full_name(gzip),
        tiny_backup::object(&tiny_backup::small_database(4096), gzip),
    )]);
    for nth in 0..DELTAS {
        let first = SMALL_BASE + 1 + nth * EVENTS;
        let last = first + EVENTS - 1;
        let events = serde_json::to_vec(&tiny_backup::put_events(first..=last)).unwrap();
        let name = format!("v2/Incr-{first:08}-{last:08}-{}.gz", 1_795_224_690 + nth);
        objects.insert(name, tiny_backup::object(&events, gzip));
    }
    objects
}

struct SlowBucket {
    runtime: Runtime,
    memory: Arc<InMemory>,
    slow: Slow,
    cancel: Cancel,
}

impl SlowBucket {
    fn new(way: Way, objects: &Objects) -> Self {
        let runtime = Runtime::new().unwrap();
        let slow = Slow {
            way,
            random: Arc::new(Mutex::new(fastrand::Rng::with_seed(seed()))),
            open: Arc::default(),
            parts: Arc::new(Parts {
                now: AtomicUsize::new(0),
                bytes: AtomicUsize::new(0),
                most_bytes: AtomicUsize::new(0),
                gate: Semaphore::new(0),
            }),
        };
        SlowBucket {
            runtime,
            memory: in_memory(objects),
            slow,
            cancel: Cancel::default(),
        }
    }

    fn store(&self) -> Store {
        let (inner, hooks) = (self.memory.clone(), self.slow.clone());
        bucket_store(&self.runtime, Hooked { inner, hooks }, ExcludeTags::none())
            .with_requests(REQUESTS)
            .with_ranges()
            .with_cancel(self.cancel.clone())
    }

    fn compact(&self) -> deltafold::Result<Report<compact::Compacted>> {
        compact::run(&context(self.store(), 2), &tiny_backup::keep_all())
    }

    fn objects(&self) -> Vec<String> {
        let objects = self.runtime.block_on(objects_of(&self.memory));
        objects.into_keys().collect()
    }

    /// Waits, because cancelled transfers end a moment later.
    fn wait_until_open(&self, is_so: impl Fn(usize) -> bool) -> bool {
        wait_until(&self.slow.open.now, is_so)
    }
}

fn wait_until(count: &AtomicUsize, is_so: impl Fn(usize) -> bool) -> bool {
    let now = || count.load(Ordering::SeqCst);
    let patience = Instant::now() + Duration::from_secs(60);
    while !is_so(now()) && Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(5));
    }
    is_so(now())
}

#[test]
fn answers_out_of_order_fold_to_the_same() {
    let objects = bucket();
    let (plain, after) = tiny_backup::InProcess::new().compact(&objects);
    let plain = plain.unwrap();
    let world = SlowBucket::new(Way::OutOfOrder, &objects);
    let slow = world.compact().unwrap();
    assert_eq!(slow.hash_kv, plain.hash_kv);
    assert_eq!(slow.events, plain.events);
    assert_eq!(world.objects(), after.keys().cloned().collect::<Vec<_>>());
    // Many at once, but not more than allowed.
    let most = world.slow.open.most.load(Ordering::SeqCst);
    assert!(
        (REQUESTS / 2..=REQUESTS + 2).contains(&most),
        "{most} were open"
    );
    assert!(world.wait_until_open(|open| open == 0));
}

#[test]
fn a_signal_ends_reads_that_never_end_and_nothing_is_left() {
    let objects = bucket();
    let world = SlowBucket::new(Way::Stalled, &objects);
    let ended = std::thread::scope(|scope| {
        let compact = scope.spawn(|| world.compact());
        let reached = world.wait_until_open(|open| open >= REQUESTS);
        world.cancel.cancel();
        assert!(reached);
        compact.join().unwrap()
    });
    assert_eq!(ended.unwrap_err().reason(), Reason::Terminated);
    assert!(world.wait_until_open(|open| open == 0));
    assert_eq!(world.objects(), objects.keys().cloned().collect::<Vec<_>>());
}

/// More than one range, and not a multiple of a range.
const LARGE: usize = (70 << 20) + 17;
/// Bytes of a range; ranges that are open or unread for one object.
const RANGE: usize = 2 << 20;
const RANGES: usize = 16;

fn large_object(way: Way) -> (SlowBucket, Vec<u8>) {
    let mut content = vec![0; LARGE];
    fastrand::Rng::with_seed(7).fill(&mut content);
    let objects = Objects::from([("v2/large".to_owned(), content.clone())]);
    (SlowBucket::new(way, &objects), content)
}

fn large(way: Way) -> (SlowBucket, Vec<u8>, std::result::Result<Vec<u8>, Error>) {
    let (world, content) = large_object(way);
    let mut got = Vec::new();
    let read = world
        .store()
        .fetch("v2/large", LARGE as u64)
        .read_to_end(&mut got);
    let read = read.map(|_| got).map_err(|e| Error::io("read", e));
    (world, content, read)
}

#[test]
fn ranges_of_a_large_object_come_at_once_and_are_put_in_order() {
    let (world, content, got) = large(Way::OutOfOrder);
    assert!(got.unwrap() == content);
    let most = world.slow.open.most.load(Ordering::SeqCst);
    assert!((2..=RANGES).contains(&most), "{most} were open");
    assert!(world.wait_until_open(|open| open == 0));
}

#[test]
fn unread_ranges_are_few_whatever_the_number_of_objects() {
    let (world, content) = large_object(Way::OutOfOrder);
    let store = world.store();
    let read = || store.fetch("v2/large", LARGE as u64);
    let mut readers = [read(), read(), read()];
    // One for each object, and the other ranges of one.
    let most = RANGES + 2;
    let ever = || world.slow.open.ever.load(Ordering::SeqCst);
    assert!(wait_until(&world.slow.open.ever, |ever| ever >= most));
    assert!(world.wait_until_open(|open| open == 0));
    assert_eq!(ever(), most);
    for reader in &mut readers {
        let mut got = Vec::new();
        reader.read_to_end(&mut got).unwrap();
        assert!(got == content);
    }
    assert_eq!(ever(), 3 * LARGE.div_ceil(RANGE));
}

#[test]
fn room_that_a_reader_frees_is_used_at_once() {
    const READ: usize = 10;
    let (world, content) = large_object(Way::StalledFrom((READ * RANGE) as u64));
    let mut reader = world.store().fetch("v2/large", LARGE as u64);
    let mut got = vec![0; READ * RANGE];
    reader.read_exact(&mut got).unwrap();
    assert!(got == content[..READ * RANGE]);
    // The range that was just read makes room for the next.
    let expected = RANGES + READ - 1;
    let ever = &world.slow.open.ever;
    assert!(wait_until(ever, |ever| ever >= expected));
    assert!(world.wait_until_open(|open| open == RANGES - 1));
    assert_eq!(ever.load(Ordering::SeqCst), expected);
    drop(reader);
    assert!(world.wait_until_open(|open| open == 0));
}

/// Bytes of a part; parts that all uploads share in addition to one each.
const PART: usize = 5 << 20;
const SHARED_PARTS: usize = 9;

#[test]
fn parts_under_way_are_few_whatever_the_number_of_uploads() {
    let (world, content) = large_object(Way::OutOfOrder);
    let store = world.store();
    let parts = &world.slow.parts;
    std::thread::scope(|scope| {
        for name in ["v2/one", "v2/other"] {
            let (store, content) = (store.clone(), &content);
            scope.spawn(move || {
                let mut upload = Upload::new(&store, name, 0).unwrap();
                upload.write_all(content).unwrap();
                upload.finish().unwrap().complete().unwrap();
            });
        }
        let reached = wait_until(&parts.now, |now| now >= SHARED_PARTS + 2);
        parts.gate.close();
        assert!(reached);
    });
    let most = parts.most_bytes.load(Ordering::SeqCst);
    assert_eq!(most, (SHARED_PARTS + 2) * PART);
    for name in ["v2/one", "v2/other"] {
        let mut got = Vec::new();
        store.read(name).read_to_end(&mut got).unwrap();
        assert!(got == content);
    }
}

#[test]
fn ranges_of_two_versions_are_never_mixed() {
    let (world, _, got) = large(Way::WrittenAnew);
    let e = got.unwrap_err();
    assert_eq!(e.reason(), Reason::SnapshotVanished, "{e}");
    assert!(
        e.to_string().contains("was replaced while it was read"),
        "{e}"
    );
    assert!(world.wait_until_open(|open| open == 0));
}
