//! Progress: bars on a terminal, a line in the log now and then elsewhere.

use crate::base::lock;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

/// All bars of the process, so that log lines do not tear them.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Without a terminal a long step says how far it is this often.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// Where log lines go: to standard error, above the bars.
#[derive(Debug, Default)]
pub struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        // A log line that nobody takes is no reason to fail: the work goes on.
        let _ = BARS.suspend(|| io::stderr().write_all(b));
        Ok(b.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// How far one step is.
#[derive(Clone)]
pub struct Step(Arc<Inner>);

struct Inner {
    what: String,
    bar: Option<ProgressBar>,
    bytes: Mutex<(u64, Instant)>,
    of: Option<u64>,
}

impl Step {
    /// Begins a step over `of` bytes, if that is known.
    pub fn new(what: impl Into<String>, of: Option<u64>) -> Self {
        let what = what.into();
        let bar = io::stderr().is_terminal().then(|| {
            let bar = BARS.add(match of {
                Some(n) => ProgressBar::new(n),
                None => ProgressBar::no_length(),
            });
            let shape = match of {
                Some(_) => "{msg:46!} {bar:12} {bytes:>10}/{total_bytes:10}",
                None => "{msg:46!} {spinner} {bytes:>10}",
            };
            if let Ok(style) = ProgressStyle::with_template(shape) {
                bar.set_style(style);
            }
            bar.set_message(what.clone());
            bar
        });
        Step(Arc::new(Inner {
            what,
            bar,
            bytes: Mutex::new((0, Instant::now())),
            of,
        }))
    }

    /// Adds bytes done.
    pub fn add(&self, n: u64) {
        if let Some(bar) = &self.0.bar {
            bar.inc(n);
            return;
        }
        let mut done = lock(&self.0.bytes);
        done.0 += n;
        if done.1.elapsed() >= LOG_EVERY {
            done.1 = Instant::now();
            tracing::info!(bytes = done.0, of = self.0.of, "{}", self.0.what);
        }
    }

    /// Counts what is read through it.
    pub fn reader<R>(&self, inner: R) -> Counted<R> {
        Counted {
            inner,
            step: self.clone(),
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// See [`Step::reader`].
pub struct Counted<T> {
    inner: T,
    step: Step,
}

impl<R: io::Read> io::Read for Counted<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(out)?;
        self.step.add(n as u64);
        Ok(n)
    }
}
