//! `deltafold snapshot follow` survives every danger: each test ends by comparing all restorable revisions with
//! what etcd had.

use crate::support::copy_dir;
use crate::support::etcd::{self, EtcdOptions, EtcdVersion, Signal};
use crate::support::etcd_cluster::{Cluster, Member};
use crate::support::follower::{Follower, QUICK, snapshot_command};
use crate::support::random_load::{Load, LoadOptions};
use crate::support::recorded_etcd::with_etcd;
use crate::support::restorable::Prefix;
use crate::support::scratch;
use crate::support::truth::Truth;
use crate::support::{deltafold, run_json, succeed};
use chrono::{Timelike as _, Utc};
use deltafold::Reason;
use deltafold::backup::Kind;
use deltafold::base::Cancel;
use deltafold::etcd::connect::Connector;
use deltafold::etcd::feed::{Ended, Feed, KeyChange, Known, Position, Transaction};
use etcd_client::TxnOp;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Deltas every second.
const PERIOD: [&str; 2] = ["--delta-period", "1s"];
/// No snapshots except those that a test provokes.
const SLOW: [&str; 4] = ["--delta-period", "1h", "--full-schedule", "0 0 29 2 *"];

/// Runs load and a follower of a cluster during `danger`. Asserts that everything is saved without a second
/// full.
fn survives(version: EtcdVersion, danger: impl FnOnce(&mut Cluster, &Load, u64)) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _within = runtime.enter();
    let seed = crate::support::seed();
    let folder = scratch::folder().unwrap();
    let members = ["one", "two", "three"].map(|name| Member::new(name, folder.path().join(name)));
    let mut cluster = Cluster::start(version, &members, "followed");
    let endpoints = cluster.endpoints();
    let truth = Truth::start(&endpoints);
    let prefix = Prefix::local(&folder.path().join("store"));
    let load = Load::start(&endpoints, seed, &LoadOptions::default());
    load.wait_for(50);
    let mut follower = Follower::start(&prefix, &endpoints, &QUICK);
    follower.wait_until("a delta", || !prefix.deltas().is_empty());
    danger(&mut cluster, &load, seed);
    follower.assert_runs();
    load.wait_for(100);
    load.stop();
    let revision = runtime.block_on(cluster.member(0).revision());
    truth.wait_for(revision);
    follower.wait_saved(&prefix, revision);
    follower.terminate().succeeded();
    let checked = prefix.check_every_restorable(&[&truth], seed, 10);
    assert_eq!(checked.newest_of(0), revision, "seed {seed}: {checked:?}");
    assert_eq!(checked.timelines.len(), 1, "seed {seed}: {checked:?}");
    assert_eq!(prefix.fulls().len(), 1, "seed {seed}: {:?}", prefix.names());
    runtime.block_on(truth.is_that_of(cluster.member(0)));
}

#[test]
fn the_loss_of_any_member() {
    for version in EtcdVersion::ALL {
        survives(version, |cluster, load, _| {
            for lost in 0..3 {
                cluster.kill(lost);
                load.wait_for(60);
                cluster.start_again(lost);
                load.wait_for(60);
            }
        });
    }
}

#[test]
fn members_that_hang() {
    survives(EtcdVersion::V3_6, |cluster, load, _| {
        for held in 0..3 {
            cluster.member(held).signal(Signal::STOP);
            load.wait_for(60);
            cluster.member(held).signal(Signal::CONT);
            load.wait_for(60);
        }
    });
}

#[test]
fn other_leaders() {
    survives(EtcdVersion::V3_7, |cluster, load, _| {
        let runtime = tokio::runtime::Handle::current();
        for leader in [0, 1, 2, 0] {
            runtime.block_on(cluster.move_leader_to(leader));
            load.wait_for(40);
        }
    });
}

#[test]
fn a_restart_of_the_whole_cluster() {
    survives(EtcdVersion::V3_5, |cluster, load, _| {
        cluster.stop();
        std::thread::sleep(Duration::from_secs(2));
        cluster.start_all_again();
        load.wait_for(60);
        // As in a power failure.
        for at in 0..3 {
            cluster.kill(at);
        }
        std::thread::sleep(Duration::from_secs(1));
        cluster.start_all_again();
        load.wait_for(60);
    });
}

