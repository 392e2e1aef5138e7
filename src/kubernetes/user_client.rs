//! An async client of the Kubernetes API for interactive commands, with a kubeconfig and a context, for
//! objects of any kind.

use super::{
    REQUEST_TIMEOUT, WATCH_TIMEOUT, client, failure, status, status_text, timed_out, unlocatable,
};
use crate::base::opt;
use crate::error::{Error, Reason, Result};
use kube::config::KubeConfigOptions;
use kube::core::NamespaceResourceScope;
use kube::{Api, Config, Resource};

/// A client with the kubeconfig of a user.
#[derive(Clone)]
pub struct UserClient {
    client: kube::Client,
    namespace: String,
    server: String,
}

impl UserClient {
    /// Creates a client from `KUBECONFIG`, `~/.kube/config`, or the service account of the Pod. Nothing is
    /// sent. Without `context` and `namespace`, it uses the configured ones. A response may be silent for
    /// about five minutes.
    ///
    /// # Errors
    /// `Configuration`.
    pub async fn connect(context: Option<&str>, namespace: Option<&str>) -> Result<Self> {
        const CHECK: &str = "set KUBECONFIG to a kubeconfig file, give {context} one of its contexts, or run in a Pod with a service account";
        let config = match context {
            None => Config::infer()
                .await
                .map_err(|e| unlocatable(&e, &opt::fill(CHECK))),
            Some(context) => {
                let options = KubeConfigOptions {
                    context: Some(context.to_owned()),
                    ..KubeConfigOptions::default()
                };
                Config::from_kubeconfig(&options)
                    .await
                    .map_err(|e| unlocatable(&e, &opt::fill(CHECK)))
            }
        };
        let mut config = config?;
        config.read_timeout = Some(WATCH_TIMEOUT);
        let configured = config.default_namespace.clone();
        let (client, server) = client(config)?;
        Ok(UserClient {
            client,
            namespace: namespace.map_or(configured, str::to_owned),
            server,
        })
    }

    /// Returns the namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns the URL of the API server.
    pub(super) fn server(&self) -> &str {
        &self.server
    }

    /// Returns the underlying client.
    pub(super) fn inner(&self) -> kube::Client {
        self.client.clone()
    }

    /// Returns the API for objects of a kind in the namespace.
    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Waits for a response, at most 15 s. `operation` names the request in messages.
    ///
    /// # Errors
    /// As [`failure`](Self::failure); `KubernetesUnreachable` after the timeout.
    pub async fn ask<T>(
        &self,
        operation: &str,
        response: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T> {
        match tokio::time::timeout(REQUEST_TIMEOUT, response).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(e)) => Err(self.failure(operation, &e)),
            Err(_) => Err(timed_out(&format!("{operation} at {}", self.server))),
        }
    }

    /// Gives an error its reason: `Usage` if the API refuses the object or it does not exist, `TargetExists`
    /// if the name is taken, `Conflict`, `PermissionDenied`, `Unauthenticated`, `KubernetesUnreachable` or
    /// `Configuration`.
    pub fn failure(&self, operation: &str, e: &kube::Error) -> Error {
        let Some(s) = status(e) else {
            return failure(&format!("{operation} at {}", self.server), e);
        };
        let has_name = s.details.as_ref().is_some_and(|d| !d.name.is_empty());
        let (reason, advice) = match s.code {
            403 => (Reason::PermissionDenied, ""),
            404 if has_name => (Reason::Usage, ""),
            404 => (
                Reason::Configuration,
                "; are the CRDs installed? kubectl apply --server-side -f jobs/crds.yaml",
            ),
            409 if s.reason == "AlreadyExists" => (Reason::TargetExists, ""),
            409 => (Reason::Conflict, ""),
            400 | 422 => (Reason::Usage, ""),
            _ => return failure(&format!("{operation} at {}", self.server), e),
        };
        let text = status_text(s);
        reason.error(format!("cannot {operation}: {text}{advice}"))
    }
}
