//! Restore into a plain snapshot file. The file gets its name last, so that an incomplete one never has
//! it.
//!
//! Does not overwrite a file. Called by `ops::restore`.

use super::candidates::Candidates;
use super::needed::Inspection;
use super::output::{Unnamed, WriteFailure, name_taken};
use super::write;
use super::{Outcome, Restoration, path_text};
use crate::backup::name::ENCRYPTED;
use crate::datadir::install;
use crate::error::{Reason, Result};
use crate::ops::report::Report;
use std::path::Path;

impl Restoration<'_> {
    /// Restores into the file `path`.
    pub(super) fn into_file(mut self, path: &Path) -> Result<Report<Outcome>> {
        if path.symlink_metadata().is_ok() {
            return Err(name_taken(path));
        }
        let parent = match path.parent() {
            Some(p) if !p.as_os_str().is_empty() => p,
            _ => Path::new("."),
        };
        if !parent.is_dir() {
            let parent = parent.display();
            let message = format!("--to-snapshot: the folder {parent} does not exist");
            return Err(Reason::Usage.error(message));
        }
        self.check_encryption(path)?;
        let candidates = Candidates::open(self.backups, &self.options.request(), false)?;
        let decision = Inspection::NotInspected.decide();
        let mut file = None;
        let (mut outcome, _) =
            self.try_candidates(candidates, decision, |restoration, source, ctx| {
                if restoration.options.dry_run {
                    return Ok(None);
                }
                let unnamed = Unnamed::new(parent).map_err(WriteFailure::Target)?;
                let rebuild = restoration.plan(source, ctx, None)?;
                let written = write::snapshot(ctx, &rebuild, &unnamed, parent)?;
                file = Some(unnamed);
                Ok(Some(written))
            })?;
        if let Some(file) = file {
            file.name(path)?;
            install::sync_directory(parent)?;
        }
        outcome.snapshot_file = Some(path_text(path));
        Ok(self.clock.report(outcome))
    }

    /// Fails unless the file's name and the recipients agree on whether it is encrypted.
    fn check_encryption(&self, path: &Path) -> Result<()> {
        let mut contexts = self.backups.iter().filter_map(|b| b.context().ok());
        let encrypts = contexts.any(|ctx| ctx.keys.encrypts());
        let has_encrypted_name = path
            .as_os_str()
            .as_encoded_bytes()
            .ends_with(ENCRYPTED.as_bytes());
        let (reason, problem) = match (has_encrypted_name, encrypts) {
            (true, false) => (
                Reason::Configuration,
                format!(
                    "a name that ends in {ENCRYPTED} is that of an encrypted snapshot: give --age-recipient, or another name"
                ),
            ),
            (false, true) => (
                Reason::Usage,
                format!(
                    "age recipients are given, so the name must end in {ENCRYPTED}: add it, or give no recipients for a plain snapshot"
                ),
            ),
            _ => return Ok(()),
        };
        let message = format!("--to-snapshot {}: {problem}", path.display());
        Err(reason.error(message))
    }
}
