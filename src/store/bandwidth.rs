//! A limit on bytes per second, which all readers or all writers share.
//!
//! A token bucket: unused bytes are kept for a quarter of a second at most, so that a burst does not follow a
//! pause.

use crate::base::Cancel;
use crate::base::lock;
use crate::error::Result;
use std::io::{self, Read};
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::time::Instant;

/// How long unused bytes are kept.
const BURST: Duration = Duration::from_millis(250);

/// A limit on bytes per second. Clones share it.
#[derive(Clone)]
pub struct Bandwidth(Arc<Inner>);

struct Inner {
    bytes_per_second: NonZeroU64,
    /// When all bytes so far would have passed at exactly the limit.
    paid_until: Mutex<Option<Instant>>,
    handle: Handle,
}

impl Bandwidth {
    /// Returns a limit. `handle` is the runtime on which [`take`](Self::take) waits: do not call it on an async
    /// thread of this runtime.
    pub fn new(bytes_per_second: NonZeroU64, handle: Handle) -> Self {
        Bandwidth(Arc::new(Inner {
            bytes_per_second,
            paid_until: Mutex::default(),
            handle,
        }))
    }

    /// Returns the most bytes that pass at once: those of a quarter of a second.
    fn burst(&self) -> u64 {
        let bytes = u128::from(self.0.bytes_per_second.get()) * BURST.as_millis() / 1000;
        u64::try_from(bytes).unwrap_or(u64::MAX).max(1)
    }

    /// Reserves bytes, and waits until they may pass.
    async fn pass(&self, bytes: u64) {
        /// The longest wait: a clock has an end.
        const MOST: Duration = Duration::from_secs(1 << 32);
        let nanos =
            (u128::from(bytes) * 1_000_000_000).div_ceil(self.0.bytes_per_second.get().into());
        let cost = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let now = Instant::now();
        let until = {
            let mut paid_until = lock(&self.0.paid_until);
            let paid = paid_until.map_or(now, |paid| paid.max(now - BURST));
            *paid_until.insert(paid + cost.min(MOST))
        };
        if until > now {
            tokio::time::sleep_until(until).await;
        }
    }

    /// Waits until so many bytes may pass. Reserves many bytes in pieces, so that others who share the limit
    /// get their share.
    ///
    /// # Errors
    /// Fails with `Terminated` if cancelled first.
    pub fn take(&self, bytes: u64, cancel: &Cancel) -> Result<()> {
        let passed = async {
            let mut left = bytes;
            while left > 0 {
                let piece = left.min(self.burst());
                self.pass(piece).await;
                left -= piece;
            }
        };
        self.0.handle.block_on(cancel.or(passed))
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
    use tokio::sync::oneshot;

    /// A runtime whose clock advances only when somebody waits.
    struct Paused {
        handle: Handle,
        _ended: oneshot::Sender<()>,
    }

    impl Paused {
        fn start() -> Self {
            let mut builder = tokio::runtime::Builder::new_current_thread();
            let runtime = builder.enable_time().start_paused(true).build().unwrap();
            let handle = runtime.handle().clone();
            let (sender, ended) = oneshot::channel::<()>();
            std::thread::spawn(move || runtime.block_on(ended));
            Paused {
                handle,
                _ended: sender,
            }
        }

        fn limit(&self, bytes_per_second: u64) -> Bandwidth {
            let limit = NonZeroU64::new(bytes_per_second).unwrap();
            Bandwidth::new(limit, self.handle.clone())
        }

        fn now(&self) -> Instant {
            self.handle.block_on(async { Instant::now() })
        }

        fn pass(&self, duration: Duration) {
            self.handle
                .block_on(async { tokio::time::sleep(duration).await });
        }
    }

    #[test]
    fn bytes_take_as_long_as_the_limit_says() {
        let clock = Paused::start();
        let (limit, begun) = (clock.limit(1000), clock.now());
        let cancel = Cancel::default();
        limit.take(10_000, &cancel).unwrap();
        assert_eq!(clock.now() - begun, Duration::from_secs(10));
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
            let clock = Paused::start();
            let (limit, begun) = (clock.limit(rate), clock.now());
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
                let nanos = (clock.now() - begun).as_nanos();
                passed.push((nanos, before + u128::from(n)));
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
        let clock = Paused::start();
        let begun = clock.now();
        let cancel = Cancel::default();
        let bytes: Vec<u8> = (0..5000u32).map(|n| n as u8).collect();
        let mut reader = clock.limit(1000).limit(bytes.as_slice(), &cancel);
        let mut read = Vec::new();
        reader.read_to_end(&mut read).unwrap();
        assert_eq!(read, bytes);
        assert_eq!(clock.now() - begun, Duration::from_secs(5));

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
        let (read, written) = (Paused::start(), Paused::start());
        let begun = [read.now(), written.now()];
        let store = open(url, &[], runtime.handle().clone())
            .unwrap()
            .with_bandwidth(read.limit(1 << 20), written.limit(4 << 20));
        let bytes = vec![7; 20 << 20];
        // Each wait is rounded up to a millisecond.
        let passed = || {
            let passed = [read.now() - begun[0], written.now() - begun[1]];
            passed.map(|time| time.as_millis() / 10 * 10)
        };
        let mut upload = Upload::new(&store, "v2/some", 0).unwrap();
        upload.write_all(&bytes).unwrap();
        // Bytes count when they are buffered, not when the upload is complete.
        assert_eq!(passed(), [0, 5_000]);
        upload.finish().unwrap().complete().unwrap();
        assert_eq!(passed(), [0, 5_000]);
        let mut again = Vec::new();
        store.read("v2/some").read_to_end(&mut again).unwrap();
        assert!(again == bytes);
        assert_eq!(passed(), [20_000, 5_000]);
    }
}
