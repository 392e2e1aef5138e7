//! `deltafold copy-program`: for Pods, whose images may have no other program that could copy a file.

use crate::error::{Error, Result};
use clap::Args;
use std::path::PathBuf;

/// Copy a program, for the init containers of a restore drill
#[derive(Debug, Args)]
#[command(hide = true)]
pub(super) struct CopyProgramArgs {
    /// Program to copy [default: this one]
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,
    /// Path of the copy; a file that exists is replaced
    to: PathBuf,
}

impl CopyProgramArgs {
    pub(super) fn run(&self) -> Result<()> {
        let program = match &self.program {
            Some(program) => program.clone(),
            None => std::env::current_exe().map_err(|e| Error::io("find this program", e))?,
        };
        let what = || format!("copy {} to {}", program.display(), self.to.display());
        std::fs::copy(&program, &self.to)
            .map(drop)
            .map_err(|e| Error::io(what(), e))
    }
}
