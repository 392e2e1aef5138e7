//! The members of a restored cluster: parses the flags, computes IDs, and builds the database entries of the
//! members.
//!
//! It opens no files and makes no DNS requests. Sources: etcd's `client/pkg/types`, `membership/member.go`,
//! `storage/schema/membership.go`.

use crate::base::opt::{
    INITIAL_ADVERTISE_PEER_URLS, INITIAL_CLUSTER, INITIAL_CLUSTER_TOKEN, NAME, Opt,
};
use crate::base::protobuf::Value::{Bytes, Varint};
use crate::base::protobuf::message;
use crate::error::{Error, Reason, Result};
use sha1::{Digest as _, Sha1};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The ID of a member; never 0. It is formatted like in etcd: hexadecimal, lower case, without leading zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub u64);

/// The ID of a cluster, formatted like in etcd.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterId(pub u64);

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::LowerHex::fmt(&self.0, f)
    }
}

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::LowerHex::fmt(&self.0, f)
    }
}

/// A member as `--initial-cluster` names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The ID, a hash of the URLs and the cluster's token.
    pub id: MemberId,
    /// The name, which is not empty.
    pub name: String,
    /// The peer URLs: at least one, sorted.
    pub peer_urls: Vec<String>,
}

impl Member {
    /// Returns the JSON for the bucket `members` and the WAL, with the fields `id`, `peerURLs` and `name`. A
    /// member has no client URLs before its first start.
    pub fn to_json(&self) -> String {
        format!(
            r#"{{"id":{},"peerURLs":{},"name":{}}}"#,
            self.id.0,
            self.peer_urls_json(),
            go_json(&self.name)
        )
    }

    /// Returns the JSON array of the peer URLs.
    pub(super) fn peer_urls_json(&self) -> String {
        let urls: Vec<String> = self.peer_urls.iter().map(|u| go_json(u)).collect();
        format!("[{}]", urls.join(","))
    }
}

/// A restored cluster, and which of its members is being restored here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cluster {
    token: String,
    id: ClusterId,
    members: Vec<Member>,
    /// The index in `members` of the member that is being restored.
    me: usize,
}

impl Cluster {
    /// Creates a cluster from the flags of `etcdutl snapshot restore`. `initial_cluster` is
    /// `name=URL,name=URL,…`, in which a repeated name adds a URL; `advertise_peer_urls` is `URL,URL,…`.
    /// Every member computes the same IDs.
    ///
    /// It is stricter than etcdutl in two ways:
    /// - `--initial-advertise-peer-urls` must spell host names like `--initial-cluster`. etcdutl also accepts
    ///   different names that DNS resolves to the same addresses.
    /// - URLs with user, query, fragment or escapes are refused. etcdutl accepts them, but no peer can use
    ///   them.
    ///
    /// # Errors
    /// `Usage`; the message names `--name`, `--initial-cluster` or `--initial-advertise-peer-urls`.
    pub fn new(
        name: &str,
        initial_cluster: &str,
        token: &str,
        advertise_peer_urls: &str,
    ) -> Result<Cluster> {
        let mut advertised = advertise_peer_urls
            .split(',')
            .map(|url| peer_url(INITIAL_ADVERTISE_PEER_URLS, url))
            .collect::<Result<Vec<String>>>()?;
        advertised.sort();
        let by_name = parse_initial_cluster(initial_cluster)?;
        let own_urls = by_name.get(name).ok_or_else(|| {
            usage(format!(
                "{NAME} \"{name}\" is not among the members of {INITIAL_CLUSTER} \
                 \"{initial_cluster}\""
            ))
        })?;
        if *own_urls != advertised {
            return Err(usage(format!(
                "{INITIAL_ADVERTISE_PEER_URLS} has {} but {INITIAL_CLUSTER} has {} for \"{name}\": \
                 they must be the same",
                advertised.join(","),
                own_urls.join(",")
            )));
        }
        let mut unique = BTreeSet::new();
        for url in by_name.values().flatten() {
            if !unique.insert(url) {
                return Err(usage(format!("{INITIAL_CLUSTER} has {url} twice")));
            }
        }
        Self::from_urls(by_name.into_iter().collect(), name, token.to_owned())
    }

    /// Returns a cluster of the same members with another token, and therefore with other IDs. Members of the
    /// two clusters do not accept each other.
    ///
    /// # Errors
    /// `Usage` if two members get the same ID.
    pub fn with_token(&self, token: String) -> Result<Cluster> {
        let members = self.members.iter();
        let urls_by_name = members.map(|m| (m.name.clone(), m.peer_urls.clone()));
        Self::from_urls(urls_by_name.collect(), &self.me().name, token)
    }

