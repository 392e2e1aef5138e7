//! A limit on bytes per second, which all readers or all writers share.
//!
//! A token bucket: unused bytes are kept for a quarter of a second at most, so that a burst does not follow a
//! pause. Called by `fetch`, `publish` and everything else that transfers bytes under `--bandwidth`.

use crate::base::Cancel;
use crate::base::lock;
use crate::error::Result;
use std::io::{self, Read};
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;

/// How long unused bytes are kept.
const BURST: Duration = Duration::from_millis(250);

/// A monotonic clock that can wait.
pub trait Clock: Send + Sync {
    /// Returns the time since an arbitrary moment.
    fn now(&self) -> Duration;

    /// Waits. Fails with `Terminated` if cancelled first.
    ///
    /// # Errors
    /// `Terminated`.
    fn wait(&self, duration: Duration, cancel: &Cancel) -> Result<()>;
}

/// The system's clock.
struct SystemClock {
    started: Instant,
    handle: Handle,
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn wait(&self, duration: Duration, cancel: &Cancel) -> Result<()> {
        let wait = async { cancel.or(tokio::time::sleep(duration)).await };
        self.handle.block_on(wait)
    }
}

/// A limit on bytes per second. Clones share it.
#[derive(Clone)]
pub struct Bandwidth(Arc<Inner>);

struct Inner {
    bytes_per_second: NonZeroU64,
    /// When all bytes so far would have passed at exactly the limit.
    paid_until: Mutex<Duration>,
    clock: Box<dyn Clock>,
}

impl Bandwidth {
    /// Returns a limit by the system's clock. `handle` is the runtime on which [`take`](Self::take) waits: do
    /// not call it on an async thread of this runtime.
    pub fn new(bytes_per_second: NonZeroU64, handle: Handle) -> Self {
        let clock = SystemClock {
            started: Instant::now(),
            handle,
        };
        Self::with_clock(bytes_per_second, Box::new(clock))
    }

    /// Returns a limit by another clock.
    pub fn with_clock(bytes_per_second: NonZeroU64, clock: Box<dyn Clock>) -> Self {
        Bandwidth(Arc::new(Inner {
            bytes_per_second,
            paid_until: Mutex::new(clock.now()),
            clock,
        }))
    }

    /// Returns the most bytes that pass at once: those of a quarter of a second.
    fn burst(&self) -> u64 {
        let bytes = u128::from(self.0.bytes_per_second.get()) * BURST.as_millis() / 1000;
        u64::try_from(bytes).unwrap_or(u64::MAX).max(1)
    }

    /// Reserves bytes. Returns how long to wait until they may pass.
    fn reserve(&self, bytes: u64) -> Duration {
        let nanos =
            (u128::from(bytes) * 1_000_000_000).div_ceil(self.0.bytes_per_second.get().into());
        let cost = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let mut paid_until = lock(&self.0.paid_until);
        let now = self.0.clock.now();
        let kept = now.saturating_sub(BURST);
        *paid_until = (*paid_until).max(kept).saturating_add(cost);
        paid_until.saturating_sub(now)
    }

    /// Waits until so many bytes may pass. Reserves many bytes in pieces, so that others who share the limit
    /// get their share.
    ///
    /// # Errors
    /// Fails with `Terminated` if cancelled first.
    pub fn take(&self, bytes: u64, cancel: &Cancel) -> Result<()> {
        let mut left = bytes;
        while left > 0 {
            let piece = left.min(self.burst());
            let wait = self.reserve(piece);
            if !wait.is_zero() {
                self.0.clock.wait(wait, cancel)?;
            }
            left -= piece;
        }
        Ok(())
    }

    /// Returns a reader that obeys the limit.
    pub fn limit<R>(&self, inner: R, cancel: &Cancel) -> Limited<R> {
        Limited {
            inner,
            bandwidth: self.clone(),
            cancel: cancel.clone(),
        }
    }
}

