//! Finds out whether a cluster has a quorum without one of its members, from requests to the other members.
//!
//! It uses their peer URLs and changes nothing.

use crate::base::Cancel;
use crate::base::causes::causes;
use crate::base::opt::{self, Opt, PEER_CERT_FILE, PEER_KEY_FILE, PEER_TRUSTED_CA_FILE};
use crate::datadir::Member;
use crate::error::{Reason, Result};
use reqwest::{Certificate, Client, Identity};
use std::error::Error as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::runtime::Handle;

/// How the other members are asked whether they have a quorum. The flags are etcd's own.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Peers")]
pub struct PeerOptions {
    /// CA certificates that verify the other members (PEM) [default: the system's]
    #[arg(
        long = "peer-trusted-ca-file",
        value_name = "FILE",
        requires = "if_needed"
    )]
    pub trusted_ca_file: Option<PathBuf>,
    /// Client certificate that the other members accept (PEM)
    #[arg(
        long = "peer-cert-file",
        value_name = "FILE",
        requires = "key_file",
        requires = "if_needed"
    )]
    pub cert_file: Option<PathBuf>,
    /// Key of that certificate (PEM)
    #[arg(
        long = "peer-key-file",
        value_name = "FILE",
        requires = "cert_file",
        requires = "if_needed"
    )]
    pub key_file: Option<PathBuf>,
}

/// The responses of one member.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerObservation {
    /// The name of the member.
    pub name: String,
    /// Whether a server responded, etcd or not.
    pub reachable: bool,
    /// The version of etcd.
    pub version: Option<String>,
    /// Whether a linearizable read, which needs a quorum, succeeded; `None` if it was not possible to try.
    pub linearizable: Option<bool>,
    /// The cluster's ID in the member's responses, hexadecimal.
    pub cluster_id: Option<String>,
    /// Whether a server is there but refuses our requests, because of TLS or because it is not etcd.
    pub refuses: bool,
    /// The last error.
    pub error: Option<String>,
}

/// Whether the other members have a quorum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuorumState {
    /// The other members have a quorum.
    Quorum,
    /// They have no quorum.
    NoQuorum,
    /// The responses do not allow a decision.
    Unknown,
}

/// A state with its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuorumDecision {
    /// Whether the other members have a quorum.
    pub state: QuorumState,
    /// The reason, with the names of members.
    pub reason: String,
}

/// Decides from the responses of the other members whether they have a quorum. `members_total` includes this
/// member.
pub fn has_quorum(observations: &[PeerObservation], members_total: usize) -> QuorumDecision {
    let decision = |state, reason: String| QuorumDecision { state, reason };
    if observations.is_empty() {
        return decision(
            QuorumState::NoQuorum,
            "the cluster has no other member".to_owned(),
        );
    }
    let names = |which: &dyn Fn(&PeerObservation) -> bool| {
        let names: Vec<&str> = observations
            .iter()
            .filter(|s| which(s))
            .map(|s| s.name.as_str())
            .collect();
        names.join(", ")
    };
    let mut ids: Vec<&str> = observations
        .iter()
        .filter_map(|s| s.cluster_id.as_deref())
        .collect();
    ids.sort_unstable();
    ids.dedup();
    if ids.len() > 1 {
        return decision(
            QuorumState::Unknown,
            format!(
                "the other members are of different clusters ({}): check the peer URLs",
                ids.join(", ")
            ),
        );
    }
    // A single successful read proves a quorum.
    let readers = names(&|s| s.linearizable == Some(true));
    if !readers.is_empty() {
        return decision(
            QuorumState::Quorum,
            format!("a linearizable read at {readers} succeeded without this member"),
        );
    }
    let is_unusable = |s: &PeerObservation| s.refuses || (s.reachable && s.linearizable.is_none());
    if let Some(first) = observations.iter().find(|s| is_unusable(s)) {
        let error = first.error.as_deref().unwrap_or("unknown error");
        return decision(
            QuorumState::Unknown,
            format!("{} cannot be queried: {error}", names(&is_unusable)),
        );
    }
    let up = observations.iter().filter(|s| s.reachable).count();
    decision(
        QuorumState::NoQuorum,
        match up {
            0 => format!("no other member of {members_total} responds"),
            _ => format!(
                "{} of {members_total} members respond ({}), but linearizable reads fail there",
                up,
                names(&|s| s.reachable)
            ),
        },
    )
}

/// The timeout of a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The timeout of a request that etcd answers from memory.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The timeout of a linearizable read. etcd waits up to 5 s and two election timeouts (1 s each by default);
/// an operator may have configured longer ones.
const READ_TIMEOUT: Duration = Duration::from_secs(15);
/// The maximum number of attempts at a read: during an election a read can fail at once.
const READ_ATTEMPTS: u32 = 4;
const PAUSE: Duration = Duration::from_secs(1);

const CHECK_TLS: &str = "check https:// in the peer URLs, and give {peer-trusted-ca-file}, {peer-cert-file} and {peer-key-file} with the values that etcd uses";

