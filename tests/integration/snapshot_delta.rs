//! `deltafold snapshot delta`: what it saves, when it takes a full instead, and that two histories are never
//! spliced. Each test ends by comparing all restorable revisions with what etcd had.

use crate::support::copy_dir;
use crate::support::etcd::{Etcd, EtcdOptions, EtcdVersion};
use crate::support::follower::snapshot;
use crate::support::history::Compression;
use crate::support::process::free_port;
use crate::support::random_load::{Load, LoadOptions};
use crate::support::recorded_etcd::{RecordedEtcd, with_etcd, with_options};
use crate::support::restorable::Prefix;
use crate::support::truth::Truth;
use crate::support::{deltafold, rounds, run_json};
use etcd_client::{PutOptions, TxnOp};
use serde_json::Value;
use std::time::Duration;

/// Returns why a full was taken, or null if none was.
fn why(json: &Value) -> &str {
    json["full_reason"].as_str().unwrap_or_default()
}

#[test]
fn an_empty_bucket_gets_its_first_full() {
    for version in EtcdVersion::ALL {
        with_etcd(version, |world| {
            world.put_many("/a/", 20, 100);
            let done = world.delta(&[]);
            assert_eq!(why(&done.json), "EmptyBucket", "{}", done.json);
            assert_eq!(done.json["revision"], 21);
            assert_eq!(done.json["timeline_began"], false);
            assert_eq!(done.json["hole"], Value::Null);
            assert_eq!(world.prefix.fulls()[0].last.0, 21);
            assert_eq!(world.prefix.names().len(), 1);
            world.check_all_is_saved();
        });
    }
}

#[test]
fn an_etcd_that_nobody_wrote_to() {
    with_etcd(EtcdVersion::V3_6, |world| {
        let done = world.delta(&[]);
        assert_eq!(
            (why(&done.json), &done.json["revision"]),
            ("EmptyBucket", &1.into())
        );
        assert_eq!(world.delta(&[]).json["status"], "NothingToDo");
        world.put("/a", "1");
        let done = world.delta(&[]);
        assert_eq!((why(&done.json), &done.json["revision"]), ("", &2.into()));
        world.check_all_is_saved();
    });
}

#[test]
fn no_change_no_object() {
    for version in EtcdVersion::ALL {
        with_etcd(version, |world| {
            world.put_many("/a/", 5, 100);
            for _ in 0..2 {
                world.delta(&[]);
                let names = world.prefix.names();
                for _ in 0..2 {
                    let done = world.delta(&[]);
                    assert_eq!(done.json["status"], "NothingToDo", "{}", done.json);
                    assert_eq!(done.json["snapshots"], serde_json::json!([]));
                    assert_eq!(done.json["revision"], world.revision());
                    assert_eq!(world.prefix.names(), names, "{version}");
                }
                world.put("/a/00001", "other");
            }
            world.delta(&[]);
            assert_eq!(world.prefix.names().len(), 3);
            world.check_all_is_saved();
        });
    }
}

#[test]
fn a_delta_holds_the_events_since_the_last() {
    for version in EtcdVersion::ALL {
        with_etcd(version, |world| {
            world.put_many("/a/", 5, 100);
            let full = world.delta(&[]).json["revision"].as_i64().unwrap();
            world.put_many("/a/", 10, 10);
            world.delete("/a/0000");
            let last = world.txn(vec![
                TxnOp::put("/b", "1", None),
                TxnOp::put("/c", "", None),
                TxnOp::delete("/a/00009", None),
            ]);
            let done = world.delta(&[]);
            assert_eq!(why(&done.json), "");
            assert_eq!(done.json["revision"], last);
            let delta = done.last_snapshot();
            assert_eq!(
                (
                    &delta["kind"],
                    &delta["start_revision"],
                    &delta["last_revision"]
                ),
                (&"Incr".into(), &(full + 1).into(), &last.into())
            );
            // 10 puts, 10 deletions in one revision, 2 puts: the last key had been deleted already.
            assert_eq!(done.json["events"], 22, "{}", done.json);
            world.check_all_is_saved();
        });
    }
}

