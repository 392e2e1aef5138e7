//! Compactions that are killed at random moments, then a rerun: the inputs stay, the result is right or not
//! there, and nothing is left behind.

use crate::support::kill_times::KillTimes;
use crate::support::made_backups::{BASE, Bucket, LAST, Objects, objects_of};
use crate::support::minio::Minio;
use crate::support::{deltafold, run_json, seed};
use object_store::ObjectStoreExt;
use object_store::aws::AmazonS3;
use object_store::path::Path;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::runtime::Runtime;

const STAGING: &str = "deltafold-staging/";

/// Returns a store whose result is uploaded in two parts.
fn bucket() -> Bucket {
    let bucket = small();
    bucket.noise_delta(18);
    bucket
}

/// Returns a store whose result is put by one request if possible.
fn small() -> Bucket {
    let bucket = Bucket::with_base();
    bucket.delta(BASE + 1, LAST, 6);
    bucket
}

/// The place of a store.
enum Site {
    Folder(Bucket),
    Server {
        rt: Runtime,
        minio: Minio,
        store: Arc<AmazonS3>,
    },
}

impl Site {
    fn minio(bucket: &Bucket) -> Self {
        let rt = Runtime::new().unwrap();
        let minio = Minio::start();
        rt.block_on(minio.create_bucket("backups"));
        let store = minio.store("backups");
        for (path, bytes) in bucket.objects() {
            let path = Path::from(path);
            rt.block_on(store.put(&path, bytes.into())).unwrap();
        }
        Site::Server { rt, minio, store }
    }

    fn command(&self) -> Command {
        let mut c = deltafold();
        c.args(["compact", "--compression", "none", "--output", "json"]);
        match self {
            Site::Folder(bucket) => c.arg("--store").arg(bucket.path()),
            Site::Server { minio, .. } => c.args(["--store", "s3://backups"]).envs(minio.env()),
        };
        c
    }

    fn objects(&self) -> Objects {
        match self {
            Site::Folder(bucket) => bucket.objects(),
            Site::Server { rt, store, .. } => rt.block_on(objects_of(store)),
        }
    }

    fn remove(&self, path: &str) {
        match self {
            Site::Folder(bucket) => fs::remove_file(bucket.path().join(path)).unwrap(),
            Site::Server { rt, store, .. } => rt.block_on(store.delete(&Path::from(path))).unwrap(),
        }
    }

    /// Waits for the moment to kill a run: any moment, or one during the upload if that is visible.
    fn moment(&self, job: &mut Child, rng: &mut fastrand::Rng, whole: Duration) {
        let late = rng.bool();
        let mut delay = whole.mul_f64(rng.f64() * 1.1);
        match self {
            Site::Folder(bucket) if late => {
                let staging = bucket.path().join(STAGING);
                while !staging.exists() && job.try_wait().unwrap().is_none() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                delay /= 4;
            }
            Site::Server { .. } if late => delay = delay / 2 + whole / 2,
            _ => {}
        }
        std::thread::sleep(delay);
    }
}

