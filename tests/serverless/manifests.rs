//! What `deltafold manifests` prints stands in `jobs/`.

use crate::support::manifests::{documents, kind, path, printed, read};
use deltafold::controller::manifests;
use serde_json::{Value, json};
use std::fs;

#[test]
fn the_files_are_what_the_program_prints() {
    for (args, file) in [
        ("install", "jobs/install.yaml"),
        ("crds", "jobs/crds.yaml"),
        ("crds", "jobs/helm/deltafold/crds/crds.yaml"),
    ] {
        let told = printed(&[args]);
        assert!(
            told == read(file),
            "{file} is out of step: deltafold manifests {args} > {file}"
        );
    }
    let samples = printed(&["samples"]);
    let mut files = 0;
    for file in fs::read_dir(path("jobs/samples")).unwrap() {
        let text = fs::read_to_string(file.unwrap().path()).unwrap();
        assert!(samples.contains(&text), "{text}");
        files += 1;
    }
    assert_eq!(files, manifests::SAMPLES.len());
    // The same, for machines.
    for what in ["install", "crds", "samples"] {
        let list: Value = serde_json::from_str(&printed(&[what, "--output", "json"])).unwrap();
        assert_eq!(list["kind"], "List");
        assert_eq!(list["items"], json!(documents(&printed(&[what]))), "{what}");
    }
}

#[test]
fn the_flags_are_put_in_everywhere() {
    let text = printed(&["install", "-n", "elsewhere", "--image", "registry/x:7"]);
    assert!(!text.contains("deltafold-system") && !text.contains("deltafold:0"));
    let objects = documents(&text);
    let namespaces = objects
        .iter()
        .filter_map(|o| o["metadata"]["namespace"].as_str());
    let namespaces: Vec<&str> = namespaces.collect();
    assert!(namespaces.len() > 3 && namespaces.iter().all(|n| *n == "elsewhere"));
    let deployment = objects.iter().find(|o| kind(o) == "Deployment").unwrap();
    let container = &deployment["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(container["image"], "registry/x:7");
    let args: Vec<String> = serde_json::from_value(container["args"].clone()).unwrap();
    assert!(
        args.windows(2)
            .any(|w| w == ["--job-image", "registry/x:7"])
    );
    // The real program takes them.
    deltafold::cli::check(&args).unwrap();
}

/// All Pods of a manifest.
fn pods<'v>(value: &'v Value, found: &mut Vec<&'v Value>) {
    match value {
        Value::Object(fields) if fields.contains_key("containers") => found.push(value),
        Value::Object(fields) => fields.values().for_each(|value| pods(value, found)),
        Value::Array(all) => all.iter().for_each(|value| pods(value, found)),
        _ => {}
    }
}

/// A hostile snapshot must not take a node's memory or disk.
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
            // The largest database that is allowed fits, and what a follower spools.
            assert!(scratch == 0 || scratch >= 16 + 2, "{file}: {scratch}");
            let containers = ["initContainers", "containers"].map(|c| pod[c].as_array());
            let containers = containers.into_iter().flatten().flatten();
            let ours =
                containers.filter(|c| c["command"][0] == "deltafold" || c["command"].is_null());
            for container in ours {
                let resources = &container["resources"];
                let limits = &resources["limits"];
                // The longest value that is allowed takes 384 MiB of it.
                assert!(gib(&limits["memory"]) >= 1, "{file}: {container:#}");
                // The scratch volume counts, too; and what has no request is requested.
                assert_eq!(gib(&limits["ephemeral-storage"]), scratch + 1, "{file}");
                assert!(resources["requests"]["ephemeral-storage"].is_string());
                seen += 1;
            }
        }
    }
    assert!(seen > 9, "{seen}");
}

/// The version that stands in the chart and its image is the program's.
#[test]
fn the_chart_is_of_this_version() {
    let chart: Value = yaml_serde::from_str(&read("jobs/helm/deltafold/Chart.yaml")).unwrap();
    assert_eq!(chart["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"));
}

/// Alerts ask for metrics that there are.
#[test]
fn alerts_name_metrics_that_are_documented() {
    let rules: Value = yaml_serde::from_str(&read("jobs/alerts.yaml")).unwrap();
    let documented = read("docs/metrics.md") + &read("docs/controller.md");
    let mut seen = 0;
    for rule in rules["groups"][0]["rules"].as_array().unwrap() {
        let expr = rule["expr"].as_str().unwrap();
        for (at, _) in expr.match_indices("deltafold_") {
            let metric = &expr[at..];
            let end = metric.find(|c: char| !c.is_ascii_lowercase() && c != '_');
            let metric = &metric[..end.unwrap_or(metric.len())];
            let told = documented.contains(&format!("`{metric}`"));
            assert!(told, "{metric} is documented nowhere");
            seen += 1;
        }
        assert!(rule["annotations"]["summary"].is_string());
        assert!(rule["annotations"]["description"].is_string());
    }
    assert!(seen > 8, "{seen}");
}
