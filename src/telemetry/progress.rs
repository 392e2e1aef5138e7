//! Shows the progress of long steps: bars on a terminal, otherwise a log line every 10 seconds.
//!
//! Called by `ops`.

use crate::base::lock;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

/// All bars of the process. Log lines are written between redraws, so that they do not mix with bars.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// How often a step logs its progress without a terminal.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// The writer of log lines: to standard error, above the bars.
#[derive(Debug, Default)]
pub struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, b: &[u8]) -> io::Result<usize> {
        // An error is ignored: if standard error is closed, the work still continues.
        let _ = BARS.suspend(|| io::stderr().write_all(b));
        Ok(b.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The progress of one step, in bytes. Clones count together; the bar disappears with the last one.
#[derive(Clone)]
pub struct Step(Arc<Inner>);

struct Inner {
    description: String,
    /// The bar, if standard error is a terminal.
    bar: Option<ProgressBar>,
    /// The number of bytes, and the time of the last log line.
    done: Mutex<(u64, Instant)>,
    total: Option<u64>,
}

impl Step {
    /// Begins a step. `total` is its number of bytes, if that is known.
    pub fn new(description: impl Into<String>, total: Option<u64>) -> Self {
        let description = description.into();
        let bar = io::stderr()
            .is_terminal()
            .then(|| new_bar(description.clone(), total));
        Step(Arc::new(Inner {
            description,
            bar,
            done: Mutex::new((0, Instant::now())),
            total,
        }))
    }

    /// Adds `n` processed bytes.
    pub fn add(&self, n: u64) {
        if let Some(bar) = &self.0.bar {
            bar.inc(n);
            return;
        }
        let mut done = lock(&self.0.done);
        let (bytes, last_log) = &mut *done;
        *bytes += n;
        if last_log.elapsed() >= LOG_EVERY {
            *last_log = Instant::now();
            tracing::info!(bytes = *bytes, of = self.0.total, "{}", self.0.description);
        }
    }

    /// Wraps a reader, and adds the bytes that are read from it.
    pub fn reader<R>(&self, inner: R) -> CountingReader<R> {
        CountingReader {
            inner,
            step: self.clone(),
        }
    }
}

fn new_bar(description: String, total: Option<u64>) -> ProgressBar {
    let (bar, template) = match total {
        Some(total) => (
            ProgressBar::new(total),
            "{msg:46!} {bar:12} {bytes:>10}/{total_bytes:10}",
        ),
        None => (ProgressBar::no_length(), "{msg:46!} {spinner} {bytes:>10}"),
    };
    let bar = BARS.add(bar);
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_message(description);
    bar
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A reader whose bytes count as progress: see [`Step::reader`].
pub struct CountingReader<T> {
    inner: T,
    step: Step,
}

impl<R: io::Read> io::Read for CountingReader<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(out)?;
        self.step.add(n as u64);
        Ok(n)
    }
}
