//! The Helm chart is the source of the installation: what it renders, and that a real API server accepts it.

use crate::support::chart::{self, NAMESPACE};
use crate::support::manifests::{documents, kind, name, path, read};
use crate::support::namespace::Alone;
use deltafold::controller::api::crds;
use deltafold::controller::jobs::{Allowed, Settings};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// A default that cannot be pulled would end in ImagePullBackOff, minutes later and somewhere else.
#[test]
fn the_chart_asks_for_an_image() {
    let refusal = chart::render(NAMESPACE, &[]).unwrap_err();
    assert!(
        refusal.contains("image.repository: name the image"),
        "{refusal}"
    );
    // Jobs may use another image; the controller still needs one.
    let refusal = chart::render(NAMESPACE, &["--set", "jobImage=registry/jobs:7"]).unwrap_err();
    assert!(refusal.contains("image.repository"), "{refusal}");
}

#[test]
fn the_file_is_the_rendering_of_the_chart() {
    let (file, text) = ("jobs/install.yaml", chart::install_yaml());
    if crate::support::writes_generated() {
        std::fs::write(path(file), &text).unwrap();
    }
    assert!(
        text == read(file),
        "{file} is out of step: tests/generate writes it"
    );
    // The documented line of sed replaces one image everywhere, and the rest is as of the chart.
    let image = concat!("deltafold:", env!("CARGO_PKG_VERSION"));
    let replaced = documents(&text.replace(image, "registry.example/x:7"));
    let rendered = chart::objects(&["image.repository=registry.example/x", "image.tag=7"]);
    assert_eq!(replaced[1..].len(), rendered.len());
    for object in rendered {
        assert!(replaced.contains(&object), "{object:#}");
    }
}

#[test]
fn every_value_of_the_chart_has_an_effect() {
    let plain = chart::objects(&[]);
    let changes = [
        "image.repository=registry/x",
        "image.tag=7",
        "image.pullPolicy=Always",
        "imagePullSecrets[0]=pull",
        "jobImage=registry/jobs:7",
        "replicas=3",
        "watchNamespaces={one}",
        "allow.hostPath=true",
        "allow.hostNetwork=true",
        "allow.serviceAccount=true",
        "allow.root=true",
        "allow.tolerations=true",
        "allow.priorityClass=true",
        "allow.imagePrefixes={registry.example/team}",
        "networkPolicies=false",
        "apiServerPorts={8443}",
        "controller.extraArgs[0]=--max-jobs=7",
        "resources.requests.cpu=2",
        "nodeSelector.disk=fast",
        "tolerations[0].operator=Exists",
        "priorityClassName=high",
        "affinity.nodeAffinity.a=b",
        "aggregateRoles=true",
        "podDisruptionBudget=false",
        "metricsService=false",
        "metrics.serviceMonitor.enabled=true",
        "metrics.prometheusRule.enabled=true",
    ];
    let mut seen = BTreeSet::new();
    for change in changes {
        let made = chart::objects(&[change]);
        assert_ne!(made, plain, "{change}");
        let key = change.split(['=', '.', '[']).next().unwrap();
        seen.insert(key.to_owned());
        // The program accepts these arguments.
        let deployment = made.iter().find(|o| kind(o) == "Deployment").unwrap();
        let args = &deployment["spec"]["template"]["spec"]["containers"][0]["args"];
        let args: Vec<String> = serde_json::from_value(args.clone()).unwrap();
        deltafold::cli::check(&args).unwrap_or_else(|e| panic!("{change}: {e}"));
    }
    let values: Value = yaml_serde::from_str(&read("jobs/helm/deltafold/values.yaml")).unwrap();
    let all: BTreeSet<String> = values.as_object().unwrap().keys().cloned().collect();
    assert_eq!(seen, all);
}

#[test]
fn the_chart_has_a_service_monitor_and_rules_for_the_prometheus_operator() {
    let made = chart::objects(&[
        "metrics.serviceMonitor.enabled=true,metrics.prometheusRule.enabled=true",
        "metrics.serviceMonitor.interval=20s,metrics.serviceMonitor.labels.release=a",
        "metrics.prometheusRule.labels.release=b",
    ]);
    let of = |wanted: &str| made.iter().find(|o| kind(o) == wanted).unwrap();
    let (monitor, rule, service) = (of("ServiceMonitor"), of("PrometheusRule"), of("Service"));
    assert_eq!(
        (
            &monitor["metadata"]["labels"]["release"],
            &rule["metadata"]["labels"]["release"]
        ),
        (&json!("a"), &json!("b"))
    );
    assert_eq!(
        monitor["spec"]["selector"]["matchLabels"],
        service["metadata"]["labels"]
    );
    // The label `namespace` is that of a policy, not that of the Service.
    let port = &service["spec"]["ports"][0]["name"];
    let endpoint = json!({"port": port, "honorLabels": true, "interval": "20s"});
    assert_eq!(monitor["spec"]["endpoints"], json!([endpoint]));
    let alerts: Value = yaml_serde::from_str(&read("jobs/alerts-controller.yaml")).unwrap();
    assert_eq!(rule["spec"], alerts);

    let values = "metricsService=false,metrics.serviceMonitor.enabled=true";
    let refusal = chart::render(NAMESPACE, &["--set", chart::IMAGE, "--set", values]);
    let refusal = refusal.unwrap_err();
    assert!(refusal.contains("metricsService: true"), "{refusal}");
}

