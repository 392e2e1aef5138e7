//! Kubernetes' API for commands that people run: by kubeconfig and context, for objects of any kind.
//!
//! Its calls are async, and every failure has a reason; what is asked is for `cli` to know.

use super::{PATIENCE, WATCH_PATIENCE, client, failure, nowhere, said, status, unanswered};
use crate::error::{Error, Reason, Result};
use kube::config::KubeConfigOptions;
use kube::core::NamespaceResourceScope;
use kube::{Api, Config, Resource};

/// Somebody with a kubeconfig.
#[derive(Clone)]
pub struct UserClient {
    client: kube::Client,
    namespace: String,
    server: String,
}

impl UserClient {
    /// Finds the API by `KUBECONFIG` or `~/.kube/config`, in a Pod by its service account. The context and the
    /// namespace are those that are configured there, if none is given. Nothing is sent. An answer to a request may
    /// be silent for as long as a watch is; with `silence` for ever.
    ///
    /// # Errors
    /// `Configuration`.
    pub async fn connect(
        context: Option<&str>,
        namespace: Option<&str>,
        silence: bool,
    ) -> Result<Self> {
        const CHECK: &str = "check KUBECONFIG and --context";
        let config = match context {
            None => Config::infer().await.map_err(|e| nowhere(&e, CHECK)),
            Some(context) => {
                let options = KubeConfigOptions {
                    context: Some(context.to_owned()),
                    ..KubeConfigOptions::default()
                };
                let config = Config::from_kubeconfig(&options).await;
                config.map_err(|e| nowhere(&e, CHECK))
            }
        };
        let mut config = config?;
        config.read_timeout = (!silence).then_some(WATCH_PATIENCE);
        let configured = config.default_namespace.clone();
        let (client, server) = client(config)?;
        Ok(UserClient {
            client,
            namespace: namespace.map_or(configured, str::to_owned),
            server,
        })
    }

    /// The namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The same one in another namespace.
    pub fn in_namespace(&self, namespace: &str) -> Self {
        UserClient {
            namespace: namespace.to_owned(),
            ..self.clone()
        }
    }

    /// Objects of a kind in the namespace.
    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Objects of a kind in all namespaces.
    pub fn all<K>(&self) -> Api<K>
    where
        K: Resource,
        K::DynamicType: Default,
    {
        Api::all(self.client.clone())
    }

    /// Waits for an answer, and not for ever.
    ///
    /// # Errors
    /// As [`failure`](Self::failure); `KubernetesUnreachable` where none comes.
    pub async fn ask<T>(
        &self,
        what: &str,
        answer: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T> {
        match tokio::time::timeout(PATIENCE, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(e)) => Err(self.failure(what, &e)),
            Err(_) => Err(unanswered(&format!("{what} at {}", self.server))),
        }
    }

    /// Gives a failure its reason: `Usage` for what the API refuses or does not have, `TargetExists` for a name that
    /// is taken, `Conflict`, `PermissionDenied`, `Unauthenticated`, `KubernetesUnreachable`, `Configuration`.
    pub fn failure(&self, what: &str, e: &kube::Error) -> Error {
        let Some(s) = status(e) else {
            return failure(&format!("{what} at {}", self.server), e);
        };
        let has_name = s.details.as_ref().is_some_and(|d| !d.name.is_empty());
        let (reason, advice) = match s.code {
            403 => (Reason::PermissionDenied, ""),
            404 if has_name => (Reason::Usage, ""),
            404 => (
                Reason::Configuration,
                "; are the definitions there? deltafold manifests crds | kubectl apply --server-side -f -",
            ),
            409 if s.reason == "AlreadyExists" => (Reason::TargetExists, ""),
            409 => (Reason::Conflict, ""),
            400 | 422 => (Reason::Usage, ""),
            _ => return failure(&format!("{what} at {}", self.server), e),
        };
        let said = said(s);
        reason.error(format!("cannot {what}: {said}{advice}"))
    }
}