/// One object that is too large does not end backups, and is not reported as damage.
#[test]
fn a_full_of_more_than_is_allowed_is_replaced_and_the_flag_is_named() {
    with_etcd(EtcdVersion::V3_6, |world| {
        for wanted in ["EmptyBucket", "TooLarge"] {
            world.put("/a", wanted);
            let done = world.delta(&["--max-database-bytes", "4KiB"]);
            assert_eq!(why(&done.json), wanted, "{}", done.json);
            let warnings = done.json["warnings"].to_string();
            assert!(
                warnings.contains("each `snapshot delta` takes another full"),
                "{warnings}"
            );
            assert!(warnings.contains("--max-database-bytes"), "{warnings}");
            let message = done.json["full_message"].as_str().unwrap();
            let names_it = message.contains("--max-database-bytes");
            assert_eq!(names_it, wanted == "TooLarge", "{message}");
        }
        world.put("/a", "allowed");
        assert_eq!(why(&world.delta(&[]).json), "");
        world.check_all_is_saved();
    });
}

/// Repeatedly under load, with compactions of what is saved.
#[test]
fn deltas_under_load() {
    for version in EtcdVersion::ALL {
        with_etcd(version, |world| {
            let load = Load::start(&world.endpoints(), world.seed, &LoadOptions::default());
            for n in 0..8 {
                load.wait_for(60);
                let done = world.delta(&["--compression", ["gzip", "zstd:1"][n % 2]]);
                assert_eq!(why(&done.json), if n == 0 { "EmptyBucket" } else { "" });
                if n % 3 == 2 {
                    // The changes that are left prove that the next delta continues them.
                    world.compact(done.json["revision"].as_i64().unwrap() - 3);
                }
            }
            load.stop();
            world.delta(&[]);
            let checked = world.check_all_is_saved();
            assert_eq!(checked.timelines.len(), 1, "{checked:?}");
            world.wait(world.truth.is_that_of(&world.etcd));
        });
    }
}

#[test]
fn it_is_split_at_a_size_but_never_within_a_transaction() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put("/a", "1");
        world.delta(&[]);
        for n in 0..30 {
            world.put_many(&format!("/small/{n}/"), 5, 1000);
            let ops = (0..40).map(|i| TxnOp::put(format!("/txn/{i}"), vec![n as u8; 1500], None));
            world.txn(ops.collect());
        }
        let done = world.delta(&["--max-delta-bytes", "100KiB", "--compression", "none"]);
        let deltas = world.prefix.deltas();
        assert!(deltas.len() > 10, "{deltas:?}");
        assert_eq!(
            done.json["snapshots"].as_array().unwrap().len(),
            deltas.len()
        );
        let mut next = 3;
        for delta in &deltas {
            assert_eq!(delta.start.0, next, "{deltas:?}");
            next = delta.last.0 + 1;
        }
        assert_eq!(next, world.revision() + 1);
        for delta in done.json["snapshots"].as_array().unwrap() {
            // A transaction with 60 kB of values makes more than 80 kB of text, and one transaction may exceed
            // the limit.
            let bytes = delta["bytes"].as_u64().unwrap();
            assert!(bytes < 220 << 10, "{delta}");
        }
        world.check_all_is_saved();

        // A transaction larger than the limit becomes a delta of its own.
        world.put("/before", "1");
        let ops = (0..100).map(|i| TxnOp::put(format!("/txn/{i}"), vec![7; 9000], None));
        let large = world.txn(ops.collect());
        world.put("/behind", "1");
        world.delta(&["--max-delta-bytes", "1K"]);
        let holds = |d: &&deltafold::backup::SnapshotName| d.start.0 <= large && d.last.0 >= large;
        assert_eq!(world.prefix.deltas().iter().filter(holds).count(), 1);
        world.check_all_is_saved();
    });
}

/// Another etcd writes the same number of revisions with other content. What its last revision shares with the
/// saved one decides nothing.
fn another_history(version: EtcdVersion, last: impl Fn(&RecordedEtcd, u8), behind: usize) {
    with_etcd(version, |world| {
        world.put_many("/a/", 5, 100);
        world.delta(&[]);
        world.put_many("/a/", 5, 50);
        last(world, 1);
        world.delta(&[]);
        let saved = world.revision();
        let folder = world.folder().join("another");
        world.truth.wait_for(saved);

        let another = Etcd::start(version, &folder);
        let truth = Truth::start(&[another.endpoint().to_owned()]);
        let first = std::mem::replace(&mut world.truth, truth);
        world.etcd = another;
        world.put_many("/other/", 10, 100);
        last(world, 2);
        assert_eq!(world.revision(), saved);
        world.put_many("/a/", behind, 10);
        let revision = world.revision();
        let done = world.delta(&["--take-over"]);
        assert_eq!(why(&done.json), "HistoryMismatch", "{}", done.json);
        assert_eq!(done.json["timeline_began"], true, "{}", done.json);
        assert!(
            done.json["full_message"]
                .as_str()
                .is_some_and(|m| !m.is_empty())
        );
        assert_eq!(done.json["revision"], revision);
        world.put_many("/b/", 5, 10);
        let done = world.delta(&[]);
        assert_eq!(why(&done.json), "", "{}", done.json);
        let revision = world.revision();
        world.truth.wait_for(revision);
        world.check_both_are_saved((&first, saved), revision, 300);
    });
}

