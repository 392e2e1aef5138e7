//! Streams an object: an async transfer behind a blocking `Read`.
//!
//! A large object comes by several ranges at once, in order; a local file is opened and read in place.

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

/// Chunks that wait to be read; the transfer stops until there is room.
const CHUNKS_AHEAD: usize = 3;
/// Bytes that make a chunk; the last one has fewer.
const CHUNK: usize = 256 << 10;

/// Bytes of a range. Small ones pay: so many bytes in memory are more streams then.
const RANGE: u64 = 2 << 20;
/// An object of fewer bytes comes by one request.
const LARGE: u64 = 16 << 20;
/// Whether an object of so many bytes comes by several ranges at once, if the store has them.
pub fn is_large(bytes: u64) -> bool {
    bytes >= LARGE
}

/// Ranges under way or unread, beside one of each object that is being read: of all objects of a store together.
pub(super) const RANGES_AHEAD: usize = 15;

/// The bytes of an object. The transfer starts at once and goes on by itself; dropping this ends
/// it.
pub struct ObjectReader {
    source: Source,
    current: VecDeque<Bytes>,
    /// What `current` takes of the ranges.
    range: Option<OwnedSemaphorePermit>,
    name: String,
    bytes_read: Arc<AtomicU64>,
    cancel: Cancel,
    bandwidth: Option<Bandwidth>,
    handle: Handle,
}

/// Where the bytes come from.
enum Source {
    Transfer {
        chunks: mpsc::Receiver<Result<Chunk>>,
        task: JoinHandle<()>,
    },
    /// Of a local folder: opened where it is read.
    Unopened(Arc<dyn ObjectStore>, Path),
    /// With the bytes still to come.
    File(File, u64),
}

struct Chunk {
    bytes: Vec<Bytes>,
    range: Option<OwnedSemaphorePermit>,
}

