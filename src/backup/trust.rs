//! Decides which snapshots are trusted.
//!
//! If keys are given, a snapshot that is not encrypted is never an input: anybody who can write to the store
//! may have put it there. An encrypted snapshot is not proven to be genuine either, since recipients are
//! public. These are pure functions of names; contents are not read.

use crate::backup::{Catalog, Kind, Snapshot, SnapshotName};
use crate::mvcc::Revision;

/// The rules by which snapshots are trusted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Trust {
    /// Keys are given, so a snapshot that is not encrypted is not trusted.
    pub only_encrypted: bool,
    /// In a prefix without any encrypted snapshot all snapshots are trusted: encryption begins there.
    pub unless_all_plain: bool,
    /// Snapshots from before the first encrypted one are trusted if all their revisions are below this one.
    pub plaintext_below: Option<Revision>,
    /// Operations ignore snapshots that are not trusted, and never fail because of them.
    pub ignore_untrusted: bool,
    /// No key is given, so an encrypted snapshot is not trusted: nobody can open it. For operations that save.
    pub only_plain: bool,
    /// A plain snapshot file that is not encrypted is refused.
    pub only_encrypted_files: bool,
}

/// The snapshots that are not trusted, as indexes in order of creation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Untrusted {
    /// Snapshots that are newer than the newest trusted full. The newest state seems to depend on them, so
    /// operations fail.
    pub refused: Vec<usize>,
    /// Snapshots that operations ignore: a trusted full has superseded them, or the user asked for it.
    pub left_out: Vec<usize>,
    /// The value of `--allow-plaintext-below` that would trust the snapshots from before the first encrypted
    /// one.
    pub allowed_below: Option<Revision>,
}

impl Untrusted {
    /// Returns whether all snapshots are trusted.
    pub fn is_empty(&self) -> bool {
        self.refused.is_empty() && self.left_out.is_empty()
    }

    /// Returns all snapshots that are not trusted.
    pub fn all(&self) -> impl Iterator<Item = usize> + '_ {
        self.left_out.iter().chain(&self.refused).copied()
    }
}

impl Trust {
    /// Whether snapshots of this catalog can be untrusted at all.
    fn distrusts_plaintext(&self, catalog: &Catalog) -> bool {
        let is_encrypted = |s: &Snapshot| s.name.is_encrypted && !s.excluded;
        let all_plain = || !catalog.snapshots.iter().any(is_encrypted);
        self.only_encrypted && !(self.unless_all_plain && all_plain())
    }

    /// Sets `untrusted` of the snapshots of a catalog.
    pub fn mark(&self, catalog: &mut Catalog) {
        if self.only_plain {
            for s in &mut catalog.snapshots {
                s.untrusted = s.name.is_encrypted;
            }
            return;
        }
        if !self.distrusts_plaintext(catalog) {
            return;
        }
        let first_encrypted = EncryptionStart::of(catalog);
        for s in &mut catalog.snapshots {
            let is_allowed = first_encrypted.is_after(&s.name)
                && self
                    .plaintext_below
                    .is_some_and(|below| s.name.last < below);
            s.untrusted = !s.name.is_encrypted && !is_allowed;
        }
    }

    /// Returns the indexes of plain fulls that were not made before the first encrypted snapshot. deltafold
    /// does not make such fulls, so they must not supersede other snapshots.
    pub fn out_of_place(&self, catalog: &Catalog) -> Vec<usize> {
        if !self.distrusts_plaintext(catalog) {
            return Vec::new();
        }
        let first_encrypted = EncryptionStart::of(catalog);
        let is_out_of_place = |&i: &usize| {
            let name = &catalog.snapshots[i].name;
            name.is_full() && !name.is_encrypted && !first_encrypted.is_after(name)
        };
        catalog.usable().filter(is_out_of_place).collect()
    }
}

