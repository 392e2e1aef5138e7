//! Limits the connections of an HTTP server: their number, and the time without a complete request.
//!
//! Anybody can connect, so nobody may block it: if there are too many connections, the oldest one is closed. A
//! Kubernetes probe uses a new connection at once, and is therefore answered even while somebody holds all other
//! connections.

use crate::base::lock;
use axum::serve::Listener;
use std::collections::VecDeque;
use std::io::{Error, ErrorKind, Result};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time::{Instant, Sleep};

/// The limits of a server.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// The maximum number of connections.
    pub(crate) connections: usize,
    /// The maximum time from the connection, or from the last response, to the end of the next request's
    /// headers.
    pub(crate) idle_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            connections: 64,
            idle_timeout: Duration::from_secs(10),
        }
    }
}

/// The open connections by their numbers, the oldest first. Dropping the sender closes the connection.
type OpenConnections = Mutex<VecDeque<(u64, oneshot::Sender<()>)>>;

/// A listener that enforces the limits.
pub(crate) struct LimitedListener {
    inner: TcpListener,
    limits: Limits,
    open: Arc<OpenConnections>,
    /// The number of connections so far.
    count: u64,
}

impl LimitedListener {
    pub(crate) fn new(inner: TcpListener, limits: Limits) -> Self {
        LimitedListener {
            inner,
            limits,
            open: Arc::default(),
            count: 0,
        }
    }
}

impl Listener for LimitedListener {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        let (stream, address) = Listener::accept(&mut self.inner).await;
        let (sender, closed) = oneshot::channel();
        self.count += 1;
        let mut open = lock(&self.open);
        while open.len() >= self.limits.connections {
            open.pop_front();
        }
        open.push_back((self.count, sender));
        drop(open);
        let connection = Connection {
            stream,
            number: self.count,
            open: Arc::clone(&self.open),
            closed,
            idle_timeout: self.limits.idle_timeout,
            deadline: Box::pin(tokio::time::sleep(self.limits.idle_timeout)),
        };
        (connection, address)
    }

    fn local_addr(&self) -> Result<SocketAddr> {
        self.inner.local_addr()
    }
}

/// A connection that fails after its deadline, or when the listener closes it.
pub(crate) struct Connection {
    stream: TcpStream,
    number: u64,
    open: Arc<OpenConnections>,
    closed: oneshot::Receiver<()>,
    idle_timeout: Duration,
    deadline: Pin<Box<Sleep>>,
}

impl Connection {
    /// Fails if the connection has to end. Otherwise the task is woken at that time.
    fn check(&mut self, cx: &mut Context<'_>) -> Result<()> {
        if self.deadline.as_mut().poll(cx).is_ready() {
            return Err(Error::from(ErrorKind::TimedOut));
        }
        match Pin::new(&mut self.closed).poll(cx) {
            Poll::Ready(_) => Err(Error::from(ErrorKind::ConnectionAborted)),
            Poll::Pending => Ok(()),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        lock(&self.open).retain(|(number, _)| *number != self.number);
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        // Received bytes do not extend the deadline.
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        self.check(cx)?;
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if let Poll::Ready(Ok(_)) = &written {
            let deadline = Instant::now() + self.idle_timeout;
            self.deadline.as_mut().reset(deadline);
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
