//! Begins to read snapshots before the reader needs them, so that the store's latency passes once for many.

use super::{ObjectReader, Store};
use crate::base::lock;
use std::collections::HashMap;
use std::sync::Mutex;

/// The most bytes of objects that are read ahead. A larger object is read when it is needed.
const AHEAD_BYTES: u64 = 16 << 20;

/// A snapshot as a listing shows it.
pub struct ListedSnapshot {
    /// The path below the store's prefix.
    pub path: String,
    /// The size in bytes.
    pub bytes: u64,
    /// Whether it is known to be excluded, and read nevertheless.
    pub is_excluded: bool,
}

/// Reads objects ahead, in about the order in which they are given. Several threads may take objects.
pub struct ReadAhead {
    store: Store,
    objects: Vec<ListedSnapshot>,
    state: Mutex<ReadAheadState>,
}

#[derive(Default)]
struct ReadAheadState {
    taken: usize,
    /// The first object whose transfer has not begun.
    next: usize,
    waiting: HashMap<usize, ObjectReader>,
    /// The bytes of the waiting objects.
    bytes: u64,
}

impl ReadAhead {
    /// Returns a reader of `objects`. Begins no transfer yet.
    pub fn new(store: &Store, objects: impl IntoIterator<Item = ListedSnapshot>) -> Self {
        ReadAhead {
            store: store.clone(),
            objects: objects.into_iter().collect(),
            state: Mutex::default(),
        }
    }

    /// Returns a reader of `objects` whose first transfers have begun.
    pub fn begun(store: &Store, objects: impl IntoIterator<Item = ListedSnapshot>) -> Self {
        let ahead = Self::new(store, objects);
        ahead.fill(&mut lock(&ahead.state), store.requests().unwrap_or(0));
        ahead
    }

    /// Returns the object with this index, and begins the transfers of objects after it.
    pub fn take(&self, index: usize) -> ObjectReader {
        let mut state = lock(&self.state);
        let taken = match state.waiting.remove(&index) {
            Some(waiting) => {
                state.bytes -= self.objects[index].bytes;
                waiting
            }
            None => self.start(index),
        };
        state.next = state.next.max(index + 1);
        state.taken += 1;
        // A caller that takes few objects gets few ahead. From a local folder nothing is read ahead.
        let most = self.store.requests().unwrap_or(0).min(2 * state.taken);
        self.fill(&mut state, most);
        taken
    }

    fn start(&self, index: usize) -> ObjectReader {
        self.store.fetch_snapshot(&self.objects[index])
    }

    /// Begins transfers until so many wait.
    fn fill(&self, state: &mut ReadAheadState, most: usize) {
        while state.waiting.len() < most
            && let Some(ListedSnapshot { bytes, .. }) = self.objects.get(state.next)
            && state.bytes + bytes <= AHEAD_BYTES
        {
            let next = state.next;
            state.bytes += bytes;
            state.waiting.insert(next, self.start(next));
            state.next += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::exclude::ExcludeTags;
    use object_store::memory::InMemory;
    use object_store::path::Path;
    use std::io::Read;
    use std::sync::Arc;
    use tokio::runtime::Runtime;

    fn store(runtime: &Runtime) -> Store {
        let handle = runtime.handle().clone();
        let inner = Arc::new(InMemory::new());
        Store::new(
            inner,
            Path::from("p"),
            "m".to_owned(),
            ExcludeTags::none(),
            handle,
        )
    }

    #[test]
    fn objects_may_be_taken_in_any_order_and_few_wait() {
        let runtime = Runtime::new().unwrap();
        let store = store(&runtime).with_requests(4);
        let content = |n: usize| vec![n as u8; 1000 * n];
        let mut objects = Vec::new();
        for n in 0..20 {
            let path = format!("v2/{n}");
            store.replace_small(&path, &content(n)).unwrap();
            objects.push(ListedSnapshot {
                path,
                bytes: 1000 * n as u64,
                is_excluded: false,
            });
        }
        // An object that is larger than the limit is not read ahead, and none after it until it is taken.
        objects[9].bytes = AHEAD_BYTES + 1;
        let ahead = ReadAhead::new(&store, objects);
        for n in [1, 0, 2, 3, 5, 4, 7, 6, 8, 9, 10, 12, 11, 19, 18, 17, 13] {
            let mut bytes = Vec::new();
            ahead.take(n).read_to_end(&mut bytes).unwrap();
            assert!(bytes == content(n), "{n}");
            let state = ahead.state.lock().unwrap();
            assert!(state.waiting.len() <= 4);
            assert!(!state.waiting.contains_key(&9));
            let bytes = state.waiting.keys().map(|&n| 1000 * n as u64).sum::<u64>();
            assert_eq!(state.bytes, bytes);
            assert!(
                !(4..=8).contains(&n) || state.next == 9,
                "{n}: {}",
                state.next
            );
        }
    }
}
