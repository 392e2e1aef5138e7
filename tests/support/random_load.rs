//! Random writes of every kind: operations, transactions, leases, compactions. One writer makes a history that a seed
//! repeats; several are a load on a live etcd whose members fail and come back.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use etcd_client::{
    Client, ConnectOptions, DeleteOptions, Error, GetOptions, LeaseGrantOptions, PutOptions,
    ResponseHeader, Txn, TxnOp, TxnOpResponse,
};
use fastrand::Rng;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::etcd::Etcd;

/// After this time without a response, a writer tries the next member.
const PATIENCE: Duration = Duration::from_secs(5);
/// Each writer's number of keys that are created and deleted.
const CHURNING_KEYS: u64 = 40;

#[derive(Clone, Debug)]
pub struct LoadOptions {
    pub writers: usize,
    /// Operations per second of all writers together. `None`: no limit.
    pub rate: Option<f64>,
    /// The longest value, in bytes. If it allows that, half a percent of the puts have more than 64 KiB; the
    /// server must accept these.
    pub max_value: usize,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            writers: 3,
            rate: Some(150.0),
            max_value: 64 << 10,
        }
    }
}

/// Writers that run until they are stopped. They survive every failure of a member.
pub struct Load {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    endpoints: Vec<String>,
    writers: Vec<JoinHandle<()>>,
    handle: Handle,
}

impl Load {
    /// Starts the writers; call it inside a runtime. The same seed makes the same operations, in any order.
    pub fn start(endpoints: &[String], seed: u64, options: &LoadOptions) -> Self {
        let handle = Handle::current();
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let writers = (0..options.writers)
            .map(|n| {
                let mut endpoints = endpoints.to_vec();
                let first = n % endpoints.len();
                endpoints.rotate_left(first);
                let rng = Rng::with_seed(seed ^ (n as u64 + 1) << 48);
                let prefix = format!("/load/{n}/");
                let writer = Writer {
                    are_leases_short: true,
                    max_ops: 100,
                    ..Writer::new(endpoints, None, rng, prefix, options.max_value)
                };
                let pause = options.rate.map(|r| options.writers as f64 / r);
                let pause = pause.map(Duration::from_secs_f64);
                handle.spawn(writer.run(pause, Arc::clone(&stop), Arc::clone(&done)))
            })
            .collect();
        Self {
            stop,
            done,
            endpoints: endpoints.to_vec(),
            writers,
            handle,
        }
    }

