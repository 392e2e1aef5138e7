//! The manifests in `jobs/`: definitions made from the types, limits of Jobs, alerts.

use crate::support::manifests::{documents, path, read};
use deltafold::controller::api::crds;
use serde_json::Value;
use std::fs;

const ABOUT_CRDS: &str = "\
# The definitions of EtcdBackupPolicy and EtcdBackupTask.
#
#   kubectl apply --server-side -f jobs/crds.yaml
";

fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let fields = fields.into_iter().filter(|(_, v)| !v.is_null());
            fields.map(|(k, v)| (k, without_nulls(v))).collect()
        }
        Value::Array(items) => items.into_iter().map(without_nulls).collect(),
        other => other,
    }
}

#[test]
fn the_files_of_definitions_are_made_of_the_types() {
    let definitions = crds().into_iter().map(|crd| {
        let crd = without_nulls(serde_json::to_value(crd).unwrap());
        yaml_serde::to_string(&crd).unwrap()
    });
    let definitions: Vec<String> = definitions.collect();
    let text = format!("{ABOUT_CRDS}{}", definitions.join("---\n"));
    for file in ["jobs/crds.yaml", "jobs/helm/deltafold/crds/crds.yaml"] {
        if crate::support::writes_generated() {
            fs::write(path(file), &text).unwrap();
        }
        assert!(
            text == read(file),
            "{file} is out of step: tests/generate writes it"
        );
    }
}

/// Returns all Pods of a manifest.
fn pods<'v>(value: &'v Value, found: &mut Vec<&'v Value>) {
    match value {
        Value::Object(fields) if fields.contains_key("containers") => found.push(value),
        Value::Object(fields) => fields.values().for_each(|value| pods(value, found)),
        Value::Array(all) => all.iter().for_each(|value| pods(value, found)),
        _ => {}
    }
}

/// A hostile snapshot must not exhaust a node's memory or disk.
#[test]
fn no_job_is_without_limits() {
    let gib = |v: &Value| -> u64 {
        let text = v.as_str().unwrap_or_else(|| panic!("no size: {v}"));
        text.strip_suffix("Gi").unwrap().parse().unwrap()
    };
    let mut seen = 0;
    for file in [
        "compact", "copy", "gc", "maintain", "once", "restore", "snapshot",
    ] {
        let all = documents(&read(&format!("jobs/{file}.yaml")));
        let mut found = Vec::new();
        all.iter().for_each(|object| pods(object, &mut found));
        assert!(!found.is_empty(), "{file}");
        for pod in found {
            let volumes = pod["volumes"].as_array().into_iter().flatten();
            let empty = volumes.filter(|v| v["emptyDir"].is_object());
            let scratch: u64 = empty.map(|v| gib(&v["emptyDir"]["sizeLimit"])).sum();
            // The largest allowed database fits, and so do the events that wait in a follower.
            assert!(scratch == 0 || scratch >= 16 + 2, "{file}: {scratch}");
            let containers = ["initContainers", "containers"].map(|c| pod[c].as_array());
            let containers = containers.into_iter().flatten().flatten();
            let ours =
                containers.filter(|c| c["command"][0] == "deltafold" || c["command"].is_null());
            for container in ours {
                let resources = &container["resources"];
                let limits = &resources["limits"];
                // The longest allowed value takes 384 MiB of it.
                assert!(gib(&limits["memory"]) >= 1, "{file}: {container:#}");
                // The scratch volume counts as ephemeral storage, and requests default to limits.
                assert_eq!(gib(&limits["ephemeral-storage"]), scratch + 1, "{file}");
                assert!(resources["requests"]["ephemeral-storage"].is_string());
                seen += 1;
            }
        }
    }
    assert!(seen > 9, "{seen}");
}

/// The chart and its image have the program's version.
#[test]
fn the_chart_is_of_this_version() {
    let chart: Value = yaml_serde::from_str(&read("jobs/helm/deltafold/Chart.yaml")).unwrap();
    assert_eq!(chart["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"));
}

/// The chart makes a PrometheusRule of its copy.
#[test]
fn the_chart_has_the_alerts_of_the_controller() {
    let copy = "jobs/helm/deltafold/files/alerts.yaml";
    assert!(
        read(copy) == read("jobs/alerts-controller.yaml"),
        "{copy} is out of step: cp jobs/alerts-controller.yaml {copy}"
    );
}

/// Alerts use metrics that exist: other tests compare the tables of docs/metrics.md with the program.
#[test]
fn alerts_name_metrics_that_are_documented() {
    let metrics = read("docs/metrics.md");
    let (commands, controller) = metrics.split_once("## The controller's").unwrap();
    check_alerts("jobs/alerts-hosts.yaml", commands);
    check_alerts("jobs/alerts-controller.yaml", controller);
}

fn check_alerts(file: &str, documented: &str) {
    let rules: Value = yaml_serde::from_str(&read(file)).unwrap();
    let mut seen = 0;
    for rule in rules["groups"][0]["rules"].as_array().unwrap() {
        let expr = rule["expr"].as_str().unwrap();
        for (at, _) in expr.match_indices("deltafold_") {
            let metric = &expr[at..];
            let end = metric.find(|c: char| !c.is_ascii_lowercase() && c != '_');
            let metric = &metric[..end.unwrap_or(metric.len())];
            let told = documented.contains(&format!("| `{metric}` |"));
            assert!(told, "{file}: {metric} is documented nowhere");
            seen += 1;
        }
        assert!(rule["annotations"]["summary"].is_string());
        assert!(rule["annotations"]["description"].is_string());
    }
    assert!(seen > 8, "{file}: {seen}");
}
