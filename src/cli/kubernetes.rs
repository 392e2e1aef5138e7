//! The flags that select a Kubernetes cluster and namespace.
//!
//! `task` uses them: a command that a user runs against the controller's cluster.

use crate::base::Cancel;
use crate::error::Result;
use crate::kubernetes::UserClient;
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
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
    /// A client of the API server; it sends nothing yet.
    pub(super) async fn client(&self) -> Result<UserClient> {
        let namespace = self.namespace.as_deref();
        UserClient::connect(self.context.as_deref(), namespace).await
    }
}

/// Waits for `work`. Fails with `Terminated` if a signal arrives first.
pub(super) fn wait_for<T>(cancel: &Cancel, work: impl Future<Output = Result<T>>) -> Result<T> {
    Handle::current().block_on(cancel.or(work))?
}
