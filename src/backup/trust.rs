//! Which snapshots may be anybody's. Pure functions of names.
//!
//! Where keys are given, a snapshot that is not encrypted is never an input: whoever can write into the store can have put
//! it there. That one is encrypted says little about who wrote it, since recipients are public.

use crate::backup::{Catalog, Kind, Snapshot, SnapshotName};
use crate::base::flag_values::yes_or_no;
use crate::mvcc::Revision;
use clap::Args;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What is trusted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Trust {
    /// Keys are given: what is not encrypted is not trusted.
    pub only_encrypted: bool,
    /// But in a prefix without any encrypted snapshot all is trusted: encryption begins there.
    pub unless_all_plain: bool,
    /// Snapshots from before the first encrypted one are trusted, if all their revisions are below this.
    pub plaintext_below: Option<Revision>,
    /// Jobs go on with what is trusted, whatever else is there.
    pub ignore_untrusted: bool,
}

/// What is made of snapshots that are not encrypted, if others are or should be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Plaintext {
    /// Trust unencrypted snapshots that end below this revision and are older than the first encrypted one
    #[arg(long, value_name = "REVISION", value_parser = clap::value_parser!(i64).range(1..))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub allow_plaintext_below: Option<i64>,
    /// Ignore untrusted snapshots (not encrypted although keys are given) instead of failing
    #[arg(long, value_parser = yes_or_no)]
    #[serde(default)]
    pub ignore_untrusted: bool,
}

/// The snapshots that are not trusted, by index, in order of creation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Untrusted {
    /// They are newer than the newest full that is trusted: the newest state seems to stand on them.
    pub refused: Vec<usize>,
    /// Jobs go on without them: a full that is trusted has superseded them, or the user said so.
    pub left_out: Vec<usize>,
    /// With this, those from before the first encrypted snapshot would be trusted.
    pub allowed_below: Option<Revision>,
}

impl Untrusted {
    /// Whether all is trusted.
    pub fn is_empty(&self) -> bool {
        self.refused.is_empty() && self.left_out.is_empty()
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = usize> + '_ {
        self.left_out.iter().chain(&self.refused).copied()
    }
}

impl Trust {
    fn distrusts(&self, catalog: &Catalog) -> bool {
        let is_encrypted = |s: &Snapshot| s.name.is_encrypted && !s.excluded;
        let all_plain = || !catalog.snapshots.iter().any(is_encrypted);
        self.only_encrypted && !(self.unless_all_plain && all_plain())
    }

    /// Marks what is not trusted in a catalog.
    pub fn mark(&self, catalog: &mut Catalog) {
        if !self.distrusts(catalog) {
            return;
        }
        let encrypted = Encrypted::since(catalog);
        for s in &mut catalog.snapshots {
            let is_allowed = encrypted.is_behind(&s.name)
                && self
                    .plaintext_below
                    .is_some_and(|below| s.name.last < below);
            s.untrusted = !s.name.is_encrypted && !is_allowed;
        }
    }

    /// Fulls that are not encrypted and do not come before the first encrypted snapshot, by index: nothing of ours makes
    /// them, so that they must not make others go.
    pub fn out_of_place(&self, catalog: &Catalog) -> Vec<usize> {
        if !self.distrusts(catalog) {
            return Vec::new();
        }
        let encrypted = Encrypted::since(catalog);
        let is_out_of_place = |&i: &usize| {
            let name = &catalog.snapshots[i].name;
            name.is_full() && !name.is_encrypted && !encrypted.is_behind(name)
        };
        catalog.usable().filter(is_out_of_place).collect()
    }
}

/// Where the first encrypted snapshot stands.
struct Encrypted {
    /// When it was made.
    created: i64,
    /// The last revision that may have been saved before it.
    after: Revision,
}

impl Encrypted {
    fn since(catalog: &Catalog) -> Self {
        let counts = |s: &&Snapshot| s.name.is_encrypted && !s.excluded;
        let encrypted = catalog.snapshots.iter().filter(counts);
        // In order of creation.
        match { encrypted }.next().map(|s| &s.name) {
            None => Encrypted {
                created: i64::MAX,
                after: Revision(i64::MAX),
            },
            Some(first) => Encrypted {
                created: first.created,
                after: match first.kind {
                    Kind::Full => first.last,
                    Kind::Incr => first.start.previous(),
                },
            },
        }
    }

    /// Whether a plain snapshot comes before all that is encrypted.
    fn is_behind(&self, plain: &SnapshotName) -> bool {
        plain.created <= self.created && plain.last <= self.after
    }
}

