//! An index of objects of one kind: by name, and by groups that the kind defines.
//!
//! Every lookup that is made for each event avoids a walk over all objects. It knows nothing of Kubernetes.
//! Called by `watch`, which fills the tables, and by the rest of `observe`.

use crate::controller::names::Key;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// The sort key of an object within a group.
pub type Rank = Vec<String>;

/// The groups of an object, each with the object's rank in it.
pub type Groups = Vec<(Key, Rank)>;

/// The objects of one kind.
#[derive(Debug)]
pub struct Table<T> {
    objects: HashMap<Key, Arc<T>>,
    groups: HashMap<Key, BTreeSet<(Rank, Key)>>,
    groups_of: fn(&T) -> Groups,
}

impl<T> Table<T> {
    /// Returns an empty table.
    pub fn new(groups_of: fn(&T) -> Groups) -> Self {
        Table {
            objects: HashMap::new(),
            groups: HashMap::new(),
            groups_of,
        }
    }

    /// Inserts an object; returns the one that had its name before.
    pub fn insert(&mut self, key: Key, object: Arc<T>) -> Option<Arc<T>> {
        let replaced = self.remove(&key);
        for (group, rank) in (self.groups_of)(&object) {
            let members = self.groups.entry(group).or_default();
            members.insert((rank, key.clone()));
        }
        self.objects.insert(key, object);
        replaced
    }

    /// Removes an object and returns it.
    pub fn remove(&mut self, key: &Key) -> Option<Arc<T>> {
        let removed = self.objects.remove(key)?;
        for (group, rank) in (self.groups_of)(&removed) {
            if let Some(members) = self.groups.get_mut(&group) {
                members.remove(&(rank, key.clone()));
                if members.is_empty() {
                    self.groups.remove(&group);
                }
            }
        }
        Some(removed)
    }

    /// Returns the object of this namespace and name.
    pub fn get(&self, key: &Key) -> Option<&Arc<T>> {
        self.objects.get(key)
    }

    /// Returns the names of a group's members, in the order of their ranks.
    pub fn members(&self, group: &Key) -> impl DoubleEndedIterator<Item = &Key> {
        let members = self.groups.get(group).into_iter().flatten();
        members.map(|(_, key)| key)
    }

    /// Returns a group's members, in the order of their ranks.
    pub fn in_group(&self, group: &Key) -> Vec<Arc<T>> {
        let objects = self.members(group).filter_map(|key| self.get(key));
        objects.cloned().collect()
    }

    /// Returns all objects, in no particular order.
    pub fn all(&self) -> impl Iterator<Item = (&Key, &Arc<T>)> {
        self.objects.iter()
    }

    /// Returns the names of the objects that a list lacks.
    pub fn missing_from(&self, list: &BTreeMap<Key, Arc<T>>) -> Vec<Key> {
        let gone = self.objects.keys().filter(|key| !list.contains_key(*key));
        gone.cloned().collect()
    }
}

/// Returns the groups of an object that is in one group, without a rank.
pub fn one_group(group: Key) -> Groups {
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
        table.insert(key("a"), Arc::new(("one", "2")));
        table.insert(key("b"), Arc::new(("one", "1")));
        let names = |table: &Table<_>, group: &str| -> Vec<String> {
            let group = key(group);
            let members = table.members(&group);
            members.map(|k| k.1.clone()).collect()
        };
        assert_eq!(names(&table, "one"), ["b", "a"]);
        let replaced = table.insert(key("b"), Arc::new(("two", "1")));
        assert_eq!(replaced.as_deref(), Some(&("one", "1")));
        assert_eq!(names(&table, "one"), ["a"]);
        assert_eq!(names(&table, "two"), ["b"]);
        table.remove(&key("a"));
        assert!(names(&table, "one").is_empty() && table.groups.len() == 1);
    }
}
