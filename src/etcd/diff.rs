//! What differs between a backup and a live etcd, and in which transactions it is written.
//!
//! Pure functions of two streams in the order of their keys; no I/O. `ops::apply` calls it.

use crate::error::{Error, Result};
use std::cmp::Ordering;

/// A key as the backup has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted<'a> {
    /// The key.
    pub key: &'a [u8],
    /// Its value.
    pub value: &'a [u8],
    /// The lease it had, or 0.
    pub lease: i64,
}

/// A key as the live etcd has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiveKey {
    /// The key.
    pub key: Vec<u8>,
    /// Its value.
    pub value: Vec<u8>,
    /// The revision of its last change, 1 or more.
    pub mod_revision: i64,
    /// The lease it is attached to, or 0.
    pub lease: i64,
}

/// What is to be done about one key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change<'a> {
    /// The backup has it; live it is missing or has another value.
    Put {
        /// As it is to be.
        wanted: Wanted<'a>,
        /// As it is; `None` where it is missing.
        live: Option<&'a LiveKey>,
    },
    /// Both have the same value.
    Unchanged {
        /// The key.
        key: &'a [u8],
    },
    /// It is live, and the backup does not have it.
    Extra {
        /// As it is.
        live: &'a LiveKey,
    },
}

/// Compares the two streams key by key.
pub struct Diff<L> {
    live: L,
    /// The next live key, read ahead.
    next: Option<LiveKey>,
    begun: bool,
    last: Option<Vec<u8>>,
}

impl<L: Iterator<Item = Result<LiveKey>>> Diff<L> {
    /// Begins; `live` ascends by key. It is not asked before the backup's first key is there, or its
    /// end: what it gives should not be old.
    pub fn new(live: L) -> Self {
        Diff {
            live,
            next: None,
            begun: false,
            last: None,
        }
    }

    /// The live stream.
    pub fn live(&self) -> &L {
        &self.live
    }

    fn advance(&mut self) -> Result<()> {
        self.next = self.live.next().transpose()?;
        Ok(())
    }

    /// Takes the backup's next key; tells `each` what is to be done about it, and before that about
    /// the live keys below it.
    ///
    /// # Errors
    /// `Internal` where keys do not ascend; those of the live stream and of `each`.
    pub fn wanted(
        &mut self,
        wanted: Wanted<'_>,
        mut each: impl FnMut(Change<'_>) -> Result<()>,
    ) -> Result<()> {
        if self.last.as_deref().is_some_and(|last| last >= wanted.key) {
            return Err(Error::internal("the backup's keys do not ascend"));
        }
        let last = self.last.get_or_insert_default();
        last.clear();
        last.extend_from_slice(wanted.key);
        if !std::mem::replace(&mut self.begun, true) {
            self.advance()?;
        }
        loop {
            let order = self.next.as_ref().map(|l| l.key.as_slice().cmp(wanted.key));
            match (order, &self.next) {
                (Some(Ordering::Less), Some(live)) => {
                    each(Change::Extra { live })?;
                    self.advance()?;
                }
                (Some(Ordering::Equal), Some(live)) => {
                    match live.value == wanted.value {
                        true => each(Change::Unchanged { key: wanted.key })?,
                        false => each(Change::Put {
                            wanted,
                            live: Some(live),
                        })?,
                    }
                    return self.advance();
                }
                _ => return each(Change::Put { wanted, live: None }),
            }
        }
    }

    /// The backup has no more keys: what is still live is extra.
    ///
    /// # Errors
    /// Those of the live stream and of `each`.
    pub fn finish(&mut self, mut each: impl FnMut(Change<'_>) -> Result<()>) -> Result<()> {
        if !self.begun {
            self.advance()?;
        }
        while let Some(live) = &self.next {
            each(Change::Extra { live })?;
            self.advance()?;
        }
        Ok(())
    }
}

/// One write, and what must still hold for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Write {
    /// The key.
    pub key: Vec<u8>,
    /// What becomes of it.
    pub action: Action,
    /// The key's revision of its last change when the diff was taken; 0 where it was missing.
    pub seen: i64,
}

/// What becomes of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// It gets this value.
    Put {
        /// The value.
        value: Vec<u8>,
        /// Whether the live key's lease stays on it; else it has none.
        keep_lease: bool,
    },
    /// It goes.
    Delete,
}

/// Bytes in a request around keys and values: headers, tags, numbers, for one write.
const BYTES_EACH: usize = 64;
/// Bytes in a request that belong to no write.
const BYTES_AROUND: usize = 1024;

impl Write {
    /// About as many bytes as it takes in a request; never less.
    pub fn request_bytes(&self) -> usize {
        let value = match &self.action {
            Action::Put { value, .. } => value.len(),
            Action::Delete => 0,
        };
        // The key stands in the guard, too.
        2 * self.key.len() + value + BYTES_EACH
    }
}