    fn from_urls(
        urls_by_name: Vec<(String, Vec<String>)>,
        name: &str,
        token: String,
    ) -> Result<Cluster> {
        let mut members: Vec<Member> = urls_by_name
            .into_iter()
            .map(|(name, peer_urls)| Member {
                id: MemberId(hash(format!("{}{token}", peer_urls.concat()).as_bytes())),
                name,
                peer_urls,
            })
            .collect();
        members.sort_by_key(|m| m.id);
        if members.windows(2).any(|w| w[0].id == w[1].id) || members[0].id.0 == 0 {
            return Err(usage(format!(
                "{INITIAL_CLUSTER} gives two members the same ID, or a member the ID 0: use another \
                 {INITIAL_CLUSTER_TOKEN}"
            )));
        }
        let ids: Vec<u8> = members.iter().flat_map(|m| m.id.0.to_be_bytes()).collect();
        let me = members.iter().position(|m| m.name == name);
        Ok(Cluster {
            token,
            id: ClusterId(hash(&ids)),
            me: me.ok_or_else(|| Error::internal("the member is not in its own cluster"))?,
            members,
        })
    }

    /// Returns the token, which distinguishes clusters with the same URLs.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Returns the ID of the cluster.
    pub fn id(&self) -> ClusterId {
        self.id
    }

    /// Returns the member that is being restored.
    pub fn me(&self) -> &Member {
        &self.members[self.me]
    }

    /// Returns all members, sorted by ID: at least one.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Returns the last raft index of the restored log, which has one entry for each member.
    pub fn index(&self) -> u64 {
        self.members.len() as u64
    }

    /// Returns the entries that replace the content of a bucket, sorted by key, or `None` if the bucket of
    /// the snapshot is kept. An empty result still means that the bucket must exist.
    ///
    /// Like etcdutl 3.5, 3.6 and 3.7, it empties `members` and `members_removed` and adds the new members.
    /// The bucket `cluster` (`clusterVersion`, `downgrade`) is kept as well: without it, etcd would have to
    /// negotiate the version of the cluster.
    pub fn bucket(&self, name: &[u8]) -> Option<Vec<(Vec<u8>, Vec<u8>)>> {
        match name {
            b"members" => {
                let mut entries: Vec<_> = self
                    .members
                    .iter()
                    .map(|m| (m.id.to_string().into_bytes(), m.to_json().into_bytes()))
                    .collect();
                // IDs have no leading zeros, so their order as keys differs from their order as numbers.
                entries.sort();
                Some(entries)
            }
            b"members_removed" => Some(Vec::new()),
            _ => None,
        }
    }

