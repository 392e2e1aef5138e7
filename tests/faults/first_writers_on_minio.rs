//! Two processes write the first snapshot to one new prefix at the same time. Of two clusters, exactly one
//! wins; of one cluster, both succeed.

use crate::support::etcd::EtcdVersion;
use crate::support::follower::snapshot;
use crate::support::minio::Minio;
use crate::support::recorded_etcd::with_etcd;
use crate::support::restorable::Prefix;
use crate::support::{deltafold, run_json, seed};

/// Repeats the race with random pauses, on MinIO and in a folder.
#[test]
fn of_two_first_writers_exactly_one_wins() {
    with_etcd(EtcdVersion::V3_6, |world| {
        let minio = Minio::start();
        world.wait(minio.create_bucket("race"));
        let mut rng = fastrand::Rng::with_seed(seed());
        let other = world.another("other");
        let etcds = [&world.etcd, &other];
        let ids = etcds.map(|e| world.cluster_id(e));
        let mut won = [0, 0];
        for round in 0..12 {
            let prefixes = [
                Prefix::minio(&minio, "race", &format!("{round}")),
                Prefix::local(&world.folder().join(format!("race-{round}"))),
            ];
            for prefix in prefixes {
                let pause = std::time::Duration::from_millis(rng.u64(..30));
                let runs = std::thread::scope(|scope| {
                    let runs = etcds.map(|etcd| {
                        let at = [etcd.endpoint().to_owned()];
                        let prefix = &prefix;
                        let run = scope.spawn(move || snapshot("full", prefix, &at, &[]));
                        std::thread::sleep(pause);
                        run
                    });
                    runs.map(|run| run.join().unwrap())
                });
                let winners: Vec<usize> = (0..2).filter(|&i| runs[i].code == 0).collect();
                assert_eq!(winners.len(), 1, "{runs:?}");
                let (winner, loser) = (winners[0], &runs[1 - winners[0]]);
                assert_eq!((loser.code, loser.reason()), (65, "OtherCluster"));
                won[winner] += 1;
                assert_eq!(prefix.names().len(), 1);
                let mut command = deltafold();
                command.args(["list", "--output", "json", "--store", &prefix.url]);
                let (_, listed, _) = run_json(command.envs(prefix.env.iter().cloned()));
                assert_eq!(listed["identity"]["cluster_id"], ids[winner]);
            }
        }
        println!("won {won:?}");
    });
}

/// Two first snapshots of one cluster do not refuse each other.
#[test]
fn two_first_writers_of_one_cluster_both_write() {
    with_etcd(EtcdVersion::V3_6, |world| {
        let minio = Minio::start();
        world.wait(minio.create_bucket("race"));
        for round in 0..6 {
            let prefix = Prefix::minio(&minio, "race", &format!("{round}"));
            let at = world.endpoints();
            let runs = std::thread::scope(|scope| {
                [0, 1]
                    .map(|_| scope.spawn(|| snapshot("full", &prefix, &at, &[])))
                    .map(|run| run.join().unwrap())
            });
            for run in runs {
                run.succeeded();
            }
        }
    });
}
