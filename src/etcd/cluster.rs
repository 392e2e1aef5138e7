//! A live etcd as a cluster: its members, how they are, their hashes, and what keeps them lean.
//!
//! It asks all members at once and compares what they say; what is done about it it does not decide.
//! `ops::snapshot`, `ops::maintain` and `ops::verify` call it.

use crate::base::printable;
use crate::error::{Error, Reason, Result};
use crate::etcd::connect::{Connector, Failed, Streams};
use etcd_client::{
    AlarmAction, AlarmOptions, AlarmType, Client, CompactionOptions, Error as EtcdError, GetOptions,
};
use futures::future::join_all;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

/// For HashKV, which reads a whole keyspace. A connection that is lost ends it earlier: keep-alives tell.
const HASH_PATIENCE: Duration = Duration::from_secs(15 * 60);
/// For a physical compaction, which pauses after every thousand revisions, and for a defragmentation,
/// which writes a whole database: around 10 s for each GiB.
const UPKEEP_PATIENCE: Duration = Duration::from_secs(60 * 60);
/// Between attempts at what an election, or a member slightly behind, refuses.
const PAUSE: Duration = Duration::from_millis(200);
/// Entries of the log that a member may be behind and still count as up to date: some are always on
/// their way.
const CLOSE_ENTRIES: u64 = 1000;

/// What a member says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Status {
    /// The server's version.
    pub version: String,
    /// Bytes of its database file.
    pub db_size: u64,
    /// Bytes of it that hold data.
    pub db_size_in_use: u64,
    /// The most bytes that its database may have; servers before 3.6 do not say.
    pub db_size_quota: Option<u64>,
    /// The newest entry of its log.
    pub raft_index: u64,
    /// The newest entry that its keys have.
    pub raft_applied_index: u64,
    /// The term of the leader that it follows.
    pub raft_term: u64,
    /// The leader's ID; 0 where it knows of none.
    pub leader: u64,
    /// What is wrong with it: alarms of any member, or that it has no leader.
    pub errors: Vec<String>,
    /// Its newest revision.
    pub revision: i64,
}

/// A member of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Member {
    /// Its ID.
    pub id: u64,
    /// Its name; empty where it was never started.
    pub name: String,
    /// An endpoint at which it answers.
    pub endpoint: Option<String>,
    /// Where it says it is to be found.
    pub client_urls: Vec<String>,
    /// It has no vote yet.
    pub is_learner: bool,
    /// The others follow it.
    pub is_leader: bool,
    /// It was started once, since it was added.
    pub started: bool,
    /// What it says of itself; `None` where it does not answer.
    pub status: Option<Status>,
    /// Whether it could read what the quorum agrees on; a learner is not asked.
    pub reads: bool,
    /// Why it does not answer, or cannot read.
    pub error: Option<String>,
}

impl Member {
    /// Its ID as etcdctl shows it.
    pub fn hex_id(&self) -> String {
        format!("{:x}", self.id)
    }
}

/// For messages: the name, or the ID of one that has none yet.
impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name.as_str() {
            "" => write!(f, "member {:x}", self.id),
            name => f.write_str(&printable::line(name)),
        }
    }
}

/// What an alarm is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum AlarmKind {
    /// The quota is used up: nothing is written until it is disarmed.
    NoSpace,
    /// A member's data is not that of the others.
    Corrupt,
    /// Another, in the server's words.
    Other(String),
}

/// An alarm that was raised.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Alarm {
    /// The member that it is about; 0 where it does not say.
    pub member: u64,
    /// What it is about.
    pub kind: AlarmKind,
}

/// A cluster as it was a moment ago.
#[derive(Debug, Clone, Default)]
pub struct Cluster {
    /// Its ID.
    pub cluster_id: u64,
    /// Its members, by name.
    pub members: Vec<Member>,
    /// The newest revision that its quorum agrees on.
    pub revision: i64,
    /// What is raised.
    pub alarms: Vec<Alarm>,
}

/// A member's HashKV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hash {
    /// The hash.
    pub hash: u32,
    /// What it compacted at when it was made; -1 where nothing was. Only hashes with the same one
    /// can be compared.
    pub compact_revision: i64,
}

/// HashKV of one member at one revision, or why there is none.
#[derive(Debug, Clone)]
pub struct MemberHash {
    /// The member's ID.
    pub member: u64,
    /// Its name.
    pub name: String,
    /// Where it was asked.
    pub endpoint: Option<String>,
    /// The revision.
    pub revision: i64,
    /// What it said.
    pub hash: Option<Hash>,
    /// Why it said nothing: the reason, `Conflict` where the revision is compacted away.
    pub error: Option<(Reason, String)>,
}

