//! A real S3 server, versitygw, does what every store must do.

use crate::support::conformance::{conforms, runtime};
use crate::support::s3::Kind;
use crate::support::versitygw::Versitygw;
use deltafold::store::probe::{Ability, AbilityState};

#[test]
fn versitygw_does() {
    let (runtime, server) = (runtime(), Versitygw::start());
    let s3 = server.s3();
    for (bucket, kind, absent) in [
        (
            "plain",
            Kind::Plain,
            &[Ability::Versioning, Ability::ObjectLock][..],
        ),
        ("locked", Kind::Locked, &[]),
    ] {
        runtime.block_on(s3.create_bucket(bucket, kind));
        let store = s3.open(&format!("s3://{bucket}/deep/p q"), runtime.handle());
        // So that large objects are copied by ranges.
        let lacks = conforms(&store.with_largest_range(5 << 20));
        let absent: Vec<_> = absent.iter().map(|a| (*a, AbilityState::Absent)).collect();
        assert_eq!(lacks, absent, "{bucket}");
    }
}
