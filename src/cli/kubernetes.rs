//! Which Kubernetes, and where in it: the flags of the commands that people give a controller's cluster.

use crate::base::{Cancel, duration};
use crate::error::Result;
use crate::kubernetes::UserClient;
use chrono::{DateTime, Utc};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use std::time::Duration;
use tokio::runtime::Handle;

/// The cluster that the controller is in.
#[derive(Debug, Args)]
#[command(next_help_heading = "Kubernetes")]
pub(super) struct ClusterArgs {
    /// The namespace [default: the kubeconfig's or the Pod's]
    #[arg(short, long, value_name = "NAMESPACE", value_parser = NonEmptyStringValueParser::new())]
    namespace: Option<String>,
    /// The context of the kubeconfig [default: the current one]
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    context: Option<String>,
}

impl ClusterArgs {
    /// The way there; nothing is sent yet. With `silence` an answer may come as slowly as it likes.
    pub(super) async fn person(&self, silence: bool) -> Result<UserClient> {
        UserClient::connect(self.context.as_deref(), self.namespace.as_deref(), silence).await
    }
}

/// Runs what a person asked for, unless a signal comes.
pub(super) fn wait_for<T>(cancel: &Cancel, f: impl Future<Output = Result<T>>) -> Result<T> {
    Handle::current().block_on(cancel.or(f))?
}

/// How long ago something was, for people.
pub(super) fn age(then: DateTime<Utc>, now: DateTime<Utc>) -> String {
    let seconds = (now - then).num_seconds();
    // Another machine's clock may be ahead.
    duration::show(Duration::from_secs(u64::try_from(seconds).unwrap_or(0))).replace("0ms", "0s")
}

/// Columns as wide as their widest cell.
pub(super) fn table<const N: usize>(header: [&str; N], rows: Vec<[String; N]>) -> String {
    let header = header.map(str::to_owned);
    let rows: Vec<[String; N]> = std::iter::once(header).chain(rows).collect();
    let mut widths = [0; N];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let lines = rows.iter().map(|row| {
        let cells = row.iter().zip(widths);
        let cells: Vec<String> = cells.map(|(c, w)| format!("{c:w$}")).collect();
        format!("{}\n", cells.join("  ").trim_end())
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_and_tables_are_for_people() {
        let at = |s: i64| DateTime::from_timestamp(1_790_000_000 + s, 0).unwrap();
        assert_eq!(age(at(0), at(93_784)), "1d2h");
        assert_eq!(age(at(0), at(59)), "59s");
        assert_eq!(age(at(0), at(0)), "0s");
        assert_eq!(age(at(9), at(0)), "0s");
        let rows = vec![["a".to_owned(), "äöü".to_owned()]];
        assert_eq!(table(["NAME", "B"], rows), "NAME  B\na     äöü\n");
    }
}
