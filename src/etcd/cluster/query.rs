//! Queries the endpoints and members of a cluster, and combines their responses into one observation.

use super::{Alarm, AlarmKind, Cluster, Member, MemberStatus, PAUSE};
use crate::base::causes;
use crate::base::opt::ENDPOINTS;
use crate::error::{Error, Reason, Result};
use crate::etcd::connect::{AttemptError, Connector, Streams};
use etcd_client::{Client, GetOptions};
use futures::future::join_all;
use std::collections::{BTreeMap, BTreeSet};

/// The responses of one endpoint.
pub(super) struct EndpointObservation {
    pub(super) endpoint: String,
    pub(super) member_id: u64,
    pub(super) cluster_id: u64,
    pub(super) status: MemberStatus,
    /// The members of the cluster; empty if the endpoint is a learner, which does not list them.
    pub(super) members: Vec<Member>,
    /// The revision of a linearizable read; `None` if the user has no permission to read.
    pub(super) read: Result<Option<i64>>,
}

impl Cluster {
    /// Observes all members: first at the given endpoints, then the others at the client URLs that they
    /// advertise.
    ///
    /// # Errors
    /// `NoQuorum` if members respond but none serves a linearizable read. If no endpoint responds, the most
    /// helpful reason of `CertificateExpired`, `Configuration`, `Unauthenticated`, `PermissionDenied` and
    /// `EtcdUnreachable`. `Configuration` if the endpoints belong to different clusters; `Terminated`.
    pub fn observe(connector: &Connector) -> Result<Cluster> {
        let endpoints = &connector.options().endpoints;
        let queries = join_all(endpoints.iter().map(|e| query_endpoint(connector, e)));
        let (mut observations, mut failures) = (Vec::new(), Vec::new());
        for (endpoint, result) in endpoints.iter().zip(wait(connector, queries)?) {
            match result {
                Ok(observation) => observations.push(observation),
                Err(e) => failures.push((endpoint, e)),
            }
        }
        // An endpoint with a quorum knows the current members.
        let has_quorum = observations.iter().find(|o| o.read.is_ok());
        let voter = observations.iter().find(|o| !o.members.is_empty());
        let Some(source) = has_quorum.or(voter) else {
            // The error has the failures of all endpoints.
            let failures: Vec<Error> = failures.into_iter().map(|(_, e)| e).collect();
            return Err(match observations.first() {
                Some(learner) if failures.is_empty() => Reason::Configuration.error(format!(
                    "{} is a learner, which neither lists members nor serves linearizable reads: give a voting member in {ENDPOINTS}",
                    learner.endpoint
                )),
                _ => most_helpful(failures),
            });
        };
        let is_learner = |url: &String| {
            (source.members.iter()).any(|m| m.is_learner && m.client_urls.contains(url))
        };
        for (endpoint, e) in failures.iter().filter(|(url, _)| !is_learner(url)) {
            let reason = e.reason().as_str();
            tracing::warn!(endpoint, reason, "an endpoint does not respond: {e}");
        }
        let mut members = source.members.clone();
        let missing: Vec<&Member> = members
            .iter()
            .filter(|m| observations.iter().all(|o| o.member_id != m.id))
            .collect();
        let searches = missing.iter().map(|m| find_member(connector, m));
        let results = wait(connector, join_all(searches))?;
        let mut errors: BTreeMap<u64, String> = BTreeMap::new();
        for (member, result) in missing.iter().zip(results) {
            match result {
                Ok(observation) => observations.push(observation),
                Err(e) => drop(errors.insert(member.id, e.to_string())),
            }
        }
        for member in &mut members {
            // Two endpoints may be spellings of the same member; the first one counts.
            match observations.iter().find(|o| o.member_id == member.id) {
                Some(observation) => member.set_observation(observation),
                None => member.error = errors.remove(&member.id),
            }
        }
        members.sort_by(|a, b| (&a.name, a.id).cmp(&(&b.name, b.id)));
        let cluster = assemble(members, &observations)?;
        for m in &cluster.members {
            tracing::debug!(
                member = %m,
                endpoint = m.endpoint,
                leader = m.is_leader,
                learner = m.is_learner,
                revision = m.status.as_ref().map(|s| s.revision),
                error = m.error,
                "observed a member"
            );
        }
        Ok(cluster)
    }
}

impl Member {
    fn listed(m: &etcd_client::Member) -> Self {
        Member {
            id: m.id(),
            name: m.name().to_owned(),
            client_urls: m.client_urls().to_vec(),
            is_learner: m.is_learner(),
            // A member publishes its name and URLs when it starts.
            started: !m.name().is_empty() || !m.client_urls().is_empty(),
            ..Member::default()
        }
    }

    fn set_observation(&mut self, observation: &EndpointObservation) {
        self.endpoint = Some(observation.endpoint.clone());
        self.status = Some(observation.status.clone());
        self.reads = observation.read.is_ok();
        // A learner cannot serve the read, so its error is meaningless.
        if !self.is_learner {
            self.error = observation.read.as_ref().err().map(Error::to_string);
        }
    }
}

