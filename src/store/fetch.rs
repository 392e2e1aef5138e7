//! Reads an object as a stream: an async transfer behind a blocking `Read`.
//!
//! Reads a large object by several ranges at once, and hands the bytes over in order. A local file is opened
//! and read on the caller's thread.

use super::exclude::ExcludeTags;
use super::{Bandwidth, Store, store_error};
use crate::base::Cancel;
use crate::error::{Error, Reason, Result};
use bytes::{Buf, Bytes};
use futures::stream::{BoxStream, FuturesOrdered};
use futures::{FutureExt, StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, GetResult, GetResultPayload, ObjectMeta};
use object_store::{ObjectStore, ObjectStoreExt};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinHandle;

/// Chunks that may wait for the reader. Then the transfer pauses.
const CHUNKS_AHEAD: usize = 3;
/// Size of a chunk in bytes; the last may be smaller.
const CHUNK: usize = 256 << 10;

/// Size of a range in bytes. With small ranges, the same memory allows more transfers at once.
const RANGE: u64 = 2 << 20;
/// The crate's error for a server that returns a whole object if a range is requested.
const NO_RANGE: &str = "Received non-partial response when range requested";
/// The smallest object that is read by ranges, in bytes.
const LARGE: u64 = 16 << 20;
/// Returns whether an object of this size is read by several ranges at once, if the store has them.
pub fn is_large(bytes: u64) -> bool {
    bytes >= LARGE
}

/// Ranges under way or unread, of all objects of a store together. Beside these, each object may have one.
pub(super) const RANGES_AHEAD: usize = 15;

/// The bytes of an object. The transfer begins at once, runs in the background, and ends when this is
/// dropped.
pub struct ObjectReader {
    source: ByteSource,
    current: VecDeque<Bytes>,
    /// The permit of the range that `current` is from.
    permit: Option<OwnedSemaphorePermit>,
    name: String,
    bytes_read: Arc<AtomicU64>,
    cancel: Cancel,
    bandwidth: Option<Bandwidth>,
    handle: Handle,
}

/// Where the bytes come from.
enum ByteSource {
    /// A transfer in the background.
    Transfer {
        chunks: mpsc::Receiver<Result<Chunk>>,
        task: JoinHandle<()>,
    },
    /// A file in a local folder. It is opened at the first read.
    Unopened(Opening),
    /// A file, and the number of bytes that are still to come.
    File(File, u64),
}

struct Chunk {
    bytes: Vec<Bytes>,
    permit: Option<OwnedSemaphorePermit>,
}

/// Returns the error for an object that ends too early.
pub(super) fn cut_short(name: &str, read: u64, size: u64) -> Error {
    Reason::StoreUnreachable.error(format!(
        "{name} ended after {read} of {size} bytes: run again; if it stays so, check the store"
    ))
}

fn failed(name: &str, e: object_store::Error) -> Error {
    match e {
        object_store::Error::NotFound { .. } => Reason::SnapshotVanished.error(format!(
            "{name} was listed and is gone: it was deleted meanwhile; run again"
        )),
        object_store::Error::Precondition { .. } => changed(name),
        e => store_error(format!("read {name}"), e),
    }
}

fn changed(name: &str) -> Error {
    Reason::SnapshotVanished.error(format!("{name} was replaced while it was read: run again"))
}

/// How an object is opened: if it is a snapshot, a tag may exclude it.
#[derive(Clone)]
struct Opening {
    store: Arc<dyn ObjectStore>,
    path: Path,
    /// For messages.
    name: String,
    tags: Option<ExcludeTags>,
}

impl Opening {
    /// Opens the whole object.
    async fn whole(&self) -> Result<GetResult> {
        let opened = self.store.get(&self.path).await;
        let opened = opened.map_err(|e| failed(&self.name, e))?;
        self.unless_excluded(opened).await
    }

