//! The Helm chart, which is the source of the installation, and what it renders.

use super::manifests::{documents, path, read};
use super::{scratch, tools};
use serde_json::Value;
use std::process::Command;

/// The namespace of jobs/install.yaml.
pub const NAMESPACE: &str = "deltafold-system";
/// The name of the controller's objects.
pub const CONTROLLER: &str = "deltafold-controller";
/// The chart has no image of its own: this is the one of jobs/install.yaml. Later values win.
pub const IMAGE: &str = "image.repository=deltafold";

const ABOUT: &str = "\
# The controller of deltafold: its resource definitions, its rights, and two replicas: a leader and a standby.
#
#   sed 's|deltafold:VERSION|registry.example/deltafold:VERSION|g' jobs/install.yaml | kubectl apply --server-side -f -
#
# This is what the Helm chart in jobs/helm/deltafold renders, with the CRDs and a namespace. The chart has choices, such
# as rights in named namespaces only: see its values.yaml.
#
# To uninstall, in this order:
#   1. kubectl delete etcdbackuptasks,etcdbackuppolicies --all --all-namespaces
#      Kubernetes deletes the CronJobs, followers and Jobs with their policies. Backups are not deleted.
#   2. kubectl delete -f jobs/install.yaml
#      This also deletes the resource definitions, and with them any remaining policies and tasks.
apiVersion: v1
kind: Namespace
metadata:
  labels:
    app.kubernetes.io/name: deltafold
    pod-security.kubernetes.io/enforce: restricted
  name: deltafold-system
---
";

/// Renders the chart as text, without CRDs, or returns why Helm refuses it.
pub fn render(namespace: &str, args: &[&str]) -> Result<String, String> {
    let home = scratch::folder().unwrap();
    let mut command = Command::new(tools::helm());
    tools::forget_env(&mut command, &["HELM_", "KUBE"]);
    let out = command
        .env("HOME", home.path())
        .args(["template", "deltafold"])
        .arg(path("jobs/helm/deltafold"))
        .args(["--namespace", namespace, "--kube-version", "1.36.3"])
        .args(args)
        .output()
        .unwrap();
    match out.status.success() {
        true => Ok(String::from_utf8(out.stdout).unwrap()),
        false => Err(String::from_utf8_lossy(&out.stderr).into_owned()),
    }
}

/// Returns the objects of the chart in a namespace, with the CRDs first.
pub fn objects_in(namespace: &str, values: &[&str]) -> Vec<Value> {
    let set = [IMAGE].iter().chain(values).flat_map(|v| ["--set", v]);
    let text = render(namespace, &set.collect::<Vec<_>>());
    let mut objects = crds();
    objects.extend(documents(text.unwrap().trim_start_matches("---\n")));
    objects
}

/// Returns the objects of the chart in its usual namespace.
pub fn objects(values: &[&str]) -> Vec<Value> {
    objects_in(NAMESPACE, values)
}

pub fn crds() -> Vec<Value> {
    documents(&read("jobs/crds.yaml"))
}

/// Returns jobs/install.yaml as the chart has it.
pub fn install_yaml() -> String {
    let crds = read("jobs/crds.yaml");
    let crds = crds.split_once("apiVersion:").unwrap().1;
    let rendered = render(NAMESPACE, &["--set", IMAGE]).unwrap();
    let lines = rendered.trim_start_matches("---\n").lines();
    let lines: Vec<&str> = lines.filter(|l| !l.starts_with("# Source: ")).collect();
    let about = ABOUT.replace("VERSION", env!("CARGO_PKG_VERSION"));
    format!("{about}apiVersion:{crds}---\n{}\n", lines.join("\n"))
}
