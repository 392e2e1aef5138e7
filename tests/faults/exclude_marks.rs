//! Exclusion markers as tags on real servers: they are set, `deltafold list` sees them, and the tags of others
//! survive.

use crate::support::fake_s3::{Dialect, FakeS3};
use crate::support::minio::Minio;
use crate::support::s3::{Kind, S3};
use crate::support::versitygw::Versitygw;
use crate::support::{copy_fixture, deltafold, succeed};
use deltafold::backup::catalog::mark_of;
use deltafold::error::Reason;
use deltafold::store::Store;
use object_store::ObjectStoreExt as _;
use object_store::path::Path;

const TAG: (&str, &str) = ("x-etcd-snapshot-exclude", "true");

fn pairs(tags: &[(&str, &str)]) -> Vec<(String, String)> {
    let tags = tags.iter();
    tags.map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
        .collect()
}

async fn blocking<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(f).await.expect("a thread")
}

async fn exclude(store: &Store, path: &'static str) -> deltafold::error::Result<()> {
    let store = store.clone();
    blocking(move || store.exclude(path, &mark_of(path))).await
}

async fn goes_round(s3: &S3, bucket: &'static str, kind: Kind) {
    let handle = tokio::runtime::Handle::current();
    s3.create_bucket(bucket, kind).await;
    let fixture = copy_fixture("kubernetes");
    let raw = s3.store(bucket);
    let mut names = Vec::new();
    for file in std::fs::read_dir(fixture.path().join("v2")).unwrap() {
        let file = file.unwrap();
        let name = file.file_name().into_string().unwrap();
        let path = Path::from(format!("p/v2/{name}"));
        let content = std::fs::read(file.path()).unwrap();
        raw.put(&path, content.into()).await.unwrap();
        names.push(name);
    }
    names.sort();
    let name: &'static str = names.last().unwrap().clone().leak();
    let below: &'static str = format!("v2/{name}").leak();
    let key = format!("p/{below}");
    let store = s3.open(&format!("s3://{bucket}/p"), &handle);
    let others = [("team", "a b/c:1+2=@"), ("x", "")];
    s3.set_tags(bucket, &key, &others).await;

    exclude(&store, below).await.unwrap();
    let mut all = others.to_vec();
    all.push(TAG);
    assert_eq!(s3.tags(bucket, &key).await, pairs(&all));
    // Setting it twice is the same as once, and no marker object appears.
    exclude(&store, below).await.unwrap();
    assert_eq!(s3.tags(bucket, &key).await, pairs(&all));
    assert!(
        raw.head(&Path::from(format!("p/{}", mark_of(below))))
            .await
            .is_err()
    );
    let listed = |env: Vec<(String, String)>| {
        let mut c = deltafold();
        c.envs(env).args(["list", "--deep", "--output", "json"]);
        c.args(["--store", &format!("s3://{bucket}/p")]);
        let list = succeed(&mut c);
        let all = list["snapshots"].as_array().unwrap().clone();
        let excluded = all.iter().filter(|s| s["excluded"] == true);
        excluded
            .map(|s| s["name"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(listed(s3.env()), [name]);

    let gone = exclude(&store, "v2/Full-1").await.unwrap_err();
    assert_eq!(gone.reason(), Reason::SnapshotVanished, "{gone}");
    assert!(
        raw.head(&Path::from("p/deltafold-excluded/Full-1"))
            .await
            .is_err()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn marks_go_round_on_minio() {
    let minio = Minio::start();
    goes_round(&minio.s3(), "plain", Kind::Plain).await;
    goes_round(&minio.s3(), "versioned", Kind::Versioned).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn marks_go_round_on_versitygw() {
    let server = Versitygw::start();
    goes_round(server.s3(), "plain", Kind::Plain).await;
    goes_round(server.s3(), "versioned", Kind::Versioned).await;
}

/// Where tags are refused, the marker is an object.
#[tokio::test(flavor = "multi_thread")]
async fn without_tags_an_object_is_the_mark() {
    let server = FakeS3::start(Dialect {
        refuses_tags: Some((501, "NotImplemented")),
        ..Dialect::default()
    });
    let handle = tokio::runtime::Handle::current();
    let store = server.s3().open("s3://b/p", &handle);
    let raw = server.s3().store("b");
    raw.put(&Path::from("p/v2/Full-1"), "x".into())
        .await
        .unwrap();
    exclude(&store, "v2/Full-1").await.unwrap();
    let names: Vec<String> = server.objects().into_keys().collect();
    assert_eq!(names, ["b/p/deltafold-excluded/Full-1", "b/p/v2/Full-1"]);
    let gone = exclude(&store, "v2/Full-2").await.unwrap_err();
    assert_eq!(gone.reason(), Reason::SnapshotVanished, "{gone}");
    assert_eq!(server.objects().len(), 2);
}
