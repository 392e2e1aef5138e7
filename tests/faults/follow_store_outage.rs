//! `deltafold snapshot follow` while its store is down.

use crate::support::copy_dir;
use crate::support::etcd::{EtcdVersion, Signal};
use crate::support::fake_s3::{Dialect, FakeS3};
use crate::support::follower::{Follower, QUICK};
use crate::support::minio::Minio;
use crate::support::proxy::{Effect, Proxy, Timing};
use crate::support::recorded_etcd::with_etcd;
use crate::support::restorable::Prefix;
use crate::support::s3::S3;
use deltafold::backup::Kind;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

/// Where the events are that wait for the store.
#[derive(Clone, Copy, PartialEq)]
enum Kept {
    /// etcd still has them.
    ByEtcd,
    /// etcd has compacted them, and the temporary directory has them.
    InTemp,
    /// Nobody has them.
    Nowhere,
}

/// Returns the bytes in unnamed files that a process has open.
fn temp_bytes(process: u32) -> u64 {
    let open = fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    let paths = open.map(|fd| fd.unwrap().path());
    let has_no_name =
        |p: &PathBuf| fs::read_link(p).is_ok_and(|to| to.to_string_lossy().ends_with(" (deleted)"));
    let sizes = paths
        .filter(has_no_name)
        .map(|p| fs::metadata(p).map_or(0, |m| m.len()));
    sizes.sum()
}

/// The store is down, more is written than one delta holds, and memory stays bounded.
fn store_outage(kept: Kept) {
    let minio = Minio::start();
    with_etcd(EtcdVersion::V3_6, |world| {
        world.wait(minio.create_bucket("follow"));
        world.prefix = Prefix::minio(&minio, "follow", "prefix");
        let mut args = QUICK.to_vec();
        args.extend(["--delta-bytes", "1MiB"]);
        if kept != Kept::InTemp {
            // A quarter of it may wait.
            args.extend(["--max-database-bytes", "16MiB"]);
        }
        let mut follower = world.follow(&args);
        let saved = world.put_many("/a/", 20, 1000);
        follower.wait_saved(&world.prefix, saved);
        minio.signal(Signal::STOP);
        for n in 0..6 {
            world.put_many(&format!("/b/{n}/"), 100, 100_000);
            std::thread::sleep(Duration::from_millis(500));
        }
        follower.assert_runs();
        let status = fs::read_to_string(format!("/proc/{}/status", follower.id())).unwrap();
        let peak = status
            .lines()
            .find_map(|l| l.strip_prefix("VmHWM:"))
            .unwrap();
        let peak: u64 = peak.trim().trim_end_matches("kB").trim().parse().unwrap();
        println!("{peak} KiB after 60 MB of events that could not be saved");
        assert!(peak < 128 << 10, "{peak} KiB");
        match kept {
            Kept::ByEtcd => {}
            Kept::InTemp => {
                // Each event has its 100 kB in base64. Those of the delta that is being uploaded are compressed.
                let most = (600 - 8) * 100_000 * 4 / 3;
                let id = follower.id();
                follower.wait_until("events in the temporary directory", || {
                    temp_bytes(id) > most
                });
                world.compact(world.revision() - 100);
                world.restart(|_| {});
            }
            Kept::Nowhere => {
                world.compact(world.revision());
                world.restart(|_| {});
            }
        }
        minio.signal(Signal::CONT);
        world.put_many("/c/", 5, 100);
        let revision = world.revision();
        follower.wait_saved(&world.prefix, revision);
        let deltas = world.prefix.deltas().len();
        world.put_many("/d/", 5, 100);
        let ended = follower.terminate().succeeded();
        world.check_all_is_saved();
        let fulls = world.prefix.fulls().len();
        if kept == Kept::Nowhere {
            assert_eq!(fulls, 2, "{:?}", world.prefix.names());
            assert!(ended.log.contains("Compacted"), "{}", ended.log);
        } else {
            assert_eq!(fulls, 1, "{:?}", world.prefix.names());
            // Waiting events are saved together: each has its 100 kB in base64, and 7 of them fit into a delta.
            assert!(deltas <= 600 / 7 + 10, "{deltas} deltas");
        }
    });
}