/// Which members hold the same. Learners take no part.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Agreement {
    /// IDs of the members that hold what most hold; empty where two differ and neither has a majority
    /// on its side.
    pub agree: Vec<u64>,
    /// IDs of those that hold something else.
    pub differ: Vec<u64>,
    /// IDs of those that did not answer, or answered what cannot be compared.
    pub unknown: Vec<u64>,
}

/// Tells from all members' hashes at one revision which hold the same. It takes a majority of all to be
/// right against others.
pub fn compare(hashes: &[MemberHash]) -> Agreement {
    let mut groups: BTreeMap<(i64, u32), Vec<u64>> = BTreeMap::new();
    let mut agreement = Agreement::default();
    for h in hashes {
        match h.hash {
            Some(hash) => groups
                .entry((hash.compact_revision, hash.hash))
                .or_default()
                .push(h.member),
            None => agreement.unknown.push(h.member),
        }
    }
    let contested = |compact: i64| groups.keys().filter(|(c, _)| *c == compact).count() > 1;
    let is_right = |(key, members): &(&(i64, u32), &Vec<u64>)| {
        !contested(key.0) || members.len() * 2 > hashes.len()
    };
    let best = groups
        .iter()
        .filter(is_right)
        .max_by_key(|((compact, _), members)| (members.len(), *compact))
        .map(|(key, _)| *key);
    for (key, members) in &groups {
        let place = match best {
            Some(best) if best == *key => &mut agreement.agree,
            _ if contested(key.0) => &mut agreement.differ,
            _ => &mut agreement.unknown,
        };
        place.extend(members);
    }
    agreement
}

/// What became of a compaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compacted {
    /// History up to the revision is gone, also from the database of the member that was asked.
    Done,
    /// It was gone already.
    Already,
}

/// What one endpoint answered.
struct Seen {
    endpoint: String,
    member_id: u64,
    cluster_id: u64,
    status: Status,
    members: Vec<Member>,
    /// The revision that a quorum agrees on; `None` where the user may not read any.
    read: Result<Option<i64>>,
}

impl Cluster {
    /// Looks at all members: at the endpoints given, and at what the members themselves say where they
    /// are.
    ///
    /// # Errors
    /// `NoQuorum` where members answer and none can read what a quorum agrees on; where none answers, the
    /// most telling of `CertificateExpired`, `Configuration`, `Unauthenticated`, `PermissionDenied` and
    /// `EtcdUnreachable`; `Configuration` where the endpoints are of different clusters; `Terminated`.
    pub fn look(way: &Connector) -> Result<Cluster> {
        let given = way.options().endpoints.iter();
        let first = join_all(given.map(|e| look_at(way, e)));
        let (mut seen, mut failed) = (Vec::new(), Vec::new());
        for (endpoint, answer) in way.options().endpoints.iter().zip(wait(way, first)?) {
            match answer {
                Ok(s) => seen.push(s),
                Err(e) => {
                    let reason = e.reason().as_str();
                    tracing::warn!(endpoint, reason, "an endpoint does not answer: {e}");
                    failed.push(e);
                }
            }
        }
        // One that reads what the quorum agrees on knows all members there are.
        let Some(known) = seen.iter().find(|s| s.read.is_ok()).or(seen.first()) else {
            return Err(most_telling(failed));
        };
        let mut members = known.members.clone();
        let allowed = |url: &&String| way.may_ask(url);
        let missing: Vec<&Member> = members
            .iter()
            .filter(|m| seen.iter().all(|s| s.member_id != m.id))
            .collect();
        let found = join_all(missing.into_iter().map(|m| async move {
            let urls: Vec<&String> = m.client_urls.iter().filter(allowed).collect();
            (m.id, look_for(way, m, &urls).await)
        }));
        let mut errors: BTreeMap<u64, String> = BTreeMap::new();
        for (id, found) in wait(way, found)? {
            match found {
                Ok(s) => seen.push(s),
                Err(e) => drop(errors.insert(id, e.to_string())),
            }
        }
        for member in &mut members {
            // The same endpoint in two spellings is one member.
            match seen.iter().find(|s| s.member_id == member.id) {
                Some(s) => member.take(s),
                None => member.error = errors.remove(&member.id),
            }
        }
        members.sort_by(|a, b| (&a.name, a.id).cmp(&(&b.name, b.id)));
        let cluster = assemble(members, &seen)?;
        for m in &cluster.members {
            tracing::debug!(
                member = %m,
                endpoint = m.endpoint,
                leader = m.is_leader,
                learner = m.is_learner,
                revision = m.status.as_ref().map(|s| s.revision),
                error = m.error,
                "looked at a member"
            );
        }
        Ok(cluster)
    }

    /// Its ID as etcdctl shows it.
    pub fn hex_id(&self) -> String {
        format!("{:x}", self.cluster_id)
    }

