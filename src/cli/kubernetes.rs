//! The flags that select a Kubernetes cluster and namespace, and tables and ages as kubectl prints them.
//!
//! `task` and `policy` use them: commands that a user runs against the controller's cluster.

use super::text::{Row, Text};
use crate::base::{Cancel, duration};
use crate::error::Result;
use crate::kubernetes::UserClient;
use chrono::{DateTime, Utc};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use std::time::Duration;
use tokio::runtime::Handle;

/// The cluster in which the controller runs.
#[derive(Debug, Args)]
#[command(next_help_heading = "Kubernetes")]
pub(super) struct ClusterArgs {
    /// Namespace [default: that of the kubeconfig or the Pod]
    ///
    /// DELTAFOLD_NAMESPACE also sets --namespace of other commands.
    #[arg(short, long, value_name = "NAMESPACE", value_parser = NonEmptyStringValueParser::new())]
    namespace: Option<String>,
    /// Context of the kubeconfig [default: the current context]
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    context: Option<String>,
}

impl ClusterArgs {
    /// A client of the API server; it sends nothing yet. With `may_be_silent`, responses have no read
    /// timeout.
    pub(super) async fn client(&self, may_be_silent: bool) -> Result<UserClient> {
        let namespace = self.namespace.as_deref();
        UserClient::connect(self.context.as_deref(), namespace, may_be_silent).await
    }
}

/// Waits for `work`. Fails with `Terminated` if a signal arrives first.
pub(super) fn wait_for<T>(cancel: &Cancel, work: impl Future<Output = Result<T>>) -> Result<T> {
    Handle::current().block_on(cancel.or(work))?
}

/// The time since `then`, such as `5m` or `1d 2h`.
pub(super) fn age(then: DateTime<Utc>, now: DateTime<Utc>) -> String {
    let seconds = (now - then).num_seconds();
    // The time may be from a machine whose clock is ahead.
    duration::whole(Duration::from_secs(u64::try_from(seconds).unwrap_or(0)))
}

/// A table whose columns are as wide as their widest cells.
pub(super) fn table<const N: usize>(header: [&str; N], rows: Vec<[String; N]>) -> String {
    let rows: Vec<Row> = rows.into_iter().map(|r| Row::new(r.into())).collect();
    let mut text = Text::new();
    text.table(&header, &rows);
    text.end()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_and_tables_are_short_and_aligned() {
        let at = |s: i64| DateTime::from_timestamp(1_790_000_000 + s, 0).unwrap();
        assert_eq!(age(at(0), at(93_784)), "1d 2h");
        assert_eq!(age(at(0), at(59)), "59s");
        assert_eq!(age(at(0), at(0)), "0s");
        assert_eq!(age(at(9), at(0)), "0s");
        let rows = vec![["a".to_owned(), "äöü".to_owned()]];
        assert_eq!(table(["NAME", "B"], rows), "NAME  B\na     äöü\n");
    }
}
