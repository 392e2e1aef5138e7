//! The command line: one file a command, its arguments and how its outcome is printed.
//!
//! Outcomes go to standard output, everything else to standard error.

mod apply;
mod bandwidth;
mod cleanup;
mod compact;
mod completions;
mod controller;
mod copy;
mod diff;
mod encryption;
mod endpoints;
mod export;
mod gc;
mod get;
mod history;
mod kubernetes;
mod leases;
mod list;
mod maintain;
mod manifests;
mod metrics;
mod object_lock;
mod pin;
mod policy;
mod restore;
mod schemas;
mod snapshot;
mod store_check;
mod stream;
mod task;
mod termination;
mod text;
mod undelete;
mod verify;

use crate::base::limits::Limits;
use crate::base::printable;
use crate::base::{Cancel, byte_size};
use crate::error::{Error, Reason, Result};
use crate::ops::Context;
use crate::ops::report::Report;
use crate::ops::restore::BackupLocation;
use crate::store::{self, Store};
use crate::telemetry::logs::{self, LogFormat};
use crate::telemetry::memory;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use schemars::JsonSchema;
pub use schemas::schemas;
use serde::Serialize;
use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use termination::Termination;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// "File size limit exceeded", on Linux and the BSDs.
const SIGXFSZ: i32 = 25;

/// Backup and snapshot compaction for etcd, with no etcd
///
/// deltafold reads and writes the buckets of etcd-backup-restore: full snapshots and the delta
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
  What does the bucket hold, and what can be restored from it?
      deltafold list --store s3://backups/etcd-main
  Fold the deltas into a new full snapshot:
      deltafold compact --store s3://backups/etcd-main
  Restore a member as it was at noon:
      deltafold restore --store s3://backups/etcd-main --time 2026-11-20T12:00:00Z --data-dir /var/lib/etcd
  What was in a key, without restoring anything?
      deltafold get /registry/configmaps/default/settings --store s3://backups/etcd-main
  Keep a second bucket in step:
      deltafold copy --from s3://backups/etcd-main --to s3://elsewhere/etcd-main --follow
  Exit codes, settings of stores and the JSON that is printed are in docs/.";

#[derive(Debug, Subcommand)]
enum Command {
    Snapshot(snapshot::SnapshotArgs),
    Compact(compact::CompactArgs),
    Copy(copy::CopyArgs),
    List(list::ListArgs),
    Restore(restore::RestoreArgs),
    Get(get::GetArgs),
    History(history::HistoryArgs),
    Diff(diff::DiffArgs),
    Export(export::ExportArgs),
    Apply(apply::ApplyArgs),
    Verify(verify::VerifyArgs),
    Maintain(maintain::MaintainArgs),
    Lock(object_lock::LockArgs),
    Store(store_check::StoreCommand),
    Gc(gc::GcArgs),
    Undelete(undelete::UndeleteArgs),
    Pin(pin::PinArgs),
    Controller(controller::ControllerArgs),
    Task(task::TaskArgs),
    Policy(policy::PolicyCommand),
    Manifests(manifests::ManifestsArgs),
    Cleanup(cleanup::CleanupArgs),
    Completions(completions::CompletionsArgs),
}

/// How a command ended: the failure whose report is printed already, if it is one.
type Ended = Result<Option<Error>>;

/// How the outcome is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For people
    Text,
    /// One JSON object on standard output
    Json,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Output")]
struct Global {
    /// How the outcome is printed on standard output
    #[arg(long, global = true, default_value = "text", value_name = "FORMAT")]
    output: Output,
    /// How log lines look [default: json in a Pod, else text]
    #[arg(long, global = true, value_name = "FORMAT")]
    log_format: Option<LogFormat>,
    /// error, warn, info, debug or trace, or a filter such as "deltafold=debug,object_store=info"
    /// [default: warn on a terminal, else info]
    #[arg(long, global = true, value_name = "LEVEL")]
    log_level: Option<String>,
    /// Write how the command ended to this file, as JSON of less than 4096 bytes: what a Pod's
    /// terminationMessagePath names
    #[arg(long, global = true, value_name = "FILE")]
    termination_log: Option<PathBuf>,
}

/// Where the snapshots are, and what a Job may use.
#[derive(Debug, Args)]
#[command(next_help_heading = "Store")]
struct StoreArgs {
    /// The folder that holds v2/ (or v1/): s3://bucket/prefix, gs://…, az://…, swift://…, oss://…, file:///dir or a path
    #[arg(long, value_name = "URL")]
    store: String,
    #[command(flatten)]
    means: MeansArgs,
}

