//! Streams an object: an async transfer behind a blocking `Read`.

use super::{Cancel, Store, store_error};
use crate::error::{Error, Reason, Result};
use bytes::{Buf, Bytes};
use futures::StreamExt;
use object_store::ObjectStoreExt;
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
    chunks: mpsc::Receiver<Result<Bytes>>,
    current: Bytes,
    transfer: JoinHandle<()>,
    bytes_read: Arc<AtomicU64>,
    cancel: Cancel,
    handle: Handle,
}

impl Store {
    /// Starts to fetch an object.
    pub fn read(&self, below: &str) -> ObjectReader {
        let (send, chunks) = mpsc::channel(CHUNKS_AHEAD);
        let (store, path) = (Arc::clone(&self.inner), self.path(below));
        let name = self.name(below);
        let transfer = self.handle.spawn(async move {
            let failed = |e| match e {
                object_store::Error::NotFound { .. } => Error::new(
                    Reason::SnapshotVanished,
                    format!("{name} was listed and is gone: it was deleted meanwhile; run again"),
                ),
                e => store_error(format!("read {name}"), e),
            };
            let (size, mut stream) = match store.get(&path).await {
                Ok(object) => (object.meta.size, object.into_stream()),
                Err(e) => {
                    // Whoever no longer listens does not miss it.
                    let _ = send.send(Err(failed(e))).await;
                    return;
                }
            };
            let mut got = 0;
            while let Some(chunk) = stream.next().await {
                let end = match &chunk {
                    // Of a local file that is cut short meanwhile object_store reads nothing, for ever.
                    Ok(bytes) if bytes.is_empty() => break,
                    Ok(bytes) => {
                        got += bytes.len() as u64;
                        false
                    }
                    Err(_) => true,
                };
                if send.send(chunk.map_err(failed)).await.is_err() || end {
                    return;
                }
            }
            if got != size {
                let e = Error::new(
                    Reason::StoreUnreachable,
                    format!("{name} ended after {got} of {size} bytes: run again; if it stays so, check the store"),
                );
                let _ = send.send(Err(e)).await;
            }
        });
        ObjectReader {
            chunks,
            current: Bytes::new(),
            transfer,
            bytes_read: Arc::clone(&self.bytes_read),
            cancel: self.cancel.clone(),
            handle: self.handle.clone(),
        }
    }
}

impl Read for ObjectReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() {
            let next = self.handle.block_on(self.cancel.or(self.chunks.recv()))?;
            match next {
                Some(Ok(chunk)) => {
                    self.bytes_read
                        .fetch_add(chunk.len() as u64, Ordering::Relaxed);
                    self.current = chunk;
                }
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
