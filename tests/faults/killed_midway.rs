//! Compactions that are killed at each request or at random moments, then a rerun: the inputs stay, and the result is right or
//! not there.

use crate::support::killed::{self, Ended};
use crate::support::made_backups::{BASE, Bucket, LAST, Objects, objects_of};
use crate::support::minio::Minio;
use crate::support::{deltafold, run_json};
use object_store::ObjectStoreExt;
use object_store::aws::AmazonS3;
use object_store::path::Path;
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
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

    /// Returns a compaction of this store; a server is reached at `url`.
    fn command_at(&self, url: &str) -> Command {
        let mut c = deltafold();
        c.args(["compact", "--compression", "none", "--output", "json"]);
        match self {
            Site::Folder(bucket) => c.arg("--store").arg(bucket.path()),
            Site::Server { minio, .. } => c
                .args(["--store", "s3://backups"])
                .envs(minio.env())
                .env("AWS_ENDPOINT_URL", url),
        };
        c
    }

    fn command(&self) -> Command {
        let url = match self {
            Site::Folder(_) => "",
            Site::Server { minio, .. } => minio.endpoint(),
        };
        self.command_at(url)
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
}

/// Ends runs by a signal; checks after each what is there, and runs again.
fn killed_and_run_again(site: &Site, rounds: usize, signal: Signal) {
    let inputs = site.objects();
    let started = Instant::now();
    let (code, clean, stderr) = run_json(&mut site.command());
    let whole = started.elapsed();
    assert_eq!(code, 0, "{stderr}");
    let path = format!("v2/{}", clean["snapshot"].as_str().unwrap());
    let with_result = site.objects();
    assert_eq!(with_result.len(), inputs.len() + 1);
    site.remove(&path);

    let mut debris = 0;
    let check = |ended: &Ended| {
        let what = &ended.what;
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
            assert!(staging.is_empty(), "{what}");
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
        let mut found = site.objects();
        found.retain(|path, _| !path.starts_with(STAGING));
        assert!(found == with_result, "{what}: {:?}", found.keys());
        for path in staging.keys() {
            site.remove(path);
        }
        site.remove(&path);
    };
    match site {
        Site::Server { minio, .. } => {
            killed::at_each_request(
                minio.endpoint(),
                signal,
                1,
                |url| site.command_at(url),
                check,
            );
        }
        Site::Folder(bucket) => {
            let staging = bucket.path().join(STAGING);
            let has_file = || fs::read_dir(&staging).is_ok_and(|mut files| files.next().is_some());
            // Any moment, or one during the upload.
            let moment = |job: &mut Child, rng: &mut fastrand::Rng, whole: Duration| {
                let mut delay = whole.mul_f64(rng.f64() * 1.1);
                if rng.bool() {
                    killed::wait_until(job, has_file);
                    delay /= 4;
                }
                std::thread::sleep(delay);
            };
            killed::at_random_moments(rounds, signal, whole, || site.command(), moment, check);
            let is_kill = signal == Signal::KILL;
            assert!(debris > 0 || !is_kill, "none was killed while it uploaded");
        }
    }
}

/// What a killed run leaves in a local folder is removed by `gc`, when it is older than a day.
#[test]
fn gc_removes_what_a_killed_run_has_left() {
    let site = Site::Folder(bucket());
    let Site::Folder(bucket) = &site else {
        unreachable!()
    };
    let staging = bucket.path().join(STAGING);
    let names = || {
        let files = fs::read_dir(&staging).into_iter().flatten();
        let names = files.map(|e| e.unwrap().file_name().into_string().unwrap());
        names.collect::<Vec<_>>()
    };
    // Killed as soon as there is a file.
    let mut job = site.command().stderr(Stdio::null()).spawn().unwrap();
    while names().is_empty() {
        std::thread::sleep(Duration::from_millis(1));
    }
    job.kill().unwrap();
    job.wait().unwrap();
    let left = names();
    assert_eq!(left.len(), 1, "{left:?}");
    let (code, _, stderr) = run_json(&mut site.command());
    assert_eq!((code, names()), (0, left.clone()), "{stderr}");
    for (hours, remains) in [(23, true), (25, false)] {
        let file = fs::File::options()
            .write(true)
            .open(staging.join(&left[0]))
            .unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(hours * 3600))
            .unwrap();
        let mut gc = deltafold();
        gc.args([
            "gc", "--policy", "limit", "--limit", "9", "--apply", "--output", "json",
        ]);
        let (code, _, stderr) = run_json(gc.arg("--store").arg(bucket.path()));
        assert_eq!(
            (code, !names().is_empty()),
            (0, remains),
            "{hours}: {stderr}"
        );
    }
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
fn sigterm_at_each_request_to_minio() {
    killed_and_run_again(&Site::minio(&bucket()), 0, Signal::TERM);
}

#[test]
fn sigkill_at_each_request_to_minio() {
    killed_and_run_again(&Site::minio(&bucket()), 0, Signal::KILL);
}

#[test]
fn sigkill_at_each_request_to_minio_while_the_result_is_put_at_once() {
    killed_and_run_again(&Site::minio(&small()), 0, Signal::KILL);
}
