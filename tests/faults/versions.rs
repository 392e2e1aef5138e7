//! What a plain listing hides is found: whether the bucket keeps versions, and unfinished uploads.

use crate::support::minio::Minio;
use crate::support::s3::{Kind, S3};
use crate::support::versitygw::Versitygw;
use deltafold::store::{Store, Versioning};
use object_store::path::Path;
use object_store::{MultipartUpload as _, ObjectStoreExt as _};

async fn blocking<T: Send + 'static>(
    store: &Store,
    f: impl FnOnce(&Store) -> T + Send + 'static,
) -> T {
    let store = store.clone();
    tokio::task::spawn_blocking(move || f(&store))
        .await
        .expect("a thread")
}

async fn tells_versions(s3: &S3) {
    let handle = tokio::runtime::Handle::current();
    s3.create_bucket("plain", Kind::Plain).await;
    s3.create_bucket("versioned", Kind::Versioned).await;
    let (plain, store) = (
        s3.open("s3://plain/p", &handle),
        s3.open("s3://versioned/p q", &handle),
    );
    let state = |s: &Store| s.versioning().unwrap();
    assert_eq!(blocking(&plain, state).await, Versioning::Off);
    assert_eq!(blocking(&store, state).await, Versioning::Enabled);

    s3.set_versioning("versioned", "Suspended").await;
    assert_eq!(blocking(&store, state).await, Versioning::Suspended);
}

/// `by_prefix`: whether the server lists the uploads below a prefix.
async fn tells_uploads(s3: &S3, by_prefix: bool) {
    let handle = tokio::runtime::Handle::current();
    s3.create_bucket("uploads", Kind::Plain).await;
    let raw = s3.store("uploads");
    let mut begun = Vec::new();
    for name in ["p/v2/one", "p/deltafold-staging/two", "p2/v2/three"] {
        let mut upload = raw.put_multipart(&Path::from(name)).await.unwrap();
        upload.put_part(vec![7; 5 << 20].into()).await.unwrap();
        begun.push(upload);
    }
    let store = s3.open("s3://uploads/p", &handle);
    blocking(&store, move |store| {
        let uploads = store.uploads().unwrap();
        let mut paths: Vec<_> = uploads.iter().map(|u| u.path.as_str()).collect();
        paths.sort_unstable();
        if !by_prefix {
            assert_eq!(paths, [""; 0]);
            return;
        }
        assert_eq!(paths, ["deltafold-staging/two", "v2/one"]);
        for upload in &uploads {
            let age = chrono::Utc::now() - upload.begun;
            assert!(age.num_seconds().abs() < 600, "{upload:?}");
            store.abort_upload(upload).unwrap();
            // Aborting twice succeeds.
            store.abort_upload(upload).unwrap();
        }
        assert_eq!(store.uploads().unwrap(), []);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn minio_hides_nothing_from_us() {
    let minio = Minio::start();
    let s3 = minio.s3();
    tells_versions(&s3).await;
    // MinIO lists only the uploads of one object and aborts old ones by itself.
    tells_uploads(&s3, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn versitygw_hides_nothing_from_us() {
    let server = Versitygw::start();
    tells_versions(server.s3()).await;
    tells_uploads(server.s3(), true).await;
}