/// Combines the observations of the members into a cluster.
pub(super) fn assemble(
    mut members: Vec<Member>,
    observations: &[EndpointObservation],
) -> Result<Cluster> {
    let ids: BTreeSet<u64> = observations.iter().map(|o| o.cluster_id).collect();
    if ids.len() > 1 {
        let clusters: Vec<String> = observations
            .iter()
            .map(|o| format!("{} of {:x}", o.endpoint, o.cluster_id))
            .collect();
        return Err(Reason::Configuration.error(format!(
            "{ENDPOINTS} are members of different clusters: {}",
            clusters.join(", ")
        )));
    }
    let mut newest_read: Option<i64> = None;
    for o in observations {
        if let Ok(read) = &o.read {
            newest_read = newest_read.max(Some(read.unwrap_or(o.status.revision)));
        }
    }
    let Some(revision) = newest_read else {
        return Err(no_quorum(&members, observations));
    };
    // If members name different leaders, the one with the highest term is right.
    let with_newest_term = observations
        .iter()
        .filter(|o| o.status.leader != 0)
        .max_by_key(|o| o.status.raft_term);
    let leader = with_newest_term.map_or(0, |o| o.status.leader);
    for m in &mut members {
        m.is_leader = m.id == leader;
    }
    let alarms: BTreeSet<Alarm> = observations
        .iter()
        .flat_map(|o| &o.status.errors)
        .filter_map(|e| parse_alarm(e))
        .collect();
    Ok(Cluster {
        cluster_id: ids.first().copied().unwrap_or(0),
        members,
        revision,
        alarms: alarms.into_iter().collect(),
    })
}

/// Returns the error for a cluster whose members respond but do not serve linearizable reads. It names the
/// members.
fn no_quorum(members: &[Member], observations: &[EndpointObservation]) -> Error {
    let is_voter = |o: &&EndpointObservation| {
        let mut learners = members.iter().filter(|m| m.is_learner);
        learners.all(|m| m.id != o.member_id)
    };
    let errors: Vec<&Error> = observations
        .iter()
        .filter(is_voter)
        .filter_map(|o| o.read.as_ref().err())
        .collect();
    // Wrong credentials say nothing about the quorum.
    let of_credentials = [Reason::Unauthenticated, Reason::CertificateExpired];
    if let Some(e) = errors.iter().find(|e| of_credentials.contains(&e.reason())) {
        return e.reason().error(e.to_string());
    }
    let names = |responding: bool| {
        let names: Vec<String> = members
            .iter()
            .filter(|m| observations.iter().any(|o| o.member_id == m.id) == responding)
            .map(|m| match &m.endpoint {
                Some(endpoint) => format!("{m} at {endpoint}"),
                None => m.to_string(),
            })
            .collect();
        names.join(", ")
    };
    let up = names(true);
    let down = match names(false).as_str() {
        "" => String::new(),
        names => format!(", not {names}"),
    };
    let cause = errors.first().map(|e| format!(": {e}")).unwrap_or_default();
    Reason::NoQuorum.error(format!(
        "the cluster has no quorum: of {} members {up} respond{}{down}, but linearizable reads fail{cause}",
        members.len(),
        match observations.len() {
            1 => "s",
            _ => "",
        }
    ))
}

/// Merges the failures of all endpoints into one error: those whose reason helps most.
pub(super) fn most_helpful(mut failures: Vec<Error>) -> Error {
    let rank = |e: &Error| match e.reason() {
        Reason::Terminated => 0,
        Reason::CertificateExpired => 1,
        Reason::Configuration => 2,
        Reason::Unauthenticated => 3,
        Reason::PermissionDenied => 4,
        _ => 5,
    };
    failures.sort_by_key(rank);
    let best = failures.first().map(|e| (e.reason(), rank(e)));
    let (reason, best_rank) = best.unwrap_or((Reason::EtcdUnreachable, 5));
    let messages: Vec<String> = failures
        .iter()
        .filter(|e| rank(e) == best_rank)
        .map(Error::to_string)
        .collect();
    reason.error(causes::join(&messages))
}

/// Parses an alarm among the errors of a status, such as `memberID:10276657743932975437 alarm:NOSPACE`.
pub(super) fn parse_alarm(error: &str) -> Option<Alarm> {
    // Go's protobuf library deliberately varies whether a space follows the colon.
    let after = |name: &str| {
        let at = error.find(name)? + name.len();
        let rest = error[at..].trim_start();
        rest.split_whitespace().next()
    };
    let kind = match after("alarm:")? {
        "NOSPACE" => AlarmKind::NoSpace,
        "CORRUPT" => AlarmKind::Corrupt,
        _ => AlarmKind::Other(error.trim().to_owned()),
    };
    let member = after("memberID:").and_then(|id| id.parse().ok());
    Some(Alarm {
        member: member.unwrap_or(0),
        kind,
    })
}

