//! Objects of one kind as a watch has told them: by name, and by what they have in common.
//!
//! Everything that is asked for each change is found without a walk over all objects. It knows no Kubernetes.

use crate::controller::names::Key;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// An order within a group.
pub type Rank = Vec<String>;

/// The groups that an object is in, each with its rank there.
pub type Groups = Vec<(Key, Rank)>;

/// Objects of one kind.
#[derive(Debug)]
pub struct Table<T> {
    objects: HashMap<Key, Arc<T>>,
    groups: HashMap<Key, BTreeSet<(Rank, Key)>>,
    groups_of: fn(&T) -> Groups,
}

impl<T> Table<T> {
    /// Without objects yet.
    pub fn new(groups_of: fn(&T) -> Groups) -> Self {
        Table {
            objects: HashMap::new(),
            groups: HashMap::new(),
            groups_of,
        }
    }

    /// Takes an object in; gives the one that was there by that name.
    pub fn put(&mut self, key: Key, object: Arc<T>) -> Option<Arc<T>> {
        let before = self.remove(&key);
        for (group, rank) in (self.groups_of)(&object) {
            let members = self.groups.entry(group).or_default();
            members.insert((rank, key.clone()));
        }
        self.objects.insert(key, object);
        before
    }

    /// Gives up an object.
    pub fn remove(&mut self, key: &Key) -> Option<Arc<T>> {
        let before = self.objects.remove(key)?;
        for (group, rank) in (self.groups_of)(&before) {
            if let Some(members) = self.groups.get_mut(&group) {
                members.remove(&(rank, key.clone()));
                if members.is_empty() {
                    self.groups.remove(&group);
                }
            }
        }
        Some(before)
    }

    /// An object by namespace and name.
    pub fn get(&self, key: &Key) -> Option<&Arc<T>> {
        self.objects.get(key)
    }

    /// The members of a group, in the order of their ranks.
    pub fn members(&self, group: &Key) -> impl DoubleEndedIterator<Item = &Key> {
        let members = self.groups.get(group).into_iter().flatten();
        members.map(|(_, key)| key)
    }

    /// The objects of a group.
    pub fn of(&self, group: &Key) -> Vec<Arc<T>> {
        let objects = self.members(group).filter_map(|key| self.get(key));
        objects.cloned().collect()
    }

    /// All objects, in no order.
    pub fn all(&self) -> impl Iterator<Item = (&Key, &Arc<T>)> {
        self.objects.iter()
    }

    /// The names that are not among these.
    pub fn others(&self, than: &BTreeMap<Key, Arc<T>>) -> Vec<Key> {
        let gone = self.objects.keys().filter(|key| !than.contains_key(*key));
        gone.cloned().collect()
    }
}

/// A group by the name that its members have in common.
pub fn by_name(group: Key) -> Groups {
    vec![(group, Rank::new())]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        ("n".to_owned(), name.to_owned())
    }

    #[test]
    fn groups_follow_their_objects() {
        let mut table: Table<(&str, &str)> =
            Table::new(|(group, rank)| vec![(key(group), vec![(*rank).to_owned()])]);
        table.put(key("a"), Arc::new(("one", "2")));
        table.put(key("b"), Arc::new(("one", "1")));
        let names = |table: &Table<_>, group: &str| -> Vec<String> {
            let group = key(group);
            let members = table.members(&group);
            members.map(|k| k.1.clone()).collect()
        };
        assert_eq!(names(&table, "one"), ["b", "a"]);
        let before = table.put(key("b"), Arc::new(("two", "1")));
        assert_eq!(before.as_deref(), Some(&("one", "1")));
        assert_eq!(names(&table, "one"), ["a"]);
        assert_eq!(names(&table, "two"), ["b"]);
        table.remove(&key("a"));
        assert!(names(&table, "one").is_empty() && table.groups.len() == 1);
    }
}
