//! MinIO does what every store must do, and the program works on it.

use crate::support::conformance::{Abilities, Server, conforms, runtime, the_program_works_on};
use crate::support::minio::Minio;
use crate::support::s3::Kind;

const PLAIN: Abilities = Abilities {
    versions: false,
    tags: true,
    conditional_update: true,
    conditional_completion: true,
};

#[test]
fn minio_does() {
    let (runtime, minio) = (runtime(), Minio::start());
    let s3 = minio.s3();
    for (bucket, kind) in [("plain", Kind::Plain), ("locked", Kind::Locked)] {
        runtime.block_on(s3.create_bucket(bucket, kind));
        let store = s3.open(&format!("s3://{bucket}/deep/p q"), runtime.handle());
        let versions = matches!(kind, Kind::Locked);
        conforms(&store, Abilities { versions, ..PLAIN });
    }
    // All names at the top of the bucket.
    runtime.block_on(s3.create_bucket("top", Kind::Plain));
    conforms(&s3.open("s3://top", runtime.handle()), PLAIN);
}

#[test]
fn the_program_works_on_minio() {
    let (runtime, minio) = (runtime(), Minio::start());
    runtime.block_on(minio.create_bucket("backups"));
    let options = [
        ("endpoint", minio.endpoint()),
        ("region", "us-east-1"),
        ("access_key_id", minio.access_key()),
        ("secret_access_key", minio.secret_key()),
    ];
    the_program_works_on(&Server::new(runtime, "s3://backups", &options));
}
