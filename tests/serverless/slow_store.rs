//! A store whose answers come late, out of order, in pieces, not at all, or of another version of the object.

use crate::support::history::Compression;
use crate::support::small::{self, Objects, SMALL_BASE};
use crate::support::{scratch, seed};
use async_trait::async_trait;
use bytes::Bytes;
use deltafold::job::{Context, compact};
use deltafold::store::{Cancel, Keys, Store, exclude::ExcludeTags};
use deltafold::{Error, Reason};
use futures::stream::{self, BoxStream, StreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use std::fmt;
use std::io::Read;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

const DELTAS: i64 = 200;
const EVENTS: i64 = 5;
const REQUESTS: usize = 32;
/// The first delta that never ends, the 101st.
const STALLED: &str = "Incr-00000541";

/// What happens to reads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Each takes its own time, and comes in pieces.
    OutOfOrder,
    /// From some delta on, none ever ends.
    Stalled,
    /// The object is written anew after the first answer, and conditions are not heeded.
    WrittenAnew,
}

/// Passes everything on to a store in memory; reads come late.
#[derive(Debug)]
struct Slow {
    inner: InMemory,
    way: Way,
    random: Mutex<fastrand::Rng>,
    open: Arc<Open>,
}

impl fmt::Debug for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("way")
    }
}

impl fmt::Display for Slow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("slow")
    }
}

/// Reads that are under way, answered or not.
#[derive(Debug, Default)]
struct Open {
    now: AtomicUsize,
    most: AtomicUsize,
}

struct Opened(Arc<Open>);

impl Opened {
    fn new(open: &Arc<Open>) -> Self {
        let now = open.now.fetch_add(1, Ordering::SeqCst) + 1;
        open.most.fetch_max(now, Ordering::SeqCst);
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

    /// The same answer, in pieces that take their time.
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
            _ => pieces.boxed(),
        };
        // It is open as long as somebody holds the stream.
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

#[async_trait]
impl ObjectStore for Slow {
    async fn get_opts(&self, path: &Path, mut options: GetOptions) -> Result<GetResult> {
        if options.head {
            return self.inner.get_opts(path, options).await;
        }
        let opened = Opened::new(&self.open);
        tokio::time::sleep(Duration::from_millis(self.below(8))).await;
        if self.way == Way::WrittenAnew {
            options.if_match = None;
        }
        let got = self.inner.get_opts(path, options).await?;
        if self.way == Way::WrittenAnew {
            let other = vec![1; got.meta.size as usize];
            self.inner.put(path, other.into()).await?;
        }
        self.late(got, opened).await
    }

    async fn put_opts(
        &self,
        path: &Path,
        content: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        self.inner.put_opts(path, content, options).await
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(path, options).await
    }

    fn delete_stream(
        &self,
        paths: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(paths)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

/// A base, and many small deltas behind it.
fn bucket() -> Objects {
    let gzip = Compression::Gzip;
    let mut objects = Objects::from([(
        small::full_name(gzip),
        small::object(&small::small_database(4096), gzip),
    )]);
    for nth in 0..DELTAS {
        let first = SMALL_BASE + 1 + nth * EVENTS;
        let last = first + EVENTS - 1;
        let events = serde_json::to_vec(&small::put_events(first..=last)).unwrap();
        let name = format!("v2/Incr-{first:08}-{last:08}-{}.gz", 1_795_224_690 + nth);
        objects.insert(name, small::object(&events, gzip));
    }
    objects
}

struct World {
    runtime: Runtime,
    slow: Arc<Slow>,
    cancel: Cancel,
}

impl World {
    fn new(way: Way, objects: &Objects) -> Self {
        let runtime = Runtime::new().unwrap();
        let inner = InMemory::new();
        for (path, bytes) in objects {
            let path = Path::from(path.as_str());
            let put = inner.put(&path, bytes.clone().into());
            runtime.block_on(put).unwrap();
        }
        let slow = Arc::new(Slow {
            inner,
            way,
            random: Mutex::new(fastrand::Rng::with_seed(seed())),
            open: Arc::default(),
        });
        World {
            runtime,
            slow,
            cancel: Cancel::default(),
        }
    }

    fn store(&self) -> Store {
        let inner = Arc::clone(&self.slow) as Arc<dyn ObjectStore>;
        let handle = self.runtime.handle().clone();
        let url = "slow:".to_owned();
        Store::new(inner, Path::default(), url, ExcludeTags::none(), handle)
            .with_requests(REQUESTS)
            .with_ranges()
            .with_cancel(self.cancel.clone())
    }

    fn compact(&self) -> deltafold::Result<compact::Outcome> {
        let context = Context {
            store: self.store(),
            temp_dir: scratch::place(),
            threads: 2,
            keys: Keys::default(),
        };
        compact::run(&context, &small::keep_all())
    }

    fn objects(&self) -> Vec<String> {
        let listing = self.slow.inner.list(None);
        let listing: Vec<Result<ObjectMeta>> = self.runtime.block_on(listing.collect());
        let paths = listing.into_iter().map(|o| o.unwrap().location.to_string());
        paths.collect()
    }

    fn open(&self) -> usize {
        self.slow.open.now.load(Ordering::SeqCst)
    }

    /// Transfers that were given up end a moment later.
    fn wait_until_open(&self, is_so: impl Fn(usize) -> bool) -> bool {
        let patience = Instant::now() + Duration::from_secs(60);
        while !is_so(self.open()) && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(5));
        }
        is_so(self.open())
    }
}

#[test]
fn answers_out_of_order_fold_to_the_same() {
    let objects = bucket();
    let (plain, after) = small::InProcess::new().compact(&objects);
    let plain = plain.unwrap();
    let world = World::new(Way::OutOfOrder, &objects);
    let slow = world.compact().unwrap();
    assert_eq!(slow.hash_kv, plain.hash_kv);
    assert_eq!(slow.events, plain.events);
    assert_eq!(world.objects(), after.keys().cloned().collect::<Vec<_>>());
    // Many at once, and no more than are asked for.
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
    let world = World::new(Way::Stalled, &objects);
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

/// More than one range, and not a whole number of them.
const LARGE: usize = (21 << 20) + 17;

fn large(way: Way) -> (World, Vec<u8>, std::result::Result<Vec<u8>, Error>) {
    let mut content = vec![0; LARGE];
    fastrand::Rng::with_seed(7).fill(&mut content);
    let objects = Objects::from([("v2/large".to_owned(), content.clone())]);
    let world = World::new(way, &objects);
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
    assert!((2..=8).contains(&most), "{most} were open");
    assert!(world.wait_until_open(|open| open == 0));
}

#[test]
fn ranges_of_two_versions_are_never_mixed() {
    let (world, _, got) = large(Way::WrittenAnew);
    let e = got.unwrap_err();
    assert_eq!(e.reason(), Reason::SnapshotVanished, "{e}");
    assert!(e.to_string().contains("was written anew"), "{e}");
    assert!(world.wait_until_open(|open| open == 0));
}