#[test]
fn the_same_revision_with_another_value_is_another_history() {
    for version in EtcdVersion::ALL {
        let last = |world: &RecordedEtcd, n: u8| _ = world.put("/last", vec![n]);
        another_history(version, last, 0);
        another_history(version, last, 7);
    }
}

#[test]
fn the_same_revision_with_another_lease_is_another_history() {
    let last = |world: &RecordedEtcd, n: u8| {
        world.wait(async {
            let mut client = world.etcd.client().await;
            let options = etcd_client::LeaseGrantOptions::new().with_id(n.into());
            client.lease_grant(3600, Some(options)).await.unwrap();
            let options = PutOptions::new().with_lease(n.into());
            client.put("/last", "same", Some(options)).await.unwrap();
        });
    };
    another_history(EtcdVersion::V3_6, last, 3);
}

#[test]
fn the_same_revision_with_one_key_more_is_another_history() {
    let last = |world: &RecordedEtcd, n: u8| {
        let ops = (0..n).map(|i| TxnOp::put(format!("/last/{i}"), "same", None));
        world.txn(ops.collect());
    };
    another_history(EtcdVersion::V3_6, last, 3);
}

#[test]
fn a_put_where_a_deletion_was_is_another_history() {
    let last = |world: &RecordedEtcd, n: u8| {
        _ = match n {
            1 => world.delete("/a/00004"),
            _ => world.put("/a/00004", ""),
        }
    };
    another_history(EtcdVersion::V3_6, last, 3);
}

#[test]
fn what_was_compacted_before_it_was_saved_is_a_reported_hole() {
    for version in EtcdVersion::ALL {
        with_etcd(version, |world| {
            world.put_many("/kept/", 2, 100);
            world.put_many("/a/", 5, 100);
            world.delta(&[]);
            let saved = world.revision();
            world.put_many("/a/", 20, 100);
            let compacted = world.revision();
            world.compact(compacted);
            world.put_many("/a/", 3, 100);
            let done = world.delta(&[]);
            assert_eq!(why(&done.json), "Compacted", "{}", done.json);
            let hole = &done.json["hole"];
            assert_eq!(hole["first_revision"], saved + 1, "{}", done.json);
            // The full holds everything above its compacted revision, and that revision itself.
            let last = hole["last_revision"].as_i64().unwrap();
            assert!(
                (compacted - 1..compacted + 3).contains(&last),
                "{}",
                done.json
            );
            world.put_many("/b/", 3, 100);
            assert_eq!(why(&world.delta(&[]).json), "");
            let checked = world.check_all_is_saved();
            let ranges = checked.ranges();
            assert!(ranges.iter().any(|r| r.1 == saved), "{checked:?}");
            for r in &ranges {
                assert!(
                    r.1 <= saved || r.0 > last,
                    "the hole is no hole: {checked:?}"
                );
            }
        });
    }
}

/// After a compaction at exactly the last saved revision nothing can be compared.
#[test]
fn a_compaction_at_the_last_saved_revision_leaves_nothing_to_prove() {
    for version in EtcdVersion::ALL {
        for deletes in [false, true] {
            with_etcd(version, |world| {
                world.put_many("/a/", 5, 100);
                world.delta(&[]);
                world.put_many("/a/", 5, 50);
                if deletes {
                    world.txn(vec![
                        TxnOp::delete("/a/00001", None),
                        TxnOp::put("/a/00002", "x", None),
                        TxnOp::delete("/a/00003", None),
                    ]);
                    world.delete("/a/00004");
                }
                world.delta(&[]);
                let saved = world.revision();
                world.compact(saved);
                let what = format!("{version}, deletions: {deletes}");
                let done = world.delta(&[]);
                assert_eq!(done.json["status"], "NothingToDo", "{what}: {}", done.json);
                assert_eq!(done.json["proven"], false, "{what}");
                world.put_many("/b/", 3, 10);
                let done = world.delta(&[]);
                assert_eq!(why(&done.json), "Compacted", "{what}: {}", done.json);
                assert_eq!(done.json["proven"], false, "{what}");
                assert_eq!(done.json["timeline_began"], false, "{what}");
                world.put_many("/b/", 3, 10);
                let done = world.delta(&[]);
                assert_eq!(why(&done.json), "", "{what}: {}", done.json);
                assert_eq!(done.json["proven"], true, "{what}");
                let checked = world.check_all_is_saved();
                assert_eq!(checked.timelines.len(), 1, "{what}: {checked:?}");
            });
        }
    }
}