    /// The member of that ID.
    pub fn member(&self, id: u64) -> Option<&Member> {
        self.members.iter().find(|m| m.id == id)
    }

    /// Why a member is not healthy; `None` where it is. An alarm for want of space is no illness, and an
    /// alarm about another member is that member's.
    pub fn illness(&self, member: &Member) -> Option<String> {
        if !member.started {
            return Some("it was never started".to_owned());
        }
        let Some(status) = &member.status else {
            return Some(member.why("it does not answer"));
        };
        let sick = |alarm: &&Alarm| {
            alarm.kind != AlarmKind::NoSpace && (alarm.member == member.id || alarm.member == 0)
        };
        if let Some(alarm) = self.alarms.iter().find(sick) {
            return Some(match &alarm.kind {
                AlarmKind::Other(said) => format!("an alarm is raised: {said}"),
                _ => "the alarm CORRUPT is raised".to_owned(),
            });
        }
        if let Some(said) = status.errors.iter().find(|e| alarm(e).is_none()) {
            return Some(said.clone());
        }
        if status.leader == 0 {
            return Some("it has no leader".to_owned());
        }
        let cut_off = "it cannot read what the quorum agrees on: it is cut off, or far behind";
        (!member.reads && !member.is_learner).then(|| member.why(cut_off))
    }

    /// Entries of the log that a member is behind the farthest one.
    pub fn behind(&self, member: &Member) -> u64 {
        let applied = |m: &Member| m.status.as_ref().map_or(0, |s| s.raft_applied_index);
        let farthest = self.members.iter().map(applied).max().unwrap_or(0);
        farthest.saturating_sub(applied(member))
    }

    /// Whether a member is as far as the others, but for what is on its way.
    pub fn is_close(&self, member: &Member) -> bool {
        self.behind(member) <= CLOSE_ENTRIES
    }

    /// The members to take data from, the best one first: healthy ones with a vote, close to the newest
    /// entry before those that lag, followers before the leader. `excluded` are IDs.
    pub fn choose(&self, excluded: &[u64]) -> Vec<&Member> {
        let mut chosen = Vec::new();
        for member in &self.members {
            let refused = match excluded.contains(&member.id) {
                true => Some("it is excluded".to_owned()),
                false if member.is_learner => Some("it is a learner".to_owned()),
                false => self.illness(member),
            };
            match refused {
                None => chosen.push(member),
                Some(why) => tracing::info!(member = %member, why, "a member is not taken from"),
            }
        }
        chosen.sort_by_key(|m| (!self.is_close(m), m.is_leader));
        for (at, m) in chosen.iter().enumerate() {
            tracing::debug!(
                member = %m,
                place = at + 1,
                leader = m.is_leader,
                entries_behind = self.behind(m),
                "a member may be taken from"
            );
        }
        chosen
    }

    /// HashKV of all members with a vote at one revision, asked at once.
    ///
    /// # Errors
    /// `Terminated`. What a member fails with stands at that member.
    pub fn hash_kv_all(&self, way: &Connector, revision: i64) -> Result<Vec<MemberHash>> {
        let voters: Vec<&Member> = self.members.iter().filter(|m| !m.is_learner).collect();
        let asked = voters.iter().map(|m| hash_kv(way, m, revision));
        let mut hashes = wait(way, join_all(asked))?;
        let newest = hashes.iter().filter_map(|h| Some(h.hash?.compact_revision));
        let Some(newest) = newest.max() else {
            return Ok(hashes);
        };
        // A compaction came in between; or it is at this very revision, where a member that compacted
        // answers from memory what was before, and one that was started since does not.
        for again in [revision, 0] {
            for (member, hash) in voters.iter().zip(&mut hashes) {
                if hash.hash.is_some_and(|h| h.compact_revision < newest) {
                    let second = wait(way, hash_kv(way, member, again))?;
                    if second.revision == revision && second.hash.is_some() {
                        *hash = second;
                    }
                }
            }
        }
        Ok(hashes)
    }

    /// The revision that the cluster compacted at; `None` where it never did, or at the very first one.
    /// The states that can still be read tell: nobody says it outright but a whole HashKV.
    ///
    /// # Errors
    /// `PermissionDenied`, `Unauthenticated`, `EtcdUnreachable`, `Terminated`.
    pub fn compacted_revision(&self, way: &Connector) -> Result<Option<i64>> {
        let chosen = self.choose(&[]);
        let member = chosen.first().ok_or_else(|| self.nobody())?;
        let endpoint = member.endpoint.as_deref().ok_or_else(|| self.nobody())?;
        let client = way
            .dial(endpoint, Streams::Plain)
            .map_err(Failed::into_error)?;
        // States below `gone` cannot be read, those from `there` on can.
        let (mut gone, mut there) = (0, self.revision);
        while gone + 1 < there {
            let middle = gone + (there - gone) / 2;
            let options = GetOptions::new()
                .with_count_only()
                .with_serializable()
                .with_revision(middle);
            let mut kv = client.kv_client();
            match way.ask("read", endpoint, kv.get(vec![0], Some(options))) {
                Ok(_) => there = middle,
                Err(Failed::Final(e)) if e.reason() == Reason::Conflict => gone = middle,
                Err(other) => return Err(other.into_error()),
            }
        }
        Ok((there > 1).then_some(there))
    }

