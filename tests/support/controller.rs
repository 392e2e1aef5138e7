//! The controller as a process of its own.

use std::time::Duration;

use super::etcd::Signal;
use super::kube::write_kubeconfig;
use super::namespace::{PATIENCE, TestNamespace, until};
use super::process::{Process, free_port, http, is_a_process};
use super::proxy::Proxy;
use super::tools::forget_env;

/// A running `deltafold controller`, killed when dropped.
#[derive(Debug)]
pub struct Controller {
    process: Process,
    port: u16,
}

is_a_process!(Controller);

impl Controller {
    /// Starts a controller for one namespace, with the rights of the manifests and no others.
    pub async fn start(space: &TestNamespace, args: &[&str]) -> Self {
        let url = space.api.url().to_owned();
        Self::start_at(space, &url, &[space], args).await
    }

    /// Starts a controller for these namespaces. Its own objects are in the first one.
    pub async fn of_several(spaces: &[&TestNamespace], args: &[&str]) -> Self {
        let url = spaces[0].api.url().to_owned();
        Self::start_at(spaces[0], &url, spaces, args).await
    }

    /// Like `of_several`, through a proxy.
    pub async fn of_several_through(
        proxy: &Proxy,
        spaces: &[&TestNamespace],
        args: &[&str],
    ) -> Self {
        Self::start_at(spaces[0], &proxy.url(), spaces, args).await
    }

    /// Starts a controller that reaches the API server through a proxy.
    pub async fn through(proxy: &Proxy, space: &TestNamespace, args: &[&str]) -> Self {
        Self::start_at(space, &proxy.url(), &[space], args).await
    }

    /// Like `through`, for all namespaces. Its own objects are in `space`.
    pub async fn of_all(proxy: &Proxy, space: &TestNamespace, args: &[&str]) -> Self {
        Self::start_at(space, &proxy.url(), &[], args).await
    }

    /// Starts a controller for the namespaces `on`, or for all if `on` is empty.
    async fn start_at(
        space: &TestNamespace,
        url: &str,
        on: &[&TestNamespace],
        args: &[&str],
    ) -> Self {
        let folder = tempfile::Builder::new()
            .prefix("controller-")
            .tempdir_in(space.folder.path())
            .expect("a folder for the controller")
            .keep();
        let config = folder.join("kubeconfig");
        let token = space.controllers_token().await;
        write_kubeconfig(&config, url, &space.name, &token);
        let log = folder.join("controller.log");
        let port = free_port();
        let mut command = super::deltafold();
        forget_env(&mut command, &["KUBE"]);
        command
            .arg("controller")
            .args(["--job-image", "deltafold:test"])
            .arg(format!("--metrics-bind-address=127.0.0.1:{port}"))
            .args(args)
            .env("KUBECONFIG", &config);
        for space in on {
            command.args(["--namespace", &space.name]);
        }
        let level = if on.is_empty() { "info" } else { "debug" };
        command.args(["--log-level", level]);
        let process = Process::spawn(&mut command, &log).unwrap_or_else(|err| panic!("{err}"));
        Self { process, port }
    }

    /// Kills the process, as a failure of its node would.
    pub fn kill(&mut self) {
        self.process.end();
    }

    /// Stops the process, as deleting its Pod would. Returns the exit code.
    pub fn stop(&mut self) -> Option<i32> {
        self.process.signal(Signal::TERM);
        let ended = self.process.ended_within(Duration::from_secs(20));
        ended.and_then(|status| status.code())
    }

    /// Returns whether the process has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        self.process.runs().is_err()
    }

    /// Requests one of the controller's own endpoints. Returns status and body.
    pub fn asked(&self, target: &str) -> Option<(u16, String)> {
        let answer = http(self.port, "GET", target, "")?;
        let status = answer.split(' ').nth(1)?.parse().ok()?;
        let (_, body) = answer.split_once("\r\n\r\n")?;
        Some((status, body.to_owned()))
    }

    pub fn is_ready(&self) -> bool {
        self.asked("/readyz")
            .is_some_and(|(status, _)| status == 200)
    }

    pub async fn wait_until_ready(&mut self) {
        let ready = until(PATIENCE, async || self.is_ready().then_some(()));
        assert!(ready.await.is_some(), "it is not ready:\n{}", self.tail());
    }

    /// Returns the value of a series in /metrics (name and labels), or 0 if it is not there.
    pub fn metric(&self, series: &str) -> f64 {
        let (_, body) = self.asked("/metrics").unwrap_or_default();
        let mut lines = body.lines();
        let line = lines.find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.and_then(|value| value.trim().parse().ok())
            .unwrap_or(0.0)
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(60)..];
            eprintln!(
                "--- the end of {}:\n{}",
                self.log.display(),
                last.join("\n")
            );
        }
    }
}
