//! Restore into a plain snapshot: a file, or an object of a store. It gets its name last, so that an incomplete one
//! never has it.

use super::candidates::Candidates;
use super::needed::Inspection;
use super::output::WriteFailure;
use super::write;
use super::{NamedBackup, Restoration, Restored};
use crate::error::Result;
use crate::ops::plain_target::{PlainTarget, Unnamed};
use crate::ops::report::Report;

impl Restoration<'_> {
    /// Restores into a plain snapshot.
    pub(super) fn into_file(mut self, target: &PlainTarget) -> Result<Report<Restored>> {
        let mut contexts = self.backups.iter().filter_map(NamedBackup::context);
        target.check(contexts.any(|ctx| ctx.keys.encrypts()))?;
        let candidates = Candidates::open(self.backups, &self.options.request())?;
        let decision = Inspection::NotInspected.decide();
        let mut file = None;
        let (mut outcome, _) =
            self.try_candidates(candidates, decision, |restoration, source, ctx| {
                if restoration.options.dry_run {
                    return Ok(None);
                }
                let directory = target.directory(&ctx.temp_dir);
                let unnamed = Unnamed::new(directory).map_err(WriteFailure::Target)?;
                let rebuild = restoration.plan(source, ctx, None)?;
                let written = write::snapshot(ctx, &rebuild, &unnamed, directory)?;
                file = Some(unnamed);
                Ok(Some(written))
            })?;
        if let Some(file) = file {
            target.publish(file, &self.cancel)?;
        }
        outcome.snapshot_file = Some(target.name());
        Ok(self.clock.report(outcome))
    }
}