/// What is saved is compacted repeatedly, and members are defragmented.
#[test]
fn compactions_of_what_is_saved() {
    for version in EtcdVersion::ALL {
        with_etcd(version, |world| {
            let mut follower = world.follow(&QUICK);
            for n in 0..4 {
                let last = world.put_many(&format!("/a/{n}/"), 50, 500);
                world.delete(&format!("/a/{n}/0000"));
                follower.wait_saved(&world.prefix, last + 1);
                world.compact(last + 1);
                let defragment = async { world.etcd.client().await.defragment().await };
                world.wait(defragment).unwrap();
            }
            world.put("/b", "1");
            follower.terminate().succeeded();
            let checked = world.check_all_is_saved();
            assert_eq!(checked.timelines.len(), 1, "{checked:?}");
            assert_eq!(world.prefix.fulls().len(), 1);
        });
    }
}

/// The follower is paused, its connection breaks, and revisions that it has not seen are compacted.
#[test]
fn a_compaction_under_its_feet() {
    for version in EtcdVersion::ALL {
        with_etcd(version, |world| {
            let mut follower = world.follow(&QUICK);
            let saved = world.put_many("/a/", 20, 100);
            follower.wait_saved(&world.prefix, saved);
            follower.signal(Signal::STOP);
            world.restart(|_| {});
            let compacted = world.put_many("/b/", 20, 100);
            world.compact(compacted);
            world.put_many("/c/", 5, 100);
            follower.signal(Signal::CONT);
            let revision = world.revision();
            follower.wait_saved(&world.prefix, revision);
            // The name appears a moment before the log line.
            follower.wait_log(&["Compacted"]);
            assert_eq!(world.prefix.fulls().len(), 2, "{:?}", world.prefix.names());
            world.put_many("/d/", 5, 100);
            follower.terminate().succeeded();
            let checked = world.check_all_is_saved();
            let ranges = checked.ranges();
            assert!(ranges.iter().any(|r| r.1 == saved), "{checked:?}");
        });
    }
}

/// etcd comes back with older data while it is followed.
fn rolled_back(version: EtcdVersion, ahead: bool) {
    with_etcd(version, |world| {
        world.put_many("/a/", 10, 100);
        let old = world.folder().join("old");
        world.restart(|data_dir| copy_dir(data_dir, &old));
        let kept = world.revision();
        let mut follower = world.follow(&QUICK);
        let saved = world.put_many("/b/", 20, 100);
        follower.wait_saved(&world.prefix, saved);
        world.truth.wait_for(saved);
        world.truth.end();
        if ahead {
            follower.signal(Signal::STOP);
        }
        world.restart(|data_dir| {
            fs::remove_dir_all(data_dir).unwrap();
            copy_dir(&old, data_dir);
        });
        let truth = world.truth.forked_at(kept, &world.endpoints());
        let first = std::mem::replace(&mut world.truth, truth);
        // Behind the backup for a while, or beyond it before the follower looks again.
        world.put_many("/c/", if ahead { 30 } else { 5 }, 50);
        if ahead {
            follower.signal(Signal::CONT);
        }
        let prefix = world.prefix.clone();
        follower.wait_until("another full", || prefix.fulls().len() > 1);
        world.put_many("/c/", 40, 50);
        let revision = world.revision();
        world.truth.wait_for(revision);
        let ended = follower.terminate().succeeded();
        let why = if ahead {
            "HistoryMismatch"
        } else {
            "ClusterBehind"
        };
        assert!(ended.log.contains(why), "{}", ended.log);
        world.check_both_are_saved((&first, saved), revision, 20);
    });
}

#[test]
fn a_cluster_that_is_set_back() {
    for version in EtcdVersion::ALL {
        rolled_back(version, false);
    }
}

#[test]
fn a_cluster_that_is_set_back_and_runs_ahead() {
    for version in EtcdVersion::ALL {
        rolled_back(version, true);
    }
}

/// One follower saves, the other stands by and takes over when the first is killed.
#[test]
fn two_followers_on_one_prefix() {
    with_etcd(EtcdVersion::V3_6, |world| {
        let load = Load::start(&world.endpoints(), world.seed, &LoadOptions::default());
        load.wait_for(20);
        let first = world.follow(&QUICK);
        let mut second = Follower::start(&world.prefix, &world.endpoints(), &QUICK);
        load.wait_for(300);
        second.assert_runs();
        first.kill();
        let killed_at = world.revision();
        second.wait_saved(&world.prefix, killed_at);
        let mut third = Follower::start(&world.prefix, &world.endpoints(), &QUICK);
        load.wait_for(200);
        third.assert_runs();
        second.terminate().succeeded();
        let ended_at = world.revision();
        third.wait_saved(&world.prefix, ended_at);
        load.stop();
        third.terminate().succeeded();
        let checked = world.check_all_is_saved();
        assert_eq!(checked.timelines.len(), 1, "{checked:?}");
    });
}

