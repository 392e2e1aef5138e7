//! `deltafold task logs` and `--logs`: the logs of every Pod of a task, in order. The test plays the parts of the API server that need a kubelet.

use super::task_commands::{SPACE, command, run};
use crate::support::scratch;
use axum::body::{Body, Bytes};
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use futures::StreamExt;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Plays the parts of the API server that need a kubelet: a task whose Pod starts, logs, fails, and starts
/// again.
struct Player {
    url: String,
}

fn pod(name: &str, second: u32, state: &str) -> Value {
    let state = match state {
        "waiting" => json!({"waiting": {}}),
        "running" => json!({"running": {}}),
        _ => json!({"terminated": {"exitCode": 0}}),
    };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": SPACE, "resourceVersion": "2",
            "creationTimestamp": format!("2026-11-20T12:00:{second:02}Z")},
        "status": {"containerStatuses": [{"name": "deltafold", "image": "", "imageID": "", "ready": true,
            "restartCount": 0, "state": state}]},
    })
}

fn played_task(state: &str, job: Option<&str>) -> Value {
    json!({
        "apiVersion": "deltafold.io/v1alpha1", "kind": "EtcdBackupTask",
        "metadata": {"name": "now", "namespace": SPACE, "resourceVersion": "2"},
        "spec": {"policy": "main", "type": "Verify"},
        "status": {"state": state, "jobName": job},
    })
}

fn lines(events: Vec<(u64, Value)>) -> Body {
    let events = futures::stream::iter(events).then(|(millis, event)| async move {
        tokio::time::sleep(Duration::from_millis(millis)).await;
        Ok::<_, std::io::Error>(Bytes::from(format!("{event}\n")))
    });
    // The watch stays open.
    Body::from_stream(events.chain(futures::stream::pending()))
}

impl Player {
    async fn start(ended: Arc<AtomicBool>) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let app = axum::Router::new().fallback(move |uri: Uri| {
            let ended = ended.clone();
            async move { Self::answer(&uri, ended.load(Ordering::Relaxed)) }
        });
        tokio::spawn(async move { axum::serve(listener, app).await });
        Player { url }
    }

    fn answer(uri: &Uri, ended: bool) -> Response {
        let query = uri.query().unwrap_or_default();
        let is_watch = query.contains("watch=true");
        let modified = |object: Value| json!({"type": "MODIFIED", "object": object});
        let list = |kind: &str, version: &str, items: Vec<Value>| json!({"apiVersion": version, "kind": kind, "metadata": {"resourceVersion": "1"}, "items": items});
        let body = |value: Value| Body::from(value.to_string());
        let path = uri.path();
        let found = match (path.rsplit('/').next().unwrap(), is_watch) {
            ("now", _) => body(played_task("Succeeded", Some("job"))),
            ("etcdbackuptasks", false) => body(list(
                "EtcdBackupTaskList",
                "deltafold.io/v1alpha1",
                vec![match ended {
                    true => played_task("Succeeded", Some("job")),
                    false => played_task("Pending", None),
                }],
            )),
            ("etcdbackuptasks", true) => lines(vec![
                (50, modified(played_task("InProgress", Some("job")))),
                (1500, modified(played_task("Succeeded", Some("job")))),
            ]),
            ("pods", false) => {
                assert!(query.contains("job-name"), "{query}");
                body(list(
                    "PodList",
                    "v1",
                    match ended || query.contains("limit") {
                        // The initial list of the watch.
                        true if !ended => vec![],
                        _ => vec![pod("b", 2, "terminated"), pod("a", 1, "terminated")],
                    },
                ))
            }
            ("pods", true) => lines(vec![
                (50, modified(pod("a", 1, "waiting"))),
                (50, modified(pod("a", 1, "running"))),
                (200, modified(pod("a", 1, "terminated"))),
                (50, modified(pod("b", 2, "running"))),
            ]),
            ("log", _) => {
                assert!(query.contains("container=deltafold"), "{query}");
                let pod = path.split('/').rev().nth(1).unwrap().to_owned();
                let chunks = (0..3).map(move |n| format!("{pod} says {n}\n"));
                let chunks = futures::stream::iter(chunks).then(|chunk| async move {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    Ok::<_, std::io::Error>(Bytes::from(chunk))
                });
                Body::from_stream(chunks)
            }
            _ => {
                let mut missing = Response::new(Body::from("{}"));
                *missing.status_mut() = StatusCode::NOT_FOUND;
                return missing;
            }
        };
        Response::new(found)
    }

    fn config(&self, folder: &Path) -> PathBuf {
        let file = folder.join("config");
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "other",
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": {"token": "any"}}],
            "contexts": [
                {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": SPACE}},
                {"name": "other", "context": {"cluster": "none", "user": "none"}},
            ],
        });
        fs::write(&file, config.to_string()).unwrap();
        file
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_are_those_of_every_pod_in_order() {
    const ALL: &str = "a says 0\na says 1\na says 2\nb says 0\nb says 1\nb says 2\n";
    let folder = scratch::folder().unwrap();
    for (ended, follow) in [(true, false), (true, true), (false, true)] {
        let player = Player::start(Arc::new(AtomicBool::new(ended))).await;
        let config = player.config(folder.path());
        let mut command = command(&config, &["task", "logs", "now", "--context", "test"]);
        if follow {
            command.arg("-f");
        }
        let done = tokio::task::spawn_blocking(move || run(&mut command));
        let (code, stdout, stderr) = done.await.unwrap();
        assert_eq!(
            (code, stdout.as_str()),
            (0, ALL),
            "{ended} {follow}: {stderr}"
        );
    }
}