fn args_of(objects: &[Value], kind_: &str) -> Vec<String> {
    let object = objects.iter().find(|o| kind(o) == kind_).unwrap();
    let container = &object["spec"]["template"]["spec"]["containers"][0];
    serde_json::from_value(container["args"].clone()).unwrap()
}

#[test]
fn what_is_allowed_is_said_to_the_controller_and_to_the_api_server() {
    let flags = [
        ("--allow-host-path", "allow.hostPath=true"),
        ("--allow-host-network", "allow.hostNetwork=true"),
        ("--allow-service-account", "allow.serviceAccount=true"),
        ("--allow-root", "allow.root=true"),
        ("--allow-tolerations", "allow.tolerations=true"),
        ("--allow-priority-class", "allow.priorityClass=true"),
    ];
    let admission = |objects: &[Value]| -> Vec<Value> {
        let policies = objects
            .iter()
            .filter(|o| kind(o) == "ValidatingAdmissionPolicy");
        let all = policies.flat_map(|o| o["spec"]["validations"].as_array().unwrap());
        all.cloned().collect()
    };
    let strict = chart::objects(&[]);
    let all = admission(&strict).len();
    let mut fewer = 0;
    for (flag, value) in flags {
        let objects = chart::objects(&[value]);
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
    let lax = chart::objects(&flags.map(|f| f.1));
    assert_eq!(admission(&lax).len(), 2);
    let objects = chart::objects(&["allow.imagePrefixes={a.example/b,c.example}"]);
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
    for values in [&[][..], &["watchNamespaces={a,b}"]] {
        for object in chart::objects(values) {
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
                    assert!(values.is_empty());
                }
            }
        }
    }
}

#[test]
fn for_named_namespaces_nothing_is_bound_in_the_whole_cluster() {
    let objects = chart::objects_in("own", &["watchNamespaces={a,b}"]);
    let of =
        |wanted: &str| -> Vec<&Value> { objects.iter().filter(|o| kind(o) == wanted).collect() };
    assert!(of("ClusterRoleBinding").is_empty());
    let made = |kind_: &str, namespace: &str| -> Vec<&str> {
        let there = of(kind_)
            .into_iter()
            .filter(|o| o["metadata"]["namespace"] == namespace);
        let mut names: Vec<&str> = there.map(name).collect();
        names.sort_unstable();
        names
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
    let args = args_of(&objects, "Deployment").join(" ");
    assert!(args.contains("--namespace a --namespace b"), "{args}");
    for binding in of("ValidatingAdmissionPolicyBinding") {
        let selector = &binding["spec"]["matchResources"]["namespaceSelector"];
        assert_eq!(selector["matchExpressions"][0]["values"], json!(["a", "b"]));
    }
}

/// Returns the objects of jobs/samples.
fn samples() -> Vec<Value> {
    let files = std::fs::read_dir(path("jobs/samples")).unwrap();
    let texts = files.map(|f| std::fs::read_to_string(f.unwrap().path()).unwrap());
    let mut samples: Vec<Value> = texts.flat_map(|text| documents(&text)).collect();
    // Policies come before their tasks.
    samples.sort_by_key(|s| kind(s) == "EtcdBackupTask");
    samples
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_server_takes_all_of_it() {
    let alone = Alone::start().await;
    let cluster = &alone.space;
    // One of the samples names a ServiceAccount.
    let namespace =
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}});
    cluster.apply_all(&[namespace]).await;
    let objects = chart::objects(&["allow.serviceAccount=true"]);
    cluster.apply_all(&objects).await;
    assert_eq!(objects.len(), 18);
    // Applying it again succeeds and changes nothing.
    let generation = |object: &Value| object["metadata"]["generation"].clone();
    for object in objects {
        let before = cluster.api.get(&cluster.path_to(&object)).await;
        let after = cluster.apply_object(&object).await.unwrap();
        assert_eq!(generation(&before.unwrap()), generation(&after), "{object}");
    }
    let samples = samples();
    assert_eq!(samples.len(), 11);
    for object in samples {
        let applied = cluster.apply_object(&object).await;
        let applied = applied.unwrap_or_else(|e| panic!("{}: {e}", name(&object)));
        assert!(applied["metadata"]["uid"].is_string());
        // The controller accepts it, too. With the default permissions, it refuses only the sample `gcs`.
        if kind(&object) == "EtcdBackupPolicy" {
            let policy = serde_json::from_value(applied).unwrap();
            let problems = deltafold::controller::jobs::problems(&policy);
            assert_eq!(problems, Vec::<String>::new(), "{}", name(&object));
            let settings = Settings::new("deltafold:1");
            let forbidden = Allowed::default().problems(&policy, &settings);
            assert_eq!(
                forbidden.is_empty(),
                name(&object) != "gcs",
                "{forbidden:?}"
            );
        }
    }
    // The namespace can be read.
    let view = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": cluster.name}});
    assert!(cluster.api.get(&cluster.path_to(&view)).await.is_some());
    // The columns of `kubectl get`.
    let columns = crds().into_iter().flat_map(|crd| crd.spec.versions);
    let columns = columns.map(|v| v.additional_printer_columns.unwrap_or_default().len());
    assert_eq!(columns.collect::<Vec<_>>(), [14, 5]);
}