    /// Compacts history up to a revision, and waits until it is gone from the database of the member that
    /// is asked.
    ///
    /// # Errors
    /// `Configuration` for a revision that is not there yet; `PermissionDenied`; what the last member
    /// that is asked fails with; `Terminated`.
    pub fn compact(&self, way: &Connector, revision: i64) -> Result<Compacted> {
        let asked = Cell::new(false);
        self.first_that_does(way, async |endpoint| {
            let was_asked = asked.replace(true);
            match compact_at(way, endpoint, revision).await {
                // The answer of the one before may have been lost.
                Err(Failed::Final(e)) if e.reason() == Reason::Conflict && !was_asked => {
                    Ok(Compacted::Already)
                }
                Err(Failed::Final(e)) if e.reason() == Reason::Conflict => Ok(Compacted::Done),
                done => done.map(|()| Compacted::Done),
            }
        })
    }

    /// Asks healthy members in turn, the best one first, until one does it.
    fn first_that_does<T>(
        &self,
        way: &Connector,
        ask: impl AsyncFn(&str) -> Result<T, Failed>,
    ) -> Result<T> {
        let mut last = None;
        for member in self.choose(&[]) {
            let Some(endpoint) = member.endpoint.as_deref() else {
                continue;
            };
            match way.wait(ask(endpoint)).and_then(|answer| answer) {
                Ok(done) => return Ok(done),
                Err(Failed::TryAgain(e)) => last = Some(e),
                Err(other) => return Err(other.into_error()),
            }
        }
        Err(last.unwrap_or_else(|| self.nobody()))
    }

    /// Waits until every member that answers has removed what a compaction at `revision` frees. Each does so
    /// by itself, later than the one that was asked; but a request for the same compaction, refused as done
    /// already, is answered behind that work (etcd's `compactBarrier`).
    ///
    /// # Errors
    /// `Terminated`. A member that does not answer is not waited for: its sizes are then told as they are.
    pub fn await_compaction(&self, way: &Connector, revision: i64) -> Result<()> {
        for endpoint in self.members.iter().filter_map(|m| m.endpoint.as_deref()) {
            let asked = way.wait(compact_at(way, endpoint, revision));
            match asked.map_err(Failed::into_error)? {
                Ok(()) => {}
                Err(Failed::Final(e)) if e.reason() == Reason::Conflict => {}
                Err(other) => {
                    let why = other.into_error();
                    tracing::debug!(endpoint, %why, "a compaction's end is not waited for");
                }
            }
        }
        Ok(())
    }

    /// Defragments one member, which serves nobody meanwhile.
    ///
    /// # Errors
    /// `EtcdUnreachable`, `PermissionDenied`, `Unauthenticated`, `Terminated`; after the last one the
    /// member goes on.
    pub fn defragment(&self, way: &Connector, member: &Member) -> Result<()> {
        let endpoint = member.endpoint.as_deref().ok_or_else(|| self.nobody())?;
        let asked = async {
            let mut client = way.connect(endpoint, Streams::Plain).await?;
            let answer = client.defragment();
            way.answer("defragment", endpoint, UPKEEP_PATIENCE, answer)
                .await
        };
        way.wait(asked)
            .and_then(|answer| answer)
            .map(drop)
            .map_err(Failed::into_error)
    }

    /// Disarms the alarms for want of space. Gives the IDs of the members that they were about.
    ///
    /// # Errors
    /// `NoQuorum`, `PermissionDenied`; what the last member that is asked fails with; `Terminated`.
    pub fn disarm_no_space(&self, way: &Connector) -> Result<Vec<u64>> {
        self.first_that_does(way, async |endpoint| disarm(way, endpoint).await)
    }

    fn nobody(&self) -> Error {
        let ill: Vec<String> = self
            .members
            .iter()
            .filter_map(|m| Some(format!("{m}: {}", self.illness(m)?)))
            .collect();
        Reason::EtcdUnreachable.error(format!("no member is healthy: {}", ill.join("; ")))
    }
}

impl Member {
    /// Why it does not answer or read, if that is known.
    fn why(&self, otherwise: &str) -> String {
        self.error.clone().unwrap_or_else(|| otherwise.to_owned())
    }

