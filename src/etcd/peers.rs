//! Whether a cluster has a quorum without one of its members, as its other members tell it.
//!
//! It asks at their peer URLs and changes nothing; what follows from the answer it does not decide.
//! `restore --if-needed` calls it.

use crate::base::Cancel;
use crate::base::causes::causes;
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
    #[arg(long = "peer-trusted-ca-file", value_name = "FILE")]
    pub trusted_ca_file: Option<PathBuf>,
    /// Client certificate that the other members accept (PEM)
    #[arg(long = "peer-cert-file", value_name = "FILE", requires = "key_file")]
    pub cert_file: Option<PathBuf>,
    /// Key of that certificate (PEM)
    #[arg(long = "peer-key-file", value_name = "FILE", requires = "cert_file")]
    pub key_file: Option<PathBuf>,
}

/// What one member was seen to be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// The member's name.
    pub name: String,
    /// Whether it answered anything at all.
    pub reachable: bool,
    /// The server's version.
    pub version: Option<String>,
    /// Whether it could read what a quorum agrees on; `None` where it could not be asked.
    pub linearizable: Option<bool>,
    /// The cluster's ID, hexadecimal, as that member knows it.
    pub cluster_id: Option<String>,
    /// It is there and does not talk to us: TLS, a foreign server.
    pub refuses: bool,
    /// What went wrong.
    pub error: Option<String>,
}

/// Whether there is a quorum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The others serve without this member.
    Quorum,
    /// They do not.
    NoQuorum,
    /// It could not be told.
    Unknown,
}

/// A verdict and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Whether there is a quorum.
    pub verdict: Verdict,
    /// In words, with the members' names.
    pub reason: String,
}

/// Tells from what the other members were seen to be whether they are a quorum. `members_total`
/// counts this member too.
pub fn has_quorum(seen: &[Seen], members_total: usize) -> Decision {
    let decision = |verdict, reason: String| Decision { verdict, reason };
    if seen.is_empty() {
        return decision(
            Verdict::NoQuorum,
            "the cluster has no other member".to_owned(),
        );
    }
    let names = |which: &dyn Fn(&Seen) -> bool| {
        let names: Vec<&str> = seen
            .iter()
            .filter(|s| which(s))
            .map(|s| s.name.as_str())
            .collect();
        names.join(", ")
    };
    let mut ids: Vec<&str> = seen
        .iter()
        .filter_map(|s| s.cluster_id.as_deref())
        .collect();
    ids.sort_unstable();
    ids.dedup();
    if ids.len() > 1 {
        return decision(
            Verdict::Unknown,
            format!(
                "the other members are of different clusters ({}): check the peer URLs",
                ids.join(", ")
            ),
        );
    }
    // One is enough: it could not have read without a quorum.
    let readers = names(&|s| s.linearizable == Some(true));
    if !readers.is_empty() {
        return decision(
            Verdict::Quorum,
            format!("{readers} read what a quorum agrees on, without this member"),
        );
    }
    let silent = |s: &Seen| s.refuses || (s.reachable && s.linearizable.is_none());
    if let Some(first) = seen.iter().find(|s| silent(s)) {
        let why = first.error.as_deref().unwrap_or("it did not say why");
        return decision(
            Verdict::Unknown,
            format!("{} cannot be asked: {why}", names(&silent)),
        );
    }
    let up = seen.iter().filter(|s| s.reachable).count();
    decision(
        Verdict::NoQuorum,
        match up {
            0 => format!("no other member of {members_total} answers"),
            _ => format!(
                "{} of {members_total} members answer ({}), and cannot read what a quorum agrees on",
                up,
                names(&|s| s.reachable)
            ),
        },
    )
}

/// To connect to a member.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// For an answer from memory.
const TIMEOUT: Duration = Duration::from_secs(5);
/// etcd gives a linearizable read up to 5 s and two election timeouts (1 s each by default), and
/// more where an operator set that longer.
const READ_TIMEOUT: Duration = Duration::from_secs(15);
/// A read that failed at once may have met an election.
const READS: u32 = 4;
const PAUSE: Duration = Duration::from_secs(1);

const CHECK_TLS: &str = "check https:// in the peer URLs, and give --peer-trusted-ca-file, --peer-cert-file and --peer-key-file as etcd has them";

