//! The Kubernetes servers of the tests work.

use crate::support::etcd::Etcd;
use crate::support::kube::{self, Apiserver, Informer};
use crate::support::namespace::TestNamespace;
use crate::support::scratch;
use crate::support::tools::{self, EtcdVersion};

#[tokio::test(flavor = "multi_thread")]
async fn kubernetes_serves() {
    let folder = scratch::folder().unwrap();
    let etcd = Etcd::start(EtcdVersion::V3_6, &folder.path().join("data"));
    let server = Apiserver::start(&etcd).await;
    let space = TestNamespace::named(&server.api(), "space").await;
    kube::set_config_map(&space, "one", "1").await;
    kube::set_config_map(&space, "two", "2").await;
    let mut informer = Informer::start(&server, "space");
    let (revision, maps) = kube::config_maps(&space).await;
    assert_eq!(maps.len(), 2);
    assert_eq!(maps["one"]["data"]["value"], "1");
    assert!(etcd.revision().await >= revision);
    let said = informer
        .wait_until(0, "it has both", |said| {
            kube::store(said).as_ref() == Some(&maps)
        })
        .await;
    assert!(said.iter().any(|line| line["what"] == "synced"), "{said:?}");

    // Another server takes the first one's place: the informer reconnects to it.
    let port = server.port();
    drop(server);
    let _server = Apiserver::start_at(port, &etcd).await;
    kube::set_config_map(&space, "one", "1, again").await;
    space.delete("configmaps", "two").await;
    let (_, maps) = kube::config_maps(&space).await;
    assert_eq!(maps.len(), 1);
    informer
        .wait_until(said.len(), "it has the one that is left", |said| {
            kube::store(said).as_ref() == Some(&maps)
        })
        .await;
}

#[test]
fn tools_answer() {
    let said = tools::run(&tools::kube_apiserver(), ["--version"]).unwrap();
    assert_eq!(said.trim_ascii(), b"Kubernetes v1.36.3");
    let said = tools::run(&tools::kube_controller_manager(), ["--version"]).unwrap();
    assert_eq!(said.trim_ascii(), b"Kubernetes v1.36.3");
}