impl StoreArgs {
    fn context(&self, cancel: &Cancel) -> Result<Context> {
        self.means.context(&self.store, cancel)
    }
}

/// A backup to read: the snapshots of a store, or a plain snapshot file.
#[derive(Debug, Args)]
#[command(next_help_heading = "Backup")]
struct BackupArgs {
    /// The folder that holds v2/ (or v1/): s3://bucket/prefix, gs://…, az://…, swift://…, oss://…, file:///dir or a path
    #[arg(long, value_name = "URL", required_unless_present = "snapshot")]
    store: Option<String>,
    /// A plain snapshot file instead, as etcdctl, k3s, kOps or OpenShift leave it, compressed or not
    #[arg(long, value_name = "FILE", conflicts_with = "store")]
    snapshot: Option<PathBuf>,
    #[command(flatten)]
    means: MeansArgs,
}

impl BackupArgs {
    fn backup(&self, cancel: &Cancel) -> Result<BackupLocation> {
        match (&self.snapshot, &self.store) {
            (Some(file), _) => self.means.backup_file(file, cancel),
            (None, Some(url)) => self.means.context(url, cancel).map(BackupLocation::Store),
            (None, None) => Err(Error::internal("neither --store nor --snapshot")),
        }
    }
}

/// What a Job may use, and how it reaches its store.
#[derive(Debug, Args)]
#[command(next_help_heading = "Means")]
struct MeansArgs {
    /// A setting of the store, such as endpoint=http://minio:9000; may be given again
    ///
    /// In the environment: one setting a line. The providers' usual variables (AWS_ACCESS_KEY_ID,
    /// GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME, …) are read too; these win.
    /// Where several stores are given, 2:KEY=VALUE is for the second alone.
    #[arg(long, value_name = "KEY=VALUE", hide_env_values = true)]
    store_option: Vec<String>,
    /// A folder with the store's settings and credentials, as a Secret is mounted
    ///
    /// The names of its files are those of etcd-backup-restore and etcd-druid, or the providers' variables
    /// (AWS_ACCESS_KEY_ID, …). What changes in it while a Job runs is seen.
    #[arg(long, value_name = "DIR")]
    store_secret: Option<PathBuf>,
    /// For what does not fit into memory [default: the system's]
    #[arg(long, value_name = "DIR")]
    temp_dir: Option<PathBuf>,
    /// Threads that read, compress and upload [default: as many as processors]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Option<u16>,
    /// Requests to a store that are under way at once, 1 to 1024; a local folder has none
    #[arg(long, value_name = "N", default_value_t = store::DEFAULT_REQUESTS as u16, value_parser = clap::value_parser!(u16).range(1..=store::MOST_REQUESTS as i64))]
    requests: u16,
    /// Mode of new files in a local folder, such as 0640, and 0750 of new folders [default: 0600]
    ///
    /// Whatever the umask is. What is there keeps its mode. Object stores have no such modes.
    #[arg(long, value_name = "MODE")]
    file_mode: Option<store::FileMode>,
    /// The largest database that is read, unpacked; a full snapshot of more is refused as TooLarge
    #[arg(long, value_name = "SIZE", default_value = "16GiB", value_parser = byte_size::parse)]
    max_database_bytes: u64,
    /// The largest key and value together; a snapshot with a larger one is refused as TooLarge
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = byte_size::parse)]
    max_value_bytes: u64,
    #[command(flatten)]
    encryption: encryption::EncryptionArgs,
}

impl MeansArgs {
    /// The settings of the `nth` store, from 1 on.
    fn options(&self, nth: usize) -> Result<Vec<(String, String)>> {
        let lines = self.store_option.iter().flat_map(|o| o.lines());
        let of_this: Vec<String> = lines
            .map(str::trim)
            .filter_map(|line| match line.split_once(':') {
                Some((number, rest)) if number.parse::<usize>().is_ok() => {
                    (number.parse() == Ok(nth)).then(|| rest.to_owned())
                }
                _ => Some(line.to_owned()),
            })
            .collect();
        let secret = self.store_secret.iter().map(|dir| {
            let key = store::open::OPTION_SECRET_DIR.to_owned();
            (key, dir.display().to_string())
        });
        let requests = (
            store::open::OPTION_REQUESTS.to_owned(),
            self.requests.to_string(),
        );
        let file_mode = self.file_mode.map(|mode| {
            let key = store::open::OPTION_FILE_MODE.to_owned();
            (key, mode.to_string())
        });
        let given = parse_options(&of_this, "--store-option")?;
        let ours = secret.chain([requests]).chain(file_mode);
        Ok(ours.chain(given).collect())
    }