#[test]
fn sigterm_saves_what_is_not_yet_saved() {
    for version in EtcdVersion::ALL {
        with_etcd(version, |world| {
            world.put_many("/a/", 5, 100);
            let follower = world.follow(&SLOW);
            world.put_many("/a/", 30, 100);
            world.txn(vec![
                TxnOp::put("/b", "1", None),
                TxnOp::delete("/a/00001", None),
            ]);
            follower.terminate().succeeded();
            assert_eq!(world.prefix.last_saved(), world.revision(), "{version}");
            assert_eq!(world.prefix.names().len(), 2);
            world.check_all_is_saved();
        });
    }
}

/// What the follower has received is saved, although no member responds any more.
#[test]
fn sigterm_where_no_member_answers() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 5, 100);
        let args = [&SLOW[..], &["--shutdown-timeout", "4s"]].concat();
        let follower = world.follow(&args);
        let revision = world.put_many("/b/", 30, 100);
        // So that the watch has received it.
        std::thread::sleep(Duration::from_secs(2));
        world.etcd.signal(Signal::STOP);
        let ended = follower.terminate();
        world.etcd.signal(Signal::CONT);
        assert_eq!(world.prefix.last_saved(), revision, "{}", ended.log);
        world.check_all_is_saved();
    });
}

/// etcd may come back from the backup, so what the follower holds is saved although no period has passed.
#[test]
fn what_is_held_is_saved_when_etcd_is_gone() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 5, 100);
        let mut follower = world.follow(&SLOW);
        let revision = world.put_many("/b/", 30, 100);
        // So that the watch has received it.
        std::thread::sleep(Duration::from_secs(2));
        let prefix = world.prefix.clone();
        world.restart(|_| follower.wait_saved(&prefix, revision));
        let revision = world.put_many("/c/", 5, 100);
        follower.terminate().succeeded();
        assert_eq!(prefix.last_saved(), revision);
        world.check_all_is_saved();
    });
}

/// Both name it by its lock. After its end nobody holds it.
#[test]
fn status_and_restore_name_a_live_follower() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 5, 100);
        let follower = world.follow(&SLOW);
        let process = format!(".{}", follower.id());
        let status = || {
            let mut command = deltafold();
            command.args(["status", "--output", "json", "--store", &world.prefix.url]);
            run_json(&mut command).1
        };
        let restore = |name: &str, args: &[&str]| {
            let mut command = deltafold();
            command.args(["restore", "--output", "json", "--store", &world.prefix.url]);
            command.arg("--data-dir").arg(world.folder().join(name));
            let json = succeed(command.args(args));
            json["warnings"].to_string()
        };
        let named = status()["follower"].clone();
        assert!(
            named["holder"].as_str().unwrap().ends_with(&process),
            "{named}"
        );
        assert!(named["saved_nothing_since"].is_string(), "{named}");
        let warnings = restore("newest", &[]);
        assert!(warnings.contains(&process), "{warnings}");
        assert!(warnings.contains("has saved nothing since"), "{warnings}");
        let warnings = restore("earlier", &["--revision", "6"]);
        assert!(!warnings.contains(&process), "{warnings}");
        follower.terminate().succeeded();
        assert!(status()["follower"].is_null());
        assert!(!restore("after", &[]).contains("follow"));
    });
}

/// As in a week side by side with another tool.
#[test]
fn a_second_writer_of_the_same_revisions() {
    with_etcd(EtcdVersion::V3_6, |world| {
        let args = ["--delta-period", "200ms", "--full-schedule", "0 0 29 2 *"];
        let mut follower = world.follow(&args);
        let revision = world.put_many("/a/", 3, 100);
        follower.wait_saved(&world.prefix, revision);
        let own = world.prefix.deltas().pop().unwrap();
        let mut other = own.clone();
        other.created += 1;
        let v2 = Path::new(&world.prefix.url).join("v2");
        fs::copy(v2.join(own.to_string()), v2.join(other.to_string())).unwrap();
        let mut command = deltafold();
        command.args(["status", "--output", "json", "--store", &world.prefix.url]);
        let (code, status, _) = run_json(&mut command);
        assert_eq!(code, 0, "{status:#}");
        let problems = status["problems"].to_string();
        let interval = format!("revisions {} to {}", own.start, own.last);
        assert!(problems.contains("OverlappingDeltas"), "{problems}");
        assert!(problems.contains(&interval), "{problems}");
        follower.terminate().succeeded();
        world.check_all_is_saved();
    });
}

