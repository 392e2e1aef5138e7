//! The operation `pin`: keeps a chain whatever the retention policy says, and lets it go again.
//!
//! A pin is an object below deltafold-pins/ with the name of the chain's full. It protects from `gc` only; a bucket's
//! object lock protects from everybody.

use super::{LONGEST_NOTE, as_json, lock_of, release, take_lock};
use crate::backup::Snapshot;
use crate::backup::catalog::PINS;
use crate::backup::retention::chain_of;
use crate::base::flag_values::yes_or_no;
use crate::error::{Reason, Result};
use crate::mvcc::Revision;
use crate::ops::report::{Report, ReportBuilder};
use crate::prefix::Context;
use crate::prefix::scan::{Depth, by_names, no_snapshots_error, scan};
use crate::prefix::set_aside::{Purpose, decide_again};
use chrono::{DateTime, SubsecRound, Utc};
use serde::{Deserialize, Serialize};

/// The options of `pin`.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Revision, name or path of the full, as `deltafold list` shows it
    #[arg(value_name = "REVISION|NAME")]
    pub name: String,
    /// Record this reason in the pin
    #[arg(long, value_name = "TEXT", conflicts_with = "unpin")]
    pub reason: Option<String>,
    /// Remove the pin
    #[arg(long, value_parser = yes_or_no)]
    pub unpin: bool,
}

/// The content of a pin object.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Pin {
    pinned_at: DateTime<Utc>,
    reason: Option<String>,
}

/// The result of `pin`. The fields are a contract.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct PinnedChain {
    /// Whether the chain is pinned now.
    pub pinned: bool,
    /// The path of the full, below the store's prefix.
    pub full: String,
    /// The time since which it is pinned; null if it is not.
    pub pinned_at: Option<DateTime<Utc>>,
    /// The text given with --reason.
    pub note: Option<String>,
    /// The paths of what the pin keeps (or kept): the full, and the deltas after it up to the next full
    /// of its timeline.
    pub chain: Vec<String>,
}

/// Pins a chain, or unpins it.
///
/// # Errors
/// Fails with `NoSnapshots` if there is no such full, `SnapshotVanished` if a snapshot of the chain was
/// deleted during the run, `LockHeld`, or an error of the store.
pub fn run(ctx: &Context, options: &Options) -> Result<Report<PinnedChain>> {
    let mut clock = ReportBuilder::start();
    let without_lock = "running without a lock: make sure that no gc runs at the same time";
    let lock = match take_lock(&ctx.store, lock_of(&ctx.store)?)? {
        Ok(guard) => Some(guard),
        Err(why) => {
            clock.warnings.push(format!("{without_lock}: {why}"));
            None
        }
    };
    let catalog = by_names(&ctx.store)?;
    if catalog.snapshots.is_empty() {
        return Err(no_snapshots_error(ctx, &catalog, None));
    }
    let fulls = catalog.snapshots.iter().filter(|s| s.name.is_full());
    let revision = options.name.parse().map(Revision).ok();
    let named: Vec<&Snapshot> = fulls
        .filter(|s| revision == Some(s.name.last) || is_named(&s.path, &options.name))
        .collect();
    let full = match named[..] {
        [full] => full,
        [] => {
            return Err(Reason::NoSnapshots.error(format!(
                "{} holds no full snapshot {}: see `deltafold list`",
                ctx.store.url(),
                options.name
            )));
        }
        _ => {
            let names: Vec<&str> = named.iter().map(|s| s.path.as_str()).collect();
            return Err(Reason::Usage.error(format!(
                "several full snapshots are called {}: give one of {}",
                options.name,
                names.join(", ")
            )));
        }
    };
    let pin_path = format!("{PINS}/{}", full.name);
    let content = ctx.store.read_small(&pin_path, LONGEST_NOTE)?;
    let existing: Option<Pin> = content.and_then(|text| serde_json::from_slice(&text).ok());
    let kept = chain_paths(ctx, full, &mut clock.warnings)?;
    let (is_changed, pin) = match (options.unpin, existing) {
        (true, _) => {
            ctx.store.delete(&pin_path)?;
            (full.pinned, None)
        }
        (false, Some(pin)) if options.reason.is_none() || options.reason == pin.reason => {
            (false, Some(pin))
        }
        (false, existing) => {
            let pin = Pin {
                pinned_at: existing.map_or_else(|| Utc::now().trunc_subsecs(0), |p| p.pinned_at),
                reason: options.reason.clone(),
            };
            ctx.store.replace_small(&pin_path, &as_json(&pin)?)?;
            // A gc that runs without the lock may have deleted part of the chain before it saw the pin.
            let still_there = chain_paths(ctx, full, &mut Vec::new())?;
            if let Some(gone) = kept.iter().find(|p| !still_there.contains(p)) {
                return Err(Reason::SnapshotVanished.error(format!(
                    "{} was deleted while its chain was pinned; the rest of the chain is kept",
                    ctx.store.name(gone)
                )));
            }
            (true, Some(pin))
        }
    };
    release(lock);
    let body = PinnedChain {
        pinned: !options.unpin,
        full: full.path.clone(),
        pinned_at: pin.as_ref().map(|p| p.pinned_at),
        note: pin.and_then(|p| p.reason),
        chain: kept,
    };
    Ok(clock.ended(body, is_changed, None))
}

/// Returns the paths of a full's chain. Snapshot contents decide which deltas are its own if names
/// leave a doubt.
fn chain_paths(ctx: &Context, full: &Snapshot, warnings: &mut Vec<String>) -> Result<Vec<String>> {
    let scan = decide_again([ctx], Purpose::Verify, || scan(ctx, Depth::Doubtful))?;
    let snapshots = &scan.catalog.snapshots;
    let Some(i) = snapshots.iter().position(|s| s.path == full.path) else {
        return Err(Reason::SnapshotVanished.error(format!(
            "{} was deleted during the run",
            ctx.store.name(&full.path)
        )));
    };
    let chain = chain_of(&scan.catalog, &scan.timelines, i);
    match chain.iter().filter(|&&i| snapshots[i].excluded).count() {
        0 => {}
        n => warnings.push(format!(
            "{n} of the chain's {} snapshots are excluded: they are kept, but not used",
            chain.len()
        )),
    }
    Ok(chain
        .into_iter()
        .map(|i| snapshots[i].path.clone())
        .collect())
}

/// Returns whether a path is the snapshot that an argument names, by its path or its name.
fn is_named(path: &str, name: &str) -> bool {
    let wanted = name.trim_start_matches('/');
    path == wanted || path.rsplit('/').next() == Some(wanted)
}
