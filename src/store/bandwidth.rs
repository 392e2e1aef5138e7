//! A limit on bytes a second, shared by all that read or write in one direction.
//!
//! A token bucket: what was not used is kept for a quarter of a second, no more, so that a pause is not
//! followed by a flood. It knows nothing of what the bytes are.

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

/// A clock that never goes back, and a way to wait by it.
pub trait Clock: Send + Sync {
    /// Time since some fixed moment.
    fn now(&self) -> Duration;

    /// Waits so long, unless cancelled first.
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

/// A limit on bytes a second. Clones share it.
#[derive(Clone)]
pub struct Bandwidth(Arc<Inner>);

struct Inner {
    bytes_per_second: NonZeroU64,
    /// When all that was let through would have been, at exactly the limit.
    paid_until: Mutex<Duration>,
    clock: Box<dyn Clock>,
}

impl Bandwidth {
    /// A limit by the system's clock; `handle` is of the runtime that waits.
    ///
    /// Its blocking calls must not be made on an async thread of the runtime.
    pub fn new(bytes_per_second: NonZeroU64, handle: Handle) -> Self {
        let clock = SystemClock {
            started: Instant::now(),
            handle,
        };
        Self::with_clock(bytes_per_second, Box::new(clock))
    }

    /// A limit by another clock.
    pub fn with_clock(bytes_per_second: NonZeroU64, clock: Box<dyn Clock>) -> Self {
        Bandwidth(Arc::new(Inner {
            bytes_per_second,
            paid_until: Mutex::new(clock.now()),
            clock,
        }))
    }

    /// The most that is let through at once: what comes in a quarter of a second.
    fn burst(&self) -> u64 {
        let bytes = u128::from(self.0.bytes_per_second.get()) * BURST.as_millis() / 1000;
        u64::try_from(bytes).unwrap_or(u64::MAX).max(1)
    }

    /// Reserves so many bytes, and tells how long to wait until they may pass.
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

    /// Waits until so many bytes may pass, unless cancelled first. Many are let through bit by bit, so
    /// that others who share the limit get their turn.
    ///
    /// # Errors
    /// `Terminated`.
    pub fn take(&self, bytes: u64, cancel: &Cancel) -> Result<()> {
        let mut left = bytes;
        while left > 0 {
            let some = left.min(self.burst());
            let wait = self.reserve(some);
            if !wait.is_zero() {
                self.0.clock.wait(wait, cancel)?;
            }
            left -= some;
        }
        Ok(())
    }

    /// Puts a reader behind the limit.
    pub fn limit<R>(&self, inner: R, cancel: &Cancel) -> Limited<R> {
        Limited {
            inner,
            bandwidth: self.clone(),
            cancel: cancel.clone(),
        }
    }
}

/// A reader behind a limit: see [`Bandwidth::limit`].
pub struct Limited<R> {
    inner: R,
    bandwidth: Bandwidth,
    cancel: Cancel,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        // Not more than is let through at once: the rest can wait where it is.
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

    /// Time passes where somebody waits, and nowhere else.
    #[derive(Clone, Default)]
    struct Fake(Arc<AtomicU64>);

    impl Fake {
        fn pass(&self, duration: Duration) {
            let nanos = u64::try_from(duration.as_nanos()).unwrap();
            self.0.fetch_add(nanos, Ordering::SeqCst);
        }

        fn limit(&self, bytes_per_second: u64) -> Bandwidth {
            let limit = NonZeroU64::new(bytes_per_second).unwrap();
            Bandwidth::with_clock(limit, Box::new(self.clone()))
        }
    }

    impl Clock for Fake {
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
        let clock = Fake::default();
        let limit = clock.limit(1000);
        let cancel = Cancel::default();
        limit.take(10_000, &cancel).unwrap();
        assert_eq!(clock.now(), Duration::from_secs(10));
        // After a pause a quarter of a second's worth is free, however long the pause was.
        clock.pass(Duration::from_secs(3600));
        let resumed = clock.now();
        limit.take(250, &cancel).unwrap();
        assert_eq!(clock.now(), resumed);
        limit.clone().take(1, &cancel).unwrap();
        assert_eq!(clock.now(), resumed + Duration::from_millis(1));
    }

    #[test]
    fn no_stretch_of_time_sees_more_than_the_limit_and_a_burst() {
        let seed = crate::seed();
        let mut rng = fastrand::Rng::with_seed(seed);
        for rate in [1, 7, 1000, 123_457, 1 << 30, u64::MAX] {
            let clock = Fake::default();
            let limit = clock.limit(rate);
            let burst = u128::from(limit.burst());
            // What had passed at which time.
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
    fn a_reader_gives_what_it_has_as_fast_as_it_may() {
        let clock = Fake::default();
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
    fn whoever_waits_by_the_systems_clock_is_ended() {
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
    fn a_store_obeys_in_both_directions() {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let url = dir.path().to_str().unwrap();
        let (read, written) = (Fake::default(), Fake::default());
        let store = open(url, &[], runtime.handle().clone())
            .unwrap()
            .with_bandwidth(read.limit(1 << 20), written.limit(4 << 20));
        let bytes = vec![7; 20 << 20];
        // Each reservation is rounded up to a nanosecond.
        let passed = |clock: &Fake| clock.now().as_millis();
        let mut upload = Upload::new(&store, "some", 1);
        upload.write_all(&bytes).unwrap();
        // Parts are counted as they are filled, not when all is there.
        assert_eq!(passed(&written), 5_000);
        assert_eq!(passed(&read), 0);
        let staged = upload.finish().unwrap();
        staged.publish("v2/some").unwrap();
        assert_eq!(passed(&written), 5_000);
        // It was read back.
        assert_eq!(passed(&read), 20_000);
        let mut again = Vec::new();
        store.read("v2/some").read_to_end(&mut again).unwrap();
        assert!(again == bytes);
        assert_eq!(passed(&read), 40_000);
    }
}
