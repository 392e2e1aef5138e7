//! Measures commands on local folders: the wide backup, two snapshotters, a year of small snapshots, and a
//! plain file.

use crate::measure::{Goal, MIB, Run, local_row, row};
use crate::support::etcd::EtcdVersion;
use crate::support::tools;
use crate::{Bench, Result, generate, in_scratch, published};
use chrono::{DateTime, SecondsFormat};
use generate::Shape;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

impl Bench {
    /// Prints the rows of the wide backup in a local folder.
    pub fn local(&self) -> Result<()> {
        let shape = self.wide();
        let (folder, memory_limit) = self.backup(&shape)?;
        let store = folder.to_str().ok_or("the path is not UTF-8")?;
        let (day, key) = (self.day_30(&shape)?, shape.key(17));
        let seconds = |s| vec![Goal::Seconds(s)];
        let works: [(&str, &[&str], Vec<Goal>); 9] = [
            (
                "compact",
                &["compact"],
                vec![Goal::Seconds(2.0), Goal::Anonymous(memory_limit)],
            ),
            (
                "restore to day 30",
                &["restore", "--time", &day],
                vec![Goal::Seconds(2.0), Goal::Anonymous(memory_limit)],
            ),
            (
                "verify checksums",
                &["verify", "--level", "checksums"],
                seconds(3.0),
            ),
            ("list", &["list"], vec![]),
            ("list --deep", &["list", "--deep"], seconds(3.0)),
            ("history of a key", &["history", &key], seconds(2.0)),
            (
                "get at day 30",
                &["get", &key, "--time", &day],
                seconds(1.0),
            ),
            ("gc, plan", &["gc", "--policy", "exponential"], vec![]),
            ("copy", &["copy"], seconds(8.0)),
        ];
        for (work, args, goals) in works {
            if !self.is_wanted(work) {
                continue;
            }
            let with_store = [args, &[store_flag(args), store]].concat();
            let run = self.measure_local(&folder, &with_store)?;
            local_row(&format!("wide: {work}"), &run, &goals);
        }
        Ok(())
    }

    /// Measures a command on a local store, and removes what it has written.
    pub fn measure_local(&self, folder: &Path, args: &[&str]) -> Result<Run> {
        Run::median(self.args.runs, |_| {
            let scratch = self.scratch()?;
            let mut command = self.command(args, &[]);
            let run = self.run(in_scratch(&mut command, args, scratch.path()))?;
            if let Some(snapshot) = published(args, &run) {
                fs::remove_file(folder.join("v2").join(snapshot))?;
            }
            Ok(run)
        })
    }

    /// Prints the rows of two snapshotters. Four times as many deltas may take 4.8 times as long: linear,
    /// with a tolerance of a fifth.
    pub fn overlap(&self) -> Result<()> {
        let mut fewer_deltas: Option<Run> = None;
        for deltas in [1_000, 4_000] {
            let deltas = self.scaled(deltas);
            let shape = Shape {
                name: "side-by-side",
                changes: deltas * 20,
                streams: 2,
                ..generate::WIDE
            };
            let (folder, memory_limit) = self.backup(&shape)?;
            let store = folder.to_str().ok_or("the path is not UTF-8")?;
            let run = self.measure_local(&folder, &["compact", "--store", store])?;
            let mut goals = vec![Goal::Anonymous(memory_limit)];
            if let Some(fewer) = &fewer_deltas {
                goals.push(Goal::Seconds(1.5));
                goals.push(Goal::Seconds(4.0 * 1.2 * fewer.seconds));
            }
            local_row(&format!("2 × {deltas} deltas: compact"), &run, &goals);
            fewer_deltas = Some(run);
        }
        Ok(())
    }

    /// Prints the rows of a year of small snapshots.
    pub fn year(&self) -> Result<()> {
        let (deltas, fulls) = (self.scaled(105_000), self.scaled(10_000));
        let folder = self.data.join(format!("year-{deltas}"));
        generate::small_snapshots(&folder, deltas, fulls)?;
        let store = folder.to_str().ok_or("the path is not UTF-8")?;
        let at = DateTime::from_timestamp(generate::END - deltas as i64 * 150 + 60, 0);
        let at = at
            .ok_or("a time")?
            .to_rfc3339_opts(SecondsFormat::Secs, true);
        let works: [(&str, &[&str]); 5] = [
            ("list", &["list"]),
            ("restore, plan", &["restore", "--dry-run", "--time", &at]),
            (
                "get --time",
                &["get", generate::SMALL_SNAPSHOTS_KEY, "--time", &at],
            ),
            ("gc, plan", &["gc", "--policy", "exponential"]),
            ("copy, plan", &["copy", "--dry-run"]),
        ];
        for (work, args) in works {
            if !self.is_wanted(work) {
                continue;
            }
            let args = [args, &[store_flag(args), store]].concat();
            let goals = [Goal::Seconds(5.0), Goal::Resident(256 * MIB)];
            local_row(
                &format!("a year: {work}"),
                &self.measure_local(&folder, &args)?,
                &goals,
            );
        }
        Ok(())
    }

    /// Prints the rows of a restore from a plain snapshot file: etcdutl's and deltafold's.
    pub fn plain(&self) -> Result<()> {
        let shape = Shape::plain_base("plain", self.scaled(105_000), 1_000..=3_000);
        let (folder, _) = self.backup(&shape)?;
        let mut entries = fs::read_dir(folder.join("v2"))?;
        let file = entries.next().ok_or("no full")??.path();
        let file = file.to_str().ok_or("the path is not UTF-8")?;
        let etcdutl = tools::etcdutl(EtcdVersion::V3_6);
        let etcdutl_run = Run::median(self.args.runs, |_| {
            let scratch = self.scratch()?;
            let mut command = Command::new(&etcdutl);
            command.args(["snapshot", "restore", file, "--data-dir"]);
            self.run(command.arg(scratch.path().join("member")))
        })?;
        let work = format!("plain file of {} MB", fs::metadata(file)?.len() / 1_000_000);
        let etcdutl_work = format!("{work}: etcdutl snapshot restore");
        local_row(&etcdutl_work, &etcdutl_run, &[]);
        let run = self.measure_local(&folder, &["restore", "--snapshot", file])?;
        let goals = [Goal::Plain(1.1, 0)];
        let work = format!("{work}: restore --snapshot");
        row(&work, "local", &run, &etcdutl_run, Duration::ZERO, &goals);
        Ok(())
    }
}

/// Returns the flag with which a command gets its store.
fn store_flag(args: &[&str]) -> &'static str {
    if args[0] == "copy" {
        "--from"
    } else {
        "--store"
    }
}
