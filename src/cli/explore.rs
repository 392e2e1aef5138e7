//! `deltafold explore`: its arguments, and the address of the page.
//!
//! The page and its server are in `explore`.

use super::objects::{ObjectArgs, PrefixArgs};
use super::print;
use super::{BackupArgs, Output};
use crate::base::flag_values::yes_or_no;
use crate::base::{Cancel, none_if_missing};
use crate::error::{Error, Result};
use crate::explore::{Options, run};
use clap::Args;
use serde::Serialize;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
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
    /// Write the address, with the token that opens the page, to this file instead of printing it: a Pod's log is read by others
    #[arg(long, value_name = "FILE")]
    address_file: Option<PathBuf>,
    /// Print the address that a running page has written to --address-file, and end
    #[arg(long, requires = "address_file", value_parser = yes_or_no)]
    show_address: bool,
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
    /// Where it is served, with the token that opens it.
    address: &'a str,
}

impl ExploreArgs {
    pub(super) fn run(&self, cancel: &Cancel, output: Output) -> Result<()> {
        if let Some(file) = self.address_file.as_ref().filter(|_| self.show_address) {
            let address = std::fs::read_to_string(file);
            let address = address.map_err(|e| Error::io(format!("read {}", file.display()), e))?;
            return announce(&address, output);
        }
        let keys = self.objects.keys()?;
        let backup = self.backup.backup(cancel)?;
        let options = Options {
            port: self.port,
            timeline: self.timeline.clone(),
            prefixes: self.prefix.etcd_prefixes(),
        };
        let announce = |address: &str| match &self.address_file {
            Some(file) => {
                write_for_owner(file, address)
                    .map_err(|e| Error::io(format!("write {}", file.display()), e))?;
                tracing::info!("the address is in {}", file.display());
                Ok(())
            }
            None => announce(address, output),
        };
        run(backup, &options, keys, &Handle::current(), cancel, announce)
    }
}

fn announce(address: &str, output: Output) -> Result<()> {
    let text = match output {
        Output::Json => {
            serde_json::to_string(&Page { address }).map_err(|e| Error::internal(e.to_string()))?
        }
        Output::Text => format!("open {address} in a browser; Ctrl-C ends the page"),
    };
    print(&(text + "\n"))
}

/// Writes a new file that nobody else reads, in the place of one that is there.
fn write_for_owner(file: &Path, text: &str) -> io::Result<()> {
    none_if_missing(fs::remove_file(file))?;
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(file)?;
    file.write_all(text.as_bytes())
}
