//! Random writes of every kind to a live etcd whose members fail and come back.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use etcd_client::{
    Client, ConnectOptions, DeleteOptions, Error, GetOptions, LeaseGrantOptions, PutOptions, Txn,
    TxnOp,
};
use fastrand::Rng;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

/// After this time without a response, a writer tries the next member.
const PATIENCE: Duration = Duration::from_secs(5);
/// Each writer's number of keys that stay, and of keys that are created and deleted.
const STEADY_KEYS: usize = 300;
const CHURNING_KEYS: usize = 40;

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
                let writer = Writer {
                    endpoints,
                    client: None,
                    rng: Rng::with_seed(seed ^ (n as u64 + 1) << 48),
                    prefix: format!("/load/{n}"),
                    max_value: options.max_value,
                    leases: VecDeque::new(),
                    churned: 0,
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

struct Writer {
    endpoints: Vec<String>,
    client: Option<Client>,
    rng: Rng,
    prefix: String,
    max_value: usize,
    leases: VecDeque<i64>,
    churned: u64,
}

impl Writer {
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

    /// Runs one operation.
    async fn step(&mut self) -> Result<(), Error> {
        let mut client = self.client().await?;
        match self.rng.u32(0..100) {
            0..45 => {
                let (key, value) = (self.key(), self.value());
                client.put(key, value, None).await?;
            }
            45..55 => {
                let Some(lease) = self.any_lease() else {
                    return self.grant(client).await;
                };
                let (key, value) = (self.key(), self.value());
                let options = PutOptions::new().with_lease(lease);
                client.put(key, value, Some(options)).await?;
            }
            55..70 => {
                let ops = self.transaction();
                client.txn(Txn::new().and_then(ops)).await?;
            }
            70..77 => {
                let key = self.key();
                client.delete(key, None).await?;
            }
            77..80 => {
                // At most ten neighbouring keys.
                let prefix = self.key();
                let options = DeleteOptions::new().with_prefix();
                client
                    .delete(&prefix[..prefix.len() - 1], Some(options))
                    .await?;
            }
            80..90 => {
                // A new key is created and an old one deleted.
                self.churned += 1;
                let of = |prefix: &str, n: u64| format!("{prefix}/churn/{n:08}");
                let (new, value) = (of(&self.prefix, self.churned), self.value());
                client.put(new, value, None).await?;
                if let Some(old) = self.churned.checked_sub(CHURNING_KEYS as u64) {
                    client.delete(of(&self.prefix, old), None).await?;
                }
            }
            90..95 => self.grant(client).await?,
            95..97 => {
                if let Some(lease) = self.any_lease() {
                    let (mut keeper, mut answers) = client.lease_keep_alive(lease).await?;
                    keeper.keep_alive().await?;
                    answers.message().await?;
                }
            }
            _ => {
                if let Some(lease) = self.leases.pop_front() {
                    client.lease_revoke(lease).await?;
                }
            }
        }
        Ok(())
    }

    /// Grants a lease. Some leases expire during the load unless they are kept alive.
    async fn grant(&mut self, mut client: Client) -> Result<(), Error> {
        let seconds = if self.rng.bool() { 2 } else { 3600 };
        let options = LeaseGrantOptions::new().with_id(self.rng.i64(1..));
        let granted = client.lease_grant(seconds, Some(options)).await?;
        self.leases.push_back(granted.id());
        if self.leases.len() > 12 {
            self.leases.pop_front();
        }
        Ok(())
    }

    fn transaction(&mut self) -> Vec<TxnOp> {
        let mut used = BTreeSet::new();
        let mut ops = Vec::new();
        let count = match self.rng.u32(0..10) {
            0 => self.rng.usize(20..100),
            _ => self.rng.usize(2..20),
        };
        for _ in 0..count {
            let key = self.key();
            if !used.insert(key.clone()) {
                continue;
            }
            ops.push(match self.rng.u32(0..5) {
                0 => TxnOp::delete(key, None),
                1 => TxnOp::get(key, Some(GetOptions::new().with_keys_only())),
                _ => {
                    let mut value = vec![0; self.rng.usize(0..200)];
                    self.rng.fill(&mut value);
                    TxnOp::put(key, value, None)
                }
            });
        }
        // A range without keys of this transaction's puts: etcd refuses both in one transaction.
        let from = format!("{}/churn/", self.prefix);
        let to = format!(
            "{}/churn/{:08}",
            self.prefix,
            self.churned.saturating_sub(38)
        );
        ops.push(TxnOp::delete(
            from,
            Some(DeleteOptions::new().with_range(to)),
        ));
        ops
    }

    fn any_lease(&mut self) -> Option<i64> {
        let at = self.rng.usize(..self.leases.len().max(1));
        self.leases.get(at).copied()
    }

    /// Returns a key; half the time one of a few keys, which therefore change often.
    fn key(&mut self) -> Vec<u8> {
        let stride = if self.rng.bool() { 15 } else { 1 };
        let n = self.rng.usize(..STEADY_KEYS / stride) * stride;
        let mut key = format!("{}/steady/{n:03}", self.prefix).into_bytes();
        if n.is_multiple_of(50) {
            // Not UTF-8.
            key.extend([0xff, 0x00, n as u8 | 0x80]);
        }
        key
    }

    fn value(&mut self) -> Vec<u8> {
        let length = match self.rng.u32(0..1000) {
            0..5 => self.rng.usize(64 << 10..(64 << 10) + self.max_value),
            5..60 => self.rng.usize(8 << 10..64 << 10),
            60..250 => self.rng.usize(1000..8 << 10),
            _ => self.rng.usize(10..1000),
        };
        let length = length.min(self.max_value);
        // Noise and text: one compresses badly, the other well.
        let mut value = vec![b'x'; length];
        let noise = match self.rng.bool() {
            true => length,
            false => length / 8,
        };
        self.rng.fill(&mut value[..noise]);
        value
    }
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
