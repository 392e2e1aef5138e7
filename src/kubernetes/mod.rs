//! The Kubernetes API: clients that return our errors, the snapshot Leases, and a lock by Lease.
//!
//! It knows nothing of the operator's resources.

pub mod lease;
pub mod live_objects;
pub mod snapshot_leases;
mod user_client;

pub use snapshot_leases::{Behind, LeaseState, RestorableRange, SnapState, SnapshotLeases};
pub use user_client::UserClient;

use crate::base::Cancel;
use crate::base::causes::causes;
use crate::error::{Error, Reason, Result};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Config};
use std::time::Duration;
use tokio::runtime::Handle;

/// The timeout of a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The timeout of a request, including retries.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// The timeout of a silent watch. The API server ends silent watches earlier.
const WATCH_TIMEOUT: Duration = Duration::from_secs(295);

/// A client for one namespace; clones share the connections. Its calls block, so they must not run on the
/// threads of the runtime.
#[derive(Clone)]
pub struct Client {
    inner: kube::Client,
    namespace: String,
    /// The URL of the API server.
    server: String,
    handle: Handle,
    cancel: Cancel,
}

impl Client {
    /// Creates a client from `KUBECONFIG`, `~/.kube/config`, or the service account of the Pod. Nothing is
    /// sent. Without `namespace`, the client uses the configured one.
    ///
    /// # Errors
    /// `Configuration`.
    pub fn connect(namespace: Option<&str>, handle: Handle, cancel: Cancel) -> Result<Self> {
        Self::with_config(Self::infer(namespace, &handle, &cancel)?, handle, cancel)
    }

    /// Creates a client for watches, whose responses may be silent for a long time; otherwise like
    /// [`connect`](Self::connect). Callers that make other requests must set their own timeouts.
    ///
    /// # Errors
    /// `Configuration`.
    pub fn connect_to_watch(
        namespace: Option<&str>,
        handle: Handle,
        cancel: Cancel,
    ) -> Result<Self> {
        let mut config = Self::infer(namespace, &handle, &cancel)?;
        config.read_timeout = Some(WATCH_TIMEOUT);
        Self::build(config, handle, cancel)
    }

    fn infer(namespace: Option<&str>, handle: &Handle, cancel: &Cancel) -> Result<Config> {
        let advice = "set KUBECONFIG to a kubeconfig file, or run in a Pod with a service account";
        let result = handle.block_on(cancel.or(async { Config::infer().await }))?;
        let mut config = result.map_err(|e| unlocatable(&e, advice))?;
        if let Some(namespace) = namespace {
            config.default_namespace = namespace.to_owned();
        }
        Ok(config)
    }

    /// Creates a client from a configuration, for its default namespace.
    ///
    /// # Errors
    /// `Configuration`.
    pub fn with_config(mut config: Config, handle: Handle, cancel: Cancel) -> Result<Self> {
        config.read_timeout = Some(REQUEST_TIMEOUT);
        Self::build(config, handle, cancel)
    }

    fn build(config: Config, handle: Handle, cancel: Cancel) -> Result<Self> {
        let namespace = config.default_namespace.clone();
        // The client starts a task, which needs the runtime.
        let _entered = handle.enter();
        let (inner, server) = client(config)?;
        Ok(Client {
            inner,
            namespace,
            server,
            handle,
            cancel,
        })
    }

    /// Returns a client for another namespace.
    pub fn in_namespace(&self, namespace: &str) -> Self {
        Client {
            namespace: namespace.to_owned(),
            ..self.clone()
        }
    }

    /// Returns the underlying client, for other objects than Leases.
    pub fn inner(&self) -> kube::Client {
        self.inner.clone()
    }

    /// Returns the namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns the runtime of the requests.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Returns the cancellation flag, which ends every wait.
    pub(crate) fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// Returns the full name of a Lease, for messages.
    fn name(&self, lease: &str) -> String {
        format!("Lease {}/{lease} at {}", self.namespace, self.server)
    }

    fn leases(&self) -> Api<Lease> {
        Api::namespaced(self.inner.clone(), &self.namespace)
    }

