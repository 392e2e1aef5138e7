//! The number of requests for a saved delta.

use crate::support::etcd::EtcdVersion;
use crate::support::follower::QUICK;
use crate::support::minio::Minio;
use crate::support::proxy::Proxy;
use crate::support::recorded_etcd::with_etcd;
use crate::support::restorable::Prefix;
use crate::support::s3::{Kind, S3};
use crate::support::versitygw::Versitygw;

/// Asserts the number of requests for each delta of a follower that has run for a while, without those of its
/// lock.
fn requests_of_deltas(server: &S3) {
    const DELTAS: usize = 20;
    with_etcd(EtcdVersion::V3_6, |world| {
        world.wait(server.create_bucket("follow", Kind::Plain));
        let proxy = Proxy::start(server.endpoint());
        world.prefix = Prefix::s3(&S3::new(&proxy.url()), "follow", "prefix");
        let seen = Prefix::s3(server, "follow", "prefix");
        let mut follower = world.follow(&QUICK);
        let revision = world.put_many("/first/", 3, 100);
        follower.wait_saved(&seen, revision);
        let before = seen.deltas().len();
        proxy.take();
        while seen.deltas().len() < before + DELTAS {
            let revision = world.put_many("/k/", 3, 100);
            follower.wait_saved(&seen, revision);
        }
        let deltas = seen.deltas().len() - before;
        let mut requests = proxy.take().requests;
        requests.retain(|r| !r.target.contains("deltafold-locks"));
        println!("{} requests for {deltas} deltas", requests.len());
        let puts = requests.iter().filter(|r| r.method == "PUT").count();
        // A delta can be under way when the requests are taken.
        assert!(puts.abs_diff(deltas) <= 1, "{deltas}: {requests:#?}");
        assert!(requests.len() <= 5 * deltas + 2, "{deltas}: {requests:#?}");
        world.prefix = seen;
        follower.terminate().succeeded();
        world.check_all_is_saved();
    });
}

#[test]
fn a_delta_takes_five_requests_at_most_on_minio() {
    let minio = Minio::start();
    requests_of_deltas(&minio.s3());
}

#[test]
fn a_delta_takes_five_requests_at_most_on_versitygw() {
    let server = Versitygw::start();
    requests_of_deltas(server.s3());
}
