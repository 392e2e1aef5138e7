//! A real S3 server, versitygw, does what every store must do.

use crate::support::conformance::{
    Abilities, Server, conforms, prefixes_are_taken_as_they_are_written, runtime,
};
use crate::support::random::rounds;
use crate::support::s3::{ACCESS_KEY, Kind, REGION, SECRET_KEY};
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

#[test]
fn versitygw_takes_prefixes_as_they_are_written() {
    let (runtime, server) = (runtime(), Versitygw::start());
    runtime.block_on(server.s3().create_bucket("names", Kind::Plain));
    let options = [
        ("endpoint", server.s3().endpoint()),
        ("region", REGION),
        ("access_key_id", ACCESS_KEY),
        ("secret_access_key", SECRET_KEY),
    ];
    let server = Server::new(runtime, "s3://names", &options);
    prefixes_are_taken_as_they_are_written(&server, rounds(6, 30));
}