/// The exit code must not report success.
#[test]
fn a_final_full_that_cannot_be_taken() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 5, 100);
        let args = [&SLOW[..], &["--final"]].concat();
        let follower = world.follow(&args);
        world.etcd.end();
        let ended = follower.terminate();
        assert_eq!(ended.code, 69, "{}", ended.log);
        assert_eq!(ended.reason(), "EtcdUnreachable", "{}", ended.json);
        assert!(world.prefix.names().iter().all(|n| !n.is_final));
    });
}

/// etcd does not have the known position, and nobody writes: a client that waits for it gets an error.
#[test]
fn a_watch_that_never_tells_what_it_should() {
    with_etcd(EtcdVersion::V3_6, |world| {
        let options = etcd::without_tls(world.endpoints());
        let handle = tokio::runtime::Handle::current();
        let way = Connector::new(options, handle, Cancel::default()).unwrap();
        let transaction = Transaction {
            revision: world.revision(),
            changes: vec![KeyChange::default()],
        };
        let mut known = Known::nothing_at(transaction.revision - 1);
        known.push(Position::after(&transaction));
        let mut feed = Feed::new(way, world.endpoints(), known);
        let e = feed.verify().unwrap_err();
        assert_eq!(e.reason(), Reason::EtcdUnreachable, "{e}");
        assert!(e.to_string().contains("nothing came after 1"), "{e}");
        // It continues when a revision arrives.
        world.put("/a", "1");
        assert_eq!(
            feed.verify().unwrap(),
            Some(Ended::Forked { same_up_to: None })
        );
    });
}

#[test]
fn a_final_full() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 5, 100);
        let args = [&SLOW[..], &["--final"]].concat();
        let follower = world.follow(&args);
        world.put_many("/a/", 30, 100);
        follower.terminate().succeeded();
        let names = world.prefix.names();
        let last = names.last().unwrap();
        assert!(last.is_final && last.kind == Kind::Full, "{names:?}");
        assert_eq!(last.last.0, world.revision(), "{names:?}");
        world.check_all_is_saved();
    });
}

#[test]
fn deltas_by_events_and_by_bytes() {
    with_etcd(EtcdVersion::V3_6, |world| {
        let args = [&SLOW[..], &["--delta-events", "10"]].concat();
        let mut follower = world.follow(&args);
        let last = world.put_many("/a/", 40, 10);
        follower.wait_saved(&world.prefix, last - 9);
        follower.terminate().succeeded();
        let by_events = world.prefix.deltas().len();
        assert!((3..=6).contains(&by_events), "{:?}", world.prefix.names());
        let args = [&SLOW[..], &["--delta-bytes", "100KiB"]].concat();
        let mut follower = Follower::start(&world.prefix, &world.endpoints(), &args);
        world.put_many("/a/", 40, 20_000);
        let prefix = world.prefix.clone();
        follower.wait_until("deltas by bytes", || prefix.deltas().len() >= by_events + 5);
        follower.terminate().succeeded();
        world.check_all_is_saved();
    });
}

#[test]
fn nothing_is_saved_where_nothing_changes() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 5, 100);
        let args = ["--delta-period", "200ms", "--full-schedule", "0 0 29 2 *"];
        let mut follower = world.follow(&args);
        std::thread::sleep(Duration::from_secs(3));
        follower.assert_runs();
        assert_eq!(world.prefix.names().len(), 1);
        world.put("/a", "1");
        let revision = world.revision();
        follower.wait_saved(&world.prefix, revision);
        std::thread::sleep(Duration::from_secs(1));
        follower.terminate().succeeded();
        assert_eq!(world.prefix.names().len(), 2);
        world.check_all_is_saved();
    });
}

