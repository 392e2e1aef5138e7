//! Compares the keys of a backup with those of a live etcd, and groups writes into transactions.
//!
//! It does no I/O: it merges two streams of keys in ascending order.

use crate::error::{Error, Result};
use std::cmp::Ordering;

/// A key in the backup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackupKey<'a> {
    /// The key.
    pub key: &'a [u8],
    /// The value.
    pub value: &'a [u8],
    /// The lease that the key was attached to, or 0.
    pub lease: i64,
}

/// A key in the live etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiveKey {
    /// The key.
    pub key: Vec<u8>,
    /// The value.
    pub value: Vec<u8>,
    /// The revision of the last change, 1 or more.
    pub mod_revision: i64,
    /// The lease that the key is attached to, or 0.
    pub lease: i64,
}

/// The result of the comparison of one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyDifference<'a> {
    /// The live etcd lacks the key, or has another value.
    Put {
        /// The key in the backup.
        backup: BackupKey<'a>,
        /// The key in the live etcd, if it exists there.
        live: Option<&'a LiveKey>,
    },
    /// Both have the same value.
    Unchanged {
        /// The key.
        key: &'a [u8],
    },
    /// The key exists only in the live etcd.
    Extra {
        /// The key in the live etcd.
        live: &'a LiveKey,
    },
}

/// A comparison of two streams, key by key.
pub struct Diff<L> {
    live: L,
    /// The next live key, read ahead.
    next: Option<LiveKey>,
    begun: bool,
    /// The last key of the backup.
    last: Option<Vec<u8>>,
}

impl<L: Iterator<Item = Result<LiveKey>>> Diff<L> {
    /// Creates a comparison with the keys in `live`, which must ascend. The first of them is read only when
    /// the first key of the backup, or its end, is known, so that it is recent.
    pub fn new(live: L) -> Self {
        Diff {
            live,
            next: None,
            begun: false,
            last: None,
        }
    }

    /// Returns the stream of live keys.
    pub fn live(&self) -> &L {
        &self.live
    }

    fn advance(&mut self) -> Result<()> {
        self.next = self.live.next().transpose()?;
        Ok(())
    }

    /// Adds the next key of the backup. Calls `each` for the live keys below it, then for the key itself.
    ///
    /// # Errors
    /// `Internal` if the keys do not ascend; the errors of the live stream and of `each`.
    pub fn push(
        &mut self,
        backup: BackupKey<'_>,
        mut each: impl FnMut(KeyDifference<'_>) -> Result<()>,
    ) -> Result<()> {
        if self.last.as_deref().is_some_and(|last| last >= backup.key) {
            return Err(Error::internal("the keys of the backup do not ascend"));
        }
        let last = self.last.get_or_insert_default();
        last.clear();
        last.extend_from_slice(backup.key);
        if !std::mem::replace(&mut self.begun, true) {
            self.advance()?;
        }
        loop {
            let order = self.next.as_ref().map(|l| l.key.as_slice().cmp(backup.key));
            match (order, &self.next) {
                (Some(Ordering::Less), Some(live)) => {
                    each(KeyDifference::Extra { live })?;
                    self.advance()?;
                }
                (Some(Ordering::Equal), Some(live)) => {
                    if live.value == backup.value {
                        each(KeyDifference::Unchanged { key: backup.key })?
                    } else {
                        each(KeyDifference::Put {
                            backup,
                            live: Some(live),
                        })?
                    }
                    return self.advance();
                }
                _ => return each(KeyDifference::Put { backup, live: None }),
            }
        }
    }

    /// Ends the backup: calls `each` for all remaining live keys, which are extra.
    ///
    /// # Errors
    /// The errors of the live stream and of `each`.
    pub fn finish(&mut self, mut each: impl FnMut(KeyDifference<'_>) -> Result<()>) -> Result<()> {
        if !self.begun {
            self.advance()?;
        }
        while let Some(live) = &self.next {
            each(KeyDifference::Extra { live })?;
            self.advance()?;
        }
        Ok(())
    }
}

/// A write of one key, with its guard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Write {
    /// The key.
    pub key: Vec<u8>,
    /// The action.
    pub action: Action,
    /// The guard: the `mod_revision` of the key when it was compared, or 0 if it did not exist.
    pub mod_revision: i64,
}

/// The lease of a key that is put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutLease {
    /// The one that it has.
    Keep,
    /// This one; 0 for none.
    Of(i64),
}

/// A put or a deletion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Sets a value.
    Put {
        /// The value.
        value: Vec<u8>,
        /// Its lease.
        lease: PutLease,
    },
    /// Deletes the key.
    Delete,
}

/// The overhead of one write in a request, in bytes: headers, tags, numbers.
const WRITE_OVERHEAD: usize = 64;
/// The overhead of a request, in bytes.
const REQUEST_OVERHEAD: usize = 1024;

impl Write {
    /// Returns an upper bound of the size of the write in a request, in bytes.
    pub fn request_bytes(&self) -> usize {
        let value = match &self.action {
            Action::Put { value, .. } => value.len(),
            Action::Delete => 0,
        };
        // The guard contains the key, too.
        2 * self.key.len() + value + WRITE_OVERHEAD
    }
}

/// Groups writes into transactions within the limits of the server.
#[derive(Debug)]
pub struct Batches {
    max_ops: usize,
    max_bytes: usize,
    writes: Vec<Write>,
    bytes: usize,
}

