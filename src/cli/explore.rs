//! `deltafold explore`: its arguments, and the address of the page.
//!
//! The page and its server are in `explore`.

use super::objects::{ObjectArgs, PrefixArgs};
use super::print;
use super::{BackupArgs, Output};
use crate::base::Cancel;
use crate::error::{Error, Result};
use crate::explore::{Options, run};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use tokio::runtime::Handle;

/// Serve a page that shows a backup at any moment
///
/// The page shows what was in the backup at any moment, how an object looked then and now, its whole life and who changed
/// it, and what was deleted. It is read-only. Only a browser of this machine reaches it, by the address that is printed,
/// until the program ends. Values of Secrets are hidden until they are asked for.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Look at a backup:
      deltafold explore --store s3://backups/etcd-main
  Look at a plain snapshot file:
      deltafold explore --snapshot snapshot.db
  Serve at a port that can be forwarded to another machine, by ssh -L 8080:127.0.0.1:8080 HOST:
      deltafold explore --store s3://backups/etcd-main --port 8080

The whole window is read once, into an index in the temporary directory that is as large as the uncompressed snapshots: \
see --temp-dir. jobs/explore.yaml is a Deployment for a cluster. --output json prints the address as one JSON object. Ctrl-C ends the program.")]
pub(super) struct ExploreArgs {
    /// Port on 127.0.0.1; 0 for any free one
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    port: u16,
    /// ID of the timeline to show, from `deltafold list --deep` [default: the newest timeline]
    #[arg(long, value_name = "ID")]
    timeline: Option<String>,
    /// File with the token that opens the page, which is then not printed [default: a random one]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    #[command(flatten)]
    objects: ObjectArgs,
    #[command(flatten)]
    prefix: PrefixArgs,
    #[command(flatten)]
    backup: BackupArgs,
}

/// The page that is served.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub(super) struct Page<'a> {
    /// Where it is served, with the token that opens it; with --token-file, `TOKEN` stands for it.
    address: &'a str,
}

impl ExploreArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Result<()> {
        let keys = self.objects.keys()?;
        let backup = self.backup.backup(cancel)?;
        let options = Options {
            port: self.port,
            timeline: self.timeline.clone(),
            prefixes: self.prefix.etcd_prefixes(),
            token_file: self.token_file.clone(),
        };
        let announce = |address: &str| {
            let text = match output {
                Output::Json => serde_json::to_string(&Page { address })
                    .map_err(|e| Error::internal(e.to_string()))?,
                Output::Text => format!("open {address} in a browser; Ctrl-C ends the page"),
            };
            print(&(text + "\n"))
        };
        run(backup, &options, keys, &Handle::current(), cancel, announce)
    }
}