/// What is not trusted in a catalog that was marked.
pub fn untrusted(catalog: &Catalog, trust: &Trust) -> Untrusted {
    let order = |s: &Snapshot| (s.name.created, s.name.is_full());
    let fulls = catalog.usable().map(|i| &catalog.snapshots[i]);
    let newest = fulls.filter(|s| s.name.is_full()).map(order).max();
    let encrypted = Encrypted::since(catalog);
    let mut found = Untrusted::default();
    for (i, s) in catalog.snapshots.iter().enumerate() {
        if !s.untrusted || s.excluded {
            continue;
        }
        if encrypted.is_behind(&s.name) {
            let below = Some(Revision(s.name.last.0.saturating_add(1)));
            found.allowed_below = found.allowed_below.max(below);
        }
        match newest {
            _ if trust.ignore_untrusted => found.left_out.push(i),
            Some(newest) if order(s) <= newest => found.left_out.push(i),
            _ => found.refused.push(i),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALWAYS: Trust = Trust {
        only_encrypted: true,
        unless_all_plain: false,
        plaintext_below: None,
        ignore_untrusted: false,
    };

    /// Refused, left out, and below which revision they would be trusted.
    fn found(trust: Trust, names: &[&str]) -> (Vec<usize>, Vec<usize>, Option<i64>) {
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
        assert_eq!(found(Trust::default(), &names), (vec![], vec![], None));
    }

    #[test]
    fn a_plain_snapshot_behind_the_newest_encrypted_full_is_refused() {
        let names = [
            "Full-00000000-00000010-100.gz.age",
            "Incr-00000011-00000020-200.gz.age",
            "Incr-00000021-00000030-300.gz",
        ];
        // There was nothing plain before the prefix was encrypted, so no revision is told.
        assert_eq!(found(ALWAYS, &names), (vec![2], vec![], None));
        let allows = Trust {
            plaintext_below: Some(Revision(1000)),
            ..ALWAYS
        };
        assert_eq!(found(allows, &names), (vec![2], vec![], None));
        let ignores = Trust {
            ignore_untrusted: true,
            ..ALWAYS
        };
        assert_eq!(found(ignores, &names), (vec![], vec![2], None));
    }

    #[test]
    fn where_encryption_begins_all_may_be_trusted() {
        let begins = Trust {
            unless_all_plain: true,
            ..ALWAYS
        };
        let plain = ["Full-00000000-00000010-100", "Incr-00000011-00000020-200"];
        assert_eq!(found(begins, &plain), (vec![], vec![], None));
        let delta = [&plain[..], &["Incr-00000021-00000030-300.age"]].concat();
        assert_eq!(found(begins, &delta), (vec![0, 1], vec![], Some(21)));
    }

    #[test]
    fn a_prefix_that_was_encrypted_later_needs_no_flag_once_a_full_is_encrypted() {
        let plain = ["Full-00000000-00000010-100", "Incr-00000011-00000020-200"];
        assert_eq!(found(ALWAYS, &plain), (vec![0, 1], vec![], Some(21)));
        let delta = [&plain[..], &["Incr-00000021-00000030-300.age"]].concat();
        assert_eq!(found(ALWAYS, &delta), (vec![0, 1], vec![], Some(21)));
        let full = [&delta[..], &["Full-00000000-00000030-300.age"]].concat();
        assert_eq!(found(ALWAYS, &full), (vec![], vec![0, 1], Some(21)));
    }

    #[test]
    fn what_ends_below_a_revision_is_trusted_if_it_is_older_than_what_is_encrypted() {
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
        assert_eq!(found(below(21), &names), (vec![3], vec![], None));
        assert_eq!(found(below(20), &names), (vec![1, 3], vec![], Some(21)));
        assert_eq!(found(below(10), &names), (vec![0, 1, 3], vec![], Some(21)));
    }

    #[test]
    fn a_forged_name_from_before_raises_no_revision_that_is_told() {
        let names = [
            "Full-00000000-00000010-100",
            "Incr-00000011-00009999-150",
            "Incr-00000011-00000020-200.age",
        ];
        assert_eq!(found(ALWAYS, &names), (vec![0, 1], vec![], Some(11)));
        let allows = Trust {
            plaintext_below: Some(Revision(i64::MAX)),
            ..ALWAYS
        };
        assert_eq!(found(allows, &names), (vec![1], vec![], None));
    }

    #[test]
    fn what_is_excluded_does_not_tell_when_encryption_began() {
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
    fn a_plain_full_is_out_of_place_behind_what_is_encrypted() {
        let names = [
            "Full-00000000-00000010-100",
            "Full-00000000-00000020-200.age",
            "Incr-00000021-00000030-250",
            "Full-00000000-00000030-300",
            // Its time says that it is old, its revision that it is not.
            "Full-00000000-00000030-150",
        ];
        let catalog = Catalog::of_names(&names);
        assert_eq!(ALWAYS.out_of_place(&catalog), [1, 4]);
        assert!(Trust::default().out_of_place(&catalog).is_empty());
    }
}
