//! The operation `store check`: finds out what a store really does, and what that means for backups in
//! it.
//!
//! `store::probe` tries the store's abilities; this module decides which findings are problems, as a
//! pure function. Called by `cli::store_check`.

use super::Context;
use super::report::{FailureFields, Report, ReportBuilder};
use crate::error::{Error, Reason, Result};
use crate::store::probe::{Ability, AbilityState, Finding};
use schemars::JsonSchema;
use serde::Serialize;

/// The status of a store check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Status {
    /// deltafold can work safely in this store.
    Succeeded,
    /// A required ability is missing, or the store claims one that it does not have.
    Failed,
}

/// The result of a store check. The fields are a contract: `docs/store-check-result.schema.json`.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Outcome {
    /// Whether deltafold can work safely in the store.
    pub status: Status,
    /// The error, if it failed.
    #[serde(flatten)]
    pub error: FailureFields,
    /// The store's URL, without secrets.
    pub store: String,
    /// The findings, one for each ability.
    pub checks: Vec<Check>,
    /// Objects that were written and could not be deleted again.
    pub left_behind: Vec<String>,
}

/// A finding about one ability.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
pub struct Check {
    /// The ability: see stores.md.
    pub ability: Ability,
    /// `Works`. `Refused`: the store says that it cannot, or not with these credentials. `Lies`: the
    /// store says that it can, and does something else. `Absent`: the store has no such ability.
    /// `NotTried`: an earlier finding made the test impossible.
    pub state: AbilityState,
    /// Whether deltafold cannot work safely because of this finding.
    pub is_problem: bool,
    /// What was observed, as human-readable text; it may change.
    pub detail: String,
    /// What it means for backups and what to do, as human-readable text; it may change.
    pub meaning: String,
}

/// Tests the store's abilities and judges them.
///
/// # Errors
/// Fails with the errors of [`Store::probe`](crate::store::Store::probe).
pub fn run(ctx: &Context) -> Result<Report<Outcome>> {
    let clock = ReportBuilder::start();
    let findings = ctx.store.probe()?;
    let checks: Vec<Check> = findings.all.into_iter().map(judge).collect();
    let error = summarize(&checks, ctx.store.url());
    let outcome = Outcome {
        status: match error {
            None => Status::Succeeded,
            Some(_) => Status::Failed,
        },
        error: FailureFields::from(&error),
        store: ctx.store.url().to_owned(),
        checks,
        left_behind: findings.left_behind,
    };
    Ok(clock.report_with(outcome, error))
}

/// Judges a finding.
pub fn judge(finding: Finding) -> Check {
    let (ability, state) = (finding.ability, finding.state);
    Check {
        ability,
        state,
        is_problem: is_problem(ability, state),
        detail: finding.detail,
        meaning: meaning(ability, state).to_owned(),
    }
}

/// Returns whether deltafold cannot work safely with an ability in this state.
fn is_problem(ability: Ability, state: AbilityState) -> bool {
    match ability {
        Ability::ObjectLock | Ability::Versioning => false,
        _ if state == AbilityState::NotTried => true,
        Ability::Put | Ability::ReadBack | Ability::List => state != AbilityState::Works,
        Ability::Delete | Ability::Multipart => state != AbilityState::Works,
        // A refusal is noticed when it matters; a false claim is not.
        Ability::ConditionalCopy | Ability::ConditionalCreate | Ability::ConditionalUpdate => {
            state == AbilityState::Lies
        }
        Ability::Checksum | Ability::LargestCopy | Ability::ExcludeTag => false,
        Ability::TagCount | Ability::Clock => false,
    }
}

