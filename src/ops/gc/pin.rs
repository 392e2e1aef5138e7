//! Pinning a chain, so that no policy removes it, and letting it go again.
//!
//! A pin is an object beside the snapshots, by the name of the full. `cli` calls it.

use super::undelete::{catalog, is_named, keep_gc_away};
use super::{LONGEST_NOTE, Status, as_json, release};
use crate::backup::catalog::PINS;
use crate::backup::retention::chain_of;
use crate::base::flag_values::yes_or_no;
use crate::error::{Reason, Result};
use crate::ops::Context;
use crate::ops::report::{Clock, Report};
use crate::ops::scan::{Depth, scan_asking};
use crate::ops::tags::Ask;
use chrono::{DateTime, SubsecRound, Utc};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What to pin.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Name or path of the full
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Record this reason in the pin
    #[arg(long, value_name = "TEXT", conflicts_with = "unpin")]
    pub reason: Option<String>,
    /// Remove the pin
    #[arg(long, value_parser = yes_or_no)]
    pub unpin: bool,
}

/// What stands in a pin.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Pin {
    pinned_at: DateTime<Utc>,
    reason: Option<String>,
}

/// What was done. The fields are a contract: `docs/pin-result.schema.json`.
#[derive(Debug, Clone, JsonSchema, Serialize)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// Whether the chain is pinned now.
    pub pinned: bool,
    /// The full, below the store's prefix.
    pub full: String,
    /// Since when it is pinned; null if it is not.
    pub pinned_at: Option<DateTime<Utc>>,
    /// What was given as --reason.
    pub note: Option<String>,
    /// What the pin keeps (or kept): the full, and the deltas after it up to the next full of its timeline;
    /// paths.
    pub chain: Vec<String>,
}

/// Pins, or lets go.
///
/// # Errors
/// `NoSnapshots` where there is no such full; `SnapshotVanished` where something of the chain went
/// meanwhile; the store's; `LockHeld`.
pub fn run(ctx: &Context, options: &Options) -> Result<Report<Outcome>> {
    let mut clock = Clock::start();
    let held = keep_gc_away(ctx, &mut clock.warnings)?;
    let by_names = catalog(ctx)?;
    let all = &by_names.snapshots;
    let full = all
        .iter()
        .find(|s| s.name.is_full() && is_named(&s.path, &options.name))
        .ok_or_else(|| {
            Reason::NoSnapshots.error(format!(
                "{} holds no full snapshot {}: see `deltafold list`",
                ctx.store.url(),
                options.name
            ))
        })?;
    let at = format!("{PINS}/{}", full.name);
    let before = ctx.store.read_small(&at, LONGEST_NOTE)?;
    let before: Option<Pin> = before.and_then(|text| serde_json::from_slice(&text).ok());
    let was_pinned = full.pinned;
    let chain = |warnings: &mut Vec<String>| -> Result<Vec<String>> {
        // Which deltas are its own, contents tell where names leave doubt.
        let scan = scan_asking(ctx, Depth::Doubtful, Ask::All)?;
        let of = &scan.catalog.snapshots;
        let Some(i) = of.iter().position(|s| s.path == full.path) else {
            return Err(Reason::SnapshotVanished
                .error(format!("{} went meanwhile", ctx.store.name(&full.path))));
        };
        let chain = chain_of(&scan.catalog, &scan.timelines, i);
        match chain.iter().filter(|&&i| of[i].excluded).count() {
            0 => {}
            n => warnings.push(format!(
                "{n} of these {} are excluded: they are kept, and of no use until they are brought back (deltafold undelete)",
                chain.len()
            )),
        }
        Ok(chain.into_iter().map(|i| of[i].path.clone()).collect())
    };
    let kept = chain(&mut clock.warnings)?;
    let (status, pin) = match (options.unpin, before) {
        (true, _) => {
            ctx.store.delete(&at)?;
            let status = match was_pinned {
                true => Status::Succeeded,
                false => Status::NothingToDo,
            };
            (status, None)
        }
        (false, Some(pin)) if options.reason.is_none() || options.reason == pin.reason => {
            (Status::NothingToDo, Some(pin))
        }
        (false, before) => {
            let pin = Pin {
                pinned_at: before.map_or_else(|| Utc::now().trunc_subsecs(0), |p| p.pinned_at),
                reason: options.reason.clone(),
            };
            ctx.store.replace_small(&at, &as_json(&pin)?)?;
            // A gc without the lock may have been about to delete what was seen above.
            let now = chain(&mut Vec::new())?;
            if let Some(gone) = kept.iter().find(|p| !now.contains(p)) {
                return Err(Reason::SnapshotVanished.error(format!(
                    "{} went while its chain was pinned; what is left of it is kept",
                    ctx.store.name(gone)
                )));
            }
            (Status::Succeeded, Some(pin))
        }
    };
    release(held);
    Ok(clock.report(Outcome {
        status,
        pinned: !options.unpin,
        full: full.path.clone(),
        pinned_at: pin.as_ref().map(|p| p.pinned_at),
        note: pin.and_then(|p| p.reason),
        chain: kept,
    }))
}
