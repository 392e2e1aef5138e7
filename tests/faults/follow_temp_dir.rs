//! `deltafold snapshot follow` while its temporary directory takes nothing: the watch pauses, nothing spins, and it goes
//! on by itself. SIGTERM ends the follower wherever it waits.

use crate::follow_store_outage::refuse;
use crate::support::disk::in_a_mount_namespace;
use crate::support::etcd::EtcdVersion;
use crate::support::fake_s3::{Dialect, FakeS3};
use crate::support::follower::{Follower, QUICK, snapshot_command};
use crate::support::process::{free_port, http};
use crate::support::proxy::Proxy;
use crate::support::recorded_etcd::{RecordedEtcd, with_etcd};
use crate::support::restorable::Prefix;
use crate::support::s3::S3;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// What happens to the temporary directory.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Danger {
    Removed,
    ReadOnly,
    /// The process may open no more files.
    NoDescriptors,
    Full,
}

/// The temporary directory of a follower, on a disk of its own.
struct TempDisk(PathBuf);

impl TempDisk {
    fn follow(&self, world: &RecordedEtcd) -> Follower {
        fs::create_dir_all(&self.0).unwrap();
        let mut command = snapshot_command("follow", &world.prefix, &world.endpoints());
        command.args(QUICK).arg("--temp-dir").arg(self.0.join("in"));
        // The files of the events that wait take a quarter of it at most. There are 16 of them.
        command.args(["--max-database-bytes", "16MiB", "--shutdown-timeout", "3s"]);
        let script =
            r#"mount -t tmpfs -o size=64m tmpfs "$1" && mkdir "$1/in" && shift && exec "$@""#;
        let mut follower = Follower::spawn(&mut in_a_mount_namespace(
            script,
            &[self.0.as_os_str()],
            &command,
        ));
        follower.wait_until("the first full", || !world.prefix.fulls().is_empty());
        follower
    }

    /// Runs a shell script in the mount namespace of the follower.
    fn run(&self, follower: &Follower, script: &str) {
        let mut command = Command::new("nsenter");
        command.args(["--target", &follower.id().to_string()]);
        command.args([
            "--user",
            "--preserve-credentials",
            "--mount",
            "sh",
            "-c",
            script,
        ]);
        let output = command.arg("sh").arg(&self.0).output().unwrap();
        assert!(output.status.success(), "{script}: {output:?}");
    }

