//! A real API server would accept the objects in `jobs/*.yaml` (dry run).

use crate::support::etcd::Etcd;
use crate::support::kube::Apiserver;
use crate::support::scratch;
use crate::support::tools::EtcdVersion;
use serde_json::Value;
use std::fs;
use std::path::Path;

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_takes_every_job() {
    let folder = scratch::folder().unwrap();
    let etcd = Etcd::start(EtcdVersion::V3_6, &folder.path().join("etcd"));
    let server = Apiserver::start(&etcd).await;
    server.create_namespace("backup").await;
    let mut objects = 0;
    // install.yaml and crds.yaml have their own test (tests/end_to_end/manifests.rs). The alerts are for
    // Prometheus, not for the API server.
    let others = [
        "install.yaml",
        "crds.yaml",
        "alerts-controller.yaml",
        "alerts-hosts.yaml",
    ];
    for file in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("jobs")).unwrap() {
        let path = file.unwrap().path();
        if path.is_dir() || others.iter().any(|o| path.ends_with(o)) {
            continue;
        }
        let text = fs::read_to_string(path).unwrap();
        for document in text.split("\n---\n") {
            let object: Value = yaml_serde::from_str(document).unwrap();
            server.would_create("backup", &object).await;
            objects += 1;
        }
    }
    assert_eq!(objects, 14);
}
