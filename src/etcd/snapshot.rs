//! Streams a snapshot of a member (etcd's Maintenance.Snapshot) as a blocking `Read`: the database file, then
//! 32 bytes of SHA-256 over it.
//!
//! It checks neither the content nor the hash.

use crate::error::{Error, Reason};
use crate::etcd::connect::{AttemptError, Connector, Streams};
use etcd_client::SnapshotStreaming;
use std::io::{self, Read};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// The maximum number of received messages (32 KiB each) that wait to be read.
const MESSAGES_AHEAD: usize = 64;
/// The maximum time between two messages. The whole stream may take any time.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// The name of the request in messages.
const OPERATION: &str = "take a snapshot";

/// The reader of a snapshot. Dropping it ends the stream.
pub struct SnapshotReader {
    messages: mpsc::Receiver<Result<Vec<u8>, Error>>,
    /// The current message, and how much of it was read.
    current: Vec<u8>,
    position: usize,
    connector: Connector,
    receiver: JoinHandle<()>,
}

impl SnapshotReader {
    /// Requests a snapshot from the member at `endpoint`. Later failures are returned by `read`.
    ///
    /// # Errors
    /// As [`Connector::dial`].
    pub fn open(connector: &Connector, endpoint: &str) -> Result<Self, AttemptError> {
        let client = connector.dial(endpoint, Streams::Plain)?;
        let mut maintenance = client.maintenance_client();
        let stream = connector.ask(OPERATION, endpoint, maintenance.snapshot())?;
        let (sender, messages) = mpsc::channel(MESSAGES_AHEAD);
        let receiver = connector.handle().spawn(receive(
            stream,
            sender,
            connector.clone(),
            endpoint.to_owned(),
        ));
        Ok(SnapshotReader {
            messages,
            current: Vec::new(),
            position: 0,
            connector: connector.clone(),
            receiver,
        })
    }
}

/// Passes the messages of a snapshot stream on, until it ends, fails, or nobody reads any more.
async fn receive(
    mut stream: SnapshotStreaming,
    sender: mpsc::Sender<Result<Vec<u8>, Error>>,
    connector: Connector,
    endpoint: String,
) {
    loop {
        let message = match tokio::time::timeout(IDLE_TIMEOUT, stream.message()).await {
            Ok(Ok(Some(message))) => Ok(message.0.blob),
            Ok(Ok(None)) => return,
            Ok(Err(e)) => Err(connector.failure(OPERATION, &endpoint, e).into_error()),
            Err(_) => Err(Reason::EtcdUnreachable.error(format!(
                "{OPERATION} at {endpoint}: no data for {} s",
                IDLE_TIMEOUT.as_secs()
            ))),
        };
        let failed = message.is_err();
        if sender.send(message).await.is_err() || failed {
            return;
        }
    }
}

impl Read for SnapshotReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.position == self.current.len() {
            match self.connector.wait(self.messages.recv()) {
                Ok(Some(Ok(message))) => (self.current, self.position) = (message, 0),
                Ok(Some(Err(e))) => return Err(e.into()),
                Ok(None) => return Ok(0),
                Err(f) => return Err(f.into_error().into()),
            }
        }
        let n = out.len().min(self.current.len() - self.position);
        out[..n].copy_from_slice(&self.current[self.position..self.position + n]);
        self.position += n;
        Ok(n)
    }
}

impl Drop for SnapshotReader {
    fn drop(&mut self) {
        self.receiver.abort();
    }
}