    /// Returns the response that opened an object.
    ///
    /// # Errors
    /// One that sets the object aside if a tag excludes it; those of the store.
    async fn unless_excluded(&self, opened: GetResult) -> Result<GetResult> {
        let Some(tags) = &self.tags else {
            return Ok(opened);
        };
        let is_excluded = match tags.told_by(&opened) {
            Some(is_excluded) => is_excluded,
            None => tags.is_excluded(&self.store, &self.path).await?,
        };
        if is_excluded {
            Err(Error::excluded(self.name.clone()))
        } else {
            Ok(opened)
        }
    }
}

/// Reads an object of `bytes` bytes by a listing. If it is a snapshot, one that a tag excludes is refused.
pub(super) fn fetch(store: &Store, below: &str, bytes: u64, is_snapshot: bool) -> ObjectReader {
    let name = store.name(below);
    let opening = Opening {
        store: Arc::clone(&store.inner),
        path: store.path(below),
        name: name.clone(),
        tags: is_snapshot.then(|| store.tags.clone()),
    };
    let source = match store.local_root {
        Some(_) => ByteSource::Unopened(opening),
        None => {
            let ranges = store.ranges.clone().filter(|_| is_large(bytes));
            // A transfer by ranges never waits for the channel: each range has a place.
            let ahead = match &ranges {
                None => CHUNKS_AHEAD,
                Some(_) => 1 + RANGES_AHEAD,
            };
            ByteSource::transfer(&store.handle, ahead, async move |chunks| match ranges {
                None => {
                    let object = opening.whole().await?;
                    let size = object.meta.size;
                    send_stream(size, object.into_stream(), &opening.name, &chunks).await
                }
                Some(ranges) => send_ranges(&opening, &ranges, &chunks).await,
            })
        }
    };
    ObjectReader {
        source,
        current: VecDeque::new(),
        permit: None,
        name,
        bytes_read: Arc::clone(&store.bytes_read),
        cancel: store.cancel.clone(),
        bandwidth: store.bandwidth.as_ref().map(|(read, _)| read.clone()),
        handle: store.handle.clone(),
    }
}

type ChunkSender = mpsc::Sender<Result<Chunk>>;

/// The result of a transfer whose reader is gone: nobody misses the rest.
const READER_GONE: Result<()> = Ok(());

/// Sends the bytes of one response in chunks.
async fn send_stream(
    size: u64,
    mut stream: BoxStream<'static, object_store::Result<Bytes>>,
    name: &str,
    chunks: &ChunkSender,
) -> Result<()> {
    let mut sent = 0;
    loop {
        let (mut bytes, mut length) = (Vec::new(), 0);
        let mut end = None;
        while length < CHUNK && end.is_none() {
            match stream.next().await {
                None => end = Some(Ok(())),
                // If a local file is truncated meanwhile, the crate returns empty pieces forever.
                Some(Ok(piece)) if piece.is_empty() => end = Some(Ok(())),
                Some(Ok(piece)) => {
                    length += piece.len();
                    bytes.push(piece);
                }
                Some(Err(e)) => end = Some(Err(failed(name, e))),
            }
        }
        sent += length as u64;
        if sent > size {
            return Err(cut_short(name, sent, size));
        }
        let chunk = Chunk {
            bytes,
            permit: None,
        };
        if length > 0 && chunks.send(Ok(chunk)).await.is_err() {
            return READER_GONE;
        }
        match end {
            None => {}
            Some(Ok(())) if sent != size => return Err(cut_short(name, sent, size)),
            Some(end) => return end,
        }
    }
}

