//! An etcd cluster whose members stop, fail and start one by one.

use super::etcd::{Etcd, EtcdOptions, START_TIMEOUT, Signal, url};
use super::process::free_port;
use super::tools::EtcdVersion;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A member of a cluster: its data directory and its addresses.
#[derive(Clone, Debug)]
pub struct Member {
    pub name: String,
    pub data_dir: PathBuf,
    client_port: u16,
    peer_port: u16,
}

impl Member {
    pub fn new(name: &str, data_dir: PathBuf) -> Self {
        Self {
            name: name.to_owned(),
            data_dir,
            client_port: free_port(),
            peer_port: free_port(),
        }
    }

    pub fn peer_url(&self) -> String {
        url(self.peer_port)
    }
}

/// Returns the value of `--initial-cluster`.
pub fn initial_cluster(members: &[Member]) -> String {
    let urls: Vec<String> = members
        .iter()
        .map(|member| format!("{}={}", member.name, member.peer_url()))
        .collect();
    urls.join(",")
}

/// An etcd cluster whose members stop and start one by one. It is killed when dropped.
#[derive(Debug)]
pub struct Cluster {
    version: EtcdVersion,
    members: Vec<Member>,
    token: String,
    options: EtcdOptions,
    running: Vec<Option<Etcd>>,
}

impl Cluster {
    /// Starts all members on their data directories and waits until each serves.
    pub fn start(version: EtcdVersion, members: &[Member], token: &str) -> Self {
        Self::start_with(version, members, token, &EtcdOptions::default())
    }

    /// Like `start`; `options` apply to each member, except its name, ports and members.
    pub fn start_with(
        version: EtcdVersion,
        members: &[Member],
        token: &str,
        options: &EtcdOptions,
    ) -> Self {
        let mut cluster = Self {
            version,
            members: members.to_vec(),
            token: token.to_owned(),
            options: options.clone(),
            running: members.iter().map(|_| None).collect(),
        };
        // No member serves alone, so start all before waiting.
        for at in 0..members.len() {
            cluster.spawn(at);
        }
        for at in 0..members.len() {
            cluster.wait(at);
        }
        cluster
    }

    /// Returns a running member.
    pub fn member(&self, at: usize) -> &Etcd {
        self.running[at].as_ref().expect("a member that runs")
    }

    /// Returns the running members.
    pub fn running(&self) -> impl Iterator<Item = &Etcd> {
        self.running.iter().flatten()
    }

    /// Returns the client endpoint of each member, running or not.
    pub fn endpoints(&self) -> Vec<String> {
        let scheme = match self.options.tls {
            Some(_) => "https",
            None => "http",
        };
        let ports = self.members.iter().map(|member| member.client_port);
        ports
            .map(|port| format!("{scheme}://127.0.0.1:{port}"))
            .collect()
    }

    /// Returns the leader, as soon as all running members agree on one.
    pub async fn leader(&self) -> usize {
        let started = Instant::now();
        loop {
            let mut leaders = Vec::new();
            for (at, etcd) in self.running.iter().enumerate() {
                let Some(etcd) = etcd else { continue };
                let status = etcd.client().await.status().await.expect("a status");
                let own = status.header().expect("a header").member_id();
                leaders.push((status.leader(), status.leader() == own, at));
            }
            let agreed = leaders.iter().all(|l| l.0 == leaders[0].0);
            if let Some(leader) = leaders.iter().find(|l| l.1).filter(|_| agreed) {
                return leader.2;
            }
            assert!(started.elapsed() < START_TIMEOUT, "no leader: {leaders:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Makes this member the leader.
    pub async fn move_leader_to(&self, to: usize) {
        if self.leader().await != to {
            self.move_leader(to).await;
        }
    }

    /// Makes another member the leader.
    pub async fn move_leader(&self, to: usize) {
        let status = self.member(to).client().await.status().await;
        let id = status
            .expect("a status")
            .header()
            .expect("a header")
            .member_id();
        let from = self.member(self.leader().await);
        let moved = from.client().await.move_leader(id).await;
        moved.expect("another leader");
        assert_eq!(self.leader().await, to);
    }

    /// Stops one member cleanly; its directory stays.
    pub fn stop_one(&mut self, at: usize) {
        self.running[at].take().expect("a member that runs").stop();
    }

    /// Stops all members cleanly; their directories stay.
    pub fn stop(&mut self) {
        // All at once: a member that waits for stopped members takes long to stop.
        for etcd in self.running() {
            etcd.signal(Signal::TERM);
        }
        for etcd in self.running.iter_mut().filter_map(Option::take) {
            etcd.stop();
        }
    }

    /// Starts all members again on their directories.
    pub fn start_all_again(&mut self) {
        for at in 0..self.members.len() {
            self.spawn(at);
        }
        for at in 0..self.members.len() {
            self.wait(at);
        }
    }

    /// Returns whether a member is running.
    pub fn runs(&self, at: usize) -> bool {
        self.running[at].is_some()
    }

    /// Kills a member, as a failure of its machine would.
    pub fn kill(&mut self, at: usize) {
        self.running[at].take().expect("a member that runs");
    }

    /// Starts a member again on its data directory.
    pub fn start_again(&mut self, at: usize) {
        self.spawn(at);
        self.wait(at);
    }

    /// Starts a member without waiting until it serves: without a quorum it never does.
    pub fn spawn(&mut self, at: usize) {
        let member = &self.members[at];
        let token = ["--initial-cluster-token", &self.token].map(OsString::from);
        let options = EtcdOptions {
            name: member.name.clone(),
            ports: Some((member.client_port, member.peer_port)),
            initial_cluster: Some(initial_cluster(&self.members)),
            args: [&self.options.args[..], &token[..]].concat(),
            ..self.options.clone()
        };
        let etcd = Etcd::spawn(self.version, &member.data_dir, &options);
        self.running[at] = Some(etcd.unwrap_or_else(|err| panic!("{err}")));
    }

    fn wait(&mut self, at: usize) {
        let etcd = self.running[at].as_mut().expect("a member that runs");
        etcd.wait_until_serving()
            .unwrap_or_else(|err| panic!("{err}"));
    }
}
