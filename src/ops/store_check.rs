//! The operation `store check`: one plain round through a store, with what each step is needed for.
//!
//! Lists, writes a small object below the staging folder, writes it again on condition that it is not there,
//! reads it and deletes it. Called by `cli::store_check`.

use super::report::{FailureFields, Report, ReportBuilder};
use crate::backup::catalog::{V1, V2};
use crate::base::Cancel;
use crate::error::{Error, Reason, Result};
use crate::prefix::Context;
use crate::store::staging::{STAGING, temporary_path};
use schemars::JsonSchema;
use serde::Serialize;

/// The status of a store check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Status {
    /// deltafold can work in this store.
    Succeeded,
    /// A step failed without which deltafold cannot work.
    Failed,
}

/// The result of a store check. The fields are a contract: `deltafold schema store-check`.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Outcome {
    /// Whether deltafold can work in the store.
    pub status: Status,
    /// The error, if it failed.
    #[serde(flatten)]
    pub error: FailureFields,
    /// The store's URL, without secrets.
    pub store: String,
    /// The steps, in their order.
    pub checks: Vec<Check>,
}

/// A step of the round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
pub enum Ability {
    /// The prefix can be listed.
    List,
    /// An object can be written.
    Put,
    /// A write on condition that the object does not exist is refused if it exists.
    ConditionalCreate,
    /// The object reads back as it was written.
    ReadBack,
    /// The object can be deleted, and is gone then.
    Delete,
}

/// The result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize)]
#[schemars(rename = "State")]
pub enum AbilityState {
    /// It worked.
    Works,
    /// It failed.
    Failed,
    /// It was not tried, because an earlier step failed.
    NotTried,
}

/// A step and its result.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize)]
pub struct Check {
    /// The step.
    pub ability: Ability,
    /// Its result.
    pub state: AbilityState,
    /// What the step is needed for, as human-readable text; it may change.
    pub needed_for: String,
    /// The error, if it failed.
    pub error: Option<String>,
}

/// Goes through the store once.
///
/// # Errors
/// Fails with the errors of a listing, such as `StoreUnreachable`, `PermissionDenied`, `Unauthenticated`, or
/// `NoSnapshots` if the bucket does not exist; with `Terminated`. Later failures are in the report.
pub fn run(ctx: &Context) -> Result<Report<Outcome>> {
    let clock = ReportBuilder::start();
    let store = &ctx.store;
    store.list(&[V2, V1, STAGING])?;
    let path = &temporary_path("check");
    let content = format!("deltafold checks this store: {path}").into_bytes();
    let most = content.len() as u64;

    let mut round = Round {
        checks: Vec::new(),
        error: None,
    };
    round.add(Ability::List, Ok(()));
    let is_written = round.step(Ability::Put, || store.replace_small(path, &content));
    round.step(Ability::ConditionalCreate, || {
        store.refuses_to_replace(path)
    });
    round.step(Ability::ReadBack, || {
        match store.read_small(path, most)? {
            Some(read) if read == content => Ok(()),
            _ => Err(wrong("other bytes came back than were written")),
        }
    });
    // The object goes whatever happened, also after a signal.
    let store = store.clone().with_cancel(Cancel::default());
    let deleted = store.delete(path).and_then(|()| match store.exists(path)? {
        true => Err(wrong("a deleted object is still there")),
        false => Ok(()),
    });
    match is_written {
        true => round.add(Ability::Delete, deleted),
        false => round.skip(Ability::Delete),
    };
    ctx.store.cancel().check()?;

    let error = round.error.map(|(ability, e)| {
        e.reason().error(format!(
            "deltafold cannot work in {}: {}: {e}",
            store.url(),
            ability.needed_for()
        ))
    });
    let outcome = Outcome {
        status: match error {
            None => Status::Succeeded,
            Some(_) => Status::Failed,
        },
        error: FailureFields::from(&error),
        store: store.url().to_owned(),
        checks: round.checks,
    };
    Ok(clock.report_with(outcome, error))
}

fn wrong(what: &str) -> Error {
    Reason::Configuration.error(what)
}

/// The steps so far.
struct Round {
    checks: Vec<Check>,
    error: Option<(Ability, Error)>,
}

impl Round {
    /// Tries a step, unless one before it failed. Returns whether it worked.
    fn step(&mut self, ability: Ability, step: impl FnOnce() -> Result<()>) -> bool {
        match self.error {
            None => self.add(ability, step()),
            Some(_) => self.skip(ability),
        }
    }

    /// Adds the result of a step. Returns whether it worked.
    fn add(&mut self, ability: Ability, result: Result<()>) -> bool {
        match result {
            Ok(()) => self.push(ability, AbilityState::Works, None),
            Err(e) => {
                self.push(ability, AbilityState::Failed, Some(e.to_string()));
                self.error.get_or_insert((ability, e));
            }
        }
        self.error.is_none()
    }

    /// Adds a step that was not tried.
    fn skip(&mut self, ability: Ability) -> bool {
        self.push(ability, AbilityState::NotTried, None);
        false
    }

    fn push(&mut self, ability: Ability, state: AbilityState, error: Option<String>) {
        self.checks.push(Check {
            ability,
            state,
            needed_for: ability.needed_for().to_owned(),
            error,
        });
    }
}

impl Ability {
    /// What the step is needed for.
    fn needed_for(self) -> &'static str {
        match self {
            Ability::List => "every command lists the snapshots",
            Ability::Put => "snapshots, locks and pins are written",
            Ability::ConditionalCreate => {
                "only one of several runs may give a snapshot its name, or hold the lock"
            }
            Ability::ReadBack => "every snapshot is read back when it is used",
            Ability::Delete => "old snapshots are deleted",
        }
    }
}
