//! Copies that are killed at random moments, then a rerun: nothing is wrong in the target, and the rerun completes the copy.

use super::copy_faults::{STAGING, large, small, wide};
use super::copy_large_plans::gap;
use crate::support::conformance::runtime;
use crate::support::kill_times::KillTimes;
use crate::support::made_backups::{Bucket, Objects, objects_in, objects_of};
use crate::support::minio::Minio;
use crate::support::orphan_deltas::{baseless, catalog, without_full};
use crate::support::scratch;
use crate::support::{deltafold, run_json, seed};
use rustix::process::{Pid, Signal, kill_process};
use std::process::Stdio;
use std::time::Instant;

/// Kills copies at random moments; nothing is wrong afterwards, and a rerun completes the copy.
fn killed_and_run_again(rounds: usize, signal: Signal, minio: bool) {
    let mut objects = small();
    for (path, bytes) in large() {
        objects.insert(
            path.replace("-1000", "-2000").replace("-1001", "-2001"),
            bytes,
        );
    }
    killed_copying(&objects, rounds, signal, minio, |left| {
        assert_eq!(baseless(&catalog(left)), [""; 0]);
    });
}

fn killed_copying(
    objects: &Objects,
    rounds: usize,
    signal: Signal,
    minio: bool,
    check: impl Fn(&[String]),
) {
    let mut rng = fastrand::Rng::with_seed(seed());
    let source = Bucket::of(objects);
    let rt = runtime();
    let server = minio.then(Minio::start);
    let mut moments: Option<KillTimes> = None;
    for round in 0..rounds {
        let folder = scratch::folder_named("killed-").unwrap();
        let bucket = format!("target-{round}");
        let command = || {
            let mut c = deltafold();
            c.args(["copy", "--output", "json", "--parallel", "3", "--from"])
                .arg(source.path())
                .arg("--to");
            match &server {
                Some(minio) => c.arg(format!("s3://{bucket}")).envs(minio.env()),
                None => c.arg(folder.path()),
            };
            c
        };
        let there = || match &server {
            Some(minio) => rt.block_on(objects_of(&minio.store(&bucket))),
            None => objects_in(folder.path()),
        };
        if let Some(minio) = &server {
            rt.block_on(minio.create_bucket(&bucket));
        }
        let started = Instant::now();
        if let Some(moments) = &mut moments {
            let mut copy = command()
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            std::thread::sleep(moments.whole().mul_f64(rng.f64() * 1.1));
            // Not waited for yet, so the pid is still this child's.
            let _ = kill_process(Pid::from_child(&copy), signal);
            moments.note(copy.wait().unwrap());
        }
        let left = there();
        for (path, bytes) in left.iter().filter(|(p, _)| !p.starts_with(STAGING)) {
            // A local file that is being written has a temporary name.
            assert!(
                path.contains('#') || objects.get(path) == Some(bytes),
                "{round}: {path}"
            );
        }
        check(&left.keys().cloned().collect::<Vec<_>>());
        let (code, again, stderr) = run_json(&mut command());
        assert_eq!(
            (code, &again["failed"]),
            (0, &0.into()),
            "{round}: {stderr}"
        );
        let now = there();
        assert_eq!(
            now.keys().collect::<Vec<_>>(),
            objects.keys().collect::<Vec<_>>(),
            "{round}"
        );
        assert!(now == *objects, "{round}: contents differ");
        moments.get_or_insert_with(|| KillTimes::of(started.elapsed()));
    }
    let killed = moments.map_or(0, |m| m.killed());
    assert!(killed > rounds / 4, "{killed} of {rounds} were killed");
}

#[test]
fn sigkill_and_a_rerun() {
    killed_and_run_again(40, Signal::KILL, false);
}

#[test]
fn sigkill_and_a_rerun_on_a_server() {
    killed_and_run_again(15, Signal::KILL, true);
}

#[test]
fn sigterm_and_a_rerun() {
    killed_and_run_again(15, Signal::TERM, false);
}

#[test]
fn sigkill_in_a_large_plan_and_a_rerun() {
    killed_copying(&wide(), 20, Signal::KILL, false, |left| {
        assert_eq!(gap(left).0, 0, "a gap in a folder");
        assert_eq!(without_full(&catalog(left)), [""; 0]);
    });
}

#[test]
fn sigkill_in_a_large_plan_and_a_rerun_on_a_server() {
    killed_copying(&wide(), 20, Signal::KILL, true, |left| {
        assert_eq!(without_full(&catalog(left)), [""; 0]);
        let (missing, _) = gap(left);
        assert!(missing < 32, "{missing} are missing before the last");
    });
}