    /// Takes over what was seen of it.
    fn take(&mut self, seen: &Seen) {
        self.endpoint = Some(seen.endpoint.clone());
        self.status = Some(seen.status.clone());
        self.reads = seen.read.is_ok();
        // A learner is asked no more than how it is.
        if !self.is_learner {
            self.error = seen.read.as_ref().err().map(Error::to_string);
        }
    }
}

/// Makes a cluster of what its members were seen to be.
fn assemble(mut members: Vec<Member>, seen: &[Seen]) -> Result<Cluster> {
    let ids: BTreeSet<u64> = seen.iter().map(|s| s.cluster_id).collect();
    if ids.len() > 1 {
        let at: Vec<String> = seen
            .iter()
            .map(|s| format!("{} of {:x}", s.endpoint, s.cluster_id))
            .collect();
        return Err(Reason::Configuration.error(format!(
            "--endpoints are members of different clusters: {}",
            at.join(", ")
        )));
    }
    let reads: Vec<i64> = seen
        .iter()
        .filter_map(|s| {
            let read = s.read.as_ref().ok()?;
            Some(read.unwrap_or(s.status.revision))
        })
        .collect();
    let Some(revision) = reads.into_iter().max() else {
        return Err(no_quorum(&members, seen));
    };
    // Of two who name different leaders the one with the higher term knows.
    let newest = seen
        .iter()
        .filter(|s| s.status.leader != 0)
        .max_by_key(|s| s.status.raft_term);
    let leader = newest.map_or(0, |s| s.status.leader);
    for m in &mut members {
        m.is_leader = m.id == leader;
    }
    let alarms: BTreeSet<Alarm> = seen
        .iter()
        .flat_map(|s| &s.status.errors)
        .filter_map(|e| alarm(e))
        .collect();
    Ok(Cluster {
        cluster_id: ids.first().copied().unwrap_or(0),
        members,
        revision,
        alarms: alarms.into_iter().collect(),
    })
}

/// Members answer, and none can read what a quorum agrees on: why, and who answers.
fn no_quorum(members: &[Member], seen: &[Seen]) -> Error {
    let said: Vec<&Error> = seen.iter().filter_map(|s| s.read.as_ref().err()).collect();
    // A password that is wrong is no lack of a quorum.
    let telling = [Reason::Unauthenticated, Reason::CertificateExpired];
    if let Some(e) = said.iter().find(|e| telling.contains(&e.reason())) {
        return e.reason().error(e.to_string());
    }
    let names = |answers: bool| {
        let names: Vec<String> = members
            .iter()
            .filter(|m| seen.iter().any(|s| s.member_id == m.id) == answers)
            .map(|m| match &m.endpoint {
                Some(at) => format!("{m} at {at}"),
                None => m.to_string(),
            })
            .collect();
        names.join(", ")
    };
    let (up, down) = (names(true), names(false));
    let down = match down.as_str() {
        "" => String::new(),
        down => format!(", not {down}"),
    };
    let why = said.first().map(|e| format!(": {e}")).unwrap_or_default();
    Reason::NoQuorum.error(format!(
        "the cluster has no quorum: of {} members {up} answer{}{down}, and cannot read what a quorum agrees on{why}",
        members.len(),
        match seen.len() {
            1 => "s",
            _ => "",
        }
    ))
}

/// The failure that tells most where no endpoint answers.
fn most_telling(mut failed: Vec<Error>) -> Error {
    let rank = |e: &Error| match e.reason() {
        Reason::Terminated => 0,
        Reason::CertificateExpired => 1,
        Reason::Configuration => 2,
        Reason::Unauthenticated => 3,
        Reason::PermissionDenied => 4,
        _ => 5,
    };
    failed.sort_by_key(rank);
    let best = failed.first().map(|e| (e.reason(), rank(e)));
    let (reason, best) = best.unwrap_or((Reason::EtcdUnreachable, 5));
    let said: Vec<String> = failed
        .iter()
        .filter(|e| rank(e) == best)
        .map(Error::to_string)
        .collect();
    reason.error(said.join("; "))
}

/// The alarm that a line of a status tells of: `memberID:10276657743932975437 alarm:NOSPACE`.
fn alarm(said: &str) -> Option<Alarm> {
    // etcd's libraries put a space behind a colon, or none, so that nobody relies on it.
    let after = |name: &str| {
        let at = said.find(name)? + name.len();
        let rest = said[at..].trim_start();
        rest.split_whitespace().next()
    };
    let kind = match after("alarm:")? {
        "NOSPACE" => AlarmKind::NoSpace,
        "CORRUPT" => AlarmKind::Corrupt,
        _ => AlarmKind::Other(said.trim().to_owned()),
    };
    let member = after("memberID:").and_then(|id| id.parse().ok());
    Some(Alarm {
        member: member.unwrap_or(0),
        kind,
    })
}

