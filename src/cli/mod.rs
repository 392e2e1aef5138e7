//! The command line: one file a command, with its arguments and the text of its result.
//!
//! Results go to standard output, everything else to standard error. The work itself is done in `ops` and
//! `controller`. `src/main.rs` calls [`main`].

mod advice;
mod apply;
mod bandwidth;
mod compact;
mod completions;
mod controller;
mod copy;
mod copy_program;
mod deleted;
mod diff;
mod encryption;
mod endpoints;
mod explore;
mod export;
mod format;
mod gc;
mod get;
mod help;
mod history;
mod kubernetes;
mod leases;
mod list;
mod log;
mod maintain;
mod man;
mod metrics;
mod objects;
mod parse;
mod pin;
mod print;
mod recover;
mod refusal;
mod render;
mod restore;
mod search;
mod signals;
mod snapshot;
mod status;
mod store_access;
mod store_check;
mod stream;
mod task;
mod terminal;
mod termination;
mod text;
mod verify;
mod version;
mod words;

use crate::base::Cancel;
use crate::base::flag_values::yes_or_no;
use crate::error::{Error, Reason, Result};
use crate::telemetry::logs::{self, LogFormat};
use crate::telemetry::{memory, progress};
use clap::{Args, CommandFactory, Parser, Subcommand};
use format::Format;
pub use get::table;
pub use parse::check;
use print::{fail, print_report, size};
use signals::with_signals;
use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use store_access::{AccessArgs, BackupArgs, StoreArgs, parse_options};
use stream::{print, print_json};
use termination::Termination;

/// Backup and snapshot compaction for etcd, without running an etcd
///
/// deltafold reads and writes the buckets of etcd-backup-restore: full snapshots, and the delta
/// snapshots after them.
#[derive(Debug, Parser)]
#[command(name = "deltafold", version, max_term_width = 100, after_long_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    global: Global,
}

const EXAMPLES: &str = "\
Examples:
  Show what a store holds, and what can be restored from it:
      deltafold list --store s3://backups/etcd-main
  Fold the deltas into a new full snapshot:
      deltafold compact --store s3://backups/etcd-main
  Restore a member as it was at noon:
      deltafold restore --store s3://backups/etcd-main --time 2026-11-20T12:00:00Z \\
          --data-dir /var/lib/etcd
  Show the value of a key without restoring anything:
      deltafold get /registry/configmaps/default/settings --store s3://backups/etcd-main
  Keep a second store in step:
      deltafold copy --from s3://backups/etcd-main --to s3://elsewhere/etcd-main --follow

Every flag can be given as an environment variable: --data-dir as DELTAFOLD_DATA_DIR. A flag wins over its \
variable. One variable serves all commands that have the flag.

Exit codes, the settings of stores and the JSON results are described in docs/.";

#[derive(Debug, Subcommand)]
enum Command {
    Snapshot(snapshot::SnapshotArgs),
    Compact(compact::CompactArgs),
    Copy(copy::CopyArgs),
    #[command(visible_alias = "ls")]
    List(list::ListArgs),
    Status(status::StatusArgs),
    Restore(restore::RestoreArgs),
    Get(get::GetArgs),
    History(history::HistoryArgs),
    Diff(diff::DiffArgs),
    Log(log::LogArgs),
    Deleted(deleted::DeletedArgs),
    Search(search::SearchArgs),
    Explore(explore::ExploreArgs),
    Export(export::ExportArgs),
    Recover(Box<recover::RecoverArgs>),
    Apply(apply::ApplyArgs),
    Verify(verify::VerifyArgs),
    Maintain(maintain::MaintainArgs),
    Store(store_check::StoreCommand),
    Gc(gc::GcArgs),
    Pin(pin::PinArgs),
    Controller(controller::ControllerArgs),
    Task(task::TaskArgs),
    CopyProgram(copy_program::CopyProgramArgs),
    Version(version::VersionArgs),
    Completions(completions::CompletionsArgs),
    Man(man::ManArgs),
}

impl Command {
    /// Whether the command answers a question about a backup, and changes nothing.
    fn is_answer(&self) -> bool {
        use Command::{Deleted, Diff, Export, Get, History, List, Log, Search, Status};
        matches!(
            self,
            Deleted(_)
                | Diff(_)
                | Export(_)
                | Get(_)
                | History(_)
                | List(_)
                | Log(_)
                | Search(_)
                | Status(_)
        )
    }
}

/// The format of the result on standard output, for all commands but `get`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Output {
    /// Human-readable text
    Text,
    /// One JSON object
    Json,
}

/// The flags that every command has.
#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
struct Global {
    /// Output format: text or json; `get` has more, and `recover` has yaml
    #[arg(
        short,
        long,
        global = true,
        default_value = "text",
        overrides_with = "output",
        value_name = "FORMAT"
    )]
    output: Format,
    /// Show no progress, and log only errors
    #[arg(short, long, global = true, conflicts_with = "log_level", value_parser = yes_or_no)]
    quiet: bool,
    /// Log format [default: json in a Pod, otherwise text]
    #[arg(long, global = true, value_name = "FORMAT")]
    log_format: Option<LogFormat>,
    /// Log level: error, warn, info, debug or trace, or a filter such as
    /// "deltafold=debug,object_store=info" [default: warn on a terminal, otherwise info]
    #[arg(long, global = true, value_name = "LEVEL")]
    log_level: Option<String>,
    /// Write the result as JSON (less than 4096 bytes) to this file when the command ends, for the
    /// terminationMessagePath of a Pod
    #[arg(long, global = true, value_name = "FILE")]
    termination_log: Option<PathBuf>,
    /// Write options in messages as a policy has them: `allowShrink` for --allow-shrink
    #[arg(long, global = true, hide = true, value_parser = yes_or_no)]
    policy_words: bool,
}

