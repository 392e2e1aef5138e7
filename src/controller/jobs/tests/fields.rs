//! Tests that every field of a policy and of a task changes some object: none is forgotten.

use super::*;

/// Returns all objects of a policy and its tasks as JSON.
fn all_objects(policy: &EtcdBackupPolicy) -> Value {
    let settings = settings();
    let job = |instead| {
        let none = BTreeMap::new();
        compaction_job(policy, &settings, "job", instead, none).unwrap()
    };
    json!({
        "cron": cron_jobs(policy, &settings, Postponed::default()).unwrap(),
        "follower": follower(policy, &settings).unwrap(),
        "account": service_account_name(policy),
        "leases": leases(policy),
        "compaction": job(false),
        "instead": job(true),
        "tasks": tasks().iter().map(|t| task_job(policy, &task(t), &settings).unwrap()).collect::<Vec<_>>(),
    })
}

/// Adds the paths of all fields of a schema that have no fields of their own. Kubernetes' own objects count
/// as one field.
fn leaves(schema: &Value, at: &str, paths: &mut BTreeSet<String>) {
    const KUBERNETES: [&str; 2] = ["resources", "tolerations"];
    let name = at.rsplit('.').next().unwrap();
    match schema["properties"].as_object() {
        Some(properties) if !KUBERNETES.contains(&name) => {
            for (key, value) in properties {
                let dot = if at.is_empty() { "" } else { "." };
                leaves(value, &format!("{at}{dot}{key}"), paths);
            }
        }
        _ => {
            paths.insert(at.to_owned());
        }
    }
}

fn all_leaves(crd: usize) -> BTreeSet<String> {
    let crd = serde_json::to_value(&crds()[crd]).unwrap();
    let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let mut paths = BTreeSet::new();
    leaves(&schema["properties"]["spec"], "", &mut paths);
    paths
}

/// Collects the paths of the texts, lists and maps without a limit, or with one above 4096.
fn unlimited(schema: &Value, at: &str, paths: &mut Vec<String>) {
    let limit = match schema["type"].as_str() {
        Some("string") => Some("maxLength"),
        Some("array") => Some("maxItems"),
        Some("object") if schema["properties"].is_null() => Some("maxProperties"),
        _ => None,
    };
    if limit.is_some_and(|name| schema[name].as_u64().is_none_or(|n| n > 4096)) {
        paths.push(at.to_owned());
    }
    for part in ["items", "additionalProperties"] {
        if schema[part].is_object() {
            unlimited(&schema[part], &format!("{at}.{part}"), paths);
        }
    }
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        unlimited(field, &format!("{at}.{name}"), paths);
    }
}

#[test]
fn every_text_list_and_map_of_a_spec_has_a_limit() {
    for crd in crds() {
        let crd = serde_json::to_value(crd).unwrap();
        let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        let mut paths = Vec::new();
        unlimited(&schema["properties"]["spec"], "spec", &mut paths);
        assert!(paths.is_empty(), "{paths:?}");
    }
}

#[test]
fn every_policy_field_changes_an_object() {
    let changes: [(MakeSpec, &str, Value); 54] = [
        (rich, "etcd.endpoints", json!(["https://etcd-0:2379"])),
        (rich, "etcd.tlsSecretRef.name", json!("other")),
        (rich, "etcd.authSecretRef.name", json!("other")),
        (rich, "store.url", json!("s3://backups/other")),
        (rich, "store.secretRef.name", json!("other")),
        (rich, "store.options", json!({"region": "us-east-1"})),
        (local, "store.volume.persistentVolumeClaim", json!("other")),
        (local, "store.volume.hostPath", json!("/srv")),
        (rich, "encryption.recipients", json!([])),
        (rich, "encryption.identitySecretRef.name", json!("other")),
        (rich, "snapshot.fullSchedule", json!("1 3 * * *")),
        (rich, "snapshot.deltaSchedule", json!("*/6 * * * *")),
        (following, "snapshot.follow.deltaPeriod", json!("2m")),
        (following, "snapshot.follow.deltaBytes", json!("65Mi")),
        (following, "snapshot.fullSchedule", json!("0 3 * * *")),
        (rich, "snapshot.timeZone", json!("Europe/Paris")),
        (rich, "snapshot.compression", json!("none")),
        (rich, "snapshot.leasePrefix", json!("other")),
        (rich, "snapshot.args", json!([])),
        (rich, "compaction.args", json!([])),
        (rich, "retention.args", json!([])),
        (rich, "verify.args", json!([])),
        (rich, "maintenance.args", json!([])),
        (rich, "compaction.activeDeadline", json!("4h")),
        (rich, "compaction.keepHistory", json!("all")),
        (rich, "compaction.resources", json!({})),
        (rich, "retention.policy", json!("Exponential")),
        (rich, "retention.limit", json!(6)),
        (rich, "retention.deltaRetention", json!("1w")),
        (rich, "retention.restorableWindow", json!("4d")),
        (rich, "retention.schedule", json!("12 */6 * * *")),
        (rich, "verify.schedule", json!("1 5 * * *")),
        (rich, "verify.level", json!("names")),
        (rich, "verify.againstCluster", json!(false)),
        (
            rich,
            "verify.drill.etcdImage",
            json!("registry.example/etcd:3.6"),
        ),
        (rich, "maintenance.schedule", json!("1 4 * * 0")),
        (rich, "maintenance.defrag", json!("always")),
        (rich, "jobTemplate.image", json!("other")),
        (rich, "jobTemplate.imagePullPolicy", json!("Never")),
        (rich, "jobTemplate.resources", json!({})),
        (rich, "jobTemplate.serviceAccountName", json!("own")),
        (rich, "jobTemplate.nodeSelector", json!({})),
        (rich, "jobTemplate.tolerations", json!([])),
        (rich, "jobTemplate.priorityClassName", json!("other")),
        (rich, "jobTemplate.labels", json!({"team": "other"})),
        (rich, "jobTemplate.metricsScrapeWait", json!("91s")),
        (rich, "jobTemplate.hostNetwork", json!(true)),
        (rich, "jobTemplate.scratchSize", json!("21Gi")),
        (rich, "jobTemplate.maxDatabaseSize", json!("7Gi")),
        (following, "jobTemplate.maxDatabaseSize", json!("7Gi")),
        (rich, "jobTemplate.maxValueSize", json!("8Mi")),
        (rich, "suspend", json!(true)),
        (following, "suspend", json!(true)),
        (following, "jobTemplate.hostNetwork", json!(true)),
    ];
    // These decide when a Job is created, not its contents.
    let threshold_fields = [
        "compaction.enabled",
        "compaction.eventsThreshold",
        "compaction.sizeThreshold",
        "compaction.ageThreshold",
        "compaction.fullSnapshotThreshold",
    ];
    let mut tested: BTreeSet<String> = threshold_fields.map(str::to_owned).into();
    for (base, path, value) in changes {
        let before = all_objects(&policy(&base()));
        let after = all_objects(&policy(&with(&base(), path, &value)));
        assert_ne!(before, after, "{path}");
        tested.insert(path.to_owned());
    }
    assert_eq!(tested, all_leaves(0));
}

