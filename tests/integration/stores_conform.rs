//! A real S3 server, versitygw, does what every store must do.

use crate::support::conformance::{Abilities, conforms, runtime};
use crate::support::s3::Kind;
use crate::support::versitygw::Versitygw;

#[test]
fn versitygw_does() {
    let (runtime, server) = (runtime(), Versitygw::start());
    let s3 = server.s3();
    for (bucket, kind) in [("plain", Kind::Plain), ("locked", Kind::Locked)] {
        runtime.block_on(s3.create_bucket(bucket, kind));
        let store = s3.open(&format!("s3://{bucket}/deep/p q"), runtime.handle());
        let has = Abilities {
            versions: matches!(kind, Kind::Locked),
            tags: true,
            conditional_update: true,
            conditional_completion: true,
        };
        conforms(&store, has);
    }
}
