//! Shows the progress of long steps: bars on a terminal, otherwise a log line every 10 seconds.

use crate::base::{lock, printable};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

/// All bars of the process. Log lines are written between redraws, so that they do not mix with bars.
pub(super) static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

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
    started: Instant,
}

/// Shows no bars from now on.
pub fn hide() {
    BARS.set_draw_target(ProgressDrawTarget::hidden());
}

impl Step {
    /// Begins a step. `total` is its number of bytes, if that is known.
    pub fn new(description: impl Into<String>, total: Option<u64>) -> Self {
        let description = printable::line(&description.into()).into_owned();
        let bar = io::stderr()
            .is_terminal()
            .then(|| new_bar(description.clone(), total));
        Step(Arc::new(Inner {
            description,
            bar,
            done: Mutex::new((0, Instant::now())),
            total,
            started: Instant::now(),
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
            let speed = Speed::new(*bytes, self.0.total, self.0.started.elapsed());
            tracing::info!(
                bytes = *bytes,
                of = self.0.total,
                bytes_per_second = speed.bytes_per_second,
                seconds_left = speed.seconds_left,
                "{}",
                self.0.description
            );
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

/// The speed of a step since its beginning.
#[derive(Debug, PartialEq, Eq)]
struct Speed {
    bytes_per_second: u64,
    /// The time to the end at this speed, rounded up; `None` if the total or the speed is not known.
    seconds_left: Option<u64>,
}

impl Speed {
    fn new(bytes: u64, total: Option<u64>, elapsed: Duration) -> Self {
        let millis = elapsed.as_millis().max(1);
        let bytes_per_second = u128::from(bytes) * 1000 / millis;
        let left = total.map(|total| u128::from(total.saturating_sub(bytes)));
        let seconds_left = left.filter(|_| bytes_per_second > 0);
        let seconds_left = seconds_left.map(|left| left.div_ceil(bytes_per_second));
        let to_u64 = |n| u64::try_from(n).unwrap_or(u64::MAX);
        Speed {
            bytes_per_second: to_u64(bytes_per_second),
            seconds_left: seconds_left.map(to_u64),
        }
    }
}

/// The bars have at most 80 characters.
fn new_bar(description: String, total: Option<u64>) -> ProgressBar {
    let (bar, template) = match total {
        Some(total) => (
            ProgressBar::new(total),
            "{msg:26!} {bar:10} {bytes:>10}/{total_bytes:10} {bytes_per_sec:>12} {eta}",
        ),
        None => (
            ProgressBar::no_length(),
            "{msg:40!} {spinner} {bytes:>10} {bytes_per_sec:>12}",
        ),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_and_time_left_come_from_what_is_done() {
        let speed = |bytes, total, seconds| {
            let speed = Speed::new(bytes, total, Duration::from_secs(seconds));
            (speed.bytes_per_second, speed.seconds_left)
        };
        assert_eq!(speed(1000, Some(3500), 10), (100, Some(25)));
        assert_eq!(speed(1000, Some(1001), 10), (100, Some(1)));
        assert_eq!(speed(1000, None, 10), (100, None));
        assert_eq!(speed(0, Some(5), 10), (0, None));
        // More than the total is not negative, and no time has passed yet.
        assert_eq!(speed(1000, Some(500), 10), (100, Some(0)));
        assert_eq!(speed(u64::MAX, Some(1), 0).0, u64::MAX);
    }

    /// A terminal of 80 columns that keeps what is written to it.
    #[derive(Debug, Clone, Default)]
    struct Screen(Arc<Mutex<String>>);

    impl indicatif::TermLike for Screen {
        fn width(&self) -> u16 {
            80
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, line: &str) -> io::Result<()> {
            self.write_str(line)?;
            self.write_str("\n")
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            lock(&self.0).push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            self.write_str("\n")
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn bars_show_rate_and_time_left_and_fit_eighty_columns() {
        for (total, end) in [(Some(123 << 30), "s"), (None, "/s")] {
            let screen = Screen::default();
            let target = indicatif::ProgressDrawTarget::term_like(Box::new(screen.clone()));
            let bar = new_bar("read v2/".repeat(20), total);
            bar.set_draw_target(target);
            bar.inc(12 << 30);
            bar.force_draw();
            let shown = lock(&screen.0).clone();
            let widest = shown.lines().map(|l| l.trim_end().chars().count()).max();
            assert!(widest.is_some_and(|w| w > 40 && w <= 80), "{shown}");
            assert!(shown.contains("/s"), "{shown}");
            assert!(shown.trim_end().ends_with(end), "{shown}");
        }
    }
}