#[test]
fn every_task_field_changes_its_job() {
    let changes = [
        (0, "onDemandSnapshot.type", json!("delta")),
        (0, "onDemandSnapshot.final", json!(false)),
        (1, "onDemandCompaction.revision", json!(78)),
        (1, "onDemandCompaction.keepHistory", json!("all")),
        (2, "copyBackups.sourceStore.url", json!("gs://other")),
        (2, "copyBackups.sourceStore.secretRef.name", json!("other")),
        (2, "copyBackups.sourceStore.options", json!({})),
        (2, "copyBackups.targetStore.url", json!("file:///other")),
        (2, "copyBackups.targetStore.secretRef.name", json!("other")),
        (2, "copyBackups.targetStore.options", json!({"k": "v"})),
        (2, "copyBackups.targetStore.volume.hostPath", json!("/srv")),
        (
            2,
            "copyBackups.targetStore.volume.persistentVolumeClaim",
            json!("claim"),
        ),
        (2, "copyBackups.maxBackups", json!(4)),
        (2, "copyBackups.maxBackupAge", json!(31)),
        (2, "copyBackups.waitForFinalSnapshot.enabled", json!(false)),
        (2, "copyBackups.waitForFinalSnapshot.timeout", json!("2h")),
        (3, "restore.claimName", json!("other")),
        (3, "restore.subPath", json!("other")),
        (3, "restore.revision", json!(42)),
        (3, "restore.time", json!("2026-11-20T12:00:00Z")),
        (3, "restore.name", json!("other")),
        (3, "restore.initialCluster", json!("a=http://other:2380")),
        (3, "restore.initialClusterToken", json!("other")),
        (
            3,
            "restore.initialAdvertisePeerUrls",
            json!("http://o:2380"),
        ),
        (3, "restore.runAsUser", json!(1001)),
        (4, "verify.level", json!("fold")),
        (4, "verify.againstCluster", json!(false)),
        (5, "maintenance.defrag", json!("0.1")),
        (6, "garbageCollection.allowShrink", json!(false)),
    ];
    let policy = policy(&rich());
    let settings = settings();
    let job_of = |spec: &Value| {
        let job = task_job(&policy, &task(spec), &settings).unwrap();
        serde_json::to_value(job).unwrap()
    };
    // These are read by the controller only.
    let other_fields = ["policy", "type", "startDeadline", "ttlSecondsAfterFinished"];
    // Tested with the target store.
    let source_volume = ["hostPath", "persistentVolumeClaim"];
    let source_volume = source_volume.map(|v| format!("config.copyBackups.sourceStore.volume.{v}"));
    let mut tested: BTreeSet<String> = other_fields.map(str::to_owned).into();
    tested.extend(source_volume);
    for base in tasks() {
        assert_ne!(job_of(&base), job_of(&with(&base, "args", &json!(["x"]))));
    }
    tested.insert("args".to_owned());
    for (base, path, value) in changes {
        let base = &tasks()[base];
        let path = format!("config.{path}");
        assert_ne!(job_of(base), job_of(&with(base, &path, &value)), "{path}");
        tested.insert(path);
    }
    assert_eq!(tested, all_leaves(1));
}