    /// Returns the number of operations so far that got a response.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Waits for this many more operations.
    pub fn wait_for(&self, more: u64) {
        let wanted = self.done() + more;
        while self.done() < wanted {
            for writer in &self.writers {
                assert!(!writer.is_finished(), "a writer has ended");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Stops all writers and returns the number of operations that got a response. Revokes all leases, so that
    /// nothing changes afterwards. Blocks: do not call it on an async thread.
    pub fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        let handle = self.handle.clone();
        for writer in self.writers {
            handle.block_on(writer).expect("a writer that ends well");
        }
        let mut endpoints = self.endpoints.iter().cycle();
        let revoked = async {
            let mut endpoint = || endpoints.next().expect("an endpoint");
            while let Err(e) = revoke_all(endpoint()).await {
                println!("leases are not revoked yet: {e}");
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        };
        handle.block_on(revoked);
        self.done.load(Ordering::Relaxed)
    }
}

/// Writes to etcd at random.
pub struct Writer {
    endpoints: Vec<String>,
    client: Option<Client>,
    pub rng: Rng,
    /// All keys begin with this.
    prefix: String,
    keys: Vec<Vec<u8>>,
    max_value: usize,
    /// The most operations of a transaction.
    max_ops: usize,
    leases: VecDeque<i64>,
    /// Whether some leases expire unless they are kept alive.
    are_leases_short: bool,
    churned: u64,
    /// The newest revision that a response had.
    pub revision: i64,
    /// Revisions that left tombstones.
    deletions: Vec<i64>,
}

impl Writer {
    fn new(
        endpoints: Vec<String>,
        client: Option<Client>,
        mut rng: Rng,
        prefix: String,
        max_value: usize,
    ) -> Self {
        Self {
            endpoints,
            client,
            keys: key_set(&mut rng, &prefix),
            rng,
            prefix,
            max_value,
            max_ops: 400,
            leases: VecDeque::new(),
            are_leases_short: false,
            churned: 0,
            revision: 0,
            deletions: Vec::new(),
        }
    }

    /// A writer without others beside it. The same seed makes the same changes.
    pub async fn alone(etcd: &Etcd, seed: u64, max_value: usize) -> Self {
        let (client, rng) = (etcd.client().await, Rng::with_seed(seed));
        Self {
            revision: etcd.revision().await,
            ..Self::new(Vec::new(), Some(client), rng, String::new(), max_value)
        }
    }

    async fn run(mut self, pause: Option<Duration>, stop: Arc<AtomicBool>, done: Arc<AtomicU64>) {
        let mut ticks = tokio::time::interval(pause.unwrap_or(Duration::from_nanos(1)));
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while !stop.load(Ordering::Relaxed) {
            if pause.is_some() {
                ticks.tick().await;
            }
            // A failed operation may have taken effect: only etcd's own watch is the truth.
            match tokio::time::timeout(PATIENCE, self.step()).await {
                Ok(Ok(())) => _ = done.fetch_add(1, Ordering::Relaxed),
                Ok(Err(Error::GRpcStatus(status))) if is_refusal(status.code() as i32) => {}
                _ => {
                    self.client = None;
                    self.endpoints.rotate_left(1);
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    async fn client(&mut self) -> Result<Client, Error> {
        if let Some(client) = &self.client {
            return Ok(client.clone());
        }
        let options = ConnectOptions::new().with_connect_timeout(Duration::from_secs(1));
        let client = Client::connect([&self.endpoints[0]], Some(options)).await?;
        self.client = Some(client.clone());
        Ok(client)
    }

    /// Runs one operation on an etcd that does not fail.
    pub async fn must_step(&mut self) {
        match self.step().await {
            Err(Error::GRpcStatus(status)) if is_refusal(status.code() as i32) => {}
            done => done.expect("an operation"),
        }
    }

    /// Runs one operation. Some change nothing, such as deleting a key that does not exist.
    async fn step(&mut self) -> Result<(), Error> {
        let mut client = self.client().await?;
        match self.rng.u32(0..100) {
            0..43 => self.put(client).await,
            43..52 => {
                let key = self.any_key();
                self.delete(client, key.clone(), [&key[..], &[0]].concat())
                    .await
            }
            52..56 => {
                let (start, end) = self.range();
                self.delete(client, start, end).await
            }
            56..71 => self.txn(client).await,
            71..78 => {
                // A new key is created and an old one deleted.
                self.churned += 1;
                let of = |prefix: &str, n: u64| format!("{prefix}churn/{n:08}").into_bytes();
                let (new, value) = (of(&self.prefix, self.churned), self.value());
                let done = client.put(new, value, None).await?;
                self.moved_to(done.header(), false);
                let Some(old) = self.churned.checked_sub(CHURNING_KEYS) else {
                    return Ok(());
                };
                let (old, end) = (of(&self.prefix, old), of(&self.prefix, old + 1));
                self.delete(client, old, end).await
            }
            78..86 => self.grant(client).await,
            86..88 => {
                let lease = self.any_lease();
                if lease != 0 {
                    let (mut keeper, mut answers) = client.lease_keep_alive(lease).await?;
                    keeper.keep_alive().await?;
                    answers.message().await?;
                }
                Ok(())
            }
            88..92 => self.revoke(client).await,
            _ => self.rewrite(client).await,
        }
    }

    /// Ends the history: often with a range deletion, sometimes of all keys. More changes follow until there
    /// are `at_least` revisions.
    pub async fn finish(&mut self, at_least: i64) -> Result<(), Error> {
        let client = self.client().await?;
        while self.revision < at_least {
            self.put(client.clone()).await?;
        }
        match self.rng.u32(0..8) {
            0 => self.delete(client, vec![0], Vec::new()).await,
            1..5 => {
                let (start, end) = self.range();
                self.delete(client, start, end).await
            }
            _ => Ok(()),
        }
    }

    /// Chooses a revision to compact at, most often one with tombstones.
    pub fn choose_compaction(&mut self) -> Option<i64> {
        if self.revision < 2 || self.rng.u32(0..6) == 0 {
            return None;
        }
        if self.rng.bool()
            && let Some(revision) = self.rng.choice(&self.deletions)
        {
            return Some(*revision);
        }
        Some(self.rng.i64(2..=self.revision))
    }

    async fn put(&mut self, mut client: Client) -> Result<(), Error> {
        let (key, value, lease) = (self.any_key(), self.value(), self.any_lease());
        let options = PutOptions::new().with_lease(lease);
        let done = client.put(key, value, Some(options)).await?;
        self.moved_to(done.header(), false);
        Ok(())
    }

    /// Puts a key again: with its old value, its old lease, another lease, or none. etcd refuses that for a key that
    /// does not exist.
    async fn rewrite(&mut self, mut client: Client) -> Result<(), Error> {
        let key = self.any_key();
        let (value, options) = match self.rng.u32(0..4) {
            0 => (self.value(), PutOptions::new().with_ignore_lease()),
            1 => (self.value(), PutOptions::new()),
            _ => {
                let options = PutOptions::new().with_ignore_value();
                (Vec::new(), options.with_lease(self.any_lease()))
            }
        };
        let done = client.put(key, value, Some(options)).await?;
        self.moved_to(done.header(), false);
        Ok(())
    }

    async fn delete(
        &mut self,
        mut client: Client,
        start: Vec<u8>,
        end: Vec<u8>,
    ) -> Result<(), Error> {
        // No end: to the end of all keys.
        let end = if end.is_empty() { vec![0] } else { end };
        let options = DeleteOptions::new().with_range(end);
        let done = client.delete(start, Some(options)).await?;
        self.moved_to(done.header(), done.deleted() > 0);
        Ok(())
    }

    async fn txn(&mut self, mut client: Client) -> Result<(), Error> {
        // Often more changes than one byte of the sub revision can count, if that many operations are allowed.
        let keys: BTreeSet<Vec<u8>> = match self.rng.u32(0..12) {
            0 => {
                let count = self.rng.usize(self.max_ops * 2 / 3..self.max_ops);
                let keys = self.rng.choose_multiple(self.keys.iter(), count);
                keys.into_iter().cloned().collect()
            }
            _ => (0..self.rng.usize(2..40)).map(|_| self.any_key()).collect(),
        };
        // etcd refuses a put into a range that the same transaction deletes.
        let range = (self.rng.u32(0..3) == 0).then(|| self.range());
        let mut ops = Vec::new();
        for key in keys {
            let range = range.as_ref();
            if range.is_some_and(|(start, end)| &key >= start && &key < end) {
                continue;
            }
            ops.push(match self.rng.u32(0..10) {
                0..3 => TxnOp::delete(key, None),
                3 => TxnOp::get(key, Some(GetOptions::new().with_keys_only())),
                _ => {
                    let options = PutOptions::new().with_lease(self.any_lease());
                    TxnOp::put(key, self.short_value(), Some(options))
                }
            });
        }
        self.rng.shuffle(&mut ops);
        if let Some((start, end)) = range {
            let options = DeleteOptions::new().with_range(end);
            let at = self.rng.usize(..=ops.len());
            ops.insert(at, TxnOp::delete(start, Some(options)));
        }
        let done = client.txn(Txn::new().and_then(ops)).await?;
        let mut answers = done.op_responses().into_iter();
        let has_deleted = answers.any(|a| matches!(a, TxnOpResponse::Delete(d) if d.deleted() > 0));
        self.moved_to(done.header(), has_deleted);
        Ok(())
    }

    /// Grants a lease with an ID that no double can represent.
    async fn grant(&mut self, mut client: Client) -> Result<(), Error> {
        let is_short = self.are_leases_short && self.rng.bool();
        let seconds = if is_short { 2 } else { 100_000 };
        let options = LeaseGrantOptions::new().with_id(self.rng.i64(1..));
        let granted = client.lease_grant(seconds, Some(options)).await?;
        self.leases.push_back(granted.id());
        if self.leases.len() > 12 {
            self.leases.pop_front();
        }
        self.moved_to(granted.header(), false);
        Ok(())
    }

    /// Revokes a lease. Its keys are deleted in one revision.
    async fn revoke(&mut self, mut client: Client) -> Result<(), Error> {
        if let Some(lease) = self.leases.pop_front() {
            let done = client.lease_revoke(lease).await?;
            let revision = done.header().map_or(0, ResponseHeader::revision);
            self.moved_to(done.header(), revision > self.revision);
        }
        Ok(())
    }

    fn moved_to(&mut self, header: Option<&ResponseHeader>, has_deleted: bool) {
        self.revision = header.expect("a header").revision();
        if has_deleted {
            self.deletions.push(self.revision);
        }
    }

    /// Returns a key; half the time one of a few keys, which therefore change often.
    fn any_key(&mut self) -> Vec<u8> {
        let stride = if self.rng.bool() { 12 } else { 1 };
        let at = self.rng.usize(..self.keys.len() / stride) * stride;
        self.keys[at].clone()
    }

    /// Returns a lease, or most often none.
    fn any_lease(&mut self) -> i64 {
        let at = self.rng.usize(..4 * self.leases.len().max(1));
        self.leases.get(at).copied().unwrap_or(0)
    }

    /// Returns a range of up to a dozen known keys, without its end.
    fn range(&mut self) -> (Vec<u8>, Vec<u8>) {
        let start = self.rng.usize(..self.keys.len() - 1);
        let end = (start + self.rng.usize(1..=12)).min(self.keys.len() - 1);
        (self.keys[start].clone(), self.keys[end].clone())
    }

    fn value(&mut self) -> Vec<u8> {
        let length = match self.rng.u32(0..1000) {
            0..5 => self.rng.usize(64 << 10..(64 << 10) + self.max_value),
            5..60 => self.rng.usize(8 << 10..64 << 10),
            60..250 => self.rng.usize(1000..8 << 10),
            _ => self.rng.usize(10..1000),
        };
        let length = length.min(self.max_value);
        self.bytes(length)
    }

    fn short_value(&mut self) -> Vec<u8> {
        let length = match self.rng.u32(0..10) {
            0 => 0,
            _ => self.rng.usize(0..=self.max_value.min(200)),
        };
        self.bytes(length)
    }

    /// Returns noise or text: one compresses badly, the other well.
    fn bytes(&mut self, length: usize) -> Vec<u8> {
        if self.rng.bool() {
            let mut bytes = vec![0; length];
            self.rng.fill(&mut bytes);
            return bytes;
        }
        let text = r#"{"kind":"Pod","spec":"<b>&amp;</b>","unit":"µs ☃","n":"#;
        let text = format!("{text}{}}}", self.rng.u32(..)).into_bytes();
        text.into_iter().cycle().take(length).collect()
    }
}

/// Returns the keys that a writer uses, sorted.
fn key_set(rng: &mut Rng, prefix: &str) -> Vec<Vec<u8>> {
    // Without a prefix, these include the first and the last key that etcd accepts.
    let mut keys = BTreeSet::from([vec![0], vec![0, 0], vec![0xff], vec![0xff; 40]]);
    keys.extend(
        [
            "<a href=\"x\">&amp;</a>",
            "\u{2028}line\u{2029}separators",
            "schlüssel/ключ/鍵/🔑",
            "\"quoted\"\\\n\t\u{7f}",
        ]
        .map(|key| key.as_bytes().to_vec()),
    );
    keys.insert(b"long/".repeat(400));
    for n in 0..400 {
        let kind = ["pods", "leases", "configmaps", "events"][rng.usize(..4)];
        keys.insert(format!("/registry/{kind}/default/{n:03}").into_bytes());
    }
    for _ in 0..40 {
        let mut key = vec![0; rng.usize(1..30)];
        rng.fill(&mut key);
        keys.insert(key);
    }
    keys.into_iter()
        .map(|key| [prefix.as_bytes(), &key].concat())
        .collect()
}

async fn revoke_all(endpoint: &str) -> Result<(), Error> {
    let options = ConnectOptions::new()
        .with_connect_timeout(Duration::from_secs(1))
        .with_timeout(PATIENCE);
    let mut client = Client::connect([endpoint], Some(options)).await?;
    for lease in client.leases().await?.leases() {
        match client.lease_revoke(lease.id()).await {
            // The lease has expired meanwhile.
            Err(Error::GRpcStatus(status)) if is_refusal(status.code() as i32) => {}
            done => _ = done?,
        }
    }
    Ok(())
}

/// Returns whether the server responded with a refusal: an expired lease, a request that is too large.
fn is_refusal(code: i32) -> bool {
    const INVALID_ARGUMENT: i32 = 3;
    const NOT_FOUND: i32 = 5;
    const FAILED_PRECONDITION: i32 = 9;
    [INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION].contains(&code)
}
