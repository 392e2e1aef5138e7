//! Compares what a prefix says can be restored with what its source had.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use deltafold::backup::{Kind, SnapshotName};
use deltafold::mvcc::{KeepHistory, KeyRange, Revision};
use deltafold::ops::list;
use deltafold::prefix::Context;
use deltafold::prefix::open;
use deltafold::prefix::scan::{Depth, scan};
use deltafold::prefix::select::{At, StateRequest};
use deltafold::store;
use fastrand::Rng;
use tokio::runtime::Handle;

use super::minio::Minio;
use super::s3::S3;
use super::truth::{State, Truth};

/// A prefix in a store.
#[derive(Clone)]
pub struct Prefix {
    pub url: String,
    /// Environment variables for the program.
    pub env: Vec<(String, String)>,
    options: Vec<(String, String)>,
    handle: Handle,
}

/// The result of a comparison.
#[derive(Debug, Default)]
pub struct Checked {
    pub revisions: usize,
    pub timelines: BTreeMap<String, Line>,
    /// The reasons of `list --deep`.
    pub problems: BTreeSet<&'static str>,
}

/// A timeline.
#[derive(Debug, Default)]
pub struct Line {
    /// The restorable ranges of revisions.
    pub ranges: Vec<(i64, i64)>,
    /// By the index of a truth: the newest restorable revision whose state is as that truth recorded it.
    pub newest: BTreeMap<usize, i64>,
}

impl Checked {
    /// Returns the newest restorable revision of a truth.
    pub fn newest_of(&self, truth: usize) -> i64 {
        let newest = self.timelines.values().filter_map(|l| l.newest.get(&truth));
        newest.max().copied().unwrap_or(0)
    }

    /// Returns all restorable ranges.
    pub fn ranges(&self) -> Vec<(i64, i64)> {
        let ranges = self.timelines.values().flat_map(|l| &l.ranges);
        ranges.copied().collect()
    }
}

impl Prefix {
    /// A prefix in a new local folder. Call it inside a runtime, like the next ones.
    pub fn local(folder: &Path) -> Self {
        std::fs::create_dir_all(folder).expect("make the prefix's folder");
        Self {
            url: folder.to_str().expect("a path in UTF-8").to_owned(),
            env: Vec::new(),
            options: Vec::new(),
            handle: Handle::current(),
        }
    }

    /// A prefix in an existing S3 bucket.
    pub fn s3(s3: &S3, bucket: &str, prefix: &str) -> Self {
        let env = s3.env();
        let setting = |(name, value): &(String, String)| (name.to_lowercase(), value.clone());
        Self {
            url: format!("s3://{bucket}/{prefix}"),
            options: env.iter().map(setting).collect(),
            env,
            handle: Handle::current(),
        }
    }

    /// A prefix in an existing bucket of MinIO.
    pub fn minio(minio: &Minio, bucket: &str, prefix: &str) -> Self {
        Self::s3(&minio.s3(), bucket, prefix)
    }

    fn context(&self) -> Context {
        let store = store::open(&self.url, &self.options, self.handle.clone());
        super::context(store.unwrap_or_else(|e| panic!("{}: {e}", self.url)), 1)
    }

    /// Returns the names in `v2`, in order of creation. Blocks, like the functions below: do not call it on an
    /// async thread.
    pub fn names(&self) -> Vec<SnapshotName> {
        let listed = self.context().store.list(&["v2"]);
        let mut names: Vec<SnapshotName> = listed
            .unwrap_or_else(|e| panic!("{}: {e}", self.url))
            .iter()
            .filter_map(|(path, _)| path.rsplit('/').next()?.parse().ok())
            .collect();
        names.sort_by_key(|n| (n.created, n.last, n.kind == Kind::Full));
        names
    }

    pub fn fulls(&self) -> Vec<SnapshotName> {
        let mut names = self.names();
        names.retain(|n| n.kind == Kind::Full);
        names
    }

    pub fn deltas(&self) -> Vec<SnapshotName> {
        let mut names = self.names();
        names.retain(|n| n.kind == Kind::Incr);
        names
    }

    /// Returns the newest revision among the names, or 0 if there are none.
    pub fn last_saved(&self) -> i64 {
        let lasts = self.names().into_iter().map(|n| n.last.0);
        lasts.max().unwrap_or(0)
    }