/// Whether the other members of a cluster of `members_total` have a quorum without this one: why, or
/// `None` where they have not. Blocks; to be called inside of a runtime, though not on its threads.
///
/// # Errors
/// `Configuration` where that cannot be told, or a file of `options` cannot be used; `Usage`;
/// `Terminated`.
pub fn look(
    others: &[&Member],
    members_total: usize,
    options: &PeerOptions,
    cancel: &Cancel,
) -> Result<Option<String>> {
    let seen = ask(others, options, cancel)?;
    for s in &seen {
        tracing::info!(
            member = s.name,
            reachable = s.reachable,
            version = s.version,
            linearizable = s.linearizable,
            cluster_id = s.cluster_id,
            error = s.error,
            "looked at another member"
        );
    }
    let Decision { verdict, reason } = has_quorum(&seen, members_total);
    match verdict {
        Verdict::Quorum => Ok(Some(reason)),
        Verdict::NoQuorum => Ok(None),
        Verdict::Unknown => Err(Reason::Configuration.error(format!(
            "whether the other members have a quorum cannot be told: {reason}"
        ))),
    }
}

/// Asks the other members, all at once, at their peer URLs.
///
/// # Errors
/// `Configuration` where a file of `options` cannot be used; `Usage`; `Terminated`.
pub fn ask(others: &[&Member], options: &PeerOptions, cancel: &Cancel) -> Result<Vec<Seen>> {
    let client = client(options)?;
    let asked = others.iter().map(|p| look_at(&client, p));
    Handle::current().block_on(cancel.or(futures::future::join_all(asked)))
}

/// Asks at one URL after the other until one answers.
async fn look_at(client: &Client, peer: &Member) -> Seen {
    let mut seen = Seen {
        name: peer.name.clone(),
        ..Seen::default()
    };
    for url in &peer.peer_urls {
        let url = url.trim_end_matches('/');
        match version(client, url).await {
            Ok(version) => {
                seen.reachable = true;
                seen.refuses = false;
                seen.error = None;
                seen.version = Some(version);
                read(client, url, &mut seen).await;
                return seen;
            }
            Err((refuses, why)) => {
                seen.refuses |= refuses;
                seen.reachable |= refuses;
                seen.error = Some(format!("{url}: {why}"));
            }
        }
    }
    seen
}

/// The server's version; or whether somebody is there, and what went wrong.
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
        // Go's server says so to plain HTTP.
        _ if text.contains("HTTP request to an HTTPS server") => {
            Err((true, format!("it wants TLS: {CHECK_TLS}")))
        }
        _ => Err((
            true,
            format!("it is no etcd: it answers /version with status {status}"),
        )),
    }
}