/// A reader that obeys a limit: see [`Bandwidth::limit`].
pub struct Limited<R> {
    inner: R,
    bandwidth: Bandwidth,
    cancel: Cancel,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        // Read no more than passes at once. The rest can wait where it is.
        let most = usize::try_from(self.bandwidth.burst()).unwrap_or(usize::MAX);
        let most = most.min(out.len());
        let n = self.inner.read(&mut out[..most])?;
        self.bandwidth.take(n as u64, &self.cancel)?;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, Reason};
    use crate::store::{Upload, open};
    use std::io::Write;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A clock that only advances when somebody waits.
    #[derive(Clone, Default)]
    struct FakeClock(Arc<AtomicU64>);

    impl FakeClock {
        fn pass(&self, duration: Duration) {
            let nanos = u64::try_from(duration.as_nanos()).unwrap();
            self.0.fetch_add(nanos, Ordering::SeqCst);
        }

        fn limit(&self, bytes_per_second: u64) -> Bandwidth {
            let limit = NonZeroU64::new(bytes_per_second).unwrap();
            Bandwidth::with_clock(limit, Box::new(self.clone()))
        }
    }

    impl Clock for FakeClock {
        fn now(&self) -> Duration {
            Duration::from_nanos(self.0.load(Ordering::SeqCst))
        }

        fn wait(&self, duration: Duration, cancel: &Cancel) -> Result<()> {
            cancel.check()?;
            self.pass(duration);
            Ok(())
        }
    }

    #[test]
    fn bytes_take_as_long_as_the_limit_says() {
        let clock = FakeClock::default();
        let limit = clock.limit(1000);
        let cancel = Cancel::default();
        limit.take(10_000, &cancel).unwrap();
        assert_eq!(clock.now(), Duration::from_secs(10));
        // After a pause of any length, the bytes of a quarter of a second pass at once.
        clock.pass(Duration::from_secs(3600));
        let resumed = clock.now();
        limit.take(250, &cancel).unwrap();
        assert_eq!(clock.now(), resumed);
        limit.clone().take(1, &cancel).unwrap();
        assert_eq!(clock.now(), resumed + Duration::from_millis(1));
    }

    #[test]
    fn no_more_than_the_limit_and_a_burst_passes_in_any_time() {
        let seed = crate::seed();
        let mut rng = fastrand::Rng::with_seed(seed);
        for rate in [1, 7, 1000, 123_457, 1 << 30, u64::MAX] {
            let clock = FakeClock::default();
            let limit = clock.limit(rate);
            let burst = u128::from(limit.burst());
            // Times, and the bytes that had passed by then.
            let mut passed = vec![(0u128, 0u128)];
            for _ in 0..300 {
                if rng.u8(..4) == 0 {
                    clock.pass(Duration::from_millis(rng.u64(..2000)));
                }
                let n = rng.u64(..=limit.burst().saturating_mul(3).min(1 << 40));
                limit.take(n, &Cancel::default()).unwrap();
                let before = passed[passed.len() - 1].1;
                passed.push((clock.now().as_nanos(), before + u128::from(n)));
            }
            for (i, from) in passed.iter().enumerate() {
                for to in &passed[i..] {
                    let most = (to.0 - from.0) * u128::from(rate) / 1_000_000_000 + burst + 1;
                    assert!(to.1 - from.1 <= most, "{rate}: {from:?} to {to:?}");
                }
            }
        }
    }

    #[test]
    fn a_limited_reader_is_as_fast_as_the_limit() {
        let clock = FakeClock::default();
        let cancel = Cancel::default();
        let bytes: Vec<u8> = (0..5000u32).map(|n| n as u8).collect();
        let mut reader = clock.limit(1000).limit(bytes.as_slice(), &cancel);
        let mut read = Vec::new();
        reader.read_to_end(&mut read).unwrap();
        assert_eq!(read, bytes);
        assert_eq!(clock.now(), Duration::from_secs(5));

        let mut reader = clock.limit(1000).limit(bytes.as_slice(), &cancel);
        cancel.cancel();
        let e = reader.read(&mut [0; 10]).unwrap_err();
        assert_eq!(Error::io("read", e).reason(), Reason::Terminated);
    }

    #[test]
    fn a_wait_by_the_systems_clock_can_be_cancelled() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let limit = Bandwidth::new(NonZeroU64::MIN, runtime.handle().clone());
        let cancel = Cancel::default();
        std::thread::scope(|s| {
            let waits = s.spawn(|| limit.take(u64::MAX, &cancel));
            cancel.cancel();
            let ended = waits.join().unwrap();
            assert_eq!(ended.unwrap_err().reason(), Reason::Terminated);
        });
    }

    #[test]
    fn a_store_has_a_limit_for_reading_and_one_for_writing() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let url = dir.path().to_str().unwrap();
        let (read, written) = (FakeClock::default(), FakeClock::default());
        let store = open(url, &[], runtime.handle().clone())
            .unwrap()
            .with_bandwidth(read.limit(1 << 20), written.limit(4 << 20));
        let bytes = vec![7; 20 << 20];
        // Each reservation is rounded up to a nanosecond.
        let passed = |clock: &FakeClock| clock.now().as_millis();
        let mut upload = Upload::new(&store, "v2/some", 0).unwrap();
        upload.write_all(&bytes).unwrap();
        // Bytes count when they are buffered, not when the upload is complete.
        assert_eq!(passed(&written), 5_000);
        assert_eq!(passed(&read), 0);
        upload.finish().unwrap().complete().unwrap();
        assert_eq!((passed(&written), passed(&read)), (5_000, 0));
        let mut again = Vec::new();
        store.read("v2/some").read_to_end(&mut again).unwrap();
        assert!(again == bytes);
        assert_eq!(passed(&read), 20_000);
    }
}