    fn temp_dir(&self) -> Result<PathBuf> {
        let temp_dir = self.temp_dir.clone().unwrap_or_else(std::env::temp_dir);
        match temp_dir.is_dir() {
            true => Ok(temp_dir),
            false => {
                Err(Reason::Usage.error(format!("--temp-dir {} is no folder", temp_dir.display())))
            }
        }
    }

    fn context_with(
        &self,
        nth: usize,
        cancel: &Cancel,
        open: impl FnOnce(&[(String, String)], tokio::runtime::Handle) -> Result<Store>,
    ) -> Result<Context> {
        let temp_dir = self.temp_dir()?;
        let handle = tokio::runtime::Handle::current();
        let threads = match self.threads {
            Some(n) => usize::from(n),
            None => std::thread::available_parallelism().map_or(1, usize::from),
        };
        let keys = self.encryption.keys()?;
        Ok(Context {
            store: open(&self.options(nth)?, handle)?.with_cancel(cancel.clone()),
            temp_dir,
            threads,
            trust: self.encryption.trust(&keys),
            keys,
            limits: Limits {
                database_bytes: self.max_database_bytes,
                value_bytes: self.max_value_bytes,
            },
        })
    }

    fn context(&self, store: &str, cancel: &Cancel) -> Result<Context> {
        self.nth_context(1, store, cancel)
    }

    fn nth_context(&self, nth: usize, store: &str, cancel: &Cancel) -> Result<Context> {
        self.context_with(nth, cancel, |options, handle| {
            store::open(store, options, handle)
        })
    }

    /// The snapshots of the `nth` store that is given. One that cannot be opened may be passed over for another.
    fn backup_store(&self, nth: usize, url: &str, cancel: &Cancel) -> Result<BackupLocation> {
        match self.nth_context(nth, url, cancel) {
            Ok(mut ctx) => {
                // Recipients are those of a file that is written: the backup may be plain.
                ctx.trust.only_encrypted = ctx.keys.decrypts();
                Ok(BackupLocation::Store(ctx))
            }
            Err(e) if e.reason() == Reason::Usage => Err(e),
            Err(error) => Ok(BackupLocation::Closed {
                name: url.to_owned(),
                error,
            }),
        }
    }

    /// A plain snapshot file. Nothing is read from the store that its context has.
    fn backup_file(&self, file: &Path, cancel: &Cancel) -> Result<BackupLocation> {
        let nowhere = self.temp_dir()?.display().to_string();
        let ctx = self.context_with(1, cancel, |_, handle| store::open(&nowhere, &[], handle))?;
        Ok(BackupLocation::File(ctx, file.to_owned()))
    }
}

/// Settings of a store, as a flag has them: `KEY=VALUE`, or several such lines.
fn parse_options(given: &[String], flag: &str) -> Result<Vec<(String, String)>> {
    let lines = given.iter().flat_map(|o| o.lines());
    lines
        .map(str::trim)
        .filter(|l| !l.is_empty())
        .map(|l| match l.split_once('=') {
            Some((key, value)) if !key.is_empty() => Ok((key.trim().to_owned(), value.to_owned())),
            // It may be a secret: it is not shown.
            _ => Err(Reason::Usage.error(format!("a {flag} is not of the form KEY=VALUE"))),
        })
        .collect()
}

/// Flags of which one excludes the other.
const EXCLUSIVE: [(&str, &str); 17] = [
    ("store", "snapshot"),
    ("revision", "time"),
    ("data_dir", "to_snapshot"),
    ("wal_dir", "to_snapshot"),
    ("if_needed", "to_snapshot"),
    ("password", "password_file"),
    ("tls_secret", "cacert"),
    ("tls_secret", "cert"),
    ("tls_secret", "key"),
    ("auth_secret", "user"),
    ("auth_secret", "password"),
    ("auth_secret", "password_file"),
    ("until", "for"),
    ("endpoints", "level"),
    ("endpoints", "all_chains"),
    ("endpoints", "all_tags"),
    ("endpoints", "etcd_binary"),
];