/// The same if the newest snapshot is a full that was compacted there, by deltafold or by etcd.
#[test]
fn a_full_that_is_compacted_at_its_own_revision_can_be_gone_on_from() {
    for version in EtcdVersion::ALL {
        for deletes in [false, true] {
            with_etcd(version, |world| {
                world.put_many("/a/", 5, 100);
                if deletes {
                    world.delete("/a/00004");
                }
                world.compact(world.revision());
                world.delta(&[]);
                let what = format!("{version}, deletions: {deletes}");
                // Nothing of the first full can be compared, and enough of the second one.
                for expected in ["Unverifiable", "", ""] {
                    world.put_many("/b/", 3, 10);
                    world.delete("/b/00002");
                    let done = world.delta(&[]);
                    assert_eq!(why(&done.json), expected, "{what}: {}", done.json);
                    let mut compact = crate::support::deltafold();
                    compact.args(["compact", "--output", "json", "--store", &world.prefix.url]);
                    let (code, json, log) = crate::support::run_json(&mut compact);
                    let compacted = match expected {
                        "" => "Succeeded",
                        _ => "NothingToDo",
                    };
                    assert_eq!((code, &json["status"]), (0, &compacted.into()), "{log}");
                }
                let done = world.delta(&[]);
                assert_eq!(done.json["status"], "NothingToDo", "{what}: {}", done.json);
                let checked = world.check_all_is_saved();
                assert_eq!(checked.timelines.len(), 1, "{what}: {checked:?}");
            });
        }
    }
}

/// etcd runs again on an old state of its data. What was compacted cannot disagree: only somebody who saw it
/// knows that another history begins.
#[test]
fn a_history_that_shares_no_revision_with_what_is_saved() {
    for version in EtcdVersion::ALL {
        with_etcd(version, |world| {
            for i in 0..60u8 {
                world.put(format!("/few/{}", i % 3), vec![i; 20]);
            }
            let saved = world.revision();
            world.compact(saved);
            world.snapshot("full", &[]).succeeded();
            let another = Etcd::start(version, &world.folder().join("another"));
            let truth = Truth::start(&[another.endpoint().to_owned()]);
            let first = std::mem::replace(&mut world.truth, truth);
            world.etcd = another;
            world.put_many("/other/", 5, 100);
            let done = world.delta(&["--take-over"]);
            assert_eq!(why(&done.json), "ClusterBehind", "{}", done.json);
            assert_eq!(done.json["timeline_began"], true, "{}", done.json);
            // From here on it is the newest timeline and continues like any other.
            for _ in 0..3 {
                world.put_many("/other/", 4, 100);
                let done = world.delta(&[]);
                assert_eq!(why(&done.json), "", "{}", done.json);
            }
            let revision = world.revision();
            assert!(revision < saved);
            world.snapshot("full", &[]).succeeded();
            world.put("/last", "1");
            let done = world.delta(&[]);
            assert_eq!(why(&done.json), "", "{}", done.json);
            let revision = world.revision();
            world.truth.wait_for(revision);
            let checked = world.check_both_are_saved((&first, saved), revision, 100);
            assert_eq!(checked.timelines.len(), 2, "{checked:?}");
            // By default the new timeline is taken.
            let mut compact = deltafold();
            compact.args(["compact", "--output", "json", "--store", &world.prefix.url]);
            let (code, json, log) = run_json(&mut compact);
            assert_eq!(
                (code, &json["revision"]),
                (0, &revision.into()),
                "{json}\n{log}"
            );
        });
    }
}

