//! Restore into a plain snapshot file: written without a name, which it gets in the end.

use super::candidates::Candidates;
use super::needed::Found;
use super::output::{Failed, Unnamed, exists};
use super::write;
use super::{Outcome, Run, shown};
use crate::backup::name::ENCRYPTED;
use crate::datadir::install;
use crate::error::{Reason, Result};
use crate::ops::report::Report;
use std::path::Path;

impl Run<'_> {
    pub(super) fn into_file(mut self, path: &Path) -> Result<Report<Outcome>> {
        if path.symlink_metadata().is_ok() {
            return Err(exists(path));
        }
        let parent = match path.parent() {
            Some(p) if !p.as_os_str().is_empty() => p,
            _ => Path::new("."),
        };
        if !parent.is_dir() {
            let parent = parent.display();
            let message = format!("--to-snapshot: the folder {parent} is not there");
            return Err(Reason::Usage.error(message));
        }
        self.check_encryption(path)?;
        let candidates = Candidates::open(self.backups, &self.options.request(), false)?;
        let decision = Found::Asked.decide();
        let mut file = None;
        let (mut outcome, _) = self.try_candidates(candidates, decision, |run, source, ctx| {
            if run.options.dry_run {
                return Ok(None);
            }
            let unnamed = Unnamed::new(parent).map_err(Failed::Target)?;
            let rebuild = run.plan(source, ctx, None)?;
            let written = write::snapshot(ctx, &rebuild, &unnamed, parent)?;
            file = Some(unnamed);
            Ok(Some(written))
        })?;
        if let Some(file) = file {
            file.name(path)?;
            install::sync_directory(parent)?;
        }
        outcome.snapshot_file = Some(shown(path));
        Ok(self.clock.report(outcome))
    }

    /// Whether a file is to be encrypted, its name and the recipients must say alike: nobody shall take the one
    /// for the other.
    fn check_encryption(&self, path: &Path) -> Result<()> {
        let mut contexts = self.backups.iter().filter_map(|b| b.context().ok());
        let encrypts = contexts.any(|ctx| ctx.keys.encrypts());
        let is_named_so = path
            .as_os_str()
            .as_encoded_bytes()
            .ends_with(ENCRYPTED.as_bytes());
        let (reason, why) = match (is_named_so, encrypts) {
            (true, false) => (
                Reason::Configuration,
                "what is named so is encrypted: say with --age-recipient for whom".to_owned(),
            ),
            (false, true) => (
                Reason::Usage,
                format!(
                    "age recipients are given, and a snapshot that is encrypted has a name that ends in {ENCRYPTED}: name it so, or leave the recipients out for a plain one"
                ),
            ),
            _ => return Ok(()),
        };
        let message = format!("--to-snapshot {}: {why}", path.display());
        Err(reason.error(message))
    }
}