    fn breaks(&self, follower: &Follower, danger: Danger) {
        match danger {
            Danger::Removed => self.run(follower, r#"rmdir "$1/in""#),
            // The file system as a whole cannot become read-only while the follower has files open.
            Danger::ReadOnly => self.run(
                follower,
                r#"mount --bind "$1/in" "$1/in" && mount -o remount,bind,ro "$1/in""#,
            ),
            Danger::NoDescriptors => limit_descriptors(follower, open_files(follower)),
            Danger::Full => self.run(follower, r#"cat /dev/zero >"$1/fill" 2>/dev/null || true"#),
        }
    }

    fn mend(&self, follower: &Follower, danger: Danger) {
        match danger {
            Danger::Removed => self.run(follower, r#"mkdir "$1/in""#),
            Danger::ReadOnly => self.run(follower, r#"umount "$1/in""#),
            Danger::NoDescriptors => limit_descriptors(follower, 1024),
            Danger::Full => self.run(follower, r#"rm "$1/fill""#),
        }
    }
}

fn open_files(follower: &Follower) -> u64 {
    let open = fs::read_dir(format!("/proc/{}/fd", follower.id())).unwrap();
    open.count() as u64
}

fn limit_descriptors(follower: &Follower, limit: u64) {
    let limit = Rlimit {
        current: Some(limit),
        // The follower has inherited it.
        maximum: getrlimit(Resource::Nofile).maximum,
    };
    let pid = Pid::from_raw(follower.id() as i32);
    prlimit(pid, Resource::Nofile, limit).unwrap();
}

/// Returns the processor time that a process has used, in clock ticks of 10 ms.
fn processor_time(follower: &Follower) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", follower.id())).unwrap();
    let fields = stat.rsplit(')').next().unwrap().split_whitespace();
    let times = fields.skip(11).take(2);
    times.map(|ticks| ticks.parse::<u64>().unwrap()).sum()
}

/// Takes a local store away and brings it back.
fn take_away(store: &Path) {
    fs::rename(store, store.with_extension("away")).unwrap();
    fs::write(store, "").unwrap();
}

fn bring_back(store: &Path) {
    fs::remove_file(store).unwrap();
    fs::rename(store.with_extension("away"), store).unwrap();
}

/// The store is away, events wait, and the temporary directory takes no more of them.
fn pauses(danger: Danger) {
    with_etcd(EtcdVersion::V3_6, |world| {
        let disk = TempDisk(world.folder().join("temp"));
        let store = world.folder().join("store");
        world.put_many("/a/", 3, 100);
        let pause = |world: &RecordedEtcd, follower: &mut Follower| {
            follower.wait_log(&["watching"]);
            take_away(&store);
            world.put_many("/b/", 1, 100);
            follower.wait_log(&["delta", "Io"]);
            // The files that wait hold 256 KiB each.
            world.put_many("/c/", 6, 50_000);
            disk.breaks(follower, danger);
            world.put_many("/d/", 40, 50_000);
            follower.wait_log(&["the watch pauses"]);
        };
        // SIGTERM ends a follower that pauses.
        let mut follower = disk.follow(world);
        pause(world, &mut follower);
        let ended = follower.terminate();
        assert_ne!(ended.code, 0, "{}", ended.log);
        bring_back(&store);

        let mut follower = disk.follow(world);
        let saved = world.revision();
        follower.wait_saved(&world.prefix, saved);
        pause(world, &mut follower);
        let (before, lines) = (processor_time(&follower), follower.log().lines().count());
        let started = Instant::now();
        std::thread::sleep(Duration::from_secs(4));
        let used = processor_time(&follower) - before;
        let percent = used as f64 * 10.0 / started.elapsed().as_secs_f64() / 10.0;
        assert!(percent < 50.0, "{percent} % of a processor");
        let log = follower.log();
        let lines = log.lines().count() - lines;
        assert!(lines < 10, "{lines} lines in 4 s:\n{log}");
        assert_eq!(log.matches("the watch pauses").count(), 1, "{log}");
        bring_back(&store);
        std::thread::sleep(Duration::from_secs(1));
        disk.mend(&follower, danger);
        let revision = world.put_many("/e/", 3, 100);
        follower.wait_saved(&world.prefix, revision);
        follower.terminate().succeeded();
        world.check_all_is_saved();
        assert_eq!(world.prefix.fulls().len(), 1, "{:?}", world.prefix.names());
    });
}

#[test]
fn a_temporary_directory_that_is_removed() {
    pauses(Danger::Removed);
}

#[test]
fn a_temporary_directory_that_becomes_read_only() {
    pauses(Danger::ReadOnly);
}

#[test]
fn no_descriptors_for_temporary_files() {
    pauses(Danger::NoDescriptors);
}

#[test]
fn a_file_system_of_temporary_files_that_is_full() {
    pauses(Danger::Full);
}

/// A follower that cannot hold events gives its lock up, so that another one saves.
#[test]
fn another_follower_takes_over_from_one_without_a_temporary_directory() {
    with_etcd(EtcdVersion::V3_6, |world| {
        let disk = TempDisk(world.folder().join("temp"));
        world.put_many("/a/", 3, 100);
        let mut first = disk.follow(world);
        let mut second = Follower::start(&world.prefix, &world.endpoints(), &QUICK);
        second.wait_log(&["another follower holds the lock"]);
        disk.breaks(&first, Danger::Removed);
        let revision = world.put_many("/b/", 10, 100);
        second.wait_saved(&world.prefix, revision);
        first.assert_runs();
        disk.mend(&first, Danger::Removed);
        second.kill();
        let revision = world.put_many("/c/", 10, 100);
        first.wait_saved(&world.prefix, revision);
        first.terminate().succeeded();
        world.check_all_is_saved();
    });
}

/// Returns a metric's value; `None` if it is not exposed.
fn metric(port: u16, name: &str) -> Option<f64> {
    let text = http(port, "GET", "/metrics", "")?;
    let line = text.lines().find(|l| l.split(' ').next() == Some(name))?;
    line.rsplit(' ').next()?.parse().ok()
}

const REVISIONS: &str = "deltafold_unsaved_revisions";
const AGE: &str = "deltafold_unsaved_age_seconds";

/// The metrics of unsaved changes are right if the store refuses the credentials, from the beginning or later, and if
/// another follower holds the lock.
#[test]
fn unsaved_changes_are_told_without_credentials_and_without_the_lock() {
    let server = FakeS3::start(Dialect::default());
    with_etcd(EtcdVersion::V3_6, |world| {
        let proxy = Proxy::start(server.s3().endpoint());
        let through_proxy = Prefix::s3(&S3::new(&proxy.url()), "follow", "prefix");
        world.prefix = Prefix::s3(server.s3(), "follow", "prefix");
        let port = free_port();
        let address = format!("127.0.0.1:{port}");
        let args = [&QUICK[..], &["--metrics-bind-address", &address]].concat();
        refuse(&proxy, 403, "InvalidAccessKeyId");
        world.put_many("/a/", 5, 100);
        let mut follower = Follower::start(&through_proxy, &world.endpoints(), &args);
        follower.wait_until("an age from the beginning", || {
            metric(port, AGE) > Some(1.0)
        });
        proxy.clear_faults();
        let revision = world.revision();
        follower.wait_saved(&world.prefix, revision);
        let all_is_saved =
            || (metric(port, REVISIONS), metric(port, AGE)) == (Some(0.0), Some(0.0));
        follower.wait_until("all is saved", all_is_saved);
        refuse(&proxy, 403, "InvalidAccessKeyId");
        // So that the lock is not held any more when the changes come.
        std::thread::sleep(Duration::from_secs(16));
        world.put_many("/b/", 7, 100);
        follower.wait_until("seven revisions", || metric(port, REVISIONS) == Some(7.0));
        follower.wait_until("their age", || metric(port, AGE) > Some(2.0));

        // Another follower takes the lock, and saves nothing.
        let hung = FakeS3Lock::of(&server);
        proxy.clear_faults();
        follower.wait_log(&["another follower holds the lock"]);
        world.put_many("/b/", 5, 100);
        hung.renew_until(|| {
            follower.assert_runs();
            metric(port, REVISIONS) == Some(12.0) && metric(port, AGE) > Some(2.0)
        });
        let revision = world.revision();
        follower.wait_saved(&world.prefix, revision);
        follower.wait_until("all is saved", all_is_saved);
        follower.terminate().succeeded();
        world.check_all_is_saved();
    });
}

/// A lock in a store whose holder does nothing but renew it.
struct FakeS3Lock<'s> {
    server: &'s FakeS3,
    path: String,
}

impl<'s> FakeS3Lock<'s> {
    fn of(server: &'s FakeS3) -> Self {
        let objects = server.objects();
        let path = objects.keys().find(|path| path.ends_with("/follow.json"));
        let lock = FakeS3Lock {
            server,
            path: path.expect("the lock").clone(),
        };
        lock.write("holder");
        lock
    }

    fn write(&self, holder: &str) {
        let record = serde_json::json!({
            "holderIdentity": holder, "acquireTime": chrono::Utc::now(),
            "renewTime": chrono::Utc::now(), "leaseDurationSeconds": 15, "token": holder,
        });
        self.server
            .seed([(self.path.clone(), record.to_string().into_bytes())]);
    }

    /// Renews the lock until this holds, then gives it back.
    fn renew_until(&self, mut holds: impl FnMut() -> bool) {
        let started = Instant::now();
        while !holds() {
            assert!(started.elapsed() < Duration::from_secs(90));
            self.write("holder");
            std::thread::sleep(Duration::from_millis(500));
        }
        self.write("");
    }
}

/// SIGTERM ends a follower while it waits for the store, for the lock in it, for another follower and for the bandwidth.
#[test]
fn sigterm_ends_every_wait() {
    let server = FakeS3::start(Dialect::default());
    with_etcd(EtcdVersion::V3_6, |world| {
        world.prefix = Prefix::s3(server.s3(), "follow", "prefix");
        let proxy = Proxy::start(server.s3().endpoint());
        let through_proxy = Prefix::s3(&S3::new(&proxy.url()), "follow", "prefix");
        let args = [&QUICK[..], &["--shutdown-timeout", "2s"]].concat();
        let start = |args: &[&str]| Follower::start(&through_proxy, &world.endpoints(), args);
        // It panics if the follower does not end.
        let ends = |follower: Follower, what: &str| {
            println!("waiting for {what}: {}", follower.terminate().code);
        };
        world.put_many("/a/", 3, 100);
        // No answer while the store is scanned, no answer while a delta is saved.
        proxy.delay(Duration::from_secs(3600));
        let mut follower = start(&args);
        follower.wait_until("a request", || !proxy.calls().is_empty());
        ends(follower, "a listing");
        proxy.delay(Duration::ZERO);
        let mut follower = start(&args);
        let revision = world.revision();
        follower.wait_saved(&world.prefix, revision);
        let mut standby = start(&args);
        standby.wait_log(&["another follower holds the lock"]);
        ends(standby, "the lock");
        proxy.delay(Duration::from_secs(3600));
        world.put_many("/b/", 3, 100);
        std::thread::sleep(Duration::from_secs(3));
        ends(follower, "the upload of a delta");
        // The lock cannot be renewed.
        proxy.delay(Duration::ZERO);
        let mut follower = start(&args);
        let revision = world.revision();
        follower.wait_saved(&world.prefix, revision);
        refuse(&proxy, 403, "InvalidAccessKeyId");
        std::thread::sleep(Duration::from_secs(16));
        world.put_many("/c/", 3, 100);
        std::thread::sleep(Duration::from_secs(2));
        ends(follower, "the renewal of the lock");
        proxy.clear_faults();
        // 300 kB at 2 kB a second.
        let slow = [&args[..], &["--bandwidth", "2KiB"]].concat();
        let mut follower = start(&slow);
        follower.wait_log(&["took the lock"]);
        std::thread::sleep(Duration::from_secs(3));
        world.put_many("/d/", 3, 100_000);
        std::thread::sleep(Duration::from_secs(2));
        ends(follower, "the bandwidth");
    });
}