/// Finds out whether the other members of a cluster of `members_total` have a quorum without this member.
/// Returns how that was proved, or `None` if they have no quorum. It blocks: call it in the context of a
/// runtime, but not on one of its threads.
///
/// # Errors
/// `Configuration` if the responses do not allow a decision, or a file of `options` is unusable; `Usage`;
/// `Terminated`.
pub fn find_quorum(
    others: &[&Member],
    members_total: usize,
    options: &PeerOptions,
    cancel: &Cancel,
) -> Result<Option<String>> {
    let observations = ask(others, options, cancel)?;
    for o in &observations {
        tracing::info!(
            member = o.name,
            reachable = o.reachable,
            version = o.version,
            linearizable = o.linearizable,
            cluster_id = o.cluster_id,
            error = o.error,
            "queried another member"
        );
    }
    let QuorumDecision { state, reason } = has_quorum(&observations, members_total);
    match state {
        QuorumState::Quorum => Ok(Some(reason)),
        QuorumState::NoQuorum => Ok(None),
        QuorumState::Unknown => Err(Reason::Configuration.error(format!(
            "cannot find out whether the other members have a quorum: {reason}"
        ))),
    }
}

/// Queries all other members at once, at their peer URLs.
///
/// # Errors
/// `Configuration` if a file of `options` is unusable; `Usage`; `Terminated`.
pub fn ask(
    others: &[&Member],
    options: &PeerOptions,
    cancel: &Cancel,
) -> Result<Vec<PeerObservation>> {
    let client = client(options)?;
    let queries = others.iter().map(|peer| query_member(&client, peer));
    Handle::current().block_on(cancel.or(futures::future::join_all(queries)))
}

/// Queries one peer URL after the other until an etcd responds.
async fn query_member(client: &Client, peer: &Member) -> PeerObservation {
    let mut observation = PeerObservation {
        name: peer.name.clone(),
        ..PeerObservation::default()
    };
    for url in &peer.peer_urls {
        let url = url.trim_end_matches('/');
        match version(client, url).await {
            Ok(version) => {
                observation.reachable = true;
                observation.refuses = false;
                observation.error = None;
                observation.version = Some(version);
                read(client, url, &mut observation).await;
                return observation;
            }
            Err((refuses, error)) => {
                observation.refuses |= refuses;
                observation.reachable |= refuses;
                observation.error = Some(format!("{url}: {error}"));
            }
        }
    }
    observation
}

/// Requests the version of the server. An error says whether a server is there, and what failed.
async fn version(client: &Client, url: &str) -> Result<String, (bool, String)> {
    if !url.starts_with("http://") && !url.starts_with("https://") {
        return Err((
            true,
            "a peer URL begins with http:// or https://".to_owned(),
        ));
    }
    let (status, text, _) = get(client, &format!("{url}/version"), TIMEOUT).await?;
    let json: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    match json["etcdserver"].as_str() {
        Some(version) if status == 200 => Ok(version.to_owned()),
        // The response of Go's HTTPS server to a plain HTTP request.
        _ if text.contains("HTTP request to an HTTPS server") => Err((
            true,
            format!("the server requires TLS: {}", opt::fill(CHECK_TLS)),
        )),
        _ => Err((
            true,
            format!("the server is not etcd: it answers /version with status {status}"),
        )),
    }
}

