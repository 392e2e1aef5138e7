//! The table of keys that a fold has seen changes of, with one slot for each key.
//!
//! A key costs 88 bytes for its slot, its own length, and about 11 bytes of index (17 while the index grows).
//! Slots and keys lie in chunks that never move. `fold` is the only caller.

use crate::mvcc::revision::{RecordKey, Revision};
use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher;

/// The number of slots in a chunk.
const CHUNK_SLOTS: usize = 1024;
/// The size of the first chunk of key bytes. Each chunk is twice as long as the one before, up to the
/// longest.
const FIRST_CHUNK: usize = 16 << 10;
const LONGEST_CHUNK: usize = 1 << 20;

/// The state of a key after a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeyState {
    Alive { create: Revision, version: i64 },
    Gone,
}

impl KeyState {
    /// Whether a change to the state `self` can follow the state `before`. A key that never existed is
    /// `Gone`.
    pub(super) fn follows(self, before: KeyState) -> bool {
        match (before, self) {
            (KeyState::Gone, KeyState::Gone) => false,
            (KeyState::Gone, KeyState::Alive { version, .. }) => version == 1,
            (KeyState::Alive { .. }, KeyState::Gone) => true,
            (
                KeyState::Alive { create, version },
                KeyState::Alive {
                    create: c,
                    version: v,
                },
            ) => c == create && v == version.wrapping_add(1),
        }
    }
}

/// The number of a key, in the order in which keys are first seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct SlotId(pub(super) u32);

/// The changes of one key, as far as the fold needs them.
#[derive(Debug)]
pub(super) struct Slot {
    /// The chunk that holds the key, the key's offset in it, and its length.
    chunk: u32,
    offset: u32,
    len: u32,
    kept_sub: u32,
    kept_main: Revision,
    /// The state after the newest change.
    pub(super) newest: KeyState,
    /// The state after the first change, which has to follow the record in the base.
    pub(super) first: KeyState,
    first_main: Revision,
    first_sub: u32,
    has_kept: bool,
    /// Whether a change above the new compacted revision exists: then the kept record is not the key's
    /// newest.
    pub(super) changed_after_compact: bool,
    pub(super) alive_in_base: bool,
}

impl Slot {
    /// Returns the newest change at or below the new compacted revision, as (main, sub). Compaction removes
    /// the older ones.
    pub(super) fn kept(&self) -> Option<(Revision, u32)> {
        self.has_kept.then_some((self.kept_main, self.kept_sub))
    }

    /// Returns the first change in the table, as (main, sub).
    pub(super) fn first_change(&self) -> (Revision, u32) {
        (self.first_main, self.first_sub)
    }

    /// Sets the newest change at or below the new compacted revision.
    pub(super) fn set_kept(&mut self, main: Revision, sub: u32) {
        (self.kept_main, self.kept_sub, self.has_kept) = (main, sub, true);
    }

    /// Whether a compaction at `compact` keeps a record. As in etcd, it keeps all records above that
    /// revision; at or below it, it keeps each key's newest record, and a tombstone only at exactly that
    /// revision.
    pub(super) fn survives(slot: Option<&Slot>, compact: Revision, record: &RecordKey) -> bool {
        if record.main > compact {
            return true;
        }
        if record.tombstone && record.main != compact {
            return false;
        }
        let kept = slot.and_then(Slot::kept);
        kept.is_none_or(|kept| kept == (record.main, record.sub))
    }
}

/// The table of keys.
#[derive(Debug, Default)]
pub(super) struct Keys {
    index: HashTable<u32>,
    hasher: DefaultHashBuilder,
    slots: Vec<Vec<Slot>>,
    /// The bytes of the keys.
    bytes: Vec<Vec<u8>>,
    /// The capacity of all `bytes`.
    byte_memory: usize,
}

impl Keys {
    fn key_of(&self, slot: &Slot) -> &[u8] {
        &self.bytes[slot.chunk as usize][slot.offset as usize..(slot.offset + slot.len) as usize]
    }

    pub(super) fn len(&self) -> usize {
        self.index.len()
    }

    /// Returns the memory in use, in bytes.
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

    /// Adds a new key, whose first change is at `change` (main, sub) and leaves it in the state `first`.
    /// Returns `None` if the table holds 2³² keys, or the key is longer than 4 GiB.
    pub(super) fn insert(
        &mut self,
        key: &[u8],
        first: KeyState,
        change: (Revision, u32),
    ) -> Option<SlotId> {
        let id = u32::try_from(self.index.len()).ok()?;
        let len = u32::try_from(key.len()).ok()?;
        let is_full = |b: &Vec<u8>| b.capacity() - b.len() < key.len();
        if self.bytes.last().is_none_or(is_full) {
            let chunk = (FIRST_CHUNK << self.bytes.len().min(16)).min(LONGEST_CHUNK);
            self.bytes.push(Vec::with_capacity(chunk.max(key.len())));
            self.byte_memory += chunk.max(key.len());
        }
        let chunk = self.bytes.len() - 1;
        let start = self.bytes[chunk].len();
        self.bytes[chunk].extend_from_slice(key);
        let (first_main, first_sub) = change;
        let slot = Slot {
            chunk: u32::try_from(chunk).ok()?,
            offset: u32::try_from(start).ok()?,
            len,
            kept_sub: 0,
            kept_main: Revision(0),
            newest: first,
            first,
            first_main,
            first_sub,
            has_kept: false,
            changed_after_compact: false,
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
            let chunk = &bytes[s.chunk as usize];
            hasher.hash_one(&chunk[s.offset as usize..(s.offset + s.len) as usize])
        });
        Some(SlotId(id))
    }

    /// Iterates over all keys and their slots, in the order in which the keys were first seen.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&[u8], &Slot)> {
        self.slots.iter().flatten().map(|s| (self.key_of(s), s))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_needs_no_more_memory_than_documented() {
        assert!(size_of::<Slot>() <= 88, "{}", size_of::<Slot>());
        let mut keys = Keys::default();
        let name = |i: u32| format!("/registry/some/key/{i:08}").into_bytes();
        let n = 300_000;
        for i in 0..n {
            keys.insert(&name(i), KeyState::Gone, (Revision(0), 0))
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
