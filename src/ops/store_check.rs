//! The store check: what a store really does, and what that means for backups in it.
//!
//! `store::probe` tries it; here stands what is needed for what. A pure function of the findings.

use super::Context;
use super::report::{FailureFields, Report, ReportBuilder};
use crate::error::{Error, Reason, Result};
use crate::store::probe::{Ability, Finding, State};
use schemars::JsonSchema;
use serde::Serialize;

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Status {
    /// deltafold can work safely there.
    Succeeded,
    /// Something that is needed is missing, or is a lie.
    Failed,
}

/// What came of it. The fields are a contract: `docs/store-check-result.schema.json`.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// Why, if it failed.
    #[serde(flatten)]
    pub error: FailureFields,
    /// The store's URL, without secrets.
    pub store: String,
    /// What was found, each ability once.
    pub checks: Vec<Check>,
    /// What was written and could not be removed again.
    pub left_behind: Vec<String>,
}

/// What was found of one ability.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
pub struct Check {
    /// Which: see stores.md.
    pub ability: Ability,
    /// `Works`; `Refused`: it says that it does not, or not for these credentials; `Lies`: it says that it
    /// does, and does something else; `Absent`: it has no such thing; `NotTried`, because of something else.
    pub state: State,
    /// Whether deltafold cannot work safely with it as it is.
    pub is_problem: bool,
    /// What was seen. For people: it may change.
    pub detail: String,
    /// What it means for backups, and what to do. For people: it may change.
    pub meaning: String,
}

/// Finds out what the store does.
///
/// # Errors
/// Those of [`Store::probe`](crate::store::Store::probe).
pub fn run(ctx: &Context) -> Result<Report<Outcome>> {
    let clock = ReportBuilder::start();
    let findings = ctx.store.probe()?;
    let checks: Vec<Check> = findings.all.into_iter().map(judge).collect();
    let error = summed_up(&checks, ctx.store.url());
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

/// What a finding means.
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

/// Whether deltafold cannot work safely without an ability, as it is.
fn is_problem(ability: Ability, state: State) -> bool {
    match ability {
        Ability::ObjectLock | Ability::Versioning => false,
        _ if state == State::NotTried => true,
        Ability::Put | Ability::ReadBack | Ability::List => state != State::Works,
        Ability::Delete | Ability::Multipart => state != State::Works,
        // What is refused is known; what is a lie is relied on.
        Ability::ConditionalCopy | Ability::ConditionalCreate | Ability::ConditionalUpdate => {
            state == State::Lies
        }
        Ability::Checksum | Ability::LargestCopy | Ability::ExcludeTag => false,
        Ability::TagCount | Ability::Clock => false,
    }
}

fn meaning(ability: Ability, state: State) -> &'static str {
    use State::{Absent, Lies, NotTried, Refused, Works};
    match (ability, state) {
        (Ability::ObjectLock, Works) => {
            "`deltafold lock` keeps a chain from being deleted; locks by default keep staging objects as well, so rather use none"
        }
        (Ability::ObjectLock, _) => {
            "`deltafold lock` refuses to work here: for locks use a bucket of S3 with an object lock enabled"
        }
        (Ability::Versioning, Works) => {
            "`deltafold gc` deletes versions one by one, which takes the right s3:DeleteObjectVersion; what others delete can be got back"
        }
        (Ability::Versioning, Absent) => "what is deleted cannot be got back",
        (Ability::Versioning, _) => {
            "whether a deletion frees room is not known: allow s3:GetBucketVersioning"
        }
        (_, NotTried) => "whether deltafold can work here is not known: see the other rows",
        (Ability::Put, Works) => "snapshots can be written",
        (Ability::Put, _) => {
            "nothing can be written: check the credentials and what they allow (docs/stores.md)"
        }
        (Ability::ReadBack, Works) => "what is published was read back",
        (Ability::ReadBack, _) => "do not keep backups here: what is written is not what is read",
        (Ability::List, Works) => "each run sees what those before it wrote",
        (Ability::List, _) => {
            "runs would not see the newest snapshots: use another store, or allow the listing"
        }
        (Ability::Delete, Works) => "staging objects and old snapshots go",
        (Ability::Delete, Refused) => {
            "staging objects stay, and `gc` frees nothing: allow deletion, at least below deltafold-staging/"
        }
        (Ability::Delete, _) => "what is deleted stays: use another store, or turn its cache off",
        (Ability::Multipart, Works) => "snapshots of more than 8 MiB can be written",
        (Ability::Multipart, _) => {
            "snapshots of more than 8 MiB cannot be written: use another store, or allow multipart uploads"
        }
        (Ability::ConditionalCopy, Works) => {
            "a snapshot gets its name from one run only, and nothing is overwritten"
        }
        (Ability::ConditionalCopy, Lies) => {
            "it overwrites: deltafold's own runs look out for each other before they give a name (slower), other tools do not; let only one run write at any time, or use another store"
        }
        (Ability::ConditionalCopy, _) => {
            "runs look out for each other before they give a name, which takes longer"
        }
        (Ability::ConditionalCreate, Works) => "locks in the store keep a second run away",
        (Ability::ConditionalCreate, Lies) => {
            "locks in the store keep nobody away: in Kubernetes use --lock-lease; elsewhere let only one run write at any time, or use another store"
        }
        (Ability::ConditionalUpdate, Works) => {
            "a lock whose holder is gone is taken by one run only"
        }
        (Ability::ConditionalUpdate, Lies) => {
            "two runs may take one lock whose holder is gone: in Kubernetes use --lock-lease; elsewhere let only one run write at any time, or use another store"
        }
        (Ability::ConditionalCreate | Ability::ConditionalUpdate, _) => {
            "there are no locks in this store: in Kubernetes use --lock-lease; commands that need a lock refuse to run without"
        }
        (Ability::Checksum, Works) => {
            "a snapshot of less than 8 MiB is written by one request, if ConditionalCreate and ConditionalCopy work as well"
        }
        (Ability::Checksum, _) => {
            "small snapshots go through deltafold-staging/ like large ones, which takes more requests"
        }
        (Ability::LargestCopy, _) => {
            "a snapshot beyond a limit cannot be published: make it smaller by --compression zstd or less --keep-history"
        }
        (Ability::ExcludeTag, Works) => "excluded snapshots are tagged",
        (Ability::ExcludeTag, Absent) => {
            "excluded snapshots are marked by an object beside them, NAME.exclude"
        }
        (Ability::ExcludeTag, _) => {
            "excluded snapshots are marked by an object beside them, NAME.exclude; tags that others set are not seen (allow s3:GetObjectTagging, s3:PutObjectTagging)"
        }
        (Ability::TagCount, Works) => "only objects that have tags are asked for them",
        (Ability::TagCount, _) => {
            "the tags of each delta are asked for before it is read, if the store has tags"
        }
        (Ability::Clock, Works) => "ages are told the same here and there",
        (Ability::Clock, _) => {
            "ages are counted by the smaller of both clocks; S3 refuses requests that are 15 minutes off: set this machine's clock by NTP"
        }
    }
}