/// Flags of a live etcd whose variables may be etcdctl's, too: `ETCDCTL_` and the name.
const ETCDCTL: [&str; 10] = [
    "endpoints",
    "cacert",
    "cert",
    "key",
    "user",
    "password",
    "dial_timeout",
    "command_timeout",
    "keepalive_time",
    "keepalive_timeout",
];

/// The environment variable of a flag: `DELTAFOLD_` and its name, `--data-dir` as `DELTAFOLD_DATA_DIR`.
fn variable(arg: &clap::Arg) -> Option<String> {
    let name = arg.get_long()?.replace('-', "_").to_uppercase();
    Some(format!("DELTAFOLD_{name}"))
}

/// The variable that counts for a flag: etcdctl's, if ours is not set.
fn variable_that_counts(arg: &clap::Arg) -> Option<String> {
    let own = variable(arg)?;
    let id = arg.get_id().as_str();
    let theirs = format!("ETCDCTL_{}", id.to_uppercase());
    // Other commands have arguments of these IDs that mean something else, under other flags.
    let is_etcds = ETCDCTL.contains(&id) && own == format!("DELTAFOLD_{}", id.to_uppercase());
    let is_set = |name: &str| std::env::var_os(name).is_some();
    Some(match is_etcds && !is_set(&own) && is_set(&theirs) {
        true => theirs,
        false => own,
    })
}

/// The command line; without endpoints `verify` looks at the backup alone.
fn command() -> clap::Command {
    Cli::command().mut_subcommand("verify", |c| c.mut_arg("endpoints", |a| a.required(false)))
}

/// Parses a command line. A flag that is given wins over the variable of one that it excludes: in a Pod
/// DELTAFOLD_STORE is set, and --snapshot must not be refused for that. The command's name comes with it.
fn parse(given: &[OsString]) -> Result<(Cli, String), clap::Error> {
    let is_given = |id: &str| {
        let flag = format!("--{}", id.replace('_', "-"));
        given.iter().filter_map(|a| a.to_str()).any(|a| {
            a.strip_prefix(&flag)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        })
    };
    let pairs = EXCLUSIVE.iter().flat_map(|&(a, b)| [(a, b), (b, a)]);
    let forgotten: Vec<&str> = pairs
        .filter(|(_, other)| is_given(other))
        .map(|(id, _)| id)
        .collect();
    let command = with_variables(command(), &forgotten);
    let matches = command.try_get_matches_from(given)?;
    let name = name_of(&matches);
    Ok((Cli::from_arg_matches(&matches)?, name))
}

/// The name of a command, such as `snapshot full`.
fn name_of(matches: &ArgMatches) -> String {
    let (mut at, mut names) = (matches, Vec::new());
    while let Some((name, below)) = at.subcommand() {
        names.push(name);
        at = below;
    }
    names.join(" ")
}

/// Whether the program would take this command line: what is wrong with it, if something is.
///
/// # Errors
/// `Usage`.
pub fn check(args: &[String]) -> Result<()> {
    let given: Vec<OsString> = std::iter::once("deltafold")
        .chain(args.iter().map(String::as_str))
        .map(OsString::from)
        .collect();
    match parse(&given) {
        Ok(_) => Ok(()),
        Err(e) => Err(Reason::Usage.error(e.to_string())),
    }
}

/// The command and those below it. Each flag has its variable, but the `forgotten` ones.
fn with_variables(command: clap::Command, forgotten: &[&str]) -> clap::Command {
    command
        .mut_args(|a| match variable_that_counts(&a) {
            Some(name) if !forgotten.contains(&a.get_id().as_str()) => a.env(name),
            _ => a,
        })
        .mut_subcommands(|c| with_variables(c, forgotten))
}

