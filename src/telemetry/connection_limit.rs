//! The connections of the HTTP endpoint: how many there are, and how long one may wait.
//!
//! Nobody logs in there, so nobody may hold it: of too many connections the oldest is closed. So a probe of Kubernetes,
//! which connects anew and asks at once, is answered although somebody holds all other connections.

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

/// The limits of an endpoint.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Connections at once.
    pub(super) connections: usize,
    /// From the beginning of a connection, or from the last answer, to the end of the next request's headers.
    pub(super) patience: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            connections: 64,
            patience: Duration::from_secs(10),
        }
    }
}

/// Connections by their numbers, the oldest first. Without its sender a connection ends.
type Open = Mutex<VecDeque<(u64, oneshot::Sender<()>)>>;

/// A listener that keeps the limits.
pub(super) struct Guarded {
    inner: TcpListener,
    limits: Limits,
    open: Arc<Open>,
    count: u64,
}

impl Guarded {
    pub(super) fn new(inner: TcpListener, limits: Limits) -> Self {
        Guarded {
            inner,
            limits,
            open: Arc::default(),
            count: 0,
        }
    }
}

impl Listener for Guarded {
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
            patience: self.limits.patience,
            deadline: Box::pin(tokio::time::sleep(self.limits.patience)),
        };
        (connection, address)
    }

    fn local_addr(&self) -> Result<SocketAddr> {
        self.inner.local_addr()
    }
}

/// A connection that ends when its time is over.
pub(super) struct Connection {
    stream: TcpStream,
    number: u64,
    open: Arc<Open>,
    closed: oneshot::Receiver<()>,
    patience: Duration,
    deadline: Pin<Box<Sleep>>,
}

impl Connection {
    /// Fails once the connection has to end; otherwise the task is woken then.
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
        // What comes byte by byte gains no time.
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
            let end = Instant::now() + self.patience;
            self.deadline.as_mut().reset(end);
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
