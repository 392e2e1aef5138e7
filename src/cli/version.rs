//! `deltafold version`.

use super::{Output, print, print_json};
use crate::error::Result;
use clap::Args;
use serde_json::json;

/// Print the version
///
/// `--version` does the same.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Print the version:
      deltafold version")]
pub(super) struct VersionArgs {}

impl VersionArgs {
    pub(super) fn run(&self, output: Output) -> Result<()> {
        let version = env!("CARGO_PKG_VERSION");
        match output {
            Output::Text => print(&format!("deltafold {version}\n")),
            Output::Json => print_json(&json!({"version": version})),
        }
    }
}
