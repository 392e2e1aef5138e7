//! Writes to an etcd at random: every kind of operation, transactions, leases, compactions.

use super::etcd::Etcd;
use etcd_client::{Client, DeleteOptions, KvClient, LeaseGrantOptions, PutOptions, Txn, TxnOp};
use fastrand::Rng;
use std::collections::{BTreeMap, BTreeSet};

/// Writes to etcd at random, and knows which keys are alive and under which lease.
pub struct Writer {
    pub kv: KvClient,
    pub client: Client,
    pub rng: Rng,
    pub max_value: usize,
    pub keys: Vec<Vec<u8>>,
    pub leases: Vec<i64>,
    pub live: BTreeMap<Vec<u8>, i64>,
    pub revision: i64,
    /// Revisions that left tombstones.
    pub deletions: Vec<i64>,
}

impl Writer {
    pub async fn new(etcd: &Etcd, seed: u64, max_value: usize) -> Self {
        let mut rng = Rng::with_seed(seed);
        let keys = key_set(&mut rng);
        Self {
            kv: etcd.kv().await,
            client: etcd.client().await,
            rng,
            max_value,
            keys,
            leases: Vec::new(),
            live: BTreeMap::new(),
            revision: etcd.revision().await,
            deletions: Vec::new(),
        }
    }

    /// Runs one operation. Some change nothing, such as deleting a key that does not exist.
    pub async fn step(&mut self) {
        match self.rng.u32(0..100) {
            0..50 => self.put().await,
            50..60 => {
                let key = self.any_key();
                self.delete(key.clone(), after(&key)).await;
            }
            60..64 => {
                let (start, end) = self.range();
                self.delete(start, end).await;
            }
            64..80 => {
                let count = if self.rng.u32(0..12) == 0 {
                    // More changes than one byte of the sub revision can count.
                    self.rng.usize(257..400)
                } else {
                    self.rng.usize(2..40)
                };
                self.txn(count).await;
            }
            80..90 => self.grant().await,
            90..94 => self.revoke().await,
            _ => self.rewrite().await,
        }
    }