/// etcd answers `/downgrade/enabled` only after a linearizable read (3.5 to 3.7).
async fn read(client: &Client, url: &str, seen: &mut Seen) {
    let url = format!("{url}/downgrade/enabled");
    for attempt in 1..=READS {
        match get(client, &url, READ_TIMEOUT).await {
            Ok((status @ (200 | 500), text, id)) => {
                let reads = status == 200;
                seen.cluster_id = id;
                seen.refuses = false;
                seen.linearizable = Some(reads);
                seen.error = (!reads).then(|| text.trim().to_owned());
                // It has waited long enough for a leader.
                if reads || text.contains("timed out") || text.contains("deadline") {
                    return;
                }
            }
            Ok((status, _, id)) => {
                seen.cluster_id = id;
                seen.error = Some(format!(
                    "it answers /downgrade/enabled with status {status}; etcd 3.5 or newer is needed"
                ));
                return;
            }
            // It answered before: perhaps it is just ending.
            Err((refuses, why)) => {
                seen.refuses = refuses;
                seen.linearizable = (!refuses).then_some(false);
                seen.error = Some(why);
            }
        }
        if attempt < READS {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// A request: status, text, and the cluster's ID; or whether somebody is there, and what went wrong.
async fn get(
    client: &Client,
    url: &str,
    timeout: Duration,
) -> Result<(u16, String, Option<String>), (bool, String)> {
    let answer = client.get(url).timeout(timeout).send().await;
    let answer = answer.map_err(|e| failure(&e))?;
    let status = answer.status().as_u16();
    let id = answer.headers().get("x-etcd-cluster-id");
    let id = id.and_then(|v| v.to_str().ok()).map(str::to_owned);
    let text = answer.text().await.map_err(|e| failure(&e))?;
    Ok((status, text, id))
}

/// Whether somebody is there, and what went wrong.
fn failure(e: &reqwest::Error) -> (bool, String) {
    let said = match e.source() {
        Some(cause) => causes(cause),
        None => e.to_string(),
    };
    // Nobody answers with these but one who is there.
    const TLS: [&str; 4] = ["certificate", "alert", "corrupt message", "handshake"];
    let away = e.is_connect() || e.is_timeout();
    // Or it took the connection and hung up: so does one that wants TLS.
    match TLS.iter().any(|sign| said.contains(sign)) || !away {
        true => (true, format!("{said}: {CHECK_TLS}")),
        false => (false, said),
    }
}

fn client(options: &PeerOptions) -> Result<Client> {
    let wrong = |flag: &str, path: &Path, e: &dyn std::fmt::Display| {
        Reason::Configuration.error(format!("{flag} {} cannot be used: {e}", path.display()))
    };
    let read = |flag: &str, path: &Path| std::fs::read(path).map_err(|e| wrong(flag, path, &e));
    crate::base::tls::ensure_provider();
    // Members are asked where they are, not through a proxy, and do not send elsewhere.
    let mut builder = Client::builder()
        .no_proxy()
        // etcd's peer listeners offer HTTP/2 and do not speak it.
        .http1_only()
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(CONNECT_TIMEOUT);
    if let Some(path) = &options.trusted_ca_file {
        let flag = "--peer-trusted-ca-file";
        let certs =
            Certificate::from_pem_bundle(&read(flag, path)?).map_err(|e| wrong(flag, path, &e))?;
        if certs.is_empty() {
            return Err(wrong(flag, path, &"it holds no certificate"));
        }
        builder = builder.tls_certs_only(certs);
    }
    match (&options.cert_file, &options.key_file) {
        (Some(cert), Some(key)) => {
            let mut pem = read("--peer-cert-file", cert)?;
            pem.push(b'\n');
            pem.extend(read("--peer-key-file", key)?);
            let identity =
                Identity::from_pem(&pem).map_err(|e| wrong("--peer-cert-file", cert, &e))?;
            builder = builder.identity(identity);
        }
        (None, None) => {}
        _ => {
            return Err(Reason::Usage
                .error("--peer-cert-file and --peer-key-file belong together: give both"));
        }
    }
    builder.build().map_err(|e| {
        let (_, said) = failure(&e);
        Reason::Configuration.error(format!(
            "the way to the other members cannot be set up: {said}"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn up(name: &str, linearizable: Option<bool>) -> Seen {
        Seen {
            name: name.to_owned(),
            reachable: true,
            version: Some("3.6.16".to_owned()),
            linearizable,
            cluster_id: Some("c1".to_owned()),
            ..Seen::default()
        }
    }

    fn down(name: &str) -> Seen {
        Seen {
            name: name.to_owned(),
            error: Some("connection refused".to_owned()),
            ..Seen::default()
        }
    }

    fn refusing(name: &str) -> Seen {
        Seen {
            reachable: true,
            refuses: true,
            ..down(name)
        }
    }

    #[test]
    fn one_that_reads_proves_a_quorum_and_a_silent_one_leaves_it_open() {
        let verdict = |seen: &[Seen]| has_quorum(seen, seen.len() + 1).verdict;
        let (yes, no) = (Some(true), Some(false));
        assert_eq!(verdict(&[]), Verdict::NoQuorum);
        assert_eq!(verdict(&[up("b", yes), up("c", yes)]), Verdict::Quorum);
        assert_eq!(verdict(&[up("b", no), up("c", yes)]), Verdict::Quorum);
        assert_eq!(verdict(&[refusing("b"), up("c", yes)]), Verdict::Quorum);
        assert_eq!(verdict(&[up("b", no), down("c")]), Verdict::NoQuorum);
        assert_eq!(verdict(&[down("b"), down("c")]), Verdict::NoQuorum);
        assert_eq!(verdict(&[refusing("b"), down("c")]), Verdict::Unknown);
        assert_eq!(verdict(&[refusing("b"), up("c", no)]), Verdict::Unknown);
        assert_eq!(verdict(&[up("b", None), down("c")]), Verdict::Unknown);
        let mut other = up("c", yes);
        other.cluster_id = Some("c2".to_owned());
        assert_eq!(verdict(&[up("b", yes), other]), Verdict::Unknown);
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