#[test]
fn fulls_by_a_schedule() {
    with_etcd(EtcdVersion::V3_6, |world| {
        let load = Load::start(&world.endpoints(), world.seed, &LoadOptions::default());
        load.wait_for(20);
        let args = [&PERIOD[..], &["--full-schedule", "*/3 * * * * *"]].concat();
        let mut follower = world.follow(&args);
        let prefix = world.prefix.clone();
        follower.wait_until("four fulls", || prefix.fulls().len() >= 4);
        load.stop();
        follower.terminate().succeeded();
        let checked = world.check_all_is_saved();
        // No revision between two snapshots is lost.
        let ranges = checked.ranges();
        assert_eq!(
            (checked.timelines.len(), ranges.len()),
            (1, 1),
            "{checked:?}"
        );
    });
}

/// No follower ran when the full was due; the next one takes it, once.
#[test]
fn a_full_that_was_missed() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 5, 100);
        let due = Utc::now() + chrono::TimeDelta::seconds(5);
        let daily = format!("{} {} {} * * *", due.second(), due.minute(), due.hour());
        let mut args = PERIOD.to_vec();
        args.extend(["--full-schedule", &daily, "--time-zone", "UTC"]);
        world.follow(&args).terminate().succeeded();
        assert_eq!(world.prefix.fulls().len(), 1);
        while Utc::now() <= due + chrono::TimeDelta::seconds(1) {
            std::thread::sleep(Duration::from_millis(100));
        }
        world.put_many("/a/", 5, 100);
        let mut second = Follower::start(&world.prefix, &world.endpoints(), &args);
        let prefix = world.prefix.clone();
        second.wait_until("the missed full", || prefix.fulls().len() == 2);
        second.wait_log(&["Scheduled"]);
        world.put_many("/b/", 5, 100);
        let revision = world.revision();
        second.wait_saved(&world.prefix, revision);
        second.terminate().succeeded();
        assert_eq!(world.prefix.fulls().len(), 2);
        world.check_all_is_saved();
    });
}

/// Killed at any moment, and started again.
#[test]
fn the_follower_itself_is_killed() {
    with_etcd(EtcdVersion::V3_7, |world| {
        let load = Load::start(&world.endpoints(), world.seed, &LoadOptions::default());
        load.wait_for(20);
        let mut rng = fastrand::Rng::with_seed(world.seed);
        for _ in 0..6 {
            let mut command = snapshot_command("follow", &world.prefix, &world.endpoints());
            command.args([
                "--delta-period",
                "300ms",
                "--full-schedule",
                "*/2 * * * * *",
            ]);
            let mut follower = Follower::spawn(&mut command);
            std::thread::sleep(Duration::from_millis(rng.u64(200..4000)));
            follower.assert_runs();
            follower.kill();
        }
        load.stop();
        let mut last = Follower::start(&world.prefix, &world.endpoints(), &QUICK);
        let revision = world.revision();
        last.wait_saved(&world.prefix, revision);
        last.terminate().succeeded();
        let checked = world.check_all_is_saved();
        assert_eq!(checked.timelines.len(), 1, "{checked:?}");
    });
}

/// Users whose tokens expire while it follows.
#[test]
fn users_and_tokens() {
    let options = EtcdOptions {
        args: ["--auth-token-ttl", "2"].map(Into::into).to_vec(),
        ..EtcdOptions::default()
    };
    crate::support::recorded_etcd::with_options(EtcdVersion::V3_6, &options, |world| {
        world.put_many("/a/", 5, 100);
        world.truth.wait_for(world.revision());
        world.wait(async {
            let mut client = world.etcd.client().await;
            client.role_add("root").await.unwrap();
            client.user_add("root", "hidden", None).await.unwrap();
            client.user_grant_role("root", "root").await.unwrap();
            client.auth_enable().await.unwrap();
        });
        world.etcd.log_in("root", "hidden");
        let user = ["--user", "root:hidden"];
        let args = [&PERIOD[..], &user, &["--full-schedule", "*/4 * * * * *"]].concat();
        let mut follower = world.follow(&args);
        for n in 0..5 {
            std::thread::sleep(Duration::from_secs(2));
            let last = world.put_many(&format!("/b/{n}"), 5, 100);
            follower.wait_saved(&world.prefix, last);
        }
        let prefix = world.prefix.clone();
        follower.wait_until("a later full", || prefix.fulls().len() > 1);
        let ended = follower.terminate().succeeded();
        assert!(!ended.log.contains("hidden"), "{}", ended.log);
        let last = world.revision();
        // The test's own watch has no user any more: compare with what it saw until then.
        assert_eq!(world.prefix.last_saved(), last);
    });
}
