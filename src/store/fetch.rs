//! Streams an object: an async transfer behind a blocking `Read`.

use super::{Cancel, Store, store_error};
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
const CHUNKS_AHEAD: usize = 16;

/// The bytes of an object. The transfer starts at once and goes on by itself; dropping this ends
/// it.
pub struct ObjectReader {
    chunks: mpsc::Receiver<Result<Chunk>>,
    current: Bytes,
    /// Of a local folder.
    file: Option<File>,
    name: String,
    transfer: JoinHandle<()>,
    bytes_read: Arc<AtomicU64>,
    cancel: Cancel,
    handle: Handle,
}

enum Chunk {
    Bytes(Bytes),
    /// All there is: reading it needs no transfer.
    File(File),
}

impl Store {
    /// Starts to fetch an object.
    pub fn read(&self, below: &str) -> ObjectReader {
        let (send, chunks) = mpsc::channel(CHUNKS_AHEAD);
        let (store, path) = (Arc::clone(&self.inner), self.path(below));
        let name = self.name(below);
        let shown = name.clone();
        let transfer = self.handle.spawn(async move {
            let failed = |e| match e {
                object_store::Error::NotFound { .. } => Error::new(
                    Reason::SnapshotVanished,
                    format!("{shown} was listed and is gone: it was deleted meanwhile; run again"),
                ),
                e => store_error(format!("read {shown}"), e),
            };
            // Whoever no longer listens does not miss what is sent.
            let mut stream = match store.get(&path).await {
                Ok(object) => match object.payload {
                    GetResultPayload::File(file, _) => {
                        let _ = send.send(Ok(Chunk::File(file))).await;
                        return;
                    }
                    GetResultPayload::Stream(stream) => stream,
                },
                Err(e) => {
                    let _ = send.send(Err(failed(e))).await;
                    return;
                }
            };
            while let Some(chunk) = stream.next().await {
                let end = chunk.is_err();
                let chunk = chunk.map(Chunk::Bytes).map_err(failed);
                if send.send(chunk).await.is_err() || end {
                    return;
                }
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
            handle: self.handle.clone(),
        }
    }
}

impl Read for ObjectReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(file) = &mut self.file {
                self.cancel.check()?;
                let n = file
                    .read(out)
                    .map_err(|e| Error::io(format!("read {}", self.name), e))?;
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
                Some(Ok(Chunk::File(file))) => self.file = Some(file),
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