/// Waits for answers of several members.
fn wait<F: Future>(way: &Connector, f: F) -> Result<F::Output> {
    way.wait(f).map_err(Failed::into_error)
}

/// Asks at a member's own URLs until it answers itself.
async fn look_for(way: &Connector, member: &Member, urls: &[&String]) -> Result<Seen> {
    let mut failed = Vec::new();
    for url in urls {
        match look_at(way, url).await {
            Ok(seen) if seen.member_id == member.id => return Ok(seen),
            Ok(seen) => failed.push(Reason::EtcdUnreachable.error(format!(
                "at its client URL {url} answers member {:x}",
                seen.member_id
            ))),
            Err(e) => failed.push(e),
        }
    }
    match (failed.is_empty(), member.client_urls.is_empty()) {
        (false, _) => Err(most_telling(failed)),
        (true, true) => {
            Err(Reason::EtcdUnreachable.error("it has no client URL: it was never started"))
        }
        (true, false) => Err(Reason::Configuration.error(format!(
            "its client URLs are without TLS ({}), and --endpoints are not: name it there",
            member.client_urls.join(", ")
        ))),
    }
}

/// Asks one endpoint how it is, whom it knows, and what a quorum agrees on: at once, because without a
/// quorum the last gets no answer.
async fn look_at(way: &Connector, endpoint: &str) -> Result<Seen> {
    let client = way
        .connect(endpoint, Streams::Plain)
        .await
        .map_err(Failed::into_error)?;
    let patience = way.options().command_timeout;
    let (mut a, mut b) = (client.clone(), client.clone());
    let status = async { a.status().await };
    let list = async { b.member_list().await };
    let read = async { Ok::<_, Failed>(read(way, endpoint, client).await) };
    // Who is not there at all is not waited for until an election might be over.
    let (status, list, read) = tokio::try_join!(
        way.answer("status", endpoint, patience, status),
        way.answer("list members", endpoint, patience, list),
        read,
    )
    .map_err(Failed::into_error)?;
    let header = status.header();
    let size = |n: i64| u64::try_from(n).unwrap_or(0);
    Ok(Seen {
        endpoint: endpoint.to_owned(),
        member_id: header.map_or(0, |h| h.member_id()),
        cluster_id: header.map_or(0, |h| h.cluster_id()),
        status: Status {
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
        members: list
            .members()
            .iter()
            .map(|m| Member {
                id: m.id(),
                name: m.name().to_owned(),
                client_urls: m.client_urls().to_vec(),
                is_learner: m.is_learner(),
                // Only a server that was started tells where it is to be found.
                started: !m.name().is_empty() || !m.client_urls().is_empty(),
                ..Member::default()
            })
            .collect(),
        read,
    })
}

/// Reads what a quorum agrees on. An election is waited for, as long as a command may take.
async fn read(way: &Connector, endpoint: &str, client: Client) -> Result<Option<i64>> {
    let mut kv = client.kv_client();
    let patience = way.options().command_timeout;
    let mut said = None;
    let until_read = async {
        loop {
            // The key need not be there, and the user need not be allowed to read it.
            let options = GetOptions::new().with_count_only();
            match kv.get(vec![0], Some(options)).await {
                Ok(got) => return Ok(got.header().map(|h| h.revision())),
                Err(e) => match way.failure("read", endpoint, e) {
                    Failed::Final(e) if e.reason() == Reason::PermissionDenied => return Ok(None),
                    Failed::TryAgain(e) => said = Some(e),
                    other => return Err(other.into_error()),
                },
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    match tokio::time::timeout(patience, until_read).await {
        Ok(done) => done,
        Err(_) => Err(said.unwrap_or_else(|| {
            Reason::NoQuorum.error(format!(
                "read at {endpoint}: no answer within {} s",
                patience.as_secs_f64()
            ))
        })),
    }
}

/// HashKV of one member; at revision 0 that of its newest one.
async fn hash_kv(way: &Connector, member: &Member, revision: i64) -> MemberHash {
    let asked = match &member.endpoint {
        Some(endpoint) => hash_kv_at(way, endpoint, revision).await,
        None => Err(Reason::EtcdUnreachable.error(member.why("it does not answer"))),
    };
    let (hash, revision, error) = match asked {
        Ok((hash, revision)) => (Some(hash), revision, None),
        Err(e) => (None, revision, Some((e.reason(), e.to_string()))),
    };
    MemberHash {
        member: member.id,
        name: member.name.clone(),
        endpoint: member.endpoint.clone(),
        revision,
        hash,
        error,
    }
}

/// HashKV at an endpoint, and the revision it is of. What the member does not have yet is waited for.
async fn hash_kv_at(way: &Connector, endpoint: &str, revision: i64) -> Result<(Hash, i64)> {
    let client = way.connect(endpoint, Streams::Plain).await;
    let mut client = client.map_err(Failed::into_error)?;
    let until = tokio::time::Instant::now() + way.options().command_timeout;
    loop {
        let asked = async {
            let answer = client.hash_kv(revision).await;
            // Whether it is a matter of waiting is told by these words alone.
            let early = matches!(&answer, Err(EtcdError::GRpcStatus(s)) if s.message().contains("future revision"));
            Ok((answer, early))
        };
        let (answer, early) = way
            .answer("HashKV", endpoint, HASH_PATIENCE, asked)
            .await
            .map_err(Failed::into_error)?;
        match answer {
            Ok(got) => {
                let now = got.header().map_or(0, |h| h.revision());
                let hash = Hash {
                    hash: got.hash(),
                    compact_revision: got.compact_version(),
                };
                return Ok((hash, if revision == 0 { now } else { revision }));
            }
            Err(_) if early && tokio::time::Instant::now() < until => {
                tokio::time::sleep(PAUSE).await;
            }
            Err(e) => return Err(way.failure("HashKV", endpoint, e).into_error()),
        }
    }
}

/// Compacts at one member, and waits for the work.
async fn compact_at(way: &Connector, endpoint: &str, revision: i64) -> Result<(), Failed> {
    let mut client = way.connect(endpoint, Streams::Plain).await?;
    let options = Some(CompactionOptions::new().with_physical());
    let answer = client.compact(revision, options);
    let answer = way.answer("compact", endpoint, UPKEEP_PATIENCE, answer);
    answer.await.map(drop)
}

/// Disarms, through one member, what all have raised for want of space.
async fn disarm(way: &Connector, endpoint: &str) -> Result<Vec<u64>, Failed> {
    let mut client = way.connect(endpoint, Streams::Plain).await?;
    let patience = way.options().command_timeout;
    let list = client.alarm(AlarmAction::Get, AlarmType::None, None);
    let raised = way.answer("list alarms", endpoint, patience, list).await?;
    // As numbers: there may be kinds of alarms that the library does not know.
    let raised = raised.0.alarms.iter();
    let members: BTreeSet<u64> = raised
        .filter(|a| a.alarm == AlarmType::Nospace as i32)
        .map(|a| a.member_id)
        .collect();
    for &member in &members {
        let mut options = AlarmOptions::new();
        options.with_member(member);
        let disarmed = client.alarm(AlarmAction::Deactivate, AlarmType::Nospace, Some(options));
        way.answer("disarm an alarm", endpoint, patience, disarmed)
            .await?;
    }
    Ok(members.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(member: u64, said: Option<(u32, i64)>) -> MemberHash {
        MemberHash {
            member,
            name: format!("m{member}"),
            endpoint: None,
            revision: 9,
            hash: said.map(|(hash, compact_revision)| Hash {
                hash,
                compact_revision,
            }),
            error: None,
        }
    }

    fn compared(said: &[Option<(u32, i64)>]) -> [Vec<u64>; 3] {
        let hashes: Vec<MemberHash> = (1..).zip(said).map(|(id, &s)| hash(id, s)).collect();
        let a = compare(&hashes);
        [a.agree, a.differ, a.unknown]
    }

    #[test]
    fn a_majority_of_all_is_right() {
        let (a, b, c) = (Some((1, 5)), Some((2, 5)), Some((3, 5)));
        assert_eq!(compared(&[a, a, a]), [vec![1, 2, 3], vec![], vec![]]);
        assert_eq!(compared(&[a, b, a]), [vec![1, 3], vec![2], vec![]]);
        // One to one, with or without a third that is silent: nobody knows.
        assert_eq!(compared(&[a, b]), [vec![], vec![1, 2], vec![]]);
        assert_eq!(compared(&[a, b, None]), [vec![], vec![1, 2], vec![3]]);
        assert_eq!(compared(&[a, b, c]), [vec![], vec![1, 2, 3], vec![]]);
        // Nobody says otherwise.
        assert_eq!(compared(&[a, None, None]), [vec![1], vec![], vec![2, 3]]);
        assert_eq!(compared(&[None]), [vec![], vec![], vec![1]]);
        assert_eq!(compare(&[]), Agreement::default());
    }

    #[test]
    fn hashes_from_before_and_after_a_compaction_are_not_compared() {
        let (old, new, other) = (Some((1, 5)), Some((2, 7)), Some((3, 7)));
        assert_eq!(compared(&[old, new, new]), [vec![2, 3], vec![], vec![1]]);
        assert_eq!(compared(&[old, new]), [vec![2], vec![], vec![1]]);
        assert_eq!(compared(&[old, new, other]), [vec![1], vec![2, 3], vec![]]);
    }

    fn member(id: u64, applied: u64) -> Member {
        Member {
            id,
            name: format!("m{id}"),
            endpoint: Some(format!("http://m{id}:2379")),
            started: true,
            reads: true,
            status: Some(Status {
                raft_applied_index: applied,
                leader: 1,
                ..Status::default()
            }),
            ..Member::default()
        }
    }

    fn cluster(members: Vec<Member>) -> Cluster {
        let mut cluster = Cluster {
            members,
            ..Cluster::default()
        };
        for m in &mut cluster.members {
            m.is_leader = m.id == 1;
        }
        cluster
    }

    fn ids(members: &[&Member]) -> Vec<u64> {
        members.iter().map(|m| m.id).collect()
    }

    #[test]
    fn a_follower_that_is_up_to_date_comes_first() {
        let c = cluster(vec![
            member(1, 9000),
            member(2, 8999),
            member(3, 10),
            member(4, 9000),
        ]);
        assert_eq!(ids(&c.choose(&[])), [2, 4, 1, 3]);
        assert_eq!(ids(&c.choose(&[4, 1])), [2, 3]);
        let mut c = c;
        c.members[1].is_learner = true;
        c.members[0].reads = false;
        c.members[3].status = None;
        assert_eq!(ids(&c.choose(&[])), [3]);
    }

    #[test]
    fn want_of_space_is_no_illness_and_other_errors_are() {
        let mut c = cluster(vec![member(1, 5), member(2, 5)]);
        let raise = |c: &mut Cluster, said: &str| {
            for m in &mut c.members {
                let status = m.status.as_mut().unwrap();
                status.errors = vec![said.to_owned()];
            }
            c.alarms = alarm(said).into_iter().collect();
        };
        raise(&mut c, "memberID:1 alarm:NOSPACE ");
        assert_eq!(c.alarms[0].kind, AlarmKind::NoSpace);
        assert!(c.members.iter().all(|m| c.illness(m).is_none()));
        // All members tell of an alarm; it is about one.
        raise(&mut c, "memberID:2  alarm: CORRUPT");
        assert_eq!(ids(&c.choose(&[])), [1]);
        raise(&mut c, "alarm:CORRUPT ");
        assert!(c.choose(&[]).is_empty());
        raise(&mut c, "etcdserver: no leader");
        assert!(c.illness(&c.members[0]).unwrap().contains("no leader"));
        raise(&mut c, "memberID:2 alarm:7");
        assert!(c.illness(&c.members[1]).unwrap().contains("alarm:7"));
        assert!(c.illness(&c.members[0]).is_none());
    }

    fn seen(member_id: u64, cluster_id: u64, read: Result<Option<i64>>) -> Seen {
        Seen {
            endpoint: format!("http://m{member_id}:2379"),
            member_id,
            cluster_id,
            status: Status {
                raft_term: member_id,
                leader: member_id,
                revision: 40,
                ..Status::default()
            },
            members: Vec::new(),
            read,
        }
    }

    #[test]
    fn who_answers_without_a_quorum_is_named() {
        let members = || vec![member(1, 5), member(2, 5), member(3, 5)];
        let cut_off = || Err(Reason::NoQuorum.error("read at m2: no answer"));
        let e = assemble(members(), &[seen(2, 7, cut_off())]).unwrap_err();
        assert_eq!(e.reason(), Reason::NoQuorum);
        assert!(
            e.to_string().contains("m2 at http://m2:2379 answers"),
            "{e}"
        );
        // One that reads is enough; the newest term's leader is the leader.
        let seen_now = [seen(2, 7, Ok(Some(41))), seen(3, 7, cut_off())];
        let c = assemble(members(), &seen_now).unwrap();
        assert_eq!(
            (c.cluster_id, c.revision, c.members[2].is_leader),
            (7, 41, true)
        );
        let e = assemble(members(), &[seen(1, 7, Ok(None)), seen(2, 8, Ok(None))]);
        assert_eq!(e.unwrap_err().reason(), Reason::Configuration);
    }

    #[test]
    fn the_most_telling_failure_counts() {
        let of = |reasons: &[Reason]| {
            let errors = reasons.iter().map(|&r| r.error(r.as_str())).collect();
            most_telling(errors).reason()
        };
        use Reason::{CertificateExpired, Configuration, EtcdUnreachable, Unauthenticated};
        assert_eq!(
            of(&[EtcdUnreachable, Configuration, CertificateExpired]),
            CertificateExpired
        );
        assert_eq!(of(&[EtcdUnreachable, Unauthenticated]), Unauthenticated);
        assert_eq!(of(&[EtcdUnreachable, EtcdUnreachable]), EtcdUnreachable);
    }
}