    /// Waits for the response to a request for a Lease.
    fn ask<T>(
        &self,
        operation: &str,
        lease: &str,
        response: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, RequestError> {
        let operation = format!("{operation} {}", self.name(lease));
        let with_timeout = async { tokio::time::timeout(REQUEST_TIMEOUT, response).await };
        match self.handle.block_on(self.cancel.or(with_timeout)) {
            Err(e) => Err(RequestError::Final(e)),
            Ok(Ok(Ok(response))) => Ok(response),
            Ok(Ok(Err(e))) if is_conflict(&e) => Err(RequestError::Conflict),
            Ok(Ok(Err(e))) => Err(RequestError::Final(failure(&operation, &e))),
            Ok(Err(_)) => Err(RequestError::Final(timed_out(&operation))),
        }
    }
}

/// Creates a client. Also returns the URL of the API server.
fn client(mut config: Config) -> Result<(kube::Client, String)> {
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.write_timeout = Some(REQUEST_TIMEOUT);
    // Otherwise idle time would count toward the read timeout.
    config.reset_reader_on_write = true;
    let server = config.cluster_url.to_string();
    let server = server.trim_end_matches('/').to_owned();
    crate::base::tls::ensure_provider();
    let client =
        kube::Client::try_from(config).map_err(|e| failure(&format!("connect to {server}"), &e))?;
    Ok((client, server))
}

/// Returns the error for a configuration that does not lead to an API server. The remedy comes first.
fn unlocatable(e: &(dyn std::error::Error + 'static), advice: &str) -> Error {
    let cause = causes(e);
    let cause = cause
        .strip_prefix("failed to infer config: ")
        .unwrap_or(&cause);
    Reason::Configuration.error(format!(
        "no Kubernetes API is configured: {advice} (cause: {cause})"
    ))
}

fn timed_out(operation: &str) -> Error {
    Reason::KubernetesUnreachable.error(format!(
        "cannot {operation}: no response within {} s",
        REQUEST_TIMEOUT.as_secs()
    ))
}

/// Why a request failed.
#[derive(Debug)]
enum RequestError {
    /// Another client created, changed or deleted the object: read it again.
    Conflict,
    /// Another attempt would fail as well.
    Final(Error),
}

fn status(e: &kube::Error) -> Option<&kube::core::Status> {
    match e {
        kube::Error::Api(status) => Some(status),
        _ => None,
    }
}

/// Returns the message of a status, or its code if it has no message.
fn status_text(status: &kube::core::Status) -> String {
    match status.message.trim() {
        "" => format!("status {}", status.code),
        message => message.to_owned(),
    }
}

/// Whether another client created, changed or deleted the Lease.
fn is_conflict(e: &kube::Error) -> bool {
    // "Not found" can also mean a missing namespace, which does not resolve itself.
    let is_gone = |s: &kube::core::Status| {
        s.code == 404 && s.details.as_ref().is_some_and(|d| d.kind == "leases")
    };
    status(e).is_some_and(|s| s.code == 409 || is_gone(s))
}

/// Gives an error its reason, and adds advice to its message.
fn failure(operation: &str, e: &kube::Error) -> Error {
    if let Some(s) = status(e) {
        let (reason, advice) = match s.code {
            401 => (
                Reason::Unauthenticated,
                "; check the kubeconfig's user or the Pod's service account",
            ),
            403 => (
                Reason::PermissionDenied,
                "; grant the service account get, create and patch on leases (jobs/rbac.yaml)",
            ),
            // Too many requests, and responses of an API server that starts or stops.
            408 | 429 | 500.. => (Reason::KubernetesUnreachable, ""),
            _ => (Reason::Configuration, ""),
        };
        let text = status_text(s);
        return reason.error(format!("cannot {operation}: {text}{advice}"));
    }
    let text = causes(e);
    let reason = if crate::base::tls::says_expired(&text) {
        Reason::CertificateExpired
    } else {
        match e {
            kube::Error::Auth(_) => Reason::Unauthenticated,
            kube::Error::HyperError(_) | kube::Error::Service(_) | kube::Error::ReadEvents(_)
                if !text.contains("certificate") =>
            {
                Reason::KubernetesUnreachable
            }
            // The server that responds is not an API server.
            kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) => Reason::KubernetesUnreachable,
            _ => Reason::Configuration,
        }
    };
    let advice = match reason {
        Reason::Configuration => "; check the kubeconfig",
        _ => "",
    };
    reason.error(format!("cannot {operation}: {text}{advice}"))
}