/// Waits for requests to several members.
pub(super) fn wait<F: Future>(connector: &Connector, f: F) -> Result<F::Output> {
    connector.wait(f).map_err(AttemptError::into_error)
}

/// Queries a member at its client URLs, until one of them leads to this member.
async fn find_member(connector: &Connector, member: &Member) -> Result<EndpointObservation> {
    let mut failures = Vec::new();
    for url in member
        .client_urls
        .iter()
        .filter(|url| connector.may_use(url))
    {
        match query_endpoint(connector, url).await {
            Ok(observation) if observation.member_id == member.id => return Ok(observation),
            Ok(other) => failures.push(Reason::EtcdUnreachable.error(format!(
                "another member ({:x}) responds at its client URL {url}",
                other.member_id
            ))),
            Err(e) => failures.push(e),
        }
    }
    match (failures.is_empty(), member.client_urls.is_empty()) {
        (false, _) => Err(most_helpful(failures)),
        (true, true) => {
            Err(Reason::EtcdUnreachable.error("it has no client URL: it was never started"))
        }
        (true, false) => Err(Reason::Configuration.error(format!(
            "its client URLs have no TLS ({}), but {ENDPOINTS} use TLS: add one of them to {ENDPOINTS}",
            member.client_urls.join(", ")
        ))),
    }
}

/// Requests the status, and from a voting member the list of members and a linearizable read: both at once,
/// because without a quorum the read gets no response. A learner refuses both.
async fn query_endpoint(connector: &Connector, endpoint: &str) -> Result<EndpointObservation> {
    let client = connector
        .connect(endpoint, Streams::Plain)
        .await
        .map_err(AttemptError::into_error)?;
    let timeout = connector.options().command_timeout;
    let (mut status_client, mut list_client) = (client.clone(), client.clone());
    let status = connector.answer("status", endpoint, timeout, status_client.status());
    let status = status.await.map_err(AttemptError::into_error)?;
    let (members, read) = if status.is_learner() {
        let e = Reason::Configuration.error(format!("{endpoint} is a learner"));
        (Vec::new(), Err(e))
    } else {
        let list = connector.answer("list members", endpoint, timeout, list_client.member_list());
        let read = async { Ok::<_, AttemptError>(read(connector, endpoint, client).await) };
        // If the list fails, the read is not waited for.
        let (list, read) = tokio::try_join!(list, read).map_err(AttemptError::into_error)?;
        let answered = [status.header(), list.header()].map(|h| h.map(|h| h.member_id()));
        if answered[0] != answered[1] {
            return Err(Reason::Configuration.error(format!(
                "{endpoint} is an `etcd grpc-proxy`, or a load balancer that spreads requests over members, so it is unknown which member answers: give the members' own client URLs in {ENDPOINTS}"
            )));
        }
        (list.members().iter().map(Member::listed).collect(), read)
    };
    let header = status.header();
    let size = |n: i64| u64::try_from(n).unwrap_or(0);
    Ok(EndpointObservation {
        endpoint: endpoint.to_owned(),
        member_id: header.map_or(0, |h| h.member_id()),
        cluster_id: header.map_or(0, |h| h.cluster_id()),
        status: MemberStatus {
            version: status.version().to_owned(),
            db_size: size(status.db_size()),
            db_size_in_use: size(status.raft_used_db_size()),
            db_size_quota: Some(size(status.db_size_quota())).filter(|&n| n > 0),
            raft_index: status.raft_index(),
            raft_applied_index: status.raft_applied_index(),
            raft_term: status.raft_term(),
            leader: status.leader(),
            errors: status.errors().to_vec(),
            revision: header.map_or(0, |h| h.revision()),
        },
        members,
        read,
    })
}

/// Makes a linearizable read, and repeats it until `--command-timeout`, because an election may be in
/// progress. Returns the revision, or `None` if the user has no permission to read.
async fn read(connector: &Connector, endpoint: &str, client: Client) -> Result<Option<i64>> {
    let mut kv = client.kv_client();
    let timeout = connector.options().command_timeout;
    let mut last_error = None;
    let until_read = async {
        loop {
            // The key need not exist, and the user need not have the permission to read it.
            let options = GetOptions::new().with_count_only();
            match kv.get(vec![0], Some(options)).await {
                Ok(response) => return Ok(response.header().map(|h| h.revision())),
                Err(e) => match connector.failure("read", endpoint, e) {
                    AttemptError::Final(e) if e.reason() == Reason::PermissionDenied => {
                        return Ok(None);
                    }
                    AttemptError::TryAgain(e) => last_error = Some(e),
                    other => return Err(other.into_error()),
                },
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    match tokio::time::timeout(timeout, until_read).await {
        Ok(done) => done,
        Err(_) => Err(last_error.unwrap_or_else(|| {
            Reason::NoQuorum.error(format!(
                "read at {endpoint}: no response within {} s",
                timeout.as_secs_f64()
            ))
        })),
    }
}
