//! Streams an object: an async transfer behind a blocking `Read`.

use super::{Bandwidth, Cancel, Store, store_error};
use crate::error::{Error, Reason, Result};
use bytes::{Buf, Bytes};
use futures::StreamExt;
use object_store::{GetResultPayload, ObjectStoreExt};
use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Chunks that wait to be read; the transfer stops until there is room.
const CHUNKS_AHEAD: usize = 4;

/// The bytes of an object. The transfer starts at once and goes on by itself; dropping this ends
/// it.
pub struct ObjectReader {
    chunks: mpsc::Receiver<Result<Chunk>>,
    current: Bytes,
    /// Of a local folder, with the bytes still to come.
    file: Option<(File, u64)>,
    name: String,
    transfer: JoinHandle<()>,
    bytes_read: Arc<AtomicU64>,
    cancel: Cancel,
    bandwidth: Option<Bandwidth>,
    handle: Handle,
}

enum Chunk {
    Bytes(Bytes),
    /// All there is, and its size: reading it needs no transfer.
    File(File, u64),
}

pub(super) fn cut_short(name: &str, got: u64, size: u64) -> Error {
    Error::new(
        Reason::StoreUnreachable,
        format!(
            "{name} ended after {got} of {size} bytes: run again; if it stays so, check the store"
        ),
    )
}

impl Store {
    /// Starts to fetch an object.
    pub fn read(&self, below: &str) -> ObjectReader {
        let (send, chunks) = mpsc::channel(CHUNKS_AHEAD);
        let (store, path) = (Arc::clone(&self.inner), self.path(below));
        let name = self.name(below);
        let shown = name.clone();
        let transfer = self.handle.spawn(async move {
            let failed = |e: object_store::Error| match e {
                object_store::Error::NotFound { .. } => Error::new(
                    Reason::SnapshotVanished,
                    format!("{shown} was listed and is gone: it was deleted meanwhile; run again"),
                ),
                e => store_error(format!("read {shown}"), e),
            };
            // Whoever no longer listens does not miss what is sent.
            let (size, mut stream) = match store.get(&path).await {
                Ok(object) => match object.payload {
                    GetResultPayload::File(file, _) => {
                        let _ = send.send(Ok(Chunk::File(file, object.meta.size))).await;
                        return;
                    }
                    GetResultPayload::Stream(stream) => (object.meta.size, stream),
                },
                Err(e) => {
                    let _ = send.send(Err(failed(e))).await;
                    return;
                }
            };
            let mut got = 0;
            while let Some(chunk) = stream.next().await {
                // Of a local file that is cut short meanwhile object_store reads nothing, for ever.
                if chunk.as_ref().is_ok_and(Bytes::is_empty) {
                    break;
                }
                let end = chunk.is_err();
                got += chunk.as_ref().map_or(0, |bytes| bytes.len() as u64);
                let chunk = chunk.map(Chunk::Bytes).map_err(failed);
                if send.send(chunk).await.is_err() || end {
                    return;
                }
            }
            if got != size {
                let _ = send.send(Err(cut_short(&shown, got, size))).await;
            }
        });
        ObjectReader {
            chunks,
            current: Bytes::new(),
            file: None,
            name,
            transfer,
            bytes_read: Arc::clone(&self.bytes_read),
            cancel: self.cancel.clone(),
            bandwidth: self.bandwidth.as_ref().map(|(read, _)| read.clone()),
            handle: self.handle.clone(),
        }
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
            if let Some((file, left)) = &mut self.file {
                self.cancel.check()?;
                let n = file
                    .read(out)
                    .map_err(|e| Error::io(format!("read {}", self.name), e))?;
                if n == 0 && *left > 0 && !out.is_empty() {
                    let size = file
                        .metadata()
                        .map_err(|e| Error::io(format!("read {}", self.name), e))?
                        .len();
                    return Err(cut_short(&self.name, size, size + *left).into());
                }
                *left = left.saturating_sub(n as u64);
                self.bytes_read.fetch_add(n as u64, Ordering::Relaxed);
                return Ok(n);
            }
            if !self.current.is_empty() {
                break;
            }
            let next = self.handle.block_on(self.cancel.or(self.chunks.recv()))?;
            match next {
                Some(Ok(Chunk::Bytes(chunk))) => {
                    self.bytes_read
                        .fetch_add(chunk.len() as u64, Ordering::Relaxed);
                    self.current = chunk;
                }
                Some(Ok(Chunk::File(file, size))) => self.file = Some((file, size)),
                Some(Err(e)) => return Err(e.into()),
                None => return Ok(0),
            }
        }
        let n = self.current.len().min(out.len());
        self.current.copy_to_slice(&mut out[..n]);
        Ok(n)
    }
}

impl Drop for ObjectReader {
    fn drop(&mut self) {
        self.transfer.abort();
    }
}
