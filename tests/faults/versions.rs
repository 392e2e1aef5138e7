//! What a plain listing hides is reported and deleted: older versions, deletion markers, unfinished uploads.

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
    let raw = s3.store("versioned");
    let (plain, store) = (
        s3.open("s3://plain/p", &handle),
        s3.open("s3://versioned/p q", &handle),
    );
    let state = |s: &Store| s.versioning().unwrap();
    assert_eq!(blocking(&plain, state).await, Versioning::Off);
    assert_eq!(blocking(&store, state).await, Versioning::Enabled);

    let key = |name: &str| Path::from(format!("p q/v2/{name}"));
    for text in ["1", "22", "333"] {
        raw.put(&key("a b+c"), text.into()).await.unwrap();
    }
    raw.put(&key("other"), "x".into()).await.unwrap();
    raw.delete(&key("other")).await.unwrap();
    // Objects beside the prefix and beside the folder.
    for other in ["p q2/v2/no", "p q/v22/no", "v2/no"] {
        raw.put(&Path::from(other), "x".into()).await.unwrap();
    }
    blocking(&store, |store| {
        let all = store.versions(&["v2", "v1"]).unwrap();
        let of = |name: &str| -> Vec<_> {
            let path = format!("v2/{name}");
            all.iter().filter(|v| v.path == path).cloned().collect()
        };
        let versions = of("a b+c");
        let bytes: Vec<u64> = versions.iter().map(|v| v.bytes).collect();
        assert_eq!(bytes, [3, 2, 1], "{versions:?}");
        let latest: Vec<bool> = versions.iter().map(|v| v.is_latest).collect();
        assert_eq!(latest, [true, false, false]);
        let hidden = of("other");
        let marks: Vec<bool> = hidden.iter().map(|v| v.is_delete_marker).collect();
        assert_eq!(marks, [true, false], "{hidden:?}");
        assert_eq!(all.len(), 5, "{all:?}");
        assert_eq!(
            store.current_version("v2/a b+c").unwrap().as_deref(),
            Some(versions[0].version.as_str())
        );
        // An object in the middle, and one that is gone already.
        for _ in 0..2 {
            store
                .delete_version("v2/a b+c", &versions[1].version)
                .unwrap();
        }
        store
            .delete_version("v2/other", &hidden[0].version)
            .unwrap();
        let left = store.versions(&["v2"]).unwrap();
        assert_eq!(left.len(), 3, "{left:?}");
        assert!(store.exists("v2/other").unwrap());
    })
    .await;
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

/// More than one page.
async fn turns_pages(s3: &S3) {
    use futures::StreamExt as _;
    let handle = tokio::runtime::Handle::current();
    s3.create_bucket("pages", Kind::Versioned).await;
    let raw = s3.store("pages");
    let put = |i: u32| {
        let (raw, key) = (raw.clone(), Path::from(format!("v2/{:04}", i / 2)));
        async move { raw.put(&key, "x".into()).await.map(|_| ()) }
    };
    let done: Vec<_> = futures::stream::iter(0..2100)
        .map(put)
        .buffer_unordered(32)
        .collect()
        .await;
    assert!(done.iter().all(Result::is_ok));
    let store = s3.open("s3://pages", &handle);
    let versions = blocking(&store, |store| store.versions(&["v2"]).unwrap()).await;
    let mut ids: Vec<_> = versions.iter().map(|v| (&v.path, &v.version)).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 2100);
}

#[tokio::test(flavor = "multi_thread")]
async fn minio_hides_nothing_from_us() {
    let minio = Minio::start();
    let s3 = minio.s3();
    tells_versions(&s3).await;
    // MinIO lists only the uploads of one object and aborts old ones by itself.
    tells_uploads(&s3, false).await;
    turns_pages(&s3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn versitygw_hides_nothing_from_us() {
    let server = Versitygw::start();
    tells_versions(server.s3()).await;
    tells_uploads(server.s3(), true).await;
}