#[test]
fn a_cluster_behind_the_bucket_begins_a_new_timeline() {
    for version in EtcdVersion::ALL {
        with_etcd(version, |world| {
            world.put_many("/a/", 10, 100);
            world.delta(&[]);
            let old = world.folder().join("old");
            world.restart(|data_dir| copy_dir(data_dir, &old));
            let kept = world.revision();
            world.put_many("/a/", 10, 50);
            world.delta(&[]);
            let saved = world.revision();
            world.truth.wait_for(saved);
            world.truth.end();
            world.restart(|data_dir| {
                std::fs::remove_dir_all(data_dir).unwrap();
                copy_dir(&old, data_dir);
            });
            assert_eq!(world.revision(), kept);
            let truth = world.truth.forked_at(kept, &world.endpoints());
            let first = std::mem::replace(&mut world.truth, truth);
            // As long as nothing is written, one full of it is enough.
            let done = world.delta(&[]);
            assert_eq!(why(&done.json), "ClusterBehind", "{}", done.json);
            assert_eq!(done.json["timeline_began"], true, "{}", done.json);
            let done = world.delta(&[]);
            assert_eq!(done.json["status"], "NothingToDo", "{}", done.json);
            assert_eq!(done.json["revision"], kept, "{}", done.json);
            world.put_many("/c/", 4, 50);
            let done = world.delta(&[]);
            assert_eq!(why(&done.json), "", "{}", done.json);
            // It grows beyond what was saved before, and the two never meet.
            world.put_many("/c/", 30, 50);
            let done = world.delta(&[]);
            assert_eq!(why(&done.json), "", "{}", done.json);
            let revision = world.revision();
            assert!(revision > saved);
            world.truth.wait_for(revision);
            world.check_both_are_saved((&first, saved), revision, 300);
        });
    }
}

/// A backup with fulls alone must not bring back what was undone: the deltas of the earlier history do not
/// continue any full of the new one.
#[test]
fn a_full_of_another_history_begins_a_new_timeline_too() {
    // The same cluster, set back.
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put("/a", "good");
        world.snapshot("full", &[]).succeeded();
        let old = world.folder().join("old");
        world.restart(|data_dir| copy_dir(data_dir, &old));
        let kept = world.revision();
        world.put("/a", "bad");
        world.delta(&[]);
        world.truth.end();
        world.restart(|data_dir| {
            std::fs::remove_dir_all(data_dir).unwrap();
            copy_dir(&old, data_dir);
        });
        assert_eq!(world.revision(), kept);
        let done = world.snapshot("full", &[]).succeeded();
        assert_eq!(why(&done.json), "ClusterBehind", "{}", done.json);
        assert_eq!(done.json["timeline_began"], true, "{}", done.json);
        let mut get = deltafold();
        get.args([
            "get",
            "/a",
            "--output",
            "json",
            "--store",
            &world.prefix.url,
        ]);
        let (code, json, log) = run_json(&mut get);
        assert_eq!(
            (code, &json["revision"]),
            (0, &kept.into()),
            "{json}\n{log}"
        );
        let done = world.snapshot("full", &[]).succeeded();
        assert_eq!(why(&done.json), "Requested", "{}", done.json);
        assert_eq!(done.json["timeline_began"], false, "{}", done.json);
    });
    // Another cluster with the same number of revisions.
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put("/a", "1");
        world.delta(&[]);
        let saved = world.revision();
        world.truth.end();
        world.etcd = Etcd::start(EtcdVersion::V3_6, &world.folder().join("another"));
        world.put("/a", "2");
        assert_eq!(world.revision(), saved);
        let done = world.snapshot("full", &["--take-over"]).succeeded();
        assert_eq!(why(&done.json), "HistoryMismatch", "{}", done.json);
        assert_eq!(done.json["timeline_began"], true, "{}", done.json);
    });
}

#[test]
fn an_old_full_is_followed_by_another() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 5, 100);
        world.delta(&[]);
        std::thread::sleep(Duration::from_millis(2100));
        // Nothing is too old if nothing changed.
        let done = world.delta(&["--max-full-age", "1s"]);
        assert_eq!(done.json["status"], "NothingToDo", "{}", done.json);
        world.put_many("/a/", 5, 100);
        let done = world.delta(&["--max-full-age", "0s"]);
        assert_eq!(why(&done.json), "", "{}", done.json);
        world.put_many("/a/", 5, 100);
        let done = world.delta(&["--max-full-age", "1h"]);
        assert_eq!(why(&done.json), "", "{}", done.json);
        world.put_many("/a/", 5, 100);
        let done = world.delta(&["--max-full-age", "1s"]);
        assert_eq!(why(&done.json), "FullTooOld", "{}", done.json);
        assert_eq!(done.json["timeline_began"], false);
        assert_eq!(done.json["hole"], Value::Null, "{}", done.json);
        assert_eq!(world.prefix.fulls().len(), 2);
        world.put_many("/a/", 5, 100);
        world.delta(&[]);
        let checked = world.check_all_is_saved();
        // Including what came just before the second full.
        assert_eq!(checked.timelines.len(), 1, "{checked:?}");
        let ranges = checked.ranges();
        assert_eq!(ranges.len(), 1, "{checked:?}");
    });
}

