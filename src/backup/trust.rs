//! Decides which snapshots are trusted.
//!
//! If a key is given, a snapshot that is not encrypted does not count: anybody who can write to the store may have put
//! it there. An encrypted snapshot is not proven to be genuine either, since recipients are public. These are pure
//! functions of names; contents are not read.

use crate::backup::{Catalog, Snapshot};

/// Which snapshots count, by whether they are encrypted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Trust {
    /// All snapshots.
    #[default]
    All,
    /// Encrypted ones: a key is given.
    OnlyEncrypted,
    /// Those that are not encrypted: no key is given to open the others. For operations that save.
    OnlyPlain,
}

/// The snapshots that are not trusted, as indexes in order of creation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Untrusted {
    /// Snapshots that are newer than the newest trusted one. The newest state seems to depend on them, so operations
    /// that read fail.
    pub refused: Vec<usize>,
    /// Older ones: operations go on without them, and say so.
    pub left_out: Vec<usize>,
    /// Whether no snapshot is encrypted: a plain prefix.
    pub all_plain: bool,
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
    /// Sets `untrusted` of the snapshots of a catalog.
    pub fn mark(self, catalog: &mut Catalog) {
        for s in &mut catalog.snapshots {
            s.untrusted = match self {
                Trust::All => false,
                Trust::OnlyEncrypted => !s.name.is_encrypted,
                Trust::OnlyPlain => s.name.is_encrypted,
            };
        }
    }
}

/// Returns the untrusted snapshots of a catalog on which [`Trust::mark`] was called.
pub fn untrusted(catalog: &Catalog) -> Untrusted {
    let order = |s: &Snapshot| (s.name.created, s.name.is_full());
    let trusted = catalog.usable().map(|i| &catalog.snapshots[i]);
    let newest = trusted.map(order).max();
    let mut untrusted = Untrusted {
        all_plain: is_plain(catalog),
        ..Untrusted::default()
    };
    for (i, s) in catalog.snapshots.iter().enumerate() {
        if !s.untrusted || s.excluded {
            continue;
        }
        match newest {
            Some(newest) if order(s) <= newest => untrusted.left_out.push(i),
            _ => untrusted.refused.push(i),
        }
    }
    untrusted
}

/// Returns whether a prefix is plain: it holds snapshots, and none that counts is encrypted.
pub fn is_plain(catalog: &Catalog) -> bool {
    let encrypted = catalog.snapshots.iter().filter(|s| s.name.is_encrypted);
    !catalog.snapshots.is_empty() && { encrypted }.all(|s| s.excluded)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what is refused and what is left out.
    fn untrusted_of(trust: Trust, names: &[&str]) -> (Vec<usize>, Vec<usize>) {
        let mut catalog = Catalog::of_names(names);
        trust.mark(&mut catalog);
        let untrusted = untrusted(&catalog);
        (untrusted.refused, untrusted.left_out)
    }

    #[test]
    fn only_what_is_older_than_an_encrypted_snapshot_is_left_out() {
        let names = [
            "Full-00000000-00000010-1000",
            "Incr-00000011-00000020-2000.age",
            "Full-00000000-00000020-2000",
            "Incr-00000021-00000030-3000",
            "Full-00000000-00000030-3000.age",
            "Incr-00000031-00000040-3000",
        ];
        // The catalog has a full behind the deltas of its second.
        let catalog = Catalog::of_names(&names);
        let name = |i: &usize| catalog.snapshots[*i].name.to_string();
        let named = |all: Vec<usize>| all.iter().map(name).collect::<Vec<_>>();
        let (refused, left_out) = untrusted_of(Trust::OnlyEncrypted, &names);
        assert_eq!(named(refused), Vec::<String>::new());
        assert_eq!(left_out.len(), 4);
        let (refused, left_out) = untrusted_of(Trust::OnlyEncrypted, &names[..4]);
        assert_eq!(named(left_out), [names[0]]);
        assert_eq!(named(refused), [names[2], names[3]]);
        assert_eq!(untrusted_of(Trust::All, &names), (vec![], vec![]));
    }

    #[test]
    fn in_a_plain_prefix_all_is_refused() {
        let names = ["Full-00000000-00000010-1000", "Incr-00000011-00000020-2000"];
        let all = (vec![0, 1], vec![]);
        assert_eq!(untrusted_of(Trust::OnlyEncrypted, &names), all);
        assert_eq!(untrusted_of(Trust::OnlyPlain, &names), (vec![], vec![]));
        assert!(is_plain(&Catalog::of_names(&names)));
        let sealed = ["Full-00000000-00000010-1000.age"];
        let mut catalog = Catalog::of_names(&[&names[..], &sealed].concat());
        assert!(!is_plain(&catalog));
        // An excluded snapshot does not make a prefix an encrypted one.
        let sealed = catalog.snapshots.iter_mut().find(|s| s.name.is_encrypted);
        sealed.unwrap().excluded = true;
        assert!(is_plain(&catalog));
        assert!(!is_plain(&Catalog::default()));
    }
}
