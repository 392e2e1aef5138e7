//! Signals: SIGTERM and SIGINT end a command.
//!
//! `run` in `cli` wraps commands in [`with_signals`]; `snapshot follow` has an orderly shutdown of its own.

use crate::base::Cancel;
use crate::error::{self, Error, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// "File size limit exceeded", on Linux and the BSDs.
const SIGXFSZ: i32 = 25;

/// Starts to listen for SIGTERM and SIGINT, and returns their streams in this order.
pub(super) fn end_signals() -> Result<(Signal, Signal)> {
    let listen = |kind| signal(kind).map_err(|e| Error::io("listen for signals", e));
    // With a handler, a limit on file sizes fails the write instead of killing the process.
    let _ = listen(SignalKind::from_raw(SIGXFSZ))?;
    Ok((
        listen(SignalKind::terminate())?,
        listen(SignalKind::interrupt())?,
    ))
}

/// Runs an operation that SIGTERM or SIGINT cancels. The operation then cleans up and returns at once.
pub(super) fn with_signals<T>(operation: impl FnOnce(&Cancel) -> Result<T>) -> Result<T> {
    let (term, int) = end_signals()?;
    let cancel = Cancel::default();
    tokio::spawn(cancel_at_signal(term, int, cancel.clone()));
    operation(&cancel)
}

async fn cancel_at_signal(mut term: Signal, mut int: Signal, cancel: Cancel) {
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => error::set_interrupted(),
    }
    cancel.cancel();
}