/// Kills runs; checks after each what is there, and runs again.
fn killed_and_run_again(site: &Site, rounds: usize, signal: Signal) {
    let mut rng = fastrand::Rng::with_seed(seed());
    let inputs = site.objects();
    let started = Instant::now();
    let (code, clean, stderr) = run_json(&mut site.command());
    let mut moments = KillTimes::of(started.elapsed());
    assert_eq!(code, 0, "{stderr}");
    let path = format!("v2/{}", clean["snapshot"].as_str().unwrap());
    let with_result = site.objects();
    assert_eq!(with_result.len(), inputs.len() + 1);
    site.remove(&path);

    let mut debris = 0;
    for round in 0..rounds {
        let mut command = site.command();
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut job = command.spawn().unwrap();
        site.moment(&mut job, &mut rng, moments.whole());
        // Not waited for yet, so the pid is still this child's.
        let _ = kill_process(Pid::from_child(&job), signal);
        let ended = job.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&ended.stderr);
        let what = format!("round {round}: {} {stderr}", ended.status);
        let by_signal = ended.status.signal() == Some(signal.as_raw());
        moments.note(ended.status);
        match ended.status.code() {
            // It had finished.
            Some(0) => {}
            Some(143) if signal == Signal::TERM => {}
            // SIGTERM kills it only before it has set up its handler.
            _ => assert!(by_signal, "{what}"),
        }

        let (staging, left): (Objects, Objects) = site
            .objects()
            .into_iter()
            .partition(|(path, _)| path.starts_with(STAGING));
        debris += usize::from(!staging.is_empty());
        assert!(
            left == inputs || left == with_result,
            "{what}: {:?}",
            left.keys()
        );
        if signal == Signal::TERM {
            assert!(staging.is_empty() || !ended.status.success(), "{what}");
        }

        let (code, again, stderr) = run_json(&mut site.command());
        assert_eq!(code, 0, "{what}, then {stderr}");
        assert_eq!(again["hash_kv"], clean["hash_kv"], "{what}");
        let status = if left == inputs {
            "Succeeded"
        } else {
            "NothingToDo"
        };
        assert_eq!(again["status"], Value::from(status), "{what}");
        let found = site.objects();
        assert!(found == with_result, "{what}: {:?}", found.keys());
        if let Site::Folder(bucket) = site {
            assert!(!bucket.path().join(STAGING).exists(), "{what}");
        }
        site.remove(&path);
    }
    let killed = moments.killed();
    println!("{killed} of {rounds} jobs were killed, {debris} left something in staging");
    assert!(killed * 4 > rounds, "hardly a job was killed");
    if signal == Signal::KILL && matches!(site, Site::Folder(_)) {
        assert!(debris > 0, "no job was killed while it uploaded");
    }
}

#[test]
fn what_the_next_run_removes_and_what_not() {
    let site = Site::Folder(bucket());
    let Site::Folder(bucket) = &site else {
        unreachable!()
    };
    let staging = bucket.path().join(STAGING);
    let names = || {
        let mut names: Vec<String> = fs::read_dir(&staging)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    // Killed as soon as there is an object.
    let mut job = site.command().stderr(Stdio::null()).spawn().unwrap();
    while !staging.exists() || names().is_empty() {
        std::thread::sleep(Duration::from_millis(1));
    }
    job.kill().unwrap();
    job.wait().unwrap();
    let killed = names();
    assert_eq!(killed.len(), 1, "{killed:?}");
    // The same from another machine, whose processes cannot be seen.
    let holder = killed[0].rsplit('.').nth(3).unwrap();
    let elsewhere = killed[0].replace(holder, "0123456789abcdef");
    let (fresh, old) = (elsewhere.clone(), format!("{elsewhere}9"));
    for (name, hours) in [(&fresh, 23), (&old, 25)] {
        let file = fs::File::create(staging.join(name)).unwrap();
        let age = Duration::from_secs(hours * 3600);
        file.set_modified(SystemTime::now() - age).unwrap();
    }

    let before = names();
    assert_eq!(before.len(), 3);
    for look in [&["compact", "--dry-run"][..], &["list", "--deep"]] {
        let (code, _, stderr) = run_json(
            deltafold()
                .args(look)
                .args(["--output", "json", "--store"])
                .arg(bucket.path()),
        );
        assert_eq!(code, 0, "{stderr}");
        assert_eq!(names(), before, "{look:?}");
    }
    let (code, _, stderr) = run_json(&mut site.command());
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(names(), [fresh], "{stderr}");
}

#[test]
fn sigterm_in_a_local_folder() {
    killed_and_run_again(&Site::Folder(bucket()), 40, Signal::TERM);
}

#[test]
fn sigkill_in_a_local_folder() {
    killed_and_run_again(&Site::Folder(bucket()), 48, Signal::KILL);
}

#[test]
fn sigterm_on_minio() {
    killed_and_run_again(&Site::minio(&bucket()), 20, Signal::TERM);
}

#[test]
fn sigkill_on_minio() {
    killed_and_run_again(&Site::minio(&bucket()), 24, Signal::KILL);
}

#[test]
fn sigterm_on_minio_while_the_result_is_put_at_once() {
    killed_and_run_again(&Site::minio(&small()), 20, Signal::TERM);
}

#[test]
fn sigkill_on_minio_while_the_result_is_put_at_once() {
    killed_and_run_again(&Site::minio(&small()), 24, Signal::KILL);
}
