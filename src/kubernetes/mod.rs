//! Kubernetes' API: a client with our errors, Leases that tell of snapshots, a lock by Lease.
//!
//! It knows Leases and namespaces; of snapshots it knows names and revisions that others give it. `ops` and
//! `cli` call it.

pub mod lease;
mod snapshot_leases;
mod user_client;

pub use snapshot_leases::{Behind, LeaseState, SnapState, SnapshotLeases};
pub use user_client::UserClient;

use crate::base::Cancel;
use crate::base::causes::causes;
use crate::error::{Error, Reason, Result};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Config};
use std::time::Duration;
use tokio::runtime::Handle;

/// To connect to the API.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// For one request, its retries included.
const PATIENCE: Duration = Duration::from_secs(15);
/// Longer than the API server lets a watch be silent.
const WATCH_PATIENCE: Duration = Duration::from_secs(295);

/// A client of one namespace; clones share it. Its calls block: not for async threads.
#[derive(Clone)]
pub struct Client {
    inner: kube::Client,
    namespace: String,
    /// The API's URL.
    server: String,
    handle: Handle,
    cancel: Cancel,
}

impl Client {
    /// Finds the API as every client does: by `KUBECONFIG` or `~/.kube/config`, in a Pod by its service
    /// account. Nothing is sent. The namespace is the one that is configured there, if none is given.
    ///
    /// # Errors
    /// `Configuration`.
    pub fn connect(namespace: Option<&str>, handle: Handle, cancel: Cancel) -> Result<Self> {
        Self::with_config(Self::infer(namespace, &handle, &cancel)?, handle, cancel)
    }

    /// As [`connect`](Self::connect), for watches: an answer may take as long as nothing happens. Whoever asks
    /// for more than a Lease with it sets limits of its own.
    ///
    /// # Errors
    /// `Configuration`.
    pub fn connect_to_watch(
        namespace: Option<&str>,
        handle: Handle,
        cancel: Cancel,
    ) -> Result<Self> {
        let mut config = Self::infer(namespace, &handle, &cancel)?;
        config.read_timeout = Some(WATCH_PATIENCE);
        Self::build(config, handle, cancel)
    }

    fn infer(namespace: Option<&str>, handle: &Handle, cancel: &Cancel) -> Result<Config> {
        let inferred = async { Config::infer().await };
        let advice = "set KUBECONFIG, or give the Pod a service account";
        let inferred = handle.block_on(cancel.or(inferred))?;
        let mut config = inferred.map_err(|e| nowhere(&e, advice))?;
        if let Some(namespace) = namespace {
            config.default_namespace = namespace.to_owned();
        }
        Ok(config)
    }

    /// A client of the default namespace of a configuration.
    ///
    /// # Errors
    /// `Configuration`.
    pub fn with_config(mut config: Config, handle: Handle, cancel: Cancel) -> Result<Self> {
        config.read_timeout = Some(PATIENCE);
        Self::build(config, handle, cancel)
    }

    fn build(config: Config, handle: Handle, cancel: Cancel) -> Result<Self> {
        let namespace = config.default_namespace.clone();
        // It starts a task of its own.
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

    /// The same client in another namespace.
    pub fn in_namespace(&self, namespace: &str) -> Self {
        Client {
            namespace: namespace.to_owned(),
            ..self.clone()
        }
    }

    /// For what is not about Leases.
    pub fn inner(&self) -> kube::Client {
        self.inner.clone()
    }

    /// The namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Where its requests run.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// The switch that ends its waits.
    pub(crate) fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    /// A Lease's full name, for people.
    fn name(&self, lease: &str) -> String {
        format!("Lease {}/{lease} at {}", self.namespace, self.server)
    }

    fn leases(&self) -> Api<Lease> {
        Api::namespaced(self.inner.clone(), &self.namespace)
    }

    /// Waits for an answer about a Lease.
    fn ask<T>(
        &self,
        what: &str,
        lease: &str,
        answer: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, Failed> {
        let what = format!("{what} {}", self.name(lease));
        let answered = async { tokio::time::timeout(PATIENCE, answer).await };
        match self.handle.block_on(self.cancel.or(answered)) {
            Err(e) => Err(Failed::Final(e)),
            Ok(Ok(Ok(answer))) => Ok(answer),
            Ok(Ok(Err(e))) if is_conflict(&e) => Err(Failed::Conflict),
            Ok(Ok(Err(e))) => Err(Failed::Final(failure(&what, &e))),
            Ok(Err(_)) => Err(Failed::Final(unanswered(&what))),
        }
    }
}

/// A client, and the URL of the API.
fn client(mut config: Config) -> Result<(kube::Client, String)> {
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.write_timeout = Some(PATIENCE);
    // Otherwise idle time would count toward the read timeout.
    config.reset_reader_on_write = true;
    let server = config.cluster_url.to_string();
    let server = server.trim_end_matches('/').to_owned();
    crate::base::tls::ensure_provider();
    let client =
        kube::Client::try_from(config).map_err(|e| failure(&format!("connect to {server}"), &e))?;
    Ok((client, server))
}

fn nowhere(e: &(dyn std::error::Error + 'static), advice: &str) -> Error {
    Reason::Configuration.error(format!(
        "cannot tell where the Kubernetes API is: {}; {advice}",
        causes(e)
    ))
}

/// No answer came in time.
fn unanswered(what: &str) -> Error {
    Reason::KubernetesUnreachable.error(format!(
        "cannot {what}: no answer within {} s",
        PATIENCE.as_secs()
    ))
}

/// What became of a request that failed.
#[derive(Debug)]
enum Failed {
    /// Somebody else wrote, made or deleted it meanwhile: look again.
    Conflict,
    /// Another attempt will not do.
    Final(Error),
}

fn status(e: &kube::Error) -> Option<&kube::core::Status> {
    match e {
        kube::Error::Api(status) => Some(status),
        _ => None,
    }
}

/// What a status says.
fn said(status: &kube::core::Status) -> String {
    match status.message.trim() {
        "" => format!("status {}", status.code),
        said => said.to_owned(),
    }
}

/// Whether the object was written, made or deleted meanwhile.
fn is_conflict(e: &kube::Error) -> bool {
    // A namespace that is not there is no matter of time.
    let is_gone = |s: &kube::core::Status| {
        s.code == 404 && s.details.as_ref().is_some_and(|d| d.kind == "leases")
    };
    status(e).is_some_and(|s| s.code == 409 || is_gone(s))
}

/// Gives a failure its reason.
fn failure(what: &str, e: &kube::Error) -> Error {
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
            // Too many requests, and what an API server says when it starts or ends.
            408 | 429 | 500.. => (Reason::KubernetesUnreachable, ""),
            _ => (Reason::Configuration, ""),
        };
        let said = said(s);
        return reason.error(format!("cannot {what}: {said}{advice}"));
    }
    let said = causes(e);
    let reason = if crate::base::tls::says_expired(&said) {
        Reason::CertificateExpired
    } else {
        match e {
            kube::Error::Auth(_) => Reason::Unauthenticated,
            kube::Error::HyperError(_) | kube::Error::Service(_) | kube::Error::ReadEvents(_)
                if !said.contains("certificate") =>
            {
                Reason::KubernetesUnreachable
            }
            // Something that answers, and is no API server.
            kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) => Reason::KubernetesUnreachable,
            _ => Reason::Configuration,
        }
    };
    let advice = match reason {
        Reason::Configuration => "; check the kubeconfig",
        _ => "",
    };
    reason.error(format!("cannot {what}: {said}{advice}"))
}