fn summed_up(checks: &[Check], url: &str) -> Option<Error> {
    let problems: Vec<&Check> = checks.iter().filter(|c| c.is_problem).collect();
    // What was tried and failed tells more than what was not tried for it.
    let first = problems
        .iter()
        .find(|c| c.state != State::NotTried)
        .or(problems.first())?;
    let locks = checks.iter().find(|c| c.ability == Ability::ObjectLock);
    let why = match (first.state, locks) {
        (State::NotTried, Some(locks)) => format!(
            "nothing was tried, for {}; try a bucket that is set up the same, without that default",
            locks.detail
        ),
        _ => format!("{}; {}", first.detail, first.meaning),
    };
    Some(Reason::Configuration.error(format!("deltafold cannot work safely in {url}: {why}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(with: impl Fn(Ability) -> State) -> Vec<Check> {
        let finding = |ability| Finding {
            ability,
            state: with(ability),
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
    fn a_store_that_does_all_is_no_problem_and_one_without_extras_neither() {
        assert!(summed_up(&all(|_| State::Works), "u").is_none());
        let plain = all(|a| match a {
            Ability::ExcludeTag
            | Ability::TagCount
            | Ability::Versioning
            | Ability::ObjectLock
            | Ability::Checksum => State::Absent,
            Ability::ConditionalCreate | Ability::ConditionalUpdate | Ability::ConditionalCopy => {
                State::Refused
            }
            _ => State::Works,
        });
        assert!(summed_up(&plain, "u").is_none(), "{plain:?}");
    }

    #[test]
    fn each_thing_needed_is_missed_and_each_lie_on_conditions_is_told() {
        use Ability::*;
        for needed in [Put, ReadBack, List, Delete, Multipart] {
            for state in [State::Refused, State::Lies, State::NotTried] {
                let checks = all(|a| if a == needed { state } else { State::Works });
                let e = summed_up(&checks, "u").unwrap();
                assert_eq!(e.reason(), Reason::Configuration, "{needed:?} {state:?}");
            }
        }
        for lied in [ConditionalCreate, ConditionalUpdate, ConditionalCopy] {
            let checks = all(|a| if a == lied { State::Lies } else { State::Works });
            let e = summed_up(&checks, "u").unwrap().to_string();
            assert!(e.contains(&format!("{lied:?} was seen")), "{e}");
        }
    }

    #[test]
    fn the_cause_is_told_before_what_was_not_tried_for_it() {
        let checks = all(|a| match a {
            Ability::Multipart => State::Refused,
            _ => State::NotTried,
        });
        let e = summed_up(&checks, "u").unwrap().to_string();
        assert!(e.contains("Multipart was seen"), "{e}");
    }
}