/// Gathers writes into transactions below the server's limits.
#[derive(Debug)]
pub struct Batches {
    max_ops: usize,
    max_bytes: usize,
    writes: Vec<Write>,
    bytes: usize,
}

impl Batches {
    /// With a server's `--max-txn-ops` and `--max-request-bytes`; both 1 or more.
    pub fn new(max_ops: usize, max_bytes: usize) -> Self {
        Batches {
            max_ops,
            max_bytes,
            writes: Vec::new(),
            bytes: BYTES_AROUND,
        }
    }

    /// Adds a write. Gives out what was gathered before, if there is no room for it in that. A write
    /// that is too large for any request stands alone.
    pub fn push(&mut self, write: Write) -> Option<Vec<Write>> {
        let bytes = write.request_bytes();
        let full = self.writes.len() >= self.max_ops || self.bytes + bytes > self.max_bytes;
        let before = match full {
            true => self.take(),
            false => None,
        };
        self.bytes += bytes;
        self.writes.push(write);
        before
    }

    /// Gives out what is left.
    pub fn take(&mut self) -> Option<Vec<Write>> {
        self.bytes = BYTES_AROUND;
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

    /// The changes, a letter and the key each: `+` missing, `~` different, `=` same, `-` extra.
    fn changes(wanted: &[(&str, &str)], lives: &[(&str, &str)]) -> Result<String> {
        let lives = lives.iter().map(|(k, v)| Ok(live(k, v)));
        let mut diff = Diff::new(lives);
        let mut said = Vec::new();
        let mut each = |c: Change<'_>| {
            let (letter, key) = match c {
                Change::Put { wanted, live: None } => ('+', wanted.key),
                Change::Put { wanted, .. } => ('~', wanted.key),
                Change::Unchanged { key } => ('=', key),
                Change::Extra { live } => ('-', live.key.as_slice()),
            };
            said.push(format!("{letter}{}", String::from_utf8_lossy(key)));
            Ok(())
        };
        for (key, value) in wanted {
            let (key, value) = (key.as_bytes(), value.as_bytes());
            let lease = 0;
            diff.wanted(Wanted { key, value, lease }, &mut each)?;
        }
        diff.finish(&mut each)?;
        Ok(said.join(" "))
    }

    #[test]
    fn every_key_of_both_sides_is_told_once_and_in_order() {
        let said = |w: &[(&str, &str)], l: &[(&str, &str)]| changes(w, l).unwrap();
        assert_eq!(said(&[], &[]), "");
        assert_eq!(said(&[("a", "1"), ("b", "")], &[]), "+a +b");
        assert_eq!(said(&[], &[("a", "1"), ("b", "")]), "-a -b");
        assert_eq!(said(&[("b", "1")], &[("b", "1")]), "=b");
        let wanted = [("b", "1"), ("c", "2"), ("e", ""), ("g", "4")];
        let lives = [("a", ""), ("c", "3"), ("d", ""), ("e", ""), ("h", "")];
        assert_eq!(said(&wanted, &lives), "-a +b ~c -d =e +g -h");
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
        let wanted = Wanted {
            key: b"a",
            value: b"",
            lease: 0,
        };
        assert!(diff.wanted(wanted, |_| Ok(())).is_err());
    }

    #[test]
    fn batches_stay_below_both_limits() {
        let put = |n: usize| Write {
            key: b"k".to_vec(),
            action: Action::Put {
                value: vec![0; n],
                keep_lease: false,
            },
            seen: 0,
        };
        let batches = |max_ops, max_bytes, sizes: &[usize]| {
            let mut b = Batches::new(max_ops, max_bytes);
            let mut out: Vec<_> = sizes.iter().filter_map(|&n| b.push(put(n))).collect();
            out.extend(b.take());
            assert_eq!(b.take(), None);
            for batch in &out {
                let bytes: usize = batch.iter().map(Write::request_bytes).sum();
                assert!(batch.len() <= max_ops);
                assert!(batch.len() == 1 || bytes + BYTES_AROUND <= max_bytes);
            }
            out.iter().map(Vec::len).collect::<Vec<_>>()
        };
        assert!(batches(128, 1 << 20, &[]).is_empty());
        assert_eq!(batches(3, 1 << 20, &[0; 7]), [3, 3, 1]);
        assert_eq!(batches(1, 1 << 20, &[0; 3]), [1, 1, 1]);
        // A value that is too large for any request stands alone.
        assert_eq!(batches(9, 4096, &[10, 5000, 10, 10]), [1, 1, 2]);
        assert_eq!(batches(9, 4096, &[1400, 1400, 1400, 1400]), [2, 2]);
        assert_eq!(batches(9, 1, &[10, 10]), [1, 1]);
    }
}