impl Batches {
    /// Creates an empty group. The limits are the server's `--max-txn-ops` and `--max-request-bytes`, both at
    /// least 1.
    pub fn new(max_ops: usize, max_bytes: usize) -> Self {
        Batches {
            max_ops,
            max_bytes,
            writes: Vec::new(),
            bytes: REQUEST_OVERHEAD,
        }
    }

    /// Adds a write. If it does not fit into the current transaction, that is returned and a new one begins.
    /// A write that exceeds the limits by itself gets its own transaction.
    pub fn push(&mut self, write: Write) -> Option<Vec<Write>> {
        let bytes = write.request_bytes();
        let is_full = self.writes.len() >= self.max_ops || self.bytes + bytes > self.max_bytes;
        let full_transaction = if is_full { self.take() } else { None };
        self.bytes += bytes;
        self.writes.push(write);
        full_transaction
    }

    /// Returns the current transaction, if it has writes.
    pub fn take(&mut self) -> Option<Vec<Write>> {
        self.bytes = REQUEST_OVERHEAD;
        let writes = std::mem::take(&mut self.writes);
        (!writes.is_empty()).then_some(writes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn live(key: &str, value: &str) -> LiveKey {
        LiveKey {
            key: key.into(),
            value: value.into(),
            mod_revision: 7,
            lease: 0,
        }
    }

    /// Returns the differences as a sign and a key: `+` missing, `~` different, `=` equal, `-` extra.
    fn changes(wanted: &[(&str, &str)], lives: &[(&str, &str)]) -> Result<String> {
        let lives = lives.iter().map(|(k, v)| Ok(live(k, v)));
        let mut diff = Diff::new(lives);
        let mut differences = Vec::new();
        let mut each = |c: KeyDifference<'_>| {
            let (letter, key) = match c {
                KeyDifference::Put { backup, live: None } => ('+', backup.key),
                KeyDifference::Put { backup, .. } => ('~', backup.key),
                KeyDifference::Unchanged { key } => ('=', key),
                KeyDifference::Extra { live } => ('-', live.key.as_slice()),
            };
            differences.push(format!("{letter}{}", String::from_utf8_lossy(key)));
            Ok(())
        };
        for (key, value) in wanted {
            let (key, value) = (key.as_bytes(), value.as_bytes());
            let lease = 0;
            diff.push(BackupKey { key, value, lease }, &mut each)?;
        }
        diff.finish(&mut each)?;
        Ok(differences.join(" "))
    }

    #[test]
    fn every_key_of_both_sides_is_reported_once_and_in_order() {
        let signs = |w: &[(&str, &str)], l: &[(&str, &str)]| changes(w, l).unwrap();
        assert_eq!(signs(&[], &[]), "");
        assert_eq!(signs(&[("a", "1"), ("b", "")], &[]), "+a +b");
        assert_eq!(signs(&[], &[("a", "1"), ("b", "")]), "-a -b");
        assert_eq!(signs(&[("b", "1")], &[("b", "1")]), "=b");
        let wanted = [("b", "1"), ("c", "2"), ("e", ""), ("g", "4")];
        let lives = [("a", ""), ("c", "3"), ("d", ""), ("e", ""), ("h", "")];
        assert_eq!(signs(&wanted, &lives), "-a +b ~c -d =e +g -h");
    }

    #[test]
    fn keys_that_do_not_ascend_are_a_bug() {
        for wrong in [["b", "a"], ["a", "a"]] {
            let e = changes(&wrong.map(|k| (k, "")), &[]).unwrap_err();
            assert_eq!(e.reason(), crate::Reason::Internal);
        }
    }

    #[test]
    fn an_error_of_the_live_stream_ends_it() {
        let mut diff = Diff::new([Err(Error::corrupt("x"))].into_iter());
        let wanted = BackupKey {
            key: b"a",
            value: b"",
            lease: 0,
        };
        assert!(diff.push(wanted, |_| Ok(())).is_err());
    }

    #[test]
    fn batches_stay_below_both_limits() {
        let put = |n: usize| Write {
            key: b"k".to_vec(),
            action: Action::Put {
                value: vec![0; n],
                lease: PutLease::Of(0),
            },
            mod_revision: 0,
        };
        let batches = |max_ops, max_bytes, sizes: &[usize]| {
            let mut b = Batches::new(max_ops, max_bytes);
            let mut out: Vec<_> = sizes.iter().filter_map(|&n| b.push(put(n))).collect();
            out.extend(b.take());
            assert_eq!(b.take(), None);
            for batch in &out {
                let bytes: usize = batch.iter().map(Write::request_bytes).sum();
                assert!(batch.len() <= max_ops);
                assert!(batch.len() == 1 || bytes + REQUEST_OVERHEAD <= max_bytes);
            }
            out.iter().map(Vec::len).collect::<Vec<_>>()
        };
        assert!(batches(128, 1 << 20, &[]).is_empty());
        assert_eq!(batches(3, 1 << 20, &[0; 7]), [3, 3, 1]);
        assert_eq!(batches(1, 1 << 20, &[0; 3]), [1, 1, 1]);
        // A value that exceeds the limit by itself gets its own transaction.
        assert_eq!(batches(9, 4096, &[10, 5000, 10, 10]), [1, 1, 2]);
        assert_eq!(batches(9, 4096, &[1400, 1400, 1400, 1400]), [2, 2]);
        assert_eq!(batches(9, 1, &[10, 10]), [1, 1]);
    }
}