/// Makes a linearizable read: etcd 3.5 to 3.7 answers `/downgrade/enabled` only after one.
async fn read(client: &Client, url: &str, observation: &mut PeerObservation) {
    let url = format!("{url}/downgrade/enabled");
    for attempt in 1..=READ_ATTEMPTS {
        match get(client, &url, READ_TIMEOUT).await {
            Ok((status @ (200 | 500), text, id)) => {
                let reads = status == 200;
                observation.cluster_id = id;
                observation.refuses = false;
                observation.linearizable = Some(reads);
                observation.error = (!reads).then(|| text.trim().to_owned());
                // After a timeout etcd has waited long enough for a leader.
                if reads || text.contains("timed out") || text.contains("deadline") {
                    return;
                }
            }
            Ok((status, _, id)) => {
                observation.cluster_id = id;
                observation.error = Some(format!(
                    "the server answers /downgrade/enabled with status {status}; etcd 3.5 or newer is needed"
                ));
                return;
            }
            // It responded to the first request, so it may be shutting down.
            Err((refuses, error)) => {
                observation.refuses = refuses;
                observation.linearizable = (!refuses).then_some(false);
                observation.error = Some(error);
            }
        }
        if attempt < READ_ATTEMPTS {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Makes a request. Returns the status, the text, and the cluster's ID. An error says whether a server is
/// there, and what failed.
async fn get(
    client: &Client,
    url: &str,
    timeout: Duration,
) -> Result<(u16, String, Option<String>), (bool, String)> {
    let request = client.get(url).timeout(timeout);
    let response = request.send().await.map_err(|e| failure(&e))?;
    let status = response.status().as_u16();
    let header = response.headers().get("x-etcd-cluster-id");
    let cluster_id = header.and_then(|v| v.to_str().ok()).map(str::to_owned);
    let text = response.text().await.map_err(|e| failure(&e))?;
    Ok((status, text, cluster_id))
}

/// Decides from an error whether a server is there, and returns the message.
fn failure(e: &reqwest::Error) -> (bool, String) {
    let text = match e.source() {
        Some(cause) => causes(cause),
        None => e.to_string(),
    };
    // Only an existing server causes these errors.
    const TLS_ERRORS: [&str; 4] = ["certificate", "alert", "corrupt message", "handshake"];
    // A server that requires TLS may also accept the connection and then close it.
    let is_unreachable = e.is_connect() || e.is_timeout();
    if TLS_ERRORS.iter().any(|sign| text.contains(sign)) || !is_unreachable {
        (true, format!("{text}: {}", opt::fill(CHECK_TLS)))
    } else {
        (false, text)
    }
}

/// Builds the HTTP client.
fn client(options: &PeerOptions) -> Result<Client> {
    let wrong = |flag: Opt, path: &Path, e: &dyn std::fmt::Display| {
        Reason::Configuration.error(format!("cannot use {flag} {}: {e}", path.display()))
    };
    let read = |flag: Opt, path: &Path| std::fs::read(path).map_err(|e| wrong(flag, path, &e));
    crate::base::tls::ensure_provider();
    // Members are queried directly: no proxies, and no redirects.
    let mut builder = Client::builder()
        .no_proxy()
        // etcd's peer listeners offer HTTP/2, but do not support it.
        .http1_only()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT);
    if let Some(path) = &options.trusted_ca_file {
        let flag = PEER_TRUSTED_CA_FILE;
        let certs =
            Certificate::from_pem_bundle(&read(flag, path)?).map_err(|e| wrong(flag, path, &e))?;
        if certs.is_empty() {
            return Err(wrong(flag, path, &"the file contains no certificate"));
        }
        builder = builder.tls_certs_only(certs);
    }
    match (&options.cert_file, &options.key_file) {
        (Some(cert), Some(key)) => {
            let mut pem = read(PEER_CERT_FILE, cert)?;
            pem.push(b'\n');
            pem.extend(read(PEER_KEY_FILE, key)?);
            let identity = Identity::from_pem(&pem).map_err(|e| wrong(PEER_CERT_FILE, cert, &e))?;
            builder = builder.identity(identity);
        }
        (None, None) => {}
        _ => {
            return Err(Reason::Usage.error(format!(
                "{PEER_CERT_FILE} and {PEER_KEY_FILE} belong together: give both"
            )));
        }
    }
    builder.build().map_err(|e| {
        let (_, text) = failure(&e);
        Reason::Configuration.error(format!(
            "cannot set up the HTTP client for the other members: {text}"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn up(name: &str, linearizable: Option<bool>) -> PeerObservation {
        PeerObservation {
            name: name.to_owned(),
            reachable: true,
            version: Some("3.6.16".to_owned()),
            linearizable,
            cluster_id: Some("c1".to_owned()),
            ..PeerObservation::default()
        }
    }

    fn down(name: &str) -> PeerObservation {
        PeerObservation {
            name: name.to_owned(),
            error: Some("connection refused".to_owned()),
            ..PeerObservation::default()
        }
    }

    fn refusing(name: &str) -> PeerObservation {
        PeerObservation {
            reachable: true,
            refuses: true,
            ..down(name)
        }
    }

    #[test]
    fn a_successful_read_proves_a_quorum_and_an_unusable_peer_leaves_it_open() {
        let state = |observations: &[PeerObservation]| {
            has_quorum(observations, observations.len() + 1).state
        };
        let (yes, no) = (Some(true), Some(false));
        assert_eq!(state(&[]), QuorumState::NoQuorum);
        assert_eq!(state(&[up("b", yes), up("c", yes)]), QuorumState::Quorum);
        assert_eq!(state(&[up("b", no), up("c", yes)]), QuorumState::Quorum);
        assert_eq!(state(&[refusing("b"), up("c", yes)]), QuorumState::Quorum);
        assert_eq!(state(&[up("b", no), down("c")]), QuorumState::NoQuorum);
        assert_eq!(state(&[down("b"), down("c")]), QuorumState::NoQuorum);
        assert_eq!(state(&[refusing("b"), down("c")]), QuorumState::Unknown);
        assert_eq!(state(&[refusing("b"), up("c", no)]), QuorumState::Unknown);
        assert_eq!(state(&[up("b", None), down("c")]), QuorumState::Unknown);
        let mut other = up("c", yes);
        other.cluster_id = Some("c2".to_owned());
        assert_eq!(state(&[up("b", yes), other]), QuorumState::Unknown);
    }

    #[test]
    fn the_reason_names_the_members() {
        let d = has_quorum(&[up("b", Some(false)), down("c")], 3);
        assert!(
            d.reason.contains("(b)") && d.reason.contains("of 3"),
            "{}",
            d.reason
        );
        let d = has_quorum(&[refusing("b"), down("c")], 3);
        assert!(d.reason.starts_with("b cannot"), "{}", d.reason);
    }
}
