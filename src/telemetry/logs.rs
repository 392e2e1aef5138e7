//! Logs on standard error: text for people, one JSON object a line for Pods.

use std::io::IsTerminal;
use tracing_subscriber::EnvFilter;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One line of text an event
    Text,
    /// One JSON object an event
    Json,
}

impl LogFormat {
    /// JSON in a Kubernetes Pod, text elsewhere.
    pub fn detect() -> Self {
        let in_pod = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
        if in_pod && !std::io::stderr().is_terminal() {
            LogFormat::Json
        } else {
            LogFormat::Text
        }
    }
}

/// Starts logging; `level` is a level (`info`) or a filter as of the crate tracing-subscriber.
///
/// Other crates log from `warn` on: their debug lines may show requests.
///
/// # Errors
/// What is wrong with `level`.
pub fn init(format: LogFormat, level: &str) -> Result<(), String> {
    let filter = if level.contains(['=', ',']) {
        level.to_owned()
    } else {
        format!("warn,deltafold={level}")
    };
    let filter = EnvFilter::try_new(filter).map_err(|e| e.to_string())?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(super::progress::LogWriter::default)
        .with_target(false);
    match format {
        LogFormat::Json => builder.json().flatten_event(true).init(),
        LogFormat::Text => builder
            .with_ansi(std::io::stderr().is_terminal())
            .compact()
            .init(),
    }
    Ok(())
}
