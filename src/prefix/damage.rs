//! What an operation does when a snapshot turns out to be damaged, or excluded by a tag: it plans again without that
//! snapshot. One that cannot be decrypted is damaged, too.
//!
//! Restoring goes around damage: another full, or other deltas, must lead to the same revision. Reading shows what
//! stands before the damage. Neither leaves the timeline, since what the snapshots of a timeline have in common was
//! decided with the damaged one among them. Saving goes on as if the damaged snapshot did not exist, since anybody who
//! can write to the store may have put it there. `scan` and `open` obey; nothing is written.

use super::Context;
use crate::backup::Catalog;
use crate::base::lock;
use crate::error::{Error, Reason, Result};
use crate::store::Store;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// The number of times that an operation plans, at most.
const MOST: usize = 32;

/// The damage that an operation has found in a store. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Damage(Arc<Mutex<Found>>);

#[derive(Debug, Default)]
struct Found {
    on_damage: OnDamage,
    /// By the full names of the snapshots.
    snapshots: BTreeMap<String, Error>,
}

impl Damage {
    /// Returns the usable snapshots of a catalog that are known to be damaged, with their errors. For an operation that
    /// saves, marks them as not trusted.
    pub(crate) fn mark(&self, store: &Store, catalog: &mut Catalog) -> BTreeMap<usize, Error> {
        let found = &lock(&self.0);
        let mut damaged = BTreeMap::new();
        // Large prefixes are scanned often, and damage is rare.
        if !found.snapshots.is_empty() {
            for i in catalog.usable() {
                let e = found.snapshots.get(&store.name(&catalog.snapshots[i].path));
                damaged.extend(e.map(|e| (i, e.again())));
            }
        }
        if found.on_damage == OnDamage::Ignores {
            for &i in damaged.keys() {
                catalog.snapshots[i].untrusted = true;
            }
        }
        damaged
    }

    /// Returns whether a snapshot is known to be damaged. `name` is its full name.
    pub(crate) fn has(&self, name: &str) -> bool {
        lock(&self.0).snapshots.contains_key(name)
    }

    /// Returns whether a state before the damage will do if the requested one is the newest. If a key is missing, it will
    /// not: the backup would look like an old one.
    pub(crate) fn stops(&self) -> bool {
        let found = lock(&self.0);
        let mut reasons = found.snapshots.values().map(Error::reason);
        found.on_damage == OnDamage::Stops && reasons.all(|r| r != Reason::CannotDecrypt)
    }

    fn begin(&self, on_damage: OnDamage) {
        let snapshots = BTreeMap::new();
        *lock(&self.0) = Found {
            on_damage,
            snapshots,
        };
    }

    /// Forgets all damage. From now on a damaged snapshot counts as if it did not exist.
    pub(crate) fn begin_ignoring(&self) {
        self.begin(OnDamage::Ignores);
    }

    /// Adds a damaged snapshot. Returns false if it is known.
    pub(crate) fn add(&self, name: &str, e: &Error) -> bool {
        let known = &mut lock(&self.0).snapshots;
        known.insert(name.to_owned(), e.again()).is_none()
    }
}

/// What an operation does if a snapshot is damaged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum OnDamage {
    #[default]
    Fails,
    GoesAround,
    Stops,
    Ignores,
}

/// Calls `work`, which restores, again as long as it finds a snapshot damaged or excluded by a tag: each time it
/// plans without that snapshot.
///
/// # Errors
/// The errors of `work`.
pub fn around_damage<'c, T>(
    contexts: impl IntoIterator<Item = &'c Context>,
    work: impl FnMut() -> Result<T>,
) -> Result<T> {
    plan(contexts, OnDamage::GoesAround, work)
}

/// Calls `work`, which reads, as [`around_damage`] does. If nothing leads to the newest state, the newest one
/// before the damage is read.
///
/// # Errors
/// The errors of `work`.
pub fn up_to_damage<'c, T>(
    contexts: impl IntoIterator<Item = &'c Context>,
    work: impl FnMut() -> Result<T>,
) -> Result<T> {
    plan(contexts, OnDamage::Stops, work)
}

/// Calls `work` again as long as it finds a snapshot excluded by a tag. Damage is an error.
///
/// # Errors
/// The errors of `work`.
pub fn without_excluded<T>(work: impl FnMut() -> Result<T>) -> Result<T> {
    plan([], OnDamage::Fails, work)
}

fn plan<'c, T>(
    contexts: impl IntoIterator<Item = &'c Context>,
    on_damage: OnDamage,
    mut work: impl FnMut() -> Result<T>,
) -> Result<T> {
    let contexts: Vec<&Context> = contexts.into_iter().collect();
    for ctx in &contexts {
        ctx.damage.begin(on_damage);
    }
    for _ in 1..MOST {
        let result = work();
        let Err(e) = &result else { return result };
        let Some(name) = e.set_aside() else {
            return result;
        };
        // The store remembers what a tag excludes.
        let mut is_new = e.is_of_excluded();
        // A snapshot that is too large may be read with another limit: the user decides.
        if !is_new && on_damage != OnDamage::Fails && e.reason() != Reason::TooLarge {
            for ctx in &contexts {
                is_new |= ctx.damage.add(name, e);
            }
        }
        if !is_new {
            return result;
        }
        tracing::info!("planning again without a snapshot: {e}");
    }
    work()
}