/// The point at which encryption of a prefix began: its first encrypted snapshot.
struct EncryptionStart {
    /// When the snapshot was created, in seconds since 1970.
    created: i64,
    /// The last revision that may have been saved before the snapshot.
    saved_before: Revision,
}

impl EncryptionStart {
    fn of(catalog: &Catalog) -> Self {
        let counts = |s: &&Snapshot| s.name.is_encrypted && !s.excluded;
        let encrypted = catalog.snapshots.iter().filter(counts);
        // The catalog is in order of creation.
        match { encrypted }.next().map(|s| &s.name) {
            None => EncryptionStart {
                created: i64::MAX,
                saved_before: Revision(i64::MAX),
            },
            Some(first) => EncryptionStart {
                created: first.created,
                saved_before: match first.kind {
                    Kind::Full => first.last,
                    Kind::Incr => first.start.previous(),
                },
            },
        }
    }

    /// Returns whether encryption began after a plain snapshot was made.
    fn is_after(&self, plain: &SnapshotName) -> bool {
        plain.created <= self.created && plain.last <= self.saved_before
    }
}

/// Returns the untrusted snapshots of a catalog on which [`Trust::mark`] was called.
pub fn untrusted(catalog: &Catalog, trust: &Trust) -> Untrusted {
    let order = |s: &Snapshot| (s.name.created, s.name.is_full());
    let fulls = catalog.usable().map(|i| &catalog.snapshots[i]);
    let newest = fulls.filter(|s| s.name.is_full()).map(order).max();
    let first_encrypted = EncryptionStart::of(catalog);
    let mut untrusted = Untrusted::default();
    for (i, s) in catalog.snapshots.iter().enumerate() {
        if !s.untrusted || s.excluded {
            continue;
        }
        if first_encrypted.is_after(&s.name) {
            let below = Some(Revision(s.name.last.0.saturating_add(1)));
            untrusted.allowed_below = untrusted.allowed_below.max(below);
        }
        match newest {
            _ if trust.ignore_untrusted => untrusted.left_out.push(i),
            Some(newest) if order(s) <= newest => untrusted.left_out.push(i),
            _ => untrusted.refused.push(i),
        }
    }
    untrusted
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALWAYS: Trust = Trust {
        only_encrypted: true,
        unless_all_plain: false,
        plaintext_below: None,
        ignore_untrusted: false,
        only_plain: false,
        only_encrypted_files: false,
    };

    /// Returns the refused and the ignored snapshots, and the revision below which they would be trusted.
    fn untrusted_of(trust: Trust, names: &[&str]) -> (Vec<usize>, Vec<usize>, Option<i64>) {
        let mut catalog = Catalog::of_names(names);
        trust.mark(&mut catalog);
        let usable: Vec<usize> = catalog.usable().collect();
        let u = untrusted(&catalog, &trust);
        assert!(u.all().all(|i| !usable.contains(&i)));
        assert_eq!(u.all().count() + usable.len(), names.len());
        (u.refused, u.left_out, u.allowed_below.map(|r| r.0))
    }

    #[test]
    fn without_keys_all_is_trusted() {
        let names = ["Full-00000000-00000010-100", "Incr-00000011-00000020-200"];
        assert_eq!(
            untrusted_of(Trust::default(), &names),
            (vec![], vec![], None)
        );
    }

    #[test]
    fn a_plain_snapshot_after_the_newest_encrypted_full_is_refused() {
        let names = [
            "Full-00000000-00000010-100.gz.age",
            "Incr-00000011-00000020-200.gz.age",
            "Incr-00000021-00000030-300.gz",
        ];
        // No plain snapshot was made before the prefix was encrypted, so no revision is suggested.
        assert_eq!(untrusted_of(ALWAYS, &names), (vec![2], vec![], None));
        let allows = Trust {
            plaintext_below: Some(Revision(1000)),
            ..ALWAYS
        };
        assert_eq!(untrusted_of(allows, &names), (vec![2], vec![], None));
        let ignores = Trust {
            ignore_untrusted: true,
            ..ALWAYS
        };
        assert_eq!(untrusted_of(ignores, &names), (vec![], vec![2], None));
    }

    #[test]
    fn all_snapshots_may_be_trusted_if_none_is_encrypted() {
        let begins = Trust {
            unless_all_plain: true,
            ..ALWAYS
        };
        let plain = ["Full-00000000-00000010-100", "Incr-00000011-00000020-200"];
        assert_eq!(untrusted_of(begins, &plain), (vec![], vec![], None));
        let delta = [&plain[..], &["Incr-00000021-00000030-300.age"]].concat();
        assert_eq!(untrusted_of(begins, &delta), (vec![0, 1], vec![], Some(21)));
    }

    #[test]
    fn a_prefix_that_was_encrypted_later_needs_no_flag_once_a_full_is_encrypted() {
        let plain = ["Full-00000000-00000010-100", "Incr-00000011-00000020-200"];
        assert_eq!(untrusted_of(ALWAYS, &plain), (vec![0, 1], vec![], Some(21)));
        let delta = [&plain[..], &["Incr-00000021-00000030-300.age"]].concat();
        assert_eq!(untrusted_of(ALWAYS, &delta), (vec![0, 1], vec![], Some(21)));
        let full = [&delta[..], &["Full-00000000-00000030-300.age"]].concat();
        assert_eq!(untrusted_of(ALWAYS, &full), (vec![], vec![0, 1], Some(21)));
    }

    #[test]
    fn a_snapshot_below_a_revision_is_trusted_if_it_is_older_than_all_encrypted_ones() {
        let below = |r| Trust {
            plaintext_below: Some(Revision(r)),
            ..ALWAYS
        };
        let names = [
            "Full-00000000-00000010-100",
            "Incr-00000011-00000020-200",
            "Incr-00000021-00000030-300.age",
            "Incr-00000011-00000015-400",
        ];
        assert_eq!(untrusted_of(below(21), &names), (vec![3], vec![], None));
        assert_eq!(
            untrusted_of(below(20), &names),
            (vec![1, 3], vec![], Some(21))
        );
        assert_eq!(
            untrusted_of(below(10), &names),
            (vec![0, 1, 3], vec![], Some(21))
        );
    }

    #[test]
    fn a_forged_older_name_does_not_raise_the_suggested_revision() {
        let names = [
            "Full-00000000-00000010-100",
            "Incr-00000011-00009999-150",
            "Incr-00000011-00000020-200.age",
        ];
        assert_eq!(untrusted_of(ALWAYS, &names), (vec![0, 1], vec![], Some(11)));
        let allows = Trust {
            plaintext_below: Some(Revision(i64::MAX)),
            ..ALWAYS
        };
        assert_eq!(untrusted_of(allows, &names), (vec![1], vec![], None));
    }

    #[test]
    fn excluded_snapshots_do_not_tell_when_encryption_began() {
        let names = [
            "Full-00000000-00000001-1.age",
            "Full-00000000-00000001-1.age.exclude",
            "Full-00000000-00000010-100",
        ];
        let mut catalog = Catalog::of_names(&names);
        let allows = Trust {
            plaintext_below: Some(Revision(11)),
            ..ALWAYS
        };
        allows.mark(&mut catalog);
        assert_eq!(catalog.usable().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn a_plain_full_is_out_of_place_after_an_encrypted_snapshot() {
        let names = [
            "Full-00000000-00000010-100",
            "Full-00000000-00000020-200.age",
            "Incr-00000021-00000030-250",
            "Full-00000000-00000030-300",
            // An old time, but a new revision.
            "Full-00000000-00000030-150",
        ];
        let catalog = Catalog::of_names(&names);
        assert_eq!(ALWAYS.out_of_place(&catalog), [1, 4]);
        assert!(Trust::default().out_of_place(&catalog).is_empty());
    }
}
