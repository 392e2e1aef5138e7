//! The MinIO of the tests works.

use crate::support::minio::Minio;
use crate::support::tools;
use futures::TryStreamExt as _;
use object_store::path::Path;
use object_store::{ObjectStore as _, ObjectStoreExt as _};

#[tokio::test(flavor = "multi_thread")]
async fn minio_serves() {
    let minio = Minio::start();
    minio.create_bucket("bucket").await;
    let store = minio.store("bucket");
    let path = Path::from("prefix/v2/object");
    store.put(&path, "content".into()).await.unwrap();
    let listed: Vec<_> = store.list(None).try_collect().await.unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].location, path);
    let got = store.get(&path).await.unwrap().bytes().await.unwrap();
    assert_eq!(&got[..], b"content");

    minio
        .set_tag("bucket", path.as_ref(), "a-tag", "true")
        .await;
    assert_eq!(
        minio.tags("bucket", path.as_ref()).await,
        [("a-tag".to_owned(), "true".to_owned())]
    );
    let env = minio.env();
    assert!(env.contains(&("AWS_ENDPOINT_URL".to_owned(), minio.endpoint().to_owned())));
}

#[test]
fn tools_answer() {
    let said = tools::run(&tools::minio(), ["--version"]).unwrap();
    assert!(String::from_utf8(said).unwrap().contains("minio"));
}