/// Runs the program: parses the command line, runs the command, prints, and says how it ended.
pub fn main() -> ExitCode {
    let started = Instant::now();
    memory::give_back_long_buffers();
    let given: Vec<OsString> = std::env::args_os().collect();
    let (cli, command) = match parse(&given) {
        Ok(parsed) => parsed,
        Err(e) => return refuse(&e, &given, started),
    };
    let termination =
        Termination::begin(cli.global.termination_log.clone(), Some(command), started);
    let format = cli.global.log_format.unwrap_or_else(LogFormat::detect);
    let level = match &cli.global.log_level {
        Some(level) => level,
        // On a terminal the bars and the outcome tell enough.
        None if std::io::stderr().is_terminal() => "warn",
        None => "info",
    };
    if let Err(e) = logs::init(format, level) {
        let e = Reason::Usage.error(format!("--log-level: {e}"));
        end_without_log(&termination, &e);
        return fail(&e, cli.global.output, true);
    }
    let output = cli.global.output;
    // The panic's own message has gone to standard error by then.
    let ended = std::panic::catch_unwind(AssertUnwindSafe(|| run(cli)))
        .unwrap_or_else(|_| Err(Error::internal("it panicked")));
    let failure = match &ended {
        Ok(failure) => failure.as_ref(),
        Err(e) => Some(e),
    };
    if let Err(warning) = termination.end(failure) {
        tracing::warn!("{warning}");
    }
    let (e, output) = match ended {
        Ok(None) => return ExitCode::SUCCESS,
        // Standard output has it already.
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

/// Writes the termination message of a command that never began.
fn end_without_log(termination: &Termination, e: &Error) {
    if let Err(warning) = termination.end(Some(e)) {
        // Nowhere to complain if this fails.
        let _ = writeln!(std::io::stderr(), "warning: {warning}");
    }
}

/// Runs a command.
fn run(cli: Cli) -> Ended {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|e| Error::io("start the runtime", e))?;
    let _entered = runtime.enter();
    let output = cli.global.output;
    let result = match cli.command {
        Command::Compact(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Snapshot(args) if args.is_follow() => args.run(&Cancel::default(), output),
        Command::Snapshot(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Copy(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::List(args) => {
            with_signals(|cancel| args.run(&args.store.context(cancel)?, output))
        }
        Command::Restore(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Get(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::History(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Diff(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Export(args) => with_signals(|cancel| args.run(cancel)),
        Command::Apply(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Verify(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Maintain(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Lock(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Store(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Gc(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Undelete(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Pin(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Controller(args) => with_signals(|cancel| args.run(cancel)).map(|()| None),
        Command::Task(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Policy(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Manifests(args) => args.run(output).map(|()| None),
        Command::Cleanup(args) => with_signals(|cancel| args.run(cancel, output)),
        Command::Completions(args) => args.run().map(|()| None),
    };
    // A transfer that hangs must not keep the process.
    drop(_entered);
    runtime.shutdown_timeout(Duration::from_millis(200));
    result
}

/// SIGTERM and SIGINT, from now on.
fn end_signals() -> Result<(Signal, Signal)> {
    let signals = |kind| signal(kind).map_err(|e| Error::io("listen for signals", e));
    // With a handler, a limit on the size of files fails the write and does not end the process.
    let _ = signals(SignalKind::from_raw(SIGXFSZ))?;
    Ok((
        signals(SignalKind::terminate())?,
        signals(SignalKind::interrupt())?,
    ))
}

/// Runs a job that SIGTERM and SIGINT end: at once, but for what it has to clean up.
fn with_signals<T>(job: impl FnOnce(&Cancel) -> Result<T>) -> Result<T> {
    let (mut term, mut int) = end_signals()?;
    let cancel = Cancel::default();
    let switch = cancel.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        switch.cancel();
    });
    job(&cancel)
}

/// Prints the outcome of a command on standard output.
fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // Whoever reads may have seen enough.
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|e| Error::io("write to standard output", e)),
    }
}

fn print_json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|e| Error::internal(format!("an outcome that is no JSON: {e}")))?;
    print(&(text + "\n"))
}

/// Prints what a command came to as it is asked for, and keeps it for the termination message.
fn print_outcome<T: Serialize>(
    output: Output,
    outcome: &T,
    in_words: impl FnOnce(&T) -> String,
) -> Ended {
    termination::keep(outcome);
    match output {
        Output::Json => print_json(outcome)?,
        Output::Text => print(&printable::lines(&in_words(outcome)))?,
    }
    Ok(None)
}

/// Prints the report of an operation likewise, and gives the failure that it tells of.
fn print_report<T: Serialize>(
    output: Output,
    mut report: Report<T>,
    in_words: impl FnOnce(&Report<T>) -> String,
) -> Ended {
    let failure = report.failure.take();
    print_outcome(output, &report, in_words)?;
    Ok(failure)
}

/// What is printed on failure. The fields are a contract.
#[derive(JsonSchema, Serialize)]
#[schemars(extend("oneOf" = schemas::codes()))]
struct Failure {
    /// How it ended.
    status: FailedStatus,
    /// The process's exit code; see exit-codes.md.
    code: u8,
    /// Why it failed: a stable name; see exit-codes.md.
    reason: Reason,
    /// What failed, where, and what to do. For people: it may change.
    message: String,
}

/// How it ended.
#[derive(JsonSchema, Serialize)]
enum FailedStatus {
    /// The command failed; the process ends with the code in `code`.
    Failed,
}

impl Failure {
    fn new(reason: Reason, message: String) -> Self {
        Failure {
            status: FailedStatus::Failed,
            code: reason.exit_code(),
            reason,
            message,
        }
    }
}

fn fail(e: &Error, output: Output, say: bool) -> ExitCode {
    let code = e.reason().exit_code();
    if say {
        // Nowhere to complain if this fails; the exit code tells.
        let _ = writeln!(
            std::io::stderr(),
            "error: {} [{}]",
            printable::line(&e.to_string()),
            e.reason()
        );
    }
    if output == Output::Json {
        let failure = Failure::new(e.reason(), e.to_string());
        // There is no other way left to complain.
        let _ = stream::end_with(&failure);
    }
    ExitCode::from(code)
}

/// The command line could not be parsed, or asked for help.
fn refuse(e: &clap::Error, given: &[OsString], started: Instant) -> ExitCode {
    // Nowhere to complain if this fails.
    let _ = e.print();
    match e.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
        _ => {
            let file = asked_for(given, "--termination-log", "DELTAFOLD_TERMINATION_LOG");
            let file = file.filter(|f| !f.is_empty()).map(PathBuf::from);
            let termination = Termination::begin(file, begun_name(given), started);
            end_without_log(&termination, &Reason::Usage.error(refusal(e)));
            if wants_json(given) {
                let message = e.render().to_string();
                // Up to the usage, on one line.
                let said = message.split("\n\nUsage:").next().unwrap_or_default();
                let said = said
                    .split("\n\nFor more information")
                    .next()
                    .unwrap_or_default();
                let said: Vec<&str> = said.split_whitespace().collect();
                let said = said.join(" ");
                let said = said.trim_start_matches("error: ").to_owned();
                let failure = Failure::new(Reason::Usage, said);
                let _ = print_json(&failure);
            }
            ExitCode::from(Reason::Usage.exit_code())
        }
    }
}

/// Why a command line was refused, without what was given: a value may be a secret, and more people read a
/// Pod's status than its log.
fn refusal(e: &clap::Error) -> String {
    let what = e.kind().as_str().unwrap_or("it cannot be understood");
    let flags = match e.get(ContextKind::InvalidArg) {
        // A flag that is none is something given.
        _ if e.kind() == ErrorKind::UnknownArgument => Vec::new(),
        Some(ContextValue::String(flag)) => vec![flag.as_str()],
        Some(ContextValue::Strings(flags)) => flags.iter().map(String::as_str).collect(),
        _ => Vec::new(),
    };
    // As `--level <LEVEL>`.
    let flags = flags.iter().filter_map(|f| f.split([' ', '=']).next());
    let flags: Vec<&str> = flags.filter(|f| f.starts_with("--")).collect();
    match flags.is_empty() {
        true => format!("the command line: {what}; its log says more"),
        false => format!("{}: {what}; its log says more", flags.join(", ")),
    }
}

/// The command's name on a command line that could not be parsed, if it begins with it.
fn begun_name(given: &[OsString]) -> Option<String> {
    let mut at = command();
    let mut names = Vec::new();
    for arg in given.iter().skip(1) {
        let Some(below) = at.find_subcommand(arg).cloned() else {
            break;
        };
        names.push(below.get_name().to_owned());
        at = below;
    }
    (!names.is_empty()).then(|| names.join(" "))
}

/// The value of a flag on a command line that could not be parsed.
fn asked_for(given: &[OsString], flag: &str, variable: &str) -> Option<OsString> {
    let on_line = given.iter().enumerate().rev().find_map(|(i, arg)| {
        let joined = arg.as_bytes().strip_prefix(flag.as_bytes());
        let joined = joined.and_then(|rest| rest.strip_prefix(b"="));
        match joined {
            Some(value) => Some(OsString::from_vec(value.to_vec())),
            None => (i > 0 && given[i - 1] == *flag).then(|| arg.clone()),
        }
    });
    on_line.or_else(|| std::env::var_os(variable))
}

/// Whether `--output json` was asked for on a command line that could not be parsed.
fn wants_json(given: &[OsString]) -> bool {
    asked_for(given, "--output", "DELTAFOLD_OUTPUT").is_some_and(|format| format == "json")
}

/// A size for people.
fn size(bytes: u64) -> String {
    indicatif::HumanBytes(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        with_variables(command(), &[]).debug_assert();
    }
}
