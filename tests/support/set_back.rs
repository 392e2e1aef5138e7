//! An etcd that is set back: restored to an older state, so that revisions repeat with other content.

use super::copy_dir;
use super::recorded_etcd::RecordedEtcd;
use super::truth::Truth;
use super::{deltafold, run_json};
use std::fs;
use std::path::PathBuf;

/// A copy of etcd's data directory.
pub struct Checkpoint {
    folder: PathBuf,
    pub revision: i64,
}

impl RecordedEtcd {
    /// Copies the data directory. etcd restarts.
    pub fn checkpoint(&mut self) -> Checkpoint {
        let revision = self.revision();
        let folder = self
            .folder()
            .join(format!("checkpoint-{revision}-{}", fastrand::u64(..)));
        self.restart(|data_dir| copy_dir(data_dir, &folder));
        Checkpoint { folder, revision }
    }

    /// Puts a copy of the data directory in its place. `of` is the record of the history that the copy is of; `None` means
    /// that of now. Returns the record of the history that was left.
    pub fn set_back_to(&mut self, checkpoint: &Checkpoint, of: Option<&Truth>) -> Truth {
        let kept = self.truth_until_now();
        self.restart(|data_dir| {
            fs::remove_dir_all(data_dir).unwrap();
            copy_dir(&checkpoint.folder, data_dir);
        });
        let endpoints = self.endpoints();
        self.truth = of
            .unwrap_or(&kept)
            .forked_at(checkpoint.revision, &endpoints);
        kept
    }

    /// Restores a state of the prefix into the data directory, as an operator does. `of` is the record of the history
    /// that has this state; `None` means that of now. Returns the record of the history that was left.
    pub fn restored_to(
        &mut self,
        revision: i64,
        timeline: Option<&str>,
        of: Option<&Truth>,
    ) -> Truth {
        let kept = self.truth_until_now();
        let (prefix, cluster) = (self.prefix.clone(), self.initial_cluster());
        self.restart(|data_dir| {
            fs::remove_dir_all(data_dir).unwrap();
            let mut restore = deltafold();
            restore
                .args([
                    "restore",
                    "--output",
                    "json",
                    "--store",
                    &prefix.url,
                    "--data-dir",
                ])
                .arg(data_dir)
                .args(["--revision", &revision.to_string()])
                .args(timeline.iter().flat_map(|id| ["--timeline", id]))
                .args(["--initial-cluster", &cluster])
                .args([
                    "--initial-advertise-peer-urls",
                    cluster.split_once('=').unwrap().1,
                ])
                .envs(prefix.env.iter().map(|(name, value)| (name, value)));
            let (code, json, log) = run_json(&mut restore);
            assert_eq!(code, 0, "{json}\n{log}");
        });
        let endpoints = self.endpoints();
        self.truth = of.unwrap_or(&kept).forked_at(revision, &endpoints);
        kept
    }

    /// etcd starts empty. Returns the record of the history that was lost.
    pub fn wiped(&mut self) -> Truth {
        let kept = self.truth_until_now();
        self.restart(|data_dir| fs::remove_dir_all(data_dir).unwrap());
        self.truth = Truth::start(&self.endpoints());
        kept
    }

    /// Ends the record of the present history once it is complete, and puts an empty one in its place.
    fn truth_until_now(&mut self) -> Truth {
        let revision = self.revision();
        self.truth.wait_for(revision);
        self.truth.end();
        let nothing = self.truth.forked_at(0, &[]);
        std::mem::replace(&mut self.truth, nothing)
    }
}
