//! Copies to a real S3 server, between two of them, and back.

use crate::support::history::{Compression, with_checksum};
use crate::support::made_backups::{LAST, T0, mixed, objects_in, objects_of, paths};
use crate::support::minio::Minio;
use crate::support::orphan_deltas::{baseless, catalog};
use crate::support::scratch;
use crate::support::{deltafold, run_json};
use object_store::ObjectStoreExt;
use object_store::path::Path as ObjectPath;
use tokio::runtime::Runtime;

#[test]
fn to_a_server_between_its_buckets_and_back() {
    let rt = Runtime::new().unwrap();
    let minio = Minio::start();
    let bucket = mixed();
    bucket.succeeds("list", &[]);
    bucket.noise_delta(18);
    for name in ["one", "two"] {
        rt.block_on(minio.create_bucket(name));
    }
    let back = scratch::folder().unwrap();
    let there = back.path().to_str().unwrap();
    let local = bucket.path().to_str().unwrap();
    for (from, to) in [
        (local, "s3://one/a/prefix"),
        ("s3://one/a/prefix", "s3://one/other"),
        ("s3://one/other", "s3://two"),
        ("s3://two", there),
    ] {
        for copied in [6, 0] {
            let mut c = deltafold();
            c.args(["copy", "--output", "json", "--from", from, "--to", to]);
            let (code, json, stderr) = run_json(c.envs(minio.env()));
            assert_eq!(
                (code, &json["copied"]),
                (0, &copied.into()),
                "{to}: {stderr}"
            );
        }
    }
    let mut expected = bucket.objects();
    expected.retain(|p, _| {
        !p.ends_with("README") && !p.contains("-00001000-") && !p.contains("Incr-00000070")
    });
    assert_eq!(paths(&objects_in(back.path())), paths(&expected));
    assert!(objects_in(back.path()) == expected);

    // Tagged snapshots stay behind.
    let tagged = format!("v2/Full-00000000-{:08}-{}.gz", LAST + 18, T0 + 50);
    let store = minio.store("two");
    let noise = Compression::Gzip.pack(&with_checksum(b"tagged"));
    let path = ObjectPath::from(tagged.as_str());
    rt.block_on(store.put(&path, noise.into())).unwrap();
    rt.block_on(minio.set_tag("two", &tagged, "x-etcd-snapshot-exclude", "true"));
    let mut c = deltafold();
    c.args([
        "copy", "--output", "json", "--from", "s3://two", "--to", there,
    ]);
    let (code, json, stderr) = run_json(c.envs(minio.env()));
    assert_eq!((code, &json["copied"]), (0, &0.into()), "{stderr}");
    let objects = rt.block_on(objects_of(&store));
    assert!(!objects.keys().any(|p| p.starts_with("deltafold-staging")));
}

#[test]
fn two_servers_with_settings_of_their_own() {
    let rt = Runtime::new().unwrap();
    let (one, two) = (Minio::start(), Minio::start());
    rt.block_on(one.create_bucket("backups"));
    rt.block_on(two.create_bucket("backups"));
    let source = mixed();
    for (path, bytes) in source.objects() {
        let path = ObjectPath::from(path);
        rt.block_on(one.store("backups").put(&path, bytes.into()))
            .unwrap();
    }
    let mut c = deltafold();
    c.args([
        "copy",
        "--output",
        "json",
        "--bandwidth",
        "100MiB",
        "--parallel",
        "4",
    ]);
    // A token that belongs to neither server.
    c.env("AWS_ACCESS_KEY_ID", "another");
    c.env("AWS_SESSION_TOKEN", "its-token");
    // The same URL twice: the settings distinguish the servers.
    c.args(["--from", "s3://backups", "--to", "s3://backups"]);
    for (flag, minio) in [("--from-option", &one), ("--to-option", &two)] {
        for (key, value) in [
            ("endpoint", minio.endpoint()),
            ("access_key_id", minio.access_key()),
            ("secret_access_key", minio.secret_key()),
        ] {
            c.arg(flag).arg(format!("{key}={value}"));
        }
    }
    c.args([
        "--store-option",
        "region=us-east-1",
        "--store-option",
        "allow_http=true",
    ]);
    let (code, json, stderr) = run_json(&mut c);
    assert_eq!((code, &json["copied"]), (0, &5.into()), "{stderr}");
    let got = rt.block_on(objects_of(&two.store("backups")));
    assert_eq!(baseless(&catalog(got.keys())), [""; 0]);
    assert_eq!(got.len(), 7, "{:?}", got.keys());
}
