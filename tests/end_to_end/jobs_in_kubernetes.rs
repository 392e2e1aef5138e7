//! A real API server would accept the objects in `jobs/*.yaml` (dry run).

use crate::support::kube::{Body, collection};
use crate::support::manifests::{documents, path};
use crate::support::namespace::TestNamespace;
use reqwest::Method;
use std::fs;

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_takes_every_job() {
    let space = TestNamespace::new("jobs").await;
    let mut objects = 0;
    // install.yaml and crds.yaml have their own test (tests/end_to_end/manifests.rs). The alerts are for
    // Prometheus, not for the API server.
    let others = [
        "install.yaml",
        "crds.yaml",
        "alerts-controller.yaml",
        "alerts-hosts.yaml",
    ];
    for file in fs::read_dir(path("jobs")).unwrap() {
        let path = file.unwrap().path();
        if path.is_dir() || others.iter().any(|o| path.ends_with(o)) {
            continue;
        }
        for object in documents(&fs::read_to_string(path).unwrap()) {
            let all = collection(&object, &space.name);
            let path = format!("{all}?dryRun=All&fieldValidation=Strict");
            let body = Some((Body::Json, &object));
            space.api.must(Method::POST, &path, body).await;
            objects += 1;
        }
    }
    assert_eq!(objects, 15);
}
