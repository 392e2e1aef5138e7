//! `deltafold man`: manual pages, one for each command.
//!
//! clap_mangen renders the sections of a page; the examples are rendered here, because it would join their lines.
//! `packaging/release` calls the command.

use super::{command, help, parse};
use crate::error::{Error, Result};
use clap::Args;
use clap_mangen::{Man, roff};
use roff::{Roff, bold, roman};
use std::io;
use std::path::{Path, PathBuf};

/// Write the manual pages of all commands to a folder
///
/// The pages are named after their commands: deltafold.1, deltafold-snapshot-follow.1. The folder is created if
/// it does not exist, and pages that exist are replaced.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  Install the manual pages for all users:
      deltafold man --dir /usr/local/share/man/man1
  Write them to a folder of your own, for `man -l`:
      deltafold man --dir ./man")]
pub(super) struct ManArgs {
    /// Folder for the pages
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
}

impl ManArgs {
    pub(super) fn run(&self) -> Result<()> {
        let what = || format!("write manual pages to {}", self.dir.display());
        std::fs::create_dir_all(&self.dir).map_err(|e| Error::io(what(), e))?;
        let mut program = parse::with_variables(command());
        program.build();
        write_pages(&program, &self.dir).map_err(|e| Error::io(what(), e))
    }
}

/// Writes the page of a command, and those of its subcommands.
fn write_pages(command: &clap::Command, dir: &Path) -> io::Result<()> {
    for subcommand in documented(command) {
        write_pages(subcommand, dir)?;
    }
    let man = Man::new(command.clone())
        .source(concat!("deltafold ", env!("CARGO_PKG_VERSION")))
        .manual("deltafold");
    std::fs::write(dir.join(man.get_filename()), page(command, &man)?)
}

/// The subcommands that have pages: all but `help` and those that only Pods call.
fn documented(command: &clap::Command) -> impl Iterator<Item = &clap::Command> {
    let all = command.get_subcommands();
    all.filter(|c| c.get_name() != "help" && !c.is_hide_set())
}

fn page(command: &clap::Command, man: &Man) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    synopsis(command).to_writer(&mut page)?;
    man.render_description_section(&mut page)?;
    if command.has_subcommands() {
        subcommands(command).to_writer(&mut page)?;
    }
    man.render_options_section(&mut page)?;
    if let Some(text) = help::examples(command) {
        examples(&text).to_writer(&mut page)?;
    }
    Ok(page)
}

/// The usage line of the help: clap_mangen would list all options.
fn synopsis(command: &clap::Command) -> Roff {
    let usage = command.clone().render_usage().to_string();
    let mut section = Roff::new();
    section.control("SH", ["SYNOPSIS"]);
    section.text([roman(usage.trim_start_matches("Usage: "))]);
    section
}

fn subcommands(command: &clap::Command) -> Roff {
    let mut section = Roff::new();
    section.control("SH", ["COMMANDS"]);
    for subcommand in documented(command) {
        let name = subcommand.get_display_name().unwrap_or_default();
        section.control("TP", []);
        section.text([bold(format!("{name}(1)"))]);
        let about = subcommand.get_about().map(ToString::to_string);
        section.text([roman(about.unwrap_or_default())]);
    }
    section
}

/// The text after the options: commands keep their lines, all else is filled.
fn examples(text: &str) -> Roff {
    let mut section = Roff::new();
    let (heading, text) = match text.strip_prefix("Examples:\n") {
        Some(text) => ("EXAMPLES", text),
        None => ("NOTES", text),
    };
    section.control("SH", [heading]);
    let mut in_command = false;
    for line in text.lines() {
        let is_command = line.starts_with(help::COMMAND_INDENT);
        match (in_command, is_command) {
            (false, true) => {
                section.control("RS", ["4"]);
                section.control("nf", []);
            }
            (true, false) => {
                section.control("fi", []);
                section.control("RE", []);
            }
            _ => {}
        }
        in_command = is_command;
        let is_title = line.starts_with("  ") && line.trim_start().starts_with(char::is_uppercase);
        if is_command {
            section.text([roman(&line[help::COMMAND_INDENT.len()..])]);
        } else {
            if line.is_empty() || is_title {
                section.control("PP", []);
            }
            section.text([roman(line.trim_start())]);
        }
    }
    if in_command {
        section.control("fi", []);
        section.control("RE", []);
    }
    section
}
