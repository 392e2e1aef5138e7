//! An index of objects of one kind: by name, and by groups that the kind defines.
//!
//! Every lookup that is made for each event avoids a walk over all objects. It knows nothing of Kubernetes.

use crate::controller::names::NamespacedName;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// A group of objects of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Group {
    /// The objects that belong to a policy.
    Policy(NamespacedName),
    /// The policies of a namespace with this store.
    Store(NamespacedName),
    /// The policies of a namespace with this prefix of snapshot Leases.
    Leases(NamespacedName),
    /// The policies whose etcd is behind a Service, and the EndpointSlices of a Service.
    Service(NamespacedName),
    /// The Jobs that have not ended.
    Unfinished,
}

/// The objects of one kind.
#[derive(Debug)]
pub struct Table<T> {
    objects: HashMap<NamespacedName, Arc<T>>,
    groups: HashMap<Group, BTreeSet<NamespacedName>>,
    groups_of: fn(&T) -> Vec<Group>,
}

impl<T> Table<T> {
    /// Returns an empty table.
    pub fn new(groups_of: fn(&T) -> Vec<Group>) -> Self {
        Table {
            objects: HashMap::new(),
            groups: HashMap::new(),
            groups_of,
        }
    }

    /// Inserts an object in place of the one that had its name.
    pub fn insert(&mut self, name: NamespacedName, object: Arc<T>) {
        self.remove(&name);
        for group in (self.groups_of)(&object) {
            self.groups.entry(group).or_default().insert(name.clone());
        }
        self.objects.insert(name, object);
    }

    /// Removes an object.
    pub fn remove(&mut self, name: &NamespacedName) {
        let Some(removed) = self.objects.remove(name) else {
            return;
        };
        for group in (self.groups_of)(&removed) {
            if let Some(members) = self.groups.get_mut(&group) {
                members.remove(name);
                if members.is_empty() {
                    self.groups.remove(&group);
                }
            }
        }
    }

    /// Returns the object of this name.
    pub fn get(&self, name: &NamespacedName) -> Option<&Arc<T>> {
        self.objects.get(name)
    }

    /// Returns the names of a group's members, in their order.
    pub fn members(&self, group: &Group) -> impl Iterator<Item = &NamespacedName> {
        self.groups.get(group).into_iter().flatten()
    }

    /// Returns a group's members, in the order of their names.
    pub fn in_group(&self, group: &Group) -> impl Iterator<Item = &Arc<T>> {
        self.members(group).filter_map(|name| self.get(name))
    }

    /// Returns the groups of an object.
    pub fn groups_of(&self, object: &T) -> Vec<Group> {
        (self.groups_of)(object)
    }

    /// Returns all objects, in no particular order.
    pub fn all(&self) -> impl Iterator<Item = (&NamespacedName, &Arc<T>)> {
        self.objects.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_follow_their_objects() {
        let name = |name: &str| NamespacedName::new("n", name);
        let group = |text: &str| Group::Policy(name(text));
        let mut table: Table<&str> =
            Table::new(|group| vec![Group::Policy(NamespacedName::new("n", *group))]);
        table.insert(name("a"), Arc::new("one"));
        table.insert(name("b"), Arc::new("one"));
        let names = |table: &Table<_>, text: &str| -> Vec<String> {
            let group = group(text);
            table.members(&group).map(|n| n.name.clone()).collect()
        };
        assert_eq!(names(&table, "one"), ["a", "b"]);
        table.insert(name("b"), Arc::new("two"));
        assert_eq!(names(&table, "one"), ["a"]);
        assert_eq!(names(&table, "two"), ["b"]);
        table.remove(&name("a"));
        assert!(names(&table, "one").is_empty() && table.groups.len() == 1);
    }
}