    /// Ends the history: often with a range deletion, sometimes of all keys. More changes follow until there
    /// are `at_least` revisions.
    pub async fn finish(&mut self, at_least: i64) {
        while self.revision < at_least {
            self.put().await;
        }
        match self.rng.u32(0..8) {
            0 => self.delete(vec![0], Vec::new()).await,
            1..5 => {
                let (start, end) = self.range();
                self.delete(start, end).await;
            }
            _ => {}
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

    pub async fn put(&mut self) {
        let key = self.any_key();
        let value = self.value();
        let lease = self.any_lease();
        let options = PutOptions::new().with_lease(lease);
        let done = self.kv.put(key.clone(), value, Some(options)).await;
        self.live.insert(key, lease);
        self.moved_to(done.expect("a put").header());
    }

    /// Puts a key again: with its old value, its old lease, another lease, or none.
    pub async fn rewrite(&mut self) {
        let Some((key, lease)) = self.any_live() else {
            return;
        };
        let (value, options, lease) = match self.rng.u32(0..4) {
            0 => (self.value(), PutOptions::new().with_ignore_lease(), lease),
            1 => (self.value(), PutOptions::new(), 0),
            _ => {
                let lease = self.any_lease();
                let options = PutOptions::new().with_ignore_value().with_lease(lease);
                (Vec::new(), options, lease)
            }
        };
        let done = self.kv.put(key.clone(), value, Some(options)).await;
        self.live.insert(key, lease);
        self.moved_to(done.expect("a put of a live key").header());
    }

    pub async fn delete(&mut self, start: Vec<u8>, end: Vec<u8>) {
        let options = DeleteOptions::new().with_range(if end.is_empty() {
            // To the end of all keys.
            vec![0]
        } else {
            end.clone()
        });
        let done = self.kv.delete(start.clone(), Some(options)).await;
        let done = done.expect("a deletion");
        let gone = self.forget(&start, &end);
        assert_eq!(done.deleted(), gone as i64, "what was alive in the range");
        if gone > 0 {
            self.deletions.push(self.revision + 1);
        }
        self.moved_to(done.header());
    }

    pub async fn txn(&mut self, count: usize) {
        let mut ops = Vec::new();
        let mut deleted = 0;
        // etcd refuses a put into a range that the same transaction deletes.
        let range = (self.rng.u32(0..3) == 0).then(|| self.range());
        let mut used = BTreeSet::new();
        let mut puts = Vec::new();
        for _ in 0..count {
            let key = self.any_key();
            let hit = range
                .as_ref()
                .is_some_and(|(start, end)| &key >= start && (end.is_empty() || &key < end));
            if hit || !used.insert(key.clone()) {
                continue;
            }
            if self.rng.u32(0..4) == 0 {
                deleted += self.forget(&key, &after(&key));
                ops.push(TxnOp::delete(key, None));
            } else {
                let value = self.short_value();
                let lease = self.any_lease();
                let options = PutOptions::new().with_lease(lease);
                ops.push(TxnOp::put(key.clone(), value, Some(options)));
                puts.push((key, lease));
            }
        }
        if let Some((start, end)) = range {
            deleted += self.forget(&start, &end);
            let options = DeleteOptions::new().with_range(end);
            let at = self.rng.usize(..=ops.len());
            ops.insert(at, TxnOp::delete(start, Some(options)));
        }
        self.live.extend(puts);
        if deleted > 0 {
            self.deletions.push(self.revision + 1);
        }
        let done = self.kv.txn(Txn::new().and_then(ops)).await;
        self.moved_to(done.expect("a transaction").header());
    }

    pub async fn grant(&mut self) {
        // A lease that does not expire during the test, with an ID that no double can represent.
        let id = self.rng.i64(1..=i64::MAX);
        let options = LeaseGrantOptions::new().with_id(id);
        let done = self.client.lease_grant(100_000, Some(options)).await;
        self.leases.push(id);
        self.moved_to(done.expect("a lease").header());
    }

    /// Revokes a lease. Its keys are deleted in one revision.
    pub async fn revoke(&mut self) {
        if self.leases.is_empty() {
            return;
        }
        let id = self.leases.swap_remove(self.rng.usize(..self.leases.len()));
        let before = self.live.len();
        self.live.retain(|_, lease| *lease != id);
        if self.live.len() < before {
            self.deletions.push(self.revision + 1);
        }
        let done = self.client.lease_revoke(id).await;
        self.moved_to(done.expect("a lease's end").header());
    }

    pub fn moved_to(&mut self, header: Option<&etcd_client::ResponseHeader>) {
        let revision = header.expect("a header").revision();
        assert!(
            (self.revision..=self.revision + 1).contains(&revision),
            "somebody else writes to this etcd: revision {revision} after {}",
            self.revision
        );
        self.revision = revision;
    }

    /// Removes a range from the live keys and returns how many keys it had.
    pub fn forget(&mut self, start: &[u8], end: &[u8]) -> usize {
        let before = self.live.len();
        self.live
            .retain(|key, _| key.as_slice() < start || !end.is_empty() && key.as_slice() >= end);
        before - self.live.len()
    }

    /// Returns a key; half the time one of a few keys, which therefore change often.
    pub fn any_key(&mut self) -> Vec<u8> {
        let stride = if self.rng.bool() { 12 } else { 1 };
        let at = self.rng.usize(..self.keys.len() / stride) * stride;
        self.keys[at].clone()
    }

    pub fn any_live(&mut self) -> Option<(Vec<u8>, i64)> {
        let at = self.rng.usize(..self.live.len().max(1));
        let (key, lease) = self.live.iter().nth(at)?;
        Some((key.clone(), *lease))
    }

    /// Returns a lease, or most often none.
    pub fn any_lease(&mut self) -> i64 {
        if self.rng.u32(0..4) > 0 {
            return 0;
        }
        self.rng.choice(&self.leases).copied().unwrap_or(0)
    }

    /// Returns a range of up to a dozen known keys, without its end.
    pub fn range(&mut self) -> (Vec<u8>, Vec<u8>) {
        let start = self.rng.usize(..self.keys.len() - 1);
        let end = (start + self.rng.usize(1..=12)).min(self.keys.len() - 1);
        (self.keys[start].clone(), self.keys[end].clone())
    }

    pub fn value(&mut self) -> Vec<u8> {
        let length = match self.rng.u32(0..100) {
            0..3 => self.rng.usize(0..=self.max_value),
            3..20 => self.rng.usize(0..=self.max_value.min(8 << 10)),
            _ => return self.short_value(),
        };
        self.bytes(length)
    }

    pub fn short_value(&mut self) -> Vec<u8> {
        let length = match self.rng.u32(0..10) {
            0 => 0,
            _ => self.rng.usize(0..=self.max_value.min(200)),
        };
        self.bytes(length)
    }

    /// Returns noise or text: one compresses badly, the other well.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
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

/// Returns the keys that a history uses, sorted.
pub fn key_set(rng: &mut Rng) -> Vec<Vec<u8>> {
    // Includes the first and the last key that etcd accepts.
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
    keys.into_iter().collect()
}

/// Returns the end of the range that holds only this key.
pub fn after(key: &[u8]) -> Vec<u8> {
    [key, &[0]].concat()
}