    /// Returns the entries of the bucket `meta` for this cluster, sorted by key. They replace or extend the
    /// entries of the snapshot; all other entries, such as `storageVersion`, are kept.
    ///
    /// etcdutl sets `consistent_index` and `term` (8 bytes each, big endian). It leaves `confState` as it is,
    /// although that names the members of the old cluster: servers up to 3.7 write it before they read it. It
    /// is set here to be correct in any case.
    pub fn meta_entries(&self) -> Vec<(&'static [u8], Vec<u8>)> {
        let voters: Vec<String> = self.members.iter().map(|m| m.id.0.to_string()).collect();
        vec![
            (
                b"confState",
                format!(r#"{{"voters":[{}],"auto_leave":false}}"#, voters.join(",")).into_bytes(),
            ),
            (b"consistent_index", self.index().to_be_bytes().to_vec()),
            (b"term", super::TERM.to_be_bytes().to_vec()),
        ]
    }

    /// Encodes `raftpb.ConfState`: voters (1) and auto_leave (5). Like etcd 3.5 and 3.6, it writes auto_leave
    /// although it is false.
    pub(super) fn conf_state(&self) -> Vec<u8> {
        let voters = self.members.iter().map(|m| (1, Varint(m.id.0)));
        message(voters.chain([(5, Varint(0))]))
    }

    /// Encodes `etcdserverpb.Metadata`: NodeID (1) and ClusterID (2).
    pub(super) fn metadata(&self) -> Vec<u8> {
        message([(1, Varint(self.me().id.0)), (2, Varint(self.id.0))])
    }
}

impl Member {
    /// Encodes the `raftpb.ConfChange` that adds the member: ID (1) 0, type (2) 0, node_id (3), context (4).
    pub(super) fn conf_change(&self) -> Vec<u8> {
        let json = self.to_json();
        let (id, json) = (Varint(self.id.0), Bytes(json.as_bytes()));
        message([(1, Varint(0)), (2, Varint(0)), (3, id), (4, json)])
    }
}

fn usage(message: impl Into<String>) -> Error {
    Reason::Usage.error(message)
}

/// Returns the first 8 bytes of the SHA-1, big endian.
fn hash(b: &[u8]) -> u64 {
    let sum = Sha1::digest(b);
    sum.iter().take(8).fold(0, |n, &x| n << 8 | u64::from(x))
}

/// Parses `--initial-cluster` into the sorted URLs of each member.
fn parse_initial_cluster(s: &str) -> Result<BTreeMap<String, Vec<String>>> {
    let mut members = BTreeMap::<String, Vec<String>>::new();
    // Like etcd, skip empty parts.
    for part in s.split(',').filter(|p| !p.is_empty()) {
        let (name, url) = part.split_once('=').unwrap_or((part, ""));
        if name.is_empty() || url.is_empty() {
            return Err(usage(format!(
                "{INITIAL_CLUSTER} has \"{part}\": use NAME=URL"
            )));
        }
        members
            .entry(name.to_owned())
            .or_default()
            .push(peer_url(INITIAL_CLUSTER, url)?);
    }
    for urls in members.values_mut() {
        urls.sort();
    }
    Ok(members)
}

/// Checks a peer URL, and returns it as Go prints it after parsing: with the scheme in lower case.
fn peer_url(flag: Opt, url: &str) -> Result<String> {
    let url = url.trim();
    let bad = |problem: &str| usage(format!("{flag} has \"{url}\": {problem}"));
    let (scheme, rest) = url
        .split_once(':')
        .ok_or_else(|| bad("use a URL such as http://HOST:PORT"))?;
    let scheme = scheme.to_ascii_lowercase();
    if !matches!(scheme.as_str(), "http" | "https" | "unix" | "unixs") {
        return Err(bad("the scheme must be http, https, unix or unixs"));
    }
    let is_forbidden = |c: char| !c.is_ascii_graphic() || "\"<>\\^`{|}?#@,".contains(c);
    if let Some(c) = rest.chars().find(|&c| is_forbidden(c)) {
        return Err(bad(&format!("a peer URL cannot contain {c:?}")));
    }
    if scheme.starts_with("http") {
        let authority = rest
            .strip_prefix("//")
            .ok_or_else(|| bad("use the form http://HOST:PORT"))?;
        if authority.contains('/') {
            return Err(bad("a peer URL cannot have a path, not even a slash"));
        }
        let (host, port) = authority
            .rsplit_once(':')
            .ok_or_else(|| bad("the port is missing"))?;
        if port.is_empty() || !port.bytes().all(|c| c.is_ascii_digit()) {
            return Err(bad("the port is missing"));
        }
        if !is_valid_host(host) {
            return Err(bad(
                "the host is invalid (an IPv6 address must be in brackets)",
            ));
        }
    } else if rest.contains('%') {
        return Err(bad("a peer URL cannot contain '%'"));
    }
    Ok(format!("{scheme}:{rest}"))
}

/// Whether a host is a name, an IPv4 address, or an IPv6 address in brackets, with a zone such as `%25eth0`
/// or without.
fn is_valid_host(host: &str) -> bool {
    let Some(ip) = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) else {
        return !host.contains(['[', ']', ':', '%']);
    };
    let (ip, zone) = ip.split_once("%25").unwrap_or((ip, "-"));
    let in_ip = |c: u8| c.is_ascii_hexdigit() || b":.".contains(&c);
    let in_zone = |c: u8| c.is_ascii_alphanumeric() || b"-._~".contains(&c);
    ip.bytes().all(in_ip) && !zone.is_empty() && zone.bytes().all(in_zone)
}

