//! Kubernetes' API for commands that people run: by kubeconfig and context, for objects of any kind.
//!
//! Its calls are async, and every failure has a reason; what is asked is for `cli` to know.

use super::{CONNECT_TIMEOUT, PATIENCE, failure, status};
use crate::base::causes::causes;
use crate::error::{Error, Reason, Result};
use kube::config::KubeConfigOptions;
use kube::core::NamespaceResourceScope;
use kube::{Api, Config, Resource};
use std::time::Duration;

/// Longer than the API server lets a watch be silent.
const WATCH_PATIENCE: Duration = Duration::from_secs(295);

/// Somebody with a kubeconfig.
#[derive(Clone)]
pub struct Person {
    client: kube::Client,
    namespace: String,
    server: String,
}

impl Person {
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
        let wrong = |said: String| {
            Reason::Configuration.error(format!(
                "cannot tell where the Kubernetes API is: {said}; check KUBECONFIG and --context"
            ))
        };
        let mut config = match context {
            None => Config::infer().await.map_err(|e| wrong(causes(&e)))?,
            Some(context) => {
                let options = KubeConfigOptions {
                    context: Some(context.to_owned()),
                    ..KubeConfigOptions::default()
                };
                let config = Config::from_kubeconfig(&options).await;
                config.map_err(|e| wrong(causes(&e)))?
            }
        };
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        config.write_timeout = Some(PATIENCE);
        config.read_timeout = (!silence).then_some(WATCH_PATIENCE);
        // Else the time that a connection was idle counts, too.
        config.reset_reader_on_write = true;
        let server = config.cluster_url.to_string();
        let server = server.trim_end_matches('/').to_owned();
        let configured = config.default_namespace.clone();
        crate::tls::ensure_provider();
        let client = kube::Client::try_from(config)
            .map_err(|e| failure(&format!("connect to {server}"), &e))?;
        Ok(Person {
            client,
            namespace: namespace.map_or(configured, str::to_owned),
            server,
        })
    }

    /// The namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
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
            Err(_) => Err(Reason::KubernetesUnreachable.error(format!(
                "cannot {what} at {}: no answer within {} s",
                self.server,
                PATIENCE.as_secs()
            ))),
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
        let said = match s.message.trim() {
            "" => format!("status {}", s.code),
            said => said.to_owned(),
        };
        Error::new(reason, format!("cannot {what}: {said}{advice}"))
    }
}
