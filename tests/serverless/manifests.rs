//! The files in `jobs/` are what `deltafold manifests` prints.

use crate::support::manifests::{documents, kind, name, path, printed, read};
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
        if crate::support::writes_generated() {
            fs::write(path(file), &told).unwrap();
        }
        assert!(
            told == read(file),
            "{file} is out of step: tests/generate writes it"
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
    // The same as JSON.
    for what in ["install", "namespace a", "crds", "samples"] {
        let args: Vec<&str> = what.split(' ').collect();
        let as_json = printed(&[&args[..], &["--output", "json"]].concat());
        let list: Value = serde_json::from_str(&as_json).unwrap();
        assert_eq!(list["kind"], "List");
        assert_eq!(list["items"], json!(documents(&printed(&args))), "{what}");
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
    // The program accepts these arguments.
    deltafold::cli::check(&args).unwrap();
}

fn args_of(objects: &[Value], kind_: &str) -> Vec<String> {
    let object = objects.iter().find(|o| kind(o) == kind_).unwrap();
    let container = &object["spec"]["template"]["spec"]["containers"][0];
    serde_json::from_value(container["args"].clone()).unwrap()
}

#[test]
fn what_is_allowed_is_said_to_the_controller_and_to_the_api_server() {
    let flags = [
        "--allow-host-path",
        "--allow-host-network",
        "--allow-service-account",
        "--allow-root",
        "--allow-tolerations",
        "--allow-priority-class",
    ];
    let admission = |objects: &[Value]| -> Vec<Value> {
        let policies = objects
            .iter()
            .filter(|o| kind(o) == "ValidatingAdmissionPolicy");
        let all = policies.flat_map(|o| o["spec"]["validations"].as_array().unwrap());
        all.cloned().collect()
    };
    let strict = documents(&printed(&["install"]));
    let all = admission(&strict).len();
    let mut fewer = 0;
    for flag in flags {
        let objects = documents(&printed(&["install", flag]));
        let args = args_of(&objects, "Deployment");
        assert_eq!(args.iter().filter(|a| *a == flag).count(), 1);
        deltafold::cli::check(&args).unwrap();
        let validations = admission(&objects);
        // The message of a rule names its flag.
        assert!(!json!(validations).to_string().contains(flag), "{flag}");
        assert!(
            json!(admission(&strict)).to_string().contains(flag),
            "{flag}"
        );
        fewer += all - validations.len();
    }
    // Every rule except the two about images.
    assert_eq!(fewer, all - 2);
    let lax = documents(&printed(&[&["install"], &flags[..]].concat()));
    assert_eq!(admission(&lax).len(), 2);
    let objects = documents(&printed(&[
        "install",
        "--allowed-image-prefix",
        "a.example/b,c.example",
    ]));
    let args = args_of(&objects, "Deployment").join(" ");
    let wanted = "--allowed-image-prefix a.example/b --allowed-image-prefix c.example";
    assert!(args.ends_with(wanted), "{args}");
}

/// Returns all verbs that rules grant on a resource.
fn verbs(rules: &Value, resource: &str) -> Vec<String> {
    let rules = rules.as_array().unwrap().iter();
    let of_it = rules.filter(|r| {
        json!(r["resources"])
            .as_array()
            .unwrap()
            .contains(&json!(resource))
    });
    let verbs = of_it.flat_map(|r| r["verbs"].as_array().unwrap());
    verbs.map(|v| v.as_str().unwrap().to_owned()).collect()
}

#[test]
fn nobody_has_rights_on_secrets_or_to_escalate() {
    for args in [
        vec!["install"],
        vec!["install", "--watch-namespace", "a,b"],
        vec!["namespace", "a"],
    ] {
        for object in documents(&printed(&args)) {
            let rules = match &object["rules"] {
                Value::Null => continue,
                rules => rules,
            };
            for resource in [
                "secrets",
                "roles",
                "*",
                "pods/exec",
                "serviceaccounts/token",
            ] {
                assert_eq!(verbs(rules, resource), Vec::<String>::new(), "{object:#}");
            }
            for rule in rules.as_array().unwrap() {
                let verbs = rule["verbs"].as_array().unwrap();
                for verb in ["*", "escalate", "impersonate"] {
                    assert!(!verbs.contains(&json!(verb)), "{rule}");
                }
                if verbs.contains(&json!("bind")) {
                    assert_eq!(rule["resourceNames"], json!(["deltafold-jobs"]));
                    assert_eq!(args, ["install"]);
                }
            }
        }
    }
}

#[test]
fn for_named_namespaces_nothing_is_bound_in_the_whole_cluster() {
    let args = [
        "install",
        "-n",
        "own",
        "--watch-namespace",
        "a",
        "--watch-namespace",
        "b",
    ];
    let objects = documents(&printed(&args));
    let of =
        |wanted: &str| -> Vec<&Value> { objects.iter().filter(|o| kind(o) == wanted).collect() };
    assert!(of("ClusterRoleBinding").is_empty());
    let made = |kind_: &str, namespace: &str| -> Vec<&str> {
        let there = of(kind_)
            .into_iter()
            .filter(|o| o["metadata"]["namespace"] == namespace);
        there.map(name).collect()
    };
    for namespace in ["a", "b"] {
        assert_eq!(made("Role", namespace), ["deltafold-controller"]);
        assert_eq!(
            made("RoleBinding", namespace),
            ["deltafold-controller", "deltafold-jobs"]
        );
        assert_eq!(made("ServiceAccount", namespace), ["deltafold-jobs"]);
        assert_eq!(made("NetworkPolicy", namespace), ["deltafold-jobs"]);
    }
    assert_eq!(made("Role", "own"), ["deltafold-controller-leader"]);
    for role in of("Role") {
        for resource in ["serviceaccounts", "rolebindings"] {
            assert!(verbs(&role["rules"], resource).is_empty(), "{role:#}");
        }
    }
    // `manifests namespace` prints the same objects for one of them.
    for object in documents(&printed(&["namespace", "a"])) {
        assert!(objects.contains(&object), "{object:#}");
    }
    let args = args_of(&objects, "Deployment").join(" ");
    assert!(args.contains("--namespace a --namespace b"), "{args}");
    for binding in of("ValidatingAdmissionPolicyBinding") {
        let selector = &binding["spec"]["matchResources"]["namespaceSelector"];
        assert_eq!(selector["matchExpressions"][0]["values"], json!(["a", "b"]));
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
            // The largest allowed database fits, and so does what a follower spools.
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