pub(super) fn cut_short(name: &str, got: u64, size: u64) -> Error {
    Reason::StoreUnreachable.error(format!(
        "{name} ended after {got} of {size} bytes: run again; if it stays so, check the store"
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
    Reason::SnapshotVanished.error(format!(
        "{name} was written anew while it was read: run again"
    ))
}

impl Store {
    /// Starts to fetch an object.
    pub fn read(&self, below: &str) -> ObjectReader {
        self.fetch(below, 0)
    }

    /// Starts to fetch an object of about so many bytes; a large one by several ranges at once.
    pub fn fetch(&self, below: &str, bytes: u64) -> ObjectReader {
        if let Some(begun) = self.take_begun(below) {
            return begun;
        }
        let (store, path) = (Arc::clone(&self.inner), self.path(below));
        let name = self.name(below);
        let source = match self.local_root {
            Some(_) => Source::Unopened(store, path),
            None => {
                let ranges = self.ranges.clone().filter(|_| is_large(bytes));
                let shown = name.clone();
                // Who sends ranges never waits: each of them has its room.
                let ahead = match &ranges {
                    None => CHUNKS_AHEAD,
                    Some(_) => 1 + RANGES_AHEAD,
                };
                Source::transfer(&self.handle, ahead, async move |send| match ranges {
                    None => match store.get(&path).await {
                        Ok(object) => {
                            pump(object.meta.size, object.into_stream(), &shown, &send).await
                        }
                        Err(e) => Err(failed(&shown, e)),
                    },
                    Some(ranges) => by_ranges(&*store, &path, &shown, &ranges, &send).await,
                })
            }
        };
        ObjectReader {
            source,
            current: VecDeque::new(),
            range: None,
            name,
            bytes_read: Arc::clone(&self.bytes_read),
            cancel: self.cancel.clone(),
            bandwidth: self.bandwidth.as_ref().map(|(read, _)| read.clone()),
            handle: self.handle.clone(),
        }
    }
}

type Chunks = mpsc::Sender<Result<Chunk>>;

/// Whoever no longer listens does not miss what is sent.
const NOBODY_LISTENS: Result<()> = Ok(());

/// Hands a stream over in chunks.
async fn pump(
    size: u64,
    mut stream: BoxStream<'static, object_store::Result<Bytes>>,
    name: &str,
    send: &Chunks,
) -> Result<()> {
    let mut got = 0;
    loop {
        let (mut bytes, mut held) = (Vec::new(), 0);
        let mut ended = None;
        while held < CHUNK && ended.is_none() {
            match stream.next().await {
                // Of a local file that is cut short meanwhile object_store reads nothing, for ever.
                None => ended = Some(Ok(())),
                Some(Ok(more)) if more.is_empty() => ended = Some(Ok(())),
                Some(Ok(more)) => {
                    held += more.len();
                    bytes.push(more);
                }
                Some(Err(e)) => ended = Some(Err(failed(name, e))),
            }
        }
        got += held as u64;
        if got > size {
            return Err(cut_short(name, got, size));
        }
        let chunk = Chunk { bytes, range: None };
        if held > 0 && send.send(Ok(chunk)).await.is_err() {
            return NOBODY_LISTENS;
        }
        match ended {
            None => {}
            Some(Ok(())) if got != size => return Err(cut_short(name, got, size)),
            Some(end) => return end,
        }
    }
}

/// Hands an object over by ranges, of which several come at once. All are of the same version of it.
async fn by_ranges(
    store: &dyn ObjectStore,
    path: &Path,
    name: &str,
    shared: &Arc<Semaphore>,
    send: &Chunks,
) -> Result<()> {
    // Room for one: otherwise readers that wait for each other could take all.
    let own = Arc::new(Semaphore::new(1));
    let room = wait_for_room(&own, shared, 1).await?;
    let first = Part::begin(store, path, name, 0..RANGE, None).await?;
    let meta = first.got.meta.clone();
    let mut under_way = FuturesOrdered::new();
    // The others need not wait for its bytes.
    under_way.push_back(first.chunk(name, room).boxed());
    let mut next = RANGE;
    loop {
        tokio::select! {
            room = wait_for_room(&own, shared, 1), if next < meta.size => {
                let (room, meta) = (room?, &meta);
                let wanted = next..meta.size.min(next + RANGE);
                next = wanted.end;
                let fetched = async move {
                    let part = Part::begin(store, path, name, wanted, Some(meta)).await?;
                    part.chunk(name, room).await
                };
                under_way.push_back(fetched.boxed());
            }
            Some(chunk) = under_way.next() => {
                if send.send(Ok(chunk?)).await.is_err() {
                    return NOBODY_LISTENS;
                }
            }
            else => return Ok(()),
        }
    }
}

/// Waits for room, one's own or what all share.
pub(super) async fn wait_for_room(
    own: &Arc<Semaphore>,
    shared: &Arc<Semaphore>,
    of_shared: u32,
) -> Result<OwnedSemaphorePermit> {
    let (own, shared) = (Arc::clone(own), Arc::clone(shared));
    let room = tokio::select! {
        biased;
        room = own.acquire_owned() => room,
        room = shared.acquire_many_owned(of_shared) => room,
    };
    room.map_err(|e| Error::internal(format!("room for a transfer: {e}")))
}

/// A range of an object, whose bytes are still to come.
struct Part {
    wanted: Range<u64>,
    got: GetResult,
}

impl Part {
    /// Asks for it. `first` is what another range was of.
    async fn begin(
        store: &dyn ObjectStore,
        path: &Path,
        name: &str,
        wanted: Range<u64>,
        first: Option<&ObjectMeta>,
    ) -> Result<Self> {
        let options = GetOptions {
            range: Some(GetRange::Bounded(wanted.clone())),
            if_match: first.and_then(|f| f.e_tag.clone()),
            ..GetOptions::default()
        };
        let got = store.get_opts(path, options).await;
        let got = got.map_err(|e| failed(name, e))?;
        // A store may heed no condition.
        let version = |m: &ObjectMeta| (m.size, m.e_tag.clone(), m.last_modified);
        if first.is_some_and(|f| version(f) != version(&got.meta)) {
            return Err(changed(name));
        }
        Ok(Part { wanted, got })
    }

    /// Its bytes, less what is behind the object's end.
    async fn chunk(self, name: &str, room: OwnedSemaphorePermit) -> Result<Chunk> {
        let size = self.got.meta.size;
        let (begin, end) = (self.wanted.start, self.wanted.end.min(size));
        let mut stream = self.got.into_stream().map_err(|e| failed(name, e));
        let (mut bytes, mut len): (Vec<Bytes>, u64) = (Vec::new(), 0);
        // A server may send more than it was asked for.
        while begin + len <= end
            && let Some(more) = stream.try_next().await?
        {
            len += more.len() as u64;
            bytes.push(more);
        }
        let range = Some(room);
        match begin + len == end {
            true => Ok(Chunk { bytes, range }),
            false => Err(cut_short(name, begin + len, size)),
        }
    }
}

impl Source {
    /// A transfer that goes on by itself, with so many chunks ahead of the reader.
    fn transfer<F: Future<Output = Result<()>> + Send + 'static>(
        handle: &Handle,
        ahead: usize,
        work: impl FnOnce(Chunks) -> F,
    ) -> Source {
        let (send, chunks) = mpsc::channel(ahead);
        let end = send.clone();
        let work = work(send);
        let task = handle.spawn(async move {
            if let Err(e) = work.await {
                let _ = end.send(Err(e)).await;
            }
        });
        Source::Transfer { chunks, task }
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
            self.range = None;
            match &mut self.source {
                Source::File(file, left) => {
                    self.cancel.check()?;
                    let n = read_file(file, left, &self.name, out)?;
                    self.bytes_read.fetch_add(n as u64, Ordering::Relaxed);
                    return Ok(n);
                }
                Source::Unopened(store, path) => {
                    let got = futures::executor::block_on(self.cancel.or(store.get(path)))?;
                    let object = got.map_err(|e| failed(&self.name, e))?;
                    let size = object.meta.size;
                    self.source = match object.payload {
                        GetResultPayload::File(file, _) => Source::File(file, size),
                        GetResultPayload::Stream(stream) => {
                            let name = self.name.clone();
                            Source::transfer(&self.handle, CHUNKS_AHEAD, async move |send| {
                                pump(size, stream, &name, &send).await
                            })
                        }
                    };
                }
                Source::Transfer { chunks, .. } => {
                    match self.handle.block_on(self.cancel.or(chunks.recv()))? {
                        Some(Ok(chunk)) => {
                            let n: usize = chunk.bytes.iter().map(Bytes::len).sum();
                            self.bytes_read.fetch_add(n as u64, Ordering::Relaxed);
                            // An empty piece would look like the end.
                            let bytes = chunk.bytes.into_iter().filter(|b| !b.is_empty());
                            self.current = bytes.collect();
                            self.range = chunk.range;
                        }
                        Some(Err(e)) => return Err(e.into()),
                        None => return Ok(0),
                    }
                }
            }
        }
    }
}

/// Reads a local file; `left` are the bytes that it must still have.
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
        if let Source::Transfer { task, .. } = &self.source {
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_all_share_has_room_of_its_own() {
        let (own, shared) = (Arc::new(Semaphore::new(1)), Arc::new(Semaphore::new(4)));
        let room = |bytes| wait_for_room(&own, &shared, bytes).now_or_never();
        let first = room(5).unwrap().unwrap();
        assert!(room(5).is_none());
        let _second = room(4).unwrap().unwrap();
        assert!(room(1).is_none());
        drop(first);
        assert!(room(5).is_some());
    }
}
