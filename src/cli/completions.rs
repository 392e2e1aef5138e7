//! `deltafold completions`: completion scripts for shells.

use super::{command, print};
use crate::error::{Error, Result};
use clap::Args;
use clap_complete::Shell;

/// Print the completion script for a shell
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Install the completions for bash, zsh or fish:
      deltafold completions bash > /etc/bash_completion.d/deltafold
      deltafold completions zsh > \"${fpath[1]}/_deltafold\"
      deltafold completions fish > ~/.config/fish/completions/deltafold.fish")]
pub(super) struct CompletionsArgs {
    /// Shell
    shell: Shell,
}

impl CompletionsArgs {
    pub(super) fn run(&self) -> Result<()> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut command(), "deltafold", &mut script);
        let script = String::from_utf8(script)
            .map_err(|_| Error::internal("the completion script is not valid UTF-8"))?;
        print(&script)
    }
}