/// What is refused, and with which of our sentences.
#[tokio::test(flavor = "multi_thread")]
async fn wrong_objects_are_refused_in_our_words() {
    let alone = Alone::start().await;
    let cluster = &alone.space;
    cluster.apply_all(&chart::crds()).await;
    let s3 = json!({"url": "s3://b/p"});
    let live = json!({"endpoints": ["http://etcd:2379"]});
    let policies = [
        (json!({}), "spec.store"),
        (json!({"store": {"url": ""}}), "at least 1 chars long"),
        (
            json!({"store": {"url": "b/p"}}),
            "give a URL such as s3://bucket/prefix",
        ),
        (json!({"store": {"url": "/b"}}), "needs a volume"),
        (
            json!({"store": {"url": "s3://b", "volume": {"hostPath": "/b"}}}),
            "needs a volume",
        ),
        (
            json!({"store": {"url": "/b", "volume": {}}}),
            "give either persistentVolumeClaim or hostPath",
        ),
        (
            json!({"store": {"url": "/b", "volume": {"hostPath": "/b", "persistentVolumeClaim": "c"}}}),
            "give either persistentVolumeClaim or hostPath",
        ),
        (
            json!({"store": s3, "snapshot": {"fullSchedule": "@daily"}}),
            "snapshots need etcd.endpoints",
        ),
        (
            json!({"store": s3, "snapshot": {"follow": {}}}),
            "snapshots need etcd.endpoints",
        ),
        (
            json!({"store": s3, "etcd": live, "snapshot": {"deltaSchedule": "@hourly", "follow": {}}}),
            "give either deltaSchedule or follow",
        ),
        (
            json!({"store": s3, "maintenance": {"schedule": "@daily", "defrag": "always"}}),
            "maintenance needs etcd.endpoints",
        ),
        (
            json!({"store": s3, "etcd": live, "maintenance": {"schedule": "@daily"}}),
            "maintenance.defrag: Required value",
        ),
        (
            json!({"store": s3, "verify": {"schedule": "@daily", "againstCluster": true}}),
            "verify.againstCluster needs etcd.endpoints",
        ),
        (
            json!({"store": s3, "etcd": {"endpoints": []}}),
            "at least 1 items",
        ),
        (
            json!({"store": s3, "etcd": {"endpoints": ["etcd:2379"]}}),
            "as a URL such as",
        ),
        (
            json!({"store": s3, "etcd": {"endpoints": ["https://a:1,https://b:1"]}}),
            "an endpoint of its own",
        ),
        (
            json!({"store": s3, "etcd": {"endpoints": ["http://a:1"], "tlsSecretRef": {"name": "tls"}}}),
            "without TLS",
        ),
        (
            json!({"store": {"url": "s3://b", "secretRef": {"name": "../../bin"}}}),
            "not a valid name of a Secret",
        ),
        (
            json!({"store": s3, "etcd": live, "snapshot": {"leasePrefix": "Main"}}),
            "cannot begin the name of a Lease",
        ),
        (
            json!({"store": s3, "etcd": live, "snapshot": {"fullSchedule": "every night"}}),
            "give a cron schedule of five fields",
        ),
        (
            json!({"store": s3, "verify": {"schedule": "daily"}}),
            "give a cron schedule of five fields",
        ),
        (
            json!({"store": s3, "compaction": {"eventsThreshold": 0}}),
            "greater than or equal to 1",
        ),
        (
            json!({"store": s3, "compaction": {"activeDeadline": "soon"}}),
            "activeDeadline",
        ),
        (
            json!({"store": s3, "compaction": {"sizeThreshold": "1.5Gi"}}),
            "sizeThreshold",
        ),
        (
            json!({"store": s3, "compaction": {"keepHistory": "some"}}),
            "keepHistory",
        ),
        (
            json!({"store": s3, "retention": {"policy": "All"}}),
            "supported values",
        ),
        (json!({"store": s3, "unknown": 1}), "unknown"),
    ];
    let mut seen = 0;
    for (spec, says) in &policies {
        let object = json!({"apiVersion": "deltafold.io/v1alpha1", "kind": "EtcdBackupPolicy",
            "metadata": {"name": "bad"}, "spec": spec});
        let refused = cluster.apply_object(&object).await.unwrap_err().message();
        assert!(refused.contains(says), "{spec}: {refused}");
        seen += 1;
    }
    let long = json!({"apiVersion": "deltafold.io/v1alpha1", "kind": "EtcdBackupPolicy",
        "metadata": {"name": "n".repeat(41)}, "spec": {"store": s3}});
    let refused = cluster.apply_object(&long).await.unwrap_err().message();
    assert!(refused.contains("at most 40 characters"), "{refused}");

    let of =
        |type_: &str, config: Value| json!({"policy": "main", "type": type_, "config": config});
    let tasks = [
        (json!({"type": "Verify"}), "spec.policy"),
        (
            json!({"policy": "main", "type": "Other"}),
            "supported values",
        ),
        (
            json!({"policy": "main", "type": "Restore"}),
            "Restore needs config.restore",
        ),
        (
            of(
                "Restore",
                json!({"restore": {"claimName": "x", "subPath": "a/../.."}}),
            ),
            "below the root",
        ),
        (
            of("CopyBackups", json!({"copyBackups": {}})),
            "give sourceStore, targetStore, or both",
        ),
        (
            json!({"policy": "main", "type": "OnDemandSnapshot"}),
            "needs config.onDemandSnapshot",
        ),
        (
            of("CopyBackups", json!({})),
            "CopyBackups needs config.copyBackups",
        ),
        (
            of("Maintenance", json!({})),
            "Maintenance needs config.maintenance",
        ),
        (
            of("Maintenance", json!({"maintenance": {}})),
            "maintenance.defrag: Required value",
        ),
        (
            of(
                "OnDemandSnapshot",
                json!({"onDemandSnapshot": {"type": "delta", "final": true}}),
            ),
            "only a full snapshot can be final",
        ),
        (
            of("Verify", json!({"restore": {"claimName": "c"}})),
            "config.restore is for the type Restore",
        ),
        (
            of("Verify", json!({"onDemandCompaction": {}})),
            "config.onDemandCompaction is for the type OnDemandCompaction",
        ),
        (
            of(
                "Restore",
                json!({"restore": {"claimName": "c"}, "verify": {}}),
            ),
            "config.verify is for the type Verify",
        ),
        (
            of(
                "Restore",
                json!({"restore": {"claimName": "c", "revision": 1, "time": "2026-11-20T12:00:00Z"}}),
            ),
            "give either revision or time",
        ),
        (
            of(
                "Restore",
                json!({"restore": {"claimName": "c", "subPath": "/etc"}}),
            ),
            "subPath",
        ),
        (
            json!({"policy": "main", "type": "Verify", "ttlSecondsAfterFinished": -1}),
            "ttlSecondsAfterFinished",
        ),
    ];
    for (spec, says) in &tasks {
        let object = json!({"apiVersion": "deltafold.io/v1alpha1", "kind": "EtcdBackupTask",
            "metadata": {"name": "bad"}, "spec": spec});
        let refused = cluster.apply_object(&object).await.unwrap_err().message();
        assert!(refused.contains(says), "{spec}: {refused}");
        seen += 1;
    }
    assert_eq!(seen, 43);
    // A task cannot be changed.
    let mut task = json!({"apiVersion": "deltafold.io/v1alpha1", "kind": "EtcdBackupTask",
        "metadata": {"name": "good"}, "spec": {"policy": "main", "type": "Verify"}});
    cluster.apply_object(&task).await.unwrap();
    task["spec"]["policy"] = "other".into();
    let refused = cluster.apply_object(&task).await.unwrap_err().message();
    assert!(
        refused.contains("a task's spec cannot be changed"),
        "{refused}"
    );
}