/// The definition of the command line, as clap knows it.
fn command() -> clap::Command {
    // Without --endpoints, `verify` verifies the backup alone.
    let verify = |c: clap::Command| c.mut_arg("endpoints", |a| a.required(false));
    help::shorten(help::keep_examples(
        Cli::command().mut_subcommand("verify", verify),
    ))
}

/// Returns the definition of the command line, with the environment variable of each flag: every command with
/// its flags, defaults, help texts and examples. Documents are made from it.
pub fn command_line() -> clap::Command {
    parse::with_variables(command())
}

/// Runs the program: parses the command line, runs the command, prints the result, and returns the exit code.
pub fn main() -> ExitCode {
    let started = Instant::now();
    memory::give_back_long_buffers();
    let args: Vec<OsString> = std::env::args_os().collect();
    advice::write_options(&args);
    let (cli, command) = match parse::parse(&args) {
        Ok(parsed) => parsed,
        Err(e) => return refusal::refuse(&e, &args, started),
    };
    let output = match &cli.command {
        Command::Get(_) => Ok(cli.global.output.of_errors()),
        Command::Recover(_) if cli.global.output == Format::Yaml => Ok(Output::Text),
        _ => cli.global.output.output(),
    };
    let output = match output {
        Ok(output) => output,
        Err(e) => return fail(&e, Output::Text, true),
    };
    let termination =
        Termination::begin(cli.global.termination_log.clone(), Some(command), started);
    let format = cli.global.log_format.unwrap_or_else(LogFormat::detect);
    let level = match &cli.global.log_level {
        Some(level) => level,
        None if cli.global.quiet => "error",
        // On a terminal, progress bars and the result are enough, and each finding is shown once.
        None if terminal::is_shared() => "warn,deltafold=warn,deltafold::finding=off",
        None if std::io::stderr().is_terminal() => "warn",
        // The log of a Pod has what was read; a person who sends it elsewhere wants the answer.
        None if cli.command.is_answer() && format == LogFormat::Text => "warn",
        None => "info",
    };
    if let Err(e) = logs::init(format, level) {
        let e = Reason::Usage.error(format!("--log-level: {e}"));
        end_without_log(&termination, &e);
        return fail(&e, output, true);
    }
    if cli.global.quiet {
        progress::hide();
    }
    // The panic hook has already written the panic's message to standard error.
    let ended = std::panic::catch_unwind(AssertUnwindSafe(|| run(cli, output)))
        .unwrap_or_else(|_| Err(Error::internal("the command panicked")));
    let failure = match &ended {
        Ok(failure) => failure.as_ref(),
        Err(e) => Some(e),
    };
    if let Err(warning) = termination.end(failure) {
        tracing::warn!("{warning}");
    }
    let (e, output) = match ended {
        Ok(None) => return ExitCode::SUCCESS,
        // The report on standard output already contains this failure.
        Ok(Some(e)) => (e, Output::Text),
        Err(e) => (e, output),
    };
    if format == LogFormat::Json {
        tracing::error!(
            reason = e.reason().as_str(),
            code = e.reason().exit_code(),
            "{e}"
        );
    }
    fail(&e, output, format == LogFormat::Text)
}

/// Writes the termination message of a command that failed before logging was set up.
fn end_without_log(termination: &Termination, e: &Error) {
    if let Err(warning) = termination.end(Some(e)) {
        // Ignore a failure: there is no other place to report it.
        let _ = writeln!(std::io::stderr(), "warning: {warning}");
    }
}

/// The result of a command: an error, or the failure that its printed report already contains, or neither.
type Ended = Result<Option<Error>>;

/// Runs a command on a new runtime.
fn run(cli: Cli, output: Output) -> Ended {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|e| Error::io("start the runtime", e))?;
    let entered = runtime.enter();
    let format = &cli.global.output;
    let result = match cli.command {
        Command::Compact(args) => with_signals(|cancel| args.run(cancel, output)),
        // The follower handles signals itself.
        Command::Snapshot(args) if args.is_follow() => args.run(&Cancel::default(), output),
        Command::Snapshot(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Copy(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::List(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Status(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Restore(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Get(args) => with_signals(|cancel| args.run(cancel, format)),
        Command::History(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Diff(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Log(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Deleted(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Search(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Explore(args) => with_signals(|cancel| args.run(cancel, output)).map(|()| None),
        Command::Recover(args) => with_signals(|cancel| args.run(cancel, format)),
        Command::Export(args) => with_signals(|cancel| args.run(cancel)),
        Command::Apply(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Verify(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Maintain(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Store(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Gc(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Pin(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Controller(args) => with_signals(|cancel| args.run(cancel)).map(|()| None),
        Command::Task(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::CopyProgram(args) => args.run().map(|()| None),
        Command::Version(args) => args.run(output).map(|()| None),
        Command::Completions(args) => args.run().map(|()| None),
        Command::Man(args) => args.run().map(|()| None),
    };
    // Do not wait for a transfer that hangs.
    drop(entered);
    runtime.shutdown_timeout(Duration::from_millis(200));
    result
}

#[cfg(test)]
mod schema_tests;
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        command_line().debug_assert();
    }
}
