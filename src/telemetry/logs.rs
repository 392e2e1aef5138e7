//! Sets up the logs on standard error: human-readable text, or one JSON object for each line.

use super::progress::LogWriter;
use crate::base::lock;
use crate::base::printable::{self, SafeJson};
use anstream::{AutoStream, ColorChoice};
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io::IsTerminal;
use std::sync::Mutex;
use tracing::field::Field;
use tracing_subscriber::field::MakeExt as _;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::ChronoUtc;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{Layer as _, fmt, registry};

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One line of text per event
    Text,
    /// One JSON object per event
    Json,
}

impl LogFormat {
    /// Returns JSON in a Kubernetes Pod, and text elsewhere or on a terminal.
    pub fn detect() -> Self {
        let in_pod = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
        if in_pod && !std::io::stderr().is_terminal() {
            LogFormat::Json
        } else {
            LogFormat::Text
        }
    }
}

/// The warnings that were logged.
static LOGGED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
/// The most of these that are kept, since a process may run for long.
const MOST_LOGGED: usize = 1000;

/// Logs a warning of an operation, which its report will have, too.
pub fn warn(message: &str) {
    tracing::warn!("{message}");
    let logged = &mut lock(&LOGGED);
    if logged.len() < MOST_LOGGED {
        logged.insert(message.to_owned());
    }
}

/// Logs the warnings of a report that [`warn`] has not logged.
pub fn warn_of_others(warnings: &[String]) {
    let logged = lock(&LOGGED);
    let others = warnings.iter().filter(|w| !logged.contains(*w));
    others.for_each(|warning| tracing::warn!("{warning}"));
}

/// Writes a field of a text line. Text of others, such as names and messages, must not forge a line or
/// control the terminal.
fn write_field(out: &mut Writer<'_>, field: &Field, value: &dyn Debug) -> std::fmt::Result {
    let text = format!("{value:?}");
    let text = printable::line(&text);
    match field.name() {
        "message" => write!(out, "{text}"),
        name => write!(out, "{name}={text}"),
    }
}

/// Starts logging. `level` is a level (`info`), or a list of `target=level` separated by commas.
///
/// A single level applies to deltafold only. Other crates log warnings and errors, because their debug lines
/// may contain requests.
///
/// # Errors
/// A message if `level` is invalid.
pub fn init(format: LogFormat, level: &str) -> Result<(), String> {
    let filter = if level.contains(['=', ',']) {
        level.to_owned()
    } else {
        format!("warn,deltafold={level}")
    };
    let filter: Targets = filter
        .parse()
        .map_err(|e: tracing_subscriber::filter::ParseError| e.to_string())?;
    let lines = fmt::layer().with_target(false);
    let lines = match format {
        LogFormat::Json => lines
            .with_writer(|| SafeJson(LogWriter))
            .json()
            .flatten_event(true)
            .boxed(),
        LogFormat::Text => lines
            .with_writer(LogWriter::default)
            .with_ansi(AutoStream::choice(&std::io::stderr()) != ColorChoice::Never)
            .with_timer(ChronoUtc::new("%Y-%m-%dT%H:%M:%SZ".to_owned()))
            .compact()
            .fmt_fields(fmt::format::debug_fn(write_field).delimited(" "))
            .boxed(),
    };
    registry().with(lines.with_filter(filter)).init();
    Ok(())
}
