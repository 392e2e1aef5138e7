//! Objects that are read one after the other: their transfers begin ahead of the reader, so that the latency of
//! a store passes once for many of them.

use super::{ObjectReader, Store};
use crate::base::lock;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Bytes of objects that are fetched before they are read, at most. One object may have more: it is fetched when
/// its turn comes.
const AHEAD_BYTES: u64 = 16 << 20;

/// Reads objects in about the order in which they are given; several threads may take from it.
pub struct ReadAhead {
    store: Store,
    /// Paths below the store's prefix, and sizes as a listing tells them.
    objects: Vec<(String, u64)>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    taken: usize,
    /// The first object whose transfer has not begun.
    next: usize,
    waiting: HashMap<usize, ObjectReader>,
    /// Of those that wait.
    bytes: u64,
}

impl ReadAhead {
    /// Begins no transfer yet.
    pub fn new(store: &Store, objects: impl IntoIterator<Item = (String, u64)>) -> Self {
        ReadAhead {
            store: store.clone(),
            objects: objects.into_iter().collect(),
            state: Mutex::default(),
        }
    }

    /// The object at that place in the order, and a beginning of those after it.
    pub fn take(&self, nth: usize) -> ObjectReader {
        let start = |nth: usize| {
            let (path, bytes) = &self.objects[nth];
            self.store.fetch(path, *bytes)
        };
        let mut begun = lock(&self.state);
        let taken = match begun.waiting.remove(&nth) {
            Some(waiting) => {
                begun.bytes -= self.objects[nth].1;
                waiting
            }
            None => start(nth),
        };
        begun.next = begun.next.max(nth + 1);
        // Nothing is fetched ahead from a local folder, and little for who reads few.
        begun.taken += 1;
        let most = self.store.requests().unwrap_or(0).min(2 * begun.taken);
        while begun.waiting.len() < most
            && let Some((_, bytes)) = self.objects.get(begun.next)
            && begun.bytes + bytes <= AHEAD_BYTES
        {
            let next = begun.next;
            begun.bytes += bytes;
            begun.waiting.insert(next, start(next));
            begun.next += 1;
        }
        taken
    }
}

/// Transfers that wait for who fetches these objects, by path.
pub(super) type BegunTransfers = Arc<Mutex<HashMap<String, ObjectReader>>>;

/// Ends those transfers that nobody has asked for, when dropped.
#[must_use]
pub struct Begun {
    transfers: BegunTransfers,
    paths: Vec<String>,
}

impl Store {
    /// Begins to fetch objects that are about to be read in this order, as far as they may be fetched ahead: the first,
    /// and those that are small together. Nothing is begun in a local folder.
    pub fn begin<'p>(&self, objects: impl IntoIterator<Item = (&'p str, u64)>) -> Begun {
        let mut begun = Begun {
            transfers: Arc::clone(&self.begun),
            paths: Vec::new(),
        };
        let mut all = 0;
        for (path, bytes) in objects.into_iter().take(self.requests().unwrap_or(0)) {
            all += bytes;
            if all > AHEAD_BYTES && !begun.paths.is_empty() {
                break;
            }
            let reader = self.fetch(path, bytes);
            lock(&self.begun).insert(path.to_owned(), reader);
            begun.paths.push(path.to_owned());
        }
        begun
    }

    pub(super) fn take_begun(&self, below: &str) -> Option<ObjectReader> {
        lock(&self.begun).remove(below)
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        let mut transfers = lock(&self.transfers);
        for path in &self.paths {
            transfers.remove(path);
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
    fn each_object_is_given_whatever_the_order_and_little_is_held() {
        let runtime = Runtime::new().unwrap();
        let store = store(&runtime).with_requests(4);
        let content = |n: usize| vec![n as u8; 1000 * n];
        let mut objects = Vec::new();
        for n in 0..20 {
            let path = format!("v2/{n}");
            store.replace_small(&path, &content(n)).unwrap();
            objects.push((path, 1000 * n as u64));
        }
        // One that is too large for the window stops it until its turn.
        objects[9].1 = AHEAD_BYTES + 1;
        let ahead = ReadAhead::new(&store, objects);
        for n in [1, 0, 2, 3, 5, 4, 7, 6, 8, 9, 10, 12, 11, 19, 18, 17, 13] {
            let mut got = Vec::new();
            ahead.take(n).read_to_end(&mut got).unwrap();
            assert!(got == content(n), "{n}");
            let begun = ahead.state.lock().unwrap();
            assert!(begun.waiting.len() <= 4);
            assert!(!begun.waiting.contains_key(&9));
            let bytes = begun.waiting.keys().map(|&n| 1000 * n as u64).sum::<u64>();
            assert_eq!(begun.bytes, bytes);
            assert!(
                !(4..=8).contains(&n) || begun.next == 9,
                "{n}: {}",
                begun.next
            );
        }
    }
}
