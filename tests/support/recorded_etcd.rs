//! An etcd for a test, a watch that records all its changes, and an empty store to back it up to.

use super::scratch;
use std::path::Path;

use etcd_client::{DeleteOptions, Txn, TxnOp};
use tempfile::TempDir;
use tokio::runtime::{Handle, Runtime};

use super::etcd::{Etcd, EtcdOptions, EtcdVersion};
use super::follower::{self, Ended, Follower};
use super::history::{Compression, Recorder, Recording};
use super::process::free_port;
use super::restorable::{Checked, Prefix};
use super::truth::Truth;

pub struct RecordedEtcd {
    pub seed: u64,
    pub truth: Truth,
    pub etcd: Etcd,
    pub prefix: Prefix,
    options: EtcdOptions,
    folder: TempDir,
    handle: Handle,
}

/// Runs a test inside a runtime with an etcd of its own.
pub fn with_etcd(version: EtcdVersion, test: impl FnOnce(&mut RecordedEtcd)) {
    with_options(version, &EtcdOptions::default(), test);
}

pub fn with_options(
    version: EtcdVersion,
    options: &EtcdOptions,
    test: impl FnOnce(&mut RecordedEtcd),
) {
    let runtime = Runtime::new().expect("a runtime");
    let _within = runtime.enter();
    let folder = scratch::folder_named("world-").expect("a folder");
    // A restart uses the same ports.
    let options = EtcdOptions {
        ports: Some((free_port(), free_port())),
        ..options.clone()
    };
    let etcd = Etcd::start_with(version, &folder.path().join("data"), &options);
    let mut world = RecordedEtcd {
        seed: super::seed(),
        truth: Truth::start(&[etcd.endpoint().to_owned()]),
        prefix: Prefix::local(&folder.path().join("store")),
        etcd,
        options,
        folder,
        handle: runtime.handle().clone(),
    };
    test(&mut world);
}

impl RecordedEtcd {
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn endpoints(&self) -> Vec<String> {
        vec![self.etcd.endpoint().to_owned()]
    }

    /// Returns the value of `--initial-cluster`: this member alone.
    pub fn initial_cluster(&self) -> String {
        let (_, peer) = self.options.ports.expect("ports");
        format!("{}=http://127.0.0.1:{peer}", self.options.name)
    }

    /// Waits for a future.
    pub fn wait<F: Future>(&self, answer: F) -> F::Output {
        self.handle.block_on(answer)
    }

    /// Starts another etcd of the same version in a folder of this name.
    pub fn another(&self, name: &str) -> Etcd {
        let options = EtcdOptions {
            name: name.to_owned(),
            ..EtcdOptions::default()
        };
        Etcd::start_with(self.etcd.version(), &self.folder().join(name), &options)
    }

    /// Returns the cluster ID in the form of etcdctl.
    pub fn cluster_id(&self, etcd: &Etcd) -> String {
        let status = self.wait(async { etcd.client().await.status().await });
        let status = status.expect("a status");
        format!("{:x}", status.header().expect("a header").cluster_id())
    }

    pub fn revision(&self) -> i64 {
        self.wait(self.etcd.revision())
    }

    /// Puts a key and returns the revision.
    pub fn put(&self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> i64 {
        let put = async { self.etcd.kv().await.put(key, value, None).await };
        let done = self.wait(put).expect("a put");
        done.header().expect("a header").revision()
    }

    /// Puts `n` keys with values of `bytes` bytes and returns the revision.
    pub fn put_many(&self, prefix: &str, n: usize, bytes: usize) -> i64 {
        let value: Vec<u8> = (0..bytes).map(|i| (i * 7 % 251) as u8).collect();
        let put = async {
            let mut kv = self.etcd.kv().await;
            for i in 0..n {
                kv.put(format!("{prefix}{i:05}"), value.clone(), None)
                    .await
                    .expect("a put");
            }
        };
        self.wait(put);
        self.revision()
    }

    pub fn delete(&self, prefix: &str) -> i64 {
        let options = DeleteOptions::new().with_prefix();
        let delete = async { self.etcd.kv().await.delete(prefix, Some(options)).await };
        let done = self.wait(delete).expect("a deletion");
        assert!(done.deleted() > 0, "{prefix}");
        done.header().expect("a header").revision()
    }

    pub fn txn(&self, ops: Vec<TxnOp>) -> i64 {
        let txn = async { self.etcd.kv().await.txn(Txn::new().and_then(ops)).await };
        let done = self.wait(txn).expect("a transaction");
        done.header().expect("a header").revision()
    }

    /// Waits until the recording watch has seen `revision`, then compacts etcd: the watch could not see
    /// compacted changes any more.
    pub fn compact(&self, revision: i64) {
        self.truth.wait_for(revision);
        self.wait(self.etcd.compact(revision));
    }

    pub fn snapshot(&self, kind: &str, args: &[&str]) -> Ended {
        follower::snapshot(kind, &self.prefix, &self.endpoints(), args)
    }

    /// Saves a delta, which must succeed.
    #[track_caller]
    pub fn delta(&self, args: &[&str]) -> Ended {
        self.snapshot("delta", args).succeeded()
    }

    /// Changes keys, and saves a full and three deltas as etcd-backup-restore would write them.
    pub fn saved_by_another_tool(&self) -> Recording {
        let mut recorder = self.wait(Recorder::start(&self.etcd));
        self.put_many("/a/", 20, 100);
        self.wait(recorder.take_full(&self.etcd));
        let last = self.put_many("/a/", 40, 100);
        let mut rng = fastrand::Rng::with_seed(self.seed);
        let recording = self.wait(recorder.finish(last, &mut rng, 3));
        let folder = self.folder().join("store");
        recording.write_bucket(&folder, Compression::Gzip, 1_790_000_000);
        recording
    }

    /// Starts a follower and waits for its first full.
    #[track_caller]
    pub fn follow(&self, args: &[&str]) -> Follower {
        let mut follower = Follower::start(&self.prefix, &self.endpoints(), args);
        follower.wait_until("the first full", || !self.prefix.fulls().is_empty());
        follower
    }

    /// Asserts that the prefix holds this etcd's history up to `revision`, and the history of a former etcd up
    /// to `former.1`. Compares `samples` restorable revisions of each range with the record.
    #[track_caller]
    pub fn check_both_are_saved(
        &self,
        former: (&Truth, i64),
        revision: i64,
        samples: usize,
    ) -> Checked {
        let (first, saved) = former;
        let truths = [&self.truth, first];
        let checked = self
            .prefix
            .check_every_restorable(&truths, self.seed, samples);
        assert_eq!(checked.newest_of(0), revision, "{checked:?}");
        assert_eq!(checked.newest_of(1), saved, "{checked:?}");
        checked
    }

    /// Asserts that the backup reaches the current revision, and that sampled revisions restore as recorded.
    #[track_caller]
    pub fn check_all_is_saved(&self) -> Checked {
        let revision = self.revision();
        self.truth.wait_for(revision);
        let checked = self
            .prefix
            .check_every_restorable(&[&self.truth], self.seed, 6);
        assert_eq!(checked.newest_of(0), revision, "{checked:?}");
        checked
    }

    /// Stops etcd, calls `between` with the data directory, and starts etcd again with the same ports.
    pub fn restart(&mut self, between: impl FnOnce(&Path)) {
        let data_dir = self.etcd.data_dir().to_owned();
        self.etcd.end();
        between(&data_dir);
        self.etcd = Etcd::start_with(self.etcd.version(), &data_dir, &self.options);
    }
}