/// Sends an object by ranges, several of them at a time. All must be of the same version of the object.
async fn send_ranges(
    opening: &Opening,
    shared: &Arc<Semaphore>,
    chunks: &ChunkSender,
) -> Result<()> {
    let name = opening.name.as_str();
    // One permit of its own: otherwise readers that wait for each other could take all shared ones.
    let own = Arc::new(Semaphore::new(1));
    let permit = acquire_permit(&own, shared, 1).await?;
    let first = match RangeResponse::request(opening, 0..RANGE, None).await {
        Err(e) if e.to_string().contains(NO_RANGE) => {
            let object = opening.whole().await?;
            return send_stream(object.meta.size, object.into_stream(), name, chunks).await;
        }
        first => first?,
    };
    let first = RangeResponse {
        response: opening.unless_excluded(first.response).await?,
        ..first
    };
    let meta = first.response.meta.clone();
    let mut under_way = FuturesOrdered::new();
    // Begin the other ranges before the bytes of the first have come.
    under_way.push_back(first.chunk(name, permit).boxed());
    let mut next = RANGE;
    loop {
        tokio::select! {
            permit = acquire_permit(&own, shared, 1), if next < meta.size => {
                let (permit, meta) = (permit?, &meta);
                let range = next..meta.size.min(next + RANGE);
                next = range.end;
                let fetched = async move {
                    let response = RangeResponse::request(opening, range, Some(meta)).await?;
                    response.chunk(name, permit).await
                };
                under_way.push_back(fetched.boxed());
            }
            Some(chunk) = under_way.next() => {
                if chunks.send(Ok(chunk?)).await.is_err() {
                    return READER_GONE;
                }
            }
            else => return Ok(()),
        }
    }
}

/// Waits for a permit: the one of `own`, or `count` of those that all share.
pub(super) async fn acquire_permit(
    own: &Arc<Semaphore>,
    shared: &Arc<Semaphore>,
    count: u32,
) -> Result<OwnedSemaphorePermit> {
    let (own, shared) = (Arc::clone(own), Arc::clone(shared));
    let permit = tokio::select! {
        biased;
        permit = own.acquire_owned() => permit,
        permit = shared.acquire_many_owned(count) => permit,
    };
    permit.map_err(|e| Error::internal(format!("cannot get a permit for a transfer: {e}")))
}

/// The response to a request for a range, before its bytes are read.
struct RangeResponse {
    range: Range<u64>,
    response: GetResult,
}

impl RangeResponse {
    /// Requests a range. `first` is the metadata of another range: both must be of the same version.
    async fn request(
        opening: &Opening,
        range: Range<u64>,
        first: Option<&ObjectMeta>,
    ) -> Result<Self> {
        let options = GetOptions {
            range: Some(GetRange::Bounded(range.clone())),
            if_match: first.and_then(|f| f.e_tag.clone()),
            ..GetOptions::default()
        };
        let response = opening.store.get_opts(&opening.path, options).await;
        let response = response.map_err(|e| failed(&opening.name, e))?;
        // The store may ignore the condition.
        let version = |m: &ObjectMeta| (m.size, m.e_tag.clone(), m.last_modified);
        if first.is_some_and(|f| version(f) != version(&response.meta)) {
            return Err(changed(&opening.name));
        }
        Ok(RangeResponse { range, response })
    }

    /// Reads the bytes. The range may reach beyond the object's end.
    async fn chunk(self, name: &str, permit: OwnedSemaphorePermit) -> Result<Chunk> {
        let size = self.response.meta.size;
        let (begin, end) = (self.range.start, self.range.end.min(size));
        let mut stream = self.response.into_stream().map_err(|e| failed(name, e));
        let (mut bytes, mut length): (Vec<Bytes>, u64) = (Vec::new(), 0);
        // Stop if the server sends more than was requested.
        while begin + length <= end
            && let Some(piece) = stream.try_next().await?
        {
            length += piece.len() as u64;
            bytes.push(piece);
        }
        let permit = Some(permit);
        if begin + length == end {
            Ok(Chunk { bytes, permit })
        } else {
            Err(cut_short(name, begin + length, size))
        }
    }
}

