//! What is remembered of every key that a fold touches: 88 bytes and the key's own, in chunks that
//! never move, and about 11 bytes of index (17 while it grows).
//!
//! It decides nothing; `fold`, its only caller, does.

use crate::mvcc::revision::{RecordKey, Revision};
use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher;

/// Slots in a chunk.
const CHUNK_SLOTS: usize = 1024;
/// Key bytes in the first chunk; each chunk is twice as long as the one before, up to the longest.
const FIRST_CHUNK: usize = 16 << 10;
const LONGEST_CHUNK: usize = 1 << 20;

/// What a change says of its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Alive { create: Revision, version: i64 },
    Gone,
}

impl State {
    /// Whether a change to `self` can follow `before` (`Gone`: the key did not exist).
    pub(super) fn follows(self, before: State) -> bool {
        match (before, self) {
            (State::Gone, State::Gone) => false,
            (State::Gone, State::Alive { version, .. }) => version == 1,
            (State::Alive { .. }, State::Gone) => true,
            (
                State::Alive { create, version },
                State::Alive {
                    create: c,
                    version: v,
                },
            ) => c == create && v == version.wrapping_add(1),
        }
    }
}

/// A key's number, in the order in which keys were first seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SlotId(pub(super) u32);

/// What is remembered of one key.
#[derive(Debug)]
pub(super) struct Slot {
    chunk: u32,
    at: u32,
    len: u32,
    kept_sub: u32,
    kept_main: Revision,
    /// What the newest change said.
    pub(super) newest: State,
    /// What the first change said, to be compared with the base's record.
    pub(super) first: State,
    first_main: Revision,
    first_sub: u32,
    is_kept: bool,
    /// Changed above the new compacted revision too: its kept record is not its newest.
    pub(super) touched_after: bool,
    pub(super) alive_in_base: bool,
}

impl Slot {
    /// Its newest change at or below the new compacted revision, as (main, sub): only that one is
    /// kept of those.
    pub(super) fn kept(&self) -> Option<(Revision, u32)> {
        self.is_kept.then_some((self.kept_main, self.kept_sub))
    }

    /// The first change that was noted, as (main, sub).
    pub(super) fn noted_from(&self) -> (Revision, u32) {
        (self.first_main, self.first_sub)
    }

    pub(super) fn keep(&mut self, main: Revision, sub: u32) {
        (self.kept_main, self.kept_sub, self.is_kept) = (main, sub, true);
    }

    /// etcd's compaction: above the compacted revision everything stays; of what is at or below it
    /// each key's newest record, and a tombstone only at exactly the compacted revision.
    pub(super) fn keeps(this: Option<&Slot>, compact: Revision, rk: &RecordKey) -> bool {
        if rk.main > compact {
            return true;
        }
        if rk.tombstone && rk.main != compact {
            return false;
        }
        let kept = this.and_then(Slot::kept);
        kept.is_none_or(|kept| kept == (rk.main, rk.sub))
    }
}

/// The keys of a fold.
#[derive(Debug, Default)]
pub(super) struct Keys {
    index: HashTable<u32>,
    hasher: DefaultHashBuilder,
    slots: Vec<Vec<Slot>>,
    bytes: Vec<Vec<u8>>,
    /// The capacity of all `bytes`.
    byte_memory: usize,
}

impl Keys {
    fn key_of(&self, slot: &Slot) -> &[u8] {
        &self.bytes[slot.chunk as usize][slot.at as usize..(slot.at + slot.len) as usize]
    }

    pub(super) fn len(&self) -> usize {
        self.index.len()
    }

    /// Bytes of memory in use.
    pub(super) fn memory(&self) -> usize {
        self.byte_memory
            + self.slots.len() * CHUNK_SLOTS * size_of::<Slot>()
            + self.index.allocation_size()
    }

    pub(super) fn find(&self, key: &[u8]) -> Option<SlotId> {
        let hash = self.hasher.hash_one(key);
        let found = self.index.find(hash, |&id| self.key(SlotId(id)) == key);
        found.map(|&id| SlotId(id))
    }

    pub(super) fn at(&self, id: SlotId) -> &Slot {
        &self.slots[id.0 as usize / CHUNK_SLOTS][id.0 as usize % CHUNK_SLOTS]
    }

    pub(super) fn at_mut(&mut self, id: SlotId) -> &mut Slot {
        &mut self.slots[id.0 as usize / CHUNK_SLOTS][id.0 as usize % CHUNK_SLOTS]
    }

    pub(super) fn key(&self, id: SlotId) -> &[u8] {
        self.key_of(self.at(id))
    }

    /// Adds a key that is not there. `None` where there are 2³² already, or it is longer than that.
    /// `at` is the first change, as (main, sub).
    pub(super) fn insert(
        &mut self,
        key: &[u8],
        first: State,
        at: (Revision, u32),
    ) -> Option<SlotId> {
        let id = u32::try_from(self.index.len()).ok()?;
        let len = u32::try_from(key.len()).ok()?;
        let full = |b: &Vec<u8>| b.capacity() - b.len() < key.len();
        if self.bytes.last().is_none_or(full) {
            let chunk = (FIRST_CHUNK << self.bytes.len().min(16)).min(LONGEST_CHUNK);
            self.bytes.push(Vec::with_capacity(chunk.max(key.len())));
            self.byte_memory += chunk.max(key.len());
        }
        let chunk = self.bytes.len() - 1;
        let start = self.bytes[chunk].len();
        self.bytes[chunk].extend_from_slice(key);
        let (first_main, first_sub) = at;
        let slot = Slot {
            chunk: u32::try_from(chunk).ok()?,
            at: u32::try_from(start).ok()?,
            len,
            kept_sub: 0,
            kept_main: Revision(0),
            newest: first,
            first,
            first_main,
            first_sub,
            is_kept: false,
            touched_after: false,
            alive_in_base: false,
        };
        match self.slots.last_mut() {
            Some(chunk) if chunk.len() < CHUNK_SLOTS => chunk.push(slot),
            _ => {
                let mut chunk = Vec::with_capacity(CHUNK_SLOTS);
                chunk.push(slot);
                self.slots.push(chunk);
            }
        }
        let hash = self.hasher.hash_one(key);
        let (hasher, slots, bytes) = (&self.hasher, &self.slots, &self.bytes);
        self.index.insert_unique(hash, id, |&id| {
            let s = &slots[id as usize / CHUNK_SLOTS][id as usize % CHUNK_SLOTS];
            hasher.hash_one(&bytes[s.chunk as usize][s.at as usize..(s.at + s.len) as usize])
        });
        Some(SlotId(id))
    }

    /// All slots with their keys, in the order in which they were first seen.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&[u8], &Slot)> {
        self.slots.iter().flatten().map(|s| (self.key_of(s), s))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_stays_within_its_promise() {
        assert!(size_of::<Slot>() <= 88, "{}", size_of::<Slot>());
        let mut keys = Keys::default();
        let name = |i: u32| format!("/registry/some/key/{i:08}").into_bytes();
        let n = 300_000;
        for i in 0..n {
            keys.insert(&name(i), State::Gone, (Revision(0), 0))
                .unwrap();
        }
        for i in (0..n).step_by(997) {
            assert_eq!(keys.find(&name(i)), Some(SlotId(i)));
            assert_eq!(keys.key(SlotId(i)), name(i));
        }
        assert_eq!(keys.find(b"/registry"), None);
        let own: usize = n as usize * name(0).len();
        assert!(keys.memory() - own < n as usize * 128);
    }
}
