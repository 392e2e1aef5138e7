//! A member's own snapshot, as a blocking `Read`: the database file, then 32 bytes of SHA-256 over it.
//!
//! That is etcd's Maintenance.Snapshot as it comes; what it holds and whether the hash is right, others see
//! to. `ops::snapshot` calls it.

use crate::error::{Error, Reason};
use crate::etcd::connect::{Connector, Failed, Streams};
use std::io::{self, Read};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Messages that wait to be read, of 32 KiB each; the stream stops until there is room.
const MESSAGES_AHEAD: usize = 64;
/// No byte for this long is a failure; the whole stream may take as long as it needs.
const PATIENCE: Duration = Duration::from_secs(60);

/// A stream under way. Dropping it ends it.
pub struct SnapshotReader {
    messages: mpsc::Receiver<Result<Vec<u8>, Error>>,
    current: Vec<u8>,
    at: usize,
    way: Connector,
    pump: JoinHandle<()>,
}

impl SnapshotReader {
    /// Asks the member at `endpoint` for a snapshot. Failures on the way come from `read`.
    ///
    /// # Errors
    /// Those of connecting.
    pub fn open(way: &Connector, endpoint: &str) -> Result<Self, Failed> {
        let client = way.dial(endpoint, Streams::Plain)?;
        let mut maintenance = client.maintenance_client();
        let mut stream = way.ask("take a snapshot", endpoint, maintenance.snapshot())?;
        let (send, messages) = mpsc::channel(MESSAGES_AHEAD);
        let (at, failing) = (endpoint.to_owned(), way.clone());
        let pump = way.handle().spawn(async move {
            loop {
                let message = match tokio::time::timeout(PATIENCE, stream.message()).await {
                    Ok(Ok(Some(message))) => Ok(message.0.blob),
                    Ok(Ok(None)) => return,
                    Ok(Err(e)) => Err(failing.failure("take a snapshot", &at, e).into_error()),
                    Err(_) => Err(Reason::EtcdUnreachable.error(format!(
                        "take a snapshot at {at}: nothing came for {} s",
                        PATIENCE.as_secs()
                    ))),
                };
                let end = message.is_err();
                if send.send(message).await.is_err() || end {
                    return;
                }
            }
        });
        Ok(SnapshotReader {
            messages,
            current: Vec::new(),
            at: 0,
            way: way.clone(),
            pump,
        })
    }
}

impl Read for SnapshotReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.at == self.current.len() {
            match self.way.wait(self.messages.recv()) {
                Ok(Some(Ok(message))) => (self.current, self.at) = (message, 0),
                Ok(Some(Err(e))) => return Err(e.into()),
                Ok(None) => return Ok(0),
                Err(f) => return Err(f.into_error().into()),
            }
        }
        let n = out.len().min(self.current.len() - self.at);
        out[..n].copy_from_slice(&self.current[self.at..self.at + n]);
        self.at += n;
        Ok(n)
    }
}

impl Drop for SnapshotReader {
    fn drop(&mut self) {
        self.pump.abort();
    }
}