impl ByteSource {
    /// Starts a transfer in the background. At most `ahead` chunks wait for the reader.
    fn transfer<F: Future<Output = Result<()>> + Send + 'static>(
        handle: &Handle,
        ahead: usize,
        work: impl FnOnce(ChunkSender) -> F,
    ) -> ByteSource {
        let (sender, chunks) = mpsc::channel(ahead);
        let error_sender = sender.clone();
        let work = work(sender);
        let task = handle.spawn(async move {
            if let Err(e) = work.await {
                let _ = error_sender.send(Err(e)).await;
            }
        });
        ByteSource::Transfer { chunks, task }
    }
}

impl Read for ObjectReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.read_some(out)?;
        if let Some(bandwidth) = &self.bandwidth {
            bandwidth.take(n as u64, &self.cancel)?;
        }
        Ok(n)
    }
}

impl ObjectReader {
    fn read_some(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(bytes) = self.current.front_mut() {
                let n = bytes.len().min(out.len());
                bytes.copy_to_slice(&mut out[..n]);
                if bytes.is_empty() {
                    self.current.pop_front();
                }
                return Ok(n);
            }
            self.permit = None;
            match &mut self.source {
                ByteSource::File(file, left) => {
                    self.cancel.check()?;
                    let n = read_file(file, left, &self.name, out)?;
                    self.bytes_read.fetch_add(n as u64, Ordering::Relaxed);
                    return Ok(n);
                }
                ByteSource::Unopened(opening) => {
                    let object = self.cancel.or(opening.whole());
                    let object = futures::executor::block_on(object)??;
                    self.source = self.opened(object);
                }
                ByteSource::Transfer { chunks, .. } => {
                    match self.handle.block_on(self.cancel.or(chunks.recv()))? {
                        Some(chunk) => self.set_current(chunk?),
                        None => return Ok(0),
                    }
                }
            }
        }
    }

    fn opened(&self, object: GetResult) -> ByteSource {
        let size = object.meta.size;
        match object.payload {
            GetResultPayload::File(file, _) => ByteSource::File(file, size),
            GetResultPayload::Stream(stream) => {
                let name = self.name.clone();
                ByteSource::transfer(&self.handle, CHUNKS_AHEAD, async move |chunks| {
                    send_stream(size, stream, &name, &chunks).await
                })
            }
        }
    }

    fn set_current(&mut self, chunk: Chunk) {
        let n: usize = chunk.bytes.iter().map(Bytes::len).sum();
        self.bytes_read.fetch_add(n as u64, Ordering::Relaxed);
        // An empty piece would look like the end of the object.
        self.current = chunk.bytes.into_iter().filter(|b| !b.is_empty()).collect();
        self.permit = chunk.permit;
    }
}

/// Reads a local file. `left` is the number of bytes that are still to come.
fn read_file(file: &mut File, left: &mut u64, name: &str, out: &mut [u8]) -> io::Result<usize> {
    let failed = |e| Error::io(format!("read {name}"), e);
    let n = file.read(out).map_err(failed)?;
    if n == 0 && *left > 0 && !out.is_empty() {
        let size = file.metadata().map_err(failed)?.len();
        return Err(cut_short(name, size, size + *left).into());
    }
    *left = left.saturating_sub(n as u64);
    Ok(n)
}

impl Drop for ObjectReader {
    fn drop(&mut self) {
        if let ByteSource::Transfer { task, .. } = &self.source {
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_for_more_than_all_shared_permits_takes_the_own_one() {
        let (own, shared) = (Arc::new(Semaphore::new(1)), Arc::new(Semaphore::new(4)));
        let permit = |bytes| acquire_permit(&own, &shared, bytes).now_or_never();
        let first = permit(5).unwrap().unwrap();
        assert!(permit(5).is_none());
        let _second = permit(4).unwrap().unwrap();
        assert!(permit(1).is_none());
        drop(first);
        assert!(permit(5).is_some());
    }
}