#[test]
fn the_next_endpoint_is_tried() {
    with_etcd(EtcdVersion::V3_6, |world| {
        world.put_many("/a/", 5, 100);
        let nobody = format!("http://127.0.0.1:{}", free_port());
        let endpoints = [nobody, world.etcd.endpoint().to_owned()];
        let args = ["--dial-timeout", "1s"];
        snapshot("delta", &world.prefix, &endpoints, &args).succeeded();
        world.put_many("/a/", 5, 100);
        let done = snapshot("delta", &world.prefix, &endpoints, &args).succeeded();
        assert_eq!(why(&done.json), "");
        world.check_all_is_saved();
    });
}

/// The largest documented request of etcd: it sends such transactions, and catch-up responses of a thousand
/// revisions, as fragments.
#[test]
fn messages_of_any_size() {
    for version in EtcdVersion::ALL.into_iter().rev().take(rounds(1, 3)) {
        let options = EtcdOptions {
            max_request_bytes: 10 << 20,
            ..EtcdOptions::default()
        };
        with_options(version, &options, |world| {
            world.put("/a", "1");
            world.delta(&[]);
            for n in 0..2u8 {
                world.put(format!("/large/{n}"), vec![n; (10 << 20) - 200]);
                let ops = (0..1000).map(|i| TxnOp::put(format!("/txn/{i}"), vec![n; 10_000], None));
                world.txn(ops.collect());
                world.put_many("/some/", 20, 1 << 20);
            }
            world.delete("/txn/");
            let done = world.delta(&["--max-delta-bytes", "16MiB", "--compression", "zstd:1"]);
            assert_eq!(why(&done.json), "", "{}", done.json);
            let checked = world.check_all_is_saved();
            assert_eq!(checked.timelines.len(), 1);
            // Bounded by the largest transactions and a part of a delta, not by the 80 MB of events.
            let peak = done.json["peak_memory_bytes"].as_u64().unwrap();
            println!("{version}: peak of {peak} bytes");
            assert!(peak < 112 << 20, "{version}: {peak} bytes");
        });
    }
}

/// A prefix that etcd-backup-restore wrote and still writes to.
#[test]
fn beside_the_snapshots_of_another_tool() {
    with_etcd(EtcdVersion::V3_5, |world| {
        let recording = world.saved_by_another_tool();
        let theirs = world.prefix.names();

        // An old full, which must not lead to another full.
        let never = ["--max-full-age", "0s"];
        world.put_many("/b/", 10, 100);
        let done = world.delta(&never);
        assert_eq!(why(&done.json), "", "{}", done.json);
        let last = recording.deltas[2].last;
        assert_eq!(done.last_snapshot()["start_revision"], last + 1);
        // Compressed like the newest snapshot.
        assert!(
            done.last_snapshot()["name"]
                .as_str()
                .unwrap()
                .ends_with(".gz")
        );
        assert_eq!(world.prefix.names().len(), theirs.len() + 1);

        // The other tool saves the same events again, cut elsewhere.
        let other = Prefix::local(&world.folder().join("other"));
        recording.write_bucket(
            &world.folder().join("other"),
            Compression::Zlib,
            1_790_000_000,
        );
        world.put_many("/b/", 10, 100);
        snapshot("delta", &other, &world.endpoints(), &never).succeeded();
        world.put_many("/b/", 10, 100);
        snapshot("delta", &other, &world.endpoints(), &never).succeeded();
        for delta in other.deltas() {
            let name = delta.to_string();
            let from = world.folder().join("other/v2").join(&name);
            std::fs::copy(from, world.folder().join("store/v2").join(&name)).unwrap();
        }
        let done = world.delta(&never);
        assert_eq!(done.json["status"], "NothingToDo", "{}", done.json);
        world.put_many("/b/", 10, 100);
        let done = world.delta(&never);
        assert_eq!(why(&done.json), "", "{}", done.json);
        let checked = world.check_all_is_saved();
        assert_eq!(checked.timelines.len(), 1, "{checked:?}");
    });
}