/// Returns what an ability's state means for backups, and what to do.
fn meaning(ability: Ability, state: AbilityState) -> &'static str {
    use AbilityState::{Absent, Lies, NotTried, Refused, Works};
    match (ability, state) {
        (Ability::ObjectLock, Works) => {
            "`deltafold lock` can protect a chain from deletion; a default retention of the bucket would also protect staging objects, so set none"
        }
        (Ability::ObjectLock, _) => {
            "`deltafold lock` does not work here: to lock chains, use an S3 bucket with object lock enabled"
        }
        (Ability::Versioning, Works) => {
            "`deltafold gc` deletes versions one by one, for which it needs s3:DeleteObjectVersion; what others delete can be recovered"
        }
        (Ability::Versioning, Absent) => "deleted objects cannot be recovered",
        (Ability::Versioning, _) => {
            "it is not known whether a deletion frees space: allow s3:GetBucketVersioning"
        }
        (_, NotTried) => "it is not known whether deltafold can work here: see the other rows",
        (Ability::Put, Works) => "snapshots can be written",
        (Ability::Put, _) => {
            "nothing can be written: check the credentials and their permissions (docs/stores.md)"
        }
        (Ability::ReadBack, Works) => "every snapshot is read back before it is published",
        (Ability::ReadBack, _) => {
            "do not keep backups here: the store returns other bytes than were written"
        }
        (Ability::List, Works) => "each run sees what earlier runs wrote",
        (Ability::List, _) => {
            "runs would not see the newest snapshots: use another store, or allow the listing"
        }
        (Ability::Delete, Works) => "staging objects and old snapshots can be deleted",
        (Ability::Delete, Refused) => {
            "staging objects are left behind, and `gc` frees nothing: allow deletion, at least below deltafold-staging/"
        }
        (Ability::Delete, _) => {
            "deleted objects are still there: use another store, or turn its cache off"
        }
        (Ability::Multipart, Works) => "snapshots of more than 8 MiB can be written",
        (Ability::Multipart, _) => {
            "snapshots of more than 8 MiB cannot be written: use another store, or allow multipart uploads"
        }
        (Ability::ConditionalCopy, Works) => {
            "only one run can publish a snapshot of a given name, and nothing is overwritten"
        }
        (Ability::ConditionalCopy, Lies) => {
            "the store overwrites objects: runs of deltafold check for each other before they publish (slower), but other tools do not; let only one run write at a time, or use another store"
        }
        (Ability::ConditionalCopy, _) => {
            "runs check for each other before they publish, which takes longer"
        }
        (Ability::ConditionalCreate, Works) => "locks in the store keep a second run away",
        (Ability::ConditionalCreate, Lies) => {
            "locks in the store do not work: in Kubernetes use --lock-lease; elsewhere let only one run write at a time, or use another store"
        }
        (Ability::ConditionalUpdate, Works) => "only one run can take over the lock of a dead run",
        (Ability::ConditionalUpdate, Lies) => {
            "two runs may take over the lock of a dead run: in Kubernetes use --lock-lease; elsewhere let only one run write at a time, or use another store"
        }
        (Ability::ConditionalCreate | Ability::ConditionalUpdate, _) => {
            "this store has no locks: in Kubernetes use --lock-lease; commands that need a lock do not run without one"
        }
        (Ability::Checksum, Works) => {
            "a snapshot smaller than 8 MiB is written by one request, if ConditionalCreate and ConditionalCopy work as well"
        }
        (Ability::Checksum, _) => {
            "small snapshots go through deltafold-staging/ like large ones, which takes more requests"
        }
        (Ability::LargestCopy, _) => {
            "a snapshot above a limit cannot be published: make it smaller with --compression zstd or a shorter --keep-history"
        }
        (Ability::ExcludeTag, Works) => "excluded snapshots are tagged",
        (Ability::ExcludeTag, Absent) => "excluded snapshots get an exclusion marker, NAME.exclude",
        (Ability::ExcludeTag, _) => {
            "excluded snapshots get an exclusion marker, NAME.exclude; tags set by others are not seen (allow s3:GetObjectTagging, s3:PutObjectTagging)"
        }
        (Ability::TagCount, Works) => "tags are requested only of objects that have some",
        (Ability::TagCount, _) => {
            "the tags of each delta are requested before it is read, if the store has tags"
        }
        (Ability::Clock, Works) => "this machine and the store agree on the age of objects",
        (Ability::Clock, _) => {
            "ages are counted by the earlier of the two clocks, and S3 refuses requests that are 15 minutes off: set this machine's clock by NTP"
        }
    }
}

/// Returns the error for the most telling problem; `None` if there is no problem.
fn summarize(checks: &[Check], url: &str) -> Option<Error> {
    let problems: Vec<&Check> = checks.iter().filter(|c| c.is_problem).collect();
    // A failed test explains more than the tests that were skipped because of it.
    let first = problems
        .iter()
        .find(|c| c.state != AbilityState::NotTried)
        .or(problems.first())?;
    let locks = checks.iter().find(|c| c.ability == Ability::ObjectLock);
    let problem = match (first.state, locks) {
        (AbilityState::NotTried, Some(locks)) => format!(
            "nothing was tested, because of the bucket's object lock ({}): test a bucket with the same settings but without a default retention",
            locks.detail
        ),
        _ => format!("{}; {}", first.detail, first.meaning),
    };
    Some(Reason::Configuration.error(format!("deltafold cannot work safely in {url}: {problem}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checks_of(state_of: impl Fn(Ability) -> AbilityState) -> Vec<Check> {
        let finding = |ability| Finding {
            ability,
            state: state_of(ability),
            detail: format!("{ability:?} was seen"),
        };
        Ability::ALL
            .iter()
            .copied()
            .map(finding)
            .map(judge)
            .collect()
    }

    #[test]
    fn a_store_with_all_abilities_or_without_optional_ones_passes() {
        assert!(summarize(&checks_of(|_| AbilityState::Works), "u").is_none());
        let plain = checks_of(|a| match a {
            Ability::ExcludeTag
            | Ability::TagCount
            | Ability::Versioning
            | Ability::ObjectLock
            | Ability::Checksum => AbilityState::Absent,
            Ability::ConditionalCreate | Ability::ConditionalUpdate | Ability::ConditionalCopy => {
                AbilityState::Refused
            }
            _ => AbilityState::Works,
        });
        assert!(summarize(&plain, "u").is_none(), "{plain:?}");
    }

    #[test]
    fn a_missing_required_ability_or_a_false_claim_is_an_error() {
        use Ability::*;
        for needed in [Put, ReadBack, List, Delete, Multipart] {
            for state in [
                AbilityState::Refused,
                AbilityState::Lies,
                AbilityState::NotTried,
            ] {
                let checks = checks_of(|a| {
                    if a == needed {
                        state
                    } else {
                        AbilityState::Works
                    }
                });
                let e = summarize(&checks, "u").unwrap();
                assert_eq!(e.reason(), Reason::Configuration, "{needed:?} {state:?}");
            }
        }
        for lied in [ConditionalCreate, ConditionalUpdate, ConditionalCopy] {
            let checks = checks_of(|a| {
                if a == lied {
                    AbilityState::Lies
                } else {
                    AbilityState::Works
                }
            });
            let e = summarize(&checks, "u").unwrap().to_string();
            assert!(e.contains(&format!("{lied:?} was seen")), "{e}");
        }
    }

    #[test]
    fn a_failed_test_is_reported_before_those_that_it_prevented() {
        let checks = checks_of(|a| match a {
            Ability::Multipart => AbilityState::Refused,
            _ => AbilityState::NotTried,
        });
        let e = summarize(&checks, "u").unwrap().to_string();
        assert!(e.contains("Multipart was seen"), "{e}");
    }
}