    /// Returns the state of a timeline at a revision.
    pub fn state_at(&self, timeline: &str, revision: i64) -> State {
        let ctx = self.context();
        let request = StateRequest {
            at: At::Revision(Revision(revision)),
            timeline: Some(timeline.to_owned()),
            ..StateRequest::default()
        };
        let scan = scan(&ctx, Depth::All).unwrap_or_else(|e| panic!("{timeline}: {e}"));
        let source = open::State::open(&ctx, &scan, &request);
        let source = source.unwrap_or_else(|e| panic!("{revision} of {timeline}: {e}"));
        let folded = state(&ctx, &source);
        folded
            .unwrap_or_else(|e| panic!("{revision} of {timeline}: {e}"))
            .0
    }

    /// Folds the prefix at revisions that it lists as restorable: both ends of each range, the ends of all
    /// snapshots, and `samples` more in each range. Each state must be what one of the truths recorded. Panics
    /// if one is not, or if nothing is restorable.
    pub fn check_every_restorable(&self, truths: &[&Truth], seed: u64, samples: usize) -> Checked {
        let ctx = self.context();
        let mut rng = Rng::with_seed(seed);
        let listed = list::run(&ctx, list::Options { deep: true });
        let listed = listed.unwrap_or_else(|e| panic!("seed {seed}: list --deep: {e}"));
        assert!(!listed.restorable.is_empty(), "seed {seed}: {listed:#?}");
        let mut checked = Checked {
            problems: listed.problems.iter().map(|p| p.reason).collect(),
            ..Checked::default()
        };
        let mut wanted: BTreeMap<String, BTreeSet<i64>> = BTreeMap::new();
        for r in &listed.restorable {
            let (first, last) = (r.first_revision.0, r.last_revision.0);
            let within = |revision: &i64| (first..=last).contains(revision);
            let revisions = wanted.entry(r.timeline.clone()).or_default();
            revisions.extend([first, last]);
            let ends = listed.snapshots.iter().filter(|s| !s.excluded);
            revisions.extend(ends.map(|s| s.last_revision.0).filter(within));
            revisions.extend((0..samples).map(|_| rng.i64(first..=last)));
            let line = checked.timelines.entry(r.timeline.clone()).or_default();
            line.ranges.push((first, last));
        }
        let scan = scan(&ctx, Depth::All).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        for (timeline, revisions) in wanted {
            let entry = checked.timelines.entry(timeline.clone()).or_default();
            for &revision in &revisions {
                let what = format!("seed {seed}: revision {revision} of timeline {timeline}");
                let request = StateRequest {
                    at: At::Revision(Revision(revision)),
                    timeline: Some(timeline.clone()),
                    ..StateRequest::default()
                };
                let source = open::State::open(&ctx, &scan, &request)
                    .unwrap_or_else(|e| panic!("{what} is said to be restorable: {e}"));
                let (ours, records) = state(&ctx, &source)
                    .unwrap_or_else(|e| panic!("{what} is said to be restorable: {e}"));
                let is_of = |truth: &Truth| {
                    let until = truth.revision();
                    revision <= until && ours == truth.at(&BTreeSet::from([revision]))[&revision]
                };
                let of: BTreeSet<usize> = (0..truths.len()).filter(|&n| is_of(truths[n])).collect();
                if of.is_empty() {
                    for (n, truth) in truths.iter().enumerate() {
                        println!("{what}, against truth {n}:");
                        for line in truth.differences(revision, &records) {
                            println!("    {line}");
                        }
                    }
                    panic!(
                        "{what} is not what the source had, from {}",
                        source.base_name()
                    );
                }
                for n in of {
                    let newest = entry.newest.entry(n).or_default();
                    *newest = revision.max(*newest);
                }
                checked.revisions += 1;
            }
        }
        println!("seed {seed}: {checked:?}");
        checked
    }
}

type Records = Vec<(deltafold::mvcc::RecordKey, Vec<u8>)>;

/// Folds at a revision, compacted there. Returns the HashKV that etcd would give, and the live records.
fn state(ctx: &Context, source: &open::State) -> deltafold::Result<(State, Records)> {
    let compact = source.compact_revision(ctx, KeepHistory::Latest)?;
    let (fold, _) = source.fold(ctx, compact, KeyRange::All, false)?;
    let mut records = Vec::new();
    let hash = fold.finish(&source.db, |r| {
        if !r.rk.tombstone {
            records.push((r.rk, r.record.to_vec()));
        }
        Ok(())
    })?;
    let state = State {
        hash: hash.hash,
        live_keys: hash.live_keys,
    };
    Ok((state, records))
}