/// While the store is down, etcd is set back and continues with another history. When the store is back, events
/// of the first history wait, and a full is due.
#[test]
fn a_full_is_due_while_events_of_another_history_wait() {
    let minio = Minio::start();
    with_etcd(EtcdVersion::V3_6, |world| {
        world.wait(minio.create_bucket("follow"));
        world.prefix = Prefix::minio(&minio, "follow", "prefix");
        world.put_many("/a/", 10, 100);
        let old = world.folder().join("old");
        world.restart(|data_dir| copy_dir(data_dir, &old));
        let kept = world.revision();
        let args = [&QUICK[..], &["--max-full-age", "15s"]].concat();
        let mut follower = world.follow(&args);
        let taken = std::time::Instant::now();
        let saved = world.put_many("/b/", 5, 100);
        follower.wait_saved(&world.prefix, saved);
        minio.signal(Signal::STOP);
        world.put_many("/b/", 1, 100);
        // The delta is being uploaded; what comes now waits behind it.
        std::thread::sleep(Duration::from_secs(3));
        let lost = world.put_many("/b/", 60, 100);
        world.truth.wait_for(lost);
        world.truth.end();
        std::thread::sleep(Duration::from_secs(2));
        world.restart(|data_dir| {
            fs::remove_dir_all(data_dir).unwrap();
            copy_dir(&old, data_dir);
        });
        let truth = world.truth.forked_at(kept, &world.endpoints());
        let first = std::mem::replace(&mut world.truth, truth);
        world.put_many("/b/", 30, 50);
        let due = Duration::from_secs(16);
        std::thread::sleep(due.saturating_sub(taken.elapsed()));
        minio.signal(Signal::CONT);
        let prefix = world.prefix.clone();
        follower.wait_until("another full", || prefix.fulls().len() > 1);
        world.put_many("/b/", 60, 50);
        let revision = world.revision();
        follower.wait_saved(&world.prefix, revision);
        world.truth.wait_for(revision);
        let ended = follower.terminate().succeeded();
        let names = world.prefix.names();
        let full = names.iter().skip(1).position(|n| n.kind == Kind::Full);
        let (before, after) = names.split_at(1 + full.unwrap());
        let last = before.iter().map(|n| n.last.0).max();
        assert_eq!(last, Some(lost), "{names:?}\n{}", ended.log);
        assert!(after[0].last.0 < lost, "{names:?}");
        assert_eq!(ended.json["timeline_began"], true, "{}", ended.json);
        world.check_both_are_saved((&first, lost), revision, 20);
    });
}

/// Injects an answer to all requests.
pub fn refuse(proxy: &Proxy, status: u16, code: &'static str) {
    let effect = Effect::S3Answer(status, code);
    proxy.inject(|_| true, 0, usize::MAX, Timing::Before, effect);
}

/// A clock that is wrong, credentials that have expired, a right that is missing: each passes, also at the
/// start. Settings with which the follower has begun are right, whatever the store says later.
#[test]
fn refusals_pass() {
    let server = FakeS3::start(Dialect::default());
    with_etcd(EtcdVersion::V3_6, |world| {
        let proxy = Proxy::start(server.s3().endpoint());
        let through_proxy = Prefix::s3(&S3::new(&proxy.url()), "follow", "prefix");
        world.prefix = Prefix::s3(server.s3(), "follow", "prefix");
        refuse(&proxy, 403, "AccessDenied");
        let mut follower = Follower::start(&through_proxy, &world.endpoints(), &QUICK);
        follower.wait_log(&["AccessDenied", "PermissionDenied"]);
        for (status, code, reason) in [
            (403, "RequestTimeTooSkewed", "PermissionDenied"),
            (400, "ExpiredToken", "Unauthenticated"),
            (400, "RequestTimeout", "StoreUnreachable"),
            (400, "InvalidArgument", "Configuration"),
        ] {
            proxy.clear_faults();
            let revision = world.put_many(&format!("/{code}/"), 5, 100);
            follower.wait_saved(&world.prefix, revision);
            refuse(&proxy, status, code);
            world.put_many(&format!("/{code}/"), 5, 100);
            follower.wait_log(&["delta", code, reason]);
        }
        proxy.clear_faults();
        let revision = world.revision();
        follower.wait_saved(&world.prefix, revision);
        let ended = follower.terminate().succeeded();
        assert!(ended.json["failures"].as_u64() >= Some(5), "{}", ended.json);
        assert!(ended.log.contains("set the clock"), "{}", ended.log);
        world.check_all_is_saved();
        assert_eq!(world.prefix.fulls().len(), 1);
    });
}

#[test]
fn settings_that_are_wrong_from_the_start_end_it() {
    let server = FakeS3::start(Dialect::default());
    with_etcd(EtcdVersion::V3_6, |world| {
        let proxy = Proxy::start(server.s3().endpoint());
        refuse(&proxy, 400, "InvalidArgument");
        let prefix = Prefix::s3(&S3::new(&proxy.url()), "follow", "prefix");
        let ended = Follower::start(&prefix, &world.endpoints(), &QUICK).wait();
        assert_eq!((ended.code, ended.reason()), (78, "Configuration"));
    });
}

#[test]
fn a_store_that_is_away_for_a_while() {
    store_outage(Kept::ByEtcd);
}

#[test]
fn a_store_that_is_away_until_etcd_has_forgotten() {
    store_outage(Kept::Nowhere);
}

#[test]
fn what_etcd_has_forgotten_waits_in_the_temporary_directory() {
    store_outage(Kept::InTemp);
}