/// Encodes a JSON string like Go's encoding/json, which escapes `<`, `>`, `&` and two line separators.
pub(super) fn go_json(s: &str) -> String {
    let mut out = String::with_capacity(s.len() + 2);
    for c in serde_json::Value::from(s).to_string().chars() {
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                out.push_str(&format!("\\u{:04x}", c as u32));
            }
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn three(name: &str) -> Cluster {
        let all = "a=http://10.0.0.1:2380,b=https://b.example:2380,c=http://10.0.0.3:2380,\
                   b=http://10.0.0.2:2380";
        let mine = match name {
            "a" => "http://10.0.0.1:2380",
            "b" => "http://10.0.0.2:2380,https://b.example:2380",
            _ => "http://10.0.0.3:2380",
        };
        Cluster::new(name, all, "tok", mine).unwrap()
    }

    #[test]
    fn ids_equal_those_of_etcd() {
        // IDs that etcdutl 3.5.35 computed for these flags.
        let url = "http://localhost:2380";
        let one = Cluster::new("default", &format!("default={url}"), "etcd-cluster", url).unwrap();
        assert_eq!(one.me().id.to_string(), "8e9e05c52164694d");
        assert_eq!(one.id().to_string(), "cdf818194e3a8c32");
        let cluster = three("b");
        assert_eq!(cluster.id().to_string(), "492fd43c3b9c52c5");
        let ids: Vec<String> = cluster.members().iter().map(|m| m.id.to_string()).collect();
        assert_eq!(
            ids,
            ["5d8f2458f24ae9e", "7aa181191753809e", "98521e8c6c48c6da"]
        );
        assert_eq!(cluster.me().name, "b");
        assert_eq!(
            cluster.me().to_json(),
            r#"{"id":421352945727352478,"peerURLs":["http://10.0.0.2:2380","https://b.example:2380"],"name":"b"}"#
        );
        assert_eq!(three("a").members(), cluster.members());
    }

    #[test]
    fn buckets_hold_only_the_new_members() {
        let cluster = three("c");
        let keys: Vec<Vec<u8>> = cluster
            .bucket(b"members")
            .unwrap()
            .into_iter()
            .map(|e| e.0)
            .collect();
        assert_eq!(
            keys,
            [
                &b"5d8f2458f24ae9e"[..],
                b"7aa181191753809e",
                b"98521e8c6c48c6da"
            ]
        );
        assert_eq!(cluster.bucket(b"members_removed"), Some(vec![]));
        assert_eq!(cluster.bucket(b"cluster"), None);
        assert_eq!(cluster.bucket(b"key"), None);
        let meta = cluster.meta_entries();
        assert!(meta.is_sorted());
        assert_eq!(
            meta[1],
            (&b"consistent_index"[..], vec![0, 0, 0, 0, 0, 0, 0, 3])
        );
    }

    #[test]
    fn peer_urls_are_accepted_and_refused() {
        for (given, kept) in [
            ("http://a:1", "http://a:1"),
            (" HTTPS://A.b:2380 ", "https://A.b:2380"),
            ("http://[::1]:2380", "http://[::1]:2380"),
            ("http://[fe80::1%25eth0]:1", "http://[fe80::1%25eth0]:1"),
            ("unix://localhost:2380", "unix://localhost:2380"),
            ("unixs:///run/etcd.sock", "unixs:///run/etcd.sock"),
        ] {
            assert_eq!(peer_url(INITIAL_CLUSTER, given).unwrap(), kept);
        }
        for bad in [
            "",
            "a",
            "a:1",
            "http:a:1",
            "ftp://a:1",
            "http://a",
            "http://a:",
            "http://a:b",
            "http://a:1/",
            "http://a:1/x",
            "http://a:1?x",
            "http://u@a:1",
            "http://a b:1",
            "http://::1:2380",
            "http://ä:1",
            "http://a%20:1",
            "http://[::1",
            "http://[g::]:1",
        ] {
            let e = peer_url(INITIAL_CLUSTER, bad).unwrap_err();
            assert_eq!(e.reason(), Reason::Usage, "{bad}");
            assert!(e.to_string().starts_with("initial-cluster has"), "{e}");
        }
    }

    #[test]
    fn flags_that_contradict_each_other_are_refused() {
        let refuse = |name, all, mine, flag: &str| {
            let e = Cluster::new(name, all, "t", mine).unwrap_err();
            assert_eq!(e.reason(), Reason::Usage);
            assert!(e.to_string().contains(flag), "{e}");
        };
        let (a, b) = ("http://a:1", "http://b:1");
        refuse("c", "a=http://a:1", a, "name \"c\"");
        refuse("a", "", a, "name");
        refuse("a", "a=http://a:1", b, "initial-advertise-peer-urls");
        refuse(
            "a",
            "a=http://a:1,a=http://b:1",
            a,
            "initial-advertise-peer-urls",
        );
        refuse("a", "a=http://a:1", "", "initial-advertise-peer-urls");
        refuse(
            "a",
            "a=http://a:1,b=http://a:1",
            a,
            "initial-cluster has http://a:1 twice",
        );
        refuse("a", "a=http://a:1,b", a, "initial-cluster has \"b\"");
        refuse("a", "a=http://a:1,=http://b:1", a, "initial-cluster");
        assert!(Cluster::new("a", ",a=http://a:1,,", "", a).is_ok());
    }

    #[test]
    fn strings_are_escaped_like_in_go() {
        assert_eq!(
            go_json("a\"<&>\u{2028}é\n"),
            r#""a\"\u003c\u0026\u003e\u2028é\n""#
        );
    }
}
